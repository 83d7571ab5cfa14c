-- ----- waiting -----

-- When a call stops waiting, from its argument or the setting idem.wait.  '-infinity': it
-- does not wait.  'infinity': it waits until it is cancelled.
CREATE FUNCTION @extschema@.idem__deadline(wait interval) RETURNS timestamptz LANGUAGE plpgsql AS $$
DECLARE
	setting constant text := nullif(current_setting('idem.wait', true), '');
	parts text[];
	wait_ms numeric := 5000;
BEGIN
	IF @extschema@.idem__has_months(wait) THEN
		PERFORM @extschema@.idem__raise('ID400', 'wait must not have months',
			'Fix the client: give it in days, hours or shorter units. To wait until cancelled, set idem.wait to -1 and leave wait out.');
	ELSIF wait < interval '0' THEN
		PERFORM @extschema@.idem__raise('ID400', 'wait must not be negative', 'Fix the client: ''0'' does not wait at all.');
	ELSIF wait IS NOT NULL THEN
		RETURN CASE WHEN wait = interval '0' THEN '-infinity'
			WHEN wait > interval '36500 days' THEN 'infinity'
			ELSE clock_timestamp() + @extschema@.idem__without_days(wait) END;
	END IF;

	IF setting IS NOT NULL THEN
		parts := regexp_match(setting COLLATE "C", '^[[:space:]]*([+-]?[0-9]*[.]?[0-9]+)[[:space:]]*(us|ms|s|min|h|d)?[[:space:]]*$');
		wait_ms := round(parts[1]::numeric * CASE coalesce(parts[2], 'ms') WHEN 'us' THEN 0.001 WHEN 'ms' THEN 1
			WHEN 's' THEN 1000 WHEN 'min' THEN 60000 WHEN 'h' THEN 3600000 ELSE 86400000 END);
		IF wait_ms IS NULL OR wait_ms NOT BETWEEN -1 AND 2147483647 THEN
			PERFORM @extschema@.idem__raise('22023', pg_catalog.format('invalid value for parameter "idem.wait": "%s"', setting),
				'Valid units for this parameter are "us", "ms", "s", "min", "h", and "d".');
		END IF;
	END IF;
	RETURN CASE wait_ms WHEN 0 THEN '-infinity' WHEN -1 THEN 'infinity'
		ELSE clock_timestamp() + make_interval(secs => wait_ms::float8 / 1000) END;
END $$;

-- Sets lock_timeout for the waits that follow.  Call it in a block that catches lock_not_available,
-- in a function that has lock_timeout among its SET clauses: then the caller's own is back at its end.
--
-- A wait is cut into slices, and the waiter looks again after each: it stops waiting for a
-- holder that was rolled back to a savepoint, and one deadline spans several holders.  The
-- slices grow from 100 ms, so that the waiter notices such a change soon, to more than
-- deadlock_timeout, so that the server detects deadlocks.
CREATE FUNCTION @extschema@.idem__bound_lock_waits(deadline timestamptz, slices_before int4) RETURNS text
LANGUAGE plpgsql AS $$
DECLARE
	slice_ms constant float8 := CASE WHEN slices_before <= 3 THEN 100 * 2 ^ slices_before
		ELSE least(100 * 2 ^ least(slices_before, 30), date_part('epoch', current_setting('deadlock_timeout')::interval) * 1000 + 1000) END;
	left_ms constant float8 := CASE WHEN deadline = 'infinity' THEN 'infinity'
		WHEN deadline = '-infinity' THEN 0
		ELSE ceil(date_part('epoch', deadline - clock_timestamp()) * 1000) END;
BEGIN
	RETURN set_config('lock_timeout', greatest(1, least(left_ms, slice_ms))::int4::text, true);
END $$;

-- SQL does not tell which transaction a wait was for, so only a lease is described.  (The
-- other transaction may have ended by now, and its row may be visible.)
CREATE FUNCTION @extschema@.idem__raise_held(sqlstate_ text, message_ text, key @extschema@.idem__key) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
	lease_until timestamptz;
BEGIN
	BEGIN
		PERFORM set_config('lock_timeout', '1', true);
		lease_until := (SELECT c.lease_until FROM @extschema@.idem_claims AS c
			WHERE @extschema@.idem__has_key(c.user_id, c.request_id, c.scope, key) AND c.state::text = 'in_progress'
				AND (c.lease_until > clock_timestamp() OR @extschema@.idem__is_ours(c.xmin))
			LIMIT 1);
	EXCEPTION WHEN lock_not_available THEN
		NULL;					-- the table is locked
	END;
	PERFORM @extschema@.idem__raise(sqlstate_, message_, 'Retry the same request later.',
		'S' || substr(@extschema@.idem__name(key), 2) || '. ' || CASE
			WHEN isfinite(lease_until) THEN pg_catalog.format('A lease holds it until %s.',
				to_char(@extschema@.idem__whole_second(least(lease_until, '294276-12-31 23:59:59+00'::timestamptz)), 'YYYY-MM-DD HH24:MI:SSOF'))
			WHEN lease_until IS NOT NULL THEN 'A lease holds it until infinity.'
			ELSE 'Another transaction was in the way.' END);
END $$;

CREATE FUNCTION @extschema@.idem__raise_outcome(outcome text, key @extschema@.idem__key) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
	CASE outcome
		WHEN 'failed' THEN
			PERFORM @extschema@.idem__raise_of_key('ID417', 'request has failed for good',
				'Do not retry it: use a new request id. idem_result(user_id, request_id, scope) has the stored error.', key);
		WHEN 'in_progress' THEN
			PERFORM @extschema@.idem__raise_held('ID409', 'request is being executed', key);
		WHEN 'timed_out' THEN
			PERFORM @extschema@.idem__raise_held('ID503', 'request is still being executed after the wait', key);
		WHEN 'unknown' THEN
			PERFORM @extschema@.idem__raise_of_key('ID424', 'request''s lease lapsed, and whether it was executed is unknown',
				'Do not retry it: find out (idem_lookup() shows the progress), then settle it with idem_heal(), or drop it with idem_forget().', key);
		WHEN 'mismatch' THEN
			PERFORM @extschema@.idem__raise_of_key('ID422', 'request id was used before with another fingerprint',
				'A retry must send the same parameters and keep its id: with a new id it is executed again. Only another request takes a new id.', key);
		WHEN 'stale' THEN
			PERFORM @extschema@.idem__raise_of_key('ID412', 'request id is too old to tell whether it was executed',
				'Check the state, then use a new request id. For a minute after uuidv7 was switched on, or the scope''s ttl grew, new ids are stale too.', key);
	END CASE;
END $$;

CREATE FUNCTION @extschema@.idem__outcome_of_passed(deadline timestamptz) RETURNS text LANGUAGE sql IMMUTABLE
AS $$ SELECT CASE WHEN deadline = '-infinity' THEN 'in_progress' ELSE 'timed_out' END $$;
