/*
 * worker.h
 *	  The launcher and the cleanup workers.
 */
#ifndef IDEM_WORKER_H
#define IDEM_WORKER_H

/* While shared_preload_libraries are loaded only */
extern void idem_worker_register_launcher(void);

/* Entries of the processes */
extern PGDLLEXPORT void idem_launcher_main(Datum arg);
extern PGDLLEXPORT void idem_worker_main(Datum arg);

#endif							/* IDEM_WORKER_H */
