-- ----- claiming -----

/*
 * Whatever the function, a claim decides in this order:
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
 * The insert comes first.  INSERT ... ON CONFLICT DO NOTHING waits for the transaction that has
 * the row (2), raises 40001 if the deciding row is invisible to the snapshot, and is all that a
 * new key needs.  The primary key lets one transaction insert the key.  Only an insert or update
 * that succeeds ends in "claimed": when a holder vanishes, exactly one of its waiters replaces it.
 *
 * idem__claim_at_once() is the first look at a key, which decides most claims.  What it leaves
 * open, and every lease, is decided by idem__claim_key(): it calls idem__look() until there is an
 * answer.  Each look runs in a subtransaction, because lock_timeout bounds its waits and ends them
 * with an error.  One that does not claim is rolled back, on purpose (ID001), and so are its
 * locks: otherwise DDL would queue behind a sleeper, and the holder behind the DDL.
 *
 * The lock of idem_scopes (ROW SHARE) orders claims with changes of a promise, see
 * idem__scopes_guard().  A claim has it from before it last reads its policy until its transaction
 * ends.  A look waits no more than a moment for it while it has a row, and no more than a tenth of a
 * second for a row while it has this lock: otherwise two transactions could take the two in
 * opposite order, and deadlock.
 *
 * The public functions have the SET clauses, since each function that has some costs.  enable_seqscan:
 * a plan that was made while idem_claims was empty would read all of it for as long as the session
 * lives; jit: the server would compile such a plan, for its cost.
 */

CREATE FUNCTION @extschema@.idem_claim(
	user_id text, request_id text, scope text DEFAULT '',
	fingerprint bytea DEFAULT NULL, wait interval DEFAULT NULL) RETURNS boolean
LANGUAGE plpgsql COST 10000 SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '100'
SET enable_seqscan = off SET jit = off SET plan_cache_mode = force_generic_plan AS $$
DECLARE
	begun constant timestamptz := clock_timestamp();
	deadline timestamptz;
	outcome text COLLATE "C";
	key @extschema@.idem__key;
BEGIN
	BEGIN
		outcome := (@extschema@.idem__claim_at_once(user_id, request_id, scope, fingerprint, wait)).outcome;
	EXCEPTION WHEN lock_not_available OR SQLSTATE 'ID001' THEN
		NULL;
	END;
	IF outcome IS NULL THEN
		deadline := @extschema@.idem__deadline(wait) - (clock_timestamp() - begun);
		key := @extschema@.idem__key_of(user_id, request_id, scope);
		outcome := (@extschema@.idem__claim_key('idem_claim()', key, fingerprint, deadline, NULL::interval, NULL::jsonb, false, true)).outcome;
		IF outcome <> 'claimed' AND outcome <> 'completed' THEN
			PERFORM @extschema@.idem__raise_outcome(outcome, key);
		END IF;
	END IF;
	RETURN outcome = 'claimed';
END $$;

CREATE FUNCTION @extschema@.idem_try_claim(
	user_id text, request_id text, scope text DEFAULT '',
	fingerprint bytea DEFAULT NULL, wait interval DEFAULT NULL,
	OUT outcome @extschema@.idem_outcome, OUT result jsonb, OUT progress jsonb,
	OUT expires_at timestamptz, OUT lease_until timestamptz)
LANGUAGE plpgsql COST 10000 SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '100'
SET enable_seqscan = off SET jit = off SET plan_cache_mode = force_generic_plan AS $$
DECLARE
	begun constant timestamptz := clock_timestamp();
	deadline timestamptz;
	answer @extschema@.idem__answer;
BEGIN
	BEGIN
		answer := @extschema@.idem__claim_at_once(user_id, request_id, scope, fingerprint, wait);
	EXCEPTION WHEN lock_not_available OR SQLSTATE 'ID001' THEN
		NULL;
	END;
	IF answer.outcome IS NULL THEN
		deadline := @extschema@.idem__deadline(wait) - (clock_timestamp() - begun);
		answer := @extschema@.idem__claim_key('idem_try_claim()', @extschema@.idem__key_of(user_id, request_id, scope), fingerprint,
			deadline, NULL::interval, NULL::jsonb, true, true);
	END IF;
	outcome := answer.outcome;
	result := answer.result;
	progress := answer.progress;
	expires_at := answer.expires_at;
	lease_until := answer.lease_until;
