"""Leases: work that is not one transaction, with a heartbeat, fenced transactions and a settlement."""

import asyncio
import contextlib
import functools
import threading
import time
from collections.abc import Callable
from typing import Any

from .core import Answer, Core, Request, log
from .drivers import P, Steps, arun, run
from .errors import Failed, LeaseLost, Refused
from .values import dumps, loads


def here(method: Callable[P, Steps[Any]]) -> Callable[P, Any]:
    return functools.wraps(method)(lambda *args, **options: args[0]._core.run(method(*args, **options)))


class Lease:
    """What the handler of `lease` gets.  With AsyncIdem, `record`, `transaction`, `settle` and `nothing_happened` are
    awaited.  The heartbeat renews the lease at a third of its length, but not in a fenced transaction: nobody can take
    the request over as long as that lasts.  An error of the handler leaves the lease to lapse."""

    def __init__(self, core: Core, request: Request, length: float, token: int, previous: Any, ends: float) -> None:
        self.previous = previous  # the progress that a holder before this one had recorded; None for the first holder
        self._core, self._of, self._length, self._ends = core, request, length, ends
        self._held = (*request.key, token)
        self._fenced = self._lost = False
        self._heart: asyncio.Future[None] | None = None
        self._answer: Answer | None = None
        self._over: Any = asyncio.Event() if core.asynchronous else threading.Event()

    def remaining(self) -> float:
        """Seconds until the handler must have stopped: a tenth before the lease ends.  0: it is lost."""
        return 0.0 if self._lost else max(0.0, self._ends - self._length / 10 - time.monotonic())

    def check(self) -> None:
        """Raises LeaseLost if the lease is lost, or is about to end.  Call it before each step."""
        if not self.remaining():
            raise LeaseLost()

    @here
    def record(self, progress: Any) -> Steps[None]:
        """Stores the progress for a successor, and renews the lease."""
        yield from self._extend(dumps(progress))

    @here
    def nothing_happened(self) -> Steps[None]:
        """Gives the request up, because nothing was done, or all was undone: another one may execute it at once."""
        yield from self._core.statement(self._request(), self._core.RELEASE, self._held, writes=True)
        self._over.set()

    def _request(self) -> Request:
        return Request(*self._of.key, attempts=self._of.attempts)

    def _extend(self, progress: str | None) -> Steps[None]:
        before = time.monotonic()  # the server counts from later on
        args = (*self._held, self._length, progress)
        yield from self._known(self._core.statement(self._request(), self._core.EXTEND, args, writes=True), False)
        self._ends = before + self._length

    def _in_fence(self, work: Callable[[Any], Steps[Any]]) -> Steps[None]:
        """work(tx), which returns the last statement, in a fenced transaction: again if it is lost, unless it has committed."""
        core, request, tried = self._core, self._request(), list[Any]()  # tried: a transaction whose COMMIT was sent, end of the lease
        def body(tx: Any) -> Steps[None]:
            request.stage, row = "claim", None
            try:
                row = yield from core.ask(core.driver.begin(tx, core.FENCE, (*self._held, *request.key)))
            except LeaseLost:  # also if the one in `tried` has settled the request
                if not tried:
                    raise
                yield from core.driver.rollback(tx)
            if tried and (yield from core.driver.query(tx, core.COMMITTED, (tried[0], *tried[:1], *request.key, tried[1] if row else -1.0)))[0]:
                return
            if row is None:
                raise LeaseLost()
            request.stage, request.unanswered = "handler", False
            sql, args = yield from work(tx)
            request.stage, tried[:] = "commit", row[1:3]
            yield from core.ask(core.driver.finish(tx, core.IN_FENCE % sql.removeprefix("SELECT "), (row[1], *args)))
        yield from self._known(core.repeat(request, body))

    @here
    def transaction(self, handler: Callable[[Any], Any]) -> Steps[Any]:
        """Runs handler(tx) in a transaction that is committed only if the lease is still held; returns its value.
        Again after a conflict or a lost connection; also if COMMIT was not answered, unless it was executed."""
        done: list[Any] = []
        def work(tx: Any) -> Steps[Any]:
            value = yield self._core.handled(handler(tx))
            done[:] = [time.monotonic(), value]
            return self._core.EXTEND, (*self._held, self._length, None)  # the lease must not end with this transaction
        yield from self._in_fence(work)
        self._ends = done[0] + self._length
        return done[1]

    @here
    def settle(self, value: Any = None, handler: Callable[[Any], Any] | None = None) -> Steps[Answer]:
        """Runs handler(tx) in a fenced transaction that also stores the value and ends the request.  Without a call of
        it, the value that the handler of the lease returns is settled."""
        core, text, done = self._core, dumps(value), list[str]()
        def work(tx: Any) -> Steps[Any]:
            done[:] = [core.COMPLETE, text]
            try:
                if handler is not None:
                    yield core.handled(handler(tx))
            except Refused as refusal:
                done[:] = [core.FAIL, dumps(refusal.value)]
            return done[0], (*self._held[:2], done[1], self._held[3], self._held[2])
        yield from self._in_fence(work)
        self._over.set()
        if done[0] == core.FAIL:
            raise Failed(loads(done[1]), replayed=False)
        self._answer = Answer(loads(done[1]), False)
        return self._answer

    def _known(self, steps: Steps[Any], fenced: bool = True) -> Steps[Any]:
        self._fenced = self._fenced or fenced
        try:
            return (yield from steps)
        except LeaseLost:
            self._lost = True
            raise
        finally:
            self._fenced = self._fenced and not fenced

    def _beats(self) -> Steps[None]:
        async def wait(seconds: float) -> None:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._over.wait(), seconds)
        pauses = wait if self._core.asynchronous else self._over.wait
        yield pauses(self._length / 3)
        while not self._over.is_set():
            pause = self._length / (10 if self._fenced else 3)
            try:
                if not self._fenced:
                    yield from self._extend(None)
            except LeaseLost:  # also if a settlement has just ended the request
                return
            except Exception:
                log.warning("a lease could not be renewed; trying again", exc_info=True)
                pause = self._length / 20
            yield pauses(pause)


