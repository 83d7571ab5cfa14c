/*
 * claim.c
 *	  The protocol: which outcome a claim has, and why.
 *
 * The order of decisions, the same on every path:
 *
 *	1. the arguments, and what the scope's policy says of them;
 *	2. another transaction is inserting, updating or deleting the row: wait for it, and look
 *	   again.  A row that is not committed says nothing, its fingerprint included.  A key of
 *	   our own transaction is never waited for;
 *	3. an expired row of a scope with expired = reclaim: as if it were absent;
 *	4. the fingerprint, where both sides have one;
 *	5. completed; failed for good;
 *	6. in progress under a live lease: wait for it, and look again;
 *	7. in progress under a lease that lapsed: claimed in place, or unknown, by policy; unknown
 *	   also where the holder recorded progress, and the call cannot tell its caller;
 *	8. failed and retryable: claimed in place;
 *	9. absent: the key's own time, then insert.
 *
 * Only an insert or update that succeeds ends in "claimed".  A claim that loses the race for
 * either looks again.  So exactly one of the waiters replaces a holder that vanished, and no
 * claim is answered "claimed" without a row.
 *
 * One attempt never waits: it returns what to wait for.  Therefore a lease can look and write
 * under the lock of its key, see idem_store_lock_key().  (There are two exceptions, which
 * lock_timeout bounds: a unique index of a user, see store/open.c; and, for a value that goes to
 * TOAST, a REINDEX of the TOAST table alone.)
 *
 * Release table locks before sleeping until a lease ends: otherwise DDL queues behind the
 * sleeper, and the lease holder behind the DDL; the deadlock detector cannot see latch
 * waits.  A transaction that has written rows keeps its locks.
 */
#include "postgres.h"

#include "access/htup_details.h"
#include "funcapi.h"
#include "miscadmin.h"
#include "utils/timestamp.h"

#include "sqlstate.h"
#include "protocol/claim.h"
#include "protocol/find_row.h"
#include "protocol/raise.h"
#include "session/own_claims.h"
#include "shared/stats.h"
#include "store/catalog.h"
#include "store/duration.h"

/*
 * Nobody executes the request of a key whose row is being deleted.  So even a claim that
 * does not want to wait waits for the delete, for this long.  Mostly a cleaner deletes, in
 * batches of about a second; a delete that takes longer is of some open transaction.
 */
#define DELETE_WAIT_US (5 * USECS_PER_SEC)

/*
 * A group of so many new keys, or more, is claimed together, in a subtransaction.  Without groups,
 * figure 4 of the benchmark (batches) takes 40 % longer.  Fewer keys are claimed one by one, without
 * a subtransaction: once a transaction has had more than 64 subtransactions with an id
 * (PGPROC_MAX_CACHED_SUBXIDS), the snapshots of all other sessions cost more.
 */
#define TOGETHER_MIN 64

/* After 16 absent keys in a row, look once at the whole range of the keys that follow, by
 * idem_store_is_empty_between(). */
#define ABSENT_IN_A_ROW 16

/* What comes next */
typedef enum Step
{
	STEP_WRITE,					/* write its row */
	STEP_ANSWER,
	STEP_AGAIN,					/* another claim was first, or the policy has changed */
	STEP_WAIT_FOR_POLICY,
	STEP_WAIT_FOR_DDL,
	STEP_WAIT_FOR_TRANSACTION,
	STEP_WAIT_FOR_ROW_LOCK,
	STEP_WAIT_FOR_LEASE
} Step;

/* What the table said of the key */
typedef struct Look
{
	bool		taken;			/* the rest is set, and not used yet */
	bool		guessed;		/* guessed that the key is new: do not guess again */
	IdemProbe	probe;
	IdemFound	found;
} Look;

static const IdemClaimAnswer no_answer = {
	.expires_at = IDEM_NO_TIME,
	.lease_until = IDEM_NO_TIME
};

PG_FUNCTION_INFO_V1(idem_claim);
PG_FUNCTION_INFO_V1(idem_try_claim);
PG_FUNCTION_INFO_V1(idem_lease);

