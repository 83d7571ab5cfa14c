/*
 * databases.c
 *	  The slots of databases in shared memory: made, found, and freed when a database is dropped.
 */
#include "postgres.h"

#include "access/xact.h"
#include "miscadmin.h"
#include "utils/inval.h"
#include "utils/syscache.h"

#include "shared/databases.h"
#include "shared/memory.h"

IdemDatabases *idem_shared_databases = NULL;

/* This process's database.  Looked up once; see the rule on slot->database. */
static IdemDatabase *own_slot = NULL;
static bool own_slot_refused = false;

static Size
databases_size(void)
{
	return sizeof(IdemDatabases);
}

/* All slots are free. */
static void
init_databases(void *memory, int tranche)
{
	IdemDatabases *fresh = memory;

	memset(fresh, 0, sizeof(IdemDatabases));
	LWLockInitialize(&fresh->lock, tranche);
	pg_atomic_init_u32(&fresh->launcher_pid, 0);
}

IdemDatabase *
idem_find_database(Oid database)
{
	Assert(LWLockHeldByMe(&idem_shared_databases->lock));
	for (int i = 0; i < IDEM_DATABASES_MAX; i++)
		if (idem_shared_databases->slots[i].database == database)
			return &idem_shared_databases->slots[i];
	return NULL;
}

/* Nobody looks into a free slot, so all of it can be made anew. */
static void
init_slot(IdemDatabase *slot, Oid database)
{
	Assert(LWLockHeldByMeInMode(&idem_shared_databases->lock, LW_EXCLUSIVE));
	Assert(!OidIsValid(slot->database));
	memset(slot, 0, sizeof(IdemDatabase));
	SpinLockInit(&slot->mutex);
	slot->cleanup.oldest = DT_NOEND;
	slot->cleanup.marks = IDEM_NO_MARKS;
	for (int i = 0; i < IDEM_CLAIM_COUNTERS; i++)
		pg_atomic_init_u64(&slot->claims[i], 0);
	pg_atomic_init_u64(&slot->claimed, (uint64) DT_NOEND);
	idem_scope_table_init(&slot->scopes);
	slot->database = database;
}

/* Where no launcher does it: frees the slots of databases that were dropped. */
static void
forget_dropped_databases(void)
{
	List	   *databases = idem_databases_list();
	ListCell   *lc;

	/* Otherwise the cache may not know a database that was created a moment ago. */
	AcceptInvalidationMessages();
	foreach(lc, databases)
		if (!SearchSysCacheExists1(DATABASEOID, ObjectIdGetDatum(lfirst_oid(lc))))
			idem_databases_forget(lfirst_oid(lc));
	list_free(databases);
}

/* Returns NULL if no slot is free. */
static IdemDatabase *
create_slot(Oid database)
{
	IdemDatabase *slot;
	bool		is_full;
	bool		report = false;

	LWLockAcquire(&idem_shared_databases->lock, LW_SHARED);
	is_full = idem_find_database(InvalidOid) == NULL;
	LWLockRelease(&idem_shared_databases->lock);
	if (is_full && IsTransactionState())
		forget_dropped_databases();

	LWLockAcquire(&idem_shared_databases->lock, LW_EXCLUSIVE);
	slot = idem_find_database(database);
	if (slot == NULL && (slot = idem_find_database(InvalidOid)) != NULL)
		init_slot(slot, database);
	if (slot == NULL)
	{
		report = !idem_shared_databases->full_reported;
		idem_shared_databases->full_reported = true;
	}
	LWLockRelease(&idem_shared_databases->lock);

	if (report)
		ereport(LOG,
				(errmsg("idem keeps no statistics of database %u", database),
				 errdetail("There is room for %d databases.", IDEM_DATABASES_MAX)));
	return slot;
}

IdemDatabase *
idem_own_database(bool create)
{
	if (own_slot != NULL || own_slot_refused || !OidIsValid(MyDatabaseId) ||
		!idem_shared_use())
		return own_slot;

	LWLockAcquire(&idem_shared_databases->lock, LW_SHARED);
	own_slot = idem_find_database(MyDatabaseId);
	LWLockRelease(&idem_shared_databases->lock);
	if (own_slot == NULL && create)
	{
		own_slot = create_slot(MyDatabaseId);
		own_slot_refused = (own_slot == NULL);
	}
	return own_slot;
}

IdemDatabase *
idem_require_own_database(void)
{
	idem_shared_require("keep statistics");
	return idem_own_database(true);
}

List *
idem_databases_list(void)
{
	List	   *databases = NIL;

	LWLockAcquire(&idem_shared_databases->lock, LW_SHARED);
	for (int i = 0; i < IDEM_DATABASES_MAX; i++)
		if (OidIsValid(idem_shared_databases->slots[i].database))
			databases = lappend_oid(databases, idem_shared_databases->slots[i].database);
	LWLockRelease(&idem_shared_databases->lock);
	return databases;
}

void
idem_databases_forget(Oid database)
{
	IdemDatabase *slot;

	LWLockAcquire(&idem_shared_databases->lock, LW_EXCLUSIVE);
	slot = idem_find_database(database);
	if (slot != NULL)
	{
		slot->database = InvalidOid;
		idem_shared_databases->full_reported = false;
	}
	LWLockRelease(&idem_shared_databases->lock);
}

void
idem_databases_init(void)
{
	idem_shared_add(databases_size, init_databases, (void **) &idem_shared_databases);
}
