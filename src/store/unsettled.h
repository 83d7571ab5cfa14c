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
 * Such rows as the snapshot sees them, in no order.  scope: only those of a scope; NULL: of
 * all.  It only reads, also on a standby, and holds AccessShareLock on the table from begin
 * to end.  Raises 55000 where the index is missing that finds these rows among all others,
 * and 55000 or 40001 where that index was created too late for the snapshot.
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
