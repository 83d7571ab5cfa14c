-- ----- the protocol -----

-- expires_at of a claim that is made or settled now: the ttl after now, or after the key's
-- own time if that is later, and not before the lease ends.
CREATE FUNCTION @extschema@.idem__remembered_until(ttl interval, key_time timestamptz, lease_until timestamptz)
RETURNS timestamptz
LANGUAGE sql VOLATILE
AS $$ SELECT @extschema@.idem__whole_second(greatest(greatest(clock_timestamp(), key_time) + ttl, lease_until)) $$;

-- Whether a key of that time that has no row may have been executed and forgotten.  A claim
-- made at c under this policy keeps its row until max(c, key_time) + ttl at least; a claim
-- from before guarded_since may have been made under another policy.
CREATE FUNCTION @extschema@.idem__may_be_forgotten(key_time timestamptz, ttl interval, guarded_since timestamptz)
RETURNS boolean
LANGUAGE sql VOLATILE
AS $$
	SELECT coalesce(key_time <= clock_timestamp() - ttl OR key_time <= guarded_since, false)
$$;

/*
 * Claims a key.  Every path decides in the same order:
 *
 *	1. arguments, and what the scope's policy says of them;
 *	2. another transaction is inserting, updating or deleting the row: wait for it.  An
 *	   uncommitted row says nothing.  A key of our own transaction is never waited for;
 *	3. an expired row of a scope with expired = reclaim: as if it were absent;
 *	4. the fingerprint, where both sides have one;
 *	5. completed; failed for good;
 *	6. in progress under a live lease: wait for it, and look again;
 *	7. in progress under a lapsed lease: claim in place, or answer unknown, by policy; unknown
 *	   also where the holder recorded progress, and the call cannot tell its caller;
 *	8. failed and retryable: claim in place;
 *	9. absent: check the key's own time, then insert.
 *
 * idem__look_at() looks at the key until it has an outcome, and idem__claim_key() calls it again when
 * a live lease may have ended.  The steps of a look:
 *
 *	idem__policy_of_claim(), idem__check_terms(): 1;
 *	idem__draw_token(): the lock of the key, for a lease;
 *	idem__insert_claim(): 2 and 9;
 *	idem__decide(): 3 to 8, if there is a row;
 *	idem__keep_promise(): if it ends in "claimed", the policy again, under its lock.
 *
 * The insert always comes first.  INSERT ... ON CONFLICT DO NOTHING waits for the
 * transaction that has the row (2), raises 40001 if the deciding row is invisible to the
 * snapshot, and is all that a new key needs.  Only an insert or update that succeeds ends in
 * "claimed": when a holder vanishes, exactly one of its waiters replaces it.
 *
 * Each look at the row runs in a subtransaction, because lock_timeout bounds its waits and
 * ends them with an error.  A look is rolled back on purpose (ID001) if it has no answer, finds
 * a live lease, answers stale, or is one of a lease call that does not claim.  That releases the
 * table locks before a sleep: otherwise DDL queues behind the sleeper, and the holder behind it.
 *
 * Claims of leases take a lock of the key first (idem__lock_key()), draw a token and write
 * the row under it, and hold it until the transaction ends.  So tokens grow from holder to
 * holder, even if the row was deleted in between.  A claimant that holds this lock waits for
 * no transaction, since a second claim by that transaction could wait for the claimant.  If
 * its look meets another transaction, it looks again without the lock, only to wait, and
 * then once more with it.  If there is a row already, it starts without the lock: otherwise
 * followers of a lease would block each other.
 *
 * The lock on idem_scopes orders claims with changes of a promise (idem__scopes_guard()).  A
 * claim holds it from before it re-checks its policy until the transaction ends.  Answers of
 * the fast path hold it too, and others after an attempt that was refused.  No claim waits for
 * this lock while it has a row, or for a row while it has this lock: otherwise two transactions
 * could take the two in opposite order, and deadlock.
 */

-- What a look has found
CREATE TYPE @extschema@.idem__look AS (
	outcome text,				-- NULL: look again
	is_live boolean,			-- another holder has a live lease
	is_ours boolean,			-- this transaction wrote the row
	inserted_at timestamptz,	-- when the insert of a new row began; NULL: there was a row
	result jsonb,
	progress jsonb,
	token int8,					-- of the claim
	expires_at timestamptz,		-- NULL, if claimed: the row that was there counts as absent
	lease_until timestamptz
);

-- What the next look of a claim waits for, and how long
CREATE TYPE @extschema@.idem__patience AS (
	waits_for text,				-- 'row'; 'policy', the lock of the policy; or 'nothing'.  A claim of a lease
								-- waits for the row only in looks that do not claim.  NULL: it
								-- depends on whether there is a row
	until timestamptz,			-- NULL: give up
	slices int4,				-- of waiting, so far in this look; see idem__bound_lock_waits()
	delete_until timestamptz,	-- of a row's removal, which is waited for after the deadline too
	is_deleting boolean,		-- another transaction removes the row
	has_looked_again boolean	-- after the deadline
);

-- Decision 1: the policy of a scope.  Raises ID400 if no request can be claimed in it, 40001 if the
-- snapshot is older than the settings.
CREATE FUNCTION @extschema@.idem__policy_of_claim(of_scope text)
RETURNS @extschema@.idem__scope_policy
LANGUAGE plpgsql
AS $$
DECLARE
	policy constant @extschema@.idem__scope_policy := (SELECT p FROM @extschema@.idem__policy(of_scope) AS p);
BEGIN
	IF NOT policy.has_settings AND @extschema@.idem__keeps_snapshot() THEN
		PERFORM @extschema@.idem__raise('40001', 'could not serialize access: idem was installed after this transaction''s snapshot',
			'Retry the transaction.');
	END IF;
	IF policy.undeclared THEN
		PERFORM @extschema@.idem__raise_undeclared(of_scope);
	END IF;
	RETURN policy;
END
$$;

