# Makes each allocation, lock, read, write and call fail in turn, and looks for leaks and wrong claims
#
# fail.c is loaded into the server; idem itself is not changed. Each scenario is a statement. Its
# first point fails, then the second, and so on to the last one; quick takes some of them by chance.
# Each time:
#
#	- the error is the one that was injected, or the statement has its usual answer;
#	- after the rollback the session has no lock, snapshot, transaction id nor place in the list of
#	  waiters, and the tables say what they said before;
#	- the same statement in the same session has the answer that it has without a failure, and
#	  work and claims agree;
#	- the server's log has no warning of something that was not given back, and no crash. Run it on
#	  a server with assertions, too: it checks pins at the end of each transaction.
#
# Forms: the statement "alone", in its own transaction, with its commit; in a "transaction" with
# work; in a "savepoint" of a transaction that goes on. "full" takes all points of a call, an
# allocation, a read and a write in the second and third, except that of a batch, whose points repeat
# for each key, and of the first claim of a session it takes some hundreds; of cancels, of ends of
# sessions, and of the portable edition's allocations a sample.
#
# Not tried: a second failure while the server handles the first one, failures of the server's own
# commit and abort, and those in critical sections, which end the server by design.

use strict;
use warnings;

use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(time sleep);

use Session;
use Torture;

my $seed = seed();
my $full = is_full();

# For those who work on this test: which scenarios, how many points of each, which parts
my $only = $ENV{ERRORS_SCENARIO} // '';
my $most = $ENV{ERRORS_SAMPLE};
my $part = $ENV{ERRORS_PART} // '(c|memory|portable|worker)';

# ----- the server -----

my ($compiler, $headers) = map { my $answer = `pg_config $_`; chomp $answer; $answer } '--cc', '--includedir-server';
my $library = PostgreSQL::Test::Utils::tempdir() . '/fail.so';

if (`uname -m` ne "x86_64\n")
{
	plan skip_all => 'fail.c is tested on x86-64 only';
}
is(system("$compiler -O1 -g -Wall -fPIC -shared -I '$headers' -o '$library' test/torture/fail.c"), 0, 'compiled');

my $node = make_node('main', qq{
shared_preload_libraries = 'idem,$library'
shared_buffers = '512kB'
idem.cleanup_databases = 'cleaned'
idem.cleanup_interval = '100ms'
max_prepared_transactions = 10
fsync = off
autovacuum = off
restart_after_crash = off
jit = off
deadlock_timeout = '200ms'
log_error_verbosity = verbose
log_min_error_statement = panic
log_statement = none
log_min_messages = warning
});
$node->append_conf('postgresql.conf', 'io_method = sync') if `pg_config --version` =~ /PostgreSQL (1[89]|2)/;
$node->start;

sub functions
{
	return join '', map { "CREATE FUNCTION $_ LANGUAGE c AS '$library';\n" }
	  "fail_arm(text, bigint, text DEFAULT '') RETURNS void", 'fail_fired() RETURNS text', 'fail_seen() RETURNS bigint',
	  'fail_arm_worker(text, text, bigint) RETURNS void', 'fail_worker_fired() RETURNS text',
	  'fail_calls_too_late() RETURNS text', 'fail_evict() RETURNS void';
}

my %extension = (c => 'idem', portable => 'idem_portable', cleaned => 'idem');
for my $database (sort keys %extension)
{
	$node->safe_psql('postgres', "CREATE DATABASE $database");
	$node->safe_psql($database, "CREATE EXTENSION $extension{$database};" . functions() . q{
		CREATE TABLE work (id text);
		CREATE INDEX ON work (id);
		CREATE FUNCTION pay(k text) RETURNS jsonb LANGUAGE plpgsql AS $$BEGIN INSERT INTO work VALUES (k || '-paid'); RETURN '{"paid": true}'; END$$;
		CREATE TABLE sink (request text, amount int);
		CREATE TRIGGER once BEFORE INSERT ON sink FOR EACH ROW EXECUTE FUNCTION idem_skip_duplicates('sink', 'request', 'request');
		CREATE TABLE parts (request text, part int) PARTITION BY LIST (part);
		CREATE TABLE part1 PARTITION OF parts FOR VALUES IN (1);
		CREATE TABLE part2 PARTITION OF parts FOR VALUES IN (2);
		CREATE TRIGGER once BEFORE INSERT OR DELETE ON parts FOR EACH ROW EXECUTE FUNCTION idem_skip_duplicates('parts', 'request', 'request');
		CREATE TABLE filler AS SELECT g FROM generate_series(1, 1000) g;
		INSERT INTO idem_scopes (scope, ttl, lapsed) VALUES ('declared', '1 day', 'reclaim'), ('careful', '1 day', 'unknown');
		INSERT INTO idem_scopes (scope, ttl, failed) VALUES ('retry', '1 day', 'retryable');
		INSERT INTO idem_scopes (scope, ttl, key_time) VALUES ('timed', '1 day', 'uuidv7');
		INSERT INTO idem_scopes (scope, ttl, expired) VALUES ('reclaims', '1 s', 'reclaim');
	});
}

