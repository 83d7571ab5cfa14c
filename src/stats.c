/*
 * stats.c
 *	  The shared counters: one slot for each database that has the extension.
 *
 * They exist only where the library is in shared_preload_libraries; without it
 * nothing is counted, and the functions that read them say so.
 *
 * Who may write what, under which lock:
 *
 *	slot->database	shared->lock, exclusively; it is read under shared->lock,
 *					in either mode.  A process that is connected to a database
 *					may use that database's slot without the lock: a slot is
 *					freed only after its database was dropped, and that waits
 *					for all who are connected.
 *	slot->claimed	atomic.  A claiming transaction lowers it when it commits;
 *					fold_claimed() resets it, under slot->mutex.
 *	slot->claims	atomics, each a counter of its own.
 *	slot->cleanup	slot->mutex, a spinlock.  Its marks, worker_pid and runs
 *					are written by the database's worker alone.
 *
 * shared->lock is taken before a mutex, and no lock is taken under a mutex.
 *
 * What a transaction counts is kept by itself until it commits, one entry a
 * level of savepoints: what was rolled back did not happen.  A prepared
 * transaction publishes at PREPARE, since COMMIT PREPARED calls nobody back;
 * its rows may not be visible yet when they are looked for, which the worker's
 * full scans make good.
 *
 * The earliest expiry that may be left in the table is what the worker is
 * started by, and what oldest_expired_age shows.  Two values hold it, so that
 * a batch can replace what is known without losing a claim that its snapshot
 * did not see:
 *
 *	1. before its snapshot, a batch folds slot->claimed into cleanup.oldest,
 *	   and resets it.  Whoever committed before the snapshot is in oldest;
 *	   whoever commits after it lowers claimed again;
 *	2. after its commit, the batch replaces oldest by what it found, or, if it
 *	   found nothing, by where it ended to look.  Unless oldest lies before the
 *	   place where it started, or after the one where it ended, or another batch
 *	   has published since 1 and may know better: then the earlier one is kept.
 *
 * Too early a value costs a look at the table.  Too late a one would leave
 * expired claims in it, until the next full scan.
 */
#include "postgres.h"

#include <math.h>

#include "access/xact.h"
#include "catalog/pg_type_d.h"
#include "commands/dbcommands.h"
#include "common/int.h"
#include "fmgr.h"
#include "funcapi.h"
#include "mb/pg_wchar.h"
#include "miscadmin.h"
#include "port/atomics.h"
#include "storage/ipc.h"
#include "storage/lwlock.h"
#include "storage/shmem.h"
#include "storage/spin.h"
#include "utils/array.h"
#include "utils/builtins.h"
#include "utils/json.h"
#include "utils/jsonb.h"
#include "utils/memutils.h"
#include "utils/timestamp.h"

#include "cleanup.h"
#include "stats.h"

/* Databases with the extension; statistics of more are not kept. */
#define DATABASES_MAX 256

#define ERROR_TEXT_BYTES_MAX 512

/* Upper bounds of the batch durations that are counted apart, in seconds */
static const char *const bucket_labels[] = {
	"0.001", "0.0025", "0.005", "0.01", "0.025", "0.05", "0.1", "0.25", "0.5",
	"1", "2.5", "5", "10", "+Inf"
};
static const double bucket_bounds[] = {
	0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5,
	1, 2.5, 5, 10, INFINITY
};

#define BUCKETS lengthof(bucket_bounds)

StaticAssertDecl(lengthof(bucket_labels) == BUCKETS,
				 "every bucket has a label");

/* 0 is no time: nothing happened yet */
#define NEVER ((TimestampTz) 0)

/* Batches that were committed */
typedef struct CleanupCounters
{
	int64		rows_deleted;
	int64		batches;
	double		last_seconds;
	double		max_seconds;
	double		total_seconds;
	int64		buckets[BUCKETS];	/* not cumulative */
	TimestampTz last_run;
} CleanupCounters;

