/*
 * launcher.c
 *	  Which database is due for cleaning, and starting its worker.
 *
 * README.md draws the states of a database.  The launcher has no database of its own.  It reads
 * the shared catalogs only, so it blocks neither DROP DATABASE nor CREATE DATABASE ... TEMPLATE.
 *
 * A launcher that is restarted knows nothing of the databases, and starts one worker for each.  In
 * shared memory it sees the workers of the launcher before it by their pid.  That pid also keeps a
 * second worker out of a database if the launcher is wrong.
 *
 * A server that preloads the library starts the launcher, which cares for all databases.
 * Elsewhere idem_start_worker() starts it (start_worker.c).  It then cares for the databases in
 * which that function was called, and ends when each of them was dropped, or has lost the
 * extension.  A server has one launcher, so idem takes no more worker slots than with preload.
 */
#include "postgres.h"

#include "access/heapam.h"
#include "access/htup_details.h"
#include "access/table.h"
#include "access/tableam.h"
#include "access/xact.h"
#include "catalog/pg_database.h"
#include "commands/dbcommands.h"
#include "miscadmin.h"
#include "nodes/value.h"
#include "postmaster/bgworker.h"
#include "postmaster/interrupt.h"
#include "storage/ipc.h"
#include "storage/latch.h"
#include "utils/guc.h"
#include "utils/hsearch.h"
#include "utils/memutils.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"
#include "utils/varlena.h"

#include "compat.h"
#include "guc.h"
#include "clean/launcher.h"
#include "clean/state.h"
#include "clean/worker.h"
#include "shared/databases.h"
#include "shared/memory.h"
#include "shared/stats.h"

#define MILLISECONDS(ms) ((int64) (ms) * 1000)	/* as a TimestampTz counts */
#define SECONDS(s) ((int64) (s) * USECS_PER_SEC)

/* Workers at the same time: more would compete with the transactions that claim. */
#define WORKERS_MAX 3

/* Restart of a launcher that ended, seconds */
#define LAUNCHER_RESTART_S 5

/* A worker looks at a database this often even if nobody announced an expiry: nobody does for rows
 * that were restored, replicated, prepared, or written by a superuser. */
#define LOOK_INTERVAL SECONDS(60)

/* Longest sleep of the launcher, and longest pause after a worker could not be started */
#define RETRY_INTERVAL_MAX SECONDS(10)

/* That no worker could work in a database is reported once it has lasted for so long, and again
 * after as long. */
#define REPORT_INTERVAL SECONDS(60)

/* Longest pause after failures */
#define BACKOFF_MAX SECONDS(300)

/* What the launcher knows of a database */
typedef struct LauncherDatabase
{
	Oid			oid;			/* hash key */
	NameData	name;
	bool		listed;			/* it exists, accepts connections, and idem.cleanup_databases
								 * includes it */
	bool		looked_at;		/* a worker was started since the launcher
								 * started, and since the latest reload */
	TimestampTz started_at;		/* latest worker; if it failed: when it ended */
	TimestampTz retry_at;		/* try to start a worker not before this */
	int			failures;		/* in a row */
	const char *refusal;		/* why no worker could work; NULL: the latest could, or
								 * has published its error */
	TimestampTz refused_at;		/* since then */
	uint64		runs_before;	/* regular ends before the latest worker */
	BackgroundWorkerHandle *handle; /* running worker, or NULL */
} LauncherDatabase;

static HTAB *databases = NULL;

/* Each name in idem.cleanup_databases is that of a database, or was reported. */
static bool wanted_names_checked = false;

/* The library is preloaded. */
static bool cares_for_all = false;

static int	running_workers = 0;

static void
init_background_worker(BackgroundWorker *worker, const char *function,
					   const char *type, int restart_time)
{
	memset(worker, 0, sizeof(BackgroundWorker));
	worker->bgw_flags = BGWORKER_SHMEM_ACCESS |
		BGWORKER_BACKEND_DATABASE_CONNECTION;
	/* On a standby: after its promotion. */
	worker->bgw_start_time = BgWorkerStart_RecoveryFinished;
	worker->bgw_restart_time = restart_time;
	strlcpy(worker->bgw_library_name, "idem", BGW_MAXLEN);
	strlcpy(worker->bgw_function_name, function, BGW_MAXLEN);
	strlcpy(worker->bgw_name, type, BGW_MAXLEN);
	strlcpy(worker->bgw_type, type, BGW_MAXLEN);
}

