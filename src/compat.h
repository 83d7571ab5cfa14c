/*
 * compat.h
 *	  Differences between the supported server versions: one function for each interface
 *	  that changed, or the newer server's name in the older one.  No other file asks for the
 *	  version of the server.
 */
#ifndef IDEM_COMPAT_H
#define IDEM_COMPAT_H

#include "access/amapi.h"
#include "access/genam.h"
#include "access/relscan.h"
#include "access/tableam.h"
#include "access/xact.h"
#include "catalog/pg_proc.h"
#include "executor/executor.h"
#include "fmgr.h"
#include "storage/lwlock.h"
#include "storage/proc.h"
#include "utils/backend_status.h"
#include "utils/acl.h"
#include "utils/relcache.h"
#include "utils/snapmgr.h"
#include "utils/syscache.h"
#include "utils/wait_event.h"

#if PG_VERSION_NUM < 150004
#error "idem needs PostgreSQL 15.4 or later"
#endif

#if PG_VERSION_NUM >= 170000
#include "storage/dsm_registry.h"
#endif

/* 18: the module block carries a name and a version */
#if PG_VERSION_NUM < 180000
#define PG_MODULE_MAGIC_EXT(...) PG_MODULE_MAGIC
#endif

/* 19: the number of a system cache is an enum */
#if PG_VERSION_NUM < 190000
typedef int SysCacheIdentifier;
#endif

/* 18: index_beginscan() takes instrumentation; 19: and flags */
static inline IndexScanDesc
idem_index_beginscan(Relation heap, Relation index, Snapshot snapshot,
					 int nkeys)
{
#if PG_VERSION_NUM >= 190000
	return index_beginscan(heap, index, snapshot, NULL, nkeys, 0, SO_NONE);
#elif PG_VERSION_NUM >= 180000
	return index_beginscan(heap, index, snapshot, NULL, nkeys, 0);
#else
	return index_beginscan(heap, index, snapshot, nkeys, 0);
#endif
}

/*
 * 19: table_index_fetch_reset() keeps the pin of the table's page for the next row.  The pin
 * belongs to the resource owner of the statement, so a scan that outlives the statement must
 * give it back.  Only the end of the table's part of the scan does that; so begin that part
 * again.  The current memory context must be the scan's.  Costs about 1 % of a replay: the
 * older versions do without.
 */
static inline void
idem_index_fetch_unpin(IndexScanDesc scan)
{
#if PG_VERSION_NUM >= 190000
	table_index_fetch_end(scan->xs_heapfetch);
	scan->xs_heapfetch = table_index_fetch_begin(scan->heapRelation, SO_NONE);
#else
	table_index_fetch_reset(scan->xs_heapfetch);
#endif
}

/* 19: table_tuple_delete() takes options, which include the last argument of before */
static inline TM_Result
idem_table_tuple_delete(Relation rel, ItemPointer tid, bool wait,
						TM_FailureData *failure)
{
#if PG_VERSION_NUM >= 190000
	return table_tuple_delete(rel, tid, GetCurrentCommandId(true), 0,
							  GetActiveSnapshot(), InvalidSnapshot, wait,
							  failure);
#else
	return table_tuple_delete(rel, tid, GetCurrentCommandId(true),
							  GetActiveSnapshot(), InvalidSnapshot, wait,
							  failure, false);
#endif
}

/* 18: RelationGetPrimaryKeyIndex() can include a deferrable one */
static inline Oid
idem_primary_key_index(Relation rel)
{
#if PG_VERSION_NUM >= 180000
	return RelationGetPrimaryKeyIndex(rel, false);
#else
	return RelationGetPrimaryKeyIndex(rel);
#endif
}

/* 16: an update says which indexes need the new version, not only whether */
#if PG_VERSION_NUM >= 160000
typedef TU_UpdateIndexes IdemUpdateIndexes;
#define IDEM_UPDATE_NEEDS_INDEXES(u) ((u) != TU_None)
#define IDEM_UPDATE_ONLY_SUMMARIZING(u) ((u) == TU_Summarizing)
#else
typedef bool IdemUpdateIndexes;
#define IDEM_UPDATE_NEEDS_INDEXES(u) (u)
#define IDEM_UPDATE_ONLY_SUMMARIZING(u) (false)
#endif

/* 19: table_tuple_update() takes options */
static inline TM_Result
idem_table_tuple_update(Relation rel, ItemPointer tid, TupleTableSlot *slot,
						bool wait, TM_FailureData *failure,
						LockTupleMode *lockmode,
						IdemUpdateIndexes *update_indexes)
{
#if PG_VERSION_NUM >= 190000
	return table_tuple_update(rel, tid, slot, GetCurrentCommandId(true), 0,
							  GetActiveSnapshot(), InvalidSnapshot, wait,
							  failure, lockmode, update_indexes);
#else
	return table_tuple_update(rel, tid, slot, GetCurrentCommandId(true),
							  GetActiveSnapshot(), InvalidSnapshot, wait,
							  failure, lockmode, update_indexes);
#endif
}

