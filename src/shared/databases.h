/*
 * databases.h
 *	  What is shared of each database: one slot for each that has the extension.  For stats.c and
 *	  clean/state.c, which say what it means.
 *
 * Who may write what, under which lock:
 *
 *	slot->database	the lock of IdemDatabases, exclusively.  Read it under that lock in either
 *					mode.  A process that is connected to a database uses that database's
 *					slot without the lock: a slot is freed only after its database was
 *					dropped, and DROP DATABASE waits for all connections to end.
 *	slot->started	the same lock; starts and starter too.
 *	launcher_pid	atomic.  The launcher sets it from 0 to its pid, and back to 0 when it ends.
 *					Where we are not preloaded, it ends regularly only under the lock,
 *					exclusively, while no database is started.  So a session that starts one
 *					under that lock, and then sees a launcher, knows that the launcher will
 *					see the database.
 *	slot->claimed	atomic.  A claiming transaction lowers it when it commits;
 *					idem_stats_begin_batch() resets it, under slot->mutex.
 *	slot->claims	atomics, each a counter of its own.
 *	slot->scopes	see scope_stats.c.
 *	slot->cleanup	slot->mutex, a spinlock.  Only the database's worker writes marks, worker_pid and
 *					runs.  The launcher publishes errors too.  Sessions that clean or reset write the rest.
 *
 * Take the lock before a mutex, and no lock under a mutex.
 */
#ifndef IDEM_SHARED_DATABASES_H
#define IDEM_SHARED_DATABASES_H

#include "nodes/pg_list.h"
#include "port/atomics.h"
#include "storage/lwlock.h"
#include "storage/spin.h"

#include "shared/figures.h"
#include "shared/scope_stats.h"

/* Databases with the extension; statistics of more are not kept. */
#define IDEM_DATABASES_MAX 256

typedef struct IdemDatabase
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
} IdemDatabase;

typedef struct IdemDatabases
{
	LWLock		lock;
	pg_atomic_uint32 launcher_pid;	/* 0: none */
	bool		full_reported;	/* under lock */
	IdemDatabase slots[IDEM_DATABASES_MAX];
} IdemDatabases;

/* NULL before idem_shared_use() */
extern IdemDatabases *idem_shared_databases;

/* Once a backend, before idem_shared_init() */
extern void idem_databases_init(void);

/*
 * The slot of this process's database; NULL: there is none, or no shared memory.  create: makes it
 * if there is room.  Raises nothing outside of a transaction, because it is called after a commit.
 */
extern IdemDatabase *idem_own_database(bool create);

/* The same for SQL functions: raises 55000 without shared memory. */
extern IdemDatabase *idem_require_own_database(void);

/* For the launcher: the OIDs of the databases that have statistics, palloc'd */
extern List *idem_databases_list(void);

/* Forgets a database that was dropped. */
extern void idem_databases_forget(Oid database);

/* Under the lock.  InvalidOid finds a free slot. */
extern IdemDatabase *idem_find_database(Oid database);

#endif							/* IDEM_SHARED_DATABASES_H */
