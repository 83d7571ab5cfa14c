/*
 * policy.h
 *	  What a scope's claims promise.
 */
#ifndef IDEM_STORE_POLICY_H
#define IDEM_STORE_POLICY_H

#include "datatype/timestamp.h"
#include "fmgr.h"

#include "outcome.h"

typedef struct IdemPolicy
{
	int64		ttl_us;
	int64		lease_us;
	int64		lease_max_us;	/* longest lease that a caller may ask for */
	int32		result_max_bytes;
	bool		failed_retryable;	/* else terminal */
	bool		lapsed_unknown;	/* else reclaim */
	bool		expired_reclaim;	/* else protect */
	bool		key_time_uuidv7;	/* else any */
	bool		is_declared;	/* the scope has a row */
	TimestampTz guarded_since;	/* keys up to this time are stale;
								 * DT_NOBEGIN: no such time */
	uint64		generation;		/* invalidations received when it was read */
	uint64		lock;			/* number of the lock under which it was read; 0: none */
} IdemPolicy;

/* What became of a promise */
typedef enum IdemPromise
{
	IDEM_PROMISE_MADE,
	IDEM_PROMISE_OUTDATED,		/* the policy has changed: read it again, keep the lock */
	IDEM_PROMISE_REFUSED		/* a change of a promise is under way: wait for the lock */
} IdemPromise;

/*
 * Promises to remember a key, and sets until when.  Takes the lock that orders claims with
 * changes of a policy's promise (scopes.c), without waiting.  Keep the lock until the row is
 * written, and never while you wait for a holder.  It is held until idem_policy_unlock(), or
 * until the subtransaction aborts.
 */
extern IdemPromise idem_policy_promise(const IdemPolicy *policy,
									   TimestampTz key_time,
									   TimestampTz *remembered_until);

/* Waits for that lock.  It is held as if the given subtransaction had taken it. */
extern void idem_policy_wait_lock(SubTransactionId subtransaction);
extern void idem_policy_unlock(void);

/* Once a backend */
extern void idem_policy_init(void);

/* The policy of a scope as of now: its row in idem_scopes, or the settings. */
extern IdemPolicy idem_policy(const text *scope);

/* The same for a claim.  Raises ID400 if idem.scopes forbids claims in this scope. */
extern IdemPolicy idem_policy_to_claim(const text *scope);

/* The time of a key that has none of its own */
#define IDEM_NO_KEY_TIME DT_NOBEGIN

/*
 * Whether a claim takes a row as if it were absent: the row has expired, and the scope has
 * expired = reclaim.  Not so an unsettled row whose lease is live, or whose scope has
 * lapsed = unknown.
 */
extern bool idem_policy_ignores_row(const IdemPolicy *policy, IdemState state,
									TimestampTz lease_until,
									TimestampTz expires_at);

/* Whether a key of that time, which has no row, may have been claimed and forgotten */
extern bool idem_may_be_forgotten(const IdemPolicy *policy,
								  TimestampTz key_time);

/*
 * Until when a claim made or settled now is remembered: its ttl from now on, or from the
 * key's own time where that is later.
 */
extern TimestampTz idem_remembered_until(const IdemPolicy *policy,
										 TimestampTz key_time);

#endif							/* IDEM_STORE_POLICY_H */
