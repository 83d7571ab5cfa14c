-- ----- comments -----

-- The functions, and the views as far as both editions have the same to say.

COMMENT ON FUNCTION @extschema@.idem_claim(text, text, text, bytea, interval) IS
'claims a request for this transaction: true, do the work; false, it was done before. Any other outcome is raised';
COMMENT ON FUNCTION @extschema@.idem_try_claim(text, text, text, bytea, interval) IS
'claims a request for this transaction, and returns the outcome instead of raising it. Use it in FROM';
COMMENT ON FUNCTION @extschema@.idem_lease(text, text, interval, text, bytea, interval, jsonb) IS
'claims a request for work that is not one transaction: until the lease ends, or a call with the token settles it. Use it in FROM';
COMMENT ON FUNCTION @extschema@.idem_claim_many(text[], text[], text, bytea[], interval) IS
'claims requests for this transaction, in an order in which batches do not deadlock; answers in the order of the arrays';
COMMENT ON FUNCTION @extschema@.idem_skip_duplicates() IS
'trigger BEFORE INSERT, arguments scope, user column, request column: claims the request of each row, and skips the row if it was done before';
COMMENT ON FUNCTION @extschema@.idem_complete(jsonb) IS
'stores the response of the only unsettled request of this transaction';
COMMENT ON FUNCTION @extschema@.idem_complete(text, text, jsonb, int8, text) IS
'stores the response of a request that this transaction holds, or whose lease has the token: true, stored; false, an identical repeat';
COMMENT ON FUNCTION @extschema@.idem_fail(jsonb) IS
'ends the only unsettled request of this transaction as failed; recorded only if the transaction commits';
COMMENT ON FUNCTION @extschema@.idem_fail(text, text, jsonb, int8, text) IS
'ends a request that this transaction holds, or whose lease has the token, as failed: true, stored; false, an identical repeat';
COMMENT ON FUNCTION @extschema@.idem_call(text, text, text, jsonb, text, interval) IS
'claims a request for this transaction, runs a function with the caller''s rights, and stores its result; a replay returns what is stored';
COMMENT ON FUNCTION @extschema@.idem_extend(text, text, int8, interval, jsonb, text) IS
'heartbeat: the lease ends that long from now (NULL: the scope''s lease, but no earlier than before), returns when; records progress';
COMMENT ON FUNCTION @extschema@.idem_release(text, text, int8, text) IS
'gives up a lease, so that the next waiter claims: true, released; false, there was no such request';
COMMENT ON FUNCTION @extschema@.idem_fence(text, text, int8, text) IS
'locks the lease until this transaction ends, so that nobody takes it over, or raises ID410: begin each transaction of leased work with it';
COMMENT ON FUNCTION @extschema@.idem_heal(text, text, jsonb, text) IS
'settles the lease of any holder, after its work was found done: true, settled; false, it was settled before';
COMMENT ON FUNCTION @extschema@.idem_result() IS
'result, as stored so far, of the request that this transaction''s latest claim call named';
COMMENT ON FUNCTION @extschema@.idem_result(text, text, text) IS
'stored result of a request, or error of a failed one; NULL if there is none';
COMMENT ON FUNCTION @extschema@.idem_outcome() IS
'what the latest claim call of this transaction answered: claimed also after the request was completed';
COMMENT ON FUNCTION @extschema@.idem_status(text, text, text) IS
'what is stored of a request: completed, failed, in_progress or unknown; NULL if it is not remembered';
COMMENT ON FUNCTION @extschema@.idem_lookup(text, text, text) IS
'everything stored about a request except its token; no row if it is not remembered';
COMMENT ON FUNCTION @extschema@.idem_lapsed(text, int4) IS
'leases that lapsed and were not settled, longest lapsed first, of a scope or of all (NULL); status lapsed: idem_lease() takes it over, unknown: find out, then settle it with idem_heal()';
COMMENT ON FUNCTION @extschema@.idem_fingerprint(jsonb) IS
'SHA-256 of the canonical text: equal jsonb have equal fingerprints';
COMMENT ON FUNCTION @extschema@.idem_forget(text, text, text) IS
'operator: forgets a request, so that it can be executed again: true, forgotten; false, there was no such request';
COMMENT ON PROCEDURE @extschema@.idem_erase(text, text) IS
'operator: results, errors and progress of a user''s settled requests become NULL, in a scope or in all; the requests stay guarded. Commits in between';
COMMENT ON FUNCTION @extschema@.idem_cleanup(int4) IS
'operator: removes expired claims in this transaction, for about a second and at most batch_size of them (NULL: the setting cleanup_batch_size); returns how many';
COMMENT ON FUNCTION @extschema@.idem__cleanup_step(int4, timestamptz, timestamptz) IS
'for idem_cleanup_all(): one batch, from one low-water mark to the next';
COMMENT ON PROCEDURE @extschema@.idem_cleanup_all(int4) IS
'operator: removes all claims that have expired by now, except those that another transaction has locked; commits after each batch';
COMMENT ON FUNCTION @extschema@.idem_grant(regrole, text) IS
'grants a role what an application (app) or an operator (operator) needs, as far as the caller may grant it';
COMMENT ON FUNCTION @extschema@.idem_revoke(regrole, text) IS
'revokes what the caller granted by idem_grant(); app and operator share some functions';
COMMENT ON FUNCTION @extschema@.idem__change_rights(regrole, text, text) IS
'for idem_grant() and idem_revoke()';

