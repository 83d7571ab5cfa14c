# A claim has one deadline for all its waits; a waiter goes on waiting when its holder is
# prepared; expires_at counts from the time of the claim, not from now().

use strict;
use warnings;

use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

# The holder changes after HANDOVER seconds. A deadline that started again would end after
# HANDOVER + WAIT seconds. LIMIT is less than that, and leaves time for a slow machine.
use constant { WAIT => 6, HANDOVER => 4, LIMIT => 9 };

my $node = PostgreSQL::Test::Cluster->new('main');
$node->init;
$node->append_conf(
	'postgresql.conf', q{
max_prepared_transactions = 10
deadlock_timeout = '1min'
});
$node->start;
$node->safe_psql('postgres', q{
	CREATE EXTENSION idem;
	CREATE TABLE answers (request text, outcome idem_outcome, seconds float8, result jsonb);
	INSERT INTO idem_scopes (scope, expired) VALUES ('reclaim', 'reclaim');
	CREATE TABLE notes (note text);
});
$node->safe_psql('postgres', 'CREATE DATABASE portable');
$node->safe_psql('portable', 'CREATE EXTENSION idem_portable; CREATE TABLE notes (note text)');

sub session
{
	my $session = $node->background_psql('postgres');
	$session->query_safe('BEGIN');
	return $session;
}

# The minor releases of 16 differ: query_safe() keeps the last newline in 16.2.
sub ask
{
	my ($session, $sql) = @_;
	chomp(my $answer = $session->query_safe($sql));
	return $answer;
}

# Starts a claim in a session of its own, and returns the backend's pid and the session once it
# waits. The answer goes into the table.
sub start_waiter
{
	my ($request, $arguments) = @_;
	my $session = $node->background_psql('postgres');
	my $pid = $session->query_safe('SELECT pg_backend_pid()');
	$session->query_until(qr/started/, qq{\\echo started
		INSERT INTO answers SELECT '$request', outcome,
			extract(epoch FROM clock_timestamp() - statement_timestamp()), result
		FROM idem_try_claim('u', '$request', $arguments);
	});
	wait_until_blocked($pid);
	return ($pid, $session);
}

# Until the statement that the backend runs has lasted that long
sub wait_until_runs_for
{
	my ($pid, $seconds) = @_;
	$node->poll_query_until('postgres',
		"SELECT clock_timestamp() - query_start > interval '$seconds s' FROM pg_stat_activity WHERE pid = $pid")
	  or die "the statement of $pid does not last $seconds s";
	return;
}

sub wait_until_blocked
{
	my ($pid) = @_;
	$node->poll_query_until('postgres',
		"SELECT EXISTS (SELECT FROM pg_locks WHERE pid = $pid AND NOT granted)")
	  or die "$pid does not wait for a lock";
	return;
}

sub answer
{
	my ($request) = @_;
	$node->poll_query_until('postgres',
		"SELECT EXISTS (SELECT FROM answers WHERE request = '$request')")
	  or die "no answer to $request";
	return split /\|/, $node->safe_psql('postgres',
		"SELECT outcome, seconds, result FROM answers WHERE request = '$request'");
}

sub is_timed_out
{
	my ($request, $name) = @_;
	my ($outcome, $seconds) = answer($request);
	is($outcome, 'timed_out', "$name: timed out");
	cmp_ok($seconds, '>=', WAIT - 0.01, "$name: not before the deadline");
	cmp_ok($seconds, '<', LIMIT, "$name: and not much after it");
}

# ----- an answer after a long wait, in SERIALIZABLE -----

# The waiter, which runs beside the tests that follow, is told that somebody has the request, and writes
# that the work was not done. The holder does not see that note.
my %serializable;
for my $database ('postgres', 'portable')
{
	my ($holder, $waiter) = map { $node->background_psql($database, on_error_stop => 0) } 1, 2;
	$_->query_safe('BEGIN ISOLATION LEVEL SERIALIZABLE; SELECT FROM notes') for $waiter, $holder;
	$holder->query_safe(q{SELECT idem_claim('u', 'serializable')});
	$waiter->query_until(qr/started/, qq{\\echo started
		INSERT INTO notes SELECT outcome FROM idem_try_claim('u', 'serializable', wait => '@{[WAIT]} s');
		COMMIT;
	});
	$serializable{$database} = [ $holder, $waiter ];
}

# ----- one deadline -----

# All three at once, since each takes some seconds.
my $wait = "wait => '" . WAIT . " s'";

# A savepoint is released: the waiter waits for the savepoint, and then for the transaction.
my $saver = session();
$saver->query_safe("SAVEPOINT s; SELECT idem_claim('u', 'savepoint')");
my ($saver_pid, $saver_waiter) = start_waiter('savepoint', $wait);

# Two holders, one after the other. The waiter is stopped while the second session takes over;
# otherwise the waiter might claim first.
my $first = session();
$first->query_safe("SELECT idem_claim('u', 'holders')");
my ($second_pid, $second) = (undef, session());
$second_pid = $second->query_safe('SELECT pg_backend_pid()');
$second->query_until(qr/started/, qq{\\echo started
	SELECT idem_claim('u', 'holders', wait => '10 min');
});
wait_until_blocked($second_pid);
my ($holders_pid, $holders_waiter) = start_waiter('holders', $wait);

