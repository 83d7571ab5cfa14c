/*
 * Objects of the extension idem 1.0.
 *
 * The extension is trusted: a role that may create objects in the database can
 * install it, and the objects then belong to the bootstrap superuser.  So
 *
 * - every name of ours is qualified.  Other names are looked up in pg_catalog alone: the script
 *	 sets the search_path, and so does each function in SQL that does not qualify its names;
 * - no name of a schema or a role is substituted within quotes, which it could end: where a
 *	 string needs one, it comes from pg_extension;
 * - no function here is SECURITY DEFINER.  What is in C acts on the extension's own
 *	 objects, by OID; what is in SQL runs with the caller's rights;
 * - rights are granted at the end, after all others were revoked, and only to the owner
 *	 of the extension, for dumping, restoring and granting, and to pg_monitor.
 */

-- complain if the script is sourced in psql rather than by CREATE EXTENSION
\echo Use "CREATE EXTENSION idem" to load this file. \quit

-- ----- whether it can be installed -----

-- CREATE EXTENSION has put the schema into the search_path, in front of objects of its owner.
DO $block$
BEGIN
	IF pg_catalog.current_setting('server_version_num')::pg_catalog.int4 OPERATOR(pg_catalog.<) 150004 THEN
		RAISE EXCEPTION 'idem needs PostgreSQL 15.4 or later'
			USING ERRCODE = 'feature_not_supported',
			DETAIL = 'Older releases paste the name of a schema into the scripts of trusted extensions unchecked (CVE-2023-39417).',
			HINT = 'Update the server to the newest minor release of PostgreSQL 15.';
	END IF;
	-- This script makes objects by the name of the schema, and finds them by its OID.  Until it has
	-- ended, the name must mean that schema: an owner who renames it could have the script run his
	-- function as a superuser.  ALTER SCHEMA waits for the lock of the row.
	PERFORM FROM pg_catalog.pg_extension e JOIN pg_catalog.pg_namespace n ON n.oid OPERATOR(pg_catalog.=) e.extnamespace
	WHERE e.extname OPERATOR(pg_catalog.=) 'idem' AND n.nspname OPERATOR(pg_catalog.=) pg_catalog.current_schema()
	FOR SHARE OF n;
	IF NOT FOUND THEN
		RAISE EXCEPTION 'the schema of extension idem was renamed or dropped meanwhile'
			USING ERRCODE = 'object_not_in_prerequisite_state', HINT = 'Create the extension again.';
	END IF;
END
$block$;

-- CREATE EXTENSION sets it back.
SET LOCAL search_path = pg_catalog, pg_temp;

DO $block$
DECLARE
	me pg_extension;
	other text;
BEGIN
	SELECT e.* INTO me FROM pg_extension e WHERE e.extname = 'idem';

	-- This script runs as a superuser, so the server does not ask whether the installer may.
	IF NOT has_schema_privilege(me.extowner, me.extnamespace, 'CREATE') THEN
		RAISE EXCEPTION 'role % may not create objects in schema %', me.extowner::regrole, me.extnamespace::regnamespace
			USING ERRCODE = 'insufficient_privilege',
			HINT = format('GRANT CREATE ON SCHEMA %s TO %s; or install idem into a schema of its own.',
				me.extnamespace::regnamespace, me.extowner::regrole);
	END IF;

	-- Two editions in one database would not know of each other's claims.  Temporary schemas
	-- are ignored: nobody installs idem there.
	SELECT format('%I', n.nspname) INTO other
	FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace
		JOIN pg_class c ON c.relnamespace = n.oid AND c.relname = 'idem_claims'
	WHERE p.proname = 'idem_try_claim'
		AND NOT starts_with(n.nspname::text, 'pg_temp_')
	LIMIT 1;
	IF FOUND THEN
		RAISE EXCEPTION 'idem is installed in this database already, in schema %', other
			USING ERRCODE = 'duplicate_object',
			DETAIL = 'It is the portable edition.',
			HINT = 'Move it here with its claims: sql/idem-move.sql. If you drop it instead, all claims are lost, and retries are executed again.';
	END IF;

	-- A call with untyped literals, such as idem_grant('app', 'app'), would find them first.
	SELECT string_agg(p.oid::regprocedure::text, ', ') INTO other
	FROM pg_proc p JOIN pg_roles r ON r.oid = p.proowner
	WHERE p.pronamespace = me.extnamespace
		AND starts_with(p.proname::text, 'idem_')
		AND NOT r.rolsuper AND r.oid <> me.extowner;
	IF other IS NOT NULL THEN
		RAISE EXCEPTION 'others own functions in schema % that would be called instead of those of idem: %',
				me.extnamespace::regnamespace, other
			USING ERRCODE = 'object_not_in_prerequisite_state',
			HINT = 'Drop them, or install idem into a schema of its own.';
	END IF;
	SELECT string_agg(CASE WHEN a.grantee = '0'::oid THEN 'PUBLIC'
			ELSE a.grantee::regrole::text END, ', ') INTO other
	FROM pg_namespace n, aclexplode(n.nspacl) a
	WHERE n.oid = me.extnamespace
		AND a.privilege_type = 'CREATE' AND a.grantee <> n.nspowner
		AND a.grantee <> me.extowner;
	IF other IS NOT NULL THEN
		RAISE WARNING 'others may create objects in schema %: %', me.extnamespace::regnamespace, other
			USING DETAIL = 'A function that they create there, idem_claim(varchar, varchar) or idem_grant(text, text) say, can be called instead of the one of idem.',
			HINT = 'Revoke CREATE on the schema from them; or drop the extension and install it into a schema of its own.';
	END IF;
END
$block$;

-- Tables and indexes go where the database has its own: the installer's default_tablespace can
-- be one in which that role may create nothing.  The last statement gives the setting back:
-- until the end of the transaction, nothing else would.
SELECT set_config('idem_install.tablespace', current_setting('default_tablespace'), true),
	set_config('default_tablespace', '', true);

-- ----- types -----

CREATE TYPE @extschema@.idem_state AS ENUM ('in_progress', 'completed', 'failed');

COMMENT ON TYPE @extschema@.idem_state IS 'state of a stored claim';

CREATE TYPE @extschema@.idem_outcome AS ENUM (
	'claimed', 'completed', 'failed', 'in_progress', 'timed_out', 'unknown',
	'mismatch', 'stale', 'invalid'
);

COMMENT ON TYPE @extschema@.idem_outcome IS 'answer of a claim call';

-- ----- claims -----

-- src/store*.c write this table directly and know its columns by position.
--
-- Fixed-width columns come first.  Columns that a marker does not need are NULL and take no
-- room.  Collation "C": an update of the system's collations must not corrupt the index that
-- prevents a second execution, and memcmp is fast.  The request id leads the key, so that
-- time-ordered ids (UUIDv7, ULID) append on the right.
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
	-- Rows come and go at a high rate.  VACUUM must find dead rows while they are few, so
	-- their number counts rather than their share of the table.
	autovacuum_vacuum_scale_factor = 0.02,
	autovacuum_vacuum_threshold = 5000,
	autovacuum_vacuum_insert_scale_factor = 0.1,
	autovacuum_analyze_scale_factor = 0.1,
	autovacuum_vacuum_cost_delay = 0
);

-- The times are whole seconds: all entries of a second have one key, and btree deduplicates
-- them.
CREATE INDEX idem_claims_expires_at_idx ON @extschema@.idem_claims (expires_at);

-- Leases in progress are few among all claims.  A marker has no entry here, and src/store*.c
-- does not even open this index for it.  The end of the lease is not in the index: with it,
-- idem_extend() could not update a row in place (HOT).
CREATE INDEX idem_claims_unsettled_idx ON @extschema@.idem_claims (scope)
	WHERE state = 'in_progress'::@extschema@.idem_state;

COMMENT ON TABLE @extschema@.idem_claims IS 'requests that have been executed, or are being executed under a lease';
COMMENT ON COLUMN @extschema@.idem_claims.expires_at IS 'the claim is remembered at least until this time';
COMMENT ON COLUMN @extschema@.idem_claims.lease_until IS 'end of the lease; NULL for a transactional claim, and for a lease that was healed';
COMMENT ON COLUMN @extschema@.idem_claims.token IS 'fencing token; NULL for a transactional claim';
COMMENT ON COLUMN @extschema@.idem_claims.result IS 'stored response; of a failed request the error; NULL for a marker';

CREATE SEQUENCE @extschema@.idem_token_seq AS int8 CACHE 1;

COMMENT ON SEQUENCE @extschema@.idem_token_seq IS 'fencing tokens';

-- ----- scopes -----

