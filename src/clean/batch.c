/*
 * batch.c
 *	  One bounded batch of removing expired claims, in the caller's transaction.  README.md has a
 *	  table of what a batch meets, and of how it ends.
 *
 * The semantics are DELETE ... FOR UPDATE SKIP LOCKED, so any number of workers and sessions may
 * clean at the same time.
 *
 * Dead entries are index entries of removed rows.  While a session holds an old snapshot, neither
 * VACUUM nor the index scan can remove them, and their number has no limit.  Therefore the worker
 * sets dead_max.
 *
 * Locks: RowExclusiveLock on the table and its indexes until the transaction ends, as for
 * any DML; see the store.
 */
#include "postgres.h"

#include "access/xact.h"
#include "miscadmin.h"
#include "storage/lmgr.h"

#include "clean/batch.h"
#include "store/catalog.h"
#include "store/duration.h"
#include "store/policy.h"
#include "store/store.h"

/* A longer batch would hold back VACUUM and DDL. */
#define BATCH_DURATION_MAX_US	INT64CONST(1000000)

/* How often the caller is asked whether to go on */
#define STOP_INTERVAL_US		INT64CONST(250000)

/* How often a batch reads the clock: a row can be slow to read, a dead entry is not. */
#define ROWS_PER_CLOCK_CHECK	16
#define DEAD_PER_CLOCK_CHECK	1024

