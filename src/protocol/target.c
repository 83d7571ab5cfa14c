/*
 * target.c
 *	  The function that idem_call() runs: which one a text such as 'pay(int, numeric)' names,
 *	  which functions it can run, how the arguments get their types, and the run itself.
 *
 * Everything here happens with the rights of the current role, as if that role had called
 * the function in a statement: the executor checks the right to call it, and calls functions
 * that are SECURITY DEFINER, STRICT, or have SET clauses, as they want to be called.
 *
 * idem_target(), the check of the names and the fingerprint run no code of users, so they
 * come before the claim.  Conversions (domains, input functions) and defaults can run such
 * code, and belong to the work: they come after it.
 *
 * jsonb_populate_record() converts the arguments, into a row with one column for each.
 */
#include "postgres.h"

#include "access/htup_details.h"
#include "access/xact.h"
#include "catalog/namespace.h"
#include "catalog/pg_collation_d.h"
#include "catalog/pg_namespace.h"
#include "catalog/pg_proc.h"
#include "catalog/pg_type.h"
#include "common/hashfn.h"
#include "executor/executor.h"
#include "funcapi.h"
#include "miscadmin.h"
#include "nodes/makefuncs.h"
#include "nodes/nodeFuncs.h"
#include "optimizer/optimizer.h"
#include "parser/parse_collate.h"
#include "utils/acl.h"
#include "utils/builtins.h"
#include "utils/fmgroids.h"
#include "utils/fmgrprotos.h"
#include "utils/inval.h"
#include "utils/json.h"
#include "utils/lsyscache.h"
#include "utils/regproc.h"
#include "utils/snapmgr.h"
#include "utils/syscache.h"
#include "utils/typcache.h"

#include "compat.h"
#include "sqlstate.h"
#include "protocol/target.h"
#include "store/key.h"

/* ----- which function a text names ----- */

/*
 * A cast to regprocedure parses the text, and each type in it, at each call: 10,000
 * instructions for two arguments.  So a session remembers what the latest texts named.
 *
 * What a text names depends on the search_path, on the current role, which may use some
 * schemas and not others, and on the catalogs read here.  An answer is used again only for the
 * same search_path and role, and until one of these catalogs changes.  The list of schemas that the
 * server makes of the search_path is compared too: after a GRANT it can grow later than we count the
 * change.  The text is compared because only the text says where the temporary schema is searched.
 * Whether the function can be executed is not remembered.
 */

/* Texts, by their hash; longer ones are not remembered. */
#define REMEMBERED 16
#define TEXT_MAX 256
#define SCHEMAS_MAX 16

typedef struct Remembered
{
	uint64		changes;		/* of the catalogs, before the text was looked up; 0: empty */
	Oid			role;
	Oid			function;
	int			length;
	char		name[TEXT_MAX]; /* not terminated */
	char		search_path[TEXT_MAX];
	int			nschemas;
	Oid			schemas[SCHEMAS_MAX];
} Remembered;

static Remembered remembered[REMEMBERED];
static uint64 changes = 0;		/* 0: nobody counts them yet */

static void
count_change(Datum arg, SysCacheIdentifier cache, uint32 hash)
{
	changes++;
}

static void
count_changes(void)
{
	/* Functions and types; schemas, and which of them a role may use, also the owner of the database */
	static const SysCacheIdentifier caches[] = {
		PROCOID, TYPEOID, NAMESPACEOID, AUTHOID, AUTHMEMROLEMEM, DATABASEOID
	};

	for (int i = 0; i < lengthof(caches); i++)
		CacheRegisterSyscacheCallback(caches[i], count_change, (Datum) 0);
	changes = 1;
}

static Oid
look_up(const text *name)
{
	return DatumGetObjectId(DirectFunctionCall1(regprocedurein,
												CStringGetDatum(text_to_cstring(name))));
}

Oid
idem_named_function(const text *name)
{
	int			length = VARSIZE_ANY_EXHDR(name);
	Remembered	asked;
	Remembered *place;

	if (changes == 0)
		count_changes();
	memset(&asked, 0, sizeof(asked));
	asked.changes = changes;
	asked.role = GetUserId();
	asked.length = length;
	asked.nschemas = fetch_search_path_array(asked.schemas, SCHEMAS_MAX);
	if (length > TEXT_MAX || asked.nschemas > SCHEMAS_MAX ||
		strlen(namespace_search_path) >= TEXT_MAX)
		return look_up(name);
	memcpy(asked.name, VARDATA_ANY(name), length);
	strcpy(asked.search_path, namespace_search_path);

	place = &remembered[hash_bytes((const unsigned char *) asked.name, length) % REMEMBERED];
	asked.function = place->function;
	if (memcmp(place, &asked, sizeof(asked)) == 0)
		return place->function;

	/*
	 * The look-up can call the function that reads a type's modifier, and that can change anything.  If
	 * it changes the search_path, the answer is not remembered; if a catalog changes, it counts for
	 * this call only.
	 */
	asked.function = look_up(name);
	if (strcmp(asked.search_path, namespace_search_path) == 0)
		*place = asked;
	return asked.function;
}

