# shellcheck shell=bash
#
# Figure 3: a claim and its response, 200 bytes of jsonb, in one transaction a request:
# idem_claim() and idem_complete(), compared with INSERT and UPDATE. Commits do not wait for the
# disk, since that time would hide all others. Also what is left for a vacuum: dead row versions,
# and dead line pointers; both sides prune pages meanwhile.

: "${database?}"

create_loops()
{
	sql "$database" <<-'SQL'
		CREATE PROCEDURE loop_idem(users text[], requests text[], response jsonb) LANGUAGE plpgsql AS $$
		BEGIN
			FOR i IN 1 .. cardinality(users) LOOP
				IF idem_claim(users[i], requests[i]) THEN
					PERFORM idem_complete(response);
				END IF;
				COMMIT;
			END LOOP;
		END $$;

		CREATE PROCEDURE loop_hand_written(users text[], requests text[], response jsonb) LANGUAGE plpgsql AS $$
		BEGIN
			FOR i IN 1 .. cardinality(users) LOOP
				INSERT INTO hand_written_results (user_id, request_id) VALUES (users[i], requests[i])
				ON CONFLICT DO NOTHING;
				IF FOUND THEN
					UPDATE hand_written_results SET result = response
					WHERE user_id = users[i] AND request_id = requests[i];
				END IF;
				COMMIT;
			END LOOP;
		END $$;

		CREATE PROCEDURE measure(side text, INOUT microseconds float8) LANGUAGE plpgsql AS $$
		DECLARE
			users text[] := array_agg(user_id ORDER BY i) FROM requests;
			requests text[] := array_agg(request_id ORDER BY i) FROM requests;
			response jsonb := jsonb_build_object('paid', repeat('x', 180));
			begun timestamptz := clock_timestamp();
			stored bigint;
		BEGIN
			PERFORM expect('bytes of jsonb', pg_column_size(response), 200);
			IF side = 'idem' THEN
				CALL loop_idem(users, requests, response);
			ELSE
				CALL loop_hand_written(users, requests, response);
			END IF;
			microseconds := extract(epoch FROM clock_timestamp() - begun) * 1e6 / cardinality(users);
			IF side = 'idem' THEN
				SELECT count(*) INTO stored FROM idem_claims WHERE result = response;
			ELSE
				SELECT count(*) INTO stored FROM hand_written_results WHERE result = response;
			END IF;
			PERFORM expect('responses', stored, cardinality(users));
		END $$;

		CREATE EXTENSION pgstattuple;
	SQL
}

measure()
{
	local requests round side table

	requests=$(size 1000 50000 200000)
	new_database
	create_loops
	sql postgres -c "ALTER DATABASE $database SET synchronous_commit = off"
	for round in $(seq "$(size 1 5 9)"); do
		sql "$database" -c "CALL make_requests('UUIDv7', $requests)" \
			-c 'TRUNCATE idem_claims, hand_written_results' -c CHECKPOINT
		for side in $(sides "$round" idem hand_written); do
			record 3 'claim and complete' "$side" "$(value "CALL measure('$side', NULL)")"
			table=idem_claims
			[ "$side" = idem ] || table=hand_written_results
			record 3 'dead tuples' "$side" \
				"$(value "SELECT dead_tuple_count / $requests.0 FROM pgstattuple('$table')")"
		done
	done
}
