/*
 * own_claims.h
 *	  What this transaction has claimed so far.
 */
#ifndef IDEM_SESSION_OWN_CLAIMS_H
#define IDEM_SESSION_OWN_CLAIMS_H

#include "fmgr.h"
#include "utils/jsonb.h"

#include "outcome.h"
#include "store/key.h"

/* The answer of the latest claim call that was not rolled back */
typedef struct IdemLatest
{
	IdemOutcome outcome;
	Jsonb	   *result;			/* NULL: none */
} IdemLatest;

extern void idem_own_claims_init(void);

/*
 * Record the answer of a claim call.  The first: this transaction has claimed the key.  The
 * second: any other outcome, or "claimed" for a key that was settled since; ours: this
 * transaction already held the key.  Both copy what they keep.  place: see below.
 */
extern void idem_own_note_claimed(const IdemKey *key, const FmgrInfo *place);
extern void idem_own_note_answer(const IdemKey *key, IdemOutcome outcome,
								  const Jsonb *result, bool ours);

/* Records that the key was settled with the result, or, with NULL, that its row was
 * dropped. */
extern void idem_own_note_settled(const IdemKey *key, const Jsonb *result);

/* Whether this transaction claimed the key and has not settled it */
extern bool idem_own_is_unsettled(const IdemKey *key);

/*
 * Whether the statement that now runs has claimed the key from another place in it, and has not
 * settled it.
 *	- A place is the FmgrInfo of the call.  Each call that is written in a statement has its own,
 *	  and so has a call that the server evaluates once more, since another transaction has changed
 *	  the row (EvalPlanQual).
 *	- A statement is a command id of the active snapshot.  Cursors that are open at the same time
 *	  can have the same one, and so can the statements of a STABLE function: a second claim there
 *	  counts as one of the same statement.
 */
extern bool idem_own_is_claimed_elsewhere(const IdemKey *key,
										   const FmgrInfo *place);

/* The key of the only unsettled claim.  Raises 55000 if there is none, or more than one. */
extern const IdemKey *idem_own_only_unsettled(const char *command);

/* NULL: no claim call in this transaction */
extern const IdemLatest *idem_own_latest_answer(void);

#endif							/* IDEM_SESSION_OWN_CLAIMS_H */
