# Tokens grow from holder to holder of a key: a later holder has a higher token, also if the row
# was deleted in between, the server crashed, or the database was dumped and restored.

use strict;
use warnings;

use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

use Client;

my $node = PostgreSQL::Test::Cluster->new('main');
$node->init;
# The WAL writer must not flush by itself, so that after a crash only what the commits have
# flushed is left.
$node->append_conf('postgresql.conf', q{
shared_preload_libraries = 'idem'
idem.cleanup_databases = 'nothing'
idem.wait = '10 min'
synchronous_commit = off
wal_writer_delay = '10s'
wal_writer_flush_after = '1GB'
autovacuum = off
});
$node->start;
$node->safe_psql('postgres', q{
CREATE EXTENSION idem;
SET synchronous_commit = on;
CREATE TABLE holders (position bigint, request text, token bigint, ended text);
CREATE SEQUENCE positions;
});

sub query
{
	my ($query) = @_;
	return $node->safe_psql('postgres', $query);
}

# Waits until the session waits for a lock, or has an answer, which is a failure
sub waits_for_lock
{
	my ($client, $name) = @_;
	my $activity = 'FROM pg_stat_activity WHERE pid = ' . $client->pid;
	$node->poll_query_until('postgres', qq{
		SELECT wait_event_type = 'Lock' OR (state = 'idle' AND query ~ 'idem_(try_claim|lease)') $activity});
	return is(query("SELECT wait_event_type $activity"), 'Lock', $name);
}

my $take = q{SELECT token FROM idem_lease('user', '%s', lease => '1 hour')};

# ----- a token that is drawn early and inserted late -----

# B draws a token; A draws one, claims and releases; B inserts. B would then have a lower token
# than A, the holder before it. The expression of an index stops B between drawing the token
# and inserting into the primary key.
query(q{
CREATE FUNCTION stall(request text) RETURNS text IMMUTABLE LANGUAGE plpgsql AS $$
BEGIN
	IF current_setting('test.stall', true) = 'on' THEN
		PERFORM pg_catalog.pg_advisory_lock_shared(1);
		PERFORM pg_catalog.pg_advisory_unlock_shared(1);
	END IF;
	RETURN request;
END $$;
CREATE INDEX stalled ON idem_claims (stall(request_id));
ALTER TABLE idem_claims DROP CONSTRAINT idem_claims_pkey, ADD PRIMARY KEY (request_id, user_id, scope);
});
my $door = Client->new($node);
my $first = Client->new($node);
my $second = Client->new($node);
my $other = Client->new($node);
$door->ask('SELECT pg_advisory_lock(1)');
$first->ask("SET test.stall = 'on'; SET idem.wait = '1 s'");
my $before = query(q{SELECT nextval('idem_token_seq')});
$first->send(sprintf($take, 'order'));
waits_for_lock($first, 'B is stopped');
cmp_ok(query('SELECT last_value FROM idem_token_seq'), '>', $before, 'after it drew its token');
$second->send(sprintf($take, 'order'));
waits_for_lock($second, 'A cannot draw meanwhile');
$other->ask('SELECT 1');
my $other_token = $other->ask(sprintf($take, 'another key'));
like($other_token, qr/^\d+$/, 'but for another key');
$door->ask('SELECT pg_advisory_unlock(1)');
my $token = $first->answer;
like($token, qr/^\d+$/, 'B claims');
cmp_ok($token, '<', $other_token, 'with the token that it drew first');
$first->ask("SELECT idem_release('user', 'order', $token)");
my $next = $second->answer;
cmp_ok($next, '>', $token, 'A claims after the release, with a higher one');
# If B waits after it drew a token, it draws another.
$second->ask("SELECT idem_release('user', 'order', $next)");
$second->ask('BEGIN');
$second->ask(q{SELECT idem_claim('user', 'order')});
$first->ask('RESET test.stall; RESET idem.wait');
$first->send(sprintf($take, 'order'));
waits_for_lock($first, 'B waits for a transaction');
my $newer = $second->ask(sprintf($take, 'newer'));
$second->ask('ROLLBACK');
cmp_ok($first->answer, '>', $newer, 'and draws its token after the wait');
$_->quit for $door, $first, $second, $other;
query('DROP INDEX stalled; DROP FUNCTION stall');

# ----- many holders of a few keys -----

# Each holder notes its position while it holds the key, so positions and holders have the same
# order. It ends in a way that deletes the row, or lets the lease lapse.
query(q{
CREATE PROCEDURE hold(request text, n int) LANGUAGE plpgsql AS $$
DECLARE
	held bigint;
	way constant text := (ARRAY['release', 'forget', 'lapse', 'delete', 'rollback', 'expire'])[1 + n % 6];
BEGIN
	SELECT token INTO held FROM idem_lease('user', request, lease => '1 hour');
	IF way = 'rollback' THEN
		ROLLBACK;
		RETURN;
	END IF;
	COMMIT;
	INSERT INTO holders VALUES (nextval('positions'), request, held, way);
	COMMIT;
	CASE way
		WHEN 'release' THEN PERFORM idem_release('user', request, held);
		WHEN 'forget' THEN PERFORM idem_forget('user', request);
		WHEN 'lapse' THEN UPDATE idem_claims SET lease_until = clock_timestamp() WHERE request_id = request;
		WHEN 'delete' THEN DELETE FROM idem_claims WHERE request_id = request;
		WHEN 'expire' THEN
			UPDATE idem_claims SET lease_until = clock_timestamp(), expires_at = 'epoch' WHERE request_id = request;
			COMMIT;
			PERFORM idem_cleanup();
	END CASE;
END $$;
});
my $script = $node->basedir . '/hold.sql';
append_to_file($script, "\\set key random(1, 3)\n\\set n random(0, 5)\nCALL hold('shared ' || :key, :n);\n");
$node->command_ok(
	[ 'pgbench', '-n', '-c', 12, '-t', 60, '--random-seed=20261121', '-f', $script, 'postgres' ],
	'many hold the same keys, one after the other');

