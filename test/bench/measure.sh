# shellcheck shell=bash
#
# For test/bench/run and the files in figures/: databases to measure in, and the database
# "results" for the values.
#
# A file in figures/ defines measure(), which calls record() for each value, in turns: one value
# of idem, one of the alternative, and so on. The values of a round are measured close to each
# other, so that other load on the machine affects both.

# Set by test/bench/run
: "${repository?}" "${pg_config=}" "${version=}" "${mode=}" "${figures=}"

bench=$repository/test/bench
database=

# size TRY QUICK FULL: prints the size for this mode
size()
{
	case $mode in
		try) echo "$1" ;;
		quick) echo "$2" ;;
		full) echo "$3" ;;
	esac
}

wants_figure()
{
	[[ " ${figures[*]} " == *" $1 "* ]]
}

# Installs what some figures need besides the server
prepare_for_figures()
{
	local packages=() redis=

	if wants_figure 8 || wants_figure 9; then
		command -v gnuplot >/dev/null || packages+=(gnuplot-nox)
	fi
	if wants_figure 10; then
		command -v redis-server >/dev/null || redis=missing
	fi
	if wants_figure 10 || wants_figure 16; then
		[ -e /usr/include/hiredis/hiredis.h ] || packages+=(libhiredis-dev)
		[ -e "$("$pg_config" --includedir)/libpq-fe.h" ] || packages+=(libpq-dev)
	fi
	[ "${#packages[@]}" -gt 0 ] || [ -n "$redis" ] || return 0
	command -v apt-get >/dev/null ||
		die "not a Debian: please install gnuplot, Redis, hiredis and libpq (with headers)"
	apt update
	[ "${#packages[@]}" -eq 0 ] || install_packages "${packages[@]}"
	[ -z "$redis" ] || install_without_service redis-server
}

# ----- for the files in figures/ -----

# new_database [EXTENSION]: replaces the database by an empty one, with idem (or idem_portable), the
# alternative, and functions that make requests (requests.sql, hand_written.sql)
new_database()
{
	sql postgres -c 'SET client_min_messages = error' \
		-c 'DROP DATABASE IF EXISTS bench WITH (FORCE)' -c 'CREATE DATABASE bench'
	database=bench
	sql "$database" -c "CREATE EXTENSION ${1:-idem}" \
		-f tree/test/bench/requests.sql -f tree/test/bench/hand_written.sql
}

# value SQL [PSQL-ARGUMENT ...]: prints the one value that the SQL returns
value()
{
	sql "$database" -A -t "${@:2}" -c "$1"
}

# wait_until SQL: waits until the condition is true
wait_until()
{
	local tries is_true

	for ((tries = 0; tries < 600; tries++)); do
		is_true=$(value "SELECT $1")
		[ "$is_true" != t ] || return 0
		sleep 0.1
	done
	die "waited for a minute in vain: $1"
}

# sides ROUND SIDE...: prints the sides in the order of this round, A B and then B A, so that no
# side is always the first after a checkpoint
sides()
{
	local sides=("${@:2}")

	if [ $(($1 % 2)) -eq 1 ]; then
		echo "${sides[@]}"
	else
		printf '%s\n' "${sides[@]}" | tac
	fi
}

# setting NAME=VALUE ...: for the rest of the figure
setting()
{
	local pair

	for pair; do
		sql postgres -c "ALTER SYSTEM SET ${pair%%=*} = '${pair#*=}'"
	done
	reload
}

# A new session has the new settings: the postmaster reloads at once. A session that exists, and
# the worker, reload when they next check for it.
reload()
{
	sql postgres -c 'SELECT pg_reload_conf()' >/dev/null
}

# record FIGURE WHAT WAY VALUE. WHAT is a line of goals.csv; WAY is 'idem' or the alternative of
# that line.
record()
{
	printf '%4s  %-32s %-16s %s\n' "$@"
	sql results -v figure="$1" -v what="$2" -v way="$3" -v value="$4" -v server="$version" \
		-v commit="$commit" -v cores="$(nproc)" <<-'SQL'
			INSERT INTO measured (figure, what, way, value, server, cores, commit)
			VALUES (:'figure', :'what', :'way', :'value', :'server', :'cores', :'commit');
		SQL
}

# remark FIGURE TEXT: what readers of the results must know about this run
remark()
{
	printf '%4s  %s\n' "$1" "$2"
	sql results -v figure="$1" -v text="$2" <<-'SQL'
		INSERT INTO remarks VALUES (:'figure', :'text') ON CONFLICT DO NOTHING;
	SQL
}

# ----- for test/bench/run -----

# The commit that is measured
tree_commit()
{
	git -C "$repository" -c safe.directory="$repository" describe --always --dirty 2>/dev/null ||
		echo unknown
}

# Figures that are not measured now keep the results of an earlier run.
open_results()
{
	local list

	commit=$(tree_commit)
	results=$bench/results/$mode
	mkdir -p "$results"
	sql postgres -c 'CREATE DATABASE results'
	sql results -f tree/test/bench/results.sql
	sql results -c '\copy goals (figure, what, unit, alternative, ratio, at_least, at_most) FROM tree/test/bench/goals.csv (FORMAT csv, HEADER)'
	if [ -e "$results/measured.csv" ]; then
		sql results -c '\copy earlier FROM STDIN (FORMAT csv, HEADER)' <"$results/measured.csv"
		sql results -c '\copy remarks FROM STDIN (FORMAT csv, HEADER)' <"$results/remarks.csv"
		list=$(IFS=,; echo "${figures[*]}")
		sql results -c "DELETE FROM earlier WHERE figure IN ($list)" -c 'SELECT take_earlier()' \
			-c "DELETE FROM remarks WHERE figure IN ($list)" >/dev/null
	fi
}

# Files are named after the figures that they measure: 01-02_claims.sh.
measure_figures()
{
	local file name first last figure

	echo "$version, $(nproc) cores, commit $commit, $mode"
	sql postgres -A -t -F ' = ' -c "SELECT name, current_setting(name) FROM pg_settings
		WHERE source = 'configuration file' AND name !~ '^(lc_|log_|listen|unix|default_text|timezone|datestyle)' COLLATE \"C\"
		ORDER BY name"
	for file in tree/test/bench/figures/*.sh; do
		name=$(basename "$file" .sh)
		first=${name%%_*}
		last=$((10#${first#*-}))
		first=$((10#${first%-*}))
		for ((figure = first; figure <= last; figure++)); do
			wants_figure "$figure" || continue
			echo "${name#*_}"
			# In a subshell, so that measure() and its helpers do not outlive it
			(
				# shellcheck source=/dev/null
				. "$file"
				measure
			)
			sql postgres -c 'ALTER SYSTEM RESET ALL'
			reload
			write_results
			break
		done
	done
	sql postgres -c 'DROP DATABASE IF EXISTS bench WITH (FORCE)'
}

# Runs after each file, so that an error in the next one does not lose these results.
# README.md and the pictures are for readers; measured.csv and remarks.csv are for the next
# run, which may measure some figures only.
write_results()
{
	sql results -c '\copy (SELECT * FROM kept) TO STDOUT (FORMAT csv, HEADER)' >"$results/measured.csv"
	sql results -c '\copy (SELECT * FROM remarks ORDER BY figure, text) TO STDOUT (FORMAT csv, HEADER)' \
		>"$results/remarks.csv"
	sql results -A -t -c "SELECT line FROM markdown" >"$results/README.md"
	# If root runs this, the files must not belong to root in the working tree of a user.
	chown -R --reference="$bench" "$bench/results"
}
