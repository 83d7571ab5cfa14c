-- ----- forgetting -----

CREATE FUNCTION @extschema@.idem_forget(user_id text, request_id text, scope text DEFAULT '') RETURNS boolean
LANGUAGE plpgsql COST 10000 SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
	key constant @extschema@.idem__key := @extschema@.idem__key_of(user_id, request_id, scope);
	was constant @extschema@.idem__claim := @extschema@.idem__lock_row('idem_forget()', key, NULL::int8, true, true);
BEGIN
	IF was.state IS NOT NULL THEN
		PERFORM @extschema@.idem__note_settled(key, NULL::jsonb),
			@extschema@.idem__store(key, NULL::@extschema@.idem__claim, was.token IS NOT NULL);
	END IF;
	RETURN was.state IS NOT NULL;
END $$;

-- True: the result and progress of a settled request are NULL now, or there was none.  False: the
-- request is in progress.
CREATE FUNCTION @extschema@.idem__erase(user_id text, request_id text, scope text) RETURNS boolean
LANGUAGE plpgsql COST 10000 SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
	key constant @extschema@.idem__key := @extschema@.idem__key_of(user_id, request_id, scope);
	was @extschema@.idem__claim := @extschema@.idem__lock_row('idem_erase()', key, NULL::int8, true, true);
BEGIN
	IF was.state::text <> 'in_progress' AND (was.result IS NOT NULL OR was.progress IS NOT NULL) THEN
		was.result := NULL;
		was.progress := NULL;
		PERFORM @extschema@.idem__store(key, was, false);
	END IF;
	RETURN was.state::text IS DISTINCT FROM 'in_progress';
END $$;
