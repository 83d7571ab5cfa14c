# A holder is paused until its lease has lapsed, is replaced, and then goes on. Its writes after
# idem_fence() are refused; without the fence they are a second execution.

use strict;
use warnings;

use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

use Client;

my $node = PostgreSQL::Test::Cluster->new('main');
$node->init;
$node->append_conf('postgresql.conf', q{
shared_preload_libraries = 'idem'
idem.cleanup_databases = 'nothing'
idem.wait = '10 min'
});
$node->start;
$node->safe_psql('postgres', q{
CREATE EXTENSION idem;
CREATE TABLE payments (request text, paid_by text);
});

my $old = Client->new($node);
my $new = Client->new($node);

sub query
{
	my ($query) = @_;
	return $node->safe_psql('postgres', $query);
}

sub take
{
	my ($client, $request, $lease) = @_;
	$lease //= '1 hour';
	return $client->ask("SELECT token FROM idem_lease('user', '$request', lease => '$lease')");
}

sub pay
{
	my ($client, $request, $who) = @_;
	return $client->ask("INSERT INTO payments VALUES ('$request', '$who')");
}

# Takes a short lease, and waits until it has lapsed
sub take_and_pause
{
	my ($request) = @_;
	my $token = take($old, $request, '1 ms');
	$node->poll_query_until('postgres',
		"SELECT lease_until < clock_timestamp() FROM idem_claims WHERE request_id = '$request'")
	  or die 'lease does not end';
	return $token;
}

# ----- without the fence -----

my $token = take_and_pause('unfenced');
my $token2 = take($new, 'unfenced');
cmp_ok($token2, '>', $token, 'the lease is taken over, with a higher token');
pay($new, 'unfenced', 'new');
is($new->ask("SELECT idem_complete('user', 'unfenced', '\"new\"', $token2)"), 't', 'the new holder completes');
# The old holder wakes up in the middle of its work.
pay($old, 'unfenced', 'old');
is($old->ask("SELECT idem_complete('user', 'unfenced', '\"old\"', $token)"),
	'ERROR:  ID410', 'the old holder cannot complete');
is(query("SELECT string_agg(paid_by, ', ' ORDER BY paid_by) FROM payments WHERE request = 'unfenced'"),
	'new, old', 'but without a fence it has paid again');

# ----- with the fence -----

$token = take_and_pause('fenced');
$token2 = take($new, 'fenced');
$new->ask('BEGIN');
is($new->ask("SELECT idem_fence('user', 'fenced', $token2)"), '', 'the new holder passes the fence');
pay($new, 'fenced', 'new');
# The old holder wakes up while the new one works.
$old->ask('BEGIN');
is($old->ask("SELECT idem_fence('user', 'fenced', $token)"), 'ERROR:  ID410', 'the old one does not, at once');
is(pay($old, 'fenced', 'old'), 'ERROR:  25P02', 'and cannot pay');
$old->ask('COMMIT');
$new->ask('COMMIT');
$new->ask("BEGIN; SELECT idem_fence('user', 'fenced', $token2)");
is($new->ask("SELECT idem_complete('user', 'fenced', '\"new\"', $token2); COMMIT"),
	't', 'the new holder completes in the transaction that it fenced');
is(query("SELECT string_agg(paid_by, ', ') FROM payments WHERE request = 'fenced'"), 'new', 'it was paid once');

# A transaction that ends with idem_complete() needs no fence.
$token = take_and_pause('completed');
$token2 = take($new, 'completed');
$old->ask('BEGIN');
pay($old, 'completed', 'old');
is($old->ask("SELECT idem_complete('user', 'completed', '\"old\"', $token)"),
	'ERROR:  ID410', 'who completes in the transaction of its work');
$old->ask('COMMIT');
is(query("SELECT count(*) FROM payments WHERE request = 'completed'"), 0, 'has not worked if it lost the lease');

# The lease has lapsed, and no session has taken it over: the token still counts.
$token = take_and_pause('late');
$old->ask('BEGIN');
is($old->ask("SELECT idem_fence('user', 'late', $token)"), '', 'a late holder that nobody replaced passes the fence');
$new->send("SELECT outcome, result FROM idem_lease('user', 'late', lease => '1 hour')");
ok( $node->poll_query_until('postgres', "SELECT wait_event_type = 'Lock' FROM pg_stat_activity WHERE pid = " . $new->pid),
	'and who wants the lease waits for its commit');
pay($old, 'late', 'old');
is($old->ask("SELECT idem_complete('user', 'late', '\"old\"', $token)"), 't', 'it completes');
$old->ask('COMMIT');
is($new->answer, 'completed|"old"', 'and the other has its result');
is(query("SELECT string_agg(paid_by, ', ') FROM payments WHERE request = 'late'"), 'old', 'paid once');

