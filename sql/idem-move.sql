/*
 * Moves idem in one database from one edition to another, in the schema where it is:
 *
 *		psql -v schema=idem -v to=idem -f sql/idem-move.sql
 *
 * to:	idem			the C edition
 *		idem_portable	the portable edition, as an extension
 *		portable		the portable edition, from the file idem-portable.sql beside this one
 *
 * schema: default public.  Run it as the owner of what is there.
 *
 * Claims, scopes with what they have promised, tokens, and the rights that idem_grant()
 * has given are kept.  Settings become columns of idem_settings; the other way they are
 * compared, since only postgresql.conf can hold them, and the move is refused while they
 * differ.  Statistics begin anew.  Other rights, and indexes, triggers or columns of your
 * own on idem's tables, are to be made again, and their places in publications.  Objects
 * of yours must not begin with idem_.
 *
 * It is one transaction: if it fails, nothing has changed.  It fails where objects of
 * yours (a view, say) depend on idem's, and names them.
 *
 * It may run under load.  It waits for the transactions that use idem, at most for
 * lock_timeout, and claims wait for it; a deadlock with one (40P01) is possible, and leaves
 * all as it was: run it again.  A call that it catches on the way may raise an error of
 * any SQLSTATE; its transaction is rolled back, and is to be retried like any.  A session
 * that has used idem's types before (a prepared statement, a variable of type
 * idem_outcome) may go on failing: have clients reconnect afterwards, poolers too.
 */

\set ON_ERROR_STOP on
\set ON_ERROR_ROLLBACK off
\if :{?schema}
\else
\set schema public
\endif
\if :{?to}
\else
\set to ''
\endif

-- What it copies is what is there once it has the locks, not what was there before.
BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE;
SET LOCAL client_min_messages = warning;
SET LOCAL row_security = off;				-- an error, rather than rows that are left behind

-- ----- whether it can be moved -----

-- With pg_catalog alone: an operator in the schema could match better than the system's.
SET LOCAL search_path = pg_catalog, pg_temp;
SELECT set_config('idem_move.schema', :'schema', true) AS ignored, set_config('idem_move.to', :'to', true) AS ignored
\gset

DO $block$
DECLARE
	target constant text := current_setting('idem_move.to');
	schema_name constant text := current_setting('idem_move.schema');
	source text;
	owner oid;
	others text;
BEGIN
	IF target NOT IN ('idem', 'idem_portable', 'portable') THEN
		RAISE EXCEPTION 'idem can be moved to idem, idem_portable or portable'
			USING ERRCODE = 'invalid_parameter_value',
			HINT = 'Name one: psql -v to=idem for the C edition.';
	END IF;

	SELECT coalesce(e.extname, 'portable'), coalesce(e.extowner, c.relowner) INTO source, owner
	FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
		LEFT JOIN pg_depend AS d ON d.classid = 'pg_class'::regclass AND d.objid = c.oid
			AND d.refclassid = 'pg_extension'::regclass AND d.deptype = 'e'
		LEFT JOIN pg_extension AS e ON e.oid = d.refobjid
	WHERE c.relname = 'idem_claims' AND n.nspname = schema_name;
	IF NOT FOUND THEN
		RAISE EXCEPTION 'there is no idem in schema %', quote_ident(schema_name)
			USING ERRCODE = 'undefined_object',
			HINT = 'Name the schema where it is: psql -v schema=NAME.';
	ELSIF source = target THEN
		RAISE EXCEPTION 'idem is installed as % already', target
			USING ERRCODE = 'duplicate_object';
	ELSIF to_regclass(quote_ident(schema_name) || '.idem_token_source') IS NOT NULL THEN
		RAISE EXCEPTION 'idem is distributed over a cluster'
			USING ERRCODE = 'feature_not_supported',
			HINT = 'It cannot be moved.';
	ELSIF owner <> current_user::regrole THEN
		RAISE EXCEPTION 'idem belongs to role %', owner::regrole
			USING ERRCODE = 'insufficient_privilege',
			DETAIL = 'Who moves it owns it, and its functions run with that role''s rights.',
			HINT = 'Move it as that role.';
	END IF;
	-- What they create there could be found instead of the system's.
	SELECT string_agg(CASE a.grantee WHEN '0'::oid THEN 'PUBLIC' ELSE a.grantee::regrole::text END, ', ') INTO others
	FROM pg_namespace AS n, aclexplode(n.nspacl) AS a
	WHERE n.nspname = schema_name AND a.privilege_type = 'CREATE' AND a.grantee NOT IN (owner, n.nspowner);
	IF others IS NOT NULL THEN
		RAISE EXCEPTION 'others may create objects in schema %: %', quote_ident(schema_name), others
			USING ERRCODE = 'object_not_in_prerequisite_state',
			DETAIL = 'Commands that run with your rights would find them.',
			HINT = 'Revoke CREATE on the schema from them, and see that they have left nothing there.';
	END IF;
	PERFORM set_config('idem_move.source', source, true);
