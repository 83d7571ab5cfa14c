/*
 * blocked_by.h
 *	  Who has what a call waited for.
 */
#ifndef IDEM_PROTOCOL_BLOCKED_BY_H
#define IDEM_PROTOCOL_BLOCKED_BY_H

#include "datatype/timestamp.h"

typedef enum IdemBlockedByKind
{
	IDEM_BY_NONE,
	IDEM_BY_TRANSACTION,
	IDEM_BY_LEASE,
	IDEM_BY_POLICY,		/* a change of idem_scopes */
	IDEM_BY_DDL			/* of an index of idem_claims, or of idem_token_seq */
} IdemBlockedByKind;

typedef struct IdemBlockedBy
{
	IdemBlockedByKind kind;
	TransactionId xid;			/* of a transaction, or of its subtransaction */
	TimestampTz lease_until;	/* of a lease */
} IdemBlockedBy;

#define IDEM_BLOCKED_BY_TRANSACTION(x) \
	((IdemBlockedBy) {.kind = IDEM_BY_TRANSACTION, .xid = (x)})
#define IDEM_BLOCKED_BY_LEASE(until) \
	((IdemBlockedBy) {.kind = IDEM_BY_LEASE, .lease_until = (until)})
#define IDEM_BLOCKED_BY_POLICY \
	((IdemBlockedBy) {.kind = IDEM_BY_POLICY})
#define IDEM_BLOCKED_BY_DDL \
	((IdemBlockedBy) {.kind = IDEM_BY_DDL})

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
