"""Stores the response in a transaction of its own after the commit: between the two a retry finds none, and pays again."""
import json

from skeleton import insert, one, pool, serve


def pay(id, amount):
    with pool.connection() as connection:
        if stored := one(connection, 'SELECT response FROM claims WHERE id = %s', id):
            return 201, stored[0]
        with connection.transaction():
            connection.execute('SELECT pg_advisory_xact_lock(hashtextextended(%s, 0))', (id,))
            insert(connection, id, amount)
        connection.execute('INSERT INTO claims (id, response) VALUES (%s, %s) ON CONFLICT DO NOTHING', (id, json.dumps({'paid': amount})))
    return 201, json.dumps({'paid': amount})


serve(pay)
