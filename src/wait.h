/*
 * wait.h
 *	  Waiting for another holder of a key, under one deadline.
 */
#ifndef IDEM_WAIT_H
#define IDEM_WAIT_H

#include "fmgr.h"
#include "storage/itemptr.h"

#include "store.h"

/* A call's patience */
typedef struct IdemDeadline
{
	int64		wait_us;		/* 0: not at all */
	int64		at_us;			/* its end on the monotonic clock; 0: not begun;
								 * IDEM_FOREVER: until cancelled */
	int			pause_ms;		/* of waiting for a lease without preload */
} IdemDeadline;

#define IDEM_FOREVER PG_INT64_MAX

/* The argument of a call (an interval), or the setting idem.wait where it is NULL; raises
 * ID400.  It has to be begun before the first wait: the clock costs as much as the rest
 * of the arguments, and few calls wait. */
extern IdemDeadline idem_deadline_from_arg(FunctionCallInfo fcinfo, int arg);
extern void idem_deadline_begin(IdemDeadline *deadline);

/* From now on; -1: until cancelled */
extern IdemDeadline idem_deadline_after(int wait_ms);

/*
 * Both wait without polling until the transaction has ended (as far as it
 * concerns its row: ROLLBACK TO ends it too), or until the row is not locked.
 * False: the deadline passed.  A caller's own lock_timeout that is shorter
 * raises core's 55P03; a deadlock 40P01; a cancel 57014; with the key in the
 * error's context.
 */
extern bool idem_wait_for_transaction(const IdemKey *key, TransactionId xid,
									  IdemDeadline *deadline);
extern bool idem_wait_for_row_lock(const IdemKey *key, ItemPointer tid,
								   IdemDeadline *deadline);

/* Waits in the same way for an inserter with a speculative token to make sure of its key,
 * a matter of one index entry, or to lose it.  Its transaction is the wrong thing to wait
 * for: if it loses the key, it goes on without it. */
extern bool idem_wait_for_inserter(const IdemKey *key, TransactionId xid,
								   uint32 token, const IdemDeadline *deadline);

/* idem_policy_lock(), waiting in the same way */
extern bool idem_wait_for_policy(const IdemDeadline *deadline);

/*
 * Waits until the lease of the key may have ended: look again.  False: the
 * deadline passed.  After the last wait of a call, whatever it ended in, call
 * idem_wait_end().
 */
extern bool idem_wait_for_lease(const IdemKey *key, TimestampTz lease_until,
								IdemDeadline *deadline);
extern void idem_wait_end(void);

/* When this transaction commits, wakes the waiters for a lease of the key. */
extern void idem_wake_at_commit(const IdemKey *key);

extern int64 idem_monotonic_us(void);

/* Once a backend; with shared memory where the library is preloaded */
extern void idem_wait_init(bool preloaded);

/* The outcome of a call whose deadline passed: in_progress where it did not
 * want to wait, else timed_out */
extern IdemOutcome idem_outcome_of_passed(const IdemDeadline *deadline);

#endif							/* IDEM_WAIT_H */
