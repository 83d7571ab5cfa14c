/*
 * scopes.c
 *	  The table idem_scopes: its layout, its triggers, and the error for a scope without a
 *	  row.
 *
 * Operators edit the table with SQL.  Two row triggers watch over it, both written in
 * C: they run with the rights of the role that edits the table, look up no name, and
 * refuse any other table that they are attached to.
 *
 * idem__scopes_changed() is ENABLE ALWAYS, so that rows from a publisher act as well.  It makes
 * all sessions read the table again (policy.c).
 *
 * idem__scopes_guard() keeps guarded_since.  Under key_time = uuidv7 a key without a row
 * is new if its own time lies within the ttl, because a claim of it would still be
 * remembered.  That conclusion is wrong for keys whose claims may have had a shorter ttl:
 * claims from before uuidv7 was switched on, from before the ttl grew, or from a time when
 * the scope had no row.  So each of these changes sets guarded_since, and keys up to that
 * time count as stale.  The trigger does not fire on a subscriber, which receives the
 * publisher's guarded_since.
 *
 * For such a change, idem__scopes_guard() takes ExclusiveLock on the table, then reads the clock,
 * and keeps the lock until the transaction commits.  A claim holds RowShareLock while it checks its policy, reads the
 * clock and writes its row (policy.h).  So every claim under the old policy has read the
 * clock before the change did, and every later claim follows the new policy.  A key's own
 * time can be a minute ahead of the clock: guarded_since therefore adds a minute.
 */
#include "postgres.h"

#include "access/htup_details.h"
#include "access/sysattr.h"
#include "access/table.h"
#include "catalog/pg_collation_d.h"
#include "catalog/pg_type_d.h"
#include "commands/trigger.h"
#include "miscadmin.h"
#include "storage/lmgr.h"
#include "storage/proc.h"
#include "utils/builtins.h"
#include "utils/guc.h"
#include "utils/inval.h"
#include "utils/rel.h"
#include "utils/timestamp.h"

#include "compat.h"
#include "sqlstate.h"
#include "store/catalog.h"
#include "store/duration.h"
#include "store/key.h"
#include "store/scopes.h"

/* How long a change waits for claims where lock_timeout is 0 */
#define GUARD_LOCK_TIMEOUT "5s"

static const Oid column_types[Natts_scopes] = {
	TEXTOID, INTERVALOID, INTERVALOID, INTERVALOID, TEXTOID, TEXTOID, TEXTOID,
	TEXTOID, INT4OID, TIMESTAMPTZOID
};

PG_FUNCTION_INFO_V1(idem__scopes_changed);
PG_FUNCTION_INFO_V1(idem__scopes_guard);

/* ----- layout ----- */

/* Otherwise a lookup could find several rows of a scope, or none. */
static bool
has_primary_key_of_scope(Relation scopes)
{
	Bitmapset  *key = RelationGetIndexAttrBitmap(scopes, INDEX_ATTR_BITMAP_PRIMARY_KEY);
	int			column;

	return OidIsValid(idem_primary_key_index(scopes)) &&
		bms_get_singleton_member(key, &column) &&
		column == Anum_scopes_scope - FirstLowInvalidHeapAttributeNumber &&
		TupleDescAttr(RelationGetDescr(scopes), Anum_scopes_scope - 1)->attcollation == C_COLLATION_OID;
}

static void
check_layout(Relation scopes)
{
	TupleDesc	desc = RelationGetDescr(scopes);
	bool		same = desc->natts >= Natts_scopes &&
		has_primary_key_of_scope(scopes);
	bool		has_dropped = false;

	for (int i = 0; i < Min(Natts_scopes, desc->natts); i++)
	{
		/* A dropped column has type 0. */
		same = same && TupleDescAttr(desc, i)->atttypid == column_types[i];
		has_dropped = has_dropped || TupleDescAttr(desc, i)->attisdropped;
	}
	idem_refuse_distributed(scopes);
	if (!same)
		ereport(ERROR,
				(errcode(ERRCODE_FEATURE_NOT_SUPPORTED),
				 errmsg("table \"%s\" has another layout than the extension gave it",
						RelationGetRelationName(scopes)),
				 errdetail("Its first %d columns must be those of the extension, in their order, and its primary key must be (scope), of collation \"C\".",
						   Natts_scopes),
				 has_dropped ?
				 errhint("Dump this database and restore it: a dropped column cannot come back to its place in the table.") :
				 errhint("Undo the change of its columns or of its primary key.")));
}

