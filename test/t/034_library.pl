# The library without its SQL objects, and the SQL objects without their library.

use strict;
use warnings;

use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = PostgreSQL::Test::Cluster->new('main');
$node->init;
$node->start;

sub error_of
{
	my ($sql) = @_;
	my ($status, $out, $err) = $node->psql('postgres', $sql);
	isnt($status, 0, "fails: $sql");
	return $err;
}

# The library alone
is($node->safe_psql('postgres', "LOAD 'idem'; SHOW idem.ttl"),
	'1h', 'the library can be loaded without the extension');
$node->safe_psql('postgres', q{
	CREATE FUNCTION lone_claim(text, text, text, bytea, interval) RETURNS boolean
	AS '$libdir/idem', 'idem_claim' LANGUAGE C});
my $err = error_of("SELECT lone_claim('u', 'r', '', NULL, NULL)");
like($err, qr/extension "idem" is not installed in this database/,
	'and says that the extension is missing');
like($err, qr/HINT: +Run CREATE EXTENSION idem/, 'and what to do');

# Another version of the SQL objects than the library serves
$node->safe_psql('postgres', q{
	CREATE EXTENSION idem;
	UPDATE pg_extension SET extversion = '0.9' WHERE extname = 'idem'});
$err = error_of("SELECT idem_claim('u', 'r')");
like($err, qr/extension "idem" has version 0\.9, its library serves version 1\.0/,
	'another version of the SQL objects is refused');
like($err, qr/HINT: +Run ALTER EXTENSION idem UPDATE/, 'with what to do');
$node->safe_psql('postgres',
	"UPDATE pg_extension SET extversion = '1.0' WHERE extname = 'idem'");
is($node->safe_psql('postgres', "SELECT idem_claim('u', 'r')"),
	't', 'and the right one is served');

# The SQL objects alone: as after a package was removed
$node->safe_psql('postgres', q{
	UPDATE pg_proc SET probin = '$libdir/idem_removed' WHERE probin = '$libdir/idem'});
$err = error_of("SELECT idem_claim('u', 'r2')");
# From 18 on without the prefix
like($err, qr/could not access file "(\$libdir\/)?idem_removed"/,
	'without its library a claim fails');
is($node->safe_psql('postgres', "SELECT count(*) FROM idem_claims"),
	'1', 'the claims can still be read');
$node->safe_psql('postgres', 'DROP EXTENSION idem');
pass('and the extension can be dropped');

$node->stop;
done_testing();
