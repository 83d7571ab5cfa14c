# The worker survives signals, errors, missing slots and crashes, and makes no command wait for
# long.

use strict;
use warnings;

use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $node;

sub create_extension
{
	my ($database) = @_;
	$node->safe_psql($database, q{
		CREATE EXTENSION idem;
		INSERT INTO idem_scopes (scope, ttl) VALUES ('short', '1 ms');
	});
}

# Waits until the query returns true
sub becomes
{
	my ($database, $query, $name) = @_;
	ok($node->poll_query_until($database, $query), $name);
}

my $cleaned = 0;

# Checks that the worker works: it removes a new claim once that has expired.
sub is_cleaned
{
	my ($database, $name) = @_;
	my $request = 'request ' . ++$cleaned;
	$node->safe_psql($database,
		"SELECT idem_claim('user', '$request', 'short')");
	becomes(
		$database,
		"SELECT NOT EXISTS (SELECT FROM idem_claims WHERE request_id = '$request')",
		$name);
}

# Inserts so many expired claims that a worker with batches of one row is busy for long.
# Returns the pid of that worker.
my $backlog_rows = 300_000;

sub make_backlog
{
	my ($database) = @_;
	my $worker = "FROM pg_stat_activity WHERE backend_type = 'idem worker' AND datname = '$database'";
	$node->safe_psql(
		$database, qq{
		TRUNCATE idem_claims;
		INSERT INTO idem_claims (expires_at, state, request_id, user_id, scope)
		SELECT '2001-01-01', 'completed', i, 'user', '' FROM generate_series(1, $backlog_rows) i;
	});
	$node->reload;
	becomes(
		'postgres',
		"SELECT EXISTS (SELECT $worker AND state = 'active')",
		"worker is at work in \"$database\"");
	return $node->safe_psql('postgres', "SELECT pid $worker");
}

# Checks that the worker ended because a command needed the database, and not because it had
# finished its work.
sub has_made_room
{
	my ($worker, $offset, $name) = @_;
	like(slurp_file($node->logfile, $offset),
		qr/\[$worker\] .*leaving: another session needs the database for itself/,
		$name);
}

sub set_and_reload
{
	my (%settings) = @_;
	$node->safe_psql('postgres', "ALTER SYSTEM SET $_ = $settings{$_}")
	  for (keys %settings);
	$node->reload;
}

my $launcher =
  q{SELECT pid FROM pg_stat_activity WHERE backend_type = 'idem launcher'};
my $worker_waits =
  q{SELECT pid FROM pg_stat_activity WHERE backend_type = 'idem worker' AND datname = 'postgres' AND wait_event_type = 'Lock'};

$node = PostgreSQL::Test::Cluster->new('main');
$node->init(allows_streaming => 1);
$node->append_conf(
	'postgresql.conf', q{
shared_preload_libraries = 'idem'
idem.cleanup_interval = '100ms'
});
$node->start;
create_extension('postgres');
is_cleaned('postgres', 'cleaned to begin with');

# ----- signals -----

my $pid = $node->safe_psql('postgres', $launcher);
$node->safe_psql('postgres', "SELECT pg_terminate_backend($pid)");
becomes(
	'postgres',
	"SELECT EXISTS ($launcher AND pid <> $pid)",
	'a terminated launcher is restarted');
is_cleaned('postgres', 'and cleaning goes on');

my $session = $node->background_psql('postgres');
$session->set_query_timer_restart();

# Makes a worker wait for the lock of the table until the session commits
sub hold_worker
{
	$session->query_safe('BEGIN; LOCK TABLE idem_claims');
	$node->reload;
	$node->poll_query_until('postgres', "SELECT EXISTS ($worker_waits)")
	  or die 'no worker came';
	return $node->safe_psql('postgres', $worker_waits);
}

$pid = hold_worker();
is( $node->safe_psql(
		'postgres', 'SELECT worker_pids FROM idem_stat_cleanup'),
	"{$pid}",
	'worker_pids shows the worker');
