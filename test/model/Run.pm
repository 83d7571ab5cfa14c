# Runs a script in both editions, and compares them.
#
#	my $run = Run->new($edition, $edition);
#	my $difference = $run->script($script);   # undef: none
#
# The header of compare says what is compared, and why both editions do the same in the same
# order.

package Run;

use strict;
use warnings;

use List::Util qw(any first max);
use Time::HiRes qw(time);
use Time::Local qw(timegm_modern);

use Script;
use Session;

my $slots_max = 3;

# How long one edition may take for a step that the other has done
my $patience_s = 10;

# After how long without an answer to check whether the session waits for another one, by the
# wait of the call. A call with a brief wait answers by itself. So does a call without one,
# unless another transaction deletes its row.
my %look_after_s = (patient => 0.002, no => 0.25, brief => 1.5);

# After how long to cancel again if the call goes on
my $cancel_again_after_s = 1;

# OIDs of types
use constant { TIMESTAMPTZ => 1184 };

# A token that no edition draws
my $wrong_token = '4000000000000';

# ----- editions -----

# An edition is {name, database}; connect() adds its sessions.

# In tens of minutes from now. The server cannot subtract -infinity before PostgreSQL 17.
my $times = sub {
	my ($column) = @_;

	return "CASE WHEN isfinite($column) THEN round(date_part('epoch', $column - clock_timestamp()) / 600)::text ELSE $column\::text END";
};

my %looks = (
	claims => "SELECT 'claim', request_id, user_id, scope, state, token, lease_until IS NULL, "
	  . $times->('lease_until') . ', ' . $times->('expires_at')
	  . ", expires_at = date_trunc('second', expires_at), fingerprint, result, progress"
	  . ' FROM idem_claims',
	scopes => 'SELECT \'policy\', scope, ttl, lease, lease_max, failed, lapsed, expired, key_time, result_max_bytes, '
	  . $times->('guarded_since') . ' FROM idem_scopes');

sub connect_edition
{
	my ($edition) = @_;

	$edition->{sessions} = [];
	for my $slot (0 .. $slots_max)
	{
		my $session = Session->new($edition->{database});
		$session->prepare($_, $looks{$_}) for sort keys %looks;
		$edition->{sessions}[$slot] = $session;
	}
	# A change of policy that would have to wait is refused.
	$edition->{sessions}[0]->ask("SET lock_timeout = '5ms'");
	$edition->{sessions}[0]->ask('SET idem.wait = 0');
	# It deletes policies without the effects of the triggers.
	$edition->{observer} //= Session->new($edition->{database}, options => '-c session_replication_role=replica');
	return;
}

# Replaces all sessions, some of which may be stuck
sub reconnect_edition
{
	my ($edition) = @_;
	my $pids = join ', ', map { $_->{pid} } @{ $edition->{sessions} };

	$edition->{observer}->ask("SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity WHERE pid IN ($pids)");
	$_->close for @{ $edition->{sessions} };
	connect_edition($edition);
	return;
}

sub new
{
	my ($class, @editions) = @_;
	my $self = bless {
		editions => \@editions,
		steps => 0,
		looks => 0,
		waited => 0,
		known => 0,
		skipped => 0,
		covered => {},
		patience_s => $patience_s
	}, $class;

	connect_edition($_) for @editions;
	return $self;
}

# ----- values that are known only when a step runs -----

sub uuidv7
{
	my ($self, $offset_s, $n) = @_;
	my $ms = int(($self->{begun} + $offset_s) * 1000);
	my $digits = sprintf '%012x', $ms;

	return sprintf '%s-%s-7%03x-8%03x-%012x', substr($digits, 0, 8), substr($digits, 8, 4), $n, $n, $n;
}

sub instantiate
{
	my ($self, $edition, $text) = @_;

	$text =~ s/\{\{token (\d+)\}\}/$edition->{token_of}{$1} \/\/ $wrong_token/ge;
	$text =~ s/\{\{uuid (-?\d+) (\d+)\}\}/$self->uuidv7($1, $2)/ge;
	$text =~ s/\{\{prepared (\d)\}\}/$edition->{database}_$1/g;
	$text =~ s/\{\{pid (\d)\}\}/$edition->{sessions}[$1]{pid}/g;
	return $text;
}

# ----- comparing -----