bool
idem_launcher_start(BackgroundWorkerHandle **handle)
{
	BackgroundWorker worker;

	init_background_worker(&worker, "idem_launcher_main", "idem launcher",
						   LAUNCHER_RESTART_S);
	if (process_shared_preload_libraries_in_progress)
	{
		RegisterBackgroundWorker(&worker);
		return true;
	}
	worker.bgw_notify_pid = MyProcPid;
	return RegisterDynamicBackgroundWorker(&worker, handle);
}

/* ----- its databases ----- */

/* idem.cleanup_databases, which was checked when it was set; palloc'd */
static List *
wanted_names(void)
{
	List	   *names;

	(void) SplitIdentifierString(pstrdup(idem_cleanup_databases), ',', &names);
	return names;
}

bool
idem_launcher_wants(const char *database)
{
	List	   *names = wanted_names();
	ListCell   *lc;

	foreach(lc, names)
		if (strcmp(lfirst(lc), database) == 0)
			return true;
	return names == NIL;
}

/*
 * A misspelt name would leave a database uncleaned without a word.  Reported once after a start
 * or a reload, because the database may be created later.  existing has the names of all
 * databases: a look into the index of pg_database fails in a process without a database, until
 * the server has written its relation cache file.
 */
static void
report_missing_names(const List *existing)
{
	ListCell   *lc;

	foreach(lc, wanted_names())
		if (!list_member(existing, makeString(lfirst(lc))))
			ereport(WARNING,
					(errcode(ERRCODE_UNDEFINED_DATABASE),
					 errmsg("database \"%s\", which idem.cleanup_databases names, does not exist",
							(char *) lfirst(lc)),
					 errdetail("Expired claims are removed there once it exists, and in no database that idem.cleanup_databases does not name.")));
	wanted_names_checked = true;
}

static void
list_database(Form_pg_database form)
{
	LauncherDatabase *db;
	bool		found;

	if (!form->datallowconn || database_is_invalid_form(form) ||
		!idem_launcher_wants(NameStr(form->datname)))
		return;
	if (!cares_for_all && !idem_state_is_started(form->oid))
		return;

	db = hash_search(databases, &form->oid, HASH_ENTER, &found);
	if (!found)
		*db = (LauncherDatabase) {
			.oid = form->oid,
			.started_at = DT_NOBEGIN,
			.retry_at = DT_NOBEGIN
		};
	db->name = form->datname;
	db->listed = true;
}

/*
 * Reads pg_database, and forgets the statistics of databases that were dropped.  It reads first
 * which databases have statistics, then pg_database: a database of the first list that the second
 * lacks was dropped.  In the other order, it could have been created in between.
 */
static void
refresh_databases(void)
{
	List	   *counted = idem_databases_list();
	List	   *existing = NIL;
	List	   *names = NIL;
	Relation	rel = table_open(DatabaseRelationId, AccessShareLock);
	TableScanDesc scan = table_beginscan_catalog(rel, 0, NULL);
	HeapTuple	tuple;
	ListCell   *lc;

	while ((tuple = heap_getnext(scan, ForwardScanDirection)) != NULL)
	{
		Form_pg_database form = (Form_pg_database) GETSTRUCT(tuple);

		existing = lappend_oid(existing, form->oid);
		names = lappend(names, makeString(pstrdup(NameStr(form->datname))));
		list_database(form);
	}
	table_endscan(scan);
	table_close(rel, AccessShareLock);

	if (!wanted_names_checked)
		report_missing_names(names);
	foreach(lc, counted)
		if (!list_member_oid(existing, lfirst_oid(lc)))
			idem_databases_forget(lfirst_oid(lc));
}

/* ----- its workers ----- */

static void
note_refusal(LauncherDatabase *db, const char *reason, TimestampTz now)
{
	if (db->refusal == NULL)
		db->refused_at = now;
	db->refusal = reason;
}

/* For a moment it is normal: while the database is copied, say.  If it lasts, it counts as an
 * error of the worker. */
