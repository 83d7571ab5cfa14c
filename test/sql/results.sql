-- idem_result() and idem_outcome() return the answer of the latest claim call of the
-- transaction that was not rolled back; and the limit on the size of results.
-- :SQLSTATE is that of the statement before.
\set SHOW_CONTEXT never

-- No claim in this transaction, but one earlier in the session
SELECT idem_claim('u', 'before');
SELECT idem_result();
\echo :SQLSTATE
SELECT idem_outcome();
\echo :SQLSTATE

-- The answers end with the transaction.
BEGIN;
SELECT idem_claim('u', 'a');
SELECT idem_outcome(), idem_result();
SELECT idem_complete('"result of a"');
SELECT idem_outcome(), idem_result();
SELECT idem_claim('u', 'b');
SELECT idem_outcome(), idem_result();
SELECT idem_claim('u', 'a');
SELECT idem_outcome(), idem_result();
-- Settling another key does not change the answer.
SELECT idem_complete('u', 'b', '"result of b"');
SELECT idem_outcome(), idem_result();
SELECT outcome FROM idem_try_claim('u', 'before');
SELECT idem_outcome(), idem_result();
COMMIT;
SELECT idem_result();
\echo :SQLSTATE
BEGIN;
SELECT idem_claim('u', 'rolled back');
ROLLBACK;
SELECT idem_result();
\echo :SQLSTATE

-- In the statement of the claim, for example of a replay
SELECT idem_claim('u', 'a'), idem_result(), idem_outcome();

-- Answers of idem_try_claim() count, and so does a failure.
BEGIN;
SELECT idem_claim('u', 'f', fingerprint => '\x01'), idem_fail('"broken"');
SELECT idem_outcome(), idem_result();
SELECT outcome FROM idem_try_claim('u', 'f', fingerprint => '\x02');
SELECT idem_outcome();
SELECT outcome FROM idem_try_claim('u', 'f', fingerprint => '\x01');
SELECT idem_outcome(), idem_result();
COMMIT;

-- A claim call that raised does not count: its savepoint is rolled back.
BEGIN;
SELECT idem_claim('u', 'a');
SAVEPOINT s;
SELECT idem_claim('u', 'f');
\echo :SQLSTATE
ROLLBACK TO s;
SELECT idem_outcome(), idem_result();
COMMIT;

-- Savepoints
BEGIN;
SAVEPOINT s;
SELECT idem_claim('u', 'c');
ROLLBACK TO s;
SELECT idem_result();
\echo :SQLSTATE
ROLLBACK;
BEGIN;
SELECT idem_claim('u', 'c'), idem_complete('"c"');
SAVEPOINT s1;
SELECT idem_claim('u', 'd'), idem_complete('"d"');
SAVEPOINT s2;
SELECT idem_claim('u', 'a');
SELECT idem_result();
ROLLBACK TO s2;
SELECT idem_outcome(), idem_result();
SELECT idem_claim('u', 'a');
RELEASE s2;
SELECT idem_outcome(), idem_result();
ROLLBACK TO s1;
SELECT idem_outcome(), idem_result();
RELEASE s1;
SELECT idem_outcome(), idem_result();
COMMIT;
-- ROLLBACK TO undoes a result that was stored after the savepoint.
BEGIN;
SELECT idem_claim('u', 'e');
SAVEPOINT s;
SELECT idem_complete('"undone"');
SELECT idem_outcome(), idem_result();
ROLLBACK TO s;
SELECT idem_outcome(), idem_result();
SELECT idem_complete('"kept"');
SELECT idem_outcome(), idem_result();
COMMIT;
SELECT idem_result('u', 'e');

-- The function of the README returns the result of this execution, or of the earlier one.
CREATE FUNCTION execute_once(request text) RETURNS jsonb LANGUAGE plpgsql AS $$
BEGIN
	IF idem_claim('readme', request) THEN
		PERFORM idem_complete(jsonb_build_object('executed', request));
	END IF;
	RETURN idem_result();
