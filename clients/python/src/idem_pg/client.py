"""Idem and AsyncIdem: the same methods, blocking and for asyncio."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any
from uuid import UUID

from . import lease as leases
from .core import Answer, Core, Event, Lapsed, Request, Stored
from .drivers import Steps, arun, run
from .http import Options, decorator
from .lease import Lease
from .values import Duration, seconds

Id = str | int | UUID


def steps_of(handler: Callable[[Any], Any]) -> Callable[[Any], Steps[Any]]:
    def steps(tx: Any) -> Steps[Any]:
        return (yield handler(tx))

    return steps


class _Idem:
    _asynchronous = False

    def __init__(
        self, source: Any, schema: str = "idem", on_outcome: Callable[[Event], object] | None = None
    ) -> None:
        """source: a pool of psycopg_pool or asyncpg, a sessionmaker of SQLAlchemy, Django's connection, or a function
        that connects with psycopg.  schema: where idem is installed.  on_outcome: called with an Event for each call."""
        self._core = Core(source, self._asynchronous, schema, on_outcome)

    def http(self, scope: str, user: Callable[[Any], Any], **options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Decorates a handler(tx, request), so that it becomes a view that executes each Idempotency-Key once: of
        Starlette, FastAPI or asynchronous Django (AsyncIdem), of Flask or Django (Idem).  options: see http.Options."""
        return decorator(self._core, Options(scope, user, **options))


class Idem(_Idem):
    """Executes requests once, over blocking connections."""

    def once(
        self, handler: Callable[[Any], Any], *, user: Id, id: Id, scope: str = "", params: Any = None,
        wait: Duration | None = 0, attempts: int = 5,
    ) -> Answer:  # fmt: skip
        """Claims the request, calls handler(tx) and commits its result with its work; or returns the stored result.

        tx is the connection, in a transaction that `once` commits.  The handler is called again after a serialization
        failure, a deadlock or a lost connection, so it does nothing that a rollback does not undo.  Its other errors
        roll back and come through.  params: compared with those of the first execution.  wait: seconds to wait for
        another holder, None for the setting idem.wait.
        """
        request = Request(user, id, scope, params, wait, attempts)
        return run(self._core.observed(request, self._core.once(request, steps_of(handler))))

    def within(
        self, tx: Any, handler: Callable[[Any], Any], *, user: Id, id: Id, scope: str = "", params: Any = None,
        wait: Duration | None = 0,
    ) -> Answer:  # fmt: skip
        """`once` in a transaction that you have begun and will commit: a connection of psycopg, a session of SQLAlchemy
        or Django's connection.  Nothing is repeated here: at 40001, 40P01 or a lost connection repeat your transaction.
        After any error the claim and the handler's work are undone, and your transaction can go on."""
        request = Request(user, id, scope, params, wait)
        return run(self._core.observed(request, self._core.within(tx, request, steps_of(handler))))

    def call(
        self, function: str, arguments: dict[str, Any], *, user: Id, id: Id, scope: str = "",
        wait: Duration | None = 0, attempts: int = 5,
    ) -> Answer:  # fmt: skip
        """Runs a function of the database once, by idem_call: one round trip.  function: 'pay(text, integer)'."""
        request = Request(user, id, scope, None, wait, attempts)
        return run(self._core.observed(request, self._core.call(request, function, arguments)))

    def lease(
        self, handler: Callable[[Lease], Any], *, user: Id, id: Id, scope: str = "", lease: Duration = 30,
        progress: Any = None, params: Any = None, wait: Duration | None = 0, attempts: int = 5,
    ) -> Answer:  # fmt: skip
        """Claims the request for `lease` seconds, calls handler(lease), and settles what it returns; for work that is
        not one transaction.  progress: what a successor must know, if there is no progress yet."""
        request = Request(user, id, scope, params, wait, attempts)
        steps = leases.lease(self._core, request, seconds(lease), progress, handler)
        return run(self._core.observed(request, steps))

    def status(self, *, user: Id, id: Id, scope: str = "") -> str | None:
        """completed, failed, in_progress or unknown; None if the request is not remembered."""
        return run(self._core.status(Request(user, id, scope)))  # type: ignore[no-any-return]

    def lookup(self, *, user: Id, id: Id, scope: str = "") -> Stored | None:
        """All that is stored of a request."""
        return run(self._core.lookup(Request(user, id, scope)))

    def forget(self, *, user: Id, id: Id, scope: str = "") -> bool:
        """Drops a request, so that it can be executed again.  For operators.  Never repeated by itself."""
        return run(self._core.forget(Request(user, id, scope)))

    def lapsed(self, scope: str | None = None, max_rows: int | None = 100) -> list[Lapsed]:
        """Leases that lapsed and that nobody has settled, longest lapsed first; None: of all scopes.  For operators."""
        return run(self._core.lapsed(scope, max_rows))


class AsyncIdem(_Idem):
    """Executes requests once, in asyncio.  The methods are those of Idem; handlers are coroutines."""

    _asynchronous = True

    async def once(
        self, handler: Callable[[Any], Awaitable[Any]], *, user: Id, id: Id, scope: str = "", params: Any = None,
        wait: Duration | None = 0, attempts: int = 5,
    ) -> Answer:  # fmt: skip
        """See Idem.once."""
        request = Request(user, id, scope, params, wait, attempts)
        return await arun(self._core.observed(request, self._core.once(request, steps_of(handler))))

    async def within(
        self, tx: Any, handler: Callable[[Any], Awaitable[Any]], *, user: Id, id: Id, scope: str = "",
        params: Any = None, wait: Duration | None = 0,
    ) -> Answer:  # fmt: skip
        """See Idem.within."""
        request = Request(user, id, scope, params, wait)
        return await arun(self._core.observed(request, self._core.within(tx, request, steps_of(handler))))

    async def call(
        self, function: str, arguments: dict[str, Any], *, user: Id, id: Id, scope: str = "",
        wait: Duration | None = 0, attempts: int = 5,
    ) -> Answer:  # fmt: skip
        """See Idem.call."""
        request = Request(user, id, scope, None, wait, attempts)
        return await arun(self._core.observed(request, self._core.call(request, function, arguments)))

    async def lease(
        self, handler: Callable[[Lease], Awaitable[Any]], *, user: Id, id: Id, scope: str = "", lease: Duration = 30,
        progress: Any = None, params: Any = None, wait: Duration | None = 0, attempts: int = 5,
    ) -> Answer:  # fmt: skip
        """See Idem.lease."""
        request = Request(user, id, scope, params, wait, attempts)
        steps = leases.lease(self._core, request, seconds(lease), progress, handler)
        return await arun(self._core.observed(request, steps))

    async def status(self, *, user: Id, id: Id, scope: str = "") -> str | None:
        """See Idem.status."""
        return await arun(self._core.status(Request(user, id, scope)))

    async def lookup(self, *, user: Id, id: Id, scope: str = "") -> Stored | None:
        """See Idem.lookup."""
        return await arun(self._core.lookup(Request(user, id, scope)))

    async def forget(self, *, user: Id, id: Id, scope: str = "") -> bool:
        """See Idem.forget."""
        return await arun(self._core.forget(Request(user, id, scope)))

    async def lapsed(self, scope: str | None = None, max_rows: int | None = 100) -> list[Lapsed]:
        """See Idem.lapsed."""
        return await arun(self._core.lapsed(scope, max_rows))
