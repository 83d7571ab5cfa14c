#!/usr/bin/python3
"""Runs the cases of cases.json, and a fault at each step, against a service written with a client.  Prints TAP.

usage: run.py [--edition idem|idem_portable] [--schema NAME] [--full] [--only PART,...] [--seed N] [--dsn CONNINFO]
              [--set NAME=VALUE]... [--other COMMAND] COMMAND

COMMAND starts the service; --set is for its environment.  --other starts a service of another client.  --dsn: a database
of a superuser, with idem in the schema; without it clusters are made, and removed at the end.  See README.md.
"""

import argparse
import concurrent.futures
import contextlib
import email.utils
import http.client
import itertools
import json
import os
import pathlib
import random
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import types

import psycopg

sys.dont_write_bytecode = True
import cluster
from cluster import wait_until
from proxy import Proxy

CASES = json.loads((pathlib.Path(__file__).parent / 'cases.json').read_text(encoding='utf-8'))
PARTS = 'cases concurrent cuts terminated kills leases other failover one pgbouncer'.split()
KEPT = ('content-type', 'content-language', 'content-encoding', 'location', 'etag', 'last-modified', 'link', 'x-receipt')
LOST = (ConnectionError, http.client.HTTPException)
tests, failures, BEGUN = 0, 0, time.monotonic()


def ok(passed, name, remark=''):
    global tests, failures
    tests += 1
    failures += not passed
    print(f'{"ok" if passed else "not ok"} {tests} - {name} [{time.monotonic() - BEGUN:.0f} s]')
    if not passed:
        print(f'#   Failed test \'{name}\'\n#   ' + str(remark).replace('\n', '\n#   '))
    sys.stdout.flush()


def note(text):
    print('# ' + text, flush=True)


# ----- the service and its answers -----

class Answer:
    def __init__(self, status, headers, body):
        self.status, self.headers, self.body = status, {name.lower(): value for name, value in headers}, body

    def json(self):
        with contextlib.suppress(ValueError):
            return json.loads(self.body)
        return None

    def replayed(self):
        return self.headers.get('idempotent-replayed') == 'true' or contains(self.json(), {'replayed': True})

    def identity(self):
        """What is the same in each replay."""
        body = self.json()
        if isinstance(body, dict) and 'replayed' in body:
            return self.status, body['value']
        return self.status, self.body, {name: value for name, value in self.headers.items() if name in KEPT}

    def __repr__(self):
        return f'{self.status} {self.headers} {self.body[:300]!r}'


class Service:
    """A process of the service, which finds the database at 127.0.0.1, port."""

    def __init__(self, stage, command, port, **env):
        self.stage, self.command, self.died, self.killed = stage, command, [], False
        self.env = {name: value for name, value in os.environ.items() if not name.startswith('PG')}
        self.env |= {'PGHOST': '127.0.0.1', 'PGPORT': str(port), 'PGUSER': 'shop', 'PGDATABASE': stage.database, 'IDEM_SCHEMA': stage.schema, **env}
        self.start()

    def start(self):
        self.port, self.killed = cluster.free_port(), False
        self.log = self.stage.room.path / f'service{self.port}.log'
        with open(self.log, 'w', encoding='utf-8') as log:
            self.process = subprocess.Popen(shlex.split(self.command), env={**self.env, 'PORT': str(self.port)}, stdin=subprocess.DEVNULL,
                                            stdout=log, stderr=log, start_new_session=True)
        wait_until(lambda: 'ready' in self.log.read_text().split() or self.process.poll() is not None, 'the service says "ready"')
        if self.process.poll() is not None:
            raise RuntimeError('the service ended:\n' + self.log.read_text())

    def revive(self):
        if self.process.poll() is not None:
            if not self.killed:
                self.died.append(self.log.read_text()[-2000:])
            self.start()

    def signal(self, number):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)
        if number == signal.SIGKILL:
            self.killed = True
            self.process.wait()

    def send(self, method, path, headers, body, connections=None):
        connection = http.client.HTTPConnection('127.0.0.1', self.port, timeout=60)
        if connections is not None:
            connections.append(connection)
        with contextlib.closing(connection):
            connection.request(method, path, body, {'Connection': 'close', **headers})
            response = connection.getresponse()
            return Answer(response.status, response.getheaders(), response.read())


