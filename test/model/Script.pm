# A random script: the same seed makes the same script.
#
#	my $script = Script->new($seed, two_phase => 1);
#
# It has a number of sessions, each with its idem.wait, and steps in their order:
#
#	{
#		id    => 7,               # stays when a script is shrunk
#		slot  => 2,               # the session; 0 is the operator, see Run.pm
#		name  => 'idem_extend',   # for the table of what was covered
#		kind  => 'settle',        # claim, settle, read, clean, policy, move, cancel, set,
#		                          # begin, savepoint, undo, end, prepare, finish
#		keys  => [[user, request, scope], ...],
#		wait  => 'no',            # no, brief, patient; of a claim, undef: as idem.wait says
#		sql   => "SELECT idem_extend('u1', 'r1', {{token 3}})"
#	}
#
# {{ }} stands for a value that is known only when the step runs: {{token N}}, the token that step
# N returned; {{uuid SECONDS N}}, the UUIDv7 of that many seconds from now; {{prepared N}}, the
# name of a prepared transaction; {{pid N}}, the process id of session N.
#
# Each script switches some kinds of steps off, so that it has more of the others.

package Script;

use strict;
use warnings;

# All times are multiples of this, and a run is much shorter. So whether a time has passed does
# not depend on the speed of the machine.
our $unit_s = 1200;

# A wait that ends by itself, and costs little time
our $brief = '3ms';

sub pick
{
	return $_[ int rand @_ ];
}

sub chance
{
	return rand() < $_[0];
}

# pick_by_weight(name => weight, ...)
sub pick_by_weight
{
	my (@choices) = @_;
	my ($sum, $i) = (0, 0);

	$sum += $choices[ 2 * $_ + 1 ] for 0 .. $#choices / 2;
	my $at = rand $sum;
	while (($at -= $choices[ $i + 1 ]) >= 0) { $i += 2 }
	return $choices[$i];
}

sub literal
{
	my ($value) = @_;

	$value =~ s/'/''/g;
	return "'$value'";
}

my @switches = qw(leases batches savepoints policies cleaning invalid moves
  fingerprints forgetting blocks many tokens);

sub new
{
	my ($class, $seed, %server) = @_;
	my $self = bless { seed => $seed, steps => [] }, $class;

	srand($seed);
	$self->{on}{$_} = chance(0.75) for @switches;
	$self->{on}{two_phase} = $server{two_phase} && chance(0.3);
	$self->{on}{uuidv7} = chance(0.2);
	$self->{on}{isolation} = chance(0.25);
	$self->{on}{read_only} = chance(0.05);
	$self->{on}{big} = chance(0.1);
	$self->{sessions} = pick(1, 2, 2, 3);
	$self->{waits} = [ '0', map { pick('0', '-1', '-1', $brief) } 1 .. $self->{sessions} ];
	$self->choose_keys;
	$self->{open} = [ map { 0 } 0 .. $self->{sessions} ];
	$self->{savepoints} = [ map { [] } 0 .. $self->{sessions} ];
	$self->{held} = [ map { [] } 0 .. $self->{sessions} ];
	$self->{latest} = [];
	$self->{leased} = [];
	$self->add_initial_policy;
	my $length = pick(10, 25, 40, 60);
	$self->add_step while @{ $self->{steps} } < $length;
	return $self;
}

my @exotic = (
	"it''s" =~ s/''/'/r, 'x "y"', 'back\\slash', '{a,b}', "\xc3\xbc", '%s %', 'r1 ', 'R1',
	"tab\there", '["r1"]', 'NULL', ' ', 'x' x 255);

sub choose_keys
{
	my ($self) = @_;
	my $odd = chance(0.15);
	my @users = ('u1', $odd ? pick(@exotic) : 'u2');
	my @requests = $odd ? ('r1', pick(@exotic), 'r2') : ('r1', 'r2', 'r3', 'r4');
	my @scopes = ('', 's1', $odd ? pick(@exotic) : 's2');

	if ($self->{on}{uuidv7})
	{
		# Close to the limits of a ttl of 20, 60 or 120 minutes, and of the skew of clocks
		@requests = map {
			sprintf '{{uuid %d %d}}',
			  pick(0, 30, 100, 100000, -60, -600, -1199, -1200, -1300, -2400, -3539, -3600,
				-3660, -5400, -7141, -7200, -7300, -200000), $_
		} 1 .. 3;
		push @requests, 'r1' if $self->{on}{invalid};
	}
	$self->{scopes} = [ @scopes[ 0 .. pick(0, 1, 2) ] ];
	my $n = $self->{sessions} > 1 ? pick(1, 2, 3) : pick(1, 2, 3, 4, 6);
	$self->{keys} = [
		map {
			[ chance(0.8) ? $users[0] : $users[1], pick(@requests), pick(@{ $self->{scopes} }) ]
		} 1 .. $n
	];
	return;
}

