-- Ids that are uuid or bigint: which function a call means, and that nothing else differs.
\set SHOW_CONTEXT never

-- Each function that takes a user and a request as text has five others, which are declared
-- alike but for the two ids. Their names differ, for clients that find a function by the names
-- of its arguments (PostgREST).
CREATE VIEW pg_temp.overloads AS
SELECT p.oid, p.proname, p.proargtypes[0]::regtype AS user_type, p.proargtypes[1]::regtype AS request_type,
	p.proargnames[1] || ', ' || p.proargnames[2] AS names, p.pronargs,
	ROW (p.proargnames[3:], (p.proargtypes::oid[])[2:], p.proallargtypes[3:], p.proargmodes, p.pronargdefaults,
		regexp_replace(pg_get_function_arguments(p.oid), '^[^,]*, [^,]*', ''), pg_get_function_result(p.oid),
		p.provolatile, p.proparallel, p.procost, p.prorows, p.proisstrict)::text AS rest
FROM pg_proc p
WHERE p.pronamespace = (SELECT relnamespace FROM pg_class WHERE oid = 'idem_claims'::regclass)
	AND p.proname ~ '^idem_[^_]' AND p.prokind = 'f' AND p.proargnames[1] ~ '^user_(id|uuid|number)$';
SELECT user_type, request_type, min(names) AS names, count(*) = (SELECT count(DISTINCT proname) FROM pg_temp.overloads) AS of_each, count(*) > 10 AS many
FROM pg_temp.overloads GROUP BY 1, 2 ORDER BY min(names) COLLATE "C", 1, 2;
SELECT proname FROM pg_temp.overloads GROUP BY 1 HAVING count(DISTINCT rest) <> 1 OR count(DISTINCT names) <> 6;
SELECT p.prosecdef, p.proconfig, obj_description(p.oid, 'pg_proc') ^@ 'claims' AS is_told FROM pg_temp.overloads o JOIN pg_proc p USING (oid)
WHERE o.proname = 'idem_claim' AND o.user_type::text || o.request_type <> 'texttext';

-- The planner puts the function for text in the place of the other one.
-- Without the query's number, which it has where pg_stat_statements is loaded
SET compute_query_id = off;
EXPLAIN (VERBOSE, COSTS OFF) SELECT idem_claim(1, '0193a1f2-7d43-7c5e-9a10-5f7c2e1b8a01'::uuid, wait => '0') AS claimed;
EXPLAIN (VERBOSE, COSTS OFF) SELECT idem_complete(1::bigint, 'r', '{}'), idem_status('0193a1f2-7d43-7c5e-9a10-5f7c2e1b8a01'::uuid, 'r');

