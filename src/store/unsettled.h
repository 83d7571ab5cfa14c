/*
 * unsettled.h
 *	  Rows of the claims table that are in progress: leases that nobody has settled.
 */
#ifndef IDEM_STORE_UNSETTLED_H
#define IDEM_STORE_UNSETTLED_H

#include "datatype/timestamp.h"
#include "utils/snapshot.h"

#include "store/key.h"
#include "store/store.h"

/*
 * Reads the rows in progress, as the snapshot sees them, in no order.  scope: only those of a
 * scope; NULL: of all.  It only reads, also on a standby, and holds AccessShareLock on the table
 * from begin to end.  Raises an error if their index cannot be used:
 *	55000	it is missing, or was created too late for the snapshot of this statement
 *	40001	it was created too late for the snapshot of the whole transaction
 */
typedef struct IdemUnsettledScan IdemUnsettledScan;

/* Valid until the next row */
typedef struct IdemUnsettled
{
	IdemKey		key;
	TimestampTz lease_until;	/* IDEM_NO_TIME: somebody has removed it by SQL */
	TimestampTz expires_at;
	const IdemStored *progress; /* NULL: none */
} IdemUnsettled;

extern IdemUnsettledScan *idem_store_unsettled_scan_begin(const text *scope,
														  Snapshot snapshot);
extern bool idem_store_unsettled_scan_next(IdemUnsettledScan *scan,
										   IdemUnsettled *row);
extern void idem_store_unsettled_scan_end(IdemUnsettledScan *scan);

#endif							/* IDEM_STORE_UNSETTLED_H */
