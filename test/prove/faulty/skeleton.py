"""What the faulty services share: POST /pay {"id", "amount"} over HTTP, a pool of psycopg, GET /health. A service is a function
pay(id, amount) -> (status, body)."""

import http.server
import json
import os
import urllib.request

import psycopg
import psycopg_pool

pool = psycopg_pool.ConnectionPool('', min_size=2, max_size=4, timeout=10, kwargs={'autocommit': True, 'prepare_threshold': None})


def insert(connection, id, amount):
    connection.execute('INSERT INTO payments (reference, amount) VALUES (%s, %s)', (id, amount))


def one(connection, query, *values):
    return connection.execute(query, values).fetchone()


def mail(id):
    """Sends a mail: a call of the provider, which does not know idempotency keys."""
    urllib.request.urlopen(urllib.request.Request(os.environ['PROVIDER_URL'] + '/mails', json.dumps({'about': id}).encode())).close()


def serve(pay):
    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = 'HTTP/1.1'

        def do_GET(self):
            self.answer(200, {})

        def do_POST(self):
            data = json.loads(self.rfile.read(int(self.headers['Content-Length'])))
            if self.path != '/pay':
                return self.answer(500, {})
            try:
                return self.answer(*pay(data['id'], data['amount']))
            except psycopg.Error as error:
                return self.answer(503, {'error': str(error)})

        def answer(self, status, body):
            body = body if isinstance(body, str) else json.dumps(body)
            self.send_response(status)
            self.send_header('Content-Length', str(len(body)))
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_):
            pass
    pool.wait()
    http.server.ThreadingHTTPServer(('127.0.0.1', int(os.environ['PORT'])), Handler).serve_forever()
