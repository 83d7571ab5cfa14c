/*
 * named.c
 *	  The function that a text such as 'pay(int, numeric)' names.
 *
 * A cast to regprocedure parses the text, and each type in it, at each call: 10,000
 * instructions for two arguments.  So a session remembers what the latest texts named.
 *
 * What a text names depends on the search_path, on the current role, which may use some
 * schemas and not others, and on the catalogs read here.  An answer is used again only for the
 * same search_path and role, and until one of these catalogs changes.  The schemas that the server
 * makes of a search_path have to be the same, too: it can find them late, as when a role is granted
 * that may use another one.  The text of the search_path says besides where temporary types come.
 * Whether the function can be executed is not remembered.
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
#define SCHEMAS_MAX 16

typedef struct Remembered
{
	uint64		changes;		/* of the catalogs, before the text was looked up; 0: empty */
	Oid			role;
	Oid			function;
	int			length;
	char		name[TEXT_MAX]; /* not terminated */
	char		search_path[TEXT_MAX];
	int			nschemas;
	Oid			schemas[SCHEMAS_MAX];
} Remembered;

static Remembered remembered[REMEMBERED];
static uint64 changes = 0;		/* 0: nobody counts them yet */

static void
count_change(Datum arg, SysCacheIdentifier cache, uint32 hash)
{
	changes++;
}

static void
count_changes(void)
{
	/* Functions and types; schemas, and which of them a role may use, also the owner of the database */
	static const SysCacheIdentifier caches[] = {
		PROCOID, TYPEOID, NAMESPACEOID, AUTHOID, AUTHMEMROLEMEM, DATABASEOID
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
	int			length = VARSIZE_ANY_EXHDR(name);
	Remembered	asked;
	Remembered *place;

	if (changes == 0)
		count_changes();
	memset(&asked, 0, sizeof(asked));
	asked.changes = changes;
	asked.role = GetUserId();
	asked.length = length;
	asked.nschemas = fetch_search_path_array(asked.schemas, SCHEMAS_MAX);
	if (length > TEXT_MAX || asked.nschemas > SCHEMAS_MAX ||
		strlen(namespace_search_path) >= TEXT_MAX)
		return look_up(name);
	memcpy(asked.name, VARDATA_ANY(name), length);
	strcpy(asked.search_path, namespace_search_path);

	place = &remembered[hash_bytes((const unsigned char *) asked.name, length) % REMEMBERED];
	asked.function = place->function;
	if (memcmp(place, &asked, sizeof(asked)) == 0)
		return place->function;

	/*
	 * The look-up can call the function that reads a type's modifier, and that can change anything.  If
	 * it changes the search_path, the answer is not remembered; if a catalog changes, it counts for
	 * this call only.
	 */
	asked.function = look_up(name);
	if (strcmp(asked.search_path, namespace_search_path) == 0)
		*place = asked;
	return asked.function;
}
