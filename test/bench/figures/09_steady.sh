# shellcheck shell=bash
#
# Figure 9, never behind: claims arrive at a steady rate, and expire so soon that as many expire
# as arrive. The rate is 20,000 claims a second, or half of what the slower side reaches
# unthrottled if that is less. Four of five transactions claim ten times, since with single
# claims two cores would mostly do round trips. The fifth claims once, and the latency of these
# is measured from the time at which they were due: a claim that had to queue counts with that
# wait. Request ids are UUIDv7 of the moment; making them is part of the latency. Commits do not
# wait for the disk. Autovacuum is on, and the same for both.
#
# Compared with the hand-written table and the better form of its DELETE, every 5 s: batch after
# batch until one is not full. In full mode also with one_batch, a single batch every 5 s, which
# is more common: 50,000 rows in 5 s can clean 10,000 a second at most.
#
# Age: of the oldest expired claim that is still stored, read from the table twice a second.
# Drift: by how much the largest size in the second half of the time exceeds the largest in the
# quarter before it, since a vacuum can truncate a table, which then grows again. Dead tuples:
# the most that the statistics of the server showed.
#
# Cleaning on and off: after the steady time, intervals with the same load on the same table in
# turns, each with a 99th percentile. They do not include the first second, with its new
# sessions, the time in which the cleaning catches up, and the vacuum before the cleaning is off.

: "${database?}" "${mode?}" "${results?}"

# 19_scale.sh uses what is here with other values.
figure=9
request_id='uuidv7(clock_timestamp())'
filled=0

# Of five transactions one claims once, the others ten times
claims_a_transaction=8.2

create_load()
{
	new_database
	sql "$database" -c "CREATE FUNCTION new_request_id() RETURNS text LANGUAGE sql VOLATILE RETURN $request_id"
	sql "$database" <<-'SQL'
		CREATE FUNCTION claim_idem(number int) RETURNS void LANGUAGE plpgsql AS $$
		BEGIN
			FOR i IN 1 .. number LOOP
				IF NOT idem_claim(user_id((random() * 100000)::int), new_request_id()) THEN
					RAISE 'claimed before';
				END IF;
			END LOOP;
		END $$;

		CREATE FUNCTION claim_hand_written(number int) RETURNS void LANGUAGE plpgsql AS $$
		BEGIN
			FOR i IN 1 .. number LOOP
				INSERT INTO hand_written (user_id, request_id)
				VALUES (user_id((random() * 100000)::int), new_request_id())
				ON CONFLICT DO NOTHING;
				IF NOT FOUND THEN
					RAISE 'claimed before';
				END IF;
			END LOOP;
		END $$;

		CREATE TABLE removed (number bigint);

		CREATE PROCEDURE clean_one_batch(ttl interval) LANGUAGE sql AS $$
			INSERT INTO removed SELECT hand_written_cleanup_any(ttl);
		$$;

		CREATE PROCEDURE clean_hand_written(ttl interval) LANGUAGE plpgsql AS $$
		DECLARE
			number bigint;
		BEGIN
			LOOP
				number := hand_written_cleanup_any(ttl);
				INSERT INTO removed VALUES (number);
				COMMIT;
				EXIT WHEN number < 50000;
			END LOOP;
		END $$;

		CREATE TABLE samples (
			at timestamptz PRIMARY KEY,
			oldest timestamptz,			-- when it expired, or will
			reported interval,			-- idem_stat_cleanup.oldest_expired_age
			heap bigint,
			indexes bigint,
			dead bigint,
			took interval
		);

		-- Claims arrive in the order of time, but for the length of a transaction. So the
		-- scan begins shortly before the oldest claim of the previous sample, and does not
		-- pass dead entries again. Each statement has its own snapshot, and none is held
		-- between two samples.
		CREATE FUNCTION sample(side text, ttl interval) RETURNS void LANGUAGE plpgsql
		SET enable_seqscan = off SET enable_bitmapscan = off AS $$
		DECLARE
			claims regclass := CASE side WHEN 'idem' THEN 'idem_claims' ELSE 'hand_written' END;
			begun timestamptz := clock_timestamp();
			-- Read before the table: a batch that commits in between can only make it too large.
			reported interval := CASE side WHEN 'idem' THEN (SELECT oldest_expired_age FROM idem_stat_cleanup) END;
			known timestamptz := coalesce((SELECT oldest FROM samples ORDER BY at DESC LIMIT 1), '-infinity');
			oldest timestamptz;
		BEGIN
			IF side = 'idem' THEN
				SELECT min(expires_at) INTO oldest FROM idem_claims
				WHERE expires_at >= known - interval '1 s';
			ELSE
				SELECT min(created_at) + ttl INTO oldest FROM hand_written
				WHERE created_at >= known - ttl - interval '1 s';
			END IF;
			INSERT INTO samples
			SELECT begun, oldest, reported, pg_relation_size(claims), pg_indexes_size(claims),
				pg_stat_get_dead_tuples(claims), clock_timestamp() - begun;
		END $$;

		CREATE TABLE transactions (
			during text,
			claims int,
			second bigint,
			milliseconds float8
		) WITH (autovacuum_enabled = off);

		CREATE FUNCTION p99(of text) RETURNS float8 LANGUAGE sql AS $$
			SELECT percentile_disc(0.99) WITHIN GROUP (ORDER BY milliseconds) FROM transactions
			WHERE during = of AND claims = 1
				AND second > (SELECT min(second) FROM transactions WHERE during = of)
		$$;
	SQL
}