# Two sessions lock the row, one after the other.
$node->safe_psql('postgres', q{
	INSERT INTO idem_claims (expires_at, state, request_id, user_id, scope)
	VALUES ('2020-01-01', 'completed', 'row', 'u', 'reclaim')});
my $lock = q{SELECT 1 FROM idem_claims WHERE request_id = 'row' FOR UPDATE};
my $locker = session();
$locker->query_safe($lock);
my $queued = session();
my $queued_pid = $queued->query_safe('SELECT pg_backend_pid()');
$queued->query_until(qr/started/, "\\echo started\n$lock;\n");
wait_until_blocked($queued_pid);
my ($row_pid, $row_waiter) = start_waiter('row', "'reclaim', $wait");

wait_until_runs_for($row_pid, HANDOVER);
$saver->query_safe('RELEASE s');
kill('STOP', $holders_pid);
$first->query_safe('ROLLBACK');
ok( $node->poll_query_until('postgres',
		"SELECT state = 'idle in transaction' FROM pg_stat_activity WHERE pid = $second_pid"),
	'a waiter takes over when its holder rolls back');
kill('CONT', $holders_pid);
kill('STOP', $row_pid);
$locker->query_safe('COMMIT');
ok( $node->poll_query_until('postgres',
		"SELECT state = 'idle in transaction' FROM pg_stat_activity WHERE pid = $queued_pid"),
	'... and a row lock is handed on');
kill('CONT', $row_pid);

is_timed_out('savepoint', 'savepoint, then its transaction');
is_timed_out('holders', 'one holder, then another');
is_timed_out('row', 'one row lock, then another');
$_->quit
  for ($saver, $saver_waiter, $first, $second, $holders_waiter, $locker, $queued, $row_waiter);

for my $database (sort keys %serializable)
{
	my ($holder, $waiter) = @{ $serializable{$database} };
	$node->poll_query_until($database, 'SELECT count(*) = 1 FROM notes') or die 'no note';
	$holder->query('COMMIT');
	is($node->safe_psql($database, q{SELECT note, idem_status('u', 'serializable') FROM notes}),
		'timed_out|', "$database: an answer after a long wait is a read, too: the holder cannot commit");
	$_->quit for $holder, $waiter;
}

# ----- through PREPARE -----

for my $end ('COMMIT', 'ROLLBACK')
{
	my $holder = session();
	$holder->query_safe("SELECT idem_claim('u', '$end'), idem_complete('\"prepared\"')");
	my ($pid, $waiter) = start_waiter($end, "wait => '10 min'");
	$holder->query_safe("PREPARE TRANSACTION 'holder'");
	is( $node->safe_psql('postgres',
			"SELECT count(*) FROM pg_locks WHERE pid = $pid AND NOT granted"),
		'1', 'a waiter goes on waiting when its holder is prepared');
	$holder->quit;
	$node->safe_psql('postgres', "$end PREPARED 'holder'");
	my ($outcome, $seconds, $result) = answer($end);
	is_deeply(
		[ $outcome, $result // '' ],
		$end eq 'COMMIT' ? [ 'completed', '"prepared"' ] : [ 'claimed', '' ],
		"... and is told after $end PREPARED");
	$waiter->quit;
}

# A prepared holder survives a restart.
my $holder = session();
$holder->query_safe("SELECT idem_claim('u', 'restart'); PREPARE TRANSACTION 'holder'");
$holder->quit;
$node->restart;
is( $node->safe_psql('postgres',
		"SELECT outcome FROM idem_try_claim('u', 'restart', wait => '0')"),
	'in_progress', 'a prepared holder holds after a restart');
$node->safe_psql('postgres', "COMMIT PREPARED 'holder'");
is($node->safe_psql('postgres', "SELECT idem_claim('u', 'restart')"),
	'f', '... and has executed when it is committed');

# ----- lock and deadline at once -----

# While the waiter is stopped, its lock is granted and its deadline passes. Once it runs it
# answers, and no pending cancel hits its next statement.
$holder = session();
$holder->query_safe("SELECT idem_claim('u', 'stopped')");
my ($stopped, $stopped_waiter) = start_waiter('stopped', "wait => '1 s'");
kill 'STOP', $stopped;
$holder->query_safe('ROLLBACK');
wait_until_runs_for($stopped, 2);
kill 'CONT', $stopped;
my ($outcome) = answer('stopped');
like($outcome, qr/^(claimed|timed_out)$/,
	'a deadline that passes as the holder ends is answered');
# Nothing is waited for: the sleep is a statement that a cancel which is still pending would hit.
is(ask($stopped_waiter, "SELECT 'goes on' FROM pg_sleep(0.1)"),
	'goes on', '... and leaves nothing behind');
$stopped_waiter->quit;
$holder->quit;

# ----- the clock -----

$node->safe_psql('postgres', "INSERT INTO idem_scopes (scope, ttl) VALUES ('short', '1 s')");
my $long = session();
my $began = $long->query_safe('SELECT now()');
$node->poll_query_until('postgres', "SELECT clock_timestamp() > '$began'::timestamptz + interval '3 s'")
  or die 'the clock stands still';
is( ask($long, q{
		SELECT clock_timestamp() AS before \gset
		SELECT expires_at >= :'before'::timestamptz + interval '1 s'
		FROM idem_try_claim('u', 'clock', 'short')}),
	't', 'a claim is remembered for its ttl from when it is made');
$long->quit;

$node->stop;
done_testing();