class Stage:
    """The database, and the proxy before it."""

    def __init__(self, options):
        self.options, self.schema, self.random = options, options.schema, random.Random(options.seed)
        self.room, self.number, self.admin = cluster.Room(), 0, None
        self.primary, self.standby = cluster.Server(self.room, 1), cluster.Server(self.room, 2)
        if not options.dsn:
            self.primary.make(options.edition)
        with self.connect() as connection:
            cluster.prepare(connection, options.edition, self.schema)
            info, self.database = connection.info, connection.info.dbname
            self.proxy = Proxy(f'{info.host}/.s.PGSQL.{info.port}' if info.host.startswith('/') else (info.host, info.port))

    def connect(self):
        return psycopg.connect(self.options.dsn, autocommit=True) if self.options.dsn else self.primary.connect()

    def sql(self, query):
        """The first value of the first row."""
        if self.admin is None or self.admin.closed:
            self.admin = self.connect()
            self.admin.execute(f'SET search_path = "{self.schema}", public')
        cursor = self.admin.execute(query)
        return (cursor.fetchone() or [None])[0] if cursor.description else None

    def id(self):
        self.number += 1
        return f'r{self.number}-{self.random.getrandbits(32):08x}'

    def rows(self, id):
        """How often the request was executed, and the provider called."""
        mine = f"reference = '{id}' OR reference LIKE '{id}-%'"
        return (self.sql(f"SELECT count(*) FROM public.payments WHERE user_id LIKE 'u-{id}%' OR {mine}"),
                self.sql(f'SELECT count(*) FROM public.provider_calls WHERE {mine}'))

    @contextlib.contextmanager
    def service(self, port=None, command=None, **env):
        service = Service(self, command or self.options.command, port or self.proxy.port, **{**dict(self.options.set), **env})
        try:
            yield service
        finally:
            service.signal(signal.SIGCONT)
            service.signal(signal.SIGKILL)
            self.proxy.watched = None
        ok(not service.died, 'the service has lived', '\n'.join(service.died[:3]))

    def idle(self):
        wait_until(lambda: self.sql(CASES['queries']['idle']), 'no transaction is open')


# ----- cases -----

def fill(value, id):
    """$id and $user; ["x", 3] is "xxx"."""
    if isinstance(value, dict):
        return {name: fill(one, id) for name, one in value.items()}
    if isinstance(value, list):
        return value[0] * value[1]
    return value.replace('$id', id).replace('$user', 'u-' + id) if isinstance(value, str) else value


def request_of(step, id):
    """method, path, headers, body"""
    method, path = fill(step.get('send', 'POST /pay'), id).split(' ', 1)
    kind, headers, body = path.partition('?')[0], {'X-User': 'u-' + id}, None
    if kind in ('/pay', '/wait', '/optional', '/upload') and (key := step.get('key', '$id')) is not None:
        headers['Idempotency-Key'] = fill(key, id)
    if 'bytes' in step:
        body = bytes.fromhex(fill(step['bytes'], id))
    elif 'text' in step:
        body = fill(step['text'], id).encode()
    elif method == 'POST':
        base = {'user': '$user', 'id': '$id', 'amount': 30} if kind in ('/once', '/call', '/lease') else {'amount': 30}
        body = json.dumps(fill({**base, **({'lease': '5 s', 'work': 0} if kind == '/lease' else {}), **step.get('json', {})}, id)).encode()
    if method == 'POST':
        headers['Content-Type'] = 'application/octet-stream' if kind == '/upload' else 'application/json'
    return method, path, {**headers, **fill(step.get('headers', {}), id)}, body


def expectation(expected):
    """By its name, and with what it is like."""
    expected = CASES['answers'][expected] if isinstance(expected, str) else expected
    base = expectation(expected['like']) if 'like' in expected else {}
    return {**base, **expected, 'headers': {**base.get('headers', {}), **expected.get('headers', {})}}


def contains(got, expected):
    if isinstance(expected, dict):
        return isinstance(got, dict) and all(name in got and contains(got[name], value) for name, value in expected.items())
    return got == expected