CREATE TABLE @extschema@.idem_scopes (
	scope text COLLATE "C" PRIMARY KEY
		CHECK (octet_length(scope) <= 255),
	ttl interval
		CONSTRAINT idem_scopes_ttl_check CHECK (
			ttl > interval '0'
			AND ttl <= interval '36500 days'
			AND date_part('year', ttl) = 0
			AND date_part('month', ttl) = 0),
	lease interval
		CONSTRAINT idem_scopes_lease_check CHECK (
			lease > interval '0'
			AND lease <= interval '36500 days'
			AND date_part('year', lease) = 0
			AND date_part('month', lease) = 0),
	lease_max interval
		CONSTRAINT idem_scopes_lease_max_check CHECK (
			lease_max > interval '0'
			AND lease_max <= interval '36500 days'
			AND date_part('year', lease_max) = 0
			AND date_part('month', lease_max) = 0),
	failed text NOT NULL DEFAULT 'terminal'
		CHECK (failed = 'terminal' OR failed = 'retryable'),
	lapsed text NOT NULL DEFAULT 'reclaim'
		CHECK (lapsed = 'reclaim' OR lapsed = 'unknown'),
	expired text NOT NULL DEFAULT 'protect'
		CHECK (expired = 'protect' OR expired = 'reclaim'),
	key_time text NOT NULL DEFAULT 'any'
		CHECK (key_time = 'any' OR key_time = 'uuidv7'),
	result_max_bytes int4
		CHECK (result_max_bytes > 0
			AND result_max_bytes <= 267386880),
	guarded_since timestamptz,
	CONSTRAINT idem_scopes_key_time_ttl_check
		CHECK (key_time <> 'uuidv7' OR ttl IS NOT NULL)
) USING heap;

COMMENT ON TABLE @extschema@.idem_scopes IS 'policy of scopes; a scope without a row uses the settings';
COMMENT ON COLUMN @extschema@.idem_scopes.ttl IS 'retention: a claim is remembered at least this long; NULL: idem.ttl';
COMMENT ON COLUMN @extschema@.idem_scopes.lease IS 'length of a lease that idem_extend() renews without a length; NULL: idem.lease';
COMMENT ON COLUMN @extschema@.idem_scopes.lease_max IS 'longest lease that a caller may ask for; NULL: idem.lease_max';
COMMENT ON COLUMN @extschema@.idem_scopes.failed IS 'terminal: a failed request stays failed; retryable: the next claim runs it again';
COMMENT ON COLUMN @extschema@.idem_scopes.lapsed IS 'reclaim: a lapsed lease can be taken over; unknown: it cannot';
COMMENT ON COLUMN @extschema@.idem_scopes.expired IS 'protect: an expired claim still guards until it is removed; reclaim: it counts as absent';
COMMENT ON COLUMN @extschema@.idem_scopes.key_time IS 'uuidv7: the time in the request id tells a new request from one that may have been forgotten';
COMMENT ON COLUMN @extschema@.idem_scopes.result_max_bytes IS 'largest result that is stored; NULL: idem.result_max_bytes';
COMMENT ON COLUMN @extschema@.idem_scopes.guarded_since IS 'under uuidv7: request ids up to this time are stale; set by a trigger';

CREATE FUNCTION @extschema@.idem__scopes_changed()
RETURNS trigger
AS 'MODULE_PATHNAME', 'idem__scopes_changed'
LANGUAGE C;

COMMENT ON FUNCTION @extschema@.idem__scopes_changed() IS 'trigger: checks ttl and leases, and makes all sessions read idem_scopes again';

-- Row triggers, and ALWAYS: rows that a subscriber receives must act as well.
CREATE TRIGGER idem__scopes_changed
BEFORE INSERT OR UPDATE OR DELETE ON @extschema@.idem_scopes
FOR EACH ROW EXECUTE FUNCTION @extschema@.idem__scopes_changed();

CREATE TRIGGER idem_scopes_changed_all
BEFORE TRUNCATE ON @extschema@.idem_scopes
FOR EACH STATEMENT EXECUTE FUNCTION @extschema@.idem__scopes_changed();

ALTER TABLE @extschema@.idem_scopes ENABLE ALWAYS TRIGGER idem__scopes_changed;
ALTER TABLE @extschema@.idem_scopes ENABLE ALWAYS TRIGGER idem_scopes_changed_all;

CREATE FUNCTION @extschema@.idem__scopes_guard()
RETURNS trigger
AS 'MODULE_PATHNAME', 'idem__scopes_guard'
LANGUAGE C;

COMMENT ON FUNCTION @extschema@.idem__scopes_guard() IS 'trigger: sets guarded_since';

-- Not on a subscriber, which receives the publisher's guarded_since
CREATE TRIGGER idem__scopes_guard
BEFORE INSERT OR UPDATE ON @extschema@.idem_scopes
FOR EACH ROW EXECUTE FUNCTION @extschema@.idem__scopes_guard();

-- ----- claiming -----

-- Refuses a claim where the server can evaluate it twice for one row
CREATE FUNCTION @extschema@.idem__claim_support(internal)
RETURNS internal
AS 'MODULE_PATHNAME', 'idem__claim_support'
LANGUAGE C STRICT;

CREATE FUNCTION @extschema@.idem_claim(
	user_id text,
	request_id text,
	scope text DEFAULT '',
	fingerprint bytea DEFAULT NULL,
	wait interval DEFAULT NULL)
RETURNS bool
AS 'MODULE_PATHNAME', 'idem_claim'
LANGUAGE C VOLATILE PARALLEL UNSAFE COST 10000 SUPPORT @extschema@.idem__claim_support;

COMMENT ON FUNCTION @extschema@.idem_claim(text, text, text, bytea, interval) IS
'claims a request for this transaction: true, do the work; false, it was done before. Any other outcome is raised';

CREATE FUNCTION @extschema@.idem_try_claim(
	user_id text,
	request_id text,
	scope text DEFAULT '',
	fingerprint bytea DEFAULT NULL,
	wait interval DEFAULT NULL,
	OUT outcome @extschema@.idem_outcome,
	OUT result jsonb,
	OUT progress jsonb,
	OUT expires_at timestamptz,
	OUT lease_until timestamptz)
AS 'MODULE_PATHNAME', 'idem_try_claim'
LANGUAGE C VOLATILE PARALLEL UNSAFE COST 10000 SUPPORT @extschema@.idem__claim_support;

COMMENT ON FUNCTION @extschema@.idem_try_claim(text, text, text, bytea, interval) IS
'claims a request for this transaction, and returns the outcome instead of raising it. Use it in FROM';

CREATE FUNCTION @extschema@.idem_lease(
	user_id text,
	request_id text,
	lease interval,
	scope text DEFAULT '',
	fingerprint bytea DEFAULT NULL,
	wait interval DEFAULT NULL,
	OUT outcome @extschema@.idem_outcome,
	OUT result jsonb,
	INOUT progress jsonb DEFAULT NULL,
	OUT expires_at timestamptz,
	OUT lease_until timestamptz,
	OUT token int8)
AS 'MODULE_PATHNAME', 'idem_lease'
LANGUAGE C VOLATILE PARALLEL UNSAFE COST 10000 SUPPORT @extschema@.idem__claim_support;

COMMENT ON FUNCTION @extschema@.idem_lease(text, text, interval, text, bytea, interval, jsonb) IS
'claims a request for work that is not one transaction: until the lease ends, or a call with the token settles it. Use it in FROM';

CREATE FUNCTION @extschema@.idem_claim_many(
	user_ids text[],
	request_ids text[],
	scope text DEFAULT '',
	fingerprints bytea[] DEFAULT NULL,
	wait interval DEFAULT NULL)
RETURNS TABLE (
	ordinal int4,
	outcome @extschema@.idem_outcome,
	result jsonb)
AS 'MODULE_PATHNAME', 'idem_claim_many'
LANGUAGE C VOLATILE PARALLEL UNSAFE COST 10000;

COMMENT ON FUNCTION @extschema@.idem_claim_many(text[], text[], text, bytea[], interval) IS
'claims requests for this transaction, in an order in which batches do not deadlock; answers in the order of the arrays';

CREATE FUNCTION @extschema@.idem_skip_duplicates()
RETURNS trigger
AS 'MODULE_PATHNAME', 'idem_skip_duplicates'
LANGUAGE C VOLATILE PARALLEL UNSAFE;

COMMENT ON FUNCTION @extschema@.idem_skip_duplicates() IS
'trigger BEFORE INSERT, arguments scope, user column, request column: claims the request of each row, and skips the row if it was done before';

CREATE FUNCTION @extschema@.idem_complete(result jsonb DEFAULT NULL)
RETURNS bool
AS 'MODULE_PATHNAME', 'idem_complete_held'
LANGUAGE C VOLATILE PARALLEL UNSAFE COST 10000;

COMMENT ON FUNCTION @extschema@.idem_complete(jsonb) IS
'stores the response of the only unsettled request of this transaction';

CREATE FUNCTION @extschema@.idem_complete(
	user_id text,
	request_id text,
	result jsonb,
	token int8 DEFAULT NULL,
	scope text DEFAULT '')
RETURNS bool
AS 'MODULE_PATHNAME', 'idem_complete'
LANGUAGE C VOLATILE PARALLEL UNSAFE COST 10000;

COMMENT ON FUNCTION @extschema@.idem_complete(text, text, jsonb, int8, text) IS
'stores the response of a request that this transaction holds, or whose lease has the token: true, stored; false, an identical repeat';

