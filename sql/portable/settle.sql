-- ----- settling -----

-- True: a locked row stays in its place.  (Replaced by sql/idem-citus.sql.)
CREATE FUNCTION @extschema@.idem__keep_place(key @extschema@.idem__key) RETURNS boolean LANGUAGE sql IMMUTABLE
AS $$ SELECT true $$;

-- Locks the row of the key until the transaction ends, and returns it as it is now; all NULL
-- if there is none.  Waits for another transaction that has the row, for idem.wait, and then
-- raises ID503 (ID409 for '0').  token: that of the wanted row, NULL for any.  A row with
-- another token is returned without a wait for its lock.
CREATE FUNCTION @extschema@.idem__lock_row(key @extschema@.idem__key, token int8)
RETURNS @extschema@.idem__claim
LANGUAGE plpgsql
SET lock_timeout = '100'			-- see idem__bound_lock_waits()
AS $$
DECLARE
	deadline constant timestamptz := @extschema@.idem__deadline(NULL::interval);
	keeps_snapshot constant boolean := @extschema@.idem__keeps_snapshot();
	only_ours constant boolean := @extschema@.idem__only_ours_counts(key);
	slices int4 := 0;
	ignored text;				-- assigned to, since PERFORM would need a query
	inserting boolean;
	is_absent boolean;
	locked @extschema@.idem__claim;
BEGIN
	LOOP
		BEGIN
			ignored := @extschema@.idem__bound_lock_waits(deadline, slices);
			inserting := false;
			ignored := @extschema@.idem__keep_place(key);
			-- The common case: the row is free.
			IF NOT keeps_snapshot THEN
				SELECT c.* INTO locked FROM @extschema@.idem_claims AS c
				WHERE @extschema@.idem__has_key(c.user_id, c.request_id, c.scope, key)
				FOR NO KEY UPDATE SKIP LOCKED;
				IF FOUND THEN
					RETURN locked;
				END IF;
			END IF;

			-- Wait as a claim does, see idem__look(): try to insert the key.  The insert
			-- is rolled back.
			inserting := true;
			INSERT INTO @extschema@.idem_claims (expires_at, state, request_id, user_id, scope)
			VALUES ('-infinity', 'completed', key.request_id, key.user_id, key.scope)
			ON CONFLICT (request_id, user_id, scope) DO NOTHING;
			is_absent := FOUND;
			inserting := false;
			IF is_absent THEN
				RAISE SQLSTATE 'ID001';
			END IF;

			SELECT c.* INTO locked FROM @extschema@.idem_claims AS c
			WHERE @extschema@.idem__has_key(c.user_id, c.request_id, c.scope, key)
				AND (NOT only_ours OR @extschema@.idem__is_ours(c.xmin));
			IF FOUND AND (idem__lock_row.token IS NULL OR locked.token IS NOT DISTINCT FROM idem__lock_row.token) THEN
				SELECT c.* INTO locked FROM @extschema@.idem_claims AS c
				WHERE @extschema@.idem__has_key(c.user_id, c.request_id, c.scope, key)
					AND (NOT only_ours OR @extschema@.idem__is_ours(c.xmin))
				FOR NO KEY UPDATE;
			END IF;
			IF FOUND THEN
				RETURN locked;
			END IF;
			RAISE SQLSTATE 'ID001';		-- removed meanwhile: look again
		EXCEPTION
			WHEN SQLSTATE 'ID001' THEN
				IF is_absent THEN
					RETURN NULL;
				END IF;
			WHEN serialization_failure THEN
				-- Changed or removed while we waited for its lock: the next insert tells which.
				IF inserting THEN
					RAISE;
				END IF;
			WHEN lock_not_available THEN
				IF clock_timestamp() >= deadline THEN
					PERFORM @extschema@.idem__raise_outcome(@extschema@.idem__outcome_of_passed(deadline), key);
				END IF;
				slices := slices + 1;
		END;
	END LOOP;
END $$;

-- Writes what a settlement changes of a row, which this transaction has locked.
CREATE FUNCTION @extschema@.idem__store(key @extschema@.idem__key, changed @extschema@.idem__claim) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
	only_ours constant boolean := @extschema@.idem__only_ours_counts(key);
