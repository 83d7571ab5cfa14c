# The storm goes on while a standby is promoted, and the old primary is rewound and follows
#
# One cycle: the standby is held, until clients wait for it with their commits; the primary is killed
# or stopped at once (that fences it), its synchronous standby is promoted, the clients go there,
# pg_rewind makes the old primary a standby of the new one, and replication becomes synchronous
# again. No promise may be broken by that.
#
# full: some cycles do not hold the standby. Afterwards the same with an asynchronous standby, which
# must lose executions: that shows that the judge would have found lost ones.

use strict;
use warnings;

use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(time sleep);

use Storm;
use Torture;

seed();
my $clients = is_full() ? 24 : 12;
my $cycles = quick_or_full(1, 50);
# pg_rewind copies all WAL that the new primary keeps: enough for a cycle of a slow machine, and no more.
my $settings = q{
shared_preload_libraries = 'idem'
idem.cleanup_interval = '100ms'
max_prepared_transactions = 150
wal_log_hints = on
wal_keep_size = '320MB'
synchronous_commit = on
fsync = off
deadlock_timeout = '100ms'
log_error_verbosity = verbose
log_min_error_statement = panic
};
my %node;

sub set_synchronous
{
	my ($primary, $value) = @_;

	$primary->safe_psql('postgres', "ALTER SYSTEM SET synchronous_standby_names = '$value'");
	$primary->reload;
	return;
}

sub wait_for_standby
{
	my ($primary, $standby, $state) = @_;

	return $primary->poll_query_until('postgres',
		"SELECT count(*) = 1 FROM pg_stat_replication WHERE state = 'streaming' AND sync_state = '$state' AND replay_lsn >= '" . $primary->lsn('insert') . "'");
}

$node{a} = make_node('a', $settings, allows_streaming => 1);
$node{a}->start;
make_databases($node{a});
$node{a}->backup('copy', backup_options => ['--checkpoint=fast']);
$node{b} = PostgreSQL::Test::Cluster->new('b');
$node{b}->init_from_backup($node{a}, 'copy', has_streaming => 1);
$node{b}->start;
# pg_rewind brings the configuration of the other server, with its port: each keeps its own.
my %configuration = map { $_ => slurp_file($node{$_}->data_dir . '/postgresql.conf') } qw(a b);

sub connection_to
{
	my ($primary) = @_;
	return 'host=' . $primary->host . ' port=' . $primary->port . ' application_name=standby';
}

sub write_file
{
	my ($file, $content) = @_;

	unlink $file;
	append_to_file($file, $content);
	return;
}

# Has the standby receive nothing more, until clients have met that. Returns its receiver, or nothing
sub hold_standby
{
	my ($primary, $standby) = @_;
	my $receiver = $standby->safe_psql('postgres', 'SELECT pid FROM pg_stat_wal_receiver');
	my $executions = 'SELECT count(*) FROM executions';
	my $before = $primary->safe_psql('c', $executions);

	kill 'STOP', $receiver or return;
	# Either commits wait for the standby; or clients were told of some, and went on. These are lost,
	# so that the judge must find them if the standby is synchronous.
	my $met = $primary->poll_query_until('c', qq{SELECT count(*) >= 3 OR ($executions) > $before + 20 * $clients
		FROM pg_stat_activity WHERE wait_event = 'SyncRep'});
	return $receiver if $met;
	kill 'CONT', $receiver;
	return;
}

