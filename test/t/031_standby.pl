# A standby refuses claims and answers look-ups. Once promoted it has all claims, and its
# worker cleans.

use strict;
use warnings;

use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $primary = PostgreSQL::Test::Cluster->new('primary');
$primary->init(allows_streaming => 1);
$primary->append_conf(
	'postgresql.conf', q{
shared_preload_libraries = 'idem'
idem.cleanup_interval = '100ms'
});
$primary->start;
$primary->safe_psql(
	'postgres', q{
CREATE EXTENSION idem;
BEGIN;
SELECT idem_claim('user', 'kept');
SELECT idem_complete('{"paid": 30}');
COMMIT;
});

$primary->backup('copy');
my $standby = PostgreSQL::Test::Cluster->new('standby');
$standby->init_from_backup($primary, 'copy', has_streaming => 1);
$standby->start;
$primary->safe_psql('postgres', "SELECT idem_claim('user', 'streamed')");
$primary->wait_for_catchup($standby, 'replay', $primary->lsn('insert'));

my ($status, $out, $err) = $standby->psql('postgres',
	"\\set VERBOSITY verbose\nSELECT idem_claim('user', 'new')");
isnt($status, 0, 'a claim on a standby fails');
like($err, qr/25006: +cannot execute idem_claim\(\) in a read-only transaction/,
	'with 25006');
like($err, qr/HINT: +This server is a standby: send the request to the primary/,
	'and a hint');
($status, $out, $err) =
  $standby->psql('postgres', 'SELECT idem_cleanup()');
like($err, qr/cannot execute idem_cleanup\(\) in a read-only transaction/,
	'so does a cleanup');
is($standby->safe_psql('postgres', "SELECT idem_status('user', 'streamed')"),
	'completed', 'a streamed claim can be looked up');
is($standby->safe_psql('postgres', "SELECT idem_result('user', 'kept')"),
	'{"paid": 30}', 'and so can a result');
is($standby->safe_psql('postgres', 'SELECT cleaning FROM idem_stat_cleanup'),
	'no worker for this database: this server is a standby, and the primary cleans', 'the statistics say who cleans');
is($standby->safe_psql('postgres', q{
		SELECT count(*) FROM pg_stat_activity WHERE backend_type LIKE 'idem%'}),
	'0', 'no worker runs on a standby');

$primary->stop('immediate');
$standby->promote;
is( $standby->safe_psql(
		'postgres', "SELECT idem_claim('user', 'kept'), idem_claim('user', 'streamed'), idem_claim('user', 'new')"),
	'f|f|t', 'promoted, it knows all claims and makes new ones');
$standby->safe_psql('postgres', q{
	UPDATE idem_claims SET expires_at = now() - interval '1 hour' WHERE request_id <> 'new';
	SELECT pg_reload_conf()});
ok($standby->poll_query_until('postgres',
		"SELECT string_agg(request_id, ',') = 'new' FROM idem_claims"),
	'and its worker removes expired ones');

$standby->stop;
done_testing();
