/*
 * blocker.h
 *	  Who has what a call waited for.
 */
#ifndef IDEM_PROTOCOL_BLOCKER_H
#define IDEM_PROTOCOL_BLOCKER_H

#include "datatype/timestamp.h"

typedef enum IdemBlockerKind
{
	IDEM_BLOCKER_NONE,
	IDEM_BLOCKER_TRANSACTION,
	IDEM_BLOCKER_LEASE,
	IDEM_BLOCKER_POLICY,		/* a change of idem_scopes */
	IDEM_BLOCKER_DDL			/* of an index of idem_claims, or of idem_token_seq */
} IdemBlockerKind;

typedef struct IdemBlocker
{
	IdemBlockerKind kind;
	TransactionId xid;			/* of a transaction, or of its subtransaction */
	TimestampTz lease_until;	/* of a lease */
} IdemBlocker;

#define IDEM_BLOCKED_BY_TRANSACTION(x) \
	((IdemBlocker) {.kind = IDEM_BLOCKER_TRANSACTION, .xid = (x)})
#define IDEM_BLOCKED_BY_LEASE(until) \
	((IdemBlocker) {.kind = IDEM_BLOCKER_LEASE, .lease_until = (until)})
#define IDEM_BLOCKED_BY_POLICY \
	((IdemBlocker) {.kind = IDEM_BLOCKER_POLICY})
#define IDEM_BLOCKED_BY_DDL \
	((IdemBlocker) {.kind = IDEM_BLOCKER_DDL})

/* A sentence for a DETAIL, palloc'd; NULL: there is no blocker */
extern char *idem_blocker_to_string(const IdemBlocker *blocker);

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

#endif							/* IDEM_PROTOCOL_BLOCKER_H */