# ----- arguments -----

sub named
{
	return join ', ', @_;
}

sub interval_of
{
	return pick(map { $unit_s * $_ / 60 . ' min' } 1, 2, 3, 6);
}

sub jsonb
{
	my ($self) = @_;

	return pick(
		'NULL', 'NULL', q('1'), q('1.0'), q('{"a": 1}'), q('{"a": 1.00}'), q('{"b": [1, "x"], "a": null}'),
		q('null'), q('"text"'), q('[]'), q('{}'), q('true'),
		$self->{on}{big}
		? (q(to_jsonb(repeat('x', 60))), q(to_jsonb(repeat('y', 3000))),
			q(jsonb_build_array(repeat('z', 1048600))), q('{"n": 12345678901234567890.0123}'))
		: ());
}

# Returns the value, or now and then one that is refused
sub or_invalid
{
	my ($self, $value, @invalid) = @_;

	return $self->{on}{invalid} && chance(0.03) ? pick(@invalid) : $value;
}

sub id
{
	my ($self, $value) = @_;

	return $self->or_invalid(literal($value),
		'NULL', "''", "repeat('x', 256)", "repeat('\xc3\xbc', 128)");
}

sub scope_argument
{
	my ($self, $scope) = @_;
	my $value = $self->or_invalid(literal($scope), 'NULL', "repeat('s', 256)");

	return $value eq "''" ? () : "scope => $value";
}

sub fingerprint_argument
{
	my ($self) = @_;

	return unless $self->{on}{fingerprints} && chance(0.5);
	return 'fingerprint => ' . $self->or_invalid(
		pick(q('\x01'), q('\x01'), q('\x02'), q(idem_fingerprint('{"a": 1}')), q('\x0100'), 'NULL'),
		q(''), q(decode(repeat('ab', 64), 'hex')), q(decode(repeat('ab', 65), 'hex')));
}

# Returns how long the call waits, and the argument
sub wait_argument
{
	my ($self) = @_;
	my $wait = pick('', '', '', '', '0', '0', $brief, '1 hour', '1 hour');

	return (undef) if $wait eq '';
	return ('no', 'wait => '
		  . $self->or_invalid("'0'", q('-1 s'), q('1 month'), q('1 year'), q('-1 month'), q('1 month -31 days')))
	  if $wait eq '0';
	return ($wait eq $brief ? 'brief' : 'patient', "wait => '$wait'");
}

sub token
{
	my ($self, $key) = @_;
	my @all = @{ $self->{leased} };
	my @same = grep { $_->{key} == $key } @all;

	# (Not 1: that is the first token of a new database.)
	return $self->or_invalid('4611686018427387904', 'NULL', '0', '-1') if $self->{on}{invalid} && chance(0.05);
	return 'NULL' if !@all || chance(0.1);
	return '{{token 0}}' if chance(0.04);
	my $step = @same && chance(0.9) ? (chance(0.7) ? $same[-1] : pick(@same)) : pick(@all);
	return "{{token $step->{id}}}";
}

sub key_arguments
{
	my ($self, $key) = @_;

	return $self->id($key->[0]) . ', ' . $self->id($key->[1]);
}

# ----- steps -----

sub add
{
	my ($self, $slot, $name, $kind, $sql, %more) = @_;
	my $step = {
		id => @{ $self->{steps} } + 1,
		slot => $slot,
		name => $name,
		kind => $kind,
		sql => $sql,
		keys => [],
		%more
	};

	push @{ $self->{steps} }, $step;
	return $step;
}

