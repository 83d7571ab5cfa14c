# Others lock what the worker needs: it cleans what it can, other databases do not wait for it, and
# what nobody can clean for a minute is reported.

use strict;
use warnings;

use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(sleep time);

use Client;

my $conf = q{
shared_preload_libraries = 'idem'
idem.cleanup_interval = '100ms'
max_logical_replication_workers = 0
};
my $node = PostgreSQL::Test::Cluster->new('main');
$node->init;
$node->append_conf('postgresql.conf', $conf);
$node->start;

# The launcher takes the only slot.
my $full = PostgreSQL::Test::Cluster->new('full');
$full->init;
$full->append_conf('postgresql.conf', "$conf\nmax_worker_processes = 1\n");
$full->start;

# Mallory owns databases. The stranger has no right but CONNECT and TEMP.
$node->safe_psql('postgres', 'CREATE ROLE stranger LOGIN; CREATE ROLE mallory LOGIN');

sub create_database
{
	my ($server, $database) = @_;
	$server->safe_psql('postgres', "CREATE DATABASE $database");
	$server->safe_psql($database, q{
		CREATE EXTENSION idem;
		INSERT INTO idem_scopes (scope, ttl) VALUES ('short', '1 ms')});
	return;
}

# A session of that role
sub session
{
	my ($role, $database, @statements) = @_;
	local $ENV{PGUSER} = $role if $role ne '';
	my $session = Client->new($node, $database);
	is($session->ask($_), '', "$role: $_") for @statements;
	return $session;
}

# Whether a query becomes true in time. Asks in a session of its own, unless one is given.
sub is_true_within
{
	my ($seconds, $database, $query, $session) = @_;
	my $end = time + $seconds;
	$session //= Client->new($node, $database);
	while (time < $end)
	{
		return 1 if $session->ask("SELECT $query") eq 't';
		sleep 0.1;
	}
	return 0;
}

my $claims = 0;

# Checks that a claim is removed that has expired just now.
sub is_cleaned_within
{
	my ($seconds, $database, $name) = @_;
	my $request = 'request ' . ++$claims;
	$node->safe_psql($database, "SELECT idem_claim('user', '$request', 'short')");
	ok(is_true_within($seconds, $database, "NOT EXISTS (SELECT FROM idem_claims WHERE request_id = '$request')"), $name);
	return;
}

create_database($node, $_) for qw(shop closed catalog dropped);
create_database($full, 'shop');
is_cleaned_within(60, $_, "$_: cleaned to begin with") for qw(shop closed catalog dropped);

# ----- what lasts for more than a minute; it is looked at in the end -----

$full->safe_psql('shop', q{SELECT idem_claim('user', 'a', 'short')});

# PostgreSQL locks a database before it looks at rights. Nobody can connect then, so the sessions that
# look are here already.
my $looks = Client->new($node, 'closed');
my $weak = session('stranger', 'postgres', 'BEGIN', "ALTER ROLE stranger IN DATABASE closed SET work_mem = '4MB'");
my $waits;
{
	local $ENV{PGUSER} = 'stranger';
	$waits = Client->new($node, 'postgres');
}
$waits->send('ALTER DATABASE closed RENAME TO mine');
my $locked = q{EXISTS (SELECT FROM pg_locks WHERE locktype = 'object' AND classid = 'pg_database'::regclass AND mode = 'AccessExclusiveLock' AND NOT granted)};
ok(is_true_within(60, 'postgres', $locked), 'a stranger waits for the lock of a database');
is($looks->ask(q{SELECT idem_claim('user', 'a', 'short')}), 't', 'sessions that are there claim');

# Workers wait for it before they know where they are.
my $catalog = session('', 'catalog', 'BEGIN', 'LOCK TABLE pg_class');

# ----- the extension -----

my $stranger = session('stranger', 'shop', 'BEGIN',
	q{CREATE FUNCTION pg_temp.f() RETURNS int LANGUAGE sql AS 'SELECT 1'},
	'ALTER FUNCTION pg_temp.f() DEPENDS ON EXTENSION idem');
is_cleaned_within(20, 'shop', 'a stranger has locked the extension');
$stranger->ask('COMMIT');
$stranger->quit;

# ----- weak locks, and locks of what no batch needs -----

my $view = $node->safe_psql('shop', q{SELECT 'idem_metrics'::regclass::oid});
$stranger = session('stranger', 'shop', 'BEGIN');
isnt($stranger->ask("SELECT pg_get_viewdef($view)"), '', 'a stranger has weak locks');
my $owner = session('', 'shop', 'BEGIN', 'ALTER SEQUENCE idem_token_seq CACHE 1', 'LOCK TABLE idem_scopes');
$node->safe_psql('shop', q{INSERT INTO idem_claims (expires_at, state, request_id, user_id, scope) VALUES ('2001-01-01', 'completed', 'early', 'user', '')});
$node->reload;
ok(is_true_within(20, 'shop', q{NOT EXISTS (SELECT FROM idem_claims WHERE request_id = 'early')}), 'the sequence and the policies are locked');
$_->ask('ROLLBACK') for ($stranger, $owner);
$_->quit for ($stranger, $owner);
is($node->safe_psql('shop', 'SELECT errors FROM idem_stat_cleanup'), 0, 'none of that was an error');

# ----- the tables -----