$node->safe_psql('postgres', "SELECT pg_terminate_backend($pid)");
becomes(
	'postgres',
	"SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE pid = $pid)",
	'a worker can be terminated');
$session->query_safe('COMMIT');
is_cleaned('postgres', 'after it another one is started');
is( $node->safe_psql('postgres', 'SELECT errors FROM idem_stat_cleanup'),
	0, 'that was no error');

$pid = hold_worker();
$node->safe_psql('postgres', "SELECT pg_cancel_backend($pid)");
becomes(
	'postgres',
	q{SELECT errors > 0 AND last_error LIKE 'canceling statement%' AND last_error_at IS NOT NULL FROM idem_stat_cleanup},
	'a cancelled batch is recorded');
$session->query_safe('COMMIT');
is_cleaned('postgres', 'and tried again');

# A new launcher leaves the worker of the previous launcher running.
$pid = hold_worker();
my $former = $node->safe_psql('postgres', $launcher);
$node->safe_psql('postgres', "SELECT pg_terminate_backend($former)");
becomes(
	'postgres',
	"SELECT EXISTS ($launcher AND pid <> $former)",
	'launcher is restarted while a worker runs');
$session->query_safe('COMMIT');
is_cleaned('postgres', 'and cleaning goes on');

# ----- settings -----

# After a reload the worker runs once. A claim that expires later shows the interval.
set_and_reload('idem.cleanup_interval' => q{'1h'});
$node->safe_psql(
	'postgres', q{
	INSERT INTO idem_claims (expires_at, state, request_id, user_id, scope)
	VALUES ('2001-01-01', 'completed', 'reload', 'user', '')});
$node->reload;
becomes(
	'postgres',
	q{SELECT NOT EXISTS (SELECT FROM idem_claims WHERE request_id = 'reload')},
	'a reload is followed by a look at everything');
$node->safe_psql('postgres', q{SELECT idem_claim('user', 'later', 'short')});
becomes(
	'postgres',
	q{SELECT oldest_expired_age > '0' FROM idem_stat_cleanup},
	'idem.cleanup_interval: what expires is left until the interval is over');
set_and_reload('idem.cleanup_interval' => q{'100ms'});
is_cleaned('postgres', "idem.cleanup_interval: a shorter one acts, $_ times")
  for ('1', '2');

my ($status, $out, $err) =
  $node->psql('postgres', q{ALTER SYSTEM SET idem.cleanup_databases = 'postgres,,'});
like($err, qr/invalid value for parameter "idem.cleanup_databases"/,
	'a wrong idem.cleanup_databases is refused');
like($err, qr/DETAIL: +List syntax is invalid/, 'and it is said why');
$node->append_conf('postgresql.conf', "idem.cleanup_databases = 'postgres,,'");
$node->reload;
$node->wait_for_log(qr/invalid value for parameter "idem.cleanup_databases"/);
is_cleaned('postgres', 'in postgresql.conf it is reported, and changes nothing');
$node->append_conf('postgresql.conf', "idem.cleanup_databases = ''");
$node->reload;

# ----- errors in a batch -----

$node->safe_psql(
	'postgres', q{
	CREATE FUNCTION nothing() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END';
	CREATE TRIGGER "größer" AFTER DELETE ON idem_claims FOR EACH STATEMENT EXECUTE FUNCTION nothing();
	SELECT idem_stat_reset();
});
$node->reload;
becomes(
	'postgres',
	q{SELECT errors > 0 AND last_error LIKE '%triggers%' FROM idem_stat_cleanup},
	'an error in a batch is recorded');
becomes(
	'postgres',
	'SELECT errors > 1 FROM idem_stat_cleanup',
	'it is tried again');
like(
	slurp_file($node->logfile),
	qr/ERROR: .*triggers.*\n(.*\n){1,4}.*removing expired claims in database "postgres"/,
	'the log says what went wrong and in which database');
$node->safe_psql('postgres', 'DROP TRIGGER "größer" ON idem_claims');
is_cleaned('postgres', 'and goes on when the cause is gone');