sub add_claim
{
	my ($self, $slot, $key) = @_;
	my ($wait, @wait) = $self->wait_argument;
	my $arguments = named($self->key_arguments($key), $self->scope_argument($key->[2]),
		$self->fingerprint_argument, @wait);

	$self->add($slot, 'idem_claim', 'claim', "SELECT idem_claim($arguments)",
		keys => [$key], wait => $wait);
	return;
}

sub add_row_claim
{
	my ($self, $slot, $name, $key, $arguments, $wait) = @_;
	my $call = "$name($arguments)";
	# idem_outcome() does not see what its own statement claims.
	my $with_status = 'SELECT c.*, idem_status(' . literal($key->[0]) . ', ' . literal($key->[1])
	  . ', ' . literal($key->[2]) . ") AS status FROM $call AS c";
	my $sql = pick(
		("SELECT * FROM $call") x 8,
		$with_status,
		$self->{on}{leases} ? () : "SELECT i, c.* FROM generate_series(1, 2) AS i, $call AS c");

	return $self->add($slot, $name, 'claim', $sql, keys => [$key], wait => $wait, reads => $sql eq $with_status);
}

sub add_try_claim
{
	my ($self, $slot, $key) = @_;
	my ($wait, @wait) = $self->wait_argument;

	$self->add_row_claim($slot, 'idem_try_claim', $key,
		named($self->key_arguments($key), $self->scope_argument($key->[2]), $self->fingerprint_argument, @wait), $wait);
	return;
}

sub add_lease
{
	my ($self, $slot, $key) = @_;
	my ($wait, @wait) = $self->wait_argument;
	my $lease = $self->or_invalid("'" . interval_of() . "'",
		'NULL', q('0'), q('-1 s'), q('1 month'), q('36501 days'), q('36500 days'));
	my @progress = chance(0.4) ? 'progress => ' . $self->jsonb : ();
	my $step = $self->add_row_claim($slot, 'idem_lease', $key,
		named($self->key_arguments($key), $lease, $self->scope_argument($key->[2]), $self->fingerprint_argument, @wait, @progress), $wait);

	push @{ $self->{leased} }, { id => $step->{id}, key => $key };
	return;
}

sub array_of
{
	my ($type, @elements) = @_;

	return "'{}'::${type}[]" if !@elements;
	return 'ARRAY[' . join(', ', @elements) . "]::${type}[]";
}

# Nothing shows for which lease a batch waits, so a batch waits long only in scripts without
# leases.
sub add_batch
{
	my ($self, $slot) = @_;
	my $moved = chance(0.5) ? $self->{moved} : undef;
	my $scope = $moved ? $moved->[2] : pick(@{ $self->{scopes} });
	my @keys = grep { $_->[2] eq $scope } @{ $self->{keys} };

	@keys = map { @keys ? pick(@keys) : () } 1 .. pick(0, 1, 2, 3, 4, 6);
	$keys[0] = $moved if @keys && $moved;
	my @users = map { $self->id($_->[0]) } @keys;
	my @requests = map { $self->id($_->[1]) } @keys;
	my ($wait, @wait) = $self->wait_argument;
	($wait, @wait) = ('no', "wait => '0'")
	  if $self->{on}{leases} && (!defined $wait || $wait eq 'patient');
	my @more = ($self->scope_argument($scope), @wait);
	if ($self->{on}{fingerprints} && chance(0.5))
	{
		my @fingerprints =
		  map { $self->or_invalid(pick('NULL', q('\x01'), q('\x02')), q(''), q(decode(repeat('ab', 65), 'hex'))) }
		  @keys;
		push @more, 'fingerprints => ' . $self->or_invalid(array_of('bytea', @fingerprints),
			q(ARRAY['\x01']::bytea[]), 'NULL', q('{{"\\\\x01"},{"\\\\x02"}}'::bytea[]));
	}
	# No other array of a batch has 5 or 7 elements. So such a call is refused, and claims no key
	# that the step does not name.
	my $arguments = named(
		$self->or_invalid(array_of('text', @users), 'NULL', q(array_fill('u1'::text, ARRAY[5])), q(ARRAY[['u1'], ['u2']])),
		$self->or_invalid(array_of('text', @requests), 'NULL', q(array_fill('r1'::text, ARRAY[7])), q(ARRAY[['r1'], ['r2']])),
		@more);
	$self->add($slot, 'idem_claim_many', 'claim', "SELECT * FROM idem_claim_many($arguments)",
		keys => \@keys, wait => $wait);
	return;
}

