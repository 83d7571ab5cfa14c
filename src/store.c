/*
 * store.c
 *	  The claims table: the only code that knows its layout and touches it.
 *
 * Claims are written through the table access method rather than by SQL: that
 * is several times cheaper, and it needs no right on the table, so that the
 * right to call the function is all that a caller has.  The sequence is that of
 * INSERT ... ON CONFLICT DO NOTHING (nodeModifyTable.c, execIndexing.c):
 *
 *	1. probe the primary key with a dirty snapshot, which also sees rows that
 *	   are not committed yet and says whose they are;
 *	2. take the speculative insertion lock of our transaction;
 *	3. insert the row with a speculative token in the place of its ctid, so that
 *	   another inserter of the same key waits for the token, not for us;
 *	4. insert the index entries.  The primary key reports a conflict instead of
 *	   raising it or waiting for it;
 *	5. confirm the row, or, on a conflict, kill it;
 *	6. release the lock; after a conflict the caller starts again at 1, where it
 *	   learns whom to wait for.
 *
 * Steps 4 and 5 close the race between two probes that both found nothing: of
 * two entries with the same key in the unique index the second one sees the
 * first.  No decision rests on the probe alone.  So a session that has claimed many
 * new keys in a row leaves step 1 out, until an insert conflicts.
 *
 * Many rows at once need neither token nor confirmation: they are written as plain
 * rows by a subtransaction of their own, which is rolled back if any key turns out to
 * be there.  Another claim of one of these keys waits for the subtransaction, not for our
 * transaction, and nothing in the subtransaction waits for others: so a key whose row is
 * rolled back is free at once.  Each such subtransaction uses one transaction id.
 *
 * Locks, in this order:
 *
 *	1. RowExclusiveLock on the table, then on its indexes.  They are held until the
 *	   transaction ends, as after any DML.  Unlike there they belong to the transaction
 *	   and not to the portal or the savepoint, because the store stays open as long;
 *	2. for a lease, the lock of the key, from before the probe to after the write;
 *	3. the speculative lock between steps 2 and 6 above, or the id of the subtransaction
 *	   that writes many rows.
 *
 * While it holds lock 3, nothing waits for another transaction, with one exception: an
 * index that a user made unique waits for the holder of an equal value, as in any INSERT.
 * Only lock_timeout bounds that wait, not the deadline of the call.
 *
 * Updates and deletes never wait.  A row of another transaction is locked with
 * LockWaitSkip before it is updated; a delete is tried without waiting.  If the row is
 * taken, the caller probes again.
 *
 * What the executor would have done is done by check_writable(), which refuses a
 * transaction that may not write, and by open_store(), which refuses a table that was
 * given triggers, rules, row security, constraints or columns: a direct insert would
 * pass them by.  Columns that were dropped again do no harm.  Indexes that a user added
 * are maintained.
 *
 * Opening relations, indexes and a scan costs as much as a probe, so they are
 * kept open from the first claim of a transaction to its end (the_store).  They
 * belong to the transaction's own resource owner and memory, not to the portal or
 * the subtransaction that happens to claim first, and are released
 *
 *	- before the transaction commits or is prepared; an abort releases them by
 *	  itself;
 *	- when a subtransaction aborts that may have created what is open;
 *	- before any utility command, which could be DDL of the table, and would be
 *	  refused while its own session has the table open; and after each use within a
 *	  command that fires event triggers, since such a trigger can call us;
 *	- at the next use after an invalidation of the table or of an index of it.
 *
 * Each function below takes the store with use_store() and gives it back with
 * done_with_store(); in between nothing waits for a holder.  An error in between
 * leaves in_use set until the subtransaction has aborted.  The buffer pins of the
 * scan then belong to that, so the scan is dropped rather than ended.  (A nested
 * subtransaction can abort in between only if the expression of a user's index calls a
 * function that has one.)
 */
#include "postgres.h"

#include "access/genam.h"
#include "access/htup_details.h"
#include "access/multixact.h"
#include "access/relscan.h"
#include "access/table.h"
#include "access/tableam.h"
#include "access/xact.h"
#include "catalog/partition.h"
#include "catalog/pg_am_d.h"
#include "catalog/pg_collation_d.h"
#include "catalog/pg_constraint.h"
#include "catalog/pg_index.h"
#include "catalog/pg_sequence.h"
#include "catalog/pg_type_d.h"
#include "commands/sequence.h"
#include "executor/executor.h"
#include "miscadmin.h"
#include "nodes/makefuncs.h"
#include "storage/bufmgr.h"
#include "storage/lmgr.h"
#include "storage/lock.h"
#include "storage/procarray.h"
#include "tcop/cmdtag.h"
#include "tcop/utility.h"
#include "utils/builtins.h"
#include "utils/datum.h"
#include "utils/fmgroids.h"
#include "utils/inval.h"
#include "utils/lsyscache.h"
#include "utils/memutils.h"
#include "utils/rel.h"
#include "utils/resowner.h"
#include "utils/snapmgr.h"
#include "utils/syscache.h"

#include "compat.h"
#include "store.h"

/* Columns of idem_claims, as in the install script */
enum
{
	Anum_claims_expires_at = 1,
	Anum_claims_lease_until,
	Anum_claims_token,
	Anum_claims_state,
	Anum_claims_request_id,
	Anum_claims_user_id,
	Anum_claims_scope,
	Anum_claims_fingerprint,
	Anum_claims_result,
	Anum_claims_progress
};

#define Natts_claims Anum_claims_progress

/*
 * A marker has none of the columns that follow.  Its row ends before them, like one
 * that is older than a column, which reads as NULL: with no more than eight columns
 * the header has room for the bitmap of NULLs, and a row is eight bytes shorter.
 */
#define Natts_marker Anum_claims_scope

/* After how many new keys in a row the next one is inserted without a look */
#define GUESS_AFTER 100

/* InvalidOid: the type idem_state, whose OID differs */
static const Oid claims_column_types[Natts_claims] = {
	TIMESTAMPTZOID, TIMESTAMPTZOID, INT8OID, InvalidOid, TEXTOID, TEXTOID,
	TEXTOID, BYTEAOID, JSONBOID, JSONBOID
};

static const bool claims_column_not_null[Natts_claims] = {
	true, false, false, true, true, true, true, false, false, false
};

/* Columns of the primary key, in its order */
static const AttrNumber key_columns[] = {
	Anum_claims_request_id, Anum_claims_user_id, Anum_claims_scope
};

#define KEY_COLUMNS lengthof(key_columns)

typedef struct Store
{
	MemoryContext context;		/* holds all of this */
	bool		in_use;
	SubTransactionId used_in;	/* in which the latest use began */
	SubTransactionId opened_in; /* the latest in which relations were */
	Relation	claims;
	Relation	key_index;
	bool		has_user_index;
	TupleTableSlot *slot;
	TupleDesc	marker;			/* its columns */
	Relation   *kept_open;		/* referenced by the transaction */
	int			nkept_open;

	/* For inserting, made as they are needed */
	TupleTableSlot **new_rows;
	int			nnew_rows;
	ItemPointerData latest;		/* where the latest one was put, or invalid */

	/* For probing */
	SnapshotData dirty;
	ScanKeyData keys[KEY_COLUMNS];
	IndexScanDesc scan;			/* with a reference of its own to the index */

	/* For writing index entries; made by the first write */
	EState	   *estate;
	ResultRelInfo *target;
	List	   *arbiters;		/* the primary key */
} Store;

