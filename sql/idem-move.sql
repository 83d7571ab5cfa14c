/*
 * Moves idem in one database from one edition to the other, within its schema:
 *
 *		psql -v schema=idem -v to=idem -f sql/idem-move.sql
 *
 * to:	idem			the C edition
 *		idem_portable	the portable edition, as an extension; also NAME@idem_portable
 *
 * schema: default public.  Run it as the owner of the edition that is installed.  The portable
 * edition that idem-portable.sql has installed can become the extension, too; its next version
 * needs no move.
 *
 * It keeps claims, scopes, tokens and rights.  Between the editions a scope with key_time = uuidv7
 * is inserted anew, so its guarded_since becomes the time of the move plus a minute: older ids
 * without a row are stale.  From portable to portable guarded_since is kept: every claim that
 * was made under it is moved.  Settings become columns of idem_settings.  In the other
 * direction only postgresql.conf can hold them: the move compares them, and is refused while
 * they differ.  Statistics start from zero.
 *
 * Rights: a role that has everything that idem_grant() gives as 'app' or 'operator' gets that
 * set again by idem_grant(); every other right is granted singly.  A WARNING names each right
 * that the other edition does not have.  Create your own indexes, triggers and columns on
 * idem's tables again, and add the tables to your publications again.  No object of yours may
 * have a name that begins with idem_.
 *
 * It is refused while a role other than you and superusers can create objects in the schema,
 * or owns functions, operators or types in it; the owner of the schema is such a role.  It is
 * refused if idem is distributed over a Citus cluster.  Functions of sql/idem-citus.sql are
 * dropped: load that file again after moving back.
 *
 * It is one transaction: if it fails, nothing has changed.  It fails if other objects (a view,
 * or a trigger that calls idem_skip_duplicates()) depend on idem's, and names them with their
 * roles.
 *
 * It can run under load.  It waits for the transactions that use idem, for lock_timeout at
 * most, while claims wait for it.  A deadlock with such a transaction (40P01) is possible, and
 * changes nothing: run the move again.  A call that runs during the move can raise an error of
 * any SQLSTATE; its transaction is rolled back, and the client retries it as usual.  A session
 * that used idem's types before (in a prepared statement, or a variable of type
 * idem_outcome) may keep failing: have clients and poolers reconnect after the move.
 */

\set ON_ERROR_STOP on
\set ON_ERROR_ROLLBACK off
\if :{?schema}
\else
\set schema public
\endif
\if :{?to}
\else
\set to ''
\endif

-- READ COMMITTED: each copy is made after the locks were taken, and has to see all that was
-- committed until then.
BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE;
SET LOCAL client_min_messages = warning;
SET LOCAL row_security = off;				-- raise an error rather than leave rows behind

-- ----- whether it can be moved -----

-- No other schema may be in the search_path, here and below: an operator in it could match
-- better than the one in pg_catalog.
SET LOCAL search_path = pg_catalog, pg_temp;
SET LOCAL standard_conforming_strings = on;
SET LOCAL quote_all_identifiers = off;
SELECT set_config('idem_move.schema', :'schema', true) AS ignored, set_config('idem_move.to', :'to', true) AS ignored
\gset

DO $block$
DECLARE
	target constant text := current_setting('idem_move.to');
	schema_name constant text := current_setting('idem_move.schema');
	source text;
	owner oid;
