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
idem.cleanup_batch_size = 25
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
$node->append_conf('postgresql.conf', "idem.databases = 'app'");
my $seen = '';
my $last_done = 0;
my $activity = '';
my $steps_back = 0;
$node->reload;
for (1 .. 10 * $PostgreSQL::Test::Utils::timeout_default)
{
	my $state = query(q{SELECT backlog_since IS NOT NULL, backlog_rows_deleted, backlog_done, rows_deleted = 36000 FROM idem_stat_cleanup});
	my ($is_backlog, $rows, $done, $is_over) = split /\|/, $state;
	last if $is_over eq 't';
	next if $is_backlog ne 't';
	$steps_back++ if $done < $last_done - 0.01;
	$last_done = $done;
	$seen = $state if $rows > 0;
	my $text = $node->safe_psql('postgres', q{SELECT query FROM pg_stat_activity WHERE backend_type = 'idem worker'});
	$activity = $text if $text =~ /backlog/;
}
isnt($seen, '', "its progress is seen: $seen");
is($steps_back, 0, 'and never goes back');
like($activity, qr/^removing expired claims: backlog since \S+ \S+, \d+ removed, \d+ % of the time done$/, 'in pg_stat_activity, too');
becomes('SELECT NOT backlog AND backlog_since IS NULL AND backlog_done IS NULL AND rows_deleted = 36000 FROM idem_stat_cleanup', 'then it is over');
is(lines_of_log('removal of expired claims is behind'), 1, 'its begin is logged once');
is(lines_of_log('removal of expired claims is up to date again'), 1, 'its end is logged once');
like(slurp_file($node->logfile),
	qr/claims is behind\n.*DETAIL:  Claims that expired at .* are still there\.\n.*HINT:  .*\n.*CONTEXT:  removing expired claims in database "app"/,
	'with the database and a hint');
like(slurp_file($node->logfile), qr/DETAIL:  3[56]\d\d\d claims were removed in [\d.]+ s\./, 'and how many claims there were');

# ----- a short one is not logged -----

# Not so short on a busy machine, with small batches
$node->append_conf('postgresql.conf', 'idem.cleanup_batch_size = 1000');
$node->reload;
ok($node->poll_query_until('postgres', q{SELECT current_setting('idem.cleanup_batch_size') = '1000'}), 'larger batches');
query(q{INSERT INTO idem_claims (expires_at, state, request_id, user_id, scope)
	SELECT date_trunc('second', now()), 'completed', i, 'u', '' FROM generate_series(1, 2000) AS i});
becomes('SELECT NOT backlog AND rows_deleted = 38000 FROM idem_stat_cleanup', 'claims that expired a moment ago are removed');
is(lines_of_log('removal of expired claims'), 2, 'and not logged');

# ----- errors -----

query('ALTER TABLE idem_claims ADD COLUMN another int');
query(q{INSERT INTO idem_claims (expires_at, state, request_id, user_id, scope) VALUES ('2001-01-01', 'completed', 'x', 'u', '')});
$node->reload;
becomes('SELECT errors > 0 FROM idem_stat_cleanup', 'an error is counted');
like(slurp_file($node->logfile), qr/ERROR:  .*idem_claims.*\n(?:.*\n){0,3}.*HINT:  .*\n(?:.*\n)?.*CONTEXT:  .*removing expired claims in database "app"/,
	'and logged with the database and a hint');
query('ALTER TABLE idem_claims DROP COLUMN another');
becomes('SELECT rows_deleted = 38001 FROM idem_stat_cleanup', 'cleaning goes on');

# An error of the server, which has no hint of its own: the worker waits for the table, and is canceled.
my $holder = Client->new($node, 'app');
my $errors = query('SELECT errors FROM idem_stat_cleanup');
$holder->ask('BEGIN; LOCK TABLE idem_claims');
$node->reload;
ok($node->poll_query_until('postgres', q{SELECT pg_cancel_backend(pid) FROM pg_stat_activity WHERE backend_type = 'idem worker' AND wait_event_type = 'Lock'}),
	'a worker that waits is canceled');
becomes("SELECT errors > $errors FROM idem_stat_cleanup", 'which is an error');
like(slurp_file($node->logfile), qr/ERROR:  canceling statement due to user request\n.*HINT:  The worker tries again; .*\n.*CONTEXT:  removing expired claims in database "app"/,
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
