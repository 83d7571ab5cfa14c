/*
 * claim.h
 *	  The protocol, for callers that bring their arguments in another way.
 */
#ifndef IDEM_CLAIM_H
#define IDEM_CLAIM_H

#include "policy.h"
#include "store.h"
#include "wait.h"

typedef struct IdemClaimCall
{
	/* The caller's to set, before the first key */
	IdemKey		key;
	bytea	   *fingerprint;	/* NULL: none */
	int64		lease_us;		/* 0: a transactional claim */
	Jsonb	   *progress;		/* of a lease; NULL: none */
	IdemDeadline deadline;

	/* claim.c's, zero at first */
	bool		has_policy;
	bool		is_refused;		/* somebody changes a promise, and it would not wait */
	IdemPolicy	policy;
	TimestampTz key_time;		/* IDEM_NO_KEY_TIME: has none */
} IdemClaimCall;

typedef struct IdemClaimAnswer
{
	IdemOutcome outcome;
	Jsonb	   *result;
	Jsonb	   *progress;		/* of the holder; claimed: of the one before */
	int64		token;			/* claimed lease; else 0 */
	TimestampTz expires_at;		/* IDEM_NO_TIME: none */
	TimestampTz lease_until;	/* the same */
} IdemClaimAnswer;

/*
 * To be called after the last key.  It may also come between two keys: it lets changes of
 * idem_scopes through that wait for this call, and the next key goes by what they have
 * left.  Before the first key, call idem_store_open().
 */
extern void idem_claim_end(IdemClaimCall *call);

/* One of many keys */
typedef struct IdemClaimItem
{
	IdemKey		key;
	bytea	   *fingerprint;	/* NULL: none */
	int			ordinal;		/* the caller's */
} IdemClaimItem;

/*
 * Claims the key; the caller has checked the arguments, but for what the scope's
 * policy says of them: IDEM_INVALID says that the key's time is not as it wants,
 * and is not counted; progress over the cap raises ID413.  What
 * the answer points to is palloc'd.
 */
extern void idem_claim_key(IdemClaimCall *call, IdemClaimAnswer *answer);

/*
 * Claims the first of items, and the ones after it for as long as nobody has them, and
 * returns how many it answered: 1 at least, nitems at most.  They come in the order of
 * the primary key.
 */
extern int idem_claim_first_keys(IdemClaimCall *call, const IdemClaimItem *items,
								 int nitems, IdemClaimAnswer *answers);

#define IDEM_CLAIM_FIRST_MAX IDEM_INSERT_MANY_MAX

#endif							/* IDEM_CLAIM_H */