def differences(answer, expected):
    """What is expected of the answer and is not so."""
    expected, json_body, kind = expectation(expected), answer.json(), answer.headers.get('content-type', '')
    checks = {'an expiry to come': 'idempotency-expires' not in answer.headers or
              email.utils.parsedate_to_datetime(answer.headers['idempotency-expires']).timestamp() > time.time()}
    for name, value in expected['headers'].items():
        got = answer.headers.get(name)
        checks[f'header {name} {value!r}'] = got is value is None or None not in (got, value) and (
            re.search(value[1:], got) is not None if value[0] == '~' else value in ('*', got))
    for name, value in expected.items():
        checks[f'{name} {value!r}'] = {
            'status': lambda: answer.status in value if isinstance(value, list) else answer.status == value,
            'body': lambda: answer.body == value.encode(),
            'bytes': lambda: answer.body == bytes.fromhex(value),
            'json': lambda: contains(json_body, value),
            'problem': lambda: kind.startswith('application/problem+json') and contains(json_body, {'type': value, 'status': answer.status})
            and json_body.get('title') and json_body.get('detail')}.get(name, lambda: True)()
    return [what for what, passed in checks.items() if not passed]


def run_case(stage, service, case, threads, holder):
    id, background, answers, wrong = stage.id(), {}, {}, []

    def query(text):
        return stage.sql(fill(CASES['queries'].get(text, text), id))
    for place, step in enumerate(case['steps'], 1):
        answer, sockets = None, []
        if 'begin' in step:
            background[step['begin']] = threads.submit(service.send, *request_of(step, id), sockets), sockets
        elif 'abandon' in step:
            future, sockets = background[step['abandon']]
            sockets[0].sock.shutdown(socket.SHUT_RDWR)
            future.exception(60)
        elif 'until' in step:
            try:
                wait_until(lambda text=step['until']: query(text), step['until'], 30)
            except TimeoutError as error:
                raise TimeoutError(f'{error}; heard {[future.result() for future, _ in background.values() if future.done()]}') from error
        elif 'sql' in step:
            query(step['sql'])
        elif 'hold' in step:
            holder.execute('BEGIN; LOCK public.payments IN SHARE MODE')    # who pays waits
        elif 'release' in step:
            holder.execute('COMMIT')
        else:
            answer = background[step['end']][0].result(60) if 'end' in step else service.send(*request_of(step, id))
            answers[step.get('as', step.get('end'))] = answer
            bad = differences(answer, step.get('is', {}))
            if 'same' in step and answer.identity() != answers[step['same']].identity():
                bad.append(f'the same as {answers[step["same"]]}')
            if bad:
                wrong.append(f'step {place}: expected {", ".join(bad)}\n  got {answer}')
    return wrong + [f'{count} {kind}' for kind, count in zip(('payments', 'calls'), stage.rows(id)) if case.get(kind, 0) not in (count, 'any')]


def try_cases(stage, service, how='', pool=4):
    for case in CASES['cases']:
        if case.get('pool', 1) > pool or how and case.get('slow') and not stage.options.full:
            continue
        threads, holder = concurrent.futures.ThreadPoolExecutor(), stage.connect()
        try:
            wrong = run_case(stage, service, case, threads, holder)
        except Exception as error:    # a service that hangs or died, a condition that is never met
            wrong = [f'{type(error).__name__}: {error}']
        finally:
            holder.close()
            stage.sql(case.get('finally', 'SELECT'))
            threads.shutdown(wait=False)
            service.revive()
        ok(not wrong, how + case['name'], '\n'.join(wrong))


# ----- faults -----

def flow(name, **step):
    return types.SimpleNamespace(name=name, send=lambda service, id: service.send(*request_of(step, id)))


HTTP, ONCE, CALL = flow('http'), flow('once', send='POST /once'), flow('call', send='POST /call')
LEASE = flow('lease', send='POST /lease', json={'lease': '1 s'})


def settle(service, flow, id):
    """As a client does: sends the request until it is answered for good.  All that it heard; the last one is the answer."""
    heard, deadline = [], time.monotonic() + 90
    while True:
        try:
            heard.append(flow.send(service, id))
            if heard[-1].status < 300:
                return heard
        except LOST as error:
            heard.append(error)
        service.revive()
        if time.monotonic() > deadline:
            raise TimeoutError(f'{id} is never answered: {heard[-3:]}')
        time.sleep(0.02)    # the pause of a client that retries


