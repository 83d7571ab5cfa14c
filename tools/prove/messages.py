"""PostgreSQL's messages: taking them from a stream, naming them, and telling which statement each belongs to."""

import collections
import re
import struct

CLIENT = {'Q': 'Query', 'P': 'Parse', 'B': 'Bind', 'D': 'Describe', 'E': 'Execute', 'C': 'Close', 'S': 'Sync', 'H': 'Flush', 'F': 'FunctionCall',
          'd': 'CopyData', 'c': 'CopyDone', 'f': 'CopyFail', 'X': 'Terminate', 'p': 'Password', '\0': 'Startup'}
SERVER = {'1': 'ParseComplete', '2': 'BindComplete', '3': 'CloseComplete', 'C': 'CommandComplete', 'D': 'DataRow', 'E': 'ErrorResponse',
          'I': 'EmptyQueryResponse', 'N': 'NoticeResponse', 'R': 'Authentication', 'S': 'ParameterStatus', 'K': 'BackendKeyData', 'T': 'RowDescription',
          't': 'ParameterDescription', 'Z': 'ReadyForQuery', 'n': 'NoData', 's': 'PortalSuspended', 'G': 'CopyInResponse', 'H': 'CopyOutResponse',
          'W': 'CopyBothResponse', 'd': 'CopyData', 'c': 'CopyDone', 'A': 'NotificationResponse', 'V': 'FunctionCallResponse',
          'v': 'NegotiateProtocolVersion'}
CANCEL, TLS, GSS = 80877102, 80877103, 80877104
ASYNCHRONOUS = 'NAS'    # the server sends these whenever it wants
LITERAL = re.compile(r"'[^']*(?:''[^']*)*'|\$(\w*)\$.*?\$\1\$|\b[0-9a-f]{8,}\b|\d+", re.S)


def split(buffer):
    """Takes the whole messages from the begin of the buffer, a bytearray: each as bytes."""
    messages, start = [], 0
    while len(buffer) - start >= 5 and len(buffer) - start >= (size := 1 + struct.unpack_from('!I', buffer, start + 1)[0]):
        messages.append(bytes(buffer[start:start + size]))
        start += size
    del buffer[:start]
    return messages


def build(kind, body=b''):
    return kind.encode() + struct.pack('!I', len(body) + 4) + body


def query(text):
    return build('Q', text.encode() + b'\0')


def error(code, message):
    return build('E', b''.join(field + b'\0' for field in (b'SERROR', b'VERROR', b'C' + code.encode(), b'M' + message.encode())) + b'\0')


def fields(body):
    """Of an ErrorResponse or NoticeResponse."""
    return {field[:1].decode(): field[1:].decode('utf-8', 'replace') for field in body.split(b'\0') if field}


def strings(body, number):
    return [part.decode('utf-8', 'replace') for part in body.split(b'\0', number)[:number]]


def shape(text):
    """A statement without its literals, which differ from request to request: only the names of its parameters, $1, stay."""
    return LITERAL.sub(lambda match: match[0] if text[max(match.start() - 1, 0)] == '$' and match[0].isdigit() else '?', ' '.join(text.split()))


class Message:
    """One message: side is '>' from the service or '<' from the server; text is the statement that it belongs to."""

    def __init__(self, side, kind, text, detail='', status=''):
        self.side, self.kind, self.text, self.detail, self.status = side, kind, ' '.join(text.split()), detail, status
        self.key = (side, kind, shape(text))

    def __str__(self):
        return f'{"→" if self.side == ">" else "←"} {self.kind} {self.detail or self.text}'.rstrip()


# What the client sent and the server has not answered to the end. hidden: the proxy sent it, and drops the answer.
Pending = collections.namedtuple('Pending', 'kind text hidden', defaults=[False])


class Dialogue:
    """Follows one connection."""

    def __init__(self):
        self.statements, self.portals, self.pending, self.last, self.skipping = {}, {}, collections.deque(), '', False

    def client(self, raw):
        kind, body, text = raw[:1].decode('latin-1'), raw[5:], self.last
        if kind in 'QF':
            text = strings(body, 1)[0] if kind == 'Q' else 'function call'
        elif kind == 'P':
            name, text = strings(body, 2)
            self.statements[name] = text
        elif kind == 'B':
            portal, name = strings(body, 2)
            text = self.portals[portal] = self.statements.get(name, f'statement {name}')
        elif kind == 'E':
            text = self.portals.get(strings(body, 1)[0], '')
        elif kind in 'DC' and body:
            known = self.statements if body[:1] == b'S' else self.portals
            name = strings(body[1:], 1)[0]
            text = known.get(name, '')
            if kind == 'C' and name:
                known.pop(name, None)
        elif kind in '\0Xp':
            text = ''
        self.last = text
        if kind in 'QFS' or kind in 'PBDEC' and not self.skipping:
            self.pending.append(Pending(kind, text))
        self.skipping = self.skipping and kind != 'S'
        return Message('>', CLIENT.get(kind, kind), text)

    def hide(self, kinds):
        """The proxy sends messages of its own before the last one."""
        for kind in kinds:
            self.pending.insert(len(self.pending) - 1, Pending(kind, '', hidden=True))

    def server(self, raw):
        """The message, and whether it answers one that is hidden."""
        kind, body = raw[:1].decode('latin-1'), raw[5:]
        front = self.pending[0] if self.pending else Pending('', '')
        text, detail, status = '' if kind in 'RKSA' else front.text, '', ''
        name = SERVER.get(kind, kind)
        if kind in 'CS':
            detail = '='.join(strings(body, 1 + (kind == 'S')))
        elif kind in 'EN':
            detail = '{C} {M}'.format_map(collections.defaultdict(str, fields(body)))
        elif kind == 'Z':
            status = body[:1].decode()
            detail = {'I': 'idle', 'T': 'in a transaction', 'E': 'in a failed transaction'}.get(status, '')
        if kind in ASYNCHRONOUS:
            return Message('<', name, text, detail), front.hidden
        if kind == 'Z':
            while self.pending and self.pending.popleft().kind not in 'QFS':
                pass
        elif kind == 'E' and front.kind not in ('', 'Q', 'F', 'S'):
            while self.pending and self.pending[0].kind not in 'QFS':
                self.pending.popleft()
            self.skipping = not self.pending
        elif front.kind == {'1': 'P', '2': 'B', '3': 'C', 'T': 'D', 'n': 'D', 'C': 'E', 'I': 'E', 's': 'E'}.get(kind):
            self.pending.popleft()
        return Message('<', name, text, detail, status), front.hidden
