/*
 * stats.c
 *	  The statistics in shared memory: one slot for each database that has the extension.
 *
 * Who may write what, under which lock:
 *
 *	slot->database	shared->lock, exclusively.  Read it under shared->lock in either mode.
 *					A process that is connected to a database uses that database's slot
 *					without the lock: a slot is freed only after its database was dropped,
 *					and DROP DATABASE waits for all connections to end.
 *	slot->started	the same lock; starts and starter too.
 *	shared->launcher_pid	atomic.  The launcher of a server that has not preloaded us sets
 *					it from 0 to its pid, and back to 0 when it ends.  It ends regularly
 *					only under shared->lock, exclusively, while no database is started.  So
 *					a session that starts one under that lock, and then sees a launcher,
 *					knows that the launcher will see the database.
 *	slot->claimed	atomic.  A claiming transaction lowers it when it commits;
 *					idem_stats_begin_batch() resets it, under slot->mutex.
 *	slot->claims	atomics, each a counter of its own.
 *	slot->scopes	see scope_stats.c.
 *	slot->cleanup	slot->mutex, a spinlock.  Only the database's worker writes its marks,
 *					worker_pid and runs.  The launcher reads, and publishes errors.
 *
 * Take shared->lock before a mutex, and no lock under a mutex.
 *
 * A transaction keeps what it counts to itself until it commits, with one entry for each
 * level of savepoints.  A prepared transaction publishes at PREPARE, because COMMIT PREPARED
 * calls no callback of the session that prepared.  Its rows may become visible after a batch
 * has looked for them; a later rescan finds them (clean/schedule.c).
 *
 * The earliest expiry that may be left in the table tells the launcher when to start a
 * worker, and is shown as oldest_expired_age.  It is kept in two values, so that a batch can
 * replace it without losing a claim that the batch's snapshot did not see:
 *
 *	1. Before its snapshot, a batch moves slot->claimed into cleanup.oldest and resets
 *	   slot->claimed.  A claim that committed before the snapshot is then in oldest.  A claim
 *	   that commits later lowers slot->claimed again.
 *	2. After its commit, the batch replaces oldest by the earliest expiry that it saw of a row
 *	   that stays, or else by the end of what it looked at.  It may only lower oldest if oldest
 *	   lies outside of what it looked at, or if another batch has written it since step 1: has
 *	   published, or has moved claims there that this one's snapshot did not see.
 *
 * Backlog, whether expired rows are left that can be removed, goes with it.  Any batch can find
 * one.  Only a batch that has seen all, and was not overtaken by another one, can say that there
 * is none.
 *
 * If the value is too early, a worker looks at the table in vain.  If it were too late,
 * expired claims would stay until the next rescan.
 */
#include "postgres.h"

#include <math.h>

#include "access/xact.h"
#include "mb/pg_wchar.h"
#include "miscadmin.h"
#include "port/atomics.h"
#include "storage/ipc.h"
#include "storage/lwlock.h"
#include "storage/procarray.h"
#include "storage/spin.h"
#include "utils/inval.h"
#include "utils/memutils.h"
#include "utils/syscache.h"
#include "utils/timestamp.h"

#include "shared/memory.h"
#include "shared/scope_stats.h"
#include "shared/stats.h"

/* Databases with the extension; statistics of more are not kept. */
#define DATABASES_MAX 256

const double idem_duration_bounds[IDEM_DURATION_BUCKETS] = {
	0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5,
	1, 2.5, 5, 10, INFINITY
};

typedef struct DatabaseSlot
{
	Oid			database;		/* InvalidOid: free */
	bool		started;		/* by idem_start_worker() */
	uint32		starts;			/* how often it was called */
	TransactionId starter;		/* the latest one that had written something: it may have
								 * created the extension */
	pg_atomic_uint64 claims[IDEM_CLAIM_COUNTERS];
	pg_atomic_uint64 claimed;	/* earliest expiry of what was claimed since
								 * the latest batch began; DT_NOEND: nothing */
	slock_t		mutex;
	IdemCleanupStats cleanup;
	IdemScopeTable scopes;
} DatabaseSlot;

typedef struct SharedStats
{
	LWLock		lock;
	pg_atomic_uint32 launcher_pid;	/* 0: none */
	bool		full_reported;	/* under lock */
	DatabaseSlot slots[DATABASES_MAX];
} SharedStats;

