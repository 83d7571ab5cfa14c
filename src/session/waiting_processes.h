/*
 * waiting_processes.h
 *	  Which keys processes wait for at this moment.
 */
#ifndef IDEM_SESSION_WAITING_PROCESSES_H
#define IDEM_SESSION_WAITING_PROCESSES_H

#include "store/key.h"

/* A process that waits */
typedef struct IdemWaitingProcess
{
	int			pid;
	TransactionId xid;			/* for that transaction; InvalidTransactionId: for a lease */
	IdemKey		key;			/* palloc'd */
} IdemWaitingProcess;

/*
 * This process sleeps until it has been woken up for the key: tell the others.  A call that
 * ends the sleep takes it back, and so does the end of the transaction or subtransaction.
 * Both do nothing without shared memory.
 */
extern void idem_waiting_begin(const IdemKey *key, TransactionId xid);
extern void idem_waiting_end(void);

/* The waiters of this database, palloc'd; -1: not known, for want of shared memory */
extern int	idem_waiting_processes(IdemWaitingProcess **waiters);

/* Once a backend, before idem_shared_init() */
extern void idem_waiting_init(void);

#endif							/* IDEM_SESSION_WAITING_PROCESSES_H */
