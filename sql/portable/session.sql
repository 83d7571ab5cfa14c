-- ----- this transaction's claims -----

-- For the short forms, idem_result(), idem_outcome(), idem_complete(result) and idem_fail(error), a transaction
-- notes the answer of its latest claim call, and which keys it holds unsettled.  The notes are two custom settings,
-- set as by SET LOCAL: they follow savepoints exactly, and end with the transaction, also with a prepared one.
--
--	idem_held.latest	the answer of the latest claim call, one of
--							+PLACE tab KEY			claimed, and not settled
--							=PLACE tab KEY			claimed, and settled
--							-OUTCOME space KEY line end RESULT		another answer
--	idem_held.open		the other unsettled keys, a line each; "many" if they are too many
--
-- KEY is a json array, which has no line end and no tab.  PLACE is the ctid of the row, if the insert of the
-- claim told it.  The RESULT of a replay is as it was then: the row may be gone by the time the caller asks.
--
-- Anybody can set custom settings, so they decide nothing: a request is settled, and "claimed" answered, only if
-- its row says that this transaction wrote it.  Forged notes can only make a short form settle another request of
-- the same transaction, or tell of another claim or of a replay that did not happen.

CREATE FUNCTION @extschema@.idem__held_text(key @extschema@.idem__key) RETURNS text LANGUAGE sql STABLE
AS $$ SELECT array_to_json(ARRAY[(key).user_id::text, (key).request_id, (key).scope])::text $$;

-- Adds unsettled keys, a line each.  A line end comes first, since the session may have set the setting to
-- anything.  Each change copies the whole setting, hence the limit.
CREATE FUNCTION @extschema@.idem__keep(held text) RETURNS text LANGUAGE sql AS $$
	SELECT set_config('idem_held.open',
		CASE WHEN octet_length(current_setting('idem_held.open', true) || held) > 4000 OR octet_length(held) > 4000
				OR current_setting('idem_held.open', true) = 'many'
			THEN 'many' ELSE coalesce(current_setting('idem_held.open', true) || E'\n', '') || held END, true)
$$;

-- Notes the answer of a claim call, which is written as above.  (idem__claim_at_once() does the same.)
CREATE FUNCTION @extschema@.idem__note(note text) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
	previous constant text COLLATE "C" := current_setting('idem_held.latest', true);
BEGIN
	PERFORM set_config('idem_held.latest', note, true),
		CASE WHEN previous ^@ '+' THEN @extschema@.idem__keep(split_part(previous, E'\t', 2)) END;
END $$;

CREATE FUNCTION @extschema@.idem__note_answer(held text, outcome text, result jsonb) RETURNS void LANGUAGE sql
AS $$ SELECT @extschema@.idem__note('-' || outcome || ' ' || held || E'\n' || coalesce(result::text, '')) $$;

-- Whether the key is noted as unsettled.  NULL: there are too many to tell.
CREATE FUNCTION @extschema@.idem__is_open(held text) RETURNS boolean LANGUAGE sql STABLE AS $$
	SELECT CASE WHEN (current_setting('idem_held.latest', true) ^@ '+'
				AND split_part(current_setting('idem_held.latest', true), E'\t', 2) = held)
			OR held = ANY (string_to_array(current_setting('idem_held.open', true), E'\n')) THEN true
		WHEN current_setting('idem_held.open', true) = 'many' THEN NULL ELSE false END
$$;

-- Notes that the key is settled, or that its row is dropped.
CREATE FUNCTION @extschema@.idem__note_settled(key @extschema@.idem__key, result jsonb) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
	held constant text := @extschema@.idem__held_text(key);
	latest constant text := current_setting('idem_held.latest', true);
	others constant text[] := string_to_array(current_setting('idem_held.open', true), E'\n');
