"""The program that doc/leases.md names, in a process that is stopped after one of its calls. Called by test/drivers/try.

usage: try_leases.py {"socket", "user", "request", "amount", "autocommit", "deduplicates", "lease", "longest",
                     "stop": {"after", "how"}}

Prints what it is paused after, and then its outcome or error, in lines of JSON.
"""

import contextlib
import json
import os
import signal
import socket
import sys

import psycopg

import charge

parameters = json.loads(sys.argv[1])
calls = []


def say(**message):
    print(json.dumps({**message, 'calls': calls}), flush=True)


def returned(call):
    calls.append(call)
    stop = parameters.get('stop')
    if not stop or len(calls) != stop['after']:
        return
    if stop['how'] == 'killed':
        os.kill(os.getpid(), signal.SIGKILL)
    if stop['how'] == 'paused':
        say(paused=call)
        os.kill(os.getpid(), signal.SIGSTOP)
    if stop['how'] == 'terminated':
        with psycopg.connect() as other:
            other.execute('SELECT pg_terminate_backend(%s, 60000)', (database.connection.info.backend_pid,))


class Database:
    def __init__(self):
        self.connection = psycopg.connect(autocommit=parameters['autocommit'])
        self.autocommit = self.connection.autocommit

    def execute(self, query, values):
        result = self.connection.execute(query, values)
        returned(query.split('idem_')[1].split('(')[0] if 'idem_' in query else query.split()[0])
        return result

    @contextlib.contextmanager
    def transaction(self):
        with self.connection.transaction():
            yield
        returned('COMMIT')


class Provider:
    deduplicates = parameters['deduplicates']

    def ask(self, *question):
        with socket.socket(socket.AF_UNIX) as wire, wire.makefile('rw') as lines:
            wire.connect(parameters['socket'])
            print(json.dumps(question), file=lines, flush=True)
            answer = json.loads(lines.readline())
        returned(question[0])
        if answer == 'card declined':
            raise charge.Refused(answer)
        return answer

    def charge(self, reference, amount):
        return self.ask('charge', reference, amount)

    def find(self, reference):
        return self.ask('find', reference)


charge.LEASE, charge.LONGEST = parameters['lease'], parameters['longest']
database = Database()
try:
    outcome, result = charge.pay(database, Provider(), parameters['user'], parameters['request'], parameters['amount'])
    say(outcome=outcome, result=result)
except (charge.LeaseEnded, psycopg.Error, AssertionError) as error:
    say(error=getattr(error, 'sqlstate', None) or type(error).__name__)
