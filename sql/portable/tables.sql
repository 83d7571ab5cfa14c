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
