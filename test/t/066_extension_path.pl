# Both editions from a folder outside of the server's own, in the layout of the image that
# packaging/docker builds: extension_control_path, which PostgreSQL 18 has.

use strict;
use warnings;

use File::Copy;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = PostgreSQL::Test::Cluster->new('main');
plan skip_all => 'extension_control_path needs PostgreSQL 18' if $node->pg_version < 18;

my ($sharedir, $pkglibdir) = map { $node->config_data("--$_") } qw(sharedir pkglibdir);
my $folder = PostgreSQL::Test::Utils::tempdir;

mkdir "$folder/$_" || die "$_: $!" for qw(lib share share/extension);
copy("$pkglibdir/idem.so", "$folder/lib") || die "idem.so: $!";
for my $file (glob("$sharedir/extension/idem*"))
{
	my $content = slurp_file($file);
	# The comment shows which control file was read: the server's own folder has one too.
	$content =~ s/^comment = '/$&from the folder: /m if $file =~ /\.control$/;
	append_to_file("$folder/share/extension/" . ($file =~ s/.*\///r), $content);
}

$node->init;
$node->append_conf(
	'postgresql.conf', qq{
extension_control_path = '$folder/share:\$system'
dynamic_library_path = '$folder/lib:\$libdir'
shared_preload_libraries = 'idem'
idem.cleanup_interval = '20ms'
});
$node->start;

# The file that a session which runs the statement has loaded
sub library_after
{
	my ($statement) = @_;
	return $node->safe_psql('idem', qq{
		DO \$\$ BEGIN $statement; END \$\$;
		SELECT DISTINCT (regexp_match(line, '/.*/idem\.so\$'))[1]
		FROM string_to_table(pg_read_file('/proc/self/maps'), E'\n') line
		WHERE line ~ '/idem\.so\$'});
}

for my $extension (qw(idem idem_portable))
{
	$node->safe_psql('postgres', "CREATE DATABASE $extension");
	$node->safe_psql($extension, "CREATE EXTENSION $extension");
	like(
		$node->safe_psql($extension, "SELECT obj_description(oid, 'pg_extension') FROM pg_extension WHERE extname = '$extension'"),
		qr/^from the folder: /, "$extension: is created from the folder");
	is($node->safe_psql($extension, "SELECT idem_claim('u', 'r')"), 't', "$extension: a claim");
	is($node->safe_psql($extension, "SELECT idem_claim('u', 'r')"), 'f', "$extension: its duplicate");
}
is(library_after('NULL'), "$folder/lib/idem.so", 'the library is preloaded from the folder');

# The server looks for the library again when it starts the launcher, and the launcher's workers.
$node->safe_psql('idem', q{
	INSERT INTO idem_scopes (scope, ttl) VALUES ('short', '1 ms');
	SELECT idem_claim('u', 'expires', 'short')});
ok($node->poll_query_until('idem', q{SELECT idem_status('u', 'expires', 'short') IS NULL}), 'its worker removes an expired claim');

# Without preload, the functions name the library as $libdir/idem.
$node->append_conf('postgresql.conf', "shared_preload_libraries = ''");
$node->restart;
is(library_after("PERFORM idem_claim('u', 'r')"), "$folder/lib/idem.so", 'not preloaded: a function loads it from the folder');
is($node->safe_psql('idem', "SELECT idem_claim('u', 'r')"), 'f', 'and the claim is still there');

$node->stop;
done_testing();