# Rounded to ten minutes from now. All times of a script are far from the middle between two
# multiples.
sub relative_time
{
	my ($value) = @_;

	$value =~ /^(\d+)-(\d\d)-(\d\d) (\d\d):(\d\d):(\d\d)(\.\d+)?\+00$/ or return $value;
	return sprintf '%+.0f min', 10 * sprintf '%.0f', (timegm_modern($6, $5, $4, $3, $2 - 1, $1) - time) / 600;
}

sub token_name
{
	my ($edition, $value) = @_;

	return defined $value ? 'token ' . ($edition->{step_of}{$value} // '?') : undef;
}

sub show_error
{
	my ($edition, $error) = @_;
	my ($detail, $hint) = @$error{qw(D H)};

	# The row that a constraint refuses contains times. In the portable edition the server
	# itself raises 40001.
	$detail = undef if $error->{C} =~ /^(?:23502|23514|40001)$/;
	$hint = undef if $error->{C} eq '40001';
	# The second sentence says who holds the request: with times, and in one edition only.
	$detail =~ s/(?<="\.) (?:A lease|Process|Prepared|Its holder|A transaction|Another transaction) [^"]*(?:"[^"]*"[^"]*)?$//
	  if defined $detail && $error->{C} =~ /^ID(?:409|503)$/;
	my $text = join ' | ', "$error->{S} $error->{C}: $error->{M}",
	  defined $detail ? "DETAIL: $detail" : (),
	  defined $hint ? "HINT: $hint" : ();
	$text =~ s/\Q$edition->{database}\E_(\d)/prepared $1/g;
	return $text;
}

