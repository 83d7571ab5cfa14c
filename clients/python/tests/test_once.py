"""once, call and the reads: replays, lost connections, conflicts, errors of handlers, values."""

import asyncio
import datetime
import decimal
import threading
import warnings

import psycopg
import pytest

import idem_pg
from idem_pg import errors


def pay(amount=30, value=None):
    def steps(tx):
        yield tx.execute(f"INSERT INTO payments (amount) VALUES ({amount})")
        return {"paid": amount} if value is None else value

    return steps


def pid_of(world, tx):
    if world.driver == "asyncpg":
        return tx.get_server_pid()
    return tx.info.backend_pid


def test_executes_once_and_replays(world):
    first = world.once(pay(), params={"amount": 30})
    again = world.once(pay(), params={"amount": 30})
    assert (first.value, first.replayed) == ({"paid": 30}, False)
    assert (again.value, again.replayed) == ({"paid": 30}, True)
    assert first.expires_at and again.expires_at
    assert world.payments() == 1
    assert [(e.outcome, e.replayed, e.attempts) for e in world.events] == [("claimed", False, 1), ("completed", True, 1)]
    with pytest.raises(idem_pg.Mismatch) as caught:
        world.once(pay(), params={"amount": 31})
    assert (caught.value.status, caught.value.retryable, caught.value.sqlstate) == (422, False, "ID422")


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("needle", [b"try_claim", b"INSERT", b"complete", b"COMMIT"])
def test_lost_connection(world, when, needle):
    world.go(world.idem.status(user="a", id="b"))
    world.proxy.cut(when, needle)
    answer = world.once(pay())
    assert world.proxy.cuts == 1
    assert answer.value == {"paid": 30}
    committed = when == "after" and (needle == b"COMMIT" or (needle == b"complete" and world.driver != "asyncpg"))
    assert answer.replayed == committed
    assert world.payments() == 1
    assert world.once(pay()).replayed


def test_commit_unknown(world):
    world.proxy.cut("after", b"COMMIT", 99)
    with pytest.raises(idem_pg.CommitUnknown) as caught:
        world.once(pay(), attempts=1)
    assert caught.value.retryable and caught.value.status == 503
    world.proxy.cut(None, times=0)
    assert world.once(pay()).replayed
    assert world.payments() == 1


def test_commit_unknown_and_then_no_server_that_writes(world):
    world.idem = world.connect(1)

    def steps(tx):
        world.observer.execute(f'ALTER DATABASE "{world.database}" SET default_transaction_read_only = on')
        world.proxy.cut("after", b"COMMIT")
        return pay()(tx)

    try:
        with pytest.raises(idem_pg.CommitUnknown):
            world.once(steps, attempts=2)
    finally:
        world.observer.execute(f'ALTER DATABASE "{world.database}" RESET default_transaction_read_only')
    world.idem = world.connect()
    assert world.once(pay()).replayed and world.payments() == 1


def test_isolation_of_the_connection(world):
    if world.driver != "psycopg":
        pytest.skip("a function that connects")

    def connect():
        connection = psycopg.connect(dbname=world.database)
        connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        return connection

    answer = idem_pg.Idem(connect).once(
        lambda tx: tx.execute("SHOW transaction_isolation").fetchone()[0], user="anna", id=world.id)
    assert answer.value == "repeatable read"


def test_attempts_spent_before_commit(world):
    world.proxy.cut("before", b"INSERT", 99)
    with pytest.raises(Exception) as caught:
        world.once(pay(), attempts=2)
    assert errors.of_driver(caught.value)
    assert world.proxy.cuts == 2


@pytest.mark.parametrize("idle", [True, False])
def test_terminated(world, idle):
    seen = []

    def steps(tx):
        seen.append(1)
        if not idle and len(seen) == 1:
            world.observer.execute("SELECT pg_terminate_backend(%s)", (pid_of(world, tx),))
        yield from pay()(tx)
        return len(seen)

    if idle:
        world.go(world.idem.status(user="a", id="b"))
        world.observer.execute(
            "SELECT pg_terminate_backend(pid, 1000) FROM pg_stat_activity"
            " WHERE pid <> pg_backend_pid() AND datname = current_database()")
    answer = world.once(steps)
    assert answer.value == (1 if idle else 2)
    assert world.payments() == 1


