# Without preload: from PostgreSQL 17 on, sessions share statistics and waits in memory that the
# first of them makes. Before 17 the functions say what is missing.

use strict;
use warnings;

use FindBin;
use lib "$FindBin::RealBin/../lib";

use Client;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(time);

my $node = PostgreSQL::Test::Cluster->new('main');
$node->init;
# Such memory is made of files here, and can be refused.
$node->append_conf(
	'postgresql.conf', q{
dynamic_shared_memory_type = mmap
max_prepared_transactions = 2
restart_after_crash = on
});
$node->start;

sub query
{
	my ($sql) = @_;
	return $node->safe_psql('postgres', $sql);
}

# SQLSTATE, message and HINT
sub complaint
{
	my ($sql) = @_;
	my (undef, undef, $err) = $node->psql('postgres', $sql, extra_params => [ '-v', 'VERBOSITY=verbose' ]);

	return join('|', $err =~ /(?:ERROR|WARNING): +(?:(\w{5}): )?(.*)/, $err =~ /^HINT: +(.*)/m);
}

# After a restart it takes a moment until the launcher runs.
my $preloaded = q{SELECT shared_memory = 'preloaded' AND cleaning = 'worker' FROM idem_stat_cleanup};

# A session that loads the library before the others
my $early = Client->new($node);
is($early->ask(q{LOAD 'idem'; SHOW idem.ttl}), '1d', 'a session loads the library first');
query(q{SET client_min_messages = error; CREATE EXTENSION idem});

if ($node->pg_version < 17)
{
	like(
		complaint('SELECT idem_start_worker()'),
		qr/^55000\|idem must be loaded via "shared_preload_libraries" to start workers\|Add idem to .* idem_cleanup_all\(\) .*PostgreSQL 17 and later need no restart/,
		'before PostgreSQL 17 no worker can be started');
	like(complaint("SELECT * FROM $_"), qr/^55000\|idem must be loaded via "shared_preload_libraries" to keep statistics\|Add idem/, "and $_ is refused")
	  for qw(idem_stat_claims idem_stat_cleanup idem_metrics);
	is(query(q{SELECT idem__stat_cleaning()}), 'no worker for this database: idem is not in shared_preload_libraries', 'who cleans');

	$early->quit;
	$node->append_conf('postgresql.conf', "shared_preload_libraries = 'idem'");
	$node->restart;
	ok($node->poll_query_until('postgres', $preloaded), 'preloaded, they are kept');
	my ($status, $out, $err) = $node->psql('postgres', 'SELECT idem_start_worker()');
	is($out, 'f', 'and there is no worker to start');
	like($err, qr/NOTICE:  workers clean this database already/, 'as it says');
	$node->stop;
	done_testing();
	exit;
}

# ----- sessions that loaded the library before and after -----

my $counts = 'SELECT claimed, completed, waits FROM idem_stat_claims';
my $late = Client->new($node);
is(query('SELECT shared_memory FROM idem_stat_cleanup'), 'made on demand: idem is not in shared_preload_libraries', 'the view says where they are kept');
is($late->ask(q{SELECT idem_claim('u', 'by late')}), 't', 'another session claims');
is($early->ask(q{SELECT idem_claim('u', 'by late')}), 'f', 'a duplicate in the early session');
is($early->ask(q{SELECT idem_claim('u', 'by early')}), 't', 'and a claim');
is($_->ask($counts), '2|1|0', 'all see both') for $early, $late;
is(query($counts), '2|1|0', 'and so does a new one');

# The first call attaches the memory. What it counts follows savepoints all the same.
my $first = Client->new($node);
is( $first->ask(q{BEGIN; SAVEPOINT s; SELECT idem_claim('u', 'undone'); ROLLBACK TO s; SELECT idem_claim('u', 'done'); COMMIT}),
	"t\nt", 'a first call in a savepoint that is rolled back');
