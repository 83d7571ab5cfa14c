# shellcheck shell=bash
#
# Figure 17: idem_call(), compared with the four lines that it replaces: idem_claim() with a
# fingerprint, the work, idem_complete() and idem_result(), in a PL/pgSQL function. Both are
# called in a transaction a request. The work is next to nothing, and commits do not wait for the
# disk, since these times would hide the difference. Also replays, and both in the portable
# edition.

: "${database?}"

create_calls()
{
	sql "$database" <<-'SQL'
		CREATE FUNCTION pay(account int, amount numeric) RETURNS jsonb LANGUAGE plpgsql AS $$
		BEGIN
			RETURN jsonb_build_object('paid', amount);
		END $$;

		CREATE FUNCTION pay_by_hand(u text, r text, account int, amount numeric) RETURNS jsonb LANGUAGE plpgsql AS $$
		BEGIN
			IF idem_claim(u, r, fingerprint => idem_fingerprint(jsonb_build_object('account', account, 'amount', amount))) THEN
				PERFORM idem_complete(jsonb_build_object('paid', amount));
			END IF;
			RETURN idem_result();
		END $$;

		CREATE PROCEDURE loop_call(users text[], requests text[]) LANGUAGE plpgsql AS $$
		BEGIN
			FOR i IN 1 .. cardinality(users) LOOP
				PERFORM idem_call(users[i], requests[i], 'pay(int, numeric)', jsonb_build_object('account', 1, 'amount', 30));
				COMMIT;
			END LOOP;
		END $$;

		CREATE PROCEDURE loop_by_hand(users text[], requests text[]) LANGUAGE plpgsql AS $$
		BEGIN
			FOR i IN 1 .. cardinality(users) LOOP
				PERFORM pay_by_hand(users[i], requests[i], 1, 30);
				COMMIT;
			END LOOP;
		END $$;

		CREATE PROCEDURE measure(side text, INOUT microseconds float8) LANGUAGE plpgsql AS $$
		DECLARE
			users text[] := array_agg(user_id ORDER BY i) FROM requests;
			requests text[] := array_agg(request_id ORDER BY i) FROM requests;
			begun timestamptz := clock_timestamp();
			stored bigint;
		BEGIN
			IF side = 'idem' THEN
				CALL loop_call(users, requests);
			ELSE
				CALL loop_by_hand(users, requests);
			END IF;
			microseconds := extract(epoch FROM clock_timestamp() - begun) * 1e6 / cardinality(users);
			SELECT count(*) INTO stored FROM idem_claims WHERE result = '{"paid": 30}';
			PERFORM expect('responses', stored, cardinality(users));
		END $$;
	SQL
}

measure_edition()
{
	local name=$1 requests=$2 rounds=$3
	local ids round side

	sql postgres -c "ALTER DATABASE $database SET synchronous_commit = off"
	create_calls
	for round in $(seq "$rounds"); do
		for ids in UUIDv4 UUIDv7; do
			sql "$database" -c "CALL make_requests('$ids', $requests)"
			for side in $(sides "$round" idem by_hand); do
				sql "$database" -c 'TRUNCATE idem_claims' -c CHECKPOINT
				record 17 "executed, $ids$name" "$side" "$(value "CALL measure('$side', NULL)")"
				record 17 "replayed, $ids$name" "$side" "$(value "CALL measure('$side', NULL)")"
			done
		done
	done
}

measure()
{
	new_database
	measure_edition '' "$(size 1000 20000 100000)" "$(size 1 5 9)"
	new_database
	sql "$database" -c 'DROP EXTENSION idem' -c 'CREATE EXTENSION idem_portable'
	measure_edition ', portable' "$(size 200 2000 10000)" "$(size 1 5 9)"
}
