# Waiting for a lease: however its holder ends, the waiters get one execution and one result,
# and a lost wake-up costs time, not correctness. With the library preloaded and without.

use strict;
use warnings;

use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use IPC::Run;

use Client;

my $clients = 20;

# A client that claims executes and settles. Every second client claims by a lease, and settles
# in a second transaction.
my $objects = q{
CREATE EXTENSION idem;
INSERT INTO idem_scopes (scope, failed) VALUES ('retryable', 'retryable');
CREATE TABLE executions (request text, client int);
CREATE TABLE answers (request text, client int, outcome idem_outcome, result jsonb);
CREATE PROCEDURE execute(request text, scope text, client int) LANGUAGE plpgsql AS $$
DECLARE
	claim record;
	leases constant boolean := client % 2 = 0;
BEGIN
	IF leases THEN
		SELECT * INTO claim FROM idem_lease('user', request, '1 hour', scope, wait => '10 min');
	ELSE
		SELECT * INTO claim FROM idem_try_claim('user', request, scope, wait => '10 min');
	END IF;
	IF claim.outcome = 'claimed' AND leases THEN
		COMMIT;
		INSERT INTO executions VALUES (request, client);
		COMMIT;
		PERFORM idem_complete('user', request, to_jsonb(client), claim.token, scope);
		COMMIT;
	ELSIF claim.outcome = 'claimed' THEN
		INSERT INTO executions VALUES (request, client);
		PERFORM idem_complete(to_jsonb(client));
	END IF;
	INSERT INTO answers VALUES (request, client, claim.outcome,
		coalesce(claim.result, idem_result('user', request, scope)));
END $$;
};

my $take = q{SELECT token FROM idem_lease('user', '%s', scope => '%s', lease => '1 hour')};
my $lapse =
  q{UPDATE idem_claims SET lease_until = clock_timestamp() - interval '1 s' WHERE request_id = '%s'};

# How the first holder begins and ends; what the waiters wait for, and what they answer
# %1$s: request, %2$s: scope, %3$s: token
my %ways = (
	'completes' => {
		end => q{SELECT idem_complete('user', '%1$s', '"first"', %3$s, '%2$s')},
		outcome => 'completed'
	},
	'fails' => {
		end => q{SELECT idem_fail('user', '%1$s', '"first"', %3$s, '%2$s')},
		outcome => 'failed'
	},
	'fails retryably' => {
		scope => 'retryable',
		end => q{SELECT idem_fail('user', '%1$s', '"first"', %3$s, '%2$s')}
	},
	'releases' => { end => q{SELECT idem_release('user', '%1$s', %3$s, '%2$s')} },
	'is healed' => {
		end => q{SELECT idem_heal('user', '%1$s', '"first"', '%2$s')},
		outcome => 'completed'
	},
	'is dropped' => { end => q{SELECT idem_forget('user', '%1$s', '%2$s')} },
	'lapses' => { end => $lapse },
	'rolls back' => { begin => 'BEGIN', end => 'ROLLBACK', wait => 'Lock' },
	'is killed' => { begin => 'BEGIN', end => 'kill', wait => 'Lock' },
	'is killed with its lease' => { end => 'kill and lapse' },
	'prepares its completion' => {
		end => q{BEGIN; SELECT idem_complete('user', '%1$s', '"first"', %3$s, '%2$s');
			PREPARE TRANSACTION 'completion'},
		after => q{COMMIT PREPARED 'completion'},
		outcome => 'completed'
	},
	'prepares its release and rolls back' => {
		end => q{BEGIN; SELECT idem_release('user', '%1$s', %3$s, '%2$s');
			PREPARE TRANSACTION 'release'},
		after => q{ROLLBACK PREPARED 'release'; } . $lapse
	},
);

# Without shared memory a waiter polls, and can be seen between two wait events.
sub wait_for_waiters
{
	my ($node, $n, $event, $preloaded) = @_;
	my $waits = $event eq 'Lock' || $preloaded ? "wait_event_type = '$event'" : 'true';

	return $node->poll_query_until('postgres', qq{
		SELECT count(*) = $n FROM pg_stat_activity
		WHERE pid <> pg_backend_pid() AND state = 'active' AND query ~ 'execute|idem_try_claim|idem_lease' AND $waits});
}

