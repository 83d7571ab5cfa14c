/*
 * settle.c
 *	  How a key ends: complete, fail, heal, forget.
 *
 * Who may settle is read from the row, never from memory or the clock:
 *
 * - a transactional claim, by the transaction that wrote it.  It is a completed
 *	 row from the start; settling it stores a response with it, or turns it into a
 *	 failure;
 * - a lease, by whoever knows the token that is in its row.  A lease that lapsed
 *	 and was not taken over still has its token, so its holder can still settle it;
 *	 one that was taken over has another.
 *
 * The token stays in a settled row, which tells its holder's repeat from
 * anybody else's attempt.  A healed row has no lease_until: the holder who comes
 * late learns that the request is settled, not that it lost something.
 */
#include "postgres.h"

#include "access/xact.h"
#include "miscadmin.h"
#include "utils/jsonb.h"
#include "utils/timestamp.h"

#include "guc.h"
#include "held.h"
#include "key.h"
#include "outcome.h"
#include "policy.h"
#include "settle.h"
#include "sqlstate.h"
#include "stats.h"
#include "store.h"
#include "wait.h"

PG_FUNCTION_INFO_V1(idem_complete_held);
PG_FUNCTION_INFO_V1(idem_complete);
PG_FUNCTION_INFO_V1(idem_fail_held);
PG_FUNCTION_INFO_V1(idem_fail);
PG_FUNCTION_INFO_V1(idem_heal);
PG_FUNCTION_INFO_V1(idem_forget);

static bool
equal_results(const Jsonb *a, const Jsonb *b)
{
	if (a == NULL || b == NULL)
		return a == b;
	return compareJsonbContainers((JsonbContainer *) &a->root,
								  (JsonbContainer *) &b->root) == 0;
}

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
	idem_stats_count_lost_lease();
	idem_raise_lost(key, "lease is lost",
					"Stop, and roll back: somebody else holds the request, or it was settled or dropped.");
}

int64
idem_token_from_arg(FunctionCallInfo fcinfo, int arg)
{
	if (PG_ARGISNULL(arg))
		return 0;
	if (PG_GETARG_INT64(arg) <= 0)
		ereport(ERROR,
				(errcode(ERRCODE_IDEM_INVALID),
				 errmsg("token must be positive"),
				 errhint("Fix the client: pass the token that idem_try_claim() returned with the lease.")));
	return PG_GETARG_INT64(arg);
}

void
idem_commit_lease(const IdemKey *key)
{
	ForceSyncCommit();
	idem_wake_at_commit(key);
}

void
idem_wait_for_row_or_raise(const IdemKey *key,
						   IdemFound *found, IdemDeadline *deadline)
{
	if (!idem_wait_for_row_lock(key, &found->tid, deadline))
		idem_raise_outcome(idem_outcome_of_passed(deadline), key);
}

static void
wait_for_writer_or_raise(const IdemKey *key, const IdemFound *found,
						 IdemDeadline *deadline)
{
	bool		ended = found->speculative != 0 ?
		idem_wait_for_inserter(key, found->xid, found->speculative, deadline) :
		idem_wait_for_transaction(key, found->xid, deadline);

	if (ended)
		return;
	idem_store_note_read(key);
	idem_raise_outcome(idem_outcome_of_passed(deadline), key);
}

bool
idem_find_settled_down(const IdemKey *key, IdemFound *found,
					   IdemDeadline *deadline)
{
	for (;;)
	{
		CHECK_FOR_INTERRUPTS();
		switch (idem_store_probe(key, found))
		{
			case IDEM_PROBE_PRESENT:
				return true;
			case IDEM_PROBE_ABSENT:
				if (idem_store_is_absent(key))
					return false;
				break;
			case IDEM_PROBE_INSERTING:
			case IDEM_PROBE_UPDATING:
			case IDEM_PROBE_DELETING:
				wait_for_writer_or_raise(key, found, deadline);
				break;
		}
	}
}