is(query($counts), '3|1|0', 'what was rolled back is not counted');
$first->quit;
$first = Client->new($node);
is( $first->ask(q{DO $$ BEGIN PERFORM idem_claim('u', 'undone'); RAISE EXCEPTION 'no'; EXCEPTION WHEN raise_exception THEN NULL; END $$;
	SELECT idem_claim('u', 'undone')}), 't', 'and in a block that fails');
is(query($counts), '4|1|0', 'the same');
is($first->ask(q{BEGIN; SELECT idem_claim('u', 'prepared'); PREPARE TRANSACTION 'p'}), 't', 'a prepared transaction');
$first->ask(q{COMMIT PREPARED 'p'});
is(query($counts), '5|1|0', 'is counted');
$first->quit;

# Also in a query that would run in parallel.
$first = Client->new($node);
$first->ask('SET parallel_setup_cost = 0; SET parallel_tuple_cost = 0; SET min_parallel_table_scan_size = 0');
like($first->ask('EXPLAIN SELECT count(*) FROM pg_proc'), qr/Parallel/, 'plans are parallel');
is($first->ask('SELECT count(*) > 0, idem__stat_cleaning() FROM pg_proc'),
	't|no worker for this database: idem is not in shared_preload_libraries, and idem_start_worker() was not called', 'who cleans, as a first call');
$first->quit;

# Another database has its own.
$node->safe_psql('postgres', 'CREATE DATABASE other');
is($node->safe_psql('other', qq{SET client_min_messages = error; CREATE EXTENSION idem; SELECT idem_claim('u', 'r'); $counts}),
	"t\n1|0|0", 'another database has its own');
$node->safe_psql('postgres', 'DROP DATABASE other');

# ----- waiting -----

# Without the wake-up, a waiter looks again after a second.
my @seconds;
for my $round (1 .. 9)
{
	my $take = "SELECT token FROM idem_lease('u', 'lease $round', lease => '1 hour', wait => '10 min')";
	my $token = $early->ask($take);

	$late->send($take);
	ok($node->poll_query_until('postgres', q{SELECT waiters = 1 FROM idem_holders}), "round $round: the waiter is known");
	my $began = time;
	$early->ask("SELECT idem_release('u', 'lease $round', $token)");
	like($late->answer, qr/^[1-9]\d*$/, "round $round: the waiter claims");
	push @seconds, time - $began;
	$late->ask("SELECT idem_complete('u', 'lease $round', NULL, token) FROM idem_claims WHERE request_id = 'lease $round'");
}
@seconds = sort { $a <=> $b } @seconds;
cmp_ok($seconds[4], '<', 0.5, 'the release wakes it') or diag "@seconds";
is(query('SELECT waits, wait_seconds > 0 FROM idem_stat_claims'), '9|t', 'waits are counted');

my $holder = Client->new($node);
$holder->ask(q{BEGIN; SELECT idem_claim('u', 'held')});
$late->send(q{SELECT idem_claim('u', 'held', wait => '10 min')});
ok($node->poll_query_until('postgres', q{SELECT request_id = 'held' AND pid = } . $holder->pid . q{ AND waiters = 1 FROM idem_holders}), 'the holder of a transactional claim is known');
# The terminated session still has its entry in that memory when it ends.
query('SELECT pg_terminate_backend(' . $late->pid . ')');
$late->answer;
ok($node->poll_query_until('postgres', 'SELECT NOT EXISTS (SELECT FROM idem_holders)'), 'a waiter that was terminated is not listed');
$holder->ask('COMMIT');
$late = Client->new($node);
my $token = $early->ask(q{SELECT token FROM idem_lease('u', 'lease', lease => '1 hour')});
$late->send(q{SELECT idem_claim('u', 'lease', wait => '10 min')});
ok($node->poll_query_until('postgres', q{SELECT waiters = 1 FROM idem_holders}), 'a waiter for a lease');
query('SELECT pg_terminate_backend(' . $late->pid . ')');
$late->answer;
ok($node->poll_query_until('postgres', 'SELECT waiters = 0 FROM idem_holders'), 'the same');
$early->ask(qq{SELECT idem_release('u', 'lease', $token)});

