/*
 * sink.c
 *	  The trigger of a sink, a table that somebody only inserts into: it claims the request
 *	  of each row, and skips the row if the request was done before.
 *
 * The claim is a marker that is settled at once.  It runs with the rights of the role that
 * inserts, and needs none: who may create such a trigger was checked at CREATE TRIGGER.  The
 * ids are turned into text by functions of the server only, never by a user's.
 *
 * An UPDATE that moves a row to another partition deletes the row there and inserts it here,
 * in one statement, and the insert fires this trigger.  The request of the row was done, but
 * to skip the row would lose it.  So on a partitioned table the trigger is for UPDATE and
 * DELETE too, and notes the latest row that is about to be deleted, with the ids that its
 * UPDATE gave it, one row for each depth of triggers.  The next insert at that depth, in the
 * same statement, is the second half of the move if the deleted row says now that it moved to
 * another partition of this table, and the inserted row has the noted ids.  Then the row passes
 * without a claim.
 *
 * With other ids the row can be a new one: the trigger has not seen the second half of the
 * move (it is disabled there, or an earlier trigger skipped the row).  Or a later trigger
 * changed the ids of the row that moves.  So the row is claimed; if its request was done
 * before, the row may be neither skipped nor inserted, and the statement fails.
 *
 * The command id of the active snapshot tells the statements apart: each statement that writes
 * takes a command id of its own, and what a trigger runs in between has another snapshot.  A
 * worker of logical replication does not mark a row that it moves; but no other change that it
 * applies deletes a row and inserts one.
 *
 * The trigger must see each row where it leaves.  So it must be on the root of the partitions,
 * which passes it on to all of them.
 */
#include "postgres.h"

#include "access/genam.h"
#include "access/heapam.h"
#include "access/htup_details.h"
#include "access/table.h"
#include "access/xact.h"
#include "catalog/partition.h"
#include "catalog/pg_am_d.h"
#include "catalog/pg_trigger.h"
#include "catalog/pg_type_d.h"
#include "commands/trigger.h"
#include "executor/spi.h"
#include "replication/logicalworker.h"
#include "storage/bufmgr.h"
#include "utils/builtins.h"
#include "utils/fmgroids.h"
#include "utils/fmgrprotos.h"
#include "utils/lsyscache.h"
#include "utils/memutils.h"
#include "utils/rel.h"
#include "utils/snapmgr.h"

#include "claim.h"
#include "key.h"
#include "sink.h"
#include "sqlstate.h"

#define COMMAND "idem_skip_duplicates()"

/* A column that holds an id */
typedef struct SinkColumn
{
	AttrNumber	attnum;
	Oid			type;			/* of a domain: the type below it */
	const char *part;			/* the part of the key, for errors */
} SinkColumn;

/* A trigger of a table, checked once a statement */
typedef struct Sink
{
	text	   *scope;
	SinkColumn	user;
	SinkColumn	request;
	bool		is_partition;
} Sink;

/* The latest row that was about to be updated or deleted */
typedef struct LeavingRow
{
	CommandId	statement;		/* InvalidCommandId: none */
	Oid			partition;
	ItemPointerData tid;
	bool		is_updated;		/* the ids are those that the UPDATE gives it */
	bool		is_deleted;
	text	   *user_id;		/* NULL: the column is; in TopTransactionContext */
	text	   *request_id;
} LeavingRow;

/* One for each depth of triggers; in TopTransactionContext */
static LeavingRow *leaving_rows = NULL;
static int	nleaving_rows = 0;

PG_FUNCTION_INFO_V1(idem_skip_duplicates);

/* ----- what the trigger may be ----- */

static void
refuse_trigger(const char *message, const char *hint)
{
	ereport(ERROR,
			(errcode(ERRCODE_E_R_I_E_TRIGGER_PROTOCOL_VIOLATED),
			 errmsg("%s", message),
			 errhint("%s", hint)));
}