# The other server fails over to this one. Returns for how long nobody could claim, or nothing
sub fail_over
{
	my ($storm, $from, $to, $synchronous) = @_;
	my $receiver;

	if (!$synchronous || !is_full() || rand() < 0.5)
	{
		$receiver = hold_standby($node{$from}, $node{$to}) or return;
	}
	my $began = time;
	my $down;

	if (rand() < 0.5) { $node{$from}->kill9 }
	else { $node{$from}->stop('immediate') }
	# It ends before it reads what it was sent.
	kill $_, $receiver // () for qw(TERM CONT);
	$node{$to}->promote;
	$node{$to}->poll_query_until('postgres', 'SELECT NOT pg_is_in_recovery()');
	# Until the old primary follows, nothing can be synchronous.
	set_synchronous($node{$to}, '');
	$storm->move_to($node{$to});
	$down = time - $began;

	# pg_rewind reads the new timeline from the control file, which a checkpoint writes.
	$node{$to}->safe_psql('postgres', 'CHECKPOINT');
	# Children of a killed postmaster can need a moment to end.
	$node{$from}->{_pid} = undef;
	my $rewound = 0;
	for (1 .. 50)
	{
		unlink $node{$from}->data_dir . '/postmaster.pid';
		($rewound) = run_log([ 'pg_rewind', '--target-pgdata', $node{$from}->data_dir, '--source-server', $node{$to}->connstr('postgres') ]);
		last if $rewound;
		sleep 0.2;
	}
	return if !$rewound;
	write_file($node{$from}->data_dir . '/postgresql.conf', $configuration{$from});
	write_file($node{$from}->data_dir . '/postgresql.auto.conf', "primary_conninfo = '" . connection_to($node{$to}) . "'\n");
	$node{$from}->set_standby_mode;
	start_again($node{$from}) or return;
	if ($synchronous)
	{
		set_synchronous($node{$to}, '*');
		wait_for_standby($node{$to}, $node{$from}, 'sync') or return;
	}
	else
	{
		wait_for_standby($node{$to}, $node{$from}, 'async') or return;
	}
	return $down;
}

my @also = qw(57P02 57P03 08006 08003 25006);
my $storm = Storm->new($node{a}, clients => $clients, chaos => 0, also => \@also);
$storm->make_tables;
set_synchronous($node{a}, '*');
ok(wait_for_standby($node{a}, $node{b}, 'sync'), 'the standby is synchronous');
$storm->start;
my ($primary, $standby) = qw(a b);
my ($longest, $done) = (0, 0);
for my $cycle (1 .. $cycles)
{
	sleep 1 + rand 2;
	my $down = fail_over($storm, $primary, $standby, 1);
	if (!defined $down)
	{
		fail("cycle $cycle: commits wait for the standby, and the old primary follows the new one");
		last;
	}
	note(sprintf("cycle %d: %.1f s without a primary, ended after %.0f s", $cycle, $down, time - $^T));
	$longest = $down if $down > $longest;
	$done++;
	($primary, $standby) = ($standby, $primary);
}
sleep 1;
$storm->stop;
is($done, $cycles, 'all cycles were done');
my $counted = $storm->judge;
figure('failovers', sprintf('%d synchronous, longest without a primary %.1f s; %d claimed, %d executions in doubt', $done, $longest, $counted->{claimed}, $counted->{'in doubt'}));
# The portable edition's claims: no worker cleans them while they are compared.
my $claims = "SELECT count(*), md5(string_agg(c::text, ' ' ORDER BY c::text)) FROM idem_claims c";
wait_for_standby($node{$primary}, $node{$standby}, 'sync');
is($node{$standby}->safe_psql('portable', $claims), $node{$primary}->safe_psql('portable', $claims), 'the standby has the same claims');
is(faults_in($node{$_}, 1), '', "the log of $_ has no fault") for qw(a b);

if (is_full())
{
	my $lost = 'SELECT count(*) FROM journal WHERE kind = \'committed\' AND scope <> \'sink\' AND NOT EXISTS (SELECT FROM executions WHERE id = execution)';
	my $all = "SELECT count(*) FROM journal WHERE kind = 'committed'";
	my ($lost_before) = $node{$primary}->safe_psql('c', $lost);
	my ($all_before) = $node{$primary}->safe_psql('c', $all);

	set_synchronous($node{$primary}, '');
	$storm->start;
	my $failovers = 0;
	for (1 .. 5)
	{
		sleep 2;
		defined fail_over($storm, $primary, $standby, 0) or last;
		($primary, $standby) = ($standby, $primary);
		$failovers++;
	}
	$storm->stop;
	$storm->load_journals('c');
	my $lost_now = $node{$primary}->safe_psql('c', $lost) - $lost_before;
	figure('asynchronous', sprintf('%d failovers lost %d of %d acknowledged executions',
		$failovers, $lost_now, $node{$primary}->safe_psql('c', $all) - $all_before));
	is($failovers, 5, 'all cycles with an asynchronous standby were done');
	cmp_ok($lost_now, '>', 0, 'an asynchronous standby loses executions');
}
$node{$_}->stop for $standby, $primary;
done_testing();
