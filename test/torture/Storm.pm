# Clients that keep journals, and the judge that compares the journals with the tables.
#
#	my $storm = Storm->new($node, databases => ['c', 'portable'], clients => 64);
#	$storm->start;
#	...                      # the test's faults
#	$storm->stop;
#	$storm->judge;           # one assertion a check of checks.sql and database
#
# Each client is a process with a generator of its own, seeded from the test's seed and the
# number of the client. So the same seed makes the same calls with the same arguments; the order
# among processes is the machine's. A client writes its journal to a file, and survives the
# server: it connects again, to the address that where() names at that time.
#
# A COMMIT whose answer did not arrive is in the journal as "sent", and neither as "committed" nor as
# "undone". The client then sends its requests again with its next calls, as a client must, until
# one is answered; each time is in the journal as "again".

package Storm;

use strict;
use warnings;

use POSIX ();
use Time::HiRes qw(time sleep);

use PostgreSQL::Test::Utils;
use Test::More;

use Session;
use Torture;

my $here = __FILE__ =~ s/[^\/]+$//r;
$here = '.' if $here eq '';

# Any statement can be answered so: conflicts and deadlocks, cancel and terminate
my @anywhere = qw(40001 40P01 57014 57P01);

# The clients' keys repeat after so many calls: all clients are about as far at the same time.
my $window_calls = 12;

# An answer after this time is a fault: nothing waits longer than idem.wait
my $stuck_s = 90;

sub new
{
	my ($class, $node, %options) = @_;
	my $self = bless {
		node => $node,
		databases => [ 'c', 'portable' ],
		clients => 64,
		chaos => 1,
		looks => 1,				# look for claims that are forgotten too early
		test => $$,
		also => [],				# more SQLSTATEs that the test's faults cause
		left_s => 2,			# how long the prepared transactions that clients leave live at least
		%options,
		folder => PostgreSQL::Test::Utils::tempdir(),
		pids => []
	}, $class;

	$self->move_to($node);
	return $self;
}

# From now on clients connect there. An address is a file, so that the clients' processes see it
sub move_to
{
	my ($self, $node) = @_;
	my $file = "$self->{folder}/address";

	$self->{node} = $node;
	open my $out, '>', "$file.new" or die $!;
	print $out join("\n", $node->host, $node->port);
	close $out;
	rename "$file.new", $file or die $!;
	return;
}

sub make_tables
{
	my ($self) = @_;

	$self->{node}->safe_psql($_, slurp_file("$here/schema.sql")) for @{ $self->{databases} };
	return;
}

sub start
{
	my ($self) = @_;

	for my $number (1 .. $self->{clients})
	{
		$self->spawn(sub { $self->client($number) });
	}
	if ($self->{chaos})
	{
		$self->spawn(sub { $self->canceller });
	}
	$self->spawn(sub { $self->janitor($_[0]) }, $_) for @{ $self->{databases} };
	return;
}

sub spawn
{
	my ($self, $body, @arguments) = @_;
	my $pid = fork // die "fork: $!";

	if ($pid == 0)
	{
		$SIG{PIPE} = 'IGNORE';
		eval { $body->(@arguments); 1 } or print STDERR "# a client died: $@";
		# Without the END blocks of the test, which would stop its servers
		POSIX::_exit(0);
	}
	push @{ $self->{pids} }, $pid;
	return;
}

# Lets the clients end their calls, and waits for them
sub stop
{
	my ($self) = @_;

	append_to_file("$self->{folder}/stop", '');
	waitpid($_, 0) for @{ $self->{pids} };
	$self->{pids} = [];
	unlink "$self->{folder}/stop";
	return;
}

sub must_stop
{
	my ($self) = @_;

	# Without the test its clients must not go on.
	return -e "$self->{folder}/stop" || getppid != $self->{test};
}

# ----- a client -----

sub connect_again
{
	my ($self) = @_;

	eval { $self->{session}->close if $self->{session} };
	$self->{session} = undef;
	until ($self->{session})
	{
		my ($host, $port) = split /\n/, slurp_file("$self->{folder}/address");
		local %ENV = (%ENV, PGHOST => $host, PGPORT => $port);
		$self->{session} = eval { Session->new($self->{database}, application_name => 'storm') };
		if (!$self->{session})
		{
			return 0 if $self->must_stop && $self->{gave_up}++ > 300;
			sleep 0.1;
		}
	}
	return 1;
}