query('SELECT idem_stat_reset()');
is($early->ask($counts), '0|0|0', 'a reset is one for all');
is(query(q{SELECT count(*) FROM idem_metrics WHERE type <> 'gauge' AND value > 0}), '0', 'in idem_metrics too');

# ----- cleaning by sessions -----

query(q{INSERT INTO idem_claims (expires_at, state, request_id, user_id, scope) VALUES ('2001-01-01', 'completed', 'expired', 'u', '');
	CALL idem_cleanup_all()});
is($early->ask('SELECT rows_deleted, cleaning FROM idem_stat_cleanup'),
	'1|no worker for this database: idem is not in shared_preload_libraries, and idem_start_worker() was not called', 'a session cleans');
$early->quit;

# ----- a restart, and a crash -----

$node->restart;
is(query($counts), '0|0|0', 'a restart forgets the counters');
is(query(q{SELECT idem_claim('u', 'by late')}), 'f', 'and no claim');
is(query($counts), '0|1|0', 'and counts again');

my $victim = Client->new($node);
$victim->ask(q{SELECT idem_claim('u', 'by early')});
my $log = -s $node->logfile;
kill 'KILL', $victim->pid;
$node->wait_for_log(qr/database system is ready to accept connections/, $log);
is(query($counts), '0|0|0', 'so does a crash');
is(query(q{SELECT idem_claim('u', 'by early')}), 'f', 'the claim is there');
is(query($counts), '0|1|0', 'and is counted');

# ----- memory that cannot be had -----

my $folder = $node->data_dir . '/pg_dynshmem';
$node->restart;
chmod 0500, $folder or die $!;
my $poor = Client->new($node);
is($poor->ask(q{SELECT idem_claim('u', 'poor')}), 't', 'memory is refused: a claim does not need it');
is($poor->ask(q{SELECT idem_claim('u', 'poor')}), 'f', 'nor does a duplicate');
is($poor->ask(q{SELECT outcome FROM idem_lease('u', 'poor', lease => '1 s', wait => '10 ms')}), 'completed', 'nor does one that could wait');
like(complaint('SELECT * FROM idem_stat_claims'), qr/^42501\|could not open shared memory segment/, 'the statistics say why they are missing');
like(slurp_file($node->logfile), qr/LOG: +idem cannot attach its shared memory: could not open shared memory segment.*: Permission denied\n.*DETAIL:.*\n.*HINT: .*tries again after a minute/, 'the log says it');
is(query(q{SELECT idem__stat_cleaning()}), 'no worker for this database: idem is not in shared_preload_libraries', 'and who cleans');
chmod 0700, $folder or die $!;
is($poor->ask($counts), '0|0|0', 'later it can be had, in the same session');
is($poor->ask(q{SELECT idem_claim('u', 'rich')}), 't', 'which counts from then on');
is(query($counts), '1|0|0', 'as others see');
$poor->quit;

# ----- preloaded -----

$node->append_conf('postgresql.conf', "shared_preload_libraries = 'idem'");
$node->restart;
ok($node->poll_query_until('postgres', $preloaded), 'preloaded');
is(query(q{SELECT idem_claim('u', 'preloaded')}), 't', 'a claim');
is(query($counts), '1|0|0', 'is counted');
my ($status, $out, $err) = $node->psql('postgres', 'SELECT idem_start_worker()');
is($out, 'f', 'there is no worker to start');
like($err, qr/NOTICE:  workers clean this database already/, 'as it says');
is(query(q{SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'idem launcher'}), 1, 'and there is one launcher');

$node->stop;
unlike(slurp_file($node->logfile), qr/TRAP|PANIC|signal 11|signal 6|WARNING:.*leak/, 'nothing broke');
done_testing();
