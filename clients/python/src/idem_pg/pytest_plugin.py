"""Fixtures of pytest for code that uses idem_pg, against a database that is given."""

import asyncio
import concurrent.futures
import os
from collections.abc import Callable
from typing import Any

import pytest

from .__main__ import migrate
from .client import Methods
from .core import Answer, Request
from .drivers import Steps
from .values import dumps


class Faults:
    """Faults for the next calls of an Idem or AsyncIdem.  With AsyncIdem, `hold`, `lapse` and `executed_once` are awaited."""

    def __init__(self, idem: Methods) -> None:
        self._core, self._next = idem._core, list[Any]()
        self._finish = self._core.driver.finish
        self._core.driver.finish = self._faulty

    def _faulty(self, tx: Any, sql: str, args: Any) -> Steps[Any]:
        late, fault = self._next.pop(0) if self._next else (False, None)
        row = None if fault and not late else (yield from self._finish(tx, sql, args))
        if fault:
            raise fault
        return row

    def lose_commit(self, when: str) -> None:
        """The next COMMIT loses its connection: 'before' the server has executed it, or 'after'."""
        self.fail("08006", when == "after")

    def fail(self, sqlstate: str, late: bool = False) -> None:
        """The next COMMIT fails with this SQLSTATE; late: when the server has executed it."""
        error = ConnectionResetError(f"made up: {sqlstate}")
        setattr(error, "sqlstate", sqlstate)
        self._next.append((late, error))

    def lapse(self, user: str, id: str, scope: str = "", progress: Any = None) -> Any:
        """Leaves a lease of this request that has lapsed, as a holder that died does."""
        return self._core.run(self._lease(Request(user, id, scope), 0.001, progress))

    def hold(self, user: str, id: str, scope: str = "", seconds: float = 3600) -> Any:
        """Holds this request, by a lease of another holder."""
        return self._core.run(self._lease(Request(user, id, scope), seconds, None))

    def _lease(self, request: Request, length: float, progress: Any) -> Steps[None]:
        yield from self._core.statement(request, self._core.LEASE, (*request.claim(), length, dumps(progress)), writes=True)
        if length < 1:
            yield self._core.driver.sleep(length * 10)

    def executed_once(self, call: Callable[[], Any], concurrent_calls: int = 20) -> Any:
        """Makes the calls, each of which returns an Answer, at the same time; returns their value.  AssertionError if
        not exactly one of them was an execution, or if their values differ."""
        async def gathered() -> Any:
            return self._same(await asyncio.gather(*(call() for _ in range(concurrent_calls))))
        if self._core.asynchronous:
            return gathered()
        with concurrent.futures.ThreadPoolExecutor(concurrent_calls) as threads:
            return self._same([f.result() for f in [threads.submit(call) for _ in range(concurrent_calls)]])

    def _same(self, answers: list[Answer]) -> Any:
        assert [answer.replayed for answer in answers].count(False) == 1, "not exactly one call was an execution"
        assert all(answer.value == answers[0].value for answer in answers), "the values differ"
        return answers[0].value


@pytest.fixture(scope="session")
def idem_dsn() -> str:
    """The database of IDEM_TEST_DSN, with idem in the schema idem.  Skips the test if the variable is not set."""
    dsn = os.environ.get("IDEM_TEST_DSN")
    if not dsn:
        pytest.skip("set IDEM_TEST_DSN to a database for tests")
    import psycopg
    with psycopg.connect(dsn) as connection:
        if connection.execute("SELECT to_regproc('idem.idem_version')").fetchone() == (None,):
            migrate(connection)
    return dsn


@pytest.fixture
def idem_faults() -> type[Faults]:
    """idem_faults(idem).lose_commit("after"), for example: see Faults."""
    return Faults