sub show_reply
{
	my ($edition, $reply) = @_;
	my @columns = @{ $reply->{columns} };
	my @lines;

	push @lines, show_error($edition, $_) for @{ $reply->{notices} };
	for my $row (@{ $reply->{rows} })
	{
		my @values = @$row;
		for my $i (0 .. $#columns)
		{
			next if !defined $values[$i];
			$values[$i] = relative_time($values[$i]) if $columns[$i][1] == TIMESTAMPTZ;
			$values[$i] = token_name($edition, $values[$i]) if $columns[$i][0] eq 'token';
		}
		push @lines, join ', ', map { "$columns[$_][0]=" . ($values[$_] // 'NULL') } 0 .. $#columns;
	}
	push @lines, show_error($edition, $reply->{error}) if $reply->{error};
	push @lines, "$reply->{tag} [$reply->{status}]";
	return join "\n", @lines;
}

sub show_look
{
	my ($edition, $reply) = @_;

	return show_error($edition, $reply->{error}) if $reply->{error};
	# Sorted, since an old snapshot can see two rows of a key.
	return join "\n", sort map {
		my @row = @$_;
		$row[5] = token_name($edition, $row[5]) if $row[0] eq 'claim';
		join ', ', map { $_ // 'NULL' } @row
	} @{ $reply->{rows} };
}

# Tokens have other values in each edition: they are compared by the step that returned them. In
# each edition they must grow from holder to holder of a key.
sub note_tokens
{
	my ($edition, $step, $reply) = @_;
	my $at = first { $reply->{columns}[$_][0] eq 'token' } 0 .. $#{ $reply->{columns} };

	return unless defined $at;
	for my $row (@{ $reply->{rows} })
	{
		my $token = $row->[$at] // next;
		my $key = join "\0", @{ $step->{keys}[0] };

		return "token $token does not grow: the key had $edition->{last_token}{$key}"
		  if $token <= ($edition->{last_token}{$key} // 0);
		$edition->{last_token}{$key} = $token;
		$edition->{token_of}{ $step->{id} } = $token;
		$edition->{step_of}{$token} = $step->{id};
	}
	return;
}

sub cover
{
	my ($self, $step, $reply) = @_;
	my $covered = $self->{covered}{ $step->{name} } //= {};
	my @columns = @{ $reply->{columns} };
	my $outcome = first { $columns[$_][0] eq 'outcome' } 0 .. $#columns;

	if ($reply->{error}) { $covered->{ $reply->{error}{C} }++ }
	elsif (defined $outcome) { $covered->{ $_->[$outcome] }++ for @{ $reply->{rows} } }
	elsif ($step->{name} =~ /^idem_(claim|complete|fail|release|heal|forget)\b/)
	{
		$covered->{ $reply->{rows}[0][0] eq 't' ? 'true' : 'false' }++;
	}
	elsif ($step->{name} =~ /^idem_(outcome|status)/) { $covered->{ $reply->{rows}[0][0] // 'NULL' }++ }
	elsif ($step->{name} =~ /^idem_result/) { $covered->{ defined $reply->{rows}[0][0] ? 'a result' : 'NULL' }++ }
	elsif ($step->{name} eq 'idem_lookup') { $covered->{ @{ $reply->{rows} } ? $reply->{rows}[0][0] : 'no row' }++ }
	elsif ($step->{name} eq 'idem_cleanup') { $covered->{ $reply->{rows}[0][0] ? 'removed' : 'nothing' }++ }
	elsif ($step->{name} eq 'block') { ($covered->{ $_->{M} =~ /^(\S+)/ ? $1 : '' })++ for @{ $reply->{notices} } }
	elsif ($reply->{tag} =~ /^(?:INSERT 0|UPDATE|DELETE) (\d+)$/) { $covered->{ $1 ? 'done' : 'no row' }++ }
	else { $covered->{done}++ }
	return;
}

# ----- which steps may run: those whose answer is determined, and no deadlocks -----

sub key_name
{
	return join "\0", @{ $_[0] };
}

# Has the transaction used the key, so that others may have to wait for it? '*' is any key.
sub touches
{
	my ($transaction, $key, $how) = @_;
	my $keys = $transaction->{ $how // 'touched' } // {};

	return $keys->{'*'} || $keys->{$key};
}

sub drops
{
	my ($step) = @_;

	return $step->{kind} eq 'clean' || $step->{name} =~ /^idem_(?:forget|release)$/;
}

# Can other sessions have changed something that the snapshot of this session does not see?
sub snapshot_is_old
{
	my ($self, $slot) = @_;
	my $state = $self->{state};

	return 0 unless $state->[$slot]{snapshot};
	my @since = @{ $self->{done} }[ $state->[$slot]{snapshot} .. $#{ $self->{done} } ];
	return (any { $_->{step}{slot} != $slot } @since)
	  || any { $_ != $slot && ($state->[$_]{open} || $state->[$_]{waiting}) } 1 .. $slots_max;
}

# How long a call waits: no, brief or patient, see Script.pm
sub wait_of
{
	my ($self, $step) = @_;
	my $setting = $step->{slot} ? $self->{waits}[ $step->{slot} ] : '0';

	return $step->{wait} // ($setting eq '0' ? 'no' : $setting eq $Script::brief ? 'brief' : 'patient');
}

# A step may run if it waits at most for a session that does not itself wait. So sessions never
# wait in a circle.
sub may_run
{
	my ($self, $step) = @_;
	my $slot = $step->{slot};
	my $state = $self->{state};

	return 0 if $state->[$slot]{waiting};
	my @waiting = grep { $_ != $slot && $state->[$_]{waiting} } 1 .. $slots_max;
	my @others = ((map { $state->[$_] } grep { $_ != $slot } 1 .. $slots_max), values %{ $self->{prepared} });

	return $state->[ $step->{of} ]{waiting} ? 1 : 0 if $step->{kind} eq 'cancel';
	if ($step->{kind} eq 'policy')
	{
		# In the portable edition a change waits for every transaction that has claimed, also
		# for one that waits for a key, and for each other change. TRUNCATE waits for every transaction
		# that has read the table.
		return 0 if any { $_->{waiting} || $_->{open} } @others;
		return 0 if $step->{truncates} && $state->[$slot]{open};
		return 1;
	}
	# A documented difference: in the portable edition a claim does not wait longer than its wait for
	# a transaction that removes the request.
	if ($step->{kind} eq 'claim' && $self->wait_of($step) ne 'patient')
	{
		for my $key (map { key_name($_) } @{ $step->{keys} })
		{
			return 0 if any { touches($_, $key, 'dropped') } @others;
		}
	}
	# A documented difference: a claim that waits for a transaction which has changed the policy,
	# and then finds that the key was dropped, keeps to the old policy in one edition.
	if ($step->{kind} eq 'claim')
	{
		for my $key (map { key_name($_) } @{ $step->{keys} })
		{
			return 0 if any { $_->{policy} && touches($_, $key, 'dropped') } @others;
		}
	}
	# A documented difference: under an old snapshot the portable edition does not see every claim
	# that has expired by now. So a cleanup of one or two claims may remove others there.
	return 0 if $step->{sql} =~ /^SELECT idem_cleanup\([12]\)/ && $self->snapshot_is_old($slot);
	# A documented difference: the portable edition does not know the answer of a claim any more whose
	# request the transaction has dropped.
	return 0 if $step->{sql} =~ /^SELECT idem_(?:outcome|result)\(\)$/ && %{ $state->[$slot]{dropped} // {} };
	return 0 if @waiting && $state->[$slot]{policy} && ($step->{kind} eq 'undo' || drops($step));
	# In one edition the step would use the policy of its snapshot, in the other the new one: also
	# a statement that reads after it has waited for the change of policy.
	return 0 if ($step->{snapshot} || $step->{reads}) && any { $_->{policy} } @others;
	return 1 unless @waiting;

	if ($step->{kind} eq 'undo') { return $step->{id} % 8 == 0 }
	if ($step->{kind} eq 'clean') { return $slot == 0 }
	return 1 unless $step->{kind} eq 'claim' || $step->{kind} eq 'settle';
	for my $key (map { key_name($_) } @{ $step->{keys} })
	{
		for my $waiter (@$state[@waiting])
		{
			return 0 if touches($waiter, $key);
			next unless any { key_name($_) eq $key } @{ $waiter->{waiting}{keys} };
			return 0 if $step->{kind} eq 'claim' || @{ $waiter->{waiting}{keys} } > 1;
			return 0 if any { $_ != $waiter && touches($_, $key) } @others;
		}
	}
	return 1;
}

# Would the step only raise a well-known error? Most random calls would, so only some of them
# run.
sub is_pointless
{
	my ($self, $step) = @_;
	my $tokens = $self->{editions}[0]{token_of};

	return 0 if $step->{id} % 8 == 0;
	return 1 if $step->{sql} =~ /\{\{token ([1-9]\d*)\}\}/ && !$tokens->{$1};
	return 0 if $self->{state}[ $step->{slot} ]{open};
	return $step->{name} =~ /\((?:short|latest)\)/
	  || ($step->{name} =~ /^idem_(?:complete|fail)$/ && $step->{sql} !~ /\{\{token/)
	  || $step->{kind} =~ /^(?:end|savepoint|undo|set)$/;
}

# In a failed transaction most steps are replaced by one that ends it.
sub instead
{
	my ($self, $step) = @_;
	my $state = $self->{state}[ $step->{slot} ];
	my ($name, $kind) = ($step->{id} % 8 == 1 ? 'ROLLBACK' : 'ROLLBACK AND CHAIN', 'end');

	return $step
	  unless $state->{failed} && $step->{kind} =~ /^(?:begin|claim|settle|read|clean|policy|savepoint|set)$/ && $step->{id} % 8;
	($name, $kind) = ("ROLLBACK TO $state->{savepoints}[-1]", 'undo')
	  if @{ $state->{savepoints} } && $self->may_run({ %$step, kind => 'undo' });
	return { %$step, name => $kind eq 'undo' ? 'ROLLBACK TO' : $name, kind => $kind, sql => $name, keys => [] };
}

sub follow_savepoints
{
	my ($state, $sql) = @_;
	my ($what, $name) = $sql =~ /^(.*) (\S+)$/;
	my $names = $state->{savepoints};

	if ($what eq 'SAVEPOINT')
	{
		push @$names, $name;
		return;
	}
	pop @$names while @$names && $names->[-1] ne $name;
	pop @$names if $what eq 'RELEASE';
	return;
}

# Follows the state of the session, after the step was answered
sub follow
{
	my ($self, $step, $reply) = @_;
	my $state = $self->{state}[ $step->{slot} ];

	$state->{waiting} = undef;
	$state->{serializable} = $step->{sql} =~ /SERIALIZABLE/ if $step->{kind} eq 'begin' && !$state->{open};
	$state->{open} = $reply->{status} ne 'I';
	$state->{failed} = $reply->{status} eq 'E';
	if (!$state->{open} || ($step->{kind} eq 'end' && !$reply->{error}))
	{
		$self->{prepared}{ $step->{sql} =~ s/.*(\d).*/$1/r } = { (map { $_ => $state->{$_} } qw(touched dropped again)), policy => $state->{policy}, open => 1 }
		  if $step->{kind} eq 'prepare' && !$reply->{error} && $reply->{tag} eq 'PREPARE TRANSACTION';
		$state->{$_} = {} for qw(touched dropped again);
		$state->{savepoints} = [];
		$state->{policy} = undef;
		$state->{snapshot} = undef if !$state->{open};
	}
	delete $self->{prepared}{ $step->{sql} =~ s/.*(\d).*/$1/r } if $step->{kind} eq 'finish' && !$reply->{error};
	return unless $state->{open};
	$state->{snapshot} //= @{ $self->{done} } if $step->{snapshot};
	follow_savepoints($state, $step->{sql}) if $step->{kind} =~ /^(?:savepoint|undo)$/ && !$reply->{error};
	# A change that has found no row does not block other changes.
	$state->{policy} = 'changed' if $step->{kind} eq 'policy' && $reply->{tag} !~ / 0$/;
	$state->{policy} //= 'perhaps' if $step->{kind} eq 'policy';
	$state->{policy} = 'perhaps' if $step->{kind} eq 'undo' && $state->{policy};
	return if $step->{kind} eq 'end';
	if (drops($step))
	{
		$state->{dropped}{$_} = 1 for $step->{kind} eq 'clean' ? '*' : map { key_name($_) } @{ $step->{keys} };
	}
	if ($step->{kind} eq 'claim')
	{
		$state->{again}{$_} = 1 for grep { touches($state, $_, 'dropped') } map { key_name($_) } @{ $step->{keys} };
	}
	$state->{touched}{'*'} = 1 if $step->{kind} eq 'clean';
	$state->{touched}{ key_name($_) } = 1 for @{ $step->{keys} };
	return;
}

# ----- running -----

# A session that was found waiting goes on waiting, so it is checked at once.
sub look_after_s
{
	my ($self, $slot) = @_;
	my $state = $self->{state}[$slot];

	return $look_after_s{patient} if $state->{waiting};
	return $look_after_s{brief} if $slot == 0;
	return $look_after_s{ $self->wait_of($state->{running}) };
}

sub quote
{
	return Script::literal($_[0]);
}

# Which of these sessions certainly wait until another session does something. Such a session
# either waits for a lock while all others are idle or wait; or it sleeps, and the key that it
# claims has a live lease, which it polls.
sub sessions_that_wait
{
	my ($self, $edition, @slots) = @_;
	my @conditions;

	for my $slot (@slots)
	{
		my $step = $self->{state}[$slot]{running};
		my $pid = $edition->{sessions}[$slot]{pid};
		my $lease = 'false';
		if ($step->{kind} eq 'claim' && @{ $step->{keys} } == 1)
		{
			my ($user, $request, $scope) = map { quote($self->instantiate($edition, $_)) } @{ $step->{keys}[0] };
			$lease = "wait_event IN ('PgSleep', 'Extension', 'IdemLease') AND EXISTS (SELECT FROM idem_claims"
			  . " WHERE user_id = $user AND request_id = $request AND scope = $scope"
			  . " AND state = 'in_progress' AND lease_until > clock_timestamp())";
		}
		push @conditions,
		  "SELECT $slot FROM pg_stat_activity WHERE pid = $pid AND state = 'active'"
		  . " AND (cardinality(pg_blocking_pids(pid)) > 0 OR $lease)";
	}
	$self->{looks}++;
	my $reply = $edition->{observer}->ask(join ' UNION ALL ', @conditions);
	return map { $_->[0] } @{ $reply->{rows} };
}

# If a lock_timeout passes at the moment of a cancellation, the server reports only the
# timeout. The portable edition expects that, and goes on waiting. So cancel again.
sub cancel_again
{
	my ($self) = @_;
	my $cancel = first { $_ && $_->{kind} eq 'cancel' } map { $_->{running} } @{ $self->{state} };

	return unless $cancel;
	for my $edition (@{ $self->{editions} })
	{
		my $session = $edition->{sessions}[ $cancel->{of} ];
		$edition->{observer}->ask("SELECT pg_cancel_backend($session->{pid})") if $session->{pending};
	}
	return;
}

# Waits until each session has answered, or waits in both editions.
# Returns true and the slots that have answered; or false and the difference, or 'end'.
sub settle
{
	my ($self) = @_;
	my @editions = @{ $self->{editions} };
	my @busy = grep { $self->{state}[$_]{running} } 0 .. $slots_max;
	my $begun = time;
	my $looked_at = 0;
	my $pause_s = $look_after_s{patient};

	for (;;)
	{
		my @open = map {
			my $edition = $_;
			grep { $_->{pending} } map { $edition->{sessions}[$_] } @busy
		} @editions;
		last unless @open;

		my @pending = grep {
			my $slot = $_;
			any { $_->{sessions}[$slot]{pending} } @editions
		} @busy;
		my $look_at = max($begun + max(map { $self->look_after_s($_) } @pending), $looked_at + $pause_s);
		my $bits = '';
		vec($bits, fileno($_->{socket}), 1) = 1 for @open;
		if (select($bits, undef, undef, max(0, $look_at - time)) > 0)
		{
			$_->read for grep { vec($bits, fileno($_->{socket}), 1) } @open;
			next;
		}

		my %waits;
		for my $i (0, 1)
		{
			my @asked = grep { $editions[$i]{sessions}[$_]{pending} } @busy;
			$waits{$i}{$_} = 1 for @asked ? $self->sessions_that_wait($editions[$i], @asked) : ();
		}
		my $settled = 1;
		for my $slot (@busy)
		{
			my @states = map {
				    !$editions[$_]{sessions}[$slot]{pending} ? 'has answered'
				  : $waits{$_}{$slot} ? 'waits'
				  : 'runs'
			} 0, 1;
			next if $states[0] eq $states[1] && $states[0] ne 'runs';
			$settled = 0;
			my @replies = map { $_->{sessions}[$slot]{pending} ? Session::new_reply() : $_->{sessions}[$slot]{replies}[0] } @editions;
			return (0, 'end')
			  if (any { $_ eq 'waits' } @states) && ($self->known_difference(undef, @replies) // '') eq 'end';
			next if time < $begun + $self->{patience_s};
			return (0, "session $slot after $self->{patience_s} s: "
				  . join ', ', map { "$editions[$_]{name} $states[$_]" . ($replies[$_]{error} ? " $replies[$_]{error}{C}" : '') } 0, 1);
		}
		last if $settled;
		$self->cancel_again if time > $begun + $cancel_again_after_s;
		$pause_s = $pause_s * 1.5 > 0.05 ? 0.05 : $pause_s * 1.5;
		$looked_at = time;
	}
	return (1, grep { !$editions[0]{sessions}[$_]{pending} } @busy);
}

sub compare
{
	my ($self, $what, @shown) = @_;

	return if $shown[0] eq $shown[1];
	return "$what\n" . join '', map { "$self->{editions}[$_]{name}:\n" . $shown[$_] =~ s/^/    /gmr . "\n" } 0, 1;
}

sub look
{
	my ($session) = @_;

	$session->execute('claims', 'scopes');
	return;
}

# The error of a reply: the one raised, or the one that a block has caught, of which its handler
# tells in a notice (Script.pm, add_block())
sub failure
{
	my ($reply) = @_;

	return $reply->{error} if $reply->{error};
	my ($caught) = map { $_->{M} =~ /^([0-9A-Z]{5}) (.*)/s ? { C => $1, M => $2 } : () } @{ $reply->{notices} };
	return $caught;
}

# Is the answer to a claim that somebody else has the request now?
sub is_refused_for_now
{
	my ($reply) = @_;
	my $error = failure($reply);

	return $error->{C} =~ /^ID(409|503)$/ if $error;
	return any { any { ($_ // '') =~ /^(in_progress|timed_out)$/ } @$_ } @{ $reply->{rows} };
}

# Documented differences, also in a block that catches the error. Returns what to do: 'roll back'
# the transaction, or 'end' the script.
#
# - Under a snapshot that is older than a change of a claim, a cleanup of the C edition removes
#	the rows that have expired by now, and one of the portable edition those that the snapshot
#	sees.
# - In serializable transactions the reads of the portable edition also lock index pages.
# - A serializable claim that waits for a moment, of a request that was removed after the snapshot
#	and is being claimed again: the C edition answers, the portable one can raise 40001.
# - A claim that waits for a lease, under a snapshot that is older than a change of that lease: it
#	raises 40001 as soon as it looks again. The clock decides whether a cancel comes first.
sub known_difference
{
	my ($self, $step, @replies) = @_;
	my %reply = map { $self->{editions}[$_]{name} => $replies[$_] } 0, 1;
	return unless keys %reply == 2;
	my $error = failure($reply{portable});

	return 'end' if $error && $error->{C} eq '40001' && $error->{M} =~ /read\/write dependencies/;
	return unless $step && $self->snapshot_is_old($step->{slot});
	return 'roll back'
	  if $error && $error->{C} eq '40001' && $step->{kind} eq 'claim' && $self->{state}[ $step->{slot} ]{serializable} && is_refused_for_now($reply{c});
	return 'roll back' if $step->{kind} eq 'claim' && join(' ', sort map { (failure($_) // { C => '' })->{C} } @replies) eq '40001 57014';
	return unless $step->{kind} eq 'clean';
	return 'roll back' if $error && $error->{C} eq '40001';
	return 'roll back' if !$error && !$reply{c}{error} && $reply{portable}{rows}[0][0] < $reply{c}{rows}[0][0];
	return;
}

# Is the answer this documented difference? It must be asked of all sessions that have answered,
# since other sessions can have gone on after it.
sub fails_to_serialize
{
	my ($self, $slot) = @_;
	my @replies = map { $_->{sessions}[$slot]{replies}[0] } @{ $self->{editions} };

	return (any { !failure($_) } @replies) && ($self->known_difference(undef, @replies) // '') eq 'end';
}

# Returns a difference, or what to do about a documented one.
sub compare_answers
{
	my ($self, $slot) = @_;
	my @editions = @{ $self->{editions} };
	my $state = $self->{state}[$slot];
	my $step = $state->{running};
	my @replies = map { shift @{ $_->{sessions}[$slot]{replies} } } @editions;
	my $difference;

	for my $i (0, 1)
	{
		my $lost = note_tokens($editions[$i], $step, $replies[$i]);
		$difference //= "$editions[$i]{name}: $lost" if $lost;
	}
	my @shown = map { show_reply($editions[$_], $replies[$_]) } 0, 1;
	$self->{done}[ $state->{index} ]{answer} = $shown[0];
	if ($shown[0] ne $shown[1])
	{
		$difference //= $self->known_difference($step, @replies)
		  // $self->compare("answer of session $slot to step $step->{id}:", @shown);
	}
	$self->cover($step, $replies[0]);
	$self->follow($step, $replies[0]);
	$state->{running} = undef;
	return $difference;
}

sub compare_looks
{
	my ($self, $slot) = @_;
	my @editions = @{ $self->{editions} };
	my @replies = map { shift @{ $_->{sessions}[$slot]{replies} } } @editions;
	my @shown = map { show_look($editions[$_], $replies[$_]) } 0, 1;
	my $fault = first { $_->{error} && $_->{error}{C} !~ /^(?:25P02|40001)$/ } @replies;

	# A look that fails compares nothing, and ends the transaction in which it is.
	return "look of session $slot: $fault->{error}{C} $fault->{error}{M}" if $fault;
	return if $shown[0] eq $shown[1];
	return $self->known_difference(undef, @replies) // $self->compare("rows, as seen by session $slot:", @shown);
}

# Sends a step to both editions. Returns a difference, or 'end' if the script ends here.
sub step
{
	my ($self, $step) = @_;
	my @editions = @{ $self->{editions} };
	my $state = $self->{state};
	my $alone = !any { $_->{waiting} } @$state;

	$state->[ $step->{slot} ]{running} = $step;
	for my $edition (@editions)
	{
		my $session = $edition->{sessions}[ $step->{slot} ];
		$session->send($self->instantiate($edition, $step->{sql}));
		look($session) if $alone;
		$session->flush;
	}
	push @{ $self->{done} }, { step => $step };
	$state->[ $step->{slot} ]{index} = $#{ $self->{done} };
	my ($settled, @answered) = $self->settle;
	return "@answered" unless $settled;
	$self->{steps}++;

	return 'end' if any { $self->fails_to_serialize($_) } @answered;

	# The rows that were read together with the step are valid if no other session has answered.
	my $has_looked = $alone && @answered == 1 && $answered[0] == $step->{slot};
	my @compared;
	for my $slot (@answered)
	{
		my $difference = $self->compare_answers($slot);
		push @compared, $slot;
		return $self->roll_back(@compared) if ($difference // '') eq 'roll back';
		return $difference if $difference;
		next if $has_looked;
		for my $session (map { $_->{sessions}[$slot] } @editions)
		{
			@{ $session->{replies} } = ();
			look($session);
			$session->flush;
			$session->read while $session->{pending};
		}
	}
	for my $slot (@answered)
	{
		my $difference = $self->compare_looks($slot);
		return $difference if $difference;
	}
	for my $slot (grep { $state->[$_]{running} && !$state->[$_]{waiting} } 0 .. $slots_max)
	{
		$state->[$slot]{waiting} = $state->[$slot]{running};
		$self->{waited}++;
	}
	return;
}

# Rolls the transaction of the last slot back, and forgets the looks of all of them: the next answer
# of a session would be taken for such a look.
sub roll_back
{
	my ($self, @compared) = @_;
	my $slot = $compared[-1];

	$self->{known}++;
	for my $edition (@{ $self->{editions} })
	{
		@{ $edition->{sessions}[$_]{replies} } = () for @compared;
	}
	return $self->step({ id => 2_000_000, slot => $slot, name => 'ROLLBACK', kind => 'end', sql => 'ROLLBACK', keys => [] });
}

# Empties the tables. It vacuums them only now and then, since that is slow.
sub reset
{
	my ($self, $script) = @_;
	my $scripts = $self->{scripts}++;

	for my $edition (@{ $self->{editions} })
	{
		my $observer = $edition->{observer};
		$observer->send('DELETE FROM idem_claims; DELETE FROM idem_scopes');
		$observer->send("VACUUM $_") for $scripts % 50 == 0 ? qw(idem_claims idem_scopes) : ();
		$observer->flush;
		$edition->{sessions}[$_]->send("SET idem.wait = '$script->{waits}[$_]'") for 1 .. $script->{sessions};
		$edition->{sessions}[$_]->flush for 1 .. $script->{sessions};
		$edition->{$_} = {} for qw(token_of step_of last_token);
	}
	for my $edition (@{ $self->{editions} })
	{
		$edition->{observer}->answer;
		$edition->{sessions}[$_]->answer for 1 .. $script->{sessions};
	}
	$self->{state} = [ map { { touched => {}, savepoints => [] } } 0 .. $slots_max ];
	$self->{prepared} = {};
	$self->{waits} = $script->{waits};
	$self->{sessions} = $script->{sessions};
	$self->{done} = [];
	$self->{begun} = time;
	return;
}

# Ends all transactions, so that the waiters go on
sub finish
{
	my ($self, $script) = @_;
	my $id = 1_000_000;
	my $step = sub {
		my ($slot, $name, $kind, $sql, %more) = @_;
		return $self->step({ id => $id++, slot => $slot, name => $name, kind => $kind, sql => $sql, keys => [], %more });
	};
	my $difference;

	for my $round (0 .. $slots_max)
	{
		my @idle = grep { !$self->{state}[$_]{waiting} } 1 .. $script->{sessions};

		for my $slot (grep { $self->{state}[$_]{open} } @idle)
		{
			$difference //= $step->($slot, 'COMMIT', 'end', 'COMMIT');
		}
		for my $n (sort keys %{ $self->{prepared} })
		{
			$difference //= $step->(0, 'COMMIT PREPARED', 'finish', "COMMIT PREPARED '{{prepared $n}}'");
		}
		# These most likely wait for a lease.
		for my $slot (grep { $self->{state}[$_]{waiting} } 1 .. $script->{sessions})
		{
			# The end of another one may have woken it.
			my $waiting = $self->{state}[$slot]{waiting} // next;
			my $key = $waiting->{keys}[0];
			$difference //=
			  $round > 0 || !$key
			  ? $step->(0, 'cancel', 'cancel', "SELECT pg_cancel_backend({{pid $slot}})", of => $slot)
			  : $step->(0, 'idem_forget', 'settle',
				'SELECT idem_forget(' . join(', ', map { quote($_) } @$key) . ')', keys => [$key]);
		}
		return $difference
		  if $difference || !grep { $_->{waiting} || $_->{open} } @{ $self->{state} }, values %{ $self->{prepared} };
	}
	return 'a session still waits when all others have ended';
}

# Runs a script. Returns undef, or the difference: {text, done}
sub script
{
	my ($self, $script) = @_;
	my $difference;

	$self->reset($script);
	for my $step (@{ $script->{steps} })
	{
		if (!$self->may_run($step) || $self->is_pointless($step))
		{
			$self->{skipped}++;
			next;
		}
		$difference = $self->step($self->instead($step));
		last if $difference;
	}
	$difference //= $self->finish($script);
	return unless $difference;
	$self->{known}++ if $difference eq 'end';

	my $result = { text => $difference, done => $self->{done}, elapsed_s => time - $self->{begun} };
	for my $edition (@{ $self->{editions} })
	{
		reconnect_edition($edition);
		my $gids = $edition->{observer}->ask('SELECT gid FROM pg_prepared_xacts WHERE database = current_database()');
		$edition->{observer}->ask('ROLLBACK PREPARED ' . quote($_->[0])) for @{ $gids->{rows} };
	}
	return $difference eq 'end' ? undef : $result;
}

1;
