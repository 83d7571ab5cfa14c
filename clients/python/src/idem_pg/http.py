"""HTTP requests with an Idempotency-Key, after draft-ietf-httpapi-idempotency-key-header."""

import base64
import hashlib
import inspect
import json
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timezone
from decimal import Decimal
from email.utils import format_datetime
from typing import Any

from . import errors
from .core import Core, Request
from .drivers import Steps, arun, run
from .errors import CommitUnknown, IdemError
from .values import Duration, check

STORED = {"content-type", "content-language", "content-encoding", "location", "etag", "last-modified", "link"}
NEVER = set("set-cookie connection keep-alive proxy-authenticate proxy-authorization te trailer transfer-encoding"
            " upgrade content-length date".split())  # fmt: skip


@dataclass
class Reply:
    status: int
    headers: list[tuple[str, str]]
    body: bytes


def reply(status: int = 200, body: Any = None, headers: dict[str, str] | Iterable[tuple[str, str]] = ()) -> Reply:
    """A response of a handler: bytes and text are sent as they are, anything else but None as JSON."""
    pairs = [(name, str(value)) for name, value in (headers.items() if isinstance(headers, dict) else headers)]
    if isinstance(body, bytes):
        data, kind = body, "application/octet-stream"
    elif isinstance(body, str):
        data, kind = body.encode(), "text/plain; charset=utf-8"
    else:
        data, kind = b"" if body is None else json.dumps(body, allow_nan=False).encode(), "application/json"
    if body is not None and not any(name.lower() == "content-type" for name, _ in pairs):
        pairs.append(("Content-Type", kind))
    return Reply(status, pairs, data)


@dataclass
class Options:
    """scope: the namespace of the keys.  user: tells who sends a request; two users can use the same key.
    key: the name of the header.  required: whether a request without a key is refused; else it is executed without one.
    wait: seconds to wait for another request with the key.  attempts: as in `once`.
    final: whether a response with this status is stored, and its writes are committed; else all is rolled back; default
    below 500, but not 409, 425 and 429, after which the same request may succeed.
    fingerprint: what must be equal in a retry, as JSON; default method, path and body.
    headers: names of more headers to store.  encode, decode: change what is stored, to encrypt it for example."""

    scope: str
    user: Callable[[Any], Any]
    key: str = "Idempotency-Key"
    required: bool = True
    wait: Duration = 0
    attempts: int = 5
    final: Callable[[int], bool] = lambda status: status < 500 and status not in (409, 425, 429)
    fingerprint: Callable[[Any], Any] | None = None
    headers: Iterable[str] = ()
    encode: Callable[[Any], Any] = lambda value: value
    decode: Callable[[Any], Any] = lambda value: value


@dataclass
class Incoming:
    request: Any
    method: str
    target: str
    header: Callable[[str], str | None]
    body: bytes = b""


class NotFinal(Exception):
    """Rolls back a response that is not to be stored."""


def problem(status: int, kind: str, title: str, detail: str | None = None, again: bool = False) -> Reply:
    body = {"type": f"urn:idem:{kind}", "title": title, "status": status, "detail": detail or title}
    headers = [("Content-Type", "application/problem+json")] + ([("Retry-After", "1")] if again else [])
    return Reply(status, headers, json.dumps(body).encode())


OUTCOMES = {
    "in_progress": ("in-progress", "A request with this key is being executed: send it again later"),
    "timed_out": ("timed-out", "A request with this key is still being executed: send it again later"),
    "mismatch": ("key-reused", "This key was used with another request: use a new key for a new request"),
    "stale": ("stale", "This key is too old: find out whether the request was executed before you use a new key"),
    "unknown": ("unknown", "Nobody knows whether this request was executed: ask the operator"),
    "failed": ("failed", "This request has failed for good"),
    "invalid": ("key-invalid", "The key is malformed"),
}


def parse_key(header: str) -> str | None:
    """The key of a header: a string of RFC 8941, or bare; None if it is malformed."""
    header = header.strip(" \t")
    quoted = re.fullmatch(r'"((?:[ !#-\[\]-~]|\\["\\])*)"', header)
    key = re.sub(r"\\(.)", r"\1", quoted[1]) if quoted else header if re.fullmatch(r"[!#-~][!-~]*", header) else ""
    return key if 0 < len(key) <= 255 else None


