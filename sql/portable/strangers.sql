-- ----- whether others can interfere -----

-- sql/idem-move.sql and sql/idem-citus.sql make this check, too.  An upgrade makes it once it has its locks: a
-- transaction that it waited for may have created objects.
DO $block$
DECLARE
	schema constant regnamespace := '@extschema@'::regnamespace;
	owner constant regrole := quote_ident(current_user);
	upgrades constant boolean := coalesce(current_setting('idem_install.upgrades', true), '') <> '';
	strangers constant oid[] := ARRAY(SELECT r.oid FROM pg_roles AS r WHERE NOT EXISTS (
		SELECT FROM pg_roles AS t WHERE (t.rolsuper OR t.oid = owner) AND pg_has_role(r.oid, t.oid, 'MEMBER')));
	creators text;
	objects text;
BEGIN
	-- pg_has_role() knows that the owner of the database is a member of pg_database_owner.
	SELECT string_agg(DISTINCT CASE c.grantee WHEN '0'::oid THEN 'PUBLIC' ELSE s.oid::regrole::text END, ', ')
	INTO creators
	FROM (SELECT n.nspowner FROM pg_namespace AS n WHERE n.oid = schema
			UNION SELECT a.grantee FROM pg_namespace AS n, aclexplode(n.nspacl) AS a
			WHERE n.oid = schema AND a.privilege_type = 'CREATE') AS c (grantee)
		LEFT JOIN unnest(strangers) AS s (oid)
			ON s.oid <> 'pg_database_owner'::regrole AND pg_has_role(s.oid, c.grantee, 'MEMBER')
	WHERE c.grantee = '0'::oid OR s.oid IS NOT NULL;
	-- In an upgrade nothing with a name of ours may be another role's, nor a domain, whose check could run.
	SELECT string_agg(o.object, ', ') INTO objects
	FROM (SELECT 'function ' || p.oid::regprocedure FROM pg_proc AS p WHERE p.pronamespace = schema
				AND (p.proowner = ANY (strangers) OR upgrades AND p.proowner <> owner AND p.proname ^@ 'idem_')
			UNION ALL SELECT 'operator ' || o.oid::regoperator FROM pg_operator AS o
			WHERE o.oprnamespace = schema AND o.oprowner = ANY (strangers)
			UNION ALL SELECT 'type ' || t.oid::regtype FROM pg_type AS t LEFT JOIN pg_class AS c ON c.oid = t.typrelid
			WHERE t.typnamespace = schema AND (t.typtype = 'd' OR t.typcategory <> 'A') AND coalesce(c.relkind = 'c', true)	-- no table's
				AND (t.typowner = ANY (strangers)
					OR upgrades AND t.typname ^@ 'idem_' AND (t.typowner <> owner OR t.typtype = 'd'))
			UNION ALL SELECT 'relation ' || c.oid::regclass FROM pg_class AS c
			WHERE upgrades AND c.relnamespace = schema AND c.relowner <> owner AND c.relname ^@ 'idem_'
			ORDER BY 1 LIMIT 10) AS o (object);
	IF coalesce(creators, objects) IS NOT NULL THEN
		RAISE EXCEPTION 'others % objects in schema %: %',
				CASE WHEN creators IS NULL THEN 'own' ELSE 'may create' END, schema, coalesce(creators, objects)
			USING ERRCODE = 'object_not_in_prerequisite_state', DETAIL = 'The functions of idem run as their owner.',
			HINT = CASE WHEN to_regclass(format('%s.idem_claims', schema)) IS NULL
					THEN 'Install idem into a schema of its own: CREATE SCHEMA idem.'
				WHEN creators IS NULL THEN 'Have them dropped, or moved to another schema: ALTER ... SET SCHEMA.'
				ELSE format('Revoke CREATE on the schema from them. Or ALTER SCHEMA %s OWNER TO %s.', schema, owner)
			END;
	ELSIF NOT has_schema_privilege(schema, 'CREATE') THEN
		RAISE EXCEPTION 'role % may not create objects in schema %', owner, schema
			USING ERRCODE = 'insufficient_privilege',
			HINT = format('GRANT CREATE ON SCHEMA %s TO %s; or install idem into a schema of its own.', schema, owner);
	END IF;
END $block$;