# ----- sessions -----

my ($victim, $judge, $holder);
my $database = 'c';

sub connect_to
{
	my ($name) = @_;
	local %ENV = (%ENV, PGHOST => $node->host, PGPORT => $node->port);

	return Session->new($database, application_name => $name, client_min_messages => 'warning');
}

# The replies to statements that are sent one after the other
sub exchange
{
	my ($session, @statements) = @_;

	local $SIG{ALRM} = sub { die "no answer after a minute to: @statements\n" };
	alarm 60;
	$session->send($_) for @statements;
	$session->flush;
	$session->read while $session->{pending};
	alarm 0;
	return splice @{ $session->{replies} };
}

sub text_of
{
	my ($reply) = @_;

	return "$reply->{error}{C}" if $reply->{error};
	return join ';', map { join '|', map { $_ // '' } @$_ } @{ $reply->{rows} };
}

# For what must succeed
sub ask
{
	my ($session, $sql) = @_;
	my ($reply) = exchange($session, $sql);

	die "$sql: $reply->{error}{C} $reply->{error}{M}\n" if $reply->{error};
	return text_of($reply);
}

# ----- scenarios -----
#
# :k stands for a new request id, :token for the token that "setup" has returned.
#
#	setup	a transaction before it, of another session; its last answer is the token
#	hold	what a third session does, and keeps open, while all points are tried
#	before	statements in the transaction before the one that fails, before the savepoint
#	sql		the statement that fails
#	ends	it ends the transaction, and this follows

my $many = q{array(SELECT 'u' FROM generate_series(1, 130)), array(SELECT ':k-' || to_char(g, 'FM000') FROM generate_series(1, 130) g)};
my $lease = q{SELECT token FROM idem_lease('u', ':k', lease => '1 min', progress => '{"p": 1}')};
my $lapsed = q{SELECT token FROM idem_lease('u', ':k', lease => '1 ms', progress => '{"p": 1}')};
my $try = q{SELECT outcome, result, progress FROM idem_try_claim('u', ':k'};
my $take = q{SELECT outcome, result, progress, token IS NULL FROM idem_lease('u', ':k', '1 min'};
my $expired = q{DELETE FROM idem_claims WHERE expires_at < now() OR scope = 'reclaims'; INSERT INTO idem_claims (expires_at, state, request_id, user_id, scope) SELECT now() - interval '1 h', 'completed', ':k-' || g, 'u', '' FROM generate_series(1, 20) g};

my @scenarios = (
	{ name => 'claim', sql => q{SELECT idem_claim('u', ':k')} },
	{ name => 'claim with all arguments', sql => qq{$try, 'declared', '\\x0102', '1 s')} },
	{ name => 'claim, serializable', begin => 'BEGIN ISOLATION LEVEL SERIALIZABLE', sql => q{SELECT idem_claim('u', ':k')} },
	{ name => 'first claim of a session', sql => q{SELECT idem_claim('u', ':k')}, reconnect => 1 },
	{ name => 'claim after a change of policy', setup => q{UPDATE idem_scopes SET ttl = ttl WHERE scope = 'declared'}, sql => q{SELECT idem_claim('u', ':k', 'declared')} },
	{ name => 'claim after DDL', setup => q{ALTER TABLE idem_claims ALTER COLUMN user_id SET STATISTICS 100}, sql => q{SELECT idem_claim('u', ':k')} },
	{ name => 'claim with an index of a user', setup_once => q{CREATE INDEX user_index ON idem_claims (length(user_id))}, after => 'DROP INDEX user_index', sql => q{SELECT idem_claim('u', ':k')} },
	{ name => 'duplicate', setup => q{SELECT idem_claim('u', ':k'), idem_complete('{"a": 1}')}, sql => "$try)" },
	{ name => 'duplicate, repeatable read', begin => 'BEGIN ISOLATION LEVEL REPEATABLE READ', setup => q{SELECT idem_claim('u', ':k'), idem_complete('{"a": 1}')}, sql => "$try)" },
	{ name => 'mismatch', setup => q{SELECT idem_claim('u', ':k', '', '\x01')}, sql => q{SELECT idem_claim('u', ':k', '', '\x02')}, raises => 'ID422' },
	{ name => 'stale', sql => qq{$try, 'timed')} },
	{ name => 'claim of an expired key', setup => q{INSERT INTO idem_claims (expires_at, state, request_id, user_id, scope) VALUES (now() - interval '1 h', 'completed', ':k', 'u', 'reclaims')}, sql => qq{$try, 'reclaims')} },
	{ name => 'lease', sql => qq{$take, progress => '{"q": 2}')} },
	{ name => 'live lease', setup => $lease, sql => qq{$try, wait => '0')} },
	{ name => 'take-over of a lapsed lease', setup => $lapsed, sql => qq{$take)} },
	{ name => 'take-over by a transaction', setup => $lapsed, sql => "$try)" },
	{ name => 'unknown', setup => q{SELECT token FROM idem_lease('u', ':k', scope => 'careful', lease => '1 ms')}, sql => qq{$try, 'careful')} },
	{ name => 'retry of a failed request', setup => q{SELECT idem_claim('u', ':k', 'retry'), idem_fail('{"e": 1}')}, sql => qq{$try, 'retry')} },
	{ name => 'complete', before => [q{SELECT idem_claim('u', ':k')}], sql => q{SELECT idem_complete('u', ':k', '{"r": 1}')} },
	{ name => 'complete, one of many', before => [qq{SELECT count(*) FROM idem_claim_many($many)}], sql => q{SELECT idem_complete('u', ':k-129', '{"r": 1}')} },
	{ name => 'fail', before => [q{SELECT idem_claim('u', ':k')}], sql => q{SELECT idem_fail('u', ':k', '{"r": 1}')} },
	{ name => 'complete a lease', setup => $lease, sql => q{SELECT idem_complete('u', ':k', jsonb_build_object('r', repeat('x', 5000)), :token)} },
	{ name => 'extend', setup => $lease, sql => q{SELECT idem_extend('u', ':k', :token, '2 min', '{"p": 3}') IS NULL} },
	{ name => 'release', setup => $lease, sql => q{SELECT idem_release('u', ':k', :token)} },
	{ name => 'fence', setup => $lease, sql => q{SELECT idem_fence('u', ':k', :token)} },
	{ name => 'heal', setup => $lapsed, sql => q{SELECT idem_heal('u', ':k', '{"h": 1}')} },
	{ name => 'forget', setup => q{SELECT idem_claim('u', ':k')}, sql => q{SELECT idem_forget('u', ':k')} },
	{ name => 'lost lease', setup => $lease, sql => q{SELECT idem_extend('u', ':k', :token + 1)}, raises => 'ID410' },
	{ name => 'batch of new keys', sql => qq{SELECT count(*), min(outcome), max(outcome) FROM idem_claim_many($many)} },
	{ name => 'batch, some done', setup => q{SELECT idem_claim('u', ':k-050'), idem_claim('u', ':k-099')}, sql => qq{SELECT count(*), min(outcome), max(outcome) FROM idem_claim_many($many)} },
	{ name => 'idem_call', sql => q{SELECT idem_call('u', ':k', 'pay(text)', '{"k": ":k"}')} },
	{ name => 'idem_call, replayed', setup => q{SELECT idem_call('u', ':k', 'pay(text)', '{"k": ":k"}')}, sql => q{SELECT idem_call('u', ':k', 'pay(text)', '{"k": ":k"}')} },
	{ name => 'sink', setup => q{INSERT INTO sink VALUES (':k-2', 1)}, sql => q{INSERT INTO sink SELECT ':k-' || g, g FROM generate_series(1, 3) g RETURNING amount} },
	{ name => 'sink, a row that moves', setup => q{INSERT INTO parts VALUES (':k', 1)}, sql => q{UPDATE parts SET part = 2 WHERE request = ':k'}, raises => '0A000' },
	{ name => 'wait for a transaction', hold => [q{SELECT idem_claim('u', 'held')}], sql => q{SELECT outcome FROM idem_try_claim('u', 'held', wait => '3 ms')} },
	{ name => 'wait for a live lease', setup => $lease, sql => qq{$try, wait => '3 ms')} },
	{ name => 'wait until a lease ends', setup => $lapsed =~ s/1 ms/12 ms/r, sql => qq{$try, wait => '5 s')} },
	{ name => 'wait for a lock of the row', hold => [q{SELECT idem_fence('u', 'leased', (SELECT token FROM idem_claims WHERE request_id = 'leased'))}],
		setup_once => q{SELECT idem_forget('u', 'leased'); SELECT token FROM idem_lease('u', 'leased', lease => '1 ms')}, sql => q{SELECT outcome FROM idem_try_claim('u', 'leased', wait => '3 ms')} },
	{ name => 'wait for a change of policy', hold => [q{UPDATE idem_scopes SET ttl = ttl WHERE scope = 'declared'}], sql => qq{$try, wait => '3 ms')} },
	{ name => 'cleanup', setup => $expired, sql => q{SELECT idem_cleanup(1000)} },
	{ name => 'idem_cleanup_all', setup => $expired, sql => q{CALL idem_cleanup_all(7)}, only => 'alone', commits_parts => 1 },
	{ name => 'reading', setup => $lapsed, sql => q{SELECT (SELECT state FROM idem_lookup('u', ':k')), idem_status('u', ':k'), idem_result('u', ':k'),
		(SELECT count(*) > 0 FROM idem_lapsed('', 5)), (SELECT count(*) > 0 FROM idem_unsettled), (SELECT count(*) >= 0 FROM idem_holders)} },
	{ name => 'statistics', sql => q{SELECT (SELECT count(*) FROM idem_stat_claims), (SELECT count(*) FROM idem_stat_cleanup), (SELECT count(*) > 0 FROM idem_metrics), (SELECT count(*) >= 0 FROM idem_stat_scopes)} },
	{ name => 'a new policy', sql => q{INSERT INTO idem_scopes (scope, ttl, key_time) VALUES (':k', '1 day', 'uuidv7') RETURNING failed} },
	{ name => 'PREPARE TRANSACTION', before => [q{SELECT idem_claim('u', ':k')}], sql => q{PREPARE TRANSACTION 'errors'}, ends => q{COMMIT PREPARED 'errors'}, only => 'transaction' });

