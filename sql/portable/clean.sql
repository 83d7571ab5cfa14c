-- ----- cleaning -----

-- The ledger: a row for each batch; those of more than a week ago are merged into one, a thousand at a time.  (Not one row of counters: it
-- would bloat, and cleaners would wait for each other.)
CREATE TABLE @extschema@.idem__cleanup_batches (
	finished_at timestamptz NOT NULL,
	batches int8 NOT NULL,
	rows_deleted int8 NOT NULL,
	seconds float8 NOT NULL,
	max_seconds float8 NOT NULL,
	more boolean NOT NULL			-- it ended by its bounds: expired claims can be left
) USING heap;
CREATE INDEX idem__cleanup_batches_finished_at_idx ON @extschema@.idem__cleanup_batches (finished_at);
-- A publication of all tables refuses to delete rows of one that has no key.
ALTER TABLE @extschema@.idem__cleanup_batches REPLICA IDENTITY FULL;

-- Deletes the oldest claims, from the low-water mark start on; few, so that the caller can look at the clock.  Skips
-- rows that others have locked.  (Replaced by sql/idem-citus.sql.)
CREATE FUNCTION @extschema@.idem__clean(rows_max int8, start timestamptz, cutoff timestamptz,
	OUT rows_deleted int8, OUT more boolean, OUT next_start timestamptz) LANGUAGE plpgsql AS $$
BEGIN
	IF @extschema@.idem__renew_policies(false) THEN
		RAISE WARNING 'idem__policies did not have the policies of idem_settings and idem_scopes'
			USING HINT = 'Enable their triggers: claims followed other policies, until now.';
	END IF;
	rows_max := least(rows_max, 5000);
	WITH gone AS (
		DELETE FROM @extschema@.idem_claims AS c WHERE c.ctid = ANY (ARRAY(
			SELECT e.ctid FROM @extschema@.idem_claims AS e
			WHERE e.expires_at >= start AND e.expires_at <= cutoff
				-- keeps a live lease, and a lapsed one that somebody has to find out about
				AND NOT (e.state::text = 'in_progress' AND (e.lease_until > clock_timestamp() OR EXISTS (
					SELECT FROM @extschema@.idem_scopes AS p WHERE p.scope = e.scope AND p.lapsed = 'unknown')))
			ORDER BY e.expires_at LIMIT rows_max
			FOR UPDATE OF e SKIP LOCKED))
		RETURNING c.expires_at)
	SELECT count(*), max(g.expires_at) INTO rows_deleted, next_start FROM gone AS g;
	more := rows_deleted = rows_max;
END $$;

-- One batch, of about a second.  A cutoff in the future would remove claims before they expire: it counts as now.
CREATE FUNCTION @extschema@.idem__cleanup_step(batch_size int4, start timestamptz, expired_before timestamptz,
	OUT rows_deleted int8, OUT more boolean, OUT next_start timestamptz)
LANGUAGE plpgsql COST 10000 SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
	begun constant timestamptz := clock_timestamp();
	cutoff constant timestamptz := least(begun, expired_before);
	rows_max int8 := coalesce(batch_size, (SELECT d.cleanup_batch_size FROM @extschema@.idem_settings AS d), 50000);
	chunk record;
	seconds float8;
BEGIN
	IF rows_max NOT BETWEEN 1 AND 1000000 THEN
		PERFORM @extschema@.idem__raise('ID400', 'batch_size must be between 1 and 1000000',
			'Leave it out to use idem.cleanup_batch_size.', pg_catalog.format('It is %s.', rows_max));
	END IF;
	PERFORM @extschema@.idem__require_writable('idem_cleanup()');
	rows_deleted := 0;
	next_start := coalesce(start, '-infinity'::timestamptz);
	LOOP
		chunk := @extschema@.idem__clean(rows_max - rows_deleted, next_start, cutoff);
		rows_deleted := rows_deleted + chunk.rows_deleted;
		more := chunk.more;
		next_start := CASE WHEN more THEN chunk.next_start ELSE greatest(next_start, cutoff) END;
		EXIT WHEN NOT more OR rows_deleted >= rows_max OR clock_timestamp() > begun + interval '1 second';
	END LOOP;
	seconds := date_part('epoch', clock_timestamp() - begun);
	BEGIN
		WITH old AS (
			DELETE FROM @extschema@.idem__cleanup_batches AS b WHERE b.ctid = ANY (ARRAY(
				SELECT b2.ctid FROM @extschema@.idem__cleanup_batches AS b2
				WHERE b2.finished_at < begun - interval '7 days' AND 1000 < (SELECT count(*)
					FROM @extschema@.idem__cleanup_batches AS b3 WHERE b3.finished_at < begun - interval '7 days')
				FOR UPDATE SKIP LOCKED))
			RETURNING b.*)
		INSERT INTO @extschema@.idem__cleanup_batches
			SELECT max(o.finished_at), sum(o.batches), sum(o.rows_deleted), sum(o.seconds), max(o.max_seconds), false
			FROM old AS o HAVING count(*) > 0
			UNION ALL SELECT clock_timestamp(), 1, rows_deleted, seconds, seconds, more;
	EXCEPTION WHEN disk_full THEN		-- removing claims needs no space, and makes some
		RAISE WARNING 'the disk is full: idem_stat_cleanup does not count a batch that removed % expired claims',
			rows_deleted USING ERRCODE = 'disk_full';
	END;
END $$;

CREATE FUNCTION @extschema@.idem_cleanup(batch_size int4 DEFAULT NULL) RETURNS int8
LANGUAGE sql COST 10000 SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
	SELECT b.rows_deleted FROM @extschema@.idem__cleanup_step(batch_size, NULL::timestamptz, NULL::timestamptz) AS b
$$;
