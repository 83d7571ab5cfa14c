/*
 * idem on Citus: distributes the claims of the portable edition over a Citus cluster.
 *
 *		psql -v schema=idem -f sql/idem-portable.sql
 *		psql -v schema=idem -f sql/idem-citus.sql
 *		psql -c "SELECT idem.idem_distribute('accounts'::regclass)"
 *
 * on the coordinator, as the owner of idem.  Loading this file only adds functions, in one
 * transaction; idem_distribute() makes the change.  See doc/citus.md.
 *
 * A user's claims are then in the shard group that has the user's own rows, and a function
 * that is called with a user runs on the node of that group.  There it works as on one
 * server, with the exceptions below.
 *
 * What this file needs of sql/idem-portable.sql.  idem_distribute() puts a function
 * idem__citus_NAME() of this file in the place of idem__NAME():
 *
 *	key_of, check_scope, claim_marker	refuse on a node that is not admitted, see "Rights"
 *	latest_row			is in PL/pgSQL, since Citus refuses to plan an SQL function that
 *						reads a distributed table and has parameters
 *	claim_at_once, complete_at_once	decide the common case in one or two statements of Citus
 *	claim_all_at_once		does nothing: a batch is claimed one by one
 *	draw_token			draws the token of a lease on the node of its row, see "Tokens"
 *	check_sink			refuses a table that is not colocated with claims
 *	keep_place			keeps the shard on its node, see "Moves"
 *	keep_fence			writes the row of a lease, see "Fences"
 *	clean				has each node clean its own shards, see "Cleaning"
 *
 * It calls idem__raise(), idem__policy_of(), idem__is_ours(), idem__order_of() and
 * idem__has_key() of that file, and declares idem__is_ours() immutable.  It also relies on two
 * rules of that file: a query of idem_claims names the user whose claims it reads, and an
 * update of idem_claims calls no volatile function.
 *
 * Tokens.  A lock of the key orders the holders on one node only.  So a claimant draws its
 * token when its transaction has written the row: the holder before has ended by then, and had
 * drawn its own token before it ended.  It draws on the node of the shard, from a block of a
 * million numbers that the shard has there, in the order of the node's own sequence.  Blocks
 * come from the coordinator, in ascending order.  idem_token_blocks, whose shards move with
 * those of idem_claims, has the block of each shard, and the node that has drawn it.  A shard
 * that has come to another node, has been split, or has used up its block, draws a new one
 * before its next token.  So tokens grow wherever the shard is, and also if the row of the
 * previous holder is gone.  While the coordinator is down, leases can be claimed in shards
 * that have a block.
 *
 * Moves.  Citus keeps a shard on its node until the end of each transaction that has written to it,
 * but not for SELECT FOR UPDATE: the shard can move, and the row lock stays behind on the old copy.
 * Then another claimer can take over a lapsed lease on the new copy, and the late holder's next write
 * goes there too, without the lock.  A claim writes before it locks its row.  idem__lock_row() locks
 * first; so idem__keep_place() takes the lock that a write would take.
 *
 * Fences.  Citus commits in two phases only on nodes where the transaction has written.  If
 * a fence only locked the row, its node could crash, and the other nodes would commit
 * without it.
 *
 * Policy.  Each node has replicas of idem_scopes and idem_settings.  Functions that
 * read nothing else read those of their node as plain tables, by name: Citus plans each of its
 * own statements anew, which takes longer than the rest of a claim.  The guard is a trigger of
 * each replica of idem_scopes, and waits for the claims of its node.  So guarded_since differs
 * by milliseconds from node to node.
 *
 * Locks.  Citus takes LOCK TABLE on all nodes.  A claim takes its lock of idem_scopes on its
 * own node only, where the guard looks for it: hence citus.enable_ddl_propagation = off in
 * the functions that claim, and in the guard.
 *
 * Cleaning.  Citus cannot plan FOR UPDATE SKIP LOCKED across shards.  So each node cleans
 * its shards one by one, as plain tables, in a transaction of its own.  If a shard moves
 * meanwhile, rows that a batch deletes may survive in the new copy; a later batch deletes
 * them.
 *
 * Security.  As in sql/idem-portable.sql: the load is refused if others can create objects
 * in the schema or own some, every name of ours is qualified, each call passes all arguments
 * in exactly the declared types, and nothing is granted to others.  No function of this file
 * is SECURITY DEFINER; those that are put in place of another one run inside the functions
 * that are.
 *
 * Rights.  A role gets exactly those rights on the other nodes that it has on the coordinator,
 * where distributing changes none.  idem__token_source and idem_token_blocks are for the owner
 * alone.  Citus makes the functions on a new node by itself, where everybody may then call
 * them, and sends calls there without a look at the rights that the coordinator knows.  So the
 * functions do nothing on a node until idem_distribute() has admitted it, that is, has given it
 * the exact rights.  A node that is removed and added again is a new one: its group has
 * another number.
 */

\set ON_ERROR_STOP on
\if :{?schema}
\else
\set schema public
\endif
BEGIN;
SET LOCAL search_path = pg_catalog, pg_temp;
SET LOCAL standard_conforming_strings = on;
-- What is made here stays on this node until idem_distribute().
SET LOCAL citus.enable_ddl_propagation = off;
SELECT $$DO 'BEGIN RAISE EXCEPTION USING ERRCODE = ''invalid_schema_name'', MESSAGE = ''the name of the schema is empty, or contains a quote, a dollar sign or a backslash'', HINT = ''Name another one: psql -v schema=NAME.''; END'$$ WHERE :'schema' ~ '^$|["$''\\]'
\gexec
SELECT set_config('idem_install.schema', :'schema', true) AS ignored
\gset

-- ----- whether it can be loaded -----

DO $block$
DECLARE
	schema_name constant text := current_setting('idem_install.schema');
	claims record;
	strangers oid[];				-- neither superusers nor the owner, nor members of those
	others text;
