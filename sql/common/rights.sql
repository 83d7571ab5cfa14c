-- ----- rights -----

-- Runs with the caller's rights.  The owner of idem and a superuser may grant all that is granted here.
CREATE FUNCTION @extschema@.idem__change_rights(role regrole, privileges text, command text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $function$
DECLARE
	app constant text := '^idem_(call|_call_begin|_call_settle|claim|try_claim|lease|claim_many|complete|fail|extend|release|fence'
		'|heal|result|outcome|status|lookup|fingerprint|skip_duplicates|version)$';
	operator constant text := '^idem_(version|result|outcome|status|lookup|lapsed|forget|_?erase|heal|cleanup'
		'|cleanup_all|_cleanup_step|_require_commit|start_worker|stat_reset|_stat_.*|_unsettled_claims|_held_keys)$';
	views constant text := '^idem_(stat_(cleanup|claims|scopes|table)|metrics|unsettled|holders)$';
	-- all but the token, which only its holder may know, and guarded_since, which a trigger sets
	columns constant text :=
		'expires_at, lease_until, state, request_id, user_id, scope, fingerprint, result, progress';
	policy constant text := 'scope, ttl, lease, lease_max, failed, lapsed, expired, key_time, result_max_bytes';
	schema constant regnamespace := @schema@;
	owner constant oid := (SELECT c.relowner FROM pg_class AS c
		WHERE c.relnamespace = schema AND c.relname = 'idem_claims');
	routines constant oid[] := ARRAY(SELECT p.oid FROM pg_proc AS p
		WHERE p.pronamespace = schema AND p.proname ~ CASE privileges WHEN 'app' THEN app ELSE operator END
			AND p.proowner = owner);		-- not what somebody else has added to idem
	rights text;
	grantors text;
BEGIN
	IF (privileges IN ('app', 'operator') AND EXISTS (SELECT FROM pg_roles AS r WHERE r.oid = role)) IS NOT TRUE THEN
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

	FOR rights IN
		SELECT 'EXECUTE ON ROUTINE ' || p.oid::regprocedure FROM unnest(routines) AS p (oid)
		UNION ALL SELECT format('USAGE ON TYPE %1$s.idem_state, %1$s.idem_outcome', schema)
		UNION ALL SELECT format(o.rights, schema, columns, policy) FROM (VALUES
			('SELECT (%2$s) ON %1$s.idem_claims'),
			('SELECT, INSERT (%3$s), UPDATE (%3$s), DELETE ON %1$s.idem_scopes')) AS o (rights)
		WHERE privileges = 'operator'
		UNION ALL SELECT CASE c.relkind WHEN 'v' THEN 'SELECT ON ' ELSE 'SELECT, UPDATE ON ' END || c.oid::regclass
		FROM pg_class AS c WHERE c.relnamespace = schema AND c.relowner = owner AND privileges = 'operator'
			AND (c.relname ~ views AND c.relkind = 'v' OR c.relname = 'idem_settings')
	LOOP
		EXECUTE format(command, rights, role);
	END LOOP;

	-- REVOKE only revokes what the current role granted, and says nothing about the rest.
	SELECT string_agg(DISTINCT a.grantor::regrole::text, ', ') INTO grantors
	FROM pg_proc AS p, aclexplode(p.proacl) AS a
	WHERE command LIKE 'REVOKE%' AND p.oid = ANY (routines) AND a.grantee = role;
	IF grantors IS NOT NULL THEN
		RAISE WARNING 'role % keeps rights that % granted', role, grantors
			USING HINT = 'Run idem_revoke() as the role that granted them.';
	END IF;
END $function$;

CREATE FUNCTION @extschema@.idem_grant(role regrole, privileges text) RETURNS void LANGUAGE sql BEGIN ATOMIC
	SELECT @extschema@.idem__change_rights(role, privileges, 'GRANT %s TO %s'::text);
END;

CREATE FUNCTION @extschema@.idem_revoke(role regrole, privileges text) RETURNS void LANGUAGE sql BEGIN ATOMIC
	SELECT @extschema@.idem__change_rights(role, privileges, 'REVOKE %s FROM %s'::text);
END;

-- By now, default privileges (ALTER DEFAULT PRIVILEGES) may have granted rights to anybody, and PostgreSQL's own
-- defaults have granted some to PUBLIC.  First revoke everything from all roles but the owner.  Then pg_monitor gets
-- the views, and the functions in them: those are called with the rights of the role that reads the view.  If this is
-- an extension, under whatever name, the rows of some tables belong in a dump.
DO $block$
DECLARE
	schema constant regnamespace := @schema@;
	me constant oid := quote_ident(current_user)::regrole;
	known constant text[] := current_setting('idem_install.known');
	command text;
BEGIN
	FOR command IN
		WITH made (name, is_read, acl) AS (
			SELECT 'ROUTINE ' || p.oid::regprocedure, p.proname ~ '^idem__(stat_.*|unsettled_claims|held_keys)$',
				coalesce(p.proacl, acldefault('f', p.proowner))
			FROM pg_proc AS p WHERE p.pronamespace = schema AND p.proname ^@ 'idem_' AND p.proowner = me
				AND (p.tableoid, p.oid)::text <> ALL (known)
			UNION ALL SELECT CASE c.relkind WHEN 'S' THEN 'SEQUENCE ' ELSE 'TABLE ' END || c.oid::regclass,
				c.relkind = 'v', c.relacl
			FROM pg_class AS c WHERE c.relnamespace = schema AND c.relname ^@ 'idem_' AND c.relowner = me
				AND c.relkind IN ('r', 'v', 'S') AND (c.tableoid, c.oid)::text <> ALL (known)
			UNION ALL SELECT 'TYPE ' || t.oid::regtype, false, coalesce(t.typacl, acldefault('T', t.typowner))
			FROM pg_type AS t WHERE t.typnamespace = schema AND t.typname ^@ 'idem_' AND t.typowner = me
				AND t.typtype IN (@types@) AND (t.tableoid, t.oid)::text <> ALL (known))
		SELECT DISTINCT format('REVOKE ALL ON %s FROM %s CASCADE', m.name,
			CASE a.grantee WHEN '0'::oid THEN 'PUBLIC' ELSE a.grantee::regrole::text END)
		FROM made AS m, aclexplode(m.acl) AS a WHERE a.grantee <> me
		UNION ALL SELECT format('GRANT %s ON %s TO pg_monitor',
			CASE WHEN m.name ^@ 'ROUTINE' THEN 'EXECUTE' ELSE 'SELECT' END, m.name)
		FROM made AS m WHERE m.is_read
		UNION ALL SELECT format('SELECT pg_extension_config_dump(%L, '''')', c.oid::regclass)
		FROM pg_class AS c JOIN pg_depend AS d ON d.classid = c.tableoid AND d.objid = c.oid AND d.deptype = 'e'
		WHERE c.relnamespace = schema
			AND c.relname IN ('idem_claims', 'idem_scopes', 'idem_settings', 'idem__cleanup_batches', 'idem_token_seq')
		ORDER BY 1 DESC			-- REVOKE before GRANT
	LOOP
		EXECUTE command;
	END LOOP;
END $block$;
