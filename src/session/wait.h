/*
 * wait.h
 *	  Waiting under one deadline for what the caller names.
 */
#ifndef IDEM_SESSION_WAIT_H
#define IDEM_SESSION_WAIT_H

#include "datatype/timestamp.h"
#include "fmgr.h"

#include "store/key.h"

/* How long a call waits */
typedef struct IdemDeadline
{
	int64		wait_us;		/* 0: not at all */
	int64		at_us;			/* its end on the monotonic clock; 0: not begun;
								 * IDEM_FOREVER: until cancelled */
	int			pause_ms;		/* the latest pause; see idem_wait_for_lease() */
} IdemDeadline;

#define IDEM_FOREVER PG_INT64_MAX

/*
 * The argument of a call (an interval), or the setting idem.wait where it is NULL; raises
 * ID400.  Begin it before the first wait.  It is not begun at once, because few calls wait:
 * reading the clock makes figure 2 of the benchmark (duplicates) 4 % slower.
 */
extern IdemDeadline idem_deadline_from_arg(FunctionCallInfo fcinfo, int arg);
extern IdemDeadline idem_deadline_from_setting(void);
extern void idem_deadline_begin(IdemDeadline *deadline);

/*
 * The next two wait without polling.  False: the deadline passed.  They raise core's 55P03
 * when a lock_timeout of the caller's own ends before the deadline, 40P01 after a deadlock,
 * 57014 after a cancel, and say in the error's context what they waited for.
 */

/*
 * Waits until the transaction has ended, as far as its row is concerned: ROLLBACK TO ends
 * it too.  speculative: the token of an insertion that has not yet won its key; else 0.
 * The wait is then for that insertion, which takes microseconds: if it loses its key, its
 * transaction goes on without it.
 */
extern bool idem_wait_for_transaction(const IdemKey *key, TransactionId xid,
									  uint32 speculative,
									  const IdemDeadline *deadline);

/*
 * Waits for the lock that take() takes, for the given subtransaction.  take() runs in an
 * internal subtransaction that is rolled back: it must give the lock to another resource
 * owner.  holder: what has the lock, for the error's context.
 */
typedef void (*IdemTakeLock) (SubTransactionId subtransaction);

extern bool idem_wait_for_lock(IdemTakeLock take, const char *holder,
							   const IdemDeadline *deadline);

/*
 * Waits until the lease of the key may have ended: look at its row again.  False: the
 * deadline passed.  Call idem_wait_end() after the last wait of a call, whatever it ended
 * in, and before another kind of wait.
 */
extern bool idem_wait_for_lease(const IdemKey *key, TimestampTz lease_until,
								IdemDeadline *deadline);
extern void idem_wait_end(void);

/* When this transaction commits, wakes the waiters for a lease of the key. */
extern void idem_wake_at_commit(const IdemKey *key);

/* Once a backend, before idem_shared_init() */
extern void idem_wait_init(void);

#endif							/* IDEM_SESSION_WAIT_H */
