# idem: claim a request once, replay it, forget it in time.
#
#   make                 build              (WERROR=1: a warning is an error)
#   make install         install into the server that PG_CONFIG belongs to, with the
#                        portable edition as the extension idem_portable
#   make install-portable      only that; needs no compiler
#   make portable        the portable edition: sql/idem-portable.sql for psql, and
#                        sql/idem-portable-plain.sql, one statement for other clients.
#                        It and the next two need no server
#   make dist-pgtle      dist/pgtle: SQL that gives the portable edition to pg_tle
#   make dist-dbdev      dist/dbdev: the portable edition as a package for database.dev
#   make dist            dist/idem-VERSION.zip: the archive for PGXN, of what is committed
#   make clients         dist/clients: the packages of clients/ for npm and PyPI; needs npm and python3-build
#   make release-files   dist/release: the archive, the portable edition and the clients, with checksums
#   make try             dist/try: the page of doc/try with PGlite, for any file server; needs npm
#   make deb             dist/deb: Debian's packages, from packaging/debian
#   make rpm             dist/rpm: an RPM package for the server of PG_CONFIG, from packaging/rpm;
#                        RPMFLAGS="--nodeps" where the server is no RPM package
#   make release-check   says what is missing for a release of this commit
#   make installcheck    test against a running cluster (PGHOST, PGPORT, ...);
#                        EDITION=portable: the portable edition. Two tests are skipped
#                        unless max_prepared_transactions is greater than 0
#   make prove           TAP tests, on clusters of their own; not as root
#   make installcheck REGRESS=outcomes ISOLATION=     one SQL test
#   make prove PROVE_TESTS=test/t/033_documents.pl    one TAP test
#
# ./test/run does all of it on a machine that has nothing yet.

EXTENSION = idem idem_portable
MODULE_big = idem
PGFILEDESC = "idem - claim a request once, replay it, forget it in time"
DATA_built = sql/idem--1.0.sql sql/idem_portable--1.0.sql $(UPDATES)
# Not SCRIPTS: PGXS installs those beside the programs of the server.
SQL_FILES = $(DATA_built) sql/idem-portable.sql sql/idem-portable-plain.sql sql/idem-move.sql sql/idem-citus.sql
EXTRA_CLEAN = $(SQL_FILES) dist
OBJS = \
	src/idem.o \
	src/clean/start_worker.o \
	src/clean/launcher.o \
	src/clean/worker.o \
	src/clean/schedule.o \
	src/clean/sql.o \
	src/clean/batch.o \
	src/protocol/call.o \
	src/protocol/target.o \
	src/protocol/sink.o \
	src/protocol/many.o \
	src/protocol/claim_support.o \
	src/protocol/claim.o \
	src/protocol/ids.o \
	src/protocol/lease.o \
	src/protocol/settle.o \
	src/protocol/forget.o \
	src/protocol/find_row.o \
	src/protocol/lookup.o \
	src/protocol/lists.o \
	src/protocol/raise.o \
	src/protocol/blocked_by.o \
	src/session/own_claims.o \
	src/session/wait.o \
	src/session/waiting_processes.o \
	src/store/open.o \
	src/store/shape.o \
	src/store/rows.o \
	src/store/expiry.o \
	src/store/unsettled.o \
	src/store/policy.o \
	src/store/scopes.o \
	src/store/key.o \
	src/shared/stats_sql.o \
	src/clean/state.o \
	src/shared/stats.o \
	src/shared/databases.o \
	src/shared/memory.o \
	src/shared/scope_stats.o \
	src/store/catalog.o \
	src/guc.o

PG_CPPFLAGS = -I$(srcdir)/src
PG_CFLAGS = -Wall -Wextra -Wno-unused-parameter -Wno-sign-compare \
	-Wno-missing-field-initializers
# The server was configured for gcc. clang does not know all of these options, nor gnu_printf.
PG_CFLAGS += $(if $(findstring clang,$(CC)),-Wno-unknown-warning-option \
	-Wno-ignored-optimization-argument -Wno-ignored-attributes)