BEGIN
	SELECT c.relowner AS owner, pg_get_userbyid(c.relowner) AS owner_name, n.oid::regnamespace AS schema,
		EXISTS (SELECT FROM pg_depend AS d WHERE d.classid = 'pg_class'::regclass AND d.objid = c.oid
			AND d.refclassid = 'pg_extension'::regclass AND d.deptype = 'e') AS is_of_extension
	INTO claims
	FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
	WHERE n.nspname = schema_name AND c.relname = 'idem_claims';
	IF NOT FOUND THEN
		RAISE EXCEPTION 'there is no idem in schema %', quote_ident(schema_name)
			USING ERRCODE = 'undefined_object',
			HINT = 'Install sql/idem-portable.sql first, or name the schema where it is: psql -v schema=NAME.';
	ELSIF claims.is_of_extension THEN
		RAISE EXCEPTION 'the objects of an extension cannot be distributed'
			USING ERRCODE = 'feature_not_supported',
			HINT = 'Drop the extension, and install sql/idem-portable.sql with psql.';
	ELSIF claims.owner_name <> current_user AND NOT (SELECT r.rolsuper FROM pg_roles AS r WHERE r.rolname = current_user) THEN
		RAISE EXCEPTION 'idem belongs to role %', claims.owner::regrole
			USING ERRCODE = 'insufficient_privilege', HINT = 'Load this file as that role.';
	END IF;

	-- The checks of sql/idem-portable.sql.  Others may have created objects since then.
	strangers := ARRAY(SELECT r.oid FROM pg_roles AS r
		WHERE NOT EXISTS (SELECT FROM pg_roles AS t WHERE (t.rolsuper OR t.oid = claims.owner) AND pg_has_role(r.oid, t.oid, 'MEMBER')));
	SELECT string_agg(DISTINCT CASE c.grantee WHEN '0'::oid THEN 'PUBLIC' ELSE r.oid::regrole::text END, ', ') INTO others
	FROM (SELECT CASE a.grantee WHEN 'pg_database_owner'::regrole THEN d.datdba ELSE a.grantee END
			FROM pg_database AS d, pg_namespace AS n, LATERAL (
				SELECT n.nspowner UNION SELECT x.grantee FROM aclexplode(n.nspacl) AS x WHERE x.privilege_type = 'CREATE') AS a (grantee)
			WHERE n.oid = claims.schema AND d.datname = current_database()) AS c (grantee)
		LEFT JOIN pg_roles AS r ON c.grantee <> '0'::oid AND pg_has_role(r.oid, c.grantee, 'MEMBER')
	WHERE c.grantee = '0'::oid OR r.oid = ANY (strangers);
	IF others IS NOT NULL THEN
		RAISE EXCEPTION 'others may create objects in schema %: %', claims.schema, others
			USING ERRCODE = 'object_not_in_prerequisite_state',
			DETAIL = 'The functions of idem run as their owner.',
			HINT = 'Revoke CREATE on the schema from them.';
	END IF;
	SELECT string_agg(o.name, ', ') INTO others
	FROM (SELECT 'function ' || p.oid::regprocedure FROM pg_proc AS p WHERE p.pronamespace = claims.schema AND p.proowner = ANY (strangers)
			UNION ALL SELECT 'operator ' || o.oid::regoperator FROM pg_operator AS o WHERE o.oprnamespace = claims.schema AND o.oprowner = ANY (strangers)
			UNION ALL SELECT 'type ' || t.oid::regtype FROM pg_type AS t LEFT JOIN pg_class AS c ON c.oid = t.typrelid
				WHERE t.typnamespace = claims.schema AND t.typowner = ANY (strangers)
					AND t.typcategory <> 'A' AND coalesce(c.relkind = 'c', true)		-- skip row types of tables
			ORDER BY 1 LIMIT 10) AS o (name);
	IF others IS NOT NULL THEN
		RAISE EXCEPTION 'others own objects in schema %: %', claims.schema, others
			USING ERRCODE = 'object_not_in_prerequisite_state',
			DETAIL = 'The functions of idem run as their owner.',
			HINT = 'Have them dropped, or moved to another schema: ALTER ... SET SCHEMA.';
	END IF;

	-- What a superuser adds belongs to the owner of idem, too.
	IF claims.owner_name <> current_user THEN
		PERFORM set_config('role', claims.owner_name, true);
	END IF;
END
$block$;

