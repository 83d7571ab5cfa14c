-- Claims of one request by one statement: another place in it is refused, since its caller would take
-- the second answer for the first. What a statement evaluates again is in update_recheck_refused.
\set SHOW_CONTEXT never

CREATE TABLE sink (id text, times int);
CREATE FUNCTION once(id text) RETURNS bool LANGUAGE plpgsql AS $$ BEGIN RETURN idem_claim('u', id); END $$;
CREATE FUNCTION pay(amount int) RETURNS jsonb LANGUAGE sql AS $$ SELECT to_jsonb(amount) $$;

-- refused: each column is a call of its own
SELECT (idem_try_claim('u', '1')).*;
SELECT (idem_lease('u', '1', lease => '1 h')).*;
SELECT idem_claim('u', '1'), idem_claim('u', '1');
SELECT idem_claim('u', '1') UNION ALL SELECT idem_claim('u', '1');
SELECT (idem_try_claim('u', '0193a1f2-7d43-7c5e-9a10-5f7c2e1b8a01'::uuid)).*;
SELECT (idem_lease(7, '1', '1 h')).*;
-- a mismatch is told as one
SELECT idem_claim('u', '1', '', '\x01'), idem_claim('u', '1', '', '\x02');
SELECT count(*) FROM idem_claims;

-- one place that meets the request in two rows
INSERT INTO sink SELECT id, 1 FROM (VALUES ('2'), ('3'), ('2')) AS incoming (id) WHERE idem_claim('u', id);
SELECT * FROM sink;
-- two places, but two requests
SELECT idem_claim('u', '4'), idem_claim('u', '5'), (idem_try_claim('u', '6')).outcome;
-- a set is made once for all columns, and answers a repeat inside it
SELECT (idem_claim_many(ARRAY['u', 'u'], ARRAY['7', '7'])).*;
-- functions that claim run statements of their own
SELECT once('8'), once('8');
-- a settled request is replayed
SELECT idem_call('u', '9', 'pay(int)', '{"amount": 7}'), idem_call('u', '9', 'pay(int)', '{"amount": 7}');
SELECT idem_claim('u', '10') AND idem_complete('1'), idem_claim('u', '10');
-- later statements
BEGIN;
SELECT idem_claim('u', '11');
SELECT idem_claim('u', '11');
DO $$ BEGIN FOR i IN 1..2 LOOP RAISE NOTICE '%', idem_claim('u', '12'); END LOOP; END $$;
DO $$ BEGIN RAISE NOTICE '%', idem_claim('u', '14'); RAISE NOTICE '%', idem_claim('u', '14'); END $$;
-- a claim that was rolled back to a savepoint counts no more
SAVEPOINT s;
SELECT idem_claim('u', '13');
ROLLBACK TO s;
SELECT idem_claim('u', '13');
COMMIT;

-- what an UPDATE evaluates once
INSERT INTO sink VALUES ('20', 1);
DELETE FROM sink WHERE id = '20' RETURNING idem_claim('u', id) AS is_new;
UPDATE sink SET times = 2 FROM idem_try_claim('u', '21') AS c WHERE id = '3' AND c.outcome = 'claimed' RETURNING id, times;
WITH c AS (SELECT idem_claim('u', '22') AS mine) UPDATE sink SET times = 3 FROM c WHERE id = '3' AND mine RETURNING id, times;
-- but not for a claim elsewhere in it
EXPLAIN (COSTS OFF) UPDATE sink SET times = 0 WHERE idem_claim('u', id);
EXPLAIN (COSTS OFF) UPDATE sink SET times = 0 WHERE idem_claim('u', id) RETURNING idem_claim('u', id);
EXPLAIN (COSTS OFF) UPDATE sink SET times = 0 FROM idem_try_claim('u', '23') AS c WHERE idem_claim('u', id);

DROP TABLE sink;
DROP FUNCTION once, pay(int);
TRUNCATE idem_claims;
