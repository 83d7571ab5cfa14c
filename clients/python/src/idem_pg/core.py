"""What a call does, in steps (see drivers.py): claim, handler, result, COMMIT, and again if a connection was lost."""

import contextlib
import logging
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from . import errors
from .drivers import MARK, Steps, driver_of
from .errors import CommitUnknown, Failed, HandlerEndedTransaction, IdemError, InProgress, Invalid, LeaseLost, Refused
from .values import Duration, check, dumps, loads, seconds

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
    for a replay, the outcome of an IdemError, else `error`.  waited: seconds that the claims took."""
    scope: str
    outcome: str
    replayed: bool
    waited: float
    attempts: int


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
        self.driver = driver_of(source, asynchronous)
        s = '"' + schema.replace('"', '""') + '".idem_'
        text, jsonb = f"CAST({MARK} AS text)", f"CAST(CAST({MARK} AS text) AS jsonb)"
        wait, token = f"make_interval(secs => CAST({MARK} AS float8))", f"CAST({MARK} AS bigint)"
        key = f"{text}, {text}, scope => {text}"
        claim = f"{key}, fingerprint => {s}fingerprint({jsonb}), wait => {wait}"
        self.CLAIM = f"SELECT CAST(outcome AS text), CAST(result AS text), expires_at FROM {s}try_claim({claim})"
        self.COMPLETE = f"SELECT {s}complete({key}, result => {jsonb}, token => {token})"
        self.FAIL = f"SELECT {s}fail({key}, error => {jsonb}, token => {token})"
        self.CALL = (f"SELECT CAST(r AS text), CAST({s}outcome() AS text) FROM {s}call({key}, function => {text},"
                     f" arguments => {jsonb}, wait => {wait}) AS r")  # fmt: skip
        self.STATUS = f"SELECT CAST({s}status({key}) AS text)"
        self.FORGET = f"SELECT {s}forget({key})"
        self.LOOKUP = ("SELECT CAST(state AS text), expires_at, lease_until, fingerprint, committed_at,"
                       f" CAST(result AS text), CAST(progress AS text) FROM {s}lookup({key})")  # fmt: skip
        columns = "scope", "user_id", "request_id", "status", "lease_until", "progress::text"
        arrays = ", ".join(f"array_agg(l.{column})" for column in columns)  # one row: the only way to fetch here
        self.LAPSED = f"SELECT {arrays} FROM {s}lapsed({text}, CAST({MARK} AS integer)) AS l"
        self.LEASE = ("SELECT CAST(outcome AS text), CAST(result AS text), expires_at, CAST(progress AS text), token"
                      f" FROM {s}lease({claim}, lease => {wait}, progress => {jsonb})")  # fmt: skip
        self.EXTEND = f"SELECT CAST({s}extend({key}, token => {token}, lease => {wait}, progress => {jsonb}) AS text)"
        self.FENCE = f"SELECT CAST({s}fence({key}, token => {token}) AS text), CAST(pg_current_xact_id() AS text)"
        xid = f"CAST({text} AS xid8)"
        self.COMMITTED = f"SELECT {xid} < pg_current_xact_id() AND pg_xact_status({xid}) = 'committed'"
        # The token is good outside of the fence, too: so see that this is still the transaction that has it.
        self.IN_FENCE = (f"SELECT CASE WHEN pg_current_xact_id() = {xid} THEN CAST(%s AS text) ELSE CAST(CAST(CAST("
                         "pg_current_xact_id() AS text) || ' is not the transaction of the fence' AS int) AS text) END")  # fmt: skip
        self.RELEASE = f"SELECT {s}release({key}, token => {token})"

    def ask(self, steps: Steps[Any], function: str = "idem_") -> Steps[Any]:
        """A statement of ours: its errors become this package's."""
        try:
            return (yield from steps)
        except Exception as error:
            if (translated := errors.translated(error, self.schema, function)) is error:
                raise
            raise translated from error

    def repeat(self, request: Request, body: Callable[[Any], Steps[Any]]) -> Steps[Any]:
        """Runs the body with a connection: again after a conflict or a lost connection, while attempts are left."""
        driver = self.driver
        while True:
            request.attempt += 1
            request.stage, tx = "connect", None
            try:
                tx = yield from driver.acquire()
                answer = yield from body(tx)
            except BaseException as error:
                broken = tx is not None and (yield from self.abandon(tx, error))
                if not isinstance(error, Exception):
                    raise
                again = self.again(request, error, broken)
                if not again or request.attempt >= request.attempts:
                    request.spent = again
                    if request.unanswered and (again or request.stage == "connect"):
                        raise CommitUnknown() from error
                    raise
            else:
                try:
                    yield from driver.release(tx, False)
                except Exception:  # it is committed, so this is no error of the call
                    log.warning("a connection could not be given back", exc_info=True)
                return answer
            if request.lost:
                with contextlib.suppress(Exception):
                    yield from driver.renew()
            yield driver.sleep(random.uniform(0, min(2, 0.05 * 2**request.attempt)))

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

    def abandon(self, tx: Any, error: BaseException) -> Steps[bool]:
        """Rolls back and gives the connection back.  True: it is lost.  What interrupts a driver (a cancelled task)
        leaves the connection in a state that nobody knows, so it is closed then."""
        broken = not isinstance(error, Exception) or self.driver.closed(tx)
        try:
            if not broken:
                yield from self.driver.rollback(tx)
        except Exception:
            broken = True
        with contextlib.suppress(Exception):
            if not isinstance(error, GeneratorExit):
                yield from self.driver.release(tx, broken)
        return broken

    def over(self, tx: Any) -> Steps[None]:
        """ROLLBACK after an answer that is known, so its failure is no error."""
        with contextlib.suppress(Exception):
            yield from self.driver.rollback(tx)

    def outcome(self, row: Any, request: Request) -> Answer | None:
        """None: claimed.  Any outcome but a stored answer is raised."""
        if row[0] == "claimed":
            request.unanswered = False
            return None
        if row[0] == "completed":
            return Answer(loads(row[1]), True, row[2])
        raise Failed(loads(row[1])) if row[0] == "failed" else errors.BY_OUTCOME[row[0]]()

    def claimed(self, request: Request, steps: Steps[Any]) -> Steps[Any]:
        request.stage, before = "claim", time.monotonic()
        try:
            return (yield from self.ask(steps))
        finally:
            request.waited += time.monotonic() - before

    def once(self, request: Request, handler: Callable[[Any], Steps[Any]], claim: bool = True) -> Steps[Answer]:
        """claim: False for a request without a key, where a lost COMMIT cannot be repeated."""
        driver = self.driver
        def body(tx: Any) -> Steps[Answer | Failed]:
            first = (self.CLAIM, request.claim()) if claim else ("SELECT 'claimed', NULL, NULL", ())
            row = yield from self.claimed(request, driver.begin(tx, *first))
            answer = self.outcome(row, request)
            if answer is not None:
                yield from self.over(tx)
                return answer
            request.stage, sql = "handler", self.COMPLETE
            try:
                text = dumps((yield from handler(tx)))
            except Refused as refusal:
                text, sql = dumps(refusal.value), self.FAIL
            request.stage, request.attempts = "commit", request.attempts if claim else request.attempt
            last = (sql, (*request.key, text, None)) if claim else ("SELECT 1", ())
            try:
                yield from self.ask(driver.finish(tx, *last))
            except LeaseLost as error:  # there is no lease here: the claim of this transaction is gone
                raise HandlerEndedTransaction() from error
            return Answer(loads(text), False, row[2]) if sql == self.COMPLETE else Failed(loads(text), replayed=False)
        answer = yield from self.repeat(request, body)
        if isinstance(answer, Failed):
            raise answer
        return answer  # type: ignore[no-any-return]

    def within(self, tx: Any, request: Request, handler: Callable[[Any], Steps[Any]]) -> Steps[Answer]:
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
                text = dumps((yield from handler(tx)))
                yield from self.ask(driver.query(tx, self.COMPLETE, (*request.key, text, None)))
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
            request.stage, before = "claim", time.monotonic()
            try:
                return (yield from self.driver.query(tx, self.CALL, (*request.key, function, *request.claim()[3:])))
            except Exception as error:
                if errors.sqlstate(error) == "ID417":
                    row = yield from self.driver.query(tx, self.LOOKUP, request.key)
                    if row is not None and row[0] == "failed":  # else the function has met another request that failed
                        raise Failed(loads(row[5])) from error
                # An answer of the function itself comes through; so does a function that is missing.
                if (translated := errors.translated(error, self.schema, "idem_call")) is not error:
                    raise translated from error
                if errors.lost(error, self.driver.closed(tx)):
                    request.stage = "commit"  # the statement may have been executed
                raise
            finally:
                request.waited += time.monotonic() - before
        row = yield from self.repeat(request, body)
        if row[1] == "failed":  # the function has called idem_fail
            raise Failed(loads(row[0]), replayed=False)
        return Answer(loads(row[0]), row[1] == "completed")

    def observed(self, request: Request, steps: Steps[Answer]) -> Steps[Answer]:
        """The steps, of which `on_outcome` is told."""
        outcome, replayed = "error", False
        try:
            answer = yield from steps
            outcome, replayed = "completed" if answer.replayed else "claimed", answer.replayed
            return answer
        except IdemError as error:
            outcome, replayed = error.outcome, getattr(error, "replayed", False)
            raise
        finally:
            try:
                if self.on_outcome is not None:
                    self.on_outcome(Event(request.key[2], outcome, replayed, request.waited, request.attempt))
            except Exception:
                log.exception("on_outcome has failed")
