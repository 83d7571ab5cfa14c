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
 *	scopes[n].length, name	who holds table->mutex, before n is counted in
 *					table->number.  They do not change afterwards, so they are read without
 *					the mutex by everybody who has read table->number.
 *	table->number	who holds table->mutex.  A barrier before makes sure that a reader that
 *					sees the new number sees the name, too.
 *	scopes[n].answers	atomics, each a counter of its own.
 */
#include "postgres.h"

#include "access/htup_details.h"

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

/* Returns how many scopes have a name if none has this one. */
static int
find_scope(IdemScopeTable *table, const char *name, int length)
{
	int			number = pg_atomic_read_u32(&table->number);

	pg_read_barrier();
	for (int i = 0; i < number; i++)
		if (table->scopes[i].length == length &&
			memcmp(table->scopes[i].name, name, length) == 0)
			return i;
	return number;
}

int
idem_scope_number(IdemScopeTable *table, const text *scope)
{
	const char *name = VARDATA_ANY(scope);
	int			length = VARSIZE_ANY_EXHDR(scope);
	int			seen = pg_atomic_read_u32(&table->number);
	int			found = find_scope(table, name, length);

	Assert(length <= IDEM_SCOPE_BYTES_MAX);
	if (found < seen || found == IDEM_SCOPE_OTHER)
		return found;

	SpinLockAcquire(&table->mutex);
	found = find_scope(table, name, length);
	if (found == pg_atomic_read_u32(&table->number) && found < IDEM_SCOPE_OTHER)
	{
		table->scopes[found].length = length;
		memcpy(table->scopes[found].name, name, length);
		pg_write_barrier();
		pg_atomic_write_u32(&table->number, found + 1);
	}
	SpinLockRelease(&table->mutex);
	return found;
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