def number(text: str) -> int:
    """Refuses a number as idem_fingerprint does: of more than 1000 digits, NaN, Infinity."""
    _, digits, exponent = Decimal(text).as_tuple()
    if not isinstance(exponent, int) or max(len(digits) + exponent, 0) + max(-exponent, 0) > 1000:
        raise ValueError(text)
    return 0


def fingerprint(method: str, target: str, kind: str, body: bytes) -> str:
    """The text for idem_fingerprint: the same in all clients, so that they can serve the same table."""
    try:
        text = body.decode()
        if not re.fullmatch(r"application/(json|[^\s;]+\+json)", kind.split(";")[0].strip().lower()):
            raise ValueError
        check(json.loads(text, parse_float=number, parse_int=number, parse_constant=number))
    except (ValueError, TypeError, ArithmeticError, RecursionError):
        text = json.dumps({"sha256": hashlib.sha256(body).hexdigest()})
    return f'{{"method": {json.dumps(method)}, "path": {json.dumps(target)}, "body": {text}}}'


def pack(out: Reply, more: Iterable[str]) -> dict[str, Any]:
    names = (STORED | {name.lower() for name in more}) - NEVER
    stored = {"status": out.status, "headers": [[k.lower(), v] for k, v in out.headers if k.lower() in names]}
    try:
        if b"\0" in out.body:
            raise ValueError
        return {**stored, "body": out.body.decode()}
    except ValueError:
        return {**stored, "body64": base64.b64encode(out.body).decode()}


def unpack(stored: Any) -> Reply:
    if not isinstance(stored, dict) or not isinstance(stored.get("status"), int):
        return reply(200, stored)  # not stored by this function
    body = base64.b64decode(stored["body64"]) if "body64" in stored else stored.get("body", "").encode()
    return Reply(stored["status"], [(name, value) for name, value in stored.get("headers", [])], body)


def serve(core: Core, options: Options, incoming: Incoming, handler: Callable[[Any], Any]) -> Steps[Reply]:
    """The answer to one request."""
    first: list[Reply] = []
    def work(tx: Any) -> Steps[Any]:
        out = to_reply((yield handler(tx)))
        if not options.final(out.status):
            raise NotFinal(out)
        to_response(incoming.request, out)  # what cannot be sent is not to be stored
        first[:] = [out]
        return options.encode(pack(out, options.headers))
    header = incoming.header(options.key)
    if header is None and options.required:
        return problem(400, "key-missing", f"The header {options.key} is missing")
    key = parse_key(header) if header is not None else "-"
    if key is None:
        return problem(400, "key-invalid", f'{options.key} must be 1 to 255 printable ASCII characters, "in quotes"')
    user = yield options.user(incoming.request)
    kind, text, params = incoming.header("content-type") or "", None, None
    if options.fingerprint is None:
        text = fingerprint(incoming.method, incoming.target, kind, incoming.body)
    else:
        params = options.fingerprint(incoming.request)
    request = Request(user, key, options.scope, params, options.wait, options.attempts, params_text=text)
    try:
        if header is None:
            yield from core.once(request, work, claim=False)
            return first[0]
        answer = yield from core.observed(request, core.once(request, work))
    except NotFinal as rollback:
        return rollback.args[0]  # type: ignore[no-any-return]
    except CommitUnknown as error:
        if header is None:
            raise
        return problem(503, "unavailable", "Send the same request again", str(error), True)
    except IdemError as error:
        of_scope = error.outcome == "invalid" and str(error).startswith("scope")
        if error.outcome not in OUTCOMES or request.stage not in ("claim", "commit") or of_scope:
            raise
        kind, title = OUTCOMES[error.outcome]
        return problem(error.status, kind, title, str(error).split("\n")[0], error.retryable)
    except Exception as error:
        if request.spent or (request.stage == "connect" and errors.of_driver(error)):
            return problem(503, "unavailable", "The database cannot be reached: send the same request again", None, True)
        raise
    result = unpack(options.decode(answer.value)) if answer.replayed else first[0]
    headers = [pair for pair in result.headers if pair[0].lower() != "content-length"]
    if answer.expires_at is not None:
        headers.append(("Idempotency-Expires", format_datetime(answer.expires_at.astimezone(timezone.utc), usegmt=True)))
    if answer.replayed:
        headers.append(("Idempotent-Replayed", "true"))
    return Reply(result.status, headers, result.body)


