/*
 * policy.h
 *	  What a scope's claims promise.
 */
#ifndef IDEM_POLICY_H
#define IDEM_POLICY_H

#include "datatype/timestamp.h"
#include "fmgr.h"

typedef struct IdemPolicy
{
	int64		ttl_us;
	int64		lease_us;
	int32		result_max_bytes;
	bool		failed_retryable;	/* else terminal */
	bool		lapsed_unknown;	/* else reclaim */
	bool		expired_reclaim;	/* else protect */
	bool		key_time_uuidv7;	/* else any */
	TimestampTz guarded_since;	/* claims from before then were promised */
	int64		guarded_ttl_us; /* at least this; DT_NOBEGIN: all the same ttl */
	uint64		generation;		/* of idem_scopes, as far as we had heard */
} IdemPolicy;

/* A key's own time may be this far ahead of the clock. */
#define IDEM_KEY_TIME_SKEW_US USECS_PER_MINUTE

/*
 * Who makes a promise holds a lock on idem_scopes, from before it makes sure that its
 * policy is still the current one until it has written the promise, and not while it
 * waits for a holder.  It is held until idem_policy_unlock(), or until that
 * subtransaction aborts.  False, unless it is to wait: somebody changes a promise.
 */
extern bool idem_policy_lock(bool wait, SubTransactionId subtransaction);
extern bool idem_policy_is_current(const IdemPolicy *policy);
extern void idem_policy_unlock(void);

/* Once a backend */
extern void idem_policy_init(void);

/* The policy of a scope as of now: its row in idem_scopes, or the settings. */
extern IdemPolicy idem_policy(const text *scope);

/*
 * Until when a claim made or settled now is remembered: its ttl from now on, or
 * from the key's own time where that is later (IDEM_NO_KEY_TIME: has none),
 * rounded up to the second, so that index entries deduplicate.
 */
#define IDEM_NO_KEY_TIME DT_NOBEGIN

/* Whether a claim of a key of that time may have been made and forgotten */
extern bool idem_may_be_forgotten(const IdemPolicy *policy,
								  TimestampTz key_time);

extern TimestampTz idem_whole_second(TimestampTz time);	/* rounds up */

extern TimestampTz idem_remembered_until(const IdemPolicy *policy,
										 TimestampTz key_time);

/* Days and time of an interval in microseconds; months are the caller's to
 * refuse. */
extern int64 idem_interval_us(const Interval *interval);

#endif							/* IDEM_POLICY_H */
