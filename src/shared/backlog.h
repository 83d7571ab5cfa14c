/*
 * backlog.h
 *	  How far the removal of a backlog has come: pure functions, without a table.
 */
#ifndef IDEM_SHARED_BACKLOG_H
#define IDEM_SHARED_BACKLOG_H

#include "datatype/timestamp.h"

#include "shared/figures.h"

/* A backlog is reported in the log if its oldest claim has been expired for longer. */
#define IDEM_BACKLOG_LATE (300 * USECS_PER_SEC)

typedef enum IdemBacklogNews
{
	IDEM_BACKLOG_NO_NEWS,
	IDEM_BACKLOG_BEGUN,			/* it is late, and that was not reported yet */
	IDEM_BACKLOG_DRAINED		/* it was reported, and nothing is left of it */
} IdemBacklogNews;

/*
 * A batch of the worker has been committed.  removed_until: see idem_rescan_removed_until().
 * Says what is to be reported.  Sets ended, to what a drained backlog was, if the batch has
 * left no backlog.
 */
extern IdemBacklogNews idem_backlog_advance(IdemBacklog *backlog,
											const IdemCleanupReport *report,
											TimestampTz removed_until,
											TimestampTz now,
											IdemBacklog *ended);

/*
 * Which part of the time in which the backlog expired has been removed, from 0 to 1; -1: there
 * is no backlog.
 */
extern double idem_backlog_done(const IdemBacklog *backlog, TimestampTz now);

#endif							/* IDEM_SHARED_BACKLOG_H */
