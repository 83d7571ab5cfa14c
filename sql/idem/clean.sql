-- ----- cleaning -----

CREATE FUNCTION @extschema@.idem_cleanup(batch_size int4 DEFAULT NULL)
RETURNS int8
AS 'MODULE_PATHNAME', 'idem_cleanup'
LANGUAGE C VOLATILE PARALLEL UNSAFE COST 10000;

CREATE FUNCTION @extschema@.idem__cleanup_step(
	batch_size int4,
	start timestamptz,
	expired_before timestamptz,
	OUT rows_deleted int8,
	OUT more bool,
	OUT next_start timestamptz)
AS 'MODULE_PATHNAME', 'idem__cleanup_step'
LANGUAGE C VOLATILE PARALLEL UNSAFE COST 10000;

CREATE FUNCTION @extschema@.idem_start_worker()
RETURNS bool
AS 'MODULE_PATHNAME', 'idem_start_worker'
LANGUAGE C VOLATILE PARALLEL UNSAFE;

COMMENT ON FUNCTION @extschema@.idem_start_worker() IS
'operator: where idem is not preloaded, from PostgreSQL 17 on: has workers clean this database until the server stops; false: they do already';
