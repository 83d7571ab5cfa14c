# idem_start_worker(): workers without preload, from PostgreSQL 17 on. They clean the databases in
# which it was called, until these are dropped, lose the extension, or the server stops.

use strict;
use warnings;

use FindBin;
use lib "$FindBin::RealBin/../lib";

use Client;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = PostgreSQL::Test::Cluster->new('main');
plan skip_all => 'without preload, workers need PostgreSQL 17' if $node->pg_version < 17;

$node->init(allows_streaming => 1);
$node->append_conf(
	'postgresql.conf', q{
idem.cleanup_interval = '100ms'
max_prepared_transactions = 2
restart_after_crash = on
});
$node->start;

sub query
{
	my ($database, $sql) = @_;
	return $node->safe_psql($database, $sql);
}

sub becomes
{
	my ($database, $sql, $name) = @_;
	ok($node->poll_query_until($database, $sql), $name);
}

sub create_database
{
	my ($database, $options) = @_;
	query('postgres', "CREATE DATABASE $database " . ($options // ''));
	query($database, q{SET client_min_messages = error; CREATE EXTENSION idem;
		INSERT INTO idem_scopes (scope, ttl) VALUES ('short', '1 ms')});
}

# (what the call returned, what it said)
sub start
{
	my ($database, $sql) = @_;
	my (undef, $out, $err) = $node->psql($database, $sql // 'SELECT idem_start_worker()', extra_params => [ '-v', 'VERBOSITY=verbose' ]);
	return ($out, $err);
}

sub starts
{
	my ($database, $name) = @_;
	my ($out, $err) = start($database);
	is($out, 't', $name);
	like($err, qr/NOTICE: .*until the server stops, or a crash restarts it\n.*HINT: +Call idem_start_worker\(\) again then; or add idem to shared_preload_libraries/, 'it says for how long');
}

my $number = 0;

sub is_cleaned
{
	my ($database, $name) = @_;
	my $request = 'request ' . ++$number;
	query($database, "SELECT idem_claim('u', '$request', 'short')");
	becomes($database, "SELECT idem_status('u', '$request', 'short') IS NULL", $name);
}

my $cleaning = 'SELECT cleaning FROM idem_stat_cleanup';
my $by_nobody = 'no worker for this database: idem is not in shared_preload_libraries, and idem_start_worker() was not called';
my $launchers = q{FROM pg_stat_activity WHERE backend_type = 'idem launcher'};
my $workers = q{FROM pg_stat_activity WHERE backend_type = 'idem worker'};

# ----- starting -----

create_database($_) for qw(one two quiet);
is(query('one', $cleaning), $by_nobody, 'nobody cleans');
is(query('one', "SELECT count(*) $launchers"), 0, 'and there is no launcher');
starts('one', 'a worker is started');
is(query('one', $cleaning), 'worker, until the server stops', 'the view says so');
is_cleaned('one', 'it removes what expires') for 1 .. 2;
is(query('two', $cleaning), $by_nobody, 'not in another database');
query('two', q{SELECT idem_claim('u', 'kept', 'short')});
my ($out, $err) = start('one');
is($out, 'f', 'it is there already');
like($err, qr/NOTICE: .*workers clean this database already\n(?!HINT)/, 'and says so');
is_cleaned('one', 'still');
is(query('two', q{SELECT idem_status('u', 'kept', 'short')}), 'completed', 'the other database is left alone');

starts('two', 'another database');
is_cleaned('two', 'is cleaned then');
is_cleaned('one', 'and the first');
is(query('one', "SELECT count(*) $launchers"), 1, 'by one launcher');
becomes('one', "SELECT NOT EXISTS (SELECT $workers)", 'idle databases have no connection');
is(query('quiet', "SELECT count(*) $launchers AND datname IS NOT NULL"), 0, 'nor has the launcher');

# Neither a claim that is not expired, nor one of another transaction
query('one', q{SELECT idem_claim('u', 'long')});
is_cleaned('one', 'what has expired goes');
is(query('one', q{SELECT idem_status('u', 'long')}), 'completed', 'the rest stays');
# As it does with preload: see 010_worker.pl and 011_worker_faults.pl.
query('one', q{INSERT INTO idem_claims (expires_at, state, request_id, user_id, scope) VALUES ('2001-01-01', 'completed', 'restored', 'u', '')});
$node->reload;
becomes('one', q{SELECT idem_status('u', 'restored') IS NULL}, 'a reload makes it look at everything');

# ----- commands that need the database -----

sub make_backlog
{
	my ($database) = @_;
	query($database, q{INSERT INTO idem_claims (expires_at, state, request_id, user_id, scope)
		SELECT '2001-01-01', 'completed', i, 'u', 'backlog' FROM generate_series(1, 60000) i});
	$node->reload;
	becomes('postgres', "SELECT EXISTS (SELECT $workers AND datname = '$database' AND state = 'active')", "a worker is at work in $database");
}

query('postgres', 'ALTER SYSTEM SET idem.cleanup_batch_size = 200');
$node->reload;
for my $command ('ALTER DATABASE two RENAME TO renamed', 'CREATE DATABASE copy TEMPLATE renamed', 'DROP DATABASE renamed')
{
	make_backlog($command =~ /RENAME/ ? 'two' : 'renamed');
	# A worker that does not leave makes the command fail, after five seconds.
	my ($status, undef, $error) = $node->psql('postgres', $command);
	is($status, 0, $command) or diag $error;
	if ($command !~ /DROP/)
	{
		becomes('renamed', q{SELECT NOT EXISTS (SELECT FROM idem_claims WHERE scope = 'backlog')}, 'cleaning goes on');
		is(query('renamed', $cleaning), 'worker, until the server stops', 'as the view says');
	}
}
is(query('copy', $cleaning), $by_nobody, 'a copy has to be started itself');
query('postgres', 'DROP DATABASE copy');
query('postgres', 'ALTER SYSTEM RESET idem.cleanup_batch_size');
$node->reload;
is_cleaned('one', 'the other database is cleaned on');

# ----- the extension -----

# The next worker finds it gone. A reload brings one at once.
query('one', 'DROP EXTENSION idem');
$node->reload;
becomes('postgres', "SELECT NOT EXISTS (SELECT $launchers)", 'DROP EXTENSION: the launcher ends with its last database');
query('one', q{SET client_min_messages = error; CREATE EXTENSION idem; INSERT INTO idem_scopes (scope, ttl) VALUES ('short', '1 ms')});
is(query('one', $cleaning), $by_nobody, 'a new extension has to be started');
starts('one', 'it can be');
is_cleaned('one', 'and is cleaned');

# In one transaction: until it commits, no worker sees the extension.
query('postgres', 'CREATE DATABASE migrated');
# The same as idem__stat_cleaning(), also without the extension
query('migrated', q{CREATE FUNCTION cleaning() RETURNS text LANGUAGE c AS '$libdir/idem', 'idem__stat_cleaning'});
my $migration = Client->new($node, 'migrated');
$migration->ask('SET client_min_messages = error');
is($migration->ask(q{BEGIN; CREATE EXTENSION idem; INSERT INTO idem_scopes (scope, ttl) VALUES ('short', '1 ms'); SELECT idem_start_worker()}),
	't', 'created and started in one transaction');
for (1 .. 2)
{
	$node->reload;
	is_cleaned('one', 'workers run meanwhile');
}
is($migration->ask($cleaning), 'worker, until the server stops', 'it stays started');
$migration->ask('COMMIT');
is_cleaned('migrated', 'and cleaned once that commits');
query('migrated', 'DROP EXTENSION idem');
$node->reload;
becomes('migrated', "SELECT cleaning() = '$by_nobody'", 'dropped, it is not cleaned any more');
is($migration->ask('BEGIN; CREATE EXTENSION idem; SELECT idem_start_worker()'), 't', 'created and started again');
$migration->ask('ROLLBACK');
$node->reload;
becomes('migrated', "SELECT cleaning() = '$by_nobody'", 'and rolled back');
$migration->quit;
query('postgres', 'DROP DATABASE migrated');

# ----- signals -----

my $pid = query('one', "SELECT pid $launchers");
query('one', "SELECT pg_terminate_backend($pid)");
becomes('one', "SELECT EXISTS (SELECT $launchers AND pid <> $pid)", 'a launcher that was terminated comes back');
is_cleaned('one', 'and goes on');
my $session = Client->new($node, 'one');
$session->ask('BEGIN; LOCK TABLE idem_claims');
$node->reload;
becomes('one', "SELECT EXISTS (SELECT $workers AND wait_event_type = 'Lock')", 'a worker waits');
is(query('one', "SELECT cardinality(worker_pids) FROM idem_stat_cleanup"), 1, 'it is shown');
# A session that asks now gets no second one.
($out) = start('one');
is($out, 'f', 'another call while it works');
$node->reload;
# A new launcher leaves the worker of the former one at work.
$pid = query('one', "SELECT pid $launchers");
query('one', "SELECT pg_terminate_backend($pid)");
becomes('one', "SELECT EXISTS (SELECT $launchers AND pid <> $pid)", 'the launcher is replaced while a worker runs');
is(query('one', "SELECT count(*) $workers AND datname = 'one'"), 1, 'which stays the only one');
query('one', "SELECT pg_terminate_backend(pid) $workers");
becomes('one', "SELECT NOT EXISTS (SELECT $workers AND wait_event_type IS DISTINCT FROM 'Lock')", 'a worker that was terminated ends');
$session->ask('COMMIT');
is_cleaned('one', 'and another one follows');

# ----- many calls at once -----

create_database('many');
query('one', 'DROP EXTENSION idem');
$node->reload;
becomes('postgres', "SELECT NOT EXISTS (SELECT $launchers)", 'no launcher');
my @clients = map { Client->new($node, 'many') } 1 .. 6;
$_->ask('SET client_min_messages = error') for @clients;
$_->send('SELECT idem_start_worker()') for @clients;
my @answers = map { $_->answer } @clients;
is(join('', sort @answers) =~ s/^f*t+$/fine/r, 'fine', 'calls at once all succeed') or diag "@answers";
becomes('many', "SELECT count(*) = 1 $launchers", 'and leave one launcher');
is_cleaned('many', 'which cleans');
$_->quit for @clients;

# ----- settings -----

query('postgres', q{ALTER SYSTEM SET idem.cleanup_databases = 'one'});
$node->reload;
query('many', q{SELECT idem_claim('u', 'excluded', 'short')});
becomes('many', q{SELECT cleaning = 'no worker for this database: idem.cleanup_databases does not name it' FROM idem_stat_cleanup}, 'idem.cleanup_databases excludes it');
create_database('excluded');
($out, $err) = start('excluded');
like($err, qr/55000: idem\.cleanup_databases does not name this database\n.*HINT: .*reload/s, 'where it does, a worker is refused');
query('postgres', 'ALTER SYSTEM RESET idem.cleanup_databases');
$node->reload;
is_cleaned('many', 'named again, it is cleaned again');

# ----- no slot, a standby -----

$node->backup('backup');
my $standby = PostgreSQL::Test::Cluster->new('standby');
$standby->init_from_backup($node, 'backup', has_streaming => 1);
$standby->start;
$node->wait_for_catchup($standby);
(undef, undef, $err) = $standby->psql('many', 'SELECT idem_start_worker()');
like($err, qr/cannot execute idem_start_worker\(\) during recovery/, 'a standby refuses');
is($standby->safe_psql('many', $cleaning), 'no worker for this database: this server is a standby, and the primary cleans', 'and says who cleans');
$standby->promote;
is($standby->safe_psql('many', $cleaning), $by_nobody, 'promoted');
is($standby->safe_psql('many', 'SELECT idem_start_worker()'), 't', 'it starts one');
$standby->safe_psql('many', q{SELECT idem_claim('u', 'promoted', 'short')});
ok($standby->poll_query_until('many', q{SELECT idem_status('u', 'promoted', 'short') IS NULL}), 'which cleans');
$standby->stop;

# ----- a restart, a crash -----

my $backend = Client->new($node, 'many');
my $log = -s $node->logfile;
kill 'KILL', $backend->pid;
$node->wait_for_log(qr/database system is ready to accept connections/, $log);
is(query('many', $cleaning), $by_nobody, 'a crash ends it');
# The postmaster starts the launcher again, which finds that nobody has called the function since.
becomes('many', "SELECT NOT EXISTS (SELECT $launchers)", 'and leaves no launcher');
starts('many', 'it can be started again');
is_cleaned('many', 'and cleans');

$node->restart;
is(query('many', $cleaning), $by_nobody, 'a restart ends it');
is(query('many', "SELECT count(*) $launchers"), 0, 'for good');

$node->append_conf('postgresql.conf', 'max_worker_processes = 0');
$node->restart;
($out, $err) = start('many');
like($err, qr/53400: no background worker slot is free\n.*HINT: .*max_worker_processes/, 'without a slot it is refused');
is(query('many', $cleaning), $by_nobody, 'and the view does not say otherwise');

# ----- preloaded after all -----

# One slot beside the one of the server's own launcher, and two calls at once. The postmaster is stopped, so
# that the launcher that the first call asks for cannot come yet.
$node->append_conf('postgresql.conf', 'max_worker_processes = 2');
$node->restart;
@clients = map { Client->new($node, 'many') } 1 .. 3;
$_->ask('SET client_min_messages = error') for @clients;
my $postmaster = (split /\n/, slurp_file($node->data_dir . '/postmaster.pid'))[0];
END { kill 'CONT', $postmaster if defined $postmaster }
kill 'STOP', $postmaster;

sub waits_for
{
	my ($client, $event) = @_;
	for (1 .. 10 * $PostgreSQL::Test::Utils::timeout_default)
	{
		return 1 if $clients[2]->ask('SELECT count(*) FROM pg_stat_activity WHERE pid = ' . $client->pid . " AND wait_event ~ '$event'");
		select(undef, undef, undef, 0.1);
	}
	return 0;
}

$clients[0]->send('SELECT idem_start_worker()');
ok(waits_for($clients[0], 'IdemLauncherStart'), 'one slot: the first call waits for the launcher');
$clients[1]->send('SELECT idem_start_worker()');
ok(waits_for($clients[1], 'advisory'), 'the second one waits for the first');
kill 'CONT', $postmaster;
is($clients[0]->answer, 't', 'the first call has started it');
is($clients[1]->answer, 'f', 'and the second one finds it');
is(query('many', "SELECT count(*) $launchers"), 1, 'one launcher');
$_->quit for @clients;

$node->append_conf('postgresql.conf', "max_worker_processes = 8\nshared_preload_libraries = 'idem'\nidem.cleanup_databases = 'many'");
$node->restart;
becomes('many', "SELECT cleaning = 'worker' FROM idem_stat_cleanup", 'preloaded: the launcher cleans');
is_cleaned('many', 'as it does');
($out, $err) = start('many');
is($out, 'f', 'a call starts none');
# A worker of the preloaded launcher, and calls, at the same time
$session = Client->new($node, 'many');
$session->ask('BEGIN; LOCK TABLE idem_claims');
$node->reload;
becomes('many', "SELECT EXISTS (SELECT $workers AND wait_event_type = 'Lock')", 'its worker waits');
($out) = start('many') for 1 .. 2;
is($out, 'f', 'calls meanwhile start none');
$node->reload;
is(query('many', "SELECT count(*) $workers"), 1, 'one worker');
$session->ask('COMMIT');
$session->quit;
is_cleaned('many', 'which goes on');
($out, $err) = start('excluded');
like($err, qr/55000: idem\.cleanup_databases does not name this database/, 'not in a database that the launcher leaves alone either');
is(query('many', "SELECT count(*) $launchers"), 1, 'one launcher');

$node->stop;
unlike(slurp_file($node->logfile), qr/TRAP|PANIC|signal 11|signal 6|WARNING:.*leak/, 'nothing broke');
done_testing();
