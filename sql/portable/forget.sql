CREATE FUNCTION @extschema@.idem_forget(user_id text, request_id text, scope text DEFAULT '')
RETURNS boolean
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE COST 10000
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
	key constant @extschema@.idem__key := @extschema@.idem__key_of(user_id, request_id, scope);
	only_ours constant boolean := @extschema@.idem__only_ours_counts(key);
	was @extschema@.idem__claim;
BEGIN
	PERFORM @extschema@.idem__require_writable('idem_forget()');
	was := @extschema@.idem__lock_row(key, @extschema@.idem__deadline(NULL::interval), NULL::int8);
	IF was.state IS NULL THEN
		RETURN false;
	END IF;
	PERFORM @extschema@.idem__note_dropped(key);
	DELETE FROM @extschema@.idem_claims AS c
	WHERE @extschema@.idem__has_key(c.user_id, c.request_id, c.scope, key)
		AND (NOT only_ours OR @extschema@.idem__is_ours(c.xmin));
	IF was.token IS NOT NULL THEN
		PERFORM @extschema@.idem__commit_synchronously();
	END IF;
	RETURN true;
END
$$;

COMMENT ON FUNCTION @extschema@.idem_forget(text, text, text) IS
'operator: drops a request, so that it can be executed again: true, dropped; false, there was none';

-- True: the result and progress of a settled request are NULL now, or there was none.  False: the
-- request is in progress.
CREATE FUNCTION @extschema@.idem__erase(user_id text, request_id text, scope text)
RETURNS boolean
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE COST 10000
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
	key constant @extschema@.idem__key := @extschema@.idem__key_of(user_id, request_id, scope);
	only_ours constant boolean := @extschema@.idem__only_ours_counts(key);
BEGIN
	PERFORM @extschema@.idem__require_writable('idem_erase()');
	IF (@extschema@.idem__lock_row(key, @extschema@.idem__deadline(NULL::interval), NULL::int8)).state = 'in_progress' THEN
		RETURN false;
	END IF;
	UPDATE @extschema@.idem_claims AS c SET result = NULL, progress = NULL
	WHERE @extschema@.idem__has_key(c.user_id, c.request_id, c.scope, key)
		AND (NOT only_ours OR @extschema@.idem__is_ours(c.xmin))
		AND (c.result IS NOT NULL OR c.progress IS NOT NULL);
	RETURN true;
END
$$;

-- The keys are listed when the call begins.  A request that is claimed later is not among them.
CREATE PROCEDURE @extschema@.idem_erase(user_id pg_catalog.text, scope pg_catalog.text DEFAULT NULL)
LANGUAGE plpgsql
AS $procedure$
DECLARE
	found pg_catalog.record;
	is_erased pg_catalog.bool;
	erased pg_catalog.int8 := 0;
	in_progress pg_catalog.int8 := 0;
BEGIN
	-- raises ID400 for a user or a scope that no request can have
	PERFORM @extschema@.idem_status(user_id, 'any', COALESCE(scope, ''));
	FOR found IN
		SELECT c.request_id, c.scope FROM @extschema@.idem_claims AS c
		WHERE c.user_id OPERATOR(pg_catalog.=) idem_erase.user_id
			AND (idem_erase.scope IS NULL OR c.scope OPERATOR(pg_catalog.=) idem_erase.scope)
			AND (c.result IS NOT NULL OR c.progress IS NOT NULL)
	LOOP
		is_erased := @extschema@.idem__erase(user_id, found.request_id, found.scope);
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

COMMENT ON PROCEDURE @extschema@.idem_erase(pg_catalog.text, pg_catalog.text) IS
'operator: results, errors and progress of a user''s settled requests become NULL, in a scope or in all; the requests stay guarded. Commits in between';
