# shellcheck shell=bash
#
# Prepares a machine: a server with headers and a compiler, a workspace, the extension built and
# installed. Sourced by test/run, test/demo, test/versions and test/bench/run.
#
# Only packages are installed as root, and the extension if the server's folders need it.
# Everything else happens in the workspace, a temporary folder, as a user that is not root, since
# a server refuses to run as root. Existing clusters and the working tree are never changed.
#
# After prepare_machine: $pg_config, $bindir, $pgxs and $version.
# After make_workspace: $workspace, with a copy of the tree in $workspace/tree.

repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
python=${IDEM_PYTHON:-/usr/bin/python3}
workspace=
uninstall=
bindir=
missing=()		# packages
services=()		# packages that would start a service
optional=()		# packages that not each Debian has

die()
{
	echo "$(basename "$0"): $*" >&2
	exit 1
}

as_root()
{
	if [ "$(id -u)" -eq 0 ]; then
		"$@"
	else
		command -v sudo >/dev/null || die "needs root, or sudo, for: $*"
		sudo "$@"
	fi
}

# as_user COMMAND ...: runs it as a user that is not root. The environment is empty, so that PGHOST
# or a locale of the caller cannot change the tests.
as_user()
{
	local command=(env -i "PATH=${bindir:+$bindir:}/usr/local/bin:/usr/bin:/bin"
		"HOME=$workspace" "TMPDIR=$workspace/tmp" LC_ALL=C.UTF-8 "$@")

	if [ "$(id -u)" -eq 0 ]; then
		runuser -u "$(server_user)" -- "${command[@]}"
	else
		"${command[@]}"
	fi
}

server_user()
{
	if [ "$(id -u)" -ne 0 ]; then
		id -un
	elif id postgres >/dev/null 2>&1; then
		echo postgres
	else
		echo nobody
	fi
}

# complete_server PG_CONFIG: is there a server, and are there its headers?
complete_server()
{
	[ -x "$("$1" --bindir 2>/dev/null)/postgres" ] &&
		[ -f "$("$1" --includedir-server)/postgres.h" ] &&
		[ -f "$("$1" --pgxs)" ]
}

