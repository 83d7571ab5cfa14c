"""What the client needs of a driver: connections, one statement, and a transaction around a handler.

Each method is a generator.  What it yields is an awaitable in asyncio, and elsewhere the result itself: `run` sends a
yielded value back as it is, `arun` awaits it first.  So one text serves synchronous and asynchronous drivers.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeVar

T = TypeVar("T")
Steps = Generator[Any, Any, T]
MARK = "\1"  # no name of a schema has it


def run(steps: Steps[T]) -> T:
    """Runs a generator whose calls have blocked already."""
    try:
        value = next(steps)
        while True:
            value = steps.send(value)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]


async def arun(steps: Steps[T]) -> T:
    """Runs a generator, and awaits what it yields."""
    try:
        value = next(steps)
        while True:
            if inspect.isawaitable(value):
                try:
                    value = await value
                except BaseException as error:
                    value = steps.throw(error)
                    continue
            value = steps.send(value)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]


class Driver:
    """The connections and the dialect of a driver.  What the subclasses have:

    acquire: a connection outside of a transaction; release: gives it back; broken: it is closed and to be replaced.
    query: one statement, returns its first row.  begin: BEGIN and the statement; finish: the statement and COMMIT, and
    no error only if both succeeded; each in one round trip if the driver can.
    """

    def __init__(self, source: Any, sleep: Callable[[float], Any]) -> None:
        self.source, self.sleep = source, sleep

    def sql(self, template: str) -> str:
        """The template, which has a MARK for each parameter, in the driver's style."""
        return template.replace("%", "%%").replace(MARK, "%s")

    def savepoint(self, tx: Any) -> Steps[Any]:
        """Begins a savepoint; returns what `end` takes."""
        yield from self.query(tx, "SAVEPOINT idem_within", ())

    def end(self, tx: Any, savepoint: Any, undo: bool) -> Steps[None]:
        if undo:
            yield from self.query(tx, "ROLLBACK TO SAVEPOINT idem_within", ())
        yield from self.query(tx, "RELEASE SAVEPOINT idem_within", ())

    def query(self, tx: Any, sql: str, args: Sequence[Any]) -> Steps[Any]:
        """One statement of a connection of DB-API, such as Django's."""
        with tx.cursor() as cursor:
            cursor.execute(self.sql(sql), args)
            return cursor.fetchone() if cursor.description else None
        yield


class Psycopg(Driver):
    """psycopg 3, synchronous or not.  The simple protocol sends BEGIN with the claim, and COMMIT with the result:
    the server does not execute COMMIT if the statement before it has failed.  Works behind PgBouncer, too."""

    def __init__(self, source: Any, sleep: Callable[[float], Any], asynchronous: bool) -> None:
        super().__init__(source, sleep)
        import psycopg
        from psycopg.rows import tuple_row

        self.asynchronous, self.row_factory = asynchronous, tuple_row
        self.cursor: Any = psycopg.AsyncClientCursor if asynchronous else psycopg.ClientCursor
        self.idle = psycopg.pq.TransactionStatus.IDLE
        self.before: dict[int, bool] = {}  # autocommit of the connections that are in use

    def acquire(self) -> Steps[Any]:
        tx = yield self.source.getconn() if hasattr(self.source, "getconn") else self.source()
        self.before[id(tx)] = tx.autocommit
        try:
            yield from self.set_autocommit(tx, True)
        except BaseException:
            yield from self.release(tx, True)
            raise
        return tx

    def set_autocommit(self, tx: Any, value: bool) -> Steps[None]:
        if tx.autocommit == value:
            return
        if self.asynchronous:
            yield tx.set_autocommit(value)
        else:
            tx.autocommit = value

    def release(self, tx: Any, broken: bool) -> Steps[None]:
        before = self.before.pop(id(tx), True)
        if broken:
            tx.pgconn.finish()
        elif hasattr(self.source, "putconn"):
            yield from self.set_autocommit(tx, before)
        if hasattr(self.source, "putconn"):
            yield self.source.putconn(tx)
        else:
            yield tx.close()

    def closed(self, tx: Any) -> bool:
        return bool(tx.closed)

    def renew(self) -> Steps[None]:
        """Has the pool drop the connections that died with the one that was lost."""
        if hasattr(self.source, "check"):
            yield self.source.check()

    def execute(self, tx: Any, sql: str, args: Sequence[Any], first: bool = False) -> Steps[Any]:
        cursor = self.cursor(tx, row_factory=self.row_factory)
        yield cursor.execute(self.sql(sql), args)
        row = (yield cursor.fetchone()) if first else None
        while cursor.nextset():
            pass
        if first:
            if cursor.statusmessage != "COMMIT":
                raise RuntimeError(f"COMMIT answered {cursor.statusmessage}")
            return row
        return (yield cursor.fetchone()) if cursor.description else None

    def query(self, tx: Any, sql: str, args: Sequence[Any]) -> Steps[Any]:
        return (yield from self.execute(tx, sql, args))

    def begin(self, tx: Any, sql: str, args: Sequence[Any]) -> Steps[Any]:
        return (yield from self.execute(tx, "BEGIN; " + sql, args))

    def finish(self, tx: Any, sql: str, args: Sequence[Any]) -> Steps[Any]:
        return (yield from self.execute(tx, sql + "; COMMIT", args, first=True))

    def rollback(self, tx: Any) -> Steps[None]:
        if tx.pgconn.transaction_status != self.idle:
            yield from self.execute(tx, "ROLLBACK", ())


class Asyncpg(Driver):
    """asyncpg, whose protocol takes one statement at a time: BEGIN and COMMIT are round trips of their own."""

    def __init__(self, source: Any, sleep: Callable[[float], Any]) -> None:
        super().__init__(source, sleep)
        self.transactions: dict[int, Any] = {}

    def sql(self, template: str) -> str:
        first, *rest = template.split(MARK)
        return first + "".join(f"${n}{part}" for n, part in enumerate(rest, 1))

    def acquire(self) -> Steps[Any]:
        return (yield self.source.acquire(timeout=30) if hasattr(self.source, "acquire") else self.source())

    def release(self, tx: Any, broken: bool) -> Steps[None]:
        self.transactions.pop(id(tx), None)
        if getattr(tx, "_con", tx) is None:  # the pool has it already
            return
        if broken or self.closed(tx):
            # Not pool.release(): it leaves the place of a connection that asyncpg has aborted taken for ever.
            tx.terminate()
        elif hasattr(self.source, "release"):
            yield self.source.release(tx, timeout=30)
        else:
            yield tx.close(timeout=30)

    def closed(self, tx: Any) -> bool:
        # A pool takes its connection back when it is lost.
        return getattr(tx, "_con", tx) is None or bool(tx.is_closed())

    def renew(self) -> Steps[None]:
        if hasattr(self.source, "expire_connections"):
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
        transaction = self.transactions.pop(id(tx), None)
        if transaction is not None:
            yield transaction.rollback()


class Sqlalchemy(Driver):
    """Sessions and connections of SQLAlchemy, synchronous or not, for `within`."""

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
    sleep: Any = asyncio.sleep if asynchronous else time.sleep
    names = {c.__module__.split(".")[0] for c in type(source).__mro__}
    if "sqlalchemy" in names:
        return Sqlalchemy(source, sleep)
    if "asyncpg" in names:
        return Asyncpg(source, sleep)
    if names & {"psycopg", "psycopg_pool"} or callable(source):
        return Psycopg(source, sleep, asynchronous)
    if hasattr(source, "cursor") and not asynchronous:
        return Driver(source, sleep)
    raise TypeError(f"neither a pool nor a function that connects: {source!r}")
