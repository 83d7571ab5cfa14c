"""One class for each outcome that is not an answer, and what an error of a driver tells."""

import re
from collections.abc import Iterator
from typing import Any

from .values import quoted


class IdemError(Exception):
    """What idem or this client answers in place of a result.  `retryable`: the same request may be sent again, after
    `retry_after` seconds.  `status`: the HTTP status that fits."""

    outcome: str = "error"
    sqlstate: str | None = None
    status: int = 500
    retryable: bool = False
    retry_after: float | None = None

    def __init_subclass__(cls, outcome: str, sqlstate: str, status: int = 500, again: bool = False) -> None:
        cls.outcome, cls.sqlstate, cls.status = outcome, sqlstate, status
        cls.retryable, cls.retry_after = again, 1 if again else None

    def __init__(self, message: str | None = None) -> None:
        super().__init__(message or self.__doc__)

class InProgress(IdemError, outcome="in_progress", sqlstate="ID409", status=409, again=True):
    """Another holder is executing this request: send it again later."""
class TimedOut(IdemError, outcome="timed_out", sqlstate="ID503", status=503, again=True):
    """Another holder was still executing this request when the wait was over: send it again later."""
class Mismatch(IdemError, outcome="mismatch", sqlstate="ID422", status=422):
    """This id, or key, was used with other parameters: use a new one for a new request."""
class Stale(IdemError, outcome="stale", sqlstate="ID412", status=412):
    """This id, or key, is too old: find out whether the request was executed before you use a new one."""
class Failed(IdemError, outcome="failed", sqlstate="ID417", status=409):
    """This request has failed for good."""

    def __init__(self, stored: Any = None, *, replayed: bool = True) -> None:
        super().__init__()  # without what is stored: messages are logged, and sent
        self.stored, self.replayed = stored, replayed

class Unknown(IdemError, outcome="unknown", sqlstate="ID424", status=409):
    """Nobody knows whether this request was executed: ask the operator, who calls idem_heal or idem_forget."""
class Invalid(IdemError, outcome="invalid", sqlstate="ID400", status=400):
    """The arguments are malformed."""
class LeaseLost(IdemError, outcome="lease_lost", sqlstate="ID410", status=409):
    """The lease has ended, or has another holder: stop, and write nothing."""
class TooLarge(IdemError, outcome="too_large", sqlstate="ID413"):
    """The value is larger than the scope allows: nothing was stored, and the work was rolled back."""
class CommitUnknown(IdemError, outcome="commit_unknown", sqlstate="08007", status=503, again=True):
    """The connection was lost while COMMIT was under way: send the request again with the same id, which tells."""
class NotInstalled(IdemError, outcome="not_installed", sqlstate="42883"):
    """idem is not installed in this schema."""
class NoRights(IdemError, outcome="no_rights", sqlstate="42501"):
    """The role may not use idem."""
class HandlerEndedTransaction(IdemError, outcome="handler_ended_transaction", sqlstate="ID410"):
    """The handler committed or rolled back itself, which it must leave to idem_pg, so its result was not stored: what it
    committed stays, and the request counts as executed, or with a lease as in progress; what it rolled back is lost."""
class HandlerSwallowedError(IdemError, outcome="handler_swallowed_error", sqlstate="25P02"):
    """A statement of the handler failed, and the handler went on: everything was rolled back.  Use a savepoint where an
    error is expected; the server's log has the error."""

class Refused(Exception):
    """Raised by a handler to end the request for good: `value` is stored by idem_fail, what the handler has written is
    committed, and each retry gets `Failed`."""

    def __init__(self, value: Any = None) -> None:
        super().__init__(value)
        self.value = value


BY_OUTCOME: dict[str, type[IdemError]] = {
    kind.outcome: kind for kind in (InProgress, TimedOut, Mismatch, Stale, Unknown, Invalid, LeaseLost, TooLarge)}
BY_SQLSTATE = {kind.sqlstate: kind for kind in BY_OUTCOME.values()}


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
    found = (getattr(one, "sqlstate", None) or getattr(one, "pgcode", None) for one in (error, getattr(error, "orig", None), error.__cause__))
    return next((code for code in found if isinstance(code, str)), None)


def of_driver(error: BaseException) -> bool:
    """Whether a driver, or the network below it, has raised this."""
    modules = ("psycopg.", "psycopg_pool.", "asyncpg.", "psycopg2.", "sqlalchemy.", "django.db.utils.")
    return isinstance(error, OSError) or any((c.__module__ + ".").startswith(modules) for c in type(error).__mro__)


def conflict(error: BaseException) -> bool:
    """Whether a serialization failure or a deadlock is behind this error: then the transaction is repeated."""
    return any(sqlstate(e) in ("40001", "40P01") for e in chain(error))


def lost(error: BaseException, closed: bool) -> bool:
    """Whether a lost connection is behind this error.  closed: the connection of the transaction is gone."""
    return any(
        (sqlstate(e) or "").startswith(("08", "57P01", "57P02", "57P03"))
        or getattr(e, "connection_invalidated", False) or (closed and of_driver(e))
        for e in chain(error))  # fmt: skip


def translated(error: Exception, schema: str, function: str = "idem_") -> Exception:
    """The class of this package for an error of one of its own statements; any other error as it is."""
    code = sqlstate(error)
    if code is None:
        return error
    cause = getattr(error, "orig", None) or error
    diag = getattr(cause, "diag", None)
    text = str(getattr(diag, "message_primary", None) or cause)  # without LINE and CONTEXT
    detail = getattr(diag, "message_detail", None) or getattr(cause, "detail", None)
    if code == "ID413":
        detail = f"store a reference to it, or raise result_max_bytes of the scope in {quoted(schema)}.idem_scopes"
    if code in BY_SQLSTATE:
        return BY_SQLSTATE[code](f"{text}\n{detail}" if detail and detail not in text else text)
    if code == "22P02" and "transaction of the fence" in text:
        return HandlerEndedTransaction()
    if code == "25P02":
        return HandlerSwallowedError()
    if code == "3F000" or (code == "42883" and function in text):
        return NotInstalled(f"idem is not in schema {schema}: pass the one that has it, or run python -m idem_pg install --schema {schema}")
    if code == "42501" and (function in text or f" {schema}" in text):
        right = "operator" if re.search("idem_(forget|lapsed)", text) else "app"
        return NoRights(f"{text}: let idem's owner run SELECT {quoted(schema)}.idem_grant('ROLE', '{right}'), with your role's name")
    return error
