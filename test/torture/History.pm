# Looks for anomalies in a history of transactions, in the manner of Adya and of Elle.
#
#	my $history = History->new;
#	$history->add({ id => 'a', ok => 1, ops => [ [ append => 'x', 'a1', $sent, $received ], ... ],
#		began => $t0, ending => $t1, ended => $t2 });
#	$history->finally(x => 'a1,b1');         # the list x after all transactions
#	my $found = $history->check;             # {anomaly => [descriptions]}
#
# A. Adya: Weak Consistency, PhD thesis, MIT 1999. K. Kingsbury, P. Alvaro: Elle, VLDB 2020.
# A. Cerone, A. Gotsman: Analysing Snapshot Isolation, PODC 2016.
#
# Objects are lists, to which transactions append elements that are used once, and claims. So a read
# tells whose version it has seen; the list at the end tells the order of all versions.
#
# A claim is an object too. Each execution of a request is a version of its claim, which the
# transaction of the execution writes; whoever is answered with its result has read that version. The
# order of the versions is that of the list "x CLAIM", to which each execution appends. The versions of
# a lease (claimed, extended, settled) are ordered by token and step. A release ends the object: the next
# claim of that request inserts another row.
#
# ops, in the order of a transaction, times in seconds of one clock:
#	[append => list, element, sent, received, undone]
#	[read => list, 'element,element', sent, received]
#	[claimed => claim, label or '' for a marker, sent, received, undone, became, element of "x CLAIM"]
#	[write => lease, label, sent, received, undone, became, token, step]; step 0 is the claim
#	[told => claim, label; '' for a marker; undef for "not there", sent, received, is_successor]
# undone: when the transaction rolled back to a savepoint before this op; undef: it did not.
#
# became: what the row is from that version on, and so whether the request may be claimed again. Nothing
# is forgotten in a history, and nothing expires.
#	completed	never again
#	failed		never again: the scope's failures are terminal
#	retryable	failed; the next claim executes the request again, and is told the progress
#	live		under a lease that ends after the history
#	lapsing		under a lease that can end at any time
#	released	the next claim executes the request
#
# Dependencies of committed transactions: ww, the next version; wr, a version and its reader; rw,
# a reader and the writer of the next version. Anomalies:
#	G0               a cycle of ww
#	G1a              a read of what was rolled back
#	G1b              a read of a version that its own transaction replaced
#	G1c              a cycle of ww and wr
#	G-SI             a cycle in which no two rw follow each other: with exactly one it is a lost update or a
#	                 read skew
#	G2               any cycle
#	dirty            a read of what its writer had not yet asked to commit
#	stale            a read that misses what was committed before it began
#	order            reads of one list that contradict each other; a version written after a later one was
#	                 committed
#	lost write       a committed element is missing at the end
#	internal         a transaction does not see its own writes
#	executed twice   a request was claimed, or written otherwise, after it had ended for good
#	held twice       two transactions were told at the same time that a request is theirs; a live lease was
#	                 taken over
#	lost progress    the successor of a holder was not told what the holder recorded last

package History;

use strict;
use warnings;

my @always = ('G0', 'G1a', 'G1b', 'G1c', 'dirty', 'stale', 'order', 'lost write', 'internal', 'executed twice', 'held twice',
	'lost progress');

my %forbidden = (
	'READ COMMITTED' => [@always],
	'REPEATABLE READ' => [ @always, 'G-SI' ],
	'SERIALIZABLE' => [ @always, 'G-SI', 'G2' ]);

sub new
{
	my ($class) = @_;

	return bless { transactions => [], final => {} }, $class;
}

sub add
{
	my ($self, $transaction) = @_;

	push @{ $self->{transactions} }, $transaction;
	return;
}

sub finally
{
	my ($self, $list, $elements) = @_;

	$self->{final}{$list} = $elements;
	return;
}

sub forbidden
{
	my ($level) = @_;

	return @{ $forbidden{$level} };
}

sub found
{
	my ($self, $anomaly, $text) = @_;

	push @{ $self->{found}{$anomaly} }, $text;
	return;
}

