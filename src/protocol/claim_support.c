/*
 * claim_support.c
 *	  Refuses a claim in an expression that the server can evaluate twice for one row.
 *
 * UPDATE, DELETE, MERGE and SELECT ... FOR UPDATE evaluate their expressions, and then find
 * that another transaction has changed the row.  They wait for it, and evaluate the
 * expressions again for the new version (EvalPlanQual).  A claim answers "completed" the
 * second time, and the work is never done.  Or the new version no longer matches, and the
 * claim was made for nothing.  With one session neither shows.  So such a statement is
 * refused when it is planned.
 *
 * Evaluated once are: RETURNING, a function in FROM, a WITH query, and a subquery that does
 * not refer to the row.  What the planner cannot see, such as a subquery that refers to the
 * row, is refused when it claims the second time: see idem_own_is_claimed_elsewhere().
 * Neither finds a claim inside a function that is not inlined, such as one in PL/pgSQL.
 */
#include "postgres.h"

#include "fmgr.h"
#include "nodes/nodeFuncs.h"
#include "nodes/pathnodes.h"
#include "nodes/supportnodes.h"
#include "utils/lsyscache.h"

PG_FUNCTION_INFO_V1(idem__claim_support);

/* Whether the expression calls a claim function, its subqueries left out.  All claim
 * functions, those for ids of other types too, have the same support function. */
static bool
calls_claim(Node *node, void *support)
{
	if (node == NULL || IsA(node, Query))
		return false;
	if (IsA(node, FuncExpr) &&
		get_func_support(((FuncExpr *) node)->funcid) == *(RegProcedure *) support)
		return true;
	return expression_tree_walker(node, calls_claim, support);
}

/* A claim that is in none of these places comes from a function in SQL that was inlined. */
static bool
is_evaluated_once(const Query *query, RegProcedure support)
{
	ListCell   *cell;

	if (calls_claim((Node *) query->targetList, &support) ||
		calls_claim((Node *) query->jointree, &support) ||
		calls_claim((Node *) query->mergeActionList, &support))
		return false;
	if (calls_claim((Node *) query->returningList, &support))
		return true;
	foreach(cell, query->rtable)
		if (calls_claim((Node *) lfirst_node(RangeTblEntry, cell)->functions,
						&support))
			return true;
	return false;
}

static const char *
name_of_statement(const Query *query)
{
	switch (query->commandType)
	{
		case CMD_UPDATE:
			return "UPDATE";
		case CMD_DELETE:
			return "DELETE";
		case CMD_MERGE:
			return "MERGE";
		default:
			return query->rowMarks != NIL ? "SELECT ... FOR UPDATE" : NULL;
	}
}

/* The planner support function of the claim functions */
Datum
idem__claim_support(PG_FUNCTION_ARGS)
{
	Node	   *request = (Node *) PG_GETARG_POINTER(0);
	SupportRequestSimplify *call = (SupportRequestSimplify *) request;
	const char *statement;

	if (!IsA(request, SupportRequestSimplify) || call->root == NULL)
		PG_RETURN_POINTER(NULL);
	statement = name_of_statement(call->root->parse);
	if (statement != NULL &&
		!is_evaluated_once(call->root->parse,
						   get_func_support(call->fcall->funcid)))
		ereport(ERROR,
				(errcode(ERRCODE_FEATURE_NOT_SUPPORTED),
				 errmsg("cannot claim a request in an expression of %s", statement),
				 errdetail("If another transaction changes the row meanwhile, the server evaluates the expression again, and the second claim answers that the request was executed."),
				 errhint("Find and lock the rows first, then claim them one by one in a loop, and do the work for those claimed. Or claim in a WITH query.")));
	PG_RETURN_POINTER(NULL);
}
