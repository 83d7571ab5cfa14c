-- ----- settling -----

CREATE FUNCTION @extschema@.idem_complete(result jsonb DEFAULT NULL)
RETURNS bool
AS 'MODULE_PATHNAME', 'idem_complete_held'
LANGUAGE C VOLATILE PARALLEL UNSAFE COST 10000;

CREATE FUNCTION @extschema@.idem_complete(
	user_id text,
	request_id text,
	result jsonb,
	token int8 DEFAULT NULL,
	scope text DEFAULT '')
RETURNS bool
AS 'MODULE_PATHNAME', 'idem_complete'
LANGUAGE C VOLATILE PARALLEL UNSAFE COST 10000;

CREATE FUNCTION @extschema@.idem_fail(error jsonb)
RETURNS bool
AS 'MODULE_PATHNAME', 'idem_fail_held'
LANGUAGE C VOLATILE PARALLEL UNSAFE COST 10000;

CREATE FUNCTION @extschema@.idem_fail(
	user_id text,
	request_id text,
	error jsonb,
	token int8 DEFAULT NULL,
	scope text DEFAULT '')
RETURNS bool
AS 'MODULE_PATHNAME', 'idem_fail'
LANGUAGE C VOLATILE PARALLEL UNSAFE COST 10000;
