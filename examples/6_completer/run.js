#!/usr/bin/env node
//
// Runs the example: trips whose seller is killed or paused, or loses its session, after each of its
// calls in turn, and is killed within each request to the provider; a provider that is killed with them or alone; completers that
// are killed after each of their calls in turn. At the end each trip was paid, booked and mailed.
'use strict';

const assert = require('assert');
const fs = require('fs');
const path = require('path');
const readline = require('readline');
const { Client } = require('pg');
const trips = require('./trips.js');
const { name, folder, check, is, note, makeDatabase, makeRole, waitFor, start, run, cleanUp } = require('../../test/lib/example.js');

const forms = { Trips: 'trip', TripsByScopes: 'trip by scopes' };
const tried = process.env.FORMS ? process.env.FORMS.split(' ') : Object.keys(forms);	// FORMS: only these
const socket = path.join(folder, 'provider');
const journal = path.join(folder, 'journal');

// Short leases lapse while other trips are sold. On a slow machine they lapse early, and that is no
// harm: a holder whose lease has lapsed goes on until it is replaced.
const long = '10 minutes';
const short = '3 seconds';

let database;			// a session of ours
let provider;			// the provider's process
let role;				// of sellers and completers
let kills = 0;
const sold = [];		// { form, request }: the trips that were ordered
const paused = [];		// { form, child, where }: sellers

// ----- processes -----

// Lets hear() return what a process says, in lines of JSON or as messages, one by one; in the end
// { ended }
function listen(child) {
	const said = [], waiting = [];
	const hear = (message) => (waiting.length ? waiting.shift()(message) : said.push(message));
	if (child.stdout) readline.createInterface({ input: child.stdout }).on('line', (line) => hear(JSON.parse(line)));
	if (child.channel) child.on('message', hear);
	child.once('close', (code, signal) => hear({ ended: signal || code }));
	child.hear = () => new Promise((resolve) => (said.length ? resolve(said.shift()) : waiting.push(resolve)));
	return child;
}

async function startProvider() {
	const child = provider = listen(start('provider.js', [socket, journal], { stdio: ['ignore', 'inherit', 'inherit', 'ipc'] }));
	child.ended.then(() => {
		if (child.killed) return;
		note('the provider has ended by itself');
		cleanUp(1);
	});
	assert.deepStrictEqual(await child.hear(), { listening: true });
}

async function killProvider() {
	kills++;
	provider.kill('SIGKILL');
	await provider.ended;
	await startProvider();
}

// The next request to this path stops at this point.
async function holdProvider(where, at) {
	provider.send({ hold: { path: where, at } });
	// It may have said that it was asked for a charge in progress.
	while (!(await provider.hear()).armed);
}

const worker = (parameters) => listen(start('worker.js', [socket, JSON.stringify(parameters)],
	{ stdio: ['pipe', 'pipe', 'inherit'], env: { PGOPTIONS: `-c role=${role}` } }));

async function killWorker(child) {
	kills++;
	child.kill('SIGKILL');
	await child.ended;
}

// ----- trips -----

const order = (request) => ({ amount: request === 'declined' ? 1001 : 100, to: 'Oslo' });

// Starts a seller of a new trip
function sell(form, request, options = {}) {
	sold.push({ form, request });
	return worker({ form, lease: short, buy: ['ann', request, order(request)], ...options });
}

// The client orders a trip again: its answer, which has to come from the first call of the database
async function orderAgain(form, request) {
	let calls = 0;
	const seller = new trips[form]({
		query: async (...query) => {
			assert.strictEqual(++calls, 1);
			return (await database.query(...query)).rows;
		},
	});
	const { outcome, result } = await seller.buy('ann', request, order(request));
	return [outcome, result];
}

const count = async (query, ...values) => Number((await database.query(query, values)).rows[0].count);
const unsettled = (form) => `FROM idem_claims WHERE state = 'in_progress' AND scope ~ '^${forms[form]}($|:)'`;

// Waits until a completer has something to do; false: everything is settled
async function somethingLapsed(form) {
	const { lapsed } = await waitFor(database, `
		WITH l AS MATERIALIZED (SELECT EXISTS (SELECT FROM idem_lapsed('${forms[form]}', 1)) AS lapsed)
		SELECT lapsed, lapsed OR NOT EXISTS (SELECT ${unsettled(form)}) AS ok FROM l`);
	return lapsed;
}

// One round of the completer, to its end
async function complete(form, options = {}) {
	assert.strictEqual(await worker({ form, lease: short, ...options }).ended, 0);
}

