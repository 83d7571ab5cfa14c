-- ----- comments -----

-- Of all functions of a name, and of the views as far as both editions have the same to say
DO $block$
DECLARE
	schema constant regnamespace := @schema@;
	known constant text[] := current_setting('idem_install.known');
	command text;
BEGIN
	FOR command IN
		SELECT format('COMMENT ON ROUTINE %s IS %L', p.oid::regprocedure, c.text) FROM (VALUES
		('idem_version', 'version of idem that is installed'),
		('idem_claim', 'claims a request for this transaction: true, do the work; false, it was done; else it raises'),
		('idem_try_claim', 'claims as idem_claim(), and returns the outcome instead of raising it. Use it in FROM'),
		('idem_lease', 'claims for work outside a transaction: until the lease ends or is settled. Use it in FROM'),
		('idem_claim_many', 'claims for this transaction, without deadlocks; answers in the order of the arrays'),
		('idem_skip_duplicates', 'trigger BEFORE INSERT (scope, user column, request column): skips rows done before'),
		('idem_complete', 'stores the response; without ids, of this transaction''s only request. false: it was'),
		('idem_fail', 'ends as failed; without ids, this transaction''s only request. false: it was so'),
		('idem_call', 'claims, runs a function with the caller''s rights, stores its result; a replay returns that'),
		('idem_extend', 'heartbeat: renews the lease (NULL: by the scope''s lease), records progress; returns its end'),
		('idem_release', 'gives up a lease, so that the next waiter claims: false, there was none'),
		('idem_fence', 'locks the lease until this transaction ends, or raises ID410: leased work begins with it'),
		('idem_heal', 'settles any holder''s lease whose work was found done: false, it was settled before'),
		('idem_result', 'stored result, or error of a failed request; without ids, of the latest claim call'),
		('idem_outcome', 'what the latest claim call of this transaction answered; claimed also after completion'),
		('idem_status', 'completed, failed, in_progress or unknown; NULL if the request is not remembered'),
		('idem_lookup', 'everything stored about a request except its token; no row if it is not remembered'),
		('idem_lapsed', 'lapsed leases, longest first. lapsed: idem_lease() takes it over; unknown: see idem_heal()'),
		('idem_fingerprint', 'SHA-256 of the canonical text: equal jsonb have equal fingerprints'),
		('idem_forget', 'operator: lets a request be executed again: false, there was no such request'),
		('idem_erase', 'operator: a user''s settled requests lose result and progress, and stay guarded. Commits'),
		('idem_cleanup', 'operator: removes expired claims in this transaction, for about a second; returns how many'),
		('idem__cleanup_step', 'for idem_cleanup_all(): one batch, from one low-water mark to the next'),
		('idem_cleanup_all', 'operator: removes all claims that have expired by now; commits after each batch'),
		('idem_grant', 'grants a role what an application (app) or an operator (operator) needs'),
		('idem_revoke', 'revokes what the caller granted by idem_grant(); app and operator share some functions'),
		('idem__change_rights', 'for idem_grant() and idem_revoke()')) AS c (name, text)
			JOIN pg_proc AS p ON p.pronamespace = schema AND p.proname = c.name
		WHERE p.proowner = quote_ident(current_user)::regrole
			AND (p.tableoid, p.oid, p.ctid)::text <> ALL (known)
		UNION ALL SELECT format('COMMENT ON %s %s.%s IS %L', CASE WHEN c.name ~ '[.]' THEN 'COLUMN' ELSE 'VIEW' END,
			schema, c.name, c.text) FROM (VALUES
		('idem_stat_cleanup', 'statistics of removing expired claims in this database'),
		('idem_stat_cleanup.last_run', 'end of the latest batch'),
		('idem_stat_table', 'size of idem_claims, an estimate, and what keeps VACUUM from removing its dead rows'),
		('idem_stat_table.held_back_by', 'oldest transaction, prepared transaction, replication slot or standby'),
		('idem_stat_table.held_back_since', 'when it began, or was prepared; NULL: not known'),
		('idem_stat_table.held_back_transactions', 'transactions of the server since then'),
		('idem_unsettled', 'requests in progress under a lease, and those whose lease lapsed; the oldest lease first'),
		('idem_unsettled.status', 'live; lapsed: idem_lease() takes it over; unknown: somebody has to find out'),
		('idem_holders.lease_until', 'end of the lease that holds it'),
		('idem_metrics', 'statistics of this database as samples of Prometheus metrics; durations in seconds'),
		('idem_metrics.type', 'a histogram has samples _bucket, _sum and _count')) AS c (name, text)
	LOOP
		EXECUTE command;
	END LOOP;
END $block$;
