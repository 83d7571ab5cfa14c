-- A lease and its token: claim, extend, fence, settle, release, heal. Leases that lapse are in
-- takeover.sql.
\set SHOW_CONTEXT never
\set VERBOSITY sqlstate

CREATE VIEW leased AS
	SELECT request_id, state, result, progress, token IS NOT NULL AS has_token,
		lease_until IS NOT NULL AS has_lease
	FROM idem_claims WHERE user_id = 'lease' ORDER BY request_id;

-- ----- claim -----

SELECT outcome, result, progress, token > 0 AS has_token,
	lease_until BETWEEN clock_timestamp() + interval '59 min' AND clock_timestamp() + interval '1 hour' AS in_an_hour,
	expires_at >= lease_until AND date_trunc('second', expires_at) = expires_at AS remembered
FROM idem_lease('lease', 'a', scope => '', fingerprint => '\x01', wait => NULL, lease => '1 hour', progress => '{"step": 1}');
SELECT token AS a FROM idem_claims WHERE user_id = 'lease' AND request_id = 'a' \gset
TABLE leased;

-- Another claim gets the progress and the end of the lease, but not the token.
SELECT outcome, result, progress, expires_at IS NOT NULL AS remembered, lease_until > clock_timestamp() AS live
FROM idem_try_claim('lease', 'a', wait => '0');
SELECT outcome, token FROM idem_lease('lease', 'a', wait => '0', lease => '1 hour', progress => '"other"');
SELECT outcome, progress FROM idem_try_claim('lease', 'a', wait => '5 ms');
SELECT outcome FROM idem_try_claim('lease', 'a', '', '\x02', '0');
SELECT idem_claim('lease', 'a', wait => '0');
SELECT idem_claim('lease', 'a', wait => '5 ms');
SELECT idem_claim('lease', 'a', '', '\x02');
SELECT idem_status('lease', 'a'), idem_result('lease', 'a');
SELECT state, fingerprint, result, progress, lease_until > clock_timestamp() AS live FROM idem_lookup('lease', 'a');
-- A batch does not return progress.
SELECT * FROM idem_claim_many('{lease}', '{a}', wait => '0');

-- A lease can be longer than the ttl: the row stays until the lease ends, or longer.
INSERT INTO idem_scopes (scope, lease_max) VALUES ('long', '100 days'), ('short', '1 min');
SELECT expires_at >= lease_until AS remembered, lease_until > clock_timestamp() + interval '99 days' AS long
FROM idem_lease('lease', 'long', scope => 'long', lease => '100 days');
-- A lease cannot be longer than lease_max of the scope, or idem.lease_max.
SELECT idem_lease('lease', 'x', scope => 'long', lease => '100 days 1 us');
SELECT idem_lease('lease', 'x', lease => '1 day 1 us');
SELECT outcome FROM idem_lease('lease', 'day', lease => '24 hours');
SELECT token AS short FROM idem_lease('lease', 'short', scope => 'short', lease => '1 min') \gset
SELECT idem_extend('lease', 'short', :short, '61 s', scope => 'short');
SELECT idem_extend('lease', 'short', :short, '1 min', scope => 'short') > now() AS extended;
-- lease_max does not limit the default length that the operator gave the scope.
UPDATE idem_scopes SET lease = '2 min' WHERE scope = 'short';
SELECT idem_extend('lease', 'short', :short, scope => 'short') > now() + interval '119 s' AS extended;
DELETE FROM idem_claims WHERE request_id IN ('day', 'short');

-- ----- arguments -----

