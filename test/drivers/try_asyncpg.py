"""What doc/drivers.md says of asyncpg. Called by test/drivers/try."""

import asyncio
import json
import os
import sys
import uuid

import asyncpg

import pay_asyncpg
from report import error, is_, ok

REQUEST = uuid.UUID('0193a1f2-7d43-7c5e-9a10-5f7c2e1b8a01')


def connect():
    return asyncpg.connect(statement_cache_size=0) if os.environ.get('IDEM_POOLED') else asyncpg.connect()


async def pay(account, request, amount):
    connection = await connect()
    status, body = await pay_asyncpg.pay(connection, int(account), request, int(amount))
    print(status, json.dumps(body))
    await connection.close()


async def repeat():
    connection = await connect()
    for _ in range(12):
        print((await pay_asyncpg.pay(connection, 2, uuid.uuid4(), 1))[0])
    await connection.close()


async def failure(connection, query, *parameters):
    """What the query raises, or None."""
    try:
        await connection.fetchval(query, *parameters)
    except Exception as raised:
        return raised


async def message_of(connection, query, *parameters):
    transaction = connection.transaction()
    await transaction.start()
    raised = await failure(connection, query, *parameters)
    await transaction.rollback()
    return str(raised)


async def casts(connection):
    number = await message_of(connection, 'SELECT idem_claim($1, $2)', 7, 'x')
    is_('a number for $1::text', await message_of(connection, 'SELECT idem_claim($1::text, $2)', 7, 'x'), number)
    error('`7`, for `$1` and for `$1::text`', number)
    error('`uuid.UUID(...)`', await message_of(connection, 'SELECT idem_claim($1, $2)', '7', REQUEST))
    error("`'0'`, for the wait", await message_of(connection, 'SELECT idem_claim($1, $2, wait => $3)', '7', 'x', '0'))
    error("`{'paid': 30}`", await message_of(connection, 'SELECT idem_complete($1)', {'paid': 30}))
    claims = await connection.fetch('SELECT outcome FROM idem_claim_many($1::int[]::text[], $2::uuid[]::text[], '
                                    'wait => $3::text::interval)', [7, 7], [REQUEST, str(REQUEST).upper()], '0')
    is_('casts of a batch, and one spelling of a uuid', [claim['outcome'] for claim in claims], ['claimed', 'completed'])


async def codes(connection):
    raised = await failure(connection, "SELECT idem_claim('', 'x')")
    is_('class of an ID code', type(raised), asyncpg.UnknownPostgresError)
    ok('which is "fatal"', isinstance(raised, asyncpg.FatalPostgresError))
    is_('the code', raised.sqlstate, 'ID400')
    ok('its detail', raised.detail)
    is_('the connection is fine', (connection.is_closed(), await connection.fetchval('SELECT 1')), (False, 1))
    for code, expected in ('40001', asyncpg.SerializationError), ('40P01', asyncpg.DeadlockDetectedError):
        raised = await failure(connection, f"SELECT raise_again('{code}')")
        is_(f'class of {code}', (type(raised), raised.sqlstate), (expected, code))


async def autocommit(connection):
    await connection.fetchval("SELECT idem_claim('2', 'alone')")
    other = await connect()
    is_('a claim alone commits', await other.fetchval("SELECT idem_status('2', 'alone')"), 'completed')
    await other.close()


async def pipelines(connection):
    answers = await asyncio.gather(connection.fetch('SELECT pg_sleep(0.1)'), connection.fetch('SELECT 1'), return_exceptions=True)
    is_('a second statement on a busy connection', [type(answer) for answer in answers], [list, asyncpg.InterfaceError])
    for _ in range(2):
        answer = await connection.executemany('SELECT idem_claim($1, $2)', [('2', 'many'), ('2', 'many')])
        is_('executemany throws answers away', answer, None)


async def commits(connection):
    transaction = connection.transaction()
    await transaction.start()
    is_('a statement fails', type(await failure(connection, 'SELECT 1 / 0')), asyncpg.DivisionByZeroError)
    is_('COMMIT after an error is not an error', await transaction.commit(), None)


async def idle(connection):
    other = await connect()
    await connection.fetchval('SELECT pg_terminate_backend($1, 60000)', other.get_server_pid())
    is_('a connection that was lost before', (await pay_asyncpg.pay(other, 2, uuid.uuid4(), 1))[0], 503)


async def statements():
    connection = await connect()
    for part in casts, codes, autocommit, pipelines, commits, idle:
        await part(connection)
    await connection.close()


if __name__ == '__main__':
    asyncio.run(globals()[sys.argv[1]](*sys.argv[2:]))
