"""The service of the conformance tests: PGHOST, PGPORT, PGUSER, PGDATABASE, IDEM_SCHEMA, PORT, POOL_SIZE,
DRIVER (psycopg | psycopg_async | asyncpg) and FRAMEWORK (flask | starlette | fastapi | django)."""

import asyncio
import json
import logging
import os
import socket
import sys
import threading
import time

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "src"))

import idem_pg
from idem_pg import reply
from idem_pg.drivers import arun, run

FRAMEWORK = os.environ.get("FRAMEWORK") or ("flask" if os.environ.get("DRIVER", "psycopg") == "psycopg" else "starlette")
ASYNC = FRAMEWORK in ("starlette", "fastapi")
DRIVER = os.environ.get("DRIVER") or ("psycopg_async" if ASYNC else "psycopg")
SCHEMA = os.environ.get("IDEM_SCHEMA", "idem")
SIZE = int(os.environ.get("POOL_SIZE", "4"))
PORT = int(os.environ["PORT"])
BOUNCED = {"kwargs": {"prepare_threshold": None}} if os.environ.get("PGBOUNCER") else {}  # for a pool of psycopg
if ASYNC == (DRIVER == "psycopg"):
    sys.exit(f"{FRAMEWORK} does not go with {DRIVER}")

runner = arun if ASYNC else run
pause = asyncio.sleep if ASYNC else time.sleep
raised = set()  # keys for which 40001 was raised once


def handler(steps):
    """A function, or in asyncio a coroutine, from a generator that yields what it would await."""

    def made(*args):
        return runner(steps(*args))

    made.__name__ = steps.__name__.strip("<>")
    return made


def execute(tx, sql, *args):
    """Executes, and returns the first column of the first row."""
    if DRIVER == "asyncpg":
        for number in range(len(args)):
            sql = sql.replace("%s", f"${number + 1}", 1)
        return (yield tx.fetchval(sql, *args))
    cursor = yield tx.execute(sql, args)
    row = (yield cursor.fetchone()) if cursor.description else None
    return row[0] if row else None


def insert(tx, reference, user, amount):
    return (yield from execute(tx, "INSERT INTO payments (reference, user_id, amount) VALUES (%s::text, %s::text, %s::int)"
                               " RETURNING id", reference, user, amount))  # fmt: skip


def user_of(request):
    return request.headers.get("X-User") or "anna"


def body_of(request):
    if FRAMEWORK == "flask":
        return request.get_data()
    return request._body if ASYNC else request.body  # Starlette keeps what the client has read


def pay(tx, request):
    data = json.loads(body_of(request))
    amount, key = data["amount"], request.headers.get("Idempotency-Key")
    if amount == 402:
        return reply(402, {"error": "declined"})
    id = yield from insert(tx, key, user_of(request), amount)
    if amount == 40001 and key not in raised:
        raised.add(key)
        yield from execute(tx, "DO $$ BEGIN RAISE SQLSTATE '40001'; END $$")
    if amount in (429, 503):
        return reply(amount, {"error": "later"})
    if amount == 500:
        raise RuntimeError("bug")
    if data.get("sleep"):
        yield from execute(tx, "SELECT pg_sleep(%s::float8)::text", data["sleep"])
    headers = {"Content-Type": "application/json", "Location": f"/payments/{id}", "Set-Cookie": "a=b",
               "X-Receipt": f"r-{id}", "X-Other": "o"}  # fmt: skip
    return reply(201, '{"paid": %d,  "z":1,"a":"ü"}' % amount, headers)


def upload(tx, request):
    data = body_of(request)
    yield from insert(tx, request.headers.get("Idempotency-Key"), user_of(request), len(data))
    return reply(200, data[::-1])


def once(idem, pool, data):
    amount = data["amount"]

    def work(tx):
        if amount == 402:
            raise idem_pg.Refused({"declined": True})
        yield from insert(tx, data["id"], data["user"], amount)
        if amount == 500:
            raise RuntimeError("bug")
        if amount == -1:
            try:
                yield from execute(tx, "SELECT 1/0")
            except Exception:
                pass
        if amount == -2:
            yield from execute(tx, "COMMIT")
        if amount == -3:
            return {"paid": {1, 2}}
        if data.get("sleep"):
            yield from execute(tx, "SELECT pg_sleep(%s::float8)::text", data["sleep"])
        return {"paid": amount}

    answer = yield idem.once(handler(work), user=data["user"], id=data["id"], scope="once", params={"amount": amount})
    return {"value": answer.value, "replayed": answer.replayed}


def call(idem, pool, data):
    arguments = {"reference": data["id"], "amount": data["amount"]}
    answer = yield idem.call("pay(text,int)", arguments, user=data["user"], id=data["id"], scope="call")
    return {"value": answer.value, "replayed": answer.replayed}


def status(idem, pool, data):
    return {"status": (yield idem.status(user=data["user"], id=data["id"], scope=data.get("scope", "")))}


def lease(idem, pool, data):
    previous = []

    def work(held):
        previous.append(held.previous)
        if held.previous is None:
            yield held.record({"step": 1})
            yield from provider(pool, data["id"])
        end = time.monotonic() + float(data.get("work") or 0)
        while time.monotonic() < end:
            held.check()
            yield pause(0.02)
        held.check()
        yield held.settle({"paid": data["amount"]}, handler(
            lambda tx: (yield from insert(tx, data["id"], data["user"], data["amount"]))))  # fmt: skip

    number, _, unit = str(data.get("lease") or 30).partition(" ")  # 30, or "30 s", "500 ms"
    length = float(number) * (0.001 if unit == "ms" else 1)
    answer = yield idem.lease(handler(work), user=data["user"], id=data["id"], scope="lease", lease=length)
    return {"value": answer.value, "replayed": answer.replayed, "previous": (previous or [None])[0]}


