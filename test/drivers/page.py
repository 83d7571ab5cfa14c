"""What doc/drivers.md has for the tests: its SQL, its programs, its tables; and the program of doc/leases.md."""

import pathlib
import re

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
PAGE = (REPOSITORY / 'doc' / 'drivers.md').read_text()
LEASES = (REPOSITORY / 'doc' / 'leases.md').read_text()


def sql(text=PAGE):
    return '\n'.join(re.findall(r'^```sql\n(.*?)^```$', text, re.M | re.S))


def programs():
    """Name of the file, from the first line of each block, and the block."""
    found = {}
    for block in re.findall(r'^```(?:python|java|javascript|go)\n(.*?)^```$', PAGE + LEASES, re.M | re.S):
        name = re.match(r'(?:#|//) (\S+)\n', block)[1]
        assert name not in found, name
        found[name] = block
    return found


def section(heading, text=PAGE):
    """The text below a heading, until the next one."""
    return re.search(rf'^## {re.escape(heading)}\n(.*?)(?=^## |\Z)', text, re.M | re.S)[1]


def table(text, title):
    """Rows of the table whose first column is called so: {first column: the others}."""
    rows = re.search(rf'^\| {re.escape(title)} .*\n\|[-|]+\n((?:\|.*\n)+)', text, re.M)[1]
    found = {}
    for row in rows.splitlines():
        first, *others = [cell.strip() for cell in row.strip('|').split(' | ')]
        assert first not in found, first
        found[first] = others
    return found
