-- ----- rights of the extension's owner -----

-- The owner of the extension gets what it needs to dump, to restore, to grant, and to lock
-- the tables for a move to the portable edition.  A superuser who restores a dump becomes the
-- owner of the extension, in place of the role that had installed idem into its own schema
-- and had granted rights.  So where a superuser owns the extension, the owner of the schema
-- gets the same rights.  (It could drop everything in the schema anyway.)
--
-- The trigger functions of idem_scopes are left out: their triggers need no such right, and no
-- other table may use them.
DO $block$
DECLARE
	me constant pg_extension := (SELECT e FROM pg_extension AS e WHERE e.extname = 'idem');
	schema constant regnamespace := me.extnamespace;
	owner regrole;
	routine regprocedure;
BEGIN
	FOR owner IN
		SELECT me.extowner
		UNION
		SELECT n.nspowner
		FROM pg_namespace n
			JOIN pg_database d ON d.datname = current_database()
			JOIN pg_roles person ON person.oid = CASE WHEN n.nspowner = 'pg_database_owner'::regrole THEN d.datdba ELSE n.nspowner END
			JOIN pg_roles installer ON installer.oid = me.extowner
		WHERE n.oid = me.extnamespace AND installer.rolsuper AND NOT person.rolsuper
	LOOP
		EXECUTE format('GRANT SELECT, INSERT ON %1$s.idem_claims TO %2$s WITH GRANT OPTION', schema, owner);
		EXECUTE format('GRANT TRUNCATE ON %1$s.idem_claims TO %2$s', schema, owner);
		EXECUTE format('GRANT SELECT, INSERT, UPDATE, DELETE ON %1$s.idem_scopes TO %2$s WITH GRANT OPTION', schema, owner);
		EXECUTE format('GRANT SELECT, UPDATE, USAGE ON SEQUENCE %1$s.idem_token_seq TO %2$s WITH GRANT OPTION', schema, owner);
		EXECUTE format('GRANT SELECT ON %1$s.idem_stat_cleanup, %1$s.idem_stat_claims, %1$s.idem_stat_scopes, %1$s.idem_stat_table, %1$s.idem_metrics, %1$s.idem_unsettled, %1$s.idem_holders TO %2$s WITH GRANT OPTION', schema, owner);
		EXECUTE format('GRANT USAGE ON TYPE %1$s.idem_state, %1$s.idem_outcome TO %2$s WITH GRANT OPTION', schema, owner);
		FOR routine IN
			SELECT p.oid
			FROM pg_depend d JOIN pg_proc p ON d.classid = 'pg_proc'::regclass AND d.objid = p.oid
			WHERE d.refclassid = 'pg_extension'::regclass AND d.refobjid = me.oid AND d.deptype = 'e'
				AND (p.prorettype <> 'trigger'::regtype OR p.proname = 'idem_skip_duplicates')
		LOOP
			EXECUTE format('GRANT EXECUTE ON ROUTINE %s TO %s WITH GRANT OPTION', routine, owner);
		END LOOP;
	END LOOP;
END
$block$;
