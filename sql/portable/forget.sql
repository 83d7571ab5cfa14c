-- ----- forgetting -----

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
	PERFORM @extschema@.idem__note_settled(key, NULL::jsonb);
	DELETE FROM @extschema@.idem_claims AS c
	WHERE @extschema@.idem__has_key(c.user_id, c.request_id, c.scope, key)
		AND (NOT only_ours OR @extschema@.idem__is_ours(c.xmin));
	IF was.token IS NOT NULL THEN
		PERFORM @extschema@.idem__commit_synchronously();
	END IF;
	RETURN true;
END
$$;

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
