#!/usr/bin/python3
"""Runs the cases of cases.json, and every fault at every step, against a service written with a client.  Prints TAP.

usage: run.py [--edition idem|idem_portable] [--schema idem] [--full] [--only PART,...] [--seed N] [--dsn CONNINFO]
              [--other COMMAND] [--set NAME=VALUE ...] -- COMMAND

COMMAND starts the service, see README.md; --set is for its environment.  --other starts a second service, of another
client: each replays the answers of the other.  Without --dsn clusters are made, and removed at the end; with it
(a superuser, and a database with idem in --schema) the parts that need a standby are skipped.
Parts: cases concurrent cuts terminated kills leases one pgbouncer failover other.
"""

import argparse
import concurrent.futures
import contextlib
import email.utils
import http.client
import json
import os
import pathlib
import random
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
import types

import psycopg

sys.dont_write_bytecode = True
import cluster
import proxy as pg_proxy
from cluster import wait_until

CASES = json.loads((pathlib.Path(__file__).parent / 'cases.json').read_text(encoding='utf-8'))
PARTS = 'cases concurrent cuts terminated kills leases one pgbouncer failover other'.split()
LOST = (ConnectionError, http.client.HTTPException)
tests = failures = 0


def ok(passed, name, remark=''):
    global tests, failures
    tests += 1
    failures += not passed
    print(f'{"ok" if passed else "not ok"} {tests} - {name}')
    if not passed:
        print(f'#   Failed test \'{name}\'\n#   ' + str(remark).replace('\n', '\n#   '))
    sys.stdout.flush()


def note(text):
    print('# ' + text, flush=True)


# ----- the service and its answers -----

class Answer:
    def __init__(self, status, headers, body):
        self.status, self.body = status, body
        self.headers = {}
        for name, value in headers:
            self.headers.setdefault(name.lower(), value)

    def json(self):
        try:
            return json.loads(self.body)
        except ValueError:
            return None

    def replayed(self):
        body = self.json() if self.headers.get('content-type', '').startswith('application/json') else None
        return self.headers.get('idempotent-replayed') == 'true' or isinstance(body, dict) and body.get('replayed') is True

    def identity(self):
        """What is the same in each replay."""
        body = self.json()
        if isinstance(body, dict) and 'replayed' in body:
            return self.status, body['value']
        return self.status, self.body, {name: value for name, value in self.headers.items() if name in
                                        ('content-type', 'content-language', 'content-encoding', 'location', 'etag', 'last-modified', 'link',
                                         'x-receipt')}

    def __repr__(self):
        return f'{self.status} {self.headers} {self.body[:300]!r}'


class Service:
    """A process of the service; it reaches the database at 127.0.0.1, port."""

    def __init__(self, stage, command, port, **env):
        self.stage, self.command = stage, command
        self.env = {'PGHOST': '127.0.0.1', 'PGPORT': str(port), 'PGUSER': 'shop', 'PGDATABASE': stage.database, 'IDEM_SCHEMA': stage.schema, **env}
        self.process = self.connection = None
        self.start()

    def start(self):
        with cluster.socket.create_server(('127.0.0.1', 0)) as free:
            self.port = free.getsockname()[1]
        self.log = self.stage.log(len(self.stage.logs))
        inherited = {name: value for name, value in os.environ.items() if not name.startswith('PG')}
        with open(self.log, 'w', encoding='utf-8') as log:
            self.process = subprocess.Popen(shlex.split(self.command), env={**inherited, **self.env, 'PORT': str(self.port)}, stdin=subprocess.DEVNULL,
                                            stdout=log, stderr=log, start_new_session=True)

        def ready():
            if self.process.poll() is not None:
                raise RuntimeError('the service ended:\n' + self.log.read_text())
            return 'ready' in self.log.read_text().split()
        wait_until(ready, 'the service says "ready"')

    def signal(self, number):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)
        if number == signal.SIGKILL:
            self.process.wait()

    def alive(self):
        return self.process.poll() is None

    def send(self, method, path, headers, body, connections=None):
        connection = http.client.HTTPConnection('127.0.0.1', self.port, timeout=60)
        if connections is not None:
            connections.append(connection)
        try:
            connection.request(method, path, body or (b'' if method == 'POST' else None), {'Connection': 'close', **headers})
            response = connection.getresponse()
            return Answer(response.status, response.getheaders(), response.read())
        finally:
            connection.close()

    def close(self):
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGKILL)


