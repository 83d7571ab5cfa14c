/*
 * settle.h
 *	  How a key ends, and who may say so.
 */
#ifndef IDEM_SETTLE_H
#define IDEM_SETTLE_H

#include "policy.h"
#include "store.h"
#include "wait.h"

/* Who claims to hold a key: by its token, or, without one, this transaction */
typedef struct IdemHolder
{
	IdemKey		key;
	int64		token;			/* 0: none given */
} IdemHolder;

/*
 * The row of the key, if the holder is the latest one; waits for who changes it.
 * Otherwise raises ID410.
 */
extern void idem_find_row_of_holder(const IdemHolder *holder,
									IdemFound *found, IdemDeadline *deadline);

/* The row of the key, with nobody else changing it: waits for who does.  False:
 * there is none. */
extern bool idem_find_settled_down(const IdemKey *key,
								   IdemFound *found, IdemDeadline *deadline);

/* Waits for a lock of the row; raises ID503 when the deadline passes. */
extern void idem_wait_for_row_or_raise(const IdemKey *key,
									   IdemFound *found, IdemDeadline *deadline);

/* Raises ID413 if the value (a result, progress) is over the scope's cap. */
extern void idem_check_size(const IdemKey *key, const IdemPolicy *policy,
							const Jsonb *value, const char *name);

extern void idem_raise_lost(const IdemKey *key, const char *message,
							const char *hint);

/* For a token that is not, or not any more, that of the key's lease; counts it. */
extern void idem_raise_lost_lease(const IdemKey *key);

/* What was done to a lease must survive a crash once it was committed, and wake
 * who waits for it. */
extern void idem_commit_lease(const IdemKey *key);

/* The token argument: NULL is 0; raises ID400 unless positive. */
extern int64 idem_token_from_arg(FunctionCallInfo fcinfo, int arg);

#endif							/* IDEM_SETTLE_H */
