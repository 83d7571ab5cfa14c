/*
 * shape.h
 *	  The shape that the claims table and its indexes must have.
 */
#ifndef IDEM_STORE_SHAPE_H
#define IDEM_STORE_SHAPE_H

#include "utils/relcache.h"

/*
 * Each raises 0A000 with the command that helps: for columns and storage that are not as the
 * install script made them; for what a direct insert would pass by; for another primary key
 * (NULL: the table has none).
 */
extern void idem_store_check_layout(Relation claims);
extern void idem_store_check_direct_writes(Relation claims);
extern void idem_store_check_key(Relation claims, Relation index);

/* Whether it is the index of the times of expiry, as the extension makes it */
extern bool idem_store_is_by_expiry(Oid index);

/*
 * Whether the index has all rows that are in progress and no others.  It can be another one
 * under the name of ours.
 */
extern bool idem_store_is_of_unsettled(Oid index, Relation claims);

/* For an invalidation of this relation; InvalidOid: of any */
extern void idem_store_forget_shape(Oid relid);

extern char *idem_store_qualified_name(Oid relid);

#endif							/* IDEM_STORE_SHAPE_H */