static TriggerData *
called_before_row(FunctionCallInfo fcinfo)
{
	TriggerData *trigger = (TriggerData *) fcinfo->context;

	if (!CALLED_AS_TRIGGER(fcinfo) ||
		!TRIGGER_FIRED_BEFORE(trigger->tg_event) ||
		!TRIGGER_FIRED_FOR_ROW(trigger->tg_event) ||
		!TRIGGER_FOR_INSERT(trigger->tg_trigger->tgtype))
		refuse_trigger("idem_skip_duplicates() must be called BEFORE INSERT, FOR EACH ROW",
					   "Create the trigger BEFORE INSERT; on a partitioned table, BEFORE INSERT OR UPDATE OR DELETE.");
	return trigger;
}

/* The second trigger would take the claim of the first one for an earlier one, and skip every
 * row.  Under different conditions (WHEN) two are fine. */
static void
refuse_second_trigger(TriggerData *data)
{
	TriggerDesc *all = data->tg_relation->trigdesc;

	if (data->tg_trigger->tgqual != NULL)
		return;
	for (int i = 0; i < all->numtriggers; i++)
	{
		Trigger    *other = &all->triggers[i];

		if (other->tgoid != data->tg_trigger->tgoid &&
			other->tgfoid == data->tg_trigger->tgfoid &&
			other->tgqual == NULL &&
			other->tgenabled != TRIGGER_DISABLED)
			refuse_trigger(psprintf("table \"%s\" has two triggers that call idem_skip_duplicates()",
									RelationGetRelationName(data->tg_relation)),
						   "Drop one of them: the second one would skip each row that the first one has claimed.");
	}
}

/* The parent of a trigger that was passed on to a partition; InvalidOid: it was not.  relid:
 * the table of the trigger. */
static Oid
parent_trigger(Relation triggers, Oid trigger, Oid *relid)
{
	ScanKeyData key;
	SysScanDesc scan;
	HeapTuple	tuple;
	Oid			parent = InvalidOid;

	ScanKeyInit(&key, Anum_pg_trigger_oid, BTEqualStrategyNumber, F_OIDEQ,
				ObjectIdGetDatum(trigger));
	scan = systable_beginscan(triggers, TriggerOidIndexId, true, NULL, 1, &key);
	tuple = systable_getnext(scan);
	if (HeapTupleIsValid(tuple))
	{
		Form_pg_trigger form = (Form_pg_trigger) GETSTRUCT(tuple);

		parent = form->tgparentid;
		*relid = form->tgrelid;
	}
	systable_endscan(scan);
	return parent;
}

/* A table that is being detached from a partitioned table (DETACH CONCURRENTLY) is one of its
 * partitions until that is done: older transactions still move rows there, and away. */
static Oid
partition_root(Oid relid)
{
	while (get_rel_relispartition(relid))
		relid = get_partition_parent(relid, true);
	return relid;
}

static void
require_trigger_of_root(TriggerData *data)
{
	Oid			relid = RelationGetRelid(data->tg_relation);
	Relation	triggers = table_open(TriggerRelationId, AccessShareLock);
	Oid			trigger = data->tg_trigger->tgoid;

	while (OidIsValid(trigger))
		trigger = parent_trigger(triggers, trigger, &relid);
	table_close(triggers, AccessShareLock);
	if (get_rel_relispartition(relid) ||
		!TRIGGER_FOR_DELETE(data->tg_trigger->tgtype) ||
		!TRIGGER_FOR_UPDATE(data->tg_trigger->tgtype))
		refuse_trigger(psprintf("trigger \"%s\" must be created on partitioned table \"%s\", BEFORE INSERT OR UPDATE OR DELETE",
								data->tg_trigger->tgname,
								get_rel_name(partition_root(relid))),
					   "Otherwise an UPDATE that moves a row to another partition could lose it.");
}

