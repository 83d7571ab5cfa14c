/*
 * catalog.c
 *	  The OIDs of the extension's own objects, found through pg_extension and
 *	  cached.
 *
 * They are found by the extension's name, never by a schema's or through
 * search_path, and must be its members: so nobody can put another table in their
 * place.
 *
 * The cache is dropped whenever one of our relations is invalidated: DROP
 * EXTENSION does that, and so does the rollback of a CREATE EXTENSION.  An answer can
 * be old all the same: a change can commit right after it, and one that commits while
 * the catalogs are read is reported by an invalidation that this session meets in the
 * middle of its reading.  Such an answer is used, but not kept.  To read again until no
 * invalidation comes would not make it safer, and would never end where each lock
 * brings one (debug_discard_caches).
 *
 * What makes it safe is the lock of the relation that a caller opens.  Taking the lock
 * receives every change that was committed before, and no change can follow while it
 * is held: DROP, RENAME and SET SCHEMA wait for it.  So a caller that acts on a relation
 * locks it first, and starts again if the relation is gone, if an invalidation has come
 * (a writer, use_store()), or if another relation is named now (a reader).
 * idem_policy_lock() names the policies anew for each promise.
 */
#include "postgres.h"

#include "access/genam.h"
#include "access/htup_details.h"
#include "access/table.h"
#include "catalog/dependency.h"
#include "catalog/indexing.h"
#include "catalog/pg_class.h"
#include "catalog/pg_depend.h"
#include "catalog/pg_enum.h"
#include "catalog/pg_extension.h"
#include "catalog/pg_namespace.h"
#include "catalog/pg_type.h"
#include "lib/stringinfo.h"
#include "nodes/pg_list.h"
#include "utils/builtins.h"
#include "utils/catcache.h"
#include "utils/fmgroids.h"
#include "utils/inval.h"
#include "utils/lsyscache.h"
#include "utils/rel.h"
#include "utils/syscache.h"

#include "catalog.h"

/*
 * The versions of the SQL objects that this library serves: these two, and all in
 * between.  The newest is the library's own, the default_version of idem.control.
 */
#define SQL_VERSION_OLDEST "1.0"
#define SQL_VERSION_NEWEST "1.0"

/* More digits are in no version of ours. */
#define VERSION_DIGITS_MAX 9

typedef struct SqlVersion
{
	int			major;
	int			minor;
} SqlVersion;

/* A kind of members that are found by name */
typedef struct MemberKind
{
	Oid			catalog;		/* that they are in */
	char		kind;			/* relkind, or typtype */
	const char *noun;
	const char *keyword;		/* in ALTER and in ALTER EXTENSION ... ADD */
} MemberKind;

static const MemberKind table_kind = {
	RelationRelationId, RELKIND_RELATION, "table", "TABLE"
};
static const MemberKind sequence_kind = {
	RelationRelationId, RELKIND_SEQUENCE, "sequence", "SEQUENCE"
};
static const MemberKind enum_kind = {
	TypeRelationId, TYPTYPE_ENUM, "type", "TYPE"
};

/* All members of these kinds, as in the install script */
static const char *const member_names[] = {
	"idem_claims", "idem_scopes", "idem_token_seq", "idem_state", "idem_outcome"
};

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

/* ----- versions ----- */

static bool
parse_number(const char **text, int *number)
{
	size_t		length = strspn(*text, "0123456789");

	if (length == 0 || length > VERSION_DIGITS_MAX)
		return false;
	*number = atoi(*text);
	*text += length;
	return true;
}

/* False: it is not written as ours are, MAJOR.MINOR. */
static bool
parse_version(const char *text, SqlVersion *version)
{
	return parse_number(&text, &version->major) && *text++ == '.' &&
		parse_number(&text, &version->minor) && *text == '\0';
}

/* -1, 0, 1 */
static int
compare_with(const SqlVersion *version, const char *served)
{
	SqlVersion	other;

	if (!parse_version(served, &other))
		elog(ERROR, "invalid version \"%s\"", served);
	if (version->major != other.major)
		return version->major < other.major ? -1 : 1;
	return (version->minor > other.minor) - (version->minor < other.minor);
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
	SqlVersion	version;

	if (!parse_version(text, &version))
		refuse_version(text, "Install the library that this version of the extension came with.");
	if (compare_with(&version, SQL_VERSION_OLDEST) < 0)
		refuse_version(text, "Run ALTER EXTENSION idem UPDATE.");
	if (compare_with(&version, SQL_VERSION_NEWEST) > 0)
		refuse_version(text, "Install the newer library. If it is installed already, restart the server, which has preloaded the older one, or reconnect.");
}

/* ----- members ----- */

