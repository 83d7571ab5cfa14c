/*
 * worker.c
 *	  The launcher, and the worker that removes a database's expired claims.
 *
 * The launcher is a leader without a database: it sees the shared catalogs
 * only, so it blocks neither DROP DATABASE nor CREATE DATABASE ... TEMPLATE.
 * It starts a short-lived worker for a database in which something is to be
 * done, at most one for a database and WORKERS_MAX in all.  The worker removes
 * batches without a pause while there is backlog, each in its own transaction,
 * and ends.  An idle database has no connection of ours.
 *
 * A database is due
 *	- at the first look since the launcher started, and after a reload;
 *	- when the earliest expiry that is known of it has passed, or a batch left
 *	  some behind, and idem.cleanup_interval is over since its worker started;
 *	- a while after the latest look at it: what was restored, replicated,
 *	  prepared or written by a superuser is not announced by anybody.
 * After failures it is due after a time that doubles.  Of several the one that
 * has waited longest comes first.
 *
 * What a launcher knows of a database (LauncherDatabase) is lost when it is
 * restarted, which costs one look at each.  Workers that a former launcher
 * started are seen by the pid in shared memory; that also keeps two workers
 * out of one database should the launcher be wrong.  Which lock protects what
 * there is said in stats.c.
 *
 * A batch starts at the low-water mark, where the one before has ended: so it
 * does not pass the index entries of what is removed already.  Behind the mark
 * there can be rows all the same: skipped ones, those of who commits late or set
 * expires_at, what was restored.  They are found by walks, from the very start
 * or from the earliest row that is known, up to the mark.  While somebody holds
 * an old snapshot there are as many dead entries on that way as claims have been
 * removed since; so a walk goes in slices, each of them a batch, and after each
 * slice comes a batch at the mark.  A slice is followed by a pause of the walk,
 * so that walks take 5 % of the time; but while there is nothing to be removed
 * at the mark, the slices of a walk come without a pause, and what they have
 * taken is a pause before the next walk.  The pause is skipped if the walk found
 * backlog, is the first one, or was ordered.  How far it has come is in shared
 * memory: the next worker goes on there.
 *
 * Leaving in time: before each batch and several times a second within one,
 * the worker tries the lock of its database that DROP, ALTER and a copy
 * conflict with, never waiting for it, and ends when it is refused.  The same
 * goes for the lock of the extension, before each batch: DROP EXTENSION waits
 * for one batch at most, and the next one does not stumble over it.
 *
 * Both processes run as the bootstrap superuser, in databases whose owners are not
 * trusted.  So they run no SQL, and call no function that a catalog of the database
 * names: they call C functions, and find the objects through the extension's members
 * (catalog.c).  The index by expiry is no member; it is found by its name in the
 * extension's schema, and read only if it is a B-tree on our table, whose operator
 * class only a superuser can have made.  Deleting a row evaluates no index expression,
 * and a table with triggers or rules is refused.  The
 * settings of a database that would change what we do are overridden, and background
 * workers do not load its session_preload_libraries.
 */
#include "postgres.h"

#include "access/genam.h"
#include "access/heapam.h"
#include "access/htup_details.h"
#include "access/table.h"
#include "access/tableam.h"
#include "access/xact.h"
#include "catalog/pg_database.h"
#include "catalog/pg_extension.h"
#include "commands/dbcommands.h"
#include "commands/extension.h"
#include "common/int.h"
#include "miscadmin.h"
#include "pgstat.h"
#include "portability/instr_time.h"
#include "postmaster/bgworker.h"
#include "postmaster/interrupt.h"
#include "storage/ipc.h"
#include "storage/latch.h"
#include "storage/lmgr.h"
#include "storage/lock.h"
#include "tcop/tcopprot.h"
#include "utils/builtins.h"
#include "utils/guc.h"
#include "utils/hsearch.h"
#include "utils/memutils.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"
#include "utils/varlena.h"

#include "catalog.h"
#include "cleanup.h"
#include "compat.h"
#include "guc.h"
#include "stats.h"
#include "store.h"
#include "worker.h"

#define MILLISECONDS(ms) ((int64) (ms) * 1000)	/* as a TimestampTz counts */
#define SECONDS(s) ((int64) (s) * USECS_PER_SEC)