def framework(request: Any) -> str:
    return next((m for c in type(request).__mro__ if (m := c.__module__.split(".")[0]) in ("django", "starlette")), "flask")


def incoming_of(request: Any) -> Incoming:
    """A request of Flask or Django; of Starlette without its body."""
    if framework(request) == "starlette":
        query = request.scope["query_string"].decode("latin-1")
        path = (request.scope.get("raw_path") or request.url.path.encode()).decode("latin-1").split("?")[0]
        def header(name: str) -> str | None:
            return ", ".join(request.headers.getlist(name)) if name in request.headers else None
        return Incoming(request, request.method, path + ("?" + query if query else ""), header)
    django = framework(request) == "django"
    environ, body = (request.META, request.body) if django else (request.environ, request.get_data())
    path = request.get_full_path() if django else request.full_path.rstrip("?")
    target = environ.get("RAW_URI") or environ.get("REQUEST_URI") or path
    return Incoming(request, request.method, target, request.headers.get, body)


def to_reply(out: Any) -> Reply:
    """What a handler returned: a Reply, or JSON."""
    if not isinstance(out, Reply):
        check(out)  # a response of the framework, for example, ends here
    made = out if isinstance(out, Reply) else reply(200, out)
    if not 200 <= made.status <= 599 or any(re.search("[\0\r\n]", name + value) for name, value in made.headers):
        raise ValueError(f"a response that HTTP cannot send: {made.status}, {made.headers}")
    return made


def to_response(request: Any, out: Reply) -> Any:
    """The response of the framework that the request is of."""
    if framework(request) == "starlette":
        from starlette.responses import Response
        response, pairs = Response(out.body, out.status), [*out.headers, ("Content-Length", str(len(out.body)))]
        response.raw_headers = [(k.lower().encode("latin-1"), v.encode("latin-1")) for k, v in pairs]
        return response
    if framework(request) == "django":
        from django.http import HttpResponse
        answer = HttpResponse(out.body, status=out.status)
        del answer["Content-Type"]
        answer["Content-Length"] = str(len(out.body))
        for name, value in out.headers:
            if name.lower() == "set-cookie":
                answer.cookies.load(value)
            else:
                answer[name] = value
        return answer
    import flask
    made = flask.Response(out.body, out.status, out.headers)
    if not any(name.lower() == "content-type" for name, _ in out.headers):
        del made.headers["Content-Type"]
    return made


def decorator(core: Core, options: Options, handler: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a view of a handler(tx, request, ...)."""
    async def asynchronous(request: Any, **arguments: Any) -> Any:
        incoming = incoming_of(request)
        if framework(request) == "starlette":
            incoming.body = await request.body()
        out = await arun(serve(core, options, incoming, lambda tx: handler(tx, request, **arguments)))
        return to_response(request, out)
    def synchronous(*args: Any, **arguments: Any) -> Any:
        if args:
            request = args[0]
        else:
            import flask
            request = flask.request._get_current_object()
        if framework(request) == "starlette":
            raise TypeError("Starlette and FastAPI need AsyncIdem")
        out = run(serve(core, options, incoming_of(request), lambda tx: handler(tx, request, **arguments)))
        return to_response(request, out)
    view: Any = asynchronous if core.asynchronous else synchronous
    # Not functools.wraps: FastAPI would look at the handler's parameters, and not at the view's.
    view.__name__, view.__doc__, view.__module__ = handler.__name__, handler.__doc__, handler.__module__
    if core.asynchronous and (requests := sys.modules.get("starlette.requests")):
        parameter = inspect.Parameter("request", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=requests.Request)
        view.__signature__ = inspect.Signature([parameter])
    return view  # type: ignore[no-any-return]
