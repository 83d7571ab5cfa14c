-- What a storm must have left behind. Each check is a block of this file: its name, a query of
-- what is wrong, and after each "-- broken:" a change after which the query must find something.
--
-- journal (client, kind, execution, scope, user_id, request_id, result, answer, began, ended) has what
-- the clients saw. Times are those of this machine. kind is
--	sent, committed, undone			a COMMIT of an execution, and how it ended
--	replay, replay_snapshot			a claim was answered with result; answer is its outcome
--	waited							the same, in progress: result is when the lease ended at the latest look
--	settled							an execution in scope found; began is there if this call settled it
--	again							a request is sent again, since its client does not know how a COMMIT ended
--	releasing, refused				a lease is about to be released; a holder got ID410. result is the token
--	fault, count
--
-- Request "heir" is that of let_leases_lapse() in Storm.pm.
--
-- A slow machine must pass: the checks say what may not happen before a time, never what must
-- have happened by then.

-- check: a request was executed again before its time
SELECT first.id, second.id FROM promised first JOIN promised second USING (request_id, user_id, scope)
WHERE first.is_final AND second.place <> first.place AND second.claimed_at >= first.claimed_at
	AND second.claimed_at < first.until;
-- broken:
INSERT INTO executions SELECT 'broken', 'brief', 'user', 'broken', 'done', 'broken', now(), now() + seconds * interval '1 s', now() + interval '3 s'
FROM generate_series(1, 2) AS seconds;
-- broken:
INSERT INTO executions SELECT 'broken', 'leases', 'user', 'broken', 'done', 'broken', now(), now() + seconds * interval '1 s', now()
FROM generate_series(1, 2) AS seconds;
-- broken:
INSERT INTO executions SELECT 'broken', 'long', 'user', 'broken', 'failed', 'broken', now(), now() + seconds * interval '1 s', now()
FROM generate_series(1, 2) AS seconds;

-- check: a claim was promised for less than the ttl
-- The ttl of a lease counts from its claim, and again from its settlement.
SELECT id FROM executions JOIN idem_scopes USING (scope) WHERE scope <> 'found' AND remembered_until < called_at + ttl
UNION ALL
SELECT request_id FROM leases JOIN idem_scopes USING (scope) WHERE leases.expires_at < called_at + ttl
UNION ALL
SELECT j.execution FROM journal j JOIN executions e ON e.id = j.execution JOIN idem_scopes s ON s.scope = e.scope
	JOIN idem_claims c ON c.request_id = e.request_id AND c.user_id = e.user_id AND c.scope = e.scope
WHERE j.kind = 'settled' AND c.expires_at < j.began + s.ttl
UNION ALL
SELECT k.id FROM sink k JOIN idem_scopes s ON s.scope = 'sink'
	JOIN idem_claims c ON c.request_id = k.request_id AND c.user_id = k.user_id AND c.scope = 'sink'
WHERE c.expires_at < k.called_at + s.ttl;
-- broken:
INSERT INTO executions VALUES ('broken', 'timed', 'user', 'broken', 'done', 'broken', now(), now(), now() + interval '1 s');
-- broken:
INSERT INTO executions VALUES ('broken', 'leases', 'user', 'broken', 'done', 'broken', now(), now(), now() + interval '2 s');
-- broken:
INSERT INTO leases (scope, user_id, request_id, token, asked, called_at, lease_until, expires_at)
VALUES ('found', 'user', 'broken', 0, '1 s', now(), now() + interval '1 s', now() + interval '1 s');
-- broken:
INSERT INTO journal (kind, execution, began) VALUES ('settled', 'heir-execution', now() + interval '1 min');
-- broken:
INSERT INTO sink VALUES ('user', 'broken', 'broken', now() + interval '1 min');

-- check: a request with its time in its id was executed twice
SELECT request_id FROM executions WHERE scope = 'timed' GROUP BY request_id, user_id HAVING count(*) > 1;
-- broken:
INSERT INTO executions SELECT 'broken', 'timed', 'user', 'broken', 'done', 'broken', now() + days * interval '1 day', now() + days * interval '1 day', now()
FROM generate_series(1, 2) AS days;