# ----- the extension is dropped and created -----

set_and_reload('idem.cleanup_batch_size' => 1);
$node->safe_psql('postgres', 'CREATE DATABASE victim');
create_extension('victim');
make_backlog('victim');
my $offset = -s $node->logfile;
$node->safe_psql('victim', 'DROP EXTENSION idem');
becomes(
	'postgres',
	"SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE backend_type = 'idem worker')",
	'DROP EXTENSION: the worker leaves');
unlike(slurp_file($node->logfile, $offset),
	qr/removing expired claims/, 'without an error');
create_extension('victim');
is_cleaned('victim', 'and comes back with the extension');

# ----- commands do not wait for the worker -----

# DROP DATABASE and its like fail if the other sessions do not leave the database in time.
set_and_reload('log_min_messages' => 'debug1');
my $worker = make_backlog('victim');
$offset = -s $node->logfile;
$node->safe_psql('postgres', 'CREATE DATABASE copy TEMPLATE victim');
has_made_room($worker, $offset, 'a database can be copied while it is cleaned');
$node->safe_psql('copy',
	"TRUNCATE idem_claims; INSERT INTO idem_scopes (scope, ttl) VALUES ('copied', '1 ms')"
);
is_cleaned('copy', 'the copy is cleaned');
$worker = make_backlog('victim');
$offset = -s $node->logfile;
$node->safe_psql('postgres', 'ALTER DATABASE victim RENAME TO sacrifice');
has_made_room($worker, $offset, 'a database can be renamed while it is cleaned');
$worker = make_backlog('sacrifice');
$offset = -s $node->logfile;
$node->safe_psql('postgres', 'DROP DATABASE sacrifice');
has_made_room($worker, $offset, 'a database can be dropped while it is cleaned');
set_and_reload('log_min_messages' => 'warning');
is_cleaned($_, "\"$_\" is still cleaned") for ('copy', 'postgres');
set_and_reload('idem.cleanup_batch_size' => 50000);

# ----- no free worker slot -----

$session->quit;
$node->append_conf('postgresql.conf', q{
max_worker_processes = 2
max_logical_replication_workers = 0
});
$node->restart;
# All databases are due, and there is a slot for one worker.
is_cleaned($_, "\"$_\" is cleaned though workers have to take turns")
  for ('copy', 'postgres');
$session = $node->background_psql('postgres');
$session->set_query_timer_restart();
hold_worker();
$node->safe_psql('copy', "SELECT idem_claim('user', 'no slot', 'short')");
becomes(
	'copy',
	q{SELECT oldest_expired_age > '0' FROM idem_stat_cleanup},
	'while one worker has the slot, no other can work');
$session->query_safe('COMMIT');
becomes(
	'copy',
	q{SELECT NOT EXISTS (SELECT FROM idem_claims WHERE request_id = 'no slot')},
	'cleaned when the slot is free again');

# ----- crash -----

$node->append_conf('postgresql.conf', 'restart_after_crash = on');
$node->reload;
$session->quit;
$pid = $node->safe_psql('postgres', $launcher);
kill 'KILL', $pid;
$node->poll_query_until('postgres', "SELECT EXISTS ($launcher AND pid <> $pid)")
  or die 'no launcher came';
is_cleaned('postgres', 'cleaned after a crash');

# ----- a standby -----

$node->backup('backup');
my $standby = PostgreSQL::Test::Cluster->new('standby');
$standby->init_from_backup($node, 'backup', has_streaming => 1);
$standby->start;
$node->wait_for_catchup($standby);
is($standby->safe_psql('postgres', $launcher),
	'', 'no launcher on a standby');
$node->stop;
$standby->promote;
$node = $standby;
is_cleaned('postgres', 'cleaned after a promotion');
$standby->stop;

unlike(slurp_file($_->logfile), qr/leak|TRAP|PANIC/, 'nothing leaked')
  for ($node, $standby);

done_testing();
