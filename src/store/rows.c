/*
 * rows.c
 *	  The claims table: probing and writing it.
 *
 * Claims are written through the table access method rather than by SQL.  That is several
 * times cheaper.  It also needs no right on the table: the right to call the function is all
 * that a caller has.  The sequence is that of INSERT ... ON CONFLICT DO NOTHING
 * (nodeModifyTable.c, execIndexing.c):
 *
 *	1. probe the primary key with a dirty snapshot, which also sees rows that are not
 *	   committed yet, and says which transaction wrote them;
 *	2. take the speculative insertion lock of our transaction;
 *	3. insert the row with a speculative token in the place of its ctid, so that another
 *	   inserter of the same key waits for the token, not for our transaction;
 *	4. insert the index entries.  The primary key reports a conflict, and neither raises an
 *	   error nor waits;
 *	5. confirm the row, or, after a conflict, kill it;
 *	6. release the lock.  After a conflict the caller starts again at 1, where it learns
 *	   which transaction to wait for.
 *
 * Steps 4 and 5 close the race between two probes that both found nothing: of two inserters
 * of a key, the one that writes its index entry second sees the entry of the first, and loses.
 * So no decision rests on the probe alone, and step 1 can be left out: see guess_absent().
 *
 * Many rows at once need neither token nor confirmation.  A subtransaction writes them as plain
 * rows, and is rolled back if any key turns out to have a row.  Another claim of one of these
 * keys waits for the subtransaction, not for our transaction.  The subtransaction waits for
 * nobody.  So its rollback frees the keys at once.  Each such subtransaction uses one
 * transaction id.
 *
 * Updates and deletes never wait.  Before an update, a row of another transaction is locked
 * with LockWaitSkip; a delete is tried without waiting.  If another transaction has the row,
 * the caller probes again.
 */
#include "postgres.h"

#include "access/genam.h"
#include "access/htup_details.h"
#include "access/multixact.h"
#include "access/relscan.h"
#include "access/table.h"
#include "access/tableam.h"
#include "access/xact.h"
#include "catalog/pg_sequence.h"
#include "commands/sequence.h"
#include "executor/executor.h"
#include "miscadmin.h"
#include "storage/bufmgr.h"
#include "storage/lmgr.h"
#include "storage/lock.h"
#include "storage/procarray.h"
#include "utils/datum.h"
#include "utils/fmgroids.h"
#include "utils/memutils.h"
#include "utils/rel.h"
#include "utils/resowner.h"
#include "utils/snapmgr.h"
#include "utils/syscache.h"

#include "compat.h"
#include "store/catalog.h"
#include "store/internal.h"

/* After 100 new keys in a row, insert the next one without a probe.  A batch of n keys needs
 * 100 n. */
#define GUESS_AFTER 100

/* How many keys in a row were new in this session */
static uint64 new_in_a_row = 0;

/* ----- reading ----- */

static void
set_scan_keys(ScanKey keys, const IdemKey *key)
{
	keys[0].sk_argument = PointerGetDatum(key->request_id);
	keys[1].sk_argument = PointerGetDatum(key->user_id);
	keys[2].sk_argument = PointerGetDatum(key->scope);
}

static const IdemStored *
copy_stored(TupleTableSlot *slot, AttrNumber column)
{
	if (slot->tts_isnull[column - 1])
		return NULL;
	return (IdemStored *) DatumGetPointer(datumCopy(slot->tts_values[column - 1],
													false, -1));
}

Jsonb *
idem_stored_jsonb(const IdemStored *stored)
{
	return stored == NULL ? NULL :
		DatumGetJsonbPCopy(PointerGetDatum(stored));
}

static void
read_row(TupleTableSlot *slot, IdemRow *row)
{
	slot_getallattrs(slot);
	row->state =
		idem_state_from_oid(DatumGetObjectId(slot->tts_values[Anum_claims_state - 1]));
	row->expires_at = idem_store_time(slot, Anum_claims_expires_at);
	row->lease_until = idem_store_time(slot, Anum_claims_lease_until);
	row->token = slot->tts_isnull[Anum_claims_token - 1] ? 0 :
		DatumGetInt64(slot->tts_values[Anum_claims_token - 1]);
	row->healed = row->state == IDEM_STATE_COMPLETED && row->token != 0 &&
		row->lease_until == IDEM_NO_TIME;
	row->fingerprint = copy_stored(slot, Anum_claims_fingerprint);
	row->result = copy_stored(slot, Anum_claims_result);
	row->progress = copy_stored(slot, Anum_claims_progress);
}

