/*
 * unsettled.c
 *	  The claims table: rows that are in progress, for lists of them.
 *
 * A partial index finds these rows among millions of settled ones.  It is (scope) WHERE
 * state = 'in_progress'.  The time at which a lease ends is not in it: idem_extend() would
 * then have to write a new entry, and could not update the row in place (HOT).  So a reader
 * sorts the rows.
 *
 * While the index is absent, an update of state can be HOT too.  An index that is created then
 * has an entry of the last version only, and that entry leads to all versions of the row.  The
 * server marks such an index (indcheckxmin): a snapshot older than the index must not use it,
 * since rows that it sees in progress can lack their entry.
 */
#include "postgres.h"

#include "access/genam.h"
#include "access/htup_details.h"
#include "access/relscan.h"
#include "access/table.h"
#include "access/tableam.h"
#include "access/transam.h"
#include "access/xact.h"
#include "miscadmin.h"
#include "utils/fmgroids.h"
#include "utils/rel.h"
#include "utils/snapmgr.h"

#include "compat.h"
#include "store/internal.h"

struct IdemUnsettledScan
{
	Relation	claims;
	Relation	index;
	TupleTableSlot *slot;
	IndexScanDesc scan;
	ScanKeyData key;
};

/* The planner's rule (get_relation_info()).  The xmin of each snapshot of this transaction is
 * TransactionXmin or later. */
static void
refuse_too_new(Relation index)
{
	if (!index->rd_index->indcheckxmin ||
		TransactionIdPrecedes(HeapTupleHeaderGetXmin(index->rd_indextuple->t_data),
							  TransactionXmin))
		return;
	ereport(ERROR,
			(errcode(IsolationUsesXactSnapshot() ? ERRCODE_T_R_SERIALIZATION_FAILURE :
					 ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
			 errmsg("unsettled claims cannot be found yet: index \"idem_claims_unsettled_idx\" is newer than a transaction that still runs"),
			 errdetail("The index was created after this transaction took its snapshot, or while a transaction ran that still runs."),
			 errhint("Retry in a new transaction, when the transactions that are older than the index have ended.")));
}

IdemUnsettledScan *
idem_store_unsettled_scan_begin(const text *scope, Snapshot snapshot)
{
	IdemUnsettledScan *scan = palloc0(sizeof(IdemUnsettledScan));
	Relation	key_index;
	int			nkeys = scope == NULL ? 0 : 1;

	idem_store_open_to_read(&scan->claims, &key_index);
	index_close(key_index, AccessShareLock);
	scan->index = idem_store_open_index(scan->claims, IDEM_INDEX_OF_UNSETTLED,
										AccessShareLock);
	refuse_too_new(scan->index);
	scan->slot = table_slot_create(scan->claims, NULL);
	ScanKeyInit(&scan->key, 1, BTEqualStrategyNumber, F_TEXTEQ,
				PointerGetDatum(scope));
	scan->scan = idem_index_beginscan(scan->claims, scan->index, snapshot, nkeys);
	index_rescan(scan->scan, &scan->key, nkeys, NULL, 0);
	return scan;
}

bool
idem_store_unsettled_scan_next(IdemUnsettledScan *scan, IdemUnsettled *row)
{
	TupleTableSlot *slot = scan->slot;

	if (!index_getnext_slot(scan->scan, ForwardScanDirection, slot))
		return false;
	CHECK_FOR_INTERRUPTS();
	slot_getallattrs(slot);
	row->key.request_id = DatumGetTextPP(slot->tts_values[Anum_claims_request_id - 1]);
	row->key.user_id = DatumGetTextPP(slot->tts_values[Anum_claims_user_id - 1]);
	row->key.scope = DatumGetTextPP(slot->tts_values[Anum_claims_scope - 1]);
	row->expires_at = idem_store_time(slot, Anum_claims_expires_at);
	row->lease_until = idem_store_time(slot, Anum_claims_lease_until);
	row->progress = slot->tts_isnull[Anum_claims_progress - 1] ? NULL :
		(const IdemStored *) DatumGetPointer(slot->tts_values[Anum_claims_progress - 1]);
	return true;
}

/* The locks go at once: a claim that follows in this transaction may sleep. */
void
idem_store_unsettled_scan_end(IdemUnsettledScan *scan)
{
	index_endscan(scan->scan);
	ExecDropSingleTupleTableSlot(scan->slot);
	index_close(scan->index, AccessShareLock);
	table_close(scan->claims, AccessShareLock);
	pfree(scan);
}