/* Workers at the same time: they are to leave room for the work itself. */
#define WORKERS_MAX 3

/* Restart of a launcher that ended, seconds */
#define LAUNCHER_RESTART_S 5

/* A database is looked at this often though nobody announced anything. */
#define LOOK_INTERVAL SECONDS(60)

/* Longest pause after a worker could not be started */
#define RETRY_INTERVAL_MAX SECONDS(10)

/* That there is no free worker slot is said this often at most. */
#define NO_SLOT_REPORT_INTERVAL SECONDS(60)

/* Longest pause after failures */
#define BACKOFF_MAX SECONDS(300)

/* After this a worker makes room for another database's. */
#define RUN_DURATION_MAX SECONDS(60)

/*
 * Walking behind the low-water mark: all of it this often (less than
 * LOOK_INTERVAL, so that each such look is one), and for 1/20 of the time,
 * that is 5 %.  The limit is for a clock that is set back.
 */
#define FULL_SCAN_INTERVAL SECONDS(50)
#define RESCAN_PAUSE_FACTOR 20
#define RESCAN_PAUSE_MAX SECONDS(3600)

/*
 * Entries of rows that are gone that a batch passes: as many as the rows that it
 * removes by default, since to pass one is several times cheaper.
 */
#define BATCH_GONE_MAX 50000

/* The table's lock is all that a worker can wait for. */
#define WORKER_LOCK_TIMEOUT "10s"

/* bgw_extra of a worker */
typedef struct WorkerOrder
{
	bool		full_scan;		/* begin with all of the table */
	bool		retry;			/* the latest worker failed */
} WorkerOrder;

StaticAssertDecl(sizeof(WorkerOrder) <= BGW_EXTRALEN,
				 "the order fits into bgw_extra");

/* What the launcher knows of a database */
typedef struct LauncherDatabase
{
	Oid			oid;			/* hash key */
	NameData	name;
	bool		listed;			/* exists, accepts connections, is wanted */
	bool		looked_at;		/* since the start or the latest reload */
	TimestampTz started_at;		/* latest worker */
	TimestampTz retry_at;		/* a worker could not be started: not before */
	int			failures;		/* in a row */
	uint64		runs_before;	/* regular ends before the latest worker */
	BackgroundWorkerHandle *handle; /* running worker, or NULL */
} LauncherDatabase;

/* Lives as long as the launcher, as do the hash table and the handles. */
static MemoryContext launcher_context = NULL;
static HTAB *databases = NULL;

/* idem.databases as of the latest reload, in a context of its own */
static MemoryContext wanted_context = NULL;
static List *wanted_names = NIL;

static int	running_workers = 0;
static TimestampTz no_slot_reported_at = DT_NOBEGIN;

void
idem_worker_register_launcher(void)
{
	BackgroundWorker worker;

	memset(&worker, 0, sizeof(worker));
	worker.bgw_flags = BGWORKER_SHMEM_ACCESS |
		BGWORKER_BACKEND_DATABASE_CONNECTION;
	/* On a standby: after its promotion. */
	worker.bgw_start_time = BgWorkerStart_RecoveryFinished;
	worker.bgw_restart_time = LAUNCHER_RESTART_S;
	strlcpy(worker.bgw_library_name, "idem", BGW_MAXLEN);
	strlcpy(worker.bgw_function_name, "idem_launcher_main", BGW_MAXLEN);
	strlcpy(worker.bgw_name, "idem launcher", BGW_MAXLEN);
	strlcpy(worker.bgw_type, "idem launcher", BGW_MAXLEN);
	RegisterBackgroundWorker(&worker);
}

/* ----- both processes ----- */

static void
override_setting(const char *name, const char *value)
{
	/* transaction_timeout is not in every version */
	if (GetConfigOption(name, true, false) != NULL)
		SetConfigOption(name, value, PGC_SUSET, PGC_S_OVERRIDE);
}

/*
 * What is set for the server, the database or the role is meant for
 * applications, and must not keep us from working.  A reload does not undo it.
 */