/* Whether the request of a key without a row may have been executed and forgotten */
static bool
is_stale(const IdemClaimCall *call)
{
	return call->policy.key_time_uuidv7 &&
		idem_may_be_forgotten(&call->policy, call->key_time);
}

/* Decisions 4 to 8.  IDEM_CLAIMED: the row can be claimed in place.  IDEM_IN_PROGRESS: it is
 * ours, or under a live lease. */
static IdemOutcome
decide(const IdemClaimCall *call, const IdemFound *found)
{
	const IdemRow *row = &found->row;

	/* A wide row can have compressed its fingerprint. */
	if (call->fingerprint != NULL && row->fingerprint != NULL &&
		!idem_id_equal(call->fingerprint,
					   PG_DETOAST_DATUM_PACKED(PointerGetDatum(row->fingerprint))))
		return IDEM_MISMATCH;

	switch (row->state)
	{
		case IDEM_STATE_COMPLETED:
			return IDEM_COMPLETED;
		case IDEM_STATE_FAILED:
			return call->policy.failed_retryable ? IDEM_CLAIMED : IDEM_FAILED;
		case IDEM_STATE_IN_PROGRESS:
			if (found->ours || row->lease_until > GetCurrentTimestamp())
				return IDEM_IN_PROGRESS;
			/* A caller who does not see the progress would do all the work again. */
			if (row->progress != NULL && !call->tells_progress)
				return IDEM_UNKNOWN;
			return call->policy.lapsed_unknown ? IDEM_UNKNOWN : IDEM_CLAIMED;
	}
	pg_unreachable();
}

/*
 * Makes the row that a claim writes.  A successor's request is the same request: it keeps
 * the fingerprint, the time until which it is remembered, and the progress, which it has not
 * been told yet when it passes its own.
 *
 * If the policy has changed, the claim keeps the lock of the policies.  The next attempt reads the
 * policy under this lock, so it cannot change again.
 */
static Step
promise(IdemClaimCall *call, const IdemRow *predecessor, IdemRow *row)
{
	*row = (IdemRow) {
		.state = IDEM_STATE_COMPLETED,
		.lease_until = IDEM_NO_TIME,
		.fingerprint = (const IdemStored *) call->fingerprint,
		.progress = (const IdemStored *) call->progress
	};
	switch (idem_policy_promise(&call->policy, call->key_time,
								&row->expires_at))
	{
		case IDEM_PROMISE_MADE:
			break;
		case IDEM_PROMISE_OUTDATED:
			call->has_policy = false;
			return STEP_AGAIN;
		case IDEM_PROMISE_REFUSED:
			return STEP_WAIT_FOR_POLICY;
	}
	if (!idem_store_prepare_write(call->lease_us > 0))
		return STEP_WAIT_FOR_DDL;
	if (call->lease_us > 0)
	{
		row->state = IDEM_STATE_IN_PROGRESS;
		row->lease_until = GetCurrentTimestamp() + call->lease_us;
		row->expires_at = Max(row->expires_at, row->lease_until);
		row->token = idem_store_draw_token();
	}
	if (predecessor != NULL)
	{
		row->expires_at = Max(row->expires_at, predecessor->expires_at);
		if (row->fingerprint == NULL)
			row->fingerprint = predecessor->fingerprint;
		if (predecessor->progress != NULL)
			row->progress = predecessor->progress;
	}
	return STEP_WRITE;
}

/* progress: the holder's, or that of the row that was claimed in place */
static void
answer_with(IdemClaimAnswer *answer, IdemOutcome outcome, const IdemRow *row,
			const IdemStored *progress)
{
	*answer = (IdemClaimAnswer) {
		.outcome = outcome,
		.result = idem_stored_jsonb(row->result),
		.progress = idem_stored_jsonb(progress),
		.token = outcome == IDEM_CLAIMED ? row->token : 0,
		.expires_at = row->expires_at,
		.lease_until = row->lease_until
	};
}

/*
 * Answers after an insert, and deletes the row again if its key has become stale meanwhile.
 * Between our look at the key (or our guess) and the insert, the row of an earlier execution can
 * have expired, and a cleaner can have removed it.  A key that is not stale even after the insert
 * rules this out: the earlier row would not have expired yet, and the insert would have met it.
 */