END $$;
SELECT execute_once(r) FROM unnest(ARRAY['1', '2', '1']) AS r;
SELECT execute_once('2'), execute_once('3'), execute_once('2');
DROP FUNCTION execute_once;

-- The limit counts the bytes of the jsonb: a string has 8 bytes more than characters.
INSERT INTO idem_scopes (scope, result_max_bytes) VALUES ('cap', 100), ('small', 50), ('large', 200), ('one byte', 1);
BEGIN;
SELECT idem_claim('u', 'cap', 'cap');
SAVEPOINT s;
SELECT idem_complete(to_jsonb(repeat('x', 93)));
\echo :SQLSTATE
ROLLBACK TO s;
SELECT idem_fail(to_jsonb(repeat('x', 93)));
\echo :SQLSTATE
ROLLBACK TO s;
SELECT idem_complete('u', 'cap', to_jsonb(repeat('x', 93)), scope => 'cap');
\echo :SQLSTATE
ROLLBACK TO s;
SELECT idem_complete(to_jsonb(repeat('x', 92)));
COMMIT;
BEGIN;
SELECT idem_claim('u', 'cap', 'large'), idem_complete(to_jsonb(repeat('x', 192)));
SELECT idem_claim('u', 'cap', 'small'), idem_complete(to_jsonb(repeat('x', 43)));
\echo :SQLSTATE
ROLLBACK;
-- NULL is never too large.
BEGIN;
SELECT idem_claim('u', 'cap 1', 'one byte'), idem_complete();
COMMIT;
-- The default is 1 MiB. Such a result is stored out of line, and returned unchanged.
BEGIN;
SELECT idem_claim('u', 'cap 2');
SAVEPOINT s;
SELECT idem_complete(to_jsonb(repeat('x', 1024 * 1024 - 7)));
\echo :SQLSTATE
ROLLBACK TO s;
SELECT idem_complete(to_jsonb(repeat('x', 1024 * 1024 - 8)));
SELECT idem_result() = to_jsonb(repeat('x', 1024 * 1024 - 8)) AS stored;
COMMIT;
SELECT result = to_jsonb(repeat('x', 1024 * 1024 - 8)) AS stored FROM idem_try_claim('u', 'cap 2');
-- The limit applies when a result is stored; a stored result is returned whatever the limit is
-- now.
INSERT INTO idem_scopes (scope, result_max_bytes) VALUES ('', 10);
SELECT result = to_jsonb(repeat('x', 1024 * 1024 - 8)) AS stored FROM idem_try_claim('u', 'cap 2');
-- An incompressible result of a request that failed and is retried, so that its row is updated
UPDATE idem_scopes SET failed = 'retryable' WHERE scope = 'large';
SELECT jsonb_agg(md5(i::text)) AS large FROM generate_series(1, 2000) AS i \gset
UPDATE idem_scopes SET result_max_bytes = NULL;
BEGIN;
SELECT idem_claim('u', 'retried', 'large'), idem_fail(:'large');
COMMIT;
SELECT idem_result('u', 'retried', 'large') = :'large' AS stored;
BEGIN;
SELECT idem_claim('u', 'retried', 'large'), idem_complete(:'large');
COMMIT;
SELECT idem_claim('u', 'retried', 'large'), idem_result() = :'large' AS stored;

TRUNCATE idem_claims, idem_scopes;

-- The latest answer stays when a request is dropped or settled that this transaction has not claimed.
SELECT idem_claim('u', 'replayed'), idem_complete('{"r": 1}');
SELECT token FROM idem_lease('u', 'leased', lease => '1 h') \gset
BEGIN;
SELECT idem_claim('u', 'replayed');
SELECT idem_forget('u', 'replayed');
SELECT idem_outcome(), idem_result();
SELECT outcome FROM idem_try_claim('u', 'leased', wait => '0');
SELECT idem_complete('u', 'leased', '{"x": 2}', :token);
SELECT idem_outcome(), idem_result();
COMMIT;
TRUNCATE idem_claims;
