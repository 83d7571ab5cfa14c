-- What only the portable edition has: its installation by psql, the settings in a
-- table, the ledger of cleanups, and how it keeps a transaction's claims.
-- :SQLSTATE is that of the statement before.
\set SHOW_CONTEXT never

-- ----- settings -----

TABLE idem_settings;
UPDATE idem_settings SET ttl = '10 min', result_max_bytes = 100, lease = '2 hours', cleanup_batch_size = 2;
BEGIN;
SELECT idem_claim('u', 'ttl set');
SELECT expires_at >= now() + interval '10 min' AND expires_at < clock_timestamp() + interval '10 min 1.2 s' AS by_the_setting
FROM idem_claims;
SAVEPOINT s;
SELECT idem_complete(to_jsonb(repeat('x', 93)));
ROLLBACK TO s;
SELECT idem_complete(to_jsonb(repeat('x', 92)));
COMMIT;
SELECT token AS t FROM idem_lease('u', 'lease set', lease => '1 min') \gset
SELECT idem_extend('u', 'lease set', :t) > now() + interval '119 min' AS by_the_setting;
UPDATE idem_settings SET lease_max = '1 min';
SELECT idem_extend('u', 'lease set', :t, '61 s');
SELECT idem_extend('u', 'lease set', :t, '1 min') > now() AS extended;
INSERT INTO idem_claims (expires_at, state, request_id, user_id, scope)
	SELECT '2020-01-01', 'completed', i, 'u', '' FROM generate_series(1, 5) AS i;
SELECT idem_cleanup();
-- A new row takes the place of the old one, as when a dump is restored.
INSERT INTO idem_settings (ttl) VALUES ('7 days');
SELECT ttl, lease, result_max_bytes FROM idem_settings;
-- Without a row it is the defaults.
DELETE FROM idem_settings;
BEGIN;
SELECT idem_claim('u', 'no settings');
SELECT expires_at >= now() + interval '1 day' AND expires_at < clock_timestamp() + interval '1 day 1.2 s' AS by_default
FROM idem_claims WHERE request_id = 'no settings';
COMMIT;
INSERT INTO idem_settings DEFAULT VALUES;
UPDATE idem_settings SET ttl = '0';
UPDATE idem_settings SET ttl = '1 month';
UPDATE idem_settings SET lease = '-1 s';
UPDATE idem_settings SET lease_max = '1 month';
INSERT INTO idem_settings (lease_max) VALUES ('0');
UPDATE idem_settings SET result_max_bytes = 0;
UPDATE idem_settings SET cleanup_batch_size = 1000001;
UPDATE idem_settings SET ttl = NULL;

-- How long a claim waits is its caller's.
CREATE FUNCTION pg_temp.waits(setting text) RETURNS text LANGUAGE plpgsql AS $$
BEGIN
	PERFORM set_config('idem.wait', setting, true);
	RETURN coalesce(to_char(extract(epoch FROM public.idem__deadline(NULL) - clock_timestamp()), 'FM999990.0'), 'none');
EXCEPTION WHEN OTHERS THEN
	RETURN SQLSTATE || ' ' || SQLERRM;
END $$;
SELECT w, pg_temp.waits(w) FROM unnest(ARRAY['', '1500', '1.5 s', '.5s', ' 2min ', '1h', '1 d', '300000us', '+3 s',
	'x', '1 month', '-2', '-1 s', '30d', '1 s 2', '1e3', 'NaN']) AS w;
SET idem.wait = 0;
SELECT idem__deadline(NULL);
SET idem.wait = -1;
SELECT idem__deadline(NULL);
RESET idem.wait;

-- The planner inlines the predicate of a key, and finds the primary key.
SET enable_seqscan = off;
SET enable_bitmapscan = off;
EXPLAIN (COSTS OFF) SELECT FROM idem_claims AS c WHERE idem__has_key(c.user_id, c.request_id, c.scope, ROW ('u', 'r', '')::idem__key);
RESET enable_seqscan;
RESET enable_bitmapscan;

-- ----- the ledger -----

DELETE FROM idem_claims;
DELETE FROM idem__cleanup_batches;
SELECT rows_deleted, batches, last_batch_seconds, oldest_expired_age, backlog, rows_unknown, last_run, cleaning FROM idem_stat_cleanup;
INSERT INTO idem_scopes (scope, lapsed) VALUES ('s', 'unknown');
INSERT INTO idem_claims (expires_at, state, lease_until, token, request_id, user_id, scope)
	SELECT date_trunc('second', now()) - i * interval '1 hour',
		CASE WHEN i = 9 THEN 'in_progress' ELSE 'completed' END::idem_state, '2020-01-01', 1, i, 'u', 's'
	FROM generate_series(1, 9) AS i;
SELECT idem_cleanup(3);
SELECT rows_deleted, batches, last_batch_seconds > 0 AS timed, oldest_expired_age > '4 hours' AND oldest_expired_age < '6 hours' AS oldest,
	backlog, rows_unknown, last_run <= now() AS ran
FROM idem_stat_cleanup;
BEGIN;
SELECT idem_cleanup(3);
ROLLBACK;
CALL idem_cleanup_all(2);
SELECT rows_deleted, batches, oldest_expired_age, backlog, rows_unknown, cleaning FROM idem_stat_cleanup;
-- Old batches become one.
UPDATE idem__cleanup_batches SET finished_at = '2020-01-01';
INSERT INTO idem__cleanup_batches SELECT '2020-01-02', 1, 10, 1, 1 + i % 2, true FROM generate_series(1, 2000) AS i;
SELECT batches, rows_deleted, max_batch_seconds, backlog FROM idem_stat_cleanup;
SELECT idem_cleanup();
SELECT batches, rows_deleted, max_batch_seconds, backlog, (SELECT count(*) FROM idem__cleanup_batches) AS entries FROM idem_stat_cleanup;
DELETE FROM idem__cleanup_batches;

-- ----- metrics -----

-- No sample reads the table: only indexes.
SELECT name, labels - 'database' AS labels, labels ? 'database' AS has_database, type, value >= 0 AS has_value
FROM idem_metrics WHERE name <> 'idem_scope_claims' ORDER BY name COLLATE "C";
SELECT value FROM idem_metrics WHERE name = 'idem_unknown_claims';
SELECT idem_cleanup();
SELECT name, value FROM idem_metrics WHERE name ~ 'rows_total|_bucket|_count|backlog' ORDER BY name COLLATE "C";
SELECT date_part('epoch', clock_timestamp()) - value BETWEEN 0 AND 600 AS just_now FROM idem_metrics WHERE name = 'idem_cleanup_last_run_timestamp_seconds';
BEGIN;
INSERT INTO idem_claims (expires_at, state, request_id, user_id, scope)
	SELECT date_trunc('second', now()) - interval '1 hour', 'completed', i, 'u', '' FROM generate_series(1, 100) AS i;
