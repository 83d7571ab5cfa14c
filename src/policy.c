/*
 * policy.c
 *	  Scopes: what their claims promise, cached and invalidated.
 *
 * idem_scopes is a plain table that operators edit with SQL.  A row trigger
 * sends a relcache invalidation for it, which every backend receives, and a
 * subscriber too, since the trigger is ENABLE ALWAYS.  DML alone invalidates
 * nothing.  idem_policy() receives pending invalidations itself, so that a
 * change acts from the next claim after its commit.
 *
 * A scope without a row is cached as well: an INSERT invalidates like the rest.
 * Settings are not copied into the cache: they are read when they are needed.
 *
 * What guarded_since says of the past rests on a lock.  A claim takes RowShareLock
 * on idem_scopes, makes sure that the policy is still as it read it, looks at the
 * clock, writes its promise and unlocks; the trigger that moves the guard takes
 * ExclusiveLock before it looks at the clock, until the change commits (the install
 * script, idem_scopes_guard()).  So all promises of the old policy are from before the
 * guard, committed or not, and whoever waits for the change reads the new one.  A
 * replay makes no promise, nor does whoever settles, extends or fences a lease make one
 * to a key without a row: they take no such lock.
 */
#include "postgres.h"

#include "access/genam.h"
#include "access/table.h"
#include "access/xact.h"
#include "catalog/pg_type_d.h"
#include "commands/trigger.h"
#include "common/int.h"
#include "executor/executor.h"
#include "miscadmin.h"
#include "storage/lmgr.h"
#include "utils/builtins.h"
#include "utils/fmgroids.h"
#include "utils/hsearch.h"
#include "utils/inval.h"
#include "utils/memutils.h"
#include "utils/rel.h"
#include "utils/resowner.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"

#include "catalog.h"
#include "compat.h"
#include "guc.h"
#include "key.h"
#include "policy.h"

/* A scope is added per distinct name used: drop them all when there are many. */
#define CACHED_SCOPES_MAX 1000

/* Columns of idem_scopes, as in the install script */
enum
{
	Anum_scopes_scope = 1,
	Anum_scopes_ttl,
	Anum_scopes_lease,
	Anum_scopes_failed,
	Anum_scopes_lapsed,
	Anum_scopes_expired,
	Anum_scopes_key_time,
	Anum_scopes_result_max_bytes,
	Anum_scopes_guarded_since,
	Anum_scopes_guarded_ttl
};

#define Natts_scopes Anum_scopes_guarded_ttl

static const Oid scopes_column_types[Natts_scopes] = {
	TEXTOID, INTERVALOID, INTERVALOID, TEXTOID, TEXTOID, TEXTOID, TEXTOID,
	INT4OID, TIMESTAMPTZOID, INTERVALOID
};

#define FROM_SETTINGS (-1)

typedef struct CachedScope
{
	char		name[IDEM_KEY_PART_BYTES_MAX + 1];
	IdemPolicy	policy;			/* FROM_SETTINGS where the row has NULL */
} CachedScope;

static HTAB *cached_scopes = NULL;
static CachedScope *latest_scope = NULL;	/* most calls ask for the same again */
static Oid	cached_relid = InvalidOid;
static uint64 invalidations = 0;
static Oid	locked_scopes = InvalidOid; /* InvalidOid: not locked */
static SubTransactionId locked_in;

PG_FUNCTION_INFO_V1(idem_scopes_changed);

/* No catalog access here, and nothing that can fail: it only marks. */
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
	if (cached_scopes == NULL)
		CacheRegisterRelcacheCallback(invalidate_scopes, (Datum) 0);
	else
		hash_destroy(cached_scopes);
	cached_scopes = NULL;
	latest_scope = NULL;
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

/* Saturates: a caller's argument is looked at before any bound is. */
int64
idem_interval_us(const Interval *interval)
{
	int64		us;

	if (pg_mul_s64_overflow(interval->day, USECS_PER_DAY, &us))
		return interval->day < 0 ? PG_INT64_MIN : PG_INT64_MAX;
	if (pg_add_s64_overflow(us, interval->time, &us))
		return interval->time < 0 ? PG_INT64_MIN : PG_INT64_MAX;
	return us;
}