typedef struct CleanupStats
{
	CleanupCounters counters;
	int64		errors;
	TimestampTz last_error_at;
	char		last_error[ERROR_TEXT_BYTES_MAX];
	TimestampTz reset_at;

	/* state, not reset */
	TimestampTz oldest;			/* earliest expiry that may be left */
	uint64		publications;	/* how often it was replaced */
	bool		backlog;		/* expired rows are known to be left */
	IdemCleanupMarks marks;
	int			worker_pid;		/* 0: none */
	uint64		runs;
} CleanupStats;

/* Counters that the claim path adds to */
typedef enum ClaimCounter
{
	/* one for each outcome first, in the order of IdemOutcome */
	COUNT_WAITS = IDEM_OUTCOME_COUNT,
	COUNT_WAIT_US,
	COUNT_RECLAIMS,
	COUNT_LOST_LEASES,
	COUNT_HEALED
} ClaimCounter;

#define CLAIM_COUNTERS (COUNT_HEALED + 1)

typedef struct DatabaseSlot
{
	Oid			database;		/* InvalidOid: free */
	pg_atomic_uint64 claims[CLAIM_COUNTERS];
	pg_atomic_uint64 claimed;	/* earliest expiry of what was claimed since
								 * the latest batch began; DT_NOEND: nothing */
	slock_t		mutex;
	CleanupStats cleanup;
} DatabaseSlot;

typedef struct SharedStats
{
	LWLock	   *lock;
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
	int64		nreclaimed;
	int64		nhealed;
	CleanupCounters *cleanup;	/* NULL: no batch */
	IdemCleanupBatch last_batch;
} PendingStats;

static SharedStats *shared = NULL;

/* This process's database.  Looked up once; see the rule on slot->database. */
static DatabaseSlot *own_slot = NULL;
static bool own_slot_refused = false;

/* Entries live in TopTransactionContext. */
static PendingStats *pending = NULL;

static shmem_request_hook_type prev_shmem_request_hook = NULL;
static shmem_startup_hook_type prev_shmem_startup_hook = NULL;

PG_FUNCTION_INFO_V1(idem_stat_cleanup_counters);
PG_FUNCTION_INFO_V1(idem_stat_claims_counters);
PG_FUNCTION_INFO_V1(idem_stat_metrics);
PG_FUNCTION_INFO_V1(idem_stat_reset);

/* ----- shared memory ----- */

static void
shmem_request(void)
{
	if (prev_shmem_request_hook)
		prev_shmem_request_hook();
	RequestAddinShmemSpace(MAXALIGN(sizeof(SharedStats)));
	RequestNamedLWLockTranche("idem", 1);
}

static void
shmem_startup(void)
{
	bool		found;

	if (prev_shmem_startup_hook)
		prev_shmem_startup_hook();

	LWLockAcquire(AddinShmemInitLock, LW_EXCLUSIVE);
	shared = ShmemInitStruct("idem", sizeof(SharedStats), &found);
	if (!found)
	{
		memset(shared, 0, sizeof(SharedStats));
		shared->lock = &GetNamedLWLockTranche("idem")->lock;
		for (int i = 0; i < DATABASES_MAX; i++)
		{
			pg_atomic_init_u64(&shared->slots[i].claimed, (uint64) DT_NOEND);
			for (int j = 0; j < CLAIM_COUNTERS; j++)
				pg_atomic_init_u64(&shared->slots[i].claims[j], 0);
			SpinLockInit(&shared->slots[i].mutex);
		}
	}
	LWLockRelease(AddinShmemInitLock);
}

void
idem_stats_init(void)
{
	prev_shmem_request_hook = shmem_request_hook;
	shmem_request_hook = shmem_request;
	prev_shmem_startup_hook = shmem_startup_hook;
	shmem_startup_hook = shmem_startup;
}

/* Caller holds shared->lock.  InvalidOid finds a free slot. */
static DatabaseSlot *
find_slot(Oid database)
{
	for (int i = 0; i < DATABASES_MAX; i++)
		if (shared->slots[i].database == database)
			return &shared->slots[i];
	return NULL;
}

static void
reset_claims(DatabaseSlot *slot)
{
	for (int i = 0; i < CLAIM_COUNTERS; i++)
		pg_atomic_write_u64(&slot->claims[i], 0);
}

