#!/usr/bin/env node
//
// Runs the example: sellers are killed or paused, or lose their sessions, at each point of a trip; so are completers killed; and
// the provider is killed in a charge. At the end each trip was paid and booked once.
'use strict';

const assert = require('assert');
const fs = require('fs');
const path = require('path');
const readline = require('readline');
const { Pool } = require('pg');
const { name, folder, pause, check, is, note, makeDatabase, makeRole, waitFor, start, kill, run } = require('../../test/lib/example.js');

const journal = path.join(folder, 'journal');
// On a slow machine a shorter lease would lapse while its seller starts.
const options = { lease: '4 s', longest: 1000 };
const points = ['claimed', 'begun', 'charged', 'recorded', 'settled'];

let database, role;
let provider, port = 0;
let kills = 0;
const sold = [];		// but the baseline

// ----- processes -----

// say() returns what the process says next; in the end { ended }
function listen(child) {
	const said = [], waiting = [];
	const hear = (message) => (waiting.length ? waiting.shift()(message) : said.push(message));
	if (child.stdout) readline.createInterface({ input: child.stdout }).on('line', (line) => hear(JSON.parse(line)));
	child.once('close', (code, signal) => hear({ ended: signal || code }));
	child.hear = () => new Promise((resolve) => (said.length ? resolve(said.shift()) : waiting.push(resolve)));
	return child;
}

// Resolves when the provider says so
const told = (what, reference) => new Promise((resolve) => provider.on('message', function hear(message) {
	if (!(what in message) || (reference && message[what] !== reference)) return;
	this.off('message', hear);
	resolve(message[what]);
}));

async function startProvider() {
	provider = start('provider.js', [port, journal], { stdio: ['ignore', 'inherit', 'inherit', 'ipc'] });
	port = await told('listening');
}

async function restartProvider() {
	kills++;
	await kill(provider);
	await startProvider();
}

const go = (id) => provider.send({ go: `ann/${id}` });

const worker = (parameters) => listen(start('worker.mjs', [JSON.stringify({ url: `http://127.0.0.1:${port}`, options, ...parameters })],
	{ stdio: ['ignore', 'pipe', 'ignore'], env: { PGOPTIONS: `-c role=${role}` } }));

const order = (id) => ({ amount: id === 'declined' ? 1001 : 100, to: 'Oslo' });

// Starts a seller of a trip
function sell(id, more = {}) {
	if (!sold.includes(id) && id !== 'baseline') sold.push(id);
	return worker({ buy: [id, order(id)], ...more });
}

// A seller whose charge stops at this point of the provider. On a very slow machine the first one loses its lease before.
async function sellAndHold(id, at) {
	const armed = told('armed', `ann/${id}`), held = told('held', `ann/${id}`);
	provider.send({ hold: `ann/${id}`, at });
	await armed;
	for (;;) {
		const seller = sell(id);
		if (await Promise.race([held, seller.ended.then(() => null)])) return seller;
	}
}

// Rounds of completers, until nothing is left of these trips
async function completeAll() {
	for (;;) {
		const { left } = await waitFor(database, `
			SELECT count(*) AS left, count(*) = 0 OR count(*) FILTER (WHERE lease_until < clock_timestamp()) > 0 AS ok
			FROM idem.idem_claims WHERE scope = 'trip' AND state = 'in_progress'`);
		if (left === '0') return;
		await Promise.all([worker({}).ended, worker({}).ended]);
	}
}

// Three at a time
async function inTurn(list, work) {
	const queue = [...list];
	await Promise.all([0, 1, 2].map(async () => {
		while (queue.length) await work(queue.shift());
	}));
}

// ----- what can happen -----

const charged = (id) => fs.readFileSync(journal, 'utf8').split('\n').filter(Boolean).filter((line) => JSON.parse(line).reference === `ann/${id}`).length;
const booked = async (id) => Number((await database.query('SELECT count(*) FROM bookings WHERE reference = $1', [`ann/${id}`])).rows[0].count);
const times = async (id) => [charged(id), await booked(id)];

async function withoutFault() {
	const { value, replayed, points: passed } = await sell('no fault').hear();
	is([passed, replayed], [points, false], 'a trip is sold');
	const again = await sell('no fault').hear();
	is([again.value, again.replayed, again.points, await times('no fault')], [value, true, [], [1, 1]], 'ordered again, it is the same');
	for (const what of ['a charge that is declined ends the trip', 'for good']) {
		is(await sell('declined').hear(), { error: 'Failed', stored: { declined: 'over the limit' } }, what);
	}
	is(await times('declined'), [0, 0], 'nothing is charged');
	const other = worker({ buy: ['no fault', { amount: 99, to: 'Rome' }] });
	is((await other.hear()).error, 'Mismatch', 'another order with the id of the trip');
}

// The heartbeat keeps the trip for its holder.
async function slowCharge() {
	const seller = await sellAndHold('slow', 'received');
	const { rows: [{ until }] } = await database.query(`SELECT lease_until AS until FROM idem.idem_claims WHERE request_id = 'slow'`);
	await waitFor(database, `SELECT lease_until > clock_timestamp() AND clock_timestamp() > $1::timestamptz + interval '1 s' AS ok
		FROM idem.idem_claims WHERE request_id = 'slow'`, until);
	is((await sell('slow').hear()).error, 'InProgress', 'a charge that takes longer than a lease: the seller still has the trip');
	go('slow');
	is([(await seller.hear()).replayed, await times('slow')], [false, [1, 1]], 'and ends it');
}

