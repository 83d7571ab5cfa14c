/*
 * catalog.c
 *	  The OIDs of the extension's own objects, found through pg_extension and
 *	  cached.
 *
 * They are found by the extension's name, never by a schema's or through
 * search_path, so that nobody can put another table in their place.
 *
 * The cache is dropped whenever one of our relations is invalidated: DROP
 * EXTENSION does that, and so does the rollback of a CREATE EXTENSION.  A caller
 * still has to expect that a relation is gone when it opens it: it then asks
 * again, and gets the error that says so.
 */
#include "postgres.h"

#include "access/genam.h"
#include "access/htup_details.h"
#include "access/table.h"
#include "catalog/dependency.h"
#include "catalog/indexing.h"
#include "catalog/pg_class.h"
#include "catalog/pg_enum.h"
#include "catalog/pg_extension.h"
#include "catalog/pg_namespace.h"
#include "catalog/pg_type.h"
#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/fmgroids.h"
#include "utils/inval.h"
#include "utils/lsyscache.h"
#include "utils/rel.h"
#include "utils/syscache.h"

#include "catalog.h"

/* Version of the SQL objects that this library serves */
#define IDEM_SQL_VERSION "1.0"

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
static bool callback_registered = false;

/* No catalog access here: it can be called in any state of a transaction. */
static void
invalidate_cached(Datum arg, Oid relid)
{
	if (relid == InvalidOid || !cached_valid || relid == cached.claims ||
		relid == cached.claims_by_expiry || relid == cached.scopes ||
		relid == cached.tokens)
	{
		cached_valid = false;
		invalidations++;
	}
}

/* False where there is no extension of this name; version is palloc'd. */
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

static Oid
require_object(Oid class, Oid object, Oid extension, const char *name)
{
	if (!OidIsValid(object) || getExtensionOfObject(class, object) != extension)
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("\"%s\" is not an object of extension \"idem\" any more",
						name),
				 errhint("Create the extension again, or restore the object with ALTER EXTENSION idem ADD.")));
	return object;
}

static Oid
find_relation(const char *name, Oid schema, Oid extension)
{
	return require_object(RelationRelationId, get_relname_relid(name, schema),
						  extension, name);
}

/* Returns the type. */
static Oid
find_labels(const char *type_name, Oid schema, Oid extension,
			const char *const *labels, int nlabels, Oid *oids)
{
	Oid			type = GetSysCacheOid2(TYPENAMENSP, Anum_pg_type_oid,
									   CStringGetDatum(type_name),
									   ObjectIdGetDatum(schema));

	require_object(TypeRelationId, type, extension, type_name);
	for (int i = 0; i < nlabels; i++)
	{
		oids[i] = GetSysCacheOid2(ENUMTYPOIDNAME, Anum_pg_enum_oid,
								  ObjectIdGetDatum(type),
								  CStringGetDatum(labels[i]));
		if (!OidIsValid(oids[i]))
			ereport(ERROR,
					(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
					 errmsg("type \"%s\" has no label \"%s\" any more",
							type_name, labels[i]),
					 errhint("Create the extension again.")));
	}
	return type;
}

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
	if (strcmp(version, IDEM_SQL_VERSION) != 0)
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("extension \"idem\" has version %s, its library serves version %s",
						version, IDEM_SQL_VERSION),
				 errhint("Run ALTER EXTENSION idem UPDATE, or install the library of the extension's version.")));

	catalog->claims = find_relation("idem_claims", schema, extension);
	/* Only the cleanup needs it, and says so when it is missing. */
	catalog->claims_by_expiry = get_relname_relid("idem_claims_expires_at_idx",
												  schema);
	catalog->scopes = find_relation("idem_scopes", schema, extension);
	catalog->tokens = find_relation("idem_token_seq", schema, extension);
	catalog->state_type = find_labels("idem_state", schema, extension,
									  state_labels, IDEM_STATE_COUNT,
									  catalog->state);
	(void) find_labels("idem_outcome", schema, extension, outcome_labels,
					   IDEM_OUTCOME_COUNT, catalog->outcome);
}

const IdemCatalog *
idem_catalog(void)
{
	if (!callback_registered)
	{
		CacheRegisterRelcacheCallback(invalidate_cached, (Datum) 0);
		callback_registered = true;
	}

	/*
	 * What was read before an invalidation may be old: read it again.  Nobody
	 * replaces the extension without end, but an endless loop must be
	 * cancellable all the same.
	 */
	while (!cached_valid)
	{
		uint64		before = invalidations;
		IdemCatalog fresh;

		CHECK_FOR_INTERRUPTS();
		load_catalog(&fresh);
		cached = fresh;
		cached_valid = (before == invalidations);
	}
	return &cached;
}

bool
idem_is_installed(void)
{
	Oid			extension;
	Oid			schema;
	char	   *version;

	return find_extension(&extension, &schema, &version) &&
		strcmp(version, IDEM_SQL_VERSION) == 0;
}

/*
 * By Citus's own catalog, since a shell need not differ from a plain table in any
 * other way: on the coordinator it has a trigger, on a worker not even that.
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
	/* Its first column, logicalrelid */
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

const char *
idem_outcome_label(IdemOutcome outcome)
{
	return outcome_labels[outcome];
}