CREATE FUNCTION @extschema@.idem_fail(error jsonb)
RETURNS bool
AS 'MODULE_PATHNAME', 'idem_fail_held'
LANGUAGE C VOLATILE PARALLEL UNSAFE COST 10000;

COMMENT ON FUNCTION @extschema@.idem_fail(jsonb) IS
'ends the only unsettled request of this transaction as failed; recorded only if the transaction commits';

CREATE FUNCTION @extschema@.idem_fail(
	user_id text,
	request_id text,
	error jsonb,
	token int8 DEFAULT NULL,
	scope text DEFAULT '')
RETURNS bool
AS 'MODULE_PATHNAME', 'idem_fail'
LANGUAGE C VOLATILE PARALLEL UNSAFE COST 10000;

COMMENT ON FUNCTION @extschema@.idem_fail(text, text, jsonb, int8, text) IS
'ends a request that this transaction holds, or whose lease has the token, as failed: true, stored; false, an identical repeat';

-- ----- calling -----

CREATE FUNCTION @extschema@.idem_call(
	user_id text,
	request_id text,
	function text,
	arguments jsonb DEFAULT '{}',
	scope text DEFAULT '',
	wait interval DEFAULT NULL)
RETURNS jsonb
AS 'MODULE_PATHNAME', 'idem_call'
LANGUAGE C VOLATILE PARALLEL UNSAFE COST 10000;

COMMENT ON FUNCTION @extschema@.idem_call(text, text, text, jsonb, text, interval) IS
'claims a request for this transaction, runs a function with the caller''s rights, and stores its result; a replay returns what is stored';

-- ----- leases -----

CREATE FUNCTION @extschema@.idem_extend(
	user_id text,
	request_id text,
	token int8,
	lease interval DEFAULT NULL,
	progress jsonb DEFAULT NULL,
	scope text DEFAULT '')
RETURNS timestamptz
AS 'MODULE_PATHNAME', 'idem_extend'
LANGUAGE C VOLATILE PARALLEL UNSAFE COST 10000;

COMMENT ON FUNCTION @extschema@.idem_extend(text, text, int8, interval, jsonb, text) IS
'heartbeat: the lease ends that long from now (NULL: the scope''s lease, but no earlier than before), returns when; records progress';

CREATE FUNCTION @extschema@.idem_release(
	user_id text,
	request_id text,
	token int8,
	scope text DEFAULT '')
RETURNS bool
AS 'MODULE_PATHNAME', 'idem_release'
LANGUAGE C VOLATILE PARALLEL UNSAFE COST 10000;

COMMENT ON FUNCTION @extschema@.idem_release(text, text, int8, text) IS
'gives up a lease, so that the next waiter claims: true, released; false, there was no such request';

CREATE FUNCTION @extschema@.idem_fence(
	user_id text,
	request_id text,
	token int8,
	scope text DEFAULT '')
RETURNS void
AS 'MODULE_PATHNAME', 'idem_fence'
LANGUAGE C VOLATILE PARALLEL UNSAFE COST 10000;

COMMENT ON FUNCTION @extschema@.idem_fence(text, text, int8, text) IS
'locks the lease until this transaction ends, so that nobody takes it over, or raises ID410: begin each transaction of leased work with it';

CREATE FUNCTION @extschema@.idem_heal(
	user_id text,
	request_id text,
	result jsonb,
	scope text DEFAULT '')
RETURNS bool
AS 'MODULE_PATHNAME', 'idem_heal'
LANGUAGE C VOLATILE PARALLEL UNSAFE COST 10000;

COMMENT ON FUNCTION @extschema@.idem_heal(text, text, jsonb, text) IS
'settles the lease of any holder, after its work was found done: true, settled; false, it was settled before';

-- ----- reading -----

CREATE FUNCTION @extschema@.idem_result()
RETURNS jsonb
AS 'MODULE_PATHNAME', 'idem_result_latest'
LANGUAGE C VOLATILE PARALLEL UNSAFE;

COMMENT ON FUNCTION @extschema@.idem_result() IS
'result, as stored so far, of the request that this transaction''s latest claim call named';

CREATE FUNCTION @extschema@.idem_result(
	user_id text,
	request_id text,
	scope text DEFAULT '')
RETURNS jsonb
AS 'MODULE_PATHNAME', 'idem_result'
LANGUAGE C STABLE PARALLEL RESTRICTED;

COMMENT ON FUNCTION @extschema@.idem_result(text, text, text) IS
'stored result of a request, or error of a failed one; NULL if there is none';

CREATE FUNCTION @extschema@.idem_status()
RETURNS @extschema@.idem_outcome
AS 'MODULE_PATHNAME', 'idem_status_latest'
LANGUAGE C VOLATILE PARALLEL UNSAFE;

COMMENT ON FUNCTION @extschema@.idem_status() IS
'what the latest claim call of this transaction answered: claimed also after the request was completed';

CREATE FUNCTION @extschema@.idem_status(
	user_id text,
	request_id text,
	scope text DEFAULT '')
RETURNS @extschema@.idem_outcome
AS 'MODULE_PATHNAME', 'idem_status'
LANGUAGE C STABLE PARALLEL RESTRICTED;

COMMENT ON FUNCTION @extschema@.idem_status(text, text, text) IS
'what is stored of a request: completed, failed, in_progress or unknown; NULL if it is not remembered';

CREATE FUNCTION @extschema@.idem_lookup(
	user_id text,
	request_id text,
	scope text DEFAULT '')
RETURNS TABLE (
	state @extschema@.idem_state,
	expires_at timestamptz,
	lease_until timestamptz,
	fingerprint bytea,
	result jsonb,
	progress jsonb,
	committed_at timestamptz)
AS 'MODULE_PATHNAME', 'idem_lookup'
LANGUAGE C STABLE PARALLEL RESTRICTED ROWS 1;

COMMENT ON FUNCTION @extschema@.idem_lookup(text, text, text) IS
'everything stored about a request except its token; no row if it is not remembered';

CREATE FUNCTION @extschema@.idem_lapsed(
	INOUT scope text DEFAULT NULL,
	"limit" int4 DEFAULT 100,
	OUT user_id text,
	OUT request_id text,
	OUT status text,
	OUT lease_until timestamptz,
	OUT progress jsonb)
RETURNS SETOF record
AS 'MODULE_PATHNAME', 'idem_lapsed'
LANGUAGE C STABLE PARALLEL RESTRICTED ROWS 100;

COMMENT ON FUNCTION @extschema@.idem_lapsed(text, int4) IS
'leases that lapsed and were not settled, longest lapsed first, of a scope or of all (NULL); status lapsed: idem_lease() takes it over, unknown: find out, then settle it with idem_heal()';

CREATE FUNCTION @extschema@.idem_fingerprint(parameters jsonb)
RETURNS bytea
AS 'MODULE_PATHNAME', 'idem_fingerprint'
LANGUAGE C IMMUTABLE STRICT PARALLEL SAFE;

COMMENT ON FUNCTION @extschema@.idem_fingerprint(jsonb) IS
'SHA-256 of the canonical text: equal jsonb have equal fingerprints';

-- ----- operating -----

CREATE FUNCTION @extschema@.idem_forget(
	user_id text,
	request_id text,
	scope text DEFAULT '')
RETURNS bool
AS 'MODULE_PATHNAME', 'idem_forget'
LANGUAGE C VOLATILE PARALLEL UNSAFE COST 10000;

COMMENT ON FUNCTION @extschema@.idem_forget(text, text, text) IS
'operator: forgets a request, so that it can be executed again: true, forgotten; false, there was no such request';

CREATE FUNCTION @extschema@.idem__erase(
	user_id text,
	request_id text,
	scope text)
RETURNS bool
AS 'MODULE_PATHNAME', 'idem__erase'
LANGUAGE C VOLATILE PARALLEL UNSAFE COST 10000;

-- The keys are listed when the call begins.  A request that is claimed later is not among them.
CREATE PROCEDURE @extschema@.idem_erase(user_id text, scope text DEFAULT NULL)
LANGUAGE plpgsql
AS $procedure$
DECLARE
	-- by the schema's current name
	schema constant pg_catalog.regnamespace := (SELECT e.extnamespace FROM pg_catalog.pg_extension AS e
		WHERE e.extname OPERATOR(pg_catalog.=) 'idem');
	found pg_catalog.record;
	is_erased pg_catalog.bool;
	erased pg_catalog.int8 := 0;
	in_progress pg_catalog.int8 := 0;