# A fence protects one transaction: between two transactions the lease can be taken over.
$token = take_and_pause('twice');
is($old->ask("BEGIN; SELECT idem_fence('user', 'twice', $token); INSERT INTO payments VALUES ('twice', 'old, part 1'); COMMIT"),
	'', 'a first transaction of the work');
$token2 = take($new, 'twice');
is($old->ask("BEGIN; SELECT idem_fence('user', 'twice', $token); INSERT INTO payments VALUES ('twice', 'old, part 2'); COMMIT"),
	"ERROR:  ID410\nERROR:  25P02", 'the second is refused');
is(query("SELECT string_agg(paid_by, ', ') FROM payments WHERE request = 'twice'"), 'old, part 1',
	'and has written nothing');

# ----- heartbeats -----

$token = take_and_pause('heartbeat');
$token2 = take($new, 'heartbeat', '1 hour');
my $row = query(q{SELECT c.ctid, c.xmin, c FROM idem_claims c WHERE request_id = 'heartbeat'});
is($old->ask("SELECT idem_extend('user', 'heartbeat', $token, '10 hours', '\"old\"')"),
	'ERROR:  ID410', 'a heartbeat of the old holder is refused');
is(query(q{SELECT c.ctid, c.xmin, c FROM idem_claims c WHERE request_id = 'heartbeat'}),
	$row, "and does not touch the new holder's lease");
# The same while the takeover is not committed, in either order
$token = take_and_pause('in flight');
$new->ask('BEGIN');
$token2 = take($new, 'in flight', '1 hour');
$old->send("SELECT idem_extend('user', 'in flight', $token, '10 hours')");
ok( $node->poll_query_until('postgres', "SELECT wait_event_type = 'Lock' FROM pg_stat_activity WHERE pid = " . $old->pid),
	'a heartbeat during the takeover waits');
$new->ask('COMMIT');
is($old->answer, 'ERROR:  ID410', 'and is refused');
is(query(q{SELECT lease_until < clock_timestamp() + interval '2 hours' FROM idem_claims WHERE request_id = 'in flight'}),
	't', 'the new lease is as long as it was');
# A heartbeat before the takeover keeps the lease, also if that has lapsed.
$token = take_and_pause('alive');
like($old->ask("SELECT idem_extend('user', 'alive', $token, '1 hour')"), qr/^\d{4}-/, 'a heartbeat before the takeover');
is($new->ask("SELECT outcome FROM idem_lease('user', 'alive', wait => '0', lease => '1 hour')"),
	'in_progress', 'prevents it');

# ----- a storm: many holders, always too late, one row each -----

# Each client claims a lease that lapses at once, and then works after a fence. A request is
# paid at most once, and by the client that completed it.
$node->safe_psql('postgres', q{
CREATE TABLE refused (request text);
CREATE PROCEDURE work(request text, client int) LANGUAGE plpgsql AS $$
DECLARE
	claim record;
BEGIN
	SELECT * INTO claim FROM idem_lease('user', request, wait => '0', lease => '1 us');
	COMMIT;
	IF claim.outcome <> 'claimed' THEN
		RETURN;
	END IF;
	BEGIN
		PERFORM idem_fence('user', request, claim.token);
		INSERT INTO payments VALUES (request, client);
		PERFORM idem_complete('user', request, to_jsonb(client::text), claim.token);
	EXCEPTION WHEN SQLSTATE 'ID410' THEN
		INSERT INTO refused VALUES (request);
	END;
END $$;
});
my $script = $node->basedir . '/work.sql';
append_to_file($script, "\\set request random(1, 200)\nCALL work('storm ' || :request, :client_id);\n");
$node->command_ok(
	[ 'pgbench', '-n', '-c', 8, '-t', 400, '--random-seed=20261121', '-f', $script, 'postgres' ],
	'a storm of holders that are too late');
is( query(q{SELECT count(*) FROM (SELECT FROM payments WHERE request LIKE 'storm %' GROUP BY request HAVING count(*) > 1) AS doubled}),
	0, 'nothing was paid twice');
is( query(q{
		SELECT count(*) FROM idem_claims FULL JOIN payments ON request = request_id
		WHERE coalesce(request, request_id) LIKE 'storm %'
			AND (state = 'completed') IS DISTINCT FROM (result = to_jsonb(paid_by))}),
	0, 'and what was paid was completed by who paid');

$old->quit;
$new->quit;
$node->stop;
unlike(slurp_file($node->logfile), qr/TRAP|PANIC|was terminated by signal|WARNING:.*leak/, 'nothing broke');

done_testing();