END $$;

CREATE FUNCTION @extschema@.idem_lease(
	user_id text, request_id text, lease interval, scope text DEFAULT '',
	fingerprint bytea DEFAULT NULL, wait interval DEFAULT NULL,
	OUT outcome @extschema@.idem_outcome, OUT result jsonb, INOUT progress jsonb DEFAULT NULL,
	OUT expires_at timestamptz, OUT lease_until timestamptz, OUT token int8)
LANGUAGE plpgsql COST 10000 SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '100'
SET enable_seqscan = off SET jit = off SET plan_cache_mode = force_generic_plan AS $$
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
	token := answer.token;
END $$;

-- Claims in the order of the keys, whatever the order of the arrays: so batches that come first in
-- their transactions never deadlock with each other.  In parts of 500, each by one statement; where that
-- does not succeed, key by key.
CREATE FUNCTION @extschema@.idem_claim_many(
	user_ids text[], request_ids text[], scope text DEFAULT '',
	fingerprints bytea[] DEFAULT NULL, wait interval DEFAULT NULL)
RETURNS TABLE (ordinal int4, outcome @extschema@.idem_outcome, result jsonb)
LANGUAGE plpgsql COST 10000 SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '100'
SET enable_seqscan = off SET jit = off SET plan_cache_mode = force_generic_plan AS $$
DECLARE
	deadline constant timestamptz := @extschema@.idem__deadline(wait);
	wait_until constant timestamptz := deadline - interval '100 milliseconds';	-- no look begins later, see lock_timeout
	refused constant text := CASE
		WHEN array_ndims(user_ids) > 1 OR array_ndims(request_ids) > 1 OR array_ndims(fingerprints) > 1
			THEN 'arrays must have one dimension'
		WHEN user_ids IS NULL OR request_ids IS NULL THEN 'user_ids and request_ids must not be null'
		WHEN greatest(cardinality(user_ids), cardinality(request_ids), cardinality(fingerprints)) > 10000000
			THEN 'more than 10000000 requests in one call'
		WHEN cardinality(user_ids) <> cardinality(request_ids) OR cardinality(user_ids) <> cardinality(fingerprints)
			THEN 'arrays must have the same length' END;
	outcomes @extschema@.idem_outcome[];
	results jsonb[];
	part record;
	answer @extschema@.idem__answer;
BEGIN
	PERFORM @extschema@.idem__check_scope(scope);
	IF refused IS NOT NULL THEN
		PERFORM @extschema@.idem__raise('ID400', refused, CASE WHEN refused ^@ 'more' THEN 'Fix the client: pass them in several calls.'
			ELSE 'Fix the client: pass one-dimensional arrays of the same length, one element a request.' END);
	END IF;
	PERFORM @extschema@.idem__require_writable('idem_claim_many()');
	outcomes := array_fill('claimed'::@extschema@.idem_outcome, ARRAY[cardinality(user_ids)]);
	results := array_fill(NULL::jsonb, ARRAY[cardinality(user_ids)]);
	FOR part IN
		SELECT array_agg(e.user_id ORDER BY e.place) AS user_ids, array_agg(e.request_id ORDER BY e.place) AS request_ids,
			array_agg(e.fingerprint ORDER BY e.place) AS fingerprints, array_agg(e.n ORDER BY e.place) AS ordinals
		FROM (SELECT t.*, row_number() OVER (ORDER BY t.request_id COLLATE "C", t.user_id COLLATE "C", t.n) AS place
				FROM unnest(user_ids, request_ids, fingerprints) WITH ORDINALITY AS t (user_id, request_id, fingerprint, n)) AS e
		GROUP BY (e.place - 1) / 500 ORDER BY min(e.place)
	LOOP
		CONTINUE WHEN cardinality(part.ordinals) > 1 AND clock_timestamp() < wait_until
			AND @extschema@.idem__claim_all_at_once(part.user_ids, part.request_ids, scope, part.fingerprints, wait_until);
		FOR i IN 1 .. cardinality(part.ordinals) LOOP
			answer := @extschema@.idem__claim_element(part.user_ids[i], part.request_ids[i], scope, part.fingerprints[i], deadline);
			outcomes[part.ordinals[i]] := answer.outcome;
			results[part.ordinals[i]] := answer.result;
		END LOOP;
	END LOOP;
	RETURN QUERY SELECT t.n::int4, t.outcome, t.result FROM unnest(outcomes, results) WITH ORDINALITY AS t (outcome, result, n)
	ORDER BY t.n;