static void
report_refusal(const LauncherDatabase *db, TimestampTz now)
{
	IdemCleanupStats stats;
	char	   *message;

	/* No statistics: nobody has used the extension in this database. */
	if (!idem_stats_read_database(db->oid, &stats) ||
		Max(db->refused_at, stats.last_error_at) > now - REPORT_INTERVAL)
		return;
	message = psprintf("no worker could clean database \"%s\" since %s: %s",
					   NameStr(db->name), timestamptz_to_str(db->refused_at),
					   db->refusal);
	(void) idem_state_publish_error(db->oid, message);
	ereport(WARNING,
			(errcode(ERRCODE_LOCK_NOT_AVAILABLE),
			 errmsg_internal("%s", message),
			 errdetail("It is tried again; expired claims stay until then."),
			 errhint("If a lock is in the way, pg_locks shows who has it, or waits for it: that of the database, of idem_claims or of idem_scopes. If no slot is free, you might need to increase max_worker_processes.")));
}

static void
note_worker_ended(LauncherDatabase *db, TimestampTz now)
{
	IdemCleanupStats stats;

	Assert(db->handle != NULL);
	Assert(running_workers > 0);
	pfree(db->handle);
	db->handle = NULL;
	running_workers--;

	/* Without statistics of the database we cannot know: assume success. */
	if (idem_stats_read_database(db->oid, &stats) &&
		stats.runs == db->runs_before)
	{
		db->failures++;
		if (stats.last_error_at < db->started_at)
			note_refusal(db, "its workers find locks in the way, or cannot connect", now);
		else
			db->refusal = NULL;
		db->started_at = now;
	}
	else
	{
		db->failures = 0;
		db->refusal = NULL;
	}
}

/* Pause between the starts of two workers in a database */
static int64
start_interval(const LauncherDatabase *db, bool backlog)
{
	int64		interval = MILLISECONDS(idem_cleanup_interval);

	if (db->failures > 0)
		return Max(interval,
				   Min(interval << Min(db->failures - 1, 16), BACKOFF_MAX));
	/* A worker that left backlog ended to make room for other databases. */
	if (backlog)
		return Min(interval, IDEM_RUN_DURATION_MAX);
	return interval;
}

static int64
retry_interval(void)
{
	return Min(MILLISECONDS(idem_cleanup_interval), RETRY_INTERVAL_MAX);
}

/* When to start a worker; DT_NOEND while one runs. */
static TimestampTz
due_at(const LauncherDatabase *db)
{
	IdemCleanupStats stats;
	TimestampTz due;
	TimestampTz not_before;

	if (db->handle != NULL || !db->listed)
		return DT_NOEND;
	if (!db->looked_at)
		return db->retry_at;

	(void) idem_stats_read_database(db->oid, &stats);
	not_before = db->started_at + start_interval(db, stats.backlog);
	due = db->started_at + Max(LOOK_INTERVAL,
							   MILLISECONDS(idem_cleanup_interval));
	due = Min(due, stats.oldest);
	if (stats.backlog || db->failures > 0 || db->refusal != NULL)
		due = not_before;
	return Max(Max(due, not_before), db->retry_at);
}

/* Of the databases that are due, the one whose worker started longest ago */
static LauncherDatabase *
pick_database(TimestampTz now)
{
	HASH_SEQ_STATUS seq;
	LauncherDatabase *db;
	LauncherDatabase *picked = NULL;

	hash_seq_init(&seq, databases);
	while ((db = hash_seq_search(&seq)) != NULL)
		if (due_at(db) <= now &&
			(picked == NULL || db->started_at < picked->started_at))
			picked = db;
	return picked;
}

/* If the clock was set back: otherwise the database would not be due until it has caught up. */
static void
follow_clock(LauncherDatabase *db, TimestampTz now)
{
	db->started_at = Min(db->started_at, now);
	db->retry_at = Min(db->retry_at, now + retry_interval());
	db->refused_at = Min(db->refused_at, now);
}

/* Before pg_database is read again, which lists the databases anew */
static void
review_databases(TimestampTz now)
{
	HASH_SEQ_STATUS seq;
	LauncherDatabase *db;
	pid_t		pid;

	hash_seq_init(&seq, databases);
	while ((db = hash_seq_search(&seq)) != NULL)
	{
		if (db->handle != NULL &&
			GetBackgroundWorkerPid(db->handle, &pid) == BGWH_STOPPED)
			note_worker_ended(db, now);
		follow_clock(db, now);
		if (db->refusal != NULL)
			report_refusal(db, now);
		if (!db->listed && db->handle == NULL)
			hash_search(databases, &db->oid, HASH_REMOVE, NULL);
		else
			db->listed = false;
	}
}

