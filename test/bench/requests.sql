-- Requests of random users to claim, and checks for the figures

-- A version 7 UUID (RFC 9562) with this time
CREATE FUNCTION uuidv7(at timestamptz) RETURNS text LANGUAGE sql VOLATILE AS $$
	SELECT encode(set_bit(set_bit(overlay(uuid_send(gen_random_uuid())
		PLACING substring(int8send(floor(extract(epoch FROM at) * 1000)::bigint) FROM 3) FROM 1 FOR 6),
		52, 1), 53, 1), 'hex')::uuid::text
$$;

-- Both sides get the same requests in the same order.
CREATE TABLE requests (i int PRIMARY KEY, user_id text NOT NULL, request_id text NOT NULL);

-- 100,000 users whose ids have 8 to 15 characters. Rows and index entries are aligned to 8 bytes:
-- if all ids had the same length, one byte more could cost 8 bytes in each row, or none.
CREATE FUNCTION user_id(n int) RETURNS text LANGUAGE sql IMMUTABLE AS $$
	SELECT left(md5(n::text), 8 + n % 8)
$$;

-- Version 7 ids, as if 20,000 requests arrived each second from this time on
CREATE PROCEDURE make_requests(ids text, number int, since timestamptz DEFAULT now()) LANGUAGE plpgsql AS $$
BEGIN
	TRUNCATE requests;
	INSERT INTO requests
	SELECT i, user_id((random() * 100000)::int),
		CASE ids
			WHEN 'UUIDv4' THEN gen_random_uuid()::text
			WHEN 'UUIDv7' THEN uuidv7(since + i * interval '50 us')
		END
	FROM generate_series(1, number) AS i;
END $$;

-- Claims all requests on both sides in order, each in a transaction of its own, since live use
-- fills the tables in that way. The size on disk depends on it: claims of one transaction would
-- have the same created_at, and the index on it would be far smaller. For
-- synchronous_commit = off.
CREATE PROCEDURE claim_requests() LANGUAGE plpgsql AS $$
DECLARE
	users text[] := array_agg(user_id ORDER BY i) FROM requests;
	requests text[] := array_agg(request_id ORDER BY i) FROM requests;
BEGIN
	FOR i IN 1 .. cardinality(users) LOOP
		PERFORM expect('claimed', idem_claim(users[i], requests[i])::int, 1);
		COMMIT;
	END LOOP;
	FOR i IN 1 .. cardinality(users) LOOP
		INSERT INTO hand_written (user_id, request_id) VALUES (users[i], requests[i])
		ON CONFLICT DO NOTHING;
		PERFORM expect('claimed', FOUND::int, 1);
		COMMIT;
	END LOOP;
END $$;

-- Makes new requests and claims them in this way
CREATE PROCEDURE load(ids text, number int, since timestamptz) LANGUAGE plpgsql AS $$
DECLARE
	chunk constant int := 100000;
	loaded int := 0;
BEGIN
	WHILE loaded < number LOOP
		CALL make_requests(ids, least(chunk, number - loaded), since + loaded * interval '50 us');
		COMMIT;
		CALL claim_requests();
		loaded := loaded + chunk;
	END LOOP;
END $$;

-- Checks that both sides have done the same work; otherwise the ratio means nothing
CREATE FUNCTION expect(what text, counted bigint, expected bigint) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
	IF counted IS DISTINCT FROM expected THEN
		RAISE '%: % instead of %', what, counted, expected;
	END IF;
END $$;