END $$;

-- ----- the protocol -----

/*
 * The first look at a key, for a claim that is no lease: it decides if the key is new or completed, its
 * scope does not have key_time = uuidv7, and nobody is in the way for long.  Outcome NULL: an
 * argument is wrong, or the waits have to be bounded otherwise.  Raises ID001 in other cases,
 * lock_not_available if somebody is in the way for longer than lock_timeout.
 *
 * - The insert reads the policy, idem__policies, in the snapshot in which it decides.  The server
 *	 takes the locks of all tables of a statement before its snapshot.  A WITH query that nothing
 *	 refers to is never executed, but FOR KEY SHARE in it has the server take ROW SHARE on
 *	 idem_scopes.  (LOCK TABLE does the same, at several times the cost.)
 * - The insert has the time from a variable: for a volatile function in it, the planner would put the
 *	 policy into a subquery of its own.  The ttl has a tenth of a second more.  An insert that took
 *	 longer is extended by that time: the ttl counts from the end of the wait.
 * - "completed" needs a row that the snapshot sees and whose xmax is 0.  Nobody had begun to
 *	 update, delete or lock it when we looked: so it was the latest version, and no removal was
 *	 under way.  The answer was true then, and needs no lock.  Of the two rows of a key that the
 *	 snapshot of a whole transaction can see, the dropped one has an xmax.
 *
 * (Replaced by sql/idem-citus.sql.)
 */
CREATE FUNCTION @extschema@.idem__claim_at_once(
	of_user text, of_request text, of_scope text, of_fingerprint bytea, wait interval,
	OUT outcome text, OUT result jsonb, OUT progress jsonb, OUT token int8, OUT expires_at timestamptz, OUT lease_until timestamptz)
LANGUAGE plpgsql AS $$
DECLARE
	begun constant timestamptz := clock_timestamp();
	previous text COLLATE "C";	-- note; see idem__note()
	ignored text;				-- assigned to, since PERFORM would need a query