@pytest.mark.parametrize("code", ["40001", "40P01"])
@pytest.mark.parametrize("wrapped", [False, True])
def test_conflict(world, code, wrapped):
    seen = []

    def steps(tx):
        seen.append(1)
        yield from pay()(tx)
        if len(seen) < 3:
            try:
                yield tx.execute(f"SELECT conflict('{code}')")
            except Exception as error:
                if wrapped:
                    raise ValueError("mine") from error
                raise
        return "done"

    assert world.once(steps).value == "done"
    assert len(seen) == 3 and world.payments() == 1
    assert world.events[-1].attempts == 3


def test_error_of_the_handler(world):
    seen = []
    bug = ZeroDivisionError("bug")

    def steps(tx):
        seen.append(1)
        yield from pay()(tx)
        raise bug

    with pytest.raises(ZeroDivisionError) as caught:
        world.once(steps)
    assert (world.events[-1].outcome, world.events[-1].error) == ("error", bug)
    assert caught.value is bug and len(seen) == 1 and world.payments() == 0
    assert not world.once(pay()).replayed


def test_bug_while_the_connection_dies(world):
    seen = []

    def steps(tx):
        seen.append(1)
        world.observer.execute("SELECT pg_terminate_backend(%s, 1000)", (pid_of(world, tx),))
        yield from ()
        raise KeyError("bug")

    with pytest.raises(KeyError):
        world.once(steps)
    assert len(seen) == 1


def test_swallowed_error(world):
    def steps(tx):
        yield from pay()(tx)
        try:
            yield tx.execute("SELECT 1/0")
        except Exception:
            pass
        return 1

    with pytest.raises(idem_pg.HandlerSwallowedError):
        world.once(steps)
    assert world.payments() == 0


def test_a_handler_of_the_other_kind_is_refused(world):
    async def later(tx):
        return 1
    def plain(tx):
        return 1
    wrong, words = (plain, "not an async function") if world.asynchronous else (later, "goes with AsyncIdem")
    key = {"user": "anna", "id": world.id, "scope": "test"}
    for call in (world.idem.once, lambda handler, **key: world.idem.lease(handler, lease=10, **key)):
        with warnings.catch_warnings(), pytest.raises(TypeError, match=words):
            warnings.simplefilter("ignore")  # that a coroutine was not awaited
            world.go(call(wrong, **key))
    assert world.go(world.idem.status(**key)) == "in_progress"  # the lease's error leaves it to lapse


@pytest.mark.parametrize("end", ["COMMIT", "ROLLBACK"])
def test_handler_ends_transaction(world, end):
    def steps(tx):
        yield tx.execute(end)
        return 1

    with pytest.raises(idem_pg.HandlerEndedTransaction, match="counts as executed"):
        world.once(steps)
    assert not world.once(pay(), id=world.id + "2").replayed


def test_error_at_commit(world):
    world.observer.execute("DROP TABLE IF EXISTS late; CREATE TABLE late (id int UNIQUE DEFERRABLE INITIALLY DEFERRED)")

    def steps(tx):
        yield tx.execute("INSERT INTO late VALUES (1), (1)")

    with pytest.raises(Exception) as caught:
        world.once(steps)
    assert errors.sqlstate(caught.value) == "23505"
    assert world.go(world.idem.status(user="anna", id=world.id, scope="test")) is None


def test_refused(world):
    def steps(tx):
        yield from pay()(tx)
        raise idem_pg.Refused({"declined": True})

    for replayed in (False, True):
        with pytest.raises(idem_pg.Failed) as caught:
            world.once(steps)
        assert (caught.value.stored, caught.value.replayed) == ({"declined": True}, replayed)
    assert world.payments() == 1
    assert world.go(world.idem.status(user="anna", id=world.id, scope="test")) == "failed"


def test_handler_that_uses_nothing(world):
    def steps(tx):
        yield from ()

    assert world.once(steps).value is None
    again = world.once(steps)
    assert (again.value, again.replayed) == (None, True)


