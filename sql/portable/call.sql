-- ----- calling -----

-- The end of idem_call(), which cannot do this with its caller's rights: settles the key,
-- unless the function that ran has done so; makes idem_outcome() and idem_result() speak of
-- this call again; and returns what is stored.  It does so only for a request that this
-- transaction has claimed.
CREATE FUNCTION @extschema@.idem__call_settle(user_id text, request_id text, result jsonb, scope text) RETURNS jsonb
LANGUAGE plpgsql COST 10000 SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
	key constant @extschema@.idem__key := @extschema@.idem__key_of(user_id, request_id, scope);
	is_open constant boolean := @extschema@.idem__is_open(@extschema@.idem__held_text(key));
	stored record;
BEGIN
	SELECT c.state::text AS state, c.result INTO stored FROM @extschema@.idem_claims AS c
	WHERE @extschema@.idem__has_key(c.user_id, c.request_id, c.scope, key)
		AND @extschema@.idem__is_ours(c.xmin);
	IF NOT FOUND THEN
		PERFORM @extschema@.idem__raise_of_key('ID410', 'request is not held by this transaction',
			'Settle a request in the transaction that claimed it, between BEGIN and COMMIT, or pass the token of its lease. Or the scope or an id in DETAIL is wrong.', key);
	END IF;
	-- An error if the function has reset the settings: then nobody knows what it has settled.
	PERFORM @extschema@.idem__latest('idem_call()');
	IF is_open OR (is_open IS NULL AND stored.state <> 'failed' AND stored.result IS NULL) THEN
		PERFORM @extschema@.idem__settle('idem_call()', key, NULL::int8, 'completed', result);
		stored.result := result;
	END IF;
	IF stored.state = 'failed' THEN
		PERFORM @extschema@.idem__note_answer(@extschema@.idem__held_text(key), 'failed', stored.result);
	ELSE
		PERFORM @extschema@.idem__note(E'=\t' || @extschema@.idem__held_text(key));
	END IF;
	RETURN stored.result;
END $$;

COMMENT ON FUNCTION @extschema@.idem__call_settle(text, text, jsonb, text) IS
'for idem_call(): settles the request after the run, and returns what is stored';

-- It runs with the caller's rights and search_path, as the function that it calls must.  So
-- every function, operator and type in its body is qualified, and it calls public functions
-- only.
--
-- The call passes the arguments that are passed in, in exactly the declared types, and by
-- their names (of a VARIADIC function: in their order).  SQL fills in the defaults, with the
-- operators that they were created with.  To parse the text of a default here would be
-- unsafe: NULLIF, IS DISTINCT FROM and CASE x WHEN are printed without the schema of their
-- operator, so a stranger's operator in the search_path would run as the caller.  The call
-- never runs another function than the one that was named: if another one fits as well, as
-- f(a int) beside f(a int, b text DEFAULT 'x'), SQL raises "not unique".
CREATE FUNCTION @extschema@.idem_call(
	user_id text, request_id text, function text,
	arguments jsonb DEFAULT '{}', scope text DEFAULT '', wait interval DEFAULT NULL) RETURNS jsonb
LANGUAGE plpgsql COST 10000 AS $$
DECLARE
	-- looked up by the caller's search_path, at each execution
	routine constant pg_catalog.regprocedure := function::pg_catalog.regprocedure;
	target pg_catalog.record;
	kind pg_catalog.text;
	argument pg_catalog.record;
	names pg_catalog.text[] := '{}';
	missing pg_catalog.text;
	wrong pg_catalog.text;
	columns pg_catalog.text[] := '{}';	-- of the row that the JSON is converted to
	passed pg_catalog.text[] := '{}';	-- the arguments of the call
	notation pg_catalog.text;
	last_place pg_catalog.int8 := '0';
	identity pg_catalog.jsonb;
	fingerprint pg_catalog.bytea;
	run pg_catalog.text;
	source pg_catalog.text;
	result pg_catalog.jsonb;
