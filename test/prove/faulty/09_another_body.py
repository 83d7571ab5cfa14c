"""Answers a retry with another body than the first time."""
from skeleton import insert, one, pool, serve


def pay(id, amount):
    with pool.connection() as connection, connection.transaction():
        if one(connection, 'INSERT INTO claims (id) VALUES (%s) ON CONFLICT DO NOTHING RETURNING id', id):
            insert(connection, id, amount)
            return 201, {'paid': amount}
    return 200, {'status': 'already paid'}


serve(pay)