# Runs one statement: (SQLSTATE, rows). SQLSTATE '' is success, 'lost' a lost connection
sub ask
{
	my ($self, $sql) = @_;
	my $session = $self->{session};
	my $reply;

	if (!$session)
	{
		return ('lost', []);
	}
	local $SIG{ALRM} = sub { die "stuck\n" };
	alarm $stuck_s;
	my $ok = eval {
		$session->send($sql);
		$session->flush;
		$session->read while $session->{pending};
		1;
	};
	my $failure = $@;
	alarm 0;
	$reply = $ok ? shift @{ $session->{replies} } : $session->{reply};
	if (!$ok)
	{
		my $state = $reply->{error} ? $reply->{error}{C} : 'lost';
		$self->fault("no answer within $stuck_s s: $sql") if $failure eq "stuck\n";
		$self->fault("$state $reply->{error}{M}: $sql")
		  if $state ne 'lost' && !grep { $state eq $_ } @anywhere, @{ $self->{also} };
		$self->{session} = undef;
		return ('lost', []);
	}
	# A cancel while a COMMIT waits for the standby: the server says success, and warns.
	return ('lost', []) if grep { $_->{M} =~ /wait for synchronous replication/ } @{ $reply->{notices} };
	return ($reply->{error}{C}, [], $reply->{error}{M}) if $reply->{error};
	return ('', $reply->{rows});
}

sub journal
{
	my ($self, $kind, %entry) = @_;
	my $file = $self->{journal};

	# As a string, a time would lose its microseconds.
	$_ = sprintf '%.6f', $_ for grep { defined } @entry{qw(began ended)};
	print $file join("\t", $self->{number}, $kind,
		map { defined $_ && length $_ ? s/[\t\n\\]/ /gr : '\N' }
		  @entry{qw(execution scope user request result answer began ended)}), "\n";
	return;
}

sub fault
{
	my ($self, $what) = @_;

	$self->journal('fault', result => $what);
	return;
}

# An error that this statement may have
sub check_error
{
	my ($self, $state, $message, $sql, @allowed) = @_;

	return if $state eq '' || $state eq 'lost';
	return if grep { $state eq $_ } @anywhere, @allowed, @{ $self->{also} };
	return if defined $self->{also_messages} && $message =~ $self->{also_messages};
	$self->fault("$state $message: $sql");
	return;
}

# One statement outside a transaction block
sub call
{
	my ($self, $sql, @allowed) = @_;
	my ($state, $rows, $message) = $self->ask($sql);

	$self->check_error($state, $message, $sql, @allowed);
	return ($state, $rows);
}

# A user and a request. Some of them are sent by many clients at about the same time.
sub key
{
	my ($self, $scope) = @_;
	my $user = 'user ' . int rand 3;
	my $again = $self->{again};
	my ($next) = grep { $again->[$_]{scope} eq $scope } 0 .. $#$again;

	if (defined $next)
	{
		my $request = splice @$again, $next, 1;
		push @{ $self->{sending_again} }, $request;
		$self->journal('again', %$request, began => time);
		return @$request{qw(user request)};
	}
	if ($scope eq 'timed')
	{
		# Also ids that were used a while ago
		my $known = $self->{uuids} //= [];
		my $request = @$known && rand() < 0.5 ? $known->[ rand @$known ] : $self->uuid_of_now;
		shift @$known if @$known > 20;
		push @$known, $request;
		return ('user', $request);
	}
	return ($user, sprintf('%s-%d-%d', $self->{number}, $self->{called}, $self->{drawn}++)) if rand() < 0.6;
	return ($user, $self->hot_request($scope));
}

sub hot_request
{
	my ($self, $scope) = @_;

	return sprintf('hot-%s-%d-%d', $scope, $self->{called} / $window_calls, rand 4);
}

sub uuid_of_now
{
	my ($self) = @_;
	my $ms = int(time * 1000);

	return sprintf('%08x-%04x-7%03x-8%03x-%012x', $ms >> 16, $ms & 0xFFFF, rand 0xFFF, rand 0xFFF, rand 0xFFFFFFFF);
}

sub id
{
	my ($self) = @_;

	return "$self->{number}-" . $self->{ids}++;
}

