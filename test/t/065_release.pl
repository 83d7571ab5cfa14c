# packaging/release-check --consistency: the files of this commit agree, and each file that
# disagrees is found.

use strict;
use warnings;

use PostgreSQL::Test::Utils;
use Test::More;
use IPC::Run;

my ($out, $err);

sub release_check
{
	my ($folder) = @_;
	my $run = IPC::Run::run([ "$folder/packaging/release-check", '--consistency' ], '>', \$out, '2>', \$err);
	return $run ? 0 : 1;
}

is(release_check('.'), 0, 'the files of this commit agree') || diag($out, $err);
is($err, '', 'without warnings');

# The release archive has no workflows.
my @workflows = grep { -d } '.github';
my $folder = PostgreSQL::Test::Utils::tempdir;
system_or_bail('sh', '-c', "cp --parents clients/node/package.json clients/python/pyproject.toml clients/python/src/idem_pg/__init__.py '$folder' && "
	. "cp -r @workflows *.control CHANGELOG.md META.json Makefile README.md doc packaging sql src '$folder'");

# Each of: file, what is there, what takes its place, what is printed
for my $case (
	[ 'META.json', qr/^  "version": "1/m, '  "version": "9', qr/version of the release: CHANGELOG\.md has 1/ ],
	[ 'META.json', qr/^      "version": "1/m, '      "version": "9', qr/META\.json: idem has 9/ ],
	[ 'META.json', qr/"version": "(\d+\.\d+)\.\d+"/, '"version": "$1"', qr/the version has three numbers/ ],
	[ 'META.json', qr/"PostgreSQL": "\d+/, '"PostgreSQL": "14', qr/oldest minor release: META\.json has 14/ ],
	[ 'META.json', qr/"file": "sql/, '"file": "gone', qr/there is no gone/ ],
	[ 'META.json', qr/^\{/, '', qr/META\.json is JSON: \S/ ],
	[ 'packaging/debian/rules', qr/idem-citus\.sql/, 'gone.sql', qr/there is no sql\/gone\.sql/ ],
	(map { [ $_, qr/(PostgreSQL|PGVERSION|-server)( \(?>=|) 15\.\d+/, '$1$2 15.99', qr/\Q$_\E has 15\.99/ ] }
		  'README.md', 'src/compat.h', 'packaging/debian/control.in', 'packaging/rpm/idem.spec'),
	[ 'CHANGELOG.md', qr/\A## 1/, '## 9', qr/CHANGELOG\.md has 9/ ],
	[ 'CHANGELOG.md', qr/PostgreSQL \d+ to \d+/, 'PostgreSQL', qr/CHANGELOG\.md does not say which/ ],
	[ 'idem.control', qr/default_version = '1/, q{default_version = '9}, qr/version of the SQL objects: idem\.control has 9/ ],
	[ 'idem_portable.control', qr/default_version = '1/, q{default_version = '9}, qr/idem_portable\.control has 9/ ],
	[ 'src/store/catalog.c', qr/SQL_VERSION_NEWEST "1/, 'SQL_VERSION_NEWEST "9', qr/SQL_VERSION_NEWEST has 9/ ],
	[ 'Makefile', qr/^sql\/idem--1/m, 'sql/idem--9', qr/Makefile does not make sql\/idem--/ ],
	[ 'packaging/debian/changelog', qr/\Aidem \(1/, 'idem (9', qr/debian\/changelog has 9/ ],
	[ 'packaging/debian/pgversions', qr/^15/m, '14', qr/pgversions has 14\+/ ],
	[ 'packaging/rpm/idem.spec', qr/^(Version: +)1/m, '${1}9', qr/idem\.spec has 9/ ],
	[ 'packaging/rpm/idem.spec', qr/ - 1\./, ' - 9.', qr/idem\.spec: changelog has 9/ ],
	[ 'doc/development.md', qr/^PostgreSQL \d+ to/m, 'PostgreSQL 9 to', qr/doc\/development\.md has 9 to/ ],
	[ 'doc/support.md', qr/PostgreSQL \d+ to/, 'PostgreSQL 9 to', qr/doc\/support\.md has 9 to/ ],
	[ 'src/idem.c', qr/version = "1/, 'version = "9', qr/src\/idem\.c has 9/ ],
	[ 'clients/node/package.json', qr/"version": "1/, '"version": "9', qr/package\.json has 9/ ],
	[ 'clients/python/pyproject.toml', qr/^version = "1/m, 'version = "9', qr/pyproject\.toml has 9/ ],
	[ 'clients/python/src/idem_pg/__init__.py', qr/__version__ = "1/, '__version__ = "9', qr/__init__\.py has 9/ ],
	[ 'META.json', qr/"mailto": "/, '"mailto": "x', qr/addresses: META\.json: bugtracker has x/ ],
	(map { [ $_, qr/contributors <(?=[^>]*>)/, 'contributors <x', qr/addresses: \Q$_\E has idem contributors <x/ ] }
		  'packaging/debian/changelog', 'packaging/debian/control.in', 'packaging/rpm/idem.spec'),
	[ 'packaging/debian/control.in', qr/^Homepage: /m, 'Homepage: x', qr/control\.in has xhttps/ ],
	[ 'packaging/rpm/idem.spec', qr/^(URL: +)/m, '${1}x', qr/idem\.spec has xhttps/ ],
	[ 'packaging/docker/cloudnativepg.yaml', qr/reference: /, 'reference: x', qr/cloudnativepg\.yaml has x/ ],
	[ 'clients/node/package.json', qr/"homepage": "/, '"homepage": "x', qr/package\.json has xhttps/ ],
	[ 'clients/node/package.json', qr/git\+https/, 'git+xhttps', qr/package\.json has xhttps/ ],
	[ 'clients/python/pyproject.toml', qr/email = "/, 'email = "x', qr/pyproject\.toml has x/ ],
	(map { [ 'clients/python/pyproject.toml', qr/^$_ = "/m, qq{$_ = "x}, qr/pyproject\.toml has xhttps/ ] } qw(Homepage Repository)),
	(map { [ "$_/SECURITY.md", qr/(?=\bmaintainers@)/, 'x', qr/SECURITY\.md has x/ ] } @workflows),
	(map { my $github = $_; map { [ "$github/workflows/$_.yml", qr/postgres: \[15, /, 'postgres: [', qr/$_\.yml has \d.*, not 15, / ] } qw(ci release) } @workflows),
	[ 'README.md', qr/\A/, "with PostgreSQL 9 or later\n", qr/README\.md has 9/ ])
{
	my ($file, $pattern, $replacement, $printed) = @$case;
	my $content = slurp_file("$folder/$file");
	my $changed = $content;

	$replacement =~ s/(["\\])/\\$1/g;
	ok($changed =~ s/$pattern/qq{"$replacement"}/ee, "$file: it is changed");
	unlink "$folder/$file";
	append_to_file("$folder/$file", $changed);
	is(release_check($folder), 1, 'and does not agree');
	like($out, qr/^FAILED .*$printed/m, 'which is said');
	unlink "$folder/$file";
	append_to_file("$folder/$file", $content);
}

done_testing();
