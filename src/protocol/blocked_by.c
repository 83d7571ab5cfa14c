/*
 * blocked_by.c
 *	  Who has what a call waited for, from the server's own lists of transactions.
 *
 * While we look, the transaction can end, and its process can begin another one.  So
 * idem_find_runner() asks at the end whether the transaction still runs.  If it does, all that
 * was read before belongs to it.  (A process sets the time at which its transaction began before
 * the transaction gets an id.)
 *
 * pg_stat_activity hides the begin of a transaction from roles that may not see it.  Here it
 * is told to whoever has the right to claim, and names the request: which process holds up
 * one's own request, and for how long, is no secret of the other session.
 */
#include "postgres.h"

#include "access/subtrans.h"
#include "access/transam.h"
#include "executor/executor.h"
#include "fmgr.h"
#include "nodes/execnodes.h"
#include "storage/procarray.h"
#include "utils/builtins.h"
#include "utils/fmgroids.h"
#include "utils/timestamp.h"

#include "compat.h"
#include "protocol/blocked_by.h"

/* Reads one row of pg_prepared_xact().  False: it is of another transaction. */
static bool
read_prepared(HeapTupleHeader row, TransactionId xid, IdemRunner *runner)
{
	bool		isnull;

	if (DatumGetTransactionId(GetAttributeByName(row, "transaction", &isnull)) != xid)
		return false;
	runner->gid = TextDatumGetCString(GetAttributeByName(row, "gid", &isnull));
	runner->since = DatumGetTimestampTz(GetAttributeByName(row, "prepared", &isnull));
	return true;
}

/*
 * Calls the function behind pg_prepared_xacts, by its OID: the server has no other interface
 * to the gids.
 */
static bool
find_prepared(TransactionId xid, IdemRunner *runner)
{
	/* cppcheck-suppress unusedStructMember ; the macro's union, for its size */
	LOCAL_FCINFO(fcinfo, 0);
	FmgrInfo	function;
	ReturnSetInfo rsinfo = {
		.type = T_ReturnSetInfo,
		.econtext = CreateStandaloneExprContext(),
		.allowedModes = SFRM_ValuePerCall,
		.returnMode = SFRM_ValuePerCall
	};
	bool		found = false;

	fmgr_info(F_PG_PREPARED_XACT, &function);
	InitFunctionCallInfoData(*fcinfo, &function, 0, InvalidOid, NULL,
							 (Node *) &rsinfo);
	while (!found)
	{
		Datum		row;

		fcinfo->isnull = false;
		rsinfo.isDone = ExprSingleResult;
		row = FunctionCallInvoke(fcinfo);
		/* cppcheck-suppress knownConditionTrueFalse ; the function sets it */
		if (rsinfo.isDone != ExprMultipleResult)
			break;
		found = read_prepared(DatumGetHeapTupleHeader(row), xid, runner);
	}
	FreeExprContext(rsinfo.econtext, true);
	return found;
}

bool
idem_find_runner(TransactionId xid, IdemRunner *runner)
{
	TransactionId top;

	*runner = (IdemRunner) {.since = DT_NOBEGIN};
	/* What runs is not older than our snapshot's xmin, below which pg_subtrans is gone. */
	if (!TransactionIdIsInProgress(xid))
		return false;
	top = SubTransGetTopmostTransaction(xid);
	runner->pid = BackendXidGetPid(top);
	if (runner->pid != 0)
		runner->since = idem_transaction_begin(runner->pid);
	else if (!find_prepared(top, runner))
		return false;
	/* The pid differs if the transaction was prepared while we looked. */
	return TransactionIdIsInProgress(xid) &&
		BackendXidGetPid(top) == runner->pid;
}

/* In whole seconds */
static char *
time_to_string(TimestampTz time, bool round_up)
{
	if (!TIMESTAMP_NOT_FINITE(time))
	{
		if (round_up)
			time += USECS_PER_SEC - 1;
		time -= time % USECS_PER_SEC;
	}
	return pstrdup(timestamptz_to_str(time));
}

static char *
transaction_to_string(TransactionId xid)
{
	IdemRunner	runner;

	if (!idem_find_runner(xid, &runner))
		return pstrdup("Its holder is gone by now.");
	if (runner.gid != NULL)
		return psprintf("Prepared transaction \"%s\" holds it, since %s.",
						runner.gid, time_to_string(runner.since, false));
	if (runner.since == DT_NOBEGIN)
		return psprintf("Process %d holds it.", runner.pid);
	return psprintf("Process %d holds it, in a transaction that began at %s.",
					runner.pid, time_to_string(runner.since, false));
}

char *
idem_blocked_by_to_string(const IdemBlockedBy *blocked_by)
{
	if (TransactionIdIsValid(blocked_by->xid))
		return transaction_to_string(blocked_by->xid);
	if (blocked_by->changed != NULL)
		return psprintf("A transaction that changes %s holds it up.",
						blocked_by->changed);
	/* The lease does not end before the time that is told. */
	if (blocked_by->lease_until != 0)
		return psprintf("A lease holds it until %s.",
						time_to_string(blocked_by->lease_until, true));
	return NULL;
}