void
idem_find_row_of_holder(const IdemHolder *holder,
						IdemFound *found, IdemDeadline *deadline)
{
	if (holder->token == 0)
	{
		/* Whoever else is at it: it is not this transaction. */
		if (!idem_store_find_ours(&holder->key, found))
			idem_raise_lost(&holder->key,
							"request is not held by this transaction",
							"Settle a request in the transaction that claimed it, or pass the token of its lease.");
	}
	else if (!idem_find_settled_down(&holder->key, found, deadline) ||
			 found->row.token != holder->token)
		idem_raise_lost_lease(&holder->key);
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

/* False: somebody has the row locked. */
static bool
write_settled(const IdemKey *key, IdemFound *found,
			  const IdemPolicy *policy, IdemState state, Jsonb *result)
{
	IdemRow		row = found->row;

	row.state = state;
	row.result = (const IdemStored *) result;
	row.expires_at = Max(row.expires_at,
						 idem_remembered_until(policy, IDEM_NO_KEY_TIME));

	/* Completing a marker as a marker needs no second version of its row. */
	if (row.state == found->row.state && row.result == NULL &&
		found->row.result == NULL && row.expires_at == found->row.expires_at)
		return true;
	return idem_store_update(key, found, &row);
}

typedef enum Standing
{
	NOT_SETTLED,
	SETTLED_THIS_WAY,			/* the same state and result */
	SETTLED_OTHERWISE,
	HEALED
} Standing;

/* unsettled: this transaction claimed the key and has not settled it. */
static Standing
standing(const IdemRow *row, bool unsettled, IdemState state,
		 const Jsonb *result)
{
	if (row->state == IDEM_STATE_IN_PROGRESS || (unsettled && row->token == 0))
		return NOT_SETTLED;
	if (row->token != 0 && row->lease_until == IDEM_NO_TIME &&
		row->state == IDEM_STATE_COMPLETED)
		return HEALED;
	return row->state == state &&
		equal_results(idem_stored_jsonb(row->result), result) ?
		SETTLED_THIS_WAY : SETTLED_OTHERWISE;
}

/* True: stored.  False: an identical repeat, or healed by somebody else. */
static bool
settle(const char *command, const IdemHolder *holder, IdemState state,
	   Jsonb *result)
{
	IdemPolicy	policy;
	IdemDeadline deadline = idem_deadline_after(idem_wait);
	IdemFound	found;
	bool		unsettled = idem_held_is_unsettled(&holder->key);
	Standing	now;

	idem_store_open(command);
	policy = idem_policy(holder->key.scope);
	idem_check_size(&holder->key, &policy, result, "result");
	for (;;)
	{
		idem_find_row_of_holder(holder, &found, &deadline);
		now = standing(&found.row, unsettled, state, result);
		if (now == SETTLED_OTHERWISE || (now == HEALED &&
										 state != IDEM_STATE_COMPLETED))
			idem_raise_lost(&holder->key,
							"request is settled already, in another way",
							"Settle a request once; a repeat must be identical.");
		if (now != NOT_SETTLED ||
			write_settled(&holder->key, &found, &policy, state, result))
			break;
		idem_wait_for_row_or_raise(&holder->key, &found, &deadline);
	}
	if (now != NOT_SETTLED)
		return false;
	if (found.row.token != 0)
		idem_commit_lease(&holder->key);
	idem_held_note_settled(&holder->key, result);
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
	IdemHolder	holder = {.key = *idem_held_only_unsettled(command)};

	return settle(command, &holder, state, result_from_arg(fcinfo, 0));
}

/* Arguments: user_id, request_id, result, token, scope. */
static bool
settle_named(FunctionCallInfo fcinfo, const char *command, IdemState state)
{
	IdemHolder	holder;

	idem_key_from_args(fcinfo, 0, 1, 4, &holder.key);
	holder.token = idem_token_from_arg(fcinfo, 3);
	return settle(command, &holder, state, result_from_arg(fcinfo, 2));
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

/*
 * The row of an unsettled lease, in which there is something to heal; false if it
 * is completed.  Raises ID410 for anything else.
 */
static bool
find_to_heal(const IdemKey *key, IdemFound *found,
			 IdemDeadline *deadline)
{
	if (!idem_find_settled_down(key, found, deadline))
		idem_raise_lost(key, "request is not claimed",
						"There is nothing to heal: claim it.");
	if (found->row.state == IDEM_STATE_FAILED)
		idem_raise_lost(key, "request has failed for good",
						"The request has already failed; use a new id, or idem_forget().");
	return found->row.state == IDEM_STATE_IN_PROGRESS;
}

/* idem_heal(user_id, request_id, result, scope) -> boolean */
Datum
idem_heal(PG_FUNCTION_ARGS)
{
	IdemDeadline deadline = idem_deadline_after(idem_wait);
	Jsonb	   *result = result_from_arg(fcinfo, 2);
	IdemKey		key;
	IdemPolicy	policy;
	IdemFound	found;
	bool		healed;

	idem_key_from_args(fcinfo, 0, 1, 3, &key);
	idem_store_open("idem_heal()");
	policy = idem_policy(key.scope);
	idem_check_size(&key, &policy, result, "result");
	while ((healed = find_to_heal(&key, &found, &deadline)))
	{
		found.row.lease_until = IDEM_NO_TIME;
		if (write_settled(&key, &found, &policy, IDEM_STATE_COMPLETED,
						  result))
			break;
		idem_wait_for_row_or_raise(&key, &found, &deadline);
	}
	if (healed)
	{
		idem_commit_lease(&key);
		idem_held_note_settled(&key, result);
		idem_stats_count_healed();
	}
	PG_RETURN_BOOL(healed);
}

/* idem_forget(user_id, request_id, scope) -> boolean: false, there was none */
Datum
idem_forget(PG_FUNCTION_ARGS)
{
	IdemDeadline deadline = idem_deadline_after(idem_wait);
	IdemKey		key;
	IdemFound	found;
	bool		dropped;

	idem_key_from_args(fcinfo, 0, 1, 2, &key);
	idem_store_open("idem_forget()");
	while ((dropped = idem_find_settled_down(&key, &found, &deadline)) &&
		   !idem_store_delete(&found))
		idem_wait_for_row_or_raise(&key, &found, &deadline);
	if (dropped)
	{
		idem_held_note_settled(&key, NULL);
		if (found.row.token != 0)
			idem_commit_lease(&key);
	}
	PG_RETURN_BOOL(dropped);
}