SELECT idem_lease('lease', 'x', lease => '0');
SELECT idem_lease('lease', 'x', lease => '-1 s');
SELECT idem_lease('lease', 'x', lease => '1 day -24 hours');
SELECT idem_lease('lease', 'x', lease => '1 month');
SELECT idem_lease('lease', 'x', lease => '-1 month 40 days');
SELECT idem_lease('lease', 'x', lease => '36500 days 1 us');
SELECT idem_lease('lease', 'x', lease => '2147483647 days 2562047788 hours');
SELECT idem_lease('lease', 'x', lease => '1 min', wait => '-1 us');
SELECT idem_lease('lease', 'x', lease => '1 min', wait => '1 month');
SELECT idem_lease('lease', 'x', NULL);
-- A forgotten lease is an error, not a claim for this transaction.
SELECT idem_lease('lease', 'x');
SELECT idem_lease('lease', 'x', progress => '1');
SELECT idem_try_claim('lease', 'x', lease => '1 min');
SELECT idem_status('lease', 'x');
SELECT idem_lease('lease', NULL, lease => '1 min');
SELECT idem_lease('', 'x', lease => '1 min');
SELECT idem_lease('lease', 'x', scope => NULL, lease => '1 min');
SELECT idem_lease('lease', 'x', scope => '', fingerprint => '\x', lease => '1 min');

SELECT idem_extend('lease', 'a', NULL);
SELECT idem_extend('lease', 'a', 0);
SELECT idem_extend('lease', 'a', -1);
SELECT idem_extend('lease', 'a', :a, '0');
SELECT idem_extend('lease', 'a', :a, '-1 s');
SELECT idem_extend('lease', 'a', :a, '1 month');
SELECT idem_extend('lease', 'a', :a, '36500 days 1 us');
SELECT idem_extend('lease', 'a', :a, scope => NULL);
SELECT idem_release('lease', 'a', NULL);
SELECT idem_release('lease', 'a', 0);
SELECT idem_release('lease', NULL, :a);
SELECT idem_fence('lease', 'a', NULL);
SELECT idem_fence('lease', 'a', -9223372036854775808);
SELECT idem_fence(NULL, 'a', :a);
SELECT idem_complete('lease', 'a', '1', 0);
SELECT idem_fail('lease', 'a', '1', -1);
SELECT idem_heal('lease', '', '1');
SELECT idem_heal('lease', 'a', '1', NULL);
-- Without a token only the transaction that claimed the lease can settle it.
SELECT idem_complete('lease', 'a', '1', NULL);
SELECT idem_fail('lease', 'a', '1');
TABLE leased;

-- ----- extend -----

SELECT idem_extend('lease', 'a', :a, '2 hours') AS until \gset
SELECT lease_until = :'until' AS stored, lease_until > clock_timestamp() + interval '119 min' AS two_hours, progress
FROM idem_lookup('lease', 'a');
-- A length can shorten the lease, but expires_at never moves back.
SELECT expires_at AS promised FROM idem_lookup('lease', 'a') \gset
SELECT idem_extend('lease', 'a', :a, '10 s', '{"step": 2}') < clock_timestamp() + interval '11 s' AS short;
SELECT expires_at = :'promised' AS kept, progress FROM idem_lookup('lease', 'a');
-- Without one the lease lasts as long as the scope says, from now on, and is never shortened.
SELECT idem_extend('lease', 'a', :a) > clock_timestamp() + interval '20 s' AS of_the_scope;
SELECT idem_extend('lease', 'a', :a, '2 hours') AS until \gset
SELECT idem_extend('lease', 'a', :a, progress => '{"step": 2}') = :'until' AS not_shortened;
SELECT lease_until = :'until' AS stored FROM idem_lookup('lease', 'a');
SELECT idem_extend('lease', 'a', :a, '1 hour', 'null') IS NOT NULL AS extended;
SELECT progress FROM idem_lookup('lease', 'a');
SELECT idem_extend('lease', 'a', :a, '1 hour', '{"step": 3}') IS NOT NULL AS extended;
SELECT outcome, progress FROM idem_try_claim('lease', 'a', wait => '0');
-- What is written can be read back, as a dump is, also in the last second of all.
BEGIN;
UPDATE idem_claims SET expires_at = '294276-12-31 23:59:59.5+00' WHERE user_id = 'lease' AND request_id = 'a';
SELECT idem_extend('lease', 'a', :a) IS NOT NULL AS extended;
SELECT expires_at::text::timestamptz = '294276-12-31 23:59:59.5+00' AS kept FROM idem_lookup('lease', 'a');
ROLLBACK;

