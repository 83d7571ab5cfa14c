import assert from 'node:assert/strict';
import { spawn } from 'node:child_process';
import http from 'node:http';
import net from 'node:net';
import { once } from 'node:events';
import { after, before, describe, test } from 'node:test';
import express from 'express';
import Fastify from 'fastify';
import { HandlerEndedTransaction, Idem, Invalid, Mismatch, Refused, reply } from 'idem-pg';
import { admin, drivers, newId, paid, prepare, schema } from './server.js';

before(prepare);
after(() => admin.end());

const freePort = async () => {
	const server = net.createServer().listen(0, '127.0.0.1');
	await once(server, 'listening');
	const { port } = server.address();
	await new Promise((resolve) => server.close(resolve));
	return port;
};

for (const [framework, driver] of [['express', 'pg'], ['fastify', 'postgres'], ['hono', 'pg'], ['fetch', 'postgres']]) describe(`${framework}, ${driver}`, () => {
	let service, base;
	before(async () => {
		const PORT = await freePort();
		service = spawn(process.execPath, [new URL('service.js', import.meta.url).pathname], {
			env: { ...process.env, PORT, FRAMEWORK: framework, DRIVER: driver, IDEM_SCHEMA: schema }, stdio: ['ignore', 'pipe', 'ignore'],
		});
		base = `http://127.0.0.1:${PORT}`;
		await once(service.stdout, 'data');
	});
	after(() => service.kill('SIGKILL'));
	const post = async (path, key, body, headers = {}) => {
		const response = await fetch(base + path, { method: 'POST', body: body instanceof Uint8Array || typeof body === 'string' ? body : JSON.stringify(body),
			headers: { 'Content-Type': 'application/json', ...(key && { 'Idempotency-Key': key }), ...headers } });
		const bytes = Buffer.from(await response.arrayBuffer());
		return { status: response.status, headers: response.headers, bytes, text: bytes.toString(), json: (() => { try { return JSON.parse(bytes); } catch { return null; } })() };
	};

	test('first answer and replay', async () => {
		const key = newId();
		const first = await post('/pay', key, { amount: 30 });
		assert.equal(first.status, 201);
		assert.equal(first.text, '{"paid": 30,  "z":1,"a":"ü"}');
		assert.match(first.headers.get('content-type'), /^application\/json$/);
		assert.equal(first.headers.get('set-cookie'), 'a=b');
		assert.equal(first.headers.get('x-other'), 'o');
		assert.ok(new Date(first.headers.get('idempotency-expires')) > new Date());
		assert.equal(first.headers.get('idempotent-replayed'), null);
		for (const [sent, body] of [[key, { amount: 30 }], [`"${key}"`, ' {"amount" : 30.0}']]) {
			const second = await post('/pay', sent, body);
			assert.deepEqual([second.status, second.text, second.headers.get('idempotent-replayed')], [201, first.text, 'true']);
			// Counted from the claim at first, from the completion then: the later one holds.
			assert.ok(Math.abs(new Date(second.headers.get('idempotency-expires')) - new Date(first.headers.get('idempotency-expires'))) <= 5000);
			for (const name of ['location', 'x-receipt', 'content-type']) assert.equal(second.headers.get(name), first.headers.get(name), name);
			for (const name of ['set-cookie', 'x-other']) assert.equal(second.headers.get(name), null);
		}
		assert.equal(await paid(key), 1);
		const reused = await post('/pay', key, { amount: 31 });
		assert.deepEqual([reused.status, reused.json.type, reused.headers.get('content-type')], [422, 'urn:idem:key-reused', 'application/problem+json']);
	});

	test('keys that are missing or malformed', async () => {
		assert.deepEqual([(await post('/pay', null, { amount: 30 })).json.type], ['urn:idem:key-missing']);
		for (const key of ['"open', 'a b', '""', 'x'.repeat(256), 'a"b']) {
			const answer = await post('/pay', key, { amount: 30 });
			assert.deepEqual([answer.status, answer.json.type], [400, 'urn:idem:key-invalid'], key);
		}
		assert.equal((await post('/optional', null, { amount: 30 })).status, 201);
	});

	test('what is final, and what is not', async () => {
		for (const [amount, status, replays, rows] of [[402, 402, true, 0], [429, 429, false, 0], [503, 503, false, 0], [500, 500, false, 0], [40001, 201, true, 1]]) {
			const key = newId();
			for (const replayed of [false, replays]) {
				const answer = await post('/pay', key, { amount });
				assert.deepEqual([answer.status, answer.headers.get('idempotent-replayed')], [status, replayed ? 'true' : null], `${amount}`);
			}
			assert.equal(await paid(key), rows, `${amount}`);
		}
	});

	test('in flight', async () => {
		const key = newId();
		const first = post('/wait', key, { amount: 5, sleep: 3 });
		await new Promise((resolve) => setTimeout(resolve, 500));
		const [second, third] = await Promise.all([post('/pay', key, { amount: 5, sleep: 3 }), post('/wait', key, { amount: 5, sleep: 3 })]);
		assert.deepEqual([second.status, second.json.type, second.headers.get('retry-after')], [409, 'urn:idem:in-progress', '1']);
		assert.equal((await first).status, 201);
		assert.deepEqual([third.status, third.headers.get('idempotent-replayed')], [201, 'true']);
		assert.equal(await paid(key), 1);
	});

	test('bytes, and a body of 1 MB', async () => {
		const bytes = Buffer.from([0, 255, 10, 200, 65]);
		for (const [body, name] of [[bytes, 'binary'], [Buffer.alloc(700_000, 'x'), 'large'], [Buffer.alloc(0), 'empty']]) {
			const key = newId();
			for (const replayed of [null, 'true']) {
				const answer = await post('/upload', key, body, { 'Content-Type': 'application/octet-stream' });
				assert.deepEqual([answer.status, answer.headers.get('idempotent-replayed')], [200, replayed], name);
				assert.ok(answer.bytes.equals(Buffer.from(body).reverse()), name);
			}
		}
		for (const body of ['{"amount": 30, "x": "\\u0000"}', '{"amount": 1, "x": 1e131071}', '{"amount": 2, "x": "\\ud800"}',
			`{"amount": 3, "x": ${'['.repeat(700)}${']'.repeat(700)}}`, `{"amount": 4, "x": ${'['.repeat(9000)}${']'.repeat(9000)}, "x": 1}`, `{"amount": 5, "x": [${'[],'.repeat(300000)}1]}`]) {
			const key = newId();
			assert.deepEqual([(await post('/pay', key, body)).status, (await post('/pay', key, body)).headers.get('idempotent-replayed')], [201, 'true'], body);
		}
	});

	test('once, call, lease and status', async () => {
		const id = newId();
		assert.deepEqual((await post('/once', null, { user: 'a', id, amount: 5 })).json, { value: { paid: 5 }, replayed: false });
		assert.deepEqual((await post('/once', null, { user: 'a', id, amount: 5 })).json, { value: { paid: 5 }, replayed: true });
		assert.deepEqual((await post('/once', null, { user: 'a', id, amount: 6 })).json, { outcome: 'mismatch', sqlstate: 'ID422', retryable: false, name: 'Mismatch' });
		assert.deepEqual((await post('/once', null, { user: 'a', id: newId(), amount: -3 })).json.name, 'TypeError');
		assert.deepEqual((await post('/call', null, { user: 'a', id, amount: 5 })).json, { value: { paid: 5 }, replayed: false });
		assert.deepEqual((await post('/lease', null, { user: 'a', id, amount: 5, lease: '1 s', work: 1.5 })).json, { value: { paid: 5 }, replayed: false, previous: null });
		assert.deepEqual((await post('/lease', null, { user: 'a', id, amount: 5, lease: '1 s' })).json, { value: { paid: 5 }, replayed: true, previous: null });
		assert.deepEqual((await (await fetch(`${base}/status?user=a&id=${id}&scope=lease`)).json()), { status: 'completed' });
		assert.equal((await fetch(`${base}/health`)).status, 200);
	});
});

