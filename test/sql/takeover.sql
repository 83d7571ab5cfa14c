-- Leases that lapsed, requests that failed or expired: which claims succeed under which policy,
-- and what the previous holder can still do. lapse() makes a lease end.
\set SHOW_CONTEXT never
\set VERBOSITY sqlstate

INSERT INTO idem_scopes (scope, lapsed) VALUES ('unknown', 'unknown');
INSERT INTO idem_scopes (scope, failed) VALUES ('retryable', 'retryable');
INSERT INTO idem_scopes (scope, expired) VALUES ('reclaim', 'reclaim');
INSERT INTO idem_scopes (scope, expired, lapsed) VALUES ('reclaim unknown', 'reclaim', 'unknown');

CREATE FUNCTION lapse(id text) RETURNS text LANGUAGE sql AS $$
	UPDATE idem_claims SET lease_until = clock_timestamp() - interval '1 s'
	WHERE user_id = 'takeover' AND request_id = id RETURNING 'lapsed'
$$;
CREATE FUNCTION expire(id text) RETURNS text LANGUAGE sql AS $$
	UPDATE idem_claims SET expires_at = date_trunc('second', clock_timestamp()) - interval '1 s'
	WHERE user_id = 'takeover' AND request_id = id RETURNING 'expired'
$$;
CREATE FUNCTION token_of(id text) RETURNS bigint LANGUAGE sql AS $$
	SELECT token FROM idem_claims WHERE user_id = 'takeover' AND request_id = id
$$;

CREATE FUNCTION called() RETURNS jsonb LANGUAGE sql AS $$ SELECT '"called"'::jsonb $$;
CREATE TABLE sink (user_id text, request_id text);
CREATE TRIGGER sink BEFORE INSERT ON sink FOR EACH ROW EXECUTE FUNCTION idem_skip_duplicates('', 'user_id', 'request_id');

-- Calls every function that takes a token, and shows whether one of them wrote
CREATE FUNCTION refused(id text, token bigint, scope text DEFAULT '')
RETURNS TABLE (call text, answer text) LANGUAGE plpgsql AS $$
DECLARE
	before text;
	after text;
BEGIN
	SELECT concat(c.ctid, c.xmin, c) INTO before FROM idem_claims c WHERE user_id = 'takeover' AND request_id = id;
	FOREACH call IN ARRAY ARRAY['idem_extend(%L, %L, %L, ''1 hour'', ''"mine"'', %L)',
		'idem_fence(%L, %L, %L, %L)', 'idem_release(%L, %L, %L, %L)',
		'idem_complete(%L, %L, ''"mine"'', %L, %L)', 'idem_fail(%L, %L, ''"mine"'', %L, %L)']
	LOOP
		BEGIN
			EXECUTE 'SELECT ' || format(call, 'takeover', id, token, scope) INTO answer;
		EXCEPTION WHEN OTHERS THEN
			answer := SQLSTATE;
		END;
		call := split_part(call, '(', 1);
		RETURN NEXT;
	END LOOP;
	SELECT concat(c.ctid, c.xmin, c) INTO after FROM idem_claims c WHERE user_id = 'takeover' AND request_id = id;
	call := 'row';
	answer := CASE WHEN before IS NOT DISTINCT FROM after THEN 'untouched' ELSE 'changed' END;
	RETURN NEXT;
END $$;

CREATE VIEW rows AS
	SELECT request_id, scope, state, result, progress, fingerprint, token IS NOT NULL AS has_token,
		lease_until > clock_timestamp() AS live, expires_at > clock_timestamp() AS remembered
	FROM idem_claims WHERE user_id = 'takeover' ORDER BY request_id;

-- ----- a holder whose lease has lapsed, and that was not replaced -----

