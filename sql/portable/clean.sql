-- ----- cleaning -----

-- A row for each batch; batches of more than a week ago are merged into one row.  (Not one
-- row of counters: it would bloat, and cleaners would wait for each other.)
CREATE TABLE @extschema@.idem__cleanup_batches (
	finished_at timestamptz NOT NULL,
	batches int8 NOT NULL,
	rows_deleted int8 NOT NULL,
	seconds float8 NOT NULL,
	max_seconds float8 NOT NULL,
	more boolean NOT NULL
) USING heap;

CREATE INDEX idem__cleanup_batches_finished_at_idx ON @extschema@.idem__cleanup_batches (finished_at);

-- A publication of all tables refuses to delete rows of one that has no key.
ALTER TABLE @extschema@.idem__cleanup_batches REPLICA IDENTITY FULL;

COMMENT ON TABLE @extschema@.idem__cleanup_batches IS 'ledger of the batches that removed expired claims, for idem_stat_cleanup';
COMMENT ON COLUMN @extschema@.idem__cleanup_batches.more IS 'it left expired claims behind';

CREATE FUNCTION @extschema@.idem__note_batch(begun timestamptz, rows_deleted int8, more boolean) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
	seconds constant float8 := date_part('epoch', clock_timestamp() - begun);
BEGIN
	INSERT INTO @extschema@.idem__cleanup_batches VALUES (clock_timestamp(), 1, rows_deleted, seconds, seconds, more);
	-- Once 1000 rows are old, merge them.
	IF (SELECT count(*) >= 1000 FROM (SELECT FROM @extschema@.idem__cleanup_batches AS b
			WHERE b.finished_at < clock_timestamp() - interval '7 days' LIMIT 1000) AS old) THEN
		WITH old AS (
			DELETE FROM @extschema@.idem__cleanup_batches AS b WHERE b.ctid = ANY (ARRAY(
				SELECT b2.ctid FROM @extschema@.idem__cleanup_batches AS b2
				WHERE b2.finished_at < clock_timestamp() - interval '7 days' FOR UPDATE SKIP LOCKED))
			RETURNING b.*)
		INSERT INTO @extschema@.idem__cleanup_batches
			SELECT max(o.finished_at), sum(o.batches)::int8, sum(o.rows_deleted)::int8, sum(o.seconds), max(o.max_seconds), false
			FROM old AS o HAVING count(*) > 0;
	END IF;
EXCEPTION WHEN disk_full THEN
	-- Removing claims needs no space, and makes some.
	RAISE WARNING 'the disk is full: idem_stat_cleanup does not count a batch that removed % expired claims', rows_deleted
		USING ERRCODE = 'disk_full';
END $$;

-- Deletes one batch: the oldest claims first, from the low-water mark start, for about a
-- second.  It skips rows that others have locked, and keeps a claim under a live lease or
-- one that lapsed = unknown keeps.  (Replaced by sql/idem-citus.sql.)
CREATE FUNCTION @extschema@.idem__clean(rows_max int8, start timestamptz, cutoff timestamptz,
	OUT rows_deleted int8, OUT more boolean, OUT next_start timestamptz) LANGUAGE plpgsql AS $$
DECLARE
	begun constant timestamptz := clock_timestamp();
	chunk_max int8;
	chunk int8;
BEGIN
	IF @extschema@.idem__renew_policies(false) THEN
		RAISE WARNING 'idem__policies did not have the policies of idem_settings and idem_scopes'
			USING HINT = 'Enable their triggers: claims followed other policies, until now.';
	END IF;
	next_start := start;
	rows_deleted := 0;
	-- In chunks, so that it can look at the clock in between
	LOOP
		chunk_max := least(rows_max - rows_deleted, 5000);
		WITH gone AS (
			DELETE FROM @extschema@.idem_claims AS c WHERE c.ctid = ANY (ARRAY(
				SELECT e.ctid FROM @extschema@.idem_claims AS e
				WHERE e.expires_at >= next_start AND e.expires_at <= cutoff
					AND NOT (e.state::text = 'in_progress' AND (e.lease_until > clock_timestamp()
						OR EXISTS (SELECT FROM @extschema@.idem_scopes AS p WHERE p.scope = e.scope AND p.lapsed = 'unknown')))
				ORDER BY e.expires_at LIMIT chunk_max
				FOR UPDATE OF e SKIP LOCKED))
			RETURNING c.expires_at)
		SELECT count(*), coalesce(max(g.expires_at), next_start) INTO chunk, next_start FROM gone AS g;
		rows_deleted := rows_deleted + chunk;
		more := chunk = chunk_max;
		EXIT WHEN NOT more OR rows_deleted = rows_max OR clock_timestamp() > begun + interval '1 second';
	END LOOP;
	more := more AND EXISTS (SELECT FROM @extschema@.idem_claims AS e WHERE e.expires_at >= next_start AND e.expires_at <= cutoff);
	IF NOT more THEN
		next_start := greatest(start, cutoff);
	END IF;
END $$;

-- One batch of idem_cleanup_all().  A caller can pass any cutoff.  One in the future would
-- remove claims before they expire, so it counts as now.
CREATE FUNCTION @extschema@.idem__cleanup_step(
	batch_size int4, start timestamptz, expired_before timestamptz,
	OUT rows_deleted int8, OUT more boolean, OUT next_start timestamptz)
LANGUAGE plpgsql COST 10000 SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
	begun constant timestamptz := clock_timestamp();
	rows_max constant int8 := coalesce(batch_size, (SELECT d.cleanup_batch_size FROM @extschema@.idem_settings AS d), 50000);
	cutoff constant timestamptz := least(clock_timestamp(), expired_before);
BEGIN
	IF rows_max NOT BETWEEN 1 AND 1000000 THEN
		PERFORM @extschema@.idem__raise('ID400', 'batch_size must be between 1 and 1000000',
			'Leave it out to use idem.cleanup_batch_size.', pg_catalog.format('It is %s.', rows_max));
	END IF;
	PERFORM @extschema@.idem__require_writable('idem_cleanup()');
	SELECT b.* INTO rows_deleted, more, next_start
	FROM @extschema@.idem__clean(rows_max, coalesce(start, '-infinity'::timestamptz), cutoff) AS b;
	PERFORM @extschema@.idem__note_batch(begun, rows_deleted, more);
END $$;

CREATE FUNCTION @extschema@.idem_cleanup(batch_size int4 DEFAULT NULL) RETURNS int8
LANGUAGE plpgsql COST 10000 SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
	RETURN (@extschema@.idem__cleanup_step(batch_size, NULL::timestamptz, NULL::timestamptz)).rows_deleted;
END $$;