/* When a batch has to end */
typedef struct BatchBounds
{
	const IdemCleanupOrder *order;
	int64		pass_end_us;	/* on the monotonic clock; 0: not started */
	int64		removal_end_us; /* the same */
	int64		next_stop_us;
	uint32		rows_seen;
	bool		passing_is_over;
	TimestampTz row_expires_at; /* of the latest row */
	TimestampTz expires_at;		/* of the latest entry, dead or not */
	int64		rows_unknown;	/* of entries that expire before it */
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
 * Whether the batch ends at this row; see the table in README.md.  Of its time, the limit for a batch
 * that has removed nothing counts from the first row seen, the other one from the first removal.
 */
static bool
is_at_bounds(BatchBounds *bounds, int64 rows_deleted, bool begins_second)
{
	bool		removes = rows_deleted > 0;

	if (rows_deleted >= bounds->order->rows_max)
		return true;
	if (bounds->rows_seen++ % ROWS_PER_CLOCK_CHECK == 0 ||
		(removes && bounds->removal_end_us == 0))
	{
		int64		now_us = idem_monotonic_us();

		if (bounds->pass_end_us == 0)
			bounds->pass_end_us = now_us + BATCH_DURATION_MAX_US;
		if (removes && bounds->removal_end_us == 0)
			bounds->removal_end_us = now_us + BATCH_DURATION_MAX_US;
		bounds->passing_is_over = now_us >= bounds->pass_end_us;
		if ((removes && now_us >= bounds->removal_end_us) ||
			must_stop(bounds, now_us))
			return true;
	}
	return bounds->passing_is_over && !removes && begins_second &&
		!bounds->order->pass_all;
}

/* Whether the batch ends at this dead entry: after dead_max of them, where a second begins. */
static bool
is_at_dead_bounds(BatchBounds *bounds, const IdemCleanupBatch *batch,
				  TimestampTz expires_at)
{
	int			dead_max = bounds->order->dead_max;

	if (dead_max > 0 && batch->dead_entries >= dead_max &&
		expires_at > bounds->expires_at)
		return true;
	return batch->dead_entries % DEAD_PER_CLOCK_CHECK == 0 &&
		must_stop(bounds, idem_monotonic_us());
}

/* The rows come in order, so the first one that stays is the oldest. */
static void
note_row_that_stays(IdemCleanupBatch *batch, TimestampTz expires_at)
{
	if (batch->report.oldest_expires_at == DT_NOEND)
		batch->report.oldest_expires_at = expires_at;
}

/*
 * Nobody knows whether this request was executed, and the scope's policy wants a person to find
 * out.  Until then the row stays.
 *
 * The batch keeps the lock of idem_scopes until its transaction ends, so it waits for that lock
 * once at most.  If it took the lock anew for each row, it could wait at each row.
 */
static bool
is_kept_as_unknown(const IdemExpiring *row)
{
	if (row->state != IDEM_STATE_IN_PROGRESS)
		return false;
	LockRelationOid(idem_catalog()->scopes, AccessShareLock);
	return idem_policy(row->scope).lapsed_unknown;
}

static bool
is_live(const IdemExpiring *row, TimestampTz now)
{
	return row->state == IDEM_STATE_IN_PROGRESS && row->lease_until > now;
}

/* The next batch starts at the second in which this one ends, and counts the unknown rows of
 * that second. */
static void
note_entry(BatchBounds *bounds, const IdemCleanupBatch *batch,
		   TimestampTz expires_at)
{
	Assert(expires_at >= bounds->expires_at);
	if (expires_at > bounds->expires_at)
		bounds->rows_unknown = batch->rows_unknown;
	bounds->expires_at = expires_at;
}

/* The bounds end the batch at this row or entry, which has expired: there can be more. */
static void
end_at(IdemCleanupBatch *batch, const BatchBounds *bounds, const IdemExpiring *row)
{
	batch->report.more = true;
	batch->report.end = row->expires_at;
	batch->next_start = row->expires_at;
	batch->rows_unknown = bounds->rows_unknown;
	if (row->dead)
		return;
	batch->leaves_rows = batch->report.rows_deleted > 0 && !is_kept_as_unknown(row);
	if (!is_kept_as_unknown(row))
		note_row_that_stays(batch, row->expires_at);
}

static void
clean_row(IdemExpiryScan *scan, const IdemExpiring *row, TimestampTz now,
		  IdemCleanupBatch *batch)
{
	if (is_kept_as_unknown(row))
		batch->rows_unknown++;
	else if (!is_live(row, now) && idem_store_expiry_scan_delete(scan))
		batch->report.rows_deleted++;
	else
	{
		batch->rows_skipped++;
		note_row_that_stays(batch, row->expires_at);
	}
}

static void
scan_batch(IdemExpiryScan *scan, BatchBounds *bounds, IdemCleanupBatch *batch)
{
	const IdemCleanupOrder *order = bounds->order;
	IdemExpiring row;

	while (idem_store_expiry_scan_next(scan, &row) &&
		   row.expires_at < order->end)
	{
		bool		has_expired = row.expires_at <= order->expired_before;
		bool		begins_second = row.expires_at > bounds->row_expires_at;
		bool		is_over = row.dead &&
			is_at_dead_bounds(bounds, batch, row.expires_at);

		CHECK_FOR_INTERRUPTS();

		if (row.dead && !is_over)
		{
			batch->dead_entries++;
			note_entry(bounds, batch, row.expires_at);
			continue;
		}
		if (!has_expired)
		{
			/* If the entry is dead, its time is still a lower bound: rows behind it expire
			 * later.  So the next look comes early enough. */
			note_row_that_stays(batch, row.expires_at);
			break;
		}
		note_entry(bounds, batch, row.expires_at);
		if (is_over ||
			is_at_bounds(bounds, batch->report.rows_deleted, begins_second))
		{
			end_at(batch, bounds, &row);
			return;
		}
		bounds->row_expires_at = row.expires_at;
		clean_row(scan, &row, order->expired_before, batch);
	}
	/* The next batch must not start later than expired_before: a claim that commits after our
	 * snapshot can expire before the row at which the scan ended. */
	batch->next_start = Max(order->start,
							Min(order->end, order->expired_before));
}

void
idem_cleanup_batch(const IdemCleanupOrder *order, IdemCleanupBatch *batch)
{
	BatchBounds bounds = {
		.order = order,
		.row_expires_at = order->start,
		.expires_at = order->start
	};
	IdemExpiryScan *scan;

	Assert(IsTransactionState());
	Assert(order->rows_max > 0);

	memset(batch, 0, sizeof(IdemCleanupBatch));
	batch->report.start = order->start;
	batch->report.end = order->end;
	batch->report.oldest_expires_at = DT_NOEND;

	scan = idem_store_expiry_scan_begin(order->start);
	scan_batch(scan, &bounds, batch);
	idem_store_expiry_scan_end(scan);

	Assert(batch->next_start >= order->start);
	Assert(batch->leaves_rows <= batch->report.more);
}