static Store *the_store = NULL;
static bool the_store_is_stale = false;

/* Commands that fire event triggers, and in which this is called */
static int	ddl_depth = 0;

/* This transaction's: what it has locked, and whether it has written any row */
static Oid	locked_claims = InvalidOid;
static Oid	locked_key_index = InvalidOid;
static bool has_written = false;

/* This session's: how many keys in a row were new */
static uint64 new_in_a_row = 0;
static ProcessUtility_hook_type next_process_utility = NULL;

struct IdemExpiryScan
{
	Store	   *store;
	Relation	index;
	Snapshot	snapshot;
	IndexScanDesc scan;
};

/* hint: works when it is followed; if more is in the way, the next error says so. */
static void
refuse_table(Relation claims, const char *reason, const char *hint)
{
	ereport(ERROR,
			(errcode(ERRCODE_FEATURE_NOT_SUPPORTED),
			 errmsg("table \"%s\" cannot hold claims: it has %s",
					RelationGetRelationName(claims), reason),
			 errdetail("Claims are written directly into the table, without the executor, so that this would be ignored or do harm."),
			 errhint("%s", hint)));
}

static char *
qualified_name(Oid relid)
{
	return quote_qualified_identifier(get_namespace_name(get_rel_namespace(relid)),
									  get_rel_name(relid));
}

/* change: of ALTER TABLE */
static void
refuse_layout(Relation claims, const char *change)
{
	const char *hint = "Dump this database and restore it: a dropped column cannot come back to its place in the table.";

	if (change != NULL)
		hint = psprintf("Run ALTER TABLE %s %s.",
						qualified_name(RelationGetRelid(claims)), change);
	refuse_table(claims, "another layout than the extension gave it", hint);
}

static void
check_storage(Relation claims)
{
	if (claims->rd_rel->relkind != RELKIND_RELATION)
		refuse_layout(claims, NULL);
	if (claims->rd_rel->relispartition)
		refuse_table(claims, "become a partition",
					 psprintf("Run ALTER TABLE %s DETACH PARTITION %s.",
							  qualified_name(get_partition_parent(RelationGetRelid(claims),
																  true)),
							  qualified_name(RelationGetRelid(claims))));
	if (claims->rd_rel->relam != HEAP_TABLE_AM_OID)
		refuse_layout(claims, "SET ACCESS METHOD heap");
	if (claims->rd_rel->relpersistence != RELPERSISTENCE_PERMANENT)
		refuse_layout(claims, "SET LOGGED");
}

/* As in the install script, and read as NULL where a row ends before it */
static void
check_column(Relation claims, int i)
{
	Form_pg_attribute column = TupleDescAttr(RelationGetDescr(claims), i);
	Oid			type = OidIsValid(claims_column_types[i]) ?
		claims_column_types[i] : idem_catalog()->state_type;

	if (column->attisdropped || column->atthasmissing)
		refuse_layout(claims, NULL);
	if (column->atttypid != type ||
		(type == TEXTOID && column->attcollation != C_COLLATION_OID))
	{
		const char *name = quote_identifier(NameStr(column->attname));
		const char *type_name = format_type_be_qualified(type);

		refuse_layout(claims, psprintf("ALTER COLUMN %s TYPE %s%s USING %s::text::%s",
									   name, type_name,
									   type == TEXTOID ? " COLLATE \"C\"" : "",
									   name, type_name));
	}
	if (column->attnotnull != claims_column_not_null[i])
		refuse_layout(claims, psprintf("ALTER COLUMN %s %s NOT NULL",
									   quote_identifier(NameStr(column->attname)),
									   column->attnotnull ? "DROP" : "SET"));
}

/*
 * The columns are the ones of the install script.  Dropped ones after them are what a
 * change that was taken back leaves for good; they are NULL in every row that is written.
 */
static void
check_layout(Relation claims)
{
	TupleDesc	desc = RelationGetDescr(claims);

	idem_refuse_distributed(claims);
	check_storage(claims);
	if (desc->natts < Natts_claims)
		refuse_layout(claims, NULL);
	for (int i = 0; i < Natts_claims; i++)
		check_column(claims, i);
	for (int i = Natts_claims; i < desc->natts; i++)
		if (!TupleDescAttr(desc, i)->attisdropped)
			refuse_layout(claims,
						  psprintf("DROP COLUMN %s",
								   quote_identifier(NameStr(TupleDescAttr(desc, i)->attname))));
}

static void
check_direct_writes(Relation claims)
{
	TupleConstr *constraints = RelationGetDescr(claims)->constr;

	if (claims->trigdesc != NULL)
		refuse_table(claims, "triggers, foreign keys or deferrable constraints",
					 "Drop them, also foreign keys of other tables that refer to it, and react to the application's own tables instead.");
	if (claims->rd_rules != NULL && claims->rd_rules->numLocks > 0)
		refuse_table(claims, "rules", "Drop them.");
	if (claims->rd_rel->relrowsecurity)
		refuse_table(claims, "row security",
					 psprintf("Run ALTER TABLE %s DISABLE ROW LEVEL SECURITY. Grant the functions rather than the table.",
							  qualified_name(RelationGetRelid(claims))));
	if (constraints != NULL && constraints->num_check > 0)
		refuse_table(claims, "CHECK constraints", "Drop them.");
}

static void
unlock_for_transaction(Oid *locked)
{
	ResourceOwner owner = CurrentResourceOwner;

	CurrentResourceOwner = TopTransactionResourceOwner;
	UnlockRelationOid(*locked, RowExclusiveLock);
	CurrentResourceOwner = owner;
	*locked = InvalidOid;
}

static void
lock_for_transaction(Oid *locked, Oid relid)
{
	ResourceOwner owner = CurrentResourceOwner;

	if (*locked == relid)
		return;
	if (OidIsValid(*locked) && !has_written)
		unlock_for_transaction(locked);
	/* An error in here is cleaned up after by the caller's owner. */
	LockRelationOid(relid, RowExclusiveLock);
	CurrentResourceOwner = TopTransactionResourceOwner;
	LockRelationOid(relid, RowExclusiveLock);
	CurrentResourceOwner = owner;
	UnlockRelationOid(relid, RowExclusiveLock);
	*locked = relid;
}

/*
 * If the table was dropped since the catalog was read, locking it has processed the
 * invalidation, and idem_catalog() finds the new table or raises the error that there
 * is none.
 */
static Relation
open_claims_to_write(void)
{
	Relation	claims;

	do
	{
		CHECK_FOR_INTERRUPTS();
		lock_for_transaction(&locked_claims, idem_catalog()->claims);
		claims = try_table_open(locked_claims, NoLock);
	} while (claims == NULL);
	check_layout(claims);
	return claims;
}

/*
 * The same; and the wait for the lock can have been one for DDL that put another table
 * in its place.  A writer notices that by the store being stale.
 */
static Relation
open_claims_to_read(void)
{
	Relation	claims;

	for (;;)
	{
		CHECK_FOR_INTERRUPTS();
		claims = try_table_open(idem_catalog()->claims, AccessShareLock);
		if (claims == NULL)
			continue;
		if (idem_catalog()->claims == RelationGetRelid(claims))
			break;
		table_close(claims, AccessShareLock);
	}
	check_layout(claims);
	return claims;
}

