-- ----- the end of an upgrade -----

-- What this version no longer has goes.  What it adds to a set of idem_grant() is granted to those who had all of the
-- set: to whom idem_grant() gives nothing else.
DO $block$
DECLARE
	schema constant regnamespace := '@extschema@'::regnamespace;
	me constant oid := (SELECT r.oid FROM pg_roles AS r WHERE r.rolname = current_user);
	known constant text[] := current_setting('idem_install.known');
	rights_on_known constant text := $$SELECT md5(string_agg(o.acl::text, ' ' ORDER BY o.class, o.oid, o.number))
		FROM (SELECT tableoid, oid, 0, proacl FROM pg_proc UNION ALL SELECT tableoid, oid, 0, relacl FROM pg_class
			UNION ALL SELECT 'pg_class'::regclass, attrelid, attnum, attacl FROM pg_attribute) AS o (class, oid, number, acl)
		WHERE o.acl IS NOT NULL AND (o.class, o.oid)::text = ANY ($1)$$;
	object text;
	holder record;
	before text;
	after text;
BEGIN
	IF current_setting('idem_install.upgrades') = '' THEN
		RETURN;
	END IF;
	FOR object IN
		SELECT p.oid::regprocedure FROM pg_proc AS p WHERE p.pronamespace = schema AND p.proname ^@ 'idem__' AND p.proowner = me
			AND (p.tableoid, p.oid, p.ctid)::text = ANY (known)		-- this version has not replaced it
	LOOP
		EXECUTE 'DROP ROUTINE ' || object;
	END LOOP;
	FOR holder IN
		SELECT DISTINCT a.grantee::regrole AS role, s.privileges
		FROM pg_proc AS p, aclexplode(p.proacl) AS a, (VALUES ('app'), ('operator')) AS s (privileges)
		WHERE p.pronamespace = schema AND p.proname ^@ 'idem_' AND p.proowner = me AND a.grantee NOT IN (0, me)
			AND has_schema_privilege(a.grantee, schema, 'USAGE')		-- not who has been locked out since
	LOOP
		BEGIN
			EXECUTE rights_on_known INTO before USING known;
			PERFORM @extschema@.idem_grant(holder.role, holder.privileges::text);
			EXECUTE rights_on_known INTO after USING known;
			IF after <> before THEN
				RAISE SQLSTATE 'ID000';		-- and so undo it
			END IF;
		EXCEPTION WHEN SQLSTATE 'ID000' THEN
			NULL;
		END;
	END LOOP;
END $block$;
