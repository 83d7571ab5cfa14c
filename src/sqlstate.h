/*
 * sqlstate.h
 *	  The SQLSTATEs of the protocol: each tells the client to do one thing.
 */
#ifndef IDEM_SQLSTATE_H
#define IDEM_SQLSTATE_H

#include "utils/elog.h"

#define ERRCODE_IDEM_INVALID		MAKE_SQLSTATE('I', 'D', '4', '0', '0')	/* fix the client */
#define ERRCODE_IDEM_IN_PROGRESS	MAKE_SQLSTATE('I', 'D', '4', '0', '9')	/* same key, later */
#define ERRCODE_IDEM_LOST			MAKE_SQLSTATE('I', 'D', '4', '1', '0')	/* no longer the holder */
#define ERRCODE_IDEM_STALE			MAKE_SQLSTATE('I', 'D', '4', '1', '2')	/* new key, after a look */
#define ERRCODE_IDEM_TOO_LARGE		MAKE_SQLSTATE('I', 'D', '4', '1', '3')	/* a smaller result */
#define ERRCODE_IDEM_FAILED			MAKE_SQLSTATE('I', 'D', '4', '1', '7')	/* new key */
#define ERRCODE_IDEM_MISMATCH		MAKE_SQLSTATE('I', 'D', '4', '2', '2')	/* fix the client */
#define ERRCODE_IDEM_UNKNOWN		MAKE_SQLSTATE('I', 'D', '4', '2', '4')	/* reconcile */
#define ERRCODE_IDEM_TIMED_OUT		MAKE_SQLSTATE('I', 'D', '5', '0', '3')	/* same key, later */

#endif							/* IDEM_SQLSTATE_H */