-- Decision 1: raises an error if the policy refuses what a claim of a lease asks for.
CREATE FUNCTION @extschema@.idem__check_terms(key @extschema@.idem__key, lease interval, progress jsonb, policy @extschema@.idem__scope_policy)
RETURNS void
LANGUAGE plpgsql
AS $$
DECLARE
	ignored text;				-- assigned to, since PERFORM would need a query
BEGIN
	IF lease > policy.lease_max THEN
		ignored := @extschema@.idem__check_lease_max(key, lease, policy.lease_max);
	END IF;
	IF progress IS NOT NULL THEN
		ignored := @extschema@.idem__check_size(key, 'progress', progress, policy.result_max_bytes);
	END IF;
END
$$;

-- Locks the key for a lease, and draws its token under the lock.  NULL: there is a row, and the
-- caller wants the lock only if there is none.
CREATE FUNCTION @extschema@.idem__draw_token(key @extschema@.idem__key, only_if_absent boolean)
RETURNS int8
LANGUAGE plpgsql
AS $$
DECLARE
	ignored text;				-- assigned to, since PERFORM would need a query
BEGIN
	IF only_if_absent THEN
		IF EXISTS (SELECT FROM @extschema@.idem_claims AS c
				WHERE @extschema@.idem__has_key(c.user_id, c.request_id, c.scope, key)) THEN
			RETURN NULL;
		END IF;
	END IF;
	ignored := @extschema@.idem__lock_key(key);
	RETURN nextval('@extschema@.idem_token_seq');
END
$$;

-- Decisions 2 and 9: waits for a transaction that has the key, and inserts the row of the claim.
-- Outcome NULL: there is a row.  "stale": the insert has to be rolled back.
CREATE FUNCTION @extschema@.idem__insert_claim(
	key @extschema@.idem__key, new_fingerprint bytea, lease interval, new_progress jsonb, new_token int8,
	ttl interval, guarded_since timestamptz, key_time timestamptz)
RETURNS @extschema@.idem__look
LANGUAGE plpgsql
AS $$
DECLARE
	-- (Not a variable of the table's type: a session's first call would open the table for it,
	-- and wait for its lock longer than the deadline.)
	look @extschema@.idem__look;
	new_state constant @extschema@.idem_state := CASE WHEN lease IS NULL THEN 'completed' ELSE 'in_progress' END;
	begun constant timestamptz := clock_timestamp();
BEGIN
	look.lease_until := begun + lease;
	look.expires_at := @extschema@.idem__remembered_until(ttl, key_time, look.lease_until);
	INSERT INTO @extschema@.idem_claims AS c (expires_at, lease_until, token, state, request_id, user_id, scope, fingerprint, progress)
	VALUES (look.expires_at, look.lease_until, new_token, new_state, key.request_id, key.user_id, key.scope, new_fingerprint, new_progress)
	ON CONFLICT (request_id, user_id, scope) DO NOTHING;
	IF FOUND THEN
		look.inserted_at := begun;
		look.is_ours := true;
		look.outcome := 'claimed';
		IF @extschema@.idem__may_be_forgotten(key_time, ttl, guarded_since) THEN
			-- The insert is rolled back, so read the absence: SERIALIZABLE has to see it.
			PERFORM FROM @extschema@.idem_claims AS c
			WHERE @extschema@.idem__has_key(c.user_id, c.request_id, c.scope, key);
			look := ROW ('stale', NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL)::@extschema@.idem__look;
		END IF;
	END IF;
	RETURN look;
END
$$;

-- Decisions 3 to 8, by the row of the key.  "claimed": the claim can take its place, and this
-- transaction has locked it.  Outcome NULL: the row, or the policy, has changed meanwhile.
CREATE FUNCTION @extschema@.idem__decide(
	key @extschema@.idem__key, fingerprint bytea, tells_progress boolean, policy @extschema@.idem__scope_policy, key_time timestamptz)
RETURNS @extschema@.idem__look
LANGUAGE plpgsql
AS $$
DECLARE
	seen record;
	look @extschema@.idem__look;
BEGIN
	SELECT c.xmin AS version,
		@extschema@.idem__is_ours(c.xmin) AND @extschema@.idem__is_of_now(c.state, c.lease_until) AS ours,
		c.state::text AS state, c.expires_at, c.lease_until, c.fingerprint, c.result, c.progress
	INTO seen FROM @extschema@.idem_claims AS c
	WHERE @extschema@.idem__has_key(c.user_id, c.request_id, c.scope, key)
	ORDER BY ours DESC LIMIT 1;		-- see idem__only_ours_counts()
	-- The transaction that the insert waited for may have changed the policy too.
	IF NOT FOUND OR (SELECT p FROM @extschema@.idem__policy(key.scope) AS p) IS DISTINCT FROM policy THEN
		RETURN look;
	END IF;

	look.is_ours := seen.ours;
	IF policy.reclaim AND NOT seen.ours AND seen.expires_at <= clock_timestamp()
		AND NOT (seen.state = 'in_progress' AND (policy.unknown OR seen.lease_until > clock_timestamp())) THEN
		-- 3
		look.outcome := CASE WHEN @extschema@.idem__may_be_forgotten(key_time, policy.ttl, policy.guarded_since)
			THEN 'stale' ELSE 'claimed' END;
	ELSE
		look.is_live := seen.state = 'in_progress' AND NOT seen.ours AND seen.lease_until > clock_timestamp();
		look.outcome := CASE
			-- 4
			WHEN seen.fingerprint <> fingerprint THEN 'mismatch'
			-- 5 and 8
			WHEN seen.state = 'completed' THEN 'completed'
			WHEN seen.state = 'failed' THEN CASE WHEN policy.retryable THEN 'claimed' ELSE 'failed' END
			-- 6
			WHEN seen.ours OR look.is_live THEN 'in_progress'
			-- 7
			WHEN policy.unknown THEN 'unknown'
			-- A caller who does not see the progress would do all the work again.
			WHEN seen.progress IS NOT NULL AND NOT tells_progress THEN 'unknown'
			ELSE 'claimed' END;
		look.is_live := look.is_live AND look.outcome = 'in_progress';
		-- Under another fingerprint the stored row belongs to another request.
		IF look.outcome <> 'mismatch' THEN
			look.progress := seen.progress;
			look.expires_at := seen.expires_at;
			look.lease_until := seen.lease_until;
			look.result := CASE WHEN look.outcome <> 'claimed' THEN seen.result END;
		END IF;
	END IF;

	IF look.outcome = 'claimed' THEN
		PERFORM FROM @extschema@.idem_claims AS c
		WHERE @extschema@.idem__has_key(c.user_id, c.request_id, c.scope, key) AND c.xmin = seen.version
		FOR NO KEY UPDATE;
		IF NOT FOUND THEN
			look.outcome := NULL;		-- changed meanwhile
		END IF;
	END IF;
	RETURN look;
