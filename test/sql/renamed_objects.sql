-- Members of the extension were renamed, moved or removed from it: the error says what can have
-- happened, and its HINT helps. For the C edition. A session that has looked up a type no
-- longer needs its name and labels, so these parts run in new sessions.

\set SHOW_CONTEXT never
CREATE SCHEMA regress_idem_other;

-- ----- renamed -----

ALTER TABLE idem_claims RENAME TO claims;
SELECT idem_claim('u', 'r');
SELECT idem_status('u', 'r');
SELECT idem_cleanup();
ALTER TABLE claims RENAME TO idem_claims;
SELECT idem_claim('u', 'r');
ALTER TABLE idem_scopes RENAME TO "Scopes; of all";
SELECT idem_claim('u', 'r');
ALTER TABLE "Scopes; of all" RENAME TO idem_scopes;
SELECT idem_claim('u', 'r');
ALTER SEQUENCE idem_token_seq RENAME TO tokens;
SELECT idem_claim('u', 'r');
ALTER SEQUENCE tokens RENAME TO idem_token_seq;
SELECT idem_claim('u', 'r');
ALTER TYPE idem_state RENAME TO state;
\c -
SELECT idem_claim('u', 'r');
ALTER TYPE state RENAME TO idem_state;
SELECT idem_claim('u', 'r');
ALTER TYPE idem_outcome RENAME VALUE 'claimed' TO 'it''s mine';
\c -
SELECT idem_claim('u', 'r');
ALTER TYPE idem_outcome RENAME VALUE 'it''s mine' TO 'claimed';
SELECT idem_claim('u', 'r');

-- ----- moved -----

ALTER TABLE idem_claims SET SCHEMA regress_idem_other;
SELECT idem_claim('u', 'r');
ALTER TABLE regress_idem_other.idem_claims SET SCHEMA public;
SELECT idem_claim('u', 'r');

-- ----- another object has its name -----

ALTER TABLE idem_claims RENAME TO claims;
CREATE VIEW idem_claims AS SELECT 1 AS mine;
SELECT idem_claim('u', 'r');
ALTER VIEW idem_claims RENAME TO mine;
ALTER TABLE claims RENAME TO idem_claims;
SELECT idem_claim('u', 'r');
DROP VIEW mine;

-- ----- removed from the extension -----

ALTER EXTENSION idem DROP TABLE idem_claims;
\c -
SELECT idem_claim('u', 'r');
ALTER EXTENSION idem ADD TABLE public.idem_claims;
SELECT idem_claim('u', 'r');
-- Removed and dropped
ALTER EXTENSION idem DROP TABLE idem_claims;
DROP TABLE idem_claims;
SELECT idem_claim('u', 'r');
DROP EXTENSION idem;
-- Without preload, CREATE EXTENSION warns.
SET client_min_messages = error;
CREATE EXTENSION idem;
SELECT idem_claim('u', 'r');

-- ----- an index of a user on the same column, in another order -----

CREATE FUNCTION regress_idem_other.compare(a timestamptz, b timestamptz) RETURNS int LANGUAGE sql IMMUTABLE STRICT
AS 'SELECT timestamptz_cmp(b, a)';
CREATE OPERATOR CLASS regress_idem_other.reversed FOR TYPE timestamptz USING btree AS
	OPERATOR 1 >, OPERATOR 2 >=, OPERATOR 3 =, OPERATOR 4 <=, OPERATOR 5 <, FUNCTION 1 regress_idem_other.compare(timestamptz, timestamptz);
CREATE INDEX mine ON idem_claims (expires_at regress_idem_other.reversed);
-- The server lists the index that was made first before the other.
REINDEX INDEX CONCURRENTLY idem_claims_expires_at_idx;
INSERT INTO idem_claims (expires_at, state, request_id, user_id, scope)
	SELECT date_trunc('second', now()) + i * interval '1 day', 'completed', i::text, 'u', '' FROM unnest('{-1,1,2}'::int[]) AS i;
SELECT idem_cleanup();
DROP INDEX mine;
DROP OPERATOR CLASS regress_idem_other.reversed USING btree;
DROP OPERATOR FAMILY regress_idem_other.reversed USING btree;
DROP FUNCTION regress_idem_other.compare;

DROP SCHEMA regress_idem_other;
TRUNCATE idem_claims;
