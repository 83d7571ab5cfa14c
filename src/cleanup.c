/*
 * cleanup.c
 *	  One bounded batch of removing expired claims, in the caller's
 *	  transaction.
 *
 * The claims are walked in the order of expires_at, from a low-water mark up
 * to and including the first one that has not expired: it says when there will
 * be something to do again.  A row that another transaction has locked or
 * changed is skipped, never waited for, so any number of workers and sessions
 * may clean at the same time.  The semantics are DELETE ... FOR UPDATE SKIP
 * LOCKED.
 *
 * On its way a batch passes entries of rows that are gone.  As long as somebody
 * holds an old snapshot neither VACUUM nor the index forgets them, and there is
 * no end to their number.  So the worker bounds it; see worker.c for how it gets
 * to the end all the same.
 *
 * A batch only returns what it did.  Its caller publishes that after the
 * commit, since a batch that was rolled back has removed nothing.
 *
 * Locks: RowExclusiveLock on the table and its indexes until the transaction
 * ends, as for any DML; see store.c.
 */
#include "postgres.h"

#include "fmgr.h"
#include "funcapi.h"
#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/timestamp.h"

#include "cleanup.h"
#include "expiry.h"
#include "guc.h"
#include "policy.h"
#include "sqlstate.h"
#include "stats.h"
#include "wait.h"

/* A batch ends after this, so that it does not hold back VACUUM for long. */
#define BATCH_DURATION_MAX_US	INT64CONST(1000000)

/* How often the caller is asked whether to go on */
#define STOP_INTERVAL_US		INT64CONST(250000)

/* Rows between two looks at the clock: a few of them can be slow reads. */
#define ROWS_PER_CLOCK_CHECK	16
#define GONE_PER_CLOCK_CHECK	1024

PG_FUNCTION_INFO_V1(idem_cleanup);
PG_FUNCTION_INFO_V1(idem_cleanup_step);

/* When a batch has to end */
typedef struct BatchBounds
{
	const IdemCleanupOrder *order;
	int64		end_us;			/* on the monotonic clock; 0: not started */
	int64		next_stop_us;
	uint32		rows_seen;
	TimestampTz expires_at;		/* of the latest entry */
	int64		rows_unknown;	/* of earlier ones than that */
} BatchBounds;

static bool
must_stop(BatchBounds *bounds, int64 now_us)
{
	if (bounds->order->stop == NULL || now_us < bounds->next_stop_us)
		return false;
	bounds->next_stop_us = now_us + STOP_INTERVAL_US;
	return bounds->order->stop();
}

/*
 * Asked for every row that the batch finds.  The time runs from the first of
 * them: however long the way to it was, through entries of rows that are long
 * gone, a batch gets something done.
 */
static bool
is_at_bounds(BatchBounds *bounds, int64 rows_deleted)
{
	int64		now_us;

	if (rows_deleted >= bounds->order->rows_max)
		return true;
	if (bounds->rows_seen++ % ROWS_PER_CLOCK_CHECK != 0)
		return false;

	now_us = idem_monotonic_us();
	if (bounds->end_us == 0)
		bounds->end_us = now_us + BATCH_DURATION_MAX_US;
	return now_us >= bounds->end_us || must_stop(bounds, now_us);
}

/*
 * Asked for every entry whose row is gone.  The next batch starts at a time, so
 * it would have to begin again with those of the same one.
 */
static bool
is_at_gone_bounds(BatchBounds *bounds, const IdemCleanupBatch *batch,
				  TimestampTz expires_at)
{
	int			gone_max = bounds->order->gone_max;

	if (gone_max > 0 && batch->rows_gone >= gone_max &&
		expires_at > bounds->expires_at)
		return true;
	return batch->rows_gone % GONE_PER_CLOCK_CHECK == 0 &&
		must_stop(bounds, idem_monotonic_us());
}

/* The rows come in order, so the first one that stays is the oldest. */
static void
note_row_that_stays(IdemCleanupBatch *batch, TimestampTz expires_at)
{
	if (batch->oldest_expires_at == DT_NOEND)
		batch->oldest_expires_at = expires_at;
}

/* Whether it was executed is unknown, and by the scope's policy somebody has to
 * find out: that has no end of its own, and is no backlog. */
static bool
is_kept_for_good(const IdemExpiring *row)
{
	return row->state == IDEM_STATE_IN_PROGRESS &&
		idem_policy(row->scope).lapsed_unknown;
}

static bool
is_live(const IdemExpiring *row, TimestampTz now)
{
	return row->state == IDEM_STATE_IN_PROGRESS && row->lease_until > now;
}

/* Rows that expire when the one does at which the batch ends are the next one's,
 * which would count them again. */
static void
note_entry(BatchBounds *bounds, const IdemCleanupBatch *batch,
		   TimestampTz expires_at)
{
	if (expires_at > bounds->expires_at)
		bounds->rows_unknown = batch->rows_unknown;
	bounds->expires_at = expires_at;
}

static void
end_at(IdemCleanupBatch *batch, TimestampTz expires_at)
{
	batch->more = true;
	batch->next_start = expires_at;
}

