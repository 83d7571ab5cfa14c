-- ----- claims -----

-- Columns that a marker does not need are NULL and take no room.  Collation "C": an update of the system's collations
-- must not corrupt the index that prevents a second execution.  The request id leads the key, so that time-ordered ids
-- append on the right.  The C edition knows the columns by their positions.
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
	-- Rows come and go at a high rate: the number of dead ones counts rather than their share of the table.
	autovacuum_vacuum_scale_factor = 0.02,
	autovacuum_vacuum_threshold = 5000,
	autovacuum_vacuum_insert_scale_factor = 0.1,
	autovacuum_analyze_scale_factor = 0.1,
	autovacuum_vacuum_cost_delay = 0
);

-- The times are whole seconds: btree deduplicates all entries of a second.
CREATE INDEX idem_claims_expires_at_idx ON @extschema@.idem_claims (expires_at);

-- Leases in progress are few.  Their end is not in the index: with it, idem_extend() could not update in place (HOT).
CREATE INDEX idem_claims_unsettled_idx ON @extschema@.idem_claims (scope)
	WHERE state = 'in_progress'::@extschema@.idem_state;

COMMENT ON TABLE @extschema@.idem_claims IS 'requests that have been executed, or are being executed under a lease';
COMMENT ON COLUMN @extschema@.idem_claims.expires_at IS 'the claim is remembered at least until this time';
COMMENT ON COLUMN @extschema@.idem_claims.lease_until IS 'NULL for a transactional claim, and for a healed lease';
COMMENT ON COLUMN @extschema@.idem_claims.token IS 'fencing token; NULL for a transactional claim';
COMMENT ON COLUMN @extschema@.idem_claims.result IS 'response; of a failed request the error; NULL for a marker';

CREATE SEQUENCE @extschema@.idem_token_seq AS int8 CACHE 1;
COMMENT ON SEQUENCE @extschema@.idem_token_seq IS 'fencing tokens';

-- ----- scopes -----

-- The names of constraints are what an operator reads in an error.
CREATE TABLE @extschema@.idem_scopes (
	scope text COLLATE "C" PRIMARY KEY CHECK (octet_length(scope) <= 255),
	ttl interval CONSTRAINT "ttl must be positive, at most 36500 days, without months" CHECK (
		ttl > interval '0' AND ttl <= interval '36500 days'
		AND date_part('year', ttl) = 0 AND date_part('month', ttl) = 0),
	lease interval CONSTRAINT "lease must be positive, at most 36500 days, without months" CHECK (
		lease > interval '0' AND lease <= interval '36500 days'
		AND date_part('year', lease) = 0 AND date_part('month', lease) = 0),
	lease_max interval CONSTRAINT "lease_max must be positive, at most 36500 days, without months" CHECK (
		lease_max > interval '0' AND lease_max <= interval '36500 days'
		AND date_part('year', lease_max) = 0 AND date_part('month', lease_max) = 0),
	failed text NOT NULL DEFAULT 'terminal' CONSTRAINT "failed must be terminal or retryable"
		CHECK (failed = 'terminal' OR failed = 'retryable'),
	lapsed text NOT NULL DEFAULT 'reclaim' CONSTRAINT "lapsed must be reclaim or unknown"
		CHECK (lapsed = 'reclaim' OR lapsed = 'unknown'),
	expired text NOT NULL DEFAULT 'protect' CONSTRAINT "expired must be protect or reclaim"
		CHECK (expired = 'protect' OR expired = 'reclaim'),
	key_time text NOT NULL DEFAULT 'any' CONSTRAINT "key_time must be any or uuidv7"
		CHECK (key_time = 'any' OR key_time = 'uuidv7'),
	result_max_bytes int4 CONSTRAINT "result_max_bytes must be 1 to 267386880"
		CHECK (result_max_bytes > 0 AND result_max_bytes <= 267386880),
	guarded_since timestamptz,
	CONSTRAINT "key_time = uuidv7 needs a ttl of its own" CHECK (key_time <> 'uuidv7' OR ttl IS NOT NULL)
) USING heap;

COMMENT ON TABLE @extschema@.idem_scopes IS 'policy of scopes; a scope without a row uses the settings, as NULL does';
COMMENT ON COLUMN @extschema@.idem_scopes.ttl IS 'retention: a claim is remembered at least this long';
COMMENT ON COLUMN @extschema@.idem_scopes.lease IS 'length of a lease that idem_extend() renews without a length';
COMMENT ON COLUMN @extschema@.idem_scopes.lease_max IS 'longest lease that a caller may ask for';
COMMENT ON COLUMN @extschema@.idem_scopes.failed IS 'terminal: stays so; retryable: the next claim runs it again';
COMMENT ON COLUMN @extschema@.idem_scopes.lapsed IS 'whether a lapsed lease can be taken over';
COMMENT ON COLUMN @extschema@.idem_scopes.expired IS 'protect: guards until removed; reclaim: counts as absent';
COMMENT ON COLUMN @extschema@.idem_scopes.key_time IS 'uuidv7: the id''s time tells a new request from a forgotten one';
COMMENT ON COLUMN @extschema@.idem_scopes.guarded_since IS 'uuidv7: ids from before are stale if they have no row';