async function completeAll(form) {
	while (await somethingLapsed(form)) await complete(form, { lease: long });
}

// ----- what happens to sellers -----

// Returns the calls of a sale
async function withoutFault(form) {
	const { outcome, result, calls } = await sell(form, 'no fault', { lease: long }).hear();
	is(outcome, 'completed', `${form}: a trip is sold`);
	note(`${form}: ${calls.join(', ')}`);
	is(await orderAgain(form, 'no fault'), [outcome, result], `${form}: ordered again, it is the same`);

	const declined = await sell(form, 'declined', { lease: long }).hear();
	is([declined.outcome, declined.result], ['failed', { declined: 'over the limit' }], `${form}: a charge that is declined ends the trip`);
	return calls;
}

async function stopAfterCalls(form, calls) {
	for (const [n, call] of calls.entries()) {
		const where = `after call ${n + 1}, ${call}`;
		const killed = sell(form, `killed ${where}`, { stop: { after: n + 1, how: 'killed' } });
		is(await killed.ended, 'SIGKILL', `${form}: killed ${where}`);
		kills++;
		const child = sell(form, `paused ${where}`, { stop: { after: n + 1, how: 'paused' } });
		is(Object.keys(await child.hear()), ['paused'], `${form}: paused ${where}`);
		paused.push({ form, child, where });
		const { outcome, error } = await sell(form, `terminated ${where}`, { stop: { after: n + 1, how: 'terminated' } }).hear();
		check(`${form}: its session terminated ${where}: ${error || outcome}`, () => assert(error || outcome === 'completed'));
		kills++;
	}
}

// The seller is killed, or the provider, or both, while the provider has the request.
async function stopWithinRequests(form) {
	for (const where of ['/charges', '/mails']) {
		for (const at of ['received', 'written']) {
			for (const victim of ['seller', 'provider', 'both']) {
				const what = `${victim} killed, ${where} ${at}`;
				await holdProvider(where, at);
				const seller = sell(form, what);
				is(await provider.hear(), { held: where }, `${form}: ${what}`);
				if (victim !== 'provider') await killWorker(seller);
				if (victim === 'seller') provider.send({ go: true });
				else await killProvider();
				if (victim === 'provider') {
					is((await seller.hear()).error, 'Unclear', `${form}: whose seller does not know, and leaves it`);
				}
			}
		}
	}
}

// The completer asks while the provider is still at work for a seller that is dead.
async function askTooEarly(form) {
	await holdProvider('/charges', 'received');
	const seller = sell(form, 'asked too early');
	is(await provider.hear(), { held: '/charges' }, `${form}: a charge is in progress`);
	await killWorker(seller);
	let asked;
	provider.hear().then((message) => (asked = message));
	for (let round = 1; !asked && round <= 3 && await somethingLapsed(form); round++) await complete(form);
	is(asked, { inProgress: `${forms[form]}/ann/asked too early` }, `${form}: the completer asks for it, and leaves it`);
	assert(asked);
	provider.send({ go: true });
	await completeAll(form);
}

// ----- what happens to completers -----

// The provider is killed within each request of a completer, and the completer leaves the trip.
async function killProviderOfCompleters(form) {
	for (const [where, at] of [['/lookup', 'received'], ['/charges', 'received'], ['/charges', 'written'], ['/mails', 'received'], ['/mails', 'written']]) {
		await holdProvider(where, at);
		const held = provider.hear();
		let got;
		while (!got && await somethingLapsed(form)) {
			const completer = worker({ form, lease: short });
			got = await Promise.race([held, completer.ended.then(() => undefined)]);
			if (got) await killProvider();
			assert.strictEqual(await completer.ended, 0);
		}
		is(got, { held: where }, `${form}: the provider is killed within a request of the completer, ${where} ${at}`);
	}
}

// Trips of which the completer knows only that a charge was begun
async function sellForCompleters(form, calls) {
	// A completer has to ask first; and where that leaves it alone, to begin again.
	const points = calls.length + (form === 'Trips' ? 1 : 2);
	for (let n = 1; n <= points; n++) {
		is(await sell(form, `completer killed after call ${n}`, { stop: { after: 2, how: 'killed' } }).ended, 'SIGKILL',
			`${form}: left to a completer`);
		kills++;
	}
	return points;
}

