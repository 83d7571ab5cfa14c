-- A row that moves to another partition is never taken for a redelivered one: the UPDATE fails.
\set SHOW_CONTEXT never
CREATE SCHEMA sink_moves;
SET search_path = sink_moves, public;
CREATE TABLE parts (customer text, request text, region text, n int DEFAULT 0) PARTITION BY LIST (region);
CREATE TABLE parts_eu PARTITION OF parts FOR VALUES IN ('eu');
CREATE TABLE parts_us (n int DEFAULT 0, unused int, region text, request text, customer text);
ALTER TABLE parts_us DROP COLUMN unused;
ALTER TABLE parts ATTACH PARTITION parts_us FOR VALUES IN ('us');
CREATE TABLE parts_rest PARTITION OF parts DEFAULT PARTITION BY HASH (request);
CREATE TABLE parts_rest_0 PARTITION OF parts_rest FOR VALUES WITH (MODULUS 2, REMAINDER 0);
CREATE TABLE parts_rest_1 PARTITION OF parts_rest FOR VALUES WITH (MODULUS 2, REMAINDER 1);
CREATE TRIGGER once BEFORE INSERT OR DELETE ON parts FOR EACH ROW EXECUTE FUNCTION idem_skip_duplicates('parts', 'customer', 'request');
CREATE FUNCTION rows() RETURNS text LANGUAGE sql AS $$ SELECT string_agg(region || ' ' || request, ', ' ORDER BY request COLLATE "C") FROM parts $$;
INSERT INTO parts SELECT 'ann', i, CASE i % 2 WHEN 0 THEN 'eu' ELSE 'us' END FROM generate_series(1, 4) AS i;

UPDATE parts SET region = CASE region WHEN 'eu' THEN 'us' ELSE 'eu' END;
\echo :SQLSTATE
UPDATE parts SET region = 'asia';
\echo :SQLSTATE
MERGE INTO parts AS p USING (VALUES ('1'), ('5')) AS v (request) ON p.request = v.request
WHEN MATCHED THEN UPDATE SET region = 'eu' WHEN NOT MATCHED THEN INSERT VALUES ('ann', v.request, 'eu');
\echo :SQLSTATE
-- A row below a default partition
INSERT INTO parts VALUES ('ann', '10', 'asia'), ('ann', '11', 'asia'), ('ann', '12', 'asia'), ('ann', '13', 'asia');
UPDATE parts SET region = 'us' WHERE region = 'asia';
\echo :SQLSTATE
DELETE FROM parts WHERE region = 'asia';
SELECT rows();
-- With the ids of a request that was not done, the row is a new one, and is claimed.
UPDATE parts SET region = 'us', request = '2!' WHERE request = '2';
UPDATE parts SET region = 'us', request = '1' WHERE request = '4';
\echo :SQLSTATE
SELECT rows();
SELECT idem_status('ann', '2!', 'parts');
-- With the trigger off
BEGIN;
ALTER TABLE parts DISABLE TRIGGER once;
UPDATE parts SET region = CASE region WHEN 'eu' THEN 'us' ELSE 'eu' END;
ALTER TABLE parts ENABLE TRIGGER once;
COMMIT;
SELECT rows();

-- An UPDATE that moves nothing, and a MERGE of new requests
UPDATE parts SET n = n + 1, region = region, request = request;
\echo :ROW_COUNT
MERGE INTO parts AS p USING (VALUES ('2!'), ('6')) AS v (request) ON p.request = v.request
WHEN MATCHED THEN DELETE WHEN NOT MATCHED THEN INSERT VALUES ('ann', v.request, 'us');
\echo :ROW_COUNT
-- Other statements of the transaction: a redelivered row is skipped.
BEGIN;
DELETE FROM parts WHERE request = '6';
INSERT INTO parts VALUES ('ann', '6', 'eu'), ('ann', '1', 'us');
\echo :ROW_COUNT
SAVEPOINT s;
UPDATE parts SET region = 'us' WHERE request = '3';
ROLLBACK TO s;
INSERT INTO parts VALUES ('ann', '3', 'us');
\echo :ROW_COUNT
ROLLBACK;
-- In one statement it cannot be told from a row that moves.
WITH deleted AS (DELETE FROM parts WHERE request = '6' RETURNING *)
INSERT INTO parts SELECT customer, request, 'eu' FROM deleted;
\echo :SQLSTATE
SELECT rows();