SELECT token AS a FROM idem_lease('takeover', 'a', scope => '', fingerprint => '\x01', wait => NULL, lease => '1 hour', progress => '"made 1"') \gset
SELECT lapse('a');
SELECT idem_status('takeover', 'a');
SELECT idem_fence('takeover', 'a', :a);
SELECT idem_extend('takeover', 'a', :a, '1 hour') > clock_timestamp() AS live_again;
SELECT outcome FROM idem_try_claim('takeover', 'a', wait => '0');
SELECT lapse('a');
SELECT idem_complete('takeover', 'a', '1', :a);
SELECT outcome, result FROM idem_try_claim('takeover', 'a');
SELECT token AS b FROM idem_lease('takeover', 'b', lease => '1 hour') \gset
SELECT lapse('b');
SELECT idem_fail('takeover', 'b', '1', :b);
SELECT outcome, result FROM idem_try_claim('takeover', 'b');
SELECT token AS c FROM idem_lease('takeover', 'c', lease => '1 hour') \gset
SELECT lapse('c');
SELECT idem_release('takeover', 'c', :c);
SELECT idem_status('takeover', 'c');

-- ----- lapsed = reclaim: taken over by a lease -----

SELECT token AS d FROM idem_lease('takeover', 'd', scope => '', fingerprint => '\x01', wait => NULL, lease => '1 hour', progress => '"made 1"') \gset
SELECT lapse('d');
-- The fingerprint is compared before the lease is looked at.
SELECT outcome, token FROM idem_lease('takeover', 'd', scope => '', fingerprint => '\x02', wait => NULL, lease => '1 hour');
-- A takeover after a savepoint, rolled back
BEGIN;
SAVEPOINT s;
SELECT outcome, token > :d AS grows FROM idem_lease('takeover', 'd', lease => '1 hour');
SELECT idem_extend('takeover', 'd', :d);
ROLLBACK TO s;
SELECT idem_fence('takeover', 'd', :d);
ROLLBACK;
SELECT outcome, result, progress, token > :d AS grows, expires_at > clock_timestamp() AS remembered, lease_until > clock_timestamp() AS live
FROM idem_lease('takeover', 'd', lease => '1 hour');
SELECT token_of('d') AS d2 \gset
SELECT * FROM rows WHERE request_id = 'd';
SELECT * FROM refused('d', :d);
-- The old token does not count again when the new lease has lapsed.
SELECT lapse('d');
SELECT * FROM refused('d', :d);
SELECT idem_extend('takeover', 'd', :d2, '1 hour', '"made 2"') > clock_timestamp() AS live;
-- A claim that takes over gets the stored progress; the progress in the call is ignored.
SELECT lapse('d');
SELECT outcome, progress, token > :d2 AS grows FROM idem_lease('takeover', 'd', lease => '1 hour', progress => '"made 3"');
SELECT * FROM rows WHERE request_id = 'd';
SELECT idem_complete('takeover', 'd', '"done"', token_of('d'));
-- The old holder cannot settle with the same result either.
SELECT idem_complete('takeover', 'd', '"done"', :d);
SELECT * FROM refused('d', :d2);

-- ----- lapsed = reclaim: taken over by a transaction -----

SELECT token AS e FROM idem_lease('takeover', 'e', scope => '', fingerprint => '\x01', wait => NULL, lease => '1 hour', progress => '"made 1"') \gset
SELECT lapse('e');
BEGIN;
SELECT outcome, progress, lease_until FROM idem_try_claim('takeover', 'e');
SELECT * FROM rows WHERE request_id = 'e';
SELECT * FROM refused('e', :e);
ROLLBACK;
-- After ROLLBACK the lease is as it was.
SELECT * FROM rows WHERE request_id = 'e';
SELECT idem_fence('takeover', 'e', :e);
-- A call that returns no progress cannot take over where progress is recorded.
SELECT idem_claim('takeover', 'e', '', '\x01');
SELECT * FROM idem_claim_many('{takeover}', '{e}');
INSERT INTO sink VALUES ('takeover', 'e');
SELECT outcome FROM idem_lease('takeover', 'e2', '1 hour', progress => 'null');
SELECT lapse('e2');
SELECT idem_call('takeover', 'e2', 'called()', '{}');
SELECT * FROM rows WHERE request_id = 'e';
-- Another fingerprint is still a mismatch, and an unsettled lease that is live still in progress.
SELECT idem_claim('takeover', 'e', '', '\x02');
SELECT idem_extend('takeover', 'e', :e, '1 hour') > clock_timestamp() AS live_again;
SELECT idem_claim('takeover', 'e', wait => '0');
SELECT lapse('e');
BEGIN;
SELECT outcome, progress FROM idem_try_claim('takeover', 'e', '', '\x01');
SELECT idem_complete('"transactional"');
COMMIT;
SELECT * FROM rows WHERE request_id = 'e';
SELECT * FROM refused('e', :e);
-- The transaction that took over fails the request.
SELECT token AS f FROM idem_lease('takeover', 'f', lease => '1 hour') \gset
SELECT lapse('f');
BEGIN;
SELECT idem_claim('takeover', 'f');
SELECT idem_fail('"transactional"');
COMMIT;
SELECT * FROM rows WHERE request_id = 'f';
SELECT * FROM refused('f', :f);
-- Taken over in a batch
SELECT token AS g FROM idem_lease('takeover', 'g', lease => '1 hour') \gset
SELECT lapse('g');
SELECT * FROM idem_claim_many('{takeover,takeover}', '{g,g}');
SELECT * FROM rows WHERE request_id = 'g';
SELECT * FROM refused('g', :g);