static void
override_settings(void)
{
	override_setting("default_transaction_isolation", "read committed");
	override_setting("default_transaction_read_only", "off");
	override_setting("default_transaction_deferrable", "off");
	override_setting("statement_timeout", "0");
	override_setting("transaction_timeout", "0");
	override_setting("idle_in_transaction_session_timeout", "0");
	override_setting("lock_timeout", WORKER_LOCK_TIMEOUT);
	override_setting("search_path", "");
	/* Losing the removal of an expired claim in a crash is harmless. */
	override_setting("synchronous_commit", "off");
}

static void
accept_signals(void)
{
	pqsignal(SIGHUP, SignalHandlerForConfigReload);
	pqsignal(SIGTERM, die);
	BackgroundWorkerUnblockSignals();
}

/* ----- the launcher: its databases ----- */

static void
init_launcher_database(LauncherDatabase *db)
{
	memset((char *) db + sizeof(db->oid), 0,
		   sizeof(LauncherDatabase) - sizeof(db->oid));
	db->started_at = DT_NOBEGIN;
	db->retry_at = DT_NOBEGIN;
}

/* Reads idem.databases, which was checked when it was set. */
static void
read_wanted_names(void)
{
	MemoryContext old_context;

	MemoryContextReset(wanted_context);
	old_context = MemoryContextSwitchTo(wanted_context);
	(void) SplitIdentifierString(pstrdup(idem_databases), ',', &wanted_names);
	MemoryContextSwitchTo(old_context);
}

static bool
is_wanted(const char *name)
{
	ListCell   *lc;

	foreach(lc, wanted_names)
		if (strcmp(lfirst(lc), name) == 0)
			return true;
	return wanted_names == NIL;
}

static void
list_database(Form_pg_database form)
{
	LauncherDatabase *db;
	bool		found;

	if (!form->datallowconn || database_is_invalid_form(form) ||
		!is_wanted(NameStr(form->datname)))
		return;

	db = hash_search(databases, &form->oid, HASH_ENTER, &found);
	if (!found)
		init_launcher_database(db);
	db->name = form->datname;
	db->listed = true;
}

static void
unlist_databases(void)
{
	HASH_SEQ_STATUS seq;
	LauncherDatabase *db;

	hash_seq_init(&seq, databases);
	while ((db = hash_seq_search(&seq)) != NULL)
		db->listed = false;
}

static void
remove_unlisted_databases(void)
{
	HASH_SEQ_STATUS seq;
	LauncherDatabase *db;

	hash_seq_init(&seq, databases);
	while ((db = hash_seq_search(&seq)) != NULL)
		if (!db->listed && db->handle == NULL)
			hash_search(databases, &db->oid, HASH_REMOVE, NULL);
}

static void
forget_dropped(const Oid *counted, int ncounted, const Oid *existing,
			   int nexisting)
{
	for (int i = 0; i < ncounted; i++)
	{
		bool		exists = false;

		for (int j = 0; j < nexisting && !exists; j++)
			exists = existing[j] == counted[i];
		if (!exists)
			idem_stats_forget_database(counted[i]);
	}
}

/*
 * Reads pg_database.  Which databases have statistics is read before: one that
 * is not in a later snapshot has been dropped, whereas one that is created now
 * may not be in the snapshot and have statistics already.
 */
static void
refresh_databases(void)
{
	Oid		   *counted;
	int			ncounted = idem_stats_get_databases(&counted);
	Oid		   *existing;
	int			nexisting = 0;
	int			existing_max = 64;
	Relation	rel = table_open(DatabaseRelationId, AccessShareLock);
	TableScanDesc scan = table_beginscan_catalog(rel, 0, NULL);
	HeapTuple	tuple;

	existing = palloc(existing_max * sizeof(Oid));
	unlist_databases();
	while ((tuple = heap_getnext(scan, ForwardScanDirection)) != NULL)
	{
		Form_pg_database form = (Form_pg_database) GETSTRUCT(tuple);

		if (nexisting == existing_max)
		{
			existing_max *= 2;
			existing = repalloc(existing, existing_max * sizeof(Oid));
		}
		existing[nexisting++] = form->oid;
		list_database(form);
	}
	table_endscan(scan);
	table_close(rel, AccessShareLock);

	remove_unlisted_databases();
	forget_dropped(counted, ncounted, existing, nexisting);
}

/* ----- the launcher: its workers ----- */

