/*
 * ids.c
 *	  Claims whose ids have other types than text, where a function in SQL could not be inlined.
 *
 * The functions for ids of other types are in SQL, and the planner replaces them by the one for
 * text.  It does not do so where the result is a row.  Then each call would be a statement of
 * its own, and a claim that the server evaluates twice would not be recognized:
 * idem_own_is_claimed_elsewhere().  So these are in C.
 */
#include "postgres.h"

#include "catalog/pg_type_d.h"
#include "utils/builtins.h"
#include "utils/lsyscache.h"

#include "protocol/claim.h"

PG_FUNCTION_INFO_V1(idem_try_claim_ids);
PG_FUNCTION_INFO_V1(idem_lease_ids);

/* Calls it with the first two arguments as text.  They are not changed in place: the executor
 * sets constants only once. */
static Datum
call_with_text(PGFunction function, FunctionCallInfo fcinfo)
{
	LOCAL_FCINFO(call, FUNC_MAX_ARGS);
	Oid		   *types;
	int			ntypes;
	Oid			output;
	bool		is_varlena;

	(void) get_func_signature(fcinfo->flinfo->fn_oid, &types, &ntypes);
	InitFunctionCallInfoData(*call, fcinfo->flinfo, fcinfo->nargs,
							 fcinfo->fncollation, fcinfo->context,
							 fcinfo->resultinfo);
	memcpy(call->args, fcinfo->args, fcinfo->nargs * sizeof(NullableDatum));
	for (int i = 0; i < 2; i++)
		if (!call->args[i].isnull && types[i] != TEXTOID)
		{
			getTypeOutputInfo(types[i], &output, &is_varlena);
			call->args[i].value =
				CStringGetTextDatum(OidOutputFunctionCall(output,
														  call->args[i].value));
		}
	return function(call);
}

Datum
idem_try_claim_ids(PG_FUNCTION_ARGS)
{
	return call_with_text(idem_try_claim, fcinfo);
}

Datum
idem_lease_ids(PG_FUNCTION_ARGS)
{
	return call_with_text(idem_lease, fcinfo);
}
