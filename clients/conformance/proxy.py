"""A proxy for PostgreSQL's protocol that can act before or after any message.

proxy.watch(7, 'before', action) calls action(link) before message 7 of the connection that sends one next is passed on.
Encryption is refused, so the messages are readable.  Connections that are made after a change of `proxy.server` lead to
the new one.
"""

import contextlib
import socket
import struct
import threading

CANCEL, TLS, GSS = 80877102, 80877103, 80877104


class Watch:
    """Counts the messages of one connection, and acts once, at message `at`, in the thread that passes it on.
    new: of the next connection that is made; every: of all connections; kinds: only messages that begin so."""

    def __init__(self, at, when, action, new, every, kinds):
        self.at, self.when, self.action, self.new, self.every, self.kinds = at, when, action, new, every, kinds
        self.link, self.messages, self.hit = None, [], threading.Event()

    def is_here(self, link, side, message):
        start = message[:1] == b'\0'
        if self.link is None and side == '>' and message[:1] != b'X' and (start or not self.new) and message[4:8] != struct.pack('!I', CANCEL):
            self.link = link
        text = f'{side} {describe(side, message)}'
        if self.link is not link and not (self.every and self.link) or self.kinds and not text.startswith(self.kinds):
            return False
        self.messages.append(text)
        if len(self.messages) - 1 != self.at:
            return False
        self.hit.set()
        return True


def describe(side, message):
    kind, body = message[:1].decode('latin-1'), message[5:]
    if side == '>' and kind == 'P':
        body = body.partition(b'\0')[2]
    if side + kind in ('>Q', '>P', '<C', '<Z'):
        return kind + ' ' + ' '.join(body.partition(b'\0')[0].decode('utf-8', 'replace').split())[:60]
    return 'startup' if kind == '\0' else kind


class Link:
    """A connection: its client, its server, and a thread for each direction."""

    def __init__(self, proxy, client):
        self.proxy, self.client, self.server, self.pid = proxy, client, None, None

    def run(self):
        with contextlib.suppress(OSError):
            start = self.startup()
            self.server = self.proxy.connect()
            threading.Thread(target=self.pump, args=('<', self.server, self.client), daemon=True).start()
            self.pass_on('>', start, self.server)
            self.pump('>', self.client, self.server)
        self.cut()
        self.proxy.links.discard(self)

    def startup(self):
        while True:
            message = self.client.recv(1 << 16)    # short, and sent at once
            if len(message) < 8:
                raise ConnectionError
            if struct.unpack('!I', message[4:8])[0] not in (TLS, GSS):
                return message
            self.client.sendall(b'N')

    def pump(self, side, source, target):
        buffer = b''
        with contextlib.suppress(OSError):
            while chunk := source.recv(1 << 16):
                buffer += chunk
                while len(buffer) >= 5 and len(buffer) >= (end := 1 + struct.unpack('!I', buffer[1:5])[0]):
                    self.pass_on(side, buffer[:end], target)
                    buffer = buffer[end:]
        self.cut()

    def pass_on(self, side, message, target):
        if side == '<' and message[:1] == b'K':
            self.pid = struct.unpack('!I', message[5:9])[0]
        with self.proxy.lock:
            watch = self.proxy.watched
            when = watch.when if watch and watch.is_here(self, side, message) else None
        if when == 'before':
            watch.action(self)
        self.proxy.light.wait()
        # If the client is gone, what the server still says is read: so it does all that it was told.
        with contextlib.suppress(OSError) if side == '<' else contextlib.nullcontext():
            target.sendall(message)
        if when == 'after':
            watch.action(self)

    def cut(self):
        """The client finds the connection closed; the server does so when it has read what it was sent."""
        for end, how in (self.client, socket.SHUT_RDWR), (self.server, socket.SHUT_WR):
            with contextlib.suppress(OSError, AttributeError):
                end.shutdown(how)


class Proxy:
    def __init__(self, server):
        self.server, self.refuses = server, False
        self.links, self.lock, self.watched = set(), threading.Lock(), None
        self.light = threading.Event()    # while it is not set, nothing is passed on, without a word to either side
        self.light.set()
        self.listener = socket.create_server(('127.0.0.1', 0), backlog=100)
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        while True:
            client, _ = self.listener.accept()
            if self.refuses:
                client.close()
                continue
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            link = Link(self, client)
            self.links.add(link)
            threading.Thread(target=link.run, daemon=True).start()

    def connect(self):
        server = socket.socket(socket.AF_UNIX if isinstance(self.server, str) else socket.AF_INET)
        server.connect(self.server)
        return server

    def watch(self, at=None, when='before', action=None, new=False, every=False, kinds=None):
        self.watched = Watch(at, when, action, new, every, kinds)
        return self.watched

    def cut_all(self):
        for link in list(self.links):
            link.cut()
