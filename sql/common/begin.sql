-- ----- before anything is made -----

-- Notes what is in the schema already and looks like ours: the script must not touch it.
--
-- Tables and indexes go where the database has its own: the installer's default_tablespace can
-- be one in which that role may create nothing.  The last part gives the setting back: in an
-- extension nothing else would, until the end of the transaction.
DO $block$
DECLARE
	schema constant regnamespace := @schema@;
BEGIN
	PERFORM set_config('idem_install.others', ARRAY(
			SELECT 'ROUTINE ' || p.oid::regprocedure FROM pg_proc AS p WHERE p.pronamespace = schema AND p.proname ^@ 'idem_'
			UNION ALL SELECT CASE c.relkind WHEN 'S' THEN 'SEQUENCE ' ELSE 'TABLE ' END || c.oid::regclass
			FROM pg_class AS c WHERE c.relnamespace = schema AND c.relname ^@ 'idem_'
			UNION ALL SELECT 'TYPE ' || t.oid::regtype
			FROM pg_type AS t WHERE t.typnamespace = schema AND t.typname ^@ 'idem_')::text, true),
		-- where the row of each routine is: one that the script replaces gets another place
		set_config('idem_install.places', ARRAY(SELECT format('%s %s', p.oid, p.ctid) FROM pg_proc AS p
			WHERE p.pronamespace = schema AND p.proname ^@ 'idem_')::text, true),
		set_config('idem_install.tablespace', current_setting('default_tablespace'), true),
		set_config('default_tablespace', '', true);
END $block$;
