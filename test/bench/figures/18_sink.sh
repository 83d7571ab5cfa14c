# shellcheck shell=bash
#
# Figure 18: what the trigger of a sink costs. One INSERT ... SELECT of 100,000 rows into an
# empty table, then the same rows again, as redelivered ones. Compared with a table that has no
# trigger, which takes them twice; and with a unique index on the table and ON CONFLICT DO
# NOTHING. Also for the portable edition, with a tenth of the rows.

: "${database?}"

create_sinks()
{
	sql "$1" <<-'SQL'
		CREATE TABLE sink_idem (customer text, request uuid, item text);
		CREATE TABLE sink_plain_insert (LIKE sink_idem);
		CREATE TABLE sink_unique_index (LIKE sink_idem, UNIQUE (request, customer));
		CREATE TRIGGER once BEFORE INSERT ON sink_idem
		FOR EACH ROW EXECUTE FUNCTION idem_skip_duplicates('sink', 'customer', 'request');

		CREATE FUNCTION sink(side text, expected bigint) RETURNS float8 LANGUAGE plpgsql AS $$
		DECLARE
			begun timestamptz := clock_timestamp();
			inserted bigint;
			microseconds float8;
		BEGIN
			EXECUTE format('INSERT INTO sink_%s SELECT user_id, request_id::uuid, %L FROM requests ORDER BY i ON CONFLICT DO NOTHING', side, 'book');
			GET DIAGNOSTICS inserted = ROW_COUNT;
			microseconds := extract(epoch FROM clock_timestamp() - begun) * 1e6 / (SELECT count(*) FROM requests);
			PERFORM expect('inserted', inserted, expected);
			RETURN microseconds;
		END $$;
	SQL
}

# measure_sinks DATABASE ROWS ROUNDS [EDITION, ]
measure_sinks()
{
	local ids round side other value

	for round in $(seq "$3"); do
		for ids in UUIDv4 UUIDv7; do
			sql "$1" -c 'TRUNCATE idem_claims, sink_idem, sink_plain_insert, sink_unique_index' \
				-c "CALL make_requests('$ids', $2)" -c 'VACUUM ANALYZE requests' -c CHECKPOINT
			for side in $(sides "$round" idem plain_insert unique_index); do
				value=$(sql "$1" -A -t -c "SELECT sink('$side', $2)")
				for other in plain_insert unique_index; do
					[ "$side" != idem ] && [ "$side" != "$other" ] ||
						record 18 "${4:-}row of a sink, $ids, $other" "$side" "$value"
				done
			done
			for side in $(sides "$round" idem unique_index); do
				record 18 "${4:-}redelivered row, $ids" "$side" "$(sql "$1" -A -t -c "SELECT sink('$side', 0)")"
			done
		done
	done
}

measure()
{
	new_database
	create_sinks "$database"
	measure_sinks "$database" "$(size 1000 100000 100000)" "$(size 1 5 15)"

	sql postgres -c 'SET client_min_messages = error' \
		-c 'DROP DATABASE IF EXISTS bench_portable WITH (FORCE)' -c 'CREATE DATABASE bench_portable'
	sql bench_portable -c 'CREATE EXTENSION idem_portable' -f tree/test/bench/requests.sql
	create_sinks bench_portable
	measure_sinks bench_portable "$(size 100 10000 10000)" "$(size 1 3 9)" 'portable: '
	sql postgres -c 'DROP DATABASE bench_portable WITH (FORCE)'
}