BEGIN
	IF target !~ '^(idem|([^@]+@)?idem_portable)$' THEN
		RAISE EXCEPTION 'idem can be moved to idem or idem_portable'
			USING ERRCODE = 'invalid_parameter_value',
			HINT = 'Name one: psql -v to=idem for the C edition. A new version of idem-portable.sql needs no move: run that file.';
	END IF;

	IF schema_name ~ '["$''\\]' THEN
		RAISE EXCEPTION 'the name of the schema contains a quote, a dollar sign or a backslash'
			USING ERRCODE = 'invalid_schema_name', HINT = 'Rename it.';
	END IF;

	SELECT coalesce(e.extname, 'portable'), coalesce(e.extowner, c.relowner) INTO source, owner
	FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
		LEFT JOIN pg_depend AS d ON d.classid = 'pg_class'::regclass AND d.objid = c.oid
			AND d.refclassid = 'pg_extension'::regclass AND d.deptype = 'e'
		LEFT JOIN pg_extension AS e ON e.oid = d.refobjid
	WHERE c.relname = 'idem_claims' AND n.nspname = schema_name;
	IF NOT FOUND THEN
		RAISE EXCEPTION 'there is no idem in schema %', quote_ident(schema_name)
			USING ERRCODE = 'undefined_object',
			HINT = 'Name the schema where it is: psql -v schema=NAME.';
	ELSIF source = 'idem' AND target = 'idem' THEN
		RAISE EXCEPTION 'idem is installed as % already', target
			USING ERRCODE = 'duplicate_object', HINT = 'Its next version: ALTER EXTENSION idem UPDATE.';
	ELSIF EXISTS (SELECT FROM pg_class AS t JOIN pg_class AS c ON c.relnamespace = t.relnamespace AND c.relowner = t.relowner
			WHERE t.relname = 'idem__token_source' AND c.relname = 'idem_claims'
				AND t.relnamespace = quote_ident(schema_name)::regnamespace) THEN
		RAISE EXCEPTION 'idem is distributed over a cluster'
			USING ERRCODE = 'feature_not_supported',
			HINT = 'It cannot be moved.';
	ELSIF owner <> (SELECT r.oid FROM pg_roles AS r WHERE r.rolname = current_user) THEN
		RAISE EXCEPTION 'idem belongs to role %', owner::regrole
			USING ERRCODE = 'insufficient_privilege',
			DETAIL = 'Who moves it owns it, and its functions run with that role''s rights.',
			HINT = 'Move it as that role.';
	END IF;
	PERFORM set_config('idem_move.source', source, true);
END
$block$;

-- The checks of sql/idem-portable.sql.  They are repeated once the locks are taken: a
-- transaction that we waited for may have created objects.
SELECT $check$
DO $block$
DECLARE
	schema_name constant text := current_setting('idem_move.schema');
	owner constant oid := (SELECT r.oid FROM pg_roles AS r WHERE r.rolname = current_user);
	strangers oid[];				-- neither superusers nor the mover, nor members of those
	others text;
BEGIN
	strangers := ARRAY(SELECT r.oid FROM pg_roles AS r
		WHERE NOT EXISTS (SELECT FROM pg_roles AS t WHERE (t.rolsuper OR t.oid = owner) AND pg_has_role(r.oid, t.oid, 'MEMBER')));
	SELECT string_agg(DISTINCT CASE c.grantee WHEN '0'::oid THEN 'PUBLIC' ELSE r.oid::regrole::text END, ', ') INTO others
	FROM (SELECT CASE a.grantee WHEN 'pg_database_owner'::regrole THEN d.datdba ELSE a.grantee END
			FROM pg_database AS d, pg_namespace AS n, LATERAL (
				SELECT n.nspowner UNION SELECT x.grantee FROM aclexplode(n.nspacl) AS x WHERE x.privilege_type = 'CREATE') AS a (grantee)
			WHERE n.nspname = schema_name AND d.datname = current_database()) AS c (grantee)
		LEFT JOIN pg_roles AS r ON c.grantee <> '0'::oid AND pg_has_role(r.oid, c.grantee, 'MEMBER')
	WHERE c.grantee = '0'::oid OR r.oid = ANY (strangers);
	IF others IS NOT NULL THEN
		RAISE EXCEPTION 'others may create objects in schema %: %', quote_ident(schema_name), others
			USING ERRCODE = 'object_not_in_prerequisite_state',
			DETAIL = 'They could exchange what the move works on, which runs with your rights.',
			HINT = 'Revoke CREATE on the schema from them; if it is the owner, make it yours first: ALTER SCHEMA ... OWNER TO CURRENT_USER.';
	END IF;
	SELECT string_agg(o.name, ', ') INTO others
	FROM (SELECT 'function ' || p.oid::regprocedure FROM pg_proc AS p
			WHERE p.pronamespace = quote_ident(schema_name)::regnamespace AND p.proowner = ANY (strangers)
			UNION ALL SELECT 'operator ' || o.oid::regoperator FROM pg_operator AS o
			WHERE o.oprnamespace = quote_ident(schema_name)::regnamespace AND o.oprowner = ANY (strangers)
			UNION ALL SELECT 'type ' || t.oid::regtype FROM pg_type AS t LEFT JOIN pg_class AS c ON c.oid = t.typrelid
			WHERE t.typnamespace = quote_ident(schema_name)::regnamespace AND t.typowner = ANY (strangers)
				AND t.typcategory <> 'A' AND coalesce(c.relkind = 'c', true)		-- skip row types of tables
			ORDER BY 1 LIMIT 10) AS o (name);
	IF others IS NOT NULL THEN
		RAISE EXCEPTION 'others own objects in schema %: %', quote_ident(schema_name), others
			USING ERRCODE = 'object_not_in_prerequisite_state',
			DETAIL = 'The functions of idem run with the rights of their owner.',
			HINT = 'Have them dropped, or moved to another schema: ALTER ... SET SCHEMA.';
	END IF;
