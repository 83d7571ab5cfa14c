-- ----- this transaction's claims -----

-- A transaction remembers which keys it holds unsettled, and the answer of its latest claim
-- call.  The short forms (idem_complete(result), idem_result()) need both, and a settlement
-- needs the first to tell a repeat.  Whether a key is ours is decided by its row, never by
-- this memory: a caller who forges it reaches nobody else's request, and a caller who loses
-- it (RESET ALL) gets an error.
--
-- The memory is in custom settings, set as by SET LOCAL.  They follow savepoints exactly,
-- end with the transaction, also with a prepared one, belong to the session, and cost a
-- microsecond.  A temporary table would forbid PREPARE.  The rows themselves would have to
-- be searched for among all others, and do not tell a completed marker from an open one.
--
--	idem_held.latest		the latest claim call: a flag, and what the flag stands for
--								+ *		an unsettled key; * if the settings below may hold others
--								- =		anything else; = if they may hold a key
--	idem_held.recent		the other unsettled keys, a line for each, as long as they are few
--	idem_held.b0 .. b15		the rest of them, in 16 buckets by the hash of the key, since each
--							change rewrites a whole setting
--
-- The note of a claim is a tab and the key, as json.  The fast path puts the place of the row (its
-- ctid) before them, so that idem_complete() finds the row at once.  When it has settled the key, it
-- puts - in front of the whole note, and the answer is read from the row.
--
-- The note of any other answer holds the key, and in a second line the result as it was then:
-- the row may be gone, or belong to somebody else, by the time the caller asks for it.  Anybody
-- can set custom settings.  So such a note is signed for this transaction of this session,
-- with a secret that only the owner can read; with a wrong signature it counts as empty.  The
-- signature names the transaction by its start time and, once it has one, its id: all
-- transactions of one simple-protocol message have the same start time.  (A transaction
-- without an id has claimed nothing.  So an answer that another transaction of the message
-- got can be put back only if it was not "claimed".)
--
-- The note of a claim needs no signature: it counts only if this transaction wrote the row.
--
-- What remains: code in the same transaction can forge or put back the note of a key that the
-- transaction has claimed.  By that it can store a result for a request of this transaction that
-- was completed without one, have idem_outcome() say "claimed" again, or make idem_result()
-- return the result of an earlier claim call.

CREATE TABLE @extschema@.idem__secret (
	only_row boolean PRIMARY KEY DEFAULT true CHECK (only_row),
	secret bytea NOT NULL DEFAULT sha256((gen_random_uuid()::text || gen_random_uuid()::text)::bytea)
) USING heap WITH (parallel_workers = 0);

INSERT INTO @extschema@.idem__secret DEFAULT VALUES;

COMMENT ON TABLE @extschema@.idem__secret IS 'signs what a transaction remembers of its claims; nobody but the owner may read it';

-- (The secret in front and half of the hash is as good as HMAC here: nobody can continue a hash
-- of which he knows a half.  This function and the next one are single expressions, which
-- PL/pgSQL evaluates without a query if all arguments are variables.)
--
-- The secret must not become a constant in a plan: debug_print_plan shows plans to anybody.
-- So a function that holds the secret in a variable only assigns with it, and never queries
-- or performs.  After an error PL/pgSQL makes a query of an assignment too; so these
-- functions have plan_cache_mode = force_generic_plan, which keeps the values of variables
-- out of plans.
CREATE FUNCTION @extschema@.idem__signature(secret bytea, value text)
RETURNS text
LANGUAGE sql STABLE
AS $$
	SELECT left(encode(sha256(secret || int4send(pg_backend_pid()) || timestamptz_send(now())
		|| convert_to(value, getdatabaseencoding())), 'hex'), 32)
$$;

-- The note of a value: its signature, the transaction's id, a space, the value.
CREATE FUNCTION @extschema@.idem__signed(secret bytea, value text)
RETURNS text
LANGUAGE sql STABLE
AS $$
	SELECT @extschema@.idem__signature(secret, coalesce(pg_current_xact_id_if_assigned()::text, '') || ' ' || value)
		|| coalesce(pg_current_xact_id_if_assigned()::text, '') || ' ' || value