BEGIN
	-- raises ID400 for a user or a scope that no request can have
	EXECUTE pg_catalog.format('SELECT %s.idem_status($1, ''any'', COALESCE($2, ''''))', schema) USING user_id, scope;
	FOR found IN EXECUTE pg_catalog.format('SELECT c.request_id, c.scope FROM %s.idem_claims AS c
			WHERE c.user_id OPERATOR(pg_catalog.=) $1 AND ($2 IS NULL OR c.scope OPERATOR(pg_catalog.=) $2)
				AND (c.result IS NOT NULL OR c.progress IS NOT NULL)', schema)
		USING user_id, scope
	LOOP
		EXECUTE pg_catalog.format('SELECT %s.idem__erase($1, $2, $3)', schema) INTO is_erased
			USING user_id, found.request_id, found.scope;
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

COMMENT ON PROCEDURE @extschema@.idem_erase(text, text) IS
'operator: results, errors and progress of a user''s settled requests become NULL, in a scope or in all; the requests stay guarded. Commits in between';

-- ----- cleaning -----

CREATE FUNCTION @extschema@.idem_cleanup(batch_size int4 DEFAULT NULL)
RETURNS int8
AS 'MODULE_PATHNAME', 'idem_cleanup'
LANGUAGE C VOLATILE PARALLEL UNSAFE COST 10000;

COMMENT ON FUNCTION @extschema@.idem_cleanup(int4) IS
'operator: removes expired claims in this transaction, for about a second and at most batch_size of them (NULL: idem.cleanup_batch_size); returns how many';

CREATE FUNCTION @extschema@.idem__cleanup_step(
	batch_size int4,
	start timestamptz,
	expired_before timestamptz,
	OUT rows_deleted int8,
	OUT more bool,
	OUT next_start timestamptz)
AS 'MODULE_PATHNAME', 'idem__cleanup_step'
LANGUAGE C VOLATILE PARALLEL UNSAFE COST 10000;

COMMENT ON FUNCTION @extschema@.idem__cleanup_step(int4, timestamptz, timestamptz) IS
'for idem_cleanup_all(): one batch, from one low-water mark to the next';

-- expired_before is the time of the call: otherwise it would not end while claims expire.
-- start is the low-water mark, which spares each batch the dead entries of the ones before.
CREATE PROCEDURE @extschema@.idem_cleanup_all(batch_size int4 DEFAULT NULL)
LANGUAGE plpgsql
AS $procedure$
DECLARE
	expired_before pg_catalog.timestamptz := pg_catalog.clock_timestamp();
	start pg_catalog.timestamptz := '-infinity';
	more pg_catalog.bool := true;
	-- by the schema's current name
	step constant pg_catalog.text := pg_catalog.format(
		'SELECT more, next_start FROM %s.idem__cleanup_step($1, $2, $3)',
		(SELECT e.extnamespace::pg_catalog.regnamespace FROM pg_catalog.pg_extension AS e
			WHERE e.extname OPERATOR(pg_catalog.=) 'idem'));
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
		EXECUTE step INTO more, start USING batch_size, start, expired_before;
		COMMIT;
	END LOOP;
END
$procedure$;

COMMENT ON PROCEDURE @extschema@.idem_cleanup_all(int4) IS
'operator: removes all claims that have expired by now, except those that another transaction has locked; commits after each batch';

CREATE FUNCTION @extschema@.idem_start_worker()
RETURNS bool
AS 'MODULE_PATHNAME', 'idem_start_worker'
LANGUAGE C VOLATILE PARALLEL UNSAFE;

COMMENT ON FUNCTION @extschema@.idem_start_worker() IS
'operator: where idem is not preloaded, from PostgreSQL 17 on: has workers clean this database until the server stops; false: they do already';

-- ----- statistics -----

CREATE FUNCTION @extschema@.idem__stat_cleanup_counters(
	OUT rows_deleted int8,
	OUT batches int8,
	OUT last_batch_seconds float8,
	OUT total_batch_seconds float8,
	OUT max_batch_seconds float8,
	OUT oldest_expired_age interval,
	OUT backlog bool,
	OUT rows_unknown int8,
	OUT last_run timestamptz,
	OUT errors int8,
	OUT last_error text,
	OUT last_error_at timestamptz,
	OUT worker_pids int4[],
	OUT stats_reset timestamptz,
	OUT duration_bounds float8[],
	OUT batches_by_duration int8[],
	OUT backlog_since timestamptz,
	OUT backlog_rows_deleted int8,
	OUT backlog_done float8,
	OUT shared_memory text)
AS 'MODULE_PATHNAME', 'idem__stat_cleanup_counters'
LANGUAGE C VOLATILE PARALLEL RESTRICTED;

COMMENT ON FUNCTION @extschema@.idem__stat_cleanup_counters() IS
'for the views idem_stat_cleanup and idem_metrics; duration_bounds: upper bounds in seconds of batches_by_duration';

-- PARALLEL UNSAFE: the first call of a session can have to attach shared memory in a subtransaction,
-- which a parallel plan does not allow.
CREATE FUNCTION @extschema@.idem__stat_cleaning()
RETURNS text
AS 'MODULE_PATHNAME', 'idem__stat_cleaning'
LANGUAGE C VOLATILE PARALLEL UNSAFE;

COMMENT ON FUNCTION @extschema@.idem__stat_cleaning() IS
'for the view idem_stat_cleanup: who cleans this database';

CREATE FUNCTION @extschema@.idem__stat_launcher()
RETURNS int4
AS 'MODULE_PATHNAME', 'idem__stat_launcher'
LANGUAGE C VOLATILE PARALLEL RESTRICTED;

COMMENT ON FUNCTION @extschema@.idem__stat_launcher() IS
'for the view idem_stat_cleanup: pid of the process that starts the workers';

-- Says what will not happen.  A WARNING: CREATE EXTENSION hides every NOTICE of its script.
DO $block$
DECLARE
	cleaning text;
BEGIN
	EXECUTE (SELECT format('SELECT %s.idem__stat_cleaning()', e.extnamespace::regnamespace)
		FROM pg_extension e WHERE e.extname = 'idem') INTO cleaning;
	IF NOT starts_with(cleaning, 'worker') THEN
		RAISE WARNING '%', cleaning
			USING DETAIL = CASE WHEN strpos(cleaning, 'preload') > 0
				AND strpos(cleaning, 'idem_start_worker') = 0
				THEN 'Expired claims stay, and still guard their requests, until somebody calls idem_cleanup_all(). No claim is counted: idem_stat_cleanup, idem_stat_claims and idem_metrics raise an error.'
				ELSE 'Expired claims stay, and still guard their requests, until somebody calls idem_cleanup_all().' END,
			HINT = CASE WHEN strpos(cleaning, 'idem_start_worker') > 0
				THEN 'Call idem_start_worker(), which needs no restart and lasts until the next one; or add idem to shared_preload_libraries and restart the server; or call idem_cleanup_all() from a timer.'
				WHEN strpos(cleaning, 'preload') > 0
				THEN 'Add idem to shared_preload_libraries and restart the server; or call idem_cleanup_all() from a timer.'
				ELSE 'Add the database to idem.databases and reload the configuration; or call idem_cleanup_all() from a timer.' END;
	END IF;
END
$block$;

CREATE VIEW @extschema@.idem_stat_cleanup AS
	SELECT rows_deleted, batches, last_batch_seconds, total_batch_seconds,
		max_batch_seconds, oldest_expired_age, backlog, rows_unknown, last_run, errors,
		last_error, last_error_at, worker_pids, stats_reset,
		CASE WHEN starts_with(c.cleaning, 'worker') AND c.launcher_pid IS NULL
			THEN 'no worker for this database: the launcher does not run' ELSE c.cleaning END AS cleaning,
		c.launcher_pid, backlog_since, backlog_rows_deleted, backlog_done, shared_memory
	FROM @extschema@.idem__stat_cleanup_counters(),
		(SELECT @extschema@.idem__stat_cleaning(), @extschema@.idem__stat_launcher()) AS c (cleaning, launcher_pid);

COMMENT ON VIEW @extschema@.idem_stat_cleanup IS
'statistics of removing expired claims in this database, by the worker and by sessions';
COMMENT ON COLUMN @extschema@.idem_stat_cleanup.rows_deleted IS 'expired claims removed';
COMMENT ON COLUMN @extschema@.idem_stat_cleanup.batches IS 'batches committed';
COMMENT ON COLUMN @extschema@.idem_stat_cleanup.last_batch_seconds IS 'duration of the latest batch';
COMMENT ON COLUMN @extschema@.idem_stat_cleanup.total_batch_seconds IS 'duration of all batches';
COMMENT ON COLUMN @extschema@.idem_stat_cleanup.max_batch_seconds IS 'duration of the longest batch';
COMMENT ON COLUMN @extschema@.idem_stat_cleanup.oldest_expired_age IS 'how long the oldest claim that is still there, except those of rows_unknown, has been expired; 0: none has expired; NULL: no claim is known. After a restart, claims from before it are not known until a batch has looked';
COMMENT ON COLUMN @extschema@.idem_stat_cleanup.backlog IS 'batches have left expired claims behind that can be removed';
COMMENT ON COLUMN @extschema@.idem_stat_cleanup.cleaning IS 'worker; or worker, until the server stops: idem_start_worker() was called; or why there is no worker for this database';
COMMENT ON COLUMN @extschema@.idem_stat_cleanup.shared_memory IS 'preloaded; or made on demand: what was counted before the first call since the server started is missing';
COMMENT ON COLUMN @extschema@.idem_stat_cleanup.launcher_pid IS 'process that starts the workers; NULL: there is none';
COMMENT ON COLUMN @extschema@.idem_stat_cleanup.backlog_since IS 'when the worker met the backlog that it is removing; NULL: it has none. A backlog that only sessions left is not counted';
COMMENT ON COLUMN @extschema@.idem_stat_cleanup.backlog_rows_deleted IS 'claims removed since backlog_since';
COMMENT ON COLUMN @extschema@.idem_stat_cleanup.backlog_done IS 'how much of the backlog of backlog_since is removed, from 0 to 1, measured by the times at which its claims expired';
COMMENT ON COLUMN @extschema@.idem_stat_cleanup.rows_unknown IS 'expired claims that nobody settled, kept by lapsed = unknown; as of the worker''s latest rescan, about once a minute';
COMMENT ON COLUMN @extschema@.idem_stat_cleanup.last_run IS 'end of the latest batch';
COMMENT ON COLUMN @extschema@.idem_stat_cleanup.errors IS 'errors of the worker';
COMMENT ON COLUMN @extschema@.idem_stat_cleanup.last_error IS 'message of the latest error; the log has the rest';
COMMENT ON COLUMN @extschema@.idem_stat_cleanup.worker_pids IS 'workers that run now';
COMMENT ON COLUMN @extschema@.idem_stat_cleanup.stats_reset IS 'time of the latest idem_stat_reset(); NULL: since the server started';

-- As the server's own statistics estimate it; nothing here reads the table.  VACUUM removes a
-- dead row once no transaction can see it any more, so the oldest one holds all dead rows back
-- that were alive when it began.  The table is found as a member of the extension, because a
-- view that names it would keep it from being dropped and restored.  The owner can add tables of
-- that name, but none in the extension's schema: so the view has one row.
CREATE VIEW @extschema@.idem_stat_table AS
	SELECT COALESCE(NULLIF(pg_stat_get_live_tuples(t.oid), 0)::float8, GREATEST(t.reltuples, 0))::int8 AS claims,
		pg_stat_get_dead_tuples(t.oid) AS dead_rows,
		pg_total_relation_size(t.oid) AS bytes,
		pg_indexes_size(t.oid) AS index_bytes,
		GREATEST(pg_stat_get_last_vacuum_time(t.oid), pg_stat_get_last_autovacuum_time(t.oid)) AS last_vacuum,
		o.holder AS held_back_by, o.pid AS held_back_by_pid, o.since AS held_back_since,
		o.transactions AS held_back_transactions
	FROM pg_extension AS x
		JOIN pg_depend AS d ON d.refclassid = 'pg_extension'::regclass::oid
			AND d.refobjid = x.oid AND d.deptype = 'e'
			AND d.classid = 'pg_class'::regclass::oid
		JOIN pg_class AS t ON t.oid = d.objid AND t.relname = 'idem_claims'
			AND t.relnamespace = x.extnamespace AND t.relkind = 'r'
		LEFT JOIN LATERAL (
			SELECT h.holder, h.pid, h.since, h.transactions
			FROM (
				SELECT format(CASE WHEN a.datid IS NULL THEN 'standby of process %s' ELSE 'transaction of process %s' END, a.pid),
					a.pid, a.xact_start,
					GREATEST(age(a.backend_xmin), age(a.backend_xid))
				FROM pg_stat_activity AS a
				WHERE (a.datid IS NULL OR a.datname = current_database())
					AND a.pid <> pg_backend_pid()
					AND (a.backend_xmin IS NOT NULL OR a.backend_xid IS NOT NULL)
					AND NOT EXISTS (SELECT FROM pg_stat_progress_vacuum AS v WHERE v.pid = a.pid)
				UNION ALL
				SELECT format('prepared transaction "%s"', p.gid), NULL, p.prepared, age(p.transaction)
				FROM pg_prepared_xacts AS p
				WHERE p.database = current_database()
				UNION ALL
				SELECT format('replication slot "%s"', s.slot_name), s.active_pid, NULL, age(s.xmin)
				FROM pg_replication_slots AS s
				WHERE s.xmin IS NOT NULL
			) AS h (holder, pid, since, transactions)
			ORDER BY h.transactions DESC, h.since NULLS FIRST
			LIMIT 1
		) AS o ON true
	WHERE x.extname = 'idem';

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

CREATE FUNCTION @extschema@.idem__unsettled_claims(
	OUT scope text,
	OUT user_id text,
	OUT request_id text,
	OUT status text,
	OUT lease_until timestamptz,
	OUT expires_at timestamptz)
RETURNS SETOF record
AS 'MODULE_PATHNAME', 'idem__unsettled_claims'
LANGUAGE C STABLE PARALLEL RESTRICTED ROWS 100;

COMMENT ON FUNCTION @extschema@.idem__unsettled_claims() IS
'for the view idem_unsettled';

CREATE VIEW @extschema@.idem_unsettled AS
	SELECT scope, user_id, request_id, status, lease_until, expires_at
	FROM @extschema@.idem__unsettled_claims()
	ORDER BY lease_until NULLS FIRST;

COMMENT ON VIEW @extschema@.idem_unsettled IS
'requests in progress under a lease, and those whose lease lapsed; the oldest lease first';
COMMENT ON COLUMN @extschema@.idem_unsettled.status IS 'live: a holder is at work; lapsed: the next idem_lease() takes it over; unknown: somebody has to find out';

CREATE FUNCTION @extschema@.idem__held_keys(
	OUT scope text,
	OUT user_id text,
	OUT request_id text,
	OUT pid int4,
	OUT gid text,
	OUT since timestamptz,
	OUT lease_until timestamptz,
	OUT waiters int4)
RETURNS SETOF record
AS 'MODULE_PATHNAME', 'idem__held_keys'
LANGUAGE C VOLATILE PARALLEL RESTRICTED ROWS 100;

COMMENT ON FUNCTION @extschema@.idem__held_keys() IS
'for the view idem_holders: one row for each lease, and one for each waiter';

-- Waiters of a lease that ended a moment ago have nobody to wait for.
CREATE VIEW @extschema@.idem_holders AS
	SELECT h.scope, h.user_id, h.request_id, max(h.pid) AS pid, max(h.gid) AS gid,
		min(h.since) AS since, max(h.lease_until) AS lease_until, sum(h.waiters) AS waiters
	FROM @extschema@.idem__held_keys() AS h
	GROUP BY h.scope, h.user_id, h.request_id
	HAVING count(h.pid) > 0 OR count(h.gid) > 0
		OR count(h.lease_until) > 0
	ORDER BY min(h.since), max(h.lease_until);

COMMENT ON VIEW @extschema@.idem_holders IS
'who holds the requests that are waited for, or that have a live lease';
COMMENT ON COLUMN @extschema@.idem_holders.pid IS 'process whose transaction holds the request';
COMMENT ON COLUMN @extschema@.idem_holders.gid IS 'prepared transaction that holds it';
COMMENT ON COLUMN @extschema@.idem_holders.since IS 'when that transaction began, or was prepared';
COMMENT ON COLUMN @extschema@.idem_holders.lease_until IS 'end of the lease that holds it';
COMMENT ON COLUMN @extschema@.idem_holders.waiters IS 'how many processes wait for it; NULL: idem is not preloaded, and nobody knows';

CREATE FUNCTION @extschema@.idem__stat_claims_counters(
	OUT claimed int8,
	OUT completed int8,
	OUT failed int8,
	OUT in_progress int8,
	OUT timed_out int8,
	OUT "unknown" int8,
	OUT mismatch int8,
	OUT stale int8,
	OUT invalid int8,
	OUT waits int8,
	OUT wait_seconds float8,
	OUT reclaims int8,
	OUT lost_leases int8,
	OUT healed int8,
	OUT stats_reset timestamptz)
AS 'MODULE_PATHNAME', 'idem__stat_claims_counters'
LANGUAGE C VOLATILE PARALLEL RESTRICTED;

COMMENT ON FUNCTION @extschema@.idem__stat_claims_counters() IS
'for the views idem_stat_claims and idem_metrics';

CREATE VIEW @extschema@.idem_stat_claims AS
	SELECT claimed, completed, failed, in_progress, timed_out, "unknown",
		mismatch, stale, invalid, waits, wait_seconds, reclaims, lost_leases,
		healed, stats_reset
	FROM @extschema@.idem__stat_claims_counters();

COMMENT ON VIEW @extschema@.idem_stat_claims IS
'answers of the claim calls of this database; claimed, reclaims and healed are counted at commit';
COMMENT ON COLUMN @extschema@.idem_stat_claims.waits IS 'calls that waited for another holder';
COMMENT ON COLUMN @extschema@.idem_stat_claims.wait_seconds IS 'how long they waited';
COMMENT ON COLUMN @extschema@.idem_stat_claims.reclaims IS 'requests taken over after their lease lapsed, or after they failed';
COMMENT ON COLUMN @extschema@.idem_stat_claims.lost_leases IS 'calls with the token of a lost lease';
COMMENT ON COLUMN @extschema@.idem_stat_claims.healed IS 'leases settled by idem_heal()';

CREATE FUNCTION @extschema@.idem__stat_scopes_counters(
	OUT scope text,
	OUT claimed int8,
	OUT completed int8,
	OUT failed int8,
	OUT in_progress int8,
	OUT timed_out int8,
	OUT "unknown" int8,
	OUT mismatch int8,
	OUT stale int8,
	OUT invalid int8)
RETURNS SETOF record
AS 'MODULE_PATHNAME', 'idem__stat_scopes_counters'
LANGUAGE C VOLATILE PARALLEL RESTRICTED ROWS 33;

COMMENT ON FUNCTION @extschema@.idem__stat_scopes_counters() IS
'for the views idem_stat_scopes and idem_metrics';

-- The number of claims comes from the sample that ANALYZE takes, in which the server notes the
-- most common values of a column and their shares (slot kind 1).
CREATE VIEW @extschema@.idem_stat_scopes AS
	WITH common (scope, share) AS (
		SELECT v.scope, v.share
		FROM pg_extension AS x
			JOIN pg_depend AS d ON d.refclassid = 'pg_extension'::regclass::oid
				AND d.refobjid = x.oid AND d.deptype = 'e'
				AND d.classid = 'pg_class'::regclass::oid
			JOIN pg_class AS t ON t.oid = d.objid AND t.relname = 'idem_claims'
				AND t.relnamespace = x.extnamespace AND t.relkind = 'r'
			JOIN pg_statistic AS s ON s.starelid = t.oid
			JOIN pg_attribute AS a ON a.attrelid = s.starelid AND a.attnum = s.staattnum,
			LATERAL (VALUES (s.stakind1, s.stavalues1::text, s.stanumbers1), (s.stakind2, s.stavalues2::text, s.stanumbers2),
				(s.stakind3, s.stavalues3::text, s.stanumbers3)) AS slot (kind, "values", shares),
			LATERAL ROWS FROM (unnest(slot."values"::text[]), unnest(slot.shares)) AS v (scope, share)
		WHERE x.extname = 'idem'
			AND a.attname = 'scope' AND NOT s.stainherit AND slot.kind = 1
		ORDER BY v.share DESC LIMIT 32
	)
	SELECT u.scope, sum(u.claims)::int8 AS claims,
		sum(u.claimed)::int8 AS claimed, sum(u.completed)::int8 AS completed,
		sum(u.failed)::int8 AS failed, sum(u.in_progress)::int8 AS in_progress,
		sum(u.timed_out)::int8 AS timed_out, sum(u."unknown")::int8 AS "unknown",
		sum(u.mismatch)::int8 AS mismatch, sum(u.stale)::int8 AS stale,
		sum(u.invalid)::int8 AS invalid
	FROM (
		SELECT e.scope, NULL::int8 AS claims, e.claimed, e.completed, e.failed, e.in_progress, e.timed_out, e."unknown", e.mismatch, e.stale, e.invalid
		FROM @extschema@.idem__stat_scopes_counters() AS e
		UNION ALL
		SELECT c.scope, c.share * t.claims, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL
		FROM (SELECT k.scope, k.share::float8 FROM common AS k
			UNION ALL
			SELECT NULL, GREATEST(1 - COALESCE(sum(k.share::float8), 0), 0) FROM common AS k) AS c (scope, share),
			@extschema@.idem_stat_table AS t
	) AS u
	GROUP BY u.scope
	ORDER BY u.scope;

COMMENT ON VIEW @extschema@.idem_stat_scopes IS
'claims and answers by scope: up to 32 scopes for each, and a row without a scope for all others';
COMMENT ON COLUMN @extschema@.idem_stat_scopes.scope IS 'NULL: all scopes that have no row for this';
COMMENT ON COLUMN @extschema@.idem_stat_scopes.claims IS 'claims in the table, an estimate of the latest ANALYZE; NULL: contained in the row without a scope';
COMMENT ON COLUMN @extschema@.idem_stat_scopes.claimed IS 'answers, by outcome; NULL: contained in the row without a scope';

-- No rows if shared memory has no room for the statistics of this database: then all counters
-- are NULL.
CREATE VIEW @extschema@.idem_metrics AS
	SELECT m.name,
		jsonb_strip_nulls(jsonb_build_object('database', current_database(), 'le', m.le, 'outcome', m.outcome, 'scope', m.scope)) AS labels,
		m.type, m.help, m.value
	FROM @extschema@.idem__stat_cleanup_counters() AS cleanup, @extschema@.idem__stat_claims_counters() AS claims,
		@extschema@.idem_stat_table AS size,
		(SELECT @extschema@.idem__stat_launcher(), @extschema@.idem__stat_cleaning()) AS standing (launcher_pid, cleaning),
	LATERAL (
		SELECT n.name, n.le, n.outcome, NULL, n.type, n.help, n.value FROM (
		VALUES ('idempotency_cleanup_rows_total', NULL, NULL, 'counter',
			'Expired claims that were removed.', cleanup.rows_deleted::float8)
		UNION ALL
		SELECT 'idempotency_cleanup_batch_duration_seconds_' || d.sample, d.le, NULL, 'histogram',
			'Duration of a batch of the cleanup, its commit included.', d.value
		FROM (
			SELECT 'bucket', replace(b.bound::numeric::text, 'Infinity', '+Inf'),
				(sum(b.batches) OVER (ORDER BY b.bound))::float8
			FROM ROWS FROM (unnest(cleanup.duration_bounds), unnest(cleanup.batches_by_duration)) AS b (bound, batches)
			UNION ALL VALUES
				('sum', NULL, cleanup.total_batch_seconds),
				('count', NULL, cleanup.batches)
		) AS d (sample, le, value)
		UNION ALL VALUES
			('idempotency_cleanup_errors_total', NULL, NULL, 'counter',
				'Errors of the cleanup worker.', cleanup.errors),
			('idempotency_cleanup_backlog', NULL, NULL, 'gauge',
				'1 if batches have left expired claims behind that can be removed.', cleanup.backlog::int4),
			('idempotency_unknown_claims', NULL, NULL, 'gauge',
				'Expired claims whose lease lapsed unsettled, kept until somebody finds out.', cleanup.rows_unknown),
			('idempotency_oldest_expired_age_seconds', NULL, NULL, 'gauge',
				'How long the oldest claim that is still there, except unknown ones, has been expired; 0 if none is known.',
				COALESCE(date_part('epoch', cleanup.oldest_expired_age), 0))
		UNION ALL
		SELECT 'idempotency_claims_total', NULL, o.outcome, 'counter', 'Answers of claim calls, by outcome.', o.number
		FROM (VALUES ('claimed', claims.claimed), ('completed', claims.completed), ('failed', claims.failed),
			('in_progress', claims.in_progress), ('timed_out', claims.timed_out), ('unknown', claims."unknown"),
			('mismatch', claims.mismatch), ('stale', claims.stale), ('invalid', claims.invalid)) AS o (outcome, number)
		UNION ALL VALUES
			('idempotency_wait_seconds_sum', NULL, NULL, 'summary',
				'Time that claim calls waited for another holder.', claims.wait_seconds),
			('idempotency_wait_seconds_count', NULL, NULL, 'summary',
				'Time that claim calls waited for another holder.', claims.waits),
			('idempotency_reclaims_total', NULL, NULL, 'counter',
				'Requests that were taken over: a lease that lapsed, or a failed one.', claims.reclaims),
			('idempotency_lost_leases_total', NULL, NULL, 'counter',
				'Calls with the token of a lease that is not held any more.', claims.lost_leases),
			('idempotency_healed_total', NULL, NULL, 'counter',
				'Leases that were settled by somebody who found the work done.', claims.healed),
			('idempotency_cleanup_last_run_age_seconds', NULL, NULL, 'gauge',
				'How long ago the latest batch of the cleanup ended.',
				date_part('epoch', clock_timestamp() - cleanup.last_run)),
			('idempotency_cleanup_backlog_done_ratio', NULL, NULL, 'gauge',
				'Part of the time in which the backlog expired whose claims are removed; 1 without a backlog.',
				COALESCE(cleanup.backlog_done, 1)),
			('idempotency_cleanup_launcher_up', NULL, NULL, 'gauge',
				'1 if the process runs that starts the workers. Not where idem is not preloaded and no worker was started.',
				CASE WHEN standing.launcher_pid IS NOT NULL OR cleanup.shared_memory = 'preloaded'
					THEN (standing.launcher_pid IS NOT NULL)::int4 END),
			('idempotency_cleanup_active', NULL, NULL, 'gauge',
				'1 if somebody cleans this database: a worker, or a session in the last hour.',
				((starts_with(standing.cleaning, 'worker') AND standing.launcher_pid IS NOT NULL)
					OR COALESCE(cleanup.last_run > (clock_timestamp() - interval '1 hour'), false))::int4),
			('idempotency_claims', NULL, NULL, 'gauge',
				'Claims in the table, an estimate.', size.claims),
			('idempotency_claims_dead_rows', NULL, NULL, 'gauge',
				'Dead rows of the table, an estimate.', size.dead_rows),
			('idempotency_claims_bytes', NULL, NULL, 'gauge',
				'Size of the table with its indexes.', size.bytes),
			('idempotency_dead_rows_held_seconds', NULL, NULL, 'gauge',
				'Age of the oldest transaction that keeps VACUUM from removing dead rows.',
				CASE WHEN size.held_back_by IS NULL THEN 0
					ELSE date_part('epoch', clock_timestamp() - size.held_back_since) END),
			('idempotency_dead_rows_held_transactions', NULL, NULL, 'gauge',
				'Transactions of the server since what keeps VACUUM from removing dead rows began.',
				COALESCE(size.held_back_transactions, 0))
		) AS n (name, le, outcome, type, help, value)
		UNION ALL
		-- A real scope of such a name would be counted with it: a sample must not come twice.
		SELECT 'idempotency_scope_' || a.sample, NULL, a.outcome,
			CASE s.scope WHEN '' THEN '(default)' ELSE COALESCE(s.scope, '(other)') END, a.type, a.help, sum(a.value)
		FROM @extschema@.idem_stat_scopes AS s,
		LATERAL (
			VALUES ('claims', NULL, 'gauge', 'Claims in the table by scope, an estimate.', s.claims)
			UNION ALL
			SELECT 'answers_total', o.outcome, 'counter', 'Answers of claim calls, by scope and outcome.', o.number
			FROM (VALUES ('claimed', s.claimed), ('completed', s.completed), ('failed', s.failed),
				('in_progress', s.in_progress), ('timed_out', s.timed_out), ('unknown', s."unknown"),
				('mismatch', s.mismatch), ('stale', s.stale), ('invalid', s.invalid)) AS o (outcome, number)
		) AS a (sample, outcome, type, help, value)
		GROUP BY 1, 3, 4, 5, 6
	) AS m (name, le, outcome, scope, type, help, value)
	WHERE cleanup.batches IS NOT NULL AND m.value IS NOT NULL;

COMMENT ON VIEW @extschema@.idem_metrics IS
'the statistics of this database as samples of Prometheus metrics; durations in seconds';
COMMENT ON COLUMN @extschema@.idem_metrics.type IS 'type of the metric: a histogram has samples _bucket, _sum and _count';

CREATE FUNCTION @extschema@.idem_stat_reset()
RETURNS void
AS 'MODULE_PATHNAME', 'idem_stat_reset'
LANGUAGE C VOLATILE PARALLEL RESTRICTED;

COMMENT ON FUNCTION @extschema@.idem_stat_reset() IS
'operator: zeroes the statistics of this database';

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
	ids record;
	call text;
	-- with quote_all_identifiers, too
	ids_of_original constant text := '^"?user_id"? "?text"?, "?request_id"? "?text"?';
BEGIN
	FOR original IN
		SELECT e.extnamespace::regnamespace AS schema, p.proname, pg_get_function_arguments(p.oid) AS arguments,
			pg_get_function_identity_arguments(p.oid) AS types,
			pg_get_function_result(p.oid) AS result, p.prorettype, p.procost, p.prorows, p.prosupport,
			CASE p.provolatile WHEN 's' THEN 'STABLE' ELSE 'VOLATILE' END AS volatility,
			CASE p.proparallel WHEN 'r' THEN 'RESTRICTED' ELSE 'UNSAFE' END AS parallel,
			(SELECT string_agg(', $' || n::text, '' ORDER BY n)
				FROM generate_series(3, p.pronargs) AS n) AS further
		FROM pg_proc p
			JOIN pg_depend d ON d.classid = 'pg_proc'::regclass::oid
				AND d.objid = p.oid
				AND d.refclassid = 'pg_extension'::regclass::oid
				AND d.deptype = 'e'
			JOIN pg_extension e ON e.oid = d.refobjid
		WHERE e.extname = 'idem'
			AND NOT starts_with(p.proname::text, 'idem__')
			AND pg_get_function_arguments(p.oid) ~ ids_of_original
	LOOP
		call := format('%s.%I($1::text, $2::text%s)', original.schema, original.proname, original.further);
		FOR ids IN
			VALUES ('user_id text, request_uuid uuid'),
				('user_uuid uuid, request_id text'),
				('user_uuid uuid, request_uuid uuid'),
				('user_number int8, request_id text'),
				('user_number int8, request_uuid uuid')
		LOOP
			EXECUTE format('CREATE FUNCTION %s.%I(%s) RETURNS %s %s PARALLEL %s COST %s %s %s LANGUAGE %s',
				original.schema, original.proname,
				regexp_replace(original.arguments, ids_of_original, ids.column1),
				original.result, original.volatility, original.parallel, original.procost,
				CASE WHEN original.prorows > 0 THEN 'ROWS ' || original.prorows::text END,
				CASE WHEN original.prosupport <> 0 THEN 'SUPPORT ' || original.prosupport::text END,
				CASE WHEN original.prorettype <> 'record'::regtype::oid
					THEN format('sql RETURN %s', call)
				-- not inlined: a claim is in C then, see src/protocol/ids.c
				WHEN original.prosupport <> 0
					THEN format('C AS ''MODULE_PATHNAME'', ''%s_ids''', original.proname)
				ELSE format('sql BEGIN ATOMIC SELECT * FROM %s; END', call) END);
			EXECUTE format('COMMENT ON FUNCTION %s.%I(%s) IS %L', original.schema, original.proname,
				regexp_replace(original.types, ids_of_original, ids.column1),
				format('%s(user_id text, request_id text, ...) for ids of other types', original.proname));
		END LOOP;
	END LOOP;
