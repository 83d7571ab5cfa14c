/*
 * lease.h
 *	  Leases.
 */
#ifndef IDEM_LEASE_H
#define IDEM_LEASE_H

#include "fmgr.h"

#define IDEM_LEASE_DAYS_MAX	36500
#define IDEM_LEASE_MAX_US	(IDEM_LEASE_DAYS_MAX * USECS_PER_DAY)

/* The argument of a call (an interval) in microseconds, 0 where it is NULL.
 * Raises ID400. */
extern int64 idem_lease_from_arg(FunctionCallInfo fcinfo, int arg);

#endif							/* IDEM_LEASE_H */