$$;

CREATE FUNCTION @extschema@.idem__held_text(key @extschema@.idem__key)
RETURNS text
LANGUAGE sql STABLE
AS $$ SELECT array_to_json(ARRAY[(key).user_id::text, (key).request_id, (key).scope])::text $$;

CREATE FUNCTION @extschema@.idem__bucket(held text)
RETURNS text
LANGUAGE sql IMMUTABLE
AS $$ SELECT 'idem_held.b' || (hashtext(held COLLATE "C") & 15)::text $$;

-- Adds unsettled keys to their buckets.  Returns the empty text.
CREATE FUNCTION @extschema@.idem__keep_in_buckets(held text[])
RETURNS text
LANGUAGE plpgsql
AS $$
BEGIN
	PERFORM set_config(b.bucket, coalesce(current_setting(b.bucket, true) || E'\n', '') || b.lines, true)
	FROM (SELECT @extschema@.idem__bucket(k.held) AS bucket, string_agg(k.held, E'\n') AS lines
		FROM unnest(held) AS k (held) WHERE k.held <> '' GROUP BY 1) AS b;
	RETURN '';
END
$$;

-- Adds an unsettled key.  (No key contains a line end or a tab: json escapes them.)  A line end comes
-- first, since the session may have set the setting to anything.
CREATE FUNCTION @extschema@.idem__keep(held text)
RETURNS text
LANGUAGE sql VOLATILE
AS $$
	SELECT set_config('idem_held.recent',
		CASE WHEN octet_length(current_setting('idem_held.recent', true)) > 4096
			THEN @extschema@.idem__keep_in_buckets(string_to_array(current_setting('idem_held.recent', true) || E'\n' || held, E'\n'))
			ELSE coalesce(current_setting('idem_held.recent', true) || E'\n', '') || held END, true)
$$;

-- The flag of an answer that takes the place of the latest one: flag is "+" or "-".
CREATE FUNCTION @extschema@.idem__next_flag(latest text, flag text)
RETURNS text
LANGUAGE sql IMMUTABLE
AS $$ SELECT CASE WHEN coalesce(latest, '') = '' OR latest ^@ '-' THEN flag ELSE translate(flag, '+-', '*=') END $$;

-- Notes the answer of a claim call.
CREATE FUNCTION @extschema@.idem__note(flag text, note text)
RETURNS void
LANGUAGE plpgsql
AS $$
DECLARE
	latest constant text := current_setting('idem_held.latest', true);
	ignored text;
BEGIN
	IF latest ^@ '+' OR latest ^@ '*' THEN
		ignored := @extschema@.idem__keep(split_part(latest, E'\t', 2));
	END IF;
	ignored := set_config('idem_held.latest', @extschema@.idem__next_flag(latest, flag) || note, true);
END
$$;

CREATE FUNCTION @extschema@.idem__note_answer(held text, outcome text, result jsonb)
RETURNS void
LANGUAGE plpgsql
SET plan_cache_mode = force_generic_plan
AS $$
DECLARE
	value constant text := outcome || ' ' || held || E'\n' || coalesce(result::text, '');
	secret bytea;
	note text;
BEGIN
	SELECT s.secret INTO secret FROM @extschema@.idem__secret AS s;
	note := @extschema@.idem__signed(secret, value);
	PERFORM @extschema@.idem__note('-', note);
END
$$;

-- Whether the key is noted as unsettled.
CREATE FUNCTION @extschema@.idem__is_open(held text)
RETURNS boolean
LANGUAGE sql STABLE
AS $$
	SELECT coalesce(left(current_setting('idem_held.latest', true), 1) IN ('+', '*')
			AND split_part(current_setting('idem_held.latest', true), E'\t', 2) = held, false)
		OR coalesce(strpos(E'\n' || current_setting('idem_held.recent', true) || E'\n', E'\n' || held || E'\n') > 0, false)
		OR coalesce(strpos(E'\n' || current_setting(@extschema@.idem__bucket(held), true) || E'\n', E'\n' || held || E'\n') > 0, false)
