"""Ships the orders of a Redis stream.

usage: consumer.py NAME        the stream is on the socket REDIS, the database that of PGHOST, PGDATABASE, ...
"""

import logging
import os
import sys

import idem_pg
import psycopg_pool
import redis

STREAM, GROUP = 'orders', 'shipping'
IDLE = int(os.environ.get('IDLE', 30_000))    # ms after which a message counts as left behind by a dead consumer


def ship(tx, order):
    if int(order['quantity']) <= 0:
        raise idem_pg.Refused('no quantity')    # for good: the message would fail each time
    tx.execute('UPDATE stock SET quantity = quantity - %(quantity)s::int WHERE item = %(item)s', order)
    tx.execute('INSERT INTO shipments VALUES (%(order)s, %(item)s, %(quantity)s::int)', order)


def messages(queue, name):
    while True:
        left = queue.xautoclaim(STREAM, GROUP, name, IDLE, count=10)[1]
        yield from left or [message for _, new in queue.xreadgroup(GROUP, name, {STREAM: '>'}, count=10, block=100) for message in new]


def consume(queue, idem, name):
    for message, order in messages(queue, name):
        try:
            idem.once(lambda tx: ship(tx, order), user='shop', id=order['order'], scope='shipping', params=order)
        except idem_pg.Failed as failed:
            logging.warning('order %s is refused: %s', order['order'], failed.stored)
        except Exception as error:    # InProgress: a consumer that is slow, and not dead, has it
            logging.warning('order %s is left for another delivery: %s', order['order'], error)
            continue
        queue.xack(STREAM, GROUP, message)


if __name__ == '__main__':
    with psycopg_pool.ConnectionPool(min_size=1, max_size=2) as pool:
        consume(redis.Redis(unix_socket_path=os.environ['REDIS'], decode_responses=True), idem_pg.Idem(pool), sys.argv[1])