static HeapTuple
tuple_of(TupleTableSlot *slot)
{
	bool		should_free;
	HeapTuple	tuple = ExecFetchSlotHeapTuple(slot, false, &should_free);

	Assert(!should_free);
	return tuple;
}

/* Another transaction updates or deletes the row: whether it deletes it */
static bool
is_deleted_in_flight(TupleTableSlot *slot)
{
	HeapTuple	tuple = tuple_of(slot);

	return ItemPointerEquals(&tuple->t_self, &tuple->t_data->t_ctid);
}

/* FrozenTransactionId for a frozen row.  The row still has the id of its writer, but ids wrap
 * around: by now the same id can be that of another transaction. */
static TransactionId
writer_of(TupleTableSlot *slot)
{
	return HeapTupleHeaderGetXmin(tuple_of(slot)->t_data);
}

static bool
is_ours(TupleTableSlot *slot)
{
	return TransactionIdIsCurrentTransactionId(writer_of(slot));
}

/* Of the row that the scan has just returned */
static IdemProbe
classify(IdemStore *store, IdemFound *found)
{
	Assert(!TTS_EMPTY(store->slot));
	found->speculative = store->dirty.speculativeToken;
	if (TransactionIdIsValid(store->dirty.xmin))
	{
		found->xid = store->dirty.xmin;
		return IDEM_PROBE_INSERTING;
	}
	Assert(found->speculative == 0);
	if (TransactionIdIsValid(store->dirty.xmax))
	{
		found->xid = store->dirty.xmax;
		return is_deleted_in_flight(store->slot) ?
			IDEM_PROBE_DELETING : IDEM_PROBE_UPDATING;
	}

	found->ours = is_ours(store->slot);
	found->ref = store->slot->tts_tid;
	read_row(store->slot, &found->row);
	return IDEM_PROBE_PRESENT;
}

/* Moves the scan to the first row of the key, or, with NULL, to the next row of the same
 * key.  False: there is none. */
static bool
next_row(IdemStore *store, const IdemKey *key)
{
	/* What the scan allocates lives as long as the scan. */
	MemoryContext caller = MemoryContextSwitchTo(store->context);
	bool		any;

	if (key != NULL)
	{
		set_scan_keys(store->keys, key);
		index_rescan(store->scan, store->keys, KEY_COLUMNS, NULL, 0);
	}
	any = index_getnext_slot(store->scan, ForwardScanDirection, store->slot);
	MemoryContextSwitchTo(caller);
	return any;
}

/* The scan outlives the statement, which owns its pins: give them back after each use. */
static void
unpin_table(IdemStore *store)
{
	MemoryContext caller = MemoryContextSwitchTo(store->context);

	idem_index_fetch_unpin(store->scan);
	MemoryContextSwitchTo(caller);
}

/*
 * Several rows of a key can be found: the live row, and rows of inserters that lost the race
 * and have not killed their rows yet.  The live row decides.  A transaction that deletes the row
 * can also have inserted a new one; then the new one decides.
 */
static IdemProbe
probe(IdemStore *store, const IdemKey *key, IdemFound *found)
{
	IdemProbe	result = IDEM_PROBE_ABSENT;
	bool		any;

	for (any = next_row(store, key); any;
		 any = result != IDEM_PROBE_PRESENT && next_row(store, NULL))
	{
		IdemFound	row;
		IdemProbe	row_probe = classify(store, &row);

		if (result == IDEM_PROBE_ABSENT || result == IDEM_PROBE_DELETING ||
			row_probe == IDEM_PROBE_PRESENT)
		{
			result = row_probe;
			*found = row;
		}
	}
	/* A scan that came to its end has given back the pins of the index by itself. */
	if (result != IDEM_PROBE_ABSENT)
		index_rescan(store->scan, NULL, KEY_COLUMNS, NULL, 0);
	unpin_table(store);
	ExecClearTuple(store->slot);
	return result;
}

