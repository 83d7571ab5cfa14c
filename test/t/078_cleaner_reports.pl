# What the log and the views tell of the cleaner: the start of the launcher, errors of the worker,
# and that nobody cleans because the launcher does not run.

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
idem.cleanup_databases = 'app'
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
like(slurp_file($node->logfile), qr/idem launcher started\n.*DETAIL:  It looks at the databases of idem\.cleanup_databases: app/, 'with what it looks at');

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
becomes('SELECT rows_deleted = 1 FROM idem_stat_cleanup', 'cleaning goes on');

# An error of the server, which has no hint of its own: the worker waits for the table, and is canceled.
my $holder = Client->new($node, 'app');
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
is(query(q{SELECT string_agg(value::text, ' ' ORDER BY name) FROM idem_metrics WHERE name IN ('idem_cleanup_active', 'idem_cleanup_launcher_up')}),
	'1 1', 'it runs, and somebody cleans');
is(query("SELECT cleaning FROM idem_stat_cleanup"), 'worker', 'the worker');
# It starts again after five seconds.
query("SELECT pg_terminate_backend($launcher)");
becomes('SELECT launcher_pid IS NULL FROM idem_stat_cleanup', 'a launcher that has ended is not shown');
is(query('SELECT cleaning, launcher_pid FROM idem_stat_cleanup'), 'no worker for this database: the launcher does not run|', 'nobody cleans');
is(query(q{SELECT value FROM idem_metrics WHERE name = 'idem_cleanup_launcher_up'}), '0', 'in the metrics, too');
becomes(q{SELECT launcher_pid IS NOT NULL AND cleaning = 'worker' FROM idem_stat_cleanup}, 'until it is back');
is(lines_of_log('idem launcher started'), 2, 'which is logged');

$node->stop;
my $log = slurp_file($node->logfile);
like($log, qr/FATAL:  terminating background worker "idem launcher" due to administrator command/, 'the stop is logged');
unlike($log, qr/TRAP|PANIC|was terminated by signal|WARNING:.*leak/, 'nothing broke');

done_testing();
