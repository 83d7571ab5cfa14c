"""python -m idem_pg install | check | sql: puts the portable edition of idem into a database, and looks at it."""

import argparse
import sys
from collections.abc import Iterator, Sequence
from importlib.resources import files
from typing import Any

from . import __version__
from .values import quoted


# Whoever may make objects in a schema of the search_path can plant an operator there, which any = or LIKE may then call.
PINNED = "search_path = pg_catalog, pg_temp;"


def stranger(schema: str) -> str:
    """Who owns idem, or a part of it, where its code would get rights that the owner has not."""
    return f"""(SELECT min(r.rolname::text) FROM pg_roles AS r, pg_roles AS me, pg_namespace AS n
    WHERE me.rolname IN (current_user, session_user) AND (me.rolsuper OR me.rolcreaterole) AND n.nspname = {quoted(schema, "'")} AND NOT r.rolsuper
    AND r.oid <> me.oid AND r.oid IN (SELECT proowner FROM pg_proc WHERE pronamespace = n.oid AND proname ^@ 'idem'
        UNION SELECT relowner FROM pg_class WHERE relnamespace = n.oid AND relname ^@ 'idem'
        UNION SELECT CASE n.nspowner WHEN 'pg_database_owner'::regrole THEN datdba ELSE n.nspowner END
            FROM pg_database WHERE datname = current_database()))"""


def sql(schema: str = "idem", grant: Sequence[str] = ()) -> str:
    """The portable edition as SQL for one transaction: installs or upgrades it; roles in `grant` may use it then."""
    name, mark, text = quoted(schema), "'", files(__package__ or "idem_pg").joinpath("idem-portable-plain.sql").read_text()
    grants = "".join(f"SELECT {name}.idem_grant({quoted(role, mark)}::regrole, 'app'::text);\n" for role in grant)
    return f"""SELECT pg_catalog.set_config('idem_pg.path', pg_catalog.current_setting('search_path'), true);
SET LOCAL {PINNED}
DO $idem$ BEGIN IF NOT EXISTS (SELECT FROM pg_namespace WHERE nspname = {quoted(schema, mark)}) THEN CREATE SCHEMA {name}; END IF; END $idem$;
SET LOCAL search_path = {name};
{text.rstrip().rstrip(";")};
SET LOCAL {PINNED}
DO $idem$ DECLARE other constant text := {stranger(schema)}; BEGIN IF other IS NOT NULL THEN
	RAISE 'idem or its schema belongs to "%": install as that role, or its code would run with your rights', other USING ERRCODE = '55000';
END IF; END $idem$;
{grants}SELECT pg_catalog.set_config('search_path', pg_catalog.current_setting('idem_pg.path'), true);
"""


def migrate(connection: Any, schema: str = "idem", grant: Sequence[str] = ()) -> Any:
    """Runs `sql` on a connection of psycopg or asyncpg, in your transaction if there is one; await it in asyncio."""
    return connection.execute(sql(schema, grant))


FOUND = """SELECT has_schema_privilege(n.oid, 'USAGE') AND has_function_privilege(p.oid, 'EXECUTE'), current_user::text,
    (SELECT extname::text FROM pg_extension AS e JOIN pg_depend AS d ON d.refobjid = e.oid WHERE d.objid = p.oid AND deptype = 'e')
    FROM pg_proc AS p JOIN pg_namespace AS n ON n.oid = pronamespace
    WHERE nspname = %s AND proname = 'idem_try_claim' ORDER BY p.oid LIMIT 1"""


def look(connection: Any, schema: str) -> Iterator[tuple[bool | None, str]]:
    """What `check` tells: whether it is well, None for what is only to be known, and a sentence."""
    import psycopg
    info, name, version = connection.info, quoted(schema), connection.info.server_version // 10000
    yield version >= 15, f"database: {info.dbname} at {info.host}, port {info.port}: PostgreSQL {version}; 15 or later is needed"
    connection.execute("SET " + PINNED)
    found = connection.execute(FOUND, (schema,)).fetchone()
    owner, = connection.execute("SELECT " + stranger(schema)).fetchone()
    if found is None or owner:
        yield False, (f"owner: idem or its schema belongs to {owner}: check as that role, or its code would run with your rights"
                      if found else f"idem: not in schema {schema}: run python -m idem_pg install --schema {schema} --grant ROLE")
        return
    granted, role, extension = found
    yield True, f"edition: {'C' if extension == 'idem' else 'portable'}"
    grant = f"not use it; let idem's owner run SELECT {name}.idem_grant('{role}', 'app')"
    yield granted, f"rights: role {role} may {'use it' if granted else grant}"
    try:
        installed = connection.execute(f"SELECT {name}.idem_version()").fetchone()[0].split("+")[0]
        yield installed == __version__, f"version: {installed}, client {__version__}; both should be the same"
        cleaning, late = connection.execute(
            f"SELECT cleaning, oldest_expired_age > '1 day' FROM {name}.idem_stat_cleanup").fetchone()
    except psycopg.errors.InsufficientPrivilege:
        yield None, "version, cleaning: only idem's owner and operators may look; run this check as one of them"
        return
    except psycopg.errors.ObjectNotInPrerequisiteState as error:
        cleaning, late = str(error.diag.message_primary), False
    how = f"; let a timer run CALL {name}.idem_cleanup_all(), as idem's owner or an operator"
    how += ", or preload idem, with this database in idem.cleanup_databases" * (extension == "idem")
    well = cleaning.startswith(("worker", "sessions"))
    yield well or (False if late else None), f"cleaning: {cleaning}" + ("" if well else how)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m idem_pg", description="The database is that of --dsn, or of PGHOST, PGDATABASE, ...")
    parser.add_argument("command", choices=("install", "check", "sql"))
    parser.add_argument("--schema", default="idem")
    parser.add_argument("--grant", action="append", default=[], metavar="ROLE", help="may claim and settle requests")
    parser.add_argument("--dsn", default="")
    options = parser.parse_args(arguments)
    if options.command == "sql":
        print(sql(options.schema, options.grant))
        return 0
    import psycopg
    marks = {True: "ok  ", False: "MEND", None: "note"}
    try:
        with psycopg.connect(options.dsn, autocommit=options.command == "check") as connection:
            if options.command == "install":
                migrate(connection, options.schema, options.grant)
            done: list[tuple[bool | None, str]] = [(True, f"idem {__version__} is in schema {options.schema}")]
            found = list(look(connection, options.schema)) if options.command == "check" else done
    except psycopg.Error as error:
        denied = isinstance(error, psycopg.errors.InsufficientPrivilege) or "psql -v" in str(error)  # the server's hint
        print(f"{error.diag.message_primary}: run it as the owner of the database, or as a role with CREATE on it" if denied else error, file=sys.stderr)
        return 2
    print(*(f"{marks[well]} {sentence}" for well, sentence in found), sep="\n")
    return int(any(well is False for well, _ in found))


if __name__ == "__main__":
    sys.exit(main())
