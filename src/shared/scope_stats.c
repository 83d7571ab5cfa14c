/*
 * scope_stats.c
 *	  Answers of claim calls by scope, for a bounded number of scopes.
 *
 * A program can use any number of scopes, one for each of its customers say, and shared
 * memory has no room for all of them.  So the first IDEM_SCOPES_COUNTED_MAX scopes that a
 * database uses have counters of their own, and all others share the last ones.
 *
 * Who may write what:
 *
 *	scopes[n].hash, length, name	who holds table->mutex, before n is counted in
 *					table->number.  They do not change afterwards, so they are read without
 *					the mutex by everybody who has read table->number.
 *	table->number	who holds table->mutex.  A barrier before makes sure that a reader that
 *					sees the new number sees the name, too.
 *	scopes[n].answers	atomics, each a counter of its own.
 */
#include "postgres.h"

#include "access/htup_details.h"
#include "common/hashfn.h"

#include "shared/scope_stats.h"

void
idem_scope_table_reset(IdemScopeTable *table)
{
	for (int i = 0; i < IDEM_SCOPE_NUMBERS; i++)
		for (int j = 0; j < IDEM_OUTCOME_COUNT; j++)
			pg_atomic_write_u64(&table->scopes[i].answers[j], 0);
}

void
idem_scope_table_init(IdemScopeTable *table)
{
	SpinLockInit(&table->mutex);
	pg_atomic_init_u32(&table->number, 0);
	for (int i = 0; i < IDEM_SCOPE_NUMBERS; i++)
		for (int j = 0; j < IDEM_OUTCOME_COUNT; j++)
			pg_atomic_init_u64(&table->scopes[i].answers[j], 0);
}

void
idem_scope_table_clear(IdemScopeTable *table)
{
	pg_atomic_write_u32(&table->number, 0);
	idem_scope_table_reset(table);
}

static bool
has_name(const IdemScopeStats *scope, uint32 hash, const char *name, int length)
{
	return scope->hash == hash && scope->length == length &&
		memcmp(scope->name, name, length) == 0;
}

/* Looks at the scopes from the number first on; -1: it is not there. */
static int
find_scope(IdemScopeTable *table, int first, uint32 hash, const char *name,
		   int length)
{
	int			number = pg_atomic_read_u32(&table->number);

	pg_read_barrier();
	for (int i = first; i < number; i++)
		if (has_name(&table->scopes[i], hash, name, length))
			return i;
	return -1;
}

/* seen: how many scopes did not have this name before the mutex was taken */
static int
add_scope(IdemScopeTable *table, int seen, uint32 hash, const char *name,
		  int length)
{
	int			found;

	SpinLockAcquire(&table->mutex);
	found = find_scope(table, seen, hash, name, length);
	if (found < 0)
	{
		IdemScopeStats *scope;

		found = pg_atomic_read_u32(&table->number);
		if (found < IDEM_SCOPES_COUNTED_MAX)
		{
			scope = &table->scopes[found];
			scope->hash = hash;
			scope->length = length;
			memcpy(scope->name, name, length);
			pg_write_barrier();
			pg_atomic_write_u32(&table->number, found + 1);
		}
	}
	SpinLockRelease(&table->mutex);
	Assert(found <= IDEM_SCOPE_OTHER);
	return found;
}

int
idem_scope_number(IdemScopeTable *table, const text *scope)
{
	const char *name = VARDATA_ANY(scope);
	int			length = VARSIZE_ANY_EXHDR(scope);
	uint32		hash = hash_bytes((const unsigned char *) name, length);
	int			seen = pg_atomic_read_u32(&table->number);
	int			found;

	Assert(length <= IDEM_SCOPE_BYTES_MAX);
	found = find_scope(table, 0, hash, name, length);
	if (found >= 0)
		return found;
	if (seen == IDEM_SCOPES_COUNTED_MAX)
		return IDEM_SCOPE_OTHER;
	return add_scope(table, seen, hash, name, length);
}

bool
idem_scope_read(IdemScopeTable *table, int number, uint64 *answers,
				const char **name, int *length)
{
	IdemScopeStats *scope = &table->scopes[number];

	Assert(number >= 0 && number < IDEM_SCOPE_NUMBERS);
	if (number != IDEM_SCOPE_OTHER &&
		number >= pg_atomic_read_u32(&table->number))
		return false;
	pg_read_barrier();
	*name = number == IDEM_SCOPE_OTHER ? NULL : scope->name;
	*length = scope->length;
	for (int i = 0; i < IDEM_OUTCOME_COUNT; i++)
		answers[i] = pg_atomic_read_u64(&scope->answers[i]);
	return true;
}
