-- Loops that claim all requests one by one, in one transaction. They return microseconds a
-- claim, including the loop.

CREATE FUNCTION loop_idem(expected int) RETURNS float8 LANGUAGE plpgsql AS $$
DECLARE
	users text[] := array_agg(user_id ORDER BY i) FROM requests;
	requests text[] := array_agg(request_id ORDER BY i) FROM requests;
	begun timestamptz := clock_timestamp();
	claimed int := 0;
BEGIN
	FOR i IN 1 .. cardinality(users) LOOP
		IF idem_claim(users[i], requests[i]) THEN
			claimed := claimed + 1;
		END IF;
	END LOOP;
	PERFORM expect('claimed', claimed, expected);
	RETURN extract(epoch FROM clock_timestamp() - begun) * 1e6 / cardinality(users);
END $$;

CREATE FUNCTION loop_hand_written(expected int) RETURNS float8 LANGUAGE plpgsql AS $$
DECLARE
	users text[] := array_agg(user_id ORDER BY i) FROM requests;
	requests text[] := array_agg(request_id ORDER BY i) FROM requests;
	begun timestamptz := clock_timestamp();
	claimed int := 0;
BEGIN
	FOR i IN 1 .. cardinality(users) LOOP
		INSERT INTO hand_written (user_id, request_id) VALUES (users[i], requests[i])
		ON CONFLICT DO NOTHING;
		IF FOUND THEN
			claimed := claimed + 1;
		END IF;
	END LOOP;
	PERFORM expect('claimed', claimed, expected);
	RETURN extract(epoch FROM clock_timestamp() - begun) * 1e6 / cardinality(users);
END $$;