BEGIN
	-- Whether the arguments are good is seen at a glance here; otherwise others say what is wrong.
	-- A brief wait is for a millisecond here; idem__claim_key() goes on.
	IF (of_user <> '' AND of_request <> ''
			AND octet_length(of_user) <= 255 AND octet_length(of_request) <= 255 AND octet_length(of_scope) <= 255
			AND (of_fingerprint IS NULL OR octet_length(of_fingerprint) BETWEEN 1 AND 64)
			AND CASE WHEN wait >= interval '100 milliseconds' THEN wait <= interval '25 days'
				WHEN wait IS NOT NULL THEN wait >= interval '0' AND NOT @extschema@.idem__has_months(wait)
					AND set_config('lock_timeout', '1', true) IS NOT NULL
				ELSE coalesce(current_setting('idem.wait', true), '') = ''
					OR current_setting('idem.wait', true) COLLATE "C" ~ '^(-1|[1-9][0-9]{2,5} ?(ms)?|[1-9][0-9]{0,5} ?s)$' END
			AND current_setting('transaction_read_only') = 'off') IS NOT TRUE THEN
		RETURN;
	END IF;
	WITH locked AS (SELECT FROM @extschema@.idem_scopes FOR KEY SHARE)
	INSERT INTO @extschema@.idem_claims AS c (expires_at, state, request_id, user_id, scope, fingerprint)
	SELECT date_trunc('second', begun + interval '1100999 microseconds' + p.ttls[coalesce(array_position(p.scopes, of_scope COLLATE "C"), 1)]),
		'completed', of_request, of_user, of_scope, of_fingerprint
	FROM @extschema@.idem__policies AS p
	WHERE p.ttls[coalesce(array_position(p.scopes, of_scope COLLATE "C"), 1)] IS NOT NULL
	ON CONFLICT (request_id, user_id, scope) DO NOTHING
	RETURNING 'claimed', c.expires_at, current_setting('idem_held.latest', true),
		set_config('idem_held.latest', '+' || c.ctid::text || E'\t' || array_to_json(ARRAY[of_user, of_request, of_scope])::text, true)
	INTO outcome, expires_at, previous, ignored;
	IF outcome IS NULL THEN
		SELECT 'completed', c.result, c.progress, c.expires_at, c.lease_until, current_setting('idem_held.latest', true),
			set_config('idem_held.latest', '-completed ' || array_to_json(ARRAY[of_user, of_request, of_scope])::text
				|| E'\n' || coalesce(c.result::text, ''), true)
		INTO outcome, result, progress, expires_at, lease_until, previous, ignored
		FROM @extschema@.idem_claims AS c, @extschema@.idem__policies AS p
		WHERE c.request_id = of_request COLLATE "C" AND c.user_id = of_user COLLATE "C" AND c.scope = of_scope COLLATE "C"
			AND c.state = 'completed' AND c.xmax = '0'::xid AND (c.fingerprint <> of_fingerprint) IS NOT TRUE
			AND c.expires_at > clock_timestamp() AND p.ttls[coalesce(array_position(p.scopes, of_scope COLLATE "C"), 1)] IS NOT NULL;
		IF NOT FOUND THEN
			RAISE SQLSTATE 'ID001';		-- releases the locks
		END IF;
	ELSIF clock_timestamp() > begun + interval '100 milliseconds' THEN
		expires_at := @extschema@.idem__whole_second(expires_at + (clock_timestamp() - begun));
		UPDATE @extschema@.idem_claims AS c SET expires_at = idem__claim_at_once.expires_at
		WHERE c.request_id = of_request COLLATE "C" AND c.user_id = of_user COLLATE "C" AND c.scope = of_scope COLLATE "C"
			AND @extschema@.idem__is_ours(c.xmin);
	END IF;
	IF previous ^@ '+' THEN
		ignored := @extschema@.idem__keep(split_part(previous, E'\t', 2));
	END IF;
END $$;

/*
 * Claims a batch by one statement, and is true, if all its keys are valid, different and new, and
 * nobody is in the way.  Otherwise nothing has happened.  The keys come sorted.
 *
 * The insert is that of idem__claim_at_once().  The look before it spares a part in which keys are
 * known already; the insert decides.  Before each key it compares the clock with wait_until, so that no
 * wait ends after the deadline; keys that it leaves out are missing at the end, and all is rolled back.
 *
 * (Replaced by sql/idem-citus.sql.)
 */
CREATE FUNCTION @extschema@.idem__claim_all_at_once(user_ids text[], request_ids text[], of_scope text, fingerprints bytea[],
	wait_until timestamptz) RETURNS boolean LANGUAGE plpgsql AS $$
DECLARE
	keys constant int4 := cardinality(user_ids);
	held text[];
