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
