/*
 * settle.c
 *	  How a key ends: complete, fail, heal.
 *
 * A transactional claim is a completed row from the start.  Settling it stores a response
 * in the row, or turns it into a failure.
 *
 * The token stays in the row of a settled lease: it tells a repeat by the holder from an
 * attempt by anybody else.  The holder of a lease that somebody healed is told that the
 * request is completed, not that its lease is lost.
 */
#include "postgres.h"

#include "utils/jsonb.h"

#include "protocol/find_row.h"
#include "protocol/settle.h"
#include "session/own_claims.h"
#include "shared/stats.h"

PG_FUNCTION_INFO_V1(idem_complete_held);
PG_FUNCTION_INFO_V1(idem_complete);
PG_FUNCTION_INFO_V1(idem_fail_held);
PG_FUNCTION_INFO_V1(idem_fail);
PG_FUNCTION_INFO_V1(idem_heal);

static bool
equal_results(const Jsonb *a, const Jsonb *b)
{
	if (a == NULL || b == NULL)
		return a == b;
	return compareJsonbContainers((JsonbContainer *) &a->root,
								  (JsonbContainer *) &b->root) == 0;
}

/* False: another transaction has the row locked or changed it; nothing is written. */
static bool
write_settled(IdemRowCall *call, const IdemPolicy *policy, IdemState state,
			  const Jsonb *result)
{
	const IdemRow *old = &call->found.row;
	IdemRow		row = *old;

	Assert(state != IDEM_STATE_IN_PROGRESS);
	row.state = state;
	row.result = (const IdemStored *) result;
	row.expires_at = Max(row.expires_at,
						 idem_remembered_until(policy, IDEM_NO_KEY_TIME));

	/* A transactional claim that is completed without a result is in its row already. */
	if (row.state == old->state && row.result == NULL && old->result == NULL &&
		row.expires_at == old->expires_at)
		return true;
	return idem_store_update(&call->key, &call->found, &row);
}

/* Whether a row that is settled was settled in this way */
static bool
is_repeat(const IdemRow *row, IdemState state, const Jsonb *result)
{
	return row->state == state &&
		(row->healed ||
		 equal_results(idem_stored_jsonb(row->result), result));
}

bool
idem_settle(const char *command, IdemRowCall *call, IdemState state,
			Jsonb *result)
{
	IdemPolicy	policy;
	const IdemRow *row = &call->found.row;
	bool		unsettled = idem_own_is_unsettled(&call->key);

	idem_store_open(command);
	policy = idem_policy(call->key.scope);
	idem_check_size(&call->key, &policy, result, "result");
	for (;;)
	{
		idem_find_row_of_holder(call);
		/* The row of a transactional claim is completed from the start. */
		if (row->state != IDEM_STATE_IN_PROGRESS &&
			!(unsettled && row->token == 0))
		{
			if (is_repeat(row, state, result))
				return false;
			idem_raise_lost(&call->key,
							"request is settled already, in another way",
							"Settle a request once; a repeat must be identical.");
		}
		if (write_settled(call, &policy, state, result))
			break;
		idem_wait_for_row_or_raise(call);
	}
	if (row->token != 0)
		idem_commit_lease(&call->key);
	idem_own_note_settled(&call->key, result);
	return true;
}

static Jsonb *
result_from_arg(FunctionCallInfo fcinfo, int arg)
{
	return PG_ARGISNULL(arg) ? NULL : PG_GETARG_JSONB_P(arg);
}

/* Arguments: result. */
static bool
settle_held(FunctionCallInfo fcinfo, const char *command, IdemState state)
{
	IdemRowCall	call = {.key = *idem_own_only_unsettled(command)};

	return idem_settle(command, &call, state, result_from_arg(fcinfo, 0));
}

/* Arguments: user_id, request_id, result, token, scope. */
static bool
settle_named(FunctionCallInfo fcinfo, const char *command, IdemState state)
{
	IdemRowCall	call = {0};

	idem_key_from_args(fcinfo, 0, 1, 4, &call.key);
	call.token = idem_token_from_arg(fcinfo, 3);
	return idem_settle(command, &call, state, result_from_arg(fcinfo, 2));
}

/* idem_complete(result) -> boolean */
Datum
idem_complete_held(PG_FUNCTION_ARGS)
{
	PG_RETURN_BOOL(settle_held(fcinfo, "idem_complete()",
							   IDEM_STATE_COMPLETED));
}

/* idem_complete(user_id, request_id, result, token, scope) -> boolean */
Datum
idem_complete(PG_FUNCTION_ARGS)
{
	PG_RETURN_BOOL(settle_named(fcinfo, "idem_complete()",
								IDEM_STATE_COMPLETED));
}

/* idem_fail(error) -> boolean */
Datum
idem_fail_held(PG_FUNCTION_ARGS)
{
	PG_RETURN_BOOL(settle_held(fcinfo, "idem_fail()", IDEM_STATE_FAILED));
}

/* idem_fail(user_id, request_id, error, token, scope) -> boolean */
Datum
idem_fail(PG_FUNCTION_ARGS)
{
	PG_RETURN_BOOL(settle_named(fcinfo, "idem_fail()", IDEM_STATE_FAILED));
}

/* Finds a row that is not failed; raises ID410 otherwise.  False: it is completed. */
static bool
find_to_heal(IdemRowCall *call)
{
	if (!idem_find_row(call))
		idem_raise_no_request(&call->key);
	if (call->found.row.state == IDEM_STATE_FAILED)
		idem_raise_lost(&call->key, "request has failed for good",
						"The request has already failed; use a new id, or idem_forget().");
	return call->found.row.state == IDEM_STATE_IN_PROGRESS;
}

/* idem_heal(user_id, request_id, result, scope) -> boolean */
Datum
idem_heal(PG_FUNCTION_ARGS)
{
	Jsonb	   *result = result_from_arg(fcinfo, 2);
	IdemRowCall	call = {0};
	IdemPolicy	policy;
	bool		healed;

	idem_key_from_args(fcinfo, 0, 1, 3, &call.key);
	idem_store_open("idem_heal()");
	policy = idem_policy(call.key.scope);
	idem_check_size(&call.key, &policy, result, "result");
	while ((healed = find_to_heal(&call)))
	{
		call.found.row.healed = true;
		if (write_settled(&call, &policy, IDEM_STATE_COMPLETED, result))
			break;
		idem_wait_for_row_or_raise(&call);
	}
	if (healed)
	{
		idem_commit_lease(&call.key);
		idem_own_note_settled(&call.key, result);
		idem_stats_count_at_commit(IDEM_COUNT_HEALED);
	}
	PG_RETURN_BOOL(healed);
}