Relation
idem_scopes_open(void)
{
	Relation	scopes;

	/* If it was dropped since the catalog was read, asking again raises the error. */
	while ((scopes = try_table_open(idem_catalog()->scopes,
									AccessShareLock)) == NULL)
		CHECK_FOR_INTERRUPTS();
	check_layout(scopes);
	return scopes;
}

/* ----- scopes that are not declared ----- */

void
idem_raise_undeclared_scope(const text *scope)
{
	char	   *name = text_to_cstring(scope);

	ereport(ERROR,
			(errcode(ERRCODE_IDEM_INVALID),
			 errmsg("scope \"%s\" is not declared", name),
			 errdetail("With idem.scopes = declared, requests can be claimed only in scopes that have a row in idem_scopes."),
			 errhint("Fix the client; or declare the scope: INSERT INTO idem_scopes (scope) VALUES (%s).",
					 quote_literal_cstr(name))));
}

/* ----- triggers ----- */

static void
refuse_trigger(const char *function)
{
	ereport(ERROR,
			(errcode(ERRCODE_E_R_I_E_TRIGGER_PROTOCOL_VIOLATED),
			 errmsg("%s is a trigger function of idem_scopes", function),
			 errhint("Do not use it for other tables or events.")));
}

/* The data of the trigger, which must be on our own table. */
static TriggerData *
called_before_change(FunctionCallInfo fcinfo, const char *function)
{
	TriggerData *trigger = (TriggerData *) fcinfo->context;

	if (!CALLED_AS_TRIGGER(fcinfo) ||
		!TRIGGER_FIRED_BEFORE(trigger->tg_event) ||
		RelationGetRelid(trigger->tg_relation) != idem_catalog()->scopes)
		refuse_trigger(function);
	return trigger;
}

static Datum
column(TriggerData *trigger, HeapTuple row, AttrNumber attnum, bool *isnull)
{
	return heap_getattr(row, attnum, RelationGetDescr(trigger->tg_relation),
						isnull);
}

static char *
scope_name(TriggerData *trigger, HeapTuple row)
{
	bool		isnull;
	Datum		scope = column(trigger, row, Anum_scopes_scope, &isnull);

	return isnull ? pstrdup("") : TextDatumGetCString(scope);
}

static bool
has_uuidv7(TriggerData *trigger, HeapTuple row)
{
	bool		isnull;
	Datum		key_time = column(trigger, row, Anum_scopes_key_time, &isnull);

	return !isnull && strcmp(TextDatumGetCString(key_time), "uuidv7") == 0;
}

/* Before a row changes, and before TRUNCATE */
Datum
idem__scopes_changed(PG_FUNCTION_ARGS)
{
	TriggerData *trigger = called_before_change(fcinfo, "idem__scopes_changed()");
	HeapTuple	row;

	if (TRIGGER_FIRED_FOR_STATEMENT(trigger->tg_event) !=
		TRIGGER_FIRED_BY_TRUNCATE(trigger->tg_event))
		refuse_trigger("idem__scopes_changed()");
	CacheInvalidateRelcache(trigger->tg_relation);

	if (TRIGGER_FIRED_FOR_STATEMENT(trigger->tg_event))
		return PointerGetDatum(NULL);
	if (TRIGGER_FIRED_BY_DELETE(trigger->tg_event))
		return PointerGetDatum(trigger->tg_trigtuple);

	row = TRIGGER_FIRED_BY_UPDATE(trigger->tg_event) ?
		trigger->tg_newtuple : trigger->tg_trigtuple;
	check_layout(trigger->tg_relation);
	return PointerGetDatum(row);
}

