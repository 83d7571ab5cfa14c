/*
 * named.c
 *	  The function that a text such as 'pay(int, numeric)' names.
 *
 * A cast to regprocedure parses the text, and each type in it, at each call: 10,000
 * instructions for two arguments.  So a session remembers what the latest texts named.
 *
 * What a text names depends on the search_path, on the current role, which may use some
 * schemas and not others, and on the catalogs read here.  An answer is used again only for the
 * same search_path and role, and until one of these catalogs changes.  Whether the
 * function can be executed is not remembered.
 */
#include "postgres.h"

#include "catalog/namespace.h"
#include "common/hashfn.h"
#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/fmgrprotos.h"
#include "utils/inval.h"

#include "compat.h"
#include "protocol/named.h"

/* Texts, by their hash; longer ones are not remembered. */
#define REMEMBERED 16
#define TEXT_MAX 256

typedef struct Remembered
{
	uint64		changes;		/* of the catalogs, before the text was looked up; 0: empty */
	Oid			role;
	Oid			function;
	int			length;
	char		name[TEXT_MAX]; /* not terminated */
	char		search_path[TEXT_MAX];
} Remembered;

static Remembered remembered[REMEMBERED];
static uint64 changes = 0;		/* 0: nobody counts them yet */

static void
count_change(Datum arg, IdemSysCacheId cache, uint32 hash)
{
	changes++;
}

static void
count_changes(void)
{
	/* Functions and types; schemas, and which of them a role may use */
	static const IdemSysCacheId caches[] = {
		PROCOID, TYPEOID, NAMESPACEOID, AUTHOID, AUTHMEMROLEMEM
	};

	for (int i = 0; i < lengthof(caches); i++)
		CacheRegisterSyscacheCallback(caches[i], count_change, (Datum) 0);
	changes = 1;
}

static Oid
look_up(const text *name)
{
	return DatumGetObjectId(DirectFunctionCall1(regprocedurein,
												CStringGetDatum(text_to_cstring(name))));
}

Oid
idem_named_function(const text *name)
{
	const char *data = VARDATA_ANY(name);
	int			length = VARSIZE_ANY_EXHDR(name);
	Remembered *place;
	uint64		changes_before;
	Oid			function;

	if (changes == 0)
		count_changes();
	if (length > TEXT_MAX || strlen(namespace_search_path) >= TEXT_MAX)
		return look_up(name);

	place = &remembered[hash_bytes((const unsigned char *) data, length) % REMEMBERED];
	if (place->changes == changes && place->role == GetUserId() &&
		place->length == length && memcmp(place->name, data, length) == 0 &&
		strcmp(place->search_path, namespace_search_path) == 0)
		return place->function;

	/* A change that arrives during the look-up makes the answer one that is used once. */
	changes_before = changes;
	function = look_up(name);
	place->changes = changes_before;
	place->role = GetUserId();
	place->function = function;
	place->length = length;
	memcpy(place->name, data, length);
	strcpy(place->search_path, namespace_search_path);
	return function;
}
