# pg_cron cleans: with both functions, in both editions, as an operator who is no superuser, over a
# connection and in background workers of its own.

use strict;
use warnings;

use FindBin;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my ($library) = run_command([ 'pg_config', '--pkglibdir' ]);
plan skip_all => 'no pg_cron' if !-e "$library/pg_cron.so";

my $node = PostgreSQL::Test::Cluster->new('main');
$node->init;
$node->append_conf('postgresql.conf', q{
shared_preload_libraries = 'pg_cron'
max_worker_processes = 20
cron.log_run = on
});
$node->append_conf('postgresql.conf', "cron.host = '" . $node->host . "'");
$node->start;

# pg_cron of Debian 12 has no shorter interval than a minute, but runs this one at each start.
my $when = '@reboot';
my %database = (
	batch => [ 'idem', 'SELECT work.idem_cleanup()' ],
	all_batches => [ 'idem', 'CALL work.idem_cleanup_all()' ],
	portable_batch => [ 'idem_portable', 'SELECT work.idem_cleanup()' ],
	portable_all_batches => [ 'idem_portable', 'CALL work.idem_cleanup_all()' ]);

$node->safe_psql('postgres', q{
	CREATE EXTENSION pg_cron;
	CREATE ROLE operator LOGIN;
	GRANT USAGE ON SCHEMA cron TO operator;
	GRANT EXECUTE ON FUNCTION cron.schedule_in_database TO operator});
for my $name (sort keys %database)
{
	my ($edition, $command) = @{ $database{$name} };
	$node->safe_psql('postgres', "CREATE DATABASE $name");
	$node->safe_psql($name, qq{
		CREATE ROLE owner_of_$name;
		CREATE SCHEMA work;
		GRANT CREATE, USAGE ON SCHEMA work TO owner_of_$name;
		GRANT ALL ON DATABASE $name TO owner_of_$name;
		SET ROLE owner_of_$name;
		CREATE EXTENSION $edition SCHEMA work;
		SELECT work.idem_grant('operator', 'operator');
		RESET ROLE;
		GRANT USAGE ON SCHEMA work TO operator;
	});
	$node->safe_psql('postgres', qq{
		SET ROLE operator;
		SELECT cron.schedule_in_database('$name', '$when', '$command', '$name')});
}
# What doc/portable.md runs beside it
my ($purge) = slurp_file("$FindBin::RealBin/../../doc/portable.md") =~ /'idem-log', '0 3 \* \* \*', (\$\$.*?\$\$)/s;
$purge =~ s/'idem', 'idem-log'/'batch'/;
$node->safe_psql('postgres', "SET ROLE operator; SELECT cron.schedule('purge', '$when', $purge)");

for my $mode ('off', 'on')
{
	my $how = $mode eq 'on' ? 'in a background worker' : 'over a connection';

	$node->append_conf('postgresql.conf', "cron.use_background_workers = $mode");
	$node->safe_psql($_, q{
		INSERT INTO work.idem_claims (expires_at, state, request_id, user_id, scope)
		SELECT date_trunc('second', now()) - interval '1 hour', 'completed', i, 'user', '' FROM generate_series(1, 1000) AS i;
	}) for sort keys %database;
	$node->safe_psql('postgres', q{
		TRUNCATE cron.job_run_details;
		INSERT INTO cron.job_run_details (runid, jobid, database, username, status, end_time)
		SELECT -1 - o.days * 10 - j.jobid, j.jobid, 'postgres', 'operator', 'succeeded', now() - make_interval(days => o.days)
		FROM cron.job AS j, (VALUES (0), (2)) AS o (days) WHERE j.jobname IN ('batch', 'all_batches')});
	$node->restart;
	for my $name (sort keys %database)
	{
		ok($node->poll_query_until($name, 'SELECT NOT EXISTS (SELECT FROM work.idem_claims)'), "$name, $how: expired claims are removed");
		ok( $node->poll_query_until('postgres', "SELECT status = 'succeeded' FROM cron.job_run_details WHERE database = '$name'"),
			"$name, $how: the job succeeds");
	}
	ok($node->poll_query_until('postgres', q{
			SELECT string_agg(jobname || ' ' || age, ', ' ORDER BY jobname, age) = 'all_batches 0, all_batches 2, batch 0'
			FROM (SELECT j.jobname, date_part('day', now() - d.end_time) AS age
				FROM cron.job_run_details AS d JOIN cron.job AS j USING (jobid) WHERE d.runid < 0) AS r}),
		"$how: the old rows of a job are purged from the log");
}

$node->stop;
unlike(slurp_file($node->logfile), qr/leak|TRAP|PANIC|was terminated by signal/, 'nothing broke');

done_testing();
