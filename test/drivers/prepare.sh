# shellcheck shell=bash
#
# Installs the drivers of doc/drivers.md. Sourced by test/run after test/lib/prepare.sh.
#
# A JDK and Go are too large to be installed for a test of some seconds. Where they are not
# installed, the tests of JDBC and of pgx are skipped.

prepare_for_drivers()
{
	need_python_modules psycopg psycopg_pool
	command -v node >/dev/null || missing+=(nodejs node-pg)
	if as_user sh -c 'command -v javac' >/dev/null && [ ! -e /usr/share/java/postgresql.jar ]; then
		missing+=(libpostgresql-jdbc-java)
	fi
	if as_user sh -c 'command -v go' >/dev/null &&
		[ ! -e /usr/share/gocode/src/github.com/jackc/pgx/v4 ]; then
		missing+=(golang-github-jackc-pgx-v4-dev)
	fi
	[ -x /usr/sbin/pgbouncer ] || command -v pgbouncer >/dev/null || services+=(pgbouncer)
}

# configure_cluster_for_drivers: the cluster also listens on a free port of 127.0.0.1, for JDBC,
# which knows no sockets. Only a role with a password can connect there.
configure_cluster_for_drivers()
{
	local port

	# shellcheck disable=SC2154 # of test/lib/prepare.sh
	port=$("$python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
	configure_cluster <<-SETTINGS
		listen_addresses = '127.0.0.1'
		port = $port
	SETTINGS
	# shellcheck disable=SC2154 # of test/lib/cluster.sh
	as_user tee "$data/pg_hba.conf" >/dev/null <<-RULES
		local all all trust
		host all all 127.0.0.1/32 scram-sha-256
	RULES
	connection+=("PGPORT=$port")
}

# missing_for jdbc|pgx|...: prints what the driver's test needs and this machine does not have
missing_for()
{
	local commands=() command

	case $1 in
		jdbc) commands=(java javac) ;;
		pgx) commands=(go) ;;
		node) ! has_node_20 || return 0; echo 'needs npm, and Node 20'; return ;;
		pg) has_node_20 || as_user node -e 'require("pg")' >/dev/null 2>&1 || { echo "no pg"; return; } ;;
	esac
	for command in "${commands[@]}"; do
		as_user sh -c "command -v $command" >/dev/null || { echo "no $command"; return; }
	done
}
