/*
 * Objects of the extension idem 1.0.
 *
 * The extension is trusted: a role that may create objects in the database can
 * install it, and the objects then belong to the bootstrap superuser.  So
 *
 * - every name of ours is qualified.  Other names are looked up in pg_catalog alone: the script
 *	 sets the search_path, and so does each function in SQL that does not qualify its names;
 * - no name of a schema or a role is substituted within quotes, which it could end: where a
 *	 string needs one, it comes from pg_extension;
 * - no function here is SECURITY DEFINER.  What is in C acts on the extension's own
 *	 objects, by OID; what is in SQL runs with the caller's rights;
 * - rights are granted at the end, after all others were revoked, and only to the owner
 *	 of the extension, for dumping, restoring and granting, and to pg_monitor.
 */

-- complain if the script is sourced in psql rather than by CREATE EXTENSION
\echo Use "CREATE EXTENSION idem" to load this file. \quit

-- ----- whether it can be installed -----

-- CREATE EXTENSION has put the schema into the search_path, in front of objects of its owner.
DO $block$
BEGIN
	IF pg_catalog.current_setting('server_version_num')::pg_catalog.int4 OPERATOR(pg_catalog.<) 150004 THEN
		RAISE EXCEPTION 'idem needs PostgreSQL 15.4 or later'
			USING ERRCODE = 'feature_not_supported',
			DETAIL = 'Older releases paste the name of a schema into the scripts of trusted extensions unchecked (CVE-2023-39417).',
			HINT = 'Update the server to the newest minor release of PostgreSQL 15.';
	END IF;
	-- This script makes objects by the name of the schema, and finds them by its OID.  Until it has
	-- ended, the name must mean that schema: an owner who renames it could have the script run his
	-- function as a superuser.  ALTER SCHEMA waits for the lock of the row.
	PERFORM FROM pg_catalog.pg_extension e JOIN pg_catalog.pg_namespace n ON n.oid OPERATOR(pg_catalog.=) e.extnamespace
	WHERE e.extname OPERATOR(pg_catalog.=) 'idem' AND n.nspname OPERATOR(pg_catalog.=) pg_catalog.current_schema()
	FOR SHARE OF n;
	IF NOT FOUND THEN
		RAISE EXCEPTION 'the schema of extension idem was renamed or dropped meanwhile'
			USING ERRCODE = 'object_not_in_prerequisite_state', HINT = 'Create the extension again.';
	END IF;
END
$block$;

-- CREATE EXTENSION sets it back.
SET LOCAL search_path = pg_catalog, pg_temp;

DO $block$
DECLARE
	me pg_extension;
	other text;
BEGIN
	SELECT e.* INTO me FROM pg_extension e WHERE e.extname = 'idem';

	-- This script runs as a superuser, so the server does not ask whether the installer may.
	IF NOT has_schema_privilege(me.extowner, me.extnamespace, 'CREATE') THEN
		RAISE EXCEPTION 'role % may not create objects in schema %', me.extowner::regrole, me.extnamespace::regnamespace
			USING ERRCODE = 'insufficient_privilege',
			HINT = format('GRANT CREATE ON SCHEMA %s TO %s; or install idem into a schema of its own.',
				me.extnamespace::regnamespace, me.extowner::regrole);
	END IF;

	-- Two editions in one database would not know of each other's claims.  Temporary schemas
	-- are ignored: nobody installs idem there.
	SELECT format('%I', n.nspname) INTO other
	FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace
		JOIN pg_class c ON c.relnamespace = n.oid AND c.relname = 'idem_claims'
	WHERE p.proname = 'idem_try_claim'
		AND NOT starts_with(n.nspname::text, 'pg_temp_')
	LIMIT 1;
	IF FOUND THEN
		RAISE EXCEPTION 'idem is installed in this database already, in schema %', other
			USING ERRCODE = 'duplicate_object',
			DETAIL = 'It is the portable edition.',
			HINT = 'Move it here with its claims: sql/idem-move.sql. If you drop it instead, all claims are lost, and retries are executed again.';
	END IF;

	-- A call with untyped literals, such as idem_grant('app', 'app'), would find them first.
	SELECT string_agg(p.oid::regprocedure::text, ', ') INTO other
	FROM pg_proc p JOIN pg_roles r ON r.oid = p.proowner
	WHERE p.pronamespace = me.extnamespace
		AND starts_with(p.proname::text, 'idem_')
		AND NOT r.rolsuper AND r.oid <> me.extowner;
	IF other IS NOT NULL THEN
		RAISE EXCEPTION 'others own functions in schema % that would be called instead of those of idem: %',
				me.extnamespace::regnamespace, other
			USING ERRCODE = 'object_not_in_prerequisite_state',
			HINT = 'Drop them, or install idem into a schema of its own.';
	END IF;
	SELECT string_agg(CASE WHEN a.grantee = '0'::oid THEN 'PUBLIC'
			ELSE a.grantee::regrole::text END, ', ') INTO other
	FROM pg_namespace n, aclexplode(n.nspacl) a
	WHERE n.oid = me.extnamespace
		AND a.privilege_type = 'CREATE' AND a.grantee <> n.nspowner
		AND a.grantee <> me.extowner;
	IF other IS NOT NULL THEN
		RAISE WARNING 'others may create objects in schema %: %', me.extnamespace::regnamespace, other
			USING DETAIL = 'A function that they create there, idem_claim(varchar, varchar) or idem_grant(text, text) say, can be called instead of the one of idem.',
			HINT = 'Revoke CREATE on the schema from them; or drop the extension and install it into a schema of its own.';
	END IF;
END
$block$;