sub add_settle
{
	my ($self, $slot, $key, $what) = @_;
	my $value = $self->jsonb;
	my $held = $self->{held}[$slot];

	if (chance(!@$held ? 0.05 : @$held == 1 ? 0.5 : 0.2))
	{
		@$held = ();
		$self->add($slot, "$what (short)", 'settle',
			$value eq 'NULL' && $what eq 'idem_complete' ? 'SELECT idem_complete()' : "SELECT $what($value)",
			keys => $self->{keys});
		return;
	}
	$key = pick(@$held) if @$held && chance(0.8);
	$key = pick(@{ $self->{leased} })->{key} if !@$held && @{ $self->{leased} } && chance(0.9);
	my $token = $self->{on}{leases} && !(@$held && chance(0.5)) ? $self->token($key) : 'NULL';
	my $arguments = named($self->key_arguments($key), $value,
		$token eq 'NULL' ? () : "token => $token", $self->scope_argument($key->[2]));
	$self->add($slot, $what, 'settle', "SELECT $what($arguments)", keys => [$key]);
	return;
}

sub add_extend
{
	my ($self, $slot, $key) = @_;
	my @more;

	push @more, 'lease => '
	  . $self->or_invalid(pick('NULL', "'" . interval_of() . "'"), q('0'), q('-1 s'), q('1 month'), q('36501 days'))
	  if chance(0.5);
	push @more, 'progress => ' . $self->jsonb if chance(0.5);
	my $arguments = named($self->key_arguments($key), $self->token($key), @more, $self->scope_argument($key->[2]));
	$self->add($slot, 'idem_extend', 'settle', "SELECT idem_extend($arguments)", keys => [$key]);
	return;
}

# idem_release, idem_fence
sub add_holders
{
	my ($self, $slot, $key, $what) = @_;
	my $arguments = named($self->key_arguments($key), $self->token($key), $self->scope_argument($key->[2]));

	$self->add($slot, $what, 'settle', "SELECT $what($arguments)", keys => [$key]);
	return;
}

sub add_heal
{
	my ($self, $slot, $key) = @_;
	my $arguments = named($self->key_arguments($key), $self->jsonb, $self->scope_argument($key->[2]));

	$self->add($slot, 'idem_heal', 'settle', "SELECT idem_heal($arguments)", keys => [$key]);
	return;
}

# idem_forget; idem_result, idem_status, idem_lookup
sub add_named
{
	my ($self, $slot, $key, $what, $kind) = @_;
	my $arguments = named($self->key_arguments($key), $self->scope_argument($key->[2]));

	$self->add($slot, $what, $kind,
		$what eq 'idem_lookup' ? "SELECT * FROM $what($arguments)" : "SELECT $what($arguments)", keys => [$key]);
	return;
}

# A claim in a block whose handler catches the error, which rolls the claim back. Run.pm, failure(),
# reads the notice of the handler.
sub add_block
{
	my ($self, $slot, $key) = @_;
	my $claim = 'idem_claim(' . named($self->key_arguments($key), $self->scope_argument($key->[2]), "wait => '0'") . ')';
	my $second = pick(
		'',
		'PERFORM 1/0; ',
		'PERFORM idem_complete(' . $self->jsonb . '); ',
		'PERFORM idem_fail(\'"error"\'); PERFORM 1/0; ',
		'BEGIN PERFORM idem_complete(\'1\'); PERFORM 1/0; EXCEPTION WHEN division_by_zero THEN NULL; END; ');
	$self->add($slot, 'block', 'claim',
		"DO \$\$ BEGIN IF $claim THEN ${second}RAISE NOTICE 'claimed'; END IF; RAISE NOTICE '% %', idem_outcome(), idem_result(); "
		  . "EXCEPTION WHEN OTHERS THEN RAISE NOTICE '% %', SQLSTATE, SQLERRM; END \$\$",
		keys => [$key], wait => 'no');
	return;
}

