-- The order of decisions of a claim: every stored row, under every policy, claimed by every
-- function. The expected outcome is the order of the contract, written in SQL; every function
-- must give the same answer.
\set SHOW_CONTEXT never

-- Committed rows; for a row of the same transaction other rules apply, see below.
CREATE TABLE cases AS
SELECT row_number() OVER () AS id, *
FROM (VALUES ('absent', NULL, NULL), ('completed', NULL, NULL), ('failed', NULL, NULL),
			('in_progress', 'live', NULL), ('in_progress', 'lapsed', NULL),
			('completed', NULL, '\x01'::bytea), ('failed', NULL, '\x01'),
			('in_progress', 'live', '\x01'), ('in_progress', 'lapsed', '\x01')) AS stored (state, lease, stored_fingerprint)
	CROSS JOIN (VALUES (false), (true)) AS expiry (is_expired)
	CROSS JOIN (VALUES (NULL), ('\x01'::bytea), ('\x02')) AS call (fingerprint)
	CROSS JOIN (VALUES ('terminal'), ('retryable')) AS p1 (failed)
	CROSS JOIN (VALUES ('reclaim'), ('unknown')) AS p2 (lapsed)
	CROSS JOIN (VALUES ('protect'), ('reclaim')) AS p3 (expired)
	CROSS JOIN (VALUES ('any', 'new'), ('any', 'old'), ('any', 'no uuid'), ('uuidv7', 'new'), ('uuidv7', 'old'),
			('uuidv7', 'ahead'), ('uuidv7', 'no uuid')) AS p4 (key_time, key)
WHERE state <> 'absent' OR NOT is_expired;
-- With debug_discard_caches a claim takes about half a second: take a sample.
DELETE FROM cases WHERE current_setting('debug_discard_caches') <> '0' AND id % 23 <> 0
	AND NOT (state = 'absent' AND key = 'new' AND lapsed = 'reclaim' AND expired = 'protect');
ALTER TABLE cases ADD COLUMN scope text, ADD COLUMN request text, ADD COLUMN expected idem_outcome;

UPDATE cases SET
	scope = concat_ws(' ', 'decisions', failed, lapsed, expired, key_time),
	request = (SELECT format(CASE key WHEN 'no uuid' THEN '%s-%s-4000-8000-%s' ELSE '%s-%s-7000-8000-%s' END,
			left(ms, 8), right(ms, 4), lpad(to_hex(id), 12, '0'))
		FROM (SELECT lpad(to_hex((extract(epoch FROM clock_timestamp() +
			CASE key WHEN 'old' THEN interval '-2 days' WHEN 'ahead' THEN interval '1 hour' ELSE interval '0' END) * 1000)::bigint), 12, '0') AS ms) AS t),
	expected = CASE
		-- Decision 1: the arguments
		WHEN key_time = 'uuidv7' AND key IN ('ahead', 'no uuid') THEN 'invalid'
		-- 3 and 9: the row is absent, or counts as absent
		WHEN state = 'absent' OR (is_expired AND expired = 'reclaim'
			AND NOT (state = 'in_progress' AND (lease = 'live' OR lapsed = 'unknown')))
			THEN CASE WHEN key_time = 'uuidv7' AND key = 'old' THEN 'stale' ELSE 'claimed' END
		-- 4
		WHEN stored_fingerprint <> fingerprint THEN 'mismatch'
		-- 5
		WHEN state = 'completed' THEN 'completed'
		WHEN state = 'failed' AND failed = 'terminal' THEN 'failed'
		-- 6
		WHEN lease = 'live' THEN 'in_progress'
		-- 7
		WHEN lease = 'lapsed' AND lapsed = 'unknown' THEN 'unknown'
		WHEN lease = 'lapsed' THEN 'claimed'
		-- 8
		ELSE 'claimed'
	END::idem_outcome;

-- As if the policies had always existed: guarded_since can only be set by a replica.
SET session_replication_role = replica;
INSERT INTO idem_scopes (scope, ttl, failed, lapsed, expired, key_time, guarded_since)
	SELECT DISTINCT scope, interval '1 day', failed, lapsed, expired, key_time, timestamptz '2001-01-01' FROM cases;
RESET session_replication_role;
INSERT INTO idem_claims (expires_at, lease_until, token, state, request_id, user_id, scope, fingerprint)
	SELECT date_trunc('second', now()) + CASE WHEN is_expired THEN interval '-10 s' ELSE interval '1 day' END,
		now() + CASE lease WHEN 'live' THEN interval '1 hour' WHEN 'lapsed' THEN interval '-20 s' END,
		CASE WHEN lease IS NOT NULL THEN nextval('idem_token_seq') END,
		state::idem_state, request, 'decisions', scope, stored_fingerprint
	FROM cases WHERE state <> 'absent';

-- The answer of one call, whose claim is then undone
CREATE FUNCTION ask(call text, c cases) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
	answer text;
