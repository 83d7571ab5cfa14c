/*
 * lookup.c
 *	  Reading: what the latest claim call answered, and what is stored of a key.
 *
 * Nothing here writes, so it works in read-only transactions and on a standby.
 * Stored claims are read by the caller's snapshot, like a table in a query.
 */
#include "postgres.h"

#include "access/commit_ts.h"
#include "access/xlog.h"
#include "funcapi.h"
#include "utils/jsonb.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"
#include "utils/tuplestore.h"

#include "session/own_claims.h"
#include "store/catalog.h"
#include "store/policy.h"
#include "store/store.h"

#define LOOKUP_COLUMNS 7

PG_FUNCTION_INFO_V1(idem_result_latest);
PG_FUNCTION_INFO_V1(idem_result);
PG_FUNCTION_INFO_V1(idem_outcome_latest);
PG_FUNCTION_INFO_V1(idem_status);
PG_FUNCTION_INFO_V1(idem_lookup);

static const IdemLatest *
require_latest(const char *command)
{
	const IdemLatest *latest = idem_own_latest_answer();

	if (latest == NULL)
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("%s: no claim was made in this transaction", command),
				 errhint("Claim first, in the same transaction; or read what is stored: idem_result(user_id, request_id), idem_status(user_id, request_id).")));
	return latest;
}

/* idem_result() -> jsonb */
Datum
idem_result_latest(PG_FUNCTION_ARGS)
{
	const IdemLatest *latest = require_latest("idem_result()");

	if (latest->result == NULL)
		PG_RETURN_NULL();
	/* A copy, since the next claim call overwrites the result. */
	PG_RETURN_POINTER(PG_DETOAST_DATUM_COPY(PointerGetDatum(latest->result)));
}

/* idem_outcome() -> idem_outcome */
Datum
idem_outcome_latest(PG_FUNCTION_ARGS)
{
	const IdemLatest *latest = require_latest("idem_outcome()");

	PG_RETURN_OID(idem_catalog()->outcome[latest->outcome]);
}

/* To a claim, an expired row of a scope with expired = reclaim is absent: here too. */
static bool
fetch_as_claim_sees(const IdemKey *key, int wanted, IdemRow *row)
{
	IdemPolicy	policy = idem_policy(key->scope);

	return idem_store_fetch(key, GetActiveSnapshot(), wanted, row) &&
		!idem_policy_ignores_row(&policy, row->state, row->lease_until,
								 row->expires_at);
}

/* idem_result(user_id, request_id, scope) -> jsonb */
Datum
idem_result(PG_FUNCTION_ARGS)
{
	IdemKey		key;
	IdemRow		row;

	idem_key_from_args(fcinfo, 0, 1, 2, &key);
	if (!fetch_as_claim_sees(&key, IDEM_RESULT, &row) || row.result == NULL)
		PG_RETURN_NULL();
	PG_RETURN_POINTER(row.result);
}

static IdemOutcome
outcome_of_row(const IdemKey *key, const IdemRow *row)
{
	switch (row->state)
	{
		case IDEM_STATE_IN_PROGRESS:
			if (row->lease_until <= GetCurrentTimestamp() &&
				idem_policy(key->scope).lapsed_unknown)
				return IDEM_UNKNOWN;
			return IDEM_IN_PROGRESS;
		case IDEM_STATE_COMPLETED:
			return IDEM_COMPLETED;
		case IDEM_STATE_FAILED:
			return IDEM_FAILED;
	}
	pg_unreachable();
}

/* idem_status(user_id, request_id, scope) -> idem_outcome, NULL: no claim */
Datum
idem_status(PG_FUNCTION_ARGS)
{
	IdemKey		key;
	IdemRow		row;

	idem_key_from_args(fcinfo, 0, 1, 2, &key);
	if (!fetch_as_claim_sees(&key, 0, &row))
		PG_RETURN_NULL();
	PG_RETURN_OID(idem_catalog()->outcome[outcome_of_row(&key, &row)]);
}

/*
 * False: the server does not know.  It tracks the commits of some time only, and none of a
 * transaction that runs; and a frozen row does not tell who wrote it.  On a standby, asking raises
 * an error if the primary does not track commits, and no function tells beforehand.
 */
static bool
find_commit(TransactionId xid, TimestampTz *committed_at)
{
	return track_commit_timestamp && !RecoveryInProgress() &&
		TransactionIdGetCommitTsData(xid, committed_at, NULL);
}

/* idem_lookup(user_id, request_id, scope) -> the row but its token, when it was committed; or
 * none */
Datum
idem_lookup(PG_FUNCTION_ARGS)
{
	ReturnSetInfo *rsinfo = (ReturnSetInfo *) fcinfo->resultinfo;
	Datum		values[LOOKUP_COLUMNS];
	bool		nulls[LOOKUP_COLUMNS] = {false};
	IdemKey		key;
	IdemRow		row;
	TimestampTz committed_at;

	idem_key_from_args(fcinfo, 0, 1, 2, &key);
	InitMaterializedSRF(fcinfo, 0);
	idem_require_columns(rsinfo->setDesc, LOOKUP_COLUMNS);
	if (!idem_store_fetch(&key, GetActiveSnapshot(),
						  IDEM_FINGERPRINT | IDEM_RESULT | IDEM_PROGRESS, &row))
		return (Datum) 0;

	values[0] = ObjectIdGetDatum(idem_catalog()->state[row.state]);
	values[1] = TimestampTzGetDatum(row.expires_at);
	values[2] = TimestampTzGetDatum(row.lease_until);
	nulls[2] = row.lease_until == IDEM_NO_TIME;
	values[3] = PointerGetDatum(row.fingerprint);
	nulls[3] = row.fingerprint == NULL;
	values[4] = PointerGetDatum(row.result);
	nulls[4] = row.result == NULL;
	values[5] = PointerGetDatum(row.progress);
	nulls[5] = row.progress == NULL;
	nulls[6] = !find_commit(row.writer, &committed_at);
	if (!nulls[6])
		values[6] = TimestampTzGetDatum(committed_at);
	tuplestore_putvalues(rsinfo->setResult, rsinfo->setDesc, values, nulls);
	return (Datum) 0;
}
