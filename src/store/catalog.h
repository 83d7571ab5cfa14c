/*
 * catalog.h
 *	  The OIDs of the extension's own objects.
 */
#ifndef IDEM_STORE_CATALOG_H
#define IDEM_STORE_CATALOG_H

#include "utils/relcache.h"

#include "outcome.h"

typedef struct IdemCatalog
{
	Oid			claims;
	Oid			scopes;
	Oid			tokens;			/* sequence */
	Oid			state_type;
	Oid			state[IDEM_STATE_COUNT];
	Oid			outcome[IDEM_OUTCOME_COUNT];
} IdemCatalog;

/*
 * The objects of the current database.  Raises 55000 where the extension or one of its
 * objects is missing, or this library does not serve its version.  The result is valid until
 * the next call that may process invalidations, such as taking a lock.  It can be outdated:
 * lock the relation that you use, then ask again.
 */
extern const IdemCatalog *idem_catalog(void);

/* For an invalidation of this relation; InvalidOid: of any */
extern void idem_catalog_forget(Oid relid);

/* Whether the database has the extension, and the table of its claims, by name; InvalidOid: that
 * was renamed.  Raises nothing, also while the extension is being dropped. */
extern bool idem_catalog_exists(Oid *claims);

/* Raises 55000 unless the result of the function that is called has this number of columns. */
extern void idem_require_columns(TupleDesc desc, int columns);

/*
 * Raises 0A000 if Citus distributes the table: the relation of that name is then an empty
 * shell, and its rows are in shards, here or on other servers.
 */
extern void idem_refuse_distributed(Relation relation);

extern IdemState idem_state_from_oid(Oid label);

#endif							/* IDEM_STORE_CATALOG_H */