SELECT value BETWEEN 3600 AND 4200 AS an_hour FROM idem_metrics WHERE name = 'idem_oldest_expired_age_seconds';
-- Rows that were written by hand have no age.
SAVEPOINT s;
UPDATE idem_claims SET expires_at = '-infinity' WHERE request_id = '1';
SELECT oldest_expired_age < '2 hours' AS of_another FROM idem_stat_cleanup;
UPDATE idem_claims SET expires_at = 'infinity';
SELECT oldest_expired_age FROM idem_stat_cleanup;
SELECT value FROM idem_metrics WHERE name = 'idem_oldest_expired_age_seconds';
ROLLBACK TO s;
CREATE FUNCTION pg_temp.scans(plan json) RETURNS TABLE (node text, relation text) LANGUAGE sql AS $$
	WITH RECURSIVE nodes (node) AS (
		SELECT plan -> 0 -> 'Plan' UNION ALL SELECT p FROM nodes, json_array_elements(node -> 'Plans') AS p)
	SELECT node ->> 'Node Type', node ->> 'Relation Name' FROM nodes $$;
CREATE FUNCTION pg_temp.explain(command text) RETURNS json LANGUAGE plpgsql AS $$
DECLARE
	plan json;
BEGIN
	EXECUTE 'EXPLAIN (FORMAT json) ' || command INTO plan;
	RETURN plan;
END $$;
SET LOCAL enable_seqscan = off;
SELECT count(*) > 1 AS reads, bool_or(node = 'Seq Scan') AS scans
FROM pg_temp.scans(pg_temp.explain('SELECT * FROM idem_metrics')) WHERE relation = 'idem_claims';
ROLLBACK;
DELETE FROM idem__cleanup_batches;

-- ----- the common case -----

-- It is decided without idem__claim_key(), which is out of the way here.  Either way a claim has ROW
-- SHARE on idem_scopes.
CREATE VIEW locks_of_scopes AS
	SELECT string_agg(mode, ', ' ORDER BY mode) AS modes FROM pg_locks
	WHERE pid = pg_backend_pid() AND relation = 'idem_scopes'::regclass;
INSERT INTO idem_scopes (scope, ttl, key_time) VALUES ('has a row', '1 day', 'uuidv7');
BEGIN;
ALTER FUNCTION idem__claim_key RENAME TO idem__claim_key_away;
SELECT idem_claim('u', 'common'), idem_outcome(), idem_claim('u', 'common'), idem_outcome();
SELECT * FROM locks_of_scopes;
SELECT outcome, result, expires_at > now() + interval '59 min' AS remembered FROM idem_try_claim('u', 'common', fingerprint => 'f');
SELECT idem_claim('u', 'common, without a wait', wait => '0'), idem_claim('u', 'common, without a wait', wait => '0'), current_setting('lock_timeout');
-- A batch at once, not by element
ALTER FUNCTION idem__claim_element RENAME TO idem__claim_element_away;
SELECT * FROM idem_claim_many('{u,u}', '{"common 1","common 2"}');
\set VERBOSITY sqlstate
SAVEPOINT s;
SELECT idem_claim('u', 'not common', 'has a row');
ROLLBACK TO s;
SET LOCAL idem.wait = '20 ms';
SELECT idem_claim('u', 'common');
ROLLBACK;
\set VERBOSITY default
SELECT idem_claim('u', 'common');
BEGIN;
SET LOCAL idem.wait = '20 ms';
SELECT idem_claim('u', 'common'), idem_claim('u', 'slow');
SELECT * FROM locks_of_scopes;
ROLLBACK;
-- Completed at once, also by its name
BEGIN;
ALTER FUNCTION idem__settle RENAME TO idem__settle_away;
SELECT idem_claim('u', 'common, named'), idem_complete('u', 'common, named', '1'), idem_result();
ROLLBACK;
-- Without settings the defaults apply.
BEGIN;
DELETE FROM idem_settings;
SELECT outcome, expires_at > now() + interval '59 min' AS remembered FROM idem_try_claim('u', 'without settings');
SELECT idem_claim('u', 'without settings');
ROLLBACK;
BEGIN;
SELECT idem_claim('u', 'settings removed meanwhile');
DELETE FROM idem_settings;
SELECT idem_complete('1'), idem_result();
ROLLBACK;
-- What is set, and how the ids are typed, change nothing: they have a collation of their own.
CREATE TABLE ids (user_id text COLLATE "POSIX", request_id varchar COLLATE "POSIX");
INSERT INTO ids VALUES ('u', 'collated 1'), ('u', 'collated 2');
SELECT idem_claim(user_id, request_id) FROM ids ORDER BY request_id;
SELECT idem_claim(user_id, request_id) FROM ids ORDER BY request_id;
SELECT m.* FROM (SELECT array_agg(user_id ORDER BY request_id) AS users, array_agg(request_id::text || ', in a batch') AS requests FROM ids) AS i,
	idem_claim_many(users, requests) AS m;
SELECT m.* FROM (SELECT array_agg(user_id ORDER BY request_id) AS users, array_agg(request_id::text || ', in a batch') AS requests FROM ids) AS i,
	idem_claim_many(users, requests) AS m;
-- Also one in which different texts are equal (of servers that have such)
DO $$
BEGIN
	CREATE COLLATION unaccented (provider = icu, locale = 'und-u-ks-level1', deterministic = false);
EXCEPTION WHEN feature_not_supported THEN
	CREATE COLLATION unaccented FROM "C";