SELECT replace($script$

-- ----- nodes without exact rights -----

-- The groups (numbers of nodes) whose rights are exact.  idem__citus_admit() replaces it.
-- Stable: the planner then inlines it, and plans it again when it is replaced; the value of an
-- immutable function would stay in the plans of all sessions.
CREATE FUNCTION @extschema@.idem__citus_admitted()
RETURNS int4[]
LANGUAGE sql STABLE
AS $$ SELECT '{}'::int4[] $$;

CREATE FUNCTION @extschema@.idem__citus_admit(groups int4[])
RETURNS void
LANGUAGE plpgsql
AS $$
BEGIN
	EXECUTE pg_catalog.format('CREATE OR REPLACE FUNCTION %s.idem__citus_admitted() RETURNS int4[] LANGUAGE sql STABLE AS %L',
		'@extschema@', pg_catalog.format('SELECT %L::int4[]', groups));
END
$$;

CREATE FUNCTION @extschema@.idem__citus_require_admission()
RETURNS void
LANGUAGE plpgsql
AS $$
BEGIN
	IF NOT EXISTS (SELECT FROM pg_dist_local_group AS g WHERE g.groupid = ANY (@extschema@.idem__citus_admitted())) THEN
		PERFORM @extschema@.idem__raise('55000', 'idem cannot be used on this node yet',
			'The node was added, and has not got the rights of the coordinator. Call idem_distribute(NULL::regclass) on the coordinator, and retry.');
	END IF;
END
$$;

-- All functions that run as their owner and take ids or a scope call one of these two first; the
-- trigger of a sink calls idem__citus_check_sink() and idem__citus_claim_marker(), and those that
-- clean idem__citus_clean().
CREATE FUNCTION @extschema@.idem__citus_key_of(user_id text, request_id text, scope text)
RETURNS @extschema@.idem__key
LANGUAGE plpgsql
AS $$
DECLARE
	ignored constant text := @extschema@.idem__citus_require_admission();
BEGIN
	RETURN @extschema@.idem__local_key_of(user_id, request_id, scope);
END
$$;

CREATE FUNCTION @extschema@.idem__citus_check_scope(scope text)
RETURNS void
LANGUAGE plpgsql
AS $$
BEGIN
	PERFORM @extschema@.idem__citus_require_admission(), @extschema@.idem__local_check_scope(scope);
END
$$;

CREATE FUNCTION @extschema@.idem__citus_claim_marker(key @extschema@.idem__key, command text, fingerprint bytea, wait interval)
RETURNS @extschema@.idem__answer
LANGUAGE plpgsql
AS $$
DECLARE
	ignored constant text := @extschema@.idem__citus_require_admission();
BEGIN
	RETURN @extschema@.idem__local_claim_marker(key, command, fingerprint, wait);
END
$$;

-- ----- reading -----

CREATE FUNCTION @extschema@.idem__citus_latest_row(key @extschema@.idem__key)
RETURNS SETOF @extschema@.idem__claim
LANGUAGE plpgsql STABLE ROWS 1
AS $$
BEGIN
	RETURN QUERY SELECT c.expires_at, c.lease_until, c.token, c.state, c.request_id, c.user_id, c.scope, c.fingerprint, c.result, c.progress
	FROM @extschema@.idem_claims AS c
	WHERE @extschema@.idem__has_key(c.user_id, c.request_id, c.scope, key)
	ORDER BY @extschema@.idem__order_of(c.xmin) LIMIT 1;
END
$$;

-- ----- claiming -----

-- Takes the place of idem__claim_at_once() of sql/idem-portable.sql, which rests on locks that a
-- statement takes before its snapshot, and finds rows by their place.  This one decides as
-- idem__claim_key() does: it re-checks the policy under its lock.  It takes one statement of
-- Citus if the key is new, two if it is completed.  Its other statements read replicas of this
-- node, see idem__citus_place_reads().
--
-- The plans of both statements are kept: otherwise Citus plans them anew in each call, before it
-- plans them for the shard.  Each calls clock_timestamp(), because it is volatile.  Otherwise
-- Citus 13.2.1 and later keep one more plan for the shard in each call, 20 kB or more, until the
-- session ends.
CREATE FUNCTION @extschema@.idem__citus_claim_at_once(
	of_user text, of_request text, of_scope text, of_fingerprint bytea, wait interval,
	OUT outcome text, OUT result jsonb, OUT progress jsonb, OUT token int8, OUT expires_at timestamptz, OUT lease_until timestamptz)
LANGUAGE plpgsql
SET lock_timeout = '100' SET plan_cache_mode = force_generic_plan
AS $$
DECLARE
	ttl interval;
	of_policy text;				-- what the row of the scope says; NULL: it has none
	promised timestamptz;
	is_plain boolean;
	held text;
	ignored text;				-- assigned to, since PERFORM would need a query
BEGIN
	-- As in sql/idem-portable.sql
	IF (octet_length(of_user) BETWEEN 1 AND 255 AND octet_length(of_request) BETWEEN 1 AND 255 AND octet_length(of_scope) <= 255
			AND (of_fingerprint IS NULL OR octet_length(of_fingerprint) BETWEEN 1 AND 64)
			AND CASE WHEN wait IS NULL THEN coalesce(current_setting('idem.wait', true), '') COLLATE "C" ~ '^(|-1( ?ms)?|[1-9][0-9]{2,5}( ?ms)?|[1-9][0-9]{0,5} ?s)$'
				ELSE wait >= interval '100 milliseconds' AND NOT @extschema@.idem__has_months(wait) END
			AND current_setting('transaction_isolation') IN ('read committed', 'read uncommitted')
			AND current_setting('transaction_read_only') = 'off') IS NOT TRUE THEN
		RETURN;
	END IF;
	-- No row: the policy is another one, or this node is not admitted.
	SELECT @extschema@.idem__without_days(coalesce(p.ttl, d.ttl)), p.expired || coalesce(p.ttl::text, '') INTO ttl, of_policy
	FROM @extschema@.idem_settings AS d LEFT JOIN @extschema@.idem_scopes AS p ON p.scope = of_scope COLLATE "C"
	WHERE CASE WHEN p.key_time IS NULL THEN d.scopes = 'any' ELSE p.key_time = 'any' END
		AND (SELECT g.groupid FROM pg_dist_local_group AS g) = ANY (@extschema@.idem__citus_admitted());
	IF NOT FOUND THEN
		RETURN;
	END IF;

	-- A second more than promised, so that the promise holds however long the insert takes.
	promised := @extschema@.idem__whole_second(clock_timestamp() + interval '1 second' + ttl);
	BEGIN
		INSERT INTO @extschema@.idem_claims (expires_at, state, request_id, user_id, scope, fingerprint)
		VALUES (greatest(promised, clock_timestamp()), 'completed', of_request, of_user, of_scope, of_fingerprint)
		ON CONFLICT (request_id, user_id, scope) DO NOTHING;
		IF FOUND THEN
			outcome := 'claimed';
			expires_at := promised;
			LOCK TABLE @extschema@.idem_scopes IN ROW SHARE MODE NOWAIT;
			is_plain := promised >= clock_timestamp() + ttl;
		ELSE
			SELECT 'completed', c.state = 'completed' AND (c.fingerprint <> of_fingerprint) IS NOT TRUE
					AND (of_policy IS NULL OR of_policy ^@ 'protect' OR c.expires_at > clock_timestamp()),
				c.result, c.progress, c.expires_at, c.lease_until
			INTO outcome, is_plain, result, progress, expires_at, lease_until
			FROM @extschema@.idem_claims AS c
			WHERE c.user_id = of_user AND c.request_id = of_request AND c.scope = of_scope;
		END IF;
		-- The transaction that the insert waited for may have changed the policy.
		IF is_plain IS NOT TRUE OR (SELECT p.expired || coalesce(p.ttl::text, '') || CASE p.key_time WHEN 'any' THEN '' ELSE p.key_time END
				FROM @extschema@.idem_scopes AS p WHERE p.scope = of_scope COLLATE "C") IS DISTINCT FROM of_policy THEN
			RAISE SQLSTATE 'ID001';
		END IF;
	EXCEPTION
		WHEN SQLSTATE 'ID001' THEN
			outcome := NULL;
			RETURN;
	END;
	held := @extschema@.idem__held_text(ROW (of_user, of_request, of_scope)::@extschema@.idem__key);
	IF outcome = 'claimed' THEN
		ignored := @extschema@.idem__note(E'+\t' || held);
	ELSE
		ignored := @extschema@.idem__note_answer(held, outcome, result);
	END IF;
END
$$;

-- A batch is claimed one by one.
CREATE FUNCTION @extschema@.idem__citus_claim_all_at_once(user_ids text[], request_ids text[], of_scope text, fingerprints bytea[],
	wait_until timestamptz)
RETURNS boolean
LANGUAGE sql IMMUTABLE
AS $$ SELECT false $$;

-- Stores the result of a request that this transaction has claimed and not settled.
CREATE FUNCTION @extschema@.idem__citus_store(of_user text, of_request text, of_scope text, new_result jsonb, remembered_until timestamptz)
RETURNS boolean
LANGUAGE plpgsql
AS $$
BEGIN
	UPDATE @extschema@.idem_claims AS c SET result = new_result, expires_at = greatest(c.expires_at, remembered_until)
	WHERE c.user_id = of_user AND c.request_id = of_request AND c.scope = of_scope
		AND @extschema@.idem__is_ours(c.xmin) AND c.state = 'completed' AND c.token IS NULL AND c.result IS NULL;
	RETURN FOUND;
END
$$;

-- As idem__complete_at_once() of sql/idem-portable.sql, which says why; the note names the row.
CREATE FUNCTION @extschema@.idem__citus_complete_at_once(new_result jsonb)
RETURNS boolean
LANGUAGE plpgsql
SET plan_cache_mode = force_generic_plan
AS $$
DECLARE
	latest constant text := current_setting('idem_held.latest', true);
	named jsonb;
	of_scope text;
	ttl interval;
	bytes_max int4;
	ignored text;
BEGIN
	IF (latest ^@ E'+\t[' AND coalesce(current_setting('idem_held.open', true), '') = '' AND new_result IS NOT NULL
			AND current_setting('transaction_read_only') = 'off') IS NOT TRUE THEN
		RETURN false;
	END IF;
	BEGIN
		named := substr(latest, 3);
	EXCEPTION WHEN invalid_text_representation OR numeric_value_out_of_range OR untranslatable_character OR statement_too_complex THEN
		RETURN false;			-- a forged note
	END;
	of_scope := named ->> 2;
	SELECT @extschema@.idem__without_days(coalesce(p.ttl, d.ttl)), coalesce(p.result_max_bytes, d.result_max_bytes) INTO ttl, bytes_max
	FROM @extschema@.idem_settings AS d LEFT JOIN @extschema@.idem_scopes AS p ON p.scope = of_scope COLLATE "C";
	IF (pg_column_size(to_jsonb(new_result)) - 4 <= bytes_max
			AND @extschema@.idem__citus_store(named ->> 0, named ->> 1, of_scope, new_result,
				@extschema@.idem__whole_second(clock_timestamp() + ttl))) IS NOT TRUE THEN
		RETURN false;
	END IF;
	ignored := set_config('idem_held.latest', '=' || substr(latest, 2), true);
	RETURN true;
END
$$;

-- ----- sinks -----

-- The trigger of a sink runs on the node of the row's shard.  So the claim has to be there, too:
-- otherwise Citus refuses it, or with citus.allow_nested_distributed_execution commits it apart
-- from the row.  Nor does Citus commit a table of one node together with a shard of another one.
CREATE FUNCTION @extschema@.idem__citus_check_sink(relation oid, trigger_name name, fired text, arguments text[])
RETURNS void
LANGUAGE plpgsql
AS $$
DECLARE
	table_name constant text := (SELECT t.typname FROM pg_type AS t WHERE t.typrelid = relation);		-- pg_class hides shards
	shard constant int8 := substring(table_name FROM '_([0-9]{1,18})$');
	logical record;
BEGIN
	PERFORM @extschema@.idem__citus_require_admission();
	SELECT d.logicalrelid::text AS name, d.colocationid = c.colocationid AND d.partmethod = 'h'
		AND column_to_column_name(d.logicalrelid, d.partkey) = arguments[1] AS has_claims
	INTO logical
	FROM pg_dist_shard AS s JOIN pg_dist_partition AS d ON d.logicalrelid = s.logicalrelid,
		pg_dist_partition AS c
	WHERE s.shardid = shard AND relation_is_a_known_shard(relation::regclass) AND c.logicalrelid = '@extschema@.idem_claims'::regclass;
	IF logical.has_claims IS NOT TRUE THEN
		PERFORM @extschema@.idem__raise('0A000', pg_catalog.format('table "%s" is not distributed together with idem_claims by column "%s"',
				coalesce(logical.name, table_name), arguments[1]),
			'Distribute the table of a sink by the user''s column, colocated with the table that was passed to idem_distribute().',
			'The row and its claim could not be committed together.');
	END IF;
	PERFORM @extschema@.idem__local_check_sink(relation, trigger_name, fired, arguments);
END
$$;

-- ----- leases -----

-- Draws a block on the coordinator, the only node that has the row of idem__token_source.
CREATE FUNCTION @extschema@.idem__citus_draw_block()
RETURNS int8
LANGUAGE plpgsql
AS $$
DECLARE
	drawn int8;
	sources int8;
BEGIN
	SELECT max(nextval('@extschema@.idem_token_seq')), count(*) INTO drawn, sources FROM @extschema@.idem__token_source;
	IF sources <> 1 THEN
		PERFORM @extschema@.idem__raise('55000', pg_catalog.format('table "idem__token_source" has %s rows, not one', sources),
			'Leases draw their tokens from its only row. On the coordinator, DELETE its rows, and INSERT one with DEFAULT VALUES.');
	END IF;
	RETURN drawn;
END
$$;

-- A user id of that shard, always the same one.
CREATE FUNCTION @extschema@.idem__citus_user_of(shard int8)
RETURNS text
LANGUAGE plpgsql
AS $$
DECLARE
	n int4 := 0;
BEGIN
	WHILE get_shard_id_for_distribution_column('@extschema@.idem_token_blocks'::regclass, n::text) <> shard LOOP
		n := n + 1;
	END LOOP;
	RETURN n::text;
END
$$;

-- Draws the next token for a user, on the node that has the user's shard; there it reads and
-- writes the shard of idem_token_blocks as a plain table.  The row of a shard counts only if
-- this node has written it, and for this shard: a split takes it along.  When two sessions write
-- it at a time, the second waits for the first, and uses its block: with two blocks at a time,
-- tokens of a key could shrink.  A snapshot of a whole transaction can be older than the row, so
-- it locks the row, which raises 40001 if somebody has changed it since.
CREATE FUNCTION @extschema@.idem__citus_next_token(of_user text)
RETURNS int8
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp SET lock_timeout = '0'
AS $$
DECLARE
	shard constant int8 := get_shard_id_for_distribution_column('@extschema@.idem_token_blocks'::regclass, of_user);
	blocks constant text := '@extschema@.idem_token_blocks_' || shard;
	here constant int4 := (SELECT g.groupid FROM pg_dist_local_group AS g);
	has record;
	number int8;				-- within the block
	new_block int8;
BEGIN
	LOOP
		EXECUTE pg_catalog.format('SELECT b.block, b.group_id, b.begun_at FROM %s AS b WHERE b.shard_id = $1 %s', blocks,
			CASE WHEN @extschema@.idem__keeps_snapshot() THEN 'FOR KEY SHARE' END) INTO has USING shard;
		IF has.group_id = here THEN
			number := nextval('@extschema@.idem_token_seq') - has.begun_at;
			IF number BETWEEN 1 AND 999999 THEN
				RETURN has.block * 1000000 + number;
			END IF;
		END IF;
		new_block := @extschema@.idem__citus_draw_block();
		IF has.block IS NOT NULL THEN
			EXECUTE pg_catalog.format('UPDATE %s SET block = $1, group_id = $2, begun_at = $3 WHERE shard_id = $4 AND block = $5', blocks)
			USING new_block, here, nextval('@extschema@.idem_token_seq'), shard, has.block;
		ELSE
			EXECUTE pg_catalog.format('INSERT INTO %s (user_id, shard_id, block, group_id, begun_at) VALUES ($1, $2, $3, $4, $5)
				ON CONFLICT (user_id, shard_id) DO NOTHING', blocks)
			USING @extschema@.idem__citus_user_of(shard), shard, new_block, here, nextval('@extschema@.idem_token_seq');
		END IF;
	END LOOP;
END
$$;

-- Citus runs idem__citus_next_token() on the node of the row, since its argument is a column.  (Of the
-- two rows of a key that the snapshot of a whole transaction can see, either will do.)
CREATE FUNCTION @extschema@.idem__citus_draw_token(key @extschema@.idem__key)
RETURNS int8
LANGUAGE plpgsql
AS $$
DECLARE
	drawn int8;
BEGIN
	SELECT @extschema@.idem__citus_next_token(c.user_id) INTO STRICT drawn FROM @extschema@.idem_claims AS c
	WHERE @extschema@.idem__has_key(c.user_id, c.request_id, c.scope, key)
	LIMIT 1;
	RETURN drawn;
END
$$;

-- Takes the lock that keeps the key's shard on its node, as Citus does before a write.  If the shard
-- was split while the call waited for the lock, the user is in another shard: lock that one too.
CREATE FUNCTION @extschema@.idem__citus_keep_place(key @extschema@.idem__key)
RETURNS boolean
LANGUAGE plpgsql
AS $$
DECLARE
	shard int8;
	locked int8;
	ignored text;				-- assigned to, since PERFORM would need a query
BEGIN
	LOOP
		shard := get_shard_id_for_distribution_column('@extschema@.idem_claims'::regclass, (key).user_id);
		IF shard = locked THEN
			RETURN true;
		END IF;
		ignored := lock_shard_metadata(5, ARRAY[shard]);		-- 5: SHARE
		locked := shard;
	END LOOP;
END
$$;

CREATE FUNCTION @extschema@.idem__citus_keep_fence(key @extschema@.idem__key, holder_token int8)
RETURNS boolean
LANGUAGE plpgsql
AS $$
BEGIN
	UPDATE @extschema@.idem_claims AS c SET token = holder_token
	WHERE @extschema@.idem__has_key(c.user_id, c.request_id, c.scope, key);
	RETURN true;
END
$$;

-- ----- cleaning -----

-- Cleans the shards of this node: at most rows_max rows, for about a second.  The order of
-- the shards is random; otherwise the last ones would be left behind under load.
CREATE FUNCTION @extschema@.idem__citus_clean_node(rows_max int8, cutoff timestamptz)
RETURNS int8
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
	begun constant timestamptz := clock_timestamp();
	-- Their unsettled claims are kept.
	unknown_scopes constant text[] := ARRAY(SELECT p.scope FROM @extschema@.idem_scopes AS p WHERE p.lapsed = 'unknown');
	shard text;
	chunk int8;
	rows_deleted int8 := 0;
BEGIN
	FOR shard IN
		-- shard_name() would leave the schema public out.
		SELECT '@extschema@.idem_claims_' || s.shardid
		FROM pg_dist_shard AS s JOIN pg_dist_placement AS p ON p.shardid = s.shardid
		WHERE s.logicalrelid = '@extschema@.idem_claims'::regclass AND p.groupid = (SELECT g.groupid FROM pg_dist_local_group AS g)
		ORDER BY random()
	LOOP
		EXECUTE pg_catalog.format('DELETE FROM %1$s WHERE ctid = ANY (ARRAY(
				SELECT e.ctid FROM %1$s AS e
				WHERE e.expires_at <= $1 AND NOT (e.state::text = ''in_progress''
					AND (e.lease_until > clock_timestamp() OR e.scope = ANY ($2)))
				ORDER BY e.expires_at LIMIT $3
				FOR UPDATE SKIP LOCKED))', shard)
		USING cutoff, unknown_scopes, least(rows_max - rows_deleted, 5000);
		GET DIAGNOSTICS chunk = ROW_COUNT;
		rows_deleted := rows_deleted + chunk;
		EXIT WHEN rows_deleted >= rows_max OR clock_timestamp() > begun + interval '1 second';
	END LOOP;
	RETURN rows_deleted;
END
$$;

-- Has each node clean a batch, without a low-water mark.  A node that does not answer is
-- skipped: the others must be cleaned all the same.
CREATE FUNCTION @extschema@.idem__citus_clean(rows_max int8, start timestamptz, cutoff timestamptz,
	OUT rows_deleted int8, OUT more boolean, OUT next_start timestamptz)
LANGUAGE plpgsql
AS $$
DECLARE
	node record;
BEGIN
	PERFORM @extschema@.idem__citus_require_admission();
	IF NOT citus_is_coordinator() THEN
		PERFORM @extschema@.idem__raise('55000', 'idem_cleanup() must be called on the coordinator', 'It has all nodes clean their shards.');
	END IF;
	rows_deleted := 0;
	FOR node IN
		SELECT n.nodeid, n.success, n.result
		FROM run_command_on_all_nodes(pg_catalog.format(
			'SELECT %s.idem__citus_clean_node(%s::pg_catalog.int8, %L::pg_catalog.timestamptz)', '@extschema@', rows_max, cutoff)) AS n
	LOOP
		IF node.success THEN
			rows_deleted := rows_deleted + node.result::int8;
		ELSE
			RAISE WARNING 'node % was not cleaned: %', node.nodeid, node.result;
		END IF;
	END LOOP;
	-- A node with many shards stops before it has removed rows_max rows.
	more := rows_deleted > 0;
	next_start := start;
END
$$;

-- ----- distributing -----

-- Makes those of our functions on all nodes that are not there, or belong to other shards.
-- Returns how many.
CREATE FUNCTION @extschema@.idem__citus_share_functions()
RETURNS int4
LANGUAGE plpgsql
AS $$
DECLARE
	routine record;
	shared int4 := 0;
BEGIN
	FOR routine IN
		SELECT p.oid::regprocedure AS name, u.is_of_user
		FROM pg_proc AS p, LATERAL (SELECT NOT p.proname ^@ 'idem__' AND p.proargnames[1] = 'user_id') AS u (is_of_user)
		WHERE p.pronamespace = '@extschema@'::regnamespace AND p.proname ^@ 'idem_' AND p.prokind = 'f'
			AND p.proowner = (SELECT c.relowner FROM pg_class AS c WHERE c.oid = '@extschema@.idem_claims'::regclass)
			AND NOT EXISTS (SELECT FROM pg_dist_object AS o WHERE o.classid = 'pg_proc'::regclass AND o.objid = p.oid
				AND (u.is_of_user IS NOT TRUE OR o.colocationid =
					(SELECT d.colocationid FROM pg_dist_partition AS d WHERE d.logicalrelid = '@extschema@.idem_claims'::regclass)))
		-- The nodes check the bodies of the users' functions: the types that these name have to be
		-- there.  They come with the internal functions, which take and return them.
		ORDER BY p.proname ^@ 'idem__' DESC, u.is_of_user IS TRUE DESC, p.oid
	LOOP
		shared := shared + 1;
		IF routine.is_of_user THEN
			-- Citus sends a call to the user's shard, but not from a transaction block
			-- (force_delegation): there a claim is a write of the block like any other.
			PERFORM create_distributed_function(routine.name, 'user_id', '@extschema@.idem_claims', false);
		ELSE
			-- Citus makes a function on all nodes when its definition is run again.
			-- create_distributed_function() would have the nodes check a body that relies on
			-- its caller's search_path.
			EXECUTE pg_get_functiondef(routine.name);
		END IF;
	END LOOP;
	RETURN shared;
END
$$;

-- The roles that default privileges of a node grant something to.  Citus does not share
-- default privileges: those of each node apply to what Citus makes there.
CREATE FUNCTION @extschema@.idem__citus_default_grantees()
RETURNS name[]
LANGUAGE plpgsql
AS $$
DECLARE
	node record;
	grantees name[] := '{}';
BEGIN
	FOR node IN
		SELECT n.nodeid, n.success, n.result
		FROM run_command_on_all_nodes('SELECT ARRAY(SELECT DISTINCT r.rolname FROM pg_catalog.pg_default_acl AS d,
			pg_catalog.aclexplode(d.defaclacl) AS a JOIN pg_catalog.pg_roles AS r ON r.oid = a.grantee)') AS n
	LOOP
		IF NOT node.success THEN
			PERFORM @extschema@.idem__raise('55000', pg_catalog.format('the default privileges of node %s cannot be read: %s', node.nodeid, node.result),
				'Call idem_distribute() again when all nodes answer.');
		END IF;
		grantees := grantees || node.result::name[];
	END LOOP;
	RETURN grantees;
END
$$;

-- Gives each role the rights on all nodes that it has here.  Citus grants them where it makes
-- a table, but there the default privileges of the node apply, too, and everybody may call a
-- new function.  So all rights are revoked, and granted again.  Citus sends REVOKE and GRANT to
-- all nodes.  On this node the same rights remain; the owner becomes the grantor of all.
-- Nothing is granted again on idem__token_source and idem_token_blocks, which are made with the
-- default privileges: otherwise a role without any right on idem could empty or lock them, and
-- nobody could claim a lease.
CREATE FUNCTION @extschema@.idem__citus_share_rights()
RETURNS void
LANGUAGE plpgsql
AS $$
DECLARE
	owner constant oid := (SELECT c.relowner FROM pg_class AS c WHERE c.oid = '@extschema@.idem_claims'::regclass);
	default_grantees constant name[] := @extschema@.idem__citus_default_grantees();
	object record;
	command text;
BEGIN
	FOR object IN
		WITH objects (name, acl, relation) AS (
			SELECT 'ROUTINE ' || p.oid::regprocedure, coalesce(p.proacl, acldefault('f', p.proowner)), NULL::oid
			FROM pg_proc AS p
			WHERE p.pronamespace = '@extschema@'::regnamespace AND p.proname ^@ 'idem_' AND p.proowner = owner AND p.prokind = 'f'
			UNION ALL SELECT CASE c.relkind WHEN 'S' THEN 'SEQUENCE ' ELSE 'TABLE ' END || c.oid::regclass, c.relacl, c.oid
			FROM pg_class AS c WHERE c.oid = ANY (ARRAY['@extschema@.idem_claims', '@extschema@.idem_settings', '@extschema@.idem_scopes',
				'@extschema@.idem__token_source', '@extschema@.idem_token_blocks',
				'@extschema@.idem_token_seq', '@extschema@.idem_stat_cleanup', '@extschema@.idem_stat_table',
				'@extschema@.idem_stat_scopes', '@extschema@.idem_metrics',
				'@extschema@.idem_unsettled', '@extschema@.idem_holders']::regclass[])
		), rights AS (
			SELECT o.name, a.grantee, a.privilege_type AS privilege, a.is_grantable
			FROM objects AS o, aclexplode(o.acl) AS a
			UNION SELECT o.name, a.grantee, format('%s (%I)', a.privilege_type, c.attname), a.is_grantable
			FROM objects AS o JOIN pg_attribute AS c ON c.attrelid = o.relation AND NOT c.attisdropped, aclexplode(c.attacl) AS a
		), granted AS (
			SELECT r.*, CASE r.grantee WHEN '0'::oid THEN 'PUBLIC' ELSE r.grantee::regrole::text END AS role
			FROM rights AS r WHERE r.grantee <> owner
		)
		SELECT o.name,
			(SELECT string_agg(h.role, ', ')
				FROM (SELECT 'PUBLIC' UNION SELECT g.role FROM granted AS g WHERE g.name = o.name
					UNION SELECT quote_ident(d.role) FROM unnest(default_grantees) AS d (role) WHERE d.role <> pg_get_userbyid(owner)) AS h (role)) AS holders,
			ARRAY(SELECT format('GRANT %s ON %s TO %s%s', string_agg(g.privilege, ', '), o.name, g.role,
					CASE WHEN g.is_grantable THEN ' WITH GRANT OPTION' END)
				FROM granted AS g
				WHERE g.name = o.name AND (o.relation IN ('@extschema@.idem__token_source'::regclass, '@extschema@.idem_token_blocks'::regclass)) IS NOT TRUE
				GROUP BY g.role, g.is_grantable) AS grants
		FROM objects AS o
	LOOP
		EXECUTE format('REVOKE ALL ON %s FROM %s CASCADE', object.name, object.holders);
		FOREACH command IN ARRAY object.grants
		LOOP
			EXECUTE command;
		END LOOP;
	END LOOP;
END
$$;

-- Citus makes a view again if it changes the shards of its tables.  The view then has the rights
-- of the default privileges, and none of those before.  Says which views got pg_monitor's back.
CREATE FUNCTION @extschema@.idem__citus_restore_views()
RETURNS SETOF text
LANGUAGE plpgsql
AS $$
DECLARE
	owner constant oid := (SELECT c.relowner FROM pg_class AS c WHERE c.oid = '@extschema@.idem_claims'::regclass);
	of_view record;
BEGIN
	FOR of_view IN
		SELECT v.oid::regclass AS name, v.relname FROM pg_class AS v
		WHERE v.oid = ANY (ARRAY['@extschema@.idem_stat_cleanup', '@extschema@.idem_stat_table', '@extschema@.idem_stat_scopes',
				'@extschema@.idem_metrics', '@extschema@.idem_unsettled', '@extschema@.idem_holders']::regclass[])
			AND NOT EXISTS (SELECT FROM aclexplode(v.relacl) AS a WHERE a.grantee = 'pg_monitor'::regrole AND a.privilege_type = 'SELECT')
		ORDER BY v.relname
	LOOP
		EXECUTE format('REVOKE ALL ON %s FROM %s CASCADE', of_view.name,
			(SELECT string_agg(h.role, ', ') FROM (SELECT 'PUBLIC' UNION SELECT quote_ident(d.role)
				FROM unnest(@extschema@.idem__citus_default_grantees()) AS d (role) WHERE d.role <> pg_get_userbyid(owner)) AS h (role)));
		EXECUTE format('GRANT SELECT ON %s TO pg_monitor', of_view.name);
		RETURN NEXT format('%s: had lost its rights; granted to pg_monitor. Call idem_grant(..., ''operator'') again for operators', of_view.relname);
	END LOOP;
END
$$;

-- Gives the user id of idem_claims another collation.  PostgreSQL refuses that while a view reads
-- the column.  So the view is replaced meanwhile by one that reads nothing: a view that is
-- replaced keeps its owner, its rights and its comments.  The nodes get the view with the claims.
CREATE FUNCTION @extschema@.idem__citus_alter_collation(new_collation regcollation)
RETURNS void
LANGUAGE plpgsql
AS $$
DECLARE
	propagation constant text := coalesce(nullif(current_setting('citus.enable_ddl_propagation', true), ''), 'on');
	create_view constant text := 'CREATE OR REPLACE VIEW @extschema@.idem_unsettled WITH (security_barrier) AS ';
	definition constant text := pg_get_viewdef('@extschema@.idem_unsettled'::regclass);
BEGIN
	PERFORM set_config('citus.enable_ddl_propagation', 'off', true);
	EXECUTE create_view || (
		SELECT 'SELECT ' || string_agg(concat('NULL::', a.atttypid::regtype, ' COLLATE ' || nullif(a.attcollation, '0'::oid)::regcollation,
			' AS ', quote_ident(a.attname)), ', ' ORDER BY a.attnum)
		FROM pg_attribute AS a WHERE a.attrelid = '@extschema@.idem_unsettled'::regclass AND a.attnum > 0);
	EXECUTE pg_catalog.format('ALTER TABLE %s.idem_claims ALTER user_id TYPE text COLLATE %s', '@extschema@', new_collation);
	EXECUTE create_view || definition;
	PERFORM set_config('citus.enable_ddl_propagation', propagation, true);
END
$$;

-- A claim and its work are one local transaction only if the user id has the same type and
-- collation in both tables.
CREATE FUNCTION @extschema@.idem__citus_match_column(colocate_with regclass)
RETURNS void
LANGUAGE plpgsql
AS $$
DECLARE
	shard_column record;
	type_collation oid;
BEGIN
	SELECT a.atttypid::regtype AS type, a.attcollation::regcollation AS "collation" INTO shard_column
	FROM pg_dist_partition AS d JOIN pg_attribute AS a ON a.attrelid = d.logicalrelid
		AND a.attname = column_to_column_name(d.logicalrelid, d.partkey)
	WHERE d.logicalrelid = colocate_with AND d.partmethod = 'h';
	IF NOT FOUND THEN
		PERFORM @extschema@.idem__raise('55000', pg_catalog.format('table "%s" is not distributed by a column', colocate_with),
			'Distribute it by its user''s id first: SELECT create_distributed_table(...).');
	ELSIF shard_column.type <> 'text'::regtype THEN
		PERFORM @extschema@.idem__raise('0A000', pg_catalog.format('table "%s" is distributed by a column of type %s, claims by one of type text',
				colocate_with, shard_column.type),
			'Distribute it by a text, as doc/citus.md says; or call idem_distribute() without a table: a transaction that claims is then one of two nodes.');
	END IF;
	IF NOT EXISTS (SELECT FROM pg_attribute AS a WHERE a.attrelid = '@extschema@.idem_claims'::regclass AND a.attname = 'user_id'
		AND a.attcollation = shard_column.collation::oid) THEN
		PERFORM @extschema@.idem__citus_alter_collation(shard_column.collation);
	END IF;
	SELECT a.attcollation INTO type_collation FROM pg_type AS t JOIN pg_attribute AS a ON a.attrelid = t.typrelid
	WHERE t.oid = '@extschema@.idem__key'::regtype AND a.attname = 'user_id';
	IF type_collation <> shard_column.collation::oid THEN
		EXECUTE pg_catalog.format('ALTER TYPE %s.idem__key ALTER ATTRIBUTE user_id TYPE text COLLATE %s', '@extschema@', shard_column.collation);
	END IF;
END
$$;

-- Puts the functions of this file in the place of those of sql/idem-portable.sql.
CREATE FUNCTION @extschema@.idem__citus_replace_functions()
RETURNS void
LANGUAGE plpgsql
AS $$
BEGIN
	IF to_regprocedure('@extschema@.idem__local_key_of(text, text, text)') IS NOT NULL THEN
		RETURN;					-- by an earlier call, or in the database of which this is a restored dump
	END IF;
	ALTER FUNCTION @extschema@.idem__key_of(text, text, text) RENAME TO idem__local_key_of;
	ALTER FUNCTION @extschema@.idem__citus_key_of(text, text, text) RENAME TO idem__key_of;
	ALTER FUNCTION @extschema@.idem__check_scope(text) RENAME TO idem__local_check_scope;
	ALTER FUNCTION @extschema@.idem__citus_check_scope(text) RENAME TO idem__check_scope;
	ALTER FUNCTION @extschema@.idem__claim_marker(@extschema@.idem__key, text, bytea, interval) RENAME TO idem__local_claim_marker;
	ALTER FUNCTION @extschema@.idem__citus_claim_marker(@extschema@.idem__key, text, bytea, interval) RENAME TO idem__claim_marker;
	ALTER FUNCTION @extschema@.idem__check_sink(oid, name, text, text[]) RENAME TO idem__local_check_sink;
	ALTER FUNCTION @extschema@.idem__citus_check_sink(oid, name, text, text[]) RENAME TO idem__check_sink;
	DROP FUNCTION @extschema@.idem__latest_row(@extschema@.idem__key),
		@extschema@.idem__claim_at_once(text, text, text, bytea, interval),
		@extschema@.idem__claim_all_at_once(text[], text[], text, bytea[], timestamptz), @extschema@.idem__complete_at_once(jsonb),
		@extschema@.idem__draw_token(@extschema@.idem__key),
		@extschema@.idem__keep_place(@extschema@.idem__key), @extschema@.idem__keep_fence(@extschema@.idem__key, int8),
		@extschema@.idem__clean(int8, timestamptz, timestamptz);
	ALTER FUNCTION @extschema@.idem__citus_latest_row(@extschema@.idem__key) RENAME TO idem__latest_row;
	ALTER FUNCTION @extschema@.idem__citus_claim_at_once(text, text, text, bytea, interval) RENAME TO idem__claim_at_once;
	ALTER FUNCTION @extschema@.idem__citus_claim_all_at_once(text[], text[], text, bytea[], timestamptz) RENAME TO idem__claim_all_at_once;
	ALTER FUNCTION @extschema@.idem__citus_complete_at_once(jsonb) RENAME TO idem__complete_at_once;
	ALTER FUNCTION @extschema@.idem__citus_draw_token(@extschema@.idem__key) RENAME TO idem__draw_token;
	ALTER FUNCTION @extschema@.idem__citus_keep_place(@extschema@.idem__key) RENAME TO idem__keep_place;
	ALTER FUNCTION @extschema@.idem__citus_keep_fence(@extschema@.idem__key, int8) RENAME TO idem__keep_fence;
	ALTER FUNCTION @extschema@.idem__citus_clean(int8, timestamptz, timestamptz) RENAME TO idem__clean;

	-- Citus accepts only an immutable function of a column in the WHERE of an update.
	ALTER FUNCTION @extschema@.idem__is_ours(xid) IMMUTABLE;
	-- Nor does it plan a query without the values of its parameters, as the callers of this one ask.
	ALTER FUNCTION @extschema@.idem__row_of_note(text) SET plan_cache_mode = force_custom_plan;
	ALTER FUNCTION @extschema@.idem__claim_key(text, @extschema@.idem__key, bytea, timestamptz, interval, jsonb, boolean, boolean)
		SET citus.enable_ddl_propagation = off;
	ALTER FUNCTION @extschema@.idem__claim_at_once(text, text, text, bytea, interval) SET citus.enable_ddl_propagation = off;
	ALTER FUNCTION @extschema@.idem__scopes_guard() SET citus.enable_ddl_propagation = off;
	-- It reads pg_class, where Citus hides shards.
	ALTER FUNCTION @extschema@.idem__local_check_sink(oid, name, text, text[]) SET citus.override_table_visibility = off;
	ALTER FUNCTION @extschema@.idem__citus_draw_block() SET citus.allow_nested_distributed_execution = on;
END
$$;

-- Distributes the claims, and says so; nothing if they are distributed.
CREATE FUNCTION @extschema@.idem__citus_share_claims(colocate_with regclass)
RETURNS SETOF text
LANGUAGE plpgsql
AS $$
DECLARE
	partmethod text;
BEGIN
	SELECT d.partmethod INTO partmethod FROM pg_dist_partition AS d WHERE d.logicalrelid = '@extschema@.idem_claims'::regclass;
	IF partmethod = 'h' THEN
		IF colocate_with IS NOT NULL THEN
			PERFORM @extschema@.idem__raise('42710', 'table "idem_claims" is distributed already',
				'What claims are colocated with cannot be changed. Call idem_distribute() without a table after a node was added.');
		END IF;
		RETURN;
	ELSIF partmethod IS NOT NULL THEN
		PERFORM @extschema@.idem__raise('55000', 'table "idem_claims" is distributed, but not by the user''s id',
			'Undistribute it first: SELECT undistribute_table(...), or citus_schema_undistribute(...) if its schema was distributed.');
	END IF;
	IF colocate_with IS NOT NULL THEN
		PERFORM @extschema@.idem__citus_match_column(colocate_with);
	END IF;
	PERFORM create_distributed_table('@extschema@.idem_claims', 'user_id', colocate_with => coalesce(colocate_with::text, 'none')),
		truncate_local_data_after_distributing_table('@extschema@.idem_claims');
	RETURN NEXT CASE WHEN colocate_with IS NULL THEN 'idem_claims: distributed'
		ELSE pg_catalog.format('idem_claims: distributed together with %s', colocate_with) END;
END
$$;

-- Gives each node a replica of the tables that all claims read, and says of which.
CREATE FUNCTION @extschema@.idem__citus_share_policy()
RETURNS SETOF text
LANGUAGE plpgsql
AS $$
DECLARE
	shared regclass;
	of_table text;
	is_missing boolean;
BEGIN
	FOREACH of_table IN ARRAY ARRAY['idem_settings', 'idem_scopes'] LOOP
		shared := '@extschema@.' || of_table;
		CONTINUE WHEN EXISTS (SELECT FROM pg_dist_partition AS d WHERE d.logicalrelid = shared);
		-- No trigger may fire for the rows that Citus copies.  That of the settings stays away:
		-- a distributed idem_settings has one row, which is updated and not replaced.
		EXECUTE pg_catalog.format('DROP TRIGGER IF EXISTS %I ON %s', CASE of_table WHEN 'idem_settings' THEN 'idem__settings_replace'
			ELSE 'idem__scopes_guard' END, shared);
		-- idem__policies is for one server.
		EXECUTE pg_catalog.format('DROP TRIGGER IF EXISTS idem__policies_row ON %s', shared);
		EXECUTE pg_catalog.format('DROP TRIGGER IF EXISTS idem__policies_statement ON %s', shared);
		PERFORM create_reference_table(shared), truncate_local_data_after_distributing_table(shared);
		RETURN NEXT pg_catalog.format('%s: copied to all nodes', of_table);
	END LOOP;

	is_missing := EXISTS (SELECT FROM pg_dist_node AS n, pg_dist_shard AS s
		WHERE n.noderole::text = 'primary' AND n.isactive AND s.logicalrelid = '@extschema@.idem_scopes'::regclass
			AND NOT EXISTS (SELECT FROM pg_dist_placement AS p WHERE p.shardid = s.shardid AND p.groupid = n.groupid));
	IF is_missing THEN
		IF NOT has_function_privilege('replicate_reference_tables(citus.shard_transfer_mode)', 'EXECUTE') THEN
			PERFORM @extschema@.idem__raise('42501', 'a node has no copy of table "idem_scopes"',
				'Have a superuser call replicate_reference_tables(), then call idem_distribute() again.');
		END IF;
		PERFORM replicate_reference_tables('block_writes');
		RETURN NEXT 'idem_settings, idem_scopes: copied to new nodes';
	END IF;
END
$$;

-- Makes what tokens are drawn from, and says so.
CREATE FUNCTION @extschema@.idem__citus_share_tokens()
RETURNS SETOF text
LANGUAGE plpgsql
AS $$
DECLARE
	owner constant regrole := (SELECT c.relowner FROM pg_class AS c WHERE c.oid = '@extschema@.idem_claims'::regclass);
	user_collation regcollation;
	belongs boolean;
BEGIN
	-- The default makes the sequence known to all nodes, which have to parse its name.
	-- sql/idem-move.sql tells by this table that idem is distributed.
	-- A superuser can distribute what belongs to another role; draws are made as that role.
	IF to_regclass('@extschema@.idem__token_source') IS NULL THEN
		-- So far the sequence has counted tokens; from now on, blocks.  The first block must be above
		-- all tokens, but not above as many blocks: otherwise each way back to one server and to
		-- the cluster again would make tokens longer by six digits, and they have at most 18.
		PERFORM setval('@extschema@.idem_token_seq', t.last_value / 1000000 + 1) FROM @extschema@.idem_token_seq AS t;
		CREATE TABLE @extschema@.idem__token_source (token int8 PRIMARY KEY DEFAULT nextval('@extschema@.idem_token_seq'));
		INSERT INTO @extschema@.idem__token_source DEFAULT VALUES;
		EXECUTE pg_catalog.format('ALTER TABLE %s.idem__token_source OWNER TO %s', '@extschema@', owner);
	END IF;
	IF NOT EXISTS (SELECT FROM pg_dist_partition AS d WHERE d.logicalrelid = '@extschema@.idem__token_source'::regclass) THEN
		PERFORM citus_add_local_table_to_metadata('@extschema@.idem__token_source');
		RETURN NEXT 'idem__token_source: made known to all nodes';
	END IF;

	belongs := to_regclass('@extschema@.idem_token_blocks') IS NOT NULL;
	IF belongs THEN
		SELECT count(DISTINCT d.colocationid) = 1 AND count(*) = 2 INTO belongs FROM pg_dist_partition AS d
		WHERE d.logicalrelid IN ('@extschema@.idem_claims'::regclass, to_regclass('@extschema@.idem_token_blocks'));
		IF belongs THEN
			RETURN;
		END IF;
		DROP TABLE @extschema@.idem_token_blocks;
	END IF;
	SELECT a.attcollation::regcollation INTO user_collation
	FROM pg_attribute AS a WHERE a.attrelid = '@extschema@.idem_claims'::regclass AND a.attname = 'user_id';
	EXECUTE pg_catalog.format('CREATE TABLE %s.idem_token_blocks (user_id text COLLATE %s, shard_id int8, block int8 NOT NULL,
		group_id int4 NOT NULL, begun_at int8 NOT NULL, PRIMARY KEY (user_id, shard_id))', '@extschema@', user_collation);
	EXECUTE pg_catalog.format('ALTER TABLE %s.idem_token_blocks OWNER TO %s', '@extschema@', owner);
	PERFORM create_distributed_table('@extschema@.idem_token_blocks', 'user_id', colocate_with => '@extschema@.idem_claims');
	RETURN NEXT 'idem_token_blocks: distributed together with idem_claims';
END
$$;

-- Has those functions read the replicas of this node as plain tables that read nothing else, and
-- idem__claim_at_once(), no statement of which reads both: for Citus it takes as long to plan a
-- read of idem_scopes as the insert of a claim.  A replica has the same name on all nodes.
CREATE FUNCTION @extschema@.idem__citus_place_reads()
RETURNS void
LANGUAGE plpgsql
AS $$
DECLARE
	routine regprocedure;
	definition text;
	replica record;
BEGIN
	FOR routine IN
		SELECT p.oid FROM pg_proc AS p
		WHERE p.pronamespace = '@extschema@'::regnamespace AND p.proname ^@ 'idem__' AND p.prokind = 'f'
			AND p.proowner = (SELECT c.relowner FROM pg_class AS c WHERE c.oid = '@extschema@.idem_claims'::regclass)
			AND p.prosrc ~ '[.]idem_(settings|scopes)(_[0-9]+)? AS '
			AND (p.prosrc !~ '[.]idem_claims' OR p.proname = 'idem__claim_at_once')
	LOOP
		definition := pg_get_functiondef(routine);
		FOR replica IN
			SELECT c.relname AS of_table, s.shardid FROM pg_dist_shard AS s JOIN pg_class AS c ON c.oid = s.logicalrelid
			WHERE c.oid IN ('@extschema@.idem_settings'::regclass, '@extschema@.idem_scopes'::regclass)
		LOOP
			definition := regexp_replace(definition, pg_catalog.format('[.]%s(_[0-9]+)? AS ', replica.of_table),
				pg_catalog.format('.%s_%s AS ', replica.of_table, replica.shardid), 'g');
		END LOOP;
		IF definition <> pg_get_functiondef(routine) THEN
			EXECUTE definition;
		END IF;
	END LOOP;
END
$$;

-- Makes functions that read claims easy for Citus.  Instead of calling idem__has_key() they
-- compare the three columns: Citus looks for the user in a query before the function is inlined.
-- And their plans are not kept, see idem__citus_claim_at_once(): otherwise each call would leave
-- more behind in the memory of its session.
CREATE FUNCTION @extschema@.idem__citus_ease_planning()
RETURNS void
LANGUAGE plpgsql
AS $$
DECLARE
	routine record;
	definition text;
BEGIN
	FOR routine IN
		SELECT p.oid::regprocedure AS name, (p.proconfig::text ~ 'plan_cache_mode') IS NOT TRUE AS keeps_plans
		FROM pg_proc AS p JOIN pg_language AS l ON l.oid = p.prolang
		WHERE p.pronamespace = '@extschema@'::regnamespace AND p.proname ^@ 'idem_' AND l.lanname = 'plpgsql' AND p.prokind = 'f'
			AND p.proowner = (SELECT c.relowner FROM pg_class AS c WHERE c.oid = '@extschema@.idem_claims'::regclass)
			AND p.prosrc ~ '[.]idem_claims AS c'
	LOOP
		definition := replace(pg_get_functiondef(routine.name), '@extschema@.idem__has_key(c.user_id, c.request_id, c.scope, key)',
			'c.user_id = key.user_id AND c.request_id = key.request_id AND c.scope = key.scope');
		IF definition <> pg_get_functiondef(routine.name) THEN
			EXECUTE definition;
		END IF;
		IF routine.keeps_plans THEN
			EXECUTE pg_catalog.format('ALTER FUNCTION %s SET plan_cache_mode = force_custom_plan', routine.name);
		END IF;
	END LOOP;
END
$$;

-- Can be called again: it does what is not done yet, and repairs what changes of tables and
-- nodes have undone.
CREATE FUNCTION @extschema@.idem_distribute(colocate_with regclass DEFAULT NULL)
RETURNS SETOF text
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET client_min_messages = warning
SET check_function_bodies = off
AS $$
DECLARE
	groups int4[];
	shared int4;
BEGIN
	IF NOT EXISTS (SELECT FROM pg_extension WHERE extname = 'citus') THEN
		PERFORM @extschema@.idem__raise('0A000', 'extension "citus" is not installed in this database',
			'Create it on all nodes of a Citus cluster. On one server there is nothing to distribute.');
	ELSIF NOT citus_is_coordinator() OR NOT EXISTS (SELECT FROM pg_dist_node WHERE groupid = 0) THEN
		PERFORM @extschema@.idem__raise('55000', 'this is not a coordinator that all nodes know',
			'Call idem_distribute() on the coordinator, after SELECT citus_set_coordinator_host(...).');
	END IF;
	-- A node that is added from here on is not admitted.
	groups := ARRAY(SELECT DISTINCT n.groupid FROM pg_dist_node AS n WHERE n.noderole::text = 'primary' AND n.isactive ORDER BY 1);

	-- Otherwise Citus refuses to make tables and functions in one transaction.
	PERFORM set_config('citus.multi_shard_modify_mode', 'sequential', true);
	RETURN QUERY SELECT t.done FROM @extschema@.idem__citus_share_claims(colocate_with) AS t (done);
	RETURN QUERY SELECT t.done FROM @extschema@.idem__citus_share_policy() AS t (done);
	RETURN QUERY SELECT t.done FROM @extschema@.idem__citus_share_tokens() AS t (done);

	PERFORM @extschema@.idem__citus_replace_functions();
	PERFORM @extschema@.idem__citus_place_reads(), @extschema@.idem__citus_ease_planning(), @extschema@.idem__citus_admit(groups);
	shared := @extschema@.idem__citus_share_functions();
	IF shared > 0 THEN
		RETURN NEXT pg_catalog.format('functions: %s made on all nodes', shared);
	END IF;
	RETURN QUERY SELECT t.done FROM @extschema@.idem__citus_restore_views() AS t (done);
	PERFORM @extschema@.idem__citus_share_rights();
	RETURN NEXT pg_catalog.format('rights: made equal on %s nodes', cardinality(groups));
	-- Citus calls triggers of replicas unsafe, since they could write to other nodes; this
	-- one writes nothing.
	IF NOT EXISTS (SELECT FROM pg_trigger AS t WHERE t.tgrelid = '@extschema@.idem_scopes'::regclass AND t.tgname = 'idem__scopes_guard') THEN
		PERFORM set_config('citus.enable_unsafe_triggers', 'on', true);
		CREATE TRIGGER idem__scopes_guard
		BEFORE INSERT OR UPDATE ON @extschema@.idem_scopes
		FOR EACH ROW EXECUTE FUNCTION @extschema@.idem__scopes_guard();
		PERFORM set_config('citus.enable_unsafe_triggers', 'off', true);
	END IF;
END
$$;

COMMENT ON FUNCTION @extschema@.idem_distribute(regclass) IS
'distributes the claims over a Citus cluster, together with a table that is distributed by its user''s id; again, after a node was added or shards were changed. Returns what it did';

-- Revokes what PUBLIC and the grantees of default privileges got with these functions.
DO $block$
DECLARE
	object record;
BEGIN
	FOR object IN
		SELECT p.oid::regprocedure AS name, CASE a.grantee WHEN '0'::oid THEN 'PUBLIC' ELSE a.grantee::regrole::text END AS grantee
		FROM pg_proc AS p, aclexplode(coalesce(p.proacl, acldefault('f', p.proowner))) AS a
		WHERE p.pronamespace = '@extschema@'::regnamespace AND (p.proname ^@ 'idem__citus_' OR p.proname = 'idem_distribute')
			AND p.proowner = (SELECT r.oid FROM pg_roles AS r WHERE r.rolname = current_user) AND a.grantee <> p.proowner
		GROUP BY 1, 2
	LOOP
		EXECUTE format('REVOKE ALL ON ROUTINE %s FROM %s CASCADE', object.name, object.grantee);
	END LOOP;
END
$block$;

$script$, '@extschema@', quote_ident(:'schema')) AS script
\gexec

COMMIT;
