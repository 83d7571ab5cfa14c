-- ----- sinks -----

-- The type of the column, of a domain the type below it.  Raises an error unless the column
-- exists, and its values can be ids.  declared: its type, as the server sees it in a row.
CREATE FUNCTION @extschema@.idem__sink_type(relation oid, table_name name, column_name text, declared oid) RETURNS oid
LANGUAGE plpgsql AS $$
DECLARE
	type oid := declared;
	generated text;
BEGIN
	SELECT a.attgenerated INTO generated FROM pg_attribute AS a
	WHERE a.attrelid = relation AND a.attname::text = column_name AND a.attnum > 0 AND NOT a.attisdropped;
	IF NOT FOUND THEN
		PERFORM @extschema@.idem__raise('42703', pg_catalog.format('column "%s" of table "%s" does not exist', column_name, table_name),
			'The arguments of idem_skip_duplicates() are the scope, the user''s column and the request''s column.');
	ELSIF generated <> '' THEN
		PERFORM @extschema@.idem__raise('0A000', pg_catalog.format('column "%s" of table "%s" is generated', column_name, table_name),
			'Name a column that the INSERT sets, or that a trigger with an earlier name sets.',
			'The server computes it after the trigger.');
	END IF;
	WHILE EXISTS (SELECT FROM pg_type AS t WHERE t.oid = type AND t.typtype = 'd') LOOP
		type := (SELECT t.typbasetype FROM pg_type AS t WHERE t.oid = type);
	END LOOP;
	IF type NOT IN ('text'::regtype, 'varchar'::regtype, 'bpchar'::regtype, 'name'::regtype, 'uuid'::regtype,
			'int2'::regtype, 'int4'::regtype, 'int8'::regtype, 'numeric'::regtype) THEN
		PERFORM @extschema@.idem__raise('42804', pg_catalog.format('column "%s" of table "%s" has type %s, which cannot be an id',
				column_name, table_name, format_type(declared, NULL)),
			'Use a column of type text, varchar, char, name, uuid, smallint, integer, bigint or numeric: settings of the session do not change their text.');
	END IF;
	RETURN type;
END $$;

-- Raises an error unless the trigger is one that idem_skip_duplicates() can serve.  True: its
-- table is a partition.  (Replaced by sql/idem-citus.sql.)
CREATE FUNCTION @extschema@.idem__check_sink(relation oid, trigger_name name, fired text, arguments int4,
	scope text, user_column text, request_column text) RETURNS boolean LANGUAGE plpgsql AS $$
DECLARE
	trigger record;
	root text;
