# The same storm, while the server is killed again and again
#
# One cycle kills a backend, the worker or the postmaster by SIGKILL, or stops the server
# immediately, and waits until it serves again. Clients connect again and go on. What they were told
# before a crash must be there after it.
#
# fsync is off: killed processes lose nothing that the kernel has. A loss of power is not tested.

use strict;
use warnings;

use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(time sleep);

use Storm;
use Torture;

seed();
my $cycles = quick_or_full(8, 300);
my $node = make_node('main', q{
shared_preload_libraries = 'idem'
idem.cleanup_interval = '100ms'
max_prepared_transactions = 150
restart_after_crash = on
synchronous_commit = on
fsync = off
deadlock_timeout = '100ms'
log_error_verbosity = verbose
log_min_error_statement = panic
});
$node->start;
make_databases($node);
my $storm = Storm->new($node, clients => 32, also => [qw(57P02 57P03 08006 08003)]);
$storm->make_tables;
$storm->start;

# Each kind is tried before one is tried again.
my @kinds = qw(backend worker postmaster immediate);
my %done;
my $longest = 0;

sub is_serving
{
	my ($status, $out) = psql_if_up($node, 'c', 'SELECT count(*) FROM idem_claims');
	return defined $status && $status == 0;
}

# Right after a restart there may be no such process, or no connection, yet; and a process that was
# found may end by itself before it is killed. So it looks again until one was killed.
sub kill_process
{
	my ($where) = @_;
	my $until = time + 120;

	while (time < $until)
	{
		my (undef, $pid) =
		  psql_if_up($node, 'postgres', "SELECT pid FROM pg_stat_activity WHERE $where ORDER BY random() LIMIT 1");
		return 1 if defined $pid && $pid =~ /^\d+$/ && kill('KILL', $pid);
		sleep 0.05;
	}
	return 0;
}

sub crash
{
	my ($kind) = @_;

	return kill_process("application_name = 'storm' AND datname <> 'postgres'") if $kind eq 'backend';
	return kill_process("backend_type LIKE 'idem%'") if $kind eq 'worker';
	if ($kind eq 'postmaster') { $node->kill9 }
	else { $node->stop('immediate') }
	return start_again($node);
}

for my $cycle (1 .. $cycles)
{
	my @untried = grep { !$done{$_} } @kinds;
	my $kind = @untried ? $untried[ rand @untried ] : $kinds[ rand @kinds ];
	my $before;

	sleep 0.3 + rand 0.7;
	$before = time;
	if (!crash($kind))
	{
		fail("cycle $cycle: $kind was killed, and the server started again");
		last;
	}
	$done{$kind}++;
	sleep 0.05;
	until (is_serving())
	{
		sleep 0.05;
		if (time - $before > 120)
		{
			fail("cycle $cycle: the server serves within 120 s of the death of $kind");
			last;
		}
	}
	$longest = time - $before if time - $before > $longest;
}
sleep 1;
$storm->stop;

my $counted = $storm->judge;
figure('crashes', join(', ', map { "$_ $done{$_}" } sort keys %done) . sprintf('; longest until it served again %.1f s', $longest));
figure('both', "$counted->{claimed} claimed, $counted->{replays} replays, $counted->{'in doubt'} executions in doubt");
cmp_ok($counted->{claimed}, '>', 0, 'requests were claimed');
cmp_ok($counted->{'found executed then'}, '>', 0, 'clients sent again what they were not told, and it was executed already');
cmp_ok($done{$_} // 0, '>', 0, "killed: $_") for @kinds;
is(faults_in($node, 1), '', 'the log of the server has no other fault');
ok($node->poll_query_until('c', "SELECT rows_deleted > 0 AND NOT backlog FROM idem_stat_cleanup"), 'the worker cleans again');
$node->stop;
done_testing();