/* Caller holds shared->lock exclusively; nobody else uses the slot. */
static void
init_slot(DatabaseSlot *slot, Oid database)
{
	memset(&slot->cleanup, 0, sizeof(CleanupStats));
	reset_claims(slot);
	slot->cleanup.oldest = DT_NOEND;
	slot->cleanup.marks.low_water = DT_NOBEGIN;
	slot->cleanup.marks.rescan_after = DT_NOBEGIN;
	slot->cleanup.marks.full_scan_at = DT_NOBEGIN;
	slot->cleanup.marks.walk_at = DT_NOEND;
	pg_atomic_write_u64(&slot->claimed, (uint64) DT_NOEND);
	slot->database = database;
}

static DatabaseSlot *
create_slot(Oid database)
{
	DatabaseSlot *slot;
	bool		report = false;

	LWLockAcquire(shared->lock, LW_EXCLUSIVE);
	slot = find_slot(database);
	if (slot == NULL && (slot = find_slot(InvalidOid)) != NULL)
		init_slot(slot, database);
	if (slot == NULL)
	{
		report = !shared->full_reported;
		shared->full_reported = true;
	}
	LWLockRelease(shared->lock);

	if (report)
		ereport(LOG,
				(errmsg("idem keeps no statistics of database %u", database),
				 errdetail("There is room for %d databases.", DATABASES_MAX)));
	return slot;
}

/*
 * The slot of this process's database; NULL where there is none.  Raises
 * nothing: it is called after a commit.
 */
static DatabaseSlot *
get_own_slot(bool create)
{
	if (own_slot != NULL || shared == NULL || own_slot_refused ||
		!OidIsValid(MyDatabaseId))
		return own_slot;

	LWLockAcquire(shared->lock, LW_SHARED);
	own_slot = find_slot(MyDatabaseId);
	LWLockRelease(shared->lock);
	if (own_slot == NULL && create)
	{
		own_slot = create_slot(MyDatabaseId);
		own_slot_refused = (own_slot == NULL);
	}
	return own_slot;
}

/* ----- the earliest expiry ----- */

static TimestampTz
read_claimed(DatabaseSlot *slot)
{
	return (TimestampTz) pg_atomic_read_u64(&slot->claimed);
}

static void
lower_claimed(DatabaseSlot *slot, TimestampTz expires_at)
{
	uint64		current;

	/*
	 * The commit comes before the look at claimed: where a batch has not reset
	 * it yet, and nothing is written here, its snapshot will see our rows.
	 */
	pg_memory_barrier();
	current = pg_atomic_read_u64(&slot->claimed);
	while (expires_at < (TimestampTz) current &&
		   !pg_atomic_compare_exchange_u64(&slot->claimed, &current,
										   (uint64) expires_at))
		 /* current was read again */ ;
}

/* Step 1 of the protocol above.  Caller holds the mutex. */
static void
fold_claimed(DatabaseSlot *slot)
{
	TimestampTz claimed = (TimestampTz)
		pg_atomic_exchange_u64(&slot->claimed, (uint64) DT_NOEND);

	slot->cleanup.oldest = Min(slot->cleanup.oldest, claimed);
}

/* Step 2.  Caller holds the mutex. */
static void
replace_oldest(CleanupStats *cleanup, const IdemCleanupBatch *batch)
{
	if (cleanup->publications == batch->publications &&
		cleanup->oldest >= batch->start && cleanup->oldest < batch->end)
		cleanup->oldest = batch->end;
	cleanup->oldest = Min(cleanup->oldest, batch->oldest_expires_at);
	cleanup->publications++;
}

uint64
idem_stats_begin_batch(void)
{
	DatabaseSlot *slot = get_own_slot(true);
	uint64		publications;

	if (slot == NULL)
		return 0;
	SpinLockAcquire(&slot->mutex);
	fold_claimed(slot);
	publications = slot->cleanup.publications;
	SpinLockRelease(&slot->mutex);
	return publications;
}

/* ----- counting ----- */

