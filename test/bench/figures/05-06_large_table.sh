# shellcheck shell=bash
#
# Figures 5 and 6: a table that has been in use for a while, with 5 million claims (quick: fewer).
# Both tables are filled in the way of live use, see load() in requests.sql.
#
# Figure 6: bytes on disk a claim: the heap, the index of keys (idem: request, user and scope;
# hand-written: user and request), the index of the times by which rows are cleaned, and their
# sum.
#
# Figure 5: time and WAL of fresh claims, 2 % of the rows, in one transaction like those of figure
# 1, since a commit costs the same on both sides. Each side starts right after a checkpoint, when
# the first change of a page writes the full page to the WAL, and with its table and indexes in
# shared buffers. The new ids continue those of the table. All claims have one created_at, which
# can only help the hand-written side.

: "${database?}" "${mode?}"

create_functions()
{
	sql "$database" -f tree/test/bench/loops.sql -f - <<-'SQL'
		CREATE EXTENSION pg_prewarm;

		CREATE FUNCTION warm(of regclass) RETURNS void LANGUAGE plpgsql AS $$
		BEGIN
			PERFORM pg_prewarm(of);
			PERFORM pg_prewarm(indexrelid) FROM pg_index WHERE indrelid = of;
		END $$;

		CREATE FUNCTION measure(side text, claims int, OUT microseconds float8, OUT wal_bytes float8)
		LANGUAGE plpgsql AS $$
		DECLARE
			begun pg_lsn := pg_current_wal_insert_lsn();
		BEGIN
			IF side = 'idem' THEN
				microseconds := loop_idem(claims);
			ELSE
				microseconds := loop_hand_written(claims);
			END IF;
			wal_bytes := (pg_current_wal_insert_lsn() - begun) / claims;
		END $$;
	SQL
}

# record_size WHAT WAY RELATION [FUNCTION]
record_size()
{
	record 6 "$1, $ids" "$2" "$(value "SELECT ${4:-pg_relation_size}('$3') / $rows.0")"
}

record_sizes()
{
	record_size 'in all' idem idem_claims pg_total_relation_size
	record_size heap idem idem_claims
	record_size 'index of keys' idem idem_claims_pkey
	record_size 'index of times' idem idem_claims_expires_at_idx
	record_size 'in all' hand_written hand_written pg_total_relation_size
	record_size heap hand_written hand_written
	record_size 'index of keys' hand_written hand_written_pkey
	record_size 'index of times' hand_written hand_written_created_at
}

# since CLAIMS: prints the time of an id that is made after so many claims
since()
{
	echo "'$begun'::timestamptz + $1 * interval '50 us'"
}

claim_more()
{
	local stored=$rows round side table microseconds wal_bytes

	for round in $(seq "$(size 1 5 9)"); do
		sql "$database" -c "CALL make_requests('$ids', $claims, $(since "$stored"))" \
			-c 'VACUUM ANALYZE requests'
		stored=$((stored + claims))
		for side in $(sides "$round" idem hand_written); do
			table=idem_claims
			[ "$side" = idem ] || table=hand_written
			sql "$database" -c "SELECT warm('$table')" -c CHECKPOINT >/dev/null
			IFS='|' read -r microseconds wal_bytes < <(value "SELECT * FROM measure('$side', $claims)")
			record 5 "fresh claim, $ids" "$side" "$microseconds"
			record 5 "WAL, $ids" "$side" "$wal_bytes"
		done
	done
}

measure()
{
	local rows claims figure ids begun

	rows=$(size 20000 400000 5000000)
	claims=$((rows / 50))
	for figure in 5 6; do
		if [ "$mode" != full ] && wants_figure "$figure"; then
			remark "$figure" "$rows rows"
		fi
	done
	setting synchronous_commit=off
	for ids in UUIDv7 UUIDv4; do
		new_database
		create_functions
		begun=$(value 'SELECT now()')
		sql "$database" -c "CALL load('$ids', $rows, $(since 0))" \
			-c 'VACUUM ANALYZE idem_claims, hand_written'
		if wants_figure 6; then
			record_sizes
		fi
		if wants_figure 5; then
			claim_more
		fi
	done
}
