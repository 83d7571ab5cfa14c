/*
 * state.h
 *	  Who cleans, in shared memory.
 */
#ifndef IDEM_CLEAN_STATE_H
#define IDEM_CLEAN_STATE_H

#include "access/xact.h"

/* This process becomes its database's worker until it ends.  False: the database has one. */
extern bool idem_state_attach_worker(void);

/* Returns whether the message differs from the latest one of that database. */
extern bool idem_state_publish_error(Oid database, const char *message);

/* The worker's run came to a regular end. */
extern void idem_state_publish_run(void);

/* Notes this process as the launcher, for as long as it lives.  False: another one is noted. */
extern bool idem_state_attach_launcher(void);

/* 0: none */
extern pid_t idem_state_launcher_pid(void);

/* ----- databases that an operator has started: idem_start_worker() ----- */

/* False: some database is started, so the launcher has to stay. */
extern bool idem_state_detach_launcher(void);

typedef struct IdemStart
{
	bool		is_repeated;	/* the database was started before */
	uint32		starts;			/* how often it has been */
	pid_t		launcher_pid;	/* of the launcher, which stays as long as the database is
								 * started; 0: there is none */
} IdemStart;

/* Starts this database.  False: shared memory has no room for its statistics. */
extern bool idem_state_start_database(IdemStart *start);
extern bool idem_state_is_started(Oid database);

/*
 * How often this database was started.  0: it is not, or the transaction that started it still
 * runs, and may have created the extension.
 */
extern uint32 idem_state_get_starts(void);

/*
 * Ends the cleaning of this database, which has no extension.  starts: what idem_state_get_starts()
 * returned before the caller looked for the extension.  Does nothing if a session has called
 * idem_start_worker() since: that session may have created the extension.
 */
extern void idem_state_stop_database(uint32 starts);

#endif							/* IDEM_CLEAN_STATE_H */
