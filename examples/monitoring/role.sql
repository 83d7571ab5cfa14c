-- The role of an exporter, with the rights that it needs to read idem_metrics, and no other.
-- Run this in each database that has idem, as a superuser, with idem's schema in the search_path.
-- The owner of idem can run it, too, if the role exists and has pg_read_all_stats already: leave
-- out the lines about the role itself.
--
--	psql -d app -f role.sql
--	psql -d app -c '\password idem_exporter'
--
-- The role reads numbers and the names of scopes. It cannot read claims, nor who holds a
-- request: so it gets neither idem_grant(..., 'operator') nor pg_monitor.

\set ON_ERROR_STOP on

SELECT 'CREATE ROLE idem_exporter LOGIN CONNECTION LIMIT 4' WHERE to_regrole('idem_exporter') IS NULL
\gexec

-- Without this right idempotency_dead_rows_held_seconds is missing where a session of another
-- role holds dead rows back. The right shows the statements of all sessions: leave it out if
-- they are secret.
GRANT pg_read_all_stats TO idem_exporter;

SELECT n.nspname AS schema FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
WHERE c.oid = 'idem_metrics'::regclass
\gset

GRANT USAGE ON SCHEMA :"schema" TO idem_exporter;
GRANT SELECT ON :"schema".idem_metrics TO idem_exporter;

-- The functions that the view calls
SELECT format('GRANT EXECUTE ON FUNCTION %s TO idem_exporter', p.oid::regprocedure)
FROM pg_proc AS p
WHERE p.pronamespace = to_regnamespace(:'schema')
	AND p.proname IN ('idem_stat_cleanup_counters', 'idem_stat_claims_counters', 'idem_stat_scopes_counters',
		'idem_stat_cleaning', 'idem_stat_launcher', 'idem_stat_scope_shares')
\gexec

-- The configurations of the exporters name the view without a schema.
SELECT format('ALTER ROLE idem_exporter IN DATABASE %I SET search_path = %I', current_database(), :'schema')
\gexec
ALTER ROLE idem_exporter SET default_transaction_read_only = on;
ALTER ROLE idem_exporter SET statement_timeout = '10s';
