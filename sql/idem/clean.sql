-- ----- cleaning -----

CREATE FUNCTION @extschema@.idem_cleanup(batch_size int4 DEFAULT NULL)
RETURNS int8
AS 'MODULE_PATHNAME', 'idem_cleanup'
LANGUAGE C VOLATILE PARALLEL UNSAFE COST 10000;

COMMENT ON FUNCTION @extschema@.idem_cleanup(int4) IS
'operator: removes expired claims in this transaction, for about a second and at most batch_size of them (NULL: idem.cleanup_batch_size); returns how many';

CREATE FUNCTION @extschema@.idem__cleanup_step(
	batch_size int4,
	start timestamptz,
	expired_before timestamptz,
	OUT rows_deleted int8,
	OUT more bool,
	OUT next_start timestamptz)
AS 'MODULE_PATHNAME', 'idem__cleanup_step'
LANGUAGE C VOLATILE PARALLEL UNSAFE COST 10000;

COMMENT ON FUNCTION @extschema@.idem__cleanup_step(int4, timestamptz, timestamptz) IS
'for idem_cleanup_all(): one batch, from one low-water mark to the next';

-- expired_before is the time of the call: otherwise it would not end while claims expire.
-- start is the low-water mark, which spares each batch the dead entries of the ones before.
CREATE PROCEDURE @extschema@.idem_cleanup_all(batch_size int4 DEFAULT NULL)
LANGUAGE plpgsql
AS $procedure$
DECLARE
	expired_before pg_catalog.timestamptz := pg_catalog.clock_timestamp();
	start pg_catalog.timestamptz := '-infinity';
	more pg_catalog.bool := true;
	-- by the schema's current name
	step constant pg_catalog.text := pg_catalog.format(
		'SELECT more, next_start FROM %s.idem__cleanup_step($1, $2, $3)',
		(SELECT e.extnamespace::pg_catalog.regnamespace FROM pg_catalog.pg_extension AS e
			WHERE e.extname OPERATOR(pg_catalog.=) 'idem'));
	refused pg_catalog.text;
BEGIN
	-- Only the message of a failed COMMIT shows whether this procedure may commit, and it is in the
	-- session's language.  The first COMMIT fails in any case, since it is in a block with EXCEPTION.
	-- The second one is where none may ever commit.
	BEGIN
		COMMIT;
	EXCEPTION WHEN invalid_transaction_termination THEN
		refused := SQLERRM;
	END;
	BEGIN
		EXECUTE 'DO ''BEGIN COMMIT; END''';
	EXCEPTION WHEN invalid_transaction_termination OR insufficient_privilege THEN
		IF refused OPERATOR(pg_catalog.=) SQLERRM THEN
			RAISE EXCEPTION 'idem_cleanup_all() cannot run inside a transaction block' USING ERRCODE = 'active_sql_transaction',
				HINT = 'Call it without BEGIN, and not from a function or a block with EXCEPTION; or use idem_cleanup().';
		END IF;
	END;
	WHILE more LOOP
		EXECUTE step INTO more, start USING batch_size, start, expired_before;
		COMMIT;
	END LOOP;
END
$procedure$;

COMMENT ON PROCEDURE @extschema@.idem_cleanup_all(int4) IS
'operator: removes all claims that have expired by now, except those that another transaction has locked; commits after each batch';

CREATE FUNCTION @extschema@.idem_start_worker()
RETURNS bool
AS 'MODULE_PATHNAME', 'idem_start_worker'
LANGUAGE C VOLATILE PARALLEL UNSAFE;

COMMENT ON FUNCTION @extschema@.idem_start_worker() IS
'operator: where idem is not preloaded, from PostgreSQL 17 on: has workers clean this database until the server stops; false: they do already';