sub add_cleanup
{
	my ($self, $slot) = @_;

	$self->add($slot, 'idem_cleanup_all', 'clean', 'CALL idem_cleanup_all()'), return if chance(0.1);
	$self->add($slot, 'idem_cleanup', 'clean',
		'SELECT idem_cleanup(' . $self->or_invalid(pick('', '', '1', '2', '1000000'), '0', '-1', '1000001') . ')');
	return;
}

# Makes the lease of a claim lapse, or the claim expire. The step does not wait. Each step sets
# another time, so that claims expire in the same order in both editions.
sub add_move
{
	my ($self, $key) = @_;
	my $ago = $unit_s * (1 + @{ $self->{steps} }) . ' s';
	my $what = pick('lapse', 'lapse', 'lapse', 'expire', 'both');
	my @set;

	my $moment = "date_trunc('second', clock_timestamp()) - interval '$ago'";
	push @set, "lease_until = CASE WHEN lease_until IS NOT NULL THEN $moment END" if $what ne 'expire';
	push @set, "expires_at = $moment" if $what ne 'lapse';
	my $where = 'user_id = ' . literal($key->[0]) . ' AND request_id = ' . literal($key->[1])
	  . ' AND scope = ' . literal($key->[2]);
	$self->add(0, "($what)", 'move',
		"UPDATE idem_claims SET " . join(', ', @set)
		  . " WHERE ctid IN (SELECT ctid FROM idem_claims WHERE $where FOR UPDATE SKIP LOCKED)");
	$self->{moved} = $key;
	return;
}

# ----- policy -----

sub policy_value
{
	my ($self, $column) = @_;
	my %values = (
		failed => [qw('terminal' 'retryable')],
		lapsed => [qw('reclaim' 'unknown' 'unknown')],
		expired => [qw('protect' 'reclaim')],
		key_time => [ $self->{on}{uuidv7} ? qw('uuidv7' 'uuidv7' 'any') : q('any') ],
		ttl => [ q('20 min'), q('1 hour'), q('2 hours'), q('2 days'), $self->{on}{uuidv7} ? () : 'NULL' ],
		lease => [ q('20 min'), q('60 min'), 'NULL' ],
		lease_max => [ q('20 min'), q('2 days'), q('2 days'), 'NULL' ],
		result_max_bytes => [qw(16 64 4096 NULL)]);
	my %invalid = (
		ttl => [ q('0'), q('1 month'), q('-1 s'), q('36501 days'), 'NULL' ],
		lease => [ q('0'), q('1 month') ],
		lease_max => [ q('-1 s'), q('1 month') ],
		failed => [ q('never'), 'NULL' ],
		lapsed => [q('')],
		expired => ['NULL'],
		key_time => [ q('uuidv4'), q('uuidv7') ],
		result_max_bytes => [qw(0 267386881)]);

	return $self->or_invalid(pick(@{ $values{$column} }), @{ $invalid{$column} });
}

my @policy_columns = qw(failed lapsed expired key_time ttl lease lease_max result_max_bytes);

sub policy_columns
{
	my ($self) = @_;
	my %chosen = map { chance(0.35) ? ($_ => 1) : () } @policy_columns;

	$chosen{failed} = 1 if !%chosen;
	$chosen{ttl} = 1 if $chosen{key_time};
	return grep { $chosen{$_} } @policy_columns;
}

sub insert_policy
{
	my ($self, $scope, @guard) = @_;
	my @columns = $self->policy_columns;
	my @values = map { $self->policy_value($_) } @columns;

	return 'INSERT INTO idem_scopes (' . join(', ', 'scope', @columns, @guard ? 'guarded_since' : ())
	  . ') VALUES (' . join(', ', $self->or_invalid(literal($scope), 'NULL', "repeat('s', 256)"), @values, @guard) . ')';
}

# Inserts a policy like a subscriber, with the guarded_since of the publisher
sub replicate_policy
{
	my ($self, $scope) = @_;

	# Here another trigger refuses invalid values.
	local $self->{on}{invalid} = 0;
	return 'SELECT replicated(' . literal($self->insert_policy($scope, q('-infinity'))) . ')';
}

