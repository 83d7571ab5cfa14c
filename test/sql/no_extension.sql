-- The library, when its SQL objects are missing, are created, are dropped, or are in another
-- schema. For the C edition. :SQLSTATE is that of the statement before.
-- From PostgreSQL 18 on the CONTEXT of an error names the place in the install script.
\set SHOW_CONTEXT never
-- Without preload, CREATE EXTENSION warns.
SET client_min_messages = error;

CREATE FUNCTION lone_claim(text, text, text DEFAULT '', bytea DEFAULT NULL, interval DEFAULT NULL) RETURNS bool
	AS '$libdir/idem', 'idem_claim' LANGUAGE C;
CREATE FUNCTION lone_complete(jsonb) RETURNS bool AS '$libdir/idem', 'idem_complete_held' LANGUAGE C;
CREATE FUNCTION lone_result() RETURNS jsonb AS '$libdir/idem', 'idem_result_latest' LANGUAGE C;
CREATE FUNCTION lone_result(text, text, text DEFAULT '') RETURNS jsonb AS '$libdir/idem', 'idem_result' LANGUAGE C;
CREATE FUNCTION lone_cleanup(int) RETURNS bigint AS '$libdir/idem', 'idem_cleanup' LANGUAGE C;
CREATE FUNCTION lone_fingerprint(jsonb) RETURNS bytea AS '$libdir/idem', 'idem_fingerprint' LANGUAGE C STRICT;

-- With the extension installed, functions that a user made for the library work like its own.
SELECT idem_claim('u', 'r');
SELECT lone_claim('u', 'r');

-- ----- dropped in a transaction that has claimed -----

BEGIN;
SELECT idem_claim('u', 'dropped');
SAVEPOINT s;
DROP EXTENSION idem;
SELECT lone_claim('u', 'dropped');
\echo :SQLSTATE
ROLLBACK TO s;
SELECT idem_claim('u', 'dropped'), idem_complete('"still held"');
DROP EXTENSION idem;
SELECT lone_result();
ROLLBACK;
SELECT idem_claim('u', 'dropped'), lone_claim('u', 'r');
-- Dropped and created in one transaction: the new extension does not know the claim.
BEGIN;
SELECT idem_claim('u', 'replaced');
DROP EXTENSION idem;
CREATE EXTENSION idem;
SELECT idem_claim('u', 'replaced'), idem_claim('u', 'r');
SELECT lone_claim('u', 'replaced');
SELECT count(*) FROM idem_claims;
ROLLBACK;
SELECT count(*) FROM idem_claims WHERE request_id IN ('dropped', 'r', 'replaced');

-- ----- without the extension -----

DROP EXTENSION idem;
SELECT lone_claim('u', 'r');
\echo :SQLSTATE
SELECT lone_claim('u', '');
\echo :SQLSTATE
SELECT lone_complete('1');
\echo :SQLSTATE
SELECT lone_result();
\echo :SQLSTATE
SELECT lone_result('u', 'r');
\echo :SQLSTATE
SELECT lone_cleanup(1);
\echo :SQLSTATE
SELECT lone_fingerprint('1') = sha256('1') AS needs_none;
-- The library does not use tables of the user that have the same names.
CREATE TABLE idem_claims (expires_at timestamptz, lease_until timestamptz, token int8, state text,
	request_id text, user_id text, scope text, fingerprint bytea, result jsonb, progress jsonb,
	PRIMARY KEY (request_id, user_id, scope));
SELECT lone_claim('u', 'r');
\echo :SQLSTATE
-- CREATE EXTENSION does not take them over.
CREATE EXTENSION idem;
\echo :SQLSTATE
DROP TABLE idem_claims;

-- ----- a CREATE EXTENSION that is rolled back -----

BEGIN;
CREATE EXTENSION idem;
SELECT idem_claim('u', 'r');
SELECT lone_claim('u', 'r');
ROLLBACK;
SELECT lone_claim('u', 'r');
\echo :SQLSTATE
BEGIN;
SAVEPOINT s;
CREATE EXTENSION idem;
SELECT idem_claim('u', 'r');
ROLLBACK TO s;
CREATE EXTENSION idem;
SELECT idem_claim('u', 'r');
SELECT lone_complete('"in the second one"');
COMMIT;
SELECT idem_result('u', 'r');
DROP EXTENSION idem;

-- ----- in another schema -----

CREATE SCHEMA regress_idem_requests;
CREATE EXTENSION idem SCHEMA regress_idem_requests;
\set VERBOSITY sqlstate
SELECT idem_claim('u', 'r');
\set VERBOSITY default
SELECT regress_idem_requests.idem_claim('u', 'r');
SELECT lone_claim('u', 'r');
BEGIN;
SELECT regress_idem_requests.idem_claim('u', 'r2'), regress_idem_requests.idem_complete('2');
SELECT outcome, result FROM regress_idem_requests.idem_try_claim('u', 'r2');
COMMIT;
UPDATE regress_idem_requests.idem_claims SET expires_at = '2020-01-01';
CALL regress_idem_requests.idem_cleanup_all();
SELECT count(*) FROM regress_idem_requests.idem_claims;
CREATE ROLE regress_idem_app;
SELECT regress_idem_requests.idem_grant('regress_idem_app', 'app');
SET ROLE regress_idem_app;
SELECT regress_idem_requests.idem_claim('u', 'as app');
RESET ROLE;
-- It cannot be moved to another schema, but its schema can be renamed.
ALTER EXTENSION idem SET SCHEMA public;
ALTER SCHEMA regress_idem_requests RENAME TO "regress idem; requests";
SELECT "regress idem; requests".idem_claim('u', 'renamed');
SELECT "regress idem; requests".idem_grant('regress_idem_app', 'operator');
SELECT "regress idem; requests".idem_revoke('regress_idem_app', 'operator');
CALL "regress idem; requests".idem_cleanup_all();
INSERT INTO "regress idem; requests".idem_scopes (scope, ttl, key_time) VALUES ('s', '1 day', 'uuidv7');
UPDATE "regress idem; requests".idem_scopes SET ttl = '2 days' RETURNING guarded_since > now() AS guarded;
DELETE FROM "regress idem; requests".idem_scopes;
ALTER SCHEMA "regress idem; requests" RENAME TO regress_idem_requests;

-- ----- a member is removed from the extension -----

ALTER EXTENSION idem DROP TABLE regress_idem_requests.idem_claims;
\c -
SELECT lone_claim('u', 'r');
\echo :SQLSTATE
ALTER EXTENSION idem ADD TABLE regress_idem_requests.idem_claims;
SELECT lone_claim('u', 'member');

SET client_min_messages = warning;
DROP EXTENSION idem;
DROP SCHEMA regress_idem_requests;
DROP OWNED BY regress_idem_app;
DROP ROLE regress_idem_app;
DROP FUNCTION lone_claim, lone_complete, lone_result(), lone_result(text, text, text), lone_cleanup, lone_fingerprint;
SET client_min_messages = error;
CREATE EXTENSION idem;
