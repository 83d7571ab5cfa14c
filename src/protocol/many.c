/*
 * many.c
 *	  Claiming many requests in one call.
 *
 * The keys are claimed in the order of the keys, not of the arrays.  So two batches that come
 * first in their transactions never deadlock on each other.  Equal keys are claimed in the
 * order of the arrays: the first one claims, the others are second claims.  The answers come
 * in the order of the arrays.  They carry stored results, which can be large, so they are
 * sorted within work_mem.
 *
 * A batch claims in slices.  The first promise locks the policies; between two slices the
 * batch gives that lock up, and a change of idem_scopes that waits for it goes first.  So the
 * change waits for one slice at most, however large the batch is, and the rest of the batch
 * goes by the new policy.
 */
#include "postgres.h"

#include "catalog/pg_operator_d.h"
#include "catalog/pg_type_d.h"
#include "executor/tuptable.h"
#include "funcapi.h"
#include "miscadmin.h"
#include "utils/array.h"
#include "utils/memutils.h"
#include "utils/tuplesort.h"
#include "utils/tuplestore.h"

#include "sqlstate.h"
#include "protocol/claim.h"
#include "shared/stats.h"
#include "store/catalog.h"

/* More elements would need arrays of more than a gigabyte, which the server does not allocate. */
#define BATCH_MAX 10000000

/* A slice ends after this many keys, but not in the middle of a group that is claimed
 * together: it can have nearly twice as many. */
#define SLICE_KEYS 1000

/*
 * The answers in the order of the arrays.  Only those with a stored result are sorted: if
 * all were, figure 4 of the benchmark (batches of 10,000 keys) would take 20 % longer.
 */
typedef struct BatchAnswers
{
	IdemOutcome *outcome;
	bool	   *has_result;
	Tuplesortstate *results;	/* the answers that have one */
	TupleTableSlot *slot;
} BatchAnswers;

PG_FUNCTION_INFO_V1(idem_claim_many);

static void
raise_bad_arrays(const char *message)
{
	ereport(ERROR,
			(errcode(ERRCODE_IDEM_INVALID),
			 errmsg("%s", message),
			 errhint("Fix the client: pass one-dimensional arrays of the same length, one element a request.")));
}

static void
deconstruct(FunctionCallInfo fcinfo, int arg, Oid type, Datum **values,
			bool **nulls, int *n)
{
	ArrayType  *array;

	if (PG_ARGISNULL(arg))
		raise_bad_arrays("user_ids and request_ids must not be null");
	array = PG_GETARG_ARRAYTYPE_P(arg);
	if (ARR_NDIM(array) > 1)
		raise_bad_arrays("arrays must have one dimension");
	if (ArrayGetNItems(ARR_NDIM(array), ARR_DIMS(array)) > BATCH_MAX)
		ereport(ERROR,
				(errcode(ERRCODE_IDEM_INVALID),
				 errmsg("more than %d requests in one call", BATCH_MAX),
				 errhint("Fix the client: pass them in several calls.")));
	deconstruct_array(array, type, -1, false, TYPALIGN_INT, values, nulls, n);
}

static text *
valid_id(Datum value, bool isnull)
{
	text	   *id = isnull ? NULL : DatumGetTextPP(value);

	return id != NULL && idem_id_is_valid(id) ? id : NULL;
}

/* Arguments: user_ids, request_ids, scope, fingerprints.  They have n elements; returns the
 * valid ones, nvalid of them. */
static IdemClaimItem *
read_items(FunctionCallInfo fcinfo, text *scope, int *n, int *nvalid)
{
	Datum	   *users,
			   *requests,
			   *fingerprints = NULL;
	bool	   *no_user,
			   *no_request,
			   *no_fingerprint = NULL;
	int			nrequests,
				nfingerprints;
	IdemClaimItem *items;

	deconstruct(fcinfo, 0, TEXTOID, &users, &no_user, n);
	deconstruct(fcinfo, 1, TEXTOID, &requests, &no_request, &nrequests);
	nfingerprints = *n;
	if (!PG_ARGISNULL(3))
		deconstruct(fcinfo, 3, BYTEAOID, &fingerprints, &no_fingerprint,
					&nfingerprints);
	if (nrequests != *n || nfingerprints != *n)
		raise_bad_arrays("arrays must have the same length");

	items = palloc(Max(*n, 1) * sizeof(IdemClaimItem));
	*nvalid = 0;
	for (int i = 0; i < *n; i++)
	{
		IdemClaimItem *item = &items[*nvalid];

		item->ordinal = i + 1;
		item->key.scope = scope;
		item->key.user_id = valid_id(users[i], no_user[i]);
		item->key.request_id = valid_id(requests[i], no_request[i]);
		item->fingerprint = NULL;
		if (fingerprints != NULL && !no_fingerprint[i])
			item->fingerprint = DatumGetByteaPP(fingerprints[i]);
		if (item->key.user_id != NULL && item->key.request_id != NULL &&
			(item->fingerprint == NULL ||
			 idem_fingerprint_is_valid(item->fingerprint)))
			(*nvalid)++;
	}
	return items;
}

/* The order of claiming */
static inline int
compare_items(const IdemClaimItem *a, const IdemClaimItem *b)
{
	int			order = idem_store_compare_keys(&a->key, &b->key);

	return order != 0 ? order : a->ordinal - b->ordinal;
}

#define ST_SORT sort_items
#define ST_ELEMENT_TYPE IdemClaimItem
#define ST_COMPARE(a, b) compare_items(a, b)
#define ST_SCOPE static
#define ST_DEFINE
#include "lib/sort_template.h"

