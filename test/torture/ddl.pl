# The storm goes on while the tables and indexes are rebuilt, clustered and changed
#
# REINDEX with and without CONCURRENTLY, VACUUM FULL, CLUSTER, ALTER TABLE, indexes of an operator
# that come and go, columns that come and go, changes of policy. Afterwards pg_amcheck looks at
# everything. At last the extension is dropped and made again under load: claims are lost then, as
# documented, but nothing may break.

use strict;
use warnings;

use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(time sleep);

use Storm;
use Torture;

seed();
my $seconds = quick_or_full(10, 1200);
my $node = make_node('main', q{
shared_preload_libraries = 'idem'
idem.cleanup_interval = '100ms'
max_prepared_transactions = 150
autovacuum_naptime = '1s'
fsync = off
deadlock_timeout = '100ms'
log_error_verbosity = verbose
log_min_error_statement = panic
log_min_messages = warning
});
$node->start;
make_databases($node);

my @changes = (
	'REINDEX INDEX CONCURRENTLY idem_claims_pkey', 'REINDEX INDEX CONCURRENTLY idem_claims_expires_at_idx',
	'REINDEX TABLE CONCURRENTLY idem_claims', 'REINDEX TABLE idem_claims', 'VACUUM FULL idem_claims', 'VACUUM FULL idem_scopes',
	'CLUSTER idem_claims USING idem_claims_pkey', 'VACUUM (FREEZE, ANALYZE) idem_claims', 'VACUUM (INDEX_CLEANUP ON) idem_claims',
	'CREATE INDEX CONCURRENTLY torture_user ON idem_claims (user_id)', 'DROP INDEX IF EXISTS torture_user', 'DROP INDEX CONCURRENTLY IF EXISTS torture_user',
	'CREATE INDEX torture_state ON idem_claims (state) WHERE state = $$in_progress$$', 'DROP INDEX IF EXISTS torture_state',
	'CREATE INDEX torture_length ON idem_claims (length(request_id))', 'DROP INDEX IF EXISTS torture_length',
	'BEGIN; ALTER TABLE idem_claims ADD COLUMN torture int; ALTER TABLE idem_claims DROP COLUMN torture; COMMIT',
	'BEGIN; ALTER TABLE idem_claims ADD COLUMN torture int; ROLLBACK',
	'ALTER TABLE idem_claims SET (fillfactor = 80)', 'ALTER TABLE idem_claims RESET (fillfactor)', 'ALTER TABLE idem_claims ALTER COLUMN result SET STORAGE EXTERNAL',
	'ALTER TABLE idem_claims ALTER COLUMN result SET STORAGE EXTENDED', 'ALTER TABLE idem_claims ALTER COLUMN user_id SET STATISTICS 500',
	'BEGIN; LOCK TABLE idem_claims; SELECT pg_sleep(0.1); COMMIT', 'BEGIN; LOCK TABLE idem_scopes; SELECT pg_sleep(0.1); ROLLBACK',
	'UPDATE idem_scopes SET lease = interval $$30 s$$', 'UPDATE idem_scopes SET lease_max = interval $$1 day$$ WHERE scope = $$leases$$',
	'INSERT INTO idem_scopes (scope) VALUES ($$torture$$) ON CONFLICT DO NOTHING', 'DELETE FROM idem_scopes WHERE scope = $$torture$$',
	'ANALYZE idem_claims');
my %done;

# Runs them one after the other until stop() says so
sub change
{
	my ($database, $until) = @_;

	while (time < $until)
	{
		my $sql = $changes[ rand @changes ];
		my ($status, $out, $err) = $node->psql($database, $sql, on_error_stop => 1, timeout => 60);

		$done{ defined $status && $status == 0 ? 'done' : 'refused' }++;
		# A deadlock with claims; an index of that name that is there already, or was left invalid
		if (defined $err && $err =~ /ERROR/ && $err !~ /ERROR: +(?:(?:40P01|42P07|55P03|40001): )?(?:deadlock detected|relation "torture_\w+" already exists|could not serialize|canceling)/)
		{
			fail("$database: $sql");
			diag $err;
		}
		if ($err && $sql =~ /CONCURRENTLY/)
		{
			# What a failed REINDEX CONCURRENTLY leaves, as its documentation says to remove it
			for my $left (split /\n/, $node->safe_psql($database, q{SELECT indexrelid::regclass FROM pg_index WHERE NOT indisvalid AND indrelid = 'idem_claims'::regclass}))
			{
				$node->psql($database, "DROP INDEX $left");
			}
		}
	}
	return;
}

# REINDEX CONCURRENTLY of the primary key makes claims fail with 23505, as documented.
# Most changes wait for all transactions that use the table, so prepared ones must end soon.
my $storm = Storm->new($node, clients => 24, also => ['23505'], left_s => 0.2);
$storm->make_tables;
$storm->start;
my $until = time + $seconds;
my $other = fork // die "fork: $!";
if ($other == 0)
{
	change('portable', $until);
	require POSIX;
	append_to_file("$storm->{folder}/changes", join(' ', %done));
	POSIX::_exit(Test::More->builder->is_passing ? 0 : 1);
}
change('c', $until);
waitpid($other, 0);
is($?, 0, 'the portable edition was changed');
$storm->stop;
my $counted = $storm->judge;
my %others = split / /, slurp_file("$storm->{folder}/changes");
figure('changes', join(', ', map { "$_ " . (($done{$_} // 0) + ($others{$_} // 0)) } qw(done refused)) . "; $counted->{claimed} claimed, $counted->{replays} replays");
cmp_ok($done{done}, '>', 0, 'changes were made');
$node->command_ok([ 'pg_amcheck', '--heapallindexed', '--database', 'c', '--database', 'portable' ], 'pg_amcheck finds nothing');
is(faults_in($node), '', 'the log of the server has no fault');

# DROP and CREATE EXTENSION: whoever meets it gets an error, and the next call works. The server
# takes no lock of a type or function that a statement uses: it raises XX000 of its own when it
# prints a value of a type that was dropped meanwhile. (No PL/pgSQL here: a function that was
# compiled before keeps the type that is gone, for as long as its session lives.)
my $gone = qr/cache lookup failed for (?:type|function) \d+/;
$storm = Storm->new($node, clients => 16, databases => ['c'], calls => ['call_plain'], looks => 0, also => [qw(42883 42P01 3F000 55000 42704 0A000)],
	also_messages => $gone);
$storm->start;
for (1 .. quick_or_full(3, 50))
{
	sleep 0.5;
	is($node->psql('c', 'BEGIN; DROP EXTENSION idem CASCADE; CREATE EXTENSION idem; COMMIT', on_error_stop => 1), 0, 'dropped and made again');
}
sleep 0.5;
$storm->stop;
$storm->load_journals('c');
is($node->safe_psql('c', "SELECT DISTINCT left(result, 200) FROM journal WHERE kind = 'fault' LIMIT 10"), '', 'and whoever met it got a plain error');
is($node->safe_psql('c', "SELECT idem_claim('u', 'afterwards')"), 't', 'claims go on');
is(join("\n", grep { !/$gone/ } split /\n/, faults_in($node)), '', 'the log of the server has no fault');
# The worker was told of this claim. It learns once a minute of what others have changed in the table.
$node->safe_psql('c', "INSERT INTO idem_scopes (scope, ttl) VALUES ('brief', '1 ms'); SELECT idem_claim('u', 'brief', 'brief')");
ok($node->poll_query_until('c', "SELECT count(*) = 0 FROM idem_claims WHERE scope = 'brief'"), 'and are cleaned');
$node->stop;
done_testing();
