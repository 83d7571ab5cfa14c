/*
 * open.c
 *	  The claims table's lifetime: opening it, keeping it open for a transaction, and
 *	  releasing it.
 *
 * Opening relations, indexes and a scan costs as much as a probe.  So they stay open from the
 * first claim of a transaction to its end.  They belong to the transaction's own resource
 * owner and memory, not to the portal or the subtransaction that happens to claim first.
 * the_store has all of it, in one of three states:
 *
 *	the_store	is_open
 *	NULL		false	nothing is open
 *	set			true	open, for this transaction
 *	set			false	kept: an earlier transaction has made it, and has closed the relations
 *
 *	is_stale		what it was made of has changed.  An open store is then made again at its
 *					next use, a kept one is thrown away
 *	the_store->in_use	between idem_store_use() and idem_store_done()
 *	has_written		this transaction has written a row, and keeps its locks to the end
 *	ddl_depth > 0	a command that fires event triggers runs; such a trigger can call us
 *
 * An open store is released
 *
 *	- before the transaction commits or is prepared: it is then kept.  An abort frees it;
 *	- when a subtransaction aborts in which any of its relations was opened;
 *	- before any utility command: the server refuses DDL of a table that the own session has
 *	  open.  While ddl_depth > 0 the store is released after each use.
 *
 * An error during a use leaves in_use set until the subtransaction aborts.  By then the abort
 * has released the buffer pins of the scan, so release_store() does not end the scan: the scan
 * goes with its memory.  (A nested subtransaction can abort during a use only if an index of a
 * user calls a function that has one.)
 *
 * Locks are taken in this order:
 *
 *	1. RowExclusiveLock on the table, then on its indexes and, for a lease, on the sequence of
 *	   the tokens; until the transaction ends, as after any DML.  A claim needs most of these
 *	   only when it already holds locks 2 and 3.  It then takes them without waiting.  If one
 *	   is refused, the claim gives up locks 2 and 3 before it waits;
 *	2. for a lease, the lock of the key, from before the probe to after the write;
 *	3. for a claim, the lock of the policies (policy.c), from the promise to after the
 *	   write;
 *	4. for an insertion, its speculative lock (store/rows.c), or the id of the subtransaction
 *	   that writes many rows.
 *
 * While a transaction holds lock 4, it waits for no other transaction, with one exception:
 * an index that a user made unique waits for the holder of an equal value, as in any INSERT.
 * Only lock_timeout bounds that wait, not the deadline of the call.
 *
 * The store writes below the executor, so it does itself what the executor would do:
 * check_writable() refuses a transaction that may not write, and shape.c a table to which a
 * direct insert would do harm.  Indexes that a user added are maintained.
 */
#include "postgres.h"

#include "access/table.h"
#include "access/tableam.h"
#include "access/xact.h"
#include "catalog/index.h"
#include "executor/executor.h"
#include "miscadmin.h"
#include "tcop/cmdtag.h"
#include "tcop/utility.h"
#include "utils/fmgroids.h"
#include "utils/inval.h"
#include "utils/memutils.h"
#include "utils/rel.h"
#include "utils/resowner.h"
#include "utils/snapmgr.h"

#include "compat.h"
#include "store/catalog.h"
#include "store/internal.h"
#include "store/relation_lock.h"

static IdemStore *the_store = NULL;
static bool is_open = false;
static bool is_stale = false;

/* Number of running commands, one inside the other, that fire event triggers */
static int	ddl_depth = 0;

/* The relations that this transaction has locked, in TopTransactionContext */
static List *locked_relations = NIL;
static bool has_written = false;

/* The relation whose lock idem_store_prepare_write() did not get */
static Oid	refused_relation = InvalidOid;

static ProcessUtility_hook_type next_process_utility;

/*
 * Locks a relation for the transaction, and processes the invalidations of what was committed
 * before.  False: with dont_wait, if another transaction has a lock that conflicts.
 */
static bool
lock_relation(Oid relid, bool dont_wait)
{
	MemoryContext caller;

	if (list_member_oid(locked_relations, relid))
		return true;
	if (!idem_relation_lock(relid, RowExclusiveLock, dont_wait))
	{
		refused_relation = relid;
		return false;
	}
	caller = MemoryContextSwitchTo(TopTransactionContext);
	locked_relations = lappend_oid(locked_relations, relid);
	MemoryContextSwitchTo(caller);
	AcceptInvalidationMessages();
	return true;
}

