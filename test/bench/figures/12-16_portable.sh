# shellcheck shell=bash
#
# Figures 12 to 16: the portable edition, compared with the hand-written statement. As figures 1
# to 4 and 10, with their loops, but: 10,000 requests in one transaction rather than 200,000,
# batches of 1,000 only, and TPC-B with synchronous_commit off and without Redis.

: "${database?}" "${bench?}"

# shellcheck source=test/bench/figures/03_complete.sh
. tree/test/bench/figures/03_complete.sh
# shellcheck source=test/bench/figures/04_batches.sh
. tree/test/bench/figures/04_batches.sh
# shellcheck source=test/bench/figures/10_transactions.sh
. tree/test/bench/figures/10_transactions.sh

measure_claims()
{
	local claims ids round side

	claims=$(size 1000 10000 10000)
	new_database idem_portable
	sql "$database" -f tree/test/bench/loops.sql
	for round in $(seq "$(size 1 15 51)"); do
		for ids in UUIDv4 UUIDv7; do
			sql "$database" -c 'TRUNCATE idem_claims, hand_written' \
				-c "CALL make_requests('$ids', $claims)" -c 'VACUUM ANALYZE requests' -c CHECKPOINT
			for side in $(sides "$round" idem hand_written); do
				record 12 "portable, fresh claim, $ids" "$side" "$(value "SELECT loop_$side($claims)")"
			done
			for side in $(sides "$round" idem hand_written); do
				record 13 "portable, duplicate, $ids" "$side" "$(value "SELECT loop_$side(0)")"
			done
		done
	done
}

measure_complete()
{
	local requests ids round side

	requests=$(size 1000 20000 50000)
	new_database idem_portable
	create_loops
	sql postgres -c "ALTER DATABASE $database SET synchronous_commit = off"
	for round in $(seq "$(size 1 5 15)"); do
		for ids in UUIDv4 UUIDv7; do
			sql "$database" -c "CALL make_requests('$ids', $requests)" \
				-c 'TRUNCATE idem_claims, hand_written_results' -c CHECKPOINT
			for side in $(sides "$round" idem hand_written); do
				record 14 "portable, claim and complete, $ids" "$side" "$(value "CALL measure('$side', NULL)")"
			done
		done
	done
}

measure_batches()
{
	local ids round side

	new_database idem_portable
	create_batches
	for ids in UUIDv4 UUIDv7; do
		sql "$database" -c "CALL make_requests('$ids', $(size 1000 100000 100000))" \
			-c 'TRUNCATE idem_claims, hand_written' \
			-c "SELECT batch('idem'), batch('hand_written')" >/dev/null
		for round in $(seq "$(size 1 15 51)"); do
			sql "$database" -c "CALL make_requests('$ids', 1000, clock_timestamp() + $round * interval '1 min')"
			for side in $(sides "$round" idem hand_written); do
				record 15 "portable, batch of 1000 keys, $ids" "$side" "$(value "SELECT batch('$side')")"
			done
		done
	done
}

prepare_run()
{
	sql "$database" -c 'TRUNCATE pgbench_history, idem_claims, hand_written' \
		-c 'VACUUM pgbench_branches, pgbench_tellers, pgbench_accounts'
}

measure_transactions()
{
	local rate round scale seconds side

	scale=$(size 10 20 50)
	seconds=$(size 1 3 8)
	new_database idem_portable
	create_procedures
	build_client
	client pgbench --initialize --quiet --scale="$scale" "$database" >pgbench.log 2>&1 ||
		{ cat pgbench.log >&2; die "pgbench --initialize failed"; }
	sql postgres -c CHECKPOINT
	for round in $(seq "$(size 1 5 9)"); do
		for side in $(sides "$round" idem hand_written); do
			transactions_a_second "$side" off "$seconds" 7
			record 16 'portable, TPC-B, commit off' "$side" "$rate"
		done
	done
}

measure()
{
	if wants_figure 12 || wants_figure 13; then measure_claims; fi
	if wants_figure 14; then measure_complete; fi
	if wants_figure 15; then measure_batches; fi
	if wants_figure 16; then measure_transactions; fi
}
