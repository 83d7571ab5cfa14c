/*
 * blocked_by.h
 *	  Who has what a call waited for.
 */
#ifndef IDEM_PROTOCOL_BLOCKED_BY_H
#define IDEM_PROTOCOL_BLOCKED_BY_H

#include "datatype/timestamp.h"

/* One of them is set, or none. */
typedef struct IdemBlockedBy
{
	TransactionId xid;			/* a transaction, or its subtransaction */
	TimestampTz lease_until;	/* a lease */
	const char *changed;		/* a transaction that changes this */
} IdemBlockedBy;

/* A sentence for a DETAIL, palloc'd; NULL: there is no blocker */
extern char *idem_blocked_by_to_string(const IdemBlockedBy *blocked_by);

/* Who runs a transaction.  In a prepared one nobody does: it has a gid, and no pid. */
typedef struct IdemRunner
{
	int			pid;			/* 0: none */
	char	   *gid;			/* palloc'd; NULL: it is not prepared */
	TimestampTz since;			/* its begin, or its PREPARE; DT_NOBEGIN: not known, since the
								 * process has track_activities = off */
} IdemRunner;

/*
 * xid: also of a subtransaction.  False: it does not run any more, or the savepoint was rolled
 * back to.  Whatever it returns was true at one moment within the call.
 */
extern bool idem_find_runner(TransactionId xid, IdemRunner *runner);

#endif							/* IDEM_PROTOCOL_BLOCKED_BY_H */
