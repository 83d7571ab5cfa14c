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
