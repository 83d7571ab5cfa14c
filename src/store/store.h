/*
 * store.h
 *	  The claims table.  Only store/open.c, store/rows.c, expiry.c and unsettled.c know
 *	  how claims are stored.
 */
#ifndef IDEM_STORE_STORE_H
#define IDEM_STORE_STORE_H

#include "datatype/timestamp.h"
#include "storage/itemptr.h"
#include "utils/jsonb.h"
#include "utils/snapshot.h"

#include "store/catalog.h"
#include "store/key.h"

/*
 * A value of a row.  It can be compressed, or a pointer to where TOAST keeps it.  A value
 * that is written back as it was read keeps that pointer, and costs nothing.
 * idem_stored_jsonb() makes a Jsonb of it, in the caller's context, while the lock of the
 * table is held and the caller's snapshot is active.  NULL stays NULL.
 */
typedef struct varlena IdemStored;

extern Jsonb *idem_stored_jsonb(const IdemStored *stored);

/* A claim as it is stored, without its key.  NULL and IDEM_NO_TIME: none. */
typedef struct IdemRow
{
	IdemState	state;
	bool		healed;			/* a lease that was completed by idem_heal() */
	TimestampTz expires_at;		/* whole seconds; see the functions that write */
	TimestampTz lease_until;	/* not of a healed one */
	int64		token;			/* 0: none */
	const IdemStored *fingerprint;	/* a bytea */
	const IdemStored *result;	/* a jsonb; of a failed request: the error */
	const IdemStored *progress; /* a jsonb */
	TransactionId writer;		/* that wrote this version of it, or FrozenTransactionId;
								 * idem_store_fetch() sets it */
} IdemRow;

#define IDEM_NO_TIME DT_NOBEGIN

/*
 * Which version of a row it is.  Only the store looks into it.  Nothing pins its page.  It is valid
 * until the statement ends that has found it: the statement has had a snapshot since before the
 * look, so whatever transaction ends the version runs beside that snapshot.  Therefore neither
 * pruning nor VACUUM removes the version, and no other row gets its place: also while the caller
 * waits for a holder, or has given the lock of the table back (idem_store_step_back()).  (On 15
 * and 16 with old_snapshot_threshold, a statement that is older than that lacks this protection.)
 */
typedef ItemPointerData IdemRowRef;

/* What a look at a key found */
typedef enum IdemProbe
{
	IDEM_PROBE_ABSENT,
	IDEM_PROBE_GUESSED_ABSENT,	/* it did not look: insert, and see */
	IDEM_PROBE_PRESENT,			/* committed, or written by this transaction */
	IDEM_PROBE_INSERTING,		/* by another transaction; so are the next two */
	IDEM_PROBE_UPDATING,
	IDEM_PROBE_DELETING
} IdemProbe;

typedef struct IdemFound
{
	/* IDEM_PROBE_PRESENT */
	IdemRow		row;			/* palloc'd in the caller's context */
	IdemRowRef	ref;
	bool		ours;			/* written by this transaction */

	/* in flight */
	TransactionId xid;			/* that inserts, updates or deletes */
	uint32		speculative;	/* token of an insertion that can still lose the key;
								 * else 0 */
} IdemFound;

/* ----- lifetime: store/open.c ----- */

/* Once a backend */
extern void idem_store_init(void);

/*
 * To be called first by every SQL function that writes, which command names for the error:
 * 25006 in a read-only or parallel transaction or on a standby.  Takes RowExclusiveLock on
 * the table until the transaction ends.
 *
 * It and the functions below raise 0A000 where the table was given what a direct insert
 * would pass by.
 */
extern void idem_store_open(const char *command);

/*
 * Gives the lock back before the transaction ends, if it has not written any row; and takes
 * it again, which can wait for DDL.
 */
extern void idem_store_step_back(void);
extern void idem_store_reopen(void);

/* ----- reading ----- */

/*
 * What the table says of the key right now, whatever this transaction's snapshot says.
 * Raises 40001 where a snapshot of the whole transaction cannot see the row that decides.
 * Takes no lock, and never waits.
 *
 * ABSENT is a strong hint, not the truth: the probe can miss a row that is being updated.
 * An insert would find it.  Before you conclude anything else from ABSENT, ask
 * idem_store_is_absent().
 *
 * may_guess: where this session has claimed only new keys lately, it may answer
 * GUESSED_ABSENT, without a look.
 */