class Stage:
    """The database, the proxy before it, and the services."""

    def __init__(self, options):
        self.options, self.schema, self.random = options, options.schema, random.Random(options.seed)
        self.room, self.number, self.logs, self._admin = cluster.Room(), 0, [], None
        self.database = 'conformance'
        if options.dsn:
            info = psycopg.conninfo.conninfo_to_dict(options.dsn)
            self.database = info.get('dbname', info.get('user'))
            self.connect = lambda: psycopg.connect(options.dsn, autocommit=True)
            with self.connect() as connection:
                host, port = connection.info.host, connection.info.port
                with contextlib.suppress(psycopg.errors.DuplicateObject):
                    connection.execute('CREATE ROLE shop LOGIN')
                connection.execute(f'SET search_path = "{self.schema}"')
                connection.execute("SELECT idem_grant('shop', 'app')")
            self.server = f'{host}/.s.PGSQL.{port}' if host.startswith('/') else (host, port)
        else:
            self.primary, self.standby = cluster.Server(self.room, 1), cluster.Server(self.room, 2)
            self.connect = lambda: self.primary.connect()
            self.primary.make(options.edition, self.schema)
            self.server = self.primary.socket
        with self.connect() as connection:
            if not connection.execute("SELECT to_regclass('public.payments')").fetchone()[0]:
                connection.execute(cluster.TABLES)
        self.proxy = pg_proxy.Proxy(self.server)

    def log(self, number):
        self.logs.append(self.room.path / f'service{number}.log')
        return self.logs[-1]

    def sql(self, query):
        """The first value of the first row."""
        if self._admin is None or self._admin.closed:
            self._admin = self.connect()
            self._admin.execute(f'SET search_path = "{self.schema}", public')
        cursor = self._admin.execute(query)
        row = cursor.fetchone() if cursor.description else None
        return row[0] if row else None

    def id(self):
        self.number += 1
        return f'r{self.number}-{self.random.getrandbits(32):08x}'

    def rows(self, id):
        """How often the request was executed, and the provider called."""
        mine = f"reference = '{id}' OR reference LIKE '{id}-%'"
        return (self.sql(f"SELECT count(*) FROM public.payments WHERE user_id = 'u-{id}' OR user_id LIKE 'u-{id}-%' OR {mine}"),
                self.sql(f'SELECT count(*) FROM public.provider_calls WHERE {mine}'))

    @contextlib.contextmanager
    def service(self, port=None, command=None, **env):
        service = Service(self, command or self.options.command, port or self.proxy.port, **{**dict(self.options.set), **env})
        try:
            yield service
        finally:
            service.close()
            self.proxy.watched = None

    def idle(self):
        wait_until(lambda: self.sql(CASES['queries']['idle']), 'no transaction is open')


# ----- cases -----

def fill(value, id):
    """$id and $user; ["x", 3] is "xxx"."""
    if isinstance(value, str):
        return value.replace('$id', id).replace('$user', 'u-' + id)
    if isinstance(value, list) and len(value) == 2 and isinstance(value[0], str) and isinstance(value[1], int):
        return value[0] * value[1]
    if isinstance(value, dict):
        return {name: fill(one, id) for name, one in value.items()}
    return value


def request_of(step, id):
    """method, path, headers, body"""
    method, path = fill(step['send'], id).split(' ', 1)
    headers, body = {'X-User': 'u-' + id}, None
    if 'json' in step:
        body = json.dumps(fill(step['json'], id)).encode()
    if 'text' in step:
        body = fill(step['text'], id).encode()
    if 'bytes' in step:
        body = bytes.fromhex(fill(step['bytes'], id))
    if body is not None:
        headers['Content-Type'] = 'application/octet-stream' if path.startswith('/upload') else 'application/json'
    if 'key' in step:
        headers['Idempotency-Key'] = fill(step['key'], id)
    return method, path, {**headers, **fill(step.get('headers', {}), id)}, body


