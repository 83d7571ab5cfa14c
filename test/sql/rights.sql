-- Rights: PUBLIC has none, which ones idem_grant() gives, and that objects of the same names in
-- other schemas are not used.

\set SHOW_CONTEXT never
CREATE ROLE regress_idem_nobody;
CREATE ROLE regress_idem_app;
CREATE ROLE regress_idem_operator;
CREATE ROLE "regress idem; ""odd""";

-- ----- PUBLIC has no rights -----

SELECT count(*) > 15 AS has_functions, bool_or(has_function_privilege('regress_idem_nobody', objid, 'EXECUTE')) AS executable
FROM pg_depend JOIN pg_extension e ON refobjid = e.oid
WHERE extname ~ '^idem' AND classid = 'pg_proc'::regclass AND deptype = 'e';
SELECT relname, p FROM pg_depend JOIN pg_extension e ON refobjid = e.oid JOIN pg_class c ON c.oid = objid,
	unnest(ARRAY['SELECT', 'INSERT', 'UPDATE', 'DELETE', 'TRUNCATE', 'REFERENCES', 'TRIGGER']) AS p
WHERE extname ~ '^idem' AND classid = 'pg_class'::regclass AND relkind <> 'S' AND has_table_privilege('regress_idem_nobody', objid, p);
SELECT p FROM unnest(ARRAY['SELECT', 'UPDATE', 'USAGE']) AS p
WHERE has_sequence_privilege('regress_idem_nobody', 'idem_token_seq', p);
SELECT t FROM unnest(ARRAY['idem_state', 'idem_outcome']) AS t WHERE has_type_privilege('regress_idem_nobody', t, 'USAGE');
SET ROLE regress_idem_nobody;
SELECT idem_claim('u', 'r');
SELECT * FROM idem_try_claim('u', 'r');
SELECT idem_status('u', 'r');
SELECT idem_cleanup();
CALL idem_cleanup_all();
SELECT idem_grant('regress_idem_nobody', 'app');
SELECT * FROM idem_claims;
SELECT * FROM idem_scopes;
SELECT * FROM idem_stat_cleanup;
RESET ROLE;
SELECT has_table_privilege('pg_monitor', 'idem_stat_cleanup', 'SELECT');

-- ----- idem_grant() -----

SELECT idem_grant('regress_idem_app', 'admin');
SELECT idem_grant('regress_idem_app', NULL);
SELECT idem_grant(NULL, 'app');
SELECT idem_grant('regress_idem_missing', 'app');
SELECT idem_grant('regress_idem_app', 'app');
SELECT idem_grant('regress_idem_app', 'app') AS again;
SELECT idem_grant('-', 'app');
\echo :SQLSTATE
SELECT idem_grant(4294967295::oid, 'app');
SELECT idem_grant('regress_idem_operator', 'operator');
SELECT idem_grant('"regress idem; ""odd"""', 'app');
SELECT p.oid::regprocedure AS routine, has_function_privilege('regress_idem_app', objid, 'EXECUTE') AS app,
	has_function_privilege('regress_idem_operator', objid, 'EXECUTE') AS operator
FROM pg_depend d JOIN pg_extension e ON refobjid = e.oid JOIN pg_proc p ON p.oid = objid
WHERE extname ~ '^idem' AND classid = 'pg_proc'::regclass AND d.deptype = 'e'
	AND proname ~ '^idem_[a-z]' AND proname !~ '_stat_|_scopes_|_rights|_promise|_distribute|_unsettled_|_held_|_start_worker|_call_'
	AND coalesce(array_to_string(proargnames[:2], ' '), '') !~ 'user_uuid|user_number|request_uuid'
ORDER BY p.proname COLLATE "C", p.pronargs;
SELECT r, relname, string_agg(p, ', ' ORDER BY p COLLATE "C") FROM pg_class c,
	unnest(ARRAY['pg_monitor', 'regress_idem_app', 'regress_idem_operator']) AS r,
	unnest(ARRAY['SELECT', 'INSERT', 'UPDATE', 'DELETE', 'TRUNCATE', 'REFERENCES', 'TRIGGER']) AS p
WHERE relname IN ('idem_claims', 'idem_scopes', 'idem_stat_cleanup', 'idem_unsettled', 'idem_holders') AND has_table_privilege(r, c.oid, p)
GROUP BY r, relname ORDER BY r COLLATE "C", relname COLLATE "C";
-- The operator can write all columns but guarded_since, which a trigger sets.
SELECT attname FROM pg_attribute
WHERE attrelid = 'idem_scopes'::regclass AND attnum > 0
	AND NOT (has_column_privilege('regress_idem_operator', attrelid, attnum, 'INSERT')
		AND has_column_privilege('regress_idem_operator', attrelid, attnum, 'UPDATE'))
ORDER BY attnum;