class Tally:
    """What a fault did at each point."""

    def __init__(self, stage, name):
        self.stage, self.name, self.points, self.effects = stage, name, 0, 0
        self.wrong, self.visible = [], []

    def add(self, point, id, answers, heard=(), hit=True):
        payments, calls = self.stage.rows(id)
        self.points += hit
        self.effects += payments if hit else 0
        if heard and getattr(heard[0], 'status', 999) > 299 and len(heard) > 1:
            self.visible.append(f'{point}: {heard[0]!r}')
        same = [answer.identity() for answer in answers]
        self.wrong += [f'{point}: {what}' for what, passed in (
            (f'{payments} executions', payments == 1), (f'{calls} calls of the provider', calls <= 1),
            (f'answers differ: {same}', same == same[:1] * len(same)), (f'the last answer is no replay: {answers[-1]}', answers[-1].replayed())) if not passed]

    def report(self, invisible=False):
        ok(self.points and not self.wrong, f'{self.name}: {self.points} points, {self.effects} executions', '\n'.join(self.wrong[:12]))
        if invisible:
            ok(not self.visible, f'{self.name}: no caller sees it', f'{len(self.visible)} did\n' + '\n'.join(self.visible[:12]))
        elif self.visible:
            note(f'{self.name}: {len(self.visible)} callers were told to try again, the first one {self.visible[0]}')


def try_points(stage, service, flow, name, action, fine, invisible=False, attempt=None, new=False, every=False):
    """One run for each message: the action before it, and after it.  Not fine: only before what the client sends last
    before it waits, and before the end of an answer.  It ends when no run comes to that message."""
    tally, known = Tally(stage, f'{flow.name}: {name}'), stage.proxy.watch(every=every)
    settle(service, flow, stage.id())
    if fine:
        note(f'{flow.name}: ' + ' | '.join(known.messages))
    misses = 0
    for at in itertools.count():
        hits = 0
        for when in ('before', 'after') if fine else ('before',):
            stage.idle()
            watch, id = stage.proxy.watch(at, when, action, new, every, None if fine else ('> startup', '> Q', '> S', '< Z')), stage.id()
            if new:
                stage.proxy.cut_all()
            heard, answers = attempt(id) if attempt else (settle(service, flow, id), [])
            stage.proxy.watched, hit = None, watch.hit.is_set()
            hits += hit
            answers = ([heard[-1]] if heard else []) + answers + [settle(service, flow, id)[-1]]
            tally.add(f'{when} {at} {watch.messages[at] if hit else ""}', id, answers, heard, hit)
        misses = 0 if hits else misses + 1
        if misses > (3 if new else 0):    # a pool may have begun to connect before it was watched
            break
    tally.report(invisible)


def cut(link):
    link.cut()


def try_cuts(stage, service, fine=True, how=''):
    for one in HTTP, ONCE, CALL:
        try_points(stage, service, one, how + 'cut', cut, fine, not how)
    if not how:
        try_points(stage, service, HTTP, 'cut while it connects', cut, stage.options.full, True, new=True)
    tally = Tally(stage, f'http: {how}idle connections cut')
    for n in range(5):
        stage.idle()
        stage.proxy.cut_all()
        id = stage.id()
        heard = settle(service, HTTP, id)
        tally.add(n, id, [heard[-1], settle(service, HTTP, id)[-1]], heard)
    tally.report(not how)


def try_terminated(stage, service):
    def terminate(link):
        with stage.connect() as connection:
            connection.execute('SELECT pg_terminate_backend(%s, 60000)', (link.pid,))
    for one in HTTP, ONCE, CALL:
        try_points(stage, service, one, 'backend terminated', terminate, stage.options.full, True)


def try_kills(stage, service):
    for one in HTTP, ONCE, CALL:
        try_points(stage, service, one, 'service killed', lambda link: service.signal(signal.SIGKILL), stage.options.full)