/*
 * Another session can drop the table after we have read its OID from the catalog.  The lock of
 * an OID without a table succeeds, and processes the invalidation; so the next idem_catalog()
 * finds the table that was created in its place, or raises the error that there is none.
 */
static Relation
open_claims_to_write(void)
{
	Relation	claims;
	Oid			oid;

	do
	{
		CHECK_FOR_INTERRUPTS();
		oid = idem_catalog()->claims;
		(void) lock_relation(oid, false);
		claims = try_table_open(oid, NoLock);
	} while (claims == NULL);
	idem_store_check_layout(claims);
	return claims;
}

static Relation
open_key_index(Relation claims, bool to_write)
{
	Oid			oid = idem_primary_key_index(claims);
	Relation	index = NULL;

	if (OidIsValid(oid) && to_write)
		(void) lock_relation(oid, false);
	if (OidIsValid(oid))
		index = index_open(oid, to_write ? NoLock : AccessShareLock);
	idem_store_check_key(claims, index);
	return index;
}

/*
 * As open_claims_to_write().  The lock can have waited for DDL that renamed this table and put
 * another one in its place.  So a reader asks the catalog again once it has the lock.  A writer
 * need not: that DDL has set is_stale, and each idem_store_use() looks at it.  A claim calls
 * idem_store_open() before its first look at a row, so even this look is at the new table.
 */
void
idem_store_open_to_read(Relation *claims, Relation *key_index)
{
	for (;;)
	{
		CHECK_FOR_INTERRUPTS();
		*claims = try_table_open(idem_catalog()->claims, AccessShareLock);
		if (*claims == NULL)
			continue;
		if (idem_catalog()->claims == RelationGetRelid(*claims))
			break;
		table_close(*claims, AccessShareLock);
	}
	idem_store_check_layout(*claims);
	*key_index = open_key_index(*claims, false);
}

/* ScanKeyInit() sets collation "C", which the columns have. */
void
idem_store_init_keys(ScanKey keys)
{
	for (int i = 0; i < KEY_COLUMNS; i++)
		ScanKeyInit(&keys[i], i + 1, BTEqualStrategyNumber, F_TEXTEQ, (Datum) 0);
}

/* The current memory context is the store's. */
static void
look_at_indexes(IdemStore *store)
{
	ListCell   *cell;

	foreach(cell, RelationGetIndexList(store->claims))
	{
		Oid			index = lfirst_oid(cell);
		IdemIndexKind kind = idem_store_kind_of_index(index);

		if (kind == IDEM_INDEX_OF_UNSETTLED)
		{
			store->unsettled_oids = lappend_oid(store->unsettled_oids, index);
			continue;
		}
		store->index_oids = lappend_oid(store->index_oids, index);
		if (kind == IDEM_INDEX_OF_USER && index != store->key_index_oid)
			store->has_user_index = true;
	}
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
}

/* Keeps a relation open, which the caller has opened and closes, until release_store(). */
static void
keep_open(Relation rel)
{
	ResourceOwner owner = CurrentResourceOwner;

	CurrentResourceOwner = TopTransactionResourceOwner;
	RelationIncrementReferenceCount(rel);
	CurrentResourceOwner = owner;
}

static void
make_slots(IdemStore *store)
{
	/* A copy of the descriptor has no reference count to give back. */
	TupleDesc	desc = CreateTupleDescCopy(RelationGetDescr(store->claims));

	store->slot = MakeSingleTupleTableSlot(desc,
										   table_slot_callbacks(store->claims));
	store->marker = CreateTemplateTupleDesc(Natts_marker);
	for (int i = 1; i <= Natts_marker; i++)
		TupleDescCopyEntry(store->marker, i, desc, i);
	TupleDescFinalize(store->marker);
}

/* From here on the transaction owns the store, which has references of its own to the
 * relations. */
static void
use_for_transaction(IdemStore *store)
{
	Assert(!is_open && store->nkept == 0);
	store->in_use = true;
	store->used_in = store->opened_in = GetCurrentSubTransactionId();
	MemoryContextSetParent(store->context, TopTransactionContext);
	the_store = store;
	is_open = true;
	for (; store->nkept < IDEM_STORE_KEPT; store->nkept++)
		keep_open(store->nkept == 0 ? store->claims : store->key_index);
}

