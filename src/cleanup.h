/*
 * cleanup.h
 *	  One bounded batch of removing expired claims.
 */
#ifndef IDEM_CLEANUP_H
#define IDEM_CLEANUP_H

#include "datatype/timestamp.h"

/* What one batch did.  Nothing of it is published before its commit. */
typedef struct IdemCleanupBatch
{
	TimestampTz start;			/* what expires before it was not looked at */
	int64		rows_deleted;
	int64		rows_skipped;	/* expired, but another transaction has them */
	int64		rows_unknown;	/* expired, not settled, kept by lapsed = unknown */
	bool		more;			/* ended by its bounds: there can be more */
	TimestampTz next_start;		/* low-water mark: no row before it is left to
								 * this pass, except the skipped ones */
	TimestampTz oldest_expires_at;	/* earliest expiry seen of a row that stays;
									 * DT_NOEND if none was seen */
	uint64		publications;	/* for stats.c: the state it started from */
} IdemCleanupBatch;

/* Asked several times a second within a batch: true ends it early. */
typedef bool (*IdemCleanupStop) (void);

/*
 * Removes, in the caller's transaction, rows that expire at or after start
 * (DT_NOBEGIN: all of them) and not after expired_before: at most
 * batch_rows_max of them, for about a second, and until stop (may be NULL)
 * says so.  A row that another transaction has locked or changed is skipped.
 *
 * Takes RowExclusiveLock on the claims until the transaction ends, and never
 * waits for a row.  Raises what the store raises.
 */
extern void idem_cleanup_batch(int batch_rows_max, TimestampTz start,
							   TimestampTz expired_before,
							   IdemCleanupStop stop,
							   IdemCleanupBatch *batch);

#endif							/* IDEM_CLEANUP_H */