END $$;
BEGIN;
SELECT count(*) FILTER (WHERE outcome = 'claimed') AS claimed
FROM idem_claim_many(ARRAY['u' COLLATE unaccented, 'u', 'u', 'u'], ARRAY['equal 1', 'equal 2', 'equal 3', 'equal 4']);
SELECT bool_and(idem_complete('u', 'equal ' || i, to_jsonb(i))) AS settled FROM generate_series(1, 4) AS i;
SELECT idem_claim('u', 'equal 5'), idem_complete('5');
COMMIT;
DROP COLLATION unaccented;
BEGIN;
SET LOCAL extra_float_digits = -10;
SET LOCAL "DateStyle" = 'SQL, DMY';
SET LOCAL "TimeZone" = 'Asia/Kathmandu';
SET LOCAL "IntervalStyle" = 'sql_standard';
SET LOCAL bytea_output = 'escape';
-- From 19 on it is always on.
SELECT set_config('standard_conforming_strings', CASE WHEN current_setting('server_version_num')::int < 190000 THEN 'off' ELSE 'on' END, true) IS NOT NULL AS set;
SET LOCAL lc_numeric = 'C';
SELECT idem_claim('u', 'set 1'), idem_claim('u', 'set 2'), idem_claim('u', 'collated 1'), idem_outcome();
SAVEPOINT s;
SELECT idem_complete('"which?"');
ROLLBACK TO s;
SELECT idem_complete('u', 'set 1', '1'), idem_complete('2'), idem_complete('u', 'set 1', '1');
SELECT request_id, result FROM idem_claims WHERE request_id ~ '^set ' ORDER BY 1;
ROLLBACK;
DROP TABLE ids;
-- The same in another isolation level
BEGIN ISOLATION LEVEL SERIALIZABLE;
ALTER FUNCTION idem__claim_key RENAME TO idem__claim_key_away;
SELECT idem_claim('u', 'in another level'), idem_claim('u', 'in another level');
SELECT idem_claim_many('{u,u}', '{"in another level 1","in another level 2"}');
ROLLBACK;
-- One row has the policies of all scopes.  Cleaning corrects it, and without it claims are decided as
-- in an uncommon case.
BEGIN;
TABLE idem__policies;
INSERT INTO idem_scopes (scope, ttl) VALUES ('short', '1 min');
UPDATE idem_settings SET ttl = '1 min';
TABLE idem__policies;
SELECT outcome, expires_at < now() + interval '2 min' AS by_policy FROM idem_try_claim('u', 'by new settings');
TRUNCATE idem_scopes;
TABLE idem__policies;
SET LOCAL session_replication_role = replica;
UPDATE idem_settings SET ttl = '1 hour', scopes = 'declared';
TABLE idem__policies;
RESET session_replication_role;
UPDATE idem__policies SET ttls = ARRAY[interval '1 s'];
SELECT idem_cleanup();
-- A restored row does not take its place.  It can be published.
INSERT INTO idem__policies VALUES (true, '{}', '{}', '{}');
SET LOCAL client_min_messages = error;
CREATE PUBLICATION all_tables FOR ALL TABLES;
RESET client_min_messages;
UPDATE idem_settings SET result_max_bytes = 1000;
INSERT INTO idem__cleanup_batches SELECT now() - interval '8 days', 1, 0, 0, 0, false FROM generate_series(1, 1000);
SELECT idem_cleanup();
TABLE idem__policies;
DELETE FROM idem_settings;
TABLE idem__policies;
DELETE FROM idem__policies;
SELECT outcome, expires_at > now() + interval '23 hours' AS by_default FROM idem_try_claim('u', 'without policies');
SELECT outcome FROM idem_try_claim('u', 'without policies');
ROLLBACK;
-- Each claim is inserted once, and a replay never, under any policy: no dead rows.  No plan reads
-- the whole table, also if it was made while the table was empty.
INSERT INTO idem_scopes (scope, ttl, key_time, expired) VALUES ('own ttl', '1 day', 'any', 'protect'), ('short', '2 s', 'any', 'reclaim');
CREATE TABLE kept AS SELECT * FROM idem_claims;
TRUNCATE idem_claims;
VACUUM ANALYZE idem_claims;
DISCARD PLANS;
CREATE VIEW used AS SELECT seq_scan, n_tup_ins, n_tup_upd, n_tup_del FROM pg_stat_xact_user_tables WHERE relid = 'idem_claims'::regclass;
BEGIN;
SELECT * FROM used \gset before_
SELECT count(*) FILTER (WHERE idem_claim('u', 'key ' || i)) AS claimed, count(*) FILTER (WHERE NOT idem_claim('u', 'key ' || i)) AS replays
FROM generate_series(1, 2000) AS i;
SELECT count(*) FILTER (WHERE outcome = 'claimed') AS claimed
FROM idem_claim_many(array_fill('u'::text, ARRAY[2000]), ARRAY(SELECT 'batch ' || i FROM generate_series(1, 2000) AS i));
SELECT count(*) FILTER (WHERE outcome = 'completed') AS completed
FROM idem_claim_many(array_fill('u'::text, ARRAY[2000]), ARRAY(SELECT 'batch ' || i FROM generate_series(1, 2000) AS i));
SELECT idem_claim('u', 'policy', 'own ttl'), idem_claim('u', 'policy', 'own ttl'), idem_claim('u', 'policy', 'short'), idem_claim('u', 'policy', 'short');
-- Each key is inserted once; a part of a batch that waited is undone, and inserted again.
SELECT seq_scan - :before_seq_scan AS seq_scan, n_tup_ins - :before_n_tup_ins BETWEEN 4002 AND 8004 AS inserted,
	n_tup_del - :before_n_tup_del AS deleted FROM used;
SELECT scope, expires_at > now() + interval '23 hours' AS by_policy FROM idem_claims WHERE request_id = 'policy' ORDER BY 1;
ROLLBACK;
BEGIN;
SELECT n_tup_ins FROM used \gset before_
SELECT outcome FROM idem_try_claim('u', '01890000-0000-7000-8000-000000000000', 'has a row');
SELECT n_tup_ins - :before_n_tup_ins AS inserted FROM used;
ROLLBACK;
DROP VIEW used;
INSERT INTO idem_claims SELECT * FROM kept;
DROP TABLE kept;
-- The deadline passes while the first key of a batch is inserted: the rest is not inserted at once,
-- since each key could wait.  The promise of one key whose insert takes so long counts from its
-- end.
CREATE SEQUENCE inserts;
CREATE FUNCTION slow_once(request_id text) RETURNS text IMMUTABLE LANGUAGE plpgsql AS $$
BEGIN
	RAISE NOTICE 'inserting %', request_id;
	IF nextval('public.inserts') = 1 THEN
		PERFORM pg_sleep(1.2);
	END IF;
	RETURN request_id;
END $$;
CREATE INDEX slow ON idem_claims (slow_once(request_id)) WHERE user_id = 'slow';
BEGIN;
SELECT * FROM idem_claim_many('{slow,slow,slow}', '{"batch 1","batch 2","batch 3"}', wait => '1.2 s');
SELECT setval('inserts', 1, false), clock_timestamp() + interval '1 day 1.2 s' AS promised \gset
SELECT outcome, expires_at >= :'promised' AS kept FROM idem_try_claim('slow', 'alone');
ROLLBACK;
DROP INDEX slow;
DROP FUNCTION slow_once(text);
DROP SEQUENCE inserts;
-- An error in a trigger is the caller's.
CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
	RAISE EXCEPTION 'refused with %', current_setting('refuse.sqlstate') USING ERRCODE = current_setting('refuse.sqlstate');
