/*
 * catalog.c
 *	  The OIDs of the extension's own objects, found through pg_extension and
 *	  cached.
 *
 * They are found by the name of the extension, never by that of a schema or through
 * search_path, and must be members of the extension: so nobody can put another table in
 * their place.
 *
 * Every invalidation of one of our relations drops the cache: DROP EXTENSION sends one, and
 * so does the rollback of a CREATE EXTENSION.  An answer can still be outdated: by a change
 * that commits just after it, or by one that commits while the catalogs are being read.  In
 * the second case the invalidation arrives in the middle of the reading, and the answer is
 * used once, but not cached.  To read again until no invalidation comes would not be safer,
 * and would never end where taking any lock invalidates everything (debug_discard_caches).
 *
 * The lock of the relation that a caller opens makes it safe.  Taking the lock receives
 * every change that was committed before, and no change can follow while it is held: DROP,
 * RENAME and SET SCHEMA wait for it.  So a caller that acts on a relation
 * locks it first, and starts again if the relation is gone, if an invalidation has come
 * (a writer, idem_store_use()), or if another relation is named now (a reader).
 * idem_policy_promise() looks up the OID of idem_scopes again for each promise.
 */
#include "postgres.h"

#include "access/genam.h"
#include "access/htup_details.h"
#include "access/table.h"
#include "access/xact.h"
#include "catalog/dependency.h"
#include "catalog/indexing.h"
#include "catalog/pg_class.h"
#include "catalog/pg_enum.h"
#include "catalog/pg_extension.h"
#include "catalog/pg_namespace.h"
#include "catalog/pg_type.h"
#include "utils/builtins.h"
#include "utils/fmgroids.h"
#include "utils/lsyscache.h"
#include "utils/rel.h"
#include "utils/syscache.h"

#include "store/catalog.h"

/*
 * This library serves these versions of the SQL objects, and all versions in between.  The
 * newest is the library's own: the default_version of idem.control.
 */
#define SQL_VERSION_OLDEST "1.0"
#define SQL_VERSION_NEWEST "1.0"

static const char *const state_labels[IDEM_STATE_COUNT] = {
	"in_progress", "completed", "failed"
};

static const char *const outcome_labels[IDEM_OUTCOME_COUNT] = {
	"claimed", "completed", "failed", "in_progress", "timed_out", "unknown",
	"mismatch", "stale", "invalid"
};

static IdemCatalog cached;
static bool cached_valid = false;
static uint64 invalidations = 0;

void
idem_catalog_forget(Oid relid)
{
	if (relid == InvalidOid || !cached_valid || relid == cached.claims ||
		relid == cached.scopes || relid == cached.tokens)
	{
		cached_valid = false;
		invalidations++;
	}
}

/* False: the database does not have the extension.  version is palloc'd. */
static bool
find_extension(Oid *extension, Oid *schema, char **version)
{
	Relation	rel = table_open(ExtensionRelationId, AccessShareLock);
	ScanKeyData key;
	SysScanDesc scan;
	HeapTuple	tuple;

	ScanKeyInit(&key, Anum_pg_extension_extname, BTEqualStrategyNumber,
				F_NAMEEQ, CStringGetDatum("idem"));
	scan = systable_beginscan(rel, ExtensionNameIndexId, true, NULL, 1, &key);
	tuple = systable_getnext(scan);
	if (HeapTupleIsValid(tuple))
	{
		Form_pg_extension form = (Form_pg_extension) GETSTRUCT(tuple);
		bool		isnull;

		*extension = form->oid;
		*schema = form->extnamespace;
		*version = TextDatumGetCString(heap_getattr(tuple,
													Anum_pg_extension_extversion,
													RelationGetDescr(rel),
													&isnull));
	}
	systable_endscan(scan);
	table_close(rel, AccessShareLock);
	return HeapTupleIsValid(tuple);
}

/* ----- versions ----- */