$$;

-- Notes that the key is settled.
CREATE FUNCTION @extschema@.idem__close(held text)
RETURNS void
LANGUAGE plpgsql
AS $$
DECLARE
	latest constant text := current_setting('idem_held.latest', true);
	place text;
	lines text;
	ignored text;
BEGIN
	IF left(latest, 1) IN ('+', '*') AND split_part(latest, E'\t', 2) = held THEN
		ignored := set_config('idem_held.latest', translate(left(latest, 1), '+*', '-='), true);
	END IF;
	FOREACH place IN ARRAY ARRAY['idem_held.recent', @extschema@.idem__bucket(held)] LOOP
		lines := E'\n' || current_setting(place, true) || E'\n';
		-- More than one line, if its row was deleted by hand and the key claimed again
		WHILE strpos(lines, E'\n' || held || E'\n') > 0 LOOP
			lines := replace(lines, E'\n' || held || E'\n', E'\n');
			ignored := set_config(place, trim(E'\n' FROM lines), true);
		END LOOP;
	END LOOP;
END
$$;

-- Whether one snapshot serves the whole transaction.
CREATE FUNCTION @extschema@.idem__keeps_snapshot()
RETURNS boolean
LANGUAGE sql STABLE
AS $$ SELECT current_setting('transaction_isolation') IN ('repeatable read', 'serializable') $$;

-- Whether this transaction wrote the row version with this xmin, which it can see.  Of all
-- transactions in progress, it sees rows of its own only.  The xmin may belong to a
-- subtransaction, whose id is assigned after that of the transaction.  An xmin that seems to
-- lie in the future is from before the ids wrapped around, and frozen.  Of a frozen row from 2^32
-- transactions ago the xmin can be ours by chance, which SQL cannot see: where that would do harm,
-- see idem__is_of_now() too.
CREATE FUNCTION @extschema@.idem__is_ours(row_xmin xid)
RETURNS boolean
LANGUAGE plpgsql
AS $$
DECLARE
	top constant int8 := pg_current_xact_id_if_assigned()::text::int8;
	after constant int8 := (row_xmin::text::int8 - top) & 4294967295;
BEGIN
	IF top IS NULL OR after >= 2147483648 THEN
		RETURN false;
	ELSIF after = 0 THEN
		RETURN true;
	END IF;
	RETURN pg_xact_status((top + after)::text::xid8) IS NOT DISTINCT FROM 'in progress';
EXCEPTION
	WHEN invalid_parameter_value THEN
		RETURN false;
END
$$;

-- False: the row's lease had lapsed when this transaction began.  So this transaction did not write
-- the row: each lease that it claims or extends ends later.
CREATE FUNCTION @extschema@.idem__is_of_now(state @extschema@.idem_state, lease_until timestamptz)
RETURNS boolean
LANGUAGE sql STABLE
AS $$ SELECT state <> 'in_progress' OR lease_until > now() $$;

-- ORDER BY idem__order_of(c.xmin) puts the row of this transaction first, among the rows of a key
-- that one snapshot sees.  It serves the functions that only read, which a parallel query can call.
-- Before PostgreSQL 17 such a query cannot begin a block that catches errors.  idem__is_ours() needs
-- that block, because pg_xact_status() raises an error for an id that was not assigned yet.  This
-- function asks for the status of older ids only, those before the end of the snapshot.  A visible
-- row with a later xmin is ours; or it is frozen, and its xmin is from before the ids wrapped around.
-- Such an xmin, if it was not assigned again yet, is greater than all ids of ours.
-- It is STABLE because the server begins a new command for a volatile one, which a parallel query
-- of CREATE TABLE AS or REFRESH MATERIALIZED VIEW cannot do.
CREATE FUNCTION @extschema@.idem__order_of(row_xmin xid)
RETURNS int8
LANGUAGE plpgsql STABLE
AS $$
DECLARE
	top constant int8 := pg_current_xact_id_if_assigned()::text::int8;
	id constant int8 := top + ((row_xmin::text::int8 - top) & 4294967295);
