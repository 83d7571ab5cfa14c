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