-- Taken over by a sink, and by idem_call()
SELECT outcome FROM idem_lease('takeover', 'sunk', '1 hour');
SELECT lapse('sunk');
INSERT INTO sink VALUES ('takeover', 'sunk') RETURNING *;
SELECT outcome FROM idem_lease('takeover', 'called', '1 hour');
SELECT lapse('called');
SELECT idem_call('takeover', 'called', 'called()', '{}');

-- A transaction that has fenced can itself take over the lapsed lease.
SELECT token AS h FROM idem_lease('takeover', 'h', lease => '1 hour') \gset
SELECT lapse('h');
BEGIN;
SELECT idem_fence('takeover', 'h', :h);
SELECT outcome, token > :h AS grows FROM idem_lease('takeover', 'h', lease => '1 hour', wait => '0');
SELECT idem_complete('takeover', 'h', '1', :h);
ROLLBACK;

-- ----- lapsed = unknown -----

SELECT token AS i FROM idem_lease('takeover', 'i', scope => 'unknown', fingerprint => '\x01', wait => NULL, lease => '1 hour', progress => '"made 1"') \gset
SELECT outcome FROM idem_try_claim('takeover', 'i', 'unknown', wait => '0');
SELECT idem_status('takeover', 'i', 'unknown');
SELECT lapse('i');
SELECT outcome, result, progress, expires_at IS NOT NULL AS remembered, lease_until < clock_timestamp() AS lapsed
FROM idem_try_claim('takeover', 'i', 'unknown');
SELECT outcome, token FROM idem_lease('takeover', 'i', scope => 'unknown', lease => '1 hour');
SELECT idem_claim('takeover', 'i', 'unknown');
SELECT * FROM idem_claim_many('{takeover}', '{i}', 'unknown');
SELECT outcome FROM idem_try_claim('takeover', 'i', 'unknown', '\x02');
SELECT idem_status('takeover', 'i', 'unknown'), state, progress FROM idem_lookup('takeover', 'i', 'unknown');
-- The holder can still extend and settle.
SELECT idem_extend('takeover', 'i', :i, '1 hour', scope => 'unknown') > clock_timestamp() AS live_again;
SELECT outcome FROM idem_try_claim('takeover', 'i', 'unknown', wait => '0');
SELECT lapse('i');
SELECT idem_heal('takeover', 'i', '"found"', 'unknown');
SELECT outcome, result FROM idem_try_claim('takeover', 'i', 'unknown');
SELECT idem_complete('takeover', 'i', '"mine"', :i, 'unknown') AS healed_before;
SELECT token AS j FROM idem_lease('takeover', 'j', scope => 'unknown', lease => '1 hour') \gset
SELECT lapse('j');
SELECT idem_complete('takeover', 'j', '"late"', :j, 'unknown');
SELECT outcome, result FROM idem_try_claim('takeover', 'j', 'unknown');
SELECT token AS k FROM idem_lease('takeover', 'k', scope => 'unknown', lease => '1 hour') \gset
SELECT lapse('k');
SELECT idem_forget('takeover', 'k', 'unknown');
SELECT outcome, token > :k AS grows FROM idem_lease('takeover', 'k', scope => 'unknown', lease => '1 hour');
SELECT * FROM refused('k', :k, 'unknown');
-- The policy at the time of the claim decides.
SELECT lapse('k');
UPDATE idem_scopes SET lapsed = 'reclaim' WHERE scope = 'unknown';
SELECT outcome FROM idem_lease('takeover', 'k', scope => 'unknown', lease => '1 hour');
UPDATE idem_scopes SET lapsed = 'unknown' WHERE scope = 'unknown';

