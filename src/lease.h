/*
 * lease.h
 *	  Leases.
 */
#ifndef IDEM_LEASE_H
#define IDEM_LEASE_H

#include "fmgr.h"

#include "key.h"
#include "policy.h"

/* The argument of a call (an interval) in microseconds, 0 where it is NULL.
 * Raises ID400. */
extern int64 idem_lease_from_arg(FunctionCallInfo fcinfo, int arg);

/* Raises ID400 if a caller asks for a longer lease than the scope allows. */
extern void idem_check_lease(const IdemKey *key, const IdemPolicy *policy,
							 int64 lease_us);

#endif							/* IDEM_LEASE_H */
