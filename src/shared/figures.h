/*
 * figures.h
 *	  What is kept of each database: counters of claims and batches, and the marks of its worker.
 */
#ifndef IDEM_SHARED_FIGURES_H
#define IDEM_SHARED_FIGURES_H

#include "datatype/timestamp.h"

#include "outcome.h"

/* The counters of claims: one for each IdemOutcome first, in the order of that type */
enum
{
	IDEM_COUNT_WAITS = IDEM_OUTCOME_COUNT,
	IDEM_COUNT_WAIT_US,
	IDEM_COUNT_TAKEOVERS,
	IDEM_COUNT_LOST_LEASES,
	IDEM_COUNT_HEALED,
	IDEM_CLAIM_COUNTERS			/* how many there are */
};

/* What is published of a batch, after its commit: what was rolled back removed nothing */
typedef struct IdemCleanupReport
{
	TimestampTz start;			/* the batch looked at rows that expire from start on */
	TimestampTz end;			/* and before end; DT_NOEND: at all that have expired */
	TimestampTz oldest_expires_at;	/* earliest expiry it saw of a row that stays;
									 * DT_NOEND: it saw none */
	int64		rows_deleted;
	bool		more;			/* the batch ended by its bounds: there can be more */
	double		seconds;		/* duration, its commit included */
	uint64		publications;	/* of idem_stats_begin_batch() */
} IdemCleanupReport;

/* What one run of the worker leaves to the next; see clean/schedule.h */
typedef struct IdemCleanupMarks
{
	TimestampTz low_water;		/* a batch starts here; DT_NOBEGIN: not known */
	int64		rows_unknown;	/* expired rows that lapsed = unknown keeps: those that
								 * the latest finished rescan and the batches since saw */

	/* the latest rescan of what lies before low_water */
	TimestampTz rescan_began_at;	/* DT_NOBEGIN: there was none */
	TimestampTz rescan_cursor;	/* its next slice starts here; DT_NOEND: it has ended */
	int64		rescan_us;		/* what its slices have taken */
	int64		rescan_unknown; /* rows_unknown of its slices */
	bool		rescan_is_urgent;	/* its slices do not pause */
	bool		rescan_leaves_rows; /* a slice has left rows that the next ones remove */
} IdemCleanupMarks;

#define IDEM_NO_MARKS \
	((IdemCleanupMarks) {.low_water = DT_NOBEGIN, \
	 .rescan_began_at = DT_NOBEGIN, .rescan_cursor = DT_NOEND})

#define IDEM_DURATION_BUCKETS 14

/* 0 is no time: nothing happened yet */
#define IDEM_STATS_NEVER ((TimestampTz) 0)

/* Batches that were committed */
typedef struct IdemCleanupCounters
{
	int64		rows_deleted;
	int64		batches;
	double		last_seconds;
	double		max_seconds;
	double		total_seconds;
	int64		buckets[IDEM_DURATION_BUCKETS]; /* not cumulative */
	TimestampTz last_run;
} IdemCleanupCounters;

#define IDEM_ERROR_TEXT_BYTES_MAX 512

typedef struct IdemCleanupStats
{
	IdemCleanupCounters counters;
	int64		errors;
	TimestampTz last_error_at;
	char		last_error[IDEM_ERROR_TEXT_BYTES_MAX];
	TimestampTz reset_at;

	/* State, which idem_stat_reset() leaves */
	TimestampTz oldest;			/* earliest expiry that may be left; DT_NOEND: none */
	uint64		publications;	/* how often a batch replaced it, or lowered it by claims */
	bool		backlog;		/* the latest batches ended by their bounds */
	IdemCleanupMarks marks;
	int			worker_pid;		/* 0: none */
	uint64		runs;			/* of the worker that came to a regular end */
} IdemCleanupStats;

#endif							/* IDEM_SHARED_FIGURES_H */