static bool
register_worker(LauncherDatabase *db)
{
	IdemWorkerOrder order = {
		.rescan = !db->looked_at,
		.retry = db->failures > 0,
		.database = db->name
	};
	BackgroundWorker worker;
	MemoryContext old_context;
	bool		registered;

	init_background_worker(&worker, "idem_worker_main", "idem worker",
						   BGW_NEVER_RESTART);
	snprintf(worker.bgw_name, BGW_MAXLEN, "idem worker for database \"%s\"",
			 NameStr(db->name));
	worker.bgw_main_arg = ObjectIdGetDatum(db->oid);
	memcpy(worker.bgw_extra, &order, sizeof(order));
	worker.bgw_notify_pid = MyProcPid;

	/* The handle outlives the cycle. */
	old_context = MemoryContextSwitchTo(TopMemoryContext);
	registered = RegisterDynamicBackgroundWorker(&worker, &db->handle);
	MemoryContextSwitchTo(old_context);
	return registered;
}

/* False: no worker slot is free. */
static bool
start_worker(LauncherDatabase *db, TimestampTz now)
{
	IdemCleanupStats stats;

	Assert(db->listed && db->handle == NULL);
	Assert(running_workers < WORKERS_MAX);

	/* Until then another database has its turn.  A start resets it. */
	db->retry_at = now + retry_interval();

	(void) idem_stats_read_database(db->oid, &stats);
	if (stats.worker_pid != 0)
		return true;			/* started by a former launcher */

	/* Another session is about to drop, rename or copy the database: a worker would be in
	 * its way. */
	if (!idem_worker_may_enter(db->oid))
	{
		note_refusal(db, "another session has locked it", now);
		return true;
	}

	if (!register_worker(db))
	{
		note_refusal(db, "no background worker slot is free", now);
		return false;
	}
	running_workers++;
	db->looked_at = true;
	db->runs_before = stats.runs;
	db->started_at = now;
	db->retry_at = DT_NOBEGIN;
	return true;
}

static void
start_due_workers(TimestampTz now)
{
	LauncherDatabase *db;

	while (running_workers < WORKERS_MAX &&
		   (db = pick_database(now)) != NULL &&
		   start_worker(db, now))
		/* the next one */ ;
}

static void
launcher_cycle(void)
{
	TimestampTz now = GetCurrentTimestamp();

	SetCurrentStatementStartTimestamp();
	StartTransactionCommand();
	(void) GetTransactionSnapshot();
	review_databases(now);
	refresh_databases();
	start_due_workers(now);
	CommitTransactionCommand();
}

static void
reload_launcher(void)
{
	HASH_SEQ_STATUS seq;
	LauncherDatabase *db;

	ProcessConfigFile(PGC_SIGHUP);
	wanted_names_checked = false;
	hash_seq_init(&seq, databases);
	while ((db = hash_seq_search(&seq)) != NULL)
	{
		db->looked_at = false;
		db->failures = 0;
		db->retry_at = DT_NOBEGIN;
	}
}

static void
init_launcher(void)
{
	HASHCTL		ctl = {
		.keysize = sizeof(Oid),
		.entrysize = sizeof(LauncherDatabase)
	};

	databases = hash_create("idem databases", 16, &ctl, HASH_ELEM | HASH_BLOBS);

	ereport(LOG,
			(errmsg("idem launcher started"),
			 idem_cleanup_databases[0] == '\0' ?
			 errdetail("It looks at all databases.") :
			 errdetail("It looks at the databases of idem.cleanup_databases: %s.",
					   idem_cleanup_databases)));
}

void
idem_launcher_main(Datum arg)
{
	uint32		wait_event;

	idem_worker_connect(InvalidOid, "idem launcher");
	wait_event = WaitEventExtensionNew("IdemLauncherMain");
	cares_for_all = idem_shared_state == IDEM_SHARED_PRELOADED;
	/* Two sessions can have started one each. */
	if (!idem_state_attach_launcher() && !cares_for_all)
		proc_exit(0);
	init_launcher();

	for (;;)
	{
		launcher_cycle();
		if (!cares_for_all && running_workers == 0 && idem_state_detach_launcher())
			proc_exit(0);
		(void) WaitLatch(MyLatch,
						 WL_LATCH_SET | WL_TIMEOUT | WL_EXIT_ON_PM_DEATH,
						 retry_interval() / 1000, wait_event);
		ResetLatch(MyLatch);
		CHECK_FOR_INTERRUPTS();
		if (ConfigReloadPending)
		{
			ConfigReloadPending = false;
			reload_launcher();
		}
	}
}