END $$;
CREATE TRIGGER refuse BEFORE INSERT ON idem_claims FOR EACH ROW EXECUTE FUNCTION refuse();
\set VERBOSITY terse
SET refuse.sqlstate = 'P0002';
SELECT idem_claim('u', 'refused');
SET refuse.sqlstate = '23502';
SELECT idem_claim('u', 'refused');
SELECT * FROM idem_claim_many('{u,u}', '{"refused 1","refused 2"}');
\set VERBOSITY default
DROP TRIGGER refuse ON idem_claims;
DROP FUNCTION refuse();
-- Forged notes that are no keys
BEGIN;
SAVEPOINT s;
SET LOCAL idem_held.latest = E'+(0,1)\t["\\u0000","r",""]';
SELECT idem_complete('1');
ROLLBACK TO s;
SET LOCAL idem_held.latest = '+(0,1)';
SELECT idem_outcome();
ROLLBACK TO s;
SET LOCAL idem_held.latest = E'+(99999999999,999999)\t["';
SELECT idem_complete('1');
ROLLBACK TO s;
SELECT set_config('idem_held.latest', E'+\t' || repeat('[', 200000), true) IS NOT NULL AS forged;
SELECT idem_complete('1');
ROLLBACK;
DROP VIEW locks_of_scopes;
DELETE FROM idem_scopes;

-- ----- a transaction's claims -----

-- All transactions of one message begin at the same moment; a note is of its own only.
BEGIN\; SELECT idem_release('u', 'given up', t.token) FROM idem_lease('u', 'given up', lease => '1 min') AS t\;
SELECT set_config('kept.latest', current_setting('idem_held.latest'), false) <> '' AS kept\; COMMIT\;
BEGIN\; SELECT set_config('idem_held.latest', current_setting('kept.latest'), true) <> '' AS put_back\; SELECT idem_outcome();
ROLLBACK;
-- Thousands of them
BEGIN;
SELECT count(*) FROM generate_series(1, 5000) AS i WHERE idem_claim('many', i::text);
SELECT count(*) FROM generate_series(2, 5000) AS i WHERE idem_complete('many', i::text, NULL);
SAVEPOINT s;
SELECT idem_complete('"the only one left"');
ROLLBACK TO s;
SELECT idem_complete('many', '1', '"the only one left"'), idem_result('many', '1');
-- A function that calls itself by its own request, after too many to remember them
CREATE FUNCTION call_again() RETURNS int LANGUAGE plpgsql AS $$
BEGIN
	PERFORM idem_claim('call', i::text) FROM generate_series(1, 400) AS i;
	PERFORM idem_call('u', 'again', 'call_again()');
	RETURN 1;
END $$;
SELECT idem_call('u', 'again', 'call_again()');
ROLLBACK TO s;
COMMIT;
-- In functions with settings of their own, which end with them
CREATE FUNCTION claim_in_a_function() RETURNS bool LANGUAGE plpgsql SET work_mem = '1MB' SET search_path = public, pg_temp
AS $$ BEGIN RETURN idem_claim('u', 'in a function'); END $$;
BEGIN;
SELECT claim_in_a_function();
SELECT idem_outcome(), idem_complete('1'), idem_result();
COMMIT;
DROP FUNCTION claim_in_a_function;
-- Odd names
BEGIN;
SELECT idem_claim(E'a"b\\c', E'tab\tline\n', '{"x": [1]}'), idem_claim('a', '"b", "c"');
SAVEPOINT s;
SELECT idem_complete('1');
ROLLBACK TO s;
SELECT idem_complete(E'a"b\\c', E'tab\tline\n', '1', scope => '{"x": [1]}'), idem_complete('2');
SELECT idem_outcome(), idem_result();
COMMIT;
-- A caller who forges or forgets them does not get at the requests of others, nor at an
-- answer that was not given.  What is forged counts as empty.
SELECT idem_claim('u', 'theirs');
BEGIN;
SELECT idem_claim('u', 'mine'), idem_claim('u', 'mine too');
SELECT set_config(name, replace(setting, 'mine', 'theirs'), true) IS NOT NULL AS forged
FROM (SELECT name, current_setting(name, true) AS setting FROM unnest(ARRAY['idem_held.latest', 'idem_held.open']) AS name) AS held
WHERE setting <> '';
SAVEPOINT s;
SELECT idem_complete('"forged"');
\echo :SQLSTATE
ROLLBACK TO s;
RESET ALL;
SELECT idem_complete('"forgotten"');
\echo :SQLSTATE
ROLLBACK TO s;
SELECT idem_complete('u', 'mine', '"by name"');
COMMIT;
SELECT idem_result('u', 'theirs') IS NULL AS untouched, idem_result('u', 'mine');
-- A note that says where the row of another transaction is
BEGIN;
SELECT idem_claim('u', 'mine, too');
SELECT set_config('idem_held.latest', '+' || ctid || E'\t' || array_to_json(ARRAY[user_id, request_id, scope]), true) LIKE '%theirs%' AS forged
FROM idem_claims WHERE request_id = 'theirs';
SAVEPOINT s;
SELECT idem_complete('"forged"');
\echo :SQLSTATE
ROLLBACK TO s;
SELECT idem_result('u', 'theirs') IS NULL AS untouched;
ROLLBACK;
-- A note that is a number, and too large for one
BEGIN;
SELECT set_config('idem_held.open', '1e1000000', true) IS NOT NULL AS forged;
SELECT idem_claim_many('{u,u}', '{"mine 1","mine 2"}');
SAVEPOINT s;
SELECT idem_complete('"of two"');
ROLLBACK TO s;
SELECT idem_complete('u', 'mine 1', '1');
SELECT idem_complete('2');
SELECT idem_result('u', 'mine 2');
ROLLBACK;
-- A note of another transaction, and one of a claim that was undone
BEGIN;
SELECT idem_claim('u', 'noted');
SELECT current_setting('idem_held.latest') AS latest \gset
ROLLBACK;
BEGIN;
SELECT set_config('idem_held.latest', :'latest', true) IS NOT NULL AS put_back;
SELECT idem_outcome();
\echo :SQLSTATE
ROLLBACK;
BEGIN;
SAVEPOINT s;
SELECT idem_claim('u', 'noted');
SELECT current_setting('idem_held.latest') AS latest \gset
ROLLBACK TO s;
SELECT set_config('idem_held.latest', :'latest', true) IS NOT NULL AS put_back;
SELECT idem_outcome();
\echo :SQLSTATE
ROLLBACK;
-- Garbage that stays in a session is nobody's concern.
SELECT count(set_config('idem_held.' || name, garbage, false)) AS set
FROM unnest('{latest,open}'::text[]) AS name,
	unnest(ARRAY['claimed ["u","theirs",""]', E'-claimed ["u","theirs",""]\n1', E'+\t["u","theirs",""]', E'=\t["u","theirs",""]',
		'-none', E'\n["u","theirs",""] 1']) AS garbage;