# Sets $pg_config: the newest of Debian's servers, else the one in the path
find_server()
{
	local candidate

	if [ -n "${PG_CONFIG:-}" ]; then
		pg_config=$(command -v "$PG_CONFIG") || die "no such command: $PG_CONFIG"
		complete_server "$pg_config" ||
			die "$PG_CONFIG: the server or its headers are missing"
		return
	fi
	for candidate in $(printf '%s\n' /usr/lib/postgresql/*/bin/pg_config |
		sort --version-sort --reverse) pg_config; do
		if pg_config=$(command -v "$candidate") &&
			complete_server "$pg_config"; then
			return
		fi
	done
	return 1
}

# The packages of a server with headers: for the newest server that is installed, else the version
# of the distribution
server_packages()
{
	local server

	server=$(printf '%s\n' /usr/lib/postgresql/*/bin/postgres |
		sort --version-sort | tail -n 1)
	if [ -x "$server" ]; then
		server=${server#/usr/lib/postgresql/}
		server=${server%%/*}
	else
		server=$(apt-cache show --no-all-versions postgresql |
			sed -n 's/^Depends:.*postgresql-\([0-9]\+\).*/\1/p')
		[ -n "$server" ] || die "no package postgresql: install a server first"
	fi
	echo "postgresql-$server" "postgresql-server-dev-$server"
}

apt()
{
	local log

	log=$(mktemp)
	if ! as_root env DEBIAN_FRONTEND=noninteractive \
		apt-get -q -y "$@" </dev/null >"$log" 2>&1; then
		cat "$log" >&2
		rm -f "$log"
		die "apt-get $* failed"
	fi
	rm -f "$log"
}

# install_packages PACKAGE ...: if this installs the first server, it creates no cluster. Debian's
# packages would create one and start it.
install_packages()
{
	local no_cluster=/etc/postgresql-common/createcluster.d/no-main-cluster.conf

	echo "installing $*"
	if [ -d /etc/postgresql-common ]; then
		apt install --no-install-recommends "$@"
		return
	fi
	as_root mkdir -p "$(dirname "$no_cluster")"
	echo 'create_main_cluster = false' | as_root tee "$no_cluster" >/dev/null
	apt install --no-install-recommends "$@"
	as_root rm -f "$no_cluster"
}

# prepare_machine [FUNCTION ...]: installs what is missing, all at once, since each apt-get takes seconds: of a server with
# headers and a compiler, and what the functions add to $missing, $services and $optional
prepare_machine()
{
	local function

	if ! find_server; then
		pg_config=
		command -v apt-get >/dev/null || die "not a Debian: please install a server with its headers"
		apt update
		# shellcheck disable=SC2207 # words are what it prints
		missing+=($(server_packages))
	fi
	command -v gcc >/dev/null || missing+=(gcc libc6-dev)
	command -v make >/dev/null || missing+=(make)
	{ command -v prove && perl -MIPC::Run -e 1; } >/dev/null 2>&1 ||
		missing+=(libipc-run-perl)
	for function in "$@"; do
		"$function"
	done
	install_missing
	find_server || die "no server with headers, even after installing one"
	bindir=$("$pg_config" --bindir)
	pgxs=$("$pg_config" --pgxs)
	# shellcheck disable=SC2034 # for the caller
	version=$("$pg_config" --version)
	export PG_CONFIG=$pg_config
	[ -z "${IDEM_INSTALLED:-}" ] || [ -e "$("$pg_config" --pkglibdir)/idem.so" ] ||
		die "IDEM_INSTALLED is set, but the extension is not installed for $version"
}

install_missing()
{
	local package

	[ $((${#missing[@]} + ${#services[@]} + ${#optional[@]})) -gt 0 ] || return 0
	if [ $((${#missing[@]} + ${#services[@]})) -eq 0 ]; then
		command -v apt-get >/dev/null && (apt update) || return 0
	else
		command -v apt-get >/dev/null || die "not a Debian: please install ${missing[*]} ${services[*]}"
		apt update
	fi
	for package in "${optional[@]}"; do
		! apt-get -qq -s install "$package" >/dev/null 2>&1 || missing+=("$package")
	done
	[ $((${#missing[@]} + ${#services[@]})) -eq 0 ] || install_without_service "${services[*]}" "${missing[@]}"
	missing=() services=() optional=()
}

# install_without_service "SERVICE ..." [PACKAGE ...]: Debian's packages would start their services, now and at each boot;
# this prevents both.
install_without_service()
{
	local no_services=/usr/sbin/policy-rc.d service

	(
		if [ -n "$1" ] && [ ! -e "$no_services" ]; then
			trap 'as_root rm -f "$no_services"' EXIT
			printf '#!/bin/sh\nexit 101\n' | as_root tee "$no_services" >/dev/null
			as_root chmod 755 "$no_services"
		fi
		# shellcheck disable=SC2086 # words
		install_packages $1 "${@:2}"
		for service in $1; do
			as_root update-rc.d "$service" disable
		done
	)
}

# Other extensions, beside which tap tries idem. Debian has them for servers of its own only, and not for each
# version: where one is missing, its test is skipped.
prepare_for_tap()
{
	local libraries=/nowhere package server

	if [ -n "$pg_config" ]; then
		libraries=$("$pg_config" --pkglibdir)
		server=$("$pg_config" --bindir)
		server=${server#/usr/lib/postgresql/}
		server=${server%/bin}
	else
		server=${missing[0]#postgresql-}
	fi
	[[ $server =~ ^[0-9]+$ ]] || return 0
	for package in cron/pg_cron pgaudit/pgaudit repack/pg_repack set-user/set_user; do
		[ -e "$libraries/${package#*/}.so" ] || optional+=("postgresql-$server-${package%/*}")
	done
}

# need_python_modules MODULE ...: of Debian's packages
need_python_modules()
{
	local module

	for module in "$@"; do
		"$python" -c "import $module" 2>/dev/null || missing+=("python3-${module//_/-}")
	done
}

# What the examples need besides the server. Those in JavaScript need npm, and Node 20.
prepare_for_examples()
{
	need_python_modules psycopg psycopg_pool redis
	command -v redis-server >/dev/null || services+=(redis-server)
	perl -MDBD::Pg -e 1 2>/dev/null || missing+=(libdbd-pg-perl)
	perl -MRedis -e 1 2>/dev/null || missing+=(libredis-perl)
}

# What the clients and their tests need. Debian 12 has no Node 20: without it, and npm, the tests of
# the client for Node are skipped.
prepare_for_clients()
{
	need_python_modules psycopg psycopg_pool asyncpg flask starlette fastapi uvicorn django sqlalchemy psycopg2 pytest build
	"$python" -c 'import ensurepip' 2>/dev/null || missing+=(python3-venv)
	command -v mypy >/dev/null || missing+=(mypy)
	[ -x /usr/sbin/pgbouncer ] || command -v pgbouncer >/dev/null || services+=(pgbouncer)
}

prepare_for_torture()
{
	command -v spin >/dev/null || ! command -v apt-get >/dev/null || missing+=(spin)
}

has_node_20()
{
	command -v npm >/dev/null && node -e 'process.exit(+(parseInt(process.versions.node) < 20))'
}

# Installs the modules of the client for Node into the workspace, where each program below it finds them
install_node_modules()
{
	mkdir modules
	cp tree/clients/node/package.json modules/
	(cd modules && npm install --silent --no-package-lock --no-audit --no-fund --ignore-scripts </dev/null) ||
		die "npm install of clients/node/package.json failed"
	mv modules/node_modules .
}

# Makes the workspace with a copy of the tree, but without files of earlier builds and tests
make_workspace()
{
	workspace=$(mktemp -d "${TMPDIR:-/tmp}/idem.XXXXXX")
	mkdir "$workspace/tree" "$workspace/tmp"
	tar -C "$repository" -cf - --exclude=./.git --exclude='*.o' --exclude='*.bc' \
		--exclude='*.so' --exclude=./results --exclude=./tmp_check . |
		tar -C "$workspace/tree" --no-same-owner -xf -
	chmod 755 "$workspace"
	if [ "$(id -u)" -eq 0 ]; then
		chown -R "$(server_user):" "$workspace"
	fi
	cd "$workspace" || exit
}

# Stops servers that an interrupted test has left running in the workspace.
stop_servers()
{
	local pidfile

	find "$workspace" -name postmaster.pid | while read -r pidfile; do
		as_user pg_ctl -D "$(dirname "$pidfile")" -s -m immediate stop \
			</dev/null >/dev/null 2>&1 || true
	done
}

# For an EXIT trap
remove_workspace()
{
	[ -n "$workspace" ] || return 0
	cd /
	stop_servers
	rm -rf "$workspace"
	workspace=
}

# Copies the server into the workspace, and uses the copy from then on: for a library that other
# clusters must not find. A server finds its files relative to its programs.
copy_server()
{
	local from

	for from in "$(dirname "$bindir")" "$("$pg_config" --sharedir)" "$("$pg_config" --pkgincludedir)" \
		"$("$pg_config" --includedir-server)" "$("$pg_config" --pkglibdir)" "$(dirname "$(dirname "$(dirname "$pgxs")")")"; do
		[ -e "$workspace/server$from" ] && continue
		as_user mkdir -p "$workspace/server$from"
		as_user cp -aL "$from/." "$workspace/server$from/"
	done
	pg_config=$workspace/server$pg_config
	[ -x "$pg_config" ] || pg_config=$workspace/server$bindir/pg_config
	bindir=$("$pg_config" --bindir)
	pgxs=$("$pg_config" --pgxs)
	export PG_CONFIG=$pg_config
	[[ $bindir == $workspace/* ]] || die "the copy of the server is not used: $bindir"
}

# The clang that the server was built with. It is needed for the bitcode of just-in-time inlining,
# but not in every distribution does the package of the headers depend on it.
server_clang()
{
	sed -n 's/^CLANG = //p' "$(dirname "$pgxs")/../Makefile.global"
}

make_arguments()
{
	echo "PG_CONFIG=$pg_config"
	[ -x "$(server_clang)" ] || echo with_llvm=no
}

# build FOLDER [MAKE-ARGUMENT ...]: warnings are errors unless WERROR=0
build()
{
	# shellcheck disable=SC2046 # one word an argument
	as_user make --silent -C "$1" -j "$(nproc)" WERROR="${WERROR:-1}" \
		$(make_arguments) "${@:2}"
}

# install_extension FOLDER [MAKE-ARGUMENT ...]: what build made, with the same arguments. It
# goes into the folders of the server, where every cluster finds it.
install_extension()
{
	local as=as_root

	if [ -w "$("$pg_config" --pkglibdir)" ] &&
		[ -w "$("$pg_config" --sharedir)/extension" ]; then
		as=
	fi
	# shellcheck disable=SC2046 # one word an argument
	$as make --silent -C "$1" $(make_arguments) "${@:2}" install >/dev/null
	uninstall="make -C $repository PG_CONFIG=$pg_config uninstall"
	if [ -n "$as" ] && [ "$(id -u)" -ne 0 ]; then
		uninstall="sudo $uninstall"
	fi
}

# What install_extension has left on this machine, and how to remove it
say_what_is_installed()
{
	[ -n "$uninstall" ] || return 0
	cat <<-INSTALLED

		The extension stays installed for every cluster of $version:
		$("$pg_config" --pkglibdir)/idem.so and $("$pg_config" --sharedir)/extension/idem*
		To remove it: $uninstall

	INSTALLED
}
