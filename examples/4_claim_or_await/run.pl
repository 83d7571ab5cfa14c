#!/usr/bin/perl
#
# Runs the example: bursts of triggers for the same run, each with data for the buffer in Redis.
# The trigger that creates the run is killed or paused, and Redis is killed.

use strict;
use warnings;

use FindBin;
use lib "$FindBin::RealBin/../../test/lib";

use Test::More;

use Example;

my $burst = 20;
my $tenant = 'tenant';
my ($db, $redis);
my ($keys, $triggers) = (0, 0);

# ----- the code of a user -----

# Returns the id of the run, or undef if the trigger must be sent again. Redis gets the id only
# after the table has it; until then every trigger asks the database. $at->(step) is called
# after each step.
sub trigger
{
	my ($key, $payload, $wait, $at) = @_;

	my $run = $redis->get("run:$key");
	if (!$run)
	{
		eval {
			$db->begin_work;
			($run) = $db->selectrow_array('SELECT run_of(?, ?, ?)', undef, $tenant, $key, $wait);
			$at->('made');
			$db->commit;
			1;
		} or do
		{
			my $state = $db->state;
			$db->rollback if !$db->{AutoCommit};
			return if $state eq 'ID503';
			die $@;
		};
		$at->('committed');
		$redis->set("run:$key", $run, 'EX', 3600);
		$at->('cached');
	}
	# Stored under the trigger's own name, so a trigger that is sent again is there once.
	$redis->hset("buffer:$run", $payload, 1);
	return $run;
}

# ----- processes -----

# client(KEY, PAYLOAD, WAIT, AT): starts a client as a process. hear() reads its output, which ends
# with the id, or with "later".
sub client
{
	my ($key, $payload, $wait, $at) = @_;

	pipe my $reader, my $writer or die "pipe: $!";
	$writer->autoflush;
	$triggers++;
	my $pid = spawn(
		sub {
			($db, $redis) = (connect_database(), connect_redis());
			my $run = trigger($key, $payload, $wait, sub { $at->($writer, @_) if $at });
			print $writer $run // 'later', "\n";
		});
	return { pid => $pid, reader => $reader, payload => $payload };
}

# Reads one line from a client; undef if the client has ended
sub hear
{
	my ($client) = @_;
	my $line = readline $client->{reader};
	chomp $line if defined $line;
	return $line;
}

# The triggers of a burst, from number $first on
sub burst
{
	my ($key, $first, $wait, $at) = @_;
	return map { client($key, "trigger $_", $wait, $at) } $first .. $burst;
}

# Starts the trigger that creates the run, and returns when it has stopped at that step
sub maker_stops
{
	my ($key, $stop) = @_;
	my $maker = client($key, 'trigger 1', '10 min',
		sub {
			my ($writer, $step) = @_;
			return if $step ne $stop;
			print $writer "$step\n";
			kill STOP => $$;
		});
	is(hear($maker), $stop, "$key: a trigger has $stop the run, and is stopped");
	return $maker;
}

# Waits until each other trigger of the burst waits in the database
sub others_wait
{
	my ($key) = @_;
	my $others = $burst - 1;
	ok( wait_for($db, qq{SELECT count(*) = $others FROM pg_stat_activity
			WHERE datname = current_database() AND query ~ 'run_of' AND wait_event_type = 'Lock'}),
		"$key: the others sleep");
	return;
}

# The distinct answers of the clients, except those that were killed
sub answers
{
	my %said;

	for my $client (@_)
	{
		my $said = hear($client);
		waitpid $client->{pid}, 0;
		$said{$said} = 1 if $? == 0;
	}
	return keys %said;
}

# Checks the table and Redis after a burst
sub one_run
{
	my ($key, @ids) = @_;

	is(scalar(@ids), 1, "$key: one answer for all");
	is_deeply($db->selectcol_arrayref('SELECT id FROM runs WHERE key = ?', undef, $key), \@ids, "$key: one run");
	is($redis->get("run:$key"), $ids[0], "$key: which Redis knows too");
	is($redis->hlen("buffer:$ids[0]"), $burst, "$key: with what all triggers have brought");
	$keys++;
	return;
}

# ----- what can happen -----

# The run is neither in the table nor in Redis.
sub cold_start
{
	my $key = 'cold start';
	one_run($key, answers(burst($key, 1, '10 min')));
	return;
}

sub everybody_sleeps
{
	my $key = 'slow';
	my $maker = maker_stops($key, 'made');
	my @others = burst($key, 2, '10 min');

	others_wait($key);
	kill CONT => $maker->{pid};
	one_run($key, answers($maker, @others));
	return;
}

# The trigger that creates the run is killed, and the next one, too. The third creates it.
sub makers_killed
{
	my $key = 'makers killed';
	my $maker = maker_stops($key, 'made');
	my @others = burst($key, 2, '10 min',
		sub { kill KILL => $$ if $_[1] eq 'made' && $redis->incr("made:$key") == 1 });

	others_wait($key);
	kill KILL => $maker->{pid};
	my @ids = answers($maker, @others);
	is($redis->get("made:$key"), $burst - 1, "$key: two of them, and the others went on");
	# The sender does not know which triggers were killed, and so sends all of them again.
	one_run($key, answers(burst($key, 1, '10 min')));
	is_deeply(\@ids, $db->selectcol_arrayref('SELECT id FROM runs WHERE key = ?', undef, $key), "$key: the same");
	return;
}

# The run is in the table, but not in Redis, or its buffer lacks the trigger.
sub killed_after
{
	my ($step) = @_;
	my $key = "maker killed when it has $step the run";
	my $maker = maker_stops($key, $step);

	kill KILL => $maker->{pid};
	answers($maker);
	one_run($key, answers(burst($key, 1, '10 min')));
	return;
}

# Triggers that have waited long enough give up, and have written nothing.
sub time_out
{
	my $key = 'time-out';
	my $maker = maker_stops($key, 'made');

	is_deeply([ answers(burst($key, 2, '100 ms')) ], ['later'], "$key: the others are told to come later");
	is($redis->exists("run:$key"), 0, "$key: nothing is in Redis");
	kill CONT => $maker->{pid};
	my ($id) = answers($maker);
	is($redis->hlen("buffer:$id"), 1, "$key: they have left nothing");
	one_run($key, answers(burst($key, 2, '100 ms')));
	return;
}

# Redis loses all its data.
sub redis_killed
{
	my $key = 'Redis killed';
	my @ids = answers(burst($key, 1, '10 min'));

	kill_redis();
	start_redis();
	$redis = connect_redis();
	is($redis->dbsize, 0, "$key: the buffer is cold");
	is_deeply([ answers(burst($key, 1, '10 min')) ], \@ids, "$key: all come to the run that there is");
	one_run($key, @ids);
	return;
}

make_database('', recipe_sql());
$db = connect_database();
start_redis();
$redis = connect_redis();

cold_start();
everybody_sleeps();
makers_killed();
killed_after('committed');
killed_after('cached');
time_out();
redis_killed();

my ($runs, $distinct) = $db->selectrow_array('SELECT count(*), count(DISTINCT key) FROM runs');
report(
	[
		'requests' => $keys,
		'deliveries' => $triggers,
		'executions' => $runs,
		'double executions' => $runs - $distinct
	]);
is($runs, $keys, 'each key has one run');
$db->disconnect;
done_testing();
