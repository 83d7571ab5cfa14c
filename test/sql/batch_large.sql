-- Batches that are so large that their new keys are written together: the answers are the same
-- as if the keys were claimed one after the other.
\set SHOW_CONTEXT never
CREATE FUNCTION numbered(first int, last int, prefix text DEFAULT 'n ') RETURNS text[] LANGUAGE sql AS $$
	SELECT array_agg(prefix || lpad(i::text, 5, '0') ORDER BY i) FROM generate_series(first, last) AS i
$$;
CREATE FUNCTION answers(requests text[], scope text DEFAULT '', fingerprints bytea[] DEFAULT NULL)
RETURNS TABLE (outcome idem_outcome, result jsonb, n bigint, first text, last text) LANGUAGE sql AS $$
	SELECT outcome, result, count(*), min(requests[ordinal]), max(requests[ordinal])
	FROM idem_claim_many(array_fill('u'::text, ARRAY[cardinality(requests)]), requests, scope, fingerprints)
	GROUP BY outcome, result ORDER BY outcome, result
$$;
-- All keys are new; then the same batch again
SELECT * FROM answers(numbered(1, 2500));
SELECT * FROM answers(numbered(1, 2500));
SELECT count(*), count(DISTINCT request_id), count(DISTINCT state), bool_and(token IS NULL) FROM idem_claims;
-- The answers come in the order of the arrays.
SELECT bool_and(ordinal = n), count(*)
FROM idem_claim_many(array_fill('u'::text, ARRAY[200]),
	(SELECT array_agg(r ORDER BY md5(r)) FROM unnest(numbered(3001, 3200)) AS r)) WITH ORDINALITY AS t (ordinal, outcome, result, n);
-- With repeated keys, invalid elements, and keys that are already stored
SELECT idem_claim('u', 'm 00300'), idem_complete('"three hundred"');
SELECT idem_claim('u', 'm 00301');
SELECT idem_claim('u', 'm 00302'), idem_fail('"no"');
SELECT * FROM answers(numbered(1, 400, 'm ') || ARRAY['', NULL, 'm 00200', 'm 00200', 'm 00300']);
SELECT ordinal, outcome, result
FROM idem_claim_many(array_fill('u'::text, ARRAY[405]), numbered(1, 400, 'm ') || ARRAY['', NULL, 'm 00200', 'm 00200', 'm 00300'])
WHERE ordinal IN (299, 300, 301, 302, 303) OR ordinal > 400 ORDER BY ordinal;
-- Every second key is stored: each of the others is claimed.
SELECT * FROM answers((SELECT array_agg('e ' || i ORDER BY i) FROM generate_series(10000, 10400, 2) AS i));
SELECT * FROM answers((SELECT array_agg('e ' || i ORDER BY i) FROM generate_series(10000, 10400) AS i));
-- The transaction can settle each key by its name.
BEGIN;
SELECT * FROM answers(numbered(1, 100, 'h '));
SELECT idem_complete('u', 'h 00001', '"first"'), idem_complete('u', 'h 00100', '"last"');
SELECT idem_complete('"which one?"');
ROLLBACK;
SELECT count(*) FROM idem_claims WHERE request_id LIKE 'h %';
-- The claims follow savepoints.
BEGIN;
SELECT * FROM answers(numbered(1, 100, 's '));
SAVEPOINT s;
SELECT * FROM answers(numbered(51, 200, 's '));
ROLLBACK TO s;
SELECT * FROM answers(numbered(101, 180, 's '));
SELECT idem_complete('u', 's 00050', '"outer"'), idem_complete('u', 's 00180', '"anew"');
COMMIT;
SELECT * FROM answers(numbered(1, 300, 's '));
-- The rows are visible to the next statement, and to the next command of the same function.
DO $$
BEGIN
	PERFORM idem_claim_many(array_fill('u'::text, ARRAY[100]), numbered(1, 100, 'v '));
	RAISE NOTICE '% rows', (SELECT count(*) FROM idem_claims WHERE request_id LIKE 'v %');
END $$;
-- Fingerprints
SELECT * FROM answers(numbered(1, 200, 'f '), '', (SELECT array_agg(int4send(i) ORDER BY i) FROM generate_series(1, 200) AS i));
SELECT * FROM answers(numbered(1, 200, 'f '), '', (SELECT array_agg(int4send(i % 150 + 1) ORDER BY i) FROM generate_series(0, 199) AS i));
-- A scope with key_time = uuidv7: some keys are too old, some malformed, the others new
SET session_replication_role = replica;
INSERT INTO idem_scopes (scope, ttl, key_time, guarded_since) VALUES ('timed', '1 hour', 'uuidv7', '2001-01-01');
RESET session_replication_role;
CREATE FUNCTION timed(age interval, n int) RETURNS text[] LANGUAGE sql AS $$
	SELECT array_agg(regexp_replace(lpad(to_hex((extract(epoch FROM clock_timestamp() - age) * 1000)::bigint), 12, '0')
		|| '7000' || '8' || lpad(i::text, 15, '0'), '^(.{8})(.{4})(.{4})(.{4})(.{12})$', '\1-\2-\3-\4-\5'))
	FROM generate_series(1, n) AS i
$$;
SELECT outcome, n FROM answers(timed('10 min', 100) || timed('2 hours', 3) || ARRAY['no uuid'] || timed('5 min', 100), 'timed');
SELECT count(*), min(expires_at) > clock_timestamp() + interval '59 min' AS promised FROM idem_claims WHERE scope = 'timed';
DELETE FROM idem_scopes WHERE scope = 'timed';
-- Many batches that overlap, in one transaction
SELECT outcome, sum(n) FROM generate_series(0, 19) AS i, answers(numbered(i * 150, i * 150 + 199, 'o ')) GROUP BY outcome ORDER BY outcome;
TRUNCATE idem_claims;
DROP FUNCTION numbered, answers, timed;