# load SIDE SECONDS [PGBENCH-ARGUMENT ...]
load()
{
	local claims

	for claims in 1 10; do
		as_user tee "claims_$claims.sql" <<<"SELECT claim_${1/one_batch/hand_written}($claims);" >/dev/null
	done
	client pgbench -n -M prepared -c 4 -j 2 -T "$2" -f claims_10.sql@4 -f claims_1.sql@1 \
		"${@:3}" bench </dev/null >load.out 2>&1 ||
		{ cat load.out >&2; die "the claims failed"; }
}

# steady_load SIDE SECONDS NAME: claims at the rate, and stores the time of each transaction
steady_load()
{
	as_user rm -f log.*
	load "$1" "$2" -R "$(awk "BEGIN { print $rate / $claims_a_transaction }")" --log --log-prefix=log
	awk -v name="$3" '{ print name "," ($4 == 0 ? 10 : 1) "," $5 "," $3 / 1000 }' log.* |
		sql "$database" -c '\copy transactions FROM STDIN (FORMAT csv)'
}

# The rate that the machine sustains while it also cleans
choose_rate()
{
	local side claims

	rate=20000
	for side in idem hand_written; do
		load "$side" "$(size 1 4 10)"
		claims=$(awk -v each=$claims_a_transaction '/^tps/ { print int($3 * each) }' load.out)
		remark "$figure" "$side: $claims claims a second unthrottled, without cleaning"
		[ $((claims / 2)) -ge "$rate" ] || rate=$((claims / 2))
	done
	sql "$database" -c 'TRUNCATE idem_claims, hand_written' -c CHECKPOINT
}

# every SECONDS PID STATEMENT: runs it while the process runs; a late statement follows at once
every()
{
	while kill -0 "$2" 2>/dev/null; do
		echo "$3;"
		sleep "$1"
	done | sql "$database" >/dev/null
}

cleaning_on()
{
	local since

	since=$(value 'SELECT clock_timestamp()')
	setting idem.cleanup_databases=bench
	wait_until "last_run > '$since' AND NOT backlog FROM idem_stat_cleanup"
}

cleaning_off()
{
	setting idem.cleanup_databases=nothing
	wait_until "coalesce(cardinality(worker_pids), 0) = 0 FROM idem_stat_cleanup"
	sql "$database" -c 'VACUUM idem_claims'
}