END
$$;

-- The end of a look that claims.  Compares the policy with the one the look began with.  Outcome NULL:
-- the policy has changed.  The caller has the lock of the policies, so no change can follow until this
-- transaction ends.  Then overwrites the predecessor; or, if the insert has waited, updates the new row:
-- the ttl counts from now.
CREATE FUNCTION @extschema@.idem__keep_promise(
	look @extschema@.idem__look, key @extschema@.idem__key, new_fingerprint bytea, lease interval, new_progress jsonb, new_token int8,
	policy @extschema@.idem__scope_policy, key_time timestamptz)
RETURNS @extschema@.idem__look
LANGUAGE plpgsql
AS $$
DECLARE
	new_state constant @extschema@.idem_state := CASE WHEN lease IS NULL THEN 'completed' ELSE 'in_progress' END;
	-- If true, the row of the predecessor is of this same request: keep its fingerprint, promise and
	-- progress.  The progress of the predecessor takes precedence: the successor passed its own before
	-- the predecessor's was told.
	is_successor constant boolean := look.inserted_at IS NULL AND look.expires_at IS NOT NULL;
BEGIN
	IF (SELECT p FROM @extschema@.idem__policy(key.scope) AS p) IS DISTINCT FROM policy THEN
		look.outcome := NULL;
	ELSIF look.inserted_at IS NULL OR look.expires_at < clock_timestamp() + policy.ttl
		OR clock_timestamp() - look.inserted_at > interval '10 milliseconds' THEN
		look.lease_until := clock_timestamp() + lease;
		look.expires_at := greatest(CASE WHEN is_successor THEN look.expires_at END,
			@extschema@.idem__remembered_until(policy.ttl, key_time, look.lease_until));
		UPDATE @extschema@.idem_claims AS c SET expires_at = look.expires_at, lease_until = look.lease_until,
			token = new_token, state = new_state, result = NULL,
			fingerprint = CASE WHEN is_successor THEN coalesce(new_fingerprint, c.fingerprint) ELSE new_fingerprint END,
			progress = coalesce(look.progress, new_progress)
		WHERE @extschema@.idem__has_key(c.user_id, c.request_id, c.scope, key)
			AND (NOT look.is_ours OR @extschema@.idem__is_ours(c.xmin));
	END IF;
	look.token := new_token;
	RETURN look;
END
$$;

-- How a claim goes on after a look in which a lock was not available.  While a row is being
-- removed, nobody executes its key.  So a claim with wait => '0' waits for the removal too, for a
-- time.
CREATE FUNCTION @extschema@.idem__after_refusal(
	patience @extschema@.idem__patience, step text, key @extschema@.idem__key, deadline timestamptz)
RETURNS @extschema@.idem__patience
LANGUAGE plpgsql
AS $$
DECLARE
	was_deleting constant boolean := patience.is_deleting;
BEGIN
	IF step = 'lock policy at once' THEN
		patience.waits_for := 'policy';
		RETURN patience;
	END IF;
	patience.waits_for := CASE step WHEN 'lock policy' THEN 'policy' ELSE 'row' END;
	patience.slices := patience.slices + 1;
	patience.until := deadline;
	IF clock_timestamp() >= deadline THEN
		-- Called in any case: in SERIALIZABLE, "timed_out" has to be a read of the row, and this call is one.
		patience.is_deleting := coalesce(@extschema@.idem__is_being_deleted(key), false);
		patience.is_deleting := patience.is_deleting AND step = 'insert' AND clock_timestamp() < patience.delete_until;
		IF patience.is_deleting THEN
			patience.until := clock_timestamp() + interval '100 milliseconds';
		ELSIF was_deleting OR NOT patience.has_looked_again THEN
			-- The transaction that removed the row may have ended meanwhile, or been rolled back.
			patience.has_looked_again := true;
		ELSE
			patience.until := NULL;
		END IF;
	END IF;
	RETURN patience;
END
$$;

-- Looks at the key, and claims it if it can, until there is an outcome or the deadline passes.
-- is_live: wait until the lease ends or the deadline passes, then look again.
CREATE FUNCTION @extschema@.idem__look_at(
	key @extschema@.idem__key, fingerprint bytea, deadline timestamptz, lease interval, progress jsonb, tells_progress boolean,
	waits_for text, delete_until timestamptz)
RETURNS @extschema@.idem__look
LANGUAGE plpgsql
SET lock_timeout = '100'			-- so that the next element of a batch finds it as it was
AS $$
DECLARE
	patience @extschema@.idem__patience := ROW (waits_for, deadline, 0, delete_until, false, false)::@extschema@.idem__patience;
	step text;					-- of the look, for when a lock is not available
	policy @extschema@.idem__scope_policy;
	key_time timestamptz;
	token int8;
	look @extschema@.idem__look;
	ignored text;				-- assigned to, since PERFORM would need a query
