/*
 * shape.c
 *	  The shape that the claims table and its indexes must have.
 *
 * A direct insert passes by what the executor does for triggers, rules, row security and
 * constraints, and needs the columns in their places.  So a table that was given any of these
 * is refused, with the command that takes it back.  Columns that were dropped again do no
 * harm, nor do further indexes.
 */
#include "postgres.h"

#include "access/genam.h"
#include "access/htup_details.h"
#include "catalog/partition.h"
#include "catalog/pg_am_d.h"
#include "catalog/pg_collation_d.h"
#include "catalog/pg_constraint.h"
#include "catalog/pg_index.h"
#include "catalog/pg_opclass_d.h"
#include "catalog/pg_type_d.h"
#include "nodes/primnodes.h"
#include "nodes/readfuncs.h"
#include "utils/builtins.h"
#include "utils/fmgroids.h"
#include "utils/lsyscache.h"
#include "utils/rel.h"
#include "utils/syscache.h"

#include "store/catalog.h"
#include "store/internal.h"

/* InvalidOid stands for the type idem_state: its OID differs from database to database. */
static const Oid claims_column_types[Natts_claims] = {
	TIMESTAMPTZOID, TIMESTAMPTZOID, INT8OID, InvalidOid, TEXTOID, TEXTOID,
	TEXTOID, BYTEAOID, JSONBOID, JSONBOID
};

static const bool claims_column_not_null[Natts_claims] = {
	true, false, false, true, true, true, true, false, false, false
};

/* The primary key's, in its order */
static const AttrNumber key_columns[KEY_COLUMNS] = {
	Anum_claims_request_id, Anum_claims_user_id, Anum_claims_scope
};

/* An index that is known to be of unsettled rows, so that its predicate need not be read again */
static Oid	unsettled_index = InvalidOid;

/* hint: what helps.  If the table has more than one such thing, the next error names it. */
static void
refuse_table(Relation claims, const char *reason, const char *hint)
{
	ereport(ERROR,
			(errcode(ERRCODE_FEATURE_NOT_SUPPORTED),
			 errmsg("table \"%s\" cannot hold claims: it has %s",
					RelationGetRelationName(claims), reason),
			 errdetail("Claims are written directly into the table, without the executor, so that this would be ignored or do harm."),
			 errhint("%s", hint)));
}

char *
idem_store_qualified_name(Oid relid)
{
	return quote_qualified_identifier(get_namespace_name(get_rel_namespace(relid)),
									  get_rel_name(relid));
}

/* change: the rest of ALTER TABLE name ...; NULL: no ALTER TABLE helps. */
static void
refuse_layout(Relation claims, const char *change)
{
	const char *hint = "Dump this database and restore it: a dropped column cannot come back to its place in the table.";

	if (change != NULL)
		hint = psprintf("Run ALTER TABLE %s %s.",
						idem_store_qualified_name(RelationGetRelid(claims)), change);
	refuse_table(claims, "another layout than the extension gave it", hint);
}

static void
check_storage(Relation claims)
{
	if (claims->rd_rel->relkind != RELKIND_RELATION)
		refuse_layout(claims, NULL);
	if (claims->rd_rel->relispartition)
		refuse_table(claims, "become a partition",
					 psprintf("Run ALTER TABLE %s DETACH PARTITION %s.",
							  idem_store_qualified_name(get_partition_parent(RelationGetRelid(claims),
																			 true)),
							  idem_store_qualified_name(RelationGetRelid(claims))));
	if (claims->rd_rel->relam != HEAP_TABLE_AM_OID)
		refuse_layout(claims, "SET ACCESS METHOD heap");
	if (claims->rd_rel->relpersistence != RELPERSISTENCE_PERMANENT)
		refuse_layout(claims, "SET LOGGED");
}

/* The column must be as in the install script.  A missing value is refused too: the column
 * must read as NULL where a row ends before it. */
