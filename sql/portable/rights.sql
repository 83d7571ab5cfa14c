-- ----- rights -----

CREATE FUNCTION @extschema@.idem__change_rights(role regrole, privileges text, command text)
RETURNS void
LANGUAGE plpgsql
AS $$
DECLARE
	app constant text[] := ARRAY['idem_call', 'idem__call_settle', 'idem_claim', 'idem_try_claim', 'idem_lease', 'idem_claim_many',
		'idem_complete', 'idem_fail', 'idem_extend', 'idem_release', 'idem_fence',
		'idem_heal', 'idem_result', 'idem_status', 'idem_lookup', 'idem_fingerprint',
		'idem_skip_duplicates'];
	operator constant text[] := ARRAY['idem_result', 'idem_status', 'idem_lookup',
		'idem_lapsed', 'idem_forget', 'idem_erase', 'idem__erase', 'idem_heal', 'idem_cleanup', 'idem_cleanup_all', 'idem__cleanup_step',
		'idem__stat_scope_shares'];
	-- all but guarded_since, which the trigger sets
	policy constant text := 'scope, ttl, lease, lease_max, failed, lapsed, expired, key_time, result_max_bytes';
	-- all but the token, which only its holder may know
	columns constant text := 'expires_at, lease_until, state, request_id, user_id, scope, fingerprint, result, progress';
	schema constant regnamespace := '@extschema@';
	routine regprocedure;
BEGIN
	IF role IS NULL OR NOT EXISTS (SELECT FROM pg_roles WHERE oid = role)
		OR privileges IS NULL OR (privileges <> 'app' AND privileges <> 'operator') THEN
		PERFORM @extschema@.idem__raise('22023', 'rights are granted to, and revoked from, a role as ''app'' or ''operator''',
			'app: claim and settle requests; operator: policy, cleanup, statistics.');
	END IF;

	IF command LIKE 'GRANT%' AND NOT has_schema_privilege(role, schema, 'USAGE') THEN
		IF has_schema_privilege(schema, 'USAGE WITH GRANT OPTION') THEN
			EXECUTE pg_catalog.format('GRANT USAGE ON SCHEMA %s TO %s', schema, role);
		ELSE
			RAISE WARNING 'role % cannot use schema %', role, schema
				USING HINT = 'The owner of the schema has to grant USAGE on it.';
		END IF;
	END IF;

	FOR routine IN
		SELECT p.oid FROM pg_proc AS p
		WHERE p.pronamespace = schema AND p.proname::text = ANY (CASE privileges WHEN 'app' THEN app ELSE operator END)
			AND p.proowner = (SELECT c.relowner FROM pg_class AS c WHERE c.oid = '@extschema@.idem_claims'::regclass)
	LOOP
		EXECUTE pg_catalog.format(command, pg_catalog.format('EXECUTE ON ROUTINE %s', routine), role);
	END LOOP;
	EXECUTE pg_catalog.format(command, pg_catalog.format('USAGE ON TYPE %1$s.idem_state, %1$s.idem_outcome', schema), role);

	IF privileges = 'operator' THEN
		EXECUTE pg_catalog.format(command, pg_catalog.format('SELECT (%s) ON %s.idem_claims', columns, schema), role);
		EXECUTE pg_catalog.format(command,
			pg_catalog.format('SELECT, INSERT (%1$s), UPDATE (%1$s), DELETE ON %2$s.idem_scopes', policy, schema), role);
		EXECUTE pg_catalog.format(command, pg_catalog.format('SELECT, UPDATE ON %s.idem_settings', schema), role);
		EXECUTE pg_catalog.format(command,
			pg_catalog.format('SELECT ON %1$s.idem_stat_cleanup, %1$s.idem_stat_table, %1$s.idem_stat_scopes, %1$s.idem_metrics, %1$s.idem_unsettled, %1$s.idem_holders', schema), role);
	END IF;
END
$$;

