# The worker, when the library does not support the version of the SQL objects: it reports an
# error, keeps its statistics and marks, and cleans again once the versions fit.

use strict;
use warnings;

use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = PostgreSQL::Test::Cluster->new('main');
$node->init;
$node->append_conf(
	'postgresql.conf', q{
shared_preload_libraries = 'idem'
idem.cleanup_interval = '20ms'
});
$node->start;
$node->safe_psql('postgres', q{
	CREATE EXTENSION idem;
	INSERT INTO idem_scopes (scope, ttl) VALUES ('short', '1 ms')});

sub becomes
{
	my ($query, $name) = @_;
	ok($node->poll_query_until('postgres', $query), $name);
	return;
}

sub set_version
{
	my ($version) = @_;
	$node->safe_psql('postgres',
		"UPDATE pg_extension SET extversion = '$version' WHERE extname = 'idem'");
	return;
}

my $offset = -s $node->logfile;

# How often a worker has logged the error about this version
sub logged
{
	my ($version) = @_;
	my @found = slurp_file($node->logfile, $offset) =~
	  /ERROR: .*"idem" is version \Q$version\E, but .*\n(?:.*\n){0,2}.*CONTEXT: .*removing expired claims in database "postgres"/g;
	return scalar @found;
}

# A claim that expires at once. Until the version is reset no worker can remove it.
$node->safe_psql('postgres', q{
	BEGIN;
	SELECT idem_claim('u', 'r', 'short');
	UPDATE pg_extension SET extversion = '0.9' WHERE extname = 'idem';
	COMMIT});
becomes(
	q{SELECT errors > 0 AND last_error LIKE 'extension "idem" is version 0.9, but the library requires %' AND last_error_at IS NOT NULL FROM idem_stat_cleanup},
	'older objects than are served are reported');
becomes('SELECT errors > 2 FROM idem_stat_cleanup', 'they are tried again');
is( $node->safe_psql(
		'postgres', q{SELECT oldest_expired_age > '0' FROM idem_stat_cleanup}),
	't', 'the age of what is not cleaned stays, and grows');
is( $node->safe_psql(
		'postgres',
		q{SELECT value > 0 FROM idem_metrics WHERE name = 'idem_oldest_expired_age_seconds'}
	),
	't', 'in the metrics, too');
is(logged('0.9'), 1, 'the log has it once');

# An error about another version is logged again.
set_version('99.0');
becomes(
	q{SELECT last_error LIKE 'extension "idem" is version 99.0, but the library requires %' FROM idem_stat_cleanup},
	'newer objects than are served are reported');
my $errors = $node->safe_psql('postgres', 'SELECT errors FROM idem_stat_cleanup');
becomes("SELECT errors > $errors FROM idem_stat_cleanup", 'and tried again');
is(logged('99.0'), 1, 'the log has that once');
set_version('nonsense');
becomes(
	q{SELECT last_error LIKE 'extension "idem" is version nonsense, but %' FROM idem_stat_cleanup},
	'so are those of a version that is none');

is($node->safe_psql('postgres', 'SELECT count(*) FROM idem_claims'),
	1, 'nothing was removed');
set_version('1.0');
becomes('SELECT count(*) = 0 FROM idem_claims',
	'when the versions fit, it is cleaned without being told');

# The same applies to a member of the extension that is missing.
$offset = -s $node->logfile;
$node->safe_psql('postgres', q{
	BEGIN;
	SELECT idem_claim('u', 'r', 'short');
	ALTER TABLE idem_claims RENAME TO claims;
	COMMIT});
becomes(
	q{SELECT last_error LIKE 'public.idem_claims of extension "idem" is missing%' FROM idem_stat_cleanup},
	'a renamed table is reported');
$errors = $node->safe_psql('postgres', 'SELECT errors FROM idem_stat_cleanup');
becomes("SELECT errors > $errors FROM idem_stat_cleanup", 'and tried again');
my @found = slurp_file($node->logfile, $offset) =~ /ERROR: +public\.idem_claims of extension "idem" is missing/g;
is(scalar @found, 1, 'the log has it once');
$node->safe_psql('postgres', 'ALTER TABLE claims RENAME TO idem_claims');
becomes('SELECT count(*) = 0 FROM idem_claims', 'and cleaned when it is back');

$node->stop;
done_testing();
