-- ----- sinks -----

-- Raises an error for a trigger that is a mistake.  (Replaced by sql/idem-citus.sql.)
CREATE FUNCTION @extschema@.idem__check_sink(relation oid, trigger_name name, fired text, arguments text[]) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
	trigger record;
BEGIN
	SELECT t.tgtype, t.tgparentid, c.relname, c.relispartition,
		t.tgqual IS NULL AND EXISTS (SELECT FROM pg_trigger AS o WHERE o.tgrelid = relation AND o.oid <> t.oid
			AND o.tgfoid = t.tgfoid AND o.tgqual IS NULL AND o.tgenabled <> 'D') AS is_second
	INTO trigger FROM pg_trigger AS t JOIN pg_class AS c ON c.oid = t.tgrelid
	WHERE t.tgrelid = relation AND t.tgname = trigger_name;
	IF NOT FOUND THEN
		PERFORM @extschema@.idem__raise('40001', 'could not serialize access: the trigger was created after this transaction''s snapshot',
			'Retry the transaction.');
	ELSIF fired <> 'BEFORE ROW' OR trigger.tgtype & 4 = 0 THEN		-- 4: INSERT
		PERFORM @extschema@.idem__raise('39P01', 'idem_skip_duplicates() must be called BEFORE INSERT, FOR EACH ROW',
			'Create the trigger BEFORE INSERT; on a partitioned table, BEFORE INSERT OR DELETE.');
	ELSIF cardinality(arguments) IS DISTINCT FROM 3 THEN
		PERFORM @extschema@.idem__raise('39P01', 'idem_skip_duplicates() needs three arguments',
			'They are the scope, the name of the user''s column and the name of the request''s column.');
	ELSIF trigger.is_second THEN
		PERFORM @extschema@.idem__raise('39P01', pg_catalog.format('table "%s" has two triggers that call idem_skip_duplicates()', trigger.relname),
			'Drop one of them: the second one would skip each row that the first one has claimed.');
	-- 8: DELETE.  A table that is being detached (DETACH CONCURRENTLY) is a partition until that is done:
	-- older transactions still move rows there, and away.
	ELSIF trigger.relispartition AND (trigger.tgtype & 8 = 0 OR EXISTS (
			WITH RECURSIVE up AS (
				SELECT trigger.tgparentid AS parent, relation AS relid
				UNION ALL SELECT t.tgparentid, t.tgrelid FROM up JOIN pg_trigger AS t ON t.oid = up.parent)
			SELECT FROM up JOIN pg_class AS c ON c.oid = up.relid WHERE up.parent = '0'::oid AND c.relispartition)) THEN
		PERFORM @extschema@.idem__raise('39P01', pg_catalog.format('trigger "%s" must be created on partitioned table "%s", BEFORE INSERT OR DELETE',
				trigger_name, (
				WITH RECURSIVE up AS (
					SELECT relation AS relid UNION ALL SELECT i.inhparent FROM up JOIN pg_inherits AS i ON i.inhrelid = up.relid)
				SELECT c.relname FROM up JOIN pg_class AS c ON c.oid = up.relid WHERE NOT c.relispartition)),
			'Otherwise an UPDATE that moves a row to another partition could lose it.');
	END IF;
END $$;

-- The id in a column of a row, where it has this type and text.  Raises an error if it cannot be one, or if the
-- column is none that can have ids; type NULL: asks only for the latter.
CREATE FUNCTION @extschema@.idem__sink_id(part text, relation oid, table_name name, column_name text, type oid, value text)
RETURNS text
LANGUAGE plpgsql AS $$
DECLARE
	place constant text := pg_catalog.format('column "%s" of table "%s"', column_name, table_name);
	base oid := type;			-- of a domain, the type below it
	is_generated constant boolean := (SELECT a.attgenerated <> '' FROM pg_attribute AS a
		WHERE a.attrelid = relation AND a.attname::text = column_name AND a.attnum > 0 AND NOT a.attisdropped);
	id text;