/*
 * Opens, checks and allocates under the resource owner and in the memory of the caller's
 * subtransaction, so that an error leaves nothing behind.  Only then use_for_transaction() sets
 * the_store and takes the transaction's references: from there on, the abort of the
 * subtransaction releases the store, with as many references as it has.
 */
static void
open_store(void)
{
	MemoryContext context = AllocSetContextCreate(CurTransactionContext,
												  "idem store",
												  ALLOCSET_DEFAULT_SIZES);
	MemoryContext caller = MemoryContextSwitchTo(context);
	IdemStore  *store = palloc0(sizeof(IdemStore));
	IndexScanDesc scan;

	Assert(the_store == NULL);
	store->context = context;
	store->claims = open_claims_to_write();
	idem_store_check_direct_writes(store->claims);
	store->key_index = open_key_index(store->claims, true);
	store->claims_oid = RelationGetRelid(store->claims);
	store->key_index_oid = RelationGetRelid(store->key_index);
	look_at_indexes(store);
	InitDirtySnapshot(store->dirty);
	idem_store_init_keys(store->keys);
	make_slots(store);
	scan = idem_index_beginscan(store->claims, store->key_index,
								&store->dirty, KEY_COLUMNS);

	store->scan = scan;
	use_for_transaction(store);
	/* The caller's references: the scan's, the index's and the table's */
	RelationClose(store->key_index);
	index_close(store->key_index, NoLock);
	table_close(store->claims, NoLock);
	MemoryContextSwitchTo(caller);
}

static void
close_relations(IdemStore *store)
{
	for (int i = 0; i < store->nkept_indexes; i++)
		RelationClose(store->target->ri_IndexRelationDescs[i]);
	store->nkept_indexes = 0;
	while (store->nkept > 0)
		RelationClose(--store->nkept == 0 ? store->claims : store->key_index);
}

static void
release_store(void)
{
	IdemStore  *store = the_store;
	ResourceOwner owner = CurrentResourceOwner;

	Assert(is_open);
	the_store = NULL;
	is_open = false;
	CurrentResourceOwner = TopTransactionResourceOwner;
	/* If it was in use, an abort has released the scan's pins: drop only its reference. */
	if (!store->in_use)
	{
		Assert(store->nkept == IDEM_STORE_KEPT);
		index_endscan(store->scan);
		store->nkept--;
	}
	close_relations(store);
	if (store->estate != NULL)
		FreeExecutorState(store->estate);
	MemoryContextDelete(store->context);
	CurrentResourceOwner = owner;
}

/*
 * The end of a transaction closes the relations, and keeps the rest for the next transaction of
 * this session.  Not kept are expressions and predicates of a user's index, and the room for a
 * batch.
 */
static void
keep_store(void)
{
	ResourceOwner owner = CurrentResourceOwner;

#ifdef RELCACHE_FORCE_RELEASE
	/* Such a server frees a relation that is closed, without an invalidation. */
	is_stale = true;
#endif
	if (is_stale || the_store->has_user_index || the_store->nnew_rows > 1)
	{
		release_store();
		return;
	}
	is_open = false;
	CurrentResourceOwner = TopTransactionResourceOwner;
	close_relations(the_store);
	CurrentResourceOwner = owner;
	MemoryContextSetParent(the_store->context, TopMemoryContext);
}

/*
 * Opens the kept store; false: it can no longer be used.  Taking the locks first processes
 * the invalidations of all changes that were committed before.  So is_stale tells whether the
 * kept store still fits the relations.
 */
static bool
open_kept_store(void)
{
	IdemStore  *store = the_store;
	Oid			oid = idem_catalog()->claims;
	Relation	claims;
	Relation	key_index;

	(void) lock_relation(oid, false);
	if (!is_stale && oid == store->claims_oid)
		(void) lock_relation(store->key_index_oid, false);
	if (is_stale || oid != store->claims_oid)
		return false;
	claims = table_open(oid, NoLock);
	key_index = index_open(store->key_index_oid, NoLock);
	/* The extension Citus can have distributed the table without an invalidation. */
	idem_refuse_distributed(claims);
	if (!is_stale && claims == store->claims && key_index == store->key_index)
	{
		ItemPointerSetInvalid(&store->latest);
		use_for_transaction(store);
	}
	index_close(key_index, NoLock);
	table_close(claims, NoLock);
	return is_open;
}