/* What a transaction or subtransaction has done, to be counted at its commit */
typedef struct PendingStats
{
	struct PendingStats *upper;
	int			nest_level;
	TimestampTz claimed;		/* earliest expiry; DT_NOEND: no claim */
	int64		nclaimed;
	uint32	   *nclaimed_by_scope;	/* IDEM_SCOPE_NUMBERS of them; NULL: all are 0 */
	int64		nreclaimed;
	int64		nhealed;
	IdemCleanupCounters *cleanup;	/* NULL: no batch */
	IdemCleanupReport last_batch;
} PendingStats;

static SharedStats *shared = NULL;	/* after idem_shared_use() */

/* This process's database.  Looked up once; see the rule on slot->database. */
static DatabaseSlot *own_slot = NULL;
static bool own_slot_refused = false;

/* Entries live in TopTransactionContext. */
static PendingStats *pending = NULL;

/* ----- shared memory ----- */

static Size
stats_size(void)
{
	return sizeof(SharedStats);
}

static void
init_stats(void *memory, int tranche)
{
	SharedStats *fresh = memory;

	memset(fresh, 0, sizeof(SharedStats));
	LWLockInitialize(&fresh->lock, tranche);
	pg_atomic_init_u32(&fresh->launcher_pid, 0);
	for (int i = 0; i < DATABASES_MAX; i++)
	{
		pg_atomic_init_u64(&fresh->slots[i].claimed, (uint64) DT_NOEND);
		for (int j = 0; j < IDEM_CLAIM_COUNTERS; j++)
			pg_atomic_init_u64(&fresh->slots[i].claims[j], 0);
		SpinLockInit(&fresh->slots[i].mutex);
		idem_scope_table_init(&fresh->slots[i].scopes);
	}
}

static void
use_stats(void *memory)
{
	shared = memory;
}

/* InvalidOid finds a free slot. */
static DatabaseSlot *
find_slot(Oid database)
{
	Assert(LWLockHeldByMe(&shared->lock));
	for (int i = 0; i < DATABASES_MAX; i++)
		if (shared->slots[i].database == database)
			return &shared->slots[i];
	return NULL;
}

static void
init_slot(DatabaseSlot *slot, Oid database)
{
	Assert(LWLockHeldByMeInMode(&shared->lock, LW_EXCLUSIVE));
	Assert(!OidIsValid(slot->database));
	memset(&slot->cleanup, 0, sizeof(slot->cleanup));
	slot->cleanup.oldest = DT_NOEND;
	slot->cleanup.marks = IDEM_NO_MARKS;
	slot->started = false;
	slot->starts = 0;
	slot->starter = InvalidTransactionId;
	for (int i = 0; i < IDEM_CLAIM_COUNTERS; i++)
		pg_atomic_write_u64(&slot->claims[i], 0);
	pg_atomic_write_u64(&slot->claimed, (uint64) DT_NOEND);
	idem_scope_table_clear(&slot->scopes);
	slot->database = database;
}

/* Where no launcher does it: frees the slots of databases that were dropped. */
static void
forget_dropped_databases(void)
{
	List	   *databases = idem_stats_get_databases();
	ListCell   *lc;

	/* Otherwise the cache may not know a database that was created a moment ago. */
	AcceptInvalidationMessages();
	foreach(lc, databases)
		if (!SearchSysCacheExists1(DATABASEOID, ObjectIdGetDatum(lfirst_oid(lc))))
			idem_stats_forget_database(lfirst_oid(lc));
	list_free(databases);
}

/* Returns NULL if no slot is free. */
static DatabaseSlot *
create_slot(Oid database)
{
	DatabaseSlot *slot;
	bool		is_full;
	bool		report = false;

	LWLockAcquire(&shared->lock, LW_SHARED);
	is_full = find_slot(InvalidOid) == NULL;
	LWLockRelease(&shared->lock);
	if (is_full && IsTransactionState())
		forget_dropped_databases();

	LWLockAcquire(&shared->lock, LW_EXCLUSIVE);
	slot = find_slot(database);
	if (slot == NULL && (slot = find_slot(InvalidOid)) != NULL)
		init_slot(slot, database);
	if (slot == NULL)
	{
		report = !shared->full_reported;
		shared->full_reported = true;
	}
	LWLockRelease(&shared->lock);

	if (report)
		ereport(LOG,
				(errmsg("idem keeps no statistics of database %u", database),
				 errdetail("There is room for %d databases.", DATABASES_MAX)));
	return slot;
}