-- check: an acknowledged execution is missing
SELECT execution FROM journal WHERE kind = 'committed' AND scope <> 'sink'
	AND NOT EXISTS (SELECT FROM executions WHERE id = execution AND executions.request_id = journal.request_id)
UNION ALL
SELECT execution FROM journal WHERE kind = 'committed' AND scope = 'sink'
	AND NOT EXISTS (SELECT FROM sink WHERE id = execution);
-- broken:
INSERT INTO journal (kind, execution, scope) VALUES ('committed', 'broken', 'brief');
-- broken:
INSERT INTO journal (kind, execution, scope) VALUES ('committed', 'broken', 'sink');

-- check: an execution that was rolled back is there
SELECT execution FROM journal JOIN executions ON id = execution WHERE journal.kind = 'undone'
UNION ALL
SELECT execution FROM journal JOIN sink ON id = execution WHERE journal.kind = 'undone';
-- broken:
INSERT INTO journal (kind, execution) VALUES ('undone', 'heir-execution');
-- broken:
INSERT INTO sink VALUES ('user', 'broken', 'broken');
INSERT INTO journal (kind, execution) VALUES ('undone', 'broken');

-- check: an execution is there that no client sent
SELECT id FROM executions WHERE id NOT LIKE 'call-%'
	AND NOT EXISTS (SELECT FROM journal WHERE execution = id AND journal.kind IN ('sent', 'committed'));
-- broken:
INSERT INTO executions VALUES ('broken', 'brief', 'user', 'broken', 'done', 'broken', now(), now(), now());

