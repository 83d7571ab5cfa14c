-- What the clients of a storm work with, in each edition's database.

-- A storm lasts up to an hour: what lives for a day is there at its end.
INSERT INTO idem_scopes (scope, ttl, failed, expired) VALUES
	('brief', '2 s', 'terminal', 'reclaim'),
	('guard', '2 s', 'terminal', 'protect'),
	('retry', '2 s', 'retryable', 'protect'),
	('leases', '3 s', 'terminal', 'protect'),
	('found', '1 day', 'terminal', 'protect'),
	('batch', '2 s', 'terminal', 'protect'),
	('long', '1 day', 'terminal', 'protect'),
	('call', '2 s', 'terminal', 'reclaim'),
	('sink', '1 day', 'terminal', 'protect');
-- As if this scope had always existed: guarded_since can only be set by a replica.
SET session_replication_role = replica;
INSERT INTO idem_scopes (scope, ttl, key_time, guarded_since) VALUES ('timed', '2 s', 'uuidv7', '-infinity');
RESET session_replication_role;

-- The work: one row each time that a request is executed, written by the transaction of the claim
CREATE TABLE executions (
	id text NOT NULL,
	scope text NOT NULL,
	user_id text NOT NULL,
	request_id text NOT NULL,
	kind text NOT NULL,				-- done, or failed
	result text,					-- what was stored
	called_at timestamptz NOT NULL,	-- before the claim
	claimed_at timestamptz NOT NULL,	-- after it
	remembered_until timestamptz NOT NULL	-- what the claim promised
);
CREATE INDEX ON executions (request_id);
CREATE SEQUENCE calls;

-- One row for each write under a lease; numbered while the fence holds the row
CREATE TABLE lease_writes (
	seq bigserial,
	scope text NOT NULL,
	user_id text NOT NULL,
	request_id text NOT NULL,
	token bigint NOT NULL
);

CREATE TABLE sink (user_id text, request_id text, id text);
CREATE TRIGGER once BEFORE INSERT ON sink
	FOR EACH ROW EXECUTE FUNCTION idem_skip_duplicates('sink', 'user_id', 'request_id');

-- Claims, works and settles; returns outcome and result
CREATE FUNCTION work(execution text, "user" text, request text, "in" text, wait interval, ending text)
RETURNS TABLE (outcome text, result text) LANGUAGE plpgsql AS $$
DECLARE
	called constant timestamptz := clock_timestamp();
	answer record;
BEGIN
	SELECT * INTO STRICT answer
	FROM idem_try_claim("user", request, "in", sha256(convert_to(request, 'UTF8')), wait);
	IF answer.outcome = 'claimed' THEN
		INSERT INTO executions
		VALUES (execution, "in", "user", request, CASE ending WHEN 'failed' THEN 'failed' ELSE 'done' END,
			CASE WHEN ending <> 'marker' THEN execution END, called, clock_timestamp(), answer.expires_at);
		IF ending = 'short' THEN
			PERFORM idem_complete(to_jsonb(execution));
		ELSIF ending = 'done' THEN
			PERFORM idem_complete("user", request, to_jsonb(execution), scope => "in");
		ELSIF ending = 'failed' THEN
			PERFORM idem_fail("user", request, to_jsonb(execution), scope => "in");
		END IF;
	END IF;
	RETURN QUERY SELECT answer.outcome::text, answer.result #>> '{}';
END $$;

-- For idem_call
CREATE FUNCTION pay("user" text, request text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
	execution constant text := 'call-' || nextval('calls');
BEGIN
	INSERT INTO executions
	SELECT execution, 'call', "user", request, 'done', execution, clock_timestamp(), clock_timestamp(), expires_at
	FROM idem_lookup("user", request, 'call');
	RETURN execution;
END $$;

CREATE FUNCTION work_many(execution text, users text[], requests text[], "in" text, wait interval)
RETURNS TABLE (ordinal int, outcome text, result text) LANGUAGE plpgsql AS $$
DECLARE
	called constant timestamptz := clock_timestamp();
	answers jsonb;
BEGIN
	SELECT jsonb_agg(jsonb_build_array(m.ordinal, m.outcome, m.result)) INTO answers
	FROM idem_claim_many(users, requests, "in", wait => wait) AS m;
	-- Every second one stores a result, the others are markers.
	INSERT INTO executions
	SELECT execution || '.' || (a->>0), "in", users[(a->>0)::int], requests[(a->>0)::int], 'done',
		CASE (a->>0)::int % 2 WHEN 0 THEN execution || '.' || (a->>0) END, called, clock_timestamp(), l.expires_at
	FROM jsonb_array_elements(answers) AS a, idem_lookup(users[(a->>0)::int], requests[(a->>0)::int], "in") AS l
	WHERE a->>1 = 'claimed';
	PERFORM idem_complete(users[(a->>0)::int], requests[(a->>0)::int], to_jsonb(execution || '.' || (a->>0)), scope => "in")
	FROM jsonb_array_elements(answers) AS a
	WHERE a->>1 = 'claimed' AND (a->>0)::int % 2 = 0;
	RETURN QUERY SELECT (a->>0)::int, a->>1, a->>2 FROM jsonb_array_elements(answers) AS a;
END $$;

-- A write of the holder of a lease
CREATE FUNCTION write_under_lease("user" text, request text, "in" text, held bigint) RETURNS void LANGUAGE sql AS $$
	SELECT idem_fence("user", request, held, "in");
	INSERT INTO lease_writes (scope, user_id, request_id, token) VALUES ("in", "user", request, held);
$$;

-- The last transaction of the holder: executes, unless a holder before has, and tells which
-- execution it was
CREATE FUNCTION work_under_lease(execution text, "user" text, request text, "in" text, held bigint)
RETURNS text LANGUAGE plpgsql AS $$
DECLARE
	called constant timestamptz := clock_timestamp();
	done text;
BEGIN
	PERFORM write_under_lease("user", request, "in", held);
	IF "in" = 'found' THEN
		SELECT id INTO done FROM executions e
		WHERE e.request_id = request AND e.user_id = "user" AND e.scope = "in" AND e.kind = 'done';
		IF FOUND THEN
			RETURN done;
		END IF;
	END IF;
	INSERT INTO executions
	SELECT execution, "in", "user", request, 'done', execution, called, clock_timestamp(), expires_at
	FROM idem_lookup("user", request, "in");
	RETURN execution;
END $$;
