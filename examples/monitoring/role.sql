-- The role of an exporter, with the rights that it needs to read idem_metrics, and no other.
-- Run this in each database that has idem, with the schema of idem:
--
--	psql -d app -v schema=idem -f role.sql
--	psql -d app -c '\password idem_exporter'
--
-- The role reads numbers and the names of scopes. It cannot read claims, nor who holds a
-- request: so it gets neither idem_grant(..., 'operator') nor pg_monitor.
--
-- Variables (psql -v NAME=VALUE):
--	schema          the schema of idem; public if you leave it out
--	role            the name of the role; idem_exporter if you leave it out
--	read_all_stats  on: also grant pg_read_all_stats; off if you leave it out
--
-- Whom you trust. A view runs the functions in it with the rights of its reader, and the owner of
-- a database can put another view in the place of idem_metrics. So the owner of each database
-- that the role reads can use all rights of the role, and change its password: the setting
-- default_transaction_read_only below is no protection against that. If the owners of your
-- databases do not trust each other, make a role for each of them, and an exporter for each role.
--
-- read_all_stats=on shows the statements of all sessions in all databases of the server to the
-- role, and so to the owner of each database that it reads. Use it only if you trust all of them.
-- Without it idem_dead_rows_held_seconds is missing while a session of another role holds
-- dead rows back; idem_dead_rows_held_transactions is there without it.
--
-- Who runs this. The owner of idem can, who is no superuser, with CREATEROLE or once the role
-- exists. If the owner may not alter the role, a warning says what is missing then. A superuser
-- can: nothing here calls what the owner of the database has made.

\set ON_ERROR_STOP on
\if :{?schema}
\else
\set schema public
\endif
\if :{?role}
\else
\set role idem_exporter
\endif
\if :{?read_all_stats}
\else
\set read_all_stats off
\endif

BEGIN;
SET LOCAL search_path = pg_catalog, pg_temp;
SET LOCAL standard_conforming_strings = on;
SELECT set_config('idem_role.schema', :'schema', true) AS ignored, set_config('idem_role.role', :'role', true) AS ignored2,
	set_config('idem_role.read_all_stats', :'read_all_stats', true) AS ignored3
\gset

DO $block$
DECLARE
	schema_name constant text := current_setting('idem_role.schema');
	exporter constant text := current_setting('idem_role.role');
	read_all_stats constant boolean := current_setting('idem_role.read_all_stats')::boolean;
	claims record;
	object record;
BEGIN
	SELECT c.relowner AS owner, c.relnamespace AS schema, d.refobjid AS extension INTO claims
	FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
		LEFT JOIN pg_depend AS d ON d.classid = 'pg_class'::regclass AND d.objid = c.oid
			AND d.refclassid = 'pg_extension'::regclass AND d.deptype = 'e'
	WHERE n.nspname = schema_name AND c.relname = 'idem_claims' AND c.relkind = 'r';
	IF NOT FOUND THEN
		RAISE EXCEPTION 'there is no idem in schema %', quote_ident(schema_name)
			USING ERRCODE = 'undefined_object', HINT = 'Name the schema where it is: psql -v schema=NAME.';
	END IF;

	IF NOT EXISTS (SELECT FROM pg_roles AS r WHERE r.rolname = exporter) THEN
		EXECUTE format('CREATE ROLE %I LOGIN CONNECTION LIMIT 4', exporter);
	END IF;
	IF read_all_stats THEN
		EXECUTE format('GRANT pg_read_all_stats TO %I', exporter);
	END IF;
	IF NOT has_schema_privilege(exporter, claims.schema, 'USAGE') THEN
		EXECUTE format('GRANT USAGE ON SCHEMA %I TO %I', schema_name, exporter);
	END IF;

	-- The view, and the functions that it calls.  What is idem's has the owner of idem_claims, and
	-- belongs to the same extension, if that belongs to one.
	FOR object IN
		SELECT o.name, o.is_view, o.owner = claims.owner
			AND (claims.extension IS NULL OR EXISTS (SELECT FROM pg_depend AS d WHERE d.classid = o.catalog AND d.objid = o.oid
				AND d.refclassid = 'pg_extension'::regclass AND d.refobjid = claims.extension AND d.deptype = 'e')) AS is_ours
		FROM (SELECT v.tableoid, v.oid, v.oid::regclass::text, v.relowner, true FROM pg_class AS v
			WHERE v.relnamespace = claims.schema AND v.relname = 'idem_metrics'
			UNION ALL
			SELECT p.tableoid, p.oid, p.oid::regprocedure::text, p.proowner, false FROM pg_proc AS p
			WHERE p.pronamespace = claims.schema AND p.pronargs = 0
				AND p.proname IN ('idem__stat_cleanup_counters', 'idem__stat_claims_counters', 'idem__stat_scopes_counters',
					'idem__stat_cleaning', 'idem__stat_launcher', 'idem__stat_scope_shares')) AS o (catalog, oid, name, owner, is_view)
	LOOP
		IF NOT object.is_ours THEN
			RAISE EXCEPTION '% is not an object of idem', object.name
				USING ERRCODE = 'object_not_in_prerequisite_state', HINT = 'Somebody has put it there. Install idem again.';
		END IF;
		EXECUTE format('GRANT %s %s TO %I', CASE WHEN object.is_view THEN 'SELECT ON' ELSE 'EXECUTE ON FUNCTION' END, object.name, exporter);
	END LOOP;
	IF NOT has_table_privilege(exporter, quote_ident(schema_name) || '.idem_metrics', 'SELECT') THEN
		RAISE EXCEPTION 'role % cannot read %', quote_ident(exporter), quote_ident(schema_name) || '.idem_metrics'
			USING ERRCODE = 'insufficient_privilege', HINT = 'Run this as the owner of idem, or as a superuser.';
	END IF;

	BEGIN
		-- The configurations of the exporters name the view without a schema.
		EXECUTE format('ALTER ROLE %I IN DATABASE %I SET search_path = %I', exporter, current_database(), schema_name);
		EXECUTE format('ALTER ROLE %I SET default_transaction_read_only = on', exporter);
		EXECUTE format('ALTER ROLE %I SET statement_timeout = ''10s''', exporter);
	EXCEPTION WHEN insufficient_privilege THEN
		RAISE WARNING 'role % has no search_path, and no timeout: % may not alter it', quote_ident(exporter), quote_ident(current_user)
			USING HINT = format('Add search_path=%s&statement_timeout=10000 to the URL in the configuration of the exporter.', schema_name);
	END;
END
$block$;
COMMIT;
