# shellcheck shell=bash
#
# Figure 19, scale: 20,000 claims a second that are remembered for an hour, which are 72 million
# live claims. Request ids are random (UUIDv4), so each claim reads and changes pages anywhere in
# the index of keys. In full mode this takes more than an hour, 60 GB of disk, and 16 GB of
# memory to be worth anything; so it is measured only when it is named. quick has 5 minutes
# instead of an hour: 6 million claims. The load lasts 20 minutes (quick: 2), or SCALE_SECONDS.
#
# One side after the other: the table is filled by direct inserts, in the order of time, then the
# indexes are made. The oldest row expires when the load begins, and from then on as many expire
# as are claimed. The load, the cleaning and the samples are those of figure 9; checkpoints are
# those of a server as installed, every 5 minutes. Autovacuum has the settings as installed too:
# idem_claims brings its own, the hand-written table has none.
#
# p99, warm: without the first minute (quick: 20 s). In it the server reads the index into its
# buffers, and writes each page of it in full to the WAL.
#
# WAL: all of it, divided by the claims, so with the cleaning, the full pages after checkpoints,
# and the vacuums. What the vacuums did is read from the server's log: those that ended within
# the time. Their CPU is in percent of one processor.

: "${database?}" "${mode?}" "${data?}"

# shellcheck source=test/bench/figures/09_steady.sh
. tree/test/bench/figures/09_steady.sh
figure=19
request_id='gen_random_uuid()::text'

# fill SIDE: two sessions, each with every second second of the time to live, so that the rows
# are nearly in the order of time, as claims that arrived are.
fill()
{
	local part parts=()

	sql "$database" <<-'SQL'
		CREATE TABLE indexes (definition text);

		CREATE PROCEDURE drop_indexes(of regclass) LANGUAGE plpgsql AS $$
		DECLARE
			i record;
		BEGIN
			FOR i IN
				SELECT indexrelid::regclass AS name, conname,
					coalesce('ALTER TABLE ' || of || ' ADD CONSTRAINT ' || conname || ' ' || pg_get_constraintdef(c.oid),
						pg_get_indexdef(indexrelid)) AS definition
				FROM pg_index LEFT JOIN pg_constraint c ON conindid = indexrelid
				WHERE indrelid = of
			LOOP
				INSERT INTO indexes VALUES (i.definition);
				IF i.conname IS NULL THEN
					EXECUTE 'DROP INDEX ' || i.name;
				ELSE
					EXECUTE format('ALTER TABLE %s DROP CONSTRAINT %I', of, i.conname);
				END IF;
			END LOOP;
		END $$;

		CREATE PROCEDURE create_indexes() LANGUAGE plpgsql AS $$
		DECLARE
			statement text;
		BEGIN
			FOR statement IN SELECT definition FROM indexes LOOP
				EXECUTE statement;
				COMMIT;
			END LOOP;
		END $$;

		CREATE PROCEDURE fill(side text, part int, rate int, ttl int, begins timestamptz) LANGUAGE plpgsql AS $$
		BEGIN
			FOR second IN part .. ttl - 1 BY 2 LOOP
				IF side = 'idem' THEN
					INSERT INTO idem_claims (expires_at, state, request_id, user_id, scope)
					SELECT begins + (second + 1) * interval '1 s', 'completed', gen_random_uuid()::text,
						user_id((random() * 100000)::int), ''
					FROM generate_series(1, rate);
				ELSE
					INSERT INTO hand_written (user_id, request_id, created_at)
					SELECT user_id((random() * 100000)::int), gen_random_uuid()::text,
						begins + (second - ttl + i / rate::float8) * interval '1 s'
					FROM generate_series(1, rate) AS i;
				END IF;
				COMMIT;
			END LOOP;
		END $$;
	SQL
	sql "$database" -c "CALL drop_indexes('$table')"
	for part in 0 1; do
		sql "$database" -c "CALL fill('$1', $part, $rate, $ttl, '$begins')" &
		parts+=($!)
	done
	for part in "${parts[@]}"; do
		wait "$part"
	done
	sql "$database" -c "SET maintenance_work_mem = '2GB'" -c 'CALL create_indexes()' \
		-c "VACUUM ANALYZE $table" -c CHECKPOINT
	filled=$((rate * ttl))
}

