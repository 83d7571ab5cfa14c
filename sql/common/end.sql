-- If it names no tablespace, it may stay empty.
SELECT set_config('default_tablespace', t.spcname, true) FROM pg_tablespace AS t
WHERE t.spcname = current_setting('idem_install.tablespace');
