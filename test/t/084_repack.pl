# pg_repack on the table of the claims: its trigger makes the C edition refuse claims until it is
# done; the portable edition claims meanwhile; repacking the indexes disturbs neither. No claim is
# lost.

use strict;
use warnings;

use IPC::Run;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

use Client;

my ($folder) = run_command([ 'pg_config', '--bindir' ]);
plan skip_all => 'no pg_repack' if !-x "$folder/pg_repack";

my $node = PostgreSQL::Test::Cluster->new('main');
$node->init;
$node->append_conf('postgresql.conf', q{
shared_preload_libraries = 'idem'
idem.cleanup_databases = 'nothing'
autovacuum = off
});
$node->start;

my $database;

sub query
{
	return $node->safe_psql($database, $_[0]);
}

# A claim: true, false, or the error
sub claim
{
	my ($request) = @_;
	my ($status, $out, $err) = $node->psql($database, "\\set VERBOSITY verbose\nSELECT idem_claim('user', '$request')");
	return $status ? $err : $out;
}

sub start_repack
{
	my ($said, @options) = @_;
	return IPC::Run::start([ "$folder/pg_repack", '-h', $node->host, '-p', $node->port, '-d', $database, '-t', 'idem_claims', @options ],
		'<', \undef, '>&', $said, IPC::Run::timeout($PostgreSQL::Test::Utils::timeout_default));
}

for my $edition ('idem', 'idem_portable')
{
	$database = "with_$edition";
	$node->safe_psql('postgres', "CREATE DATABASE $database");
	query("CREATE EXTENSION $edition; CREATE EXTENSION pg_repack; CREATE EXTENSION amcheck");
	query("DO \$\$ BEGIN FOR i IN 1 .. 2000 LOOP PERFORM idem_claim('user', i::text); END LOOP; END \$\$");
	query("DELETE FROM idem_claims WHERE request_id::int % 2 = 0");

	my $said = '';
	start_repack(\$said, '--only-indexes')->finish;
	is(claim('1'), 'f', "$edition: after its indexes are repacked, a claim is known") or diag $said;
	is(claim('2'), 't', "$edition: and a new one is made");

	# pg_repack waits for this transaction once it has made its trigger.
	my $size = query(q{SELECT pg_relation_size('idem_claims')});
	my $older = Client->new($node, $database);
	$older->ask('BEGIN; SELECT 1');
	my $repack = start_repack(\$said);
	ok($node->poll_query_until($database, q{SELECT EXISTS (SELECT FROM pg_trigger WHERE tgname = 'repack_trigger')}), "$edition: pg_repack is at work");
	if ($edition eq 'idem')
	{
		like(claim('1'), qr/ERROR:  0A000: table "idem_claims" cannot hold claims: it has triggers/, "$edition: duplicates are refused meanwhile");
		like(claim('during'), qr/ERROR:  0A000: /, "$edition: so are new claims");
	}
	else
	{
		is(claim('1'), 'f', "$edition: duplicates are answered meanwhile");
		is(claim('during'), 't', "$edition: and new claims made");
	}
	$older->ask('COMMIT');
	$repack->finish;
	is(claim('during'), $edition eq 'idem' ? 't' : 'f', "$edition: repacked, it takes claims and knows those that were made meanwhile") or diag $said;
	is(query(q{SELECT count(*) FILTER (WHERE NOT idem_claim('user', i::text)) FROM generate_series(1, 2000, 2) AS i}), 1000, "$edition: it has all claims");
	cmp_ok(query(q{SELECT pg_relation_size('idem_claims')}), '<', $size, "$edition: and is smaller");

	# pg_repack dies.
	$older->ask('BEGIN; SELECT 1');
	$repack = start_repack(\$said);
	$node->poll_query_until($database, q{SELECT EXISTS (SELECT FROM pg_trigger WHERE tgname = 'repack_trigger')}) or die 'no trigger';
	$repack->kill_kill;
	query(q{SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'pg_repack'});
	$older->ask('COMMIT');
	like(claim('1'), $edition eq 'idem' ? qr/0A000/ : qr/^f$/, "$edition: pg_repack was killed");
	query('DROP EXTENSION pg_repack CASCADE');
	is(claim('1'), 'f', "$edition: after DROP EXTENSION pg_repack CASCADE claims go on");
	is( query(q{
			SELECT count(*) FROM verify_heapam('idem_claims');
			SELECT count(bt_index_check(indexrelid, true)) > 0 FROM pg_index WHERE indrelid = 'idem_claims'::regclass}),
		"0\nt", "$edition: the table is in order");
	$older->quit;
}

$node->stop;
unlike(slurp_file($node->logfile), qr/leak|TRAP|PANIC|was terminated by signal/, 'nothing broke');

done_testing();
