-- Claims, replays, and what a transaction sees of its own claims.
-- :SQLSTATE is that of the statement before.
\set SHOW_CONTEXT never

-- A claim without a result (a marker): the first claim executes, each later one is a replay.
SELECT idem_claim('u', 'marker');
SELECT idem_claim('u', 'marker');
SELECT outcome, result, progress, lease_until FROM idem_try_claim('u', 'marker');

-- A replay gets the stored response.
BEGIN;
SELECT idem_claim('u', 'stored');
SELECT idem_complete('{"paid": 30}');
COMMIT;
BEGIN;
SELECT idem_claim('u', 'stored');
SELECT idem_result(), idem_outcome();
COMMIT;
SELECT outcome, result FROM idem_try_claim('u', 'stored');

-- What is stored
SELECT request_id, user_id, scope, state, result, token, lease_until, fingerprint, progress,
	expires_at = date_trunc('second', expires_at) AS whole_second,
	expires_at > clock_timestamp() + interval '59 minutes' AS remembered
FROM idem_claims ORDER BY request_id;

-- User, request and scope together are the key of a request.
SELECT idem_claim('u', 'key'), idem_claim('v', 'key'), idem_claim('u', 'key', 's'),
	idem_claim('u', 'other');
SELECT idem_claim('u', 'key', '');
SELECT idem_claim('v', 'key'), idem_claim('u', 'key', 's');
-- The three are compared one by one and byte by byte: not trimmed, not folded, not
-- concatenated.
SELECT idem_claim('ab', 'c'), idem_claim('a', 'bc'), idem_claim('AB', 'c'), idem_claim('ab', 'c ');

-- Arguments by name, as applications call it
SELECT idem_claim(user_id => 'u', request_id => 'named', scope => 'n', fingerprint => '\x01', wait => '0');
SELECT outcome FROM idem_try_claim(request_id => 'named', user_id => 'u', scope => 'n');

-- ROLLBACK undoes a claim.
BEGIN;
SELECT idem_claim('u', 'rolled back');
ROLLBACK;
SELECT idem_claim('u', 'rolled back');

-- A second claim of a key that the transaction holds gets completed, with the result stored
-- so far.
BEGIN;
SELECT idem_claim('u', 'second');
SELECT outcome, result FROM idem_try_claim('u', 'second');
SELECT idem_claim('u', 'second');
SELECT idem_complete('"first result"');
SELECT outcome, result FROM idem_try_claim('u', 'second');
SELECT idem_claim('u', 'second'), idem_result();
COMMIT;

-- So does a second claim of another row in the same statement.
SELECT i, idem_claim('u', 'row ' || i % 3) FROM generate_series(1, 6) AS i;

-- A later statement of the transaction sees the row; a cursor that was opened before does not.
BEGIN;
DECLARE before CURSOR FOR SELECT count(*) FROM idem_claims WHERE request_id = 'seen';
SELECT idem_claim('u', 'seen');
SELECT count(*) FROM idem_claims WHERE request_id = 'seen';
FETCH before;
COMMIT;

-- Savepoints: ROLLBACK TO undoes a claim, RELEASE keeps it.
BEGIN;
SELECT idem_claim('u', 'outer');
SAVEPOINT s;
SELECT idem_claim('u', 'inner');
SELECT idem_claim('u', 'outer');
ROLLBACK TO s;
SELECT idem_claim('u', 'inner');
SELECT idem_claim('u', 'inner');
RELEASE s;
SELECT idem_claim('u', 'inner');
SAVEPOINT s;
SELECT idem_complete('u', 'outer', '1');
ROLLBACK TO s;
SELECT idem_complete('u', 'outer', '2');
COMMIT;
SELECT request_id, result FROM idem_claims WHERE request_id IN ('outer', 'inner') ORDER BY 1;

-- The same in PL/pgSQL, where a block with EXCEPTION is a savepoint.
DO $$
DECLARE
	first bool;
BEGIN
	FOR i IN 1 .. 3 LOOP
		BEGIN
			first := idem_claim('u', 'block');
			RAISE NOTICE 'attempt %: %', i, first;
			IF i < 2 THEN
				RAISE division_by_zero;
			END IF;
		EXCEPTION WHEN division_by_zero THEN
			RAISE NOTICE 'attempt % failed', i;
		END;
	END LOOP;
END $$;

