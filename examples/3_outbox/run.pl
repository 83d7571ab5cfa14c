#!/usr/bin/perl
#
# Runs the example: clients send each order several times, couriers publish to a Redis stream, and
# consumers read it, all at once; handlers, couriers and consumers are killed. Then, as a
# baseline, the same with consumers that do not claim.

use strict;
use warnings;

use FindBin;
use lib "$FindBin::RealBin/../../test/lib";

use JSON::PP;
use List::Util qw(min shuffle);
use Test::More;
use Time::HiRes qw(sleep);

use Example;

my $orders = 80;
my $clients = 3;
my $couriers = 3;
my %consumers = (shipping => 'ship', mail => 'send_mail');
my ($db, $redis);

# ----- the code of a user: handler, courier, consumer -----

# Handles an order. Returns HTTP status and body. $check->() is slow work outside the database.
sub handle
{
	my ($customer, $request, $order, $check) = @_;
	my %status = (in_progress => 409, mismatch => 422, completed => 200, failed => 402);

	my $wanted = encode_json($order);
	my ($outcome, $result, $token) =
	  $db->selectrow_array('SELECT * FROM begin_order(?, ?, ?)', undef, $customer, $request, $wanted);
	return ($status{$outcome}, $result) if $outcome ne 'claimed';
	if (!$check->($order))
	{
		my $error = '{"error": "no credit"}';
		$db->do('SELECT fail_order(?, ?, ?, ?)', undef, $customer, $request, $token, $error);
		return (402, $error);
	}
	my ($body) = eval {
		$db->selectrow_array('SELECT complete_order(?, ?, ?, ?)', undef, $customer, $request, $token, $wanted);
	};
	return (201, $body) if $body;
	# Another handler took the order over; it has the answer, or will have it soon.
	return (409) if $db->state eq 'ID410';
	die $@;
}

# Publishes one batch of messages, and returns its size
sub deliver
{
	my ($publish) = @_;

	$db->begin_work;
	my $messages = $db->selectall_arrayref('SELECT * FROM next_messages(10)', { Slice => {} });
	$publish->(@$messages) if @$messages;
	$db->do('SELECT mark_published(?)', undef, [ map { $_->{id} } @$messages ]);
	$db->commit;
	return scalar @$messages;
}

# Consumes the messages that are there for one consumer of a group, and those that other consumers
# of the group have not acknowledged
sub consume
{
	my ($group, $me, $before_acknowledging) = @_;

	my $new = $redis->xreadgroup('GROUP', $group, $me, 'COUNT', 5, 'BLOCK', 50, 'STREAMS', 'orders', '>');
	my $left = $redis->xautoclaim('orders', $group, $me, 200, '0-0', 'COUNT', 5);
	my @messages = ($new && $new->[0] ? @{ $new->[0][1] } : (), @{ $left->[1] });
	for (@messages)
	{
		my ($id, $fields) = @$_;
		my %message = @$fields;
		eval {
			$db->do("SELECT $consumers{$group}(?, ?, ?)", undef, @message{qw(customer correlation_id event)});
			1;
		} or do
		{
			# Another consumer works on the same message, for longer than idem.wait.
			next if $db->state =~ /^ID(409|503)$/;
			die $@;
		};
		$before_acknowledging->();
		$redis->xack('orders', $group, $id);
	}
	return scalar @messages;
}

# ----- processes -----

# The order of a request, which is always the same. Every tenth order is refused.
sub request
{
	my ($n) = @_;
	return ("customer " . $n % 7, "request $n", { item => 'book', quantity => 1 + $n % 3, credit => $n % 10 ? 1 : 0 });
}

sub send_order
{
	$redis->incr('sent');
	return handle(@_);
}

# Sends each request until it has an answer.
sub client
{
	my ($seed) = @_;

	srand $seed;
	$db = connect_database();
	for my $n (shuffle 1 .. $orders)
	{
		my $status;
		do
		{
			($status) = send_order(request($n), sub { $_[0]{credit} });
			sleep 0.01 if $status == 409;
		} while ($status == 409);
		$redis->incr("answered $status");
	}
	return;
}

# A courier that dies after it published a message for the first time. So each message is
# published again.
sub courier
{
	my $publish = sub {
		my $first = 0;
		for my $message (@_)
		{
			$redis->xadd('orders', '*', map { $_ => $message->{$_} } qw(customer correlation_id event));
			$first++ if $redis->hincrby('published', $message->{id}, 1) == 1;
		}
		kill KILL => $$ if $first;
	};

	$db = connect_database();
	until ($redis->get('all answered') && !$db->selectrow_array('SELECT count(*) FROM outbox WHERE published_at IS NULL'))
	{
		deliver($publish) or sleep 0.02;
	}
	return;
}

# A consumer. A mortal one dies after its fifth message, which it has processed and not
# acknowledged.
sub consumer
{
	my ($group, $me, $mortal) = @_;
	my $done = 0;

	$db = connect_database();
	while (consume($group, $me, sub { $redis->incr('consumed'); kill KILL => $$ if $mortal && ++$done == 5 })
		|| !$redis->get('all published')
		|| $redis->xpending('orders', $group)->[0])
	{
	}
	return;
}

# supervise(CODE): runs the code in a process with a Redis connection of its own, and again if it
# was killed. CODE->(how often it was killed)
my (%running, $killed);

