# A change of a scope's policy acts in every session from its next transaction on, also on a
# subscriber. It never moves expires_at back. A key whose request may have been executed and
# forgotten is never executed again.

use strict;
use warnings;

use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

use Client;

my $node = PostgreSQL::Test::Cluster->new('main');
$node->init(allows_streaming => 'logical');
$node->append_conf('postgresql.conf', q{
shared_preload_libraries = 'idem'
idem.cleanup_databases = 'nothing'
wal_level = logical
});
$node->start;

my $objects = q{
CREATE EXTENSION idem;
-- A version 7 UUID with this time
CREATE FUNCTION v7(moment timestamptz DEFAULT clock_timestamp()) RETURNS text LANGUAGE sql VOLATILE AS $$
	SELECT format('%s-%s-7%s-8abc-%s', left(ms, 8), right(ms, 4), substr(md5(random()::text), 1, 3), substr(md5(random()::text), 1, 12))
	FROM (SELECT lpad(to_hex((extract(epoch FROM moment) * 1000)::bigint), 12, '0') AS ms) AS t
$$;
CREATE FUNCTION lapse(request text) RETURNS void LANGUAGE sql AS $$
	UPDATE idem_claims SET lease_until = clock_timestamp() - interval '1 s' WHERE request_id = request
$$;
CREATE FUNCTION expire(request text) RETURNS void LANGUAGE sql AS $$
	UPDATE idem_claims SET expires_at = date_trunc('second', clock_timestamp()) - interval '1 s' WHERE request_id = request
$$;
};
$node->safe_psql('postgres', $objects);

sub query
{
	my ($query) = @_;
	return $node->safe_psql('postgres', $query);
}

my $session = Client->new($node);
my $requests = 0;

# ----- each column acts in a session that has used the scope -----

# The answer of the session to a claim of a lapsed lease
sub claim_lapsed
{
	my ($scope) = @_;
	my $request = 'lapsed ' . ++$requests;
	query("SELECT idem_lease('user', '$request', scope => '$scope', lease => '1 hour')");
	query("SELECT lapse('$request')");
	return $session->ask("SELECT outcome FROM idem_try_claim('user', '$request', '$scope')");
}

sub claim_failed
{
	my ($scope) = @_;
	my $request = 'failed ' . ++$requests;
	query("BEGIN; SELECT idem_claim('user', '$request', '$scope'); SELECT idem_fail('1'); COMMIT");
	return $session->ask("SELECT outcome FROM idem_try_claim('user', '$request', '$scope')");
}

sub claim_expired
{
	my ($scope) = @_;
	my $request = 'expired ' . ++$requests;
	query("SELECT idem_claim('user', '$request', '$scope')");
	query("SELECT expire('$request')");
	return $session->ask("SELECT outcome FROM idem_try_claim('user', '$request', '$scope')");
}

sub claim_ttl
{
	my ($scope) = @_;
	my $request = 'ttl ' . ++$requests;
	return $session->ask(
		"SELECT date_trunc('day', expires_at + interval '5 min' - clock_timestamp()) FROM idem_try_claim('user', '$request', '$scope')");
}

sub claim_lease
{
	my ($scope) = @_;
	my $request = 'lease ' . ++$requests;
	my $token = $session->ask("SELECT token FROM idem_lease('user', '$request', scope => '$scope', lease => '1 min')");
	return $session->ask(
		"SELECT date_trunc('hour', idem_extend('user', '$request', $token, scope => '$scope') + interval '5 min' - clock_timestamp())");
}

sub claim_size
{
	my ($scope) = @_;
	my $request = 'size ' . ++$requests;
	return $session->ask(
		"BEGIN; SELECT idem_claim('user', '$request', '$scope'); SELECT idem_complete('user', '$request', to_jsonb(repeat('x', 100)), scope => '$scope'); COMMIT");
}

sub claim_name
{
	my ($scope) = @_;
	my $request = 'no uuid ' . ++$requests;
	return $session->ask("SELECT outcome FROM idem_try_claim('user', '$request', '$scope')");
}

