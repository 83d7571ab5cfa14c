"""Idem and AsyncIdem: the same methods, blocking and for asyncio."""

import functools
from collections.abc import Callable, Coroutine
from typing import Any
from uuid import UUID

from . import lease as leases
from .core import Answer, Core, Event, Request
from .drivers import P, Steps, T, arun, run
from .http import Options, decorator
from .values import Duration, loads, seconds

Id = str | int | UUID
Handler = Callable[[Any], Any]


def blocking(method: Callable[P, Steps[T]]) -> Callable[P, T]:
    return functools.wraps(method)(lambda *args, **options: run(method(*args, **options)))


def awaited(method: Callable[P, Steps[T]]) -> Callable[P, Coroutine[Any, Any, T]]:
    @functools.wraps(method)
    async def call(*args: P.args, **options: P.kwargs) -> T:
        return await arun(method(*args, **options))
    return call


class Methods:
    asynchronous = False

    def __init__(self, source: Any, schema: str = "idem", on_outcome: Callable[[Event], object] | None = None) -> None:
        """source: a pool of psycopg_pool or asyncpg, or a function that connects with psycopg.  schema: where idem is
        installed.  on_outcome: called with an Event for each once, within, call and lease."""
        self._core = Core(source, self.asynchronous, schema, on_outcome)

    def http(self, scope: str, user: Handler, **options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Decorates a handler(tx, request), so that it becomes a view that executes each Idempotency-Key once: of
        Starlette, FastAPI or asynchronous Django (AsyncIdem), of Flask or Django (Idem).  options: see http.Options."""
        return functools.partial(decorator, self._core, Options(scope, user, **options))

    def _once(
        self, handler: Handler, *, user: Id, id: Id, scope: str = "", params: Any = None,
        wait: Duration | None = 0, attempts: int = 5,
    ) -> Steps[Answer]:  # fmt: skip
        """Claims the request, calls handler(tx) and commits its result with its work; or returns the stored result.

        tx is the connection, in a transaction that `once` commits.  The handler is called again after a serialization
        failure, a deadlock or a lost connection, so it does nothing that a rollback does not undo.  Its other errors
        roll back and come through.  params: compared with those of the first execution.  wait: seconds to wait for
        another holder, None for the setting idem.wait."""
        request = Request(user, id, scope, params, wait, attempts)
        return self._core.observed(request, self._core.once(request, handler))

    def _within(
        self, tx: Any, handler: Handler, *, user: Id, id: Id, scope: str = "", params: Any = None,
        wait: Duration | None = 0,
    ) -> Steps[Answer]:  # fmt: skip
        """`once` in a transaction that you have begun and will commit: a connection of psycopg or asyncpg, a session or
        connection of SQLAlchemy, or Django's connection.  Nothing is repeated here: at 40001, 40P01 or a lost
        connection repeat your transaction.  After any error the claim and the handler's work are undone, and your
        transaction can go on."""
        request = Request(user, id, scope, params, wait)
        return self._core.observed(request, self._core.within(tx, request, handler))

    def _call(
        self, function: str, arguments: dict[str, Any], *, user: Id, id: Id, scope: str = "",
        wait: Duration | None = 0, attempts: int = 5,
    ) -> Steps[Answer]:  # fmt: skip
        """Runs a function of the database once, by idem_call: one round trip.  function: 'pay(text, integer)'."""
        request = Request(user, id, scope, arguments, wait, attempts)
        return self._core.observed(request, self._core.call(request, function))

    def _lease(
        self, handler: Callable[[leases.Lease], Any], *, user: Id, id: Id, scope: str = "", lease: Duration = 30,
        progress: Any = None, params: Any = None, wait: Duration | None = 0, attempts: int = 5,
    ) -> Steps[Answer]:  # fmt: skip
        """Claims the request for `lease` seconds, calls handler(lease), and settles what it returns; for work that is
        not one transaction.  progress: what a successor must know, if there is no progress yet."""
        request = Request(user, id, scope, params, wait, attempts)
        return self._core.observed(request, leases.lease(self._core, request, seconds(lease), progress, handler))

    def _status(self, *, user: Id, id: Id, scope: str = "") -> Steps[str | None]:
        """completed, failed, in_progress or unknown; None if the request is not remembered."""
        request = Request(user, id, scope)
        row = yield from self._core.statement(request, self._core.STATUS, request.key)
        return row[0]  # type: ignore[no-any-return]

    def _lookup(self, *, user: Id, id: Id, scope: str = "") -> Steps[dict[str, Any] | None]:
        """The row of idem_lookup, by the names of its columns; None if nothing is stored."""
        request = Request(user, id, scope)
        row = yield from self._core.statement(request, self._core.LOOKUP, request.key)
        names = ("state", "expires_at", "lease_until", "fingerprint", "committed_at", "result", "progress")
        return None if row is None else dict(zip(names, (*row[:5], loads(row[5]), loads(row[6]))))

    def _forget(self, *, user: Id, id: Id, scope: str = "") -> Steps[bool]:
        """Drops a request, so that it can be executed again.  For operators.  A lost connection is an error here: between
        two attempts somebody can have executed the request again."""
        request = Request(user, id, scope, attempts=1)
        row = yield from self._core.statement(request, self._core.FORGET, request.key, writes=True)
        return bool(row[0])

    def _lapsed(self, scope: str | None = None, max_rows: int | None = 100) -> Steps[list[dict[str, Any]]]:
        """Leases that lapsed and that nobody has settled, as rows of idem_lapsed, longest lapsed first; None: of all
        scopes.  For operators."""
        row = yield from self._core.statement(Request("-", "-", ""), self._core.LAPSED, (scope, max_rows))
        names = ("scope", "user_id", "request_id", "status", "lease_until", "progress")
        rows = [dict(zip(names, left)) for left in zip(*(column or [] for column in row))]
        return [{**left, "progress": loads(left["progress"])} for left in rows]


class Idem(Methods):
    """Executes requests once, over blocking connections."""

    once, within, call = blocking(Methods._once), blocking(Methods._within), blocking(Methods._call)
    lease, status, lookup = blocking(Methods._lease), blocking(Methods._status), blocking(Methods._lookup)
    forget, lapsed = blocking(Methods._forget), blocking(Methods._lapsed)


class AsyncIdem(Methods):
    """Executes requests once, in asyncio: handlers are coroutines, and each method is awaited."""

    asynchronous = True
    once, within, call = awaited(Methods._once), awaited(Methods._within), awaited(Methods._call)
    lease, status, lookup = awaited(Methods._lease), awaited(Methods._status), awaited(Methods._lookup)
    forget, lapsed = awaited(Methods._forget), awaited(Methods._lapsed)