/*
 * The slot of this process's database, or NULL.  Raises nothing outside of a transaction,
 * because it is called after a commit.
 */
static DatabaseSlot *
get_own_slot(bool create)
{
	if (own_slot != NULL || own_slot_refused || !OidIsValid(MyDatabaseId) ||
		!idem_shared_use())
		return own_slot;

	LWLockAcquire(&shared->lock, LW_SHARED);
	own_slot = find_slot(MyDatabaseId);
	LWLockRelease(&shared->lock);
	if (own_slot == NULL && create)
	{
		own_slot = create_slot(MyDatabaseId);
		own_slot_refused = (own_slot == NULL);
	}
	return own_slot;
}

/* ----- the earliest expiry ----- */

static void
lower_claimed(DatabaseSlot *slot, TimestampTz expires_at)
{
	uint64		current;

	/*
	 * Read slot->claimed only after the commit.  If nothing is written below, because the
	 * value is low enough and no batch has reset it, the snapshot of the batch that resets
	 * it will see our rows.
	 */
	pg_memory_barrier();
	current = pg_atomic_read_u64(&slot->claimed);
	while (expires_at < (TimestampTz) current &&
		   !pg_atomic_compare_exchange_u64(&slot->claimed, &current,
										   (uint64) expires_at))
		 /* the failed exchange has read current again */ ;
}

/* Step 1 of the protocol at the top */
TimestampTz
idem_stats_begin_batch(uint64 *publications)
{
	DatabaseSlot *slot = get_own_slot(false);
	TimestampTz claimed;
	TimestampTz oldest;

	*publications = 0;
	if (slot == NULL)
		return DT_NOEND;
	SpinLockAcquire(&slot->mutex);
	claimed = (TimestampTz) pg_atomic_exchange_u64(&slot->claimed,
												   (uint64) DT_NOEND);
	oldest = Min(slot->cleanup.oldest, claimed);
	slot->cleanup.oldest = oldest;
	if (claimed != DT_NOEND)
		slot->cleanup.publications++;
	*publications = slot->cleanup.publications;
	SpinLockRelease(&slot->mutex);
	return oldest;
}

/* Step 2.  The caller holds the mutex. */
static void
replace_oldest(IdemCleanupStats *cleanup, const IdemCleanupReport *report)
{
	bool		is_overtaken = cleanup->publications != report->publications;

	if (!is_overtaken &&
		cleanup->oldest >= report->start && cleanup->oldest < report->end)
		cleanup->oldest = report->end;
	cleanup->oldest = Min(cleanup->oldest, report->oldest_expires_at);
	if (report->backlog || (!report->more && !is_overtaken))
		cleanup->backlog = report->backlog;
	cleanup->publications++;
}

/* ----- counting ----- */

static void
add_report(IdemCleanupCounters *counters, const IdemCleanupReport *report)
{
	int			bucket = 0;

	while (report->seconds > idem_duration_bounds[bucket])
		bucket++;
	counters->buckets[bucket]++;
	counters->batches++;
	counters->rows_deleted += report->rows_deleted;
	counters->last_seconds = report->seconds;
	counters->max_seconds = Max(counters->max_seconds, report->seconds);
	counters->total_seconds += report->seconds;
	counters->last_run = GetCurrentTimestamp();
}

static void
add_counters(IdemCleanupCounters *counters, const IdemCleanupCounters *more)
{
	counters->rows_deleted += more->rows_deleted;
	counters->batches += more->batches;
	counters->last_seconds = more->last_seconds;
	counters->max_seconds = Max(counters->max_seconds, more->max_seconds);
	counters->total_seconds += more->total_seconds;
	for (int i = 0; i < IDEM_DURATION_BUCKETS; i++)
		counters->buckets[i] += more->buckets[i];
	counters->last_run = more->last_run;
}

static PendingStats *
push_pending(int nest_level)
{
	PendingStats *entry = MemoryContextAllocZero(TopTransactionContext,
												 sizeof(PendingStats));

	Assert(pending == NULL || pending->nest_level < nest_level);
	entry->nest_level = nest_level;
	entry->claimed = DT_NOEND;
	entry->upper = pending;
	pending = entry;
	/* Not only at the commit: to find room for it can take a look at the catalog. */
	(void) get_own_slot(true);
	return entry;
}

