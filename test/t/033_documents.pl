# README.md and doc/: their SQL runs as printed and returns what its comments say, their
# links lead somewhere, doc/reference.md leaves nothing out, and they stay short.
#
# Each file gets a database "app" of its own; its blocks run in their order, each in a
# session of its own, as the owner of the database, who is no superuser. In a file,
#
#	```sql								runs
#	SELECT ...;    -- 70, a remark		returns 70; likewise true, {"a": 1}, claimed | 1
#	SELECT ...;    -- ID422				fails with this SQLSTATE
#	<!-- not run: REASON -->			on the line before ```sql: does not run
#	<!-- run -->						on the line before ```sh: runs, on the same database
#	<!-- editions: idem idem_portable -->	runs with each of these; default: idem
#
# The extension is installed first, unless a block of the file installs it.

use strict;
use warnings;

use File::Basename qw(dirname);
use File::Find;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

# A value, as psql prints it but for true and false; and a row of them
my $value = qr/\{[^\n]*?\}|-?\d+(?:\.\d+)?|true|false|claimed|completed|failed|in_progress|timed_out|unknown|mismatch|stale|invalid/;
my $row = qr/$value(?: \| $value)*(?=[,;\n])/;

my @documents = ('README.md', sort glob('doc/*.md'));

my @lines = slurp_file('README.md') =~ /\n/g;
cmp_ok(scalar(@lines), '<=', 160, 'README.md is short');
cmp_ok(scalar(split ' ', slurp_file('README.md')), '<', 1300, 'README.md has few words');

