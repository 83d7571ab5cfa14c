# shellcheck shell=bash
#
# Figure 10: whole transactions a second. The TPC-B-like transaction of pgbench, from 8 clients:
# one call of a stored procedure with its five statements, so that the work and the guard are
# compared without round trips. With synchronous_commit on, and off.
#
#	idem          idem_claim() comes first in the procedure
#	redis_guard   SET key PENDING NX EX before the procedure, SET key RESULT EX after it; on a
#	              Unix socket, which is the fastest; with the persistence of Debian's
#	              configuration: no append-only file, and snapshots, for which the runs
#	              are too short
#	nothing       the procedure alone
#	hand_written  INSERT ... ON CONFLICT DO NOTHING comes first in the procedure
#
# The hand-written statement costs about what idem_claim() does, and a run of some seconds differs
# from the next by a tenth and more. So the two are compared in runs of their own, one right after
# the other, and in more rounds; with random ids (UUIDv4), and with ordered ones (UUIDv7), which the
# other runs have. Not in quick, to save time.
#
# One client program runs all of them (10_transactions.c), with the same requests. idem stores no
# result. Redis stores the balance, since the second round trip is part of that guard. No session
# cleans; each run begins with no claims and no history, and with vacuumed tables. No checkpoint
# happens during a run, and the tables are loaded after one: so there are no full-page images,
# which would make transactions slower and the share of the guard smaller. All tables fit into
# shared_buffers.

: "${database?}" "${pg_config?}" "${workspace?}" "${mode?}"

clients=8
redis_socket=$workspace/tmp/redis.sock	# not local: for the trap, too

# create_procedure NAME GUARD
create_procedure()
{
	sql "$database" <<-SQL
		CREATE FUNCTION tpcb_$1(account int, branch int, teller int, delta int, request text)
		RETURNS int LANGUAGE plpgsql AS \$\$
		DECLARE
			balance int;
		BEGIN
			$2
			UPDATE pgbench_accounts SET abalance = abalance + delta WHERE aid = account;
			SELECT abalance INTO balance FROM pgbench_accounts WHERE aid = account;
			UPDATE pgbench_tellers SET tbalance = tbalance + delta WHERE tid = teller;
			UPDATE pgbench_branches SET bbalance = bbalance + delta WHERE bid = branch;
			INSERT INTO pgbench_history (tid, bid, aid, delta, mtime)
			VALUES (teller, branch, account, delta, current_timestamp);
			RETURN balance;
		END \$\$;
	SQL
}

create_procedures()
{
	create_procedure nothing ''
	create_procedure idem 'IF NOT idem_claim(account::text, request) THEN
				RETURN NULL;
			END IF;'
	create_procedure hand_written 'INSERT INTO hand_written (user_id, request_id) VALUES (account::text, request)
			ON CONFLICT DO NOTHING;
			IF NOT FOUND THEN
				RETURN NULL;
			END IF;'
}

build_client()
{
	as_user gcc -O2 -Wall -Wextra -Werror -pthread -I "$("$pg_config" --includedir)" \
		-o transactions tree/test/bench/figures/10_transactions.c \
		-L "$("$pg_config" --libdir)" -Wl,-rpath,"$("$pg_config" --libdir)" -lpq -lhiredis
}

redis()
{
	as_user redis-cli -s "$redis_socket" "$@"
}

# The built-in defaults have the same persistence as Debian's configuration.
start_redis()
{
	trap 'redis shutdown nosave >/dev/null 2>&1 || true' EXIT
	as_user redis-server --port 0 --unixsocket "$redis_socket" --dir "$workspace/tmp" \
		--daemonize yes --logfile "$workspace/redis.log" >/dev/null
	for _ in {1..100}; do
		[ "$(redis ping 2>/dev/null)" != PONG ] || return 0
		sleep 0.1
	done
	die "Redis does not start"
}

# All sides begin with the same state.
prepare_run()
{
	sql "$database" -c 'TRUNCATE pgbench_history, idem_claims, hand_written' \
		-c 'VACUUM pgbench_branches, pgbench_tellers, pgbench_accounts'
	redis flushall >/dev/null
}

# transactions_a_second SIDE SYNCHRONOUS_COMMIT SECONDS UUID_VERSION: sets $rate
transactions_a_second()
{
	local arguments=("dbname=$database options='-c synchronous_commit=$2'") number

	case $1 in
		redis_guard) arguments+=(tpcb_nothing "$clients" "$scale" "$3" "$4" "$redis_socket") ;;
		*) arguments+=("tpcb_$1" "$clients" "$scale" "$3" "$4") ;;
	esac
	prepare_run
	read -r number rate < <(client ./transactions "${arguments[@]}") || die "no transactions"
	value "SELECT expect('transactions', count(*), $number) FROM pgbench_history" >/dev/null
	case $1 in
		idem) value "SELECT expect('claims', count(*), $number) FROM idem_claims" >/dev/null ;;
		hand_written) value "SELECT expect('claims', count(*), $number) FROM hand_written" >/dev/null ;;
		redis_guard) value "SELECT expect('keys', $(redis dbsize), $number)" >/dev/null ;;
	esac
}

# Where the latest checkpoint begins
redo()
{
	value 'SELECT redo_lsn FROM pg_control_checkpoint()'
}

compare_with_redis_and_nothing()
{
	local other rate round side synchronous

	for round in $(seq "$(size 1 3 9)"); do
		for synchronous in on off; do
			for side in $(sides "$round" idem redis_guard nothing); do
				transactions_a_second "$side" "$synchronous" "$(size 1 3 8)" 7
				for other in redis_guard nothing; do
					case $side in
						idem | "$other") record 10 "TPC-B, commit $synchronous, $other" "$side" "$rate" ;;
					esac
				done
			done
		done
	done
}

# Not in quick
compare_with_hand_written()
{
	local rate round side synchronous version

	for round in $(seq "$(size 1 0 17)"); do
		for version in 7 4; do
			for synchronous in on off; do
				for side in $(sides "$round" idem hand_written); do
					transactions_a_second "$side" "$synchronous" "$(size 1 1 5)" "$version"
					record 10 "TPC-B, commit $synchronous, hand_written, UUIDv$version" "$side" "$rate"
				done
			done
		done
	done
}

measure()
{
	local redo scale

	scale=$(size 10 20 50)
	new_database
	create_procedures
	build_client
	start_redis
	sql postgres -c CHECKPOINT
	redo=$(redo)
	client pgbench --initialize --quiet --scale="$scale" "$database" >pgbench.log 2>&1 ||
		{ cat pgbench.log >&2; die "pgbench --initialize failed"; }
	compare_with_redis_and_nothing
	compare_with_hand_written
	value "SELECT expect('balances of accounts', accounts, tellers), expect('balances of branches', branches, tellers)
		FROM (SELECT sum(abalance) FROM pgbench_accounts) AS a (accounts),
			(SELECT sum(tbalance) FROM pgbench_tellers) AS t (tellers),
			(SELECT sum(bbalance) FROM pgbench_branches) AS b (branches)" >/dev/null
	[ "$(redo)" = "$redo" ] || remark 10 "There was a checkpoint on the way: full-page images make the sides more alike."
	remark 10 "$clients clients, scale $scale. The $(nproc) cores are shared by the server, the clients and Redis."
}
