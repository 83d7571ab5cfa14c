/*
 * batch.h
 *	  One bounded batch of removing expired claims.
 */
#ifndef IDEM_CLEAN_BATCH_H
#define IDEM_CLEAN_BATCH_H

#include "datatype/timestamp.h"

#include "shared/stats.h"

/* Asked several times a second within a batch: true ends the batch early. */
typedef bool (*IdemCleanupStop) (void);

/* What one batch is to do */
typedef struct IdemCleanupOrder
{
	TimestampTz start;			/* rows that expire at or after it; DT_NOBEGIN:
								 * all of them */
	TimestampTz end;			/* and before it; DT_NOEND: all of them */
	TimestampTz expired_before; /* and not after it */
	int			rows_max;		/* how many rows to remove at most */
	int			dead_max;		/* how many dead entries to pass at most, up to the end
								 * of a second; 0: any number */
	bool		pass_all;		/* pass rows that stay, however long that takes, until
								 * one is removed */
	IdemCleanupStop stop;		/* or NULL */
} IdemCleanupOrder;

/* What one batch did */
typedef struct IdemCleanupBatch
{
	IdemCleanupReport report;	/* all but seconds and publications */
	bool		leaves_rows;	/* it ended by its bounds at a row, after removals */
	int64		rows_skipped;	/* expired, but locked or changed by another
								 * transaction, or under a live lease */
	int64		rows_unknown;	/* expired, not settled, kept by lapsed = unknown */
	int64		dead_entries;	/* index entries passed whose rows are dead */
	TimestampTz next_start;		/* rows left before it: only those of rows_skipped and
								 * rows_unknown */
} IdemCleanupBatch;

/*
 * Carries out the order in the caller's transaction.  README.md has a table of how a batch ends.
 * The caller publishes the report after its commit.
 *
 * Progress: if more is set, next_start > start, or rows were removed, or stop ended the batch.
 *
 * Takes RowExclusiveLock on the claims until the transaction ends, AccessShareLock on the scopes
 * if a row is in progress, and never waits for a row.  Raises what the store raises.
 */
extern void idem_cleanup_batch(const IdemCleanupOrder *order,
							   IdemCleanupBatch *batch);

#endif							/* IDEM_CLEAN_BATCH_H */