/* Waits for claims that are being written, and blocks new ones until the change commits. */
static void
lock_out_claims(TriggerData *trigger, HeapTuple row)
{
	MemoryContext context = CurrentMemoryContext;
	int			nest_level = NewGUCNestLevel();

	if (LockTimeout == 0)
		(void) set_config_option("lock_timeout", GUARD_LOCK_TIMEOUT,
								 PGC_USERSET, PGC_S_SESSION, GUC_ACTION_SAVE,
								 true, 0, false);
	PG_TRY();
	{
		LockRelationOid(RelationGetRelid(trigger->tg_relation), ExclusiveLock);
		/* Raises a timeout that fired at the moment in which the lock was granted. */
		CHECK_FOR_INTERRUPTS();
	}
	PG_CATCH();
	{
		ErrorData  *error;

		/* Replaces the error by another one, so no subtransaction is needed. */
		MemoryContextSwitchTo(context);
		error = CopyErrorData();
		if (error->sqlerrcode != ERRCODE_LOCK_NOT_AVAILABLE)
			PG_RE_THROW();
		FlushErrorState();
		ereport(ERROR,
				(errcode(ERRCODE_LOCK_NOT_AVAILABLE),
				 errmsg("policy of scope \"%s\" cannot change now: idem_scopes is in use",
						scope_name(trigger, row)),
				 errhint("Other transactions change it, or claim: try again. Set lock_timeout to wait longer than 5 seconds.")));
	}
	PG_END_TRY();
	AtEOXact_GUC(true, nest_level);
}

/* A CHECK constraint refuses a row that has none, or one that is no valid length. */
static int64
ttl_us(TriggerData *trigger, HeapTuple row)
{
	bool		isnull;
	Datum		ttl = column(trigger, row, Anum_scopes_ttl, &isnull);

	return isnull ? 0 : idem_interval_us(DatumGetIntervalP(ttl));
}

/* Whether an earlier claim can have had a shorter promise than the new row gives: the scope had
 * no row, no uuidv7, another name or a shorter ttl. */
static bool
makes_past_unknown(TriggerData *trigger, HeapTuple was, HeapTuple becomes)
{
	return was == NULL ||
		!has_uuidv7(trigger, was) ||
		strcmp(scope_name(trigger, was), scope_name(trigger, becomes)) != 0 ||
		ttl_us(trigger, becomes) > ttl_us(trigger, was);
}

/*
 * Before INSERT or UPDATE of a row.  Overwrites guarded_since, also where the command or a
 * restored dump sets it.
 */
Datum
idem__scopes_guard(PG_FUNCTION_ARGS)
{
	TriggerData *trigger = called_before_change(fcinfo, "idem__scopes_guard()");
	HeapTuple	was = NULL;
	HeapTuple	becomes = trigger->tg_trigtuple;
	int			attnum = Anum_scopes_guarded_since;
	Datum		guarded_since = (Datum) 0;
	bool		isnull = true;

	if (!TRIGGER_FIRED_FOR_ROW(trigger->tg_event) ||
		TRIGGER_FIRED_BY_DELETE(trigger->tg_event))
		refuse_trigger("idem__scopes_guard()");
	check_layout(trigger->tg_relation);
	if (TRIGGER_FIRED_BY_UPDATE(trigger->tg_event))
	{
		was = trigger->tg_trigtuple;
		becomes = trigger->tg_newtuple;
	}

	if (has_uuidv7(trigger, becomes))
	{
		if (makes_past_unknown(trigger, was, becomes))
		{
			lock_out_claims(trigger, becomes);
			guarded_since = TimestampTzGetDatum(GetCurrentTimestamp() +
												IDEM_KEY_TIME_SKEW_US);
			isnull = false;
		}
		else
		{
			Assert(was != NULL);
			guarded_since = column(trigger, was, Anum_scopes_guarded_since,
								   &isnull);
		}
	}
	return PointerGetDatum(heap_modify_tuple_by_cols(becomes,
													 RelationGetDescr(trigger->tg_relation),
													 1, &attnum,
													 &guarded_since, &isnull));
}