BEGIN
	SELECT t.oid, t.tgtype, t.tgparentid, c.relname, c.relispartition,
		t.tgqual IS NULL AND EXISTS (SELECT FROM pg_trigger AS o
			WHERE o.tgrelid = t.tgrelid AND o.oid <> t.oid AND o.tgfoid = t.tgfoid
				AND o.tgqual IS NULL AND o.tgenabled <> 'D') AS is_second,
		EXISTS (SELECT FROM pg_attribute AS a WHERE a.attrelid = t.tgrelid AND a.attname = user_column::name
				AND a.attname::text = user_column AND a.attnum > 0 AND a.attgenerated = '')
			AND EXISTS (SELECT FROM pg_attribute AS a WHERE a.attrelid = t.tgrelid AND a.attname = request_column::name
				AND a.attname::text = request_column AND a.attnum > 0 AND a.attgenerated = '') AS has_columns
	INTO trigger FROM pg_trigger AS t JOIN pg_class AS c ON c.oid = t.tgrelid
	WHERE t.tgrelid = relation AND t.tgname = trigger_name;
	IF NOT FOUND THEN
		PERFORM @extschema@.idem__raise('40001', 'could not serialize access: the trigger was created after this transaction''s snapshot',
			'Retry the transaction.');
	ELSIF fired <> 'BEFORE ROW' OR trigger.tgtype & 4 = 0 THEN
		PERFORM @extschema@.idem__raise('39P01', 'idem_skip_duplicates() must be called BEFORE INSERT, FOR EACH ROW',
			'Create the trigger BEFORE INSERT; on a partitioned table, BEFORE INSERT OR DELETE.');
	ELSIF arguments <> 3 THEN
		PERFORM @extschema@.idem__raise('39P01', 'idem_skip_duplicates() needs three arguments',
			'They are the scope, the name of the user''s column and the name of the request''s column.');
	ELSIF trigger.is_second THEN
		PERFORM @extschema@.idem__raise('39P01', pg_catalog.format('table "%s" has two triggers that call idem_skip_duplicates()', trigger.relname),
			'Drop one of them: the second one would skip each row that the first one has claimed.');
	ELSIF octet_length(scope) > 255 THEN
		PERFORM @extschema@.idem__check_scope(scope);
	ELSIF NOT trigger.has_columns THEN
		PERFORM @extschema@.idem__sink_type(relation, trigger.relname, user_column, 'text'::regtype::oid),
			@extschema@.idem__sink_type(relation, trigger.relname, request_column, 'text'::regtype::oid);
	END IF;
	-- A table that is being detached (DETACH CONCURRENTLY) is a partition until that is done:
	-- older transactions still move rows there, and away.
	IF trigger.relispartition AND (trigger.tgtype & 8 = 0 OR (
			WITH RECURSIVE up AS (
				SELECT trigger.tgparentid AS parent, relation AS relid
				UNION ALL
				SELECT t.tgparentid, t.tgrelid FROM up JOIN pg_trigger AS t ON t.oid = up.parent)
			SELECT c.relispartition FROM up JOIN pg_class AS c ON c.oid = up.relid WHERE up.parent = '0'::oid)) THEN
		root := (WITH RECURSIVE up AS (
				SELECT relation AS relid
				UNION ALL
				SELECT i.inhparent FROM up JOIN pg_inherits AS i ON i.inhrelid = up.relid)
			SELECT c.relname FROM up JOIN pg_class AS c ON c.oid = up.relid WHERE NOT c.relispartition);
		PERFORM @extschema@.idem__raise('39P01', pg_catalog.format('trigger "%s" must be created on partitioned table "%s", BEFORE INSERT OR DELETE',
				trigger_name, root),
			'Otherwise an UPDATE that moves a row to another partition could lose it.');
	END IF;
	RETURN trigger.relispartition;
END $$;

-- The id in a column of a row.  Raises ID400 for a value that cannot be one.
CREATE FUNCTION @extschema@.idem__sink_id(part text, value text, type oid, column_name text, table_name name)
RETURNS text
LANGUAGE plpgsql AS $$
DECLARE
	id constant text := CASE type WHEN 'bpchar'::regtype THEN rtrim(value, ' ') ELSE value END;
BEGIN
	IF octet_length(id) BETWEEN 1 AND 255 THEN
		RETURN id;
	END IF;
	PERFORM @extschema@.idem__raise('ID400', part || CASE WHEN id IS NULL THEN ' must not be null'
			WHEN id = '' THEN ' must not be empty' ELSE ' is too long' END,
		'Fix the client: it must send two ids of 1 to 255 bytes, and the same two each time it sends the request.',
		pg_catalog.format('It is column "%s" of table "%s".', column_name, table_name));
END $$;

-- The key of a row.  Raises an error if the types or the values of its columns cannot be ids.
CREATE FUNCTION @extschema@.idem__sink_key(relation oid, table_name name, user_type oid, request_type oid,
	user_value text, request_value text, scope text, user_column text, request_column text)
RETURNS @extschema@.idem__key
LANGUAGE plpgsql AS $$
DECLARE
	user_base constant oid := @extschema@.idem__sink_type(relation, table_name, user_column, user_type);
	request_base constant oid := @extschema@.idem__sink_type(relation, table_name, request_column, request_type);
BEGIN
	RETURN ROW (@extschema@.idem__sink_id('user_id', user_value, user_base, user_column, table_name),
		@extschema@.idem__sink_id('request_id', request_value, request_base, request_column, table_name), scope)::@extschema@.idem__key;
END $$;

-- Claims the key, and leaves this transaction's memory as it was: the claim is settled at
-- once.
CREATE FUNCTION @extschema@.idem__claim_marker(key @extschema@.idem__key, command text) RETURNS boolean
LANGUAGE plpgsql AS $$
DECLARE
	latest constant text := coalesce(current_setting('idem_held.latest', true), '');
	outcome text;
	ignored text;
