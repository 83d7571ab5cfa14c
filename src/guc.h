/*
 * guc.h
 *	  The settings.
 */
#ifndef IDEM_GUC_H
#define IDEM_GUC_H

#define IDEM_RESULT_BYTES_LIMIT			(255 * 1024 * 1024)
#define IDEM_CLEANUP_BATCH_ROWS_LIMIT	1000000

/* In which scopes requests can be claimed: values of idem_claimable_scopes */
enum
{
	IDEM_SCOPES_ANY,
	IDEM_SCOPES_DECLARED
};

extern int	idem_ttl;			/* seconds */
extern int	idem_lease_ms;		/* milliseconds */
extern int	idem_lease_max;		/* seconds */
extern int	idem_wait;			/* milliseconds, -1: until cancelled, 0: not at all */
extern int	idem_result_max_bytes;	/* of the jsonb */
extern int	idem_cleanup_interval;	/* milliseconds */
extern int	idem_cleanup_batch_size;	/* rows */
extern int	idem_claimable_scopes;
extern char *idem_cleanup_databases;	/* comma-separated names; empty: all */

extern void idem_define_settings(void);

#endif							/* IDEM_GUC_H */
