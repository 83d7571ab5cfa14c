/*
 * stats.h
 *	  The shared counters.
 */
#ifndef IDEM_STATS_H
#define IDEM_STATS_H

#include "datatype/timestamp.h"

#include "catalog.h"

struct IdemCleanupBatch;

/* Asks for shared memory.  While shared_preload_libraries are loaded only. */
extern void idem_stats_init(void);

/* Registers the transaction callbacks. */
extern void idem_stats_init_backend(void);

/*
 * Answers of claim calls and what they waited, counted at once: raising one
 * aborts the transaction.  What a transaction achieved (claims, reclaims, healed
 * leases) is counted when it commits.
 */
extern void idem_stats_count_outcome(IdemOutcome outcome);
extern void idem_stats_count_wait(int64 waited_us);
extern void idem_stats_count_lost_lease(void);
extern void idem_stats_count_reclaim(void);
extern void idem_stats_count_healed(void);

/* This transaction claimed a key that is remembered until expires_at.  Cheap:
 * called on the hot path.  Published when the transaction commits. */
extern void idem_stats_count_claim(TimestampTz expires_at);

/*
 * A batch is about to look at the table: to be called before it takes its
 * snapshot.  What is claimed from now on is remembered apart from what the
 * batch may find.  Returns what is to be put into its publications.
 */
extern uint64 idem_stats_begin_batch(void);

/* A session's own batch (SQL function), published when it commits. */
extern void idem_stats_count_cleanup(const struct IdemCleanupBatch *batch,
									 double seconds);

/* ----- for the worker of a database, about its own ----- */

/* What one run of the worker leaves to the next; only the worker writes it */
typedef struct IdemCleanupMarks
{
	TimestampTz low_water;		/* where a batch starts; DT_NOBEGIN: not known */
	TimestampTz rescan_after;	/* no walk behind the low-water mark until
								 * then */
	TimestampTz full_scan_at;	/* start of the latest one from the very start */
	int64		rows_unknown;	/* kept for good: the latest of these counted
								 * them, and the batches since then */

	/* The walk on its way, if walk_at is not DT_NOEND */
	TimestampTz walk_at;		/* where its next slice starts */
	bool		walk_is_full;	/* it began at the very start */
	bool		walk_is_urgent; /* it is not to wait for rescan_after */
	int64		walk_unknown;	/* kept for good, seen in it so far */
} IdemCleanupMarks;

/*
 * Reads the marks, and the earliest expiry that may be left in the table
 * (DT_NOEND: none known), with all that was claimed up to now.  False: no
 * statistics are kept of this database, and nothing is changed.
 */
extern bool idem_stats_get_marks(IdemCleanupMarks *marks,
								 TimestampTz *oldest_expires_at);

/* This process becomes the database's worker until it ends.  False: another
 * process is. */
extern bool idem_stats_attach_worker(void);

/* The worker's batch has been committed.  backlog: it is known that some
 * expired rows are left, by this batch or the one before. */
extern void idem_stats_publish_cleanup(const struct IdemCleanupBatch *batch,
									   double seconds, bool backlog,
									   const IdemCleanupMarks *marks);

/* There is nothing to clean: the database does not have the extension. */
extern void idem_stats_publish_absent(void);

/* False: it is the latest one that was published, again. */
extern bool idem_stats_publish_error(const char *message);

/* The run came to a regular end. */
extern void idem_stats_publish_run(void);

/* ----- for the launcher, about any database ----- */

typedef struct IdemCleanupStatus
{
	TimestampTz oldest_expires_at;	/* DT_NOEND: none known */
	bool		backlog;
	int			worker_pid;		/* 0: none */
	uint64		runs;			/* that came to a regular end */
} IdemCleanupStatus;

/* False, and a status that says nothing, if no statistics are kept. */
extern bool idem_stats_get_status(Oid database, IdemCleanupStatus *status);

/* Databases that statistics are kept of; palloc'd.  Returns their number. */
extern int	idem_stats_get_databases(Oid **databases);

/* Forgets a database that does not exist any more. */
extern void idem_stats_forget_database(Oid database);

#endif							/* IDEM_STATS_H */