static void
add_batch(CleanupCounters *counters, const IdemCleanupBatch *batch,
		  double seconds)
{
	int			bucket = 0;

	while (seconds > bucket_bounds[bucket])
		bucket++;
	counters->buckets[bucket]++;
	counters->batches++;
	counters->rows_deleted += batch->rows_deleted;
	counters->last_seconds = seconds;
	counters->max_seconds = Max(counters->max_seconds, seconds);
	counters->total_seconds += seconds;
	counters->last_run = GetCurrentTimestamp();
}

static void
add_counters(CleanupCounters *counters, const CleanupCounters *more)
{
	counters->rows_deleted += more->rows_deleted;
	counters->batches += more->batches;
	counters->last_seconds = more->last_seconds;
	counters->max_seconds = Max(counters->max_seconds, more->max_seconds);
	counters->total_seconds += more->total_seconds;
	for (int i = 0; i < BUCKETS; i++)
		counters->buckets[i] += more->buckets[i];
	counters->last_run = more->last_run;
}

static PendingStats *
push_pending(int nest_level)
{
	PendingStats *entry = MemoryContextAllocZero(TopTransactionContext,
												 sizeof(PendingStats));

	entry->nest_level = nest_level;
	entry->claimed = DT_NOEND;
	entry->upper = pending;
	pending = entry;
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

void
idem_stats_count_claim(TimestampTz expires_at)
{
	PendingStats *entry;

	if (shared == NULL)
		return;
	entry = current_pending();
	entry->nclaimed++;
	if (expires_at < entry->claimed)
		entry->claimed = expires_at;
}

static void
add_to_counter(int counter, uint64 n)
{
	DatabaseSlot *slot = get_own_slot(true);

	if (slot != NULL && n > 0)
		pg_atomic_fetch_add_u64(&slot->claims[counter], n);
}

void
idem_stats_count_outcome(IdemOutcome outcome)
{
	add_to_counter(outcome, 1);
}

void
idem_stats_count_wait(int64 waited_us)
{
	add_to_counter(COUNT_WAITS, 1);
	add_to_counter(COUNT_WAIT_US, waited_us);
}

void
idem_stats_count_lost_lease(void)
{
	add_to_counter(COUNT_LOST_LEASES, 1);
}

void
idem_stats_count_reclaim(void)
{
	if (shared != NULL)
		current_pending()->nreclaimed++;
}

void
idem_stats_count_healed(void)
{
	if (shared != NULL)
		current_pending()->nhealed++;
}

void
idem_stats_count_cleanup(const IdemCleanupBatch *batch, double seconds)
{
	PendingStats *entry;

	if (shared == NULL)
		return;
	entry = current_pending();
	if (entry->cleanup == NULL)
		entry->cleanup = MemoryContextAllocZero(TopTransactionContext,
												sizeof(CleanupCounters));
	add_batch(entry->cleanup, batch, seconds);
	entry->last_batch = *batch;
}

static void
drop_pending(PendingStats *entry)
{
	pending = entry->upper;
	if (entry->cleanup != NULL)
		pfree(entry->cleanup);
	pfree(entry);
}

/* A savepoint was released: what was done in it is its parent's now. */
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
	if (entry->cleanup != NULL)
	{
		upper->last_batch = entry->last_batch;
		if (upper->cleanup == NULL)
		{
			upper->cleanup = entry->cleanup;
			entry->cleanup = NULL;
		}
		else
			add_counters(upper->cleanup, entry->cleanup);
	}
	drop_pending(entry);
}

