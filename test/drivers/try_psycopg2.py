"""What doc/drivers.md says of psycopg2. Called by test/drivers/try."""

import json
import sys
import uuid

import psycopg2
from psycopg2 import errors
from psycopg2.extras import Json, register_uuid

import pay_psycopg2
from report import error, failure, is_

REQUEST = uuid.UUID('0193a1f2-7d43-7c5e-9a10-5f7c2e1b8a01')


def pay(account, request, amount):
    connection = psycopg2.connect('')
    status, body = pay_psycopg2.pay(connection, int(account), request, int(amount))
    print(status, json.dumps(body))


def repeat():
    connection = psycopg2.connect('')
    for _ in range(12):
        print(pay_psycopg2.pay(connection, 2, uuid.uuid4(), 1)[0])


def value(connection, query, *parameters):
    with connection.cursor() as cursor:
        cursor.execute(query, parameters)
        return cursor.fetchone()[0]


def message_of(connection, query, *parameters):
    try:
        value(connection, query, *parameters)
    except psycopg2.Error as raised:
        return str(raised).splitlines()[0]
    finally:
        connection.rollback()
    return 'no error'


def casts(connection):
    error('`uuid.UUID(...)`, without `register_uuid()`', message_of(connection, 'SELECT idem_claim(%s, %s)', '7', REQUEST))
    error("`{'paid': 30}`", message_of(connection, 'SELECT idem_complete(%s)', {'paid': 30}))
    register_uuid()
    is_('ids of other types', [value(connection, 'SELECT idem_claim(%s, %s)', user, request)
        for user in (7, '7') for request in (REQUEST, str(REQUEST))], [True, False, False, False])
    is_('one spelling of a uuid', value(connection, 'SELECT outcome FROM idem_claim_many(%s::int[]::text[], %s::uuid[]::text[], '
        'wait => %s::text::interval)', [7], [str(REQUEST).upper()], '0'), 'completed')
    connection.rollback()


def codes(connection):
    for code, expected in (('ID400', psycopg2.DatabaseError), ('40001', errors.SerializationFailure),
                           ('40P01', errors.DeadlockDetected)):
        raised = failure(value, connection,
                         "SELECT idem_claim('', 'x')" if code == 'ID400' else f"SELECT raise_again('{code}')")
        is_(f'class of {code}', (type(raised), raised.pgcode), (expected, code))
        connection.rollback()


def kept(connection, request):
    status = value(connection, 'SELECT idem_status(%s, %s)', '2', request)
    connection.rollback()
    return status is not None


def autocommit(connection):
    other = psycopg2.connect('')
    value(other, "SELECT idem_claim('2', 'never committed')")
    other.close()
    is_('a claim without commit', kept(connection, 'never committed'), False)

    other = psycopg2.connect('')
    other.autocommit = True
    value(other, "SELECT idem_claim('2', 'autocommit')")
    try:
        with other:
            value(other, "SELECT idem_claim('2', 'with')")
            raise ValueError
    except ValueError:
        pass
    is_('a claim alone in autocommit', kept(connection, 'autocommit'), True)
    is_('a claim that "with connection" rolled back in autocommit', kept(connection, 'with'), False)


def commits(connection):
    is_('a statement fails', type(failure(value, connection, 'SELECT 1 / 0')), errors.DivisionByZero)
    is_('COMMIT after an error is not an error', connection.commit(), None)


def idle(connection):
    other = psycopg2.connect('')
    value(connection, 'SELECT pg_terminate_backend(%s, 60000)', other.info.backend_pid)
    is_('a connection that was lost before', pay_psycopg2.pay(other, 2, uuid.uuid4(), 1)[0], 503)


def statements():
    connection = psycopg2.connect('')
    for part in casts, codes, autocommit, commits, idle:
        part(connection)


if __name__ == '__main__':
    globals()[sys.argv[1]](*sys.argv[2:])
