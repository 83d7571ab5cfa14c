-- Changes of the table idem_claims: claims write directly into the table, so they raise an error
-- if it has triggers, rules or constraints that a direct write would bypass; they maintain its
-- indexes. For the C edition. :SQLSTATE is that of the statement before.

\set SHOW_CONTEXT never

SELECT idem_claim('u', 'before');

-- What a claim answers after one change, with another claim before it in the same transaction
CREATE FUNCTION pg_temp.after(change text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
	answer text;
	detail text;
	hint text;
BEGIN
	BEGIN
		PERFORM idem_claim('u', 'first');
		EXECUTE change;
		BEGIN
			answer := format('%s %s', idem_claim('u', 'second'), idem_claim('u', 'first'));
		EXCEPTION WHEN OTHERS THEN
			GET STACKED DIAGNOSTICS detail = PG_EXCEPTION_DETAIL, hint = PG_EXCEPTION_HINT;
			answer := SQLSTATE || ' ' || SQLERRM || '. ' || hint;
		END;
		RAISE SQLSTATE 'X0001';
	EXCEPTION WHEN SQLSTATE 'X0001' THEN
		RETURN answer;
	END;
END $$;
-- Follows a HINT: runs the commands that it contains, or drops what it says without a command.
CREATE FUNCTION pg_temp.follow(change text, what_to_drop text DEFAULT NULL) RETURNS SETOF text LANGUAGE plpgsql AS $$
DECLARE
	hint text;
	command text;
	reader boolean;
BEGIN
	EXECUTE change;
	FOR i IN 1 .. 5 LOOP
		BEGIN
			RETURN NEXT format('claimed %s, replay %s', idem_claim('u', change), NOT idem_claim('u', 'before'));
			RETURN NEXT format('reads %s', idem_status('u', change));
			RETURN;
		EXCEPTION WHEN feature_not_supported THEN
			GET STACKED DIAGNOSTICS hint = PG_EXCEPTION_HINT;
		END;
		command := COALESCE(substring(hint FROM 'Run (.+?)\.(?= |$)'), what_to_drop);
		RETURN NEXT command;
		EXECUTE command;
	END LOOP;
END $$;
CREATE FUNCTION do_nothing() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NEW; END $$;
CREATE TABLE referenced (id text PRIMARY KEY);

\x
\t
SELECT pg_temp.after('CREATE TRIGGER t BEFORE INSERT ON idem_claims FOR EACH ROW EXECUTE FUNCTION do_nothing()');
SELECT pg_temp.after('CREATE TRIGGER t AFTER DELETE ON idem_claims FOR EACH STATEMENT EXECUTE FUNCTION do_nothing()');
SELECT pg_temp.after('CREATE CONSTRAINT TRIGGER t AFTER INSERT ON idem_claims DEFERRABLE FOR EACH ROW EXECUTE FUNCTION do_nothing()');
SELECT pg_temp.after('CREATE RULE r AS ON INSERT TO idem_claims DO ALSO NOTHING');
SELECT pg_temp.after('ALTER TABLE idem_claims ENABLE ROW LEVEL SECURITY');
SELECT pg_temp.after('ALTER TABLE idem_claims ADD FOREIGN KEY (user_id) REFERENCES referenced NOT VALID');
SELECT pg_temp.after('CREATE TABLE referring (r text, u text, s text, FOREIGN KEY (r, u, s) REFERENCES idem_claims)');
SELECT pg_temp.after('ALTER TABLE idem_claims ADD CHECK (user_id <> ''x'')');
SELECT pg_temp.after('ALTER TABLE idem_claims ADD tenant int');
SELECT pg_temp.after('ALTER TABLE idem_claims ADD tenant int DEFAULT 7 NOT NULL');
SELECT pg_temp.after('ALTER TABLE idem_claims ADD g text GENERATED ALWAYS AS (user_id) STORED');
SELECT pg_temp.after('ALTER TABLE idem_claims DROP progress');
SELECT pg_temp.after('ALTER TABLE idem_claims ALTER token TYPE int');
SELECT pg_temp.after('ALTER TABLE idem_claims DROP CONSTRAINT idem_claims_pkey');
SELECT pg_temp.after('ALTER TABLE idem_claims DROP CONSTRAINT idem_claims_pkey, ADD PRIMARY KEY (user_id, request_id, scope)');
SELECT pg_temp.after('ALTER TABLE idem_claims DROP CONSTRAINT idem_claims_pkey, ADD PRIMARY KEY (request_id, user_id)');
SELECT pg_temp.after('ALTER TABLE idem_claims DROP CONSTRAINT idem_claims_pkey, ADD UNIQUE (request_id, user_id, scope)');
SELECT pg_temp.after('ALTER TABLE idem_claims DROP CONSTRAINT idem_claims_pkey, ADD PRIMARY KEY (request_id, user_id, scope) DEFERRABLE');
-- These changes are allowed.
SELECT pg_temp.after('ALTER TABLE idem_claims DROP CONSTRAINT idem_claims_pkey, ADD CONSTRAINT k PRIMARY KEY (request_id, user_id, scope)');
SELECT pg_temp.after('ALTER TABLE idem_claims RENAME progress TO progress_so_far');
SELECT pg_temp.after('ALTER TABLE idem_claims SET (fillfactor = 90, autovacuum_enabled = off)');
SELECT pg_temp.after('ALTER TABLE idem_claims ALTER result SET STORAGE EXTERNAL, ALTER user_id SET STATISTICS 1000');
SELECT pg_temp.after('CREATE INDEX ON idem_claims (user_id)');
SELECT pg_temp.after('DROP INDEX idem_claims_expires_at_idx');
SELECT pg_temp.after('REINDEX TABLE idem_claims');
SELECT pg_temp.after('CLUSTER idem_claims USING idem_claims_pkey');
SELECT pg_temp.after('TRUNCATE idem_claims');
SELECT pg_temp.after('DELETE FROM idem_claims WHERE request_id = ''before''');
SELECT pg_temp.after('ALTER TABLE idem_claims RENAME TO claims');
-- A claim without a change
SELECT pg_temp.after('SELECT 1');
\t
\x
SELECT count(*) FROM idem_claims;

-- ----- every hint works -----

CREATE ACCESS METHOD regress_idem_heap TYPE TABLE HANDLER heap_tableam_handler;
CREATE TABLE regress_idem_parent (LIKE idem_claims) PARTITION BY LIST (user_id);
\t
SELECT pg_temp.follow('CREATE TRIGGER t BEFORE INSERT ON idem_claims FOR EACH ROW EXECUTE FUNCTION do_nothing()', 'DROP TRIGGER t ON idem_claims');
SELECT pg_temp.follow('CREATE RULE r AS ON INSERT TO idem_claims DO ALSO NOTHING', 'DROP RULE r ON idem_claims');
SELECT pg_temp.follow('ALTER TABLE idem_claims ENABLE ROW LEVEL SECURITY');
SELECT pg_temp.follow('ALTER TABLE idem_claims ADD CONSTRAINT f FOREIGN KEY (user_id) REFERENCES referenced NOT VALID',
	'ALTER TABLE idem_claims DROP CONSTRAINT f');
SELECT pg_temp.follow('CREATE TABLE referring (r text, u text, s text, CONSTRAINT f FOREIGN KEY (r, u, s) REFERENCES idem_claims)',
	'ALTER TABLE referring DROP CONSTRAINT f');
SELECT pg_temp.follow('ALTER TABLE idem_claims ADD CONSTRAINT c CHECK (user_id <> ''x'')', 'ALTER TABLE idem_claims DROP CONSTRAINT c');
SELECT pg_temp.follow('ALTER TABLE idem_claims ADD tenant int');
SELECT pg_temp.follow('ALTER TABLE idem_claims ADD tenant int DEFAULT 7 NOT NULL, ADD "Also this" text DEFAULT now()');
SELECT pg_temp.follow('ALTER TABLE idem_claims ADD g text GENERATED ALWAYS AS (user_id) STORED');
SELECT pg_temp.follow('ALTER TABLE idem_claims ALTER token TYPE int');
-- The index of unsettled claims rests on the type of state.
SELECT pg_temp.follow('DROP INDEX idem_claims_unsettled_idx; ALTER TABLE idem_claims ALTER state TYPE text, ALTER result TYPE json, ALTER expires_at TYPE text');
SELECT pg_temp.follow('ALTER TABLE idem_claims ALTER user_id TYPE text COLLATE "POSIX", ALTER scope TYPE varchar COLLATE "C"');
SELECT pg_temp.follow('ALTER TABLE idem_claims ALTER expires_at DROP NOT NULL');
SELECT pg_temp.follow('UPDATE idem_claims SET token = 1; ALTER TABLE idem_claims ALTER token SET NOT NULL');
UPDATE idem_claims SET token = NULL;
SELECT pg_temp.follow('ALTER TABLE idem_claims SET UNLOGGED');
SELECT pg_temp.follow('ALTER TABLE idem_claims SET ACCESS METHOD regress_idem_heap');
SELECT pg_temp.follow('ALTER TABLE regress_idem_parent ATTACH PARTITION idem_claims DEFAULT');
SELECT pg_temp.follow('ALTER TABLE idem_claims DROP CONSTRAINT idem_claims_pkey');
SELECT pg_temp.follow('ALTER TABLE idem_claims DROP CONSTRAINT idem_claims_pkey, ADD CONSTRAINT "The Key" PRIMARY KEY (user_id, request_id, scope)');
SELECT pg_temp.follow('ALTER TABLE idem_claims DROP CONSTRAINT idem_claims_pkey, ADD UNIQUE (request_id, user_id, scope)');
SELECT pg_temp.follow('ALTER TABLE idem_claims DROP CONSTRAINT idem_claims_pkey, ADD CONSTRAINT k PRIMARY KEY (request_id, user_id, scope) DEFERRABLE',
	'ALTER TABLE idem_claims DROP CONSTRAINT k');
SELECT pg_temp.follow('ALTER TABLE idem_claims ADD CONSTRAINT k UNIQUE (fingerprint) DEFERRABLE', 'ALTER TABLE idem_claims DROP CONSTRAINT k');
SELECT pg_temp.follow('ALTER TABLE idem_claims RENAME request_id TO "Request"; ALTER TABLE idem_claims DROP CONSTRAINT idem_claims_pkey');
\t
ALTER TABLE idem_claims RENAME "Request" TO request_id;
ALTER TABLE idem_claims DROP CONSTRAINT idem_claims_request_id_user_id_scope_key;
CREATE INDEX idem_claims_unsettled_idx ON idem_claims (scope) WHERE state = 'in_progress';
DROP TABLE regress_idem_parent, referring;
DROP ACCESS METHOD regress_idem_heap;

-- Columns that were added and dropped leave traces in the table: rows of every kind are written
-- and read, also rows that were written while these columns existed.
SELECT count(*) FROM pg_attribute WHERE attrelid = 'idem_claims'::regclass AND attnum > 10 AND attisdropped;
ALTER TABLE idem_claims ADD x text DEFAULT 'x', ADD y int;
INSERT INTO idem_claims (expires_at, lease_until, token, state, request_id, user_id, scope, x, y) VALUES
	('2999-01-01', NULL, NULL, 'completed', 'with x', 'u', '', 'x', 7),
	('2999-01-01', '2020-01-01', 5, 'in_progress', 'lease with x', 'u', '', 'x', 7),
	('2020-01-01', NULL, NULL, 'completed', 'expired with x', 'u', '', 'x', 7);
ALTER TABLE idem_claims DROP x, DROP y;
SELECT idem_claim('u', 'with x');
SELECT idem_complete('u', 'lease with x', '"done"', 5);
SELECT state, expires_at, lease_until, fingerprint, result, progress FROM idem_lookup('u', 'lease with x');
SELECT idem_forget('u', 'with x');
BEGIN;
SELECT idem_claim('u', 'marker'), idem_claim('u', 'printed', fingerprint => '\x01');
SELECT idem_complete('u', 'printed', '{"a": 1}');
SELECT token FROM idem_lease('u', 'lease', lease => '1 min', progress => '1') \gset
SELECT idem_extend('u', 'lease', :token, progress => '2') > now() AS extended;
SELECT idem_complete('u', 'lease', '3', :token);
COMMIT;
SELECT outcome, result, progress FROM idem_try_claim('u', 'printed', fingerprint => '\x01')
UNION ALL SELECT outcome, result, progress FROM idem_try_claim('u', 'lease');
SELECT count(*) FROM idem_claim_many(array_fill('u'::text, ARRAY[200]), (SELECT array_agg('many ' || i) FROM generate_series(1, 200) AS i))
WHERE outcome = 'claimed';
SELECT count(*) FROM idem_claim_many(array_fill('u'::text, ARRAY[200]), (SELECT array_agg('many ' || i) FROM generate_series(1, 200) AS i))
WHERE outcome = 'completed';
SELECT idem_cleanup();
SELECT count(*) FROM idem_claims WHERE request_id LIKE '% with x';
DELETE FROM idem_claims WHERE request_id <> 'before';

-- Every function that writes refuses such a table; functions that only read go on.
CREATE TRIGGER t BEFORE INSERT ON idem_claims FOR EACH ROW EXECUTE FUNCTION do_nothing();
SELECT idem_claim('u', 'before');
\echo :SQLSTATE
SELECT idem_forget('u', 'before');
\echo :SQLSTATE
SELECT idem_cleanup();
\echo :SQLSTATE
SELECT idem_status('u', 'before');
-- A disabled trigger is refused, too.
ALTER TABLE idem_claims DISABLE TRIGGER t;
SELECT idem_claim('u', 'before');
\echo :SQLSTATE
DROP TRIGGER t ON idem_claims;
SELECT idem_claim('u', 'before');
-- An index that claims while a claim is written
CREATE FUNCTION regress_idem_claims_too(text) RETURNS boolean LANGUAGE plpgsql IMMUTABLE AS $$ BEGIN RETURN idem_claim('u', $1 || '!'); END $$;
BEGIN;
TRUNCATE idem_claims;
CREATE INDEX ON idem_claims (regress_idem_claims_too(request_id));
SELECT idem_claim('u', 'indexed');
\echo :SQLSTATE
ROLLBACK;
SELECT idem_claim('u', 'before');
DROP FUNCTION regress_idem_claims_too;
DROP FUNCTION do_nothing();
DROP TABLE referenced;

-- Another relation in the place of the table
CREATE FUNCTION pg_temp.instead(relation text, what text) RETURNS text LANGUAGE sql AS $$
	SELECT pg_temp.after(format('ALTER EXTENSION idem DROP TABLE idem_claims; ALTER TABLE idem_claims RENAME TO aside;
		CREATE %s idem_claims %s; ALTER EXTENSION idem ADD %1$s idem_claims', relation, what)) $$;
\x
\t
SELECT pg_temp.instead('VIEW', 'AS TABLE aside');
SELECT pg_temp.instead('TABLE', 'AS SELECT expires_at, lease_until FROM aside');
\t
\x

-- ----- indexes -----

-- Indexes of every kind; one is created between two claims of a transaction.
CREATE INDEX regress_idem_user ON idem_claims (user_id);
CREATE INDEX regress_idem_expression ON idem_claims (upper(request_id));
CREATE INDEX regress_idem_partial ON idem_claims (scope) WHERE state = 'failed';
CREATE INDEX regress_idem_result ON idem_claims USING gin (result);
CREATE INDEX regress_idem_brin ON idem_claims USING brin (expires_at);
CREATE UNIQUE INDEX regress_idem_fingerprint ON idem_claims (fingerprint);
INSERT INTO idem_scopes (scope, failed, expired) VALUES ('s', 'retryable', 'reclaim');
BEGIN;
SELECT count(*) FROM generate_series(1, 100) AS i WHERE idem_claim('indexed', 'r' || i, 's');
CREATE INDEX regress_idem_late ON idem_claims (user_id, request_id) INCLUDE (scope);
SELECT count(*) FROM generate_series(101, 200) AS i WHERE idem_claim('indexed', 'r' || i, 's');
SELECT count(*) FROM generate_series(1, 200) AS i
WHERE CASE WHEN i % 2 = 0 THEN idem_fail('indexed', 'r' || i, to_jsonb(i), scope => 's') ELSE idem_complete('indexed', 'r' || i, to_jsonb(i), scope => 's') END;
COMMIT;
-- Rows that are inserted, updated by a retry, rolled back, reclaimed, forgotten, or cleaned
SELECT count(*) FROM generate_series(1, 20) AS i WHERE idem_claim('indexed', 'r' || i, 's');
BEGIN;
SELECT count(*) FROM generate_series(21, 40) AS i WHERE idem_claim('indexed', 'r' || i, 's');
ROLLBACK;
UPDATE idem_claims SET expires_at = '2020-01-01' WHERE request_id IN ('r41', 'r42', 'r43', 'r44');
SELECT idem_claim('indexed', 'r41', 's', '\x41'), idem_claim('indexed', 'r42', 's', '\x42');
SELECT idem_cleanup();
SELECT idem_forget('indexed', 'r45', 's');
-- Each index, tested without the others, finds exactly the rows of the table.
ANALYZE idem_claims;
CREATE FUNCTION pg_temp.found(tested regclass, condition text, OUT by_table bigint, OUT by_index bigint, OUT used bool) LANGUAGE plpgsql AS $$
DECLARE
	query text := 'SELECT count(*) FROM idem_claims WHERE ' || condition;
	other record;
	line text;
BEGIN
	SET LOCAL enable_indexscan = off;
	SET LOCAL enable_indexonlyscan = off;
	SET LOCAL enable_bitmapscan = off;
	SET LOCAL enable_seqscan = on;
	EXECUTE query INTO by_table;
	SET LOCAL enable_indexscan = on;
	SET LOCAL enable_indexonlyscan = on;
	SET LOCAL enable_bitmapscan = on;
	SET LOCAL enable_seqscan = off;
	BEGIN
		FOR other IN SELECT indexrelid::regclass AS name, indisprimary FROM pg_index WHERE indrelid = 'idem_claims'::regclass AND indexrelid <> tested LOOP
			IF other.indisprimary THEN
				ALTER TABLE idem_claims DROP CONSTRAINT idem_claims_pkey;
			ELSE
				EXECUTE 'DROP INDEX ' || other.name;
			END IF;
		END LOOP;
		EXECUTE query INTO by_index;
		used := false;
		FOR line IN EXECUTE 'EXPLAIN (COSTS off) ' || query LOOP
			used := used OR line ~ (tested::text || '( |$)');
		END LOOP;
		RAISE SQLSTATE 'X0001';
	EXCEPTION WHEN SQLSTATE 'X0001' THEN
	END;
END $$;
SELECT index, f.* FROM (VALUES
	('idem_claims_pkey', $$request_id = 'r99' AND user_id = 'indexed' AND scope = 's'$$),
	('idem_claims_pkey', $$request_id BETWEEN 'r1' AND 'r3'$$),
	('idem_claims_expires_at_idx', $$expires_at > '2021-01-01'$$),
	('idem_claims_expires_at_idx', $$expires_at < '2021-01-01'$$),
	('regress_idem_user', $$user_id = 'indexed'$$),
	('regress_idem_late', $$user_id = 'indexed' AND request_id BETWEEN 'r150' AND 'r2'$$),
	('regress_idem_expression', $$upper(request_id) BETWEEN 'R1' AND 'R2'$$),
	('regress_idem_partial', $$scope = 's' AND state = 'failed'$$),
	('regress_idem_result', $$result @> '7'$$),
	('regress_idem_result', $$result @> '20'$$),
	('regress_idem_result', $$result @> '30'$$),
	('regress_idem_brin', $$expires_at > '2021-01-01'$$),
	('regress_idem_fingerprint', $$fingerprint = '\x41'$$),
	('regress_idem_fingerprint', $$fingerprint = '\x43'$$)) AS v (index, condition),
	pg_temp.found(index::regclass, condition) AS f;
-- A unique index of a user is checked, and its error undoes the claim.
SELECT idem_claim('other', 'r', fingerprint => '\x41');
\echo :SQLSTATE
BEGIN;
SAVEPOINT s;
SELECT idem_claim('other', 'r', fingerprint => '\x42');
\echo :SQLSTATE
ROLLBACK TO s;
SELECT idem_claim('other', 'r', fingerprint => '\x43');
SELECT idem_claim('other', 'r', fingerprint => '\x43');
COMMIT;
-- An error in the expression of an index undoes the claim, too.
CREATE INDEX regress_idem_error ON idem_claims ((1 / (length(user_id) - 3)));
BEGIN;
SAVEPOINT s;
SELECT idem_claim('abc', 'r');
\echo :SQLSTATE
ROLLBACK TO s;
SELECT idem_claim('abcd', 'r');
SAVEPOINT s;
SELECT idem_claim('abc', 'r');
\echo :SQLSTATE
ROLLBACK TO s;
-- An error in the middle of a batch undoes the whole batch. A block that catches the error can
-- go on.
CREATE FUNCTION pg_temp.batch(users text[]) RETURNS bigint LANGUAGE sql AS $$
	SELECT count(*) FROM idem_claim_many(users, (SELECT array_agg('b' || i ORDER BY i) FROM generate_series(1001, 1100) AS i), 's')
	WHERE outcome = 'claimed'
$$;
DO $$
BEGIN
	BEGIN
		PERFORM pg_temp.batch(array_fill('user'::text, ARRAY[70]) || 'two'::text || array_fill('user'::text, ARRAY[29]));
	EXCEPTION WHEN division_by_zero THEN
		RAISE NOTICE 'caught, % rows', (SELECT count(*) FROM idem_claims WHERE request_id LIKE 'b1%');
	END;
	RAISE NOTICE '% claimed', pg_temp.batch(array_fill('user'::text, ARRAY[100]));
END $$;
SELECT count(*) FROM idem_claims WHERE request_id LIKE 'b1%';
DELETE FROM idem_claims WHERE request_id LIKE 'b1%';
DROP INDEX regress_idem_error;
SELECT idem_claim('abc', 'r'), idem_claim('abcd', 'r');
COMMIT;
SELECT user_id FROM idem_claims WHERE request_id = 'r' ORDER BY 1;
-- The expression of an index can catch an error, which rolls back a subtransaction of its own.
CREATE FUNCTION caught(text) RETURNS text IMMUTABLE LANGUAGE plpgsql AS $$
BEGIN
	BEGIN
		PERFORM 1 / 0;
	EXCEPTION WHEN division_by_zero THEN
		NULL;
	END;
	RETURN (SELECT string_agg($1, ' ') FROM generate_series(1, 10));
END $$;
CREATE INDEX regress_idem_caught ON idem_claims (caught(request_id));
SELECT count(*) FILTER (WHERE idem_claim('caught', i::text)) AS claimed FROM generate_series(1, 100) AS i;
SELECT count(*) FILTER (WHERE idem_claim('caught', i::text)) AS claimed FROM generate_series(1, 100) AS i;
SET enable_seqscan = off;
SELECT user_id FROM idem_claims WHERE caught(request_id) = caught('100');
RESET enable_seqscan;
DROP INDEX regress_idem_caught;
DROP FUNCTION caught;
SET client_min_messages = warning;
DROP INDEX regress_idem_user, regress_idem_expression, regress_idem_partial, regress_idem_result, regress_idem_brin,
	regress_idem_fingerprint, regress_idem_late;
RESET client_min_messages;

-- Only the cleanup needs the index on expires_at. Without it the cleanup raises an error whose
-- HINT creates the index again.
DROP INDEX idem_claims_expires_at_idx;
SELECT idem_claim('u', 'without index'), idem_claim('u', 'before');
UPDATE idem_claims SET expires_at = '2020-01-01';
SELECT idem_cleanup();
\echo :SQLSTATE
CALL idem_cleanup_all();
\echo :SQLSTATE
CREATE INDEX idem_claims_expires_at_idx ON idem_claims (user_id);
SELECT idem_cleanup();
\echo :SQLSTATE
DROP INDEX idem_claims_expires_at_idx;
CREATE INDEX idem_claims_expires_at_idx ON idem_claims (expires_at DESC);
SELECT idem_cleanup();
DROP INDEX idem_claims_expires_at_idx;
CREATE INDEX idem_claims_expires_at_idx ON idem_claims (expires_at) WHERE user_id <> 'u';
SELECT idem_cleanup();
DROP INDEX idem_claims_expires_at_idx;
CREATE INDEX idem_claims_expires_at_idx ON idem_claims USING brin (expires_at);
SELECT idem_cleanup();
DROP INDEX idem_claims_expires_at_idx;
CREATE INDEX idem_claims_expires_at_idx ON idem_claims (expires_at);
SELECT idem_cleanup() > 0 AS cleaned;
CALL idem_cleanup_all();		-- where a batch ended early, since its time was up
SELECT count(*) FROM idem_claims;

-- Only lists of unsettled claims need the index of these. Without it they raise an error whose
-- HINT creates it again. Under its name there can be an index of a user, which is maintained.
CREATE FUNCTION pg_temp.opened(call text) RETURNS text LANGUAGE plpgsql AS $$
BEGIN
	EXECUTE call;
	RETURN (SELECT string_agg(DISTINCT relation::regclass::text, ', ') FROM pg_locks
		WHERE pid = pg_backend_pid() AND relation::regclass::text = 'idem_claims_unsettled_idx');
END $$;
-- A claim of a marker does not even open it; nor does it pay for its predicate.
BEGIN;
SELECT pg_temp.opened($c$SELECT idem_claim('u', 'marker ' || i), idem_complete('u', 'marker ' || i, '1') FROM generate_series(1, 150) AS i$c$);
SELECT pg_temp.opened($c$SELECT idem_claim_many(array_fill('u'::text, ARRAY[100]), array_agg('batch ' || i)) FROM generate_series(1, 100) AS i$c$);
SELECT pg_temp.opened($c$SELECT idem_lease('u', 'lease', lease => '1 min')$c$);
SAVEPOINT s;
SELECT idem_lease('u', 'lease 2', lease => '1 min') IS NOT NULL;
ROLLBACK TO s;
SELECT outcome FROM idem_lease('u', 'lease 3', lease => '1 min');
SELECT idem_claim('u', 'after all');
COMMIT;
UPDATE idem_claims SET lease_until = '2020-01-01';
SELECT request_id FROM idem_lapsed();
-- A savepoint that is rolled back releases an index that was opened in it.
BEGIN;
SELECT idem_claim('u', 'marker');
SAVEPOINT s;
SELECT outcome FROM idem_lease('u', 'lease 4', lease => '1 min');
ROLLBACK TO s;
SELECT outcome FROM idem_lease('u', 'lease 5', lease => '1 min');
SELECT idem_claim('u', 'marker 1000');
COMMIT;
DROP INDEX idem_claims_unsettled_idx;
SELECT outcome FROM idem_lease('u', 'lease 6', lease => '1 min');
SELECT idem_lapsed();
\echo :SQLSTATE
CREATE INDEX idem_claims_unsettled_idx ON idem_claims (scope) WHERE state <> 'in_progress';
SELECT idem_lapsed();
SELECT outcome FROM idem_lease('u', 'lease 7', lease => '1 min');
SELECT idem_claim('u', 'in it');
SET enable_seqscan = off;
SELECT request_id FROM idem_claims WHERE state <> 'in_progress' AND request_id LIKE '%it';
SELECT request_id FROM idem_claims WHERE scope = '' AND state <> 'in_progress' AND request_id LIKE '%it';
RESET enable_seqscan;
DROP INDEX idem_claims_unsettled_idx;
CREATE INDEX idem_claims_unsettled_idx ON idem_claims (user_id) WHERE state = 'in_progress';
SELECT idem_lapsed();
SELECT outcome FROM idem_lease('u', 'lease 8', lease => '1 min');
DROP INDEX idem_claims_unsettled_idx;
CREATE INDEX idem_claims_unsettled_idx ON idem_claims (scope) WHERE state IN ('in_progress', 'failed');
SELECT idem_lapsed();
DROP INDEX idem_claims_unsettled_idx;
CREATE INDEX idem_claims_unsettled_idx ON idem_claims USING hash (scope) WHERE state = 'in_progress';
SELECT idem_lapsed();
SELECT outcome FROM idem_lease('u', 'lease 9', lease => '1 min');
DROP INDEX idem_claims_unsettled_idx;
CREATE VIEW idem_claims_unsettled_idx AS SELECT 1 AS one;
SELECT idem_lapsed();
DROP VIEW idem_claims_unsettled_idx;
CREATE INDEX idem_claims_unsettled_idx ON idem_claims (scope) WHERE state = 'in_progress';
REINDEX INDEX CONCURRENTLY idem_claims_unsettled_idx;
SELECT outcome FROM idem_lease('u', 'lease 10', lease => '1 min');
UPDATE idem_claims SET lease_until = '2020-01-01';
SELECT count(*) = (SELECT count(*) FROM idem_claims WHERE state::text = 'in_progress') AS all_there FROM idem_lapsed();

-- Nullable columns and sequences that do not grow are refused.
ALTER TABLE idem_claims ALTER scope DROP NOT NULL;
BEGIN;
ALTER TABLE idem_claims DROP CONSTRAINT idem_claims_pkey;
ALTER TABLE idem_claims ALTER expires_at DROP NOT NULL;
SELECT idem_claim('u', 'nullable');
\echo :SQLSTATE
ROLLBACK;
ALTER SEQUENCE idem_token_seq CACHE 10;
SELECT outcome FROM idem_lease('u', 'cached', lease => '1 min');
\echo :SQLSTATE
ALTER SEQUENCE idem_token_seq CACHE 1 CYCLE;
SELECT outcome FROM idem_lease('u', 'cached', lease => '1 min');
ALTER SEQUENCE idem_token_seq NO CYCLE;
SELECT outcome FROM idem_lease('u', 'cached', lease => '1 min');
BEGIN;
ALTER SEQUENCE idem_token_seq MINVALUE -100 RESTART -5;
SELECT outcome FROM idem_lease('u', 'negative', lease => '1 min');
\echo :SQLSTATE
ROLLBACK;
-- Something else has the name of the index by expiry.
BEGIN;
DROP INDEX idem_claims_expires_at_idx;
CREATE VIEW idem_claims_expires_at_idx AS SELECT 1 AS one;
SELECT idem_cleanup();
\echo :SQLSTATE
ROLLBACK;
-- A lease that a superuser took the token from can be healed.
UPDATE idem_claims SET token = NULL WHERE request_id = 'cached';
SELECT idem_heal('u', 'cached', '1');
SELECT idem_claim('u', 'without a token');

-- The trigger function of idem_scopes refuses other tables.
CREATE TABLE regress_idem_other (a text, p int8, c text, d text, e text, f text, key_time text, h int, g timestamptz, i interval);
CREATE TRIGGER t BEFORE INSERT ON regress_idem_other FOR EACH ROW EXECUTE FUNCTION idem__scopes_changed();
INSERT INTO regress_idem_other VALUES ('a', 3735928559, '', '', '', '', 'uuidv7', 1, NULL);
DROP TABLE regress_idem_other;

TRUNCATE idem_claims, idem_scopes;