static SinkColumn
find_column(Relation table, const char *name, const char *part)
{
	SinkColumn	column = {.part = part};
	Form_pg_attribute attribute;

	column.attnum = SPI_fnumber(RelationGetDescr(table), name);
	if (column.attnum <= 0)
		ereport(ERROR,
				(errcode(ERRCODE_UNDEFINED_COLUMN),
				 errmsg("column \"%s\" of table \"%s\" does not exist",
						name, RelationGetRelationName(table)),
				 errhint("The arguments of idem_skip_duplicates() are the scope, the user's column and the request's column.")));
	attribute = TupleDescAttr(RelationGetDescr(table), column.attnum - 1);
	if (attribute->attgenerated != '\0')
		ereport(ERROR,
				(errcode(ERRCODE_FEATURE_NOT_SUPPORTED),
				 errmsg("column \"%s\" of table \"%s\" is generated",
						name, RelationGetRelationName(table)),
				 errdetail("The server computes it after the trigger."),
				 errhint("Name a column that the INSERT sets, or that a trigger with an earlier name sets.")));
	column.type = getBaseType(attribute->atttypid);
	switch (column.type)
	{
		case TEXTOID:
		case VARCHAROID:
		case BPCHAROID:
		case NAMEOID:
		case UUIDOID:
		case INT2OID:
		case INT4OID:
		case INT8OID:
		case NUMERICOID:
			break;
		default:
			ereport(ERROR,
					(errcode(ERRCODE_DATATYPE_MISMATCH),
					 errmsg("column \"%s\" of table \"%s\" has type %s, which cannot be an id",
							name, RelationGetRelationName(table),
							format_type_be(attribute->atttypid)),
					 errhint("Use a column of type text, varchar, char, name, uuid, smallint, integer, bigint or numeric: settings of the session do not change their text.")));
	}
	return column;
}

static Sink *
check_sink(FunctionCallInfo fcinfo, TriggerData *data)
{
	MemoryContext caller;
	const Trigger *trigger = data->tg_trigger;
	Sink	   *sink;

	if (fcinfo->flinfo->fn_extra != NULL)
		return fcinfo->flinfo->fn_extra;
	if (trigger->tgnargs != 3)
		refuse_trigger("idem_skip_duplicates() needs three arguments",
					   "They are the scope, the name of the user's column and the name of the request's column.");
	refuse_second_trigger(data);
	caller = MemoryContextSwitchTo(fcinfo->flinfo->fn_mcxt);
	sink = palloc0(sizeof(Sink));
	sink->scope = cstring_to_text(trigger->tgargs[0]);
	idem_key_check_length(sink->scope, "scope");
	sink->user = find_column(data->tg_relation, trigger->tgargs[1], "user_id");
	sink->request = find_column(data->tg_relation, trigger->tgargs[2],
								"request_id");
	sink->is_partition = data->tg_relation->rd_rel->relispartition;
	if (sink->is_partition)
	{
		if (trigger->tgnattr > 0)
			refuse_trigger(psprintf("trigger \"%s\" must be for UPDATE of all columns", trigger->tgname),
						   "Otherwise an UPDATE that moves a row to another partition could lose it.");
		require_trigger_of_root(data);
	}
	MemoryContextSwitchTo(caller);
	fcinfo->flinfo->fn_extra = sink;
	return sink;
}

/* ----- ids ----- */

/* As the cast to text makes it */
static text *
id_text(const SinkColumn *column, Datum value)
{
	PGFunction	output;

	switch (column->type)
	{
		case BPCHAROID:
			return DatumGetTextPP(DirectFunctionCall1(rtrim1, value));
		case NAMEOID:
			return cstring_to_text(NameStr(*DatumGetName(value)));
		case UUIDOID:
			output = uuid_out;
			break;
		case INT2OID:
			output = int2out;
			break;
		case INT4OID:
			output = int4out;
			break;
		case INT8OID:
			output = int8out;
			break;
		case NUMERICOID:
			output = numeric_out;
			break;
		default:
			return DatumGetTextPP(value);
	}
	return cstring_to_text(DatumGetCString(DirectFunctionCall1(output, value)));
}

/* NULL: the column is */
static text *
id_of_row(Relation table, HeapTuple row, const SinkColumn *column)
{
	bool		isnull;
	Datum		value = heap_getattr(row, column->attnum,
									 RelationGetDescr(table), &isnull);

	return isnull ? NULL : id_text(column, value);
}

/* ----- rows that move to another partition ----- */

static int
trigger_depth(void)
{
	return DatumGetInt32(DirectFunctionCall1(pg_trigger_depth, (Datum) 0));
}

