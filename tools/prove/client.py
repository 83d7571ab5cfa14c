"""The client that prove plays: a request from a file, and attempts to send it."""

import http.client
import re
import threading
import time
import uuid


def new_id(random):
    """A UUID of version 7."""
    bits = int(time.time() * 1000) << 80 | 7 << 76 | random.getrandbits(12) << 64 | 2 << 62 | random.getrandbits(62)
    return str(uuid.UUID(int=bits))


class Request:
    """As in a file .http: POST /path, headers, an empty line, the body; {id} stands for the id of the request."""

    def __init__(self, text):
        head, _, self.body = text.replace('\r\n', '\n').partition('\n\n')
        lines = [line for line in head.split('\n') if line and not line.startswith('#')]
        match = re.fullmatch(r'([A-Z]+) (?:https?://[^/ ]+)?(/\S*)(?: HTTP/[\d.]+)?', lines[0].strip() if lines else '')
        if not match:
            raise ValueError('the file of the request begins with METHOD /PATH')
        self.method, self.path = match.groups()
        self.headers = dict(re.split(r':\s*', line, maxsplit=1) for line in lines[1:])
        self.body = self.body.rstrip('\n')
        if '{id}' not in text:
            raise ValueError('the request has no {id}: where does the service find the id of the request?')

    def filled(self, id):
        path, body, *values = (text.replace('{id}', id) for text in (self.path, self.body, *self.headers.values()))
        return self.method, path, body.encode(), dict(zip(self.headers, values))


class Answer:
    """What was heard of one attempt; status is None if the connection was lost."""

    def __init__(self, status=None, body=b'', headers=(), lost='', delivery=1):
        self.status, self.body, self.headers, self.lost, self.delivery = status, body, dict(headers), lost, delivery

    def is_success(self):
        return self.status is not None and 200 <= self.status < 300

    def is_final(self):
        return self.is_success() or self.status is not None and 400 <= self.status < 500 and self.status not in (409, 425, 429)

    def __str__(self):
        return f'{self.status} {self.body[:200].decode("utf-8", "replace")!r}' if self.status else f'no answer: {self.lost}'


class Attempt:
    """Sends the request to a port, in a thread of its own."""

    def __init__(self, request, id, port, timeout, delivery):
        self.answer, self.done, self.began = None, threading.Event(), time.monotonic()
        self.delivery, self.never_ended, self.heard = delivery, False, False    # heard: a client of its own waits for it
        threading.Thread(target=self.send, args=(request, id, port, timeout), daemon=True).start()

    def send(self, request, id, port, timeout):
        connection = http.client.HTTPConnection('127.0.0.1', port, timeout=timeout)
        try:
            method, path, body, headers = request.filled(id)
            connection.request(method, path, body, {'Connection': 'close', **headers})
            response = connection.getresponse()
            self.answer = Answer(response.status, response.read(), response.getheaders(), delivery=self.delivery)
        except (OSError, http.client.HTTPException) as error:
            self.never_ended = isinstance(error, TimeoutError)
            self.answer = Answer(lost=f'{type(error).__name__} {error}'.strip(), delivery=self.delivery)
        finally:
            connection.close()
            self.done.set()