sub test_burst
{
	my ($node, $preloaded, $way) = @_;
	my $how = $ways{$way};
	my $scope = $how->{scope} // '';
	my $event = $how->{wait} // 'Extension';
	my $by_first = defined $how->{outcome};
	my $holder = Client->new($node);

	$holder->ask($how->{begin}) if $how->{begin};
	my $token = $holder->ask(sprintf($take, $way, $scope));

	my $script = $node->basedir . '/burst.sql';
	unlink $script;
	append_to_file($script, "CALL execute('$way', '$scope', :client_id)");
	my $output = '';
	my $burst = IPC::Run::start(
		[
			'pgbench', '-n', '-c', $clients, '-j', 2, '-t', 1, '-f', $script,
			'-h', $node->host, '-p', $node->port, 'postgres'
		],
		'<', \undef, '>&', \$output,
		IPC::Run::timeout($PostgreSQL::Test::Utils::timeout_default));
	ok(wait_for_waiters($node, $clients, $event, $preloaded), "$way: $clients clients wait");

	if ($how->{end} =~ /^kill/)
	{
		$node->safe_psql('postgres', 'SELECT pg_terminate_backend(' . $holder->pid . ')');
	}
	else
	{
		unlike($holder->ask(sprintf($how->{end}, $way, $scope, $token)), qr/ERROR/, "$way: the holder ends");
	}
	$node->safe_psql('postgres', sprintf($lapse, $way)) if $how->{end} eq 'kill and lapse';
	if ($how->{after})
	{
		# No waiter was woken: each polls, and then waits for the prepared transaction.
		ok(wait_for_waiters($node, $clients, 'Lock', $preloaded), "$way: all wait for it");
		$node->safe_psql('postgres', $_) for split /; /, sprintf($how->{after}, $way);
	}
	ok($burst->finish, "$way: all clients are answered") or diag($output);

	is( $node->safe_psql('postgres', "SELECT count(*) FROM executions WHERE request = '$way'"),
		$by_first ? 0 : 1, "$way: one execution");
	is( $node->safe_psql('postgres', qq{
			SELECT count(*), count(DISTINCT result), count(*) FILTER (WHERE outcome = 'claimed'),
				count(*) FILTER (WHERE outcome = '} . ($how->{outcome} // 'completed') . qq{')
			FROM answers WHERE request = '$way'}),
		"$clients|1|" . ($by_first ? "0|$clients" : '1|' . ($clients - 1)),
		"$way: one result, which all have");
	is( $node->safe_psql('postgres', qq{
			SELECT count(*) FROM answers LEFT JOIN executions USING (request)
			WHERE request = '$way' AND result IS DISTINCT FROM coalesce(to_jsonb(executions.client), '"first"')}),
		0, "$way: it is that of who executed");
	if (!$by_first)
	{
		$holder = Client->new($node) if $how->{end} =~ /^kill/;
		is($holder->ask("SELECT idem_complete('user', '$way', '\"late\"', $token, '$scope')"),
			'ERROR:  ID410', "$way: the first holder is refused");
	}
	$holder->quit;
	return;
}

