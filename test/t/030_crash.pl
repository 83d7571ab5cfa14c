# A crash in the middle of claims doubles and loses no execution, and a batch of the cleanup
# that was not committed has removed nothing.

use strict;
use warnings;

use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use IPC::Run;

my $node = PostgreSQL::Test::Cluster->new('main');
$node->init;
$node->append_conf(
	'postgresql.conf', q{
shared_preload_libraries = 'idem'
idem.cleanup_databases = 'nothing'
synchronous_commit = on
});
$node->start;
$node->safe_psql(
	'postgres', q{
CREATE EXTENSION idem;
CREATE TABLE executions (request text, client int);
CREATE PROCEDURE execute(request text, client int) LANGUAGE plpgsql AS $$
BEGIN
	IF idem_claim('user', request) THEN
		INSERT INTO executions VALUES (request, client);
		PERFORM idem_complete(to_jsonb(client));
	END IF;
END $$;
});

# Eight clients send the same requests, each more than once.
my $script = $node->basedir . '/claims.sql';
append_to_file($script, q{
\set request random(1, 2000)
CALL execute(:request::text, :client_id);
});
my @pgbench = (
	'pgbench', '-n', '-M', 'prepared', '-c', 8, '-t', 1_000_000,
	'--random-seed=20261121', '-f', $script, '-h', $node->host, '-p', $node->port, 'postgres');

for my $round (1 .. 3)
{
	my $before = $node->safe_psql('postgres', 'SELECT count(*) FROM executions');
	my $output = '';
	my $run = IPC::Run::start(\@pgbench, '<', \undef, '>&', \$output);
	ok( $node->poll_query_until(
			'postgres', "SELECT count(*) >= least($before + 200, 2000) FROM executions"),
		"round $round: requests are being executed");
	$node->stop('immediate');
	$run->finish;
	$node->start;

	is( $node->safe_psql('postgres', q{
			SELECT count(*) FROM (SELECT request FROM executions
				GROUP BY request HAVING count(*) > 1) AS doubled}),
		'0',
		"round $round: no request was executed twice");
	is( $node->safe_psql('postgres', q{
			SELECT count(*) FROM executions FULL JOIN idem_claims ON request = request_id
			WHERE request IS NULL OR request_id IS NULL
				OR result IS DISTINCT FROM to_jsonb(client)}),
		'0',
		"round $round: each execution has its claim and result, and each claim its execution");
}

# The server crashes during a batch of the cleanup.
$node->safe_psql('postgres',
	"UPDATE idem_claims SET expires_at = now() - interval '1 hour'");
my $claims = $node->safe_psql('postgres', 'SELECT count(*) FROM idem_claims');
my ($in, $out, $err) = ('', '', '');
my $psql = IPC::Run::start(
	[ 'psql', '-XAtq', '-d', $node->connstr('postgres') ],
	'<', \$in, '>', \$out, '2>', \$err,
	IPC::Run::timeout($PostgreSQL::Test::Utils::timeout_default));
$in .= "BEGIN; SELECT 'removed', idem_cleanup();\n";
$psql->pump until $out =~ /removed\|(\d+)/;
is($1, $claims, 'a batch has removed all claims, and is not committed');
$node->stop('immediate');
$psql->finish;
$node->start;
is($node->safe_psql('postgres', 'SELECT count(*) FROM idem_claims'),
	$claims, 'after the crash all claims are there');
is($node->safe_psql('postgres', 'SELECT idem_cleanup()'),
	$claims, 'and can be removed');

$node->stop;
done_testing();