SELECT idem_outcome();
\echo :SQLSTATE
SELECT idem_complete('"garbage"');
\echo :SQLSTATE
BEGIN;
SELECT idem_claim('u', 'among garbage'), idem_outcome(), idem_complete('1'), idem_result();
SELECT idem_claim('u', 'theirs'), idem_outcome(), idem_forget('u', 'among garbage');
ROLLBACK;
BEGIN;
SELECT idem_claim('u', 'garbage 1'), idem_claim('u', 'garbage 2');
\set VERBOSITY terse
SAVEPOINT s;
SELECT idem_complete('"which?"');
ROLLBACK TO s;
\set VERBOSITY default
SELECT idem_complete('u', 'garbage 1', '1'), idem_complete('"the other"');
ROLLBACK;
RESET ALL;
-- A place that is none is an error, as it was one to complete a request that was never claimed.
BEGIN;
SELECT set_config('idem_held.latest', E'+(none)\t["u","r",""]', true) IS NOT NULL AS forged;
SELECT idem_complete('"garbage"');
\echo :SQLSTATE
ROLLBACK;
-- A row is ours in whatever subtransaction we wrote it.
BEGIN;
SELECT idem_claim('u', 'ours 1');
SAVEPOINT a;
SELECT idem_claim('u', 'ours 2');
SAVEPOINT b;
SELECT idem_claim('u', 'ours 3');
RELEASE b;
SELECT request_id, idem__is_ours(xmin) FROM idem_claims WHERE request_id ~ 'ours|theirs' ORDER BY 1;
SELECT idem__is_ours('0'), idem__is_ours('2'), idem__is_ours('4294967295');
-- Where a snapshot sees two rows of a key, ours comes first: before one of another transaction, and
-- before one that is frozen, whose xmin can be any number.
SELECT v.of, idem__order_of(v.id) IS NOT NULL AS may_be_ours FROM (VALUES
	('a million ids later', (((SELECT max(xmin::text::int8) FROM idem_claims WHERE request_id = 'ours 3') + 1000000) & 4294967295)::text::xid),
	('three billion ids later', ((pg_current_xact_id()::text::int8 + 3000000000) & 4294967295)::text::xid),
	('another', (SELECT xmin FROM pg_class WHERE oid = 'idem_claims'::regclass)),
	('us', (SELECT xmin FROM idem_claims WHERE request_id = 'ours 3'))) AS v (of, id)
ORDER BY idem__order_of(v.id), v.of COLLATE "C";
SELECT idem__order_of('0') IS NULL, idem__order_of('2') IS NULL, idem__order_of('4294967295') IS NULL;
RELEASE a;
SELECT idem_complete('u', 'ours ' || i, to_jsonb(i)) FROM generate_series(1, 3) AS i;
COMMIT;
SELECT request_id, result, idem__is_ours(xmin) FROM idem_claims WHERE request_id LIKE 'ours %' ORDER BY 1;
-- A lease is on disk when its transaction is committed; whoever waits for standbys
-- goes on doing so.
SET synchronous_commit = off;
BEGIN;
SELECT idem_claim('u', 'not a lease');
SHOW synchronous_commit;
SELECT token AS lease FROM idem_lease('u', 'lease', lease => '1 min') \gset
SHOW synchronous_commit;
COMMIT;
SHOW synchronous_commit;
BEGIN;
SELECT idem_extend('u', 'lease', :lease) > now() AS extended;
SHOW synchronous_commit;
SELECT idem_extend('u', 'lease', :lease, progress => '1') > now() AS extended;
SHOW synchronous_commit;
COMMIT;
-- So is the end of a lease, whatever ends it.
CREATE TEMP TABLE leases AS
	SELECT way, (SELECT token FROM idem_lease('u', way, lease => '1 min'))
	FROM unnest(ARRAY['idem_complete', 'idem_fail', 'idem_heal', 'idem_release', 'idem_forget']) AS way;
SELECT format('SELECT %1$s(''u'', %1$L%2$s) AS %1$s, current_setting(''synchronous_commit'') FROM leases WHERE way = %1$L', way,
	CASE way WHEN 'idem_release' THEN ', token' WHEN 'idem_heal' THEN ', ''1''' WHEN 'idem_forget' THEN '' ELSE ', ''1'', token' END)
FROM leases \gexec
DROP TABLE leases;
SET synchronous_commit = remote_apply;
BEGIN;
SELECT outcome FROM idem_lease('u', 'lease 2', lease => '1 min');
SHOW synchronous_commit;
ROLLBACK;
RESET synchronous_commit;

-- ----- a lease that ends in the last second there is -----

INSERT INTO idem_claims (expires_at, lease_until, token, state, request_id, user_id, scope)
VALUES ('294276-12-31 23:59:59+00', '294276-12-31 23:59:59.9+00', 1, 'in_progress', 'last second', 'u', '');
\set VERBOSITY sqlstate
SELECT idem_claim('u', 'last second', wait => '0');
\set VERBOSITY default
TRUNCATE idem_claims;

-- ----- calls that SQL cannot resolve -----

CREATE FUNCTION resolved(a int) RETURNS int LANGUAGE sql AS 'SELECT 1';
CREATE FUNCTION resolved(a int, b text DEFAULT 'x') RETURNS int LANGUAGE sql AS 'SELECT 2';
SELECT idem_call('u', 'resolved', 'resolved(int, text)', '{"a": 1, "b": "y"}');
\set VERBOSITY sqlstate
SELECT idem_call('u', 'not unique', 'resolved(int)', '{"a": 1}');
SELECT idem_call('u', 'not unique', 'resolved(int, text)', '{"a": 1}');
DROP FUNCTION resolved(int), resolved(int, text);
CREATE FUNCTION resolved(a int DEFAULT 1, b int DEFAULT 2, VARIADIC c int[] DEFAULT '{}') RETURNS int LANGUAGE sql AS 'SELECT a';
\set VERBOSITY default
SELECT idem_call('u', 'no call', 'resolved(int, int, int[])', '{"b": 5}');
\echo :SQLSTATE
SELECT idem_call('u', 'no call', 'resolved(int, int, int[])', '{"a": 5, "c": [1]}');
SELECT idem_status('u', 'not unique') IS NULL AND idem_status('u', 'no call') IS NULL AS not_claimed;
DROP FUNCTION resolved(int, int, int[]);
TRUNCATE idem_claims;

-- ----- rights -----

CREATE ROLE regress_idem_app;
CREATE ROLE regress_idem_operator;
SELECT idem_grant('regress_idem_app', 'app');
SELECT idem_grant('regress_idem_operator', 'operator');
-- No internal function can be called by anybody, but for parts of what an application or an operator calls.
SELECT count(*) > 20 AS has_functions,
	array_agg(p.proname ORDER BY p.proname) FILTER (WHERE has_function_privilege('regress_idem_app', p.oid, 'EXECUTE')) AS app,
	array_agg(p.proname ORDER BY p.proname) FILTER (WHERE has_function_privilege('regress_idem_operator', p.oid, 'EXECUTE')) AS operator