test('what cannot be sent is not stored', async () => {
	const d = drivers.pg();
	for (const [made, error] of [[reply(201, {}, { Location: '/\u4e2d' }), TypeError], [reply(201, {}, { Location: '/\r\nX: 1' }), TypeError], [{ ...reply(200), status: 99 }, TypeError], [{ ...reply(200), status: 600 }, TypeError]]) {
		const id = newId();
		const call = d.idem.http({ user: () => 'anna', scope: 'sent' }, async (tx) => { await d.insert(tx, id, 1); return made; });
		await assert.rejects(call(new Request('http://x/pay', { method: 'POST', headers: { 'Idempotency-Key': id } })), error);
		assert.deepEqual([await paid(id), await d.idem.status({ user: 'anna', id, scope: 'sent' })], [0, null]);
	}
	await d.end();
});

test('cookies of Fastify, a key that the scope refuses, a body that is too large, an error of another request', async () => {
	const d = drivers.pg();
	const options = { user: () => 'anna', scope: 'more' };
	const send = (handler, more = {}) => d.idem.http({ ...options, ...more }, handler)(new Request('http://x/pay', { method: 'POST', body: 'x'.repeat(20), headers: { 'Idempotency-Key': newId() } }));
	const fastify = (await import('fastify')).default();
	fastify.post('/', d.idem.http(options, () => reply(200, 'a', { 'Set-Cookie': ['a=1', 'b=2'], 'Content-Length': '0', Connection: 'x', 'Transfer-Encoding': 'chunked' })));
	assert.deepEqual((await fastify.inject({ method: 'POST', url: '/', headers: { 'Idempotency-Key': newId() } })).headers['set-cookie'], ['a=1', 'b=2']);
	const { body, headers } = await fastify.inject({ method: 'POST', url: '/', headers: { 'Idempotency-Key': newId() } });
	assert.deepEqual([body, headers['content-length'], headers.connection, headers['transfer-encoding']], ['a', '1', 'keep-alive', undefined]);
	await fastify.close();
	await admin.query(`INSERT INTO ${schema}.idem_scopes (scope, ttl, key_time) VALUES ('timed', '1 day', 'uuidv7') ON CONFLICT DO NOTHING`);
	const refused = await send(() => reply(200), { scope: 'timed' });
	assert.deepEqual([refused.status, (await refused.json()).type], [400, 'urn:idem:key-invalid']);
	assert.equal((await send(() => reply(200), { limit: 10 })).status, 413);
	const other = { user: 'anna', id: newId(), scope: 'other' };
	await d.idem.once({ ...other, params: 1 }, () => 1);
	await assert.rejects(send(async () => reply(200, await d.idem.once({ ...other, params: 2 }, () => 1))), Mismatch);
	await d.end();
});