def expectation(expected):
    """With what it is like."""
    if isinstance(expected, str):
        expected = CASES['answers'][expected]
    if 'like' in expected:
        base = expectation(expected['like'])
        return {**base, **expected, 'headers': {**base.get('headers', {}), **expected.get('headers', {})}}
    return expected


def contains(got, expected):
    if isinstance(expected, dict) and isinstance(got, dict):
        return all(name in got and contains(got[name], value) for name, value in expected.items())
    return got == expected


def differences(answer, expected):
    expected, found = expectation(expected), []
    status = expected.get('status', answer.status)
    if answer.status not in (status if isinstance(status, list) else [status]):
        found.append(f'status {status}')
    for name, value in expected.get('headers', {}).items():
        got = answer.headers.get(name)
        if value is None:
            good = got is None
        elif value[0] == '~':
            good = got is not None and re.search(value[1:], got) is not None
        else:
            good = got is not None and value in ('*', got)
        if not good:
            found.append(f'header {name} {value!r}')
    if 'body' in expected and answer.body != expected['body'].encode():
        found.append(f'body {expected["body"]!r}')
    if 'bytes' in expected and answer.body != bytes.fromhex(expected['bytes']):
        found.append(f'body {expected["bytes"]}')
    if 'json' in expected and not contains(answer.json(), expected['json']):
        found.append(f'JSON {expected["json"]}')
    if 'problem' in expected:
        problem = answer.json() or {}
        if answer.headers.get('content-type', '').partition(';')[0] != 'application/problem+json' or problem.get('type') != expected['problem'] \
                or problem.get('status') != answer.status or not problem.get('title') or not problem.get('detail'):
            found.append(f'problem {expected["problem"]} with type, title, status and detail')
    expires = answer.headers.get('idempotency-expires')
    if expires and not email.utils.parsedate_to_datetime(expires).timestamp() > time.time():
        found.append('an expiry that is in the future')
    return found


def run_case(stage, service, case, threads):
    id, background, answers, wrong = stage.id(), {}, {}, []
    for place, step in enumerate(case['steps'], 1):
        answer, sockets = None, []
        if 'begin' in step:
            background[step['begin']] = threads.submit(service.send, *request_of(step, id), sockets), sockets
        elif 'send' in step:
            answer = service.send(*request_of(step, id))
        elif 'end' in step:
            answer = background[step['end']][0].result(60)
            answers[step['end']] = answer
        elif 'abandon' in step:
            future, sockets = background[step['abandon']]
            sockets[0].sock.shutdown(cluster.socket.SHUT_RDWR)
            future.exception(60)
        elif 'until' in step:
            wait_until(lambda query=fill(CASES['queries'].get(step['until'], step['until']), id): stage.sql(query), step['until'], 30)
        else:
            stage.sql(fill(CASES['queries'].get(step['sql'], step['sql']), id))
        if answer is None:
            continue
        if 'as' in step:
            answers[step['as']] = answer
        bad = differences(answer, step.get('is', {}))
        if 'same' in step and answer.identity() != answers[step['same']].identity():
            bad.append(f'the same as {answers[step["same"]]}')
        if bad:
            wrong.append(f'step {place}: expected {", ".join(bad)}\n  got {answer}')
    for kind, count in zip(('payments', 'calls'), stage.rows(id)):
        if case.get(kind, 0) not in (count, 'any'):
            wrong.append(f'{kind}: {count}, expected {case.get(kind, 0)}')
    return wrong


def try_cases(stage, service, how, pool=4):
    for case in CASES['cases']:
        if case.get('pool', 1) > pool:
            continue
        threads = concurrent.futures.ThreadPoolExecutor()
        try:
            wrong = run_case(stage, service, case, threads)
        except Exception as error:    # a service that hangs or died, a condition that is never met
            wrong = [f'{type(error).__name__}: {error}']
        if 'finally' in case:
            stage.sql(case['finally'])
        ok(not wrong, f'{how}{case["name"]}', '\n'.join(wrong))
        threads.shutdown(wait=False)
        if not service.alive():
            ok(False, f'{how}the service lives', service.log.read_text()[-2000:])
            service.start()