/*
 * A dirty snapshot has found a row.  Reads it again, as SQL would, by the transaction's snapshot.
 * This read takes part in serializable conflict checking.  In REPEATABLE READ and SERIALIZABLE
 * it raises 40001 if that snapshot does not see the row, as INSERT ... ON CONFLICT DO NOTHING
 * does (ExecCheckTupleVisible): otherwise the answer would rest on a row that the transaction
 * cannot see.
 */
static void
read_by_snapshot(IdemStore *store, const IdemFound *found)
{
	ItemPointerData tid = found->ref;

	if (!table_tuple_fetch_row_version(store->claims, &tid,
									   GetTransactionSnapshot(), store->slot))
		ereport(ERROR,
				(errcode(ERRCODE_T_R_SERIALIZATION_FAILURE),
				 errmsg("could not serialize access due to concurrent update"),
				 errdetail("The request was claimed by a transaction that this one's snapshot cannot see."),
				 errhint("Retry the transaction.")));
	ExecClearTuple(store->slot);
}

/*
 * The guess that the next key is new saves the probe.  Without the guess, figure 1 of the
 * benchmark (fresh claims) takes 24 % longer, and figure 3 (claim and complete) 8 %.  A wrong
 * guess costs a transaction id, and one dead row for each key that is inserted.  GUESS_AFTER
 * bounds the dead rows: at most one for 100 new keys.
 * With an index of a user nothing is guessed: before the conflict of the key is seen, such an
 * index could refuse the row, or run a function of the user.
 */
static bool
guess_absent(const IdemStore *store, int nkeys)
{
	return new_in_a_row >= (uint64) GUESS_AFTER * nkeys &&
		!store->has_user_index;
}

bool
idem_store_may_guess(int nkeys)
{
	IdemStore  *store = idem_store_use();
	bool		may_guess = guess_absent(store, nkeys);

	idem_store_done(store);
	return may_guess;
}

IdemProbe
idem_store_probe(const IdemKey *key, bool may_guess, IdemFound *found)
{
	IdemStore  *store = idem_store_use();
	IdemProbe	result = IDEM_PROBE_GUESSED_ABSENT;

	if (!may_guess || !guess_absent(store, 1))
	{
		result = probe(store, key, found);
		if (result != IDEM_PROBE_ABSENT)
			new_in_a_row = 0;
		if (result == IDEM_PROBE_PRESENT && !found->ours &&
			IsolationUsesXactSnapshot())
			read_by_snapshot(store, found);
	}
	idem_store_done(store);
	return result;
}

static bool
has_key(TupleTableSlot *slot, const IdemKey *key)
{
	IdemKey		row;

	slot_getsomeattrs(slot, Anum_claims_scope);
	row.request_id = DatumGetTextPP(slot->tts_values[Anum_claims_request_id - 1]);
	row.user_id = DatumGetTextPP(slot->tts_values[Anum_claims_user_id - 1]);
	row.scope = DatumGetTextPP(slot->tts_values[Anum_claims_scope - 1]);
	return idem_key_equal(&row, key);
}

/*
 * Looks where the latest insert of this transaction put its row: mostly that is the row that
 * the caller wants.  The insert belongs to an earlier statement, whose snapshot no longer
 * protects the place (see IdemRowRef): by now the place can be empty, or have another row.
 * Without this look, figure 3 of the benchmark (claim and complete) takes 8 % longer.
 */
static bool
find_latest(IdemStore *store, const IdemKey *key, IdemFound *found)
{
	ItemPointerData tid = store->latest;
	bool		more = false;
	bool		is_found;

	if (!ItemPointerIsValid(&tid))
		return false;
	is_found = table_index_fetch_tuple(store->scan->xs_heapfetch, &tid,
									   &store->dirty, store->slot, &more,
									   NULL) &&
		has_key(store->slot, key) &&
		classify(store, found) == IDEM_PROBE_PRESENT && found->ours;
	unpin_table(store);
	ExecClearTuple(store->slot);
	return is_found;
}

bool
idem_store_find_ours(const IdemKey *key, IdemFound *found)
{
	IdemStore  *store = idem_store_use();
	bool		is_found = find_latest(store, key, found) ||
		(probe(store, key, found) == IDEM_PROBE_PRESENT && found->ours);

	idem_store_done(store);
	return is_found;
}

bool
idem_store_is_absent(const IdemKey *key)
{
	Snapshot	snapshot = RegisterSnapshot(GetLatestSnapshot());
	IdemRow		row;
	bool		found = idem_store_fetch(key, snapshot, 0, &row);

	UnregisterSnapshot(snapshot);
	if (!found)
		idem_store_note_read(key);
	return !found;
}