END
$block$;

-- ----- rights -----

-- Runs with the caller's rights.  The owner of the extension and a superuser may grant all
-- that is granted here.
CREATE FUNCTION @extschema@.idem__change_rights(
	role regrole,
	privileges text,
	command text)
RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
	app constant text[] := ARRAY['idem_call', 'idem_claim', 'idem_try_claim', 'idem_lease', 'idem_claim_many',
		'idem_complete', 'idem_fail', 'idem_extend', 'idem_release', 'idem_fence',
		'idem_heal', 'idem_result', 'idem_status', 'idem_lookup', 'idem_fingerprint',
		'idem_skip_duplicates'];
	operator constant text[] := ARRAY['idem_result', 'idem_status', 'idem_lookup',
		'idem_lapsed', 'idem_forget', 'idem_erase', 'idem__erase', 'idem_heal', 'idem_cleanup', 'idem_cleanup_all', 'idem__cleanup_step',
		'idem_start_worker',
		'idem_stat_reset', 'idem__stat_cleanup_counters', 'idem__stat_cleaning', 'idem__stat_launcher',
		'idem__stat_claims_counters', 'idem__stat_scopes_counters',
		'idem__unsettled_claims', 'idem__held_keys'];
	-- all but the token: only its holder may know it
	columns constant text := 'expires_at, lease_until, state, request_id, user_id, scope, fingerprint, result, progress';
	-- all but guarded_since, which a trigger sets
	policy constant text := 'scope, ttl, lease, lease_max, failed, lapsed, expired, key_time, result_max_bytes';
	schema regnamespace;
	routines regprocedure[];
	routine regprocedure;
	grantors text;
