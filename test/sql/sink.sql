-- The trigger of a sink: idem_skip_duplicates(). :SQLSTATE and :ROW_COUNT are those of the
-- statement before. What an UPDATE does that moves rows between partitions: sink_moves.
\set SHOW_CONTEXT never
CREATE SCHEMA sink;
SET search_path = sink, public;
CREATE ROLE regress_sink_owner;
CREATE ROLE regress_sink_writer;
CREATE ROLE regress_sink_stranger;

CREATE TABLE shipments (customer text, correlation_id uuid, item text);
CREATE TRIGGER once BEFORE INSERT ON shipments
	FOR EACH ROW EXECUTE FUNCTION idem_skip_duplicates('shipping', 'customer', 'correlation_id');
CREATE FUNCTION request(i int) RETURNS uuid IMMUTABLE LANGUAGE sql AS $$
	SELECT ('00000000-0000-0000-0000-' || lpad(i::text, 12, '0'))::uuid
$$;

-- ----- redelivered rows -----

INSERT INTO shipments SELECT 'ann', request(i), 'book' FROM generate_series(1, 3) AS i;
\echo :ROW_COUNT
INSERT INTO shipments SELECT 'ann', request(i), 'again' FROM generate_series(1, 4) AS i;
\echo :ROW_COUNT
-- in one statement
INSERT INTO shipments VALUES ('bob', request(1), 'first'), ('bob', request(1), 'second'), ('bob', request(2), 'third');
\echo :ROW_COUNT
COPY shipments FROM stdin;
ann	00000000-0000-0000-0000-000000000004	copied
ann	00000000-0000-0000-0000-000000000005	copied
ann	00000000-0000-0000-0000-000000000005	copied twice
\.
\echo :ROW_COUNT
-- in one transaction
BEGIN;
INSERT INTO shipments VALUES ('ann', request(6), 'first');
INSERT INTO shipments VALUES ('ann', request(6), 'second') RETURNING item;
COMMIT;
-- A row that is rolled back is not claimed.
BEGIN;
INSERT INTO shipments VALUES ('ann', request(7), 'rolled back');
ROLLBACK;
BEGIN;
SAVEPOINT s;
INSERT INTO shipments VALUES ('ann', request(7), 'rolled back');
ROLLBACK TO s;
INSERT INTO shipments VALUES ('ann', request(7), 'kept');
SAVEPOINT s;
INSERT INTO shipments VALUES ('ann', request(7), 'skipped');
RELEASE s;
COMMIT;
SELECT customer, right(correlation_id::text, 2) AS request, item FROM shipments ORDER BY 1, 2, 3;
SELECT state, count(*), count(token) AS tokens, count(result) AS results FROM idem_claims WHERE scope = 'shipping' GROUP BY state;
-- The claim is that of idem_claim().
SELECT idem_claim('ann', request(1)::text, 'shipping'), idem_claim('ann', request(1)::text), idem_claim('ann', request(8)::text, 'shipping');
INSERT INTO shipments VALUES ('ann', request(8), 'done elsewhere');
\echo :ROW_COUNT
-- A deleted row stays done: the request was.
DELETE FROM shipments WHERE correlation_id = request(3);
INSERT INTO shipments VALUES ('ann', request(3), 'redelivered');
\echo :ROW_COUNT
SELECT idem_forget('ann', request(3)::text, 'shipping');
INSERT INTO shipments VALUES ('ann', request(3), 'again, on purpose');
\echo :ROW_COUNT
-- An UPDATE neither claims nor skips.
UPDATE shipments SET correlation_id = request(2) WHERE item = 'again, on purpose';
\echo :ROW_COUNT

-- ----- the claim is settled at once -----

CREATE PROCEDURE guarded(request text, n int) LANGUAGE plpgsql AS $$
BEGIN
	IF NOT idem_claim('ann', request) THEN
		RETURN;
	END IF;
	INSERT INTO shipments SELECT 'guarded', request(i), request FROM generate_series(1, n) AS i;
	RAISE NOTICE '% %', idem_outcome(), idem_result();
	PERFORM idem_complete('{"shipped": 100}');
	INSERT INTO shipments VALUES ('guarded', request(1), 'skipped');
	RAISE NOTICE '% %', idem_outcome(), idem_result();
