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
    """The pool and the dialect of one driver."""

    def __init__(self, source: Any, sleep: Callable[[float], Any]) -> None:
        self.source, self.sleep = source, sleep

    def sql(self, template: str) -> str:
        """The template, which has a MARK for each parameter, in the driver's style."""
        return template.replace("%", "%%").replace(MARK, "%s")

    def acquire(self) -> Steps[Any]:
        """A connection, outside of a transaction."""
        raise NotImplementedError

    def release(self, tx: Any, broken: bool) -> Steps[None]:
        """Gives the connection back.  broken: it is closed, and the pool replaces it."""
        raise NotImplementedError

    def closed(self, tx: Any) -> bool:
        raise NotImplementedError

    def renew(self) -> Steps[None]:
        """Has the pool drop the connections that died with the one that was lost."""
        return
        yield

    def query(self, tx: Any, sql: str, args: Sequence[Any]) -> Steps[Any]:
        """Executes one statement; returns the first row."""
        raise NotImplementedError

    def begin(self, tx: Any, sql: str, args: Sequence[Any]) -> Steps[Any]:
        """BEGIN and the statement, in one round trip if the driver can."""
        raise NotImplementedError

    def finish(self, tx: Any, sql: str, args: Sequence[Any]) -> Steps[Any]:
        """The statement and COMMIT, in one round trip if the driver can; without error only if both succeeded."""
        raise NotImplementedError

    def rollback(self, tx: Any) -> Steps[None]:
        raise NotImplementedError

    def savepoint(self, tx: Any) -> Steps[Any]:
        """Begins a savepoint; returns what `release_to` and `rollback_to` take."""
        yield from self.query(tx, "SAVEPOINT idem_within", ())

    def release_to(self, tx: Any, savepoint: Any) -> Steps[None]:
        yield from self.query(tx, "RELEASE SAVEPOINT idem_within", ())

    def rollback_to(self, tx: Any, savepoint: Any) -> Steps[None]:
        yield from self.query(tx, "ROLLBACK TO SAVEPOINT idem_within", ())
        yield from self.query(tx, "RELEASE SAVEPOINT idem_within", ())


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
        yield from self.set_autocommit(tx, True)
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
        return (yield self.source.acquire() if hasattr(self.source, "acquire") else self.source())

    def release(self, tx: Any, broken: bool) -> Steps[None]:
        self.transactions.pop(id(tx), None)
        if broken and not self.closed(tx):
            tx.terminate()
        if hasattr(self.source, "release"):
            yield self.source.release(tx)
        elif not broken:
            yield tx.close()

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
    """Sessions of SQLAlchemy, synchronous or not: the source is a sessionmaker."""

    def sql(self, template: str) -> str:
        first, *rest = template.split(MARK)
        return first.replace(":", "\\:") + "".join(f":p{n}{part}" for n, part in enumerate(rest))

    def acquire(self) -> Steps[Any]:
        return self.source()
        yield

    def release(self, tx: Any, broken: bool) -> Steps[None]:
        if broken and hasattr(tx, "invalidate"):
            yield tx.invalidate()
        yield tx.close()

    def closed(self, tx: Any) -> bool:
        return False  # SQLAlchemy's error says so: connection_invalidated

    def query(self, tx: Any, sql: str, args: Sequence[Any]) -> Steps[Any]:
        from sqlalchemy import text

        result = yield tx.execute(text(self.sql(sql)), {f"p{n}": arg for n, arg in enumerate(args)})
        return result.fetchone() if result.returns_rows else None

    def begin(self, tx: Any, sql: str, args: Sequence[Any]) -> Steps[Any]:
        return (yield from self.query(tx, sql, args))  # the session begins by itself

    def finish(self, tx: Any, sql: str, args: Sequence[Any]) -> Steps[Any]:
        yield tx.flush()
        row = yield from self.query(tx, sql, args)
        yield tx.commit()
        return row

    def rollback(self, tx: Any) -> Steps[None]:
        yield tx.rollback()

    def savepoint(self, tx: Any) -> Steps[Any]:
        return (yield tx.begin_nested())

    def release_to(self, tx: Any, savepoint: Any) -> Steps[None]:
        yield savepoint.commit()

    def rollback_to(self, tx: Any, savepoint: Any) -> Steps[None]:
        yield savepoint.rollback()


class Django(Driver):
    """Django's connection of this thread, so that models take part: the source is django.db.connections["default"]."""

    def acquire(self) -> Steps[Any]:
        self.source.close_if_unusable_or_obsolete()
        if self.source.in_atomic_block:
            raise RuntimeError("this runs in transaction.atomic() already: use within(), or non_atomic_requests")
        return self.source
        yield

    def release(self, tx: Any, broken: bool) -> Steps[None]:
        if broken:
            tx.close()
        return
        yield

    def closed(self, tx: Any) -> bool:
        return tx.connection is None or bool(tx.connection.closed)

    def query(self, tx: Any, sql: str, args: Sequence[Any]) -> Steps[Any]:
        with tx.cursor() as cursor:
            cursor.execute(self.sql(sql), args)
            return cursor.fetchone() if cursor.description else None
        yield

    def begin(self, tx: Any, sql: str, args: Sequence[Any]) -> Steps[Any]:
        from django.db import transaction

        tx.idem_atomic = transaction.atomic(using=tx.alias)
        tx.idem_atomic.__enter__()
        return (yield from self.query(tx, sql, args))

    def finish(self, tx: Any, sql: str, args: Sequence[Any]) -> Steps[Any]:
        row = yield from self.query(tx, sql, args)
        atomic, tx.idem_atomic = tx.idem_atomic, None
        atomic.__exit__(None, None, None)
        return row

    def rollback(self, tx: Any) -> Steps[None]:
        atomic, tx.idem_atomic = getattr(tx, "idem_atomic", None), None
        if atomic is not None:
            error = RuntimeError("rolled back")
            atomic.__exit__(RuntimeError, error, None)
        return
        yield


def modules(thing: Any) -> set[str]:
    return {c.__module__.split(".")[0] for c in type(thing).__mro__}


def driver_of(source: Any, asynchronous: bool) -> Driver:
    """The driver for a pool, a sessionmaker, a connection of a transaction, or a function that connects."""
    sleep: Any = asyncio.sleep if asynchronous else time.sleep
    names = modules(source)
    if "sqlalchemy" in names:
        return Sqlalchemy(source, sleep)
    if "django" in names:
        return Django(source, sleep)
    if "asyncpg" in names:
        return Asyncpg(source, sleep)
    if names & {"psycopg", "psycopg_pool"}:
        return Psycopg(source, sleep, asynchronous)
    if callable(source):  # it connects with psycopg
        return Psycopg(source, sleep, asynchronous)
    raise TypeError(f"no pool, sessionmaker or function that connects: {source!r}")