BEGIN
	IF id >= top + 2147483648 THEN
		RETURN NULL;
	ELSIF id < pg_snapshot_xmax(pg_current_snapshot())::text::int8
		AND pg_xact_status(id::text::xid8) IS DISTINCT FROM 'in progress' THEN
		RETURN NULL;
	END IF;
	RETURN id;
END
$$;

-- The key of a note, if this transaction wrote its row; when it was claimed, as a number that
-- grows from claim to claim; and its result.  A note that is none, a forged one, has no row.
CREATE FUNCTION @extschema@.idem__row_of_note(held text, OUT key @extschema@.idem__key, OUT claimed_at int8, OUT result jsonb)
RETURNS SETOF record
LANGUAGE plpgsql ROWS 1
SET enable_seqscan = off SET jit = off
AS $$
DECLARE
	top constant int8 := pg_current_xact_id_if_assigned()::text::int8;
	named jsonb;
BEGIN
	BEGIN
		named := held;
	EXCEPTION WHEN invalid_text_representation OR numeric_value_out_of_range OR untranslatable_character OR statement_too_complex THEN
		RETURN;
	END;
	key := ROW (named ->> 0, named ->> 1, named ->> 2)::@extschema@.idem__key;
	RETURN QUERY SELECT key, (c.xmin::text::int8 - top) & 4294967295, c.result
	FROM @extschema@.idem_claims AS c
	WHERE @extschema@.idem__has_key(c.user_id, c.request_id, c.scope, key) AND @extschema@.idem__is_ours(c.xmin);
END
$$;

-- The latest answer: outcome and key, and in a second line the result; NULL if there is none.
CREATE FUNCTION @extschema@.idem__latest()
RETURNS text
LANGUAGE plpgsql
SET plan_cache_mode = force_generic_plan
AS $$
DECLARE
	latest constant text := current_setting('idem_held.latest', true);
	note constant text := substr(latest, 2);
	answer text;
	secret bytea;
BEGIN
	IF left(latest, 1) IN ('+', '*') OR left(note, 1) IN (E'\t', '+') THEN
		SELECT 'claimed ' || @extschema@.idem__held_text(r.key) || E'\n' || coalesce(r.result::text, '')
		INTO answer FROM @extschema@.idem__row_of_note(split_part(note, E'\t', 2)) AS r;
	ELSIF length(note) > 32 AND substr(split_part(note, ' ', 1), 33) IN ('', pg_current_xact_id_if_assigned()::text) THEN
		SELECT s.secret INTO secret FROM @extschema@.idem__secret AS s;
		answer := CASE WHEN left(note, 32) = @extschema@.idem__signature(secret, substr(note, 33))
			THEN substr(note, strpos(note, ' ') + 1) END;
	END IF;
	RETURN answer;
END
$$;

-- Notes that the key was settled with result.
CREATE FUNCTION @extschema@.idem__note_settled(key @extschema@.idem__key, result jsonb)
RETURNS void
LANGUAGE plpgsql
AS $$
DECLARE
	held constant text := @extschema@.idem__held_text(key);
	latest constant text := split_part(@extschema@.idem__latest(), E'\n', 1);
BEGIN
	IF NOT @extschema@.idem__is_open(held) THEN
		RETURN;
	END IF;
	PERFORM @extschema@.idem__close(held);
	IF substr(latest, strpos(latest, ' ') + 1) = held THEN
		PERFORM @extschema@.idem__note_answer(held, split_part(latest, ' ', 1), result);
	END IF;
END
$$;

-- Notes that the key's row is being deleted.  idem__require_latest() then does not look for it.
-- Call it before the row is deleted.
CREATE FUNCTION @extschema@.idem__note_dropped(key @extschema@.idem__key)
RETURNS void
LANGUAGE plpgsql
SET plan_cache_mode = force_generic_plan
AS $$
DECLARE
	held constant text := @extschema@.idem__held_text(key);
	secret bytea;
	value text;
	note text;
