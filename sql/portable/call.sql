-- ----- calling -----

-- Claims a request for idem_call() and for the trigger of a sink.
CREATE FUNCTION @extschema@.idem__claim_marker(key @extschema@.idem__key, command text, fingerprint bytea, wait interval)
RETURNS @extschema@.idem__answer
LANGUAGE plpgsql AS $$
DECLARE
	begun constant timestamptz := clock_timestamp();
	answer @extschema@.idem__answer;
BEGIN
	BEGIN
		answer := @extschema@.idem__claim_at_once(key.user_id::text, key.request_id::text, key.scope::text, fingerprint, wait);
	EXCEPTION WHEN lock_not_available OR SQLSTATE 'ID001' THEN
		NULL;
	END;
	IF answer.outcome IS NULL THEN
		answer := @extschema@.idem__claim_key(command, key, fingerprint, @extschema@.idem__deadline(wait) - (clock_timestamp() - begun),
			NULL::interval, NULL::jsonb, false, true);
	END IF;
	RETURN answer;
END $$;

-- The query that runs the function for idem_call(); NULL if it is gone.  Raises an error if it cannot be run, or has
-- not these arguments.  types: of its arguments; NULL: a pseudo-type.
--
-- It passes arguments in exactly the declared types, by their names (of a VARIADIC function in their order: by names
-- SQL finds it only with all).  SQL fills in the defaults.  Their text must not be parsed here: NULLIF and IS DISTINCT
-- FROM are printed without the schema of their operator, so a stranger's operator would run as the caller.
CREATE FUNCTION @extschema@.idem__call_query(routine oid, full_name text, types text[], arguments jsonb) RETURNS text
LANGUAGE plpgsql AS $$
DECLARE
	target record;
	unknown text;
BEGIN
	SELECT pg_catalog.format('%s.%I', p.pronamespace::regnamespace, p.proname) AS name, p.prorettype,
		p.provariadic <> '0'::oid AND a.passes < a.last_place AS has_gap, a.*,
		CASE WHEN p.prokind = 'p' THEN 'is a procedure' WHEN p.prokind = 'a' THEN 'is an aggregate function'
			WHEN p.prokind = 'w' THEN 'is a window function' WHEN p.proretset THEN 'returns a set'
			WHEN p.prorettype IN ('trigger'::regtype, 'event_trigger'::regtype) THEN 'is a trigger function'
			-- A function that returns another pseudo-type but void and record has an argument of one, too.
			WHEN p.prorettype = ANY ('{cstring,anyelement,anyarray,anynonarray,anyenum,anyrange,anycompatible}'::regtype[]::oid[])
				THEN 'returns the pseudo-type ' || p.prorettype::regtype END AS kind
	INTO target
	FROM pg_proc AS p, LATERAL (
		SELECT coalesce(array_agg(u.name), '{}') AS names, count(*) FILTER (WHERE arguments ? u.name) AS passes,
			max(u.n) FILTER (WHERE arguments ? u.name) AS last_place, min(u.n) FILTER (WHERE coalesce(u.name, '') = '') AS nameless,
			min(u.n) FILTER (WHERE NOT arguments ? u.name AND u.n <= p.pronargs - p.pronargdefaults) AS missing,
			string_agg(pg_catalog.format('%I %s', u.name, u.type), ', ') FILTER (WHERE arguments ? u.name) AS columns,
			string_agg(pg_catalog.format(CASE WHEN p.provariadic = '0'::oid THEN '%1$I => passed.%1$I'
				WHEN u.n = p.pronargs THEN 'VARIADIC passed.%1$I' ELSE 'passed.%1$I' END, u.name), ', ') FILTER (WHERE arguments ? u.name) AS passed
		FROM unnest(types, CASE WHEN p.proargmodes IS NULL THEN p.proargnames ELSE ARRAY(
				SELECT m.name FROM unnest(p.proargnames, p.proargmodes) AS m (name, mode) WHERE m.mode IN ('i', 'b', 'v')) END)
				WITH ORDINALITY AS u (type, name, n)) AS a
	WHERE p.oid = routine;
	IF NOT FOUND THEN
		RETURN NULL;
	ELSIF target.kind IS NOT NULL THEN
		PERFORM @extschema@.idem__raise('42809', pg_catalog.format('idem_call() cannot run %s: it %s', full_name, target.kind),
			'It runs functions that return one value, a row or void: call this one from such a function, and run that one.');
	ELSIF target.nameless IS NOT NULL THEN
		PERFORM @extschema@.idem__raise('ID400', pg_catalog.format('argument %s of function %s has no name', target.nameless, full_name),
			'idem_call() passes arguments by name: name them in CREATE FUNCTION.');
	ELSIF array_position(types, NULL::text) IS NOT NULL THEN
		PERFORM @extschema@.idem__raise('42809', pg_catalog.format('idem_call() cannot run %s: its argument "%s" has the pseudo-type %s', full_name,
				target.names[array_position(types, NULL::text)],
				(SELECT p.proargtypes[array_position(types, NULL::text) - 1]::regtype FROM pg_proc AS p WHERE p.oid = routine)),
			'JSON does not say which type is meant: call it from a function that does, and run that one.');
	ELSIF target.missing IS NOT NULL OR arguments - target.names <> '{}' THEN
		unknown := (SELECT k FROM jsonb_object_keys(arguments - target.names) AS k LIMIT 1);
		PERFORM @extschema@.idem__raise('ID400', CASE WHEN unknown IS NULL
				THEN pg_catalog.format('argument "%s" of function %s is missing', target.names[target.missing], full_name)
				ELSE pg_catalog.format('function %s has no argument "%s"', full_name, unknown) END,
			'Fix the client: ' || CASE WHEN unknown IS NULL THEN 'pass it in arguments, it has no default.'
				ELSE 'each key of arguments is the name of an argument.' END,
			coalesce('Its arguments are: ' || nullif(array_to_string(target.names, ', '), '') || '.', 'It has no arguments.'));
	ELSIF target.has_gap THEN
		PERFORM @extschema@.idem__raise('0A000',
			pg_catalog.format('idem_call() cannot leave out an argument of function %s before one that it passes', full_name),
			'SQL has no such call of a VARIADIC function: pass the arguments before it too.');
	END IF;
	RETURN pg_catalog.format(CASE WHEN target.prorettype = 'void'::regtype THEN 'SELECT CASE WHEN %s(%s) IS NULL THEN NULL::pg_catalog.jsonb END'
			ELSE 'SELECT pg_catalog.to_jsonb(%s(%s))' END, target.name, target.passed)
		|| coalesce(' FROM pg_catalog.jsonb_to_record($1) AS passed (' || target.columns || ')', '');
