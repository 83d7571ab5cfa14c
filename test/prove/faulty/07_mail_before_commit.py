"""Sends the mail before the commit: if the commit fails the retry sends it again."""
from skeleton import insert, mail, one, pool, serve


def pay(id, amount):
    with pool.connection() as connection, connection.transaction():
        if one(connection, 'INSERT INTO claims (id) VALUES (%s) ON CONFLICT DO NOTHING RETURNING id', id):
            insert(connection, id, amount)
            mail(id)
    return 201, {'paid': amount}


serve(pay)
