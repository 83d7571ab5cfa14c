-- Members of the extension that were renamed, moved or taken out: the error says what
-- happened, and its HINT works when it is followed. A session that has looked them up goes
-- on without the names of types and labels, so each part has a session of its own.

\set SHOW_CONTEXT never

-- Claims, and follows the HINT for as long as that fails.
CREATE FUNCTION follow_hints() RETURNS SETOF text LANGUAGE plpgsql AS $$
DECLARE
	detail text;
	hint text;
BEGIN
	FOR i IN 1 .. 5 LOOP
		BEGIN
			RETURN NEXT format('claimed: %s', idem_claim('u', 'r'));
			RETURN;
		EXCEPTION WHEN object_not_in_prerequisite_state THEN
			GET STACKED DIAGNOSTICS detail = PG_EXCEPTION_DETAIL, hint = PG_EXCEPTION_HINT;
			RETURN NEXT SQLERRM;
			RETURN NEXT '    ' || trim(detail || ' ' || hint);
		END;
		EXECUTE substring(hint FROM '[Rr]un (ALTER .*)\.$');
	END LOOP;
END $$;
CREATE SCHEMA regress_idem_other;
\pset format unaligned
\pset tuples_only on

-- ----- renamed -----

ALTER TABLE idem_claims RENAME TO claims;
SELECT follow_hints();
ALTER TABLE idem_scopes RENAME TO "Scopes; of all";
SELECT follow_hints();
ALTER SEQUENCE idem_token_seq RENAME TO tokens;
SELECT follow_hints();
ALTER TYPE idem_state RENAME TO state;
\c -
SELECT follow_hints();
ALTER TYPE idem_outcome RENAME TO outcome;
\c -
SELECT follow_hints();
ALTER TYPE idem_outcome RENAME VALUE 'claimed' TO 'it''s mine';
\c -
SELECT follow_hints();

-- Two of a kind: which is which, nobody but the operator knows.
ALTER TABLE idem_claims RENAME TO a;
ALTER TABLE idem_scopes RENAME TO b;
SELECT idem_claim('u', 'r');
ALTER TABLE a RENAME TO idem_claims;
ALTER TYPE idem_state RENAME VALUE 'failed' TO 'c';
ALTER TYPE idem_state RENAME VALUE 'completed' TO 'd';
ALTER TABLE b RENAME TO idem_scopes;
SELECT idem_claim('u', 'r');
ALTER TYPE idem_state RENAME VALUE 'd' TO 'completed';
SELECT follow_hints();

-- ----- moved -----

ALTER TABLE idem_claims SET SCHEMA regress_idem_other;
SELECT follow_hints();
ALTER TABLE idem_scopes SET SCHEMA regress_idem_other;
ALTER SEQUENCE idem_token_seq SET SCHEMA regress_idem_other;
ALTER TYPE idem_outcome SET SCHEMA regress_idem_other;
SELECT follow_hints();
ALTER TABLE idem_claims SET SCHEMA regress_idem_other;
ALTER TABLE regress_idem_other.idem_claims RENAME TO claims;
SELECT follow_hints();

-- ----- with something else in their place -----

ALTER TABLE idem_claims RENAME TO claims;
CREATE VIEW idem_claims AS SELECT 1 AS mine;
SELECT idem_claim('u', 'r');
ALTER VIEW idem_claims RENAME TO mine;
SELECT follow_hints();
DROP VIEW mine;

-- ----- taken out -----

ALTER EXTENSION idem DROP TABLE idem_claims;
\c -
SELECT follow_hints();
ALTER EXTENSION idem DROP SEQUENCE idem_token_seq;
ALTER EXTENSION idem DROP TYPE idem_state;
\c -
SELECT follow_hints();
-- And renamed, which nobody remembers
ALTER EXTENSION idem DROP TABLE idem_claims;
ALTER TABLE idem_claims RENAME TO claims;
SELECT idem_claim('u', 'r');
ALTER TABLE claims RENAME TO idem_claims;
ALTER EXTENSION idem ADD TABLE idem_claims;
SELECT idem_claim('u', 'r');
-- And dropped
ALTER EXTENSION idem DROP TABLE idem_claims;
DROP TABLE idem_claims;
SELECT idem_claim('u', 'r');
DROP FUNCTION follow_hints;
DROP EXTENSION idem;
CREATE EXTENSION idem;
SELECT idem_claim('u', 'r');

DROP SCHEMA regress_idem_other;
TRUNCATE idem_claims;
