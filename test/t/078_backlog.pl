# A backlog: its progress in the views and in pg_stat_activity, and the lines in the log. Also
# that the views say when nobody cleans, because the launcher does not run.

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
idem.cleanup_interval = '100ms'
idem.cleanup_batch_size = 9000
idem.databases = 'nothing'
autovacuum = off
log_min_messages = warning
});
$node->start;
$node->safe_psql('postgres', 'CREATE DATABASE app');
$node->safe_psql('app', 'CREATE EXTENSION idem');

sub query
{
	my ($query) = @_;
	return $node->safe_psql('app', $query);
}

sub becomes
{
	my ($query, $name) = @_;
	ok($node->poll_query_until('app', $query), $name) or diag(query('SELECT row_to_json(s) FROM idem_stat_cleanup AS s'));
	return;
}

# How often the log has a line. LOG is above WARNING in the server's log.
sub lines_of_log
{
	my ($pattern) = @_;
	return scalar(() = slurp_file($node->logfile) =~ /LOG:  $pattern/g);
}

is(lines_of_log('idem launcher started'), 1, 'the start is logged');
like(slurp_file($node->logfile), qr/idem launcher started\n.*DETAIL:  It looks at the databases of idem\.databases: nothing/, 'with what it looks at');
is(query('SELECT backlog_since, backlog_rows_deleted, backlog_done FROM idem_stat_cleanup'), '||', 'no backlog');

# ----- a long backlog -----

query(q{INSERT INTO idem_claims (expires_at, state, request_id, user_id, scope)
	SELECT date_trunc('second', now()) - make_interval(secs => i / 10), 'completed', i, 'u', '' FROM generate_series(36000, 1, -1) AS i});
# The worker waits for this lock before each batch. While it waits, the other client asks for the lock
# too, and gets it behind the worker: so the worker removes one batch, and waits again.
my ($holder, $next) = map { Client->new($node, 'app') } 1, 2;
my $lock = 'BEGIN; LOCK TABLE idem_claims IN SHARE MODE';

sub waits_for_the_table
{
	my ($who) = @_;
	return $node->poll_query_until('app', qq{SELECT EXISTS (SELECT FROM pg_locks AS l JOIN pg_stat_activity AS a USING (pid)
		WHERE l.relation = 'idem_claims'::regclass AND NOT l.granted AND $who)});
}

sub worker_waits
{
	return waits_for_the_table("a.backend_type = 'idem worker'");
}

# The lock goes from one client, through the worker, to the other.
sub let_a_batch_run
{
	$next->send($lock);
	waits_for_the_table('a.pid = ' . $next->pid);
	$holder->ask('COMMIT');
	$next->answer;
	($holder, $next) = ($next, $holder);
	worker_waits();
	return;
}

$holder->ask($lock);
$node->append_conf('postgresql.conf', "idem.databases = 'app'");
$node->reload;
ok(worker_waits(), 'the worker waits for the table');
is($holder->ask(q{SELECT query FROM pg_stat_activity WHERE backend_type = 'idem worker'}), 'removing expired claims', 'and knows of no backlog yet');
my $rows = 0;
for my $turn (1 .. 20)
{
	let_a_batch_run();
	my ($backlog, $since, $removed, $done) = split /\|/,
		$holder->ask('SELECT backlog, backlog_since < clock_timestamp(), backlog_rows_deleted, backlog_done FROM idem_stat_cleanup');
	# After each batch of these claims, one looks for newer ones.
	next if $removed eq $rows;
	$rows = $removed;
	is("$backlog $since " . $rows % 9000, 't t 0', "a batch: $rows rows are removed");
	cmp_ok(abs($done - ($rows - 9000) / 27000), '<', 0.1, 'progress is the part of what was left after the first batch');
	like($holder->ask(q{SELECT query FROM pg_stat_activity WHERE backend_type = 'idem worker'}),
		qr/^removing expired claims: backlog since \S+ \S+, $rows removed, \d+ % of the time done$/, 'in pg_stat_activity, too');
	last if $rows == 27000;
}
is($rows, 27000, 'three batches of four');
is($holder->ask(q{SELECT value BETWEEN 0.5 AND 0.8 FROM idem_metrics WHERE name = 'idempotency_cleanup_backlog_done_ratio'}), 't', 'in the metrics, too');
$holder->ask('COMMIT');
becomes('SELECT NOT backlog AND backlog_since IS NULL AND backlog_done IS NULL AND rows_deleted = 36000 FROM idem_stat_cleanup', 'then it is over');
is(lines_of_log('removal of expired claims is behind'), 1, 'its begin is logged once');
is(lines_of_log('removal of expired claims is up to date again'), 1, 'its end is logged once');
like(slurp_file($node->logfile),
	qr/claims is behind\n.*DETAIL:  Claims that expired at .* are still there\.\n.*HINT:  .*\n.*CONTEXT:  (?:waiting for .*\n\t)?removing expired claims in database "app"/,
	'with the database and a hint');
like(slurp_file($node->logfile), qr/DETAIL:  36000 claims were removed in [\d.]+ s\./, 'and how many claims there were');

# ----- a short one is not logged -----

query(q{INSERT INTO idem_claims (expires_at, state, request_id, user_id, scope)
	SELECT date_trunc('second', now()), 'completed', i, 'u', '' FROM generate_series(1, 20000) AS i});
$node->reload;		# Nobody has announced these rows.
becomes('SELECT NOT backlog AND rows_deleted = 56000 FROM idem_stat_cleanup', 'claims that expired a moment ago are removed');
is(lines_of_log('removal of expired claims'), 2, 'and not logged')
  or diag(join '', grep { /removal|DETAIL/ } split /^/, slurp_file($node->logfile));