# ----- faults -----

def flow(name, path, **more):
    def step(id):
        if path in ('/once', '/call', '/lease'):
            return {'send': f'POST {path}', 'json': {'user': 'u-' + id, 'id': id, 'amount': 30, **more}}
        return {'send': f'POST {path}', 'key': id, 'json': {'amount': 30, **more}}
    return types.SimpleNamespace(name=name, send=lambda service, id: service.send(*request_of(step(id), id)))


HTTP, ONCE, CALL = flow('http', '/pay'), flow('once', '/once'), flow('call', '/call')
LEASE = flow('lease', '/lease', lease='1 s', work=0)


def settle(service, flow, id, revive=True):
    """As a client does: sends the request until it is answered for good.  All that it heard, the last one is the answer."""
    heard, deadline = [], time.monotonic() + 90
    while True:
        try:
            heard.append(flow.send(service, id))
        except LOST as error:
            heard.append(error)
        if isinstance(heard[-1], Answer) and heard[-1].status < 300:
            return heard
        if not service.alive() and revive:
            service.start()
        if time.monotonic() > deadline:
            raise TimeoutError(f'{id} is never answered: {heard[-3:]}')
        time.sleep(0.02)    # the pause of a client that retries


class Tally:
    """What a fault did at each point."""

    def __init__(self, stage, name):
        self.stage, self.name = stage, name
        self.points = self.reached = self.seen = self.effects = 0
        self.wrong, self.visible = [], []

    def add(self, point, id, answers, heard, reached=True, calls=None):
        payments, called = self.stage.rows(id)
        self.points += 1
        self.reached += reached
        self.effects += payments
        if payments != 1:
            self.wrong.append(f'{point}: {payments} executions')
        if calls is not None and called > calls:
            self.wrong.append(f'{point}: {called} calls of the provider')
        if any(answer.identity() != answers[0].identity() for answer in answers):
            self.wrong.append(f'{point}: answers differ: {answers}')
        if not answers[-1].replayed():
            self.wrong.append(f'{point}: the last answer is no replay: {answers[-1]}')
        if len(heard) > 1:
            self.seen += 1
            self.visible.append(f'{point}: {heard[0]!r}')

    def report(self, invisible=False, service=None):
        ok(self.points and not self.wrong, f'{self.name}: {self.points} points, {self.reached} reached, {self.effects} executions', '\n'.join(self.wrong[:12]))
        if invisible:
            ok(not self.visible, f'{self.name}: no caller sees it', f'{self.seen} did\n' + '\n'.join(self.visible[:12]))
        else:
            note(f'{self.name}: {self.seen} callers were told to try again')
        if self.reached < 0.9 * self.points:
            ok(False, f'{self.name}: its points are reached', f'{self.reached} of {self.points}')
        if service and not service.alive():
            ok(False, f'{self.name}: the service lives', service.log.read_text()[-2000:])
            service.start()


def record(stage, service, flow, **more):
    """The messages of one run; the service has had one before, so that its connections are made."""
    settle(service, flow, stage.id())
    stage.idle()
    watch = stage.proxy.watch(**more)
    settle(service, flow, stage.id())
    messages = list(watch.messages)
    stage.proxy.watched = None
    return messages


def every_point(messages):
    return [(place, when) for place in range(len(messages)) for when in ('before', 'after')]


def calls(messages):
    """Before and after each call: what the client sends last before it waits, and the end of the server's answer."""
    return [point for place, message in enumerate(messages) for point in
            ([(place, 'before'), (place, 'after')] if message[:3] in ('> Q', '> S') else [(place, 'before')] if message[:3] == '< Z' else [])]


def label(messages, point):
    return f'{point[1]} {point[0]} {messages[point[0]]}'


