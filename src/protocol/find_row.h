/*
 * find_row.h
 *	  What claim.c, settle.c and lease.c share: the arguments of a holder, its row, and
 *	  the errors of a caller that does not hold the key.
 */
#ifndef IDEM_PROTOCOL_FIND_ROW_H
#define IDEM_PROTOCOL_FIND_ROW_H

#include "fmgr.h"

#include "protocol/blocked_by.h"
#include "session/wait.h"
#include "store/policy.h"
#include "store/store.h"

/* A call that acts on the row of a key */
typedef struct IdemRowCall
{
	IdemKey		key;
	int64		token;			/* of the lease; 0: none given */
	IdemDeadline deadline;		/* idem.wait from the first wait on */
	IdemFound	found;			/* the row, once it is found */
} IdemRowCall;

/* The token argument; NULL: 0.  Raises ID400 unless positive. */
extern int64 idem_token_from_arg(FunctionCallInfo fcinfo, int arg);

/* The lease argument (an interval) in microseconds; NULL: 0.  Raises ID400. */
extern int64 idem_lease_from_arg(FunctionCallInfo fcinfo, int arg);

/*
 * What a scope's policy says of the values that a caller passes.  Raise ID400 for a lease
 * that is longer than the scope allows, ID413 for a value over the scope's cap; name says
 * in the message what the value is.
 */
extern void idem_check_lease(const IdemKey *key, const IdemPolicy *policy,
							 int64 lease_us);
extern void idem_check_size(const IdemKey *key, const IdemPolicy *policy,
							const Jsonb *value, const char *name);

/*
 * Finds the row of the key.  Waits until no other transaction is inserting, updating or
 * deleting it; raises ID503 or ID409 when the deadline passes.  False: there is no row.
 */
extern bool idem_find_row(IdemRowCall *call);

/*
 * The same, for the row of the latest holder: with a token, the row that has this token;
 * without one, the row that this transaction wrote.  Raises ID410 for any other row, and
 * where there is none.
 */
extern void idem_find_row_of_holder(IdemRowCall *call);

/* After a row was found that cannot be written: sets the transaction in flight to the one that
 * has locked it or changed it.  False: there is none now. */
extern bool idem_find_locker(IdemFound *found);

/* Waits for that transaction; raises like idem_find_row().  Then look again: the caller has no
 * lock on the row either. */
extern void idem_wait_for_row_or_raise(IdemRowCall *call);

/* The outcome of a call whose deadline passed: in_progress where the caller did not want
 * to wait, else timed_out */
extern IdemOutcome idem_outcome_of_passed(const IdemDeadline *deadline);

extern void idem_raise_lost(const IdemKey *key, const char *message,
							const char *hint);

/* For a token that is not, or no longer, the one of the key's lease; counts it. */
extern void idem_raise_lost_lease(const IdemKey *key);

/* Where the key has no row: ID410 */
extern void idem_raise_no_request(const IdemKey *key);

/*
 * To be called after a lease was claimed, settled or dropped.  The commit becomes
 * synchronous: otherwise a crash could undo it after the holder has gone on, and a token
 * could be drawn twice.  The commit also wakes the waiters.
 */
extern void idem_commit_lease(const IdemKey *key);

#endif							/* IDEM_PROTOCOL_FIND_ROW_H */