END $$;
CALL guarded('guarded', 100);
SELECT idem_result('ann', 'guarded'), count(*) FROM shipments WHERE customer = 'guarded';
BEGIN;
INSERT INTO shipments VALUES ('settled', request(1), 'book');
SELECT idem_outcome();
\echo :SQLSTATE
ROLLBACK;
BEGIN;
INSERT INTO shipments VALUES ('settled', request(1), 'book');
SELECT idem_complete();
\echo :SQLSTATE
ROLLBACK;
BEGIN;
INSERT INTO shipments VALUES ('settled', request(1), 'book');
SELECT idem_complete('settled', request(1)::text, NULL, scope => 'shipping');
SELECT idem_complete('settled', request(1)::text, '1', scope => 'shipping');
\echo :SQLSTATE
ROLLBACK;
BEGIN;
SELECT outcome FROM idem_try_claim('ann', 'asked first');
INSERT INTO shipments VALUES ('ann', request(1), 'skipped'), ('settled', request(2), 'kept');
SELECT idem_outcome(), idem_complete('2');
COMMIT;
SELECT idem_result('ann', 'asked first'), idem_status('settled', request(2)::text, 'shipping');

-- ----- other statements -----

CREATE TABLE orders (customer int, request text, item text UNIQUE, n int DEFAULT 1);
CREATE TRIGGER once BEFORE INSERT ON orders
	FOR EACH ROW EXECUTE FUNCTION idem_skip_duplicates('orders', 'customer', 'request');
INSERT INTO orders VALUES (1, 'a', 'book');
-- The row conflicts: the statement has dealt with the request.
INSERT INTO orders VALUES (1, 'b', 'book') ON CONFLICT DO NOTHING;
\echo :ROW_COUNT
INSERT INTO orders VALUES (1, 'b', 'pen') ON CONFLICT DO NOTHING;
\echo :ROW_COUNT
INSERT INTO orders VALUES (1, 'c', 'book') ON CONFLICT (item) DO UPDATE SET n = orders.n + 1;
\echo :ROW_COUNT
INSERT INTO orders VALUES (1, 'c', 'book') ON CONFLICT (item) DO UPDATE SET n = orders.n + 1;
\echo :ROW_COUNT
-- An error takes the claim back.
INSERT INTO orders VALUES (1, 'd', 'book');
\echo :SQLSTATE
INSERT INTO orders VALUES (1, 'd', 'pen');
\echo :ROW_COUNT
MERGE INTO orders AS o USING (VALUES (1, 'd', 'cup'), (1, 'e', 'cup'), (1, 'f', 'book')) AS v (customer, request, item) ON o.item = v.item
WHEN MATCHED THEN UPDATE SET n = o.n + 1
WHEN NOT MATCHED THEN INSERT VALUES (v.customer, v.request, v.item);
\echo :ROW_COUNT
WITH inserted AS (INSERT INTO orders VALUES (1, 'g', 'jar'), (1, 'g', 'jug') RETURNING item)
SELECT item FROM inserted;
SELECT * FROM orders ORDER BY item;

-- ----- columns -----

CREATE DOMAIN order_id AS varchar(40) CHECK (VALUE <> 'bad');
CREATE DOMAIN special_id AS order_id;
CREATE TABLE types (a text, b varchar(20), c char(8), d name, e uuid, f smallint, g int, h bigint, i numeric, j special_id, "K ""q" text);
INSERT INTO types VALUES ('a ', 'b', 'c', 'd', request(1), 2, 3, 4, 5.50, 'j', 'k');
DO $$
DECLARE
	name text;
BEGIN
	FOR name IN SELECT attname FROM pg_attribute WHERE attrelid = 'types'::regclass AND attnum > 0 ORDER BY attnum LOOP
		EXECUTE format('CREATE TRIGGER once BEFORE INSERT ON types FOR EACH ROW EXECUTE FUNCTION idem_skip_duplicates(%L, %L, %L)', 'types ' || name, 'h', name);
		INSERT INTO types SELECT * FROM types LIMIT 1;
		DROP TRIGGER once ON types;
	END LOOP;
END $$;
SELECT scope, user_id, '"' || request_id || '"' AS request_id FROM idem_claims WHERE scope LIKE 'types%' ORDER BY scope;
SELECT DISTINCT c.request_id = c.column::text AS as_text
FROM (SELECT request_id, CASE scope WHEN 'types c' THEN (SELECT c::text FROM types LIMIT 1) WHEN 'types i' THEN (SELECT i::text FROM types LIMIT 1)
	WHEN 'types e' THEN (SELECT e::text FROM types LIMIT 1) END AS column FROM idem_claims WHERE scope IN ('types c', 'types i', 'types e')) AS c;