sub test_server
{
	my ($name, $preloaded) = @_;	# without it there is shared memory from PostgreSQL 17 on
	my $node = PostgreSQL::Test::Cluster->new($name);

	$node->init;
	$node->append_conf('postgresql.conf', q{
max_connections = 100
max_prepared_transactions = 10
fsync = off
});
	$node->append_conf('postgresql.conf', q{
shared_preload_libraries = 'idem'
idem.cleanup_databases = 'nothing'
}) if $preloaded;
	$node->start;
	$node->safe_psql('postgres', $objects);

	note "----- $name: a burst of $clients clients -----";
	test_burst($node, $preloaded, $_) for sort keys %ways;

	note "----- $name: waiters that go away -----";
	my $holder = Client->new($node);
	my $token = $holder->ask(sprintf($take, 'held', ''));
	my $before = $node->safe_psql('postgres', "SELECT c.ctid, c.xmin, c FROM idem_claims c WHERE request_id = 'held'");
	for my $signal (qw(cancel terminate))
	{
		for my $claim (q{idem_try_claim('user', 'held', }, q{idem_lease('user', 'held', '1 hour', })
		{
			my $waiter = Client->new($node);
			$waiter->ask('BEGIN');
			$waiter->ask(q{SELECT idem_claim('user', 'held by the waiter')});
			$waiter->send("SELECT * FROM ${claim}wait => '10 min')");
			ok(wait_for_waiters($node, 1, 'Extension', $preloaded), "$signal: it waits");
			$node->safe_psql('postgres', "SELECT pg_${signal}_backend(" . $waiter->pid . ')');
			like($waiter->answer, $signal eq 'cancel' ? qr/^ERROR:  57014/ : qr/57P01|terminat|closed/,
				"$signal: the wait ends");
			if ($signal eq 'cancel')
			{
				is($waiter->ask('SELECT 1'), 'ERROR:  25P02', 'cancel: the transaction failed');
				is($node->safe_psql('postgres', 'SELECT count(*) FROM pg_locks WHERE pid = ' . $waiter->pid . q{ AND locktype <> 'virtualxid'}),
					0, 'cancel: no lock is left');
				$waiter->ask('ROLLBACK');
				is($waiter->ask("SELECT outcome FROM ${claim}wait => '1 ms')"),
					'timed_out', 'cancel: the session can wait again');
			}
			ok( $node->poll_query_until('postgres', 'SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE pid = ' . $waiter->pid . ')'),
				'terminate: the session is gone') if $signal eq 'terminate';
			$waiter->quit if $signal eq 'cancel';
			is($node->safe_psql('postgres', 'SELECT count(*) FROM pg_locks WHERE NOT granted'), 0, "$signal: nobody waits");
			is($node->safe_psql('postgres', q{SELECT count(*) FROM idem_claims WHERE request_id = 'held by the waiter'}),
				0, "$signal: its own claim is gone");
		}
	}
	is($node->safe_psql('postgres', "SELECT c.ctid, c.xmin, c FROM idem_claims c WHERE request_id = 'held'"),
		$before, 'the lease is untouched');

	note "----- $name: a sleeping waiter blocks no other session -----";
	# If the sleeper held a table lock, a session that locks the table would wait for the
	# sleeper, and the holder would wait behind that session.
	my $locker = Client->new($node);
	$locker->ask("SET statement_timeout = '3 min'");
	# With an index of a user the sleeper probes first. Without one it would insert its next new
	# key before probing, and would keep the locks of the insert.
	$locker->ask('CREATE INDEX by_user ON idem_claims (user_id)');
	for my $kind ('a claim', 'a lease')
	{
		for my $first ('lease', 'transaction')
		{
			my $request = "$kind in the way of a $first";
			my $claim = $kind eq 'a lease' ? "idem_lease('user', '$request', '1 hour', " : "idem_try_claim('user', '$request', ";
			$holder->ask('BEGIN') if $first eq 'transaction';
			my $taken = $holder->ask(sprintf($take, $request, ''));
			my $sleeper = Client->new($node);
			$sleeper->ask(q{SELECT idem_claim('user', gen_random_uuid()::text) FROM generate_series(1, 200)});
			$sleeper->ask('BEGIN');
			$sleeper->send("SELECT outcome, result FROM ${claim}wait => '10 min')");
			ok(wait_for_waiters($node, 1, 'Lock', $preloaded), "$request: it waits for a transaction") if $first eq 'transaction';
			$holder->ask('COMMIT') if $first eq 'transaction';
			ok(wait_for_waiters($node, 1, 'Extension', $preloaded), "$request: it sleeps");
			$locker->ask('CREATE TABLE invalidating (i int); DROP TABLE invalidating; ANALYZE idem_claims');
			is($locker->ask('BEGIN; LOCK TABLE idem_claims, idem_scopes IN ACCESS EXCLUSIVE MODE'), '',
				"$request: the tables can be locked");
			$locker->ask(q{INSERT INTO idem_scopes (scope, failed) VALUES ('', 'retryable')});
			$holder->send("SELECT idem_fail('user', '$request', '1', $taken)");
			ok( $node->poll_query_until('postgres', q{
					SELECT wait_event_type = 'Lock' FROM pg_stat_activity WHERE pid = } . $holder->pid),
				"$request: the holder waits for that");
			$locker->ask('COMMIT');
			is($holder->answer, 't', "$request: and goes on");
			like($sleeper->answer, qr/^claimed\|/, "$request: who slept goes by the policy as it is now");
			$sleeper->ask('ROLLBACK');
			$sleeper->quit;
			$locker->ask('DELETE FROM idem_scopes WHERE scope = $$$$');
		}
	}
	$locker->ask('DROP INDEX by_user');

	# It has waited for a lock of the sequence first, and gives that and the others back.
	$locker->ask('BEGIN; ALTER SEQUENCE idem_token_seq CACHE 1');
	my $behind = Client->new($node);
	$behind->send(q{SELECT outcome FROM idem_lease('user', 'behind DDL', '1 hour', wait => '10 min')});
	ok(wait_for_waiters($node, 1, 'Lock', $preloaded), 'a lease waits for DDL of the sequence');
	my $of_locker = $locker->ask(sprintf($take, 'behind DDL', ''));
	$locker->ask('COMMIT');
	ok(wait_for_waiters($node, 1, 'Extension', $preloaded), 'then for a lease');
	is($node->safe_psql('postgres', q{SELECT count(*) FROM pg_locks WHERE relation IS NOT NULL AND pid = } . $behind->pid), '0',
		'and holds no lock of a relation');
	$locker->ask("SELECT idem_complete('user', 'behind DDL', '1', $of_locker)");
	is($behind->answer, 'completed', 'and is answered');
	$behind->quit;
	$locker->quit;

	note "----- $name: the holder changes kind during one wait -----";
	$holder->ask('BEGIN');
	$holder->ask(q{SELECT idem_claim('user', 'changing')});
	my $waiter = Client->new($node);
	$waiter->send(q{SELECT outcome, result FROM idem_try_claim('user', 'changing', wait => '10 min')});
	ok(wait_for_waiters($node, 1, 'Lock', $preloaded), 'it waits for a transaction');
	$holder->ask(q{SELECT idem_forget('user', 'changing')});
	$token = $holder->ask(sprintf($take, 'changing', ''));
	$holder->ask('COMMIT');
	ok(wait_for_waiters($node, 1, 'Extension', $preloaded), 'which leaves a lease, and waits for that');
	$holder->ask("BEGIN; SELECT idem_release('user', 'changing', $token)");
	ok(wait_for_waiters($node, 1, 'Lock', $preloaded), 'which is being released');
	$holder->ask(q{SELECT idem_claim('user', 'changing')});
	$holder->ask(q{SELECT idem_complete('"in the end"')});
	$holder->ask('COMMIT');
	is($waiter->answer, 'completed|"in the end"', 'and replaced by a transaction, whose result it is');

	# One deadline for the wait for a transaction and the wait for its lease
	$holder->ask('BEGIN');
	$token = $holder->ask(sprintf($take, 'deadline', ''));
	$waiter->send(q{SELECT outcome, clock_timestamp() FROM idem_try_claim('user', 'deadline', wait => '4 s')});
	ok( $node->poll_query_until('postgres', q{
			SELECT clock_timestamp() - query_start > interval '3 s' FROM pg_stat_activity
			WHERE pid = } . $waiter->pid), 'a waiter has waited for a transaction');
	my $committed = $holder->ask('COMMIT; SELECT clock_timestamp()');
	my ($outcome, $answered) = split /\|/, $waiter->answer;
	is($outcome, 'timed_out', 'and then for its lease');
	is( $node->safe_psql('postgres', "SELECT timestamptz '$answered' < timestamptz '$committed' + interval '4 s'"),
		't', 'and its time did not begin anew');
	is( $node->safe_psql('postgres', q{
			SELECT outcome, clock_timestamp() - statement_timestamp() >= '150 ms'
			FROM idem_try_claim('user', 'deadline', wait => '150 ms')}),
		'timed_out|t', 'and not before it');

	# Where idem is preloaded, the commit wakes the waiter, which would look again after a second.
	my $late = 0;
	for my $n (1 .. ($preloaded ? 10 : 0))
	{
		$token = $holder->ask(sprintf($take, "woken $n", ''));
		$waiter->send("SELECT outcome, extract(epoch FROM clock_timestamp()) FROM idem_try_claim('user', 'woken $n', wait => '10 s')");
		wait_for_waiters($node, 1, 'Extension', $preloaded);
		my $settled = $holder->ask("SELECT extract(epoch FROM clock_timestamp()) FROM idem_complete('user', 'woken $n', '1', $token)");
		$late += (split /\|/, $waiter->answer)[1] - $settled;
	}
	cmp_ok($late, '<', 3, 'ten waiters are woken by the commit, not by the clock');

	$waiter->quit;
	$holder->quit;
	$node->stop;
	unlike(slurp_file($node->logfile), qr/TRAP|PANIC|was terminated by signal|WARNING:.*leak/, 'nothing broke');
	return;
}

test_server('preloaded', 1);
test_server('alone', 0);

done_testing();