my @columns = (
	[ 'lapsed', 'unknown', \&claim_lapsed, 'claimed', 'unknown' ],
	[ 'failed', 'retryable', \&claim_failed, 'failed', 'claimed' ],
	[ 'expired', 'reclaim', \&claim_expired, 'completed', 'claimed' ],
	[ 'ttl', '10 days', \&claim_ttl, '1 day', '10 days' ],
	[ 'lease', '10 hours', \&claim_lease, '00:00:00', '10:00:00' ],
	[ 'result_max_bytes', 50, \&claim_size, "t\nt", "t\nERROR:  ID413" ],
	[ 'key_time', 'uuidv7', \&claim_name, 'claimed', 'ERROR:  ID400' ],
);
for my $column (@columns)
{
	my ($name, $value, $claim, $without, $with) = @$column;
	my $scope = "column $name";
	my $more = $name eq 'key_time' ? ", ttl = '1 hour'" : '';

	is($claim->($scope), $without, "$name: a scope without a row uses the settings");
	query("INSERT INTO idem_scopes (scope) VALUES ('$scope')");
	is($claim->($scope), $without, "$name: so does one with the defaults");
	query("UPDATE idem_scopes SET $name = '$value'$more WHERE scope = '$scope'");
	is($claim->($scope), $with, "$name: a change acts in a session that has used the scope");
	query("BEGIN; DELETE FROM idem_scopes WHERE scope = '$scope'; ROLLBACK");
	is($claim->($scope), $with, "$name: one that was rolled back does not");
	query("DELETE FROM idem_scopes WHERE scope = '$scope'");
	is($claim->($scope), $without, "$name: nor does a row that was deleted");
	query("INSERT INTO idem_scopes (scope, $name, ttl) VALUES ('$scope', '$value', '1 hour')") if $name ne 'ttl';
	query("INSERT INTO idem_scopes (scope, ttl) VALUES ('$scope', '10 days')") if $name eq 'ttl';
	is($claim->($scope), $with, "$name: a row that was inserted does");
	query('TRUNCATE idem_scopes');
	is($claim->($scope), $without, "$name: until all are truncated");
}
query(q{ALTER SYSTEM SET idem.ttl = '2d'});
query('SELECT pg_reload_conf()');
ok($node->poll_query_until('postgres', "SELECT current_setting('idem.ttl') = '2d'"), 'the setting is changed');
query("INSERT INTO idem_scopes (scope) VALUES ('settings')");
$session->quit;
$session = Client->new($node);
is(claim_ttl('settings'), '2 days', 'where a scope has no ttl it acts');
query('ALTER SYSTEM RESET idem.ttl');
query('SELECT pg_reload_conf()');
ok($node->poll_query_until('postgres', "SELECT current_setting('idem.ttl') = '1d'"), 'the setting is changed back');

# In an open transaction a change acts from its next claim on.
query("INSERT INTO idem_scopes (scope) VALUES ('open')");
query(q{SELECT idem_lease('user', 'open 1', scope => 'open', lease => '1 hour'), idem_lease('user', 'open 2', scope => 'open', lease => '1 hour')});
query("SELECT lapse('open 1'), lapse('open 2')");
$session->ask('BEGIN');
is($session->ask(q{SELECT outcome FROM idem_try_claim('user', 'open 1', 'open')}), 'claimed', 'an open transaction');
query("UPDATE idem_scopes SET lapsed = 'unknown' WHERE scope = 'open'");
is($session->ask(q{SELECT outcome FROM idem_try_claim('user', 'open 2', 'open')}), 'unknown', 'a change acts in it');
$session->ask('ROLLBACK');
is($session->ask(q{SELECT outcome FROM idem_try_claim('user', 'open 1', 'open')}), 'unknown', 'and in the next one');

