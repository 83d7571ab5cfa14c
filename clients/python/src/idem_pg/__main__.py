"""python -m idem_pg install | check | sql: puts the portable edition of idem into a database, and looks at it."""

import argparse
import sys
from collections.abc import Iterator, Sequence
from importlib.resources import files
from typing import Any

from . import __version__


def sql(schema: str = "idem", grant: Sequence[str] = ()) -> str:
    """The portable edition as SQL for one transaction: installs or upgrades it; roles in `grant` may use it then."""
    name, quoted = (q + schema.replace(q, q + q) + q for q in "\"'")
    grants = "".join("SELECT {}.idem_grant('{}', 'app');\n".format(name, role.replace("'", "''")) for role in grant)
    text = files(__package__ or "idem_pg").joinpath("idem-portable-plain.sql").read_text()
    return f"""DO $$ BEGIN
	IF NOT EXISTS (SELECT FROM pg_catalog.pg_namespace WHERE nspname = {quoted}) THEN
		CREATE SCHEMA {name};
	END IF;
END $$;
SELECT pg_catalog.set_config('idem_pg.path', pg_catalog.current_setting('search_path'), true);
SET LOCAL search_path = {name};
{text.rstrip().rstrip(";")};
{grants}SELECT pg_catalog.set_config('search_path', pg_catalog.current_setting('idem_pg.path'), true);
"""


def migrate(connection: Any, schema: str = "idem", grant: Sequence[str] = ()) -> Any:
    """Runs `sql` on a connection of psycopg or asyncpg, in your transaction if there is one; await it in asyncio."""
    return connection.execute(sql(schema, grant))


def look(connection: Any, schema: str) -> Iterator[tuple[bool, str]]:
    """What `check` tells: whether it is well, and a sentence."""
    import psycopg
    def value(text: str, *args: Any) -> Any:
        row = connection.execute(text.replace("{schema}", '"' + schema.replace('"', '""') + '"'), args).fetchone()
        return row[0] if row else None
    version = int(value("SHOW server_version_num"))
    yield version >= 150000, f"server: PostgreSQL {version // 10000}; 15 or later is needed"
    function = value("SELECT p.oid FROM pg_proc AS p JOIN pg_namespace AS n ON n.oid = pronamespace WHERE nspname = %s"
                     " AND proname = 'idem_try_claim' ORDER BY p.oid LIMIT 1", schema)  # fmt: skip
    if function is None:
        yield False, f"idem: not in schema {schema}: run python -m idem_pg install --schema {schema} --grant ROLE"
        return
    extension = value(
        "SELECT extname::text FROM pg_extension JOIN pg_depend ON refobjid = pg_extension.oid WHERE objid = %s"
        " AND deptype = 'e'", function)  # fmt: skip
    yield True, f"edition: {'C' if extension == 'idem' else 'portable'}"
    role, granted = value("SELECT current_user::text"), value(
        "SELECT has_schema_privilege(%s, 'USAGE') AND has_function_privilege(%s::oid, 'EXECUTE')", schema, function)
    grant = f"not use it; let idem's owner run SELECT {schema}.idem_grant('{role}', 'app')"
    yield granted, f"rights: role {role} may {'use it' if granted else grant}"
    inside = value("SELECT %s = ANY (current_schemas(false)::text[])", schema)
    yield True, f"search_path: has {'' if inside else 'not '}{schema}; this client needs it not"
    try:
        installed = value("SELECT {schema}.idem_version()").split("+")[0]
        yield installed == __version__, f"version: {installed}, client {__version__}; both should be the same"
        cleaning = value("SELECT cleaning FROM {schema}.idem_stat_cleanup")
        how = "preload idem, or call idem_start_worker()" if extension == "idem" else "call idem_cleanup_all() from a timer"
        well = cleaning.startswith(("worker", "sessions"))
        yield well, f"cleaning: {cleaning}" + ("" if well else f"; {how}")
    except psycopg.errors.InsufficientPrivilege:
        yield True, "version, cleaning: only idem's owner and operators may look; run this check as one of them"
    except psycopg.errors.ObjectNotInPrerequisiteState as error:
        yield False, f"cleaning: {error.diag.message_primary}: preload idem"


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
    try:
        with psycopg.connect(options.dsn, autocommit=options.command == "check") as connection:
            if options.command == "install":
                migrate(connection, options.schema, options.grant)
                found = [(True, f"idem {__version__} is in schema {options.schema}")]
            else:
                found = list(look(connection, options.schema))
    except psycopg.Error as error:
        print(error, file=sys.stderr)
        return 2
    print(*(f"{'ok  ' if well else 'MEND'} {sentence}" for well, sentence in found), sep="\n")
    return int(not all(well for well, _ in found))


if __name__ == "__main__":
    sys.exit(main())
