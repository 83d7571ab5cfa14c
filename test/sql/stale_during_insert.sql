-- A key becomes stale while its row is being inserted. The claim must not succeed: since the
-- probe, the row of an earlier execution may have expired and been removed. An index expression
-- of this test makes the insert take that long.

-- Where caches are discarded the batch needs more than 10 s.
SELECT set_config('regress_idem.ttl', CASE WHEN current_setting('debug_discard_caches') = '0' THEN '10 s' ELSE '10 min' END, false) AS ignored \gset
CREATE FUNCTION uuid_of(moment timestamptz, n int) RETURNS text LANGUAGE sql AS $$
	SELECT format('%s-%s-7000-8000-%s', left(ms, 8), right(ms, 4), lpad(to_hex(n), 12, '0'))
	FROM (SELECT lpad(to_hex((extract(epoch FROM moment) * 1000)::bigint), 12, '0') AS ms) AS t
$$;
-- A key of that age will be stale in a second.
CREATE FUNCTION nearly_stale() RETURNS timestamptz LANGUAGE sql AS $$
	SELECT clock_timestamp() - current_setting('regress_idem.ttl')::interval + interval '1 s'
$$;
-- For the key number 1: waits until the time of the key is more than the ttl ago
CREATE FUNCTION until_stale(request text) RETURNS text LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
	WHILE request LIKE '%-000000000001'
		AND to_timestamp((('x' || left(request, 8) || substr(request, 10, 4))::bit(48)::int8 + 1) / 1000.0) > clock_timestamp() - current_setting('regress_idem.ttl')::interval LOOP
	END LOOP;
	RETURN request;
END $$;
CREATE INDEX regress_idem_slow ON idem_claims (until_stale(request_id));
SET session_replication_role = replica;
INSERT INTO idem_scopes (scope, ttl, key_time, guarded_since) VALUES ('timed', current_setting('regress_idem.ttl')::interval, 'uuidv7', '2001-01-01');
RESET session_replication_role;

SELECT outcome, result FROM idem_try_claim('u', uuid_of(nearly_stale(), 1), 'timed');
SELECT outcome, token FROM idem_lease('u', uuid_of(nearly_stale(), 1), scope => 'timed', lease => '1 s');
SELECT idem_claim('u', uuid_of(clock_timestamp(), 2), 'timed') AS another;
SELECT outcome, count(*)
FROM idem_claim_many(array_fill('u'::text, ARRAY[70]),
	ARRAY(SELECT uuid_of(CASE i WHEN 1 THEN nearly_stale() ELSE clock_timestamp() END, 100 * (i - 1) + 1) FROM generate_series(1, 70) AS i), 'timed')
GROUP BY outcome ORDER BY outcome;
SELECT count(*) AS rows, count(*) FILTER (WHERE request_id LIKE '%-000000000001') AS stale FROM idem_claims;

DROP INDEX regress_idem_slow;
DROP FUNCTION uuid_of, nearly_stale, until_stale;
TRUNCATE idem_claims, idem_scopes;