BEGIN
	-- (A scalar subquery: of EXISTS the planner could make a hash of the whole table.)
	PERFORM FROM unnest(user_ids, request_ids, fingerprints) AS e (user_id, request_id, fingerprint)
	WHERE (octet_length(e.user_id) BETWEEN 1 AND 255 AND octet_length(e.request_id) BETWEEN 1 AND 255
			AND (e.fingerprint IS NULL OR octet_length(e.fingerprint) BETWEEN 1 AND 64)) IS NOT TRUE
		OR (SELECT true FROM @extschema@.idem_claims AS c WHERE c.request_id = e.request_id COLLATE "C"
			AND c.user_id = e.user_id COLLATE "C" AND c.scope = of_scope COLLATE "C" LIMIT 1);
	IF FOUND THEN
		RETURN false;
	END IF;
	WITH locked AS (SELECT FROM @extschema@.idem_scopes FOR KEY SHARE),
		inserted AS (
			INSERT INTO @extschema@.idem_claims AS c (expires_at, state, request_id, user_id, scope, fingerprint)
			SELECT date_trunc('second', clock_timestamp() + interval '1100999 microseconds' + p.ttl),
				'completed', e.request_id, e.user_id, of_scope, e.fingerprint
			FROM (SELECT f.ttls[coalesce(array_position(f.scopes, of_scope COLLATE "C"), 1)] FROM @extschema@.idem__policies AS f) AS p (ttl),
				unnest(user_ids, request_ids, fingerprints) AS e (user_id, request_id, fingerprint)
			WHERE p.ttl IS NOT NULL AND clock_timestamp() < wait_until
			ON CONFLICT (request_id, user_id, scope) DO NOTHING
			RETURNING c.user_id, c.request_id, c.scope)
	SELECT array_agg(array_to_json(ARRAY[i.user_id, i.request_id, i.scope])::text) INTO held FROM inserted AS i;
	IF cardinality(held) IS DISTINCT FROM keys THEN
		RAISE SQLSTATE 'ID001';
	END IF;
	-- Note them as if they had been claimed one after the other.
	PERFORM @extschema@.idem__note(E'+\t' || held[keys]),
		CASE WHEN keys > 1 THEN @extschema@.idem__keep(array_to_string(held[:keys - 1], E'\n')) END;
	RETURN true;
EXCEPTION
	WHEN lock_not_available OR SQLSTATE 'ID001' THEN
		RETURN false;
END $$;

-- Claims a key of a batch.  A malformed one is answered with invalid, and the others are claimed.
CREATE FUNCTION @extschema@.idem__claim_element(user_id text, request_id text, scope text, fingerprint bytea, deadline timestamptz)
RETURNS @extschema@.idem__answer LANGUAGE plpgsql AS $$
DECLARE
	answer @extschema@.idem__answer;
BEGIN
	IF (octet_length(user_id) BETWEEN 1 AND 255 AND octet_length(request_id) BETWEEN 1 AND 255
			AND (fingerprint IS NULL OR octet_length(fingerprint) BETWEEN 1 AND 64)) IS NOT TRUE THEN
		answer.outcome := 'invalid';
		RETURN answer;
	END IF;
	BEGIN
		answer := @extschema@.idem__claim_at_once(user_id, request_id, scope, fingerprint,
			CASE WHEN clock_timestamp() + interval '100 milliseconds' < deadline THEN interval '1 second' ELSE interval '0' END);
	EXCEPTION WHEN lock_not_available OR SQLSTATE 'ID001' THEN
		NULL;
	END;
	IF answer.outcome IS NULL THEN
		answer := @extschema@.idem__claim_key('idem_claim_many()', ROW (user_id, request_id, scope)::@extschema@.idem__key,
			fingerprint, deadline, NULL::interval, NULL::jsonb, false, false);
	END IF;
	RETURN answer;
END $$;

-- Claims a key, as described above.  lease: NULL for a transactional claim.  tells_progress: the
-- call returns the progress of the holder whose lapsed lease it takes over.  strict: raise ID400
-- for a key whose own time breaks the policy; otherwise answer invalid, for a batch.
CREATE FUNCTION @extschema@.idem__claim_key(
	command text, key @extschema@.idem__key, fingerprint bytea, deadline timestamptz,
	lease interval, progress jsonb, tells_progress boolean, strict boolean)
RETURNS @extschema@.idem__answer LANGUAGE plpgsql
SET lock_timeout = '100' AS $$		-- so that the next element of a batch finds it as it was
DECLARE
	pause interval := '1 millisecond';
	slices int4 := 0;
	wait_until timestamptz := deadline;
	context text;				-- where an error was raised
	is_refused boolean := false;	-- the look before: a lock was not available, perhaps that of idem_scopes
	answer @extschema@.idem__answer;
	ignored text;				-- assigned to, since PERFORM would need a query
