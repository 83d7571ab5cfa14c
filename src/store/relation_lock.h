/*
 * relation_lock.h
 *	  Locks of relations that belong to the transaction, not to the portal or the savepoint
 *	  that happens to take them.
 */
#ifndef IDEM_STORE_RELATION_LOCK_H
#define IDEM_STORE_RELATION_LOCK_H

#include "storage/lockdefs.h"

/*
 * Takes the lock without waiting; false: others have it.  Unlike LockRelationOid() it
 * processes no invalidations, and so it does not fail once it has the lock: the caller first
 * notes what it has, and then calls AcceptInvalidationMessages().  A subtransaction that
 * aborts does not release the lock.
 */
extern bool idem_relation_lock_try(Oid relid, LOCKMODE mode);

extern void idem_relation_unlock(Oid relid, LOCKMODE mode);

#endif							/* IDEM_STORE_RELATION_LOCK_H */
