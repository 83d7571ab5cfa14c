"""What doc/drivers.md says of psycopg 3, and its program for the client. Called by test/drivers/try.

usage: try_psycopg.py (psycopg | python) pay ACCOUNT REQUEST AMOUNT | psycopg (repeat | statements)
"""

import json
import os
import sys
import uuid

import psycopg
from psycopg import errors
from psycopg.types.json import Jsonb
from psycopg_pool import ConnectionPool

CLIENT, MODE = sys.argv[1] == 'python', sys.argv[2]
REQUEST = uuid.UUID('0193a1f2-7d43-7c5e-9a10-5f7c2e1b8a01')

if CLIENT:
    import idem_pg
    import pay_client
    pool, answer_of = pay_client.pool, lambda *request: pay_client.pay(*request).value
else:
    import pay_psycopg
    settings = dict(prepare_threshold=None) if os.environ.get('IDEM_POOLED') else {}
    pool = ConnectionPool(min_size=1, max_size=2, kwargs=settings, open=MODE != 'statements')
    def answer_of(*request):
        return pay_psycopg.pay(pool, *request)


def pay(account, request, amount):
    try:
        print(200, json.dumps(answer_of(int(account), uuid.UUID(request), int(amount))))
    except Exception as error:
        code = getattr(error, 'sqlstate', None) or ''
        if code[:2] != 'ID' and code != '40001':
            raise
        print(503 if code == '40001' else code[2:], error)


def repeat():
    for _ in range(12):
        answer_of(2, uuid.uuid4(), 1)
        print(200)


def is_(name, got, expected):
    print('is', name, repr(got), repr(expected), sep='\t', flush=True)


def failure(call, *arguments):
    """What the call raises, or None."""
    try:
        call(*arguments)
    except Exception as raised:
        return raised


def value(connection, query, *parameters):
    return connection.execute(query, parameters).fetchone()[0]


# Also prepared, in the binary format, and with parameters that the client puts into the statement
def casts(connection):
    with connection.transaction(force_rollback=True), psycopg.ClientCursor(connection) as client_side:
        claims = []
        for user, request in (7, REQUEST), ('7', REQUEST), (7, str(REQUEST)), ('7', str(REQUEST)):
            claims += connection.execute('SELECT idem_claim(%s, %s)', (user, request), prepare=True).fetchone()
        claims += connection.execute('SELECT idem_claim(%s, %s)', (7, REQUEST), binary=True).fetchone()
        claims += client_side.execute('SELECT idem_claim(%s, %s)', (7, REQUEST)).fetchone()
        claims += connection.execute('SELECT idem_claim(%s, %s::int::text)', ('7', 7)).fetchone()
        is_('ids of other types', claims, [True] + 5 * [False] + [True])
        is_('an interval', value(connection, "SELECT outcome FROM idem_claim_many(%s::int[]::text[], %s::uuid[]::text[], "
                                 'wait => %s::text::interval)', [7], [str(REQUEST).upper()], '0'), 'completed')
    is_('an integer for a request', str(failure(value, connection, 'SELECT idem_claim(%s, %s)', 7, 7)).splitlines()[0],
        'function idem_claim(smallint, smallint) does not exist')


def codes(connection):
    raised = failure(connection.execute, "SELECT idem_claim('', 'x')")
    is_('class and code of ID400', (type(raised), raised.sqlstate), (psycopg.DatabaseError, 'ID400'))


CALL = "SELECT idem_call(%s::int::text, %s::uuid::text, 'withdraw(int, bigint)', %s::jsonb, scope => 'pay', wait => '0')"


def pipelines(connection):
    def balance():
        return value(connection, 'SELECT balance FROM accounts WHERE id = 2')
    arguments, before = Jsonb({'account': 2, 'amount': 1}), balance()
    with connection.pipeline():
        answers = [connection.execute(CALL, (2, REQUEST, arguments)) for _ in range(2)]
        is_('idem_call in a pipeline', [answer.fetchone()[0] for answer in answers], [{'paid': 1}] * 2)
    for _ in range(2):
        with connection.pipeline(), connection.transaction():
            connection.execute("SELECT idem_claim('2', 'pipeline')")
            connection.execute('UPDATE accounts SET balance = balance - 1 WHERE id = 2')
    is_('pays once; a claim and its work in a pipeline pay twice', before - balance(), 1 + 2)


def autocommit(connection):
    other = psycopg.connect()
    other.execute('SELECT 1')
    with other.transaction():
        other.execute("SELECT idem_claim('2', 'savepoint')")
    other.close()
    is_('without autocommit, after another statement: not kept', value(connection, "SELECT idem_status('2', 'savepoint')"), None)


def commits(connection):
    other = psycopg.connect()
    is_('a statement fails', type(failure(other.execute, 'SELECT 1 / 0')), errors.DivisionByZero)
    is_('COMMIT after an error is not an error', other.commit(), None)


def idle(connection):
    with ConnectionPool(min_size=5, max_size=5) as several:
        several.wait()
        connection.execute("SELECT pg_terminate_backend(pid, 60000) FROM pg_stat_activity "
                           "WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend'")
        is_('all connections of the pool were lost', pay_psycopg.pay(several, 2, uuid.uuid4(), 1), {'paid': 1})


def statements():
    connection = psycopg.connect(autocommit=True)
    for part in casts, codes, pipelines, autocommit, commits, idle:
        part(connection)


globals()[MODE](*sys.argv[3:])
pool.close()
