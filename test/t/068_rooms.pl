# The rooms of src/: each file is in the map of doc/development.md, and includes only files below it there.
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

done_testing();