-- An application needs no rights on the tables, and has none.
SET ROLE regress_idem_app;
INSERT INTO idem_claims (expires_at, state, request_id, user_id, scope) VALUES (now(), 'completed', 'r', 'u', '');
SELECT count(*) FROM idem_claims;
DELETE FROM idem_scopes;
BEGIN;
SELECT idem_claim('u', 'r', fingerprint => idem_fingerprint('1'));
SELECT idem_complete('"done"');
SELECT outcome, result FROM idem_try_claim('u', 'r');
SELECT idem_result(), idem_outcome(), idem_result('u', 'r'), idem_status('u', 'r');
COMMIT;
SELECT state, result FROM idem_lookup('u', 'r');
SELECT idem_forget('u', 'r');
SELECT idem_cleanup();
SELECT idem_grant('regress_idem_nobody', 'app');

-- An operator sets the policy, cleans and forgets, but does not claim.
SET ROLE regress_idem_operator;
INSERT INTO idem_scopes (scope, ttl, failed) VALUES ('s', '1 day', 'retryable');
UPDATE idem_scopes SET ttl = '2 days';
SELECT scope, ttl, failed FROM idem_scopes;
DELETE FROM idem_scopes;
SELECT request_id, state FROM idem_claims;
DELETE FROM idem_claims;
SELECT idem_claim('u', 'r2');
SELECT idem_result('u', 'r'), idem_status('u', 'r');
SELECT idem_forget('u', 'r');
SELECT idem_cleanup();
CALL idem_cleanup_all();
TRUNCATE idem_scopes;
RESET ROLE;

SET ROLE "regress idem; ""odd""";
SELECT idem_claim('u', 'odd');
RESET ROLE;

-- A SECURITY DEFINER function of a role that may claim claims for every role.
CREATE FUNCTION claim_for_all(text) RETURNS bool LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, public, pg_temp
AS $$ SELECT idem_claim('definer', $1) $$;
SET ROLE regress_idem_nobody;
SELECT claim_for_all('r'), claim_for_all('r');
RESET ROLE;
DROP FUNCTION claim_for_all;

-- row_security of the caller and column rights do not matter.
SET ROLE regress_idem_app;
SET row_security = off;
SELECT idem_claim('u', 'row_security off');
RESET row_security;
RESET ROLE;

-- ----- objects of the same names -----

TRUNCATE idem_claims;
INSERT INTO idem_scopes (scope, ttl) VALUES ('', '1 hour');
CREATE SCHEMA regress_idem_hostile AUTHORIZATION regress_idem_app;
SET ROLE regress_idem_app;
CREATE TABLE regress_idem_hostile.idem_claims (expires_at timestamptz, request_id text PRIMARY KEY, user_id text, scope text);
CREATE TABLE regress_idem_hostile.idem_scopes (scope text PRIMARY KEY, ttl interval);
CREATE TYPE regress_idem_hostile.idem_state AS ENUM ('failed');
CREATE TYPE regress_idem_hostile.idem_outcome AS ENUM ('failed');
CREATE TYPE regress_idem_hostile.text AS ENUM ('u', 'r');
CREATE TABLE regress_idem_hostile.pg_extension (extname name, extversion text, extnamespace oid);
CREATE TEMPORARY TABLE idem_claims (request_id text);
CREATE TEMPORARY TABLE idem_scopes (scope text, ttl interval);
INSERT INTO pg_temp.idem_scopes VALUES ('', '1 s');
CREATE FUNCTION regress_idem_hostile.hostile(pg_catalog.text, pg_catalog.text) RETURNS bool
	LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'hostile operator'; END $$;
CREATE OPERATOR regress_idem_hostile.= (FUNCTION = regress_idem_hostile.hostile, LEFTARG = pg_catalog.text, RIGHTARG = pg_catalog.text);
CREATE OPERATOR regress_idem_hostile.<> (FUNCTION = regress_idem_hostile.hostile, LEFTARG = pg_catalog.text, RIGHTARG = pg_catalog.text);
SET search_path = regress_idem_hostile, pg_temp, pg_catalog, public;
BEGIN;
SELECT idem_claim('u', 'hostile', '', '\x01'), idem_complete('1');
SELECT outcome FROM public.idem_try_claim('u', 'hostile', '', '\x02');
SELECT idem_status('u', 'hostile'), (SELECT count(*) FROM idem_lookup('u', 'hostile'));
COMMIT;
SELECT count(*) AS in_the_hostile_table FROM regress_idem_hostile.idem_claims;
SELECT count(*) AS in_the_temporary_table FROM pg_temp.idem_claims;
RESET ROLE;
SELECT request_id, state, expires_at > clock_timestamp() + interval '50 min' AS by_the_real_scope FROM public.idem_claims;
-- A superuser's calls do not use operators that another role has created.
SELECT idem_grant('regress_idem_app', 'operator');
UPDATE public.idem_scopes SET failed = 'retryable';
UPDATE public.idem_claims SET expires_at = now() - interval '1 s';
CALL idem_cleanup_all();
SELECT count(*) FROM public.idem_claims;
RESET search_path;
SET ROLE regress_idem_app;
DROP TABLE pg_temp.idem_claims, pg_temp.idem_scopes;
RESET ROLE;
SET client_min_messages = warning;
DROP SCHEMA regress_idem_hostile CASCADE;
RESET client_min_messages;

TRUNCATE idem_claims, idem_scopes;
DROP OWNED BY regress_idem_app, regress_idem_operator, "regress idem; ""odd""";
DROP ROLE regress_idem_nobody, regress_idem_app, regress_idem_operator, "regress idem; ""odd""";
