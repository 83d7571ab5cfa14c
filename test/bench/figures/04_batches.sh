# shellcheck shell=bash
#
# Figure 4: a batch of new keys in the order of chance, as a consumer gets them, into a
# table of 100,000: idem_claim_many() against one INSERT ... SELECT FROM unnest() ON
# CONFLICT DO NOTHING, which does not tell which of them are new.

create_batches()
{
	sql "$database" <<-'SQL'
		CREATE FUNCTION batch(side text) RETURNS float8 LANGUAGE plpgsql AS $$
		DECLARE
			users text[] := array_agg(user_id ORDER BY i) FROM requests;
			requests text[] := array_agg(request_id ORDER BY i) FROM requests;
			begun timestamptz := clock_timestamp();
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
			PERFORM expect('claimed', claimed, cardinality(users));
			RETURN extract(epoch FROM clock_timestamp() - begun) * 1e6 / cardinality(users);
		END $$;
	SQL
}

measure()
{
	local keys round side

	new_database
	create_batches
	for keys in 1000 10000; do
		sql "$database" -c "CALL make_requests('UUIDv4', $(size 1000 100000 100000))" \
			-c 'TRUNCATE idem_claims, hand_written' \
			-c "SELECT batch('idem'), batch('hand_written')" -c CHECKPOINT >/dev/null
		for round in $(seq "$(size 1 25 75)"); do
			sql "$database" -c "CALL make_requests('UUIDv4', $keys)"
			for side in $(sides "$round" idem hand_written); do
				record 4 "batch of $keys keys" "$side" "$(value "SELECT batch('$side')")"
			done
		done
	done
}