/* The entry of the current level of savepoints */
static inline PendingStats *
current_pending(void)
{
	int			nest_level = GetCurrentTransactionNestLevel();

	if (likely(pending != NULL && pending->nest_level == nest_level))
		return pending;
	return push_pending(nest_level);
}

static uint32 *
make_counters_by_scope(void)
{
	return MemoryContextAllocZero(TopTransactionContext,
								  IDEM_SCOPE_NUMBERS * sizeof(uint32));
}

void
idem_stats_count_claim(const text *scope, TimestampTz expires_at)
{
	PendingStats *entry;
	DatabaseSlot *slot;

	if (!idem_shared_use())
		return;
	entry = current_pending();
	entry->nclaimed++;
	slot = get_own_slot(true);
	if (slot != NULL)
	{
		if (entry->nclaimed_by_scope == NULL)
			entry->nclaimed_by_scope = make_counters_by_scope();
		entry->nclaimed_by_scope[idem_scope_number(&slot->scopes, scope)]++;
	}
	if (expires_at < entry->claimed)
		entry->claimed = expires_at;
}

static void
add_to_counter(int counter, uint64 n)
{
	DatabaseSlot *slot = get_own_slot(true);

	Assert(counter >= 0 && counter < IDEM_CLAIM_COUNTERS);
	if (slot != NULL && n > 0)
		pg_atomic_fetch_add_u64(&slot->claims[counter], n);
}

static void
add_to_scope(int number, IdemOutcome outcome, uint64 n)
{
	IdemScopeTable *table = &get_own_slot(false)->scopes;

	pg_atomic_fetch_add_u64(&table->scopes[number].answers[outcome], n);
}

void
idem_stats_count_outcome(const text *scope, IdemOutcome outcome)
{
	DatabaseSlot *slot = get_own_slot(true);

	Assert(outcome != IDEM_CLAIMED);
	if (slot == NULL)
		return;
	add_to_counter(outcome, 1);
	add_to_scope(idem_scope_number(&slot->scopes, scope), outcome, 1);
}

void
idem_stats_count_wait(int64 waited_us)
{
	add_to_counter(IDEM_COUNT_WAITS, 1);
	add_to_counter(IDEM_COUNT_WAIT_US, waited_us);
}

void
idem_stats_count_lost_lease(void)
{
	add_to_counter(IDEM_COUNT_LOST_LEASES, 1);
}

void
idem_stats_count_reclaim(void)
{
	if (idem_shared_use())
		current_pending()->nreclaimed++;
}

void
idem_stats_count_healed(void)
{
	if (idem_shared_use())
		current_pending()->nhealed++;
}

void
idem_stats_count_cleanup(const IdemCleanupReport *report)
{
	PendingStats *entry;

	if (!idem_shared_use())
		return;
	entry = current_pending();
	if (entry->cleanup == NULL)
		entry->cleanup = MemoryContextAllocZero(TopTransactionContext,
												sizeof(IdemCleanupCounters));
	add_report(entry->cleanup, report);
	entry->last_batch = *report;
}

static void
pop_pending(void)
{
	PendingStats *entry = pending;

	pending = entry->upper;
	if (entry->cleanup != NULL)
		pfree(entry->cleanup);
	if (entry->nclaimed_by_scope != NULL)
		pfree(entry->nclaimed_by_scope);
	pfree(entry);
}

/* A savepoint was released: its parent has done now what was done in it. */
static void
merge_into_upper(PendingStats *entry)
{
	PendingStats *upper = entry->upper;

	if (upper == NULL || upper->nest_level < entry->nest_level - 1)
	{
		entry->nest_level--;
		return;
	}

	upper->claimed = Min(upper->claimed, entry->claimed);
	upper->nclaimed += entry->nclaimed;
	upper->nreclaimed += entry->nreclaimed;
	upper->nhealed += entry->nhealed;
	if (upper->nclaimed_by_scope == NULL)
	{
		upper->nclaimed_by_scope = entry->nclaimed_by_scope;
		entry->nclaimed_by_scope = NULL;
	}
	for (int i = 0; entry->nclaimed_by_scope != NULL && i < IDEM_SCOPE_NUMBERS; i++)
		upper->nclaimed_by_scope[i] += entry->nclaimed_by_scope[i];
	if (entry->cleanup != NULL)
	{
		upper->last_batch = entry->last_batch;
		if (upper->cleanup != NULL)
			add_counters(upper->cleanup, entry->cleanup);
		else
		{
			upper->cleanup = entry->cleanup;
			entry->cleanup = NULL;
		}
	}
	pop_pending();
}