-- ----- the tokens of others -----

SELECT token AS b FROM idem_lease('lease', 'b', lease => '1 hour') \gset
SELECT :b > :a AS grows;
SELECT idem_extend('lease', 'a', :b);
SELECT idem_release('lease', 'a', :b);
SELECT idem_fence('lease', 'a', :b);
SELECT idem_complete('lease', 'a', '1', :b);
SELECT idem_fail('lease', 'a', '1', :b);
SELECT idem_extend('lease', 'a', 9223372036854775807);
-- The same ids in another scope are another key.
SELECT idem_extend('lease', 'a', :a, scope => 'other');
SELECT idem_complete('lease', 'a', '1', :a, 'other');
SELECT idem_fence('lease', 'a', :a, 'other');
TABLE leased;

-- ----- complete -----

SELECT idem_complete('lease', 'a', '{"paid": 1.0}', :a);
SELECT idem_complete('lease', 'a', '{"paid": 1}', :a) AS identical;
SELECT idem_complete('lease', 'a', '{"paid": 2}', :a);
SELECT idem_complete('lease', 'a', NULL, :a);
SELECT idem_fail('lease', 'a', '{"paid": 1}', :a);
SELECT idem_extend('lease', 'a', :a);
SELECT idem_fence('lease', 'a', :a);
SELECT idem_release('lease', 'a', :a);
SELECT idem_complete('lease', 'a', '{"paid": 1}', :b);
SELECT idem_complete('lease', 'a', '{"paid": 1}');
SELECT idem_heal('lease', 'a', '{"paid": 3}') AS healed;
SELECT outcome, result, progress FROM idem_try_claim('lease', 'a');
SELECT outcome, result FROM idem_lease('lease', 'a', lease => '1 hour');
SELECT idem_claim('lease', 'a'), idem_status('lease', 'a'), idem_result('lease', 'a');
-- Completed without a result: NULL is no result, and differs from a JSON null.
SELECT idem_complete('lease', 'b', NULL, :b);
SELECT idem_complete('lease', 'b', NULL, :b) AS identical;
SELECT idem_complete('lease', 'b', 'null', :b);
TABLE leased;

-- ----- fail -----

SELECT token AS c FROM idem_lease('lease', 'c', lease => '1 hour') \gset
SELECT idem_fail('lease', 'c', '"no money"', :c);
SELECT idem_fail('lease', 'c', '"no money"', :c) AS identical;
SELECT idem_fail('lease', 'c', '"no luck"', :c);
SELECT idem_complete('lease', 'c', '"no money"', :c);
SELECT idem_extend('lease', 'c', :c);
SELECT idem_fence('lease', 'c', :c);
SELECT idem_release('lease', 'c', :c);
SELECT idem_heal('lease', 'c', '1');
SELECT outcome, result FROM idem_try_claim('lease', 'c');
SELECT idem_claim('lease', 'c');
SELECT idem_status('lease', 'c'), idem_result('lease', 'c');

-- ----- release -----

