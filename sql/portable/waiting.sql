-- ----- waiting -----

-- When a call stops waiting, from its argument or the setting idem.wait.  '-infinity': it does not wait.
-- 'infinity': it waits until it is cancelled.
CREATE FUNCTION @extschema@.idem__deadline(wait interval) RETURNS timestamptz LANGUAGE plpgsql AS $$
DECLARE
	setting constant text COLLATE "C" := coalesce(nullif(current_setting('idem.wait', true), ''), '5 s');
BEGIN
	IF wait IS NULL THEN
		IF setting ~ '^[[:space:]]*-1[[:space:]]*(ms)?[[:space:]]*$' THEN
			RETURN 'infinity';
		ELSIF setting ~ '^[[:space:]]*[+]?[0-9]{0,10}[.]?[0-9]+[[:space:]]*(us|ms|s|min|h|d)?[[:space:]]*$' THEN
			wait := date_trunc('milliseconds', interval '500 us'
				+ (setting || CASE WHEN setting ~ '[a-z]' THEN '' ELSE ' ms' END)::interval);
		END IF;
		IF wait IS NULL OR wait > interval '2147483647 ms' THEN
			PERFORM @extschema@.idem__raise('22023', pg_catalog.format('invalid value for parameter "idem.wait": "%s"', setting),
				'Valid units for this parameter are "us", "ms", "s", "min", "h", and "d".');
		END IF;
	ELSIF @extschema@.idem__has_months(wait) THEN
		PERFORM @extschema@.idem__raise('ID400', 'wait must not have months',
			'Fix the client: give it in days, hours or shorter units. To wait until cancelled, set idem.wait to -1 and leave wait out.');
	ELSIF wait < interval '0' THEN
		PERFORM @extschema@.idem__raise('ID400', 'wait must not be negative', 'Fix the client: ''0'' does not wait at all.');
	END IF;
	RETURN CASE WHEN wait = interval '0' THEN '-infinity' WHEN wait > interval '36500 days' THEN 'infinity'
		ELSE clock_timestamp() + @extschema@.idem__without_days(wait) END;
END $$;

-- Sets lock_timeout for the waits that follow.  Call it in a block that catches lock_not_available, in a
-- function that has lock_timeout among its SET clauses: then the caller's own is back at its end.
-- A wait is cut into slices, and the waiter looks again after each: it stops waiting for a holder that was
-- rolled back to a savepoint, and one deadline spans several holders.  The slices grow from 100 ms, so that the
-- waiter notices such a change soon, to more than deadlock_timeout, so that the server detects deadlocks.
CREATE FUNCTION @extschema@.idem__bound_lock_waits(deadline timestamptz, slices_before int4) RETURNS text
LANGUAGE plpgsql AS $$
DECLARE
	begun constant timestamptz := clock_timestamp();
	slice constant interval := least(interval '100 milliseconds' * 2 ^ least(slices_before, 20),
		current_setting('deadlock_timeout')::interval + interval '1 second');
BEGIN
	RETURN set_config('lock_timeout', greatest(1, ceil(1000 * date_part('epoch',
		least(greatest(deadline, begun), begun + slice) - begun)))::int4::text, true);
END $$;

-- Raises the error of an outcome for a caller who gets no outcome.  SQL does not tell which transaction a wait
-- was for, so only a lease is described.
CREATE FUNCTION @extschema@.idem__raise_outcome(outcome text, key @extschema@.idem__key) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
	error record;
	lease_until timestamptz;
BEGIN
	SELECT e.* INTO error FROM (VALUES
		('in_progress', 'ID409', 'request is being executed', NULL),
		('timed_out', 'ID503', 'request is still being executed after the wait', NULL),
		('failed', 'ID417', 'request has failed for good',
			'Do not retry it: use a new request id. idem_result(user_id, request_id, scope) has the stored error.'),
		('unknown', 'ID424', 'request''s lease lapsed, and whether it was executed is unknown',
			'Do not retry it: find out (idem_lookup() shows the progress), then settle it with idem_heal(), or drop it with idem_forget().'),
		('mismatch', 'ID422', 'request id was used before with another fingerprint',
			'A retry must send the same parameters and keep its id: with a new id it is executed again. Only another request takes a new id.'),
		('stale', 'ID412', 'request id is too old to tell whether it was executed',
			'Check the state, then use a new request id. For a minute after uuidv7 was switched on, or the scope''s ttl grew, new ids are stale too.')
	) AS e (outcome, state, message, hint) WHERE e.outcome = idem__raise_outcome.outcome;
	IF error.hint IS NOT NULL THEN
		PERFORM @extschema@.idem__raise_of_key(error.state, error.message, error.hint, key);
	END IF;
	BEGIN
		PERFORM set_config('lock_timeout', '1', true);
		lease_until := (SELECT c.lease_until FROM @extschema@.idem_claims AS c
			WHERE @extschema@.idem__has_key(c.user_id, c.request_id, c.scope, key) AND c.state::text = 'in_progress'
				AND (c.lease_until > clock_timestamp() OR @extschema@.idem__is_ours(c.xmin))
			LIMIT 1);
	EXCEPTION WHEN lock_not_available THEN
		NULL;					-- the table is locked
	END;
	PERFORM @extschema@.idem__raise(error.state, error.message, 'Retry the same request later.',
		'S' || substr(@extschema@.idem__name(key), 2) || '. ' || CASE
			WHEN lease_until IS NULL THEN 'Another transaction was in the way.'
			ELSE pg_catalog.format('A lease holds it until %s.', CASE WHEN lease_until = 'infinity' THEN 'infinity' ELSE to_char(
				@extschema@.idem__whole_second(least(lease_until, '294276-12-31 23:59:59+00'::timestamptz)), 'YYYY-MM-DD HH24:MI:SSOF') END) END);
END $$;

CREATE FUNCTION @extschema@.idem__outcome_of_passed(deadline timestamptz) RETURNS text LANGUAGE sql IMMUTABLE
AS $$ SELECT CASE WHEN deadline = '-infinity' THEN 'in_progress' ELSE 'timed_out' END $$;
