# The portable edition where it is not installed by psql: as an extension of another name, as a
# package of database.dev, through pg_tle, and by clients that send one statement.

use strict;
use warnings;

use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use IPC::Run;

my $dist = PostgreSQL::Test::Utils::tempdir;
my $package = "$dist/dbdev/idem_portable";
my $name = 'handle@idem_portable';
my $plain = 'sql/idem-portable-plain.sql';

chomp(my ($bindir, $sharedir, $pkglibdir) = map { scalar `pg_config --$_` } qw(bindir sharedir pkglibdir));
is(`make -sB PG_CONFIG=none 'DIST=$dist' portable dist-dbdev dist-pgtle 2>&1`, '', 'make builds the packages without a server');

# ----- the folder for database.dev: the rules of its client, and of its registry -----

my @control = glob("$package/*.control");
is(scalar(@control), 1, 'one control file');
like($control[0], qr/\/[A-Za-z][A-Za-z0-9_]{2,32}\.control$/, 'a name that the client takes');
# It reads these lines itself: one key, one equals sign, quotes around the value.
my %control = slurp_file($control[0]) =~ /^(\w+) = '?([^=\n]*?)'?$/mg;
is(join(' ', sort keys %control), 'comment default_version relocatable superuser', 'keys that the client can read');
like($control{default_version}, qr/^\d{1,4}\.\d{1,4}\.\d{1,4}$/, 'a version of three numbers');
cmp_ok(length($control{comment}), '<=', 1000, 'a description that is short enough');
is_deeply([ map { s/.*\///r } glob("$package/*.sql") ], ["idem_portable--$control{default_version}.sql"], 'one SQL file, of that version');
my $script = slurp_file("$package/idem_portable--$control{default_version}.sql");
cmp_ok(length($script), '<', 250_000, 'which is short enough');
unlike($script, qr/^(BEGIN|START TRANSACTION|COMMIT|ROLLBACK)\s*;/mi, 'without commands for transactions');
like($script, qr/\A\\echo [^\n]*\\quit\n[^\\]/, 'its first line keeps psql from running it');
unlike($script =~ s/\A[^\n]*//r, qr/^\\/m, 'the others are no commands of psql');
my $readme = slurp_file("$package/README.md");
cmp_ok(length($readme), '<', 250_000, 'a README that is short enough');

# ----- a copy of the server, whose extension has the name of the package -----

# The server looks for its files relative to its program.
my $root = PostgreSQL::Test::Utils::tempdir;
system_or_bail('mkdir', '-p', "$root$bindir", "$root$sharedir/extension", ("$root$pkglibdir" =~ s/\/[^\/]+$//r));
system_or_bail('ln', '-s', $pkglibdir, "$root$pkglibdir") if !-e "$root$pkglibdir";
for my $program (glob("$bindir/*"))
{
	# Programs that look for others, or for their files, follow symbolic links first.
	my @copy = $program =~ /\/(postgres|initdb|pg_ctl|pg_dump|pg_restore)$/ ? ('cp') : ('ln', '-s');
	system_or_bail(@copy, $program, "$root$bindir/");
}
for my $file (glob("$sharedir/*"), glob("$sharedir/extension/*"))
{
	my $copy = "$root$file";
	symlink($file, $copy) if !-e $copy;
}
symlink($_, "$root$sharedir/extension/" . (s/.*\///r =~ s/^idem_portable/$name/r)) for glob("$package/idem_portable*");

my $node = PostgreSQL::Test::Cluster->new('main', install_path => "$root$bindir" =~ s/\/bin$//r);
$node->init;
$node->start;
$node->safe_psql('postgres', "CREATE ROLE $_ LOGIN") for qw(owner app);
$node->safe_psql('postgres', "CREATE DATABASE $_ OWNER owner") for qw(shop copy plain tle trapped);

sub as
{
	my ($role, $database, $sql) = @_;
	return $node->safe_psql($database, $sql, extra_params => [ '-U', $role ]);
}

as('owner', 'shop', qq{
CREATE SCHEMA requests;
CREATE EXTENSION "$name" SCHEMA requests;
INSERT INTO requests.idem_scopes (scope, ttl) VALUES ('mail', '2 days');
UPDATE requests.idem_settings SET ttl = '3 hours';
SELECT requests.idem_grant('app', 'app');
});
as('app', 'shop', "SELECT requests.idem_claim('u', 'before'), requests.idem_claim('u', 'before', 'mail')");
my $token = as('app', 'shop', "SELECT token FROM requests.idem_lease('u', 'leased', lease => '1 hour')");
is(as('owner', 'shop', q{SELECT string_agg(DISTINCT c, ' ') FROM pg_proc, unnest(proconfig) AS c WHERE proname LIKE 'idem\_%' AND c ~ 'search_path'}),
	'search_path=pg_catalog, pg_temp', 'no function has the search_path of the installation');

my $content = q{
SELECT * FROM requests.idem_claims ORDER BY request_id, scope;
SELECT * FROM requests.idem_scopes;
SELECT * FROM requests.idem_settings;
SELECT last_value, is_called FROM requests.idem_token_seq;
SELECT extname FROM pg_extension WHERE extname LIKE '%idem%'};
my $before = as('owner', 'shop', $content);
like($before, qr/^$name$/m, 'the extension has the name of the package');
my $dump = $node->basedir . '/shop.dump';
$node->command_ok([ 'pg_dump', '-Fc', '-f', $dump, $node->connstr('shop') ], 'it is dumped');
$node->command_ok([ 'pg_restore', '--exit-on-error', '-d', $node->connstr('copy'), $dump ], 'and restored');
is(as('owner', 'copy', $content), $before, 'with all claims, scopes, settings and tokens');
is(as('app', 'copy', "SELECT requests.idem_claim('u', 'before'), requests.idem_claim('u', 'before', 'mail'), requests.idem_claim('u', 'after')"),
	'f|f|t', 'claims guard after that');
is(as('app', 'copy', "SELECT requests.idem_complete('u', 'leased', '1', $token)"), 't', 'and a holder settles its lease');

IPC::Run::run(
	[ 'psql', '-Xq', '-h', $node->host, '-p', $node->port, '-U', 'owner', '-v', 'schema=requests', '-v', 'to=idem_portable', '-f', 'sql/idem-move.sql', 'shop' ],
	'<', \undef, '>', \my $out, '2>', \my $err);
like($out, qr/^moved from $name to idem_portable: 3 claims, 1 scopes$/, 'the move finds it') or diag $err;
is(as('app', 'shop', "SELECT requests.idem_claim('u', 'before')"), 'f', 'and keeps its claims');

# ----- a session that quotes all names -----

# The overloads for other types of ids are made from the text of the server.
my $routines = q{SELECT p.oid::regprocedure, obj_description(p.oid, 'pg_proc') FROM pg_proc AS p WHERE p.proname LIKE 'idem\_%'
	ORDER BY p.oid::regprocedure::text COLLATE "C"};
$node->safe_psql('postgres', "CREATE DATABASE $_") for qw(unquoted quoted);
for my $extension (qw(idem idem_portable))
{
	$node->safe_psql('unquoted', "DROP EXTENSION IF EXISTS idem; CREATE EXTENSION $extension");
	$node->safe_psql('quoted', "SET quote_all_identifiers = on; DROP EXTENSION IF EXISTS idem; CREATE EXTENSION $extension");
	my $made = $node->safe_psql('unquoted', $routines);

	like($made, qr/^idem_claim\(bigint,uuid,/m, "$extension: has overloads");
	is($node->safe_psql('quoted', $routines), $made, "$extension: quote_all_identifiers changes nothing");
}
$node->safe_psql('quoted', q{SELECT idem_claim('u', 'before'); SELECT idem_grant('app', 'app'); ALTER DATABASE quoted SET quote_all_identifiers = on});
IPC::Run::run(
	[ 'psql', '-Xq', '-h', $node->host, '-p', $node->port, '-v', 'schema=public', '-v', 'to=idem_portable', '-f', 'sql/idem-move.sql', 'quoted' ],
	'<', \undef, '>', \$out, '2>', \$err);
like($out, qr/^moved from idem_portable to idem_portable: 1 claims, 0 scopes$/, 'moved under quote_all_identifiers') or diag $err;
like($err, qr/\A\S+ WARNING:  the functions of idem will run as a superuser: [^\n]*\nDETAIL: [^\n]*\nHINT: [^\n]*\n\z/, 'with one warning, of the superuser');
is($node->safe_psql('quoted', "SET quote_all_identifiers = off; $routines"), $node->safe_psql('unquoted', $routines), 'with all functions');
is(as('app', 'quoted', "SELECT idem_claim('u', 'before'), idem_claim(1, gen_random_uuid())"), 'f|t', 'and rights');

# ----- the file for pg_tle -----

# In place of pg_tle: what install_extension() gets
as('owner', 'tle', q{
CREATE SCHEMA pgtle;
CREATE TABLE pgtle.installed AS SELECT ''::text AS name, ''::text AS version, ''::text AS description, ''::text AS ext WHERE false;
CREATE FUNCTION pgtle.install_extension(name text, version text, description text, ext text, requires text[] DEFAULT NULL, schema text DEFAULT NULL)
RETURNS boolean LANGUAGE sql AS 'INSERT INTO pgtle.installed VALUES ($1, $2, $3, $4) RETURNING true';
});
$node->command_ok([ 'psql', '-Xq', '-v', 'ON_ERROR_STOP=1', '-d', $node->connstr('tle'), '-f', "$dist/pgtle/idem_portable.sql" ], 'pg_tle: installed by psql');
my ($version) = slurp_file('idem_portable.control') =~ /^default_version = '(.*)'$/m;
is(as('owner', 'tle', 'SELECT name, version, description FROM pgtle.installed'),
	"idem_portable|$version|$control{comment}", 'pg_tle: name, version and comment of the control file');
is(as('owner', 'tle', 'SELECT ext FROM pgtle.installed') =~ s/\s+\z//r, $script =~ s/\A\\echo[^\n]*//r =~ s/\A\s+|\s+\z//gr =~ s/\A/\n/r,
	'pg_tle: the script of the extension');

# ----- the file for clients other than psql -----

my $sql = slurp_file($plain);
my $shown = q{SELECT current_setting('search_path') || '|' || current_setting('standard_conforming_strings') || '|' || current_user};

sub refused
{
	my ($before, $message, $what) = @_;
	my (undef, undef, $complaint) = $node->psql('plain', "BEGIN; $before; $sql", extra_params => [ '-U', 'owner' ]);

	like($complaint, qr/ERROR:  $message\n/, "$what: refused");
	cmp_ok(length($complaint), '<', 2000, "$what: without the whole file in the message");
	is(as('owner', 'plain', q{SELECT count(*) FROM pg_class WHERE relname LIKE 'idem\_%' AND relnamespace::regnamespace::text <> 'requests'}), '0', "$what: nothing is installed");
}

as('owner', 'plain', 'CREATE SCHEMA requests; CREATE SCHEMA open; GRANT CREATE ON SCHEMA open TO app; CREATE SCHEMA "$odd"');
refused('SET LOCAL search_path = missing', 'there is no schema to install idem into', 'no schema');
refused('SET LOCAL search_path = "$odd"', 'the name of the schema contains a quote, a dollar sign or a backslash', 'an odd name');
refused('SET LOCAL search_path = open', 'others may create objects in schema open: app', 'a schema of all');
# From 19 on all strings are conforming ones.
my $strings = $node->safe_psql('plain', 'SHOW server_version_num') < 190000 ? 'off' : 'on';
my $set_strings = $strings eq 'off' ? 'SET standard_conforming_strings = off; SET escape_string_warning = off;' : '';
is(as('owner', 'plain', "SET search_path = requests, public; $set_strings BEGIN; $sql; $shown; COMMIT; $shown"),
	"requests, public|$strings|owner\nrequests, public|$strings|owner", 'it leaves the settings of the transaction as they were');
as('owner', 'plain', "SELECT requests.idem_grant('app', 'app')");
is(as('app', 'plain', "SELECT requests.idem_claim('u', 'r'), requests.idem_claim('u', 'r')"), 't|f', 'claims guard');
(undef, undef, $err) = $node->psql('plain', "BEGIN; SET LOCAL search_path = requests; $sql; COMMIT", extra_params => [ '-U', 'owner' ]);
like($err, qr/NOTICE:  idem \S+ is installed in schema requests already$/, 'a second time: it says so');
refused('SELECT', 'idem is installed in this database already, in schema requests', 'into another schema');
is(as('app', 'plain', "SELECT requests.idem_claim('u', 'r')"), 'f', 'claims guard as before');

# Objects of another role that match better than those of pg_catalog, in the client's path
$node->safe_psql('trapped', 'CREATE SCHEMA requests; CREATE SCHEMA trap AUTHORIZATION app');
as('app', 'trapped', q{
CREATE SEQUENCE trap.calls;
GRANT USAGE ON SEQUENCE trap.calls TO PUBLIC;
GRANT USAGE ON SCHEMA trap TO PUBLIC;
CREATE FUNCTION trap.replace(text, text, text) RETURNS text LANGUAGE sql AS $$ SELECT pg_catalog.format('SELECT %s', nextval('trap.calls')) $$;
CREATE FUNCTION trap.quote_ident(text) RETURNS text LANGUAGE sql AS $$ SELECT nextval('trap.calls')::text $$;
CREATE FUNCTION trap.current_schema() RETURNS name LANGUAGE sql AS $$ SELECT nextval('trap.calls')::text::name $$;
CREATE FUNCTION trap.set_config(text, text, bool) RETURNS text LANGUAGE sql AS $$ SELECT nextval('trap.calls')::text $$;
CREATE FUNCTION trap.equals(text, text) RETURNS bool LANGUAGE sql AS $$ SELECT nextval('trap.calls') > 0 $$;
CREATE OPERATOR trap.= (LEFTARG = text, RIGHTARG = text, FUNCTION = trap.equals);
CREATE OPERATOR trap.~ (LEFTARG = text, RIGHTARG = text, FUNCTION = trap.equals);
});
my $trapped = 'SET search_path = requests, trap, pg_catalog';
(undef, undef, $err) = $node->psql('trapped', "$trapped; $sql; $sql");
like($err, qr/NOTICE:  idem \S+ is installed in schema requests already$/, 'traps in the path: installed, and found');
is($node->safe_psql('trapped', 'SELECT is_called FROM trap.calls'), 'f', 'none of which is called');
is($node->safe_psql('trapped', "$trapped; SELECT 'a'::text = 'b'::text; SELECT is_called FROM trap.calls"), "t\nt", 'though they are in the way');

my $made_here = q{
SELECT p.oid::regprocedure, p.proacl, p.proconfig, p.prosecdef, md5(p.prosrc) FROM pg_proc AS p WHERE p.proname LIKE 'idem\_%'
	ORDER BY p.oid::regprocedure::text COLLATE "C";
SELECT c.relname, c.relowner::regrole FROM pg_class AS c WHERE c.relname LIKE 'idem\_%' ORDER BY 1};
as('owner', 'plain', "SELECT requests.idem_revoke('app', 'app')");
as('owner', 'shop', "SELECT requests.idem_revoke('app', 'app')");
is(as('owner', 'plain', $made_here), as('owner', 'shop', $made_here), 'it makes what the file for psql makes');

$node->stop;
done_testing();