sub tokens_grow
{
	my ($name) = @_;
	is( query(q{
			SELECT count(*) FROM (SELECT token > lag(token, 1, 0::bigint) OVER (PARTITION BY request ORDER BY position) AS grows
				FROM holders) AS h
			WHERE grows IS DISTINCT FROM true}),
		0, $name);
	is(query('SELECT count(*) - count(DISTINCT token) FROM holders'), 0, 'and no token is used twice');
	return;
}
tokens_grow('tokens grow from holder to holder');
cmp_ok(query('SELECT count(*) FROM holders'), '>', 400, 'there were many');

# ----- crashes, with synchronous_commit off -----

# The client knows its token, also if the server lost the transaction.
for my $way ('held', 'released', 'completed', 'failed', 'healed', 'dropped', 'taken over')
{
	query('CHECKPOINT');
	my $client = Client->new($node);
	my $request = "crash, $way";
	my $latest = $client->ask(sprintf($take, $request));

	$client->ask("SELECT idem_release('user', '$request', $latest)") if $way eq 'released';
	$client->ask("SELECT idem_complete('user', '$request', '1', $latest)") if $way eq 'completed';
	$client->ask("SELECT idem_fail('user', '$request', '1', $latest)") if $way eq 'failed';
	$client->ask("SELECT idem_heal('user', '$request', '1')") if $way eq 'healed';
	$client->ask("SELECT idem_forget('user', '$request')") if $way eq 'dropped';
	if ($way eq 'taken over')
	{
		$client->ask("UPDATE idem_claims SET lease_until = clock_timestamp() WHERE request_id = '$request'");
		$latest = $client->ask(sprintf($take, $request));
	}
	$node->stop('immediate');
	$node->start;
	my $state = query("SELECT state, token = $latest FROM idem_claims WHERE request_id = '$request'");
	my %expected = (
		'held' => 'in_progress|t',
		'completed' => 'completed|t',
		'failed' => 'failed|t',
		'healed' => 'completed|t',
		'taken over' => 'in_progress|t'
	);
	is($state, $expected{$way} // '', "a lease that was $way is $way after a crash");
	query("SELECT idem_forget('user', '$request')");
	cmp_ok(query(sprintf($take, $request)), '>', $latest, 'and the next token is higher');
}

# The progress that a holder has recorded, say ids made elsewhere, must survive the crash, too.
{
	query('CHECKPOINT');
	my $client = Client->new($node);
	my $token = $client->ask(sprintf($take, 'crash, progress'));
	$client->ask("SELECT idem_extend('user', 'crash, progress', $token, progress => '{\"id\": 17}')");
	$node->stop('immediate');
	$node->start;
	is(query("SELECT progress FROM idem_claims WHERE request_id = 'crash, progress'"), '{"id": 17}',
		'progress that was recorded is there after a crash');
}

# Crashes while the keys change hands
for my $round (1 .. 3)
{
	my $position = query('SELECT coalesce(max(position), 0) FROM holders');
	my $output = '';
	my $run = IPC::Run::start(
		[
			'pgbench', '-n', '-c', 8, '-t', 1_000_000, '-f', $script,
			'-h', $node->host, '-p', $node->port, 'postgres'
		],
		'<', \undef, '>&', \$output,
		IPC::Run::timeout($PostgreSQL::Test::Utils::timeout_default));
	ok( $node->poll_query_until('postgres',
			"SELECT count(*) > 100 FROM holders WHERE position > $position"),
		"round $round: the keys change hands");
	$node->stop('immediate');
	$run->finish;
	$node->start;
	query(q{DELETE FROM idem_claims WHERE request_id LIKE 'shared %'});
	query(q{SELECT setval('positions', (SELECT max(position) + 1000 FROM holders))});
	tokens_grow("round $round: tokens grow");
}

# ----- dump and restore -----

my $latest = query(sprintf($take, 'dumped'));
query("SELECT idem_release('user', 'dumped', $latest)");
my $kept = query(sprintf($take, 'kept'));
my $dump = $node->basedir . '/dump';
for my $format ('plain', 'custom')
{
	my $copy = "copy_$format";
	query("CREATE DATABASE $copy");
	$node->command_ok([ 'pg_dump', "--format=$format", '-f', "$dump.$format", 'postgres' ], "$format: dumped");
	if ($format eq 'plain')
	{
		$node->command_ok([ 'psql', '-Xq', '-v', 'ON_ERROR_STOP=1', '-f', "$dump.plain", '-d', $copy ], 'plain: restored');
	}
	else
	{
		$node->command_ok([ 'pg_restore', '--exit-on-error', '-d', $copy, "$dump.custom" ], 'custom: restored');
	}
	cmp_ok($node->safe_psql($copy, sprintf($take, 'dumped')), '>', $kept, "$format: the next token is higher");
	is($node->safe_psql($copy, "SELECT idem_complete('user', 'kept', '1', $kept)"), 't', "$format: and a lease still has its own");
}

$node->stop;
unlike(slurp_file($node->logfile), qr/TRAP|was terminated by signal|WARNING:.*leak/, 'nothing broke');

done_testing();
