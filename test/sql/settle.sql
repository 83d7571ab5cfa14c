-- Settling: idem_complete() and idem_fail(), in the short and the long form; a request is
-- settled once.
-- :SQLSTATE is that of the statement before.
\set SHOW_CONTEXT never

-- Long form: true if the result is stored, false for an identical repeat, ID410 for another
-- result.
BEGIN;
SELECT idem_claim('u', 'long');
SELECT idem_complete('u', 'long', '{"a": 1, "b": [1.0, null]}');
SELECT idem_complete('u', 'long', '{"b": [1.00, null], "a": 1}') AS equal_jsonb;
SAVEPOINT s;
SELECT idem_complete('u', 'long', '{"a": 2}');
\echo :SQLSTATE
ROLLBACK TO s;
SELECT idem_complete('u', 'long', NULL);
\echo :SQLSTATE
ROLLBACK TO s;
SELECT idem_fail('u', 'long', '{"a": 1, "b": [1.0, null]}');
\echo :SQLSTATE
ROLLBACK TO s;
COMMIT;
SELECT state, result FROM idem_claims WHERE request_id = 'long';

-- Completing without a result also settles.
BEGIN;
SELECT idem_claim('u', 'marker');
SELECT idem_complete();
SELECT idem_complete('u', 'marker', NULL) AS repeated;
SAVEPOINT s;
SELECT idem_complete('u', 'marker', '1');
\echo :SQLSTATE
ROLLBACK TO s;
SELECT idem_complete('1') AS none_is_left;
\echo :SQLSTATE
ROLLBACK;

-- Every kind of jsonb is a result, and a JSON null is one, too.
BEGIN;
SELECT idem_claim('u', 'json ' || i), idem_complete(('[null, true, "x", 1.5, [], {}]'::jsonb) -> i)
FROM generate_series(0, 5) AS i;
COMMIT;
SELECT request_id, result, jsonb_typeof(result) FROM idem_claims WHERE request_id LIKE 'json %' ORDER BY 1;

-- The short form settles the only unsettled key of the transaction. Here there is none.
SELECT idem_complete('1');
\echo :SQLSTATE
SELECT idem_fail('1');
\echo :SQLSTATE
-- After a replay the transaction holds no key.
BEGIN;
SELECT idem_claim('u', 'long');
SELECT idem_complete('1');
\echo :SQLSTATE
ROLLBACK;
-- With two keys the short form raises an error that names both.
BEGIN;
SELECT idem_claim('u', 'one'), idem_claim('v', 'two', 'scope');
SAVEPOINT s;
SELECT idem_complete('1');
\echo :SQLSTATE
ROLLBACK TO s;
SELECT idem_fail('1');
\echo :SQLSTATE
ROLLBACK TO s;
-- Once one of them is settled by its name, the short form settles the other.
SELECT idem_complete('v', 'two', '2', scope => 'scope');
SELECT idem_complete('1');
COMMIT;
SELECT user_id, request_id, scope, result FROM idem_claims WHERE request_id IN ('one', 'two') ORDER BY 1;
-- It names them in the order in which they were claimed. A batch claims them in an order of its own.
BEGIN;
SELECT idem_claim('v', '3');
SELECT idem_claim('u', '2');
SELECT count(*) FROM idem_claim_many('{v,u,u}', '{1,1,0}');
SELECT idem_claim('u', '5');
SAVEPOINT s;
SELECT idem_complete('1');
\echo :SQLSTATE
ROLLBACK TO s;
SELECT count(*) FROM idem_claim_many('{u,u}', '{7,6}', 'scope');
SELECT idem_complete('v', '3', '1'), idem_complete('v', '1', '1');
SELECT idem_complete('1');
ROLLBACK;
-- With many keys the error names some of them.
BEGIN;
SELECT count(*) FROM generate_series(1, 20) AS i WHERE idem_claim('u', 'many ' || i);
SELECT idem_complete('1');
\echo :SQLSTATE
ROLLBACK;

-- A loop that claims and settles one key after the other
DO $$
BEGIN
	FOR i IN 1 .. 1000 LOOP
		IF idem_claim('loop', i::text) THEN
			IF i % 10 = 0 THEN
				PERFORM idem_fail(to_jsonb(i));
			ELSE
				PERFORM idem_complete(to_jsonb(i));
			END IF;
		END IF;
	END LOOP;
END $$;
SELECT state, count(*), bool_and(result = to_jsonb(request_id::int)) FROM idem_claims WHERE user_id = 'loop'
GROUP BY state ORDER BY state;
-- All keys are claimed first, and then settled by name in another order.
DO $$
BEGIN
	FOR i IN 1 .. 100 LOOP
		PERFORM idem_claim('two loops', i::text);
	END LOOP;
	FOR i IN REVERSE 100 .. 2 LOOP
		PERFORM idem_complete('two loops', i::text, to_jsonb(i));
	END LOOP;
	PERFORM idem_complete('"the last one"');
