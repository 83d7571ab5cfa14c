-- A group with generated ids, its members and its conversation. A leader creates it in
-- several transactions, while any number of followers ask for the same group.
--
-- Problem: with a table of keys, the session that inserts the key leads and the others poll.
-- A leader that dies leaves the key "in progress" for ever. A leader that was replaced, and
-- then wakes up, writes a second time.
-- Solution: the key is a lease that carries the generated ids. Each step of the leader starts
-- with a fence, so that a leader that was replaced writes nothing. A follower that finds the
-- work finished heals the request instead of waiting.
-- Use it when the work needs several transactions, or calls other services between them.
--
-- To copy: begin_group(), the fence at the start of each step, complete_group() or
-- fail_group(), and heal_group(). The tables stand for yours.

-- lapsed = reclaim: a leader whose lease has lapsed is replaced. failed = terminal: a failed
-- attempt stays failed.
INSERT INTO idem_scopes (scope, ttl, lapsed, failed) VALUES ('create_group', '1 day', 'reclaim', 'terminal');

CREATE TABLE users (name text PRIMARY KEY);
CREATE TABLE groups (id uuid PRIMARY KEY, title text NOT NULL);
CREATE TABLE members (group_id uuid REFERENCES groups ON DELETE CASCADE, member text REFERENCES users, PRIMARY KEY (group_id, member));
CREATE TABLE conversations (id uuid PRIMARY KEY, group_id uuid NOT NULL REFERENCES groups ON DELETE CASCADE);

-- Tells a caller whether it leads. Commit this call at once. The leader gets a token, and
-- every caller gets the ids.
CREATE FUNCTION begin_group(creator text, request text, wait interval, lease interval,
	OUT outcome idem_outcome, OUT token bigint, OUT ids jsonb, OUT error jsonb) LANGUAGE plpgsql AS $$
DECLARE
	fresh_ids constant jsonb := jsonb_build_object('group', gen_random_uuid(), 'conversation', gen_random_uuid());
	claim record;
BEGIN
	SELECT * INTO claim
	FROM idem_lease(creator, request, scope => 'create_group', wait => wait, lease => lease, progress => fresh_ids);
	outcome := claim.outcome;
	token := claim.token;
	error := CASE outcome WHEN 'failed' THEN claim.result END;
	-- The next leader goes on with the ids of the leader before it.
	ids := CASE outcome WHEN 'completed' THEN claim.result
		WHEN 'claimed' THEN coalesce(claim.progress, fresh_ids) ELSE claim.progress END;
END $$;

-- The leader's steps, each a transaction. Each begins with the fence: a leader that was
-- replaced gets ID410 and writes nothing. Each can be repeated, because the ids are the same.
CREATE FUNCTION add_group(creator text, request text, token bigint, ids jsonb, title text) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
	PERFORM idem_fence(creator, request, token, 'create_group');
	INSERT INTO groups VALUES ((ids->>'group')::uuid, title) ON CONFLICT DO NOTHING;
END $$;

CREATE FUNCTION add_members(creator text, request text, token bigint, ids jsonb, members text[]) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
	PERFORM idem_fence(creator, request, token, 'create_group');
	INSERT INTO members SELECT (ids->>'group')::uuid, unnest(members) ON CONFLICT DO NOTHING;
END $$;

CREATE FUNCTION add_conversation(creator text, request text, token bigint, ids jsonb) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
	PERFORM idem_fence(creator, request, token, 'create_group');
	INSERT INTO conversations VALUES ((ids->>'conversation')::uuid, (ids->>'group')::uuid) ON CONFLICT DO NOTHING;
END $$;

CREATE FUNCTION complete_group(creator text, request text, token bigint, ids jsonb) RETURNS boolean
LANGUAGE sql AS $$
	SELECT idem_complete(creator, request, ids, token, 'create_group')
$$;

-- The attempt fails for good and leaves nothing behind. Every retry gets the error.
CREATE FUNCTION fail_group(creator text, request text, token bigint, ids jsonb, error jsonb) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
	PERFORM idem_fence(creator, request, token, 'create_group');
	DELETE FROM groups WHERE id = (ids->>'group')::uuid;
	PERFORM idem_fail(creator, request, error, token, 'create_group');
END $$;

-- A follower that finds the group complete settles the request itself, because the leader
-- may be dead.
CREATE FUNCTION heal_group(creator text, request text, ids jsonb, members text[]) RETURNS boolean
LANGUAGE plpgsql AS $$
BEGIN
	IF EXISTS (SELECT FROM conversations WHERE id = (ids->>'conversation')::uuid) AND
	   members <@ (SELECT array_agg(member) FROM members WHERE group_id = (ids->>'group')::uuid) THEN
		PERFORM idem_heal(creator, request, ids, 'create_group');
		RETURN true;
	END IF;
	RETURN false;
END $$;
