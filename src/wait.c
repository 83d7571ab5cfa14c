/*
 * wait.c
 *	  Waiting for another holder of a key, under one deadline.
 *
 * The holder of a transactional claim is a transaction, so we wait for its
 * transaction id, as the executor does for a unique index: a heavyweight lock,
 * with deadlock detection, visible in pg_locks, kept by a prepared transaction,
 * and released by commit, by rollback and by the rollback of the subtransaction
 * that wrote the row.
 *
 * The deadline is lock_timeout, set for the one wait inside an internal
 * subtransaction, which is the only safe place to catch the error that it
 * raises.  The subtransaction is always rolled back: nothing in it is to stay,
 * neither the setting nor a row lock.  That is dear, but only a call that waits
 * pays for it.
 */
#include "postgres.h"

#include <limits.h>

#include "access/subtrans.h"
#include "access/transam.h"
#include "access/xact.h"
#include "miscadmin.h"
#include "portability/instr_time.h"
#include "storage/lmgr.h"
#include "storage/lock.h"
#include "storage/proc.h"
#include "storage/procarray.h"
#include "utils/guc.h"
#include "utils/memutils.h"
#include "utils/resowner.h"
#include "utils/timestamp.h"

#include "compat.h"
#include "guc.h"
#include "policy.h"
#include "sqlstate.h"
#include "wait.h"

/* Something that blocks, and raises 55P03 after lock_timeout */
typedef void (*BlockingCall) (void *arg);

typedef struct RowLockWait
{
	IdemStore  *store;
	ItemPointer tid;
} RowLockWait;

static int64
monotonic_us(void)
{
	instr_time	now;

	INSTR_TIME_SET_CURRENT(now);
	return (int64) INSTR_TIME_GET_MICROSEC(now);
}

IdemDeadline
idem_deadline_after(int wait_ms)
{
	IdemDeadline deadline = {
		.wait_us = wait_ms < 0 ? IDEM_FOREVER : (int64) wait_ms * 1000
	};

	return deadline;
}

IdemDeadline
idem_deadline_from_arg(FunctionCallInfo fcinfo, int arg)
{
	IdemDeadline deadline = {0};
	Interval   *wait;

	if (PG_ARGISNULL(arg))
		return idem_deadline_after(idem_wait);

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

/* Milliseconds that are left, at least 0; INT_MAX: as long as it takes. */
static int
remaining_ms(IdemDeadline *deadline)
{
	int64		now_us = monotonic_us();
	int64		left_us;

	if (deadline->wait_us >= IDEM_FOREVER - now_us)
		return INT_MAX;
	if (deadline->at_us == 0)
		deadline->at_us = now_us + deadline->wait_us;
	left_us = Max(deadline->at_us - now_us, 0);
	return (int) Min(INT_MAX - 1, (left_us + 999) / 1000);
}

/*
 * Runs the call in a subtransaction with lock_timeout = timeout_ms (0: none), and
 * rolls the subtransaction back.  If the timeout is the deadline's, false says
 * that it ended the call; a caller's own is raised.
 */
static bool
call_in_subtransaction(BlockingCall call, void *arg, int timeout_ms,
					   bool is_deadline)
{
	MemoryContext context = CurrentMemoryContext;
	ResourceOwner owner = CurrentResourceOwner;
	ErrorData  *volatile error = NULL;
	char		value[32];

	snprintf(value, sizeof(value), "%d", timeout_ms);
	BeginInternalSubTransaction(NULL);
	MemoryContextSwitchTo(context);
	PG_TRY();
	{
		(void) set_config_option("lock_timeout", value, PGC_USERSET,
								 PGC_S_SESSION, GUC_ACTION_LOCAL, true, 0, false);
		call(arg);
	}
	PG_CATCH();
	{
		MemoryContextSwitchTo(context);
		error = CopyErrorData();
		FlushErrorState();
	}
	PG_END_TRY();
	RollbackAndReleaseCurrentSubTransaction();
	MemoryContextSwitchTo(context);
	CurrentResourceOwner = owner;

	if (error == NULL)
		return true;
	if (!is_deadline || error->sqlerrcode != ERRCODE_LOCK_NOT_AVAILABLE)
		ReThrowError(error);
	FreeErrorData(error);
	return false;
}

static void
describe_wait(void *arg)
{
	errcontext("waiting for the holder of %s", idem_key_to_string(arg));
}

/*
 * Runs the call until the deadline.  False: it passed.  A call that changes the
 * database (takes a row lock) is undone.
 */
static bool
call_until(BlockingCall call, void *arg, bool undo, const IdemKey *key,
		   IdemDeadline *deadline)
{
	ErrorContextCallback context = {
		.previous = error_context_stack,
		.callback = describe_wait,
		.arg = unconstify(IdemKey *, key)
	};
	int			left_ms = remaining_ms(deadline);
	bool		callers_first = left_ms == INT_MAX ||
		(LockTimeout > 0 && LockTimeout <= left_ms);
	bool		ended = true;

	if (left_ms == 0)
		return false;

	error_context_stack = &context;
	if (!callers_first)
		ended = call_in_subtransaction(call, arg, left_ms, true);
	else if (undo)
		ended = call_in_subtransaction(call, arg, LockTimeout, false);
	else
		call(arg);
	error_context_stack = context.previous;
	return ended;
}

/* xid's lock is held for as long as it runs, and not after. */
static void
lock_transaction(void *arg)
{
	TransactionId xid = *(TransactionId *) arg;
	LOCKTAG		tag;

	SET_LOCKTAG_TRANSACTION(tag, xid);
	(void) LockAcquire(&tag, ShareLock, false, false);
	LockRelease(&tag, ShareLock, false);
}

/*
 * XactLockTableWait() with a deadline that spans all of its steps: when a
 * subtransaction commits into its parent, its lock is gone and the wait goes on
 * for the parent.
 */
bool
idem_wait_for_transaction(const IdemKey *key, TransactionId xid,
						  IdemDeadline *deadline)
{
	if (deadline->wait_us == 0)
		return idem_conditional_xact_lock_wait(xid);

	for (bool first = true;; first = false)
	{
		if (!call_until(lock_transaction, &xid, false, key, deadline))
			return false;
		if (!TransactionIdIsInProgress(xid))
			return true;

		/*
		 * Its lock is free and it still runs: either it is on its way to the
		 * lock table or out of the running ones, which is a matter of
		 * microseconds, or it became part of its parent.
		 */
		if (!first)
		{
			CHECK_FOR_INTERRUPTS();
			pg_usleep(1000L);
		}
		xid = SubTransGetTopmostTransaction(xid);
	}
}

static void
lock_row(void *arg)
{
	RowLockWait *wait = arg;

	idem_store_wait_for_row_lock(wait->store, wait->tid);
}

/*
 * For a lock without a change, which a dirty snapshot does not show (SELECT FOR
 * UPDATE, say).  Taking the lock is how to wait for it; the subtransaction gives
 * it back.
 */
bool
idem_wait_for_row_lock(const IdemKey *key, IdemStore *store, ItemPointer tid,
					   IdemDeadline *deadline)
{
	RowLockWait wait = {.store = store, .tid = tid};

	return deadline->wait_us != 0 &&
		call_until(lock_row, &wait, true, key, deadline);
}

IdemOutcome
idem_outcome_of_passed(const IdemDeadline *deadline)
{
	return deadline->wait_us == 0 ? IDEM_IN_PROGRESS : IDEM_TIMED_OUT;
}
