# Failover to a subscriber of logical replication: with the claims in the publication of the work
# nothing is executed twice; without them, or in a subscription of their own, it is.

use strict;
use warnings;

use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = PostgreSQL::Test::Cluster->new('main');
$node->init(allows_streaming => 'logical');
$node->append_conf('postgresql.conf', q{
shared_preload_libraries = 'idem'
idem.cleanup_databases = 'nothing'
idem.cleanup_interval = '100ms'
max_wal_senders = 20
max_replication_slots = 20
max_logical_replication_workers = 10
max_worker_processes = 30
});
$node->start;

my ($publisher, $subscriber, $edition);

sub on
{
	my ($database, $query) = @_;
	return $node->safe_psql($database, $query);
}

sub make_database
{
	my ($database) = @_;
	on('postgres', "CREATE DATABASE $database");
	on($database, qq{
		CREATE EXTENSION $edition;
		CREATE TABLE payments (request text, amount int);
		CREATE FUNCTION pay(request text, amount int) RETURNS jsonb LANGUAGE plpgsql AS \$\$
		BEGIN
			INSERT INTO payments VALUES (request, amount);
			RETURN jsonb_build_object('paid', amount);
		END \$\$;
		CREATE FUNCTION pay_once(request text) RETURNS jsonb LANGUAGE sql AS \$\$
			SELECT idem_call('user', request, 'pay(text, int)', jsonb_build_object('request', request, 'amount', 3), wait => '0')
		\$\$;
	});
	return;
}

# subscribe NAME TABLES: a subscription of its own to these tables
sub subscribe
{
	my ($name, $tables) = @_;
	my $connection = 'host=' . $node->host . ' port=' . $node->port . " dbname=$publisher";

	on($publisher, "CREATE PUBLICATION $name FOR TABLE $tables; SELECT pg_create_logical_replication_slot('${publisher}_$name', 'pgoutput')");
	on($subscriber, "CREATE SUBSCRIPTION $name CONNECTION '$connection' PUBLICATION $name WITH (create_slot = false, slot_name = '${publisher}_$name', copy_data = false)");
	return;
}

sub catch_up
{
	my ($name) = @_;
	$node->wait_for_catchup($name, 'replay', $node->lsn('insert'));
	return;
}

# The publisher is gone: what it has not sent is lost.
sub fail_over
{
	for my $name (split /\n/, on($subscriber, q{SELECT subname FROM pg_subscription WHERE subdbid = (SELECT oid FROM pg_database WHERE datname = current_database())}))
	{
		on($subscriber, "ALTER SUBSCRIPTION $name DISABLE");
		on($subscriber, "ALTER SUBSCRIPTION $name SET (slot_name = NONE)");
		on($subscriber, "DROP SUBSCRIPTION $name");
		$node->poll_query_until('postgres', "SELECT NOT active FROM pg_replication_slots WHERE slot_name = '${publisher}_$name'")
		  or die 'the slot stays in use';
		on('postgres', "SELECT pg_drop_replication_slot('${publisher}_$name')");
	}
	return;
}

sub new_pair
{
	my ($name) = @_;
	($publisher, $subscriber) = ("${edition}_${name}_publisher", "${edition}_${name}_subscriber");
	make_database($_) for ($publisher, $subscriber);
	return;
}

