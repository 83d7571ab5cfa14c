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
	PERFORM @extschema@.idem__check_lease_max(key, length, policy.lease_max);
	PERFORM @extschema@.idem__check_size(key, 'progress', progress, policy.result_max_bytes);
	was := @extschema@.idem__lock_lease(key, token);
	PERFORM @extschema@.idem__require_unsettled(key, was);
	was.lease_until := CASE WHEN length IS NULL THEN greatest(was.lease_until, clock_timestamp() + policy.lease)
		ELSE clock_timestamp() + length END;
	was.expires_at := greatest(was.expires_at, @extschema@.idem__whole_second(was.lease_until));
	was.progress := coalesce(progress, was.progress);
	PERFORM @extschema@.idem__store(key, was);
	-- Progress records effects in other systems: a crash must not lose it.
	IF progress IS NOT NULL THEN
		PERFORM @extschema@.idem__commit_synchronously();
	END IF;
	RETURN was.lease_until;
END $$;

-- Drops the progress too: the holder has undone what it stands for.
CREATE FUNCTION @extschema@.idem_release(user_id text, request_id text, token int8, scope text DEFAULT '')
RETURNS boolean
LANGUAGE plpgsql COST 10000 SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
	key constant @extschema@.idem__key := @extschema@.idem__key_of(user_id, request_id, scope);
BEGIN
	PERFORM @extschema@.idem__require_token(token), @extschema@.idem__require_writable('idem_release()');
	IF (@extschema@.idem__lock_row(key, token)).state IS NULL THEN
		RETURN false;		-- a repeated release ends here too
	END IF;
	PERFORM @extschema@.idem__require_unsettled(key, @extschema@.idem__lock_lease(key, token));
	PERFORM @extschema@.idem__drop(key), @extschema@.idem__commit_synchronously();
	RETURN true;
END $$;

-- True: the lock of the lease's row is the fence.  (Replaced by sql/idem-citus.sql.)
CREATE FUNCTION @extschema@.idem__keep_fence(key @extschema@.idem__key, token int8) RETURNS boolean
LANGUAGE sql IMMUTABLE AS $$ SELECT true $$;

-- The lock of the row is the fence: nobody can take the lease over until this transaction
-- ends.
CREATE FUNCTION @extschema@.idem_fence(user_id text, request_id text, token int8, scope text DEFAULT '') RETURNS void
LANGUAGE plpgsql COST 10000 SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
	key constant @extschema@.idem__key := @extschema@.idem__key_of(user_id, request_id, scope);
BEGIN
	PERFORM @extschema@.idem__require_token(token), @extschema@.idem__require_writable('idem_fence()');
	PERFORM @extschema@.idem__require_unsettled(key, @extschema@.idem__lock_lease(key, token)),
		@extschema@.idem__keep_fence(key, token);
END $$;
