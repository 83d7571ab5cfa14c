/*
 * unsettled.c
 *	  The claims table: rows that are in progress, for lists of them.
 *
 * A partial index finds these rows among millions of settled ones.  It is (scope) WHERE
 * state = 'in_progress'.  The time at which a lease ends is not in it: idem_extend() would
 * then have to write a new entry, and could not update the row in place (HOT).  So a reader
 * sorts the rows.
 */
#include "postgres.h"

#include "access/genam.h"
#include "access/relation.h"
#include "access/relscan.h"
#include "access/table.h"
#include "access/tableam.h"
#include "catalog/pg_am_d.h"
#include "catalog/pg_class_d.h"
#include "catalog/pg_collation_d.h"
#include "catalog/pg_index.h"
#include "utils/fmgroids.h"
#include "utils/rel.h"

#include "compat.h"
#include "store_internal.h"
#include "unsettled.h"

struct IdemUnsettledScan
{
	Relation	claims;
	Relation	index;
	TupleTableSlot *slot;
	IndexScanDesc scan;
	ScanKeyData key;
};

static bool
is_usable(Relation index, Relation claims)
{
	return index != NULL && index->rd_rel->relkind == RELKIND_INDEX &&
		index->rd_rel->relam == BTREE_AM_OID &&
		index->rd_index->indisvalid &&
		index->rd_index->indkey.values[0] == Anum_claims_scope &&
		index->rd_indcollation[0] == C_COLLATION_OID &&
		idem_store_is_of_unsettled(RelationGetRelid(index), claims);
}

static Relation
open_unsettled_index(Relation claims)
{
	Oid			oid = idem_catalog()->claims_unsettled;
	Relation	index = OidIsValid(oid) ?
		try_relation_open(oid, AccessShareLock) : NULL;

	if (!is_usable(index, claims))
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("unsettled claims cannot be found: index \"idem_claims_unsettled_idx\" is missing, not valid or another"),
				 errhint("Run CREATE INDEX idem_claims_unsettled_idx ON %s (scope) WHERE state = 'in_progress', after dropping what has its name, or REINDEX it.",
						 idem_store_qualified_name(RelationGetRelid(claims)))));
	return index;
}

IdemUnsettledScan *
idem_store_unsettled_scan_begin(const text *scope, Snapshot snapshot)
{
	IdemUnsettledScan *scan = palloc0(sizeof(IdemUnsettledScan));
	Relation	key_index;
	int			nkeys = scope == NULL ? 0 : 1;

	idem_store_open_to_read(&scan->claims, &key_index);
	index_close(key_index, AccessShareLock);
	scan->index = open_unsettled_index(scan->claims);
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
	slot_getallattrs(slot);
	Assert(idem_state_from_oid(DatumGetObjectId(slot->tts_values[Anum_claims_state - 1])) ==
		   IDEM_STATE_IN_PROGRESS);
	row->key.request_id = DatumGetTextPP(slot->tts_values[Anum_claims_request_id - 1]);
	row->key.user_id = DatumGetTextPP(slot->tts_values[Anum_claims_user_id - 1]);
	row->key.scope = DatumGetTextPP(slot->tts_values[Anum_claims_scope - 1]);
	row->expires_at =
		DatumGetTimestampTz(slot->tts_values[Anum_claims_expires_at - 1]);
	row->lease_until = slot->tts_isnull[Anum_claims_lease_until - 1] ?
		IDEM_NO_TIME :
		DatumGetTimestampTz(slot->tts_values[Anum_claims_lease_until - 1]);
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
