"""Throwaway clusters, in a folder that is removed at the end: a primary, its synchronous standby, PgBouncer."""

import contextlib
import os
import pathlib
import pwd
import re
import shutil
import socket
import subprocess
import tempfile
import time

import psycopg

TABLES = """
CREATE TABLE public.payments (id bigserial PRIMARY KEY, reference text, user_id text, amount int);
CREATE TABLE public.provider_calls (id bigserial, reference text);
CREATE FUNCTION public.pay(reference text, amount int) RETURNS jsonb LANGUAGE sql AS $$
    INSERT INTO public.payments (reference, amount) VALUES ($1, $2);
    SELECT jsonb_build_object('paid', $2);
$$;
GRANT SELECT, INSERT ON public.payments, public.provider_calls TO shop;
GRANT USAGE ON SEQUENCE public.payments_id_seq, public.provider_calls_id_seq TO shop;
"""


def wait_until(condition, what, seconds=120):
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(f'{what}: not within {seconds} s')
        time.sleep(0.01)
    return value


def free_port():
    with socket.create_server(('127.0.0.1', 0)) as free:
        return free.getsockname()[1]


def prepare(connection, edition, schema):
    """What the service needs in its database; and idem, where it is not installed."""
    def value(query):
        return connection.execute(query).fetchone()[0]
    if not value("SELECT count(*) FROM pg_roles WHERE rolname = 'shop'"):
        connection.execute('CREATE ROLE shop LOGIN')
    if not value("SELECT count(*) FROM pg_proc WHERE proname = 'idem_version'"):
        connection.execute(f'CREATE SCHEMA IF NOT EXISTS "{schema}"')
        connection.execute(f'CREATE EXTENSION {edition} SCHEMA "{schema}"')
    connection.execute(f'SET search_path = "{schema}", public')
    connection.execute("SELECT idem_grant('shop', 'app')")
    if not value("SELECT to_regclass('public.payments')"):
        connection.execute(TABLES)


class Server:
    """One data folder.  A server refuses to run as root: then it runs as postgres."""

    def __init__(self, room, number):
        self.room, self.number = room, number
        self.data, self.log = room.path / f'data{number}', room.path / f'log{number}'
        self.socket = str(room.path / f'.s.PGSQL.{number}')

    def pg_ctl(self, *arguments):
        self.room.run('pg_ctl', '-D', self.data, '-l', self.log, '-t', 120, '-s', '-w', *arguments)

    def connect(self, dbname='conformance'):
        return psycopg.connect(host=str(self.room.path), port=self.number, dbname=dbname, user='postgres', autocommit=True)

    def configure(self, *settings):
        with open(self.data / 'postgresql.conf', 'a', encoding='ascii') as file:
            print(*settings, sep='\n', file=file)

    def make(self, edition):
        self.room.run('initdb', '-D', self.data, '-U', 'postgres', '-A', 'trust', '-E', 'UTF8', '--locale=C.UTF-8', '--no-sync')
        self.configure("listen_addresses = ''", f"unix_socket_directories = '{self.room.path}'", f'port = {self.number}', 'fsync = off',
                       'wal_keep_size = 64MB', 'max_connections = 200', *(["shared_preload_libraries = 'idem'"] if edition == 'idem' else []))
        self.pg_ctl('start')
        with self.connect('postgres') as connection:
            connection.execute('CREATE DATABASE conformance')

    def follow(self, primary):
        """Becomes the synchronous standby of the primary."""
        shutil.rmtree(self.data, ignore_errors=True)
        self.room.run('pg_basebackup', '-h', self.room.path, '-p', primary.number, '-U', 'postgres', '-D', self.data, '-R', '-c', 'fast', '--no-sync')
        self.configure(f'port = {self.number}')
        settings = self.data / 'postgresql.auto.conf'
        settings.write_text(''.join(line for line in open(settings, encoding='utf-8') if 'synchronous' not in line))
        self.pg_ctl('start')
        with primary.connect() as connection:
            connection.execute("ALTER SYSTEM SET synchronous_standby_names = '*'")
            connection.execute('SELECT pg_reload_conf()')
            wait_until(lambda: connection.execute("SELECT 1 FROM pg_stat_replication WHERE sync_state = 'sync'").fetchone(), 'a synchronous standby')


class Room:
    """The folder, and what runs in it."""

    def __init__(self):
        found = sorted(pathlib.Path('/usr/lib/postgresql').glob('*/bin/pg_config'), key=lambda path: float(path.parts[4]))
        pg_config = os.environ.get('PG_CONFIG') or (found[-1] if found else 'pg_config')
        self.bindir = subprocess.run([pg_config, '--bindir'], check=True, capture_output=True, text=True).stdout.strip()
        self.user = 'postgres' if os.getuid() == 0 else None
        self.path = pathlib.Path(tempfile.mkdtemp(prefix='conformance.'))
        self.path.chmod(0o755)
        if self.user:
            os.chown(self.path, pwd.getpwnam(self.user).pw_uid, -1)

    def run(self, program, *arguments):
        done = subprocess.run([f'{self.bindir}/{program}', *map(str, arguments)], user=self.user, cwd=self.path, text=True, stdin=subprocess.DEVNULL,
                              stdout=open(self.path / 'out', 'w+', encoding='utf-8'), stderr=subprocess.STDOUT, check=False)
        if done.returncode:
            raise RuntimeError(f'{program} failed:\n' + (self.path / 'out').read_text())

    @contextlib.contextmanager
    def pgbouncer(self, port):
        """In transaction mode, with three connections to 127.0.0.1, port; yields its own port."""
        own = free_port()
        (self.path / 'users').write_text('"shop" ""\n')
        config = self.path / 'pgbouncer.ini'
        config.write_text(f"[databases]\n* = host=127.0.0.1 port={port}\n[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {own}\n"
                          f"unix_socket_dir =\nauth_type = trust\nauth_file = {self.path}/users\npool_mode = transaction\n"
                          'default_pool_size = 3\nignore_startup_parameters = extra_float_digits\nserver_login_retry = 0\n')
        with open(self.path / 'pgbouncer.log', 'w', encoding='utf-8') as log:
            process = subprocess.Popen([shutil.which('pgbouncer') or '/usr/sbin/pgbouncer', '-q', config], user=self.user, stdout=log, stderr=log)

        def answers():
            with contextlib.suppress(psycopg.Error):
                return not psycopg.connect(host='127.0.0.1', port=own, user='shop', dbname='postgres', connect_timeout=5).close()
        try:
            wait_until(answers, 'PgBouncer')
            yield own
        finally:
            process.terminate()
            process.wait()

    def faults(self):
        """Lines of the servers' logs that no test may cause."""
        logs = ''.join(log.read_text() for log in self.path.glob('log*'))
        return '\n'.join(line for line in logs.splitlines() if re.search('was terminated by signal|TRAP:|PANIC:|WARNING:.* (leak|not closed)', line))

    def close(self):
        for data in self.path.glob('data*'):
            if (data / 'postmaster.pid').exists():
                with contextlib.suppress(RuntimeError):
                    self.run('pg_ctl', '-D', data, '-s', '-m', 'immediate', 'stop')
        shutil.rmtree(self.path, ignore_errors=True)
