-- ----- statistics -----

CREATE FUNCTION @extschema@.idem__stat_cleanup_counters(
	OUT rows_deleted int8,
	OUT batches int8,
	OUT last_batch_seconds float8,
	OUT total_batch_seconds float8,
	OUT max_batch_seconds float8,
	OUT oldest_expired_age interval,
	OUT backlog bool,
	OUT rows_unknown int8,
	OUT last_run timestamptz,
	OUT errors int8,
	OUT last_error text,
	OUT last_error_at timestamptz,
	OUT worker_pids int4[],
	OUT stats_reset timestamptz,
	OUT duration_bounds float8[],
	OUT batches_by_duration int8[],
	OUT shared_memory text)
AS 'MODULE_PATHNAME', 'idem__stat_cleanup_counters'
LANGUAGE C VOLATILE PARALLEL RESTRICTED;

COMMENT ON FUNCTION @extschema@.idem__stat_cleanup_counters() IS
'for the views idem_stat_cleanup and idem_metrics; duration_bounds: upper bounds in seconds of batches_by_duration';

-- PARALLEL UNSAFE: the first call of a session can have to attach shared memory in a subtransaction,
-- which a parallel plan does not allow.
CREATE FUNCTION @extschema@.idem__stat_cleaning()
RETURNS text
AS 'MODULE_PATHNAME', 'idem__stat_cleaning'
LANGUAGE C VOLATILE PARALLEL UNSAFE;

COMMENT ON FUNCTION @extschema@.idem__stat_cleaning() IS
'for the view idem_stat_cleanup: who cleans this database';

CREATE FUNCTION @extschema@.idem__stat_launcher()
RETURNS int4
AS 'MODULE_PATHNAME', 'idem__stat_launcher'
LANGUAGE C VOLATILE PARALLEL RESTRICTED;

COMMENT ON FUNCTION @extschema@.idem__stat_launcher() IS
'for the view idem_stat_cleanup: pid of the process that starts the workers';

-- Says what will not happen.  A WARNING: CREATE EXTENSION hides every NOTICE of its script.
DO $block$
DECLARE
	cleaning text;
BEGIN
	EXECUTE (SELECT format('SELECT %s.idem__stat_cleaning()', e.extnamespace::regnamespace)
		FROM pg_extension e WHERE e.extname = 'idem') INTO cleaning;
	IF NOT starts_with(cleaning, 'worker') THEN
		RAISE WARNING '%', cleaning
			USING DETAIL = CASE WHEN strpos(cleaning, 'preload') > 0
				AND strpos(cleaning, 'idem_start_worker') = 0
				THEN 'Expired claims stay, and still guard their requests, until somebody calls idem_cleanup_all(). No claim is counted: idem_stat_cleanup, idem_stat_claims and idem_metrics raise an error.'
				ELSE 'Expired claims stay, and still guard their requests, until somebody calls idem_cleanup_all().' END,
			HINT = CASE WHEN strpos(cleaning, 'idem_start_worker') > 0
				THEN 'Call idem_start_worker(), which needs no restart and lasts until the next one; or add idem to shared_preload_libraries and restart the server; or call idem_cleanup_all() from a timer.'
				WHEN strpos(cleaning, 'preload') > 0
				THEN 'Add idem to shared_preload_libraries and restart the server; or call idem_cleanup_all() from a timer.'
				ELSE 'Add the database to idem.cleanup_databases and reload the configuration; or call idem_cleanup_all() from a timer.' END;
	END IF;
END
$block$;

CREATE VIEW @extschema@.idem_stat_cleanup AS
	SELECT rows_deleted, batches, last_run, last_batch_seconds, total_batch_seconds, max_batch_seconds,
		oldest_expired_age, backlog, rows_unknown, errors, last_error, last_error_at,
		CASE WHEN starts_with(c.cleaning, 'worker') AND c.launcher_pid IS NULL
			THEN 'no worker for this database: the launcher does not run' ELSE c.cleaning END AS cleaning,
		worker_pids, c.launcher_pid, shared_memory, stats_reset
	FROM @extschema@.idem__stat_cleanup_counters(),
		(SELECT @extschema@.idem__stat_cleaning(), @extschema@.idem__stat_launcher()) AS c (cleaning, launcher_pid);