BEGIN
	WHILE look.outcome IS NULL LOOP
		look := NULL;
		BEGIN
			IF patience.waits_for = 'policy' THEN
				step := 'lock policy';
				ignored := @extschema@.idem__bound_lock_waits(patience.until, patience.slices);
				LOCK TABLE @extschema@.idem_scopes IN ROW SHARE MODE;
			END IF;
			step := 'check';
			ignored := @extschema@.idem__bound_lock_waits(
				CASE patience.waits_for WHEN 'row' THEN patience.until ELSE '-infinity' END, patience.slices);
			policy := @extschema@.idem__policy_of_claim(key.scope);
			key_time := CASE WHEN policy.uuidv7 THEN @extschema@.idem__key_time(key) END;
			IF policy.uuidv7 AND (key_time IS NULL OR key_time > clock_timestamp() + interval '1 minute') THEN
				look.outcome := 'invalid';
				RAISE SQLSTATE 'ID001';
			ELSIF lease IS NOT NULL THEN
				ignored := @extschema@.idem__check_terms(key, lease, progress, policy);
				token := CASE WHEN patience.waits_for IS DISTINCT FROM 'row' THEN @extschema@.idem__draw_token(key, patience.waits_for IS NULL) END;
				patience.waits_for := coalesce(patience.waits_for, CASE WHEN token IS NULL THEN 'row' ELSE 'nothing' END);
			END IF;
			step := 'insert';
			look := @extschema@.idem__insert_claim(key, fingerprint, lease, progress, token, policy.ttl, policy.guarded_since, key_time);
			step := 'decide';
			IF look.outcome IS NULL THEN
				look := @extschema@.idem__decide(key, fingerprint, tells_progress, policy, key_time);
			END IF;
			IF look.outcome = 'claimed' AND lease IS NOT NULL AND token IS NULL THEN
				patience.waits_for := 'nothing';
				look.outcome := NULL;
			ELSIF look.outcome = 'claimed' THEN
				IF patience.waits_for <> 'policy' THEN
					step := 'lock policy at once';
					LOCK TABLE @extschema@.idem_scopes IN ROW SHARE MODE NOWAIT;
				END IF;
				step := 'write';
				look := @extschema@.idem__keep_promise(look, key, fingerprint, lease, progress, token, policy, key_time);
			END IF;
			IF look.outcome IS NULL OR look.outcome = 'stale' OR (look.outcome <> 'claimed' AND (look.is_live OR lease IS NOT NULL)) THEN
				RAISE SQLSTATE 'ID001';
			END IF;
		EXCEPTION
			WHEN SQLSTATE 'ID001' THEN
				NULL;
			WHEN lock_not_available THEN
				patience := @extschema@.idem__after_refusal(patience, step, key, deadline);
				look := NULL;
				look.outcome := CASE WHEN patience.until IS NULL THEN @extschema@.idem__outcome_of_passed(deadline) END;
		END;
	END LOOP;
	RETURN look;
END
$$;

-- lease: NULL for a transactional claim.  tells_progress: the call returns the progress of the
-- holder whose lapsed lease it takes over.  strict: raise ID400 for a key whose own time breaks
-- the policy; otherwise answer invalid.
CREATE FUNCTION @extschema@.idem__claim_key(
	command text, key @extschema@.idem__key, fingerprint bytea, deadline timestamptz,
	lease interval, progress jsonb, tells_progress boolean, strict boolean)
RETURNS @extschema@.idem__answer
LANGUAGE plpgsql
AS $$
DECLARE
	-- A row's removal is waited for so long at most: a batch of a cleaner takes about a second.
	delete_until constant timestamptz := clock_timestamp() + interval '5 seconds';
	waits_for text := CASE WHEN lease IS NULL THEN 'row' END;
	pause interval := '1 millisecond';
	look @extschema@.idem__look;
	ignored text;				-- assigned to, since PERFORM would need a query
BEGIN
	IF current_setting('transaction_read_only') = 'on' THEN
		PERFORM @extschema@.idem__require_writable(command);
	END IF;
	LOOP
		look := @extschema@.idem__look_at(key, fingerprint, deadline, lease, progress, tells_progress, waits_for, delete_until);
		EXIT WHEN look.is_live IS NOT TRUE;
		IF clock_timestamp() >= deadline THEN
			look.outcome := @extschema@.idem__outcome_of_passed(deadline);
			EXIT;
		END IF;
		PERFORM pg_sleep(date_part('epoch', least(clock_timestamp() + pause, look.lease_until, deadline) - clock_timestamp()));
		pause := least(pause * 2, interval '100 milliseconds');
		waits_for := 'row';
	END LOOP;

	IF look.outcome = 'claimed' THEN
		ignored := @extschema@.idem__note(E'+\t' || @extschema@.idem__held_text(key));
		-- A crash must not lose this commit: the token would be drawn again.
		IF lease IS NOT NULL THEN
			PERFORM @extschema@.idem__commit_synchronously();
		END IF;
	ELSIF look.outcome <> 'invalid' THEN
		ignored := @extschema@.idem__note_answer(@extschema@.idem__held_text(key), look.outcome, look.result);
	ELSIF strict AND @extschema@.idem__key_time(key) IS NULL THEN
		PERFORM @extschema@.idem__raise_of_key('ID400', 'request_id is not a version 7 UUID in canonical lower-case form',
			'Fix the client: this scope has key_time = uuidv7 and needs the time in the id.', key);
	ELSIF strict THEN
		PERFORM @extschema@.idem__raise_of_key('ID400', 'request id is ahead of the clock',
			'Fix the client: its clock is more than a minute ahead.', key);
	END IF;
	RETURN ROW (look.outcome, look.result, look.progress, look.token, look.expires_at, look.lease_until)::@extschema@.idem__answer;
END
$$;

-- ----- the common case of a claim -----