-- check: a claim that is still promised is not there, or tells another result
SELECT e.id FROM promised e
WHERE e.is_final AND e.until > clock_timestamp()
	AND (e.scope <> 'found' OR EXISTS (SELECT FROM journal j WHERE j.kind = 'settled' AND j.execution = e.id))
	AND NOT EXISTS (SELECT FROM idem_claims c WHERE c.request_id = e.request_id AND c.user_id = e.user_id AND c.scope = e.scope
		AND c.state::text = CASE e.kind WHEN 'failed' THEN 'failed' ELSE 'completed' END
		AND c.result #>> '{}' IS NOT DISTINCT FROM e.result AND c.expires_at >= e.until);
-- broken:
DELETE FROM idem_claims WHERE request_id = 'heir';
-- broken:
UPDATE idem_claims SET expires_at = expires_at - interval '1 hour' WHERE request_id = 'heir';
-- broken:
UPDATE idem_claims SET result = '"other"' WHERE request_id = 'heir';
-- broken:
UPDATE idem_claims SET state = 'failed' WHERE request_id = 'heir';
-- broken:
INSERT INTO executions VALUES ('broken', 'long', 'user', 'broken', 'failed', 'broken', now(), now(), now());

-- check: a claim was forgotten a moment ago, before its time
-- The janitor of Storm.pm also asks this during the storm.
SELECT forgotten FROM forgotten() WHERE forgotten IS NOT NULL;
-- broken:
INSERT INTO executions VALUES ('broken', 'brief', 'user', 'broken', 'done', 'broken', now(), now(), now() + interval '1 min');
-- broken:
INSERT INTO executions VALUES ('broken', 'long', 'user', 'heir', 'done', 'broken', now(), now(), now());
INSERT INTO idem_claims (request_id, user_id, scope, state, result, expires_at)
VALUES ('heir', 'user', 'long', 'completed', '"other"', 'infinity');
-- broken:
INSERT INTO executions VALUES ('broken', 'long', 'user', 'heir', 'done', 'broken', now(), now(), now());
INSERT INTO idem_claims (request_id, user_id, scope, state, result, expires_at)
VALUES ('heir', 'user', 'long', 'failed', '"broken"', 'infinity');
-- broken:
INSERT INTO executions VALUES ('broken', 'long', 'user', 'heir', 'done', 'broken', now(), now(), now());
INSERT INTO idem_claims (request_id, user_id, scope, state, result, expires_at)
VALUES ('heir', 'user', 'long', 'completed', '"broken"', now() + interval '1 hour');

-- check: a claim is there without its execution
SELECT c.request_id FROM idem_claims c
WHERE c.scope <> 'sink' AND c.state <> 'in_progress' AND NOT EXISTS (SELECT FROM executions e
	WHERE c.request_id = e.request_id AND c.user_id = e.user_id AND c.scope = e.scope
		AND e.kind = CASE c.state WHEN 'failed' THEN 'failed' ELSE 'done' END
		AND c.result #>> '{}' IS NOT DISTINCT FROM e.result);
-- broken:
DELETE FROM executions WHERE id = 'heir-execution';
-- broken:
UPDATE idem_claims SET result = '"other"' WHERE request_id = 'heir';
-- broken:
UPDATE idem_claims SET state = 'failed' WHERE request_id = 'heir';

-- check: a sink has a row twice, or without a claim
SELECT request_id FROM sink GROUP BY request_id, user_id HAVING count(*) > 1
UNION ALL
SELECT request_id FROM sink s WHERE NOT EXISTS (SELECT FROM idem_claims c
	WHERE c.request_id = s.request_id AND c.user_id = s.user_id AND c.scope = 'sink')
UNION ALL
SELECT request_id FROM idem_claims c WHERE c.scope = 'sink' AND NOT EXISTS (SELECT FROM sink s
	WHERE c.request_id = s.request_id AND c.user_id = s.user_id);
-- broken:
INSERT INTO sink VALUES ('user', 'broken', 'broken');
SET LOCAL session_replication_role = replica;
INSERT INTO sink VALUES ('user', 'broken', 'broken');
-- broken:
SET LOCAL session_replication_role = replica;
INSERT INTO sink VALUES ('user', 'broken', 'broken');
-- broken:
INSERT INTO sink VALUES ('user', 'broken', 'broken');
DELETE FROM sink WHERE request_id = 'broken';

-- check: a replay is not equal to what the execution stored
SELECT j.request_id FROM journal j WHERE j.kind IN ('replay', 'replay_snapshot') AND NOT EXISTS (SELECT FROM executions e
	WHERE j.request_id = e.request_id AND j.user_id = e.user_id AND j.scope = e.scope
		AND j.result IS NOT DISTINCT FROM e.result AND (j.answer = 'failed') = (e.kind = 'failed'));
-- broken:
INSERT INTO journal (kind, scope, user_id, request_id, result, answer) VALUES ('replay', 'found', 'user', 'heir', 'other', 'completed');
-- broken:
INSERT INTO journal (kind, scope, user_id, request_id, result, answer) VALUES ('replay_snapshot', 'found', 'user', 'heir', 'heir-execution', 'failed');

-- check: a replay told an execution that was not the latest
-- A replay without a result can tell each of the executions that stored none.
SELECT j.request_id FROM journal j
WHERE j.kind = 'replay' AND NOT EXISTS (SELECT FROM executions told
	WHERE told.request_id = j.request_id AND told.user_id = j.user_id AND told.scope = j.scope AND told.result IS NOT DISTINCT FROM j.result
		AND NOT EXISTS (SELECT FROM executions later JOIN journal c ON c.execution = later.id AND c.kind = 'committed'
			WHERE later.request_id = told.request_id AND later.user_id = told.user_id AND later.scope = told.scope
				AND later.claimed_at > told.claimed_at AND c.ended < j.began));
-- broken:
INSERT INTO executions VALUES ('broken', 'brief', 'user', 'broken', 'done', 'broken', now(), now(), now()),
	('later', 'brief', 'user', 'broken', 'done', 'later', now(), now() + interval '3 s', now());
INSERT INTO journal (kind, execution, ended) VALUES ('committed', 'later', now() + interval '4 s');
INSERT INTO journal (kind, scope, user_id, request_id, result, began) VALUES ('replay', 'brief', 'user', 'broken', 'broken', now() + interval '5 s');
-- broken:
INSERT INTO executions VALUES ('broken', 'brief', 'user', 'broken', 'done', NULL, now(), now(), now()),
	('later', 'brief', 'user', 'broken', 'done', 'later', now(), now() + interval '3 s', now());
INSERT INTO journal (kind, execution, ended) VALUES ('committed', 'later', now() + interval '4 s');
INSERT INTO journal (kind, scope, user_id, request_id, result, began) VALUES ('replay', 'brief', 'user', 'broken', NULL, now() + interval '5 s');

-- check: a claim waited for a lease that had lapsed before
SELECT request_id, answer, result FROM journal WHERE kind = 'waited' AND result::timestamptz < began;
-- broken:
INSERT INTO journal (kind, result, began) VALUES ('waited', now() - interval '1 ms', now());

-- check: a lease ended too early, or was taken over while it lasted, or by a smaller token
SELECT request_id, token FROM (SELECT *, lag(token) OVER w AS before, lag(lease_until) OVER w AS lasted
	FROM leases WINDOW w AS (PARTITION BY request_id, user_id, scope ORDER BY seq)) AS l
WHERE lease_until < called_at + asked OR token < before
	OR (token <> before AND answered_at < lasted AND NOT EXISTS (SELECT FROM journal j
		WHERE j.kind = 'releasing' AND j.request_id = l.request_id AND j.result = l.before::text));
-- broken:
UPDATE leases SET lease_until = called_at WHERE request_id = 'heir';
-- broken:
UPDATE leases SET token = -token WHERE request_id = 'heir';
-- broken:
UPDATE leases SET lease_until = 'infinity' WHERE request_id = 'heir';

-- check: a holder was refused, and nobody had its lease after it
-- In scope leases, an abandoned lease can also have expired and been removed.
SELECT j.request_id, j.result FROM journal j JOIN leases l ON l.request_id = j.request_id AND l.user_id = j.user_id
	AND l.scope = j.scope AND l.token = j.result::bigint AND l.expires_at IS NOT NULL
	JOIN idem_scopes s ON s.scope = j.scope
WHERE j.kind = 'refused' AND j.ended < l.called_at + s.ttl
	AND NOT EXISTS (SELECT FROM leases n WHERE n.request_id = l.request_id AND n.user_id = l.user_id AND n.scope = l.scope
		AND n.token > l.token)
	AND NOT EXISTS (SELECT FROM idem_claims c WHERE c.request_id = l.request_id AND c.user_id = l.user_id AND c.scope = l.scope
		AND c.state = 'completed');
-- broken:
INSERT INTO leases (scope, user_id, request_id, token, asked, called_at, lease_until, expires_at)
VALUES ('found', 'user', 'broken', 1, '1 s', now(), now(), now());
INSERT INTO journal (kind, scope, user_id, request_id, result, ended) VALUES ('refused', 'found', 'user', 'broken', '1', now());

-- check: a holder of a lease wrote after its successor
SELECT seq FROM (SELECT seq, token, lag(token) OVER (PARTITION BY request_id, user_id, scope ORDER BY seq) AS before
	FROM lease_writes) AS w WHERE token < before;
-- broken:
INSERT INTO lease_writes (scope, user_id, request_id, token) VALUES ('found', 'user', 'heir', 0);

-- check: a client got an answer that the contract does not have
SELECT client, request_id, result FROM journal WHERE kind = 'fault';
-- broken:
INSERT INTO journal (kind, result) VALUES ('fault', 'XX000');

-- check: a prepared transaction was left behind
SELECT gid FROM pg_prepared_xacts WHERE database = current_database();
-- broken:
PREPARE TRANSACTION 'broken'; BEGIN;

-- check: table or index is damaged
-- No statement can damage a page of the table: that half is not broken here.
SELECT msg FROM verify_heapam('idem_claims')
UNION ALL
SELECT indexrelid::regclass::text FROM pg_index WHERE indrelid = 'idem_claims'::regclass
	AND bt_index_check(indexrelid, true) IS NULL;
-- broken:
UPDATE pg_index SET indisready = false WHERE indexrelid = 'idem_claims_expires_at_idx'::regclass;
INSERT INTO idem_claims (request_id, user_id, scope, state, expires_at) VALUES ('broken', 'user', '', 'completed', now());
UPDATE pg_index SET indisready = true WHERE indexrelid = 'idem_claims_expires_at_idx'::regclass;
