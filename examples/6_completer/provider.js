// Stands for a payment provider and a mail server: a process of its own, with a journal on disk.
//
//	POST /charges {reference, amount}	201 {id}; 402: declined; 410: it came after its deadline
//	GET /charges/REFERENCE				200 {id}; 404: there is none; 409: one is in progress
//	POST /mails {id, to, text}			202
//
// It keeps its promises only in part, as real ones do. It honours an Idempotency-Key until it is
// restarted, and then forgets it: a repeated charge is charged again. Only the lookup by reference
// reads the journal. Mails have neither.
//
//	node provider.js SOCKET JOURNAL
'use strict';

const fs = require('fs');
const http = require('http');

const [socket, journal] = process.argv.slice(2);
const charges = new Map();		// by reference
const keys = new Map();			// in memory only
const inProgress = new Set();	// references
let entries = 0;

// ----- the journal -----

function remember(entry) {
	entries++;
	if (entry.reference && !charges.has(entry.reference)) charges.set(entry.reference, { id: entry.id });
}

function write(entry) {
	fs.writeSync(file, JSON.stringify(entry) + '\n');
	fs.fsyncSync(file);
	remember(entry);
}

const file = fs.openSync(journal, 'a+');
fs.readFileSync(journal, 'utf8').split('\n').filter(Boolean).forEach((line) => remember(JSON.parse(line)));

// ----- for the driver: one request stops at a point, and goes on when the driver says so -----

let hold;
const tell = (message) => process.send && process.send(message);

function reach(path, at) {
	if (!hold || hold.at !== at || !path.startsWith(hold.path)) return undefined;
	hold = undefined;
	return new Promise((resolve) => {
		process.on('message', (message) => message.go && resolve());
		tell({ held: path });
	});
}

process.on('message', (message) => {
	hold = message.hold || hold;
	if (message.hold) tell({ armed: true });
});

// ----- requests -----

async function charge({ reference, amount }, headers) {
	const key = headers['idempotency-key'];

	if (keys.has(key)) return [201, keys.get(key)];
	if (inProgress.has(reference)) return [409];
	// From here on the lookup knows of it. So the answer 404 is final for each request whose
	// deadline has passed.
	if (Date.now() >= Date.parse(headers['not-after'])) return [410];
	if (amount > 1000) return [402, { declined: 'over the limit' }];
	inProgress.add(reference);
	await reach('/charges', 'received');
	const answer = { id: entries + 1 };
	write({ ...answer, reference, amount });
	keys.set(key, answer);
	inProgress.delete(reference);
	await reach('/charges', 'written');
	return [201, answer];
}

async function find(reference) {
	await reach('/lookup', 'received');
	if (inProgress.has(reference)) {
		tell({ inProgress: reference });
		return [409];
	}
	return charges.has(reference) ? [200, charges.get(reference)] : [404];
}

async function mail({ id, to, text }) {
	await reach('/mails', 'received');
	write({ mail: id, to, text });
	await reach('/mails', 'written');
	return [202, {}];
}

async function answer({ method, url, headers }, body) {
	if (method === 'GET' && url.startsWith('/charges/')) return find(decodeURIComponent(url.slice('/charges/'.length)));
	if (method === 'POST' && url === '/charges') return charge(JSON.parse(body), headers);
	if (method === 'POST' && url === '/mails') return mail(JSON.parse(body));
	return [400];
}

const server = http.createServer(async (request, response) => {
	const chunks = [];
	try {
		for await (const chunk of request) chunks.push(chunk);
	} catch {
		return;		// the client is gone, and has not sent all
	}
	const [status, result] = await answer(request, Buffer.concat(chunks));
	response.writeHead(status, { 'Content-Type': 'application/json' }).end(JSON.stringify(result || {}));
});

fs.rmSync(socket, { force: true });
server.listen(socket, () => tell({ listening: true }));