static void
read_policy(TupleTableSlot *slot, IdemPolicy *policy)
{
	bool		isnull;
	Datum		datum;

	datum = slot_getattr(slot, Anum_scopes_ttl, &isnull);
	if (!isnull)
		policy->ttl_us = idem_interval_us(DatumGetIntervalP(datum));
	datum = slot_getattr(slot, Anum_scopes_lease, &isnull);
	if (!isnull)
		policy->lease_us = idem_interval_us(DatumGetIntervalP(datum));
	datum = slot_getattr(slot, Anum_scopes_result_max_bytes, &isnull);
	if (!isnull)
		policy->result_max_bytes = DatumGetInt32(datum);
	datum = slot_getattr(slot, Anum_scopes_guarded_since, &isnull);
	if (!isnull)
		policy->guarded_since = DatumGetTimestampTz(datum);
	datum = slot_getattr(slot, Anum_scopes_guarded_ttl, &isnull);
	if (!isnull)
		policy->guarded_ttl_us = idem_interval_us(DatumGetIntervalP(datum));
	policy->failed_retryable = column_is(slot, Anum_scopes_failed, "retryable");
	policy->lapsed_unknown = column_is(slot, Anum_scopes_lapsed, "unknown");
	policy->expired_reclaim = column_is(slot, Anum_scopes_expired, "reclaim");
	policy->key_time_uuidv7 = column_is(slot, Anum_scopes_key_time, "uuidv7");
}

/* Reads the latest committed row, and one of this transaction. */
static void
load_policy(Relation scopes, const text *scope, IdemPolicy *policy)
{
	Oid			index_oid = idem_primary_key_index(scopes);
	Relation	index = index_open(index_oid, AccessShareLock);
	TupleTableSlot *slot = table_slot_create(scopes, NULL);
	/* New each time for such a table, and allowed in parallel mode */
	Snapshot	snapshot = RegisterSnapshot(GetCatalogSnapshot(RelationGetRelid(scopes)));
	IndexScanDesc scan = idem_index_beginscan(scopes, index, snapshot, 1);
	ScanKeyData key;

	ScanKeyInit(&key, Anum_scopes_scope, BTEqualStrategyNumber, F_TEXTEQ,
				PointerGetDatum(scope));
	index_rescan(scan, &key, 1, NULL, 0);
	if (index_getnext_slot(scan, ForwardScanDirection, slot))
		read_policy(slot, policy);
	index_endscan(scan);
	UnregisterSnapshot(snapshot);
	ExecDropSingleTupleTableSlot(slot);
	index_close(index, AccessShareLock);
}

static void
check_scopes_layout(Relation scopes)
{
	TupleDesc	desc = RelationGetDescr(scopes);
	bool		same = desc->natts >= Natts_scopes &&
		OidIsValid(idem_primary_key_index(scopes));

	for (int i = 0; same && i < Natts_scopes; i++)
		same = TupleDescAttr(desc, i)->atttypid == scopes_column_types[i];
	idem_refuse_distributed(scopes);
	if (!same)
		ereport(ERROR,
				(errcode(ERRCODE_FEATURE_NOT_SUPPORTED),
				 errmsg("table \"idem_scopes\" has another layout than the extension gave it"),
				 errhint("Take back the change of its columns or of its primary key.")));
}

static void
load_scope(const text *scope, IdemPolicy *policy)
{
	Relation	scopes;

	while ((scopes = try_table_open(idem_catalog()->scopes,
									AccessShareLock)) == NULL)
		CHECK_FOR_INTERRUPTS();
	check_scopes_layout(scopes);
	if (cached_relid != RelationGetRelid(scopes))
		reset_cache(RelationGetRelid(scopes));
	load_policy(scopes, scope, policy);
	table_close(scopes, AccessShareLock);
}

static IdemPolicy
with_settings(IdemPolicy policy)
{
	if (policy.ttl_us == FROM_SETTINGS)
		policy.ttl_us = idem_ttl * USECS_PER_SEC;
	if (policy.lease_us == FROM_SETTINGS)
		policy.lease_us = (int64) idem_lease * 1000;
	if (policy.result_max_bytes == FROM_SETTINGS)
		policy.result_max_bytes = idem_result_max_bytes;
	return policy;
}

/*
 * Kept in the name of the transaction, since the wait for it is in a subtransaction
 * that is rolled back; waited for in the name of the caller, since what is granted while
 * the wait is given up is that one's.
 */
bool
idem_policy_lock(bool wait, SubTransactionId subtransaction)
{
	Oid			scopes = idem_catalog()->scopes;
	ResourceOwner owner = CurrentResourceOwner;

	if (locked_scopes == scopes)
		return true;
	idem_policy_unlock();
	if (wait)
		LockRelationOid(scopes, RowShareLock);
	CurrentResourceOwner = TopTransactionResourceOwner;
	if (ConditionalLockRelationOid(scopes, RowShareLock))
	{
		locked_scopes = scopes;
		locked_in = subtransaction;
	}
	CurrentResourceOwner = owner;
	if (wait)
		UnlockRelationOid(scopes, RowShareLock);
	return OidIsValid(locked_scopes);
}

