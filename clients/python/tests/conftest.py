"""A world for each driver and database: PGHOST, PGUSER, and IDEM_DATABASES, which have idem in the schema idem.

	PGHOST=/run/postgresql PGUSER=postgres IDEM_DATABASES='c portable' pytest
"""

import asyncio
import inspect
import os
import socket
import sys
import threading
import uuid

import asyncpg
import psycopg
import psycopg_pool
import pytest

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "src"))

import idem_pg
from idem_pg.drivers import arun, run

DATABASES = os.environ.get("IDEM_DATABASES", os.environ.get("PGDATABASE", "postgres")).split()
DRIVERS = os.environ.get("IDEM_DRIVERS", "psycopg psycopg_async asyncpg").split()
TABLES = """
CREATE TABLE IF NOT EXISTS payments (id bigserial PRIMARY KEY, reference text, user_id text, amount int);
CREATE TABLE IF NOT EXISTS provider_calls (id bigserial, reference text);
CREATE OR REPLACE FUNCTION pay(reference text, amount int) RETURNS jsonb LANGUAGE sql AS
	'INSERT INTO payments (reference, amount) VALUES ($1, $2) RETURNING jsonb_build_object(''paid'', amount)';
CREATE OR REPLACE FUNCTION conflict(code text) RETURNS void LANGUAGE plpgsql AS
	'BEGIN RAISE EXCEPTION ''made up'' USING ERRCODE = code; END';
"""


class Proxy:
    """Forwards to the server; cuts a connection at a message that contains `needle`: 'before' the server gets it, or
    'after' the server has answered it and before the client gets the answer."""

    def __init__(self):
        host, port = os.environ.get("PGHOST", "/run/postgresql"), os.environ.get("PGPORT", "5432")
        self.target = (host, port)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.when, self.needle, self.times, self.cuts = None, b"", 0, 0
        threading.Thread(target=self.accept, daemon=True).start()

    def cut(self, when, needle=b"COMMIT", times=1):
        self.when, self.needle, self.times, self.cuts = when, needle, times, 0

    def accept(self):
        while True:
            try:
                client = self.listener.accept()[0]
            except OSError:
                return
            if self.target[0].startswith("/"):
                server = socket.socket(socket.AF_UNIX)
                server.connect(f"{self.target[0]}/.s.PGSQL.{self.target[1]}")
            else:
                server = socket.create_connection(self.target)
            state = {"cut": False, "ended": 0}
            threading.Thread(target=self.up, args=(client, server, state), daemon=True).start()
            threading.Thread(target=self.down, args=(client, server, state), daemon=True).start()

    def up(self, client, server, state):
        while data := self.receive(client):
            if self.times > 0 and self.needle in data:
                self.times -= 1
                self.cuts += 1
                if self.when == "before":
                    break
                state["cut"] = True
            try:
                server.sendall(data)
            except OSError:
                break
        self.end(state, client, server)

    def down(self, client, server, state):
        while data := self.receive(server):
            if state["cut"]:
                break
            try:
                client.sendall(data)
            except OSError:
                break
        self.end(state, client, server)

    @staticmethod
    def receive(one):
        try:
            return one.recv(65536)
        except OSError:
            return b""

    @staticmethod
    def end(state, *sockets):
        state["ended"] += 1
        for one in sockets:
            try:
                one.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
            if state["ended"] == 2:
                one.close()


class World:
    def __init__(self, driver, database):
        self.driver, self.database, self.asynchronous = driver, database, driver != "psycopg"
        self.loop = asyncio.new_event_loop()
        self.proxy = Proxy()
        self.events = []
        self.observer = psycopg.connect(dbname=database, autocommit=True)
        self.observer.execute("SET client_min_messages = warning")
        self.observer.execute(TABLES)
        self.observer.execute("TRUNCATE payments, provider_calls")
        self.pools = []
        self.idem = self.connect()
        self.id = str(uuid.uuid4())

    def connect(self, size=2, **options):
        kind = idem_pg.AsyncIdem if self.asynchronous else idem_pg.Idem
        user = os.environ.get("PGUSER", "postgres")
        conninfo = f"host=127.0.0.1 port={self.proxy.port} dbname={self.database} user={user}"

        async def make():
            if self.driver == "asyncpg":
                return await asyncpg.create_pool(
                    host="127.0.0.1", port=self.proxy.port, database=self.database, user=user, ssl=False,
                    min_size=1, max_size=size)  # fmt: skip
            pool = psycopg_pool.AsyncConnectionPool(conninfo, min_size=1, max_size=size, open=False)
            await pool.open()
            return pool

        if self.asynchronous:
            pool = self.loop.run_until_complete(make())
        else:
            pool = psycopg_pool.ConnectionPool(conninfo, min_size=1, max_size=size)
        self.pools.append(pool)
        return kind(pool, on_outcome=self.events.append, **options)

    def go(self, value):
        return self.loop.run_until_complete(value) if inspect.isawaitable(value) else value

    def handler(self, steps):
        """A handler of the driver's kind from a generator that yields what it would await."""
        if self.asynchronous:
            return lambda tx: arun(steps(tx))
        return lambda tx: run(steps(tx))

    def once(self, steps, **options):
        options = {"user": "anna", "id": self.id, "scope": "test", **options}
        return self.go(self.idem.once(self.handler(steps), **options))

    def payments(self):
        return self.observer.execute("SELECT count(*) FROM payments").fetchone()[0]

    def close(self):
        for pool in self.pools:
            self.go(pool.close())
        self.loop.close()
        self.observer.close()
        self.proxy.listener.close()


@pytest.fixture(params=[f"{driver}-{database}" for driver in DRIVERS for database in DATABASES])
def world(request):
    world = World(*request.param.split("-", 1))
    yield world
    world.close()
