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

#include "guc.h"
#include "sqlstate.h"
#include "protocol/holder.h"
#include "session/held.h"

PG_FUNCTION_INFO_V1(idem_extend);
PG_FUNCTION_INFO_V1(idem_release);
PG_FUNCTION_INFO_V1(idem_fence);

/* user_id, request_id, token at 0 to 2; the scope at its own position */
static IdemHolder
read_holder(FunctionCallInfo fcinfo, int scope_arg)
{
	IdemHolder	holder = {.deadline = idem_deadline_after(idem_wait)};

	idem_key_from_args(fcinfo, 0, 1, scope_arg, &holder.key);
	holder.token = idem_token_from_arg(fcinfo, 2);
	if (holder.token == 0)
		ereport(ERROR,
				(errcode(ERRCODE_IDEM_INVALID),
				 errmsg("token must not be null"),
				 errhint("Fix the client: pass the token that idem_lease() returned with the lease.")));
	return holder;
}

static void
require_unsettled(const IdemHolder *holder)
{
	if (holder->found.row.state != IDEM_STATE_IN_PROGRESS)
		idem_raise_lost(&holder->key, "lease is settled",
						"Stop, and roll back: the request is completed or failed.");
}

/* Finds the row of the holder's unsettled lease, or raises ID410. */
static void
find_lease(IdemHolder *holder)
{
	idem_find_row_of_holder(holder);
	require_unsettled(holder);
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
	IdemHolder	holder = read_holder(fcinfo, 5);
	IdemRow    *row = &holder.found.row;
	IdemPolicy	policy;
	TimestampTz lease_until;

	idem_store_open("idem_extend()");
	policy = idem_policy(holder.key.scope);
	idem_check_lease(&holder.key, &policy, lease_us);
	idem_check_size(&holder.key, &policy, progress, "progress");
	for (;;)
	{
		find_lease(&holder);
		lease_until = GetCurrentTimestamp() +
			(lease_us > 0 ? lease_us : policy.lease_us);
		row->lease_until = lease_us > 0 ? lease_until :
			Max(row->lease_until, lease_until);
		row->expires_at = Max(row->expires_at, row->lease_until);
		if (progress != NULL)
			row->progress = (const IdemStored *) progress;
		if (idem_store_update(&holder.key, &holder.found, row))
			break;
		idem_wait_for_row_or_raise(&holder);
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
	IdemHolder	holder = read_holder(fcinfo, 3);
	bool		there;

	idem_store_open("idem_release()");
	while ((there = idem_find_row(&holder)))
	{
		if (holder.found.row.token != holder.token)
			idem_raise_lost_lease(&holder.key);
		require_unsettled(&holder);
		if (idem_store_delete(&holder.found))
			break;
		idem_wait_for_row_or_raise(&holder);
	}
	if (there)
	{
		idem_held_note_settled(&holder.key, NULL);
		idem_commit_lease(&holder.key);
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
	IdemHolder	holder = read_holder(fcinfo, 3);

	idem_store_open("idem_fence()");
	find_lease(&holder);
	while (!idem_store_lock_row(&holder.found.ref))
	{
		idem_wait_for_row_or_raise(&holder);
		find_lease(&holder);
	}
	PG_RETURN_VOID();
}