static void
note_worker_ended(LauncherDatabase *db)
{
	IdemCleanupStatus status;

	pfree(db->handle);
	db->handle = NULL;
	running_workers--;

	/* Without statistics we cannot know; it is looked at rarely anyway. */
	if (idem_stats_get_status(db->oid, &status) &&
		status.runs == db->runs_before)
		db->failures++;
	else
		db->failures = 0;
}

static void
reap_workers(void)
{
	HASH_SEQ_STATUS seq;
	LauncherDatabase *db;
	pid_t		pid;

	hash_seq_init(&seq, databases);
	while ((db = hash_seq_search(&seq)) != NULL)
		if (db->handle != NULL &&
			GetBackgroundWorkerPid(db->handle, &pid) == BGWH_STOPPED)
			note_worker_ended(db);
}

/* Pause between the starts of two workers in a database */
static int64
start_interval(const LauncherDatabase *db, bool backlog)
{
	int64		interval = MILLISECONDS(idem_cleanup_interval);

	if (db->failures > 0)
		return Max(interval,
				   Min(interval << Min(db->failures - 1, 16), BACKOFF_MAX));
	/* A worker leaves its backlog behind only to make room for others. */
	if (backlog)
		return Min(interval, RUN_DURATION_MAX);
	return interval;
}

static int64
retry_interval(void)
{
	return Min(MILLISECONDS(idem_cleanup_interval), RETRY_INTERVAL_MAX);
}