static void
answer_inserted(const IdemClaimCall *call, const IdemRow *row,
				IdemClaimAnswer *answer)
{
	IdemFound	mine;

	if (!is_stale(call))
	{
		answer_with(answer, IDEM_CLAIMED, row, NULL);
		return;
	}
	if (!idem_store_find_ours(&call->key, &mine) || !idem_store_delete(&mine))
		elog(ERROR, "the row of a claim that was just inserted is missing");
	answer->outcome = IDEM_STALE;
}

static Step
claim_absent(IdemClaimCall *call, IdemClaimAnswer *answer)
{
	Step		step;
	IdemRow		row;

	if (is_stale(call))
	{
		/* A probe can miss a row.  An insert would find it, but there is none here. */
		answer->outcome = IDEM_STALE;
		return idem_store_is_absent(&call->key) ? STEP_ANSWER : STEP_AGAIN;
	}
	step = promise(call, NULL, &row);
	if (step != STEP_WRITE)
		return step;
	if (!idem_store_insert(&call->key, &row))
		return STEP_AGAIN;
	answer_inserted(call, &row, answer);
	return STEP_ANSWER;
}

static Step
claim_in_place(IdemClaimCall *call, const IdemFound *found,
			   const IdemRow *predecessor, IdemClaimAnswer *answer)
{
	IdemRow		row;
	Step		step = promise(call, predecessor, &row);

	if (step != STEP_WRITE)
		return step;
	if (!idem_store_update(&call->key, found, &row))
		return STEP_WAIT_FOR_ROW_LOCK;
	answer_with(answer, IDEM_CLAIMED, &row,
				predecessor == NULL ? NULL : predecessor->progress);
	if (predecessor != NULL)
		idem_stats_count_at_commit(IDEM_COUNT_TAKEOVERS);
	return STEP_ANSWER;
}

/* One look at the key, unless it is taken already, and one write, without waiting */
static Step
attempt(IdemClaimCall *call, Look *look, IdemClaimAnswer *answer)
{
	IdemFound  *found = &look->found;
	IdemOutcome outcome;
	/* A lease must look before it draws a token. */
	bool		may_guess = !look->guessed && call->lease_us == 0 &&
		!is_stale(call);

	Assert(call->has_policy);
	if (!look->taken)
		look->probe = idem_store_probe(&call->key, may_guess, found);
	/* The next attempt needs a new one. */
	look->taken = false;
	if (look->probe == IDEM_PROBE_GUESSED_ABSENT)
	{
		/* Whatever stops the insert, look at the key next: if its row is there, the claim
		 * need not wait for a change of a promise. */
		look->guessed = true;
		return claim_absent(call, answer) == STEP_ANSWER ?
			STEP_ANSWER : STEP_AGAIN;
	}
	if (look->probe == IDEM_PROBE_ABSENT)
		return claim_absent(call, answer);
	if (look->probe != IDEM_PROBE_PRESENT)
		return STEP_WAIT_FOR_TRANSACTION;

	if (!found->ours && idem_policy_ignores_row(&call->policy, found->row.state,
												found->row.lease_until,
												found->row.expires_at))
	{
		if (!is_stale(call))
			return claim_in_place(call, found, NULL, answer);
		answer->outcome = IDEM_STALE;
		return STEP_ANSWER;
	}

	outcome = decide(call, found);
	if (outcome == IDEM_CLAIMED)
		return claim_in_place(call, found, &found->row, answer);
	answer->outcome = outcome;
	/* In a mismatch, the row belongs to another request. */
	if (outcome != IDEM_MISMATCH)
		answer_with(answer, outcome, &found->row, found->row.progress);
	if (outcome == IDEM_IN_PROGRESS)
		answer->blocked_by.lease_until = found->row.lease_until;
	return outcome == IDEM_IN_PROGRESS && !found->ours ?
		STEP_WAIT_FOR_LEASE : STEP_ANSWER;
}

/* False: the scope needs the time in its keys, and this key has none (IDEM_NO_KEY_TIME), or
 * one that is ahead of the clock. */
