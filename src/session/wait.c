/*
 * wait.c
 *	  Waiting under one deadline for what the caller names.
 *
 * The holder of a transactional claim is a transaction, so its waiters wait for the
 * transaction id, as the executor does for a unique index.  That is a heavyweight lock:
 * the server detects deadlocks, pg_locks shows it, and a prepared transaction keeps it.
 * Commit and rollback release it, and so does the rollback of the subtransaction that wrote
 * the row.
 *
 * The deadline of such a wait is a lock_timeout, set inside an internal subtransaction,
 * because its error can be caught safely only there.  The subtransaction is always rolled
 * back, and the setting with it.  That is expensive, but only a call that waits pays for it.
 *
 * The timeout can fire just after the lock was granted, or after the wait failed for another
 * reason.  The timeout has then requested a cancel that nobody has processed yet: it would raise
 * 55P03 later, in a session whose lock_timeout is 0.  take_lock_with_timeout() clears the request.
 * The lock counts as granted.  The caller looks at the key again; if it must wait again, it
 * finds that the deadline has passed.
 *
 * A lease outlives its transaction.  Its waiters sleep on a condition variable in shared
 * memory, chosen by the hash of the key; a transaction that settles the key wakes the
 * sleepers of that variable after its commit.  A wake-up only tells the waiter to look at
 * the row again.  The waiter also does so when the lease ends, and at least once a second.
 * So a wake-up that is lost (by a crash, a prepared transaction, or a commit on another
 * server) costs a second and nothing else.  Without shared memory (shared/memory.c) there is no such
 * variable: the waiter looks again after pauses that double.
 */
#include "postgres.h"

#include <limits.h>

#include "access/subtrans.h"
#include "access/transam.h"
#include "access/xact.h"
#include "miscadmin.h"
#include "nodes/bitmapset.h"
#include "pgstat.h"
#include "storage/condition_variable.h"
#include "storage/latch.h"
#include "storage/lmgr.h"
#include "storage/lock.h"
#include "storage/proc.h"
#include "storage/procarray.h"
#include "utils/guc.h"
#include "utils/memutils.h"
#include "utils/resowner.h"
#include "utils/timeout.h"
#include "utils/timestamp.h"

#include "compat.h"
#include "guc.h"
#include "sqlstate.h"
#include "session/wait.h"
#include "session/waiting_processes.h"
#include "shared/memory.h"
#include "store/duration.h"

/* Number of condition variables.  Keys that share one wake each other's waiters for nothing. */
#define LEASE_CHANNELS 128

/* Longest time between two looks at a lease */
#define LEASE_LOOK_MS 1000

/* The same without shared memory: the first time, and the longest */
#define LEASE_PAUSE_MIN_MS 1
#define LEASE_PAUSE_MAX_MS 100

static ConditionVariable *lease_channels = NULL;	/* after idem_shared_use() */
static uint32 lease_wait_event = 0;

/* Channels to broadcast when this transaction commits */
static Bitmapset *wake_channels = NULL;

void
idem_deadline_begin(IdemDeadline *deadline)
{
	int64		now_us;

	if (deadline->at_us != 0)
		return;
	now_us = idem_monotonic_us();
	deadline->at_us = deadline->wait_us < IDEM_FOREVER - now_us ?
		now_us + deadline->wait_us : IDEM_FOREVER;
}

IdemDeadline
idem_deadline_from_setting(void)
{
	return (IdemDeadline) {
		.wait_us = idem_wait < 0 ? IDEM_FOREVER : (int64) idem_wait * 1000
	};
}

IdemDeadline
idem_deadline_from_arg(FunctionCallInfo fcinfo, int arg)
{
	IdemDeadline deadline = idem_deadline_from_setting();
	Interval   *wait;

	if (PG_ARGISNULL(arg))
		return deadline;

	wait = PG_GETARG_INTERVAL_P(arg);
	/* From 17 on an infinite interval has INT_MAX months. */
	if (wait->month != 0)
		ereport(ERROR,
				(errcode(ERRCODE_IDEM_INVALID),
				 errmsg("wait must not have months"),
				 errhint("Fix the client: give it in days, hours or shorter units. To wait until cancelled, set idem.wait to -1 and leave wait out.")));
	deadline.wait_us = idem_interval_us(wait);
	if (deadline.wait_us < 0)
		ereport(ERROR,
				(errcode(ERRCODE_IDEM_INVALID),
				 errmsg("wait must not be negative"),
				 errhint("Fix the client: '0' does not wait at all.")));
	return deadline;
}

/* Milliseconds that are left, at least 0; INT_MAX: no deadline */
static int
remaining_ms(const IdemDeadline *deadline)
{
	int64		left_us;

	Assert(deadline->at_us != 0);
	if (deadline->at_us == IDEM_FOREVER)
		return INT_MAX;
	left_us = Max(deadline->at_us - idem_monotonic_us(), 0);
	return (int) Min(INT_MAX - 1, (left_us + 999) / 1000);
}