COMMENT ON VIEW @extschema@.idem_stat_cleanup IS 'statistics of removing expired claims in this database';
COMMENT ON COLUMN @extschema@.idem_stat_cleanup.rows_deleted IS 'expired claims removed';
COMMENT ON COLUMN @extschema@.idem_stat_cleanup.batches IS 'batches committed';
COMMENT ON COLUMN @extschema@.idem_stat_cleanup.last_batch_seconds IS 'duration of the latest batch';
COMMENT ON COLUMN @extschema@.idem_stat_cleanup.total_batch_seconds IS 'duration of all batches';
COMMENT ON COLUMN @extschema@.idem_stat_cleanup.max_batch_seconds IS 'duration of the longest batch';
COMMENT ON COLUMN @extschema@.idem_stat_cleanup.last_run IS 'end of the latest batch';
COMMENT ON VIEW @extschema@.idem_stat_table IS
'size of idem_claims, as the server estimates it, and what keeps VACUUM from removing its dead rows';
COMMENT ON COLUMN @extschema@.idem_stat_table.claims IS 'claims in the table, an estimate';
COMMENT ON COLUMN @extschema@.idem_stat_table.dead_rows IS 'dead rows of the table, an estimate';
COMMENT ON COLUMN @extschema@.idem_stat_table.bytes IS 'size of the table with its indexes';
COMMENT ON COLUMN @extschema@.idem_stat_table.index_bytes IS 'size of its indexes';
COMMENT ON COLUMN @extschema@.idem_stat_table.last_vacuum IS 'end of the latest VACUUM, by autovacuum or by hand';
COMMENT ON COLUMN @extschema@.idem_stat_table.held_back_by IS
'oldest transaction, prepared transaction, replication slot or standby that may still need dead rows; NULL: none';
COMMENT ON COLUMN @extschema@.idem_stat_table.held_back_by_pid IS 'its process; NULL: it has none';
COMMENT ON COLUMN @extschema@.idem_stat_table.held_back_since IS 'when it began, or was prepared; NULL: not known';
COMMENT ON COLUMN @extschema@.idem_stat_table.held_back_transactions IS 'transactions of the server since then';
COMMENT ON VIEW @extschema@.idem_unsettled IS 'requests in progress under a lease, and those whose lease lapsed; the oldest lease first';
COMMENT ON COLUMN @extschema@.idem_unsettled.status IS
'live: a holder is at work; lapsed: the next idem_lease() takes it over; unknown: somebody has to find out';
COMMENT ON COLUMN @extschema@.idem_holders.lease_until IS 'end of the lease that holds it';
COMMENT ON VIEW @extschema@.idem_metrics IS 'statistics of this database as samples of Prometheus metrics; durations in seconds';
COMMENT ON COLUMN @extschema@.idem_metrics.type IS 'type of the metric: a histogram has samples _bucket, _sum and _count';
