-- ----- operating -----

CREATE FUNCTION @extschema@.idem_forget(
	user_id text,
	request_id text,
	scope text DEFAULT '')
RETURNS bool
AS 'MODULE_PATHNAME', 'idem_forget'
LANGUAGE C VOLATILE PARALLEL UNSAFE COST 10000;

CREATE FUNCTION @extschema@.idem__erase(
	user_id text,
	request_id text,
	scope text)
RETURNS bool
AS 'MODULE_PATHNAME', 'idem__erase'
LANGUAGE C VOLATILE PARALLEL UNSAFE COST 10000;
