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
	IdemKey		key;
	bytea	   *fingerprint;	/* NULL: none */
	int64		lease_us;		/* 0: a transactional claim */
	Jsonb	   *progress;		/* of a lease; NULL: none */
	IdemDeadline deadline;
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

/* How far a scope's rule on the time of keys is kept */
typedef enum IdemKeyTimeCheck
{
	IDEM_KEY_TIME_OK,
	IDEM_KEY_TIME_MALFORMED,
	IDEM_KEY_TIME_AHEAD
} IdemKeyTimeCheck;

/* Sets key_time from the key, as the policy asks for. */
extern IdemKeyTimeCheck idem_claim_check_key_time(IdemClaimCall *call);

/* Claims the key; the caller has checked the arguments, after idem_store_open().
 * What the answer points to is palloc'd. */
extern void idem_claim_key(IdemClaimCall *call,
						   IdemClaimAnswer *answer);

#endif							/* IDEM_CLAIM_H */
