#!/usr/bin/env node
//
// Runs the example: a client sends each payment until it has an answer, through timeouts and lost
// answers, while the server is killed in the middle, and its backends are terminated.
'use strict';

const assert = require('assert');
const crypto = require('crypto');
const fs = require('fs');
const http = require('http');
const net = require('net');
const path = require('path');
const { Client } = require('pg');
const { name, folder, pause, check, is, note, makeDatabase, waitFor: waitForRow, start, kill, run, cleanUp } =
	require('../../test/lib/example.js');

const direct = path.join(folder, 'direct');
const lossy = path.join(folder, 'lossy');
const payments = 100;

let database;			// a session of ours
let server;			// the HTTP server's process
let deliveries = 0;
let answersLost = 0;

// ----- the client -----

// One attempt: returns { status, headers, body }, or throws. The client gives up when the promise
// "timeout" is fulfilled.
function attempt({ user = 'ann', key, quoted = `"${key}"`, body, text = JSON.stringify(body), socket = direct, timeout }) {
	deliveries++;
	return new Promise((resolve, reject) => {
		const request = http.request({
			socketPath: socket, method: 'POST', path: '/payments', agent: false,
			headers: {
				'Authorization': `Bearer ${user}`, 'Content-Type': 'application/json',
				...(key || quoted !== '"undefined"' ? { 'Idempotency-Key': quoted } : {}),
			},
		}, (response) => {
			const chunks = [];
			response.on('data', (chunk) => chunks.push(chunk));
			response.on('error', reject);
			response.on('end', () => resolve({ status: response.statusCode, headers: response.headers, body: Buffer.concat(chunks) }));
		});
		request.on('error', reject);
		if (timeout) timeout.then(() => request.destroy(Object.assign(new Error('time-out'), { code: 'ETIMEDOUT' })));
		request.end(text);
	});
}

// Why requests were sent again
const again = {};

// Sends the same request until there is an answer. first() has options for the first attempt only.
// A second of Retry-After takes 20 ms here.
async function send({ first = () => ({}), ...request }) {
	for (let options = { ...request, ...first() }; ; options = request) {
		try {
			const response = await attempt(options);
			if (!response.headers['retry-after']) return response;
			again[response.status] = (again[response.status] || 0) + 1;
			await pause(20 * response.headers['retry-after']);
		} catch (error) {
			// The server is being started, and does not listen yet.
			if (!['ECONNRESET', 'ETIMEDOUT', 'EPIPE', 'ECONNREFUSED', 'ENOENT'].includes(error.code)) throw error;
			again[error.code] = (again[error.code] || 0) + 1;
			await pause(10);
		}
	}
}

// ----- the server, and a network that loses answers -----

function startServer() {
	fs.rmSync(direct, { force: true });
	const child = server = start('server.mjs', [direct], { env: { NODE_ENV: 'test' } });
	child.ended.then(() => {
		if (child.killed) return;
		note('the server has ended by itself');
		cleanUp(1);
	});
	return new Promise((resolve) => child.stdout.once('data', resolve));
}

const killServer = () => kill(server);

// A network that passes requests on, and cuts the connection when the server answers
function startLossyNetwork() {
	const network = net.createServer((client) => {
		const onward = net.connect(direct);
		client.on('error', () => onward.destroy()).on('close', () => onward.destroy());
		onward.on('error', () => client.destroy()).on('close', () => client.destroy());
		onward.once('data', () => {
			answersLost++;
			client.destroy();
		});
		client.pipe(onward);
	});
	return new Promise((resolve) => network.listen(lossy, () => resolve(network)));
}

// ----- what can happen -----

const count = async (query, ...values) => Number((await database.query(query, values)).rows[0].count);
const paid = (reference) => count('SELECT count(*) FROM payments WHERE reference = $1', reference);

const waitFor = (...query) => waitForRow(database, ...query);
const sessions = `FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()`;

// Three clients send each payment. One loses the first answer, and one gives up its first attempt.
// The server is killed twice, and its backends are terminated.
async function traffic() {
	let answered = 0;
	const kills = [payments, 2 * payments];
	const terminations = Array.from({ length: 6 }, (_, n) => (0.4 + n * 0.4) * payments);
	const requests = Array.from({ length: payments }, (_, n) => ({
		key: crypto.randomUUID(), body: { payee: `payee ${n % 5}`, amount: 1 + n % 7, reference: `payment ${n}` },
	}));
	const first = [() => ({}), () => ({ socket: lossy }), () => ({ timeout: pause(2) })];
	const queue = [0, 1, 2].flatMap((client) => requests.map((request, n) => ({
		...request, first: first[(n + client) % 3], n,
	})));
	const answers = requests.map(() => []);

	async function worker() {
		while (queue.length) {
			const { n, ...request } = queue.shift();
			answers[n].push(await send(request));
			answered++;
			if (answered >= terminations[0]) {
				terminations.shift();
				await database.query(`SELECT pg_terminate_backend(pid) ${sessions}`);
			}
			if (answered >= kills[0]) {
				kills.shift();
				await killServer();
				await startServer();
			}
		}
	}
	// Some run at the same time, so that several clients send the same payment at once
	queue.sort((a, b) => Math.floor(a.n / 10) - Math.floor(b.n / 10));
	await Promise.all(Array.from({ length: 12 }, worker));

	is([kills.length, terminations.length], [0, 0], 'the server was killed twice, and its backends terminated six times');
	// Not counted are attempts that found no server
	check('answers were lost', () => assert(answersLost >= payments / 2));
	check('all clients of a payment have the same answer, to the byte', () => {
		for (const [n, same] of answers.entries()) {
			assert.strictEqual(same.length, 3);
			for (const { status, headers, body } of same) {
				assert.strictEqual(status, 201, body);
				assert.strictEqual(headers.location, same[0].headers.location);
				assert(body.equals(same[0].body));
				assert.strictEqual(JSON.parse(body).amount, requests[n].body.amount);
			}
			assert(same.filter(({ headers }) => !headers['idempotent-replayed']).length <= 1);
		}
	});
	return requests;
}