BEGIN
	UPDATE @extschema@.idem_claims AS c SET expires_at = changed.expires_at, lease_until = changed.lease_until,
		state = changed.state, result = changed.result, progress = changed.progress
	WHERE @extschema@.idem__has_key(c.user_id, c.request_id, c.scope, key)
		AND (NOT only_ours OR @extschema@.idem__is_ours(c.xmin));
END $$;

-- Deletes a row that this transaction has locked.
CREATE FUNCTION @extschema@.idem__drop(key @extschema@.idem__key) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
	only_ours constant boolean := @extschema@.idem__only_ours_counts(key);
BEGIN
	PERFORM @extschema@.idem__note_settled(key, NULL::jsonb);
	DELETE FROM @extschema@.idem_claims AS c
	WHERE @extschema@.idem__has_key(c.user_id, c.request_id, c.scope, key)
		AND (NOT only_ours OR @extschema@.idem__is_ours(c.xmin));
END $$;

CREATE FUNCTION @extschema@.idem__raise_no_request(key @extschema@.idem__key) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
	PERFORM @extschema@.idem__raise_of_key('ID410', pg_catalog.format('there is no such request in scope "%s"', key.scope),
		'Check the scope and the ids in DETAIL. If they are right, the request was released or dropped: stop, and roll back.', key);
END $$;

-- Locks the row of a lease and returns it if the token is the holder's; otherwise raises
-- ID410.  The token decides, never the clock: a holder whose lease lapsed still holds it
-- until somebody takes it over.
CREATE FUNCTION @extschema@.idem__lock_lease(key @extschema@.idem__key, token int8) RETURNS @extschema@.idem__claim
LANGUAGE plpgsql AS $$
DECLARE
	locked constant @extschema@.idem__claim := @extschema@.idem__lock_row(key, token);
BEGIN
	IF locked.state IS NULL THEN
		PERFORM @extschema@.idem__raise_no_request(key);
	ELSIF locked.token IS DISTINCT FROM token THEN
		PERFORM @extschema@.idem__raise_of_key('ID410', 'lease is lost',
			'Stop, and roll back: another holder has the request. Or the token is wrong.', key);
	END IF;
	RETURN locked;
END $$;

CREATE FUNCTION @extschema@.idem__require_unsettled(key @extschema@.idem__key, lease @extschema@.idem__claim)
RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
	IF lease.state::text <> 'in_progress' THEN
		PERFORM @extschema@.idem__raise_of_key('ID410', 'lease is settled',
			'Stop, and roll back: the request is completed or failed.', key);
	END IF;
END $$;

/*
 * Ends a key.  True: stored.  False: an identical repeat, or somebody else has healed it.
 * The row decides who may settle it, never this transaction's memory or the clock:
 *
 * - a transactional claim (token NULL): the transaction that wrote the row.  The row is
 *	 completed from the start; settling stores a response in it, or makes it a failure;
 * - a lease: a caller with the token that is in the row.
 *
 * A settled row keeps its token: so the holder's repeat can be told from an attempt by
 * somebody else.  A healed row has no lease_until: so a late holder learns that the request
 * is settled, instead of an error.
 */
CREATE FUNCTION @extschema@.idem__settle(command text, key @extschema@.idem__key, token int8, new_state text, new_result jsonb)
RETURNS boolean
LANGUAGE plpgsql AS $$
DECLARE
	may_be_open constant boolean := @extschema@.idem__is_open(@extschema@.idem__held_text(key)) IS NOT FALSE;
	policy record;
	was @extschema@.idem__claim;
	is_healed boolean;
	remembered_until timestamptz;
