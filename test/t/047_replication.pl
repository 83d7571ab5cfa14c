# Logical replication of the claims table: a subscriber gets the same rows, of every shape, and
# no row of an insert that lost its key.

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

sub query
{
	my ($query, $database) = @_;
	return $node->safe_psql($database // 'postgres', $query);
}

query('CREATE DATABASE subscriber');
query('CREATE EXTENSION idem', $_) for ('postgres', 'subscriber');
query('CREATE EXTENSION amcheck');
query(q{
CREATE PUBLICATION claims FOR TABLE idem_claims;
SELECT pg_create_logical_replication_slot('claims', 'pgoutput');
CREATE FUNCTION claim_all(requests text[]) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
	claimed bigint := 0;
BEGIN
	FOR i IN 1 .. cardinality(requests) LOOP
		IF idem_claim('u', requests[i], wait => '10 min') THEN
			claimed := claimed + 1;
		END IF;
	END LOOP;
	RETURN claimed;
END $$;
CREATE FUNCTION claim_batch(requests text[]) RETURNS bigint LANGUAGE sql AS $$
	SELECT count(*) FROM idem_claim_many(array_fill('u'::text, ARRAY[cardinality(requests)]), requests, wait => '10 min')
	WHERE outcome = 'claimed'
$$;
CREATE FUNCTION keys(prefix text, first int, last int) RETURNS text[] LANGUAGE sql AS $$
	SELECT array_agg(prefix || lpad(i::text, 4, '0') ORDER BY i) FROM generate_series(first, last) AS i
$$;
-- Stops an insert at a key while another session has the lock
CREATE FUNCTION hold_up(request_id text) RETURNS text IMMUTABLE LANGUAGE plpgsql AS $$
BEGIN
	IF request_id LIKE '%0050' THEN
		PERFORM pg_advisory_xact_lock_shared(6);
	END IF;
	RETURN 'x';
END $$;
});
my $connection = 'host=' . $node->host . ' port=' . $node->port . ' dbname=postgres';
query("CREATE SUBSCRIPTION claims CONNECTION '$connection' PUBLICATION claims WITH (create_slot = false, copy_data = false)",
	'subscriber');

sub same_rows
{
	my ($name) = @_;
	my $rows = q{SELECT count(*), md5(string_agg(c::text, ' ' ORDER BY request_id, user_id, scope)) FROM idem_claims c};
	my $expected = query($rows);

	ok($node->poll_query_until('subscriber', $rows, $expected), "$name: the subscriber has the same rows");
	is(query(q{SELECT count(*) FROM verify_heapam('idem_claims')}), 0, "$name: the table is in order");
	return;
}

# Rows with NULLs after different columns, and their updates
for my $identity ('DEFAULT', 'FULL')
{
	query("ALTER TABLE idem_claims REPLICA IDENTITY $identity");
	query(qq{
		SELECT idem_claim('u', '$identity ' || kind, fingerprint => fingerprint)
		FROM (VALUES ('marker', NULL), ('fingerprint', '\\x01'::bytea), ('forgotten', NULL)) AS v (kind, fingerprint);
		SELECT idem_lease('u', '$identity lease', lease => '1 h');
		SELECT idem_lease('u', '$identity progress', lease => '1 h', progress => '1');
		BEGIN; SELECT idem_claim('u', '$identity result'); SELECT idem_complete('2'); COMMIT;
		BEGIN; SELECT idem_claim('u', '$identity error'); SELECT idem_fail('3'); COMMIT;
		BEGIN; SELECT idem_claim('u', '$identity rolled back'); ROLLBACK;
		SELECT idem_forget('u', '$identity forgotten');
		SELECT idem_heal('u', '$identity progress', '4');
		UPDATE idem_claims SET expires_at = now() - interval '1 day' WHERE request_id = '$identity marker';
		SELECT idem_claim('u', '$identity second');
	});
	same_rows("rows, $identity");
	query('SELECT idem_cleanup()');
	same_rows("cleanup, $identity");
}
is(query(q{SELECT count(*) FROM idem_claims WHERE request_id LIKE '%marker'}), 0, 'the expired ones are gone');

# Optimistic inserts of keys that are stored
is(query(q{SELECT claim_all(keys('n ', 1, 300)), claim_all(keys('n ', 250, 500)), claim_all(keys('n ', 490, 800))}),
	'300|200|300', 'new keys and old ones in one transaction');
same_rows('guesses');

# A batch that loses one of its keys while it writes them
query('CREATE INDEX hold_up ON idem_claims (hold_up(request_id))');
my ($gate, $batch, $other) = map { Client->new($node) } 1 .. 3;
$gate->ask('SELECT pg_advisory_lock(6)');
$batch->send(q{SELECT claim_batch(keys('b ', 1, 200))});
ok( $node->poll_query_until('postgres', q{SELECT wait_event = 'advisory' FROM pg_stat_activity WHERE pid = } . $batch->pid),
	'a batch is held up');
is($other->ask(q{SELECT idem_claim('u', 'b 0100')}), 't', 'another session claims a key that it has not come to');
$gate->ask('SELECT pg_advisory_unlock(6)');
is($batch->answer, 199, 'the batch has the others');
same_rows('batch');
$_->quit for ($gate, $batch, $other);

is(query('SELECT count(*) FROM idem_claims'), query('SELECT count(DISTINCT (request_id, user_id, scope)) FROM idem_claims'),
	'each key has one row');
query(q{
ALTER SUBSCRIPTION claims DISABLE;
ALTER SUBSCRIPTION claims SET (slot_name = NONE);
DROP SUBSCRIPTION claims;
}, 'subscriber');
$node->stop;
unlike(slurp_file($node->logfile), qr/TRAP|was terminated by signal|WARNING:.*leak|duplicate key/, 'nothing broke');

done_testing();
