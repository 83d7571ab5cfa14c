-- ----- whether it can be installed -----

-- The name is pasted into what follows, and CREATE EXTENSION lets it end strings before PostgreSQL 15.4
-- (CVE-2023-39417): so this comes first, when the schema is still the first one in the search_path.
DO $block$
DECLARE
	schema constant pg_catalog.text := pg_catalog.current_schema();
BEGIN
	IF schema OPERATOR(pg_catalog.~) E'["$''\\\\]' THEN
		RAISE EXCEPTION 'the name of the schema contains a quote, a dollar sign or a backslash'
			USING ERRCODE = 'invalid_schema_name', HINT = 'Name another one.';
	ELSIF schema IS NULL OR schema OPERATOR(pg_catalog.^@) 'pg_' THEN
		RAISE EXCEPTION 'there is no schema to install idem into' USING ERRCODE = 'invalid_schema_name',
			HINT = 'Create it first, or name another one: SET LOCAL search_path = NAME, or psql -v schema=NAME.';
	END IF;
END $block$;
SET LOCAL search_path = pg_catalog, pg_temp;

DO $block$
DECLARE
	schema constant regnamespace := '@extschema@'::regnamespace;
	-- run by sql/idem-portable.sql, which upgrades, too; where no schema was named; by ALTER EXTENSION UPDATE
	is_statement constant boolean := current_setting('idem_install.statement', true) IS NOT DISTINCT FROM 'on';
	is_unnamed constant boolean := current_setting('idem_install.unnamed', true) IS NOT DISTINCT FROM 'on';
	is_update constant boolean := current_setting('idem_install.update', true) IS NOT DISTINCT FROM 'on';
	is_of_tenant boolean := false;
	it record;
	refusal record;
