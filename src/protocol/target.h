/*
 * target.h
 *	  The function that idem_call() runs.
 */
#ifndef IDEM_PROTOCOL_TARGET_H
#define IDEM_PROTOCOL_TARGET_H

#include "utils/jsonb.h"

typedef struct IdemTarget
{
	Oid			function;
	Oid			schema;
	Oid			result_type;
	bool		is_variadic;
	char	   *name;			/* without the schema */
	int			narguments;		/* those that are passed in */
	int			ndefaults;		/* the last ones of them have a default */
	Oid		   *types;
	char	  **names;
} IdemTarget;

/*
 * The function that name means to the current role with its search_path: a name with argument
 * types, or an OID.  Raises what a cast to regprocedure raises.  The function can be gone, or
 * be one that the role may not execute: the caller checks that.
 */
extern Oid	idem_named_function(const text *name);

/*
 * Looks the function up.  Raises 42883 where there is none, 42809 where idem_call() cannot
 * run it, 42501 where the current role may not, ID400 where it has an argument without a
 * name.  What it returns is palloc'd.
 */
extern IdemTarget idem_target(Oid function);

/* Raises ID400 for a name that is not one of the function's, and for an argument that is
 * missing and has no default.  arguments is an object. */
extern void idem_target_check_names(const IdemTarget *target,
									Jsonb *arguments);

/* The fingerprint of a call: SHA-256 of the canonical text of an array of the names of the
 * function, those of its argument types, and the arguments. */
extern bytea *idem_target_fingerprint(const IdemTarget *target,
									  Jsonb *arguments);

/*
 * Runs the function, with the rights of the current role, as a statement of its own.  Returns
 * its result as jsonb, palloc'd; NULL for SQL's NULL and for void.
 */
extern Jsonb *idem_target_run(const IdemTarget *target, Jsonb *arguments);

#endif							/* IDEM_PROTOCOL_TARGET_H */