-- Whether a call waits at least a tenth of a second, for one that has an argument wait or a setting
-- idem.wait.  NULL: idem__deadline() has to say, which knows every unit, and what is wrong.
CREATE FUNCTION @extschema@.idem__waits_long(wait interval)
RETURNS boolean
LANGUAGE plpgsql STABLE
AS $$
BEGIN
	RETURN CASE WHEN wait IS NOT NULL THEN CASE WHEN wait >= interval '0' AND NOT @extschema@.idem__has_months(wait)
			THEN wait >= interval '100 milliseconds' END
		WHEN current_setting('idem.wait', true) COLLATE "C" ~ '^(-1( ?ms)?|[1-9][0-9]{2,5}( ?ms)?|[1-9][0-9]{0,5} ?s)$' THEN true
		WHEN current_setting('idem.wait', true) COLLATE "C" ~ '^[0-9]{1,6}( ?(ms|s))?$' THEN false END;
END
$$;

/*
 * Claims a key for this transaction in the two cases that matter for speed: the key is new, or
 * it is completed; the scope does not have key_time = uuidv7; and nobody is in the way.  Outcome
 * NULL: it is another case, nothing has happened, and idem__claim_key() has to decide.
 *
 * READ COMMITTED only: there each statement has a snapshot of its own.  The snapshot of a whole
 * transaction can see a dead row of a key, or two rows, see idem__only_ours_counts().
 *
 * Why no request is executed twice:
 *
 * - Only the insert ends in "claimed", and the primary key lets one transaction insert the key.
 *	 Another claimer, on whatever path, waits for ours to end, or ours for it.  An expired row, a
 *	 failed one and a lease are rows too, so nothing is inserted.  If a cleaner, idem_forget()
 *	 or a rollback is removing the row, the insert waits for the end of that transaction or
 *	 subtransaction, and succeeds only if no row is left.
 * - Each wait ends after a tenth of a second (lock_timeout).  The subtransaction is then rolled
 *	 back, with its row and its locks, and idem__claim_key() goes on waiting.  The same happens
 *	 after an insert that took longer than that in all.  The ttl has a tenth of a second more, so it counts
 *	 from the end of the wait.  (While a table is being extended, the server looks at lock_timeout
 *	 late.  A much shorter one can then end the claim with an error that looks like a cancel.)  A
 *	 caller who does not want to wait that long does not insert here.
 * - The insert reads the policy in the snapshot in which it decides.  The server takes the locks
 *	 of all tables of a statement before its snapshot.  A WITH query that nothing refers to is
 *	 never executed, but FOR KEY SHARE in it has the server take ROW SHARE on idem_scopes.
 *	 (LOCK TABLE does the same, at several times the cost.)  So the insert sees every change of
 *	 a promise that has committed, and idem__scopes_guard() holds the next one back until this
 *	 transaction ends.  A change of policy that makes no new promise is not ordered with claims.
 * - "completed" needs a completed row that the snapshot sees and whose xmax is 0.  Nobody had
 *	 begun to update, delete or lock it when we looked: so it was the latest version, and no
 *	 removal was under way.  The answer was true then, and needs no lock.  Its policy is read
 *	 in a later snapshot: a replay in between is as good as one after the change.
 * - ROLLBACK TO a savepoint undoes the row, the lock and the note together.
 *
 * The insert has the time from a variable: for a volatile function in it, the planner would put
 * the policy into a subquery of its own.
 *
 * The public functions that claim have the SET clauses, since each function that has some costs.
 * lock_timeout: see above.  enable_seqscan: a plan that was made while idem_claims was empty would
 * read all of it for as long as the session lives; jit: the server would compile such a plan, for
 * its cost.  plan_cache_mode: a plan is made once and kept.  The local variable is COLLATE "C":
 * otherwise it would have the collation of the caller's ids.
 *
 * (Replaced by sql/idem-citus.sql.)
 */
CREATE FUNCTION @extschema@.idem__claim_at_once(
	of_user text, of_request text, of_scope text, of_fingerprint bytea, wait interval,
	OUT outcome text, OUT result jsonb, OUT progress jsonb, OUT expires_at timestamptz, OUT lease_until timestamptz)
LANGUAGE plpgsql
AS $$
DECLARE
	begun constant timestamptz := clock_timestamp();
	latest constant text COLLATE "C" := current_setting('idem_held.latest', true);
	waits_long boolean := wait IS NULL AND coalesce(current_setting('idem.wait', true), '') = '';
	ignored text;				-- assigned to, since PERFORM would need a query
BEGIN
	IF NOT waits_long THEN
		waits_long := @extschema@.idem__waits_long(wait);
	END IF;
	-- Whether the arguments are good is seen at a glance here; otherwise idem__key_of() and
	-- others say what is wrong.  idem_portable.fast_path = off has tests take the slow path.
	IF (waits_long IS NOT NULL AND of_user <> '' AND of_request <> ''
			AND octet_length(of_user) <= 255 AND octet_length(of_request) <= 255 AND octet_length(of_scope) <= 255
			AND (of_fingerprint IS NULL OR octet_length(of_fingerprint) BETWEEN 1 AND 64)
			AND current_setting('transaction_isolation') IN ('read committed', 'read uncommitted')
			AND current_setting('transaction_read_only') = 'off'
			AND current_setting('idem_portable.fast_path', true) IS DISTINCT FROM 'off') IS NOT TRUE THEN
		RETURN;
	END IF;

	BEGIN
		IF waits_long THEN
			WITH locked AS (SELECT FROM @extschema@.idem_scopes FOR KEY SHARE)
			INSERT INTO @extschema@.idem_claims AS c (expires_at, state, request_id, user_id, scope, fingerprint)
			SELECT date_trunc('second', begun + interval '1100999 microseconds'
					+ @extschema@.idem__without_days(coalesce(p.ttl, d.ttl))),
				'completed', of_request, of_user, of_scope, of_fingerprint
			FROM @extschema@.idem_settings AS d LEFT JOIN @extschema@.idem_scopes AS p ON p.scope = of_scope COLLATE "C"
			WHERE CASE WHEN p.key_time IS NULL THEN d.scopes = 'any' ELSE p.key_time = 'any' END
			ON CONFLICT (request_id, user_id, scope) DO NOTHING
			RETURNING 'claimed', c.expires_at, set_config('idem_held.latest',
				'+' || c.ctid::text || E'\t' || array_to_json(ARRAY[of_user, of_request, of_scope])::text, true)
			INTO outcome, expires_at, ignored;
		END IF;
		IF outcome IS NULL THEN
			SELECT 'completed', c.result, c.progress, c.expires_at, c.lease_until, set_config('idem_held.latest',
				'-completed ' || array_to_json(ARRAY[of_user, of_request, of_scope])::text || E'\n' || coalesce(c.result::text, ''), true)
			INTO outcome, result, progress, expires_at, lease_until, ignored
			FROM @extschema@.idem_claims AS c, @extschema@.idem_settings AS d
				LEFT JOIN @extschema@.idem_scopes AS p ON p.scope = of_scope COLLATE "C"
			WHERE c.request_id = of_request COLLATE "C" AND c.user_id = of_user COLLATE "C" AND c.scope = of_scope COLLATE "C"
				AND c.state = 'completed' AND c.xmax = '0'::xid AND (c.fingerprint <> of_fingerprint) IS NOT TRUE
				AND CASE WHEN p.key_time IS NULL THEN d.scopes = 'any'
					ELSE p.key_time = 'any' AND (p.expired = 'protect' OR c.expires_at > clock_timestamp()) END;
		ELSIF clock_timestamp() > begun + interval '100 milliseconds' THEN
			RAISE SQLSTATE 'ID001';		-- releases the lock
		END IF;
		-- As idem__note() does
		IF latest ^@ '+' AND outcome IS NOT NULL THEN
			ignored := @extschema@.idem__keep(split_part(latest, E'\t', 2));
		END IF;
	EXCEPTION
		WHEN lock_not_available OR SQLSTATE 'ID001' THEN
			outcome := NULL;
	END;