sub add_policy
{
	my ($self, $slot) = @_;
	my $scope = pick(@{ $self->{scopes} });
	my $what = pick_by_weight(INSERT => 5, UPDATE => 8, DELETE => 2, rename => 1, restore => 1, replicate => 2, TRUNCATE => 0.3);
	my $where = 'WHERE scope = ' . literal($scope);
	my $sql;

	if ($what eq 'INSERT') { $sql = $self->insert_policy($scope) }
	elsif ($what eq 'restore') { $sql = $self->insert_policy($scope, q('-infinity')) }
	elsif ($what eq 'replicate') { $sql = $self->replicate_policy($scope) }
	elsif ($what eq 'DELETE') { $sql = "DELETE FROM idem_scopes $where" }
	elsif ($what eq 'TRUNCATE') { $sql = 'TRUNCATE idem_scopes' }
	elsif ($what eq 'rename') { $sql = 'UPDATE idem_scopes SET scope = ' . literal(pick('s1', 's2', 's3')) . " $where" }
	else
	{
		$sql = 'UPDATE idem_scopes SET '
		  . join(', ', map { "$_ = " . $self->policy_value($_) } $self->policy_columns) . " $where";
	}
	$self->add($slot, "policy $what", 'policy', $sql, truncates => $what eq 'TRUNCATE');
	return;
}

sub add_initial_policy
{
	my ($self) = @_;

	return unless $self->{on}{policies} || $self->{on}{uuidv7};
	for my $scope (@{ $self->{scopes} })
	{
		my $sql = chance(0.7) ? $self->replicate_policy($scope) : $self->insert_policy($scope);
		$self->add(0, 'policy INSERT', 'policy', $sql) if chance(0.6);
	}
	return;
}

# ----- transactions -----

sub add_begin
{
	my ($self, $slot) = @_;
	my $mode = '';

	$mode = ' ISOLATION LEVEL ' . (chance(0.3) ? 'SERIALIZABLE' : 'REPEATABLE READ')
	  if $self->{on}{isolation} && chance(0.6);
	$mode .= ' READ ONLY' if $self->{on}{read_only} && chance(0.3);
	$self->add($slot, 'BEGIN', 'begin', "BEGIN$mode", snapshot => scalar($mode =~ /ISOLATION/));
	$self->{open}[$slot] = 1;
	$self->{savepoints}[$slot] = [];
	$self->{held}[$slot] = [];
	return;
}

sub add_end
{
	my ($self, $slot) = @_;

	$self->{open}[$slot] = 0;
	$self->{held}[$slot] = [];
	if ($self->{on}{two_phase} && chance(0.4))
	{
		$self->add($slot, 'PREPARE TRANSACTION', 'prepare', "PREPARE TRANSACTION '{{prepared " . pick(1, 2) . "}}'");
		return;
	}
	my $what = pick('COMMIT', 'COMMIT', 'COMMIT', 'ROLLBACK');
	my $chain = chance(0.1) ? ' AND CHAIN' : '';
	$self->add($slot, "$what$chain", 'end', "$what$chain");
	return;
}

sub add_finish
{
	my ($self, $slot) = @_;
	my $how = pick('COMMIT', 'COMMIT', 'ROLLBACK');

	$self->add($slot, "$how PREPARED", 'finish', "$how PREPARED '{{prepared " . pick(1, 2) . "}}'");
	return;
}

sub add_savepoint
{
	my ($self, $slot) = @_;
	my $names = $self->{savepoints}[$slot];
	my $what = pick('SAVEPOINT', 'SAVEPOINT', 'RELEASE', 'ROLLBACK TO', 'ROLLBACK TO');

	$what = 'SAVEPOINT' if !@$names && chance(0.98);
	my $name = $what eq 'SAVEPOINT' || !@$names || chance(0.03) ? pick('a', 'b') : pick(@$names);
	push @$names, $name if $what eq 'SAVEPOINT';
	if ($what ne 'SAVEPOINT')
	{
		pop @$names while @$names && $names->[-1] ne $name;
		pop @$names if $what eq 'RELEASE';
	}
	$self->add($slot, $what, $what eq 'ROLLBACK TO' ? 'undo' : 'savepoint', "$what $name");
	return;
}