BEGIN
	PERFORM @extschema@.idem__require_writable(command);
	SELECT p.* INTO policy FROM @extschema@.idem__policy(key.scope) AS p;
	PERFORM @extschema@.idem__check_size(key, 'result', new_result, policy.result_max_bytes);

	IF token IS NOT NULL THEN
		BEGIN
			was := @extschema@.idem__lock_lease(key, token);
			IF was.state::text <> 'in_progress' THEN
				RAISE SQLSTATE 'ID001';		-- releases the lock
			END IF;
		EXCEPTION
			WHEN SQLSTATE 'ID001' THEN
		END;
	ELSE
		SELECT c.* INTO was FROM @extschema@.idem_claims AS c
		WHERE @extschema@.idem__has_key(c.user_id, c.request_id, c.scope, key)
			AND @extschema@.idem__is_ours(c.xmin) AND @extschema@.idem__is_of_now(c.state, c.lease_until);
		IF NOT FOUND THEN
			PERFORM @extschema@.idem__raise_of_key('ID410', 'request is not held by this transaction',
				'Settle a request in the transaction that claimed it, between BEGIN and COMMIT, or pass the token of its lease. Or the scope or an id in DETAIL is wrong.', key);
		END IF;
	END IF;

	IF was.state::text <> 'in_progress' AND NOT (may_be_open AND was.token IS NULL AND was.state::text = 'completed' AND was.result IS NULL) THEN
		is_healed := was.token IS NOT NULL AND was.lease_until IS NULL AND was.state::text = 'completed';
		IF (is_healed AND new_state <> 'completed') OR (NOT is_healed
			AND (was.state::text <> new_state OR was.result IS DISTINCT FROM new_result)) THEN
			PERFORM @extschema@.idem__raise_of_key('ID410', 'request is settled already, in another way',
				'Settle a request once; a repeat must be identical.', key);
		END IF;
		RETURN false;
	END IF;

	remembered_until := @extschema@.idem__remembered_until(policy.ttl, NULL::timestamptz, NULL::timestamptz);
	-- Completing a marker without a result needs no second version of its row.
	IF was.state::text <> new_state OR new_result IS NOT NULL OR was.expires_at < remembered_until THEN
		was.state := new_state;
		was.result := new_result;
		was.expires_at := greatest(was.expires_at, remembered_until);
		PERFORM @extschema@.idem__store(key, was);
	END IF;
	PERFORM @extschema@.idem__note_settled(key, new_result);
	IF was.token IS NOT NULL THEN
		PERFORM @extschema@.idem__commit_synchronously();
	END IF;
	RETURN true;
END $$;

-- As idem__is_ours(), which says why, for the transaction with the id top.  Without the block that
-- catches the error of an xmin from before the ids wrapped around: only a forged note leads to a
-- row with such an xmin.
CREATE FUNCTION @extschema@.idem__is_of(top int8, row_xmin xid) RETURNS boolean LANGUAGE sql AS $$
	SELECT CASE WHEN (row_xmin::text::int8 - top) & 4294967295 < 2147483648
		THEN pg_xact_status((top + ((row_xmin::text::int8 - top) & 4294967295))::text::xid8) = 'in progress' END
$$;

-- The common case of idem_complete(result): the latest claim call of this transaction was
-- decided by idem__claim_at_once(), claimed a key, and it is the only one unsettled.  False: it is
-- another case, or the result is too large; idem__settle() has to decide.  Does what idem__settle()
-- does, in one statement.
--
-- The note says where the row is.  The row has to be one that this transaction wrote and has not
-- settled with a result.  So a forged note reaches neither the request of another transaction
-- nor a stored result; if it names no place, the input function of tid raises an error.  The key is
-- compared too, since a table that was rewritten has other rows in the same places.  No other
-- transaction can lock or change the row, which it does not see, so the update waits for nobody.
--
-- PL/pgSQL prepares each expression anew in each transaction, which costs about 2,500 instructions
-- for each function in it.  So the expressions here call few functions.  The SET clauses of
-- idem_complete(jsonb) hold here too.  (Replaced by sql/idem-citus.sql.)
CREATE FUNCTION @extschema@.idem__complete_at_once(new_result jsonb) RETURNS boolean LANGUAGE plpgsql AS $$
DECLARE
	latest constant text COLLATE "C" := current_setting('idem_held.latest', true);
	place tid;
	top int8;
	ignored text;