my $words = 0;
for my $file (grep { /^doc\// } @documents)
{
	my @words = split(' ', slurp_file($file));

	$words += @words;
	cmp_ok(scalar(@words), '<=', 3500, "words of $file") if $file ne 'doc/reference.md';
}
cmp_ok($words, '<=', 25000, 'words of doc/');

# ----- links -----

my @pages;
find(
	{
		no_chdir => 1,
		wanted => sub {
			$File::Find::prune = 1 if /\/(\.git|node_modules|tmp_check|dist)$/;
			push @pages, s/^\.\///r if /\.md$/;
		}
	},
	'.');

sub prose
{
	my ($file) = @_;
	return slurp_file($file) =~ s/^[ \t]*```.*?^[ \t]*```$//msgr;
}

# The anchors that a forge makes of headings
sub anchors
{
	my ($file) = @_;
	my (%anchors, %seen);

	for my $heading (prose($file) =~ /^#+ +(.*?)\s*$/mg)
	{
		my $anchor = lc $heading;
		$anchor =~ s/[^\w\- ]//g;
		$anchor =~ s/ /-/g;
		$anchors{ $anchor . ($seen{$anchor} ? "-$seen{$anchor}" : '') } = 1;
		$seen{$anchor}++;
	}
	return \%anchors;
}

sub is_broken
{
	my ($file, $link) = @_;
	my ($path, $anchor) = split(/#/, $link, 2);
	my $target = $path eq '' ? $file : dirname($file) . "/$path";

	return 1 if !-e $target;
	return defined $anchor && !anchors($target)->{$anchor};
}

my %linked;
for my $file (sort @pages)
{
	my @links = grep { !/^[a-z]+:/ } prose($file) =~ /\]\(([^)\s]+)\)/g;
	is_deeply([ grep { is_broken($file, $_) } @links ], [], "the links of $file");
	next if $file ne 'doc/README.md';
	$linked{'doc/' . s/#.*//r} = 1 for @links;
}
is_deeply([ grep { !$linked{$_} } grep { /^doc\/[^R]/ } @documents ], [], 'doc/README.md links to each page');
like(slurp_file('README.md'), qr/\(doc\/README\.md\)/, 'README.md links to doc/README.md');

# Over 512 characters, lintian refuses Debian's source package.
for my $file (sort @pages)
{
	my @long = grep { length > 500 } split(/\n/, slurp_file($file));
	is_deeply([ map { substr($_, 0, 60) } @long ], [], "$file: no line is longer than 500 characters");
}

# ----- what runs -----

# Blocks that run, in their order, as [ language, text ]
sub blocks_of
{
	my ($file) = @_;
	my $text = slurp_file($file);
	my (@blocks, $not_run);

	while ($text =~ /^(?:<!-- (not run: [^\n]+|run) -->\n)?```(\w*)\n(.*?)^```$/msg)
	{
		my ($marker, $language, $block) = ($1 // '', $2, $3);

		$not_run++ if $marker =~ /^not/ && $language eq 'sql';
		push @blocks, [ $language, $block ]
		  if $language eq 'sql' && $marker eq '' || $language eq 'sh' && $marker eq 'run';
	}
	my @markers = $text =~ /^<!-- (not run|run)\b/mg;
	is(scalar(@markers), ($not_run // 0) + (grep { $_->[0] eq 'sh' } @blocks),
		"$file: each marker stands before a block that it is for");
	unlike($text, qr/^[ \t]+```sql/m, "$file: no block of SQL is indented, which would not run");
	return @blocks;
}

my $node = PostgreSQL::Test::Cluster->new('main');
$node->init;
$node->append_conf('postgresql.conf', "shared_preload_libraries = 'idem'");
$node->start;
$node->safe_psql('postgres', 'CREATE ROLE owner LOGIN CREATEROLE');

# What a statement is to return stands between two lines that psql prints.
sub run_sql
{
	my ($name, $block) = @_;
	my (@expected, @got);
	my @errors = $block =~ /;[ ]+-- ((?:ID|\d\d)[0-9A-Z]{3})\b/g;

	$block =~ s{^(SELECT [^\n]*;)[ ]+-- ($row)}{
		push @expected, $2;
		"\\echo {{\n$1\n\\echo }}\n-- "}emg;
	my ($status, $out, $err) = $node->psql('app', $block,
		on_error_stop => 0, extra_params => [ '-U', 'owner', '-v', 'VERBOSITY=verbose' ]);

	is($status, 0, "$name: psql") or diag($err);
	is_deeply([ $err =~ /(?:ERROR|FATAL|WARNING): +(\w{5}):/g ], \@errors,
		"$name: fails where it says so, and only there") or diag("$block\n$err");
	@got = $out =~ /^\{\{\n(.*?)\n?\}\}$/msg;
	for my $expected (@expected)
	{
		my @columns = split(/ \| /, $expected);
		s/^(true|false)$/substr($1, 0, 1)/e for @columns;
		$expected = join('|', @columns);
	}
	is_deeply(\@got, \@expected, "$name: returns what it says") if @expected;
	return;
}

sub run_shell
{
	my ($name, $block) = @_;
	local %ENV = (%ENV, PGHOST => $node->host, PGPORT => $node->port, PGUSER => 'owner', PGDATABASE => 'app');

	ok(run_log([ 'bash', '-ec', $block ]), "$name: shell");
	return;
}

sub run_document
{
	my ($file, $edition, @blocks) = @_;
	my $n = 0;

	$node->safe_psql('postgres', 'CREATE DATABASE app OWNER owner');
	$node->safe_psql('app', "CREATE EXTENSION $edition", extra_params => [ '-U', 'owner' ])
	  unless grep { $_->[1] =~ /CREATE EXTENSION|idem-portable\.sql/ } @blocks;
	for (@blocks)
	{
		my ($language, $block) = @$_;
		my $name = "$file, $edition, block " . ++$n;

		$block =~ s/(CREATE EXTENSION) idem(?=[ ;])/$1 $edition/g;
		$language eq 'sql' ? run_sql($name, $block) : run_shell($name, $block);
	}

	$node->safe_psql('postgres', 'DROP DATABASE app WITH (FORCE)');
	$node->safe_psql('postgres', q{
		SELECT format('DROP ROLE %I', rolname) FROM pg_roles WHERE oid >= 16384 AND rolname <> 'owner' \gexec
		ALTER SYSTEM RESET ALL;
		SELECT pg_reload_conf()});
	return;
}

my $run = 0;
for my $file (@documents)
{
	my @blocks = blocks_of($file);
	my ($editions) = slurp_file($file) =~ /^<!-- editions: ([\w ]+) -->$/m;

	$run += @blocks;
	next if !@blocks;
	run_document($file, $_, @blocks) for split(/ /, $editions // 'idem');
}
cmp_ok($run, '>=', 20, 'blocks have run');

# ----- what the reference has to name -----

my $reference = slurp_file('doc/reference.md');

# Its sections, by heading
my %section = $reference =~ /^###? ([^\n]*)\n(.*?)(?=^##|\z)/msg;

sub names_each
{
	my ($what, $text, @names) = @_;
	cmp_ok(scalar(@names), '>', 0, "$what: there are some");
	is_deeply([ grep { index($text // '', $_) < 0 } @names ], [], "$what: doc/reference.md has each");
	return;
}

sub lines_of
{
	return split(/\n/, $node->safe_psql('postgres', shift));
}

# Members of the extension, as "id, name"
my $members = q{
	SELECT d.objid FROM pg_depend d JOIN pg_extension e ON d.refobjid = e.oid
	WHERE d.refclassid = 'pg_extension'::regclass AND d.deptype = 'e' AND e.extname = 'idem' AND d.classid = };

$node->safe_psql('postgres', q{
	CREATE EXTENSION idem;
	CREATE ROLE app;
	CREATE ROLE operator;
	SELECT idem_grant('app', 'app'), idem_grant('operator', 'operator')});

# Signatures, with the names, types and defaults of the arguments that are passed in
my $signatures = qq{
	SELECT p.proname || '(' || coalesce(string_agg(
			quote_ident(a.name) || ' ' || format_type(a.type, NULL) || coalesce(' DEFAULT ' ||
				regexp_replace(pg_get_function_arg_default(p.oid, a.n::int), '::[^:]+\$', ''), ''),
			', ' ORDER BY a.n), '') || ')'
	FROM pg_proc p LEFT JOIN LATERAL (
			SELECT * FROM unnest(coalesce(p.proallargtypes, p.proargtypes::oid[]), p.proargmodes, p.proargnames)
				WITH ORDINALITY AS t (type, mode, name, n)
			WHERE t.mode IS NULL OR t.mode IN ('i', 'b')) a ON true
	WHERE p.oid IN ($members 'pg_proc'::regclass)
		AND p.proname !~ '^idem__'		-- internal
		AND coalesce(p.proargnames[1] || p.proargnames[2], '') !~ '^user_(uuid|number)|^user_idrequest_uuid'		-- ids of other types
	GROUP BY p.oid, p.proname ORDER BY 1};
my $squeezed = $reference =~ s/\s+/ /gr;
names_each('functions', $squeezed, lines_of($signatures));

names_each('settings, with their defaults', $reference, lines_of(q{
	SELECT '| `' || name || '` | ' || coalesce('`' || nullif(current_setting(name), '') || '`', 'empty') || ' |'
	FROM pg_settings WHERE name LIKE 'idem.%'}));

for my $relation (lines_of("SELECT c.relname FROM pg_class c WHERE c.relkind IN ('r', 'v') AND c.oid IN ($members 'pg_class'::regclass)"))
{
	names_each("columns of $relation", $section{$relation},
		lines_of("SELECT '`' || attname || '`' FROM pg_attribute WHERE attrelid = '$relation'::regclass AND attnum > 0"));
}
names_each('metrics', $section{idem_metrics}, lines_of(q{SELECT DISTINCT '`' || name || '`' FROM idem_metrics}));
names_each('outcomes', $section{Outcomes}, lines_of(q{SELECT '| `' || unnest(enum_range(NULL::idem_outcome)) || '` |'}));
names_each('SQLSTATEs', $section{SQLSTATEs},
	map { '`' . s/\W//gr . '`' } slurp_file('src/sqlstate.h') =~ /MAKE_SQLSTATE\((.*?)\)/g);

# ----- the parts of the portable edition -----

my @file = split(/\n/, slurp_file('sql/idem-portable.sql'));
my @starts = grep { $file[$_] =~ /^-- ----- .* -----$/ } 0 .. $#file;
my (@parts, @wrong);
for my $item (slurp_file('doc/for-auditors.md') =~ /^\d+\. (.*?\(\d+\))/msg)
{
	my ($lines) = $item =~ /(\d+)\)$/;
	my $from = @parts;

	push @parts, map { s/\s+/ /gr } $item =~ /\*([^*]+)\*/g;
	my $end = $starts[@parts] // @file;
	push @wrong, $item if abs($lines - ($end - ($from || @parts ? $starts[$from] : 0))) > 40;
}
is_deeply(\@parts, [ map { $file[$_] =~ /^-- ----- (.*) -----$/ } @starts ], 'doc/for-auditors.md has the parts of the portable edition');
is_deeply(\@wrong, [], 'and their lines, to within 40');

# ----- messages that are explained -----

# String literals that C has in pieces are put together.
my $sources = join('', map { slurp_file($_) } glob('src/*.c src/*/*.c'), glob('sql/*--*.sql')) =~ s/"\s*\n\s*"//gr;
$sources =~ s/\\"/"/g;
my ($explained) = slurp_file('doc/operations.md') =~ /^## Troubleshooting\n(.*?)^Messages of the server/ms;
my @messages = map { /`([^`]+)`/g } ($explained // '') =~ /^\| (`[^|]+`) \|/mg;
cmp_ok(scalar(@messages), '>', 10, 'messages are explained');
for my $message (@messages)
{
	my @missing = grep { index($sources, $_) < 0 } split(/ ?"?\.\.\."? ?/, $message);
	is_deeply(\@missing, [], "a message that is raised: $message");
}

$node->stop;
done_testing();
