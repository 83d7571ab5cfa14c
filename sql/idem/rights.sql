-- ----- rights -----

-- Runs with the caller's rights.  The owner of the extension and a superuser may grant all
-- that is granted here.
CREATE FUNCTION @extschema@.idem__change_rights(
	role regrole,
	privileges text,
	command text)
RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
	app constant text[] := ARRAY['idem_call', 'idem_claim', 'idem_try_claim', 'idem_lease', 'idem_claim_many',
		'idem_complete', 'idem_fail', 'idem_extend', 'idem_release', 'idem_fence',
		'idem_heal', 'idem_result', 'idem_status', 'idem_lookup', 'idem_fingerprint',
		'idem_skip_duplicates'];
	operator constant text[] := ARRAY['idem_result', 'idem_status', 'idem_lookup',
		'idem_lapsed', 'idem_forget', 'idem_erase', 'idem__erase', 'idem_heal', 'idem_cleanup', 'idem_cleanup_all', 'idem__cleanup_step',
		'idem_start_worker',
		'idem_stat_reset', 'idem__stat_cleanup_counters', 'idem__stat_cleaning', 'idem__stat_launcher',
		'idem__stat_claims_counters', 'idem__stat_scopes_counters',
		'idem__unsettled_claims', 'idem__held_keys'];
	-- all but the token: only its holder may know it
	columns constant text := 'expires_at, lease_until, state, request_id, user_id, scope, fingerprint, result, progress';
	-- all but guarded_since, which a trigger sets
	policy constant text := 'scope, ttl, lease, lease_max, failed, lapsed, expired, key_time, result_max_bytes';
	schema regnamespace;
	routines regprocedure[];
	routine regprocedure;
	grantors text;
BEGIN
	IF role IS NULL OR NOT EXISTS (SELECT FROM pg_roles WHERE oid = role) OR privileges IS NULL OR privileges NOT IN ('app', 'operator')
		OR command IS NULL OR command NOT IN ('GRANT %s TO %s', 'REVOKE %s FROM %s') THEN
		RAISE EXCEPTION 'rights are granted to, and revoked from, a role as ''app'' or ''operator'''
			USING ERRCODE = 'invalid_parameter_value',
			HINT = 'app: claim and settle requests; operator: policy, cleanup, statistics.';
	END IF;
	SELECT e.extnamespace, array_agg(p.oid::regprocedure) INTO schema, routines
	FROM pg_extension e
		JOIN pg_depend d ON d.refclassid = 'pg_extension'::regclass AND d.refobjid = e.oid AND d.deptype = 'e'
		JOIN pg_proc p ON d.classid = 'pg_proc'::regclass AND d.objid = p.oid
	WHERE e.extname = 'idem' AND p.proname = ANY (CASE privileges WHEN 'app' THEN app ELSE operator END)
		-- not what somebody else has added to the extension
		AND p.proowner = (SELECT c.relowner FROM pg_class c WHERE c.relnamespace = e.extnamespace AND c.relname = 'idem_claims')
	GROUP BY e.oid;

	IF command LIKE 'GRANT%' AND NOT has_schema_privilege(role, schema, 'USAGE') THEN
		IF has_schema_privilege(schema, 'USAGE WITH GRANT OPTION') THEN
			EXECUTE format('GRANT USAGE ON SCHEMA %s TO %s', schema, role);
		ELSE
			RAISE WARNING 'role % cannot use schema %', role, schema
				USING HINT = 'The owner of the schema has to grant USAGE on it.';
		END IF;
	END IF;

	FOREACH routine IN ARRAY routines LOOP
		EXECUTE format(command, format('EXECUTE ON ROUTINE %s', routine), role);
	END LOOP;
	EXECUTE format(command, format('USAGE ON TYPE %1$s.idem_state, %1$s.idem_outcome', schema), role);

	IF privileges = 'operator' THEN
		EXECUTE format(command, format('SELECT (%s) ON %s.idem_claims', columns, schema), role);
		EXECUTE format(command, format('SELECT, INSERT (%1$s), UPDATE (%1$s), DELETE ON %2$s.idem_scopes', policy, schema), role);
		EXECUTE format(command,
			format('SELECT ON %1$s.idem_stat_cleanup, %1$s.idem_stat_claims, %1$s.idem_stat_scopes, %1$s.idem_stat_table, %1$s.idem_metrics, %1$s.idem_unsettled, %1$s.idem_holders', schema), role);
	END IF;

	-- REVOKE only revokes what the current role granted, and says nothing about the rest.
	IF command LIKE 'REVOKE%' THEN
		SELECT string_agg(DISTINCT a.grantor::regrole::text, ', ') INTO grantors
		FROM pg_proc p, aclexplode(p.proacl) a
		WHERE p.oid = ANY (routines) AND a.grantee = role;
		IF grantors IS NOT NULL THEN
			RAISE WARNING 'role % keeps rights that % granted', role, grantors
				USING HINT = 'Run idem_revoke() as the role that granted them.';
		END IF;
	END IF;
