# shellcheck shell=bash
#
# Figure 20: the portable edition in a transaction that a driver sends statement by statement, as
# prepared statements: pgbench's TPC-B, with the claim, or the hand-written statement, after BEGIN. 8
# clients, synchronous_commit on. The tables are as for figure 10.

: "${database?}" "${workspace?}"

# guard SIDE: the statement, with :request
guard()
{
	case $1 in
		idem) echo 'SELECT idem_claim(:aid::text, :request);' ;;
		hand_written) echo 'INSERT INTO hand_written (user_id, request_id) VALUES (:aid::text, :request) ON CONFLICT DO NOTHING;' ;;
	esac
}

# script SIDE IDS. The number n of a client's transaction makes ids in about the order of time.
script()
{
	local request='gen_random_uuid()::text'

	[ "$2" = UUIDv4 ] || request="lpad(:n::text, 30, '0') || lpad(:client_id::text, 6, '0')"
	cat <<-SCRIPT
		\set n :n + 1
		\set aid random(1, 100000 * :scale)
		\set bid random(1, 1 * :scale)
		\set tid random(1, 10 * :scale)
		\set delta random(-5000, 5000)
		BEGIN;
		$(guard "$1" | sed "s/:request/$request/")
		UPDATE pgbench_accounts SET abalance = abalance + :delta WHERE aid = :aid;
		SELECT abalance FROM pgbench_accounts WHERE aid = :aid;
		UPDATE pgbench_tellers SET tbalance = tbalance + :delta WHERE tid = :tid;
		UPDATE pgbench_branches SET bbalance = bbalance + :delta WHERE bid = :bid;
		INSERT INTO pgbench_history (tid, bid, aid, delta, mtime) VALUES (:tid, :bid, :aid, :delta, CURRENT_TIMESTAMP);
		END;
	SCRIPT
}

measure()
{
	local ids rate round scale side

	scale=$(size 10 20 50)
	new_database idem_portable
	client pgbench --initialize --quiet --scale="$scale" "$database" >pgbench.log 2>&1 ||
		{ cat pgbench.log >&2; die "pgbench --initialize failed"; }
	for round in $(seq "$(size 1 5 9)"); do
		for ids in UUIDv4 UUIDv7; do
			for side in $(sides "$round" idem hand_written); do
				sql "$database" -c 'TRUNCATE pgbench_history, idem_claims, hand_written' \
					-c 'VACUUM pgbench_branches, pgbench_tellers, pgbench_accounts' -c CHECKPOINT
				script "$side" "$ids" >"$workspace/tmp/driver.sql"
				client pgbench --no-vacuum --protocol=prepared --client=8 --jobs=2 --time="$(size 1 5 20)" \
					--define=n=0 --define=scale="$scale" --file="$workspace/tmp/driver.sql" "$database" >pgbench.log 2>&1 ||
					{ cat pgbench.log >&2; die "pgbench failed"; }
				rate=$(sed -n 's/^tps = \([0-9.]*\).*/\1/p' pgbench.log)
				case $side in
					idem) value "SELECT expect('claims', (SELECT count(*) FROM idem_claims), (SELECT count(*) FROM pgbench_history))" >/dev/null ;;
					hand_written) value "SELECT expect('claims', (SELECT count(*) FROM hand_written), (SELECT count(*) FROM pgbench_history))" >/dev/null ;;
				esac
				record 20 "portable, TPC-B by a driver, $ids" "$side" "$rate"
			done
		done
	done
}