IdemStore *
idem_store_use(void)
{
	/* See IdemRowRef. */
	Assert(HaveRegisteredOrActiveSnapshot());
	if (is_open && the_store->in_use)
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_IN_USE),
				 errmsg("claims cannot be made while a claim is being stored"),
				 errhint("Do not call functions of idem from an index on idem_claims.")));
	if (is_open && is_stale)
		release_store();
	if (the_store != NULL && !is_open && !open_kept_store())
	{
		/* The scan has no reference to give back: close_relations() has given back all. */
		MemoryContextDelete(the_store->context);
		the_store = NULL;
	}
	if (the_store == NULL)
	{
		/* Cleared before the catalogs are read: an invalidation after that counts. */
		is_stale = false;
		open_store();
	}
	the_store->in_use = true;
	the_store->used_in = GetCurrentSubTransactionId();
	return the_store;
}

void
idem_store_done(IdemStore *store)
{
	Assert(is_open && store == the_store && store->in_use);
	store->in_use = false;
	/* An event trigger runs before the command that fires it, which may be DDL of ours. */
	if (ddl_depth > 0)
		release_store();
}

void
idem_store_reopen(void)
{
	idem_store_done(idem_store_use());
}

void
idem_store_open(const char *command)
{
	check_writable(command);
	idem_store_reopen();
}

void
idem_store_step_back(void)
{
	ListCell   *cell;

	if (has_written)
		return;
	Assert(!is_open || !the_store->in_use);
	if (is_open)
		release_store();
	foreach(cell, locked_relations)
		idem_relation_unlock(lfirst_oid(cell), RowExclusiveLock);
	list_free(locked_relations);
	locked_relations = NIL;
}

static void
make_target(IdemStore *store)
{
	MemoryContext caller = MemoryContextSwitchTo(store->context);
	ResultRelInfo *target = makeNode(ResultRelInfo);
	int			nindexes = list_length(store->index_oids) +
		list_length(store->unsettled_oids);

	store->estate = CreateExecutorState();
	store->arbiters = list_make1_oid(RelationGetRelid(store->key_index));
	/* Range table index 0: there is no range table, and there are no rights to check. */
	InitResultRelInfo(target, store->claims, 0, NULL, 0);
	target->ri_IndexRelationDescs = palloc0(nindexes * sizeof(Relation));
	target->ri_IndexRelationInfo = palloc0(nindexes * sizeof(IndexInfo *));
	store->target = target;
	MemoryContextSwitchTo(caller);
}

/*
 * Opens these indexes after those that the target keeps open already, like ExecOpenIndices(), which
 * would open all of the table's.  Locks all of them before any is opened: the wait for a lock can
 * end in an error.
 */
static bool
open_indexes(IdemStore *store, const List *indexes, bool dont_wait)
{
	ResultRelInfo *target = store->target;
	MemoryContext caller;
	ListCell   *cell;

	foreach(cell, indexes)
		if (!lock_relation(lfirst_oid(cell), dont_wait))
			return false;
	caller = MemoryContextSwitchTo(store->context);
	store->opened_in = GetCurrentSubTransactionId();
	foreach(cell, indexes)
	{
		Relation	index = index_open(lfirst_oid(cell), NoLock);
		int			n = store->nkept_indexes;

		/* A kept store has what was made of this index before. */
		if (is_stale || index != target->ri_IndexRelationDescs[n])
			target->ri_IndexRelationInfo[n] = BuildIndexInfo(index);
		target->ri_IndexRelationDescs[n] = index;
		keep_open(index);
		store->nkept_indexes++;
		index_close(index, NoLock);
	}
	MemoryContextSwitchTo(caller);
	return true;
}

static bool
open_indexes_of_all(IdemStore *store, bool dont_wait)
{
	if (store->nkept_indexes > 0)
		return true;
	if (store->target == NULL)
		make_target(store);
	return open_indexes(store, store->index_oids, dont_wait);
}

static bool
open_unsettled_indexes(IdemStore *store, bool dont_wait)
{
	return store->nkept_indexes > list_length(store->index_oids) ||
		open_indexes(store, store->unsettled_oids, dont_wait);
}

