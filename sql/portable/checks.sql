-- ----- whether it can be installed -----

-- The name is pasted into function bodies.  CREATE EXTENSION lets it end them before PostgreSQL
-- 15.4 (CVE-2023-39417).  It has put the schema into the search_path.
DO $block$
BEGIN
	IF pg_catalog.current_schema()::pg_catalog.text OPERATOR(pg_catalog.~) E'["$''\\\\]' THEN
		RAISE EXCEPTION 'the name of the schema contains a quote, a dollar sign or a backslash'
			USING ERRCODE = 'invalid_schema_name', HINT = 'Name another one.';
	END IF;
END
$block$;
SET LOCAL search_path = pg_catalog, pg_temp;

DO $block$
DECLARE
	schema constant regnamespace := to_regnamespace('@extschema@');
	installer constant oid := (SELECT r.oid FROM pg_roles AS r WHERE r.rolname = current_user);
	schema_owner oid;
	owner oid := installer;			-- of what is made here
	strangers oid[];				-- neither superusers nor the owner, nor members of those
	other text;
	is_of_tenant boolean;
BEGIN
	SELECT CASE n.nspowner WHEN 'pg_database_owner'::regrole THEN d.datdba ELSE n.nspowner END INTO schema_owner
	FROM pg_namespace AS n, pg_database AS d
	WHERE n.oid = schema AND NOT n.nspname ^@ 'pg_' AND d.datname = current_database();
	IF NOT FOUND THEN
		RAISE EXCEPTION 'there is no schema to install idem into'
			USING ERRCODE = 'invalid_schema_name',
			HINT = 'Create it first, or name another one: psql -v schema=NAME.';
	END IF;
	-- On Citus, whose schema-based sharding keeps each table of a tenant's schema on one node
	IF to_regclass('pg_catalog.pg_dist_schema') IS NOT NULL THEN
		EXECUTE 'SELECT EXISTS (SELECT FROM pg_catalog.pg_dist_schema AS s WHERE s.schemaid = $1)' INTO is_of_tenant USING schema;
		IF is_of_tenant THEN
			RAISE EXCEPTION 'schema % is distributed', schema
				USING ERRCODE = 'feature_not_supported',
				HINT = 'Install idem into another schema: SET citus.enable_schema_based_sharding = off; CREATE SCHEMA idem.';
		END IF;
	END IF;
	IF EXISTS (SELECT FROM pg_extension WHERE extname = 'idem') THEN
		RAISE EXCEPTION 'extension "idem" is installed in this database'
			USING ERRCODE = 'duplicate_object',
			DETAIL = 'It is the C edition of the same functions.',
			HINT = 'Use it, or move it here: sql/idem-move.sql.';
	END IF;
	-- Skip temporary schemas: otherwise every role could block the installation.
	SELECT format('%I', n.nspname) INTO other
	FROM pg_proc AS p JOIN pg_namespace AS n ON n.oid = p.pronamespace
		JOIN pg_class AS c ON c.relnamespace = n.oid AND c.relname = 'idem_claims'
	WHERE p.proname = 'idem_try_claim' AND n.nspname !~ '^pg_(toast_)?temp_' LIMIT 1;
	IF FOUND THEN
		RAISE EXCEPTION 'idem is installed in this database already, in schema %', other
			USING ERRCODE = 'duplicate_object',
			HINT = 'Use that one, since two would not know of each other''s claims; sql/idem-move.sql puts a new version in its place. If you drop it, all claims are lost, and retries are executed again. If it only looks like idem, have its table idem_claims or its function idem_try_claim dropped.';
	END IF;

	-- The functions run as their owner.  In a schema of somebody else that must not be a
	-- superuser: the owner of the schema could rename it, and put another one in its place.
	IF (SELECT r.rolsuper FROM pg_roles AS r WHERE r.oid = installer)
		AND NOT (SELECT r.rolsuper FROM pg_roles AS r WHERE r.oid = schema_owner) THEN
		owner := schema_owner;
	END IF;

	IF (SELECT r.rolsuper FROM pg_roles AS r WHERE r.oid = owner) THEN
		RAISE WARNING 'the functions of idem will run as a superuser: %', owner::regrole
			USING DETAIL = 'They run as their owner.',
			HINT = 'Drop idem, and install it as an ordinary role, or into the schema of an ordinary role.';
	END IF;

	-- sql/idem-move.sql and sql/idem-citus.sql make the same two checks.
	strangers := ARRAY(SELECT r.oid FROM pg_roles AS r
		WHERE NOT EXISTS (SELECT FROM pg_roles AS t WHERE (t.rolsuper OR t.oid = owner) AND pg_has_role(r.oid, t.oid, 'MEMBER')));
	SELECT string_agg(DISTINCT CASE c.grantee WHEN '0'::oid THEN 'PUBLIC' ELSE r.oid::regrole::text END, ', ') INTO other
	FROM (SELECT schema_owner UNION
			SELECT CASE a.grantee WHEN 'pg_database_owner'::regrole THEN d.datdba ELSE a.grantee END
			FROM pg_namespace AS n, aclexplode(n.nspacl) AS a, pg_database AS d
			WHERE n.oid = schema AND a.privilege_type = 'CREATE' AND d.datname = current_database()) AS c (grantee)
		LEFT JOIN pg_roles AS r ON c.grantee <> '0'::oid AND pg_has_role(r.oid, c.grantee, 'MEMBER')
	WHERE c.grantee = '0'::oid OR r.oid = ANY (strangers);
	IF other IS NOT NULL THEN
		RAISE EXCEPTION 'others may create objects in schema %: %', schema, other
			USING ERRCODE = 'object_not_in_prerequisite_state',
			DETAIL = 'The functions of idem run as their owner.',
			HINT = 'Install idem into a schema of its own (CREATE SCHEMA idem); or as the owner of this one, when CREATE on it is revoked from all others.';
	END IF;
	SELECT string_agg(o.name, ', ') INTO other
	FROM (SELECT 'function ' || p.oid::regprocedure FROM pg_proc AS p WHERE p.pronamespace = schema AND p.proowner = ANY (strangers)
			UNION ALL SELECT 'operator ' || o.oid::regoperator FROM pg_operator AS o WHERE o.oprnamespace = schema AND o.oprowner = ANY (strangers)
			UNION ALL SELECT 'type ' || t.oid::regtype FROM pg_type AS t LEFT JOIN pg_class AS c ON c.oid = t.typrelid
				WHERE t.typnamespace = schema AND t.typowner = ANY (strangers)
					AND t.typcategory <> 'A' AND coalesce(c.relkind = 'c', true)		-- skip row types of tables
			ORDER BY 1 LIMIT 10) AS o (name);
	IF other IS NOT NULL THEN
		RAISE EXCEPTION 'others own objects in schema %: %', schema, other
			USING ERRCODE = 'object_not_in_prerequisite_state',
			DETAIL = 'The functions of idem run as their owner.',
			HINT = 'Install idem into a schema of its own: CREATE SCHEMA idem.';
	END IF;

	PERFORM set_config('idem_install.role', current_setting('role'), true);
	IF owner <> installer THEN
		BEGIN
			PERFORM set_config('role', r.rolname, true) FROM pg_roles AS r WHERE r.oid = owner;
		EXCEPTION WHEN insufficient_privilege THEN
			RAISE EXCEPTION 'idem cannot be installed for role %, the owner of schema %', owner::regrole, schema
				USING ERRCODE = 'insufficient_privilege', DETAIL = SQLERRM, HINT = 'Install it as that role.';
		END;
	END IF;
	IF NOT has_schema_privilege(schema, 'CREATE') THEN
		RAISE EXCEPTION 'role % may not create objects in schema %', owner::regrole, schema
			USING ERRCODE = 'insufficient_privilege',
			HINT = format('GRANT CREATE ON SCHEMA %s TO %s; or install idem into a schema of its own.', schema, owner::regrole);
	END IF;
END
$block$;