BEGIN
	IF role IS NULL OR NOT EXISTS (SELECT FROM pg_roles WHERE oid = role) OR privileges IS NULL OR privileges NOT IN ('app', 'operator')
		OR command IS NULL OR command NOT IN ('GRANT %s TO %s', 'REVOKE %s FROM %s') THEN
		RAISE EXCEPTION 'rights are granted to, and revoked from, a role as ''app'' or ''operator'''
			USING ERRCODE = 'invalid_parameter_value',
			HINT = 'app: claim and settle requests; operator: policy, cleanup, statistics.';
	END IF;
	SELECT e.extnamespace, array_agg(p.oid::regprocedure) INTO schema, routines
	FROM pg_extension e
		JOIN pg_depend d ON d.refclassid = 'pg_extension'::regclass AND d.refobjid = e.oid AND d.deptype = 'e'
		JOIN pg_proc p ON d.classid = 'pg_proc'::regclass AND d.objid = p.oid
	WHERE e.extname = 'idem' AND p.proname = ANY (CASE privileges WHEN 'app' THEN app ELSE operator END)
		-- not what somebody else has added to the extension
		AND p.proowner = (SELECT c.relowner FROM pg_class c WHERE c.relnamespace = e.extnamespace AND c.relname = 'idem_claims')
	GROUP BY e.oid;

	IF command LIKE 'GRANT%' AND NOT has_schema_privilege(role, schema, 'USAGE') THEN
		IF has_schema_privilege(schema, 'USAGE WITH GRANT OPTION') THEN
			EXECUTE format('GRANT USAGE ON SCHEMA %s TO %s', schema, role);
		ELSE
			RAISE WARNING 'role % cannot use schema %', role, schema
				USING HINT = 'The owner of the schema has to grant USAGE on it.';
		END IF;
	END IF;

	FOREACH routine IN ARRAY routines LOOP
		EXECUTE format(command, format('EXECUTE ON ROUTINE %s', routine), role);
	END LOOP;
	EXECUTE format(command, format('USAGE ON TYPE %1$s.idem_state, %1$s.idem_outcome', schema), role);

	IF privileges = 'operator' THEN
		EXECUTE format(command, format('SELECT (%s) ON %s.idem_claims', columns, schema), role);
		EXECUTE format(command, format('SELECT, INSERT (%1$s), UPDATE (%1$s), DELETE ON %2$s.idem_scopes', policy, schema), role);
		EXECUTE format(command,
			format('SELECT ON %1$s.idem_stat_cleanup, %1$s.idem_stat_claims, %1$s.idem_stat_scopes, %1$s.idem_stat_table, %1$s.idem_metrics, %1$s.idem_unsettled, %1$s.idem_holders', schema), role);
	END IF;

	-- REVOKE only revokes what the current role granted, and says nothing about the rest.
	IF command LIKE 'REVOKE%' THEN
		SELECT string_agg(DISTINCT a.grantor::regrole::text, ', ') INTO grantors
		FROM pg_proc p, aclexplode(p.proacl) a
		WHERE p.oid = ANY (routines) AND a.grantee = role;
		IF grantors IS NOT NULL THEN
			RAISE WARNING 'role % keeps rights that % granted', role, grantors
				USING HINT = 'Run idem_revoke() as the role that granted them.';
		END IF;
	END IF;
