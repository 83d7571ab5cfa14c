"""Services that a run must not count as held. usage: evidence.py late | elsewhere | names | prepares | control | pay"""
import random
import sys
import threading
import time

import psycopg
from skeleton import insert, one, pool, serve

elsewhere = psycopg.connect(sys.argv[2], autocommit=True) if sys.argv[1] == 'elsewhere' else None


def claim_and_pay(connection, id, amount):
    with connection.transaction():
        if one(connection, 'INSERT INTO claims (id) VALUES (%s) ON CONFLICT DO NOTHING RETURNING id', id):
            insert(connection, id, amount)


def pay_later(id, amount):
    time.sleep(0.4)
    with pool.connection() as connection:
        insert(connection, id, amount)


def pay(id, amount):
    with pool.connection() as connection:
        if sys.argv[1] == 'names':    # no run sends the same statements
            name = ''.join(random.choices('ghijkl', k=12))
            connection.execute(f'WITH {name} AS (INSERT INTO claims (id) VALUES (%s) ON CONFLICT DO NOTHING RETURNING id) '
                               f'INSERT INTO payments (reference, amount) SELECT id, 30 FROM {name}', (id,))
        elif sys.argv[1] == 'prepares':    # each attempt has another prepared transaction
            if not one(connection, 'SELECT 1 AS done FROM payments WHERE reference = %s', id):
                name = random.getrandbits(62)
                connection.execute('BEGIN')
                insert(connection, id, amount)
                connection.execute(f"PREPARE TRANSACTION '{name}'")
                connection.execute(f"COMMIT PREPARED '{name}'")
        elif sys.argv[1] == 'elsewhere':    # pays on a connection that does not go through the proxy
            one(connection, 'SELECT n FROM reader WHERE t = %s', id)
            claim_and_pay(elsewhere, id, amount)
        else:
            try:
                claim_and_pay(connection, id, amount)
            except psycopg.Error:    # pays again after the answer
                if sys.argv[1] == 'late':
                    threading.Thread(target=pay_later, args=(id, amount)).start()
                raise
    return 201, f'\x01\x1b{random.random()}' if sys.argv[1] == 'control' else {'paid': amount}


serve(pay)
