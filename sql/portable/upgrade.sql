-- ----- an upgrade -----

-- Public tables, functions and views stay, with their rights; new ones take their places, as the end of this file says.
-- A new column or enum value is added here (ALTER TABLE ... ADD COLUMN IF NOT EXISTS, ALTER TYPE ... ADD VALUE IF NOT
-- EXISTS).  Internal objects are dropped and made anew, and internal tables filled where they are made.  It stays
--
-- - a function on which another role has a right, or another object depends: it is replaced, or dropped at the end;
-- - idem__cleanup_batches, the statistics;
-- - everything, if only bodies of functions differ (the first checksum): then calls that wait for the upgrade go on.
--
-- Nothing that is installed runs in an upgrade: its owner could have changed it, and a superuser may run this file.
DO $block$
DECLARE
	schema constant regnamespace := '@extschema@'::regnamespace;
	me constant oid := quote_ident(current_user)::regrole;
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
		ELSIF string_to_array(substring(installed FROM '^[0-9.]+'), '.')::int4[]
				> string_to_array(substring(this FROM '^[0-9.]+'), '.')::int4[] THEN
			RAISE EXCEPTION 'idem % is installed in schema %, and this file has %', installed, schema, this
				USING ERRCODE = 'object_not_in_prerequisite_state',
				HINT = 'Run the file of that version, or of a later one.';
		ELSIF current_setting('transaction_isolation') <> 'read committed' THEN
			RAISE 'idem cannot be upgraded in a transaction that is %', current_setting('transaction_isolation')
				USING ERRCODE = 'active_sql_transaction', HINT = 'BEGIN ISOLATION LEVEL READ COMMITTED.',
				DETAIL = 'It has to see what other transactions have committed until it has its locks.';
		END IF;
		EXIT WHEN has_locks;

		-- Transactions that use idem finish first, and claims wait.  In slices, so that claims go on while a long
		-- transaction is waited for, and that one, if it waits for us; but long enough for an autovacuum to make room.
		BEGIN
			PERFORM set_config('lock_timeout', greatest(1,
				date_part('epoch', least(slice, until - clock_timestamp())) * 1000)::int4::text, true);
			EXECUTE (SELECT format('LOCK TABLE %s IN ACCESS EXCLUSIVE MODE',
					string_agg(c.oid::regclass::text, ', ' ORDER BY c.relname ^@ 'idem__' DESC, c.relname DESC))
				FROM pg_class AS c
				WHERE c.relnamespace = schema AND c.relname ^@ 'idem_' AND c.relkind = 'r' AND c.relowner = me);
			has_locks := true;
		EXCEPTION WHEN lock_not_available OR deadlock_detected OR undefined_table THEN
			IF clock_timestamp() >= until THEN
				RAISE EXCEPTION 'idem cannot be upgraded now: transactions that use it did not end in %', patience
					USING ERRCODE = 'lock_not_available',
					DETAIL = (SELECT format('They are those of %s.',
							string_agg(DISTINCT coalesce('process ' || l.pid, 'a prepared transaction'), ', '))
						FROM pg_locks AS l JOIN pg_class AS c ON c.oid = l.relation
							JOIN pg_database AS d ON d.oid = l.database
						WHERE l.granted AND l.pid IS DISTINCT FROM pg_backend_pid() AND d.datname = current_database()
							AND c.relnamespace = schema AND c.relname ^@ 'idem_'),
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
			SELECT format('TRIGGER %I ON %s', t.tgname, c.oid::regclass)
			FROM pg_class AS c JOIN pg_trigger AS t ON t.tgrelid = c.oid AND NOT t.tgisinternal AND t.tgname ^@ 'idem__'
			WHERE c.relnamespace = schema AND c.relname ^@ 'idem_' AND c.relowner = me
			UNION ALL SELECT 'ROUTINE ' || p.oid::regprocedure FROM pg_proc AS p
			WHERE p.pronamespace = schema AND p.proname ^@ 'idem__' AND p.proowner = me
				AND NOT EXISTS (SELECT FROM aclexplode(p.proacl) AS a WHERE a.grantee <> me)
			UNION ALL SELECT CASE c.relkind WHEN 'c' THEN 'TYPE ' ELSE 'TABLE ' END || c.oid::regclass
			FROM pg_class AS c WHERE c.relnamespace = schema AND c.relname ^@ 'idem__' AND c.relowner = me
				AND c.relkind IN ('c', 'r') AND c.relname <> 'idem__cleanup_batches'
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