static void
publish_pending(const PendingStats *entry, bool prepared)
{
	DatabaseSlot *slot = get_own_slot(true);

	Assert(entry->upper == NULL);
	if (slot == NULL)
		return;
	add_to_counter(IDEM_CLAIMED, entry->nclaimed);
	add_to_counter(IDEM_COUNT_RECLAIMS, entry->nreclaimed);
	add_to_counter(IDEM_COUNT_HEALED, entry->nhealed);
	for (int i = 0; entry->nclaimed_by_scope != NULL && i < IDEM_SCOPE_NUMBERS; i++)
		if (entry->nclaimed_by_scope[i] > 0)
			add_to_scope(i, IDEM_CLAIMED, entry->nclaimed_by_scope[i]);
	if (entry->claimed != DT_NOEND)
		lower_claimed(slot, entry->claimed);
	if (entry->cleanup == NULL)
		return;

	SpinLockAcquire(&slot->mutex);
	add_counters(&slot->cleanup.counters, entry->cleanup);
	/* The rows that a prepared transaction removed are still there. */
	if (!prepared)
		replace_oldest(&slot->cleanup, &entry->last_batch);
	SpinLockRelease(&slot->mutex);
}

static void
at_xact_end(XactEvent event, void *arg)
{
	if (pending == NULL)
		return;

	switch (event)
	{
		case XACT_EVENT_COMMIT:
		case XACT_EVENT_PREPARE:
			publish_pending(pending, event == XACT_EVENT_PREPARE);
			pending = NULL;
			break;
		case XACT_EVENT_ABORT:
			pending = NULL;
			break;
		default:
			break;
	}
}

static void
at_subxact_end(SubXactEvent event, SubTransactionId subid,
			   SubTransactionId parent, void *arg)
{
	if (pending == NULL ||
		pending->nest_level < GetCurrentTransactionNestLevel())
		return;

	Assert(pending->nest_level == GetCurrentTransactionNestLevel());
	if (event == SUBXACT_EVENT_COMMIT_SUB)
		merge_into_upper(pending);
	else if (event == SUBXACT_EVENT_ABORT_SUB)
		pop_pending();
}

void
idem_stats_init(void)
{
	static const IdemSharedPart part = {
		.size = stats_size,
		.init = init_stats,
		.use = use_stats
	};

	RegisterXactCallback(at_xact_end, NULL);
	RegisterSubXactCallback(at_subxact_end, NULL);
	idem_shared_add(&part);
}

/* ----- the worker ----- */

/* before_shmem_exit callback */
static void
detach_worker(int code, Datum arg)
{
	Assert(own_slot->cleanup.worker_pid == MyProcPid);
	SpinLockAcquire(&own_slot->mutex);
	own_slot->cleanup.worker_pid = 0;
	SpinLockRelease(&own_slot->mutex);
}

bool
idem_stats_attach_worker(void)
{
	DatabaseSlot *slot = get_own_slot(true);
	int			worker_pid;

	if (slot == NULL)
		return true;
	SpinLockAcquire(&slot->mutex);
	worker_pid = slot->cleanup.worker_pid;
	if (worker_pid == 0)
		slot->cleanup.worker_pid = MyProcPid;
	SpinLockRelease(&slot->mutex);

	if (worker_pid == 0)
		before_shmem_exit(detach_worker, (Datum) 0);
	return worker_pid == 0 || worker_pid == MyProcPid;
}

void
idem_stats_publish_cleanup(const IdemCleanupReport *report,
						   const IdemCleanupMarks *marks)
{
	DatabaseSlot *slot = get_own_slot(false);
	IdemCleanupCounters counters = {0};

	if (slot == NULL)
		return;
	Assert(slot->cleanup.worker_pid == MyProcPid);
	add_report(&counters, report);
	SpinLockAcquire(&slot->mutex);
	add_counters(&slot->cleanup.counters, &counters);
	replace_oldest(&slot->cleanup, report);
	slot->cleanup.marks = *marks;
	SpinLockRelease(&slot->mutex);
}