END
$function$;

COMMENT ON FUNCTION @extschema@.idem__change_rights(regrole, text, text) IS
'for idem_grant() and idem_revoke()';

CREATE FUNCTION @extschema@.idem_grant(role regrole, privileges text)
RETURNS void
LANGUAGE sql VOLATILE
BEGIN ATOMIC
	SELECT @extschema@.idem__change_rights(role, privileges, 'GRANT %s TO %s'::text);
END;

COMMENT ON FUNCTION @extschema@.idem_grant(regrole, text) IS
'grants a role what an application (app) or an operator (operator) needs, as far as the caller may grant it';

CREATE FUNCTION @extschema@.idem_revoke(role regrole, privileges text)
RETURNS void
LANGUAGE sql VOLATILE
BEGIN ATOMIC
	SELECT @extschema@.idem__change_rights(role, privileges, 'REVOKE %s FROM %s'::text);
END;

COMMENT ON FUNCTION @extschema@.idem_revoke(regrole, text) IS
'revokes what the caller granted by idem_grant(); app and operator share some functions';

-- By now, default privileges (ALTER DEFAULT PRIVILEGES) may have granted rights to anybody,
-- and PostgreSQL's own defaults have granted some to PUBLIC.  First revoke everything from
-- all roles but the owner, then grant what follows.
DO $block$
DECLARE
	member record;
BEGIN
	FOR member IN
		SELECT o.object, o.kind, a.grantee
		FROM pg_extension e
			JOIN pg_depend d ON d.refclassid = 'pg_extension'::regclass::oid
				AND d.refobjid = e.oid AND d.deptype = 'e'
			JOIN (
				SELECT 'pg_class'::regclass::oid AS class, c.oid, c.oid::regclass::text AS object,
					CASE WHEN c.relkind = 'S'::"char" THEN 'SEQUENCE' ELSE 'TABLE' END AS kind, c.relowner AS owner, c.relacl AS acl
				FROM pg_class c
				UNION ALL
				SELECT 'pg_proc'::regclass::oid, p.oid, p.oid::regprocedure::text,
					'ROUTINE', p.proowner, COALESCE(p.proacl, acldefault('f', p.proowner))
				FROM pg_proc p
				UNION ALL
				SELECT 'pg_type'::regclass::oid, t.oid, t.oid::regtype::text,
					'TYPE', t.typowner, COALESCE(t.typacl, acldefault('T', t.typowner))
				FROM pg_type t WHERE t.typtype = 'e'
			) o ON o.class = d.classid AND o.oid = d.objid,
			aclexplode(o.acl) a
		WHERE e.extname = 'idem' AND a.grantee <> o.owner
	LOOP
		EXECUTE format('REVOKE ALL ON %s %s FROM %s', member.kind, member.object,
			CASE WHEN member.grantee = '0'::oid THEN 'PUBLIC'
				ELSE member.grantee::regrole::text END);
	END LOOP;
END
$block$;

-- The owner of the extension gets what it needs to dump, to restore, to grant, and to lock
-- the tables for a move to the portable edition.  A superuser who restores a dump becomes the
-- owner of the extension, in place of the role that had installed idem into its own schema
-- and had granted rights.  So where a superuser owns the extension, the owner of the schema
-- gets the same rights.  (It could drop everything in the schema anyway.)
--
-- The trigger functions of idem_scopes are left out: their triggers need no such right, and no
-- other table may use them.
DO $block$
DECLARE
	me pg_extension;
	schema regnamespace;
	owner regrole;
	routine regprocedure;