/* Its columns can have been renamed. */
static void
refuse_key(Relation claims)
{
	Oid			present;
	const char *drop = "";
	const char *columns[KEY_COLUMNS];

	(void) get_primary_key_attnos(RelationGetRelid(claims), true, &present);
	if (OidIsValid(present))
		drop = psprintf("DROP CONSTRAINT %s, ",
						quote_identifier(get_constraint_name(present)));
	for (int i = 0; i < KEY_COLUMNS; i++)
		columns[i] = quote_identifier(NameStr(TupleDescAttr(RelationGetDescr(claims),
															key_columns[i] - 1)->attname));
	refuse_table(claims, "another primary key than the extension gave it",
				 psprintf("Run ALTER TABLE %s %sADD PRIMARY KEY (%s, %s, %s). It is what prevents a second execution.",
						  qualified_name(RelationGetRelid(claims)), drop,
						  columns[0], columns[1], columns[2]));
}

static Relation
open_key_index(Relation claims, bool to_write)
{
	Oid			oid = idem_primary_key_index(claims);
	Relation	index = NULL;
	bool		same;

	if (OidIsValid(oid) && to_write)
		lock_for_transaction(&locked_key_index, oid);
	if (OidIsValid(oid))
		index = index_open(oid, to_write ? NoLock : AccessShareLock);
	same = index != NULL && index->rd_index->indisvalid &&
		index->rd_rel->relam == BTREE_AM_OID &&
		index->rd_index->indnkeyatts == KEY_COLUMNS;

	for (int i = 0; same && i < KEY_COLUMNS; i++)
		same = index->rd_index->indkey.values[i] == key_columns[i] &&
			index->rd_indcollation[i] == C_COLLATION_OID;
	if (!same)
		refuse_key(claims);
	return index;
}

/* ScanKeyInit() means collation "C", which is that of the columns. */
static void
init_scan_keys(ScanKey keys)
{
	for (int i = 0; i < KEY_COLUMNS; i++)
		ScanKeyInit(&keys[i], i + 1, BTEqualStrategyNumber, F_TEXTEQ, (Datum) 0);
}

static bool
has_user_index(const Store *store)
{
	List	   *indexes = RelationGetIndexList(store->claims);
	bool		found = false;
	ListCell   *cell;

	foreach(cell, indexes)
	{
		if (lfirst_oid(cell) != RelationGetRelid(store->key_index) &&
			lfirst_oid(cell) != idem_catalog()->claims_by_expiry)
			found = true;
	}
	list_free(indexes);
	return found;
}

static void
check_writable(const char *command)
{
	if (XactReadOnly)
		ereport(ERROR,
				(errcode(ERRCODE_READ_ONLY_SQL_TRANSACTION),
				 errmsg("cannot execute %s in a read-only transaction", command),
				 RecoveryInProgress() ?
				 errhint("This server is a standby: send the request to the primary.") :
				 errhint("Use a read-write transaction, the one that does the work.")));
	PreventCommandIfParallelMode(command);
	PreventCommandDuringRecovery(command);
}

static void
reference_for_transaction(Relation rel)
{
	ResourceOwner owner = CurrentResourceOwner;

	CurrentResourceOwner = TopTransactionResourceOwner;
	RelationIncrementReferenceCount(rel);
	CurrentResourceOwner = owner;
}

/*
 * Keeps the relation open, which the caller has opened, until release_store().  Nothing
 * can fail between the reference and the note of it.
 */
static void
keep_open(Store *store, Relation rel)
{
	reference_for_transaction(rel);
	store->kept_open[store->nkept_open++] = rel;
}

/* For so many relations more */
static void
make_room_to_keep(Store *store, int nrelations)
{
	Size		bytes = (store->nkept_open + nrelations) * sizeof(Relation);

	store->kept_open = store->kept_open == NULL ?
		MemoryContextAlloc(store->context, bytes) :
		repalloc(store->kept_open, bytes);
}

static void
make_slots(Store *store)
{
	/* A copy of the descriptor has no reference count to give back. */
	TupleDesc	desc = CreateTupleDescCopy(RelationGetDescr(store->claims));

	store->slot = MakeSingleTupleTableSlot(desc,
										   table_slot_callbacks(store->claims));
	store->marker = CreateTemplateTupleDesc(Natts_marker);
	for (AttrNumber i = 1; i <= Natts_marker; i++)
		TupleDescCopyEntry(store->marker, i, desc, i);
}

/*
 * Opens, checks and allocates on the account of the caller's subtransaction, so that an
 * error leaves nothing behind.  Then the_store is set, in use, and the transaction
 * references what is open: from there on an error in a subtransaction releases it.
 */
static void
open_store(void)
{
	MemoryContext context = AllocSetContextCreate(CurTransactionContext,
												  "idem store",
												  ALLOCSET_DEFAULT_SIZES);
	MemoryContext caller = MemoryContextSwitchTo(context);
	Store	   *store = palloc0(sizeof(Store));
	IndexScanDesc scan;

	store->context = context;
	store->in_use = true;
	store->used_in = store->opened_in = GetCurrentSubTransactionId();
	store->claims = open_claims_to_write();
	check_direct_writes(store->claims);
	store->key_index = open_key_index(store->claims, true);
	store->has_user_index = has_user_index(store);
	InitDirtySnapshot(store->dirty);
	init_scan_keys(store->keys);
	make_slots(store);
	make_room_to_keep(store, 2);
	scan = idem_index_beginscan(store->claims, store->key_index,
								&store->dirty, KEY_COLUMNS);

	MemoryContextSetParent(context, TopTransactionContext);
	the_store = store;
	keep_open(store, store->claims);
	keep_open(store, store->key_index);
	reference_for_transaction(store->key_index);
	store->scan = scan;
	/* The caller's references: of the scan, of the index, of the table */
	RelationClose(store->key_index);
	index_close(store->key_index, NoLock);
	table_close(store->claims, NoLock);
	MemoryContextSwitchTo(caller);
}

static void
release_store(void)
{
	Store	   *store = the_store;
	ResourceOwner owner = CurrentResourceOwner;

	the_store = NULL;
	CurrentResourceOwner = TopTransactionResourceOwner;
	/* In use, the scan's pins are gone with the subtransaction. */
	if (store->scan != NULL && store->in_use)
		RelationClose(store->key_index);
	else if (store->scan != NULL)
		index_endscan(store->scan);
	while (store->nkept_open > 0)
		RelationClose(store->kept_open[--store->nkept_open]);
	if (store->estate != NULL)
		FreeExecutorState(store->estate);
	MemoryContextDelete(store->context);
	CurrentResourceOwner = owner;
}

static Store *
use_store(void)
{
	if (the_store != NULL && the_store->in_use)
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_IN_USE),
				 errmsg("claims cannot be made while a claim is being stored"),
				 errhint("Do not call functions of idem from an index on idem_claims.")));
	if (the_store != NULL && the_store_is_stale)
		release_store();
	if (the_store == NULL)
	{
		/* Before reading the catalogs: an invalidation from now on counts. */
		the_store_is_stale = false;
		open_store();
	}
	the_store->in_use = true;
	the_store->used_in = GetCurrentSubTransactionId();
	return the_store;
}

