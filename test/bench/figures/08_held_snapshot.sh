# shellcheck shell=bash
#
# Figure 8: cleaning while another session holds a snapshot all the time, so that the entries of
# removed rows stay in the indexes. Claims arrive and expire in portions of some batches of
# 50,000 on both sides. Then the worker of idem removes its portion, and the ANY form of the
# hand-written DELETE removes the other, each batch in a transaction. Shown are the time of the
# worst batch divided by that of the first, and the median, since most batches of the worker are
# far from its worst.
#
# A reload makes the worker begin each portion with a rescan from the start of its index, which
# otherwise happens about once a minute. All other batches go on where the previous one ended.
# The hand-written DELETE always begins at the start. The times of the worker's batches are from
# its log. The first and the median are of batches that removed rows. The worst is of all
# batches: some batches of a rescan pass dead entries only, and remove nothing.

: "${database?}" "${mode?}" "${data?}" "${results?}"

create_functions()
{
	sql "$database" <<-'SQL'
		CREATE TABLE batches (side text, n serial, removed bigint, milliseconds float8);

		CREATE PROCEDURE clean(number int) LANGUAGE plpgsql AS $$
		DECLARE
			begun timestamptz;
			removed bigint;
		BEGIN
			FOR i IN 1 .. number LOOP
				begun := clock_timestamp();
				removed := hand_written_cleanup_any(interval '0');
				COMMIT;
				INSERT INTO batches (side, removed, milliseconds)
				VALUES ('hand_written_cleanup_any', removed, extract(epoch FROM clock_timestamp() - begun) * 1000);
				COMMIT;
				PERFORM expect('removed', removed, 50000);
			END LOOP;
		END $$;
	SQL
}

hold_snapshot()
{
	coproc holder { client psql -X -q -A -t -v ON_ERROR_STOP=1 -d "$database" 2>&1; }
	ask_holder 'BEGIN ISOLATION LEVEL REPEATABLE READ;'
}

# An answer shows that the session still holds its snapshot.
ask_holder()
{
	local answer=

	echo "$1 SELECT 'held';" >&"${holder[1]}"
	read -r -t 60 answer <&"${holder[0]}" || true
	[ "$answer" = held ] || die "the session that holds the snapshot answers: $answer"
}

release_snapshot()
{
	# shellcheck disable=SC2154 # set by coproc
	local pid=$holder_PID

	ask_holder ''
	echo '\q' >&"${holder[1]}"
	wait "$pid"
}

clean_idem()
{
	setting "idem.cleanup_databases=$database"
	wait_until "rows_deleted >= $1 AND worker_pids = '{}' FROM idem_stat_cleanup"
	setting idem.cleanup_databases=nothing
}

# note_batches FIRST: stores the batches of the worker, from this line of the log on
note_batches()
{
	tail -n "+$1" "$data.log" |
		sed -n 's/.*removed \([0-9]*\) expired claims in \([0-9.]*\) s, .*/idem,\1,\2/p' |
		sql "$database" -c '\copy batches (side, removed, milliseconds) FROM STDIN (FORMAT csv)' \
			-c "UPDATE batches SET milliseconds = milliseconds * 1000 WHERE side = 'idem'"
}

run_portions()
{
	local portion side log_line

	new_database
	create_functions
	# Only the worker logs messages at this level.
	sql postgres -c "ALTER DATABASE $database SET log_min_messages = debug1"
	log_line=$(($(wc -l <"$data.log") + 1))
	hold_snapshot
	for portion in $(seq "$portions"); do
		sql "$database" -c "CALL load('UUIDv7', $((batches * 50000)), now())" \
			-c 'ANALYZE idem_claims, hand_written'
		wait_until '(SELECT max(expires_at) FROM idem_claims) < now()'
		for side in $(sides "$portion" idem hand_written); do
			sql "$database" -c CHECKPOINT
			if [ "$side" = idem ]; then
				clean_idem $((portion * batches * 50000))
			else
				sql "$database" -c "CALL clean($batches)"
			fi
		done
	done
	release_snapshot
	note_batches "$log_line"
	sql "$database" -c "\copy (SELECT side, sum(removed) OVER (PARTITION BY side ORDER BY n) AS removed_so_far, milliseconds FROM batches ORDER BY side, n) TO STDOUT (FORMAT csv, HEADER)" >figure_8.csv
}

record_batches()
{
	local way first median worst

	for way in idem hand_written_cleanup_any; do
		IFS='|' read -r first median worst < <(sql "$database" -A -t -v way="$way" -f - <<-'SQL'
			SELECT (array_agg(milliseconds ORDER BY n) FILTER (WHERE removed > 0))[1],
				percentile_cont(0.5) WITHIN GROUP (ORDER BY milliseconds) FILTER (WHERE removed > 0),
				max(milliseconds)
			FROM batches WHERE side = :'way'
		SQL
		)
		record 8 'first batch' "$way" "$first"
		record 8 'median batch' "$way" "$median"
		record 8 'worst batch' "$way" "$worst"
		record 8 'worst batch over the first' "$way" "$(value "SELECT $worst::float8 / $first")"
	done
}

measure()
{
	local portions batches

	portions=$(size 2 4 10)
	batches=$(size 1 3 4)
	[ "$mode" = full ] || remark 8 "$((portions * batches)) batches of 50,000"
	setting synchronous_commit=off idem.ttl=1
	for _ in $(seq "$(size 1 1 3)"); do
		run_portions
		record_batches
	done
	gnuplot -e "data='figure_8.csv'; picture='$results/figure_8.svg'" \
		tree/test/bench/figures/08_held_snapshot.gp
}