/* When a worker is to be started; DT_NOEND while one runs. */
static TimestampTz
due_at(const LauncherDatabase *db)
{
	IdemCleanupStatus status;
	TimestampTz due;
	TimestampTz not_before;

	if (db->handle != NULL || !db->listed)
		return DT_NOEND;
	if (!db->looked_at)
		return db->retry_at;

	idem_stats_get_status(db->oid, &status);
	not_before = db->started_at + start_interval(db, status.backlog);
	due = db->started_at + Max(LOOK_INTERVAL,
							   MILLISECONDS(idem_cleanup_interval));
	due = Min(due, status.oldest_expires_at);
	if (status.backlog || db->failures > 0)
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

static bool
register_worker(LauncherDatabase *db)
{
	WorkerOrder order = {
		.full_scan = !db->looked_at,
		.retry = db->failures > 0
	};
	BackgroundWorker worker;
	MemoryContext old_context;
	bool		registered;

	memset(&worker, 0, sizeof(worker));
	worker.bgw_flags = BGWORKER_SHMEM_ACCESS |
		BGWORKER_BACKEND_DATABASE_CONNECTION;
	worker.bgw_start_time = BgWorkerStart_RecoveryFinished;
	worker.bgw_restart_time = BGW_NEVER_RESTART;
	strlcpy(worker.bgw_library_name, "idem", BGW_MAXLEN);
	strlcpy(worker.bgw_function_name, "idem_worker_main", BGW_MAXLEN);
	snprintf(worker.bgw_name, BGW_MAXLEN, "idem worker for database \"%s\"",
			 NameStr(db->name));
	strlcpy(worker.bgw_type, "idem worker", BGW_MAXLEN);
	worker.bgw_main_arg = ObjectIdGetDatum(db->oid);
	memcpy(worker.bgw_extra, &order, sizeof(order));
	worker.bgw_notify_pid = MyProcPid;

	old_context = MemoryContextSwitchTo(launcher_context);
	registered = RegisterDynamicBackgroundWorker(&worker, &db->handle);
	MemoryContextSwitchTo(old_context);
	if (!registered)
		db->handle = NULL;
	return registered;
}

/* Not for each try: where slots are scarce, there is now one and now none. */
static void
report_no_slot(const LauncherDatabase *db, TimestampTz now)
{
	if (no_slot_reported_at <= now &&
		no_slot_reported_at + NO_SLOT_REPORT_INTERVAL > now)
		return;
	no_slot_reported_at = now;
	ereport(WARNING,
			(errcode(ERRCODE_CONFIGURATION_LIMIT_EXCEEDED),
			 errmsg("idem cannot start a worker for database \"%s\": no background worker slot is free",
					NameStr(db->name)),
			 errdetail("It is tried again; expired claims stay until then."),
			 errhint("You might need to increase max_worker_processes.")));
}

/* False: no worker could be started, of whatever database. */
static bool
start_worker(LauncherDatabase *db, TimestampTz now)
{
	IdemCleanupStatus status;

	/* Until it is known better; a start replaces it. */
	db->retry_at = now + retry_interval();

	idem_stats_get_status(db->oid, &status);
	if (status.worker_pid != 0)
		return true;			/* a former launcher's */

	/* A worker would wait, in the way of others, or find the database gone. */
	if (!idem_conditional_lock_database(db->oid))
		return true;

	if (!register_worker(db))
	{
		report_no_slot(db, now);
		return false;
	}
	running_workers++;
	db->looked_at = true;
	db->runs_before = status.runs;
	db->started_at = now;
	db->retry_at = DT_NOBEGIN;
	return true;
}

/* False: no slot is free, so there is no use in trying another. */
static bool
start_due_workers(TimestampTz now)
{
	LauncherDatabase *db;

	while (running_workers < WORKERS_MAX &&
		   (db = pick_database(now)) != NULL)
		if (!start_worker(db, now))
			return false;
	return true;
}

/*
 * How long there is nothing to do; the end of a worker and a reload set our
 * latch.  What is claimed meanwhile can be due earlier than what is known now,
 * but not before an interval is over.
 */
static int64
idle_time(TimestampTz now)
{
	int64		idle = MILLISECONDS(idem_cleanup_interval);
	HASH_SEQ_STATUS seq;
	LauncherDatabase *db;

	if (running_workers == WORKERS_MAX)
		return idle;
	hash_seq_init(&seq, databases);
	while ((db = hash_seq_search(&seq)) != NULL)
	{
		TimestampTz due = due_at(db);

		if (due < now + idle)
			idle = Max(due, now) - now;
	}
	return idle;
}

/* A clock that was set back must not stop the cleaning until it caught up. */
static void
follow_clock(TimestampTz now)
{
	HASH_SEQ_STATUS seq;
	LauncherDatabase *db;

	hash_seq_init(&seq, databases);
	while ((db = hash_seq_search(&seq)) != NULL)
	{
		db->started_at = Min(db->started_at, now);
		db->retry_at = Min(db->retry_at,
						   now + retry_interval());
	}
}

/* Returns for how long to sleep, in milliseconds. */
static long
launcher_cycle(void)
{
	TimestampTz now = GetCurrentTimestamp();
	bool		slots_free;
	int64		idle;

	SetCurrentStatementStartTimestamp();
	StartTransactionCommand();
	(void) GetTransactionSnapshot();
	reap_workers();
	refresh_databases();
	follow_clock(now);
	slots_free = start_due_workers(now);
	CommitTransactionCommand();

	idle = slots_free ? idle_time(now) : retry_interval();
	return (long) ((idle + 999) / 1000);
}

static void
reload_launcher(void)
{
	HASH_SEQ_STATUS seq;
	LauncherDatabase *db;

	ProcessConfigFile(PGC_SIGHUP);
	read_wanted_names();
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
	HASHCTL		ctl;

	launcher_context = AllocSetContextCreate(TopMemoryContext, "idem launcher",
											 ALLOCSET_DEFAULT_SIZES);
	wanted_context = AllocSetContextCreate(launcher_context,
										   "idem.databases",
										   ALLOCSET_SMALL_SIZES);
	read_wanted_names();

	memset(&ctl, 0, sizeof(ctl));
	ctl.keysize = sizeof(Oid);
	ctl.entrysize = sizeof(LauncherDatabase);
	ctl.hcxt = launcher_context;
	databases = hash_create("idem databases", 16, &ctl,
							HASH_ELEM | HASH_BLOBS | HASH_CONTEXT);
}

void
idem_launcher_main(Datum arg)
{
	uint32		wait_event;

	accept_signals();
	BackgroundWorkerInitializeConnection(NULL, NULL, 0);
	override_settings();
	pgstat_report_appname("idem launcher");
	wait_event = idem_wait_event("IdemLauncherMain");
	init_launcher();

	for (;;)
	{
		long		timeout = launcher_cycle();

		(void) WaitLatch(MyLatch,
						 WL_LATCH_SET | WL_TIMEOUT | WL_EXIT_ON_PM_DEATH,
						 timeout, wait_event);
		ResetLatch(MyLatch);
		CHECK_FOR_INTERRUPTS();
		if (ConfigReloadPending)
		{
			ConfigReloadPending = false;
			reload_launcher();
		}
	}
}

/* ----- the worker of a database ----- */

/* One run of a worker */
typedef struct WorkerRun
{
	char	   *database;		/* name: nobody can rename it under us */
	bool		retry;			/* the latest worker failed */
	bool		full_scan;		/* ordered, and not begun yet */
	IdemCleanupMarks marks;
	TimestampTz oldest_expires_at;
	bool		more_at_mark;	/* the latest batch there has not come to now */
	bool		backlog_at_mark;	/* it has left some */
	bool		backlog_behind;	/* so has the latest slice of a walk */
} WorkerRun;

typedef enum ExtensionStanding
{
	EXTENSION_SERVED,
	EXTENSION_ABSENT,
	EXTENSION_BUSY				/* somebody drops it */
} ExtensionStanding;

/*
 * The extension's lock is not kept: DROP SCHEMA can have the table's lock when it asks
 * for the extension's, and would deadlock with us.  The table's is, until the transaction
 * ends, so that the extension stays for the batch.  It is not waited for here: who drops
 * the schema may have it.
 *
 * Raises 55000 for an extension that this library does not serve: its claims are there
 * and expire, so what is known of them stays published.
 */
static ExtensionStanding
extension_standing(void)
{
	Oid			extension = get_extension_oid("idem", true);
	bool		is_still_there;
	LOCKTAG		tag;

	if (!OidIsValid(extension))
		return EXTENSION_ABSENT;
	SET_LOCKTAG_OBJECT(tag, MyDatabaseId, ExtensionRelationId, extension, 0);
	if (LockAcquire(&tag, AccessShareLock, false, true) == LOCKACQUIRE_NOT_AVAIL)
		return EXTENSION_BUSY;
	/* Looked up again: it may have been dropped while we came to the lock. */
	is_still_there = get_extension_oid("idem", true) == extension;
	if (is_still_there)
		(void) idem_store_try_lock();
	LockRelease(&tag, AccessShareLock, false);
	return is_still_there ? EXTENSION_SERVED : EXTENSION_ABSENT;
}

/* IdemCleanupStop */
static bool
must_leave_database(void)
{
	return !idem_conditional_lock_database(MyDatabaseId);
}

/* Before each batch */
static void
read_marks(WorkerRun *run, TimestampTz now)
{
	run->oldest_expires_at = DT_NOEND;
	(void) idem_stats_get_marks(&run->marks, &run->oldest_expires_at);

	/* Nothing was walked yet: what has expired by now is for the first walk. */
	if (run->marks.low_water == DT_NOBEGIN)
		run->full_scan = true;
	/* It is now, too, if the clock was set back.  What expires from now on is
	 * not to wait for a walk. */
	if (run->marks.low_water == DT_NOBEGIN || run->marks.low_water > now)
		run->marks.low_water = now;
}

static void
begin_walk(IdemCleanupMarks *marks, TimestampTz start, TimestampTz now)
{
	marks->walk_at = start;
	marks->walk_is_full = (start == DT_NOBEGIN);
	marks->walk_is_urgent = false;
	marks->walk_unknown = 0;
	if (marks->walk_is_full)
		marks->full_scan_at = now;
}

static bool
is_walking(const IdemCleanupMarks *marks)
{
	return marks->walk_at != DT_NOEND;
}

static bool
full_scan_is_due(const IdemCleanupMarks *marks, TimestampTz now)
{
	int64		age;

	return pg_sub_s64_overflow(now, marks->full_scan_at, &age) ||
		age < 0 || age >= FULL_SCAN_INTERVAL;
}

/* ahead: how much of the pause may be left */
static bool
walk_has_to_pause(const IdemCleanupMarks *marks, TimestampTz now, int64 ahead)
{
	return marks->rescan_after > now + ahead &&
		marks->rescan_after <= now + RESCAN_PAUSE_MAX;
}

/*
 * Is it time for a slice of a walk?  Begins one if there may be rows behind the
 * mark.
 */
static bool
walk_is_due(WorkerRun *run, TimestampTz now)
{
	IdemCleanupMarks *marks = &run->marks;

	if (run->full_scan)
	{
		begin_walk(marks, DT_NOBEGIN, now);
		marks->walk_is_urgent = true;
		run->full_scan = false;
		return true;
	}
	if (is_walking(marks))
		return marks->walk_is_urgent ||
			!walk_has_to_pause(marks, now,
							   run->more_at_mark ? 0 : FULL_SCAN_INTERVAL);
	if (walk_has_to_pause(marks, now, 0))
		return false;
	if (full_scan_is_due(marks, now))
		begin_walk(marks, DT_NOBEGIN, now);
	else if (run->oldest_expires_at < marks->low_water)
		begin_walk(marks, run->oldest_expires_at, now);
	return is_walking(marks);
}

static void
advance_walk(WorkerRun *run, const IdemCleanupBatch *batch, double seconds)
{
	IdemCleanupMarks *marks = &run->marks;

	run->backlog_behind = batch->backlog;
	/* To remove a backlog is no rescan, and does not pause. */
	if (batch->backlog)
		marks->walk_is_urgent = true;
	else
	{
		TimestampTz now = GetCurrentTimestamp();
		TimestampTz after = Max(now, marks->rescan_after) +
			(int64) (seconds * RESCAN_PAUSE_FACTOR * USECS_PER_SEC);

		marks->rescan_after = Min(after, now + RESCAN_PAUSE_MAX);
	}
	marks->walk_unknown += batch->rows_unknown;
	marks->walk_at = batch->more ? batch->next_start : DT_NOEND;
	if (!batch->more && marks->walk_is_full)
		marks->rows_unknown = marks->walk_unknown;
}

static void
advance_mark(WorkerRun *run, const IdemCleanupBatch *batch)
{
	run->more_at_mark = batch->more;
	run->backlog_at_mark = batch->backlog;
	run->marks.low_water = batch->next_start;
	run->marks.rows_unknown += batch->rows_unknown;
}

/*
 * In a transaction: may a batch run?  Takes the place of the database's worker
 * as soon as it is known that there is something to clean.
 */
static bool
may_run_batch(void)
{
	if (must_leave_database())
	{
		elog(DEBUG1, "leaving: another session needs the database for itself");
		return false;
	}
	switch (extension_standing())
	{
		case EXTENSION_SERVED:
			return idem_stats_attach_worker();
		case EXTENSION_ABSENT:
			idem_stats_publish_absent();
			return false;
		case EXTENSION_BUSY:
			elog(DEBUG1, "leaving: another session drops the extension");
			return false;
	}
	pg_unreachable();
}

/* One batch in its own transaction, which is a slice of the walk or starts at
 * the mark.  False: it may not run. */
static bool
run_batch(WorkerRun *run, bool walk, TimestampTz begun_at)
{
	IdemCleanupOrder order = {
		.start = walk ? run->marks.walk_at : run->marks.low_water,
		.end = walk ? run->marks.low_water : DT_NOEND,
		.expired_before = begun_at,
		.rows_max = idem_cleanup_batch_size,
		.gone_max = BATCH_GONE_MAX,
		.stop = must_leave_database
	};
	instr_time	begun;
	instr_time	duration;
	double		seconds;
	IdemCleanupBatch batch;

	INSTR_TIME_SET_CURRENT(begun);
	SetCurrentStatementStartTimestamp();
	StartTransactionCommand();
	PushActiveSnapshot(GetTransactionSnapshot());
	if (!may_run_batch())
	{
		PopActiveSnapshot();
		CommitTransactionCommand();
		return false;
	}
	pgstat_report_activity(STATE_RUNNING, "removing expired claims");
	idem_cleanup_batch(&order, &batch);
	PopActiveSnapshot();
	CommitTransactionCommand();

	INSTR_TIME_SET_CURRENT(duration);
	INSTR_TIME_SUBTRACT(duration, begun);
	seconds = INSTR_TIME_GET_DOUBLE(duration);
	if (walk)
		advance_walk(run, &batch, seconds);
	else
		advance_mark(run, &batch);
	idem_stats_publish_cleanup(&batch, seconds,
							   run->backlog_at_mark || run->backlog_behind,
							   &run->marks);
	/* Autovacuum must learn of the dead rows. */
	pgstat_report_stat(true);
	pgstat_report_activity(STATE_IDLE, NULL);

	elog(DEBUG1, "removed " INT64_FORMAT " expired claims in %.3f s, skipped " INT64_FORMAT ", passed " INT64_FORMAT " that are gone, %s the low-water mark",
		 batch.rows_deleted, seconds, batch.rows_skipped, batch.rows_gone,
		 walk ? "behind" : "at");
	return true;
}

/* A slice of a walk if it is time for one, and a batch at the mark.  False: there
 * is no more to do. */
static bool
run_round(WorkerRun *run)
{
	TimestampTz now = GetCurrentTimestamp();

	/* Before a batch looks at the catalog: see idem_stats_publish_absent(). */
	read_marks(run, now);
	if (walk_is_due(run, now) && !run_batch(run, true, now))
		return false;

	now = GetCurrentTimestamp();
	read_marks(run, now);
	if (!run_batch(run, false, now))
		return false;
	return run->more_at_mark ||
		(is_walking(&run->marks) && walk_is_due(run, GetCurrentTimestamp()));
}

static void
run_batches(WorkerRun *run)
{
	TimestampTz begun_at = GetCurrentTimestamp();

	while (run_round(run) &&
		   !TimestampDifferenceExceeds(begun_at, GetCurrentTimestamp(),
									   RUN_DURATION_MAX / 1000))
	{
		CHECK_FOR_INTERRUPTS();
		if (ConfigReloadPending)
		{
			ConfigReloadPending = false;
			ProcessConfigFile(PGC_SIGHUP);
		}
	}
}

/*
 * The error is logged where it is caught, by the end of the process.  False: it need not
 * be.  What is wrong with the extension itself (55000: its version, an object that was
 * renamed) stays wrong until somebody acts, and is logged by the first worker that meets
 * it; the ones that try again later only publish it.
 */
static bool
publish_current_error(const WorkerRun *run)
{
	MemoryContext old_context = MemoryContextSwitchTo(TopMemoryContext);
	ErrorData  *error = CopyErrorData();
	bool		is_news = idem_stats_publish_error(error->message);
	bool		is_lasting =
		error->sqlerrcode == ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE;

	FreeErrorData(error);
	MemoryContextSwitchTo(old_context);
	return is_news || !is_lasting || !run->retry;
}

static void
worker_error_context(void *arg)
{
	WorkerRun  *run = arg;

	errcontext("removing expired claims in database \"%s\"", run->database);
}

static void
init_run(WorkerRun *run)
{
	WorkerOrder order;

	memcpy(&order, MyBgworkerEntry->bgw_extra, sizeof(order));
	memset(run, 0, sizeof(WorkerRun));
	run->retry = order.retry;
	run->full_scan = order.full_scan;
	/* Where no statistics are kept, each run starts with these. */
	run->marks.low_water = DT_NOBEGIN;
	run->marks.rescan_after = DT_NOBEGIN;
	run->marks.full_scan_at = DT_NOBEGIN;
	run->marks.walk_at = DT_NOEND;

	StartTransactionCommand();
	run->database = MemoryContextStrdup(TopMemoryContext,
										get_database_name(MyDatabaseId));
	CommitTransactionCommand();
}

void
idem_worker_main(Datum arg)
{
	WorkerRun	run;
	ErrorContextCallback context = {0};

	accept_signals();
	BackgroundWorkerInitializeConnectionByOid(DatumGetObjectId(arg), InvalidOid,
											  0);
	override_settings();
	pgstat_report_appname("idem worker");
	init_run(&run);

	context.callback = worker_error_context;
	context.arg = &run;
	context.previous = error_context_stack;
	error_context_stack = &context;
	PG_TRY();
	{
		run_batches(&run);
	}
	PG_CATCH();
	{
		/*
		 * Either way idem_stats_publish_run() is not reached, so the launcher counts a
		 * failure, and starts the next worker later.
		 */
		if (publish_current_error(&run))
			PG_RE_THROW();
		proc_exit(0);
	}
	PG_END_TRY();
	error_context_stack = context.previous;

	idem_stats_publish_run();
	proc_exit(0);
}
