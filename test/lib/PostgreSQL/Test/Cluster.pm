# The server's module of this name, whose init() copies the folder INITDB_TEMPLATE, as that of PostgreSQL 17 does by
# itself: initdb takes most of the time of a short test.

use strict;
use warnings;

my $here = __FILE__ =~ s/\/PostgreSQL\/Test\/Cluster\.pm$//r;
{
	local @INC = grep { $_ ne $here } @INC;
	delete $INC{'PostgreSQL/Test/Cluster.pm'};
	require PostgreSQL::Test::Cluster;
}

my $system_or_bail = \&PostgreSQL::Test::Utils::system_or_bail;

no warnings 'redefine';

*PostgreSQL::Test::Utils::system_or_bail = sub
{
	my ($program, undef, $data) = @_;

	# With more arguments it makes another cluster than the template.
	@_ = ('cp', '-RPp', $ENV{INITDB_TEMPLATE}, $data) if defined $ENV{INITDB_TEMPLATE} && "@_" eq "initdb -D $data -A trust -N";
	goto &$system_or_bail;
};

1;
