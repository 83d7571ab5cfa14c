-- ----- rights -----

-- Runs with the caller's rights.  The owner of idem and a superuser may grant all that is granted
-- here.  Some of the names exist in one edition only.
CREATE FUNCTION @extschema@.idem__change_rights(role regrole, privileges text, command text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $function$
DECLARE
	app constant text[] := ARRAY['idem_call', 'idem__call_begin', 'idem__call_settle', 'idem_claim', 'idem_try_claim', 'idem_lease', 'idem_claim_many',
		'idem_complete', 'idem_fail', 'idem_extend', 'idem_release', 'idem_fence',
		'idem_heal', 'idem_result', 'idem_outcome', 'idem_status', 'idem_lookup', 'idem_fingerprint',
		'idem_skip_duplicates', 'idem_version'];
	operator constant text[] := ARRAY['idem_version', 'idem_result', 'idem_outcome', 'idem_status', 'idem_lookup',
		'idem_lapsed', 'idem_forget', 'idem_erase', 'idem__erase', 'idem_heal',
		'idem_cleanup', 'idem_cleanup_all', 'idem__cleanup_step', 'idem__require_commit',
		'idem_start_worker',
		'idem_stat_reset', 'idem__stat_cleanup_counters', 'idem__stat_cleaning', 'idem__stat_launcher',
		'idem__stat_claims_counters', 'idem__stat_scopes_counters', 'idem__stat_scope_shares',
		'idem__unsettled_claims', 'idem__held_keys'];
	-- all but the token: only its holder may know it
	columns constant text := 'expires_at, lease_until, state, request_id, user_id, scope, fingerprint, result, progress';
	-- all but guarded_since, which a trigger sets
	policy constant text := 'scope, ttl, lease, lease_max, failed, lapsed, expired, key_time, result_max_bytes';
	readable constant text[] := ARRAY['idem_stat_cleanup', 'idem_stat_claims', 'idem_stat_scopes', 'idem_stat_table', 'idem_metrics',
		'idem_unsettled', 'idem_holders', 'idem_settings'];
	schema constant regnamespace := @schema@;
	-- not what somebody else has added to idem
	owner constant oid := (SELECT c.relowner FROM pg_class AS c WHERE c.relnamespace = schema AND c.relname = 'idem_claims');
	routines constant oid[] := ARRAY(SELECT p.oid FROM pg_proc AS p WHERE p.pronamespace = schema AND p.proowner = owner
		AND p.proname = ANY (CASE privileges WHEN 'app' THEN app ELSE operator END));
	object text;
	grantors text;
BEGIN
	IF role IS NULL OR NOT EXISTS (SELECT FROM pg_roles WHERE oid = role) OR privileges IS NULL OR privileges NOT IN ('app', 'operator')
		OR command IS NULL OR command NOT IN ('GRANT %s TO %s', 'REVOKE %s FROM %s') THEN
		RAISE EXCEPTION 'rights are granted to, and revoked from, a role as ''app'' or ''operator'''
			USING ERRCODE = 'invalid_parameter_value',
			HINT = 'app: claim and settle requests; operator: policy, cleanup, statistics.';
	END IF;

	IF command LIKE 'GRANT%' AND NOT has_schema_privilege(role, schema, 'USAGE') THEN
		IF has_schema_privilege(schema, 'USAGE WITH GRANT OPTION') THEN
			EXECUTE format('GRANT USAGE ON SCHEMA %s TO %s', schema, role);
		ELSE
			RAISE WARNING 'role % cannot use schema %', role, schema
				USING HINT = 'The owner of the schema has to grant USAGE on it.';
		END IF;
	END IF;

	FOREACH object IN ARRAY routines::regprocedure[]::text[] LOOP
		EXECUTE format(command, 'EXECUTE ON ROUTINE ' || object, role);
	END LOOP;
	EXECUTE format(command, format('USAGE ON TYPE %1$s.idem_state, %1$s.idem_outcome', schema), role);

	IF privileges = 'operator' THEN
		EXECUTE format(command, format('SELECT (%s) ON %s.idem_claims', columns, schema), role);
		EXECUTE format(command, format('SELECT, INSERT (%1$s), UPDATE (%1$s), DELETE ON %2$s.idem_scopes', policy, schema), role);
		FOR object IN
			SELECT CASE c.relname WHEN 'idem_settings' THEN 'SELECT, UPDATE ON ' ELSE 'SELECT ON ' END || c.oid::regclass
			FROM pg_class AS c WHERE c.relnamespace = schema AND c.relowner = owner AND c.relname = ANY (readable)
		LOOP
			EXECUTE format(command, object, role);
		END LOOP;
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
END $function$;

CREATE FUNCTION @extschema@.idem_grant(role regrole, privileges text) RETURNS void LANGUAGE sql BEGIN ATOMIC
	SELECT @extschema@.idem__change_rights(role, privileges, 'GRANT %s TO %s'::text);
END;

CREATE FUNCTION @extschema@.idem_revoke(role regrole, privileges text) RETURNS void LANGUAGE sql BEGIN ATOMIC
	SELECT @extschema@.idem__change_rights(role, privileges, 'REVOKE %s FROM %s'::text);
END;

-- By now, default privileges (ALTER DEFAULT PRIVILEGES) may have granted rights to anybody,
-- and PostgreSQL's own defaults have granted some to PUBLIC.  First revoke everything from
-- all roles but the owner, then grant what follows.
--
-- That includes USAGE on the row types of the portable edition: nobody else may make tables that
-- depend on them.  The C edition leaves it, because pg_dump warns of such rights in an extension.
--
-- A function in a view is called with the rights of the role that reads the view, so that
-- role needs both.
--
-- If this is an extension, under whatever name, the rows of some tables belong in a dump.
DO $block$
DECLARE
	schema constant regnamespace := @schema@;
	others constant text[] := current_setting('idem_install.others');
	me constant oid := (SELECT r.oid FROM pg_roles AS r WHERE r.rolname = current_user);
	is_portable constant boolean := NOT EXISTS (SELECT FROM pg_extension AS e WHERE e.extname = 'idem');
	object record;
BEGIN
	FOR object IN
		SELECT o.name, CASE a.grantee WHEN '0'::oid THEN 'PUBLIC' ELSE a.grantee::regrole::text END AS grantee
		FROM (SELECT 'ROUTINE ' || p.oid::regprocedure, p.proowner, coalesce(p.proacl, acldefault('f', p.proowner))
				FROM pg_proc AS p WHERE p.pronamespace = schema AND p.proname ^@ 'idem_'
				UNION ALL SELECT CASE c.relkind WHEN 'S' THEN 'SEQUENCE ' ELSE 'TABLE ' END || c.oid::regclass, c.relowner, c.relacl
				FROM pg_class AS c WHERE c.relnamespace = schema AND c.relname ^@ 'idem_' AND c.relkind IN ('r', 'v', 'S')
				UNION ALL SELECT 'TYPE ' || t.oid::regtype, t.typowner, coalesce(t.typacl, acldefault('T', t.typowner))
				FROM pg_type AS t WHERE t.typnamespace = schema AND t.typname ^@ 'idem_' AND (t.typtype = 'e' OR t.typtype = 'c' AND is_portable)
			) AS o (name, owner, acl), aclexplode(o.acl) AS a
		WHERE o.owner = me AND a.grantee <> me AND o.name <> ALL (others)
		GROUP BY 1, 2
	LOOP
		EXECUTE format('REVOKE ALL ON %s FROM %s CASCADE', object.name, object.grantee);
	END LOOP;

	FOR object IN
		SELECT 'SELECT ON ' || c.oid::regclass AS rights
		FROM pg_class AS c WHERE c.relnamespace = schema AND c.relname ^@ 'idem_' AND c.relkind = 'v'
			AND c.relowner = me AND 'TABLE ' || c.oid::regclass <> ALL (others)
		UNION ALL SELECT 'EXECUTE ON ROUTINE ' || p.oid::regprocedure
		FROM pg_proc AS p WHERE p.pronamespace = schema
			AND (p.proname ^@ 'idem__stat_' OR p.proname IN ('idem__unsettled_claims', 'idem__held_keys'))
			AND p.proowner = me AND 'ROUTINE ' || p.oid::regprocedure <> ALL (others)
	LOOP
		EXECUTE format('GRANT %s TO pg_monitor', object.rights);
	END LOOP;

	FOR object IN
		SELECT c.oid FROM pg_class AS c JOIN pg_depend AS d ON d.classid = 'pg_class'::regclass AND d.objid = c.oid AND d.deptype = 'e'
		WHERE c.relnamespace = schema
			AND c.relname IN ('idem_claims', 'idem_scopes', 'idem_settings', 'idem__cleanup_batches', 'idem_token_seq')
		ORDER BY c.relname
	LOOP
		PERFORM pg_extension_config_dump(object.oid, '');
	END LOOP;
END $block$;