my $keys = 0;

# Ids in the order of time, as UUIDv7
sub new_key
{
	my $ms = int(time * 1000);

	$keys++;
	return sprintf '%08x-%04x-7000-8000-%012x', $ms >> 16, $ms & 0xffff, $keys;
}

my ($key, $token);

sub with_key
{
	my ($sql) = @_;

	return $sql =~ s/:k/$key/gr =~ s/:token/$token/gr;
}

# What the tables say of the key, without times and tokens
sub state_of_key
{
	return ask($judge, with_key(q{
		SELECT
			(SELECT string_agg(format('%s %s %s %s %s %s %s %s', replace(request_id, ':k', ''), scope = ':k', state, token IS NULL, lease_until IS NULL,
					length(fingerprint), left(result::text, 30), progress), ',' ORDER BY request_id)
				FROM idem_claims WHERE request_id >= ':k' AND request_id < ':k~'),
			(SELECT string_agg(replace(id, ':k', ''), ',' ORDER BY id) FROM work WHERE id >= ':k' AND id < ':k~'),
			(SELECT string_agg(replace(request, ':k', ''), ',' ORDER BY request) FROM sink WHERE request >= ':k' AND request < ':k~'),
			(SELECT string_agg(part::text, ',') FROM parts WHERE request = ':k'),
			(SELECT count(*) FROM idem_scopes WHERE scope = ':k')}));
}