@pytest.mark.parametrize("value", [
    {"z": 1, "a": [1.5, -0.0, 1e16, 1e-7, 2**70, "ü\\'\"%s ?", None, True]}, "text", 0, [], (1, 2), 1.7976931348623157e308,
])
def test_values_as_a_replay_returns_them(world, value):
    first = world.once(pay(value=value))
    again = world.once(pay(value=value))
    assert again.replayed and repr(sorted_keys(first.value)) == repr(sorted_keys(again.value))


def sorted_keys(value):
    if isinstance(value, dict):
        return {key: sorted_keys(value[key]) for key in sorted(value)}
    return [sorted_keys(v) for v in value] if isinstance(value, list) else value


def circular():
    value = []
    value.append(value)
    return value


@pytest.mark.parametrize("value, place", [
    ({"a": [0, float("nan")]}, "$.a[1] is nan"), (float("inf"), "$ is inf"), ({"d": decimal.Decimal(1)}, "$.d is a Decimal"),
    (datetime.datetime.now(), "$ is a datetime"), ([{1}], "$[0] is a set"), (b"x", "$ is a bytes"), ({1: 2}, "the key 1"),
    ("\0", "NUL"), ({"a": "\ud800"}, "$.a has"), (circular(), "contains itself"),
])
def test_values_that_json_cannot_hold(world, value, place):
    with pytest.raises(TypeError) as caught:
        world.once(pay(value=value))
    assert place in str(caught.value)
    assert world.payments() == 0
    with pytest.raises(idem_pg.Invalid):
        world.once(pay(), params=value)


@pytest.mark.parametrize("options", [
    {"user": ""}, {"user": None}, {"id": "x" * 256}, {"id": "a\0b"}, {"scope": None}, {"wait": "soon"}, {"wait": -1},
    {"params": {"a": 10**1001}},
])
def test_invalid(world, options):
    with pytest.raises(idem_pg.Invalid):
        world.once(pay(), **options)
    assert world.payments() == 0


def test_too_large(world):
    with pytest.raises(idem_pg.TooLarge, match="raise result_max_bytes of the scope"):
        world.once(pay(value="x" * 2_000_000))
    assert world.payments() == 0


def test_no_rights(world, monkeypatch):
    world.observer.execute("CREATE ROLE idem_stranger LOGIN")
    monkeypatch.setenv("PGUSER", "idem_stranger")
    key = {"user": "anna", "id": world.id}
    try:
        idem = world.connect()
        with pytest.raises(idem_pg.NoRights, match="idem_grant.*'app'"):
            world.go(idem.status(**key))
        world.observer.execute("SELECT idem.idem_grant('idem_stranger', 'app')")
        assert world.go(idem.status(**key)) is None
        for call in (lambda: idem.forget(**key), lambda: idem.lapsed()):
            with pytest.raises(idem_pg.NoRights, match="idem_grant.*'operator'"):
                world.go(call())
    finally:
        world.observer.execute("DROP OWNED BY idem_stranger; DROP ROLE idem_stranger")


def test_in_flight(world):
    other = psycopg.connect(dbname=world.database)
    other.execute("SELECT idem.idem_claim('anna', %s, 'test')", (world.id,))
    with pytest.raises(idem_pg.InProgress):
        world.once(pay())
    with pytest.raises(idem_pg.TimedOut):
        world.once(pay(), wait=0.1)
    assert world.events[-1].waited >= 0.1
    threading.Timer(0.3, other.rollback).start()
    assert not world.once(pay(), wait=5).replayed
    other.close()


def test_concurrent_retries(world):
    world.idem = world.connect(size=4)
    if world.asynchronous:
        async def all_of():
            return await asyncio.gather(*(world.idem.once(
                world.handler(pay()), user="anna", id=world.id, scope="test", wait=5) for _ in range(20)))
        answers = world.go(all_of())
    else:
        answers = []
        threads = [threading.Thread(target=lambda: answers.append(world.once(pay(), wait=5))) for _ in range(20)]
        [t.start() for t in threads]
        [t.join() for t in threads]
    assert [a.value for a in answers] == [{"paid": 30}] * 20
    assert sum(not a.replayed for a in answers) == 1 and world.payments() == 1