test('nobody as the user, encode and decode, another fingerprint', async () => {
	const d = drivers.pg();
	const call = (options, key = newId(), body = '{"a":1}') => d.idem.http(options, () => reply(200, { secret: 'ü' }))(
		new Request('http://x/pay', { method: 'POST', body, headers: { 'Idempotency-Key': key, 'Content-Type': 'application/json' } }));
	for (const nobody of ['', NaN, 2 ** 53]) await assert.rejects(call({ user: () => nobody }), Invalid);
	const key = newId();
	const options = { user: () => 'anna', scope: 'enc', encode: (v) => Buffer.from(JSON.stringify(v)).toString('base64'), decode: (v) => JSON.parse(Buffer.from(v, 'base64')),
		fingerprint: () => null };
	for (const body of ['{"a":1}', '{"a":2}']) assert.deepEqual(await (await call(options, key, body)).json(), { secret: 'ü' });
	assert.doesNotMatch(JSON.stringify((await d.idem.lookup({ user: 'anna', id: key, scope: 'enc' })).result), /secret/);
	const refused = newId();
	await d.idem.http(options, () => { throw new Refused({ secret: 1 }); })(new Request('http://x/', { method: 'POST', headers: { 'Idempotency-Key': refused } }));
	assert.equal((await d.idem.lookup({ user: 'anna', id: refused, scope: 'enc' })).result, Buffer.from('{"secret":1}').toString('base64'));
	await d.end();
	const { Pool } = (await import('pg')).default, events = [];
	const dead = new Idem(new Pool({ host: '127.0.0.1', port: 1 }), { onOutcome: (event) => events.push(event) });
	const away = await dead.http({ user: () => 'anna', attempts: 2 }, () => reply(200))(new Request('http://x/', { method: 'POST', headers: { 'Idempotency-Key': 'k' } }));
	assert.deepEqual([away.status, (await away.json()).type, away.headers.get('retry-after')], [503, 'urn:idem:unavailable', '1']);
	assert.deepEqual([events[0].outcome, events[0].attempts, events[0].error.code], ['error', 2, 'ECONNREFUSED']);
	const closed = new Pool();
	await closed.end();
	const ended = new Idem(closed, { onOutcome: (event) => events.push(event) }).http({ user: () => 'anna' }, () => reply(200));
	await assert.rejects(ended(new Request('http://x/', { method: 'POST', headers: { 'Idempotency-Key': 'k' } })), (e) => /after calling end/.test(e.message));
	assert.match(events[1].error.message, /after calling end/);
});

