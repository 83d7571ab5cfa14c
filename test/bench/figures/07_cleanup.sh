# shellcheck shell=bash
#
# Figure 7: one session removes 2 million expired claims (quick: fewer) in batches of 50,000, each
# in a transaction. Rows a second, and WAL a row. Compared with both forms of the hand-written
# DELETE. idem_cleanup_all() works like the worker: each batch begins where the previous one
# ended.
#
# The claims were made in the way of live use, see load() in requests.sql, and vacuumed, as by
# autovacuum; they are older than the latest checkpoint, and in shared buffers. Each run uses a
# fresh copy of the database. The keys do not matter: cleaning does not search for keys.

: "${database?}" "${mode?}"

create_functions()
{
	sql "$database" <<-'SQL'
		CREATE EXTENSION pg_prewarm;

		CREATE PROCEDURE clean(way text, expected int, INOUT rows_per_second float8, INOUT wal_bytes float8)
		LANGUAGE plpgsql AS $$
		DECLARE
			begun_at timestamptz := clock_timestamp();
			begun pg_lsn := pg_current_wal_insert_lsn();
			removed bigint;
			rows_left bigint;
		BEGIN
			IF way = 'idem' THEN
				CALL idem_cleanup_all(50000);
			ELSE
				LOOP
					CASE way
						WHEN 'hand_written_cleanup_in' THEN removed := hand_written_cleanup_in(interval '0');
						WHEN 'hand_written_cleanup_any' THEN removed := hand_written_cleanup_any(interval '0');
					END CASE;
					COMMIT;
					EXIT WHEN removed = 0;
				END LOOP;
			END IF;
			rows_per_second := expected / extract(epoch FROM clock_timestamp() - begun_at);
			wal_bytes := (pg_current_wal_insert_lsn() - begun) / expected;
			EXECUTE format('SELECT count(*) FROM %I',
				CASE way WHEN 'idem' THEN 'idem_claims' ELSE 'hand_written' END) INTO rows_left;
			PERFORM expect('rows left', rows_left, 0);
		END $$;
	SQL
}

# Makes a copy of the database "loaded", and reads it into shared buffers, for both sides alike
copy_database()
{
	sql postgres -c 'SET client_min_messages = error' \
		-c 'DROP DATABASE IF EXISTS bench WITH (FORCE)' -c 'CREATE DATABASE bench TEMPLATE loaded'
	sql "$database" -c "SELECT pg_prewarm(c.oid) FROM pg_class AS c
			WHERE c.relname ~ CASE '$1' WHEN 'idem' THEN '^idem_claims' ELSE '^hand_written(_pkey|_created_at)?$' END
			AND c.relkind IN ('r', 'i')" -c CHECKPOINT >/dev/null
}

measure()
{
	local rows round way other rate wal_bytes

	rows=$(size 20000 300000 2000000)
	[ "$mode" = full ] || remark 7 "$rows rows"
	setting synchronous_commit=off idem.ttl=1
	new_database
	create_functions
	sql "$database" -c "CALL load('UUIDv7', $rows, now())" -c 'VACUUM ANALYZE idem_claims, hand_written'
	wait_until '(SELECT max(expires_at) FROM idem_claims) < now()'
	sql postgres -c 'ALTER DATABASE bench RENAME TO loaded'
	for round in $(seq "$(size 1 3 5)"); do
		for way in $(sides "$round" idem hand_written_cleanup_in hand_written_cleanup_any); do
			copy_database "$way"
			IFS='|' read -r rate wal_bytes < <(value "CALL clean('$way', $rows, NULL, NULL)")
			for other in IN ANY; do
				if [ "$way" = idem ] || [ "$way" = "hand_written_cleanup_${other,,}" ]; then
					record 7 "cleaning beside $other" "$way" "$rate"
					record 7 "WAL beside $other" "$way" "$wal_bytes"
				fi
			done
		done
	done
	sql postgres -c 'DROP DATABASE loaded'
}
