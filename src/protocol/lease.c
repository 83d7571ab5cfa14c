/*
 * lease.c
 *	  Holding a lease: extend, release, fence.
 *
 * The token decides, never the clock: the holder of a lease that lapsed still holds it
 * until another claim takes it over.  After that each function here raises ID410 for the
 * old token, and writes nothing.
 */
#include "postgres.h"

#include "access/xact.h"
#include "utils/timestamp.h"

#include "sqlstate.h"
#include "protocol/find_row.h"
#include "session/own_claims.h"

PG_FUNCTION_INFO_V1(idem_extend);
PG_FUNCTION_INFO_V1(idem_release);
PG_FUNCTION_INFO_V1(idem_fence);

/* user_id, request_id, token at 0 to 2; the scope at its own position */
static IdemRowCall
read_call(FunctionCallInfo fcinfo, int scope_arg)
{
	IdemRowCall	call = {0};

	idem_key_from_args(fcinfo, 0, 1, scope_arg, &call.key);
	call.token = idem_token_from_arg(fcinfo, 2);
	if (call.token == 0)
		ereport(ERROR,
				(errcode(ERRCODE_IDEM_INVALID),
				 errmsg("token must not be null"),
				 errhint("Fix the client: pass the token that idem_lease() returned with the lease.")));
	return call;
}

static void
require_unsettled(const IdemRowCall *call)
{
	if (call->found.row.state != IDEM_STATE_IN_PROGRESS)
		idem_raise_lost(&call->key, "lease is settled",
						"Stop, and roll back: the request is completed or failed.");
}

/* Finds the row of the holder's unsettled lease, or raises ID410. */
static void
find_lease(IdemRowCall *call)
{
	idem_find_row_of_holder(call);
	require_unsettled(call);
}

/*
 * idem_extend(user_id, request_id, token, lease, progress, scope) -> timestamptz
 *
 * From now on the lease lasts that long; NULL: as long as the scope says, or longer if it does
 * already.  Returns when it ends.
 */
Datum
idem_extend(PG_FUNCTION_ARGS)
{
	int64		lease_us = idem_lease_from_arg(fcinfo, 3);
	Jsonb	   *progress = PG_ARGISNULL(4) ? NULL : PG_GETARG_JSONB_P(4);
	IdemRowCall	call = read_call(fcinfo, 5);
	IdemRow    *row = &call.found.row;
	IdemPolicy	policy;
	TimestampTz lease_until;

	idem_store_open("idem_extend()");
	policy = idem_policy(call.key.scope);
	idem_check_lease(&call.key, &policy, lease_us);
	idem_check_size(&call.key, &policy, progress, "progress");
	for (;;)
	{
		find_lease(&call);
		lease_until = GetCurrentTimestamp() +
			(lease_us > 0 ? lease_us : policy.lease_us);
		row->lease_until = lease_us > 0 ? lease_until :
			Max(row->lease_until, lease_until);
		row->expires_at = Max(row->expires_at, row->lease_until);
		if (progress != NULL)
			row->progress = (const IdemStored *) progress;
		if (idem_store_update(&call.key, &call.found, row))
			break;
		idem_wait_for_row_or_raise(&call);
	}
	/* Progress tells what was done elsewhere: a crash must not lose it. */
	if (progress != NULL)
		ForceSyncCommit();
	PG_RETURN_TIMESTAMPTZ(row->lease_until);
}

/*
 * idem_release(user_id, request_id, token, scope) -> boolean
 *
 * The next waiter claims.  Forgets the progress: the holder has undone what it stands for.
 * false: there is no row, as after an earlier release.
 */
Datum
idem_release(PG_FUNCTION_ARGS)
{
	IdemRowCall	call = read_call(fcinfo, 3);
	bool		there;

	idem_store_open("idem_release()");
	while ((there = idem_find_row(&call)))
	{
		if (call.found.row.token != call.token)
			idem_raise_lost_lease(&call.key);
		require_unsettled(&call);
		if (idem_store_delete(&call.found))
			break;
		idem_wait_for_row_or_raise(&call);
	}
	if (there)
	{
		idem_own_note_settled(&call.key, NULL);
		idem_commit_lease(&call.key);
	}
	PG_RETURN_BOOL(there);
}

/*
 * idem_fence(user_id, request_id, token, scope) -> void
 *
 * Locks the row: until this transaction ends, no other claim can take the lease over.
 */
Datum
idem_fence(PG_FUNCTION_ARGS)
{
	IdemRowCall	call = read_call(fcinfo, 3);

	idem_store_open("idem_fence()");
	find_lease(&call);
	while (!idem_store_lock_row(&call.found.ref))
	{
		idem_wait_for_row_or_raise(&call);
		find_lease(&call);
	}
	PG_RETURN_VOID();
}