-- Types whose text depends on settings, and others that are no ids
CREATE TYPE mood AS ENUM ('calm');
CREATE DOMAIN moment AS timestamptz;
CREATE TABLE others (customer text, a timestamptz, b date, c float8, d bytea, e boolean, f jsonb, g text[], h interval, i money, j moment,
	k mood, l text GENERATED ALWAYS AS (customer || 'x') STORED);
DO $$
DECLARE
	name text;
	hint text;
BEGIN
	FOR name IN SELECT attname FROM pg_attribute WHERE attrelid = 'others'::regclass AND attnum > 0 AND attname <> 'customer' ORDER BY attnum LOOP
		EXECUTE format('CREATE TRIGGER once BEFORE INSERT ON others FOR EACH ROW EXECUTE FUNCTION idem_skip_duplicates(%L, %L, %L)', '', 'customer', name);
		BEGIN
			INSERT INTO others (customer) VALUES ('ann');
		EXCEPTION WHEN OTHERS THEN
			GET STACKED DIAGNOSTICS hint = PG_EXCEPTION_HINT;
			RAISE NOTICE '% %', SQLSTATE, regexp_replace(SQLERRM, 'sink\.', '');
		END;
		DROP TRIGGER once ON others;
	END LOOP;
	RAISE NOTICE '%', hint;
END $$;
-- Ids that are none
INSERT INTO orders VALUES (NULL, 'x', 'x');
\echo :SQLSTATE
INSERT INTO orders VALUES (1, NULL, 'x');
\echo :SQLSTATE
INSERT INTO orders VALUES (1, '', 'x');
\echo :SQLSTATE
INSERT INTO orders VALUES (1, repeat('x', 256), 'x');
\echo :SQLSTATE
INSERT INTO orders VALUES (1, repeat('x', 255), 'x');
\echo :ROW_COUNT
COPY orders (customer, request, item) FROM stdin;
1	h	hat
\N	i	ham
\.
INSERT INTO orders VALUES (1, 'h', 'hat');
\echo :ROW_COUNT

-- ----- triggers that it refuses -----

CREATE TABLE refused (customer text, request text, item text);
INSERT INTO refused VALUES ('ann', 'there', 'book');
CREATE FUNCTION try(trigger text, statement text DEFAULT $$INSERT INTO refused VALUES ('ann', 'r', 'book')$$) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
	n int;
	hint text;
BEGIN
	EXECUTE 'CREATE TRIGGER once ' || trigger;
	EXECUTE statement;
	GET DIAGNOSTICS n = ROW_COUNT;
	RAISE NO_DATA_FOUND USING MESSAGE = 'no error, rows: ' || n;
EXCEPTION WHEN OTHERS THEN
	GET STACKED DIAGNOSTICS hint = PG_EXCEPTION_HINT;
	RETURN SQLSTATE || ' ' || SQLERRM || E'\n' || hint;