void
idem_store_choose_indexes(IdemStore *store, IdemState state)
{
	Assert(store->target != NULL && store->in_use);
	store->target->ri_NumIndices = list_length(store->index_oids);
	if (state == IDEM_STATE_IN_PROGRESS)
	{
		(void) open_unsettled_indexes(store, false);
		store->target->ri_NumIndices = store->nkept_indexes;
	}
}

bool
idem_store_prepare_write(bool is_lease)
{
	IdemStore  *store = idem_store_use();
	bool		is_ready;

	is_ready = open_indexes_of_all(store, true) &&
		(!is_lease || (open_unsettled_indexes(store, true) &&
					   lock_relation(idem_catalog()->tokens, true)));
	idem_store_done(store);
	return is_ready;
}

/* The transaction keeps the lock.  So the next attempt is not refused it, even if another
 * transaction then waits for ours. */
void
idem_store_wait_lock(SubTransactionId subtransaction)
{
	(void) lock_relation(refused_relation, false);
}

IdemStore *
idem_store_use_to_write(CmdType command)
{
	IdemStore  *store = idem_store_use();

	CheckCmdReplicaIdentity(store->claims, command);
	has_written = true;
	if (command == CMD_INSERT || command == CMD_UPDATE)
		(void) open_indexes_of_all(store, false);
	return store;
}

/*
 * It only marks: an invalidation callback must not fail, nor read catalogs.  Without a store
 * any relation counts: it can be one that open_store() is reading.
 */
static void
invalidate_store(Datum arg, Oid relid)
{
	idem_catalog_forget(relid);
	idem_store_forget_index(relid);
	if (the_store == NULL || relid == InvalidOid ||
		relid == the_store->claims_oid ||
		list_member_oid(the_store->index_oids, relid) ||
		list_member_oid(the_store->unsettled_oids, relid))
		is_stale = true;
}

static void
end_transaction(XactEvent event, void *arg)
{
	if (event == XACT_EVENT_PRE_COMMIT || event == XACT_EVENT_PRE_PREPARE)
	{
		Assert(!is_open || !the_store->in_use);
		if (is_open)
			keep_store();
	}
	else if (event == XACT_EVENT_COMMIT || event == XACT_EVENT_PREPARE ||
			 event == XACT_EVENT_ABORT)
	{
		/* What is open after an abort goes with the transaction's memory. */
		if (is_open)
			the_store = NULL;
		is_open = has_written = false;
		locked_relations = NIL;
	}
}

static void
end_subtransaction(SubXactEvent event, SubTransactionId mine,
				   SubTransactionId parent, void *arg)
{
	if (event == SUBXACT_EVENT_ABORT_SUB && is_open &&
		((the_store->in_use && the_store->used_in >= mine) ||
		 the_store->opened_in >= mine))
		release_store();
}

static void
release_before_utility(PlannedStmt *statement, const char *query,
					   bool read_only_tree, ProcessUtilityContext context,
					   ParamListInfo params, QueryEnvironment *environment,
					   DestReceiver *dest, QueryCompletion *completion)
{
	int			outer_ddl_depth = ddl_depth;

	/*
	 * Do not release a store in use: then an index of a user has called a function, and that
	 * function runs this command.  Do not release for SAVEPOINT and its like either: they are
	 * frequent, and no DDL.
	 */
	if (is_open && !the_store->in_use &&
		!IsA(statement->utilityStmt, TransactionStmt))
		release_store();
	if (command_tag_event_trigger_ok(CreateCommandTag(statement->utilityStmt)))
		ddl_depth++;
	PG_TRY();
	{
		next_process_utility(statement, query, read_only_tree, context, params,
							 environment, dest, completion);
	}
	PG_FINALLY();
	{
		ddl_depth = outer_ddl_depth;
	}
	PG_END_TRY();
}

void
idem_store_init(void)
{
	RegisterXactCallback(end_transaction, NULL);
	RegisterSubXactCallback(end_subtransaction, NULL);
	CacheRegisterRelcacheCallback(invalidate_store, (Datum) 0);
	next_process_utility = ProcessUtility_hook != NULL ?
		ProcessUtility_hook : standard_ProcessUtility;
	ProcessUtility_hook = release_before_utility;
}

