-- ----- settling -----

-- True: a locked row stays in its place.  (Replaced by sql/idem-citus.sql.)
CREATE FUNCTION @extschema@.idem__keep_place(key @extschema@.idem__key) RETURNS boolean LANGUAGE sql IMMUTABLE
AS $$ SELECT true $$;

-- Locks the row of the key until the transaction ends, and returns it as it is now; all NULL if there is none.
-- Waits for another transaction that has the row, for idem.wait, and then raises ID503 (ID409 for '0').
-- of_token: raises ID410 if the row has another one; NULL: any.  The token decides,
-- never the clock: a holder whose lease lapsed still holds it until somebody takes it over.
CREATE FUNCTION @extschema@.idem__lock_row(
	command text, key @extschema@.idem__key, of_token int8, may_be_absent boolean, may_be_settled boolean)
RETURNS @extschema@.idem__claim
LANGUAGE plpgsql
SET lock_timeout = '100' SET enable_seqscan = off SET jit = off AS $$	-- see idem__claim_at_once()
DECLARE
	ignored text := @extschema@.idem__require_writable(command);		-- PERFORM would need a query
	deadline constant timestamptz := @extschema@.idem__deadline(NULL::interval);
	only_ours boolean;
	-- If the snapshot may be too old to see the row, the insert comes first: it raises 40001 then.
	may_look boolean := NOT @extschema@.idem__keeps_snapshot();
	slices int4 := 0;
	was @extschema@.idem__claim;
BEGIN
	LOOP
		BEGIN
			ignored := @extschema@.idem__bound_lock_waits(deadline, slices);
			only_ours := @extschema@.idem__only_ours_counts(key);		-- can wait for the table
			ignored := @extschema@.idem__keep_place(key);
			IF may_look THEN
				SELECT c.* INTO was FROM @extschema@.idem_claims AS c
				WHERE @extschema@.idem__has_key(c.user_id, c.request_id, c.scope, key)
					AND (of_token IS NULL OR c.token = of_token) AND (NOT only_ours OR @extschema@.idem__is_ours(c.xmin))
				FOR NO KEY UPDATE;
				EXIT WHEN FOUND;
			END IF;
			-- Perhaps another transaction is inserting it: an insert waits for that transaction.
			INSERT INTO @extschema@.idem_claims (expires_at, state, request_id, user_id, scope)
			VALUES ('-infinity', 'completed', key.request_id, key.user_id, key.scope)
			ON CONFLICT (request_id, user_id, scope) DO NOTHING;
			IF FOUND THEN
				RAISE SQLSTATE 'ID001';		-- takes the insert back
			END IF;
			may_look := true;
			PERFORM FROM @extschema@.idem_claims AS c
			WHERE @extschema@.idem__has_key(c.user_id, c.request_id, c.scope, key)
				AND c.token IS DISTINCT FROM of_token AND (NOT only_ours OR @extschema@.idem__is_ours(c.xmin));
			IF FOUND AND of_token IS NOT NULL THEN
				PERFORM @extschema@.idem__raise_of_key('ID410', 'lease is lost',
					'Stop, and roll back: another holder has the request. Or the token is wrong.', key);
			END IF;
		EXCEPTION
			WHEN SQLSTATE 'ID001' THEN
				EXIT;
			WHEN lock_not_available THEN
				IF clock_timestamp() >= deadline THEN
					PERFORM @extschema@.idem__raise_outcome(@extschema@.idem__outcome_of_passed(deadline), key);
				END IF;
				slices := slices + 1;
		END;
	END LOOP;
	IF was.state IS NULL AND NOT may_be_absent THEN
		PERFORM @extschema@.idem__raise_of_key('ID410', pg_catalog.format('there is no such request in scope "%s"', key.scope),
			'Check the scope and the ids in DETAIL. If they are right, the request was released or dropped: stop, and roll back.', key);
	ELSIF was.state::text <> 'in_progress' AND NOT may_be_settled THEN
		PERFORM @extschema@.idem__raise_of_key('ID410', 'lease is settled',
			'Stop, and roll back: the request is completed or failed.', key);
	END IF;
	RETURN was;
END $$;

-- Writes what has changed of a row that this transaction has locked; changed NULL: deletes the row.
CREATE FUNCTION @extschema@.idem__store(
	key @extschema@.idem__key, changed @extschema@.idem__claim, must_survive_crash boolean) RETURNS void
LANGUAGE plpgsql SET enable_seqscan = off SET jit = off AS $$
DECLARE
	only_ours constant boolean := @extschema@.idem__only_ours_counts(key);
BEGIN
	IF changed.state IS NULL THEN
		DELETE FROM @extschema@.idem_claims AS c
		WHERE @extschema@.idem__has_key(c.user_id, c.request_id, c.scope, key)
			AND (NOT only_ours OR @extschema@.idem__is_ours(c.xmin));
	ELSE
		UPDATE @extschema@.idem_claims AS c SET expires_at = changed.expires_at, lease_until = changed.lease_until,
			state = changed.state, result = changed.result, progress = changed.progress
		WHERE @extschema@.idem__has_key(c.user_id, c.request_id, c.scope, key)
			AND (NOT only_ours OR @extschema@.idem__is_ours(c.xmin));
	END IF;
	IF must_survive_crash THEN
		PERFORM @extschema@.idem__commit_synchronously();
	END IF;
END $$;