END $$;
\pset format unaligned
\pset tuples_only on
SELECT try('AFTER INSERT ON refused FOR EACH ROW EXECUTE FUNCTION idem_skip_duplicates($$$$, $$customer$$, $$request$$)');
SELECT try('BEFORE INSERT ON refused FOR EACH STATEMENT EXECUTE FUNCTION idem_skip_duplicates($$$$, $$customer$$, $$request$$)');
SELECT try('BEFORE UPDATE ON refused FOR EACH ROW EXECUTE FUNCTION idem_skip_duplicates($$$$, $$customer$$, $$request$$)', 'UPDATE refused SET item = NULL');
SELECT try('BEFORE DELETE ON refused FOR EACH ROW EXECUTE FUNCTION idem_skip_duplicates($$$$, $$customer$$, $$request$$)', 'DELETE FROM refused');
SELECT try('BEFORE TRUNCATE ON refused EXECUTE FUNCTION idem_skip_duplicates($$$$, $$customer$$, $$request$$)', 'TRUNCATE refused');
SELECT try('BEFORE INSERT ON refused FOR EACH ROW EXECUTE FUNCTION idem_skip_duplicates()');
SELECT try('BEFORE INSERT ON refused FOR EACH ROW EXECUTE FUNCTION idem_skip_duplicates($$customer$$, $$request$$)');
SELECT try('BEFORE INSERT ON refused FOR EACH ROW EXECUTE FUNCTION idem_skip_duplicates($$$$, $$customer$$, $$request$$, $$item$$)');
SELECT try('BEFORE INSERT ON refused FOR EACH ROW EXECUTE FUNCTION idem_skip_duplicates($$$$, $$customer$$, $$requests$$)');
SELECT try('BEFORE INSERT ON refused FOR EACH ROW EXECUTE FUNCTION idem_skip_duplicates($$$$, $$ctid$$, $$request$$)');
SELECT try('BEFORE INSERT ON refused FOR EACH ROW EXECUTE FUNCTION idem_skip_duplicates($$' || repeat('s', 256) || '$$, $$customer$$, $$request$$)');
-- UPDATE and DELETE are no errors where the trigger is for INSERT too.
SELECT try('BEFORE INSERT OR UPDATE ON refused FOR EACH ROW EXECUTE FUNCTION idem_skip_duplicates($$$$, $$customer$$, $$request$$)', 'UPDATE refused SET request = NULL');
SELECT try('BEFORE INSERT OR DELETE ON refused FOR EACH ROW EXECUTE FUNCTION idem_skip_duplicates($$$$, $$customer$$, $$request$$)', 'DELETE FROM refused');
-- Two of them
CREATE TRIGGER first BEFORE INSERT ON refused FOR EACH ROW EXECUTE FUNCTION idem_skip_duplicates('', 'customer', 'request');
SELECT try('BEFORE INSERT ON refused FOR EACH ROW EXECUTE FUNCTION idem_skip_duplicates($$two$$, $$customer$$, $$request$$)');
SELECT try('BEFORE INSERT ON refused FOR EACH ROW WHEN (NEW.item = $$pen$$) EXECUTE FUNCTION idem_skip_duplicates($$two$$, $$customer$$, $$request$$)');
ALTER TABLE refused DISABLE TRIGGER first;
SELECT try('BEFORE INSERT ON refused FOR EACH ROW EXECUTE FUNCTION idem_skip_duplicates($$two$$, $$customer$$, $$request$$)');
DROP TRIGGER first ON refused;
-- Two with conditions that exclude each other
CREATE TRIGGER first BEFORE INSERT ON refused FOR EACH ROW WHEN (NEW.item = 'pen') EXECUTE FUNCTION idem_skip_duplicates('one', 'customer', 'request');
SELECT try('BEFORE INSERT ON refused FOR EACH ROW WHEN (NEW.item <> $$pen$$) EXECUTE FUNCTION idem_skip_duplicates($$two$$, $$customer$$, $$request$$)',
	'INSERT INTO refused SELECT $$ann$$, $$r$$, item FROM unnest(ARRAY[$$pen$$, $$ink$$, $$pen$$]) AS item');
DROP TRIGGER first ON refused;
CREATE VIEW seen AS SELECT * FROM refused;
SELECT try('INSTEAD OF INSERT ON seen FOR EACH ROW EXECUTE FUNCTION idem_skip_duplicates($$$$, $$customer$$, $$request$$)', 'INSERT INTO seen VALUES ($$ann$$, $$r$$)');
\pset tuples_only off
\pset format aligned
SELECT count(*) FROM refused;
-- Other triggers: one before it sets the id, one after it skips a row that is claimed.
CREATE FUNCTION set_request() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN NEW.request := 'set ' || NEW.item; RETURN NEW; END $$;
CREATE FUNCTION filter() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN CASE WHEN NEW.item <> 'filtered' THEN NEW END; END $$;
CREATE TRIGGER a BEFORE INSERT ON refused FOR EACH ROW EXECUTE FUNCTION set_request();
CREATE TRIGGER once BEFORE INSERT ON refused FOR EACH ROW EXECUTE FUNCTION idem_skip_duplicates('refused', 'customer', 'request');
CREATE TRIGGER z BEFORE INSERT ON refused FOR EACH ROW EXECUTE FUNCTION filter();
INSERT INTO refused VALUES ('ann', NULL, 'pen'), ('ann', 'other', 'pen'), ('ann', NULL, 'filtered');
\echo :ROW_COUNT
SELECT request_id FROM idem_claims WHERE scope = 'refused' ORDER BY 1;

-- ----- outcomes -----

