/*
 * batch.c
 *	  Claiming many requests in one call.
 *
 * The keys are claimed in their order, whatever the order of the arrays, so that
 * two batches that come first in their transactions never wait for each other in
 * a circle.  Equal keys are claimed in the order of the arrays: the first claims,
 * the others are second claims.  The answers come in the order of the arrays: they
 * carry stored results, which can be large, so they are sorted within work_mem.
 */
#include "postgres.h"

#include "catalog/pg_operator_d.h"
#include "catalog/pg_type_d.h"
#include "executor/tuptable.h"
#include "funcapi.h"
#include "miscadmin.h"
#include "utils/array.h"
#include "utils/builtins.h"
#include "utils/memutils.h"
#include "utils/tuplesort.h"

#include "catalog.h"
#include "claim.h"
#include "key.h"
#include "policy.h"
#include "sqlstate.h"
#include "stats.h"
#include "store.h"
#include "wait.h"

/* One element of the arrays */
typedef struct BatchElement
{
	int			ordinal;		/* from 1 */
	bool		valid;
	IdemKey		key;
	bytea	   *fingerprint;	/* NULL: none */
} BatchElement;

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
	deconstruct_array(array, type, -1, false, TYPALIGN_INT, values, nulls, n);
}

static text *
valid_id(Datum value, bool isnull)
{
	text	   *id = isnull ? NULL : DatumGetTextPP(value);

	return id != NULL && idem_id_is_valid(id) ? id : NULL;
}

/* Arguments: user_ids, request_ids, scope, fingerprints. */
static BatchElement *
read_elements(FunctionCallInfo fcinfo, text *scope, int *n)
{
	Datum	   *users,
			   *requests,
			   *fingerprints = NULL;
	bool	   *no_user,
			   *no_request,
			   *no_fingerprint = NULL;
	int			nrequests,
				nfingerprints;
	BatchElement *elements;

	deconstruct(fcinfo, 0, TEXTOID, &users, &no_user, n);
	deconstruct(fcinfo, 1, TEXTOID, &requests, &no_request, &nrequests);
	nfingerprints = *n;
	if (!PG_ARGISNULL(3))
		deconstruct(fcinfo, 3, BYTEAOID, &fingerprints, &no_fingerprint,
					&nfingerprints);
	if (nrequests != *n || nfingerprints != *n)
		raise_bad_arrays("arrays must have the same length");

	elements = palloc0(Max(*n, 1) * sizeof(BatchElement));
	for (int i = 0; i < *n; i++)
	{
		BatchElement *element = &elements[i];

		element->ordinal = i + 1;
		element->key.scope = scope;
		element->key.user_id = valid_id(users[i], no_user[i]);
		element->key.request_id = valid_id(requests[i], no_request[i]);
		if (fingerprints != NULL && !no_fingerprint[i])
			element->fingerprint = DatumGetByteaPP(fingerprints[i]);
		element->valid = element->key.user_id != NULL &&
			element->key.request_id != NULL &&
			(element->fingerprint == NULL ||
			 idem_fingerprint_is_valid(element->fingerprint));
	}
	return elements;
}

/* The order of claiming; elements that are not valid come first. */
static int
compare_elements(const void *a, const void *b)
{
	const BatchElement *x = a;
	const BatchElement *y = b;
	int			order = (int) x->valid - (int) y->valid;

	if (order == 0 && x->valid)
		order = idem_key_compare(&x->key, &y->key);
	return order != 0 ? order : x->ordinal - y->ordinal;
}

static void
claim_element(IdemClaimCall *call, const BatchElement *element,
			  IdemClaimAnswer *answer)
{
	memset(answer, 0, sizeof(*answer));
	answer->outcome = IDEM_INVALID;
	call->key = element->key;
	call->fingerprint = element->fingerprint;
	if (element->valid)
		idem_claim_key(call, answer);
	if (answer->outcome == IDEM_INVALID)
		idem_stats_count_outcome(IDEM_INVALID);
}

static void
put_answer(Tuplesortstate *answers, TupleTableSlot *slot, int ordinal,
		   const IdemClaimAnswer *answer)
{
	ExecClearTuple(slot);
	memset(slot->tts_isnull, 0, 3 * sizeof(bool));
	slot->tts_values[0] = Int32GetDatum(ordinal);
	slot->tts_values[1] =
		ObjectIdGetDatum(idem_catalog()->outcome[answer->outcome]);
	slot->tts_values[2] = PointerGetDatum(answer->result);
	slot->tts_isnull[2] = answer->result == NULL;
	ExecStoreVirtualTuple(slot);
	tuplesort_puttupleslot(answers, slot);
}

static Tuplesortstate *
begin_answers(TupleDesc desc)
{
	AttrNumber	ordinal = 1;
	Oid			ascending = Int4LessOperator;
	Oid			no_collation = InvalidOid;
	bool		nulls_first = false;

	return tuplesort_begin_heap(desc, 1, &ordinal, &ascending, &no_collation,
								&nulls_first, work_mem, NULL, TUPLESORT_NONE);
}

/* Claims the elements, in their order.  What a claim allocates goes with it. */
static void
claim_elements(IdemClaimCall *call, const BatchElement *elements, int n,
			   Tuplesortstate *answers, TupleTableSlot *slot)
{
	MemoryContext one = AllocSetContextCreate(CurrentMemoryContext,
											  "idem batch element",
											  ALLOCSET_DEFAULT_SIZES);
	MemoryContext caller = MemoryContextSwitchTo(one);

	for (int i = 0; i < n; i++)
	{
		IdemClaimAnswer answer;

		claim_element(call, &elements[i], &answer);
		put_answer(answers, slot, elements[i].ordinal, &answer);
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
	IdemClaimCall call = {0};
	text	   *scope;
	BatchElement *elements;
	int			n;
	Tuplesortstate *answers;
	TupleTableSlot *slot;

	call.deadline = idem_deadline_from_arg(fcinfo, 4);
	scope = idem_scope_from_arg(fcinfo, 2);
	elements = read_elements(fcinfo, scope, &n);
	qsort(elements, n, sizeof(BatchElement), compare_elements);

	InitMaterializedSRF(fcinfo, 0);
	slot = MakeSingleTupleTableSlot(rsinfo->setDesc, &TTSOpsVirtual);
	answers = begin_answers(rsinfo->setDesc);
	idem_claim_begin(&call, "idem_claim_many()");
	claim_elements(&call, elements, n, answers, slot);
	idem_claim_end(&call);
	ExecDropSingleTupleTableSlot(slot);

	tuplesort_performsort(answers);
	slot = MakeSingleTupleTableSlot(rsinfo->setDesc, &TTSOpsMinimalTuple);
	while (tuplesort_gettupleslot(answers, true, false, slot, NULL))
		tuplestore_puttupleslot(rsinfo->setResult, slot);
	ExecDropSingleTupleTableSlot(slot);
	tuplesort_end(answers);
	return (Datum) 0;
}