/* Its name, and its schema; NULL: it is of another kind, or gone. */
static char *
member_name(const MemberKind *kind, Oid object, Oid *schema)
{
	HeapTuple	tuple;
	char	   *name = NULL;

	if (kind->catalog == RelationRelationId)
	{
		if (get_rel_relkind(object) != kind->kind)
			return NULL;
		*schema = get_rel_namespace(object);
		return get_rel_name(object);
	}
	tuple = SearchSysCache1(TYPEOID, ObjectIdGetDatum(object));
	if (!HeapTupleIsValid(tuple))
		return NULL;
	if (((Form_pg_type) GETSTRUCT(tuple))->typtype == kind->kind)
	{
		*schema = ((Form_pg_type) GETSTRUCT(tuple))->typnamespace;
		name = pstrdup(NameStr(((Form_pg_type) GETSTRUCT(tuple))->typname));
	}
	ReleaseSysCache(tuple);
	return name;
}

static bool
is_name_of_ours(const char *name)
{
	for (int i = 0; i < lengthof(member_names); i++)
		if (strcmp(name, member_names[i]) == 0)
			return true;
	return false;
}

static char *
qualified(Oid schema, const char *name)
{
	char	   *schema_name = get_namespace_name(schema);

	return quote_qualified_identifier(schema_name, name);
}

/*
 * Looks for what became of a member that does not have its name in the extension's
 * schema: the members of its kind that have a name which none of ours has, as a list of
 * qualified names.  moved_to: the schema of the one that has kept its name.
 */
static List *
find_renamed(const MemberKind *kind, const char *name, Oid extension,
			 Oid *moved_to)
{
	Relation	rel = table_open(DependRelationId, AccessShareLock);
	List	   *renamed = NIL;
	ScanKeyData keys[2];
	SysScanDesc scan;
	HeapTuple	tuple;

	ScanKeyInit(&keys[0], Anum_pg_depend_refclassid, BTEqualStrategyNumber,
				F_OIDEQ, ObjectIdGetDatum(ExtensionRelationId));
	ScanKeyInit(&keys[1], Anum_pg_depend_refobjid, BTEqualStrategyNumber,
				F_OIDEQ, ObjectIdGetDatum(extension));
	scan = systable_beginscan(rel, DependReferenceIndexId, true, NULL, 2, keys);
	while (HeapTupleIsValid(tuple = systable_getnext(scan)))
	{
		Form_pg_depend form = (Form_pg_depend) GETSTRUCT(tuple);
		Oid			schema;
		char	   *found;

		if (form->deptype != DEPENDENCY_EXTENSION ||
			form->classid != kind->catalog ||
			(found = member_name(kind, form->objid, &schema)) == NULL)
			continue;
		if (strcmp(found, name) == 0)
			*moved_to = schema;
		else if (!is_name_of_ours(found))
			renamed = lappend(renamed, qualified(schema, found));
	}
	systable_endscan(scan);
	table_close(rel, AccessShareLock);
	return renamed;
}

static char *
join_names(const List *names)
{
	StringInfoData joined;
	ListCell   *cell;

	initStringInfo(&joined);
	foreach(cell, names)
		appendStringInfo(&joined, "%s%s",
						 cell == list_head(names) ? "" : ", ",
						 (char *) lfirst(cell));
	return joined.data;
}

/* For a command that gives a member its place back; foreign: what has that place now,
 * or NULL. */
static int
hint_command(const char *foreign, const char *command)
{
	if (foreign == NULL)
		return errhint("Run %s.", command);
	return errhint("Rename %s, which does not belong to the extension, and then run %s.",
				   foreign, command);
}

/* renamed: qualified names, of which the member's present one is one */
static void
raise_renamed(const MemberKind *kind, const char *name, const List *renamed,
			  const char *foreign)
{
	bool		is_known = list_length(renamed) == 1;
	const char *present = is_known ? linitial(renamed) : "...";

	ereport(ERROR,
			(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
			 is_known ?
			 errmsg("%s \"%s\" of extension \"idem\" was renamed to %s",
					kind->noun, name, present) :
			 errmsg("%s \"%s\" of extension \"idem\" was renamed",
					kind->noun, name),
			 is_known ? 0 :
			 errdetail("It is one of these: %s.", join_names(renamed)),
			 hint_command(foreign,
						  psprintf("ALTER %s %s RENAME TO %s%s", kind->keyword,
								   present, name,
								   is_known ? "" : " with its present name"))));
}

static void
raise_moved(const MemberKind *kind, const char *name, Oid schema, Oid moved_to,
			const char *foreign)
{
	ereport(ERROR,
			(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
			 errmsg("%s \"%s\" of extension \"idem\" was moved to schema \"%s\"",
					kind->noun, name, get_namespace_name(moved_to)),
			 hint_command(foreign,
						  psprintf("ALTER %s %s SET SCHEMA %s", kind->keyword,
								   qualified(moved_to, name),
								   quote_identifier(get_namespace_name(schema))))));
}

/*
 * Says what became of a member, and how to get it back.  found: what has its name in
 * the extension's schema, and is no member.
 */