/* A number that orders versions; -1: the text is not MAJOR.MINOR. */
static int64
version_number(const char *text)
{
	unsigned	major;
	unsigned	minor;
	int			length = 0;

	/* Only digits and dots: %u accepts signs and blanks, too. */
	if (strspn(text, "0123456789.") != strlen(text) ||
		sscanf(text, "%9u.%9u%n", &major, &minor, &length) != 2 ||
		text[length] != '\0')
		return -1;
	return ((int64) major << 32) + minor;
}

static void
refuse_version(const char *text, const char *hint)
{
	ereport(ERROR,
			(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
			 errmsg("extension \"idem\" is version %s, but the library requires %s",
					text,
					strcmp(SQL_VERSION_OLDEST, SQL_VERSION_NEWEST) == 0 ?
					SQL_VERSION_NEWEST :
					SQL_VERSION_OLDEST " to " SQL_VERSION_NEWEST),
			 errhint("%s", hint)));
}

static void
require_served_version(const char *text)
{
	int64		version = version_number(text);

	if (version < 0)
		refuse_version(text, "Install the library that this version of the extension came with.");
	if (version < version_number(SQL_VERSION_OLDEST))
		refuse_version(text, "Run ALTER EXTENSION idem UPDATE.");
	if (version > version_number(SQL_VERSION_NEWEST))
		refuse_version(text, "Install the newer library. If it is installed already, restart the server, which has preloaded the older one, or reconnect.");
}

/*
 * A session that has looked at the version before an update can still call a function that the
 * update has declared anew.
 */
void
idem_require_columns(TupleDesc desc, int columns)
{
	if (desc->natts != columns)
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("function returns %d columns, but the library knows %d",
						desc->natts, columns),
				 errhint("Install the library that this version of the extension came with. If it is installed already, restart the server, which has preloaded another one, or reconnect.")));
}

/* ----- members ----- */

/* kind: the SQL word for it, such as TABLE.  is_foreign: the schema has an object of this name
 * that is not a member. */
static void
raise_missing(const char *kind, const char *name, Oid schema, bool is_foreign)
{
	char	   *schema_name = get_namespace_name(schema);
	char	   *place = quote_qualified_identifier(schema_name, name);

	if (is_foreign)
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("%s does not belong to extension \"idem\"", place),
				 errhint("If it is the extension's own, run ALTER EXTENSION idem ADD %s %s. If not, give it another name; \\dx+ idem in psql lists what the extension has.",
						 kind, place)));
	ereport(ERROR,
			(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
			 errmsg("%s of extension \"idem\" is missing", place),
			 errdetail("It was renamed, moved to another schema, or taken out of the extension."),
			 errhint("\\dx+ idem in psql lists what the extension has: give the object back its name (ALTER %s ... RENAME TO %s) and its schema (SET SCHEMA %s). If it was dropped, restore the database; or, to begin without claims, policies and rights, run DROP EXTENSION idem and CREATE EXTENSION idem.",
					 kind, name, quote_identifier(schema_name))));
}

static Oid
find_relation(const char *kind, const char *name, Oid schema, Oid extension)
{
	Oid			found = get_relname_relid(name, schema);

	if (!OidIsValid(found) ||
		getExtensionOfObject(RelationRelationId, found) != extension)
		raise_missing(kind, name, schema, OidIsValid(found));
	return found;
}

/* Returns the type. */
static Oid
find_enum(const char *name, Oid schema, Oid extension,
		  const char *const *labels, int nlabels, Oid *oids)
{
	Oid			type = GetSysCacheOid2(TYPENAMENSP, Anum_pg_type_oid,
									   CStringGetDatum(name),
									   ObjectIdGetDatum(schema));

	if (!OidIsValid(type) ||
		getExtensionOfObject(TypeRelationId, type) != extension)
		raise_missing("TYPE", name, schema, OidIsValid(type));
	for (int i = 0; i < nlabels; i++)
	{
		oids[i] = GetSysCacheOid2(ENUMTYPOIDNAME, Anum_pg_enum_oid,
								  ObjectIdGetDatum(type),
								  CStringGetDatum(labels[i]));
		/* A label cannot be dropped. */
		if (!OidIsValid(oids[i]))
			ereport(ERROR,
					(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
					 errmsg("label \"%s\" of type \"%s\" was renamed",
							labels[i], name),
					 errhint("\\dT+ %1$s in psql lists the labels: run ALTER TYPE %1$s RENAME VALUE ... TO %2$s.",
							 quote_qualified_identifier(get_namespace_name(schema), name),
							 quote_literal_cstr(labels[i]))));
	}
	return type;
}

