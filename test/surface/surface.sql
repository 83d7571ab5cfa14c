-- The public surface of the edition that is installed, one fact a line, for psql -XAtq. What has
-- two underscores (idem__...) is internal and left out. The roles surface_app and surface_operator
-- have what idem_grant() gives.
DO $$ BEGIN PERFORM set_config('search_path', relnamespace::regnamespace::text, false) FROM pg_class WHERE relname = 'idem_claims'; END $$;

CREATE TEMP VIEW relations AS
SELECT oid, relname, CASE relkind WHEN 'r' THEN 'table' WHEN 'v' THEN 'view' ELSE 'sequence' END AS kind, relacl
FROM pg_class WHERE relnamespace = current_schema()::regnamespace AND relkind IN ('r', 'v', 'S') AND relname !~ '^idem__';

CREATE TEMP VIEW routines AS
SELECT oid, proname, proacl, CASE prokind WHEN 'p' THEN 'procedure' ELSE 'function' END AS kind, prorettype, provolatile, proisstrict, proparallel,
	format('%s(%s)', proname, oidvectortypes(proargtypes)) AS signature
FROM pg_proc WHERE pronamespace = current_schema()::regnamespace AND proname !~ '^idem__';

SELECT line FROM (
	SELECT format('%s %s(%s)', kind, proname, pg_get_function_arguments(oid))
		|| CASE kind WHEN 'function' THEN format(' RETURNS %s %s PARALLEL %s', pg_get_function_result(oid),
			CASE provolatile WHEN 'i' THEN 'IMMUTABLE' WHEN 's' THEN 'STABLE' ELSE 'VOLATILE' END || CASE WHEN proisstrict THEN ' STRICT' ELSE '' END,
			CASE proparallel WHEN 's' THEN 'SAFE' WHEN 'r' THEN 'RESTRICTED' ELSE 'UNSAFE' END) ELSE '' END
	FROM routines

	UNION ALL
	SELECT format('%s %s.%s %s%s%s', r.kind, r.relname, a.attname, format_type(a.atttypid, a.atttypmod),
		CASE WHEN a.attnotnull THEN ' NOT NULL' END, ' DEFAULT ' || pg_get_expr(d.adbin, d.adrelid))
	FROM relations AS r JOIN pg_attribute AS a ON a.attrelid = r.oid AND a.attnum > 0 AND NOT a.attisdropped
		LEFT JOIN pg_attrdef AS d ON d.adrelid = r.oid AND d.adnum = a.attnum
	WHERE r.kind <> 'sequence'
	UNION ALL
	SELECT format('%s %s columns: %s', r.kind, r.relname, string_agg(a.attname, ', ' ORDER BY a.attnum))
	FROM relations AS r JOIN pg_attribute AS a ON a.attrelid = r.oid AND a.attnum > 0 AND NOT a.attisdropped
	WHERE r.kind <> 'sequence' GROUP BY r.kind, r.relname
	UNION ALL
	SELECT format('sequence %s', relname) FROM relations WHERE kind = 'sequence'
	UNION ALL
	SELECT format('table %s constraint %s %s', r.relname, c.conname, pg_get_constraintdef(c.oid))
	FROM relations AS r JOIN pg_constraint AS c ON c.conrelid = r.oid WHERE c.contype <> 'n'
	UNION ALL
	SELECT format('table %s index %s', r.relname, i.indexrelid::regclass)
	FROM relations AS r JOIN pg_index AS i ON i.indrelid = r.oid
	UNION ALL
	SELECT format('table %s trigger %s', r.relname, t.tgname)
	FROM relations AS r JOIN pg_trigger AS t ON t.tgrelid = r.oid WHERE NOT t.tgisinternal AND t.tgname !~ '^idem__'

	UNION ALL
	SELECT format('type %s ENUM (%s)', t.typname, string_agg(quote_literal(e.enumlabel), ', ' ORDER BY e.enumsortorder))
	FROM pg_type AS t JOIN pg_enum AS e ON e.enumtypid = t.oid
	WHERE t.typnamespace = current_schema()::regnamespace AND t.typname !~ '^idem__' GROUP BY t.oid, t.typname
	UNION ALL
	SELECT format('type %s %s', typname, CASE typtype WHEN 'd' THEN 'DOMAIN ' || format_type(typbasetype, typtypmod) ELSE 'COMPOSITE' END)
	FROM pg_type WHERE typnamespace = current_schema()::regnamespace AND typname !~ '^_?idem__'
		AND (typtype = 'd' OR typtype = 'c' AND typrelid IN (SELECT oid FROM pg_class WHERE relkind = 'c'))

	UNION ALL
	SELECT format('setting %s %s%s %s, default %s%s%s', name, vartype, ' in ' || unit, context, quote_literal(boot_val),
		', ' || min_val || ' to ' || max_val, ', one of ' || array_to_string(enumvals, ', '))
	FROM pg_settings WHERE name LIKE 'idem.%'

	UNION ALL
	SELECT format('metric %s %s {%s}%s: %s', name, type, string_agg(DISTINCT label, ', '), ' le ' || string_agg(DISTINCT labels ->> 'le', ' '), help)
	FROM idem_metrics, jsonb_object_keys(labels) AS label GROUP BY name, type, help

	UNION ALL
	SELECT format('right of %s: %s ON %s', CASE a.grantee WHEN 0 THEN 'PUBLIC' ELSE pg_get_userbyid(a.grantee)::text END, a.privilege_type, o.object)
	FROM (SELECT format('%s %s', kind, relname) AS object, relacl AS acl FROM relations
		UNION ALL
		SELECT format('%s %s', kind, signature), COALESCE(proacl, acldefault('f', 10)) FROM routines
		UNION ALL
		SELECT format('%s %s(%s)', r.kind, r.relname, a.attname), a.attacl FROM relations AS r JOIN pg_attribute AS a ON a.attrelid = r.oid
		UNION ALL
		SELECT format('type %s', typname), COALESCE(typacl, acldefault('T', 10)) FROM pg_type
		WHERE typnamespace = current_schema()::regnamespace AND typtype = 'e' AND typname !~ '^idem__'
	) AS o, aclexplode(o.acl) AS a
	WHERE a.grantee = 0 OR pg_get_userbyid(a.grantee) IN ('surface_app', 'surface_operator', 'pg_monitor')
) AS surface (line) ORDER BY line COLLATE "C";
