#!/usr/bin/perl
#
# Runs the example: each request has a leader and five followers. At each of its steps a leader is
# killed, or paused, or its session is terminated.

use strict;
use warnings;

use FindBin;
use lib "$FindBin::RealBin/../../test/lib";

use Test::More;

use Example;

my $followers = 5;
my $creator = 'ann';
my @members = qw(ann bob cid);
my @steps = qw(begin add_group add_members add_conversation);
my $db;
my ($requests, $deliveries) = (0, 0);

# ----- the code of a user -----

sub call
{
	my ($function, @arguments) = @_;
	my $places = join ', ', ('?') x @arguments;
	return $db->selectrow_hashref("SELECT * FROM $function($places)", undef, @arguments);
}

# One step of the leader. Returns '', or ID410 if the leader was replaced, or 23503 if a member
# does not exist.
sub transaction
{
	my ($function, $holder, $arguments, $at) = @_;

	eval {
		$db->begin_work;
		call($function, @$holder, @$arguments);
		$at->("$function uncommitted");
		$db->commit;
		$at->($function);
		1;
	} and return '';
	my $state = $db->state;
	$db->rollback if !$db->{AutoCommit};
	die $@ if $state !~ /^(ID410|23503)$/;
	return $state;
}

# All steps of the leader; calls $at->(step) before and after each commit.
sub lead
{
	my ($request, $members, $claim, $at) = @_;
	my @holder = ($creator, $request, $claim->{token}, $claim->{ids});
	my $say = sub { $at->(@_, $claim->{ids}) };
	my %arguments = (add_group => [$request], add_members => [$members]);

	$say->('begin');
	for my $step (@steps[ 1 .. 3 ], 'complete_group')
	{
		my $state = transaction($step, \@holder, $arguments{$step} // [], $say);
		transaction('fail_group', \@holder, ['{"error": "no such user"}'], $say) if $state eq '23503';
		last if $state;
	}
	return;
}

# One client that wants the group. Its first call does not wait, so that it gets the ids of a
# group that is being created. Its next call sleeps until the leader has ended. A leader that was
# replaced, or has finished, asks like the others. Returns the ids, or undef and the error.
sub create_group
{
	my ($request, $members, $at) = @_;
	my $wait = '0';

	for (;;)
	{
		my $claim = call('begin_group', $creator, $request, $wait, '1 hour');
		my ($outcome, $ids) = @$claim{qw(outcome ids)};
		return $ids if $outcome eq 'completed';
		return (undef, $claim->{error}) if $outcome eq 'failed';
		if ($outcome eq 'claimed')
		{
			lead($request, $members, $claim, $at);
			next;
		}
		$at->($outcome, $ids);
		return $ids if call('heal_group', $creator, $request, $ids, $members)->{heal_group};
		$wait = '10 min';
	}
}

# ----- processes -----

# Starts a client as a process. hear() reads its output.
sub client
{
	my ($request, $members, $at) = @_;

	pipe my $reader, my $writer or die "pipe: $!";
	$writer->autoflush;
	$deliveries++;
	my $pid = spawn(
		sub {
			$db = connect_database();
			my ($ids, $error) = create_group($request, $members, sub { $at->($writer, @_) });
			print $writer $ids // $error, "\n";
		});
	return { pid => $pid, reader => $reader };
}

# Reads one line from a client; undef if the client has ended
sub hear
{
	my ($client) = @_;
	my $line = readline $client->{reader};
	chomp $line if defined $line;
	$client->{heard} = $line // $client->{heard};
	return $line;
}

# The last line of a client; undef if the client failed
sub last_words
{
	my ($client) = @_;
	my $words = $client->{heard};

	while (defined(my $line = hear($client)))
	{
		$words = $line;
	}
	waitpid $client->{pid}, 0;
	return $? == 0 ? $words : undef;
}

# A leader that goes on until a step, prints its session and the ids, and stops there
sub leader_until
{
	my ($request, $stop) = @_;

	return client($request, \@members,
		sub {
			my ($writer, $step, $ids) = @_;
			return if $step ne $stop;
			print $writer "$db->{pg_pid} $ids\n";
			kill STOP => $$;
		});
}

# A follower that prints the ids when it gets them while the group is being created. While another
# follower heals it gets none; then it prints them in the end.
sub follower
{
	my ($request) = @_;

	return client($request, \@members,
		sub {
			my ($writer, $outcome, $ids) = @_;
			print $writer "$ids\n" if $outcome eq 'in_progress' && defined $ids;
		});
}

sub one_group
{
	my ($request, $size, $what) = @_;

	return is_deeply(
		$db->selectrow_arrayref(q{
			SELECT count(DISTINCT g.id), count(DISTINCT member), count(DISTINCT c.id)
			FROM groups g LEFT JOIN members m ON m.group_id = g.id LEFT JOIN conversations c ON c.group_id = g.id
			WHERE title = ?}, undef, $request),
		[ 1, $size, 1 ],
		"$request: $what");
}

# ----- what happens to leaders -----

# $fault: 'killed', 'session terminated' or 'paused'
sub test_fault
{
	my ($fault, $step) = @_;
	my $request = "$fault at $step";

	$requests++;
	my $leader = leader_until($request, $step);
	my ($session, $ids) = split / /, hear($leader), 2;
	my @followers = map { follower($request) } 1 .. $followers;
	is_deeply([ map { hear($_) } @followers ], [ ($ids) x $followers ],
		"$request: the followers have the ids while the group is made");

	kill KILL => $leader->{pid} if $fault eq 'killed';
	$db->do('SELECT pg_terminate_backend(?)', undef, $session) if $fault eq 'session terminated';
	# Let the lease lapse now, and not in an hour. If the group is already complete the
	# followers do not wait for that: they heal.
	$db->do(q{UPDATE idem_claims SET lease_until = clock_timestamp() WHERE request_id = ?}, undef, $request)
	  if $step ne 'add_conversation';
	is_deeply([ map { last_words($_) } @followers ], [ ($ids) x $followers ],
		"$request: each of them gets the group");
	one_group($request, 3, 'one group, with its members and one conversation');

	# A leader that comes back must not undo this later change.
	$db->do(q{DELETE FROM members USING groups WHERE id = group_id AND title = ? AND member = 'cid'}, undef, $request);
	kill CONT => $leader->{pid};
	is(hear($leader), $fault eq 'paused' ? $ids : undef,
		"$request: the leader " . ($fault eq 'paused' ? 'comes back, and gets it too' : 'is gone'));
	waitpid $leader->{pid}, 0;
	one_group($request, 2, 'and has written nothing');
	return;
}

# Many clients at once want a group that does not exist
sub test_without_fault
{
	my $request = 'no fault';

	$requests++;
	my @clients = map { client($request, \@members, sub { }) } 1 .. 4 * $followers;
	my %ids = map { last_words($_) // 'none' => 1 } @clients;
	is(scalar(keys %ids), 1, "$request: one answer for all");
	one_group($request, 3, 'one group, with its members and one conversation');
	return;
}

# The attempt fails after the group itself was created.
sub test_failure
{
	my ($request, $error) = ('fails', '{"error": "no such user"}');
	my @wanted = (@members, 'zoe');
	my $groups = sub { $db->selectrow_array('SELECT count(*) FROM groups WHERE title LIKE ?', undef, "$request%") };
	my $answer = sub { last_words(client($_[0], \@wanted, sub { })) };

	$requests += 2;
	my @clients = map { client($request, \@wanted, sub { }) } 0 .. $followers;
	is_deeply([ map { last_words($_) } @clients ], [ ($error) x @clients ], "$request: everyone is told the error");
	is($groups->(), 0, "$request: nothing is left of the group");
	$db->do(q{INSERT INTO users VALUES ('zoe')});
	is($answer->($request), $error, "$request: for good, also when it could be made now");
	like($answer->("$request, new key"), qr/"group": /, "$request: a new key makes it");
	is($groups->(), 1, "$request: which is one group");
	return;
}

make_database('', recipe_sql());
$db = connect_database();
$db->do('INSERT INTO users SELECT unnest(?::text[])', undef, \@members);

test_without_fault();
for my $step (@steps)
{
	test_fault('killed', $step);
	test_fault('paused', $step);
}
for my $step (@steps[ 1 .. 3 ])
{
	test_fault('killed', "$step uncommitted");
	test_fault('session terminated', "$step uncommitted");
}
test_failure();

my ($groups, $titles) = $db->selectrow_array('SELECT count(*), count(DISTINCT title) FROM groups');
is($titles, $requests - 1, 'each request but the one that failed has made a group');
report(
	[
		'requests' => $requests,
		'deliveries' => $deliveries,
		'executions' => $groups,
		'double executions' => $groups - $titles
	]);
is($groups, $titles, 'none was made twice');
$db->disconnect;
done_testing();
