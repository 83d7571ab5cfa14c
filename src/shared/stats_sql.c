/*
 * stats_sql.c
 *	  The statistics of this database as SQL functions.
 *
 * They return plain counters; the views idem_stat_cleanup, idem_stat_claims, idem_stat_scopes
 * and idem_metrics present them (sql/idem/statistics.sql).
 */
#include "postgres.h"

#include "access/htup_details.h"
#include "catalog/pg_type_d.h"
#include "common/int.h"
#include "fmgr.h"
#include "funcapi.h"
#include "utils/array.h"
#include "utils/builtins.h"
#include "utils/lsyscache.h"
#include "utils/timestamp.h"
#include "utils/tuplestore.h"

#include "shared/databases.h"
#include "shared/memory.h"
#include "shared/scope_stats.h"
#include "shared/stats.h"

PG_FUNCTION_INFO_V1(idem__stat_cleanup_counters);
PG_FUNCTION_INFO_V1(idem__stat_claims_counters);
PG_FUNCTION_INFO_V1(idem__stat_scopes_counters);
PG_FUNCTION_INFO_V1(idem__stat_launcher);
PG_FUNCTION_INFO_V1(idem_stat_reset);

/* How long the oldest expired claim has been expired; 0: none has expired. */
static Datum
oldest_expired_age(const IdemCleanupStats *stats)
{
	TimestampTz now = GetCurrentTimestamp();
	Interval   *age = palloc0(sizeof(Interval));

	/* A row that was inserted by hand can have expired at -infinity. */
	if (stats->oldest < now &&
		pg_sub_s64_overflow(now, stats->oldest, &age->time))
		age->time = PG_INT64_MAX;
	return DirectFunctionCall1(interval_justify_hours, IntervalPGetDatum(age));
}

static Datum
make_array(Datum *elements, int number, Oid type)
{
	int16		length;
	bool		by_value;
	char		alignment;

	get_typlenbyvalalign(type, &length, &by_value, &alignment);
	return PointerGetDatum(construct_array(elements, number, type, length,
										   by_value, alignment));
}

static Datum
make_row(FunctionCallInfo fcinfo, int columns, Datum *values, bool *nulls)
{
	TupleDesc	desc;

	if (get_call_result_type(fcinfo, NULL, &desc) != TYPEFUNC_COMPOSITE ||
		desc->natts != columns)
		elog(ERROR, "return type must be a row type of %d columns", columns);
	return HeapTupleGetDatum(heap_form_tuple(BlessTupleDesc(desc), values,
											 nulls));
}

/* idem__stat_cleanup_counters() */
Datum
idem__stat_cleanup_counters(PG_FUNCTION_ARGS)
{
	enum
	{
		ROWS_DELETED, BATCHES, LAST_SECONDS, TOTAL_SECONDS, MAX_SECONDS,
		OLDEST_EXPIRED_AGE, BACKLOG, ROWS_UNKNOWN, LAST_RUN, ERRORS, LAST_ERROR,
		LAST_ERROR_AT, WORKER_PIDS, STATS_RESET, BUCKET_BOUNDS, BUCKETS,
		SHARED_MEMORY, COLUMNS
	};
	IdemDatabase *slot = idem_require_own_database();
	IdemCleanupStats stats;
	Datum		values[COLUMNS] = {0};
	bool		nulls[COLUMNS];
	Datum		pid;
	Datum		bounds[IDEM_DURATION_BUCKETS];
	Datum		buckets[IDEM_DURATION_BUCKETS];

	memset(nulls, true, sizeof(nulls));
	if (slot != NULL)
	{
		idem_stats_read(slot, &stats);
		pid = Int32GetDatum(stats.worker_pid);
		for (int i = 0; i < IDEM_DURATION_BUCKETS; i++)
		{
			bounds[i] = Float8GetDatum(idem_duration_bounds[i]);
			buckets[i] = Int64GetDatum(stats.counters.buckets[i]);
		}
		memset(nulls, false, sizeof(nulls));
		values[ROWS_DELETED] = Int64GetDatum(stats.counters.rows_deleted);
		values[BATCHES] = Int64GetDatum(stats.counters.batches);
		values[LAST_SECONDS] = Float8GetDatum(stats.counters.last_seconds);
		values[TOTAL_SECONDS] = Float8GetDatum(stats.counters.total_seconds);
		values[MAX_SECONDS] = Float8GetDatum(stats.counters.max_seconds);
		values[OLDEST_EXPIRED_AGE] = oldest_expired_age(&stats);
		nulls[OLDEST_EXPIRED_AGE] = (stats.oldest == DT_NOEND);
		values[BACKLOG] = BoolGetDatum(stats.backlog);
		values[ROWS_UNKNOWN] = Int64GetDatum(stats.marks.rows_unknown);
		values[LAST_RUN] = TimestampTzGetDatum(stats.counters.last_run);
		nulls[LAST_RUN] = (stats.counters.last_run == IDEM_STATS_NEVER);
		values[ERRORS] = Int64GetDatum(stats.errors);
		values[LAST_ERROR] = CStringGetTextDatum(stats.last_error);
		nulls[LAST_ERROR] = (stats.errors == 0);
		values[LAST_ERROR_AT] = TimestampTzGetDatum(stats.last_error_at);
		nulls[LAST_ERROR_AT] = (stats.last_error_at == IDEM_STATS_NEVER);
		values[WORKER_PIDS] = make_array(&pid, stats.worker_pid == 0 ? 0 : 1,
											 INT4OID);
		values[STATS_RESET] = TimestampTzGetDatum(stats.reset_at);
		nulls[STATS_RESET] = (stats.reset_at == IDEM_STATS_NEVER);
		values[BUCKET_BOUNDS] = make_array(bounds, IDEM_DURATION_BUCKETS,
											 FLOAT8OID);
		values[BUCKETS] = make_array(buckets, IDEM_DURATION_BUCKETS, INT8OID);
		values[SHARED_MEMORY] = CStringGetTextDatum(
			idem_shared_state == IDEM_SHARED_PRELOADED ? "preloaded" :
			"made on demand: idem is not in shared_preload_libraries");
	}
	return make_row(fcinfo, COLUMNS, values, nulls);
}

