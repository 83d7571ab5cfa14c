-- ----- whether it can be installed -----

-- The name is pasted into function bodies.  CREATE EXTENSION lets it end them before PostgreSQL
-- 15.4 (CVE-2023-39417).  It has put the schema into the search_path.
DO $block$
BEGIN
	IF pg_catalog.current_schema()::pg_catalog.text OPERATOR(pg_catalog.~) E'["$''\\\\]' THEN
		RAISE EXCEPTION 'the name of the schema contains a quote, a dollar sign or a backslash'
			USING ERRCODE = 'invalid_schema_name', HINT = 'Name another one.';
	END IF;
END $block$;
SET LOCAL search_path = pg_catalog, pg_temp;

DO $block$
DECLARE
	schema constant regnamespace := to_regnamespace('@extschema@');
	installer constant oid := (SELECT r.oid FROM pg_roles AS r WHERE r.rolname = current_user);
	-- Set by sql/idem-portable.sql: the same statement installs and upgrades.
	can_upgrade constant boolean := current_setting('idem_install.statement', true) IS NOT DISTINCT FROM 'on';
	schema_owner oid;
	owner oid := installer;			-- of what is made here
	installed_owner oid;			-- of what is installed here; NULL: nothing
	extension name;
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
	WHERE p.proname = 'idem_try_claim' AND n.nspname !~ '^pg_(toast_)?temp_' AND NOT (n.oid = schema AND can_upgrade) LIMIT 1;
	IF FOUND THEN
		RAISE EXCEPTION 'idem is installed in this database already, in schema %', other
			USING ERRCODE = 'duplicate_object',
			HINT = 'Use that one, since two would not know of each other''s claims; the file idem-portable.sql, run for that schema, upgrades it. If you drop it, all claims are lost, and retries are executed again. If it only looks like idem, have its table idem_claims or its function idem_try_claim dropped.';
	END IF;
	SELECT c.relowner, e.extname INTO installed_owner, extension
	FROM pg_class AS c
		LEFT JOIN pg_depend AS d ON d.classid = 'pg_class'::regclass AND d.objid = c.oid AND d.refclassid = 'pg_extension'::regclass AND d.deptype = 'e'
		LEFT JOIN pg_extension AS e ON e.oid = d.refobjid
	WHERE can_upgrade AND c.relnamespace = schema AND c.relname = 'idem_claims'
		AND EXISTS (SELECT FROM pg_proc AS p WHERE p.pronamespace = schema AND p.proname = 'idem_try_claim');
	IF extension IS NOT NULL THEN
		BEGIN				-- which only an extension's own script may do
			PERFORM pg_extension_config_dump(format('%s.idem_claims', schema)::regclass, '');
		EXCEPTION WHEN feature_not_supported OR object_not_in_prerequisite_state OR insufficient_privilege THEN
			RAISE EXCEPTION 'idem is the extension "%" in this database', extension
				USING ERRCODE = 'object_not_in_prerequisite_state',
				HINT = format('Upgrade it as an extension: ALTER EXTENSION %I UPDATE.', extension);
		END;
	END IF;

	-- The functions run as their owner.  In a schema of somebody else that must not be a
	-- superuser: the owner of the schema could rename it, and put another one in its place.
	IF installed_owner IS NOT NULL THEN
		owner := installed_owner;
	ELSIF (SELECT r.rolsuper FROM pg_roles AS r WHERE r.oid = installer)
		AND NOT (SELECT r.rolsuper FROM pg_roles AS r WHERE r.oid = schema_owner) THEN
		owner := schema_owner;
	END IF;

	-- Everybody who may create a schema can give it the name of a superuser, and the owner of the
	-- database can set its search_path.  (CREATE EXTENSION does not tell whether it names a schema.)
	IF (SELECT r.rolsuper FROM pg_roles AS r WHERE r.oid = installer) AND installed_owner NOT IN (installer, schema_owner) THEN
		RAISE EXCEPTION 'idem in schema % belongs to role %, which does not own the schema', schema, owner::regrole
			USING ERRCODE = 'insufficient_privilege', HINT = 'Upgrade it as that role; or have it dropped, if it only looks like idem.';
	ELSIF owner <> installer AND (installed_owner IS NULL OR (SELECT r.rolsuper FROM pg_roles AS r WHERE r.oid = installer))
		AND current_setting('idem_install.unnamed', true) IS NOT DISTINCT FROM 'on' THEN
		RAISE EXCEPTION 'schema % belongs to role %, and idem would, too', schema, owner::regrole
			USING ERRCODE = 'insufficient_privilege',
			DETAIL = 'A search_path leads there that was not set in this session, or that has "$user".',
			HINT = format('If you mean that schema, name it: SET LOCAL search_path = %s.', schema);
	ELSIF owner <> installer AND NOT can_upgrade AND (SELECT n.nspname FROM pg_namespace AS n WHERE n.oid = schema) = current_user THEN
		RAISE WARNING 'idem will belong to role %, the owner of schema %', owner::regrole, schema
			USING HINT = 'If you did not name this schema, drop idem, and name another one: CREATE EXTENSION ... SCHEMA.';
	END IF;

	PERFORM set_config('idem_install.role', current_setting('role'), true),
		set_config('idem_install.upgrades', CASE WHEN installed_owner IS NOT NULL THEN 'on' END, true);
	IF owner <> installer THEN
		BEGIN
			PERFORM set_config('role', r.rolname, true) FROM pg_roles AS r WHERE r.oid = owner;
		EXCEPTION WHEN insufficient_privilege THEN
			RAISE EXCEPTION 'idem cannot be installed for role %, the owner of %', owner::regrole,
					CASE WHEN installed_owner IS NULL THEN 'schema ' || schema ELSE 'idem in schema ' || schema END
				USING ERRCODE = 'insufficient_privilege', DETAIL = SQLERRM, HINT = 'Install it as that role.';
		END;
	END IF;
END $block$;
