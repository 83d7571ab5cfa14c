/*
 * settle.c
 *	  How a key ends: complete, fail, forget.
 *
 * A transactional claim is a completed row from the start; settling it stores a
 * response with it, or turns it into a failure.  Only the transaction that holds
 * it can: that is read from the row (who wrote it), never from memory.
 */
#include "postgres.h"

#include "miscadmin.h"
#include "utils/jsonb.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"

#include "guc.h"
#include "held.h"
#include "key.h"
#include "outcome.h"
#include "policy.h"
#include "sqlstate.h"
#include "store.h"
#include "wait.h"

PG_FUNCTION_INFO_V1(idem_complete_held);
PG_FUNCTION_INFO_V1(idem_complete);
PG_FUNCTION_INFO_V1(idem_fail_held);
PG_FUNCTION_INFO_V1(idem_fail);
PG_FUNCTION_INFO_V1(idem_forget);

static bool
equal_results(const Jsonb *a, const Jsonb *b)
{
	if (a == NULL || b == NULL)
		return a == b;
	return compareJsonbContainers((JsonbContainer *) &a->root,
								  (JsonbContainer *) &b->root) == 0;
}

static void
check_result_size(const IdemKey *key, const IdemPolicy *policy,
				  const Jsonb *result)
{
	if (result != NULL && VARSIZE(result) - VARHDRSZ > policy->result_max_bytes)
		ereport(ERROR,
				(errcode(ERRCODE_IDEM_TOO_LARGE),
				 errmsg("result has %zu bytes, the limit is %d",
						(size_t) (VARSIZE(result) - VARHDRSZ),
						policy->result_max_bytes),
				 idem_errdetail_key(key),
				 errhint("Store a reference to the result, or have the operator raise idem.result_max_bytes or the scope's result_max_bytes.")));
}

static void
raise_lost(const IdemKey *key, const char *message, const char *hint)
{
	ereport(ERROR,
			(errcode(ERRCODE_IDEM_LOST),
			 errmsg("%s", message),
			 idem_errdetail_key(key),
			 errhint("%s", hint)));
}

/* The row that this transaction wrote for the key, or ID410. */
static void
find_own_row(IdemStore *store, const IdemKey *key, IdemFound *found)
{
	if (idem_store_probe(store, key, found) != IDEM_PROBE_PRESENT ||
		!found->ours)
		raise_lost(key, "request is not held by this transaction",
				   "Settle a request in the transaction that claimed it.");
}

static void
write_settled(IdemStore *store, const IdemKey *key, IdemFound *found,
			  const IdemPolicy *policy, IdemState state, Jsonb *result)
{
	TimestampTz key_time = policy->key_time_uuidv7 ?
		idem_key_time(key) : IDEM_NO_KEY_TIME;
	IdemRow		row = found->row;

	row.state = state;
	row.result = result;
	row.expires_at = Max(row.expires_at,
						 idem_remembered_until(policy, key_time));

	/* Completing a marker as a marker needs no second version of its row. */
	if (row.state == found->row.state && row.result == NULL &&
		found->row.result == NULL && row.expires_at == found->row.expires_at)
		return;
	if (!idem_store_update(store, key, &found->tid, &row))
		elog(ERROR, "own claim was changed by another transaction");
}

/* True: stored.  False: an identical repeat. */
static bool
settle(const char *command, const IdemKey *key, IdemState state, Jsonb *result)
{
	IdemStore  *store = idem_store_open(command);
	IdemPolicy	policy = idem_policy(key->scope);
	IdemFound	found;
	bool		first = idem_held_is_unsettled(key);

	check_result_size(key, &policy, result);
	find_own_row(store, key, &found);
	if (first)
	{
		write_settled(store, key, &found, &policy, state, result);
		idem_held_note_settled(key, result);
	}
	else if (found.row.state != state ||
			 !equal_results(found.row.result, result))
		raise_lost(key, "request is settled already, in another way",
				   "Settle a request once; a repeat must be identical.");
	idem_store_close(store);
	return first;
}

static Jsonb *
result_from_arg(FunctionCallInfo fcinfo, int arg)
{
	return PG_ARGISNULL(arg) ? NULL : PG_GETARG_JSONB_P(arg);
}

/* Arguments: user_id, request_id, result, scope. */
static bool
settle_named(FunctionCallInfo fcinfo, const char *command, IdemState state)
{
	IdemKey		key;

	idem_key_from_args(fcinfo, 0, 1, 3, &key);
	return settle(command, &key, state, result_from_arg(fcinfo, 2));
}

/* idem_complete(result) -> boolean */
Datum
idem_complete_held(PG_FUNCTION_ARGS)
{
	PG_RETURN_BOOL(settle("idem_complete()",
						  idem_held_only_unsettled("idem_complete()"),
						  IDEM_STATE_COMPLETED, result_from_arg(fcinfo, 0)));
}

/* idem_complete(user_id, request_id, result, scope) -> boolean */
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
	PG_RETURN_BOOL(settle("idem_fail()",
						  idem_held_only_unsettled("idem_fail()"),
						  IDEM_STATE_FAILED, result_from_arg(fcinfo, 0)));
}

/* idem_fail(user_id, request_id, error, scope) -> boolean */
Datum
idem_fail(PG_FUNCTION_ARGS)
{
	PG_RETURN_BOOL(settle_named(fcinfo, "idem_fail()", IDEM_STATE_FAILED));
}

/* A probe can miss a row that is being updated; a snapshot cannot. */
static bool
is_absent(const IdemKey *key)
{
	Snapshot	snapshot = RegisterSnapshot(GetLatestSnapshot());
	IdemRow		row;
	bool		found = idem_store_fetch(key, snapshot, &row);

	UnregisterSnapshot(snapshot);
	return !found;
}

/* One attempt to delete the row.  False: look again. */
static bool
forget_once(IdemStore *store, const IdemKey *key, IdemDeadline *deadline,
			bool *dropped)
{
	IdemFound	found;
	bool		ended;

	switch (idem_store_probe(store, key, &found))
	{
		case IDEM_PROBE_ABSENT:
			return is_absent(key);
		case IDEM_PROBE_PRESENT:
			*dropped = idem_store_delete(store, &found.tid);
			if (*dropped)
				return true;
			ended = idem_wait_for_row_lock(key, store, &found.tid, deadline);
			break;
		default:
			ended = idem_wait_for_transaction(key, found.xid, deadline);
			break;
	}
	if (!ended)
		idem_raise_outcome(idem_outcome_of_passed(deadline), key);
	return false;
}

/* idem_forget(user_id, request_id, scope) -> boolean: false, there was none */
Datum
idem_forget(PG_FUNCTION_ARGS)
{
	IdemDeadline deadline = idem_deadline_after(idem_wait);
	IdemKey		key;
	IdemStore  *store;
	bool		dropped = false;

	idem_key_from_args(fcinfo, 0, 1, 2, &key);
	store = idem_store_open("idem_forget()");
	while (!forget_once(store, &key, &deadline, &dropped))
		CHECK_FOR_INTERRUPTS();
	idem_store_close(store);
	if (dropped)
		idem_held_note_settled(&key, NULL);
	PG_RETURN_BOOL(dropped);
}