/* A read of one key that needs no store */
typedef struct Reading
{
	Relation	claims;
	Relation	index;
	TupleTableSlot *slot;
	ScanKeyData keys[KEY_COLUMNS];
	IndexScanDesc scan;
} Reading;

static void
begin_reading(Reading *reading, const IdemKey *key, Snapshot snapshot)
{
	idem_store_open_to_read(&reading->claims, &reading->index);
	reading->slot = table_slot_create(reading->claims, NULL);
	idem_store_init_keys(reading->keys);
	set_scan_keys(reading->keys, key);
	reading->scan = idem_index_beginscan(reading->claims, reading->index,
										 snapshot, KEY_COLUMNS);
	index_rescan(reading->scan, reading->keys, KEY_COLUMNS, NULL, 0);
}

/* Gives the locks back at once: the claim that reads can be about to sleep. */
static void
end_reading(Reading *reading)
{
	index_endscan(reading->scan);
	ExecDropSingleTupleTableSlot(reading->slot);
	index_close(reading->index, AccessShareLock);
	table_close(reading->claims, AccessShareLock);
}

/*
 * Lets conflict checking know that the transaction has read the key's row, but no page of the
 * index.  A dirty snapshot finds the row through the index, which conflict checking ignores;
 * then the transaction's snapshot reads the row.  So another transaction that writes an index
 * entry on the same page does not conflict.  False: the snapshot does not see the latest
 * version.
 */
static bool
note_row(const IdemKey *key)
{
	SnapshotData dirty;
	Reading		reading;
	bool		found = false;

	InitDirtySnapshot(dirty);
	begin_reading(&reading, key, &dirty);
	while (!found && index_getnext_slot(reading.scan, ForwardScanDirection,
										reading.slot))
	{
		ItemPointerData tid = reading.slot->tts_tid;

		found = table_tuple_fetch_row_version(reading.claims, &tid,
											  GetTransactionSnapshot(),
											  reading.slot);
	}
	end_reading(&reading);
	return found;
}

void
idem_store_note_read(const IdemKey *key)
{
	IdemRow		row;

	if (IsolationIsSerializable() && !note_row(key))
		(void) idem_store_fetch(key, GetTransactionSnapshot(), 0, &row);
}

static int
compare_text(const text *a, const text *b)
{
	Size		shorter = Min(VARSIZE_ANY_EXHDR(a), VARSIZE_ANY_EXHDR(b));
	int			order = memcmp(VARDATA_ANY(a), VARDATA_ANY(b), shorter);

	if (order != 0)
		return order;
	return (int) VARSIZE_ANY_EXHDR(a) - (int) VARSIZE_ANY_EXHDR(b);
}

int
idem_store_compare_keys(const IdemKey *a, const IdemKey *b)
{
	int			order = compare_text(a->request_id, b->request_id);

	if (order == 0)
		order = compare_text(a->user_id, b->user_id);
	if (order == 0)
		order = compare_text(a->scope, b->scope);
	return order;
}

/*
 * A batch asks this once for many keys.  If it is true, the batch inserts them without a look at
 * each.  An entry that appears afterwards makes the insertion of its key fail, as always.
 * Without this, figure 4 of the benchmark takes a quarter longer for time-ordered ids, which are
 * often greater than all that are there.  A dead entry counts too, so that the scan ends at the
 * first entry.
 */
bool
idem_store_is_empty_between(const IdemKey *first, const IdemKey *last)
{
	IdemStore  *store = idem_store_use();
	ScanKeyData keys[2];
	IndexScanDesc scan;
	bool		empty;

	ScanKeyInit(&keys[0], 1, BTGreaterEqualStrategyNumber, F_TEXT_GE,
				PointerGetDatum(first->request_id));
	ScanKeyInit(&keys[1], 1, BTLessEqualStrategyNumber, F_TEXT_LE,
				PointerGetDatum(last->request_id));
	scan = idem_index_beginscan(store->claims, store->key_index,
								&store->dirty, lengthof(keys));
	scan->ignore_killed_tuples = false;
	index_rescan(scan, keys, lengthof(keys), NULL, 0);
	empty = index_getnext_tid(scan, ForwardScanDirection) == NULL;
	index_endscan(scan);
	idem_store_done(store);
	return empty;
}