-- Literals, NULLs and parameters without a type mean text.
CREATE FUNCTION pg_temp.types(call text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
	types text;
BEGIN
	EXECUTE 'PREPARE called AS SELECT ' || call;
	SELECT array_to_string(parameter_types, ', ') INTO types FROM pg_prepared_statements WHERE name = 'called';
	DEALLOCATE called;
	RETURN types;
EXCEPTION WHEN ambiguous_function OR undefined_function THEN
	RETURN SQLSTATE;
END $$;
SELECT call, pg_temp.types(call) FROM unnest(ARRAY[
	'idem_claim($1, $2)', 'idem_claim($1, $2, $3, $4, $5)', 'idem_claim(user_id => $1, request_id => $2)',
	'idem_claim(''u'', $1)', 'idem_claim(NULL, $1)', 'idem_claim($1, NULL)', 'idem_claim($1::int, $2)', 'idem_claim($1::smallint, $2)',
	'idem_claim($1::uuid, $2)', 'idem_claim($1, $2::uuid)', 'idem_claim($1::varchar, $2::varchar)', 'idem_claim($1::varchar, $2::uuid)',
	'idem_claim($1::bigint, $2::varchar)', 'idem_claim(user_number => $1, request_uuid => $2)', 'idem_claim($1, request_uuid => $2)',
	'idem_complete($1)', 'idem_complete($1, $2, $3)', 'idem_complete($1::int, $2, $3, scope => $4)', 'idem_result($1, $2)',
	-- There is none for these: their text has more than one spelling, or they are no ids.
	'idem_claim($1::numeric, $2)', 'idem_claim($1, $2::int)', 'idem_claim($1::date, $2)', 'idem_claim(user_id => $1::int, request_id => $2)']) AS t (call);
SELECT idem_claim(NULL, NULL);
SELECT idem_claim(1, NULL);
SELECT idem_claim(NULL::bigint, 'r');
SELECT idem_claim(1, NULL::uuid);
SELECT idem_claim(1, '');

-- One spelling
BEGIN;
SELECT idem_claim(7, '0193A1F2-7D43-7C5E-9A10-5F7C2E1B8A01'::uuid) AS claimed;
SELECT idem_claim('7', '0193a1f2-7d43-7c5e-9a10-5f7c2e1b8a01') AS again;
SELECT idem_claim(007::smallint, '{0193a1f27d437c5e9a105f7c2e1b8a01}'::uuid) AS and_again;
SELECT idem_claim('{A0EEBC99-9C0B-4EF8-BB6D-6BB9BD380A11}'::uuid, 'r') AS claimed;
SELECT idem_claim('a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11', 'r') AS again;
SELECT idem_claim(-9223372036854775808, 'r') AS claimed;
SELECT user_id, request_id, scope FROM idem_claims WHERE user_id IN ('7', '-9223372036854775808', 'a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11') ORDER BY user_id;
ROLLBACK;

-- Prepared
PREPARE claim (bigint, uuid, text) AS SELECT idem_claim($1, $2, scope => $3);
EXECUTE claim (1, '0193a1f2-7d43-7c5e-9a10-5f7c2e1b8a01', 's');
EXECUTE claim (1, '0193a1f2-7d43-7c5e-9a10-5f7c2e1b8a01', 's');
EXECUTE claim (1, '0193a1f2-7d43-7c5e-9a10-5f7c2e1b8a01', '');
DEALLOCATE claim;

-- All of them
SELECT outcome, token > 0 AS has_token FROM idem_lease(1, 'lease', lease => '1 min');
SELECT token FROM idem_claims WHERE request_id = 'lease' \gset
SELECT outcome, result, progress FROM idem_try_claim(1, 'lease', wait => '0');
SELECT idem_extend(1, 'lease', :token, progress => '[1]') > now() AS extended;
SELECT idem_fence(1, 'lease', :token);
SELECT idem_fence(1, 'lease', :token + 1);
SELECT idem_status(1, 'lease');
SELECT idem_complete(1, 'lease', '"done"', :token), idem_complete(1, 'lease', '"done"', :token);
SELECT state, result, progress FROM idem_lookup(1, 'lease');
SELECT idem_result(1, 'lease'), idem_heal(1, 'lease', '1');
SELECT idem_forget(1, 'lease'), idem_forget(1, 'lease');
SELECT token FROM idem_lease(1, 'lease', lease => '1 min') \gset
SELECT idem_release(1, 'lease', :token), idem_release(1, 'lease', :token);
BEGIN;
SELECT idem_claim(1, 'fails'), idem_fail(1, 'fails', '"no"'), idem_status(1, 'fails');
COMMIT;

-- In a function, with columns
CREATE TABLE pg_temp.payments (account int, request uuid);
CREATE FUNCTION pg_temp.pay(account int, request uuid) RETURNS bool LANGUAGE plpgsql AS $$
BEGIN
	IF idem_claim(account, request) THEN
		INSERT INTO pg_temp.payments VALUES (account, request);
		RETURN idem_complete(account, request, to_jsonb(account));
	END IF;
	RETURN false;
END $$;
SELECT pg_temp.pay(5, '0193a1f2-7d43-7c5e-9a10-5f7c2e1b8a01'), pg_temp.pay(5, '0193a1f2-7d43-7c5e-9a10-5f7c2e1b8a01');
SELECT p.*, c.state, c.result FROM pg_temp.payments p, idem_lookup(p.account, p.request) c;

-- Rights: both functions are needed, and idem_grant() gives both.
CREATE ROLE regress_idem_app;
CREATE ROLE regress_idem_half;
SELECT idem_grant('regress_idem_app', 'app');
SELECT proname FROM pg_temp.overloads GROUP BY 1 HAVING count(DISTINCT has_function_privilege('regress_idem_app', oid, 'EXECUTE')) <> 1;
DO $$
DECLARE
	schema constant regnamespace := (SELECT relnamespace FROM pg_class WHERE oid = 'idem_claims'::regclass);
BEGIN
	EXECUTE format('GRANT USAGE ON SCHEMA %s TO regress_idem_half', schema);
	EXECUTE format('GRANT EXECUTE ON FUNCTION %s.idem_claim(bigint, uuid, text, bytea, interval) TO regress_idem_half', schema);
END $$;
SET ROLE regress_idem_half;
SELECT idem_claim(6, '0193a1f2-7d43-7c5e-9a10-5f7c2e1b8a01'::uuid);
SELECT idem_claim(6, 'r');
SET ROLE regress_idem_app;
SELECT idem_claim(6, '0193a1f2-7d43-7c5e-9a10-5f7c2e1b8a01'::uuid);
SELECT idem_forget(6, '0193a1f2-7d43-7c5e-9a10-5f7c2e1b8a01'::uuid);
RESET ROLE;
SELECT idem_revoke('regress_idem_app', 'app');
DROP OWNED BY regress_idem_app, regress_idem_half;
DROP ROLE regress_idem_app, regress_idem_half;

TRUNCATE idem_claims;
