/*
 * internal.h
 *	  The claims table, opened, and the shape that it must have: what store/open.c, shape.c,
 *	  store/rows.c, expiry.c and unsettled.c share.  No other file includes this.
 */
#ifndef IDEM_STORE_INTERNAL_H
#define IDEM_STORE_INTERNAL_H

#include "access/genam.h"
#include "executor/tuptable.h"
#include "nodes/execnodes.h"
#include "storage/lockdefs.h"
#include "utils/relcache.h"
#include "utils/timestamp.h"

#include "store/store.h"

/* Columns of idem_claims, as in the install script */
enum
{
	Anum_claims_expires_at = 1,
	Anum_claims_lease_until,
	Anum_claims_token,
	Anum_claims_state,
	Anum_claims_request_id,
	Anum_claims_user_id,
	Anum_claims_scope,
	Anum_claims_fingerprint,
	Anum_claims_result,
	Anum_claims_progress
};

#define Natts_claims Anum_claims_progress

/*
 * A marker has none of the columns after the scope.  Its row ends before them, like a row
 * that is older than a column: the column then reads as NULL.  The header of a row with
 * eight columns or less has room for the bitmap of NULLs, so that each row is eight bytes
 * shorter.  Without this, figure 6 of the benchmark shows a heap that is 8 % larger.
 */
#define Natts_marker Anum_claims_scope

/* IDEM_NO_TIME where the column is NULL */
static inline TimestampTz
idem_store_time(const TupleTableSlot *slot, AttrNumber column)
{
	return slot->tts_isnull[column - 1] ? IDEM_NO_TIME :
		DatumGetTimestampTz(slot->tts_values[column - 1]);
}

/* Columns of the primary key: request_id, user_id, scope */
#define KEY_COLUMNS 3

typedef struct IdemStore
{
	MemoryContext context;		/* holds all of this */
	bool		in_use;
	SubTransactionId used_in;	/* subtransaction of the latest use */
	SubTransactionId opened_in; /* the latest one that has opened relations */
	Relation	claims;
	Relation	key_index;
	Oid			claims_oid;		/* of a kept store, whose relations are closed */
	Oid			key_index_oid;
	List	   *index_oids;		/* those that can have an entry of any row */
	List	   *unsettled_oids; /* those of rows in progress: one, or none */
	bool		has_user_index;
	TupleTableSlot *slot;
	TupleDesc	marker;			/* columns of a marker */

	/* For inserting, made as they are needed */
	TupleTableSlot **new_rows;
	int			nnew_rows;
	ItemPointerData latest;		/* place of the row inserted last, or invalid */

	/* For probing */
	SnapshotData dirty;
	ScanKeyData keys[KEY_COLUMNS];
	IndexScanDesc scan;			/* has a reference of its own to the index */
	int			nkept;			/* of IDEM_STORE_KEPT */

	/* For writing index entries; made by the first write, whose indexes the others use */
	EState	   *estate;
	ResultRelInfo *target;
	int			nkept_indexes;	/* how many of the target's the transaction keeps open: those of
								 * any row, then, once a row in progress was written, the others */
	List	   *arbiters;		/* the primary key */
} IdemStore;

/* The transaction keeps open: the table, the key's index, and that index for the scan. */
#define IDEM_STORE_KEPT 3

/*
 * Take the store, which is then open, and give it back.  In between, do not wait for a
 * holder, and do not call the functions of store.h.
 */
extern IdemStore *idem_store_use(void);
extern void idem_store_done(IdemStore *store);

/*
 * The same for a use that writes.  command: CMD_INSERT and CMD_UPDATE open the indexes, to
 * write their entries; CMD_SELECT locks a row.  Raises what the server raises for a published
 * table without replica identity.
 */
extern IdemStore *idem_store_use_to_write(CmdType command);

/*
 * Makes ready to write the index entries of a row in this state: sets the number of the
 * target's indexes.  To be called before each such write.  Where the row is not in progress,
 * the index of unsettled rows is left out without a look at its predicate, and is not even
 * opened.
 */
extern void idem_store_choose_indexes(IdemStore *store, IdemState state);

/* For a reader, which needs no store: opens the table and its key's index with
 * AccessShareLock.  The caller closes both. */
extern void idem_store_open_to_read(Relation *claims, Relation *key_index);

extern void idem_store_init_keys(ScanKey keys);

/*
 * Deletes the row without waiting, and does not make that visible to the next command.
 * False: another transaction has locked or changed it.
 */
extern bool idem_store_delete_row(IdemStore *store, const ItemPointerData *tid);

/* ----- store/shape.c ----- */

/*
 * Each raises 0A000 with the command that helps: for columns and storage that are not as the
 * install script made them; for what a direct insert would pass by; for another primary key
 * (NULL: the table has none).
 */
extern void idem_store_check_layout(Relation claims);
extern void idem_store_check_direct_writes(Relation claims);
extern void idem_store_check_key(Relation claims, Relation index);

typedef enum IdemIndexKind
{
	IDEM_INDEX_OF_USER,			/* also the primary key */
	IDEM_INDEX_BY_EXPIRY,		/* of expires_at alone */
	IDEM_INDEX_OF_UNSETTLED		/* of all rows that are in progress and no others */
} IdemIndexKind;

extern IdemIndexKind idem_store_kind_of_index(Oid index);

/* For an invalidation of this relation; InvalidOid: of any */
extern void idem_store_forget_index(Oid relid);

/* Opens the index of that kind.  Raises 55000 if there is none that can be used. */
extern Relation idem_store_open_index(Relation claims, IdemIndexKind kind,
									  LOCKMODE mode);

extern char *idem_store_qualified_name(Oid relid);

#endif							/* IDEM_STORE_INTERNAL_H */
