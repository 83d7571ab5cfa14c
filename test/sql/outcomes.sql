-- Every outcome, as a value and as an error: each has its own SQLSTATE. in_progress and
-- timed_out need a second session: see two_phase.sql and the specs.
-- :SQLSTATE is that of the statement before.
\set SHOW_CONTEXT never

SELECT enum_range(NULL::idem_outcome), enum_range(NULL::idem_state);

-- claimed
SELECT outcome, result, progress, lease_until, expires_at IS NOT NULL AS remembered
FROM idem_try_claim('u', 'claimed');
SELECT idem_claim('u', 'claimed too');
\echo :SQLSTATE

-- completed
SELECT outcome, result, progress, lease_until, expires_at IS NOT NULL AS remembered
FROM idem_try_claim('u', 'claimed');
SELECT idem_claim('u', 'claimed');
\echo :SQLSTATE

-- failed, ID417
BEGIN;
SELECT idem_claim('u', 'failed'), idem_fail('{"code": 7}');
COMMIT;
SELECT outcome, result, progress, lease_until, expires_at IS NOT NULL AS remembered
FROM idem_try_claim('u', 'failed');
SELECT idem_claim('u', 'failed');
\echo :SQLSTATE

-- mismatch, ID422
SELECT idem_claim('u', 'mismatch', fingerprint => '\x01');
SELECT outcome, progress, lease_until FROM idem_try_claim('u', 'mismatch', fingerprint => '\x02');
SELECT idem_claim('u', 'mismatch', fingerprint => '\x02');
\echo :SQLSTATE
-- The fingerprint is compared before the state.
BEGIN;
SELECT idem_claim('u', 'failed with', fingerprint => '\x01'), idem_fail('1');
COMMIT;
SELECT idem_claim('u', 'failed with', fingerprint => '\x02');
\echo :SQLSTATE
SELECT idem_claim('u', 'failed with', fingerprint => '\x01');
\echo :SQLSTATE

-- stale, ID412
INSERT INTO idem_scopes (scope, ttl, key_time) VALUES ('v7', '1 day', 'uuidv7');
SELECT outcome, result, progress, expires_at, lease_until
FROM idem_try_claim('u', '00000000-0000-7000-8000-000000000001', 'v7');
SELECT idem_claim('u', '00000000-0000-7000-8000-000000000001', 'v7');
\echo :SQLSTATE

-- Invalid arguments, ID400: they are checked first.
SELECT idem_claim(NULL, 'r');
\echo :SQLSTATE
SELECT * FROM idem_try_claim('u', '');
\echo :SQLSTATE
SELECT idem_claim('u', 'claimed', wait => '-1 s');
\echo :SQLSTATE
SELECT idem_claim('u', 'claimed', wait => '1 month');
\echo :SQLSTATE
SELECT idem_claim('u', 'claimed', wait => '1 month -30 days');
\echo :SQLSTATE
SELECT idem_claim('u', 'claimed', wait => '-1 day 23 hours');
\echo :SQLSTATE
SELECT idem_claim('u', 'claimed', wait => '-1 microsecond');
\echo :SQLSTATE
SELECT idem_claim('u', 'claimed', fingerprint => '');
\echo :SQLSTATE
-- Every other length of a wait is allowed.
SELECT idem_claim('u', 'claimed', wait => w::interval)
FROM unnest(ARRAY['0', '1 microsecond', '1 day -1 hour', '10000 days', '2147483647 days', '2562047788 hours']) AS w;

-- Lost, ID410, and too large, ID413
SELECT idem_complete('u', 'claimed', '1');
\echo :SQLSTATE
BEGIN;
INSERT INTO idem_scopes (scope, result_max_bytes) VALUES ('small', 10);
SELECT idem_claim('u', 'large', 'small'), idem_complete('"12345678"');
\echo :SQLSTATE
ROLLBACK;

-- Messages show ids as they are, and do not use them as format strings.
SELECT idem_claim('%s%n', E'"quoted"\t%d', '%m', fingerprint => '\x01');
SELECT idem_claim('%s%n', E'"quoted"\t%d', '%m', fingerprint => '\x02');
\echo :SQLSTATE

-- An application tells the outcomes apart by SQLSTATE.
DO $$
BEGIN
	PERFORM idem_claim('u', 'mismatch', fingerprint => '\x02');
EXCEPTION
	WHEN SQLSTATE 'ID417' THEN
		RAISE NOTICE 'failed';
	WHEN SQLSTATE 'ID422' THEN
		RAISE NOTICE 'mismatch: %', SQLERRM;
END $$;

TRUNCATE idem_claims, idem_scopes;
