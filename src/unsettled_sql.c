/*
 * unsettled_sql.c
 *	  Lists of unsettled claims, as SQL functions.
 *
 * They read by the caller's snapshot, like a table in a query, and work in read-only
 * transactions and on a standby.
 *
 * They tell users, requests and progress of all applications of the database.  So they are
 * granted to operators, and not to every application (idem_grant()).
 */
#include "postgres.h"

#include "access/tupdesc.h"
#include "catalog/pg_collation_d.h"
#include "catalog/pg_type_d.h"
#include "executor/tuptable.h"
#include "funcapi.h"
#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"
#include "utils/tuplesort.h"
#include "utils/typcache.h"

#include "holder.h"
#include "sqlstate.h"
#include "unsettled.h"

/* Columns of all lists; the sixth differs */
enum
{
	COLUMN_SCOPE = 1,
	COLUMN_USER_ID,
	COLUMN_REQUEST_ID,
	COLUMN_STATUS,
	COLUMN_LEASE_UNTIL,
	COLUMN_LAST
};

PG_FUNCTION_INFO_V1(idem_lapsed);

/* What a claim would find */
typedef enum Status
{
	STATUS_LIVE,				/* it would wait for the lease */
	STATUS_LAPSED,				/* it would take the lease over */
	STATUS_UNKNOWN,				/* it would be answered "unknown" */
	STATUS_ABSENT				/* expired: it would know nothing of this row */
} Status;

static const char *const status_names[] = {
	[STATUS_LIVE] = "live",
	[STATUS_LAPSED] = "lapsed",
	[STATUS_UNKNOWN] = "unknown"
};

static Status
status_of(const IdemUnsettled *unsettled, TimestampTz now)
{
	IdemPolicy	policy;
	IdemRow		row = {
		.state = IDEM_STATE_IN_PROGRESS,
		.lease_until = unsettled->lease_until,
		.expires_at = unsettled->expires_at
	};

	if (unsettled->lease_until > now)
		return STATUS_LIVE;
	policy = idem_policy(unsettled->key.scope);
	if (policy.lapsed_unknown)
		return STATUS_UNKNOWN;
	return idem_row_counts_as_absent(&policy, &row) ?
		STATUS_ABSENT : STATUS_LAPSED;
}

/* bound: how many rows are wanted; 0: all */
static Tuplesortstate *
begin_sort(TupleDesc desc, int bound)
{
	AttrNumber	columns[] = {
		COLUMN_LEASE_UNTIL, COLUMN_REQUEST_ID, COLUMN_USER_ID, COLUMN_SCOPE
	};
	Oid			less_text =
		lookup_type_cache(TEXTOID, TYPECACHE_LT_OPR)->lt_opr;
	Oid			operators[] = {
		lookup_type_cache(TIMESTAMPTZOID, TYPECACHE_LT_OPR)->lt_opr,
		less_text, less_text, less_text
	};
	Oid			collations[] = {
		InvalidOid, C_COLLATION_OID, C_COLLATION_OID, C_COLLATION_OID
	};
	bool		nulls_first[] = {true, true, true, true};
	Tuplesortstate *sort = tuplesort_begin_heap(desc, lengthof(columns), columns,
												operators, collations,
												nulls_first, work_mem, NULL,
												bound > 0 ? TUPLESORT_ALLOWBOUNDED : TUPLESORT_NONE);

	if (bound > 0)
		tuplesort_set_bound(sort, bound);
	return sort;
}

static void
set_column(TupleTableSlot *slot, int column, Datum value, bool isnull)
{
	slot->tts_values[column - 1] = value;
	slot->tts_isnull[column - 1] = isnull;
}

/* The first columns */
static void
fill_slot(TupleTableSlot *slot, const IdemUnsettled *row, Status status)
{
	ExecClearTuple(slot);
	set_column(slot, COLUMN_SCOPE, PointerGetDatum(row->key.scope), false);
	set_column(slot, COLUMN_USER_ID, PointerGetDatum(row->key.user_id), false);
	set_column(slot, COLUMN_REQUEST_ID, PointerGetDatum(row->key.request_id),
			   false);
	set_column(slot, COLUMN_STATUS, CStringGetTextDatum(status_names[status]),
			   false);
	set_column(slot, COLUMN_LEASE_UNTIL, TimestampTzGetDatum(row->lease_until),
			   row->lease_until == IDEM_NO_TIME);
}

/* has_progress: the last column is a value that TOAST can keep: complete it, since the lock
 * of the table is given back. */
static void
return_sorted(ReturnSetInfo *rsinfo, Tuplesortstate *sort, int64 limit,
			  bool has_progress)
{
	TupleTableSlot *slot = MakeSingleTupleTableSlot(rsinfo->setDesc,
													&TTSOpsMinimalTuple);

	tuplesort_performsort(sort);
	for (int64 n = 0; n < limit &&
		 tuplesort_gettupleslot(sort, true, false, slot, NULL); n++)
	{
		struct varlena *complete = NULL;

		CHECK_FOR_INTERRUPTS();
		slot_getallattrs(slot);
		if (has_progress && !slot->tts_isnull[COLUMN_LAST - 1])
		{
			complete = PG_DETOAST_DATUM_COPY(slot->tts_values[COLUMN_LAST - 1]);
			slot->tts_values[COLUMN_LAST - 1] = PointerGetDatum(complete);
		}
		tuplestore_putvalues(rsinfo->setResult, rsinfo->setDesc,
							 slot->tts_values, slot->tts_isnull);
		if (complete != NULL)
			pfree(complete);
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
				 errmsg("limit must not be negative"),
				 errhint("Fix the client: pass how many rows to return at most, or NULL for all.")));
	return PG_GETARG_INT32(arg);
}

/*
 * idem_lapsed(scope, limit) -> setof (scope, user_id, request_id, status, lease_until, progress)
 *
 * Leases that lapsed and were not settled, longest lapsed first.
 */
Datum
idem_lapsed(PG_FUNCTION_ARGS)
{
	ReturnSetInfo *rsinfo = (ReturnSetInfo *) fcinfo->resultinfo;
	text	   *scope = PG_ARGISNULL(0) ? NULL : idem_scope_from_arg(fcinfo, 0);
	int64		limit = limit_from_arg(fcinfo, 1);
	TimestampTz now = GetCurrentTimestamp();
	TupleTableSlot *slot;
	Tuplesortstate *sort;
	IdemUnsettledScan *scan;
	IdemUnsettled row;

	InitMaterializedSRF(fcinfo, 0);
	if (limit == 0)
		return (Datum) 0;
	slot = MakeSingleTupleTableSlot(rsinfo->setDesc, &TTSOpsVirtual);
	sort = begin_sort(rsinfo->setDesc, limit > INT_MAX ? 0 : (int) limit);
	scan = idem_store_unsettled_scan_begin(scope, GetActiveSnapshot());
	while (idem_store_unsettled_scan_next(scan, &row))
	{
		Status		status = status_of(&row, now);

		CHECK_FOR_INTERRUPTS();
		if (status != STATUS_LAPSED && status != STATUS_UNKNOWN)
			continue;
		fill_slot(slot, &row, status);
		set_column(slot, COLUMN_LAST, PointerGetDatum(row.progress),
				   row.progress == NULL);
		ExecStoreVirtualTuple(slot);
		tuplesort_puttupleslot(sort, slot);
	}
	return_sorted(rsinfo, sort, limit, true);
	idem_store_unsettled_scan_end(scan);
	ExecDropSingleTupleTableSlot(slot);
	return (Datum) 0;
}