# Who wrote which version, and where it is in the order of its object's versions. Fills
#	written{object}{label}   [transaction, op]
#	versions{object}         [[label, transaction, op], ...], of committed transactions
#	place{object}{label}     index in it
sub index_versions
{
	my ($self) = @_;
	my (%written, %versions, %place, %ordered);

	for my $transaction (@{ $self->{transactions} })
	{
		for my $op (@{ $transaction->{ops} })
		{
			my ($kind, $object, $label) = @$op;
			my $is_claim = $kind eq 'claimed';

			next if $kind ne 'append' && $kind ne 'write' && !$is_claim;
			# There is one marker at most.
			push @{ $self->{markers}{$object} }, $transaction if $is_claim && $label eq '' && !$op->[5] && $transaction->{ok};
			$label = "marker of $transaction->{id}" if $is_claim && $label eq '';
			$written{$object}{$label} = [ $transaction, $op ];
			push @{ $ordered{$object} }, [ $label, $transaction, $op ] if $kind ne 'append' && $transaction->{ok} && !$op->[5];
		}
	}
	for my $list (keys %{ $self->{final} })
	{
		for my $element (split /,/, $self->{final}{$list})
		{
			my $writer = $written{$list}{$element};

			if (!is_committed($writer))
			{
				$self->found(G1a => "$list at the end has $element, which nobody committed");
				next;
			}
			$self->found(order => "$list at the end has $element twice") if defined $place{$list}{$element};
			push @{ $versions{$list} }, [ $element, @$writer ];
			$place{$list}{$element} = $#{ $versions{$list} };
		}
	}
	for my $list (grep { !$ordered{$_} } keys %written)
	{
		for my $element (keys %{ $written{$list} })
		{
			my $writer = $written{$list}{$element};

			$self->found('lost write' => "$element of $writer->[0]{id} is missing in $list")
			  if is_committed($writer) && !defined $place{$list}{$element};
		}
	}
	for my $object (keys %ordered)
	{
		my @versions = @{ $ordered{$object} };

		if ($versions[0][2][0] eq 'write')
		{
			@versions = sort { $a->[2][7] <=> $b->[2][7] || $a->[2][8] <=> $b->[2][8] } @versions;
		}
		else
		{
			my $rank = $place{"x $object"} // {};
			@versions = sort { ($rank->{ $a->[2][7] } // 1e9) <=> ($rank->{ $b->[2][7] } // 1e9) } @versions;
		}
		$versions{$object} = \@versions;
		$place{$object}{ $versions[$_][0] } = $_ for 0 .. $#versions;
	}
	@$self{qw(written versions place)} = (\%written, \%versions, \%place);
	return;
}

# writer: an element of "written", or undef
sub is_committed
{
	my ($writer) = @_;

	return $writer && $writer->[0]{ok} && !$writer->[1][5];
}

# What the row became by this op; '' for an append
sub became
{
	my ($op) = @_;

	return $op->[6] // '';
}

sub has_ended
{
	my ($op) = @_;

	return became($op) =~ /^(?:completed|failed)$/;
}

# The released row is another object than the next version.
sub is_released
{
	my ($version) = @_;

	return became($version->[2]) eq 'released';
}

# The transaction's own latest op that wrote the claim or lease before this time, and was not undone
sub latest_own
{
	my ($transaction, $object, $sent) = @_;
	my @own = grep { $_->[0] =~ /^(?:claimed|write)$/ && $_->[1] eq $object && $_->[3] < $sent && !($_->[5] && $_->[5] < $sent) }
	  @{ $transaction->{ops} };

	return $own[-1];
}

# A claim: of a transaction, or with a lease
sub is_claim
{
	my ($op) = @_;

	return $op->[0] eq 'claimed' || ($op->[0] eq 'write' && $op->[8] == 0);
}

sub edge
{
	my ($self, $type, $from, $to, $object) = @_;

	return if $from == $to;
	push @{ $self->{edges}{$type}[ $from->{number} ] }, $to->{number};
	$self->{why}{"$from->{number} $to->{number}"} //= "$type of $object";
	push @{ $self->{claim_edges}[ $from->{number} ] }, $to->{number} if $object !~ /^[kx] /;
	return;
}

# A transaction has seen the version at this index of the object's versions; -1: none was there
sub seen
{
	my ($self, $transaction, $object, $index, $op) = @_;
	my $versions = $self->{versions}{$object} // [];
	my $writer = $index >= 0 ? $versions->[$index][1] : undef;
	my $next = $index + 1;

	$next++ while $next < @$versions && $versions->[$next][1] == $transaction;
	if ($writer && $writer != $transaction && $op->[4] < $writer->{ending})
	{
		$self->found(dirty => "$transaction->{id} saw version $index of $object before $writer->{id} asked to commit");
	}
	my $after = $next == $index + 1 && $next < @$versions ? $versions->[$next][1] : undef;
	my $since = $transaction->{began} // $op->[3];
	if ($after && $after->{ended} < $since && !($writer && is_released($versions->[$index])))
	{
		$self->found(stale => "$transaction->{id} saw version $index of $object after $after->{id} had committed");
	}
	return if !$transaction->{ok};
	$self->edge(wr => $writer, $transaction, $object) if $writer;
	if ($next < @$versions && !($next > 0 && is_released($versions->[ $next - 1 ])))
	{
		$self->edge(rw => $transaction, $versions->[$next][1], $object);
	}
	return;
}

sub check_read
{
	my ($self, $transaction, $number, $op) = @_;
	my (undef, $list, $value, $sent) = @$op;
	my $final = $self->{final}{$list} // '';
	my @own = map { $_->[2] } grep { $_->[0] eq 'append' && $_->[1] eq $list && !($_->[5] && $_->[5] < $sent) }
	  @{ $transaction->{ops} }[ 0 .. $number - 1 ];

	while (@own)
	{
		my $element = pop @own;
		$value =~ s/(?:^|,)\Q$element\E\z// and next;
		$self->found(internal => "$transaction->{id} does not see its own $element in $list");
		return;
	}
	my $last = $value =~ /([^,]+)\z/ ? $1 : undef;
	if ($value ne '' && index("$final,", "$value,") != 0)
	{
		for my $element (split /,/, $value)
		{
			my $writer = $self->{written}{$list}{$element};
			if (!is_committed($writer))
			{
				$self->found(G1a => "$transaction->{id} saw $element in $list, which was rolled back");
				return;
			}
		}
		$self->found(order => "$transaction->{id} saw $list as $value");
		return;
	}
	my $index = defined $last ? $self->{place}{$list}{$last} : -1;
	my $versions = $self->{versions}{$list};
	if ($index >= 0 && $index < $#$versions && $versions->[$index][1] == $versions->[ $index + 1 ][1] && $versions->[$index][1] != $transaction)
	{
		$self->found(G1b => "$transaction->{id} saw $last in $list, which was not the last of $versions->[$index][1]{id}");
	}
	$self->seen($transaction, $list, $index, $op);
	return;
}

sub check_told
{
	my ($self, $transaction, $op) = @_;
	my (undef, $object, $label, $sent, undef, $is_successor) = @$op;
	my $versions = $self->{versions}{$object} // [];

	if (!defined $label)
	{
		# Not there: before the first, or after one that was released, if only by this transaction, which can
		# have rolled back
		my $own = latest_own($transaction, $object, $sent);

		return if ($own && became($own) eq 'released') || grep { is_released($_) } @$versions;
		$self->seen($transaction, $object, -1, $op);
		return;
	}
	# A marker is told by whoever it is of; or a transaction has executed, and not yet stored its result.
	if ($label eq '')
	{
		my ($marker) = @{ $self->{markers}{$object} // [] };

		return if grep { $_->[0] eq 'claimed' && $_->[1] eq $object } @{ $transaction->{ops} };
		if (!$marker)
		{
			$self->found(@$versions ? 'G1b' : 'G1a', "$transaction->{id} was told of an execution of $object without a result");
			return;
		}
		$label = "marker of $marker->{id}";
	}
	my $writer = $self->{written}{$object}{$label};
	return if $writer && $writer->[0] == $transaction;
	if (!is_committed($writer))
	{
		$self->found(G1a => "$transaction->{id} was told $label of $object, which was rolled back");
		return;
	}
	my $index = $self->{place}{$object}{$label};
	# A failure keeps the progress, which the successor is told. The failing transaction holds the row's lock
	# until it commits, so a successor that is answered before has not seen the failure.
	if ($is_successor && $index < $#$versions)
	{
		my $failure = $versions->[ $index + 1 ];
		$index++ if became($failure->[2]) eq 'retryable' && $op->[4] >= $failure->[1]{ending};
	}
	if ($index < $#$versions && $versions->[$index][1] == $versions->[ $index + 1 ][1] && $versions->[$index][1] != $transaction)
	{
		$self->found(G1b => "$transaction->{id} was told $label of $object, which was not the last of $writer->[0]{id}");
	}
	$self->seen($transaction, $object, $index, $op);
	# The successor of a holder writes the version right after the one that it was told.
	my $has_written = grep { $_->[0] eq 'write' && $_->[1] eq $object && $_->[3] >= $sent && !$_->[5] } @{ $transaction->{ops} };
	if ($is_successor && $has_written && $transaction->{ok} && $index < $#$versions && $versions->[ $index + 1 ][1] != $transaction)
	{
		$self->found('lost progress' => "$transaction->{id} took $object over with $label, which was not the latest");
	}
	return;
}

# Versions that may not follow each other
sub check_versions
{
	my ($self) = @_;

	for my $object (keys %{ $self->{versions} })
	{
		my $versions = $self->{versions}{$object};
		my $later;

		for my $at (reverse 0 .. $#$versions)
		{
			my ($version, $next) = @$versions[ $at, $at + 1 ];
			my (undef, $transaction, $op) = @$version;

			$self->found(order => "$transaction->{id} wrote version $at of $object after $later->{id} had committed a later one")
			  if $later && $later->{ended} < $op->[3];
			$later = $transaction if !$later || $transaction->{ended} < $later->{ended};
			next if !$next;
			$self->found('executed twice' => "$object: $next->[1]{id} wrote it after $transaction->{id}, which had " . became($op) . ' it')
			  if has_ended($op);
			$self->found('held twice' => "$object: $next->[1]{id} took the lease of $transaction->{id} over, which was live")
			  if became($op) eq 'live' && $next->[2][7] != $op->[7];
		}
	}
	return;
}

# A transaction was told that a request is its own. Also if it rolled back later, that was wrong where
# the request had ended before, or had a live lease all the time, which the transaction itself had not given
# up.
sub check_claim
{
	my ($self, $transaction, $op) = @_;
	my $object = $op->[1];
	my ($sent, $received) = @$op[ 3, 4 ];
	my $versions = $self->{versions}{$object} // [];
	my $own = latest_own($transaction, $object, $sent);

	$self->found('executed twice' => "$object: $transaction->{id} claimed it after it had itself $own->[6] it")
	  if $own && has_ended($own);
	for my $at (0 .. $#$versions)
	{
		my ($version, $next) = @$versions[ $at, $at + 1 ];
		my $before = $version->[1];

		next if $before == $transaction || $before->{ended} >= $sent;
		$self->found('executed twice' => "$object: $transaction->{id} claimed it after $before->{id} had " . became($version->[2]) . ' it')
		  if has_ended($version->[2]);
		$self->found('held twice' => "$object: $transaction->{id} claimed it under the live lease of $before->{id}")
		  if became($version->[2]) eq 'live' && !$own && (!$next || $next->[2][3] > $received);
	}
	return;
}

# A request is held from the answer until the holder asks to commit, or rolls back.
sub check_holders
{
	my ($self) = @_;
	my %holders;

	for my $transaction (@{ $self->{transactions} })
	{
		for my $op (grep { is_claim($_) } @{ $transaction->{ops} })
		{
			push @{ $holders{ $op->[1] } }, [ $op->[4], $op->[5] // $transaction->{ending}, $transaction ];
			$self->check_claim($transaction, $op);
		}
	}
	for my $object (keys %holders)
	{
		my $before;

		for my $holder (sort { $a->[0] <=> $b->[0] } @{ $holders{$object} })
		{
			$self->found('held twice' => "$object: $before->[2]{id} and $holder->[2]{id}") if $before && $before->[2] != $holder->[2] && $holder->[0] < $before->[1];
			$before = $holder;
		}
	}
	return;
}

# Strongly connected components of more than one node: Tarjan's algorithm, without recursion
sub components
{
	my ($next) = @_;
	my (@index, @low, @is_on, @stack, @components);
	my $counter = 0;

	for my $root (0 .. $#$next)
	{
		next if defined $index[$root] || !$next->[$root];
		my @path = ([ $root, 0 ]);
		$index[$root] = $low[$root] = $counter++;
		push @stack, $root;
		$is_on[$root] = 1;
		while (@path)
		{
			my ($node, $at) = @{ $path[-1] };
			my $to = $next->[$node] && $next->[$node][$at];

			if (defined $to)
			{
				$path[-1][1]++;
				if (!defined $index[$to])
				{
					$index[$to] = $low[$to] = $counter++;
					push @stack, $to;
					$is_on[$to] = 1;
					push @path, [ $to, 0 ];
				}
				elsif ($is_on[$to] && $index[$to] < $low[$node])
				{
					$low[$node] = $index[$to];
				}
				next;
			}
			pop @path;
			$low[ $path[-1][0] ] = $low[$node] if @path && $low[$node] < $low[ $path[-1][0] ];
			next if $low[$node] != $index[$node];
			my @component;
			do
			{
				push @component, pop @stack;
				$is_on[ $component[-1] ] = 0;
			} until $component[-1] == $node;
			push @components, \@component if @component > 1;
		}
	}
	return @components;
}

# A shortest cycle through the first node of a component
sub cycle
{
	my ($next, $component) = @_;
	my %is_inside = map { $_ => 1 } @$component;
	my $start = $component->[0];
	my %from;
	my @queue = ($start);

	while (@queue)
	{
		my $node = shift @queue;
		for my $to (grep { $is_inside{$_} } @{ $next->[$node] // [] })
		{
			if ($to == $start)
			{
				my @cycle = ($node);
				unshift @cycle, $from{ $cycle[0] } while $cycle[0] != $start;
				return @cycle;
			}
			next if defined $from{$to};
			$from{$to} = $node;
			push @queue, $to;
		}
	}
	return @$component;
}

# nodes: how many nodes stand for one transaction
sub find_cycles
{
	my ($self, $anomaly, $next, $nodes) = @_;

	for my $component (components($next))
	{
		my @cycle = map { int $_ / $nodes } cycle($next, $component);
		my $text = '';

		for my $at (0 .. $#cycle)
		{
			my ($from, $to) = @cycle[ $at, ($at + 1) % @cycle ];
			$text .= "$self->{transactions}[$from]{id} -(" . ($self->{why}{"$from $to"} // '?') . ')-> ';
		}
		$self->found($anomaly => $text . $self->{transactions}[ $cycle[0] ]{id});
	}
	return;
}

sub check
{
	my ($self) = @_;
	my $number = 0;

	@$self{qw(found edges why claim_edges markers)} = ({}, { ww => [], wr => [], rw => [] }, {}, [], {});
	$_->{number} = $number++ for @{ $self->{transactions} };
	$self->index_versions;
	$self->check_versions;
	for my $object (keys %{ $self->{versions} })
	{
		my $versions = $self->{versions}{$object};
		for my $at (1 .. $#$versions)
		{
			next if is_released($versions->[ $at - 1 ]);
			$self->edge(ww => $versions->[ $at - 1 ][1], $versions->[$at][1], $object);
		}
	}
	for my $transaction (@{ $self->{transactions} })
	{
		my $ops = $transaction->{ops};
		for my $at (0 .. $#$ops)
		{
			$self->check_read($transaction, $at, $ops->[$at]) if $ops->[$at][0] eq 'read';
			$self->check_told($transaction, $ops->[$at]) if $ops->[$at][0] eq 'told';
		}
	}
	$self->check_holders;

	my ($ww, $wr, $rw) = @{ $self->{edges} }{qw(ww wr rw)};
	my (@written, @all, @snapshot);
	for my $from (0 .. $number - 1)
	{
		my @first = (@{ $ww->[$from] // [] }, @{ $wr->[$from] // [] });
		my @second = @{ $rw->[$from] // [] };

		$written[$from] = \@first;
		$all[$from] = [ @first, @second ];
		# Each transaction twice: reached by rw, it can be left by ww and wr only.
		$snapshot[ 2 * $from ] = [ (map { 2 * $_ } @first), (map { 2 * $_ + 1 } @second) ];
		$snapshot[ 2 * $from + 1 ] = [ map { 2 * $_ } @first ];
	}
	$self->find_cycles(G0 => $ww, 1);
	$self->find_cycles(G1c => \@written, 1);
	$self->find_cycles('G-SI' => \@snapshot, 2);
	$self->find_cycles(G2 => \@all, 1);
	$self->find_cycles('G2 of claims alone' => $self->{claim_edges}, 1);
	return $self->{found};
}

1;
