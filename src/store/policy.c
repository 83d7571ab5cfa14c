/*
 * policy.c
 *	  What the claims of a scope promise, cached and invalidated.
 *
 * The policy is read from idem_scopes.  A change of rows invalidates nothing by itself, so
 * the table's trigger sends a relcache invalidation to all backends.  idem_policy()
 * processes pending invalidations, so a change acts from the next claim after its commit.
 *
 * A scope without a row is cached as well: an INSERT also sends the invalidation.  Settings
 * are not copied into the cache, but read when they are needed.
 *
 * Claims are ordered with changes of a promise by a lock (scopes.c).  Two kinds of calls need none:
 * a call that finds its key claimed writes no promise, and a call that settles, extends or
 * fences a lease writes one only to an existing row, which guards its key by itself.
 */
#include "postgres.h"

#include "access/genam.h"
#include "access/table.h"
#include "access/xact.h"
#include "executor/executor.h"
#include "utils/builtins.h"
#include "utils/fmgroids.h"
#include "utils/hsearch.h"
#include "utils/inval.h"
#include "utils/memutils.h"
#include "utils/rel.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"

#include "compat.h"
#include "guc.h"
#include "store/catalog.h"
#include "store/duration.h"
#include "store/key.h"
#include "store/policy.h"
#include "store/relation_lock.h"
#include "store/scopes.h"

/* Every name that is used adds a scope: drop all when there are this many. */
#define CACHED_SCOPES_MAX 1000

#define FROM_SETTINGS (-1)

typedef struct CachedScope
{
	char		name[IDEM_KEY_PART_BYTES_MAX + 1];
	IdemPolicy	policy;			/* FROM_SETTINGS where the row has NULL */
} CachedScope;

static HTAB *cached_scopes = NULL;
static CachedScope *latest_scope = NULL;	/* most calls ask for it again */
static Oid	cached_relid = InvalidOid;
static uint64 invalidations = 0;
static Oid	locked_scopes = InvalidOid; /* InvalidOid: not locked */
static SubTransactionId locked_in;
static uint64 locks_taken = 0;	/* the number of the latest lock */

/* May be called in any state of a transaction: must not read a catalog, nor fail. */
static void
invalidate_scopes(Datum arg, Oid relid)
{
	if (relid == InvalidOid || relid == cached_relid)
	{
		cached_relid = InvalidOid;
		invalidations++;
	}
}

static void
reset_cache(Oid relid)
{
	HASHCTL		ctl = {
		.keysize = sizeof(((CachedScope *) NULL)->name),
		.entrysize = sizeof(CachedScope),
		.hcxt = TopMemoryContext
	};

	cached_relid = InvalidOid;
	latest_scope = NULL;
	hash_destroy(cached_scopes);
	cached_scopes = NULL;
	cached_scopes = hash_create("idem scopes", 16, &ctl,
								HASH_ELEM | HASH_STRINGS | HASH_CONTEXT);
	cached_relid = relid;
}

static bool
column_is(TupleTableSlot *slot, AttrNumber column, const char *value)
{
	bool		isnull;
	Datum		datum = slot_getattr(slot, column, &isnull);

	return !isnull && strcmp(TextDatumGetCString(datum), value) == 0;
}

static int64
length_us(TupleTableSlot *slot, AttrNumber column)
{
	bool		isnull;
	Datum		datum = slot_getattr(slot, column, &isnull);

	return isnull ? FROM_SETTINGS : idem_interval_us(DatumGetIntervalP(datum));
}

static void
read_policy(TupleTableSlot *slot, IdemPolicy *policy)
{
	bool		isnull;
	Datum		datum;

	policy->ttl_us = length_us(slot, Anum_scopes_ttl);
	policy->lease_us = length_us(slot, Anum_scopes_lease);
	policy->lease_max_us = length_us(slot, Anum_scopes_lease_max);
	datum = slot_getattr(slot, Anum_scopes_result_max_bytes, &isnull);
	if (!isnull)
		policy->result_max_bytes = DatumGetInt32(datum);
	datum = slot_getattr(slot, Anum_scopes_guarded_since, &isnull);
	if (!isnull)
		policy->guarded_since = DatumGetTimestampTz(datum);
	policy->failed_retryable = column_is(slot, Anum_scopes_failed, "retryable");
	policy->lapsed_unknown = column_is(slot, Anum_scopes_lapsed, "unknown");
	policy->expired_reclaim = column_is(slot, Anum_scopes_expired, "reclaim");
	policy->key_time_uuidv7 = column_is(slot, Anum_scopes_key_time, "uuidv7");
	policy->is_declared = true;
}

