/*
 * start_worker.c
 *	  idem_start_worker(): workers for this database where the library is not preloaded.
 *
 * The function marks the database in shared memory (stats.c), and starts the server's launcher
 * if there is none (launcher.c).  The launcher then starts short-lived workers for the database
 * as it does with preload, so nothing is in the way of DROP DATABASE.  The mark is taken back
 * when a worker finds that the extension is gone, and is lost when the server stops, or a crash
 * makes shared memory anew.  Then the launcher, which the postmaster starts again after a crash,
 * finds nothing to do and ends.
 *
 * Both processes are the ones that a preloaded library starts, with the same rights (worker.c).
 * The caller passes them nothing but the OID of its database.
 *
 * Before PostgreSQL 17 there is no shared memory without preload.  Workers need it: one marks
 * that it is the database's only one, and leaves to the next how far it has come; and the
 * launcher learns from it when something expires.  So the function refuses to start any.
 */
#include "postgres.h"

#include <signal.h>

#include "access/xlog.h"
#include "commands/dbcommands.h"
#include "fmgr.h"
#include "miscadmin.h"
#include "pgstat.h"
#include "storage/latch.h"
#include "storage/lock.h"
#include "tcop/utility.h"

#include "compat.h"
#include "clean/launcher.h"
#include "clean/state.h"
#include "shared/memory.h"
#include "shared/stats.h"

PG_FUNCTION_INFO_V1(idem_start_worker);

/* How often a session looks whether the launcher has come */
#define LAUNCHER_LOOK_MS 10

/* The kind of an advisory lock; those that SQL takes have 1 and 2, and the lock of a key has 3. */
#define START_LOCK_CLASS 4

/* Until there is a launcher, or ours has ended.  False: there is none. */
static bool
wait_for_launcher(BackgroundWorkerHandle *handle)
{
	uint32		wait_event = WaitEventExtensionNew("IdemLauncherStart");
	pid_t		pid;

	while (idem_state_launcher_pid() == 0 &&
		   GetBackgroundWorkerPid(handle, &pid) != BGWH_STOPPED)
	{
		(void) WaitLatch(MyLatch, WL_LATCH_SET | WL_TIMEOUT | WL_EXIT_ON_PM_DEATH,
						 LAUNCHER_LOOK_MS, wait_event);
		ResetLatch(MyLatch);
		CHECK_FOR_INTERRUPTS();
	}
	return idem_state_launcher_pid() != 0;
}

static void
start_launcher(void)
{
	BackgroundWorkerHandle *handle;

	if (!idem_launcher_start(&handle))
	{
		/* The postmaster may have started a launcher again that was terminated. */
		if (idem_state_launcher_pid() != 0)
			return;
		ereport(ERROR,
				(errcode(ERRCODE_CONFIGURATION_LIMIT_EXCEEDED),
				 errmsg("no background worker slot is free"),
				 errhint("You might need to increase max_worker_processes.")));
	}
	if (!wait_for_launcher(handle))
	{
		TerminateBackgroundWorker(handle);
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("the launcher of idem's workers ended at once"),
				 errhint("The log of the server says why.")));
	}
}

/* False: workers clean it already.  One call at a time: see start_in_turn(). */
static bool
start_database(void)
{
	IdemStart	start;

	if (!idem_state_start_database(&start))
		ereport(ERROR,
				(errcode(ERRCODE_CONFIGURATION_LIMIT_EXCEEDED),
				 errmsg("there is no room for the statistics of another database"),
				 errhint("Call idem_cleanup_all() from a timer.")));
	if (start.launcher_pid != 0)
	{
		(void) kill(start.launcher_pid, SIGUSR1);	/* sets its latch */
		return !start.is_repeated;
	}
	PG_TRY();
	{
		start_launcher();
	}
	PG_CATCH();
	{
		/*
		 * Otherwise the views would say that workers clean it.  But if another call has started
		 * it before, it stays started: that caller was told so.
		 */
		if (!start.is_repeated)
			idem_state_stop_database(start.starts);
		PG_RE_THROW();
	}
	PG_END_TRY();
	return true;
}

/*
 * One call at a time, in all databases.  The other callers wait until this one has its launcher,
 * and then find it.  Otherwise each of them would start a launcher too, and fail for want of a
 * worker slot, which they have taken from each other.  An error releases the lock.
 */
static bool
start_in_turn(void)
{
	LOCKTAG		tag;
	bool		is_new;

	SET_LOCKTAG_ADVISORY(tag, InvalidOid, 0, 0, START_LOCK_CLASS);
	(void) LockAcquire(&tag, ExclusiveLock, false, false);
	is_new = start_database();
	LockRelease(&tag, ExclusiveLock, false);
	return is_new;
}

/* idem_start_worker() -> false: workers clean this database already */
Datum
idem_start_worker(PG_FUNCTION_ARGS)
{
	PreventCommandDuringRecovery("idem_start_worker()");
	if (idem_shared_state == IDEM_SHARED_NONE)
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("idem must be loaded via \"shared_preload_libraries\" to start workers"),
				 errhint("Add idem to shared_preload_libraries and restart the server: workers then start by themselves. Until then, call idem_cleanup_all() from a timer. PostgreSQL 17 and later need no restart.")));
	idem_shared_require("start workers");
	if (!idem_launcher_wants(get_database_name(MyDatabaseId)))
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("idem.cleanup_databases does not name this database"),
				 errhint("Add the database to idem.cleanup_databases and reload the configuration; or call idem_cleanup_all() from a timer.")));

	if (idem_shared_state == IDEM_SHARED_PRELOADED || !start_in_turn())
	{
		ereport(NOTICE,
				(errmsg("workers clean this database already")));
		PG_RETURN_BOOL(false);
	}
	ereport(NOTICE,
			(errmsg("workers clean this database until the server stops, or a crash restarts it"),
			 errhint("Call idem_start_worker() again then; or add idem to shared_preload_libraries: from the next restart on, workers start by themselves.")));
	PG_RETURN_BOOL(true);
}
