# shellcheck shell=bash
#
# Figures 1 and 2: what a claim costs in a stored procedure. 200,000 requests are claimed
# one by one in a PL/pgSQL loop, in one transaction, into an empty table; then the same ones
# again, as duplicates. Against the same loop with the hand-written statement. The loop is
# part of both times.

create_loops()
{
	sql "$database" <<-'SQL'
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
	SQL
}

measure()
{
	local claims ids round side

	claims=$(size 2000 200000 200000)
	new_database
	create_loops
	for round in $(seq "$(size 1 5 15)"); do
		for ids in UUIDv4 UUIDv7; do
			sql "$database" -c 'TRUNCATE idem_claims, hand_written' \
				-c "CALL make_requests('$ids', $claims)" -c 'VACUUM ANALYZE requests' -c CHECKPOINT
			for side in $(sides "$round" idem hand_written); do
				record 1 "fresh claim, $ids" "$side" "$(value "SELECT loop_$side($claims)")"
			done
			for side in $(sides "$round" idem hand_written); do
				record 2 "duplicate, $ids" "$side" "$(value "SELECT loop_$side(0)")"
			done
		done
	done
}