-- ----- failed = terminal, retryable -----

SELECT token AS l FROM idem_lease('takeover', 'l', scope => '', lease => '1 hour') \gset
SELECT idem_fail('takeover', 'l', '"no"', :l);
SELECT outcome, result FROM idem_try_claim('takeover', 'l');
SELECT outcome, result FROM idem_lease('takeover', 'l', lease => '1 hour');
SELECT idem_claim('takeover', 'l');
SELECT * FROM idem_claim_many('{takeover}', '{l}');

SELECT token AS m FROM idem_lease('takeover', 'm', scope => 'retryable', fingerprint => '\x01', wait => NULL, lease => '1 hour', progress => '"made 1"') \gset
SELECT idem_fail('takeover', 'm', '"no"', :m, 'retryable');
SELECT idem_fail('takeover', 'm', '"no"', :m, 'retryable') AS identical;
SELECT idem_status('takeover', 'm', 'retryable'), idem_result('takeover', 'm', 'retryable');
SELECT outcome FROM idem_try_claim('takeover', 'm', 'retryable', '\x02');
SELECT outcome, result, progress, token > :m AS grows FROM idem_lease('takeover', 'm', scope => 'retryable', lease => '1 hour');
SELECT * FROM rows WHERE request_id = 'm';
SELECT * FROM refused('m', :m, 'retryable');
SELECT idem_fail('takeover', 'm', '"no"', :m, 'retryable');
SELECT idem_fail('takeover', 'm', '"no again"', token_of('m'), 'retryable');
BEGIN;
SELECT idem_claim('takeover', 'm', 'retryable');
SELECT idem_fail('"third"');
-- A claim in the same transaction executes the request again, as the policy says.
SELECT outcome, result FROM idem_try_claim('takeover', 'm', 'retryable');
SELECT idem_complete('"fourth"');
SELECT outcome, result FROM idem_try_claim('takeover', 'm', 'retryable');
COMMIT;
SELECT * FROM rows WHERE request_id = 'm';
SELECT idem_claim('takeover', 'n', 'retryable');
BEGIN;
SELECT idem_claim('takeover', 'o', 'retryable');
SELECT idem_fail('1');
COMMIT;
SELECT * FROM idem_claim_many('{takeover,takeover}', '{n,o}', 'retryable');
SELECT * FROM rows WHERE request_id IN ('n', 'o');

-- ----- expired = protect, reclaim -----

CREATE PROCEDURE prepare(scope text) LANGUAGE plpgsql AS $$
DECLARE
	held bigint;
BEGIN
	DELETE FROM idem_claims WHERE user_id = 'takeover';
	SELECT token INTO held FROM idem_lease('takeover', 'completed', scope => scope, fingerprint => '\x01', lease => '1 hour', progress => '1');
	PERFORM idem_complete('takeover', 'completed', '"old"', held, scope);
	SELECT token INTO held FROM idem_lease('takeover', 'failed', scope => scope, fingerprint => '\x01', lease => '1 hour', progress => '1');
	PERFORM idem_fail('takeover', 'failed', '"old"', held, scope);
	PERFORM idem_lease('takeover', 'lapsed', scope => scope, fingerprint => '\x01', lease => '1 hour', progress => '1');
	PERFORM idem_lease('takeover', 'live', scope => scope, fingerprint => '\x01', lease => '1 hour', progress => '1');
	PERFORM lapse('lapsed'), expire('completed'), expire('failed'), expire('lapsed'), expire('live');
END $$;

