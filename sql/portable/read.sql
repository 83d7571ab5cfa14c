-- ----- reading -----

CREATE FUNCTION @extschema@.idem_result() RETURNS jsonb
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
	RETURN (@extschema@.idem__latest('idem_result()')).result;
END $$;

CREATE FUNCTION @extschema@.idem_outcome() RETURNS @extschema@.idem_outcome
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
	RETURN (@extschema@.idem__latest('idem_outcome()')).outcome;
END $$;

-- The row as a claim would see it: if expired = reclaim, an expired one is absent.  (If the snapshot sees two rows
-- of the key, ours counts, see idem__only_ours_counts().)
CREATE FUNCTION @extschema@.idem__as_claim_sees(key @extschema@.idem__key, OUT outcome text, OUT result jsonb)
LANGUAGE plpgsql STABLE SET enable_seqscan = off SET jit = off AS $$
DECLARE
	seen record;
BEGIN
	SELECT c.state::text AS state, c.lease_until, c.expires_at, c.result INTO seen FROM @extschema@.idem_claims AS c
	WHERE @extschema@.idem__has_key(c.user_id, c.request_id, c.scope, key)
	ORDER BY @extschema@.idem__order_of(c.xmin) LIMIT 1;
	SELECT CASE WHEN seen.state = 'in_progress' AND seen.lease_until <= clock_timestamp() AND p.unknown
		THEN 'unknown' ELSE seen.state END, seen.result
	INTO outcome, result FROM @extschema@.idem__policy(key.scope) AS p
	WHERE NOT (p.reclaim AND seen.expires_at <= clock_timestamp()
		AND NOT (seen.state = 'in_progress' AND (p.unknown OR seen.lease_until > clock_timestamp())));
END $$;

CREATE FUNCTION @extschema@.idem_result(user_id text, request_id text, scope text DEFAULT '') RETURNS jsonb
LANGUAGE plpgsql STABLE PARALLEL RESTRICTED SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
	RETURN (@extschema@.idem__as_claim_sees(@extschema@.idem__key_of(user_id, request_id, scope))).result;
END $$;

CREATE FUNCTION @extschema@.idem_status(user_id text, request_id text, scope text DEFAULT '')
RETURNS @extschema@.idem_outcome
LANGUAGE plpgsql STABLE PARALLEL RESTRICTED SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
	RETURN (@extschema@.idem__as_claim_sees(@extschema@.idem__key_of(user_id, request_id, scope))).outcome;
END $$;

-- committed_at is NULL on a standby, where reading it raises an error if the primary does not track commits; and
-- on Citus, where another server may have written the row.
CREATE FUNCTION @extschema@.idem_lookup(user_id text, request_id text, scope text DEFAULT '')
RETURNS TABLE (state @extschema@.idem_state, expires_at timestamptz, lease_until timestamptz,
	fingerprint bytea, result jsonb, progress jsonb, committed_at timestamptz)
LANGUAGE plpgsql STABLE PARALLEL RESTRICTED ROWS 1 SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off SET jit = off AS $$
DECLARE
	key constant @extschema@.idem__key := @extschema@.idem__key_of(user_id, request_id, scope);
	tracks_commits constant boolean := current_setting('track_commit_timestamp') = 'on' AND NOT pg_is_in_recovery()
		AND to_regclass('pg_catalog.pg_dist_partition') IS NULL;
BEGIN
	RETURN QUERY SELECT c.state, c.expires_at, c.lease_until, c.fingerprint, c.result, c.progress,
		CASE WHEN tracks_commits THEN pg_xact_commit_timestamp(c.xmin) END
	FROM @extschema@.idem_claims AS c
	WHERE @extschema@.idem__has_key(c.user_id, c.request_id, c.scope, key)
	ORDER BY @extschema@.idem__order_of(c.xmin) LIMIT 1;
END $$;

-- ----- work that was left behind -----

-- The settings have it read the index of unsettled claims, and plan each call for its scope.  (The order of
-- the columns follows from the arguments: scope is both.)
CREATE FUNCTION @extschema@.idem_lapsed(
	INOUT scope text DEFAULT NULL, max_rows int4 DEFAULT 100,
	OUT user_id text, OUT request_id text, OUT status text, OUT lease_until timestamptz, OUT progress jsonb)
