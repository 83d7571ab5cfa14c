-- A claim refuses to be evaluated twice for one row, whatever the types of its ids.  Where it returns a row, it is not
-- inlined, but in C: see src/protocol/ids.c.
DO $block$
DECLARE
	schema constant regnamespace := @schema@;
	known constant text[] := current_setting('idem_install.known');
	command text;
BEGIN
	FOR command IN
		SELECT CASE WHEN p.prorettype <> 'record'::regtype
			THEN format('ALTER FUNCTION %s SUPPORT %s', p.oid::regprocedure, o.support)
			ELSE format('CREATE OR REPLACE FUNCTION %s.%I(%s) RETURNS %s COST %s %s SUPPORT %s LANGUAGE C '
					'AS ''MODULE_PATHNAME'', ''%s_ids''',
				schema, p.proname, pg_get_function_arguments(p.oid), pg_get_function_result(p.oid), p.procost,
				CASE WHEN p.prorows > 0 THEN 'ROWS ' || p.prorows END, o.support, p.proname) END
		FROM (SELECT p.proname, p.prosupport FROM pg_proc AS p
			WHERE p.pronamespace = schema AND p.prosupport <> 0 AND p.proargnames[1] = 'user_id') AS o (name, support)
			JOIN pg_proc AS p ON p.pronamespace = schema AND p.proname = o.name AND p.prosupport = 0
		WHERE p.proowner = quote_ident(current_user)::regrole
			AND (p.tableoid, p.oid, p.ctid)::text <> ALL (known)
	LOOP
		EXECUTE command;
	END LOOP;
END $block$;