def try_concurrent(stage, service, how=''):
    for one in [flow('http', json={'sleep': 0.2}), flow('http that waits', send='POST /wait', json={'sleep': 0.2}), CALL,
                flow('once', send='POST /once', json={'sleep': 0.2}), flow('lease', send='POST /lease', json={'work': 0.2})] * (5 if stage.options.full else 1):
        id, barrier, tally = stage.id(), threading.Barrier(20), Tally(stage, f'{how}20 concurrent retries, {one.name}')

        def client(_):
            barrier.wait()
            return settle(service, one, id)[-1]
        with concurrent.futures.ThreadPoolExecutor(20) as threads:
            answers = sorted(threads.map(client, range(20)), key=Answer.replayed)
        tally.add('', id, answers)
        if not answers[1].replayed():
            tally.wrong.append(f'more than one answer is no replay: {answers}')
        tally.report()


def try_isolation(stage, service):
    """Conflicts of such transactions are repeated unseen."""
    for level in 'repeatable read', 'serializable':
        stage.sql(f"ALTER ROLE shop SET default_transaction_isolation = '{level}'")
        stage.proxy.cut_all()    # the service connects again, with this setting
        try_concurrent(stage, service, f'{level}: ')
    stage.sql('ALTER ROLE shop RESET default_transaction_isolation')
    stage.proxy.cut_all()


# ----- leases -----

def try_leases(stage, service, second):
    full, stopped, going = stage.options.full, threading.Event(), threading.Event()
    try_points(stage, service, LEASE, 'cut', cut, full, every=True)

    def killed(id):
        with contextlib.suppress(*LOST):
            LEASE.send(service, id)
        with concurrent.futures.ThreadPoolExecutor(1) as threads:
            threads.submit(service.revive)
            return settle(second, LEASE, id), []
    try_points(stage, service, LEASE, 'holder killed', lambda link: service.signal(signal.SIGKILL), full, attempt=killed, every=True)

    def pause(link):
        service.signal(signal.SIGSTOP)
        stopped.set()
        going.wait(60)

    def lapsed(id):
        return stage.sql(f"SELECT lease_until + interval '0.1 s' < clock_timestamp() FROM idem_lookup('u-{id}', '{id}', 'lease')")

    def paused(id):
        stopped.clear()
        going.clear()
        heard = []

        def replaced():    # or its open transaction keeps the request: beyond the lease, or before the claim is committed
            heard.append(LEASE.send(second, id))
            return heard[-1].status == 200 or lapsed(id) is not False and LEASE.send(second, id).status == 409
        with concurrent.futures.ThreadPoolExecutor(1) as threads:
            first = threads.submit(LEASE.send, service, id)
            wait_until(lambda: stopped.is_set() or first.done(), 'the holder is paused or has answered')
            wait_until(replaced, 'the holder is replaced')
            service.signal(signal.SIGCONT)
            going.set()
            late = first.result(60)
        if late.status not in (200, 409, 503):
            ok(False, 'lease: what a holder that was paused answers', late)
        return heard + settle(second, LEASE, id), [late] * (late.status == 200)
    try_points(stage, service, LEASE, 'holder paused beyond its lease', pause, full, attempt=paused, every=True)


def try_heartbeats(stage, service, second):
    """The holder is at work when its database is gone: it must stop by itself, in time."""
    working = flow('lease', send='POST /lease', json={'lease': '2 s', 'work': 8})
    for how, name in ('cut', 'lease: its heartbeat cut'), ('hold', 'lease: its heartbeat unanswered'):
        tally, id = Tally(stage, name), stage.id()
        with concurrent.futures.ThreadPoolExecutor(1) as threads:
            watch = stage.proxy.watch(every=True)
            first = threads.submit(working.send, service, id)

            def renewed():    # the service has the provider's answer, and its heartbeat has begun
                messages = [message[:10] for message in watch.messages]
                return '< C INSERT' in messages and len(messages) > messages.index('< C INSERT') + 2
            wait_until(renewed, 'the holder is at work')
            stage.proxy.watched = None
            if how == 'cut':
                stage.proxy.refuses = True
                stage.proxy.cut_all()
            else:
                stage.proxy.light.clear()
            concurrent.futures.wait([first], 30)
            late = stage.sql(f"SELECT extract(epoch FROM clock_timestamp() - lease_until)::float8 FROM idem_lookup('u-{id}', '{id}', 'lease')")
            stage.proxy.refuses = False
            stage.proxy.cut_all()
            stage.proxy.light.set()
            ok(late < 0.5, f'{name}: the holder stops before its lease ends', f'{late} s after it, or never')
            ok(first.result().status in (409, 503), f'{name}: it says so', first.result())
        tally.add(how, id, [settle(second, LEASE, id)[-1], settle(service, LEASE, id)[-1]])
        tally.report()


