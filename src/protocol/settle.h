/*
 * settle.h
 *	  How a key ends, for other callers than SQL.
 */
#ifndef IDEM_PROTOCOL_SETTLE_H
#define IDEM_PROTOCOL_SETTLE_H

#include "protocol/find_row.h"

/*
 * Ends the key of the call as completed or failed, with a result (NULL: none).  The call's key
 * and token are set.
 *	true	stored
 *	false	nothing to store: the holder has settled it in the same way before; or somebody has
 *			found the work done, and called idem_heal() in the holder's place
 *	ID410	the caller does not hold the key, or has settled it in another way
 *	ID413	the result is larger than the scope's policy allows
 * command names the caller for errors.
 */
extern bool idem_settle(const char *command, IdemRowCall *call,
						IdemState state, Jsonb *result);

#endif							/* IDEM_PROTOCOL_SETTLE_H */
