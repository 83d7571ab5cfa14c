-- How many rows optimistic inserts write in vain, and when claims probe first instead. For the
-- C edition. Where caches are discarded no session gets to an optimistic insert.
\set SHOW_CONTEXT never
SELECT current_setting('debug_discard_caches') <> '0' AS discarding \gset
\if :discarding
\echo skipped, since caches are discarded
\quit
\endif
CREATE FUNCTION claim_all(prefix text, n int, OUT claimed bigint, OUT written bigint) LANGUAGE plpgsql AS $$
BEGIN
	claimed := 0;
	written := -pg_stat_get_xact_tuples_inserted('idem_claims'::regclass);
	FOR i IN 1 .. n LOOP
		IF idem_claim('u', prefix || i) THEN
			claimed := claimed + 1;
		END IF;
	END LOOP;
	written := written + pg_stat_get_xact_tuples_inserted('idem_claims'::regclass);
END $$;
-- After a hundred new keys the first duplicate writes one row in vain. No other duplicate does.
BEGIN;
SELECT * FROM claim_all('a ', 1000);
SELECT * FROM claim_all('a ', 1000);
SELECT * FROM claim_all('b ', 99);
SELECT * FROM claim_all('b ', 99);
SELECT * FROM claim_all('c ', 100);
SELECT * FROM claim_all('c ', 100);
COMMIT;
BEGIN;
SELECT * FROM claim_all('c ', 100);
COMMIT;
-- New keys are also counted across transactions.
DO $$
BEGIN
	FOR i IN 1 .. 100 LOOP
		PERFORM idem_claim('u', 'f ' || i);
		COMMIT;
	END LOOP;
END $$;
SELECT * FROM claim_all('f ', 2);
SELECT * FROM claim_all('f ', 2);
-- A batch of n keys, 64 or more, is inserted without a probe after n times a hundred new keys, of
-- single claims or batches. One duplicate then costs n rows, unless it is among the first keys,
-- which are always probed for. "probed" counts the scans of the primary key.
CREATE FUNCTION claim_batch(keys text, extra text[], OUT claimed bigint, OUT written bigint, OUT probed bigint) LANGUAGE plpgsql AS $$
DECLARE
	requests text[] := extra || array_agg(md5(split_part(keys, ' ', 1) || i)) FROM generate_series(1, split_part(keys, ' ', 2)::int) AS i;
	key_index regclass := (SELECT conindid FROM pg_constraint WHERE conrelid = 'idem_claims'::regclass AND contype = 'p');
BEGIN
	written := -pg_stat_get_xact_tuples_inserted('idem_claims'::regclass);
	probed := -pg_stat_get_xact_numscans(key_index);
	SELECT count(*) FILTER (WHERE outcome = 'claimed') INTO claimed
	FROM idem_claim_many(array_fill('batch'::text, ARRAY[cardinality(requests)]), requests);
	written := written + pg_stat_get_xact_tuples_inserted('idem_claims'::regclass);
	probed := probed + pg_stat_get_xact_numscans(key_index);
END $$;
BEGIN;
SELECT idem_claim('batch', 'f'), idem_claim('batch', '0');
SELECT claimed, written FROM claim_batch('g 6500', '{}');
SELECT * FROM claim_batch('80 80', '{}');
SELECT * FROM claim_batch('64 64', '{}');
SELECT * FROM claim_batch('63 63', '{}');
-- A duplicate behind the sixteenth key, and again; then the first key
SELECT * FROM claim_batch('k 63', '{f}');
SELECT * FROM claim_batch('l 63', '{f}');
SELECT claimed, written FROM claim_batch('m 7000', '{}');
SELECT * FROM claim_batch('n 63', '{0}');
-- New keys that are rolled back count, too.
SELECT * FROM claim_all('o ', 6500);
SAVEPOINT s;
SELECT * FROM claim_batch('p 64', '{}');
ROLLBACK TO s;
SELECT * FROM claim_batch('p 64', '{}');
COMMIT;
DROP FUNCTION claim_batch;
DELETE FROM idem_claims WHERE user_id = 'batch' OR request_id LIKE 'o %';
-- With an index of a user every claim probes first: that index must never get a row of a key
-- that is already stored.
CREATE UNIQUE INDEX regress_idem_unique ON idem_claims (user_id, request_id);
BEGIN;
SELECT * FROM claim_all('d ', 200);
SELECT * FROM claim_all('d ', 200);
DROP INDEX regress_idem_unique;
SELECT * FROM claim_all('e ', 200);
CREATE UNIQUE INDEX regress_idem_unique ON idem_claims (user_id, request_id);
SELECT * FROM claim_all('e ', 200);
COMMIT;
SELECT count(*) FROM idem_claims;
TRUNCATE idem_claims;
DROP INDEX regress_idem_unique;
-- So it is with one that has the name of an index of the extension.
DROP INDEX idem_claims_expires_at_idx;
CREATE UNIQUE INDEX idem_claims_expires_at_idx ON idem_claims (lower(request_id));
SELECT * FROM claim_all('f ', 200);
SELECT * FROM claim_all('f ', 200);
TRUNCATE idem_claims;
DROP INDEX idem_claims_expires_at_idx;
-- An index of another table is none of ours.
CREATE TABLE regress_idem_other (LIKE idem_claims);
CREATE INDEX idem_claims_expires_at_idx ON regress_idem_other (expires_at);
SELECT idem_claim('u', 'beside another table');
SELECT idem_cleanup();
DROP TABLE regress_idem_other;
TRUNCATE idem_claims;
CREATE INDEX idem_claims_expires_at_idx ON idem_claims (expires_at);
DROP FUNCTION claim_all;
