// The service of the conformance tests: see clients/conformance/README.md.
import { Idem, IdemError, Refused, reply } from 'idem-pg';

const { PORT, POOL_SIZE = '4', DRIVER = 'pg', FRAMEWORK = 'express', IDEM_SCHEMA = 'idem' } = process.env;

let pool, rows;
if (DRIVER === 'pg') {
	const pg = (await import('pg')).default;
	pool = new pg.Pool({ max: Number(POOL_SIZE) });
	rows = async (tx, text, values) => (await tx.query(text, values)).rows;
} else {
	pool = (await import('postgres')).default({ max: Number(POOL_SIZE), fetch_types: false, prepare: !process.env.PGBOUNCER, onnotice: () => {} });
	rows = (tx, text, values = []) => tx.unsafe(text, values);
}
const idem = new Idem(pool, { schema: IDEM_SCHEMA });
const insert = async (tx, reference, user, amount) =>
	(await rows(tx, 'INSERT INTO payments (reference, user_id, amount) VALUES ($1, $2, $3) RETURNING id', [String(reference), user, amount]))[0].id;
const sleep = (tx, seconds) => seconds ? rows(tx, 'SELECT pg_sleep($1::float8)', [seconds]) : null;

const user = (request) => request.headers['x-user'] ?? 'anna';
const conflicted = new Set();

async function pay(tx, request) {
	const { amount, sleep: seconds } = request.json ?? {};
	const key = request.headers['idempotency-key'] ?? 'none';
	if (amount === 402) return reply(402, { error: 'declined' });
	const id = await insert(tx, key, user(request), amount);
	if (amount === 429 || amount === 503) return reply(amount, { error: 'later' });
	if (amount === 500) throw new Error('bug');
	if (amount === 40001 && !conflicted.has(key)) {
		conflicted.add(key);
		await rows(tx, "DO $$ BEGIN RAISE SQLSTATE '40001'; END $$");
	}
	await sleep(tx, seconds);
	return reply(201, `{"paid": ${amount},  "z":1,"a":"ü"}`, {
		'Content-Type': 'application/json', Location: `/payments/${id}`, 'Set-Cookie': 'a=b', 'X-Receipt': `r-${id}`, 'X-Other': 'o',
	});
}

async function once({ user, id, amount, sleep: seconds }) {
	const { value, replayed } = await idem.once({ user, id, scope: 'once', params: { amount } }, async (tx) => {
		await insert(tx, id, user, amount);
		if (amount === 402) throw new Refused({ declined: true });
		if (amount === 500) throw new Error('bug');
		if (amount === -1) await rows(tx, 'SELECT 1/0').catch(() => {});
		if (amount === -2) await rows(tx, 'COMMIT');
		if (amount === -3) return { paid: 1n };
		await sleep(tx, seconds);
		return { paid: amount };
	});
	return { value, replayed };
}

async function lease({ user, id, amount, lease, work = 0 }) {
	let previous = null;
	const result = await idem.lease({ user, id, scope: 'lease', lease }, async (l) => {
		previous = l.previous;
		await l.record({ step: 1 });
		if (previous === null) await rows(pool, 'INSERT INTO provider_calls (reference) VALUES ($1)', [String(id)]);
		for (const end = Date.now() + work * 1000; Date.now() < end;) {
			l.check();
			await new Promise((resolve) => setTimeout(resolve, Math.min(50, end - Date.now())));
		}
		return l.settle({ paid: amount }, (tx) => insert(tx, id, user, amount));
	});
	return { value: result.value, replayed: result.replayed, previous };
}

const http = { user, headers: ['X-Receipt'] };
const guarded = {
	'/pay': idem.http({ ...http, scope: 'pay' }, pay),
	'/wait': idem.http({ ...http, scope: 'pay', wait: 5 }, pay),
	'/optional': idem.http({ ...http, scope: 'pay', required: false }, pay),
	'/upload': idem.http({ ...http, scope: 'upload' }, async (tx, request) => {
		await insert(tx, request.headers['idempotency-key'], user(request), request.bytes.length);
		return reply(200, Buffer.from(request.bytes).reverse(), { 'Content-Type': 'application/octet-stream' });
	}),
};
const plain = {
	'POST /once': once,
	'POST /call': ({ user, id, amount }) => idem.call({ user, id, scope: 'call' }, 'pay(text, int)', { reference: id, amount }),
	'POST /lease': lease,
	'GET /status': async (query) => ({ status: await idem.status({ user: query.user, id: query.id, scope: query.scope ?? '' }) }),
	'GET /health': () => ({}),
};