END $$;

-- The part of idem_call() before the run: claims the request, and returns the query that runs the function; or NULL,
-- and the result of the run before.  caller: whose rights count.  Who lies of them only spares himself an error: the
-- query runs with his own rights.
--
-- The fingerprint is that of the JSON array [schema, name, schema and name of each type, arguments].  An array type has
-- the name of its elements': its own can change when a dump is restored.
CREATE FUNCTION @extschema@.idem__call_begin(caller name, routine regprocedure, full_name text,
	user_id text, request_id text, arguments jsonb, scope text, wait interval, OUT query text, OUT result jsonb)
LANGUAGE plpgsql COST 10000 SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '100'
SET enable_seqscan = off SET jit = off SET plan_cache_mode = force_generic_plan AS $$
DECLARE
	key constant @extschema@.idem__key := @extschema@.idem__key_of(user_id, request_id, scope);
	target record;
	answer @extschema@.idem__answer;
BEGIN
	IF routine IS NULL THEN
		PERFORM @extschema@.idem__raise('ID400', 'function must not be null',
			'Fix the client: pass its name and argument types, ''pay(int, numeric)''.');
	ELSIF jsonb_typeof(arguments) IS DISTINCT FROM 'object' THEN
		PERFORM @extschema@.idem__raise('ID400', 'arguments must ' || CASE WHEN arguments IS NULL THEN 'not be null' ELSE 'be a JSON object' END,
			'Fix the client: pass the arguments of the function by their names, {"amount": 30}; {} for none.');
	END IF;
	-- (OFFSET 0: otherwise the planner may read all of pg_type.)
	SELECT p.proname, p.pronamespace, a.types, pg_catalog.format('[%s,%s%s,',
			to_json((parse_ident(p.pronamespace::regnamespace::text))[1]), to_json(p.proname), a.names) AS identity
	INTO target FROM pg_proc AS p, LATERAL (
		SELECT string_agg(pg_catalog.format(',%s,%s', to_json((parse_ident(t.schema))[1]), to_json(t.name)), '') AS names,
			array_agg(CASE WHEN t.typtype <> 'p' THEN pg_catalog.format('%s.%I', t.schema, t.typname) END) AS types
		FROM unnest(p.proargtypes::oid[]) AS u (type), LATERAL (
			SELECT t.typnamespace::regnamespace::text AS schema, t.typname, t.typtype,
				CASE WHEN t.typsubscript = 'array_subscript_handler'::regproc
					THEN (SELECT e.typname || '[]' FROM pg_type AS e WHERE e.oid = t.typelem) ELSE t.typname END AS name
			FROM pg_type AS t WHERE t.oid = u.type OFFSET 0) AS t) AS a
	WHERE p.oid = routine::oid;
	IF NOT FOUND THEN
		PERFORM @extschema@.idem__raise('42883', pg_catalog.format('function with OID %s does not exist', routine::oid),
			'It was dropped, or never existed: pass the function by its name and argument types.');
	ELSIF has_schema_privilege(caller, target.pronamespace, 'USAGE') IS NOT TRUE THEN
		RAISE EXCEPTION 'permission denied for schema %', (SELECT n.nspname FROM pg_namespace AS n WHERE n.oid = target.pronamespace)
			USING ERRCODE = '42501';
	ELSIF has_function_privilege(caller, routine::oid, 'EXECUTE') IS NOT TRUE THEN
		RAISE EXCEPTION 'permission denied for function %', target.proname USING ERRCODE = '42501';
	END IF;

	answer := @extschema@.idem__claim_marker(key, 'idem_call()',
		sha256(convert_to(target.identity || @extschema@.idem__canonical(arguments) || ']', getdatabaseencoding())), wait);
	result := answer.result;
	query := CASE WHEN answer.outcome <> 'completed' THEN @extschema@.idem__call_query(routine::oid, full_name, target.types, arguments) END;
	IF answer.outcome = 'claimed' AND query IS NULL THEN
		PERFORM @extschema@.idem__raise('42883', pg_catalog.format('function %s was dropped while the request waited', target.proname),
			'Nothing was executed.');
	ELSIF answer.outcome = 'mismatch' THEN
		-- The caller has passed no fingerprint: say what differs.
		PERFORM @extschema@.idem__raise_of_key('ID422', 'request id was used before with another fingerprint',
			'The first call had another function or other arguments. A retry must send the same, also 30 and not "30"; only a new request takes a new id.', key);
	ELSIF answer.outcome <> 'completed' AND answer.outcome <> 'claimed' THEN
		PERFORM @extschema@.idem__raise_outcome(answer.outcome, key);
	ELSIF answer.outcome = 'completed' AND current_setting('idem_held.open', true) <> '' AND coalesce(@extschema@.idem__is_open(@extschema@.idem__held_text(key)),
			EXISTS (SELECT FROM @extschema@.idem__row_of_note(@extschema@.idem__held_text(key)) AS r WHERE r.result IS NULL)) THEN
		PERFORM @extschema@.idem__raise_of_key('55000', 'idem_call(): this transaction has claimed the request already, and not settled it',
			'Do not claim the request before the call. The function that it runs must use another scope for calls of its own.', key);
	END IF;
