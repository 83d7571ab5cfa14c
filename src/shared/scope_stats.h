/*
 * scope_stats.h
 *	  Answers of claim calls by scope, for a bounded number of scopes.
 */
#ifndef IDEM_SHARED_SCOPE_STATS_H
#define IDEM_SHARED_SCOPE_STATS_H

#include "fmgr.h"
#include "port/atomics.h"
#include "storage/spin.h"

#include "outcome.h"

/* Scopes of a database that are counted one by one */
#define IDEM_SCOPES_COUNTED_MAX 32

/* Number of what counts all other scopes together */
#define IDEM_SCOPE_OTHER IDEM_SCOPES_COUNTED_MAX

/* How many numbers there are */
#define IDEM_SCOPE_NUMBERS (IDEM_SCOPES_COUNTED_MAX + 1)

#define IDEM_SCOPE_BYTES_MAX 255

typedef struct IdemScopeStats
{
	int			length;
	char		name[IDEM_SCOPE_BYTES_MAX];
	pg_atomic_uint64 answers[IDEM_OUTCOME_COUNT];
} IdemScopeStats;

/* Those of one database, in shared memory; see scope_stats.c for who may write what */
typedef struct IdemScopeTable
{
	slock_t		mutex;
	pg_atomic_uint32 number;	/* scopes that have a name */
	IdemScopeStats scopes[IDEM_SCOPE_NUMBERS];	/* the last one has no name */
} IdemScopeTable;

/* Before any process uses the table */
extern void idem_scope_table_init(IdemScopeTable *table);

/* Zeroes the counters.  The scopes keep their numbers. */
extern void idem_scope_table_reset(IdemScopeTable *table);

/*
 * The number of a scope, which it keeps; IDEM_SCOPE_OTHER if the
 * table is full.  Raises nothing.
 */
extern int	idem_scope_number(IdemScopeTable *table, const text *scope);

/* A copy of a scope's answers; false: no scope has this number. */
extern bool idem_scope_read(IdemScopeTable *table, int number,
							uint64 *answers, const char **name, int *length);

#endif							/* IDEM_SHARED_SCOPE_STATS_H */
