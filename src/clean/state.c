/*
 * state.c
 *	  Who cleans: the worker of a database, the launcher, and which databases an operator has
 *	  started.  shared/databases.h says who may write what, under which lock.
 */
#include "postgres.h"

#include "access/xact.h"
#include "mb/pg_wchar.h"
#include "miscadmin.h"
#include "storage/ipc.h"
#include "storage/procarray.h"
#include "utils/timestamp.h"

#include "clean/state.h"
#include "shared/databases.h"

/* ----- the worker ----- */

/* before_shmem_exit callback */
static void
detach_worker(int code, Datum arg)
{
	IdemDatabase *slot = idem_own_database(false);

	Assert(slot->cleanup.worker_pid == MyProcPid);
	SpinLockAcquire(&slot->mutex);
	slot->cleanup.worker_pid = 0;
	SpinLockRelease(&slot->mutex);
}

bool
idem_state_attach_worker(void)
{
	IdemDatabase *slot = idem_own_database(true);
	int			worker_pid;

	if (slot == NULL)
		return true;
	SpinLockAcquire(&slot->mutex);
	worker_pid = slot->cleanup.worker_pid;
	if (worker_pid == 0)
		slot->cleanup.worker_pid = MyProcPid;
	SpinLockRelease(&slot->mutex);

	if (worker_pid == 0)
		before_shmem_exit(detach_worker, (Datum) 0);
	return worker_pid == 0 || worker_pid == MyProcPid;
}

bool
idem_state_publish_error(Oid database, const char *message)
{
	IdemDatabase *slot;
	TimestampTz now = GetCurrentTimestamp();
	int			length = pg_mbcliplen(message, strlen(message),
									  IDEM_ERROR_TEXT_BYTES_MAX - 1);
	bool		is_news = true;

	if (database == MyDatabaseId)
		(void) idem_own_database(true);
	LWLockAcquire(&idem_shared_databases->lock, LW_SHARED);
	slot = idem_find_database(database);
	if (slot != NULL)
	{
		SpinLockAcquire(&slot->mutex);
		is_news = strncmp(slot->cleanup.last_error, message, length) != 0 ||
			slot->cleanup.last_error[length] != '\0';
		slot->cleanup.errors++;
		slot->cleanup.last_error_at = now;
		memcpy(slot->cleanup.last_error, message, length);
		slot->cleanup.last_error[length] = '\0';
		SpinLockRelease(&slot->mutex);
	}
	LWLockRelease(&idem_shared_databases->lock);
	return is_news;
}

void
idem_state_publish_run(void)
{
	IdemDatabase *slot = idem_own_database(false);

	if (slot == NULL)
		return;
	SpinLockAcquire(&slot->mutex);
	slot->cleanup.runs++;
	SpinLockRelease(&slot->mutex);
}

/* ----- the launcher ----- */

/* before_shmem_exit callback */
static void
detach_launcher(int code, Datum arg)
{
	uint32		pid = MyProcPid;

	(void) pg_atomic_compare_exchange_u32(&idem_shared_databases->launcher_pid, &pid, 0);
}

bool
idem_state_attach_launcher(void)
{
	uint32		none = 0;

	if (!pg_atomic_compare_exchange_u32(&idem_shared_databases->launcher_pid, &none, MyProcPid))
		return false;
	before_shmem_exit(detach_launcher, (Datum) 0);
	return true;
}

bool
idem_state_detach_launcher(void)
{
	bool		is_needed = false;

	LWLockAcquire(&idem_shared_databases->lock, LW_EXCLUSIVE);
	for (int i = 0; i < IDEM_DATABASES_MAX; i++)
		if (OidIsValid(idem_shared_databases->slots[i].database) && idem_shared_databases->slots[i].started)
			is_needed = true;
	if (!is_needed)
		detach_launcher(0, (Datum) 0);
	LWLockRelease(&idem_shared_databases->lock);
	return !is_needed;
}

pid_t
idem_state_launcher_pid(void)
{
	return pg_atomic_read_u32(&idem_shared_databases->launcher_pid);
}

/* ----- databases that an operator has started ----- */

bool
idem_state_start_database(IdemStart *start)
{
	IdemDatabase *slot = idem_own_database(true);
	TransactionId xid = GetTopTransactionIdIfAny();

	if (slot == NULL)
		return false;
	LWLockAcquire(&idem_shared_databases->lock, LW_EXCLUSIVE);
	start->is_repeated = slot->started;
	start->starts = ++slot->starts;
	start->launcher_pid = idem_state_launcher_pid();
	slot->started = true;
	if (TransactionIdIsValid(xid))
		slot->starter = xid;
	LWLockRelease(&idem_shared_databases->lock);
	return true;
}

bool
idem_state_is_started(Oid database)
{
	IdemDatabase *slot;
	bool		is_started;

	LWLockAcquire(&idem_shared_databases->lock, LW_SHARED);
	slot = idem_find_database(database);
	is_started = slot != NULL && slot->started;
	LWLockRelease(&idem_shared_databases->lock);
	return is_started;
}

/*
 * The transaction that started this database has ended.  Its id must not stay: after two billion
 * more transactions the id would look like one that still runs, or is another one's.
 */
static void
forget_starter(IdemDatabase *slot, TransactionId starter)
{
	LWLockAcquire(&idem_shared_databases->lock, LW_EXCLUSIVE);
	if (slot->starter == starter)
		slot->starter = InvalidTransactionId;
	LWLockRelease(&idem_shared_databases->lock);
}

uint32
idem_state_get_starts(void)
{
	IdemDatabase *slot = idem_own_database(false);
	TransactionId starter;
	uint32		starts;

	if (slot == NULL)
		return 0;
	LWLockAcquire(&idem_shared_databases->lock, LW_SHARED);
	starter = slot->starter;
	starts = slot->started ? slot->starts : 0;
	LWLockRelease(&idem_shared_databases->lock);
	if (!TransactionIdIsValid(starter))
		return starts;
	if (TransactionIdIsInProgress(starter))
		return 0;
	forget_starter(slot, starter);
	return starts;
}

void
idem_state_stop_database(uint32 starts)
{
	IdemDatabase *slot = idem_own_database(false);

	if (slot == NULL || starts == 0)
		return;
	LWLockAcquire(&idem_shared_databases->lock, LW_EXCLUSIVE);
	if (slot->starts == starts)
	{
		slot->started = false;
		slot->starter = InvalidTransactionId;
	}
	LWLockRelease(&idem_shared_databases->lock);
}
