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
CREATE INDEX ON executions (claimed_at);
CREATE SEQUENCE calls;

-- until: until then the request must not be executed again, whatever idem said. (In scope "found" the
-- lease can end before that; then the next holder finds the execution.)
CREATE VIEW promised AS
SELECT e.*, e.ctid AS place, greatest(e.remembered_until, e.called_at + s.ttl) AS until,
	e.kind = 'done' OR s.failed = 'terminal' AS is_final
FROM executions e JOIN idem_scopes s USING (scope);

-- Executions of the last seconds that are still promised: how many, and the first of those whose claim is
-- not there. One statement has one snapshot, and the execution and its claim were committed together.
CREATE FUNCTION forgotten() RETURNS TABLE (looked_at bigint, forgotten text) LANGUAGE sql AS $$
	SELECT count(*), min(e.id) FILTER (WHERE NOT EXISTS (SELECT FROM idem_claims c
		WHERE c.request_id = e.request_id AND c.user_id = e.user_id AND c.scope = e.scope
			AND c.state::text = CASE e.kind WHEN 'failed' THEN 'failed' ELSE 'completed' END
			AND c.result #>> '{}' IS NOT DISTINCT FROM e.result AND c.expires_at >= e.until))
	FROM promised e
	WHERE e.is_final AND e.scope <> 'found' AND e.claimed_at > now() - interval '5 s' AND e.until > clock_timestamp();
$$;

-- One row for each write under a lease; numbered while the fence holds the row
CREATE TABLE lease_writes (
	seq bigserial,
	scope text NOT NULL,
	user_id text NOT NULL,
	request_id text NOT NULL,
	token bigint NOT NULL
);

-- One row for each claim or extension of a lease; numbered while its transaction holds the claim
CREATE TABLE leases (
	seq bigserial,
	scope text NOT NULL,
	user_id text NOT NULL,
	request_id text NOT NULL,
	token bigint NOT NULL,
	asked interval NOT NULL,		-- for how long
	called_at timestamptz NOT NULL,
	answered_at timestamptz NOT NULL DEFAULT clock_timestamp(),
	lease_until timestamptz NOT NULL,
	expires_at timestamptz			-- NULL: this is an extension
);

CREATE TABLE sink (user_id text, request_id text, id text, called_at timestamptz DEFAULT clock_timestamp());
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
	-- idem_call() has claimed before; the statement, which is the transaction, began before that.
	INSERT INTO executions
	SELECT execution, 'call', "user", request, 'done', execution, now(), clock_timestamp(), expires_at
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

-- Claims a lease; returns what a client needs
CREATE FUNCTION hold("user" text, request text, "in" text, wait interval, asked interval, progress jsonb)
RETURNS TABLE (outcome text, result text, token bigint, lease_until timestamptz, progress_before jsonb) LANGUAGE plpgsql AS $$
DECLARE
	called constant timestamptz := clock_timestamp();
	answer record;
BEGIN
	SELECT * INTO STRICT answer
	FROM idem_lease("user", request, scope => "in", wait => hold.wait, lease => asked, progress => hold.progress);
	IF answer.outcome = 'claimed' THEN
		INSERT INTO leases (scope, user_id, request_id, token, asked, called_at, lease_until, expires_at)
		VALUES ("in", "user", request, answer.token, asked, called, answer.lease_until, answer.expires_at);
	END IF;
	RETURN QUERY SELECT answer.outcome::text, answer.result #>> '{}', answer.token, answer.lease_until, answer.progress;
END $$;

CREATE FUNCTION extend("user" text, request text, "in" text, held bigint, asked interval) RETURNS void LANGUAGE sql AS $$
	INSERT INTO leases (scope, user_id, request_id, token, asked, called_at, lease_until)
	SELECT "in", "user", request, held, asked, clock_timestamp(), idem_extend("user", request, held, asked, '{"step": 1}', "in");
$$;

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

-- Settles in the transaction of the execution, which then knows what is promised from now on
CREATE FUNCTION settle_lease(execution text, "user" text, request text, "in" text, held bigint) RETURNS void LANGUAGE sql AS $$
	SELECT idem_complete("user", request, to_jsonb(execution), held, "in");
	UPDATE executions SET remembered_until = l.expires_at FROM idem_lookup("user", request, "in") AS l WHERE id = execution;
$$;
