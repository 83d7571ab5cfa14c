/*
 * named.h
 *	  The function that a text names.
 */
#ifndef IDEM_PROTOCOL_NAMED_H
#define IDEM_PROTOCOL_NAMED_H

/*
 * The function that name means to the current role with its search_path: a name with argument
 * types, or an OID.  Raises what a cast to regprocedure raises.  The function can be gone, or
 * be one that the role may not execute: the caller checks that.
 */
extern Oid	idem_named_function(const text *name);

#endif							/* IDEM_PROTOCOL_NAMED_H */