SELECT token AS d FROM idem_lease('lease', 'd', scope => '', fingerprint => '\x01', wait => NULL, lease => '1 hour', progress => '"half done"') \gset
SELECT idem_release('lease', 'd', :d);
SELECT idem_release('lease', 'd', :d) AS again;
SELECT idem_status('lease', 'd');
-- The row is deleted: the next claim can have another fingerprint, and gets no progress.
SELECT outcome, progress, token > :d AS grows FROM idem_lease('lease', 'd', scope => '', fingerprint => '\x02', wait => NULL, lease => '1 hour');
SELECT token AS d2 FROM idem_claims WHERE user_id = 'lease' AND request_id = 'd' \gset
SELECT idem_extend('lease', 'd', :d);
SELECT idem_release('lease', 'd', :d);
SELECT idem_fence('lease', 'd', :d);
SELECT idem_complete('lease', 'd', '1', :d);
SELECT idem_fail('lease', 'd', '1', :d);
SELECT idem_release('lease', 'd', :d2);
-- Without a row a call raises ID410, but for a repeated idem_release(): see above.
SELECT idem_extend('lease', 'd', :d2);
SELECT idem_fence('lease', 'd', :d2);
SELECT idem_complete('lease', 'd', '1', :d2);
SELECT idem_fail('lease', 'd', '1', :d2);
SELECT idem_heal('lease', 'd', '1');
SELECT idem_claim('lease', 'd') AS transactional;
SELECT idem_release('lease', 'd', :d2);
SELECT idem_heal('lease', 'd', '1') AS healed;

-- ----- heal -----

SELECT token AS e FROM idem_lease('lease', 'e', lease => '1 hour') \gset
SELECT idem_heal('lease', 'e', '"found"');
SELECT idem_heal('lease', 'e', '"found"') AS again, idem_heal('lease', 'e', '"else"') AS other;
SELECT * FROM leased WHERE request_id = 'e';
-- The holder of a healed request gets false from a settling call, not an error; but it cannot
-- extend or fence.
SELECT idem_complete('lease', 'e', '"found"', :e) AS same, idem_complete('lease', 'e', '"mine"', :e) AS mine;
SELECT idem_fail('lease', 'e', '"mine"', :e);
SELECT idem_extend('lease', 'e', :e);
SELECT idem_fence('lease', 'e', :e);
SELECT idem_release('lease', 'e', :e);
SELECT idem_complete('lease', 'e', '"found"', :d2);
SELECT outcome, result FROM idem_try_claim('lease', 'e');
-- ROLLBACK undoes a heal.
SELECT token AS f FROM idem_lease('lease', 'f', lease => '1 hour') \gset
BEGIN;
SELECT idem_heal('lease', 'f', '1');
ROLLBACK;
SELECT idem_complete('lease', 'f', '2', :f);
SELECT idem_result('lease', 'f');

-- ----- the caps -----