# A transaction's own change acts for it before the commit, and not after a rollback.
$session->ask('BEGIN');
$session->ask("UPDATE idem_scopes SET lapsed = 'reclaim' WHERE scope = 'open'");
is($session->ask(q{SELECT outcome FROM idem_try_claim('user', 'open 1', 'open')}), 'claimed', 'our own change acts');
is(query(q{SELECT outcome FROM idem_try_claim('user', 'open 2', 'open')}), 'unknown', 'not for others');
$session->ask('ROLLBACK');
is($session->ask(q{SELECT outcome FROM idem_try_claim('user', 'open 1', 'open')}), 'unknown', 'nor after its rollback');
$session->ask('BEGIN; SAVEPOINT s');
$session->ask("UPDATE idem_scopes SET lapsed = 'reclaim' WHERE scope = 'open'");
is($session->ask(q{SELECT outcome FROM idem_try_claim('user', 'open 1', 'open')}), 'claimed', 'in a savepoint');
$session->ask('ROLLBACK TO s');
is($session->ask(q{SELECT outcome FROM idem_try_claim('user', 'open 1', 'open')}), 'unknown', 'and after it');
$session->ask('ROLLBACK');

# ----- a promise is never shortened -----

query("INSERT INTO idem_scopes (scope, ttl) VALUES ('promise', '1 day')");
$session->ask('BEGIN');
$session->ask(q{SELECT idem_claim('user', 'promised in flight', 'promise')});
my $token = query(q{SELECT token FROM idem_lease('user', 'promised lease', scope => 'promise', lease => '1 hour')});
query(q{SELECT idem_claim('user', 'promised', 'promise')});
query(q{SELECT idem_lease('user', 'promised to the one before', scope => 'promise', lease => '1 hour')});
query(q{SELECT lapse('promised to the one before')});
my $promises = q{
	SELECT string_agg(request_id, ', ' ORDER BY request_id) FROM idem_claims
	WHERE request_id LIKE 'promised%' AND expires_at > clock_timestamp() + interval '23 hours'};
query("UPDATE idem_scopes SET ttl = '1 s' WHERE scope = 'promise'");
is($session->ask(q{SELECT idem_complete('1')}), 't', 'ttl lowered: a claim in flight completes');
$session->ask('COMMIT');
is(query("SELECT idem_extend('user', 'promised lease', $token, '1 s', scope => 'promise') IS NOT NULL"), 't', 'a lease is extended');
is(query("SELECT idem_complete('user', 'promised lease', '1', $token, 'promise')"), 't', 'and completes');
is(query(q{SELECT outcome FROM idem_try_claim('user', 'promised to the one before', 'promise')}), 'claimed', 'one is taken over');
is(query($promises), 'promised, promised in flight, promised lease, promised to the one before', 'all are remembered as promised');
query(q{SELECT idem_claim('user', 'short', 'promise')});
is(query(q{SELECT expires_at < clock_timestamp() + interval '1 min' FROM idem_claims WHERE request_id = 'short'}), 't', 'a new one is not');
ok($node->poll_query_until('postgres', q{SELECT expires_at < clock_timestamp() FROM idem_claims WHERE request_id = 'short'}), 'it expires');
query('SELECT idem_cleanup()');
is(query(q{SELECT count(*) FROM idem_claims WHERE request_id = 'short'}), 0, 'and is cleaned');
is(query($promises), 'promised, promised in flight, promised lease, promised to the one before', 'the others are not');
# Settling counts the ttl again.
query("UPDATE idem_scopes SET ttl = '1 hour' WHERE scope = 'promise'");
$token = query(q{SELECT token FROM idem_lease('user', 'promised later', scope => 'promise', lease => '1 s')});
query("UPDATE idem_scopes SET ttl = '1 day' WHERE scope = 'promise'");
query("SELECT idem_heal('user', 'promised later', '1', 'promise')");
like(query($promises), qr/promised later/, 'ttl raised: settling promises the new one');

# ----- key_time = uuidv7 -----

sub outcome
{
	my ($request, $scope) = @_;
	return query("SELECT outcome FROM idem_try_claim('user', '$request', '$scope')");
}

# The outcome of a call, or its error
sub answer
{
	my ($request, $scope) = @_;
	return $session->ask("SELECT outcome FROM idem_try_claim('user', '$request', '$scope')");
}

