/*
 * 015_rescan.c
 *	  Runs the rescan in a simulated database: without a server, and with a clock of its
 *	  own.  Arguments: a seed, and the number of databases to simulate.
 *
 * A simulated database has rows that come at a steady rate and expire, dead entries where
 * rows were removed, and strays: rows that appear behind the mark, announced or not, maybe
 * locked for some time.  The launcher, the batch and the earliest expiry that is known do
 * what launcher.c, batch.c and stats.c do.
 */
#include "postgres.h"

/* Asserts are checked in a server without them, too. */
#undef Assert
#define Assert(condition) check(condition, #condition)

#undef printf
#include <stdio.h>
#include <stdlib.h>

static void check(bool condition, const char *text);

#include "clean/schedule.c"

#define SECOND USECS_PER_SEC
#define START 2000				/* the first second of a simulation */
#define SECONDS 12000			/* the last one, in which nothing expires */
#define STRAYS 40

/* launcher.c: idem.cleanup_interval, and LOOK_INTERVAL */
#define INTERVAL (5 * SECOND)
#define LOOK_INTERVAL (60 * SECOND)

typedef struct Stray
{
	int			second;			/* in which it expires */
	TimestampTz appears_at;
	TimestampTz free_at;		/* locked until then */
	TimestampTz removed_at;		/* 0: it is there */
	bool		is_announced;
} Stray;

static uint64 random_state;
static uint64 seed;

/* the database */
static int64 now;
static int64 live[SECONDS];
static int64 dead[SECONDS];
static Stray strays[STRAYS];
static int	rate;				/* rows a second */
static int	ttl;
static int	dead_us;			/* time of 1000 dead entries */
static bool snapshot_held;		/* dead entries stay */

/* stats.c */
static TimestampTz oldest;
static TimestampTz claimed;
static bool backlog;

/* what was observed */
static int64 slice_us;			/* of the current rescan, without slices that remove all they may */
static int64 slice_us_max;		/* of a rescan */
static int64 found_us_max;		/* of a stray, from when it was there and free */
static int64 found_us_max_announced;

static void
check(bool condition, const char *text)
{
	if (condition)
		return;
	printf("seed " UINT64_FORMAT ", at %.3f s: not so: %s\n", seed, now / 1e6, text);
	exit(1);
}

static int
random_below(int limit)
{
	random_state = random_state * UINT64CONST(6364136223846793005) + 1442695040888963407;
	return (int) ((random_state >> 33) % limit);
}

/* Time passes: rows are claimed, strays appear, VACUUM removes dead entries. */
static void
pass(int64 duration_us)
{
	int64		until = now + duration_us;

	for (int i = 0; i < STRAYS; i++)
		if (strays[i].is_announced && strays[i].appears_at > now && strays[i].appears_at <= until)
			claimed = Min(claimed, strays[i].second * SECOND);
	for (int64 second = now / SECOND + 1; second <= until / SECOND; second++)
	{
		check(second + ttl < SECONDS, "the simulation ends in time");
		live[second + ttl] += rate;
		if (rate > 0)
			claimed = Min(claimed, (second + ttl) * SECOND);
		if (!snapshot_held && second % 60 == 0)
			memset(dead, 0, sizeof(dead));
	}
	now = until;
}

static bool
is_there(const Stray *stray)
{
	return stray->removed_at == 0 && stray->appears_at <= now;
}

static void
stays(IdemCleanupBatch *batch, TimestampTz expires_at)
{
	batch->report.oldest_expires_at = Min(batch->report.oldest_expires_at, expires_at);
}

/* Removes the strays of a second. */
static void
clean_strays(IdemCleanupBatch *batch, int second)
{
	for (int i = 0; i < STRAYS; i++)
	{
		Stray	   *stray = &strays[i];

		if (stray->second != second || !is_there(stray))
			continue;
		if (stray->free_at > now)
		{
			stays(batch, second * SECOND);
			continue;
		}
		stray->removed_at = now;
		dead[second]++;
		batch->report.rows_deleted++;
		found_us_max = Max(found_us_max, now - Max(stray->appears_at, stray->free_at));
		if (stray->is_announced)
			found_us_max_announced = Max(found_us_max_announced, now - Max(stray->appears_at, stray->free_at));
	}
}

/* batch.c, a second at a time */
static void
clean(const IdemCleanupOrder *order, IdemCleanupBatch *batch)
{
	memset(batch, 0, sizeof(IdemCleanupBatch));
	batch->report.start = order->start;
	batch->report.end = order->end;
	batch->report.oldest_expires_at = DT_NOEND;
	batch->next_start = Max(order->start, Min(order->end, order->expired_before));

	for (int second = order->start < 0 ? 0 : (order->start + SECOND - 1) / SECOND; second < SECONDS; second++)
	{
		TimestampTz expires_at = second * SECOND;
		int64		removed;

		if (expires_at >= order->end)
			return;
		if (dead[second] > 0 && batch->dead_entries >= order->dead_max)
		{
			batch->report.end = batch->next_start = expires_at;
			batch->report.more = true;
			return;
		}
		if (expires_at > order->expired_before)
		{
			if (live[second] > 0)
				stays(batch, expires_at);
			if (live[second] > 0)
				return;
			continue;
		}
		batch->dead_entries += dead[second];
		clean_strays(batch, second);
		removed = Min(live[second], order->rows_max - batch->report.rows_deleted);
		live[second] -= removed;
		dead[second] += removed;
		batch->report.rows_deleted += removed;
		if (live[second] > 0)
		{
			stays(batch, expires_at);
			batch->next_start = expires_at;
			batch->report.more = true;
			batch->leaves_rows = batch->report.rows_deleted > 0;
			batch->report.end = expires_at;
			return;
		}
	}
}