static void
publish_pending(const PendingStats *entry, bool prepared)
{
	DatabaseSlot *slot = get_own_slot(true);

	if (slot == NULL)
		return;
	add_to_counter(IDEM_CLAIMED, entry->nclaimed);
	add_to_counter(COUNT_RECLAIMS, entry->nreclaimed);
	add_to_counter(COUNT_HEALED, entry->nhealed);
	if (entry->claimed != DT_NOEND)
		lower_claimed(slot, entry->claimed);
	if (entry->cleanup == NULL)
		return;

	SpinLockAcquire(&slot->mutex);
	add_counters(&slot->cleanup.counters, entry->cleanup);
	/* What a prepared transaction removed is still there for now. */
	if (!prepared)
	{
		replace_oldest(&slot->cleanup, &entry->last_batch);
		slot->cleanup.backlog = entry->last_batch.backlog;
	}
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
			/* Savepoints have been merged into the one level that is left. */
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

	if (event == SUBXACT_EVENT_COMMIT_SUB)
		merge_into_upper(pending);
	else if (event == SUBXACT_EVENT_ABORT_SUB)
		drop_pending(pending);
}

void
idem_stats_init_backend(void)
{
	RegisterXactCallback(at_xact_end, NULL);
	RegisterSubXactCallback(at_subxact_end, NULL);
}

/* ----- the worker ----- */

bool
idem_stats_get_marks(IdemCleanupMarks *marks, TimestampTz *oldest_expires_at)
{
	DatabaseSlot *slot = get_own_slot(false);

	if (slot == NULL)
		return false;
	SpinLockAcquire(&slot->mutex);
	fold_claimed(slot);
	*marks = slot->cleanup.marks;
	*oldest_expires_at = slot->cleanup.oldest;
	SpinLockRelease(&slot->mutex);
	return true;
}