# run_steadily SIDE SECONDS
run_steadily()
{
	local loader jobs=() job

	steady_load "$1" "$2" steady &
	loader=$!
	every 0.5 $loader "SELECT sample('$1', '$ttl s')" &
	jobs+=($!)
	if [ "$1" != idem ]; then
		every 5 $loader "CALL clean_$1('$ttl s')" &
		jobs+=($!)
	fi
	for job in "$loader" "${jobs[@]}"; do
		wait "$job"
	done
}

# Checks that every claim, and every row that was there before, was removed or is still stored,
# and that the samples have not missed an older one.
check_work()
{
	local table=hand_written removed='SELECT sum(number) FROM removed' oldest="created_at + interval '$ttl s'"

	if [ "$1" = idem ]; then
		table=idem_claims removed='SELECT rows_deleted FROM idem_stat_cleanup' oldest=expires_at
	fi
	sql "$database" >/dev/null <<-SQL
		SELECT expect('claims', ($removed)::bigint + count(*), $filled + (SELECT sum(claims) FROM transactions))
		FROM $table;
		SELECT expect('claims older than any seen', count(*), 0) FROM $table
		WHERE $oldest < (SELECT oldest - interval '1 s' FROM samples ORDER BY at DESC LIMIT 1);
	SQL
}

# drift COLUMN: percent
drift()
{
	value "
		WITH s AS (
			SELECT percent_rank() OVER (ORDER BY at) AS time, $1 AS size FROM samples
		)
		SELECT 100 * (max(size) FILTER (WHERE time >= 0.5)
			/ max(size) FILTER (WHERE time >= 0.25 AND time < 0.5)::float8 - 1)
		FROM s"
}

record_steady()
{
	record "$figure" 'largest age of an expired claim' "$1" \
		"$(value 'SELECT greatest(0, max(extract(epoch FROM at - oldest))) FROM samples')"
	record "$figure" 'size drift, heap' "$1" "$(drift heap)"
	record "$figure" 'size drift, indexes' "$1" "$(drift indexes)"
	record "$figure" 'heap and indexes, largest' "$1" "$(value 'SELECT max(heap + indexes) / 1e6 FROM samples')"
	record "$figure" 'dead tuples, largest' "$1" "$(value 'SELECT max(dead) / 1e3 FROM samples')"
	record "$figure" 'claim, p99' "$1" "$(value "SELECT p99('steady')")"
}

remark_steady()
{
	remark "$figure" "$(value "
		SELECT format('%s: %s claims a second, %s claims of %s s', '$1',
			round(sum(claims) / $2.0), sum(claims), $2)
		FROM transactions WHERE during = 'steady'")"
	remark "$figure" "$(value "
		SELECT format('%s: a sample took %s ms, %s at most', '$1',
			round(avg(extract(epoch FROM took)) * 1000, 1), round(max(extract(epoch FROM took)) * 1000, 1))
		FROM samples")"
	[ "$1" = idem ] || return 0
	remark "$figure" "$(value "
		SELECT format('idem: %s batches, %s ms each, %s ms at most: %s %% of the time',
			batches, round((total_batch_seconds / batches * 1000)::numeric),
			round((max_batch_seconds * 1000)::numeric), round((100 * total_batch_seconds / $2)::numeric, 1))
		FROM idem_stat_cleanup")"
	remark "$figure" "$(value "
		SELECT format('idem_stat_cleanup said up to %s s less, and up to %s s more, than the oldest claim''s age',
			round(greatest(0, max(extract(epoch FROM at - oldest - reported))), 2),
			round(greatest(0, max(extract(epoch FROM reported - greatest(interval '0', at - oldest)))), 2))
		FROM samples")"
}

remark_one_batch()
{
	remark "$figure" "$(value "
		SELECT format('one_batch: after %s s the oldest expired claim was %s s old, heap and indexes had %s MB',
			round(extract(epoch FROM at - (SELECT min(at) FROM samples))),
			round(extract(epoch FROM at - oldest)), (heap + indexes) / 1000000)
		FROM samples ORDER BY at DESC LIMIT 1")"
}