/* ----- which functions can be run ----- */

/* NULL: one that can be run */
static const char *
kind_of_other(Form_pg_proc proc)
{
	switch (proc->prokind)
	{
		case PROKIND_PROCEDURE:
			return "it is a procedure";
		case PROKIND_AGGREGATE:
			return "it is an aggregate function";
		case PROKIND_WINDOW:
			return "it is a window function";
	}
	if (proc->proretset)
		return "it returns a set";
	if (proc->prorettype == TRIGGEROID || proc->prorettype == EVENT_TRIGGEROID)
		return "it is a trigger function";
	if (proc->prorettype != VOIDOID && proc->prorettype != RECORDOID &&
		get_typtype(proc->prorettype) == TYPTYPE_PSEUDO)
		return psprintf("it returns the pseudo-type %s",
						format_type_be(proc->prorettype));
	return NULL;
}

static void
check_rights(const IdemTarget *target)
{
	AclResult	result = object_aclcheck(NamespaceRelationId, target->schema, GetUserId(), ACL_USAGE);

	if (result != ACLCHECK_OK)
		aclcheck_error(result, OBJECT_SCHEMA,
					   get_namespace_name(target->schema));
	result = object_aclcheck(ProcedureRelationId, target->function, GetUserId(), ACL_EXECUTE);
	if (result != ACLCHECK_OK)
		aclcheck_error(result, OBJECT_FUNCTION, target->name);
}

static void
check_arguments(const IdemTarget *target)
{
	for (int i = 0; i < target->narguments; i++)
	{
		if (target->names == NULL || target->names[i] == NULL)
			ereport(ERROR,
					(errcode(ERRCODE_IDEM_INVALID),
					 errmsg("argument %d of function %s has no name", i + 1,
							format_procedure(target->function)),
					 errhint("idem_call() passes arguments by name: name them in CREATE FUNCTION.")));
		if (get_typtype(target->types[i]) == TYPTYPE_PSEUDO)
			ereport(ERROR,
					(errcode(ERRCODE_WRONG_OBJECT_TYPE),
					 errmsg("idem_call() cannot run %s: its argument \"%s\" has the pseudo-type %s",
							format_procedure(target->function),
							target->names[i],
							format_type_be(target->types[i])),
					 errhint("JSON does not say which type is meant: call it from a function that does, and run that one.")));
	}
}

static void
read_names(IdemTarget *target, HeapTuple tuple)
{
	bool		isnull;
	Datum		names = SysCacheGetAttr(PROCOID, tuple,
										Anum_pg_proc_proargnames, &isnull);
	Datum		modes;

	if (isnull)
		return;
	modes = SysCacheGetAttr(PROCOID, tuple, Anum_pg_proc_proargmodes, &isnull);
	(void) get_func_input_arg_names(names, modes, &target->names);
}

IdemTarget
idem_target(Oid function)
{
	HeapTuple	tuple = SearchSysCache1(PROCOID, ObjectIdGetDatum(function));
	Form_pg_proc proc;
	IdemTarget	target = {0};
	const char *kind;

	if (!HeapTupleIsValid(tuple))
		ereport(ERROR,
				(errcode(ERRCODE_UNDEFINED_FUNCTION),
				 errmsg("function with OID %u does not exist", function),
				 errhint("It was dropped, or never existed: pass the function by its name and argument types.")));
	proc = (Form_pg_proc) GETSTRUCT(tuple);
	kind = kind_of_other(proc);
	if (kind != NULL)
		ereport(ERROR,
				(errcode(ERRCODE_WRONG_OBJECT_TYPE),
				 errmsg("idem_call() cannot run %s: %s",
						format_procedure(function), kind),
				 errhint("It runs functions that return one value, a row or void: call this one from such a function, and run that one.")));

	target.function = function;
	target.schema = proc->pronamespace;
	target.result_type = proc->prorettype;
	target.is_variadic = OidIsValid(proc->provariadic);
	target.name = pstrdup(NameStr(proc->proname));
	target.narguments = proc->pronargs;
	target.ndefaults = proc->pronargdefaults;
	target.types = palloc(Max(proc->pronargs, 1) * sizeof(Oid));
	memcpy(target.types, proc->proargtypes.values,
		   proc->pronargs * sizeof(Oid));
	read_names(&target, tuple);
	ReleaseSysCache(tuple);
	check_rights(&target);
	check_arguments(&target);
	return target;
}

/* ----- the names of the arguments ----- */

