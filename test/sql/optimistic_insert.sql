-- After a hundred new keys in one transaction the next key is inserted without probing for it
-- first: the answers are the same, whatever row is stored. Where caches are discarded no session
-- gets to an optimistic insert.
\set SHOW_CONTEXT never
SELECT current_setting('debug_discard_caches') <> '0' AS discarding \gset
\if :discarding
\echo skipped, since caches are discarded
\quit
\endif
CREATE FUNCTION claim_new(n int) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
	claimed bigint := 0;
BEGIN
	FOR i IN 1 .. n LOOP
		IF idem_claim('new', gen_random_uuid()::text) THEN
			claimed := claimed + 1;
		END IF;
	END LOOP;
	RETURN claimed;
END $$;
INSERT INTO idem_scopes (scope, ttl, failed) VALUES ('again', '1 hour', 'retryable');
INSERT INTO idem_scopes (scope, ttl, expired) VALUES ('reclaim', '1 hour', 'reclaim');
INSERT INTO idem_scopes (scope, ttl, key_time) VALUES ('timed', '1 hour', 'uuidv7');
-- Rows for the keys that are claimed below
SELECT idem_claim('u', 'marker'), idem_claim('u', 'fingerprint', fingerprint => '\x01');
BEGIN;
SELECT idem_claim('u', 'completed'), idem_complete('"done"');
SELECT idem_claim('u', 'failed'), idem_fail('"no"');
SELECT idem_claim('u', 'failed', 'again'), idem_fail('"once more"');
SELECT idem_claim('u', 'expired', 'reclaim');
UPDATE idem_claims SET expires_at = now() - interval '1 s' WHERE request_id = 'expired';
COMMIT;
SELECT outcome FROM idem_lease('u', 'lease', lease => '1 h');
CREATE FUNCTION after_new(request text, scope text DEFAULT '', fingerprint bytea DEFAULT NULL)
RETURNS TABLE (n bigint, outcome idem_outcome, result jsonb, status idem_outcome) LANGUAGE plpgsql AS $$
BEGIN
	n := claim_new(150);
	SELECT t.outcome, t.result INTO after_new.outcome, after_new.result
	FROM idem_try_claim('u', request, after_new.scope, after_new.fingerprint, wait => '0') AS t;
	status := idem_outcome();
	RETURN NEXT;
END $$;
SELECT * FROM after_new('marker');
SELECT * FROM after_new('completed');
SELECT * FROM after_new('failed');
SELECT * FROM after_new('failed', 'again');
SELECT * FROM after_new('expired', 'reclaim');
SELECT * FROM after_new('fingerprint', fingerprint => '\x01');
SELECT * FROM after_new('fingerprint', fingerprint => '\x02');
SELECT * FROM after_new('lease');
SELECT * FROM after_new('00000000-0000-7000-8000-000000000000', 'timed');
SELECT * FROM after_new('not a uuid', 'timed');
SELECT * FROM after_new('new');
SELECT idem_status('u', 'new'), idem_status('u', 'failed', 'again'), idem_status('u', 'expired', 'reclaim');
-- In the same transaction: a key that is claimed a second time, one that is forgotten, and one
-- whose claim ROLLBACK TO has undone
BEGIN;
SELECT n, outcome FROM after_new('second');
SELECT n, outcome FROM after_new('second');
SELECT idem_complete('u', 'second', '2');
SELECT n, outcome, result FROM after_new('second');
SELECT idem_forget('u', 'second');
SELECT n, outcome, result FROM after_new('second');
SAVEPOINT s;
SELECT n, outcome FROM after_new('rolled back');
ROLLBACK TO s;
SELECT n, outcome FROM after_new('rolled back');
SELECT n, outcome FROM after_new('rolled back');
COMMIT;
SELECT request_id, count(*) FROM idem_claims WHERE user_id = 'u' GROUP BY request_id ORDER BY request_id;
-- A batch of many keys after a hundred times as many new ones: the rows of some keys are there.
CREATE FUNCTION batch_after_new(requests text[], scope text DEFAULT '', fingerprint bytea DEFAULT NULL)
RETURNS TABLE (request text, outcome idem_outcome, result jsonb) LANGUAGE plpgsql AS $$
DECLARE
	filled text[] := requests || array_agg((i % 10) || 'x' || gen_random_uuid()) FROM generate_series(1, 100) AS i;
BEGIN
	PERFORM idem_claim_many(array_fill('new'::text, ARRAY[12000]),
		(SELECT array_agg(gen_random_uuid()::text) FROM generate_series(1, 12000)));
	RETURN QUERY SELECT CASE WHEN ordinal <= cardinality(requests) THEN filled[ordinal] ELSE 'others' END, t.outcome, t.result
	FROM idem_claim_many(array_fill('u'::text, ARRAY[cardinality(filled)]), filled, batch_after_new.scope,
		array_fill(fingerprint, ARRAY[cardinality(filled)]), wait => '0') AS t
	WHERE ordinal <= cardinality(requests) + 1;
END $$;
SELECT * FROM batch_after_new('{marker,completed,failed,fingerprint,lease,batch}', fingerprint => '\x02');
SELECT * FROM batch_after_new('{marker,completed,failed,batch,batch,twice,twice}');
UPDATE idem_claims SET expires_at = now() - interval '1 s' WHERE request_id = 'expired';
SELECT * FROM batch_after_new('{expired}', 'reclaim');
SELECT * FROM batch_after_new('{failed}', 'again');
SELECT * FROM batch_after_new('{00000000-0000-7000-8000-000000000000,not a uuid}', 'timed');
BEGIN;
SELECT idem_claim('u', 'own'), idem_complete('"own"');
SELECT * FROM batch_after_new('{own,forgotten}');
SELECT idem_forget('u', 'forgotten');
SELECT * FROM batch_after_new('{forgotten}');
COMMIT;
SELECT request_id, count(*) FROM idem_claims WHERE user_id = 'u' AND request_id !~ '^\dx' GROUP BY request_id ORDER BY request_id;
DELETE FROM idem_scopes WHERE scope IN ('again', 'reclaim', 'timed');
TRUNCATE idem_claims;
DROP FUNCTION claim_new, after_new, batch_after_new;
