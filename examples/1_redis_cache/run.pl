#!/usr/bin/perl
#
# Runs the example: processes use and sell items through the cache, Redis is killed in the
# middle, and each request is sent again. Then, as a baseline, the same without the claim.

use strict;
use warnings;

use FindBin;
use lib "$FindBin::RealBin/../../test/lib";

use List::Util qw(shuffle sum);
use Test::More;
use Time::HiRes qw(sleep);

use Example;

my $players = 12;
my $processes = 4;
my $ttl = 600;
my ($db, $cache);

# ----- the code of a user: a handler, with the cache in front of the database -----

# Treats a cache that does not answer like an empty one.
sub cache
{
	my ($command, @arguments) = @_;

	return eval {
		$cache //= connect_redis();
		$cache->$command(@arguments);
	} // do { undef $cache if $@; undef };
}

# Handles a request. Returns its status and its response.
#
#	executed         by this call
#	cached           executed by an earlier call, whose response is in the cache
#	executed before  executed by an earlier call, and the response is lost: read the state
#	in flight        another session is executing it: send the same request again later
sub handle
{
	my ($player, $request, $action, $item) = @_;

	my $response = cache(get => "response:$player:$request");
	return ('cached', $response) if $response;
	for (;;)
	{
		my ($version) =
		  $db->selectrow_array('SELECT version FROM items WHERE id = ? AND player = ?', undef, $item, $player);
		return ('no such item') if !defined $version;
		my $status;
		eval {
			($response, $status) = $db->selectrow_array(
				"SELECT response, response->>'status' FROM ${action}_item(?, ?, ?, ?) AS response",
				undef, $player, $request, $item, $version);
		};
		if (!$@)
		{
			cache(set => "response:$player:$request", $response, 'EX', $ttl) if $status eq 'executed';
			return ($status, $response);
		}
		return ('in flight') if $db->state eq 'ID409';
		die $@ if $db->state ne '40001';
	}
}

# ----- the traffic -----

# A request of a player for one of the player's two items
sub new_requests
{
	my ($from, $till) = @_;
	return map {
		my $player = int rand $players;
		[ "player $player", "request $_", (rand() < 0.3 ? 'sell' : 'use'), 2 * $player + int rand 2 ];
	} $from .. $till;
}