static void
done_with_store(Store *store)
{
	Assert(store == the_store && store->in_use);
	store->in_use = false;
	/* An event trigger runs before the command that it was fired by. */
	if (ddl_depth > 0)
		release_store();
}

void
idem_store_open(const char *command)
{
	check_writable(command);
	done_with_store(use_store());
}

void
idem_store_step_back(void)
{
	if (has_written)
		return;
	if (the_store != NULL)
		release_store();
	if (OidIsValid(locked_key_index))
		unlock_for_transaction(&locked_key_index);
	if (OidIsValid(locked_claims))
		unlock_for_transaction(&locked_claims);
}

/* Nothing that can fail, and no catalog access: it only marks. */
static void
invalidate_store(Datum arg, Oid relid)
{
	if (the_store_is_stale)
		return;
	the_store_is_stale = the_store == NULL || relid == InvalidOid ||
		relid == RelationGetRelid(the_store->claims) ||
		list_member_oid(the_store->claims->rd_indexlist, relid);
}

static void
end_transaction(XactEvent event, void *arg)
{
	switch (event)
	{
		case XACT_EVENT_PRE_COMMIT:
		case XACT_EVENT_PRE_PREPARE:
			if (the_store != NULL)
				release_store();
			break;
		case XACT_EVENT_COMMIT:
		case XACT_EVENT_PREPARE:
		case XACT_EVENT_ABORT:
			the_store = NULL;
			locked_claims = locked_key_index = InvalidOid;
			has_written = false;
			break;
		default:
			break;
	}
}

static void
end_subtransaction(SubXactEvent event, SubTransactionId mine,
				   SubTransactionId parent, void *arg)
{
	if (event == SUBXACT_EVENT_ABORT_SUB && the_store != NULL &&
		((the_store->in_use && the_store->used_in >= mine) ||
		 the_store->opened_in >= mine))
		release_store();
}

static void
run_utility(PlannedStmt *statement, const char *query,
			bool read_only_tree, ProcessUtilityContext context,
			ParamListInfo params, QueryEnvironment *environment,
			DestReceiver *dest, QueryCompletion *completion)
{
	if (next_process_utility != NULL)
		next_process_utility(statement, query, read_only_tree, context, params,
							 environment, dest, completion);
	else
		standard_ProcessUtility(statement, query, read_only_tree, context,
								params, environment, dest, completion);
}

static void
release_before_utility(PlannedStmt *statement, const char *query,
					   bool read_only_tree, ProcessUtilityContext context,
					   ParamListInfo params, QueryEnvironment *environment,
					   DestReceiver *dest, QueryCompletion *completion)
{
	CommandTag	tag = CreateCommandTag(statement->utilityStmt);

	/*
	 * Not if it is in use: the command comes from inside of that use, from a
	 * function in a user's index, say.  And not for SAVEPOINT and its like, which
	 * are frequent and leave the table alone.
	 */
	if (the_store != NULL && !the_store->in_use &&
		!IsA(statement->utilityStmt, TransactionStmt))
		release_store();
	if (!command_tag_event_trigger_ok(tag))
	{
		run_utility(statement, query, read_only_tree, context, params,
					environment, dest, completion);
		return;
	}

	ddl_depth++;
	PG_TRY();
	{
		run_utility(statement, query, read_only_tree, context, params,
					environment, dest, completion);
	}
	PG_FINALLY();
	{
		ddl_depth--;
	}
	PG_END_TRY();
}

void
idem_store_init(void)
{
	RegisterXactCallback(end_transaction, NULL);
	RegisterSubXactCallback(end_subtransaction, NULL);
	CacheRegisterRelcacheCallback(invalidate_store, (Datum) 0);
	next_process_utility = ProcessUtility_hook;
	ProcessUtility_hook = release_before_utility;
}

/* ----- reading ----- */

static void
set_scan_keys(ScanKey keys, const IdemKey *key)
{
	keys[0].sk_argument = PointerGetDatum(key->request_id);
	keys[1].sk_argument = PointerGetDatum(key->user_id);
	keys[2].sk_argument = PointerGetDatum(key->scope);
}

static const IdemStored *
copy_stored(TupleTableSlot *slot, AttrNumber column)
{
	if (slot->tts_isnull[column - 1])
		return NULL;
	return (IdemStored *) DatumGetPointer(datumCopy(slot->tts_values[column - 1],
													false, -1));
}

Jsonb *
idem_stored_jsonb(const IdemStored *stored)
{
	return stored == NULL ? NULL :
		DatumGetJsonbPCopy(PointerGetDatum(stored));
}

static TimestampTz
time_or_none(TupleTableSlot *slot, AttrNumber column)
{
	if (slot->tts_isnull[column - 1])
		return IDEM_NO_TIME;
	return DatumGetTimestampTz(slot->tts_values[column - 1]);
}

static void
read_row(TupleTableSlot *slot, IdemRow *row)
{
	slot_getallattrs(slot);
	row->state =
		idem_state_from_oid(DatumGetObjectId(slot->tts_values[Anum_claims_state - 1]));
	row->expires_at = time_or_none(slot, Anum_claims_expires_at);
	row->lease_until = time_or_none(slot, Anum_claims_lease_until);
	row->token = slot->tts_isnull[Anum_claims_token - 1] ? 0 :
		DatumGetInt64(slot->tts_values[Anum_claims_token - 1]);
	row->fingerprint = copy_stored(slot, Anum_claims_fingerprint);
	row->result = copy_stored(slot, Anum_claims_result);
	row->progress = copy_stored(slot, Anum_claims_progress);
}

/* Of a row that another transaction updates or deletes: is it a delete? */
static bool
is_deleted_in_flight(TupleTableSlot *slot)
{
	bool		should_free;
	HeapTuple	tuple = ExecFetchSlotHeapTuple(slot, false, &should_free);

	Assert(!should_free);
	return ItemPointerEquals(&tuple->t_self, &tuple->t_data->t_ctid);
}

/*
 * INSERT ... ON CONFLICT DO NOTHING raises this where the row that it conflicts
 * with is not in the transaction's snapshot: doing nothing would rest on a row
 * that the transaction cannot see (ExecCheckTupleVisible).
 */
static void
raise_not_serializable(void)
{
	ereport(ERROR,
			(errcode(ERRCODE_T_R_SERIALIZATION_FAILURE),
			 errmsg("could not serialize access due to concurrent update"),
			 errdetail("The request was claimed by a transaction that this one's snapshot cannot see."),
			 errhint("Retry the transaction.")));
}

static bool
is_ours(TupleTableSlot *slot)
{
	bool		isnull;
	Datum		xmin = slot_getsysattr(slot, MinTransactionIdAttributeNumber,
									   &isnull);

	return TransactionIdIsCurrentTransactionId(DatumGetTransactionId(xmin));
}