# What the victim's process has that it should not have between two transactions
sub belongings
{
	return ask($judge, qq{
		SELECT
			(SELECT string_agg(format('%s %s %s', locktype, mode, relation::regclass), ', ') FROM pg_locks WHERE pid = $victim->{pid}),
			(SELECT 'snapshot or transaction id' FROM pg_stat_activity WHERE pid = $victim->{pid} AND (backend_xid IS NOT NULL OR backend_xmin IS NOT NULL)),
			(SELECT 'waits' FROM idem_holders WHERE waiters > 0)});
}

# What it has in a transaction. The C edition keeps locks of tables and indexes that it writes, also
# after a rollback to a savepoint: it opens them for the whole transaction. So does nextval().
sub belongings_inside
{
	my $kept = $database eq 'portable' ? 'idem_token_seq' : '(idem_claims|idem_token_seq|user_index)';

	return ask($judge, qq{
		SELECT string_agg(DISTINCT format('%s %s %s %s %s', locktype, mode, relation::regclass, classid, objid), ', ') FROM pg_locks
		WHERE pid = $victim->{pid} AND locktype <> 'virtualxid'
			AND NOT (locktype = 'relation' AND relation::regclass::text ~ '^$kept' AND mode = 'RowExclusiveLock')});
}

# ----- one point -----

