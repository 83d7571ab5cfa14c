"""Claims in autocommit before the work: the claim of a payment that fails stays, and a retry is told that it was done."""
from skeleton import insert, one, pool, serve


def pay(id, amount):
    with pool.connection() as connection:
        if one(connection, 'INSERT INTO claims (id) VALUES (%s) ON CONFLICT DO NOTHING RETURNING id', id):
            with connection.transaction():
                insert(connection, id, amount)
    return 201, {'paid': amount}


serve(pay)