FROM pg_proc p WHERE proname LIKE 'idem\_\_%';
-- Functions that can be called, that run as their owner, or that are triggers find nothing in
-- their caller's search_path, nor in our schema; but for those that commit.
SELECT p.oid::regprocedure FROM pg_proc AS p
WHERE p.proname LIKE 'idem\_%' AND (p.proname NOT LIKE 'idem\_\_%' OR p.prosecdef OR p.prorettype = 'trigger'::regtype)
	AND (p.prosqlbody IS NULL OR p.prosecdef)		-- names that are bound at creation, called with the caller's rights
	AND NOT coalesce(p.proconfig @> ARRAY['search_path=pg_catalog, pg_temp'], false)
ORDER BY p.proname COLLATE "C";
-- In no body is there a name of ours that is not qualified, but for texts, comments, and
-- parameters that are named by their function.
SELECT p.oid::regprocedure AS in_function, name
FROM pg_proc AS p, regexp_replace(regexp_replace(p.prosrc, '--[^\n]*', '', 'g'), '''([^'']|'''')*''', '', 'g') AS body,
	(SELECT relname FROM pg_class WHERE relname LIKE 'idem\_%' AND relkind IN ('r', 'v', 'S')
		UNION SELECT typname FROM pg_type WHERE typname LIKE 'idem\_%' UNION SELECT proname FROM pg_proc WHERE proname LIKE 'idem\_%') AS names (name)
WHERE p.proname LIKE 'idem\_%' AND body ~ ('(^|[^.\w])' || name || '\M(?!\.)') AND body !~ ('TRIGGER ' || name || '\M')
ORDER BY 1, 2;
SELECT count(*) > 60 AS looked_at FROM pg_proc WHERE proname LIKE 'idem\_%' AND prosrc ~ 'public\.idem_';
SET ROLE regress_idem_app;
UPDATE idem_settings SET ttl = '1 s';
TABLE idem_settings;
TABLE idem__cleanup_batches;
SELECT nextval('idem_token_seq');
SET ROLE regress_idem_operator;
UPDATE idem_settings SET ttl = '2 hours';
SELECT ttl FROM idem_settings;
UPDATE idem_settings SET ttl = '1 day';
RESET ROLE;
DROP OWNED BY regress_idem_app, regress_idem_operator;

-- ----- installation by psql -----

\setenv PGDATABASE :DBNAME
-- Twice
\! psql -X -q -f sql/idem-portable.sql 2>&1 | sed -e '/^CONTEXT/d' -e 's/^psql:[^ ]* //'
CREATE SCHEMA regress_idem_other;
\! psql -X -q -v schema=regress_idem_other -f sql/idem-portable.sql 2>&1 | sed -e '/^CONTEXT/d' -e 's/^psql:[^ ]* //'
DROP SCHEMA regress_idem_other;
-- What an extension owns cannot be distributed.
\! psql -X -q -f sql/idem-citus.sql 2>&1 | sed -e '/^CONTEXT/d' -e 's/^psql:[^ ]* //'
SET client_min_messages = warning;
DROP EXTENSION idem_portable;
RESET client_min_messages;
\! psql -X -q -f sql/idem-citus.sql 2>&1 | sed -e '/^CONTEXT/d' -e 's/^psql:[^ ]* //'
-- Where there is no schema, and where everybody could put objects in the way
\! psql -X -q -v schema=regress_idem_missing -f sql/idem-portable.sql 2>&1 | sed -e '/^CONTEXT/d' -e 's/^psql:[^ ]* //'
\! psql -X -q -v schema= -f sql/idem-portable.sql 2>&1 | sed -e '/^CONTEXT/d' -e 's/^psql:[^ ]* //'
CREATE SCHEMA "regress idem; odd" AUTHORIZATION regress_idem_operator;
GRANT CREATE ON SCHEMA "regress idem; odd" TO PUBLIC;
\! psql -X -q -v schema='regress idem; odd' -f sql/idem-portable.sql 2>&1 | sed -e '/^CONTEXT/d' -e 's/^psql:[^ ]* //'
REVOKE CREATE ON SCHEMA "regress idem; odd" FROM PUBLIC;
-- By somebody who is no superuser
\! PGOPTIONS='-c role=regress_idem_operator' psql -X -q -v schema='regress idem; odd' -f sql/idem-portable.sql 2>&1 | sed -e '/^CONTEXT/d' -e 's/^psql:[^ ]* //'
\! PGOPTIONS='-c role=regress_idem_operator' psql -X -q -v schema='regress idem; odd' -f sql/idem-portable.sql 2>&1 | sed -e '/^CONTEXT/d' -e 's/^psql:[^ ]* //' -e 's/ [0-9.+]* is/ VERSION is/'
CREATE EXTENSION idem_portable;
SELECT rolname, count(*) > 50 AS functions FROM pg_proc p JOIN pg_roles r ON r.oid = proowner WHERE proname LIKE 'idem\_%' GROUP BY rolname;
\set VERBOSITY sqlstate
SELECT idem_claim('u', 'not in the search_path');
\set VERBOSITY default
SET ROLE regress_idem_operator;
SELECT "regress idem; odd".idem_grant('regress_idem_app', 'app');
SET ROLE regress_idem_app;
SELECT "regress idem; odd".idem_claim('u', 'elsewhere'), "regress idem; odd".idem_claim('u', 'elsewhere');
SELECT "regress idem; odd".idem_cleanup();
RESET ROLE;
UPDATE "regress idem; odd".idem_claims SET expires_at = '2020-01-01';
CALL "regress idem; odd".idem_cleanup_all();
SELECT rows_deleted FROM "regress idem; odd".idem_stat_cleanup;
INSERT INTO "regress idem; odd".idem_scopes (scope, ttl) VALUES ('s', '1 day');
DELETE FROM "regress idem; odd".idem_scopes;

-- ----- distribution, without Citus -----

-- By its owner, or for its owner by a superuser
\! PGOPTIONS='-c role=regress_idem_app' psql -X -q -v schema='regress idem; odd' -f sql/idem-citus.sql 2>&1 | sed -e '/^CONTEXT/d' -e 's/^psql:[^ ]* //'
ALTER DEFAULT PRIVILEGES FOR ROLE regress_idem_operator GRANT ALL ON ROUTINES TO regress_idem_app;
\! psql -X -q -v schema='regress idem; odd' -f sql/idem-citus.sql 2>&1 | sed -e '/^CONTEXT/d' -e 's/^psql:[^ ]* //'
\! psql -X -q -v schema='regress idem; odd' -f sql/idem-citus.sql 2>&1 | sed -e '/^CONTEXT/d' -e 's/^psql:[^ ]* //'
SELECT bool_and(proowner = 'regress_idem_operator'::regrole) AS of_the_owner, bool_or(prosecdef) AS definers,
	bool_or(has_function_privilege('regress_idem_app', p.oid, 'EXECUTE')) AS app,
	bool_or(has_function_privilege('public', p.oid, 'EXECUTE')) AS everybody