BEGIN
	IF latest ^@ '+' AND split_part(latest, E'\t', 2) = held THEN
		PERFORM set_config('idem_held.latest', '=' || substr(latest, 2), true);
	ELSIF latest ^@ '-' AND held = ANY (others)
		AND split_part(latest, E'\n', 1) = split_part(latest, ' ', 1) || ' ' || held THEN
		-- The holder has asked once more for what it holds.
		PERFORM set_config('idem_held.latest', split_part(latest, E'\n', 1) || E'\n' || coalesce(result::text, ''), true);
	END IF;
	IF held = ANY (others) THEN
		PERFORM set_config('idem_held.open', array_to_string(array_remove(others, held), E'\n'), true);
	END IF;
END $$;

-- Whether one snapshot serves the whole transaction.
CREATE FUNCTION @extschema@.idem__keeps_snapshot() RETURNS boolean LANGUAGE sql STABLE
AS $$ SELECT current_setting('transaction_isolation') IN ('repeatable read', 'serializable') $$;

-- Whether this transaction wrote the row version with this xmin, which it can see.  Of all transactions in
-- progress, it sees rows of its own only.  The xmin may belong to a subtransaction, whose id is assigned after that
-- of the transaction.  An xmin that seems to lie in the future is from before the ids wrapped around, and frozen.
-- The xmin of a frozen row from 2^32 transactions ago can be ours by chance: where that would do harm, see
-- idem__is_of_now() too.
CREATE FUNCTION @extschema@.idem__is_ours(row_xmin xid) RETURNS boolean LANGUAGE plpgsql AS $$
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
END $$;

-- False: the row's lease had lapsed when this transaction began.  So this transaction did not write the row: each
-- lease that it claims or extends ends later.
CREATE FUNCTION @extschema@.idem__is_of_now(state @extschema@.idem_state, lease_until timestamptz) RETURNS boolean
LANGUAGE sql STABLE AS $$ SELECT state <> 'in_progress' OR lease_until > now() $$;

-- ORDER BY idem__order_of(c.xmin) puts the row of this transaction first, among the rows of a key that one snapshot
-- sees; those of others give NULL.  Parallel queries can call it, other than idem__is_ours(), whose block cannot be
-- run in them before PostgreSQL 17: it asks pg_xact_status() only for ids before the end of the snapshot, which are
-- assigned.  A visible row with a later xmin is ours; or it is frozen, from before the ids wrapped around, and sorts
-- after ours.  (STABLE: a volatile function begins a new command, which a parallel query cannot.)
CREATE FUNCTION @extschema@.idem__order_of(row_xmin xid) RETURNS int8 LANGUAGE plpgsql STABLE AS $$
DECLARE
	top constant int8 := pg_current_xact_id_if_assigned()::text::int8;
	id constant int8 := top + ((row_xmin::text::int8 - top) & 4294967295);
BEGIN
	IF id >= top + 2147483648 OR (id < pg_snapshot_xmax(pg_current_snapshot())::text::int8
			AND pg_xact_status(id::text::xid8) IS DISTINCT FROM 'in progress') THEN
		RETURN NULL;
	END IF;
	RETURN id;
END $$;

-- The key of a note and its result, if this transaction wrote its row.  A forged note has no row.
CREATE FUNCTION @extschema@.idem__row_of_note(held text, OUT key @extschema@.idem__key, OUT result jsonb)
RETURNS SETOF record LANGUAGE plpgsql ROWS 1 SET enable_seqscan = off SET jit = off AS $$
DECLARE
	named jsonb;
BEGIN
	named := held;
	key := ROW (named ->> 0, named ->> 1, named ->> 2)::@extschema@.idem__key;
	RETURN QUERY SELECT key, c.result FROM @extschema@.idem_claims AS c
	WHERE @extschema@.idem__has_key(c.user_id, c.request_id, c.scope, key) AND @extschema@.idem__is_ours(c.xmin);
EXCEPTION WHEN invalid_text_representation OR numeric_value_out_of_range OR untranslatable_character OR statement_too_complex THEN
	RETURN;
END $$;