INSERT INTO idem_scopes (scope, failed, lapsed) VALUES ('orders', 'terminal', 'unknown');
SET idem.wait = 0;
BEGIN;
SELECT idem_claim('2', 'failed', 'orders');
SELECT idem_fail('{"error": 1}');
COMMIT;
INSERT INTO orders VALUES (2, 'failed', 'fork');
\echo :SQLSTATE
UPDATE idem_scopes SET failed = 'retryable' WHERE scope = 'orders';
INSERT INTO orders VALUES (2, 'failed', 'fork');
\echo :ROW_COUNT
SELECT outcome FROM idem_lease('2', 'leased', scope => 'orders', lease => '1 hour');
\set VERBOSITY terse
INSERT INTO orders VALUES (2, 'leased', 'fig');
\echo :SQLSTATE
SET idem.wait = '1ms';
INSERT INTO orders VALUES (2, 'leased', 'fig');
\echo :SQLSTATE
\set VERBOSITY default
UPDATE idem_claims SET lease_until = '2000-01-01' WHERE request_id = 'leased';
INSERT INTO orders VALUES (2, 'leased', 'fig');
\echo :SQLSTATE
SELECT idem_heal('2', 'leased', '1', 'orders');
INSERT INTO orders VALUES (2, 'leased', 'fig');
\echo :ROW_COUNT
RESET idem.wait;
-- A marker has no fingerprint to compare.
SELECT idem_claim('2', 'fingerprint', 'orders', '\x01');
INSERT INTO orders VALUES (2, 'fingerprint', 'fig');
\echo :ROW_COUNT
INSERT INTO idem_scopes (scope, ttl, key_time) VALUES ('shipping', '1 day', 'uuidv7');
INSERT INTO shipments VALUES ('ann', request(9), 'no uuidv7');
\echo :SQLSTATE
INSERT INTO shipments VALUES ('ann', '01900000-0000-7000-8000-000000000000', 'stale');
\echo :SQLSTATE
DELETE FROM idem_scopes;
CREATE TEMPORARY TABLE temporary (customer text, request text);
CREATE TRIGGER once BEFORE INSERT ON temporary FOR EACH ROW EXECUTE FUNCTION idem_skip_duplicates('temporary', 'customer', 'request');
INSERT INTO temporary VALUES ('ann', 'r'), ('ann', 'r');
\echo :ROW_COUNT
BEGIN READ ONLY;
INSERT INTO temporary VALUES ('ann', 'read only');
\echo :SQLSTATE
ROLLBACK;

-- ----- partitions -----

CREATE TABLE parts (customer text, request text, region text, city text) PARTITION BY LIST (region);
CREATE TABLE parts_eu PARTITION OF parts FOR VALUES IN ('eu') PARTITION BY LIST (city);
CREATE TABLE parts_rome PARTITION OF parts_eu FOR VALUES IN ('rome');
CREATE TABLE parts_us (city text, unused int, request text, customer text, region text);
ALTER TABLE parts_us DROP COLUMN unused;
-- The rows that a partition has when it is attached are not claimed.
INSERT INTO parts_us VALUES ('nyc', 'before', 'ann', 'us');
CREATE TRIGGER once BEFORE INSERT OR DELETE ON parts FOR EACH ROW EXECUTE FUNCTION idem_skip_duplicates('parts', 'customer', 'request');
ALTER TABLE parts ATTACH PARTITION parts_us FOR VALUES IN ('us');
INSERT INTO parts VALUES ('ann', 'before', 'us', 'nyc');
\echo :ROW_COUNT
INSERT INTO parts VALUES ('ann', 'a', 'us', 'nyc'), ('ann', 'a', 'eu', 'rome'), ('ann', 'b', 'eu', 'rome');
\echo :ROW_COUNT
INSERT INTO parts_us VALUES ('nyc', 'b', 'ann', 'us'), ('nyc', 'c', 'ann', 'us');
\echo :ROW_COUNT
INSERT INTO parts_eu VALUES ('ann', 'c', 'eu', 'rome');
\echo :ROW_COUNT
COPY parts FROM stdin;
ann	c	eu	rome
ann	d	eu	rome
ann	e	us	nyc
\.
\echo :ROW_COUNT
UPDATE parts SET request = request || '!' WHERE request = 'b';
\echo :ROW_COUNT
BEGIN;
DELETE FROM parts WHERE request = 'e';
INSERT INTO parts VALUES ('ann', 'd', 'us', 'nyc');
\echo :ROW_COUNT
ROLLBACK;
SELECT tableoid::regclass, count(*) FROM parts GROUP BY 1 ORDER BY 1;
-- Without DELETE, or on a part only: also where the root has a trigger of that name for statements
DROP TRIGGER once ON parts;
CREATE TRIGGER once BEFORE INSERT OR UPDATE ON parts FOR EACH ROW EXECUTE FUNCTION idem_skip_duplicates('parts', 'customer', 'request');
INSERT INTO parts VALUES ('ann', 'f', 'us', 'nyc');
\echo :SQLSTATE
DROP TRIGGER once ON parts;
CREATE TRIGGER once BEFORE INSERT OR DELETE ON parts_eu FOR EACH ROW EXECUTE FUNCTION idem_skip_duplicates('parts', 'customer', 'request');
INSERT INTO parts VALUES ('ann', 'f', 'eu', 'rome');
\echo :SQLSTATE
CREATE FUNCTION nothing() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END';
CREATE TRIGGER once BEFORE INSERT ON parts EXECUTE FUNCTION nothing();
INSERT INTO parts VALUES ('ann', 'f', 'eu', 'rome');
\echo :SQLSTATE
DELETE FROM parts WHERE request = 'd';
\echo :SQLSTATE
INSERT INTO parts VALUES ('ann', 'f', 'us', 'nyc');
\echo :ROW_COUNT
-- Children by inheritance have triggers of their own.
CREATE TABLE parent (customer text, request text);
CREATE TABLE child () INHERITS (parent);
CREATE TRIGGER once BEFORE INSERT ON parent FOR EACH ROW EXECUTE FUNCTION idem_skip_duplicates('parent', 'customer', 'request');
INSERT INTO child VALUES ('ann', 'a'), ('ann', 'a');
INSERT INTO parent VALUES ('ann', 'a'), ('ann', 'a');
SELECT tableoid::regclass, count(*) FROM parent GROUP BY 1 ORDER BY 1;

