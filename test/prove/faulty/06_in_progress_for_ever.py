"""Marks the request as in progress in a transaction of its own, and never gives the mark up: after a crash each retry is answered 409."""
from skeleton import insert, one, pool, serve


def pay(id, amount):
    with pool.connection() as connection:
        if not one(connection, "INSERT INTO claims (id, state) VALUES (%s, 'in progress') ON CONFLICT DO NOTHING RETURNING id", id):
            done = one(connection, "SELECT 1 AS done FROM claims WHERE id = %s AND state = 'done'", id)
            return (201, {'paid': amount}) if done else (409, {})
        with connection.transaction():
            insert(connection, id, amount)
            connection.execute("UPDATE claims SET state = 'done' WHERE id = %s", (id,))
    return 201, {'paid': amount}


serve(pay)