# ----- failover -----

def try_failover(stage, service):
    stage.standby.follow(stage.primary)

    def fail_over(link):
        stage.proxy.refuses = True
        stage.proxy.cut_all()
        stage.primary.pg_ctl('stop', '-m', 'immediate')
        stage.primary, stage.standby, stage.admin = stage.standby, stage.primary, None
        stage.primary.pg_ctl('promote')
        stage.proxy.server, stage.proxy.refuses = stage.primary.socket, False

    earlier = [(stage.id(), None)]

    def attempt(id):
        primary, (known, answer) = stage.primary, earlier[-1]
        heard = settle(service, HTTP, id)
        stage.proxy.watched = None
        again = settle(service, HTTP, known)[-1]
        if answer and (again.identity() != answer.identity() or not again.replayed()):
            ok(False, 'http: what was answered before a failover', f'{answer}, then {again}')
        earlier.append((id, heard[-1]))
        if primary is not stage.primary:
            stage.standby.follow(stage.primary)
        return heard, []
    try_points(stage, service, HTTP, 'failover to a synchronous standby', fail_over, stage.options.full, attempt=attempt)


def try_other(stage, service, other):
    for one in HTTP, ONCE, CALL, LEASE:
        for first, second, how in (service, other, 'replayed by the other client'), (other, service, 'of the other client, replayed'):
            tally, id = Tally(stage, f'{one.name} {how}'), stage.id()
            tally.add('', id, [settle(first, one, id)[-1], settle(second, one, id)[-1]])
            tally.report()


def run(stage, options):
    with stage.service() as service:
        for part, *functions in (('cases', try_cases), ('concurrent', try_concurrent, try_isolation), ('cuts', try_cuts), ('terminated', try_terminated),
                                 ('kills', try_kills)):
            for function in functions * (part in options.only):
                function(stage, service)
        if 'leases' in options.only:
            with stage.service(Proxy(stage.proxy.server).port) as second:
                try_leases(stage, service, second)
                try_heartbeats(stage, service, second)
        if 'other' in options.only and options.other:
            with stage.service(command=options.other) as other:
                try_other(stage, service, other)
        if 'failover' in options.only and not options.dsn:
            try_failover(stage, service)
    if 'one' in options.only:
        with stage.service(POOL_SIZE='1') as service:
            try_cases(stage, service, 'pool of one: ', 1)
            try_concurrent(stage, service, 'pool of one: ')
    if 'pgbouncer' in options.only:
        with stage.room.pgbouncer(stage.proxy.port) as port, stage.service(port, PGBOUNCER='1') as service:
            try_cases(stage, service, 'PgBouncer: ')
            try_concurrent(stage, service, 'PgBouncer: ')
            try_cuts(stage, service, options.full, 'PgBouncer, ')


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in ('edition', 'idem'), ('schema', 'idem'), ('dsn', None), ('other', None), ('only', ','.join(PARTS)), \
            ('seed', str(random.SystemRandom().getrandbits(32))):
        parser.add_argument('--' + name, default=default)
    parser.add_argument('--full', action='store_true')
    parser.add_argument('--set', type=lambda pair: pair.split('=', 1), action='append', default=[])
    parser.add_argument('command')
    options = parser.parse_args()
    options.only = options.only.split(',')
    if not set(options.only) <= set(PARTS):
        parser.error('the parts are ' + ' '.join(PARTS))
    note(f'seed {options.seed}')
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    stage = None
    try:
        stage = Stage(options)
        run(stage, options)
        faults = stage.room.faults()
        ok(not faults, 'the server has not crashed', faults)
    except Exception:
        ok(False, 'the run ends', traceback.format_exc())
    finally:
        if stage:
            stage.room.close()
    print(f'1..{tests}')
    return failures > 0


if __name__ == '__main__':
    sys.exit(main())