BEGIN
	PERFORM @extschema@.idem__check_fingerprint(fingerprint), @extschema@.idem__require_writable(command);
	LOOP
		answer := NULL;
		BEGIN
			ignored := @extschema@.idem__bound_lock_waits(wait_until, slices);
			IF is_refused THEN
				is_refused := false;
				LOCK TABLE @extschema@.idem_scopes IN ROW SHARE MODE;		-- a look does not wait for it
			ELSE
				is_refused := true;
				answer := @extschema@.idem__look(key, fingerprint, lease, progress, tells_progress);
				is_refused := false;
				EXIT WHEN answer.outcome = 'claimed';
			END IF;
			RAISE SQLSTATE 'ID001';
		EXCEPTION
			WHEN SQLSTATE 'ID001' THEN
				NULL;
			WHEN lock_not_available THEN
				slices := slices + is_refused::int4;
				-- If it waited for a holder, the server names a tuple first, such as (0,1).  Else it waited until
				-- others had made the table larger, say, which takes a moment and is no answer.
				GET STACKED DIAGNOSTICS context = PG_EXCEPTION_CONTEXT;
				IF strict AND is_refused AND slices = 1 AND split_part(context, E'\n', 1) !~ '\(\d+,\d+\)' THEN
					wait_until := greatest(deadline, clock_timestamp() + interval '100 milliseconds');
				END IF;
		END;
		EXIT WHEN answer.outcome IS NOT NULL;
		IF (is_refused AND clock_timestamp() >= wait_until) OR (answer.lease_until IS NOT NULL AND clock_timestamp() >= deadline) THEN
			answer.outcome := @extschema@.idem__outcome_of_passed(deadline);
			EXIT;
		ELSIF answer.lease_until IS NOT NULL THEN
			PERFORM pg_sleep(date_part('epoch', least(clock_timestamp() + pause, answer.lease_until, deadline) - clock_timestamp()));
			pause := least(pause * 2, interval '100 milliseconds');
		END IF;
	END LOOP;

	IF answer.outcome = 'claimed' THEN
		-- A crash must not lose this commit: the token would be drawn again.
		IF lease IS NOT NULL THEN
			PERFORM @extschema@.idem__commit_synchronously();
		END IF;
		RETURN answer;
	ELSIF answer.outcome = 'invalid' AND strict THEN
		PERFORM @extschema@.idem__raise_of_key('ID400', CASE WHEN @extschema@.idem__key_time(key) IS NULL
				THEN 'request_id is not a version 7 UUID in canonical lower-case form' ELSE 'request id is ahead of the clock' END,
			CASE WHEN @extschema@.idem__key_time(key) IS NULL
				THEN 'Fix the client: this scope has key_time = uuidv7 and needs the time in the id.'
				ELSE 'Fix the client: its clock is more than a minute ahead.' END, key);
	ELSIF answer.outcome <> 'invalid' THEN
		ignored := @extschema@.idem__note_answer(@extschema@.idem__held_text(key), answer.outcome, answer.result);
	END IF;
	IF is_refused AND current_setting('transaction_isolation') = 'serializable' THEN
		-- The answer has to be a read of the row.
		BEGIN
			PERFORM set_config('lock_timeout', '1', true);
			PERFORM FROM @extschema@.idem_claims AS c
			WHERE @extschema@.idem__has_key(c.user_id, c.request_id, c.scope, key);
		EXCEPTION WHEN lock_not_available THEN
			NULL;				-- somebody has locked the table
		END;
	END IF;
	RETURN answer;
END $$;

-- Looks at the key, and claims it if it can.  The row is written twice if it is inserted for a
-- lease, whose token is drawn when it has the row, or after a wait: the ttl counts from now.
CREATE FUNCTION @extschema@.idem__look(
	key @extschema@.idem__key, new_fingerprint bytea, lease interval, new_progress jsonb, tells_progress boolean)
