/*
 * find_row.c
 *	  The row of a holder, found and checked: what claim.c, settle.c and lease.c share.
 *
 * Only the row tells who holds a key; memory and the clock do not:
 *
 * - a transactional claim is held by the transaction that wrote its row;
 * - a lease is held by the caller that knows the token in its row.  The holder of a lease
 *	 that lapsed can still settle it, until another claim takes it over: that claim replaces
 *	 the token.
 */
#include "postgres.h"

#include "access/xact.h"
#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/numeric.h"
#include "utils/timestamp.h"

#include "sqlstate.h"
#include "protocol/find_row.h"
#include "protocol/raise.h"
#include "shared/stats.h"
#include "store/duration.h"

/* ----- arguments ----- */

int64
idem_token_from_arg(FunctionCallInfo fcinfo, int arg)
{
	if (PG_ARGISNULL(arg))
		return 0;
	if (PG_GETARG_INT64(arg) <= 0)
		ereport(ERROR,
				(errcode(ERRCODE_IDEM_INVALID),
				 errmsg("token must be positive"),
				 errhint("Fix the client: pass the token that idem_lease() returned with the lease.")));
	return PG_GETARG_INT64(arg);
}

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
	return numeric_normalize(int64_div_fast_to_numeric(us, 6));
}

void
idem_check_lease(const IdemKey *key, const IdemPolicy *policy, int64 lease_us)
{
	Assert(lease_us >= 0);
	if (lease_us > policy->lease_max_us)
		ereport(ERROR,
				(errcode(ERRCODE_IDEM_INVALID),
				 errmsg("lease of %s s is longer than the scope allows, %s s",
						seconds(lease_us), seconds(policy->lease_max_us)),
				 idem_errdetail_key(key),
				 errhint("Extend it while the work goes on, or have the operator raise idem.lease_max or the scope's lease_max.")));
}

void
idem_check_size(const IdemKey *key, const IdemPolicy *policy,
				const Jsonb *value, const char *name)
{
	if (value != NULL && VARSIZE(value) - VARHDRSZ > policy->result_max_bytes)
		ereport(ERROR,
				(errcode(ERRCODE_IDEM_TOO_LARGE),
				 errmsg("%s has %zu bytes, the limit is %d", name,
						(size_t) (VARSIZE(value) - VARHDRSZ),
						policy->result_max_bytes),
				 idem_errdetail_key(key),
				 errhint("Store a reference to it, or have the operator raise idem.result_max_bytes or the scope's result_max_bytes.")));
}

/* ----- errors ----- */

void
idem_raise_lost(const IdemKey *key, const char *message, const char *hint)
{
	ereport(ERROR,
			(errcode(ERRCODE_IDEM_LOST),
			 errmsg("%s", message),
			 idem_errdetail_key(key),
			 errhint("%s", hint)));
}

void
idem_raise_lost_lease(const IdemKey *key)
{
	idem_stats_count(IDEM_COUNT_LOST_LEASES, 1);
	idem_raise_lost(key, "lease is lost",
					"Stop, and roll back: another holder has the request. Or the token is wrong.");
}

void
idem_raise_no_request(const IdemKey *key)
{
	idem_raise_lost(key,
					psprintf("there is no such request in scope \"%s\"",
							 text_to_cstring(key->scope)),
					"Check the scope and the ids in DETAIL. If they are right, the request was released or dropped: stop, and roll back.");
}

IdemOutcome
idem_outcome_of_passed(const IdemDeadline *deadline)
{
	return deadline->wait_us == 0 ? IDEM_IN_PROGRESS : IDEM_TIMED_OUT;
}

/* ----- the row ----- */

/* Waits for the transaction that was found. */
static void
wait_or_raise(IdemRowCall *call)
{
	IdemBlockedBy blocked_by = {.xid = call->found.xid};

	if (call->deadline.at_us == 0)
	{
		call->deadline = idem_deadline_from_setting();
		idem_deadline_begin(&call->deadline);
	}
	if (idem_wait_for_transaction(&call->key, call->found.xid,
								  call->found.speculative,
								  &call->deadline))
		return;
	idem_store_note_read(&call->key);
	idem_raise_outcome(idem_outcome_of_passed(&call->deadline),
					   &call->key, &blocked_by, NULL);
}

bool
idem_find_row(IdemRowCall *call)
{
	for (;;)
	{
		CHECK_FOR_INTERRUPTS();
		switch (idem_store_probe(&call->key, false, &call->found))
		{
			case IDEM_PROBE_PRESENT:
				return true;
			case IDEM_PROBE_GUESSED_ABSENT:
			case IDEM_PROBE_ABSENT:
				if (idem_store_is_absent(&call->key))
					return false;
				break;
			case IDEM_PROBE_INSERTING:
			case IDEM_PROBE_UPDATING:
			case IDEM_PROBE_DELETING:
				wait_or_raise(call);
				break;
		}
	}
}

bool
idem_find_locker(IdemFound *found)
{
	found->xid = idem_store_row_locker(&found->ref);
	found->speculative = 0;
	return TransactionIdIsValid(found->xid);
}

void
idem_wait_for_row_or_raise(IdemRowCall *call)
{
	if (idem_find_locker(&call->found))
		wait_or_raise(call);
}

void
idem_find_row_of_holder(IdemRowCall *call)
{
	Assert(call->token >= 0);
	if (call->token == 0)
	{
		/* A row that another transaction is writing is not ours: no need to wait for it. */
		if (!idem_store_find_ours(&call->key, &call->found))
			idem_raise_lost(&call->key,
							"request is not held by this transaction",
							"Settle a request in the transaction that claimed it, between BEGIN and COMMIT, or pass the token of its lease. Or the scope or an id in DETAIL is wrong.");
	}
	else if (!idem_find_row(call))
		idem_raise_no_request(&call->key);
	else if (call->found.row.token != call->token)
		idem_raise_lost_lease(&call->key);
}

void
idem_commit_lease(const IdemKey *key)
{
	ForceSyncCommit();
	idem_wake_at_commit(key);
}