-- ----- restored and replicated rows -----

SET session_replication_role = replica;
INSERT INTO orders VALUES (1, 'a', 'restored');
\echo :ROW_COUNT
ALTER TABLE orders ENABLE ALWAYS TRIGGER once;
INSERT INTO orders VALUES (1, 'a', 'replicated');
\echo :ROW_COUNT
RESET session_replication_role;

-- ----- rights -----

SELECT has_function_privilege('regress_sink_stranger', 'idem_skip_duplicates()', 'EXECUTE') AS stranger;
SELECT idem_grant('regress_sink_owner', 'app');
CREATE SCHEMA sinks AUTHORIZATION regress_sink_owner;
SET ROLE regress_sink_owner;
CREATE TABLE sinks.mails (customer text, request text);
CREATE TRIGGER once BEFORE INSERT ON sinks.mails FOR EACH ROW EXECUTE FUNCTION idem_skip_duplicates('mails', 'customer', 'request');
GRANT USAGE ON SCHEMA sinks TO regress_sink_writer, regress_sink_stranger;
GRANT INSERT ON sinks.mails TO regress_sink_writer;
GRANT TRIGGER ON sinks.mails TO regress_sink_stranger;
RESET ROLE;
-- The writer needs INSERT only.
SET ROLE regress_sink_writer;
INSERT INTO sinks.mails VALUES ('ann', 'a'), ('ann', 'a');
\echo :ROW_COUNT
SELECT idem_claim('ann', 'b', 'mails');
\echo :SQLSTATE
RESET ROLE;
-- A trigger needs EXECUTE.
SET ROLE regress_sink_stranger;
CREATE TRIGGER mine BEFORE INSERT ON sinks.mails FOR EACH ROW EXECUTE FUNCTION idem_skip_duplicates('other', 'customer', 'request');
\echo :SQLSTATE
CREATE TEMPORARY TABLE own (customer text, request text);
CREATE TRIGGER mine BEFORE INSERT ON own FOR EACH ROW EXECUTE FUNCTION idem_skip_duplicates('mails', 'customer', 'request');
\echo :SQLSTATE
INSERT INTO sinks.mails VALUES ('ann', 'b');
\echo :SQLSTATE
DROP TABLE own;
RESET ROLE;
SELECT idem_revoke('regress_sink_owner', 'app');
SELECT has_function_privilege('regress_sink_owner', 'idem_skip_duplicates()', 'EXECUTE') AS revoked;
INSERT INTO sinks.mails VALUES ('ann', 'a'), ('ann', 'b');
\echo :ROW_COUNT
DROP SCHEMA sinks CASCADE;
DROP OWNED BY regress_sink_owner, regress_sink_writer, regress_sink_stranger;
DROP ROLE regress_sink_owner, regress_sink_writer, regress_sink_stranger;

SET client_min_messages = warning;
DROP SCHEMA sink CASCADE;
TRUNCATE idem_claims;
