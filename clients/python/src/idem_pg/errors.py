"""One class for each outcome that is not an answer, and what an error of a driver tells."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


class IdemError(Exception):
    """What idem or this client answers in place of a result.

    `retryable`: the same request may be sent again, after `retry_after` seconds.  `status`: the HTTP status that fits.
    """

    outcome = "error"
    sqlstate: str | None = None
    retryable = False
    retry_after: float | None = None
    status = 500

    def __init__(self, message: str | None = None, *, sqlstate: str | None = None) -> None:
        super().__init__(message or (type(self).__doc__ or "").split("\n")[0])
        if sqlstate:
            self.sqlstate = sqlstate


class InProgress(IdemError):
    """Another holder is executing this request: send it again later."""

    outcome, sqlstate, status, retryable, retry_after = "in_progress", "ID409", 409, True, 1


class TimedOut(IdemError):
    """Another holder was still executing this request when the wait was over: send it again later."""

    outcome, sqlstate, status, retryable, retry_after = "timed_out", "ID503", 503, True, 1


class Mismatch(IdemError):
    """The id was used with other parameters."""

    outcome, sqlstate, status = "mismatch", "ID422", 422


class Stale(IdemError):
    """The id is too old to tell whether it was executed: look, then use a new one."""

    outcome, sqlstate, status = "stale", "ID412", 412


class Failed(IdemError):
    """The request has failed for good: `stored` is what was stored then."""

    outcome, sqlstate, status = "failed", "ID417", 409

    def __init__(self, stored: Any = None, *, replayed: bool = True) -> None:
        super().__init__(f"the request has failed for good: {stored!r}")
        self.stored, self.replayed = stored, replayed


class Unknown(IdemError):
    """Nobody knows whether this request was executed: an operator finds out, then calls idem_heal or idem_forget."""

    outcome, sqlstate, status = "unknown", "ID424", 409


class Invalid(IdemError):
    """The arguments are malformed."""

    outcome, sqlstate, status = "invalid", "ID400", 400


class LeaseLost(IdemError):
    """The lease has ended, or has another holder: stop, and write nothing."""

    outcome, sqlstate, status = "lease_lost", "ID410", 409


class TooLarge(IdemError):
    """The value is larger than the scope allows: nothing was stored, and the work was rolled back."""

    outcome, sqlstate = "too_large", "ID413"


class CommitUnknown(IdemError):
    """The connection was lost while COMMIT was under way: send the request again with the same id, which tells."""

    outcome, sqlstate, status, retryable, retry_after = "commit_unknown", "08007", 503, True, 1


class NotInstalled(IdemError):
    """idem is not installed in this schema."""

    outcome, sqlstate = "not_installed", "42883"


class NoRights(IdemError):
    """The role may not use idem."""

    outcome, sqlstate = "no_rights", "42501"


class HandlerEndedTransaction(IdemError):
    """The handler committed or rolled back itself, so its result was not stored.  It must leave that to idem_pg."""

    outcome, sqlstate = "handler_ended_transaction", "ID410"


class HandlerSwallowedError(IdemError):
    """A statement of the handler failed, and the handler went on: everything was rolled back.

    The cause of this error has no more to tell, but the server's log has.  Use a savepoint where an error is expected.
    """

    outcome, sqlstate = "handler_swallowed_error", "25P02"


class Refused(Exception):
    """Raised by a handler to end the request for good: `value` is stored by idem_fail, and each retry gets `Failed`.

    What the handler has written is committed.
    """

    def __init__(self, value: Any = None) -> None:
        super().__init__(value)
        self.value = value


_OUTCOMES: tuple[type[IdemError], ...] = (InProgress, TimedOut, Mismatch, Stale, Unknown, Invalid)
BY_OUTCOME = {c.outcome: c for c in _OUTCOMES}
BY_SQLSTATE = {c.sqlstate: c for c in (*_OUTCOMES, LeaseLost, TooLarge)}


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """The error and what it was raised from, as a traceback prints them."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def sqlstate(error: BaseException) -> str | None:
    """The SQLSTATE of an error of psycopg, asyncpg, psycopg2, or of SQLAlchemy's or Django's wrapper around one."""
    if isinstance(error, IdemError):
        return None
    for one in (error, getattr(error, "orig", None), error.__cause__):
        code = getattr(one, "sqlstate", None) or getattr(one, "pgcode", None)
        if isinstance(code, str):
            return code
    return None


def of_driver(error: BaseException) -> bool:
    """Whether a driver, or the network below it, has raised this."""
    return isinstance(error, OSError) or any(
        c.__module__.split(".")[0] in ("psycopg", "asyncpg", "psycopg2", "sqlalchemy")
        or c.__module__ == "django.db.utils"
        for c in type(error).__mro__
    )


def conflict(error: BaseException) -> bool:
    """Whether a serialization failure or a deadlock is behind this error: then the transaction is repeated."""
    return any(sqlstate(e) in ("40001", "40P01") for e in chain(error))


def lost(error: BaseException, closed: bool) -> bool:
    """Whether a lost connection is behind this error.  closed: the connection of the transaction is gone."""
    for e in chain(error):
        code = sqlstate(e)
        if code in ("57P01", "57P02", "57P03") or (code or "").startswith("08"):
            return True
        if getattr(e, "connection_invalidated", False) or (closed and of_driver(e)):
            return True
    return False


def translated(error: Exception, schema: str, function: str = "idem_") -> Exception:
    """The class of this package for an error of one of its own statements; any other error as it is."""
    code = sqlstate(error)
    if code is None:
        return error
    cause = getattr(error, "orig", None) or error
    diag = getattr(cause, "diag", None)
    # Without LINE and CONTEXT
    text = str(getattr(diag, "message_primary", None) or cause)
    detail = getattr(diag, "message_detail", None) or getattr(cause, "detail", None)
    if code in BY_SQLSTATE:
        return BY_SQLSTATE[code](f"{text}\n{detail}" if detail and detail not in text else text, sqlstate=code)
    if code == "25P02":
        return HandlerSwallowedError()
    if code == "3F000" or (code == "42883" and function in text):
        return NotInstalled(
            f"idem is not installed in schema {schema}: run python -m idem_pg install --schema {schema}", sqlstate=code
        )
    if code == "42501" and (function in text or f" {schema}" in text):
        return NoRights(
            f"{text}: let the owner of idem run SELECT {schema}.idem_grant('ROLE', 'app'), with the name of your role",
            sqlstate=code,
        )
    return error
