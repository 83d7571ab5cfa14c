/*
 * wait.h
 *	  Waiting for another holder of a key, under one deadline.
 */
#ifndef IDEM_WAIT_H
#define IDEM_WAIT_H

#include "fmgr.h"
#include "storage/itemptr.h"

#include "store.h"

/* A call's patience.  The clock is read when the first wait begins. */
typedef struct IdemDeadline
{
	int64		wait_us;		/* 0: not at all; IDEM_FOREVER: until cancelled */
	int64		at_us;			/* on the monotonic clock; 0: not begun */
} IdemDeadline;

#define IDEM_FOREVER PG_INT64_MAX

/* The argument of a call (an interval), or the setting idem.wait where it is
 * NULL.  Raises ID400. */
extern IdemDeadline idem_deadline_from_arg(FunctionCallInfo fcinfo, int arg);
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
extern bool idem_wait_for_row_lock(const IdemKey *key, IdemStore *store,
								   ItemPointer tid,
								   IdemDeadline *deadline);

/* The outcome of a call whose deadline passed: in_progress where it did not
 * want to wait, else timed_out */
extern IdemOutcome idem_outcome_of_passed(const IdemDeadline *deadline);

#endif							/* IDEM_WAIT_H */
