# Calls every function with random and extreme arguments, and looks for crashes and internal errors
#
# The functions come from the catalog, so a new one is called, too. Lengths, encodings, huge and
# deep jsonb, extreme times and intervals, arrays with NULLs, dimensions and bounds; inside
# transactions of all kinds, under random settings and policies. Any error is right but XX000 (an
# internal error) and its class; and no warning may tell of a leak.
#
# Random arguments alone are refused too early: part of the calls draw the key and token of a stored
# claim, and among the calls are lives of requests with valid arguments, of which no step may
# fail. Each public function must be seen to work.

use strict;
use warnings;

use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(time);
use POSIX ();

use Session;
use Torture;

my $seed = seed();
my $calls = quick_or_full(12_000, 1_000_000);
my $node = make_node('main', q{
shared_preload_libraries = 'idem'
idem.cleanup_interval = '50ms'
max_prepared_transactions = 10
fsync = off
restart_after_crash = off
log_error_verbosity = verbose
log_min_error_statement = panic
log_min_messages = warning
});
$node->start;
$node->safe_psql('postgres', 'CREATE ROLE fuzz_role');

# Encodings decide what a text can be. SQL_ASCII takes every byte.
my @databases;
for my $edition (qw(idem idem_portable))
{
	for my $encoding (qw(UTF8 SQL_ASCII LATIN1))
	{
		my $database = lc "${edition}_$encoding";
		$node->safe_psql('postgres', "CREATE DATABASE $database ENCODING $encoding LOCALE 'C' TEMPLATE template0");
		$node->safe_psql($database, qq{
			CREATE EXTENSION $edition;
			CREATE FUNCTION plus(a int, b int DEFAULT 1) RETURNS int LANGUAGE sql AS 'SELECT a + b';
			CREATE FUNCTION many(a text[], b jsonb, VARIADIC c numeric[]) RETURNS record LANGUAGE sql AS 'SELECT a, b, c';
			CREATE FUNCTION raises(a text) RETURNS void LANGUAGE plpgsql AS 'BEGIN RAISE EXCEPTION USING MESSAGE = a; END';
			CREATE FUNCTION nested(u text, r text) RETURNS boolean LANGUAGE sql AS 'SELECT idem_claim(u, r)';
			CREATE FUNCTION rows() RETURNS SETOF int LANGUAGE sql AS 'SELECT 1';
			CREATE FUNCTION any_type(a anyelement) RETURNS int LANGUAGE sql AS 'SELECT 1';
			INSERT INTO idem_scopes (scope, ttl) VALUES ('life', NULL), ('brief', '1 ms');
			CREATE TABLE life_sink (u text, r text);
			CREATE TRIGGER once BEFORE INSERT ON life_sink FOR EACH ROW EXECUTE FUNCTION idem_skip_duplicates('life', 'u', 'r');
			CREATE TABLE sink (a text, b uuid, c numeric, d timestamptz, e int GENERATED ALWAYS AS (1) STORED);
		});
		push @databases, $database;
	}
}

# ----- arguments -----

# Warnings of the server about what was not released
my $leaks = qr/leak|not closed|was not/;

my $raw = 0;		# may texts contain any byte?

sub pick { return $_[ rand @_ ] }

