"""What doc/drivers.md says of psycopg 3. Called by test/drivers/try."""

import json
import os
import sys
import uuid

import psycopg
from psycopg import errors
from psycopg.types.json import Jsonb

import pay_psycopg
import pipeline_psycopg
from report import error, failure, is_, ok

REQUEST = uuid.UUID('0193a1f2-7d43-7c5e-9a10-5f7c2e1b8a01')


def connect():
    if os.environ.get('IDEM_POOLED'):
        return psycopg.connect(autocommit=True, prepare_threshold=None)
    return psycopg.connect(autocommit=True)


def pay(account, request, amount):
    with connect() as connection:
        status, body = pay_psycopg.pay(connection, int(account), request, int(amount))
    print(status, json.dumps(body))


def repeat():
    with connect() as connection:
        for _ in range(12):
            print(pay_psycopg.pay(connection, 2, uuid.uuid4(), 1)[0])


def message_of(connection, query, *parameters):
    try:
        with connection.transaction():
            connection.execute(query, parameters)
    except psycopg.Error as raised:
        return str(raised).splitlines()[0]
    return 'no error'


# Also prepared, and with parameters in the binary format
def claim_in_each_type(connection):
    claims = []
    with connection.transaction(force_rollback=True), psycopg.ClientCursor(connection) as client_side:
        for user, request in (7, REQUEST), ('7', REQUEST), (7, str(REQUEST)), ('7', str(REQUEST)):
            claims += connection.execute('SELECT idem_claim(%s, %s)', (user, request), prepare=True).fetchone()
        claims += connection.execute('SELECT idem_claim(%s, %s)', (7, REQUEST), binary=True).fetchone()
        claims += connection.execute('SELECT idem_claim(%s, request_uuid => %s)', ('7', REQUEST)).fetchone()
        claims += client_side.execute('SELECT idem_claim(%s, %s)', (7, REQUEST)).fetchone()
        claims += client_side.execute('SELECT idem_claim(%s, %s)', ('7', str(REQUEST))).fetchone()
        user = uuid.uuid4()
        assert connection.execute('SELECT idem_claim(%s, %s)', (user, REQUEST)).fetchone()[0]
        assert not connection.execute('SELECT idem_claim(%s, %s)', (str(user), str(REQUEST))).fetchone()[0]
        assert not connection.execute('SELECT idem_claim(%s, %s)', (user, str(REQUEST))).fetchone()[0]
    return claims


def casts(connection):
    is_('ids of other types', claim_in_each_type(connection), [True] + 7 * [False])
    is_('an integer for a request', message_of(connection, 'SELECT idem_claim(%s, %s)', 7, 7),
        'function idem_claim(smallint, smallint) does not exist')
    error("`{'paid': 30}`", message_of(connection, 'SELECT idem_complete(%s)', {'paid': 30}))
    is_('a parameter of any type', message_of(connection, "SELECT jsonb_build_object('amount', %s)", 'x'),
        'could not determine data type of parameter $1')
    with connection.transaction(force_rollback=True):
        claims = connection.execute(
            'SELECT outcome FROM idem_claim_many(%s::int[]::text[], %s::uuid[]::text[], wait => %s::text::interval)',
            ([1, 1], [str(REQUEST), str(REQUEST).upper()], '0')).fetchall()
    is_('casts of a batch, and one spelling of a uuid', claims, [('claimed',), ('completed',)])


def codes(connection):
    raised = failure(connection.execute, "SELECT idem_claim('', 'x')")
    is_('class of an ID code', type(raised), psycopg.DatabaseError)
    is_('the code', raised.sqlstate, 'ID400')
    ok('its detail', raised.diag.message_detail)
    for code, expected in ('40001', errors.SerializationFailure), ('40P01', errors.DeadlockDetected):
        raised = failure(connection.execute, f"SELECT raise_again('{code}')")
        is_(f'class of {code}', (type(raised), raised.sqlstate), (expected, code))


def balance(connection):
    return connection.execute('SELECT balance FROM accounts WHERE id = 2').fetchone()[0]


def autocommit(connection):
    for before, kept in (False, True), (True, False):
        other = psycopg.connect()
        if before:
            other.execute('SELECT 1')
        request = uuid.uuid4()
        is_('answered', pay_psycopg.pay(other, 2, request, 1)[0], 200)
        other.close()
        claimed = connection.execute('SELECT idem_status(%s, %s, %s)', ('2', str(request), 'pay')).fetchone()[0]
        is_(f'without autocommit, {"after" if before else "without"} another statement: kept', claimed is not None, kept)


def pipelines(connection):
    request, before = uuid.uuid4(), balance(connection)
    for _ in range(2):
        pipeline_psycopg.wrong(connection, 2, request, 1)
    is_('a pipeline with a marker pays twice', before - balance(connection), 2)
    request, before = uuid.uuid4(), balance(connection)
    answers = pipeline_psycopg.right(connection, [(2, 1, request), (2, 1, request), (2, 1, uuid.uuid4())])
    is_('a pipeline of requests pays each once', (answers, before - balance(connection)), ([{'paid': 1}] * 3, 2))
    request, before = uuid.uuid4(), balance(connection)
    raised = failure(pipeline_psycopg.right, connection, [(2, 1, request), (2, 10 ** 9, uuid.uuid4())])
    is_('one request of a pipeline fails', type(raised), errors.CheckViolation)
    is_('and the others are rolled back', balance(connection), before)
    with connection.pipeline():
        answers = [pay_psycopg.pay(connection, 2, request, 1) for _ in range(2)]
    is_('the program in a pipeline pays once', (answers, before - balance(connection)), ([(200, {'paid': 1})] * 2, 1))


def calls(connection):
    before = balance(connection)
    parameters = (2, uuid.uuid4(), Jsonb({'account': 2, 'amount': 1}))
    answers = [connection.execute(
        "SELECT idem_call(%s::int::text, %s::uuid::text, 'withdraw(int, bigint)', %s::jsonb, 'pay', '0'), idem_outcome()",
        parameters).fetchone() for _ in range(2)]
    is_('idem_call() executes, and replays', answers, [({'paid': 1}, 'claimed'), ({'paid': 1}, 'completed')])
    is_('idem_call() pays once', before - balance(connection), 1)


def commits(connection):
    other = psycopg.connect()
    is_('a statement fails', type(failure(other.execute, 'SELECT 1 / 0')), errors.DivisionByZero)
    is_('COMMIT after an error is not an error', other.commit(), None)


def idle(connection):
    other = connect()
    connection.execute('SELECT pg_terminate_backend(%s, 60000)', (other.info.backend_pid,))
    is_('a connection that was lost before', pay_psycopg.pay(other, 2, uuid.uuid4(), 1)[0], 503)


def statements():
    connection = connect()
    for part in casts, codes, autocommit, calls, pipelines, commits, idle:
        part(connection)


if __name__ == '__main__':
    globals()[sys.argv[1]](*sys.argv[2:])
