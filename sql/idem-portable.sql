/*
 * idem, portable edition: the contract of the extension idem in SQL and PL/pgSQL.
 *
 * For servers on which no C can be installed.  Needs PostgreSQL 15 or later and no
 * superuser:
 *
 *		psql -v schema=idem -f sql/idem-portable.sql
 *
 * installs it into an existing schema (default: public), in one transaction.  The objects
 * belong to the installer.  If the installer is a superuser and the owner of the schema is
 * not, they belong to the owner of the schema.  The schema cannot be renamed afterwards.
 * Functions, outcomes, SQLSTATEs and tables are those of the C edition: callers do not change
 * when they move to it.
 *
 * The Makefile makes of this file the extension idem_portable, which packages can install
 * under another name; and sql/idem-portable-plain.sql, for clients other than psql.
 * sql/idem-citus.sql, loaded after this file, distributes the claims over a Citus cluster.
 *
 * Limits of this edition:
 *
 * - It has no worker.  pg_cron, or a timer of a client, must clean up:
 *		SELECT cron.schedule('idem', '10 seconds', 'CALL idem.idem_cleanup_all()');
 * - A waiter for a lease polls, with pauses of up to 100 ms.
 * - lock_timeout bounds a wait for a transaction, and ends it with an error.  So each claim
 *	 runs in a subtransaction.  Waiters notice a ROLLBACK TO of the holder up to
 *	 deadlock_timeout plus a second late.  More than 64 claims in one transaction slow down
 *	 other sessions that read rows younger than it; a batch of new keys counts as a few claims.
 * - A claim with wait => '0' waits for a transaction that has removed the request and has
 *	 claimed it again: only the removal is visible.
 * - A claim with wait => '0' waits for a moment for a transaction that holds the request.  If that
 *	 transaction itself waits for the one of the claim, and checks for a deadlock at that moment, it
 *	 gets 40P01.
 * - A change that moves guarded_since (uuidv7 is switched on, or a ttl grows under it) waits
 *	 for every transaction that has claimed, and for other changes of idem_scopes.
 * - REPEATABLE READ and SERIALIZABLE take the policy from their snapshot.  Let no such
 *	 transaction run while uuidv7 is switched on, or a ttl grows under it.
 * - In these levels idem_cleanup() removes what the snapshot sees as expired, or raises
 *	 40001.  A claim with wait => '0' answers in_progress if a row newer than the snapshot is
 *	 being removed; elsewhere it waits for the removal.
 * - In SERIALIZABLE, reading claims counts among the read/write dependencies.  A wait that the
 *	 caller's own lock_timeout ends does not.
 * - Claims are not counted: idem_stat_claims and idem_stat_reset() do not exist, and
 *	 idem_metrics has no sample of them.  The settings idem.ttl, idem.lease, idem.lease_max, idem.result_max_bytes,
 *	 idem.scopes and idem.cleanup_batch_size are columns of the table idem_settings.
 * - It is slower than the hand-written statement, by a factor of about five.  Leases, claims in REPEATABLE READ and
 *	 SERIALIZABLE, and claims of scopes with key_time = uuidv7 are slower by an order of magnitude.
 *
 * How to read it.  Functions with two underscores are internal.  The protocol is
 * idem__claim_key().  idem__settle() ends a key.  Everything else serves these two.
 * idem__claim_at_once(), idem__claim_all_at_once() and idem__complete_at_once() decide the common
 * cases of them in fewer statements: the fast path.
 *
 * How it is written.
 *
 * - A word between two @ stands for the schema of the installation.  psql replaces it below;
 *	 CREATE EXTENSION does so by itself, also in a comment, which the name could end: so no
 *	 comment has it.
 * - No string contains a backslash, except those that begin with E.  A session keeps a
 *	 function as it first parsed it, and it may have done so with standard_conforming_strings
 *	 = off.
 * - Lines marked "psql only" are left out where the text is not run by psql: in the extension
 *	 and in sql/idem-portable-plain.sql, which is one statement for other clients.
 * - sql/idem-citus.sql replaces the functions that say so.  Citus can plan the others
 *	 because each query of idem_claims names the user, and no update of idem_claims calls a
 *	 volatile function.
 *
 * Security.
 *
 * - Callers need no right on the tables: the functions run as their owner (SECURITY
 *	 DEFINER).  Nothing is granted to PUBLIC, nor to the grantees of default privileges.
 * - No name is looked up where others can put an object.  Public functions and triggers have
 *	 the search_path pg_catalog, pg_temp, and qualify every name of ours.  Internal functions
 *	 can be executed by the owner only, and run under the search_path of the function that
 *	 calls them.  One of their own would cost a microsecond or two, and would keep SQL
 *	 functions from being inlined.  idem_cleanup_all() commits, so it cannot have a
 *	 search_path, and idem_call() leaves its caller's to the function that it runs: they
 *	 qualify every name.
 * - The installation is refused if a role can create objects in the schema, or owns
 *	 functions, operators or types in it, unless that role is a superuser or the owner-to-be.
 * - A role can still get an object into the schema later: somebody grants it CREATE, or a
 *	 transaction commits that was open during the installation.  We never call such a
 *	 function, even if it has the name of one of ours: each call in this file passes all
 *	 arguments, in exactly the declared types, and PostgreSQL then prefers our function.  (A
 *	 string literal has no type where we declare text, which literals prefer.)  An untyped
 *	 NULL, an int4 for an int8, or a default left out would let another function match
 *	 better, and run as our owner.  (A function that has one more argument, with a default, makes
 *	 our call ambiguous: such a role can make claims fail.)
 * - The owner of the schema and the owner of the database can drop idem.
 * - A trigger on one of our tables runs as our owner.  GRANT ALL ON ALL TABLES gives the
 *	 right to create one (TRIGGER).  Grant by idem_grant() instead.
 * - idem_call(), idem_grant(), idem_revoke(), idem_cleanup_all() and the triggers run with
 *	 the rights of their caller.  A superuser who does not trust the owner of idem must not
 *	 call them, and must not write its tables.
 */