sub add_step
{
	my ($self) = @_;
	my $on = $self->{on};
	my $slot = 1 + int rand $self->{sessions};
	my $open = $self->{open}[$slot];
	my $held = @{ $self->{held}[$slot] };
	my $lease = @{ $self->{leased} };
	my $key = chance(0.5) ? $self->{latest}[$slot] : undef;
	my $what = pick_by_weight(
		begin => $open ? 0.3 : 25,
		end => $open ? 8 : 0.5,
		savepoint => $open && $on->{savepoints} ? 12 : 0.3,
		finish => $on->{two_phase} ? 5 : 0,
		claim => 10,
		try_claim => $on->{leases} ? 8 : 22,
		lease => $on->{leases} ? 14 : 0,
		batch => $on->{batches} ? 6 : 0,
		idem_complete => $held ? 14 : $lease ? 6 : 1,
		idem_fail => $held ? 10 : $lease ? 4 : 1,
		idem_extend => $lease ? 6 : 0.3,
		idem_release => $lease ? 4 : 0.3,
		idem_fence => $lease ? 5 : 0.3,
		heal => $lease ? 4 : 0.3,
		idem_forget => $on->{forgetting} ? 4 : 0.2,
		reading => 10,
		fingerprint => 0.5,
		block => $on->{blocks} ? 4 : 0,
		cleanup => $on->{cleaning} ? 4 : 0.3,
		move => $on->{moves} ? 9 : 0,
		policy => $on->{policies} ? 7 : 0,
		cancel => $self->{sessions} > 1 ? 2 : 0,
	);
	$key //= pick(@{ $self->{keys} });
	# Most calls of holders, and most changes of time, are for leased keys.
	$key = pick(@{ $self->{leased} })->{key}
	  if @{ $self->{leased} } && $what =~ /^(?:move|heal|idem_extend|idem_release|idem_fence)$/ && chance(0.7);
	$self->{latest}[$slot] = $key if $what =~ /^(?:claim|try_claim|lease|block)$/;
	push @{ $self->{held}[$slot] }, $key if $open && $what =~ /^(?:claim|try_claim|lease)$/;

	if ($what eq 'begin') { $self->add_begin($slot) }
	elsif ($what eq 'end') { $self->add_end($slot) }
	elsif ($what eq 'savepoint') { $self->add_savepoint($slot) }
	elsif ($what eq 'finish') { $self->add_finish($slot) }
	elsif ($what eq 'claim') { $self->add_claim($slot, $key) }
	elsif ($what eq 'try_claim') { $self->add_try_claim($slot, $key) }
	elsif ($what eq 'lease') { $self->add_lease($slot, $key) }
	elsif ($what eq 'batch') { $self->add_batch($slot) }
	elsif ($what eq 'idem_complete' || $what eq 'idem_fail') { $self->add_settle($slot, $key, $what) }
	elsif ($what eq 'idem_extend') { $self->add_extend($slot, $key) }
	elsif ($what eq 'idem_release' || $what eq 'idem_fence') { $self->add_holders($slot, $key, $what) }
	elsif ($what eq 'heal') { $self->add_heal($slot, $key) }
	elsif ($what eq 'idem_forget') { $self->add_named(chance(0.2) ? 0 : $slot, $key, $what, 'settle') }
	elsif ($what eq 'reading')
	{
		my $function = pick('idem_result', 'idem_status', 'idem_lookup');
		if ($function ne 'idem_lookup' && chance($open ? 0.6 : 0.1))
		{
			$function = 'idem_outcome' if $function eq 'idem_status';
			$self->add($slot, "$function (latest)", 'read', "SELECT $function()");
		}
		else
		{
			$self->add_named($slot, $key, $function, 'read');
		}
	}
	elsif ($what eq 'fingerprint')
	{
		$self->add($slot, 'idem_fingerprint', 'read', 'SELECT idem_fingerprint(' . $self->jsonb . ')');
	}
	elsif ($what eq 'block') { $self->add_block($slot, $key) }
	elsif ($what eq 'cleanup') { $self->add_cleanup(chance(0.6) ? 0 : $slot) }
	elsif ($what eq 'move') { $self->add_move($key) }
	elsif ($what eq 'cancel')
	{
		$self->add(0, 'cancel', 'cancel', "SELECT pg_cancel_backend({{pid $slot}})", of => $slot);
	}
	elsif ($what eq 'policy') { $self->add_policy(chance(0.5) ? 0 : $slot) }
	return;
}

1;
