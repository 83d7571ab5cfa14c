-- A transaction keeps the claims table open from its first claim to its end: errors while it is
-- opened, savepoints, and commands that change the table. For the C edition.

\set SHOW_CONTEXT never

SELECT idem_claim('u', 'before');

-- ----- a table that is refused many times leaks no memory -----

ALTER TABLE idem_claims ENABLE ROW LEVEL SECURITY;
CREATE FUNCTION pg_temp.memory_kept(calls int) RETURNS bigint LANGUAGE plpgsql AS $$
BEGIN
	FOR i IN 1 .. calls LOOP
		BEGIN
			PERFORM idem_claim('u', i::text);
		EXCEPTION WHEN feature_not_supported THEN
			NULL;
		END;
	END LOOP;
	RETURN (SELECT count(*) FROM pg_backend_memory_contexts WHERE name = 'idem store');
END $$;
SELECT pg_temp.memory_kept(100);
ALTER TABLE idem_claims DISABLE ROW LEVEL SECURITY;

-- ----- an error while the indexes are opened -----

-- The server computes the constant part of an index expression when the index is opened; here
-- that can raise an error. A relation that is left open would be reported at COMMIT.
CREATE FUNCTION regress_idem_constant(n int) RETURNS int IMMUTABLE LANGUAGE plpgsql AS $$
BEGIN
	IF current_setting('regress_idem.fail', true) = 'on' THEN
		RAISE 'not now';
	END IF;
	RETURN n;
END $$;
CREATE INDEX regress_idem_constant ON idem_claims ((length(user_id) + regress_idem_constant(7)));
\c -
\set SHOW_CONTEXT never
BEGIN;
SAVEPOINT s;
SET regress_idem.fail = 'on';
SELECT idem_claim('u', 'opening');
ROLLBACK TO s;
SELECT idem_claim('u', 'opening');
COMMIT;
-- The table is already open, and its indexes are not.
\c -
\set SHOW_CONTEXT never
BEGIN;
SELECT idem_claim('u', 'opening');
SAVEPOINT s;
SET regress_idem.fail = 'on';
SELECT idem_claim('u', 'opening 2');
ROLLBACK TO s;
SELECT idem_claim('u', 'opening 2');
SAVEPOINT s;
SELECT idem_claim('u', 'opening 3');
ROLLBACK TO s;
COMMIT;
SELECT request_id FROM idem_claims WHERE request_id LIKE 'opening%' ORDER BY 1;
DROP INDEX regress_idem_constant;
DROP FUNCTION regress_idem_constant;

-- ----- claims in event triggers -----

CREATE FUNCTION regress_idem_on_ddl() RETURNS event_trigger LANGUAGE plpgsql AS $$
BEGIN
	RAISE NOTICE '% %: %', tg_event, tg_tag, idem_claim('ddl', tg_event || ' ' || tg_tag);
END $$;
CREATE EVENT TRIGGER regress_idem_start ON ddl_command_start EXECUTE FUNCTION regress_idem_on_ddl();
CREATE EVENT TRIGGER regress_idem_end ON ddl_command_end EXECUTE FUNCTION regress_idem_on_ddl();
CREATE EVENT TRIGGER regress_idem_rewrite ON table_rewrite EXECUTE FUNCTION regress_idem_on_ddl();
CREATE INDEX regress_idem_user ON idem_claims (user_id);
ALTER TABLE idem_claims SET (fillfactor = 90);
ALTER TABLE idem_claims RESET (fillfactor);
BEGIN;
SELECT idem_claim('u', 'and ddl');
DROP INDEX regress_idem_user;
SELECT idem_claim('u', 'and more');
SAVEPOINT s;
CREATE INDEX regress_idem_user ON idem_claims (user_id);
SELECT idem_claim('u', 'within');
ROLLBACK TO s;
SELECT idem_claim('u', 'within');
COMMIT;
ALTER TABLE idem_claims ALTER progress TYPE jsonb USING progress #- '{}';
DROP EVENT TRIGGER regress_idem_start;
DROP EVENT TRIGGER regress_idem_end;
DROP EVENT TRIGGER regress_idem_rewrite;
DROP FUNCTION regress_idem_on_ddl;
SELECT user_id, request_id FROM idem_claims WHERE user_id = 'ddl' OR request_id ~ 'and|within' ORDER BY 1, 2;

-- ----- an error ends optimistic inserts -----

-- After many new keys a claim inserts its key without probing for it first. If that raises an
-- error, say because the disk is full, the next claim must probe first: a replay needs no room.
-- Here the index of the extension raises the error, by the way in which it compares; an index of a
-- user would prevent optimistic inserts.
CREATE FUNCTION regress_idem_may_fail(a timestamptz, b timestamptz) RETURNS int IMMUTABLE LANGUAGE plpgsql AS $$
BEGIN
	IF current_setting('regress_idem.fail', true) = 'on' THEN
		RAISE 'no room';
	END IF;
	RETURN timestamptz_cmp(a, b);
END $$;
CREATE OPERATOR CLASS regress_idem_may_fail FOR TYPE timestamptz USING btree AS
	OPERATOR 1 <, OPERATOR 2 <=, OPERATOR 3 =, OPERATOR 4 >=, OPERATOR 5 >,
	FUNCTION 1 regress_idem_may_fail(timestamptz, timestamptz);
DROP INDEX idem_claims_expires_at_idx;
CREATE INDEX idem_claims_expires_at_idx ON idem_claims (expires_at regress_idem_may_fail);
SELECT count(*) FILTER (WHERE idem_claim('u', 'new ' || i)) AS claimed FROM generate_series(1, 150) AS i;
SET regress_idem.fail = 'on';
-- With debug_discard_caches the session forgets how many new keys it claimed, and probes.
DO $$
DECLARE
	raised boolean := false;
BEGIN
	BEGIN
		PERFORM idem_claim('u', 'before');
	EXCEPTION WHEN raise_exception THEN
		raised := true;
	END;
	RAISE NOTICE 'an optimistic insert raises the error: %', raised = (current_setting('debug_discard_caches') = '0');
END $$;
SELECT idem_claim('u', 'before');
RESET regress_idem.fail;
SELECT count(*) FILTER (WHERE idem_claim('u', 'newer ' || i)) AS claimed FROM generate_series(1, 150) AS i;
DROP INDEX idem_claims_expires_at_idx;
DROP OPERATOR FAMILY regress_idem_may_fail USING btree;
DROP FUNCTION regress_idem_may_fail;
CREATE INDEX idem_claims_expires_at_idx ON idem_claims (expires_at);

-- ----- each transaction has its own locks -----

-- The session remembers which locks its transaction has. A server with assertions would notice a
-- write without a lock; others would let VACUUM FULL rewrite the table meanwhile.
CREATE VIEW regress_idem_locks AS
	SELECT count(*) AS locks FROM pg_locks WHERE pid = pg_backend_pid() AND mode = 'RowExclusiveLock'
		AND relation IN ('idem_claims'::regclass, 'idem_claims_pkey'::regclass);
BEGIN;
SELECT idem_claim('u', 'locks 1');
SELECT * FROM regress_idem_locks;
COMMIT;
BEGIN;
SELECT idem_claim('u', 'locks 2');
SELECT 1 / 0;
ROLLBACK;
BEGIN;
SELECT idem_claim('u', 'locks 2');
SELECT * FROM regress_idem_locks;
ROLLBACK;
BEGIN;
SELECT idem_claim('u', 'locks 2');
SELECT * FROM regress_idem_locks;
COMMIT;
DROP VIEW regress_idem_locks;

TRUNCATE idem_claims;