def provider(pool, reference):
    """A call of another service: committed at once, whatever happens to the request."""
    if DRIVER == "asyncpg":
        yield pool.execute("INSERT INTO provider_calls (reference) VALUES ($1)", reference)
        return
    import psycopg

    kind = psycopg.AsyncConnection if ASYNC else psycopg.Connection
    connection = yield kind.connect(autocommit=True)
    try:
        yield connection.execute("INSERT INTO provider_calls (reference) VALUES (%s)", (reference,))
    finally:
        yield connection.close()


def answered(steps, *args):
    """Status and body, as JSON."""
    try:
        return 200, (yield from steps(*args))
    except idem_pg.IdemError as error:
        return error.status, {"outcome": error.outcome, "sqlstate": error.sqlstate, "retryable": error.retryable,
                              "name": type(error).__name__}  # fmt: skip
    except Exception as error:
        logging.exception("bug")
        return 500, {"error": repr(error)}


PLAIN = {"/once": once, "/call": call, "/lease": lease}


def guarded(idem):
    common = {"user": user_of, "headers": ["X-Receipt"]}
    return {
        "/pay": idem.http("pay", **common)(handler(pay)),
        "/wait": idem.http("pay", wait=5, **common)(handler(pay)),
        "/optional": idem.http("pay", required=False, **common)(handler(pay)),
        "/upload": idem.http("upload", **common)(handler(upload)),
    }


def ready():
    def wait():
        while True:
            try:
                socket.create_connection(("127.0.0.1", PORT), 1).close()
                print("ready", flush=True)
                return
            except OSError:
                time.sleep(0.02)

    threading.Thread(target=wait, daemon=True).start()


def blocking():
    import psycopg_pool

    pool = psycopg_pool.ConnectionPool("", min_size=1, max_size=SIZE, timeout=10, **BOUNCED)
    idem = idem_pg.Idem(pool, SCHEMA)
    views = guarded(idem)
    if FRAMEWORK == "flask":
        import flask

        app = flask.Flask("service")
        for path, view in views.items():
            app.add_url_rule(path, path, view, methods=["POST"])

        def plain(steps, data):
            code, body = run(answered(steps, idem, pool, data))
            return flask.Response(json.dumps(body), code, content_type="application/json")

        for path, steps in PLAIN.items():
            app.add_url_rule(path, path, lambda steps=steps: plain(steps, flask.request.get_json(force=True)), methods=["POST"])
        app.add_url_rule("/status", "status", lambda: plain(status, flask.request.args))
        app.add_url_rule("/health", "health", lambda: "ok")
        wsgi = app.wsgi_app
    else:
        import django
        from django.conf import settings
        from django.core.wsgi import get_wsgi_application
        from django.http import HttpResponse
        from django.urls import path as route

        def plain(steps, data):
            code, body = run(answered(steps, idem, pool, data))
            return HttpResponse(json.dumps(body), status=code, content_type="application/json")

        urls = [route(path[1:], view) for path, view in views.items()]
        urls += [route(path[1:], lambda r, steps=steps: plain(steps, json.loads(r.body))) for path, steps in PLAIN.items()]
        urls += [route("status", lambda r: plain(status, r.GET.dict())), route("health", lambda r: HttpResponse("ok"))]
        settings.configure(DEBUG=False, ALLOWED_HOSTS=["*"], ROOT_URLCONF=tuple(urls), SECRET_KEY="x", MIDDLEWARE=[],
                           DATA_UPLOAD_MAX_MEMORY_SIZE=None)  # fmt: skip
        django.setup()
        wsgi = get_wsgi_application()
    from werkzeug.serving import WSGIRequestHandler, make_server

    WSGIRequestHandler.protocol_version = "HTTP/1.1"
    ready()
    make_server("127.0.0.1", PORT, wsgi, threaded=True).serve_forever()


async def asynchronous():
    import uvicorn
    from starlette.responses import Response
    from starlette.routing import Route

    if DRIVER == "asyncpg":
        import asyncpg

        cache = {"statement_cache_size": 0} if os.environ.get("PGBOUNCER") else {}
        pool = await asyncpg.create_pool(min_size=1, max_size=SIZE, timeout=10, **cache)
    else:
        import psycopg_pool

        pool = psycopg_pool.AsyncConnectionPool("", min_size=1, max_size=SIZE, timeout=10, open=False, **BOUNCED)
        await pool.open()
    idem = idem_pg.AsyncIdem(pool, SCHEMA)

    def plain(steps):
        async def view(request):
            data = dict(request.query_params) if steps is status else json.loads(await request.body())
            code, body = await arun(answered(steps, idem, pool, data))
            return Response(json.dumps(body), code, media_type="application/json")

        return view

    async def health(request):
        return Response("ok")

    if FRAMEWORK == "fastapi":
        import fastapi

        app = fastapi.FastAPI()
        for path, view in guarded(idem).items():
            app.post(path)(view)
    else:
        from starlette.applications import Starlette

        app = Starlette()
        for path, view in guarded(idem).items():
            app.router.routes.append(Route(path, view, methods=["POST"]))
    for path, steps in PLAIN.items():
        app.router.routes.append(Route(path, plain(steps), methods=["POST"]))
    app.router.routes += [Route("/status", plain(status)), Route("/health", health)]
    ready()
    await uvicorn.Server(uvicorn.Config(app, "127.0.0.1", PORT, log_level="warning", access_log=False)).serve()


logging.basicConfig(level=logging.WARNING)
if ASYNC:
    asyncio.run(asynchronous())
else:
    blocking()
