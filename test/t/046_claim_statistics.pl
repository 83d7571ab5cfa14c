# What idem_stat_claims counts: claims and settling when they commit, every other answer and every
# wait at once.

use strict;
use warnings;

use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

use Client;

my $node = PostgreSQL::Test::Cluster->new('main');
$node->init;
$node->append_conf('postgresql.conf', q{
shared_preload_libraries = 'idem'
idem.cleanup_databases = 'nothing'
idem.wait = '10 min'
max_prepared_transactions = 10
});
$node->start;
$node->safe_psql('postgres', q{
CREATE EXTENSION idem;
INSERT INTO idem_scopes (scope, lapsed) VALUES ('unknown', 'unknown');
INSERT INTO idem_scopes (scope, failed) VALUES ('retryable', 'retryable');
SET session_replication_role = replica;		-- or nothing is known of the past
INSERT INTO idem_scopes (scope, ttl, key_time) VALUES ('v7', '1 hour', 'uuidv7');
CREATE FUNCTION lapse(request text) RETURNS void LANGUAGE sql AS $$
	UPDATE idem_claims SET lease_until = clock_timestamp() - interval '1 s' WHERE request_id = request
$$;
});

my $session = Client->new($node);
my $other = Client->new($node);

sub query
{
	my ($query) = @_;
	return $node->safe_psql('postgres', $query);
}

sub counters
{
	return map { split /\|/ } split /\n/,
	  query(q{SELECT key, value FROM idem_stat_claims s, jsonb_each_text(to_jsonb(s) - 'wait_seconds' - 'stats_reset')});
}

# Runs the statement in the session, and compares the counters before and after
sub counts
{
	my ($sql, $expected, $name) = @_;
	my %before = counters();
	my $answer = ref $sql ? $sql->() : $session->ask($sql);
	my %after = counters();
	my $counted = join ', ',
	  map { "$_ " . ($after{$_} - $before{$_}) } grep { $after{$_} != $before{$_} } sort keys %after;

	is($counted, $expected, $name) or diag($answer);
	return $answer;
}