async function stopSellers() {
	const victims = ['killed', 'paused', 'terminated'].flatMap((how) => points.map((at) => ({ how, at, id: `${how} when ${at}` })));
	await inTurn(victims, async (victim) => {
		const { how, at } = victim;
		let said;
		// On a very slow machine the lease lapses before the seller is there.
		do {
			victim.child = sell(victim.id, { stop: { how, at } });
			said = await victim.child.hear();
			if (said.error === 'LeaseLost') victim.id += ' again';
		} while (said.error === 'LeaseLost');
		kills++;
		is(said, { at }, victim.id);
		if (how === 'killed') is(await victim.child.ended, 'SIGKILL', `${victim.id}: it is dead`);
		if (how === 'terminated') {
			const { value, error } = await victim.child.hear();
			check(`${victim.id}: it goes on`, () => assert(value || error === 'LeaseLost', error));
		}
	});
	return victims.filter(({ how }) => how === 'paused');
}

// A seller that comes back after all is done must neither charge nor book.
async function resume(paused) {
	for (const { at, id, child } of paused) {
		child.kill('SIGCONT');
		const { error, value } = await child.hear();
		is([error, Boolean(value)], at === 'settled' ? [undefined, true] : ['LeaseLost', false], `${id}, it comes back`);
	}
}

// The provider dies with a charge: the seller does not know, and leaves the trip.
async function killProvider() {
	for (const at of ['received', 'written']) {
		const id = `provider killed, charge ${at}`;
		const seller = await sellAndHold(id, at);
		await restartProvider();
		is((await seller.hear()).error, 'TypeError', `${id}: its seller does not know`);
	}
}

// The seller dies while its charge is under way. Its successor asks, is answered 404, and must not charge.
async function underWay(id, more = {}) {
	kills++;
	await kill(await sellAndHold(id, 'received'));
	const asked = told('unknown', `ann/${id}`);
	let completer, reference;
	while (!reference) {
		await waitFor(database, `SELECT EXISTS (SELECT FROM idem.idem_lapsed('trip') WHERE request_id = $1) AS ok`, id);
		completer = worker({ stop: { id }, ...more });
		reference = await Promise.race([asked, completer.ended.then(() => null)]);
	}
	is(reference, `ann/${id}`, `${id}: 404 for a charge that is under way`);
	if (more.options) await completer.ended;
	go(id);
	await completer.ended;
}

// A successor that takes the first 404 for an answer
async function baseline() {
	await underWay('baseline', { options: { ...options, longest: 0 } });
	for (let n = 0; charged('baseline') < 2 && n < 1000; n++) await pause(10);
	note(`baseline, 404 taken for an answer: requests 1, deliveries 1, executions ${charged('baseline')}, double executions ${charged('baseline') - 1}`);
	is(charged('baseline'), 2, 'baseline, 404 taken for an answer: charged twice');
}

// Completers die at each point of a trip of which they know only that a charge was begun.
async function killCompleters() {
	const victims = points.map((at) => ({ at, how: 'killed', id: `completer killed when ${at}` }));
	await inTurn(victims, ({ id }) => sell(id, { stop: { at: 'begun', how: 'killed' } }).ended);
	await inTurn(victims, async (stop) => {
		for (let died; died !== 'SIGKILL';) {
			await waitFor(database, `SELECT EXISTS (SELECT FROM idem.idem_lapsed('trip') WHERE request_id = $1) AS ok`, stop.id);
			died = await worker({ stop }).ended;
		}
	});
	kills += 2 * victims.length;
}

async function books() {
	let executions = 0;
	for (const id of sold) {
		executions += charged(id);
		if (id === 'declined') continue;
		const { rows: [{ result }] } = await database.query(`SELECT result FROM idem.idem_lookup('ann', $1, 'trip')`, [id]);
		is([await times(id), Boolean(result.charge)], [[1, 1], true], `${id}: one charge and one booking`);
	}
	const requests = sold.length - 1;		// not counting the one that was declined
	note(`kills ${kills}`);
	note(`requests ${requests}, deliveries ${requests}, executions ${executions}, double executions ${executions - requests}`);
	is(executions, requests, 'no trip was paid twice');
}

run(async () => {
	makeDatabase('');
	role = makeRole((seller) => `
		SELECT idem.idem_grant('${seller}', 'app');
		GRANT USAGE ON SCHEMA idem TO ${seller};
		GRANT EXECUTE ON FUNCTION idem.idem_lapsed TO ${seller};
		GRANT INSERT ON bookings TO ${seller}`);
	database = new Pool({ database: name });
	await startProvider();
	await withoutFault();
	const [paused] = await Promise.all([stopSellers(), slowCharge(), underWay('under way'), baseline(), killCompleters()]);
	await killProvider();
	await completeAll();
	await resume(paused);
	await books();
});