COMMENT ON COLUMN @extschema@.idem_stat_cleanup.oldest_expired_age IS 'how long the oldest claim that is still there, except those of rows_unknown, has been expired; 0: none has expired; NULL: no claim is known. After a restart, claims from before it are not known until a batch has looked';
COMMENT ON COLUMN @extschema@.idem_stat_cleanup.backlog IS 'the latest batches ended by their bounds: expired claims can be left that can be removed';
COMMENT ON COLUMN @extschema@.idem_stat_cleanup.cleaning IS 'worker; or worker, until the server stops: idem_start_worker() was called; or why there is no worker for this database';
COMMENT ON COLUMN @extschema@.idem_stat_cleanup.shared_memory IS 'preloaded; or made on demand: what was counted before the first call since the server started is missing';
COMMENT ON COLUMN @extschema@.idem_stat_cleanup.launcher_pid IS 'process that starts the workers; NULL: there is none';
COMMENT ON COLUMN @extschema@.idem_stat_cleanup.rows_unknown IS 'expired claims that nobody settled, kept by lapsed = unknown; as of the worker''s latest rescan, about once a minute';
COMMENT ON COLUMN @extschema@.idem_stat_cleanup.errors IS 'errors of the worker';
COMMENT ON COLUMN @extschema@.idem_stat_cleanup.last_error IS 'message of the latest error; the log has the rest';
COMMENT ON COLUMN @extschema@.idem_stat_cleanup.worker_pids IS 'workers that run now';
COMMENT ON COLUMN @extschema@.idem_stat_cleanup.stats_reset IS 'time of the latest idem_stat_reset(); NULL: since the server started';

CREATE FUNCTION @extschema@.idem__unsettled_claims(
	OUT scope text,
	OUT user_id text,
	OUT request_id text,
	OUT status text,
	OUT lease_until timestamptz,
	OUT expires_at timestamptz)
RETURNS SETOF record
AS 'MODULE_PATHNAME', 'idem__unsettled_claims'
LANGUAGE C STABLE PARALLEL RESTRICTED ROWS 100;

COMMENT ON FUNCTION @extschema@.idem__unsettled_claims() IS
'for the view idem_unsettled';

CREATE VIEW @extschema@.idem_unsettled AS
	SELECT scope, user_id, request_id, status, lease_until, expires_at
	FROM @extschema@.idem__unsettled_claims()
	ORDER BY lease_until NULLS FIRST;

CREATE FUNCTION @extschema@.idem__held_keys(
	OUT scope text,
	OUT user_id text,
	OUT request_id text,
	OUT pid int4,
	OUT gid text,
	OUT since timestamptz,
	OUT lease_until timestamptz,
	OUT waiters int4)
RETURNS SETOF record
AS 'MODULE_PATHNAME', 'idem__held_keys'
LANGUAGE C VOLATILE PARALLEL RESTRICTED ROWS 100;

COMMENT ON FUNCTION @extschema@.idem__held_keys() IS
'for the view idem_holders: one row for each lease, and one for each waiter';

-- Waiters of a lease that ended a moment ago have nobody to wait for.
CREATE VIEW @extschema@.idem_holders AS
	SELECT h.scope, h.user_id, h.request_id, max(h.pid) AS pid, max(h.gid) AS gid,
		min(h.since) AS since, max(h.lease_until) AS lease_until, sum(h.waiters) AS waiters
	FROM @extschema@.idem__held_keys() AS h
	GROUP BY h.scope, h.user_id, h.request_id
	HAVING count(h.pid) > 0 OR count(h.gid) > 0
		OR count(h.lease_until) > 0
	ORDER BY min(h.since), max(h.lease_until);

COMMENT ON VIEW @extschema@.idem_holders IS
'who holds the requests that are waited for, or that have a live lease';
COMMENT ON COLUMN @extschema@.idem_holders.pid IS 'process whose transaction holds the request';
COMMENT ON COLUMN @extschema@.idem_holders.gid IS 'prepared transaction that holds it';
COMMENT ON COLUMN @extschema@.idem_holders.since IS 'when that transaction began, or was prepared';
COMMENT ON COLUMN @extschema@.idem_holders.waiters IS 'how many processes wait for it; NULL: idem is not preloaded, and nobody knows';

