-- ----- procedures that commit -----

-- Such a procedure can have no search_path of its own, so it qualifies every name, by the
-- schema's current name.  It runs with the caller's rights.

-- Raises an error if the procedure may not commit.  It has tried to, in a block with EXCEPTION:
-- there COMMIT always fails, and only the message, which is in the session's language, says why.
-- Here it fails because a function never may.
CREATE FUNCTION @extschema@.idem__require_commit(command text, refusal text, advice text) RETURNS void
LANGUAGE plpgsql AS $function$
BEGIN
	COMMIT;
EXCEPTION WHEN invalid_transaction_termination THEN
	IF refusal OPERATOR(pg_catalog.=) SQLERRM THEN
		RAISE EXCEPTION '% cannot run inside a transaction block', command USING ERRCODE = 'active_sql_transaction',
			HINT = pg_catalog.format('Call it without BEGIN, and not from a function or a block with EXCEPTION%s.', advice);
	END IF;
END $function$;

-- The keys are listed when the call begins, by a read of the whole table: no index begins with the user.  A
-- request that is claimed later is not among them.
CREATE PROCEDURE @extschema@.idem_erase(user_id text, scope text DEFAULT NULL) LANGUAGE plpgsql AS $procedure$
DECLARE
	schema constant pg_catalog.regnamespace := @schema@;
	found pg_catalog.record;
	is_erased pg_catalog.bool;
	erased pg_catalog.int8 := 0;
	in_progress pg_catalog.int8 := 0;
BEGIN
	BEGIN
		COMMIT;
	EXCEPTION WHEN invalid_transaction_termination THEN
		EXECUTE pg_catalog.format('SELECT %s.idem__require_commit($1, $2, $3)', schema)
			USING 'idem_erase()', SQLERRM, '';
	END;
	-- raises ID400 for a user or a scope that no request can have
	EXECUTE pg_catalog.format('SELECT %s.idem_status($1, ''any'', COALESCE($2, ''''))', schema) USING user_id, scope;
	FOR found IN EXECUTE pg_catalog.format('SELECT c.request_id, c.scope FROM %s.idem_claims AS c
			WHERE c.user_id OPERATOR(pg_catalog.=) $1 AND ($2 IS NULL OR c.scope OPERATOR(pg_catalog.=) $2)
				AND (c.result IS NOT NULL OR c.progress IS NOT NULL)', schema)
		USING user_id, scope
	LOOP
		EXECUTE pg_catalog.format('SELECT %s.idem__erase($1, $2, $3)', schema) INTO is_erased
			USING user_id, found.request_id, found.scope;
		IF is_erased THEN
			erased := erased OPERATOR(pg_catalog.+) 1;
		ELSE
			in_progress := in_progress OPERATOR(pg_catalog.+) 1;
		END IF;
		IF (erased OPERATOR(pg_catalog.+) in_progress) OPERATOR(pg_catalog.%) 1000 OPERATOR(pg_catalog.=) 0 THEN
			COMMIT;
		END IF;
	END LOOP;
	COMMIT;
	RAISE NOTICE 'requests erased: %', erased;
	IF in_progress OPERATOR(pg_catalog.>) 0 THEN
		RAISE WARNING 'requests in progress, which keep their progress: %', in_progress
			USING HINT = 'Call idem_erase() again when they are settled. idem_unsettled lists them.';
	END IF;
END $procedure$;

-- expired_before is the time of the call: otherwise it would not end while claims expire.
-- start is the low-water mark, which spares each batch the dead entries of the ones before.
CREATE PROCEDURE @extschema@.idem_cleanup_all(batch_size int4 DEFAULT NULL) LANGUAGE plpgsql AS $procedure$
DECLARE
	expired_before pg_catalog.timestamptz := pg_catalog.clock_timestamp();
	start pg_catalog.timestamptz := '-infinity';
	more pg_catalog.bool := true;
	step constant pg_catalog.text := pg_catalog.format('SELECT more, next_start FROM %s.idem__cleanup_step($1, $2, $3)', @schema@);
BEGIN
	BEGIN
		COMMIT;
	EXCEPTION WHEN invalid_transaction_termination THEN
		EXECUTE pg_catalog.format('SELECT %s.idem__require_commit($1, $2, $3)', @schema@)
			USING 'idem_cleanup_all()', SQLERRM, '; or use idem_cleanup()';
	END;
	WHILE more LOOP
		EXECUTE step INTO more, start USING batch_size, start, expired_before;
		COMMIT;
	END LOOP;
END $procedure$;
