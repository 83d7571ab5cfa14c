-- ----- the end of an upgrade -----

-- What this version no longer has goes.  What it adds to a set of idem_grant() is granted to those who had all of the
-- set, that is, to whom idem_grant() gives no right on what was there, and who have not been locked out since.
DO $block$
DECLARE
	schema constant regnamespace := '@extschema@'::regnamespace;
	me constant oid := quote_ident(current_user)::regrole;
	known constant text[] := current_setting('idem_install.known');
	rights_on_known constant text := $$SELECT md5(string_agg(o.acl::text, ' ' ORDER BY o.class, o.oid, o.number))
		FROM (SELECT tableoid, oid, 0, proacl FROM pg_proc UNION ALL SELECT tableoid, oid, 0, relacl FROM pg_class
			UNION ALL SELECT 'pg_class'::regclass, attrelid, attnum, attacl FROM pg_attribute)
			AS o (class, oid, number, acl)
		WHERE o.acl IS NOT NULL AND (o.class, o.oid)::text = ANY ($1)$$;
	item record;
	before text;
	after text;
BEGIN
	IF current_setting('idem_install.upgrades') = '' THEN
		RETURN;
	END IF;
	FOR item IN
		SELECT p.oid::regprocedure AS name FROM pg_proc AS p
		WHERE p.pronamespace = schema AND p.proname ^@ 'idem__' AND p.proowner = me
			AND (p.tableoid, p.oid, p.ctid)::text = ANY (known)		-- not replaced
	LOOP
		EXECUTE format('DROP ROUTINE %s', item.name);
	END LOOP;
	FOR item IN
		SELECT DISTINCT a.grantee::regrole AS role, s.privileges
		FROM pg_proc AS p, aclexplode(p.proacl) AS a, (VALUES ('app'::text), ('operator')) AS s (privileges)
		WHERE p.pronamespace = schema AND p.proname ^@ 'idem_' AND p.proowner = me AND a.grantee NOT IN (0, me)
			AND has_schema_privilege(a.grantee, schema, 'USAGE')
	LOOP
		BEGIN
			EXECUTE rights_on_known INTO before USING known;
			PERFORM @extschema@.idem_grant(item.role, item.privileges);
			EXECUTE rights_on_known INTO after USING known;
			IF after <> before THEN
				RAISE SQLSTATE 'ID000';		-- and so undo it
			END IF;
		EXCEPTION WHEN SQLSTATE 'ID000' THEN
			NULL;
		END;
	END LOOP;
END $block$;