CREATE FUNCTION @extschema@.idem__stat_claims_counters(
	OUT claimed int8,
	OUT completed int8,
	OUT failed int8,
	OUT in_progress int8,
	OUT timed_out int8,
	OUT "unknown" int8,
	OUT mismatch int8,
	OUT stale int8,
	OUT invalid int8,
	OUT waits int8,
	OUT wait_seconds float8,
	OUT takeovers int8,
	OUT lost_leases int8,
	OUT healed int8,
	OUT stats_reset timestamptz)
AS 'MODULE_PATHNAME', 'idem__stat_claims_counters'
LANGUAGE C VOLATILE PARALLEL RESTRICTED;

COMMENT ON FUNCTION @extschema@.idem__stat_claims_counters() IS
'for the views idem_stat_claims and idem_metrics';

CREATE VIEW @extschema@.idem_stat_claims AS
	SELECT claimed, completed, failed, in_progress, timed_out, "unknown",
		mismatch, stale, invalid, waits, wait_seconds, takeovers, lost_leases,
		healed, stats_reset
	FROM @extschema@.idem__stat_claims_counters();

COMMENT ON VIEW @extschema@.idem_stat_claims IS
'answers of the claim calls of this database; claimed, takeovers and healed are counted at commit';
COMMENT ON COLUMN @extschema@.idem_stat_claims.waits IS 'calls that waited for another holder';
COMMENT ON COLUMN @extschema@.idem_stat_claims.wait_seconds IS 'how long they waited';
COMMENT ON COLUMN @extschema@.idem_stat_claims.takeovers IS 'requests taken over after their lease lapsed, or after they failed';
COMMENT ON COLUMN @extschema@.idem_stat_claims.lost_leases IS 'calls with the token of a lost lease';
COMMENT ON COLUMN @extschema@.idem_stat_claims.healed IS 'leases settled by idem_heal()';

CREATE FUNCTION @extschema@.idem__stat_scopes_counters(
	OUT scope text,
	OUT claimed int8,
	OUT completed int8,
	OUT failed int8,
	OUT in_progress int8,
	OUT timed_out int8,
	OUT "unknown" int8,
	OUT mismatch int8,
	OUT stale int8,
	OUT invalid int8)
RETURNS SETOF record
AS 'MODULE_PATHNAME', 'idem__stat_scopes_counters'
LANGUAGE C VOLATILE PARALLEL RESTRICTED ROWS 33;

COMMENT ON FUNCTION @extschema@.idem__stat_scopes_counters() IS
'for the views idem_stat_scopes and idem_metrics';

-- The number of claims comes from the sample that ANALYZE takes, in which the server notes the
-- most common values of a column and their shares (slot kind 1).
CREATE VIEW @extschema@.idem_stat_scopes AS
	WITH common (scope, share) AS (
		SELECT v.scope, v.share
		FROM pg_extension AS x
			JOIN pg_depend AS d ON d.refclassid = 'pg_extension'::regclass::oid
				AND d.refobjid = x.oid AND d.deptype = 'e'
				AND d.classid = 'pg_class'::regclass::oid
			JOIN pg_class AS t ON t.oid = d.objid AND t.relname = 'idem_claims'
				AND t.relnamespace = x.extnamespace AND t.relkind = 'r'
			JOIN pg_statistic AS s ON s.starelid = t.oid
			JOIN pg_attribute AS a ON a.attrelid = s.starelid AND a.attnum = s.staattnum,
			LATERAL (VALUES (s.stakind1, s.stavalues1::text, s.stanumbers1), (s.stakind2, s.stavalues2::text, s.stanumbers2),
				(s.stakind3, s.stavalues3::text, s.stanumbers3)) AS slot (kind, "values", shares),
			LATERAL ROWS FROM (unnest(slot."values"::text[]), unnest(slot.shares)) AS v (scope, share)
		WHERE x.extname = 'idem'
			AND a.attname = 'scope' AND NOT s.stainherit AND slot.kind = 1
		ORDER BY v.share DESC LIMIT 32
	)
	SELECT u.scope, sum(u.claims)::int8 AS claims,
		sum(u.claimed)::int8 AS claimed, sum(u.completed)::int8 AS completed,
		sum(u.failed)::int8 AS failed, sum(u.in_progress)::int8 AS in_progress,
		sum(u.timed_out)::int8 AS timed_out, sum(u."unknown")::int8 AS "unknown",
		sum(u.mismatch)::int8 AS mismatch, sum(u.stale)::int8 AS stale,
		sum(u.invalid)::int8 AS invalid
	FROM (
		SELECT e.scope, NULL::int8 AS claims, e.claimed, e.completed, e.failed, e.in_progress, e.timed_out, e."unknown", e.mismatch, e.stale, e.invalid
		FROM @extschema@.idem__stat_scopes_counters() AS e
		UNION ALL
		SELECT c.scope, c.share * t.claims, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL
		FROM (SELECT k.scope, k.share::float8 FROM common AS k
			UNION ALL
			SELECT NULL, GREATEST(1 - COALESCE(sum(k.share::float8), 0), 0) FROM common AS k) AS c (scope, share),
			@extschema@.idem_stat_table AS t
	) AS u
	GROUP BY u.scope
	ORDER BY u.scope;