static void
complete_value(const IdemStored **value, bool wanted)
{
	if (wanted && *value != NULL)
		*value = PG_DETOAST_DATUM(PointerGetDatum(*value));
}

bool
idem_store_fetch(const IdemKey *key, Snapshot snapshot, int wanted,
				 IdemRow *row)
{
	Reading		reading;
	bool		found = false;
	bool		ours = false;

	begin_reading(&reading, key, snapshot);
	/*
	 * An old snapshot can see two rows: one that somebody has dropped since, and the one of
	 * our own claim after that.  Ours decides.
	 */
	while (!ours && index_getnext_slot(reading.scan, ForwardScanDirection,
									   reading.slot))
	{
		ours = is_ours(reading.slot);
		if (ours || !found)
		{
			read_row(reading.slot, row);
			row->writer = writer_of(reading.slot);
		}
		found = true;
	}
	if (found)
	{
		complete_value(&row->fingerprint, (wanted & IDEM_FINGERPRINT) != 0);
		complete_value(&row->result, (wanted & IDEM_RESULT) != 0);
		complete_value(&row->progress, (wanted & IDEM_PROGRESS) != 0);
	}
	end_reading(&reading);
	return found;
}

/* ----- writing ----- */

/* conflict: NULL for an update */
static void
insert_index_entries(IdemStore *store, TupleTableSlot *slot, bool *conflict,
					 bool only_summarizing)
{
	idem_insert_index_tuples(store->target, slot, store->estate,
							 conflict == NULL, conflict, store->arbiters,
							 only_summarizing);
	idem_index_insert_cleanup(store->target);
	ResetPerTupleExprContext(store->estate);
}

static void
set_column(TupleTableSlot *slot, AttrNumber column, Datum value, bool isnull)
{
	slot->tts_values[column - 1] = value;
	slot->tts_isnull[column - 1] = isnull;
}

static void
set_pointer(TupleTableSlot *slot, AttrNumber column, const void *value)
{
	set_column(slot, column, PointerGetDatum(value), value == NULL);
}

static void
set_time(TupleTableSlot *slot, AttrNumber column, TimestampTz value)
{
	set_column(slot, column, TimestampTzGetDatum(value), value == IDEM_NO_TIME);
}

/*
 * To whole seconds: many entries of the index by time are then equal, and take less room.
 * Leaves alone what an operator can have set: infinity; and a time in the last second of the
 * type's range.  Rounded up, that would be a value which the server stores, but which it does not
 * read again from a dump.
 */
static TimestampTz
round_up(TimestampTz time)
{
	if (TIMESTAMP_NOT_FINITE(time) || time > END_TIMESTAMP - USECS_PER_SEC)
		return time;
	return (time + USECS_PER_SEC - 1) / USECS_PER_SEC * USECS_PER_SEC;
}

static void
fill_slot(TupleTableSlot *slot, const IdemKey *key, IdemRow *row)
{
	Assert(row->state != IDEM_STATE_IN_PROGRESS ||
		   (row->token > 0 && row->lease_until <= row->expires_at));
	Assert(!row->healed || row->state == IDEM_STATE_COMPLETED);
	row->expires_at = round_up(row->expires_at);
	ExecClearTuple(slot);
	set_time(slot, Anum_claims_expires_at, row->expires_at);
	set_time(slot, Anum_claims_lease_until,
			 row->healed ? IDEM_NO_TIME : row->lease_until);
	set_column(slot, Anum_claims_token, Int64GetDatum(row->token),
			   row->token == 0);
	set_column(slot, Anum_claims_state,
			   ObjectIdGetDatum(idem_catalog()->state[row->state]), false);
	set_pointer(slot, Anum_claims_request_id, key->request_id);
	set_pointer(slot, Anum_claims_user_id, key->user_id);
	set_pointer(slot, Anum_claims_scope, key->scope);
	set_pointer(slot, Anum_claims_fingerprint, row->fingerprint);
	set_pointer(slot, Anum_claims_result, row->result);
	set_pointer(slot, Anum_claims_progress, row->progress);
	for (int i = Natts_claims; i < slot->tts_tupleDescriptor->natts; i++)
		slot->tts_isnull[i] = true;
	ExecStoreVirtualTuple(slot);
}

