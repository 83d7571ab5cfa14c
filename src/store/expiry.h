/*
 * expiry.h
 *	  Rows of the claims table in the order of expires_at.
 */
#ifndef IDEM_STORE_EXPIRY_H
#define IDEM_STORE_EXPIRY_H

#include "datatype/timestamp.h"

#include "store/catalog.h"

/*
 * Rows from a given time on, as a new snapshot sees them.  Among them come dead entries:
 * entries of the index whose rows are deleted, or not yet committed.  While somebody holds
 * an old snapshot there can be any number of them, and passing them takes time.
 *
 * From begin to end no other function of the store is called.  Takes RowExclusiveLock
 * until the transaction ends.
 */
typedef struct IdemExpiryScan IdemExpiryScan;

typedef struct IdemExpiring
{
	TimestampTz expires_at;
	bool		dead;			/* a dead entry: the rest is not set */
	IdemState	state;
	TimestampTz lease_until;	/* in progress only */
	const text *scope;			/* in progress only; valid until the next row */
} IdemExpiring;

extern IdemExpiryScan *idem_store_expiry_scan_begin(TimestampTz from);
extern bool idem_store_expiry_scan_next(IdemExpiryScan *scan, IdemExpiring *row);

/* Deletes the current row without waiting.  False: another transaction has locked or
 * changed it. */
extern bool idem_store_expiry_scan_delete(IdemExpiryScan *scan);
extern void idem_store_expiry_scan_end(IdemExpiryScan *scan);

#endif							/* IDEM_STORE_EXPIRY_H */
