-- ----- statistics -----

-- Without security_barrier: it shows sums and ages, no row of a claim; and a barrier would have
-- idem_metrics count rows_unknown, too.
CREATE VIEW @extschema@.idem_stat_cleanup AS
	SELECT b.rows_deleted, b.batches, l.finished_at AS last_run,
		l.seconds AS last_batch_seconds, b.seconds AS total_batch_seconds, b.max_seconds AS max_batch_seconds,
		-- A claim that was inserted by hand can expire at -infinity, or never.
		(SELECT CASE WHEN e.expires_at = '-infinity' THEN interval '106751991 days'
				WHEN e.expires_at < clock_timestamp() THEN clock_timestamp() - e.expires_at ELSE '0' END
			FROM @extschema@.idem_claims AS e
			WHERE NOT (e.state::text = 'in_progress'
				AND EXISTS (SELECT FROM @extschema@.idem_scopes AS p WHERE p.scope = e.scope AND p.lapsed = 'unknown'))
			ORDER BY e.expires_at LIMIT 1) AS oldest_expired_age,
		coalesce(l.more, false) AS backlog,
		(SELECT count(*) FROM @extschema@.idem_claims AS e JOIN @extschema@.idem_scopes AS p USING (scope)
			WHERE e.expires_at <= clock_timestamp() AND e.state::text = 'in_progress' AND p.lapsed = 'unknown') AS rows_unknown,
		CASE WHEN l.finished_at > clock_timestamp() - interval '1 hour' THEN 'sessions: this edition has no worker'
			ELSE 'nobody: no session has called idem_cleanup_all() ' || CASE WHEN l.finished_at IS NULL THEN 'yet'
				ELSE 'for ' || date_trunc('minute', clock_timestamp() - l.finished_at)::text END END AS cleaning
	FROM (SELECT coalesce(sum(t.rows_deleted), 0)::int8 AS rows_deleted, coalesce(sum(t.batches), 0)::int8 AS batches,
				coalesce(sum(t.seconds), 0) AS seconds, coalesce(max(t.max_seconds), 0) AS max_seconds
			FROM @extschema@.idem__cleanup_batches AS t) AS b
		LEFT JOIN LATERAL (SELECT t.* FROM @extschema@.idem__cleanup_batches AS t ORDER BY t.finished_at DESC LIMIT 1) AS l ON true;

COMMENT ON COLUMN @extschema@.idem_stat_cleanup.oldest_expired_age IS 'how long the oldest claim that is still there has been expired; 0: none has expired; NULL: there is none';
COMMENT ON COLUMN @extschema@.idem_stat_cleanup.backlog IS 'the latest batch left expired claims behind';
COMMENT ON COLUMN @extschema@.idem_stat_cleanup.rows_unknown IS 'expired claims that nobody settled, kept by lapsed = unknown; reads all expired claims';
COMMENT ON COLUMN @extschema@.idem_stat_cleanup.cleaning IS 'who cleans: sessions; or nobody, in the last hour';

-- The shares of the most common scopes, from the sample that ANALYZE takes.  It runs as idem's
-- owner, because pg_stats shows a column only to roles that may read it.
CREATE FUNCTION @extschema@.idem__stat_scope_shares(OUT scope text, OUT share float8) RETURNS SETOF record
LANGUAGE plpgsql STABLE PARALLEL RESTRICTED ROWS 32 SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
	PERFORM @extschema@.idem__check_scope('');
	RETURN QUERY
	SELECT v.scope, v.share::float8
	FROM pg_class AS t JOIN pg_namespace AS n ON n.oid = t.relnamespace
		JOIN pg_stats AS s ON s.schemaname = n.nspname AND s.tablename = t.relname,
		LATERAL ROWS FROM (unnest(s.most_common_vals::text::text[]), unnest(s.most_common_freqs)) AS v (scope, share)
	WHERE t.oid = '@extschema@.idem_claims'::regclass AND s.attname = 'scope' AND NOT s.inherited
	ORDER BY v.share DESC LIMIT 32;
END $$;

COMMENT ON FUNCTION @extschema@.idem__stat_scope_shares() IS
'for the view idem_stat_scopes: which part of the claims each of the most common scopes has';

CREATE VIEW @extschema@.idem_stat_scopes AS
	WITH common AS MATERIALIZED (SELECT k.scope, k.share FROM @extschema@.idem__stat_scope_shares() AS k)
	SELECT c.scope, (c.share * t.claims)::int8 AS claims
	FROM (SELECT k.scope, k.share FROM common AS k
			UNION ALL SELECT NULL, greatest(1 - coalesce(sum(k.share), 0), 0) FROM common AS k) AS c (scope, share),
		@extschema@.idem_stat_table AS t
	ORDER BY c.scope;

