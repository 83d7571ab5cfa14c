# What the torture tests share: the setting, the seed, and figures.
#
# TORTURE_SETTING (quick or full), TORTURE_SEED and TORTURE_SCALE come from test/torture/run.

package Torture;

use strict;
use warnings;

use Exporter 'import';
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(sleep);

our @EXPORT = qw(is_full seed quick_or_full figure make_node make_databases start_again psql_if_up faults_in);

# A test that takes too long is terminated: it then stops its servers.
$SIG{TERM} = sub { die "terminated\n" };

my $seed;

sub is_full
{
	return ($ENV{TORTURE_SETTING} // 'quick') eq 'full';
}

# Seeds Perl's generator, too
sub seed
{
	if (!defined $seed)
	{
		$seed = length($ENV{TORTURE_SEED} // '') ? $ENV{TORTURE_SEED} : int rand 1_000_000_000;
		srand $seed;
		note "seed $seed";
	}
	return $seed;
}

sub quick_or_full
{
	my ($quick, $full) = @_;
	my $scaled = int($full * ($ENV{TORTURE_SCALE} // 1));

	return is_full() ? ($scaled > $quick ? $scaled : $quick) : $quick;
}

# The driver prints it.
sub figure
{
	my ($name, $value) = @_;

	diag "figure: $name: $value";
	return;
}

# A cluster that is not started
sub make_node
{
	my ($name, $settings, %options) = @_;
	my $node = PostgreSQL::Test::Cluster->new($name);

	$node->init(%options);
	# Journals tell what clients sent: the log needs no statements, which would slow them down.
	$node->append_conf('postgresql.conf', "max_connections = 200\nlog_statement = none\n$settings");
	return $node;
}

# One database an edition
sub make_databases
{
	my ($node) = @_;

	for ([ c => 'idem' ], [ portable => 'idem_portable' ])
	{
		my ($database, $extension) = @$_;
		$node->safe_psql('postgres', "CREATE DATABASE $database");
		$node->safe_psql($database, "CREATE EXTENSION $extension; CREATE EXTENSION amcheck");
	}
	return qw(c portable);
}

# Starts a server that was killed or stopped at once, and says whether it runs. Its children can still
# have the shared memory; and until the killed postmaster's parent has noticed its death, the lock
# file of the socket looks like that of a running server. Both end by themselves.
sub start_again
{
	my ($node) = @_;

	for (1 .. 300)
	{
		# After a failure the module takes the number in the old postmaster.pid for that of a server.
		$node->{_pid} = undef;
		return 1 if $node->start(fail_ok => 1);
		sleep 0.2;
	}
	return 0;
}

# $node->psql() on a server that may be down: returns its status, output and errors, or nothing.
# If psql cannot connect, it can end before its input was written to it; then $node->psql() dies. It
# also dies after a timeout, if it cannot say so.
sub psql_if_up
{
	my ($node, @arguments) = @_;
	my $timed_out;
	local $ENV{PGCONNECT_TIMEOUT} = 5;
	my @answer = eval { $node->psql(@arguments, timeout => 60, timed_out => \$timed_out) };

	die $@ if $@ && $@ !~ /Broken pipe/;
	return $timed_out ? () : @answer;
}

# Lines of the server's log that nothing may cause. killed: the test itself kills processes
sub faults_in
{
	my ($node, $killed) = @_;
	my $fault = qr/TRAP:|PANIC:|(?:ERROR|FATAL): +XX|WARNING:.*(?: leak|not closed)|was terminated by signal (?!9\b)/;

	$fault = qr/$fault|was terminated by signal/ if !$killed;
	return join "\n", grep { /$fault/ } split /\n/, slurp_file($node->logfile);
}

1;
