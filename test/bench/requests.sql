-- Requests to claim, of random users, and what the figures check with.

-- A UUID of version 7 (RFC 9562) as of a moment
CREATE FUNCTION uuidv7(at timestamptz) RETURNS text LANGUAGE sql VOLATILE AS $$
	SELECT encode(set_bit(set_bit(overlay(uuid_send(gen_random_uuid())
		PLACING substring(int8send(floor(extract(epoch FROM at) * 1000)::bigint) FROM 3) FROM 1 FOR 6),
		52, 1), 53, 1), 'hex')::uuid::text
$$;

-- Both sides get the same ones, in the same order: that in which they come.
CREATE TABLE requests (i int PRIMARY KEY, user_id text NOT NULL, request_id text NOT NULL);

-- Version 7: as if 20,000 a second came from a moment on
CREATE PROCEDURE make_requests(ids text, number int, since timestamptz DEFAULT now()) LANGUAGE plpgsql AS $$
BEGIN
	TRUNCATE requests;
	INSERT INTO requests
	SELECT i, 'user ' || (random() * 100000)::int,
		CASE ids
			WHEN 'UUIDv4' THEN gen_random_uuid()::text
			WHEN 'UUIDv7' THEN uuidv7(since + i * interval '50 us')
		END
	FROM generate_series(1, number) AS i;
END $$;

-- Both sides must have done the same work, or the ratio says nothing.
CREATE FUNCTION expect(what text, counted bigint, expected bigint) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
	IF counted IS DISTINCT FROM expected THEN
		RAISE '%: % instead of %', what, counted, expected;
	END IF;
END $$;
