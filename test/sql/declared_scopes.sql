-- idem.scopes = declared: requests can be claimed only in scopes with a row in idem_scopes.
\set SHOW_CONTEXT never

-- The portable edition has the setting as a column.
CREATE FUNCTION pg_temp.set_scopes(value text) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
	IF to_regclass('idem_settings') IS NULL THEN
		PERFORM set_config('idem.scopes', value, false);
	ELSE
		UPDATE idem_settings SET scopes = value;
	END IF;
END $$;

-- any, the default: a mistyped scope executes the request again.
INSERT INTO idem_scopes (scope) VALUES ('payments');
SELECT idem_claim('u', 'r1', 'payments'), idem_claim('u', 'r1', 'paymnets'), idem_claim('u', 'r1');

SELECT pg_temp.set_scopes('declared');
SELECT idem_claim('u', 'r2', 'payments');
SELECT idem_claim('u', 'r1', 'paymnets');
\echo :SQLSTATE
-- The HINT quotes the name, and names no others if none begins alike.
SELECT idem_claim('u', 'r2', 'it''s');
-- The wait in the place of the scope
SELECT idem_claim('u', 'r2', '0');
-- '' is a scope like any other.
SELECT idem_claim('u', 'r2');
INSERT INTO idem_scopes (scope) VALUES ('');
SELECT idem_claim('u', 'r2');
DELETE FROM idem_scopes WHERE scope = '';

-- Every call that claims
SELECT outcome FROM idem_try_claim('u', 'r2', 'payment');
SELECT outcome FROM idem_lease('u', 'r3', scope => 'payment', lease => '1 min');
SELECT outcome FROM idem_lease('u', 'r3', scope => 'payments', lease => '1 min');
-- A batch claims nothing, and does not answer "invalid".
SELECT * FROM idem_claim_many('{u,u}', '{r4,r5}', 'payment');
SELECT * FROM idem_claim_many('{u,u}', '{r4,r5}', 'payments');
-- A request that was claimed before is refused too: its answer needs a policy as well.
SELECT idem_claim('u', 'r1', 'paymnets');

-- What was claimed can be read and settled.
SELECT idem_status('u', 'r1', 'paymnets'), idem_result('u', 'r1', 'paymnets'), state FROM idem_lookup('u', 'r1', 'paymnets');
SELECT pg_temp.set_scopes('any');
SELECT token FROM idem_lease('u', 'lease', scope => 'undeclared', lease => '1 min') \gset
SELECT pg_temp.set_scopes('declared');
SELECT idem_extend('u', 'lease', :token, scope => 'undeclared') > now() AS extended;
SELECT idem_fence('u', 'lease', :token, scope => 'undeclared');
SELECT idem_complete('u', 'lease', '1', :token, 'undeclared'), idem_heal('u', 'lease', '1', 'undeclared'), idem_forget('u', 'lease', 'undeclared');

-- It acts on a transaction that has claimed already, and on the next claim after a change.
INSERT INTO idem_scopes (scope) VALUES ('orders');
BEGIN;
SELECT idem_claim('u', 'r6', 'orders');
DELETE FROM idem_scopes WHERE scope = 'orders';
SAVEPOINT s;
SELECT idem_claim('u', 'r7', 'orders');
ROLLBACK TO s;
INSERT INTO idem_scopes (scope) VALUES ('orders');
SELECT idem_claim('u', 'r7', 'orders');
ROLLBACK;

-- An application cannot change it.
CREATE ROLE regress_idem_app;
SELECT idem_grant('regress_idem_app', 'app');
SET ROLE regress_idem_app;
\set VERBOSITY sqlstate
SELECT pg_temp.set_scopes('any');
\set VERBOSITY default
SELECT idem_claim('u', 'r8', 'order');
RESET ROLE;
SELECT idem_revoke('regress_idem_app', 'app');
DO $$
BEGIN
	EXECUTE format('REVOKE ALL ON SCHEMA %s FROM regress_idem_app', (SELECT relnamespace::regnamespace FROM pg_class WHERE oid = 'idem_claims'::regclass));
END $$;
DROP ROLE regress_idem_app;

SELECT pg_temp.set_scopes('any');
TRUNCATE idem_claims, idem_scopes;