static IdemProbe
classify(Store *store, IdemFound *found, bool *visible)
{
	*visible = true;
	found->speculative = store->dirty.speculativeToken;
	if (TransactionIdIsValid(store->dirty.xmin))
	{
		found->xid = store->dirty.xmin;
		return IDEM_PROBE_INSERTING;
	}
	if (TransactionIdIsValid(store->dirty.xmax))
	{
		found->xid = store->dirty.xmax;
		return is_deleted_in_flight(store->slot) ?
			IDEM_PROBE_DELETING : IDEM_PROBE_UPDATING;
	}

	found->ours = is_ours(store->slot);
	if (!found->ours && IsolationUsesXactSnapshot())
		*visible = table_tuple_satisfies_snapshot(store->claims, store->slot,
												  GetTransactionSnapshot());
	found->tid = store->slot->tts_tid;
	read_row(store->slot, &found->row);
	return IDEM_PROBE_PRESENT;
}

/* key: NULL for the next row of the same one */
static bool
next_row(Store *store, const IdemKey *key)
{
	/* What the scan allocates lives as long as the scan. */
	MemoryContext caller = MemoryContextSwitchTo(store->context);
	bool		any;

	if (key != NULL)
	{
		set_scan_keys(store->keys, key);
		index_rescan(store->scan, store->keys, KEY_COLUMNS, NULL, 0);
	}
	any = index_getnext_slot(store->scan, ForwardScanDirection, store->slot);
	MemoryContextSwitchTo(caller);
	return any;
}

/* visible: false if the row is newer than the transaction's snapshot. */
static IdemProbe
probe(const IdemKey *key, IdemFound *found, bool *visible)
{
	Store	   *store = use_store();
	IdemProbe	result = IDEM_PROBE_ABSENT;
	bool		any;

	*visible = true;

	/*
	 * Beside the row that is present there can be those of inserters that have lost
	 * the key to it and are about to notice.  And whoever deletes the row may have
	 * claimed the key again, which decides.
	 */
	for (any = next_row(store, key); any;
		 any = result != IDEM_PROBE_PRESENT && next_row(store, NULL))
	{
		IdemFound	row;
		bool		row_visible;
		IdemProbe	row_probe = classify(store, &row, &row_visible);

		if (result == IDEM_PROBE_ABSENT || result == IDEM_PROBE_DELETING ||
			row_probe == IDEM_PROBE_PRESENT)
		{
			result = row_probe;
			*found = row;
			*visible = row_visible;
		}
	}
	if (result != IDEM_PROBE_ABSENT)
	{
		/* Gives back the scan's pins, as the next line does the slot's. */
		index_rescan(store->scan, NULL, KEY_COLUMNS, NULL, 0);
	}
	ExecClearTuple(store->slot);
	done_with_store(store);
	return result;
}

/* As SQL would read it, which takes part in serializable conflict checking */
static void
note_read_of_row(const IdemFound *found)
{
	Store	   *store = use_store();
	ItemPointerData tid = found->tid;

	(void) table_tuple_fetch_row_version(store->claims, &tid,
										 GetTransactionSnapshot(), store->slot);
	ExecClearTuple(store->slot);
	done_with_store(store);
}

IdemProbe
idem_store_probe(const IdemKey *key, IdemFound *found)
{
	bool		visible;
	IdemProbe	result = probe(key, found, &visible);

	if (!visible)
		raise_not_serializable();
	if (result != IDEM_PROBE_ABSENT)
		new_in_a_row = 0;
	/* A dirty snapshot takes no predicate locks. */
	if (result == IDEM_PROBE_PRESENT && !found->ours && IsolationIsSerializable())
		note_read_of_row(found);
	return result;
}

static bool
has_key(TupleTableSlot *slot, const IdemKey *key)
{
	IdemKey		row;

	slot_getsomeattrs(slot, Anum_claims_scope);
	row.request_id = DatumGetTextPP(slot->tts_values[Anum_claims_request_id - 1]);
	row.user_id = DatumGetTextPP(slot->tts_values[Anum_claims_user_id - 1]);
	row.scope = DatumGetTextPP(slot->tts_values[Anum_claims_scope - 1]);
	return idem_key_equal(&row, key);
}

/*
 * Looks where the index entry of the latest insert points to, without looking for
 * the entry.  What is there by now may be another row, or none.
 */
static bool
find_latest(const IdemKey *key, IdemFound *found)
{
	Store	   *store = use_store();
	ItemPointerData tid = store->latest;
	bool		more = false;
	bool		visible;
	bool		is_found = false;

	if (ItemPointerIsValid(&tid))
	{
		is_found = table_index_fetch_tuple(store->scan->xs_heapfetch, &tid,
										   &store->dirty, store->slot, &more,
										   NULL) &&
			has_key(store->slot, key) &&
			classify(store, found, &visible) == IDEM_PROBE_PRESENT &&
			found->ours;
		table_index_fetch_reset(store->scan->xs_heapfetch);
		ExecClearTuple(store->slot);
	}
	done_with_store(store);
	return is_found;
}

bool
idem_store_find_ours(const IdemKey *key, IdemFound *found)
{
	bool		visible;

	/* Mostly it is the row that has just been written. */
	if (find_latest(key, found))
		return true;
	return probe(key, found, &visible) == IDEM_PROBE_PRESENT && found->ours;
}

bool
idem_store_is_absent(const IdemKey *key)
{
	Snapshot	snapshot = RegisterSnapshot(GetLatestSnapshot());
	IdemRow		row;
	bool		found = idem_store_fetch(key, snapshot, 0, &row);

	UnregisterSnapshot(snapshot);
	if (!found)
		idem_store_note_read(key);
	return !found;
}

void
idem_store_note_read(const IdemKey *key)
{
	IdemRow		row;

	if (IsolationIsSerializable())
		(void) idem_store_fetch(key, GetTransactionSnapshot(), 0, &row);
}

/*
 * Any index entry counts, also of a dead row: so it ends at the first, however many
 * were cleaned up.
 */
bool
idem_store_is_empty_between(const IdemKey *first, const IdemKey *last)
{
	Store	   *store = use_store();
	ScanKeyData keys[2];
	IndexScanDesc scan;
	bool		empty;

	ScanKeyInit(&keys[0], 1, BTGreaterEqualStrategyNumber, F_TEXT_GE,
				PointerGetDatum(first->request_id));
	ScanKeyInit(&keys[1], 1, BTLessEqualStrategyNumber, F_TEXT_LE,
				PointerGetDatum(last->request_id));
	scan = idem_index_beginscan(store->claims, store->key_index,
								&store->dirty, lengthof(keys));
	scan->ignore_killed_tuples = false;
	index_rescan(scan, keys, lengthof(keys), NULL, 0);
	empty = index_getnext_tid(scan, ForwardScanDirection) == NULL;
	index_endscan(scan);
	done_with_store(store);
	return empty;
}

bool
idem_row_counts_as_absent(const IdemPolicy *policy, const IdemRow *row)
{
	TimestampTz now;

	if (!policy->expired_reclaim)
		return false;
	now = GetCurrentTimestamp();
	if (row->state == IDEM_STATE_IN_PROGRESS &&
		(row->lease_until > now || policy->lapsed_unknown))
		return false;
	return row->expires_at <= now;
}

static void
complete_value(const IdemStored **value, bool wanted)
{
	if (wanted && *value != NULL)
		*value = PG_DETOAST_DATUM(PointerGetDatum(*value));
}

