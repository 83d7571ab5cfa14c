# shellcheck shell=bash
#
# Figure 4: a batch of new keys in random order, as a consumer gets them, into a table of 100,000
# rows: idem_claim_many(), compared with one INSERT ... SELECT FROM unnest() ON CONFLICT DO
# NOTHING, which does not tell which keys are new. One session claims the 100,000 rows and then the
# batches, like that of a consumer: idem has found so many keys new that it no longer probes for
# each key of a batch. Beside it, each batch in a session of its own, where idem probes. No
# checkpoint happens during it: the cost of full pages in the WAL is part of figure 5.

: "${database?}"

create_batches()
{
	sql "$database" <<-'SQL'
		CREATE FUNCTION claim_batch(side text, users text[], requests text[]) RETURNS bigint LANGUAGE plpgsql AS $$
		DECLARE
			claimed bigint;
		BEGIN
			IF side = 'idem' THEN
				SELECT count(*) INTO claimed FROM idem_claim_many(users, requests)
				WHERE outcome = 'claimed';
			ELSE
				INSERT INTO hand_written (user_id, request_id)
				SELECT * FROM unnest(users, requests)
				ON CONFLICT DO NOTHING;
				GET DIAGNOSTICS claimed = ROW_COUNT;
			END IF;
			RETURN claimed;
		END $$;

		CREATE FUNCTION batch(side text) RETURNS float8 LANGUAGE plpgsql AS $$
		DECLARE
			users text[] := array_agg(user_id ORDER BY random()) FROM requests;
			requests text[] := array_agg(request_id ORDER BY random()) FROM requests;
			begun timestamptz;
			claimed bigint;
		BEGIN
			PERFORM claim_batch(side, ARRAY['first'], ARRAY[gen_random_uuid()::text]);
			begun := clock_timestamp();
			claimed := claim_batch(side, users, requests);
			PERFORM expect('claimed', claimed, cardinality(users));
			RETURN extract(epoch FROM clock_timestamp() - begun) * 1e6 / cardinality(users);
		END $$;

		CREATE TABLE batches (round int, side text, us float8);

		CREATE PROCEDURE run_batches(ids text, loaded int, keys int, rounds int) LANGUAGE plpgsql AS $$
		DECLARE
			sides text[] := '{idem,hand_written}';
		BEGIN
			TRUNCATE batches, idem_claims, hand_written;
			CALL make_requests(ids, loaded);
			COMMIT;
			PERFORM batch('idem'), batch('hand_written');
			COMMIT;
			FOR round IN 1 .. rounds LOOP
				CALL make_requests(ids, keys, clock_timestamp() + round * interval '1 min');
				COMMIT;
				FOR i IN 1 .. 2 LOOP
					INSERT INTO batches VALUES (round, sides[i], batch(sides[i]));
					COMMIT;
				END LOOP;
				sides := ARRAY[sides[2], sides[1]];
			END LOOP;
		END $$;
	SQL
}

measure()
{
	local ids keys round rounds side us

	new_database
	create_batches
	rounds=$(size 1 15 51)
	for ids in UUIDv4 UUIDv7; do
		for keys in 1000 10000; do
			sql "$database" -c "CALL run_batches('$ids', $(size 1000 100000 100000), $keys, $rounds)"
			while read -r side us; do
				record 4 "batch of $keys keys, $ids" "$side" "$us"
			done < <(value 'SELECT side, us FROM batches ORDER BY round' -F ' ')
			for round in $(seq "$rounds"); do
				sql "$database" -c "CALL make_requests('$ids', $keys, clock_timestamp() + interval '1 hour' + $round * interval '1 min')"
				for side in $(sides "$round" idem hand_written); do
					record 4 "batch of $keys keys, $ids, new session" "$side" "$(value "SELECT batch('$side')")"
				done
			done
		done
	done
}