/* What to wait for: the end of a transaction, or of its speculative insertion; or another
 * lock */
typedef struct Awaited
{
	TransactionId xid;			/* InvalidTransactionId: another lock */
	uint32		speculative;	/* token of the insertion; 0: the transaction */
	const IdemKey *key;			/* that the transaction holds */
	IdemTakeLock take;			/* takes the other lock */
	SubTransactionId subtransaction;	/* argument of take: the one that waits */
	const char *holder;			/* of the other lock, for the error's context */
} Awaited;

/* Waits for a transaction by the lock of its id, which the transaction holds until it ends.
 * False: dont_wait is set, and another process holds the lock. */
static bool
take_lock(const Awaited *awaited, bool dont_wait)
{
	LOCKTAG		tag;

	if (awaited->take != NULL)
	{
		Assert(!dont_wait && !TransactionIdIsValid(awaited->xid));
		awaited->take(awaited->subtransaction);
		return true;
	}
	/* We must not wait for ourselves. */
	Assert(TransactionIdIsValid(awaited->xid) &&
		   !TransactionIdIsCurrentTransactionId(awaited->xid));
	if (awaited->speculative != 0)
		SET_LOCKTAG_SPECULATIVE_INSERTION(tag, awaited->xid,
										  awaited->speculative);
	else
		SET_LOCKTAG_TRANSACTION(tag, awaited->xid);
	if (LockAcquire(&tag, ShareLock, false, dont_wait) == LOCKACQUIRE_NOT_AVAIL)
		return false;
	LockRelease(&tag, ShareLock, false);
	return true;
}

/*
 * False: the lock was not granted within timeout_ms.  After an error, roll the subtransaction
 * back before anything else that can fail: a second error would leave the session inside the
 * subtransaction.
 */
static bool
take_lock_with_timeout(const Awaited *awaited, int timeout_ms)
{
	MemoryContext context = CurrentMemoryContext;
	ResourceOwner owner = CurrentResourceOwner;
	volatile bool taken = true;
	char		value[32];

	snprintf(value, sizeof(value), "%d", timeout_ms);
	BeginInternalSubTransaction(NULL);
	MemoryContextSwitchTo(context);
	PG_TRY();
	{
		(void) set_config_option("lock_timeout", value, PGC_USERSET,
								 PGC_S_SESSION, GUC_ACTION_LOCAL, true, 0, false);
		(void) take_lock(awaited, false);
	}
	PG_CATCH();
	{
		taken = false;
	}
	PG_END_TRY();

	/*
	 * Clear the request to cancel that the lock timeout left behind.  The wait has stopped the
	 * timer and kept the indicator that says whether the timer fired; its handler sets both
	 * together.  If a user cancels at the same moment, the two requests cannot be told apart, and
	 * the user's is lost, as in core's ProcessInterrupts().  If statement_timeout has fired too,
	 * the request stays for it.  The request to end the session is another flag, and stays.
	 */
	if (get_timeout_indicator(LOCK_TIMEOUT, true) &&
		!get_timeout_indicator(STATEMENT_TIMEOUT, false))
		QueryCancelPending = false;
	RollbackAndReleaseCurrentSubTransaction();
	MemoryContextSwitchTo(context);
	CurrentResourceOwner = owner;
	if (!taken && geterrcode() != ERRCODE_LOCK_NOT_AVAILABLE)
		PG_RE_THROW();
	if (!taken)
		FlushErrorState();
	return taken;
}

static void
describe_wait(void *arg)
{
	const Awaited *awaited = arg;

	if (awaited->key != NULL)
		errcontext("waiting for the holder of %s",
				   idem_key_to_string(awaited->key));
	else
		errcontext("waiting for %s", awaited->holder);
}

/* False: the deadline passed. */
static bool
wait_for_lock_until(Awaited *awaited, const IdemDeadline *deadline)
{
	ErrorContextCallback context = {
		.previous = error_context_stack,
		.callback = describe_wait,
		.arg = awaited
	};
	int			left_ms;
	bool		taken = true;

	if (deadline->wait_us == 0)
		return take_lock(awaited, true);
	left_ms = remaining_ms(deadline);
	if (left_ms == 0)
		return false;

	error_context_stack = &context;
	if (awaited->key != NULL)
		idem_waiting_begin(awaited->key, awaited->xid);
	/* Without a deadline of ours, or with a lock_timeout that comes first and is raised */
	if (left_ms == INT_MAX || (LockTimeout > 0 && LockTimeout <= left_ms))
		(void) take_lock(awaited, false);
	else
		taken = take_lock_with_timeout(awaited, left_ms);
	idem_waiting_end();
	error_context_stack = context.previous;
	return taken;
}

