/*
 * worker.c
 *	  The worker that removes a database's expired claims.
 *
 * It runs batch after batch without a pause, each in its own transaction, until nothing is left to
 * do, and ends.  README.md draws who orders what.
 *
 * Leaving in time: DROP, ALTER and a copy of the database lock it.  Before each batch, and several
 * times a second within one, the worker tries a lock that conflicts with theirs, without waiting,
 * and ends if it is refused.
 *
 * A batch waits for each table once at most, for WORKER_LOCK_TIMEOUT.  After a batch of more than
 * LONG_BATCH the run ends; only a slice behind the mark is still followed by one batch at the mark.
 * Otherwise owners who lock their tables again and again could keep all WORKERS_MAX workers there.
 *
 * Launcher and worker run as the bootstrap superuser, in databases whose owners are not
 * trusted.  So they run no SQL, and call no function that a catalog of the database names:
 * they call C functions, and find the objects through the extension's members (catalog.c).
 * The index by expiry need not be a member: it is any on the column expires_at alone, and is
 * read only if it is a B-tree with the server's own operator class.  Deleting a row evaluates no index expression, and a table with triggers or
 * rules is refused.  Settings of the database that would change what the worker does are
 * overridden, and background workers do not load its session_preload_libraries.
 */
#include "postgres.h"

#include "access/xact.h"
#include "catalog/pg_database.h"
#include "miscadmin.h"
#include "pgstat.h"
#include "portability/instr_time.h"
#include "postmaster/bgworker.h"
#include "postmaster/interrupt.h"
#include "storage/ipc.h"
#include "storage/lmgr.h"
#include "storage/lock.h"
#include "tcop/tcopprot.h"
#include "utils/guc.h"
#include "utils/memutils.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"

#include "guc.h"
#include "clean/batch.h"
#include "clean/schedule.h"
#include "clean/state.h"
#include "clean/worker.h"
#include "shared/memory.h"
#include "shared/stats.h"
#include "store/catalog.h"

/*
 * A batch ends after so many dead entries of the index.  This is the default of
 * idem.cleanup_batch_size: to pass an entry is several times cheaper than to remove a row, so dead
 * entries lengthen a batch by a fraction.
 */
#define BATCH_DEAD_MAX 50000

/* Connecting can wait for the lock of the database, a batch for those of the tables. */
#define WORKER_LOCK_TIMEOUT "5s"

/* A run ends after a batch that took longer, ms: one of a second, which did not wait, does not. */
#define LONG_BATCH 3000

StaticAssertDecl(sizeof(IdemWorkerOrder) <= BGW_EXTRALEN,
				 "the order fits into bgw_extra");

/* A run without any batch is no regular one: the launcher counts a failure. */
static bool has_run_batch = false;

/* ----- both processes ----- */

static void
override_setting(const char *name, const char *value)
{
	/* transaction_timeout is not in every version */
	if (GetConfigOption(name, true, false) != NULL)
		SetConfigOption(name, value, PGC_SUSET, PGC_S_OVERRIDE);
}

void
idem_worker_connect(Oid database, const char *name)
{
	pqsignal(SIGHUP, SignalHandlerForConfigReload);
	pqsignal(SIGTERM, die);
	BackgroundWorkerUnblockSignals();
	idem_shared_require("clean");
	override_setting("lock_timeout", WORKER_LOCK_TIMEOUT);
	BackgroundWorkerInitializeConnectionByOid(database, InvalidOid, 0);
	pgstat_report_appname(name);

	/* A reload does not undo these. */
	override_setting("default_transaction_isolation", "read committed");
	override_setting("default_transaction_read_only", "off");
	override_setting("default_transaction_deferrable", "off");
	override_setting("statement_timeout", "0");
	override_setting("transaction_timeout", "0");
	override_setting("idle_in_transaction_session_timeout", "0");
	override_setting("search_path", "");
	/* If a crash loses the removal of an expired claim, it is removed again. */
	override_setting("synchronous_commit", "off");
}

