/*
 * raise.h
 *	  What a claim call raises for each outcome.
 */
#ifndef IDEM_PROTOCOL_RAISE_H
#define IDEM_PROTOCOL_RAISE_H

#include "protocol/blocked_by.h"
#include "store/catalog.h"
#include "store/key.h"

/* Raises the outcome; not for claimed, completed and invalid, which no call raises.  hint: NULL:
 * the one of the outcome. */
extern void idem_raise_outcome(IdemOutcome outcome, const IdemKey *key,
							   const IdemBlockedBy *blocked_by, const char *hint);

#endif							/* IDEM_PROTOCOL_RAISE_H */
