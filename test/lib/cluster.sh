# shellcheck shell=bash
#
# A cluster in the workspace of test/lib/prepare.sh, which listens only on a socket in there.
# Sourced by test/run, test/demo and test/bench/run.

: "${workspace?test/lib/prepare.sh comes first}"

data=
connection=()

# client COMMAND ...: runs a client of the cluster
client()
{
	as_user env "${connection[@]}" "$@"
}

# sql DATABASE [PSQL-ARGUMENT ...]: runs psql
sql()
{
	client psql -X -q -v ON_ERROR_STOP=1 -d "$@"
}

# make_cluster NAME: reads settings from stdin, one a line
make_cluster()
{
	data=$workspace/$1
	connection=("PGHOST=$workspace/tmp" PGUSER=postgres)
	as_user initdb -D "$data" -U postgres -A trust -E UTF8 --locale=C.UTF-8 \
		--no-sync </dev/null >"$data.initdb" 2>&1 ||
		{ cat "$data.initdb" >&2; die "initdb failed"; }
	configure_cluster <<-SETTINGS
		listen_addresses = ''
		unix_socket_directories = '$workspace/tmp'
		log_line_prefix = '%m [%p] %b '
	SETTINGS
	configure_cluster
}

# Reads settings from stdin, one a line. They act from the next start on.
configure_cluster()
{
	as_user tee -a "$data/postgresql.conf" >/dev/null
}

start_cluster()
{
	as_user pg_ctl -D "$data" -l "$data.log" -t 120 -s -w start </dev/null ||
		{ tail -n 30 "$data.log" >&2; die "the server does not start"; }
}

# stop_cluster fast|immediate
stop_cluster()
{
	as_user pg_ctl -D "$data" -m "$1" -s -w stop </dev/null
}

# Prints the lines of the server's log that no test may cause: a crash, a failed assertion, a
# buffer or reference that was not released. Returns false if there is none
server_faults()
{
	grep -E 'was terminated by signal|TRAP:|PANIC:|WARNING:.* (leak|not closed)' \
		"$data.log"
}