my $failure = $session->ask("INSERT INTO idem_scopes (scope, key_time) VALUES ('v7', 'uuidv7')");
is($failure, 'ERROR:  23514', 'uuidv7 needs a ttl of its own');
# As if the policy had always existed: a scope claims no key from before its guarded_since.
my $always_there = q{SET session_replication_role = replica; INSERT INTO idem_scopes (scope, ttl, key_time, guarded_since)};
query("$always_there VALUES ('v7', '1 hour', 'uuidv7', '2001-01-01')");
my $key = query('SELECT v7()');
is(outcome($key, 'v7'), 'claimed', 'a new key');
is(outcome($key, 'v7'), 'completed', 'once');
is(answer(uc $key, 'v7'), 'ERROR:  ID400', 'the upper-case spelling is no other key');
is(answer("{$key}", 'v7'), 'ERROR:  ID400', 'nor is it with braces');
(my $packed = $key) =~ s/-//g;
is(answer($packed, 'v7'), 'ERROR:  ID400', 'or without dashes');
is(answer(" $key", 'v7'), 'ERROR:  ID400', 'or with a space');
is(answer(query('SELECT gen_random_uuid()'), 'v7'), 'ERROR:  ID400', 'a version 4 uuid has no time');
is(outcome(query(q{SELECT v7(clock_timestamp() - interval '61 min')}), 'v7'), 'stale', 'older than the ttl');
is(outcome(query(q{SELECT v7(clock_timestamp() - interval '50 min')}), 'v7'), 'claimed', 'younger than the ttl');
# The clock of a client is ahead.
is(answer(query(q{SELECT v7(clock_timestamp() + interval '10 min')}), 'v7'), 'ERROR:  ID400', 'far ahead of the clock');
$key = query(q{SELECT v7(clock_timestamp() + interval '50 s')});
is(outcome($key, 'v7'), 'claimed', 'a little ahead');
is( query("SELECT expires_at > clock_timestamp() + interval '1 hour 30 s' FROM idem_claims WHERE request_id = '$key'"),
	't', 'is remembered for the ttl from its own time on');
# A stored row answers, however old its key is. An expired row counts as absent if the policy
# says so.
$key = query(q{SELECT v7(clock_timestamp() - interval '50 min')});
is(outcome($key, 'v7'), 'claimed', 'an old key');
query("UPDATE idem_claims SET expires_at = date_trunc('second', clock_timestamp()) - interval '1 s' WHERE request_id = '$key'");
is(outcome($key, 'v7'), 'completed', 'expired, it still answers');
query("UPDATE idem_scopes SET ttl = '40 min' WHERE scope = 'v7'");
is(outcome($key, 'v7'), 'completed', 'even if it is older than the ttl now is');
query("UPDATE idem_scopes SET expired = 'reclaim' WHERE scope = 'v7'");
is(outcome($key, 'v7'), 'stale', 'under reclaim it is stale, whether or not it was cleaned');
query('SELECT idem_cleanup()');
is(query("SELECT count(*) FROM idem_claims WHERE request_id = '$key'"), 0, 'cleaned');
is(outcome($key, 'v7'), 'stale', 'and after that');

