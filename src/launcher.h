/*
 * launcher.h
 *	  The process that starts the cleanup workers.
 */
#ifndef IDEM_LAUNCHER_H
#define IDEM_LAUNCHER_H

/* Only while shared_preload_libraries are loaded */
extern void idem_launcher_register(void);

/* Entry of the process */
extern PGDLLEXPORT void idem_launcher_main(Datum arg);

#endif							/* IDEM_LAUNCHER_H */