test('what reply() refuses', () => {
	for (const status of [NaN, 99, 199, 600, 200.5, '201', undefined]) assert.throws(() => reply(status, {}), (e) => e instanceof TypeError && e.message.includes(`the status is ${status}`));
	for (const body of [{ n: 1 }, [1], null]) assert.throws(() => reply(body), /the status is missing: .* 200 to 599/);
	for (const [body, where] of [[{ a: [1, { n: NaN }] }, 'value.a[1].n is NaN'], [-Infinity, 'value is -Infinity'], [{ n: 1n }, 'value.n is a BigInt'], [{ m: new Map([[1, 2]]) }, 'value.m is a Map']])
		assert.throws(() => reply(200, body), (e) => e instanceof TypeError && e.message.includes(where), where);
	class Payment { amount = 1; at = new Date(0); }
	assert.equal(reply(200, { row: new Payment(), text: '\0', nothing: undefined }).body.toString(), '{"row":{"amount":1,"at":"1970-01-01T00:00:00.000Z"},"text":"\\u0000"}');
});

test('a handler that answers by itself, or that has committed', async () => {
	const d = drivers.pg();
	const key = newId(), user = () => 'anna';
	const insert = (tx) => d.insert(tx, key, 1);
	const app = express(), fastify = Fastify(), errors = [];
	const answers = { json: (res) => res.status(201).json({ ok: 1 }), end: (res) => res.end('ok'), writeHead: (res) => res.writeHead(201), write: (res) => res.write('ok') };
	for (const [name, by] of Object.entries(answers)) app.post(`/${name}`, d.idem.http({ user, scope: name }, async (tx, r) => { await insert(tx); by(r.native.res); }));
	app.post('/caught', d.idem.http({ user, scope: 'caught' }, async (tx, r) => { try { r.native.res.json({ long: 'x'.repeat(100) }); } catch { /* and goes on */ } return reply(200, 'short'); }));
	app.post('/committed', d.idem.http({ user, scope: 'committed' }, async (tx) => { await insert(tx); await tx.query('COMMIT'); return reply(201); }));
	let begin, late = true;
	const begun = new Promise((resolve) => { begin = resolve; });
	app.post('/timeout', (req, res, next) => { if (late) begun.then(() => res.status(503).send('late')); late = false; next(); }, d.idem.http({ user, scope: 'timeout', wait: 5 }, async (tx, r) => {
		const finished = once(r.native.res, 'finish');
		begin();
		await finished;
		return reply(201);
	}));
	app.use((error, req, res, next) => { errors.push(error); if (!res.headersSent) res.status(500).json({ error: error.message }); });
	fastify.post('/fastify', (request, r) => d.idem.http({ user, scope: 'fastify' }, async (tx) => { await insert(tx); r.code(201).send({ ok: 1 }); })(request, r));
	const server = app.listen(0, '127.0.0.1');
	await once(server, 'listening');
	const post = async (base, path) => { const r = await fetch(base + path, { method: 'POST', headers: { 'Idempotency-Key': key } }); return [r.status, await r.text(), r.headers]; };
	try {
		const base = `http://127.0.0.1:${server.address().port}`, other = await fastify.listen({ port: 0, host: '127.0.0.1' });
		for (const path of [...Object.keys(answers), 'fastify']) {
			const [status, text] = await post(path === 'fastify' ? other : base, `/${path}`);
			assert.equal(status, 500, path);
			assert.match(text, /would answer before COMMIT: return reply/, path);
			assert.equal(await d.idem.status({ user: 'anna', id: key, scope: path }), null, path);
		}
		assert.deepEqual((await post(base, '/caught')).slice(0, 2), [200, 'short']);
		assert.deepEqual((await post(base, '/timeout')).slice(0, 2), [503, 'late']);
		assert.deepEqual((await post(base, '/timeout')).slice(0, 2), [201, '']);
		assert.equal(await paid(key), 0);
		const [status] = await post(base, '/committed');
		assert.ok(status === 500 && errors.at(-1) instanceof HandlerEndedTransaction);
		const [again, text, headers] = await post(base, '/committed');
		assert.deepEqual([again, headers.get('content-type'), headers.get('idempotent-replayed')], [500, 'application/problem+json', 'true']);
		const title = 'This request was executed, but its answer was not stored';
		assert.deepEqual(JSON.parse(text), { type: 'urn:idem:answer-lost', title, status: 500, detail: title });
		assert.equal(await paid(key), 1);
		await d.idem.once({ user: 'anna', id: key, scope: 'other' }, () => ({ paid: 1 }));
		const stored = await d.idem.http({ user, scope: 'other', fingerprint: () => null }, () => reply(201))(new Request('http://x/', { method: 'POST', headers: { 'Idempotency-Key': key } }));
		assert.deepEqual([stored.status, await stored.json()], [200, { paid: 1 }]);
	} finally {
		server.close();
		await Promise.all([fastify.close(), d.end()]);
	}
});

