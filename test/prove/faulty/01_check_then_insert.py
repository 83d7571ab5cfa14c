"""Looks whether the payment is there, and inserts it if not: two at a time both see none."""
from skeleton import insert, one, pool, serve


def pay(id, amount):
    with pool.connection() as connection, connection.transaction():
        if not one(connection, 'SELECT 1 AS found FROM payments WHERE reference = %s', id):
            insert(connection, id, amount)
    return 201, {'paid': amount}


serve(pay)