CREATE FUNCTION claims(scope text, fingerprint bytea)
RETURNS TABLE (request text, outcome idem_outcome, result jsonb, progress jsonb, remembered boolean) LANGUAGE sql AS $$
	SELECT request, c.outcome, c.result, c.progress, c.expires_at > clock_timestamp()
	FROM unnest('{completed,failed,lapsed,live}'::text[]) request,
		idem_try_claim('takeover', request, scope, fingerprint, '0') c
$$;
CREATE FUNCTION leases(scope text)
RETURNS TABLE (request text, outcome idem_outcome, result jsonb, progress jsonb, remembered boolean) LANGUAGE sql AS $$
	SELECT request, c.outcome, c.result, c.progress, c.expires_at > clock_timestamp()
	FROM unnest('{completed,failed,lapsed,live}'::text[]) request,
		idem_lease('takeover', request, '1 hour', scope, wait => '0') c
$$;

CALL prepare('');
SELECT request, outcome FROM claims('', '\x02');
SELECT * FROM leases('');
CALL prepare('reclaim');
-- Under reclaim the reading functions also treat the first three as absent.
SELECT request, idem_status('takeover', request, 'reclaim'), idem_result('takeover', request, 'reclaim'), state
FROM unnest('{completed,failed,lapsed,live}'::text[]) request, idem_lookup('takeover', request, 'reclaim');
SELECT request, outcome, remembered FROM claims('reclaim', '\x02');
SELECT * FROM rows;
CALL prepare('reclaim');
SELECT * FROM leases('reclaim');
SELECT * FROM rows;
CALL prepare('reclaim');
SELECT * FROM idem_claim_many('{takeover,takeover,takeover,takeover}', '{completed,failed,lapsed,live}', 'reclaim', wait => '0');
-- Under lapsed = unknown an unsettled request does not count as absent when it has expired.
CALL prepare('reclaim unknown');
SELECT * FROM leases('reclaim unknown');
CALL prepare('unknown');
SELECT * FROM leases('unknown');

-- A cleanup removes neither such a request nor a live lease, and all other expired rows.
CALL prepare('unknown');
SELECT idem_cleanup() > 0 AS cleaned;
SELECT request_id FROM rows;
SELECT idem_cleanup() AS cleaned;
CALL prepare('');
SELECT idem_cleanup() > 0 AS cleaned;
SELECT request_id FROM rows;
SELECT idem_heal('takeover', 'live', '1');
SELECT expires_at > clock_timestamp() AS remembered FROM idem_lookup('takeover', 'live');
-- The holder of a lease that was cleaned has lost it.
SELECT * FROM refused('lapsed', 1);

-- ----- tokens grow from holder to holder -----

\set VERBOSITY terse

DO $$
DECLARE
	latest bigint := 0;
	held bigint;
	bad int := 0;
BEGIN
	FOR i IN 1 .. 40 LOOP
		SELECT token INTO held FROM idem_lease('takeover', 'tokens', lease => '1 hour');
		IF held IS NULL OR held <= latest THEN
			bad := bad + 1;
		END IF;
		latest := held;
		COMMIT;
		CASE i % 5
			WHEN 0 THEN PERFORM idem_release('takeover', 'tokens', held);
			WHEN 1 THEN PERFORM idem_forget('takeover', 'tokens');
			WHEN 2 THEN
				PERFORM lapse('tokens');
				COMMIT;
				-- A claim without a lease in between stores no token.
				PERFORM idem_claim('takeover', 'tokens');
				PERFORM idem_forget('takeover', 'tokens');
			WHEN 3 THEN PERFORM lapse('tokens');
			ELSE DELETE FROM idem_claims WHERE user_id = 'takeover' AND request_id = 'tokens';
		END CASE;
		COMMIT;
	END LOOP;
	RAISE NOTICE '% tokens did not grow', bad;
END $$;

DELETE FROM idem_claims WHERE user_id = 'takeover';
DELETE FROM idem_scopes WHERE scope IN ('unknown', 'retryable', 'reclaim', 'reclaim unknown');
DROP VIEW rows;
DROP TABLE sink;
DROP FUNCTION called;
DROP FUNCTION lapse, expire, token_of, refused, claims, leases;
DROP PROCEDURE prepare;
