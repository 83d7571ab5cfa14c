# Transactions at each isolation level: no anomaly that the level forbids
#
# Claims of all kinds, with all kinds of waiting, among reads of and appends to lists; the checker,
# History.pm, looks for anomalies in what the clients were told. The same with hand-written INSERT ... ON
# CONFLICT and SELECT, as control. The checker is tested, too: it must find each anomaly in a history
# that has it, and in runs those anomalies that their level allows and a stricter level forbids.

use strict;
use warnings;

use POSIX ();
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(sleep clock_gettime CLOCK_MONOTONIC);

use History;
use Session;
use Torture;

seed();
my @levels = ('READ COMMITTED', 'REPEATABLE READ', 'SERIALIZABLE');

# ----- the checker finds what is wrong -----

# A transaction from lines of ops; the times are those of the order in which they are written: one
# second an op, or the times given
my $clock = 0;

sub made
{
	my ($id, $ok, @ops) = @_;
	my %transaction = (id => $id, ok => $ok, ops => []);

	for my $op (@ops)
	{
		if (!ref $op) { $clock = $op; next }
		my ($kind, $object, $value, @rest) = @$op;
		push @{ $transaction{ops} }, [ $kind, $object, $value, $clock, $clock + 0.5, @rest ];
		$clock++;
	}
	@transaction{qw(ending ended)} = ($clock, $clock + 0.5);
	$clock++;
	return \%transaction;
}

sub found_in
{
	my ($final, @transactions) = @_;
	my $history = History->new;

	$history->add($_) for @transactions;
	$history->finally($_ => $final->{$_}) for keys %$final;
	return join ', ', sort grep { !/alone/ } keys %{ $history->check };
}