# The worker asks for the policy of a lease.
my $lease = q{INSERT INTO idem_claims (expires_at, lease_until, token, state, request_id, user_id, scope)
	VALUES ('2001-01-01', '2001-01-01', 1, 'in_progress', clock_timestamp(), 'user', '')};
for my $lock ('idem_scopes', 'idem_claims IN SHARE MODE')
{
	my $log = -s $node->logfile;
	$node->safe_psql('shop', 'SELECT idem_stat_reset()');
	$owner = session('', 'shop', 'BEGIN', "LOCK TABLE $lock", $lease);
	$node->safe_psql('shop', $lease) if $lock eq 'idem_scopes';
	$node->reload;
	ok(is_true_within(60, 'shop', q{errors > 0 AND last_error = 'canceling statement due to lock timeout' FROM idem_stat_cleanup}), "$lock: reported");
	like(slurp_file($node->logfile, $log), qr/ERROR:  canceling statement due to lock timeout\n.*HINT: .*\n.*CONTEXT:  removing expired claims in database "shop"/, 'in the log, too');
	$owner->ask('COMMIT');
	$owner->quit;
	$node->reload;
	is_cleaned_within(60, 'shop', 'and tried again');
}
is($node->safe_psql('shop', 'SELECT count(*) FROM idem_claims'), 0, 'all is cleaned');

# ----- the extension is dropped -----

$owner = session('', 'dropped', 'BEGIN', 'DROP EXTENSION idem');
my $log = -s $node->logfile;
$node->reload;
ok(is_true_within(60, 'postgres', q{EXISTS (SELECT FROM pg_stat_activity WHERE backend_type = 'idem worker' AND datname = 'dropped' AND wait_event_type = 'Lock')}),
	'a worker waits behind DROP EXTENSION');
is($owner->ask('COMMIT'), '', 'which commits');
ok(is_true_within(60, 'postgres', q{NOT EXISTS (SELECT FROM pg_stat_activity WHERE backend_type = 'idem worker' AND datname = 'dropped')}), 'the worker leaves');
unlike(slurp_file($node->logfile, $log), qr/removing expired claims in database "dropped"/, 'without an error');

# ----- three owners try to keep the three workers -----

my @mine = map { "mine_$_" } 1 .. 3;
for my $database (@mine)
{
	$node->safe_psql('postgres', "CREATE DATABASE $database OWNER mallory");
	session('mallory', $database, 'SET client_min_messages = error', 'CREATE EXTENSION idem', q{
		INSERT INTO idem_claims (expires_at, lease_until, token, state, request_id, user_id, scope)
		SELECT '2001-01-01', '2001-01-01', i, 'in_progress', i, 'user', 'scope ' || i FROM generate_series(1, 500) i})->quit;
}
for my $table ('idem_scopes', 'idem_claims')
{
	my @attackers = map { session('mallory', $_) } @mine;
	$_->send("DO 'BEGIN LOOP LOCK TABLE $table; PERFORM pg_sleep(4); COMMIT; END LOOP; END'") for @attackers;
	ok(is_true_within(60, $_, "EXISTS (SELECT FROM pg_locks WHERE relation = '$table'::regclass AND mode = 'AccessExclusiveLock' AND granted AND database = (SELECT oid FROM pg_database WHERE datname = current_database()))"),
		"$_: $table is locked again and again") for @mine;
	$node->reload;
	is_cleaned_within(30, 'shop', "another database is cleaned, time $_") for 1 .. 3;
	$node->safe_psql('postgres', 'SELECT pg_terminate_backend(' . $_->pid . ')') for @attackers;
	$_->answer for @attackers;
}
ok(is_true_within(60, $_, 'NOT EXISTS (SELECT FROM idem_claims)'), "$_: cleaned when it is not locked any more") for @mine;

# ----- after a minute -----

for (
	[ 'closed', 'another session has locked it', $looks ],
	[ 'catalog', 'its workers find locks in the way, or cannot connect', $catalog ])
{
	my ($database, $reason, $session) = @$_;
	ok(is_true_within(120, $database, "errors > 0 AND last_error LIKE 'no worker could clean database \"$database\" since %: $reason' FROM idem_stat_cleanup", $session),
		"$database: reported after a minute");
	is($session->ask(q{SELECT last_error_at IS NOT NULL FROM idem_stat_cleanup}), 't', 'with its time');
	is($session->ask(q{SELECT value > 0 FROM idem_metrics WHERE name = 'idem_cleanup_errors_total'}), 't', 'and in the metric of the alert');
	like(slurp_file($node->logfile), qr/WARNING:  no worker could clean database "$database" since .*: $reason\n.*DETAIL: .*\n.*HINT: /, 'and in the log');
}
ok($full->poll_query_until('shop', q{SELECT errors > 0 AND last_error LIKE '%: no background worker slot is free' FROM idem_stat_cleanup}), 'so is that no slot is free');

$weak->ask('ROLLBACK');
is($waits->answer, 'ERROR:  42501', 'the stranger may not rename a database');
$catalog->ask('COMMIT');
# It ends the pause after failures.
$node->reload;
is_cleaned_within(60, $_, "$_: cleaned again") for ('closed', 'catalog');
$_->quit for ($weak, $waits, $looks, $catalog);

$_->stop for ($node, $full);
unlike(slurp_file($node->logfile), qr/leak|TRAP|PANIC/, 'nothing leaked');
done_testing();
