/*
 * relation_lock.c
 *	  Locks of relations that belong to the transaction.
 *
 * A lock belongs to the resource owner that is current when it is taken.  Within a function
 * that is the portal's or the subtransaction's.  To take each lock twice and to give the first
 * one back, for the transaction to keep the second, cost 2,600 instructions a transaction with
 * one claim.
 */
#include "postgres.h"

#include "miscadmin.h"
#include "storage/lmgr.h"
#include "storage/lock.h"
#include "utils/resowner.h"

#include "store/relation_lock.h"

bool
idem_relation_lock_try(Oid relid, LOCKMODE mode)
{
	ResourceOwner owner = CurrentResourceOwner;
	LockAcquireResult result;
	LOCKTAG		tag;

	SET_LOCKTAG_RELATION(tag, MyDatabaseId, relid);
	/* After an error, which means that there is no lock, the abort sets the owner anew. */
	CurrentResourceOwner = TopTransactionResourceOwner;
	result = LockAcquire(&tag, mode, false, true);
	CurrentResourceOwner = owner;
	return result != LOCKACQUIRE_NOT_AVAIL;
}

void
idem_relation_unlock(Oid relid, LOCKMODE mode)
{
	ResourceOwner owner = CurrentResourceOwner;

	CurrentResourceOwner = TopTransactionResourceOwner;
	UnlockRelationOid(relid, mode);
	CurrentResourceOwner = owner;
}
