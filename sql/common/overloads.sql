-- ----- ids of other types -----

-- Each function that takes a user and a request takes the user as uuid or bigint too, and the
-- request as uuid: as drivers and columns have them.  Such a function only casts the ids; the
-- text of both types has one spelling.  Its body is bound to the function that it calls, it
-- runs with the caller's rights, and the planner replaces its call by that function's.
--
-- Untyped literals, NULLs and parameters still mean text, which PostgreSQL prefers.  The
-- names of the arguments differ, because PostgREST finds a function by them, and refuses to
-- choose among several with the same names.
DO $block$
DECLARE
	schema constant regnamespace := @schema@;
	original record;
	ids text;
	call text;
	-- with quote_all_identifiers, too
	ids_of_original constant text := '^"?user_id"? "?text"?, "?request_id"? "?text"?';
BEGIN
	FOR original IN
		SELECT p.proname, pg_get_function_arguments(p.oid) AS arguments, pg_get_function_identity_arguments(p.oid) AS types,
			pg_get_function_result(p.oid) AS result, p.prorettype, p.procost, p.prorows, p.prosupport,
			CASE p.provolatile WHEN 's' THEN 'STABLE' ELSE 'VOLATILE' END AS volatility,
			CASE p.proparallel WHEN 'r' THEN 'RESTRICTED' ELSE 'UNSAFE' END AS parallel,
			(SELECT string_agg(', $' || n::text, '' ORDER BY n) FROM generate_series(3, p.pronargs) AS n) AS further
		FROM pg_proc AS p
		WHERE p.pronamespace = schema AND p.proname ^@ 'idem_' AND NOT p.proname ^@ 'idem__'
			AND p.proowner = (SELECT r.oid FROM pg_roles AS r WHERE r.rolname = current_user)
			AND format('%s %s', p.oid, p.ctid) <> ALL (current_setting('idem_install.places')::text[])		-- made here
			AND pg_get_function_arguments(p.oid) ~ ids_of_original
	LOOP
		call := format('%s.%I($1::text, $2::text%s)', schema, original.proname, original.further);
		FOREACH ids IN ARRAY ARRAY['user_id text, request_uuid uuid',
			'user_uuid uuid, request_id text', 'user_uuid uuid, request_uuid uuid',
			'user_number int8, request_id text', 'user_number int8, request_uuid uuid']
		LOOP
			EXECUTE format('CREATE OR REPLACE FUNCTION %s.%I(%s) RETURNS %s %s PARALLEL %s COST %s %s %s LANGUAGE %s',
				schema, original.proname, regexp_replace(original.arguments, ids_of_original, ids),
				original.result, original.volatility, original.parallel, original.procost,
				CASE WHEN original.prorows > 0 THEN 'ROWS ' || original.prorows::text END,
				CASE WHEN original.prosupport <> 0 THEN 'SUPPORT ' || original.prosupport::text END,
				CASE WHEN original.prorettype <> 'record'::regtype THEN format('sql RETURN %s', call)
				-- not inlined: a claim is in C then, see src/protocol/ids.c
				WHEN original.prosupport <> 0 THEN format('C AS ''MODULE_PATHNAME'', ''%s_ids''', original.proname)
				ELSE format('sql BEGIN ATOMIC SELECT * FROM %s; END', call) END);
			EXECUTE format('COMMENT ON FUNCTION %s.%I(%s) IS %L',
				schema, original.proname, regexp_replace(original.types, ids_of_original, ids),
				format('%s(user_id text, request_id text, ...) for ids of other types', original.proname));
		END LOOP;
	END LOOP;
END $block$;