/* Reads the latest committed row, and one of this transaction. */
static void
load_policy(const text *scope, IdemPolicy *policy)
{
	Relation	scopes = idem_scopes_open();
	Relation	index;
	TupleTableSlot *slot = table_slot_create(scopes, NULL);
	Snapshot	snapshot;
	IndexScanDesc scan;
	ScanKeyData key;

	/* From here on an invalidation counts, so this comes before the snapshot. */
	if (cached_relid != RelationGetRelid(scopes))
		reset_cache(RelationGetRelid(scopes));
	index = index_open(idem_primary_key_index(scopes), AccessShareLock);
	/* For a table that is no catalog it is new each time; parallel mode allows it. */
	snapshot = RegisterSnapshot(GetCatalogSnapshot(RelationGetRelid(scopes)));
	scan = idem_index_beginscan(scopes, index, snapshot, 1);
	ScanKeyInit(&key, Anum_scopes_scope, BTEqualStrategyNumber, F_TEXTEQ,
				PointerGetDatum(scope));
	index_rescan(scan, &key, 1, NULL, 0);
	if (index_getnext_slot(scan, ForwardScanDirection, slot))
		read_policy(slot, policy);
	index_endscan(scan);
	UnregisterSnapshot(snapshot);
	ExecDropSingleTupleTableSlot(slot);
	index_close(index, AccessShareLock);
	table_close(scopes, AccessShareLock);
}

static IdemPolicy
with_settings(IdemPolicy policy)
{
	if (policy.ttl_us == FROM_SETTINGS)
		policy.ttl_us = idem_ttl * USECS_PER_SEC;
	if (policy.lease_us == FROM_SETTINGS)
		policy.lease_us = (int64) idem_lease_ms * 1000;
	if (policy.lease_max_us == FROM_SETTINGS)
		policy.lease_max_us = idem_lease_max * USECS_PER_SEC;
	if (policy.result_max_bytes == FROM_SETTINGS)
		policy.result_max_bytes = idem_result_max_bytes;
	policy.lock = OidIsValid(locked_scopes) ? locks_taken : 0;
	return policy;
}

/* The lock belongs to the transaction, because a caller that waits does so in a subtransaction
 * that is rolled back after the wait. */
static bool
lock_scopes(bool dont_wait, SubTransactionId subtransaction)
{
	Oid			scopes = idem_catalog()->scopes;

	if (locked_scopes == scopes)
		return true;
	idem_policy_unlock();
	if (!idem_relation_lock(scopes, RowShareLock, dont_wait))
		return false;
	locked_scopes = scopes;
	locked_in = subtransaction;
	locks_taken++;
	AcceptInvalidationMessages();
	return true;
}

void
idem_policy_unlock(void)
{
	if (!OidIsValid(locked_scopes))
		return;
	idem_relation_unlock(locked_scopes, RowShareLock);
	locked_scopes = InvalidOid;
}

void
idem_policy_wait_lock(SubTransactionId subtransaction)
{
	(void) lock_scopes(false, subtransaction);
}

/*
 * Taking the lock processes the invalidations of all changes that were committed before.  So a
 * policy is current if no invalidation has come since it was read, or if it was read under this
 * same lock.  The second test is for debug_discard_caches: there every lock invalidates
 * everything, and by the first test alone a claim would never end.
 */
IdemPromise
idem_policy_promise(const IdemPolicy *policy, TimestampTz key_time,
					TimestampTz *remembered_until)
{
	if (!lock_scopes(true, GetCurrentSubTransactionId()))
		return IDEM_PROMISE_REFUSED;
	if (policy->generation != invalidations && policy->lock != locks_taken)
		return IDEM_PROMISE_OUTDATED;
	Assert(OidIsValid(locked_scopes));
	*remembered_until = idem_remembered_until(policy, key_time);
	return IDEM_PROMISE_MADE;
}

