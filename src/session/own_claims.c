/*
 * own_claims.c
 *	  This transaction's claims: the keys that it holds and has not settled, and
 *	  the answer of the latest claim call.
 *
 * The short forms (idem_complete(result), idem_result()) read this, and settle.c does, to
 * tell a first settlement from a repeat.  Who holds a key is read from its row, never from
 * here: losing this memory would lose no claim.
 *
 * It follows savepoints.  Each entry carries the SubTransactionId in which it was made.
 * These ids grow with time, and while a subtransaction runs, everything happens in it or in
 * younger ones.  So when subtransaction S aborts, the tail of each list with ids >= S is
 * undone.  When S commits into its parent, the lists stay as they are.
 *
 * Everything lives in one memory context below TopTransactionContext and goes with the
 * transaction.  So a prepared transaction leaves nothing behind either.
 */
#include "postgres.h"

#include "access/xact.h"
#include "lib/ilist.h"
#include "lib/stringinfo.h"
#include "utils/memutils.h"
#include "utils/snapmgr.h"

#include "session/own_claims.h"

/* Number of keys that an error names */
#define NAMED_KEYS_MAX 5

typedef struct OwnClaim
{
	dlist_node	claim_node;		/* in own_claims, in the order of claiming */
	dlist_node	settle_node;	/* in settled_claims, in the order of settling */
	IdemKey		key;			/* the texts follow in the same allocation */
	SubTransactionId claimed_in;
	SubTransactionId settled_in;	/* InvalidSubTransactionId: not settled */
	const FmgrInfo *place;		/* the call that claimed it; never dereferenced */
	CommandId	statement;		/* of that call */
	struct OwnClaim *shadowed;	/* an earlier entry of the same key */
	bool		is_superseded;	/* unsettled, but a later entry of the key counts */
} OwnClaim;

/* The latest answer at one level of savepoints */
typedef struct AnswerLevel
{
	struct AnswerLevel *below;
	SubTransactionId given_in;
	OwnClaim   *claim;			/* entry of the claimed key; NULL: none */
	IdemLatest	latest;
} AnswerLevel;

typedef struct OwnClaimSlot
{
	OwnClaim   *claim;
	uint32		hash;
	char		status;
} OwnClaimSlot;

/* For a lookup, an OwnClaim with nothing but a key is enough. */
#define SH_PREFIX claim_hash
#define SH_ELEMENT_TYPE OwnClaimSlot
#define SH_KEY_TYPE OwnClaim *
#define SH_KEY claim
#define SH_HASH_KEY(tb, element) idem_key_hash(&(element)->key)
#define SH_EQUAL(tb, a, b) idem_key_equal(&(a)->key, &(b)->key)
#define SH_STORE_HASH
#define SH_GET_HASH(tb, slot) (slot)->hash
#define SH_SCOPE static inline
#define SH_DECLARE
#define SH_DEFINE
#include "lib/simplehash.h"

static MemoryContext claims_context = NULL;
static claim_hash_hash *claims_by_key; /* NULL: not needed yet */
static dlist_head own_claims;
static dlist_head settled_claims;
static int64 unsettled_count;
static AnswerLevel *answers;

static void
start_transaction(void)
{
	if (claims_context != NULL)
		return;
	claims_context = GenerationContextCreate(TopTransactionContext, "idem claims",
										   ALLOCSET_DEFAULT_SIZES);
	claims_by_key = NULL;
	dlist_init(&own_claims);
	dlist_init(&settled_claims);
	unsettled_count = 0;
	answers = NULL;
}

static void
end_transaction(XactEvent event, void *arg)
{
	/* The memory goes with TopTransactionContext. */
	if (event == XACT_EVENT_COMMIT || event == XACT_EVENT_ABORT ||
		event == XACT_EVENT_PREPARE)
		claims_context = NULL;
}

static bool
is_unsettled(const OwnClaim *claim)
{
	return claim->settled_in == InvalidSubTransactionId && !claim->is_superseded;
}

/*
 * A key can have an earlier entry: its request failed and was claimed again, or was forgotten, or
 * somebody deleted its row.  After such a DELETE the earlier entry is still unsettled.  It does
 * not count any more, unless the new claim is rolled back.
 */
static void
index_claim(claim_hash_hash *table, OwnClaim *claim)
{
	bool		found;
	OwnClaimSlot   *slot = claim_hash_insert(table, claim, &found);

	if (found)
	{
		claim->shadowed = slot->claim;
		if (is_unsettled(slot->claim))
		{
			slot->claim->is_superseded = true;
			unsettled_count--;
		}
	}
	slot->claim = claim;
}

/* Sets claims_by_key only when the table is complete: after an error, the next call makes a new one.
 * It does not count again the entries that the first one has marked as superseded. */
static void
index_all_claims(void)
{
	dlist_iter	iter;
	claim_hash_hash *table;

	if (claims_by_key != NULL)
		return;
	table = claim_hash_create(claims_context, 64, NULL);
	dlist_foreach(iter, &own_claims)
		index_claim(table, dlist_container(OwnClaim, claim_node, iter.cur));
	claims_by_key = table;
}