END
$function$;

COMMENT ON FUNCTION @extschema@.idem__change_rights(regrole, text, text) IS
'for idem_grant() and idem_revoke()';

CREATE FUNCTION @extschema@.idem_grant(role regrole, privileges text)
RETURNS void
LANGUAGE sql VOLATILE
BEGIN ATOMIC
	SELECT @extschema@.idem__change_rights(role, privileges, 'GRANT %s TO %s'::text);
END;

COMMENT ON FUNCTION @extschema@.idem_grant(regrole, text) IS
'grants a role what an application (app) or an operator (operator) needs, as far as the caller may grant it';

CREATE FUNCTION @extschema@.idem_revoke(role regrole, privileges text)
RETURNS void
LANGUAGE sql VOLATILE
BEGIN ATOMIC
	SELECT @extschema@.idem__change_rights(role, privileges, 'REVOKE %s FROM %s'::text);
END;

COMMENT ON FUNCTION @extschema@.idem_revoke(regrole, text) IS
'revokes what the caller granted by idem_grant(); app and operator share some functions';

-- By now, default privileges (ALTER DEFAULT PRIVILEGES) may have granted rights to anybody,
-- and PostgreSQL's own defaults have granted some to PUBLIC.  First revoke everything from
-- all roles but the owner, then grant what follows.
DO $block$
DECLARE
	member record;