test('node:http: half of a body, JSON that jsonb refuses, and a header that cannot be sent do not end the process', async () => {
	const d = drivers.pg();
	const server = http.createServer(d.idem.http({ user: () => 'anna', scope: 'node' }, async (tx, request) => {
		await d.insert(tx, request.headers['idempotency-key'], 1);
		return reply(201, {}, request.json?.to === undefined ? {} : { Location: request.json.to });
	})).listen(0, '127.0.0.1');
	await once(server, 'listening');
	const { port } = server.address();
	const half = net.connect(port, '127.0.0.1');
	half.end('POST / HTTP/1.1\r\nHost: x\r\nIdempotency-Key: half\r\nContent-Length: 9\r\n\r\nabc');
	await once(half.resume(), 'close');
	const post = async (key, body) => (await fetch(`http://127.0.0.1:${port}/`, { method: 'POST', body, headers: { 'Idempotency-Key': key, 'Content-Type': 'application/json' } })).status;
	for (const [body, status, rows] of [['{"a":"\\u0000","a":1}', 201, 1], [`${'['.repeat(20000)}${']'.repeat(20000)}`, 201, 1], ['{"to":"/a\\r\\nSet-Cookie: x"}', 500, 0], ['{"to":"/한"}', 500, 0]]) {
		const key = newId();
		assert.deepEqual([await post(key, body), await post(key, body), await paid(key)], [status, status, rows], body.slice(0, 50));
	}
	server.closeAllConnections();
	server.close();
	await d.end();
});

test('a body that was read already, and one that is too large', async () => {
	const handler = (options) => drivers.pg().idem.http({ user: () => 'anna', ...options }, () => { throw new Error('not to be called'); });
	for (const [type, body] of [['text/plain', undefined], ['multipart/form-data; boundary=x', { a: '1' }]]) {
		const errors = [];
		await handler()({ readableDidRead: true, method: 'POST', url: '/', headers: { 'idempotency-key': 'k', 'content-type': type }, body }, {}, (error) => errors.push(error.message));
		assert.match(errors[0], /was read before idem.http/);
	}
	const large = () => new Request('http://x/', { method: 'POST', body: 'x'.repeat(11), headers: { 'Idempotency-Key': 'k' } });
	for (const first of [large(), { req: { raw: large() } }]) assert.equal((await handler({ limit: 10 })(first)).status, 413);
});

test('the time for a fingerprint does not depend on what is sent', async () => {
	const idem = new Idem({ connect: async () => { throw new Error('enough'); }, query() {}, on() {}, totalCount: 0 });
	const handler = idem.http({ user: () => 'anna' }, () => reply(200));
	const cost = async (body) => {
		const costs = [];
		for (let n = 0; n < 3; n++) {
			const before = process.cpuUsage();
			await assert.rejects(handler(new Request('http://x/', { method: 'POST', body, headers: { 'Idempotency-Key': 'k', 'Content-Type': 'application/json' } })), /enough/);
			costs.push(process.cpuUsage(before).user);
		}
		return Math.min(...costs);
	};
	const text = await cost(`"${'x'.repeat(2e6)}"`), digits = await cost(`[${`${'1'.repeat(499)},`.repeat(4000)}1]`);
	assert.ok(digits < 25 * text, `${digits} of ${text} µs`);
});
