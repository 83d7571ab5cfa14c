"""Holds a lock in Redis with a time to live, and has nothing in the database: a retry that comes after it pays again."""
import os
import socket

from skeleton import insert, pool, serve


def redis(*words):
    with socket.create_connection(('127.0.0.1', int(os.environ['REDIS_PORT']))) as connection:
        connection.sendall(' '.join(words).encode() + b'\r\n')
        return connection.recv(1000)


def pay(id, amount):
    if redis('SET', id, 'locked', 'NX', 'PX', '1500') != b'+OK\r\n':
        return (201, {'paid': amount}) if redis('GET', 'done-' + id) != b'$-1\r\n' else (409, {})
    with pool.connection() as connection, connection.transaction():
        insert(connection, id, amount)
    redis('SET', 'done-' + id, '1', 'PX', '60000')
    return 201, {'paid': amount}


serve(pay)