BEGIN
	FOR member IN
		SELECT o.object, o.kind, a.grantee
		FROM pg_extension e
			JOIN pg_depend d ON d.refclassid = 'pg_extension'::regclass::oid
				AND d.refobjid = e.oid AND d.deptype = 'e'
			JOIN (
				SELECT 'pg_class'::regclass::oid AS class, c.oid, c.oid::regclass::text AS object,
					CASE WHEN c.relkind = 'S'::"char" THEN 'SEQUENCE' ELSE 'TABLE' END AS kind, c.relowner AS owner, c.relacl AS acl
				FROM pg_class c
				UNION ALL
				SELECT 'pg_proc'::regclass::oid, p.oid, p.oid::regprocedure::text,
					'ROUTINE', p.proowner, COALESCE(p.proacl, acldefault('f', p.proowner))
				FROM pg_proc p
				UNION ALL
				SELECT 'pg_type'::regclass::oid, t.oid, t.oid::regtype::text,
					'TYPE', t.typowner, COALESCE(t.typacl, acldefault('T', t.typowner))
				FROM pg_type t WHERE t.typtype = 'e'
			) o ON o.class = d.classid AND o.oid = d.objid,
			aclexplode(o.acl) a
		WHERE e.extname = 'idem' AND a.grantee <> o.owner
	LOOP
		EXECUTE format('REVOKE ALL ON %s %s FROM %s', member.kind, member.object,
			CASE WHEN member.grantee = '0'::oid THEN 'PUBLIC'
				ELSE member.grantee::regrole::text END);
	END LOOP;
END
$block$;

-- The owner of the extension gets what it needs to dump, to restore, to grant, and to lock
-- the tables for a move to the portable edition.  A superuser who restores a dump becomes the
-- owner of the extension, in place of the role that had installed idem into its own schema
-- and had granted rights.  So where a superuser owns the extension, the owner of the schema
-- gets the same rights.  (It could drop everything in the schema anyway.)
--
-- The trigger functions of idem_scopes are left out: their triggers need no such right, and no
-- other table may use them.
DO $block$
DECLARE
	me pg_extension;
	schema regnamespace;
	owner regrole;
	routine regprocedure;
BEGIN
	SELECT e.* INTO me FROM pg_extension e WHERE e.extname = 'idem';
	schema := me.extnamespace;
	FOR owner IN
		SELECT me.extowner
		UNION
		SELECT n.nspowner
		FROM pg_namespace n
			JOIN pg_database d ON d.datname = current_database()
			JOIN pg_roles person ON person.oid =
				CASE WHEN n.nspowner = 'pg_database_owner'::regrole::oid THEN d.datdba ELSE n.nspowner END
			JOIN pg_roles installer ON installer.oid = me.extowner
		WHERE n.oid = me.extnamespace
			AND installer.rolsuper AND NOT person.rolsuper
	LOOP
		EXECUTE format('GRANT SELECT, INSERT ON %1$s.idem_claims TO %2$s WITH GRANT OPTION', schema, owner);
		EXECUTE format('GRANT TRUNCATE ON %1$s.idem_claims TO %2$s', schema, owner);
		EXECUTE format('GRANT SELECT, INSERT, UPDATE, DELETE ON %1$s.idem_scopes TO %2$s WITH GRANT OPTION', schema, owner);
		EXECUTE format('GRANT SELECT, UPDATE, USAGE ON SEQUENCE %1$s.idem_token_seq TO %2$s WITH GRANT OPTION', schema, owner);
		EXECUTE format('GRANT SELECT ON %1$s.idem_stat_cleanup, %1$s.idem_stat_claims, %1$s.idem_stat_scopes, %1$s.idem_stat_table, %1$s.idem_metrics, %1$s.idem_unsettled, %1$s.idem_holders TO %2$s WITH GRANT OPTION', schema, owner);
		EXECUTE format('GRANT USAGE ON TYPE %1$s.idem_state, %1$s.idem_outcome TO %2$s WITH GRANT OPTION', schema, owner);
		FOR routine IN
			SELECT p.oid
			FROM pg_depend d
				JOIN pg_extension e ON d.refobjid = e.oid
				JOIN pg_proc p ON d.objid = p.oid
			WHERE e.extname = 'idem'
				AND d.refclassid = 'pg_extension'::regclass::oid
				AND d.classid = 'pg_proc'::regclass::oid
				AND d.deptype = 'e'
				AND (p.prorettype <> 'trigger'::regtype::oid
					OR p.proname = 'idem_skip_duplicates')
		LOOP
			EXECUTE format('GRANT EXECUTE ON ROUTINE %s TO %s WITH GRANT OPTION', routine, owner);
		END LOOP;
	END LOOP;
	-- Their rows belong in a dump.
	PERFORM pg_extension_config_dump(format('%s.idem_claims', schema)::regclass, '');
	PERFORM pg_extension_config_dump(format('%s.idem_scopes', schema)::regclass, '');
	PERFORM pg_extension_config_dump(format('%s.idem_token_seq', schema)::regclass, '');
END
$block$;

-- A function in a view is called with the rights of the role that reads the view, so that
-- role needs both.
GRANT SELECT ON @extschema@.idem_stat_cleanup, @extschema@.idem_stat_claims, @extschema@.idem_stat_scopes,
	@extschema@.idem_stat_table, @extschema@.idem_metrics,
	@extschema@.idem_unsettled, @extschema@.idem_holders TO pg_monitor;
GRANT EXECUTE ON FUNCTION
	@extschema@.idem__stat_cleanup_counters(),
	@extschema@.idem__stat_cleaning(),
	@extschema@.idem__stat_launcher(),
	@extschema@.idem__stat_claims_counters(),
	@extschema@.idem__stat_scopes_counters(),
	@extschema@.idem__unsettled_claims(),
	@extschema@.idem__held_keys()
TO pg_monitor;

-- If it names no tablespace, it may stay empty.
SELECT set_config('default_tablespace', t.spcname::text, true)
FROM pg_tablespace t
WHERE t.spcname::text = current_setting('idem_install.tablespace');
