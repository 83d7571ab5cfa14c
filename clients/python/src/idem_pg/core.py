"""What a call does, in steps (see drivers.py): claim, handler, result, COMMIT, and again if a connection was lost."""

import contextlib
import inspect
import logging
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from . import errors
from .drivers import MARK, Steps, arun, driver_of, run
from .errors import CommitUnknown, Failed, HandlerEndedTransaction, IdemError, InProgress, Invalid, LeaseLost, Refused
from .values import Duration, check, dumps, loads, quoted, seconds

log = logging.getLogger("idem_pg")


@dataclass(frozen=True)
class Answer:
    """`value`: what the handler returned, as jsonb holds it: without the order of keys.  `replayed`: an earlier
    execution has stored it, which can be a lost attempt of this very call.  `expires_at`: remembered until then."""
    value: Any
    replayed: bool
    expires_at: datetime | None = None


@dataclass(frozen=True)
class Event:
    """What `on_outcome` is told of each once, call, within and lease.  outcome: `claimed` for an execution, `completed`
    for a replay, the outcome of an IdemError, else `error`.  waited: seconds that the claims took.  error: what was raised."""
    scope: str
    outcome: str
    replayed: bool
    waited: float
    attempts: int
    error: Exception | None = None


class Request:
    """The arguments that name a request, how the call goes about it, and how far it is."""

    def __init__(
        self, user: object, id: object, scope: str, params: Any = None, wait: Duration | None = 0, attempts: int = 5,
        params_text: str | None = None,
    ) -> None:  # fmt: skip
        def name(what: str, value: object, least: int = 1) -> str:
            size = len(str(value).encode(errors="replace"))
            if isinstance(value, bool) or not isinstance(value, (str, int, UUID)) or not least <= size <= 255:
                raise Invalid(f"{what} is {value!r}: it must be a str, an int or a UUID of {least} to 255 bytes")
            check(str(value), what)
            return str(value)
        try:
            self.key = (name("user", user), name("id", id), name("scope", scope, 0))
            self.fingerprint = params_text if params_text or params is None else dumps(params)
            self.wait = None if wait is None else seconds(wait)
        except (TypeError, ValueError) as error:
            raise Invalid(str(error)) from error
        self.attempts, self.attempt, self.waited = attempts, 0, 0.0
        self.stage = ""  # connect, claim, handler, commit: what is under way
        self.lost = self.unanswered = self.spent = False

    def claim(self) -> tuple[Any, ...]:
        # The session of an attempt that was lost can hold the request for a moment yet.
        wait = max(self.wait, 1.0) if self.lost and self.wait is not None else self.wait
        return (*self.key, self.fingerprint, wait)