my $wrong_here = 0;
my (@wrong, %hit, %absorbed, $scenario, $form, $mode, $n);
my $points = 0;
my $claimed = 0;

sub wrong
{
	my ($what) = @_;

	push @wrong, "$database: $scenario->{name}, $form, $mode $n: $what" if ++$wrong_here <= 5;
	return;
}

sub note_replies
{
	for my $reply (@_)
	{
		wrong("WARNING: $_->{M}") for grep { $_->{S} eq 'WARNING' && $_->{M} !~ /must be loaded via|no transaction in progress/ } @{ $reply->{notices} };
	}
	return @_;
}

sub run
{
	return note_replies(exchange($victim, map { with_key($_) } @_));
}

sub prepare_point
{
	$key = new_key();
	$token = ask($judge, with_key($scenario->{setup})) if $scenario->{setup};
	if ($scenario->{reconnect})
	{
		$victim->close;
		$victim = connect_to('victim');
		ask($victim, 'SELECT 1');
	}
	ask($victim, 'SELECT fail_evict()') if $mode eq 'read' || $mode eq 'write';
	return;
}

sub begin { return $scenario->{begin} // 'BEGIN' }

my $outer = q{SELECT idem_claim('u', ':k-outer', 'outer')};
my $complete_outer = q{SELECT idem_complete('u', ':k-outer', '{"o": 1}', scope => 'outer')};

# The statements before the one that fails, and those that end its transaction
sub statements
{
	my @before = ("INSERT INTO work VALUES (':k')", @{ $scenario->{before} // [] });

	return ([], []) if $form eq 'alone';
	return ([ begin(), @before ], [ $scenario->{ends} // 'COMMIT' ]) if $form eq 'transaction';
	return ([ begin(), $outer, @before, 'SAVEPOINT s' ], [ 'RELEASE s', $complete_outer, 'COMMIT' ]);
}

sub work_inside
{
	return $form eq 'savepoint' ? ("INSERT INTO work VALUES (':k-inner')") : ();
}

# The answer of the statement, and the state afterwards, without a failure
sub run_unharmed
{
	my ($before, $after) = statements();
	my @replies = run(@$before, work_inside(), $scenario->{sql});
	my $answer = text_of($replies[-1]);
	my @end = run($replies[-1]{error} && $form ne 'alone' ? 'ROLLBACK' : @$after);

	wrong("without a failure: $answer $replies[-1]{error}{M}") if $replies[-1]{error} && $answer ne ($scenario->{raises} // '');
	for my $reply (@replies[ 0 .. $#replies - 1 ], @end)
	{
		wrong("without a failure: $reply->{error}{C} $reply->{error}{M}") if $reply->{error};
	}
	return $answer . ' / ' . state_of_key();
}

sub injected
{
	my ($error) = @_;

	return 0 if !$error;
	return 1 if $error->{C} eq 'FA1L0' || $error->{M} =~ /injected failure/;
	return 1 if $mode eq 'cancel' && $error->{C} eq '57014';
	return 1 if $mode =~ /^(read|write)$/ && $error->{C} =~ /^(58030|53100)$/;
	return 0;
}

# The session ends at the point, in the middle of its transaction.
sub try_end
{
	my ($usual, $state) = @_;
	my $pid = $victim->{pid};
	my $ended = !eval { run(work_inside(), "SELECT fail_arm('$mode', $n)", $scenario->{sql}, 'SELECT 1'); 1 };

	alarm 0;
	$victim->close;
	$node->poll_query_until('postgres', "SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE pid = $pid)") or wrong('the session did not end');
	my $left = ask($judge, "SELECT (SELECT count(*) FROM pg_locks WHERE pid = $pid), (SELECT count(*) FROM idem_holders WHERE waiters > 0)");
	wrong("left by the session that ended: $left") if $left ne '0|0';
	my $now = state_of_key();
	wrong("the rows are \"$now\" instead of \"$state\"") if $form ne 'alone' && $now ne $state;
	$victim = connect_to('victim');
	my $again = run_unharmed();
	wrong("then \"$again\" instead of \"$usual\"") if $again ne $usual;
	return $ended ? 1 : 0;
}

# As try_point(). After a fault, with a new session: the old one can be of no use.
sub try_point_safely
{
	my ($usual) = @_;
	my $wrong_before = $wrong_here;
	my $reached = eval { try_point($usual) };

	if (!defined $reached)
	{
		alarm 0;
		wrong("the session: $@");
	}
	if ($wrong_here > $wrong_before)
	{
		$_->close for $victim, $judge;
		($victim, $judge) = map { connect_to($_) } qw(victim judge);
	}
	return $reached // 1;
}

# Returns whether the point was reached. usual: what happens without a failure
sub try_point
{
	my ($usual) = @_;

	prepare_point();
	my $state = state_of_key();
	my ($before, $after) = statements();
	my @replies = run(@$before);
	my $inside_before = $form eq 'savepoint' ? belongings_inside() : '';
	return try_end($usual, $state) if $mode eq 'terminate';
	push @replies, run(work_inside(), "SELECT fail_arm('$mode', $n)", $scenario->{sql});
	my $reply = $replies[-1];

	for my $earlier (@replies[ 0 .. $#replies - 1 ])
	{
		wrong("before: $earlier->{error}{C} $earlier->{error}{M}") if $earlier->{error};
	}
	if (!injected($reply->{error}))
	{
		# Not reached, or caught
		my @end = run($reply->{error} && $form ne 'alone' ? 'ROLLBACK' : @$after);
		my $what = ask($victim, 'SELECT fail_fired()');

		for my $late (@end)
		{
			wrong("after: $late->{error}{C} $late->{error}{M}") if $late->{error};
		}
		my $answer = text_of($reply) . ' / ' . state_of_key();
		wrong("$what: not raised; \"$answer\" instead of \"$usual\"") if $answer ne $usual;
		$absorbed{$what}++ if $what ne '' && $mode ne 'cancel';
		my $left = belongings();
		wrong("$what: left: $left") if $left ne '||';
		return $what ne '' ? 1 : 0;
	}

	if ($form eq 'savepoint')
	{
		run('ROLLBACK TO s');
		my $inside = belongings_inside();
		wrong("$reply->{error}{M}: left inside: \"$inside\" instead of \"$inside_before\"") if $inside ne $inside_before;
		my @again = run(work_inside(), $scenario->{sql});
		my $answer = text_of($again[-1]);
		my @end = run($again[-1]{error} ? 'ROLLBACK' : @$after);
		for my $late (@again[ 0 .. $#again - 1 ], @end)
		{
			wrong("$reply->{error}{M}: afterwards: $late->{error}{C} $late->{error}{M}") if $late->{error};
		}
		$answer .= ' / ' . state_of_key();
		wrong("$reply->{error}{M}: then \"$answer\" instead of \"$usual\"") if $answer ne $usual;
	}
	else
	{
		run('ROLLBACK') if $form ne 'alone';
		my $left = belongings();
		wrong("$reply->{error}{M}: left: $left") if $left ne '||';
		my $now = state_of_key();
		wrong("$reply->{error}{M}: the rows are \"$now\" instead of \"$state\"") if $now ne $state && !$scenario->{commits_parts};
		my $again = run_unharmed();
		wrong("$reply->{error}{M}: then \"$again\" instead of \"$usual\"") if $again ne $usual;
	}
	my $left = belongings();
	wrong("$reply->{error}{M}: left at the end: $left") if $left ne '||';
	return 1;
}

# ----- all points of a scenario -----

sub begin_scenario
{
	ask($judge, $scenario->{setup_once}) if $scenario->{setup_once};
	if ($scenario->{hold})
	{
		ask($holder, $_) for 'BEGIN', @{ $scenario->{hold} };
	}
	return;
}

sub end_scenario
{
	ask($holder, 'ROLLBACK') if $scenario->{hold};
	ask($judge, $scenario->{after}) if $scenario->{after};
	return;
}

# How many points it has. Also says what usually happens
sub count_points
{
	$n = 0;
	prepare_point();
	my $usual = run_unharmed();
	prepare_point();
	my ($before, $after) = statements();
	my @replies = run(@$before, work_inside(), "SELECT fail_arm('$mode', 1000000000)", $scenario->{sql});
	run($replies[-1]{error} && $form ne 'alone' ? 'ROLLBACK' : @$after);
	return (ask($victim, 'SELECT fail_seen()'), $usual);
}

sub forms
{
	return $scenario->{only} ? ($scenario->{only}) : $scenario->{before} ? qw(transaction savepoint) : qw(alone transaction savepoint);
}

sub try_scenario
{
	my ($modes, $pick) = @_;

	$wrong_here = 0;
	begin_scenario();
	for my $one_form (forms())
	{
		for my $one_mode (@$modes)
		{
			($form, $mode) = ($one_form, $one_mode);
			# Alone, only what comes at the commit is new.
			next if $form eq 'alone' && $mode !~ /^(call|statement)$/ && !$scenario->{only};
			my ($count, $usual) = count_points();
			for my $number ($pick->($count > 0 ? $count : 0))
			{
				$n = $number;
				my $reached = try_point_safely($usual);
				if ($reached)
				{
					$points++;
					$hit{"$database $mode"}++;
				}
				last if $wrong_here > 5;
			}
		}
	}
	end_scenario();
	return;
}

sub use_database
{
	($database) = @_;
	$_->close for grep { defined } $victim, $judge, $holder;
	($victim, $judge, $holder) = map { connect_to($_) } qw(victim judge holder);
	return;
}

# n numbers of the first count ones
sub sample
{
	my ($count, $most) = @_;
	my %picked = map { 1 + int rand($count) => 1 } 1 .. $most;

	return $count > 0 ? sort { $a <=> $b } keys %picked : ();
}

# One beyond the last point, which is passed without a failure
sub everything
{
	my ($count) = @_;

	return sample($count, $most) if $most;
	return sample($count, 150) if $scenario->{reconnect};
	return sample($count, 40) if $form eq 'alone' && !$scenario->{only};
	# The points of a batch repeat for each key.
	return (1 .. 150, (sort { $a <=> $b } map { 151 + int rand($count - 300) } 1 .. 100), $count - 149 .. $count + 1) if $count > 500;
	return $count > 0 ? 1 .. $count + 1 : ();
}

my @chosen = grep { $_->{name} =~ /(?:$only)/ } @scenarios;

sub try_all
{
	my ($plan) = @_;

	for my $one (@chosen)
	{
		my ($began, $before) = (time, $points);

		$scenario = $one;
		$plan->();
		note sprintf '%s: %s: %d points, %.1f s', $database, $scenario->{name}, $points - $before, time - $began;
	}
	return;
}

sub verdict
{
	my ($name) = @_;

	is(join("\n", splice @wrong), '', $name);
	return;
}

# ----- the C edition -----

sub counted_claims
{
	return ask($judge, q{SELECT sum(claimed) FROM idem_stat_scopes});
}

# Points that are tried each time: those at which idem once failed, and some of which much depends.
# By name: the numbers change with the code. After a fix, some of these calls are no longer made;
# those that must be reached say so.
my @known = (
	# The session was left in a subtransaction: by an error in the handling of an error
	[ 'wait for a transaction', 'alone', 'CopyErrorData', 1 ], [ 'wait for a transaction', 'savepoint', 'CopyErrorData', 1 ],
	# idem_complete() did not find the claim afterwards: the table of claims lacked it. Its second
	# allocation makes the table larger, after about 115 of the claims.
	[ 'complete, one of many', 'savepoint', 'MemoryContextAllocExtended', 2, 'reached' ],
	# The tenth failure ended the session: out of places for callbacks of the relation cache
	([ 'claim after a change of policy', 'alone', 'hash_create', 1 ]) x 12,
	# The store is in use
	[ 'duplicate', 'savepoint', 'index_getnext_slot', 1, 'reached' ],
	# The promise is made, and the lock of the policies taken
	[ 'claim', 'savepoint', 'GetCurrentTransactionId', 1, 'reached' ]);

sub try_known
{
	for my $point (@known)
	{
		($scenario) = grep { $_->{name} eq $point->[0] } @scenarios;
		$wrong_here = 0;
		($form, $mode, $n) = ($point->[1], 'call', "$point->[3], '$point->[2]'");
		begin_scenario();
		prepare_point();
		my $usual = run_unharmed();
		my $reached = try_point_safely($usual);
		wrong("$point->[2] $point->[3]: not reached") if $point->[4] && !$reached;
		end_scenario();
	}
	return;
}

use_database('c');
try_known();
verdict('what once went wrong');
if ($full && 'c' =~ /$part/)
{
	try_all(sub {
		try_scenario([qw(call after alloc read write)], \&everything);
		try_scenario(['cancel'], sub { sample($_[0], $most // 25) });
		try_scenario(['terminate'], sub { sample($_[0], $most // 5) }) if !$scenario->{hold};
	});
}
elsif (!$full)
{
	try_all(sub { try_scenario([ (qw(call call after alloc read cancel))[ rand 6 ] ], sub { sample($_[0], 1) }) });
}
verdict('C edition: each error arrives, and leaves nothing behind');
is(ask($judge, 'SELECT fail_calls_too_late()'), '', 'after a commit nothing is called that can raise an error');

# ----- memory -----

sub memory { return ask($victim, 'SELECT sum(used_bytes) FROM pg_backend_memory_contexts') }

sub some_points
{
	my ($number) = @_;
	my $until = $points + $number;

	while ($points < $until && !@wrong)
	{
		$scenario = $chosen[ rand @chosen ];
		next if $scenario->{reconnect} || $scenario->{hold} || $scenario->{name} =~ /DDL|policy|statistics/;
		try_scenario([ (qw(call after alloc cancel))[ rand 4 ] ], sub { sample($_[0], 2) });
	}
	return;
}

if ($full && 'memory' =~ /$part/)
{
	use_database('c');
	some_points(1000);
	my $before = memory();
	some_points(1000);
	my $after = memory();
	figure('memory', "$before bytes in use in the session, after 1,000 more failures $after");
	cmp_ok($after, '<', $before + 10_000, 'the memory of a session does not grow with failures');
}

# ----- the portable edition -----

use_database('portable');
@chosen = grep { $_->{name} ne 'statistics' } @chosen;
if ($full && 'portable' =~ /$part/)
{
	try_all(sub {
		try_scenario(['statement'], \&everything);
		try_scenario([qw(alloc cancel read)], sub { sample($_[0], $most // 10) });
	});
}
elsif (!$full)
{
	my @all = @chosen;

	@chosen = map { $all[ rand @all ] } 1 .. 8;
	try_all(sub { try_scenario([ (qw(statement alloc cancel))[ rand 3 ] ], sub { sample($_[0], 1) }) });
}
verdict('portable edition: the same');

# ----- the worker -----

# A worker is started after each reload. The rows lie ahead of its low-water mark: those behind it
# are looked for once a minute.
sub try_worker
{
	my ($type, $rows) = @_;
	my $end = time + 60;
	my $what = '';

	ask($judge, qq{INSERT INTO idem_claims (expires_at, state, request_id, user_id, scope)
		SELECT clock_timestamp(), 'completed', gen_random_uuid(), 'u', '' FROM generate_series(1, $rows)});
	ask($judge, "SELECT fail_arm_worker('$type', '$mode', $n)");
	ask($judge, 'SELECT pg_reload_conf()');
	while (1)
	{
		my $left;

		($what, $left) = split /\|/, ask($judge, 'SELECT fail_worker_fired(), (SELECT count(*) FROM idem_claims)');
		last if $left == 0 && ($what ne '' || $type eq 'idem worker');
		if (time > $end)
		{
			wrong("$what: $left rows are left");
			last;
		}
		sleep 0.005;
	}
	ask($judge, "SELECT fail_arm_worker('', 'none', 0)");
	if ($what ne '')
	{
		$points++;
		$hit{"$type $mode"}++;
	}
	return $what ne '';
}

# The launcher knows of the failure of a worker only in a database that has statistics. In others
# it looks again after a minute.
use_database('cleaned');
ask($judge, q{SELECT idem_claim('u', 'first'), idem_forget('u', 'first')});
($scenario, $form) = ({ name => 'worker' }, 'alone');
for my $one_mode (!$full ? qw(call alloc) : 'worker' =~ /$part/ ? qw(call after alloc read) : ())
{
	$mode = $one_mode;
	$n = 0;
	if ($full)
	{
		my $missed = 0;

		# fail.c leaves out some of the points.
		while ($missed < 5 && !@wrong)
		{
			$n += $most ? 1 + int rand 40 : 1;
			$missed = try_worker('idem worker', 20) ? 0 : $missed + 1;
		}
	}
	else
	{
		$n = 1 + int rand 60;
		try_worker('idem worker', 20);
	}
}
if ($full && 'worker' =~ /$part/)
{
	$scenario = { name => 'launcher' };
	$mode = 'call';
	for (1 .. 10)
	{
		$n = 1 + int rand 60;
		try_worker('idem launcher', 20);
	}
}
verdict('the worker recovers, and removes what was left');

# ----- at last -----

diag "caught: $_: $absorbed{$_}" for sort keys %absorbed;
figure('points made to fail', "$points: " . join ', ', map { "$_ $hit{$_}" } sort keys %hit);
is(faults_in($node), '', 'the log of the server has no fault');
$node->stop;
done_testing();