END
$$;

/*
 * Claims a batch by one statement, if all its keys are valid, different and new, and nobody is in
 * the way.  False: not all keys are; NULL: somebody is, or has claimed one.  Nothing has happened
 * then.  The keys come sorted.
 *
 * The insert is that of idem__claim_at_once(), for which the same holds.  It counts only if it
 * has inserted every key: otherwise all is rolled back.  The look before it spares that in the
 * usual case, in which some of the keys are known already; the insert decides.
 *
 * Each key may wait, and the deadline is that of the whole batch.  So before each key the insert
 * compares the clock with wait_until, which is a tenth of a second before the deadline: no wait
 * ends after it.  Keys that it leaves out are missing at the end, so all is rolled back.
 *
 * (Replaced by sql/idem-citus.sql.)
 */
CREATE FUNCTION @extschema@.idem__claim_all_at_once(user_ids text[], request_ids text[], of_scope text, fingerprints bytea[],
	wait_until timestamptz)
RETURNS boolean
LANGUAGE plpgsql
AS $$
DECLARE
	keys constant int4 := cardinality(user_ids);
	held text[];
	ignored text;				-- assigned to, since PERFORM would need a query
BEGIN
	BEGIN
		-- (A scalar subquery: of EXISTS the planner could make a hash of the whole table.)
		PERFORM FROM unnest(user_ids, request_ids, fingerprints) AS e (user_id, request_id, fingerprint)
		WHERE (octet_length(e.user_id) BETWEEN 1 AND 255 AND octet_length(e.request_id) BETWEEN 1 AND 255
				AND (e.fingerprint IS NULL OR octet_length(e.fingerprint) BETWEEN 1 AND 64)) IS NOT TRUE
			OR (SELECT true FROM @extschema@.idem_claims AS c WHERE c.request_id = e.request_id COLLATE "C"
				AND c.user_id = e.user_id COLLATE "C" AND c.scope = of_scope COLLATE "C");
		IF FOUND THEN
			RETURN false;
		END IF;
		WITH locked AS (SELECT FROM @extschema@.idem_scopes FOR KEY SHARE),
			inserted AS (
				INSERT INTO @extschema@.idem_claims AS c (expires_at, state, request_id, user_id, scope, fingerprint)
				SELECT date_trunc('second', clock_timestamp() + interval '1100999 microseconds' + p.ttl),
					'completed', e.request_id, e.user_id, of_scope, e.fingerprint
				FROM (SELECT @extschema@.idem__without_days(coalesce(p.ttl, d.ttl))
						FROM @extschema@.idem_settings AS d LEFT JOIN @extschema@.idem_scopes AS p ON p.scope = of_scope COLLATE "C"
						WHERE CASE WHEN p.key_time IS NULL THEN d.scopes = 'any' ELSE p.key_time = 'any' END) AS p (ttl),
					unnest(user_ids, request_ids, fingerprints) AS e (user_id, request_id, fingerprint)
				WHERE clock_timestamp() < wait_until
				ON CONFLICT (request_id, user_id, scope) DO NOTHING
				RETURNING c.user_id, c.request_id, c.scope)
		SELECT array_agg(array_to_json(ARRAY[i.user_id, i.request_id, i.scope])::text) INTO held FROM inserted AS i;
		IF cardinality(held) IS DISTINCT FROM keys THEN
			RAISE SQLSTATE 'ID001';
		END IF;
	EXCEPTION
		WHEN lock_not_available OR SQLSTATE 'ID001' THEN
			RETURN NULL;
	END;

	-- Note them as if they had been claimed one after the other.
	ignored := @extschema@.idem__note(E'+\t' || held[keys]);
	IF keys > 1 THEN
		ignored := @extschema@.idem__keep(array_to_string(held[:keys - 1], E'\n'));
	END IF;
	RETURN true;
END
$$;

-- ----- claiming -----

CREATE FUNCTION @extschema@.idem_claim(
	user_id text, request_id text, scope text DEFAULT '',
	fingerprint bytea DEFAULT NULL, wait interval DEFAULT NULL)
