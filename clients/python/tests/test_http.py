"""The service of the conformance tests in each framework, over HTTP."""

import asyncio
import concurrent.futures
import http.client
import json
import os
import socket
import subprocess
import sys
import time
import uuid

import psycopg_pool
import pytest
from conftest import DATABASES, World

import idem_pg
from idem_pg import http as guard
from idem_pg.drivers import run
from idem_pg.values import check

KINDS = ["flask-psycopg", "starlette-psycopg_async", "starlette-asyncpg", "fastapi-asyncpg", "django-psycopg"]


class Service:
    def __init__(self, kind, database):
        framework, driver = kind.split("-")
        self.reads = framework in ("starlette", "fastapi")
        self.world = World("psycopg", database)  # its observer and its proxy
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            self.port = one.getsockname()[1]
        environment = dict(
            os.environ, PGHOST="127.0.0.1", PGPORT=str(self.world.proxy.port), PGDATABASE=database, IDEM_SCHEMA="idem",
            PGUSER=os.environ.get("PGUSER", "postgres"), PORT=str(self.port), FRAMEWORK=framework, DRIVER=driver,
            PGSSLMODE="disable")  # fmt: skip
        script = os.path.join(os.path.dirname(__file__), "service.py")
        self.process = subprocess.Popen([sys.executable, script], env=environment, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout.readline() == "ready\n"

    def request(self, method, path, body=b"", key=None, headers=()):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        sent = {"Content-Type": "application/json", **dict(headers)}
        if key is not None:
            sent["Idempotency-Key"] = key
        connection.request(method, path, data, sent)
        response = connection.getresponse()
        answer = response.status, {k.lower(): v for k, v in response.getheaders()}, response.read()
        connection.close()
        return answer

    def post(self, path, body, **options):
        status, headers, text = self.request("POST", path, body, **options)
        return status, json.loads(text)

    def close(self):
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()
        self.world.close()


@pytest.fixture(scope="module", params=[f"{kind}/{database}" for kind in KINDS for database in DATABASES])
def running(request):
    service = Service(*request.param.split("/"))
    yield service
    service.close()


@pytest.fixture
def service(running):
    running.world.observer.execute("TRUNCATE payments, provider_calls")
    running.key = str(uuid.uuid4())
    return running


def test_first_answer_and_replay(service):
    path = "/pay?x=%C3%BC%20y"
    status, headers, body = service.request("POST", path, {"amount": 30}, key=f'"{service.key}"')
    assert (status, body) == (201, '{"paid": 30,  "z":1,"a":"ü"}'.encode())
    assert headers["set-cookie"] == "a=b" and headers["x-other"] == "o" and "idempotent-replayed" not in headers
    again = service.request("POST", path, b'{"amount":30.0}', key=service.key)
    assert again[0] == 201 and again[2] == body
    assert again[1]["idempotent-replayed"] == "true" and "set-cookie" not in again[1] and "x-other" not in again[1]
    for name in ("location", "x-receipt", "content-type", "content-length"):
        assert again[1][name] == headers[name]
    assert headers["content-type"] == "application/json" and headers["idempotency-expires"].endswith(" GMT")
    assert service.world.payments() == 1
    fingerprint, expected = service.world.observer.execute(
        "SELECT fingerprint, idem.idem_fingerprint(%s) FROM idem.idem_lookup('anna', %s, 'pay')",
        ('{"method": "POST", "path": "/pay?x=%C3%BC%20y", "body": {"amount": 30}}', service.key)).fetchone()
    assert fingerprint == expected


def test_problems(service):
    def refused(status, kind, *args, **options):
        got, headers, body = service.request("POST", *args, **options)
        assert (got, json.loads(body)["type"]) == (status, f"urn:idem:{kind}")
        assert headers["content-type"] == "application/problem+json"
        assert set(json.loads(body)) == {"type", "title", "status", "detail"}
        return headers

    refused(400, "key-missing", "/pay", {"amount": 1})
    for key in ('"open', "a b", "x" * 256, '""', ""):
        refused(400, "key-invalid", "/pay", {"amount": 1}, key=key)
    service.request("POST", "/pay", {"amount": 1}, key=service.key)
    refused(422, "key-reused", "/pay", {"amount": 2}, key=service.key)
    service.world.observer.execute("BEGIN; SELECT idem.idem_claim('anna', 'held', 'pay')")
    try:
        assert refused(409, "in-progress", "/pay", {"amount": 1}, key="held")["retry-after"] == "1"
        assert refused(503, "timed-out", "/wait", {"amount": 1}, key="held")["retry-after"] == "1"
    finally:
        service.world.observer.execute("ROLLBACK")


def test_what_is_final(service):
    for amount, status, rows, replayed in ((402, 402, 0, True), (429, 429, 0, False), (503, 503, 0, False), (500, 500, 0, False)):
        for attempt in range(2):
            got, headers, body = service.request("POST", "/pay", {"amount": amount}, key=f"{service.key}-{amount}")
            assert got == status
            assert ("idempotent-replayed" in headers) == (attempt == 1 and replayed)
        assert service.world.payments() == rows
    assert service.request("POST", "/pay", {"amount": 40001}, key=service.key)[0] == 201
    assert service.world.payments() == 1


def test_optional_key(service):
    for _ in range(2):
        assert service.request("POST", "/optional", {"amount": 1})[0] == 201
    assert service.world.payments() == 2
    assert service.request("POST", "/optional", {"amount": 429})[0] == 429
    assert service.world.payments() == 2
    for _ in range(2):
        assert service.request("POST", "/optional", {"amount": 1}, key=service.key)[0] == 201
    assert service.world.payments() == 3


@pytest.mark.parametrize("body", [bytes(range(256)), b"", b"x\0y", "ü".encode(), b"\xff" * 600_000])
def test_upload(service, body):
    headers = {"Content-Type": "application/octet-stream"}
    for replayed in (False, True):
        status, got, answer = service.request("POST", "/upload", body, key=service.key, headers=headers)
        assert (status, answer == body[::-1], got["content-type"]) == (200, True, "application/octet-stream")
        assert ("idempotent-replayed" in got) == replayed
    assert service.world.payments() == 1
    assert service.request("POST", "/upload", body + b"x", key=service.key, headers=headers)[0] == 422


def test_body_that_is_too_large(service):
    size = 10 * 1024 * 1024 + 1
    declared = {"Content-Length": str(size)}  # Flask and Django answer before they have read the body
    status, headers, body = service.request("POST", "/upload", b"x" * (size if service.reads else 1), key=service.key, headers=declared)
    assert (status, json.loads(body)["type"], service.world.payments()) == (413, "urn:idem:too-large", 0)


@pytest.mark.parametrize("when", ["before", "after"])
def test_lost_commit(service, when):
    service.world.proxy.cut(when)
    status, headers, body = service.request("POST", "/pay", {"amount": 7}, key=service.key)
    assert (status, service.world.proxy.cuts, service.world.payments()) == (201, 1, 1)


def test_concurrent(service):
    with concurrent.futures.ThreadPoolExecutor(20) as threads:
        answers = list(threads.map(lambda _: service.request("POST", "/wait", {"amount": 9}, key=service.key), range(20)))
    assert {a[0] for a in answers} == {201} and len({a[2] for a in answers}) == 1
    assert service.world.payments() == 1


def test_once_call_status(service):
    def once(amount, key):
        return service.post("/once", {"user": "anna", "id": service.key + key, "amount": amount})

    assert once(3, "") == (200, {"value": {"paid": 3}, "replayed": False})
    assert once(3, "") == (200, {"value": {"paid": 3}, "replayed": True})
    assert once(4, "") == (422, {"outcome": "mismatch", "sqlstate": "ID422", "retryable": False, "name": "Mismatch"})
    assert once(402, "a")[1]["name"] == "Failed"
    assert once(500, "b")[0] == 500
    assert once(-1, "c")[1]["name"] == "HandlerSwallowedError"
    assert once(-2, "d")[1]["name"] == "HandlerEndedTransaction"
    assert once(-3, "e")[0] == 500
    call = {"user": "anna", "id": service.key, "amount": 5}
    assert [service.post("/call", call)[1]["replayed"] for _ in range(2)] == [False, True]
    status = service.request("GET", f"/status?user=anna&id={service.key}&scope=call")
    assert json.loads(status[2]) == {"status": "completed"}
    assert service.request("GET", "/health")[0] == 200


def test_lease(service):
    body = {"user": "anna", "id": service.key, "amount": 5, "lease": 1, "work": 1.5}
    assert service.post("/lease", body) == (200, {"value": {"paid": 5}, "replayed": False, "previous": None})
    assert service.post("/lease", body) == (200, {"value": {"paid": 5}, "replayed": True, "previous": None})
    calls = service.world.observer.execute("SELECT count(*) FROM provider_calls").fetchone()[0]
    assert (calls, service.world.payments()) == (1, 1)


@pytest.mark.parametrize("database", DATABASES)
@pytest.mark.parametrize("status, value", [(201, "/x\r\nX-Evil: 1"), (99, "/x"), (600, "/x")])
def test_what_cannot_be_sent_is_not_stored(database, status, value):
    flask = pytest.importorskip("flask")
    world, app = World("psycopg", database), flask.Flask("shop")
    app.testing = True

    @app.post("/")
    @world.idem.http(scope="sent", user=lambda request: "anna")
    def view(tx, request):
        tx.execute("INSERT INTO payments (amount) VALUES (1)")
        return guard.reply(status, {}, {"Location": value})

    with pytest.raises((TypeError, ValueError)):
        app.test_client().post("/", headers={"Idempotency-Key": world.id})
    assert world.payments() == 0 and world.idem.status(user="anna", id=world.id, scope="sent") is None
    world.close()


def test_headers_are_text():
    assert guard.reply(200, None, {"Retry-After": 5}).headers == [("Retry-After", "5")]


def test_keys():
    assert [guard.parse_key(k) for k in ('"a b"', r'"a\"\\"', "abc", 'a"b', ' "x" ')] == ["a b", 'a"\\', "abc", None, "x"]
    assert [guard.parse_key(k) for k in ('"', '""', "", "ü", '"a', r'"\a"', '"a"; x')] == [None] * 7


@pytest.mark.parametrize("body, json_body", [
    (b'{"a": 1e99}', True), (b'{"a": 1e400}', False), (b'{"a": "3e412"}', True), (b'{"a": 1e1000}', False), (b'{"a": NaN}', False), (rb'"\u0000"', False), (rb'"\ud800"', False),
    (rb'"\ud83d\ude00"', True), (b"\xef\xbb\xbf1", False), (b"[" * 100_000, False), (b"[" * 64 + b"]" * 64, True), (b"[" * 65 + b"]" * 65, False),
    (b'{"a": ' + b"[" * 5000 + b"]" * 5000 + b', "a": "' + b"[" * 99 + rb'\""}', False), (b'"' + rb'[\"' * 99 + b'"', True),
    (b'"' + b"x" * 65_534 + b'"', True), (b'"' + b"x" * 65_535 + b'"', False), (b"1" * 499, True), (b"1" * 500, False), (b"1" * 10_000, False),
    (b"\xff", False), (b"", False), (b" null ", True), (b'"a\tb"', False),
])
def test_fingerprint(body, json_body):
    text = guard.fingerprint("POST", '/p"', "application/vnd.x+JSON; charset=utf-8", body)
    assert ('"sha256"' not in text) == json_body
    assert '"sha256"' in guard.fingerprint("POST", "/", "text/plain", b"1")


def test_collisions():
    def of(body, kind="application/json"):
        return guard.fingerprint("POST", "/", kind, body)
    digest = json.loads(of(b"x", "text/plain"))["sha256"]
    assert json.loads(of(json.dumps({"sha256": digest}).encode())) != json.loads(of(b"x", "text/plain"))
    assert '"sha256"' in of(rb'{"a": "\u0000", "a": 1}') and '"sha256"' not in of(rb'{"a": "\\u0000"}')


def test_the_time_for_a_fingerprint_does_not_depend_on_what_is_sent():
    def cost(function, *arguments):
        costs = []
        for _ in range(3):
            before = time.process_time()
            function(*arguments)
            costs.append(time.process_time() - before)
        return min(costs)
    size = 500_000
    body = b'{"' + b"k" * size + b'": [' + b"1," * (size // 2) + b"1]}"
    parsed = cost(json.loads, body)
    assert cost(guard.fingerprint, "POST", "/", "application/json", body) < 40 * parsed
    assert cost(check, json.loads(body)) < 60 * parsed
    with pytest.raises(TypeError, match=r"^\$\.a\[1\] is nan"):
        check({"a": [1, float("nan")]})


class Stored(Exception):
    pass


def serve(handler, header="k", body=b"{}", **options):
    """What is stored of one request, or the reply without a key."""
    class Core(guard.Core):
        def __init__(self):
            self.run, self.asynchronous = run, False

        def observed(self, request, steps):
            return steps

        def once(self, request, work, claim=True):
            if not claim:
                return (yield work(None))
            raise Stored((yield work(None)))
    incoming = guard.Incoming(None, "POST", "/", lambda name: header if name == "Idempotency-Key" else None, body)
    options = guard.Options("", lambda request: "anna", **options)
    return run(guard.serve(Core(), options, incoming, handler))


@pytest.mark.parametrize("value", ["/a\r\nSet-Cookie: x", "/한", "a\0"])
def test_a_header_that_cannot_be_sent_is_not_stored(value):
    for name, text in (("Location", value), (value, "x")):
        with pytest.raises(ValueError, match="a header has"):
            serve(lambda tx: idem_pg.reply(201, {}, {name: text}))
    with pytest.raises(Stored):
        serve(lambda tx: idem_pg.reply(201, {}, {"Location": "/é"}))


def test_headers_of_the_connection_are_the_servers():
    with psycopg_pool.ConnectionPool(f"dbname={DATABASES[0]}", min_size=1, max_size=1) as pool:
        core = idem_pg.Idem(pool)._core
        incoming = guard.Incoming(None, "POST", "/", {}.get, b"", False)
        out = run(guard.serve(core, guard.Options("pay", lambda request: "anna", required=False), incoming, lambda tx: idem_pg.reply(
            200, "a", {"Content-Length": "0", "Connection": "x", "Set-Cookie": "a=b"})))
    assert {name.lower() for name, _ in out.headers} == {"content-type", "set-cookie"}


def test_what_is_stored():
    with pytest.raises(Stored) as stored:
        serve(lambda tx: idem_pg.reply(201, None, {"Cache-Control": "no-store", "Set-Cookie": "a=b", "Vary": "Origin"}))
    assert stored.value.args[0]["headers"] == [["cache-control", "no-store"], ["vary", "Origin"]]
    def refuse(tx):
        raise idem_pg.Refused({"secret": 1})
    with pytest.raises(idem_pg.Refused) as refused:
        serve(refuse, encode=lambda value: "encrypted")
    assert refused.value.value == "encrypted"
    assert "secret" not in str(idem_pg.Failed({"secret": 1}))


def test_flask_and_a_body_that_was_read():
    flask = pytest.importorskip("flask")
    with flask.Flask("x").test_request_context("/", method="POST", data={"amount": 1}):
        assert guard.incoming_of(flask.request).body == b"amount=1"
        assert flask.request.form["amount"] == "1"
    with flask.Flask("x").test_request_context("/", method="POST", data={"amount": 1}):
        assert flask.request.form["amount"] == "1"  # as a check for CSRF does
        with pytest.raises(TypeError, match="was read"):
            serve(None, body=guard.incoming_of(flask.request).body)
        with pytest.raises(Stored):
            serve(lambda tx: 1, body=None, fingerprint=lambda request: 1)
    with flask.Flask("x").test_request_context("/", method="POST"):
        assert not flask.request.form and guard.incoming_of(flask.request).body == b""


@pytest.mark.parametrize("token, expected", [("no", 403), ("yes", 201)])
def test_fastapi_sees_the_dependencies_of_a_handler(token, expected):
    fastapi = pytest.importorskip("fastapi")
    def admin(x_token: str = fastapi.Header()):
        if x_token != "yes":
            raise fastapi.HTTPException(403)
        return "admin"
    app, idem, got, sent = fastapi.FastAPI(), idem_pg.AsyncIdem(lambda: None), [], []
    async def call(request, **arguments):
        got.append(arguments)
        return idem_pg.reply(201)
    def once(request, work, claim):
        yield work(None)
    idem._core.once = once
    @app.post("/{account}")
    @idem.http(scope="", user=lambda request: "anna", required=False)
    async def pay(tx, request, account: "int", who=fastapi.Depends(admin)):
        return await call(request, account=account, who=who)
    async def receive():
        return {"type": "http.request", "body": b"", "more_body": False}
    async def send(message):
        sent.append(message)
    scope = {"type": "http", "method": "POST", "path": "/17", "query_string": b"", "headers": [(b"x-token", token.encode())]}
    asyncio.run(app(scope, receive, send))
    assert sent[0]["status"] == expected
    assert got == ([{"account": 17, "who": "admin"}] if expected == 201 else [])
