"""What the client needs of a driver: connections, one statement, and a transaction around a handler.

Each method is a generator.  What it yields is an awaitable in asyncio, and elsewhere the result itself: `run` sends a
yielded value back as it is, `arun` awaits it first.  So one text serves synchronous and asynchronous drivers.
"""

import asyncio
import inspect
import time
from collections.abc import Generator, Sequence
from typing import Any, TypeVar

T = TypeVar("T")
Steps = Generator[Any, Any, T]
MARK = "\1"  # no name of a schema has it


def run(steps: Steps[T]) -> T:
    value = None
    try:
        while True:
            value = steps.send(value)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]


async def arun(steps: Steps[T]) -> T:
    step, value = steps.send, None
    try:
        while True:
            value, step = step(value), steps.send
            if inspect.isawaitable(value):
                try:
                    value = await value
                except BaseException as error:
                    step, value = steps.throw, error
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]


async def take(pool: Any) -> Any:
    """pool.getconn() in a task of its own: the pool would lose the connection that it hands to a cancelled one."""
    getting = asyncio.ensure_future(pool.getconn())
    try:
        return await asyncio.shield(getting)
    except asyncio.CancelledError:
        getting.add_done_callback(lambda got: got.exception() or asyncio.ensure_future(pool.putconn(got.result())))
        raise


class Driver:
    """The dialect of a driver; by itself that of a connection of DB-API, such as Django's, for `within`.  Drivers of pools
    have acquire: a connection outside of a transaction; release: gives it back (broken: it is to be replaced); begin:
    BEGIN and a statement; finish: a statement and COMMIT, and no error only if both succeeded."""

    def __init__(self, source: Any, asynchronous: bool) -> None:
        self.source, self.asynchronous = source, asynchronous
        self.sleep: Any = asyncio.sleep if asynchronous else time.sleep
        self.whole: Any = [lambda done: done, asyncio.shield][asynchronous]  # also if the task is cancelled

    def sql(self, template: str) -> str:
        return template.replace("%", "%%").replace(MARK, "%s")

    def savepoint(self, tx: Any) -> Steps[Any]:
        yield from self.query(tx, "SAVEPOINT idem_within", ())

    def end(self, tx: Any, savepoint: Any, undo: bool) -> Steps[None]:
        if undo:
            yield from self.query(tx, "ROLLBACK TO SAVEPOINT idem_within", ())
        yield from self.query(tx, "RELEASE SAVEPOINT idem_within", ())

    def query(self, tx: Any, sql: str, args: Sequence[Any]) -> Steps[Any]:
        """One statement; returns its first row."""
        with tx.cursor() as cursor:
            cursor.execute(self.sql(sql), args)
            return cursor.fetchone() if cursor.description else None
        yield


class Psycopg(Driver):
    """psycopg 3.  The simple protocol sends BEGIN with the claim, and COMMIT with the result: the server does not execute
    COMMIT if the statement before it has failed.  Works behind PgBouncer, too."""

    def __init__(self, source: Any, asynchronous: bool) -> None:
        super().__init__(source, asynchronous)
        import psycopg
        from psycopg.rows import tuple_row
        self.row_factory = tuple_row
        self.cursor: Any = psycopg.AsyncClientCursor if asynchronous else psycopg.ClientCursor
        self.idle = psycopg.pq.TransactionStatus.IDLE
        self.before: dict[int, bool] = {}  # autocommit of the connections that are in use

    def acquire(self) -> Steps[Any]:
        get = self.source.getconn if hasattr(self.source, "getconn") else self.source
        tx = yield take(self.source) if self.asynchronous and get is not self.source else get()
        self.before[id(tx)] = tx.autocommit
        try:
            yield from self.set_autocommit(tx, True)
        except BaseException:
            yield from self.release(tx, True)
            raise
        return tx

    def set_autocommit(self, tx: Any, value: bool) -> Steps[None]:
        if self.asynchronous and tx.autocommit != value:
            yield tx.set_autocommit(value)
        elif tx.autocommit != value:
            tx.autocommit = value

    def release(self, tx: Any, broken: bool) -> Steps[None]:
        before, pooled = self.before.pop(id(tx), True), hasattr(self.source, "putconn")
        if broken:
            tx.pgconn.finish()
        elif pooled:
            yield from self.set_autocommit(tx, before)
        yield self.whole(self.source.putconn(tx) if pooled else tx.close())

    def closed(self, tx: Any) -> bool:
        return bool(tx.closed)

    def renew(self) -> Steps[None]:  # has the pool drop the connections that died with the one that was lost
        if hasattr(self.source, "check"):
            yield self.whole(self.source.check())

    def query(self, tx: Any, sql: str, args: Sequence[Any], first: bool = False) -> Steps[Any]:
        cursor = self.cursor(tx, row_factory=self.row_factory)
        yield cursor.execute(self.sql(sql), args)
        row = (yield cursor.fetchone()) if first else None
        while cursor.nextset():
            pass
        if first and cursor.statusmessage != "COMMIT":
            raise RuntimeError(f"COMMIT answered {cursor.statusmessage}")
        return row if first else (yield cursor.fetchone()) if cursor.description else None

    def begin(self, tx: Any, sql: str, args: Sequence[Any]) -> Steps[Any]:
        level = tx.isolation_level and f" ISOLATION LEVEL {tx.isolation_level.name.replace('_', ' ')}"
        return (yield from self.query(tx, f"BEGIN{level or ''}; {sql}", args))

    def finish(self, tx: Any, sql: str, args: Sequence[Any]) -> Steps[Any]:
        return (yield from self.query(tx, sql + "; COMMIT", args, first=True))

    def rollback(self, tx: Any) -> Steps[None]:
        if tx.pgconn.transaction_status != self.idle:
            yield from self.query(tx, "ROLLBACK", ())


