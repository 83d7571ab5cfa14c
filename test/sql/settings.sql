-- The settings: defaults, bounds, and which roles can change them. For the C edition.

LOAD 'idem';
SELECT name, boot_val, unit, vartype, context, min_val, max_val FROM pg_settings WHERE name LIKE 'idem.%' ORDER BY name COLLATE "C";

-- Units
SET idem.ttl = '2d';
SHOW idem.ttl;
SET idem.wait = '1.5 s';
SHOW idem.wait;
SET idem.wait = -1;
SHOW idem.wait;
SET idem.result_max_bytes = '10kB';
SHOW idem.result_max_bytes;

-- Out of range or not numbers; the messages differ between versions
\set VERBOSITY sqlstate
SET idem.ttl = 0;
SET idem.ttl = -1;
SET idem.ttl = '1 month';
SET idem.ttl = 'forever';
SET idem.ttl = 2147483648;
SET idem.wait = -2;
SET idem.wait = '1 month';
SET idem.wait = '30d';
SET idem.result_max_bytes = 0;
SET idem.result_max_bytes = '256MB';
SET idem.result_max_bytes = '1 s';
-- These can be set in postgresql.conf only.
SET idem.cleanup_interval = '1 s';
SET idem.cleanup_batch_size = 10;
SET idem.cleanup_databases = 'postgres';
-- The library reserves the prefix: no other setting idem.* can be made.
SET idem.tll = '1 hour';
SET idem.no_such_setting = 1;
\set VERBOSITY default
SHOW idem.ttl;
SHOW idem.wait;
SHOW idem.result_max_bytes;
RESET ALL;

-- Only an operator sets idem.ttl: an application must not shorten it. An application sets
-- idem.wait itself.
CREATE ROLE regress_idem_app;
SET ROLE regress_idem_app;
SET idem.ttl = '1 s';
SET idem.ttl = '30d';
RESET idem.ttl;
SET idem.result_max_bytes = '100MB';
SELECT set_config('idem.ttl', '1s', false);
CREATE FUNCTION pg_temp.with_ttl() RETURNS text LANGUAGE sql SET idem.ttl = '1s' AS 'SELECT 1::text';
ALTER ROLE regress_idem_app SET idem.ttl = '1s';
SET idem.lease_max = '2d';
SET idem.wait = '0';
SHOW idem.wait;
CREATE FUNCTION pg_temp.with_wait() RETURNS text LANGUAGE sql SET idem.wait = '7s' AS $$SELECT current_setting('idem.wait')$$;
SELECT pg_temp.with_wait(), current_setting('idem.wait') AS outside;
RESET ROLE;
SHOW idem.ttl;
DROP FUNCTION pg_temp.with_wait();
DROP ROLE regress_idem_app;
RESET idem.wait;

-- A change acts from the next call on.
BEGIN;
SELECT idem_claim('u', 'before');
SET LOCAL idem.ttl = '2d';
SELECT idem_claim('u', 'after');
SELECT request_id, expires_at > clock_timestamp() + interval '47 hours' AS two_days FROM idem_claims ORDER BY 1;
COMMIT;
SHOW idem.ttl;
INSERT INTO idem_scopes (scope, ttl) VALUES ('day', '1 day');
SET idem.ttl = '10min';
BEGIN;
SELECT idem_claim('u', 'ttl set', ''), idem_claim('u', 'ttl set', 'day');
SELECT scope, expires_at >= now() + interval '10 min' AND expires_at < clock_timestamp() + interval '10 min 1 s' AS by_the_setting
FROM idem_claims WHERE request_id = 'ttl set' ORDER BY scope;
COMMIT;
RESET idem.ttl;
SET idem.result_max_bytes = 100;
BEGIN;
SELECT idem_claim('u', 'cap');
SAVEPOINT s;
SELECT idem_complete(to_jsonb(repeat('x', 93)));
ROLLBACK TO s;
SELECT idem_complete(to_jsonb(repeat('x', 92)));
COMMIT;
RESET idem.result_max_bytes;
SELECT outcome FROM idem_lease('u', 'lease_max', lease => '25 h');
SET idem.lease_max = '25h';
SELECT outcome FROM idem_lease('u', 'lease_max', lease => '25 h');
RESET idem.lease_max;

TRUNCATE idem_claims, idem_scopes;
