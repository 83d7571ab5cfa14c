# The rooms of src/: each file is in the map of doc/development.md, and includes only files below it there.
# And the map of the tests, test/README.md: it has each test, and each function, table and view.
use strict;
use warnings;
use PostgreSQL::Test::Utils;
use Test::More;

my ($map) = slurp_file('doc/development.md') =~ /^\| file \| its one concern \|\n(.*?)\n\n/ms;
my ($room, @order) = '';
for my $row (split /\n/, $map)
{
	my ($names) = $row =~ /^\| ([^|]*) \|/;
	$room = $1, next if $names =~ m{^\*\*`(\w+/)`\*\*$};
	push @order, map { /^(?:idem|guc|outcome|sqlstate|compat)\./ ? $_ : $room . $_ } $names =~ /`([\w.]+)`/g;
}
my $n = 0;
my %place = map { s/\.[ch]$//r => $n++ } @order;

my @files = map { s{^src/}{}r } glob('src/*.[ch] src/*/*.[ch]');
cmp_ok(scalar(@files), '>', 60, 'files of src/');
my (@lost, @upward);
for my $file (@files)
{
	my $name = $file =~ s/\.[ch]$//r;
	my $own = $place{$name};
	push(@lost, $file), next if !defined $own;
	for my $included (slurp_file("src/$file") =~ /^#include "([\w\/]+)\.h"/mg)
	{
		my $place = $place{$included};
		next if $included eq 'postgres' || !-e "src/$included.h" || $included eq $name;
		push @upward, "$file: $included.h" if !defined $place || $place < $own;
	}
}
is_deeply(\@lost, [], 'each is in the map');
is_deeply(\@upward, [], 'each includes only what is below it');
is_deeply([ grep { my $name = $_; !grep { s/\.[ch]$//r eq $name } @files } sort keys %place ], [], 'the map has no other file');

my $index = slurp_file('test/README.md');
my %tests = (sql => [ glob('test/sql/*.sql') ], specs => [ glob('test/specs/*.spec') ], t => [ glob('test/t/*.pl') ]);
my %indexed;
for my $row (grep { !/^\| what|^\|---/ } $index =~ /^(\|.*\|)$/mg)
{
	my (undef, undef, @cells) = split /\s*\|\s*/, $row;
	my @folders = qw(sql specs t);
	for my $cell (@cells)
	{
		my $folder = shift @folders;
		$indexed{$folder}{$_} = 1 for split /, /, $cell;
	}
}
for my $folder (sort keys %tests)
{
	is_deeply([ sort keys %{ $indexed{$folder} } ], [ sort map { /([^\/]+)\.\w+$/ } @{ $tests{$folder} } ], "test/README.md has the tests of test/$folder");
}
is_deeply([ grep { slurp_file($_) !~ /^(?:#|--) \w/ } map { @$_ } values %tests ], [], 'each begins by saying what it tests');
my %public = map { $_ => 1 } slurp_file('sql/idem--1.0.sql') =~ /^CREATE (?:FUNCTION|PROCEDURE|VIEW|TABLE) \@extschema\@\.(idem_[a-z]\w*)/mg;
cmp_ok(scalar(keys %public), '>', 30, 'functions, tables and views');
is_deeply([ grep { $index !~ /`$_`/ } sort keys %public ], [], 'test/README.md has each');

done_testing();
