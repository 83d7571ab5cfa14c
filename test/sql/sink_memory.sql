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

SET client_min_messages = warning;
DROP SCHEMA sink_memory CASCADE;
TRUNCATE idem_claims;
