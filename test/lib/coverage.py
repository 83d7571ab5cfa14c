"""Prints what test/coverage counted: coverage.py COUNTS.json TREE

COUNTS.json is gcovr's. A line that did not run is printed with the reason why no test runs it, if
one is known: add it below, or a test.
"""

import json
import re
import sys

# Branches on lines with these macros of the server are not conditions of ours.
MACROS = re.compile(
    r'\b(ereport|elog|Assert|CHECK_FOR_INTERRUPTS|PG_TRY|PG_CATCH|PG_FINALLY|PG_END_TRY|PG_RE_THROW|'
    r'VARSIZE_ANY|VARSIZE_ANY_EXHDR|VARDATA_ANY|index_getattr|foreach|dlist_foreach|dlist_foreach_modify|'
    r'dlist_reverse_foreach|SpinLockAcquire|CALLED_AS_TRIGGER|INTALIGN|TIMESTAMP_NOT_FINITE)\b')

# By the line's text, or else by file and function
TEXTS = [
    (r'\belog\(ERROR', 'an internal error, which no call causes'),
    (r'^default:$', 'an internal error, which no call causes'),
    (r'\bpg_unreachable\(', 'never reached'),
]
CITUS = 'with Citus: test/citus, by hand'
RACE = 'another session acts within microseconds, between two looks'
CLOCK = 'a clock that is set back'
FULL = 'more than 256 databases'
NEW = 'PostgreSQL 17 or later'
LAUNCHERS = 'a launcher that ends at once, or two that start together'
LONG = 'a run of a worker that takes a minute, or sees a reload'
FUNCTIONS = {
    ('blocked_by.c', 'find_prepared'): RACE,
    ('blocked_by.c', 'idem_find_runner'): RACE,
    ('catalog.c', 'is_distributed'): CITUS,
    ('catalog.c', 'idem_refuse_distributed'): CITUS,
    ('protocol/claim.c', 'promise'): RACE,
    ('protocol/claim.c', 'discard_answer'): 'a request in progress that has a result: made by hand',
    ('compat.h', 'idem_index_insert_cleanup'): NEW,
    ('compat.h', 'idem_named_segment'): NEW,
    ('protocol/find_row.c', 'idem_find_row'): RACE,
    ('clean/launcher.c', 'idem_launcher_start'): NEW,
    ('clean/launcher.c', 'idem_launcher_main'): NEW,
    ('clean/sql.c', 'idem__stat_cleaning'): NEW,
    ('clean/launcher.c', 'list_database'): NEW,
    ('store/policy.c', 'idem_policy_promise'): RACE,
    ('clean/schedule.c', 'rescan_age_us'): CLOCK,
    ('store/scopes.c', 'idem_scopes_open'): RACE,
    ('protocol/settle.c', 'idem_settle'): RACE,
    ('shared/memory.c', 'idem_shared_attach'): NEW,
    ('clean/start_worker.c', 'start_database'): FULL,
    ('clean/start_worker.c', 'start_launcher'): LAUNCHERS,
    ('shared/databases.c', 'create_slot'): FULL,
    ('shared/databases.c', 'forget_dropped_databases'): FULL,
    ('clean/state.c', 'idem_state_attach_launcher'): LAUNCHERS,
    ('clean/state.c', 'idem_state_attach_worker'): FULL,
    ('shared/stats.c', 'idem_stats_publish_cleanup'): FULL,
    ('clean/state.c', 'idem_state_publish_error'): FULL,
    ('clean/state.c', 'idem_state_start_database'): FULL,
    ('shared/stats_sql.c', 'idem__stat_claims_counters'): FULL,
    ('shared/stats_sql.c', 'idem__stat_cleanup_counters'): FULL,
    ('shared/stats_sql.c', 'idem_stat_reset'): FULL,
    ('shared/stats.c', 'publish_pending'): FULL,
    ('store/rows.c', 'running_locker'): RACE,
    ('store/open.c', 'idem_store_open_to_read'): RACE,
    ('store/shape.c', 'idem_store_is_by_expiry'): RACE,
    ('store/open.c', 'open_kept_store'): RACE,
    ('store/shape.c', 'idem_store_is_of_unsettled'): RACE,
    ('session/wait.c', 'forget_lock_timeout'): RACE,
    ('session/wait.c', 'idem_wait_for_transaction'): RACE,
    ('clean/worker.c', 'run_batches'): LONG,
}


def function_of(functions, number):
    """The last function that begins before the line"""
    before = [f for f in functions if f['lineno'] <= number]
    return max(before, key=lambda f: f['lineno'])['name'] if before else ''


def reason(file, function, text):
    for pattern, why in TEXTS:
        if re.search(pattern, text):
            return why
    return FUNCTIONS.get((file, function))


def percent(counts):
    hit, total = counts
    return '%5d of %5d %6.1f %%' % (hit, total, 100 * hit / total if total else 100)


def count(file, source):
    """Lines, branches, branches without macros, as (hit, all); and the lines that did not run"""
    counts = [[0, 0], [0, 0], [0, 0]]
    missed = []
    for line in file['lines']:
        number = line['line_number']
        if line['gcovr/noncode']:
            continue
        text = source[number - 1]
        hits = sum(b['count'] > 0 for b in line['branches'])
        parts = [(line['count'] > 0, 1), (hits, len(line['branches']))]
        parts.append((0, 0) if MACROS.search(text) else parts[1])
        for sums, (hit, total) in zip(counts, parts):
            sums[0] += hit
            sums[1] += total
        if line['count'] == 0:
            missed.append((number, function_of(file['functions'], number), text.strip()))
    return counts, missed


def main():
    totals = [[0, 0], [0, 0], [0, 0]]
    known, unknown = {}, []
    print('%-24s %-22s %-22s %s' % ('', 'lines', 'branches', 'branches of our own conditions'))
    for file in json.load(open(sys.argv[1]))['files']:
        name = file['file'].rsplit('src/', 1)[-1]
        source = open('%s/src/%s' % (sys.argv[2], name)).read().split('\n')
        counts, missed = count(file, source)
        print('%-24s' % name, *map(percent, counts))
        for total, one in zip(totals, counts):
            total[0] += one[0]
            total[1] += one[1]
        for number, function, text in missed:
            why = reason(name, function, text)
            line = '  %-22s %-28s %s' % ('%s:%d' % (name, number), function, text)
            if why:
                known.setdefault(why, []).append(line)
            else:
                unknown.append(line)
    print('%-16s' % 'all', *map(percent, totals))
    for why in sorted(known):
        print('\n%d lines did not run: %s' % (len(known[why]), why), *known[why], sep='\n')
    print('\n%d lines did not run, and no reason is known' % len(unknown), *unknown, sep='\n')


main()
