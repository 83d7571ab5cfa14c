# What the drivers of the examples share: a database with the SQL of recipe.sql, a Redis of
# their own, processes that can be killed, and a report.
#
# The server is that of PGHOST, PGPORT, PGUSER; the database is a new one, and dropped at
# the end.  Redis listens on a socket in a temporary folder.

package Example;

use strict;
use warnings;

use DBI;
use Exporter qw(import);
use File::Temp;
use FindBin;
use POSIX ();
use Redis;
use Test::More;

our @EXPORT =
  qw(recipe_sql make_database connect_database start_redis kill_redis connect_redis
  spawn wait_for seed report);

my $folder = File::Temp->newdir('example.XXXX', TMPDIR => 1);
my $name = $FindBin::RealBin =~ s{.*/}{}r;
my $owner = $$;
my @databases;
my ($database, $redis_pid);

# An interrupted test must run END, too, and remove the folder.
$SIG{INT} = $SIG{TERM} = sub { exit 1 };
$SIG{PIPE} = 'IGNORE';

# Sets the seed of everything that is random: the first argument, or a new seed
sub seed
{
	my $seed = $ARGV[0] // int rand 1_000_000_000;

	srand $seed;
	note "$name, seed $seed";
	return;
}

sub recipe_sql
{
	open my $file, '<', "$FindBin::RealBin/recipe.sql" or die "recipe.sql: $!";
	local $/;
	return scalar <$file>;
}

# make_database(SUFFIX, SQL): connect_database() then connects to this database
sub make_database
{
	my ($suffix, $sql) = @_;

	$database = 'postgres';
	my $new = "example_$name$suffix";
	my $db = connect_database();
	$db->do("CREATE DATABASE $new");
	push @databases, $new;
	$database = $new;
	my $extension = $ENV{IDEM_EXTENSION} // 'idem';
	open my $psql, '|-', 'psql', '-X', '-q', '-v', 'ON_ERROR_STOP=1', '-d', $new
	  or die "psql: $!";
	print $psql "CREATE EXTENSION $extension;\n", $sql;
	close $psql or die "psql refused recipe.sql\n";
	return;
}

# On a slow machine no wait may end early, unless the example itself limits it.
sub connect_database
{
	return DBI->connect("dbi:Pg:dbname=$database;options=-cidem.wait=600s", $ENV{PGUSER}, undef,
		{ RaiseError => 1, PrintError => 0, AutoCommit => 1, AutoInactiveDestroy => 1 });
}

sub start_redis
{
	$redis_pid = spawn(
		sub {
			open STDOUT, '>', '/dev/null';
			exec 'setpriv', '--pdeathsig', 'KILL', 'redis-server', '--port', 0,
			  '--unixsocket', "$folder/redis.sock", '--dir', "$folder", '--save', '';
		});
	connect_redis(reconnect => 60, every => 10_000)->ping;
	return;
}

sub kill_redis
{
	kill KILL => $redis_pid;
	waitpid $redis_pid, 0;
	unlink "$folder/redis.sock";
	$redis_pid = undef;
	return;
}

sub connect_redis
{
	return Redis->new(sock => "$folder/redis.sock", encoding => undef, @_);
}

# spawn(CODE): runs it in a new process, which shares no connection, and returns the process id
sub spawn
{
	my ($code) = @_;

	my $pid = fork // die "fork: $!";
	return $pid if $pid;
	$SIG{INT} = $SIG{TERM} = 'DEFAULT';
	eval { $code->(); 1 } or do { print STDERR $@ =~ s/^/# /mgr; POSIX::_exit(1) };
	POSIX::_exit(0);
}

# wait_for(QUERY): waits until it returns true, and returns false after three minutes
sub wait_for
{
	my ($db, $query) = @_;
	my $deadline = time + 180;

	while (time < $deadline)
	{
		return 1 if $db->selectrow_array($query);
		select undef, undef, undef, 0.01;
	}
	return 0;
}

# report([WHAT => NUMBER, ...], LABEL): one line. A run without the guard is labelled, since
# its double executions look like a failure otherwise.
sub report
{
	my ($pairs, $label) = @_;
	my @pairs = @$pairs;
	my @numbers;

	while (my ($what, $number) = splice @pairs, 0, 2)
	{
		push @numbers, "$what $number";
	}
	note(($label ? "$label: " : '') . join(', ', @numbers));
	return;
}

END
{
	if ($$ == $owner)
	{
		my $status = $?;
		kill_redis() if $redis_pid;
		if (@databases)
		{
			$database = 'postgres';
			my $db = connect_database();
			$db->do("DROP DATABASE $_ WITH (FORCE)") for @databases;
		}
		$? = $status;
	}
}

1;
