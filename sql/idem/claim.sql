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