RETURNS boolean
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE COST 10000
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET lock_timeout = '100' SET enable_seqscan = off SET jit = off SET plan_cache_mode = force_generic_plan
AS $$
DECLARE
	begun constant timestamptz := clock_timestamp();
	outcome text COLLATE "C" := (@extschema@.idem__claim_at_once(user_id, request_id, scope, fingerprint, wait)).outcome;
	deadline timestamptz;
	key @extschema@.idem__key;
BEGIN
	IF outcome IS NULL THEN
		deadline := @extschema@.idem__deadline(wait) - (clock_timestamp() - begun);
		key := @extschema@.idem__key_of(user_id, request_id, scope);
		PERFORM @extschema@.idem__check_fingerprint(fingerprint);
		outcome := (@extschema@.idem__claim_key('idem_claim()', key, fingerprint, deadline, NULL::interval, NULL::jsonb, false, true)).outcome;
		IF outcome = 'mismatch' AND fingerprint::text = current_setting('idem_call.fingerprint', true) THEN
			-- The caller of idem_call() has passed no fingerprint: say what differs.
			PERFORM @extschema@.idem__raise_of_key('ID422', 'request id was used before with another fingerprint',
				'The first call had another function or other arguments. A retry must send the same, also 30 and not "30"; only a new request takes a new id.', key);
		ELSIF outcome <> 'claimed' AND outcome <> 'completed' THEN
			PERFORM @extschema@.idem__raise_outcome(outcome, key);
		END IF;
	END IF;
	IF outcome = 'completed' AND (fingerprint::text = current_setting('idem_call.fingerprint', true)) IS TRUE THEN
		key := @extschema@.idem__key_of(user_id, request_id, scope);
		IF coalesce(@extschema@.idem__is_open(@extschema@.idem__held_text(key)),
				EXISTS (SELECT FROM @extschema@.idem__row_of_note(@extschema@.idem__held_text(key)) AS r WHERE r.result IS NULL)) THEN
			PERFORM @extschema@.idem__raise_of_key('55000', 'idem_call(): this transaction has claimed the request already, and not settled it',
				'Do not claim the request before the call. The function that it runs must use another scope for calls of its own.', key);
		END IF;
	END IF;
	RETURN outcome = 'claimed';
END
$$;

CREATE FUNCTION @extschema@.idem_try_claim(
	user_id text, request_id text, scope text DEFAULT '',
	fingerprint bytea DEFAULT NULL, wait interval DEFAULT NULL,
	OUT outcome @extschema@.idem_outcome, OUT result jsonb, OUT progress jsonb,
	OUT expires_at timestamptz, OUT lease_until timestamptz)
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE COST 10000
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET lock_timeout = '100' SET enable_seqscan = off SET jit = off SET plan_cache_mode = force_generic_plan
AS $$
DECLARE
	begun constant timestamptz := clock_timestamp();
	at_once record;
	deadline timestamptz;
	key @extschema@.idem__key;
	answer @extschema@.idem__answer;
BEGIN
	at_once := @extschema@.idem__claim_at_once(user_id, request_id, scope, fingerprint, wait);
	IF at_once.outcome IS NOT NULL THEN
		outcome := at_once.outcome;
		result := at_once.result;
		progress := at_once.progress;
		expires_at := at_once.expires_at;
		lease_until := at_once.lease_until;
		RETURN;
	END IF;
	deadline := @extschema@.idem__deadline(wait) - (clock_timestamp() - begun);
	key := @extschema@.idem__key_of(user_id, request_id, scope);
	PERFORM @extschema@.idem__check_fingerprint(fingerprint);
	answer := @extschema@.idem__claim_key('idem_try_claim()', key, fingerprint, deadline, NULL::interval, NULL::jsonb, true, true);
	outcome := answer.outcome;
	result := answer.result;
	progress := answer.progress;
	expires_at := answer.expires_at;
	lease_until := answer.lease_until;
END
$$;

CREATE FUNCTION @extschema@.idem_lease(
	user_id text, request_id text, lease interval, scope text DEFAULT '',
	fingerprint bytea DEFAULT NULL, wait interval DEFAULT NULL,
	OUT outcome @extschema@.idem_outcome, OUT result jsonb, INOUT progress jsonb DEFAULT NULL,
	OUT expires_at timestamptz, OUT lease_until timestamptz, OUT token int8)
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE COST 10000
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET lock_timeout = '100' SET enable_seqscan = off SET jit = off SET plan_cache_mode = force_generic_plan
AS $$
DECLARE
	deadline constant timestamptz := @extschema@.idem__deadline(wait);
	key constant @extschema@.idem__key := @extschema@.idem__key_of(user_id, request_id, scope);
	answer @extschema@.idem__answer;
BEGIN
	PERFORM @extschema@.idem__check_fingerprint(fingerprint);
	IF lease IS NULL THEN
		PERFORM @extschema@.idem__raise('ID400', 'lease must not be null',
			'Fix the client: pass how long the lease lasts, such as ''30 s''.');
	END IF;
	lease := @extschema@.idem__check_lease(lease);
	answer := @extschema@.idem__claim_key('idem_lease()', key, fingerprint, deadline, lease, progress, true, true);
	outcome := answer.outcome;
	result := answer.result;
	progress := answer.progress;
	expires_at := answer.expires_at;
	lease_until := answer.lease_until;
	token := @extschema@.idem__lease_token(key, answer.token);
END
$$;

-- Claims one element of a batch.  A malformed element is answered with invalid, and the
-- others are claimed.  is_free: nobody was in the way of its part of the batch.
CREATE FUNCTION @extschema@.idem__claim_element(user_id text, request_id text, scope text, fingerprint bytea, deadline timestamptz,
	is_free boolean)
RETURNS @extschema@.idem__answer
LANGUAGE plpgsql
AS $$
DECLARE
	at_once record;