extern IdemProbe idem_store_probe(const IdemKey *key, bool may_guess,
								  IdemFound *found);

/* True: so many keys of this session were new that the next nkeys can be inserted together
 * without a probe. */
extern bool idem_store_may_guess(int nkeys);

extern bool idem_store_is_absent(const IdemKey *key);

/*
 * In a SERIALIZABLE transaction, an answer must take part in conflict checking like a read
 * of the row.  An insert does.  So do idem_store_is_absent(), and idem_store_probe() when it
 * returns PRESENT: they read the row by the transaction's snapshot as well.  For any other
 * answer that rests on what the table says, call this.  At other levels it does nothing.
 */
extern void idem_store_note_read(const IdemKey *key);

/* Finds the key's row if this transaction has written it; false otherwise, whatever else
 * there is of the key.  Never raises 40001. */
extern bool idem_store_find_ours(const IdemKey *key, IdemFound *found);

/* The order of the primary key: less than, equal to or greater than 0 */
extern int	idem_store_compare_keys(const IdemKey *a, const IdemKey *b);

/* True: idem_store_probe() would return ABSENT for each key from the first to the last in
 * that order. */
extern bool idem_store_is_empty_between(const IdemKey *first,
										const IdemKey *last);

/* The values of a row that a reader wants */
#define IDEM_FINGERPRINT	(1 << 0)
#define IDEM_RESULT			(1 << 1)
#define IDEM_PROGRESS		(1 << 2)

/*
 * The claim as the snapshot sees it; false: none.  It only reads, also on a standby, and
 * keeps no lock of the table.  So the values that are wanted come complete, not as pointers;
 * do not use the others, which were not read.
 */
extern bool idem_store_fetch(const IdemKey *key, Snapshot snapshot, int wanted,
							 IdemRow *row);

/* ----- writing ----- */

/*
 * The next three return false, and have written nothing, when another transaction was there
 * first: probe again.  What they write is visible to the next command of this transaction,
 * as after an SQL statement.  Those that write a row round its expires_at up to a whole
 * second, in the caller's row too.
 */
extern bool idem_store_insert(const IdemKey *key, IdemRow *row);
extern bool idem_store_update(const IdemKey *key, const IdemFound *found,
							  IdemRow *row);
extern bool idem_store_delete(const IdemFound *found);

/*
 * Inserts, in the same way, the rows of different keys that idem_store_probe() found absent, or
 * that idem_store_may_guess() allowed to guess absent: all of them; or none, and returns false,
 * if the row of any key is there after all.  Uses a
 * subtransaction, so it pays for many rows only.
 */
typedef struct IdemNewRow
{
	IdemKey		key;
	IdemRow		row;
} IdemNewRow;

#define IDEM_INSERT_MANY_MAX 1000

extern bool idem_store_insert_many(IdemNewRow *rows, int nrows);

/*
 * To be called before a claim is written under the locks of its key and of its policy: takes
 * without waiting what the write will need of the indexes, and for a lease of the tokens'
 * sequence.  False: others have a lock that conflicts.  Then give up those two locks, and wait by
 * the second, an IdemTakeLock.
 */
extern bool idem_store_prepare_write(bool is_lease);
extern void idem_store_wait_lock(SubTransactionId subtransaction);

/*
 * Locks a key for the short time in which a lease looks, draws its token and writes its row.
 * So tokens grow from holder to holder, also where a row was deleted in between.  Never wait
 * for another transaction while you hold the lock, and draw a new token after every wait.
 */
extern void idem_store_lock_key(const IdemKey *key);
extern void idem_store_unlock_key(const IdemKey *key);
extern int64 idem_store_draw_token(void);

/*
 * Locks the row until the transaction ends, without waiting: nobody else can change or
 * delete it.  False: another transaction has it or changed it.
 */
extern bool idem_store_lock_row(const IdemRowRef *ref);

/* Another transaction, still running, that has locked or changed the row;
 * InvalidTransactionId: there is none now */
extern TransactionId idem_store_row_locker(const IdemRowRef *ref);

/* ----- rows by expiry: store/expiry.c ----- */

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

/* ----- rows in progress: store/unsettled.c ----- */

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

#endif							/* IDEM_STORE_STORE_H */
