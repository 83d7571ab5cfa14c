/*
 * claim.c
 *	  The protocol: which outcome a claim has, and why.
 *
 * The order of decisions, the same on every path:
 *
 *	1. arguments;
 *	2. another transaction is inserting, updating or deleting the row: wait for
 *	   it, and look again.  What is not committed says nothing, its fingerprint
 *	   included.  Our own transaction's key is never waited for;
 *	3. an expired row of a scope with expired = reclaim: as if it were absent;
 *	4. the fingerprint, where both sides have one;
 *	5. completed; failed for good;
 *	6. in progress under a lease;
 *	7. failed and retryable: claimed in place;
 *	8. absent: the key's own time, then insert.
 *
 * Only an insert or update that succeeds ends in "claimed".  Whoever loses the
 * race for either looks again: so a holder that vanished is replaced by exactly
 * one of its waiters, and nobody is told "claimed" without a row.
 */
#include "postgres.h"

#include "access/htup_details.h"
#include "access/xact.h"
#include "funcapi.h"
#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/timestamp.h"

#include "catalog.h"
#include "held.h"
#include "key.h"
#include "outcome.h"
#include "policy.h"
#include "sqlstate.h"
#include "stats.h"
#include "store.h"
#include "wait.h"

/*
 * A key whose row is being deleted is executed by nobody, so even a claim that
 * does not want to wait waits for the delete, which is a batch of about a
 * second.  One that takes longer is somebody's open transaction.
 */
#define NOWAIT_DELETE_WAIT_MS 5000

typedef struct ClaimCall
{
	IdemKey		key;
	bytea	   *fingerprint;	/* NULL: none */
	IdemDeadline deadline;
	IdemPolicy	policy;
	TimestampTz key_time;		/* IDEM_NO_KEY_TIME: has none */
} ClaimCall;

PG_FUNCTION_INFO_V1(idem_claim);
PG_FUNCTION_INFO_V1(idem_try_claim);

/* Step 1.  Arguments: user_id, request_id, scope, fingerprint, wait. */
static void
read_arguments(FunctionCallInfo fcinfo, ClaimCall *call)
{
	idem_key_from_args(fcinfo, 0, 1, 2, &call->key);
	call->fingerprint = idem_fingerprint_from_arg(fcinfo, 3);
	call->deadline = idem_deadline_from_arg(fcinfo, 4);
	call->policy = idem_policy(call->key.scope);
	call->key_time = IDEM_NO_KEY_TIME;
	if (!call->policy.key_time_uuidv7)
		return;

	call->key_time = idem_key_time(&call->key);
	if (call->key_time > GetCurrentTimestamp() + IDEM_KEY_TIME_SKEW_US)
		ereport(ERROR,
				(errcode(ERRCODE_IDEM_INVALID),
				 errmsg("request id is ahead of the clock"),
				 idem_errdetail_key(&call->key),
				 errhint("Fix the client: its clock is more than a minute ahead.")));
}

/* Step 2.  False: the caller's patience is at its end. */
static bool
wait_for_holder(ClaimCall *call, IdemProbe probe, TransactionId xid)
{
	IdemDeadline delete_deadline = idem_deadline_after(NOWAIT_DELETE_WAIT_MS);
	bool		is_nowait_delete = probe == IDEM_PROBE_DELETING &&
		call->deadline.wait_us == 0;

	return idem_wait_for_transaction(&call->key, xid,
									 is_nowait_delete ?
									 &delete_deadline : &call->deadline);
}

static bool
fingerprints_differ(const bytea *a, const bytea *b)
{
	return a != NULL && b != NULL &&
		(VARSIZE_ANY_EXHDR(a) != VARSIZE_ANY_EXHDR(b) ||
		 memcmp(VARDATA_ANY(a), VARDATA_ANY(b), VARSIZE_ANY_EXHDR(a)) != 0);
}

/* Whether a key without a row may have been executed and forgotten */
static bool
is_stale(const ClaimCall *call)
{
	return call->policy.key_time_uuidv7 &&
		(call->key_time <= GetCurrentTimestamp() - call->policy.ttl_us ||
		 call->key_time <= call->policy.guarded_since);
}

/* What a claim stores.  A retry of a failed request is the same request: it keeps
 * the fingerprint, and what was promised. */
static IdemRow
claimed_row(const ClaimCall *call, const IdemRow *retried)
{
	IdemRow		row = {
		.state = IDEM_STATE_COMPLETED,
		.expires_at = idem_remembered_until(&call->policy, call->key_time),
		.lease_until = IDEM_NO_TIME,
		.fingerprint = call->fingerprint
	};

	if (retried != NULL)
	{
		row.expires_at = Max(row.expires_at, retried->expires_at);
		if (row.fingerprint == NULL)
			row.fingerprint = retried->fingerprint;
	}
	return row;
}

/* Steps 3 to 7 for a row that is there.  row: what is there, or what to make of
 * it where the answer is claimed. */
