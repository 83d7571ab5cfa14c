-- Claims cannot be made in read-only transactions and in parallel workers; and how the
-- functions are labelled. A standby is in test/t/031_standby.pl.
-- :SQLSTATE is that of the statement before.

\set SHOW_CONTEXT never

SELECT idem_claim('u', 'before');

-- Every function that can write raises an error, also if it would write nothing.
BEGIN READ ONLY;
SAVEPOINT s;
SELECT idem_claim('u', 'before');
\echo :SQLSTATE
ROLLBACK TO s;
SELECT * FROM idem_try_claim('u', 'new', wait => '0');
\echo :SQLSTATE
ROLLBACK TO s;
SELECT idem_complete('u', 'before', NULL);
\echo :SQLSTATE
ROLLBACK TO s;
SELECT idem_fail('u', 'before', NULL);
\echo :SQLSTATE
ROLLBACK TO s;
SELECT idem_forget('u', 'before');
\echo :SQLSTATE
ROLLBACK TO s;
SELECT idem_cleanup();
\echo :SQLSTATE
ROLLBACK TO s;
-- Arguments are checked first.
SELECT idem_claim('u', '');
\echo :SQLSTATE
ROLLBACK TO s;
-- Functions that only read work.
SELECT idem_status('u', 'before'), idem_result('u', 'before'), idem_status('u', 'new') IS NULL AS none;
SELECT state FROM idem_lookup('u', 'before');
ROLLBACK;
SET default_transaction_read_only = on;
SELECT idem_claim('u', 'new');
\echo :SQLSTATE
CALL idem_cleanup_all();
\echo :SQLSTATE
RESET default_transaction_read_only;

-- A transaction that becomes read-only keeps its claims and answers.
BEGIN;
SELECT idem_claim('u', 'then read-only');
SET TRANSACTION READ ONLY;
SELECT idem_outcome(), idem_result();
SAVEPOINT s;
SELECT idem_complete('1');
\echo :SQLSTATE
ROLLBACK TO s;
SELECT idem_claim('u', 'then read-only');
\echo :SQLSTATE
ROLLBACK TO s;
COMMIT;
SELECT idem_claim('u', 'then read-only');

-- Read-only after a savepoint
BEGIN;
SAVEPOINT s;
SET TRANSACTION READ ONLY;
SELECT idem_claim('u', 'savepoint');
\echo :SQLSTATE
ROLLBACK TO s;
SELECT idem_claim('u', 'savepoint');
COMMIT;

-- Volatility, parallel safety and cost of the functions
SELECT p.oid::regprocedure AS routine, provolatile, proparallel, procost >= 10000 AS late
FROM pg_proc p
WHERE proname ~ '^idem_[a-z]' AND prokind = 'f' AND proname !~ '_stat_|_step|_scopes_|_rights|_promise|_distribute|_unsettled_|_held_|_start_worker|_call_'
	AND coalesce(array_to_string(proargnames[:2], ' '), '') !~ 'user_uuid|user_number|request_uuid'
ORDER BY p.proname COLLATE "C", p.pronargs;
-- The planner evaluates a cheap condition before a claim, wherever it stands in the WHERE.
SELECT i FROM generate_series(1, 4) AS i WHERE idem_claim('filter', i::text) AND i % 2 = 0;
SELECT request_id FROM idem_claims WHERE user_id = 'filter' ORDER BY 1;
-- No parallel plan calls a claim. A wrapper that is wrongly marked PARALLEL SAFE raises an
-- error.
CREATE TABLE ids AS SELECT i::text AS id FROM generate_series(1, 1000) AS i;
ANALYZE ids;
SET parallel_setup_cost = 0;
SET parallel_tuple_cost = 0;
SET min_parallel_table_scan_size = 0;
SET max_parallel_workers_per_gather = 2;
SELECT count(*) FROM ids WHERE idem_claim('parallel', id);
SELECT count(*) FROM ids WHERE idem_status('parallel', id) = 'completed';
SELECT count(*) FROM ids WHERE idem_fingerprint(to_jsonb(id)) IS NOT NULL;
-- In a parallel query the leader reads requests, also those that its own transaction has claimed.
CREATE FUNCTION is_parallel(query text) RETURNS bool LANGUAGE plpgsql AS $$
DECLARE
	plan json;
BEGIN
	EXECUTE 'EXPLAIN (FORMAT json) ' || query INTO plan;
	RETURN plan::text LIKE '%Gather%';
END $$;
\set QUERY 'SELECT id, idem_status(''parallel'', id), idem_result(''parallel'', id), (SELECT state FROM idem_lookup(''parallel'', id)) FROM ids WHERE id IN (''7'', ''8'', ''none'')'
SELECT is_parallel(:'QUERY');
INSERT INTO ids VALUES ('none');
BEGIN;
SELECT idem_forget('parallel', '8');
SELECT idem_claim('parallel', '8'), idem_complete('"eight"');
:QUERY ORDER BY 1;
COMMIT;
:QUERY ORDER BY 1;
-- So it does where the answers go into a table.
CREATE TABLE answers AS :QUERY;
CREATE MATERIALIZED VIEW answers_again AS :QUERY WITH NO DATA;
REFRESH MATERIALIZED VIEW answers_again;
SELECT count(*) AS answers FROM answers JOIN answers_again USING (id);
DROP TABLE answers;
DROP MATERIALIZED VIEW answers_again;
DROP FUNCTION is_parallel;
CREATE FUNCTION claim_unsafely(text) RETURNS bool LANGUAGE plpgsql PARALLEL SAFE COST 100000
AS $$ BEGIN RETURN idem_claim('unsafe', $1); END $$;
DO $$
BEGIN
	PERFORM count(*) FROM ids WHERE claim_unsafely(id);
	RAISE WARNING 'claimed in parallel';
EXCEPTION WHEN invalid_transaction_state THEN
	RAISE NOTICE '%', SQLSTATE;
END $$;
SELECT count(*) FROM idem_claims WHERE user_id = 'unsafe';
DROP FUNCTION claim_unsafely;
DROP TABLE ids;

TRUNCATE idem_claims;