/* A claim does not look for earlier entries of its key.  Call this before unsettled_count is used:
 * it marks the superseded entries, and takes them off the count. */
static void
supersede(void)
{
	if (claims_context != NULL && unsettled_count > 1)
		index_all_claims();
}

/*
 * Mostly the latest claim is asked for, or none.  So the hash table is made only when it is
 * needed: making it in every transaction costs 5 % in figure 1 of the benchmark (fresh
 * claims) and 4 % in figure 3 (claim and complete).
 */
static OwnClaim *
find_claim(const IdemKey *key)
{
	OwnClaim	probe = {.key = *key};
	OwnClaim   *latest;
	OwnClaimSlot   *slot;

	if (claims_context == NULL || dlist_is_empty(&own_claims))
		return NULL;
	latest = dlist_tail_element(OwnClaim, claim_node, &own_claims);
	if (idem_key_equal(&latest->key, key))
		return latest;

	index_all_claims();
	slot = claim_hash_lookup(claims_by_key, &probe);
	return slot != NULL ? slot->claim : NULL;
}

static void
remove_claim(OwnClaim *claim)
{
	for (AnswerLevel *level = answers; level != NULL; level = level->below)
		if (level->claim == claim)
			level->claim = NULL;
	/* The entry that superseded it is younger: it was removed first. */
	Assert(!claim->is_superseded);
	/* A rollback has undone its settling first. */
	Assert(is_unsettled(claim));
	unsettled_count--;
	dlist_delete(&claim->claim_node);
	if (claims_by_key != NULL && claim->shadowed != NULL)
		claim_hash_lookup(claims_by_key, claim)->claim = claim->shadowed;
	else if (claims_by_key != NULL)
		claim_hash_delete(claims_by_key, claim);
	if (claim->shadowed != NULL && claim->shadowed->is_superseded)
	{
		claim->shadowed->is_superseded = false;
		unsettled_count++;
	}
	pfree(claim);
}

static void
pop_answer(void)
{
	AnswerLevel *level = answers;

	answers = level->below;
	if (level->latest.result != NULL)
		pfree(level->latest.result);
	pfree(level);
}

static void
undo_subtransaction(SubTransactionId aborted)
{
	while (answers != NULL && answers->given_in >= aborted)
		pop_answer();

	while (!dlist_is_empty(&settled_claims))
	{
		OwnClaim   *claim = dlist_tail_element(OwnClaim, settle_node,
											  &settled_claims);

		if (claim->settled_in < aborted)
			break;
		dlist_delete(&claim->settle_node);
		claim->settled_in = InvalidSubTransactionId;
		unsettled_count++;
	}

	while (!dlist_is_empty(&own_claims))
	{
		OwnClaim   *claim = dlist_tail_element(OwnClaim, claim_node, &own_claims);

		if (claim->claimed_in < aborted)
			break;
		remove_claim(claim);
	}
}

/* There is at most one level for each open savepoint: a loop of blocks must not pile levels
 * up. */
static void
merge_answers(SubTransactionId committed, SubTransactionId parent)
{
	AnswerLevel *level = answers;

	if (level == NULL || level->given_in != committed)
		return;
	Assert(level->below == NULL || level->below->given_in <= parent);
	level->given_in = parent;
	if (level->below != NULL && level->below->given_in == parent)
	{
		answers = level->below;
		level->below = answers->below;
		pop_answer();
		answers = level;
	}
}

static void
end_subtransaction(SubXactEvent event, SubTransactionId mine,
				   SubTransactionId parent, void *arg)
{
	if (claims_context == NULL)
		return;
	if (event == SUBXACT_EVENT_ABORT_SUB)
		undo_subtransaction(mine);
	else if (event == SUBXACT_EVENT_COMMIT_SUB)
		merge_answers(mine, parent);
}

void
idem_own_claims_init(void)
{
	RegisterXactCallback(end_transaction, NULL);
	RegisterSubXactCallback(end_subtransaction, NULL);
}

static text *
append_text(char **end, const text *source)
{
	text	   *copy = (text *) *end;

	memcpy(copy, source, VARSIZE_ANY(source));
	*end += INTALIGN(VARSIZE_ANY(source));
	return copy;
}

static OwnClaim *
make_claim(const IdemKey *key)
{
	Size		bytes = MAXALIGN(sizeof(OwnClaim)) +
		INTALIGN(VARSIZE_ANY(key->scope)) +
		INTALIGN(VARSIZE_ANY(key->user_id)) +
		INTALIGN(VARSIZE_ANY(key->request_id));
	OwnClaim   *claim = MemoryContextAlloc(claims_context, bytes);
	char	   *end = (char *) claim + MAXALIGN(sizeof(OwnClaim));

	claim->key.scope = append_text(&end, key->scope);
	claim->key.user_id = append_text(&end, key->user_id);
	claim->key.request_id = append_text(&end, key->request_id);
	claim->claimed_in = GetCurrentSubTransactionId();
	claim->settled_in = InvalidSubTransactionId;
	claim->shadowed = NULL;
	claim->is_superseded = false;
	return claim;
}