// Locks the account of the payer, so that a payment takes as long as the test wants.
async function withLockedAccount(work) {
	const locker = new Client({ database: name });
	await locker.connect();
	await locker.query(`BEGIN; SELECT FROM accounts WHERE name = 'slow' FOR UPDATE`);
	await work(() => locker.query('ROLLBACK'));
	await locker.end();
}

async function slowPayment() {
	await withLockedAccount(async (unlock) => {
		const request = { user: 'slow', key: crypto.randomUUID(), body: { payee: 'payee 0', amount: 1, reference: 'slow' } };
		const begun = waitFor(`SELECT count(*) = 1 AS ok ${sessions} AND wait_event_type = 'Lock'`);
		const client = send({ ...request, first: () => ({ timeout: begun }) });
		await begun;
		let { status, headers } = await attempt(request);
		is([status, headers['retry-after']], [409, '1'], '409 with Retry-After for the same payment, at once');
		await unlock();
		({ status, headers } = await client);
		is([status, headers['idempotent-replayed']], [201, 'true'], 'one that gave up, and has tried again since, gets the answer');
		check('by a time-out', () => assert(again.ETIMEDOUT >= 1));
		is(await paid('slow'), 1, 'of the one payment');
	});
}

async function serverDiesWithPayment() {
	await withLockedAccount(async (unlock) => {
		const request = { user: 'slow', key: crypto.randomUUID(), body: { payee: 'payee 0', amount: 1, reference: 'dies' } };
		const first = attempt(request).catch(({ code }) => code);
		await waitFor(`SELECT count(*) = 1 AS ok ${sessions} AND wait_event_type = 'Lock'`);
		await killServer();
		is(await first, 'ECONNRESET', 'the server is killed within a payment');
		await waitFor(`SELECT count(*) = 0 AS ok ${sessions} AND wait_event_type = 'Lock'`);
		await startServer();
		const again = send(request);
		await waitFor(`SELECT count(*) = 1 AS ok ${sessions} AND wait_event_type = 'Lock'`);
		await unlock();
		const { status, headers } = await again;
		is([status, headers['idempotent-replayed']], [201, undefined], 'which left nothing: the next attempt pays');
		is(await paid('dies'), 1, 'once');
	});
}

// The backend of a payment is cancelled, or terminated; then all that are idle.
async function backendLost() {
	const { pid } = server;
	for (const [how, answer] of [['pg_cancel_backend', 500], ['pg_terminate_backend', 201]]) {
		await withLockedAccount(async (unlock) => {
			const request = { user: 'slow', key: crypto.randomUUID(), body: { payee: 'payee 0', amount: 1, reference: how } };
			const first = attempt(request);
			const locked = `count(*) = 1 AS ok ${sessions} AND wait_event_type = 'Lock'`;
			const { lost } = await waitFor(`SELECT min(pid) AS lost, ${locked}`);
			await database.query(`SELECT ${how}($1)`, [lost]);
			if (answer === 201) await waitFor(`SELECT min(pid) <> ${lost} AND ${locked}`);
			else is((await first).status, answer, `${how}() in a payment: the handler's error`);
			await unlock();
			if (answer === 201) is((await first).status, answer, `${how}() in a payment: it is paid on another connection`);
			is((await send(request)).status, 201, 'the next attempt is answered');
			is(await paid(how), 1, 'it was paid once');
		});
	}
	await Promise.all(Array.from({ length: 5 }, (_, n) => send({ user: 'poor', key: crypto.randomUUID(), body: { payee: 'payee 0', amount: 1e6 } })));
	const { rows: { length } } = await database.query(`SELECT pg_terminate_backend(pid, 60000) ${sessions}`);
	check('idle backends are terminated', () => assert(length > 1));
	is((await attempt({ key: crypto.randomUUID(), body: { payee: 'payee 0', amount: 1, reference: 'idle' } })).status, 201, 'the next payment is made');
	is([server.pid, server.exitCode, server.signalCode], [pid, null, null], 'the same process has served all of it');
}

