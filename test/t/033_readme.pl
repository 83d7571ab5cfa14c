# The README's SQL runs as printed, in its order, and does what its comments say; and
# what it links to is there.

use strict;
use warnings;

use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $readme = slurp_file('README.md');
my @blocks = $readme =~ /^```sql\n(.*?)^```$/msg;
cmp_ok(scalar(@blocks), '>=', 10, 'the README has examples');

for my $readme_file ('README.md', 'examples/README.md')
{
	my ($folder) = $readme_file =~ m{^(.*/)?};
	my @links = slurp_file($readme_file) =~ /\]\(([^):#]+)\)/g;
	is_deeply([ grep { !-e(($folder // '') . $_) } @links ], [], "the links of $readme_file");
}

my $node = PostgreSQL::Test::Cluster->new('main');
$node->init;
$node->append_conf('postgresql.conf', "shared_preload_libraries = 'idem'");
$node->start;

for my $i (1 .. @blocks)
{
	my $block = $blocks[ $i - 1 ];
	my ($status, $out, $err) =
	  $node->psql('postgres', $block, extra_params => [ '-v', 'ON_ERROR_STOP=1' ]);
	is($status, 0, "example $i") or diag("$block\n$err");

	# "SELECT ...;    -- what it returns", for the results that are shown
	my @expected = $block =~ /^SELECT [^\n]*;[ ]+-- (\{[^}\n]*\}|\d+|true|false)/mg;
	next unless @expected;
	s/^true$/t/, s/^false$/f/ for @expected;
	my @got = grep { /\S/ } split(/\n/, $out);
	is_deeply([ @got[ -@expected .. -1 ] ], \@expected, "example $i returns what it says");
}

is($node->safe_psql('postgres', 'SELECT balance FROM accounts'),
	'69', 'each payment of the README was made once');

$node->stop;
done_testing();