static CommandId
current_statement(void)
{
	return ActiveSnapshotSet() ? GetActiveSnapshot()->curcid : InvalidCommandId;
}

static void
forget_leaving_rows(XactEvent event, void *arg)
{
	if (event == XACT_EVENT_COMMIT || event == XACT_EVENT_ABORT ||
		event == XACT_EVENT_PREPARE)
	{
		/* The memory goes with TopTransactionContext. */
		leaving_rows = NULL;
		nleaving_rows = 0;
	}
}

/* The note of this depth; room for it is made */
static LeavingRow *
note_of_depth(void)
{
	int			depth = trigger_depth();

	if (depth > nleaving_rows)
	{
		int			n = depth + 8;

		leaving_rows = leaving_rows == NULL ?
			MemoryContextAlloc(TopTransactionContext, n * sizeof(LeavingRow)) :
			repalloc(leaving_rows, n * sizeof(LeavingRow));
		for (int i = nleaving_rows; i < n; i++)
			leaving_rows[i] = (LeavingRow) {.statement = InvalidCommandId};
		nleaving_rows = n;
	}
	return &leaving_rows[depth - 1];
}

static void
forget_note(LeavingRow *row)
{
	if (row->user_id != NULL)
		pfree(row->user_id);
	if (row->request_id != NULL)
		pfree(row->request_id);
	*row = (LeavingRow) {.statement = InvalidCommandId};
}

static bool
note_is_of(const LeavingRow *row, const TriggerData *data)
{
	return row->statement != InvalidCommandId &&
		row->statement == current_statement() &&
		row->partition == RelationGetRelid(data->tg_relation) &&
		ItemPointerEquals((ItemPointer) &row->tid, &data->tg_trigtuple->t_self);
}

static LeavingRow *
note_row(TriggerData *data)
{
	LeavingRow *row = note_of_depth();

	forget_note(row);
	row->partition = RelationGetRelid(data->tg_relation);
	row->tid = data->tg_trigtuple->t_self;
	row->statement = current_statement();
	return row;
}

static text *
copy_id(const text *id)
{
	return id == NULL ? NULL :
		memcpy(MemoryContextAlloc(TopTransactionContext, VARSIZE_ANY(id)),
			   id, VARSIZE_ANY(id));
}

static void
note_update(TriggerData *data, const Sink *sink)
{
	text	   *user_id = id_of_row(data->tg_relation, data->tg_newtuple, &sink->user);
	text	   *request_id = id_of_row(data->tg_relation, data->tg_newtuple, &sink->request);
	LeavingRow *row = note_row(data);

	row->is_updated = true;
	row->user_id = copy_id(user_id);
	row->request_id = copy_id(request_id);
}

static void
note_delete(TriggerData *data)
{
	LeavingRow *row = note_of_depth();

	if (!note_is_of(row, data))
		row = note_row(data);
	row->is_deleted = true;
}

/* key: NULL if it is not known */
static void
cannot_tell(Oid partition, const IdemKey *key)
{
	ereport(ERROR,
			(errcode(ERRCODE_FEATURE_NOT_SUPPORTED),
			 errmsg("cannot tell whether a row is new or moves from partition \"%s\"",
					get_rel_name(partition)),
			 key == NULL ? 0 : idem_errdetail_key(key),
			 errhint("To move rows, disable the trigger meanwhile; to insert a deleted row again, use another transaction.")));
}

/* Our own transaction has deleted the row, so it is still there. */
static bool
row_has_moved(const LeavingRow *row)
{
	Relation	partition = table_open(row->partition, AccessShareLock);
	HeapTupleData tuple = {.t_self = row->tid};
	Buffer		buffer;
	bool		moved;

	if (partition->rd_rel->relam != HEAP_TABLE_AM_OID)
		cannot_tell(row->partition, NULL);
	moved = heap_fetch(partition, SnapshotAny, &tuple, &buffer, false) &&
		HeapTupleHeaderIndicatesMovedPartitions(tuple.t_data);
	if (BufferIsValid(buffer))
		ReleaseBuffer(buffer);
	table_close(partition, AccessShareLock);
	return moved;
}

