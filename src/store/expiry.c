/*
 * expiry.c
 *	  The claims table: rows in the order of expires_at, for the cleaner.
 *
 * The scan uses the store (store/open.c) from its begin to its end.
 */
#include "postgres.h"

#include "access/genam.h"
#include "access/relscan.h"
#include "access/xact.h"
#include "utils/fmgroids.h"
#include "utils/rel.h"
#include "utils/snapmgr.h"

#include "compat.h"
#include "store/catalog.h"
#include "store/internal.h"

struct IdemExpiryScan
{
	IdemStore  *store;
	Relation	index;
	Snapshot	snapshot;
	IndexScanDesc scan;
};

IdemExpiryScan *
idem_store_expiry_scan_begin(TimestampTz from)
{
	IdemExpiryScan *scan = palloc0(sizeof(IdemExpiryScan));
	ScanKeyData key;
	int			nkeys = (from == DT_NOBEGIN) ? 0 : 1;

	idem_store_open("idem_cleanup()");
	scan->store = idem_store_use_to_write(CMD_DELETE);
	scan->index = idem_store_open_index(scan->store->claims,
										IDEM_INDEX_BY_EXPIRY, RowExclusiveLock);
	/* The active snapshot would still show rows that this statement has deleted. */
	scan->snapshot = RegisterSnapshot(GetLatestSnapshot());
	scan->scan = idem_index_beginscan(scan->store->claims, scan->index,
									  scan->snapshot, nkeys);
	/* Only the entry itself tells the time of a dead entry. */
	scan->scan->xs_want_itup = true;
	ScanKeyInit(&key, 1, BTGreaterEqualStrategyNumber, F_TIMESTAMPTZ_GE,
				TimestampTzGetDatum(from));
	index_rescan(scan->scan, &key, nkeys, NULL, 0);
	return scan;
}

bool
idem_store_expiry_scan_next(IdemExpiryScan *scan, IdemExpiring *row)
{
	TupleTableSlot *slot = scan->store->slot;
	/* cppcheck-suppress unassignedVariable ; index_getattr() sets it */
	bool		isnull;

	Assert(scan->store->in_use);
	if (index_getnext_tid(scan->scan, ForwardScanDirection) == NULL)
		return false;
	/* Of the rows of an entry, an MVCC snapshot sees one at most. */
	row->dead = !index_fetch_heap(scan->scan, slot);
	if (row->dead)
	{
		row->expires_at =
			DatumGetTimestampTz(index_getattr(scan->scan->xs_itup, 1,
											  scan->scan->xs_itupdesc, &isnull));
		return true;
	}
	slot_getsomeattrs(slot, Anum_claims_state);
	row->expires_at = idem_store_time(slot, Anum_claims_expires_at);
	row->state =
		idem_state_from_oid(DatumGetObjectId(slot->tts_values[Anum_claims_state - 1]));
	if (row->state == IDEM_STATE_IN_PROGRESS)
	{
		slot_getsomeattrs(slot, Anum_claims_scope);
		row->lease_until = idem_store_time(slot, Anum_claims_lease_until);
		row->scope = DatumGetTextPP(slot->tts_values[Anum_claims_scope - 1]);
	}
	return true;
}

/*
 * Deletes the row only if the snapshot saw its latest version.  If the key was claimed again
 * in the meantime, or is to be remembered longer, the result is TM_Updated and the row stays.
 */
bool
idem_store_expiry_scan_delete(IdemExpiryScan *scan)
{
	Assert(!TTS_EMPTY(scan->store->slot));
	return idem_store_delete_row(scan->store, &scan->store->slot->tts_tid);
}

void
idem_store_expiry_scan_end(IdemExpiryScan *scan)
{
	ExecClearTuple(scan->store->slot);
	index_endscan(scan->scan);
	UnregisterSnapshot(scan->snapshot);
	index_close(scan->index, NoLock);
	idem_store_done(scan->store);
	CommandCounterIncrement();
	pfree(scan);
}
