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
