/*
 * schedule.c
 *	  From the marks and a batch's result to the next order.  README.md draws the low-water mark,
 *	  the rescan behind it, and says as an inequality when a slice runs.
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
 * Time since the latest rescan began; PG_INT64_MAX if there was none, or if the clock was set
 * back.  Otherwise no rescan would begin until the clock has caught up.
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
 * Without a mark, it becomes now: the first rescan removes what has expired by now, batches at the
 * mark what expires later.  If the clock was set back, the mark follows it.
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
