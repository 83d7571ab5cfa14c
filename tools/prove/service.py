"""The processes of the service: one that gets the requests, and a spare one that is started ahead."""

import contextlib
import http.client
import os
import pathlib
import re
import shlex
import signal
import socket
import subprocess
import threading
import time
import urllib.parse


class ServiceError(Exception):
    """The service cannot be tried: that is no finding."""


def free_port():
    with socket.create_server(('127.0.0.1', 0)) as free:
        return free.getsockname()[1]


class Instance:
    def __init__(self, fleet, number):
        self.fleet, self.number, self.is_ready = fleet, number, False
        self.port = free_port() if fleet.pairs else fleet.fixed_port
        self.log = fleet.folder / f'service{number}.log'
        values = {**fleet.values, 'port': self.port}
        environment = {name: value for name, value in os.environ.items() if not name.startswith('PG')}
        environment |= {'PORT': str(self.port), **{name: fill(value, values) for name, value in fleet.environment.items()}}
        self.ready = urllib.parse.urlsplit(fill(fleet.ready, values))
        with open(self.log, 'wb') as log:
            self.process = subprocess.Popen([fill(word, values) for word in shlex.split(fleet.command)], env=environment, stdin=subprocess.DEVNULL,
                                            stdout=log, stderr=log, start_new_session=True)
        self.began = time.monotonic()

    def wait(self):
        """Until it answers at --ready."""
        while not self.is_ready:
            if self.process.poll() is not None or time.monotonic() > self.began + 60:
                what = f'ended, exit code {self.process.returncode}' if self.process.poll() is not None else f'does not answer at {self.ready.geturl()}; does it read PORT?'
                raise ServiceError(f'the service {what}:\n{self.last_words()}')
            connection = http.client.HTTPConnection(self.ready.hostname, self.ready.port, timeout=5)
            try:
                connection.request('GET', self.ready.path or '/')
                self.is_ready = connection.getresponse().status < 500
            except (OSError, http.client.HTTPException):
                pass
            finally:
                connection.close()
            if not self.is_ready:
                time.sleep(0.02)

    def last_words(self, size=2000):
        return self.log.read_text(errors='replace')[-size:]

    def signal(self, number):
        try:
            os.killpg(self.process.pid, number)
        except ProcessLookupError:
            return
        if number == signal.SIGKILL:
            self.process.wait()
        state = pathlib.Path(f'/proc/{self.process.pid}/stat')
        while number == signal.SIGSTOP and state.exists() and state.read_text().rpartition(')')[2].split()[0] not in 'TZ':
            time.sleep(0.001)    # it acts a moment later


def fill(text, values):
    return re.sub(r'\{(\w+)\}', lambda found: str(values.get(found[1], found[0])), text)


class Fleet:
    """pairs: two instances can run at a time, because the service takes its port from {port} or PORT."""

    def __init__(self, options, environment, values, folder):
        self.command, self.ready, self.environment, self.values, self.folder = options.start, options.ready, environment, values, folder
        self.pairs = '{port}' in self.ready
        self.fixed_port = None if self.pairs else urllib.parse.urlsplit(self.ready).port or 80
        self.number, self.deaths, self.current, self.spare, self.lock = 0, [], None, None, threading.RLock()

    def make(self):
        self.number += 1
        return Instance(self, self.number)

    def wait(self):
        """Until all are ready."""
        if not self.current:
            self.current, self.spare = self.make(), self.make() if self.pairs else None
        self.revive()
        for instance in self.current, self.spare:
            if instance:
                instance.wait()

    def replace(self):
        """The current one is gone."""
        self.current, self.spare = (self.spare, self.make()) if self.pairs else (self.make(), None)

    def kill(self):
        with self.lock:
            self.current.signal(signal.SIGKILL)
            self.replace()

    def revive(self):
        """Replaces instances that ended by themselves, as what runs a service does. Returns whether there was one."""
        with self.lock:
            ended = [instance for instance in (self.current, self.spare) if instance and instance.process.poll() is not None]
            for instance in ended:
                self.deaths.append(instance.last_words(20000))
                if not instance.is_ready:
                    raise ServiceError(f'the service ended, exit code {instance.process.returncode}:\n{instance.last_words()}')
                if instance is self.current:
                    self.replace()
                else:
                    self.spare = self.make()
            return bool(ended)

    def close(self):
        running = [instance for instance in (self.current, self.spare) if instance]
        for instance in running:
            instance.signal(signal.SIGCONT)
            instance.signal(signal.SIGTERM)
        for instance in running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                instance.process.wait(2)
            instance.signal(signal.SIGKILL)
