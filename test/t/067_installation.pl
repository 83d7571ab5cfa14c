# Installation: which files; and, whatever the session has set, whatever the name of the schema, and by whom: the
# same objects, in the tablespace of the database, and nothing of the installer's runs or is granted.

use strict;
use warnings;

use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use File::Find;

chomp(my ($sharedir, $pkglibdir) = map { scalar `pg_config --$_` } qw(sharedir pkglibdir));
my $root = PostgreSQL::Test::Utils::tempdir;
my @installed;
is(system("make -s with_llvm=no DESTDIR='$root' install >/dev/null"), 0, 'make install');
find({ no_chdir => 1, wanted => sub { push @installed, s/^\Q$root\E//r if -f } }, $root);
is_deeply(
	[ sort @installed ],
	[ sort "$pkglibdir/idem.so", map { "$sharedir/extension/$_" } map { ("$_.control", "$_--1.0.sql") } qw(idem idem_portable) ],
	'installs the library and the extensions, and nothing else');

my $node = PostgreSQL::Test::Cluster->new('main');
$node->init;
$node->append_conf('postgresql.conf', 'allow_in_place_tablespaces = on');
$node->start;
$node->safe_psql('postgres', q{
CREATE ROLE owner LOGIN;
CREATE ROLE guest LOGIN;
CREATE DATABASE shop OWNER owner;
CREATE TABLESPACE costly LOCATION ''});
$node->safe_psql('shop', q{
CREATE ACCESS METHOD other TYPE TABLE HANDLER heap_tableam_handler;
GRANT CREATE ON DATABASE shop TO guest;
SET ROLE owner;
CREATE SCHEMA requests;
GRANT USAGE ON SCHEMA requests TO guest});

# Errors, and what it printed
sub as
{
	my ($role, $sql) = @_;
	my (undef, $out, $err) = $node->psql('shop', $sql, on_error_stop => 1, extra_params => [ '-U', $role, '-v', 'VERBOSITY=verbose' ]);
	return ($err, $out);
}

my %script = map { $_ => slurp_file("sql/${_}--1.0.sql") } qw(idem idem_portable);
my %install = (
	(map { $_ => "CREATE EXTENSION $_ SCHEMA requests" } keys %script),
	'psql' => '\set schema requests' . "\n" . '\i sql/idem-portable.sql',
	'plain' => 'SET search_path = requests; ' . slurp_file('sql/idem-portable-plain.sql'));
my $drop = 'DROP SCHEMA requests CASCADE; CREATE SCHEMA requests; GRANT USAGE ON SCHEMA requests TO guest';

# ----- settings of the session -----

my $made = q{
SELECT c.relname, c.relkind, a.amname, c.reltablespace, c.relpersistence, c.reloptions, c.relacl, t.attname, t.attcompression, t.attcollation,
	format_type(t.atttypid, t.atttypmod), pg_get_expr(d.adbin, d.adrelid), CASE WHEN c.relkind = 'v' THEN pg_get_viewdef(c.oid) END,
	CASE WHEN c.relkind = 'i' THEN pg_get_indexdef(c.oid) END, obj_description(c.oid, 'pg_class'), col_description(c.oid, t.attnum)
FROM pg_class c JOIN pg_attribute t ON t.attrelid = c.oid AND t.attnum > 0 LEFT JOIN pg_attrdef d ON d.adrelid = c.oid AND d.adnum = t.attnum
	LEFT JOIN pg_am a ON a.oid = c.relam WHERE c.relnamespace = 'requests'::regnamespace ORDER BY c.relname, t.attnum;
SELECT pg_get_functiondef(oid), proacl, obj_description(oid, 'pg_proc') FROM pg_proc WHERE pronamespace = 'requests'::regnamespace ORDER BY 1;
SELECT conrelid::regclass, conname, pg_get_constraintdef(oid) FROM pg_constraint WHERE connamespace = 'requests'::regnamespace ORDER BY 1, 2;
SELECT tgenabled, pg_get_triggerdef(t.oid) FROM pg_trigger t JOIN pg_class c ON c.oid = tgrelid AND c.relnamespace = 'requests'::regnamespace ORDER BY 2;
SELECT typname, enumlabel FROM pg_enum e JOIN pg_type t ON t.oid = e.enumtypid ORDER BY 1, enumsortorder};
my %settings = (
	default_tablespace => 'costly', default_table_access_method => 'other', transform_null_equals => 'on', array_nulls => 'off',
	quote_all_identifiers => 'on', check_function_bodies => 'off', row_security => 'off', xmloption => 'document', backslash_quote => 'on',
	escape_string_warning => 'off', extra_float_digits => '-15', IntervalStyle => 'sql_standard', DateStyle => 'German', bytea_output => 'escape',
	client_min_messages => 'error', search_path => 'requests', 'plpgsql.extra_errors' => 'all');
# From 19 on all strings are conforming ones.
$settings{standard_conforming_strings} = 'off' if $node->safe_psql('postgres', 'SHOW server_version_num') < 190000;
$settings{default_toast_compression} = 'lz4'
  if $node->safe_psql('postgres', q{SELECT 'lz4' = ANY (enumvals) FROM pg_settings WHERE name = 'default_toast_compression'}) eq 't';
my @names = sort keys %settings;
my $set = 'DO $$ BEGIN END $$;' . join '', map { "SET $_ = '$settings{$_}';" } @names;
my $show = join '', map { "SHOW $_;" } @names;
my ($err, $before) = as('owner', "$set $show");
is($err, '', 'settings of a session');

for my $way (sort keys %install)
{
	($err) = as('owner', $install{$way});
	unlike($err, qr/ERROR/, "$way: installed") or diag $err;
	my (undef, $usual) = as('owner', $made);
	like($usual, qr/idem_claims\|r\|heap\|0\|/, "$way: as usual");
	as('owner', $drop);
	($err) = as('owner', "$set $install{$way}");
	unlike($err, qr/ERROR/, "$way: installed in that session") or diag $err;
	my %usual = map { $_ => 1 } split /\n/, $usual;
	is(join("\n", grep { !$usual{$_} } map { s/"requests"/requests/gr } split /\n/, (as('owner', $made))[1]), '', "$way: it makes the same");
	as('owner', $drop);
	# psql's file has a transaction of its own.
	($err, my $after) = as('owner', $way eq 'psql' ? "$set $install{$way}\n$show" : "$set BEGIN; $install{$way}; $show ROLLBACK");
	is($after, $before, "$way: and leaves the settings as they were") or diag $err;
	as('owner', $drop);
}

# The name of a tablespace in postgresql.conf is not checked.
$node->append_conf('postgresql.conf', "default_tablespace = 'gone'");
$node->reload;
$node->poll_query_until('shop', "SELECT current_setting('default_tablespace') = 'gone'");
for my $way (sort keys %install)
{
	($err) = as('owner', $install{$way});
	unlike($err, qr/ERROR/, "$way: installed where default_tablespace does not exist") or diag $err;
	as('owner', $drop);
}

# ----- what is pasted into the scripts -----

# CREATE EXTENSION pastes the names of the schema and of its owner. Some releases let a name end
# a string (before 15.4), or a comment.
my %pasted;
for my $extension (sort keys %script)
{
	my $text = $script{$extension};
	while ($text =~ m{\G(?:(/\*.*?\*/|--[^\n]*)|(E'(?:[^'\\]|''|\\.)*'|'(?:[^']|'')*'|(\$\w*\$).*?\3)|"[^"]*"|\w+|.)}gsc)
	{
		my ($comment, $string) = ($1 // '', $2 // '');
		$pasted{"$extension, comments"} .= $comment if $comment =~ /\@ext/;
		$pasted{"$extension, strings"} .= $string if $string =~ /\@ext/;
	}
	is($pasted{"$extension, comments"}, undef, "$extension: no name in a comment");
}
is($pasted{'idem, strings'}, undef, 'the trusted extension: no name in a string');
cmp_ok(length $pasted{'idem_portable, strings'}, '>', 90_000, 'which the other one has');

# The check is the first command, and comes before the first name.
my ($check) = $script{idem} =~ /\A(?:(?!\@ext|^DO ).)*^(DO \$block\$\n.*?\$block\$;\n)/ms;
($err) = as('owner', $check =~ s/150004/999999/r);
like($err, qr/ERROR:  0A000: idem needs PostgreSQL 15\.4 or later\nDETAIL: .*\nHINT:  Update the server /, 'idem: a server before 15.4 is refused');
# The script makes objects by the name of the schema, and finds them by its OID.
as('owner', 'CREATE EXTENSION idem SCHEMA requests; CREATE SCHEMA renamed');
my (undef, undef, $renamed) = $node->psql('shop', "SET search_path = renamed; $check");
like($renamed, qr/ERROR:  the schema of extension idem was renamed or dropped meanwhile/, 'idem: the name of the schema must mean the schema of the extension');
as('owner', "DROP EXTENSION idem; DROP SCHEMA renamed; $drop");
($check) = $script{idem_portable} =~ /\A(?:(?!\@ext|^DO ).)*^(DO \$block\$\n.*?\$block\$;\n)/ms;
for my $name ('requests"', "requests'", 'requests$block$', 'requests\\')
{
	my $quoted = '"' . ($name =~ s/"/""/gr) . '"';
	($err) = as('owner', "BEGIN; CREATE SCHEMA $quoted; SET search_path = $quoted; $check");
	like($err, qr/ERROR:  3F000: the name of the schema contains a quote, a dollar sign or a backslash\nHINT: /, "idem_portable: schema $quoted is refused");
}
is((as('owner', $check))[0], '', 'but an ordinary one is not');

# A name that ends a comment
for my $way (qw(psql plain))
{
	my $name = '*/ CREATE TABLE public.ran(); /*';
	my $renamed = $install{$way} =~ s/(schema|search_path =) \Krequests/$way eq 'plain' ? qq{"$name"} : qq{'$name'}/er;
	($err, my $out) = as('owner', qq{CREATE SCHEMA "$name"; $renamed\nSELECT to_regclass('public.ran') IS NULL, to_regclass('"$name".idem_claims') IS NOT NULL; DROP SCHEMA "$name" CASCADE});
	like($out, qr/^t\|t$/m, "$way: a schema whose name ends comments is an ordinary one") or diag $err;
}

# ----- who may install -----

# The owner of the schema lets nobody else create objects there.
($err) = as('guest', $install{idem});
like($err, qr/ERROR:  42501: role guest may not create objects in schema requests\nHINT:  GRANT CREATE ON SCHEMA requests TO guest; or install idem into a schema of its own\./,
	'idem: refused in a schema in which the installer may not create objects');
($err) = as('guest', $install{idem_portable});
like($err, qr/ERROR:  55000: others may create objects in schema requests: owner\n/, 'idem_portable: refused there');
as('owner', 'GRANT CREATE ON SCHEMA requests TO guest');
unlike((as('guest', $install{idem}))[0], qr/ERROR/, 'idem: installed with that right');

# ----- what is in the schema already -----

# idem's objects will belong to a superuser in the C edition, and to the installer otherwise.
for my $way (sort keys %install)
{
	as('owner', $drop);
	my $function = q{CREATE FUNCTION requests.idem_pay(user_id text, request_id text) RETURNS boolean LANGUAGE sql AS 'SELECT true';};
	$way eq 'idem' ? $node->safe_psql('shop', $function) : as('owner', $function);
	($err) = as('owner', $install{$way});
	unlike($err, qr/ERROR/, "$way: installed beside a function like its own") or diag $err;
	is($node->safe_psql('shop', q{SELECT count(*), bool_and(has_function_privilege('guest', oid, 'EXECUTE')) FROM pg_proc WHERE proname = 'idem_pay'}),
		'1|t', "$way: which stays as it is");
}

# The statement raises each error anew, so it must tell the same of it.
for my $there ([ '42710', 'CREATE TYPE requests.idem_state AS ENUM ()' ], [ '42P07', 'CREATE VIEW requests.idem_settings AS SELECT 1' ],
	[ '42723', 'CREATE FUNCTION requests.idem_version() RETURNS text LANGUAGE sql AS $$ SELECT $x$x$x$ $$' ])
{
	as('owner', "$drop; $there->[1]");
	($err) = as('owner', $install{plain});
	like($err, qr/ERROR:  $there->[0]: .*\nDETAIL:  Nothing was changed\.\nHINT:  Something of that name is there already: drop it/, "a name that is taken: $there->[0]");
}
as('owner', $drop);
($err) = as('owner', "SET default_transaction_read_only = on; $install{plain}");
like($err, qr/ERROR:  25006: cannot execute CREATE \w+ in a read-only transaction\nDETAIL:  Nothing was changed\.\nCONTEXT/, 'an error of another kind has no such HINT');

# ----- what somebody else adds to the extension -----

$node->safe_psql('postgres', 'CREATE ROLE app');
for my $extension (sort keys %script)
{
	as('owner', $drop);
	as('owner', $install{$extension});
	$node->safe_psql('shop', qq{
CREATE FUNCTION requests.idem_claim(varchar, varchar) RETURNS boolean LANGUAGE sql AS 'SELECT true';
REVOKE ALL ON FUNCTION requests.idem_claim(varchar, varchar) FROM PUBLIC;
ALTER FUNCTION requests.idem_claim(varchar, varchar) OWNER TO guest;
ALTER EXTENSION $extension ADD FUNCTION requests.idem_claim(varchar, varchar);
SELECT requests.idem_grant('app', 'app')});
	is($node->safe_psql('shop', q{SELECT has_function_privilege('app', 'requests.idem_claim(text, text, text, bytea, interval)', 'EXECUTE'),
		has_function_privilege('app', 'requests.idem_claim(varchar, varchar)', 'EXECUTE')}),
		't|f', "$extension: idem_grant() grants nothing that somebody else has added");
}

$node->stop;
done_testing();
