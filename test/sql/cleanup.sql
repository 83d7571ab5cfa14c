-- Removing expired claims: idem_cleanup() removes one batch in the caller's transaction,
-- idem_cleanup_all() removes all.
-- :SQLSTATE is that of the statement before.

\set SHOW_CONTEXT never

-- n expired claims; each expired an hour before the previous one
CREATE FUNCTION pg_temp.expired(n int) RETURNS void LANGUAGE sql AS $$
	TRUNCATE idem_claims;
	INSERT INTO idem_claims (expires_at, state, request_id, user_id, scope)
		SELECT '2020-01-01 UTC'::timestamptz - interval '1 hour' * i, 'completed', i, 'u', '' FROM generate_series(1, n) AS i;
$$;
CREATE VIEW pg_temp.left_over AS
SELECT string_agg(request_id, ' ' ORDER BY least(expires_at, now()) DESC, request_id DESC) FROM idem_claims;

-- Nothing to do
SELECT idem_cleanup();
CALL idem_cleanup_all();

-- A cleanup removes expired claims only, of every state and scope.
SELECT idem_claim('u', 'live');
SELECT idem_claim('u', i::text, 's') FROM generate_series(1, 3) AS i;
BEGIN;
SELECT idem_claim('u', 'failed', 's'), idem_fail('1');
COMMIT;
INSERT INTO idem_scopes (scope, expired, failed) VALUES ('s', 'reclaim', 'retryable');
SELECT idem_cleanup();
UPDATE idem_claims SET expires_at = now() - interval '1 s' WHERE scope = 's';
UPDATE idem_claims SET expires_at = now() + interval '1 hour' WHERE request_id = '3';
-- expired = protect: a claim guards until a cleanup removes it.
UPDATE idem_scopes SET expired = 'protect', failed = 'terminal';
SELECT idem_claim('u', '1', 's'), idem_status('u', 'failed', 's');
SELECT idem_cleanup();
TABLE pg_temp.left_over;
SELECT idem_claim('u', '1', 's'), idem_claim('u', 'failed', 's'), idem_claim('u', '3', 's'), idem_claim('u', 'live');
SELECT idem_cleanup();
TRUNCATE idem_claims, idem_scopes;

-- A batch has the size that is asked for, and removes the oldest claims first.
SELECT pg_temp.expired(10);
SELECT idem_cleanup(3);
TABLE pg_temp.left_over;
SELECT idem_cleanup(1), idem_cleanup(2);
TABLE pg_temp.left_over;
SELECT idem_cleanup(4);
SELECT idem_cleanup(4);
SELECT pg_temp.expired(10);
SELECT idem_cleanup(1000000);
SELECT pg_temp.expired(10);
SELECT idem_cleanup(NULL);
SELECT idem_cleanup(0);
\echo :SQLSTATE
SELECT idem_cleanup(-1);
\echo :SQLSTATE
SELECT idem_cleanup(1000001);
\echo :SQLSTATE
CALL idem_cleanup_all(0);
\echo :SQLSTATE

-- The batch is part of its transaction, and the rows are gone for its next statement.
SELECT pg_temp.expired(4);
BEGIN;
SELECT idem_cleanup(2);
TABLE pg_temp.left_over;
SELECT idem_status('u', '4');
SAVEPOINT s;
SELECT idem_cleanup();
SELECT idem_cleanup();
TABLE pg_temp.left_over;
ROLLBACK TO s;
TABLE pg_temp.left_over;
-- The same transaction can claim a key that it removed, and then holds it.
SELECT idem_claim('u', '4') AS removed, idem_claim('u', '1') AS still_there;
SELECT idem_complete('"executed again"');
SELECT idem_cleanup();
COMMIT;
TABLE pg_temp.left_over;
SELECT idem_result('u', '4');
SELECT pg_temp.expired(2);
BEGIN;
SELECT idem_cleanup();
ROLLBACK;
TABLE pg_temp.left_over;
-- A cleanup also removes an expired claim of its own transaction.
BEGIN;
SELECT idem_claim('u', 'own');
UPDATE idem_claims SET expires_at = '2019-01-01 UTC' WHERE request_id = 'own';
SELECT idem_cleanup(1);
TABLE pg_temp.left_over;
ROLLBACK;
-- A cursor that was opened before still sees the rows.
BEGIN;
DECLARE before CURSOR FOR SELECT request_id FROM idem_claims ORDER BY 1;
SELECT idem_cleanup();
FETCH ALL FROM before;
COMMIT;

