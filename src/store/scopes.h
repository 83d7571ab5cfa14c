/*
 * scopes.h
 *	  The table idem_scopes: its columns, and opening it.
 */
#ifndef IDEM_STORE_SCOPES_H
#define IDEM_STORE_SCOPES_H

#include "fmgr.h"
#include "utils/relcache.h"

/* Columns, as in the install script */
enum
{
	Anum_scopes_scope = 1,
	Anum_scopes_ttl,
	Anum_scopes_lease,
	Anum_scopes_lease_max,
	Anum_scopes_failed,
	Anum_scopes_lapsed,
	Anum_scopes_expired,
	Anum_scopes_key_time,
	Anum_scopes_result_max_bytes,
	Anum_scopes_guarded_since
};

#define Natts_scopes Anum_scopes_guarded_since

/*
 * Opens the table with AccessShareLock, for the caller to close.  Raises 0A000 if its
 * columns or its primary key are not those of the install script, or if Citus
 * distributes it.
 */
extern Relation idem_scopes_open(void);

/* Raises ID400 for a claim in a scope without a row. */
extern void idem_raise_undeclared_scope(const text *scope);

#endif							/* IDEM_STORE_SCOPES_H */
