# Servers for tests that need more than the one they run with: which ones are installed, and copies
# of them, into which a test installs an extension without touching the server's own folders.
#
#	my @servers = Server::installed;          # oldest major version first
#	my $server = Server->copy($servers[-1]);  # without idem
#	my $tree = Server::tree('old');           # a copy of this tree, to change and to build
#	$server->install($tree);
#	my $node = PostgreSQL::Test::Cluster->new('main', install_path => $server->prefix);

package Server;

use strict;
use warnings;

use Cwd;
use PostgreSQL::Test::Utils;

my $root;

# ----- servers that are installed -----

# undef: there is no such server, or its headers or pg_upgrade are missing
sub new
{
	my ($class, $pg_config) = @_;
	my $self = bless { pg_config => $pg_config }, $class;
	my $version = -x $pg_config ? $self->ask('version') : '';

	# PostgreSQL 15.20 (Debian ...), PostgreSQL 19beta1
	return unless $version =~ /^PostgreSQL (\d+)(?:\.(\d+))?/;
	@$self{qw(major minor)} = ($1, $2 // -1);
	$self->{bindir} = $self->ask('bindir');
	return unless -x "$self->{bindir}/pg_upgrade" && -e $self->ask('pgxs')
	  && -e $self->ask('includedir-server') . '/postgres.h';
	return $self;
}

sub ask
{
	my ($self, $what) = @_;
	chomp(my $answer = `'$self->{pg_config}' --$what`);
	return $answer;
}

# The server that the tests run with
sub of_the_suite
{
	chomp(my $bindir = `pg_config --bindir`);
	return Server->new("$bindir/pg_config");
}

# The suite's server, Debian's, and those that test/versions keeps: by major version; of the same
# one the suite's first, then later minor versions before earlier ones
sub installed
{
	my $kept = $ENV{IDEM_SERVERS} // '{/var/cache,' . (getpwuid($<))[7] . '/.cache}/idem';
	my @servers = map { Server->new($_) // () } glob("/usr/lib/postgresql/*/bin/pg_config $kept/*/bin/pg_config");
	my $suite = of_the_suite();

	@servers = sort { $b->{minor} <=> $a->{minor} } @servers;
	unshift @servers, $suite if defined $suite;
	my %seen;
	return sort { $a->{major} <=> $b->{major} } grep { !$seen{ $_->{bindir} }++ } @servers;
}

# Can pg_upgrade bring a cluster of this server to the other one? The releases that mark columns with
# pg_attver, as 15.20 does, make dumps that an earlier release of a later version does not read.
sub upgrades_to
{
	my ($self, $other) = @_;
	return $self->{major} <= $other->{major} && (!$self->has_attver || $other->has_attver);
}

sub has_attver
{
	my ($self) = @_;
	return $self->{has_attver} //= (system('grep', '-qa', 'pg_attver', "$self->{bindir}/postgres") == 0);
}

sub major
{
	my ($self) = @_;
	return $self->{major};
}

# Such as 15.20
sub version
{
	my ($self) = @_;
	return $self->ask('version') =~ s/^PostgreSQL (\S+).*/$1/r;
}

sub bindir
{
	my ($self) = @_;
	return $self->{bindir};
}

# The install_path of PostgreSQL::Test::Cluster
sub prefix
{
	my ($self) = @_;
	return $self->{bindir} =~ s/\/bin$//r;
}

# ----- copies -----

# A server looks for its files relative to its programs. Programs are copied, because a program
# follows symbolic links before it looks for others; the rest is linked. idem is left out.
sub copy
{
	my ($class, $server) = @_;
	my $top = folder('server' . $server->major);
	my ($bindir, $sharedir, $pkglibdir, $headers) =
	  map { $server->ask($_) } qw(bindir sharedir pkglibdir includedir-server);

	system_or_bail('mkdir', '-p', "$top$bindir", "$top$sharedir/extension", "$top$pkglibdir",
		("$top$headers" =~ s/\/[^\/]+$//r));
	system_or_bail('cp', '-RL', glob("$bindir/*"), "$top$bindir/");
	symlink($headers, "$top$headers") || die "$headers: $!";
	for my $file (glob("$sharedir/*"), glob("$sharedir/extension/*"), glob("$pkglibdir/*"))
	{
		symlink($file, "$top$file") if $file !~ /\/(extension|bitcode|idem[^\/]*)$/;
	}
	return Server->new("$top$bindir/pg_config") // die "$top$bindir: this copy does not work";
}

# A copy of this tree in a folder of its own, with what is built; to change a file, and to build
# the rest without compiling it again
sub tree
{
	my ($name) = @_;
	my $tree = folder($name);

	system_or_bail('cp', '-a', qw(src sql Makefile META.json), glob('*.control'), "$tree/");
	return $tree;
}

# Builds the tree for this server and installs it, as an administrator does: also while the server
# runs
sub install
{
	my ($self, $tree, @arguments) = @_;
	my $log = "$tree/install.log";

	# Not the arguments of the make that runs the tests
	local $ENV{MAKEFLAGS} = '';
	for my $target ('all', 'install')
	{
		next if system("make -s -j2 -C '$tree' PG_CONFIG='$self->{pg_config}' with_llvm=no @arguments $target >'$log' 2>&1") == 0;
		die "$target in $tree failed:\n" . slurp_file($log);
	}
	return;
}

sub folder
{
	my ($name) = @_;

	$root //= PostgreSQL::Test::Utils::tempdir;
	mkdir "$root/$name" or die "$root/$name: $!";
	return "$root/$name";
}

1;