/* idem__stat_claims_counters(): the counters of claims in their order, then stats_reset */
Datum
idem__stat_claims_counters(PG_FUNCTION_ARGS)
{
	enum
	{
		STATS_RESET = IDEM_CLAIM_COUNTERS, COLUMNS
	};
	IdemDatabase *slot = idem_require_own_database();
	IdemCleanupStats stats;
	Datum		values[COLUMNS] = {0};
	bool		nulls[COLUMNS];

	memset(nulls, true, sizeof(nulls));
	if (slot != NULL)
	{
		idem_stats_read(slot, &stats);
		memset(nulls, false, sizeof(nulls));
		for (int i = 0; i < IDEM_CLAIM_COUNTERS; i++)
			values[i] = Int64GetDatum((int64) pg_atomic_read_u64(&slot->claims[i]));
		values[IDEM_COUNT_WAIT_US] =
			Float8GetDatum(pg_atomic_read_u64(&slot->claims[IDEM_COUNT_WAIT_US]) / 1e6);
		values[STATS_RESET] = TimestampTzGetDatum(stats.reset_at);
		nulls[STATS_RESET] = (stats.reset_at == IDEM_STATS_NEVER);
	}
	return make_row(fcinfo, COLUMNS, values, nulls);
}

/*
 * idem__stat_scopes_counters(): a row for each scope that is counted by itself, and one
 * without a scope for all others
 */
Datum
idem__stat_scopes_counters(PG_FUNCTION_ARGS)
{
	enum
	{
		SCOPE, ANSWERS, COLUMNS = ANSWERS + IDEM_OUTCOME_COUNT
	};
	ReturnSetInfo *rsinfo = (ReturnSetInfo *) fcinfo->resultinfo;
	IdemDatabase *slot = idem_require_own_database();

	InitMaterializedSRF(fcinfo, 0);
	for (int number = 0; slot != NULL && number < IDEM_SCOPE_NUMBERS; number++)
	{
		uint64		answers[IDEM_OUTCOME_COUNT];
		const char *name;
		int			length;
		Datum		values[COLUMNS] = {0};
		bool		nulls[COLUMNS] = {0};

		if (!idem_scope_read(&slot->scopes, number, answers, &name, &length))
			continue;
		nulls[SCOPE] = name == NULL;
		if (name != NULL)
			values[SCOPE] = PointerGetDatum(cstring_to_text_with_len(name, length));
		for (int i = 0; i < IDEM_OUTCOME_COUNT; i++)
			values[ANSWERS + i] = Int64GetDatum((int64) answers[i]);
		tuplestore_putvalues(rsinfo->setResult, rsinfo->setDesc, values, nulls);
	}
	return (Datum) 0;
}

/* idem__stat_launcher(): the pid of the launcher; NULL: there is none. */
Datum
idem__stat_launcher(PG_FUNCTION_ARGS)
{
	pid_t		pid = 0;

	if (idem_shared_use())
		pid = pg_atomic_read_u32(&idem_shared_databases->launcher_pid);
	if (pid == 0)
		PG_RETURN_NULL();
	PG_RETURN_INT32(pid);
}

/* idem_stat_reset(): zeroes the counters; the state stays. */
Datum
idem_stat_reset(PG_FUNCTION_ARGS)
{
	IdemDatabase *slot = idem_require_own_database();
	TimestampTz now = GetCurrentTimestamp();

	if (slot == NULL)
		PG_RETURN_VOID();
	SpinLockAcquire(&slot->mutex);
	memset(&slot->cleanup.counters, 0, sizeof(slot->cleanup.counters));
	slot->cleanup.errors = 0;
	slot->cleanup.last_error_at = IDEM_STATS_NEVER;
	slot->cleanup.reset_at = now;
	SpinLockRelease(&slot->mutex);
	for (int i = 0; i < IDEM_CLAIM_COUNTERS; i++)
		pg_atomic_write_u64(&slot->claims[i], 0);
	idem_scope_table_reset(&slot->scopes);
	PG_RETURN_VOID();
}
