"""Views of Flask and Starlette, without a server: mistakes of the application, and what a client gets."""

import decimal
import json
import logging

import asyncpg
import flask
import psycopg_pool
import pytest
import starlette.requests
import starlette.responses
from test_once import pay

import idem_pg
from idem_pg.drivers import arun, run


def view(world, steps, idem=None, **options):
    runner = arun if world.asynchronous else run
    guard = (idem or world.idem).http("view", lambda request: "anna", **options)
    return guard(lambda tx, request: runner(steps(tx, request)))


def ask(world, view, *parts):
    """Status and body of the answer; parts: of the body of the request."""
    body = b"".join(parts)
    headers = {"Idempotency-Key": world.id, "Content-Type": "application/json"}
    if not world.asynchronous:
        with flask.Flask("test").test_request_context("/", method="POST", data=body, headers=headers):
            response = view()
            return response.status_code, json.loads(response.get_data())
    left = list(parts) or [b""]

    async def receive():
        part = left.pop(0)
        return {"type": "http.request", "body": part, "more_body": bool(left)}

    scope = {"type": "http", "method": "POST", "path": "/", "raw_path": b"/", "query_string": b"",
             "headers": [(name.lower().encode(), value.encode()) for name, value in headers.items()]}  # fmt: skip
    response = world.go(view(starlette.requests.Request(scope, receive)))
    assert left == []
    return response.status_code, json.loads(response.body)


@pytest.mark.parametrize("status", [99, 600, True, 200.0, "200", None, {"n": 1}])
def test_status_of_a_reply(status):
    with pytest.raises(TypeError) as caught:
        idem_pg.reply(status)
    assert "the status comes first" in str(caught.value) and repr(status) in str(caught.value)
    assert idem_pg.reply(200).status == 200 and idem_pg.reply(599).status == 599


def test_body_of_a_reply():
    for body, place in (({"n": float("nan")}, "$.n is nan"), ([1, decimal.Decimal(1)], "$[1] is a Decimal")):
        with pytest.raises(TypeError) as caught:
            idem_pg.reply(201, body)
        assert place in str(caught.value)
    assert idem_pg.reply(201, {"ä": (1, None)}).body == '{"ä":[1,null]}'.encode()


@pytest.mark.parametrize("kind", ["nothing", "JSONResponse", "Response"])
def test_what_a_handler_returns(world, kind):
    out = {"nothing": None, "JSONResponse": starlette.responses.JSONResponse({}), "Response": flask.Response()}[kind]

    def steps(tx, request):
        yield from pay()(tx)
        return out

    with pytest.raises(TypeError, match=f"returned (a )?{kind}.*reply.status, body, headers"):
        ask(world, view(world, steps))
    assert world.payments() == 0


def test_answer_that_was_not_stored(world):
    def steps(tx, request):
        yield from pay()(tx)
        yield tx.execute("COMMIT")
        return {}

    with pytest.raises(idem_pg.HandlerEndedTransaction):
        ask(world, view(world, steps))
    decode = pytest.fail  # there is nothing to decode
    for _ in range(2):
        status, problem = ask(world, view(world, steps, decode=decode))
        assert (status, problem["type"]) == (500, "urn:idem:answer-lost")
        assert problem["title"] == "This request was executed, but its answer was not stored"
    assert world.payments() == 1


def test_detail_of_a_refusal(world):
    def steps(tx, request):
        yield from ()
        raise idem_pg.Refused({"secret": 1})

    for _ in range(2):
        status, problem = ask(world, view(world, steps))
        assert (status, problem["type"]) == (409, "urn:idem:failed") and "secret" not in json.dumps(problem)


def test_limit(world):
    def steps(tx, request):
        yield from pay()(tx)
        return (yield request.json()) if world.asynchronous else request.get_json()

    small = view(world, steps, limit=10)
    status, problem = ask(world, small, b"[1234", b"56789", b"]")
    assert (status, problem["type"], world.payments()) == (413, "urn:idem:too-large", 0)
    assert ask(world, small, b"[12345", b"678]") == (200, [12345678])


def test_pool_that_is_not_open(world):
    def pool():
        if world.driver == "asyncpg":
            return asyncpg.create_pool(database=world.database, min_size=0)
        kind = psycopg_pool.AsyncConnectionPool if world.asynchronous else psycopg_pool.ConnectionPool
        return kind(f"dbname={world.database}", open=False)

    async def made():
        return pool()

    idem = type(world.idem)(world.go(made()) if world.asynchronous else pool())
    for asked in (view(world, lambda tx, request: iter(()), idem), view(world, lambda tx, request: iter(()))):
        with pytest.raises((psycopg_pool.PoolClosed, asyncpg.InterfaceError)):
            ask(world, asked)
        world.go(world.pools[0].close())


def test_wrong_address(world, caplog):
    def pool():
        kind = psycopg_pool.AsyncConnectionPool if world.asynchronous else psycopg_pool.ConnectionPool
        return kind("host=127.0.0.1 port=1", min_size=0, max_size=1, timeout=0.2, open=not world.asynchronous)

    async def made():
        if world.driver == "asyncpg":
            return await asyncpg.create_pool(host="127.0.0.1", port=1, min_size=0)
        opened = pool()
        await opened.open()
        return opened

    source = world.go(made()) if world.asynchronous else pool()
    world.pools.append(source)
    idem = type(world.idem)(source, on_outcome=world.events.append)
    with caplog.at_level(logging.WARNING, "idem_pg"):
        status, problem = ask(world, view(world, lambda tx, request: iter(()), idem, attempts=2))
    assert (status, problem["type"]) == (503, "urn:idem:unavailable")
    told = [record.getMessage() for record in caplog.records if record.name == "idem_pg"]
    assert told == [f"the database cannot be reached: {world.events[-1].error}"] and world.events[-1].error is not None