# ----- one that a session drains, and the next one -----

my $backlog = 'SELECT backlog, backlog_since IS NULL, backlog_rows_deleted IS NULL, backlog_done IS NULL FROM idem_stat_cleanup';

# Leaves the worker waiting for the table, after the first batches of a backlog.
sub begin_backlog
{
	my ($name) = @_;
	query(q{INSERT INTO idem_claims (expires_at, state, request_id, user_id, scope)
		SELECT date_trunc('second', now()) - interval '1 hour', 'completed', i, 'u', '' FROM generate_series(1, 20000) AS i});
	$holder->ask($lock);
	$node->append_conf('postgresql.conf', "idem.databases = 'app'");
	$node->reload;
	worker_waits();
	for my $turn (1 .. 10)
	{
		let_a_batch_run();
		last if $holder->ask($backlog) eq 't|f|f|f';
	}
	is($holder->ask($backlog), 't|f|f|f', $name);
	return;
}

begin_backlog('the worker has begun with a backlog');
is(lines_of_log('removal of expired claims is behind'), 2, 'it is logged');
$node->append_conf('postgresql.conf', "idem.databases = 'nothing'");
$node->reload;
becomes(q{SELECT count(pg_terminate_backend(pid)) = 0 FROM pg_stat_activity WHERE backend_type = 'idem worker'}, 'the worker ends');
$holder->ask('COMMIT');
query('CALL idem_cleanup_all()');
is(query($backlog), 'f|t|t|t', 'a session removes the rest, and the views show no backlog');
my $drained_at = query('SELECT clock_timestamp()');
begin_backlog('there is another one');
is($holder->ask("SELECT backlog_since > '$drained_at' FROM idem_stat_cleanup"), 't', 'which has begun since then');
is(lines_of_log('removal of expired claims is up to date again'), 2, 'the end of the first one is logged');
is(lines_of_log('removal of expired claims is behind'), 3, 'and the begin of the other one');
$holder->ask('COMMIT');
becomes('SELECT NOT backlog AND backlog_since IS NULL AND rows_deleted = 96000 FROM idem_stat_cleanup', 'the worker removes it');

# ----- errors -----

query('ALTER TABLE idem_claims ADD COLUMN another int');
query(q{INSERT INTO idem_claims (expires_at, state, request_id, user_id, scope) VALUES ('2001-01-01', 'completed', 'x', 'u', '')});
$node->reload;
becomes('SELECT errors > 0 FROM idem_stat_cleanup', 'an error is counted');
like(slurp_file($node->logfile), qr/ERROR:  .*idem_claims.*\n(?:.*\n){0,3}.*HINT:  .*\n(?:.*\n)?.*CONTEXT:  .*removing expired claims in database "app"/,
	'and logged with the database and a hint');
query('ALTER TABLE idem_claims DROP COLUMN another');
# Otherwise the worker tries again after a minute.
$node->reload;
becomes('SELECT rows_deleted = 96001 FROM idem_stat_cleanup', 'cleaning goes on');

# An error of the server, which has no hint of its own: the worker waits for the table, and is canceled.
my $errors = query('SELECT errors FROM idem_stat_cleanup');
$holder->ask('BEGIN; LOCK TABLE idem_claims');
$node->reload;
ok($node->poll_query_until('postgres', q{SELECT pg_cancel_backend(pid) FROM pg_stat_activity WHERE backend_type = 'idem worker' AND wait_event_type = 'Lock'}),
	'a worker that waits is canceled');
becomes("SELECT errors > $errors FROM idem_stat_cleanup", 'which is an error');
like(slurp_file($node->logfile), qr/ERROR:  canceling statement due to user request\n.*HINT:  The worker tries again; .*\n.*CONTEXT:  (?:waiting for .*\n\t)?removing expired claims in database "app"/,
	'with a hint, too');
$holder->quit;

# ----- no launcher -----

my $launcher = query('SELECT launcher_pid FROM idem_stat_cleanup');
is(query(q{SELECT pid FROM pg_stat_activity WHERE backend_type = 'idem launcher'}), $launcher, 'launcher_pid');
is(query(q{SELECT string_agg(value::text, ' ' ORDER BY name) FROM idem_metrics WHERE name IN ('idempotency_cleanup_active', 'idempotency_cleanup_launcher_up')}),
	'1 1', 'it runs, and somebody cleans');
is(query("SELECT cleaning FROM idem_stat_cleanup"), 'worker', 'the worker');
# It starts again after five seconds.
query("SELECT pg_terminate_backend($launcher)");
becomes('SELECT launcher_pid IS NULL FROM idem_stat_cleanup', 'a launcher that has ended is not shown');
is(query('SELECT cleaning, launcher_pid FROM idem_stat_cleanup'), 'no worker for this database: the launcher does not run|', 'nobody cleans');
is(query(q{SELECT value FROM idem_metrics WHERE name = 'idempotency_cleanup_launcher_up'}), '0', 'in the metrics, too');
becomes(q{SELECT launcher_pid IS NOT NULL AND cleaning = 'worker' FROM idem_stat_cleanup}, 'until it is back');
is(lines_of_log('idem launcher started'), 2, 'which is logged');

$node->stop;
my $log = slurp_file($node->logfile);
like($log, qr/FATAL:  terminating background worker "idem launcher" due to administrator command/, 'the stop is logged');
unlike($log, qr/TRAP|PANIC|was terminated by signal|WARNING:.*leak/, 'nothing broke');

done_testing();