static bool
read_key_time(IdemClaimCall *call)
{
	call->key_time = IDEM_NO_KEY_TIME;
	return !call->policy.key_time_uuidv7 ||
		(idem_key_parse_time(&call->key, &call->key_time) &&
		 call->key_time <= GetCurrentTimestamp() + IDEM_KEY_TIME_SKEW_US);
}

/* Reads the policy, if the call has none, and checks the arguments by it.  False: the key's
 * time is not as the policy wants it. */
static bool
take_policy(IdemClaimCall *call)
{
	if (!call->has_policy)
	{
		/* Taking the table's lock can wait for DDL, whose transaction can also have changed
		 * the policy: so the lock comes first. */
		if (call->has_stepped_back)
			idem_store_reopen();
		call->has_stepped_back = false;
		call->policy = idem_policy_to_claim(call->key.scope);
		call->has_policy = true;
	}
	if (!read_key_time(call))
		return false;
	if (call->lease_us > 0)
	{
		idem_check_lease(&call->key, &call->policy, call->lease_us);
		idem_check_size(&call->key, &call->policy, call->progress, "progress");
	}
	return true;
}

/* False: the deadline passed; the blocker is set then.  (That of a lease is set before.) */
static bool
wait_for_holder(IdemClaimCall *call, Step step, Look *look,
				const IdemDeadline *delete_deadline, IdemBlockedBy *blocked_by)
{
	IdemFound  *found = &look->found;
	const IdemDeadline *deadline = &call->deadline;

	Assert(step >= STEP_WAIT_FOR_POLICY);
	idem_claim_end(call);
	if (step == STEP_WAIT_FOR_LEASE)
	{
		idem_store_step_back();
		call->has_stepped_back = true;
		return idem_wait_for_lease(&call->key, found->row.lease_until,
								   &call->deadline);
	}

	idem_wait_end();
	if (step == STEP_WAIT_FOR_POLICY || step == STEP_WAIT_FOR_DDL)
	{
		bool		by_ddl = step == STEP_WAIT_FOR_DDL;

		/* One refusal counts for all keys of the call. */
		blocked_by->changed = by_ddl ? "an index of idem_claims, or idem_token_seq," :
			"idem_scopes";
		call->is_refused = call->is_refused ||
			!idem_wait_for_lock(by_ddl ? idem_store_wait_lock : idem_policy_wait_lock,
								by_ddl ? "a change of idem_claims" : "a change of idem_scopes",
								deadline);
		return !call->is_refused;
	}
	if (step == STEP_WAIT_FOR_ROW_LOCK && !idem_find_locker(found))
		return true;
	blocked_by->xid = found->xid;
	if (look->probe == IDEM_PROBE_DELETING && found->speculative == 0 &&
		deadline->at_us < delete_deadline->at_us)
		deadline = delete_deadline;
	return idem_wait_for_transaction(&call->key, found->xid,
									 found->speculative, deadline);
}

/* The caller takes the second answer for the first, and does not do the work. */
static void
refuse_second_place(const IdemClaimCall *call, const IdemClaimAnswer *answer)
{
	if ((answer->outcome == IDEM_COMPLETED ||
		 answer->outcome == IDEM_IN_PROGRESS) && call->place != NULL &&
		idem_own_is_claimed_elsewhere(&call->key, call->place))
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("request is claimed twice by one statement"),
				 idem_errdetail_key(&call->key),
				 errhint("Write SELECT * FROM idem_try_claim(...): (f()).* calls f once for each column. A subquery of UPDATE is evaluated again if the row was changed meanwhile: lock the rows first, then claim them one by one in a loop.")));
}

static void
note_answer(IdemClaimCall *call, const IdemClaimAnswer *answer, bool ours)
{
	if (answer->outcome == IDEM_CLAIMED)
	{
		if (!call->settled_at_once)
			idem_own_note_claimed(&call->key, call->place);
		idem_stats_count_claim(call->key.scope, answer->expires_at);
		if (call->lease_us > 0)
			idem_commit_lease(&call->key);
	}
	else if (answer->outcome != IDEM_INVALID)
	{
		if (!call->settled_at_once)
			idem_own_note_answer(&call->key, answer->outcome, answer->result,
								  ours);
		idem_stats_count_outcome(call->key.scope, answer->outcome);
	}
}