/* NULL equals NULL */
static bool
ids_equal(const text *a, const text *b)
{
	if (a == NULL || b == NULL)
		return a == b;
	return idem_id_equal(a, b);
}

static bool
is_noted_row(const LeavingRow *row, TriggerData *data, const Sink *sink)
{
	return row->is_updated &&
		ids_equal(row->user_id, id_of_row(data->tg_relation, data->tg_trigtuple, &sink->user)) &&
		ids_equal(row->request_id, id_of_row(data->tg_relation, data->tg_trigtuple, &sink->request)) &&
		partition_root(row->partition) ==
		partition_root(RelationGetRelid(data->tg_relation));
}

/* Whether the row that is inserted moves here.  *maybe_from: if not, the partition from which
 * it may have moved nevertheless; InvalidOid: none. */
static bool
moves_here(TriggerData *data, const Sink *sink, Oid *maybe_from)
{
	int			depth = trigger_depth();
	LeavingRow *row;
	bool		moves = false;

	*maybe_from = InvalidOid;
	if (depth > nleaving_rows)
		return false;
	row = &leaving_rows[depth - 1];
	if (row->is_deleted && row->statement == current_statement() &&
		row->partition != RelationGetRelid(data->tg_relation))
	{
		if (IsLogicalWorker() && depth == 1)
			moves = true;
		else if (row_has_moved(row))
		{
			moves = is_noted_row(row, data, sink);
			if (!moves)
				*maybe_from = row->partition;
		}
	}
	/* The second half of a move comes next, or the trigger does not see it. */
	forget_note(row);
	return moves;
}

void
idem_sink_init(void)
{
	RegisterXactCallback(forget_leaving_rows, NULL);
}

/* ----- the row ----- */

static void
refuse_id(TriggerData *data, const SinkColumn *column, const char *what)
{
	TupleDesc	desc = RelationGetDescr(data->tg_relation);

	ereport(ERROR,
			(errcode(ERRCODE_IDEM_INVALID),
			 errmsg("%s %s", column->part, what),
			 errdetail("It is column \"%s\" of table \"%s\".",
					   NameStr(TupleDescAttr(desc, column->attnum - 1)->attname),
					   RelationGetRelationName(data->tg_relation)),
			 errhint("Fix the client: it must send two ids of 1 to %d bytes, and the same two each time it sends the request.",
					 IDEM_KEY_PART_BYTES_MAX)));
}

static text *
read_id(TriggerData *data, const SinkColumn *column)
{
	text	   *id = id_of_row(data->tg_relation, data->tg_trigtuple, column);

	if (id == NULL)
		refuse_id(data, column, "must not be null");
	else if (VARSIZE_ANY_EXHDR(id) == 0)
		refuse_id(data, column, "must not be empty");
	else if (!idem_id_is_valid(id))
		refuse_id(data, column, "is too long");
	return id;
}

/* idem_skip_duplicates(scope, user column, request column) */
Datum
idem_skip_duplicates(PG_FUNCTION_ARGS)
{
	TriggerData *data = called_before_row(fcinfo);
	Sink	   *sink = check_sink(fcinfo, data);
	IdemKey		key = {.scope = sink->scope};
	Oid			maybe_from = InvalidOid;

	if (TRIGGER_FIRED_BY_UPDATE(data->tg_event))
	{
		if (sink->is_partition)
			note_update(data, sink);
		return PointerGetDatum(data->tg_newtuple);
	}
	if (TRIGGER_FIRED_BY_DELETE(data->tg_event))
	{
		if (sink->is_partition)
			note_delete(data);
		return PointerGetDatum(data->tg_trigtuple);
	}
	if (sink->is_partition && moves_here(data, sink, &maybe_from))
		return PointerGetDatum(data->tg_trigtuple);

	key.user_id = read_id(data, &sink->user);
	key.request_id = read_id(data, &sink->request);
	if (idem_claim_marker(&key, COMMAND))
		return PointerGetDatum(data->tg_trigtuple);
	if (OidIsValid(maybe_from))
		cannot_tell(maybe_from, &key);
	return PointerGetDatum(NULL);
}