class Core:
    def __init__(self, source: Any, asynchronous: bool, schema: str, on_outcome: Any) -> None:
        self.asynchronous, self.schema, self.on_outcome = asynchronous, schema, on_outcome
        self.run: Callable[[Steps[Any]], Any] = arun if asynchronous else run
        self.driver = driver_of(source, asynchronous)
        s, xact = quoted(schema) + ".idem_", "pg_catalog.pg_current_xact_id()"
        def cast(what: str, kind: str = "text") -> str:  # qualified: anybody can make types in pg_temp
            return f"CAST({what} AS pg_catalog.{kind})"
        text, jsonb, xid = cast(MARK), cast(cast(MARK), "jsonb"), cast(cast(MARK), "xid8")
        wait, token = cast(MARK, "float8") + " OPERATOR(pg_catalog.*) " + cast("'1 s'", "interval"), cast(MARK, "int8")
        key = f"{text}, {text}, scope => {text}"
        # The usual ones without names: looking for them costs the server as much as a fifth of a claim.
        self.CLAIM = (f"SELECT {cast('outcome')}, {cast('result')}, expires_at"
                      f" FROM {s}try_claim({text}, {text}, {text}, {s}fingerprint({jsonb}), {wait})")  # fmt: skip
        self.COMPLETE, self.FAIL = (f"SELECT {s}{how}({text}, {text}, {jsonb}, {token}, {text})" for how in ("complete", "fail"))
        arguments = f"{key}, function => {text}, arguments => {jsonb}, wait => {wait}"
        self.CALL = f"SELECT {cast('r')}, {cast(s + 'outcome()')} FROM {s}call({arguments}) AS r"
        self.STATUS, self.FORGET = f"SELECT {cast(f'{s}status({key})')}", f"SELECT {s}forget({key})"
        stored = f"{cast('state')}, expires_at, lease_until, fingerprint, committed_at, {cast('result')}, {cast('progress')}"
        self.LOOKUP = f"SELECT {stored} FROM {s}lookup({key})"
        columns = "scope", "user_id", "request_id", "status", "lease_until", "progress::pg_catalog.text"
        arrays = ", ".join(f"pg_catalog.array_agg(l.{column})" for column in columns)  # one row: the only way to fetch here
        self.LAPSED = f"SELECT {arrays} FROM {s}lapsed({text}, {cast(MARK, 'int4')}) AS l"
        self.LEASE = (f"SELECT {cast('outcome')}, {cast('result')}, expires_at, {cast('progress')}, token"
                      f" FROM {s}lease({key}, fingerprint => {s}fingerprint({jsonb}), wait => {wait},"
                      f" lease => {wait}, progress => {jsonb})")  # fmt: skip
        self.EXTEND = f"SELECT {cast(f'{s}extend({key}, token => {token}, lease => {wait}, progress => {jsonb})')}"
        until = f"(SELECT pg_catalog.date_part('epoch', l.lease_until) FROM {s}lookup({key}) AS l)"
        self.FENCE = f"SELECT {cast(f'{s}fence({key}, token => {token})')}, {cast(xact)}, {until}"
        # After a crash the server uses the number of a transaction again: so the end of the lease must have changed, too.
        self.COMMITTED = (f"SELECT {xid} < {xact} AND pg_catalog.pg_xact_status({xid}) = 'committed'"
                          f" AND {until} IS DISTINCT FROM {cast(MARK, 'float8')}")  # fmt: skip
        # The token is good outside of the fence, too: so see that this is still the transaction that has it.
        wrong = cast(cast(f"{cast(xact)} || ' is not the transaction of the fence'", "int4"))
        self.IN_FENCE = f"SELECT CASE WHEN {xact} = {xid} THEN {cast('%s')} ELSE {wrong} END"
        self.RELEASE = f"SELECT {s}release({key}, token => {token})"

    def ask(self, steps: Steps[Any], function: str = "idem_") -> Steps[Any]:
        """A statement of ours: its errors become this package's."""
        try:
            return (yield from steps)
        except Exception as error:
            if (translated := errors.translated(error, self.schema, function)) is error:
                raise
            raise translated from error

    def settled(self, steps: Steps[Any]) -> Steps[Any]:
        """The end of a claim without a lease."""
        try:
            return (yield from self.ask(steps))
        except LeaseLost as error:  # the claim of this transaction is gone
            raise HandlerEndedTransaction() from error

    def repeat(self, request: Request, body: Callable[[Any], Steps[Any]]) -> Steps[Any]:
        """Runs the body with a connection: again after a conflict or a lost connection, while attempts are left."""
        while True:
            request.attempt += 1
            request.stage, tx = "connect", None
            try:
                tx = yield from self.driver.acquire()
                answer = yield from body(tx)
            except BaseException as error:
                broken = tx is not None and (yield from self.leave(tx, error))
                if not isinstance(error, Exception):
                    raise
                again = self.again(request, error, broken)
                if not again or request.attempt >= request.attempts:
                    request.spent = again
                    if request.unanswered and (again or request.stage == "connect"):
                        raise CommitUnknown() from error
                    raise
            else:
                yield from self.leave(tx)
                return answer
            if request.lost:
                with contextlib.suppress(Exception):
                    yield from self.driver.renew()
            yield self.driver.sleep(random.uniform(0, min(2, 0.05 * 2**request.attempt)))

    def again(self, request: Request, error: Exception, broken: bool) -> bool:
        """Whether another attempt may succeed.  An error that the handler made itself never counts."""
        if request.stage == "connect":
            request.lost = request.lost or errors.lost(error, False)
            final = ("PoolTimeout", "TimeoutError", "PoolClosed", "TooManyRequests", "InterfaceError")  # of a pool
            return errors.lost(error, type(error).__name__ not in final and errors.sqlstate(error) is None)
        if request.stage == "claim" and isinstance(error, (InProgress, errors.TimedOut)):
            return request.lost
        if request.stage == "claim" and request.unanswered and (errors.sqlstate(error) or "")[:2] in ("25", "53", "55", "57"):
            return True  # a server on its way up or down: what has become of that COMMIT is not known yet
        lost = errors.lost(error, broken)
        request.lost, request.unanswered = request.lost or lost, request.unanswered or (lost and request.stage == "commit")
        return lost or errors.conflict(error)

    def leave(self, tx: Any, error: BaseException | None = None) -> Steps[bool]:
        """Rolls back what is not committed, and gives the connection back.  True: it is lost.  What interrupts a driver (a
        cancelled task) leaves the connection in a state that nobody knows, so it is closed then."""
        broken = not isinstance(error, Exception | None) or self.driver.closed(tx)
        try:
            if not broken:
                yield from self.driver.rollback(tx)
        except Exception:
            broken = True
        with contextlib.suppress(Exception):
            if not isinstance(error, GeneratorExit):
                yield from self.driver.release(tx, broken)
        return broken

    def handled(self, result: Any) -> Any:
        """What a handler returned.  A plain function that forgets to await would be recorded, and what it does lost."""
        if inspect.isawaitable(result) != self.asynchronous:
            raise TypeError(f"the handler is {'not ' * self.asynchronous}an async function: "
                            + ("AsyncIdem takes one, `async def`" if self.asynchronous else "it goes with AsyncIdem, not with Idem"))
        return result

    def outcome(self, row: Any, request: Request) -> Answer | None:
        """None: claimed.  Any outcome but a stored answer is raised."""
        if row[0] == "claimed":
            request.unanswered = False
            return None
        if row[0] == "completed":
            return Answer(loads(row[1]), True, row[2])
        raise Failed(loads(row[1])) if row[0] == "failed" else errors.BY_OUTCOME[row[0]]()

    def claimed(self, request: Request, steps: Steps[Any], function: str = "idem_") -> Steps[Any]:
        request.stage, before = "claim", time.monotonic()
        try:
            return (yield from self.ask(steps, function))
        finally:
            request.waited += time.monotonic() - before

    def once(self, request: Request, handler: Callable[[Any], Any], claim: bool = True) -> Steps[Answer]:
        """claim: False for a request without a key, where a lost COMMIT cannot be repeated."""
        def body(tx: Any) -> Steps[Answer]:
            first = (self.CLAIM, request.claim()) if claim else ("SELECT 'claimed', NULL, NULL", ())
            row = yield from self.claimed(request, self.driver.begin(tx, *first))
            answer = self.outcome(row, request)
            if answer is not None:
                return answer
            request.stage, sql = "handler", self.COMPLETE
            try:
                text = dumps((yield self.handled(handler(tx))))
            except Refused as refusal:
                text, sql = dumps(refusal.value), self.FAIL
            request.stage, request.attempts = "commit", request.attempts if claim else request.attempt
            last = (sql, (*request.key[:2], text, None, request.key[2])) if claim else ("SELECT 1", ())
            yield from self.settled(self.driver.finish(tx, *last))
            if sql == self.FAIL:
                raise Failed(loads(text), replayed=False)
            return Answer(loads(text), False, row[2])
        return (yield from self.repeat(request, body))  # type: ignore[no-any-return]

    def within(self, tx: Any, request: Request, handler: Callable[[Any], Any]) -> Steps[Answer]:
        """Claim, handler and result in the caller's transaction, behind a savepoint."""
        driver = driver_of(tx, self.asynchronous)
        try:
            savepoint = yield from driver.savepoint(tx)
        except Exception as error:
            if errors.sqlstate(error) == "25P01":
                raise Invalid("within() needs a transaction that you have begun, and that you commit") from error
            raise
        try:
            row = yield from self.claimed(request, driver.query(tx, self.CLAIM, request.claim()))
            answer = self.outcome(row, request)
            if answer is None:
                text = dumps((yield self.handled(handler(tx))))
                yield from self.settled(driver.query(tx, self.COMPLETE, (*request.key[:2], text, None, request.key[2])))
                answer = Answer(loads(text), False, row[2])
        except BaseException:
            with contextlib.suppress(Exception):  # the connection is lost, or the whole transaction has failed
                yield from driver.end(tx, savepoint, True)
            raise
        yield from driver.end(tx, savepoint, False)
        return answer

    def statement(self, request: Request, sql: str, args: Sequence[Any], writes: bool = False) -> Steps[Any]:
        """One statement that commits by itself; returns its first row."""
        def body(tx: Any) -> Steps[Any]:
            request.stage = "commit" if writes else "read"
            return (yield from self.ask(self.driver.query(tx, sql, args)))
        return (yield from self.repeat(request, body))

    def call(self, request: Request, function: str) -> Steps[Answer]:
        """The arguments are the request's params."""
        def body(tx: Any) -> Steps[Any]:
            steps = self.driver.query(tx, self.CALL, (*request.key, function, *request.claim()[3:]))
            try:  # an answer of the function itself comes through; so does a function that is missing
                return (yield from self.claimed(request, steps, "idem_call"))
            except Exception as error:
                if errors.sqlstate(error) == "ID417":
                    row = yield from self.driver.query(tx, self.LOOKUP, request.key)
                    if row is not None and row[0] == "failed":  # else the function has met another request that failed
                        raise Failed(loads(row[5])) from error
                if errors.lost(error, self.driver.closed(tx)):
                    request.stage = "commit"  # the statement may have been executed
                raise
        row = yield from self.repeat(request, body)
        if row[1] == "failed":  # the function has called idem_fail
            raise Failed(loads(row[0]), replayed=False)
        return Answer(loads(row[0]), row[1] == "completed")

    def observed(self, request: Request, steps: Steps[Answer]) -> Steps[Answer]:
        """The steps, of which `on_outcome` is told."""
        outcome, replayed, failure = "error", False, None
        try:
            answer = yield from steps
            outcome, replayed = "completed" if answer.replayed else "claimed", answer.replayed
            return answer
        except Exception as error:
            failure = error
            if isinstance(error, IdemError):
                outcome, replayed = error.outcome, getattr(error, "replayed", False)
            raise
        finally:
            try:
                if self.on_outcome is not None:
                    self.on_outcome(Event(request.key[2], outcome, replayed, request.waited, request.attempt, failure))
            except Exception:
                log.exception("on_outcome has failed")
