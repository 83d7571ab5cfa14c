/*
 * lists.c
 *	  Lists of unsettled claims, and of who holds and who waits for them, as SQL functions.
 *
 * They read by the caller's snapshot, like a table in a query, and work in read-only
 * transactions and on a standby.
 *
 * They tell users and requests of all applications of the database.  So they are granted to
 * operators, the views without progress also to pg_monitor, and none to every application
 * (idem_grant()).
 */
#include "postgres.h"

#include "access/tupdesc.h"
#include "catalog/pg_type_d.h"
#include "executor/tuptable.h"
#include "funcapi.h"
#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"
#include "utils/tuplesort.h"
#include "utils/tuplestore.h"
#include "utils/typcache.h"

#include "sqlstate.h"
#include "protocol/blocked_by.h"
#include "protocol/find_row.h"
#include "session/waiting_processes.h"
#include "store/catalog.h"
#include "store/store.h"

#define UNSETTLED_COLUMNS 6		/* of idem_lapsed() and idem__unsettled_claims(); the last one differs */
#define HELD_COLUMNS 8			/* of idem__held_keys() */

PG_FUNCTION_INFO_V1(idem_lapsed);
PG_FUNCTION_INFO_V1(idem__unsettled_claims);
PG_FUNCTION_INFO_V1(idem__held_keys);

/* What a claim would do: wait for the lease, take it over, or answer "unknown".  NULL: the row has
 * expired, and a claim knows nothing of it. */
static const char *
status_of(const IdemUnsettled *unsettled, TimestampTz now)
{
	IdemPolicy	policy;

	if (unsettled->lease_until > now)
		return "live";
	policy = idem_policy(unsettled->key.scope);
	if (policy.lapsed_unknown)
		return "unknown";
	return idem_policy_ignores_row(&policy, IDEM_STATE_IN_PROGRESS,
								   unsettled->lease_until,
								   unsettled->expires_at) ?
		NULL : "lapsed";
}

/* Longest lapsed first; keeps the first limit rows, if they are so few. */
static Tuplesortstate *
begin_sort(TupleDesc desc, int64 limit)
{
	bool		is_bounded = limit <= INT_MAX;
	AttrNumber	lease_until = 5;
	Oid			less = lookup_type_cache(TIMESTAMPTZOID, TYPECACHE_LT_OPR)->lt_opr;
	Oid			no_collation = InvalidOid;
	bool		nulls_first = true;

	Tuplesortstate *sort = tuplesort_begin_heap(desc, 1, &lease_until, &less, &no_collation,
												&nulls_first, work_mem, NULL,
												is_bounded ? TUPLESORT_ALLOWBOUNDED : TUPLESORT_NONE);

	if (is_bounded)
		tuplesort_set_bound(sort, (int) limit);
	return sort;
}

static void
fill_slot(TupleTableSlot *slot, const IdemUnsettled *row, const char *status,
		  bool with_progress)
{
	Datum	   *values = slot->tts_values;

	ExecClearTuple(slot);
	memset(slot->tts_isnull, 0, UNSETTLED_COLUMNS * sizeof(bool));
	values[0] = PointerGetDatum(row->key.scope);
	values[1] = PointerGetDatum(row->key.user_id);
	values[2] = PointerGetDatum(row->key.request_id);
	values[3] = CStringGetTextDatum(status);
	values[4] = TimestampTzGetDatum(row->lease_until);
	slot->tts_isnull[4] = row->lease_until == IDEM_NO_TIME;
	values[5] = with_progress ? PointerGetDatum(row->progress) :
		TimestampTzGetDatum(row->expires_at);
	slot->tts_isnull[5] = with_progress && row->progress == NULL;
	ExecStoreVirtualTuple(slot);
}

/* The progress can be a pointer to where TOAST keeps it.  The caller gives the table's lock back
 * next, so return the value itself. */