def test_call(world):
    def call(**options):
        return world.go(world.idem.call("pay(text, int)", {"reference": "r", "amount": 3}, user=7, id=world.id, **options))

    world.proxy.cut("after", b"idem_call")
    assert call().value == {"paid": 3}
    assert call().replayed and world.payments() == 1
    with pytest.raises(idem_pg.Mismatch):
        world.go(world.idem.call("pay(text, int)", {"reference": "r", "amount": 4}, user=7, id=world.id))
    with pytest.raises(Exception) as caught:
        world.go(world.idem.call("missing()", {}, user=7, id="m" + world.id))
    assert errors.sqlstate(caught.value) == "42883" and not isinstance(caught.value, idem_pg.IdemError)


def test_call_of_a_failed_request(world):
    def steps(tx):
        yield from ()
        raise idem_pg.Refused("no")

    with pytest.raises(idem_pg.Failed):
        world.once(steps, scope="")
    with pytest.raises(idem_pg.Failed) as caught:
        world.go(world.idem.call("pay(text, int)", {"reference": "r", "amount": 3}, user="anna", id=world.id))
    assert caught.value.stored == "no" and caught.value.replayed
    # A function that meets it has not failed itself.
    world.observer.execute("CREATE OR REPLACE FUNCTION meet(id text) RETURNS boolean LANGUAGE sql AS $$ SELECT idem.idem_claim('anna', id) $$")
    with pytest.raises(Exception) as caught:
        world.go(world.idem.call("meet(text)", {"id": world.id}, user="anna", id=world.id + "-2"))
    assert errors.sqlstate(caught.value) == "ID417" and not isinstance(caught.value, idem_pg.IdemError)


def test_call_of_a_function_that_fails_the_request(world):
    world.observer.execute("CREATE OR REPLACE FUNCTION decline() RETURNS void LANGUAGE sql"
                           " AS $$ SELECT idem.idem_fail('\"declined\"') $$")  # fmt: skip
    for replayed in False, True:
        with pytest.raises(idem_pg.Failed) as caught:
            world.go(world.idem.call("decline()", {}, user="anna", id=world.id))
        assert (caught.value.stored, caught.value.replayed) == ("declined", replayed)


def test_reads(world):
    key = {"user": "anna", "id": world.id, "scope": "test"}
    assert world.go(world.idem.status(**key)) is None and world.go(world.idem.lookup(**key)) is None
    world.once(pay(), params=1)
    assert world.go(world.idem.status(**key)) == "completed"
    stored = world.go(world.idem.lookup(**key))
    assert (stored["state"], stored["result"], len(stored["fingerprint"])) == ("completed", {"paid": 30}, 32)
    assert world.go(world.idem.forget(**key)) is True and world.go(world.idem.forget(**key)) is False
    world.observer.execute("SELECT idem.idem_lease('anna', %s, '1 ms', 'left', progress => '[1]'), pg_sleep(0.01)", (world.id,))
    left = world.go(world.idem.lapsed("left", None))
    assert [(x["user_id"], x["status"], x["progress"]) for x in left if x["request_id"] == world.id] == [("anna", "lapsed", [1])]
    assert world.go(world.idem.lapsed("no such scope")) == []


def test_not_installed_and_no_rights(world):
    world.idem = world.connect(schema='no "such" %s ?')
    with pytest.raises(idem_pg.NotInstalled) as caught:
        world.once(pay())
    assert "install" in str(caught.value)
    world.observer.execute("DO $$ BEGIN CREATE ROLE idem_nobody LOGIN; EXCEPTION WHEN duplicate_object THEN END $$")

    def steps(tx):
        yield from ()

    idem = world.connect()
    conninfo_user = "idem_nobody"
    if world.driver == "psycopg":
        nobody = idem_pg.Idem(lambda: psycopg.connect(
            host="127.0.0.1", port=world.proxy.port, dbname=world.database, user=conninfo_user))
        with pytest.raises(idem_pg.NoRights) as caught:
            nobody.once(steps, user="anna", id=world.id)
        assert "idem_grant" in str(caught.value)
    del idem


def test_closed_pool(world):
    world.go(world.pools[0].close())
    with pytest.raises(Exception) as caught:
        world.once(pay())
    assert not isinstance(caught.value, idem_pg.IdemError) and world.events[-1].attempts == 1