END $$;
SELECT count(*), count(DISTINCT result), min(result #>> '{}') FILTER (WHERE request_id = '1') FROM idem_claims
WHERE user_id = 'two loops';

-- ROLLBACK TO undoes claims and settling.
BEGIN;
SELECT idem_claim('u', 'kept');
SAVEPOINT s;
SELECT idem_claim('u', 'undone');
ROLLBACK TO s;
SELECT idem_complete('"the only one"');
ROLLBACK TO s;
SELECT idem_complete('"again, after its settlement was undone"');
COMMIT;
SELECT request_id, result FROM idem_claims WHERE request_id IN ('kept', 'undone');
BEGIN;
SAVEPOINT s;
SELECT idem_claim('u', 'undone');
ROLLBACK TO s;
SELECT idem_complete('1');
\echo :SQLSTATE
ROLLBACK;
-- Claimed and settled in nested savepoints, released and rolled back
BEGIN;
SELECT idem_claim('u', 'n1');
SAVEPOINT a;
SELECT idem_claim('u', 'n2');
SAVEPOINT b;
SELECT idem_claim('u', 'n3');
SELECT idem_complete('u', 'n1', '1');
SELECT idem_complete('u', 'n3', '3');
RELEASE b;
SELECT idem_complete('2') AS only_n2_is_left;
ROLLBACK TO a;
SELECT idem_complete('"n1"') AS only_n1_is_left;
SELECT idem_claim('u', 'n2') AS n2_is_claimed_again;
RELEASE a;
SELECT idem_complete('"n2"');
COMMIT;
SELECT request_id, result FROM idem_claims WHERE request_id IN ('n1', 'n2', 'n3') ORDER BY 1;

-- Only the transaction that claimed a key can settle it.
SELECT idem_claim('u', 'elsewhere');
SELECT idem_complete('u', 'elsewhere', '1');
\echo :SQLSTATE
SELECT idem_fail('u', 'elsewhere', '1');
\echo :SQLSTATE
SELECT idem_complete('u', 'never claimed', '1');
\echo :SQLSTATE
SELECT idem_complete('u', 'elsewhere', '1', scope => 'in another scope');
\echo :SQLSTATE
-- Also if the result is the same
SELECT idem_complete('u', 'elsewhere', NULL);
\echo :SQLSTATE
BEGIN;
SELECT idem_claim('u', 'elsewhere');
SELECT idem_complete('u', 'elsewhere', '1');
\echo :SQLSTATE
ROLLBACK;
SELECT idem_status('u', 'elsewhere'), idem_result('u', 'elsewhere');

-- idem_fail() stores the error. The work of the transaction is committed, too.
BEGIN;
SELECT idem_claim('u', 'failed');
SELECT idem_fail('{"reason": "insufficient funds"}');
SELECT idem_fail('u', 'failed', '{"reason": "insufficient funds"}') AS repeated;
SELECT outcome, result FROM idem_try_claim('u', 'failed');
SELECT idem_outcome(), idem_result();
COMMIT;
SELECT outcome, result FROM idem_try_claim('u', 'failed');
SELECT idem_claim('u', 'failed');
\echo :SQLSTATE
SELECT idem_status('u', 'failed'), idem_result('u', 'failed');
-- The error can be NULL.
BEGIN;
SELECT idem_claim('u', 'failed without'), idem_fail(NULL);
COMMIT;
SELECT outcome, result FROM idem_try_claim('u', 'failed without');
-- ROLLBACK undoes idem_fail().
BEGIN;
SELECT idem_claim('u', 'fail and raise'), idem_fail('1');
ROLLBACK;
SELECT idem_claim('u', 'fail and raise');

-- Under failed = retryable the next claim executes the request again, and updates its row.
INSERT INTO idem_scopes (scope, failed) VALUES ('retry', 'retryable');
BEGIN;
SELECT idem_claim('u', 'r', 'retry', '\x01');
SELECT idem_fail('"first attempt"');
COMMIT;
SELECT idem_status('u', 'r', 'retry'), idem_result('u', 'r', 'retry');
BEGIN;
SELECT outcome, result FROM idem_try_claim('u', 'r', 'retry');
SELECT idem_result('u', 'r', 'retry') AS the_error_is_gone;
SELECT idem_fail('"second attempt"');
-- So can a claim of the same transaction.
SELECT idem_claim('u', 'r', 'retry');
SELECT outcome FROM idem_try_claim('u', 'r', 'retry');
SELECT idem_complete('"third attempt"');
COMMIT;
SELECT outcome, result FROM idem_try_claim('u', 'r', 'retry');
SELECT count(*), bool_and(fingerprint = '\x01') AS kept_its_fingerprint FROM idem_claims WHERE request_id = 'r';
-- An attempt that is rolled back leaves the failure as it was.
BEGIN;
SELECT idem_claim('u', 'r2', 'retry'), idem_fail('"failed"');
COMMIT;
BEGIN;
SELECT idem_claim('u', 'r2', 'retry'), idem_complete('"never"');
ROLLBACK;
SELECT idem_status('u', 'r2', 'retry'), idem_result('u', 'r2', 'retry');
BEGIN;
SELECT idem_claim('u', 'r2', 'retry');
SAVEPOINT s;
SELECT idem_complete('"undone"');
ROLLBACK TO s;
SELECT idem_fail('"failed again"');
COMMIT;
SELECT outcome, result FROM idem_try_claim('u', 'r2', 'retry', wait => '0');

TRUNCATE idem_claims;
DELETE FROM idem_scopes;