BEGIN
	IF (latest ^@ '+(' AND coalesce(current_setting('idem_held.open', true), '') = '' AND new_result IS NOT NULL
			AND current_setting('transaction_read_only') = 'off') IS NOT TRUE THEN
		RETURN false;
	END IF;
	place := split_part(substr(latest, 2), E'\t', 1);
	top := pg_current_xact_id_if_assigned()::text::int8;
	UPDATE @extschema@.idem_claims AS c SET result = new_result,
		expires_at = greatest(c.expires_at, date_trunc('second', clock_timestamp() + interval '999999 microseconds' + p.ttls[coalesce(array_position(p.scopes, c.scope), 1)]))
	FROM @extschema@.idem__policies AS p
	WHERE c.ctid = place AND @extschema@.idem__is_of(top, c.xmin)
		AND array_to_json(ARRAY[c.user_id, c.request_id, c.scope])::text COLLATE "C" = split_part(latest, E'\t', 2)
		AND c.state = 'completed' AND c.token IS NULL AND c.result IS NULL
		AND p.ttls[coalesce(array_position(p.scopes, c.scope), 1)] IS NOT NULL
		AND pg_column_size(to_jsonb(new_result)) - 4 <= p.results_max[coalesce(array_position(p.scopes, c.scope), 1)];
	IF NOT FOUND THEN
		RETURN false;
	END IF;
	ignored := set_config('idem_held.latest', '=' || substr(latest, 2), true);
	RETURN true;
END $$;

CREATE FUNCTION @extschema@.idem_complete(result jsonb DEFAULT NULL) RETURNS boolean
LANGUAGE plpgsql COST 10000 SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET enable_seqscan = off
SET jit = off AS $$
BEGIN
	IF @extschema@.idem__complete_at_once(result) THEN
		RETURN true;
	END IF;
	RETURN @extschema@.idem__settle('idem_complete()', @extschema@.idem__only_unsettled('idem_complete()'), NULL::int8, 'completed', result);
END $$;

CREATE FUNCTION @extschema@.idem_complete(
	user_id text, request_id text, result jsonb, token int8 DEFAULT NULL, scope text DEFAULT '') RETURNS boolean
LANGUAGE plpgsql COST 10000 SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
	key constant @extschema@.idem__key := @extschema@.idem__key_of(user_id, request_id, scope);
BEGIN
	PERFORM @extschema@.idem__check_token(token);
	RETURN @extschema@.idem__settle('idem_complete()', key, token, 'completed', result);
END $$;

CREATE FUNCTION @extschema@.idem_fail(error jsonb) RETURNS boolean
LANGUAGE plpgsql COST 10000 SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
	RETURN @extschema@.idem__settle('idem_fail()', @extschema@.idem__only_unsettled('idem_fail()'), NULL::int8, 'failed', error);
END $$;

CREATE FUNCTION @extschema@.idem_fail(
	user_id text, request_id text, error jsonb, token int8 DEFAULT NULL, scope text DEFAULT '') RETURNS boolean
LANGUAGE plpgsql COST 10000 SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
	key constant @extschema@.idem__key := @extschema@.idem__key_of(user_id, request_id, scope);
BEGIN
	PERFORM @extschema@.idem__check_token(token);
	RETURN @extschema@.idem__settle('idem_fail()', key, token, 'failed', error);
END $$;

CREATE FUNCTION @extschema@.idem_heal(user_id text, request_id text, result jsonb, scope text DEFAULT '')
RETURNS boolean
LANGUAGE plpgsql COST 10000 SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
	key constant @extschema@.idem__key := @extschema@.idem__key_of(user_id, request_id, scope);
	policy record;
	was @extschema@.idem__claim;
BEGIN
	PERFORM @extschema@.idem__require_writable('idem_heal()');
	SELECT p.* INTO policy FROM @extschema@.idem__policy(key.scope) AS p;
	PERFORM @extschema@.idem__check_size(key, 'result', result, policy.result_max_bytes);
	BEGIN
		was := @extschema@.idem__lock_row(key, NULL::int8);
		IF was.state = 'completed' THEN
			RAISE SQLSTATE 'ID001';		-- releases the lock
		END IF;
	EXCEPTION
		WHEN SQLSTATE 'ID001' THEN
			RETURN false;
	END;
	IF was.state IS NULL THEN
		PERFORM @extschema@.idem__raise_no_request(key);
	ELSIF was.state = 'failed' THEN
		PERFORM @extschema@.idem__raise_of_key('ID410', 'request has failed for good',
			'The request has already failed; use a new id, or idem_forget().', key);
	END IF;
	was.state := 'completed';
	was.result := result;
	was.lease_until := NULL;
	was.expires_at := greatest(was.expires_at, @extschema@.idem__remembered_until(policy.ttl, NULL::timestamptz, NULL::timestamptz));
	PERFORM @extschema@.idem__store(key, was), @extschema@.idem__note_settled(key, result), @extschema@.idem__commit_synchronously();
	RETURN true;
END $$;