void
idem_stats_publish_absent(void)
{
	DatabaseSlot *slot = get_own_slot(false);

	if (slot == NULL)
		return;
	SpinLockAcquire(&slot->mutex);
	slot->cleanup.oldest = DT_NOEND;
	slot->cleanup.publications++;
	slot->cleanup.backlog = false;
	SpinLockRelease(&slot->mutex);
}

bool
idem_stats_publish_error(Oid database, const char *message)
{
	DatabaseSlot *slot;
	TimestampTz now = GetCurrentTimestamp();
	int			length = pg_mbcliplen(message, strlen(message),
									  IDEM_ERROR_TEXT_BYTES_MAX - 1);
	bool		is_news = true;

	if (database == MyDatabaseId)
		(void) get_own_slot(true);
	LWLockAcquire(&shared->lock, LW_SHARED);
	slot = find_slot(database);
	if (slot != NULL)
	{
		SpinLockAcquire(&slot->mutex);
		is_news = strncmp(slot->cleanup.last_error, message, length) != 0 ||
			slot->cleanup.last_error[length] != '\0';
		slot->cleanup.errors++;
		slot->cleanup.last_error_at = now;
		memcpy(slot->cleanup.last_error, message, length);
		slot->cleanup.last_error[length] = '\0';
		SpinLockRelease(&slot->mutex);
	}
	LWLockRelease(&shared->lock);
	return is_news;
}

void
idem_stats_publish_run(void)
{
	DatabaseSlot *slot = get_own_slot(false);

	if (slot == NULL)
		return;
	SpinLockAcquire(&slot->mutex);
	slot->cleanup.runs++;
	SpinLockRelease(&slot->mutex);
}

/* ----- databases that an operator has started ----- */

/* before_shmem_exit callback */
static void
detach_launcher(int code, Datum arg)
{
	uint32		pid = MyProcPid;

	(void) pg_atomic_compare_exchange_u32(&shared->launcher_pid, &pid, 0);
}

bool
idem_stats_attach_launcher(void)
{
	uint32		none = 0;

	if (!pg_atomic_compare_exchange_u32(&shared->launcher_pid, &none, MyProcPid))
		return false;
	before_shmem_exit(detach_launcher, (Datum) 0);
	return true;
}

bool
idem_stats_detach_launcher(void)
{
	bool		is_needed = false;

	LWLockAcquire(&shared->lock, LW_EXCLUSIVE);
	for (int i = 0; i < DATABASES_MAX; i++)
		if (OidIsValid(shared->slots[i].database) && shared->slots[i].started)
			is_needed = true;
	if (!is_needed)
		detach_launcher(0, (Datum) 0);
	LWLockRelease(&shared->lock);
	return !is_needed;
}

pid_t
idem_stats_launcher_pid(void)
{
	return pg_atomic_read_u32(&shared->launcher_pid);
}

bool
idem_stats_start_database(IdemStart *start)
{
	DatabaseSlot *slot = get_own_slot(true);
	TransactionId xid = GetTopTransactionIdIfAny();

	if (slot == NULL)
		return false;
	LWLockAcquire(&shared->lock, LW_EXCLUSIVE);
	start->is_repeated = slot->started;
	start->starts = ++slot->starts;
	start->launcher_pid = idem_stats_launcher_pid();
	slot->started = true;
	if (TransactionIdIsValid(xid))
		slot->starter = xid;
	LWLockRelease(&shared->lock);
	return true;
}

bool
idem_stats_is_started(Oid database)
{
	DatabaseSlot *slot;
	bool		is_started;

	LWLockAcquire(&shared->lock, LW_SHARED);
	slot = find_slot(database);
	is_started = slot != NULL && slot->started;
	LWLockRelease(&shared->lock);
	return is_started;
}

/*
 * The transaction that started this database has ended.  Its id must not stay: after two billion
 * more transactions the id would look like one that still runs, or is another one's.
 */
static void
forget_starter(DatabaseSlot *slot, TransactionId starter)
{
	LWLockAcquire(&shared->lock, LW_EXCLUSIVE);
	if (slot->starter == starter)
		slot->starter = InvalidTransactionId;
	LWLockRelease(&shared->lock);
}

