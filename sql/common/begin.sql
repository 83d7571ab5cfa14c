-- ----- before anything is made -----

-- Notes what is in the schema already: the script changes no rights on that.  Of routines it notes where
-- their rows are, too: one that the script replaces gets another place.
SELECT set_config('idem_install.known', ARRAY(
		SELECT unnest(ARRAY[(o.class, o.oid)::text, (o.class, o.oid, o.place)::text])
		FROM (SELECT tableoid, oid, ctid, pronamespace, proname FROM pg_proc
			UNION ALL SELECT tableoid, oid, ctid, relnamespace, relname FROM pg_class
			UNION ALL SELECT tableoid, oid, ctid, typnamespace, typname FROM pg_type)
			AS o (class, oid, place, schema, name)
		WHERE o.schema = @schema@ AND o.name ^@ 'idem_')::text, true);

-- Tables go where the database has its own: the role may lack the right to use the session's default_tablespace.
-- The last statement gives it back: after a script of an extension nothing else would.
SELECT set_config('idem_install.tablespace', current_setting('default_tablespace'), true),
	set_config('default_tablespace', '', true);
