/*
 * claim.h
 *	  The protocol, for a call with one key or with many.
 */
#ifndef IDEM_PROTOCOL_CLAIM_H
#define IDEM_PROTOCOL_CLAIM_H

#include "protocol/blocked_by.h"
#include "session/wait.h"
#include "store/policy.h"
#include "store/store.h"

typedef struct IdemClaimCall
{
	/* The caller's to set, before the first key */
	IdemKey		key;
	bytea	   *fingerprint;	/* NULL: none */
	int64		lease_us;		/* 0: a transactional claim */
	Jsonb	   *progress;		/* of a lease; NULL: none */
	bool		tells_progress; /* the SQL call returns the progress of the holder whose
								 * lapsed lease it takes over */
	IdemDeadline deadline;
	bool		settled_at_once;	/* a marker that this transaction does not hold:
									 * neither the claim nor its answer is noted */
	const FmgrInfo *place;		/* of the SQL call, which must not claim the key that the
								 * statement has claimed elsewhere; NULL: it may */

	/* claim.c's, zero at first */
	bool		has_policy;		/* policy is set, and was not given up */
	bool		is_refused;		/* a change of a promise took longer than the deadline */
	bool		has_stepped_back;	/* the table's lock was given back before a sleep */
	IdemPolicy	policy;
	TimestampTz key_time;		/* IDEM_NO_KEY_TIME: has none */
} IdemClaimCall;

typedef struct IdemClaimAnswer
{
	IdemOutcome outcome;
	Jsonb	   *result;
	Jsonb	   *progress;		/* the holder's; claimed: the earlier holder's */
	int64		token;			/* claimed lease; else 0 */
	TimestampTz expires_at;		/* IDEM_NO_TIME: none */
	TimestampTz lease_until;	/* the same */
	IdemBlockedBy blocked_by;		/* of in_progress and timed_out, for idem_raise_outcome() */
} IdemClaimAnswer;

/*
 * Claims one key.  Raises no outcome, but ID400 for a key whose time is not as the scope's
 * policy wants it; the caller has checked the other arguments.  command names the caller for
 * errors.
 */
extern void idem_claim_one(IdemClaimCall *call, const char *command,
						   IdemClaimAnswer *answer);

/* One of many keys */
typedef struct IdemClaimItem
{
	IdemKey		key;
	bytea	   *fingerprint;	/* NULL: none */
	int			ordinal;		/* the caller's */
} IdemClaimItem;

/*
 * Claims the first of the items, and those after it for as long as their keys are free.
 * Returns how many it answered: 1 to IDEM_INSERT_MANY_MAX.  The items are in the order of
 * idem_store_compare_keys().  Before the first call, call idem_store_open().
 *
 * The caller has checked the arguments; this checks what the scope's policy says of them.
 * The outcome IDEM_INVALID means that the key's time is not as the policy wants it; it is
 * not counted in the statistics.  What the answers point to is palloc'd.
 */
extern int idem_claim_first_keys(IdemClaimCall *call, const IdemClaimItem *items,
								 int nitems, IdemClaimAnswer *answers);

/*
 * To be called after the last key.  It may also come between two keys: it lets changes of
 * idem_scopes through that wait for this call, and the next key goes by the new policy.
 */
extern void idem_claim_end(IdemClaimCall *call);

/*
 * Claims a marker that is settled at once.  The short forms idem_complete(), idem_result()
 * and their like do not see it, and it takes no memory of the transaction.  Waits for
 * idem.wait.  true: claimed; false: completed before; any other outcome is raised.  command
 * names the caller for errors.  The caller has checked the ids.
 */
extern bool idem_claim_marker(const IdemKey *key, const char *command);

/* SQL functions, for ids.c */
extern Datum idem_try_claim(PG_FUNCTION_ARGS);
extern Datum idem_lease(PG_FUNCTION_ARGS);

#endif							/* IDEM_PROTOCOL_CLAIM_H */