/* ----- may a batch run? ----- */

bool
idem_worker_may_enter(Oid database)
{
	LOCKTAG		tag;

	SET_LOCKTAG_OBJECT(tag, InvalidOid, DatabaseRelationId, database, 0);
	if (LockAcquire(&tag, RowExclusiveLock, false, true) == LOCKACQUIRE_NOT_AVAIL)
		return false;
	LockRelease(&tag, RowExclusiveLock, false);
	return true;
}

/* IdemCleanupStop */
static bool
must_leave_database(void)
{
	return !idem_worker_may_enter(MyDatabaseId);
}

/*
 * Called in the transaction of the batch.  This process becomes the database's worker only
 * here, when the database is known to have the extension: no statistics are kept of a database
 * without it.
 *
 * The worker locks idem_claims, not the extension: any owner of a function could keep it out, by
 * ALTER FUNCTION ... DEPENDS ON EXTENSION, which locks the extension exclusively.
 *
 * DROP EXTENSION locks the extension, then idem_claims, then its other tables, and only then
 * changes a catalog.  So
 *	- while the worker has idem_claims locked, the extension stays;
 *	- the worker can then wait for idem_scopes without a deadlock;
 *	- DROP EXTENSION waits for one batch at most: the next batch queues behind it;
 *	- the extension can go while the worker waits for idem_claims.  So the worker looks again
 *	  afterwards, by idem_catalog_exists(), which is false then, where others raise an error.
 *
 * Raises 55000 for an extension that this library does not serve, rather than returning false:
 * after false the database's statistics are removed, but its claims are there, and expire.
 */
static bool
may_run_batch(void)
{
	uint32		starts = idem_state_get_starts();
	bool		exists;
	Oid			claims;

	Assert(IsTransactionState());
	if (must_leave_database())
	{
		elog(DEBUG1, "leaving: another session needs the database for itself");
		if (!has_run_batch)
			proc_exit(0);
		return false;
	}
	exists = idem_catalog_exists(&claims);
	if (exists)
	{
		if (!idem_state_attach_worker())
			return false;
		LockRelationOid(claims, RowExclusiveLock);
		exists = idem_catalog_exists(&claims);
	}
	if (!exists)
	{
		idem_stats_publish_absent();
		idem_state_stop_database(starts);
	}
	return exists;
}

/* ----- batches ----- */

/* A batch in its own transaction.  False: it may not run. */
static bool
execute_batch(const IdemCleanupOrder *order, IdemCleanupBatch *batch)
{
	bool		may_run;

	SetCurrentStatementStartTimestamp();
	StartTransactionCommand();
	PushActiveSnapshot(GetTransactionSnapshot());
	pgstat_report_activity(STATE_RUNNING, "removing expired claims");
	may_run = may_run_batch();
	if (may_run)
		idem_cleanup_batch(order, batch);
	PopActiveSnapshot();
	CommitTransactionCommand();
	return may_run;
}

