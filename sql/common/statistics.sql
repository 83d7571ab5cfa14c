-- ----- size of the table -----

-- Estimates of the server's statistics: nothing here reads the table, nor refers to it, so that it can be dropped
-- and restored.  VACUUM removes a dead row once no transaction can see it: the oldest transaction holds back all
-- rows that were alive when it began.  Functions of the server, not its views: Citus would make such views anew on
-- other nodes, and plan them with the rights of the reader.
CREATE VIEW @extschema@.idem_stat_table AS
	SELECT coalesce(nullif(pg_stat_get_live_tuples(t.oid), 0)::float8, greatest(t.reltuples, 0))::int8 AS claims,
		pg_stat_get_dead_tuples(t.oid) AS dead_rows,
		pg_total_relation_size(t.oid) AS bytes, pg_indexes_size(t.oid) AS index_bytes,
		greatest(pg_stat_get_last_vacuum_time(t.oid), pg_stat_get_last_autovacuum_time(t.oid)) AS last_vacuum,
		o.held_back_by, o.held_back_by_pid, o.held_back_since, o.held_back_transactions
	FROM pg_class AS t JOIN pg_database AS d ON d.datname = current_database() LEFT JOIN LATERAL (
			SELECT format(CASE WHEN a.datid IS NULL THEN 'standby' ELSE 'transaction' END || ' of process %s', a.pid),
				a.pid, a.xact_start, greatest(age(a.backend_xmin), age(a.backend_xid))
			FROM pg_stat_get_activity(NULL::int4) AS a
			WHERE (a.datid = d.oid OR a.datid IS NULL) AND (a.backend_xmin IS NOT NULL OR a.backend_xid IS NOT NULL)
				AND a.pid NOT IN (SELECT pg_backend_pid() UNION SELECT v.pid FROM pg_stat_get_progress_info('VACUUM') AS v)
			UNION ALL SELECT format('prepared transaction "%s"', p.gid), NULL, p.prepared, age(p.transaction)
			FROM pg_prepared_xact() AS p WHERE p.dbid = d.oid
			UNION ALL SELECT format('replication slot "%s"', s.slot_name), s.active_pid, NULL, age(s.xmin)
			FROM pg_get_replication_slots() AS s WHERE s.xmin IS NOT NULL
			ORDER BY 4 DESC, 3 NULLS FIRST LIMIT 1
		) AS o (held_back_by, held_back_by_pid, held_back_since, held_back_transactions) ON true
	WHERE t.relnamespace = @schema@ AND t.relname = 'idem_claims' AND t.relkind = 'r';