is(query('SELECT claimed + completed + failed + in_progress + timed_out + "unknown" + mismatch + stale + invalid
		+ waits + takeovers + lost_leases + healed, wait_seconds, stats_reset FROM idem_stat_claims'),
	'0|0|', 'nothing happened yet');

# ----- outcomes -----

counts(q{SELECT idem_claim('u', 'a')}, 'claimed 1', 'claimed');
counts(q{SELECT idem_claim('u', 'a')}, 'completed 1', 'completed');
counts(q{SELECT outcome FROM idem_lease('u', 'a', lease => '1 min')}, 'completed 1', 'completed, asked for a lease');
counts(q{BEGIN; SELECT idem_claim('u', 'b'); SELECT idem_fail('1'); COMMIT}, 'claimed 1', 'claimed, to fail');
counts(q{SELECT idem_claim('u', 'b')}, 'failed 1', 'failed, raised');
counts(q{SELECT outcome FROM idem_try_claim('u', 'b')}, 'failed 1', 'failed');
my $token = counts(q{SELECT token FROM idem_lease('u', 'c', scope => '', fingerprint => '\x01', lease => '1 hour')}, 'claimed 1', 'a lease');
counts(q{SELECT idem_claim('u', 'c', wait => '0')}, 'in_progress 1', 'in_progress, raised; no wait');
counts(q{SELECT outcome FROM idem_try_claim('u', 'c', wait => '0')}, 'in_progress 1', 'in_progress');
counts(q{SELECT idem_claim('u', 'c', wait => '10 ms')}, 'timed_out 1, waits 1', 'timed_out, raised');
counts(q{SELECT outcome FROM idem_try_claim('u', 'c', wait => '10 ms')}, 'timed_out 1, waits 1', 'timed_out');
counts(q{SELECT idem_claim('u', 'c', '', '\x02')}, 'mismatch 1', 'mismatch');
counts(q{SELECT idem_claim('u', '00000000-0000-7000-8000-000000000000', 'v7')}, 'stale 1', 'stale');
counts(q{SELECT idem_lease('u', 'd', scope => 'unknown', lease => '1 hour')}, 'claimed 1', 'a lease under unknown');
query("SELECT lapse('d')");
counts(q{SELECT idem_claim('u', 'd', 'unknown')}, 'unknown 1', 'unknown');
counts(q{SELECT count(*) FROM idem_claim_many(ARRAY['u', 'u', NULL, 'u', 'u'], ARRAY['a', 'e', 'f', 'e', ''])},
	'claimed 1, completed 2, invalid 2', 'a batch, by its elements');
counts(q{SELECT count(*) FROM idem_claim_many(ARRAY['u', 'u'], ARRAY['00000000-0000-7000-8000-000000000000', 'no uuid'], 'v7')},
	'invalid 1, stale 1', 'a batch in a scope with times');
counts(q{SELECT count(*) FROM idem_claim_many(ARRAY['u', 'u'], ARRAY['b', 'c'], wait => '10 ms')},
	'failed 1, timed_out 1, waits 1', 'a batch that waits');
# A call with invalid arguments is not counted.
counts(q{SELECT idem_claim('u', NULL)}, '', 'a bad argument');
counts(q{SELECT idem_status('u', 'a'), idem_result('u', 'a')}, '', 'reading');

# ----- committed or not -----

counts(q{BEGIN; SELECT idem_claim('u', 'g'); ROLLBACK}, '', 'a claim that was rolled back');
$session->ask('BEGIN');
counts(q{SELECT idem_claim('u', 'g')}, '', 'a claim, not committed');
counts(q{SELECT idem_claim('u', 'g')}, 'completed 1', 'a second claim is an answer at once');
counts(q{SAVEPOINT s; SELECT idem_claim('u', 'h'); ROLLBACK TO s}, '', 'a savepoint, rolled back');
counts(q{SAVEPOINT t; SELECT idem_claim('u', 'i'); RELEASE t}, '', 'one that was released');
counts('COMMIT', 'claimed 2', 'counted when committed');
counts(q{BEGIN; SELECT idem_claim('u', 'j'); PREPARE TRANSACTION 'p'}, 'claimed 1', 'a prepared one when prepared');
counts(q{COMMIT PREPARED 'p'}, '', 'not again');
counts(q{BEGIN; SELECT idem_claim('u', 'a'); ROLLBACK}, 'completed 1', 'an answer is counted though rolled back');

# ----- takeovers, lost leases, healed -----

query("SELECT lapse('c')");
counts(q{BEGIN; SELECT idem_lease('u', 'c', lease => '1 hour'); ROLLBACK}, '', 'a takeover that was rolled back');
my $next = counts(q{SELECT token FROM idem_lease('u', 'c', lease => '1 hour')}, 'claimed 1, takeovers 1', 'a takeover');
counts("SELECT idem_extend('u', 'c', $token)", 'lost_leases 1', 'extend by the holder before');
counts("SELECT idem_fence('u', 'c', $token)", 'lost_leases 1', 'fence');
counts("SELECT idem_release('u', 'c', $token)", 'lost_leases 1', 'release');
counts("SELECT idem_complete('u', 'c', '1', $token)", 'lost_leases 1', 'complete');
counts("SELECT idem_fail('u', 'c', '1', $token)", 'lost_leases 1', 'fail');
counts("SELECT idem_complete('u', 'nothing', '1', $token)", '', 'of a key that is gone');
counts("SELECT idem_fence('u', 'c', $token, 'forgotten')", '', 'or in another scope');
counts(q{BEGIN; SELECT idem_heal('u', 'c', '1'); ROLLBACK}, '', 'a heal that was rolled back');
counts(q{SELECT idem_heal('u', 'c', '1')}, 'healed 1', 'a heal');
counts(q{SELECT idem_heal('u', 'c', '1')}, '', 'a second one finds nothing to heal');
counts("SELECT idem_complete('u', 'c', '1', $next)", '', 'its holder has not lost it');
counts(q{BEGIN; SELECT idem_claim('u', 'k', 'retryable'); SELECT idem_fail('1'); COMMIT}, 'claimed 1', 'failed, retryable');
counts(q{SELECT idem_claim('u', 'k', 'retryable')}, 'claimed 1, takeovers 1', 'and claimed again');
$token = counts(q{SELECT token FROM idem_lease('u', 'l', lease => '1 hour')}, 'claimed 1', 'a lease');
counts("SELECT idem_extend('u', 'l', $token), idem_complete('u', 'l', '1', $token)", '', 'that goes well');
query("UPDATE idem_claims SET expires_at = 'epoch' WHERE request_id = 'l'");
query("INSERT INTO idem_scopes (scope, expired) VALUES ('', 'reclaim')");
counts(q{SELECT idem_claim('u', 'l')}, 'claimed 1', 'what expired was no longer there to be taken over');

# ----- waits -----

# Until the session waits for an event of this type
sub wait_for_event
{
	my ($client, $type) = @_;

	$node->poll_query_until('postgres', "SELECT wait_event_type = '$type' FROM pg_stat_activity WHERE pid = " . $client->pid)
	  or die "the session does not wait for a $type";
	return;
}

$session->ask('BEGIN');
$session->ask(q{SELECT idem_claim('u', 'm')});
my $seconds = query('SELECT wait_seconds FROM idem_stat_claims');
counts(
	sub {
		$other->send(q{SELECT idem_claim('u', 'm')});
		wait_for_event($other, 'Lock');
		$session->ask('COMMIT');
		return $other->answer;
	},
	'claimed 1, completed 1, waits 1', 'a wait for a transaction');
cmp_ok(query('SELECT wait_seconds FROM idem_stat_claims'), '>', $seconds, 'has its time');
$token = $session->ask(q{SELECT token FROM idem_lease('u', 'n', lease => '1 hour')});
$seconds = query('SELECT wait_seconds FROM idem_stat_claims');
counts(
	sub {
		$other->send(q{SELECT outcome FROM idem_lease('u', 'n', lease => '1 hour')});
		wait_for_event($other, 'Extension');
		# The call counts as one wait, however often it probes.
		$session->ask("BEGIN; SELECT idem_extend('u', 'n', $token)");
		wait_for_event($other, 'Lock');
		$session->ask("SELECT idem_release('u', 'n', $token); COMMIT");
		return $other->answer;
	},
	'claimed 1, waits 1', 'a wait for a lease');
cmp_ok(query('SELECT wait_seconds FROM idem_stat_claims'), '>', $seconds, 'has its time');

# ----- reading, resetting -----

is( query(q{
		SELECT count(*) FROM idem_metrics m, jsonb_each_text((SELECT to_jsonb(s) FROM idem_stat_claims s)) e
		WHERE m.name = 'idem_claims_total' AND m.labels->>'outcome' = e.key AND m.value = e.value::float8}),
	9, 'the metrics have every outcome, as the view has');
is( query(q{
		SELECT count(*) FROM idem_stat_claims s, idem_metrics m
		WHERE (m.name = 'idem_wait_seconds_count' AND m.value = s.waits)
			OR (m.name = 'idem_wait_seconds_sum' AND abs(m.value - s.wait_seconds) < 1e-6)}),
	2, 'and the waits');

query('CREATE DATABASE second');
$node->safe_psql('second', q{CREATE EXTENSION idem; SELECT idem_claim('u', 'a')});
is($node->safe_psql('second', 'SELECT claimed, completed FROM idem_stat_claims'), '1|0', 'another database has its own');

query('SELECT idem_stat_reset()');
is(query('SELECT claimed + completed + failed + in_progress + timed_out + "unknown" + mismatch + stale + invalid
		+ waits + takeovers + lost_leases + healed, wait_seconds, stats_reset IS NOT NULL FROM idem_stat_claims'),
	'0|0|t', 'reset');
is($node->safe_psql('second', 'SELECT claimed, stats_reset IS NULL FROM idem_stat_claims'), '1|t', 'but not the other database');
counts(q{SELECT idem_claim('u', 'after the reset')}, 'claimed 1', 'it goes on');

# ----- rights -----

query(q{
	CREATE ROLE monitor IN ROLE pg_monitor;
	CREATE ROLE nobody;
	CREATE ROLE app;
	SELECT idem_grant('app', 'app')});
is(query('SET ROLE monitor; SELECT claimed FROM idem_stat_claims'), 1, 'pg_monitor reads');
for my $role ('nobody', 'app')
{
	my ($status, $out, $err) = $node->psql('postgres', "SET ROLE $role; SELECT * FROM idem_stat_claims");
	like($err, qr/permission denied/, "$role does not");
}
is( query(q{SET ROLE app; SELECT outcome FROM idem_lease('u', 'by app', lease => '1 hour');
		SELECT count(*) FROM idem_claim_many('{u,u}', '{a,b}')}),
	"claimed\n2", 'a role that was granted app claims, and is counted');
is(query('SELECT claimed, completed, failed FROM idem_stat_claims'), '2|1|1', 'as all are');

$session->quit;
$other->quit;
$node->stop;
unlike(slurp_file($node->logfile), qr/TRAP|PANIC|was terminated by signal|WARNING:.*leak/, 'nothing broke');

# ----- not preloaded -----

$node->adjust_conf('postgresql.conf', 'shared_preload_libraries', "''");
$node->append_conf('postgresql.conf', "log_min_messages = warning\n");
$node->start;
is(query(q{SELECT idem_claim('u', 'without preload')}), 't', 'without preload a claim works');
if ($node->pg_version < 17)
{
	my ($status, $out, $err) = $node->psql('postgres', 'SELECT * FROM idem_stat_claims');
	like($err, qr/shared_preload_libraries/, 'and the statistics say what is missing');
}
else
{
	is(query('SELECT claimed FROM idem_stat_claims'), 1, 'and is counted');
}
$node->stop;

done_testing();
