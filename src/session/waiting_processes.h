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
	TransactionId xid;			/* for that transaction; InvalidTransactionId: for a lease */
	IdemKey		key;			/* palloc'd */
} IdemWaitingProcess;

/*
 * Shows in shared memory, for idem_holders, that this process waits for the key, and for which
 * transaction (xid; InvalidTransactionId: for a lease).  Nobody is woken up by it.
 * idem_waiting_end() ends this, and so does the end of the transaction or subtransaction.  Both
 * functions do nothing without shared memory.
 */
extern void idem_waiting_begin(const IdemKey *key, TransactionId xid);
extern void idem_waiting_end(void);

/* The waiters of this database, palloc'd; -1: not known, for want of shared memory */
extern int	idem_waiting_processes(IdemWaitingProcess **waiters);

/* Once a backend, before idem_shared_init() */
extern void idem_waiting_init(void);

#endif							/* IDEM_SESSION_WAITING_PROCESSES_H */