def lease(core: Core, request: Request, length: float, progress: Any, handler: Callable[[Lease], Any]) -> Steps[Answer]:
    """Claims with a lease and runs the handler; or returns the stored result."""
    text = None if progress is None else dumps(progress)
    held: list[Any] = []  # token and progress of a claim whose COMMIT was sent
    started = [0.0]
    def body(tx: Any) -> Steps[Answer | None]:
        started[0] = time.monotonic()
        if held:
            with contextlib.suppress(LeaseLost):  # it was not committed
                args = (*request.key, held[0], length, None)
                yield from core.claimed(request, core.driver.query(tx, core.EXTEND, args))
                return None
        row = yield from core.claimed(request, core.driver.begin(tx, core.LEASE, (*request.claim(), length, text)))
        answer = core.outcome(row, request)
        if answer is not None:
            return answer
        held[:] = [row[4], loads(row[3])]
        request.stage = "commit"
        yield from core.ask(core.driver.finish(tx, "SELECT 1", ()))
        return None
    answer: Answer | None = yield from core.repeat(request, body)
    if answer is not None:
        return answer
    mine = Lease(core, request, length, held[0], held[1], started[0] + length)
    if time.monotonic() - started[0] > length / 3:  # the claim has waited for another holder
        yield from mine._extend(None)
    if core.asynchronous:
        mine._heart = asyncio.ensure_future(arun(mine._beats()))  # kept, or it could be collected
    else:
        threading.Thread(target=run, args=(mine._beats(),), daemon=True).start()
    try:
        value = yield core.handled(handler(mine))
        if not mine._over.is_set():
            yield mine.settle(value)
    finally:
        mine._over.set()
    return mine._answer or Answer(loads(dumps(value)), False)
