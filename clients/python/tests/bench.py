"""The rate of once beside the same transaction by hand over the same driver: PGHOST, PGUSER, PGDATABASE.

	bench.py [psycopg | psycopg_async | asyncpg] [clients] [seconds of a round] [rounds]

Rounds alternate, so that both see the same noise; the ratio is of the medians.
"""

import asyncio
import json
import os
import statistics
import sys
import threading
import time
import uuid

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "src"))
import idem_pg

DRIVER = sys.argv[1] if len(sys.argv) > 1 else "psycopg"
CLIENTS, SECONDS, ROUNDS = (int(a) for a in [*sys.argv[2:], *["8", "3", "5"][max(len(sys.argv) - 2, 0):]])
CLAIM = ("SELECT outcome::text, result, expires_at FROM idem.idem_try_claim({}::text, {}::text, {}::text,"
         " idem.idem_fingerprint({}::jsonb), '0')")
WORK = "INSERT INTO bench (amount) VALUES ({})"
COMPLETE = "SELECT idem.idem_complete({}::jsonb)"
TABLE = "CREATE TABLE IF NOT EXISTS bench (id bigserial PRIMARY KEY, amount int)"


def marked(sql):
    for n in range(sql.count("{}")):
        sql = sql.replace("{}", f"${n + 1}" if DRIVER == "asyncpg" else "%s", 1)
    return sql


CLAIM, WORK, COMPLETE = marked(CLAIM), marked(WORK), marked(COMPLETE)


def by_hand(pool, key):
    with pool.connection() as tx:
        with tx.transaction():
            row = tx.execute(CLAIM, ("anna", key, "bench", '{"amount": 30}')).fetchone()
            assert row[0] == "claimed"
            tx.execute(WORK, (30,))
            tx.execute(COMPLETE, (json.dumps({"paid": 30}),))


def work(tx):
    tx.execute(WORK, (30,))
    return {"paid": 30}


async def by_hand_async(pool, key):
    if DRIVER == "asyncpg":
        async with pool.acquire() as tx:
            async with tx.transaction():
                row = await tx.fetchrow(CLAIM, "anna", key, "bench", '{"amount": 30}')
                assert row[0] == "claimed"
                await tx.execute(WORK, 30)
                await tx.execute(COMPLETE, json.dumps({"paid": 30}))
        return
    async with pool.connection() as tx:
        async with tx.transaction():
            row = await (await tx.execute(CLAIM, ("anna", key, "bench", '{"amount": 30}'))).fetchone()
            assert row[0] == "claimed"
            await tx.execute(WORK, (30,))
            await tx.execute(COMPLETE, (json.dumps({"paid": 30}),))


async def work_async(tx):
    await (tx.execute(WORK, 30) if DRIVER == "asyncpg" else tx.execute(WORK, (30,)))
    return {"paid": 30}


def request():
    return {"user": "anna", "id": str(uuid.uuid4()), "scope": "bench", "params": {"amount": 30}}


def blocking():
    import psycopg_pool

    with psycopg_pool.ConnectionPool("", min_size=CLIENTS, max_size=CLIENTS, kwargs={"autocommit": True}) as pool:
        pool.wait()
        with pool.connection() as one:
            one.execute(TABLE)
        idem = idem_pg.Idem(pool)

        def round_of(call):
            end, counts = time.monotonic() + SECONDS, []

            def client():
                n = 0
                while time.monotonic() < end:
                    call()
                    n += 1
                counts.append(n)

            threads = [threading.Thread(target=client) for _ in range(CLIENTS)]
            [t.start() for t in threads]
            [t.join() for t in threads]
            return sum(counts) / SECONDS

        yield from rounds(round_of, lambda: by_hand(pool, str(uuid.uuid4())), lambda: idem.once(work, **request()))


def rounds(round_of, hand, once):
    for _ in range(ROUNDS):
        yield round_of(hand), round_of(once)


async def asynchronous():
    if DRIVER == "asyncpg":
        import asyncpg

        pool = await asyncpg.create_pool(min_size=CLIENTS, max_size=CLIENTS)
        await pool.execute(TABLE)
    else:
        import psycopg_pool

        pool = psycopg_pool.AsyncConnectionPool("", min_size=CLIENTS, max_size=CLIENTS, kwargs={"autocommit": True}, open=False)
        await pool.open(wait=True)
        async with pool.connection() as one:
            await one.execute(TABLE)
    idem = idem_pg.AsyncIdem(pool)

    async def round_of(call):
        end = time.monotonic() + SECONDS

        async def client():
            n = 0
            while time.monotonic() < end:
                await call()
                n += 1
            return n

        return sum(await asyncio.gather(*(client() for _ in range(CLIENTS)))) / SECONDS

    found = []
    for _ in range(ROUNDS):
        hand = await round_of(lambda: by_hand_async(pool, str(uuid.uuid4())))
        found.append((hand, await round_of(lambda: idem.once(work_async, **request()))))
    await pool.close()
    return found


found = list(blocking()) if DRIVER == "psycopg" else asyncio.run(asynchronous())
hand, once = (statistics.median(rates) for rates in zip(*found))
print(f"{DRIVER}: by hand {hand:.0f}/s, once {once:.0f}/s, {once / hand:.2f}")