static void
check_column(Relation claims, int i)
{
	Form_pg_attribute column = TupleDescAttr(RelationGetDescr(claims), i);
	Oid			type = OidIsValid(claims_column_types[i]) ?
		claims_column_types[i] : idem_catalog()->state_type;

	if (column->attisdropped || column->atthasmissing)
		refuse_layout(claims, NULL);
	if (column->atttypid != type ||
		(type == TEXTOID && column->attcollation != C_COLLATION_OID))
	{
		const char *name = quote_identifier(NameStr(column->attname));
		const char *type_name = format_type_be_qualified(type);

		refuse_layout(claims, psprintf("ALTER COLUMN %s TYPE %s%s USING %s::text::%s",
									   name, type_name,
									   type == TEXTOID ? " COLLATE \"C\"" : "",
									   name, type_name));
	}
	if (column->attnotnull != claims_column_not_null[i])
		refuse_layout(claims, psprintf("ALTER COLUMN %s %s NOT NULL",
									   quote_identifier(NameStr(column->attname)),
									   column->attnotnull ? "DROP" : "SET"));
}

/*
 * The first columns must be those of the install script.  After them, dropped columns are
 * accepted: a column that somebody added and dropped again stays there for good.  Each row
 * that we write has NULL in it.
 */
void
idem_store_check_layout(Relation claims)
{
	TupleDesc	desc = RelationGetDescr(claims);

	idem_refuse_distributed(claims);
	check_storage(claims);
	if (desc->natts < Natts_claims)
		refuse_layout(claims, NULL);
	for (int i = 0; i < Natts_claims; i++)
		check_column(claims, i);
	for (int i = Natts_claims; i < desc->natts; i++)
		if (!TupleDescAttr(desc, i)->attisdropped)
			refuse_layout(claims,
						  psprintf("DROP COLUMN %s",
								   quote_identifier(NameStr(TupleDescAttr(desc, i)->attname))));
}

void
idem_store_check_direct_writes(Relation claims)
{
	TupleConstr *constraints = RelationGetDescr(claims)->constr;

	if (claims->trigdesc != NULL)
		refuse_table(claims, "triggers, foreign keys or deferrable constraints",
					 "Drop them, also foreign keys of other tables that refer to it, and react to the application's own tables instead.");
	if (claims->rd_rules != NULL && claims->rd_rules->numLocks > 0)
		refuse_table(claims, "rules", "Drop them.");
	if (claims->rd_rel->relrowsecurity)
		refuse_table(claims, "row security",
					 psprintf("Run ALTER TABLE %s DISABLE ROW LEVEL SECURITY. Grant the functions rather than the table.",
							  idem_store_qualified_name(RelationGetRelid(claims))));
	if (constraints != NULL && constraints->num_check > 0)
		refuse_table(claims, "CHECK constraints", "Drop them.");
}

/* The hint names the columns as they are called now: they can have been renamed. */
static void
refuse_key(Relation claims)
{
	Oid			present;
	const char *drop = "";
	const char *columns[KEY_COLUMNS];

	(void) get_primary_key_attnos(RelationGetRelid(claims), true, &present);
	if (OidIsValid(present))
		drop = psprintf("DROP CONSTRAINT %s, ",
						quote_identifier(get_constraint_name(present)));
	for (int i = 0; i < KEY_COLUMNS; i++)
		columns[i] = quote_identifier(NameStr(TupleDescAttr(RelationGetDescr(claims),
															key_columns[i] - 1)->attname));
	refuse_table(claims, "another primary key than the extension gave it",
				 psprintf("Run ALTER TABLE %s %sADD PRIMARY KEY (%s, %s, %s). It is what prevents a second execution.",
						  idem_store_qualified_name(RelationGetRelid(claims)), drop,
						  columns[0], columns[1], columns[2]));
}

void
idem_store_check_key(Relation claims, Relation index)
{
	bool		same = index != NULL && index->rd_index->indisvalid &&
		index->rd_rel->relam == BTREE_AM_OID &&
		index->rd_index->indnkeyatts == KEY_COLUMNS;

	for (int i = 0; same && i < KEY_COLUMNS; i++)
		same = index->rd_index->indkey.values[i] == key_columns[i] &&
			index->rd_indcollation[i] == C_COLLATION_OID;
	if (!same)
		refuse_key(claims);
}

