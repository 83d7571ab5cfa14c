-- ----- statistics -----

CREATE VIEW @extschema@.idem_stat_cleanup AS
	SELECT b.rows_deleted, b.batches, b.last_run, b.last_batch_seconds, b.total_batch_seconds, b.max_batch_seconds,
		(SELECT greatest(statement_timestamp() - e.expires_at, '0') FROM @extschema@.idem_claims AS e
			WHERE e.expires_at > '-infinity' AND e.expires_at < 'infinity'		-- not one that was inserted by hand
				AND NOT (e.state::text = 'in_progress' AND EXISTS (
					SELECT FROM @extschema@.idem_scopes AS p WHERE p.scope = e.scope AND p.lapsed = 'unknown'))
			ORDER BY e.expires_at LIMIT 1) AS oldest_expired_age,
		b.backlog,
		(SELECT count(*) FROM @extschema@.idem_claims AS e JOIN @extschema@.idem_scopes AS p USING (scope)
			WHERE e.expires_at <= now() AND e.state = 'in_progress' AND p.lapsed = 'unknown') AS rows_unknown,
		CASE WHEN b.last_run > clock_timestamp() - interval '1 hour' THEN 'sessions: this edition has no worker'
			ELSE 'nobody: no session has called idem_cleanup_all() in the last hour' END AS cleaning
	FROM (SELECT coalesce(sum(t.rows_deleted), 0)::int8 AS rows_deleted, coalesce(sum(t.batches), 0)::int8 AS batches,
			max(t.finished_at) AS last_run, max(t.seconds) FILTER (WHERE t.finished_at = l.latest) AS last_batch_seconds,
			coalesce(sum(t.seconds), 0) AS total_batch_seconds, coalesce(max(t.max_seconds), 0) AS max_batch_seconds,
			coalesce(bool_or(t.more) FILTER (WHERE t.finished_at = l.latest), false) AS backlog
		FROM @extschema@.idem__cleanup_batches AS t,
			(SELECT max(n.finished_at) FROM @extschema@.idem__cleanup_batches AS n) AS l (latest)) AS b;

COMMENT ON COLUMN @extschema@.idem_stat_cleanup.oldest_expired_age IS
'how long the oldest claim that is still there, except those of rows_unknown, has been expired; 0: none has expired';
COMMENT ON COLUMN @extschema@.idem_stat_cleanup.backlog IS
'the latest batch ended by its bounds: expired claims can be left';

-- The shares of the most common scopes in the sample that ANALYZE takes; NULL: of all others.  It runs as idem's
-- owner, because pg_stats shows a column only to roles that may read it.
CREATE FUNCTION @extschema@.idem__stat_scope_shares(OUT scope text, OUT share float8) RETURNS SETOF record
LANGUAGE sql STABLE PARALLEL RESTRICTED ROWS 33 SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
	SELECT @extschema@.idem__check_scope('');
	WITH common AS (
		SELECT v.scope, v.share::float8
		FROM pg_stats, ROWS FROM (unnest(most_common_vals::text::text[]), unnest(most_common_freqs)) AS v (scope, share)
		WHERE schemaname = (SELECT n.nspname FROM pg_namespace AS n WHERE n.oid = '@extschema@'::regnamespace)
			AND tablename = 'idem_claims' AND attname = 'scope'
			AND NOT inherited
		ORDER BY v.share DESC LIMIT 32)
	SELECT k.scope, k.share FROM common AS k
	UNION ALL SELECT NULL, greatest(1 - coalesce(sum(k.share), 0), 0) FROM common AS k;
$$;

CREATE VIEW @extschema@.idem_stat_scopes AS
	SELECT s.scope, (s.share * t.claims)::int8 AS claims
	FROM @extschema@.idem__stat_scope_shares() AS s, @extschema@.idem_stat_table AS t ORDER BY s.scope;

COMMENT ON VIEW @extschema@.idem_stat_scopes IS
'claims by scope, an estimate of the latest ANALYZE: up to 32 scopes, and a row without a scope for all others';

-- The names are those of the C edition.  Claims are not counted: all of them would have to update one counter.
CREATE VIEW @extschema@.idem_metrics AS
	SELECT m.name, jsonb_strip_nulls(jsonb_build_object('database', current_database(),
			'le', CASE WHEN m.name LIKE '%_bucket' THEN '+Inf' END, 'scope', m.scope)) AS labels,
		CASE WHEN m.name ^@ 'idem_cleanup_batch' THEN 'histogram' WHEN m.name LIKE '%_total' THEN 'counter'
			ELSE 'gauge' END AS type, m.help, m.value
	FROM @extschema@.idem_stat_cleanup AS c, @extschema@.idem_stat_table AS t, LATERAL (
		SELECT n.name, n.help, n.value, NULL FROM (VALUES
			('idem_cleanup_rows_total', 'Expired claims that were removed.', c.rows_deleted::float8),
			('idem_cleanup_batch_duration_seconds_bucket', 'Duration of a batch of the cleanup.', c.batches),
			('idem_cleanup_batch_duration_seconds_sum', 'Duration of a batch of the cleanup.', c.total_batch_seconds),
			('idem_cleanup_batch_duration_seconds_count', 'Duration of a batch of the cleanup.', c.batches),
			('idem_cleanup_has_backlog', '1 if the latest batch of the cleanup ended by its bounds.', c.backlog::int4),
			('idem_cleanup_last_run_timestamp_seconds', 'End of the latest batch.', date_part('epoch', c.last_run)),
			('idem_cleanup_active', '1 if a session has cleaned in the last hour.', (c.cleaning ^@ 'sessions')::int4),
			('idem_unknown_claims', 'Expired claims that nobody settled: somebody has to find out.', c.rows_unknown),
			('idem_oldest_expired_age_seconds', 'How long the oldest claim has been expired.',
				coalesce(date_part('epoch', c.oldest_expired_age), 0)),
			('idem_table_claims', 'Claims in the table, an estimate.', t.claims),
			('idem_table_dead_rows', 'Dead rows of the table, an estimate.', t.dead_rows),
			('idem_table_bytes', 'Size of the table with its indexes.', t.bytes),
			('idem_dead_rows_held_seconds', 'Age of the oldest transaction that keeps VACUUM from removing dead rows.',
				date_part('epoch', CASE WHEN t.held_back_by IS NULL THEN '0' ELSE clock_timestamp() - t.held_back_since END)),
			('idem_dead_rows_held_transactions', 'Transactions since what keeps VACUUM from removing dead rows began.',
				coalesce(t.held_back_transactions, 0))) AS n (name, help, value)
		-- grouped: a real scope can have such a name, and a sample must not come twice
		UNION ALL SELECT 'idem_scope_claims', 'Claims in the table by scope, an estimate.', sum(s.claims),
			CASE s.scope WHEN '' THEN '(default)' ELSE coalesce(s.scope, '(other)') END
		FROM @extschema@.idem_stat_scopes AS s GROUP BY 4) AS m (name, help, value, scope)
	-- On Citus the table of this node is empty: its size says nothing.
	WHERE m.value IS NOT NULL
		AND NOT (m.name ~ '^idem_(table|scope)_' AND to_regclass('@extschema@.idem__token_source') IS NOT NULL);
