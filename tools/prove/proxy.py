"""The proxy between the service and PostgreSQL. It writes down each message, and springs a trap at one of them."""

import collections
import contextlib
import socket
import struct
import threading
import time

import database
import messages


class Trap:
    """At the n-th message with this key act(link, raw, message) is called once, in the thread that passes the message on. It returns
    what is passed on in its place, or None; then after(link) is called. then: the trap that is armed at this moment."""

    def __init__(self, key, nth, act, after=None):
        self.key, self.nth, self.act, self.after, self.then = key, nth, act, after, None
        self.hit = threading.Event()


class Link:
    """A connection of the service, and its connection to the server."""

    def __init__(self, proxy, number, client):
        self.proxy, self.number, self.client = proxy, number, client
        self.dialogue, self.lock = messages.Dialogue(), threading.Lock()
        self.server = self.pid = self.rewrite = None
        self.closed, self.open = False, threading.Event()    # open is not set: what the service sends is held
        self.open.set()

    def run(self):
        with contextlib.suppress(OSError, ValueError):
            start = self.startup()
            self.server = database.connect(self.proxy.server)
            if struct.unpack('!I', start[4:8])[0] == messages.CANCEL:
                self.server.sendall(start)
                self.server.recv(1)    # the server has done it
            else:
                threading.Thread(target=self.pump, args=('<', self.server, self.client), daemon=True).start()
                self.pass_on('>', b'\0' + start, self.server)
                self.pump('>', self.client, self.server)
        self.cut()
        self.client.close()
        self.proxy.links.discard(self)

    def startup(self):
        """The first message, which has no kind. Encryption is refused."""
        while True:
            message, size = b'', 8
            while len(message) < size:
                message += (chunk := self.client.recv(size - len(message)))
                if not chunk:
                    raise ConnectionError
                if len(message) == 8:
                    size = struct.unpack('!I', message[:4])[0]
            if struct.unpack('!I', message[4:8])[0] not in (messages.TLS, messages.GSS):
                return message
            self.client.sendall(b'N')

    def pump(self, side, source, target):
        buffer = bytearray()
        with contextlib.suppress(OSError):
            while chunk := source.recv(1 << 16):
                buffer += chunk
                for raw in messages.split(buffer):
                    self.pass_on(side, raw, target)
        self.cut()
        if side == '<':
            source.close()

    def pass_on(self, side, raw, target):
        if side == '>':
            self.open.wait()
        if self.closed and side == '>':
            raise ConnectionError
        with self.lock:
            if side == '>':
                message, hidden = self.dialogue.client(raw), False
            else:
                if raw[:1] == b'K':
                    self.pid = struct.unpack('!I', raw[5:9])[0]
                    self.proxy.pids.add(self.pid)
                if raw[:1] == b'E' and self.rewrite and not (self.dialogue.pending and self.dialogue.pending[0].hidden):
                    raw, self.rewrite = messages.error(*self.rewrite), None
                message, hidden = self.dialogue.server(raw)
        if hidden:
            return
        trap = self.proxy.write_down(self, message)
        out = trap.act(self, raw, message) if trap else raw
        if out is None:
            return
        # When the service is gone, what the server still says is read: so the server does all that it was told.
        with contextlib.suppress(OSError) if side == '<' else contextlib.nullcontext():
            target.sendall(out[1:] if out[:1] == b'\0' else out)
        if trap and trap.after:
            trap.after(self)

    def cut(self):
        """The service finds the connection closed at once; the server does so when it has read what it was sent."""
        self.closed = True
        self.open.set()
        for end, how in (self.client, socket.SHUT_RDWR), (self.server, socket.SHUT_WR):
            with contextlib.suppress(OSError, AttributeError):
                end.shutdown(how)


class Proxy:
    """tape: what was passed, as (time, number of the connection, message). pids: of the backends."""

    def __init__(self, server):
        self.server, self.lock, self.trap = server, threading.Lock(), None
        self.links, self.pids, self.number = set(), set(), 0
        self.tape, self.counts, self.latest = [], collections.Counter(), 0
        self.listener = socket.create_server(('127.0.0.1', 0), backlog=200)
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        while True:
            client, _ = self.listener.accept()
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.number += 1
            link = Link(self, self.number, client)
            self.links.add(link)
            threading.Thread(target=link.run, daemon=True).start()

    def write_down(self, link, message):
        """Returns the trap, if it is here."""
        with self.lock:
            self.latest = time.monotonic()
            self.tape.append((self.latest, link.number, message))
            self.counts[message.key] += 1
            trap = self.trap
            if trap and trap.key == message.key and self.counts[message.key] >= trap.nth:
                self.trap = trap.then
                self.counts.clear()
                trap.hit.set()
                return trap
        return None

    def arm(self, trap=None, tape=None):
        """The trap counts from here on. A tape that is given takes the place of the one so far."""
        with self.lock:
            self.trap, self.tape = trap, self.tape if tape is None else tape
            self.counts.clear()

    def cut_all(self):
        for link in list(self.links):
            link.cut()