/* NULL: the object has no such key */
static JsonbValue *
find_value(Jsonb *arguments, const char *name, JsonbValue *value)
{
	return getKeyJsonValueFromContainer(&arguments->root, name, strlen(name),
										value);
}

static int
detail_names(const IdemTarget *target)
{
	StringInfoData names;

	initStringInfo(&names);
	for (int i = 0; i < target->narguments; i++)
		appendStringInfo(&names, "%s%s", i > 0 ? ", " : "", target->names[i]);
	return target->narguments > 0 ?
		errdetail("Its arguments are: %s.", names.data) :
		errdetail("It has no arguments.");
}

static void
check_is_argument(const IdemTarget *target, const JsonbValue *key)
{
	for (int i = 0; i < target->narguments; i++)
		if (strlen(target->names[i]) == key->val.string.len &&
			memcmp(target->names[i], key->val.string.val,
				   key->val.string.len) == 0)
			return;
	ereport(ERROR,
			(errcode(ERRCODE_IDEM_INVALID),
			 errmsg("function %s has no argument \"%s\"",
					format_procedure(target->function),
					pnstrdup(key->val.string.val, key->val.string.len)),
			 detail_names(target),
			 errhint("Fix the client: each key of arguments is the name of an argument.")));
}

void
idem_target_check_names(const IdemTarget *target, Jsonb *arguments)
{
	JsonbIterator *it = JsonbIteratorInit(&arguments->root);
	JsonbIteratorToken token;
	JsonbValue	value;

	Assert(JB_ROOT_IS_OBJECT(arguments));
	while ((token = JsonbIteratorNext(&it, &value, true)) != WJB_DONE)
		if (token == WJB_KEY)
			check_is_argument(target, &value);

	for (int i = 0; i < target->narguments - target->ndefaults; i++)
		if (find_value(arguments, target->names[i], &value) == NULL)
			ereport(ERROR,
					(errcode(ERRCODE_IDEM_INVALID),
					 errmsg("argument \"%s\" of function %s is missing",
							target->names[i],
							format_procedure(target->function)),
					 detail_names(target),
					 errhint("Fix the client: pass it in arguments, it has no default.")));
}

/* ----- fingerprint ----- */

static void
append_name(StringInfo canonical, const char *name, const char *suffix)
{
	if (canonical->data[canonical->len - 1] != '[')
		appendStringInfoChar(canonical, ',');
	escape_json(canonical, psprintf("%s%s", name, suffix));
}

/* An array is named after the type of its elements: the name of the array type itself can
 * change when a dump is restored. */
static void
append_type(StringInfo canonical, Oid type)
{
	Oid			element = get_element_type(type);
	HeapTuple	tuple;
	Form_pg_type form;

	tuple = SearchSysCache1(TYPEOID,
							ObjectIdGetDatum(OidIsValid(element) ? element : type));
	if (!HeapTupleIsValid(tuple))
		elog(ERROR, "cache lookup failed for type %u", type);
	form = (Form_pg_type) GETSTRUCT(tuple);
	append_name(canonical, get_namespace_name(form->typnamespace), "");
	append_name(canonical, NameStr(form->typname),
				OidIsValid(element) ? "[]" : "");
	ReleaseSysCache(tuple);
}

bytea *
idem_target_fingerprint(const IdemTarget *target, Jsonb *arguments)
{
	StringInfoData canonical;

	initStringInfo(&canonical);
	appendStringInfoChar(&canonical, '[');
	append_name(&canonical, get_namespace_name(target->schema), "");
	append_name(&canonical, target->name, "");
	for (int i = 0; i < target->narguments; i++)
		append_type(&canonical, target->types[i]);
	return idem_fingerprint_of_array(&canonical, arguments);
}

/* ----- the run ----- */

/* Looks nothing up: an error is being raised. */
static void
report_conversion(void *arg)
{
	const IdemTarget *target = arg;

	errcontext("conversion of the arguments of function %s in idem_call()",
			   target->name);
}