bool
idem_store_fetch(const IdemKey *key, Snapshot snapshot, int wanted,
				 IdemRow *row)
{
	Relation	claims = open_claims_to_read();
	Relation	index = open_key_index(claims, false);
	TupleTableSlot *slot = table_slot_create(claims, NULL);
	ScanKeyData keys[KEY_COLUMNS];
	IndexScanDesc scan;
	bool		found = false;
	bool		ours = false;

	init_scan_keys(keys);
	set_scan_keys(keys, key);
	scan = idem_index_beginscan(claims, index, snapshot, KEY_COLUMNS);
	index_rescan(scan, keys, KEY_COLUMNS, NULL, 0);
	/*
	 * An old snapshot can see two: one that somebody has dropped since, and our own
	 * claim after that.  Ours is the truth.
	 */
	while (!ours && index_getnext_slot(scan, ForwardScanDirection, slot))
	{
		ours = is_ours(slot);
		if (ours || !found)
			read_row(slot, row);
		found = true;
	}
	index_endscan(scan);
	ExecDropSingleTupleTableSlot(slot);
	if (found)
	{
		complete_value(&row->fingerprint, (wanted & IDEM_FINGERPRINT) != 0);
		complete_value(&row->result, (wanted & IDEM_RESULT) != 0);
		complete_value(&row->progress, (wanted & IDEM_PROGRESS) != 0);
	}
	/* Not until the transaction ends: a claim that asks may be about to sleep. */
	index_close(index, AccessShareLock);
	table_close(claims, AccessShareLock);
	return found;
}

/* ----- writing ----- */

/* Before anything is opened: locks can be waited for in vain. */
static void
lock_indexes(Store *store)
{
	ListCell   *cell;

	foreach(cell, RelationGetIndexList(store->claims))
	{
		Oid			locked = InvalidOid;

		lock_for_transaction(&locked, lfirst_oid(cell));
	}
}

static void
open_indexes(Store *store)
{
	MemoryContext caller;
	ResultRelInfo *target;

	has_written = true;
	if (store->target != NULL)
		return;
	lock_indexes(store);

	store->opened_in = GetCurrentSubTransactionId();
	caller = MemoryContextSwitchTo(store->context);
	store->estate = CreateExecutorState();
	store->arbiters = list_make1_oid(RelationGetRelid(store->key_index));
	target = makeNode(ResultRelInfo);
	/* Range table index 0: there is no range table, and no rights to check. */
	InitResultRelInfo(target, store->claims, 0, NULL, 0);
	/* As in open_store(): an expression of a user's index can raise an error. */
	ExecOpenIndices(target, false);
	make_room_to_keep(store, target->ri_NumIndices);
	for (int i = 0; i < target->ri_NumIndices; i++)
	{
		keep_open(store, target->ri_IndexRelationDescs[i]);
		index_close(target->ri_IndexRelationDescs[i], NoLock);
	}
	store->target = target;
	MemoryContextSwitchTo(caller);
}

/*
 * An index of a user can refuse a row, or run a function of his, before it is known
 * that the key is there: with such an index nothing is guessed.  One that comes makes
 * the store stale.
 */
bool
idem_store_guess_absent(void)
{
	Store	   *store;
	bool		guess;

	if (new_in_a_row < GUESS_AFTER)
		return false;
	store = use_store();
	guess = !store->has_user_index;
	done_with_store(store);
	return guess;
}

/* conflict: NULL for an update */
static void
insert_index_entries(Store *store, TupleTableSlot *slot, bool *conflict,
					 bool only_summarizing)
{
	idem_insert_index_tuples(store->target, slot, store->estate,
							 conflict == NULL, conflict, store->arbiters,
							 only_summarizing);
	idem_index_insert_cleanup(store->target);
	ResetPerTupleExprContext(store->estate);
}

static void
set_column(TupleTableSlot *slot, AttrNumber column, Datum value, bool isnull)
{
	slot->tts_values[column - 1] = value;
	slot->tts_isnull[column - 1] = isnull;
}

static void
set_pointer(TupleTableSlot *slot, AttrNumber column, const void *value)
{
	set_column(slot, column, PointerGetDatum(value), value == NULL);
}

static void
set_time(TupleTableSlot *slot, AttrNumber column, TimestampTz value)
{
	set_column(slot, column, TimestampTzGetDatum(value), value == IDEM_NO_TIME);
}

static void
fill_slot(TupleTableSlot *slot, const IdemKey *key, const IdemRow *row)
{
	ExecClearTuple(slot);
	set_time(slot, Anum_claims_expires_at, row->expires_at);
	set_time(slot, Anum_claims_lease_until, row->lease_until);
	set_column(slot, Anum_claims_token, Int64GetDatum(row->token),
			   row->token == 0);
	set_column(slot, Anum_claims_state,
			   ObjectIdGetDatum(idem_catalog()->state[row->state]), false);
	set_pointer(slot, Anum_claims_request_id, key->request_id);
	set_pointer(slot, Anum_claims_user_id, key->user_id);
	set_pointer(slot, Anum_claims_scope, key->scope);
	set_pointer(slot, Anum_claims_fingerprint, row->fingerprint);
	set_pointer(slot, Anum_claims_result, row->result);
	set_pointer(slot, Anum_claims_progress, row->progress);
	for (int i = Natts_claims; i < slot->tts_tupleDescriptor->natts; i++)
		slot->tts_isnull[i] = true;
	ExecStoreVirtualTuple(slot);
}

static void
make_new_rows(Store *store, int n)
{
	MemoryContext caller;

	if (store->nnew_rows >= n)
		return;
	caller = MemoryContextSwitchTo(store->context);
	store->new_rows = store->new_rows == NULL ?
		palloc(n * sizeof(TupleTableSlot *)) :
		repalloc(store->new_rows, n * sizeof(TupleTableSlot *));
	for (; store->nnew_rows < n; store->nnew_rows++)
		store->new_rows[store->nnew_rows] =
			MakeSingleTupleTableSlot(store->slot->tts_tupleDescriptor,
									 &TTSOpsHeapTuple);
	MemoryContextSwitchTo(caller);
}

static void
fill_new_row(Store *store, int n, const IdemKey *key, const IdemRow *row)
{
	bool		is_marker = row->fingerprint == NULL && row->result == NULL &&
		row->progress == NULL;
	MemoryContext caller = MemoryContextSwitchTo(store->context);
	HeapTuple	tuple;

	fill_slot(store->slot, key, row);
	tuple = heap_form_tuple(is_marker ? store->marker :
							store->slot->tts_tupleDescriptor,
							store->slot->tts_values, store->slot->tts_isnull);
	ExecStoreHeapTuple(tuple, store->new_rows[n], true);
	ExecClearTuple(store->slot);
	MemoryContextSwitchTo(caller);
}

bool
idem_store_insert(const IdemKey *key, const IdemRow *row)
{
	Store	   *store = use_store();
	TupleTableSlot *slot;
	TransactionId xid = GetCurrentTransactionId();
	uint64		new_before = new_in_a_row;
	bool		conflict = false;
	uint32		token;

	/* An error ends the guessing: the next call looks first, and a replay needs no room. */
	new_in_a_row = 0;
	open_indexes(store);
	make_new_rows(store, 1);
	slot = store->new_rows[0];
	fill_new_row(store, 0, key, row);

	token = SpeculativeInsertionLockAcquire(xid);
	table_tuple_insert_speculative(store->claims, slot,
								   GetCurrentCommandId(true), 0, NULL, token);
	insert_index_entries(store, slot, &conflict, false);
	table_tuple_complete_speculative(store->claims, slot, token, !conflict);
	SpeculativeInsertionLockRelease(xid);

	store->latest = slot->tts_tid;
	ExecClearTuple(slot);
	done_with_store(store);
	new_in_a_row = conflict ? 0 : new_before + 1;
	if (!conflict)
		CommandCounterIncrement();
	return !conflict;
}

