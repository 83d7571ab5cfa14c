"""Leases: heartbeat, fences, settlements, lost answers; within a transaction of the caller."""

import asyncio
import threading
import time

import psycopg
import pytest

import idem_pg
from idem_pg.drivers import arun, run
from test_once import pay


def leased(world, steps, **options):
    runner = arun if world.asynchronous else run
    options = {"user": "anna", "id": world.id, "scope": "lease", "lease": 1, **options}
    return world.go(world.idem.lease(lambda held: runner(steps(held)), **options))


def pause(world, seconds):
    return world.idem._core.driver.sleep(seconds)


def state(world):
    return world.observer.execute("SELECT state::text, progress FROM idem.idem_lookup('anna', %s, 'lease')", (world.id,)).fetchone()


def test_heartbeat_and_settlement(world):
    def work(held):
        assert held.previous is None
        yield held.record({"step": 1})
        for _ in range(30):
            held.check()
            yield pause(world, 0.05)
        assert held.remaining() > 0.2
        yield held.settle({"paid": 30}, world.handler(pay()))

    first = leased(world, work)
    assert (first.value, first.replayed) == ({"paid": 30}, False)
    again = leased(world, work)
    assert (again.value, again.replayed) == ({"paid": 30}, True)
    assert world.payments() == 1


def test_settles_what_the_handler_returns(world):
    def work(held):
        yield from ()
        return (1, 2)

    assert leased(world, work).value == [1, 2] and leased(world, work).replayed


def test_an_error_leaves_the_lease(world):
    def work(held):
        yield held.record([1])
        raise KeyError("bug")

    with pytest.raises(KeyError):
        leased(world, work, lease=0.7, progress=[0])
    assert state(world) == ("in_progress", [1])
    with pytest.raises(idem_pg.InProgress):
        leased(world, work)
    time.sleep(0.8)

    def successor(held):
        yield from ()
        return held.previous

    assert leased(world, successor, progress=[0]).value == [1]


def test_nothing_happened(world):
    def work(held):
        yield held.nothing_happened()
        raise KeyError("nothing")

    with pytest.raises(KeyError):
        leased(world, work)
    assert state(world) is None


def test_refused(world):
    def refuse(tx):
        yield from pay()(tx)
        raise idem_pg.Refused("no")

    def work(held):
        yield held.settle(None, world.handler(refuse))

    for replayed in (False, True):
        with pytest.raises(idem_pg.Failed) as caught:
            leased(world, work)
        assert (caught.value.stored, caught.value.replayed) == ("no", replayed)
    assert world.payments() == 1


@pytest.mark.parametrize("ends, rows", [(["COMMIT"], 2), (["ROLLBACK"], 1), (["COMMIT", "BEGIN"], 1)])
@pytest.mark.parametrize("how", ["settle", "transaction"])
def test_work_ends_the_transaction_of_the_lease(world, how, ends, rows):
    def end_itself(tx):
        yield from pay(1)(tx)
        for end in ends:
            method = None if world.driver == "asyncpg" else getattr(tx, end.lower(), None)
            yield method() if method else tx.execute(end)
        yield from pay(2)(tx)

    def work(held):
        yield held.settle(1, world.handler(end_itself)) if how == "settle" else held.transaction(world.handler(end_itself))

    with pytest.raises(idem_pg.HandlerEndedTransaction, match="with a lease as in progress"):
        leased(world, work)
    assert state(world)[0] == "in_progress" and world.payments() == rows


def test_long_work_ends_the_transaction_of_the_lease(world):
    def end_itself(tx):
        yield tx.execute("ROLLBACK")
        yield pause(world, 0.4)  # more than a third of the lease, which is renewed then

    def work(held):
        yield held.transaction(world.handler(end_itself))

    with pytest.raises(idem_pg.HandlerEndedTransaction):
        leased(world, work)


def test_fenced_transaction_is_longer_than_the_lease(world):
    def long(tx):
        yield from pay()(tx)
        yield tx.execute("SELECT pg_sleep(1)")
        return 5

    def work(held):
        assert (yield held.transaction(world.handler(long))) == 5
        held.check()
        yield pause(world, 0.6)
        held.check()

    assert not leased(world, work, lease=0.6).replayed
    assert world.payments() == 1