static void
make_new_rows(IdemStore *store, int n)
{
	MemoryContext caller = MemoryContextSwitchTo(store->context);

	if (store->new_rows == NULL)
		store->new_rows = palloc(IDEM_INSERT_MANY_MAX * sizeof(TupleTableSlot *));
	for (; store->nnew_rows < n; store->nnew_rows++)
		store->new_rows[store->nnew_rows] =
			MakeSingleTupleTableSlot(store->slot->tts_tupleDescriptor,
									 &TTSOpsHeapTuple);
	MemoryContextSwitchTo(caller);
}

static void
fill_new_row(IdemStore *store, int n, const IdemKey *key, IdemRow *row)
{
	bool		is_marker = row->fingerprint == NULL && row->result == NULL &&
		row->progress == NULL;
	MemoryContext caller = MemoryContextSwitchTo(store->context);
	HeapTuple	tuple;

	fill_slot(store->slot, key, row);
	tuple = heap_form_tuple(is_marker ? store->marker :
							store->slot->tts_tupleDescriptor,
							store->slot->tts_values, store->slot->tts_isnull);
	ExecStoreHeapTuple(tuple, store->new_rows[n], true);
	ExecClearTuple(store->slot);
	MemoryContextSwitchTo(caller);
}

bool
idem_store_insert(const IdemKey *key, IdemRow *row)
{
	IdemStore  *store;
	TupleTableSlot *slot;
	TransactionId xid;
	uint64		new_before = new_in_a_row;
	bool		conflict = false;
	uint32		token;

	/* After an error the next call probes first: a replay then writes nothing. */
	new_in_a_row = 0;
	store = idem_store_use_to_write(CMD_INSERT);
	xid = GetCurrentTransactionId();
	idem_store_choose_indexes(store, row->state);
	make_new_rows(store, 1);
	slot = store->new_rows[0];
	fill_new_row(store, 0, key, row);

	Assert(!row->healed);
	token = SpeculativeInsertionLockAcquire(xid);
	table_tuple_insert_speculative(store->claims, slot,
								   GetCurrentCommandId(true), 0, NULL, token);
	insert_index_entries(store, slot, &conflict, false);
	table_tuple_complete_speculative(store->claims, slot, token, !conflict);
	SpeculativeInsertionLockRelease(xid);

	store->latest = slot->tts_tid;
	ExecClearTuple(slot);
	idem_store_done(store);
	new_in_a_row = conflict ? 0 : new_before + 1;
	if (!conflict)
		CommandCounterIncrement();
	return !conflict;
}

/* False: the row of a key is there after all; some of ours are written. */
static bool
insert_rows(IdemStore *store, IdemNewRow *rows, int nrows)
{
	bool		conflict = false;

	for (int i = 0; i < nrows; i++)
	{
		/* One choice of indexes serves all of them. */
		Assert(rows[i].row.state == rows[0].row.state);
		fill_new_row(store, i, &rows[i].key, &rows[i].row);
	}
	idem_store_choose_indexes(store, rows[0].row.state);
	table_multi_insert(store->claims, store->new_rows, nrows,
					   GetCurrentCommandId(true), 0, NULL);
	for (int i = 0; i < nrows && !conflict; i++)
		insert_index_entries(store, store->new_rows[i], &conflict, false);
	return !conflict;
}

/* After an error this function rolls the subtransaction back before it does anything else that
 * can fail.  Otherwise a caller that catches the error would roll back our subtransaction in
 * place of its own. */
bool
idem_store_insert_many(IdemNewRow *rows, int nrows)
{
	MemoryContext context = CurrentMemoryContext;
	ResourceOwner owner = CurrentResourceOwner;
	uint64		new_before = new_in_a_row;
	IdemStore  *store;
	bool		inserted;

	/* As in idem_store_insert() */
	new_in_a_row = 0;
	store = idem_store_use_to_write(CMD_INSERT);
	Assert(nrows > 0 && nrows <= IDEM_INSERT_MANY_MAX);
	make_new_rows(store, nrows);

	BeginInternalSubTransaction(NULL);
	MemoryContextSwitchTo(context);
	PG_TRY();
	{
		inserted = insert_rows(store, rows, nrows);
		if (inserted)
			ReleaseCurrentSubTransaction();
		else
			RollbackAndReleaseCurrentSubTransaction();
	}
	PG_CATCH();
	{
		RollbackAndReleaseCurrentSubTransaction();
		MemoryContextSwitchTo(context);
		CurrentResourceOwner = owner;
		PG_RE_THROW();
	}
	PG_END_TRY();
	MemoryContextSwitchTo(context);
	CurrentResourceOwner = owner;

	for (int i = 0; i < nrows; i++)
		ExecClearTuple(store->new_rows[i]);
	idem_store_done(store);
	new_in_a_row = inserted ? new_before + nrows : 0;
	return inserted;
}