# Each process handles its share and reports the status of each request; $after->(answers by
# status) is called after each answer. After "in flight" a client sends the request again.
sub deliver
{
	my ($after, @deliveries) = @_;
	my %answers;

	pipe my $reader, my $writer or die "pipe: $!";
	my @pids = map {
		my $process = $_;
		spawn(
			sub {
				close $reader;
				$db = connect_database();
				undef $cache;
				for my $i (grep { $_ % $processes == $process } 0 .. $#deliveries)
				{
					for (;;)
					{
						my ($status) = handle(@{ $deliveries[$i] });
						syswrite $writer, "$status\n";
						last if $status ne 'in flight';
						sleep 0.01;
					}
				}
			})
	} 0 .. $processes - 1;
	close $writer;
	while (my $status = <$reader>)
	{
		chomp $status;
		$answers{$status}++;
		$after->(\%answers);
	}
	for my $pid (@pids)
	{
		waitpid $pid, 0;
		die "a process failed" if $?;
	}
	return \%answers;
}

# Returns how many requests were executed, and how many of these executions were double.
sub traffic
{
	my ($label) = @_;
	my @first = new_requests(1, 150);
	my @second = new_requests(151, 250);
	my %answers;

	$db->do('INSERT INTO wallets SELECT $$player $$ || p, 0 FROM generate_series(0, ? - 1) p', undef, $players);
	$db->do('INSERT INTO items SELECT i, $$player $$ || i / 2, 1 + i, 1000 FROM generate_series(0, 2 * ? - 1) i',
		undef, $players);

	start_redis();
	my @deliveries = shuffle(@first, @first[ grep { $_ % 2 } 0 .. $#first ]);
	my $killed;
	my $up = deliver(
		sub {
			my ($answers) = @_;
			return if $killed || !$answers->{cached} || sum(values %$answers) < @deliveries / 2;
			kill_redis();
			$killed = 1;
		},
		@deliveries);
	ok($killed, 'Redis is killed, after it has answered replays');
	my $down = deliver(sub { }, shuffle(@first, @second));
	start_redis();
	my $empty = deliver(sub { }, shuffle(@first, @second));

	for my $answer ($up, $down, $empty)
	{
		$answers{$_} += $answer->{$_} for keys %$answer;
	}
	note 'answers: ', join ', ', map { "$_ $answers{$_}" } sort keys %answers;
	my ($executions, $executed) =
	  $db->selectrow_array('SELECT count(*), count(DISTINCT (player, request)) FROM history');
	is($executed, @first + @second, 'each request was executed');
	report(
		[
			'requests' => $executed,
			'deliveries' => sum(values %answers),
			'executions' => $executions,
			'double executions' => $executions - $executed
		],
		$label);
	return ($executions, $executions - $executed);
}

sub items_gone
{
	return $db->selectrow_array('SELECT sum(1000 - quantity), sum(version) FROM items');
}

# ----- with the claim -----

sub with_claim
{
	make_database('', recipe_sql());
	$db = connect_database();
	my ($executions, $double) = traffic();
	is($double, 0, 'none was executed twice');
	is_deeply([ items_gone() ], [ $executions, $executions ], 'as many items are gone');
	is( $db->selectrow_array('SELECT (SELECT sum(gold) FROM wallets) = (SELECT sum(gold) FROM history)'),
		1, 'and each was paid for once');

	three_tiers();
	kill_redis();
	sequential_replay();
	$db->disconnect;
	return;
}

# The answers that a client gets, and what it must do
sub three_tiers
{
	my @request = ('player 0', 'request in three tiers', 'use', 0);
	my $other = connect_database();

	undef $cache;
	my ($version) = $other->selectrow_array('SELECT version FROM items WHERE id = 0');
	$other->begin_work;
	$other->do('SELECT use_item(?, ?, ?, ?)', undef, @request[ 0, 1, 3 ], $version);
	is((handle(@request))[0], 'in flight', 'in flight: send it again later');
	$other->rollback;
	my $before = time;
	is((handle(@request))[0], 'executed', 'which is then executed, as the other one failed');
	my ($status, $response) = handle(@request);
	is($status, 'cached', 'cached: use the response');
	like($response, qr/"quantity": \d+/, 'which is that of the execution');
	cmp_ok(cache(pexpiretime => "response:$request[0]:$request[1]") / 1000,
		'>=', $before + $ttl, "the response is cached for $ttl s");
	cmp_ok($db->selectrow_array('SELECT extract(epoch FROM expires_at) FROM idem_lookup(?, ?, ?)',
			undef, @request[ 0, 1 ], 'inventory'),
		'>=', $before + $ttl, 'and the claim is remembered as long');
	cache('flushall');
	is((handle(@request))[0], 'executed before', 'marker: never send it again, fetch the state');
	return;
}

# A replay without concurrent requests and without a cache
sub sequential_replay
{
	my @state = items_gone();
	my ($version) = $db->selectrow_array('SELECT version FROM items WHERE id = 0');

	$db->begin_work;
	is($db->do('UPDATE items SET version = version WHERE id = 0 AND version = ?', undef, $version),
		1, 'without Redis, a replay reads the new version, which passes the version check');
	$db->rollback;
	is((handle('player 0', 'request in three tiers', 'use', 0))[0],
		'executed before', 'and is not executed, because of the claim');
	is_deeply([ items_gone() ], \@state, 'nothing has changed');
	return;
}

# ----- the baseline, without the claim -----

sub without_claim
{
	my $sql = recipe_sql();

	is($sql =~ s/^\tIF NOT idem_claim.*?^\tEND IF;\n//msg, 2, 'baseline: the claims are taken out');
	make_database('_unguarded', $sql);
	$db = connect_database();
	my ($executions, $double) = traffic('baseline without the claim');
	# The first 150 requests were executed, and sent again while there was no cache.
	cmp_ok($double, '>=', 150, 'baseline: without the claim requests are executed twice');
	is((items_gone())[1], $executions, 'baseline: each execution passed the version check');
	kill_redis();
	$db->disconnect;
	return;
}

seed();
with_claim();
without_claim();
done_testing();