static void
end_transaction(XactEvent event, void *arg)
{
	if (event == XACT_EVENT_COMMIT || event == XACT_EVENT_ABORT ||
		event == XACT_EVENT_PREPARE)
		locked_scopes = InvalidOid;
}

static void
end_subtransaction(SubXactEvent event, SubTransactionId mine,
				   SubTransactionId parent, void *arg)
{
	if (event == SUBXACT_EVENT_ABORT_SUB && OidIsValid(locked_scopes) &&
		locked_in >= mine)
		idem_policy_unlock();
}

void
idem_policy_init(void)
{
	RegisterXactCallback(end_transaction, NULL);
	RegisterSubXactCallback(end_subtransaction, NULL);
	CacheRegisterRelcacheCallback(invalidate_scopes, (Datum) 0);
}

static CachedScope *
find_cached(const char *name)
{
	if (!OidIsValid(cached_relid))
		return NULL;
	if (latest_scope != NULL && strcmp(latest_scope->name, name) == 0)
		return latest_scope;
	return hash_search(cached_scopes, name, HASH_FIND, NULL);
}

IdemPolicy
idem_policy(const text *scope)
{
	IdemPolicy	policy = {
		.ttl_us = FROM_SETTINGS,
		.lease_us = FROM_SETTINGS,
		.lease_max_us = FROM_SETTINGS,
		.result_max_bytes = FROM_SETTINGS,
		.guarded_since = DT_NOBEGIN
	};
	char		name[IDEM_KEY_PART_BYTES_MAX + 1];
	CachedScope *entry;

	Assert(IsTransactionState());
	AcceptInvalidationMessages();
	policy.generation = invalidations;
	/* No row has so long a name.  In the cache it would be truncated, and mistaken for another one. */
	if (VARSIZE_ANY_EXHDR(scope) > IDEM_KEY_PART_BYTES_MAX)
		return with_settings(policy);
	text_to_cstring_buffer(scope, name, sizeof(name));
	entry = find_cached(name);
	if (entry != NULL)
		return with_settings(entry->policy);

	if (cached_scopes != NULL &&
		hash_get_num_entries(cached_scopes) >= CACHED_SCOPES_MAX)
		cached_relid = InvalidOid;
	load_policy(scope, &policy);

	/* If an invalidation came meanwhile: use the policy once, do not keep it. */
	if (policy.generation == invalidations && OidIsValid(cached_relid))
	{
		entry = hash_search(cached_scopes, name, HASH_ENTER, NULL);
		entry->policy = policy;
		latest_scope = entry;
	}
	return with_settings(policy);
}

IdemPolicy
idem_policy_to_claim(const text *scope)
{
	IdemPolicy	policy = idem_policy(scope);

	if (unlikely(idem_claimable_scopes == IDEM_SCOPES_DECLARED &&
				 !policy.is_declared))
		idem_raise_undeclared_scope(scope);
	return policy;
}

bool
idem_policy_ignores_row(const IdemPolicy *policy, IdemState state,
						TimestampTz lease_until, TimestampTz expires_at)
{
	TimestampTz now;

	if (!policy->expired_reclaim)
		return false;
	now = GetCurrentTimestamp();
	if (state == IDEM_STATE_IN_PROGRESS &&
		(lease_until > now || policy->lapsed_unknown))
		return false;
	return expires_at <= now;
}

/*
 * A claim that is made at time c, of a key with time t, is remembered at least until
 * max(c, t) + ttl.  So if t + ttl is in the future, a missing row proves that the key is new.
 * The exception is a key with a time up to guarded_since: it may have had a shorter ttl
 * (scopes.c).
 */
bool
idem_may_be_forgotten(const IdemPolicy *policy, TimestampTz key_time)
{
	return key_time <= policy->guarded_since ||
		key_time <= GetCurrentTimestamp() - policy->ttl_us;
}

TimestampTz
idem_remembered_until(const IdemPolicy *policy, TimestampTz key_time)
{
	return Max(GetCurrentTimestamp(), key_time) + policy->ttl_us;
}
