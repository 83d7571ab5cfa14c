"""Claims in the transaction, and swallows an error of the work in a savepoint: the claim commits without it."""
import psycopg
from skeleton import insert, one, pool, serve


def pay(id, amount):
    with pool.connection() as connection, connection.transaction():
        if one(connection, 'INSERT INTO claims (id) VALUES (%s) ON CONFLICT DO NOTHING RETURNING id', id):
            try:
                with connection.transaction():
                    insert(connection, id, amount)
            except psycopg.Error as error:
                print(error)
    return 201, {'paid': amount}


serve(pay)
