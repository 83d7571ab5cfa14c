/*
 * stats.h
 *	  Each database's statistics in shared memory, and the marks of its worker.
 *
 * Where there is no shared memory (shared/memory.h), nothing is counted, and the functions that read
 * say so.
 */
#ifndef IDEM_SHARED_STATS_H
#define IDEM_SHARED_STATS_H

#include "datatype/timestamp.h"
#include "fmgr.h"

#include "outcome.h"

/* Once a backend, before idem_shared_init() */
extern void idem_stats_init(void);

/* ----- claims ----- */

/* The counters of claims: one for each IdemOutcome first, in the order of that type */
enum
{
	IDEM_COUNT_WAITS = IDEM_OUTCOME_COUNT,
	IDEM_COUNT_WAIT_US,
	IDEM_COUNT_RECLAIMS,
	IDEM_COUNT_LOST_LEASES,
	IDEM_COUNT_HEALED,
	IDEM_CLAIM_COUNTERS			/* how many there are */
};

/*
 * Answers of claim calls, waits and lost leases are counted at once, because raising one
 * aborts the transaction.  Claims, reclaims and healed leases are counted when the
 * transaction commits.
 */
extern void idem_stats_count_outcome(const text *scope, IdemOutcome outcome);
extern void idem_stats_count_wait(int64 waited_us);
extern void idem_stats_count_lost_lease(void);
extern void idem_stats_count_reclaim(void);
extern void idem_stats_count_healed(void);

/* This transaction claimed a key that is remembered until expires_at.  Cheap: every claim
 * calls it. */
extern void idem_stats_count_claim(const text *scope, TimestampTz expires_at);

/* ----- cleanup ----- */

/* What is published of a batch, after its commit: what was rolled back removed nothing */
typedef struct IdemCleanupReport
{
	TimestampTz start;			/* the batch looked at rows that expire from start on */
	TimestampTz end;			/* and before end; DT_NOEND: at all that have expired */
	TimestampTz oldest_expires_at;	/* earliest expiry it saw of a row that stays;
									 * DT_NOEND: it saw none */
	int64		rows_deleted;
	bool		more;			/* the batch ended by its bounds: there can be more */
	bool		backlog;		/* expired rows that can be removed are known to be left */
	double		seconds;		/* duration, its commit included */
	uint64		publications;	/* of idem_stats_begin_batch() */
} IdemCleanupReport;

/*
 * Call this before the batch takes its snapshot: claims that commit from now on are
 * remembered apart from what the batch may see.  Sets publications for the batch's report.
 * Returns the earliest expiry that may be left in the table; DT_NOEND: none is known.
 */
extern TimestampTz idem_stats_begin_batch(uint64 *publications);

/* A session's batch.  Published when its transaction commits. */
extern void idem_stats_count_cleanup(const IdemCleanupReport *report);

/* The backlog that the worker is removing; see backlog.h */
typedef struct IdemBacklog
{
	TimestampTz since;			/* when it began; 0: there is none */
	TimestampTz from;			/* claims that expired later were left then */
	TimestampTz removed_until;	/* and are left now */
	int64		rows_deleted;	/* since it began */
	bool		is_reported;	/* in the log */
} IdemBacklog;

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

	IdemBacklog backlog;
} IdemCleanupMarks;

#define IDEM_NO_MARKS \
	((IdemCleanupMarks) {.low_water = DT_NOBEGIN, \
	 .rescan_began_at = DT_NOBEGIN, .rescan_cursor = DT_NOEND})

/* For that worker, after the commit of its batch */
extern void idem_stats_publish_cleanup(const IdemCleanupReport *report,
									   const IdemCleanupMarks *marks);

/*
 * The database does not have the extension: it has nothing to clean.  Call
 * idem_stats_begin_batch() before you look for the extension: otherwise this forgets a claim
 * of an extension that is created meanwhile.
 */
extern void idem_stats_publish_absent(void);

/* ----- reading ----- */

#define IDEM_DURATION_BUCKETS 14

/* Upper bounds of the buckets, in seconds; the last one is infinite. */
extern const double idem_duration_bounds[IDEM_DURATION_BUCKETS];

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

	/* State, which idem_stats_reset() leaves */
	TimestampTz oldest;			/* earliest expiry that may be left; DT_NOEND: none */
	uint64		publications;	/* how often a batch replaced it, or lowered it by claims */
	bool		backlog;		/* expired rows that can be removed are known to be left */
	IdemCleanupMarks marks;
	int			worker_pid;		/* 0: none */
	uint64		runs;			/* of the worker that came to a regular end */
} IdemCleanupStats;

/*
 * A copy of this database's statistics.  False: shared memory has no room for them.  Raises
 * 55000 without shared memory.  claims: an array of IDEM_CLAIM_COUNTERS; or NULL.
 */
extern bool idem_stats_read(IdemCleanupStats *stats, uint64 *claims);

/*
 * The answers of a scope of this database, in an array of IDEM_OUTCOME_COUNT, for a number
 * below IDEM_SCOPE_NUMBERS (scope_stats.h).  name is in shared memory, and NULL for the scopes
 * that are counted together.  False: no scope has this number, or shared memory has no room.
 * Raises 55000 without shared memory.
 */
extern bool idem_stats_read_scope(int number, uint64 *answers,
								  const char **name, int *length);

/* Zeroes this database's counters.  Raises 55000 without shared memory. */
extern void idem_stats_reset(void);

/* A copy of any database's.  False: it has none; the copy says that nothing happened. */
extern bool idem_stats_read_database(Oid database, IdemCleanupStats *stats);

#endif							/* IDEM_SHARED_STATS_H */