FROM pg_proc AS p WHERE proname LIKE 'idem\_\_citus%' OR proname = 'idem_distribute';
SET ROLE regress_idem_operator;
SELECT "regress idem; odd".idem_distribute();
\echo :SQLSTATE
SELECT "regress idem; odd".idem_distribute('"regress idem; odd".idem_scopes');
\echo :SQLSTATE
RESET ROLE;
SELECT "regress idem; odd".idem_claim('u', 'not distributed');
-- Its bodies qualify every name, too.
SELECT p.oid::regprocedure AS in_function, name
FROM pg_proc AS p, regexp_replace(regexp_replace(p.prosrc, '--[^\n]*', '', 'g'), '''([^'']|'''')*''', '', 'g') AS body,
	(SELECT relname FROM pg_class WHERE relname LIKE 'idem\_%' AND relkind IN ('r', 'v', 'S')
		UNION SELECT typname FROM pg_type WHERE typname LIKE 'idem\_%' UNION SELECT proname FROM pg_proc WHERE proname LIKE 'idem\_%') AS names (name)
WHERE (p.proname LIKE 'idem\_\_citus%' OR p.proname = 'idem_distribute') AND body ~ ('(^|[^.\w])' || name || '\M(?!\.)')
	AND body !~ ('(TRIGGER( IF EXISTS)?|RENAME TO) ' || name || '\M')
ORDER BY 1, 2;
-- No function depends on the row type of a table: Citus drops and makes a table again to change
-- its shards, and the function would go with it.
SELECT p.oid::regprocedure AS in_function, t.oid::regtype AS type
FROM pg_depend AS d JOIN pg_proc AS p ON d.classid = 'pg_proc'::regclass AND p.oid = d.objid
	JOIN pg_type AS t ON d.refclassid = 'pg_type'::regclass AND t.oid = d.refobjid
	LEFT JOIN pg_type AS e ON e.oid = t.typelem
	JOIN pg_class AS c ON c.oid = CASE t.typrelid WHEN 0 THEN e.typrelid ELSE t.typrelid END AND c.relkind <> 'c'
WHERE p.proname LIKE 'idem\_%'
UNION ALL SELECT p.oid::regprocedure, c.oid::regclass::text::regtype
FROM pg_depend AS d JOIN pg_proc AS p ON d.classid = 'pg_proc'::regclass AND p.oid = d.objid
	JOIN pg_class AS c ON d.refclassid = 'pg_class'::regclass AND c.oid = d.refobjid AND c.relkind <> 'c'
