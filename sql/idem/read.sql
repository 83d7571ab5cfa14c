-- ----- reading -----

CREATE FUNCTION @extschema@.idem_result()
RETURNS jsonb
AS 'MODULE_PATHNAME', 'idem_result_latest'
LANGUAGE C VOLATILE PARALLEL UNSAFE;

CREATE FUNCTION @extschema@.idem_result(
	user_id text,
	request_id text,
	scope text DEFAULT '')
RETURNS jsonb
AS 'MODULE_PATHNAME', 'idem_result'
LANGUAGE C STABLE PARALLEL RESTRICTED;

CREATE FUNCTION @extschema@.idem_outcome()
RETURNS @extschema@.idem_outcome
AS 'MODULE_PATHNAME', 'idem_outcome_latest'
LANGUAGE C VOLATILE PARALLEL UNSAFE;

CREATE FUNCTION @extschema@.idem_status(
	user_id text,
	request_id text,
	scope text DEFAULT '')
RETURNS @extschema@.idem_outcome
AS 'MODULE_PATHNAME', 'idem_status'
LANGUAGE C STABLE PARALLEL RESTRICTED;

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

CREATE FUNCTION @extschema@.idem_lapsed(
	INOUT scope text DEFAULT NULL,
	max_rows int4 DEFAULT 100,
	OUT user_id text,
	OUT request_id text,
	OUT status text,
	OUT lease_until timestamptz,
	OUT progress jsonb)
RETURNS SETOF record
AS 'MODULE_PATHNAME', 'idem_lapsed'
LANGUAGE C STABLE PARALLEL RESTRICTED ROWS 100;

CREATE FUNCTION @extschema@.idem_fingerprint(parameters jsonb)
RETURNS bytea
AS 'MODULE_PATHNAME', 'idem_fingerprint'
LANGUAGE C IMMUTABLE STRICT PARALLEL SAFE;