/* False: a key is there after all, and some rows are written. */
static bool
insert_rows(Store *store, const IdemNewRow *rows, int nrows)
{
	bool		conflict = false;

	for (int i = 0; i < nrows; i++)
		fill_new_row(store, i, &rows[i].key, &rows[i].row);
	table_multi_insert(store->claims, store->new_rows, nrows,
					   GetCurrentCommandId(true), 0, NULL);
	for (int i = 0; i < nrows && !conflict; i++)
		insert_index_entries(store, store->new_rows[i], &conflict, false);
	return !conflict;
}

/* An error leaves no subtransaction behind, which the caller would take for its own. */
bool
idem_store_insert_many(const IdemNewRow *rows, int nrows)
{
	MemoryContext context = CurrentMemoryContext;
	ResourceOwner owner = CurrentResourceOwner;
	Store	   *store = use_store();
	bool		inserted;

	open_indexes(store);
	make_new_rows(store, nrows);

	BeginInternalSubTransaction(NULL);
	MemoryContextSwitchTo(context);
	PG_TRY();
	{
		inserted = insert_rows(store, rows, nrows);
		if (inserted)
			ReleaseCurrentSubTransaction();
		else
			RollbackAndReleaseCurrentSubTransaction();
	}
	PG_CATCH();
	{
		ErrorData  *error;

		MemoryContextSwitchTo(context);
		error = CopyErrorData();
		FlushErrorState();
		RollbackAndReleaseCurrentSubTransaction();
		MemoryContextSwitchTo(context);
		CurrentResourceOwner = owner;
		ReThrowError(error);
	}
	PG_END_TRY();
	MemoryContextSwitchTo(context);
	CurrentResourceOwner = owner;

	for (int i = 0; i < nrows; i++)
		ExecClearTuple(store->new_rows[i]);
	done_with_store(store);
	return inserted;
}

/*
 * What a write, or a lock without waiting before it, can end in.  False: another
 * transaction has the row or had it since the probe.
 */
static bool
row_was_free(TM_Result result)
{
	switch (result)
	{
		case TM_Ok:
			return true;
		case TM_BeingModified:
		case TM_WouldBlock:
		case TM_Updated:
		case TM_Deleted:
			return false;
		default:
			/* our own writes are made visible at once, so none is in the way */
			elog(ERROR, "unexpected result %d of a write to a claim",
				 (int) result);
	}
}

/*
 * The heap has no update that does not wait: meeting a lock, also of this transaction, is
 * a failed assertion in heap_update().  So the caller makes sure that there is nothing to
 * wait for.
 */
static TM_Result
update_row(Store *store, const IdemKey *key, const ItemPointerData *tid,
		   const IdemRow *row, IdemUpdateIndexes *update_indexes)
{
	ItemPointerData old = *tid;
	TM_FailureData failure;
	LockTupleMode lockmode;

	fill_slot(store->slot, key, row);
	return table_tuple_update(store->claims, &old, store->slot,
							  GetCurrentCommandId(true), GetActiveSnapshot(),
							  InvalidSnapshot, true, &failure, &lockmode,
							  update_indexes);
}

static TM_Result
delete_row(Store *store, ItemPointer tid, bool wait)
{
	TM_FailureData failure;

	return table_tuple_delete(store->claims, tid, GetCurrentCommandId(true),
							  GetActiveSnapshot(), InvalidSnapshot, wait,
							  &failure, false);
}

static TM_Result
lock_row(Store *store, ItemPointer tid, LockTupleMode mode,
		 LockWaitPolicy policy)
{
	TM_FailureData failure;
	TM_Result	result = table_tuple_lock(store->claims, tid,
										  GetActiveSnapshot(), store->slot,
										  GetCurrentCommandId(true), mode,
										  policy, 0, &failure);

	ExecClearTuple(store->slot);
	return result;
}

/*
 * A delete without waiting is refused by any lock on the row, our own included (SELECT FOR
 * UPDATE, idem_fence()).  So lock the row without waiting; after that, a delete that may
 * wait has nobody to wait for.
 */
static TM_Result
delete_or_skip_row(Store *store, const ItemPointerData *tid)
{
	/* Locking the row clears the slot, in which the caller's can be. */
	ItemPointerData old = *tid;
	TM_Result	result = delete_row(store, &old, false);

	if (result == TM_BeingModified &&
		lock_row(store, &old, LockTupleExclusive, LockWaitSkip) == TM_Ok)
		result = delete_row(store, &old, true);
	return result;
}

bool
idem_store_update(const IdemKey *key, const IdemFound *found, const IdemRow *row)
{
	Store	   *store = use_store();
	ItemPointerData tid = found->tid;
	IdemUpdateIndexes update_indexes;
	TM_Result	result = TM_Ok;
	bool		updated;

	CheckCmdReplicaIdentity(store->claims, CMD_UPDATE);
	open_indexes(store);
	/* No other transaction can lock a row before its writer has committed. */
	if (!found->ours)
		result = lock_row(store, &tid, LockTupleExclusive, LockWaitSkip);
	if (result == TM_Ok)
		result = update_row(store, key, &found->tid, row, &update_indexes);
	updated = row_was_free(result);
	if (updated && IDEM_UPDATE_NEEDS_INDEXES(update_indexes))
		insert_index_entries(store, store->slot, NULL,
							 IDEM_UPDATE_ONLY_SUMMARIZING(update_indexes));
	ExecClearTuple(store->slot);
	done_with_store(store);
	if (updated)
		CommandCounterIncrement();
	return updated;
}

bool
idem_store_delete(const IdemFound *found)
{
	Store	   *store = use_store();
	bool		deleted;

	CheckCmdReplicaIdentity(store->claims, CMD_DELETE);
	has_written = true;
	deleted = row_was_free(delete_or_skip_row(store, &found->tid));
	done_with_store(store);
	if (deleted)
		CommandCounterIncrement();
	return deleted;
}

/* Second number of the advisory lock tag's name space; SQL's are 1 and 2. */
#define KEY_LOCK_CLASS 3

static LOCKTAG
key_lock_tag(const IdemKey *key)
{
	LOCKTAG		tag;

	SET_LOCKTAG_ADVISORY(tag, MyDatabaseId, idem_catalog()->claims,
						 idem_key_hash(key), KEY_LOCK_CLASS);
	return tag;
}

void
idem_store_lock_key(const IdemKey *key)
{
	LOCKTAG		tag = key_lock_tag(key);

	(void) LockAcquire(&tag, ExclusiveLock, false, false);
}

void
idem_store_unlock_key(const IdemKey *key)
{
	LOCKTAG		tag = key_lock_tag(key);

	LockRelease(&tag, ExclusiveLock, false);
}