/* A rescan has ended: it has left no row that was there and free since it began. */
static void
check_rescanned(const IdemCleanupRun *run)
{
	for (int i = 0; i < STRAYS; i++)
		check(strays[i].removed_at != 0 ||
			  strays[i].appears_at > run->marks.rescan_began_at ||
			  strays[i].free_at > run->marks.rescan_began_at ||
			  strays[i].second * SECOND >= run->marks.low_water,
			  "the rescan finds a row behind the mark");
	slice_us_max = Max(slice_us_max, slice_us);
}

/* The next batch of a run, as in worker.c */
static bool
run_batch(IdemCleanupRun *run)
{
	IdemCleanupOrder order = {.rows_max = 50000, .dead_max = 50000};
	IdemCleanupBatch batch;
	IdemCleanupMarks before = run->marks;
	bool		after_slice = run->latest == IDEM_SLICE_BEHIND;
	bool		is_busy = run->more_at_mark;
	bool		is_slice;
	int64		duration_us;

	oldest = Min(oldest, claimed);
	claimed = DT_NOEND;
	if (!idem_rescan_next(run, oldest, now, &order))
		return false;
	is_slice = run->latest == IDEM_SLICE_BEHIND;
	check(!(is_slice && after_slice), "after a slice comes a batch at the mark");
	check(is_slice == (order.end != DT_NOEND), "a slice ends at the mark");
	if (run->marks.rescan_began_at != before.rescan_began_at)
	{
		check(before.rescan_is_urgent || run->marks.rescan_is_urgent ||
			  slice_us * 20 <= now - before.rescan_began_at,
			  "a rescan takes 5 % of the time at most");
		slice_us = 0;
	}
	check(!is_slice || !is_busy || run->marks.rescan_is_urgent ||
		  slice_us * 20 <= now - run->marks.rescan_began_at,
		  "while rows are left at the mark, a rescan does not run ahead");

	clean(&order, &batch);
	duration_us = 300 + batch.dead_entries * dead_us / 1000 + batch.report.rows_deleted;
	pass(duration_us);
	if (is_slice && !batch.leaves_rows)
		slice_us += duration_us;
	if (oldest >= order.start && oldest < batch.report.end)
		oldest = batch.report.end;
	oldest = Min(oldest, batch.report.oldest_expires_at);
	idem_rescan_advance(run, &batch, duration_us);
	backlog = batch.report.more;
	if (is_slice && run->marks.rescan_cursor == DT_NOEND)
		check_rescanned(run);
	return true;
}

static void
make_database(void)
{
	memset(live, 0, sizeof(live));
	memset(dead, 0, sizeof(dead));
	oldest = claimed = DT_NOEND;
	backlog = false;
	slice_us = slice_us_max = found_us_max = found_us_max_announced = 0;
	now = START * SECOND + random_below(SECOND);
	rate = random_below(2) ? random_below(20000) : random_below(20);
	ttl = 1 + random_below(60);
	dead_us = 50 + random_below(500);
	snapshot_held = random_below(2);

	if (random_below(2))
		for (int second = 0; second < START; second++)
			dead[second] = random_below(2) ? random_below(20000) : 0;
	if (random_below(2))
		for (int second = START - 200; second < START; second++)
			live[second] = random_below(10000);
	for (int i = 0; i < STRAYS; i++)
	{
		Stray	   *stray = &strays[i];

		memset(stray, 0, sizeof(Stray));
		stray->appears_at = now + (int64) random_below(600) * SECOND;
		stray->second = random_below(stray->appears_at / SECOND);
		stray->free_at = random_below(4) ? 0 : stray->appears_at + (int64) random_below(300) * SECOND;
		stray->is_announced = random_below(2);
	}
}

