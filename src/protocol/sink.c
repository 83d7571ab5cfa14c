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
 * in one statement.  The insert fires this trigger, which cannot tell the row from a new one.
 * The request of the row was done, but to skip the row would lose it.  So on a partitioned
 * table the trigger is for DELETE too, and remembers the statement.  If the statement then
 * inserts a row whose request was done, it fails.
 *
 * The command id of the active snapshot tells statements apart: it grows from statement to
 * statement, and a statement that a trigger runs has a larger one than the statement that fired
 * the trigger.  So it is enough to remember the largest one that has deleted: no statement that
 * runs in between can hide the DELETE of a move.
 *
 * The trigger must see each row where it leaves.  So it must be on the root of the partitions,
 * which passes it on to all of them.
 */
#include "postgres.h"

#include "access/htup_details.h"
#include "access/table.h"
#include "access/xact.h"
#include "catalog/partition.h"
#include "catalog/pg_trigger.h"
#include "catalog/pg_type_d.h"
#include "commands/trigger.h"
#include "executor/spi.h"
#include "utils/builtins.h"
#include "utils/fmgrprotos.h"
#include "utils/lsyscache.h"
#include "utils/rel.h"
#include "utils/snapmgr.h"

#include "sqlstate.h"
#include "protocol/claim.h"
#include "store/key.h"

#define COMMAND "idem_skip_duplicates()"

/* The types of ids, and what makes the same text of them as the cast to text does: a function that
 * returns text (of char), one that returns a C string, or neither. */
typedef struct IdType
{
	Oid			type;
	PGFunction	to_text;
	PGFunction	to_cstring;
} IdType;

static const IdType id_types[] = {
	{TEXTOID}, {VARCHAROID}, {BPCHAROID, .to_text = rtrim1},
	{NAMEOID, .to_cstring = nameout}, {UUIDOID, .to_cstring = uuid_out},
	{INT2OID, .to_cstring = int2out}, {INT4OID, .to_cstring = int4out},
	{INT8OID, .to_cstring = int8out}, {NUMERICOID, .to_cstring = numeric_out}
};

/* A column that holds an id */
typedef struct SinkColumn
{
	AttrNumber	attnum;
	const IdType *type;			/* of a domain: the type below it */
	const char *part;			/* the part of the key, for errors */
} SinkColumn;

/* A trigger of a table, checked once a statement */
typedef struct Sink
{
	text	   *scope;
	SinkColumn	user;
	SinkColumn	request;
} Sink;

/* The latest transaction that deleted rows of a partition, and its latest statement that did */
static FullTransactionId deleting_transaction;
static CommandId deleting_statement;

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
					   "Create the trigger BEFORE INSERT; on a partitioned table, BEFORE INSERT OR DELETE.");
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

/* A table that is being detached from a partitioned table (DETACH CONCURRENTLY) is one of its
 * partitions until that is done: older transactions still move rows there, and away. */
static Oid
partition_root(Oid relid)
{
	while (get_rel_relispartition(relid))
		relid = get_partition_parent(relid, true);
	return relid;
}

/* A row trigger of the root has a clone of its name on each partition, and no partition can have
 * another trigger of that name. */
static void
require_trigger_of_root(TriggerData *data)
{
	const Trigger *trigger = data->tg_trigger;
	Relation	root = table_open(partition_root(RelationGetRelid(data->tg_relation)),
								  AccessShareLock);
	bool		is_of_root = false;

	for (int i = 0; trigger->tgisclone && root->trigdesc != NULL &&
		 i < root->trigdesc->numtriggers; i++)
	{
		Trigger    *other = &root->trigdesc->triggers[i];

		is_of_root = is_of_root || (TRIGGER_FOR_ROW(other->tgtype) &&
									strcmp(other->tgname, trigger->tgname) == 0);
	}
	if (!is_of_root || !TRIGGER_FOR_DELETE(trigger->tgtype))
		refuse_trigger(psprintf("trigger \"%s\" must be created on partitioned table \"%s\", BEFORE INSERT OR DELETE",
								trigger->tgname, RelationGetRelationName(root)),
					   "Otherwise an UPDATE that moves a row to another partition could lose it.");
	table_close(root, AccessShareLock);
}

static SinkColumn
find_column(Relation table, const char *name, const char *part)
{
	SinkColumn	column = {.part = part};
	Form_pg_attribute attribute;
	Oid			type;

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
	type = getBaseType(attribute->atttypid);
	for (int i = 0; i < lengthof(id_types); i++)
		if (id_types[i].type == type)
			column.type = &id_types[i];
	if (column.type == NULL)
		ereport(ERROR,
				(errcode(ERRCODE_DATATYPE_MISMATCH),
				 errmsg("column \"%s\" of table \"%s\" has type %s, which cannot be an id",
						name, RelationGetRelationName(table),
						format_type_be(attribute->atttypid)),
				 errhint("Use a column of type text, varchar, char, name, uuid, smallint, integer, bigint or numeric: settings of the session do not change their text.")));
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
	if (data->tg_relation->rd_rel->relispartition)
		require_trigger_of_root(data);
	MemoryContextSwitchTo(caller);
	fcinfo->flinfo->fn_extra = sink;
	return sink;
}

/* ----- rows that move to another partition ----- */

static void
note_delete(void)
{
	FullTransactionId transaction = GetTopFullTransactionId();
	CommandId	statement = GetActiveSnapshot()->curcid;

	if (!FullTransactionIdEquals(deleting_transaction, transaction) ||
		deleting_statement < statement)
		deleting_statement = statement;
	deleting_transaction = transaction;
}

/* Whether the row that is inserted may be one that moves here */
static bool
may_move_here(void)
{
	return FullTransactionIdEquals(deleting_transaction, GetTopFullTransactionId()) &&
		deleting_statement >= GetActiveSnapshot()->curcid;
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
	bool		isnull;
	Datum		value = heap_getattr(data->tg_trigtuple, column->attnum,
									 RelationGetDescr(data->tg_relation), &isnull);
	text	   *id;

	if (isnull)
		refuse_id(data, column, "must not be null");
	if (column->type->to_cstring != NULL)
		id = cstring_to_text(DatumGetCString(DirectFunctionCall1(column->type->to_cstring,
																 value)));
	else
		id = DatumGetTextPP(column->type->to_text == NULL ? value :
							DirectFunctionCall1(column->type->to_text, value));
	if (VARSIZE_ANY_EXHDR(id) == 0)
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
	bool		is_partition = data->tg_relation->rd_rel->relispartition;
	IdemKey		key = {.scope = sink->scope};

	if (TRIGGER_FIRED_BY_UPDATE(data->tg_event))
		return PointerGetDatum(data->tg_newtuple);
	if (TRIGGER_FIRED_BY_DELETE(data->tg_event))
	{
		if (is_partition)
			note_delete();
		return PointerGetDatum(data->tg_trigtuple);
	}

	key.user_id = read_id(data, &sink->user);
	key.request_id = read_id(data, &sink->request);
	if (idem_claim_marker(&key, COMMAND))
		return PointerGetDatum(data->tg_trigtuple);
	if (is_partition && may_move_here())
		ereport(ERROR,
				(errcode(ERRCODE_FEATURE_NOT_SUPPORTED),
				 errmsg("cannot tell whether a row is new or moves from another partition"),
				 idem_errdetail_key(&key),
				 errhint("To move rows, disable the trigger meanwhile. To delete rows and to insert others, use two statements.")));
	return PointerGetDatum(NULL);
}