/* 16: ExecInsertIndexTuples() can be told to skip the other indexes; 19: by flags */
static inline List *
idem_insert_index_tuples(ResultRelInfo *rri, TupleTableSlot *slot,
						 EState *estate, bool update, bool *conflict,
						 List *arbiters, bool only_summarizing)
{
#if PG_VERSION_NUM >= 190000
	uint32		flags = (update ? EIIT_IS_UPDATE : 0) |
		(conflict != NULL ? EIIT_NO_DUPE_ERROR : 0) |
		(only_summarizing ? EIIT_ONLY_SUMMARIZING : 0);

	return ExecInsertIndexTuples(rri, estate, flags, slot, arbiters, conflict);
#elif PG_VERSION_NUM >= 160000
	return ExecInsertIndexTuples(rri, slot, estate, update, conflict != NULL,
								 conflict, arbiters, only_summarizing);
#else
	return ExecInsertIndexTuples(rri, slot, estate, update, conflict != NULL,
								 conflict, arbiters);
#endif
}

/* 17: an index can keep pins from one insert to the next (BRIN) */
static inline void
idem_index_insert_cleanup(ResultRelInfo *rri)
{
#if PG_VERSION_NUM >= 170000
	for (int i = 0; i < rri->ri_NumIndices; i++)
	{
		Relation	index = rri->ri_IndexRelationDescs[i];

		if (index == NULL || index->rd_indam->aminsertcleanup == NULL)
			continue;
		index_insert_cleanup(index, rri->ri_IndexRelationInfo[i]);
		rri->ri_IndexRelationInfo[i]->ii_AmCache = NULL;
	}
#endif
}

#if PG_VERSION_NUM < 160000
#define pgstat_get_local_beentry_by_index(i) pgstat_fetch_stat_local_beentry(i)
#endif

/*
 * When a process has begun its transaction; DT_NOBEGIN: it has none, it does not tell, or it
 * has ended.
 */
static inline TimestampTz
idem_transaction_begin(int pid)
{
	TimestampTz begin = DT_NOBEGIN;

	/* Otherwise we read what the session saw when it looked at pg_stat_activity first. */
	pgstat_clear_backend_activity_snapshot();
	for (int i = 1; i <= pgstat_fetch_stat_numbackends(); i++)
	{
		LocalPgBackendStatus *local = pgstat_get_local_beentry_by_index(i);

		if (local->backendStatus.st_procpid == pid &&
			local->backendStatus.st_xact_start_timestamp != 0)
			begin = local->backendStatus.st_xact_start_timestamp;
	}
	pgstat_clear_backend_activity_snapshot();
	return begin;
}

#if PG_VERSION_NUM < 170000
#define MyProcNumber (MyProc->pgprocno)
#endif

/* 16: one function checks the rights on all kinds of objects.  The older server: on these two */
#if PG_VERSION_NUM < 160000
static inline AclResult
object_aclcheck(Oid classid, Oid object, Oid role, AclMode mode)
{
	return classid == ProcedureRelationId ? pg_proc_aclcheck(object, role, mode) :
		pg_namespace_aclcheck(object, role, mode);
}
#endif

/* 19: a descriptor of CreateTemplateTupleDesc() must not be used before this call, which comes
 * after its last column. */
#if PG_VERSION_NUM < 190000
#define TupleDescFinalize(desc) ((void) 0)
#endif

/* 17: an extension's wait events have names. */
#if PG_VERSION_NUM < 170000
#define WaitEventExtensionNew(name) PG_WAIT_EXTENSION
#endif

/*
 * 17: GetNamedDSMSegment(); 19: its callback has a second argument.  Returns the segment of
 * that name, at its address in this process.  The first caller makes it: init() fills it before
 * others see it.  Raises if there is no room for it.
 */
#define IDEM_HAS_NAMED_SEGMENTS (PG_VERSION_NUM >= 170000)

typedef void (*IdemInitSegment) (void *segment);

#if PG_VERSION_NUM >= 190000
static inline void
idem_init_segment(void *segment, void *init)
{
	(*(IdemInitSegment *) init) (segment);
}
#endif

static inline void *
idem_named_segment(const char *name, Size size, IdemInitSegment init)
{
#if PG_VERSION_NUM >= 190000
	bool		found;

	return GetNamedDSMSegment(name, size, idem_init_segment, &found, &init);
#elif PG_VERSION_NUM >= 170000
	bool		found;

	return GetNamedDSMSegment(name, size, init, &found);
#else
	elog(ERROR, "this server has no named segments");
	return NULL;
#endif
}

/* 19: a tranche of locks has its name in shared memory; before, each process registers it. */
static inline int
idem_lwlock_new_tranche(const char *name)
{
#if PG_VERSION_NUM >= 190000
	return LWLockNewTrancheId(name);
#else
	return LWLockNewTrancheId();
#endif
}

#if PG_VERSION_NUM >= 190000
#define LWLockRegisterTranche(tranche, name) ((void) (tranche))
#endif

#endif							/* IDEM_COMPAT_H */