\set ON_ERROR_STOP on
\if :{?schema}
\else
\set schema public
\endif
\if :{?within_transaction}
\else
BEGIN;										-- psql only
\endif
SET LOCAL search_path = pg_catalog, pg_temp;	-- psql only
SET LOCAL standard_conforming_strings = on;	-- psql only
-- As below; psql has set another search_path.
SELECT $$DO 'BEGIN RAISE EXCEPTION USING ERRCODE = ''invalid_schema_name'', MESSAGE = ''the name of the schema is empty, or contains a quote, a dollar sign or a backslash'', HINT = ''Name another one: psql -v schema=NAME.''; END'$$ WHERE :'schema' ~ '^$|["$''\\]' -- psql only
\gexec
SELECT replace($script$						-- psql only

-- ----- whether it can be installed -----

-- On Citus, everything stays on this node until idem_distribute().
SET LOCAL citus.enable_ddl_propagation = off;	-- psql only
-- The name is pasted into function bodies.  CREATE EXTENSION lets it end them before PostgreSQL
-- 15.4 (CVE-2023-39417).  It has put the schema into the search_path.
DO $block$
BEGIN
	IF pg_catalog.current_schema()::pg_catalog.text OPERATOR(pg_catalog.~) E'["$''\\\\]' THEN
		RAISE EXCEPTION 'the name of the schema contains a quote, a dollar sign or a backslash'
			USING ERRCODE = 'invalid_schema_name', HINT = 'Name another one.';
	END IF;
END
$block$;
SET LOCAL search_path = pg_catalog, pg_temp;

DO $block$
DECLARE
	schema constant regnamespace := to_regnamespace('@extschema@');
	installer constant oid := (SELECT r.oid FROM pg_roles AS r WHERE r.rolname = current_user);
	schema_owner oid;
	owner oid := installer;			-- of what is made here
	strangers oid[];				-- neither superusers nor the owner, nor members of those
	other text;
	is_of_tenant boolean;
BEGIN
	SELECT CASE n.nspowner WHEN 'pg_database_owner'::regrole THEN d.datdba ELSE n.nspowner END INTO schema_owner
	FROM pg_namespace AS n, pg_database AS d
	WHERE n.oid = schema AND NOT n.nspname ^@ 'pg_' AND d.datname = current_database();
	IF NOT FOUND THEN
		RAISE EXCEPTION 'there is no schema to install idem into'
			USING ERRCODE = 'invalid_schema_name',
			HINT = 'Create it first, or name another one: psql -v schema=NAME.';
	END IF;
	-- On Citus, whose schema-based sharding keeps each table of a tenant's schema on one node
	IF to_regclass('pg_catalog.pg_dist_schema') IS NOT NULL THEN
		EXECUTE 'SELECT EXISTS (SELECT FROM pg_catalog.pg_dist_schema AS s WHERE s.schemaid = $1)' INTO is_of_tenant USING schema;
		IF is_of_tenant THEN
			RAISE EXCEPTION 'schema % is distributed', schema
				USING ERRCODE = 'feature_not_supported',
				HINT = 'Install idem into another schema: SET citus.enable_schema_based_sharding = off; CREATE SCHEMA idem.';
		END IF;
	END IF;
	IF EXISTS (SELECT FROM pg_extension WHERE extname = 'idem') THEN
		RAISE EXCEPTION 'extension "idem" is installed in this database'
			USING ERRCODE = 'duplicate_object',
			DETAIL = 'It is the C edition of the same functions.',
			HINT = 'Use it, or move it here: sql/idem-move.sql.';
	END IF;
	-- Skip temporary schemas: otherwise every role could block the installation.
	SELECT format('%I', n.nspname) INTO other
	FROM pg_proc AS p JOIN pg_namespace AS n ON n.oid = p.pronamespace
		JOIN pg_class AS c ON c.relnamespace = n.oid AND c.relname = 'idem_claims'
	WHERE p.proname = 'idem_try_claim' AND n.nspname !~ '^pg_(toast_)?temp_' LIMIT 1;
	IF FOUND THEN
		RAISE EXCEPTION 'idem is installed in this database already, in schema %', other
			USING ERRCODE = 'duplicate_object',
			HINT = 'Use that one, since two would not know of each other''s claims; sql/idem-move.sql puts a new version in its place. If you drop it, all claims are lost, and retries are executed again. If it only looks like idem, have its table idem_claims or its function idem_try_claim dropped.';
	END IF;

	-- The functions run as their owner.  In a schema of somebody else that must not be a
	-- superuser: the owner of the schema could rename it, and put another one in its place.
	IF (SELECT r.rolsuper FROM pg_roles AS r WHERE r.oid = installer)
		AND NOT (SELECT r.rolsuper FROM pg_roles AS r WHERE r.oid = schema_owner) THEN
		owner := schema_owner;
	END IF;

	IF (SELECT r.rolsuper FROM pg_roles AS r WHERE r.oid = owner) THEN
		RAISE WARNING 'the functions of idem will run as a superuser: %', owner::regrole
			USING DETAIL = 'They run as their owner.',
			HINT = 'Drop idem, and install it as an ordinary role, or into the schema of an ordinary role.';
	END IF;

	-- sql/idem-move.sql and sql/idem-citus.sql make the same two checks.
	strangers := ARRAY(SELECT r.oid FROM pg_roles AS r
		WHERE NOT EXISTS (SELECT FROM pg_roles AS t WHERE (t.rolsuper OR t.oid = owner) AND pg_has_role(r.oid, t.oid, 'MEMBER')));
	SELECT string_agg(DISTINCT CASE c.grantee WHEN '0'::oid THEN 'PUBLIC' ELSE r.oid::regrole::text END, ', ') INTO other
	FROM (SELECT schema_owner UNION
			SELECT CASE a.grantee WHEN 'pg_database_owner'::regrole THEN d.datdba ELSE a.grantee END
			FROM pg_namespace AS n, aclexplode(n.nspacl) AS a, pg_database AS d
			WHERE n.oid = schema AND a.privilege_type = 'CREATE' AND d.datname = current_database()) AS c (grantee)
		LEFT JOIN pg_roles AS r ON c.grantee <> '0'::oid AND pg_has_role(r.oid, c.grantee, 'MEMBER')
	WHERE c.grantee = '0'::oid OR r.oid = ANY (strangers);
	IF other IS NOT NULL THEN
		RAISE EXCEPTION 'others may create objects in schema %: %', schema, other
			USING ERRCODE = 'object_not_in_prerequisite_state',
			DETAIL = 'The functions of idem run as their owner.',
			HINT = 'Install idem into a schema of its own (CREATE SCHEMA idem); or as the owner of this one, when CREATE on it is revoked from all others.';
	END IF;
	SELECT string_agg(o.name, ', ') INTO other
	FROM (SELECT 'function ' || p.oid::regprocedure FROM pg_proc AS p WHERE p.pronamespace = schema AND p.proowner = ANY (strangers)
			UNION ALL SELECT 'operator ' || o.oid::regoperator FROM pg_operator AS o WHERE o.oprnamespace = schema AND o.oprowner = ANY (strangers)
			UNION ALL SELECT 'type ' || t.oid::regtype FROM pg_type AS t LEFT JOIN pg_class AS c ON c.oid = t.typrelid
				WHERE t.typnamespace = schema AND t.typowner = ANY (strangers)
					AND t.typcategory <> 'A' AND coalesce(c.relkind = 'c', true)		-- skip row types of tables
			ORDER BY 1 LIMIT 10) AS o (name);
	IF other IS NOT NULL THEN
		RAISE EXCEPTION 'others own objects in schema %: %', schema, other
			USING ERRCODE = 'object_not_in_prerequisite_state',
			DETAIL = 'The functions of idem run as their owner.',
			HINT = 'Install idem into a schema of its own: CREATE SCHEMA idem.';
	END IF;

	PERFORM set_config('idem_install.role', current_setting('role'), true);
	-- Tables and indexes go where the database has its own.
	PERFORM set_config('idem_install.tablespace', current_setting('default_tablespace'), true),
		set_config('default_tablespace', '', true);
	IF owner <> installer THEN
		BEGIN
			PERFORM set_config('role', r.rolname, true) FROM pg_roles AS r WHERE r.oid = owner;
		EXCEPTION WHEN insufficient_privilege THEN
			RAISE EXCEPTION 'idem cannot be installed for role %, the owner of schema %', owner::regrole, schema
				USING ERRCODE = 'insufficient_privilege', DETAIL = SQLERRM, HINT = 'Install it as that role.';
		END;
	END IF;
	IF NOT has_schema_privilege(schema, 'CREATE') THEN
		RAISE EXCEPTION 'role % may not create objects in schema %', owner::regrole, schema
			USING ERRCODE = 'insufficient_privilege',
			HINT = format('GRANT CREATE ON SCHEMA %s TO %s; or install idem into a schema of its own.', schema, owner::regrole);
	END IF;
END
$block$;

-- ----- types -----

CREATE TYPE @extschema@.idem_state AS ENUM ('in_progress', 'completed', 'failed');

COMMENT ON TYPE @extschema@.idem_state IS 'state of a stored claim';

CREATE TYPE @extschema@.idem_outcome AS ENUM (
	'claimed', 'completed', 'failed', 'in_progress', 'timed_out', 'unknown',
	'mismatch', 'stale', 'invalid'
);

COMMENT ON TYPE @extschema@.idem_outcome IS 'answer of a claim call';

-- Collation "C" as in the table: otherwise a collation of the caller could decide which
-- keys are equal.
CREATE TYPE @extschema@.idem__key AS (
	user_id text COLLATE "C",
	request_id text COLLATE "C",
	scope text COLLATE "C"
);

-- Whether a row of idem_claims, of which this gets three columns, is that of the key.  The
-- planner inlines it, and then finds the primary key.
CREATE FUNCTION @extschema@.idem__has_key(user_id text, request_id text, scope text, key @extschema@.idem__key)
RETURNS boolean
LANGUAGE sql IMMUTABLE
AS $$ SELECT user_id = (key).user_id AND request_id = (key).request_id AND scope = (key).scope $$;

CREATE TYPE @extschema@.idem__answer AS (
	outcome @extschema@.idem_outcome,
	result jsonb,
	progress jsonb,
	token int8,
	expires_at timestamptz,
	lease_until timestamptz
);

-- ----- claims -----

-- The same table as in the C edition: sql/idem--1.0.sql explains it.
CREATE TABLE @extschema@.idem_claims (
	expires_at timestamptz NOT NULL,
	lease_until timestamptz,
	token int8,
	state @extschema@.idem_state NOT NULL,
	request_id text COLLATE "C" NOT NULL,
	user_id text COLLATE "C" NOT NULL,
	scope text COLLATE "C" NOT NULL,
	fingerprint bytea,
	result jsonb,
	progress jsonb,
	PRIMARY KEY (request_id, user_id, scope)
) USING heap WITH (
	autovacuum_vacuum_scale_factor = 0.02,
	autovacuum_vacuum_threshold = 5000,
	autovacuum_vacuum_insert_scale_factor = 0.1,
	autovacuum_analyze_scale_factor = 0.1,
	autovacuum_vacuum_cost_delay = 0
);

CREATE INDEX idem_claims_expires_at_idx ON @extschema@.idem_claims (expires_at);

CREATE INDEX idem_claims_unsettled_idx ON @extschema@.idem_claims (scope)
	WHERE state = 'in_progress'::@extschema@.idem_state;

-- A row of idem_claims.  No function takes or returns the row type of a table: Citus drops and
-- makes a table again to change its shards, and the functions would go with it.
CREATE TYPE @extschema@.idem__claim AS (
	expires_at timestamptz,
	lease_until timestamptz,
	token int8,
	state @extschema@.idem_state,
	request_id text COLLATE "C",
	user_id text COLLATE "C",
	scope text COLLATE "C",
	fingerprint bytea,
	result jsonb,
	progress jsonb
);

COMMENT ON TABLE @extschema@.idem_claims IS 'requests that have been executed, or are being executed under a lease';
COMMENT ON COLUMN @extschema@.idem_claims.expires_at IS 'remembered at least until then';
COMMENT ON COLUMN @extschema@.idem_claims.lease_until IS 'end of the lease; NULL for a transactional claim, and for a lease that was healed';
COMMENT ON COLUMN @extschema@.idem_claims.token IS 'fencing token; NULL for a transactional claim';
COMMENT ON COLUMN @extschema@.idem_claims.result IS 'stored response; of a failed request the error; NULL for a marker';

CREATE SEQUENCE @extschema@.idem_token_seq AS int8 CACHE 1;

COMMENT ON SEQUENCE @extschema@.idem_token_seq IS 'fencing tokens';

-- ----- policy -----

-- Only an operator may set what a claim promises, but anybody may change a custom setting.
-- So the settings are a table.  It has one row; an INSERT, by a restored dump say, replaces
-- it.
CREATE TABLE @extschema@.idem_settings (
	only_row boolean PRIMARY KEY DEFAULT true CHECK (only_row),
	ttl interval NOT NULL DEFAULT '1 hour' CHECK (
		ttl >= '1 second' AND ttl <= '36500 days'
		AND date_part('year', ttl) = 0 AND date_part('month', ttl) = 0),
	lease interval NOT NULL DEFAULT '30 seconds' CHECK (
		lease > '0' AND lease <= '36500 days'
		AND date_part('year', lease) = 0 AND date_part('month', lease) = 0),
	lease_max interval NOT NULL DEFAULT '1 day' CHECK (
		lease_max > '0' AND lease_max <= '36500 days'
		AND date_part('year', lease_max) = 0 AND date_part('month', lease_max) = 0),
	result_max_bytes int4 NOT NULL DEFAULT 1048576 CHECK (result_max_bytes BETWEEN 1 AND 267386880),
	cleanup_batch_size int4 NOT NULL DEFAULT 50000 CHECK (cleanup_batch_size BETWEEN 1 AND 1000000),
	scopes text NOT NULL DEFAULT 'any' CHECK (scopes = 'any' OR scopes = 'declared')
) USING heap;

COMMENT ON TABLE @extschema@.idem_settings IS 'what the operator has set, for all scopes';
COMMENT ON COLUMN @extschema@.idem_settings.ttl IS 'how long a claim is remembered at least, in scopes without a ttl';
COMMENT ON COLUMN @extschema@.idem_settings.lease IS 'length of a lease when it is extended, in scopes without a lease';
COMMENT ON COLUMN @extschema@.idem_settings.lease_max IS 'longest lease that a caller may ask for, in scopes without a limit';
COMMENT ON COLUMN @extschema@.idem_settings.result_max_bytes IS 'largest result that is stored, in scopes without a limit';
COMMENT ON COLUMN @extschema@.idem_settings.cleanup_batch_size IS 'most expired claims that one batch removes';
COMMENT ON COLUMN @extschema@.idem_settings.scopes IS 'any: a request can be claimed in every scope; declared: only in one that has a row in idem_scopes';

CREATE FUNCTION @extschema@.idem__replace_settings()
RETURNS trigger
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
	bad text := CASE
		WHEN NEW.ttl < '1 second' OR NEW.ttl > '36500 days' OR date_part('year', NEW.ttl) <> 0 OR date_part('month', NEW.ttl) <> 0
			THEN 'ttl'
		WHEN NEW.lease <= '0' OR NEW.lease > '36500 days' OR date_part('year', NEW.lease) <> 0 OR date_part('month', NEW.lease) <> 0
			THEN 'lease'
		WHEN NEW.lease_max <= '0' OR NEW.lease_max > '36500 days'
			OR date_part('year', NEW.lease_max) <> 0 OR date_part('month', NEW.lease_max) <> 0
			THEN 'lease_max' END;
BEGIN
	IF TG_RELID <> '@extschema@.idem_settings'::regclass THEN
		RAISE EXCEPTION 'idem__replace_settings() is the trigger of idem_settings'
			USING ERRCODE = 'trigger_protocol_violated', HINT = 'Do not use it for other tables.';
	END IF;
	IF bad IS NOT NULL THEN
		RAISE EXCEPTION '% of idem_settings must be %, at most 36500 days, and without months', bad,
				CASE bad WHEN 'ttl' THEN 'at least 1 second' ELSE 'positive' END
			USING ERRCODE = 'check_violation', CONSTRAINT = pg_catalog.format('idem_settings_%s_check', bad),
			HINT = 'Write a positive length in days, hours or shorter units: ''30 days'' rather than ''1 month''.';
	END IF;
	IF TG_OP = 'INSERT' THEN
		DELETE FROM @extschema@.idem_settings;
	END IF;
	RETURN NEW;
END
$$;

CREATE TRIGGER idem_settings_replace
BEFORE INSERT OR UPDATE ON @extschema@.idem_settings
FOR EACH ROW EXECUTE FUNCTION @extschema@.idem__replace_settings();

INSERT INTO @extschema@.idem_settings DEFAULT VALUES;

CREATE TABLE @extschema@.idem_scopes (
	scope text COLLATE "C" PRIMARY KEY CHECK (octet_length(scope) <= 255),
	ttl interval
		CONSTRAINT idem_scopes_ttl_check CHECK (
			ttl > '0' AND ttl <= '36500 days'
			AND date_part('year', ttl) = 0 AND date_part('month', ttl) = 0),
	lease interval
		CONSTRAINT idem_scopes_lease_check CHECK (
			lease > '0' AND lease <= '36500 days'
			AND date_part('year', lease) = 0 AND date_part('month', lease) = 0),
	lease_max interval
		CONSTRAINT idem_scopes_lease_max_check CHECK (
			lease_max > '0' AND lease_max <= '36500 days'
			AND date_part('year', lease_max) = 0 AND date_part('month', lease_max) = 0),
	failed text NOT NULL DEFAULT 'terminal' CHECK (failed = 'terminal' OR failed = 'retryable'),
	lapsed text NOT NULL DEFAULT 'reclaim' CHECK (lapsed = 'reclaim' OR lapsed = 'unknown'),
	expired text NOT NULL DEFAULT 'protect' CHECK (expired = 'protect' OR expired = 'reclaim'),
	key_time text NOT NULL DEFAULT 'any' CHECK (key_time = 'any' OR key_time = 'uuidv7'),
	result_max_bytes int4 CHECK (result_max_bytes > 0 AND result_max_bytes <= 267386880),
	guarded_since timestamptz,
	CONSTRAINT idem_scopes_key_time_ttl_check CHECK (key_time <> 'uuidv7' OR ttl IS NOT NULL)
) USING heap;

COMMENT ON TABLE @extschema@.idem_scopes IS 'policy of scopes; a scope without a row uses the settings';
COMMENT ON COLUMN @extschema@.idem_scopes.ttl IS 'how long a claim is remembered at least; NULL: that of idem_settings';
COMMENT ON COLUMN @extschema@.idem_scopes.lease IS 'length of a lease when it is extended; NULL: that of idem_settings';
COMMENT ON COLUMN @extschema@.idem_scopes.lease_max IS 'longest lease that a caller may ask for; NULL: that of idem_settings';
COMMENT ON COLUMN @extschema@.idem_scopes.failed IS 'terminal: a failed request stays failed; retryable: the next claim runs it again';
COMMENT ON COLUMN @extschema@.idem_scopes.lapsed IS 'reclaim: a lapsed lease can be taken over; unknown: it cannot';
COMMENT ON COLUMN @extschema@.idem_scopes.expired IS 'protect: an expired claim guards until it is removed; reclaim: it counts as absent';
COMMENT ON COLUMN @extschema@.idem_scopes.key_time IS 'uuidv7: the time in the request id tells one that may have been forgotten from a new one';
COMMENT ON COLUMN @extschema@.idem_scopes.result_max_bytes IS 'largest result that is stored; NULL: that of idem_settings';
COMMENT ON COLUMN @extschema@.idem_scopes.guarded_since IS 'requests from before then are stale unless they have a row; kept by a trigger';

-- Turns days into 24 hours each.  Added as a day, an interval would have 23 or 25 hours
-- where the clock changes.
CREATE FUNCTION @extschema@.idem__without_days(length interval)
RETURNS interval
LANGUAGE sql IMMUTABLE
AS $$ SELECT make_interval(secs => date_part('epoch', length)) $$;

-- What the settings, or the row of a scope, say of its policy.
CREATE TYPE @extschema@.idem__terms AS (
	ttl interval, lease interval, lease_max interval, result_max_bytes int4,
	failed text, lapsed text, expired text, key_time text, guarded_since timestamptz, scopes text);

-- The policy of a scope
CREATE TYPE @extschema@.idem__scope_policy AS (
	ttl interval, lease interval, lease_max interval, result_max_bytes int4,
	retryable boolean, unknown boolean, reclaim boolean, uuidv7 boolean,
	guarded_since timestamptz,
	has_settings boolean,		-- false: the snapshot sees no row of idem_settings
	undeclared boolean			-- no request can be claimed in this scope
);

-- The policy that follows from the settings and the row of a scope; either can be NULL.
CREATE FUNCTION @extschema@.idem__policy_of(d @extschema@.idem__terms, p @extschema@.idem__terms)
RETURNS SETOF @extschema@.idem__scope_policy
LANGUAGE sql STABLE ROWS 1
AS $$
	SELECT @extschema@.idem__without_days(coalesce((p).ttl, (d).ttl, '1 hour')),
		@extschema@.idem__without_days(coalesce((p).lease, (d).lease, '30 seconds')),
		@extschema@.idem__without_days(coalesce((p).lease_max, (d).lease_max, '1 day')),
		coalesce((p).result_max_bytes, (d).result_max_bytes, 1048576),
		(p).failed IS NOT DISTINCT FROM 'retryable',
		(p).lapsed IS NOT DISTINCT FROM 'unknown',
		(p).expired IS NOT DISTINCT FROM 'reclaim',
		(p).key_time IS NOT DISTINCT FROM 'uuidv7',
		coalesce((p).guarded_since, '-infinity'),
		(d).ttl IS NOT NULL,
		(d).scopes IS NOT DISTINCT FROM 'declared' AND (p).failed IS NULL		-- NULL: there is no row
$$;

-- The policy of a scope.
CREATE FUNCTION @extschema@.idem__policy(of_scope text)
RETURNS SETOF @extschema@.idem__scope_policy
LANGUAGE sql STABLE ROWS 1
AS $$
	SELECT f.*
	FROM (SELECT) AS always
		LEFT JOIN @extschema@.idem_settings AS d ON true
		LEFT JOIN @extschema@.idem_scopes AS p ON p.scope = of_scope COLLATE "C",
		@extschema@.idem__policy_of(
			ROW (d.ttl, d.lease, d.lease_max, d.result_max_bytes, NULL, NULL, NULL, NULL, NULL, d.scopes)::@extschema@.idem__terms,
			ROW (p.ttl, p.lease, p.lease_max, p.result_max_bytes, p.failed, p.lapsed, p.expired, p.key_time, p.guarded_since, NULL)::@extschema@.idem__terms) AS f
$$;

-- ----- an unknown past is stale -----

-- Under key_time = uuidv7 a key without a row is new if its own time is within the ttl: an
-- earlier claim of it would still have a row.  That holds only for claims made under this
-- policy.  So guarded_since moves when a row with uuidv7 appears, when uuidv7 is switched
-- on, and when the ttl grows under it.  A key from before guarded_since that has no row is
-- stale.  A key's own time can be a minute ahead of its claim, so guarded_since is a minute
-- after the change.  A value that a user writes into guarded_since is ignored, also in a
-- dump of the extension idem_portable that is restored: this database does not know what
-- another one has promised.  A dump of what this file installed makes the trigger after the
-- rows: doc/portable.md says what to run then.
--
-- The guard's lock waits for every transaction that has claimed, and holds new claims back
-- until the change commits (see idem__claim_key()).  So every claim under the old policy was
-- made before guarded_since.
--
-- The trigger runs with the rights of the role that changes the row, so it calls none of
-- our functions.
CREATE FUNCTION @extschema@.idem__scopes_guard()
RETURNS trigger
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
	bad constant text := CASE
		WHEN NEW.ttl <= '0' OR NEW.ttl > '36500 days' OR date_part('year', NEW.ttl) <> 0 OR date_part('month', NEW.ttl) <> 0
			THEN 'ttl'
		WHEN NEW.lease <= '0' OR NEW.lease > '36500 days' OR date_part('year', NEW.lease) <> 0 OR date_part('month', NEW.lease) <> 0
			THEN 'lease'
		WHEN NEW.lease_max <= '0' OR NEW.lease_max > '36500 days'
			OR date_part('year', NEW.lease_max) <> 0 OR date_part('month', NEW.lease_max) <> 0
			THEN 'lease_max' END;
	caller_timeout constant text := current_setting('lock_timeout');
	keeps_past boolean := false;
BEGIN
	-- On Citus the table is a shard: this node's replica of idem_scopes.  Look at its row type,
	-- since Citus hides shards in pg_class.
	IF TG_RELID <> '@extschema@.idem_scopes'::regclass AND NOT EXISTS (
			SELECT FROM pg_type AS t JOIN pg_type AS s ON s.typnamespace = t.typnamespace AND s.typowner = t.typowner
			WHERE t.typrelid = '@extschema@.idem_scopes'::regclass AND s.typrelid = TG_RELID AND s.typname ~ '^idem_scopes_[0-9]+$') THEN
		RAISE EXCEPTION 'idem__scopes_guard() is the trigger of idem_scopes'
			USING ERRCODE = 'trigger_protocol_violated', HINT = 'Do not use it for other tables.';
	END IF;
	IF bad IS NOT NULL THEN
		RAISE EXCEPTION '% of scope "%" must be positive, at most 36500 days, and without months', bad, coalesce(NEW.scope, '')
			USING ERRCODE = 'check_violation', CONSTRAINT = pg_catalog.format('idem_scopes_%s_check', bad),
			HINT = 'Write a positive length in days, hours or shorter units: ''30 days'' rather than ''1 month''.';
	ELSIF NEW.key_time = 'uuidv7' AND NEW.ttl IS NULL THEN
		RAISE EXCEPTION 'policy of scope "%" has key_time = uuidv7, and so needs a ttl of its own', coalesce(NEW.scope, '')
			USING ERRCODE = 'check_violation', CONSTRAINT = 'idem_scopes_key_time_ttl_check',
			HINT = 'Set ttl in the same statement: for how long clients may retry a request.';
	END IF;

	IF TG_OP = 'UPDATE' THEN
		keeps_past := OLD.key_time = NEW.key_time AND OLD.scope = NEW.scope AND NOT coalesce(NEW.ttl > OLD.ttl, false);
		NEW.guarded_since := OLD.guarded_since;
	END IF;
	IF NEW.key_time IS DISTINCT FROM 'uuidv7' THEN
		NEW.guarded_since := NULL;
	ELSIF NOT keeps_past THEN
		IF caller_timeout = '0' THEN
			PERFORM set_config('lock_timeout', '5s', true);
		END IF;
		BEGIN
			LOCK TABLE @extschema@.idem_scopes IN EXCLUSIVE MODE;
		EXCEPTION WHEN lock_not_available THEN
			RAISE EXCEPTION 'policy of scope "%" cannot change now: idem_scopes is in use', coalesce(NEW.scope, '')
				USING ERRCODE = 'lock_not_available',
				HINT = 'Other transactions change it, or claim: try again. Set lock_timeout to wait longer than 5 seconds.';
		END;
		PERFORM set_config('lock_timeout', caller_timeout, true);
		NEW.guarded_since := clock_timestamp() + interval '1 minute';
	END IF;
	RETURN NEW;
END
$$;

COMMENT ON FUNCTION @extschema@.idem__scopes_guard() IS 'trigger: keeps guarded_since, and says what a ttl or lease may be';

-- Not ENABLE ALWAYS: a subscriber must keep the guarded_since of its publisher.
CREATE TRIGGER idem__scopes_guard
BEFORE INSERT OR UPDATE ON @extschema@.idem_scopes
FOR EACH ROW EXECUTE FUNCTION @extschema@.idem__scopes_guard();

-- ----- keys and arguments -----

CREATE FUNCTION @extschema@.idem__raise(sqlstate_ text, message_ text, hint_ text)
RETURNS void
LANGUAGE plpgsql
AS $$
BEGIN
	RAISE EXCEPTION USING ERRCODE = sqlstate_, MESSAGE = message_, HINT = hint_;
END
$$;

CREATE FUNCTION @extschema@.idem__raise(sqlstate_ text, message_ text, hint_ text, detail_ text)
RETURNS void
LANGUAGE plpgsql
AS $$
BEGIN
	RAISE EXCEPTION USING ERRCODE = sqlstate_, MESSAGE = message_, HINT = hint_, DETAIL = detail_;
END
$$;

CREATE FUNCTION @extschema@.idem__name(key @extschema@.idem__key)
RETURNS text
LANGUAGE sql IMMUTABLE
AS $$ SELECT pg_catalog.format('scope "%s", user "%s", request "%s"', (key).scope, (key).user_id, (key).request_id) $$;

CREATE FUNCTION @extschema@.idem__raise_of_key(sqlstate_ text, message_ text, hint_ text, key @extschema@.idem__key)
RETURNS void
LANGUAGE plpgsql
AS $$
BEGIN
	PERFORM @extschema@.idem__raise(sqlstate_, message_, hint_, 'S' || substr(@extschema@.idem__name(key), 2) || '.');
END
$$;

CREATE FUNCTION @extschema@.idem__raise_too_long(name text, value text)
RETURNS void
LANGUAGE plpgsql
AS $$
BEGIN
	PERFORM @extschema@.idem__raise('ID400', name || ' is too long',
		'Fix the client: send a shorter ' || name || ', or a hash of this one.',
		pg_catalog.format('It has %s bytes, the limit is 255.', octet_length(value)));
END
$$;

CREATE FUNCTION @extschema@.idem__check_id(name text, id text)
RETURNS void
LANGUAGE plpgsql
AS $$
BEGIN
	IF id IS NULL OR octet_length(id) = 0 THEN
		PERFORM @extschema@.idem__raise('ID400', name || ' must not be ' || CASE WHEN id IS NULL THEN 'null' ELSE 'empty' END,
			'Fix the client: it must send the same two ids each time it sends the request.',
			'A request is named by a user and a request id.');
	END IF;
END
$$;

CREATE FUNCTION @extschema@.idem__check_scope(scope text)
RETURNS void
LANGUAGE plpgsql
AS $$
BEGIN
	IF scope IS NULL THEN
		PERFORM @extschema@.idem__raise('ID400', 'scope must not be null',
			'Fix the client: leave the scope out, or pass '''' for the default scope.');
	ELSIF octet_length(scope) > 255 THEN
		PERFORM @extschema@.idem__raise_too_long('scope', scope);
	END IF;
END
$$;

-- Makes the key of the arguments.  A bad id raises an error and never returns NULL: an IF
-- would read NULL as "already done" and lose the request.
CREATE FUNCTION @extschema@.idem__key_of(user_id text, request_id text, scope text)
RETURNS @extschema@.idem__key
LANGUAGE plpgsql
AS $$
BEGIN
	IF octet_length(user_id) BETWEEN 1 AND 255 AND octet_length(request_id) BETWEEN 1 AND 255
		AND octet_length(scope) <= 255 THEN
		RETURN ROW (user_id, request_id, scope)::@extschema@.idem__key;
	END IF;
	PERFORM @extschema@.idem__check_id('user_id', user_id);
	PERFORM @extschema@.idem__check_id('request_id', request_id);
	PERFORM @extschema@.idem__check_scope(scope);
	IF octet_length(user_id) > 255 THEN
		PERFORM @extschema@.idem__raise_too_long('user_id', user_id);
	END IF;
	PERFORM @extschema@.idem__raise_too_long('request_id', request_id);
END
$$;

CREATE FUNCTION @extschema@.idem__check_fingerprint(fingerprint bytea)
RETURNS void
LANGUAGE plpgsql
AS $$
BEGIN
	IF octet_length(fingerprint) NOT BETWEEN 1 AND 64 THEN
		PERFORM @extschema@.idem__raise('ID400', 'fingerprint must have 1 to 64 bytes',
			'Fix the client: send a hash of the parameters, idem_fingerprint(jsonb) makes one.',
			pg_catalog.format('It has %s bytes.', octet_length(fingerprint)));
	END IF;
END
$$;

CREATE FUNCTION @extschema@.idem__check_token(token int8)
RETURNS void
LANGUAGE plpgsql
AS $$
BEGIN
	IF token <= 0 THEN
		PERFORM @extschema@.idem__raise('ID400', 'token must be positive',
			'Fix the client: pass the token that idem_lease() returned with the lease.');
	END IF;
END
$$;

CREATE FUNCTION @extschema@.idem__require_token(token int8)
RETURNS void
LANGUAGE plpgsql
AS $$
BEGIN
	PERFORM @extschema@.idem__check_token(token);
	IF token IS NULL THEN
		PERFORM @extschema@.idem__raise('ID400', 'token must not be null',
			'Fix the client: pass the token that idem_lease() returned with the lease.');
	END IF;
END
$$;

CREATE FUNCTION @extschema@.idem__has_months(length interval)
RETURNS boolean
LANGUAGE sql IMMUTABLE
AS $$ SELECT date_part('year', length) <> 0 OR date_part('month', length) <> 0 $$;

CREATE FUNCTION @extschema@.idem__check_lease(lease interval)
RETURNS interval
LANGUAGE plpgsql
AS $$
BEGIN
	IF lease IS NOT NULL AND (@extschema@.idem__has_months(lease) OR lease <= interval '0' OR lease > interval '36500 days') THEN
		PERFORM @extschema@.idem__raise('ID400', 'lease must be positive, at most 36500 days, and without months',
			'Fix the client: give it in seconds or minutes, and extend it while the work goes on.');
	END IF;
	RETURN @extschema@.idem__without_days(lease);
END
$$;

-- Raises ID400 if the caller asks for a longer lease than the scope allows.
CREATE FUNCTION @extschema@.idem__check_lease_max(key @extschema@.idem__key, lease interval, lease_max interval)
RETURNS void
LANGUAGE plpgsql
AS $$
BEGIN
	IF lease > lease_max THEN
		PERFORM @extschema@.idem__raise_of_key('ID400', pg_catalog.format('lease of %s s is longer than the scope allows, %s s',
				trim_scale(extract(epoch FROM lease)), trim_scale(extract(epoch FROM lease_max))),
			'Extend it while the work goes on, or have the operator raise idem.lease_max or the scope''s lease_max.', key);
	END IF;
END
$$;

-- Raises ID413 if a result or progress is too large.  The size is taken before compression.
CREATE FUNCTION @extschema@.idem__check_size(key @extschema@.idem__key, name text, value jsonb, bytes_max int4)
RETURNS void
LANGUAGE plpgsql
AS $$
DECLARE
	bytes constant int4 := pg_column_size(to_jsonb(value)) - 4;
BEGIN
	IF bytes > bytes_max THEN
		PERFORM @extschema@.idem__raise_of_key('ID413', pg_catalog.format('%s has %s bytes, the limit is %s', name, bytes, bytes_max),
			'Store a reference to it, or have the operator raise idem.result_max_bytes or the scope''s result_max_bytes.', key);
	END IF;
END
$$;

CREATE FUNCTION @extschema@.idem__require_writable(command text)
RETURNS void
LANGUAGE plpgsql
AS $$
BEGIN
	IF current_setting('transaction_read_only') = 'on' THEN
		PERFORM @extschema@.idem__raise('25006', pg_catalog.format('cannot execute %s in a read-only transaction', command),
			CASE WHEN pg_is_in_recovery() THEN 'This server is a standby: send the request to the primary.'
			ELSE 'Use a read-write transaction, the one that does the work.' END);
	END IF;
END
$$;

-- The time in a version 7 UUID (RFC 9562, section 5.7); NULL if the request id is not one in
-- canonical lower case.  Another spelling of the same uuid would be another key.  (CASE
-- rather than WHERE: the planner may evaluate the SELECT list before the WHERE.)
CREATE FUNCTION @extschema@.idem__key_time(key @extschema@.idem__key)
RETURNS timestamptz
LANGUAGE sql STABLE
AS $$
	SELECT CASE WHEN (key).request_id ~ '^[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$' THEN
		to_timestamp((('x' || left((key).request_id, 8) || substr((key).request_id, 10, 4))::bit(48)::int8 / 1000.0)::float8) END
$$;

-- Rounds expires_at up to a whole second, so that the entries of its index deduplicate.
CREATE FUNCTION @extschema@.idem__whole_second(moment timestamptz)
RETURNS timestamptz
LANGUAGE sql STABLE				-- as date_trunc(): otherwise it is not inlined, and is planned in each call
AS $$ SELECT date_trunc('second', moment + interval '999999 microseconds') $$;

-- The canonical text writes numbers out, so the 8 bytes of 1e131071 would become 131072.
-- Counts the digits before and after the point, without building them.
CREATE FUNCTION @extschema@.idem__canonical_of_long(number numeric)
RETURNS text
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE
AS $$
BEGIN
	IF min_scale(number) > 1000 OR abs(number) >= ('1e' || 1000 - min_scale(number))::numeric THEN
		RAISE EXCEPTION USING ERRCODE = 'ID400', MESSAGE = 'a number of the JSON document is too long',
			DETAIL = 'Written out, it has more than 1000 digits.', HINT = 'Fix the client: send it as a string.';
	END IF;
	RETURN trim_scale(number)::text;
END
$$;

-- The text whose hash is the fingerprint: equal jsonb give equal text, unequal jsonb
-- different text.  jsonb orders the keys of an object by the keys alone.  Numbers lose their
-- trailing zeros, which jsonb stores but does not compare.
CREATE FUNCTION @extschema@.idem__canonical(parameters jsonb)
RETURNS text
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE
AS $$
BEGIN
	CASE jsonb_typeof(parameters)
		WHEN 'object' THEN
			RETURN '{' || coalesce((SELECT string_agg(to_json(e.key)::text || ':' || @extschema@.idem__canonical(e.value), ',' ORDER BY e.n)
				FROM jsonb_each(parameters) WITH ORDINALITY AS e (key, value, n)), '') || '}';
		WHEN 'array' THEN
			RETURN '[' || coalesce((SELECT string_agg(@extschema@.idem__canonical(e.value), ',' ORDER BY e.n)
				FROM jsonb_array_elements(parameters) WITH ORDINALITY AS e (value, n)), '') || ']';
		WHEN 'number' THEN
			IF abs(parameters::numeric) < 1e500 AND scale(parameters::numeric) <= 500 THEN
				RETURN trim_scale(parameters::numeric)::text;
			END IF;
			RETURN @extschema@.idem__canonical_of_long(parameters::numeric);
		ELSE
			RETURN parameters::text;
	END CASE;
END
$$;

CREATE FUNCTION @extschema@.idem_fingerprint(parameters jsonb)
RETURNS bytea
LANGUAGE plpgsql IMMUTABLE STRICT PARALLEL SAFE
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
	RETURN sha256(convert_to(@extschema@.idem__canonical(parameters), getdatabaseencoding()));
END
$$;

COMMENT ON FUNCTION @extschema@.idem_fingerprint(jsonb) IS
'SHA-256 of the canonical text: equal jsonb have equal fingerprints';

-- ----- scopes that are not declared -----

-- Raises ID400 for a claim in a scope without a row.  The HINT has up to five declared
-- scopes that begin alike.
CREATE FUNCTION @extschema@.idem__raise_undeclared(undeclared text)
RETURNS void
LANGUAGE plpgsql
AS $$
DECLARE
	alike text;
BEGIN
	SELECT string_agg('"' || s.scope || '"', ', ' ORDER BY s.scope) INTO alike
	FROM (SELECT p.scope FROM @extschema@.idem_scopes AS p
		WHERE p.scope ^@ left(undeclared, 3) ORDER BY p.scope LIMIT 5) AS s;
	PERFORM @extschema@.idem__raise('ID400', pg_catalog.format('scope "%s" is not declared', undeclared),
		coalesce('Declared scopes that begin alike: ' || alike || '. ', '')
			|| pg_catalog.format('Fix the client; or declare the scope: INSERT INTO idem_scopes (scope) VALUES (%L).', undeclared),
		'With idem.scopes = declared, requests can be claimed only in scopes that have a row in idem_scopes.');
END
$$;

-- ----- this transaction's claims -----

-- A transaction remembers which keys it holds unsettled, and the answer of its latest claim
-- call.  The short forms (idem_complete(result), idem_result()) need both, and a settlement
-- needs the first to tell a repeat.  Whether a key is ours is decided by its row, never by
-- this memory: a caller who forges it reaches nobody else's request, and a caller who loses
-- it (RESET ALL) gets an error.
--
-- The memory is in custom settings, set as by SET LOCAL.  They follow savepoints exactly,
-- end with the transaction, also with a prepared one, belong to the session, and cost a
-- microsecond.  A temporary table would forbid PREPARE.  The rows themselves would have to
-- be searched for among all others, and do not tell a completed marker from an open one.
--
--	idem_held.latest		the latest claim call: a flag, and what the flag stands for
--								+ *		an unsettled key; * if the settings below may hold others
--								- =		anything else; = if they may hold a key
--	idem_held.recent		the other unsettled keys, a line for each, as long as they are few
--	idem_held.b0 .. b15		the rest of them, in 16 buckets by the hash of the key, since each
--							change rewrites a whole setting
--
-- The note of a claim is a tab and the key, as json.  The fast path puts the place of the row (its
-- ctid) before them, so that idem_complete() finds the row at once.  When it has settled the key, it
-- puts - in front of the whole note, and the answer is read from the row.
--
-- The note of any other answer holds the key, and in a second line the result as it was then:
-- the row may be gone, or belong to somebody else, by the time the caller asks for it.  Anybody
-- can set custom settings.  So such a note is signed for this transaction of this session,
-- with a secret that only the owner can read; with a wrong signature it counts as empty.  The
-- signature names the transaction by its start time and, once it has one, its id: all
-- transactions of one simple-protocol message have the same start time.  (A transaction
-- without an id has claimed nothing.  So an answer that another transaction of the message
-- got can be put back only if it was not "claimed".)
--
-- The note of a claim needs no signature: it counts only if this transaction wrote the row.
--
-- What remains: code in the same transaction can forge or put back the note of a key that the
-- transaction has claimed.  By that it can store a result for a request of this transaction that
-- was completed without one, have idem_status() say "claimed" again, or make idem_result()
-- return the result of an earlier claim call.

CREATE TABLE @extschema@.idem__secret (
	only_row boolean PRIMARY KEY DEFAULT true CHECK (only_row),
	secret bytea NOT NULL DEFAULT sha256((gen_random_uuid()::text || gen_random_uuid()::text)::bytea)
) USING heap WITH (parallel_workers = 0);

INSERT INTO @extschema@.idem__secret DEFAULT VALUES;

COMMENT ON TABLE @extschema@.idem__secret IS 'signs what a transaction remembers of its claims; nobody but the owner may read it';

-- (The secret in front and half of the hash is as good as HMAC here: nobody can continue a hash
-- of which he knows a half.  This function and the next one are single expressions, which
-- PL/pgSQL evaluates without a query if all arguments are variables.)
--
-- The secret must not become a constant in a plan: debug_print_plan shows plans to anybody.
-- So a function that holds the secret in a variable only assigns with it, and never queries
-- or performs.  After an error PL/pgSQL makes a query of an assignment too; so these
-- functions have plan_cache_mode = force_generic_plan, which keeps the values of variables
-- out of plans.
CREATE FUNCTION @extschema@.idem__signature(secret bytea, value text)
RETURNS text
LANGUAGE sql STABLE
AS $$
	SELECT left(encode(sha256(secret || int4send(pg_backend_pid()) || timestamptz_send(now())
		|| convert_to(value, getdatabaseencoding())), 'hex'), 32)
$$;

-- The note of a value: its signature, the transaction's id, a space, the value.
CREATE FUNCTION @extschema@.idem__signed(secret bytea, value text)
RETURNS text
LANGUAGE sql STABLE
AS $$
	SELECT @extschema@.idem__signature(secret, coalesce(pg_current_xact_id_if_assigned()::text, '') || ' ' || value)
		|| coalesce(pg_current_xact_id_if_assigned()::text, '') || ' ' || value
$$;

CREATE FUNCTION @extschema@.idem__held_text(key @extschema@.idem__key)
RETURNS text
LANGUAGE sql STABLE
AS $$ SELECT array_to_json(ARRAY[(key).user_id::text, (key).request_id, (key).scope])::text $$;

CREATE FUNCTION @extschema@.idem__bucket(held text)
RETURNS text
LANGUAGE sql IMMUTABLE
AS $$ SELECT 'idem_held.b' || (hashtext(held COLLATE "C") & 15)::text $$;

-- Adds unsettled keys to their buckets.  Returns the empty text.
CREATE FUNCTION @extschema@.idem__keep_in_buckets(held text[])
RETURNS text
LANGUAGE plpgsql
AS $$
BEGIN
	PERFORM set_config(b.bucket, coalesce(current_setting(b.bucket, true) || E'\n', '') || b.lines, true)
	FROM (SELECT @extschema@.idem__bucket(k.held) AS bucket, string_agg(k.held, E'\n') AS lines
		FROM unnest(held) AS k (held) WHERE k.held <> '' GROUP BY 1) AS b;
	RETURN '';
END
$$;

-- Adds an unsettled key.  (No key contains a line end or a tab: json escapes them.)  A line end comes
-- first, since the session may have set the setting to anything.
CREATE FUNCTION @extschema@.idem__keep(held text)
RETURNS text
LANGUAGE sql VOLATILE
AS $$
	SELECT set_config('idem_held.recent',
		CASE WHEN octet_length(current_setting('idem_held.recent', true)) > 4096
			THEN @extschema@.idem__keep_in_buckets(string_to_array(current_setting('idem_held.recent', true) || E'\n' || held, E'\n'))
			ELSE coalesce(current_setting('idem_held.recent', true) || E'\n', '') || held END, true)
$$;

-- The flag of an answer that takes the place of the latest one: flag is "+" or "-".
CREATE FUNCTION @extschema@.idem__next_flag(latest text, flag text)
RETURNS text
LANGUAGE sql IMMUTABLE
AS $$ SELECT CASE WHEN coalesce(latest, '') = '' OR latest ^@ '-' THEN flag ELSE translate(flag, '+-', '*=') END $$;

-- Notes the answer of a claim call.
CREATE FUNCTION @extschema@.idem__note(flag text, note text)
RETURNS void
LANGUAGE plpgsql
AS $$
DECLARE
	latest constant text := current_setting('idem_held.latest', true);
	ignored text;
BEGIN
	IF latest ^@ '+' OR latest ^@ '*' THEN
		ignored := @extschema@.idem__keep(split_part(latest, E'\t', 2));
	END IF;
	ignored := set_config('idem_held.latest', @extschema@.idem__next_flag(latest, flag) || note, true);
END
$$;

CREATE FUNCTION @extschema@.idem__note_answer(held text, outcome text, result jsonb)
RETURNS void
LANGUAGE plpgsql
SET plan_cache_mode = force_generic_plan
AS $$
DECLARE
	value constant text := outcome || ' ' || held || E'\n' || coalesce(result::text, '');
	secret bytea;
	note text;
BEGIN
	SELECT s.secret INTO secret FROM @extschema@.idem__secret AS s;
	note := @extschema@.idem__signed(secret, value);
	PERFORM @extschema@.idem__note('-', note);
END
$$;

-- Whether the key is noted as unsettled.
CREATE FUNCTION @extschema@.idem__is_open(held text)
RETURNS boolean
LANGUAGE sql STABLE
AS $$
	SELECT coalesce(left(current_setting('idem_held.latest', true), 1) IN ('+', '*')
			AND split_part(current_setting('idem_held.latest', true), E'\t', 2) = held, false)
		OR coalesce(strpos(E'\n' || current_setting('idem_held.recent', true) || E'\n', E'\n' || held || E'\n') > 0, false)
		OR coalesce(strpos(E'\n' || current_setting(@extschema@.idem__bucket(held), true) || E'\n', E'\n' || held || E'\n') > 0, false)
$$;

-- Notes that the key is settled.
CREATE FUNCTION @extschema@.idem__close(held text)
RETURNS void
LANGUAGE plpgsql
AS $$
DECLARE
	latest constant text := current_setting('idem_held.latest', true);
	place text;
	lines text;
	ignored text;
BEGIN
	IF left(latest, 1) IN ('+', '*') AND split_part(latest, E'\t', 2) = held THEN
		ignored := set_config('idem_held.latest', translate(left(latest, 1), '+*', '-='), true);
	END IF;
	FOREACH place IN ARRAY ARRAY['idem_held.recent', @extschema@.idem__bucket(held)] LOOP
		lines := E'\n' || current_setting(place, true) || E'\n';
		-- More than one line, if its row was deleted by hand and the key claimed again
		WHILE strpos(lines, E'\n' || held || E'\n') > 0 LOOP
			lines := replace(lines, E'\n' || held || E'\n', E'\n');
			ignored := set_config(place, trim(E'\n' FROM lines), true);
		END LOOP;
	END LOOP;
END
$$;

-- Whether one snapshot serves the whole transaction.
CREATE FUNCTION @extschema@.idem__keeps_snapshot()
RETURNS boolean
LANGUAGE sql STABLE
AS $$ SELECT current_setting('transaction_isolation') IN ('repeatable read', 'serializable') $$;

-- Whether this transaction wrote the row version with this xmin, which it can see.  Of all
-- transactions in progress, it sees rows of its own only.  The xmin may belong to a
-- subtransaction, whose id is assigned after that of the transaction.  An xmin that seems to
-- lie in the future is from before the ids wrapped around, and frozen.  Of a frozen row from 2^32
-- transactions ago the xmin can be ours by chance, which SQL cannot see: where that would do harm,
-- see idem__is_of_now() too.
CREATE FUNCTION @extschema@.idem__is_ours(row_xmin xid)
RETURNS boolean
LANGUAGE plpgsql
AS $$
DECLARE
	top constant int8 := pg_current_xact_id_if_assigned()::text::int8;
	after constant int8 := (row_xmin::text::int8 - top) & 4294967295;
BEGIN
	IF top IS NULL OR after >= 2147483648 THEN
		RETURN false;
	ELSIF after = 0 THEN
		RETURN true;
	END IF;
	RETURN pg_xact_status((top + after)::text::xid8) IS NOT DISTINCT FROM 'in progress';
EXCEPTION
	WHEN invalid_parameter_value THEN
		RETURN false;
END
$$;

-- False: the row's lease had lapsed when this transaction began.  So this transaction did not write
-- the row: each lease that it claims or extends ends later.
CREATE FUNCTION @extschema@.idem__is_of_now(state @extschema@.idem_state, lease_until timestamptz)
RETURNS boolean
LANGUAGE sql STABLE
AS $$ SELECT state <> 'in_progress' OR lease_until > now() $$;

-- ORDER BY idem__order_of(c.xmin) puts the row of this transaction first, among the rows of a key
-- that one snapshot sees.  It serves the functions that only read, which a parallel query can call.
-- Before PostgreSQL 17 such a query cannot begin a block that catches errors.  idem__is_ours() needs
-- that block, because pg_xact_status() raises an error for an id that was not assigned yet.  This
-- function asks for the status of older ids only, those before the end of the snapshot.  A visible
-- row with a later xmin is ours; or it is frozen, and its xmin is from before the ids wrapped around.
-- Such an xmin, if it was not assigned again yet, is greater than all ids of ours.
-- It is STABLE because the server begins a new command for a volatile one, which a parallel query
-- of CREATE TABLE AS or REFRESH MATERIALIZED VIEW cannot do.
CREATE FUNCTION @extschema@.idem__order_of(row_xmin xid)
RETURNS int8
LANGUAGE plpgsql STABLE
AS $$
DECLARE
	top constant int8 := pg_current_xact_id_if_assigned()::text::int8;
	id constant int8 := top + ((row_xmin::text::int8 - top) & 4294967295);
BEGIN
	IF id >= top + 2147483648 THEN
		RETURN NULL;
	ELSIF id < pg_snapshot_xmax(pg_current_snapshot())::text::int8
		AND pg_xact_status(id::text::xid8) IS DISTINCT FROM 'in progress' THEN
		RETURN NULL;
	END IF;
	RETURN id;
END
$$;

-- The key of a note, if this transaction wrote its row; when it was claimed, as a number that
-- grows from claim to claim; and its result.  A note that is none, a forged one, has no row.
CREATE FUNCTION @extschema@.idem__row_of_note(held text, OUT key @extschema@.idem__key, OUT claimed_at int8, OUT result jsonb)
RETURNS SETOF record
LANGUAGE plpgsql ROWS 1
SET enable_seqscan = off SET jit = off
AS $$
DECLARE
	top constant int8 := pg_current_xact_id_if_assigned()::text::int8;
	named jsonb;
BEGIN
	BEGIN
		named := held;
	EXCEPTION WHEN invalid_text_representation OR numeric_value_out_of_range OR untranslatable_character OR statement_too_complex THEN
		RETURN;
	END;
	key := ROW (named ->> 0, named ->> 1, named ->> 2)::@extschema@.idem__key;
	RETURN QUERY SELECT key, (c.xmin::text::int8 - top) & 4294967295, c.result
	FROM @extschema@.idem_claims AS c
	WHERE @extschema@.idem__has_key(c.user_id, c.request_id, c.scope, key) AND @extschema@.idem__is_ours(c.xmin);
END
$$;

-- The latest answer: outcome and key, and in a second line the result; NULL if there is none.
CREATE FUNCTION @extschema@.idem__latest()
RETURNS text
LANGUAGE plpgsql
SET plan_cache_mode = force_generic_plan
AS $$
DECLARE
	latest constant text := current_setting('idem_held.latest', true);
	note constant text := substr(latest, 2);
	answer text;
	secret bytea;
BEGIN
	IF left(latest, 1) IN ('+', '*') OR left(note, 1) IN (E'\t', '+') THEN
		SELECT 'claimed ' || @extschema@.idem__held_text(r.key) || E'\n' || coalesce(r.result::text, '')
		INTO answer FROM @extschema@.idem__row_of_note(split_part(note, E'\t', 2)) AS r;
	ELSIF length(note) > 32 AND substr(split_part(note, ' ', 1), 33) IN ('', pg_current_xact_id_if_assigned()::text) THEN
		SELECT s.secret INTO secret FROM @extschema@.idem__secret AS s;
		answer := CASE WHEN left(note, 32) = @extschema@.idem__signature(secret, substr(note, 33))
			THEN substr(note, strpos(note, ' ') + 1) END;
	END IF;
	RETURN answer;
END
$$;

-- Notes that the key was settled with result.
CREATE FUNCTION @extschema@.idem__note_settled(key @extschema@.idem__key, result jsonb)
RETURNS void
LANGUAGE plpgsql
AS $$
DECLARE
	held constant text := @extschema@.idem__held_text(key);
	latest constant text := split_part(@extschema@.idem__latest(), E'\n', 1);
BEGIN
	IF NOT @extschema@.idem__is_open(held) THEN
		RETURN;
	END IF;
	PERFORM @extschema@.idem__close(held);
	IF substr(latest, strpos(latest, ' ') + 1) = held THEN
		PERFORM @extschema@.idem__note_answer(held, split_part(latest, ' ', 1), result);
	END IF;
END
$$;

-- Notes that the key's row is being deleted.  idem__require_latest() then does not look for it.
-- Call it before the row is deleted.
CREATE FUNCTION @extschema@.idem__note_dropped(key @extschema@.idem__key)
RETURNS void
LANGUAGE plpgsql
SET plan_cache_mode = force_generic_plan
AS $$
DECLARE
	held constant text := @extschema@.idem__held_text(key);
	secret bytea;
	value text;
	note text;
BEGIN
	PERFORM @extschema@.idem__note_settled(key, NULL::jsonb);
	value := @extschema@.idem__latest() || E'\ndropped';
	IF split_part(value, E'\n', 1) = 'claimed ' || held THEN
		SELECT s.secret INTO secret FROM @extschema@.idem__secret AS s;
		note := @extschema@.idem__signed(secret, value);
		PERFORM @extschema@.idem__note('-', note);
	END IF;
END
$$;

-- The only unsettled key of this transaction; raises 55000 if there is none, or more than
-- one.
CREATE FUNCTION @extschema@.idem__only_unsettled(command text)
RETURNS @extschema@.idem__key
LANGUAGE plpgsql
AS $$
DECLARE
	latest constant text := current_setting('idem_held.latest', true);
	unsettled int;
	keys @extschema@.idem__key[];
BEGIN
	-- In the order of the claims: the list is in order, and what is in the buckets is older.
	SELECT count(*), (array_agg(r.key ORDER BY n.place, n.line, r.claimed_at, (r.key).request_id, (r.key).user_id, (r.key).scope))[:6]
	INTO unsettled, keys
	FROM (SELECT m.held, max(m.place) AS place, max(m.line) AS line
			FROM (SELECT 2, 0, split_part(latest, E'\t', 2) WHERE latest ^@ '+' OR latest ^@ '*'
				UNION ALL SELECT 1, l.n, l.held
				FROM string_to_table(current_setting('idem_held.recent', true), E'\n') WITH ORDINALITY AS l (held, n)
				UNION ALL SELECT 0, 0, string_to_table(current_setting('idem_held.b' || b::text, true), E'\n')
				FROM generate_series(0, 15) AS b) AS m (place, line, held)
			GROUP BY m.held) AS n,
		@extschema@.idem__row_of_note(n.held) AS r
	WHERE n.held <> '';
	IF unsettled = 0 THEN
		PERFORM @extschema@.idem__raise('55000', command || ': no unsettled request in this transaction',
			'Claim the request first, in the same transaction: without BEGIN each statement is a transaction of its own. A claim that was rolled back to a savepoint is forgotten; a settled request stays as it is. For a lease pass its ids and token.');
	END IF;
	IF unsettled > 1 THEN
		PERFORM @extschema@.idem__raise('55000', command || ': more than one unsettled request in this transaction',
			'Name the one that is meant: pass user_id, request_id and scope.',
			pg_catalog.format('It holds %s: %s.', unsettled,
				(SELECT string_agg(CASE WHEN n < 6 THEN @extschema@.idem__name(ROW (k.user_id, k.request_id, k.scope)::@extschema@.idem__key)
					ELSE 'and more' END, '; ' ORDER BY n)
				FROM unnest(keys) WITH ORDINALITY AS k (user_id, request_id, scope, n))));
	END IF;
	RETURN keys[1];
END
$$;

-- Whether to look only for a row of our own.  A snapshot of a whole transaction can see two
-- rows of the key: one that somebody has dropped since, and the one that we claimed after
-- that.  Only ours counts then.
CREATE FUNCTION @extschema@.idem__only_ours_counts(key @extschema@.idem__key)
RETURNS boolean
LANGUAGE plpgsql
AS $$
BEGIN
	IF NOT @extschema@.idem__keeps_snapshot() THEN
		RETURN false;
	END IF;
	RETURN EXISTS (SELECT FROM @extschema@.idem_claims AS c
		WHERE @extschema@.idem__has_key(c.user_id, c.request_id, c.scope, key)
			AND @extschema@.idem__is_ours(c.xmin));
END
$$;

-- Makes this transaction commit synchronously: a committed change of a lease must survive a
-- crash.  Whether to wait for standbys stays the caller's choice.
CREATE FUNCTION @extschema@.idem__commit_synchronously()
RETURNS void
LANGUAGE plpgsql
AS $$
BEGIN
	IF current_setting('synchronous_commit') = 'off' THEN
		PERFORM set_config('synchronous_commit', 'local', true);
	END IF;
END
$$;

-- ----- waiting -----

-- When a call stops waiting, from its argument or the setting idem.wait.  '-infinity': it
-- does not wait.  'infinity': it waits until it is cancelled.
CREATE FUNCTION @extschema@.idem__deadline(wait interval)
RETURNS timestamptz
LANGUAGE plpgsql
AS $$
DECLARE
	setting constant text := nullif(current_setting('idem.wait', true), '');
	parts text[];
	wait_ms numeric := 5000;
BEGIN
	IF @extschema@.idem__has_months(wait) THEN
		PERFORM @extschema@.idem__raise('ID400', 'wait must not have months',
			'Fix the client: give it in days, hours or shorter units. To wait until cancelled, set idem.wait to -1 and leave wait out.');
	ELSIF wait < interval '0' THEN
		PERFORM @extschema@.idem__raise('ID400', 'wait must not be negative', 'Fix the client: ''0'' does not wait at all.');
	ELSIF wait IS NOT NULL THEN
		RETURN CASE WHEN wait = interval '0' THEN '-infinity'
			WHEN wait > interval '36500 days' THEN 'infinity'
			ELSE clock_timestamp() + @extschema@.idem__without_days(wait) END;
	END IF;

	IF setting IS NOT NULL THEN
		parts := regexp_match(setting COLLATE "C", '^[[:space:]]*([+-]?[0-9]*[.]?[0-9]+)[[:space:]]*(us|ms|s|min|h|d)?[[:space:]]*$');
		wait_ms := round(parts[1]::numeric * CASE coalesce(parts[2], 'ms') WHEN 'us' THEN 0.001 WHEN 'ms' THEN 1
			WHEN 's' THEN 1000 WHEN 'min' THEN 60000 WHEN 'h' THEN 3600000 ELSE 86400000 END);
		IF wait_ms IS NULL OR wait_ms NOT BETWEEN -1 AND 2147483647 THEN
			PERFORM @extschema@.idem__raise('22023', pg_catalog.format('invalid value for parameter "idem.wait": "%s"', setting),
				'Valid units for this parameter are "us", "ms", "s", "min", "h", and "d".');
		END IF;
	END IF;
	RETURN CASE wait_ms WHEN 0 THEN '-infinity' WHEN -1 THEN 'infinity'
		ELSE clock_timestamp() + make_interval(secs => wait_ms::float8 / 1000) END;
END
$$;

-- Sets lock_timeout for the waits that follow.  Call it in a block that catches
-- lock_not_available, and set lock_timeout back afterwards.  False: the caller's own
-- lock_timeout is shorter, so raise its error.
--
-- A wait is cut into slices, and the waiter looks again after each: it stops waiting for a
-- holder that was rolled back to a savepoint, and one deadline spans several holders.  The
-- slices grow from 100 ms, so that the waiter notices such a change soon, to more than
-- deadlock_timeout, so that the server detects deadlocks.
CREATE FUNCTION @extschema@.idem__bound_lock_waits(deadline timestamptz, slices_before int4)
RETURNS boolean
LANGUAGE plpgsql
AS $$
DECLARE
	caller_ms constant float8 := CASE current_setting('lock_timeout') WHEN '0' THEN 0
		ELSE date_part('epoch', current_setting('lock_timeout')::interval) * 1000 END;
	slice_ms constant float8 := CASE WHEN slices_before <= 3 THEN 100 * 2 ^ slices_before
		ELSE least(100 * 2 ^ least(slices_before, 30), date_part('epoch', current_setting('deadlock_timeout')::interval) * 1000 + 1000) END;
	left_ms constant float8 := CASE WHEN deadline = 'infinity' THEN 'infinity'
		WHEN deadline = '-infinity' THEN 0
		ELSE ceil(date_part('epoch', deadline - clock_timestamp()) * 1000) END;
BEGIN
	IF caller_ms > 0 AND caller_ms <= left_ms THEN
		RETURN false;
	END IF;
	RETURN set_config('lock_timeout', greatest(1, least(left_ms, slice_ms))::int4::text, true) IS NOT NULL;
END
$$;

-- SQL does not tell which transaction a wait was for, so only a lease is described.  (The
-- other transaction may have ended by now, and its row may be visible.)
CREATE FUNCTION @extschema@.idem__raise_held(sqlstate_ text, message_ text, key @extschema@.idem__key)
RETURNS void
LANGUAGE plpgsql
AS $$
DECLARE
	lease_until constant timestamptz := (SELECT c.lease_until FROM @extschema@.idem_claims AS c
		WHERE @extschema@.idem__has_key(c.user_id, c.request_id, c.scope, key) AND c.state::text = 'in_progress'
			AND (c.lease_until > clock_timestamp() OR @extschema@.idem__is_ours(c.xmin))
		LIMIT 1);
BEGIN
	PERFORM @extschema@.idem__raise(sqlstate_, message_, 'Retry the same request later.',
		'S' || substr(@extschema@.idem__name(key), 2) || '. ' || CASE
			WHEN isfinite(lease_until) THEN pg_catalog.format('A lease holds it until %s.',
				to_char(@extschema@.idem__whole_second(least(lease_until, '294276-12-31 23:59:59+00'::timestamptz)), 'YYYY-MM-DD HH24:MI:SSOF'))
			WHEN lease_until IS NOT NULL THEN 'A lease holds it until infinity.'
			ELSE 'Another transaction was in the way.' END);
END
$$;

CREATE FUNCTION @extschema@.idem__raise_outcome(outcome text, key @extschema@.idem__key)
RETURNS void
LANGUAGE plpgsql
AS $$
BEGIN
	CASE outcome
		WHEN 'failed' THEN
			PERFORM @extschema@.idem__raise_of_key('ID417', 'request has failed for good',
				'Do not retry it: use a new request id. idem_result(user_id, request_id, scope) has the stored error.', key);
		WHEN 'in_progress' THEN
			PERFORM @extschema@.idem__raise_held('ID409', 'request is being executed', key);
		WHEN 'timed_out' THEN
			PERFORM @extschema@.idem__raise_held('ID503', 'request is still being executed after the wait', key);
		WHEN 'unknown' THEN
			PERFORM @extschema@.idem__raise_of_key('ID424', 'request''s lease lapsed, and whether it was executed is unknown',
				'Do not retry it: find out (idem_lookup() shows the progress), then settle it with idem_heal(), or drop it with idem_forget().', key);
		WHEN 'mismatch' THEN
			PERFORM @extschema@.idem__raise_of_key('ID422', 'request id was used before with another fingerprint',
				'A retry must send the same parameters and keep its id: with a new id it is executed again. Only another request takes a new id.', key);
		WHEN 'stale' THEN
			PERFORM @extschema@.idem__raise_of_key('ID412', 'request id is too old to tell whether it was executed',
				'Check the state, then use a new request id. For a minute after uuidv7 was switched on, or the scope''s ttl grew, new ids are stale too.', key);
	END CASE;
END
$$;

CREATE FUNCTION @extschema@.idem__outcome_of_passed(deadline timestamptz)
RETURNS text
LANGUAGE sql IMMUTABLE
AS $$ SELECT CASE WHEN deadline = '-infinity' THEN 'in_progress' ELSE 'timed_out' END $$;

-- Has a row for a moment for each lease that is being claimed.
CREATE UNLOGGED TABLE @extschema@.idem__lease_locks (
	key_sha256 bytea PRIMARY KEY
) USING heap WITH (
	autovacuum_vacuum_scale_factor = 0,
	autovacuum_vacuum_threshold = 1000,
	autovacuum_vacuum_insert_threshold = -1,
	autovacuum_vacuum_cost_delay = 0
);

COMMENT ON TABLE @extschema@.idem__lease_locks IS 'orders the claims of a lease; no row in it is ever committed';

-- Locks the key for leases until the transaction ends, or the subtransaction is rolled back.
-- Inserts the hash of the key into a table that only we can write: another claim of a lease
-- of that key waits in its own insert.  (Not an advisory lock: everybody can compute its
-- number, and hold it.)  SHA-256, because clients could find two keys that collide in a
-- weaker hash, and hold up each other's requests.  The row is deleted at once, so it is dead
-- whether or not the transaction commits; and by its ctid, so that a serializable transaction
-- reads no row of another one.  (Replaced by sql/idem-citus.sql.)
CREATE FUNCTION @extschema@.idem__lock_key(key @extschema@.idem__key)
RETURNS void
LANGUAGE plpgsql
AS $$
DECLARE
	inserted tid;
BEGIN
	-- (Sessions that still run an earlier version take the same lock: do not change what is hashed.)
	INSERT INTO @extschema@.idem__lease_locks AS l (key_sha256)
	VALUES (sha256(convert_to(jsonb_build_array((key).user_id, (key).request_id, (key).scope)::text, getdatabaseencoding())))
	ON CONFLICT (key_sha256) DO NOTHING RETURNING l.ctid INTO STRICT inserted;
	DELETE FROM @extschema@.idem__lease_locks AS l WHERE l.ctid = inserted;
END
$$;

-- The token of a lease that this transaction has just claimed, NULL for any other answer.
-- (Replaced by sql/idem-citus.sql.)
CREATE FUNCTION @extschema@.idem__lease_token(key @extschema@.idem__key, token int8)
RETURNS int8
LANGUAGE sql IMMUTABLE
AS $$ SELECT token $$;

-- Whether another transaction is deleting the row.  If so, we see the row, but cannot take
-- FOR KEY SHARE on it, which does not conflict with an update.  NULL: we see no row; either
-- another transaction is inserting it, or the one that deleted it has ended by now.  False
-- also for a row that its transaction had updated before it deleted it, and for a deleted row
-- that only an old snapshot still sees.
CREATE FUNCTION @extschema@.idem__is_being_deleted(key @extschema@.idem__key)
RETURNS boolean
LANGUAGE plpgsql
AS $$
DECLARE
	is_there boolean;
	is_free boolean;
BEGIN
	PERFORM set_config('lock_timeout', '1', true);
	PERFORM FROM @extschema@.idem_claims AS c
	WHERE @extschema@.idem__has_key(c.user_id, c.request_id, c.scope, key);
	is_there := FOUND;
	PERFORM FROM @extschema@.idem_claims AS c
	WHERE @extschema@.idem__has_key(c.user_id, c.request_id, c.scope, key)
	FOR KEY SHARE SKIP LOCKED;
	is_free := FOUND;
	RAISE SQLSTATE 'ID001';		-- releases the lock
EXCEPTION
	WHEN SQLSTATE 'ID001' THEN
		RETURN CASE WHEN is_there THEN NOT is_free END;
	WHEN lock_not_available THEN
		RETURN false;
	WHEN serialization_failure THEN
		-- In SERIALIZABLE the failure may come from the dependencies between transactions, which the
		-- server checks only once: do not go on.  Otherwise somebody has changed the row.
		IF current_setting('transaction_isolation') = 'serializable' THEN
			RAISE;
		END IF;
		RETURN false;
END
$$;

-- ----- the protocol -----

-- expires_at of a claim that is made or settled now: the ttl after now, or after the key's
-- own time if that is later, and not before the lease ends.
CREATE FUNCTION @extschema@.idem__remembered_until(ttl interval, key_time timestamptz, lease_until timestamptz)
RETURNS timestamptz
LANGUAGE sql VOLATILE
AS $$ SELECT @extschema@.idem__whole_second(greatest(greatest(clock_timestamp(), key_time) + ttl, lease_until)) $$;

-- Whether a key of that time that has no row may have been executed and forgotten.  A claim
-- made at c under this policy keeps its row until max(c, key_time) + ttl at least; a claim
-- from before guarded_since may have been made under another policy.
CREATE FUNCTION @extschema@.idem__may_be_forgotten(key_time timestamptz, ttl interval, guarded_since timestamptz)
RETURNS boolean
LANGUAGE sql VOLATILE
AS $$
	SELECT coalesce(key_time <= clock_timestamp() - ttl OR key_time <= guarded_since, false)
$$;

/*
 * Claims a key.  Every path decides in the same order:
 *
 *	1. arguments, and what the scope's policy says of them;
 *	2. another transaction is inserting, updating or deleting the row: wait for it.  An
 *	   uncommitted row says nothing.  A key of our own transaction is never waited for;
 *	3. an expired row of a scope with expired = reclaim: as if it were absent;
 *	4. the fingerprint, where both sides have one;
 *	5. completed; failed for good;
 *	6. in progress under a live lease: wait for it, and look again;
 *	7. in progress under a lapsed lease: claim in place, or answer unknown, by policy; unknown
 *	   also where the holder recorded progress, and the call cannot tell its caller;
 *	8. failed and retryable: claim in place;
 *	9. absent: check the key's own time, then insert.
 *
 * idem__look_at() looks at the key until it has an outcome, and idem__claim_key() calls it again when
 * a live lease may have ended.  The steps of a look:
 *
 *	idem__policy_of_claim(), idem__check_terms(): 1;
 *	idem__draw_token(): the lock of the key, for a lease;
 *	idem__insert_claim(): 2 and 9;
 *	idem__decide(): 3 to 8, if there is a row;
 *	idem__keep_promise(): if it ends in "claimed", the policy again, under its lock.
 *
 * The insert always comes first.  INSERT ... ON CONFLICT DO NOTHING waits for the
 * transaction that has the row (2), raises 40001 if the deciding row is invisible to the
 * snapshot, and is all that a new key needs.  Only an insert or update that succeeds ends in
 * "claimed": when a holder vanishes, exactly one of its waiters replaces it.
 *
 * Each look at the row runs in a subtransaction, because lock_timeout bounds its waits and
 * ends them with an error.  A look that leads to no answer, or to an answer that needs no
 * lock, is rolled back on purpose (ID001).  That releases the table locks before a sleep:
 * otherwise DDL queues behind the sleeper, and the lease holder behind the DDL.
 *
 * Claims of leases take a lock of the key first (idem__lock_key()), draw a token and write
 * the row under it, and hold it until the transaction ends.  So tokens grow from holder to
 * holder, even if the row was deleted in between.  A claimant that holds this lock waits for
 * no transaction, since a second claim by that transaction could wait for the claimant.  If
 * its look meets another transaction, it looks again without the lock, only to wait, and
 * then once more with it.  If there is a row already, it starts without the lock: otherwise
 * followers of a lease would block each other.
 *
 * The lock on idem_scopes orders claims with changes of a promise (idem__scopes_guard()).  A
 * claim takes it before it re-checks its policy, and holds it until the transaction ends;
 * every other answer takes none.  No claim waits for this lock while it has a row, or for a
 * row while it has this lock: otherwise two transactions could take the two in opposite
 * order, and deadlock.
 */

-- What a look has found
CREATE TYPE @extschema@.idem__look AS (
	outcome text,				-- NULL: look again
	is_live boolean,			-- another holder has a live lease
	is_ours boolean,			-- this transaction wrote the row
	inserted_at timestamptz,	-- when the insert of a new row began; NULL: there was a row
	result jsonb,
	progress jsonb,
	token int8,					-- of the claim
	expires_at timestamptz,		-- NULL, if claimed: the row that was there counts as absent
	lease_until timestamptz
);

-- What the next look of a claim waits for, and how long
CREATE TYPE @extschema@.idem__patience AS (
	waits_for text,				-- 'row'; 'policy', the lock of the policy; or 'nothing'.  A claim of a lease
								-- waits for the row only in looks that do not claim.  NULL: it
								-- depends on whether there is a row
	until timestamptz,			-- NULL: give up
	slices int4,				-- of waiting, so far in this look; see idem__bound_lock_waits()
	delete_until timestamptz,	-- of a row's removal, which is waited for after the deadline too
	is_deleting boolean,		-- another transaction removes the row
	has_looked_again boolean	-- after the deadline
);

-- Decision 1: the policy of a scope.  Raises ID400 if no request can be claimed in it, 40001 if the
-- snapshot is older than the settings.
CREATE FUNCTION @extschema@.idem__policy_of_claim(of_scope text)
RETURNS @extschema@.idem__scope_policy
LANGUAGE plpgsql
AS $$
DECLARE
	policy constant @extschema@.idem__scope_policy := (SELECT p FROM @extschema@.idem__policy(of_scope) AS p);
BEGIN
	IF NOT policy.has_settings AND @extschema@.idem__keeps_snapshot() THEN
		PERFORM @extschema@.idem__raise('40001', 'could not serialize access: idem was installed after this transaction''s snapshot',
			'Retry the transaction.');
	END IF;
	IF policy.undeclared THEN
		PERFORM @extschema@.idem__raise_undeclared(of_scope);
	END IF;
	RETURN policy;
END
$$;

-- Decision 1: raises an error if the policy refuses what a claim of a lease asks for.
CREATE FUNCTION @extschema@.idem__check_terms(key @extschema@.idem__key, lease interval, progress jsonb, policy @extschema@.idem__scope_policy)
RETURNS void
LANGUAGE plpgsql
AS $$
DECLARE
	ignored text;				-- assigned to, since PERFORM would need a query
BEGIN
	IF lease > policy.lease_max THEN
		ignored := @extschema@.idem__check_lease_max(key, lease, policy.lease_max);
	END IF;
	IF progress IS NOT NULL THEN
		ignored := @extschema@.idem__check_size(key, 'progress', progress, policy.result_max_bytes);
	END IF;
END
$$;

-- Locks the key for a lease, and draws its token under the lock.  NULL: there is a row, and the
-- caller wants the lock only if there is none.
CREATE FUNCTION @extschema@.idem__draw_token(key @extschema@.idem__key, only_if_absent boolean)
RETURNS int8
LANGUAGE plpgsql
AS $$
DECLARE
	ignored text;				-- assigned to, since PERFORM would need a query
BEGIN
	IF only_if_absent THEN
		IF EXISTS (SELECT FROM @extschema@.idem_claims AS c
				WHERE @extschema@.idem__has_key(c.user_id, c.request_id, c.scope, key)) THEN
			RETURN NULL;
		END IF;
	END IF;
	ignored := @extschema@.idem__lock_key(key);
	RETURN nextval('@extschema@.idem_token_seq');
END
$$;

-- Decisions 2 and 9: waits for a transaction that has the key, and inserts the row of the claim.
-- Outcome NULL: there is a row.  "stale": the insert has to be rolled back.
CREATE FUNCTION @extschema@.idem__insert_claim(
	key @extschema@.idem__key, new_fingerprint bytea, lease interval, new_progress jsonb, new_token int8,
	ttl interval, guarded_since timestamptz, key_time timestamptz)
RETURNS @extschema@.idem__look
LANGUAGE plpgsql
AS $$
DECLARE
	-- (Not a variable of the table's type: a session's first call would open the table for it,
	-- and wait for its lock longer than the deadline.)
	look @extschema@.idem__look;
	new_state constant @extschema@.idem_state := CASE WHEN lease IS NULL THEN 'completed' ELSE 'in_progress' END;
	begun constant timestamptz := clock_timestamp();
BEGIN
	look.lease_until := begun + lease;
	look.expires_at := @extschema@.idem__remembered_until(ttl, key_time, look.lease_until);
	INSERT INTO @extschema@.idem_claims AS c (expires_at, lease_until, token, state, request_id, user_id, scope, fingerprint, progress)
	VALUES (look.expires_at, look.lease_until, new_token, new_state, key.request_id, key.user_id, key.scope, new_fingerprint, new_progress)
	ON CONFLICT (request_id, user_id, scope) DO NOTHING;
	IF FOUND THEN
		look.inserted_at := begun;
		look.is_ours := true;
		look.outcome := 'claimed';
		IF @extschema@.idem__may_be_forgotten(key_time, ttl, guarded_since) THEN
			-- The insert is rolled back, so read the absence: SERIALIZABLE has to see it.
			PERFORM FROM @extschema@.idem_claims AS c
			WHERE @extschema@.idem__has_key(c.user_id, c.request_id, c.scope, key);
			look := ROW ('stale', NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL)::@extschema@.idem__look;
		END IF;
	END IF;
	RETURN look;
END
$$;

-- Decisions 3 to 8, by the row of the key.  "claimed": the claim can take its place, and this
-- transaction has locked it.  Outcome NULL: the row, or the policy, has changed meanwhile.
CREATE FUNCTION @extschema@.idem__decide(
	key @extschema@.idem__key, fingerprint bytea, tells_progress boolean, policy @extschema@.idem__scope_policy, key_time timestamptz)
RETURNS @extschema@.idem__look
LANGUAGE plpgsql
AS $$
DECLARE
	seen record;
	look @extschema@.idem__look;
BEGIN
	SELECT c.xmin AS version,
		@extschema@.idem__is_ours(c.xmin) AND @extschema@.idem__is_of_now(c.state, c.lease_until) AS ours,
		c.state::text AS state, c.expires_at, c.lease_until, c.fingerprint, c.result, c.progress
	INTO seen FROM @extschema@.idem_claims AS c
	WHERE @extschema@.idem__has_key(c.user_id, c.request_id, c.scope, key)
	ORDER BY ours DESC LIMIT 1;		-- see idem__only_ours_counts()
	-- The transaction that the insert waited for may have changed the policy too.
	IF NOT FOUND OR (SELECT p FROM @extschema@.idem__policy(key.scope) AS p) IS DISTINCT FROM policy THEN
		RETURN look;
	END IF;

	look.is_ours := seen.ours;
	IF policy.reclaim AND NOT seen.ours AND seen.expires_at <= clock_timestamp()
		AND NOT (seen.state = 'in_progress' AND (policy.unknown OR seen.lease_until > clock_timestamp())) THEN
		-- 3
		look.outcome := CASE WHEN @extschema@.idem__may_be_forgotten(key_time, policy.ttl, policy.guarded_since)
			THEN 'stale' ELSE 'claimed' END;
	ELSE
		look.is_live := seen.state = 'in_progress' AND NOT seen.ours AND seen.lease_until > clock_timestamp();
		look.outcome := CASE
			-- 4
			WHEN seen.fingerprint <> fingerprint THEN 'mismatch'
			-- 5 and 8
			WHEN seen.state = 'completed' THEN 'completed'
			WHEN seen.state = 'failed' THEN CASE WHEN policy.retryable THEN 'claimed' ELSE 'failed' END
			-- 6
			WHEN seen.ours OR look.is_live THEN 'in_progress'
			-- 7
			WHEN policy.unknown THEN 'unknown'
			-- A caller who does not see the progress would do all the work again.
			WHEN seen.progress IS NOT NULL AND NOT tells_progress THEN 'unknown'
			ELSE 'claimed' END;
		look.is_live := look.is_live AND look.outcome = 'in_progress';
		-- Under another fingerprint the stored row belongs to another request.
		IF look.outcome <> 'mismatch' THEN
			look.progress := seen.progress;
			look.expires_at := seen.expires_at;
			look.lease_until := seen.lease_until;
			look.result := CASE WHEN look.outcome <> 'claimed' THEN seen.result END;
		END IF;
	END IF;

	IF look.outcome = 'claimed' THEN
		PERFORM FROM @extschema@.idem_claims AS c
		WHERE @extschema@.idem__has_key(c.user_id, c.request_id, c.scope, key) AND c.xmin = seen.version
		FOR NO KEY UPDATE;
		IF NOT FOUND THEN
			look.outcome := NULL;		-- changed meanwhile
		END IF;
	END IF;
	RETURN look;
END
$$;

-- The end of a look that claims.  Re-checks the policy: the caller has its lock, so the policy cannot
-- change until this transaction ends.  Outcome NULL: it has changed since the look began.  Then
-- writes the row in place of its predecessor; or once more if the insert has waited, since the
-- promise has to count from now.
CREATE FUNCTION @extschema@.idem__keep_promise(
	look @extschema@.idem__look, key @extschema@.idem__key, new_fingerprint bytea, lease interval, new_progress jsonb, new_token int8,
	policy @extschema@.idem__scope_policy, key_time timestamptz)
RETURNS @extschema@.idem__look
LANGUAGE plpgsql
AS $$
DECLARE
	new_state constant @extschema@.idem_state := CASE WHEN lease IS NULL THEN 'completed' ELSE 'in_progress' END;
	-- Then the answer tells of the predecessor, and this is the same request: keep its fingerprint,
	-- its promise and its progress.  Its progress takes precedence: the successor passed its own
	-- before it was told of that one.
	is_successor constant boolean := look.inserted_at IS NULL AND look.expires_at IS NOT NULL;
BEGIN
	IF (SELECT p FROM @extschema@.idem__policy(key.scope) AS p) IS DISTINCT FROM policy THEN
		look.outcome := NULL;
	ELSIF look.inserted_at IS NULL OR look.expires_at < clock_timestamp() + policy.ttl
		OR clock_timestamp() - look.inserted_at > interval '10 milliseconds' THEN
		look.lease_until := clock_timestamp() + lease;
		look.expires_at := greatest(CASE WHEN is_successor THEN look.expires_at END,
			@extschema@.idem__remembered_until(policy.ttl, key_time, look.lease_until));
		UPDATE @extschema@.idem_claims AS c SET expires_at = look.expires_at, lease_until = look.lease_until,
			token = new_token, state = new_state, result = NULL,
			fingerprint = CASE WHEN is_successor THEN coalesce(new_fingerprint, c.fingerprint) ELSE new_fingerprint END,
			progress = coalesce(look.progress, new_progress)
		WHERE @extschema@.idem__has_key(c.user_id, c.request_id, c.scope, key)
			AND (NOT look.is_ours OR @extschema@.idem__is_ours(c.xmin));
	END IF;
	look.token := new_token;
	RETURN look;
END
$$;

-- How a claim goes on after a look in which a lock was not available.  While a row is being
-- removed, nobody executes its key.  So a claim with wait => '0' waits for the removal too, for a
-- time.
CREATE FUNCTION @extschema@.idem__after_refusal(
	patience @extschema@.idem__patience, step text, key @extschema@.idem__key, deadline timestamptz)
RETURNS @extschema@.idem__patience
LANGUAGE plpgsql
AS $$
DECLARE
	was_deleting constant boolean := patience.is_deleting;
BEGIN
	IF step = 'lock policy at once' THEN
		patience.waits_for := 'policy';
		RETURN patience;
	END IF;
	patience.waits_for := CASE step WHEN 'lock policy' THEN 'policy' ELSE 'row' END;
	patience.slices := patience.slices + 1;
	patience.until := deadline;
	IF clock_timestamp() >= deadline THEN
		-- Called in any case: in SERIALIZABLE, "timed_out" has to be a read of the row, and this call is one.
		patience.is_deleting := coalesce(@extschema@.idem__is_being_deleted(key), false);
		patience.is_deleting := patience.is_deleting AND step = 'insert' AND clock_timestamp() < patience.delete_until;
		IF patience.is_deleting THEN
			patience.until := clock_timestamp() + interval '100 milliseconds';
		ELSIF was_deleting OR NOT patience.has_looked_again THEN
			-- The transaction that removed the row may have ended meanwhile, or been rolled back.
			patience.has_looked_again := true;
		ELSE
			patience.until := NULL;
		END IF;
	END IF;
	RETURN patience;
END
$$;

-- Looks at the key, and claims it if it can, until there is an outcome or the deadline passes.
-- is_live: wait until the lease ends or the deadline passes, then look again.
CREATE FUNCTION @extschema@.idem__look_at(
	key @extschema@.idem__key, fingerprint bytea, deadline timestamptz, lease interval, progress jsonb, tells_progress boolean,
	waits_for text, delete_until timestamptz)
RETURNS @extschema@.idem__look
LANGUAGE plpgsql
AS $$
DECLARE
	caller_timeout constant text := current_setting('lock_timeout');
	patience @extschema@.idem__patience := ROW (waits_for, deadline, 0, delete_until, false, false)::@extschema@.idem__patience;
	step text;					-- of the look, for when a lock is not available
	is_bounded boolean;			-- the timeout is ours, not the caller's
	policy @extschema@.idem__scope_policy;
	key_time timestamptz;
	token int8;
	look @extschema@.idem__look;
	ignored text;				-- assigned to, since PERFORM would need a query
BEGIN
	WHILE look.outcome IS NULL LOOP
		look := NULL;
		BEGIN
			IF patience.waits_for = 'policy' THEN
				step := 'lock policy';
				is_bounded := @extschema@.idem__bound_lock_waits(patience.until, patience.slices);
				LOCK TABLE @extschema@.idem_scopes IN ROW SHARE MODE;
			END IF;
			step := 'check';
			is_bounded := @extschema@.idem__bound_lock_waits(
				CASE patience.waits_for WHEN 'row' THEN patience.until ELSE '-infinity' END, patience.slices);
			policy := @extschema@.idem__policy_of_claim(key.scope);
			key_time := CASE WHEN policy.uuidv7 THEN @extschema@.idem__key_time(key) END;
			IF policy.uuidv7 AND (key_time IS NULL OR key_time > clock_timestamp() + interval '1 minute') THEN
				look.outcome := 'invalid';
				RAISE SQLSTATE 'ID001';
			ELSIF lease IS NOT NULL THEN
				ignored := @extschema@.idem__check_terms(key, lease, progress, policy);
				token := CASE WHEN patience.waits_for IS DISTINCT FROM 'row' THEN @extschema@.idem__draw_token(key, patience.waits_for IS NULL) END;
				patience.waits_for := coalesce(patience.waits_for, CASE WHEN token IS NULL THEN 'row' ELSE 'nothing' END);
			END IF;
			step := 'insert';
			look := @extschema@.idem__insert_claim(key, fingerprint, lease, progress, token, policy.ttl, policy.guarded_since, key_time);
			step := 'decide';
			IF look.outcome IS NULL THEN
				look := @extschema@.idem__decide(key, fingerprint, tells_progress, policy, key_time);
			END IF;
			IF look.outcome = 'claimed' AND lease IS NOT NULL AND token IS NULL THEN
				patience.waits_for := 'nothing';
				look.outcome := NULL;
			ELSIF look.outcome = 'claimed' THEN
				IF patience.waits_for <> 'policy' THEN
					step := 'lock policy at once';
					LOCK TABLE @extschema@.idem_scopes IN ROW SHARE MODE NOWAIT;
				END IF;
				step := 'write';
				look := @extschema@.idem__keep_promise(look, key, fingerprint, lease, progress, token, policy, key_time);
			END IF;
			IF look.outcome IS NULL OR look.outcome = 'stale' OR (look.outcome <> 'claimed' AND (look.is_live OR lease IS NOT NULL)) THEN
				RAISE SQLSTATE 'ID001';
			END IF;
			ignored := set_config('lock_timeout', caller_timeout, true);
		EXCEPTION
			WHEN SQLSTATE 'ID001' THEN
				NULL;
			WHEN lock_not_available THEN
				IF NOT is_bounded AND step <> 'lock policy at once' THEN
					RAISE;
				END IF;
				patience := @extschema@.idem__after_refusal(patience, step, key, deadline);
				look := NULL;
				look.outcome := CASE WHEN patience.until IS NULL THEN @extschema@.idem__outcome_of_passed(deadline) END;
		END;
	END LOOP;
	RETURN look;
END
$$;

-- lease: NULL for a transactional claim.  tells_progress: the call returns the progress of the
-- holder whose lapsed lease it takes over.  strict: raise ID400 for a key whose own time breaks
-- the policy; otherwise answer invalid.
CREATE FUNCTION @extschema@.idem__claim_key(
	command text, key @extschema@.idem__key, fingerprint bytea, deadline timestamptz,
	lease interval, progress jsonb, tells_progress boolean, strict boolean)
RETURNS @extschema@.idem__answer
LANGUAGE plpgsql
AS $$
DECLARE
	-- A row's removal is waited for so long at most: a batch of a cleaner takes about a second.
	delete_until constant timestamptz := clock_timestamp() + interval '5 seconds';
	waits_for text := CASE WHEN lease IS NULL THEN 'row' END;
	pause interval := '1 millisecond';
	look @extschema@.idem__look;
	ignored text;				-- assigned to, since PERFORM would need a query
BEGIN
	IF current_setting('transaction_read_only') = 'on' THEN
		PERFORM @extschema@.idem__require_writable(command);
	END IF;
	LOOP
		look := @extschema@.idem__look_at(key, fingerprint, deadline, lease, progress, tells_progress, waits_for, delete_until);
		EXIT WHEN look.is_live IS NOT TRUE;
		IF clock_timestamp() >= deadline THEN
			look.outcome := @extschema@.idem__outcome_of_passed(deadline);
			EXIT;
		END IF;
		PERFORM pg_sleep(date_part('epoch', least(clock_timestamp() + pause, look.lease_until, deadline) - clock_timestamp()));
		pause := least(pause * 2, interval '100 milliseconds');
		waits_for := 'row';
	END LOOP;

	IF look.outcome = 'claimed' THEN
		ignored := @extschema@.idem__note('+', E'\t' || @extschema@.idem__held_text(key));
		-- A crash must not lose this commit: the token would be drawn again.
		IF lease IS NOT NULL THEN
			PERFORM @extschema@.idem__commit_synchronously();
		END IF;
	ELSIF look.outcome <> 'invalid' THEN
		ignored := @extschema@.idem__note_answer(@extschema@.idem__held_text(key), look.outcome, look.result);
	ELSIF strict AND @extschema@.idem__key_time(key) IS NULL THEN
		PERFORM @extschema@.idem__raise_of_key('ID400', 'request_id is not a version 7 UUID in canonical lower-case form',
			'Fix the client: this scope has key_time = uuidv7 and needs the time in the id.', key);
	ELSIF strict THEN
		PERFORM @extschema@.idem__raise_of_key('ID400', 'request id is ahead of the clock',
			'Fix the client: its clock is more than a minute ahead.', key);
	END IF;
	RETURN ROW (look.outcome, look.result, look.progress, look.token, look.expires_at, look.lease_until)::@extschema@.idem__answer;
END
$$;

-- ----- the common case of a claim -----

-- Whether a call waits at least a tenth of a second, for one that has an argument wait or a setting
-- idem.wait.  NULL: idem__deadline() has to say, which knows every unit, and what is wrong.
CREATE FUNCTION @extschema@.idem__waits_long(wait interval)
RETURNS boolean
LANGUAGE sql STABLE
AS $$
	SELECT CASE WHEN wait IS NOT NULL THEN CASE WHEN wait >= interval '0' AND NOT @extschema@.idem__has_months(wait)
			THEN wait >= interval '100 milliseconds' END
		WHEN current_setting('idem.wait', true) COLLATE "C" ~ '^(-1( ?ms)?|[1-9][0-9]{2,5}( ?ms)?|[1-9][0-9]{0,5} ?s)$' THEN true
		WHEN current_setting('idem.wait', true) COLLATE "C" ~ '^[0-9]{1,6}( ?(ms|s))?$' THEN false END
$$;

/*
 * Claims a key for this transaction in the two cases that matter for speed: the key is new, or
 * it is completed; the scope does not have key_time = uuidv7; and nobody is in the way.  Outcome
 * NULL: it is another case, nothing has happened, and idem__claim_key() has to decide.
 *
 * READ COMMITTED only: there each statement has a snapshot of its own.  The snapshot of a whole
 * transaction can see a dead row of a key, or two rows, see idem__only_ours_counts().
 *
 * Why no request is executed twice:
 *
 * - Only the insert ends in "claimed", and the primary key lets one transaction insert the key.
 *	 Another claimer, on whatever path, waits for ours to end, or ours for it.  An expired row, a
 *	 failed one and a lease are rows too, so nothing is inserted.  If a cleaner, idem_forget()
 *	 or a rollback is removing the row, the insert waits for the end of that transaction or
 *	 subtransaction, and succeeds only if no row is left.
 * - Each wait ends after a tenth of a second (lock_timeout).  The subtransaction is then rolled
 *	 back, with its row and its locks, and idem__claim_key() goes on waiting.  So it is after an
 *	 insert that took longer than that in all.  The ttl has a tenth of a second more, so it counts
 *	 from the end of the wait.  (While a table is being extended,
 *	 the server looks at lock_timeout late.  A much shorter one can then end the claim with an
 *	 error that looks like a cancel.)  A caller who does not want to wait that long does not
 *	 insert here.
 * - The insert reads the policy in the snapshot in which it decides.  The server takes the locks
 *	 of all tables of a statement before its snapshot.  A WITH query that nothing refers to is
 *	 never executed, but FOR KEY SHARE in it has the server take ROW SHARE on idem_scopes.
 *	 (LOCK TABLE does the same, at several times the cost.)  So the insert sees every change of
 *	 a promise that has committed, and idem__scopes_guard() holds the next one back until this
 *	 transaction ends.  A change of policy that makes no new promise is not ordered with claims.
 * - "completed" needs a completed row that the snapshot sees and whose xmax is 0.  Nobody had
 *	 begun to update, delete or lock it when we looked: so it was the latest version, and no
 *	 removal was under way.  The answer was true then, and needs no lock.  Its policy is read
 *	 in a later snapshot: a replay in between is as good as one after the change.
 * - ROLLBACK TO a savepoint undoes the row, the lock and the note together.
 *
 * The insert has the time from a variable: for a volatile function in it, the planner would put
 * the policy into a subquery of its own.
 *
 * The SET clauses.  lock_timeout: see above.  enable_seqscan: a plan that was made while
 * idem_claims was empty would read all of it for as long as the session lives; jit: the server
 * would compile such a plan, for its cost.  plan_cache_mode: see idem__signature().  The local
 * variables are COLLATE "C": otherwise they would have the collation of the caller's ids.
 *
 * (Replaced by sql/idem-citus.sql.)
 */
CREATE FUNCTION @extschema@.idem__claim_at_once(
	of_user text, of_request text, of_scope text, of_fingerprint bytea, wait interval,
	OUT outcome text, OUT result jsonb, OUT progress jsonb, OUT expires_at timestamptz, OUT lease_until timestamptz)
LANGUAGE plpgsql
SET lock_timeout = '100' SET enable_seqscan = off SET jit = off SET plan_cache_mode = force_generic_plan
AS $$
DECLARE
	is_plain boolean;
	begun timestamptz;
	latest text COLLATE "C";
	note text COLLATE "C";
	secret bytea;
	ignored text;				-- assigned to, since PERFORM would need a query
	waits_long boolean := wait IS NULL AND coalesce(current_setting('idem.wait', true), '') = '';
BEGIN
	IF NOT waits_long THEN
		waits_long := @extschema@.idem__waits_long(wait);
	END IF;
	-- Whether the arguments are good is seen at a glance here; otherwise idem__key_of() and
	-- others say what is wrong.  idem_portable.fast_path = off has tests take the slow path.
	IF (waits_long IS NOT NULL AND of_user <> '' AND of_request <> ''
			AND octet_length(of_user) <= 255 AND octet_length(of_request) <= 255 AND octet_length(of_scope) <= 255
			AND (of_fingerprint IS NULL OR octet_length(of_fingerprint) BETWEEN 1 AND 64)
			AND current_setting('transaction_isolation') IN ('read committed', 'read uncommitted')
			AND current_setting('transaction_read_only') = 'off'
			AND current_setting('idem_portable.fast_path', true) IS DISTINCT FROM 'off') IS NOT TRUE THEN
		RETURN;
	END IF;

	BEGIN
		SELECT c.state = 'completed' AND c.xmax = '0'::xid AND (c.fingerprint <> of_fingerprint) IS NOT TRUE,
			c.result, c.progress, c.expires_at, c.lease_until
		INTO is_plain, result, progress, expires_at, lease_until
		FROM @extschema@.idem_claims AS c
		WHERE c.request_id = of_request COLLATE "C" AND c.user_id = of_user COLLATE "C" AND c.scope = of_scope COLLATE "C";
		IF NOT FOUND THEN
			IF NOT waits_long THEN
				RETURN;
			END IF;
			begun := clock_timestamp();
			WITH locked AS (SELECT FROM @extschema@.idem_scopes FOR KEY SHARE)
			INSERT INTO @extschema@.idem_claims AS c (expires_at, state, request_id, user_id, scope, fingerprint)
			SELECT date_trunc('second', begun + interval '1100999 microseconds'
					+ @extschema@.idem__without_days(coalesce(p.ttl, d.ttl))),
				'completed'::@extschema@.idem_state, of_request, of_user, of_scope, of_fingerprint
			FROM @extschema@.idem_settings AS d LEFT JOIN @extschema@.idem_scopes AS p ON p.scope = of_scope COLLATE "C"
			WHERE CASE WHEN p.key_time IS NULL THEN d.scopes = 'any' ELSE p.key_time = 'any' END
			ON CONFLICT (request_id, user_id, scope) DO NOTHING
			RETURNING c.ctid::text, c.expires_at INTO note, expires_at;
			IF NOT FOUND OR clock_timestamp() > begun + interval '100 milliseconds' THEN
				RAISE SQLSTATE 'ID001';		-- releases the lock
			END IF;
			outcome := 'claimed';
			note := '+' || note || E'\t' || array_to_json(ARRAY[of_user, of_request, of_scope])::text;
		ELSIF is_plain THEN
			SELECT s.secret INTO secret
			FROM @extschema@.idem__secret AS s, @extschema@.idem_settings AS d
				LEFT JOIN @extschema@.idem_scopes AS p ON p.scope = of_scope COLLATE "C"
			WHERE CASE WHEN p.key_time IS NULL THEN d.scopes = 'any'
				ELSE p.key_time = 'any' AND (p.expired = 'protect' OR idem__claim_at_once.expires_at > clock_timestamp()) END;
			IF NOT FOUND THEN
				RETURN;
			END IF;
			outcome := 'completed';
			note := 'completed ' || array_to_json(ARRAY[of_user, of_request, of_scope])::text || E'\n' || coalesce(result::text, '');
			note := '-' || @extschema@.idem__signed(secret, note);
		ELSE
			RETURN;
		END IF;
		-- As idem__note() does
		latest := current_setting('idem_held.latest', true);
		IF latest <> '' THEN
			IF latest ^@ '+' OR latest ^@ '*' THEN
				ignored := @extschema@.idem__keep(split_part(latest, E'\t', 2));
			END IF;
			note := @extschema@.idem__next_flag(latest, left(note, 1)) || substr(note, 2);
		END IF;
		ignored := set_config('idem_held.latest', note, true);
	EXCEPTION
		WHEN lock_not_available OR SQLSTATE 'ID001' THEN
			outcome := NULL;
	END;
END
$$;

/*
 * Claims a batch by one statement, if all its keys are valid, different and new, and nobody is in
 * the way.  False: not all keys are; NULL: somebody is, or has claimed one.  Nothing has happened
 * then.  The keys come sorted.
 *
 * The insert is that of idem__claim_at_once(), for which the same holds.  It counts only if it
 * has inserted every key: otherwise all is rolled back.  The look before it spares that in the
 * usual case, in which some of the keys are known already; the insert decides.
 *
 * Each key may wait, and the deadline is that of the whole batch.  So before each key the insert
 * compares the clock with wait_until, which is a tenth of a second before the deadline: no wait
 * ends after it.  Keys that it leaves out are missing at the end, so all is rolled back.
 *
 * (Replaced by sql/idem-citus.sql.)
 */
CREATE FUNCTION @extschema@.idem__claim_all_at_once(user_ids text[], request_ids text[], of_scope text, fingerprints bytea[],
	wait_until timestamptz)
RETURNS boolean
LANGUAGE plpgsql
SET lock_timeout = '100' SET enable_seqscan = off SET jit = off SET plan_cache_mode = force_generic_plan
AS $$
DECLARE
	keys constant int4 := cardinality(user_ids);
	held text[];
	latest text COLLATE "C";
	ignored text;
BEGIN
	BEGIN
		-- (A scalar subquery: of EXISTS the planner could make a hash of the whole table.)
		PERFORM FROM unnest(user_ids, request_ids, fingerprints) AS e (user_id, request_id, fingerprint)
		WHERE (octet_length(e.user_id) BETWEEN 1 AND 255 AND octet_length(e.request_id) BETWEEN 1 AND 255
				AND (e.fingerprint IS NULL OR octet_length(e.fingerprint) BETWEEN 1 AND 64)) IS NOT TRUE
			OR (SELECT true FROM @extschema@.idem_claims AS c WHERE c.request_id = e.request_id COLLATE "C"
				AND c.user_id = e.user_id COLLATE "C" AND c.scope = of_scope COLLATE "C");
		IF FOUND THEN
			RETURN false;
		END IF;
		WITH locked AS (SELECT FROM @extschema@.idem_scopes FOR KEY SHARE),
			inserted AS (
				INSERT INTO @extschema@.idem_claims AS c (expires_at, state, request_id, user_id, scope, fingerprint)
				SELECT date_trunc('second', clock_timestamp() + interval '1100999 microseconds' + p.ttl),
					'completed', e.request_id, e.user_id, of_scope, e.fingerprint
				FROM (SELECT @extschema@.idem__without_days(coalesce(p.ttl, d.ttl))
						FROM @extschema@.idem_settings AS d LEFT JOIN @extschema@.idem_scopes AS p ON p.scope = of_scope COLLATE "C"
						WHERE CASE WHEN p.key_time IS NULL THEN d.scopes = 'any' ELSE p.key_time = 'any' END) AS p (ttl),
					unnest(user_ids, request_ids, fingerprints) AS e (user_id, request_id, fingerprint)
				WHERE clock_timestamp() < wait_until
				ON CONFLICT (request_id, user_id, scope) DO NOTHING
				RETURNING c.user_id, c.request_id, c.scope)
		SELECT array_agg(array_to_json(ARRAY[i.user_id, i.request_id, i.scope])::text) INTO held FROM inserted AS i;
		IF cardinality(held) IS DISTINCT FROM keys THEN
			RAISE SQLSTATE 'ID001';
		END IF;
	EXCEPTION
		WHEN lock_not_available OR SQLSTATE 'ID001' THEN
			RETURN NULL;
	END;

	-- Note them as if they had been claimed one after the other.
	latest := current_setting('idem_held.latest', true);
	IF latest ^@ '+' OR latest ^@ '*' THEN
		ignored := @extschema@.idem__keep(split_part(latest, E'\t', 2));
	END IF;
	IF keys > 1 THEN
		latest := '*';
		-- Move the list too: a key in a bucket counts as older than those in the list.
		ignored := set_config('idem_held.recent', @extschema@.idem__keep_in_buckets(
			string_to_array(current_setting('idem_held.recent', true), E'\n') || held[:keys - 1]), true);
	END IF;
	ignored := set_config('idem_held.latest', @extschema@.idem__next_flag(latest, '+') || E'\t' || held[keys], true);
	RETURN true;
END
$$;

-- ----- claiming -----

CREATE FUNCTION @extschema@.idem_claim(
	user_id text, request_id text, scope text DEFAULT '',
	fingerprint bytea DEFAULT NULL, wait interval DEFAULT NULL)
RETURNS boolean
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE COST 10000
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
	begun constant timestamptz := clock_timestamp();
	outcome text := (@extschema@.idem__claim_at_once(user_id, request_id, scope, fingerprint, wait)).outcome;
	deadline timestamptz;
	key @extschema@.idem__key;
BEGIN
	IF outcome IS NULL THEN
		deadline := @extschema@.idem__deadline(wait) - (clock_timestamp() - begun);
		key := @extschema@.idem__key_of(user_id, request_id, scope);
		PERFORM @extschema@.idem__check_fingerprint(fingerprint);
		outcome := (@extschema@.idem__claim_key('idem_claim()', key, fingerprint, deadline, NULL::interval, NULL::jsonb, false, true)).outcome;
		IF outcome = 'mismatch' AND fingerprint::text = current_setting('idem_call.fingerprint', true) THEN
			-- The caller of idem_call() has passed no fingerprint: say what differs.
			PERFORM @extschema@.idem__raise_of_key('ID422', 'request id was used before with another fingerprint',
				'The first call had another function or other arguments. A retry must send the same, also 30 and not "30"; only a new request takes a new id.', key);
		ELSIF outcome <> 'claimed' AND outcome <> 'completed' THEN
			PERFORM @extschema@.idem__raise_outcome(outcome, key);
		END IF;
	END IF;
	IF outcome = 'completed' AND fingerprint::text = current_setting('idem_call.fingerprint', true)
		AND @extschema@.idem__is_open(@extschema@.idem__held_text(@extschema@.idem__key_of(user_id, request_id, scope))) THEN
		PERFORM @extschema@.idem__raise_of_key('55000', 'idem_call(): this transaction has claimed the request already, and not settled it',
			'Do not claim the request before the call. The function that it runs must use another scope for calls of its own.', @extschema@.idem__key_of(user_id, request_id, scope));
	END IF;
	RETURN outcome = 'claimed';
END
$$;

COMMENT ON FUNCTION @extschema@.idem_claim(text, text, text, bytea, interval) IS
'claims a request for this transaction: true, do the work; false, it was done before. Any other outcome is raised';

CREATE FUNCTION @extschema@.idem_try_claim(
	user_id text, request_id text, scope text DEFAULT '',
	fingerprint bytea DEFAULT NULL, wait interval DEFAULT NULL,
	OUT outcome @extschema@.idem_outcome, OUT result jsonb, OUT progress jsonb,
	OUT expires_at timestamptz, OUT lease_until timestamptz)
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE COST 10000
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
	begun constant timestamptz := clock_timestamp();
	at_once record;
	deadline timestamptz;
	key @extschema@.idem__key;
	answer @extschema@.idem__answer;
BEGIN
	at_once := @extschema@.idem__claim_at_once(user_id, request_id, scope, fingerprint, wait);
	IF at_once.outcome IS NOT NULL THEN
		outcome := at_once.outcome;
		result := at_once.result;
		progress := at_once.progress;
		expires_at := at_once.expires_at;
		lease_until := at_once.lease_until;
		RETURN;
	END IF;
	deadline := @extschema@.idem__deadline(wait) - (clock_timestamp() - begun);
	key := @extschema@.idem__key_of(user_id, request_id, scope);
	PERFORM @extschema@.idem__check_fingerprint(fingerprint);
	answer := @extschema@.idem__claim_key('idem_try_claim()', key, fingerprint, deadline, NULL::interval, NULL::jsonb, true, true);
	outcome := answer.outcome;
	result := answer.result;
	progress := answer.progress;
	expires_at := answer.expires_at;
	lease_until := answer.lease_until;
END
$$;

COMMENT ON FUNCTION @extschema@.idem_try_claim(text, text, text, bytea, interval) IS
'claims a request for this transaction, and returns the outcome rather than raising it. Use it in FROM';

CREATE FUNCTION @extschema@.idem_lease(
	user_id text, request_id text, lease interval, scope text DEFAULT '',
	fingerprint bytea DEFAULT NULL, wait interval DEFAULT NULL,
	OUT outcome @extschema@.idem_outcome, OUT result jsonb, INOUT progress jsonb DEFAULT NULL,
	OUT expires_at timestamptz, OUT lease_until timestamptz, OUT token int8)
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE COST 10000
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
	deadline constant timestamptz := @extschema@.idem__deadline(wait);
	key constant @extschema@.idem__key := @extschema@.idem__key_of(user_id, request_id, scope);
	answer @extschema@.idem__answer;
BEGIN
	PERFORM @extschema@.idem__check_fingerprint(fingerprint);
	IF lease IS NULL THEN
		PERFORM @extschema@.idem__raise('ID400', 'lease must not be null',
			'Fix the client: pass how long the lease lasts, such as ''30 s''.');
	END IF;
	lease := @extschema@.idem__check_lease(lease);
	answer := @extschema@.idem__claim_key('idem_lease()', key, fingerprint, deadline, lease, progress, true, true);
	outcome := answer.outcome;
	result := answer.result;
	progress := answer.progress;
	expires_at := answer.expires_at;
	lease_until := answer.lease_until;
	token := @extschema@.idem__lease_token(key, answer.token);
END
$$;

COMMENT ON FUNCTION @extschema@.idem_lease(text, text, interval, text, bytea, interval, jsonb) IS
'claims a request for work that is not one transaction: until the lease ends, or a call with the token settles it. Use it in FROM';

-- Claims one element of a batch.  A malformed element is answered with invalid, and the
-- others are claimed.  is_free: nobody was in the way of its part of the batch.
CREATE FUNCTION @extschema@.idem__claim_element(user_id text, request_id text, scope text, fingerprint bytea, deadline timestamptz,
	is_free boolean)
RETURNS @extschema@.idem__answer
LANGUAGE plpgsql
AS $$
DECLARE
	at_once record;
BEGIN
	IF octet_length(user_id) BETWEEN 1 AND 255 AND octet_length(request_id) BETWEEN 1 AND 255
		AND (fingerprint IS NULL OR octet_length(fingerprint) BETWEEN 1 AND 64) THEN
		-- Past the deadline of the batch, no element is waited for twice.
		IF clock_timestamp() < deadline THEN
			at_once := @extschema@.idem__claim_at_once(user_id, request_id, scope, fingerprint,
				CASE WHEN is_free AND clock_timestamp() + interval '100 milliseconds' < deadline THEN interval '1 second' ELSE interval '0' END);
			IF at_once.outcome IS NOT NULL THEN
				RETURN ROW (at_once.outcome, at_once.result, NULL, NULL, NULL, NULL)::@extschema@.idem__answer;
			END IF;
		END IF;
		RETURN @extschema@.idem__claim_key('idem_claim_many()', ROW (user_id, request_id, scope)::@extschema@.idem__key,
			fingerprint, deadline, NULL::interval, NULL::jsonb, false, false);
	END IF;
	RETURN ROW ('invalid', NULL, NULL, NULL, NULL, NULL)::@extschema@.idem__answer;
END
$$;

-- Claims in the order of the keys, whatever the order of the arrays.  So batches that come
-- first in their transactions never deadlock with each other.
CREATE FUNCTION @extschema@.idem_claim_many(
	user_ids text[], request_ids text[], scope text DEFAULT '',
	fingerprints bytea[] DEFAULT NULL, wait interval DEFAULT NULL)
RETURNS TABLE (ordinal int4, outcome @extschema@.idem_outcome, result jsonb)
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE COST 10000
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
	deadline constant timestamptz := @extschema@.idem__deadline(wait);
	wait_until constant timestamptz := deadline - interval '100 milliseconds';		-- see idem__claim_all_at_once()
	refused text;
	may_be_at_once boolean;
	was_claimed boolean;		-- the part, at once; NULL: somebody was in the way
	sorted record;
	keys int4;
	first int4 := 1;			-- of a part of the batch
	last int4;
	part int4 := 250;
	outcomes @extschema@.idem_outcome[] := '{}';
	results jsonb[] := '{}';
	answers record;
BEGIN
	PERFORM @extschema@.idem__check_scope(scope);
	refused := CASE
		WHEN user_ids IS NULL THEN 'user_ids and request_ids must not be null'
		WHEN array_ndims(user_ids) > 1 THEN 'arrays must have one dimension'
		WHEN request_ids IS NULL THEN 'user_ids and request_ids must not be null'
		WHEN array_ndims(request_ids) > 1 OR array_ndims(fingerprints) > 1 THEN 'arrays must have one dimension'
		WHEN cardinality(user_ids) <> cardinality(request_ids) OR cardinality(user_ids) <> cardinality(fingerprints)
			THEN 'arrays must have the same length' END;
	-- (The limit is the C edition's.)
	IF refused IS DISTINCT FROM 'arrays must have one dimension'
		AND greatest(cardinality(user_ids), cardinality(request_ids), cardinality(fingerprints)) > 10000000 THEN
		PERFORM @extschema@.idem__raise('ID400', 'more than 10000000 requests in one call', 'Fix the client: pass them in several calls.');
	END IF;
	IF refused IS NOT NULL THEN
		PERFORM @extschema@.idem__raise('ID400', refused,
			'Fix the client: pass one-dimensional arrays of the same length, one element a request.');
	END IF;
	PERFORM @extschema@.idem__require_writable('idem_claim_many()');

	SELECT array_agg(e.user_id) AS user_ids, array_agg(e.request_id) AS request_ids, array_agg(e.fingerprint) AS fingerprints,
		array_agg(e.n::int4) AS ordinals
	INTO sorted
	FROM (SELECT t.n, t.user_id, t.request_id, t.fingerprint
			FROM unnest(user_ids, request_ids, fingerprints) WITH ORDINALITY AS t (user_id, request_id, fingerprint, n)
			ORDER BY t.request_id COLLATE "C", t.user_id COLLATE "C", t.n) AS e;
	keys := coalesce(cardinality(sorted.ordinals), 0);
	may_be_at_once := current_setting('transaction_isolation') IN ('read committed', 'read uncommitted')
		AND current_setting('idem_portable.fast_path', true) IS DISTINCT FROM 'off';

	-- In parts, which are rolled back one by one where somebody is in the way.  They double as
	-- long as nobody is: so the subtransactions are few, and at most half of the work is done
	-- twice.
	WHILE first <= keys LOOP
		last := least(first + part - 1, keys);
		was_claimed := CASE WHEN may_be_at_once AND last > first AND clock_timestamp() < wait_until THEN @extschema@.idem__claim_all_at_once(
			sorted.user_ids[first:last], sorted.request_ids[first:last], scope, sorted.fingerprints[first:last], wait_until) ELSE false END;
		IF was_claimed THEN
			part := part * 2;
			outcomes := outcomes || array_fill('claimed'::@extschema@.idem_outcome, ARRAY[last - first + 1]);
			results := results || array_fill(NULL::jsonb, ARRAY[last - first + 1]);
		ELSE
			part := 250;
			SELECT array_agg(a.outcome) AS outcomes, array_agg(a.result) AS results INTO answers
			FROM (SELECT t.user_id, t.request_id, t.fingerprint
					FROM unnest(sorted.user_ids[first:last], sorted.request_ids[first:last], sorted.fingerprints[first:last])
						WITH ORDINALITY AS t (user_id, request_id, fingerprint, n)
					ORDER BY t.n) AS e,
				@extschema@.idem__claim_element(e.user_id, e.request_id, idem_claim_many.scope, e.fingerprint, deadline,
					was_claimed IS NOT NULL) AS a;
			outcomes := outcomes || answers.outcomes;
			results := results || answers.results;
		END IF;
		first := last + 1;
	END LOOP;
	RETURN QUERY SELECT t.n, t.outcome, t.result FROM unnest(sorted.ordinals, outcomes, results) AS t (n, outcome, result) ORDER BY t.n;
END
$$;

COMMENT ON FUNCTION @extschema@.idem_claim_many(text[], text[], text, bytea[], interval) IS
'claims requests for this transaction, in an order in which batches do not deadlock; answers in the order of the arrays';

-- ----- sinks -----

-- The type of the column, of a domain the type below it.  Raises an error unless the column
-- exists, and its values can be ids.  declared: its type, as the server sees it in a row.
CREATE FUNCTION @extschema@.idem__sink_type(relation oid, table_name name, column_name text, declared oid)
RETURNS oid
LANGUAGE plpgsql
AS $$
DECLARE
	type oid := declared;
	generated text;
BEGIN
	SELECT a.attgenerated INTO generated FROM pg_attribute AS a
	WHERE a.attrelid = relation AND a.attname::text = column_name AND a.attnum > 0 AND NOT a.attisdropped;
	IF NOT FOUND THEN
		PERFORM @extschema@.idem__raise('42703', pg_catalog.format('column "%s" of table "%s" does not exist', column_name, table_name),
			'The arguments of idem_skip_duplicates() are the scope, the user''s column and the request''s column.');
	ELSIF generated <> '' THEN
		PERFORM @extschema@.idem__raise('0A000', pg_catalog.format('column "%s" of table "%s" is generated', column_name, table_name),
			'Name a column that the INSERT sets, or that a trigger with an earlier name sets.',
			'The server computes it after the trigger.');
	END IF;
	WHILE EXISTS (SELECT FROM pg_type AS t WHERE t.oid = type AND t.typtype = 'd') LOOP
		type := (SELECT t.typbasetype FROM pg_type AS t WHERE t.oid = type);
	END LOOP;
	IF type NOT IN ('text'::regtype, 'varchar'::regtype, 'bpchar'::regtype, 'name'::regtype, 'uuid'::regtype,
			'int2'::regtype, 'int4'::regtype, 'int8'::regtype, 'numeric'::regtype) THEN
		PERFORM @extschema@.idem__raise('42804', pg_catalog.format('column "%s" of table "%s" has type %s, which cannot be an id',
				column_name, table_name, format_type(declared, NULL)),
			'Use a column of type text, varchar, char, name, uuid, smallint, integer, bigint or numeric: settings of the session do not change their text.');
	END IF;
	RETURN type;
END
$$;

-- Raises an error unless the trigger is one that idem_skip_duplicates() can serve.  True: its
-- table is a partition.  (Replaced by sql/idem-citus.sql.)
CREATE FUNCTION @extschema@.idem__check_sink(relation oid, trigger_name name, fired text, arguments int4,
	scope text, user_column text, request_column text)
RETURNS boolean
LANGUAGE plpgsql
AS $$
DECLARE
	trigger record;
	root text;
BEGIN
	SELECT t.oid, t.tgtype, t.tgparentid, c.relname, c.relispartition,
		t.tgqual IS NULL AND EXISTS (SELECT FROM pg_trigger AS o
			WHERE o.tgrelid = t.tgrelid AND o.oid <> t.oid AND o.tgfoid = t.tgfoid
				AND o.tgqual IS NULL AND o.tgenabled <> 'D') AS is_second,
		EXISTS (SELECT FROM pg_attribute AS a WHERE a.attrelid = t.tgrelid AND a.attname = user_column::name
				AND a.attname::text = user_column AND a.attnum > 0 AND a.attgenerated = '')
			AND EXISTS (SELECT FROM pg_attribute AS a WHERE a.attrelid = t.tgrelid AND a.attname = request_column::name
				AND a.attname::text = request_column AND a.attnum > 0 AND a.attgenerated = '') AS has_columns
	INTO trigger FROM pg_trigger AS t JOIN pg_class AS c ON c.oid = t.tgrelid
	WHERE t.tgrelid = relation AND t.tgname = trigger_name;
	IF NOT FOUND THEN
		PERFORM @extschema@.idem__raise('40001', 'could not serialize access: the trigger was created after this transaction''s snapshot',
			'Retry the transaction.');
	ELSIF fired <> 'BEFORE ROW' OR trigger.tgtype & 4 = 0 THEN
		PERFORM @extschema@.idem__raise('39P01', 'idem_skip_duplicates() must be called BEFORE INSERT, FOR EACH ROW',
			'Create the trigger BEFORE INSERT; on a partitioned table, BEFORE INSERT OR DELETE.');
	ELSIF arguments <> 3 THEN
		PERFORM @extschema@.idem__raise('39P01', 'idem_skip_duplicates() needs three arguments',
			'They are the scope, the name of the user''s column and the name of the request''s column.');
	ELSIF trigger.is_second THEN
		PERFORM @extschema@.idem__raise('39P01', pg_catalog.format('table "%s" has two triggers that call idem_skip_duplicates()', trigger.relname),
			'Drop one of them: the second one would skip each row that the first one has claimed.');
	ELSIF octet_length(scope) > 255 THEN
		PERFORM @extschema@.idem__check_scope(scope);
	ELSIF NOT trigger.has_columns THEN
		PERFORM @extschema@.idem__sink_type(relation, trigger.relname, user_column, 'text'::regtype::oid),
			@extschema@.idem__sink_type(relation, trigger.relname, request_column, 'text'::regtype::oid);
	END IF;
	-- A table that is being detached (DETACH CONCURRENTLY) is a partition until that is done:
	-- older transactions still move rows there, and away.
	IF trigger.relispartition AND (trigger.tgtype & 8 = 0 OR (
			WITH RECURSIVE up AS (
				SELECT trigger.tgparentid AS parent, relation AS relid
				UNION ALL
				SELECT t.tgparentid, t.tgrelid FROM up JOIN pg_trigger AS t ON t.oid = up.parent)
			SELECT c.relispartition FROM up JOIN pg_class AS c ON c.oid = up.relid WHERE up.parent = '0'::oid)) THEN
		root := (WITH RECURSIVE up AS (
				SELECT relation AS relid
				UNION ALL
				SELECT i.inhparent FROM up JOIN pg_inherits AS i ON i.inhrelid = up.relid)
			SELECT c.relname FROM up JOIN pg_class AS c ON c.oid = up.relid WHERE NOT c.relispartition);
		PERFORM @extschema@.idem__raise('39P01', pg_catalog.format('trigger "%s" must be created on partitioned table "%s", BEFORE INSERT OR DELETE',
				trigger_name, root),
			'Otherwise an UPDATE that moves a row to another partition could lose it.');
	END IF;
	RETURN trigger.relispartition;
END
$$;

-- The id in a column of a row.  Raises ID400 for a value that cannot be one.
CREATE FUNCTION @extschema@.idem__sink_id(part text, value text, type oid, column_name text, table_name name)
RETURNS text
LANGUAGE plpgsql
AS $$
DECLARE
	id constant text := CASE type WHEN 'bpchar'::regtype THEN rtrim(value, ' ') ELSE value END;
BEGIN
	IF octet_length(id) BETWEEN 1 AND 255 THEN
		RETURN id;
	END IF;
	PERFORM @extschema@.idem__raise('ID400', part || CASE WHEN id IS NULL THEN ' must not be null'
			WHEN id = '' THEN ' must not be empty' ELSE ' is too long' END,
		'Fix the client: it must send two ids of 1 to 255 bytes, and the same two each time it sends the request.',
		pg_catalog.format('It is column "%s" of table "%s".', column_name, table_name));
END
$$;

-- The key of a row.  Raises an error if the types or the values of its columns cannot be ids.
CREATE FUNCTION @extschema@.idem__sink_key(relation oid, table_name name, user_type oid, request_type oid,
	user_value text, request_value text, scope text, user_column text, request_column text)
RETURNS @extschema@.idem__key
LANGUAGE plpgsql
AS $$
DECLARE
	user_base constant oid := @extschema@.idem__sink_type(relation, table_name, user_column, user_type);
	request_base constant oid := @extschema@.idem__sink_type(relation, table_name, request_column, request_type);
BEGIN
	RETURN ROW (@extschema@.idem__sink_id('user_id', user_value, user_base, user_column, table_name),
		@extschema@.idem__sink_id('request_id', request_value, request_base, request_column, table_name), scope)::@extschema@.idem__key;
END
$$;

-- Claims the key, and leaves this transaction's memory as it was: the claim is settled at
-- once.
CREATE FUNCTION @extschema@.idem__claim_marker(key @extschema@.idem__key, command text)
RETURNS boolean
LANGUAGE plpgsql
AS $$
DECLARE
	latest constant text := coalesce(current_setting('idem_held.latest', true), '');
	outcome text;
	ignored text;
BEGIN
	ignored := set_config('idem_held.latest', '', true);
	outcome := (@extschema@.idem__claim_at_once(key.user_id::text, key.request_id::text, key.scope::text, NULL::bytea, NULL::interval)).outcome;
	IF outcome IS NULL THEN
		outcome := (@extschema@.idem__claim_key(command, key, NULL::bytea, @extschema@.idem__deadline(NULL::interval),
			NULL::interval, NULL::jsonb, false, true)).outcome;
	END IF;
	IF outcome <> 'claimed' AND outcome <> 'completed' THEN
		PERFORM @extschema@.idem__raise_outcome(outcome, key);
	END IF;
	ignored := set_config('idem_held.latest', latest, true);
	RETURN outcome = 'claimed';
END
$$;

-- Claims the request of each row that is inserted, and skips the row if the request was done
-- before.
--
-- It runs as its owner, for a table that can belong to anybody.  So it evaluates nothing of
-- the table's owner: no cast (format() calls output functions, which are the server's), and
-- no function that has the name of a column (an unqualified name in FROM is never one).
--
-- An UPDATE that moves a row to another partition deletes it there and inserts it here.  The
-- trigger cannot tell the insert from that of a new row, and to skip the row would lose it.  So
-- on a partitioned table the trigger is for DELETE too, and notes the time of the client's
-- statement.  If the statement then inserts a row whose request was done, it fails.  (SQL has
-- nothing that tells the statements of one function apart, or those that the client sends in one
-- string.)  Anybody can forge the note, and harms only the rows that he writes himself.
CREATE FUNCTION @extschema@.idem_skip_duplicates()
RETURNS trigger
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
	is_partition constant boolean := @extschema@.idem__check_sink(TG_RELID, TG_NAME, TG_WHEN || ' ' || TG_LEVEL, TG_NARGS,
		TG_ARGV[0], TG_ARGV[1], TG_ARGV[2]);
	query constant text := pg_catalog.format('SELECT pg_typeof(%1$I)::oid AS user_type, pg_typeof(%2$I)::oid AS request_type,'
		' CASE WHEN %1$I IS NOT NULL THEN format(''%%s'', %1$I) END AS user_id,'
		' CASE WHEN %2$I IS NOT NULL THEN format(''%%s'', %2$I) END AS request_id'
		' FROM (SELECT ($1).*) AS inserted', TG_ARGV[1], TG_ARGV[2]);
	statement constant text := extract(epoch FROM statement_timestamp());
	common constant oid[] := ARRAY['text'::regtype, 'varchar'::regtype, 'uuid'::regtype, 'int4'::regtype, 'int8'::regtype];
	ids record;
	key @extschema@.idem__key;
BEGIN
	IF TG_OP = 'UPDATE' THEN
		RETURN NEW;
	ELSIF TG_OP = 'DELETE' THEN
		IF is_partition THEN
			PERFORM set_config('idem_held.deleting', statement, true);
		END IF;
		RETURN OLD;
	END IF;

	EXECUTE query INTO ids USING NEW;
	IF ids.user_type = ANY (common) AND ids.request_type = ANY (common)
		AND octet_length(ids.user_id) BETWEEN 1 AND 255 AND octet_length(ids.request_id) BETWEEN 1 AND 255 THEN
		key := ROW (ids.user_id, ids.request_id, TG_ARGV[0])::@extschema@.idem__key;
	ELSE
		key := @extschema@.idem__sink_key(TG_RELID, TG_TABLE_NAME, ids.user_type, ids.request_type, ids.user_id, ids.request_id,
			TG_ARGV[0], TG_ARGV[1], TG_ARGV[2]);
	END IF;
	IF @extschema@.idem__claim_marker(key, 'idem_skip_duplicates()') THEN
		RETURN NEW;
	ELSIF is_partition AND current_setting('idem_held.deleting', true) = statement THEN
		PERFORM @extschema@.idem__raise_of_key('0A000', 'cannot tell whether a row is new or moves from another partition',
			'To move rows, disable the trigger meanwhile. To delete rows and to insert others, use two statements.', key);
	END IF;
	RETURN NULL;
END
$$;

COMMENT ON FUNCTION @extschema@.idem_skip_duplicates() IS
'trigger BEFORE INSERT, arguments scope, user column, request column: claims the request of each row, and skips the row if it was done before';

-- ----- settling -----

-- Locks the row of the key until the transaction ends, and returns it as it is now; all NULL
-- if there is none.  Waits for another transaction that has the row, for idem.wait, and then
-- raises ID503 (ID409 for '0').  token: that of the wanted row, NULL for any.  A row with
-- another token is returned without a wait for its lock.
CREATE FUNCTION @extschema@.idem__lock_row(key @extschema@.idem__key, deadline timestamptz, token int8)
RETURNS @extschema@.idem__claim
LANGUAGE plpgsql
AS $$
DECLARE
	caller_timeout constant text := current_setting('lock_timeout');
	keeps_snapshot constant boolean := @extschema@.idem__keeps_snapshot();
	only_ours constant boolean := @extschema@.idem__only_ours_counts(key);
	slices int4 := 0;
	catching boolean;
	inserting boolean;
	is_absent boolean;
	locked @extschema@.idem__claim;
BEGIN
	LOOP
		-- The common case: the row is free.
		IF NOT keeps_snapshot THEN
			SELECT c.* INTO locked FROM @extschema@.idem_claims AS c
			WHERE @extschema@.idem__has_key(c.user_id, c.request_id, c.scope, key)
			FOR NO KEY UPDATE SKIP LOCKED;
			IF FOUND THEN
				RETURN locked;
			END IF;
		END IF;

		BEGIN
			catching := @extschema@.idem__bound_lock_waits(deadline, slices);
			-- Wait as a claim does, see idem__claim_key(): try to insert the key.  The insert
			-- is rolled back.
			inserting := true;
			INSERT INTO @extschema@.idem_claims (expires_at, state, request_id, user_id, scope)
			VALUES ('-infinity', 'completed', key.request_id, key.user_id, key.scope)
			ON CONFLICT (request_id, user_id, scope) DO NOTHING;
			is_absent := FOUND;
			inserting := false;
			IF is_absent THEN
				RAISE SQLSTATE 'ID001';
			END IF;

			SELECT c.* INTO locked FROM @extschema@.idem_claims AS c
			WHERE @extschema@.idem__has_key(c.user_id, c.request_id, c.scope, key)
				AND (NOT only_ours OR @extschema@.idem__is_ours(c.xmin));
			IF FOUND AND (idem__lock_row.token IS NULL OR locked.token IS NOT DISTINCT FROM idem__lock_row.token) THEN
				SELECT c.* INTO locked FROM @extschema@.idem_claims AS c
				WHERE @extschema@.idem__has_key(c.user_id, c.request_id, c.scope, key)
					AND (NOT only_ours OR @extschema@.idem__is_ours(c.xmin))
				FOR NO KEY UPDATE;
			END IF;
			IF FOUND THEN
				PERFORM set_config('lock_timeout', caller_timeout, true);
				RETURN locked;
			END IF;
			RAISE SQLSTATE 'ID001';		-- removed meanwhile: look again
		EXCEPTION
			WHEN SQLSTATE 'ID001' THEN
				IF is_absent THEN
					RETURN NULL;
				END IF;
			WHEN serialization_failure THEN
				-- Changed or removed while we waited for its lock: the next insert tells which.
				IF inserting THEN
					RAISE;
				END IF;
			WHEN lock_not_available THEN
				IF NOT catching THEN
					RAISE;
				ELSIF clock_timestamp() >= deadline THEN
					PERFORM @extschema@.idem__raise_outcome(@extschema@.idem__outcome_of_passed(deadline), key);
				END IF;
				slices := slices + 1;
		END;
	END LOOP;
END
$$;

CREATE FUNCTION @extschema@.idem__raise_no_request(key @extschema@.idem__key)
RETURNS void
LANGUAGE plpgsql
AS $$
BEGIN
	PERFORM @extschema@.idem__raise_of_key('ID410', pg_catalog.format('there is no such request in scope "%s"', key.scope),
		'Check the scope and the ids in DETAIL. If they are right, the request was released or dropped: stop, and roll back.', key);
END
$$;

-- Locks the row of a lease and returns it if the token is the holder's; otherwise raises
-- ID410.  The token decides, never the clock: a holder whose lease lapsed still holds it
-- until somebody takes it over.
CREATE FUNCTION @extschema@.idem__lock_lease(key @extschema@.idem__key, token int8)
RETURNS @extschema@.idem__claim
LANGUAGE plpgsql
AS $$
DECLARE
	locked constant @extschema@.idem__claim := @extschema@.idem__lock_row(key, @extschema@.idem__deadline(NULL::interval), token);
BEGIN
	IF locked.state IS NULL THEN
		PERFORM @extschema@.idem__raise_no_request(key);
	ELSIF locked.token IS DISTINCT FROM token THEN
		PERFORM @extschema@.idem__raise_of_key('ID410', 'lease is lost',
			'Stop, and roll back: another holder has the request. Or the token is wrong.', key);
	END IF;
	RETURN locked;
END
$$;

CREATE FUNCTION @extschema@.idem__require_unsettled(key @extschema@.idem__key, lease @extschema@.idem__claim)
RETURNS void
LANGUAGE plpgsql
AS $$
BEGIN
	IF lease.state::text <> 'in_progress' THEN
		PERFORM @extschema@.idem__raise_of_key('ID410', 'lease is settled',
			'Stop, and roll back: the request is completed or failed.', key);
	END IF;
END
$$;

/*
 * Ends a key.  True: stored.  False: an identical repeat, or somebody else has healed it.
 * The row decides who may settle it, never this transaction's memory or the clock:
 *
 * - a transactional claim (token NULL): the transaction that wrote the row.  The row is
 *	 completed from the start; settling stores a response in it, or makes it a failure;
 * - a lease: a caller with the token that is in the row.
 *
 * A settled row keeps its token: so the holder's repeat can be told from an attempt by
 * somebody else.  A healed row has no lease_until: so a late holder learns that the request
 * is settled, instead of an error.
 */
CREATE FUNCTION @extschema@.idem__settle(command text, key @extschema@.idem__key, token int8, new_state text, new_result jsonb)
RETURNS boolean
LANGUAGE plpgsql
AS $$
DECLARE
	unsettled constant boolean := @extschema@.idem__is_open(@extschema@.idem__held_text(key));
	only_ours constant boolean := token IS NULL OR @extschema@.idem__only_ours_counts(key);
	policy record;
	was @extschema@.idem__claim;
	is_healed boolean;
	new_expires_at timestamptz;
BEGIN
	PERFORM @extschema@.idem__require_writable(command);
	SELECT p.* INTO policy FROM @extschema@.idem__policy(key.scope) AS p;
	PERFORM @extschema@.idem__check_size(key, 'result', new_result, policy.result_max_bytes);

	IF token IS NOT NULL THEN
		BEGIN
			was := @extschema@.idem__lock_lease(key, token);
			IF was.state::text <> 'in_progress' THEN
				RAISE SQLSTATE 'ID001';		-- releases the lock
			END IF;
		EXCEPTION
			WHEN SQLSTATE 'ID001' THEN
		END;
	ELSE
		SELECT c.* INTO was FROM @extschema@.idem_claims AS c
		WHERE @extschema@.idem__has_key(c.user_id, c.request_id, c.scope, key)
			AND @extschema@.idem__is_ours(c.xmin) AND @extschema@.idem__is_of_now(c.state, c.lease_until);
		IF NOT FOUND THEN
			PERFORM @extschema@.idem__raise_of_key('ID410', 'request is not held by this transaction',
				'Settle a request in the transaction that claimed it, between BEGIN and COMMIT, or pass the token of its lease. Or the scope or an id in DETAIL is wrong.', key);
		END IF;
	END IF;

	IF was.state::text <> 'in_progress' AND NOT (unsettled AND was.token IS NULL AND was.state::text = 'completed' AND was.result IS NULL) THEN
		is_healed := was.token IS NOT NULL AND was.lease_until IS NULL AND was.state::text = 'completed';
		IF (is_healed AND new_state <> 'completed') OR (NOT is_healed
			AND (was.state::text <> new_state OR was.result IS DISTINCT FROM new_result)) THEN
			PERFORM @extschema@.idem__raise_of_key('ID410', 'request is settled already, in another way',
				'Settle a request once; a repeat must be identical.', key);
		END IF;
		RETURN false;
	END IF;

	new_expires_at := greatest(was.expires_at, @extschema@.idem__remembered_until(policy.ttl, NULL::timestamptz, NULL::timestamptz));
	-- Completing a marker without a result needs no second version of its row.
	IF was.state::text <> new_state OR new_result IS NOT NULL OR was.expires_at <> new_expires_at THEN
		UPDATE @extschema@.idem_claims AS c SET state = new_state::@extschema@.idem_state, result = new_result, expires_at = new_expires_at
		WHERE @extschema@.idem__has_key(c.user_id, c.request_id, c.scope, key)
			AND (NOT only_ours OR @extschema@.idem__is_ours(c.xmin));
	END IF;
	PERFORM @extschema@.idem__note_settled(key, new_result);
	IF was.token IS NOT NULL THEN
		PERFORM @extschema@.idem__commit_synchronously();
	END IF;
	RETURN true;
END
$$;

-- As idem__is_ours(), which says why, for the transaction with the id top.  Without the block that
-- catches the error of an xmin from before the ids wrapped around: only a forged note leads to a
-- row with such an xmin.
CREATE FUNCTION @extschema@.idem__is_of(top int8, row_xmin xid)
RETURNS boolean
LANGUAGE sql VOLATILE
AS $$
	SELECT CASE WHEN (row_xmin::text::int8 - top) & 4294967295 < 2147483648
		THEN pg_xact_status((top + ((row_xmin::text::int8 - top) & 4294967295))::text::xid8) = 'in progress' END
$$;

-- The common case of idem_complete(result): the latest claim call of this transaction was
-- decided by the fast path, claimed a key, and it is the only one unsettled.  False: it is
-- another case, or the result is too large, or the settings have no row; idem__settle() has to
-- decide.  Does what idem__settle() does, in one statement.  (A result that is too large is noticed
-- after the row was written without it; the error of idem__settle() undoes that.)
--
-- The note says where the row is.  The row has to be one that this transaction wrote and has not
-- settled with a result.  So a forged note reaches neither the request of another transaction
-- nor a stored result; if it names no place, the input function of tid raises an error.  The key is
-- compared too, since a table that was rewritten has other rows in the same places.  No other
-- transaction can lock or change the row, which it does not see, so the update waits for nobody.
--
-- PL/pgSQL prepares each expression anew in each transaction, which costs about 2,500 instructions
-- for each function in it.  So the expressions here call few functions.  The SET clauses of
-- idem_complete(jsonb) hold here too.  (Replaced by sql/idem-citus.sql.)
CREATE FUNCTION @extschema@.idem__complete_at_once(new_result jsonb)
RETURNS boolean
LANGUAGE plpgsql
AS $$
DECLARE
	latest constant text COLLATE "C" := current_setting('idem_held.latest', true);
	place tid;
	top int8;
	is_stored boolean;
	ignored text;
BEGIN
	IF (latest ^@ '+(' AND new_result IS NOT NULL AND current_setting('transaction_read_only') = 'off') IS NOT TRUE THEN
		RETURN false;
	END IF;
	place := split_part(substr(latest, 2), E'\t', 1);
	top := pg_current_xact_id_if_assigned()::text::int8;
	UPDATE @extschema@.idem_claims AS c SET (result, expires_at) = (
		SELECT CASE WHEN pg_column_size(to_jsonb(new_result)) - 4 <= coalesce(p.result_max_bytes, d.result_max_bytes) THEN new_result END,
			greatest(c.expires_at, date_trunc('second', clock_timestamp() + interval '999999 microseconds'
				+ @extschema@.idem__without_days(coalesce(p.ttl, d.ttl))))
		FROM (SELECT) AS always LEFT JOIN @extschema@.idem_settings AS d ON true
			LEFT JOIN @extschema@.idem_scopes AS p ON p.scope = c.scope)
	WHERE c.ctid = place AND @extschema@.idem__is_of(top, c.xmin)
		AND array_to_json(ARRAY[c.user_id, c.request_id, c.scope])::text COLLATE "C" = split_part(latest, E'\t', 2)
		AND c.state = 'completed' AND c.token IS NULL AND c.result IS NULL
	RETURNING c.result IS NOT NULL INTO is_stored;
	IF is_stored IS NOT TRUE THEN
		RETURN false;
	END IF;
	ignored := set_config('idem_held.latest', '-' || latest, true);
	RETURN true;
END
$$;

CREATE FUNCTION @extschema@.idem_complete(result jsonb DEFAULT NULL)
RETURNS boolean
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE COST 10000
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off
AS $$
BEGIN
	IF @extschema@.idem__complete_at_once(result) THEN
		RETURN true;
	END IF;
	RETURN @extschema@.idem__settle('idem_complete()', @extschema@.idem__only_unsettled('idem_complete()'), NULL::int8, 'completed', result);
END
$$;

COMMENT ON FUNCTION @extschema@.idem_complete(jsonb) IS
'stores the response of the only request that this transaction holds unsettled';

CREATE FUNCTION @extschema@.idem_complete(
	user_id text, request_id text, result jsonb, token int8 DEFAULT NULL, scope text DEFAULT '')
RETURNS boolean
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE COST 10000
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
	key constant @extschema@.idem__key := @extschema@.idem__key_of(user_id, request_id, scope);
BEGIN
	PERFORM @extschema@.idem__check_token(token);
	RETURN @extschema@.idem__settle('idem_complete()', key, token, 'completed', result);
END
$$;

COMMENT ON FUNCTION @extschema@.idem_complete(text, text, jsonb, int8, text) IS
'stores the response of a request that this transaction holds, or whose lease has the token: true, stored; false, an identical repeat';

CREATE FUNCTION @extschema@.idem_fail(error jsonb)
RETURNS boolean
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE COST 10000
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
	RETURN @extschema@.idem__settle('idem_fail()', @extschema@.idem__only_unsettled('idem_fail()'), NULL::int8, 'failed', error);
END
$$;

COMMENT ON FUNCTION @extschema@.idem_fail(jsonb) IS
'ends the only request that this transaction holds unsettled as failed; commit, or it is not recorded';

CREATE FUNCTION @extschema@.idem_fail(
	user_id text, request_id text, error jsonb, token int8 DEFAULT NULL, scope text DEFAULT '')
RETURNS boolean
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE COST 10000
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
	key constant @extschema@.idem__key := @extschema@.idem__key_of(user_id, request_id, scope);
BEGIN
	PERFORM @extschema@.idem__check_token(token);
	RETURN @extschema@.idem__settle('idem_fail()', key, token, 'failed', error);
END
$$;

COMMENT ON FUNCTION @extschema@.idem_fail(text, text, jsonb, int8, text) IS
'ends a request that this transaction holds, or whose lease has the token, as failed: true, stored; false, an identical repeat';

CREATE FUNCTION @extschema@.idem_heal(user_id text, request_id text, result jsonb, scope text DEFAULT '')
RETURNS boolean
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE COST 10000
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
	key constant @extschema@.idem__key := @extschema@.idem__key_of(user_id, request_id, scope);
	only_ours constant boolean := @extschema@.idem__only_ours_counts(key);
	policy record;
	state text;
	remembered_until timestamptz;
BEGIN
	PERFORM @extschema@.idem__require_writable('idem_heal()');
	SELECT p.* INTO policy FROM @extschema@.idem__policy(key.scope) AS p;
	PERFORM @extschema@.idem__check_size(key, 'result', result, policy.result_max_bytes);
	BEGIN
		state := (@extschema@.idem__lock_row(key, @extschema@.idem__deadline(NULL::interval), NULL::int8)).state;
		IF state = 'completed' THEN
			RAISE SQLSTATE 'ID001';		-- releases the lock
		END IF;
	EXCEPTION
		WHEN SQLSTATE 'ID001' THEN
			RETURN false;
	END;
	IF state IS NULL THEN
		PERFORM @extschema@.idem__raise_no_request(key);
	ELSIF state = 'failed' THEN
		PERFORM @extschema@.idem__raise_of_key('ID410', 'request has failed for good',
			'The request has already failed; use a new id, or idem_forget().', key);
	END IF;
	remembered_until := @extschema@.idem__remembered_until(policy.ttl, NULL::timestamptz, NULL::timestamptz);
	UPDATE @extschema@.idem_claims AS c SET state = 'completed', result = idem_heal.result, lease_until = NULL,
		expires_at = greatest(c.expires_at, remembered_until)
	WHERE @extschema@.idem__has_key(c.user_id, c.request_id, c.scope, key)
		AND (NOT only_ours OR @extschema@.idem__is_ours(c.xmin));
	PERFORM @extschema@.idem__note_settled(key, result), @extschema@.idem__commit_synchronously();
	RETURN true;
END
$$;

COMMENT ON FUNCTION @extschema@.idem_heal(text, text, jsonb, text) IS
'settles a lease of any holder, after its work was found done: true, settled; false, it was settled already';

CREATE FUNCTION @extschema@.idem_forget(user_id text, request_id text, scope text DEFAULT '')
RETURNS boolean
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE COST 10000
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
	key constant @extschema@.idem__key := @extschema@.idem__key_of(user_id, request_id, scope);
	only_ours constant boolean := @extschema@.idem__only_ours_counts(key);
	was @extschema@.idem__claim;
BEGIN
	PERFORM @extschema@.idem__require_writable('idem_forget()');
	was := @extschema@.idem__lock_row(key, @extschema@.idem__deadline(NULL::interval), NULL::int8);
	IF was.state IS NULL THEN
		RETURN false;
	END IF;
	PERFORM @extschema@.idem__note_dropped(key);
	DELETE FROM @extschema@.idem_claims AS c
	WHERE @extschema@.idem__has_key(c.user_id, c.request_id, c.scope, key)
		AND (NOT only_ours OR @extschema@.idem__is_ours(c.xmin));
	IF was.token IS NOT NULL THEN
		PERFORM @extschema@.idem__commit_synchronously();
	END IF;
	RETURN true;
END
$$;

COMMENT ON FUNCTION @extschema@.idem_forget(text, text, text) IS
'operator: drops a request, so that it can be executed again: true, dropped; false, there was none';

-- True: the result and progress of a settled request are NULL now, or there was none.  False: the
-- request is in progress.
CREATE FUNCTION @extschema@.idem__erase(user_id text, request_id text, scope text)
RETURNS boolean
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE COST 10000
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
	key constant @extschema@.idem__key := @extschema@.idem__key_of(user_id, request_id, scope);
	only_ours constant boolean := @extschema@.idem__only_ours_counts(key);
BEGIN
	PERFORM @extschema@.idem__require_writable('idem_erase()');
	IF (@extschema@.idem__lock_row(key, @extschema@.idem__deadline(NULL::interval), NULL::int8)).state = 'in_progress' THEN
		RETURN false;
	END IF;
	UPDATE @extschema@.idem_claims AS c SET result = NULL, progress = NULL
	WHERE @extschema@.idem__has_key(c.user_id, c.request_id, c.scope, key)
		AND (NOT only_ours OR @extschema@.idem__is_ours(c.xmin))
		AND (c.result IS NOT NULL OR c.progress IS NOT NULL);
	RETURN true;
END
$$;

-- The keys are listed when the call begins.  A request that is claimed later is not among them.
CREATE PROCEDURE @extschema@.idem_erase(user_id pg_catalog.text, scope pg_catalog.text DEFAULT NULL)
LANGUAGE plpgsql
AS $procedure$
DECLARE
	found pg_catalog.record;
	is_erased pg_catalog.bool;
	erased pg_catalog.int8 := 0;
	in_progress pg_catalog.int8 := 0;
BEGIN
	-- raises ID400 for a user or a scope that no request can have
	PERFORM @extschema@.idem_status(user_id, 'any', COALESCE(scope, ''));
	FOR found IN
		SELECT c.request_id, c.scope FROM @extschema@.idem_claims AS c
		WHERE c.user_id OPERATOR(pg_catalog.=) idem_erase.user_id
			AND (idem_erase.scope IS NULL OR c.scope OPERATOR(pg_catalog.=) idem_erase.scope)
			AND (c.result IS NOT NULL OR c.progress IS NOT NULL)
	LOOP
		is_erased := @extschema@.idem__erase(user_id, found.request_id, found.scope);
		IF is_erased THEN
			erased := erased OPERATOR(pg_catalog.+) 1;
		ELSE
			in_progress := in_progress OPERATOR(pg_catalog.+) 1;
		END IF;
		IF erased OPERATOR(pg_catalog.%) 1000 OPERATOR(pg_catalog.=) 0 THEN
			COMMIT;
		END IF;
	END LOOP;
	COMMIT;
	RAISE NOTICE 'requests erased: %', erased;
	IF in_progress OPERATOR(pg_catalog.>) 0 THEN
		RAISE WARNING 'requests in progress, which keep their progress: %', in_progress
			USING HINT = 'Call idem_erase() again when they are settled. idem_unsettled lists them.';
	END IF;
END
$procedure$;

COMMENT ON PROCEDURE @extschema@.idem_erase(pg_catalog.text, pg_catalog.text) IS
'operator: results, errors and progress of a user''s settled requests become NULL, in a scope or in all; the requests stay guarded. Commits in between';

-- ----- leases -----

CREATE FUNCTION @extschema@.idem_extend(
	user_id text, request_id text, token int8,
	lease interval DEFAULT NULL, progress jsonb DEFAULT NULL, scope text DEFAULT '')
RETURNS timestamptz
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE COST 10000
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
	length constant interval := @extschema@.idem__check_lease(lease);
	key constant @extschema@.idem__key := @extschema@.idem__key_of(user_id, request_id, scope);
	only_ours constant boolean := @extschema@.idem__only_ours_counts(key);
	policy record;
	was @extschema@.idem__claim;
	until timestamptz;
BEGIN
	PERFORM @extschema@.idem__require_token(token), @extschema@.idem__require_writable('idem_extend()');
	SELECT p.* INTO policy FROM @extschema@.idem__policy(key.scope) AS p;
	PERFORM @extschema@.idem__check_lease_max(key, length, policy.lease_max);
	PERFORM @extschema@.idem__check_size(key, 'progress', progress, policy.result_max_bytes);
	was := @extschema@.idem__lock_lease(key, token);
	PERFORM @extschema@.idem__require_unsettled(key, was);
	until := CASE WHEN length IS NULL THEN greatest(was.lease_until, clock_timestamp() + policy.lease)
		ELSE clock_timestamp() + length END;
	UPDATE @extschema@.idem_claims AS c SET lease_until = until, expires_at = greatest(c.expires_at, @extschema@.idem__whole_second(until)),
		progress = coalesce(idem_extend.progress, c.progress)
	WHERE @extschema@.idem__has_key(c.user_id, c.request_id, c.scope, key)
		AND (NOT only_ours OR @extschema@.idem__is_ours(c.xmin));
	-- Progress records effects in other systems: a crash must not lose it.
	IF idem_extend.progress IS NOT NULL THEN
		PERFORM @extschema@.idem__commit_synchronously();
	END IF;
	RETURN until;
END
$$;

COMMENT ON FUNCTION @extschema@.idem_extend(text, text, int8, interval, jsonb, text) IS
'heartbeat: the lease ends that long from now (NULL: the scope''s lease, but no earlier than before), returns when; records progress';

-- Drops the progress too: the holder has undone what it stands for.
CREATE FUNCTION @extschema@.idem_release(user_id text, request_id text, token int8, scope text DEFAULT '')
RETURNS boolean
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE COST 10000
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
	key constant @extschema@.idem__key := @extschema@.idem__key_of(user_id, request_id, scope);
	only_ours constant boolean := @extschema@.idem__only_ours_counts(key);
BEGIN
	PERFORM @extschema@.idem__require_token(token), @extschema@.idem__require_writable('idem_release()');
	IF (@extschema@.idem__lock_row(key, @extschema@.idem__deadline(NULL::interval), token)).state IS NULL THEN
		RETURN false;		-- a repeated release ends here too
	END IF;
	PERFORM @extschema@.idem__require_unsettled(key, @extschema@.idem__lock_lease(key, token));
	PERFORM @extschema@.idem__note_dropped(key), @extschema@.idem__commit_synchronously();
	DELETE FROM @extschema@.idem_claims AS c
	WHERE @extschema@.idem__has_key(c.user_id, c.request_id, c.scope, key)
		AND (NOT only_ours OR @extschema@.idem__is_ours(c.xmin));
	RETURN true;
END
$$;

COMMENT ON FUNCTION @extschema@.idem_release(text, text, int8, text) IS
'gives a lease up, the next waiter claims: true, released; false, the request is not there';

-- True: the lock of the lease's row is the fence.  (Replaced by sql/idem-citus.sql.)
CREATE FUNCTION @extschema@.idem__keep_fence(key @extschema@.idem__key, token int8)
RETURNS boolean
LANGUAGE sql IMMUTABLE
AS $$ SELECT true $$;

-- The lock of the row is the fence: nobody can take the lease over until this transaction
-- ends.
CREATE FUNCTION @extschema@.idem_fence(user_id text, request_id text, token int8, scope text DEFAULT '')
RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE COST 10000
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
	key constant @extschema@.idem__key := @extschema@.idem__key_of(user_id, request_id, scope);
BEGIN
	PERFORM @extschema@.idem__require_token(token), @extschema@.idem__require_writable('idem_fence()');
	PERFORM @extschema@.idem__require_unsettled(key, @extschema@.idem__lock_lease(key, token)),
		@extschema@.idem__keep_fence(key, token);
END
$$;

COMMENT ON FUNCTION @extschema@.idem_fence(text, text, int8, text) IS
'keeps the lease from being taken over until this transaction ends, or raises ID410: begin each transaction of leased work with it';

-- ----- reading -----

-- The latest answer, or 55000 if there is none.  If it is "claimed", the row has to be there:
-- a caller can roll the claim back to a savepoint, and then put the note back.
CREATE FUNCTION @extschema@.idem__require_latest(command text)
RETURNS text
LANGUAGE plpgsql
AS $$
DECLARE
	latest text := @extschema@.idem__latest();
	key jsonb;
BEGIN
	IF latest LIKE 'claimed %' AND split_part(latest, E'\n', 3) <> 'dropped' THEN
		key := substr(split_part(latest, E'\n', 1), 9);
		IF NOT EXISTS (SELECT FROM @extschema@.idem_claims AS c
				WHERE c.user_id = key ->> 0 AND c.request_id = key ->> 1 AND c.scope = key ->> 2
					AND @extschema@.idem__is_ours(c.xmin)) THEN
			latest := NULL;
		END IF;
	END IF;
	IF latest IS NULL THEN
		PERFORM @extschema@.idem__raise('55000', command || ': no claim was made in this transaction',
			'Claim first, in the same transaction; or pass user_id and request_id to read what is stored.');
	END IF;
	RETURN latest;
END
$$;

CREATE FUNCTION @extschema@.idem_result()
RETURNS jsonb
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
	RETURN nullif(split_part(@extschema@.idem__require_latest('idem_result()'), E'\n', 2), '')::jsonb;
END
$$;

COMMENT ON FUNCTION @extschema@.idem_result() IS
'result of the request of the latest claim call of this transaction, as stored so far';

CREATE FUNCTION @extschema@.idem_status()
RETURNS @extschema@.idem_outcome
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
	RETURN split_part(@extschema@.idem__require_latest('idem_status()'), ' ', 1)::@extschema@.idem_outcome;
END
$$;

COMMENT ON FUNCTION @extschema@.idem_status() IS
'what the latest claim call of this transaction answered: claimed also after the request was completed';

-- The row of the key; if the snapshot sees two, ours, see idem__only_ours_counts().
-- (Replaced by sql/idem-citus.sql.)
CREATE FUNCTION @extschema@.idem__latest_row(key @extschema@.idem__key)
RETURNS SETOF @extschema@.idem__claim
LANGUAGE sql STABLE ROWS 1
AS $$
	SELECT c.expires_at, c.lease_until, c.token, c.state, c.request_id, c.user_id, c.scope, c.fingerprint, c.result, c.progress
	FROM @extschema@.idem_claims AS c
	WHERE @extschema@.idem__has_key(c.user_id, c.request_id, c.scope, key)
	ORDER BY @extschema@.idem__order_of(c.xmin) LIMIT 1
$$;

-- The row as a claim would see it: if expired = reclaim, an expired one is absent.
CREATE FUNCTION @extschema@.idem__as_claim_sees(key @extschema@.idem__key)
RETURNS TABLE (outcome text, result jsonb)
LANGUAGE sql STABLE ROWS 1
AS $$
	SELECT CASE WHEN c.state::text = 'in_progress' AND c.lease_until <= clock_timestamp() AND p.unknown
			THEN 'unknown' ELSE c.state::text END, c.result
	FROM @extschema@.idem__latest_row(key) AS c, @extschema@.idem__policy((key).scope) AS p
	WHERE NOT (p.reclaim AND c.expires_at <= clock_timestamp()
		AND NOT (c.state::text = 'in_progress' AND (p.unknown OR c.lease_until > clock_timestamp())))
$$;

CREATE FUNCTION @extschema@.idem_result(user_id text, request_id text, scope text DEFAULT '')
RETURNS jsonb
LANGUAGE plpgsql STABLE PARALLEL RESTRICTED
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
	key constant @extschema@.idem__key := @extschema@.idem__key_of(user_id, request_id, scope);
BEGIN
	RETURN (SELECT s.result FROM @extschema@.idem__as_claim_sees(key) AS s);
END
$$;

COMMENT ON FUNCTION @extschema@.idem_result(text, text, text) IS
'stored result of a request, or error of a failed one; NULL if there is none';

CREATE FUNCTION @extschema@.idem_status(user_id text, request_id text, scope text DEFAULT '')
RETURNS @extschema@.idem_outcome
LANGUAGE plpgsql STABLE PARALLEL RESTRICTED
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
	key constant @extschema@.idem__key := @extschema@.idem__key_of(user_id, request_id, scope);
BEGIN
	RETURN (SELECT s.outcome FROM @extschema@.idem__as_claim_sees(key) AS s);
END
$$;

COMMENT ON FUNCTION @extschema@.idem_status(text, text, text) IS
'what is stored of a request: completed, failed, in_progress or unknown; NULL if it is not remembered';

-- When the transaction that wrote the row has committed; NULL: the server does not know.  NULL
-- on a standby, which raises an error if its primary does not track commits; and on Citus,
-- where another server may have written the row.
CREATE FUNCTION @extschema@.idem__committed_at(key @extschema@.idem__key)
RETURNS timestamptz
LANGUAGE plpgsql STABLE
AS $$
BEGIN
	IF current_setting('track_commit_timestamp') <> 'on' OR pg_is_in_recovery()
		OR to_regclass('pg_catalog.pg_dist_partition') IS NOT NULL THEN
		RETURN NULL;
	END IF;
	RETURN (SELECT pg_xact_commit_timestamp(c.xmin) FROM @extschema@.idem_claims AS c
		WHERE @extschema@.idem__has_key(c.user_id, c.request_id, c.scope, key)
		ORDER BY @extschema@.idem__order_of(c.xmin) LIMIT 1);
END
$$;

CREATE FUNCTION @extschema@.idem_lookup(user_id text, request_id text, scope text DEFAULT '')
RETURNS TABLE (
	state @extschema@.idem_state, expires_at timestamptz, lease_until timestamptz,
	fingerprint bytea, result jsonb, progress jsonb, committed_at timestamptz)
LANGUAGE plpgsql STABLE PARALLEL RESTRICTED ROWS 1
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
	key constant @extschema@.idem__key := @extschema@.idem__key_of(user_id, request_id, scope);
BEGIN
	RETURN QUERY SELECT c.state, c.expires_at, c.lease_until, c.fingerprint, c.result, c.progress, @extschema@.idem__committed_at(key)
	FROM @extschema@.idem__latest_row(key) AS c;
END
$$;

COMMENT ON FUNCTION @extschema@.idem_lookup(text, text, text) IS
'all that is stored of a request but its token; no row if it is not remembered';

-- ----- work that was left behind -----

-- The rows with these settings are read by the index of unsettled claims, whatever the
-- statistics say, and each call is planned for its scope.  (The order of the columns follows
-- from the arguments: scope is both.)
CREATE FUNCTION @extschema@.idem_lapsed(
	INOUT scope text DEFAULT NULL, "limit" int4 DEFAULT 100,
	OUT user_id text, OUT request_id text, OUT status text, OUT lease_until timestamptz, OUT progress jsonb)
RETURNS SETOF record
LANGUAGE plpgsql STABLE PARALLEL RESTRICTED ROWS 100
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET plan_cache_mode = force_custom_plan
AS $$
BEGIN
	PERFORM @extschema@.idem__check_scope(coalesce(scope, ''));
	IF "limit" < 0 THEN
		PERFORM @extschema@.idem__raise('ID400', 'limit must not be negative',
			'Fix the client: pass how many rows to return at most, or NULL for all.');
	END IF;
	RETURN QUERY
	SELECT c.scope, c.user_id, c.request_id, CASE WHEN p.lapsed = 'unknown' THEN 'unknown' ELSE 'lapsed' END, c.lease_until, c.progress
	FROM @extschema@.idem_claims AS c LEFT JOIN @extschema@.idem_scopes AS p ON p.scope = c.scope
	WHERE c.state = 'in_progress'::@extschema@.idem_state
		AND (idem_lapsed.scope IS NULL OR c.scope = idem_lapsed.scope COLLATE "C")
		AND (c.lease_until <= clock_timestamp() OR c.lease_until IS NULL)
		AND (coalesce(p.expired, 'protect') = 'protect' OR coalesce(p.lapsed, 'reclaim') = 'unknown'
			OR c.expires_at > clock_timestamp())
	ORDER BY c.lease_until NULLS FIRST, c.request_id, c.user_id, c.scope
	LIMIT idem_lapsed."limit";
END
$$;

COMMENT ON FUNCTION @extschema@.idem_lapsed(text, int4) IS
'leases that lapsed and were not settled, longest lapsed first, of a scope or of all (NULL); status lapsed: idem_lease() takes it over, unknown: find out, then settle it with idem_heal()';

-- Roles that read a view have no right on the tables that it reads.  The index of unsettled
-- claims finds the rows.  security_barrier: otherwise the planner may call a function in the
-- reader's WHERE with rows that the view leaves out.
-- COLLATE: sql/idem-citus.sql gives the column another collation, which a view cannot follow.
CREATE VIEW @extschema@.idem_unsettled WITH (security_barrier) AS
	SELECT c.scope, c.user_id COLLATE "C" AS user_id, c.request_id,
		CASE WHEN c.lease_until > clock_timestamp() THEN 'live' WHEN p.lapsed = 'unknown' THEN 'unknown' ELSE 'lapsed' END AS status,
		c.lease_until, c.expires_at
	FROM @extschema@.idem_claims AS c LEFT JOIN @extschema@.idem_scopes AS p ON p.scope = c.scope
	WHERE c.state = 'in_progress'::@extschema@.idem_state
		AND (coalesce(p.expired, 'protect') = 'protect' OR coalesce(p.lapsed, 'reclaim') = 'unknown'
			OR c.lease_until > clock_timestamp() OR c.expires_at > clock_timestamp())
	ORDER BY c.lease_until NULLS FIRST;

COMMENT ON VIEW @extschema@.idem_unsettled IS
'requests in progress under a lease, and those whose lease lapsed; the oldest lease first';
COMMENT ON COLUMN @extschema@.idem_unsettled.status IS 'live: a holder is at work; lapsed: the next idem_lease() takes it over; unknown: somebody has to find out';

-- SQL does not see which request a session waits for, nor sessions that sleep until a lease
-- ends.  It sees which transactions are waited for by sessions that use idem_claims.  A
-- prepared transaction has no process.
--
-- It reads the server's functions, not its views of them, as idem_stat_table does: Citus makes
-- all views that a view reads again on the other nodes, and plans them with the rights of the
-- reader, who may not read pg_authid.
CREATE VIEW @extschema@.idem_holders WITH (security_barrier) AS
	SELECT u.scope, u.user_id, u.request_id, NULL::int4 AS pid, NULL::text AS gid, NULL::timestamptz AS since,
		u.lease_until, NULL::int8 AS waiters
	FROM @extschema@.idem_unsettled AS u
	WHERE u.status = 'live'
	UNION ALL
	SELECT NULL, NULL, NULL, h.pid, p.gid, coalesce(p.prepared, a.xact_start), NULL, count(DISTINCT w.pid)
	FROM pg_lock_status() AS w
		JOIN pg_lock_status() AS h ON h.locktype = 'transactionid' AND h.transactionid = w.transactionid AND h.granted AND h.mode = 'ExclusiveLock'
		LEFT JOIN pg_stat_get_activity(NULL::int4) AS a ON a.pid = h.pid
		LEFT JOIN pg_prepared_xact() AS p ON h.pid IS NULL AND p.transaction = h.transactionid
	WHERE w.locktype = 'transactionid' AND NOT w.granted
		AND EXISTS (SELECT FROM pg_lock_status() AS t WHERE t.pid = w.pid AND t.granted AND t.locktype = 'relation'
			AND t.database = (SELECT d.oid FROM pg_database AS d WHERE d.datname = current_database())
			AND t.relation = '@extschema@.idem_claims'::regclass AND t.mode <> 'AccessShareLock')
	GROUP BY h.pid, p.gid, p.prepared, a.xact_start
	ORDER BY since, lease_until;

COMMENT ON VIEW @extschema@.idem_holders IS
'live leases, and the transactions that claims wait for';
COMMENT ON COLUMN @extschema@.idem_holders.request_id IS 'NULL, as user_id and scope are: a transaction that is waited for; SQL does not see for which request';
COMMENT ON COLUMN @extschema@.idem_holders.pid IS 'process whose transaction is waited for';
COMMENT ON COLUMN @extschema@.idem_holders.gid IS 'prepared transaction that is waited for';
COMMENT ON COLUMN @extschema@.idem_holders.since IS 'when that transaction began, or was prepared; NULL: the reader may not see it';
COMMENT ON COLUMN @extschema@.idem_holders.lease_until IS 'end of the lease that holds it';
COMMENT ON COLUMN @extschema@.idem_holders.waiters IS 'how many sessions wait for the transaction; NULL for a lease: SQL does not see them';

-- ----- calling -----

-- The end of idem_call(), which cannot do this with its caller's rights: settles the key,
-- unless the function that ran has done so; makes idem_status() and idem_result() speak of
-- this call again; and returns what is stored.  It does so only for a request that this
-- transaction has claimed.
CREATE FUNCTION @extschema@.idem__call_settle(user_id text, request_id text, result jsonb, scope text)
RETURNS jsonb
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE COST 10000
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
	key constant @extschema@.idem__key := @extschema@.idem__key_of(user_id, request_id, scope);
	stored record;
BEGIN
	-- An error if the function has reset the settings: then nobody knows what it has settled.
	PERFORM @extschema@.idem__require_latest('idem_call()');
	IF @extschema@.idem__is_open(@extschema@.idem__held_text(key)) THEN
		PERFORM @extschema@.idem__settle('idem_call()', key, NULL::int8, 'completed', result);
	END IF;
	SELECT c.state::text AS state, c.result INTO stored FROM @extschema@.idem_claims AS c
	WHERE @extschema@.idem__has_key(c.user_id, c.request_id, c.scope, key)
		AND @extschema@.idem__is_ours(c.xmin);
	IF NOT FOUND THEN
		PERFORM @extschema@.idem__raise_of_key('ID410', 'request is not held by this transaction',
			'Settle a request in the transaction that claimed it, between BEGIN and COMMIT, or pass the token of its lease. Or the scope or an id in DETAIL is wrong.', key);
	END IF;
	PERFORM @extschema@.idem__note_answer(@extschema@.idem__held_text(key),
		CASE stored.state WHEN 'failed' THEN 'failed' ELSE 'claimed' END, stored.result);
	RETURN stored.result;
END
$$;

COMMENT ON FUNCTION @extschema@.idem__call_settle(text, text, jsonb, text) IS
'for idem_call(): settles the request after the run, and returns what is stored';

-- It runs with the caller's rights and search_path, as the function that it calls must.  So
-- every function, operator and type in its body is qualified, and it calls public functions
-- only.
--
-- The call passes the arguments that are passed in, in exactly the declared types, and by
-- their names (of a VARIADIC function: in their order).  SQL fills in the defaults, with the
-- operators that they were created with.  To parse the text of a default here would be
-- unsafe: NULLIF, IS DISTINCT FROM and CASE x WHEN are printed without the schema of their
-- operator, so a stranger's operator in the search_path would run as the caller.  The call
-- never runs another function than the one that was named: if another one fits as well, as
-- f(a int) beside f(a int, b text DEFAULT 'x'), SQL raises "not unique".
CREATE FUNCTION @extschema@.idem_call(
	user_id text, request_id text, function text,
	arguments jsonb DEFAULT '{}', scope text DEFAULT '', wait interval DEFAULT NULL)
RETURNS jsonb
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE COST 10000
AS $$
DECLARE
	-- looked up by the caller's search_path, at each execution
	routine constant pg_catalog.regprocedure := function::pg_catalog.regprocedure;
	target pg_catalog.record;
	kind pg_catalog.text;
	argument pg_catalog.record;
	names pg_catalog.text[] := '{}';
	missing pg_catalog.text;
	wrong pg_catalog.text;
	columns pg_catalog.text[] := '{}';	-- of the row that the JSON is converted to
	passed pg_catalog.text[] := '{}';	-- the arguments of the call
	notation pg_catalog.text;
	last_place pg_catalog.int8 := '0';
	identity pg_catalog.jsonb;
	fingerprint pg_catalog.bytea;
	run pg_catalog.text;
	source pg_catalog.text;
	result pg_catalog.jsonb;
BEGIN
	IF function IS NULL THEN
		RAISE EXCEPTION USING ERRCODE = 'ID400', MESSAGE = 'function must not be null',
			HINT = 'Fix the client: pass its name and argument types, ''pay(int, numeric)''.';
	ELSIF arguments IS NULL OR pg_catalog.jsonb_typeof(arguments) OPERATOR(pg_catalog.<>) 'object' THEN
		RAISE EXCEPTION USING ERRCODE = 'ID400',
			MESSAGE = CASE WHEN arguments IS NULL THEN 'arguments must not be null' ELSE 'arguments must be a JSON object' END,
			HINT = 'Fix the client: pass the arguments of the function by their names, {"amount": 30}; {} for none.';
	END IF;

	-- Which functions it can run
	SELECT p.*, n.nspname, r.typtype INTO target
	FROM pg_catalog.pg_proc AS p
		JOIN pg_catalog.pg_namespace AS n ON n.oid OPERATOR(pg_catalog.=) p.pronamespace
		JOIN pg_catalog.pg_type AS r ON r.oid OPERATOR(pg_catalog.=) p.prorettype
	WHERE p.oid OPERATOR(pg_catalog.=) routine::pg_catalog.oid;
	IF NOT FOUND THEN
		RAISE EXCEPTION USING ERRCODE = 'undefined_function',
			MESSAGE = pg_catalog.format('function with OID %s does not exist', routine::pg_catalog.oid),
			HINT = 'It was dropped, or never existed: pass the function by its name and argument types.';
	END IF;
	kind := CASE
		WHEN target.prokind OPERATOR(pg_catalog.=) 'p'::pg_catalog."char" THEN 'it is a procedure'
		WHEN target.prokind OPERATOR(pg_catalog.=) 'a'::pg_catalog."char" THEN 'it is an aggregate function'
		WHEN target.prokind OPERATOR(pg_catalog.=) 'w'::pg_catalog."char" THEN 'it is a window function'
		WHEN target.proretset THEN 'it returns a set'
		WHEN target.prorettype OPERATOR(pg_catalog.=) 'pg_catalog.trigger'::pg_catalog.regtype::pg_catalog.oid
			OR target.prorettype OPERATOR(pg_catalog.=) 'pg_catalog.event_trigger'::pg_catalog.regtype::pg_catalog.oid THEN 'it is a trigger function'
		WHEN target.typtype OPERATOR(pg_catalog.=) 'p'::pg_catalog."char"
			AND target.prorettype OPERATOR(pg_catalog.<>) 'pg_catalog.void'::pg_catalog.regtype::pg_catalog.oid
			AND target.prorettype OPERATOR(pg_catalog.<>) 'pg_catalog.record'::pg_catalog.regtype::pg_catalog.oid
			THEN pg_catalog.format('it returns the pseudo-type %s', target.prorettype::pg_catalog.regtype) END;
	IF kind IS NOT NULL THEN
		RAISE EXCEPTION USING ERRCODE = 'wrong_object_type', MESSAGE = pg_catalog.format('idem_call() cannot run %s: %s', routine, kind),
			HINT = 'It runs functions that return one value, a row or void: call this one from such a function, and run that one.';
	ELSIF NOT pg_catalog.has_schema_privilege(target.pronamespace, 'USAGE'::pg_catalog.text) THEN
		RAISE EXCEPTION USING ERRCODE = 'insufficient_privilege',
			MESSAGE = pg_catalog.format('permission denied for schema %s', target.nspname);
	ELSIF NOT pg_catalog.has_function_privilege(routine::pg_catalog.oid, 'EXECUTE'::pg_catalog.text) THEN
		RAISE EXCEPTION USING ERRCODE = 'insufficient_privilege',
			MESSAGE = pg_catalog.format('permission denied for function %s', target.proname);
	END IF;

	-- The arguments that are passed in.  An array is named after the type of its elements: the
	-- name of the array type itself can change when a dump is restored.
	identity := pg_catalog.jsonb_build_array(target.nspname, target.proname);
	-- By names SQL finds a VARIADIC function only if no argument is left out.
	notation := CASE WHEN target.provariadic OPERATOR(pg_catalog.=) '0'::pg_catalog.oid THEN '%2$I => passed.%2$I' ELSE '%1$spassed.%2$I' END;
	FOR argument IN
		SELECT a.place, pg_catalog.row_number() OVER (ORDER BY a.place) AS n, a.name, t.oid::pg_catalog.regtype AS type, t.typtype,
			CASE WHEN a.mode OPERATOR(pg_catalog.=) 'v'::pg_catalog."char" THEN 'VARIADIC ' ELSE '' END AS variadic,
			tn.nspname AS type_schema, t.typname AS type_name, dn.nspname AS named_schema,
			d.typname::pg_catalog.text OPERATOR(pg_catalog.||) CASE WHEN d.oid OPERATOR(pg_catalog.=) t.oid THEN '' ELSE '[]' END AS named_type
		FROM ROWS FROM (pg_catalog.unnest(COALESCE(target.proallargtypes, target.proargtypes::pg_catalog.oid[])),
				pg_catalog.unnest(target.proargnames), pg_catalog.unnest(target.proargmodes)) WITH ORDINALITY AS a (type, name, mode, place)
			JOIN pg_catalog.pg_type AS t ON t.oid OPERATOR(pg_catalog.=) a.type
			JOIN pg_catalog.pg_type AS d ON d.oid OPERATOR(pg_catalog.=) CASE WHEN t.typelem OPERATOR(pg_catalog.<>) '0'::pg_catalog.oid
				AND t.typsubscript::pg_catalog.oid OPERATOR(pg_catalog.=) 'pg_catalog.array_subscript_handler'::pg_catalog.regproc::pg_catalog.oid
				THEN t.typelem ELSE t.oid END
			JOIN pg_catalog.pg_namespace AS tn ON tn.oid OPERATOR(pg_catalog.=) t.typnamespace
			JOIN pg_catalog.pg_namespace AS dn ON dn.oid OPERATOR(pg_catalog.=) d.typnamespace
		WHERE a.mode IS NULL OR a.mode OPERATOR(pg_catalog.=) ANY ('{i,b,v}'::pg_catalog."char"[])
		ORDER BY a.place
	LOOP
		IF argument.name IS NULL OR argument.name OPERATOR(pg_catalog.=) '' THEN
			RAISE EXCEPTION USING ERRCODE = 'ID400', MESSAGE = pg_catalog.format('argument %s of function %s has no name', argument.n, routine),
				HINT = 'idem_call() passes arguments by name: name them in CREATE FUNCTION.';
		ELSIF argument.typtype OPERATOR(pg_catalog.=) 'p'::pg_catalog."char" THEN
			RAISE EXCEPTION USING ERRCODE = 'wrong_object_type',
				MESSAGE = pg_catalog.format('idem_call() cannot run %s: its argument "%s" has the pseudo-type %s', routine, argument.name, argument.type),
				HINT = 'JSON does not say which type is meant: call it from a function that does, and run that one.';
		END IF;
		names := names OPERATOR(pg_catalog.||) argument.name;
		identity := identity OPERATOR(pg_catalog.||) pg_catalog.jsonb_build_array(argument.named_schema, argument.named_type);
		IF pg_catalog.jsonb_exists(arguments, argument.name) THEN
			columns := columns OPERATOR(pg_catalog.||) pg_catalog.format('%I %I.%I', argument.name, argument.type_schema, argument.type_name);
			passed := passed OPERATOR(pg_catalog.||) pg_catalog.format(notation, argument.variadic, argument.name);
			last_place := argument.n;
		ELSIF argument.n OPERATOR(pg_catalog.<=) (target.pronargs OPERATOR(pg_catalog.-) target.pronargdefaults) THEN
			missing := COALESCE(missing, argument.name);
		END IF;
	END LOOP;
	SELECT k.name INTO wrong
	FROM pg_catalog.jsonb_object_keys(arguments) WITH ORDINALITY AS k (name, n)
	WHERE k.name COLLATE pg_catalog."C" OPERATOR(pg_catalog.<>) ALL (names)
	ORDER BY k.n LIMIT 1;
	IF wrong IS NOT NULL OR missing IS NOT NULL THEN
		RAISE EXCEPTION USING ERRCODE = 'ID400',
			MESSAGE = CASE WHEN wrong IS NULL THEN pg_catalog.format('argument "%s" of function %s is missing', missing, routine)
				ELSE pg_catalog.format('function %s has no argument "%s"', routine, wrong) END,
			DETAIL = CASE WHEN pg_catalog.cardinality(names) OPERATOR(pg_catalog.=) 0 THEN 'It has no arguments.'
				ELSE pg_catalog.format('Its arguments are: %s.', pg_catalog.array_to_string(names, ', ')) END,
			HINT = CASE WHEN wrong IS NULL THEN 'Fix the client: pass it in arguments, it has no default.'
				ELSE 'Fix the client: each key of arguments is the name of an argument.' END;
	ELSIF target.provariadic OPERATOR(pg_catalog.<>) '0'::pg_catalog.oid AND pg_catalog.cardinality(passed) OPERATOR(pg_catalog.<) last_place THEN
		RAISE EXCEPTION USING ERRCODE = 'feature_not_supported',
			MESSAGE = pg_catalog.format('idem_call() cannot leave out an argument of function %s before one that it passes', routine),
			HINT = 'SQL has no such call of a VARIADIC function: pass the arguments before it too.';
	END IF;

	IF pg_catalog.current_setting('transaction_read_only') OPERATOR(pg_catalog.=) 'on' THEN
		RAISE EXCEPTION USING ERRCODE = '25006', MESSAGE = 'cannot execute idem_call() in a read-only transaction',
			HINT = CASE WHEN pg_catalog.pg_is_in_recovery() THEN 'This server is a standby: send the request to the primary.'
				ELSE 'Use a read-write transaction, the one that does the work.' END;
	END IF;
	fingerprint := @extschema@.idem_fingerprint(identity OPERATOR(pg_catalog.||) pg_catalog.jsonb_build_array(arguments));
	-- idem_claim() knows this call by its fingerprint, for its own errors.
	PERFORM pg_catalog.set_config('idem_call.fingerprint', fingerprint::pg_catalog.text, true);
	IF NOT @extschema@.idem_claim(user_id, request_id, scope, fingerprint, wait) THEN
		RETURN @extschema@.idem_result();
	END IF;

	-- The claim may have waited.
	SELECT p.*, n.nspname, target.proname AS old_name INTO target
	FROM (SELECT) AS always LEFT JOIN pg_catalog.pg_proc AS p ON p.oid OPERATOR(pg_catalog.=) routine::pg_catalog.oid
		LEFT JOIN pg_catalog.pg_namespace AS n ON n.oid OPERATOR(pg_catalog.=) p.pronamespace;
	IF target.oid IS NULL THEN
		RAISE EXCEPTION USING ERRCODE = 'undefined_function',
			MESSAGE = pg_catalog.format('function %s was dropped while the request waited', target.old_name),
			HINT = 'Nothing was executed.';
	END IF;
	run := pg_catalog.format('%I.%I(%s)', target.nspname, target.proname, pg_catalog.array_to_string(passed, ', '));
	IF pg_catalog.cardinality(columns) OPERATOR(pg_catalog.>) 0 THEN
		source := pg_catalog.format(' FROM pg_catalog.jsonb_to_record($1) AS passed (%s)', pg_catalog.array_to_string(columns, ', '));
	END IF;
	IF target.prorettype OPERATOR(pg_catalog.=) 'pg_catalog.void'::pg_catalog.regtype::pg_catalog.oid THEN
		EXECUTE pg_catalog.concat('SELECT ', run, source) USING arguments;
	ELSE
		EXECUTE pg_catalog.concat('SELECT pg_catalog.to_jsonb(', run, ')', source) INTO result USING arguments;
	END IF;
	RETURN @extschema@.idem__call_settle(user_id, request_id, result, scope);
END
$$;

COMMENT ON FUNCTION @extschema@.idem_call(text, text, text, jsonb, text, interval) IS
'claims a request for this transaction, runs a function with the caller''s rights, and stores its result; a replay returns what is stored';

-- ----- cleaning -----

-- A row for each batch; batches of more than a week ago are merged into one row.  (Not one
-- row of counters: it would bloat, and cleaners would wait for each other.)
CREATE TABLE @extschema@.idem_cleanup_batches (
	finished_at timestamptz NOT NULL,
	batches int8 NOT NULL,
	rows_deleted int8 NOT NULL,
	seconds float8 NOT NULL,
	max_seconds float8 NOT NULL,
	more boolean NOT NULL
) USING heap;

CREATE INDEX idem_cleanup_batches_finished_at_idx ON @extschema@.idem_cleanup_batches (finished_at);

COMMENT ON TABLE @extschema@.idem_cleanup_batches IS 'ledger of the batches that removed expired claims, for idem_stat_cleanup';
COMMENT ON COLUMN @extschema@.idem_cleanup_batches.more IS 'it left expired claims behind';

CREATE FUNCTION @extschema@.idem__note_batch(begun timestamptz, rows_deleted int8, more boolean)
RETURNS void
LANGUAGE plpgsql
AS $$
DECLARE
	seconds constant float8 := date_part('epoch', clock_timestamp() - begun);
BEGIN
	INSERT INTO @extschema@.idem_cleanup_batches VALUES (clock_timestamp(), 1, rows_deleted, seconds, seconds, more);
	-- Once 1000 rows are old, merge them.
	IF (SELECT count(*) >= 1000 FROM (SELECT FROM @extschema@.idem_cleanup_batches AS b
			WHERE b.finished_at < clock_timestamp() - interval '7 days' LIMIT 1000) AS old) THEN
		WITH old AS (
			DELETE FROM @extschema@.idem_cleanup_batches AS b WHERE b.ctid = ANY (ARRAY(
				SELECT b2.ctid FROM @extschema@.idem_cleanup_batches AS b2
				WHERE b2.finished_at < clock_timestamp() - interval '7 days' FOR UPDATE SKIP LOCKED))
			RETURNING b.*)
		INSERT INTO @extschema@.idem_cleanup_batches
			SELECT max(o.finished_at), sum(o.batches)::int8, sum(o.rows_deleted)::int8, sum(o.seconds), max(o.max_seconds), false
			FROM old AS o HAVING count(*) > 0;
	END IF;
EXCEPTION WHEN disk_full THEN
	-- Removing claims needs no space, and makes some.
	RAISE WARNING 'the disk is full: idem_stat_cleanup does not count a batch that removed % expired claims', rows_deleted
		USING ERRCODE = 'disk_full';
END
$$;

-- Deletes one batch: the oldest claims first, from the low-water mark start, for about a
-- second.  It skips rows that others have locked, and keeps a claim under a live lease or
-- one that lapsed = unknown keeps.  (Replaced by sql/idem-citus.sql.)
CREATE FUNCTION @extschema@.idem__clean(rows_max int8, start timestamptz, cutoff timestamptz,
	OUT rows_deleted int8, OUT more boolean, OUT next_start timestamptz)
LANGUAGE plpgsql
AS $$
DECLARE
	begun constant timestamptz := clock_timestamp();
	chunk_max int8;
	chunk int8;
BEGIN
	next_start := start;
	rows_deleted := 0;
	-- In chunks, so that it can look at the clock in between
	LOOP
		chunk_max := least(rows_max - rows_deleted, 5000);
		WITH gone AS (
			DELETE FROM @extschema@.idem_claims AS c WHERE c.ctid = ANY (ARRAY(
				SELECT e.ctid FROM @extschema@.idem_claims AS e
				WHERE e.expires_at >= next_start AND e.expires_at <= cutoff
					AND NOT (e.state::text = 'in_progress' AND (e.lease_until > clock_timestamp()
						OR EXISTS (SELECT FROM @extschema@.idem_scopes AS p WHERE p.scope = e.scope AND p.lapsed = 'unknown')))
				ORDER BY e.expires_at LIMIT chunk_max
				FOR UPDATE OF e SKIP LOCKED))
			RETURNING c.expires_at)
		SELECT count(*), coalesce(max(g.expires_at), next_start) INTO chunk, next_start FROM gone AS g;
		rows_deleted := rows_deleted + chunk;
		more := chunk = chunk_max;
		EXIT WHEN NOT more OR rows_deleted = rows_max OR clock_timestamp() > begun + interval '1 second';
	END LOOP;
	more := more AND EXISTS (SELECT FROM @extschema@.idem_claims AS e WHERE e.expires_at >= next_start AND e.expires_at <= cutoff);
	IF NOT more THEN
		next_start := greatest(start, cutoff);
	END IF;
END
$$;

-- One batch of idem_cleanup_all().  A caller can pass any cutoff.  One in the future would
-- remove claims before they expire, so it counts as now.
CREATE FUNCTION @extschema@.idem__cleanup_step(
	batch_size int4, start timestamptz, expired_before timestamptz,
	OUT rows_deleted int8, OUT more boolean, OUT next_start timestamptz)
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE COST 10000
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
	begun constant timestamptz := clock_timestamp();
	rows_max constant int8 := coalesce(batch_size, (SELECT d.cleanup_batch_size FROM @extschema@.idem_settings AS d), 50000);
	cutoff constant timestamptz := least(clock_timestamp(), expired_before);
BEGIN
	IF rows_max NOT BETWEEN 1 AND 1000000 THEN
		PERFORM @extschema@.idem__raise('ID400', 'batch_size must be between 1 and 1000000',
			'Leave it out to use idem.cleanup_batch_size.', pg_catalog.format('It is %s.', rows_max));
	END IF;
	PERFORM @extschema@.idem__require_writable('idem_cleanup()');
	SELECT b.* INTO rows_deleted, more, next_start
	FROM @extschema@.idem__clean(rows_max, coalesce(start, '-infinity'::timestamptz), cutoff) AS b;
	PERFORM @extschema@.idem__note_batch(begun, rows_deleted, more);
END
$$;

COMMENT ON FUNCTION @extschema@.idem__cleanup_step(int4, timestamptz, timestamptz) IS
'for idem_cleanup_all(): one batch, from one low-water mark to the next';

CREATE FUNCTION @extschema@.idem_cleanup(batch_size int4 DEFAULT NULL)
RETURNS int8
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE COST 10000
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
	RETURN (@extschema@.idem__cleanup_step(batch_size, NULL::timestamptz, NULL::timestamptz)).rows_deleted;
END
$$;

COMMENT ON FUNCTION @extschema@.idem_cleanup(int4) IS
'operator: removes expired claims in this transaction, at most batch_size (NULL: that of idem_settings) and for about a second; returns how many';

-- A procedure that commits can have no search_path of its own, so it qualifies every name.
-- The cutoff is the time of the call: otherwise it would never end while claims expire.
CREATE PROCEDURE @extschema@.idem_cleanup_all(batch_size pg_catalog.int4 DEFAULT NULL)
LANGUAGE plpgsql
AS $$
DECLARE
	expired_before pg_catalog.timestamptz := pg_catalog.clock_timestamp();
	start pg_catalog.timestamptz := '-infinity';
	more pg_catalog.bool := true;
	refused pg_catalog.text;
BEGIN
	-- Only the message of a failed COMMIT shows whether this procedure may commit, and it is in the
	-- session's language.  The first COMMIT fails in any case, since it is in a block with EXCEPTION.
	-- The second one is where none may ever commit.
	BEGIN
		COMMIT;
	EXCEPTION WHEN invalid_transaction_termination THEN
		refused := SQLERRM;
	END;
	BEGIN
		EXECUTE 'DO ''BEGIN COMMIT; END''';
	EXCEPTION WHEN invalid_transaction_termination OR insufficient_privilege THEN
		IF refused OPERATOR(pg_catalog.=) SQLERRM THEN
			RAISE EXCEPTION 'idem_cleanup_all() cannot run inside a transaction block' USING ERRCODE = 'active_sql_transaction',
				HINT = 'Call it without BEGIN, and not from a function or a block with EXCEPTION; or use idem_cleanup().';
		END IF;
	END;
	WHILE more LOOP
		SELECT step.more, step.next_start INTO more, start
		FROM @extschema@.idem__cleanup_step(batch_size, start, expired_before) AS step;
		COMMIT;
	END LOOP;
END
$$;

COMMENT ON PROCEDURE @extschema@.idem_cleanup_all(int4) IS
'operator: removes all claims that have expired by now, but those that others have locked, in batches that are committed one by one';

-- Without security_barrier: it shows sums and ages, no row of a claim; and a barrier would have
-- idem_metrics count rows_unknown, too.
CREATE VIEW @extschema@.idem_stat_cleanup AS
	SELECT b.rows_deleted, b.batches, l.seconds AS last_batch_seconds, b.seconds AS total_batch_seconds,
		b.max_seconds AS max_batch_seconds,
		-- A claim that was inserted by hand can expire at -infinity, or never.
		(SELECT CASE WHEN e.expires_at = '-infinity' THEN interval '106751991 days'
				WHEN e.expires_at < clock_timestamp() THEN clock_timestamp() - e.expires_at ELSE '0' END
			FROM @extschema@.idem_claims AS e
			WHERE NOT (e.state::text = 'in_progress'
				AND EXISTS (SELECT FROM @extschema@.idem_scopes AS p WHERE p.scope = e.scope AND p.lapsed = 'unknown'))
			ORDER BY e.expires_at LIMIT 1) AS oldest_expired_age,
		coalesce(l.more, false) AS backlog,
		(SELECT count(*) FROM @extschema@.idem_claims AS e JOIN @extschema@.idem_scopes AS p USING (scope)
			WHERE e.expires_at <= clock_timestamp() AND e.state::text = 'in_progress' AND p.lapsed = 'unknown') AS rows_unknown,
		l.finished_at AS last_run,
		CASE WHEN l.finished_at > clock_timestamp() - interval '1 hour' THEN 'sessions: this edition has no worker'
			ELSE 'nobody: no session has called idem_cleanup_all() ' || CASE WHEN l.finished_at IS NULL THEN 'yet'
				ELSE 'for ' || date_trunc('minute', clock_timestamp() - l.finished_at)::text END END AS cleaning,
		g.since AS backlog_since, g.rows_deleted AS backlog_rows_deleted
	FROM (SELECT coalesce(sum(t.rows_deleted), 0)::int8 AS rows_deleted, coalesce(sum(t.batches), 0)::int8 AS batches,
				coalesce(sum(t.seconds), 0) AS seconds, coalesce(max(t.max_seconds), 0) AS max_seconds
			FROM @extschema@.idem_cleanup_batches AS t) AS b
		LEFT JOIN LATERAL (SELECT t.* FROM @extschema@.idem_cleanup_batches AS t ORDER BY t.finished_at DESC LIMIT 1) AS l ON true
		LEFT JOIN LATERAL (
			SELECT min(t.finished_at) AS since, sum(t.rows_deleted)::int8 AS rows_deleted FROM @extschema@.idem_cleanup_batches AS t
			WHERE t.finished_at > coalesce((SELECT t2.finished_at FROM @extschema@.idem_cleanup_batches AS t2 WHERE NOT t2.more
				ORDER BY t2.finished_at DESC LIMIT 1), '-infinity')) AS g ON l.more;

COMMENT ON VIEW @extschema@.idem_stat_cleanup IS
'statistics of removing expired claims in this database';
COMMENT ON COLUMN @extschema@.idem_stat_cleanup.rows_deleted IS 'expired claims removed';
COMMENT ON COLUMN @extschema@.idem_stat_cleanup.batches IS 'batches committed';
COMMENT ON COLUMN @extschema@.idem_stat_cleanup.last_batch_seconds IS 'duration of the latest batch';
COMMENT ON COLUMN @extschema@.idem_stat_cleanup.total_batch_seconds IS 'duration of all batches';
COMMENT ON COLUMN @extschema@.idem_stat_cleanup.max_batch_seconds IS 'duration of the longest batch';
COMMENT ON COLUMN @extschema@.idem_stat_cleanup.oldest_expired_age IS 'how long the oldest claim that is still there has been expired; 0: none has expired; NULL: there is none';
COMMENT ON COLUMN @extschema@.idem_stat_cleanup.backlog IS 'the latest batch left expired claims behind';
COMMENT ON COLUMN @extschema@.idem_stat_cleanup.rows_unknown IS 'expired claims that nobody settled, kept by lapsed = unknown; reads all expired claims';
COMMENT ON COLUMN @extschema@.idem_stat_cleanup.last_run IS 'end of the latest batch';
COMMENT ON COLUMN @extschema@.idem_stat_cleanup.cleaning IS 'who cleans: sessions; or nobody, in the last hour';
COMMENT ON COLUMN @extschema@.idem_stat_cleanup.backlog_since IS 'end of the first batch that left the backlog behind; NULL: there is none';
COMMENT ON COLUMN @extschema@.idem_stat_cleanup.backlog_rows_deleted IS 'claims removed since, by that batch and those after it';

-- As the server's own statistics estimate it; nothing here reads the table.  VACUUM removes a
-- dead row once no transaction can see it any more, so the oldest one holds all dead rows back
-- that were alive when it began.
CREATE VIEW @extschema@.idem_stat_table AS
	SELECT coalesce(nullif(pg_stat_get_live_tuples(t.oid), 0)::float8, greatest(t.reltuples, 0))::int8 AS claims,
		pg_stat_get_dead_tuples(t.oid) AS dead_rows,
		pg_total_relation_size(t.oid) AS bytes,
		pg_indexes_size(t.oid) AS index_bytes,
		greatest(pg_stat_get_last_vacuum_time(t.oid), pg_stat_get_last_autovacuum_time(t.oid)) AS last_vacuum,
		o.holder AS held_back_by, o.pid AS held_back_by_pid, o.since AS held_back_since,
		o.transactions AS held_back_transactions
	FROM pg_class AS t
		LEFT JOIN LATERAL (
			SELECT h.holder, h.pid, h.since, h.transactions
			FROM (
				SELECT format(CASE WHEN a.datid IS NULL THEN 'standby of process %s' ELSE 'transaction of process %s' END, a.pid),
					a.pid, a.xact_start,
					greatest(age(a.backend_xmin), age(a.backend_xid))
				FROM pg_stat_get_activity(NULL::int4) AS a
				WHERE (a.datid IS NULL OR a.datid = (SELECT d.oid FROM pg_database AS d WHERE d.datname = current_database()))
					AND a.pid <> pg_backend_pid()
					AND (a.backend_xmin IS NOT NULL OR a.backend_xid IS NOT NULL)
					AND NOT EXISTS (SELECT FROM pg_stat_get_progress_info('VACUUM') AS v WHERE v.pid = a.pid)
				UNION ALL
				SELECT format('prepared transaction "%s"', p.gid), NULL, p.prepared, age(p.transaction)
				FROM pg_prepared_xact() AS p
				WHERE p.dbid = (SELECT d.oid FROM pg_database AS d WHERE d.datname = current_database())
				UNION ALL
				SELECT format('replication slot "%s"', s.slot_name), s.active_pid, NULL, age(s.xmin)
				FROM pg_get_replication_slots() AS s
				WHERE s.xmin IS NOT NULL
			) AS h (holder, pid, since, transactions)
			ORDER BY h.transactions DESC, h.since NULLS FIRST
			LIMIT 1
		) AS o ON true
	WHERE t.oid = '@extschema@.idem_claims'::regclass;

COMMENT ON VIEW @extschema@.idem_stat_table IS
'size of idem_claims, as the server estimates it, and what keeps VACUUM from removing its dead rows';
COMMENT ON COLUMN @extschema@.idem_stat_table.claims IS 'claims in the table, an estimate';
COMMENT ON COLUMN @extschema@.idem_stat_table.dead_rows IS 'dead rows of the table, an estimate';
COMMENT ON COLUMN @extschema@.idem_stat_table.bytes IS 'size of the table with its indexes';
COMMENT ON COLUMN @extschema@.idem_stat_table.index_bytes IS 'size of its indexes';
COMMENT ON COLUMN @extschema@.idem_stat_table.last_vacuum IS 'end of the latest VACUUM, by autovacuum or by hand';
COMMENT ON COLUMN @extschema@.idem_stat_table.held_back_by IS 'oldest transaction, prepared transaction, replication slot or standby that may still need dead rows; NULL: none';
COMMENT ON COLUMN @extschema@.idem_stat_table.held_back_by_pid IS 'its process; NULL: it has none';
COMMENT ON COLUMN @extschema@.idem_stat_table.held_back_since IS 'when it began, or was prepared; NULL: not known';
COMMENT ON COLUMN @extschema@.idem_stat_table.held_back_transactions IS 'transactions of the server since then';

-- The shares of the most common scopes, from the sample that ANALYZE takes.  It runs as idem's
-- owner, because pg_stats shows a column only to roles that may read it.
CREATE FUNCTION @extschema@.idem__stat_scope_shares(OUT scope text, OUT share float8)
RETURNS SETOF record
LANGUAGE plpgsql STABLE PARALLEL RESTRICTED ROWS 32
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
	PERFORM @extschema@.idem__check_scope('');
	RETURN QUERY
	SELECT v.scope, v.share::float8
	FROM pg_class AS t JOIN pg_namespace AS n ON n.oid = t.relnamespace
		JOIN pg_stats AS s ON s.schemaname = n.nspname AND s.tablename = t.relname,
		LATERAL ROWS FROM (unnest(s.most_common_vals::text::text[]), unnest(s.most_common_freqs)) AS v (scope, share)
	WHERE t.oid = '@extschema@.idem_claims'::regclass AND s.attname = 'scope' AND NOT s.inherited
	ORDER BY v.share DESC LIMIT 32;
END
$$;

COMMENT ON FUNCTION @extschema@.idem__stat_scope_shares() IS
'for the view idem_stat_scopes: which part of the claims each of the most common scopes has';

CREATE VIEW @extschema@.idem_stat_scopes AS
	WITH common AS MATERIALIZED (SELECT k.scope, k.share FROM @extschema@.idem__stat_scope_shares() AS k)
	SELECT c.scope, (c.share * t.claims)::int8 AS claims
	FROM (SELECT k.scope, k.share FROM common AS k
			UNION ALL SELECT NULL, greatest(1 - coalesce(sum(k.share), 0), 0) FROM common AS k) AS c (scope, share),
		@extschema@.idem_stat_table AS t
	ORDER BY c.scope;

COMMENT ON VIEW @extschema@.idem_stat_scopes IS
'claims by scope: up to 32 scopes, and a row without a scope for all others';
COMMENT ON COLUMN @extschema@.idem_stat_scopes.scope IS 'NULL: all scopes that have no row';
COMMENT ON COLUMN @extschema@.idem_stat_scopes.claims IS 'claims in the table, an estimate of the latest ANALYZE';

-- ----- metrics -----

-- What is known without counting claims: all claims would have to update one counter.  The
-- names are those of the C edition.  No sample is a scan: the oldest claim is found by its index, and of
-- the expired ones at most 10,000 are looked at.
CREATE VIEW @extschema@.idem_metrics AS
	SELECT m.name, jsonb_strip_nulls(jsonb_build_object('database', current_database(), 'le', m.le, 'scope', m.scope)) AS labels,
		m.type, m.help, m.value
	FROM @extschema@.idem_stat_cleanup AS cleanup, @extschema@.idem_stat_table AS size,
	LATERAL (SELECT n.name, n.le, NULL, n.type, n.help, n.value FROM (VALUES
		('idempotency_cleanup_rows_total', NULL, 'counter',
			'Expired claims that were removed.', cleanup.rows_deleted::float8),
		('idempotency_cleanup_batch_duration_seconds_bucket', '+Inf', 'histogram',
			'Duration of a batch of the cleanup.', cleanup.batches),
		('idempotency_cleanup_batch_duration_seconds_sum', NULL, 'histogram',
			'Duration of a batch of the cleanup.', cleanup.total_batch_seconds),
		('idempotency_cleanup_batch_duration_seconds_count', NULL, 'histogram',
			'Duration of a batch of the cleanup.', cleanup.batches),
		('idempotency_cleanup_backlog', NULL, 'gauge',
			'1 if the latest batch of the cleanup left expired claims behind.', cleanup.backlog::int4),
		('idempotency_cleanup_last_run_age_seconds', NULL, 'gauge',
			'How long ago the latest batch of the cleanup ended.', date_part('epoch', clock_timestamp() - cleanup.last_run)),
		('idempotency_unknown_claims', NULL, 'gauge',
			'Expired claims whose lease lapsed unsettled, kept until somebody finds out.',
			CASE WHEN EXISTS (SELECT FROM @extschema@.idem_scopes AS p WHERE p.lapsed = 'unknown') THEN
				(SELECT count(*) FROM (SELECT e.scope, e.state FROM @extschema@.idem_claims AS e
						WHERE e.expires_at <= clock_timestamp() ORDER BY e.expires_at LIMIT 10000) AS e
					JOIN @extschema@.idem_scopes AS p USING (scope)
				WHERE e.state::text = 'in_progress' AND p.lapsed = 'unknown') ELSE 0 END),
		('idempotency_oldest_expired_age_seconds', NULL, 'gauge',
			'How long the oldest expired claim that is still there has been expired.',
			coalesce(date_part('epoch', cleanup.oldest_expired_age), 0)),
		('idempotency_cleanup_active', NULL, 'gauge',
			'1 if somebody cleans this database: a session in the last hour.',
			coalesce(cleanup.last_run > clock_timestamp() - interval '1 hour', false)::int4),
		('idempotency_claims', NULL, 'gauge',
			'Claims in the table, an estimate.', size.claims),
		('idempotency_claims_dead_rows', NULL, 'gauge',
			'Dead rows of the table, an estimate.', size.dead_rows),
		('idempotency_claims_bytes', NULL, 'gauge',
			'Size of the table with its indexes.', size.bytes),
		('idempotency_dead_rows_held_seconds', NULL, 'gauge',
			'Age of the oldest transaction that keeps VACUUM from removing dead rows.',
			CASE WHEN size.held_back_by IS NULL THEN 0
				ELSE date_part('epoch', clock_timestamp() - size.held_back_since) END),
		('idempotency_dead_rows_held_transactions', NULL, 'gauge',
			'Transactions of the server since what keeps VACUUM from removing dead rows began.',
			coalesce(size.held_back_transactions, 0))
		) AS n (name, le, type, help, value)
		UNION ALL
		-- A real scope of such a name would be counted with it: a sample must not come twice.
		SELECT 'idempotency_scope_claims', NULL, CASE s.scope WHEN '' THEN '(default)' ELSE coalesce(s.scope, '(other)') END,
			'gauge', 'Claims in the table by scope, an estimate.', sum(s.claims)
		FROM @extschema@.idem_stat_scopes AS s
		GROUP BY 3
	) AS m (name, le, scope, type, help, value)
	WHERE m.value IS NOT NULL
		-- On Citus the table of this node is empty, see sql/idem-citus.sql: its size says nothing.
		AND NOT ((m.name ^@ 'idempotency_claims' OR m.name = 'idempotency_scope_claims')
			AND to_regclass('@extschema@.idem__token_source') IS NOT NULL);

COMMENT ON VIEW @extschema@.idem_metrics IS
'what is known of this database without counting claims, as samples of Prometheus metrics; durations in seconds';
COMMENT ON COLUMN @extschema@.idem_metrics.type IS 'type of the metric: a histogram has samples _bucket, _sum and _count';

-- ----- ids of other types -----

-- Each function that takes a user and a request takes the user as uuid or bigint too, and the
-- request as uuid: as drivers and columns have them.  Such a function only casts the ids; the
-- text of both types has one spelling.  Its body is bound to the function that it calls, it
-- runs with the caller's rights, and the planner replaces its call by that function's.
--
-- Untyped literals, NULLs and parameters still mean text, which PostgreSQL prefers.  The
-- names of the arguments differ, because PostgREST finds a function by them, and refuses to
-- choose among several with the same names.
DO $block$
DECLARE
	original record;
	ids text;
	call text;
	ids_of_original constant text := '^"?user_id"? "?text"?, "?request_id"? "?text"?';		-- with quote_all_identifiers, too
BEGIN
	FOR original IN
		SELECT p.proname, pg_get_function_arguments(p.oid) AS arguments,
			pg_get_function_identity_arguments(p.oid) AS types, pg_get_function_result(p.oid) AS result, p.prorettype, p.procost, p.prorows,
			CASE p.provolatile WHEN 's' THEN 'STABLE' ELSE 'VOLATILE' END AS volatility,
			CASE p.proparallel WHEN 'r' THEN 'RESTRICTED' ELSE 'UNSAFE' END AS parallel,
			(SELECT string_agg(', $' || n::text, '' ORDER BY n) FROM generate_series(3, p.pronargs) AS n) AS further
		FROM pg_proc AS p
		WHERE p.pronamespace = '@extschema@'::regnamespace AND p.proname ^@ 'idem_' AND NOT p.proname ^@ 'idem__'
			AND p.proowner = (SELECT c.relowner FROM pg_class AS c WHERE c.oid = '@extschema@.idem_claims'::regclass)
			AND pg_get_function_arguments(p.oid) ~ ids_of_original
	LOOP
		call := format('@extschema@.%I($1::text, $2::text%s)', original.proname, original.further);
		FOREACH ids IN ARRAY ARRAY['user_id text, request_uuid uuid',
			'user_uuid uuid, request_id text', 'user_uuid uuid, request_uuid uuid',
			'user_number int8, request_id text', 'user_number int8, request_uuid uuid']
		LOOP
			EXECUTE format('CREATE FUNCTION @extschema@.%I(%s) RETURNS %s LANGUAGE sql %s PARALLEL %s COST %s %s %s',
				original.proname, regexp_replace(original.arguments, ids_of_original, ids),
				original.result, original.volatility, original.parallel, original.procost,
				CASE WHEN original.prorows > 0 THEN 'ROWS ' || original.prorows::text END,
				format(CASE original.prorettype WHEN 'record'::regtype THEN 'BEGIN ATOMIC SELECT * FROM %s; END' ELSE 'RETURN %s' END, call));
			EXECUTE format('COMMENT ON FUNCTION @extschema@.%I(%s) IS %L',
				original.proname, regexp_replace(original.types, ids_of_original, ids),
				format('%s(user_id text, request_id text, ...) for ids of other types', original.proname));
		END LOOP;
	END LOOP;
END
$block$;

-- ----- rights -----

CREATE FUNCTION @extschema@.idem__change_rights(role regrole, privileges text, command text)
RETURNS void
LANGUAGE plpgsql
AS $$
DECLARE
	app constant text[] := ARRAY['idem_call', 'idem__call_settle', 'idem_claim', 'idem_try_claim', 'idem_lease', 'idem_claim_many',
		'idem_complete', 'idem_fail', 'idem_extend', 'idem_release', 'idem_fence',
		'idem_heal', 'idem_result', 'idem_status', 'idem_lookup', 'idem_fingerprint',
		'idem_skip_duplicates'];
	operator constant text[] := ARRAY['idem_result', 'idem_status', 'idem_lookup',
		'idem_lapsed', 'idem_forget', 'idem_erase', 'idem__erase', 'idem_heal', 'idem_cleanup', 'idem_cleanup_all', 'idem__cleanup_step',
		'idem__stat_scope_shares'];
	-- all but guarded_since, which the trigger sets
	policy constant text := 'scope, ttl, lease, lease_max, failed, lapsed, expired, key_time, result_max_bytes';
	-- all but the token, which only its holder may know
	columns constant text := 'expires_at, lease_until, state, request_id, user_id, scope, fingerprint, result, progress';
	schema constant regnamespace := '@extschema@';
	routine regprocedure;
BEGIN
	IF role IS NULL OR NOT EXISTS (SELECT FROM pg_roles WHERE oid = role)
		OR privileges IS NULL OR (privileges <> 'app' AND privileges <> 'operator') THEN
		PERFORM @extschema@.idem__raise('22023', 'rights are granted to, and revoked from, a role as ''app'' or ''operator''',
			'app: claim and settle requests; operator: policy, cleanup, statistics.');
	END IF;

	IF command LIKE 'GRANT%' AND NOT has_schema_privilege(role, schema, 'USAGE') THEN
		IF has_schema_privilege(schema, 'USAGE WITH GRANT OPTION') THEN
			EXECUTE pg_catalog.format('GRANT USAGE ON SCHEMA %s TO %s', schema, role);
		ELSE
			RAISE WARNING 'role % cannot use schema %', role, schema
				USING HINT = 'The owner of the schema has to grant USAGE on it.';
		END IF;
	END IF;

	FOR routine IN
		SELECT p.oid FROM pg_proc AS p
		WHERE p.pronamespace = schema AND p.proname::text = ANY (CASE privileges WHEN 'app' THEN app ELSE operator END)
			AND p.proowner = (SELECT c.relowner FROM pg_class AS c WHERE c.oid = '@extschema@.idem_claims'::regclass)
	LOOP
		EXECUTE pg_catalog.format(command, pg_catalog.format('EXECUTE ON ROUTINE %s', routine), role);
	END LOOP;
	EXECUTE pg_catalog.format(command, pg_catalog.format('USAGE ON TYPE %1$s.idem_state, %1$s.idem_outcome', schema), role);

	IF privileges = 'operator' THEN
		EXECUTE pg_catalog.format(command, pg_catalog.format('SELECT (%s) ON %s.idem_claims', columns, schema), role);
		EXECUTE pg_catalog.format(command,
			pg_catalog.format('SELECT, INSERT (%1$s), UPDATE (%1$s), DELETE ON %2$s.idem_scopes', policy, schema), role);
		EXECUTE pg_catalog.format(command, pg_catalog.format('SELECT, UPDATE ON %s.idem_settings', schema), role);
		EXECUTE pg_catalog.format(command,
			pg_catalog.format('SELECT ON %1$s.idem_stat_cleanup, %1$s.idem_stat_table, %1$s.idem_stat_scopes, %1$s.idem_metrics, %1$s.idem_unsettled, %1$s.idem_holders', schema), role);
	END IF;
END
$$;

CREATE FUNCTION @extschema@.idem_grant(role regrole, privileges text)
RETURNS void
LANGUAGE plpgsql VOLATILE
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
	PERFORM @extschema@.idem__change_rights(role, privileges, 'GRANT %s TO %s');
END
$$;

COMMENT ON FUNCTION @extschema@.idem_grant(regrole, text) IS
'grants a role what an application (app) or an operator (operator) needs';

CREATE FUNCTION @extschema@.idem_revoke(role regrole, privileges text)
RETURNS void
LANGUAGE plpgsql VOLATILE
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
	PERFORM @extschema@.idem__change_rights(role, privileges, 'REVOKE %s FROM %s');
END
$$;

COMMENT ON FUNCTION @extschema@.idem_revoke(regrole, text) IS
'takes back what idem_grant() has granted; app and operator share some functions';

-- Revokes what PUBLIC and the grantees of default privileges got with the new objects.  If
-- this is an extension, under whatever name, marks the tables whose rows belong in a dump;
-- the secret does not.
DO $block$
DECLARE
	object record;
	config regclass;
BEGIN
	FOR object IN
		SELECT o.name, CASE a.grantee WHEN '0'::oid THEN 'PUBLIC' ELSE a.grantee::regrole::text END AS grantee
		FROM (SELECT 'ROUTINE ' || p.oid::regprocedure, p.proowner, coalesce(p.proacl, acldefault('f', p.proowner))
				FROM pg_proc AS p WHERE p.pronamespace = '@extschema@'::regnamespace AND p.proname ^@ 'idem_'
				UNION ALL SELECT CASE c.relkind WHEN 'S' THEN 'SEQUENCE ' ELSE 'TABLE ' END || c.oid::regclass, c.relowner, c.relacl
				FROM pg_class AS c WHERE c.relnamespace = '@extschema@'::regnamespace AND c.relname ^@ 'idem_' AND c.relkind IN ('r', 'v', 'S')
				UNION ALL SELECT 'TYPE ' || t.oid::regtype, t.typowner, coalesce(t.typacl, acldefault('T', t.typowner))
				FROM pg_type AS t WHERE t.typnamespace = '@extschema@'::regnamespace AND t.typname ^@ 'idem_' AND t.typtype IN ('c', 'e')
			) AS o (name, owner, acl), aclexplode(o.acl) AS a
		WHERE o.owner = (SELECT r.oid FROM pg_roles AS r WHERE r.rolname = current_user) AND a.grantee <> o.owner
		GROUP BY 1, 2
	LOOP
		EXECUTE format('REVOKE ALL ON %s FROM %s CASCADE', object.name, object.grantee);
	END LOOP;
	GRANT SELECT ON @extschema@.idem_stat_cleanup, @extschema@.idem_stat_table, @extschema@.idem_stat_scopes,
		@extschema@.idem_metrics, @extschema@.idem_unsettled, @extschema@.idem_holders TO pg_monitor;
	GRANT EXECUTE ON FUNCTION @extschema@.idem__stat_scope_shares() TO pg_monitor;

	IF EXISTS (SELECT FROM pg_depend AS d WHERE d.classid = 'pg_class'::regclass AND d.objid = '@extschema@.idem_claims'::regclass
			AND d.refclassid = 'pg_extension'::regclass AND d.deptype = 'e') THEN
		FOREACH config IN ARRAY ARRAY['@extschema@.idem_claims', '@extschema@.idem_scopes', '@extschema@.idem_settings',
			'@extschema@.idem_cleanup_batches', '@extschema@.idem_token_seq']::regclass[]
		LOOP
			PERFORM pg_extension_config_dump(config, '');
		END LOOP;
	END IF;
	PERFORM set_config('role', current_setting('idem_install.role'), true);
	-- If it names no tablespace, it may stay empty.
	PERFORM set_config('default_tablespace', t.spcname, true) FROM pg_tablespace AS t
	WHERE t.spcname = current_setting('idem_install.tablespace');
END
$block$;

$script$, '@extschema@', quote_ident(:'schema')) AS script	-- psql only
\gexec

\if :{?within_transaction}
\else
COMMIT;										-- psql only
\endif
