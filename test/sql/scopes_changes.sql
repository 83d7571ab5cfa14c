-- Changes of the table idem_scopes itself: if the policy of a scope cannot be found, claims
-- raise an error, and the HINT helps. For the C edition.
-- :SQLSTATE is that of the statement before.
\set SHOW_CONTEXT never

-- ----- the primary key -----

INSERT INTO idem_scopes (scope, ttl) VALUES ('s', '2 days');
ALTER TABLE idem_scopes DROP CONSTRAINT idem_scopes_pkey, ADD PRIMARY KEY (failed, scope);
SELECT idem_claim('u', 'r', 's');
\echo :SQLSTATE
SELECT idem_status('u', 'r', 's');
UPDATE idem_scopes SET ttl = '3 days';
ALTER TABLE idem_scopes DROP CONSTRAINT idem_scopes_pkey;
SELECT idem_claim('u', 'r', 's');
\echo :SQLSTATE
ALTER TABLE idem_scopes ADD PRIMARY KEY (scope) INCLUDE (ttl);
SELECT idem_claim('u', 'r', 's');
SELECT expires_at > now() + interval '47 hours' AS two_days FROM idem_claims WHERE request_id = 'r';
ALTER TABLE idem_scopes DROP CONSTRAINT idem_scopes_pkey, ADD PRIMARY KEY (scope);
ALTER TABLE idem_scopes ALTER scope TYPE text COLLATE "POSIX";
SELECT idem_claim('u', 'r2', 's');
\echo :SQLSTATE
ALTER TABLE idem_scopes ALTER scope TYPE text COLLATE "C";
SELECT idem_claim('u', 'r2', 's');

-- ----- columns -----

ALTER TABLE idem_scopes ADD COLUMN remark text;
INSERT INTO idem_scopes (scope, ttl, remark) VALUES ('t', '2 days', 'mine');
SELECT idem_claim('u', 'r3', 't');
ALTER TABLE idem_scopes DROP COLUMN remark;
SELECT idem_claim('u', 'r4', 't');
BEGIN;
ALTER TABLE idem_scopes ALTER guarded_since TYPE date;
INSERT INTO idem_scopes (scope, ttl, key_time) VALUES ('v', '1 day', 'uuidv7');
\echo :SQLSTATE
ROLLBACK;
BEGIN;
ALTER TABLE idem_scopes DROP COLUMN lease_max;
SELECT idem_claim('u', 'r5', 't');
\echo :SQLSTATE
ROLLBACK;
SELECT count(*) FROM idem_claims;

-- ----- the trigger functions refuse other tables, and statement triggers -----

CREATE TABLE regress_idem_other (a text, p int8, c text, d text, e text, f text, g text, key_time text, h int, i timestamptz);
CREATE TRIGGER t BEFORE INSERT ON regress_idem_other FOR EACH ROW EXECUTE FUNCTION idem__scopes_guard();
INSERT INTO regress_idem_other VALUES ('a', 3735928559, '', '', '', '', '', 'uuidv7', 1, NULL);
\echo :SQLSTATE
DROP TABLE regress_idem_other;
CREATE TRIGGER t BEFORE INSERT ON idem_scopes FOR EACH STATEMENT EXECUTE FUNCTION idem__scopes_guard();
INSERT INTO idem_scopes (scope) VALUES ('u');
DROP TRIGGER t ON idem_scopes;
CREATE TRIGGER t AFTER INSERT ON idem_scopes FOR EACH ROW EXECUTE FUNCTION idem__scopes_guard();
INSERT INTO idem_scopes (scope) VALUES ('u');
DROP TRIGGER t ON idem_scopes;
CREATE TRIGGER t BEFORE DELETE ON idem_scopes FOR EACH ROW EXECUTE FUNCTION idem__scopes_guard();
DELETE FROM idem_scopes;
DROP TRIGGER t ON idem_scopes;
CREATE TRIGGER t BEFORE UPDATE ON idem_scopes FOR EACH STATEMENT EXECUTE FUNCTION idem__scopes_changed();
UPDATE idem_scopes SET ttl = '3 days';
DROP TRIGGER t ON idem_scopes;
CREATE TRIGGER t AFTER UPDATE ON idem_scopes FOR EACH ROW EXECUTE FUNCTION idem__scopes_changed();
UPDATE idem_scopes SET ttl = '3 days';
DROP TRIGGER t ON idem_scopes;

-- ----- a scope whose name is too long for a row -----

-- A longer name is not confused with a name of the greatest length that is allowed.
TRUNCATE idem_claims;
INSERT INTO idem_scopes (scope, lapsed) VALUES (repeat('s', 255), 'unknown');
INSERT INTO idem_claims (expires_at, lease_until, token, state, request_id, user_id, scope)
	SELECT '2020-01-01', '2020-01-01', 1, 'in_progress', n, 'u', repeat('s', n) FROM unnest(ARRAY[255, 256]) AS n;
SELECT idem_status('u', '255', repeat('s', 255));
SELECT idem_cleanup();
SELECT request_id FROM idem_claims;

TRUNCATE idem_claims, idem_scopes;