async function statuses() {
	const body = { payee: 'payee 0', amount: 1, reference: 'statuses' };
	const key = crypto.randomUUID();

	const type = (response) => JSON.parse(response.body).type;
	is((await attempt({ user: '', key, body })).status, 401, '401 without a user');
	const keyless = await attempt({ body });
	is([keyless.status, type(keyless)], [400, 'urn:idem:key-missing'], '400 without a key');
	for (const quoted of ['', '""', '"', '"open', 'open"', 'a b', 'a"b', 'a\\b', `"${'x'.repeat(256)}"`]) {
		is((await attempt({ quoted, body })).status, 400, `400 for the key ${quoted.slice(0, 10)}`);
	}
	const bug = await attempt({ key, body: null });
	is([bug.status, bug.headers['retry-after']], [500, undefined], '500 without Retry-After for an error of the handler');
	const refused = await attempt({ key, body: { ...body, payee: 'nobody' } });
	is([refused.status, String(refused.body)], [400, 'Bad Request'], '400 for a payee that does not exist, without the name of the constraint');
	is((await attempt({ key, body })).status, 201, '201: they have not used up the key');
	is((await attempt({ quoted: key, body })).headers['idempotent-replayed'], 'true', 'the same key without quotes is the same');
	const spaced = await attempt({ key, text: '{ "reference": "statuses", "amount": 1.0, "payee": "payee 0" }' });
	is([spaced.status, spaced.headers['idempotent-replayed']], [201, 'true'], 'the same JSON, written otherwise, is the same payment');
	const other = await attempt({ key, body: { ...body, amount: 2 } });
	is([other.status, type(other)], [422, 'urn:idem:key-reused'], '422 for another payment with the same key');
	is((await attempt({ user: 'poor', key, body })).status, 402, '402: the key of another user is another key');
	await database.query(`UPDATE accounts SET balance = 100 WHERE name = 'poor'`);
	const { status, headers } = await attempt({ user: 'poor', key, body });
	is([status, headers['idempotent-replayed']], [402, 'true'], '402: a payment that was refused stays refused');
	is((await attempt({ user: 'poor', key: crypto.randomUUID(), body })).status, 201, '201: a new key is a new payment');
	is(await paid('statuses'), 2, 'these were two payments');

	const marker = crypto.randomUUID();
	await database.query(`SELECT idem.idem_claim('ann', $1, 'payments')`, [marker]);
	const replay = await attempt({ key: marker, body });
	is([replay.status, type(replay)], [500, 'urn:idem:answer-lost'], '500 for a payment without a stored response');
	await database.query('UPDATE idem.idem_scopes SET result_max_bytes = 100');
	is((await attempt({ key: crypto.randomUUID(), body })).status, 500, '500 for a response that cannot be stored');
	is(await paid('statuses'), 2, 'which is undone');
	await database.query(`UPDATE idem.idem_scopes SET result_max_bytes = NULL, lapsed = 'unknown'`);
	const lapsed = crypto.randomUUID();
	await database.query(`SELECT FROM idem.idem_lease('ann', $1, scope => 'payments', lease => '1 us')`, [lapsed]);
	const unknown = await attempt({ key: lapsed, body });
	is([unknown.status, unknown.headers['retry-after']], [409, undefined], '409 without Retry-After for one of which nobody knows the end');

	await database.query(`UPDATE idem.idem_scopes SET key_time = 'uuidv7'`);
	is((await attempt({ key: '0193a1f2-7d43-7c5e-9a10-5f7c2e1b8a01', body })).status, 412, 'with key_time = uuidv7, 412 for an old key');
	await database.query(`UPDATE idem.idem_scopes SET key_time = 'any'`);
}

async function books() {
	const executions = await count('SELECT count(*) FROM payments');
	const distinct = await count('SELECT count(DISTINCT (payer, reference)) FROM payments');
	note(`answers lost: ${answersLost}; sent again: ${Object.entries(again).map(([what, times]) => `${what} ${times}`).join(', ')}`);
	note(`requests ${distinct}, deliveries ${deliveries}, executions ${executions}, double executions ${executions - distinct}`);
	is(executions, distinct, 'no payment was made twice');
	is(await count(`SELECT count(*) FROM payments WHERE reference ~ '^payment '`), payments, 'each acknowledged payment was made');
	is(await count('SELECT sum(balance) - $1 AS count FROM accounts', 10100), 0, 'no money was made or lost');
	is(await count(`SELECT 5000 - balance - (SELECT sum(amount) FROM payments WHERE payer = 'ann') AS count FROM accounts WHERE name = 'ann'`),
		0, 'the payer has paid for each payment once');
}

// ----- all of it -----

run(async () => {
	makeDatabase(`
		INSERT INTO accounts VALUES ('ann', 5000), ('slow', 5000), ('poor', 0);
		INSERT INTO accounts SELECT 'payee ' || n, 0 FROM generate_series(0, 4) n`);
	database = new Client({ database: name });
	await database.connect();
	await startServer();
	const network = await startLossyNetwork();

	await statuses();
	await slowPayment();
	await serverDiesWithPayment();
	await backendLost();
	await traffic();
	await books();
	network.close();
});
