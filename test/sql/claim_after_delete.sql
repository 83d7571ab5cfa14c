-- A transaction claims a key, deletes its row by hand, and claims the key again: it holds the
-- key once. :SQLSTATE is that of the statement before.

\set SHOW_CONTEXT never

BEGIN;
SELECT idem_claim('u', 'k');
DELETE FROM idem_claims WHERE request_id = 'k';
SELECT idem_claim('u', 'k');
SELECT idem_complete('"deleted"');
SELECT idem_outcome(), idem_result();
SELECT idem_complete('u', 'k', '"deleted"');
SELECT idem_complete('"again"');
\echo :SQLSTATE
ROLLBACK;

BEGIN;
SELECT idem_claim('u', 'k');
TRUNCATE idem_claims;
SELECT idem_claim('u', 'k');
TRUNCATE idem_claims;
SELECT idem_claim('u', 'k');
SELECT idem_complete('u', 'k', '"truncated"'), idem_result();
SELECT idem_complete('"again"');
\echo :SQLSTATE
ROLLBACK;

-- With other keys: the error names each key that is held once.
BEGIN;
SELECT idem_claim('u', 'a'), idem_claim('u', 'k'), idem_claim('u', 'b');
DELETE FROM idem_claims WHERE request_id = 'k';
SELECT idem_claim('u', 'k');
SAVEPOINT s;
SELECT idem_complete('"which?"');
ROLLBACK TO s;
SELECT idem_complete('u', 'a', '1'), idem_complete('u', 'b', '2');
SELECT idem_complete('3');
SELECT request_id, result FROM idem_claims ORDER BY 1;
ROLLBACK;

-- ROLLBACK TO undoes the second claim and the deletion.
BEGIN;
SELECT idem_claim('u', 'k');
SAVEPOINT s;
DELETE FROM idem_claims WHERE request_id = 'k';
SELECT idem_claim('u', 'k');
SELECT idem_complete('"rolled back"');
ROLLBACK TO s;
SELECT idem_complete('"first"');
SELECT idem_result('u', 'k');
ROLLBACK;
-- Settled after a savepoint, and rolled back: the key is held once and not settled.
BEGIN;
SELECT idem_claim('u', 'k');
DELETE FROM idem_claims WHERE request_id = 'k';
SELECT idem_claim('u', 'k');
SAVEPOINT s;
SELECT idem_complete('"rolled back"');
SELECT idem_complete('"again"');
\echo :SQLSTATE
ROLLBACK TO s;
SELECT idem_complete('"second"');
SELECT idem_result('u', 'k');
SELECT idem_complete('"again"');
\echo :SQLSTATE
ROLLBACK;
-- Claimed again after a savepoint that is released
BEGIN;
SELECT idem_claim('u', 'k');
DELETE FROM idem_claims WHERE request_id = 'k';
SAVEPOINT s;
SELECT idem_claim('u', 'k');
RELEASE s;
SELECT idem_complete('"released"');
SELECT idem_result('u', 'k');
ROLLBACK;

-- A lease
BEGIN;
SELECT outcome FROM idem_lease('u', 'k', lease => '1 min');
DELETE FROM idem_claims WHERE request_id = 'k';
SELECT outcome, token FROM idem_lease('u', 'k', lease => '1 min') \gset
SELECT idem_complete('u', 'k', '"lease"', :token);
SELECT idem_result('u', 'k');
SELECT idem_complete('"again"');
\echo :SQLSTATE
ROLLBACK;
