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
	original record;
	ids text;
	call text;
	ids_of_original constant text := '^"?user_id"? "?text"?, "?request_id"? "?text"?';		-- with quote_all_identifiers, too
BEGIN
	FOR original IN
		SELECT p.proname, pg_get_function_arguments(p.oid) AS arguments,
			pg_get_function_identity_arguments(p.oid) AS types, pg_get_function_result(p.oid) AS result, p.prorettype, p.procost, p.prorows,
			CASE p.provolatile WHEN 's' THEN 'STABLE' ELSE 'VOLATILE' END AS volatility,
			CASE p.proparallel WHEN 'r' THEN 'RESTRICTED' ELSE 'UNSAFE' END AS parallel,
			(SELECT string_agg(', $' || n::text, '' ORDER BY n) FROM generate_series(3, p.pronargs) AS n) AS further
		FROM pg_proc AS p
		WHERE p.pronamespace = '@extschema@'::regnamespace AND p.proname ^@ 'idem_' AND NOT p.proname ^@ 'idem__'
			AND p.proowner = (SELECT c.relowner FROM pg_class AS c WHERE c.oid = '@extschema@.idem_claims'::regclass)
			AND pg_get_function_arguments(p.oid) ~ ids_of_original
	LOOP
		call := format('@extschema@.%I($1::text, $2::text%s)', original.proname, original.further);
		FOREACH ids IN ARRAY ARRAY['user_id text, request_uuid uuid',
			'user_uuid uuid, request_id text', 'user_uuid uuid, request_uuid uuid',
			'user_number int8, request_id text', 'user_number int8, request_uuid uuid']
		LOOP
			EXECUTE format('CREATE FUNCTION @extschema@.%I(%s) RETURNS %s LANGUAGE sql %s PARALLEL %s COST %s %s %s',
				original.proname, regexp_replace(original.arguments, ids_of_original, ids),
				original.result, original.volatility, original.parallel, original.procost,
				CASE WHEN original.prorows > 0 THEN 'ROWS ' || original.prorows::text END,
				format(CASE original.prorettype WHEN 'record'::regtype THEN 'BEGIN ATOMIC SELECT * FROM %s; END' ELSE 'RETURN %s' END, call));
			EXECUTE format('COMMENT ON FUNCTION @extschema@.%I(%s) IS %L',
				original.proname, regexp_replace(original.types, ids_of_original, ids),
				format('%s(user_id text, request_id text, ...) for ids of other types', original.proname));
		END LOOP;
	END LOOP;
END
$block$;
