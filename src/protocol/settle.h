/*
 * settle.h
 *	  How a key ends, for other callers than SQL.
 */
#ifndef IDEM_PROTOCOL_SETTLE_H
#define IDEM_PROTOCOL_SETTLE_H

#include "protocol/find_row.h"

/*
 * Ends the key as completed or failed, with a result (NULL: none).  holder: its key and token
 * are set.  True: stored.  False: an identical repeat, or healed by somebody else.  Raises
 * ID410 where the caller does not hold the key, or settled it in another way, and ID413.
 * command names the caller for errors.
 */
extern bool idem_settle(const char *command, IdemRowCall *call,
						IdemState state, Jsonb *result);

#endif							/* IDEM_PROTOCOL_SETTLE_H */
