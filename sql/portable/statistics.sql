-- ----- statistics -----

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
			WHERE p.lapsed = 'unknown' AND e.state = 'in_progress'::@extschema@.idem_state AND e.expires_at <= clock_timestamp()
			) AS rows_unknown,
		CASE WHEN l.finished_at > clock_timestamp() - interval '1 hour' THEN 'sessions: this edition has no worker'
			ELSE 'nobody: no session has called idem_cleanup_all() ' || coalesce(
				'for ' || date_trunc('minute', clock_timestamp() - l.finished_at)::text, 'yet') END AS cleaning
	FROM (SELECT coalesce(sum(t.rows_deleted), 0)::int8 AS rows_deleted, coalesce(sum(t.batches), 0)::int8 AS batches,
				coalesce(sum(t.seconds), 0) AS seconds, coalesce(max(t.max_seconds), 0) AS max_seconds
			FROM @extschema@.idem__cleanup_batches AS t) AS b
		LEFT JOIN LATERAL (SELECT t.* FROM @extschema@.idem__cleanup_batches AS t ORDER BY t.finished_at DESC LIMIT 1) AS l ON true;

COMMENT ON COLUMN @extschema@.idem_stat_cleanup.oldest_expired_age IS
'how long the oldest claim that is still there has been expired; 0: none has expired; NULL: there is none';
COMMENT ON COLUMN @extschema@.idem_stat_cleanup.backlog IS 'the latest batch ended by its bounds: expired claims can be left';
COMMENT ON COLUMN @extschema@.idem_stat_cleanup.rows_unknown IS 'expired claims that nobody settled, kept by lapsed = unknown';
COMMENT ON COLUMN @extschema@.idem_stat_cleanup.cleaning IS 'who cleans: sessions; or nobody, in the last hour';

-- The shares of the most common scopes in the sample that ANALYZE takes; NULL: of all others.  It runs as
-- idem's owner, because pg_stats shows a column only to roles that may read it.
CREATE FUNCTION @extschema@.idem__stat_scope_shares(OUT scope text, OUT share float8) RETURNS SETOF record
LANGUAGE sql STABLE PARALLEL RESTRICTED ROWS 33 SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
	SELECT @extschema@.idem__check_scope('');
	WITH common AS (
		SELECT v.scope, v.share::float8
		FROM pg_stats AS s,
			LATERAL ROWS FROM (unnest(s.most_common_vals::text::text[]), unnest(s.most_common_freqs)) AS v (scope, share)
		WHERE quote_ident(s.schemaname) = '@extschema@' AND s.tablename = 'idem_claims' AND s.attname = 'scope' AND NOT s.inherited
		ORDER BY v.share DESC LIMIT 32)
	SELECT k.scope, k.share FROM common AS k
	UNION ALL SELECT NULL, greatest(1 - coalesce(sum(k.share), 0), 0) FROM common AS k;
$$;

COMMENT ON FUNCTION @extschema@.idem__stat_scope_shares() IS
'for the view idem_stat_scopes: which part of the claims each of the most common scopes has';

CREATE VIEW @extschema@.idem_stat_scopes AS
	SELECT c.scope, (c.share * t.claims)::int8 AS claims
	FROM @extschema@.idem__stat_scope_shares() AS c, @extschema@.idem_stat_table AS t
	ORDER BY c.scope;

COMMENT ON VIEW @extschema@.idem_stat_scopes IS
'claims by scope: up to 32 scopes, and a row without a scope for all others';
COMMENT ON COLUMN @extschema@.idem_stat_scopes.scope IS 'NULL: all scopes that have no row';
COMMENT ON COLUMN @extschema@.idem_stat_scopes.claims IS 'claims in the table, an estimate of the latest ANALYZE';

-- What is known without counting claims, for which all claims would have to update one counter; the names are
-- those of the C edition.
CREATE VIEW @extschema@.idem_metrics AS
	SELECT m.name, jsonb_strip_nulls(jsonb_build_object('database', current_database(),
			'le', CASE WHEN m.name LIKE '%_bucket' THEN '+Inf' END, 'scope', m.scope)) AS labels,
		CASE WHEN m.name LIKE '%_duration_%' THEN 'histogram' WHEN m.name LIKE '%_total' THEN 'counter' ELSE 'gauge' END AS type,
		m.help, m.value
	FROM @extschema@.idem_stat_cleanup AS c, @extschema@.idem_stat_table AS t, LATERAL (VALUES
			('idem_cleanup_rows_total', 'Expired claims that were removed.', c.rows_deleted::float8, NULL),
			('idem_cleanup_batch_duration_seconds_bucket', 'Duration of a batch of the cleanup.', c.batches, NULL),
			('idem_cleanup_batch_duration_seconds_sum', 'Duration of a batch of the cleanup.', c.total_batch_seconds, NULL),
			('idem_cleanup_batch_duration_seconds_count', 'Duration of a batch of the cleanup.', c.batches, NULL),
			('idem_cleanup_has_backlog', '1 if the latest batch of the cleanup ended by its bounds.', c.backlog::int4, NULL),
			('idem_cleanup_last_run_timestamp_seconds', 'When the latest batch of the cleanup ended, as Unix time.',
				date_part('epoch', c.last_run), NULL),
			('idem_unknown_claims', 'Expired claims whose lease lapsed unsettled, kept until somebody finds out.',
				c.rows_unknown, NULL),
			('idem_oldest_expired_age_seconds', 'How long the oldest expired claim that is still there has been expired.',
				coalesce(date_part('epoch', c.oldest_expired_age), 0), NULL),
			('idem_cleanup_active', '1 if somebody cleans this database: a session in the last hour.',
				(c.cleaning ^@ 'sessions')::int4, NULL),
			('idem_table_claims', 'Claims in the table, an estimate.', t.claims, NULL),
			('idem_table_dead_rows', 'Dead rows of the table, an estimate.', t.dead_rows, NULL),
			('idem_table_bytes', 'Size of the table with its indexes.', t.bytes, NULL),
			('idem_dead_rows_held_seconds', 'Age of the oldest transaction that keeps VACUUM from removing dead rows.',
				CASE WHEN t.held_back_by IS NULL THEN 0 ELSE date_part('epoch', clock_timestamp() - t.held_back_since) END, NULL),
			('idem_dead_rows_held_transactions', 'Transactions since what keeps VACUUM from removing dead rows began.',
				coalesce(t.held_back_transactions, 0), NULL)
		-- A real scope of such a name would be counted with it: a sample must not come twice.
		UNION ALL SELECT 'idem_scope_claims', 'Claims in the table by scope, an estimate.', sum(s.claims),
			CASE s.scope WHEN '' THEN '(default)' ELSE coalesce(s.scope, '(other)') END
		FROM @extschema@.idem_stat_scopes AS s
		GROUP BY 4
	) AS m (name, help, value, scope)
	WHERE m.value IS NOT NULL
		-- On Citus the table of this node is empty: its size says nothing.
		AND NOT ((m.name ^@ 'idem_table_' OR m.name = 'idem_scope_claims')
			AND to_regclass('@extschema@.idem__token_source') IS NOT NULL);
