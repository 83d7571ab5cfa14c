-- ----- forgetting -----

CREATE FUNCTION @extschema@.idem_forget(user_id text, request_id text, scope text DEFAULT '') RETURNS boolean
LANGUAGE plpgsql COST 10000 SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
	key constant @extschema@.idem__key := @extschema@.idem__key_of(user_id, request_id, scope);
	was @extschema@.idem__claim;
BEGIN
	PERFORM @extschema@.idem__require_writable('idem_forget()');
	was := @extschema@.idem__lock_row(key, NULL::int8);
	IF was.state IS NULL THEN
		RETURN false;
	END IF;
	PERFORM @extschema@.idem__drop(key);
	IF was.token IS NOT NULL THEN
		PERFORM @extschema@.idem__commit_synchronously();
	END IF;
	RETURN true;
END $$;

-- True: the result and progress of a settled request are NULL now, or there was none.  False: the
-- request is in progress.
CREATE FUNCTION @extschema@.idem__erase(user_id text, request_id text, scope text) RETURNS boolean
LANGUAGE plpgsql COST 10000 SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
	key constant @extschema@.idem__key := @extschema@.idem__key_of(user_id, request_id, scope);
	was @extschema@.idem__claim;
BEGIN
	PERFORM @extschema@.idem__require_writable('idem_erase()');
	was := @extschema@.idem__lock_row(key, NULL::int8);
	IF was.state = 'in_progress' THEN
		RETURN false;
	ELSIF was.result IS NOT NULL OR was.progress IS NOT NULL THEN
		was.result := NULL;
		was.progress := NULL;
		PERFORM @extschema@.idem__store(key, was);
	END IF;
	RETURN true;
END $$;