BEGIN
	SELECT e.* INTO me FROM pg_extension e WHERE e.extname = 'idem';
	schema := me.extnamespace;
	FOR owner IN
		SELECT me.extowner
		UNION
		SELECT n.nspowner
		FROM pg_namespace n
			JOIN pg_database d ON d.datname = current_database()
			JOIN pg_roles person ON person.oid =
				CASE WHEN n.nspowner = 'pg_database_owner'::regrole::oid THEN d.datdba ELSE n.nspowner END
			JOIN pg_roles installer ON installer.oid = me.extowner
		WHERE n.oid = me.extnamespace
			AND installer.rolsuper AND NOT person.rolsuper
	LOOP
		EXECUTE format('GRANT SELECT, INSERT ON %1$s.idem_claims TO %2$s WITH GRANT OPTION', schema, owner);
		EXECUTE format('GRANT TRUNCATE ON %1$s.idem_claims TO %2$s', schema, owner);
		EXECUTE format('GRANT SELECT, INSERT, UPDATE, DELETE ON %1$s.idem_scopes TO %2$s WITH GRANT OPTION', schema, owner);
		EXECUTE format('GRANT SELECT, UPDATE, USAGE ON SEQUENCE %1$s.idem_token_seq TO %2$s WITH GRANT OPTION', schema, owner);
		EXECUTE format('GRANT SELECT ON %1$s.idem_stat_cleanup, %1$s.idem_stat_claims, %1$s.idem_stat_scopes, %1$s.idem_stat_table, %1$s.idem_metrics, %1$s.idem_unsettled, %1$s.idem_holders TO %2$s WITH GRANT OPTION', schema, owner);
		EXECUTE format('GRANT USAGE ON TYPE %1$s.idem_state, %1$s.idem_outcome TO %2$s WITH GRANT OPTION', schema, owner);
		FOR routine IN
			SELECT p.oid
			FROM pg_depend d
				JOIN pg_extension e ON d.refobjid = e.oid
				JOIN pg_proc p ON d.objid = p.oid
			WHERE e.extname = 'idem'
				AND d.refclassid = 'pg_extension'::regclass::oid
				AND d.classid = 'pg_proc'::regclass::oid
				AND d.deptype = 'e'
				AND (p.prorettype <> 'trigger'::regtype::oid
					OR p.proname = 'idem_skip_duplicates')
		LOOP
			EXECUTE format('GRANT EXECUTE ON ROUTINE %s TO %s WITH GRANT OPTION', routine, owner);
		END LOOP;
	END LOOP;
	-- Their rows belong in a dump.
	PERFORM pg_extension_config_dump(format('%s.idem_claims', schema)::regclass, '');
	PERFORM pg_extension_config_dump(format('%s.idem_scopes', schema)::regclass, '');
	PERFORM pg_extension_config_dump(format('%s.idem_token_seq', schema)::regclass, '');
END
$block$;

-- A function in a view is called with the rights of the role that reads the view, so that
-- role needs both.
GRANT SELECT ON @extschema@.idem_stat_cleanup, @extschema@.idem_stat_claims, @extschema@.idem_stat_scopes,
	@extschema@.idem_stat_table, @extschema@.idem_metrics,
	@extschema@.idem_unsettled, @extschema@.idem_holders TO pg_monitor;
GRANT EXECUTE ON FUNCTION
	@extschema@.idem__stat_cleanup_counters(),
	@extschema@.idem__stat_cleaning(),
	@extschema@.idem__stat_launcher(),
	@extschema@.idem__stat_claims_counters(),
	@extschema@.idem__stat_scopes_counters(),
	@extschema@.idem__unsettled_claims(),
	@extschema@.idem__held_keys()
TO pg_monitor;

-- If it names no tablespace, it may stay empty.
SELECT set_config('default_tablespace', t.spcname::text, true)
FROM pg_tablespace t
WHERE t.spcname::text = current_setting('idem_install.tablespace');
