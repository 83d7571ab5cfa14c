-- ----- procedures that commit -----

-- They run with the caller's rights, and qualify every name: they can have no search_path of their own.

-- For a procedure whose COMMIT has failed in a block with EXCEPTION, where it always does.  Raises an error if COMMIT
-- fails outside the block too: then its message was, in the session's language, that of a function, which never may.
CREATE FUNCTION @extschema@.idem__require_commit(command text, refusal text, advice text) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
	COMMIT;
EXCEPTION WHEN invalid_transaction_termination THEN
	IF refusal OPERATOR(pg_catalog.=) SQLERRM THEN
		RAISE EXCEPTION '% cannot run inside a transaction block', command USING ERRCODE = '25001', HINT =
			pg_catalog.format('Call it without BEGIN, and not from a function or a block with EXCEPTION%s.', advice);
	END IF;
END $$;

-- The keys are listed when the call begins.  A request that is claimed later is not among them.
CREATE PROCEDURE @extschema@.idem_erase(user_id text, scope text DEFAULT NULL) LANGUAGE plpgsql AS $$
DECLARE
	key pg_catalog.record;
	requests pg_catalog.int8 := 0;
	erased pg_catalog.int8 := 0;
BEGIN
	BEGIN
		COMMIT;
	EXCEPTION WHEN invalid_transaction_termination THEN
		PERFORM @extschema@.idem__require_commit('idem_erase()', SQLERRM, '');
	END;
	PERFORM @extschema@.idem_status(user_id, 'any', COALESCE(scope, ''));		-- ID400 if no request can have them
	FOR key IN SELECT c.request_id, c.scope FROM @extschema@.idem_claims AS c
		WHERE c.user_id OPERATOR(pg_catalog.=) idem_erase.user_id COLLATE "C"
			AND (idem_erase.scope IS NULL OR c.scope OPERATOR(pg_catalog.=) idem_erase.scope COLLATE "C")
			AND (c.result IS NOT NULL OR c.progress IS NOT NULL)
	LOOP
		requests := requests OPERATOR(pg_catalog.+) 1;
		erased := erased OPERATOR(pg_catalog.+)
			@extschema@.idem__erase(user_id, key.request_id, key.scope)::pg_catalog.int4;
		IF requests OPERATOR(pg_catalog.%) 1000 OPERATOR(pg_catalog.=) 0 THEN
			COMMIT;
		END IF;
	END LOOP;
	COMMIT;
	RAISE NOTICE 'requests erased: %', erased;
	IF requests OPERATOR(pg_catalog.>) erased THEN
		RAISE WARNING 'requests in progress, which keep their progress: %', requests OPERATOR(pg_catalog.-) erased
			USING HINT = 'Call idem_erase() again when they are settled. idem_unsettled lists them.';
	END IF;
END $$;

-- What expires after it began stays: otherwise it would not end.  start spares each batch the dead index entries of
-- the batches before, and the rows that they kept: the next call reads these again, 0.3 microseconds each.
CREATE PROCEDURE @extschema@.idem_cleanup_all(batch_size int4 DEFAULT NULL) LANGUAGE plpgsql AS $$
DECLARE
	begun constant pg_catalog.timestamptz := pg_catalog.clock_timestamp();
	start pg_catalog.timestamptz := '-infinity';
	more pg_catalog.bool := true;
BEGIN
	BEGIN
		COMMIT;
	EXCEPTION WHEN invalid_transaction_termination THEN
		PERFORM @extschema@.idem__require_commit('idem_cleanup_all()', SQLERRM, '; or use idem_cleanup()');
	END;
	WHILE more LOOP
		SELECT b.more, b.next_start INTO more, start FROM @extschema@.idem__cleanup_step(batch_size, start, begun) AS b;
		COMMIT;
	END LOOP;
END $$;