BEGIN
	PERFORM @extschema@.idem__note_settled(key, NULL::jsonb);
	value := @extschema@.idem__latest() || E'\ndropped';
	IF split_part(value, E'\n', 1) = 'claimed ' || held THEN
		SELECT s.secret INTO secret FROM @extschema@.idem__secret AS s;
		note := @extschema@.idem__signed(secret, value);
		PERFORM @extschema@.idem__note('-', note);
	END IF;
END
$$;

-- The only unsettled key of this transaction; raises 55000 if there is none, or more than
-- one.
CREATE FUNCTION @extschema@.idem__only_unsettled(command text)
RETURNS @extschema@.idem__key
LANGUAGE plpgsql
AS $$
DECLARE
	latest constant text := current_setting('idem_held.latest', true);
	unsettled int;
	keys @extschema@.idem__key[];
BEGIN
	-- In the order of the claims: the list is in order, and what is in the buckets is older.
	SELECT count(*), (array_agg(r.key ORDER BY n.place, n.line, r.claimed_at, (r.key).request_id, (r.key).user_id, (r.key).scope))[:6]
	INTO unsettled, keys
	FROM (SELECT m.held, max(m.place) AS place, max(m.line) AS line
			FROM (SELECT 2, 0, split_part(latest, E'\t', 2) WHERE latest ^@ '+' OR latest ^@ '*'
				UNION ALL SELECT 1, l.n, l.held
				FROM string_to_table(current_setting('idem_held.recent', true), E'\n') WITH ORDINALITY AS l (held, n)
				UNION ALL SELECT 0, 0, string_to_table(current_setting('idem_held.b' || b::text, true), E'\n')
				FROM generate_series(0, 15) AS b) AS m (place, line, held)
			GROUP BY m.held) AS n,
		@extschema@.idem__row_of_note(n.held) AS r
	WHERE n.held <> '';
	IF unsettled = 0 THEN
		PERFORM @extschema@.idem__raise('55000', command || ': no unsettled request in this transaction',
			'Claim the request first, in the same transaction: without BEGIN each statement is a transaction of its own. A claim that was rolled back to a savepoint is forgotten; a settled request stays as it is. For a lease pass its ids and token.');
	END IF;
	IF unsettled > 1 THEN
		PERFORM @extschema@.idem__raise('55000', command || ': more than one unsettled request in this transaction',
			'Name the one that is meant: pass user_id, request_id and scope.',
			pg_catalog.format('It holds %s: %s.', unsettled,
				(SELECT string_agg(CASE WHEN n < 6 THEN @extschema@.idem__name(ROW (k.user_id, k.request_id, k.scope)::@extschema@.idem__key)
					ELSE 'and more' END, '; ' ORDER BY n)
				FROM unnest(keys) WITH ORDINALITY AS k (user_id, request_id, scope, n))));
	END IF;
	RETURN keys[1];
END
$$;

-- Whether to look only for a row of our own.  A snapshot of a whole transaction can see two
-- rows of the key: one that somebody has dropped since, and the one that we claimed after
-- that.  Only ours counts then.
CREATE FUNCTION @extschema@.idem__only_ours_counts(key @extschema@.idem__key)
RETURNS boolean
LANGUAGE plpgsql
AS $$
BEGIN
	IF NOT @extschema@.idem__keeps_snapshot() THEN
		RETURN false;
	END IF;
	RETURN EXISTS (SELECT FROM @extschema@.idem_claims AS c
		WHERE @extschema@.idem__has_key(c.user_id, c.request_id, c.scope, key)
			AND @extschema@.idem__is_ours(c.xmin));
END
$$;

-- Makes this transaction commit synchronously: a committed change of a lease must survive a
-- crash.  Whether to wait for standbys stays the caller's choice.
CREATE FUNCTION @extschema@.idem__commit_synchronously()
RETURNS void
LANGUAGE plpgsql
AS $$
BEGIN
	IF current_setting('synchronous_commit') = 'off' THEN
		PERFORM set_config('synchronous_commit', 'local', true);
	END IF;
END
$$;
