"""What prove itself asks PostgreSQL: a client for the simple protocol, which logs in as the server wants it."""

import base64
import collections
import hashlib
import hmac
import os
import re
import socket
import struct
import threading
import urllib.parse

import messages


class DatabaseError(Exception):
    pass


def parse(conninfo):
    """The parameters of "host=... dbname=..." or postgres://...; what is missing is that of PGHOST and so on."""
    found = {'host': os.environ.get('PGHOST', '127.0.0.1'), 'port': os.environ.get('PGPORT', '5432'), 'user': os.environ.get('PGUSER', os.environ.get('USER', 'postgres')),
             'dbname': os.environ.get('PGDATABASE', ''), 'password': os.environ.get('PGPASSWORD', '')}
    if re.match(r'postgres(ql)?://', conninfo):
        url = urllib.parse.urlsplit(conninfo)
        given = {'host': url.hostname, 'port': url.port and str(url.port), 'user': url.username, 'password': url.password, 'dbname': url.path[1:],
                 **dict(urllib.parse.parse_qsl(url.query))}
        found |= {name: urllib.parse.unquote(value) for name, value in given.items() if value}
    else:
        for name, quoted, plain in re.findall(r"(\w+)\s*=\s*(?:'((?:[^'\\]|\\.)*)'|(\S+))", conninfo):
            found[name] = re.sub(r'\\(.)', r'\1', quoted) or plain
    found['dbname'] = found['dbname'] or found['user']
    return found


def address(parameters):
    host, port = parameters['host'], parameters['port']
    return f'{host}/.s.PGSQL.{port}' if host.startswith('/') else (host, int(port))


def connect(where):
    if isinstance(where, str):
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(where)
    else:
        connection = socket.create_connection(where)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def literal(value):
    return "'" + str(value).replace("'", "''") + "'"


class Database:
    def __init__(self, parameters):
        self.parameters, self.socket, self.lock = parameters, None, threading.Lock()

    def connect(self):
        self.buffer, self.whole, self.socket = bytearray(), collections.deque(), connect(address(self.parameters))
        body = struct.pack('!I', 196608)
        for name, value in {'user': self.parameters['user'], 'database': self.parameters['dbname'], 'application_name': 'prove', 'client_encoding': 'UTF8'}.items():
            body += name.encode() + b'\0' + value.encode() + b'\0'
        self.socket.sendall(struct.pack('!I', len(body) + 5) + body + b'\0')
        scram = None
        while True:
            kind, body = self.read()
            if kind == 'E':
                raise DatabaseError(messages.fields(body).get('M'))
            if kind == 'Z':
                return
            if kind == 'R':
                scram = self.log_in(struct.unpack('!I', body[:4])[0], body[4:], scram)

    def log_in(self, method, data, scram):
        user, password = self.parameters['user'].encode(), self.parameters['password'].encode()
        if method == 3:
            self.socket.sendall(messages.build('p', password + b'\0'))
        elif method == 5:
            inner = hashlib.md5(password + user).hexdigest().encode()
            self.socket.sendall(messages.build('p', b'md5' + hashlib.md5(inner + data).hexdigest().encode() + b'\0'))
        elif method == 10:
            scram = b'n=,r=' + base64.b64encode(os.urandom(18))
            self.socket.sendall(messages.build('p', b'SCRAM-SHA-256\0' + struct.pack('!I', len(scram) + 3) + b'n,,' + scram))
        elif method == 11:
            got = dict(part.split(b'=', 1) for part in data.split(b','))
            salted = hashlib.pbkdf2_hmac('sha256', password, base64.b64decode(got[b's']), int(got[b'i']))
            key = hmac.digest(salted, b'Client Key', 'sha256')
            last = b'c=biws,r=' + got[b'r']
            signature = hmac.digest(hashlib.sha256(key).digest(), b','.join((scram, data, last)), 'sha256')
            proof = bytes(a ^ b for a, b in zip(key, signature))
            self.socket.sendall(messages.build('p', last + b',p=' + base64.b64encode(proof)))
        elif method not in (0, 12):
            raise DatabaseError(f'the server wants authentication method {method}, which prove does not know')
        return scram

    def read(self):
        while not self.whole:
            chunk = self.socket.recv(1 << 16)
            if not chunk:
                raise ConnectionError('the server has closed the connection')
            self.buffer += chunk
            self.whole.extend(messages.split(self.buffer))
        raw = self.whole.popleft()
        return raw[:1].decode('latin-1'), raw[5:]

    def rows(self, text):
        """The rows of the last statement, as lists of texts."""
        with self.lock:
            return self.ask(text)

    def ask(self, text):
        if self.socket is None:
            self.connect()
        self.socket.sendall(messages.query(text))
        rows, failure = [], None
        while True:
            kind, body = self.read()
            if kind == 'T':
                rows = []
            elif kind == 'D':
                row, place = [], 2
                for _ in range(struct.unpack_from('!H', body)[0]):
                    size = struct.unpack_from('!i', body, place)[0]
                    row.append(None if size < 0 else body[place + 4:place + 4 + size].decode('utf-8', 'replace'))
                    place += 4 + max(size, 0)
                rows.append(row)
            elif kind == 'E':
                failure = messages.fields(body)
            elif kind == 'Z':
                if failure:
                    raise DatabaseError(f'{failure.get("M")} ({failure.get("C")}): {text}')
                return rows

    def value(self, text):
        rows = self.rows(text)
        return rows[0][0] if rows else None
