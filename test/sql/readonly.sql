-- Where claims cannot be made: read-only transactions and parallel workers; and
-- how the functions are labelled. (A standby: test/t.)
-- :SQLSTATE is that of the statement before.

\set SHOW_CONTEXT never

SELECT idem_claim('u', 'before');

-- Everything that writes refuses, whatever it would find.
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
-- Arguments are looked at first.
SELECT idem_claim('u', '');
\echo :SQLSTATE
ROLLBACK TO s;
-- Reading does not write.
SELECT idem_status('u', 'before'), idem_result('u', 'before'), idem_status('u', 'new') IS NULL AS none;
SELECT state FROM idem_lookup('u', 'before');
ROLLBACK;
SET default_transaction_read_only = on;
SELECT idem_claim('u', 'new');
\echo :SQLSTATE
CALL idem_cleanup_all();
\echo :SQLSTATE
RESET default_transaction_read_only;

-- A transaction that becomes read-only keeps what it claimed, and its answers.
BEGIN;
SELECT idem_claim('u', 'then read-only');
SET TRANSACTION READ ONLY;
SELECT idem_status(), idem_result();
SAVEPOINT s;
SELECT idem_complete('1');
\echo :SQLSTATE
ROLLBACK TO s;
SELECT idem_claim('u', 'then read-only');
\echo :SQLSTATE
ROLLBACK TO s;
COMMIT;
SELECT idem_claim('u', 'then read-only');

-- In a savepoint that is read-only
BEGIN;
SAVEPOINT s;
SET TRANSACTION READ ONLY;
SELECT idem_claim('u', 'savepoint');
\echo :SQLSTATE
ROLLBACK TO s;
SELECT idem_claim('u', 'savepoint');
COMMIT;

-- Labels
SELECT p.oid::regprocedure AS routine, provolatile, proparallel, procost >= 10000 AS late
FROM pg_proc p
WHERE proname ~ '^idem_[a-z]' AND prokind = 'f' AND proname !~ '_stat_|_step|_scopes_|_rights|_promise|_distribute'
ORDER BY p.proname COLLATE "C", p.pronargs;
-- A filter runs before a claim, wherever it stands.
SELECT i FROM generate_series(1, 4) AS i WHERE idem_claim('filter', i::text) AND i % 2 = 0;
SELECT request_id FROM idem_claims WHERE user_id = 'filter' ORDER BY 1;
-- No parallel plan calls one; a wrapper that lies about itself is refused.
CREATE TABLE ids AS SELECT i::text AS id FROM generate_series(1, 1000) AS i;
ANALYZE ids;
SET parallel_setup_cost = 0;
SET parallel_tuple_cost = 0;
SET min_parallel_table_scan_size = 0;
SET max_parallel_workers_per_gather = 2;
SELECT count(*) FROM ids WHERE idem_claim('parallel', id);
SELECT count(*) FROM ids WHERE idem_status('parallel', id) = 'completed';
SELECT count(*) FROM ids WHERE idem_fingerprint(to_jsonb(id)) IS NOT NULL;
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