sub literal
{
	my ($value) = @_;
	return "E'" . $value =~ s/(['\\])/$1$1/gr . "'";
}

sub some_text
{
	my $kind = rand;

	return literal(pick(qw(u1 u2 r1 r2 r3))) if $kind < 0.6;
	return pick("''", "' '", "'NULL'", "repeat('x', 255)", "repeat('x', 256)", "repeat('x', 100000)", "E'\\t\\n'",
		"'{}'", "'%s'", "'\"'", "'pg_temp'", "E'\\\\'") if $kind < 0.75;
	return sprintf("'%08x-%04x-%x%03x-8000-000000000000'", rand 2**32, rand 2**16, rand 16, rand 2**12) if $kind < 0.85;
	return pick("upper('01a20305-7a52-7300-8fe1-00000fc14511')", "'ffffffff-ffff-7fff-bfff-ffffffffffff'", "'00000000-0000-7000-8000-000000000000'") if $kind < 0.9;
	return literal($raw ? join('', map { chr(1 + int rand 255) } 1 .. 1 + int rand 300) : join('', map { chr(1 + int rand 126) } 1 .. 1 + int rand 300));
}

my %make;
%make = (
	text => \&some_text,
	uuid => sub { literal(sprintf '%08x-%04x-%x%03x-%04x-%012x', rand 2**32, rand 2**16, pick(4, 7), rand 2**12, rand 2**16, rand 2**32) },
	bigint => sub { pick(0, 1, -1, 2, 3, 10, '9223372036854775807', '(-9223372036854775808)', '(SELECT max(token) FROM idem_claims)', int rand 1000) },
	integer => sub { pick(0, 1, -1, 2147483647, '(-2147483648)', 100, int rand 100000) },
	bytea => sub { pick("''", "'\\x00'", "sha256('a')", "decode(repeat('ab', 64), 'hex')", "decode(repeat('ab', 65), 'hex')", "decode(repeat('ab', 300000), 'hex')") },
	boolean => sub { pick('true', 'false') },
	interval => sub {
		literal(pick('0', '1 us', '-1 us', '1 ms', '10 ms', '1 s', '1 min', '1 month', '1 mon -30 days', '-1 mon 30 days', '1 day -24 hours',
				'178000000 years', '-178000000 years', '36500 days', '36501 days', '2147483647 days', '-2147483648 days',
				'2147483647 days 2562047788 hours', '2562047788 hours', '-2562047788 hours', 'infinity'));
	},
	'timestamp with time zone' => sub { literal(pick('-infinity', 'infinity', 'now', '294276-12-31 23:59:59+00', '4713-01-01 00:00:00+00 BC', '2000-01-01', 'tomorrow')) },
	jsonb => sub {
		my $kind = rand;
		return "'{\"a\": @{[int rand 3]}, \"b\": 2}'" if $kind < 0.3;
		return pick("'null'", "'{}'", "'[]'", "'1'", "'\"x\"'", "'1e131071'", "'-1e-16383'", "'1e400'", "'{\"a\": \"\\u0000\"}'", "'{\"a\": 1, \"a\": 2}'",
			"'{\"u\": \"u1\", \"r\": \"r1\"}'", "'{\"a\": null}'", "'{\"\": 1}'", "'{\"c\": [1e1000, null]}'", "'{\"a\": [[1, 2], [3]]}'", "'{\"a\": {\"b\": 1}}'",
			"'{\"a\": \"\\u00e9\\ud83d\\ude00\"}'") if $kind < 0.85;
		my $depth = pick(10, 1000, 3000, 10000);
		return pick("(repeat('[', $depth) || repeat(']', $depth))", "(repeat('{\"a\":', $depth) || '1' || repeat('}', $depth))", "to_jsonb(repeat('x', 1100000))",
			"(SELECT jsonb_object_agg(g, g) FROM generate_series(1, 3000) g)", "(SELECT jsonb_agg(g) FROM generate_series(1, 20000) g)");
	},
	regrole => sub { pick("'fuzz_role'", "'postgres'", '0', '4294967295', "'nobody_has_this_name'") },
	function => sub {
		pick("'plus(int, int)'", "'plus(int, int)'", "'many(text[], jsonb, numeric[])'", "'raises(text)'", "'nested(text, text)'", "'rows()'", "'any_type(anyelement)'",
			"'now()'", "'sum(int)'", "'rank()'", "'idem_claim(text, text, text, bytea, interval)'", "'idem__scopes_guard()'", "'idem_cleanup_all(int)'", '0', '4294967295', "'no_such()'");
	});

sub value
{
	my ($type) = @_;

	return 'NULL::' . ($type eq 'function' ? 'text' : $type) if rand() < 0.08;
	if ($type =~ /^(.*)\[\]$/)
	{
		my $element = $1;
		my $kind = rand;
		my $list = sub { join ', ', map { value($element) } 1 .. $_[0] };

		return "'{}'::$type" if $kind < 0.05;
		return "ARRAY[" . $list->(1 + int rand 4) . "]::$type" if $kind < 0.7;
		return "ARRAY[ARRAY[" . $list->(2) . "], ARRAY[" . $list->(2) . "]]::$type" if $kind < 0.78;
		return "'[5:6]={a,b}'::$type" if $kind < 0.85;
		return "array_fill(" . value($element) . ", ARRAY[@{[pick(0, 1, 70, 1500)]}])::$type" if $kind < 0.95;
		return "ARRAY(SELECT g::text FROM generate_series(1, @{[pick(63, 64, 65, 200, 1500)]}) g)::$type";
	}
	return ($make{$type} ? $make{$type}->() : 'NULL') . '::' . ($type eq 'function' ? 'text' : $type);
}

# ----- statements -----

# A value that is right for most arguments of the type
sub plain_value
{
	my ($type) = @_;
	my %plain = (jsonb => q('{"a": 1}'), interval => q('1 min'), integer => '10', bytea => q('\\x01'), boolean => 'true', text => q(''));

	return $plain{$type} && rand() < 0.7 ? "$plain{$type}::$type" : value($type);
}

# wait is short: the lease that is drawn may be live.
my %column_of = (wait => "'10 ms'", map { $_ => "claim.$_" } qw(user_id request_id scope token));

# A call with the key and token of a stored claim, mostly of a lease. Its first column is NULL if
# there is none.
sub call_of_claim
{
	my ($function) = @_;
	my @types = @{ $function->{types} };
	my $where = rand() < 0.8 ? "WHERE state = 'in_progress'" : '';
	my $arguments = join ', ', map { $column_of{ $function->{arguments}[$_] } // plain_value($types[$_]) } 0 .. $#types;

	return "SELECT claim.request_id, $function->{name}($arguments) FROM (SELECT) AS one LEFT JOIN (SELECT * FROM idem_claims $where OFFSET "
	  . pick(0, 0, 1, 2) . ' LIMIT 1) AS claim ON true';
}

# Returns the function, too
sub random_call
{
	my ($functions) = @_;
	my $kind = rand() < 0.97 ? 'public' : 'internal';
	my @among = grep { $_->{is_public} == ($kind eq 'public') } @$functions;
	@among = @$functions if !@among;
	my $function = pick(@among);
	my @types = @{ $function->{types} };

	return (call_of_claim($function), $function) if $function->{takes_key} && rand() < 0.4;
	my $given = @types - int rand($function->{defaults} + 1);
	my $arguments = join ', ', map { value($_) } @types[ 0 .. $given - 1 ];

	return ("CALL $function->{name}($arguments)", $function) if $function->{kind} eq 'p';
	return ((rand() < 0.9 ? 'SELECT *' : 'SELECT count(*)') . " FROM $function->{name}($arguments)", $function) if rand() < 0.5;
	return ("SELECT $function->{name}($arguments)", $function);
}

sub random_statement
{
	my ($functions, $views) = @_;
	my $kind = rand;

	return random_call($functions) if $kind < 0.88;
	return 'SELECT * FROM ' . pick(@$views) if $kind < 0.90;
	return 'SET idem.wait = ' . pick('0', '20', "'1ms'", "'-1'", "'2147483647'", 'DEFAULT') if $kind < 0.91;
	return 'SET ' . pick('idem.ttl', 'idem.lease', 'idem.lease_max', 'idem.result_max_bytes', 'idem.scopes') . ' = '
	  . pick("'1s'", "'1000d'", 'DEFAULT', "'declared'", "'1kB'", "'255MB'", "'0'") if $kind < 0.925;
	return 'INSERT INTO idem_scopes (scope, ttl, lease, lease_max, failed, lapsed, expired, key_time, result_max_bytes) VALUES ('
	  . join(', ', value('text'), value('interval'), value('interval'), value('interval'), literal(pick(qw(terminal retryable))), literal(pick(qw(reclaim unknown))),
		literal(pick(qw(protect reclaim))), literal(pick(qw(any any uuidv7))), value('integer')) . ') ON CONFLICT (scope) DO UPDATE SET ttl = excluded.ttl, lapsed = excluded.lapsed'
	  if $kind < 0.95;
	return 'CREATE TRIGGER once BEFORE ' . pick('INSERT', 'INSERT OR UPDATE', 'UPDATE') . ' ON sink FOR EACH ' . pick('ROW', 'ROW', 'STATEMENT') . ' EXECUTE FUNCTION idem_skip_duplicates('
	  . join(', ', map { literal(pick(qw(a b c d e x), '', 's')) } 1 .. pick(1, 2, 3, 3, 3, 4)) . ')' if $kind < 0.965;
	return 'INSERT INTO sink (a, b, c, d) SELECT ' . join(', ', value('text'), value('uuid'), value('bigint'), value('timestamp with time zone')) . " FROM generate_series(1, @{[pick(1, 3)]})" if $kind < 0.98;
	return pick('SAVEPOINT s', 'ROLLBACK TO s', 'RELEASE s', 'SET TRANSACTION READ ONLY', 'SET CONSTRAINTS ALL IMMEDIATE', "PREPARE TRANSACTION 'fuzz'", 'DISCARD ALL');
}

# Valid calls, in their order; [ function => statement ]. Leases remain for random calls to draw.
sub life
{
	my ($n, $functions) = @_;
	my $key = sub { "'life', '$n $_[0]'" };
	my $of = sub { "FROM idem_claims WHERE request_id = '$n $_[0]' AND user_id = 'life' AND scope = 'life'" };
	my $lease = sub { [ idem_lease => 'SELECT * FROM idem_lease(' . $key->($_[0]) . ", '$_[1]', 'life')" ] };
	my %has = map { $_->{short} => 1 } @$functions;

	return grep { !$_->[0] || $has{ $_->[0] } } (
		[ '' => 'RESET ALL' ], [ '' => q(SET statement_timeout = '60s') ], [ '' => q(SET lock_timeout = '60s') ],
		# For the worker
		[ idem_claim => "SELECT idem_claim(@{[$key->('w')]}, 'brief')" ],
		[ '' => 'BEGIN' ], [ idem_claim => "SELECT idem_claim(@{[$key->('a')]}, 'life')" ], [ idem_complete => q(SELECT idem_complete('{"a": 1}')) ],
		[ idem_outcome => 'SELECT idem_outcome()' ], [ idem_result => 'SELECT idem_result()' ], [ '' => 'COMMIT' ],
		[ '' => 'BEGIN' ], [ idem_claim => "SELECT idem_claim(@{[$key->('b')]}, 'life')" ], [ idem_fail => q(SELECT idem_fail('{"e": 1}')) ], [ '' => 'COMMIT' ],
		[ idem_try_claim => "SELECT * FROM idem_try_claim(@{[$key->('t')]}, 'life')" ],
		[ idem_claim => "SELECT idem_claim(1::bigint, '$n n', 'life'), idem_claim('11111111-1111-4111-8111-111111111111'::uuid, '$n n', 'life')" ],
		[ idem_status => "SELECT idem_status(@{[$key->('a')]}, 'life')" ], [ idem_result => "SELECT idem_result(@{[$key->('a')]}, 'life')" ],
		[ idem_lookup => "SELECT idem_lookup(@{[$key->('a')]}, 'life')" ], [ idem_forget => "SELECT idem_forget(@{[$key->('a')]}, 'life')" ],
		$lease->('c', '10 min'), [ idem_extend => "SELECT idem_extend(@{[$key->('c')]}, token, '9 min', '1', 'life') @{[$of->('c')]}" ],
		[ idem_fence => "SELECT idem_fence(@{[$key->('c')]}, token, 'life') @{[$of->('c')]}" ],
		[ idem_complete => "SELECT idem_complete(@{[$key->('c')]}, '1', token, 'life') @{[$of->('c')]}" ],
		$lease->('d', '10 min'), [ idem_fail => "SELECT idem_fail(@{[$key->('d')]}, '1', token, 'life') @{[$of->('d')]}" ],
		$lease->('e', '10 min'), [ idem_release => "SELECT idem_release(@{[$key->('e')]}, token, 'life') @{[$of->('e')]}" ],
		$lease->('f', '1 ms'), [ '' => 'SELECT pg_sleep(0.002)' ], [ idem_lapsed => "SELECT * FROM idem_lapsed('life', 10)" ],
		[ idem_heal => "SELECT idem_heal(@{[$key->('f')]}, '1', 'life')" ],
		(map { $lease->("g$_", '10 min') } 1 .. 3),
		[ idem_claim_many => "SELECT * FROM idem_claim_many('{life,life}', '{$n m,$n m}', 'life')" ],
		[ idem_call => "SELECT idem_call(@{[$key->('h')]}, 'plus(int, int)', '{\"a\": 1}', 'life')" ],
		[ '' => 'BEGIN' ], [ idem_claim => "SELECT idem_claim(@{[$key->('i')]}, 'life')" ],
		[ idem__call_settle => "SELECT idem__call_settle(@{[$key->('i')]}, '1', 'life')" ], [ '' => 'COMMIT' ],
		[ '' => "INSERT INTO life_sink VALUES ('u', '$n'), ('u', '$n')" ],
		[ idem_fingerprint => q(SELECT idem_fingerprint('{"a": 1}')) ],
		[ idem_cleanup => 'SELECT idem_cleanup(100)' ], [ idem__cleanup_step => "SELECT * FROM idem__cleanup_step(100, NULL, now())" ],
		[ idem_cleanup_all => 'CALL idem_cleanup_all(100)' ],
		[ idem_grant => "SELECT idem_grant('fuzz_role', 'app')" ], [ idem_revoke => "SELECT idem_revoke('fuzz_role', 'app')" ],
		[ idem__change_rights => "SELECT idem__change_rights('fuzz_role', 'operator', 'GRANT %s TO %s')" ],
		# Functions of views, and others without arguments
		(map { [ $_ => "SELECT * FROM $_()" ] } grep { /^idem_(?:stat_|unsettled_|held_|start_)/ } sort keys %has),
		[ '' => 'RESET ALL' ]);
}

# Returns what is wrong with the answer, if anything. function: the public function that it calls
sub run_statement
{
	my ($session, $sql, $states, $function) = @_;
	my $ok = eval {
		$session->send($sql);
		$session->flush;
		$session->read while $session->{pending};
		1;
	};

	return 'connection lost: ' . ($session->{reply}{error}{M} // $@) if !$ok;
	my $reply = shift @{ $session->{replies} };
	my $error = $session->{error} = $reply->{error};
	my ($leak) = grep { /$leaks/ } map { $_->{M} } grep { $_->{V} eq 'WARNING' } @{ $reply->{notices} };
	$states->{ $error ? $error->{C} : 'success' }++;
	if ($function)
	{
		# It is not called where a NULL is passed to a strict function, nor where there is no claim.
		my $is_called = $sql !~ /NULL::/ && ($sql !~ /^SELECT claim\./ || defined $reply->{rows}[0][0]);
		$states->{"call $function"}++;
		$states->{"done $function"} += !$error && $is_called;
	}
	return "WARNING $leak" if $leak;
	return $error && $error->{C} =~ /^(XX|P0004|58)/ ? "$error->{C} $error->{M}" : undef;
}

# Likewise, and each statement must succeed.
sub run_life
{
	my ($session, $states, @statements) = @_;

	for (@statements)
	{
		my ($function, $sql) = @$_;
		my $wrong = run_statement($session, $sql, $states, $function);
		$wrong //= "$session->{error}{C} $session->{error}{M}" if $session->{error};
		return "life of a request: $wrong\n$sql" if $wrong;
	}
	return '';
}

sub client
{
	my ($number, $count, $file) = @_;
	my $database = $databases[ $number % @databases ];
	my ($done, $wrong, $lives, %states, @functions, @views) = (0, '', 0);
	my $session = connect_to($database);

	srand($seed * 1000 + $number);
	$raw = $database !~ /utf8/;
	for my $row (@{ $session->ask(q{
			SELECT n.nspname || '.' || p.proname, p.prokind, p.pronargdefaults,
				(SELECT string_agg(format_type(t, NULL), ',' ORDER BY o) FROM unnest(p.proargtypes) WITH ORDINALITY AS a (t, o)),
				p.proname, p.prorettype = 'trigger'::regtype, array_to_string(p.proargnames, ',')
			FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace
				JOIN pg_depend d ON d.classid = 'pg_proc'::regclass AND d.objid = p.oid AND d.deptype = 'e'
				JOIN pg_extension e ON e.oid = d.refobjid AND e.extname ~ '^idem'
			ORDER BY p.oid::regprocedure::text COLLATE "C"})->{rows} })
	{
		my @types = split /,/, $row->[3] // '';
		my @names = (split /,/, $row->[6] // '')[ 0 .. $#types ];
		# The text that names a function has values of its own.
		@types = map { ($names[$_] // '') eq 'function' ? 'function' : $types[$_] } 0 .. $#types;
		push @functions, {
			name => $row->[0], kind => $row->[1], defaults => $row->[2], types => \@types, short => $row->[4], arguments => \@names,
			takes_key => scalar(grep { ($_ // '') eq 'request_id' } @names) && !grep({ $_ eq 'uuid' } @types),
			is_public => $row->[4] !~ /^idem__/ && $row->[5] eq 'f' };
	}
	@views = map { $_->[0] } @{ $session->ask(q{
			SELECT c.oid::regclass FROM pg_class c JOIN pg_depend d ON d.objid = c.oid AND d.deptype = 'e' AND d.refclassid = 'pg_extension'::regclass
			WHERE relkind = 'v' ORDER BY 1})->{rows} };
	$states{functions} = @functions;
	$states{"call $_->{short}"} += 0, $states{"done $_->{short}"} += 0 for grep { $_->{is_public} } @functions;
	while ($done < $count && !$wrong)
	{
		if ($lives == 0 || rand() < 0.01)
		{
			my @life = life($lives++, \@functions);
			$wrong = run_life($session, \%states, @life);
			$wrong &&= "$database: $wrong";
			$done += @life;
			next;
		}
		my @statements = map { [ random_statement(\@functions, \@views) ] } 1 .. 1 + int rand 6;
		my @transaction = rand() < 0.6
		  ? ([ pick('BEGIN', 'BEGIN', 'BEGIN ISOLATION LEVEL REPEATABLE READ', 'BEGIN ISOLATION LEVEL SERIALIZABLE', 'BEGIN READ ONLY') ],
			@statements, [ pick('COMMIT', 'COMMIT', 'ROLLBACK') ])
		  : @statements;
		for (@transaction)
		{
			my ($sql, $function) = @$_;
			# Nothing but an end is possible now; or go on from the savepoint, if there is one.
			last if $session->{status} eq 'E' && rand() < 0.9;
			$wrong = run_statement($session, $sql, \%states, $function && $function->{is_public} ? $function->{short} : '') // '';
			$done++;
			if ($wrong)
			{
				$wrong = "$database: $wrong\n" . join(";\n", map { substr $_->[0], 0, 3000 } @transaction);
				last;
			}
		}
		run_statement($session, 'ROLLBACK', {}) if $session->{status} ne 'I';
		run_statement($session, "ROLLBACK PREPARED 'fuzz'", {}) if grep { $_->[0] =~ /^PREPARE TRANS/ } @transaction;
	}
	append_to_file($file, join("\n", $wrong =~ s/\n/\\n/gr, map { "$_ $states{$_}" } sort keys %states) . "\n");
	return;
}

sub connect_to
{
	my ($database) = @_;
	local %ENV = (%ENV, PGHOST => $node->host, PGPORT => $node->port);

	return Session->new($database, client_encoding => $database =~ /utf8/ ? 'UTF8' : $database =~ /latin1/ ? 'LATIN1' : 'SQL_ASCII',
		'idem.wait' => '20ms', statement_timeout => '3s', lock_timeout => '1s', deadlock_timeout => '50ms', log_min_messages => 'fatal');
}

# ----- run -----

my $folder = PostgreSQL::Test::Utils::tempdir();
my @pids;
for my $number (0 .. @databases - 1)
{
	my $pid = fork // die "fork: $!";
	if ($pid == 0)
	{
		$SIG{PIPE} = 'IGNORE';
		eval { client($number, $calls / @databases, "$folder/$number"); 1 } or append_to_file("$folder/$number", "died: $@");
		POSIX::_exit(0);
	}
	push @pids, $pid;
}
waitpid($_, 0) for @pids;

my (%states, %called, %done);
for my $number (0 .. @databases - 1)
{
	my ($wrong, @counts) = split /\n/, slurp_file("$folder/$number");
	is($wrong =~ s/\\n/\n/gr, '', "$databases[$number]: no crash, no internal error, no leak");
	my $edition = $number < @databases / 2 ? 'idem' : 'idem_portable';
	for (@counts)
	{
		my ($state, $function, $count) = /^(?:(call|done) )?(\S+) (\d+)$/;
		if (!$state) { $states{$function} += $count }
		elsif ($state eq 'call') { $called{"$edition: $function"} += $count }
		else { $done{"$edition: $function"} += $count }
	}
}
my $functions = delete $states{functions};
my ($sum, $calls_sent, $calls_done) = (0, 0, 0);
$sum += $_ for values %states;
$calls_sent += $_ for values %called;
$calls_done += $_ for values %done;
figure('statements', "$sum; $functions functions in " . @databases . ' databases');
figure('calls of ' . (scalar keys %called) . ' public functions', "$calls_sent, of them $calls_done without an error");
figure('errors', join ', ', map { "$_ $states{$_}" } grep { $_ ne 'success' } sort { $states{$b} <=> $states{$a} } keys %states);
cmp_ok($sum, '>=', $calls, 'all were sent');
cmp_ok($calls_done, '>', $calls_sent / 10, 'many calls got behind the checks of arguments');
note "$_: $done{$_} of $called{$_}" for sort keys %called;
cmp_ok(scalar keys %called, '>', 40, 'public functions were found');
is(join(', ', grep { !$done{$_} } sort keys %called), '', 'each public function was called without an error');
# The worker logs a leak when it commits what it removed.
for my $database (grep { !/portable/ } @databases)
{
	ok($node->poll_query_until($database, q{SELECT NOT EXISTS (SELECT FROM idem_claims WHERE scope = 'brief')}), "$database: the worker has cleaned");
}
is(faults_in($node), '', 'the log of the server has no fault');
for my $database (@databases)
{
	is($node->safe_psql($database, q{
			CREATE EXTENSION amcheck;
			SELECT count(*) FROM verify_heapam('idem_claims');
			SELECT bt_index_check(indexrelid, true) FROM pg_index WHERE indrelid = 'idem_claims'::regclass}) =~ s/\n//gr,
		'0', "$database: the table is in order");
}
$node->stop;
done_testing();
