-- ----- the end of an upgrade -----

-- What this version no longer has goes.  What it adds to a set of idem_grant() is granted to those
-- who had all of the set: to whom idem_grant() gives nothing else.
DO $block$
DECLARE
	schema constant regnamespace := to_regnamespace('@extschema@');
	me constant oid := (SELECT r.oid FROM pg_roles AS r WHERE r.rolname = current_user);
	others constant text[] := current_setting('idem_install.others');
	rights_of_others constant text := $$SELECT md5(string_agg(o.acl::text, ' ' ORDER BY o.name, o.number)) FROM (
			SELECT 'ROUTINE ' || p.oid::regprocedure, 0, p.proacl FROM pg_proc AS p WHERE p.pronamespace = $1
			UNION ALL SELECT 'TABLE ' || c.oid::regclass, 0, c.relacl FROM pg_class AS c WHERE c.relnamespace = $1
			UNION ALL SELECT 'TABLE ' || a.attrelid::regclass, a.attnum, a.attacl
				FROM pg_attribute AS a JOIN pg_class AS c ON c.oid = a.attrelid WHERE c.relnamespace = $1) AS o (name, number, acl)
		WHERE o.name = ANY ($2)$$;
	object regprocedure;
	holder record;
	before text;
	after text;
BEGIN
	IF current_setting('idem_install.upgrades') = '' THEN
		RETURN;
	END IF;
	FOR object IN
		SELECT p.oid FROM pg_proc AS p WHERE p.pronamespace = schema AND p.proname ^@ 'idem__' AND p.proowner = me
			AND format('%s %s', p.oid, p.ctid) = ANY (current_setting('idem_install.places')::text[])
	LOOP
		EXECUTE format('DROP ROUTINE %s', object);
	END LOOP;
	FOR holder IN
		SELECT DISTINCT a.grantee::regrole AS role, s.privileges
		FROM pg_proc AS p, aclexplode(p.proacl) AS a, (VALUES ('app'), ('operator')) AS s (privileges)
		WHERE p.pronamespace = schema AND p.proname ^@ 'idem_' AND p.proowner = me AND a.grantee NOT IN (0, me)
			-- not who has been locked out since
			AND has_schema_privilege(a.grantee, schema, 'USAGE')
	LOOP
		BEGIN
			EXECUTE rights_of_others INTO before USING schema, others;
			PERFORM @extschema@.idem_grant(holder.role, holder.privileges::text);
			EXECUTE rights_of_others INTO after USING schema, others;
			IF after <> before THEN
				RAISE SQLSTATE 'ID000';		-- and so undo it
			END IF;
		EXCEPTION WHEN SQLSTATE 'ID000' THEN
			NULL;
		END;
	END LOOP;
END $block$;