static void
scan_batch(IdemExpiryScan *scan, BatchBounds *bounds, IdemCleanupBatch *batch)
{
	const IdemCleanupOrder *order = bounds->order;
	IdemExpiring row;

	while (idem_store_expiry_scan_next(scan, &row))
	{
		bool		has_expired = row.expires_at <= order->expired_before;

		CHECK_FOR_INTERRUPTS();

		if (row.expires_at >= order->end)
			break;
		if (row.gone)
		{
			if (!is_at_gone_bounds(bounds, batch, row.expires_at))
			{
				batch->rows_gone++;
				note_entry(bounds, batch, row.expires_at);
				continue;
			}
			if (has_expired)
			{
				end_at(batch, row.expires_at);
				batch->end = row.expires_at;
				return;
			}
			/* What comes after it is looked for when that time has come. */
		}
		if (!has_expired)
		{
			note_row_that_stays(batch, row.expires_at);
			break;
		}
		note_entry(bounds, batch, row.expires_at);
		if (is_at_bounds(bounds, batch->rows_deleted))
		{
			note_row_that_stays(batch, row.expires_at);
			end_at(batch, row.expires_at);
			batch->backlog = true;
			batch->rows_unknown = bounds->rows_unknown;
			return;
		}
		if (is_kept_for_good(&row))
			batch->rows_unknown++;
		else if (!is_live(&row, order->expired_before) &&
				 idem_store_expiry_scan_delete(scan))
			batch->rows_deleted++;
		else
		{
			batch->rows_skipped++;
			note_row_that_stays(batch, row.expires_at);
		}
	}
	/* Not beyond the cutoff: a row that is claimed now can be younger. */
	batch->next_start = Max(batch->start,
							Min(order->end, order->expired_before));
}

void
idem_cleanup_batch(const IdemCleanupOrder *order, IdemCleanupBatch *batch)
{
	BatchBounds bounds = {.order = order, .expires_at = DT_NOBEGIN};
	IdemExpiryScan *scan;

	memset(batch, 0, sizeof(IdemCleanupBatch));
	batch->start = order->start;
	batch->end = order->end;
	batch->oldest_expires_at = DT_NOEND;

	/* Before the scan takes its snapshot, or a claim could escape both. */
	batch->publications = idem_stats_begin_batch();
	scan = idem_store_expiry_scan_begin(order->start);
	scan_batch(scan, &bounds, batch);
	idem_store_expiry_scan_end(scan);
}

/* ----- SQL ----- */

/* The argument batch_size; NULL: the setting */
static int
batch_rows_max_arg(FunctionCallInfo fcinfo, int arg)
{
	int32		rows;

	if (PG_ARGISNULL(arg))
		return idem_cleanup_batch_size;
	rows = PG_GETARG_INT32(arg);
	if (rows < 1 || rows > IDEM_CLEANUP_BATCH_ROWS_LIMIT)
		ereport(ERROR,
				(errcode(ERRCODE_IDEM_INVALID),
				 errmsg("batch_size must be between 1 and %d",
						IDEM_CLEANUP_BATCH_ROWS_LIMIT),
				 errdetail("It is %d.", rows),
				 errhint("Leave it out to use idem.cleanup_batch_size.")));
	return rows;
}

/* However many rows are gone before the first that is not: whoever calls it
 * wants something done. */
static void
run_session_batch(int rows_max, TimestampTz start, TimestampTz expired_before,
				  IdemCleanupBatch *batch)
{
	IdemCleanupOrder order = {
		.start = start,
		.end = DT_NOEND,
		.expired_before = expired_before,
		.rows_max = rows_max
	};
	int64		begun_us = idem_monotonic_us();

	idem_cleanup_batch(&order, batch);
	idem_stats_count_cleanup(batch, (idem_monotonic_us() - begun_us) / 1e6);
}

/* idem_cleanup(batch_size): one batch, returns the number of rows removed */
Datum
idem_cleanup(PG_FUNCTION_ARGS)
{
	IdemCleanupBatch batch;

	run_session_batch(batch_rows_max_arg(fcinfo, 0), DT_NOBEGIN,
					  GetCurrentTimestamp(), &batch);
	PG_RETURN_INT64(batch.rows_deleted);
}

/*
 * idem_cleanup_step(batch_size, start, expired_before): one batch of
 * idem_cleanup_all(), which carries the marks from one to the next.  The
 * cutoff comes from the caller, who must not get a claim removed before its
 * time.
 */
Datum
idem_cleanup_step(PG_FUNCTION_ARGS)
{
	TimestampTz start = DT_NOBEGIN;
	TimestampTz expired_before = GetCurrentTimestamp();
	IdemCleanupBatch batch;
	TupleDesc	desc;
	Datum		values[3];
	bool		nulls[3] = {false, false, false};

	if (get_call_result_type(fcinfo, NULL, &desc) != TYPEFUNC_COMPOSITE)
		elog(ERROR, "return type must be a row type");

	if (!PG_ARGISNULL(1))
		start = PG_GETARG_TIMESTAMPTZ(1);
	if (!PG_ARGISNULL(2))
		expired_before = Min(expired_before, PG_GETARG_TIMESTAMPTZ(2));
	run_session_batch(batch_rows_max_arg(fcinfo, 0), start, expired_before,
					  &batch);

	values[0] = Int64GetDatum(batch.rows_deleted);
	values[1] = BoolGetDatum(batch.more);
	values[2] = TimestampTzGetDatum(batch.next_start);
	PG_RETURN_DATUM(HeapTupleGetDatum(heap_form_tuple(BlessTupleDesc(desc),
													  values, nulls)));
}