END
$block$
$check$ AS check_schema
\gset
:check_schema;

-- ----- what is kept -----

-- replace() puts the schema in for @extschema@: psql expands no variable inside a DO block.
SELECT replace($script$

-- Lock in the order in which claims lock: otherwise this deadlocks with them.  A claim of the
-- portable edition draws its token, reads its policy, and then gets at the claims.  The C
-- edition draws the token last.
DO $block$
BEGIN
	IF current_setting('idem_move.source') = 'idem' THEN
		LOCK TABLE @extschema@.idem_claims, @extschema@.idem_scopes IN ACCESS EXCLUSIVE MODE;
	ELSE
		LOOP
			BEGIN
				ALTER SEQUENCE @extschema@.idem_token_seq OWNED BY NONE;	-- only to lock it
				LOCK TABLE @extschema@.idem_settings, @extschema@.idem_scopes, @extschema@.idem_claims IN ACCESS EXCLUSIVE MODE;
				EXIT;
			EXCEPTION WHEN deadlock_detected THEN
				NULL;		-- Locks released: a settlement takes them in another order.
			END;
		END LOOP;
	END IF;
END
$block$;

$script$, '@extschema@', quote_ident(:'schema'))
\gexec

:check_schema;

SELECT replace($script$

-- Each call passes exactly the declared types (see sql/idem-portable.sql): no function of
-- another role can match better, not even one that was committed after the check.
DO $block$
BEGIN
	IF current_setting('idem_move.source') = 'idem' THEN
		PERFORM @extschema@.idem_fingerprint('0'::jsonb);		-- defines the settings
		CREATE TEMPORARY TABLE idem_moved_settings ON COMMIT DROP AS
			SELECT current_setting('idem.ttl')::interval AS ttl, current_setting('idem.lease')::interval AS lease,
				current_setting('idem.lease_max')::interval AS lease_max,
				(SELECT s.setting::int4 FROM pg_settings AS s WHERE s.name = 'idem.result_max_bytes') AS result_max_bytes,
				current_setting('idem.cleanup_batch_size')::int4 AS cleanup_batch_size,
				current_setting('idem.scopes') AS scopes;
	ELSE
		CREATE TEMPORARY TABLE idem_moved_settings ON COMMIT DROP AS
			SELECT d.ttl, d.lease, d.lease_max, d.result_max_bytes, d.cleanup_batch_size,
				d.scopes
			FROM @extschema@.idem_settings AS d;
	END IF;
END
$block$;

CREATE TEMPORARY TABLE idem_moved_claims ON COMMIT DROP AS
	SELECT c.expires_at, c.lease_until, c.token, c.state::text AS state,
		c.request_id, c.user_id, c.scope, c.fingerprint, c.result, c.progress
	FROM @extschema@.idem_claims AS c;

CREATE TEMPORARY TABLE idem_moved_scopes ON COMMIT DROP AS TABLE @extschema@.idem_scopes;
CREATE TEMPORARY TABLE idem_moved_token ON COMMIT DROP AS SELECT last_value, is_called FROM @extschema@.idem_token_seq;

-- Every right of another role, except those that the installation grants
CREATE TEMPORARY VIEW idem_rights AS
	SELECT o.kind, o.object, o.name, o.attribute, a.privilege_type AS privilege, a.grantee, a.is_grantable
	FROM (SELECT 'ROUTINE', p.oid::regprocedure::text, p.proname::text, NULL::text, p.proacl, p.proowner
			FROM pg_proc AS p WHERE p.pronamespace = '@extschema@'::regnamespace
			UNION ALL SELECT CASE c.relkind WHEN 'S' THEN 'SEQUENCE' ELSE 'TABLE' END, c.oid::regclass::text, c.relname::text, NULL, c.relacl, c.relowner
			FROM pg_class AS c WHERE c.relnamespace = '@extschema@'::regnamespace AND c.relkind IN ('r', 'v', 'S')
			UNION ALL SELECT 'TABLE', c.oid::regclass::text, c.relname::text, quote_ident(t.attname), t.attacl, c.relowner
			FROM pg_class AS c JOIN pg_attribute AS t ON t.attrelid = c.oid WHERE c.relnamespace = '@extschema@'::regnamespace
			UNION ALL SELECT 'TYPE', t.oid::regtype::text, t.typname::text, NULL, t.typacl, t.typowner
			FROM pg_type AS t WHERE t.typnamespace = '@extschema@'::regnamespace AND t.typtype IN ('c', 'e')
		) AS o (kind, object, name, attribute, acl, owner), aclexplode(o.acl) AS a
	WHERE o.name LIKE 'idem\_%' AND a.grantee <> o.owner AND a.grantee <> to_regrole('pg_monitor')
		AND a.grantee <> (SELECT r.oid FROM pg_roles AS r WHERE r.rolname = current_user);

CREATE TEMPORARY TABLE idem_moved_rights ON COMMIT DROP AS TABLE pg_temp.idem_rights;

-- The roles that have every right of a set of idem_grant(): to whom it gives nothing.  For a
-- role that lacks one, it would give back what was revoked.
CREATE TEMPORARY TABLE idem_moved_sets (grantee oid, privileges text) ON COMMIT DROP;
DO $block$
DECLARE
	holder record;
BEGIN
	FOR holder IN
		SELECT DISTINCT r.grantee, s.privileges FROM pg_temp.idem_moved_rights AS r, (VALUES ('app'), ('operator')) AS s (privileges)
		WHERE r.grantee <> '0'::oid
	LOOP
		BEGIN
			PERFORM @extschema@.idem_grant(holder.grantee::regrole, holder.privileges::text);
			RAISE SQLSTATE 'ID000' USING MESSAGE = CASE WHEN EXISTS (		-- and so undo it
				SELECT r.kind, r.object, r.attribute, r.privilege FROM pg_temp.idem_rights AS r WHERE r.grantee = holder.grantee
				EXCEPT SELECT r.kind, r.object, r.attribute, r.privilege FROM pg_temp.idem_moved_rights AS r WHERE r.grantee = holder.grantee
			) THEN 'lacks some' ELSE 'has all' END;
		EXCEPTION WHEN SQLSTATE 'ID000' THEN
			IF SQLERRM = 'has all' THEN
				INSERT INTO pg_temp.idem_moved_sets VALUES (holder.grantee, holder.privileges);
			END IF;
		END;
	END LOOP;
END
$block$;
DROP VIEW pg_temp.idem_rights;

-- ----- the change -----

DO $block$
DECLARE
	source constant text := current_setting('idem_move.source');
	kind text;
	names text;
	lines text;
BEGIN
	IF source <> 'portable' THEN
		EXECUTE format('DROP EXTENSION %I', source);
		RETURN;
	END IF;
	-- Each kind in one command, so that those that depend on each other are dropped together.  Which
	-- internal ones there are differs between versions.
	FOREACH kind IN ARRAY ARRAY['VIEW', 'TABLE'] LOOP
		SELECT string_agg(c.oid::regclass::text, ', ') INTO names
		FROM pg_class AS c
		WHERE c.relnamespace = '@extschema@'::regnamespace AND c.relkind = CASE kind WHEN 'VIEW' THEN 'v' ELSE 'r' END
			AND (c.relname ^@ 'idem__' OR c.relname IN ('idem_claims', 'idem_scopes', 'idem_settings', 'idem_unsettled', 'idem_holders',
				'idem_stat_cleanup', 'idem_stat_table', 'idem_stat_scopes', 'idem_metrics'))
			AND c.relowner = (SELECT r.oid FROM pg_roles AS r WHERE r.rolname = current_user);
		EXECUTE format('DROP %s %s', kind, names);
	END LOOP;
	SELECT string_agg(p.oid::regprocedure::text, ', ') INTO names
	FROM pg_proc AS p
	WHERE p.pronamespace = '@extschema@'::regnamespace
		AND p.proowner = (SELECT r.oid FROM pg_roles AS r WHERE r.rolname = current_user)
		AND (p.proname ^@ 'idem__' OR p.proname IN (
			'idem_call', 'idem_claim', 'idem_try_claim', 'idem_lease', 'idem_claim_many', 'idem_complete', 'idem_fail', 'idem_heal', 'idem_forget', 'idem_erase',
			'idem_extend', 'idem_release', 'idem_fence', 'idem_result', 'idem_outcome', 'idem_status', 'idem_lookup', 'idem_lapsed', 'idem_fingerprint',
			'idem_cleanup', 'idem_cleanup_all', 'idem_grant', 'idem_revoke', 'idem_version',
			'idem_distribute', 'idem_skip_duplicates'));
	EXECUTE 'DROP ROUTINE ' || names;
	DROP SEQUENCE @extschema@.idem_token_seq;
	SELECT string_agg(t.oid::regtype::text, ', ') INTO names
	FROM pg_type AS t LEFT JOIN pg_class AS c ON c.oid = t.typrelid
	WHERE t.typnamespace = '@extschema@'::regnamespace
		AND t.typowner = (SELECT r.oid FROM pg_roles AS r WHERE r.rolname = current_user)
		AND (t.typname IN ('idem_state', 'idem_outcome') OR t.typname LIKE 'idem\_\_%' AND c.relkind = 'c');
	EXECUTE 'DROP TYPE ' || names;
EXCEPTION WHEN dependent_objects_still_exist THEN
	-- The server does not say whose objects these are.  Everybody can make one: a temporary view
	-- that has the OID of a table of ours needs no right.
	GET STACKED DIAGNOSTICS lines = PG_EXCEPTION_DETAIL;
	WITH RECURSIVE ours (class, oid) AS (
		SELECT o.class, o.oid
		FROM (SELECT 'pg_class'::regclass::oid, c.oid, c.relnamespace, c.relname, c.relowner FROM pg_class AS c
				UNION ALL SELECT 'pg_proc'::regclass, p.oid, p.pronamespace, p.proname, p.proowner FROM pg_proc AS p
				UNION ALL SELECT 'pg_type'::regclass, t.oid, t.typnamespace, t.typname, t.typowner FROM pg_type AS t
			) AS o (class, oid, schema, name, owner)
		WHERE o.schema = '@extschema@'::regnamespace AND o.name LIKE 'idem\_%'
			AND o.owner = (SELECT c.relowner FROM pg_class AS c WHERE c.oid = '@extschema@.idem_claims'::regclass)
		UNION SELECT d.classid, d.objid		-- indexes, constraints, row types: all that is dropped with them
		FROM ours JOIN pg_depend AS d ON d.refclassid = ours.class AND d.refobjid = ours.oid AND d.deptype IN ('a', 'i'))
	SELECT string_agg(DISTINCT pg_describe_object(o.class, o.oid, 0) || ' of role '
			|| (SELECT coalesce(max(s.refobjid), '10')::regrole FROM pg_shdepend AS s JOIN pg_database AS b ON b.oid = s.dbid
				WHERE b.datname = current_database() AND s.classid = o.class AND s.objid = o.oid AND s.deptype = 'o'), ', ')
	INTO names
	FROM ours JOIN pg_depend AS d ON d.refclassid = ours.class AND d.refobjid = ours.oid AND d.deptype = 'n'
		LEFT JOIN pg_depend AS part ON part.classid = d.classid AND part.objid = d.objid AND part.deptype IN ('a', 'i')
			AND part.refclassid IN ('pg_class'::regclass, 'pg_type'::regclass),		-- the view of a rule, the table of a trigger
		LATERAL (SELECT coalesce(part.refclassid, d.classid), coalesce(part.refobjid, d.objid)) AS o (class, oid)
	WHERE NOT EXISTS (SELECT FROM ours AS x WHERE x.class = o.class AND x.oid = o.oid);
	RAISE EXCEPTION 'objects depend on idem: %', names
		USING ERRCODE = 'dependent_objects_still_exist', DETAIL = lines,
		HINT = 'Have them dropped, by these roles or by a superuser, and move again. A temporary one goes with its session.';
END
$block$;

$script$, '@extschema@', quote_ident(:'schema'))
\gexec