-- What other triggers do in between does not matter: they delete and insert, and roll back.
CREATE TABLE log (customer text, request text, region text) PARTITION BY LIST (region);
CREATE TABLE log_eu PARTITION OF log FOR VALUES IN ('eu');
CREATE TRIGGER once BEFORE INSERT OR DELETE ON log FOR EACH ROW EXECUTE FUNCTION idem_skip_duplicates('log', 'customer', 'request');
CREATE FUNCTION meanwhile() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
	DELETE FROM log;
	BEGIN
		DELETE FROM parts WHERE n = -1;
		INSERT INTO log VALUES ('log', gen_random_uuid()::text, 'eu');
		DELETE FROM log;
		RAISE division_by_zero;
	EXCEPTION WHEN division_by_zero THEN
	END;
	INSERT INTO log VALUES ('log', gen_random_uuid()::text, 'eu');
	RETURN coalesce(NEW, OLD);
END $$;
CREATE TRIGGER a BEFORE INSERT OR UPDATE OR DELETE ON parts FOR EACH ROW EXECUTE FUNCTION meanwhile();
CREATE TRIGGER z BEFORE INSERT OR UPDATE OR DELETE ON parts FOR EACH ROW EXECUTE FUNCTION meanwhile();
UPDATE parts SET region = CASE region WHEN 'eu' THEN 'us' ELSE 'eu' END;
\echo :SQLSTATE
SELECT rows();
DROP TRIGGER a ON parts;
DROP TRIGGER z ON parts;
-- A later trigger moves the row.
CREATE FUNCTION move() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN NEW.region := 'asia'; RETURN NEW; END $$;
CREATE TRIGGER z BEFORE UPDATE ON parts FOR EACH ROW EXECUTE FUNCTION move();
UPDATE parts SET n = 5 WHERE request = '3';
\echo :SQLSTATE
DROP TRIGGER z ON parts;
-- A later trigger keeps the row where it is.
CREATE FUNCTION stop() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END';
CREATE TRIGGER z BEFORE DELETE ON parts FOR EACH ROW EXECUTE FUNCTION stop();
UPDATE parts SET region = 'asia' WHERE request = '3';
\echo :ROW_COUNT
DROP TRIGGER z ON parts;
-- Cascades of foreign keys
CREATE TABLE regions (region text PRIMARY KEY);
INSERT INTO regions VALUES ('eu'), ('us');
ALTER TABLE parts ADD FOREIGN KEY (region) REFERENCES regions ON UPDATE CASCADE;
UPDATE regions SET region = 'asia' WHERE region = 'us';
\echo :SQLSTATE
SELECT rows();

SET client_min_messages = warning;
DROP SCHEMA sink_moves CASCADE;
TRUNCATE idem_claims;

-- A table that becomes a partition in the midst of a client's statement
CREATE TABLE late (u text, r text, k int) PARTITION BY LIST (k);
CREATE TABLE late_2 PARTITION OF late FOR VALUES IN (2);
CREATE TABLE late_1 (u text, r text, k int);
CREATE TRIGGER skip BEFORE INSERT ON late_1 FOR EACH ROW EXECUTE FUNCTION idem_skip_duplicates('late', 'u', 'r');
DO $$
BEGIN
	INSERT INTO late_1 VALUES ('u', '1', 1);
	ALTER TABLE late ATTACH PARTITION late_1 FOR VALUES IN (1);
	UPDATE late SET k = 2;
	UPDATE late SET k = 1;
END $$;
DROP TABLE late;
DROP TABLE late_1;