WHERE p.proname LIKE 'idem\_%';
SET client_min_messages = warning;
DROP SCHEMA "regress idem; odd" CASCADE;
RESET client_min_messages;
-- The functions that it puts in the place of others give the same answers on one server.
CREATE SCHEMA regress_idem_citus;
-- It warns, since a superuser will own it; an ordinary role was told nothing above.
\! psql -X -q -v schema=regress_idem_citus -f sql/idem-portable.sql 2>&1 | sed -e 's/^psql:[^ ]* //' -e 's/superuser: .*/superuser/'
\! psql -X -q -v schema=regress_idem_citus -f sql/idem-citus.sql
SET search_path = regress_idem_citus;
-- In one session, which has plans that call the functions that go away
SELECT idem_claim('u', 'before'), idem_status('u', 'before');
SELECT token AS t FROM idem_lease('u', 'before', scope => 'l', lease => '1 hour') \gset
SELECT idem_fence('u', 'before', :t, 'l');
CREATE TABLE idem__token_source (token bigint DEFAULT nextval('idem_token_seq'));
INSERT INTO idem__token_source DEFAULT VALUES;
CREATE TABLE idem_token_blocks (user_id text, shard_id bigint, block bigint, group_id int, begun_at bigint, PRIMARY KEY (user_id, shard_id));
CREATE TABLE idem_token_blocks_102001 (LIKE idem_token_blocks INCLUDING ALL);
CREATE TABLE idem_token_blocks_102002 (LIKE idem_token_blocks INCLUDING ALL);
SET allow_system_table_mods = on;
CREATE FUNCTION pg_catalog.get_shard_id_for_distribution_column(table_name regclass, distribution_value text) RETURNS bigint
LANGUAGE sql STABLE AS 'SELECT CASE distribution_value WHEN ''17'' THEN 102002 ELSE coalesce(nullif(current_setting(''test.shard'', true), ''''), ''102001'')::bigint END';
CREATE FUNCTION pg_catalog.lock_shard_metadata(lock_mode int, shard_id bigint[]) RETURNS void
LANGUAGE sql AS 'SELECT pg_advisory_xact_lock_shared(shard_id[1]); SELECT set_config(''test.shard'', current_setting(''test.split'', true), true)';
RESET allow_system_table_mods;
CREATE TEMPORARY TABLE pg_dist_local_group AS SELECT 1 AS groupid;
SELECT idem__citus_replace_functions(), idem__citus_admit('{0,1,3}');
SELECT idem__citus_replace_functions();
SELECT proname FROM pg_proc WHERE pronamespace = 'regress_idem_citus'::regnamespace AND proname LIKE 'idem\_\_citus%' ORDER BY 1;
INSERT INTO idem_scopes (scope, ttl, lease, failed) VALUES ('s', '2 days', '3 min', 'retryable');
SELECT idem_claim('u', 'before'), idem_claim('u', 'after', 's');
SELECT idem_status('u', 'after', 's'), expires_at > now() + interval '1 day' AS by_the_scope FROM idem_claims WHERE scope = 's';
SELECT ctid AS version FROM idem_claims WHERE scope = 'l' \gset
SELECT idem_fence('u', 'before', :t, 'l');
SELECT ctid <> :'version' AS written, token = :t AS same_token FROM idem_claims WHERE scope = 'l';
SELECT idem_fence('u', 'before', :t + 1, 'l');
\echo :SQLSTATE
-- It keeps the shard where it is, also if the shard was split when the lock was given.
BEGIN;
SELECT idem_fence('u', 'before', :t, 'l');
SELECT objid, mode FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid() ORDER BY 1;
COMMIT;
BEGIN;
SET LOCAL test.split = 102002;
SELECT idem_fence('u', 'before', :t, 'l');
SELECT objid, mode FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid() ORDER BY 1;
COMMIT;
SELECT outcome, token, lease_until IS NOT NULL AS has_lease FROM idem_lease('u', 'before', scope => 'l', lease => '1 hour', wait => '0');
SELECT outcome, token FROM idem_lease('u', 'after', scope => 's', lease => '1 hour');
SELECT token AS t2 FROM idem_lease('u', 'leased', scope => 's', lease => '1 min') \gset
SELECT :t2 > :t AS grown, token = :t2 AS stored, idem_extend('u', 'leased', :t2, scope => 's') BETWEEN now() + interval '2 min' AND now() + interval '4 min' AS by_the_scope
FROM idem_claims WHERE request_id = 'leased';
SELECT idem_complete('u', 'leased', '1', :t2, 's');
SELECT idem_result('u', 'leased', 's'), state FROM idem_lookup('u', 'leased', 's');
-- Tokens grow, also if the shard moves to a node and back, is split, or has used up its block.
CREATE TEMPORARY TABLE drawn (n serial, after text, token bigint);
CREATE FUNCTION pg_temp.draw(after text) RETURNS text LANGUAGE sql AS $$
	INSERT INTO drawn (after, token) VALUES (after, idem__citus_next_token('u'));
	SELECT string_agg(format('%s %s', group_id, user_id), ', ') FROM idem_token_blocks_102001 $$;
SELECT pg_temp.draw('none');
SELECT pg_temp.draw('none');
UPDATE pg_dist_local_group SET groupid = 3;
SELECT pg_temp.draw('a move'), pg_temp.draw('none');
UPDATE pg_dist_local_group SET groupid = 1;
SELECT pg_temp.draw('a move back'), pg_temp.draw('none');
SELECT setval('idem_token_seq', begun_at + 999998) - begun_at AS number FROM idem_token_blocks_102001;
SELECT pg_temp.draw('none'), pg_temp.draw('a used block'), pg_temp.draw('none');
SET test.shard = 102002;
INSERT INTO idem_token_blocks_102002 SELECT * FROM idem_token_blocks_102001;
SELECT pg_temp.draw('a split'), pg_temp.draw('none');
SELECT user_id, shard_id FROM idem_token_blocks_102002 ORDER BY 2;
RESET test.shard;
SELECT after, token > lag(token) OVER (ORDER BY n) AS grown, token / 1000000 > lag(token / 1000000) OVER (ORDER BY n) AS new_block FROM drawn ORDER BY n;
-- Nothing is done on a node that is not admitted.
UPDATE pg_dist_local_group SET groupid = 2;
SELECT idem_forget('u', 'leased', 's');
SELECT idem_claim_many('{u}', '{leased}');
-- Sessions learn at once that it was admitted.
SELECT idem__citus_admit('{0,1,2,3}');
SELECT idem_status('u', 'leased', 's');
UPDATE pg_dist_local_group SET groupid = 1;
-- A node cleans its own shards.  For want of Citus, temporary tables are its catalogs.
CREATE TEMPORARY TABLE pg_dist_shard AS SELECT 'idem_claims'::regclass AS logicalrelid, s::bigint AS shardid FROM generate_series(102008, 102010) AS s;
CREATE TEMPORARY TABLE pg_dist_placement AS SELECT shardid, CASE shardid WHEN 102009 THEN 2 ELSE 1 END AS groupid FROM pg_dist_shard;
CREATE TABLE idem_claims_102008 (LIKE idem_claims);
CREATE TABLE idem_claims_102009 (LIKE idem_claims);
CREATE TABLE idem_claims_102010 (LIKE idem_claims);
INSERT INTO idem_scopes (scope, lapsed) VALUES ('kept', 'unknown');
INSERT INTO idem_claims_102008 (expires_at, lease_until, state, request_id, user_id, scope) VALUES
	('2020-01-01', NULL, 'completed', 'gone', 'u', ''), ('2020-01-01', '2020-01-01', 'in_progress', 'gone too', 'u', ''),
	('2020-01-01', 'infinity', 'in_progress', 'live', 'u', ''), ('2020-01-01', '2020-01-01', 'in_progress', 'unknown', 'u', 'kept'),
	('infinity', NULL, 'completed', 'not expired', 'u', '');
INSERT INTO idem_claims_102009 SELECT * FROM idem_claims_102008;
INSERT INTO idem_claims_102010 (expires_at, state, request_id, user_id, scope) SELECT '2020-01-01', 'completed', i, 'u', '' FROM generate_series(1, 9) AS i;
SELECT idem__citus_clean_node(1, clock_timestamp()) AS of_one;
SELECT idem__citus_clean_node(100, clock_timestamp()) AS of_all;
SELECT (SELECT string_agg(request_id, ', ' ORDER BY request_id) FROM idem_claims_102008) AS kept,
	(SELECT count(*) FROM idem_claims_102009) AS elsewhere, (SELECT count(*) FROM idem_claims_102010) AS last;
DROP TABLE pg_dist_shard, pg_dist_placement, pg_dist_local_group, drawn;
SET allow_system_table_mods = on;
DROP FUNCTION pg_catalog.get_shard_id_for_distribution_column(regclass, text), pg_catalog.lock_shard_metadata(int, bigint[]);
RESET allow_system_table_mods;
RESET search_path;
SET client_min_messages = warning;
DROP SCHEMA regress_idem_citus CASCADE;
RESET client_min_messages;
DROP OWNED BY regress_idem_app, regress_idem_operator;
DROP ROLE regress_idem_app, regress_idem_operator;
\! psql -X -q -c 'CREATE EXTENSION idem_portable' 2>&1 | sed 's/superuser: .*/superuser/'
-- A rewrite of the table in the claim's transaction puts another row, which then looks like one of
-- ours, in the place that was noted: the key decides.
-- Rows that claims write can be elsewhere: an insert that took long is undone, and made again.
TRUNCATE idem_claims;
INSERT INTO idem_claims (expires_at, state, request_id, user_id, scope)
SELECT now() + interval '1 hour', 'completed', r, 'u', '' FROM unnest(ARRAY['removed', 'leaves a place', 'of another transaction']) AS r;
DELETE FROM idem_claims WHERE request_id = 'leaves a place';
-- An older snapshot, such as that of autovacuum, would keep the row.
DO $$
BEGIN
	WHILE EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_xmin IS NOT NULL) LOOP
		PERFORM pg_sleep(0.01), pg_stat_clear_snapshot();
	END LOOP;
END $$;
VACUUM idem_claims;
DELETE FROM idem_claims WHERE request_id = 'removed';
BEGIN;
SELECT idem_claim('u', 'rewritten');
SELECT ctid AS place FROM idem_claims WHERE request_id = 'rewritten' \gset
ALTER TABLE idem_claims ALTER COLUMN fingerprint TYPE bytea USING substr(fingerprint, 1);
-- (Nothing is there if the insert took long.)
SELECT coalesce((SELECT request_id FROM idem_claims WHERE ctid = :'place'), 'of another transaction') AS at_that_place;
SELECT idem_complete('"rewritten"');
COMMIT;
SELECT request_id, result FROM idem_claims ORDER BY request_id;
TRUNCATE idem_claims;
