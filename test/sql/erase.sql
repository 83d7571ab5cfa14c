-- idem_erase(): what was stored of a user's settled requests goes, the guard stays.
\set SHOW_CONTEXT never

CREATE FUNCTION lapse() RETURNS void LANGUAGE sql AS $$
	UPDATE idem_claims SET lease_until = '2000-01-01' WHERE state = 'in_progress' $$;
CREATE VIEW rows AS SELECT user_id, scope, request_id, state, fingerprint, result, progress, token IS NOT NULL AS has_token,
		lease_until IS NULL AS no_lease, expires_at > now() + interval '59 min' AS remembered
	FROM idem_claims ORDER BY user_id COLLATE "C", scope, request_id;

SELECT idem_claim('u', 'completed', fingerprint => '\x01'), idem_complete('{"name": "Ada"}');
SELECT idem_claim('u', 'failed', 's'), idem_fail('{"name": "Ada"}');
SELECT idem_claim('u', 'marker');
SELECT idem_claim('v', 'completed'), idem_complete('"of another user"');
SELECT token FROM idem_lease('u', 'leased', lease => '1 h', progress => '"made 1"') \gset
SELECT idem_complete('u', 'leased', '{"name": "Ada"}', :token);
SELECT outcome FROM idem_lease('u', 'healed', lease => '1 h', progress => '"made 1"');
SELECT idem_heal('u', 'healed', '{"name": "Ada"}');
SELECT outcome FROM idem_lease('u', 'live', lease => '1 h', progress => '"made 1"');
SELECT outcome FROM idem_lease('u', 'live without progress', lease => '1 h');

CALL idem_erase('nobody');
CALL idem_erase('u', 's');
SELECT * FROM rows;
CALL idem_erase('u');
SELECT * FROM rows;
-- again: nothing is left but the lease in progress, also when it has lapsed
CALL idem_erase('u');
SELECT lapse();
CALL idem_erase('u');

-- the requests are guarded as before
SELECT outcome, result FROM idem_try_claim('u', 'completed', fingerprint => '\x01');
SELECT outcome, result FROM idem_try_claim('u', 'completed', fingerprint => '\x02');
SELECT outcome, result FROM idem_try_claim('u', 'failed', 's');
SELECT outcome, result FROM idem_try_claim('u', 'leased');
SELECT outcome, result FROM idem_try_claim('u', 'healed');
-- A holder that did not hear of its commit repeats it, with what was erased.
SELECT idem_complete('u', 'leased', NULL, :token);
SELECT idem_complete('u', 'leased', '{"name": "Ada"}', :token);

-- more than one batch
INSERT INTO idem_claims (expires_at, state, request_id, user_id, scope, result)
	SELECT date_trunc('second', now() + interval '1 h'), 'completed', i::text, 'many', '', to_jsonb(i) FROM generate_series(1, 2500) AS i;
CALL idem_erase('many');
SELECT count(*), count(result) FROM idem_claims WHERE user_id = 'many';
-- It does not commit after each request in progress.
INSERT INTO idem_claims (expires_at, lease_until, token, state, request_id, user_id, scope, progress)
	SELECT date_trunc('second', now() + interval '1 h'), now() + interval '1 h', i, 'in_progress', i::text, 'busy', '', '1'
	FROM generate_series(1, 300) AS i;
SELECT pg_stat_force_next_flush();
SELECT pg_stat_get_db_xact_commit(oid) AS commits FROM pg_database WHERE datname = current_database() \gset
CALL idem_erase('busy');
SELECT pg_stat_force_next_flush();
SELECT pg_stat_get_db_xact_commit(oid) - :commits < 100 AS few_commits FROM pg_database WHERE datname = current_database();

-- bad input
CALL idem_erase(NULL);
CALL idem_erase('');
CALL idem_erase('u', repeat('s', 256));

-- It commits, so it raises an error where it may not, and has erased nothing.
SELECT idem_claim('w', 'r'), idem_complete('{"name": "Ada"}');
BEGIN;
CALL idem_erase('w');
\echo :SQLSTATE
ROLLBACK;
CREATE FUNCTION erase() RETURNS void LANGUAGE plpgsql AS $$ BEGIN CALL idem_erase('w'); END $$;
SELECT erase();
DO $$ BEGIN CALL idem_erase('w'); EXCEPTION WHEN division_by_zero THEN END $$;
DROP FUNCTION erase;
SELECT idem_result('w', 'r');
CREATE PROCEDURE erase_and_claim() LANGUAGE plpgsql AS $$
BEGIN
	CALL idem_erase('w');
	RAISE NOTICE 'result %', idem_result('w', 'r');
END $$;
CALL erase_and_claim();
DROP PROCEDURE erase_and_claim;

DROP VIEW rows;
DROP FUNCTION lapse;
TRUNCATE idem_claims;
