# Runs a script in both editions, and compares.
#
#	my $run = Run->new($edition, $edition);
#	my $difference = $run->script($script);   # undef: none
#
# See the opening comment of compare for what is compared, and how it is made sure that
# both do the same thing in the same order.

package Run;

use strict;
use warnings;

use List::Util qw(any first max);
use Time::HiRes qw(time);
use Time::Local qw(timegm_modern);

use Script;
use Session;

my $slots_max = 3;

# How long one edition may take to do what the other has done
my $patience_s = 10;

# An answer that takes longer is looked into: does the session wait for another one? By
# how long the call waits: one that does so for a moment answers by itself, and so does
# one that does not wait, but for the removal of a row.
my %look_after_s = (patient => 0.002, no => 0.25, brief => 1.5);

# A cancellation that has not come about
my $cancel_again_after_s = 1;

# Types of what the server returns
use constant { TIMESTAMPTZ => 1184 };

# Never drawn
my $wrong_token = '4000000000000';

# ----- editions -----

# An edition is {name, database}; connect() adds its sessions.

my $times = sub {
	my ($column) = @_;

	return "round(date_part('epoch', $column - clock_timestamp()) / 600)";
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
	# A change of policy is refused rather than waited for.
	$edition->{sessions}[0]->ask("SET lock_timeout = '5ms'");
	$edition->{sessions}[0]->ask('SET idem.wait = 0');
	# It clears the policy without noting what it was.
	$edition->{observer} //= Session->new($edition->{database}, options => '-c session_replication_role=replica');
	return;
}

# For sessions that may be stuck
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

# ----- what is known when a step runs only -----

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

# Multiples of ten minutes from now; all times of a script are far from halfway.
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

	# The failing row of a constraint has times in it. 40001 is the server's own in the
	# portable edition.
	$detail = undef if $error->{C} =~ /^(?:23502|23514|40001)$/;
	$hint = undef if $error->{C} eq '40001';
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
	# In order, since an old snapshot can see two rows of a key.
	return join "\n", sort map {
		my @row = @$_;
		$row[5] = token_name($edition, $row[5]) if $row[0] eq 'claim';
		join ', ', map { $_ // 'NULL' } @row
	} @{ $reply->{rows} };
}