void
idem_policy_unlock(void)
{
	ResourceOwner owner = CurrentResourceOwner;

	if (!OidIsValid(locked_scopes))
		return;
	CurrentResourceOwner = TopTransactionResourceOwner;
	UnlockRelationOid(locked_scopes, RowShareLock);
	CurrentResourceOwner = owner;
	locked_scopes = InvalidOid;
}

/* After idem_policy_lock(), which receives what was changed before. */
bool
idem_policy_is_current(const IdemPolicy *policy)
{
	return policy->generation == invalidations;
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
}

static CachedScope *
find_cached(const text *scope)
{
	char		name[IDEM_KEY_PART_BYTES_MAX + 1];
	size_t		length = VARSIZE_ANY_EXHDR(scope);

	if (!OidIsValid(cached_relid))
		return NULL;
	if (latest_scope != NULL &&
		strncmp(latest_scope->name, VARDATA_ANY(scope), length) == 0 &&
		latest_scope->name[length] == '\0')
		return latest_scope;
	text_to_cstring_buffer(scope, name, sizeof(name));
	return hash_search(cached_scopes, name, HASH_FIND, NULL);
}

IdemPolicy
idem_policy(const text *scope)
{
	IdemPolicy	policy = {
		.ttl_us = FROM_SETTINGS,
		.lease_us = FROM_SETTINGS,
		.result_max_bytes = FROM_SETTINGS,
		.guarded_since = DT_NOBEGIN
	};
	char		name[IDEM_KEY_PART_BYTES_MAX + 1];
	CachedScope *entry;

	AcceptInvalidationMessages();
	entry = find_cached(scope);
	if (entry != NULL)
		return with_settings(entry->policy);

	if (cached_scopes != NULL &&
		hash_get_num_entries(cached_scopes) >= CACHED_SCOPES_MAX)
		cached_relid = InvalidOid;
	policy.generation = invalidations;
	load_scope(scope, &policy);

	/* What was read before an invalidation may be old: use it, not keep it. */
	if (policy.generation == invalidations && OidIsValid(cached_relid))
	{
		text_to_cstring_buffer(scope, name, sizeof(name));
		entry = hash_search(cached_scopes, name, HASH_ENTER, NULL);
		entry->policy = policy;
		latest_scope = entry;
	}
	return with_settings(policy);
}

/*
 * A claim of a key with time t, made at c, is remembered until max(c, t) + ttl at
 * least: so a missing row is proof as long as t + ttl lies ahead.  Claims from
 * before guarded_since were remembered for another ttl, and before key_time was
 * switched on from c only, which can be a client's skew before t.
 */
bool
idem_may_be_forgotten(const IdemPolicy *policy, TimestampTz key_time)
{
	TimestampTz now = GetCurrentTimestamp();

	return key_time <= now - policy->ttl_us ||
		(key_time <= policy->guarded_since &&
		 key_time - IDEM_KEY_TIME_SKEW_US <= now - policy->guarded_ttl_us);
}

TimestampTz
idem_whole_second(TimestampTz time)
{
	return (time + USECS_PER_SEC - 1) / USECS_PER_SEC * USECS_PER_SEC;
}

TimestampTz
idem_remembered_until(const IdemPolicy *policy, TimestampTz key_time)
{
	return idem_whole_second(Max(GetCurrentTimestamp(), key_time) +
							 policy->ttl_us);
}

/* ----- the trigger on idem_scopes ----- */

/* Before a row of idem_scopes changes, and before TRUNCATE */
Datum
idem_scopes_changed(PG_FUNCTION_ARGS)
{
	TriggerData *trigger = (TriggerData *) fcinfo->context;

	if (!CALLED_AS_TRIGGER(fcinfo) ||
		!TRIGGER_FIRED_BEFORE(trigger->tg_event) ||
		TRIGGER_FIRED_FOR_STATEMENT(trigger->tg_event) !=
		TRIGGER_FIRED_BY_TRUNCATE(trigger->tg_event) ||
		RelationGetRelid(trigger->tg_relation) != idem_catalog()->scopes)
		ereport(ERROR,
				(errcode(ERRCODE_E_R_I_E_TRIGGER_PROTOCOL_VIOLATED),
				 errmsg("idem_scopes_changed() is the trigger of idem_scopes"),
				 errhint("Do not use it for other tables.")));
	CacheInvalidateRelcache(trigger->tg_relation);

	if (TRIGGER_FIRED_FOR_STATEMENT(trigger->tg_event))
		return PointerGetDatum(NULL);
	return PointerGetDatum(TRIGGER_FIRED_BY_UPDATE(trigger->tg_event) ?
						   trigger->tg_newtuple : trigger->tg_trigtuple);
}