void
idem_claim_end(IdemClaimCall *call)
{
	idem_policy_unlock();
	call->has_policy = false;
}

/* A waiter looks many times, and must not keep each answer in memory. */
static void
discard_answer(IdemClaimAnswer *answer)
{
	if (answer->result != NULL)
		pfree(answer->result);
	if (answer->progress != NULL)
		pfree(answer->progress);
	*answer = no_answer;
}

/* IDEM_INVALID: the key's time is not as the policy wants it; that is not counted yet. */
static void
claim_key(IdemClaimCall *call, Look *look, IdemClaimAnswer *answer)
{
	Step		step;
	int64		wait_began_us = 0;
	IdemDeadline delete_deadline = {.wait_us = DELETE_WAIT_US};
	bool		ours;

	*answer = no_answer;
	for (;;)
	{
		CHECK_FOR_INTERRUPTS();
		discard_answer(answer);
		step = STEP_ANSWER;
		answer->outcome = IDEM_INVALID;
		if (!take_policy(call))
			break;
		if (call->lease_us > 0)
			idem_store_lock_key(&call->key);
		step = attempt(call, look, answer);
		if (call->lease_us > 0)
			idem_store_unlock_key(&call->key);
		if (step == STEP_ANSWER)
			break;
		if (step == STEP_AGAIN)
			continue;
		if (wait_began_us == 0)
		{
			wait_began_us = idem_monotonic_us();
			idem_deadline_begin(&call->deadline);
			idem_deadline_begin(&delete_deadline);
		}
		if (!wait_for_holder(call, step, look, &delete_deadline,
							 &answer->blocked_by))
		{
			answer->outcome = idem_outcome_of_passed(&call->deadline);
			idem_store_note_read(&call->key);
			break;
		}
	}

	if (wait_began_us != 0)
	{
		idem_wait_end();
		if (call->deadline.wait_us != 0)
		{
			idem_stats_count(IDEM_COUNT_WAITS, 1);
			idem_stats_count(IDEM_COUNT_WAIT_US, idem_monotonic_us() - wait_began_us);
		}
	}
	ours = step == STEP_ANSWER && look->probe == IDEM_PROBE_PRESENT &&
		look->found.ours;
	if (ours)
		refuse_second_place(call, answer);
	note_answer(call, answer, ours);
}

/* ----- many keys ----- */

static void
set_item(IdemClaimCall *call, const IdemClaimItem *item)
{
	call->key = item->key;
	call->fingerprint = item->fingerprint;
}

/*
 * Returns how many of the first items count as absent.  Sets look to what the table says of the first
 * item.  look->guessed: not all later items were looked up, some are guessed absent.  Stops at an
 * item that repeats the key before it: its answer depends on that one.
 */
static int
count_absent(IdemClaimCall *call, const IdemClaimItem *items, int nitems,
			 bool may_guess, Look *look)
{
	Look		further;
	bool		rest_is_absent = false;
	int			n;

	look->taken = look->guessed = false;
	for (n = 0; n < nitems; n++)
	{
		/* cppcheck-suppress uninitvar ; only its address is taken */
		Look	   *latest = n == 0 ? look : &further;

		CHECK_FOR_INTERRUPTS();
		Assert(n == 0 || idem_store_compare_keys(&items[n - 1].key,
												 &items[n].key) <= 0);
		set_item(call, &items[n]);
		if ((n > 0 && idem_key_equal(&items[n - 1].key, &call->key)) ||
			!take_policy(call))
			break;
		if (n == ABSENT_IN_A_ROW)
		{
			rest_is_absent =
				idem_store_is_empty_between(&call->key,
											&items[nitems - 1].key);
			look->guessed = !rest_is_absent && may_guess &&
				idem_store_may_guess(nitems);
			rest_is_absent = rest_is_absent || look->guessed;
		}
		if (!rest_is_absent)
		{
			latest->probe = idem_store_probe(&call->key, false,
											 &latest->found);
			latest->taken = true;
			if (latest->probe != IDEM_PROBE_ABSENT)
				break;
		}
		if (is_stale(call))
			break;
	}
	return n;
}