COMMENT ON VIEW @extschema@.idem_stat_scopes IS
'claims by scope: up to 32 scopes, and a row without a scope for all others';
COMMENT ON COLUMN @extschema@.idem_stat_scopes.scope IS 'NULL: all scopes that have no row';
COMMENT ON COLUMN @extschema@.idem_stat_scopes.claims IS 'claims in the table, an estimate of the latest ANALYZE';

-- ----- metrics -----

-- What is known without counting claims: all claims would have to update one counter.  The
-- names are those of the C edition.  No sample reads all claims: the oldest one is found by its index, and of
-- the expired ones at most 10,000 are looked at.
CREATE VIEW @extschema@.idem_metrics AS
	SELECT m.name, jsonb_strip_nulls(jsonb_build_object('database', current_database(), 'le', m.le, 'scope', m.scope)) AS labels,
		m.type, m.help, m.value
	FROM @extschema@.idem_stat_cleanup AS cleanup, @extschema@.idem_stat_table AS size,
	LATERAL (SELECT n.name, n.le, NULL, n.type, n.help, n.value FROM (VALUES
		('idem_cleanup_rows_total', NULL, 'counter',
			'Expired claims that were removed.', cleanup.rows_deleted::float8),
		('idem_cleanup_batch_duration_seconds_bucket', '+Inf', 'histogram',
			'Duration of a batch of the cleanup.', cleanup.batches),
		('idem_cleanup_batch_duration_seconds_sum', NULL, 'histogram',
			'Duration of a batch of the cleanup.', cleanup.total_batch_seconds),
		('idem_cleanup_batch_duration_seconds_count', NULL, 'histogram',
			'Duration of a batch of the cleanup.', cleanup.batches),
		('idem_cleanup_has_backlog', NULL, 'gauge',
			'1 if the latest batch of the cleanup left expired claims behind.', cleanup.backlog::int4),
		('idem_cleanup_last_run_timestamp_seconds', NULL, 'gauge',
			'When the latest batch of the cleanup ended, as Unix time.', date_part('epoch', cleanup.last_run)),
		('idem_unknown_claims', NULL, 'gauge',
			'Expired claims whose lease lapsed unsettled, kept until somebody finds out.',
			CASE WHEN EXISTS (SELECT FROM @extschema@.idem_scopes AS p WHERE p.lapsed = 'unknown') THEN
				(SELECT count(*) FROM (SELECT e.scope, e.state FROM @extschema@.idem_claims AS e
						WHERE e.expires_at <= clock_timestamp() ORDER BY e.expires_at LIMIT 10000) AS e
					JOIN @extschema@.idem_scopes AS p USING (scope)
				WHERE e.state::text = 'in_progress' AND p.lapsed = 'unknown') ELSE 0 END),
		('idem_oldest_expired_age_seconds', NULL, 'gauge',
			'How long the oldest expired claim that is still there has been expired.',
			coalesce(date_part('epoch', cleanup.oldest_expired_age), 0)),
		('idem_cleanup_active', NULL, 'gauge',
			'1 if somebody cleans this database: a session in the last hour.',
			coalesce(cleanup.last_run > clock_timestamp() - interval '1 hour', false)::int4),
		('idem_table_claims', NULL, 'gauge',
			'Claims in the table, an estimate.', size.claims),
		('idem_table_dead_rows', NULL, 'gauge',
			'Dead rows of the table, an estimate.', size.dead_rows),
		('idem_table_bytes', NULL, 'gauge',
			'Size of the table with its indexes.', size.bytes),
		('idem_dead_rows_held_seconds', NULL, 'gauge',
			'Age of the oldest transaction that keeps VACUUM from removing dead rows.',
			CASE WHEN size.held_back_by IS NULL THEN 0
				ELSE date_part('epoch', clock_timestamp() - size.held_back_since) END),
		('idem_dead_rows_held_transactions', NULL, 'gauge',
			'Transactions of the server since what keeps VACUUM from removing dead rows began.',
			coalesce(size.held_back_transactions, 0))
		) AS n (name, le, type, help, value)
		UNION ALL
		-- A real scope of such a name would be counted with it: a sample must not come twice.
		SELECT 'idem_scope_claims', NULL, CASE s.scope WHEN '' THEN '(default)' ELSE coalesce(s.scope, '(other)') END,
			'gauge', 'Claims in the table by scope, an estimate.', sum(s.claims)
		FROM @extschema@.idem_stat_scopes AS s
		GROUP BY 3
	) AS m (name, le, scope, type, help, value)
	WHERE m.value IS NOT NULL
		-- On Citus the table of this node is empty, see sql/idem-citus.sql: its size says nothing.
		AND NOT ((m.name ^@ 'idem_table_' OR m.name = 'idem_scope_claims')
			AND to_regclass('@extschema@.idem__token_source') IS NOT NULL);