BEGIN
	IF octet_length(user_id) BETWEEN 1 AND 255 AND octet_length(request_id) BETWEEN 1 AND 255
		AND (fingerprint IS NULL OR octet_length(fingerprint) BETWEEN 1 AND 64) THEN
		-- Past the deadline of the batch, no element is waited for twice.
		IF clock_timestamp() < deadline THEN
			at_once := @extschema@.idem__claim_at_once(user_id, request_id, scope, fingerprint,
				CASE WHEN is_free AND clock_timestamp() + interval '100 milliseconds' < deadline THEN interval '1 second' ELSE interval '0' END);
			IF at_once.outcome IS NOT NULL THEN
				RETURN ROW (at_once.outcome, at_once.result, NULL, NULL, NULL, NULL)::@extschema@.idem__answer;
			END IF;
		END IF;
		RETURN @extschema@.idem__claim_key('idem_claim_many()', ROW (user_id, request_id, scope)::@extschema@.idem__key,
			fingerprint, deadline, NULL::interval, NULL::jsonb, false, false);
	END IF;
	RETURN ROW ('invalid', NULL, NULL, NULL, NULL, NULL)::@extschema@.idem__answer;
END
$$;

-- Claims in the order of the keys, whatever the order of the arrays.  So batches that come
-- first in their transactions never deadlock with each other.
CREATE FUNCTION @extschema@.idem_claim_many(
	user_ids text[], request_ids text[], scope text DEFAULT '',
	fingerprints bytea[] DEFAULT NULL, wait interval DEFAULT NULL)
RETURNS TABLE (ordinal int4, outcome @extschema@.idem_outcome, result jsonb)
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE COST 10000
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET lock_timeout = '100' SET enable_seqscan = off SET jit = off SET plan_cache_mode = force_generic_plan
AS $$
DECLARE
	deadline constant timestamptz := @extschema@.idem__deadline(wait);
	wait_until constant timestamptz := deadline - interval '100 milliseconds';		-- see idem__claim_all_at_once()
	refused text;
	may_be_at_once boolean;
	was_claimed boolean;		-- the part, at once; NULL: somebody was in the way
	sorted record;
	keys int4;
	first int4 := 1;			-- of a part of the batch
	last int4;
	part int4 := 250;
	outcomes @extschema@.idem_outcome[] := '{}';
	results jsonb[] := '{}';
	answers record;
BEGIN
	PERFORM @extschema@.idem__check_scope(scope);
	refused := CASE
		WHEN user_ids IS NULL THEN 'user_ids and request_ids must not be null'
		WHEN array_ndims(user_ids) > 1 THEN 'arrays must have one dimension'
		WHEN request_ids IS NULL THEN 'user_ids and request_ids must not be null'
		WHEN array_ndims(request_ids) > 1 OR array_ndims(fingerprints) > 1 THEN 'arrays must have one dimension'
		WHEN cardinality(user_ids) <> cardinality(request_ids) OR cardinality(user_ids) <> cardinality(fingerprints)
			THEN 'arrays must have the same length' END;
	-- (The limit is the C edition's.)
	IF refused IS DISTINCT FROM 'arrays must have one dimension'
		AND greatest(cardinality(user_ids), cardinality(request_ids), cardinality(fingerprints)) > 10000000 THEN
		PERFORM @extschema@.idem__raise('ID400', 'more than 10000000 requests in one call', 'Fix the client: pass them in several calls.');
	END IF;
	IF refused IS NOT NULL THEN
		PERFORM @extschema@.idem__raise('ID400', refused,
			'Fix the client: pass one-dimensional arrays of the same length, one element a request.');
	END IF;
	PERFORM @extschema@.idem__require_writable('idem_claim_many()');

	SELECT array_agg(e.user_id) AS user_ids, array_agg(e.request_id) AS request_ids, array_agg(e.fingerprint) AS fingerprints,
		array_agg(e.n::int4) AS ordinals
	INTO sorted
	FROM (SELECT t.n, t.user_id, t.request_id, t.fingerprint
			FROM unnest(user_ids, request_ids, fingerprints) WITH ORDINALITY AS t (user_id, request_id, fingerprint, n)
			ORDER BY t.request_id COLLATE "C", t.user_id COLLATE "C", t.n) AS e;
	keys := coalesce(cardinality(sorted.ordinals), 0);
	may_be_at_once := current_setting('transaction_isolation') IN ('read committed', 'read uncommitted')
		AND current_setting('idem_portable.fast_path', true) IS DISTINCT FROM 'off';

	-- In parts, which are rolled back one by one where somebody is in the way.  They double as
	-- long as nobody is: so the subtransactions are few, and at most half of the work is done
	-- twice.
	WHILE first <= keys LOOP
		last := least(first + part - 1, keys);
		was_claimed := CASE WHEN may_be_at_once AND last > first AND clock_timestamp() < wait_until THEN @extschema@.idem__claim_all_at_once(
			sorted.user_ids[first:last], sorted.request_ids[first:last], scope, sorted.fingerprints[first:last], wait_until) ELSE false END;
		IF was_claimed THEN
			part := part * 2;
			outcomes := outcomes || array_fill('claimed'::@extschema@.idem_outcome, ARRAY[last - first + 1]);
			results := results || array_fill(NULL::jsonb, ARRAY[last - first + 1]);
		ELSE
			part := 250;
			SELECT array_agg(a.outcome) AS outcomes, array_agg(a.result) AS results INTO answers
			FROM (SELECT t.user_id, t.request_id, t.fingerprint
					FROM unnest(sorted.user_ids[first:last], sorted.request_ids[first:last], sorted.fingerprints[first:last])
						WITH ORDINALITY AS t (user_id, request_id, fingerprint, n)
					ORDER BY t.n) AS e,
				@extschema@.idem__claim_element(e.user_id, e.request_id, idem_claim_many.scope, e.fingerprint, deadline,
					was_claimed IS NOT NULL) AS a;
			outcomes := outcomes || answers.outcomes;
			results := results || answers.results;
		END IF;
		first := last + 1;
	END LOOP;
	RETURN QUERY SELECT t.n, t.outcome, t.result FROM unnest(sorted.ordinals, outcomes, results) AS t (n, outcome, result) ORDER BY t.n;
END
$$;
