"""The workload of the reader's test, with asyncpg."""
import asyncio
import io

import asyncpg


async def main():
    db = await asyncpg.connect()
    await db.execute('SELECT 1')
    async with db.transaction():
        for n in range(8):
            await db.execute('INSERT INTO reader (n, t) VALUES ($1, $2)', n, 'x' * n)
        try:
            async with db.transaction():
                await db.fetchval('SELECT 1 / $1::int', 0)
        except asyncpg.DivisionByZeroError as error:
            print(error.sqlstate)
    await db.copy_records_to_table('reader', records=[(n, 'copied') for n in range(100)], columns=['n', 't'])
    out = io.BytesIO()
    await db.copy_from_table('reader', output=out)
    await db.executemany('INSERT INTO reader (n) VALUES ($1)', [(n,) for n in range(3)])
    print(out.getvalue().count(b'\n'), await db.fetchval('SELECT count(*) FROM reader'), len(await db.fetch('SELECT generate_series(1, $1::int)', 1000)))
    for table in 'conflict_a', 'conflict_b':
        try:
            async with db.transaction():
                await db.execute(f'INSERT INTO {table} (n) VALUES ($1)', 1)
                await db.fetchval(f'SELECT count(*) FROM {table}')
        except asyncpg.PostgresError as error:
            print(error.sqlstate)
        print(await db.fetchval(f'SELECT count(*) FROM {table}'))
    await db.close()


asyncio.run(main())
