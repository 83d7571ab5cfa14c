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
DROP FUNCTION claim_all;
