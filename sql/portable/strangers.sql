-- ----- whether others can interfere -----

-- An upgrade looks once it has its locks: a transaction that it waited for may have created objects.
DO $block$
DECLARE
	schema constant regnamespace := to_regnamespace('@extschema@');
	owner constant oid := (SELECT r.oid FROM pg_roles AS r WHERE r.rolname = current_user);
	upgrades constant boolean := current_setting('idem_install.upgrades') <> '';
	strangers oid[];				-- neither superusers nor the owner, nor members of those
	other text;
BEGIN
	IF (SELECT r.rolsuper FROM pg_roles AS r WHERE r.oid = owner) THEN
		RAISE WARNING 'the functions of idem will run as a superuser: %', owner::regrole
			USING DETAIL = 'They run as their owner.',
			HINT = 'Drop idem, and install it as an ordinary role, or into the schema of an ordinary role.';
	END IF;

	-- sql/idem-move.sql and sql/idem-citus.sql make the same two checks.
	strangers := ARRAY(SELECT r.oid FROM pg_roles AS r
		WHERE NOT EXISTS (SELECT FROM pg_roles AS t WHERE (t.rolsuper OR t.oid = owner) AND pg_has_role(r.oid, t.oid, 'MEMBER')));
	SELECT string_agg(DISTINCT CASE c.grantee WHEN '0'::oid THEN 'PUBLIC' ELSE r.oid::regrole::text END, ', ') INTO other
	FROM (SELECT CASE a.grantee WHEN 'pg_database_owner'::regrole THEN d.datdba ELSE a.grantee END
			FROM pg_database AS d, pg_namespace AS n, LATERAL (
				SELECT n.nspowner UNION SELECT x.grantee FROM aclexplode(n.nspacl) AS x WHERE x.privilege_type = 'CREATE') AS a (grantee)
			WHERE n.oid = schema AND d.datname = current_database()) AS c (grantee)
		LEFT JOIN pg_roles AS r ON c.grantee <> '0'::oid AND pg_has_role(r.oid, c.grantee, 'MEMBER')
	WHERE c.grantee = '0'::oid OR r.oid = ANY (strangers);
	IF other IS NOT NULL THEN
		RAISE EXCEPTION 'others may create objects in schema %: %', schema, other
			USING ERRCODE = 'object_not_in_prerequisite_state',
			DETAIL = 'The functions of idem run as their owner.',
			HINT = CASE WHEN upgrades THEN 'Revoke CREATE on the schema from them; if it is the owner, give the schema to the owner of idem: ALTER SCHEMA ... OWNER TO.'
				ELSE 'Install idem into a schema of its own (CREATE SCHEMA idem); or as the owner of this one, when CREATE on it is revoked from all others.' END;
	END IF;
	SELECT string_agg(o.name, ', ') INTO other
	FROM (SELECT 'function ' || p.oid::regprocedure FROM pg_proc AS p
				WHERE p.pronamespace = schema AND (p.proowner = ANY (strangers) OR upgrades AND p.proowner <> owner AND p.proname ^@ 'idem_')
			UNION ALL SELECT 'operator ' || o.oid::regoperator FROM pg_operator AS o WHERE o.oprnamespace = schema AND o.oprowner = ANY (strangers)
			UNION ALL SELECT 'type ' || t.oid::regtype FROM pg_type AS t LEFT JOIN pg_class AS c ON c.oid = t.typrelid
				WHERE t.typnamespace = schema AND t.typcategory <> 'A' AND coalesce(c.relkind = 'c', true)		-- skip row types of tables
					AND (t.typowner = ANY (strangers) OR upgrades AND t.typname ^@ 'idem_' AND (t.typowner <> owner OR t.typtype = 'd'))
			UNION ALL SELECT 'relation ' || c.oid::regclass FROM pg_class AS c
				WHERE upgrades AND c.relnamespace = schema AND c.relowner <> owner AND c.relname ^@ 'idem_'
			ORDER BY 1 LIMIT 10) AS o (name);
	IF other IS NOT NULL THEN
		RAISE EXCEPTION 'others own objects in schema %: %', schema, other
			USING ERRCODE = 'object_not_in_prerequisite_state',
			DETAIL = 'The functions of idem run as their owner.',
			HINT = CASE WHEN upgrades THEN 'Have them dropped, or moved to another schema: ALTER ... SET SCHEMA.'
				ELSE 'Install idem into a schema of its own: CREATE SCHEMA idem.' END;
	END IF;

	IF NOT has_schema_privilege(schema, 'CREATE') THEN
		RAISE EXCEPTION 'role % may not create objects in schema %', owner::regrole, schema
			USING ERRCODE = 'insufficient_privilege',
			HINT = format('GRANT CREATE ON SCHEMA %s TO %s; or install idem into a schema of its own.', schema, owner::regrole);
	END IF;
END $block$;
