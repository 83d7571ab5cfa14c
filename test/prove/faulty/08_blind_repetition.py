"""Repeats the transaction when the connection is lost, without asking whether the COMMIT was executed. Only clients' retries are
told by the claim, which is made once."""
import psycopg
from skeleton import insert, one, pool, serve


def pay(id, amount):
    with pool.connection() as connection:
        if one(connection, 'SELECT 1 AS done FROM claims WHERE id = %s', id):
            return 201, {'paid': amount}
    for _ in range(3):
        try:
            with pool.connection() as connection, connection.transaction():
                connection.execute('INSERT INTO claims (id) VALUES (%s) ON CONFLICT DO NOTHING', (id,))
                insert(connection, id, amount)
            return 201, {'paid': amount}
        except psycopg.OperationalError as error:
            print(error)
    return 503, {}


serve(pay)
