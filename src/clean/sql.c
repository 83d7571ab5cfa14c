/*
 * sql.c
 *	  Cleanup by a session: idem_cleanup(), and the step of idem_cleanup_all(); and who cleans.
 *
 * The session's transaction publishes its batches when it commits.
 */
#include "postgres.h"

#include "access/htup_details.h"
#include "access/xlog.h"
#include "commands/dbcommands.h"
#include "fmgr.h"
#include "funcapi.h"
#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/timestamp.h"

#include "guc.h"
#include "sqlstate.h"
#include "clean/batch.h"
#include "clean/launcher.h"
#include "clean/state.h"
#include "shared/memory.h"
#include "shared/stats.h"
#include "store/catalog.h"
#include "store/duration.h"

PG_FUNCTION_INFO_V1(idem_cleanup);
PG_FUNCTION_INFO_V1(idem__cleanup_step);
PG_FUNCTION_INFO_V1(idem__stat_cleaning);

/* The argument batch_size; NULL: the setting */
static int
batch_rows_max_arg(FunctionCallInfo fcinfo, int arg)
{
	int32		rows;

	if (PG_ARGISNULL(arg))
		return idem_cleanup_batch_size;
	rows = PG_GETARG_INT32(arg);
	if (rows < 1 || rows > IDEM_CLEANUP_BATCH_ROWS_LIMIT)
		ereport(ERROR,
				(errcode(ERRCODE_IDEM_INVALID),
				 errmsg("batch_size must be between 1 and %d",
						IDEM_CLEANUP_BATCH_ROWS_LIMIT),
				 errdetail("It is %d.", rows),
				 errhint("Leave it out to use idem.cleanup_batch_size.")));
	return rows;
}

/* With no dead_max, a batch passes any number of dead entries: the caller wants rows removed. */
static void
run_batch(const IdemCleanupOrder *order, IdemCleanupBatch *batch)
{
	int64		began_us = idem_monotonic_us();
	uint64		publications;

	(void) idem_stats_begin_batch(&publications);
	idem_cleanup_batch(order, batch);
	batch->report.publications = publications;
	batch->report.seconds = (idem_monotonic_us() - began_us) / 1e6;
	idem_stats_count_cleanup(&batch->report);
}

/*
 * idem_cleanup(batch_size): one batch, returns the number of rows removed.  It does not end before
 * it has removed one, or has seen all: 0 tells the caller that nothing is left that it could
 * remove.
 */
Datum
idem_cleanup(PG_FUNCTION_ARGS)
{
	IdemCleanupOrder order = {
		.start = DT_NOBEGIN,
		.end = DT_NOEND,
		.expired_before = GetCurrentTimestamp(),
		.rows_max = batch_rows_max_arg(fcinfo, 0),
		.pass_all = true
	};
	IdemCleanupBatch batch;

	run_batch(&order, &batch);
	PG_RETURN_INT64(batch.report.rows_deleted);
}

/*
 * idem__cleanup_step(batch_size, start, expired_before): one batch of idem_cleanup_all(),
 * which passes the mark from one batch to the next.  expired_before is the caller's, but no
 * later than now: otherwise a caller could remove a claim before it has expired.
 */
Datum
idem__cleanup_step(PG_FUNCTION_ARGS)
{
	IdemCleanupOrder order = {
		.start = PG_ARGISNULL(1) ? DT_NOBEGIN : PG_GETARG_TIMESTAMPTZ(1),
		.end = DT_NOEND,
		.expired_before = GetCurrentTimestamp(),
		.rows_max = batch_rows_max_arg(fcinfo, 0)
	};
	IdemCleanupBatch batch;
	TupleDesc	desc;
	Datum		values[3];
	bool		nulls[3] = {false, false, false};

	if (get_call_result_type(fcinfo, NULL, &desc) != TYPEFUNC_COMPOSITE)
		elog(ERROR, "return type must be a row type");
	idem_require_columns(desc, lengthof(values));

	if (!PG_ARGISNULL(2))
		order.expired_before = Min(order.expired_before, PG_GETARG_TIMESTAMPTZ(2));
	run_batch(&order, &batch);

	values[0] = Int64GetDatum(batch.report.rows_deleted);
	values[1] = BoolGetDatum(batch.report.more);
	values[2] = TimestampTzGetDatum(batch.next_start);
	PG_RETURN_DATUM(HeapTupleGetDatum(heap_form_tuple(BlessTupleDesc(desc),
													  values, nulls)));
}

/*
 * idem__stat_cleaning(): whether workers clean this database, and why not, for the views and
 * for CREATE EXTENSION.  A session knows idem.cleanup_databases as of its latest reload, and not what the
 * launcher knows.
 */
Datum
idem__stat_cleaning(PG_FUNCTION_ARGS)
{
	const char *refusal;

	if (!idem_shared_use())
		refusal = "idem is not in shared_preload_libraries";
	else if (RecoveryInProgress())
		refusal = "this server is a standby, and the primary cleans";
	else if (!idem_launcher_wants(get_database_name(MyDatabaseId)))
		refusal = "idem.cleanup_databases does not name it";
	else if (idem_shared_state == IDEM_SHARED_PRELOADED)
		PG_RETURN_TEXT_P(cstring_to_text("worker"));
	else if (idem_state_is_started(MyDatabaseId))
		PG_RETURN_TEXT_P(cstring_to_text("worker, until the server stops"));
	else
		refusal = "idem is not in shared_preload_libraries, and idem_start_worker() was not called";
	PG_RETURN_TEXT_P(cstring_to_text(psprintf("no worker for this database: %s",
											  refusal)));
}