-- The answer of the latest claim call; raises 55000 if there is none.
CREATE FUNCTION @extschema@.idem__latest(command text, OUT outcome @extschema@.idem_outcome, OUT result jsonb)
LANGUAGE plpgsql AS $$
DECLARE
	latest constant text := current_setting('idem_held.latest', true);
	answer text[];
BEGIN
	IF latest ^@ '+' OR latest ^@ '=' THEN
		SELECT 'claimed', r.result INTO outcome, result FROM @extschema@.idem__row_of_note(split_part(latest, E'\t', 2)) AS r;
	ELSE
		answer := regexp_match(latest COLLATE "C", E'^-(completed|failed|in_progress|unknown|timed_out|mismatch|stale) [^\n]*\n(.*)$');
		outcome := answer[1];
		result := nullif(answer[2], '');
	END IF;
	IF outcome IS NULL THEN
		PERFORM @extschema@.idem__raise('55000', command || ': no claim was made in this transaction',
			'Claim first, in the same transaction; or read what is stored: idem_result(user_id, request_id), idem_status(user_id, request_id).');
	END IF;
END $$;

-- The only unsettled key of this transaction; raises 55000 if there is none, or more than one.
CREATE FUNCTION @extschema@.idem__only_unsettled(command text) RETURNS @extschema@.idem__key LANGUAGE plpgsql AS $$
DECLARE
	latest constant text := current_setting('idem_held.latest', true);
	others constant text := current_setting('idem_held.open', true);
	keys constant @extschema@.idem__key[] := ARRAY(SELECT r.key
		FROM (SELECT l.held, max(l.n) AS n
				FROM string_to_table(concat_ws(E'\n', others, CASE WHEN latest ^@ '+' THEN split_part(latest, E'\t', 2) END), E'\n')
					WITH ORDINALITY AS l (held, n)
				WHERE l.held <> '' GROUP BY l.held) AS m, @extschema@.idem__row_of_note(m.held) AS r
		ORDER BY m.n);
BEGIN
	IF cardinality(keys) > 1 OR others = 'many' THEN
		PERFORM @extschema@.idem__raise('55000', command || ': more than one unsettled request in this transaction',
			'Name the one that is meant: pass user_id, request_id and scope.',
			CASE WHEN others = 'many' THEN 'It has claimed too many to tell which of them are settled.'
				ELSE pg_catalog.format('It holds %s: %s.', cardinality(keys),
					(SELECT string_agg(CASE WHEN n < 6 THEN @extschema@.idem__name(ROW (k.user_id, k.request_id, k.scope)::@extschema@.idem__key)
						ELSE 'and more' END, '; ' ORDER BY n)
					FROM unnest(keys[:6]) WITH ORDINALITY AS k (user_id, request_id, scope, n))) END);
	ELSIF cardinality(keys) = 0 THEN
		PERFORM @extschema@.idem__raise('55000', command || ': no unsettled request in this transaction',
			'Claim the request first, in the same transaction: without BEGIN each statement is a transaction of its own. A claim that was rolled back to a savepoint is forgotten; a settled request stays as it is. For a lease pass its ids and token.');
	END IF;
	RETURN keys[1];
END $$;

-- Whether to look only for a row of our own.  A snapshot of a whole transaction can see two rows of the key: one
-- that somebody has dropped since, and the one that we claimed after that.  Only ours counts then.
CREATE FUNCTION @extschema@.idem__only_ours_counts(key @extschema@.idem__key) RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
	RETURN @extschema@.idem__keeps_snapshot() AND EXISTS (SELECT FROM @extschema@.idem_claims AS c
		WHERE @extschema@.idem__has_key(c.user_id, c.request_id, c.scope, key) AND @extschema@.idem__is_ours(c.xmin));
END $$;

-- Makes this transaction commit synchronously: a committed change of a lease must survive a crash.  Whether to
-- wait for standbys stays the caller's choice.
CREATE FUNCTION @extschema@.idem__commit_synchronously() RETURNS text LANGUAGE sql AS $$
	SELECT CASE WHEN current_setting('synchronous_commit') = 'off' THEN set_config('synchronous_commit', 'local', true) END
$$;
