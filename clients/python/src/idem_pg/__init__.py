"""Executes requests exactly once, in the PostgreSQL transaction that does the work.  Needs idem in the database."""

from .client import AsyncIdem, Idem
from .core import Answer, Event
from .errors import CommitUnknown, Failed, HandlerEndedTransaction, HandlerSwallowedError, IdemError, InProgress
from .errors import Invalid, LeaseLost, Mismatch, NoRights, NotInstalled, Refused, Stale, TimedOut, TooLarge, Unknown
from .http import Reply, reply
from .lease import Lease

__version__ = "1.0.0"

__all__ = [
    "Answer", "AsyncIdem", "CommitUnknown", "Event", "Failed", "HandlerEndedTransaction", "HandlerSwallowedError",
    "Idem", "IdemError", "InProgress", "Invalid", "Lease", "LeaseLost", "Mismatch", "NoRights", "NotInstalled",
    "Refused", "Reply", "Stale", "TimedOut", "TooLarge", "Unknown", "reply",
]  # fmt: skip