BEGIN
	ignored := set_config('idem_held.latest', '', true);
	BEGIN
		outcome := (@extschema@.idem__claim_at_once(key.user_id::text, key.request_id::text, key.scope::text, NULL::bytea, NULL::interval)).outcome;
	EXCEPTION WHEN lock_not_available OR SQLSTATE 'ID001' THEN
		NULL;
	END;
	IF outcome IS NULL THEN
		outcome := (@extschema@.idem__claim_key(command, key, NULL::bytea, @extschema@.idem__deadline(NULL::interval),
			NULL::interval, NULL::jsonb, false, true)).outcome;
	END IF;
	IF outcome <> 'claimed' AND outcome <> 'completed' THEN
		PERFORM @extschema@.idem__raise_outcome(outcome, key);
	END IF;
	ignored := set_config('idem_held.latest', latest, true);
	RETURN outcome = 'claimed';
END $$;

-- Claims the request of each row that is inserted, and skips the row if the request was done
-- before.
--
-- It runs as its owner, for a table that can belong to anybody.  So it evaluates nothing of
-- the table's owner: no cast (format() calls output functions, which are the server's), and
-- no function that has the name of a column (an unqualified name in FROM is never one).
--
-- An UPDATE that moves a row to another partition deletes it there and inserts it here.  The
-- trigger cannot tell the insert from that of a new row, and to skip the row would lose it.  So
-- on a partitioned table the trigger is for DELETE too, and notes the time of the client's
-- statement.  If the statement then inserts a row whose request was done, it fails.  (SQL has
-- nothing that tells the statements of one function apart, or those that the client sends in one
-- string.)  Anybody can forge the note, and harms only the rows that he writes himself.
CREATE FUNCTION @extschema@.idem_skip_duplicates() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '100'
SET enable_seqscan = off SET jit = off SET plan_cache_mode = force_generic_plan AS $$
DECLARE
	is_partition constant boolean := @extschema@.idem__check_sink(TG_RELID, TG_NAME, TG_WHEN || ' ' || TG_LEVEL, TG_NARGS,
		TG_ARGV[0], TG_ARGV[1], TG_ARGV[2]);
	query constant text := pg_catalog.format('SELECT pg_typeof(%1$I)::oid AS user_type, pg_typeof(%2$I)::oid AS request_type,'
		' CASE WHEN %1$I IS NOT NULL THEN format(''%%s'', %1$I) END AS user_id,'
		' CASE WHEN %2$I IS NOT NULL THEN format(''%%s'', %2$I) END AS request_id'
		' FROM (SELECT ($1).*) AS inserted', TG_ARGV[1], TG_ARGV[2]);
	statement constant text := extract(epoch FROM statement_timestamp());
	common constant oid[] := ARRAY['text'::regtype, 'varchar'::regtype, 'uuid'::regtype, 'int4'::regtype, 'int8'::regtype];
	ids record;
	key @extschema@.idem__key;
BEGIN
	IF TG_OP = 'UPDATE' THEN
		RETURN NEW;
	ELSIF TG_OP = 'DELETE' THEN
		IF is_partition THEN
			PERFORM set_config('idem_held.deleting', statement, true);
		END IF;
		RETURN OLD;
	END IF;

	EXECUTE query INTO ids USING NEW;
	IF ids.user_type = ANY (common) AND ids.request_type = ANY (common)
		AND octet_length(ids.user_id) BETWEEN 1 AND 255 AND octet_length(ids.request_id) BETWEEN 1 AND 255 THEN
		key := ROW (ids.user_id, ids.request_id, TG_ARGV[0])::@extschema@.idem__key;
	ELSE
		key := @extschema@.idem__sink_key(TG_RELID, TG_TABLE_NAME, ids.user_type, ids.request_type, ids.user_id, ids.request_id,
			TG_ARGV[0], TG_ARGV[1], TG_ARGV[2]);
	END IF;
	IF @extschema@.idem__claim_marker(key, 'idem_skip_duplicates()') THEN
		RETURN NEW;
	ELSIF is_partition AND current_setting('idem_held.deleting', true) = statement THEN
		PERFORM @extschema@.idem__raise_of_key('0A000', 'cannot tell whether a row is new or moves from another partition',
			'To move rows, disable the trigger meanwhile. To delete rows and to insert others, use two statements.', key);
	END IF;
	RETURN NULL;
END $$;