/* Runs the next batch, and publishes it.  False: there is none, or it may not run. */
static bool
run_batch(IdemCleanupRun *run)
{
	IdemCleanupOrder order = {
		.rows_max = idem_cleanup_batch_size,
		.dead_max = BATCH_DEAD_MAX,
		.stop = must_leave_database
	};
	IdemCleanupBatch batch;
	uint64		publications;
	TimestampTz oldest_expires_at = idem_stats_begin_batch(&publications);
	instr_time	began;
	instr_time	duration;

	if (!idem_rescan_next(run, oldest_expires_at, GetCurrentTimestamp(), &order))
		return false;
	INSTR_TIME_SET_CURRENT(began);
	if (!execute_batch(&order, &batch))
		return false;
	INSTR_TIME_SET_CURRENT(duration);
	INSTR_TIME_SUBTRACT(duration, began);
	has_run_batch = true;

	idem_rescan_advance(run, &batch, INSTR_TIME_GET_MICROSEC(duration));
	batch.report.publications = publications;
	batch.report.seconds = INSTR_TIME_GET_DOUBLE(duration);
	idem_stats_publish_cleanup(&batch.report, &run->marks);
	/* Autovacuum must learn of the dead rows. */
	pgstat_report_stat(true);
	pgstat_report_activity(STATE_IDLE, NULL);

	elog(DEBUG1, "removed " INT64_FORMAT " expired claims in %.3f s, skipped " INT64_FORMAT ", passed " INT64_FORMAT " dead entries, %s the low-water mark",
		 batch.report.rows_deleted, batch.report.seconds, batch.rows_skipped,
		 batch.dead_entries,
		 run->latest == IDEM_SLICE_BEHIND ? "behind" : "at");
	return true;
}

static void
run_batches(bool rescan)
{
	TimestampTz began_at = GetCurrentTimestamp();
	TimestampTz batch_began_at = began_at;
	bool		is_over = false;
	IdemCleanupStats stats;
	IdemCleanupRun run;

	(void) idem_stats_read_database(MyDatabaseId, &stats);
	idem_rescan_begin_run(&run, &stats, rescan);
	while (run_batch(&run))
	{
		TimestampTz now = GetCurrentTimestamp();

		is_over = is_over ||
			TimestampDifferenceExceeds(began_at, now, IDEM_RUN_DURATION_MAX / 1000) ||
			TimestampDifferenceExceeds(batch_began_at, now, LONG_BATCH);
		batch_began_at = now;
		/* Ends with a batch at the mark: the next worker may begin with a slice. */
		if (is_over && run.latest == IDEM_BATCH_AT_MARK)
			break;
		CHECK_FOR_INTERRUPTS();
		if (ConfigReloadPending)
		{
			ConfigReloadPending = false;
			ProcessConfigFile(PGC_SIGHUP);
		}
	}
}

/* ----- the process ----- */

/*
 * Publishes the error that was caught, and ends the process: throws the error again, which logs
 * it, with a hint if it has none.  idem_state_publish_run() is not reached, so the launcher counts
 * a failure, and starts the next worker later.
 *
 * 55000 means that something is wrong with the extension itself, its version or an object that was
 * renamed, and stays wrong until somebody acts.  The first worker that meets it logs it.  One that
 * tries again (is_retry) and meets the same error only publishes it, and ends.
 */
static void
fail(bool is_retry)
{
	MemoryContext old_context = MemoryContextSwitchTo(TopMemoryContext);
	ErrorData  *error = CopyErrorData();
	bool		is_news = idem_state_publish_error(MyDatabaseId, error->message);

	if (is_retry && !is_news &&
		error->sqlerrcode == ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE)
		proc_exit(0);
	if (error->hint == NULL)
		error->hint = pstrdup("The worker tries again; expired claims stay until then. idem_stat_cleanup shows the latest error.");
	FlushErrorState();
	MemoryContextSwitchTo(old_context);
	ReThrowError(error);
}

static void
worker_error_context(void *arg)
{
	errcontext("removing expired claims in database \"%s\"", (char *) arg);
}

void
idem_worker_main(Datum arg)
{
	IdemWorkerOrder order;
	ErrorContextCallback context = {
		.callback = worker_error_context,
		.arg = NameStr(order.database)
	};

	idem_worker_connect(DatumGetObjectId(arg), "idem worker");
	memcpy(&order, MyBgworkerEntry->bgw_extra, sizeof(order));

	context.previous = error_context_stack;
	error_context_stack = &context;
	PG_TRY();
	{
		run_batches(order.rescan);
	}
	PG_CATCH();
	{
		fail(order.retry);
	}
	PG_END_TRY();
	error_context_stack = context.previous;

	idem_state_publish_run();
	proc_exit(0);
}
