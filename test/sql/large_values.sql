-- Results and progress that are too large for a row are stored out of line (TOAST). A value is
-- not written again if it does not change, and not read if the answer does not need it. For
-- the C edition.

\set SHOW_CONTEXT never

CREATE FUNCTION pg_temp.large(seed text) RETURNS jsonb LANGUAGE sql AS $$
	SELECT to_jsonb(string_agg(md5(seed || i), '')) FROM generate_series(1, 20000) AS i
$$;
SELECT length(pg_temp.large('a')::text) > 600000 AS is_large;
CREATE FUNCTION pg_temp.toast() RETURNS oid LANGUAGE sql AS $$
	SELECT reltoastrelid FROM pg_class WHERE oid = 'idem_claims'::regclass
$$;
CREATE FUNCTION pg_temp.stored_bytes() RETURNS bigint LANGUAGE sql AS $$
	SELECT pg_relation_size(pg_temp.toast()::regclass)
$$;
-- Does a statement read blocks of the TOAST table?
CREATE FUNCTION pg_temp.reads_values(statement text) RETURNS boolean LANGUAGE plpgsql AS $$
DECLARE
	before bigint := pg_stat_get_xact_blocks_fetched(pg_temp.toast());
BEGIN
	EXECUTE statement;
	RETURN pg_stat_get_xact_blocks_fetched(pg_temp.toast()) > before;
END $$;

INSERT INTO idem_scopes (scope, failed, expired) VALUES ('retry', 'retryable', 'reclaim');

-- ----- a value that does not change is not written again -----

-- The holder extends its lease.
SELECT token FROM idem_lease('u', 'held', lease => '1 h', progress => pg_temp.large('a')) \gset
SELECT pg_temp.stored_bytes() AS before \gset
SELECT count(idem_extend('u', 'held', :token, '1 h')) FROM generate_series(1, 20);
SELECT pg_temp.stored_bytes() > :before AS grown;
SELECT progress = pg_temp.large('a') AS is_kept FROM idem_lookup('u', 'held');
-- New progress is written, and replaces the old one.
SELECT idem_extend('u', 'held', :token, '1 h', progress => pg_temp.large('b')) > now() AS extended;
SELECT progress = pg_temp.large('b') AS is_new FROM idem_lookup('u', 'held');
SELECT pg_temp.stored_bytes() > :before AS grown;

-- The lease lapses, and the next holder gets the progress.
UPDATE idem_claims SET lease_until = now() - interval '1 s' WHERE request_id = 'held';
SELECT pg_temp.stored_bytes() AS before \gset
SELECT outcome, progress = pg_temp.large('b') AS is_told, token
FROM idem_lease('u', 'held', lease => '1 h', progress => '"not told yet"') \gset
SELECT :'outcome' AS outcome, :'is_told' AS is_told;
-- The holder completes with a small result; the progress stays as it is.
SELECT idem_complete('u', 'held', '"done"', :token);
SELECT pg_temp.stored_bytes() > :before AS grown;
SELECT state, result, progress = pg_temp.large('b') AS is_kept FROM idem_lookup('u', 'held');

-- Healed
SELECT outcome FROM idem_lease('u', 'healed', lease => '1 h', progress => pg_temp.large('c'));
SELECT pg_temp.stored_bytes() AS before \gset
SELECT idem_heal('u', 'healed', '"found"');
SELECT pg_temp.stored_bytes() > :before AS grown;
SELECT state, result, progress = pg_temp.large('c') AS is_kept FROM idem_lookup('u', 'healed');

-- Failed, and claimed again
SELECT token FROM idem_lease('u', 'failed', scope => 'retry', lease => '1 h', progress => pg_temp.large('d')) \gset
SELECT pg_temp.stored_bytes() AS before \gset
SELECT idem_fail('u', 'failed', '"once"', :token, 'retry');
SELECT outcome, progress = pg_temp.large('d') AS is_told FROM idem_lease('u', 'failed', scope => 'retry', lease => '1 h');
SELECT pg_temp.stored_bytes() > :before AS grown;
SELECT state, result, progress = pg_temp.large('d') AS is_kept FROM idem_lookup('u', 'failed', 'retry');
-- Expired under expired = reclaim: the row counts as absent, and its progress is not kept.
UPDATE idem_claims SET expires_at = '2020-01-01', lease_until = '2020-01-01' WHERE request_id = 'failed';
SELECT outcome, progress FROM idem_lease('u', 'failed', scope => 'retry', lease => '1 h');
SELECT pg_temp.stored_bytes() > :before AS grown;
SELECT state, result, progress FROM idem_lookup('u', 'failed', 'retry');

-- In the transaction that claims
BEGIN;
SELECT token FROM idem_lease('u', 'own', lease => '1 h', progress => pg_temp.large('e')) \gset
SELECT pg_temp.stored_bytes() AS before \gset
SELECT idem_extend('u', 'own', :token) > now() AS extended;
SELECT idem_complete('u', 'own', '"done"', :token);
SELECT pg_temp.stored_bytes() > :before AS grown;
COMMIT;
SELECT state, result, progress = pg_temp.large('e') AS is_kept FROM idem_lookup('u', 'own');

-- ----- a value that the answer does not need is not read -----

SELECT outcome FROM idem_lease('u', 'read', lease => '1 h', progress => pg_temp.large('f'));
SELECT idem_claim('u', 'result');
UPDATE idem_claims SET result = pg_temp.large('g') WHERE request_id = 'result';
SELECT token FROM idem_claims WHERE request_id = 'read' \gset
-- Calls that do read a value, to show that the test sees it
BEGIN;
SELECT pg_temp.reads_values($$SELECT * FROM idem_try_claim('u', 'read', wait => '0')$$),
	pg_temp.reads_values($$SELECT * FROM idem_try_claim('u', 'result')$$),
	pg_temp.reads_values($$SELECT idem_result('u', 'result')$$),
	pg_temp.reads_values($$SELECT * FROM idem_lookup('u', 'read')$$);
SELECT pg_temp.reads_values($$SELECT idem_status('u', 'read')$$) AS status,
	pg_temp.reads_values($$SELECT idem_status('u', 'result')$$) AS status,
	pg_temp.reads_values($$SELECT idem_result('u', 'read')$$) AS no_result,
	pg_temp.reads_values($$SELECT idem_fence('u', 'read', $$ || :token || ')') AS fence,
	pg_temp.reads_values($$SELECT idem_extend('u', 'read', $$ || :token || ')') AS extend,
	pg_temp.reads_values($$SELECT idem_complete('u', 'read', '1', $$ || :token || ')') AS complete;
COMMIT;

TRUNCATE idem_claims, idem_scopes;