bool
idem_wait_for_lock(IdemTakeLock take, const char *holder,
				   const IdemDeadline *deadline)
{
	Awaited		awaited = {
		.take = take,
		.subtransaction = GetCurrentSubTransactionId(),
		.holder = holder
	};

	/*
	 * Even a caller with wait = 0 waits for a millisecond here.  A lock request that does not
	 * wait fails as soon as another process waits for a conflicting lock.  If that process waits
	 * for us, because we have read the table, a request that waits goes first and succeeds.
	 */
	if (deadline->wait_us == 0)
		return take_lock_with_timeout(&awaited, 1);
	return wait_for_lock_until(&awaited, deadline);
}

/*
 * Like XactLockTableWait(), with a deadline that spans all of its steps: when a
 * subtransaction commits into its parent, its lock is gone, and the wait goes on for the
 * parent.
 */
bool
idem_wait_for_transaction(const IdemKey *key, TransactionId xid,
						  uint32 speculative, const IdemDeadline *deadline)
{
	for (bool first = true;; first = false)
	{
		Awaited		awaited = {
			.xid = xid,
			.speculative = speculative,
			.key = key
		};
		TransactionId parent;

		if (!wait_for_lock_until(&awaited, deadline))
			return false;
		if (speculative != 0 || !TransactionIdIsInProgress(xid))
			return true;

		/*
		 * The lock of the transaction is free, but the transaction still runs.  If it is a
		 * subtransaction that has committed into its parent, wait for the parent: not for the
		 * topmost transaction, since a savepoint in between can be rolled back.  Otherwise the
		 * transaction has begun and does not have its lock yet, or has ended and still counts
		 * as running.  Both last microseconds.
		 */
		parent = SubTransGetParent(xid);
		if (TransactionIdIsValid(parent))
			xid = parent;
		else if (!first)
		{
			CHECK_FOR_INTERRUPTS();
			pg_usleep(1000L);
		}
	}
}

/* ----- leases ----- */

static int
lease_channel(const IdemKey *key)
{
	return idem_key_hash(key) % LEASE_CHANNELS;
}

static void
pause_for_lease(int timeout_ms, IdemDeadline *deadline)
{
	deadline->pause_ms = Min(Max(deadline->pause_ms * 2, LEASE_PAUSE_MIN_MS),
							 LEASE_PAUSE_MAX_MS);
	(void) WaitLatch(MyLatch, WL_LATCH_SET | WL_TIMEOUT | WL_EXIT_ON_PM_DEATH,
					 Min(timeout_ms, deadline->pause_ms), lease_wait_event);
	ResetLatch(MyLatch);
	CHECK_FOR_INTERRUPTS();
}

bool
idem_wait_for_lease(const IdemKey *key, TimestampTz lease_until,
					IdemDeadline *deadline)
{
	int			timeout_ms = remaining_ms(deadline);
	long		left_ms = TimestampDifferenceMilliseconds(GetCurrentTimestamp(),
														  lease_until);

	if (timeout_ms == 0)
		return false;
	timeout_ms = Min(timeout_ms, Min(LEASE_LOOK_MS, Max(left_ms, 1)));
	idem_waiting_begin(key, InvalidTransactionId);
	if (lease_wait_event == 0)
		lease_wait_event = WaitEventExtensionNew("IdemLease");

	/*
	 * The first call only puts this process into the queue, and returns at once.  The caller
	 * then looks at the row again, and sees a lease that was settled before this process was in
	 * the queue: that settling wakes nobody.
	 */
	if (idem_shared_use())
		(void) ConditionVariableTimedSleep(&lease_channels[lease_channel(key)],
										   timeout_ms, lease_wait_event);
	else
		pause_for_lease(timeout_ms, deadline);
	return true;
}

void
idem_wait_end(void)
{
	ConditionVariableCancelSleep();
	idem_waiting_end();
}

void
idem_wake_at_commit(const IdemKey *key)
{
	MemoryContext caller;

	if (!idem_shared_use())
		return;
	caller = MemoryContextSwitchTo(TopTransactionContext);
	wake_channels = bms_add_member(wake_channels, lease_channel(key));
	MemoryContextSwitchTo(caller);
}

static void
end_transaction(XactEvent event, void *arg)
{
	int			channel = -1;

	/* If the savepoint that settled was rolled back, this wakes them for nothing. */
	while (event == XACT_EVENT_COMMIT &&
		   (channel = bms_next_member(wake_channels, channel)) >= 0)
		ConditionVariableBroadcast(&lease_channels[channel]);
	if (event == XACT_EVENT_COMMIT || event == XACT_EVENT_ABORT ||
		event == XACT_EVENT_PREPARE)
		wake_channels = NULL;
}

/* ----- shared memory ----- */

static Size
channels_size(void)
{
	return LEASE_CHANNELS * sizeof(ConditionVariable);
}

static void
init_channels(void *memory, int tranche)
{
	ConditionVariable *channels = memory;

	for (int i = 0; i < LEASE_CHANNELS; i++)
		ConditionVariableInit(&channels[i]);
}

void
idem_wait_init(void)
{
	RegisterXactCallback(end_transaction, NULL);
	idem_shared_add(channels_size, init_channels, (void **) &lease_channels);
}