# A key that was executed is never executed again, however the operator changes the policy. The
# key was executed under a short ttl, and its row was removed before or after the change.
my %changes = (
	'ttl raised' => [
		$always_there . q{ VALUES ('%1$s', '1 s', 'uuidv7', '2001-01-01')},
		q{UPDATE idem_scopes SET ttl = '1 day' WHERE scope = '%1$s'}
	],
	'ttl raised twice' => [
		$always_there . q{ VALUES ('%1$s', '1 s', 'uuidv7', '2001-01-01')},
		q{UPDATE idem_scopes SET ttl = '1 day' WHERE scope = '%1$s'},
		q{UPDATE idem_scopes SET ttl = '2 days' WHERE scope = '%1$s'}
	],
	'ttl lowered and raised' => [
		$always_there . q{ VALUES ('%1$s', '1 s', 'uuidv7', '2001-01-01')},
		q{UPDATE idem_scopes SET ttl = '1 ms' WHERE scope = '%1$s'},
		q{UPDATE idem_scopes SET ttl = '1 day' WHERE scope = '%1$s'}
	],
	'switched on' => [
		q{INSERT INTO idem_scopes (scope, ttl) VALUES ('%1$s', '1 s')},
		q{UPDATE idem_scopes SET ttl = '1 day', key_time = 'uuidv7' WHERE scope = '%1$s'}
	],
	'switched on, then raised' => [
		q{INSERT INTO idem_scopes (scope, ttl) VALUES ('%1$s', '1 s')},
		q{UPDATE idem_scopes SET key_time = 'uuidv7' WHERE scope = '%1$s'},
		q{UPDATE idem_scopes SET ttl = '1 day' WHERE scope = '%1$s'}
	],
	'switched off and on' => [
		$always_there . q{ VALUES ('%1$s', '1 s', 'uuidv7', '2001-01-01')},
		q{UPDATE idem_scopes SET key_time = 'any' WHERE scope = '%1$s'},
		q{UPDATE idem_scopes SET ttl = '1 day', key_time = 'uuidv7' WHERE scope = '%1$s'}
	],
	'deleted and inserted' => [
		$always_there . q{ VALUES ('%1$s', '1 s', 'uuidv7', '2001-01-01')},
		q{DELETE FROM idem_scopes WHERE scope = '%1$s'},
		q{INSERT INTO idem_scopes (scope, ttl, key_time) VALUES ('%1$s', '1 day', 'uuidv7')}
	],
	'renamed and back' => [
		$always_there . q{ VALUES ('%1$s', '1 s', 'uuidv7', '2001-01-01')},
		q{UPDATE idem_scopes SET scope = 'away ' || scope WHERE scope = '%1$s'},
		q{UPDATE idem_scopes SET ttl = '1 day' WHERE scope = 'away ' || '%1$s'},
		q{UPDATE idem_scopes SET scope = '%1$s' WHERE scope = 'away ' || '%1$s'}
	],
	'renamed' => [
		q{INSERT INTO idem_scopes (scope, ttl) VALUES ('%1$s', '1 s')},
		$always_there . q{ VALUES ('other %1$s', '1 day', 'uuidv7', '2001-01-01')},
		q{DELETE FROM idem_scopes WHERE scope = '%1$s'},
		q{UPDATE idem_scopes SET scope = '%1$s' WHERE scope = 'other %1$s'}
	],
);
my $forgotten = q{
	SELECT NOT EXISTS (SELECT FROM idem_claims WHERE scope LIKE '%, forgotten %' AND expires_at >= clock_timestamp())};
my @cases;
for my $change (sort keys %changes)
{
	for my $when ('before', 'after')
	{
		for my $expired ('protect', 'reclaim')
		{
			my $scope = "$change, forgotten $when, $expired";
			my ($create, @statements) = map { sprintf($_, $scope) } @{ $changes{$change} };

			query($create);
			query("UPDATE idem_scopes SET expired = '$expired' WHERE scope = '$scope'");
			# In one statement: the key must not become stale before it is claimed.
			my ($key, $outcome) = split /\|/, query(qq{
				SELECT key, (SELECT outcome FROM idem_try_claim('user', key, '$scope')) FROM v7() AS key});
			is($outcome, 'claimed', "$scope: a key is executed");
			push @cases, { scope => $scope, key => $key, when => $when, expired => $expired, statements => \@statements };
		}
	}
}

sub change
{
	my ($when) = @_;
	for my $case (grep { $_->{when} eq $when } @cases)
	{
		query($_) for @{ $case->{statements} };
		query("UPDATE idem_scopes SET expired = '$case->{expired}' WHERE scope = '$case->{scope}'");
	}
	return;
}
change('after');
$node->poll_query_until('postgres', $forgotten) or die 'not forgotten';
# Under expired = reclaim a row that is still stored counts as absent.
query(q{DELETE FROM idem_claims WHERE scope LIKE '%, forgotten before, %'});
query(q{DELETE FROM idem_claims WHERE scope LIKE '%, forgotten after, protect'});
change('before');
is(outcome($_->{key}, $_->{scope}), 'stale', "$_->{scope}: and never again") for @cases;

# ----- claims while a promise is changed -----

