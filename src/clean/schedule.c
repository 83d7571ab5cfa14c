/*
 * schedule.c
 *	  From the marks and a batch's result to the next order.
 *
 * A batch starts at the low-water mark, where the batch before it ended, so that it does not
 * pass the dead index entries of the rows that earlier batches removed.  Some rows can still
 * be behind the mark: rows that a batch skipped because they were locked, rows of a
 * transaction that committed late or changed expires_at, rows that were restored or
 * replicated.
 *
 * A rescan finds them.  It reads the index from its very start to the mark.  While somebody
 * holds an old snapshot, that way has a dead entry for every claim removed since.  So a
 * rescan goes in slices, each of them a batch, and after each slice comes a batch at the
 * mark.  How far the rescan has come is in the marks: the next worker continues there.
 *
 * A rescan is due
 *	- if the earliest expiry that is known lies behind the mark;
 *	- IDEM_RESCAN_INTERVAL after the one before began: nobody announces a row that was
 *	  restored;
 *	- as the first one of all, and if it was ordered (after a reload).
 *
 * There is one clock: the time since the latest rescan began.  Slices, and the beginning of
 * the next rescan, wait until that time is IDEM_RESCAN_FACTOR times what the slices of the
 * rescan have taken, so rescans take 5 % of the time at most.  There are two exceptions:
 *	- while nothing is left to remove at the mark, slices run without a pause, up to
 *	  IDEM_RESCAN_INTERVAL before it is over; the next rescan begins that much later;
 *	- an urgent rescan does not pause: the first one, and one that was ordered.
 * A slice that removed as much as a batch may is not counted as time of the rescan.
 */
#include "postgres.h"

#include "common/int.h"

#include "clean/schedule.h"

static bool
is_rescanning(const IdemCleanupMarks *marks)
{
	return marks->rescan_cursor != DT_NOEND;
}

/*
 * Since the latest rescan began; PG_INT64_MAX if there was none.  The same if the clock was
 * set back: otherwise no rescan would begin until the clock has caught up.
 */
static int64
rescan_age_us(const IdemCleanupMarks *marks, TimestampTz now)
{
	int64		age_us;

	if (pg_sub_s64_overflow(now, marks->rescan_began_at, &age_us) || age_us < 0)
		return PG_INT64_MAX;
	return age_us;
}

/* ahead_us: how much of the pause may be left */
static bool
pause_is_over(const IdemCleanupMarks *marks, TimestampTz now, int64 ahead_us)
{
	return rescan_age_us(marks, now) >=
		marks->rescan_us * IDEM_RESCAN_FACTOR - ahead_us;
}

static bool
rescan_is_due(const IdemCleanupRun *run, TimestampTz oldest_expires_at,
			  TimestampTz now)
{
	const IdemCleanupMarks *marks = &run->marks;

	return pause_is_over(marks, now, 0) &&
		(oldest_expires_at < marks->low_water ||
		 rescan_age_us(marks, now) >= IDEM_RESCAN_INTERVAL);
}

static bool
slice_is_due(const IdemCleanupRun *run, TimestampTz now)
{
	return run->marks.rescan_is_urgent ||
		pause_is_over(&run->marks, now,
					  run->more_at_mark ? 0 : IDEM_RESCAN_INTERVAL);
}

void
idem_rescan_begin_run(IdemCleanupRun *run, const IdemCleanupStats *stats,
					  bool is_ordered)
{
	*run = (IdemCleanupRun) {
		.marks = stats->marks,
		.rescan_ordered = is_ordered,
		.more_at_mark = stats->backlog	/* until a batch there tells */
	};
}

static void
begin_rescan(IdemCleanupRun *run, TimestampTz now)
{
	IdemCleanupMarks *marks = &run->marks;

	marks->rescan_began_at = now;
	marks->rescan_cursor = DT_NOBEGIN;
	marks->rescan_us = 0;
	marks->rescan_unknown = 0;
	marks->rescan_is_urgent = run->rescan_ordered;
	marks->rescan_leaves_rows = false;
	run->rescan_ordered = false;
}

/*
 * The mark is now if it is not known, and if the clock was set back.  The first rescan is
 * for all that has expired by now, and a batch at the mark for what expires from now on.
 */
static void
set_mark(IdemCleanupRun *run, TimestampTz now)
{
	if (run->marks.low_water == DT_NOBEGIN)
		run->rescan_ordered = true;
	if (run->marks.low_water == DT_NOBEGIN || run->marks.low_water > now)
		run->marks.low_water = now;
}

bool
idem_rescan_next(IdemCleanupRun *run, TimestampTz oldest_expires_at,
				 TimestampTz now, IdemCleanupOrder *order)
{
	IdemCleanupMarks *marks = &run->marks;
	bool		slice = false;

	set_mark(run, now);
	if (run->latest != IDEM_SLICE_BEHIND)
	{
		/* Only the first round of a run, or backlog at the mark, begins a rescan. */
		bool		may_begin = run->latest == IDEM_NO_BATCH || run->more_at_mark;

		if (run->rescan_ordered ||
			(!is_rescanning(marks) && may_begin &&
			 rescan_is_due(run, oldest_expires_at, now)))
			begin_rescan(run, now);
		slice = is_rescanning(marks) && slice_is_due(run, now);
		if (!slice && !may_begin)
			return false;
	}

	order->start = slice ? marks->rescan_cursor : marks->low_water;
	order->end = slice ? marks->low_water : DT_NOEND;
	order->expired_before = now;
	run->latest = slice ? IDEM_SLICE_BEHIND : IDEM_BATCH_AT_MARK;
	return true;
}

void
idem_rescan_advance(IdemCleanupRun *run, IdemCleanupBatch *batch,
					int64 duration_us)
{
	IdemCleanupMarks *marks = &run->marks;

	if (run->latest == IDEM_BATCH_AT_MARK)
	{
		Assert(batch->report.start == marks->low_water);
		Assert(batch->next_start >= marks->low_water);
		run->more_at_mark = batch->report.more;
		marks->low_water = batch->next_start;
		marks->rows_unknown += batch->rows_unknown;
	}
	else
	{
		Assert(run->latest == IDEM_SLICE_BEHIND);
		Assert(batch->report.start == marks->rescan_cursor);
		if (!batch->leaves_rows)
			marks->rescan_us += duration_us;
		/* A slice that only passed entries does not tell what is behind them. */
		marks->rescan_leaves_rows = batch->report.more &&
			(batch->leaves_rows || marks->rescan_leaves_rows);
		marks->rescan_unknown += batch->rows_unknown;
		marks->rescan_cursor = batch->report.more ? batch->next_start : DT_NOEND;
		if (!batch->report.more)
			marks->rows_unknown = marks->rescan_unknown;
	}
	batch->report.more = run->more_at_mark || marks->rescan_leaves_rows;
}