/* ----- all of it ----- */

static void
load_catalog(IdemCatalog *catalog)
{
	Oid			extension;
	Oid			schema;
	char	   *version;

	if (!find_extension(&extension, &schema, &version))
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("extension \"idem\" is not installed in this database"),
				 errhint("Run CREATE EXTENSION idem.")));
	require_served_version(version);

	catalog->claims = find_relation("TABLE", "idem_claims", schema, extension);
	catalog->scopes = find_relation("TABLE", "idem_scopes", schema, extension);
	catalog->tokens = find_relation("SEQUENCE", "idem_token_seq", schema,
									extension);
	catalog->state_type = find_enum("idem_state", schema, extension,
									state_labels, IDEM_STATE_COUNT,
									catalog->state);
	(void) find_enum("idem_outcome", schema, extension, outcome_labels,
					 IDEM_OUTCOME_COUNT, catalog->outcome);
}

bool
idem_catalog_exists(Oid *claims)
{
	Oid			extension;
	Oid			schema;
	char	   *version;

	if (!find_extension(&extension, &schema, &version))
		return false;
	*claims = get_relname_relid("idem_claims", schema);
	return true;
}

const IdemCatalog *
idem_catalog(void)
{
	Assert(IsTransactionState());
	if (!cached_valid)
	{
		uint64		before = invalidations;

		load_catalog(&cached);
		/* If an invalidation came meanwhile: use the answer once, do not keep it. */
		cached_valid = (before == invalidations);
	}
	return &cached;
}

/*
 * Asks Citus's own catalog, because the shell of a distributed table can look like a plain
 * table: on a worker it does not even have a trigger.
 */
static bool
is_distributed(Relation relation)
{
	Oid			catalog = get_relname_relid("pg_dist_partition",
											PG_CATALOG_NAMESPACE);
	Relation	tables = OidIsValid(catalog) ?
		try_table_open(catalog, AccessShareLock) : NULL;
	Oid			index;
	ScanKeyData key;
	SysScanDesc scan;
	bool		found;

	if (tables == NULL)
		return false;
	index = get_relname_relid("pg_dist_partition_logical_relid_index",
							  PG_CATALOG_NAMESPACE);
	/* Column 1 is logicalrelid. */
	ScanKeyInit(&key, 1, BTEqualStrategyNumber, F_OIDEQ,
				ObjectIdGetDatum(RelationGetRelid(relation)));
	scan = systable_beginscan(tables, index, OidIsValid(index), NULL, 1, &key);
	found = HeapTupleIsValid(systable_getnext(scan));
	systable_endscan(scan);
	table_close(tables, AccessShareLock);
	return found;
}

void
idem_refuse_distributed(Relation relation)
{
	if (is_distributed(relation))
		ereport(ERROR,
				(errcode(ERRCODE_FEATURE_NOT_SUPPORTED),
				 errmsg("table \"%s\" is distributed by Citus",
						RelationGetRelationName(relation)),
				 errdetail("Claims are read and written directly in this server's tables, and the rows of a distributed table are in its shards."),
				 errhint("Keep it a table of one server, or use the portable edition and its idem_distribute().")));
}

IdemState
idem_state_from_oid(Oid label)
{
	const IdemCatalog *catalog = idem_catalog();

	for (int i = 0; i < IDEM_STATE_COUNT; i++)
		if (catalog->state[i] == label)
			return (IdemState) i;
	elog(ERROR, "unknown label %u of idem_state", label);
}
