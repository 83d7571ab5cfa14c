/*
 * cleanup.h
 *	  One bounded batch of removing expired claims.
 */
#ifndef IDEM_CLEANUP_H
#define IDEM_CLEANUP_H

#include "datatype/timestamp.h"

/* Asked several times a second within a batch: true ends it early. */
typedef bool (*IdemCleanupStop) (void);

/* What one batch is to do */
typedef struct IdemCleanupOrder
{
	TimestampTz start;			/* rows that expire at or after it; DT_NOBEGIN:
								 * all of them */
	TimestampTz end;			/* and before it; DT_NOEND: all of them */
	TimestampTz expired_before; /* and not after it */
	int			rows_max;		/* to be removed at most */
	int			gone_max;		/* entries of rows that are gone to be passed,
								 * up to the end of a second; 0: any number */
	IdemCleanupStop stop;		/* or NULL */
} IdemCleanupOrder;

/* What one batch did.  Nothing of it is published before its commit. */
typedef struct IdemCleanupBatch
{
	TimestampTz start;			/* what expires before it was not looked at */
	TimestampTz end;			/* nor what expires at or after it; DT_NOEND:
								 * all was that has expired */
	int64		rows_deleted;
	int64		rows_skipped;	/* expired, but another transaction has them */
	int64		rows_unknown;	/* expired, not settled, kept by lapsed = unknown */
	int64		rows_gone;		/* entries passed whose rows are gone */
	bool		more;			/* ended by its bounds: there can be more */
	bool		backlog;		/* and did so at a row that has expired */
	TimestampTz next_start;		/* low-water mark: no row before it is left to
								 * this pass, except the skipped ones */
	TimestampTz oldest_expires_at;	/* earliest expiry seen of a row that stays;
									 * DT_NOEND if none was seen */
	uint64		publications;	/* for stats.c: the state it started from */
} IdemCleanupBatch;

/*
 * Carries out the order in the caller's transaction, for about a second, and
 * until its stop says so.  A row that another transaction has locked or changed
 * is skipped.  Where there is more, next_start is after start unless rows_max,
 * the second or stop ended the batch.
 *
 * Takes RowExclusiveLock on the claims until the transaction ends, and never
 * waits for a row.  Raises what the store raises.
 */
extern void idem_cleanup_batch(const IdemCleanupOrder *order,
							   IdemCleanupBatch *batch);

#endif							/* IDEM_CLEANUP_H */
