-- A transaction that inserts many rows through the trigger does not keep them in memory.
CREATE SCHEMA sink_memory;
SET search_path = sink_memory, public;
CREATE TABLE many (customer text, request int);
CREATE TRIGGER once BEFORE INSERT ON many FOR EACH ROW EXECUTE FUNCTION idem_skip_duplicates('many', 'customer', 'request');
CREATE FUNCTION memory() RETURNS numeric LANGUAGE sql AS 'SELECT sum(total_bytes) FROM pg_backend_memory_contexts';
BEGIN;
INSERT INTO many SELECT 'ann', i FROM generate_series(1, 1000) AS i;
SELECT memory() AS before \gset
INSERT INTO many SELECT 'ann', i FROM generate_series(1, 50000) AS i;
INSERT INTO many SELECT 'ann', i FROM generate_series(1, 50000) AS i;
SELECT memory() - :before < 1000000 AS small, count(*) FROM many;
COMMIT;

-- Moves of rows at depths of triggers that grow
CREATE TABLE deep (n int, customer text, request text, region text) PARTITION BY LIST (region);
CREATE TABLE deep_eu PARTITION OF deep FOR VALUES IN ('eu');
CREATE TABLE deep_us PARTITION OF deep FOR VALUES IN ('us');
CREATE TRIGGER once BEFORE INSERT OR UPDATE OR DELETE ON deep FOR EACH ROW EXECUTE FUNCTION idem_skip_duplicates('deep', 'customer', 'request');
INSERT INTO deep SELECT i, 'ann', i, 'eu' FROM generate_series(1, 30) AS i;
CREATE TABLE levels (n int);
CREATE FUNCTION descend() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
	UPDATE deep SET region = 'us' WHERE n = NEW.n;
	IF NEW.n < 30 THEN
		INSERT INTO levels VALUES (NEW.n + 1);
	END IF;
	RETURN NEW;
END $$;
CREATE TRIGGER z AFTER INSERT ON levels FOR EACH ROW EXECUTE FUNCTION descend();
INSERT INTO levels VALUES (1);
SELECT region, count(*) FROM deep GROUP BY 1;
-- A table of another access method does not tell where a deleted row has gone.
CREATE ACCESS METHOD regress_idem_heap TYPE TABLE HANDLER heap_tableam_handler;
CREATE TABLE deep_asia PARTITION OF deep FOR VALUES IN ('asia') USING regress_idem_heap;
INSERT INTO deep VALUES (31, 'ann', '31', 'asia');
UPDATE deep SET region = 'us' WHERE n = 31;
SELECT region FROM deep WHERE n = 31;

SET client_min_messages = warning;
DROP ACCESS METHOD regress_idem_heap CASCADE;
DROP SCHEMA sink_memory CASCADE;
TRUNCATE idem_claims;
