# Replaying the WAL gives a standby the same pages as the primary. With
# wal_consistency_checking each record contains the page of the primary, and a standby whose
# page differs stops.
#
# IDEM_WAL_SECONDS: how long the sessions write.

use strict;
use warnings;

use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

use Client;

my $seconds = $ENV{IDEM_WAL_SECONDS} // 3;

my $primary = PostgreSQL::Test::Cluster->new('primary');
$primary->init(allows_streaming => 1, extra => ['--data-checksums']);
$primary->append_conf('postgresql.conf', q{
wal_consistency_checking = all
shared_preload_libraries = 'idem'
idem.cleanup_interval = '100ms'
autovacuum_naptime = '1s'
checkpoint_timeout = '30s'
});
$primary->start;
$primary->safe_psql('postgres', q{
CREATE EXTENSION idem;
CREATE EXTENSION amcheck;
INSERT INTO idem_scopes (scope, ttl, failed, lapsed, expired) VALUES
	('brief', '1 s', 'retryable', 'reclaim', 'reclaim'),
	('kept', '1 day', 'terminal', 'unknown', 'protect');

-- Too large to stay in the row, also when it is compressed
CREATE FUNCTION large() RETURNS jsonb LANGUAGE sql AS $$
	SELECT to_jsonb(string_agg(md5(random()::text), '')) FROM generate_series(1, 300)
$$;

-- A claim without a lease: completed, failed, rolled back, or not settled
CREATE FUNCTION claim(n int, scope text) RETURNS idem_outcome LANGUAGE plpgsql AS $$
DECLARE
	answer idem_outcome;
BEGIN
	SELECT outcome INTO answer
	FROM idem_try_claim('claims', n::text, scope, CASE WHEN n % 3 = 0 THEN '\x01'::bytea END, '1 s');
	IF answer = 'claimed' THEN
		CASE n % 5
			WHEN 0 THEN PERFORM idem_complete(large());
			WHEN 1 THEN PERFORM idem_complete('"small"');
			WHEN 2 THEN PERFORM idem_fail('"no"');
			WHEN 3 THEN RAISE division_by_zero;
			ELSE NULL;
		END CASE;
	END IF;
	RETURN answer;
EXCEPTION WHEN division_by_zero THEN
	RETURN NULL;
END $$;

-- Half of them are rolled back.
CREATE FUNCTION batch(first int, scope text) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
	claimed bigint;
BEGIN
	SELECT count(*) INTO claimed
	FROM idem_claim_many(array_fill('batches'::text, ARRAY[60]),
		ARRAY(SELECT n::text FROM generate_series(first, first + 59) n), scope, wait => '1 s')
	WHERE outcome = 'claimed';
	RETURN claimed / (first % 2);
EXCEPTION WHEN division_by_zero THEN
	RETURN NULL;
END $$;

CREATE FUNCTION settle(n int, scope text, held bigint) RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
	CASE n % 5
		WHEN 0 THEN RETURN idem_complete('leases', n::text, large(), held, scope);
		WHEN 1 THEN RETURN idem_fail('leases', n::text, '"no"', held, scope);
		WHEN 2 THEN RETURN idem_release('leases', n::text, held, scope);
		WHEN 3 THEN RETURN idem_heal('leases', n::text, '"found"', scope);
		ELSE RETURN NULL; -- it lapses
	END CASE;
EXCEPTION WHEN SQLSTATE 'ID410' THEN
	RETURN false;
END $$;

CREATE FUNCTION hold(n int, scope text, held bigint, progress jsonb) RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
	PERFORM idem_fence('leases', n::text, held, scope);
	PERFORM idem_extend('leases', n::text, held, '20 ms', progress, scope);
	RETURN true;
EXCEPTION WHEN SQLSTATE 'ID410' THEN
	RETURN false;
END $$;

CREATE PROCEDURE lease(n int, scope text) LANGUAGE plpgsql AS $$
DECLARE
	held bigint;
BEGIN
	SELECT token INTO held
	FROM idem_lease('leases', n::text, scope => scope, wait => '0', lease => '20 ms', progress => '"begun"');
	COMMIT;
	IF held IS NOT NULL THEN
		PERFORM hold(n, scope, held, large());
		COMMIT;
		PERFORM hold(n, scope, held, NULL);
		COMMIT;
		PERFORM settle(n, scope, held);
	END IF;
END $$;
});

