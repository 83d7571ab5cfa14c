# idem_stat_table and idem_stat_scopes, in both editions: estimates, what holds dead rows back,
# and a bounded number of scopes.

use strict;
use warnings;

use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

use Client;

my $node = PostgreSQL::Test::Cluster->new('main');
$node->init(allows_streaming => 1);
$node->append_conf('postgresql.conf', q{
shared_preload_libraries = 'idem'
idem.cleanup_databases = 'nothing'
autovacuum = off
max_prepared_transactions = 10
});
$node->start;
$node->safe_psql('postgres', 'CREATE ROLE exporter LOGIN; CREATE ROLE monitor LOGIN IN ROLE pg_monitor; CREATE ROLE owner');

my $database;

sub query
{
	my ($query) = @_;
	return $node->safe_psql($database, $query);
}

# Statistics come from another process before 15, and from a session when it is idle.
sub becomes
{
	my ($query, $expected, $name) = @_;
	ok($node->poll_query_until($database, $query, $expected), $name) or diag(query($query));
	return;
}

sub metric
{
	my ($name, $condition) = @_;
	return query("SELECT value FROM idem_metrics WHERE name = '$name' AND " . ($condition // 'true'));
}

sub test_size
{
	query(q{SELECT idem_claim('u', i::text) FROM generate_series(1, 100) AS i});
	becomes('SELECT claims FROM idem_stat_table', '100', 'claims are estimated');
	is(query('SELECT dead_rows, last_vacuum IS NULL, bytes > index_bytes, index_bytes > 0 FROM idem_stat_table'), '0|t|t|t', 'no dead rows yet');
	query(q{SELECT idem_forget('u', i::text) FROM generate_series(1, 40) AS i});
	becomes('SELECT claims, dead_rows FROM idem_stat_table', '60|40', 'dead rows are estimated');
	is(metric('idem_table_claims') . ' ' . metric('idem_table_dead_rows'), '60 40', 'and in the metrics');
	cmp_ok(metric('idem_table_bytes'), '==', query('SELECT bytes FROM idem_stat_table'), 'with the size');
	return;
}

sub test_holders
{
	my $session = Client->new($node, $database);
	my $young = Client->new($node, $database);
	my $other = Client->new($node, 'postgres');
	my $holder = 'SELECT held_back_by, held_back_by_pid FROM idem_stat_table';

	becomes('SELECT held_back_by IS NULL FROM idem_stat_table', 't', 'nothing holds dead rows back');
	is(metric('idem_dead_rows_held_seconds') . ' ' . metric('idem_dead_rows_held_transactions'), '0 0', 'in the metrics neither');
	$other->ask('BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT 1');
	is(query('SELECT held_back_by IS NULL FROM idem_stat_table'), 't', 'a snapshot in another database does not');
	$other->ask('COMMIT');

	$session->ask('BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT 1');
	query('VACUUM idem_claims');
	is(query("SELECT idem_forget('u', '41')"), 't', 'a row dies');
	$young->ask('BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT 1');
	is(query($holder), 'transaction of process ' . $session->pid . '|' . $session->pid, 'the oldest snapshot, not the younger one');
	is(query('SELECT held_back_since < clock_timestamp(), held_back_transactions > 0 FROM idem_stat_table'), 't|t', 'since when');
	cmp_ok(metric('idem_dead_rows_held_seconds'), '>', 0, 'its age');
	cmp_ok(metric('idem_dead_rows_held_transactions'), '>', 0, 'in transactions');
	# VACUUM agrees.
	my (undef, undef, $told) = $node->psql($database, 'VACUUM (VERBOSE) idem_claims');
	like($told, qr/1 (?:are dead but not yet removable|dead row versions cannot be removed yet)/, 'VACUUM keeps the dead row');
	$session->ask('COMMIT');
	is(query($holder), 'transaction of process ' . $young->pid . '|' . $young->pid, 'then the younger one');
	$young->ask('COMMIT');
	becomes('SELECT held_back_by IS NULL FROM idem_stat_table', 't', 'then nobody');
	(undef, undef, $told) = $node->psql($database, 'VACUUM (VERBOSE) idem_claims');
	unlike($told, qr/[1-9]\d* (?:are dead but not yet removable|dead row versions cannot be removed yet)/, 'and VACUUM removes it');
	isnt(query('SELECT last_vacuum FROM idem_stat_table'), '', 'last_vacuum');

	# A transaction that writes, without a snapshot
	$session->ask("BEGIN; SELECT idem_claim('u', 'idle')");
	is(query($holder), 'transaction of process ' . $session->pid . '|' . $session->pid, 'a transaction that is idle');
	$session->ask("PREPARE TRANSACTION 'it''s prepared'");
	is(query($holder), q{prepared transaction "it's prepared"|}, 'a prepared transaction');
	is(query('SELECT held_back_since IS NOT NULL FROM idem_stat_table'), 't', 'since when');
	query("COMMIT PREPARED 'it''s prepared'");

	$node->append_conf('postgresql.conf', 'hot_standby_feedback = on');
	my $standby = PostgreSQL::Test::Cluster->new("standby_$database");
	$node->backup("backup_$database");
	query("SELECT pg_create_physical_replication_slot('standby')");
	$standby->init_from_backup($node, "backup_$database", has_streaming => 1);
	$standby->append_conf('postgresql.conf', "primary_slot_name = 'standby'\nhot_standby_feedback = on\nwal_receiver_status_interval = 1s");
	$standby->start;
	my $reader = Client->new($standby, $database);
	$reader->ask('BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT 1');
	query("SELECT idem_forget('u', '42')");
	becomes(q{SELECT held_back_by = 'replication slot "standby"' FROM idem_stat_table}, 't', 'a standby with a slot');
	is(query('SELECT held_back_since IS NULL, held_back_transactions >= 0 FROM idem_stat_table'), 't|t', 'which does not say since when');
	is(metric('idem_dead_rows_held_seconds'), '', 'nor does the metric');
	cmp_ok($reader->ask('SELECT count(*) FROM idem_stat_table'), '==', 1, 'the view works on a standby');
	$reader->quit;
	$standby->stop;
	query("SELECT pg_drop_replication_slot('standby')");
	$_->quit for $session, $young, $other;
	return;
}

# In the table there are 40 scopes, 1 to 40, of as many claims, and the default scope with 1000.
sub test_scopes
{
	query('TRUNCATE idem_claims');
	is(query(q{SELECT count(*) FROM idem_stat_scopes WHERE claims > 0}), '0', 'no claims');
	query(q{SELECT idem_claim('u', scope || '-' || i, 's' || scope) FROM generate_series(1, 40) AS scope, generate_series(1, 5 * scope) AS i});
	query(q{SELECT idem_claim('u', i::text) FROM generate_series(1, 1000) AS i});
	query('ANALYZE idem_claims');
	my $all = query('SELECT claims FROM idem_stat_table');
	cmp_ok(abs(query('SELECT sum(claims) FROM idem_stat_scopes') - $all), '<', 40, 'the rows of all scopes have all claims');
	is(query('SELECT count(*) FROM idem_stat_scopes WHERE claims IS NOT NULL'), '33', '32 scopes and one row for the others');
	is(query(q{SELECT count(*) FROM idem_stat_scopes WHERE scope IN ('', 's40', 's39') AND claims > 100}), '3', 'the largest scopes among them');
	is(query(q{SELECT count(*) FROM idem_stat_scopes WHERE scope = 's1' AND claims IS NOT NULL}), '0', 'not the smallest');
	cmp_ok(metric('idem_scope_claims', q{labels->>'scope' = '(default)'}), '==', query(q{SELECT claims FROM idem_stat_scopes WHERE scope = ''}),
		'the default scope in the metrics');
	cmp_ok(metric('idem_scope_claims', q{labels->>'scope' = '(other)'}), '==', query('SELECT claims FROM idem_stat_scopes WHERE scope IS NULL'),
		'and the others');
	# A scope of that name must not make a sample twice: scrapers refuse all then.
	query(q{SELECT idem_claim('u', i::text, name) FROM generate_series(1, 500) AS i, (VALUES ('(other)'), ('(default)')) AS v (name)});
	query('ANALYZE idem_claims');
	is(query('SELECT count(*) FROM (SELECT FROM idem_metrics GROUP BY name, labels HAVING count(*) > 1) AS d'), '0', 'no sample twice');
	# Plans: the rows of claims are never read, however many there are.
	for my $view ('idem_stat_table', 'idem_stat_scopes')
	{
		unlike(query("EXPLAIN SELECT * FROM $view"), qr/ on idem_claims/, "$view does not read the table");
	}
	return;
}

# The owner of the extension can add a table of the same name, as a member of its own.
sub test_namesake
{
	my ($edition) = @_;

	query('CREATE SCHEMA other; CREATE TABLE other.idem_claims (scope text)');
	query(q{INSERT INTO other.idem_claims SELECT 's' || i / 100 FROM generate_series(1, 5000) AS i; ANALYZE other.idem_claims});
	my $before = query('SELECT bytes FROM idem_stat_table; SELECT scope, claims FROM idem_stat_scopes ORDER BY 1');
	query("ALTER EXTENSION $edition ADD TABLE other.idem_claims");
	is(query('SELECT bytes FROM idem_stat_table; SELECT scope, claims FROM idem_stat_scopes ORDER BY 1'), $before, 'another table of that name is not counted');
	is(query('SELECT count(*) FROM (SELECT FROM idem_metrics GROUP BY name, labels HAVING count(*) > 1) AS d'), '0', 'nor does it make samples twice');
	query("ALTER EXTENSION $edition DROP TABLE other.idem_claims; DROP SCHEMA other CASCADE");
	return;
}

sub test_answers
{
	query('SELECT idem_stat_reset()');
	is(query('SELECT sum(claimed + completed) FROM idem_stat_scopes'), '0', 'idem_stat_reset()');
	# The names of the first 32 scopes are kept: "s33" came later.
	my $session = Client->new($node, $database);
	$session->ask(q{SELECT idem_claim('v', '1', 's1'); SELECT idem_claim('v', '1', 's1'), idem_claim('v', '1', 's33'), idem_claim('v', '2', 's34')});
	$session->ask(q{BEGIN; SELECT idem_claim('v', '2', 's1'); SAVEPOINT a; SELECT idem_claim('v', '3', 's1'), idem_claim('v', '3', 's2'); ROLLBACK TO a;
		SAVEPOINT b; SELECT idem_claim('v', '4', 's2'); SAVEPOINT c; SELECT idem_claim('v', '5', 's2'), idem_claim('v', '5', 's3'); RELEASE b; COMMIT});
	$session->ask(q{BEGIN; SELECT idem_claim('v', '6', 's1'); ROLLBACK});
	$session->ask(q{SELECT idem_claim('v', '1', 's1', wait => '0')});
	$session->ask(q{SELECT count(*) FROM idem_claim_many(ARRAY['v', NULL, 'v'], ARRAY['1', '2', '7'], 's4')});
	is(query(q{SELECT string_agg(concat_ws(' ', coalesce(scope, 'other'), claimed, completed, invalid), ', ' ORDER BY scope)
		FROM idem_stat_scopes WHERE claimed + completed + invalid > 0}),
		's1 2 2 0, s2 2 0 0, s3 1 0 0, s4 2 0 1, other 2 0 0', 'answers by scope, by savepoint and batch');
	is(query('SELECT sum(s.claimed) = max(c.claimed) AND sum(s.completed) = max(c.completed) AND sum(s.invalid) = max(c.invalid)
		FROM idem_stat_scopes AS s, idem_stat_claims AS c'), 't', 'which are all answers');
	is(metric('idem_scope_answers_total', q{labels->>'scope' = 's1' AND labels->>'outcome' = 'completed'}), '2', 'in the metrics');
	is(query('SELECT count(*) FROM idem_stat_scopes WHERE claimed IS NOT NULL'), '33', 'of 32 scopes and one row');
	$session->quit;
	return;
}

# Sessions that use new scopes at the same time
sub test_race
{
	$node->safe_psql('postgres', 'CREATE DATABASE race');
	$database = 'race';
	query('CREATE EXTENSION idem');
	my @sessions = map { Client->new($node, $database) } 1 .. 4;
	my $n = 0;
	$_->send("SELECT count(idem_claim('u' || " . $n++ . ", i::text, 's' || i % 30)) FROM generate_series(1, 3000) AS i") for @sessions;
	$_->answer for @sessions;
	$_->quit for @sessions;
	is(query(q{SELECT count(*), min(claimed), max(claimed) FROM idem_stat_scopes WHERE scope ~ '^s'}), '30|400|400', 'no scope was counted twice, no claim lost');
	# doc/operations.md, "Security": a role with app can take the names, also with claims that it takes back
	query(q{CREATE ROLE app; SELECT idem_grant('app', 'app')});
	query(q{SET ROLE app; BEGIN; SELECT idem_claim('v', scope, scope) FROM unnest(ARRAY['rolled back', 'too', 'one too many']) AS scope; ROLLBACK});
	query('SELECT idem_stat_reset()');
	is(query(q{SELECT scope FROM idem_stat_scopes WHERE scope !~ '^s' ORDER BY 1}), "rolled back\ntoo", 'a scope keeps its place without a claim');
	return;
}

sub test_rights
{
	is($node->safe_psql($database, 'SET ROLE monitor; SELECT count(*) FROM idem_stat_table; SELECT count(*) > 0 FROM idem_stat_scopes'), "1\nt", 'pg_monitor reads');
	for my $view ('idem_stat_table', 'idem_stat_scopes')
	{
		my (undef, undef, $error) = $node->psql($database, "SET ROLE exporter; SELECT * FROM $view");
		like($error, qr/permission denied/, "others do not read $view");
	}
	return;
}

for my $edition ('idem', 'idem_portable')
{
	note($edition);
	$database = "of_$edition";
	$node->safe_psql('postgres', "CREATE DATABASE $database OWNER owner");
	query($edition eq 'idem' ? 'CREATE EXTENSION idem' : 'GRANT ALL ON SCHEMA public TO owner; SET ROLE owner; CREATE EXTENSION idem_portable');
	test_size();
	test_holders();
	test_scopes();
	test_namesake($edition);
	test_answers() if $edition eq 'idem';
	test_rights();
}
test_race();

$node->stop;
unlike(slurp_file($node->logfile), qr/TRAP|PANIC|was terminated by signal|WARNING:.*leak/, 'nothing broke');

done_testing();
