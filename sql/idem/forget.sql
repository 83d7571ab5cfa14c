-- ----- operating -----

CREATE FUNCTION @extschema@.idem_forget(
	user_id text,
	request_id text,
	scope text DEFAULT '')
RETURNS bool
AS 'MODULE_PATHNAME', 'idem_forget'
LANGUAGE C VOLATILE PARALLEL UNSAFE COST 10000;

COMMENT ON FUNCTION @extschema@.idem_forget(text, text, text) IS
'operator: forgets a request, so that it can be executed again: true, forgotten; false, there was no such request';

CREATE FUNCTION @extschema@.idem__erase(
	user_id text,
	request_id text,
	scope text)
RETURNS bool
AS 'MODULE_PATHNAME', 'idem__erase'
LANGUAGE C VOLATILE PARALLEL UNSAFE COST 10000;

-- The keys are listed when the call begins.  A request that is claimed later is not among them.
CREATE PROCEDURE @extschema@.idem_erase(user_id text, scope text DEFAULT NULL)
LANGUAGE plpgsql
AS $procedure$
DECLARE
	-- by the schema's current name
	schema constant pg_catalog.regnamespace := (SELECT e.extnamespace FROM pg_catalog.pg_extension AS e
		WHERE e.extname OPERATOR(pg_catalog.=) 'idem');
	found pg_catalog.record;
	is_erased pg_catalog.bool;
	erased pg_catalog.int8 := 0;
	in_progress pg_catalog.int8 := 0;
BEGIN
	-- raises ID400 for a user or a scope that no request can have
	EXECUTE pg_catalog.format('SELECT %s.idem_status($1, ''any'', COALESCE($2, ''''))', schema) USING user_id, scope;
	FOR found IN EXECUTE pg_catalog.format('SELECT c.request_id, c.scope FROM %s.idem_claims AS c
			WHERE c.user_id OPERATOR(pg_catalog.=) $1 AND ($2 IS NULL OR c.scope OPERATOR(pg_catalog.=) $2)
				AND (c.result IS NOT NULL OR c.progress IS NOT NULL)', schema)
		USING user_id, scope
	LOOP
		EXECUTE pg_catalog.format('SELECT %s.idem__erase($1, $2, $3)', schema) INTO is_erased
			USING user_id, found.request_id, found.scope;
		IF is_erased THEN
			erased := erased OPERATOR(pg_catalog.+) 1;
		ELSE
			in_progress := in_progress OPERATOR(pg_catalog.+) 1;
		END IF;
		IF erased OPERATOR(pg_catalog.%) 1000 OPERATOR(pg_catalog.=) 0 THEN
			COMMIT;
		END IF;
	END LOOP;
	COMMIT;
	RAISE NOTICE 'requests erased: %', erased;
	IF in_progress OPERATOR(pg_catalog.>) 0 THEN
		RAISE WARNING 'requests in progress, which keep their progress: %', in_progress
			USING HINT = 'Call idem_erase() again when they are settled. idem_unsettled lists them.';
	END IF;
END
$procedure$;

COMMENT ON PROCEDURE @extschema@.idem_erase(text, text) IS
'operator: results, errors and progress of a user''s settled requests become NULL, in a scope or in all; the requests stay guarded. Commits in between';