CREATE EXTENSION :"to" SCHEMA :"schema";

SELECT replace($script$

DO $block$
DECLARE
	differ text;
	kept text;
BEGIN
	IF current_setting('idem_move.to') <> 'idem' THEN
		INSERT INTO @extschema@.idem_settings (ttl, lease, lease_max, result_max_bytes, cleanup_batch_size, scopes)
			SELECT d.ttl, d.lease, d.lease_max, d.result_max_bytes, d.cleanup_batch_size, d.scopes FROM pg_temp.idem_moved_settings AS d;
		RETURN;
	END IF;
	PERFORM @extschema@.idem_fingerprint('0'::jsonb);		-- defines the settings
	-- In the units of the settings, rounded up
	SELECT string_agg(format('%s is %s%s', s.name, s.setting, s.unit), ', ' ORDER BY s.name),
		string_agg(format('%s = ''%s%s''', s.name, d.kept, s.unit), ', ' ORDER BY s.name)
	INTO differ, kept
	FROM pg_temp.idem_moved_settings AS m,
		LATERAL (VALUES ('idem.ttl', date_part('epoch', m.ttl)), ('idem.lease', date_part('epoch', m.lease)),
			('idem.lease_max', date_part('epoch', m.lease_max)), ('idem.result_max_bytes', m.result_max_bytes),
			('idem.cleanup_batch_size', m.cleanup_batch_size), ('idem.scopes', NULL)) AS v (name, value)
		JOIN pg_settings AS s ON s.name = v.name,
		LATERAL (SELECT CASE WHEN v.value IS NULL THEN m.scopes
			ELSE ceil(v.value * CASE s.unit WHEN 'ms' THEN 1000 ELSE 1 END)::int8::text END) AS d (kept)
	WHERE s.setting <> d.kept;
	IF differ IS NOT NULL THEN
		RAISE EXCEPTION 'the settings are not those of idem_settings: %', differ
			USING ERRCODE = 'object_not_in_prerequisite_state',
			HINT = format('Put into postgresql.conf, each on a line of its own, reload it, and move again: %s.', kept);
	END IF;
END
$block$;

INSERT INTO @extschema@.idem_claims (expires_at, lease_until, token, state, request_id, user_id, scope, fingerprint, result, progress)
	SELECT c.expires_at, c.lease_until, c.token, c.state::@extschema@.idem_state,
		c.request_id, c.user_id, c.scope, c.fingerprint, c.result, c.progress
	FROM pg_temp.idem_moved_claims AS c;

DO $block$
DECLARE
	stays_portable constant boolean := 'idem' NOT IN (current_setting('idem_move.source'), current_setting('idem_move.to'));
BEGIN
	IF stays_portable THEN		-- The guard would set guarded_since.
		ALTER TABLE @extschema@.idem_scopes DISABLE TRIGGER idem__scopes_guard;
	END IF;
	INSERT INTO @extschema@.idem_scopes (scope, ttl, lease, lease_max, failed, lapsed, expired, key_time, result_max_bytes, guarded_since)
		SELECT p.scope, p.ttl, p.lease, p.lease_max, p.failed, p.lapsed, p.expired, p.key_time, p.result_max_bytes, p.guarded_since
		FROM pg_temp.idem_moved_scopes AS p;
	IF stays_portable THEN
		ALTER TABLE @extschema@.idem_scopes ENABLE TRIGGER idem__scopes_guard;
	END IF;
END
$block$;

DO $block$
DECLARE
	moved record;
	is_there boolean;
BEGIN
	PERFORM setval('@extschema@.idem_token_seq', t.last_value, t.is_called) FROM pg_temp.idem_moved_token AS t;
	PERFORM @extschema@.idem_grant(s.grantee::regrole, s.privileges::text) FROM pg_temp.idem_moved_sets AS s;
	FOR moved IN
		SELECT r.*, CASE r.grantee WHEN '0'::oid THEN 'PUBLIC' ELSE r.grantee::regrole::text END AS role,
			format('%s%s ON %s %s', r.privilege, ' (' || r.attribute || ')', r.kind, r.object) AS privileges,
			EXISTS (SELECT FROM pg_temp.idem_moved_sets AS s WHERE s.grantee = r.grantee AND s.privileges = 'operator') AS is_operator
		FROM pg_temp.idem_moved_rights AS r
	LOOP
		is_there := CASE moved.kind WHEN 'ROUTINE' THEN to_regprocedure(moved.object) IS NOT NULL
			WHEN 'TYPE' THEN to_regtype(moved.object) IS NOT NULL
			ELSE to_regclass(moved.object) IS NOT NULL AND (moved.attribute IS NULL OR EXISTS (SELECT FROM pg_attribute AS a
				WHERE a.attrelid = to_regclass(moved.object) AND quote_ident(a.attname) = moved.attribute)) END;
		IF is_there THEN
			BEGIN
				EXECUTE format('GRANT %s TO %s', moved.privileges, moved.role);
				IF moved.is_grantable THEN
					BEGIN
						EXECUTE format('GRANT %s TO %s WITH GRANT OPTION', moved.privileges, moved.role);
					EXCEPTION WHEN insufficient_privilege OR invalid_grant_operation THEN
						RAISE WARNING 'a right is kept without its grant option: % to %', moved.privileges, moved.role;
					END;
				END IF;
			EXCEPTION WHEN insufficient_privilege THEN
				is_there := false;
			END;
		END IF;
		-- No WARNING for a right that idem_grant() gives an operator in one edition only, nor for
		-- the parts of idem_call() that only the portable edition needs.
		IF NOT is_there AND NOT (moved.is_operator AND moved.name ~ '^idem_(_?stat_|metrics|settings|_unsettled_claims|_held_keys|start_worker)')
			AND NOT moved.name ^@ 'idem__call_' THEN
			RAISE WARNING 'a right is not kept: % to %', moved.privileges, moved.role
				USING HINT = 'The other edition does not have it, or you cannot grant it there.';
		END IF;
	END LOOP;
END
$block$;

$script$, '@extschema@', quote_ident(:'schema'))
\gexec

SELECT format('moved from %s to %s: %s claims, %s scopes', current_setting('idem_move.source'), :'to',
	(SELECT count(*) FROM pg_temp.idem_moved_claims), (SELECT count(*) FROM pg_temp.idem_moved_scopes)) AS moved
\gset

COMMIT;
\echo :moved
