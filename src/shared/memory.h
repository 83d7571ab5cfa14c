/*
 * memory.h
 *	  The memory that all processes of the server share.
 */
#ifndef IDEM_SHARED_MEMORY_H
#define IDEM_SHARED_MEMORY_H

typedef enum IdemSharedState
{
	IDEM_SHARED_NONE,			/* the server cannot give it to this process */
	IDEM_SHARED_TO_ATTACH,		/* it can, on demand */
	IDEM_SHARED_ON_DEMAND,		/* it did */
	IDEM_SHARED_PRELOADED		/* since the start of the server */
} IdemSharedState;

extern IdemSharedState idem_shared_state;

/* The same in all processes, as long as the server runs */
typedef Size (*IdemPartSize) (void);

/* Once, before anybody uses the part; must not raise.  tranche: for its LWLocks */
typedef void (*IdemPartInit) (void *memory, int tranche);

/*
 * While the library is loaded: first each part, then all of them.  address gets that of the part in
 * this process.
 */
extern void idem_shared_add(IdemPartSize size, IdemPartInit init, void **address);
extern void idem_shared_init(bool preloaded);

/*
 * Whether this process has the memory; makes or attaches it if it can.  Does not raise: a
 * claim does not need it.  A failure is logged, and tried again after a minute.
 */
extern bool idem_shared_attach(void);

static inline bool
idem_shared_use(void)
{
	return likely(idem_shared_state >= IDEM_SHARED_ON_DEMAND) ||
		(idem_shared_state == IDEM_SHARED_TO_ATTACH && idem_shared_attach());
}

/* The same for who cannot do without.  Raises 55000, or why it failed; purpose: "keep
 * statistics", say. */
extern void idem_shared_require(const char *purpose);

#endif							/* IDEM_SHARED_MEMORY_H */
