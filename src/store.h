/*
 * store.h
 *	  The claims table.  Nothing outside store.c knows how claims are stored.
 */
#ifndef IDEM_STORE_H
#define IDEM_STORE_H

#include "datatype/timestamp.h"
#include "storage/itemptr.h"
#include "utils/jsonb.h"
#include "utils/snapshot.h"

#include "catalog.h"
#include "key.h"

/* A claim as it is stored, without its key.  NULL and IDEM_NO_TIME: none. */
typedef struct IdemRow
{
	IdemState	state;
	TimestampTz expires_at;
	TimestampTz lease_until;
	int64		token;			/* 0: none */
	bytea	   *fingerprint;
	Jsonb	   *result;			/* of a failed request: the error */
	Jsonb	   *progress;
} IdemRow;

#define IDEM_NO_TIME DT_NOBEGIN

/* What a look at a key found */
typedef enum IdemProbe
{
	IDEM_PROBE_ABSENT,
	IDEM_PROBE_PRESENT,			/* committed, or written by this transaction */
	IDEM_PROBE_INSERTING,		/* by another transaction; so are the next two */
	IDEM_PROBE_UPDATING,
	IDEM_PROBE_DELETING
} IdemProbe;

typedef struct IdemFound
{
	/* IDEM_PROBE_PRESENT */
	IdemRow		row;			/* palloc'd in the caller's context */
	ItemPointerData tid;
	bool		ours;			/* written by this transaction */
	bool		visible;		/* for store.c */

	/* in flight */
	TransactionId xid;			/* who inserts, updates or deletes */
} IdemFound;

typedef struct IdemStore IdemStore;

/* Once a backend */
extern void idem_store_init(void);

/*
 * Opens the table for writing, command names the SQL function for the errors:
 * 25006 in a read-only or parallel transaction or on a standby, 0A000 where the
 * table was given what a direct insert would pass by.  Takes RowExclusiveLock
 * until the transaction ends.  One at a time: close it before the next open.
 */
extern IdemStore *idem_store_open(const char *command);
extern void idem_store_close(IdemStore *store);

/*
 * What the table says of the key right now, whatever this transaction's
 * snapshot says.  Raises 40001 where a snapshot of the whole transaction cannot
 * see the row that decides.  Takes no lock.  ABSENT is a strong hint, not the
 * truth: a row that is being updated can be missed, so act on it by an insert
 * only, which cannot.
 */
extern IdemProbe idem_store_probe(IdemStore *store, const IdemKey *key,
								  IdemFound *found);

/*
 * The next three say false, and have written nothing, when another transaction
 * was there first: probe again.  What they wrote is visible to the next command
 * of this transaction, as after an SQL statement.
 */
extern bool idem_store_insert(IdemStore *store, const IdemKey *key,
							  const IdemRow *row);
extern bool idem_store_update(IdemStore *store, const IdemKey *key,
							  ItemPointer tid, const IdemRow *row);
extern bool idem_store_delete(IdemStore *store, ItemPointer tid);

/* Waits until nobody else has the row locked, without keeping a lock. */
extern void idem_store_wait_for_row_lock(IdemStore *store, ItemPointer tid);

/* The claim as the snapshot sees it; read-only, also on a standby. */
extern bool idem_store_fetch(const IdemKey *key, Snapshot snapshot,
							 IdemRow *row);

/*
 * Rows in the order of expires_at, from a given one on, as a new snapshot sees
 * them.  Takes RowExclusiveLock until the transaction ends.  For cleanup.c.
 */
typedef struct IdemExpiryScan IdemExpiryScan;

extern IdemExpiryScan *idem_store_expiry_scan_begin(TimestampTz from);
extern bool idem_store_expiry_scan_next(IdemExpiryScan *scan,
										TimestampTz *expires_at);

/* Deletes the current row without waiting.  False: another transaction has
 * locked or changed it. */
extern bool idem_store_expiry_scan_delete(IdemExpiryScan *scan);
extern void idem_store_expiry_scan_end(IdemExpiryScan *scan);

#endif							/* IDEM_STORE_H */