BEGIN
	IF is_generated IS NULL THEN
		PERFORM @extschema@.idem__raise('42703', place || ' does not exist',
			'The arguments of idem_skip_duplicates() are the scope, the user''s column and the request''s column.');
	ELSIF is_generated THEN
		PERFORM @extschema@.idem__raise('0A000', place || ' is generated',
			'Name a column that the INSERT sets, or that a trigger with an earlier name sets.', 'The server computes it after the trigger.');
	ELSIF type IS NULL THEN
		RETURN NULL;
	END IF;
	WHILE EXISTS (SELECT FROM pg_type AS t WHERE t.oid = base AND t.typtype = 'd') LOOP
		base := (SELECT t.typbasetype FROM pg_type AS t WHERE t.oid = base);
	END LOOP;
	IF base <> ALL ('{text,varchar,bpchar,name,uuid,int2,int4,int8,numeric}'::regtype[]::oid[]) THEN
		PERFORM @extschema@.idem__raise('42804', pg_catalog.format('%s has type %s, which cannot be an id', place, format_type(type, NULL)),
			'Use a column of type text, varchar, char, name, uuid, smallint, integer, bigint or numeric: settings of the session do not change their text.');
	END IF;
	id := CASE base WHEN 'bpchar'::regtype THEN rtrim(value, ' ') ELSE value END;
	IF (octet_length(id) BETWEEN 1 AND 255) IS NOT TRUE THEN
		PERFORM @extschema@.idem__raise('ID400', part || CASE WHEN id IS NULL THEN ' must not be null'
				WHEN id = '' THEN ' must not be empty' ELSE ' is too long' END,
			'Fix the client: it must send two ids of 1 to 255 bytes, and the same two each time it sends the request.',
			'It is ' || place || '.');
	END IF;
	RETURN id;
END $$;

-- Claims the request of each row that is inserted, and skips the row if the request was done before.  The claim is
-- settled at once, so it leaves this transaction's memory of claims as it was.
--
-- It runs as its owner, for a table that can belong to anybody.  So it evaluates nothing of the table's owner: no cast
-- (format() calls output functions, which are the server's), and no function that has the name of a column (an
-- unqualified name in FROM is never one).  It takes the ids from the text of the row, "(a,b)", if they stand before
-- the first value in quotes.  A query by their names finds all, but is planned for each row: it is for the others, for
-- long rows, and where the snapshot may be older than the columns.
--
-- idem_held.checked says that this statement of the client has had the trigger checked.  Who forges it uses a trigger
-- that would be refused as a mistake; ids and their columns are checked for each row.
--
-- An UPDATE that moves a row to another partition deletes it there and inserts it here, which the trigger cannot tell
-- from a new row; to skip it would lose it.  So the trigger is for DELETE too, and notes the time of the client's
-- statement.  If that then inserts into a partition a row whose request was done, it fails.  (SQL has nothing that
-- tells the statements of one function apart.)  Who forges this note harms only rows that he writes himself.
CREATE FUNCTION @extschema@.idem_skip_duplicates() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '100'
SET enable_seqscan = off SET jit = off SET plan_cache_mode = force_generic_plan AS $$
DECLARE
	statement constant text := extract(epoch FROM statement_timestamp());
	checked constant text := concat_ws(' ', statement, TG_RELID, TG_NAME);
	latest constant text := coalesce(current_setting('idem_held.latest', true), '');
	columns text[];				-- NULL: the column cannot be an id, or has another type
	ids text[];
	found record;
	key @extschema@.idem__key;
	outcome text;
	ignored text;				-- assigned to, since PERFORM would need a query