BEGIN
	CASE call
		WHEN 'idem_claim' THEN
			answer := CASE WHEN idem_claim('decisions', c.request, c.scope, c.fingerprint, '0') THEN 'claimed' ELSE 'completed' END;
		WHEN 'idem_try_claim' THEN
			SELECT outcome INTO answer FROM idem_try_claim('decisions', c.request, c.scope, c.fingerprint, '0');
		WHEN 'idem_try_claim, lease' THEN
			SELECT outcome INTO answer FROM idem_lease('decisions', c.request, scope => c.scope, fingerprint => c.fingerprint, wait => '0', lease => '1 hour');
		WHEN 'idem_claim_many' THEN
			SELECT outcome INTO answer FROM idem_claim_many(ARRAY['decisions'], ARRAY[c.request], c.scope, ARRAY[c.fingerprint], '0');
		WHEN 'idem_claim_many, no fingerprints' THEN
			SELECT outcome INTO answer FROM idem_claim_many(ARRAY['decisions'], ARRAY[c.request], c.scope, wait => '0');
	END CASE;
	-- An invalid element of a batch does not claim a key.
	IF answer <> 'invalid' AND (answer = 'claimed') <> (idem_outcome() = 'claimed') THEN
		answer := 'claimed, but idem_outcome() = ' || idem_outcome();
	END IF;
	RAISE SQLSTATE 'UNDO0';
EXCEPTION
	WHEN SQLSTATE 'UNDO0' THEN
		RETURN answer;
	WHEN OTHERS THEN
		RETURN CASE SQLSTATE
			WHEN 'ID400' THEN 'invalid' WHEN 'ID409' THEN 'in_progress' WHEN 'ID412' THEN 'stale'
			WHEN 'ID417' THEN 'failed' WHEN 'ID422' THEN 'mismatch' WHEN 'ID424' THEN 'unknown'
			ELSE concat(SQLSTATE, ' ', SQLERRM) END;
END $$;

CREATE TABLE answers AS
SELECT c.id, call, ask(call, c) AS answer
FROM cases c, unnest(ARRAY['idem_claim', 'idem_try_claim', 'idem_try_claim, lease', 'idem_claim_many']) AS call
UNION ALL
SELECT id, 'idem_claim_many, no fingerprints', ask('idem_claim_many, no fingerprints', c)
FROM cases c WHERE fingerprint IS NULL;

-- No answer differs from the expected one.
SELECT call, state, lease, is_expired, stored_fingerprint, fingerprint, failed, lapsed, expired, key_time, key, expected, answer
FROM cases JOIN answers USING (id)
WHERE answer IS DISTINCT FROM expected::text
ORDER BY id, call LIMIT 20;
SELECT call, count(*) FILTER (WHERE answer IS DISTINCT FROM expected::text) AS deviations
FROM cases JOIN answers USING (id) GROUP BY call ORDER BY call;
SELECT DISTINCT expected FROM cases ORDER BY expected;

-- ----- a key that the same transaction holds: no call waits for it -----

CREATE FUNCTION ask_own(call text, held text, c cases) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
	answer text;
BEGIN
	CASE held
		WHEN 'transactional' THEN PERFORM idem_claim('decisions', c.request, c.scope, '\x01');
		WHEN 'completed' THEN PERFORM idem_claim('decisions', c.request, c.scope, '\x01'), idem_complete('1');
		WHEN 'failed' THEN PERFORM idem_claim('decisions', c.request, c.scope, '\x01'), idem_fail('1');
		WHEN 'lease' THEN PERFORM idem_lease('decisions', c.request, scope => c.scope, fingerprint => '\x01', lease => '1 hour');
		WHEN 'lease, completed' THEN
			PERFORM idem_lease('decisions', c.request, scope => c.scope, fingerprint => '\x01', lease => '1 hour'), idem_complete('1');
	END CASE;
	answer := ask(call, c);
	RAISE SQLSTATE 'UNDO1';
EXCEPTION
	WHEN SQLSTATE 'UNDO1' THEN
		RETURN answer;
END $$;

-- An absent key with a new id, under the policies that could make a difference
SELECT held, fingerprint, failed, string_agg(DISTINCT answer, ', ') AS answers
FROM (SELECT held, fingerprint, failed, ask_own(call, held, c) AS answer
	FROM cases c,
		unnest(ARRAY['idem_claim', 'idem_try_claim', 'idem_try_claim, lease', 'idem_claim_many']) AS call,
		unnest(ARRAY['transactional', 'completed', 'failed', 'lease', 'lease, completed']) AS held
	WHERE state = 'absent' AND key = 'new') AS own
GROUP BY held, fingerprint, failed ORDER BY held, fingerprint NULLS FIRST, failed;

DROP FUNCTION ask_own, ask;
DROP TABLE cases, answers;
DELETE FROM idem_claims WHERE user_id = 'decisions';
DELETE FROM idem_scopes WHERE scope LIKE 'decisions %';