CREATE FUNCTION @extschema@.idem_grant(role regrole, privileges text)
RETURNS void
LANGUAGE plpgsql VOLATILE
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
	PERFORM @extschema@.idem__change_rights(role, privileges, 'GRANT %s TO %s');
END
$$;

COMMENT ON FUNCTION @extschema@.idem_grant(regrole, text) IS
'grants a role what an application (app) or an operator (operator) needs';

CREATE FUNCTION @extschema@.idem_revoke(role regrole, privileges text)
RETURNS void
LANGUAGE plpgsql VOLATILE
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
	PERFORM @extschema@.idem__change_rights(role, privileges, 'REVOKE %s FROM %s');
END
$$;

COMMENT ON FUNCTION @extschema@.idem_revoke(regrole, text) IS
'takes back what idem_grant() has granted; app and operator share some functions';

-- Revokes what PUBLIC and the grantees of default privileges got with the new objects.  If
-- this is an extension, under whatever name, marks the tables whose rows belong in a dump;
-- the secret does not.
DO $block$
DECLARE
	object record;
	config regclass;
BEGIN
	FOR object IN
		SELECT o.name, CASE a.grantee WHEN '0'::oid THEN 'PUBLIC' ELSE a.grantee::regrole::text END AS grantee
		FROM (SELECT 'ROUTINE ' || p.oid::regprocedure, p.proowner, coalesce(p.proacl, acldefault('f', p.proowner))
				FROM pg_proc AS p WHERE p.pronamespace = '@extschema@'::regnamespace AND p.proname ^@ 'idem_'
				UNION ALL SELECT CASE c.relkind WHEN 'S' THEN 'SEQUENCE ' ELSE 'TABLE ' END || c.oid::regclass, c.relowner, c.relacl
				FROM pg_class AS c WHERE c.relnamespace = '@extschema@'::regnamespace AND c.relname ^@ 'idem_' AND c.relkind IN ('r', 'v', 'S')
				UNION ALL SELECT 'TYPE ' || t.oid::regtype, t.typowner, coalesce(t.typacl, acldefault('T', t.typowner))
				FROM pg_type AS t WHERE t.typnamespace = '@extschema@'::regnamespace AND t.typname ^@ 'idem_' AND t.typtype IN ('c', 'e')
			) AS o (name, owner, acl), aclexplode(o.acl) AS a
		WHERE o.owner = (SELECT r.oid FROM pg_roles AS r WHERE r.rolname = current_user) AND a.grantee <> o.owner
		GROUP BY 1, 2
	LOOP
		EXECUTE format('REVOKE ALL ON %s FROM %s CASCADE', object.name, object.grantee);
	END LOOP;
	GRANT SELECT ON @extschema@.idem_stat_cleanup, @extschema@.idem_stat_table, @extschema@.idem_stat_scopes,
		@extschema@.idem_metrics, @extschema@.idem_unsettled, @extschema@.idem_holders TO pg_monitor;
	GRANT EXECUTE ON FUNCTION @extschema@.idem__stat_scope_shares() TO pg_monitor;

	IF EXISTS (SELECT FROM pg_depend AS d WHERE d.classid = 'pg_class'::regclass AND d.objid = '@extschema@.idem_claims'::regclass
			AND d.refclassid = 'pg_extension'::regclass AND d.deptype = 'e') THEN
		FOREACH config IN ARRAY ARRAY['@extschema@.idem_claims', '@extschema@.idem_scopes', '@extschema@.idem_settings',
			'@extschema@.idem_cleanup_batches', '@extschema@.idem_token_seq']::regclass[]
		LOOP
			PERFORM pg_extension_config_dump(config, '');
		END LOOP;
	END IF;
	PERFORM set_config('role', current_setting('idem_install.role'), true);
	-- If it names no tablespace, it may stay empty.
	PERFORM set_config('default_tablespace', t.spcname, true) FROM pg_tablespace AS t
	WHERE t.spcname = current_setting('idem_install.tablespace');
END
$block$;