$primary->backup('copy', backup_options => ['--checkpoint=fast']);
my $standby = PostgreSQL::Test::Cluster->new('standby');
$standby->init_from_backup($primary, 'copy', has_streaming => 1);
$standby->append_conf('postgresql.conf', "primary_slot_name = 'standby'");
$primary->safe_psql('postgres', q{SELECT pg_create_physical_replication_slot('standby')});
$standby->start;

sub script
{
	my ($name, $weight, $content) = @_;
	my $file = $primary->basedir . "/$name.sql";

	append_to_file($file, "\\set n random(1, 300)\n$content");
	return ('-f', "$file\@$weight");
}

$primary->command_ok(
	[
		'pgbench', '-n', '-c', 6, '-T', $seconds,
		script('claim', 40, "SELECT claim(:n, 'brief'), claim(:n, 'kept');\n"),
		script('lease', 40, "CALL lease(:n, 'brief');\nCALL lease(:n, 'kept');\n"),
		script('batch', 10, "SELECT batch(:n, 'brief');\n"),
		script('forget', 20, "SELECT idem_forget('claims', :n::text, 'kept'), idem_forget('leases', :n::text, 'kept');\n"),
		script('clean', 4, "SELECT idem_cleanup(20);\n"),
		script('vacuum', 1, "VACUUM (FREEZE, INDEX_CLEANUP ON) idem_claims;\n"),
		'postgres'
	],
	'sessions claim, lease, settle, forget and clean');

# No session may write from here to the end of the comparison, nor may the worker.
my $reader = Client->new($primary);
$reader->ask('BEGIN; LOCK TABLE idem_claims IN SHARE MODE');

is($reader->ask(q{SELECT string_agg(DISTINCT state::text, ' ' ORDER BY state::text) FROM idem_claims}),
	'completed failed in_progress', 'there are rows of each state');
is($reader->ask(q{
		SELECT claimed > 0 AND completed > 0 AND failed > 0 AND "unknown" > 0 AND takeovers > 0 AND healed > 0,
			(SELECT rows_deleted > 0 FROM idem_stat_cleanup)
		FROM idem_stat_claims}),
	't|t', 'claims had each answer, and some were cleaned');

my $end = $primary->lsn('insert');
my $here = "FROM pg_stat_replication WHERE application_name = 'standby'";
ok( $primary->poll_query_until('postgres', "SELECT count(*) = 0 OR bool_and(replay_lsn >= '$end') $here"),
	'the standby replays, or has stopped');
is(join("\n", grep { /inconsistent page|PANIC|TRAP|terminated by signal/ } split /\n/, slurp_file($standby->logfile)),
	'', 'it found no other page');
is($primary->safe_psql('postgres', "SELECT state $here"), 'streaming', 'and goes on');

for my $table ('idem_claims', 'idem_scopes')
{
	my $contents = "SELECT count(*), md5(string_agg(t::text, ' ' ORDER BY t::text)) FROM $table t";

	is($standby->safe_psql('postgres', $contents), $reader->ask($contents), "$table has the same contents");
}
is($standby->safe_psql('postgres', q{
		SELECT count(*) FROM verify_heapam('idem_claims');
		SELECT bt_index_check(indexrelid, true) FROM pg_index WHERE indrelid = 'idem_claims'::regclass}) =~ s/\n//gr,
	'0', 'and its table and indexes are in order');
$reader->quit;

# Check that the records contained the pages. The first record of a page after a checkpoint
# contains it anyway, so this is not the first.
my $begin = $primary->lsn('insert');
$primary->safe_psql('postgres', q{
	SELECT idem_claim('u', 'checked');
	UPDATE idem_claims SET expires_at = now() - interval '1 day' WHERE request_id = 'checked';
	SELECT idem_cleanup()});
my ($records) = run_command(
	[ 'pg_waldump', '--path', $primary->data_dir . '/pg_wal', '--start', $begin, '--end', $primary->lsn('insert') ]);
like($records, qr/FPW for WAL verification/, 'records bring the page to be compared');
like($records, qr/rmgr: $_.* FPW/, "records of $_ do")
  for ('Heap .* INSERT', 'Heap .* DELETE', 'Btree .* INSERT');

$primary->stop;
$standby->stop;
command_ok([ 'pg_checksums', '--check', '-D', $_->data_dir ], 'the checksums of ' . $_->name . ' are right')
  for ($primary, $standby);
unlike(slurp_file($primary->logfile), qr/PANIC|TRAP|terminated by signal|WARNING:.*leak/, 'nothing broke');

done_testing();