-- Many savepoints, each with a claim; every second one is rolled back.
DO $$
BEGIN
	FOR i IN 1 .. 200 LOOP
		BEGIN
			PERFORM idem_claim('many', i::text);
			IF i % 2 = 0 THEN
				RAISE division_by_zero;
			END IF;
		EXCEPTION WHEN division_by_zero THEN
		END;
	END LOOP;
	RAISE NOTICE '% of 200 are claimed', (SELECT count(*) FROM idem_claims WHERE user_id = 'many');
END $$;

-- After a claim that raised, and ROLLBACK TO a savepoint, the transaction can claim.
BEGIN;
SAVEPOINT s;
SELECT idem_claim('u', '');
ROLLBACK TO s;
SELECT idem_claim('u', 'after an error');
COMMIT;

-- In a procedure that commits as it goes
CREATE PROCEDURE claim_three() LANGUAGE plpgsql AS $$
BEGIN
	FOR i IN 1 .. 3 LOOP
		IF idem_claim('procedure', i::text) THEN
			PERFORM idem_complete(to_jsonb(i));
		END IF;
		RAISE NOTICE '% %', i, idem_result();
		IF i < 3 THEN
			COMMIT;
		ELSE
			ROLLBACK;
		END IF;
	END LOOP;
END $$;
CALL claim_three();
CALL claim_three();
SELECT request_id, result FROM idem_claims WHERE user_id = 'procedure' ORDER BY 1;
DROP PROCEDURE claim_three;

-- While the transaction commits: in a deferred trigger, and as the content of a
-- holdable cursor
CREATE TABLE work (id int);
CREATE FUNCTION claim_deferred() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
	RAISE NOTICE 'deferred: %', idem_claim('deferred', NEW.id::text);
	RETURN NULL;
END $$;
CREATE CONSTRAINT TRIGGER claim_deferred AFTER INSERT ON work
	DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION claim_deferred();
BEGIN;
SELECT idem_claim('u', 'before the trigger');
INSERT INTO work VALUES (1), (1);
DECLARE held CURSOR WITH HOLD FOR SELECT idem_claim('deferred', 'cursor');
COMMIT;
FETCH held;
CLOSE held;
SELECT request_id FROM idem_claims WHERE user_id = 'deferred' ORDER BY 1;
DROP TABLE work;
DROP FUNCTION claim_deferred;

-- A cursor claims for the first time outside of a block with EXCEPTION, and fails inside of
-- it. The rollback releases the locks that the cursor took, which can include the table's
-- RowExclusiveLock; later claims must take it again.
BEGIN;
DO $$
DECLARE
	c CURSOR FOR SELECT idem_claim('cursor', i::text), 1 / (2 - i) FROM generate_series(1, 2) AS i;
	r record;
BEGIN
	OPEN c;
	FETCH c INTO r;
	BEGIN
		FETCH c INTO r;
	EXCEPTION WHEN division_by_zero THEN
		RAISE NOTICE 'rolled back';
	END;
END $$;
SELECT mode FROM pg_locks WHERE relation = 'idem_claims'::regclass AND pid = pg_backend_pid() AND mode ~ 'Exclusive';
SELECT idem_claim('cursor', '1'), idem_claim('cursor', '2');
SELECT mode FROM pg_locks WHERE relation = 'idem_claims'::regclass AND pid = pg_backend_pid() AND mode ~ 'Exclusive';
COMMIT;

-- In the WHERE of an INSERT, and in a prepared statement
CREATE TABLE work (id text);
INSERT INTO work SELECT id FROM (VALUES ('a'), ('b'), ('a')) AS v (id) WHERE idem_claim('insert', id);
TABLE work;
PREPARE claim_prepared (text) AS SELECT idem_claim('prepared', $1);
EXECUTE claim_prepared('a');
EXECUTE claim_prepared('a');
EXECUTE claim_prepared('b');
DEALLOCATE claim_prepared;
COPY (SELECT idem_claim('copy', 'a')) TO STDOUT;
DROP TABLE work;

-- No function is strict: with a NULL argument a strict one would return NULL, and an IF would
-- read that as "already executed".
SELECT proname, proisstrict FROM pg_proc
WHERE proname IN ('idem_claim', 'idem_try_claim', 'idem_lease', 'idem_complete', 'idem_fail', 'idem_forget') AND proisstrict;

TRUNCATE idem_claims;
