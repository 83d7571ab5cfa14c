-- ----- leases -----

CREATE FUNCTION @extschema@.idem_extend(
	user_id text, request_id text, token int8,
	lease interval DEFAULT NULL, progress jsonb DEFAULT NULL, scope text DEFAULT '') RETURNS timestamptz
LANGUAGE plpgsql COST 10000 SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
	length constant interval := @extschema@.idem__check_lease(lease);
	key constant @extschema@.idem__key := @extschema@.idem__key_of(user_id, request_id, scope);
	policy record;
	was @extschema@.idem__claim;
BEGIN
	PERFORM @extschema@.idem__require_token(token), @extschema@.idem__require_writable('idem_extend()');
	SELECT p.* INTO policy FROM @extschema@.idem__policy(key.scope) AS p;
	PERFORM @extschema@.idem__check_lease_max(key, length, policy.lease_max),
		@extschema@.idem__check_size(key, 'progress', progress, policy.result_max_bytes);
	was := @extschema@.idem__lock_row('idem_extend()', key, token, false, false);
	was.lease_until := CASE WHEN length IS NULL THEN greatest(was.lease_until, clock_timestamp() + policy.lease)
		ELSE clock_timestamp() + length END;
	was.expires_at := greatest(was.expires_at, @extschema@.idem__whole_second(was.lease_until));
	was.progress := coalesce(progress, was.progress);
	-- Progress records effects in other systems.
	PERFORM @extschema@.idem__store(key, was, progress IS NOT NULL);
	RETURN was.lease_until;
END $$;

-- Drops the progress too: the holder has undone what it stands for.
CREATE FUNCTION @extschema@.idem_release(user_id text, request_id text, token int8, scope text DEFAULT '') RETURNS boolean
LANGUAGE plpgsql COST 10000 SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
	key constant @extschema@.idem__key := @extschema@.idem__key_of(user_id, request_id, scope);
BEGIN
	PERFORM @extschema@.idem__require_token(token);
	IF (@extschema@.idem__lock_row('idem_release()', key, token, true, false)).state IS NULL THEN
		RETURN false;		-- a repeated release ends here too
	END IF;
	PERFORM @extschema@.idem__note_settled(key, NULL::jsonb),
		@extschema@.idem__store(key, NULL::@extschema@.idem__claim, true);
	RETURN true;
END $$;

-- True: the lock of the lease's row is the fence, which no other claim passes until this transaction ends.
-- (Replaced by sql/idem-citus.sql.)
CREATE FUNCTION @extschema@.idem__keep_fence(key @extschema@.idem__key, token int8) RETURNS boolean
LANGUAGE sql IMMUTABLE AS $$ SELECT true $$;

CREATE FUNCTION @extschema@.idem_fence(user_id text, request_id text, token int8, scope text DEFAULT '') RETURNS void
LANGUAGE plpgsql COST 10000 SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
	key constant @extschema@.idem__key := @extschema@.idem__key_of(user_id, request_id, scope);
BEGIN
	PERFORM @extschema@.idem__require_token(token);
	PERFORM @extschema@.idem__lock_row('idem_fence()', key, token, false, false), @extschema@.idem__keep_fence(key, token);
END $$;
