"""HTTP requests with an Idempotency-Key, after draft-ietf-httpapi-idempotency-key-header."""

import base64
import hashlib
import inspect
import json
import math
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timezone
from email.utils import format_datetime
from itertools import accumulate
from typing import Any

from . import errors
from .core import Core, Request, log
from .drivers import Steps, arun, run
from .errors import IdemError, Invalid, Refused
from .values import Duration, dumps

STORED = set("content-type content-language content-encoding content-disposition cache-control vary location etag"
             " last-modified link".split())  # fmt: skip
NEVER = set("set-cookie connection keep-alive proxy-authenticate proxy-authorization te trailer transfer-encoding"
            " upgrade content-length date".split())  # fmt: skip


@dataclass
class Reply:
    status: int
    headers: list[tuple[str, str]]
    body: bytes


def reply(status: int = 200, body: Any = None, headers: dict[str, str] | Iterable[tuple[str, str]] = ()) -> Reply:
    """A response of a handler: bytes and text are sent as they are, anything else but None as JSON."""
    if isinstance(status, bool) or not isinstance(status, int) or not 200 <= status <= 599:
        raise TypeError(f"reply(status, body, headers): the status comes first, an integer from 200 to 599, not {status!r}")
    pairs = [(name, str(value)) for name, value in (headers.items() if isinstance(headers, dict) else headers)]
    if isinstance(body, bytes):
        data, kind = body, "application/octet-stream"
    elif isinstance(body, str):
        data, kind = body.encode(), "text/plain; charset=utf-8"
    else:
        data, kind = b"" if body is None else dumps(body).encode(), "application/json"
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
    limit: the largest body that is taken, in bytes; Flask and Django have a limit of their own for one of unknown length.
    headers: names of more headers to store.  encode, decode: change what is stored, to encrypt it for example."""

    scope: str
    user: Callable[[Any], Any]
    key: str = "Idempotency-Key"
    required: bool = True
    wait: Duration = 0
    attempts: int = 5
    final: Callable[[int], bool] = lambda status: status < 500 and status not in (409, 425, 429)
    fingerprint: Callable[[Any], Any] | None = None
    limit: int = 10 * 1024 * 1024
    headers: Iterable[str] = ()
    encode: Callable[[Any], Any] = lambda value: value
    decode: Callable[[Any], Any] = lambda value: value


@dataclass
class Incoming:
    request: Any
    method: str
    target: str
    header: Callable[[str], str | None]
    body: bytes | None = b""  # None: it was read, and not kept
    large: bool = False


@dataclass(eq=False)
class NotFinal(Exception):
    """Rolls back a response that is not to be stored."""
    reply: Reply


def problem(status: int, kind: str, title: str, detail: str | None = None, again: bool = False) -> Reply:
    body = {"type": f"urn:idem:{kind}", "title": title, "status": status, "detail": detail or title}
    headers = [("Content-Type", "application/problem+json")] + ([("Retry-After", "1")] if again else [])
    return Reply(status, headers, json.dumps(body).encode())


KINDS = {"mismatch": "key-reused", "invalid": "key-invalid", "commit_unknown": "unavailable"}  # else as the outcome


def parse_key(header: str) -> str | None:
    """The key of a header: a string of RFC 8941, or bare; None if it is malformed."""
    header = header.strip(" \t")
    quoted = re.fullmatch(r'"((?:[ !#-\[\]-~]|\\["\\])*)"', header)
    key = re.sub(r"\\(.)", r"\1", quoted[1]) if quoted else header if re.fullmatch(r"[!#-\[\]-~]+", header) else ""
    return key if 0 < len(key) <= 255 else None


# What idem_fingerprint refuses, a number of more than a thousand digits when it is written out, and jsonb: NUL and half a
# surrogate pair.  Both patterns are linear, or who sends 10 MB would stop the process.
LONG = re.compile(r'(?<![\w.+"-])-?(?:[\d.]{500}|\d[\d.]*[eE][+-]?0*[1-9]\d{2})', re.ASCII)
GOOD_ESCAPE = re.compile(r"\\(?:u[dD][89abAB]..\\u[dD][c-fC-F]..|u(?!0000|[dD][89a-fA-F])|[^u])")


def fingerprint(method: str, target: str, kind: str, body: bytes) -> str:
    """The text for idem_fingerprint: the same in all clients, so that they can serve the same table.  JSON counts by value
    up to 64 kB and 64 levels: the portable edition takes time and memory for each level of each byte."""
    try:
        text = body.decode()
        json_type = re.fullmatch(r"application/(json|[^\s;]+\+json)", kind.split(";")[0].strip().lower())
        depths = accumulate(1 if c in "[{" else -1 for c in re.findall(r"[][{}]", re.sub(r'"(?:[^"\\]|\\.)*"', "", text[:65537])))
        if not json_type or LONG.search(text) or "\\" in GOOD_ESCAPE.sub("", text) or len(body) > 65536 or max(depths, default=0) > 64:
            raise ValueError
        json.loads(text, parse_constant=int)  # int refuses NaN and Infinity
        text = f'"body": {text}'
    except ValueError:
        text = f'"sha256": "{hashlib.sha256(body).hexdigest()}"'
    return f'{{"method": {json.dumps(method)}, "path": {json.dumps(target)}, {text}}}'


def pack(out: Reply, more: Iterable[str]) -> dict[str, Any]:
    names = (STORED | {name.lower() for name in more}) - NEVER
    stored = {"status": out.status, "headers": [[k.lower(), v] for k, v in out.headers if k.lower() in names]}
    try:
        if b"\0" in out.body:
            raise ValueError
        return {**stored, "body": out.body.decode()}
    except ValueError:
        return {**stored, "body64": base64.b64encode(out.body).decode()}


def unpack(value: Any, decode: Callable[[Any], Any]) -> Reply:
    if value is None:  # the handler has committed, or somebody has erased it
        return problem(500, "answer-lost", "This request was executed, but its answer was not stored")
    stored = decode(value)
    if not isinstance(stored, dict) or not isinstance(stored.get("status"), int):
        return reply(200, stored)  # not stored by this function
    body = base64.b64decode(stored["body64"]) if "body64" in stored else stored.get("body", "").encode()
    return Reply(stored["status"], [(name, value) for name, value in stored.get("headers", [])], body)


def serve(core: Core, options: Options, incoming: Incoming, handler: Callable[[Any], Any]) -> Steps[Reply]:
    """The answer to one request."""
    first: list[Reply] = []
    def work(tx: Any) -> Steps[Any]:
        try:
            out = yield core.handled(handler(tx))
        except Refused as refusal:
            raise Refused(options.encode(refusal.value)) from refusal
        if not isinstance(out, (Reply, dict, list, tuple, str, int, float)):
            what = "nothing" if out is None else f"a {type(out).__name__}"
            raise TypeError(f"the handler returned {what}: it is to return reply(status, body, headers), or JSON")
        out = out if isinstance(out, Reply) else reply(200, out)
        # Those of the connection are the server's to make: a wrong Content-Length would end the answer in the middle.
        out = Reply(out.status, [pair for pair in out.headers if pair[0].lower() not in NEVER - {"set-cookie"}], out.body)
        if any(re.search(r"[\r\n\0]|[^\0-\xff]", f"{name}{value}") for name, value in out.headers):  # cannot be sent
            raise ValueError("a header has a line break, or a character that is not of Latin-1")
        if not options.final(out.status):
            raise NotFinal(out)
        first[:] = [out]
        return options.encode(pack(out, options.headers))
    if incoming.large:
        return problem(413, "too-large", f"The body has more than {options.limit} bytes")
    header = incoming.header(options.key)
    if header is None and options.required:
        return problem(400, "key-missing", f"The header {options.key} is missing")
    key = parse_key(header) if header is not None else "-"
    if key is None:
        return problem(400, "key-invalid", f'{options.key} must be 1 to 255 printable ASCII characters, "in quotes"')
    user = yield options.user(incoming.request)
    kind, text, params = incoming.header("content-type") or "", None, None
    if options.fingerprint is None:
        if incoming.body is None:
            raise TypeError("the body was read before idem_pg saw it: read it later, or pass the option fingerprint")
        text = fingerprint(incoming.method, incoming.target, kind, incoming.body)
    else:
        params = options.fingerprint(incoming.request)
    request = Request(user, key, options.scope, params, options.wait, options.attempts, params_text=text)
    try:
        if header is None:
            yield from core.once(request, lambda tx: core.run(work(tx)), claim=False)
            return first[0]
        answer = yield from core.observed(request, core.once(request, lambda tx: core.run(work(tx))))
    except NotFinal as rollback:
        return rollback.reply
    except IdemError as error:
        of_scope = isinstance(error, Invalid) and str(error).startswith("scope")
        if error.status == 500 or request.stage == "handler" or of_scope or header is None:
            raise
        kind, detail = KINDS.get(error.outcome, error.outcome.replace("_", "-")), str(error).split("\n")[0]
        return problem(error.status, kind, str(error.__doc__).rstrip("."), detail, error.retryable)
    except Exception as error:
        bug = type(error).__name__ in ("PoolClosed", "InterfaceError")  # the pool is not open yet, or no more
        if not request.spent and (request.stage != "connect" or bug or not errors.of_driver(error)):
            raise
        log.warning("the database cannot be reached: %s", error)
        return problem(503, "unavailable", "The database cannot be reached: send the same request again", None, True)
    result = unpack(answer.value, options.decode) if answer.replayed else first[0]
    headers = list(result.headers)
    if answer.expires_at is not None:
        headers.append(("Idempotency-Expires", format_datetime(answer.expires_at.astimezone(timezone.utc), usegmt=True)))
    if answer.replayed:
        headers.append(("Idempotent-Replayed", "true"))
    return Reply(result.status, headers, result.body)


def framework(request: Any) -> str:
    return next((m for c in type(request).__mro__ if (m := c.__module__.split(".")[0]) in ("django", "starlette")), "flask")


def incoming_of(request: Any, limit: float = math.inf) -> Incoming:
    """A request of Flask or Django; of Starlette without its body."""
    if framework(request) == "starlette":
        query = request.scope["query_string"].decode("latin-1")
        path = (request.scope.get("raw_path") or request.url.path.encode()).decode("latin-1").split("?")[0]
        def header(name: str) -> str | None:
            return ", ".join(request.headers.getlist(name)) if name in request.headers else None
        return Incoming(request, request.method, path + ("?" + query if query else ""), header)
    django = framework(request) == "django"
    environ = request.META if django else request.environ
    length = environ.get("CONTENT_LENGTH") or ""
    large = length.isdecimal() and int(length) > limit
    body = b"" if large else request.body if django else request.get_data()
    if not (django or large or body) and (request.content_length or request.form or request.files):
        body = None
    path = request.get_full_path() if django else request.full_path.rstrip("?")
    target = environ.get("RAW_URI") or environ.get("REQUEST_URI") or path
    return Incoming(request, request.method, target, request.headers.get, body, large)


async def streamed(request: Any, limit: int) -> tuple[bytes, bool]:
    """The body, and whether it is too large.  Reads all, or the client gets no answer."""
    parts, size = list[bytes](), 0
    async for part in request.stream():
        size += len(part)
        if size <= limit:
            parts.append(part)
    request._body = b"".join(parts)  # where request.body() and json() look first
    return request._body, size > limit


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
        incoming = incoming_of(request, options.limit)
        if framework(request) == "starlette":
            incoming.body, incoming.large = await streamed(request, options.limit)
        out = await arun(serve(core, options, incoming, lambda tx: handler(tx, request, **arguments)))
        return to_response(request, out)
    def synchronous(*args: Any, **arguments: Any) -> Any:
        request = args[0] if args else sys.modules["flask"].request._get_current_object()
        if framework(request) == "starlette":
            raise TypeError("Starlette and FastAPI need AsyncIdem")
        out = run(serve(core, options, incoming_of(request, options.limit), lambda tx: handler(tx, request, **arguments)))
        return to_response(request, out)
    view: Any = asynchronous if core.asynchronous else synchronous
    # Not functools.wraps: FastAPI is to see the request and what follows it.  A Depends() that it did not see would not run.
    view.__name__, view.__doc__, view.__module__ = handler.__name__, handler.__doc__, handler.__module__
    if core.asynchronous and (requests := sys.modules.get("starlette.requests")):
        parameter = inspect.Parameter("request", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=requests.Request)
        more, names = [*inspect.signature(handler).parameters.values()][2:], getattr(handler, "__globals__", {})
        more = [p.replace(annotation=eval(p.annotation, names)) if isinstance(p.annotation, str) else p for p in more]
        view.__signature__ = inspect.Signature([parameter, *more])
    return view  # type: ignore[no-any-return]