/* False: another transaction has the row, or has changed it since the probe. */
static bool
row_was_free(TM_Result result)
{
	/* Our own writes become visible at once, so none of them is in the way. */
	if (result == TM_Invisible || result == TM_SelfModified)
		elog(ERROR, "unexpected result %d of a write to a claim",
			 (int) result);
	return result == TM_Ok;
}

static TM_Result
delete_row(IdemStore *store, ItemPointer tid, bool wait)
{
	TM_FailureData failure;

	return idem_table_tuple_delete(store->claims, tid, wait, &failure);
}

static TM_Result
lock_row(IdemStore *store, ItemPointer tid, LockTupleMode mode)
{
	TM_FailureData failure;
	TM_Result	result = table_tuple_lock(store->claims, tid,
										  GetActiveSnapshot(), store->slot,
										  GetCurrentCommandId(true), mode,
										  LockWaitSkip, 0, &failure);

	ExecClearTuple(store->slot);
	return result;
}

/*
 * A delete that does not wait is refused by any lock on the row, even by a lock of our own
 * transaction (SELECT FOR UPDATE, idem_fence()).  Then lock the row without waiting.  Once we
 * have that lock, no other transaction has one, and the second delete has nobody to wait for.
 */
bool
idem_store_delete_row(IdemStore *store, const ItemPointerData *tid)
{
	/* A copy: the caller's can be in the slot, which locking the row clears. */
	ItemPointerData old = *tid;
	TM_Result	result = delete_row(store, &old, false);

	if (result == TM_BeingModified &&
		lock_row(store, &old, LockTupleExclusive) == TM_Ok)
		result = delete_row(store, &old, true);
	return row_was_free(result);
}

/*
 * The heap has no update that does not wait: an update that meets a lock, also one of this
 * transaction, fails an assertion in heap_update().  So lock the row first.  A row that this
 * transaction wrote needs no lock, as no other transaction can have locked it.
 */
bool
idem_store_update(const IdemKey *key, const IdemFound *found, IdemRow *row)
{
	IdemStore  *store = idem_store_use_to_write(CMD_UPDATE);
	ItemPointerData tid = found->ref;
	TM_FailureData failure;
	LockTupleMode lockmode;
	IdemUpdateIndexes update_indexes;
	TM_Result	result = TM_Ok;
	bool		updated;

	Assert(ItemPointerIsValid(&tid));
	if (!found->ours)
		result = lock_row(store, &tid, LockTupleExclusive);
	if (result == TM_Ok)
	{
		fill_slot(store->slot, key, row);
		result = idem_table_tuple_update(store->claims, &tid, store->slot, true,
										 &failure, &lockmode, &update_indexes);
	}
	updated = row_was_free(result);
	/* cppcheck-suppress uninitvar ; the update that set "updated" has set it */
	if (updated && IDEM_UPDATE_NEEDS_INDEXES(update_indexes))
	{
		idem_store_choose_indexes(store, row->state);
		insert_index_entries(store, store->slot, NULL,
							 IDEM_UPDATE_ONLY_SUMMARIZING(update_indexes));
	}
	ExecClearTuple(store->slot);
	idem_store_done(store);
	if (updated)
		CommandCounterIncrement();
	return updated;
}

bool
idem_store_delete(const IdemFound *found)
{
	IdemStore  *store = idem_store_use_to_write(CMD_DELETE);
	bool		deleted;

	deleted = idem_store_delete_row(store, &found->ref);
	idem_store_done(store);
	if (deleted)
		CommandCounterIncrement();
	return deleted;
}

/* The kind of an advisory lock; those that SQL takes have 1 and 2. */
#define KEY_LOCK_CLASS 3

static LOCKTAG
key_lock_tag(const IdemKey *key)
{
	LOCKTAG		tag;

	SET_LOCKTAG_ADVISORY(tag, MyDatabaseId, idem_catalog()->claims,
						 idem_key_hash(key), KEY_LOCK_CLASS);
	return tag;
}

