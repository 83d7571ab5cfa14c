/*
 * waiters.c
 *	  Which keys processes wait for, in shared memory.
 *
 * Each process has a slot of its own, which it fills before it sleeps and empties after
 * that.  Only readers of the list look into the slots of others.  So a claim that does not wait
 * touches nothing here, and waiters do not meet each other.  The lock of a slot is held to
 * copy it, which cannot fail.
 *
 * A wait can end in an error, such as a cancel.  The abort of the transaction or subtransaction
 * that follows empties the slot; a process that is told to end (FATAL) aborts its transaction,
 * too.  After a crash of any process, shared memory is made anew.
 */
#include "postgres.h"

#include "access/xact.h"
#include "miscadmin.h"
#include "storage/ipc.h"
#include "storage/lwlock.h"
#include "storage/proc.h"
#include "storage/shmem.h"
#include "storage/spin.h"

#include "compat.h"
#include "waiters.h"

#define KEY_PARTS 3

typedef struct WaiterSlot
{
	slock_t		mutex;
	Oid			database;		/* InvalidOid: it does not wait */
	int			pid;
	TransactionId xid;
	uint8		bytes[KEY_PARTS];	/* lengths of scope, user and request, which follow */
	char		key[KEY_PARTS * IDEM_KEY_PART_BYTES_MAX];
} WaiterSlot;

StaticAssertDecl(IDEM_KEY_PART_BYTES_MAX <= PG_UINT8_MAX,
				 "the length of a part of a key must fit into a byte");

static WaiterSlot *slots = NULL;	/* NULL: not preloaded */
static bool waits = false;

static shmem_request_hook_type next_shmem_request = NULL;
static shmem_startup_hook_type next_shmem_startup = NULL;

void
idem_waiter_begin(const IdemKey *key, TransactionId xid)
{
	const text *parts[KEY_PARTS] = {key->scope, key->user_id, key->request_id};
	WaiterSlot	fresh = {
		.database = MyDatabaseId,
		.pid = MyProcPid,
		.xid = xid
	};
	WaiterSlot *slot;
	char	   *end = fresh.key;

	if (slots == NULL)
		return;
	for (int i = 0; i < KEY_PARTS; i++)
	{
		fresh.bytes[i] = VARSIZE_ANY_EXHDR(parts[i]);
		memcpy(end, VARDATA_ANY(parts[i]), fresh.bytes[i]);
		end += fresh.bytes[i];
	}
	slot = &slots[idem_process_number()];
	SpinLockAcquire(&slot->mutex);
	memcpy((char *) slot + offsetof(WaiterSlot, database),
		   (char *) &fresh + offsetof(WaiterSlot, database),
		   sizeof(WaiterSlot) - offsetof(WaiterSlot, database));
	SpinLockRelease(&slot->mutex);
	waits = true;
}

void
idem_waiter_end(void)
{
	WaiterSlot *slot;

	if (!waits)
		return;
	slot = &slots[idem_process_number()];
	SpinLockAcquire(&slot->mutex);
	slot->database = InvalidOid;
	SpinLockRelease(&slot->mutex);
	waits = false;
}

static text *
copy_part(const char **start, int bytes)
{
	text	   *part = palloc(VARHDRSZ + bytes);

	SET_VARSIZE(part, VARHDRSZ + bytes);
	memcpy(VARDATA(part), *start, bytes);
	*start += bytes;
	return part;
}

int
idem_waiters(IdemWaiter **waiters)
{
	int			n = 0;

	if (slots == NULL)
		return -1;
	*waiters = palloc(MaxBackends * sizeof(IdemWaiter));
	for (int i = 0; i < MaxBackends; i++)
	{
		WaiterSlot	copy;
		const char *start = copy.key;
		IdemWaiter *waiter = &(*waiters)[n];

		SpinLockAcquire(&slots[i].mutex);
		memcpy(&copy, &slots[i], sizeof(copy));
		SpinLockRelease(&slots[i].mutex);
		if (copy.database != MyDatabaseId)
			continue;
		waiter->pid = copy.pid;
		waiter->xid = copy.xid;
		waiter->key.scope = copy_part(&start, copy.bytes[0]);
		waiter->key.user_id = copy_part(&start, copy.bytes[1]);
		waiter->key.request_id = copy_part(&start, copy.bytes[2]);
		n++;
	}
	return n;
}

static void
end_transaction(XactEvent event, void *arg)
{
	if (event == XACT_EVENT_ABORT)
		idem_waiter_end();
}

static void
end_subtransaction(SubXactEvent event, SubTransactionId mine,
				   SubTransactionId parent, void *arg)
{
	if (event == SUBXACT_EVENT_ABORT_SUB)
		idem_waiter_end();
}

static void
request_shmem(void)
{
	if (next_shmem_request != NULL)
		next_shmem_request();
	RequestAddinShmemSpace(MaxBackends * sizeof(WaiterSlot));
}

static void
start_shmem(void)
{
	bool		found;

	if (next_shmem_startup != NULL)
		next_shmem_startup();
	LWLockAcquire(AddinShmemInitLock, LW_EXCLUSIVE);
	slots = ShmemInitStruct("idem waiters", MaxBackends * sizeof(WaiterSlot),
							&found);
	for (int i = 0; !found && i < MaxBackends; i++)
	{
		SpinLockInit(&slots[i].mutex);
		slots[i].database = InvalidOid;
	}
	LWLockRelease(AddinShmemInitLock);
}

void
idem_waiters_init(bool preloaded)
{
	if (!preloaded)
		return;
	RegisterXactCallback(end_transaction, NULL);
	RegisterSubXactCallback(end_subtransaction, NULL);
	next_shmem_request = shmem_request_hook;
	shmem_request_hook = request_shmem;
	next_shmem_startup = shmem_startup_hook;
	shmem_startup_hook = start_shmem;
}