END
$block$;

SET LOCAL search_path = :"schema", pg_temp;

-- ----- what is kept -----

-- In the order in which claims take them: in the portable edition one has read its policy
-- when it gets at the claims.  A token is drawn before that there, and after it in C.
DO $block$
BEGIN
	IF current_setting('idem_move.source') = 'idem' THEN
		LOCK TABLE idem_claims, idem_scopes IN ACCESS EXCLUSIVE MODE;
		PERFORM idem_fingerprint('0');		-- defines the settings
		CREATE TEMPORARY TABLE idem_moved_settings ON COMMIT DROP AS
			SELECT current_setting('idem.ttl')::interval AS ttl, current_setting('idem.lease')::interval AS lease,
				current_setting('idem.lease_max')::interval AS lease_max,
				(SELECT s.setting::int4 FROM pg_settings AS s WHERE s.name = 'idem.result_max_bytes') AS result_max_bytes,
				current_setting('idem.cleanup_batch_size')::int4 AS cleanup_batch_size;
	ELSE
		LOOP
			BEGIN
				ALTER SEQUENCE idem_token_seq OWNED BY NONE;	-- which locks it
				LOCK TABLE idem_settings, idem_scopes, idem_claims IN ACCESS EXCLUSIVE MODE;
				EXIT;
			EXCEPTION WHEN deadlock_detected THEN
				NULL;		-- the locks are given back: a settlement takes them in another order
			END;
		END LOOP;
		CREATE TEMPORARY TABLE idem_moved_settings ON COMMIT DROP AS
			SELECT d.ttl, d.lease, d.lease_max, d.result_max_bytes, d.cleanup_batch_size FROM idem_settings AS d;
	END IF;
END
$block$;

CREATE TEMPORARY TABLE idem_moved_claims ON COMMIT DROP AS
	SELECT c.expires_at, c.lease_until, c.token, c.state::text AS state,
		c.request_id, c.user_id, c.scope, c.fingerprint, c.result, c.progress
	FROM idem_claims AS c;

CREATE TEMPORARY TABLE idem_moved_scopes ON COMMIT DROP AS TABLE idem_scopes;
CREATE TEMPORARY TABLE idem_moved_token ON COMMIT DROP AS SELECT last_value, is_called FROM idem_token_seq;

-- An application may claim and an operator may forget.  Who may grant that is the owner.
CREATE TEMPORARY TABLE idem_moved_rights ON COMMIT DROP AS
	SELECT a.grantee::regrole AS role, CASE p.proname WHEN 'idem_forget' THEN 'operator' ELSE 'app' END AS privileges
	FROM pg_proc AS p JOIN pg_namespace AS n ON n.oid = p.pronamespace, aclexplode(p.proacl) AS a
	WHERE n.nspname = current_schema() AND p.proname IN ('idem_try_claim', 'idem_forget')
		AND a.grantee NOT IN (0, p.proowner) AND NOT a.is_grantable;

-- ----- the change -----

DO $block$
DECLARE
	source constant text := current_setting('idem_move.source');
	kind text;
	names text;