RETURNS @extschema@.idem__answer LANGUAGE plpgsql AS $$
DECLARE
	begun constant timestamptz := clock_timestamp();
	new_state constant @extschema@.idem_state := CASE WHEN lease IS NULL THEN 'completed' ELSE 'in_progress' END;
	policy @extschema@.idem__scope_policy;
	key_time timestamptz;
	is_new boolean;
	only_ours boolean;
	is_successor boolean;		-- keeps the fingerprint, promise and progress of the row, which is of this request
	answer @extschema@.idem__answer;
BEGIN
	policy := @extschema@.idem__policy_of_claim(key.scope);
	IF policy.uuidv7 THEN
		key_time := @extschema@.idem__key_time(key);
		IF key_time IS NULL OR key_time > clock_timestamp() + interval '1 minute' THEN
			answer.outcome := 'invalid';
			RETURN answer;
		END IF;
	END IF;
	IF lease IS NOT NULL THEN
		PERFORM @extschema@.idem__check_lease_max(key, lease, policy.lease_max),
			@extschema@.idem__check_size(key, 'progress', new_progress, policy.result_max_bytes);
	END IF;
	answer.expires_at := @extschema@.idem__remembered_until(policy.ttl, key_time, begun + lease);
	INSERT INTO @extschema@.idem_claims AS c (expires_at, lease_until, state, request_id, user_id, scope, fingerprint, progress)
	VALUES (answer.expires_at, begun + lease, new_state, key.request_id, key.user_id, key.scope, new_fingerprint, new_progress)
	ON CONFLICT (request_id, user_id, scope) DO NOTHING;
	is_new := FOUND;
	IF NOT is_new THEN
		answer := @extschema@.idem__decide(key, new_fingerprint, tells_progress, policy, key_time);
	ELSIF @extschema@.idem__may_be_forgotten(key_time, policy) THEN
		-- The insert is rolled back, so read the absence: SERIALIZABLE has to see it.
		PERFORM FROM @extschema@.idem_claims AS c
		WHERE @extschema@.idem__has_key(c.user_id, c.request_id, c.scope, key);
		RETURN ROW ('stale', NULL, NULL, NULL, NULL, NULL)::@extschema@.idem__answer;
	ELSE
		answer.outcome := 'claimed';
	END IF;
	IF answer.outcome = 'claimed' THEN
		answer.token := CASE WHEN lease IS NOT NULL THEN @extschema@.idem__draw_token(key) END;
		-- (Not NOWAIT, which refuses it behind a change that waits for this transaction.)
		PERFORM set_config('lock_timeout', '1', true);
		LOCK TABLE @extschema@.idem_scopes IN ROW SHARE MODE;
		PERFORM set_config('lock_timeout', '100', true);
	END IF;
	IF (SELECT p FROM @extschema@.idem__policy(key.scope) AS p) IS DISTINCT FROM policy THEN
		RETURN NULL;			-- the transaction that the insert waited for may have changed it
	ELSIF answer.outcome IS DISTINCT FROM 'claimed' THEN
		RETURN answer;
	END IF;
	is_successor := NOT is_new AND answer.expires_at IS NOT NULL;
	answer.lease_until := clock_timestamp() + lease;
	only_ours := @extschema@.idem__only_ours_counts(key);
	IF NOT is_new OR lease IS NOT NULL OR answer.expires_at < clock_timestamp() + policy.ttl
		OR clock_timestamp() - begun > interval '10 milliseconds' THEN
		answer.expires_at := greatest(CASE WHEN is_successor THEN answer.expires_at END,
			@extschema@.idem__remembered_until(policy.ttl, key_time, answer.lease_until));
		-- The progress of the predecessor takes precedence: the successor passed its own before it was told.
		UPDATE @extschema@.idem_claims AS c SET expires_at = answer.expires_at, lease_until = answer.lease_until,
			token = answer.token, state = new_state, result = NULL,
			fingerprint = CASE WHEN is_successor THEN coalesce(new_fingerprint, c.fingerprint) ELSE new_fingerprint END,
			progress = coalesce(answer.progress, new_progress)
		WHERE @extschema@.idem__has_key(c.user_id, c.request_id, c.scope, key)
			AND (NOT only_ours OR @extschema@.idem__is_ours(c.xmin));
	END IF;
	PERFORM @extschema@.idem__note(E'+\t' || @extschema@.idem__held_text(key));
	RETURN answer;