COMMENT ON VIEW @extschema@.idem_stat_scopes IS
'claims and answers by scope: up to 32 scopes for each, and a row without a scope for all others';
COMMENT ON COLUMN @extschema@.idem_stat_scopes.scope IS 'NULL: all scopes that have no row for this';
COMMENT ON COLUMN @extschema@.idem_stat_scopes.claims IS 'claims in the table, an estimate of the latest ANALYZE; NULL: contained in the row without a scope';
COMMENT ON COLUMN @extschema@.idem_stat_scopes.claimed IS 'answers, by outcome; NULL: contained in the row without a scope';

-- No rows if shared memory has no room for the statistics of this database: then all counters
-- are NULL.
CREATE VIEW @extschema@.idem_metrics AS
	SELECT m.name,
		jsonb_strip_nulls(jsonb_build_object('database', current_database(), 'le', m.le, 'outcome', m.outcome, 'scope', m.scope)) AS labels,
		m.type, m.help, m.value
	FROM @extschema@.idem__stat_cleanup_counters() AS cleanup, @extschema@.idem__stat_claims_counters() AS claims,
		@extschema@.idem_stat_table AS size,
		(SELECT @extschema@.idem__stat_launcher(), @extschema@.idem__stat_cleaning()) AS standing (launcher_pid, cleaning),
	LATERAL (
		SELECT n.name, n.le, n.outcome, NULL, n.type, n.help, n.value FROM (
		VALUES ('idem_cleanup_rows_total', NULL, NULL, 'counter',
			'Expired claims that were removed.', cleanup.rows_deleted::float8)
		UNION ALL
		SELECT 'idem_cleanup_batch_duration_seconds_' || d.sample, d.le, NULL, 'histogram',
			'Duration of a batch of the cleanup, its commit included.', d.value
		FROM (
			SELECT 'bucket', replace(b.bound::numeric::text, 'Infinity', '+Inf'),
				(sum(b.batches) OVER (ORDER BY b.bound))::float8
			FROM ROWS FROM (unnest(cleanup.duration_bounds), unnest(cleanup.batches_by_duration)) AS b (bound, batches)
			UNION ALL VALUES
				('sum', NULL, cleanup.total_batch_seconds),
				('count', NULL, cleanup.batches)
		) AS d (sample, le, value)
		UNION ALL VALUES
			('idem_cleanup_errors_total', NULL, NULL, 'counter',
				'Errors of the cleanup worker.', cleanup.errors),
			('idem_cleanup_has_backlog', NULL, NULL, 'gauge',
				'1 if the latest batches ended by their bounds: expired claims can be left that can be removed.', cleanup.backlog::int4),
			('idem_unknown_claims', NULL, NULL, 'gauge',
				'Expired claims whose lease lapsed unsettled, kept until somebody finds out.', cleanup.rows_unknown),
			('idem_oldest_expired_age_seconds', NULL, NULL, 'gauge',
				'How long the oldest claim that is still there, except unknown ones, has been expired; 0 if none is known.',
				COALESCE(date_part('epoch', cleanup.oldest_expired_age), 0))
		UNION ALL
		SELECT 'idem_claims_total', NULL, o.outcome, 'counter', 'Answers of claim calls, by outcome.', o.number
		FROM (VALUES ('claimed', claims.claimed), ('completed', claims.completed), ('failed', claims.failed),
			('in_progress', claims.in_progress), ('timed_out', claims.timed_out), ('unknown', claims."unknown"),
			('mismatch', claims.mismatch), ('stale', claims.stale), ('invalid', claims.invalid)) AS o (outcome, number)
		UNION ALL VALUES
			('idem_wait_seconds_sum', NULL, NULL, 'summary',
				'Time that claim calls waited for another holder.', claims.wait_seconds),
			('idem_wait_seconds_count', NULL, NULL, 'summary',
				'Time that claim calls waited for another holder.', claims.waits),
			('idem_takeovers_total', NULL, NULL, 'counter',
				'Requests that were taken over: a lease that lapsed, or a failed one.', claims.takeovers),
			('idem_lost_leases_total', NULL, NULL, 'counter',
				'Calls with the token of a lease that is not held any more.', claims.lost_leases),
			('idem_healed_leases_total', NULL, NULL, 'counter',
				'Leases that were settled by somebody who found the work done.', claims.healed),
			('idem_cleanup_last_run_timestamp_seconds', NULL, NULL, 'gauge',
				'When the latest batch of the cleanup ended, as Unix time.', date_part('epoch', cleanup.last_run)),
			('idem_cleanup_launcher_up', NULL, NULL, 'gauge',
				'1 if the process runs that starts the workers. Not where idem is not preloaded and no worker was started.',
				CASE WHEN standing.launcher_pid IS NOT NULL OR cleanup.shared_memory = 'preloaded'
					THEN (standing.launcher_pid IS NOT NULL)::int4 END),
			('idem_cleanup_active', NULL, NULL, 'gauge',
				'1 if somebody cleans this database: a worker, or a session in the last hour.',
				((starts_with(standing.cleaning, 'worker') AND standing.launcher_pid IS NOT NULL)
					OR COALESCE(cleanup.last_run > (clock_timestamp() - interval '1 hour'), false))::int4),
			('idem_table_claims', NULL, NULL, 'gauge',
				'Claims in the table, an estimate.', size.claims),
			('idem_table_dead_rows', NULL, NULL, 'gauge',
				'Dead rows of the table, an estimate.', size.dead_rows),
			('idem_table_bytes', NULL, NULL, 'gauge',
				'Size of the table with its indexes.', size.bytes),
			('idem_dead_rows_held_seconds', NULL, NULL, 'gauge',
				'Age of the oldest transaction that keeps VACUUM from removing dead rows.',
				CASE WHEN size.held_back_by IS NULL THEN 0
					ELSE date_part('epoch', clock_timestamp() - size.held_back_since) END),
			('idem_dead_rows_held_transactions', NULL, NULL, 'gauge',
				'Transactions of the server since what keeps VACUUM from removing dead rows began.',
				COALESCE(size.held_back_transactions, 0))
		) AS n (name, le, outcome, type, help, value)
		UNION ALL
		-- A real scope of such a name would be counted with it: a sample must not come twice.
		SELECT 'idem_scope_' || a.sample, NULL, a.outcome,
			CASE s.scope WHEN '' THEN '(default)' ELSE COALESCE(s.scope, '(other)') END, a.type, a.help, sum(a.value)
		FROM @extschema@.idem_stat_scopes AS s,
		LATERAL (
			VALUES ('claims', NULL, 'gauge', 'Claims in the table by scope, an estimate.', s.claims)
			UNION ALL
			SELECT 'answers_total', o.outcome, 'counter', 'Answers of claim calls, by scope and outcome.', o.number
			FROM (VALUES ('claimed', s.claimed), ('completed', s.completed), ('failed', s.failed),
				('in_progress', s.in_progress), ('timed_out', s.timed_out), ('unknown', s."unknown"),
				('mismatch', s.mismatch), ('stale', s.stale), ('invalid', s.invalid)) AS o (outcome, number)
		) AS a (sample, outcome, type, help, value)
		GROUP BY 1, 3, 4, 5, 6
	) AS m (name, le, outcome, scope, type, help, value)
	WHERE cleanup.batches IS NOT NULL AND m.value IS NOT NULL;

CREATE FUNCTION @extschema@.idem_stat_reset()
RETURNS void
AS 'MODULE_PATHNAME', 'idem_stat_reset'
LANGUAGE C VOLATILE PARALLEL RESTRICTED;

COMMENT ON FUNCTION @extschema@.idem_stat_reset() IS
'operator: zeroes the statistics of this database';
