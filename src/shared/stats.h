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
#include "shared/figures.h"

/* Once a backend, before idem_shared_init() */
extern void idem_stats_init(void);

/* ----- claims ----- */

/*
 * Answers of claim calls, waits and lost leases are counted at once, because raising one
 * aborts the transaction.  Claims, takeovers and healed leases are counted when the
 * transaction commits.
 */
extern void idem_stats_count_outcome(const text *scope, IdemOutcome outcome);
extern void idem_stats_count(int counter, uint64 n);
extern void idem_stats_count_at_commit(int counter);

/* This transaction claimed a key that is remembered until expires_at.  Cheap: every claim
 * calls it. */
extern void idem_stats_count_claim(const text *scope, TimestampTz expires_at);

/* ----- cleanup ----- */

/*
 * Call this before the batch takes its snapshot: claims that commit from now on are
 * remembered apart from what the batch may see.  Sets publications for the batch's report.
 * Returns the earliest expiry that may be left in the table; DT_NOEND: none is known.
 */
extern TimestampTz idem_stats_begin_batch(uint64 *publications);

/* A session's batch.  Published when its transaction commits. */
extern void idem_stats_count_cleanup(const IdemCleanupReport *report);

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

/* Upper bounds of the buckets, in seconds; the last one is infinite. */
extern const double idem_duration_bounds[IDEM_DURATION_BUCKETS];

struct IdemDatabase;

/* A copy of a slot's statistics of cleaning */
extern void idem_stats_read(struct IdemDatabase *slot, IdemCleanupStats *stats);

/* A copy of any database's.  False: it has none; the copy says that nothing happened. */
extern bool idem_stats_read_database(Oid database, IdemCleanupStats *stats);

#endif							/* IDEM_SHARED_STATS_H */