/* before_shmem_exit callback */
static void
detach_worker(int code, Datum arg)
{
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
idem_stats_publish_cleanup(const IdemCleanupBatch *batch, double seconds,
						   bool backlog, const IdemCleanupMarks *marks)
{
	DatabaseSlot *slot = get_own_slot(false);
	CleanupCounters counters = {0};

	if (slot == NULL)
		return;
	add_batch(&counters, batch, seconds);
	SpinLockAcquire(&slot->mutex);
	add_counters(&slot->cleanup.counters, &counters);
	replace_oldest(&slot->cleanup, batch);
	slot->cleanup.backlog = backlog;
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
idem_stats_publish_error(const char *message)
{
	DatabaseSlot *slot = get_own_slot(true);
	TimestampTz now = GetCurrentTimestamp();
	int			length = pg_mbcliplen(message, strlen(message),
									  ERROR_TEXT_BYTES_MAX - 1);

	bool		is_news;

	if (slot == NULL)
		return true;
	SpinLockAcquire(&slot->mutex);
	is_news = strncmp(slot->cleanup.last_error, message, length) != 0 ||
		slot->cleanup.last_error[length] != '\0';
	slot->cleanup.errors++;
	slot->cleanup.last_error_at = now;
	memcpy(slot->cleanup.last_error, message, length);
	slot->cleanup.last_error[length] = '\0';
	SpinLockRelease(&slot->mutex);
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

/* ----- the launcher ----- */

bool
idem_stats_get_status(Oid database, IdemCleanupStatus *status)
{
	DatabaseSlot *slot;

	memset(status, 0, sizeof(IdemCleanupStatus));
	status->oldest_expires_at = DT_NOEND;

	LWLockAcquire(shared->lock, LW_SHARED);
	slot = find_slot(database);
	if (slot != NULL)
	{
		SpinLockAcquire(&slot->mutex);
		status->oldest_expires_at = Min(slot->cleanup.oldest,
										read_claimed(slot));
		status->backlog = slot->cleanup.backlog;
		status->worker_pid = slot->cleanup.worker_pid;
		status->runs = slot->cleanup.runs;
		SpinLockRelease(&slot->mutex);
	}
	LWLockRelease(shared->lock);
	return slot != NULL;
}

int
idem_stats_get_databases(Oid **databases)
{
	Oid		   *result = palloc(DATABASES_MAX * sizeof(Oid));
	int			n = 0;

	LWLockAcquire(shared->lock, LW_SHARED);
	for (int i = 0; i < DATABASES_MAX; i++)
		if (OidIsValid(shared->slots[i].database))
			result[n++] = shared->slots[i].database;
	LWLockRelease(shared->lock);
	*databases = result;
	return n;
}

void
idem_stats_forget_database(Oid database)
{
	DatabaseSlot *slot;

	LWLockAcquire(shared->lock, LW_EXCLUSIVE);
	slot = find_slot(database);
	if (slot != NULL)
	{
		slot->database = InvalidOid;
		shared->full_reported = false;
	}
	LWLockRelease(shared->lock);
}

/* ----- SQL ----- */

/* A copy of this database's statistics; false: there is no room for them. */
static bool
read_own_stats(CleanupStats *stats)
{
	DatabaseSlot *slot;

	if (shared == NULL)
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("idem must be loaded via \"shared_preload_libraries\" to keep statistics"),
				 errhint("Add idem to shared_preload_libraries and restart the server.")));

	slot = get_own_slot(true);
	if (slot == NULL)
		return false;
	SpinLockAcquire(&slot->mutex);
	*stats = slot->cleanup;
	stats->oldest = Min(stats->oldest, read_claimed(slot));
	SpinLockRelease(&slot->mutex);
	return true;
}

/* How long the oldest expired claim has been so; 0: none has expired. */
static int64
oldest_expired_age_us(const CleanupStats *stats)
{
	TimestampTz now = GetCurrentTimestamp();
	int64		age_us;

	if (stats->oldest >= now)
		return 0;
	/* A row that was inserted by hand can have expired at -infinity. */
	if (pg_sub_s64_overflow(now, stats->oldest, &age_us))
		return PG_INT64_MAX;
	return age_us;
}

static Datum
make_age(int64 us)
{
	Interval   *interval = palloc0(sizeof(Interval));

	interval->time = us;
	return DirectFunctionCall1(interval_justify_hours,
							   IntervalPGetDatum(interval));
}

static Datum
make_pid_array(int pid)
{
	Datum		element = Int32GetDatum(pid);

	return PointerGetDatum(construct_array(&element, pid == 0 ? 0 : 1, INT4OID,
										   sizeof(int32), true, TYPALIGN_INT));
}

static void
set_time_or_null(Datum *value, bool *null, TimestampTz time)
{
	*value = TimestampTzGetDatum(time);
	*null = (time == NEVER);
}

static Datum
make_row(FunctionCallInfo fcinfo, int columns, Datum *values, bool *nulls)
{
	TupleDesc	desc;

	if (get_call_result_type(fcinfo, NULL, &desc) != TYPEFUNC_COMPOSITE ||
		desc->natts != columns)
		elog(ERROR, "return type must be a row type of %d columns", columns);
	return HeapTupleGetDatum(heap_form_tuple(BlessTupleDesc(desc), values,
											 nulls));
}

/* idem_stat_cleanup_counters(): the row of the view idem_stat_cleanup */
Datum
idem_stat_cleanup_counters(PG_FUNCTION_ARGS)
{
	enum
	{
		ROWS_DELETED, BATCHES, LAST_SECONDS, TOTAL_SECONDS, MAX_SECONDS,
		OLDEST_EXPIRED_AGE, BACKLOG, ROWS_UNKNOWN, LAST_RUN, ERRORS, LAST_ERROR,
		LAST_ERROR_AT, WORKER_PIDS, STATS_RESET, COLUMNS
	};
	CleanupStats stats;
	Datum		values[COLUMNS] = {0};
	bool		nulls[COLUMNS];

	memset(nulls, true, sizeof(nulls));
	if (read_own_stats(&stats))
	{
		memset(nulls, false, sizeof(nulls));
		values[ROWS_DELETED] = Int64GetDatum(stats.counters.rows_deleted);
		values[BATCHES] = Int64GetDatum(stats.counters.batches);
		values[LAST_SECONDS] = Float8GetDatum(stats.counters.last_seconds);
		values[TOTAL_SECONDS] = Float8GetDatum(stats.counters.total_seconds);
		values[MAX_SECONDS] = Float8GetDatum(stats.counters.max_seconds);
		values[OLDEST_EXPIRED_AGE] = make_age(oldest_expired_age_us(&stats));
		nulls[OLDEST_EXPIRED_AGE] = (stats.oldest == DT_NOEND);
		values[BACKLOG] = BoolGetDatum(stats.backlog);
		values[ROWS_UNKNOWN] = Int64GetDatum(stats.marks.rows_unknown);
		set_time_or_null(&values[LAST_RUN], &nulls[LAST_RUN],
						 stats.counters.last_run);
		values[ERRORS] = Int64GetDatum(stats.errors);
		values[LAST_ERROR] = CStringGetTextDatum(stats.last_error);
		nulls[LAST_ERROR] = (stats.errors == 0);
		set_time_or_null(&values[LAST_ERROR_AT], &nulls[LAST_ERROR_AT],
						 stats.last_error_at);
		values[WORKER_PIDS] = make_pid_array(stats.worker_pid);
		set_time_or_null(&values[STATS_RESET], &nulls[STATS_RESET],
						 stats.reset_at);
	}
	return make_row(fcinfo, COLUMNS, values, nulls);
}

/* idem_stat_claims_counters(): the row of the view idem_stat_claims */
Datum
idem_stat_claims_counters(PG_FUNCTION_ARGS)
{
	enum
	{
		WAITS = IDEM_OUTCOME_COUNT, WAIT_SECONDS, RECLAIMS, LOST_LEASES, HEALED,
		STATS_RESET, COLUMNS
	};
	CleanupStats stats;
	Datum		values[COLUMNS] = {0};
	bool		nulls[COLUMNS];

	memset(nulls, true, sizeof(nulls));
	if (read_own_stats(&stats))
	{
		memset(nulls, false, sizeof(nulls));
		for (int i = 0; i < STATS_RESET; i++)
			values[i] = Int64GetDatum((int64)
									  pg_atomic_read_u64(&own_slot->claims[i]));
		values[WAIT_SECONDS] =
			Float8GetDatum(pg_atomic_read_u64(&own_slot->claims[COUNT_WAIT_US]) / 1e6);
		set_time_or_null(&values[STATS_RESET], &nulls[STATS_RESET],
						 stats.reset_at);
	}
	return make_row(fcinfo, COLUMNS, values, nulls);
}

/* A metric, as a scraper expects it: its samples have the same type and help. */
typedef struct Metric
{
	const char *type;
	const char *help;
} Metric;

/* key and value of a further label, or NULL */
static Datum
make_labels(const char *database, const char *key, const char *value)
{
	StringInfoData json;

	initStringInfo(&json);
	appendStringInfoString(&json, "{\"database\": ");
	escape_json(&json, database);
	if (key != NULL)
		appendStringInfo(&json, ", \"%s\": \"%s\"", key, value);
	appendStringInfoChar(&json, '}');
	return DirectFunctionCall1(jsonb_in, CStringGetDatum(json.data));
}

static void
put_sample(ReturnSetInfo *result, const Metric *metric, const char *name,
		   Datum labels, double value)
{
	Datum		values[] = {
		CStringGetTextDatum(name),
		labels,
		CStringGetTextDatum(metric->type),
		CStringGetTextDatum(metric->help),
		Float8GetDatum(value)
	};
	bool		nulls[lengthof(values)] = {false};

	tuplestore_putvalues(result->setResult, result->setDesc, values, nulls);
}

static void
put_durations(ReturnSetInfo *result, const char *database,
			  const CleanupCounters *counters)
{
	static const Metric durations = {
		"histogram", "Duration of a batch of the cleanup, its commit included."
	};
	Datum		labels = make_labels(database, NULL, NULL);
	int64		cumulated = 0;

	for (int i = 0; i < BUCKETS; i++)
	{
		cumulated += counters->buckets[i];
		put_sample(result, &durations,
				   "idempotency_cleanup_batch_duration_seconds_bucket",
				   make_labels(database, "le", bucket_labels[i]), cumulated);
	}
	put_sample(result, &durations,
			   "idempotency_cleanup_batch_duration_seconds_sum", labels,
			   counters->total_seconds);
	put_sample(result, &durations,
			   "idempotency_cleanup_batch_duration_seconds_count", labels,
			   counters->batches);
}

static void
put_claims(ReturnSetInfo *result, const char *database)
{
	static const Metric claims = {
		"counter", "Answers of claim calls, by outcome."
	};
	static const Metric waits = {
		"summary", "Time that claim calls waited for another holder."
	};
	static const Metric reclaims = {
		"counter", "Requests that were taken over: a lease that lapsed, or a failed one."
	};
	static const Metric lost = {
		"counter", "Calls with the token of a lease that is not held any more."
	};
	static const Metric healed = {
		"counter", "Leases that were settled by somebody who found the work done."
	};
	uint64		counts[CLAIM_COUNTERS];
	Datum		labels = make_labels(database, NULL, NULL);

	for (int i = 0; i < CLAIM_COUNTERS; i++)
		counts[i] = pg_atomic_read_u64(&own_slot->claims[i]);
	for (int i = 0; i < IDEM_OUTCOME_COUNT; i++)
		put_sample(result, &claims, "idempotency_claims_total",
				   make_labels(database, "outcome", idem_outcome_label(i)),
				   counts[i]);
	put_sample(result, &waits, "idempotency_wait_seconds_sum", labels,
			   counts[COUNT_WAIT_US] / 1e6);
	put_sample(result, &waits, "idempotency_wait_seconds_count", labels,
			   counts[COUNT_WAITS]);
	put_sample(result, &reclaims, "idempotency_reclaims_total", labels,
			   counts[COUNT_RECLAIMS]);
	put_sample(result, &lost, "idempotency_lost_leases_total", labels,
			   counts[COUNT_LOST_LEASES]);
	put_sample(result, &healed, "idempotency_healed_total", labels,
			   counts[COUNT_HEALED]);
}

/* idem_stat_metrics(): the rows of the view idem_metrics */
Datum
idem_stat_metrics(PG_FUNCTION_ARGS)
{
	static const Metric rows = {
		"counter", "Expired claims that were removed."
	};
	static const Metric errors = {
		"counter", "Errors of the cleanup worker."
	};
	static const Metric backlog = {
		"gauge", "1 if the latest batch of the cleanup left expired claims behind."
	};
	static const Metric unknown = {
		"gauge", "Expired claims whose lease lapsed unsettled, kept until somebody finds out."
	};
	static const Metric age = {
		"gauge", "How long the oldest expired claim that is still there has been expired."
	};
	ReturnSetInfo *result = (ReturnSetInfo *) fcinfo->resultinfo;
	CleanupStats stats;
	const char *database;
	Datum		labels;

	InitMaterializedSRF(fcinfo, 0);
	if (!read_own_stats(&stats))
		PG_RETURN_VOID();
	database = get_database_name(MyDatabaseId);
	labels = make_labels(database, NULL, NULL);

	put_sample(result, &rows, "idempotency_cleanup_rows_total", labels,
			   stats.counters.rows_deleted);
	put_durations(result, database, &stats.counters);
	put_sample(result, &errors, "idempotency_cleanup_errors_total", labels,
			   stats.errors);
	put_sample(result, &backlog, "idempotency_cleanup_backlog", labels,
			   stats.backlog);
	put_sample(result, &unknown, "idempotency_unknown_claims", labels,
			   stats.marks.rows_unknown);
	put_sample(result, &age, "idempotency_oldest_expired_age_seconds", labels,
			   oldest_expired_age_us(&stats) / 1e6);
	put_claims(result, database);
	PG_RETURN_VOID();
}

/* idem_stat_reset(): zeroes this database's counters; state stays. */
Datum
idem_stat_reset(PG_FUNCTION_ARGS)
{
	TimestampTz now = GetCurrentTimestamp();
	CleanupStats stats;

	if (!read_own_stats(&stats))
		PG_RETURN_VOID();
	SpinLockAcquire(&own_slot->mutex);
	memset(&own_slot->cleanup.counters, 0, sizeof(CleanupCounters));
	own_slot->cleanup.errors = 0;
	own_slot->cleanup.last_error_at = NEVER;
	own_slot->cleanup.reset_at = now;
	SpinLockRelease(&own_slot->mutex);
	reset_claims(own_slot);
	PG_RETURN_VOID();
}