/* Runs workers as the launcher does, until all strays are found. */
static void
simulate(void)
{
	IdemCleanupMarks marks = IDEM_NO_MARKS;
	int			found = 0;

	make_database();
	while (found < STRAYS)
	{
		IdemCleanupStats stats = {.marks = marks, .backlog = backlog};
		IdemCleanupRun run;
		TimestampTz began_at = now;

		idem_rescan_begin_run(&run, &stats, random_below(100) == 0);
		while (run_batch(&run) &&
			   !(run.latest == IDEM_BATCH_AT_MARK && now - began_at >= 60 * SECOND))
			/* the next one */ ;
		marks = run.marks;
		pass(Max(began_at + INTERVAL - now, 1000));
		while (!backlog && Min(oldest, claimed) > now && now < began_at + LOOK_INTERVAL)
			pass(SECOND / 10);
		found = 0;
		for (int i = 0; i < STRAYS; i++)
			found += strays[i].removed_at != 0;
	}
	/* A row that appears just behind the cursor is found by the next rescan. */
	check(found_us_max_announced <= 2 * (IDEM_RESCAN_FACTOR * slice_us_max + INTERVAL),
		  "an announced row behind the mark is found in time");
	check(found_us_max <= 2 * (IDEM_RESCAN_FACTOR * slice_us_max + LOOK_INTERVAL + INTERVAL),
		  "a row behind the mark is found in time");
}

/* Is a slice due in a run that begins rescan_age_us after the latest rescan began? */
static bool
slice_comes(IdemCleanupMarks marks, int64 rescan_us, int64 rescan_age_us)
{
	IdemCleanupRun run = {.marks = marks};
	IdemCleanupOrder order;

	run.marks.rescan_us = rescan_us;
	check(idem_rescan_next(&run, DT_NOEND, run.marks.rescan_began_at + rescan_age_us, &order),
		  "a run begins with a batch");
	check(order.start == (order.end == DT_NOEND ? run.marks.low_water : run.marks.rescan_cursor),
		  "it starts at a mark");
	return order.end != DT_NOEND;
}

static void
check_pauses(void)
{
	IdemCleanupMarks marks = {
		.low_water = 4000 * SECOND,
		.rescan_began_at = 5000 * SECOND,
		.rescan_cursor = DT_NOEND
	};

	check(!slice_comes(marks, SECOND, 50 * SECOND - 1), "no rescan is due");
	check(slice_comes(marks, SECOND, 50 * SECOND), "a rescan begins after its interval");
	check(!slice_comes(marks, 3 * SECOND, 60 * SECOND - 1), "not before the pause is over");
	check(slice_comes(marks, 3 * SECOND, 60 * SECOND), "but then");
	check(slice_comes(marks, 3 * SECOND, -1), "a rescan begins after the clock was set back");
	marks.rescan_cursor = 3000 * SECOND;
	check(slice_comes(marks, 2.5 * SECOND, 0), "an idle worker goes on with a rescan, ahead of its pause");
	check(!slice_comes(marks, 2.5 * SECOND + 1, 0), "but not far ahead");
	check(slice_comes(marks, 3600 * SECOND, -1), "it goes on after the clock was set back");
	marks.rescan_is_urgent = true;
	check(slice_comes(marks, 3600 * SECOND, 0), "an urgent rescan does not pause");
}

/* A run in which a batch has ended so, with a rescan under way that had left rows, or not. */
static IdemCleanupRun
advance(bool slice, bool had_rows, IdemCleanupBatch batch)
{
	IdemCleanupStats stats = {
		.marks = {.low_water = 4000 * SECOND, .rescan_cursor = DT_NOBEGIN, .rescan_leaves_rows = had_rows},
		.backlog = had_rows
	};
	IdemCleanupRun run;

	idem_rescan_begin_run(&run, &stats, false);
	check(run.more_at_mark == had_rows, "what an earlier run left can be at the mark");
	run.latest = slice ? IDEM_SLICE_BEHIND : IDEM_BATCH_AT_MARK;
	batch.next_start = 5000 * SECOND;
	batch.report.start = slice ? DT_NOBEGIN : 4000 * SECOND;
	run.more_at_mark = false;
	idem_rescan_advance(&run, &batch, SECOND);
	backlog = batch.report.more;
	return run;
}

static void
check_backlog(void)
{
	IdemCleanupBatch removes = {.report = {.more = true, .rows_deleted = 1}, .leaves_rows = true};
	IdemCleanupBatch passes = {.report = {.more = true}};
	IdemCleanupBatch ends = {0};

	check(advance(true, false, removes).marks.rescan_us == 0 && backlog,
		  "a slice that leaves rows is backlog, and no time of the rescan");
	check(advance(true, false, passes).marks.rescan_us == SECOND && !backlog, "a slice that passes rows is not");
	(void) advance(true, true, passes);
	check(backlog, "nor does it end a known one");
	(void) advance(true, true, ends);
	check(!backlog, "the end of the rescan does");
	check(advance(false, false, passes).more_at_mark && backlog, "a batch at the mark that ended by its bounds is");
	(void) advance(false, true, ends);
	check(backlog, "one that has seen all does not end that of a slice");
	(void) advance(false, false, ends);
	check(!backlog, "but its own");
}

int
main(int argc, char **argv)
{
	int			databases = atoi(argv[2]);

	seed = strtoull(argv[1], NULL, 10);
	check_pauses();
	check_backlog();
	for (int i = 0; i < databases; i++)
	{
		random_state = ++seed;
		simulate();
	}
	printf("%d databases\n", databases);
	return 0;
}