BEGIN
	IF to_regclass('pg_catalog.pg_dist_schema') IS NOT NULL THEN		-- Citus
		EXECUTE 'SELECT $1 IN (SELECT schemaid FROM pg_catalog.pg_dist_schema)' INTO is_of_tenant USING schema::oid;
	END IF;
	-- The functions run as their owner.  In a schema of somebody else that must not be a superuser: the owner of the
	-- schema could rename it, and put another one in its place.
	SELECT i.oid::regrole AS installer, i.rolsuper AS is_superuser, s.oid AS schema_owner, c.relowner AS was_owner,
		coalesce(c.relowner, CASE WHEN i.rolsuper AND NOT s.rolsuper THEN s.oid ELSE i.oid END)::regrole AS owner,
		(SELECT e.extname FROM pg_depend AS x JOIN pg_extension AS e ON e.oid = x.refobjid
			WHERE x.classid = c.tableoid AND x.objid = c.oid AND x.deptype = 'e') AS extension,
		-- Not in temporary schemas: otherwise every role could block the installation.
		(SELECT min(t.relnamespace::regnamespace::text)
			FROM pg_class AS t JOIN pg_proc AS p ON p.pronamespace = t.relnamespace
				JOIN pg_namespace AS x ON x.oid = t.relnamespace
			WHERE t.relname = 'idem_claims' AND p.proname = 'idem_try_claim' AND t.oid IS DISTINCT FROM c.oid
				AND NOT x.nspname ^@ 'pg_') AS other
	INTO it
	FROM pg_namespace AS n JOIN pg_database AS d ON d.datname = current_database()
		JOIN pg_roles AS s ON s.oid = CASE n.nspowner WHEN 'pg_database_owner'::regrole THEN d.datdba ELSE nspowner END
		JOIN pg_roles AS i ON i.rolname = current_user
		LEFT JOIN pg_class AS c ON is_statement AND c.relnamespace = n.oid AND c.relname = 'idem_claims'
			AND EXISTS (SELECT FROM pg_proc AS p WHERE p.pronamespace = n.oid AND p.proname = 'idem_try_claim')
	WHERE n.oid = schema;

	-- Everybody who may create a schema can give it the name of a superuser, and the owner of the database can set its
	-- search_path: a superuser has to name what idem will belong to.  (CREATE EXTENSION does not tell whether he did.)
	SELECT r.* INTO refusal FROM (VALUES
		(is_of_tenant, 'feature_not_supported', format('schema %s is distributed', schema), NULL,
			'Install idem into another schema: SET citus.enable_schema_based_sharding = off; CREATE SCHEMA idem.'),
		(EXISTS (SELECT FROM pg_extension AS e WHERE e.extname = 'idem'), 'duplicate_object',
			'extension "idem" is installed in this database', 'It is the C edition of the same functions.',
			'Use it, or move it here: sql/idem-move.sql.'),
		(it.other IS NOT NULL, 'duplicate_object', 'idem is installed in this database already, in schema ' || it.other,
			'Two would not know of each other''s claims. Without those of the other one, retries are executed again.',
			'Use that one, or upgrade it: run idem-portable.sql for that schema. '
			'If it only looks like idem, have its table idem_claims or its function idem_try_claim dropped.'),
		(it.extension IS NOT NULL AND NOT is_update, 'object_not_in_prerequisite_state',
			format('idem is the extension "%s" in this database', it.extension), NULL,
			'Upgrade it as an extension: ALTER EXTENSION ' || quote_ident(it.extension) || ' UPDATE.'),
		(EXISTS (SELECT FROM pg_class AS c
				WHERE c.relnamespace = schema AND c.relname = 'idem__token_source' AND c.relowner = it.was_owner),
			'feature_not_supported', 'idem is distributed over a cluster', NULL, 'It cannot be upgraded.'),
		(it.is_superuser AND it.was_owner NOT IN (it.installer, it.schema_owner), 'insufficient_privilege',
			format('idem in schema %s belongs to role %s, which does not own the schema', schema, it.owner), NULL,
			'Upgrade it as that role; or have it dropped, if it only looks like idem.'),
		(it.is_superuser AND it.owner <> it.installer AND is_unnamed, 'insufficient_privilege',
			format('schema %s belongs to role %s, and idem would, too', schema, it.owner),
			'A search_path leads there that was not set in this session, or that has "$user".',
			format('If you mean that schema, name it: SET LOCAL search_path = %s.', schema)),
		(it.owner <> it.installer AND NOT pg_has_role(session_user, it.owner,
				CASE WHEN current_setting('server_version_num')::int4 < 160000 THEN 'MEMBER' ELSE 'SET' END),
			'insufficient_privilege', format('idem cannot be installed for role %s, the owner of %sschema %s', it.owner,
				CASE WHEN it.was_owner IS NULL THEN '' ELSE 'idem in ' END, schema), NULL,
			'Install or upgrade it as that role.')
	) AS r (applies, state, message, detail, hint) WHERE r.applies LIMIT 1;
	IF FOUND THEN
		RAISE EXCEPTION USING ERRCODE = refusal.state, MESSAGE = refusal.message,
			DETAIL = coalesce(refusal.detail, 'Nothing was changed.'), HINT = refusal.hint;
	ELSIF it.owner <> it.installer AND NOT is_statement AND schema::text = quote_ident(current_user) THEN
		RAISE WARNING 'idem will belong to role %, the owner of schema %', it.owner, schema
			USING HINT = 'If you did not name this schema, drop idem; then name one: CREATE EXTENSION ... SCHEMA.';
	ELSIF it.owner = it.installer AND it.is_superuser AND it.was_owner IS NULL THEN
		RAISE WARNING 'the functions of idem will run as a superuser: %', it.owner
			USING DETAIL = 'They run as their owner.',
			HINT = 'Drop idem, and install it as an ordinary role, or into the schema of an ordinary role.';
	END IF;
	PERFORM set_config('idem_install.role', current_setting('role'), true),
		set_config('idem_install.upgrades', CASE WHEN it.was_owner IS NOT NULL THEN 'on' END, true),
		set_config('role', CASE it.owner WHEN it.installer THEN current_setting('role')
			ELSE pg_get_userbyid(it.owner) END, true);
END $block$;