my $operator = Client->new($node);
query("INSERT INTO idem_scopes (scope, ttl, key_time) VALUES ('changing', '10 min', 'uuidv7')");
$operator->ask(q{BEGIN; UPDATE idem_scopes SET ttl = '1 day' WHERE scope = 'changing'});
is($session->ask(q{SET lock_timeout = '20 ms'; SELECT idem_claim('user', 'impatient', 'another')}),
	'ERROR:  55P03', q{the caller's own lock_timeout is raised});
is($session->ask(q{RESET lock_timeout; SELECT outcome FROM idem_try_claim('user', 'impatient', 'another', wait => '20 ms')}),
	'timed_out', 'its wait is not');
$operator->ask('COMMIT');
is($session->ask(q{SELECT outcome FROM idem_try_claim('user', 'impatient', 'another', wait => '0')}),
	'claimed', 'committed, nobody waits');
# A claim that raised an error while it wrote its row does not block a change.
query(q{CREATE UNIQUE INDEX single ON idem_claims (user_id) WHERE user_id = 'single'; SELECT idem_claim('single', '1')});
$session->ask(q{BEGIN; SAVEPOINT s});
is($session->ask(q{SELECT idem_claim('single', '2', 'another')}), 'ERROR:  23505', 'a claim fails');
$session->ask(q{ROLLBACK TO s});
is($operator->ask(q{SET lock_timeout = '3 min'; UPDATE idem_scopes SET ttl = '2 days' WHERE scope = 'changing'}),
	'', 'and is rolled back to a savepoint: a change does not wait for it');
$session->ask('ROLLBACK');
query('DROP INDEX single');
# Neither does a claim that stops waiting for a change just when the change commits.
for my $try (1 .. 50)
{
	$operator->ask(q{BEGIN; UPDATE idem_scopes SET ttl = ttl + interval '1 s' WHERE scope = 'changing'});
	$session->ask('BEGIN');
	$session->send("SELECT outcome FROM idem_try_claim('user', 'race $try', 'another', wait => '10 ms')");
	# As long as the claim waits, so that its end and the commit race
	$operator->ask(q{SELECT pg_sleep(0.010); COMMIT});
	$session->answer;
	$failure = query(q{SELECT count(*) FROM pg_locks WHERE relation = 'idem_scopes'::regclass AND pid = } . $session->pid);
	$session->ask('ROLLBACK');
	last if $failure;
}
is($failure, 0, 'a wait that ends when it is given up leaves no lock');
# A batch waits once for all its keys, and probes each once; its keys lie between stored ones.
query(q{SELECT count(*) FROM idem_claim_many(array_fill('batch'::text, ARRAY[8000]), ARRAY(SELECT lpad((2 * i)::text, 6, '0') FROM generate_series(1, 8000) i), 'another')});
$operator->ask(q{BEGIN; UPDATE idem_scopes SET ttl = ttl + interval '1 s' WHERE scope = 'changing'});
is($session->ask(q{SELECT outcome, count(*), clock_timestamp() - statement_timestamp() < '5 s'
		FROM idem_claim_many(array_fill('batch'::text, ARRAY[8000]), ARRAY(SELECT lpad((2 * i + 1)::text, 6, '0') FROM generate_series(1, 8000) i), 'another', wait => '0')
		GROUP BY outcome}),
	'in_progress|8000|t', 'a batch that does not want to wait does not wait for each of its keys');
$operator->ask('ROLLBACK');
$operator->quit;

# ----- on a subscriber -----

my $subscriber = PostgreSQL::Test::Cluster->new('subscriber');
$subscriber->init;
$subscriber->append_conf('postgresql.conf', q{
shared_preload_libraries = 'idem'
idem.cleanup_databases = 'nothing'
});
$subscriber->start;
$subscriber->safe_psql('postgres', $objects);
query('TRUNCATE idem_scopes');
query("INSERT INTO idem_scopes (scope) VALUES ('replicated')");
query('CREATE PUBLICATION scopes FOR TABLE idem_scopes');
$subscriber->safe_psql('postgres',
	"CREATE SUBSCRIPTION scopes CONNECTION '" . $node->connstr . " dbname=postgres' PUBLICATION scopes");
$subscriber->wait_for_subscription_sync($node, 'scopes');
my $there = Client->new($subscriber);

sub claim_there
{
	my $request = 'there ' . ++$requests;
	$subscriber->safe_psql('postgres', "SELECT idem_lease('user', '$request', scope => 'replicated', lease => '1 hour')");
	$subscriber->safe_psql('postgres', "SELECT lapse('$request')");
	return $there->ask("SELECT outcome FROM idem_try_claim('user', '$request', 'replicated')");
}
is(claim_there(), 'claimed', 'subscriber: a session has used the scope');
for my $step (
	[ "UPDATE idem_scopes SET lapsed = 'unknown' WHERE scope = 'replicated'", 'unknown', 'an update' ],
	[ "DELETE FROM idem_scopes WHERE scope = 'replicated'", 'claimed', 'a delete' ],
	[ "INSERT INTO idem_scopes (scope, lapsed) VALUES ('replicated', 'unknown')", 'unknown', 'an insert' ],
	[ 'TRUNCATE idem_scopes', 'claimed', 'a truncate' ])
{
	my ($change, $expected, $name) = @$step;
	query($change);
	$node->wait_for_catchup('scopes');
	is(claim_there(), $expected, "subscriber: $name acts");
}
query("INSERT INTO idem_scopes (scope, ttl, key_time) VALUES ('replicated', '1 day', 'uuidv7')");
query("UPDATE idem_scopes SET ttl = '2 days' WHERE scope = 'replicated'");
$node->wait_for_catchup('scopes');
is($subscriber->safe_psql('postgres', 'SELECT guarded_since FROM idem_scopes'),
	query('SELECT guarded_since FROM idem_scopes'), "subscriber: it has the publisher's guarded_since");
$there->quit;
$subscriber->safe_psql('postgres', 'DROP SUBSCRIPTION scopes');
$subscriber->stop;

# ----- a crash while leases are out -----

query('TRUNCATE idem_scopes, idem_claims');
query("INSERT INTO idem_scopes (scope, lapsed) VALUES ('unknown', 'unknown')");
$session->quit;
my $holder = Client->new($node);
my %token;
for my $scope ('', 'unknown')
{
	for my $fate ('lapses', 'lives', 'lapses and settles')
	{
		$token{"$scope $fate"} = $holder->ask(
			"SELECT token FROM idem_lease('user', '$fate', scope => '$scope', lease => '1 hour', progress => '\"half\"')");
	}
}
$holder->ask('BEGIN');
$holder->ask(q{SELECT token FROM idem_lease('user', 'not committed', lease => '1 hour')});
my $rows = query('SELECT c FROM idem_claims c ORDER BY scope, request_id');
$node->stop('immediate');
$node->start;
is(query('SELECT c FROM idem_claims c ORDER BY scope, request_id'), $rows, 'crash: all leases are there');
is(query(q{SELECT count(*) FROM idem_claims}), 6, 'crash: but the one that was not committed');
for my $scope ('', 'unknown')
{
	my $outcome = $scope eq 'unknown' ? 'unknown' : 'claimed';

	is(query("SELECT outcome, progress FROM idem_lease('user', 'lives', scope => '$scope', wait => '0', lease => '1 hour')"),
		'in_progress|"half"', "crash, scope '$scope': a live lease is respected");
	query("SELECT lapse('lapses'), lapse('lapses and settles')");
	is(query("SELECT idem_complete('user', 'lapses and settles', '1', " . $token{"$scope lapses and settles"} . ", '$scope')"),
		't', "crash, scope '$scope': a holder settles");
	is(query("SELECT outcome, progress FROM idem_lease('user', 'lapses', scope => '$scope', lease => '1 hour')"),
		"$outcome|\"half\"", "crash, scope '$scope': what lapsed is handled by policy");
}
# A waiter is woken by the end of a lease that is older than the crash.
my $waiter = Client->new($node);
$waiter->send(q{SELECT outcome, result FROM idem_try_claim('user', 'lives', wait => '10 min')});
ok( $node->poll_query_until('postgres', "SELECT wait_event_type = 'Extension' FROM pg_stat_activity WHERE pid = " . $waiter->pid),
	'crash: who comes waits');
is(query("SELECT idem_complete('user', 'lives', '1', " . $token{' lives'} . ')'), 't', 'crash: the holder completes');
is($waiter->answer, 'completed|1', 'crash: the waiter has the result');
$waiter->quit;
$node->stop;
unlike(slurp_file($node->logfile), qr/TRAP|was terminated by signal|WARNING:.*leak/, 'nothing broke');

done_testing();
