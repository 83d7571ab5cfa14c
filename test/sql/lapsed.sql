-- Leases that lapsed and were not settled, as idem_lapsed() lists them; and what the index that
-- finds them costs a claim.
\set VERBOSITY sqlstate

INSERT INTO idem_scopes (scope, lapsed, expired) VALUES
	('unknown', 'unknown', 'protect'), ('reclaim', 'reclaim', 'reclaim'), ('unknown reclaim', 'unknown', 'reclaim');

-- A lease that ended so many seconds ago
CREATE FUNCTION left_behind(request text, of_scope text, seconds int) RETURNS text LANGUAGE sql AS $$
	SELECT outcome FROM idem_lease('lapsed', request, scope => of_scope, lease => '1 min', progress => to_jsonb(request));
	UPDATE idem_claims SET lease_until = clock_timestamp() - seconds * interval '1 s'
	WHERE user_id = 'lapsed' AND request_id = request AND scope = of_scope RETURNING 'left behind'
$$;

SELECT count(*) FROM idem_lapsed();
SELECT idem_claim('lapsed', 'marker'), idem_claim('lapsed', 'done'), idem_complete('lapsed', 'done', '1');
SELECT left_behind('a', '', 20), left_behind('b', '', 40), left_behind('c', 'other', 30), left_behind('d', 'unknown', 50);
SELECT outcome FROM idem_lease('lapsed', 'live', lease => '1 min');
SELECT left_behind('settled', '', 20);
SELECT idem_heal('lapsed', 'settled', '1');

-- Longest lapsed first. In the scope "unknown" a claim does not take a lease over.
SELECT scope, user_id, request_id, status, lease_until < clock_timestamp() - interval '19 s' AS lapsed, progress FROM idem_lapsed();
SELECT request_id FROM idem_lapsed('');
SELECT request_id FROM idem_lapsed('other');
SELECT request_id FROM idem_lapsed(scope => 'none');
SELECT request_id FROM idem_lapsed(max_rows => 2);
SELECT request_id FROM idem_lapsed('', 1);
SELECT request_id FROM idem_lapsed('', 0);
SELECT count(*) FROM idem_lapsed(NULL, NULL);
SELECT l.request_id, t.outcome, t.progress
FROM idem_lapsed() AS l, idem_lease(l.user_id, l.request_id, scope => l.scope, lease => '1 min', wait => '0') AS t;
-- What was taken over is not listed any more.
SELECT request_id, status FROM idem_lapsed();

-- Bad arguments
SELECT idem_lapsed(repeat('x', 256));
SELECT idem_lapsed('', -1);

-- An expired row still guards its request, with its progress, until it is removed. In a scope
-- with expired = reclaim it does not: a claim knows nothing of it, so it is not listed either.
DELETE FROM idem_claims;
SELECT left_behind('protect', '', 1), left_behind('reclaim', 'reclaim', 1), left_behind('unknown', 'unknown reclaim', 1);
SELECT request_id, status FROM idem_lapsed() ORDER BY 1;
UPDATE idem_claims SET expires_at = clock_timestamp() - interval '1 s';
SELECT request_id, status FROM idem_lapsed() ORDER BY 1;
SELECT l.request_id, t.outcome, t.progress FROM idem_claims AS l, idem_lease(l.user_id, l.request_id, scope => l.scope, lease => '1 min') AS t ORDER BY 1;

-- A policy that changes changes the list.
DELETE FROM idem_claims;
SELECT left_behind('p', 'changes', 1);
SELECT status FROM idem_lapsed('changes');
INSERT INTO idem_scopes (scope, lapsed) VALUES ('changes', 'unknown');
SELECT status FROM idem_lapsed('changes');

-- It reads by the snapshot, in a read-only transaction, too.
BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY;
SELECT request_id FROM idem_lapsed('changes');
COMMIT;
-- A large progress, which TOAST keeps elsewhere, is complete.
SELECT outcome FROM idem_lease('lapsed', 'large', scope => 'large', lease => '1 min', progress => to_jsonb(repeat('0123456789', 10000)));
UPDATE idem_claims SET lease_until = clock_timestamp() - interval '1 s' WHERE scope = 'large';
SELECT length(progress #>> '{}') AS length FROM idem_lapsed('large');
-- An operator's UPDATE removed the end of a lease: a claim takes it over.
UPDATE idem_claims SET lease_until = NULL WHERE scope = 'large';
SELECT status, lease_until FROM idem_lapsed('large');

-- ----- what the index costs -----

TRUNCATE idem_claims;
INSERT INTO idem_claims (expires_at, state, request_id, user_id, scope)
SELECT now() + interval '1 h', 'completed', 'settled ' || i, 'lapsed', 's' FROM generate_series(1, 5000) AS i;
SELECT count(*) FILTER (WHERE idem_claim('lapsed', 'marker ' || i)) FROM generate_series(1, 200) AS i;
-- A marker has no entry in it: the index has its first page only, as when it was created.
SELECT pg_relation_size('idem_claims_unsettled_idx') = current_setting('block_size')::bigint AS empty;
SELECT count(left_behind('r' || i, 's', i)) FROM generate_series(1, 3) AS i;
-- The list is read by that index: no other row is looked at.
SELECT pg_stat_force_next_flush();
BEGIN;
SELECT request_id FROM idem_lapsed('s');
SELECT seq_scan, idx_scan, idx_tup_fetch FROM pg_stat_xact_user_tables WHERE relid = 'idem_claims'::regclass;
COMMIT;
-- A lease that is extended keeps its entries in all indexes: the row is updated in place (HOT).
SELECT token FROM idem_lease('lapsed', 'extended', scope => 's', lease => '1 min') \gset
SELECT pg_stat_force_next_flush();
BEGIN;
SELECT count(idem_extend('lapsed', 'extended', :token, '2 min', to_jsonb(i), 's')) FROM generate_series(1, 10) AS i;
SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_xact_user_tables WHERE relid = 'idem_claims'::regclass;
COMMIT;
-- So is a transactional claim that is completed with a result.
SELECT pg_stat_force_next_flush();
BEGIN;
SELECT idem_claim('lapsed', 'completed'), idem_complete('1');
SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_xact_user_tables WHERE relid = 'idem_claims'::regclass;
COMMIT;

-- The index has all that are in progress and no others, whatever became of them.
SELECT idem_complete('lapsed', 'extended', '1', :token, 's');
SELECT outcome, token FROM idem_lease('lapsed', 'r1', scope => 's', lease => '1 min') \gset
SELECT idem_fail('lapsed', 'r1', '1', :token, 's');
INSERT INTO idem_scopes (scope, failed) VALUES ('s', 'retryable');
SELECT outcome FROM idem_lease('lapsed', 'r1', scope => 's', lease => '1 min');
SELECT outcome FROM idem_try_claim('lapsed', 'r2', 's');
SELECT idem_forget('lapsed', 'r3', 's');
SET enable_seqscan = off;
SET enable_bitmapscan = off;
EXPLAIN (COSTS off) SELECT request_id FROM idem_claims WHERE state = 'in_progress';
SELECT request_id FROM idem_claims WHERE state = 'in_progress' ORDER BY 1;
RESET enable_bitmapscan;
RESET enable_seqscan;
SELECT request_id FROM idem_claims WHERE state::text = 'in_progress' ORDER BY 1;

TRUNCATE idem_claims;
DELETE FROM idem_scopes;
DROP FUNCTION left_behind;