-- Ends a key.  True: stored.  False: an identical repeat, or somebody else has healed it.  The row decides who
-- may settle it, never this transaction's memory or the clock:
--
-- - a transactional claim (token NULL, completed from the start): the transaction that wrote the row;
-- - a lease: a caller with the token in the row, which keeps it, so that the holder's repeat can be told;
-- - idem_heal(): everybody, a request in progress.  The row loses its lease_until: so a late holder learns that
--   the request is settled, instead of an error.
CREATE FUNCTION @extschema@.idem__settle(command text, key @extschema@.idem__key, token int8, new_state text, new_result jsonb)
RETURNS boolean
LANGUAGE plpgsql SET enable_seqscan = off SET jit = off AS $$
DECLARE
	heals constant boolean := command = 'idem_heal()';
	may_be_open constant boolean := NOT heals AND @extschema@.idem__is_open(@extschema@.idem__held_text(key)) IS NOT FALSE;
	policy record;
	was @extschema@.idem__claim;
	remembered_until timestamptz;
BEGIN
	PERFORM @extschema@.idem__check_token(token), @extschema@.idem__require_writable(command);
	SELECT p.* INTO policy FROM @extschema@.idem__policy(key.scope) AS p;
	PERFORM @extschema@.idem__check_size(key, 'result', new_result, policy.result_max_bytes);

	IF heals OR token IS NOT NULL THEN
		BEGIN
			was := @extschema@.idem__lock_row(command, key, token, false, true);
			IF was.state::text <> 'in_progress' THEN
				RAISE SQLSTATE 'ID001';		-- releases the lock
			END IF;
		EXCEPTION WHEN SQLSTATE 'ID001' THEN
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

	IF was.state::text <> 'in_progress'
		AND NOT (may_be_open AND was.token IS NULL AND was.state::text = 'completed' AND was.result IS NULL) THEN
		IF heals AND was.state::text = 'failed' THEN
			PERFORM @extschema@.idem__raise_of_key('ID410', 'request has failed for good',
				'The request has already failed; use a new id, or idem_forget().', key);
		ELSIF NOT heals AND (was.state::text <> new_state OR was.result IS DISTINCT FROM new_result
				AND (was.token IS NULL OR was.lease_until IS NOT NULL)) THEN
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
		was.lease_until := CASE WHEN NOT heals THEN was.lease_until END;
		PERFORM @extschema@.idem__store(key, was, was.token IS NOT NULL);
	END IF;
	PERFORM @extschema@.idem__note_settled(key, new_result);
	RETURN true;
END $$;

-- The common case of idem_complete(), in one statement: idem__claim_at_once() claimed the only unsettled
-- key of this transaction.  False: it is another case, or the result is too large; idem__settle() has to decide.
-- The note says where the row is.  It may be forged, or name another row since the table was rewritten: so the
-- row has to have the key, and to be one that this transaction wrote (as in idem__is_ours()) and has not settled
-- with a result.  No other transaction sees such a row, so the update waits for nobody.
-- PL/pgSQL prepares an expression anew in each transaction, at a cost for each function in it: so there are few.
-- (Replaced by sql/idem-citus.sql.)
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
	WHERE c.ctid = place AND CASE WHEN (c.xmin::text::int8 - top) & 4294967295 < 2147483648
			THEN pg_xact_status((top + ((c.xmin::text::int8 - top) & 4294967295))::text::xid8) = 'in progress' END
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
LANGUAGE plpgsql COST 10000 SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off SET jit = off AS $$
BEGIN
	IF @extschema@.idem__complete_at_once(result) THEN
		RETURN true;
	END IF;
	RETURN @extschema@.idem__settle('idem_complete()', @extschema@.idem__only_unsettled('idem_complete()'), NULL::int8, 'completed', result);
END $$;

CREATE FUNCTION @extschema@.idem_fail(error jsonb) RETURNS boolean
LANGUAGE plpgsql COST 10000 SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
	RETURN @extschema@.idem__settle('idem_fail()', @extschema@.idem__only_unsettled('idem_fail()'), NULL::int8, 'failed', error);
END $$;

CREATE FUNCTION @extschema@.idem_complete(
	user_id text, request_id text, result jsonb, token int8 DEFAULT NULL, scope text DEFAULT '') RETURNS boolean
LANGUAGE plpgsql COST 10000 SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off SET jit = off AS $$
BEGIN
	IF token IS NULL AND array_to_json(ARRAY[user_id, request_id, scope])::text COLLATE "C" = split_part(current_setting('idem_held.latest', true), E'\t', 2)
			AND @extschema@.idem__complete_at_once(result) THEN
		RETURN true;
	END IF;
	RETURN @extschema@.idem__settle('idem_complete()', @extschema@.idem__key_of(user_id, request_id, scope), token, 'completed', result);
END $$;

CREATE FUNCTION @extschema@.idem_fail(
	user_id text, request_id text, error jsonb, token int8 DEFAULT NULL, scope text DEFAULT '') RETURNS boolean
LANGUAGE plpgsql COST 10000 SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
	RETURN @extschema@.idem__settle('idem_fail()', @extschema@.idem__key_of(user_id, request_id, scope), token, 'failed', error);
END $$;

CREATE FUNCTION @extschema@.idem_heal(user_id text, request_id text, result jsonb, scope text DEFAULT '') RETURNS boolean
LANGUAGE plpgsql COST 10000 SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
	RETURN @extschema@.idem__settle('idem_heal()', @extschema@.idem__key_of(user_id, request_id, scope), NULL::int8, 'completed', result);
END $$;
