/*
 * call.c
 *	  idem_call(): claims a request, runs a function, and stores its result, in one
 *	  statement.
 *
 * Exactly the key of this call is settled afterwards, whatever the function has claimed
 * itself.  If the function has settled the key already, what it stored is the result.  Then
 * idem_outcome() and idem_result() speak of this call again.
 */
#include "postgres.h"

#include "fmgr.h"

#include "sqlstate.h"
#include "protocol/claim.h"
#include "protocol/raise.h"
#include "protocol/settle.h"
#include "protocol/target.h"
#include "session/own_claims.h"

#define COMMAND "idem_call()"

/* The caller has passed no fingerprint: say what differs. */
static const char *const mismatch_hint =
"The first call had another function or other arguments. A retry must send the same, also 30 and not \"30\"; only a new request takes a new id.";

PG_FUNCTION_INFO_V1(idem_call);

/* Looked up by the caller's search_path, at each execution: a plan keeps no function that was
 * dropped or renamed. */
static Oid
function_from_arg(FunctionCallInfo fcinfo, int arg)
{
	if (PG_ARGISNULL(arg))
		ereport(ERROR,
				(errcode(ERRCODE_IDEM_INVALID),
				 errmsg("function must not be null"),
				 errhint("Fix the client: pass its name and argument types, 'pay(int, numeric)'.")));
	return idem_named_function(PG_GETARG_TEXT_PP(arg));
}

static Jsonb *
object_from_arg(FunctionCallInfo fcinfo, int arg)
{
	Jsonb	   *object = PG_ARGISNULL(arg) ? NULL : PG_GETARG_JSONB_P(arg);

	if (object == NULL || !JB_ROOT_IS_OBJECT(object))
		ereport(ERROR,
				(errcode(ERRCODE_IDEM_INVALID),
				 object == NULL ? errmsg("arguments must not be null") :
				 errmsg("arguments must be a JSON object"),
				 errhint("Fix the client: pass the arguments of the function by their names, {\"amount\": 30}; {} for none.")));
	return object;
}

/* Settles the key, unless the function has done so, and returns what is stored. */
static Jsonb *
finish(const IdemKey *key, Jsonb *result)
{
	IdemRowCall	call = {.key = *key};
	IdemOutcome outcome = IDEM_CLAIMED;

	if (idem_own_is_unsettled(key))
		(void) idem_settle(COMMAND, &call, IDEM_STATE_COMPLETED, result);
	else
	{
		idem_store_open(COMMAND);
		idem_find_row_of_holder(&call);
		result = idem_stored_jsonb(call.found.row.result);
		if (call.found.row.state == IDEM_STATE_FAILED)
			outcome = IDEM_FAILED;
	}
	idem_own_note_answer(key, outcome, result, false);
	return result;
}

/*
 * idem_call(user_id, request_id, function, arguments, scope, wait) -> jsonb
 *
 * The result of the function, or what is stored of an earlier execution.  Outcomes other than
 * claimed and completed raise.
 */
Datum
idem_call(PG_FUNCTION_ARGS)
{
	IdemClaimCall call = {0};
	IdemClaimAnswer answer;
	IdemTarget	target;
	Oid			function = function_from_arg(fcinfo, 2);
	Jsonb	   *arguments = object_from_arg(fcinfo, 3);
	Jsonb	   *result;

	target = idem_target(function);
	idem_target_check_names(&target, arguments);
	call.deadline = idem_deadline_from_arg(fcinfo, 5);
	idem_key_from_args(fcinfo, 0, 1, 4, &call.key);
	call.fingerprint = idem_target_fingerprint(&target, arguments);

	idem_claim_one(&call, COMMAND, &answer);
	if (answer.outcome != IDEM_CLAIMED && answer.outcome != IDEM_COMPLETED)
		idem_raise_outcome(answer.outcome, &call.key, &answer.blocked_by,
						   answer.outcome == IDEM_MISMATCH ? mismatch_hint : NULL);
	/* Otherwise a function that calls itself would be recorded as executed. */
	if (answer.outcome == IDEM_COMPLETED && idem_own_is_unsettled(&call.key))
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("%s: this transaction has claimed the request already, and not settled it",
						COMMAND),
				 idem_errdetail_key(&call.key),
				 errhint("Do not claim the request before the call. The function that it runs must use another scope for calls of its own.")));
	result = answer.outcome == IDEM_COMPLETED ? answer.result :
		finish(&call.key, idem_target_run(&target, arguments));
	if (result == NULL)
		PG_RETURN_NULL();
	PG_RETURN_JSONB_P(result);
}
