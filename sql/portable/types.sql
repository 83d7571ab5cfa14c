-- ----- types of this edition -----

-- Collation "C" as in the table: otherwise a collation of the caller could decide which keys are equal.
CREATE TYPE @extschema@.idem__key AS (user_id text COLLATE "C", request_id text COLLATE "C", scope text COLLATE "C");

-- Whether a row of idem_claims, of which this gets three columns, is that of the key.  The planner inlines it,
-- and then finds the primary key.
CREATE FUNCTION @extschema@.idem__has_key(user_id text, request_id text, scope text, key @extschema@.idem__key)
RETURNS boolean LANGUAGE sql IMMUTABLE
AS $$ SELECT user_id = (key).user_id AND request_id = (key).request_id AND scope = (key).scope $$;

-- The answer of a claim, or of one look at its key.  Of a look: outcome NULL and lease_until, another
-- holder has a live lease until then; all NULL, look again.
CREATE TYPE @extschema@.idem__answer AS (
	outcome text, result jsonb, progress jsonb, token int8, expires_at timestamptz, lease_until timestamptz);

-- A row of idem_claims.  No function takes or returns the row type of the table: Citus drops and makes a
-- table again to change its shards, and the functions would go with it.
CREATE TYPE @extschema@.idem__claim AS (
	expires_at timestamptz, lease_until timestamptz, token int8, state @extschema@.idem_state,
	request_id text COLLATE "C", user_id text COLLATE "C", scope text COLLATE "C",
	fingerprint bytea, result jsonb, progress jsonb);

-- The policy of a scope.  has_settings: false if the snapshot sees no row of idem_settings.  undeclared: no
-- request can be claimed in the scope.
CREATE TYPE @extschema@.idem__scope_policy AS (
	ttl interval, lease interval, lease_max interval, result_max_bytes int4,
	retryable boolean, unknown boolean, reclaim boolean, uuidv7 boolean,
	guarded_since timestamptz, has_settings boolean, undeclared boolean);
