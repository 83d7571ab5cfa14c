-- ----- size of the table -----

-- As the server's statistics estimate it: nothing here reads the table, nor refers to it, so that it can be
-- dropped and restored.  VACUUM removes a dead row once no transaction can see it any more: the oldest one holds
-- back all rows that were alive when it began.  The view reads the server's functions, not its views: those,
-- Citus would make again on other nodes, and plan with the rights of the reader.
CREATE VIEW @extschema@.idem_stat_table AS
	SELECT coalesce(nullif(pg_stat_get_live_tuples(t.oid), 0)::float8, greatest(t.reltuples, 0))::int8 AS claims,
		pg_stat_get_dead_tuples(t.oid) AS dead_rows,
		pg_total_relation_size(t.oid) AS bytes, pg_indexes_size(t.oid) AS index_bytes,
		greatest(pg_stat_get_last_vacuum_time(t.oid), pg_stat_get_last_autovacuum_time(t.oid)) AS last_vacuum,
		o.holder AS held_back_by, o.pid AS held_back_by_pid, o.since AS held_back_since,
		o.transactions AS held_back_transactions
	FROM pg_class AS t LEFT JOIN (
			SELECT format(CASE WHEN a.datid IS NULL THEN 'standby of process %s' ELSE 'transaction of process %s' END, a.pid),
				a.pid, a.xact_start, greatest(age(a.backend_xmin), age(a.backend_xid))
			FROM pg_stat_get_activity(NULL::int4) AS a
			WHERE (a.datid IS NULL OR a.datid = (SELECT d.oid FROM pg_database AS d WHERE d.datname = current_database()))
				AND a.pid <> pg_backend_pid() AND (a.backend_xmin IS NOT NULL OR a.backend_xid IS NOT NULL)
				AND NOT EXISTS (SELECT FROM pg_stat_get_progress_info('VACUUM') AS v WHERE v.pid = a.pid)
			UNION ALL SELECT format('prepared transaction "%s"', p.gid), NULL, p.prepared, age(p.transaction)
			FROM pg_prepared_xact() AS p
			WHERE p.dbid = (SELECT d.oid FROM pg_database AS d WHERE d.datname = current_database())
			UNION ALL SELECT format('replication slot "%s"', s.slot_name), s.active_pid, NULL, age(s.xmin)
			FROM pg_get_replication_slots() AS s
			WHERE s.xmin IS NOT NULL
			ORDER BY 4 DESC, 3 NULLS FIRST LIMIT 1
		) AS o (holder, pid, since, transactions) ON true
	WHERE t.relnamespace = @schema@ AND t.relname = 'idem_claims' AND t.relkind = 'r';