static IdemOutcome
decide(const ClaimCall *call, const IdemFound *found, IdemRow *row)
{
	const IdemRow *old = &found->row;

	if (call->policy.expired_reclaim && !found->ours &&
		old->state != IDEM_STATE_IN_PROGRESS &&
		old->expires_at <= GetCurrentTimestamp())
	{
		*row = claimed_row(call, NULL);
		return is_stale(call) ? IDEM_STALE : IDEM_CLAIMED;
	}

	*row = *old;
	if (fingerprints_differ(call->fingerprint, old->fingerprint))
		return IDEM_MISMATCH;

	switch (old->state)
	{
		case IDEM_STATE_COMPLETED:
			return IDEM_COMPLETED;
		case IDEM_STATE_IN_PROGRESS:
			return IDEM_IN_PROGRESS;
		case IDEM_STATE_FAILED:
			if (!call->policy.failed_retryable)
				return IDEM_FAILED;
			*row = claimed_row(call, old);
			return IDEM_CLAIMED;
	}
	pg_unreachable();
}

/* One attempt.  False: somebody was there first, look again; outcome and row
 * then say nothing. */
static bool
try_once(ClaimCall *call, IdemStore *store, IdemOutcome *outcome, IdemRow *row,
		 bool *ours)
{
	IdemFound	found;
	IdemProbe	probe = idem_store_probe(store, &call->key, &found);

	switch (probe)
	{
		case IDEM_PROBE_INSERTING:
		case IDEM_PROBE_UPDATING:
		case IDEM_PROBE_DELETING:
			*outcome = idem_outcome_of_passed(&call->deadline);
			return !wait_for_holder(call, probe, found.xid);

		case IDEM_PROBE_ABSENT:
			if (is_stale(call))
			{
				*outcome = IDEM_STALE;
				return true;
			}
			*outcome = IDEM_CLAIMED;
			*row = claimed_row(call, NULL);
			return idem_store_insert(store, &call->key, row);

		case IDEM_PROBE_PRESENT:
			*ours = found.ours;
			*outcome = decide(call, &found, row);
			if (*outcome != IDEM_CLAIMED ||
				idem_store_update(store, &call->key, &found.tid, row))
				return true;
			*outcome = idem_outcome_of_passed(&call->deadline);
			return !idem_wait_for_row_lock(&call->key, store, &found.tid,
										   &call->deadline);
	}
	pg_unreachable();
}

/* row is what is stored now, or was found; it says nothing after a wait that
 * ended without an answer. */
static IdemOutcome
claim(FunctionCallInfo fcinfo, const char *command, ClaimCall *call,
	  IdemRow *row)
{
	IdemStore  *store;
	IdemOutcome outcome;
	bool		ours;

	read_arguments(fcinfo, call);
	store = idem_store_open(command);
	do
	{
		CHECK_FOR_INTERRUPTS();
		memset(row, 0, sizeof(*row));
		row->expires_at = row->lease_until = IDEM_NO_TIME;
		ours = false;
	} while (!try_once(call, store, &outcome, row, &ours));
	idem_store_close(store);

	if (outcome == IDEM_CLAIMED)
	{
		idem_held_note_claimed(&call->key);
		idem_stats_count_claim(row->expires_at);
	}
	else
		idem_held_note_answer(&call->key, outcome, row->result, ours);
	return outcome;
}

/*
 * idem_claim(user_id, request_id, scope, fingerprint, wait) -> boolean
 *
 * true: claimed, do the work.  false: completed before.  Anything else raises.
 */
Datum
idem_claim(PG_FUNCTION_ARGS)
{
	ClaimCall	call;
	IdemRow		row;
	IdemOutcome outcome = claim(fcinfo, "idem_claim()", &call, &row);

	if (outcome != IDEM_CLAIMED && outcome != IDEM_COMPLETED)
		idem_raise_outcome(outcome, &call.key);
	PG_RETURN_BOOL(outcome == IDEM_CLAIMED);
}

/*
 * idem_try_claim(user_id, request_id, scope, fingerprint, wait) ->
 *		(outcome, result, progress, token, expires_at, lease_until)
 *
 * Never raises an outcome.
 */
Datum
idem_try_claim(PG_FUNCTION_ARGS)
{
	ClaimCall	call;
	IdemRow		row;
	IdemOutcome outcome = claim(fcinfo, "idem_try_claim()", &call, &row);
	TupleDesc	desc;
	Datum		values[6] = {0};
	bool		nulls[6] = {false};

	if (get_call_result_type(fcinfo, NULL, &desc) != TYPEFUNC_COMPOSITE)
		elog(ERROR, "return type must be a row type");

	values[0] = ObjectIdGetDatum(idem_catalog()->outcome[outcome]);
	values[1] = PointerGetDatum(row.result);
	nulls[1] = row.result == NULL;
	values[2] = PointerGetDatum(row.progress);
	nulls[2] = row.progress == NULL;
	nulls[3] = true;			/* only a lease has a token */
	values[4] = TimestampTzGetDatum(row.expires_at);
	nulls[4] = row.expires_at == IDEM_NO_TIME;
	values[5] = TimestampTzGetDatum(row.lease_until);
	nulls[5] = row.lease_until == IDEM_NO_TIME;
	PG_RETURN_DATUM(HeapTupleGetDatum(heap_form_tuple(BlessTupleDesc(desc),
													  values, nulls)));
}
