/*
 * catalog.h
 *	  The OIDs of the extension's own objects.
 */
#ifndef IDEM_CATALOG_H
#define IDEM_CATALOG_H

#include "utils/relcache.h"

/* Labels of the type idem_state, in its order */
typedef enum IdemState
{
	IDEM_STATE_IN_PROGRESS,
	IDEM_STATE_COMPLETED,
	IDEM_STATE_FAILED
} IdemState;

#define IDEM_STATE_COUNT	(IDEM_STATE_FAILED + 1)

/* Labels of the type idem_outcome, in its order */
typedef enum IdemOutcome
{
	IDEM_CLAIMED,
	IDEM_COMPLETED,
	IDEM_FAILED,
	IDEM_IN_PROGRESS,
	IDEM_TIMED_OUT,
	IDEM_UNKNOWN,
	IDEM_MISMATCH,
	IDEM_STALE,
	IDEM_INVALID
} IdemOutcome;

#define IDEM_OUTCOME_COUNT	(IDEM_INVALID + 1)

typedef struct IdemCatalog
{
	Oid			claims;
	Oid			claims_by_expiry;	/* index; InvalidOid if it was dropped */
	Oid			scopes;
	Oid			tokens;			/* sequence */
	Oid			state_type;
	Oid			state[IDEM_STATE_COUNT];
	Oid			outcome[IDEM_OUTCOME_COUNT];
} IdemCatalog;

/*
 * The current database's objects.  Raises 55000 where the extension or an object of
 * it is missing, or where its version is not one that this library serves.  The result
 * is good until the next call that may process invalidations (any lock taken).  It can
 * be old: lock the relation that is to be used, then ask again.
 */
extern const IdemCatalog *idem_catalog(void);

/*
 * Raises 0A000 if Citus distributes a table of ours: what this server calls by its
 * name is then an empty shell, and the rows are in shards, here or elsewhere.
 */
extern void idem_refuse_distributed(Relation relation);

extern IdemState idem_state_from_oid(Oid label);
extern const char *idem_outcome_label(IdemOutcome outcome);

#endif							/* IDEM_CATALOG_H */