int64
idem_store_draw_token(void)
{
	Oid			sequence = idem_catalog()->tokens;
	HeapTuple	tuple = SearchSysCache1(SEQRELID, ObjectIdGetDatum(sequence));
	Form_pg_sequence form;
	bool		grows;

	if (!HeapTupleIsValid(tuple))
		elog(ERROR, "cache lookup failed for sequence %u", sequence);
	form = (Form_pg_sequence) GETSTRUCT(tuple);
	/* A cached number of one session can be lower than one that another used. */
	grows = form->seqincrement > 0 && form->seqcache == 1 && !form->seqcycle;
	ReleaseSysCache(tuple);
	if (!grows)
		ereport(ERROR,
				(errcode(ERRCODE_FEATURE_NOT_SUPPORTED),
				 errmsg("sequence \"idem_token_seq\" cannot number leases: its values do not grow from one call to the next"),
				 errhint("Run ALTER SEQUENCE %s INCREMENT 1 CACHE 1 NO CYCLE.",
						 qualified_name(sequence))));
	return nextval_internal(sequence, false);
}

bool
idem_store_lock_row(ItemPointer tid)
{
	Store	   *store = use_store();
	bool		locked;

	has_written = true;
	locked = row_was_free(lock_row(store, tid, LockTupleNoKeyExclusive,
								   LockWaitSkip));
	done_with_store(store);
	return locked;
}

/* Of several lockers, one that still runs */
static TransactionId
running_member(MultiXactId multi)
{
	MultiXactMember *members;
	int			nmembers = GetMultiXactIdMembers(multi, &members, false, false);

	for (int i = 0; i < nmembers; i++)
		if (!TransactionIdIsCurrentTransactionId(members[i].xid) &&
			TransactionIdIsInProgress(members[i].xid))
			return members[i].xid;
	return InvalidTransactionId;
}

TransactionId
idem_store_row_locker(ItemPointer tid)
{
	Store	   *store = use_store();
	TransactionId locker = InvalidTransactionId;

	if (table_tuple_fetch_row_version(store->claims, tid, SnapshotAny,
									  store->slot))
	{
		bool		should_free;
		HeapTupleHeader header =
			ExecFetchSlotHeapTuple(store->slot, false, &should_free)->t_data;
		TransactionId xmax;
		uint16		infomask;

		LockBuffer(((BufferHeapTupleTableSlot *) store->slot)->buffer,
				   BUFFER_LOCK_SHARE);
		xmax = HeapTupleHeaderGetRawXmax(header);
		infomask = header->t_infomask;
		LockBuffer(((BufferHeapTupleTableSlot *) store->slot)->buffer,
				   BUFFER_LOCK_UNLOCK);

		if ((infomask & HEAP_XMAX_INVALID) != 0)
			locker = InvalidTransactionId;
		else if ((infomask & HEAP_XMAX_IS_MULTI) != 0)
			locker = running_member(xmax);
		else if (!TransactionIdIsCurrentTransactionId(xmax) &&
				 TransactionIdIsInProgress(xmax))
			locker = xmax;
	}
	ExecClearTuple(store->slot);
	done_with_store(store);
	return locker;
}

/* ----- rows by expiry ----- */

static Relation
open_expiry_index(Relation claims)
{
	Oid			oid = idem_catalog()->claims_by_expiry;
	Relation	index = OidIsValid(oid) ?
		index_open(oid, RowExclusiveLock) : NULL;

	/* In order of expiry, all of them */
	if (index == NULL ||
		index->rd_index->indrelid != RelationGetRelid(claims) ||
		!index->rd_index->indisvalid ||
		index->rd_rel->relam != BTREE_AM_OID ||
		index->rd_index->indkey.values[0] != Anum_claims_expires_at ||
		(index->rd_indoption[0] & INDOPTION_DESC) != 0 ||
		!heap_attisnull(index->rd_indextuple, Anum_pg_index_indpred, NULL))
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("expired claims cannot be found: index \"idem_claims_expires_at_idx\" is missing, not valid or another"),
				 errhint("Run CREATE INDEX idem_claims_expires_at_idx ON %s (expires_at), after dropping what has its name, or REINDEX it.",
						 qualified_name(RelationGetRelid(claims)))));
	return index;
}

IdemExpiryScan *
idem_store_expiry_scan_begin(TimestampTz from)
{
	IdemExpiryScan *scan = palloc0(sizeof(IdemExpiryScan));
	ScanKeyData key;
	int			nkeys = (from == DT_NOBEGIN) ? 0 : 1;

	idem_store_open("idem_cleanup()");
	scan->store = use_store();
	CheckCmdReplicaIdentity(scan->store->claims, CMD_DELETE);
	has_written = true;
	scan->index = open_expiry_index(scan->store->claims);
	/* Not the active one: it still shows what this statement deleted before. */
	scan->snapshot = RegisterSnapshot(GetLatestSnapshot());
	scan->scan = idem_index_beginscan(scan->store->claims, scan->index,
									  scan->snapshot, nkeys);
	/* The time of an entry whose row is gone is in the entry alone. */
	scan->scan->xs_want_itup = true;
	ScanKeyInit(&key, 1, BTGreaterEqualStrategyNumber, F_TIMESTAMPTZ_GE,
				TimestampTzGetDatum(from));
	index_rescan(scan->scan, &key, nkeys, NULL, 0);
	return scan;
}

static TimestampTz
entry_expires_at(IndexScanDesc scan)
{
	bool		isnull;

	return DatumGetTimestampTz(index_getattr(scan->xs_itup, 1,
											 scan->xs_itupdesc, &isnull));
}

bool
idem_store_expiry_scan_next(IdemExpiryScan *scan, IdemExpiring *row)
{
	TupleTableSlot *slot = scan->store->slot;

	if (index_getnext_tid(scan->scan, ForwardScanDirection) == NULL)
		return false;
	/* An entry has one row at most that an MVCC snapshot sees. */
	row->gone = !index_fetch_heap(scan->scan, slot);
	if (row->gone)
	{
		row->expires_at = entry_expires_at(scan->scan);
		return true;
	}
	slot_getsomeattrs(slot, Anum_claims_state);
	row->expires_at = time_or_none(slot, Anum_claims_expires_at);
	row->state =
		idem_state_from_oid(DatumGetObjectId(slot->tts_values[Anum_claims_state - 1]));
	if (row->state == IDEM_STATE_IN_PROGRESS)
	{
		slot_getsomeattrs(slot, Anum_claims_scope);
		row->lease_until = time_or_none(slot, Anum_claims_lease_until);
		row->scope = DatumGetTextPP(slot->tts_values[Anum_claims_scope - 1]);
	}
	return true;
}

/*
 * The row that the snapshot saw is deleted only if it is the latest version:
 * if the key was claimed again or its promise prolonged meanwhile, the result
 * is TM_Updated, and the row stays.
 */
bool
idem_store_expiry_scan_delete(IdemExpiryScan *scan)
{
	return row_was_free(delete_or_skip_row(scan->store,
										   &scan->store->slot->tts_tid));
}

void
idem_store_expiry_scan_end(IdemExpiryScan *scan)
{
	ExecClearTuple(scan->store->slot);
	index_endscan(scan->scan);
	UnregisterSnapshot(scan->snapshot);
	index_close(scan->index, NoLock);
	done_with_store(scan->store);
	CommandCounterIncrement();
	pfree(scan);
}
