#!/usr/bin/perl
#
# Runs the example: consumers copy a topic into the tables and are killed before they commit their
# offsets. Then all offsets are lost, and two consumers at a time read everything again. Then, as a
# baseline, the same without the triggers that claim.

use strict;
use warnings;

use FindBin;
use lib "$FindBin::RealBin/../../test/lib";

use List::Util qw(sum0);
use Test::More;

use Example;

my $events = 300;
my $partitions = 3;
my ($db, $redis);

# ----- the topic -----

# Event number N, the same each time that the producer sends it
sub event
{
	my ($n) = @_;
	return { customer => 'customer ' . $n % 7, event => sprintf('00000000-0000-4000-8000-%012d', $n), amount => 1 + $n % 5 };
}

# The events of each partition. The producer has sent some of them twice.
sub make_topic
{
	my @topic = map { [] } 1 .. $partitions;

	for my $n (1 .. $events)
	{
		push @{ $topic[ $n % $partitions ] }, event($n);
		push @{ $topic[ $n % $partitions ] }, event($n - $partitions) if $n > $partitions && $n % 10 == 0;
	}
	return @topic;
}

# ----- the code of a user: a consumer -----

# Inserts a batch in one transaction. The rows come in the order of their customers and ids, so that
# consumers do not deadlock: those of the same events on the claims, all of them on the balances.
sub insert_batch
{
	my @batch = sort { $a->{customer} cmp $b->{customer} or $a->{event} cmp $b->{event} } @_;

	$db->begin_work;
	$db->do('COPY payments FROM STDIN');
	$db->pg_putcopydata(join("\t", @$_{qw(customer event amount)}) . "\n") for @batch;
	$db->pg_putcopyend;
	my $values = join ', ', map { "(?, ?, 'open')" } @batch;
	$db->do("INSERT INTO shipments VALUES $values", undef, map { @$_{qw(customer event)} } @batch);
	$db->commit;
	return;
}

# Inserts a batch again if it met another consumer
sub insert_until_done
{
	my (@batch) = @_;

	until (eval { insert_batch(@batch); 1 })
	{
		die $@ unless $db->state =~ /^(ID409|ID503)$/;
		$db->rollback;
	}
	return;
}

# Reads a partition of the topic from its offset to the end. $dies_at: the batch after which it dies,
# before it commits its offset; 0: none
sub consume
{
	my ($partition, $topic, $dies_at) = @_;
	my $batches = 0;

	while ((my $offset = $redis->get("offset $partition") // 0) < @$topic)
	{
		my $next = $offset + 20 < @$topic ? $offset + 20 : @$topic;
		insert_until_done(@$topic[ $offset .. $next - 1 ]);
		$redis->incrby('delivered', $next - $offset);
		kill KILL => $$ if ++$batches == $dies_at;
		$redis->set("offset $partition", $next);
	}
	return;
}

# ----- processes -----

# Runs consumers for each partition, and starts each again when it was killed. $dies_at->(how often
# it was killed)
sub consume_all
{
	my ($topic, $copies, $dies_at) = @_;
	my %running;
	my $killed = 0;
	my $start = sub {
		my ($partition, $lives) = @_;
		my $pid = spawn(
			sub {
				($db, $redis) = (connect_database(), connect_redis());
				consume($partition, $topic->[$partition], $dies_at->($lives));
			});
		$running{$pid} = [ $partition, $lives ];
	};

	for my $partition (0 .. $partitions - 1)
	{
		$start->($partition, 0) for 1 .. $copies;
	}
	while (%running)
	{
		my $pid = wait;
		my ($partition, $lives) = @{ delete $running{$pid} // next };
		if ($? == 9)
		{
			$killed++;
			$start->($partition, $lives + 1);
		}
		elsif ($?)
		{
			die "a consumer failed";
		}
	}
	return $killed;
}

# ----- the tests -----

# Returns how many rows are double.
sub traffic
{
	my ($label) = @_;
	my @topic = make_topic();

	start_redis();
	$redis = connect_redis();
	my $killed = consume_all(\@topic, 1, sub { $_[0] < 2 ? 2 : 0 });
	is($killed, 2 * $partitions, 'each consumer is killed twice, before it commits its offset');
	# Some shipments are done by now.
	my $done = $db->do(q{UPDATE shipments SET state = 'done' WHERE right(event::text, 1) IN ('3', '7')});
	cmp_ok($done, '>=', $events / 5, 'shipments are done');
	# The offsets are lost, and two consumers at a time read each partition again.
	$redis->del("offset $_") for 0 .. $partitions - 1;
	consume_all(\@topic, 2, sub { 0 });

	my ($payments, $shipments, $open, $paid) = $db->selectrow_array(q{
		SELECT (SELECT count(*) FROM payments), (SELECT count(*) FROM shipments),
			(SELECT count(*) FROM shipments WHERE state = 'open'), (SELECT sum(balance) FROM balances)});
	my $double = $payments + $shipments - 2 * $events;
	report(
		[
			'events' => $events,
			'deliveries' => $redis->get('delivered'),
			'payments' => $payments,
			'shipments' => $shipments,
			'double' => $double
		],
		$label);
	cmp_ok($redis->get('delivered'), '>=', 2 * $events, 'each event was delivered twice or more');
	if (!$label)
	{
		is("$payments $shipments", "$events $events", 'each payment and each shipment exists once');
		is($paid, sum0(map { event($_)->{amount} } 1 .. $events), 'each payment is in the balances once');
		is($open, $events - $done, 'each shipment that was done has stayed so');
	}
	kill_redis();
	return $double;
}

sub with_triggers
{
	make_database('', recipe_sql());
	$db = connect_database();
	is(traffic(), 0, 'no row is double');
	$db->disconnect;
	return;
}

sub without_triggers
{
	my $sql = recipe_sql();

	is($sql =~ s/^CREATE TRIGGER once .*?;\n//msg, 2, 'baseline: the triggers that claim are taken out');
	make_database('_unguarded', $sql);
	$db = connect_database();
	cmp_ok(traffic('baseline without the claim'), '>=', 2 * $events, 'baseline: without them each row is double');
	$db->disconnect;
	return;
}

seed();
with_triggers();
without_triggers();
done_testing();