// Completers are killed after each call for such a trip, in turn.
async function killCompleters(form, points) {
	const killed = new Set();
	while (killed.size < points && await somethingLapsed(form)) {
		const completer = worker({ form, lease: short, stop: { how: 'killed', after: 'named' } });
		const { killing } = await completer.hear();
		assert.strictEqual(await completer.ended, killing ? 'SIGKILL' : 0);
		if (!killing) continue;
		kills++;
		killed.add(killing);
	}
	is(killed.size, points, `${form}: ${points} completers were killed, each after another call for its trip`);
}

// A seller that comes back after all is settled must neither charge nor book, though the provider has
// forgotten all keys.
async function resumePaused(form) {
	const written = async () => [journalLines().filter((line) => line.reference).length, await count('SELECT count(*) FROM bookings')];
	const before = await written();
	await killProvider();
	for (const { child, where } of paused.filter((seller) => seller.form === form)) {
		child.stdin.write('go on\n');
		const { error, outcome } = await child.hear();
		check(`${form}: paused ${where}, it comes back: ${error || outcome}`, () => assert(error === 'ID410' || outcome === 'completed'));
	}
	is(await written(), before, `${form}: none of them has charged or booked`);
}

// ----- books -----

const journalLines = () => fs.readFileSync(journal, 'utf8').split('\n').filter(Boolean).map((line) => JSON.parse(line));

async function books() {
	const journaled = journalLines();
	let executions = 0, mails = 0;

	for (const { form, request } of sold) {
		const reference = `${forms[form]}/ann/${request}`;
		const charges = journaled.filter((line) => line.reference === reference);
		const bookings = await count('SELECT count(*) FROM bookings WHERE reference = $1', reference);
		const sent = journaled.filter((line) => line.mail === `<${reference}>`).length;
		const [outcome, result] = await orderAgain(form, request);

		executions += charges.length;
		mails += sent;
		if (request === 'declined') {
			is([charges.length, bookings, sent, outcome], [0, 0, 0, 'failed'], `${reference}: nothing`);
			continue;
		}
		is([charges.length, bookings, outcome], [1, 1, 'completed'], `${reference}: one charge and one booking`);
		is(result, { charge: charges[0].id, booking: result.booking, mail: `<${reference}>` }, `${reference}: of which its client is told, and of one mail`);
		check(`${reference}: which was sent`, () => assert(request === 'no fault' ? sent === 1 : sent >= 1));
	}
	for (const form of tried) {
		is(await count(`SELECT count(*) ${unsettled(form)}`), 0, `${form}: nothing is left unsettled`);
	}
	const number = sold.length - tried.length;		// not counting those that were declined
	note(`kills ${kills}, mails sent again ${mails - number}`);
	check('a mail was sent again only where a process was killed or paused', () => assert(mails - number <= kills + paused.length));
	note(`requests ${number}, deliveries ${number}, executions ${executions}, double executions ${executions - number}`);
	is(executions, number, 'no trip was paid twice');
}

// A completer that does not ask charges again: the provider has forgotten the key.
async function baseline() {
	const form = 'Trips', request = 'baseline';
	await holdProvider('/charges', 'written');
	const seller = worker({ form, lease: short, buy: ['ann', request, order(request)] });
	await provider.hear();
	await killWorker(seller);
	await killProvider();
	while (await somethingLapsed(form)) await complete(form, { lease: long, blind: true });
	const charges = journalLines().filter((line) => line.reference === `trip/ann/${request}`).length;
	note(`baseline without asking: requests 1, deliveries 1, executions ${charges}, double executions ${charges - 1}`);
	is(charges, 2, 'baseline without asking: a second charge');
}

// ----- all of it -----

run(async () => {
	makeDatabase('');
	role = makeRole((seller) => `
		SELECT idem_grant('${seller}', 'app');
		GRANT EXECUTE ON FUNCTION idem_lapsed, idem_forget(text, text, text) TO ${seller};
		GRANT INSERT, SELECT ON bookings TO ${seller}`);
	database = new Client({ database: name });
	await database.connect();
	await startProvider();

	const calls = {}, points = {};
	for (const form of tried) {
		calls[form] = await withoutFault(form);
		await askTooEarly(form);
		await stopAfterCalls(form, calls[form]);
		await stopWithinRequests(form);
	}
	for (const form of tried) await killProviderOfCompleters(form);
	for (const form of tried) points[form] = await sellForCompleters(form, calls[form]);
	for (const form of tried) {
		await killCompleters(form, points[form]);
		await completeAll(form);
		await resumePaused(form);
	}
	await books();
	await baseline();
});
