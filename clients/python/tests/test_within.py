"""within, in the transactions of SQLAlchemy and Django."""

import asyncio
import os
import subprocess
import sys
import uuid

import pytest
from conftest import DATABASES, World

import idem_pg

sqlalchemy = pytest.importorskip("sqlalchemy")


@pytest.fixture(params=DATABASES)
def database(request):
    world = World("psycopg", request.param)
    yield world
    world.close()


def bug(tx):
    tx.execute(sqlalchemy.text("INSERT INTO payments (amount) VALUES (1)"))
    raise KeyError("bug")


def insert(tx):
    tx.execute(sqlalchemy.text("INSERT INTO payments (amount) VALUES (30)"))
    return {"paid": 30}


def test_session(database):
    from sqlalchemy.orm import Session

    engine = sqlalchemy.create_engine(f"postgresql://{os.environ.get('PGUSER', 'postgres')}@/{database.database}")
    key = {"user": "anna", "id": str(uuid.uuid4()), "params": {"a:b": "%s ?"}}
    with Session(engine) as session, session.begin():
        with pytest.raises(KeyError):
            database.idem.within(session, bug, **key)
        assert not database.idem.within(session, insert, **key).replayed
        assert database.idem.within(session, insert, **key).replayed
    assert database.payments() == 1
    with engine.begin() as connection:
        assert database.idem.within(connection, insert, **key).value == {"paid": 30}
    engine.dispose()


def test_async_session(database):
    from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

    async def main():
        url = f"postgresql+asyncpg://{os.environ.get('PGUSER', 'postgres')}@/{database.database}?host={os.environ['PGHOST']}"
        engine = create_async_engine(url)
        idem = idem_pg.AsyncIdem(lambda: None)
        key = {"user": "anna", "id": str(uuid.uuid4()), "params": [1]}

        async def insert(tx):
            await tx.execute(sqlalchemy.text("INSERT INTO payments (amount) VALUES (30)"))
            return {"paid": 30}

        async def bug(tx):
            await insert(tx)
            raise KeyError("bug")

        async with AsyncSession(engine) as session, session.begin():
            with pytest.raises(KeyError):
                await idem.within(session, bug, **key)
            assert not (await idem.within(session, insert, **key)).replayed
            assert (await idem.within(session, insert, **key)).replayed
            with pytest.raises(idem_pg.Mismatch):
                await idem.within(session, insert, **{**key, "params": [2]})
        await engine.dispose()

    asyncio.run(main())
    assert database.payments() == 1


DJANGO = """
import os, sys
sys.path.insert(0, "src")
from django.conf import settings
settings.configure(DATABASES={"default": {"ENGINE": "django.db.backends.postgresql", "NAME": sys.argv[1],
                   "USER": os.environ.get("PGUSER", "postgres")}})
import django
django.setup()
from django.db import connection, transaction
import idem_pg

def insert(tx):
    with tx.cursor() as cursor:
        cursor.execute("INSERT INTO payments (amount) VALUES (30)")
    return {"paid": 30}

def bug(tx):
    insert(tx)
    raise KeyError("bug")

idem = idem_pg.Idem(lambda: None)
with transaction.atomic():
    try:
        idem.within(connection, bug, user=1, id=sys.argv[2])
    except KeyError:
        pass
    print([idem.within(connection, insert, user=1, id=sys.argv[2]).replayed for _ in range(2)])
"""


def test_django(database):
    out = subprocess.run([sys.executable, "-c", DJANGO, database.database, str(uuid.uuid4())], capture_output=True, text=True,
                         cwd=os.path.join(os.path.dirname(__file__), ".."))  # fmt: skip
    assert out.stdout == "[False, True]\n", out.stderr
    assert database.payments() == 1