END $$;

-- Decisions 3 to 8, by the row of the key.  "claimed": the claim can take its place, and this
-- transaction has locked it; with the expires_at and progress of the row if it is of this same
-- request, and not one that counts as absent.
CREATE FUNCTION @extschema@.idem__decide(
	key @extschema@.idem__key, fingerprint bytea, tells_progress boolean, policy @extschema@.idem__scope_policy, key_time timestamptz)
RETURNS @extschema@.idem__answer LANGUAGE plpgsql AS $$
DECLARE
	seen record;
	is_live boolean;
	answer @extschema@.idem__answer;
BEGIN
	SELECT c.xmin AS version,
		@extschema@.idem__is_ours(c.xmin) AND @extschema@.idem__is_of_now(c.state, c.lease_until) AS ours,
		c.state::text AS state, c.expires_at, c.lease_until, c.fingerprint, c.result, c.progress
	INTO seen FROM @extschema@.idem_claims AS c
	WHERE @extschema@.idem__has_key(c.user_id, c.request_id, c.scope, key)
	ORDER BY ours DESC LIMIT 1;		-- see idem__only_ours_counts()
	IF NOT FOUND THEN
		RETURN answer;
	END IF;

	is_live := seen.state = 'in_progress' AND NOT seen.ours AND seen.lease_until > clock_timestamp();
	IF policy.reclaim AND NOT seen.ours AND seen.expires_at <= clock_timestamp()
		AND NOT is_live AND NOT (seen.state = 'in_progress' AND policy.unknown) THEN
		-- 3
		answer.outcome := CASE WHEN @extschema@.idem__may_be_forgotten(key_time, policy) THEN 'stale' ELSE 'claimed' END;
	ELSE
		answer.outcome := CASE
			-- 4
			WHEN seen.fingerprint <> fingerprint THEN 'mismatch'
			-- 5 and 8
			WHEN seen.state = 'completed' THEN 'completed'
			WHEN seen.state = 'failed' THEN CASE WHEN policy.retryable THEN 'claimed' ELSE 'failed' END
			-- 6
			WHEN is_live THEN NULL
			WHEN seen.ours THEN 'in_progress'
			-- 7
			WHEN policy.unknown THEN 'unknown'
			-- A caller who does not see the progress would do all the work again.
			WHEN seen.progress IS NOT NULL AND NOT tells_progress THEN 'unknown'
			ELSE 'claimed' END;
		-- Under another fingerprint the stored row belongs to another request.
		IF answer.outcome IS DISTINCT FROM 'mismatch' THEN
			answer.progress := seen.progress;
			answer.expires_at := seen.expires_at;
			answer.lease_until := seen.lease_until;
			answer.result := CASE WHEN answer.outcome <> 'claimed' THEN seen.result END;
		END IF;
	END IF;

	IF answer.outcome = 'claimed' THEN
		PERFORM FROM @extschema@.idem_claims AS c
		WHERE @extschema@.idem__has_key(c.user_id, c.request_id, c.scope, key) AND c.xmin = seen.version
		FOR NO KEY UPDATE;
		IF NOT FOUND THEN
			answer := NULL;			-- changed meanwhile
		END IF;
	END IF;
	RETURN answer;
END $$;

-- The next token, for a lease whose row this transaction has.  The holder before has drawn its own while
-- it had the row: so tokens grow from holder to holder, even if the row was deleted in between.
-- (Replaced by sql/idem-citus.sql.)
CREATE FUNCTION @extschema@.idem__draw_token(key @extschema@.idem__key) RETURNS int8 LANGUAGE plpgsql AS $$
BEGIN
	RETURN nextval('@extschema@.idem_token_seq');
END $$;
