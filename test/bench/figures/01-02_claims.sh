# shellcheck shell=bash
#
# Figures 1 and 2: what a claim costs in a stored procedure. A PL/pgSQL loop claims 200,000
# requests one by one, in one transaction, into an empty table; then the same requests again, as
# duplicates. Compared with the same loop with the hand-written statement. Both times include
# the loop.

: "${database?}"

measure()
{
	local claims ids round side

	claims=$(size 2000 200000 200000)
	new_database
	sql "$database" -f tree/test/bench/loops.sql
	for round in $(seq "$(size 1 5 15)"); do
		for ids in UUIDv4 UUIDv7; do
			sql "$database" -c 'TRUNCATE idem_claims, hand_written' \
				-c "CALL make_requests('$ids', $claims)" -c 'VACUUM ANALYZE requests' -c CHECKPOINT
			for side in $(sides "$round" idem hand_written); do
				record 1 "fresh claim, $ids" "$side" "$(value "SELECT loop_$side($claims)")"
			done
			for side in $(sides "$round" idem hand_written); do
				record 2 "duplicate, $ids" "$side" "$(value "SELECT loop_$side(0)")"
			done
		done
	done
}
