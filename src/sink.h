/*
 * sink.h
 *	  The trigger that skips rows whose request was done before.
 */
#ifndef IDEM_SINK_H
#define IDEM_SINK_H

/* Once a backend */
extern void idem_sink_init(void);

#endif							/* IDEM_SINK_H */
