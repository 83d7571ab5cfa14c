# The public surface of both editions: what users write, read and depend on, and what is kept as long
# as 1.x lives. It is listed in test/surface/*.txt. Whoever means to change it copies the new list from
# tmp_check/surface.

use strict;
use warnings;

use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = PostgreSQL::Test::Cluster->new('main');
$node->init;
$node->append_conf('postgresql.conf', "shared_preload_libraries = 'idem'");
$node->start;
$node->safe_psql('postgres', 'CREATE ROLE surface_app; CREATE ROLE surface_operator');

# What one edition's source says, and the server does not
sub of_sources
{
	my ($edition) = @_;
	my $states = slurp_file($edition eq 'idem' ? 'src/sqlstate.h' : 'sql/idem-portable.sql');
	my %lines;

	if ($edition eq 'idem_portable')
	{
		$lines{"sqlstate $_"} = 1 for $states =~ /'(ID[45]\d\d)'/g;
		$lines{"outcome $1 raises $2"} = 1 while $states =~ /^\t+\('(\w+)', '(ID\d{3})', /mg;
		return keys %lines;
	}
	my %state = $states =~ /^#define (ERRCODE_IDEM_\w+)\s+MAKE_SQLSTATE\(([^)]+)\)/mg;
	s/[', ]//g for values %state;
	$lines{"sqlstate $_"} = 1 for values %state;
	my $raise = slurp_file('src/protocol/raise.c');
	$lines{ 'outcome ' . lc($1) . " raises $state{$2}" } = 1 while $raise =~ /^\t\[IDEM_(\w+)\] = \{\n\t\t(\w+),/mg;
	for my $source (map { slurp_file($_) } glob('src/*.c src/*/*.c'))
	{
		$lines{"wait event $_"} = 1 for $source =~ /WaitEventExtensionNew\("(\w+)"\)/g;
		$lines{"process $_"} = 1 for $source =~ /init_background_worker\([^;]*?"(idem [^"]+)"/g;
	}
	return keys %lines;
}

# Some claims and a batch, so that each metric has a sample
sub of_server
{
	my ($edition) = @_;

	$node->safe_psql('postgres', "CREATE DATABASE $edition");
	$node->safe_psql($edition, qq{
CREATE EXTENSION $edition;
SELECT idem_grant('surface_app', 'app'), idem_grant('surface_operator', 'operator');
SELECT idem_claim('user', '1', 'scope');
ANALYZE idem_claims;
SELECT idem_cleanup()});
	# The library is loaded in each session, whichever edition its database has.
	return grep { $edition eq 'idem' || !/^setting / } split /\n/, $node->safe_psql($edition, slurp_file('test/surface/surface.sql'));
}

my $folder = "$PostgreSQL::Test::Utils::tmp_check/surface";
mkdir $folder;
for my $edition (qw(idem idem_portable))
{
	my $found = "$folder/$edition.txt";

	unlink $found;
	append_to_file($found, join('', map { "$_\n" } sort(of_sources($edition), of_server($edition))));
	my $difference = `diff -U0 test/surface/$edition.txt $found`;
	is($difference, '', "$edition has the surface of test/surface/$edition.txt");
}
done_testing();
