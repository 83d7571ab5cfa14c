-- What a storm must have left behind. Each check is a block of this file: its name, a query of
-- what is wrong, and after "-- broken:" a change after which the query must find something.
--
-- journal (client, kind, execution, scope, user_id, request_id, result, began, ended) has what the
-- clients saw: kind is sent, committed, undone, replay or fault. Times are those of this machine.

-- check: a request was executed again before its time
SELECT first.id, second.id FROM executions first JOIN executions second USING (request_id, user_id, scope)
WHERE first.kind = 'done' AND second.ctid <> first.ctid AND second.claimed_at >= first.claimed_at
	AND second.claimed_at < first.remembered_until;
-- broken:
INSERT INTO executions SELECT id || '!', scope, user_id, request_id, kind, result, called_at,
	claimed_at + interval '1 ms', remembered_until FROM executions WHERE kind = 'done' LIMIT 1;

-- check: a claim was promised for less than the ttl
SELECT e.id FROM executions e JOIN idem_scopes s USING (scope) WHERE remembered_until < called_at + ttl
	AND scope NOT IN ('leases', 'found', 'timed', 'call');
-- broken:
UPDATE executions SET remembered_until = called_at WHERE ctid = (SELECT ctid FROM executions WHERE scope = 'brief' LIMIT 1);

-- check: a request with its time in its id was executed twice
SELECT request_id FROM executions WHERE scope = 'timed' GROUP BY request_id, user_id HAVING count(*) > 1;
-- broken:
INSERT INTO executions SELECT id || '!', scope, user_id, request_id, kind, result, called_at + interval '1 day',
	claimed_at + interval '1 day', remembered_until + interval '1 day' FROM executions WHERE scope = 'timed' LIMIT 1;

-- check: an acknowledged execution is missing
SELECT execution FROM journal WHERE kind = 'committed' AND scope <> 'sink'
	AND NOT EXISTS (SELECT FROM executions WHERE id = execution AND executions.request_id = journal.request_id)
UNION ALL
SELECT execution FROM journal WHERE kind = 'committed' AND scope = 'sink'
	AND NOT EXISTS (SELECT FROM sink WHERE id = execution);
-- broken:
DELETE FROM executions WHERE ctid = (SELECT e.ctid FROM executions e JOIN journal j ON e.id = j.execution AND j.kind = 'committed' LIMIT 1);

-- check: an execution that was rolled back is there
SELECT execution FROM journal JOIN executions ON id = execution WHERE journal.kind = 'undone'
UNION ALL
SELECT execution FROM journal JOIN sink ON id = execution WHERE journal.kind = 'undone';
-- broken:
INSERT INTO journal (kind, execution) SELECT 'undone', id FROM executions LIMIT 1;

-- check: an execution is there that no client sent
SELECT id FROM executions WHERE id NOT LIKE 'call-%'
	AND NOT EXISTS (SELECT FROM journal WHERE execution = id AND journal.kind IN ('sent', 'committed'));
-- broken:
INSERT INTO executions SELECT 'nobody', scope, user_id, request_id, kind, result, called_at - interval '1 day',
	claimed_at - interval '1 day', remembered_until - interval '1 day' FROM executions LIMIT 1;

