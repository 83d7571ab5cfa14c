/*
 * relation_lock.h
 *	  Locks of relations that belong to the transaction, not to the portal or the savepoint
 *	  that happens to take them.
 *
 * A lock belongs to the resource owner that is current when the lock is taken.  Within a
 * function that is the portal's or the subtransaction's.
 */
#ifndef IDEM_STORE_RELATION_LOCK_H
#define IDEM_STORE_RELATION_LOCK_H

#include "miscadmin.h"
#include "storage/lmgr.h"
#include "storage/lock.h"
#include "utils/resowner.h"

/* Takes the lock for the whole transaction, if nobody is in the way. */
static inline bool
idem_relation_lock_try(Oid relid, LOCKMODE mode)
{
	ResourceOwner owner = CurrentResourceOwner;
	LockAcquireResult result;
	LOCKTAG		tag;

	SET_LOCKTAG_RELATION(tag, MyDatabaseId, relid);
	/* If LockAcquire() raises an error, the abort sets the owner anew. */
	CurrentResourceOwner = TopTransactionResourceOwner;
	result = LockAcquire(&tag, mode, false, true);
	CurrentResourceOwner = owner;
	return result != LOCKACQUIRE_NOT_AVAIL;
}

/*
 * Takes the lock.  False: with dont_wait, if another transaction has a lock that conflicts.  The
 * abort of a subtransaction does not release the lock.  The function cannot fail once it has the
 * lock: the caller first notes the lock, and then calls AcceptInvalidationMessages().
 *
 * The wait can end in an error, also after the lock was granted.  So the lock that waits belongs to
 * the caller's owner, which then releases it.
 */
static inline bool
idem_relation_lock(Oid relid, LOCKMODE mode, bool dont_wait)
{
	if (idem_relation_lock_try(relid, mode))
		return true;
	if (dont_wait)
		return false;
	LockRelationOid(relid, mode);
	(void) idem_relation_lock_try(relid, mode);
	UnlockRelationOid(relid, mode);
	return true;
}

static inline void
idem_relation_unlock(Oid relid, LOCKMODE mode)
{
	ResourceOwner owner = CurrentResourceOwner;

	CurrentResourceOwner = TopTransactionResourceOwner;
	UnlockRelationOid(relid, mode);
	CurrentResourceOwner = owner;
}

#endif							/* IDEM_STORE_RELATION_LOCK_H */