BEGIN
	IF current_setting('idem_held.checked', true) IS DISTINCT FROM checked THEN
		PERFORM @extschema@.idem__check_sink(TG_RELID, TG_NAME, TG_WHEN || ' ' || TG_LEVEL, TG_ARGV);
		ignored := set_config('idem_held.checked', checked, true);
	END IF;
	IF TG_OP = 'UPDATE' THEN
		RETURN NEW;
	ELSIF TG_OP = 'DELETE' THEN
		IF (SELECT c.relispartition FROM pg_class AS c WHERE c.oid = TG_RELID) THEN
			ignored := set_config('idem_held.deleting', statement, true);
		END IF;
		RETURN OLD;
	END IF;

	IF pg_column_size(NEW) < 2000 AND current_setting('transaction_isolation') = 'read committed' THEN
		columns := ARRAY(SELECT CASE WHEN a.attgenerated = '' AND a.atttypid = ANY ('{text,varchar,uuid,int4,int8}'::regtype[]::oid[])
				THEN a.attname::text END
			FROM pg_attribute AS a WHERE a.attrelid = TG_RELID AND a.attnum > 0 AND NOT a.attisdropped ORDER BY a.attnum);
		ids := string_to_array(btrim(split_part(pg_catalog.format('%s', NEW), '"', 1), '()'), ',', '');
		key := ROW (ids[array_position(columns, TG_ARGV[1])], ids[array_position(columns, TG_ARGV[2])], TG_ARGV[0])::@extschema@.idem__key;
	END IF;
	IF (octet_length(key.user_id) <= 255 AND octet_length(key.request_id) <= 255 AND octet_length(key.scope) <= 255) IS NOT TRUE THEN
		PERFORM @extschema@.idem__check_scope(TG_ARGV[0]),
			@extschema@.idem__sink_id('', TG_RELID, TG_TABLE_NAME, TG_ARGV[1], NULL::oid, NULL::text),
			@extschema@.idem__sink_id('', TG_RELID, TG_TABLE_NAME, TG_ARGV[2], NULL::oid, NULL::text);
		EXECUTE pg_catalog.format('SELECT pg_typeof(%1$I)::oid AS user_type, pg_typeof(%2$I)::oid AS request_type,'
			' CASE WHEN %1$I IS NOT NULL THEN format(''%%s'', %1$I) END AS user_id,'
			' CASE WHEN %2$I IS NOT NULL THEN format(''%%s'', %2$I) END AS request_id'
			' FROM (SELECT ($1).*) AS inserted', TG_ARGV[1], TG_ARGV[2]) INTO found USING NEW;
		key := ROW (@extschema@.idem__sink_id('user_id', TG_RELID, TG_TABLE_NAME, TG_ARGV[1], found.user_type, found.user_id),
			@extschema@.idem__sink_id('request_id', TG_RELID, TG_TABLE_NAME, TG_ARGV[2], found.request_type, found.request_id),
			TG_ARGV[0])::@extschema@.idem__key;
	END IF;

	ignored := set_config('idem_held.latest', '', true);
	outcome := (@extschema@.idem__claim_marker(key, 'idem_skip_duplicates()', NULL::bytea, NULL::interval)).outcome;
	ignored := set_config('idem_held.latest', latest, true);
	IF outcome = 'claimed' THEN
		RETURN NEW;
	ELSIF outcome <> 'completed' THEN
		PERFORM @extschema@.idem__raise_outcome(outcome, key);
	ELSIF (SELECT c.relispartition FROM pg_class AS c WHERE c.oid = TG_RELID) THEN
		-- Once more: it may have become a partition after the check, in the same statement of the client.
		PERFORM @extschema@.idem__check_sink(TG_RELID, TG_NAME, TG_WHEN || ' ' || TG_LEVEL, TG_ARGV);
		IF current_setting('idem_held.deleting', true) = statement THEN
			PERFORM @extschema@.idem__raise_of_key('0A000', 'cannot tell whether a row is new or moves from another partition',
				'To move rows, disable the trigger meanwhile. To delete rows and to insert others, use two statements.', key);
		END IF;
	END IF;
	RETURN NULL;
END $$;
