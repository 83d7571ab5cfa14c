/*
 * worker.h
 *	  The process that removes a database's expired claims.
 */
#ifndef IDEM_CLEAN_WORKER_H
#define IDEM_CLEAN_WORKER_H

#include "datatype/timestamp.h"

/* bgw_extra of a worker */
typedef struct IdemWorkerOrder
{
	bool		rescan;			/* begin with an urgent rescan */
	bool		retry;			/* the latest worker failed */
	NameData	database;		/* for its messages */
} IdemWorkerOrder;

/* After this a worker ends, to make room for another database's. */
#define IDEM_RUN_DURATION_MAX (60 * USECS_PER_SEC)

/*
 * For both processes: accepts signals, connects to the database (InvalidOid: to none), and
 * overrides the settings that are meant for applications.
 */
extern void idem_worker_connect(Oid database, const char *name);

/*
 * False: another session drops, renames, moves or copies the database.  Tries a lock that conflicts
 * with theirs, without waiting, and releases it.
 */
extern bool idem_worker_may_enter(Oid database);

/* Entry of the process */
extern PGDLLEXPORT void idem_worker_main(Datum arg);

#endif							/* IDEM_CLEAN_WORKER_H */
