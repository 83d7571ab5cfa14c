/*
 * launcher.h
 *	  The process that starts the cleanup workers.
 */
#ifndef IDEM_CLEAN_LAUNCHER_H
#define IDEM_CLEAN_LAUNCHER_H

#include "postmaster/bgworker.h"

/*
 * While shared_preload_libraries are loaded, or in a session of a server that has not preloaded the
 * library.  False: no worker slot is free.  The session gets a handle, which is palloc'd.
 */
extern bool idem_launcher_start(BackgroundWorkerHandle **handle);

/* Whether idem.cleanup_databases, as this process knows it, includes the database of this name */
extern bool idem_launcher_wants(const char *database);

/* Entry of the process */
extern PGDLLEXPORT void idem_launcher_main(Datum arg);

#endif							/* IDEM_CLEAN_LAUNCHER_H */