static void
return_sorted(ReturnSetInfo *rsinfo, Tuplesortstate *sort, int64 limit)
{
	TupleTableSlot *slot = MakeSingleTupleTableSlot(rsinfo->setDesc,
													&TTSOpsMinimalTuple);

	tuplesort_performsort(sort);
	for (int64 n = 0; n < limit &&
		 tuplesort_gettupleslot(sort, true, false, slot, NULL); n++)
	{
		CHECK_FOR_INTERRUPTS();
		slot_getallattrs(slot);
		if (!slot->tts_isnull[5])
			slot->tts_values[5] =
				PointerGetDatum(PG_DETOAST_DATUM_COPY(slot->tts_values[5]));
		tuplestore_putvalues(rsinfo->setResult, rsinfo->setDesc,
							 slot->tts_values, slot->tts_isnull);
		if (!slot->tts_isnull[5])
			pfree(DatumGetPointer(slot->tts_values[5]));
	}
	tuplesort_end(sort);
	ExecDropSingleTupleTableSlot(slot);
}

static int64
limit_from_arg(FunctionCallInfo fcinfo, int arg)
{
	if (PG_ARGISNULL(arg))
		return PG_INT64_MAX;
	if (PG_GETARG_INT32(arg) < 0)
		ereport(ERROR,
				(errcode(ERRCODE_IDEM_INVALID),
				 errmsg("max_rows must not be negative"),
				 errhint("Fix the client: pass how many rows to return at most, or NULL for all.")));
	return PG_GETARG_INT32(arg);
}

/* scope: only its leases; NULL: all.  lapsed: only leases that lapsed, sorted, and with their
 * progress; otherwise all but those that a claim would not see, in no order, and until when they
 * are remembered. */
static Datum
list_unsettled(FunctionCallInfo fcinfo, const text *scope, bool lapsed,
			   int64 limit)
{
	ReturnSetInfo *rsinfo = (ReturnSetInfo *) fcinfo->resultinfo;
	TimestampTz now = GetCurrentTimestamp();
	TupleTableSlot *slot;
	Tuplesortstate *sort = NULL;
	IdemUnsettledScan *scan;
	IdemUnsettled row;

	InitMaterializedSRF(fcinfo, 0);
	if (limit == 0)
		return (Datum) 0;
	idem_require_columns(rsinfo->setDesc, UNSETTLED_COLUMNS);
	slot = MakeSingleTupleTableSlot(rsinfo->setDesc, &TTSOpsVirtual);
	if (lapsed)
		sort = begin_sort(rsinfo->setDesc, limit);
	scan = idem_store_unsettled_scan_begin(scope, GetActiveSnapshot());
	while (idem_store_unsettled_scan_next(scan, &row))
	{
		const char *status = status_of(&row, now);

		if (status == NULL || (lapsed && row.lease_until > now))
			continue;
		fill_slot(slot, &row, status, lapsed);
		if (lapsed)
			tuplesort_puttupleslot(sort, slot);
		else
			tuplestore_puttupleslot(rsinfo->setResult, slot);
	}
	if (lapsed)
		return_sorted(rsinfo, sort, limit);
	idem_store_unsettled_scan_end(scan);
	ExecDropSingleTupleTableSlot(slot);
	return (Datum) 0;
}

/*
 * idem_lapsed(scope, max_rows) -> setof (scope, user_id, request_id, status, lease_until, progress)
 *
 * Leases that lapsed and were not settled, longest lapsed first.
 */
Datum
idem_lapsed(PG_FUNCTION_ARGS)
{
	text	   *scope = PG_ARGISNULL(0) ? NULL : idem_scope_from_arg(fcinfo, 0);

	return list_unsettled(fcinfo, scope, true, limit_from_arg(fcinfo, 1));
}

/*
 * idem__unsettled_claims() -> setof (scope, user_id, request_id, status, lease_until, expires_at)
 *
 * For the view idem_unsettled, which sorts them.
 */
