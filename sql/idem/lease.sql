-- ----- leases -----

CREATE FUNCTION @extschema@.idem_extend(
	user_id text,
	request_id text,
	token int8,
	lease interval DEFAULT NULL,
	progress jsonb DEFAULT NULL,
	scope text DEFAULT '')
RETURNS timestamptz
AS 'MODULE_PATHNAME', 'idem_extend'
LANGUAGE C VOLATILE PARALLEL UNSAFE COST 10000;

CREATE FUNCTION @extschema@.idem_release(
	user_id text,
	request_id text,
	token int8,
	scope text DEFAULT '')
RETURNS bool
AS 'MODULE_PATHNAME', 'idem_release'
LANGUAGE C VOLATILE PARALLEL UNSAFE COST 10000;

CREATE FUNCTION @extschema@.idem_fence(
	user_id text,
	request_id text,
	token int8,
	scope text DEFAULT '')
RETURNS void
AS 'MODULE_PATHNAME', 'idem_fence'
LANGUAGE C VOLATILE PARALLEL UNSAFE COST 10000;

CREATE FUNCTION @extschema@.idem_heal(
	user_id text,
	request_id text,
	result jsonb,
	scope text DEFAULT '')
RETURNS bool
AS 'MODULE_PATHNAME', 'idem_heal'
LANGUAGE C VOLATILE PARALLEL UNSAFE COST 10000;
