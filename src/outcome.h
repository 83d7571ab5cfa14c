/*
 * outcome.h
 *	  What a request can be, and what a claim can be answered.
 */
#ifndef IDEM_OUTCOME_H
#define IDEM_OUTCOME_H

/* Labels of the type idem_state, in its order */
typedef enum IdemState
{
	IDEM_STATE_IN_PROGRESS,
	IDEM_STATE_COMPLETED,
	IDEM_STATE_FAILED
} IdemState;

#define IDEM_STATE_COUNT	(IDEM_STATE_FAILED + 1)

/* Labels of the type idem_outcome, in its order */
typedef enum IdemOutcome
{
	IDEM_CLAIMED,
	IDEM_COMPLETED,
	IDEM_FAILED,
	IDEM_IN_PROGRESS,
	IDEM_TIMED_OUT,
	IDEM_UNKNOWN,
	IDEM_MISMATCH,
	IDEM_STALE,
	IDEM_INVALID
} IdemOutcome;

#define IDEM_OUTCOME_COUNT	(IDEM_INVALID + 1)

#endif							/* IDEM_OUTCOME_H */
