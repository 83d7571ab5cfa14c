-- Which roles can read the statistics of the library, and call the functions behind them. For
-- the C edition.

\set SHOW_CONTEXT never
CREATE ROLE regress_idem_nobody;
CREATE ROLE regress_idem_app;
CREATE ROLE regress_idem_operator;
SELECT idem_grant('regress_idem_app', 'app');
SELECT idem_grant('regress_idem_operator', 'operator');

SET ROLE regress_idem_nobody;
SELECT * FROM idem_metrics;
SELECT * FROM idem_stat_claims;
SELECT idem_stat_reset();
RESET ROLE;
SELECT relname, r, string_agg(p, ', ' ORDER BY p COLLATE "C")
FROM pg_class c, unnest(ARRAY['pg_monitor', 'regress_idem_app', 'regress_idem_operator']) AS r,
	unnest(ARRAY['SELECT', 'INSERT', 'UPDATE', 'DELETE', 'TRUNCATE', 'REFERENCES', 'TRIGGER']) AS p
WHERE relname IN ('idem_stat_claims', 'idem_stat_scopes', 'idem_stat_table', 'idem_metrics') AND has_table_privilege(r, c.oid, p)
GROUP BY r, relname ORDER BY relname COLLATE "C", r COLLATE "C";
-- All functions that are not part of the contract
SELECT p.oid::regprocedure AS routine, has_function_privilege('regress_idem_app', objid, 'EXECUTE') AS app,
	has_function_privilege('regress_idem_operator', objid, 'EXECUTE') AS operator
FROM pg_depend d JOIN pg_extension e ON refobjid = e.oid JOIN pg_proc p ON p.oid = objid
WHERE extname = 'idem' AND classid = 'pg_proc'::regclass AND d.deptype = 'e' AND proname ~ '_stat_|_scopes_|_rights|_promise|_unsettled_|_held_|_start_worker'
ORDER BY p.proname COLLATE "C", p.pronargs;

DROP OWNED BY regress_idem_app, regress_idem_operator;
DROP ROLE regress_idem_nobody, regress_idem_app, regress_idem_operator;