def test_cancelled(world):
    if not world.asynchronous:
        pytest.skip("asyncio only")

    async def cancel(needle):
        task = asyncio.ensure_future(world.idem.once(
            world.handler(sleeper), user="anna", id=world.id, scope="test"))
        await asyncio.sleep(0.3)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    def sleeper(tx):
        yield from pay()(tx)
        yield tx.execute("SELECT pg_sleep(2)")

    world.go(cancel(b""))
    assert not world.once(pay(), wait=5).replayed
    assert world.payments() == 1


def test_cancelled_while_the_pool_is_checked(world):
    """A pool whose check is interrupted loses the places of the connections that it has in hand."""
    if world.driver != "psycopg_async":
        pytest.skip("a pool of psycopg")
    began, ended = asyncio.Event(), asyncio.Event()

    async def check():
        began.set()
        await asyncio.sleep(0.1)
        ended.set()

    async def cancel():
        task = asyncio.ensure_future(world.idem.once(world.handler(pay()), user="anna", id=world.id))
        await asyncio.wait_for(began.wait(), 20)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.wait_for(ended.wait(), 20)

    world.pools[0].check = check
    world.proxy.cut("before", b"COMMIT")
    world.go(cancel())


def places(world):
    """All connections of the pool can be had at once; an error tells that a place is lost."""
    async def both():
        await asyncio.wait_for(asyncio.gather(*(
            world.idem.once(world.handler(hold), user="p", id=f"{world.id}-{n}", attempts=1) for n in range(2))), 20)

    def hold(tx):
        yield tx.execute("SELECT pg_sleep(0.2)")

    if world.asynchronous:
        world.go(both())
        return
    pool = world.pools[0]
    for one in [pool.getconn(timeout=20) for _ in range(2)]:
        pool.putconn(one)


def test_lost_connections_leave_their_places(world):
    """asyncpg aborts a connection whose server says FATAL between two statements, and tells the pool nothing."""
    tries = []

    def abort(tx):
        tries.append(tx)
        if len(tries) < 5:
            tx._con._protocol.abort() if world.driver == "asyncpg" else tx.pgconn.finish()
        yield from pay()(tx)

    assert world.once(abort).replayed is False
    assert len(tries) == 5 and world.payments() == 1
    places(world)


def test_cancelled_at_each_await(world):
    """Nothing is lost, and nothing is executed twice, wherever a task is cancelled, even twice."""
    if not world.asynchronous:
        pytest.skip("asyncio only")

    async def cancel(step, times):
        task = asyncio.ensure_future(world.idem.once(
            world.handler(pay()), user="anna", id=f"{world.id}-{step}-{times}", scope="test"))
        await asyncio.sleep(step * 0.0005)
        for _ in range(times):
            task.cancel()
            await asyncio.sleep(0)
        done, _ = await asyncio.wait([task], timeout=20)
        assert done

    for times in 1, 2:
        for step in range(40):
            world.go(cancel(step, times))
    places(world)
    stored = [world.go(world.idem.status(user="anna", id=f"{world.id}-{step}-{times}", scope="test"))
              for times in (1, 2) for step in range(40)]  # fmt: skip
    assert world.payments() == stored.count("completed")


def test_types_that_others_have_planted_in_pg_temp_are_not_used(world):
    if world.driver != "psycopg":
        pytest.skip("the statements are the same")
    # By a function with the rights of its owner, say, that a handler of another request has called on this connection
    connection = psycopg.connect(dbname=world.observer.info.dbname, autocommit=True)
    connection.execute("CREATE TEMP TABLE ran (); CREATE FUNCTION pg_temp.spy(text) RETURNS bool LANGUAGE plpgsql AS"
                       " 'BEGIN INSERT INTO ran DEFAULT VALUES; RETURN true; END'")  # fmt: skip
    for name in ("jsonb", "text", "float8"):
        connection.execute(f"CREATE DOMAIN pg_temp.{name} AS pg_catalog.{name} CHECK (pg_temp.spy(''::pg_catalog.text))")
    idem = idem_pg.Idem(lambda: connection, "idem")
    connection.close, close = lambda: None, connection.close
    for replayed in (False, True):
        assert idem.once(lambda tx: {"a": 1}, user="anna", id=world.id, params=1, wait=1).replayed == replayed
    assert connection.execute("SELECT count(*) FROM ran").fetchone()[0] == 0
    close()