-- Large results are removed with their rows.
SELECT idem_claim('u', 'large'), idem_claim('u', 'large 2');
UPDATE idem_claims SET result = (SELECT jsonb_agg(md5(i::text)) FROM generate_series(1, 2000) AS i), expires_at = '2020-01-01';
SELECT idem_cleanup();

-- All of them, in batches that are committed one after the other
SELECT pg_temp.expired(1000);
SELECT idem_claim('u', 'live');
CALL idem_cleanup_all(7);
TABLE pg_temp.left_over;
SELECT pg_temp.expired(1000);
-- Many that expire in the same second
UPDATE idem_claims SET expires_at = '2020-01-01 UTC' WHERE request_id::int > 10;
CALL idem_cleanup_all(100);
SELECT count(*) FROM idem_claims;
SELECT pg_temp.expired(1000);
CALL idem_cleanup_all();
SELECT count(*) FROM idem_claims;
-- It commits, so it raises an error in a transaction block.
SELECT pg_temp.expired(3);
BEGIN;
CALL idem_cleanup_all();
\echo :SQLSTATE
ROLLBACK;
TABLE pg_temp.left_over;
-- Called by another procedure
CREATE PROCEDURE clean_and_claim() LANGUAGE plpgsql AS $$
BEGIN
	CALL idem_cleanup_all(1);
	RAISE NOTICE '% left, %', (SELECT count(*) FROM idem_claims), idem_claim('u', 'after');
END $$;
CALL clean_and_claim();
CREATE FUNCTION clean() RETURNS void LANGUAGE plpgsql AS 'BEGIN CALL idem_cleanup_all(); END';
SELECT clean();
\echo :SQLSTATE
DO 'BEGIN CALL idem_cleanup_all(); EXCEPTION WHEN division_by_zero THEN END';
\echo :SQLSTATE
DROP FUNCTION clean;
DROP PROCEDURE clean_and_claim;

-- One step of it: no claim is removed before it expires, whatever cutoff the caller gives.
SELECT pg_temp.expired(3);
SELECT idem_claim('u', 'live');
SELECT rows_deleted, more, next_start = '2019-01-01 UTC' AS up_to_the_cutoff FROM idem__cleanup_step(2, '-infinity', '2019-01-01 UTC');
SELECT rows_deleted, more FROM idem__cleanup_step(1, '2019-12-31 22:00 UTC', 'infinity');
TABLE pg_temp.left_over;
SELECT rows_deleted, more, next_start <= clock_timestamp() AS from_now FROM idem__cleanup_step(NULL, NULL, NULL);
TABLE pg_temp.left_over;

-- A row that this transaction has locked is not skipped.
SELECT pg_temp.expired(3);
BEGIN;
SELECT request_id FROM idem_claims WHERE request_id = '2' FOR UPDATE;
SELECT idem_cleanup();
ROLLBACK;

-- A scan of either index finds no removed row.
SELECT pg_temp.expired(500);
-- A batch ends after a second: a slow server removes fewer rows.
SELECT idem_cleanup(400) AS cleaned \gset
SELECT :cleaned BETWEEN 1 AND 400 AS cleaned;
SET enable_seqscan = off;
SET enable_bitmapscan = off;
SELECT :cleaned + count(*) AS count FROM idem_claims WHERE expires_at < '2021-01-01';
SELECT :cleaned + count(*) AS count FROM idem_claims WHERE request_id > '';
RESET enable_seqscan;
RESET enable_bitmapscan;

TRUNCATE idem_claims;