for ('idem', 'idem_portable')
{
	$edition = $_;

	# ----- the claims with the work -----

	new_pair('together');
	subscribe('together', 'payments, idem_claims, idem_scopes');
	on($publisher, q{INSERT INTO idem_scopes (scope, ttl, lapsed) VALUES ('', '2 h', 'unknown')});
	on($publisher, "SELECT pay_once('sent')");
	my $token = on($publisher, "SELECT token FROM idem_lease('user', 'lease', lease => '1 h')");
	catch_up('together');
	on($subscriber, 'ALTER SUBSCRIPTION together DISABLE');
	$node->poll_query_until($subscriber, q{SELECT NOT EXISTS (SELECT FROM pg_stat_subscription WHERE subname = 'together' AND pid IS NOT NULL)}) or die;
	on($publisher, "SELECT pay_once('not sent')");
	fail_over();
	is(on($subscriber, "SELECT pay_once('sent')"), '{"paid": 3}', "$edition: after a failover a retry gets the stored answer");
	is(on($subscriber, "SELECT pay_once('not sent')"), '{"paid": 3}', "$edition: what was lost is executed");
	is(on($subscriber, 'SELECT request, count(*) FROM payments GROUP BY 1 ORDER BY 1'), "not sent|1\nsent|1", "$edition: each once");
	is(on($subscriber, "SELECT ttl, lapsed FROM idem_scopes"), '02:00:00|unknown', "$edition: the policy is there");
	is(on($subscriber, "SELECT outcome FROM idem_try_claim('user', 'lease', wait => '0')"), 'in_progress', "$edition: a lease is held");

	# Tokens: without the statement of doc/operations.md they repeat.
	my $repeated = on($subscriber, "BEGIN; SELECT token FROM idem_lease('user', 'other lease', lease => '1 h'); ROLLBACK");
	cmp_ok($repeated, '<=', $token, "$edition: the sequence of the tokens was not replicated");
	on($subscriber, q{SELECT setval('idem_token_seq', (SELECT greatest(max(token), 0) FROM idem_claims) + 1000000)});
	cmp_ok(on($subscriber, "SELECT token FROM idem_lease('user', 'other lease', lease => '1 h')"),
		'>', $token, "$edition: set as the documents say, tokens grow");
	is(on($subscriber, "SELECT idem_complete('user', 'lease', '1', $token)"), 't', "$edition: the holder of the lease settles it");

	# ----- the work alone -----

	new_pair('work');
	subscribe('work', 'payments');
	on($publisher, "SELECT pay_once('sent')");
	catch_up('work');
	fail_over();
	on($subscriber, "SELECT pay_once('sent')");
	is(on($subscriber, 'SELECT count(*) FROM payments'), 2, "$edition: without the claims a retry executes again");

	# ----- two subscriptions -----

	new_pair('two');
	subscribe('work', 'payments');
	subscribe('claims', 'idem_claims, idem_scopes');
	on($subscriber, 'ALTER SUBSCRIPTION claims DISABLE');
	on($publisher, "SELECT pay_once('sent')");
	catch_up('work');
	fail_over();
	on($subscriber, "SELECT pay_once('sent')");
	is(on($subscriber, 'SELECT count(*) FROM payments'), 2, "$edition: so it does if the claims' own subscription was behind");
}

# ----- who cleans the subscriber -----

$edition = 'idem';
new_pair('cleaned');
subscribe('cleaned', 'payments, idem_claims, idem_scopes');
on($publisher, q{INSERT INTO idem_scopes (scope, ttl) VALUES ('short', '1 ms')});
on($publisher, q{SELECT idem_claim('user', 'expired', 'short')});
catch_up('cleaned');
is(on($subscriber, 'SELECT count(*) FROM idem_claims'), 1, 'a claim is replicated');
ok($node->poll_query_until($publisher, 'SELECT idem_cleanup() = 1'), 'the publisher removes it');
catch_up('cleaned');
is(on($subscriber, 'SELECT count(*) FROM idem_claims'), 0, 'the subscriber follows');

# The subscriber is behind: it has not heard that the lease was extended.
my $token = on($publisher, q{SELECT token FROM idem_lease('user', 'long', scope => 'short', lease => '1 s')});
catch_up('cleaned');
on($subscriber, 'ALTER SUBSCRIPTION cleaned DISABLE');
$node->poll_query_until($subscriber, q{SELECT NOT EXISTS (SELECT FROM pg_stat_subscription WHERE subname = 'cleaned' AND pid IS NOT NULL)}) or die;
on($publisher, "SELECT idem_extend('user', 'long', $token, '1 h', scope => 'short')");
ok($node->poll_query_until($subscriber, q{SELECT greatest(expires_at, lease_until) < clock_timestamp() FROM idem_claims}), 'on the subscriber the claim looks expired');
on('postgres', "ALTER SYSTEM SET idem.cleanup_databases = '$subscriber'");
$node->reload;
ok($node->poll_query_until($subscriber, 'SELECT count(*) = 0 FROM idem_claims'), 'a worker there removes it');
on($subscriber, 'ALTER SUBSCRIPTION cleaned ENABLE');
catch_up('cleaned');
is(on($subscriber, 'SELECT count(*) FROM idem_claims'), 0, 'and replication does not bring it back: no worker may clean a subscriber');
fail_over();

$node->stop;
unlike(slurp_file($node->logfile), qr/leak|TRAP|PANIC|was terminated by signal/, 'nothing broke');

done_testing();