sub supervise
{
	my ($code, $lives) = @_;

	my $pid = spawn(sub { $redis = connect_redis(); $code->($lives // 0) });
	$running{$pid} = [ $code, $lives // 0 ];
	return $pid;
}

# Waits until these processes have ended by themselves; also restarts the others if they die.
sub end_of
{
	my %waited = map { $_ => 1 } @_;

	while (%waited)
	{
		my $pid = wait;
		my ($code, $lives) = @{ delete $running{$pid} };
		my $was_waited = delete $waited{$pid};
		if ($? == 9)
		{
			$killed++;
			my $again = supervise($code, $lives + 1);
			$waited{$again} = 1 if $was_waited;
		}
		elsif ($?)
		{
			die "a process failed";
		}
	}
	return;
}

# ----- the tests -----

# A handler is killed after its claim, and leaves the key in progress.
sub stale_key
{
	my ($n) = @_;
	my ($customer, $request, $order) = request($n);
	my $lapse = 'UPDATE idem_claims SET lease_until = clock_timestamp() + ?::interval WHERE request_id = ?';

	my $handler = spawn(
		sub {
			($db, $redis) = (connect_database(), connect_redis());
			send_order($customer, $request, $order, sub { kill KILL => $$ });
		});
	waitpid $handler, 0;
	# The lease must not lapse during the next two checks.
	$db->do($lapse, undef, '1 hour', $request);
	is((send_order($customer, $request, $order, sub { die }))[0],
		409, 'a duplicate of an order in progress: 409, at once');
	is((send_order($customer, $request, { %$order, item => 'other' }, sub { die }))[0],
		422, 'another order with the same id: 422');
	$db->do($lapse, undef, '0', $request);
	return;
}

# Returns how many effects of messages were double.
sub traffic
{
	my ($label) = @_;

	$db->do(q{INSERT INTO stock VALUES ('book', 1000000)});
	start_redis();
	$redis = connect_redis();
	$redis->xgroup('CREATE', 'orders', $_, '0', 'MKSTREAM') for keys %consumers;
	stale_key(1);
	stale_key(11);

	$killed = 0;
	my @consumers = map {
		my $group = $_;
		map { my $me = "consumer $_"; supervise(sub { consumer($group, $me, $_[0] == 0) }) } 1 .. 2
	} sort keys %consumers;
	my @couriers = map { supervise(\&courier) } 1 .. $couriers;
	my @clients = map { my $seed = int rand 1e9; supervise(sub { client($seed) }) } 1 .. $clients;
	end_of(@clients);
	$redis->set('all answered', 1);
	# The courier that follows a dead one has another process id.
	end_of(grep { $running{$_}[0] == \&courier } keys %running);
	$redis->set('all published', 1);
	end_of(keys %running);
	note "couriers and consumers killed: $killed";

	my %published = @{ $redis->hgetall('published') };
	cmp_ok(min(values %published), '>=', 2, 'each message was published more than once');
	my ($messages, $executions) = $db->selectrow_array('SELECT (SELECT count(*) FROM outbox), (SELECT count(*) FROM orders)');
	is(scalar(keys %published), $messages, 'each message was published');
	is($redis->get('answered 402'), $clients * $orders / 10, 'an order that has failed has failed for each client');
	my $distinct_orders = $db->selectrow_array('SELECT count(DISTINCT (customer, request)) FROM orders');
	report(
		[
			'requests' => $orders,
			'deliveries' => $redis->get('sent'),
			'executions' => $executions,
			'double executions' => $executions - $distinct_orders
		]);
	is($executions, $orders * 9 / 10, 'each order that has not failed was executed once');
	is($messages, $executions, 'and has one message');

	my ($effects, $distinct) = $db->selectrow_array(q{
		SELECT count(*), count(DISTINCT e) FROM
			(SELECT 'shipping', customer, correlation_id FROM shipments
			UNION ALL SELECT 'mail', customer, correlation_id FROM mails) e});
	report(
		[
			'messages, for two consumers' => 2 * $messages,
			'deliveries' => $redis->get('consumed'),
			'executions' => $effects,
			'double executions' => $effects - $distinct
		],
		$label);
	is($distinct, 2 * $messages, 'each message has had each of its effects');
	kill_redis();
	return $effects - $distinct;
}

sub with_claim
{
	make_database('', recipe_sql());
	$db = connect_database();
	is(traffic(), 0, 'and each once');
	is( $db->selectrow_array('SELECT (SELECT 1000000 - quantity FROM stock) = (SELECT sum(quantity) FROM orders)'),
		1, 'what is gone from the stock was ordered');
	$db->disconnect;
	return;
}

sub without_claim
{
	my $sql = recipe_sql();

	is($sql =~ s/^\tIF NOT idem_claim.*?^\tEND IF;\n//msg, 2, "baseline: the consumers' claims are taken out");
	make_database('_unguarded', $sql);
	$db = connect_database();
	# Each message was published at least twice, and consumed each time.
	cmp_ok(traffic('baseline without the claim'), '>=', 2 * $orders * 9 / 10,
		'baseline: without the claim each message has its effect twice');
	$db->disconnect;
	return;
}

seed();
with_claim();
without_claim();
done_testing();