static void
raise_missing(const MemberKind *kind, const char *name, Oid schema,
			  Oid extension, Oid found)
{
	Oid			moved_to = InvalidOid;
	List	   *renamed = find_renamed(kind, name, extension, &moved_to);
	char	   *place = qualified(schema, name);
	char	   *foreign = OidIsValid(found) ? place : NULL;

	if (OidIsValid(moved_to))
		raise_moved(kind, name, schema, moved_to, foreign);
	if (renamed != NIL)
		raise_renamed(kind, name, renamed, foreign);
	if (foreign != NULL)
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("%s \"%s\" does not belong to extension \"idem\"",
						kind->noun, name),
				 errdetail("It was taken out of the extension by ALTER EXTENSION idem DROP, or it is another %s of this name.",
						   kind->noun),
				 errhint("If it is the extension's, run ALTER EXTENSION idem ADD %s %s.",
						 kind->keyword, place)));
	ereport(ERROR,
			(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
			 errmsg("%s \"%s\" of extension \"idem\" is missing",
					kind->noun, name),
			 errdetail("It was taken out of the extension, and then dropped, renamed or moved."),
			 errhint("If it still exists, give it the name %s back and run ALTER EXTENSION idem ADD %s %s. If it does not, run DROP EXTENSION idem and CREATE EXTENSION idem, which forget all claims.",
					 place, kind->keyword, place)));
}

static Oid
find_member(const MemberKind *kind, const char *name, Oid schema, Oid extension)
{
	Oid			found = kind->catalog == RelationRelationId ?
		get_relname_relid(name, schema) :
		GetSysCacheOid2(TYPENAMENSP, Anum_pg_type_oid, CStringGetDatum(name),
						ObjectIdGetDatum(schema));

	if (!OidIsValid(found) ||
		getExtensionOfObject(kind->catalog, found) != extension)
		raise_missing(kind, name, schema, extension, found);
	return found;
}

/* A label cannot be dropped, so it was renamed.  renamed: the ones that none of ours has,
 * as SQL literals. */
static void
raise_label_missing(const char *type_name, const char *qualified_type,
					const char *label, const List *renamed)
{
	bool		is_known = list_length(renamed) == 1;

	ereport(ERROR,
			(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
			 errmsg("label \"%s\" of type \"%s\" was renamed", label, type_name),
			 is_known ? 0 : errdetail("It is one of these: %s.",
									  join_names(renamed)),
			 errhint("Run ALTER TYPE %s RENAME VALUE %s TO %s%s.", qualified_type,
					 is_known ? (char *) linitial(renamed) : "...",
					 quote_literal_cstr(label),
					 is_known ? "" : " with its present name")));
}

static int
label_index(const char *label, const char *const *labels, int nlabels)
{
	int			i = 0;

	while (i < nlabels && strcmp(label, labels[i]) != 0)
		i++;
	return i;
}

/* Returns the type. */
static Oid
find_enum(const char *name, Oid schema, Oid extension,
		  const char *const *labels, int nlabels, Oid *oids)
{
	Oid			type = find_member(&enum_kind, name, schema, extension);
	CatCList   *present = SearchSysCacheList1(ENUMTYPOIDNAME,
											  ObjectIdGetDatum(type));
	List	   *renamed = NIL;

	for (int i = 0; i < nlabels; i++)
		oids[i] = InvalidOid;
	for (int i = 0; i < present->n_members; i++)
	{
		Form_pg_enum form =
			(Form_pg_enum) GETSTRUCT(&present->members[i]->tuple);
		int			label = label_index(NameStr(form->enumlabel), labels,
										nlabels);

		if (label < nlabels)
			oids[label] = form->oid;
		else
			renamed = lappend(renamed,
							  quote_literal_cstr(NameStr(form->enumlabel)));
	}
	ReleaseCatCacheList(present);

	for (int i = 0; i < nlabels; i++)
		if (!OidIsValid(oids[i]))
			raise_label_missing(name, qualified(schema, name), labels[i],
								renamed);
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

	catalog->claims = find_member(&table_kind, "idem_claims", schema, extension);
	/* Only the cleanup needs it, and says so when it is missing. */
	catalog->claims_by_expiry = get_relname_relid("idem_claims_expires_at_idx",
												  schema);
	catalog->scopes = find_member(&table_kind, "idem_scopes", schema, extension);
	catalog->tokens = find_member(&sequence_kind, "idem_token_seq", schema,
								  extension);
	catalog->state_type = find_enum("idem_state", schema, extension,
									state_labels, IDEM_STATE_COUNT,
									catalog->state);
	(void) find_enum("idem_outcome", schema, extension, outcome_labels,
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

	if (!cached_valid)
	{
		uint64		before = invalidations;
		IdemCatalog fresh;

		load_catalog(&fresh);
		cached = fresh;
		/* What was read before an invalidation may be old: use it, not keep it. */
		cached_valid = (before == invalidations);
	}
	return &cached;
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
