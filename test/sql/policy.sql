-- idem_scopes: which values it accepts, and how its columns act.
-- :SQLSTATE is that of the statement before.
\set SHOW_CONTEXT never

-- A day of a ttl has 24 hours. In UTC no day is longer or shorter.
SET timezone = 'UTC';

-- ----- accepted and refused values -----

CREATE FUNCTION pg_temp.try(command text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
	violated text;
BEGIN
	EXECUTE command;
	RETURN 'ok';
EXCEPTION WHEN OTHERS THEN
	GET STACKED DIAGNOSTICS violated = CONSTRAINT_NAME;
	RETURN SQLSTATE || ' ' || violated;
END $$;

SELECT c, v, pg_temp.try(format('INSERT INTO idem_scopes (scope, %I) VALUES (%L, %s)', c, c || v, v))
FROM (VALUES
	('ttl', '''1 microsecond'''), ('ttl', '''36500 days'''), ('ttl', '''36500 days 1 second'''), ('ttl', '''0'''), ('ttl', '''-1 day'''),
	('ttl', '''1 month'''), ('ttl', '''1 year'''), ('ttl', '''1 month -1 day'''), ('ttl', '''12 months -300 days'''), ('ttl', 'NULL'),
	('lease', '''30 s'''), ('lease', '''0'''), ('lease', '''-1 s'''), ('lease', '''1 month'''), ('lease', '''100000 days'''),
	('lease_max', '''30 s'''), ('lease_max', '''0'''), ('lease_max', '''1 month'''), ('lease_max', '''36500 days'''),
	('failed', '''terminal'''), ('failed', '''retryable'''), ('failed', '''x'''), ('failed', 'NULL'), ('failed', '''Retryable'''),
	('lapsed', '''reclaim'''), ('lapsed', '''unknown'''), ('lapsed', '''x'''), ('lapsed', 'NULL'),
	('expired', '''protect'''), ('expired', '''reclaim'''), ('expired', '''x'''), ('expired', 'NULL'),
	('key_time', '''any'''), ('key_time', '''x'''), ('key_time', 'NULL'), ('key_time', '''uuidv7'''),
	('result_max_bytes', '1'), ('result_max_bytes', '0'), ('result_max_bytes', '-1'), ('result_max_bytes', 'NULL'),
	('lease_max', '''106751991 days 24 h'''), ('lease_max', '''-106751991 days -24 h'''),
	('result_max_bytes', '267386880'), ('result_max_bytes', '267386881')) AS checks (c, v);
SELECT pg_temp.try(format('INSERT INTO idem_scopes (scope) VALUES (%L)', s)) AS scope
FROM unnest(ARRAY[repeat('s', 255), repeat('s', 256), repeat('é', 127), repeat('é', 128), NULL, '', '']) AS s;
TRUNCATE idem_scopes;
-- The error about a length of time says what is allowed.
INSERT INTO idem_scopes (scope, ttl) VALUES ('s', '1 month');
\echo :SQLSTATE
INSERT INTO idem_scopes (scope, lease) VALUES ('s', '1 year');
INSERT INTO idem_scopes (scope, ttl) VALUES ('s', '30 days');
UPDATE idem_scopes SET lease_max = '-1 s';
DELETE FROM idem_scopes;
INSERT INTO idem_scopes (scope) VALUES ('defaults');
SELECT ttl, lease, lease_max, failed, lapsed, expired, key_time, result_max_bytes FROM idem_scopes;
-- key_time = uuidv7 needs a ttl of its own.
INSERT INTO idem_scopes (scope, key_time, ttl) VALUES ('v7', 'uuidv7', '1 hour');
SELECT pg_temp.try($$UPDATE idem_scopes SET ttl = NULL WHERE scope = 'v7'$$);
\set VERBOSITY terse
INSERT INTO idem_scopes (scope, key_time) VALUES ('no ttl', 'uuidv7');
\set VERBOSITY default
TRUNCATE idem_scopes;

-- ----- ttl -----

-- expires_at is a whole second, at least the time of the claim plus the ttl, and not much more.
-- For each claim of the transaction:
CREATE VIEW pg_temp.promises AS
SELECT request_id, scope, expires_at = date_trunc('second', expires_at) AS whole_second,
	expires_at >= now() + coalesce(ttl, '1 day') AND
	expires_at < clock_timestamp() + coalesce(ttl, '1 day') + interval '1.2 s' AS as_promised
FROM idem_claims LEFT JOIN idem_scopes USING (scope)
ORDER BY request_id, scope;

BEGIN;
INSERT INTO idem_scopes (scope, ttl) VALUES ('day', '1 day'), ('second', '1 s'), ('microsecond', '1 microsecond'),
	('century', '36500 days'), ('of the setting', NULL);
SELECT idem_claim('u', 'ttl', s)
FROM unnest(ARRAY['', 'day', 'second', 'microsecond', 'century', 'of the setting', 'without a row']) AS s;
TABLE pg_temp.promises;
COMMIT;
-- A claim answers the stored expires_at.
SELECT outcome, expires_at = (SELECT expires_at FROM idem_lookup('u', 'ttl', 'day')) AS same
FROM idem_try_claim('u', 'ttl', 'day');

-- expires_at never moves back: not by a change of the ttl, not by settling, not by a retry.
TRUNCATE idem_claims;
UPDATE idem_scopes SET failed = 'retryable' WHERE scope = 'day';
BEGIN;
SELECT idem_claim('u', 'kept', 'day');
SELECT expires_at AS promised FROM idem_claims WHERE request_id = 'kept' \gset
UPDATE idem_scopes SET ttl = '1 s' WHERE scope = 'day';
SELECT idem_claim('u', 'another', 'day');
SELECT expires_at < clock_timestamp() + interval '2.2 s' AS by_the_new_ttl FROM idem_claims WHERE request_id = 'another';
SELECT idem_fail('u', 'kept', '"no"', scope => 'day');
SELECT expires_at = :'promised' AS kept FROM idem_claims WHERE request_id = 'kept';
COMMIT;
BEGIN;
SELECT idem_claim('u', 'kept', 'day'), idem_complete('"retried"');
COMMIT;
SELECT idem_claim('u', 'kept', 'day');
DELETE FROM idem_scopes WHERE scope = 'day';
SELECT idem_claim('u', 'kept', 'day');
SELECT expires_at = :'promised' AS kept, result FROM idem_claims WHERE request_id = 'kept';
-- Settling prolongs it to the time of settling plus the ttl.
BEGIN;
SELECT idem_claim('u', 'prolonged');
INSERT INTO idem_scopes (scope, ttl) VALUES ('', '7 days');
SELECT idem_complete('u', 'prolonged', NULL);
SELECT request_id, expires_at >= now() + interval '7 days' AS prolonged FROM idem_claims WHERE request_id = 'prolonged';
-- An identical repeat does not.
UPDATE idem_scopes SET ttl = '8 days' WHERE scope = '';
SELECT idem_complete('u', 'prolonged', NULL);
SELECT request_id, expires_at < now() + interval '8 days' AS not_again FROM idem_claims WHERE request_id = 'prolonged';
ROLLBACK;
-- A replay does not prolong it.
SELECT idem_claim('u', 'replayed', 'second');
SELECT expires_at AS promised FROM idem_claims WHERE request_id = 'replayed' \gset
UPDATE idem_scopes SET ttl = '1 day' WHERE scope = 'second';
SELECT idem_claim('u', 'replayed', 'second');
SELECT expires_at = :'promised' AS same FROM idem_claims WHERE request_id = 'replayed';

-- ----- a change acts from the next claim on -----

TRUNCATE idem_claims, idem_scopes;
BEGIN;
SELECT idem_claim('u', 'failed', 'change'), idem_fail('1');
COMMIT;
SELECT outcome FROM idem_try_claim('u', 'failed', 'change');
INSERT INTO idem_scopes (scope) VALUES ('change');
SELECT outcome FROM idem_try_claim('u', 'failed', 'change');
-- Also in the transaction that makes the change, until it is rolled back
BEGIN;
UPDATE idem_scopes SET failed = 'retryable';
SELECT outcome FROM idem_try_claim('u', 'failed', 'change');
ROLLBACK;
SELECT outcome FROM idem_try_claim('u', 'failed', 'change');
BEGIN;
SAVEPOINT s;
INSERT INTO idem_scopes (scope, failed) VALUES ('change', 'retryable') ON CONFLICT (scope) DO UPDATE SET failed = excluded.failed;
ROLLBACK TO s;
SELECT outcome FROM idem_try_claim('u', 'failed', 'change');
INSERT INTO idem_scopes (scope, failed) VALUES ('change', 'retryable') ON CONFLICT (scope) DO UPDATE SET failed = excluded.failed;
SELECT outcome FROM idem_try_claim('u', 'failed', 'change');
ROLLBACK;
UPDATE idem_scopes SET failed = 'retryable';
BEGIN;
SELECT outcome FROM idem_try_claim('u', 'failed', 'change');
ROLLBACK;
DELETE FROM idem_scopes;
SELECT outcome FROM idem_try_claim('u', 'failed', 'change');
COPY idem_scopes (scope, failed) FROM STDIN;
change	retryable
\.
BEGIN;
SELECT outcome FROM idem_try_claim('u', 'failed', 'change');
ROLLBACK;
TRUNCATE idem_scopes;
SELECT outcome FROM idem_try_claim('u', 'failed', 'change');
-- A change that a subscriber receives acts, too.
SET session_replication_role = replica;
INSERT INTO idem_scopes (scope, failed) VALUES ('change', 'retryable');
RESET session_replication_role;
SELECT outcome FROM idem_try_claim('u', 'failed', 'change');
-- The name of a scope is compared byte by byte.
SELECT idem_claim('u', 'failed', 'Change'), idem_fail('1');
SELECT outcome FROM idem_try_claim('u', 'failed', 'Change');

-- ----- expired -----

TRUNCATE idem_claims, idem_scopes;
INSERT INTO idem_scopes (scope, expired) VALUES ('protect', 'protect'), ('reclaim', 'reclaim');
BEGIN;
SELECT idem_claim('u', 'e', s, '\x01'), idem_complete('u', 'e', '"first"', scope => s) FROM unnest(ARRAY['protect', 'reclaim']) AS s;
SELECT idem_claim('u', 'f', s, '\x01'), idem_fail('u', 'f', '"failed"', scope => s) FROM unnest(ARRAY['protect', 'reclaim']) AS s;
COMMIT;
SELECT idem_claim('u', 'e', 'reclaim') AS not_expired;
UPDATE idem_claims SET expires_at = now() - interval '1 s';
-- protect: an expired row guards until it is removed. reclaim: it counts as absent, and its
-- fingerprint, result and failure do not matter.
SELECT outcome, result FROM idem_try_claim('u', 'e', 'protect', '\x01');
SELECT outcome FROM idem_try_claim('u', 'e', 'protect', '\x02');
SELECT outcome, result FROM idem_try_claim('u', 'f', 'protect', '\x01');
SELECT idem_status('u', 'e', 'protect'), idem_result('u', 'e', 'protect');
SELECT idem_status('u', 'e', 'reclaim'), idem_result('u', 'e', 'reclaim');
SELECT state, result AS still_there FROM idem_lookup('u', 'e', 'reclaim');
BEGIN;
SELECT outcome, result, expires_at > clock_timestamp() + interval '59 min' AS remembered
FROM idem_try_claim('u', 'e', 'reclaim', '\x02');
SELECT outcome, result FROM idem_try_claim('u', 'e', 'reclaim', '\x02') AS second;
SELECT idem_result() AS not_the_old_one, idem_complete('"second"');
SELECT outcome, result FROM idem_try_claim('u', 'f', 'reclaim');
ROLLBACK;
SELECT state, result, fingerprint FROM idem_lookup('u', 'e', 'reclaim');
BEGIN;
SELECT outcome FROM idem_try_claim('u', 'e', 'reclaim', '\x02');
SELECT idem_complete('"second"');
COMMIT;
SELECT outcome, result FROM idem_try_claim('u', 'e', 'reclaim', '\x02');
SELECT outcome FROM idem_try_claim('u', 'e', 'reclaim', '\x01');
SELECT idem_claim('u', 'f', 'reclaim');
SELECT request_id, scope, state, result, fingerprint, expires_at > now() AS remembered FROM idem_claims ORDER BY 1, 2;
-- For its own transaction a claim never expires.
INSERT INTO idem_scopes (scope, expired, ttl) VALUES ('at once', 'reclaim', '1 microsecond');
BEGIN;
SELECT idem_claim('u', 'own', 'at once');
UPDATE idem_claims SET expires_at = now() - interval '1 s' WHERE request_id = 'own';
SELECT idem_claim('u', 'own', 'at once');
SELECT idem_complete('"held"');
COMMIT;
SELECT result FROM idem_claims WHERE request_id = 'own';

-- ----- key_time = uuidv7 -----

-- A version 7 UUID with this time
CREATE FUNCTION pg_temp.uuid_of(t timestamptz, n int DEFAULT 0) RETURNS text LANGUAGE sql AS $$
	SELECT substr(h, 1, 8) || '-' || substr(h, 9, 4) || '-7000-8000-' || lpad(to_hex(n), 12, '0')
	FROM lpad(to_hex(floor(extract(epoch FROM t) * 1000)::bigint), 12, '0') AS h
$$;
TRUNCATE idem_claims, idem_scopes;
INSERT INTO idem_scopes (scope, ttl, key_time) VALUES ('v7', '1 hour', 'uuidv7');
-- As if the policy had always existed: guarded_since can only be set by a replica.
SET session_replication_role = replica;
UPDATE idem_scopes SET guarded_since = '-infinity';
RESET session_replication_role;

SELECT outcome FROM idem_try_claim('u', pg_temp.uuid_of(now()), 'v7');
SELECT outcome FROM idem_try_claim('u', pg_temp.uuid_of(now() - interval '50 min'), 'v7');
SELECT outcome, expires_at FROM idem_try_claim('u', pg_temp.uuid_of(now() - interval '1 hour'), 'v7');
SELECT outcome FROM idem_try_claim('u', pg_temp.uuid_of('1970-01-01 UTC'), 'v7');
SELECT idem_claim('u', pg_temp.uuid_of('2020-01-01 UTC'), 'v7');
\echo :SQLSTATE
-- Other scopes ignore the time of a key.
SELECT idem_claim('u', pg_temp.uuid_of('2020-01-01 UTC'));
-- A key can be ahead of the server's clock by a minute, since clocks differ. A key that is
-- ahead by more is refused.
BEGIN;
SELECT pg_temp.uuid_of(clock_timestamp() + interval '55 s') AS ahead \gset
SELECT outcome, expires_at >= now() + interval '55 s' + interval '1 hour' AS from_the_keys_own_time
FROM idem_try_claim('u', :'ahead', 'v7');
SELECT idem_complete('"ahead"');
SELECT result, expires_at >= now() + interval '55 s' + interval '1 hour' AS from_the_keys_own_time
FROM idem_claims WHERE request_id = :'ahead';
ROLLBACK;
\set VERBOSITY terse
SELECT idem_claim('u', pg_temp.uuid_of(now() + interval '5 min'), 'v7');
\echo :SQLSTATE
SELECT idem_claim('u', 'ffffffff-ffff-7fff-bfff-ffffffffffff', 'v7');
\echo :SQLSTATE
\set VERBOSITY default
-- Only the canonical spelling in lower case is allowed: another spelling would be another key.
DO $$
DECLARE
	good text := '01234567-89ab-7def-8123-456789abcdef';
	bad text;
BEGIN
	FOREACH bad IN ARRAY ARRAY[upper(good), '{' || good || '}', replace(good, '-', ''), good || '0', left(good, 35),
		overlay(good PLACING '4' FROM 15), overlay(good PLACING '0' FROM 20), overlay(good PLACING 'c' FROM 20),
		overlay(good PLACING 'g' FROM 36), overlay(good PLACING '0' FROM 9), overlay(good PLACING '-' FROM 1),
		overlay(good PLACING ' ' FROM 13), repeat('-', 36), 'x', repeat('é', 18)]
	LOOP
		BEGIN
			PERFORM idem_claim('u', bad, 'v7');
			RAISE WARNING '% is taken', bad;
		EXCEPTION WHEN SQLSTATE 'ID400' THEN
		END;
	END LOOP;
	FOREACH bad IN ARRAY ARRAY[good, overlay(good PLACING '9' FROM 20), overlay(good PLACING 'a' FROM 20), overlay(good PLACING 'b' FROM 20)]
	LOOP
		RAISE NOTICE '% %', bad, (SELECT outcome FROM idem_try_claim('u', bad, 'v7'));
	END LOOP;
END $$;
SELECT idem_claim('u', '0193A1F2-7d43-7c5e-9a10-5f7c2e1b8a01', 'v7');
\echo :SQLSTATE

-- A row that is still stored answers, however old its key is.
UPDATE idem_claims SET request_id = pg_temp.uuid_of('2020-02-02 UTC'), expires_at = '2020-02-03', result = '"old"'
WHERE request_id = (SELECT request_id FROM idem_claims WHERE scope = 'v7' LIMIT 1);
SELECT outcome, result FROM idem_try_claim('u', pg_temp.uuid_of('2020-02-02 UTC'), 'v7');
-- Under expired = reclaim the row counts as absent, and the time of the key decides.
UPDATE idem_scopes SET expired = 'reclaim';
SELECT outcome, result, expires_at FROM idem_try_claim('u', pg_temp.uuid_of('2020-02-02 UTC'), 'v7');
BEGIN;
SELECT pg_temp.uuid_of(now(), 7) AS fresh \gset
SELECT idem_claim('u', :'fresh', 'v7');
COMMIT;
UPDATE idem_claims SET expires_at = '2020-02-03' WHERE request_id = :'fresh';
SELECT outcome FROM idem_try_claim('u', :'fresh', 'v7');

-- ----- guarded_since -----

-- A row with uuidv7 does not know what was claimed before it existed: older keys are stale.
-- Keys can be up to a minute ahead of the clock, so the guard lies a minute ahead, too.
TRUNCATE idem_claims, idem_scopes;
BEGIN;
INSERT INTO idem_scopes (scope, ttl, key_time) VALUES ('v7', '1 day', 'uuidv7');
SELECT guarded_since BETWEEN now() + interval '1 min' AND clock_timestamp() + interval '1 min' AS moved FROM idem_scopes;
-- The change makes claims wait until it commits, so that no claim uses the old policy. It does
-- not lock idem_claims, and leaves lock_timeout as it was.
SELECT relation::regclass, mode FROM pg_locks
WHERE relation IN ('idem_claims'::regclass, 'idem_scopes'::regclass) AND pid = pg_backend_pid() AND mode ~ 'Exclusive'
ORDER BY mode;
SHOW lock_timeout;
COMMIT;
SELECT outcome FROM idem_try_claim('u', pg_temp.uuid_of(now()), 'v7');
SELECT outcome FROM idem_try_claim('u', pg_temp.uuid_of(clock_timestamp() + interval '50 s'), 'v7');
-- A request whose row is stored is known, also if it is older than the guard.
SELECT pg_temp.uuid_of(now() - interval '2 min') AS before \gset
INSERT INTO idem_claims (expires_at, state, request_id, user_id, scope, result)
	VALUES (now() + interval '1 min', 'completed', :'before', 'u', 'v7', '"known"');
SELECT outcome, result FROM idem_try_claim('u', :'before', 'v7');
\set VERBOSITY terse
SELECT idem_claim('u', pg_temp.uuid_of(now() - interval '3 min'), 'v7');
\echo :SQLSTATE
\set VERBOSITY default

-- As if the guard had been set some minutes ago: only a replica can do that.
SET session_replication_role = replica;
UPDATE idem_scopes SET guarded_since = clock_timestamp() - interval '5 min';
RESET session_replication_role;
SELECT outcome FROM idem_try_claim('u', pg_temp.uuid_of(now() - interval '6 min'), 'v7');
BEGIN;
SELECT outcome FROM idem_try_claim('u', pg_temp.uuid_of(now() - interval '4 min'), 'v7');
ROLLBACK;

-- Three changes move guarded_since: a longer ttl, a change to uuidv7, and another scope's name.
-- No other change moves it, and it cannot be set.
CREATE VIEW pg_temp.moves AS
SELECT scope, key_time, CASE WHEN guarded_since > now() THEN 'moved' WHEN guarded_since = '2020-01-01 UTC' THEN 'kept' END AS guarded_since
FROM idem_scopes ORDER BY scope;
CREATE FUNCTION pg_temp.change(change text, OUT scope text, OUT key_time text, OUT guarded_since text) LANGUAGE plpgsql AS $$
BEGIN
	TRUNCATE idem_scopes;
	SET LOCAL session_replication_role = replica;
	INSERT INTO idem_scopes (scope, ttl, key_time, guarded_since) VALUES ('s', '1 day', 'uuidv7', '2020-01-01 UTC');
	SET LOCAL session_replication_role = origin;
	EXECUTE 'UPDATE idem_scopes SET ' || change;
	SELECT * INTO STRICT scope, key_time, guarded_since FROM pg_temp.moves;
END $$;
SELECT change, (pg_temp.change(change)).*
FROM unnest(ARRAY['ttl = ''1 day 1 microsecond''', 'ttl = ''24 hours''', 'ttl = ''1 microsecond''', 'ttl = ''23 hours''',
	'key_time = ''any''', 'scope = ''t''', 'scope = ''s''', 'guarded_since = ''2021-01-01''', 'guarded_since = NULL',
	'result_max_bytes = 8, failed = ''retryable'', expired = ''reclaim'', lapsed = ''unknown'', lease = ''1 s'', lease_max = ''1 s''']) AS change;
BEGIN;
UPDATE idem_scopes SET key_time = 'any', ttl = '1 day';
TABLE pg_temp.moves;
UPDATE idem_scopes SET key_time = 'uuidv7';
TABLE pg_temp.moves;
-- Under key_time = any there is no guard, and a change takes no lock.
UPDATE idem_scopes SET key_time = 'any';
DELETE FROM idem_scopes;
COMMIT;
BEGIN;
INSERT INTO idem_scopes (scope, ttl, guarded_since) VALUES ('any', '1 day', '2020-01-01 UTC');
UPDATE idem_scopes SET ttl = '2 days', guarded_since = '2020-01-01 UTC';
TABLE pg_temp.moves;
DELETE FROM idem_scopes;
SELECT mode FROM pg_locks WHERE relation = 'idem_scopes'::regclass AND pid = pg_backend_pid() AND mode = 'ExclusiveLock';
ROLLBACK;

-- The guarded_since of an inserted row is ignored: after a dump was restored the scope does not
-- know what was claimed since the dump, and an ORM can write the whole row.
INSERT INTO idem_scopes (scope, ttl, key_time, guarded_since) VALUES ('restored', '1 day', 'uuidv7', '2020-01-01 UTC');
COPY idem_scopes (scope, ttl, key_time, guarded_since) FROM STDIN;
copied	1 day	uuidv7	2020-01-01 00:00:00+00
\.
CREATE TEMPORARY TABLE parked AS SELECT * FROM idem_scopes WHERE scope = 'copied';
UPDATE parked SET guarded_since = '2020-01-01 UTC';
DELETE FROM idem_scopes WHERE scope = 'copied';
INSERT INTO idem_scopes TABLE parked;
INSERT INTO idem_scopes (scope, ttl, key_time, guarded_since) VALUES ('restored', '2 days', 'uuidv7', '2020-01-01 UTC')
ON CONFLICT (scope) DO UPDATE SET (ttl, key_time, guarded_since) = (excluded.ttl, excluded.key_time, '2020-01-01 UTC');
TABLE pg_temp.moves;
DROP TABLE parked;
-- A replicated row keeps the guarded_since of the publisher.
TRUNCATE idem_scopes;
SET session_replication_role = replica;
INSERT INTO idem_scopes (scope, ttl, key_time, guarded_since) VALUES ('replicated', '1 day', 'uuidv7', '2020-01-01 UTC');
UPDATE idem_scopes SET ttl = '2 days';
TABLE pg_temp.moves;
RESET session_replication_role;
-- The table can be truncated under every isolation level.
BEGIN ISOLATION LEVEL REPEATABLE READ;
TRUNCATE idem_scopes;
COMMIT;

-- ----- lease_max -----

INSERT INTO idem_scopes (scope, lease, lease_max) VALUES ('short', '1 hour', '1 min'), ('long', NULL, '36500 days');
SELECT outcome FROM idem_lease('u', 'lease', lease => '24 hours');
SELECT outcome FROM idem_lease('u', 'lease too long', lease => '24 hours 1 microsecond');
\echo :SQLSTATE
SELECT idem_status('u', 'lease too long');
SELECT outcome FROM idem_lease('u', 'lease', scope => 'long', lease => '36500 days');
SELECT outcome FROM idem_lease('u', 'lease', scope => 'short', lease => '2 min');
SELECT outcome, token FROM idem_lease('u', 'lease', scope => 'short', lease => '1 min') \gset
SELECT idem_extend('u', 'lease', :token, '1 min 0.1 s', scope => 'short');
\echo :SQLSTATE
-- lease_max does not limit the default length that the operator gave the scope.
SELECT idem_extend('u', 'lease', :token, scope => 'short') > now() + interval '59 min' AS by_the_scope;
-- The length is checked before the row is read: a replay gets the error, too.
SELECT outcome FROM idem_lease('u', 'lease', scope => 'short', lease => '2 min');

-- ----- more scopes than a session keeps in memory -----

TRUNCATE idem_claims, idem_scopes;
INSERT INTO idem_scopes (scope, ttl) SELECT 's' || i, make_interval(days => 1 + i % 30) FROM generate_series(1, 1100) AS i;
SELECT count(*) FROM generate_series(1, 1100) AS i WHERE idem_claim('u', 'first', 's' || i);
SELECT count(*) FROM generate_series(1, 1100) AS i WHERE idem_claim('u', 'second', 's' || i);
SELECT round(extract(epoch FROM expires_at - now()) / 86400) = 1 + substr(scope, 2)::int % 30 AS by_the_scope, count(*)
FROM idem_claims GROUP BY 1;

TRUNCATE idem_claims, idem_scopes;
