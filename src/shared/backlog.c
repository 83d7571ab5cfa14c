/*
 * backlog.c
 *	  How far the removal of a backlog has come.
 *
 * A backlog begins with a batch that leaves expired claims behind, and ends with the first one
 * that leaves none.  Its claims are not counted: that would read all of them.  They are removed
 * in the order of their expiry, so its progress is the way from the expiry at which the first
 * batch ended to now.  "Now" moves on while the worker removes: a worker that is slower than
 * the claims expire never arrives.
 *
 * A large batch of claims that expire together is a backlog too, for a fraction of a second; and
 * claims that nobody announced, such as replicated ones, are found a minute late.  Only a backlog
 * whose oldest claim has been expired for five minutes is reported in the log, once, and once
 * again when it is drained.
 */
#include "postgres.h"

#include "shared/backlog.h"

IdemBacklogNews
idem_backlog_advance(IdemBacklog *backlog, const IdemCleanupReport *report,
					 TimestampTz removed_until, TimestampTz now,
					 IdemBacklog *ended)
{
	if (!report->backlog)
	{
		*ended = *backlog;
		ended->rows_deleted += report->rows_deleted;
		*backlog = (IdemBacklog) {0};
		return ended->is_reported ?
			IDEM_BACKLOG_DRAINED : IDEM_BACKLOG_NO_NEWS;
	}

	backlog->removed_until = removed_until;
	if (backlog->since == IDEM_STATS_NEVER)
	{
		backlog->since = now;
		backlog->from = backlog->removed_until;
	}
	backlog->rows_deleted += report->rows_deleted;
	if (backlog->is_reported ||
		backlog->removed_until > now - IDEM_BACKLOG_LATE)
		return IDEM_BACKLOG_NO_NEWS;
	backlog->is_reported = true;
	return IDEM_BACKLOG_BEGUN;
}

double
idem_backlog_done(const IdemBacklog *backlog, TimestampTz now)
{
	double		way;
	double		gone;

	if (backlog->since == IDEM_STATS_NEVER)
		return -1;
	/* As floating point, because a row that was inserted by hand can have expired at
	 * -infinity */
	way = (double) now - (double) backlog->from;
	gone = (double) backlog->removed_until - (double) backlog->from;
	if (way <= 0 || gone >= way)
		return 1;
	return Max(gone, 0) / way;
}