static void
put_row(TupleTableSlot *slot, int ordinal, IdemOutcome outcome,
		const Jsonb *result)
{
	ExecClearTuple(slot);
	memset(slot->tts_isnull, 0, 3 * sizeof(bool));
	slot->tts_values[0] = Int32GetDatum(ordinal);
	slot->tts_values[1] = ObjectIdGetDatum(idem_catalog()->outcome[outcome]);
	slot->tts_values[2] = PointerGetDatum(result);
	slot->tts_isnull[2] = result == NULL;
	ExecStoreVirtualTuple(slot);
}

/* At first all answers are "invalid": those of valid elements are put later. */
static void
begin_answers(BatchAnswers *answers, int n, TupleDesc desc)
{
	AttrNumber	ordinal = 1;
	Oid			ascending = Int4LessOperator;
	Oid			no_collation = InvalidOid;
	bool		nulls_first = false;

	answers->outcome = palloc(Max(n, 1) * sizeof(IdemOutcome));
	for (int i = 0; i < n; i++)
		answers->outcome[i] = IDEM_INVALID;
	answers->has_result = palloc0(Max(n, 1) * sizeof(bool));
	answers->results = tuplesort_begin_heap(desc, 1, &ordinal, &ascending,
											&no_collation, &nulls_first,
											work_mem, NULL, TUPLESORT_NONE);
	answers->slot = MakeSingleTupleTableSlot(desc, &TTSOpsVirtual);
}

static void
return_answers(BatchAnswers *answers, const text *scope, int n,
			   ReturnSetInfo *rsinfo)
{
	TupleTableSlot *result = MakeSingleTupleTableSlot(rsinfo->setDesc,
													  &TTSOpsMinimalTuple);

	tuplesort_performsort(answers->results);
	for (int i = 0; i < n; i++)
	{
		TupleTableSlot *slot = result;

		if (answers->outcome[i] == IDEM_INVALID)
			idem_stats_count_outcome(scope, IDEM_INVALID);
		if (!answers->has_result[i])
		{
			slot = answers->slot;
			put_row(slot, i + 1, answers->outcome[i], NULL);
		}
		else if (!tuplesort_gettupleslot(answers->results, true, false, slot,
										 NULL))
			elog(ERROR, "a stored result is missing");
		tuplestore_puttupleslot(rsinfo->setResult, slot);
	}
	ExecDropSingleTupleTableSlot(result);
	ExecDropSingleTupleTableSlot(answers->slot);
	tuplesort_end(answers->results);
}

static void
put_answer(BatchAnswers *answers, const IdemClaimItem *item,
		   const IdemClaimAnswer *answer)
{
	int			ordinal = item->ordinal;

	Assert(answers->outcome[ordinal - 1] == IDEM_INVALID);
	answers->outcome[ordinal - 1] = answer->outcome;
	if (answer->result == NULL)
		return;
	answers->has_result[ordinal - 1] = true;
	put_row(answers->slot, ordinal, answer->outcome, answer->result);
	tuplesort_puttupleslot(answers->results, answers->slot);
}

/* Claims the items in their order, and frees what each claim allocates. */
static void
claim_items(IdemClaimCall *call, const IdemClaimItem *items, int nitems,
			BatchAnswers *answers)
{
	IdemClaimAnswer *some = palloc(IDEM_INSERT_MANY_MAX *
								   sizeof(IdemClaimAnswer));
	MemoryContext one = AllocSetContextCreate(CurrentMemoryContext,
											  "idem batch elements",
											  ALLOCSET_DEFAULT_SIZES);
	MemoryContext caller = MemoryContextSwitchTo(one);
	int			slice_keys = 0;
	int			nanswered;

	for (int i = 0; i < nitems; i += nanswered)
	{
		nanswered = idem_claim_first_keys(call, &items[i], nitems - i, some);
		slice_keys += nanswered;
		/* Only the last answer can have a result, and sorting a large one can take long. */
		if (slice_keys >= SLICE_KEYS || some[nanswered - 1].result != NULL)
		{
			idem_claim_end(call);
			slice_keys = 0;
		}
		for (int j = 0; j < nanswered; j++)
			put_answer(answers, &items[i + j], &some[j]);
		MemoryContextReset(one);
	}
	MemoryContextSwitchTo(caller);
	MemoryContextDelete(one);
}

/*
 * idem_claim_many(user_ids, request_ids, scope, fingerprints, wait) ->
 *		setof (ordinal, outcome, result)
 *
 * Never raises an outcome.  One deadline for all of them.
 */
Datum
idem_claim_many(PG_FUNCTION_ARGS)
{
	ReturnSetInfo *rsinfo = (ReturnSetInfo *) fcinfo->resultinfo;
	IdemClaimCall call = {.place = fcinfo->flinfo};
	text	   *scope;
	IdemClaimItem *items;
	int			n;
	int			nvalid;
	BatchAnswers answers;

	call.deadline = idem_deadline_from_arg(fcinfo, 4);
	idem_deadline_begin(&call.deadline);
	scope = idem_scope_from_arg(fcinfo, 2);
	items = read_items(fcinfo, scope, &n, &nvalid);
	sort_items(items, nvalid);

	InitMaterializedSRF(fcinfo, 0);
	idem_require_columns(rsinfo->setDesc, 3);
	idem_store_open("idem_claim_many()");
	begin_answers(&answers, n, rsinfo->setDesc);
	claim_items(&call, items, nvalid, &answers);
	idem_claim_end(&call);
	return_answers(&answers, scope, n, rsinfo);
	return (Datum) 0;
}
