/*
 * waiting_processes.c
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
#include "storage/proc.h"
#include "storage/spin.h"
#include "utils/builtins.h"

#include "compat.h"
#include "session/waiting_processes.h"
#include "shared/memory.h"

#define KEY_PARTS 3

typedef struct WaitingSlot
{
	slock_t		mutex;
	Oid			database;		/* InvalidOid: it does not wait */
	TransactionId xid;
	uint8		bytes[KEY_PARTS];	/* lengths of scope, user and request, which follow */
	char		key[KEY_PARTS * IDEM_KEY_PART_BYTES_MAX];
} WaitingSlot;

StaticAssertDecl(IDEM_KEY_PART_BYTES_MAX <= PG_UINT8_MAX,
				 "the length of a part of a key must fit into a byte");

static WaitingSlot *slots = NULL;	/* after idem_shared_use() */
static bool waits = false;

void
idem_waiting_begin(const IdemKey *key, TransactionId xid)
{
	const text *parts[KEY_PARTS] = {key->scope, key->user_id, key->request_id};
	WaitingSlot	fresh = {
		.database = MyDatabaseId,
		.xid = xid
	};
	WaitingSlot *slot;
	char	   *end = fresh.key;

	if (!idem_shared_use())
		return;
	for (int i = 0; i < KEY_PARTS; i++)
	{
		fresh.bytes[i] = VARSIZE_ANY_EXHDR(parts[i]);
		memcpy(end, VARDATA_ANY(parts[i]), fresh.bytes[i]);
		end += fresh.bytes[i];
	}
	slot = &slots[MyProcNumber];
	SpinLockAcquire(&slot->mutex);
	memcpy((char *) slot + offsetof(WaitingSlot, database),
		   (char *) &fresh + offsetof(WaitingSlot, database),
		   sizeof(WaitingSlot) - offsetof(WaitingSlot, database));
	SpinLockRelease(&slot->mutex);
	waits = true;
}

void
idem_waiting_end(void)
{
	WaitingSlot *slot;

	if (!waits)
		return;
	slot = &slots[MyProcNumber];
	SpinLockAcquire(&slot->mutex);
	slot->database = InvalidOid;
	SpinLockRelease(&slot->mutex);
	waits = false;
}

int
idem_waiting_processes(IdemWaitingProcess **waiters)
{
	int			n = 0;

	if (idem_shared_state == IDEM_SHARED_NONE)
		return -1;
	idem_shared_require("know who waits");
	*waiters = palloc(MaxBackends * sizeof(IdemWaitingProcess));
	for (int i = 0; i < MaxBackends; i++)
	{
		WaitingSlot	copy;
		const char *part = copy.key;
		IdemWaitingProcess *waiter = &(*waiters)[n];

		SpinLockAcquire(&slots[i].mutex);
		memcpy(&copy, &slots[i], sizeof(copy));
		SpinLockRelease(&slots[i].mutex);
		if (copy.database != MyDatabaseId)
			continue;
		waiter->xid = copy.xid;
		waiter->key.scope = cstring_to_text_with_len(part, copy.bytes[0]);
		part += copy.bytes[0];
		waiter->key.user_id = cstring_to_text_with_len(part, copy.bytes[1]);
		part += copy.bytes[1];
		waiter->key.request_id = cstring_to_text_with_len(part, copy.bytes[2]);
		n++;
	}
	return n;
}

static void
end_transaction(XactEvent event, void *arg)
{
	if (event == XACT_EVENT_ABORT)
		idem_waiting_end();
}

static void
end_subtransaction(SubXactEvent event, SubTransactionId mine,
				   SubTransactionId parent, void *arg)
{
	if (event == SUBXACT_EVENT_ABORT_SUB)
		idem_waiting_end();
}

static Size
slots_size(void)
{
	return MaxBackends * sizeof(WaitingSlot);
}

static void
init_slots(void *memory, int tranche)
{
	WaitingSlot *fresh = memory;

	for (int i = 0; i < MaxBackends; i++)
	{
		SpinLockInit(&fresh[i].mutex);
		fresh[i].database = InvalidOid;
	}
}

void
idem_waiting_init(void)
{
	RegisterXactCallback(end_transaction, NULL);
	RegisterSubXactCallback(end_subtransaction, NULL);
	idem_shared_add(slots_size, init_slots, (void **) &slots);
}
