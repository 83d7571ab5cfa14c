-- Reading the stored row of a request, and forgetting it.
-- :SQLSTATE is that of the statement before.
\set SHOW_CONTEXT never

-- No row is stored.
SELECT idem_status('u', 'none') IS NULL AS no_status, idem_result('u', 'none') IS NULL AS no_result;
SELECT * FROM idem_lookup('u', 'none');
SELECT count(*) FROM idem_lookup('u', 'none');

SELECT idem_claim('u', 'marker');
BEGIN;
SELECT idem_claim('u', 'result', 's', '\x0102'), idem_complete('{"paid": 30}');
SELECT idem_claim('u', 'failed'), idem_fail('"no"');
COMMIT;
SELECT r, idem_status('u', r), idem_result('u', r), state, lease_until, fingerprint, result, progress,
	expires_at > clock_timestamp() AS remembered
FROM unnest(ARRAY['failed', 'marker', 'result']) AS r, idem_lookup('u', r) ORDER BY r;
SELECT idem_status('u', 'result', 's'), idem_result('u', 'result', 's'), state, fingerprint, result
FROM idem_lookup('u', 'result', 's');
-- idem_lookup() returns all columns but the token.
SELECT array_agg(a ORDER BY a COLLATE "C") FROM unnest((SELECT proargnames FROM pg_proc WHERE oid = 'idem_lookup(text, text, text)'::regprocedure)) AS a;

-- Like a query of a table, it does not see what its own statement claims.
BEGIN;
SELECT idem_claim('u', 'one statement'), idem_status('u', 'one statement');
SELECT idem_status('u', 'one statement');
ROLLBACK;
SELECT idem_status('u', 'one statement');

-- idem_status(user, request) does not count as a claim call, and needs none before it.
SELECT idem_status('u', 'marker');
SELECT idem_outcome();
\echo :SQLSTATE

-- A forgotten request can be executed again.
SELECT idem_forget('u', 'none');
SELECT idem_forget('u', 'result') AS in_another_scope;
SELECT idem_forget('u', 'result', 's');
SELECT idem_forget('u', 'result', 's');
SELECT idem_status('u', 'result', 's');
SELECT idem_claim('u', 'result', 's', '\x03') AS also_with_another_fingerprint;
SELECT idem_forget('u', 'failed'), idem_claim('u', 'failed');
SELECT count(*) FROM idem_claims WHERE request_id IN ('result', 'failed');

-- Forgetting is part of the transaction.
BEGIN;
SELECT idem_forget('u', 'marker');
SELECT idem_forget('u', 'marker');
SELECT idem_status('u', 'marker');
ROLLBACK;
SELECT idem_status('u', 'marker');
BEGIN;
SELECT idem_forget('u', 'marker');
SELECT idem_claim('u', 'marker'), idem_complete('"again"');
SELECT idem_forget('u', 'marker');
SELECT idem_claim('u', 'marker'), idem_complete('"and again"');
COMMIT;
SELECT idem_result('u', 'marker'), count(*) FROM idem_claims WHERE request_id = 'marker';

-- A transaction that forgets its own claim no longer holds the key.
BEGIN;
SELECT idem_claim('u', 'own');
SELECT idem_forget('u', 'own');
SELECT idem_complete('1');
\echo :SQLSTATE
ROLLBACK;
BEGIN;
SELECT idem_claim('u', 'own'), idem_claim('u', 'other');
SELECT idem_forget('u', 'own');
SELECT idem_complete('"the only one left"');
SELECT idem_complete('u', 'own', '1');
\echo :SQLSTATE
ROLLBACK;
-- It can claim the key again, and holds it unless a savepoint is rolled back.
BEGIN;
SELECT idem_claim('u', 'own');
SAVEPOINT s;
SELECT idem_forget('u', 'own'), idem_claim('u', 'own');
SELECT idem_complete('"undone"');
ROLLBACK TO s;
SELECT idem_complete('"held since before the savepoint"');
SELECT idem_result(), idem_outcome();
COMMIT;
SELECT idem_result('u', 'own');
BEGIN;
SELECT idem_claim('u', 'own 2'), idem_claim('u', 'between'), idem_complete('u', 'between', '1');
SAVEPOINT s;
SELECT idem_forget('u', 'own 2'), idem_claim('u', 'own 2'), idem_claim('u', 'more'), idem_complete('u', 'more', '1');
SELECT idem_complete('u', 'own 2', '"undone"');
ROLLBACK TO s;
SELECT idem_complete('"held since before the savepoint"');
COMMIT;
SELECT idem_result('u', 'own 2'), idem_status('u', 'more') IS NULL AS undone;

TRUNCATE idem_claims;