/* values, nulls: one for each argument of the function; NULL for those that are left out. */
static void
convert(const IdemTarget *target, Jsonb *arguments, Datum *values, bool *nulls)
{
	TupleDesc	desc = CreateTemplateTupleDesc(target->narguments);
	HeapTuple	tuple;
	FmgrInfo	populate;
	HeapTupleHeader row;
	ErrorContextCallback context = {
		.previous = error_context_stack,
		.callback = report_conversion,
		.arg = unconstify(IdemTarget *, target)
	};

	for (int i = 0; i < target->narguments; i++)
	{
		TupleDescInitEntry(desc, i + 1, target->names[i], target->types[i],
						   -1, 0);
		nulls[i] = true;
	}
	TupleDescFinalize(desc);
	desc = BlessTupleDesc(desc);
	tuple = heap_form_tuple(desc, values, nulls);

	/* It asks the expression for the types of its arguments. */
	fmgr_info(F_JSONB_POPULATE_RECORD, &populate);
	/* cppcheck-suppress unknownEvaluationOrder ; neither constant depends on the other */
	fmgr_info_set_expr((Node *)
					   makeFuncExpr(F_JSONB_POPULATE_RECORD, RECORDOID,
									list_make2(makeNullConst(RECORDOID, -1, InvalidOid),
											   makeNullConst(JSONBOID, -1, InvalidOid)),
									InvalidOid, InvalidOid,
									COERCE_EXPLICIT_CALL),
					   &populate);
	error_context_stack = &context;
	row = DatumGetHeapTupleHeader(FunctionCall2(&populate,
												HeapTupleGetDatum(tuple),
												JsonbPGetDatum(arguments)));
	error_context_stack = context.previous;
	for (int i = 0; i < target->narguments; i++)
		values[i] = GetAttributeByNum(row, i + 1, &nulls[i]);
}

static void
raise_dropped(const IdemTarget *target)
{
	ereport(ERROR,
			(errcode(ERRCODE_UNDEFINED_FUNCTION),
			 errmsg("function %s was dropped while the request waited",
					target->name),
			 errhint("Nothing was executed.")));
}

static List *
read_defaults(const IdemTarget *target)
{
	HeapTuple	tuple = SearchSysCache1(PROCOID,
										ObjectIdGetDatum(target->function));
	bool		isnull;
	Datum		stored;
	List	   *defaults;

	if (!HeapTupleIsValid(tuple))
		raise_dropped(target);	/* by a conversion, such as the CHECK of a domain */
	stored = SysCacheGetAttr(PROCOID, tuple, Anum_pg_proc_proargdefaults,
						   &isnull);
	if (isnull)
		elog(ERROR, "function %u has no defaults", target->function);
	defaults = castNode(List, stringToNode(TextDatumGetCString(stored)));
	ReleaseSysCache(tuple);
	return defaults;
}

/*
 * The call as an expression.  Its collation follows from the arguments that are passed, as
 * in a statement.
 */
static FuncExpr *
make_call(const IdemTarget *target, Jsonb *arguments)
{
	Datum	   *values = palloc0(Max(target->narguments, 1) * sizeof(Datum));
	bool	   *nulls = palloc(Max(target->narguments, 1) * sizeof(bool));
	List	   *passed = NIL;
	List	   *all = NIL;
	List	   *defaults = NIL;
	FuncExpr   *call;

	if (target->narguments > 0)
		convert(target, arguments, values, nulls);
	for (int i = 0; i < target->narguments; i++)
	{
		Oid			type = target->types[i];
		int16		length;
		bool		by_value;
		JsonbValue	value;
		Expr	   *argument;

		if (find_value(arguments, target->names[i], &value) != NULL)
		{
			get_typlenbyval(type, &length, &by_value);
			argument = (Expr *) makeConst(type, -1, get_typcollation(type), length,
										  values[i], nulls[i], by_value);
			passed = lappend(passed, argument);
		}
		else
		{
			if (defaults == NIL)
				defaults = read_defaults(target);
			argument = expression_planner(list_nth(defaults,
												   i - (target->narguments -
														list_length(defaults))));
		}
		all = lappend(all, argument);
	}
	call = makeFuncExpr(target->function, target->result_type, passed,
						InvalidOid, InvalidOid, COERCE_EXPLICIT_CALL);
	call->funcvariadic = target->is_variadic;
	assign_expr_collations(NULL, (Node *) call);
	call->args = all;
	return call;
}

Jsonb *
idem_target_run(const IdemTarget *target, Jsonb *arguments)
{
	Expr	   *expression;
	ExprContext *context;
	Datum		result;
	bool		isnull;

	if (!SearchSysCacheExists1(PROCOID, ObjectIdGetDatum(target->function)))
		raise_dropped(target);

	/* The claim may have waited: see what was committed meanwhile, as a new statement
	 * does. */
	CommandCounterIncrement();
	PushActiveSnapshot(GetTransactionSnapshot());

	expression = (Expr *) make_call(target, arguments);
	if (target->result_type != VOIDOID && target->result_type != JSONBOID)
		expression = (Expr *) makeFuncExpr(F_TO_JSONB, JSONBOID,
										   list_make1(expression), InvalidOid,
										   exprCollation((Node *) expression),
										   COERCE_EXPLICIT_CALL);
	context = CreateStandaloneExprContext();
	result = ExecEvalExpr(ExecInitExpr(expression, NULL), context, &isnull);
	FreeExprContext(context, true);
	PopActiveSnapshot();
	return isnull || target->result_type == VOIDOID ? NULL :
		DatumGetJsonbP(result);
}