END $$;

-- The part of idem_call() after the run: settles the key, unless the function that ran has done so; makes
-- idem_outcome() and idem_result() speak of this call again; and returns what is stored.
CREATE FUNCTION @extschema@.idem__call_settle(user_id text, request_id text, result jsonb, scope text) RETURNS jsonb
LANGUAGE plpgsql COST 10000 SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET enable_seqscan = off
SET jit = off AS $$
DECLARE
	key constant @extschema@.idem__key := @extschema@.idem__key_of(user_id, request_id, scope);
	held constant text := @extschema@.idem__held_text(key);
	is_open boolean;
	stored record;
BEGIN
	IF split_part(current_setting('idem_held.latest', true), E'\t', 2) = held AND @extschema@.idem__complete_at_once(result) THEN
		RETURN result;
	END IF;
	is_open := @extschema@.idem__is_open(held);
	SELECT c.state::text AS state, c.result INTO stored FROM @extschema@.idem_claims AS c
	WHERE @extschema@.idem__has_key(c.user_id, c.request_id, c.scope, key) AND @extschema@.idem__is_ours(c.xmin);
	IF NOT FOUND OR is_open OR (is_open IS NULL AND stored.state <> 'failed' AND stored.result IS NULL) THEN
		PERFORM @extschema@.idem__settle('idem_call()', key, NULL::int8, 'completed', result);
		stored.result := result;
	END IF;
	-- An error if the function has reset the settings: then nobody knows what it has settled.
	PERFORM @extschema@.idem__latest('idem_call()'), @extschema@.idem__note(CASE stored.state
		WHEN 'failed' THEN '-failed ' || held || E'\n' || coalesce(stored.result::text, '') ELSE E'=\t' || held END);
	RETURN stored.result;
END $$;

-- The name is looked up, and the function runs, with the rights and the search_path of the caller.  So every
-- name in the body is qualified, and no operator is used.
CREATE FUNCTION @extschema@.idem_call(
	user_id text, request_id text, function text,
	arguments jsonb DEFAULT '{}', scope text DEFAULT '', wait interval DEFAULT NULL) RETURNS jsonb
LANGUAGE plpgsql COST 10000 AS $$
DECLARE
	routine constant pg_catalog.regprocedure := function::pg_catalog.regprocedure;
	run pg_catalog.record;
	result pg_catalog.jsonb;
BEGIN
	run := @extschema@.idem__call_begin(current_user, routine, routine::pg_catalog.text, user_id, request_id, arguments, scope, wait);
	IF run.query IS NULL THEN
		RETURN run.result;
	END IF;
	EXECUTE run.query INTO result USING arguments;
	RETURN @extschema@.idem__call_settle(user_id, request_id, result, scope);
END $$;

COMMENT ON FUNCTION @extschema@.idem__call_begin(name, regprocedure, text, text, text, jsonb, text, interval) IS 'for idem_call(): claims the request, and returns the query that runs the function';
COMMENT ON FUNCTION @extschema@.idem__call_settle(text, text, jsonb, text) IS 'for idem_call(): settles the request after the run, and returns what is stored';