// Answers what is not http of the client: [status, JSON]
async function answer(route, input) {
	try {
		return [200, await plain[route](input)];
	} catch (error) {
		if (error instanceof IdemError) return [error.status, { outcome: error.outcome, sqlstate: error.sqlstate, retryable: error.retryable, name: error.name }];
		console.error(error);
		return [500, { name: error.name, error: error.message }];
	}
}

const frameworks = {
	async express() {
		const express = (await import('express')).default;
		const app = express();
		for (const [path, handler] of Object.entries(guarded)) app.post(path, handler);
		app.use(express.json());
		for (const route of Object.keys(plain)) {
			const [method, path] = route.split(' ');
			app[method.toLowerCase()](path, async (req, res) => {
				const [status, body] = await answer(route, req.body ?? req.query);
				res.status(status).json(body);
			});
		}
		app.use((error, req, res, next) => res.status(500).json({ error: error.message }));
		app.listen(Number(PORT), '127.0.0.1', () => console.log('ready'));
	},
	async fastify() {
		const app = (await import('fastify')).default({ bodyLimit: 16 * 1024 * 1024 });
		// The bytes as they came
		app.removeAllContentTypeParsers();
		app.addContentTypeParser('*', { parseAs: 'buffer' }, (request, body, done) => done(null, body));
		for (const [path, handler] of Object.entries(guarded)) app.post(path, handler);
		for (const route of Object.keys(plain)) {
			const [method, url] = route.split(' ');
			app.route({ method, url, handler: async (request, reply) => {
				const [status, body] = await answer(route, request.body?.length ? JSON.parse(request.body) : request.query);
				return reply.code(status).send(body);
			} });
		}
		await app.listen({ port: Number(PORT), host: '127.0.0.1' });
		console.log('ready');
	},
	async hono() {
		const { Hono } = await import('hono');
		const app = new Hono();
		for (const [path, handler] of Object.entries(guarded)) app.post(path, handler);
		for (const route of Object.keys(plain)) {
			const [method, path] = route.split(' ');
			app.on(method, path, async (c) => {
				const [status, body] = await answer(route, method === 'POST' ? await c.req.json() : c.req.query());
				return c.json(body, status);
			});
		}
		app.onError((error, c) => c.json({ error: error.message }, 500));
		await serve(app.fetch);
	},
	fetch: () => serve(async (request) => {
		const url = new URL(request.url);
		try {
			if (guarded[url.pathname] && request.method === 'POST') return await guarded[url.pathname](request);
			const [status, body] = await answer(`${request.method} ${url.pathname}`, request.method === 'POST' ? await request.json() : Object.fromEntries(url.searchParams));
			return Response.json(body, { status });
		} catch (error) {
			return Response.json({ error: error.message }, { status: 500 });
		}
	}),
};

// A Fetch-style function behind node:http, as @hono/node-server does it
async function serve(fetch) {
	const { createServer } = await import('node:http');
	createServer(async (req, res) => {
		const chunks = [];
		for await (const chunk of req) chunks.push(chunk);
		const response = await fetch(new Request(`http://${req.headers.host}${req.url}`, {
			method: req.method, headers: Object.entries(req.headers).map(([name, value]) => [name, String(value)]), ...(req.method !== 'GET' && { body: Buffer.concat(chunks) }),
		}));
		res.writeHead(response.status, Object.fromEntries(response.headers));
		res.end(Buffer.from(await response.arrayBuffer()));
	}).listen(Number(PORT), '127.0.0.1', () => console.log('ready'));
}

await frameworks[FRAMEWORK]();
