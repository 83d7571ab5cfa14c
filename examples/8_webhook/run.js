#!/usr/bin/env node
//
// Runs the example: a provider delivers each event until it has a 2xx, and then once more, some twice at once, through
// lost answers, while the server is killed in the middle, and its backends are terminated.
'use strict';

const assert = require('assert');
const crypto = require('crypto');
const fs = require('fs');
const http = require('http');
const path = require('path');
const { Client } = require('pg');
const { name, folder, pause, check, is, note, makeDatabase, waitFor, start, kill, run, cleanUp } = require('../../test/lib/example.js');

const socket = path.join(folder, 'server');
const secret = crypto.randomBytes(16).toString('hex');
const events = 60;

let database, server;
let deliveries = 0;
const statuses = {};

function startServer() {
	fs.rmSync(socket, { force: true });
	const child = server = start('server.mjs', [socket], { env: { WEBHOOK_SECRET: secret }, stdio: ['ignore', 'pipe', 'ignore'] });
	child.ended.then(() => {
		if (child.killed) return;
		note('the server has ended by itself');
		cleanUp(1);
	});
	return new Promise((resolve) => child.stdout.once('data', resolve));
}

// ----- the provider -----

const sign = (body, { at = Math.floor(Date.now() / 1000), key = secret } = {}) =>
	`t=${at},v1=${crypto.createHmac('sha256', key).update(`${at}.${body}`).digest('hex')}`;

// One delivery: its status, or the code of the error. One that is lost has reached the server: it hangs up.
function deliver(event, { attempt = 1, lost, signature, body = JSON.stringify({ ...event, attempt }) } = {}) {
	deliveries++;
	return new Promise((resolve) => {
		const request = http.request({
			socketPath: socket, method: 'POST', path: '/webhooks', agent: false,
			headers: { 'Content-Type': 'application/json', Signature: signature ?? sign(body) },
		}, (response) => response.resume().on('end', () => resolve(response.statusCode)));
		request.on('error', ({ code }) => resolve(code));
		request.end(body);
		if (lost) setTimeout(() => request.destroy(Object.assign(new Error('lost'), { code: 'LOST' })), 3);
	}).then((status) => {
		statuses[status] = (statuses[status] || 0) + 1;
		return status;
	});
}

async function deliverUntilDone(event, lost) {
	for (let attempt = 1; ; attempt++) {
		const status = await deliver(event, { attempt, lost: lost && attempt === 1 });
		if (status === 204) return;
		await pause(20);
	}
}

// ----- what can happen -----

const count = async (query, ...values) => Number((await database.query(query, values)).rows[0].count);
const receipts = (event) => count('SELECT count(*) FROM receipts WHERE event = $1', event.id);
const sessions = `FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()`;
const paid = (n) => ({ id: `evt_${n}`, type: 'invoice.paid', data: { invoice: `invoice ${n % 3}`, amount: 1 + n } });

async function signatures() {
	const event = paid(1000), body = JSON.stringify(event);
	for (const [what, signature] of [['of another secret', sign(body, { key: 'x' })], ['of another body', sign(`${body} `)],
		['that is old', sign(body, { at: Math.floor(Date.now() / 1000) - 3600 })], ['that is none', 'x']]) {
		is([await deliver(event, { body, signature }), await receipts(event)], [401, 0], `401 for a signature ${what}`);
	}
	is([await deliver(null, { body: '{}' }), await deliver(null, { body: 'x' })], [400, 400], '400 for an event without an id');
	is([await deliver({ id: 'evt_other', type: 'customer.created' })], [204], 'an event of another type is acknowledged');
	const unknown = { ...event, data: { invoice: 'invoice 9', amount: 1 } };
	is([await deliver(unknown), await receipts(event)], [500, 0], 'an event that fails is rolled back');
	await database.query(`INSERT INTO invoices VALUES ('invoice 9')`);
	is([await deliver(unknown), await deliver(unknown), await receipts(event)], [204, 204, 1], 'and takes effect once when it is delivered again');
}

async function atOnce() {
	const event = paid(1001);
	const locker = new Client({ database: name });
	await locker.connect();
	await locker.query(`BEGIN; SELECT FROM invoices WHERE id = 'invoice 2' FOR UPDATE`);
	const first = deliver(event);
	const waiting = `count(*) = 1 AS ok ${sessions} AND wait_event_type = 'Lock'`;
	const { lost } = await waitFor(database, `SELECT min(pid) AS lost, ${waiting}`);
	is(await deliver(event), 409, 'a delivery while another one is at work: 409');
	await database.query('SELECT pg_terminate_backend($1)', [lost]);
	await waitFor(database, `SELECT min(pid) <> ${lost} AND ${waiting}`);
	await locker.query('ROLLBACK');
	await locker.end();
	is([await first, await deliver(event), await receipts(event)], [204, 204, 1], 'whose backend is terminated: it takes effect once');
}

async function traffic() {
	const queue = Array.from({ length: events }, (_, n) => n).flatMap((n) => [n, n]);
	let done = 0;

	async function worker() {
		while (queue.length) {
			const n = queue.shift();
			await deliverUntilDone(paid(n), n % 3 === 0);
			const number = ++done;
			if (number % 30 === 10) await database.query(`SELECT pg_terminate_backend(pid) ${sessions}`);
			if (number === events) {
				await kill(server);
				await startServer();
			}
		}
	}
	await Promise.all(Array.from({ length: 6 }, worker));
	// By hand, from the provider's dashboard
	for (let n = 0; n < events; n += 7) is(await deliver(paid(n), { attempt: 99 }), 204, `event ${n}, delivered once more`);
	check('answers were lost, and the server was away', () => assert(statuses.LOST > 0 && (statuses.ENOENT || statuses.ECONNREFUSED || statuses.ECONNRESET)));
}

async function books() {
	const executions = await count(`SELECT count(*) FROM receipts`);
	const distinct = await count(`SELECT count(DISTINCT event) FROM receipts`);
	note(`answers: ${Object.entries(statuses).map(([what, times]) => `${what} ${times}`).join(', ')}`);
	note(`requests ${distinct}, deliveries ${deliveries}, executions ${executions}, double executions ${executions - distinct}`);
	is([executions, distinct], [events + 2, events + 2], 'each event took effect once');
	is(await count('SELECT sum(paid) - (SELECT sum(amount) FROM receipts) AS count FROM invoices'), 0, 'so did its payment');
}

run(async () => {
	makeDatabase(`INSERT INTO invoices SELECT 'invoice ' || n FROM generate_series(0, 2) n`);
	database = new Client({ database: name });
	await database.connect();
	await startServer();
	await signatures();
	await atOnce();
	await traffic();
	await books();
});
