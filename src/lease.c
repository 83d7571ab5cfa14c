/*
 * lease.c
 *	  Holding a lease: extend, release, fence.
 *
 * The token decides, never the clock: a holder whose lease lapsed and was not
 * taken over still holds it.  One that was superseded is refused (ID410) by every
 * function here, and nothing is written.
 */
#include "postgres.h"

#include "access/xact.h"
#include "miscadmin.h"
#include "utils/timestamp.h"

#include "guc.h"
#include "held.h"
#include "key.h"
#include "lease.h"
#include "policy.h"
#include "settle.h"
#include "sqlstate.h"
#include "store.h"
#include "wait.h"

PG_FUNCTION_INFO_V1(idem_extend);
PG_FUNCTION_INFO_V1(idem_release);
PG_FUNCTION_INFO_V1(idem_fence);

/* NULL: 0 */
int64
idem_lease_from_arg(FunctionCallInfo fcinfo, int arg)
{
	Interval   *lease;

	if (PG_ARGISNULL(arg))
		return 0;
	lease = PG_GETARG_INTERVAL_P(arg);
	if (!idem_is_valid_length(lease))
		ereport(ERROR,
				(errcode(ERRCODE_IDEM_INVALID),
				 errmsg("lease must be positive, at most %d days, and without months",
						IDEM_LENGTH_DAYS_MAX),
				 errhint("Fix the client: give it in seconds or minutes, and extend it while the work goes on.")));
	return idem_interval_us(lease);
}

/* As a decimal number without trailing zeros */
static char *
seconds(int64 us)
{
	char	   *text = psprintf("%lld.%06d", (long long) (us / USECS_PER_SEC),
								(int) (us % USECS_PER_SEC));
	char	   *end = text + strlen(text);

	while (end[-1] == '0')
		*--end = '\0';
	if (end[-1] == '.')
		*--end = '\0';
	return text;
}

void
idem_check_lease(const IdemKey *key, const IdemPolicy *policy, int64 lease_us)
{
	if (lease_us > policy->lease_max_us)
		ereport(ERROR,
				(errcode(ERRCODE_IDEM_INVALID),
				 errmsg("lease of %s s is longer than the scope allows, %s s",
						seconds(lease_us), seconds(policy->lease_max_us)),
				 idem_errdetail_key(key),
				 errhint("Extend it while the work goes on, or have the operator raise idem.lease_max or the scope's lease_max.")));
}

/* user_id, request_id, token at 0 to 2; the scope at its own position */
static void
read_holder(FunctionCallInfo fcinfo, int scope_arg, IdemHolder *holder)
{
	idem_key_from_args(fcinfo, 0, 1, scope_arg, &holder->key);
	holder->token = idem_token_from_arg(fcinfo, 2);
	if (holder->token == 0)
		ereport(ERROR,
				(errcode(ERRCODE_IDEM_INVALID),
				 errmsg("token must not be null"),
				 errhint("Fix the client: pass the token that idem_try_claim() returned with the lease.")));
}

static void
require_unsettled(const IdemHolder *holder, const IdemFound *found)
{
	if (found->row.state != IDEM_STATE_IN_PROGRESS)
		idem_raise_lost(&holder->key, "lease is settled",
						"Stop, and roll back: the request is completed or failed.");
}

/* The row of the holder's lease, not settled; or ID410. */
static void
find_lease(const IdemHolder *holder, IdemFound *found,
		   IdemDeadline *deadline)
{
	idem_find_row_of_holder(holder, found, deadline);
	require_unsettled(holder, found);
}

/*
 * idem_extend(user_id, request_id, token, lease, progress, scope) -> timestamptz
 *
 * The lease ends that long from now; returns when.
 */
Datum
idem_extend(PG_FUNCTION_ARGS)
{
	IdemDeadline deadline = idem_deadline_after(idem_wait);
	int64		lease_us = idem_lease_from_arg(fcinfo, 3);
	Jsonb	   *progress = PG_ARGISNULL(4) ? NULL : PG_GETARG_JSONB_P(4);
	IdemHolder	holder;
	IdemPolicy	policy;
	IdemFound	found;

	read_holder(fcinfo, 5, &holder);
	idem_store_open("idem_extend()");
	policy = idem_policy(holder.key.scope);
	idem_check_lease(&holder.key, &policy, lease_us);
	idem_check_size(&holder.key, &policy, progress, "progress");
	for (;;)
	{
		find_lease(&holder, &found, &deadline);
		found.row.lease_until = GetCurrentTimestamp() +
			(lease_us > 0 ? lease_us : policy.lease_us);
		found.row.expires_at = Max(found.row.expires_at,
								   idem_whole_second(found.row.lease_until));
		if (progress != NULL)
			found.row.progress = (const IdemStored *) progress;
		if (idem_store_update(&holder.key, &found, &found.row))
			break;
		idem_wait_for_row_or_raise(&holder.key, &found, &deadline);
	}
	/* Progress tells of what was made elsewhere: a crash must not lose it. */
	if (progress != NULL)
		ForceSyncCommit();
	PG_RETURN_TIMESTAMPTZ(found.row.lease_until);
}

/*
 * idem_release(user_id, request_id, token, scope) -> boolean
 *
 * The next waiter claims.  Forgets the progress: what it stands for was undone.
 * false: the request is not there, as after a release before.
 */
Datum
idem_release(PG_FUNCTION_ARGS)
{
	IdemDeadline deadline = idem_deadline_after(idem_wait);
	IdemHolder	holder;
	IdemFound	found;
	bool		there;

	read_holder(fcinfo, 3, &holder);
	idem_store_open("idem_release()");
	while ((there = idem_find_settled_down(&holder.key, &found,
										   &deadline)))
	{
		if (found.row.token != holder.token)
			idem_raise_lost_lease(&holder.key);
		require_unsettled(&holder, &found);
		if (idem_store_delete(&found))
			break;
		idem_wait_for_row_or_raise(&holder.key, &found, &deadline);
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
 * Until this transaction ends nobody can take the lease over: what it writes, the
 * holder writes.
 */
Datum
idem_fence(PG_FUNCTION_ARGS)
{
	IdemDeadline deadline = idem_deadline_after(idem_wait);
	IdemHolder	holder;
	IdemFound	found;

	read_holder(fcinfo, 3, &holder);
	idem_store_open("idem_fence()");
	for (;;)
	{
		find_lease(&holder, &found, &deadline);
		if (idem_store_lock_row(&found.tid))
			break;
		idem_wait_for_row_or_raise(&holder.key, &found, &deadline);
	}
	PG_RETURN_VOID();
}
