# shellcheck shell=bash
#
# Figure 11: how long after the holder settles a waiter has its answer. One session claims, and
# settles at a random moment, while another waits in its claim of the same request. Measured from
# just before the COMMIT that settles until the waiter goes on, by the clock of the server.
#
#	transaction  the transaction of the holder ends; compared with an INSERT ... ON CONFLICT DO
#	             NOTHING that waits for that of another session
#	lease        the holder completes its lease; compared with a table that the holder updates
#	             and the waiter polls every 20 ms
#
# The commit waits for the disk, and is part of the time. So its own time is shown, too: from
# before the COMMIT until the holder goes on.

: "${database?}"

create_sessions()
{
	sql "$database" <<-'SQL'
		CREATE TABLE committed (turn int PRIMARY KEY, begun timestamptz NOT NULL, done timestamptz NOT NULL);
		CREATE TABLE answered (turn int PRIMARY KEY, at timestamptz NOT NULL);
		-- Turns that are held, and waited for: the other session sees them at once.
		CREATE SEQUENCE held MINVALUE 0;
		CREATE SEQUENCE awaited MINVALUE 0;

		CREATE PROCEDURE await(kind text, side text, turns int) LANGUAGE plpgsql AS $$
		DECLARE
			claimed boolean;
			answer_at timestamptz;
			paid jsonb;
		BEGIN
			FOR turn IN 1 .. turns LOOP
				WHILE (SELECT last_value < turn FROM held) LOOP
					PERFORM pg_sleep(0.0005);
				END LOOP;
				PERFORM setval('awaited', turn);
				IF side = 'idem' THEN
					claimed := idem_claim(kind, turn::text, wait => '1 min');
				ELSIF kind = 'transaction' THEN
					INSERT INTO hand_written (user_id, request_id) VALUES (kind, turn::text)
					ON CONFLICT DO NOTHING;
					claimed := FOUND;
				ELSE
					LOOP
						SELECT result INTO paid FROM hand_written_results
						WHERE user_id = kind AND request_id = turn::text;
						EXIT WHEN paid IS NOT NULL;
						PERFORM pg_sleep(0.020);
					END LOOP;
					claimed := false;
				END IF;
				answer_at := clock_timestamp();
				PERFORM expect('claimed by the waiter', claimed::int, 0);
				IF kind = 'lease' AND side = 'idem' THEN
					paid := idem_result();
				END IF;
				IF kind = 'lease' THEN
					PERFORM expect('result', paid::bigint, turn);
				END IF;
				INSERT INTO answered VALUES (turn, answer_at);
				COMMIT;
			END LOOP;
		END $$;

		-- Returns when the other session sleeps in the wait that is measured
		CREATE PROCEDURE until_awaited(this_turn int, waiter int, event_type text) LANGUAGE plpgsql AS $$
		DECLARE
			current_type text;
		BEGIN
			LOOP
				PERFORM pg_stat_clear_snapshot();
				SELECT wait_event_type INTO current_type FROM pg_stat_activity WHERE pid = waiter;
				IF NOT FOUND THEN
					RAISE 'the waiter is gone';
				END IF;
				EXIT WHEN current_type = event_type AND (SELECT last_value = this_turn FROM awaited);
				PERFORM pg_sleep(0.0005);
			END LOOP;
		END $$;

		CREATE PROCEDURE settle(kind text, side text, turns int, waiter int) LANGUAGE plpgsql AS $$
		DECLARE
			waits_in text := CASE WHEN kind = 'transaction' THEN 'Lock' WHEN side = 'idem' THEN 'Extension' ELSE 'Timeout' END;
			lease_token bigint;
			commit_begun timestamptz;
			commit_done timestamptz;
		BEGIN
			FOR turn IN 1 .. turns LOOP
				IF kind = 'lease' AND side = 'idem' THEN
					SELECT token INTO lease_token FROM idem_lease(kind, turn::text, lease => '1 hour');
					COMMIT;
				ELSIF kind = 'lease' THEN
					INSERT INTO hand_written_results (user_id, request_id) VALUES (kind, turn::text);
					COMMIT;
				ELSIF side = 'idem' THEN
					PERFORM expect('claimed by the holder', idem_claim(kind, turn::text)::int, 1);
				ELSE
					INSERT INTO hand_written (user_id, request_id) VALUES (kind, turn::text);
				END IF;
				PERFORM setval('held', turn);
				CALL until_awaited(turn, waiter, waits_in);
				PERFORM pg_sleep(random() * 0.020);
				IF kind = 'lease' AND side = 'idem' THEN
					PERFORM idem_complete(kind, turn::text, to_jsonb(turn), lease_token);
				ELSIF kind = 'lease' THEN
					UPDATE hand_written_results SET result = to_jsonb(turn)
					WHERE user_id = kind AND request_id = turn::text;
				END IF;
				commit_begun := clock_timestamp();
				COMMIT;
				commit_done := clock_timestamp();
				INSERT INTO committed VALUES (turn, commit_begun, commit_done);
				COMMIT;
			END LOOP;
		END $$;
	SQL
}

# hand_over KIND SIDE TURNS
hand_over()
{
	local waiter

	sql "$database" -c 'TRUNCATE committed, answered, idem_claims, hand_written, hand_written_results' \
		-c "SELECT setval('held', 0), setval('awaited', 0)" \
		-c CHECKPOINT >/dev/null
	coproc waiting {
		sql "$database" -A -t -c 'SELECT pg_backend_pid()' -c "CALL await('$1', '$2', $3)"
	}
	# shellcheck disable=SC2154 # coproc sets it
	waiter=$waiting_PID
	read -r pid <&"${waiting[0]}" || die "the waiter does not start"
	sql "$database" -c "CALL settle('$1', '$2', $3, $pid)"
	wait "$waiter"
	value "SELECT expect('hand-overs', count(*), $3) FROM committed JOIN answered USING (turn)
		WHERE at > begun" >/dev/null
}

measure()
{
	local kind other percent round side turns pid

	turns=$(size 20 150 500)
	new_database
	create_sessions
	for round in $(seq "$(size 1 3 9)"); do
		for kind in transaction lease; do
			other=hand_written
			[ "$kind" = transaction ] || other=poll_20_ms
			for side in $(sides "$round" idem "$other"); do
				hand_over "$kind" "$side" "$turns"
				for percent in 50 99; do
					record 11 "hand-over of a $kind, p$percent" "$side" \
						"$(value "SELECT percentile_cont(0.$percent) WITHIN GROUP (ORDER BY extract(epoch FROM at - begun) * 1000)
							FROM committed JOIN answered USING (turn)")"
				done
				record 11 "commit of a $kind, p99" "$side" \
					"$(value "SELECT percentile_cont(0.99) WITHIN GROUP (ORDER BY extract(epoch FROM done - begun) * 1000)
						FROM committed")"
			done
		done
	done
	remark 11 "p50 and p99 are of $turns hand-overs a run. The commit that settles is part of them, and waits for the disk; its own p99 is beside them."
}
