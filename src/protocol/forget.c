/*
 * forget.c
 *	  What an operator takes away from a request: its row, or only what was stored in it.
 */
#include "postgres.h"

#include "protocol/find_row.h"
#include "session/own_claims.h"

PG_FUNCTION_INFO_V1(idem_forget);
PG_FUNCTION_INFO_V1(idem__erase);

/* idem_forget(user_id, request_id, scope) -> boolean; false: there was no row */
Datum
idem_forget(PG_FUNCTION_ARGS)
{
	IdemRowCall	call = {0};
	bool		dropped;

	idem_key_from_args(fcinfo, 0, 1, 2, &call.key);
	idem_store_open("idem_forget()");
	while ((dropped = idem_find_row(&call)) &&
		   !idem_store_delete(&call.found))
		idem_wait_for_row_or_raise(&call);
	if (dropped)
	{
		idem_own_note_settled(&call.key, NULL);
		if (call.found.row.token != 0)
			idem_commit_lease(&call.key);
	}
	PG_RETURN_BOOL(dropped);
}

/*
 * idem__erase(user_id, request_id, scope) -> boolean
 *
 * The result, error and progress of a settled request become NULL; all else stays, so it still
 * guards the request.  false: it is in progress.  A request that is gone has nothing left.
 */
Datum
idem__erase(PG_FUNCTION_ARGS)
{
	IdemRowCall	call = {0};
	IdemRow    *row = &call.found.row;

	idem_key_from_args(fcinfo, 0, 1, 2, &call.key);
	idem_store_open("idem_erase()");
	while (idem_find_row(&call))
	{
		if (row->state == IDEM_STATE_IN_PROGRESS)
			PG_RETURN_BOOL(false);
		if (row->result == NULL && row->progress == NULL)
			break;
		row->result = row->progress = NULL;
		if (idem_store_update(&call.key, &call.found, row))
			break;
		idem_wait_for_row_or_raise(&call);
	}
	PG_RETURN_BOOL(true);
}