RETURNS SETOF record
LANGUAGE plpgsql STABLE PARALLEL RESTRICTED ROWS 100 SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off SET plan_cache_mode = force_custom_plan AS $$
BEGIN
	PERFORM @extschema@.idem__check_scope(coalesce(scope, ''));
	IF max_rows < 0 THEN
		PERFORM @extschema@.idem__raise('ID400', 'max_rows must not be negative',
			'Fix the client: pass how many rows to return at most, or NULL for all.');
	END IF;
	RETURN QUERY
	SELECT c.scope, c.user_id, c.request_id, CASE WHEN p.lapsed = 'unknown' THEN 'unknown' ELSE 'lapsed' END, c.lease_until, c.progress
	FROM @extschema@.idem_claims AS c LEFT JOIN @extschema@.idem_scopes AS p ON p.scope = c.scope
	WHERE c.state = 'in_progress'::@extschema@.idem_state
		AND (idem_lapsed.scope IS NULL OR c.scope = idem_lapsed.scope COLLATE "C")
		AND (c.lease_until <= clock_timestamp() OR c.lease_until IS NULL)
		AND (coalesce(p.expired, 'protect') = 'protect' OR coalesce(p.lapsed, 'reclaim') = 'unknown'
			OR c.expires_at > clock_timestamp())
	ORDER BY c.lease_until NULLS FIRST, c.request_id, c.user_id, c.scope
	LIMIT idem_lapsed.max_rows;
END $$;

-- security_barrier: otherwise a function in the reader's WHERE may get rows that the view leaves out.
-- COLLATE: sql/idem-citus.sql gives the column another collation, which a view cannot follow.
CREATE VIEW @extschema@.idem_unsettled WITH (security_barrier) AS
	SELECT c.scope, c.user_id COLLATE "C" AS user_id, c.request_id,
		CASE WHEN c.lease_until > clock_timestamp() THEN 'live' WHEN p.lapsed = 'unknown' THEN 'unknown' ELSE 'lapsed' END AS status,
		c.lease_until, c.expires_at
	FROM @extschema@.idem_claims AS c LEFT JOIN @extschema@.idem_scopes AS p ON p.scope = c.scope
	WHERE c.state = 'in_progress'::@extschema@.idem_state
		AND (coalesce(p.expired, 'protect') = 'protect' OR coalesce(p.lapsed, 'reclaim') = 'unknown'
			OR c.lease_until > clock_timestamp() OR c.expires_at > clock_timestamp())
	ORDER BY c.lease_until NULLS FIRST;

-- SQL sees which transactions are waited for by sessions that use idem_claims, not for which request, nor who
-- sleeps until a lease ends.  A prepared transaction has no process.  The view reads the server's functions, not
-- its views: those Citus makes again on the other nodes, for readers who may not read pg_authid.
CREATE VIEW @extschema@.idem_holders WITH (security_barrier) AS
	SELECT u.scope, u.user_id, u.request_id, NULL::int4 AS pid, NULL::text AS gid, NULL::timestamptz AS since,
		u.lease_until, NULL::int8 AS waiters
	FROM @extschema@.idem_unsettled AS u
	WHERE u.status = 'live'
	UNION ALL
	SELECT NULL, NULL, NULL, h.pid, p.gid, coalesce(p.prepared, a.xact_start), NULL, count(DISTINCT w.pid)
	FROM pg_lock_status() AS w
		JOIN pg_lock_status() AS h ON h.locktype = 'transactionid' AND h.transactionid = w.transactionid AND h.granted AND h.mode = 'ExclusiveLock'
		LEFT JOIN pg_stat_get_activity(NULL::int4) AS a ON a.pid = h.pid
		LEFT JOIN pg_prepared_xact() AS p ON h.pid IS NULL AND p.transaction = h.transactionid
	WHERE w.locktype = 'transactionid' AND NOT w.granted
		AND EXISTS (SELECT FROM pg_lock_status() AS t WHERE t.pid = w.pid AND t.granted AND t.locktype = 'relation'
			AND t.database = (SELECT d.oid FROM pg_database AS d WHERE d.datname = current_database())
			AND t.relation = '@extschema@.idem_claims'::regclass AND t.mode <> 'AccessShareLock')
	GROUP BY h.pid, p.gid, p.prepared, a.xact_start
	ORDER BY since, lease_until;

COMMENT ON VIEW @extschema@.idem_holders IS
'live leases, and the transactions that claims wait for';
COMMENT ON COLUMN @extschema@.idem_holders.request_id IS 'NULL, as user_id and scope are: a transaction that is waited for; SQL does not see for which request';
COMMENT ON COLUMN @extschema@.idem_holders.pid IS 'process whose transaction is waited for';
COMMENT ON COLUMN @extschema@.idem_holders.gid IS 'prepared transaction that is waited for';
COMMENT ON COLUMN @extschema@.idem_holders.since IS 'when that transaction began, or was prepared; NULL: the reader may not see it';
COMMENT ON COLUMN @extschema@.idem_holders.waiters IS 'how many sessions wait for the transaction; NULL for a lease: SQL does not see them';