BEGIN
	IF source <> 'portable' THEN
		EXECUTE pg_catalog.format('DROP EXTENSION %I', source);
		RETURN;
	END IF;
	DROP VIEW idem_stat_cleanup;
	DROP TRIGGER idem_scopes_guard ON idem_scopes;
	DROP TRIGGER idem_settings_replace ON idem_settings;
	-- In one command, in which what depends on each other goes together
	SELECT string_agg(p.oid::regprocedure::text, ', ') INTO names
	FROM pg_proc AS p JOIN pg_namespace AS n ON n.oid = p.pronamespace
	WHERE n.nspname = current_schema()
		AND p.proowner = (SELECT c.relowner FROM pg_class AS c WHERE c.oid = 'idem_claims'::regclass)
		AND (p.proname LIKE 'idem\_\_%' OR p.proname IN (
			'idem_claim', 'idem_try_claim', 'idem_claim_many', 'idem_complete', 'idem_fail', 'idem_heal', 'idem_forget',
			'idem_extend', 'idem_release', 'idem_fence', 'idem_result', 'idem_status', 'idem_lookup', 'idem_fingerprint',
			'idem_cleanup', 'idem_cleanup_step', 'idem_cleanup_all', 'idem_grant', 'idem_revoke', 'idem_scopes_guard',
			'idem_distribute'));
	EXECUTE 'DROP ROUTINE ' || names;
	DROP TABLE idem_claims, idem_scopes, idem_settings, idem_cleanup_batches;
	DROP SEQUENCE idem_token_seq;
	DROP TYPE idem_state, idem_outcome, idem__key, idem__answer;
END
$block$;

SELECT :'to' = 'portable' AS by_file
\gset
\if :by_file
\set within_transaction
\ir idem-portable.sql
\else
CREATE EXTENSION :"to" SCHEMA :"schema";
\endif

DO $block$
DECLARE
	differ text;
	kept text;
BEGIN
	IF current_setting('idem_move.to') <> 'idem' THEN
		INSERT INTO idem_settings (ttl, lease, lease_max, result_max_bytes, cleanup_batch_size)
			SELECT d.ttl, d.lease, d.lease_max, d.result_max_bytes, d.cleanup_batch_size FROM pg_temp.idem_moved_settings AS d;
		RETURN;
	END IF;
	PERFORM idem_fingerprint('0');		-- defines the settings
	-- In the units of the settings, rounded up
	SELECT string_agg(pg_catalog.format('%s is %s%s', s.name, s.setting, s.unit), ', ' ORDER BY s.name),
		string_agg(pg_catalog.format('%s = ''%s%s''', s.name, d.kept, s.unit), ', ' ORDER BY s.name)
	INTO differ, kept
	FROM pg_temp.idem_moved_settings AS m,
		LATERAL (VALUES ('idem.ttl', ceil(date_part('epoch', m.ttl))),
			('idem.lease', ceil(date_part('epoch', m.lease) * 1000)),
			('idem.lease_max', ceil(date_part('epoch', m.lease_max) * 1000)),
			('idem.result_max_bytes', m.result_max_bytes),
			('idem.cleanup_batch_size', m.cleanup_batch_size)) AS d (name, kept)
		JOIN pg_settings AS s ON s.name = d.name
	WHERE s.setting::float8 <> d.kept;
	IF differ IS NOT NULL THEN
		RAISE EXCEPTION 'the settings are not those of idem_settings: %', differ
			USING ERRCODE = 'object_not_in_prerequisite_state',
			HINT = pg_catalog.format('Put into postgresql.conf, reload it, and move again: %s.', kept);
	END IF;
END
$block$;

INSERT INTO idem_claims (expires_at, lease_until, token, state, request_id, user_id, scope, fingerprint, result, progress)
	SELECT c.expires_at, c.lease_until, c.token, c.state::idem_state,
		c.request_id, c.user_id, c.scope, c.fingerprint, c.result, c.progress
	FROM pg_temp.idem_moved_claims AS c;

INSERT INTO idem_scopes (scope, ttl, lease, lease_max, failed, lapsed, expired, key_time, result_max_bytes)
	SELECT p.scope, p.ttl, p.lease, p.lease_max, p.failed, p.lapsed, p.expired, p.key_time, p.result_max_bytes
	FROM pg_temp.idem_moved_scopes AS p;

SELECT setval('idem_token_seq', t.last_value, t.is_called) AS ignored FROM pg_temp.idem_moved_token AS t
\gset
SELECT count(idem_grant(r.role, r.privileges)::text) AS ignored FROM pg_temp.idem_moved_rights AS r
\gset

SELECT pg_catalog.format('moved from %s to %s: %s claims, %s scopes', current_setting('idem_move.source'), :'to',
	(SELECT count(*) FROM pg_temp.idem_moved_claims), (SELECT count(*) FROM pg_temp.idem_moved_scopes)) AS moved
\gset

COMMIT;
\echo :moved
