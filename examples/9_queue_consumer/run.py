#!/usr/bin/python3
"""Runs the example: consumers die in their work and before they acknowledge, one is slow and loses its backend, and some orders
are published twice.  As a baseline, the same without the claim.

usage: run.py                                prints TAP; the server is that of PGHOST, PGPORT, PGUSER
       run.py NAME never|work|acknowledge NUMBER [plain]
                                             a consumer that kills itself in that of its NUMBER-th message; plain: without the claim
"""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.dont_write_bytecode = True
sys.path.insert(0, str(HERE.parents[1] / 'clients' / 'python' / 'src'))
import psycopg
import psycopg_pool
import redis

import consumer
import idem_pg

NAME = 'example_9_queue_consumer'
ORDERS = 60
tests = failures = 0


def is_(got, expected, name):
    global tests, failures
    tests += 1
    failures += got != expected
    print(f'{"ok" if got == expected else "not ok"} {tests} - {name}')
    if got != expected:
        print(f"#   Failed test '{name}'\n#   got {got!r}, expected {expected!r}")
    sys.stdout.flush()


# ----- a consumer that dies -----

class Plain:
    """What consumers do without idem."""

    def __init__(self, pool):
        self.pool = pool

    def once(self, handler, **_):
        with self.pool.connection() as tx:
            handler(tx)


def be_consumer(name, point, number, plain=None):
    queue = redis.Redis(unix_socket_path=os.environ['REDIS'], decode_responses=True)
    made = {'work': 0, 'acknowledge': 0}

    def reach(what):
        made[what] += 1
        if what == point and made[what] == int(number):
            os.kill(os.getpid(), signal.SIGKILL)

    ship, xack, messages = consumer.ship, queue.xack, consumer.messages
    consumer.messages = lambda *of: (queue.incr('deliveries') and message for message in messages(*of))
    consumer.ship = lambda tx, order: (ship(tx, order), reach('work'))
    queue.xack = lambda *message: (reach('acknowledge'), xack(*message))
    with psycopg_pool.ConnectionPool(min_size=1, max_size=2) as pool:
        consumer.consume(queue, Plain(pool) if plain else idem_pg.Idem(pool), name)


def start(name, point='never', number=0, *plain):
    return subprocess.Popen(['setpriv', '--pdeathsig', 'KILL', sys.executable, __file__, name, point, str(number), *plain],
                            stderr=subprocess.PIPE, text=True)


# ----- all of it -----

def until(what):
    deadline = time.monotonic() + 120
    while not what():
        assert time.monotonic() < deadline, 'still not'
        time.sleep(0.02)


def value(database, query):
    return database.execute(query).fetchone()[0]


def publish(queue, order, quantity=1):
    queue.xadd(consumer.STREAM, {'order': order, 'item': f'item {hash(order) % 3}', 'quantity': quantity})


def run(queue, database, *plain):
    """Publishes orders; consumers die; two others go on until all is acknowledged. Returns the rows and the orders shipped."""
    queue.flushall()
    queue.xgroup_create(consumer.STREAM, consumer.GROUP, id='0', mkstream=True)
    database.execute("TRUNCATE shipments, stock; INSERT INTO stock SELECT 'item ' || n, 1000 FROM generate_series(0, 2) AS n")
    for n in range(ORDERS):
        for _ in range(1 + (n % 5 == 0)):    # twice: the producer did not hear that it was published
            publish(queue, f'{plain} {n}')
    victims = [start(f'{point} {number}', point, number, *plain) for number in (1, 2, 4) for point in ('work', 'acknowledge')]
    is_([victim.wait() for victim in victims], [-signal.SIGKILL] * 6, 'consumers are killed, three in their work, three before they acknowledge')
    finish(queue, *plain)
    return database.execute('SELECT count(*), count(DISTINCT order_id) FROM shipments').fetchone()


def finish(queue, *plain):
    live = [start(f'live {n}', 'never', 0, *plain) for n in range(2)]
    until(lambda: [(group['lag'], group['pending']) for group in queue.xinfo_groups(consumer.STREAM)] == [(0, 0)])
    for process in live:
        process.kill()
        process.communicate()


def slow(queue, database):
    """A consumer takes longer than IDLE, so that another one is given its message, and then loses its backend."""
    waiting = "FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    publish(queue, 'slow')
    with psycopg.connect() as locker:
        locker.execute('SELECT FROM stock FOR UPDATE')
        first = start('slow')
        until(lambda: value(database, f'SELECT count(*) = 1 {waiting}'))
        second = start('impatient')
        is_('order slow is left for another delivery' in second.stderr.readline(), True, 'a message that a slow consumer is at work on is left')
        second.kill()
        lost = value(database, f'SELECT pid {waiting}')
        database.execute(f'SELECT pg_terminate_backend({lost})')
        until(lambda: value(database, f'SELECT count(*) = 1 {waiting} AND pid <> {lost}'))
    until(lambda: value(database, "SELECT idem.idem_status('shop', 'slow', 'shipping') = 'completed'"))
    is_(first.poll(), None, 'its backend is terminated: it ships on another connection')
    first.kill()
    finish(queue)
    is_(value(database, "SELECT count(*) FROM shipments WHERE order_id = 'slow'"), 1, 'once')


def main():
    with tempfile.TemporaryDirectory(prefix='example.') as folder, contextlib.ExitStack() as stack:
        os.environ.update(REDIS=f'{folder}/redis', PGDATABASE=NAME, IDLE='300')
        server = subprocess.Popen(['setpriv', '--pdeathsig', 'KILL', 'redis-server', '--port', '0', '--unixsocket', f'{folder}/redis',
                                   '--save', '', '--dir', folder], stdout=subprocess.DEVNULL)
        stack.callback(lambda: (server.kill(), server.wait()))
        postgres = stack.enter_context(psycopg.connect(dbname='postgres', autocommit=True))
        postgres.execute(f'CREATE DATABASE {NAME}')
        stack.callback(postgres.execute, f'DROP DATABASE {NAME} WITH (FORCE)')
        database = stack.enter_context(psycopg.connect(autocommit=True))
        database.execute(f"CREATE SCHEMA idem; CREATE EXTENSION {os.environ.get('IDEM_EXTENSION', 'idem')} SCHEMA idem")
        database.execute((HERE / 'recipe.sql').read_text())
        queue = redis.Redis(unix_socket_path=f'{folder}/redis', decode_responses=True)
        until(lambda: os.path.exists(f'{folder}/redis'))

        executions, requests = run(queue, database)
        print(f'# requests {requests}, deliveries {queue.get("deliveries")}, executions {executions}, double executions {executions - requests}')
        is_((executions, requests), (ORDERS, ORDERS), 'each order was shipped once')
        is_(value(database, 'SELECT 3000 - sum(quantity) FROM stock'), ORDERS, 'and taken from the stock once')
        slow(queue, database)
        for _ in range(2):
            publish(queue, 'empty', 0)
        finish(queue)
        is_(value(database, "SELECT idem.idem_status('shop', 'empty', 'shipping')"), 'failed', 'an order that is refused is acknowledged')

        executions, requests = run(queue, database, 'plain')
        print(f'# baseline without the claim: requests {requests}, deliveries {queue.get("deliveries")}, executions {executions}, '
              f'double executions {executions - requests}')
        is_((requests, executions >= ORDERS + ORDERS // 5 + 3), (ORDERS, True), 'baseline without the claim: orders are shipped again')
    print(f'1..{tests}')
    return failures > 0


if __name__ == '__main__':
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    sys.exit(be_consumer(*sys.argv[1:]) if len(sys.argv) > 1 else main())
