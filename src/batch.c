/*
 * batch.c
 *	  Claiming many requests in one call.
 *
 * The keys are claimed in their order, whatever the order of the arrays, so that
 * two batches that come first in their transactions never wait for each other in
 * a circle.  Equal keys are claimed in the order of the arrays: the first claims,
 * the others are second claims.  The answers come in the order of the arrays.
 */
#include "postgres.h"

#include "catalog/pg_type_d.h"
#include "funcapi.h"
#include "miscadmin.h"
#include "utils/array.h"
#include "utils/builtins.h"
#include "utils/memutils.h"

#include "catalog.h"
#include "claim.h"
#include "key.h"
#include "policy.h"
#include "sqlstate.h"
#include "stats.h"
#include "store.h"
#include "wait.h"

/* One element of the arrays, and its answer */
typedef struct BatchElement
{
	int			ordinal;		/* from 1 */
	bool		valid;
	IdemKey		key;
	bytea	   *fingerprint;	/* NULL: none */
	IdemOutcome outcome;
	Jsonb	   *result;
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
		element->outcome = IDEM_INVALID;
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

static int
compare_ordinals(const void *a, const void *b)
{
	return ((const BatchElement *) a)->ordinal -
		((const BatchElement *) b)->ordinal;
}

static void
claim_element(IdemClaimCall *call, BatchElement *element)
{
	IdemClaimAnswer answer;

	call->key = element->key;
	call->fingerprint = element->fingerprint;
	if (!element->valid ||
		idem_claim_check_key_time(call) != IDEM_KEY_TIME_OK)
	{
		idem_stats_count_outcome(IDEM_INVALID);
		return;
	}
	idem_claim_key(call, &answer);
	element->outcome = answer.outcome;
	element->result = answer.result;
}

static void
return_elements(FunctionCallInfo fcinfo, const BatchElement *elements, int n)
{
	ReturnSetInfo *rsinfo = (ReturnSetInfo *) fcinfo->resultinfo;

	InitMaterializedSRF(fcinfo, 0);
	for (int i = 0; i < n; i++)
	{
		const BatchElement *element = &elements[i];
		Datum		values[3] = {
			Int32GetDatum(element->ordinal),
			ObjectIdGetDatum(idem_catalog()->outcome[element->outcome]),
			PointerGetDatum(element->result)
		};
		bool		nulls[3] = {false, false, element->result == NULL};

		tuplestore_putvalues(rsinfo->setResult, rsinfo->setDesc, values, nulls);
	}
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
	IdemClaimCall call = {0};
	text	   *scope = idem_scope_from_arg(fcinfo, 2);
	BatchElement *elements;
	int			n;

	elements = read_elements(fcinfo, scope, &n);
	call.deadline = idem_deadline_from_arg(fcinfo, 4);
	idem_store_open("idem_claim_many()");
	call.policy = idem_policy(scope);

	qsort(elements, n, sizeof(BatchElement), compare_elements);
	for (int i = 0; i < n; i++)
		claim_element(&call, &elements[i]);
	qsort(elements, n, sizeof(BatchElement), compare_ordinals);
	return_elements(fcinfo, elements, n);
	return (Datum) 0;
}
