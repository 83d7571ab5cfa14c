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

COMMENT ON FUNCTION @extschema@.idem_extend(text, text, int8, interval, jsonb, text) IS
'heartbeat: the lease ends that long from now (NULL: the scope''s lease, but no earlier than before), returns when; records progress';

CREATE FUNCTION @extschema@.idem_release(
	user_id text,
	request_id text,
	token int8,
	scope text DEFAULT '')
RETURNS bool
AS 'MODULE_PATHNAME', 'idem_release'
LANGUAGE C VOLATILE PARALLEL UNSAFE COST 10000;

COMMENT ON FUNCTION @extschema@.idem_release(text, text, int8, text) IS
'gives up a lease, so that the next waiter claims: true, released; false, there was no such request';

CREATE FUNCTION @extschema@.idem_fence(
	user_id text,
	request_id text,
	token int8,
	scope text DEFAULT '')
RETURNS void
AS 'MODULE_PATHNAME', 'idem_fence'
LANGUAGE C VOLATILE PARALLEL UNSAFE COST 10000;

COMMENT ON FUNCTION @extschema@.idem_fence(text, text, int8, text) IS
'locks the lease until this transaction ends, so that nobody takes it over, or raises ID410: begin each transaction of leased work with it';

CREATE FUNCTION @extschema@.idem_heal(
	user_id text,
	request_id text,
	result jsonb,
	scope text DEFAULT '')
RETURNS bool
AS 'MODULE_PATHNAME', 'idem_heal'
LANGUAGE C VOLATILE PARALLEL UNSAFE COST 10000;

COMMENT ON FUNCTION @extschema@.idem_heal(text, text, jsonb, text) IS
'settles the lease of any holder, after its work was found done: true, settled; false, it was settled before';