sub claimed
{
	my ($object, $label, $element, $became) = @_;
	return [ claimed => $object, $label, undef, $became // 'completed', $element ];
}

# A transaction that executes "once r" or "retry r"
sub executed
{
	my ($id, $ok, $object, $became) = @_;
	return made($id, $ok, claimed($object, "l$id", "e$id", $became), [ append => "x $object", "e$id" ]);
}

# A transaction that claims the lease, after it was told the label of its predecessor, or writes it otherwise
sub leased
{
	my ($id, $ok, $label, $became, $token, $step, $predecessor) = @_;
	my @told = defined $predecessor ? ([ told => 'lease r', $predecessor, 1 ]) : ();
	return made($id, $ok, @told, [ write => 'lease r', $label, undef, $became, $token, $step ]);
}

for (
	[ 'nothing', '', { 'k x' => 'a,b', 'x once r' => 'ea' },
		sub {
			return (made('A', 1, [ append => 'k x', 'a' ], claimed('once r', 'la', 'ea'), [ append => 'x once r', 'ea' ]),
				made('B', 1, [ read => 'k x', 'a' ], [ append => 'k x', 'b' ], [ told => 'once r', 'la' ], [ read => 'k x', 'a,b' ]));
		} ],
	[ 'dirty writes', 'G0, G1c, G2, G-SI, order', { 'k x' => 'a,b', 'k y' => 'b2,a2' },
		sub { return (made('A', 1, [ append => 'k x', 'a' ], [ append => 'k y', 'a2' ]), made('B', 1, [ append => 'k x', 'b' ], [ append => 'k y', 'b2' ])) } ],
	[ 'a read of what was rolled back', 'G1a', { 'k x' => '' },
		sub { return (made('A', 0, [ append => 'k x', 'a' ]), made('B', 1, [ read => 'k x', 'a' ])) } ],
	[ 'a read of what was rolled back to a savepoint', 'G1a', { 'k x' => '' },
		sub { return (made('A', 1, [ append => 'k x', 'a', 100 ]), made('B', 1, [ read => 'k x', 'a' ])) } ],
	[ 'a write at the end that was rolled back', 'G1a', { 'k x' => 'a' }, sub { return made('A', 0, [ append => 'k x', 'a' ]) } ],
	[ 'a read between two writes', 'G1b, G2, G-SI', { 'k x' => 'a,a2' },
		sub { return (made('A', 1, [ append => 'k x', 'a' ], [ append => 'k x', 'a2' ]), made('B', 1, 2, [ read => 'k x', 'a' ])) } ],
	[ 'circular reads', 'G1c, G2, G-SI, dirty', { 'k x' => 'a', 'k y' => 'b' },
		sub { return (made('A', 1, 0, [ append => 'k x', 'a' ], [ read => 'k y', 'b' ]), made('B', 1, 0, [ append => 'k y', 'b' ], [ read => 'k x', 'a' ])) } ],
	[ 'a lost update', 'G2, G-SI', { 'k x' => 'a,b' },
		sub { return (made('A', 1, 0, [ read => 'k x', '' ], [ append => 'k x', 'a' ]), made('B', 1, 0, [ read => 'k x', '' ], [ append => 'k x', 'b' ])) } ],
	[ 'read skew', 'G2, G-SI', { 'k x' => 'a', 'k y' => 'a2' },
		sub { return (made('A', 1, 0, [ append => 'k x', 'a' ], [ append => 'k y', 'a2' ]), made('B', 1, 0, [ read => 'k x', '' ], 9, [ read => 'k y', 'a2' ])) } ],
	[ 'a long fork', 'G2, G-SI', { 'k x' => 'a', 'k y' => 'b' },
		sub {
			return (made('A', 1, 0, [ append => 'k x', 'a' ]), made('B', 1, 0, [ append => 'k y', 'b' ]),
				made('C', 1, 0, [ read => 'k y', '' ], 9, [ read => 'k x', 'a' ]), made('D', 1, 0, [ read => 'k x', '' ], 9, [ read => 'k y', 'b' ]));
		} ],
	[ 'write skew', 'G2', { 'k x' => 'a', 'k y' => 'b' },
		sub { return (made('A', 1, 0, [ read => 'k y', '' ], [ append => 'k x', 'a' ]), made('B', 1, 0, [ read => 'k x', '' ], [ append => 'k y', 'b' ])) } ],
	[ 'write skew of claims', 'G2', { 'x once r' => 'ea', 'x once q' => 'eb' },
		sub {
			return (made('A', 1, 0, [ told => 'once q', undef ], claimed('once r', 'la', 'ea'), [ append => 'x once r', 'ea' ]),
				made('B', 1, 0, [ told => 'once r', undef ], claimed('once q', 'lb', 'eb'), [ append => 'x once q', 'eb' ]));
		} ],
	[ 'a stale read', 'stale', { 'k x' => 'a' }, sub { return (made('A', 1, [ append => 'k x', 'a' ]), made('B', 1, [ read => 'k x', '' ])) } ],
	[ 'a claim that was forgotten', 'stale', { 'x once r' => 'ea' },
		sub { return (made('A', 1, claimed('once r', 'la', 'ea'), [ append => 'x once r', 'ea' ]), made('B', 1, [ told => 'once r', undef ])) } ],
	[ 'two orders', 'order', { 'k x' => 'a,b' },
		sub { return (made('A', 1, [ append => 'k x', 'a' ]), made('B', 1, [ append => 'k x', 'b' ]), made('C', 1, [ read => 'k x', 'b,a' ])) } ],
	[ 'a lost write', 'lost write', { 'k x' => '' }, sub { return made('A', 1, [ append => 'k x', 'a' ]) } ],
	[ 'a transaction that does not see itself', 'internal', { 'k x' => 'a' },
		sub { return made('A', 1, [ append => 'k x', 'a' ], [ read => 'k x', '' ]) } ],
	[ 'two executions', 'executed twice', { 'x once r' => 'ea,eb' },
		sub { return map { made($_, 1, claimed('once r', "l$_", "e$_"), [ append => 'x once r', "e$_" ]) } 'a', 'b' } ],
	[ 'an executed request that is claimed, and rolled back', 'executed twice', { 'x once r' => 'ea' },
		sub { return (made('A', 1, claimed('once r', 'la', 'ea'), [ append => 'x once r', 'ea' ]), made('B', 0, claimed('once r', 'lb', 'eb'))) } ],
	[ 'two holders at a time', 'held twice', { 'x once r' => 'ea' },
		sub { return (made('A', 1, 0, claimed('once r', 'la', 'ea'), [ append => 'x once r', 'ea' ]), made('B', 0, 1, claimed('once r', 'lb', 'eb'))) } ],
	[ 'a replay of what was rolled back', 'G1a', {}, sub { return (made('A', 0, claimed('once r', 'la', 'ea')), made('B', 1, [ told => 'once r', 'la' ])) } ],
	[ 'a replay without the result', 'G1b', { 'x once r' => 'ea' },
		sub { return (made('A', 1, claimed('once r', 'la', 'ea'), [ append => 'x once r', 'ea' ]), made('B', 1, [ told => 'once r', '' ])) } ],
	[ 'a replay before the commit', 'dirty', { 'x once r' => 'ea' },
		sub { return (made('A', 1, 5, claimed('once r', 'la', 'ea'), [ append => 'x once r', 'ea' ]), made('B', 1, 6, [ told => 'once r', 'la' ])) } ],
	[ 'a successor that is told old progress', 'G2, G-SI, lost progress, stale', {},
		sub {
			return (leased('A', 1, 'p1', 'live', 1, 0), leased('B', 1, 'p2', 'lapsing', 1, 1), leased('C', 1, 'p3', 'live', 2, 0, 'p1'));
		} ],
	[ 'tokens that fall', 'G1c, G2, G-SI, order', {}, sub { return (leased('A', 1, 'p1', 'lapsing', 2, 0), leased('C', 1, 'p2', 'lapsing', 1, 0, 'p1')) } ],
	# What may be claimed again
	[ 'a completed request of a retryable scope that is executed again', 'executed twice', { 'x retry r' => 'eA,eB' },
		sub { return (executed('A', 1, 'retry r', 'completed'), executed('B', 1, 'retry r', 'completed')) } ],
	[ 'the same, after a failure', 'executed twice', { 'x retry r' => 'eA,eB,eC' },
		sub { return (executed('A', 1, 'retry r', 'retryable'), executed('B', 1, 'retry r', 'completed'), executed('C', 1, 'retry r', 'retryable')) } ],
	[ 'the same, rolled back', 'executed twice', { 'x retry r' => 'eA' },
		sub { return (executed('A', 1, 'retry r', 'completed'), executed('B', 0, 'retry r', 'completed')) } ],
	[ 'the same within a transaction', 'executed twice', { 'x retry r' => 'ea,eb' },
		sub {
			return made('A', 1, claimed('retry r', 'la', 'ea'), [ append => 'x retry r', 'ea' ], claimed('retry r', 'lb', 'eb'), [ append => 'x retry r', 'eb' ]);
		} ],
	[ 'the same within a transaction that rolled back', 'executed twice', {},
		sub { return made('A', 0, claimed('retry r', 'la', 'ea'), [ append => 'x retry r', 'ea' ], claimed('retry r', 'lb', 'eb')) } ],
	[ 'the same after a savepoint, to which the first was rolled back', '', { 'x retry r' => 'eb' },
		sub {
			return made('A', 1, [ claimed => 'retry r', 'la', 1.75, 'completed', 'ea' ], [ append => 'x retry r', 'ea', 1.75 ],
				claimed('retry r', 'lb', 'eb'), [ append => 'x retry r', 'eb' ]);
		} ],
	[ 'a retryable failure that is claimed again', '', { 'x retry r' => 'eA,eC' },
		sub {
			return (executed('A', 1, 'retry r', 'retryable'), executed('B', 0, 'retry r', 'completed'), executed('C', 1, 'retry r', 'completed'),
				made('D', 1, [ told => 'retry r', 'lC' ]));
		} ],
	[ 'a terminal failure that is claimed again', 'executed twice', { 'x once r' => 'eA,eB' },
		sub { return (executed('A', 1, 'once r', 'failed'), executed('B', 1, 'once r', 'completed')) } ],
	[ 'the same, rolled back', 'executed twice', { 'x once r' => 'eA' },
		sub { return (executed('A', 1, 'once r', 'failed'), executed('B', 0, 'once r', 'completed')) } ],
	[ 'a completed lease that is claimed again', 'executed twice', {},
		sub {
			return (leased('A', 1, 'p1', 'lapsing', 1, 0), leased('B', 1, 'p2', 'completed', 1, 1), leased('C', 1, 'p3', 'lapsing', 2, 0),
				leased('D', 1, 'p4', 'completed', 2, 1));
		} ],
	[ 'the same, rolled back', 'executed twice', {},
		sub { return (leased('A', 1, 'p1', 'lapsing', 1, 0), leased('B', 1, 'p2', 'completed', 1, 1), leased('C', 0, 'p3', 'lapsing', 2, 0)) } ],
	[ 'a lease that failed for good and is claimed again', 'executed twice', {},
		sub { return (leased('A', 1, 'p1', 'lapsing', 1, 0), leased('B', 1, 'p2', 'failed', 1, 1), leased('C', 1, 'p3', 'lapsing', 2, 0)) } ],
	[ 'a lease with a retryable failure that is claimed again', '', {},
		sub {
			return (leased('A', 1, 'p1', 'live', 1, 0), leased('B', 1, 'p2', 'retryable', 1, 1), leased('C', 1, 'p3', 'live', 2, 0, 'p1'),
				leased('D', 1, 'p4', 'completed', 2, 1));
		} ],
	[ 'a completed lease that is extended', 'executed twice', {},
		sub { return (leased('A', 1, 'p1', 'live', 1, 0), leased('B', 1, 'p2', 'completed', 1, 1), leased('C', 1, 'p3', 'lapsing', 1, 2)) } ],
	[ 'a completed lease that is released', 'executed twice', {},
		sub { return (leased('A', 1, 'p1', 'live', 1, 0), leased('B', 1, 'p2', 'completed', 1, 1), leased('C', 1, 'p3', 'released', 1, 2)) } ],
	[ 'a released lease that is claimed again', '', {},
		sub {
			return (leased('A', 1, 'p1', 'live', 1, 0), leased('B', 1, 'p2', 'released', 1, 1), leased('C', 1, 'p3', 'live', 2, 0),
				leased('D', 1, 'p4', 'failed', 2, 1));
		} ],
	[ 'a live lease that is released and claimed again by a transaction that rolled back', '', {},
		sub {
			return (leased('A', 1, 'p1', 'live', 1, 0),
				made('B', 0, [ write => 'lease r', 'p2', undef, 'released', 1, 1 ], [ write => 'lease r', 'p3', undef, 'live', 2, 0 ]));
		} ],
	[ 'a live lease that is released and looked up by a transaction that rolled back', '', {},
		sub { return (leased('A', 1, 'p1', 'live', 1, 0), made('B', 0, [ write => 'lease r', 'p2', undef, 'released', 1, 1 ], [ told => 'lease r', undef ])) } ],
	[ 'a lapsed lease that is taken over', '', {},
		sub {
			return (leased('A', 1, 'p1', 'lapsing', 1, 0), leased('B', 0, 'p2', 'lapsing', 2, 0, 'p1'), leased('C', 1, 'p3', 'lapsing', 3, 0, 'p1'),
				leased('D', 1, 'p4', 'completed', 3, 1));
		} ],
	[ 'a lapsed lease that its holder fails after a successor has rolled back', '', {},
		sub {
			return (leased('A', 1, 'p1', 'lapsing', 1, 0), leased('B', 0, 'p2', 'lapsing', 2, 0, 'p1'), leased('C', 1, 'p3', 'retryable', 1, 1),
				leased('D', 1, 'p4', 'lapsing', 3, 0, 'p1'));
		} ],
	[ 'a lapsed lease that its holder completes', '', {}, sub { return (leased('A', 1, 'p1', 'lapsing', 1, 0), leased('B', 1, 'p2', 'completed', 1, 1)) } ],
	[ 'a live lease that is taken over', 'held twice', {}, sub { return (leased('A', 1, 'p1', 'live', 1, 0), leased('B', 1, 'p2', 'live', 2, 0, 'p1')) } ],
	[ 'the same, rolled back', 'held twice', {}, sub { return (leased('A', 1, 'p1', 'live', 1, 0), leased('B', 0, 'p2', 'live', 2, 0, 'p1')) } ],
	[ 'a lease that is extended after it was taken over', 'order', {},
		sub { return (leased('A', 1, 'p1', 'lapsing', 1, 0), leased('B', 1, 'p2', 'live', 2, 0), leased('C', 1, 'p3', 'lapsing', 1, 1)) } ],
	[ 'a lease that is settled by two tokens', 'executed twice, order', {},
		sub {
			return (leased('A', 1, 'p1', 'lapsing', 1, 0), leased('B', 1, 'p2', 'live', 2, 0), leased('C', 1, 'p3', 'completed', 1, 1),
				leased('D', 1, 'p4', 'completed', 2, 1));
		} ],
	[ 'a lease that two transactions claim at a time', 'held twice', {},
		sub { return (made('A', 0, 0, [ write => 'lease r', 'p1', undef, 'live', 1, 0 ], [ read => 'k x', '' ]), made('B', 1, 1, [ write => 'lease r', 'p2', undef, 'live', 2, 0 ])) } ])
{
	my ($name, $expected, $final, $make) = @$_;

	$clock = 0;
	is(found_in($final, $make->()), join(', ', sort split /, /, $expected), "the checker: $name");
}

# ----- the clients -----

my $folder = PostgreSQL::Test::Utils::tempdir();
my @scopes = ('once', 'retry', 'lease', 'lease_retry');

# How the scopes call a request that failed, see History.pm
my %failure = (once => 'failed', retry => 'retryable', lease => 'failed', lease_retry => 'retryable');

# Lists and requests are used for so many calls, so that all clients meet at few of them.
my $list_calls = 20;
my $request_calls = 5;

sub quoted
{
	return join ', ', map { defined $_ ? "'$_'" : 'NULL' } @_;
}

# How a claim waits: not at all, for a moment, as idem.wait says, which can be any of these
sub draw_wait
{
	my $how = rand;
	return $how < 0.35 ? ", wait => '0'" : $how < 0.5 ? ", wait => '20 ms'" : $how < 0.55 ? ', wait => NULL' : $how < 0.65 ? ", wait => '1 min'" : '';
}

# What a transaction is to do: the same from the same seed, whatever it is answered
sub draw_plan
{
	my ($self) = @_;
	my $window = int($self->{called} / $request_calls);
	my $request = sub { 'r' . ($window - (rand() < 0.1 ? 1 : 0)) . '-' . int rand($_[0]) };
	my $list = sub { 'k ' . int($self->{called} / $list_calls) . '-' . int rand 3 };
	my @plan;

	for (0 .. int rand 4)
	{
		my $what = rand;
		push @plan,
			$what < 0.22 ? [ append => $list->() ]
		  : $what < 0.32 ? [ read => $list->() ]
		  : $what < 0.45 ? [ read => $list->(), $list->() ]
		  : $what < 0.62 ? [ try => rand() < 0.6 ? 'once' : 'retry', $request->(3), draw_wait(), rand() ]
		  : $what < 0.68 ? [ claim => 'once', $request->(3), draw_wait(), rand() ]
		  : $what < 0.72 ? [ many => 'once', [ map { $request->(5) } 1 .. 4 ], draw_wait(), rand() ]
		  : $what < 0.84 ? [ look => $scopes[ rand 4 ], $request->(3) ]
		  : $what < 0.93 ? [ lease => rand() < 0.6 ? 'lease' : 'lease_retry', $request->(2), ('', ", wait => '0'", ", wait => '30 ms'", ', wait => NULL')[ rand 4 ], rand() < 0.5 ? '1 d' : '20 ms' ]
		  : [ 'holder', rand ];
	}
	push @plan, [ holder => rand ] if rand() < 0.25;
	push @plan, ['again'] if rand() < 0.25;
	unshift @plan, [ 'savepoint' ] if rand() < 0.1;
	my $wait = rand() < 0.2 ? (0, '30ms', '1min', -1)[ rand 4 ] : undef;
	# The holder of a lease may wait for us, in vain.
	$wait = (0, '10ms', '30ms')[ rand 3 ] if grep { $_->[0] =~ /^(?:lease|holder|again)$/ } @plan;
	return { ops => \@plan, wait => $wait, ending => rand, pause => rand() < 0.4 ? rand 0.002 : 0 };
}

# One statement or several, as one message; true unless the server raised an error
sub ask
{
	my ($self, $sql) = @_;
	my $session = $self->{session};

	$session->send(join '', @{ $self->{before} }, $sql);
	$self->{before} = [];
	$self->{sent} = clock_gettime(CLOCK_MONOTONIC);
	$session->flush;
	$session->read while $session->{pending};
	$self->{received} = clock_gettime(CLOCK_MONOTONIC);
	$self->{transaction}{began} //= $self->{sent} if $self->{level} ne 'READ COMMITTED';
	my $reply = shift @{ $session->{replies} };
	$self->{state} = $reply->{error} ? $reply->{error}{C} : '';
	$self->{message} = $reply->{error} ? $reply->{error}{M} : '';
	# Whoever gets an error has lost what he held already when the statement was at work.
	$self->{failed} = $self->{sent} if $reply->{error};
	$self->{rows} = $reply->{rows};
	return !$reply->{error};
}

sub remember
{
	my ($self, $kind, $object, $value, @rest) = @_;
	my $op = [ $kind, $object, $value, $self->{sent}, $self->{received}, @rest ];

	push @{ $self->{transaction}{ops} }, $op;
	return $op;
}

sub new_label
{
	my ($self) = @_;
	return "$self->{transaction}{id}." . ++$self->{labels};
}

sub appending
{
	my ($list, $element) = @_;
	return "INSERT INTO lists VALUES ('$list', '$element') ON CONFLICT (list) DO UPDATE SET elements = lists.elements || ',' || EXCLUDED.elements";
}

# Work of the request that was claimed just now: one more execution of it, and its result
sub execute
{
	my ($self, $scope, $request, $how) = @_;
	my $object = "$scope $request";
	my $label = $how < 0.15 ? '' : $self->new_label;
	my $element = $self->new_label;
	my $is_control = $self->{variant} eq 'control';
	my $fails = !$is_control && $label ne '' && $how < ($scope eq 'retry' ? 0.7 : 0.25);
	my $store = $label eq '' ? '' : $is_control ? "UPDATE requests SET result = '$label' WHERE request = '$object'"
	  : 'SELECT idem_' . ($fails ? 'fail' : 'complete') . "('u', '$request', '\"$label\"', scope => '$scope')";

	$self->remember(claimed => $object, $label, undef, $fails ? $failure{$scope} : 'completed', $element);
	$self->ask(join '; ', grep { length } $store, appending("x $object", $element)) or return 0;
	$self->remember(append => "x $object", $element);
	return 1;
}

# In SERIALIZABLE the answer that another transaction holds a request is a read, too: the row was not there.
# (A request that is retried has one.)
sub remember_answer
{
	my ($self, $outcome, $object, $result) = @_;

	if ($outcome =~ /^(?:completed|failed)$/)
	{
		$self->remember(told => $object, $result // '');
	}
	elsif ($self->{level} eq 'SERIALIZABLE' && $object =~ /^once/)
	{
		$self->remember(told => $object, undef);
	}
	return;
}

sub claim_lease
{
	my ($self, $scope, $request, $wait, $lease) = @_;
	my $label = $self->new_label;
	$self->ask("SELECT outcome, result #>> '{}', progress #>> '{}', token FROM idem_lease('u', '$request', scope => '$scope'$wait, lease => '$lease', progress => '\"$label\"')")
	  or return 0;
	my ($outcome, $result, $progress, $token) = @{ $self->{rows}[0] };
	$self->{answers}{"lease $outcome"}++;
	my $told = $outcome =~ /^(?:completed|failed)$/ ? $result : $progress;
	$self->remember(told => "$scope $request", $told, $outcome eq 'claimed' ? 1 : ()) if defined $told;
	return 1 if $outcome ne 'claimed';
	$self->remember(write => "$scope $request", $label, undef, $lease eq '1 d' ? 'live' : 'lapsing', $token, 0);
	if (defined $told)
	{
		# The row has the progress of the holder before, until this one records its own.
		$self->{answers}{'taken over'}++;
		$self->ask("SELECT idem_extend('u', '$request', $token, '$lease', '\"$label\"', scope => '$scope')") or return 0;
	}
	push @{ $self->{new_leases} }, { scope => $scope, request => $request, token => $token, step => 0 };
	return 1;
}

my %do = (
	append => sub {
		my ($self, $list) = @_;
		my $element = $self->new_label;
		$self->ask(appending($list, $element)) or return 0;
		$self->remember(append => $list, $element);
		return 1;
	},
	read => sub {
		my ($self, @lists) = @_;
		$self->ask('SELECT list, elements FROM lists WHERE list IN (' . quoted(@lists) . ')') or return 0;
		my %elements = map { @$_ } @{ $self->{rows} };
		$self->remember(read => $_, $elements{$_} // '') for @lists;
		return 1;
	},
	try => sub {
		my ($self, $scope, $request, $wait, $how) = @_;
		$self->ask("SELECT outcome, result #>> '{}' FROM idem_try_claim('u', '$request', '$scope'$wait)") or return 0;
		my ($outcome, $result) = @{ $self->{rows}[0] };
		$self->{answers}{$outcome}++;
		return $self->execute($scope, $request, $how) if $outcome eq 'claimed';
		$self->remember_answer($outcome, "$scope $request", $result);
		return 1;
	},
	claim => sub {
		my ($self, $scope, $request, $wait, $how) = @_;
		$self->ask("SELECT idem_claim('u', '$request', '$scope'$wait)") or return 0;
		return $self->execute($scope, $request, $how) if $self->{rows}[0][0] eq 't';
		my @times = @$self{qw(sent received)};
		$self->ask("SELECT idem_result() #>> '{}'") or return 0;
		@$self{qw(sent received)} = @times;
		$self->{answers}{completed}++;
		$self->remember(told => "$scope $request", $self->{rows}[0][0] // '');
		return 1;
	},
	many => sub {
		my ($self, $scope, $requests, $wait, $how) = @_;
		my $users = join ', ', map { "'u'" } @$requests;
		$self->ask("SELECT ordinal, outcome, result #>> '{}' FROM idem_claim_many(ARRAY[$users], ARRAY[" . quoted(@$requests) . "], '$scope'$wait)") or return 0;
		my (@mine, %is_mine);
		my @times = @$self{qw(sent received)};
		for my $row (@{ $self->{rows} })
		{
			my ($ordinal, $outcome, $result) = @$row;
			my $request = $requests->[ $ordinal - 1 ];
			$self->{answers}{$outcome}++;
			if ($outcome eq 'claimed')
			{
				push @mine, $request;
				$is_mine{$request} = 1;
			}
			# A repeat in the array is answered by the claim before it.
			elsif (!$is_mine{$request})
			{
				$self->remember_answer($outcome, "$scope $request", $result);
			}
		}
		for my $request (@mine)
		{
			@$self{qw(sent received)} = @times;
			$self->execute($scope, $request, $how) or return 0;
		}
		return 1;
	},
	look => sub {
		my ($self, $scope, $request) = @_;
		my $key = "'u', '$request', '$scope'";
		# In one query, and so from one snapshot
		$self->ask($scope =~ /^lease/ || $self->{labels} % 2 ? "SELECT state, coalesce(result, progress) #>> '{}' FROM idem_lookup($key)"
			: "SELECT idem_status($key), idem_result($key) #>> '{}'") or return 0;
		my ($status, $label) = @{ $self->{rows}[0] // [] };
		$self->remember(told => "$scope $request", defined $status ? $label // '' : undef);
		return 1;
	},
	lease => \&claim_lease,
	# The holder of a lease renews, settles or releases it.
	holder => sub {
		my ($self, $how) = @_;
		my $held = shift @{ $self->{leases} } or return 1;
		my ($scope, $request, $token) = @$held{qw(scope request token)};
		my $label = $self->new_label;
		my $step = ++$held->{step};
		my $fails = $how < ($scope eq 'lease' ? 0.65 : 0.75);
		my ($answer, $became, $sql) =
			$how < 0.4 ? ('extended', 'lapsing', "idem_extend('u', '$request', $token, '20 ms', '\"$label\"', scope => '$scope')")
		  : $how < 0.5 ? ('fenced', undef, "idem_fence('u', '$request', $token, '$scope')")
		  : $how < 0.85 && $fails ? ('failed', $failure{$scope}, "idem_fail('u', '$request', '\"$label\"', $token, scope => '$scope')")
		  : $how < 0.85 ? ('settled', 'completed', "idem_complete('u', '$request', '\"$label\"', $token, scope => '$scope')")
		  : ('released', 'released', "idem_release('u', '$request', $token, '$scope')");
		$self->ask("SELECT $sql") or return 0;
		$self->{answers}{"lease $answer"}++;
		push @{ $self->{ $how < 0.5 ? 'new_leases' : 'new_settled' } }, $held;
		# Nothing to release: a successor has released the request, too.
		return 1 if !defined $became || $self->{rows}[0][0] eq 'f';
		$self->remember(write => "$scope $request", $label, undef, $became, $token, $step);
		return 1;
	},
	# The client did not hear that its commit succeeded, and claims again what it has settled or released.
	again => sub {
		my ($self) = @_;
		my $settled = shift @{ $self->{settled} } or return 1;
		return $self->claim_lease($settled->{scope}, $settled->{request}, '', '20 ms');
	},
	savepoint => sub { my ($self) = @_; return $self->ask('SAVEPOINT a') });

# The same without idem, as control
my %do_by_hand = (
	%do,
	try => sub {
		my ($self, $scope, $request, undef, $how) = @_;
		my $object = "$scope $request";
		$self->ask("INSERT INTO requests VALUES ('$object') ON CONFLICT DO NOTHING RETURNING 1") or return 0;
		return $self->execute($scope, $request, $how) if @{ $self->{rows} };
		$self->ask("SELECT result FROM requests WHERE request = '$object'") or return 0;
		$self->{answers}{completed}++;
		$self->remember(told => $object, @{ $self->{rows} } ? $self->{rows}[0][0] // '' : undef);
		return 1;
	},
	look => sub {
		my ($self, $scope, $request) = @_;
		$self->ask("SELECT coalesce(result, '') FROM requests WHERE request = '$scope $request'") or return 0;
		$self->remember(told => "$scope $request", $self->{rows}[0] ? $self->{rows}[0][0] : undef);
		return 1;
	},
	lease => sub { return 1 },
	holder => sub { return 1 },
	again => sub { return 1 });
$do_by_hand{claim} = $do_by_hand{try};
$do_by_hand{many} = sub {
	my ($self, $scope, $requests, undef, $how) = @_;
	for my $request (sort @$requests) { $do_by_hand{try}->($self, $scope, $request, undef, $how) or return 0 }
	return 1;
};

# What a transaction may be answered: conflicts, deadlocks; a request in flight, still held or failed;
# a lost lease
my $may_fail = qr/^(?:40001|40P01|ID409|ID503|ID417|ID410)$/;

# One try. Returns true if there is nothing to send again
sub run_plan
{
	my ($self, $plan) = @_;
	my $transaction = $self->{transaction} = { id => $self->{number} . '-' . $self->{tries}++, ops => [] };
	my $do = $self->{variant} eq 'control' ? \%do_by_hand : \%do;
	my $ok = 1;
	my $savepoint;
	my $at = 0;

	@$self{qw(labels state new_leases new_settled failed)} = (0, '', [], [], undef);
	$self->{before} = ["BEGIN ISOLATION LEVEL $self->{level}; "];
	push @{ $self->{before} }, "SET LOCAL idem.wait = '$plan->{wait}'; " if defined $plan->{wait} && $self->{variant} ne 'control';
	for my $step (@{ $plan->{ops} })
	{
		my ($name, @arguments) = @$step;
		$ok = $do->{$name}->($self, @arguments);
		last if !$ok;
		sleep $plan->{pause} if $plan->{pause};
		if ($name eq 'savepoint') { $savepoint = 1 }
		# After two steps the transaction changes its mind about them.
		elsif ($savepoint && ++$at == 2)
		{
			$ok = $self->ask('ROLLBACK TO a');
			$_->[5] //= $self->{sent} for grep { $_->[0] =~ /^(?:append|claimed|write)$/ } @{ $transaction->{ops} };
			@$self{qw(new_leases new_settled)} = ([], []);
			$savepoint = 0;
		}
	}
	if ($ok && !@{ $self->{before} } && $plan->{ending} > 0.08)
	{
		$ok = $self->ask('COMMIT');
		$transaction->{ok} = $ok ? 1 : 0;
	}
	@$transaction{qw(ending ended)} = ($self->{failed} // $self->{sent}, $self->{received});
	if (!$transaction->{ok} && !@{ $self->{before} })
	{
		my ($state, $message) = @$self{qw(state message)};
		$self->{answers}{ $state eq '' ? 'rolled back' : $state }++;
		$self->{answers}{"unexpected $state $message"}++ if $state ne '' && $state !~ $may_fail;
		$self->ask('ROLLBACK');
		$transaction->{ending} = $self->{sent} if $state eq '';
	}
	$self->{answers}{committed}++ if $transaction->{ok};
	# A lease that was rolled back is held as before, or lost; its holder has no use for it.
	if ($transaction->{ok})
	{
		push @{ $self->{$_} }, @{ $self->{"new_$_"} } for 'leases', 'settled';
	}
	$self->write_down($transaction) if @{ $transaction->{ops} };
	return $ok;
}

sub write_down
{
	my ($self, $transaction) = @_;
	my $file = $self->{file};

	print $file join("\t", $transaction->{id}, $transaction->{ok} // 0, map { $_ // '~' } @$transaction{qw(began ending ended)},
		map { join '|', map { $_ // '~' } @$_ } @{ $transaction->{ops} }), "\n";
	return;
}

sub run_client
{
	my ($number, $calls, %run) = @_;
	my $self = bless { %run, number => $number, called => 0, tries => 0, leases => [], settled => [], answers => {} }, 'main';
	my ($database) = $run{variant} eq 'portable' ? 'portable' : 'c';

	srand(seed() * 1000 + $number + $run{segment} * 131);
	open $self->{file}, '>', "$folder/$run{level}.$run{variant}.$number" or die $!;
	$self->{session} = Session->new($database, application_name => 'histories');
	while ($self->{called}++ < $calls)
	{
		my $plan = $self->draw_plan;
		# The same requests again, as a client that got an error or no answer
		for (1 .. 3) { last if $self->run_plan($plan) && rand() > 0.1 }
	}
	print { $self->{file} } join("\t", 'answers', map { "$_=$self->{answers}{$_}" } sort keys %{ $self->{answers} }), "\n";
	close $self->{file} or die $!;
	return;
}

# ----- a run -----

my $node = make_node('main', q{
shared_preload_libraries = 'idem'
fsync = off
deadlock_timeout = '10ms'
log_error_verbosity = verbose
log_min_error_statement = panic
log_min_messages = warning
enable_seqscan = off
jit = off
statement_timeout = '60s'
max_pred_locks_per_transaction = 256
autovacuum_naptime = '2s'
});
$node->start;
make_databases($node);
$node->safe_psql($_, q{
	CREATE TABLE lists (list text PRIMARY KEY, elements text NOT NULL);
	CREATE TABLE requests (request text PRIMARY KEY, result text);
	ALTER TABLE lists SET (fillfactor = 50);
	INSERT INTO idem_scopes (scope, ttl, failed) VALUES ('once', '1 day', 'terminal'), ('retry', '1 day', 'retryable'), ('lease', '1 day', 'terminal'),
		('lease_retry', '1 day', 'retryable')})
  for 'c', 'portable';
local %ENV = (%ENV, PGHOST => $node->host, PGPORT => $node->port);

my $clients = 8;

# Returns the history
sub run_clients
{
	my ($calls, %run) = @_;
	my $database = $run{variant} eq 'portable' ? 'portable' : 'c';
	my $history = History->new;
	my (@pids, %answers);

	$node->safe_psql($database, 'TRUNCATE lists, requests, idem_claims');
	for my $number (1 .. $clients)
	{
		my $pid = fork // die "fork: $!";
		if ($pid == 0)
		{
			my $is_done = eval { run_client($number, $calls, %run); 1 } or print STDERR "# a client died: $@";
			POSIX::_exit($is_done ? 0 : 1);
		}
		push @pids, $pid;
	}
	for my $pid (@pids)
	{
		waitpid $pid, 0;
		fail("$run{level}, $run{variant}: a client died") if $?;
	}
	for my $number (1 .. $clients)
	{
		for my $line (split /\n/, slurp_file("$folder/$run{level}.$run{variant}.$number"))
		{
			my ($id, @rest) = split /\t/, $line;
			if ($id eq 'answers')
			{
				for (@rest) { my ($answer, $count) = /(.*)=(\d+)$/; $answers{$answer} += $count }
				next;
			}
			my ($ok, $began, $ending, $ended, @ops) = @rest;
			$history->add({ id => $id, ok => $ok, began => $began eq '~' ? undef : $began, ending => $ending, ended => $ended,
				ops => [ map { [ map { $_ eq '~' ? undef : $_ } split /\|/, $_, -1 ] } @ops ] });
		}
	}
	for my $row (split /\n/, $node->safe_psql($database, 'SELECT list, elements FROM lists'))
	{
		$history->finally(split /\|/, $row);
	}
	return ($history, \%answers);
}

my @variants = ('c', 'portable', 'control');
my %sum;
my %found;
my $transactions = quick_or_full(500, 500_000);
my $segment_transactions = $transactions < 6000 ? $transactions : 6000;
my $segments = int($transactions / $segment_transactions + 0.999);

for my $segment (1 .. $segments)
{
	for my $level (@levels)
	{
		# The control has a quarter of the transactions.
		for my $variant ('c', 'portable', $segment % 4 == 1 ? ('control') : ())
		{
			my $started = clock_gettime(CLOCK_MONOTONIC);
			my ($history, $answers) = run_clients(int($segment_transactions / $clients / 1.4), level => $level, variant => $variant, segment => $segment);
			my $run = "$level, $variant";
			my $checking = clock_gettime(CLOCK_MONOTONIC);
			my $anomalies = $history->check;
			note sprintf '%s, %s, segment %d: %d tries in %.1f s, checked in %.1f s', $level, $variant, $segment,
			  scalar @{ $history->{transactions} }, $checking - $started, clock_gettime(CLOCK_MONOTONIC) - $checking;
			my %is_forbidden = map { $_ => 1 } History::forbidden($level);

			$sum{$run}{$_} += $answers->{$_} for keys %$answers;
			$found{$run}{$_} += @{ $anomalies->{$_} } for keys %$anomalies;
			for my $anomaly (grep { $is_forbidden{$_} } sort keys %$anomalies)
			{
				fail("$run, segment $segment: never $anomaly");
				diag join "\n", grep { defined } @{ $anomalies->{$anomaly} }[ 0 .. 4 ];
			}
			for my $answer (grep { /^unexpected/ } sort keys %$answers)
			{
				fail("$run, segment $segment: $answer");
			}
		}
	}
}

for my $level (@levels)
{
	for my $variant (@variants)
	{
		my $run = "$level, $variant";
		my @forbidden = History::forbidden($level);
		my %stricter = map { $_ => 1 } 'G-SI', 'G2', 'G2 of claims alone';

		delete @stricter{@forbidden};
		is(join(', ', grep { $found{$run}{$_} } @forbidden), '', "$run: no anomaly that the level forbids");
		my $answers = $sum{$run};
		my @all = map { "$_ $answers->{$_}" } sort { $answers->{$b} <=> $answers->{$a} } keys %$answers;
		note "$run: ", join ', ', @all;
		figure($run, join ', ', (grep { defined } @all[ 0 .. 7 ]), map { "components with $_ " . ($found{$run}{$_} // 0) } sort keys %stricter);
		cmp_ok($answers->{committed}, '>', $transactions / ($variant eq 'control' ? 16 : 4), "$run: transactions were committed");
	}
}
# The checker sees the anomalies that a weaker level allows.
for (['READ COMMITTED', 'G-SI'], ['REPEATABLE READ', 'G2'])
{
	my ($level, $anomaly) = @$_;
	my $seen = 0;
	$seen += $found{"$level, $_"}{$anomaly} // 0 for @variants;
	cmp_ok($seen, '>', 0, "$level has $anomaly, as any server has, and the checker sees it");
}
is(faults_in($node), '', 'the log of the server has no fault');
$node->stop;
done_testing();