class Asyncpg(Driver):
    """asyncpg, whose protocol takes one statement at a time: BEGIN and COMMIT are round trips of their own."""

    def __init__(self, source: Any, asynchronous: bool) -> None:
        super().__init__(source, asynchronous)
        self.transactions: dict[int, Any] = {}

    def sql(self, template: str) -> str:
        first, *rest = template.split(MARK)
        return first + "".join(f"${n}{part}" for n, part in enumerate(rest, 1))

    def acquire(self) -> Steps[Any]:
        return (yield self.source.acquire())

    def release(self, tx: Any, broken: bool) -> Steps[None]:
        self.transactions.pop(id(tx), None)
        if getattr(tx, "_con", tx) is None:  # the pool has it already
            return
        if broken or self.closed(tx):
            # Not pool.release(): it leaves the place of a connection that asyncpg has aborted taken for ever.
            tx.terminate()
        else:
            yield self.source.release(tx, timeout=30)

    def closed(self, tx: Any) -> bool:  # a pool takes its connection back when it is lost
        return getattr(tx, "_con", tx) is None or bool(tx.is_closed())

    def renew(self) -> Steps[None]:
        yield self.source.expire_connections()

    def query(self, tx: Any, sql: str, args: Sequence[Any]) -> Steps[Any]:
        return (yield tx.fetchrow(self.sql(sql), *args))

    def begin(self, tx: Any, sql: str, args: Sequence[Any]) -> Steps[Any]:
        transaction = self.transactions[id(tx)] = tx.transaction()
        yield transaction.start()
        return (yield from self.query(tx, sql, args))

    def finish(self, tx: Any, sql: str, args: Sequence[Any]) -> Steps[Any]:
        row = yield from self.query(tx, sql, args)
        yield self.transactions.pop(id(tx)).commit()
        return row

    def rollback(self, tx: Any) -> Steps[None]:
        if id(tx) in self.transactions:
            yield self.transactions.pop(id(tx)).rollback()


class Sqlalchemy(Driver):
    """Sessions and connections of SQLAlchemy, for `within`."""

    def sql(self, template: str) -> str:
        first, *rest = template.split(MARK)
        return first.replace(":", "\\:") + "".join(f":p{n}{part}" for n, part in enumerate(rest))

    def query(self, tx: Any, sql: str, args: Sequence[Any]) -> Steps[Any]:
        from sqlalchemy import text
        result = yield tx.execute(text(self.sql(sql)), {f"p{n}": arg for n, arg in enumerate(args)})
        return result.fetchone() if result.returns_rows else None

    def savepoint(self, tx: Any) -> Steps[Any]:
        return (yield tx.begin_nested())

    def end(self, tx: Any, savepoint: Any, undo: bool) -> Steps[None]:
        yield savepoint.rollback() if undo else savepoint.commit()


def driver_of(source: Any, asynchronous: bool) -> Any:
    """The driver for a pool, for a function that connects with psycopg, or for the connection of a transaction."""
    names = {c.__module__.split(".")[0] for c in type(source).__mro__}
    kind = Sqlalchemy if "sqlalchemy" in names else Asyncpg if "asyncpg" in names else Driver
    if names & {"psycopg", "psycopg_pool"} or (callable(source) and kind is Driver):
        kind = Psycopg
    if kind is Driver and (asynchronous or not hasattr(source, "cursor")):
        raise TypeError(f"neither a pool nor a function that connects: {source!r}")
    return kind(source, asynchronous)
