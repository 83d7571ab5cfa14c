/*
 * held.h
 *	  What this transaction has claimed so far.
 */
#ifndef IDEM_HELD_H
#define IDEM_HELD_H

#include "utils/jsonb.h"

#include "catalog.h"
#include "key.h"

/* The latest claim call, as of the savepoints that survive */
typedef struct IdemLatest
{
	IdemOutcome outcome;
	Jsonb	   *result;			/* NULL: none */
} IdemLatest;

extern void idem_held_init(void);

/*
 * Record the answer of a claim call: the key is claimed by this transaction and not
 * settled; or the outcome was another one.  ours: this transaction already held the key.
 * Both copy what they keep.
 */
extern void idem_held_note_claimed(const IdemKey *key);
extern void idem_held_note_answer(const IdemKey *key, IdemOutcome outcome,
								  const Jsonb *result, bool ours);

/* The key was settled with result; or its row was dropped, with NULL. */
extern void idem_held_note_settled(const IdemKey *key, const Jsonb *result);

/* Claimed the key and has not settled it */
extern bool idem_held_is_unsettled(const IdemKey *key);

/* The key of the only one that is not settled; raises 55000 if there is none,
 * or more than one. */
extern const IdemKey *idem_held_only_unsettled(const char *command);

/* NULL: no claim call in this transaction */
extern const IdemLatest *idem_held_latest(void);

#endif							/* IDEM_HELD_H */
