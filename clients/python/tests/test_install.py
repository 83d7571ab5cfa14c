"""install, check, sql, migrate; the fixtures for users; the package in an empty environment."""

import asyncio
import json
import os
import re
import subprocess
import sys
import venv

import psycopg
import psycopg_pool
import pytest
from conftest import DATABASES

import idem_pg
from idem_pg import __main__ as tool
from idem_pg.pytest_plugin import Faults

HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
needs_sql = pytest.mark.skipif(
    not os.path.exists(os.path.join(HERE, "src/idem_pg/idem-portable-plain.sql")), reason="run make clients first")


@pytest.fixture
def empty(monkeypatch):
    with psycopg.connect(dbname=DATABASES[0], autocommit=True) as connection:
        connection.execute("DROP DATABASE IF EXISTS idem_python_empty WITH (FORCE)")
        connection.execute("CREATE DATABASE idem_python_empty")
        monkeypatch.setenv("PGDATABASE", "idem_python_empty")
        yield
        connection.execute("DROP DATABASE idem_python_empty WITH (FORCE)")


@needs_sql
def test_install_and_check(empty, capsys):
    assert tool.main(["check", "--schema", "my idem"]) == 1
    lines = capsys.readouterr().out
    assert "MEND idem: not in schema my idem" in lines
    assert lines.startswith(f"ok   database: idem_python_empty at {os.environ['PGHOST']}, port ")
    for _ in range(2):
        assert tool.main(["install", "--schema", "my idem", "--grant", "pg_read_all_data"]) == 0
    capsys.readouterr()
    assert tool.main(["check", "--schema", "my idem"]) == 0
    lines = capsys.readouterr().out
    assert "\nnote cleaning: nobody" in lines and 'CALL "my idem".idem_cleanup_all(), as idem\'s owner or an operator' in lines
    assert "ok   edition: portable" in lines and "ok   version: 1.0.0" in lines and "ok   rights" in lines
    with psycopg.connect(autocommit=True) as connection:
        connection.execute("""SELECT "my idem".idem_claim('anna', 'old');
            UPDATE "my idem".idem_claims SET expires_at = now() - interval '2 days'""")
        assert tool.main(["check", "--schema", "my idem"]) == 1 and "\nMEND cleaning: nobody" in capsys.readouterr().out
        connection.execute('CALL "my idem".idem_cleanup_all()')
    with psycopg.connect() as connection:
        before = connection.execute("SHOW search_path").fetchone()
        tool.migrate(connection, "my idem", ["pg_monitor"])
        assert connection.execute("SHOW search_path").fetchone() == before
    assert idem_pg.Idem(psycopg.connect, "my idem").once(lambda tx: 1, user="anna", id="1").value == 1


@needs_sql
def test_install_without_rights(empty, monkeypatch, capsys):
    with psycopg.connect(autocommit=True) as connection:
        connection.execute("CREATE ROLE idem_stranger LOGIN; CREATE SCHEMA taken")
        monkeypatch.setenv("PGUSER", "idem_stranger")
        try:
            for schema in ("idem", "taken"):
                assert tool.main(["install", "--schema", schema]) == 2
                told = capsys.readouterr().err
                assert "run it as the owner of the database, or as a role with CREATE on it" in told and "psql" not in told
        finally:
            connection.execute("DROP ROLE idem_stranger")


def test_a_superuser_runs_nobodys_code(empty, capsys, monkeypatch):
    with psycopg.connect(autocommit=True) as connection:
        connection.execute("CREATE TABLE run (n int); GRANT INSERT ON run TO PUBLIC; CREATE ROLE idem_stranger")
        try:
            connection.execute("""CREATE SCHEMA idem AUTHORIZATION idem_stranger; SET ROLE idem_stranger;
                CREATE FUNCTION idem.idem_try_claim(user_id text, request_id text) RETURNS int LANGUAGE sql RETURN 1;
                CREATE FUNCTION idem.idem_version() RETURNS text LANGUAGE plpgsql AS
                    $$ BEGIN INSERT INTO public.run SELECT 1; RETURN '1.0.0'; END $$;
                CREATE VIEW idem.idem_stat_cleanup AS SELECT idem.idem_version() AS cleaning, NULL::interval AS oldest_expired_age;
                RESET ROLE; GRANT CREATE ON SCHEMA public TO idem_stranger; SET ROLE idem_stranger;
                CREATE FUNCTION public.spy(name, name) RETURNS bool COST 0.000001 LANGUAGE plpgsql AS
                    $$ BEGIN INSERT INTO public.run SELECT 2; RETURN true; END $$;
                CREATE OPERATOR public.~~ (LEFTARG = name, RIGHTARG = name, FUNCTION = public.spy);
                CREATE FUNCTION public.spy(oid, regrole) RETURNS bool COST 0.000001 LANGUAGE plpgsql AS
                    $$ BEGIN INSERT INTO public.run SELECT 3; RETURN true; END $$;
                CREATE OPERATOR public.= (LEFTARG = oid, RIGHTARG = regrole, FUNCTION = public.spy);
                CREATE VIEW public.pg_roles AS SELECT * FROM pg_catalog.pg_roles WHERE public.spy('', '');
                RESET ROLE""")
            monkeypatch.setenv("PGOPTIONS", "-c search_path=public,pg_catalog")
            for owner in "SCHEMA idem", "FUNCTION idem.idem_version", "VIEW idem.idem_stat_cleanup", None:
                assert tool.main(["check"]) == (owner is not None)
                refused = "MEND owner: idem or its schema belongs to idem_stranger: check as that role" in capsys.readouterr().out
                rows = connection.execute("SELECT count(*) FROM run").fetchone()[0]
                assert (refused, rows > 0) == (owner is not None, owner is None)
                if owner == "SCHEMA idem":
                    connection.execute("ALTER FUNCTION idem.idem_try_claim OWNER TO CURRENT_USER")
                if owner:
                    connection.execute(f"ALTER {owner} OWNER TO CURRENT_USER")
        finally:
            connection.execute("RESET ROLE; DROP OWNED BY idem_stranger; DROP ROLE idem_stranger")