BEGIN
	IF function IS NULL THEN
		RAISE EXCEPTION USING ERRCODE = 'ID400', MESSAGE = 'function must not be null',
			HINT = 'Fix the client: pass its name and argument types, ''pay(int, numeric)''.';
	ELSIF arguments IS NULL OR pg_catalog.jsonb_typeof(arguments) OPERATOR(pg_catalog.<>) 'object' THEN
		RAISE EXCEPTION USING ERRCODE = 'ID400',
			MESSAGE = CASE WHEN arguments IS NULL THEN 'arguments must not be null' ELSE 'arguments must be a JSON object' END,
			HINT = 'Fix the client: pass the arguments of the function by their names, {"amount": 30}; {} for none.';
	END IF;

	-- Which functions it can run
	SELECT p.*, n.nspname, r.typtype INTO target
	FROM pg_catalog.pg_proc AS p
		JOIN pg_catalog.pg_namespace AS n ON n.oid OPERATOR(pg_catalog.=) p.pronamespace
		JOIN pg_catalog.pg_type AS r ON r.oid OPERATOR(pg_catalog.=) p.prorettype
	WHERE p.oid OPERATOR(pg_catalog.=) routine::pg_catalog.oid;
	IF NOT FOUND THEN
		RAISE EXCEPTION USING ERRCODE = 'undefined_function',
			MESSAGE = pg_catalog.format('function with OID %s does not exist', routine::pg_catalog.oid),
			HINT = 'It was dropped, or never existed: pass the function by its name and argument types.';
	END IF;
	kind := CASE
		WHEN target.prokind OPERATOR(pg_catalog.=) 'p'::pg_catalog."char" THEN 'it is a procedure'
		WHEN target.prokind OPERATOR(pg_catalog.=) 'a'::pg_catalog."char" THEN 'it is an aggregate function'
		WHEN target.prokind OPERATOR(pg_catalog.=) 'w'::pg_catalog."char" THEN 'it is a window function'
		WHEN target.proretset THEN 'it returns a set'
		WHEN target.prorettype OPERATOR(pg_catalog.=) 'pg_catalog.trigger'::pg_catalog.regtype::pg_catalog.oid
			OR target.prorettype OPERATOR(pg_catalog.=) 'pg_catalog.event_trigger'::pg_catalog.regtype::pg_catalog.oid THEN 'it is a trigger function'
		WHEN target.typtype OPERATOR(pg_catalog.=) 'p'::pg_catalog."char"
			AND target.prorettype OPERATOR(pg_catalog.<>) 'pg_catalog.void'::pg_catalog.regtype::pg_catalog.oid
			AND target.prorettype OPERATOR(pg_catalog.<>) 'pg_catalog.record'::pg_catalog.regtype::pg_catalog.oid
			THEN pg_catalog.format('it returns the pseudo-type %s', target.prorettype::pg_catalog.regtype) END;
	IF kind IS NOT NULL THEN
		RAISE EXCEPTION USING ERRCODE = 'wrong_object_type', MESSAGE = pg_catalog.format('idem_call() cannot run %s: %s', routine, kind),
			HINT = 'It runs functions that return one value, a row or void: call this one from such a function, and run that one.';
	ELSIF NOT pg_catalog.has_schema_privilege(target.pronamespace, 'USAGE'::pg_catalog.text) THEN
		RAISE EXCEPTION USING ERRCODE = 'insufficient_privilege',
			MESSAGE = pg_catalog.format('permission denied for schema %s', target.nspname);
	ELSIF NOT pg_catalog.has_function_privilege(routine::pg_catalog.oid, 'EXECUTE'::pg_catalog.text) THEN
		RAISE EXCEPTION USING ERRCODE = 'insufficient_privilege',
			MESSAGE = pg_catalog.format('permission denied for function %s', target.proname);
	END IF;

	-- The arguments that are passed in.  An array is named after the type of its elements: the
	-- name of the array type itself can change when a dump is restored.
	identity := pg_catalog.jsonb_build_array(target.nspname, target.proname);
	-- By names SQL finds a VARIADIC function only if no argument is left out.
	notation := CASE WHEN target.provariadic OPERATOR(pg_catalog.=) '0'::pg_catalog.oid THEN '%2$I => passed.%2$I' ELSE '%1$spassed.%2$I' END;
	FOR argument IN
		SELECT a.place, pg_catalog.row_number() OVER (ORDER BY a.place) AS n, a.name, t.oid::pg_catalog.regtype AS type, t.typtype,
			CASE WHEN a.mode OPERATOR(pg_catalog.=) 'v'::pg_catalog."char" THEN 'VARIADIC ' ELSE '' END AS variadic,
			tn.nspname AS type_schema, t.typname AS type_name, dn.nspname AS named_schema,
			d.typname::pg_catalog.text OPERATOR(pg_catalog.||) CASE WHEN d.oid OPERATOR(pg_catalog.=) t.oid THEN '' ELSE '[]' END AS named_type
		FROM ROWS FROM (pg_catalog.unnest(COALESCE(target.proallargtypes, target.proargtypes::pg_catalog.oid[])),
				pg_catalog.unnest(target.proargnames), pg_catalog.unnest(target.proargmodes)) WITH ORDINALITY AS a (type, name, mode, place)
			JOIN pg_catalog.pg_type AS t ON t.oid OPERATOR(pg_catalog.=) a.type
			JOIN pg_catalog.pg_type AS d ON d.oid OPERATOR(pg_catalog.=) CASE WHEN t.typelem OPERATOR(pg_catalog.<>) '0'::pg_catalog.oid
				AND t.typsubscript::pg_catalog.oid OPERATOR(pg_catalog.=) 'pg_catalog.array_subscript_handler'::pg_catalog.regproc::pg_catalog.oid
				THEN t.typelem ELSE t.oid END
			JOIN pg_catalog.pg_namespace AS tn ON tn.oid OPERATOR(pg_catalog.=) t.typnamespace
			JOIN pg_catalog.pg_namespace AS dn ON dn.oid OPERATOR(pg_catalog.=) d.typnamespace
		WHERE a.mode IS NULL OR a.mode OPERATOR(pg_catalog.=) ANY ('{i,b,v}'::pg_catalog."char"[])
		ORDER BY a.place
	LOOP
		IF argument.name IS NULL OR argument.name OPERATOR(pg_catalog.=) '' THEN
			RAISE EXCEPTION USING ERRCODE = 'ID400', MESSAGE = pg_catalog.format('argument %s of function %s has no name', argument.n, routine),
				HINT = 'idem_call() passes arguments by name: name them in CREATE FUNCTION.';
		ELSIF argument.typtype OPERATOR(pg_catalog.=) 'p'::pg_catalog."char" THEN
			RAISE EXCEPTION USING ERRCODE = 'wrong_object_type',
				MESSAGE = pg_catalog.format('idem_call() cannot run %s: its argument "%s" has the pseudo-type %s', routine, argument.name, argument.type),
				HINT = 'JSON does not say which type is meant: call it from a function that does, and run that one.';
		END IF;
		names := names OPERATOR(pg_catalog.||) argument.name;
		identity := identity OPERATOR(pg_catalog.||) pg_catalog.jsonb_build_array(argument.named_schema, argument.named_type);
		IF pg_catalog.jsonb_exists(arguments, argument.name) THEN
			columns := columns OPERATOR(pg_catalog.||) pg_catalog.format('%I %I.%I', argument.name, argument.type_schema, argument.type_name);
			passed := passed OPERATOR(pg_catalog.||) pg_catalog.format(notation, argument.variadic, argument.name);
			last_place := argument.n;
		ELSIF argument.n OPERATOR(pg_catalog.<=) (target.pronargs OPERATOR(pg_catalog.-) target.pronargdefaults) THEN
			missing := COALESCE(missing, argument.name);
		END IF;
	END LOOP;
	SELECT k.name INTO wrong
	FROM pg_catalog.jsonb_object_keys(arguments) WITH ORDINALITY AS k (name, n)
	WHERE k.name COLLATE pg_catalog."C" OPERATOR(pg_catalog.<>) ALL (names)
	ORDER BY k.n LIMIT 1;
	IF wrong IS NOT NULL OR missing IS NOT NULL THEN
		RAISE EXCEPTION USING ERRCODE = 'ID400',
			MESSAGE = CASE WHEN wrong IS NULL THEN pg_catalog.format('argument "%s" of function %s is missing', missing, routine)
				ELSE pg_catalog.format('function %s has no argument "%s"', routine, wrong) END,
			DETAIL = CASE WHEN pg_catalog.cardinality(names) OPERATOR(pg_catalog.=) 0 THEN 'It has no arguments.'
				ELSE pg_catalog.format('Its arguments are: %s.', pg_catalog.array_to_string(names, ', ')) END,
			HINT = CASE WHEN wrong IS NULL THEN 'Fix the client: pass it in arguments, it has no default.'
				ELSE 'Fix the client: each key of arguments is the name of an argument.' END;
	ELSIF target.provariadic OPERATOR(pg_catalog.<>) '0'::pg_catalog.oid AND pg_catalog.cardinality(passed) OPERATOR(pg_catalog.<) last_place THEN
		RAISE EXCEPTION USING ERRCODE = 'feature_not_supported',
			MESSAGE = pg_catalog.format('idem_call() cannot leave out an argument of function %s before one that it passes', routine),
			HINT = 'SQL has no such call of a VARIADIC function: pass the arguments before it too.';
	END IF;

	IF pg_catalog.current_setting('transaction_read_only') OPERATOR(pg_catalog.=) 'on' THEN
		RAISE EXCEPTION USING ERRCODE = '25006', MESSAGE = 'cannot execute idem_call() in a read-only transaction',
			HINT = CASE WHEN pg_catalog.pg_is_in_recovery() THEN 'This server is a standby: send the request to the primary.'
				ELSE 'Use a read-write transaction, the one that does the work.' END;
	END IF;
	fingerprint := @extschema@.idem_fingerprint(identity OPERATOR(pg_catalog.||) pg_catalog.jsonb_build_array(arguments));
	-- idem_claim() knows this call by its fingerprint, for its own errors.
	PERFORM pg_catalog.set_config('idem_call.fingerprint', fingerprint::pg_catalog.text, true);
	IF NOT @extschema@.idem_claim(user_id, request_id, scope, fingerprint, wait) THEN
		RETURN @extschema@.idem_result();
	END IF;

	-- The claim may have waited.
	SELECT p.*, n.nspname, target.proname AS old_name INTO target
	FROM (SELECT) AS always LEFT JOIN pg_catalog.pg_proc AS p ON p.oid OPERATOR(pg_catalog.=) routine::pg_catalog.oid
		LEFT JOIN pg_catalog.pg_namespace AS n ON n.oid OPERATOR(pg_catalog.=) p.pronamespace;
	IF target.oid IS NULL THEN
		RAISE EXCEPTION USING ERRCODE = 'undefined_function',
			MESSAGE = pg_catalog.format('function %s was dropped while the request waited', target.old_name),
			HINT = 'Nothing was executed.';
	END IF;
	run := pg_catalog.format('%I.%I(%s)', target.nspname, target.proname, pg_catalog.array_to_string(passed, ', '));
	IF pg_catalog.cardinality(columns) OPERATOR(pg_catalog.>) 0 THEN
		source := pg_catalog.format(' FROM pg_catalog.jsonb_to_record($1) AS passed (%s)', pg_catalog.array_to_string(columns, ', '));
	END IF;
	IF target.prorettype OPERATOR(pg_catalog.=) 'pg_catalog.void'::pg_catalog.regtype::pg_catalog.oid THEN
		EXECUTE pg_catalog.concat('SELECT ', run, source) USING arguments;
	ELSE
		EXECUTE pg_catalog.concat('SELECT pg_catalog.to_jsonb(', run, ')', source) INTO result USING arguments;
	END IF;
	RETURN @extschema@.idem__call_settle(user_id, request_id, result, scope);
END $$;