uint32
idem_stats_get_starts(void)
{
	DatabaseSlot *slot = get_own_slot(false);
	TransactionId starter;
	uint32		starts;

	if (slot == NULL)
		return 0;
	LWLockAcquire(&shared->lock, LW_SHARED);
	starter = slot->starter;
	starts = slot->started ? slot->starts : 0;
	LWLockRelease(&shared->lock);
	if (!TransactionIdIsValid(starter))
		return starts;
	if (TransactionIdIsInProgress(starter))
		return 0;
	forget_starter(slot, starter);
	return starts;
}

void
idem_stats_stop_database(uint32 starts)
{
	DatabaseSlot *slot = get_own_slot(false);

	if (slot == NULL || starts == 0)
		return;
	LWLockAcquire(&shared->lock, LW_EXCLUSIVE);
	if (slot->starts == starts)
	{
		slot->started = false;
		slot->starter = InvalidTransactionId;
	}
	LWLockRelease(&shared->lock);
}

/* ----- reading ----- */

static void
copy_stats(DatabaseSlot *slot, IdemCleanupStats *stats)
{
	TimestampTz claimed;

	SpinLockAcquire(&slot->mutex);
	claimed = (TimestampTz) pg_atomic_read_u64(&slot->claimed);
	*stats = slot->cleanup;
	SpinLockRelease(&slot->mutex);
	stats->oldest = Min(stats->oldest, claimed);
}

/* For SQL functions: NULL if there is no room; raises 55000 without shared memory. */
static DatabaseSlot *
require_own_slot(void)
{
	idem_shared_require("keep statistics");
	return get_own_slot(true);
}

bool
idem_stats_read(IdemCleanupStats *stats, uint64 *claims)
{
	DatabaseSlot *slot = require_own_slot();

	if (slot == NULL)
		return false;
	copy_stats(slot, stats);
	for (int i = 0; claims != NULL && i < IDEM_CLAIM_COUNTERS; i++)
		claims[i] = pg_atomic_read_u64(&slot->claims[i]);
	return true;
}

void
idem_stats_reset(void)
{
	DatabaseSlot *slot = require_own_slot();
	TimestampTz now = GetCurrentTimestamp();

	if (slot == NULL)
		return;
	SpinLockAcquire(&slot->mutex);
	memset(&slot->cleanup.counters, 0, sizeof(slot->cleanup.counters));
	slot->cleanup.errors = 0;
	slot->cleanup.last_error_at = IDEM_STATS_NEVER;
	slot->cleanup.reset_at = now;
	SpinLockRelease(&slot->mutex);
	for (int i = 0; i < IDEM_CLAIM_COUNTERS; i++)
		pg_atomic_write_u64(&slot->claims[i], 0);
	idem_scope_table_reset(&slot->scopes);
}

bool
idem_stats_read_scope(int number, uint64 *answers, const char **name,
					  int *length)
{
	DatabaseSlot *slot = require_own_slot();

	return slot != NULL &&
		idem_scope_read(&slot->scopes, number, answers, name, length);
}

bool
idem_stats_read_database(Oid database, IdemCleanupStats *stats)
{
	DatabaseSlot *slot;

	*stats = (IdemCleanupStats) {.oldest = DT_NOEND, .marks = IDEM_NO_MARKS};
	LWLockAcquire(&shared->lock, LW_SHARED);
	slot = find_slot(database);
	if (slot != NULL)
		copy_stats(slot, stats);
	LWLockRelease(&shared->lock);
	return slot != NULL;
}

List *
idem_stats_get_databases(void)
{
	List	   *databases = NIL;

	LWLockAcquire(&shared->lock, LW_SHARED);
	for (int i = 0; i < DATABASES_MAX; i++)
		if (OidIsValid(shared->slots[i].database))
			databases = lappend_oid(databases, shared->slots[i].database);
	LWLockRelease(&shared->lock);
	return databases;
}

void
idem_stats_forget_database(Oid database)
{
	DatabaseSlot *slot;

	LWLockAcquire(&shared->lock, LW_EXCLUSIVE);
	slot = find_slot(database);
	if (slot != NULL)
	{
		slot->database = InvalidOid;
		shared->full_reported = false;
	}
	LWLockRelease(&shared->lock);
}