def try_points(stage, service, flow, name, messages, points, action, invisible=False, **more):
    tally = Tally(stage, f'{flow.name}: {name}')
    for point in points:
        id, watch = stage.id(), stage.proxy.watch(*point, action, **more)
        heard = settle(service, flow, id)
        stage.proxy.watched = None
        replay = settle(service, flow, id)[-1]
        tally.add(label(messages, point), id, [heard[-1], replay], heard, watch.hit.is_set(), 1)
    tally.report(invisible, service)


def try_cuts(stage, service, thin=False, how=''):
    for one in HTTP, ONCE, CALL:
        messages = record(stage, service, one)
        note(f'{one.name}: ' + ' | '.join(messages))
        points = calls(messages) if thin else every_point(messages)
        try_points(stage, service, one, f'{how}cut at each message', messages, points, pg_proxy.cut, not how)
    if not thin:
        stage.proxy.cut_all()
        messages = record_new(stage, service, HTTP)
        try_points(stage, service, HTTP, 'cut while it connects', messages, every_point(messages), lambda link: link.cut(), True, new=True)
    tally = Tally(stage, f'http: {how}idle connections cut')
    for _ in range(5):
        stage.idle()
        stage.proxy.cut_all()
        id = stage.id()
        heard = settle(service, HTTP, id)
        tally.add('idle', id, [heard[-1], settle(service, HTTP, id)[-1]], heard)
    tally.report(not how, service)


def record_new(stage, service, flow):
    """The messages of a connection from its start to its first query."""
    watch = stage.proxy.watch(new=True)
    stage.proxy.cut_all()
    settle(service, flow, stage.id())
    stage.proxy.watched = None
    first = next((place for place, message in enumerate(watch.messages) if message.startswith('< Z')), -1)
    return watch.messages[:first + 1]


def try_terminated(stage, service):
    def terminate(link):
        with stage.connect() as connection:
            connection.execute('SELECT pg_terminate_backend(%s, 60000)', (link.pid,))
    for one in HTTP, ONCE, CALL:
        messages = record(stage, service, one)
        points = every_point(messages) if stage.options.full else calls(messages)
        try_points(stage, service, one, 'backend terminated', messages, points, terminate, True)


def try_kills(stage, service):
    for one in (HTTP, ONCE, CALL) if stage.options.full else (HTTP,):
        messages = record(stage, service, one)
        points = every_point(messages) if stage.options.full else calls(messages)
        try_points(stage, service, one, 'service killed', messages, points, lambda link: service.signal(signal.SIGKILL))


def try_concurrent(stage, service, how='', rounds=1):
    flows = [flow('http', '/pay', sleep=0.2), flow('http that waits', '/wait', sleep=0.2), flow('once', '/once', sleep=0.2), CALL,
             flow('lease', '/lease', lease='5 s', work=0.2)]
    for one in flows * rounds:
        id, barrier = stage.id(), threading.Barrier(20)

        def client(_):
            barrier.wait()
            return settle(service, one, id)[-1]
        tally = Tally(stage, f'{how}20 concurrent retries, {one.name}')
        with concurrent.futures.ThreadPoolExecutor(20) as threads:
            answers = list(threads.map(client, range(20)))
        new = sum(not answer.replayed() for answer in answers)
        if new != 1:
            tally.wrong.append(f'{new} answers are no replays')
        tally.add('', id, sorted(answers, key=Answer.replayed), [], True, 1)
        tally.report(service=service)


def try_isolation(stage, service):
    """Conflicts of serializable transactions are repeated unseen."""
    for level in 'repeatable read', 'serializable':
        stage.sql(f"ALTER ROLE shop SET default_transaction_isolation = '{level}'")
        stage.proxy.cut_all()
        try_concurrent(stage, service, f'{level}: ')
    stage.sql('ALTER ROLE shop RESET default_transaction_isolation')
    stage.proxy.cut_all()


# ----- leases -----

def lapsed(stage, id):
    return stage.sql(f"SELECT lease_until + interval '0.2 s' < clock_timestamp() FROM idem_lookup('u-{id}', '{id}', 'lease')")


