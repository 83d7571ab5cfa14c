# The library without its SQL objects, and the SQL objects without their library.

use strict;
use warnings;

use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

use Client;

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

# The library without SQL objects
is($node->safe_psql('postgres', "LOAD 'idem'; SHOW idem.ttl"),
	'1d', 'the library can be loaded without the extension');
$node->safe_psql('postgres', q{
	CREATE FUNCTION lone_claim(text, text, text, bytea, interval) RETURNS boolean
	AS '$libdir/idem', 'idem_claim' LANGUAGE C});
my $err = error_of("SELECT lone_claim('u', 'r', '', NULL, NULL)");
like($err, qr/extension "idem" is not installed in this database/,
	'and says that the extension is missing');
like($err, qr/HINT: +Run CREATE EXTENSION idem/, 'and what to do');

# SQL objects of a version that the library does not support
(undef, undef, $err) = $node->psql('postgres', 'CREATE EXTENSION idem');
my $hint = $node->pg_version < 17 ? 'Add idem to shared' : 'Call idem_start_worker\(\)';
like($err, qr/WARNING:  no worker for this database: idem is not in shared_preload_libraries\b.*\n.*idem_cleanup_all\(\).*HINT:  $hint/s,
	'without preload, CREATE EXTENSION says what will not happen');
my $own = $node->safe_psql('postgres',
	"SELECT default_version FROM pg_available_extensions WHERE name = 'idem'");

sub set_version
{
	my ($version) = @_;
	$node->safe_psql('postgres',
		"UPDATE pg_extension SET extversion = '$version' WHERE extname = 'idem'");
	return;
}

my $update = qr/Run ALTER EXTENSION idem UPDATE\.$/m;
my $newer = qr/Install the newer library\. If it is installed already, restart the server/;
my $unknown = qr/Install the library that this version of the extension came with/;
my ($major, $minor) = $own =~ /^(\d+)\.(\d+)$/;

# They are compared as versions, not as text: 1.10 is later than 1.9.
for my $case (
	[ '0.9', $update ],
	[ '0.10', $update ],
	[ '0.999999999', $update ],
	[ "$major." . ($minor + 1), $newer ],
	[ "$major." . ($minor + 10), $newer ],
	[ ($major + 1) . '.0', $newer ],
	[ "1$major.0", $newer ],
	[ '', $unknown ],
	[ '1', $unknown ],
	[ '1.', $unknown ],
	[ '.0', $unknown ],
	[ '-1.0', $unknown ],
	[ ' 1.0', $unknown ],
	[ '1.0beta', $unknown ],
	[ '1.0.0', $unknown ],
	[ '1.0000000000', $unknown ],
	[ 'one', $unknown ])
{
	my ($version, $hint) = @$case;

	set_version($version);
	$err = error_of("SELECT idem_claim('u', 'r')");
	like(
		$err,
		qr/extension "idem" is version \Q$version\E, but the library requires (\d+\.\d+ to )?\Q$own\E$/m,
		"version '$version' is refused");
	like($err, qr/HINT: +$hint/, "version '$version': with what to do");
}
$err = error_of("SELECT idem_status('u', 'r')");
like($err, qr/is version one, but/, 'by what only reads, too');
set_version($own);
is($node->safe_psql('postgres', "SELECT idem_claim('u', 'r')"),
	't', 'and its own version is served');

# Where the library is not preloaded, a wrong value is not taken for the default, any.
$node->safe_psql('postgres', "ALTER DATABASE postgres SET idem.scopes = 'declard'");
my $misspelt = Client->new($node);
is($misspelt->ask("SELECT idem_claim('u', 'misspelt')"), 'ERROR:  22023', 'a misspelt idem.scopes is refused') for 1, 2;
$misspelt->quit;
$err = error_of("SELECT idem_claim('u', 'misspelt')");
like($err, qr/invalid value for parameter "idem.scopes": "declard"\n.*HINT: +Available values: any, declared/, 'with what to do');
is($node->safe_psql('postgres', "SET idem.scopes = 'ANY'; SELECT idem_status('u', 'misspelt') IS NULL"), 't', 'and nothing was claimed');
$node->safe_psql('postgres', "ALTER DATABASE postgres SET idem.scopes = 'declared'");
$err = error_of("SELECT idem_claim('u', 'misspelt')");
like($err, qr/scope "" is not declared/, 'the right value acts');
$node->safe_psql('postgres', 'ALTER DATABASE postgres RESET idem.scopes');

# A session has looked at the version already when an update declares a function with another
# result. The library must not fill in a row of a shape that it does not know.
my $session = Client->new($node);
is($session->ask("SELECT idem_claim('u', 'r')"), 'f', 'a session knows the version');
for my $function (
	[ 'idem_try_claim', 'text, text, text, bytea, interval', q{'u', 'x', '', NULL, NULL}, 5 ],
	[ 'idem_lease', 'text, text, interval, text, bytea, interval, jsonb', q{'u', 'x', '1 s', '', NULL, NULL, NULL}, 6 ],
	[ 'idem__cleanup_step', 'int, timestamptz, timestamptz', 'NULL, NULL, NULL', 3 ],
	[ 'idem_claim_many', 'text[], text[], text, bytea[], interval', q{'{u}', '{x}', '', NULL, NULL}, 3 ],
	[ 'idem_lookup', 'text, text, text', q{'u', 'r', ''}, 7 ],
	[ 'idem_lapsed', 'text, int', q{'', 10}, 6 ],
	[ 'idem__unsettled_claims', '', '', 6 ],
	[ 'idem__held_keys', '', '', 8 ])
{
	my ($name, $types, $arguments, $columns) = @$function;
	my $set = $name =~ /try_claim|lease|step/ ? '' : 'SETOF';

	for my $declared ($columns - 1, $columns + 1)
	{
		my $result = join(', ', map { "OUT c$_ text" } 1 .. $declared);
		$node->safe_psql('postgres', "CREATE FUNCTION another_$name(" . join(', ', grep { $_ } $types, $result) . qq{) RETURNS $set record
			AS '\$libdir/idem', '$name' LANGUAGE C});
		is($session->ask("SELECT * FROM another_$name($arguments)"), 'ERROR:  55000', "$name with $declared columns is refused");
		$node->safe_psql('postgres', "DROP FUNCTION another_$name");
	}
}
is($session->ask("SELECT idem_claim('u', 'x')"), 't', 'before it has done anything');
$session->quit;

# The SQL objects without the library, as after its package was removed
$node->safe_psql('postgres', q{
	UPDATE pg_proc SET probin = '$libdir/idem_removed' WHERE probin = '$libdir/idem'});
$err = error_of("SELECT idem_claim('u', 'r2')");
# From PostgreSQL 18 on the message lacks the prefix.
like($err, qr/could not access file "(\$libdir\/)?idem_removed"/,
	'without its library a claim fails');
is($node->safe_psql('postgres', "SELECT count(*) FROM idem_claims"),
	'2', 'the claims can still be read');
$node->safe_psql('postgres', 'DROP EXTENSION idem');
is( $node->safe_psql(
		'postgres', "SELECT to_regclass('idem_claims') IS NULL"),
	't', 'and the extension can be dropped');

$node->stop;
done_testing();
