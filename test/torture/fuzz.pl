# Calls every function with random and extreme arguments, and looks for crashes and internal errors
#
# The functions come from the catalog, so a new one is called, too. Lengths, encodings, huge and
# deep jsonb, extreme times and intervals, arrays with NULLs, dimensions and bounds; inside
# transactions of all kinds, under random settings and policies. Any error is right but XX000 (an
# internal error) and its class.

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
log_min_messages = error
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
			CREATE TABLE sink (a text, b uuid, c numeric, d timestamptz, e int GENERATED ALWAYS AS (1) STORED);
		});
		push @databases, $database;
	}
}

# ----- arguments -----

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
	regprocedure => sub {
		pick("'plus(int, int)'", "'plus(int, int)'", "'many(text[], jsonb, numeric[])'", "'raises(text)'", "'nested(text, text)'", "'rows()'", "'any_type(anyelement)'",
			"'now()'", "'sum(int)'", "'rank()'", "'idem_claim(text, text, text, bytea, interval)'", "'idem_scopes_guard()'", "'idem_cleanup_all(int)'", '0', '4294967295', "'no_such()'");
	});

sub value
{
	my ($type) = @_;

	return "NULL::$type" if rand() < 0.08;
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
	return ($make{$type} ? $make{$type}->() : 'NULL') . "::$type";
}

# ----- statements -----

sub random_call
{
	my ($functions) = @_;
	my $function = $functions->[ rand @$functions ];
	my @types = @{ $function->{types} };
	my $given = @types - int rand($function->{defaults} + 1);
	my $arguments = join ', ', map { value($_) } @types[ 0 .. $given - 1 ];

	return "CALL $function->{name}($arguments)" if $function->{kind} eq 'p';
	return (rand() < 0.9 ? 'SELECT' : 'SELECT count(*)') . " FROM $function->{name}($arguments)" if rand() < 0.5;
	return "SELECT $function->{name}($arguments)";
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

# Returns what is wrong with the answer, if anything
sub run_statement
{
	my ($session, $sql, $states) = @_;
	my $ok = eval {
		$session->send($sql);
		$session->flush;
		$session->read while $session->{pending};
		1;
	};

	return 'connection lost: ' . ($session->{reply}{error}{M} // $@) if !$ok;
	my $error = (shift @{ $session->{replies} })->{error};
	$states->{ $error ? $error->{C} : 'success' }++;
	return $error && $error->{C} =~ /^(XX|P0004|58)/ ? "$error->{C} $error->{M}" : undef;
}

sub client
{
	my ($number, $count, $file) = @_;
	my $database = $databases[ $number % @databases ];
	my ($done, $wrong, %states, @functions, @views) = (0, '');
	my $session = connect_to($database);

	srand($seed * 1000 + $number);
	$raw = $database !~ /utf8/;
	for my $row (@{ $session->ask(q{
			SELECT n.nspname || '.' || p.proname, p.prokind, p.pronargdefaults,
				(SELECT string_agg(format_type(t, NULL), ',' ORDER BY o) FROM unnest(p.proargtypes) WITH ORDINALITY AS a (t, o))
			FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace
				JOIN pg_depend d ON d.classid = 'pg_proc'::regclass AND d.objid = p.oid AND d.deptype = 'e'
				JOIN pg_extension e ON e.oid = d.refobjid AND e.extname ~ '^idem'
			ORDER BY p.oid::regprocedure::text COLLATE "C"})->{rows} })
	{
		push @functions, { name => $row->[0], kind => $row->[1], defaults => $row->[2], types => [ split /,/, $row->[3] // '' ] };
	}
	@views = map { $_->[0] } @{ $session->ask(q{
			SELECT c.oid::regclass FROM pg_class c JOIN pg_depend d ON d.objid = c.oid AND d.deptype = 'e' AND d.refclassid = 'pg_extension'::regclass
			WHERE relkind = 'v' ORDER BY 1})->{rows} };
	$states{functions} = @functions;
	while ($done < $count && !$wrong)
	{
		my @statements = map { random_statement(\@functions, \@views) } 1 .. 1 + int rand 6;
		my @transaction = rand() < 0.6
		  ? (pick('BEGIN', 'BEGIN', 'BEGIN ISOLATION LEVEL REPEATABLE READ', 'BEGIN ISOLATION LEVEL SERIALIZABLE', 'BEGIN READ ONLY'),
			@statements, pick('COMMIT', 'COMMIT', 'ROLLBACK'))
		  : @statements;
		for my $sql (@transaction)
		{
			# Nothing but an end is possible now; or go on from the savepoint, if there is one.
			last if $session->{status} eq 'E' && rand() < 0.9;
			$wrong = run_statement($session, $sql, \%states) // '';
			$done++;
			if ($wrong)
			{
				$wrong = "$database: $wrong\n" . join(";\n", map { substr $_, 0, 3000 } @transaction);
				last;
			}
		}
		run_statement($session, 'ROLLBACK', {}) if $session->{status} ne 'I';
		run_statement($session, "ROLLBACK PREPARED 'fuzz'", {}) if grep { /^PREPARE TRANS/ } @transaction;
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

my %states;
for my $number (0 .. @databases - 1)
{
	my ($wrong, @counts) = split /\n/, slurp_file("$folder/$number");
	is($wrong =~ s/\\n/\n/gr, '', "$databases[$number]: no crash and no internal error");
	for (@counts)
	{
		my ($state, $count) = split / /;
		$states{$state} += $count;
	}
}
my $functions = delete $states{functions};
my $sum = 0;
$sum += $_ for values %states;
figure('statements', "$sum, of them $states{success} without an error; $functions functions in " . @databases . ' databases');
figure('errors', join ', ', map { "$_ $states{$_}" } grep { $_ ne 'success' } sort { $states{$b} <=> $states{$a} } keys %states);
cmp_ok($sum, '>=', $calls, 'all were sent');
cmp_ok($states{success}, '>', $sum / 10, 'many of them got behind the checks of arguments');
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