def try_lease_faults(stage, service, second):
    messages = record(stage, service, LEASE, every=True)
    note('lease: ' + ' | '.join(messages))
    points = every_point(messages) if stage.options.full else calls(messages)
    try_points(stage, service, LEASE, 'cut', messages, points, pg_proxy.cut, every=True)

    tally = Tally(stage, 'lease: holder killed')
    for point in points:
        id, watch = stage.id(), stage.proxy.watch(*point, lambda link: service.signal(signal.SIGKILL), every=True)
        with contextlib.suppress(*LOST):
            LEASE.send(service, id)
        stage.proxy.watched = None
        starting = threading.Thread(target=service.start) if not service.alive() else None
        if starting:
            starting.start()
        heard = settle(second, LEASE, id)
        if starting:
            starting.join()
        tally.add(label(messages, point), id, [heard[-1], settle(service, LEASE, id)[-1]], heard, watch.hit.is_set(), 1)
    tally.report(service=second)

    tally = Tally(stage, 'lease: holder paused beyond its lease')
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        for point in points:
            id, stopped, going = stage.id(), threading.Event(), threading.Event()

            def pause(link):
                service.signal(signal.SIGSTOP)
                stopped.set()
                going.wait(60)
            watch = stage.proxy.watch(*point, pause, every=True)
            first = threads.submit(LEASE.send, service, id)
            wait_until(lambda: stopped.is_set() or first.done(), 'the holder is paused or has answered')
            heard = []

            def replaced():    # or its transaction keeps the request beyond the lease
                heard.append(LEASE.send(second, id))
                return heard[-1].status == 200 or (lapsed(stage, id) is not False and LEASE.send(second, id).status == 409 and lapsed(stage, id))
            wait_until(replaced, 'the holder is replaced')
            service.signal(signal.SIGCONT)
            going.set()
            late = first.result(60)
            stage.proxy.watched = None
            answers = [settle(second, LEASE, id)[-1], settle(service, LEASE, id)[-1]]
            tally.add(label(messages, point) + f', then {late}', id, ([late] if late.status == 200 else []) + answers, heard, watch.hit.is_set(), 1)
            if late.status not in (200, 409, 503):
                tally.wrong.append(f'{label(messages, point)}: the holder answers {late}')
    tally.report(service=service)


def try_heartbeats(stage, service, second):
    """The holder is at work when its database is gone: it must stop by itself, in time."""
    working = flow('lease', '/lease', lease='2 s', work=8)
    for how in 'cut', 'hold':
        tally = Tally(stage, f'lease: its heartbeat {"cut" if how == "cut" else "unanswered"}')
        with concurrent.futures.ThreadPoolExecutor(2) as threads:
            id = stage.id()
            first = threads.submit(working.send, service, id)
            wait_until(lambda: stage.rows(id)[1], 'the provider is called')
            stage.proxy.blackout(how)
            ends = wait_until(lambda: first.done() and stage.sql(
                f"SELECT extract(epoch FROM clock_timestamp() - lease_until)::float8 FROM idem_lookup('u-{id}', '{id}', 'lease')"), 'the holder stops', 30)
            late = first.result()
            stage.proxy.light()
            ok(ends < 0.5, f'{tally.name}: the holder stops before its lease ends', f'{ends} s after it')
            ok(late.status in (409, 503), f'{tally.name}: it says so', late)
            heard = settle(second, LEASE, id)
            tally.add(how, id, [heard[-1], settle(service, LEASE, id)[-1]], heard, True, 1)
        tally.report(service=service)


# ----- failover -----