/* Sets the answer at the level of the current savepoint. */
static void
set_answer(OwnClaim *claim, IdemOutcome outcome, const Jsonb *result)
{
	SubTransactionId mine = GetCurrentSubTransactionId();
	AnswerLevel *level = answers;

	Assert(level == NULL || level->given_in <= mine);
	if (level == NULL || level->given_in != mine)
	{
		level = MemoryContextAllocZero(claims_context, sizeof(AnswerLevel));
		level->below = answers;
		level->given_in = mine;
		answers = level;
	}
	level->claim = claim;
	level->latest.outcome = outcome;
	if (level->latest.result != NULL)
		pfree(level->latest.result);
	level->latest.result = NULL;
	if (result != NULL)
	{
		level->latest.result = MemoryContextAlloc(claims_context, VARSIZE(result));
		memcpy(level->latest.result, result, VARSIZE(result));
	}
}

void
idem_own_note_claimed(const IdemKey *key, const FmgrInfo *place)
{
	OwnClaim   *claim;

	start_transaction();
	claim = make_claim(key);
	claim->place = place;
	claim->statement = GetActiveSnapshot()->curcid;
	if (claims_by_key != NULL)
		index_claim(claims_by_key, claim);
	dlist_push_tail(&own_claims, &claim->claim_node);
	unsettled_count++;
	set_answer(claim, IDEM_CLAIMED, NULL);
}

void
idem_own_note_answer(const IdemKey *key, IdemOutcome outcome,
					  const Jsonb *result, bool ours)
{
	Assert(outcome != IDEM_INVALID);
	start_transaction();
	set_answer(ours ? find_claim(key) : NULL, outcome, result);
}

/*
 * An entry that is settled in the savepoint where it was claimed can go: a rollback undoes
 * both or neither.  An entry that was claimed outside of this savepoint stays, because a
 * rollback makes it unsettled again.  When an entry goes, the one that it superseded counts
 * again, and is settled in the same way.
 */
void
idem_own_note_settled(const IdemKey *key, const Jsonb *result)
{
	OwnClaim   *claim;
	OwnClaim   *superseded;

	supersede();
	/* key is not used after the first entry is removed: it can be that entry's own. */
	for (claim = find_claim(key); claim != NULL && is_unsettled(claim);
		 claim = superseded)
	{
		superseded = claim->shadowed;
		/* The latest claim call asked for this key: idem_result() now returns the result. */
		if (answers != NULL && answers->claim == claim)
			set_answer(claim, answers->latest.outcome, result);
		if (claim->claimed_in == GetCurrentSubTransactionId())
			remove_claim(claim);
		else
		{
			claim->settled_in = GetCurrentSubTransactionId();
			dlist_push_tail(&settled_claims, &claim->settle_node);
			unsettled_count--;
		}
	}
}

bool
idem_own_is_unsettled(const IdemKey *key)
{
	OwnClaim   *claim = find_claim(key);

	return claim != NULL && is_unsettled(claim);
}

bool
idem_own_is_claimed_elsewhere(const IdemKey *key, const FmgrInfo *place)
{
	OwnClaim   *claim = find_claim(key);

	return claim != NULL && is_unsettled(claim) && claim->place != place &&
		claim->statement == GetActiveSnapshot()->curcid;
}

static char *
name_unsettled(void)
{
	StringInfoData names;
	dlist_iter	iter;
	int			nnamed = 0;

	initStringInfo(&names);
	dlist_foreach(iter, &own_claims)
	{
		OwnClaim   *claim = dlist_container(OwnClaim, claim_node, iter.cur);

		if (!is_unsettled(claim))
			continue;
		if (nnamed++ == NAMED_KEYS_MAX)
		{
			appendStringInfoString(&names, "; and more");
			break;
		}
		if (names.len > 0)
			appendStringInfoString(&names, "; ");
		appendStringInfoString(&names, idem_key_to_string(&claim->key));
	}
	return names.data;
}

const IdemKey *
idem_own_only_unsettled(const char *command)
{
	dlist_iter	iter;

	supersede();
	if (claims_context == NULL || unsettled_count == 0)
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("%s: no unsettled request in this transaction",
						command),
				 errhint("Claim the request first, in the same transaction: without BEGIN each statement is a transaction of its own. A claim that was rolled back to a savepoint is forgotten; a settled request stays as it is. For a lease pass its ids and token.")));
	if (unsettled_count > 1)
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("%s: more than one unsettled request in this transaction",
						command),
				 errdetail("It holds %lld: %s.", (long long) unsettled_count,
						   name_unsettled()),
				 errhint("Name the one that is meant: pass user_id, request_id and scope.")));

	/* Mostly the last one */
	dlist_reverse_foreach(iter, &own_claims)
	{
		OwnClaim   *claim = dlist_container(OwnClaim, claim_node, iter.cur);

		if (is_unsettled(claim))
			return &claim->key;
	}
	pg_unreachable();
}

const IdemLatest *
idem_own_latest_answer(void)
{
	return claims_context != NULL && answers != NULL ? &answers->latest : NULL;
}