/* predicate: of an index, as the catalog has it.  Whether it is: state = 'in_progress' */
static bool
is_in_progress(Node *predicate)
{
	OpExpr	   *equal = (OpExpr *) predicate;
	Var		   *column;
	Const	   *label;

	if (!IsA(predicate, OpExpr) || get_opcode(equal->opno) != F_ENUM_EQ ||
		!IsA(linitial(equal->args), Var) || !IsA(lsecond(equal->args), Const))
		return false;
	column = linitial_node(Var, equal->args);
	label = lsecond_node(Const, equal->args);
	return column->varattno == Anum_claims_state && !label->constisnull &&
		DatumGetObjectId(label->constvalue) ==
		idem_catalog()->state[IDEM_STATE_IN_PROGRESS];
}

/* By what it is, not by its name: a user can have given that to another one. */
IdemIndexKind
idem_store_kind_of_index(Oid index)
{
	IdemIndexKind kind = IDEM_INDEX_OF_USER;
	HeapTuple	tuple;
	Form_pg_index form;
	Datum		predicate;
	bool		isnull;

	if (index == unsettled_index)
		return IDEM_INDEX_OF_UNSETTLED;
	tuple = SearchSysCache1(INDEXRELID, ObjectIdGetDatum(index));
	if (!HeapTupleIsValid(tuple))
		return IDEM_INDEX_OF_USER;
	form = (Form_pg_index) GETSTRUCT(tuple);
	predicate = SysCacheGetAttr(INDEXRELID, tuple, Anum_pg_index_indpred,
								&isnull);
	if (!form->indisunique && form->indnatts == 1)
	{
		if (form->indkey.values[0] == Anum_claims_expires_at && isnull)
			kind = IDEM_INDEX_BY_EXPIRY;
		else if (form->indkey.values[0] == Anum_claims_scope && !isnull &&
				 is_in_progress(stringToNode(TextDatumGetCString(predicate))))
			kind = IDEM_INDEX_OF_UNSETTLED;
	}
	ReleaseSysCache(tuple);
	if (kind == IDEM_INDEX_OF_UNSETTLED)
		unsettled_index = index;
	return kind;
}

void
idem_store_forget_index(Oid relid)
{
	if (relid == InvalidOid || relid == unsettled_index)
		unsettled_index = InvalidOid;
}

/* Whether a scan finds all of its rows, in order.  (An operator class has one access method.) */
static bool
is_usable(Relation index, bool expired)
{
	return index->rd_index->indisvalid &&
		get_index_column_opclass(RelationGetRelid(index), 1) ==
		(expired ? TIMESTAMPTZ_BTREE_OPS_OID : TEXT_BTREE_OPS_OID) &&
		(index->rd_indoption[0] & INDOPTION_DESC) == 0 &&
		(index->rd_indcollation[0] == InvalidOid ||
		 index->rd_indcollation[0] == C_COLLATION_OID);
}

Relation
idem_store_open_index(Relation claims, IdemIndexKind kind, LOCKMODE mode)
{
	bool		expired = kind == IDEM_INDEX_BY_EXPIRY;
	const char *name = expired ? "idem_claims_expires_at_idx" : "idem_claims_unsettled_idx";
	ListCell   *cell;

	foreach(cell, RelationGetIndexList(claims))
	{
		Relation	index;

		if (idem_store_kind_of_index(lfirst_oid(cell)) != kind)
			continue;
		index = index_open(lfirst_oid(cell), mode);
		if (is_usable(index, expired))
			return index;
		index_close(index, mode);
	}
	ereport(ERROR,
			(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
			 expired ?
			 errmsg("expired claims cannot be found: index \"%s\" is missing, not valid or another", name) :
			 errmsg("unsettled claims cannot be found: index \"%s\" is missing, not valid or another", name),
			 errhint("Run CREATE INDEX %s ON %s %s, after dropping what has its name, or REINDEX it.",
					 name, idem_store_qualified_name(RelationGetRelid(claims)),
					 expired ? "(expires_at)" : "(scope) WHERE state = 'in_progress'")));
}
