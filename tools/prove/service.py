"""The processes of the service: one that gets the requests, and a spare one that is started ahead."""

import http.client
import os
import pathlib
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
            if self.process.poll() is not None:
                raise ServiceError(f'the service ended, exit code {self.process.returncode}:\n{self.last_words()}')
            if time.monotonic() > self.began + self.fleet.start_timeout:
                raise ServiceError(f'the service does not answer at {self.ready.geturl()}:\n{self.last_words()}')
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

    def last_words(self):
        return self.log.read_text(errors='replace')[-2000:]

    def signal(self, number):
        try:
            os.killpg(self.process.pid, number)
        except ProcessLookupError:
            return
        if number == signal.SIGKILL:
            self.process.wait()
        if number == signal.SIGSTOP:    # it acts a moment later
            for _ in range(1000):
                try:
                    if pathlib.Path(f'/proc/{self.process.pid}/stat').read_text().rpartition(')')[2].split()[0] in 'TZ':
                        break
                except OSError:    # no /proc here
                    time.sleep(0.01)
                    break
                time.sleep(0.001)


def fill(text, values):
    for name, value in values.items():
        text = text.replace('{' + name + '}', str(value))
    return text


class Fleet:
    """pairs: two instances can run at a time, because the service takes its port from {port} or PORT."""

    def __init__(self, options, environment, values, folder):
        self.command, self.ready, self.start_timeout = options.start, options.ready, options.start_timeout
        self.environment, self.values, self.folder = environment, values, folder
        self.pairs = '{port}' in self.ready
        self.fixed_port = None if self.pairs else urllib.parse.urlsplit(self.ready).port or 80
        self.number, self.deaths, self.current, self.spare, self.lock = 0, [], None, None, threading.RLock()

    def make(self):
        self.number += 1
        return Instance(self, self.number)

    def start(self):
        self.current = self.make()
        self.spare = self.make() if self.pairs else None
        self.wait()

    def wait(self):
        """Until all are ready."""
        self.revive()
        for instance in self.current, self.spare:
            if instance:
                instance.wait()

    def other(self):
        return self.spare or self.current

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
                if not instance.is_ready:
                    raise ServiceError(f'the service ended, exit code {instance.process.returncode}:\n{instance.last_words()}')
                self.deaths.append(instance.last_words())
                if instance is self.current:
                    self.replace()
                else:
                    self.spare = self.make()
            return bool(ended)

    def close(self):
        for instance in self.current, self.spare:
            if instance:
                instance.signal(signal.SIGCONT)
                instance.signal(signal.SIGTERM)
        for instance in self.current, self.spare:
            if instance:
                try:
                    instance.process.wait(2)
                except subprocess.TimeoutExpired:
                    pass
                instance.signal(signal.SIGKILL)