void
idem_store_lock_key(const IdemKey *key)
{
	LOCKTAG		tag = key_lock_tag(key);

	(void) LockAcquire(&tag, ExclusiveLock, false, false);
}

void
idem_store_unlock_key(const IdemKey *key)
{
	LOCKTAG		tag = key_lock_tag(key);

	LockRelease(&tag, ExclusiveLock, false);
}

int64
idem_store_draw_token(void)
{
	Oid			sequence = idem_catalog()->tokens;
	HeapTuple	tuple = SearchSysCache1(SEQRELID, ObjectIdGetDatum(sequence));
	Form_pg_sequence form;
	bool		grows;
	int64		token;

	if (!HeapTupleIsValid(tuple))
		elog(ERROR, "cache lookup failed for sequence %u", sequence);
	form = (Form_pg_sequence) GETSTRUCT(tuple);
	/* A number that one session has cached can be lower than one that another has used. */
	grows = form->seqincrement > 0 && form->seqcache == 1 && !form->seqcycle;
	ReleaseSysCache(tuple);
	if (!grows)
		ereport(ERROR,
				(errcode(ERRCODE_FEATURE_NOT_SUPPORTED),
				 errmsg("sequence \"idem_token_seq\" cannot number leases: its values do not grow from one call to the next"),
				 errhint("Run ALTER SEQUENCE %s INCREMENT 1 CACHE 1 NO CYCLE.",
						 idem_store_qualified_name(sequence))));
	token = nextval_internal(sequence, false);
	if (token <= 0)
		ereport(ERROR,
				(errcode(ERRCODE_FEATURE_NOT_SUPPORTED),
				 errmsg("sequence \"idem_token_seq\" cannot number leases: its value is not positive"),
				 errhint("Run ALTER SEQUENCE %s MINVALUE 1 RESTART WITH a number greater than every token in idem_claims.",
						 idem_store_qualified_name(sequence))));
	return token;
}

bool
idem_store_lock_row(const IdemRowRef *ref)
{
	IdemStore  *store = idem_store_use_to_write(CMD_SELECT);
	ItemPointerData tid = *ref;
	bool		locked;

	Assert(ItemPointerIsValid(&tid));
	locked = row_was_free(lock_row(store, &tid, LockTupleNoKeyExclusive));
	idem_store_done(store);
	return locked;
}

static bool
runs_elsewhere(TransactionId xid)
{
	return !TransactionIdIsCurrentTransactionId(xid) &&
		TransactionIdIsInProgress(xid);
}

/* One of the transactions that a row's xmax names */
static TransactionId
running_locker(TransactionId xmax, uint16 infomask)
{
	MultiXactMember *members;
	int			nmembers;

	if ((infomask & HEAP_XMAX_INVALID) != 0)
		return InvalidTransactionId;
	if ((infomask & HEAP_XMAX_IS_MULTI) == 0)
		return runs_elsewhere(xmax) ? xmax : InvalidTransactionId;
	nmembers = GetMultiXactIdMembers(xmax, &members, false, false);
	for (int i = 0; i < nmembers; i++)
		if (runs_elsewhere(members[i].xid))
			return members[i].xid;
	return InvalidTransactionId;
}

TransactionId
idem_store_row_locker(const IdemRowRef *ref)
{
	IdemStore  *store = idem_store_use();
	ItemPointerData tid = *ref;
	TransactionId locker = InvalidTransactionId;

	Assert(ItemPointerIsValid(&tid));
	if (table_tuple_fetch_row_version(store->claims, &tid, SnapshotAny,
									  store->slot))
	{
		HeapTupleHeader header = tuple_of(store->slot)->t_data;
		Buffer		buffer = ((BufferHeapTupleTableSlot *) store->slot)->buffer;
		TransactionId xmax;
		uint16		infomask;

		LockBuffer(buffer, BUFFER_LOCK_SHARE);
		xmax = HeapTupleHeaderGetRawXmax(header);
		infomask = header->t_infomask;
		LockBuffer(buffer, BUFFER_LOCK_UNLOCK);
		locker = running_locker(xmax, infomask);
	}
	ExecClearTuple(store->slot);
	idem_store_done(store);
	return locker;
}
