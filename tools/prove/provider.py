"""The provider: another service, which the service that is tried calls, and which counts the calls of each request. A call with
an Idempotency-Key that was there before is answered alike, and counts once."""

import http.server
import json
import threading


class Provider:
    def __init__(self, on_call):
        self.on_call, self.calls, self.keys, self.lock = on_call, [], {}, threading.Lock()
        provider = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = 'HTTP/1.1'

            def answer(self):
                body = self.rfile.read(int(self.headers.get('Content-Length') or 0)).decode('utf-8', 'replace')
                answer = json.dumps(provider.take(f'{self.command} {self.path}', body, self.headers.get('Idempotency-Key'))).encode()
                self.send_response(200)
                self.send_header('Content-Type', 'application/json')
                self.send_header('Content-Length', str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            do_GET = do_POST = do_PUT = do_DELETE = answer

            def log_message(self, *_):
                pass
        self.server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), Handler)
        self.server.daemon_threads = True
        self.url = f'http://127.0.0.1:{self.server.server_port}'
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def take(self, what, body, key):
        with self.lock:
            known = self.keys.get(key)
            number = known or len(self.calls) + 1
            if not known:
                self.calls.append(f'{what} {key} {body}')
                self.keys |= {key: number} if key else {}
        self.on_call(what + (' (a repetition)' if known else ''))
        return {'id': number}

    def count(self, id):
        with self.lock:
            return sum(id in call for call in self.calls)