sub quoted
{
	return join ', ', map { defined $_ ? "'" . s/'/''/gr . "'" : 'NULL' } @_;
}

# Answers to a claim that say something of the request
sub note_answer
{
	my ($self, $outcome, $scope, $user, $request, $result, $began, $is_snapshot, $lease_until) = @_;

	$self->{counts}{ $outcome // 'none' }++;
	if ($outcome eq 'completed' || $outcome eq 'failed')
	{
		$self->journal($is_snapshot ? 'replay_snapshot' : 'replay', scope => $scope, user => $user, request => $request,
			result => $result, answer => $outcome, began => $began, ended => time);
	}
	elsif (defined $lease_until && $outcome =~ /^(in_progress|timed_out)$/)
	{
		$self->journal('waited', scope => $scope, user => $user, request => $request, result => $lease_until, answer => $outcome,
			began => $began, ended => time);
	}
	elsif ($outcome !~ /^(claimed|in_progress|timed_out)$/ && !($outcome eq 'stale' && $scope eq 'timed'))
	{
		$self->fault("answer $outcome in scope $scope");
	}
	return;
}

# Nobody knows whether these executions were committed. What is sent again: {scope, user, request}
sub send_again
{
	my ($self, @executions) = @_;

	for my $execution (@executions)
	{
		my %request = map { $_ => $execution->{$_} } qw(scope user request);
		my $is_there = grep { my $other = $_; !grep { $other->{$_} ne $request{$_} } keys %request } @{ $self->{again} };
		push @{ $self->{again} }, \%request if !$is_there;
	}
	return;
}

# One of these scopes: that of a request that must be sent again, if there is one
sub pick_scope
{
	my ($self, @scopes) = @_;

	for my $request (@{ $self->{again} })
	{
		return $request->{scope} if grep { $_ eq $request->{scope} } @scopes;
	}
	return $scopes[ rand @scopes ];
}

# Ends a transaction in which these executions were made; executions are {execution, scope, user,
# request}
sub end_transaction
{
	my ($self, $state, @executions) = @_;
	my ($how, $name) = (rand, undef);

	if ($state ne '')
	{
		$self->ask('ROLLBACK') if $state ne 'lost';
		$self->journal('undone', %$_) for @executions;
		return 0;
	}
	if ($how < 0.12)
	{
		my ($rolled_back) = $self->ask('ROLLBACK');
		$self->check_error($rolled_back, '', 'ROLLBACK');
		$self->journal('undone', %$_) for @executions;
		return 0;
	}
	$self->journal('sent', %$_) for @executions;
	if ($how < 0.18 && @executions == 1 && $self->{prepares})
	{
		return $self->end_prepared($executions[0]);
	}
	my ($committed, undef, $message) = $self->ask('COMMIT');
	$self->check_error($committed, $message, 'COMMIT');
	if ($committed eq 'lost')
	{
		$self->{counts}{commits_in_doubt}++ if @executions;
		$self->send_again(@executions);
		return 0;
	}
	$self->journal($committed eq '' ? 'committed' : 'undone', %$_, ended => time) for @executions;
	return $committed eq '';
}

# Some are left for the janitor.
sub end_prepared
{
	my ($self, $execution) = @_;
	my $gid = "$execution->{execution}|$execution->{request}";
	my ($prepared, undef, $message) = $self->ask('PREPARE TRANSACTION ' . quoted($gid));
	my $kind = rand() < 0.7 ? 'COMMIT' : 'ROLLBACK';

	$self->check_error($prepared, $message, 'PREPARE TRANSACTION');
	if ($prepared ne '')
	{
		$self->journal('undone', %$execution) if $prepared ne 'lost';
		$self->send_again($execution) if $prepared eq 'lost';
		return 0;
	}
	return 0 if rand() < 0.2;
	sleep rand 0.02;
	my ($ended, undef, $why) = $self->ask("$kind PREPARED " . quoted($gid));
	# The janitor can have been faster, if this client was slow.
	$self->check_error($ended, $why, "$kind PREPARED", '42704', '55000');
	$self->journal($kind eq 'COMMIT' ? 'committed' : 'undone', %$execution, ended => time) if $ended eq '';
	$self->send_again($execution) if $ended ne '';
	return $ended eq '' && $kind eq 'COMMIT';
}

# ----- the calls -----

sub call_work
{
	my ($self) = @_;
	my $level = rand;
	my $is_snapshot = $level > 0.85;
	my @executions;
	my ($state, $rows, $message);
	my $savepoints = rand() < 0.25 ? 2 : rand() < 0.3 ? 1 : 0;

	($state) = $self->call('BEGIN ISOLATION LEVEL '
		  . ($level > 0.93 ? 'SERIALIZABLE' : $is_snapshot ? 'REPEATABLE READ' : 'READ COMMITTED'));
	return if $state ne '';
	if (rand() < 0.05)
	{
		($state) = $self->call(rand() < 0.5 ? "SET LOCAL statement_timeout = '@{[1 + int rand 30]}ms'" : "SET LOCAL lock_timeout = '@{[1 + int rand 30]}ms'");
	}
	my $parts = rand() < 0.3 ? 2 : 1;
	for my $part (1 .. $parts)
	{
		my $scope = $self->pick_scope(qw(brief brief guard retry long timed));
		my ($user, $request) = $self->key($scope);
		my $ending = rand() < 0.2 ? 'marker' : rand() < ($scope =~ /^(retry|long)$/ ? 0.4 : 0.05) ? 'failed' : 'done';
		my $wait = rand() < 0.2 ? '0' : rand() < 0.3 ? '50 ms' : undef;

		# The short form means the only request that is not settled.
		$ending = 'short' if $ending eq 'done' && $parts == 1 && rand() < 0.5;
		for my $try (0 .. ($savepoints && rand() < 0.3 ? 1 : 0))
		{
			last if $state ne '';
			my $id = $self->id;
			my $began = time;

			($state) = $self->call('SAVEPOINT a') if $savepoints;
			last if $state ne '';
			my $sql = 'SELECT * FROM work(' . quoted($id, $user, $request, $scope, $wait, $ending) . ')';
			($state, $rows) = $self->call($sql, '55P03');
			my $is_mine = $state eq '' && $rows->[0][0] eq 'claimed';
			my %execution = (execution => $id, scope => $scope, user => $user, request => $request);
			$self->note_answer($rows->[0][0], $scope, $user, $request, $rows->[0][1], $began, $is_snapshot)
			  if $state eq '' && !grep { $_->{request} eq $request } @executions;
			if ($savepoints && $state ne 'lost' && ($state ne '' || rand() < 0.3))
			{
				# An error in a savepoint does not end the transaction, nor does a change of mind.
				($state) = $self->call('ROLLBACK TO a');
				$self->journal('undone', %execution) if $is_mine;
				next;
			}
			push @executions, \%execution if $is_mine;
			($state) = $self->call('RELEASE a') if $savepoints && $state eq '';
		}
		last if $state ne '';
	}
	$self->end_transaction($state, @executions);
	return;
}

# So many new requests in a row that the library takes the next one for new, too, without a look.
# It is one that others may have claimed, or are claiming now.
sub call_new
{
	my ($self) = @_;
	my $new = 110;
	my ($scope, $user, $id) = ('guard', 'user ' . int rand 3, $self->id);
	my @requests = ((map { "$self->{number}-$self->{called}-new-$_" } 1 .. $new), $self->hot_request($scope));
	my $began = time;
	my @executions;
	my ($state) = $self->call('BEGIN');

	return if $state ne '';
	($state, my $rows) = $self->call("SELECT n, w.outcome, w.result FROM unnest(ARRAY[" . quoted(@requests) . "]) WITH ORDINALITY AS r (request, n),
		LATERAL work('$id.' || n, '$user', request, '$scope', NULL, 'done') AS w");
	for my $row (@$rows)
	{
		my ($n, $outcome, $result) = @$row;
		my $request = $requests[ $n - 1 ];
		$self->note_answer($outcome, $scope, $user, $request, $result, $began);
		push @executions, { execution => "$id.$n", scope => $scope, user => $user, request => $request } if $outcome eq 'claimed';
	}
	$self->end_transaction($state, @executions);
	return;
}

sub call_idem_call
{
	my ($self) = @_;
	my ($user, $request) = $self->key('call');
	my $began = time;
	my $sql = "SELECT idem_call(" . quoted($user, $request) . ", 'pay(text, text)', jsonb_build_object("
	  . quoted('user', $user, 'request', $request) . "), 'call') #>> '{}', idem_outcome()";
	my ($state, $rows) = $self->call($sql, 'ID409', 'ID503');

	$self->send_again({ scope => 'call', user => $user, request => $request }) if $state eq 'lost';
	return if $state ne '';
	my ($id, $outcome) = @{ $rows->[0] };
	if ($outcome eq 'claimed')
	{
		$self->{counts}{claimed}++;
		$self->journal('committed', execution => $id, scope => 'call', user => $user, request => $request, ended => time);
	}
	else
	{
		$self->note_answer($outcome, 'call', $user, $request, $id, $began);
	}
	return;
}

sub call_batch
{
	my ($self) = @_;
	my $size = rand() < 0.2 ? 100 : 5 + int rand 20;
	my (@users, @requests, @executions);
	my $id = $self->id;
	my $wait = rand() < 0.3 ? '0' : undef;
	my $began = time;

	for (1 .. $size)
	{
		my ($user, $request) = $self->key('batch');
		push @users, $user;
		push @requests, $request;
	}
	my ($state) = $self->call('BEGIN');
	return if $state ne '';
	($state, my $rows) = $self->call("SELECT * FROM work_many('$id', ARRAY[" . quoted(@users) . '], ARRAY[' . quoted(@requests) . "], 'batch', " . quoted($wait) . ')');
	my %mine;
	for my $row (@$rows)
	{
		my ($ordinal, $outcome, $result) = @$row;
		my ($user, $request) = ($users[ $ordinal - 1 ], $requests[ $ordinal - 1 ]);
		if ($outcome eq 'claimed')
		{
			$self->{counts}{claimed}++;
			$mine{"$user|$request"} = 1;
			push @executions, { execution => "$id.$ordinal", scope => 'batch', user => $user, request => $request };
		}
	}
	for my $row (@$rows)
	{
		my ($ordinal, $outcome, $result) = @$row;
		my ($user, $request) = ($users[ $ordinal - 1 ], $requests[ $ordinal - 1 ]);
		# A repeat within the batch is answered by the claim before it.
		next if $mine{"$user|$request"};
		$self->note_answer($outcome, 'batch', $user, $request, $result, $began);
	}
	$self->end_transaction($state, @executions);
	return;
}

sub call_lease
{
	my ($self) = @_;
	my $scope = $self->pick_scope('leases', 'found');
	my ($user, $request) = $self->key($scope);
	my $key = quoted($user, $request);
	my $began = time;
	my $id = $self->id;
	my $lease = 20 + int rand 400;
	my ($state, $rows) = $self->call("SELECT * FROM hold($key, '$scope', "
		  . quoted(rand() < 0.3 ? '0' : undef) . ", '$lease ms', '{\"by\": \"$id\"}')");

	return if $state ne '';
	my ($outcome, $result, $token, $lease_until) = @{ $rows->[0] };
	$self->note_answer($outcome, $scope, $user, $request, $result, $began, 0, $lease_until);
	return if $outcome ne 'claimed';
	my @lease = (scope => $scope, user => $user, request => $request, token => $token);
	return if rand() < 0.1;
	if (rand() < 0.3)
	{
		sleep rand 0.3;
	}
	for (1 .. int rand 3)
	{
		($state) = $self->call_as_holder("SELECT write_under_lease($key, '$scope', $token)", @lease);
		return if $state ne '';
	}
	if (rand() < 0.3)
	{
		($state) = $self->call_as_holder("SELECT extend($key, '$scope', $token, '@{[50 + int rand 200]} ms')", @lease);
		return if $state ne '';
	}
	if (rand() < 0.1)
	{
		$self->journal('releasing', scope => $scope, user => $user, request => $request, result => $token);
		$self->call_as_holder("SELECT idem_release($key, $token, '$scope')", @lease);
		return;
	}
	($state) = $self->call('BEGIN');
	return if $state ne '';
	($state, $rows) = $self->call_as_holder("SELECT work_under_lease(" . quoted($id) . ", $key, '$scope', $token)", @lease);
	my $done = $rows->[0][0];
	my %execution = (execution => $id, scope => $scope, user => $user, request => $request);
	my @executions = $state eq '' && $done eq $id ? (\%execution) : ();
	if ($scope eq 'leases' && $state eq '')
	{
		($state) = $self->call("SELECT settle_lease('$id', $key, '$scope', $token)");
	}
	$self->end_transaction($state, @executions) or return;
	if ($scope eq 'found' && rand() < 0.7)
	{
		my $settling = time;
		($state, $rows) = $self->call_as_holder("SELECT idem_complete($key, to_jsonb('$done'::text), $token, '$scope')", @lease);
		$self->note_settled($done, $rows->[0][0], $settling) if $state eq '';
	}
	return;
}

# A call that raises ID410 if the lease was lost: the judge looks to whom
sub call_as_holder
{
	my ($self, $sql, %lease) = @_;
	my ($state, $rows) = $self->call($sql, 'ID410', 'ID503');

	$self->journal('refused', %lease, result => $lease{token}, ended => time) if $state eq 'ID410';
	return ($state, $rows);
}

# began: before the call that settled it. If it was settled already, nobody knows when.
sub note_settled
{
	my ($self, $execution, $is_first, $began) = @_;

	$self->journal('settled', execution => $execution, $is_first eq 't' ? (began => $began) : ());
	return;
}

# Settles a request whose work was done, and whose holder did not say so
sub call_heal
{
	my ($self) = @_;
	my ($state, $rows) = $self->call(q{
		SELECT e.user_id, e.request_id, e.id FROM executions e JOIN idem_claims c USING (request_id, user_id, scope)
		WHERE scope = 'found' AND c.state = 'in_progress' LIMIT 3});

	return if $state ne '';
	for my $row (@$rows)
	{
		my ($user, $request, $id) = @$row;
		# ID410: a holder after that one has released the request.
		my $began = time;
		($state, my $healed) = $self->call('SELECT idem_heal(' . quoted($user, $request) . ", to_jsonb('$id'::text), 'found')", 'ID410', 'ID503');
		$self->note_settled($id, $healed->[0][0], $began) if $state eq '';
		return if $state eq 'lost';
	}
	return;
}

sub call_sink
{
	my ($self) = @_;
	my @rows;
	my ($state) = $self->call('BEGIN');

	return if $state ne '';
	for (0 .. int rand 3)
	{
		my ($user, $request) = $self->key('sink');
		push @rows, { execution => $self->id, scope => 'sink', user => $user, request => $request };
	}
	# In one order: batches that are not sorted deadlock.
	@rows = sort { $a->{request} cmp $b->{request} || $a->{user} cmp $b->{user} } @rows;
	($state, my $there) = $self->call('INSERT INTO sink VALUES '
		  . join(', ', map { '(' . quoted(@$_{qw(user request execution)}) . ')' } @rows) . ' RETURNING id', 'ID409', 'ID503');
	my %is_there = map { $_->[0] => 1 } @$there;
	$self->{counts}{claimed} += keys %is_there;
	$self->end_transaction($state, grep { $is_there{ $_->{execution} } } @rows);
	return;
}

# Only what SQL can say
sub call_plain
{
	my ($self) = @_;
	my ($user, $request) = $self->key('plain');
	my $key = quoted($user, $request);
	my ($state) = $self->call('BEGIN');

	return if $state ne '';
	($state) = $self->call('SELECT outcome FROM ' . (rand() < 0.5 ? "idem_try_claim($key, wait => '1 s')" : "idem_lease($key, '1 s', wait => '1 s')"));
	($state) = $self->call("SELECT idem_complete('{}'), idem_outcome()", 'ID410') if $state eq '' && rand() < 0.5;
	$self->ask($state eq '' ? 'COMMIT' : 'ROLLBACK') if $state ne 'lost';
	$self->call("SELECT * FROM idem_lookup($key)");
	return;
}

sub call_cleanup
{
	my ($self) = @_;

	$self->call(rand() < 0.5 ? 'SELECT idem_cleanup(200)' : 'CALL idem_cleanup_all()');
	return;
}

# Which call sends a request of a scope
my %call_of = (
	(map { $_ => 'call_work' } qw(brief guard retry long timed)),
	(map { $_ => 'call_lease' } qw(leases found)),
	call => 'call_idem_call', batch => 'call_batch', sink => 'call_sink');

sub client
{
	my ($self, $number) = @_;
	my $database = $self->{databases}[ $number % @{ $self->{databases} } ];
	my @calls = (
		([ 'call_work' ]) x 44, ([ 'call_new' ]) x 1, ([ 'call_idem_call' ]) x 12, ([ 'call_batch' ]) x 6, ([ 'call_lease' ]) x 20,
		([ 'call_heal' ]) x 1, ([ 'call_sink' ]) x 12, ([ 'call_cleanup' ]) x ($database eq 'c' ? 1 : 2));

	@calls = map { [$_] } @{ $self->{calls} } if $self->{calls};
	srand(seed() * 1000 + $number);
	@$self{qw(number database called ids drawn counts again prepares)} = ($number, $database, 0, 0, 0, {}, [], $self->{prepares} // 1);
	open $self->{journal}, '>>', "$self->{folder}/$database.$number" or die $!;
	until ($self->must_stop)
	{
		$self->{session} or $self->connect_again or last;
		my $call = @{ $self->{again} } ? $call_of{ $self->{again}[0]{scope} } : $calls[ rand @calls ][0];
		$self->{sending_again} = [];
		$self->$call;
		$self->send_again(@{ $self->{sending_again} }) if !$self->{session};
		$self->{called}++;
		# A failed transaction ends with its connection, if the ROLLBACK was cancelled.
		if ($self->{session} && ($self->{session}{status} // 'I') ne 'I')
		{
			$self->{session}->close;
			$self->{session} = undef;
		}
	}
	$self->journal('count', result => "$_ $self->{counts}{$_}") for keys %{ $self->{counts} };
	close $self->{journal};
	return;
}

# ----- others -----

# Cancels and terminates clients
sub canceller
{
	my ($self) = @_;

	srand(seed() + 17);
	$self->{database} = 'postgres';
	$self->{number} = 0;
	open $self->{journal}, '>', "$self->{folder}/canceller" or die $!;
	until ($self->must_stop)
	{
		$self->{session} or $self->connect_again or last;
		my $function = rand() < 0.8 ? 'pg_cancel_backend' : 'pg_terminate_backend';
		$self->ask("SELECT $function(pid) FROM pg_stat_activity WHERE application_name = 'storm' AND datname <> 'postgres'
			ORDER BY random() LIMIT 1");
		sleep rand 0.1;
	}
	return;
}

# Ends the prepared transactions that clients have left, and looks for claims that are forgotten too
# early: at the end of the storm, those with a short time to live have expired.
sub janitor
{
	my ($self, $database) = @_;
	my $looked_at = 0;

	srand(seed() + 18);
	$self->{database} = $database;
	@$self{qw(number counts)} = (0, {});
	open $self->{journal}, '>>', "$self->{folder}/$database.janitor" or die $!;
	for (;;)
	{
		my $last = $self->must_stop;
		$self->{session} or $self->connect_again or last;
		my ($state, $rows) = $self->ask('SELECT gid FROM pg_prepared_xacts WHERE database = current_database()'
			  . ($last ? '' : " AND prepared < clock_timestamp() - interval '$self->{left_s} s'"));
		for my $row (@$rows)
		{
			my ($execution, $request) = split /\|/, $row->[0];
			my $kind = rand() < 0.7 ? 'COMMIT' : 'ROLLBACK';
			my ($ended) = $self->ask("$kind PREPARED " . quoted($row->[0]));
			$self->journal($kind eq 'COMMIT' ? 'committed' : 'undone', execution => $execution, request => $request, ended => time)
			  if $ended eq '';
		}
		if ($self->{looks} && ($last || time > $looked_at + 2))
		{
			# Some tests drop the tables meanwhile, or kill the server.
			my ($failed, $seen) = $self->ask('SELECT looked_at, forgotten FROM forgotten()');
			$looked_at = time if $failed eq '';
			$self->{counts}{still_promised} += $seen->[0][0] if $failed eq '';
			$self->fault("forgotten too early: $seen->[0][1]") if $failed eq '' && length($seen->[0][1] // '');
		}
		last if $last && $state eq '' && !@$rows && !grep { kill 0, $_ } @{ $self->{pids} };
		sleep 0.2;
	}
	$self->journal('count', result => "$_ $self->{counts}{$_}") for keys %{ $self->{counts} };
	close $self->{journal};
	return;
}

# ----- the judge -----

sub checks
{
	my $text = slurp_file("$here/checks.sql");
	my @checks;

	while ($text =~ /^-- check: ([^\n]*)\n(.*?)(?=^-- check: |\z)/msg)
	{
		my ($name, $body) = ($1, $2);
		my ($query, @broken) = split /^-- broken:\n/m, $body;
		s/;\s*\z// for $query, @broken;
		push @checks, { name => $name, query => $query, broken => \@broken };
	}
	return @checks;
}

sub load_journals
{
	my ($self, $database) = @_;

	$self->{node}->safe_psql($database, q{
		DROP TABLE IF EXISTS journal;
		CREATE TABLE journal (client int, kind text, execution text, scope text, user_id text, request_id text, result text, answer text,
			began_s float8, ended_s float8, began timestamptz, ended timestamptz)});
	$self->{node}->safe_psql($database, join ";\n",
		map { "COPY journal (client, kind, execution, scope, user_id, request_id, result, answer, began_s, ended_s) FROM '$_'" }
		  glob("$self->{folder}/$database.*"));
	$self->{node}->safe_psql($database, q{
		UPDATE journal SET began = to_timestamp(began_s), ended = to_timestamp(ended_s);
		CREATE INDEX ON journal (execution); CREATE INDEX ON journal (request_id);
		CREATE INDEX ON executions (id); CREATE INDEX ON leases (request_id);
		ANALYZE journal; ANALYZE executions; ANALYZE leases; ANALYZE sink; ANALYZE idem_claims});
	return;
}

# What clients do only if they are slow or lucky, once for certain: a lease lapses, and the next
# holder has it; then the first one is refused. A waiter gets a lease that lapses while it waits.
sub let_leases_lapse
{
	my ($self, $database) = @_;
	my $node = $self->{node};
	my ($scope, $id) = ('found', 'heir-execution');
	my @key = ('user', 'heir');
	my $hold = sub {
		my ($request, $lease, $by) = @_;
		return split /\|/, $node->safe_psql($database, "SELECT outcome, token, progress_before->>'by' FROM hold("
			  . quoted('user', $request, $scope, '2 min', $lease, qq({"by": "$by"})) . ')');
	};
	my $refuses = sub {
		my ($token) = @_;
		my (undef, undef, $error) = $node->psql($database, '\set VERBOSITY sqlstate' . "\n"
			  . 'SELECT write_under_lease(' . quoted(@key, $scope, $token) . ')');
		return $error =~ /ID410/ ? 'refused' : $error || 'accepted';
	};

	my ($first, $lost) = $hold->('heir', '10 ms', 'first');
	is($first, 'claimed', "$database: a lease is claimed") or return;
	is($refuses->($lost), 'accepted', "$database: its holder writes");
	$node->poll_query_until($database, "SELECT bool_and(lease_until < clock_timestamp()) FROM leases WHERE request_id = 'heir'");
	my ($second, $token, $by) = $hold->('heir', '1 min', 'second');
	is($second, 'claimed', "$database: after it has lapsed, it is claimed again") or return;
	is($by, 'first', "$database: the next holder is told the progress");
	is($refuses->($lost), 'refused', "$database: the first holder is refused");
	is($refuses->($token), 'accepted', "$database: the next holder writes");

	open $self->{journal}, '>>', "$self->{folder}/$database.heir" or die $!;
	$self->{number} = 0;
	$self->journal('sent', execution => $id, scope => $scope, user => $key[0], request => $key[1]);
	my $settling = time;
	is($node->safe_psql($database, 'SELECT work_under_lease(' . quoted($id, @key, $scope, $token) . ');'
			  . 'SELECT idem_complete(' . quoted(@key, qq("$id"), $token, $scope) . ')'), "$id\nt", "$database: and settles");
	$self->note_settled($id, 't', $settling);
	close $self->{journal};

	$hold->('waited-for', '300 ms', 'first');
	is(($hold->('waited-for', '1 min', 'second'))[0], 'claimed', "$database: a waiter gets a lease that lapses");
	return;
}

# Returns what was counted
sub judge
{
	my ($self, %options) = @_;
	my %sum;

	for my $database (@{ $self->{databases} })
	{
		$self->let_leases_lapse($database);
		$self->load_journals($database);
		for my $check (checks())
		{
			my $found = $self->{node}->safe_psql($database, $check->{query});
			is(join("\n", grep { defined } (split /\n/, $found)[ 0 .. 9 ]), '', "$database: never: $check->{name}");
		}
		my %counted = split /[|\n]/, $self->{node}->safe_psql($database, q{
			SELECT split_part(result, ' ', 1), sum(split_part(result, ' ', 2)::bigint) FROM journal WHERE kind = 'count' GROUP BY 1
			UNION ALL SELECT 'executions', count(*) FROM executions
			UNION ALL SELECT 'replays', count(*) FROM journal WHERE kind ~ '^replay'
			UNION ALL SELECT 'lease writes', count(*) FROM lease_writes
			UNION ALL SELECT 'take-overs', count(*) FROM (SELECT l.*, lag(token) OVER w AS before_token, lag(lease_until) OVER w AS before_until
				FROM leases l WINDOW w AS (PARTITION BY request_id, user_id, scope ORDER BY seq)) AS l
				WHERE scope = 'found' AND token <> before_token AND answered_at >= before_until
					AND NOT EXISTS (SELECT FROM journal j WHERE j.kind = 'releasing' AND j.request_id = l.request_id AND j.result = before_token::text)
			UNION ALL SELECT 'acknowledged', count(*) FROM journal WHERE kind = 'committed'
			UNION ALL SELECT 'requests sent more than once', count(*) FROM (SELECT FROM
				(SELECT DISTINCT scope, user_id, request_id, coalesce(execution, ctid::text) FROM journal
					WHERE request_id IS NOT NULL AND kind IN ('sent', 'committed', 'undone', 'replay', 'replay_snapshot', 'waited')) AS sending
				GROUP BY scope, user_id, request_id HAVING count(*) > 1) AS request
			UNION ALL SELECT 'sent again after doubt', count(*) FROM (SELECT DISTINCT scope, user_id, request_id FROM journal WHERE kind = 'again') AS request
			UNION ALL SELECT 'found executed then', count(*) FROM (SELECT DISTINCT scope, user_id, request_id FROM journal a
				WHERE kind = 'again' AND EXISTS (SELECT FROM journal r WHERE r.kind ~ '^replay' AND r.client = a.client
					AND r.request_id = a.request_id AND r.user_id = a.user_id AND r.scope = a.scope AND r.ended >= a.began)) AS request
			UNION ALL SELECT 'in doubt', count(*) FROM journal s WHERE kind = 'sent' AND NOT EXISTS (SELECT FROM journal e
				WHERE e.execution = s.execution AND e.kind IN ('committed', 'undone'))});
		$sum{$_} += $counted{$_} for keys %counted;
		figure($database, join(', ', map { "$_ $counted{$_}" } sort keys %counted));
		cmp_ok($counted{$_} // 0, '>', 0, "$database: there were $_") for 'lease writes', 'take-overs', 'still_promised', 'requests sent more than once';
	}
	return \%sum;
}

# Breaks the journals and tables, in one way at a time: each check must find its own. The log of the
# server then tells of a damaged index.
sub judge_the_judge
{
	my ($self, $database) = @_;

	is(join(', ', map { $_->{name} } grep { !@{ $_->{broken} } } checks()), '', 'each check has a way to break something');
	for my $check (checks())
	{
		for my $broken (@{ $check->{broken} })
		{
			my ($status, $found, $error) = $self->{node}->psql($database, "BEGIN; $broken; $check->{query}; ROLLBACK", on_error_stop => 1);
			# bt_index_check() raises what it finds.
			$found = $error if $status != 0 && $error =~ /lacks matching index tuple/;
			isnt($found, '', "the judge finds it: $check->{name}") or diag $error;
			$self->{node}->safe_psql($database, "ROLLBACK PREPARED '$1'") if $broken =~ /PREPARE TRANSACTION '(.*)'/;
		}
	}
	return;
}

1;
