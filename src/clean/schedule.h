/*
 * schedule.h
 *	  What the worker's next batch looks at: pure functions, without a clock or a table.
 */
#ifndef IDEM_CLEAN_SCHEDULE_H
#define IDEM_CLEAN_SCHEDULE_H

#include "datatype/timestamp.h"

#include "clean/batch.h"
#include "shared/stats.h"

/* Without a known row behind the mark, a rescan begins this long after the one before. */
#define IDEM_RESCAN_INTERVAL (50 * USECS_PER_SEC)

/* Rescans take at most 1/20 of the time, that is 5 %. */
#define IDEM_RESCAN_FACTOR 20

/* One run of a database's worker */
typedef struct IdemCleanupRun
{
	IdemCleanupMarks marks;		/* left to the next run */
	bool		rescan_ordered; /* begin with an urgent rescan */

	/* the latest batch of this run */
	enum
	{
		IDEM_NO_BATCH,
		IDEM_SLICE_BEHIND,		/* of a rescan, which ends at the mark */
		IDEM_BATCH_AT_MARK
	}			latest;
	bool		more_at_mark;	/* the latest batch there ended by its bounds */
} IdemCleanupRun;

/* stats: what the run before has left.  is_ordered: begin with an urgent rescan. */
extern void idem_rescan_begin_run(IdemCleanupRun *run, const IdemCleanupStats *stats,
								  bool is_ordered);

/*
 * Sets where the next batch starts and ends, and its expired_before; the rest of the order
 * is the caller's.  oldest_expires_at: the earliest expiry that may be left, DT_NOEND: none
 * is known.  False: the run has nothing more to do.
 */
extern bool idem_rescan_next(IdemCleanupRun *run, TimestampTz oldest_expires_at,
							 TimestampTz now, IdemCleanupOrder *order);

/* The batch that was ordered has been committed, and took that long in all.  In its report, more
 * then tells of the database: there can be more at the mark or behind it. */
extern void idem_rescan_advance(IdemCleanupRun *run, IdemCleanupBatch *batch,
								int64 duration_us);

#endif							/* IDEM_CLEAN_SCHEDULE_H */