ifeq ($(WERROR),1)
PG_CFLAGS += -Werror
endif

# Tests. If the library is preloaded, set idem.cleanup_databases so that the worker leaves the
# databases of the tests alone: the tests look at expired claims, and fail if the worker
# has removed them.
#
# --inputdir and --outputdir override those of PGXS. pg_regress then finds test/sql, test/specs
# and ./expected with every supported server: PostgreSQL 15 looks for expected output below
# --outputdir first, later versions below --expecteddir, which is "." by default.
#
# A test checks the contract, and runs against either edition. Exceptions are these tests: each
# of them checks something that only one edition has.
EDITION = c
ONLY_c = batch_policy batch_race batch_slices claim_places cleanup_time forget_then_claim insert_race_loser \
	large_values no_extension optimistic_insert_cost optimistic_insert_race policy_latest removal_nowait \
	renamed_objects rights_statistics row_key_share scopes_changes serializable_rows \
	settings sink_memory speculative_wait store_kept store_opening table_changes \
	table_replaced unsettled_index_again update_recheck_refused
ONLY_portable = portable portable_policy portable_update_recheck portable_waits
NEEDS_PREPARED = prepared_holder two_phase

TESTED = $(if $(filter portable,$(EDITION)),idem_portable,idem)
EXCLUDED = $(ONLY_$(if $(filter portable,$(EDITION)),c,portable))
REGRESS := $(filter-out $(EXCLUDED),$(sort $(patsubst test/sql/%.sql,%,$(wildcard test/sql/*.sql))))
REGRESS_OPTS = --inputdir=test --outputdir=. --load-extension=$(TESTED)
ISOLATION := $(filter-out $(EXCLUDED),$(sort $(patsubst test/specs/%.spec,%,$(wildcard test/specs/*.spec))))
ISOLATION_OPTS = --inputdir=test --outputdir=. --load-extension=$(TESTED)
PROVE_TESTS = test/t/*.pl

# SQL tests and specs share the folder expected/.
ifneq ($(filter $(REGRESS),$(ISOLATION)),)
$(error a test and an isolation spec have the same name: $(filter $(REGRESS),$(ISOLATION)))
endif

PG_CONFIG = pg_config

# These goals need no server, and no pg_config.
SERVERLESS = portable scripts dist dist-pgtle dist-dbdev clients release-files try deb release-check sql/% dist/%
ifneq ($(filter-out $(SERVERLESS),$(or $(MAKECMDGOALS),all)),)
PGXS := $(shell $(PG_CONFIG) --pgxs)
endif

# With its default settings a server cannot prepare a transaction.
ifneq ($(filter installcheck,$(MAKECMDGOALS)),)
ifeq ($(shell '$(shell $(PG_CONFIG) --bindir)/psql' -XAt -d postgres -c 'SHOW max_prepared_transactions' 2>/dev/null),0)
$(warning skipped, since max_prepared_transactions is 0: $(NEEDS_PREPARED))
REGRESS := $(filter-out $(NEEDS_PREPARED),$(REGRESS))
ISOLATION := $(filter-out $(NEEDS_PREPARED),$(ISOLATION))
endif
endif

include $(PGXS)

# Not PROVE_FLAGS: that is the user's, and PGXS empties it.
PG_PROVE_FLAGS := -I test/lib $(PG_PROVE_FLAGS)

$(OBJS) $(OBJS:.o=.bc): $(wildcard src/*.h src/*/*.h)

# The SQL scripts, from their parts. In those of sql/common, @schema@ stands for the schema of idem:
# the C edition can be renamed with its schema, and must not have a name within quotes.
parts = $(foreach part,$1,$(or $(wildcard sql/$2/$(part).sql),sql/$(part).sql))
C_PARTS = $(call parts,checks common/begin common/version common/types common/tables policy claim sink settle call lease read forget \
	clean procedures common/statistics statistics common/overloads overloads common/rights rights common/comments \
	common/end,idem)
PORTABLE_CHECKS = $(call parts,checks upgrade strangers,portable)
PORTABLE_PARTS = $(call parts,common/begin common/version common/types common/tables types claim settle forget lease \
	waiting keys policy session read sink call clean procedures common/statistics statistics common/overloads \
	common/rights common/comments upgraded rights common/end,portable)
# With an empty line between two parts
JOIN = awk 'FNR == 1 && NR > 1 { print "" } { print }'
SCHEMA = (SELECT e.extnamespace::pg_catalog.regnamespace FROM pg_catalog.pg_extension AS e \
	WHERE e.extname OPERATOR(pg_catalog.=) 'idem')
VERSION := $(shell sed -n 's/^  "version": "\(.*\)",$$/\1/p' META.json)
# A version of the portable edition has two checksums, 1.0.0+12.34: that of its internal objects without the bodies of
# functions, and that of everything. sql/portable/upgrade.sql compares them.
CKSUM = cksum | cut -d' ' -f1
SHAPES = awk '/^CREATE .*idem__/ { shape = 1 } shape { ends = /AS \$$|^\)|;$$/; sub(/(^| )AS \$$.*/, ""); print } ends { shape = ends = 0 }'
BUILD = $(VERSION)+$(shell $(SHAPES) $(PORTABLE_PARTS) | $(CKSUM)).$(shell \
	cat $(PORTABLE_CHECKS) $(PORTABLE_PARTS) sql/portable/plain.in | $(CKSUM))
FOR_PORTABLE = sed -e "s/@schema@/'@extschema@'::pg_catalog.regnamespace/g" -e "s/@types@/'e', 'c'/" -e 's/@version@/$(BUILD)/g'
PORTABLE = $(JOIN) $(PORTABLE_CHECKS) $(PORTABLE_PARTS) | $(FOR_PORTABLE)
PORTABLE_HEAD = cat sql/portable/head.sql && echo
# One statement, which installs and upgrades. The parts take the places of the lines @checks@ and @script@.
STATEMENT = { sed '1,/^@statement@$$/d;/^@checks@$$/,$$d' sql/portable/plain.in && $(JOIN) $(PORTABLE_CHECKS) && \
	sed '1,/^@checks@$$/d;/^@script@$$/,$$d' sql/portable/plain.in && $(JOIN) $(PORTABLE_PARTS) && \
	sed '1,/^@script@$$/d' sql/portable/plain.in; } | $(FOR_PORTABLE)
# As a script of the extension
UPDATE = { printf '%s\n' "SELECT pg_catalog.set_config('idem_install.update', 'on', true);" && $(STATEMENT); }
STATEMENT_PARTS = sql/portable/plain.in $(PORTABLE_CHECKS) $(PORTABLE_PARTS) META.json Makefile
# Released versions of the extension idem_portable, each of which gets a script that updates it
UPDATES_FROM =
UPDATES = $(UPDATES_FROM:%=sql/idem_portable--%--1.0.sql)

.PHONY: scripts portable
all: scripts
scripts: $(SQL_FILES)
portable: $(filter sql/idem-%,$(filter-out $(DATA_built),$(SQL_FILES)))

sql/idem--1.0.sql: $(C_PARTS) META.json Makefile
	$(JOIN) $(C_PARTS) | sed -e "s/@schema@/$(SCHEMA)/g" -e "s/@types@/'e'/" -e 's/@version@/$(VERSION)/' >$@.tmp
	mv $@.tmp $@

sql/idem_portable--1.0.sql: sql/portable/head.sql $(STATEMENT_PARTS)
	{ printf '%s\n' '\echo Use "CREATE EXTENSION idem_portable" to load this file. \quit' && \
		$(PORTABLE_HEAD) && $(PORTABLE); } >$@.tmp
	mv $@.tmp $@

$(UPDATES): $(STATEMENT_PARTS)
	{ printf '%s\n' '\echo Use "ALTER EXTENSION idem_portable UPDATE" to load this file. \quit' && $(UPDATE); } >$@.tmp
	mv $@.tmp $@

sql/idem-portable.sql: sql/portable/psql.in sql/portable/head.sql $(STATEMENT_PARTS)
	{ $(PORTABLE_HEAD) && sed '/^@statement@$$/,$$d' $< && $(STATEMENT) && sed '1,/^@statement@$$/d' $<; } >$@.tmp
	mv $@.tmp $@

sql/idem-portable-plain.sql: $(STATEMENT_PARTS)
	{ sed '/^@statement@$$/,$$d' $< && $(STATEMENT); } >$@.tmp
	mv $@.tmp $@

# Both make the check of the portable edition.
sql/idem-move.sql sql/idem-citus.sql: sql/idem-%.sql: sql/%.in sql/portable/strangers.sql
	sed -e '/^@strangers@$$/{r sql/portable/strangers.sql' -e 'd;}' $< >$@.tmp
	mv $@.tmp $@

# Packages; not for "make install"
DIST = dist
DIST_VERSION = $(VERSION)

# For pg_tle: the SQL that makes CREATE EXTENSION idem_portable work in a database
.PHONY: dist-pgtle
dist-pgtle: $(DIST)/pgtle/idem_portable.sql
$(DIST)/pgtle/idem_portable.sql: sql/portable/head.sql $(STATEMENT_PARTS) idem_portable.control
	mkdir -p $(@D)
	{ printf '%s\n' "SELECT pgtle.install_extension('idem_portable'," && \
		sed -n -e 's/^default_version = \(.*\)/\1,/p' idem_portable.control && \
		sed -n -e 's/^comment = \(.*\)/\1,/p' idem_portable.control && \
		printf '%s\n' '$$idem_portable$$' && $(PORTABLE_HEAD) && $(PORTABLE) && \
		printf '%s\n' '$$idem_portable$$);'; \
		for from in $(UPDATES_FROM); do printf '%s\n' "SELECT pgtle.install_update_path('idem_portable', '$$from'," && \
		sed -n -e 's/^default_version = \(.*\)/\1,/p' idem_portable.control && printf '%s\n' '$$idem_portable$$' && $(UPDATE) && \
		printf '%s\n' '$$idem_portable$$);'; done; } >$@.tmp
	mv $@.tmp $@

# For database.dev: a package folder as its client takes it
DBDEV = $(DIST)/dbdev/idem_portable
.PHONY: dist-dbdev
dist-dbdev: sql/idem_portable--1.0.sql $(UPDATES)
	rm -rf $(DBDEV)
	mkdir -p $(DBDEV)
	sed "s/^default_version = .*/default_version = '$(DIST_VERSION)'/" idem_portable.control \
		>$(DBDEV)/idem_portable.control
	cp sql/idem_portable--1.0.sql $(DBDEV)/idem_portable--$(DIST_VERSION).sql
	for from in $(UPDATES_FROM); do \
		cp sql/idem_portable--$$from--1.0.sql $(DBDEV)/idem_portable--$$from--$(DIST_VERSION).sql; done
	cp sql/portable/dbdev.md $(DBDEV)/README.md

# The clients carry the portable edition, which they can install.
.PHONY: clients
clients: sql/idem-portable-plain.sql
	rm -rf $(DIST)/clients && mkdir -p $(DIST)/clients
	cp LICENSE clients/python/ && cp LICENSE clients/node/
	cp $< clients/python/src/idem_pg/
	cd clients/python && /usr/bin/python3 -m build --wheel --no-isolation --outdir ../../$(DIST)/clients
	cd clients/node && npm install --no-package-lock --no-audit --no-fund && npm run build && \
		npm pack --pack-destination ../../$(DIST)/clients

# The page works without a network: it has PGlite beside it, of the version that the tests of clients/node use.
TRY = $(DIST)/try
PGLITE = clients/node/node_modules/@electric-sql/pglite
.PHONY: try
try: sql/idem-portable-plain.sql
	[ -d $(PGLITE) ] || { cd clients/node && npm install --no-package-lock --no-audit --no-fund --ignore-scripts; }
	rm -rf $(TRY) && mkdir -p $(TRY)/pglite
	cp doc/try/* $< $(TRY)
	cp $(PGLITE)/LICENSE $(PGLITE)/dist/*.js $(PGLITE)/dist/*.wasm $(PGLITE)/dist/*.data $(TRY)/pglite

# The archive for PGXN. It and the packages made of it have what is committed, and the archive the
# SQL scripts that are made of it.
RELEASE_ARCHIVE = git archive --prefix=idem-$(DIST_VERSION)/
.PHONY: dist
dist:
	rm -rf $(DIST)/committed
	mkdir -p $(DIST)/committed
	git archive HEAD Makefile META.json sql | tar -C $(DIST)/committed -xf -
	$(MAKE) -C $(DIST)/committed scripts
	$(RELEASE_ARCHIVE)sql/ $(addprefix --add-file=$(DIST)/committed/,$(SQL_FILES)) --prefix=idem-$(DIST_VERSION)/ \
		--format=zip --output=$(DIST)/idem-$(DIST_VERSION).zip HEAD
	rm -rf $(DIST)/committed

# What is the same for all servers. Debian's, RPM's and container's tools make the rest.
RELEASE = $(DIST)/release
.PHONY: release-files
release-files: dist portable dist-pgtle dist-dbdev clients
	rm -rf $(RELEASE) && mkdir -p $(RELEASE)
	cp $(DIST)/idem-$(DIST_VERSION).zip $(DIST)/clients/* $(filter sql/idem-%,$(filter-out $(DATA_built),$(SQL_FILES))) $(RELEASE)
	cp $(DIST)/pgtle/idem_portable.sql $(RELEASE)/idem_portable-pgtle.sql
	tar -C $(DIST)/dbdev -czf $(RELEASE)/idem_portable-dbdev.tar.gz idem_portable
	cd $(RELEASE) && sha256sum * >SHA256SUMS

# Debian's packages. pg_buildext names them after the servers for which there are headers. It calls
# make itself, for each server: this make's arguments are not for those.
DEB = $(DIST)/deb
.PHONY: deb
deb:
	rm -rf $(DEB)
	mkdir -p $(DEB)
	$(RELEASE_ARCHIVE) --format=tar.gz --output=$(DEB)/idem_$(DIST_VERSION).orig.tar.gz HEAD
	tar -C $(DEB) -xf $(DEB)/idem_$(DIST_VERSION).orig.tar.gz
	cp -r $(DEB)/idem-$(DIST_VERSION)/packaging/debian $(DEB)/idem-$(DIST_VERSION)/
	cd $(DEB)/idem-$(DIST_VERSION) && pg_buildext updatecontrol && \
		env -u MAKEFLAGS -u MAKELEVEL dpkg-buildpackage --no-sign

RPM = $(abspath $(DIST)/rpm)
.PHONY: rpm
rpm: dist
	rm -rf $(RPM)
	env -u MAKEFLAGS -u MAKELEVEL rpmbuild -ba packaging/rpm/idem.spec $(RPMFLAGS) \
		--define '_topdir $(RPM)' --define '_sourcedir $(abspath $(DIST))' \
		--define 'pgmajorversion $(MAJORVERSION)' \
		--define 'pginstdir $(patsubst %/bin,%,$(shell $(PG_CONFIG) --bindir))' \
		--define 'pgsharedir $(shell $(PG_CONFIG) --sharedir)' \
		--define 'pglibdir $(shell $(PG_CONFIG) --pkglibdir)'

.PHONY: release-check
release-check:
	packaging/release-check

.PHONY: install-portable
install-portable: sql/idem_portable--1.0.sql $(UPDATES)
	$(MKDIR_P) '$(DESTDIR)$(datadir)/extension'
	$(INSTALL_DATA) idem_portable.control $^ '$(DESTDIR)$(datadir)/extension/'

.PHONY: prove
# Tests read the SQL that is generated.
prove: scripts
	$(prove_installcheck)

installcheck: portable