# The first row expires now, or the cleaning catches up with those that expired meanwhile
wait_for_begin()
{
	local seconds

	seconds=$(value "SELECT ceil(extract(epoch FROM '$begins' - clock_timestamp()))")
	if [ "$seconds" -gt 0 ]; then
		sleep "$seconds"
	else
		echo "the table was ready $((-seconds)) s late"
		if [ "$1" = idem ]; then
			wait_until "NOT backlog FROM idem_stat_cleanup"
		else
			sql "$database" -c "CALL clean_hand_written('$ttl s')"
		fi
	fi
}

# vacuums: of the table, in the part of the server's log that is on stdin: their number, CPU in
# seconds, WAL in bytes
vacuums()
{
	awk -v table="bench.public.$table\"" '
		/automatic (aggressive )?vacuum of table/ { of = index($0, table) > 0; number += of; next }
		/LOG:/ { of = 0 }
		of && /WAL usage:/ { sub(/.*images, /, ""); bytes += $1 }
		of && /system usage: CPU:/ {
			gsub(/[A-Za-z:,]+/, "")
			cpu += $1 + $2
		}
		END { printf "%d %.2f %.0f\n", number, cpu, bytes }'
}

# measure_scale SIDE
measure_scale()
{
	local table=hand_written begins lines wal number cpu bytes claims

	[ "$1" != idem ] || table=idem_claims
	create_load
	begins=$(value "SELECT date_trunc('second', now()) + interval '$((2 + rate * ttl / 200000)) s'")
	fill "$1"
	setting autovacuum=on
	[ "$1" != idem ] || cleaning_on
	wait_for_begin "$1"
	lines=$(wc -l <"$data.log")
	wal=$(value 'SELECT pg_current_wal_lsn()')
	run_steadily "$1" "$seconds"
	wal=$(value "SELECT pg_current_wal_lsn() - '$wal'")
	read -r number cpu bytes < <(tail -n "+$((lines + 1))" "$data.log" | vacuums)
	claims=$(value 'SELECT sum(claims) FROM transactions')

	record_steady "$1"
	record $figure throughput "$1" "$(value "SELECT $claims / $seconds.0")"
	record $figure 'claim, p50' "$1" "$(value "SELECT percentile_disc(0.5) WITHIN GROUP (ORDER BY milliseconds)
		FROM transactions WHERE claims = 1")"
	record $figure 'claim, p99, warm' "$1" "$(value "SELECT percentile_disc(0.99) WITHIN GROUP (ORDER BY milliseconds)
		FROM transactions WHERE claims = 1 AND second >= $warm + (SELECT min(second) FROM transactions)")"
	record $figure WAL "$1" "$(value "SELECT $wal / $claims.0")"
	record $figure 'WAL of the vacuums' "$1" "$(value "SELECT $bytes / $claims.0")"
	record $figure vacuums "$1" "$number"
	record $figure 'CPU of the vacuums' "$1" "$(value "SELECT 100 * $cpu / $seconds")"
	remark_steady "$1" "$seconds"
	[ "$1" != idem ] || setting idem.cleanup_databases=nothing
	check_work "$1"
	setting autovacuum=off
}

measure()
{
	local seconds ttl rate warm

	rate=$(size 2000 20000 20000)
	ttl=$(size 10 300 3600)
	seconds=${SCALE_SECONDS:-$(size 8 120 1200)}
	warm=$(size 2 20 60)
	# A minute's pause of autovacuum is the server's default.
	setting synchronous_commit=off idem.ttl="${ttl}s" log_autovacuum_min_duration=0 \
		checkpoint_timeout=5min max_wal_size=16GB autovacuum_naptime="$(size 2s 15s 1min)"
	remark $figure "$((rate * ttl)) live claims: $rate a second, remembered for $ttl s; measured for $seconds s"
	measure_scale idem
	measure_scale hand_written
}