# Tokens have other values in each edition: what is compared is by which step they were
# given. In each they grow from holder to holder of a key.
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
	elsif ($step->{name} =~ /^idem_status/) { $covered->{ $reply->{rows}[0][0] // 'NULL' }++ }
	elsif ($step->{name} =~ /^idem_result/) { $covered->{ defined $reply->{rows}[0][0] ? 'a result' : 'NULL' }++ }
	elsif ($step->{name} eq 'idem_lookup') { $covered->{ @{ $reply->{rows} } ? $reply->{rows}[0][0] : 'no row' }++ }
	elsif ($step->{name} eq 'idem_cleanup') { $covered->{ $reply->{rows}[0][0] ? 'removed' : 'nothing' }++ }
	elsif ($step->{name} eq 'block') { ($covered->{ $_->{M} =~ /^(\S+)/ ? $1 : '' })++ for @{ $reply->{notices} } }
	elsif ($reply->{tag} =~ /^(?:INSERT 0|UPDATE|DELETE) (\d+)$/) { $covered->{ $1 ? 'done' : 'no row' }++ }
	else { $covered->{done}++ }
	return;
}

# ----- which steps may run: no deadlocks, and nothing that is not determined -----

sub key_name
{
	return join "\0", @{ $_[0] };
}

# Keys that a transaction has used, which others may have to wait for. '*': any.
sub touches
{
	my ($transaction, $key, $how) = @_;
	my $keys = $transaction->{ $how // 'touched' } // {};

	return $keys->{'*'} || $keys->{$key};
}

# Whether others may have changed something that this session's snapshot does not see
sub snapshot_is_old
{
	my ($self, $slot) = @_;
	my $state = $self->{state};

	return 0 unless $state->[$slot]{snapshot};
	my @since = @{ $self->{done} }[ $state->[$slot]{snapshot} .. $#{ $self->{done} } ];
	return (any { $_->{step}{slot} != $slot } @since)
	  || any { $_ != $slot && ($state->[$_]{open} || $state->[$_]{waiting}) } 1 .. $slots_max;
}

# How long a call waits, see Script.pm
sub wait_of
{
	my ($self, $step) = @_;
	my $setting = $step->{slot} ? $self->{waits}[ $step->{slot} ] : '0';

	return $step->{wait} // ($setting eq '0' ? 'no' : $setting eq $Script::brief ? 'brief' : 'patient');
}

sub waits_briefly
{
	my ($self, $step) = @_;

	return $step->{kind} =~ /^(?:claim|settle)$/ && $self->wait_of($step) eq 'brief';
}

# Whoever waits, waits for somebody who goes on: a new wait is only for a session that
# does not wait itself. So there is never a circle.
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
		# The portable edition's change waits for whoever has claimed, and waits for a key.
		# TRUNCATE waits for whoever has looked at the table.
		# Next to another change the operator's is refused, by both.
		return 0
		  if any { $_->{waiting} || ($_->{open} && ($slot || $_->{failed} || ($_->{policy} // '') ne 'changed')) } @others;
		return 0 if $step->{truncates} && any { $_->{open} } @others, $state->[$slot];
		return 1;
	}
	return 0 if $state->[$slot]{brief} && $self->waits_briefly($step);
	# See README.md: the portable edition cannot tell who removes a row that its snapshot does
	# not see, nor that who removes it has claimed it again.
	if ($step->{kind} eq 'claim' && ($self->wait_of($step) ne 'patient' || $state->[$slot]{brief}))
	{
		my $how = $self->snapshot_is_old($slot) ? 'dropped' : 'again';
		for my $key (map { key_name($_) } @{ $step->{keys} })
		{
			return 0 if any { touches($_, $key, $how) } @others;
		}
	}
	# It would see the policy of its snapshot in one edition, and the new one in the other.
	return 0 if $step->{snapshot} && any { $_->{policy} } @others;
	# One who looks for an unlocked row must not come upon one who does.
	return 0 if $step->{kind} eq 'move' && @waiting && any { $_->{brief} } @$state[@waiting];
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
			# It waits for a lease, and would come upon who holds it when it looks again.
			return 0 if $waiter->{brief} && $state->[$slot]{open};
			return 0 if $step->{kind} eq 'claim' || @{ $waiter->{waiting}{keys} } > 1;
			return 0 if any { $_ != $waiter && touches($_, $key) } @others;
		}
	}
	return 1;
}

# Whether the answer is known: an error that most random calls would end in. Some do.
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

# In a failed transaction nothing happens: end it, mostly.
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

# After the step was answered
sub follow
{
	my ($self, $step, $reply) = @_;
	my $state = $self->{state}[ $step->{slot} ];

	$state->{waiting} = undef;
	$state->{open} = $reply->{status} ne 'I';
	$state->{failed} = $reply->{status} eq 'E';
	if (!$state->{open} || ($step->{kind} eq 'end' && !$reply->{error}))
	{
		$self->{prepared}{ $step->{sql} =~ s/.*(\d).*/$1/r } = { (map { $_ => $state->{$_} } qw(touched dropped again)), policy => $state->{policy}, open => 1 }
		  if $step->{kind} eq 'prepare' && !$reply->{error} && $reply->{tag} eq 'PREPARE TRANSACTION';
		$state->{$_} = {} for qw(touched dropped again);
		$state->{savepoints} = [];
		$state->{policy} = $state->{brief} = undef;
		$state->{snapshot} = undef if !$state->{open};
	}
	delete $self->{prepared}{ $step->{sql} =~ s/.*(\d).*/$1/r } if $step->{kind} eq 'finish' && !$reply->{error};
	return unless $state->{open};
	$state->{brief} = 1 if $step->{kind} eq 'set';
	$state->{snapshot} //= @{ $self->{done} } if $step->{snapshot};
	follow_savepoints($state, $step->{sql}) if $step->{kind} =~ /^(?:savepoint|undo)$/ && !$reply->{error};
	# Who has found no row to change keeps nobody else from a change.
	$state->{policy} = 'changed' if $step->{kind} eq 'policy' && $reply->{tag} !~ / 0$/;
	$state->{policy} //= 'perhaps' if $step->{kind} eq 'policy';
	$state->{policy} = 'perhaps' if $step->{kind} eq 'undo' && $state->{policy};
	return if $step->{kind} eq 'end';
	if ($step->{kind} eq 'clean' || $step->{name} =~ /^idem_(?:forget|release)$/)
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

# One that was found to wait does so for good.
sub look_after_s
{
	my ($self, $slot) = @_;
	my $state = $self->{state}[$slot];

	return $look_after_s{patient} if $state->{waiting};
	return $look_after_s{brief} if $slot == 0 || $state->{brief};
	return $look_after_s{ $self->wait_of($state->{running}) };
}

sub quote
{
	return Script::literal($_[0]);
}

# Which of these sessions wait for another one, for sure, that is until another one does
# something. Either it waits for a lock, and all the others are idle or wait themselves.
# Or it sleeps, and the claim that it wants is under a live lease, at which it looks
# again and again.
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

# The server takes a cancellation for the lock timeout that passes at the same moment,
# which the portable edition expects, and waits on.
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

# Until each session has answered or waits, in both editions alike.
# Returns the slots that have answered; or false, and what the difference is.
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
			next if time < $begun + $self->{patience_s};
			return (0, "session $slot after $self->{patience_s} s: "
				  . join ', ', map { "$editions[$_]{name} $states[$_]" } 0, 1);
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

# What README.md says that the editions do differently, as what is to be done about it:
# roll back, what was changed differently; or end the script.
#
# - Under a snapshot that is older than a change of a claim, the C edition removes what has
#	expired by now, and the portable edition what it sees.
# - Among serializable transactions the portable edition's reads lock pages of indexes too.
sub known_difference
{
	my ($self, $step, @replies) = @_;
	my %reply = map { $self->{editions}[$_]{name} => $replies[$_] } 0, 1;
	my $error = $reply{portable}{error};

	return unless keys %reply == 2;
	return 'end' if $error && $error->{C} eq '40001' && $error->{M} =~ /read\/write dependencies/;
	return unless $step && $step->{kind} eq 'clean' && $self->snapshot_is_old($step->{slot});
	return 'roll back' if $error && $error->{C} eq '40001';
	return 'roll back' if !$error && !$reply{c}{error} && $reply{portable}{rows}[0][0] < $reply{c}{rows}[0][0];
	return;
}

# Known, and to be asked of all who have answered: others may have gone on since.
sub fails_to_serialize
{
	my ($self, $slot) = @_;
	my @replies = map { $_->{sessions}[$slot]{replies}[0] } @{ $self->{editions} };

	return (any { !$_->{error} } @replies) && ($self->known_difference(undef, @replies) // '') eq 'end';
}

# Returns a difference, or what is to be done about a known one.
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

	return if $shown[0] eq $shown[1];
	return $self->known_difference(undef, @replies) // $self->compare("rows, as seen by session $slot:", @shown);
}

# Sends a step to both; returns a difference, or 'end', of the script.
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

	# A look that came along is good if nobody else did anything meanwhile.
	my $has_looked = $alone && @answered == 1 && $answered[0] == $step->{slot};
	for my $slot (@answered)
	{
		my $difference = $self->compare_answers($slot);
		return $self->roll_back($slot) if ($difference // '') eq 'roll back';
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

sub roll_back
{
	my ($self, $slot) = @_;

	$self->{known}++;
	@{ $_->{sessions}[$slot]{replies} } = () for @{ $self->{editions} };
	return $self->step({ id => 2_000_000, slot => $slot, name => 'ROLLBACK', kind => 'end', sql => 'ROLLBACK', keys => [] });
}

# As if nothing had ever been claimed. The tables shrink now and then only: that is slow.
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

# All transactions end, and those who wait for them go on.
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
		# For a lease, most likely
		for my $slot (grep { $self->{state}[$_]{waiting} } 1 .. $script->{sessions})
		{
			# Another one's end may have let it go on.
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

# Undef, or the difference: {text, done}.
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