/* False: nothing is claimed, because a key is no longer free, or a change of a promise is
 * under way. */
static bool
claim_absent_keys(IdemClaimCall *call, const IdemClaimItem *items, int nitems,
				  IdemClaimAnswer *answers)
{
	IdemNewRow *rows = palloc(nitems * sizeof(IdemNewRow));

	for (int i = 0; i < nitems; i++)
	{
		set_item(call, &items[i]);
		(void) read_key_time(call);
		rows[i].key = call->key;
		if (promise(call, NULL, &rows[i].row) != STEP_WRITE)
			return false;
	}
	if (!idem_store_insert_many(rows, nitems))
		return false;
	for (int i = 0; i < nitems; i++)
	{
		set_item(call, &items[i]);
		(void) read_key_time(call);
		answers[i] = no_answer;
		answer_inserted(call, &rows[i].row, &answers[i]);
		note_answer(call, &answers[i], false);
	}
	return true;
}

/*
 * Claims the first items together, if they are new and many enough: nabsent of them.  False:
 * nothing is claimed; nabsent of them have no row, and look is the look at the first one.
 */
static bool
claim_together(IdemClaimCall *call, const IdemClaimItem *items, int nitems,
			   IdemClaimAnswer *answers, Look *look, int *nabsent)
{
	bool		may_guess = nitems >= TOGETHER_MIN;

	*nabsent = 0;
	/* After a refusal no key can be claimed: look at one at a time. */
	if (call->is_refused)
		return false;
	/* After a wrong guess, look at all of them. */
	for (;; may_guess = false)
	{
		*nabsent = count_absent(call, items, nitems, may_guess, look);
		if (*nabsent >= TOGETHER_MIN &&
			claim_absent_keys(call, items, *nabsent, answers))
			return true;
		if (!look->guessed)
			return false;
	}
}

/* It waits for another transaction only after all earlier keys are claimed. */
int
idem_claim_first_keys(IdemClaimCall *call, const IdemClaimItem *items,
					  int nitems, IdemClaimAnswer *answers)
{
	Look		look = {.taken = false};
	int			nabsent;

	Assert(nitems > 0 && call->lease_us == 0);
	if (claim_together(call, items, Min(nitems, IDEM_INSERT_MANY_MAX),
					   answers, &look, &nabsent))
		return nabsent;

	nabsent = Max(nabsent, 1);
	for (int i = 0; i < nabsent; i++)
	{
		set_item(call, &items[i]);
		claim_key(call, &look, &answers[i]);
		/* Stop here: only one stored result is to be in memory. */
		if (answers[i].outcome != IDEM_CLAIMED)
			return i + 1;
		/* The next key was absent, like this one. */
		look.taken = true;
		look.probe = IDEM_PROBE_ABSENT;
	}
	return nabsent;
}

/* ----- SQL ----- */

static void
raise_key_time(const IdemClaimCall *call)
{
	bool		is_ahead = call->key_time != IDEM_NO_KEY_TIME;

	ereport(ERROR,
			(errcode(ERRCODE_IDEM_INVALID),
			 is_ahead ? errmsg("request id is ahead of the clock") :
			 errmsg("request_id is not a version 7 UUID in canonical lower-case form"),
			 idem_errdetail_key(&call->key),
			 is_ahead ? errhint("Fix the client: its clock is more than a minute ahead.") :
			 errhint("Fix the client: this scope has key_time = uuidv7 and needs the time in the id.")));
}

/* Arguments: user_id and request_id, and from the position scope on: scope, fingerprint, wait. */
static void
read_arguments(FunctionCallInfo fcinfo, int scope, IdemClaimCall *call)
{
	*call = (IdemClaimCall) {.place = fcinfo->flinfo};
	call->deadline = idem_deadline_from_arg(fcinfo, scope + 2);
	idem_key_from_args(fcinfo, 0, 1, scope, &call->key);
	call->fingerprint = idem_fingerprint_from_arg(fcinfo, scope + 1);
}

void
idem_claim_one(IdemClaimCall *call, const char *command,
			   IdemClaimAnswer *answer)
{
	Look		look = {.taken = false};

	idem_store_open(command);
	claim_key(call, &look, answer);
	idem_claim_end(call);
	if (answer->outcome == IDEM_INVALID)
		raise_key_time(call);
}

