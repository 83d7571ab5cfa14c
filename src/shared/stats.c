/*
 * stats.c
 *	  The statistics of each database: counters, and the earliest expiry that may be left.
 *	  shared/databases.h says who may write what, under which lock.
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
 * Backlog, whether a batch ended by its bounds, goes with it.  Only a batch that has seen all, and
 * was not overtaken by another one, ends it.
 *
 * If the value is too early, a worker looks at the table in vain.  If it were too late,
 * expired claims would stay until the next rescan.
 */
#include "postgres.h"

#include <math.h>

#include "access/xact.h"
#include "miscadmin.h"
#include "port/atomics.h"
#include "utils/memutils.h"
#include "utils/timestamp.h"

#include "shared/databases.h"
#include "shared/memory.h"
#include "shared/scope_stats.h"
#include "shared/stats.h"

const double idem_duration_bounds[IDEM_DURATION_BUCKETS] = {
	0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5,
	1, 2.5, 5, 10, INFINITY
};

/* What a transaction or subtransaction has done, to be counted at its commit */
typedef struct PendingStats
{
	struct PendingStats *upper;
	int			nest_level;
	TimestampTz claimed;		/* earliest expiry; DT_NOEND: no claim */
	uint64		claims[IDEM_CLAIM_COUNTERS];
	uint32		claimed_by_scope[IDEM_SCOPE_NUMBERS];
	IdemCleanupCounters cleanup;
	IdemCleanupReport last_batch;
} PendingStats;

/* Entries live in TopTransactionContext. */
static PendingStats *pending = NULL;

/* ----- the earliest expiry ----- */

static void
lower_claimed(IdemDatabase *slot, TimestampTz expires_at)
{
	uint64		current;

	/*
	 * Read slot->claimed, the earliest expiry that was published, only after the commit.  If it
	 * is low enough, nothing is written below.  Then no batch has reset it yet.  The batch that
	 * resets it later takes its snapshot after that (idem_stats_begin_batch()), and sees our rows.
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
	IdemDatabase *slot = idem_own_database(false);
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
	if (report->more || !is_overtaken)
		cleanup->backlog = report->more;
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
	(void) idem_own_database(true);
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
idem_stats_count_claim(const text *scope, TimestampTz expires_at)
{
	PendingStats *entry;
	IdemDatabase *slot;

	if (!idem_shared_use())
		return;
	entry = current_pending();
	entry->claims[IDEM_CLAIMED]++;
	slot = idem_own_database(true);
	if (slot != NULL)
		entry->claimed_by_scope[idem_scope_number(&slot->scopes, scope)]++;
	if (expires_at < entry->claimed)
		entry->claimed = expires_at;
}

void
idem_stats_count(int counter, uint64 n)
{
	IdemDatabase *slot = idem_own_database(true);

	Assert(counter >= 0 && counter < IDEM_CLAIM_COUNTERS);
	if (slot != NULL)
		pg_atomic_fetch_add_u64(&slot->claims[counter], n);
}

void
idem_stats_count_outcome(const text *scope, IdemOutcome outcome)
{
	IdemDatabase *slot = idem_own_database(true);
	int			number;

	Assert(outcome != IDEM_CLAIMED);
	if (slot == NULL)
		return;
	idem_stats_count(outcome, 1);
	number = idem_scope_number(&slot->scopes, scope);
	pg_atomic_fetch_add_u64(&slot->scopes.scopes[number].answers[outcome], 1);
}

void
idem_stats_count_at_commit(int counter)
{
	if (idem_shared_use())
		current_pending()->claims[counter]++;
}

void
idem_stats_count_cleanup(const IdemCleanupReport *report)
{
	PendingStats *entry;

	if (!idem_shared_use())
		return;
	entry = current_pending();
	add_report(&entry->cleanup, report);
	entry->last_batch = *report;
}

static void
pop_pending(void)
{
	PendingStats *entry = pending;

	pending = entry->upper;
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
	for (int i = 0; i < IDEM_CLAIM_COUNTERS; i++)
		upper->claims[i] += entry->claims[i];
	for (int i = 0; i < IDEM_SCOPE_NUMBERS; i++)
		upper->claimed_by_scope[i] += entry->claimed_by_scope[i];
	if (entry->cleanup.batches > 0)
	{
		add_counters(&upper->cleanup, &entry->cleanup);
		upper->last_batch = entry->last_batch;
	}
	pop_pending();
}

static void
publish_pending(const PendingStats *entry, bool prepared)
{
	IdemDatabase *slot = idem_own_database(true);

	Assert(entry->upper == NULL);
	if (slot == NULL)
		return;
	for (int i = 0; i < IDEM_CLAIM_COUNTERS; i++)
		if (entry->claims[i] > 0)
			idem_stats_count(i, entry->claims[i]);
	for (int i = 0; i < IDEM_SCOPE_NUMBERS; i++)
		if (entry->claimed_by_scope[i] > 0)
			pg_atomic_fetch_add_u64(&slot->scopes.scopes[i].answers[IDEM_CLAIMED],
									entry->claimed_by_scope[i]);
	if (entry->claimed != DT_NOEND)
		lower_claimed(slot, entry->claimed);
	if (entry->cleanup.batches == 0)
		return;

	SpinLockAcquire(&slot->mutex);
	add_counters(&slot->cleanup.counters, &entry->cleanup);
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
	RegisterXactCallback(at_xact_end, NULL);
	RegisterSubXactCallback(at_subxact_end, NULL);
	idem_databases_init();
}

/* ----- the worker ----- */

void
idem_stats_publish_cleanup(const IdemCleanupReport *report,
						   const IdemCleanupMarks *marks)
{
	IdemDatabase *slot = idem_own_database(false);
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
	IdemDatabase *slot = idem_own_database(false);

	if (slot == NULL)
		return;
	SpinLockAcquire(&slot->mutex);
	slot->cleanup.oldest = DT_NOEND;
	slot->cleanup.publications++;
	slot->cleanup.backlog = false;
	SpinLockRelease(&slot->mutex);
}

/* ----- reading ----- */

void
idem_stats_read(IdemDatabase *slot, IdemCleanupStats *stats)
{
	TimestampTz claimed;

	SpinLockAcquire(&slot->mutex);
	claimed = (TimestampTz) pg_atomic_read_u64(&slot->claimed);
	*stats = slot->cleanup;
	SpinLockRelease(&slot->mutex);
	stats->oldest = Min(stats->oldest, claimed);
}

bool
idem_stats_read_database(Oid database, IdemCleanupStats *stats)
{
	IdemDatabase *slot;

	*stats = (IdemCleanupStats) {.oldest = DT_NOEND, .marks = IDEM_NO_MARKS};
	LWLockAcquire(&idem_shared_databases->lock, LW_SHARED);
	slot = idem_find_database(database);
	if (slot != NULL)
		idem_stats_read(slot, stats);
	LWLockRelease(&idem_shared_databases->lock);
	return slot != NULL;
}

