-- ----- ids of other types -----

-- Each function that takes a user and a request takes the user as uuid or bigint too, and the request as uuid: as
-- drivers and columns have them.  Such a function only casts the ids; the text of both types has one spelling.  Its
-- body is bound to the function that it calls, it runs with the caller's rights, and the planner inlines it.
--
-- Untyped literals, NULLs and parameters still mean text, which PostgreSQL prefers.  The names of the arguments
-- differ: PostgREST finds a function by them, and refuses to choose among several with the same names.
DO $block$
DECLARE
	schema constant regnamespace := @schema@;
	known constant text[] := current_setting('idem_install.known');
	-- with quote_all_identifiers, too
	ids_of_original constant text := '^"?user_id"? "?text"?, "?request_id"? "?text"?';
	command text;
BEGIN
	FOR command IN
		SELECT format('CREATE OR REPLACE FUNCTION %1$s.%2$I(%3$s) RETURNS %4$s %5$s PARALLEL %6$s COST %7$s %8$s '
				|| CASE p.prorettype WHEN 'record'::regtype THEN 'BEGIN ATOMIC SELECT * FROM %1$s.%2$I(%9$s); END'
					ELSE 'RETURN %1$s.%2$I(%9$s)' END,
			schema, p.proname, regexp_replace(pg_get_function_arguments(p.oid), ids_of_original, other.ids),
			pg_get_function_result(p.oid),
			CASE p.provolatile WHEN 's' THEN 'STABLE' ELSE 'VOLATILE' END,
			CASE p.proparallel WHEN 'r' THEN 'RESTRICTED' ELSE 'UNSAFE' END,
			p.procost, CASE WHEN p.prorows > 0 THEN 'ROWS ' || p.prorows END,
			(SELECT string_agg('$' || n || CASE WHEN n <= 2 THEN '::text' ELSE '' END, ', ' ORDER BY n)
				FROM generate_series(1, p.pronargs) AS n))
		FROM pg_proc AS p, unnest(ARRAY['user_id text, request_uuid uuid',
			'user_uuid uuid, request_id text', 'user_uuid uuid, request_uuid uuid',
			'user_number int8, request_id text', 'user_number int8, request_uuid uuid']) AS other (ids)
		WHERE p.pronamespace = schema AND p.proname ^@ 'idem_' AND NOT p.proname ^@ 'idem__'
			AND p.proowner = quote_ident(current_user)::regrole
			AND (p.tableoid, p.oid, p.ctid)::text <> ALL (known)
			AND pg_get_function_arguments(p.oid) ~ ids_of_original
	LOOP
		EXECUTE command;
	END LOOP;
END $block$;