Datum
idem__unsettled_claims(PG_FUNCTION_ARGS)
{
	return list_unsettled(fcinfo, NULL, false, PG_INT64_MAX);
}

/* ----- who holds it ----- */

static const IdemRunner no_runner = {.since = DT_NOBEGIN};

/* runner: of the transaction that holds it; no_runner: a lease does, until lease_until, or not even
 * that is known (IDEM_NO_TIME).  nwaiters: -1: not known */
static void
put_held(ReturnSetInfo *rsinfo, const IdemKey *key, const IdemRunner *runner,
		 TimestampTz lease_until, int nwaiters)
{
	Datum		values[HELD_COLUMNS];
	bool		nulls[HELD_COLUMNS] = {false};

	values[0] = PointerGetDatum(key->scope);
	values[1] = PointerGetDatum(key->user_id);
	values[2] = PointerGetDatum(key->request_id);
	values[3] = Int32GetDatum(runner->pid);
	nulls[3] = runner->pid == 0;
	nulls[4] = runner->gid == NULL;
	if (!nulls[4])
		values[4] = CStringGetTextDatum(runner->gid);
	values[5] = TimestampTzGetDatum(runner->since);
	nulls[5] = runner->since == DT_NOBEGIN;
	values[6] = TimestampTzGetDatum(lease_until);
	nulls[6] = lease_until == IDEM_NO_TIME;
	values[7] = Int32GetDatum(nwaiters);
	nulls[7] = nwaiters < 0;
	tuplestore_putvalues(rsinfo->setResult, rsinfo->setDesc, values, nulls);
}

static void
put_leases(ReturnSetInfo *rsinfo, int nwaiters)
{
	TimestampTz now = GetCurrentTimestamp();
	IdemUnsettledScan *scan =
		idem_store_unsettled_scan_begin(NULL, GetActiveSnapshot());
	IdemUnsettled row;

	while (idem_store_unsettled_scan_next(scan, &row))
		if (row.lease_until > now)
			put_held(rsinfo, &row.key, &no_runner, row.lease_until, nwaiters);
	idem_store_unsettled_scan_end(scan);
}

/*
 * idem__held_keys() -> setof (scope, user_id, request_id, pid, gid, since, lease_until, waiters)
 *
 * For the view idem_holders, which makes one row of those of a key: one for its lease, with no
 * waiter, and one for each waiter.
 */
Datum
idem__held_keys(PG_FUNCTION_ARGS)
{
	ReturnSetInfo *rsinfo = (ReturnSetInfo *) fcinfo->resultinfo;
	IdemWaitingProcess *waiters;
	IdemRunner	runner;
	bool		is_running = false;
	int			n;

	InitMaterializedSRF(fcinfo, 0);
	idem_require_columns(rsinfo->setDesc, HELD_COLUMNS);
	n = idem_waiting_processes(&waiters);
	if (n < 0)
		ereport(WARNING,
				(errmsg("idem must be loaded via \"shared_preload_libraries\" to know who waits"),
				 errdetail("Only leases are listed, without their waiters."),
				 errhint("Add idem to shared_preload_libraries and restart the server. PostgreSQL 17 and later need no restart for it.")));
	put_leases(rsinfo, n < 0 ? -1 : 0);
	for (int i = 0; i < n; i++)
	{
		bool		is_lease = !TransactionIdIsValid(waiters[i].xid);

		CHECK_FOR_INTERRUPTS();
		/* Often all wait for the same one. */
		if (!is_lease && (i == 0 || waiters[i].xid != waiters[i - 1].xid))
			is_running = idem_find_runner(waiters[i].xid, &runner);
		/* If the holder is gone, the waiter is about to wake up. */
		if (is_lease || is_running)
			put_held(rsinfo, &waiters[i].key, is_lease ? &no_runner : &runner,
					 IDEM_NO_TIME, 1);
	}
	return (Datum) 0;
}
