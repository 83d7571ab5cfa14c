"""A proxy for PostgreSQL's protocol that can act before or after any message of a connection.

    proxy = Proxy('/tmp/.s.PGSQL.5432')    # clients connect to 127.0.0.1, proxy.port
    watch = proxy.watch()                  # counts the messages of the connection that sends one next
    watch.messages                         # ['> Q BEGIN', '< C BEGIN', '< Z T', ...]
    proxy.watch(7, 'before', cut)          # calls cut(link) before message 7 is passed on

Encryption is refused, so the messages are readable.  `proxy.server` may change: connections that
are made later lead to the new one.  `proxy.blackout('cut' or 'hold')` ends all connections, or
passes nothing on, without a word to either side, until `proxy.light()`.
"""

import contextlib
import socket
import struct
import threading

CANCEL, TLS, GSS = 80877102, 80877103, 80877104


def cut(link):
    link.cut()


class Watch:
    """Follows one connection.  action(link) is called once, at message `at`, in the thread that passes it on."""

    def __init__(self, at, when, action, new, every, kinds):
        self.at, self.when, self.action, self.new, self.every, self.kinds = at, when, action, new, every, kinds
        self.link, self.messages, self.hit = None, [], threading.Event()

    def count(self, link, side, message):
        """The place of this message; None if it is of another connection."""
        starts = message[:1] == b'\0'
        if self.link is None and side == '>' and message[:1] != b'X' and (starts or not self.new) \
                and not (starts and message[4:8] == struct.pack('!I', CANCEL)):
            self.link = link
        if self.link is not link and not (self.every and self.link):
            return None
        text = f'{side} {describe(side, message)}'
        if self.kinds and not text.startswith(self.kinds):
            return None
        self.messages.append(text)
        return len(self.messages) - 1


def describe(side, message):
    kind = message[:1].decode('latin-1')
    if kind == '\0':
        return 'startup'
    body = message[5:]
    if side == '>' and kind == 'P':
        body = body.partition(b'\0')[2]
    if (side, kind) in (('>', 'Q'), ('>', 'P'), ('<', 'C'), ('<', 'Z')):
        return kind + ' ' + ' '.join(body.partition(b'\0')[0].decode('utf-8', 'replace').split())[:60]
    return kind


class Link:
    """A connection: its client, its server, and a thread for each direction."""

    def __init__(self, proxy, client):
        self.proxy, self.client, self.server, self.pid = proxy, client, None, None

    def run(self):
        try:
            first = self.startup()
            if first is None:
                return
            self.server = self.proxy.connect()
            threading.Thread(target=self.pump, args=('<', self.server, self.client), daemon=True).start()
            self.pass_on('>', first, self.server)
            self.pump('>', self.client, self.server)
        except OSError:
            pass
        finally:
            self.cut()
            self.proxy.links.discard(self)

    def startup(self):
        while True:
            head = exactly(self.client, 8)
            length, code = struct.unpack('!II', head)
            rest = exactly(self.client, length - 8)
            if code not in (TLS, GSS):
                self.proxy.dark.wait()
                return head + rest
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
        watch = self.proxy.watched
        with self.proxy.lock:
            hit = watch is not None and watch.count(self, side, message) == watch.at is not None
        if hit and watch.when == 'before':
            watch.action(self)
            watch.hit.set()
        self.proxy.dark.wait()
        try:
            target.sendall(message)
        except OSError:
            if side == '>':
                raise
            # The client is gone; what the server still says is read, so that it does what it was told.
        if hit and watch.when == 'after':
            watch.action(self)
            watch.hit.set()

    def cut(self):
        """The client is told that the connection is closed; the server reads what it was sent, and then that, too."""
        for end, how in (self.client, socket.SHUT_RDWR), (self.server, socket.SHUT_WR):
            if end is not None:
                with contextlib.suppress(OSError):
                    end.shutdown(how)


def exactly(source, length):
    data = b''
    while len(data) < length:
        more = source.recv(length - len(data))
        if not more:
            raise ConnectionError('closed')
        data += more
    return data


class Proxy:
    def __init__(self, server):
        self.server, self.refuses = server, False
        self.links, self.lock, self.watched = set(), threading.Lock(), None
        self.dark = threading.Event()    # set: messages pass
        self.dark.set()
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

    def watch(self, at=None, when='before', action=cut, new=False, every=False, kinds=None):
        """new: counts from the first message of a connection that is not made yet; every: on all connections; kinds:
        only messages that begin so."""
        self.watched = Watch(at, when, action, new, every, kinds)
        return self.watched

    def cut_all(self):
        for link in list(self.links):
            link.cut()

    def blackout(self, how):
        if how == 'hold':
            self.dark.clear()
        else:
            self.refuses = True
            self.cut_all()

    def light(self):
        self.refuses = False
        self.cut_all()
        self.dark.set()