/* true: claimed; false: completed before; raises any other outcome. */
static bool
claim_or_raise(IdemClaimCall *call, const char *command)
{
	IdemClaimAnswer answer;

	idem_claim_one(call, command, &answer);
	if (answer.outcome != IDEM_CLAIMED && answer.outcome != IDEM_COMPLETED)
		idem_raise_outcome(answer.outcome, &call->key, &answer.blocked_by, NULL);
	return answer.outcome == IDEM_CLAIMED;
}

bool
idem_claim_marker(const IdemKey *key, const char *command)
{
	IdemClaimCall call = {
		.key = *key,
		.settled_at_once = true,
		.deadline = idem_deadline_from_setting()
	};

	return claim_or_raise(&call, command);
}

/*
 * idem_claim(user_id, request_id, scope, fingerprint, wait) -> boolean
 *
 * true: claimed, do the work.  false: completed before.  Anything else raises.
 */
Datum
idem_claim(PG_FUNCTION_ARGS)
{
	IdemClaimCall call;

	read_arguments(fcinfo, 2, &call);
	PG_RETURN_BOOL(claim_or_raise(&call, "idem_claim()"));
}

/* The row of an answer: outcome, result, progress, expires_at, lease_until, and, as a sixth
 * column, the token. */
static Datum
make_row(FunctionCallInfo fcinfo, const IdemClaimAnswer *answer, int ncolumns)
{
	TupleDesc	desc;
	Datum		values[6];
	bool		nulls[6] = {false};

	if (get_call_result_type(fcinfo, NULL, &desc) != TYPEFUNC_COMPOSITE)
		elog(ERROR, "return type must be a row type");
	idem_require_columns(desc, ncolumns);
	values[0] = ObjectIdGetDatum(idem_catalog()->outcome[answer->outcome]);
	values[1] = PointerGetDatum(answer->result);
	nulls[1] = answer->result == NULL;
	values[2] = PointerGetDatum(answer->progress);
	nulls[2] = answer->progress == NULL;
	values[3] = TimestampTzGetDatum(answer->expires_at);
	nulls[3] = answer->expires_at == IDEM_NO_TIME;
	values[4] = TimestampTzGetDatum(answer->lease_until);
	nulls[4] = answer->lease_until == IDEM_NO_TIME;
	values[5] = Int64GetDatum(answer->token);
	nulls[5] = answer->token == 0;
	return HeapTupleGetDatum(heap_form_tuple(BlessTupleDesc(desc), values,
											 nulls));
}

/*
 * idem_try_claim(user_id, request_id, scope, fingerprint, wait)
 *		-> (outcome, result, progress, expires_at, lease_until)
 *
 * Never raises an outcome.
 */
Datum
idem_try_claim(PG_FUNCTION_ARGS)
{
	IdemClaimCall call;
	IdemClaimAnswer answer;

	read_arguments(fcinfo, 2, &call);
	call.tells_progress = true;
	idem_claim_one(&call, "idem_try_claim()", &answer);
	return make_row(fcinfo, &answer, 5);
}

/*
 * idem_lease(user_id, request_id, lease, scope, fingerprint, wait, progress)
 *		-> (the same, token)
 *
 * Claims beyond the transaction, until the lease ends.  Never raises an outcome.
 */
Datum
idem_lease(PG_FUNCTION_ARGS)
{
	IdemClaimCall call;
	IdemClaimAnswer answer;

	read_arguments(fcinfo, 3, &call);
	call.lease_us = idem_lease_from_arg(fcinfo, 2);
	if (call.lease_us == 0)
		ereport(ERROR,
				(errcode(ERRCODE_IDEM_INVALID),
				 errmsg("lease must not be null"),
				 errhint("Fix the client: pass how long the lease lasts, such as '30 s'.")));
	call.progress = PG_ARGISNULL(6) ? NULL : PG_GETARG_JSONB_P(6);
	call.tells_progress = true;
	idem_claim_one(&call, "idem_lease()", &answer);
	return make_row(fcinfo, &answer, 6);
}