INSERT INTO idem_scopes (scope, result_max_bytes, lease) VALUES ('capped', 40, '2 hours');
SELECT idem_lease('lease', 'g', scope => 'capped', lease => '1 hour', progress => to_jsonb(repeat('x', 40)));
SELECT token AS g FROM idem_lease('lease', 'g', scope => 'capped', lease => '1 hour', progress => to_jsonb(repeat('x', 30))) \gset
SELECT idem_extend('lease', 'g', :g, progress => to_jsonb(repeat('x', 40)), scope => 'capped');
SELECT idem_complete('lease', 'g', to_jsonb(repeat('x', 40)), :g, 'capped');
SELECT idem_fail('lease', 'g', to_jsonb(repeat('x', 40)), :g, 'capped');
SELECT idem_heal('lease', 'g', to_jsonb(repeat('x', 40)), 'capped');
SELECT state, length(progress #>> '{}') AS length, result FROM idem_lookup('lease', 'g', 'capped');
SELECT idem_extend('lease', 'g', :g, scope => 'capped') > clock_timestamp() + interval '119 min' AS lease_of_the_scope;
SELECT idem_complete('lease', 'g', to_jsonb(repeat('x', 30)), :g, 'capped');

-- ----- in one transaction -----

-- The short forms settle the lease that this transaction claimed.
BEGIN;
SELECT outcome FROM idem_lease('lease', 'h', lease => '1 hour');
SELECT outcome, token FROM idem_lease('lease', 'h', lease => '1 hour') AS second;
SELECT idem_outcome(), idem_result();
SELECT idem_complete('"short"');
SELECT idem_result();
SAVEPOINT s;
SELECT idem_complete('"short"');
ROLLBACK TO s;
SELECT outcome, result FROM idem_lease('lease', 'h', lease => '1 hour');
COMMIT;
SELECT * FROM leased WHERE request_id = 'h';

BEGIN;
SELECT outcome FROM idem_lease('lease', 'i', lease => '1 hour');
SELECT idem_fail('"short"');
COMMIT;
SELECT * FROM leased WHERE request_id = 'i';

-- The short forms do not settle a lease of an earlier transaction: that needs its token.
SELECT token AS j FROM idem_lease('lease', 'j', lease => '1 hour') \gset
SELECT idem_complete('"short"');
BEGIN;
SELECT outcome FROM idem_lease('lease', 'k', lease => '1 hour');
SELECT idem_fence('lease', 'j', :j);
SELECT idem_complete('lease', 'j', '"by token"', :j);
SELECT idem_complete('"short"');
COMMIT;
SELECT * FROM leased WHERE request_id IN ('j', 'k');

-- With two keys the short forms raise an error.
BEGIN;
SELECT idem_claim('lease', 'l');
SELECT outcome FROM idem_lease('lease', 'm', lease => '1 hour');
SAVEPOINT s;
SELECT idem_complete('"which"');
ROLLBACK TO s;
SELECT token AS m FROM idem_claims WHERE user_id = 'lease' AND request_id = 'm' \gset
SELECT idem_complete('lease', 'm', '"m"', :m);
SELECT idem_complete('"l"');
COMMIT;
SELECT * FROM leased WHERE request_id IN ('l', 'm');

-- Released in the transaction that claimed it, and claimed again
BEGIN;
SELECT token AS n FROM idem_lease('lease', 'n', lease => '1 hour') \gset
SELECT idem_release('lease', 'n', :n);
SAVEPOINT s;
SELECT idem_complete('1');
ROLLBACK TO s;
SELECT outcome, token > :n AS grows FROM idem_lease('lease', 'n', lease => '1 hour');
SELECT idem_release('lease', 'n', token) FROM idem_claims WHERE user_id = 'lease' AND request_id = 'n';
SELECT idem_claim('lease', 'n');
SELECT idem_complete('"transactional"');
COMMIT;
SELECT * FROM leased WHERE request_id = 'n';

-- ----- savepoints and rollback -----

BEGIN;
SELECT token AS o FROM idem_lease('lease', 'o', lease => '1 hour') \gset
ROLLBACK;
SELECT idem_status('lease', 'o');
SELECT idem_extend('lease', 'o', :o);
SELECT outcome, token > :o AS grows FROM idem_lease('lease', 'o', lease => '1 hour');

BEGIN;
SAVEPOINT s;
SELECT token AS p FROM idem_lease('lease', 'p', lease => '1 hour') \gset
ROLLBACK TO s;
SELECT idem_extend('lease', 'p', :p);
ROLLBACK TO s;
SELECT outcome, token > :p AS grows FROM idem_lease('lease', 'p', lease => '1 hour');
SAVEPOINT t;
SELECT idem_complete('"rolled back"');
ROLLBACK TO t;
SELECT state FROM idem_lookup('lease', 'p');
SELECT idem_complete('"kept"');
COMMIT;
SELECT * FROM leased WHERE request_id = 'p';

-- ROLLBACK undoes settling, progress and release.
SELECT token AS q FROM idem_lease('lease', 'q', lease => '1 hour', progress => '1') \gset
BEGIN;
SELECT idem_extend('lease', 'q', :q, '1 hour', '2') IS NOT NULL AS extended;
SELECT idem_complete('lease', 'q', '"rolled back"', :q);
ROLLBACK;
BEGIN;
SELECT idem_release('lease', 'q', :q);
ROLLBACK;
SELECT * FROM leased WHERE request_id = 'q';
BEGIN;
SAVEPOINT s;
SELECT idem_fail('lease', 'q', '"rolled back"', :q);
ROLLBACK TO s;
SELECT idem_complete('lease', 'q', '"kept"', :q);
COMMIT;
SELECT * FROM leased WHERE request_id = 'q';

-- After the fence the same transaction can extend and settle the lease.
SELECT token AS r FROM idem_lease('lease', 'r', lease => '1 hour') \gset
BEGIN;
SELECT idem_fence('lease', 'r', :r);
SELECT idem_fence('lease', 'r', :r) AS again;
SAVEPOINT s;
SELECT idem_fence('lease', 'r', :r);
SELECT idem_extend('lease', 'r', :r, '1 hour', '1') IS NOT NULL AS extended;
ROLLBACK TO s;
SELECT idem_extend('lease', 'r', :r, '1 hour', '2') IS NOT NULL AS extended;
SELECT idem_fence('lease', 'r', :r);
SELECT idem_complete('lease', 'r', '"fenced"', :r);
COMMIT;
SELECT * FROM leased WHERE request_id = 'r';

-- It can also release, fail and heal it.
SELECT token AS r FROM idem_lease('lease', 'r2', lease => '1 hour') \gset
BEGIN;
SELECT idem_fence('lease', 'r2', :r);
SELECT idem_release('lease', 'r2', :r);
SELECT idem_status('lease', 'r2');
ROLLBACK;
BEGIN;
SELECT idem_fence('lease', 'r2', :r);
SELECT idem_fail('lease', 'r2', '1', :r);
ROLLBACK;
BEGIN;
SELECT FROM idem_claims WHERE user_id = 'lease' AND request_id = 'r2' FOR UPDATE;
SELECT idem_heal('lease', 'r2', '1');
ROLLBACK;
BEGIN;
SELECT idem_fence('lease', 'r2', :r);
SELECT idem_forget('lease', 'r2');
ROLLBACK;
SELECT * FROM leased WHERE request_id = 'r2';

-- ----- a lease of a key that the transaction has claimed, and the other way round -----

BEGIN;
SELECT idem_claim('lease', 's');
SELECT outcome, result, token FROM idem_lease('lease', 's', lease => '1 hour');
SELECT idem_complete('1');
SELECT outcome, result, token FROM idem_lease('lease', 's', lease => '1 hour');
COMMIT;
BEGIN;
SELECT outcome FROM idem_lease('lease', 't', lease => '1 hour');
-- A claim does not wait for a lease of its own transaction.
SELECT outcome, result FROM idem_try_claim('lease', 't', wait => '1 hour');
SAVEPOINT s;
SELECT idem_claim('lease', 't', wait => '1 hour');
ROLLBACK TO s;
SELECT * FROM idem_claim_many('{lease,lease}', '{t,u}', wait => '1 hour');
COMMIT;
SELECT * FROM leased WHERE request_id IN ('s', 't', 'u');

-- ----- read-only -----

BEGIN READ ONLY;
SELECT idem_lease('lease', 'v', lease => '1 hour');
ROLLBACK;
SELECT token AS w FROM idem_lease('lease', 'w', lease => '1 hour') \gset
BEGIN READ ONLY;
SELECT idem_extend('lease', 'w', :w);
ROLLBACK;
BEGIN READ ONLY;
SELECT idem_fence('lease', 'w', :w);
ROLLBACK;
BEGIN READ ONLY;
SELECT idem_release('lease', 'w', :w);
ROLLBACK;
BEGIN READ ONLY;
SELECT idem_complete('lease', 'w', '1', :w);
ROLLBACK;
BEGIN READ ONLY;
SELECT idem_heal('lease', 'w', '1');
ROLLBACK;
BEGIN READ ONLY;
SELECT idem_status('lease', 'w');
ROLLBACK;

-- ----- rows that an operator keeps for ever -----

INSERT INTO idem_scopes (scope, failed) VALUES ('kept', 'retryable');
SELECT token AS k1 FROM idem_lease('lease', 'k1', scope => 'kept', lease => '1 min') \gset
SELECT token AS k2 FROM idem_lease('lease', 'k2', scope => 'kept', lease => '1 min') \gset
SELECT token AS k3 FROM idem_lease('lease', 'k3', scope => 'kept', lease => '1 min') \gset
SELECT token AS k4 FROM idem_lease('lease', 'k4', scope => 'kept', lease => '1 min') \gset
UPDATE idem_claims SET expires_at = 'infinity' WHERE scope = 'kept';
SELECT idem_complete('lease', 'k1', '1', :k1, 'kept');
SELECT idem_extend('lease', 'k2', :k2, scope => 'kept') > now() AS extended;
SELECT idem_heal('lease', 'k3', '1', 'kept');
SELECT idem_fail('lease', 'k4', '1', :k4, 'kept');
SELECT request_id, state, expires_at FROM idem_claims WHERE scope = 'kept' ORDER BY request_id;
SELECT outcome, expires_at FROM idem_try_claim('lease', 'k4', 'kept');
SELECT outcome, expires_at FROM idem_try_claim('lease', 'k1', 'kept');
DELETE FROM idem_claims WHERE scope = 'kept';
DELETE FROM idem_scopes WHERE scope = 'kept';

-- ----- what the messages say -----

\set VERBOSITY default
-- The DETAIL says until when, in whole seconds.
DO $$
DECLARE
	detail text;
	until timestamptz;
BEGIN
	PERFORM idem_claim('lease', 'w', wait => '0');
EXCEPTION WHEN SQLSTATE 'ID409' THEN
	GET STACKED DIAGNOSTICS detail = PG_EXCEPTION_DETAIL;
	RAISE INFO '% %', SQLERRM, regexp_replace(detail, 'until .*[.]$', 'until');
	until := substring(detail FROM 'until (\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[-+]\d\d(:\d\d)?)[.]$');
	RAISE INFO '%', (SELECT until >= lease_until AND until < lease_until + interval '1 s' FROM idem_lookup('lease', 'w'));
END $$;
SELECT idem_lease('lease', 'x', lease => '0');
SELECT idem_lease('lease', 'x', lease => NULL);
SELECT idem_extend('lease', 'w', NULL);
SELECT idem_extend('lease', 'w', 0);
SELECT idem_extend('lease', 'w', :a);
SELECT idem_extend('lease', 'a', :a);
SELECT idem_complete('lease', 'a', '"other"', :a);
SELECT idem_complete('lease', 'w', '1');
SELECT idem_heal('lease', 'c', '1');
-- The scope was forgotten.
SELECT idem_complete('lease', 'g', '1', :g);
SELECT idem_fail('lease', 'g', '1', :g);
SELECT idem_extend('lease', 'g', :g);
SELECT idem_fence('lease', 'g', :g);
SELECT idem_heal('lease', 'g', '1');
SELECT idem_extend('lease', 'g', :g, progress => to_jsonb(repeat('x', 40)), scope => 'capped');
SELECT idem_lease('lease', 'x', scope => 'capped', lease => '1 hour', progress => to_jsonb(repeat('x', 40)));
SELECT idem_lease('lease', 'x', lease => '2 days');
-- Two arguments are wrong: the error is about the first.
SELECT idem_lease('lease', 'x', scope => 'capped', lease => '1 day 1 s 20 us', progress => to_jsonb(repeat('x', 40)));
SELECT idem_extend('lease', 'x', 1, lease => '100 days 0.5 s', scope => 'long');

DROP VIEW leased;
DELETE FROM idem_scopes WHERE scope IN ('capped', 'long', 'short');
DELETE FROM idem_claims WHERE user_id = 'lease';