def test_check_of_the_database_of_the_tests(monkeypatch, capsys):
    for database in DATABASES:
        assert tool.main(["check", "--dsn", f"dbname={database}"]) in (0, 1)
        assert "ok   version: 1.0.0, client 1.0.0" in capsys.readouterr().out
    assert tool.main(["check", "--dsn", "host=/nowhere"]) == 2


@pytest.mark.parametrize("database", DATABASES)
def test_faults(database):
    with psycopg_pool.ConnectionPool(f"dbname={database}", min_size=1, max_size=4) as pool:
        idem = idem_pg.Idem(pool)
        faults = Faults(idem)
        key = os.urandom(8).hex()

        def once(id):
            return idem.once(lambda tx: 5, user="anna", id=key + id, wait=5)

        faults.lose_commit("before")
        assert not once("a").replayed
        faults.lose_commit("after")
        assert once("b").replayed
        faults.fail("40001")
        assert not once("c").replayed
        assert faults.executed_once(lambda: once("d")) == 5
        faults.hold("anna", key + "e")
        with pytest.raises(idem_pg.InProgress):
            idem.once(lambda tx: 5, user="anna", id=key + "e")
        faults.lapse("anna", key + "f", progress={"step": 1})
        assert idem.lease(lambda held: held.previous, user="anna", id=key + "f").value == {"step": 1}


@needs_sql
def test_programs_of_the_readme(empty, capsys):
    assert tool.main(["install"]) == 0
    with open(os.path.join(HERE, "README.md")) as readme:
        programs = re.findall(r"```python\n(.*?)```", readme.read(), re.DOTALL)
    first, service = (text.replace("dbname=shop", "dbname=idem_python_empty") for text in programs if "psycopg_pool" in text)
    names = {}
    exec(first, names)
    names["pool"].close()
    assert re.search("replayed=False.*\n.*replayed=True", capsys.readouterr().out)
    exec(service, names)
    headers = [(b"x-user", b"anna"), (b"content-type", b"application/json"), (b"idempotency-key", b'"1"')]

    async def post():
        sent = []

        async def receive():
            return {"type": "http.request", "body": b'{"amount": 30}'}

        async def send(message):
            sent.append(message)

        await names["app"]({"type": "http", "method": "POST", "path": "/payments", "query_string": b"", "headers": headers}, receive, send)
        return sent[0]["status"], dict(sent[0]["headers"]).get(b"idempotent-replayed"), json.loads(sent[1]["body"])

    async def served():
        async with names["lifespan"](names["app"]):
            return [await post(), await post()]

    assert asyncio.run(served()) == [(201, None, {"paid": 30}), (201, b"true", {"paid": 30})]


@needs_sql
def test_wheel_in_an_empty_environment(tmp_path):
    source = tmp_path / "source"
    subprocess.run(["cp", "-r", HERE, str(source)], check=True)
    subprocess.run([sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(source)],
                   check=True, capture_output=True)  # fmt: skip
    (wheel,) = tmp_path.glob("idem_pg-1.0.0-*.whl")
    venv.create(tmp_path / "empty", with_pip=True)
    python = str(tmp_path / "empty/bin/python")
    subprocess.run([python, "-m", "pip", "install", "-q", "--no-index", str(wheel)], check=True)
    code = "import idem_pg, importlib.resources as r; assert (r.files('idem_pg') / 'py.typed').is_file()"
    subprocess.run([python, "-c", code], check=True, cwd=tmp_path)
    text = subprocess.run([python, "-m", "idem_pg", "sql"], check=True, cwd=tmp_path, capture_output=True, text=True).stdout
    assert "idem_try_claim" in text


@needs_sql
def test_install_by_a_superuser_runs_no_function_of_anothers_idem(empty, capsys, monkeypatch):
    with psycopg.connect(autocommit=True) as connection:
        connection.execute("""CREATE TABLE run (n int); GRANT INSERT ON run TO PUBLIC;
            CREATE ROLE idem_stranger LOGIN; CREATE SCHEMA idem AUTHORIZATION idem_stranger""")
        try:
            with monkeypatch.context() as theirs:
                theirs.setenv("PGUSER", "idem_stranger")
                assert tool.main(["install", "--grant", "idem_stranger"]) == 0
            connection.execute("""SET ROLE idem_stranger; CREATE OR REPLACE FUNCTION
                idem.idem_grant(role regrole, privileges text DEFAULT 'app') RETURNS void LANGUAGE sql
                AS 'INSERT INTO public.run VALUES (4)'; RESET ROLE""")
            assert tool.main(["install", "--grant", "idem_stranger"]) == 2
            assert 'belongs to "idem_stranger": install as that role' in capsys.readouterr().err
            # The owner of the database can give a superuser's session another role, from which its code comes back.
            connection.execute("ALTER DATABASE idem_python_empty SET role = idem_stranger")
            for command in "install", "check":
                assert tool.main([command]) != 0
                assert "belongs to" in "".join(capsys.readouterr())
            assert connection.execute("SELECT count(*) FROM run").fetchone()[0] == 0
        finally:
            connection.execute("RESET ROLE; DROP OWNED BY idem_stranger CASCADE; DROP ROLE idem_stranger")
