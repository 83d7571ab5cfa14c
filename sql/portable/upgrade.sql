-- ----- an upgrade -----

-- What is installed keeps its tables, its public functions and views, and their rights: the parts below put the new ones
-- in their place (how: see the end).  Of objects with two underscores, those go that only idem uses, and are made anew:
-- so a version may change them at will.  It stays
--
-- - an internal function on which somebody has a right, or another object depends: it is replaced in its place, or
--	 dropped at the end if this version has none of its name;
-- - idem__cleanup_batches, the statistics.  Any other internal table has to be filled where it is made;
-- - all of them, if this version differs in bodies of functions only (the first checksum): then calls that wait for the
--	 upgrade go on, too.
--
-- What a version adds to a public table or enum, it adds here: ALTER TABLE ... ADD COLUMN IF NOT EXISTS, ALTER TYPE ...
-- ADD VALUE IF NOT EXISTS.
--
-- No function, trigger or view that is installed runs in an upgrade: its owner could have changed it, and a superuser
-- may run this file.
DO $block$
DECLARE
	schema constant regnamespace := '@extschema@'::regnamespace;
	me constant oid := (SELECT r.oid FROM pg_roles AS r WHERE r.rolname = current_user);
	this constant text := '@version@';
	installed text;					-- NULL: from before idem_version()
	caller_timeout constant text := current_setting('lock_timeout');
	patience constant interval := CASE caller_timeout WHEN '0' THEN '30 s' ELSE caller_timeout END;
	until constant timestamptz := clock_timestamp() + patience;
	slice interval := '100 ms';
	has_locks boolean := false;
	object text;
	dropped boolean := true;
	dependent text;
BEGIN
	IF current_setting('idem_install.upgrades') = '' THEN
		RETURN;
	END IF;
	LOOP
		-- Once more under the locks: another session may have upgraded.  The version is read, not asked for.
		installed := (SELECT substring(p.prosrc FROM '''(.*)''') FROM pg_proc AS p
			WHERE p.pronamespace = schema AND p.proname = 'idem_version' AND p.pronargs = 0 AND p.proowner = me);
		IF installed = this THEN
			RAISE SQLSTATE 'ID000' USING MESSAGE = format('idem %s is installed in schema %s already', this, schema);
		ELSIF string_to_array(substring(installed FROM '^[0-9.]+'), '.')::int4[] > string_to_array(substring(this FROM '^[0-9.]+'), '.')::int4[] THEN
			RAISE EXCEPTION 'idem % is installed in schema %, and this file has %', installed, schema, this
				USING ERRCODE = 'object_not_in_prerequisite_state', DETAIL = 'Nothing was changed.',
				HINT = 'Run the file of that version, or of a later one.';
		ELSIF current_setting('transaction_isolation') <> 'read committed' THEN
			RAISE EXCEPTION 'idem cannot be upgraded in a transaction that is %', current_setting('transaction_isolation')
				USING ERRCODE = 'active_sql_transaction', HINT = 'BEGIN ISOLATION LEVEL READ COMMITTED.',
				DETAIL = 'It has to see what other transactions have committed until it has its locks.';
		END IF;
		EXIT WHEN has_locks;

		-- All who have used idem finish first, and claims wait from then on.  In slices, so that claims go on while a long
		-- transaction is waited for, and that one too, if it waits for us; but long enough for an autovacuum to make room.
		BEGIN
			PERFORM set_config('lock_timeout',
				greatest(1, date_part('epoch', least(slice, until - clock_timestamp())) * 1000)::int4::text, true);
			EXECUTE (SELECT format('LOCK TABLE %s IN ACCESS EXCLUSIVE MODE',
					string_agg(c.oid::regclass::text, ', ' ORDER BY c.relname ^@ 'idem__' DESC, c.relname DESC))
				FROM pg_class AS c WHERE c.relnamespace = schema AND c.relname ^@ 'idem_' AND c.relkind = 'r' AND c.relowner = me);
			has_locks := true;
		EXCEPTION WHEN lock_not_available OR deadlock_detected OR undefined_table THEN
			IF clock_timestamp() >= until THEN
				RAISE EXCEPTION 'idem cannot be upgraded now: transactions that use it did not end in %', patience
					USING ERRCODE = 'lock_not_available',
					DETAIL = (SELECT 'They are those of ' || string_agg(DISTINCT coalesce('process ' || l.pid, 'a prepared transaction'), ', ') || '.'
						FROM pg_locks AS l JOIN pg_class AS c ON c.oid = l.relation AND c.relnamespace = schema AND c.relname ^@ 'idem_'
						WHERE l.granted AND l.database = (SELECT d.oid FROM pg_database AS d WHERE d.datname = current_database())
							AND l.pid IS DISTINCT FROM pg_backend_pid()),
					HINT = 'End them, or set lock_timeout to wait longer. Nothing has changed.';
			END IF;
			PERFORM pg_sleep(0.1);
			slice := least(slice * 2, current_setting('deadlock_timeout')::interval + interval '1 s');
		END;
	END LOOP;
	PERFORM set_config('lock_timeout', caller_timeout, true),
		set_config('idem_install.upgrades', coalesce(installed, 'an earlier version'), true);

	-- Again until nothing more can be dropped: they depend on each other.
	WHILE dropped AND substring(installed FROM '[+][0-9]+') IS DISTINCT FROM substring(this FROM '[+][0-9]+') LOOP
		dropped := false;
		dependent := NULL;
		FOR object IN
			SELECT format('TRIGGER %I ON %s', t.tgname, c.oid::regclass) FROM pg_trigger AS t JOIN pg_class AS c ON c.oid = t.tgrelid
			WHERE c.relnamespace = schema AND c.relname ^@ 'idem_' AND c.relowner = me AND t.tgname ^@ 'idem__' AND NOT t.tgisinternal
			UNION ALL SELECT 'ROUTINE ' || p.oid::regprocedure FROM pg_proc AS p
			WHERE p.pronamespace = schema AND p.proname ^@ 'idem__' AND p.proowner = me
				AND NOT EXISTS (SELECT FROM aclexplode(p.proacl) AS a WHERE a.grantee <> me)
			UNION ALL SELECT CASE c.relkind WHEN 'c' THEN 'TYPE ' ELSE 'TABLE ' END || c.oid::regclass FROM pg_class AS c
			WHERE c.relnamespace = schema AND c.relname ^@ 'idem__' AND c.relowner = me AND c.relkind IN ('c', 'r')
				AND c.relname <> 'idem__cleanup_batches'
		LOOP
			BEGIN
				EXECUTE 'DROP ' || object;
				dropped := true;
			EXCEPTION WHEN dependent_objects_still_exist THEN
				IF NOT object ^@ 'ROUTINE' THEN
					GET STACKED DIAGNOSTICS dependent = PG_EXCEPTION_DETAIL;
				END IF;
			END;
		END LOOP;
	END LOOP;
	-- Everybody can make such an object: a temporary view that has the OID of a table of ours needs no right.
	IF dependent IS NOT NULL THEN
		RAISE EXCEPTION 'objects depend on internal ones of idem'
			USING ERRCODE = 'dependent_objects_still_exist', DETAIL = dependent,
			HINT = 'Have them dropped, by their owners or by a superuser. A temporary one goes with its session.';
	END IF;
END $block$;