-- check: a claim that is still promised is not there, or tells another result
SELECT e.id FROM executions e
WHERE e.kind = 'done' AND e.remembered_until > clock_timestamp()
	AND (e.scope <> 'found' OR EXISTS (SELECT FROM journal j WHERE j.kind = 'settled' AND j.execution = e.id))
	AND NOT EXISTS (SELECT FROM idem_claims c WHERE c.request_id = e.request_id AND c.user_id = e.user_id
		AND c.scope = e.scope AND c.state = 'completed' AND c.result #>> '{}' IS NOT DISTINCT FROM e.result);
-- broken:
DELETE FROM idem_claims c USING executions e WHERE e.scope = 'long' AND e.kind = 'done'
	AND c.request_id = e.request_id AND c.user_id = e.user_id AND c.scope = e.scope;

-- check: a claim is there without its execution
SELECT c.request_id FROM idem_claims c
WHERE c.scope <> 'sink' AND c.state <> 'in_progress' AND NOT EXISTS (SELECT FROM executions e
	WHERE c.request_id = e.request_id AND c.user_id = e.user_id AND c.scope = e.scope
		AND e.kind = CASE c.state WHEN 'failed' THEN 'failed' ELSE 'done' END
		AND c.result #>> '{}' IS NOT DISTINCT FROM e.result);
-- broken:
DELETE FROM executions WHERE scope = 'long';

-- check: a sink has a row twice, or without a claim
SELECT request_id FROM sink GROUP BY request_id, user_id HAVING count(*) > 1
UNION ALL
SELECT request_id FROM sink s WHERE NOT EXISTS (SELECT FROM idem_claims c
	WHERE c.request_id = s.request_id AND c.user_id = s.user_id AND c.scope = 'sink')
UNION ALL
SELECT request_id FROM idem_claims c WHERE c.scope = 'sink' AND NOT EXISTS (SELECT FROM sink s
	WHERE c.request_id = s.request_id AND c.user_id = s.user_id);
-- broken:
DELETE FROM sink WHERE ctid = (SELECT ctid FROM sink LIMIT 1);

-- check: a replay is not equal to what the execution stored
SELECT j.request_id FROM journal j WHERE j.kind IN ('replay', 'replay_snapshot') AND NOT EXISTS (SELECT FROM executions e
	WHERE j.request_id = e.request_id AND j.user_id = e.user_id AND j.scope = e.scope
		AND j.result IS NOT DISTINCT FROM e.result);
-- broken:
UPDATE journal SET result = 'other' WHERE ctid = (SELECT ctid FROM journal WHERE kind = 'replay' LIMIT 1);

-- check: a replay told an execution that was not the latest
SELECT j.request_id FROM journal j JOIN executions told ON told.request_id = j.request_id
	AND told.user_id = j.user_id AND told.scope = j.scope AND told.result = j.result
WHERE j.kind = 'replay' AND EXISTS (SELECT FROM executions later JOIN journal c ON c.execution = later.id AND c.kind = 'committed'
	WHERE later.request_id = j.request_id AND later.user_id = j.user_id AND later.scope = j.scope
		AND later.claimed_at > told.claimed_at AND c.ended < j.began);
-- broken:
WITH replay AS (SELECT j.* FROM journal j WHERE j.kind = 'replay' AND j.result IS NOT NULL LIMIT 1),
	later AS (INSERT INTO executions SELECT 'later', scope, user_id, request_id, 'done', 'later', 'infinity', 'infinity', 'infinity' FROM replay)
INSERT INTO journal (kind, execution, ended) SELECT 'committed', 'later', began - interval '1 ms' FROM replay;

-- check: a holder of a lease wrote after its successor
SELECT seq FROM (SELECT seq, token, lag(token) OVER (PARTITION BY request_id, user_id, scope ORDER BY seq) AS before
	FROM lease_writes) AS w WHERE token < before;
-- broken:
INSERT INTO lease_writes (scope, user_id, request_id, token) SELECT scope, user_id, request_id, token - 1 FROM lease_writes LIMIT 1;

-- check: a client got an answer that the contract does not have
SELECT client, request_id, result FROM journal WHERE kind = 'fault';
-- broken:
INSERT INTO journal (kind, result) VALUES ('fault', 'XX000');

-- check: a prepared transaction was left behind
SELECT gid FROM pg_prepared_xacts WHERE database = current_database();

-- check: table or index is damaged
SELECT msg FROM verify_heapam('idem_claims')
UNION ALL
SELECT indexrelid::regclass::text FROM pg_index WHERE indrelid = 'idem_claims'::regclass
	AND bt_index_check(indexrelid, true) IS NULL;
