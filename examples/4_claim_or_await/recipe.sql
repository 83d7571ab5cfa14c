-- A run (of a workflow, an agent, a report) that many triggers ask for at once, under one
-- key. The first makes it, the rest get its id. What they bring is buffered in Redis
-- under that id, so that the table and the buffer never speak of different runs.

INSERT INTO idem_scopes (scope, ttl) VALUES ('run', '1 day');

CREATE TABLE runs (
	id uuid PRIMARY KEY DEFAULT gen_random_uuid(),
	tenant text NOT NULL, key text NOT NULL, started_at timestamptz NOT NULL DEFAULT now()
);

-- Whoever comes while another trigger makes the run sleeps until that has committed. If it
-- crashes instead, its claim is gone with its transaction, and one of those who wait makes
-- the run. The safety net is wait: after that ID503 is raised, nothing was done, and the
-- trigger can be sent again.
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