# measure_side SIDE SECONDS
measure_side()
{
	create_load
	sql postgres -c CHECKPOINT
	if [ "$1" = idem ]; then
		cleaning_on
	fi
	run_steadily "$1" "$2"
	remark_steady "$1" "$2"
	# In full mode the largest value in 10 s: more points would be too many to draw.
	sql "$database" -A -F , -t -c "
		SELECT '$1', round(extract(epoch FROM min(at) - min(min(at)) OVER ()), 1),
			round(greatest(0, max(extract(epoch FROM at - oldest))), 2),
			max(heap), max(indexes), max(dead)
		FROM samples GROUP BY floor(extract(epoch FROM at) / $(size 1 1 10)) ORDER BY min(at)" \
		>>figure_9.csv
}

measure_cleaning_on_and_off()
{
	local round seconds cleaning way

	# Whole intervals of the cleaning; in full mode, of autovacuum
	seconds=$(size 2 6 61)
	for round in $(seq "$(size 1 3 4)"); do
		for cleaning in $(sides "$round" cleaning_on cleaning_off); do
			$cleaning
			steady_load idem "$seconds" "$cleaning $round"
			way=${cleaning/cleaning_on/idem}
			record "$figure" 'claim, p99, cleaning on' "$way" "$(value "SELECT p99('$cleaning $round')")"
		done
	done
	cleaning_off
}

draw()
{
	gnuplot <<-PLOT
		set terminal svg size 900,700 background '#ffffff' font 'sans-serif,13'
		set output '$results/figure_9.svg'
		set datafile separator ','
		set multiplot layout 2,1
		set key bottom center outside horizontal
		set xrange [0:$seconds]
		set grid lc '#dddddd'
		set yrange [0:]
		set xlabel 'time (s)'
		csv = 'figure_9.csv'
		of(side, x) = strcol(1) eq side ? x : NaN
		set title '$rate claims a second that expire after $ttl s'
		set ylabel 'oldest expired claim: age (s)'
		plot $(draw_sides "\$3")
		unset title
		set ylabel 'heap and indexes (MB)'
		plot $(draw_sides "(\$4 + \$5) / 1e6")
	PLOT
}

# draw_sides VALUE
draw_sides()
{
	draw_side idem '#0060ad' idem "$1"
	printf ', '
	draw_side hand_written '#dd8800' 'hand-written, batches until one is not full' "$1"
	[ "$mode" != quick ] || return 0
	printf ', '
	draw_side one_batch '#aa3333' 'hand-written, one batch' "$1"
}

# draw_side SIDE COLOUR TITLE VALUE
draw_side()
{
	printf "csv using (of('%s', \$2)):(%s) with lines lw 2 lc '%s' title '%s'" "$1" "$4" "$2" "$3"
}

measure()
{
	local seconds naptime ttl rate side

	seconds=$(size 8 120 900)
	ttl=$(size 2 10 10)
	# The default of a server is a minute: in the two minutes of quick there would be one vacuum.
	naptime=$(size 2s 15s 1min)
	setting synchronous_commit=off autovacuum=on autovacuum_naptime="$naptime" idem.ttl="${ttl}s"
	remark "$figure" "claims expire after $ttl s; autovacuum_naptime $naptime"
	create_load
	choose_rate
	echo side,seconds,oldest_expired_age_s,heap_bytes,index_bytes,dead_tuples >figure_9.csv

	measure_side idem "$seconds"
	record_steady idem
	measure_cleaning_on_and_off
	check_work idem
	measure_side hand_written "$seconds"
	record_steady hand_written
	check_work hand_written
	if [ "$mode" != quick ]; then
		measure_side one_batch "$(size 8 0 300)"
		remark_one_batch
		check_work one_batch
	fi
	draw
}