def test_replaced_holder(world):
    other = []

    def work(held):
        yield held.record("mine")
        held._over.set()  # its heartbeat is cut
        yield pause(world, 0.5)
        with pytest.raises(idem_pg.LeaseLost):
            held.check()
        other.append(world.observer.execute(
            "SELECT token FROM idem.idem_lease('anna', %s, '1 min', 'lease')", (world.id,)).fetchone()[0])
        assert other[0]
        for call in (lambda: held.record("late"), lambda: held.transaction(world.handler(pay())),
                     lambda: held.settle(1, world.handler(pay()))):
            with pytest.raises(idem_pg.LeaseLost):
                yield from attempt(call)
        raise KeyError("done")

    def attempt(call):
        yield call()

    with pytest.raises(KeyError):
        leased(world, work, lease=0.3)
    assert world.payments() == 0 and state(world) == ("in_progress", "mine")


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("at, needle", [
    ("claim", b"idem_lease"), ("claim", b"SELECT 1"), ("transaction", b"idem_extend"), ("transaction", b"idem_fence"),
    ("transaction", b"INSERT"), ("transaction", b"COMMIT"), ("settle", b"idem_fence"), ("settle", b"INSERT"),
    ("settle", b"complete"), ("settle", b"COMMIT"),
])
def test_lost_connection(world, when, needle, at):
    def cut(where):
        if at == where:
            world.proxy.cut(when, needle)

    def work(held):
        cut("transaction")
        yield held.record({"step": 1})
        assert (yield held.transaction(world.handler(pay(1)))) == {"paid": 1}
        cut("settle")
        yield held.settle({"paid": 30}, world.handler(pay()))

    cut("claim")
    world.proxy.cuts = 0
    answer = leased(world, work, lease=10)
    assert (answer.value, answer.replayed) == ({"paid": 30}, False)
    assert world.proxy.cuts == 1 or world.driver == "asyncpg"  # which sends the name of a statement that it has prepared
    assert world.observer.execute("SELECT array_agg(amount ORDER BY amount) FROM payments").fetchone()[0] == [1, 30]


def test_lost_commit_while_the_heartbeat_waits(world):
    """The heartbeat, which has just seen no fence, writes the end of the lease after the COMMIT that was lost."""
    beats = []

    def work(held):
        def steps(tx):
            yield from pay()(tx)
            if not beats:
                steps = held._extend(None)
                beats.append(asyncio.ensure_future(arun(steps)) if world.asynchronous
                             else threading.Thread(target=run, args=(steps,)))  # fmt: skip
                world.asynchronous or beats[0].start()
                yield pause(world, 0.5)
                world.proxy.cut("after", b"COMMIT")

        yield held.transaction(world.handler(steps))
        yield beats[0] if world.asynchronous else beats[0].join()

    leased(world, work, lease=30)
    assert world.proxy.cuts == 1 and world.payments() == 1


@pytest.mark.parametrize("settles", [False, True])
def test_number_that_is_used_again(world, settles):
    """The server crashes before a COMMIT is durable, and gives the number of that transaction to another, which commits."""
    core = world.idem._core
    other, = world.observer.execute("SELECT pg_current_xact_id()::text").fetchone()
    before = core.FENCE, core.IN_FENCE
    xact = "CAST(pg_catalog.pg_current_xact_id() AS pg_catalog.text)"
    assert xact in core.FENCE and "WHEN pg_catalog.pg_current_xact_id() =" in core.IN_FENCE
    core.FENCE = core.FENCE.replace(xact, f"'{other}'")
    core.IN_FENCE = core.IN_FENCE.replace("WHEN pg_catalog.pg_current_xact_id() =", f"WHEN '{other}' =")
    runs = []

    def work(held):
        def steps(tx):
            yield from pay()(tx)
            runs.append(1)
            if len(runs) == 1:
                world.observer.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE state LIKE 'idle in%'"
                                       " AND datname = current_database() AND pid <> pg_backend_pid()")
        yield held.settle(1, world.handler(steps)) if settles else held.transaction(world.handler(steps))

    try:
        leased(world, work, lease=30)
    finally:
        core.FENCE, core.IN_FENCE = before
    assert (len(runs), world.payments()) == (2, 1)


def test_within(world):
    if world.driver == "psycopg":
        connection = psycopg.connect(dbname=world.database)
    elif world.driver == "psycopg_async":
        connection = world.go(psycopg.AsyncConnection.connect(dbname=world.database))
    else:
        import asyncpg

        connection = world.go(asyncpg.connect(database=world.database))
        with pytest.raises(idem_pg.Invalid):
            world.go(world.idem.within(connection, world.handler(pay()), user="anna", id=world.id))
        world.go(connection.execute("BEGIN"))

    def within(steps, **options):
        return world.go(world.idem.within(connection, world.handler(steps), user="anna", id=world.id, **options))

    def bug(tx):
        yield from pay()(tx)
        raise KeyError("bug")

    def swallow(tx):
        try:
            yield tx.execute("SELECT 1/0")
        except Exception:
            pass

    world.go(connection.execute("INSERT INTO payments (amount) VALUES (1)"))
    with pytest.raises(KeyError):
        within(bug)
    with pytest.raises(idem_pg.HandlerSwallowedError):
        within(swallow)
    assert not within(pay(), params=1).replayed
    assert within(pay(), params=1).replayed
    with pytest.raises(idem_pg.Mismatch):
        within(pay(), params=2)
    assert world.payments() == 0
    world.go(connection.execute("COMMIT"))
    assert world.payments() == 2

    def end_itself(tx):
        yield tx.execute("ROLLBACK")

    world.go(connection.execute("BEGIN"))
    world.id += "2"
    with pytest.raises(idem_pg.HandlerEndedTransaction):
        within(end_itself)
    world.go(connection.close())


def test_heartbeat_is_terminated(world):
    def work(held):
        for _ in range(6):
            world.observer.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                                   " WHERE pid <> pg_backend_pid() AND datname = current_database()")  # fmt: skip
            yield pause(world, 0.7)
            held.check()

    assert not leased(world, work, lease=3).replayed