def try_failover(stage, service):
    messages = record(stage, service, HTTP)
    stage.standby.follow(stage.primary)
    commit = max(place for place, message in enumerate(messages) if message.startswith(('> Q', '> S', '> P')))
    points = calls(messages) if stage.options.full else [(2, 'after'), (commit, 'before'), (commit, 'after'), (len(messages) - 1, 'before')]

    def fail_over(link):
        old, stage.primary = stage.primary, stage.standby
        stage.standby = old
        stage.proxy.refuses = True
        old.pg_ctl('stop', '-m', 'immediate')
        stage.primary.promote()
        stage.proxy.server = stage.primary.socket
        stage.proxy.cut_all()
        stage.proxy.refuses = False
        stage._admin = None
    tally = Tally(stage, 'http: failover to a synchronous standby')
    for n, point in enumerate(points):
        if n:
            stage.standby.follow(stage.primary)
        before, id = stage.id(), stage.id()
        earlier = settle(service, HTTP, before)[-1]
        watch = stage.proxy.watch(*point, fail_over)
        heard = settle(service, HTTP, id)
        stage.proxy.watched = None
        tally.add(label(messages, point), id, [heard[-1], settle(service, HTTP, id)[-1]], heard, watch.hit.is_set())
        tally.add('before the failover', before, [earlier, settle(service, HTTP, before)[-1]], [])
    tally.report(service=service)


def try_other(stage, service, other):
    for one in HTTP, ONCE, CALL, flow('lease', '/lease', lease='5 s', work=0):
        for first, second, how in (service, other, 'replayed by the other client'), (other, service, 'of the other client, replayed'):
            tally, id = Tally(stage, f'{one.name} {how}'), stage.id()
            tally.add('', id, [settle(first, one, id)[-1], settle(second, one, id)[-1]], [])
            tally.report(service=service)


def run(stage, options):
    full = options.full

    def wants(part):
        return part in options.only
    if any(map(wants, PARTS[:6])):
        with stage.service() as service:
            if wants('cases'):
                try_cases(stage, service, '')
            if wants('concurrent'):
                try_concurrent(stage, service, rounds=5 if full else 1)
                try_isolation(stage, service)
            if wants('cuts'):
                try_cuts(stage, service)
            if wants('terminated'):
                try_terminated(stage, service)
            if wants('kills'):
                try_kills(stage, service)
            if wants('leases'):
                with stage.service(pg_proxy.Proxy(stage.proxy.server).port) as second:
                    try_lease_faults(stage, service, second)
                    try_heartbeats(stage, service, second)
    if wants('one'):
        with stage.service(POOL_SIZE='1') as service:
            try_cases(stage, service, 'pool of one: ', 1)
            try_concurrent(stage, service, 'pool of one: ')
    if wants('pgbouncer'):
        with stage.room.pgbouncer('127.0.0.1', stage.proxy.port, 3) as port, stage.service(port, PGBOUNCER='1') as service:
            try_cases(stage, service, 'PgBouncer: ')
            try_concurrent(stage, service, 'PgBouncer: ')
            try_cuts(stage, service, not full, 'PgBouncer, ')
    if wants('other') and options.other:
        with stage.service() as service, stage.service(command=options.other) as other:
            try_other(stage, service, other)
    if wants('failover') and not options.dsn:
        with stage.service() as service:
            try_failover(stage, service)


def main():
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument('--edition', default='idem')
    parser.add_argument('--schema', default='idem')
    parser.add_argument('--full', action='store_true')
    parser.add_argument('--only', type=lambda names: names.split(','), default=PARTS)
    parser.add_argument('--seed', type=int, default=random.SystemRandom().getrandbits(32))
    parser.add_argument('--dsn')
    parser.add_argument('--other')
    parser.add_argument('--set', type=lambda pair: pair.split('=', 1), action='append', default=[])
    parser.add_argument('command')
    options = parser.parse_args()
    if not set(options.only) <= set(PARTS):
        parser.error(f'parts: {" ".join(PARTS)}')
    note(f'seed {options.seed}')
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    stage = None
    try:
        stage = Stage(options)
        run(stage, options)
    except Exception as error:
        import traceback
        last = stage.logs[-1].read_text()[-1500:] if stage and stage.logs else ''
        ok(False, 'the driver ends', ''.join(traceback.format_exception(error)) + last)
    finally:
        if stage:
            stage.room.close()
    print(f'1..{tests}')
    return failures > 0


if __name__ == '__main__':
    sys.exit(main())
