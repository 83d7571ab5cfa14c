/*
 * raise.c
 *	  What a claim call raises for each outcome.  Each SQLSTATE tells the client to do one
 *	  thing, which the hint names.
 */
#include "postgres.h"

#include "sqlstate.h"
#include "protocol/raise.h"

typedef struct OutcomeError
{
	int			sqlstate;
	const char *message;
	const char *hint;
} OutcomeError;

static const OutcomeError outcome_errors[IDEM_OUTCOME_COUNT] = {
	[IDEM_FAILED] = {
		ERRCODE_IDEM_FAILED,
		"request has failed for good",
		"Do not retry it: use a new request id. idem_result(user_id, request_id, scope) has the stored error."
	},
	[IDEM_IN_PROGRESS] = {
		ERRCODE_IDEM_IN_PROGRESS,
		"request is being executed",
		"Retry the same request later."
	},
	[IDEM_TIMED_OUT] = {
		ERRCODE_IDEM_TIMED_OUT,
		"request is still being executed after the wait",
		"Retry the same request later."
	},
	[IDEM_UNKNOWN] = {
		ERRCODE_IDEM_UNKNOWN,
		"request's lease lapsed, and whether it was executed is unknown",
		"Do not retry it: find out (idem_lookup() shows the progress), then settle it with idem_heal(), or drop it with idem_forget()."
	},
	[IDEM_MISMATCH] = {
		ERRCODE_IDEM_MISMATCH,
		"request id was used before with another fingerprint",
		"A retry must send the same parameters and keep its id: with a new id it is executed again. Only another request takes a new id."
	},
	[IDEM_STALE] = {
		ERRCODE_IDEM_STALE,
		"request id is too old to tell whether it was executed",
		"Check the state, then use a new request id. For a minute after uuidv7 was switched on, or the scope's ttl grew, new ids are stale too."
	}
};

void
idem_raise_outcome(IdemOutcome outcome, const IdemKey *key,
				   const IdemBlockedBy *blocked_by, const char *hint)
{
	const OutcomeError *error = &outcome_errors[outcome];

	Assert(error->message != NULL);
	ereport(ERROR,
			(errcode(error->sqlstate),
			 errmsg("%s", error->message),
			 idem_errdetail_key_and(key, idem_blocked_by_to_string(blocked_by)),
			 errhint("%s", hint != NULL ? hint : error->hint)));
}
