-- A run (of a workflow, an agent, a report) that many triggers ask for at once, under one
-- key. The first trigger creates the run, and the others get its id. Each trigger then puts
-- its data into a buffer in Redis under that id.
--
-- Problem: with a lock (SETNX) and polling, the owner of the lock dies or outlives its
-- lock. Then the table has one run and the buffer another.
-- Solution: the first trigger claims the key in the transaction that creates the run. The
-- other triggers sleep until that transaction ends, and read the id that it stored.
-- Use it when many callers need the same result and creating the result is one short
-- transaction.
--
-- To copy: run_of(). The table stands for yours.

INSERT INTO idem_scopes (scope, ttl) VALUES ('run', '1 day');

CREATE TABLE runs (
	id uuid PRIMARY KEY DEFAULT gen_random_uuid(),
	tenant text NOT NULL, key text NOT NULL, started_at timestamptz NOT NULL DEFAULT now()
);

-- A trigger that arrives while another trigger creates the run sleeps until the other
-- commits. If the other crashes, its claim is rolled back with its transaction, and one of
-- the waiters creates the run. A trigger that has waited for "wait" gets ID503: it has
-- written nothing, and can be sent again.
CREATE FUNCTION run_of(tenant text, key text, wait interval DEFAULT '10 s') RETURNS uuid
LANGUAGE plpgsql AS $$
DECLARE
	run uuid;
BEGIN
	IF idem_claim(tenant, key, 'run', wait => wait) THEN
		INSERT INTO runs (tenant, key) VALUES (tenant, key) RETURNING id INTO run;
		PERFORM idem_complete(to_jsonb(run));
	END IF;
	RETURN idem_result() #>> '{}';
END $$;
