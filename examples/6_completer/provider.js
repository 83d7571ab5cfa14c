// Stands for a payment provider: a process of its own, with a journal on disk.
//
//	POST /charges {reference, amount}	201 {id}; 402 {declined}
//	GET /charges/REFERENCE				200 {id}; 404: there is none, or it is under way
//
// It has no idempotency keys: a charge that is sent twice is charged twice.
//
//	node provider.js PORT JOURNAL
'use strict';

const fs = require('fs');
const http = require('http');

const [port, path] = process.argv.slice(2);
const journal = fs.openSync(path, 'a+');
const charges = fs.readFileSync(path, 'utf8').split('\n').filter(Boolean).map((line) => JSON.parse(line));

// ----- for the driver: the charge of one reference stops at a point, and goes on when the driver says so -----

const holds = new Map();
const going = new Map();

process.on('message', ({ hold, at, go }) => {
	if (hold) {
		holds.set(hold, at);
		process.send?.({ armed: hold });
	}
	if (go) going.get(go)();
});

function reach(reference, at) {
	if (holds.get(reference) !== at) return undefined;
	holds.delete(reference);
	return new Promise((resolve) => {
		going.set(reference, resolve);
		process.send?.({ held: reference });
	});
}

// ----- requests -----

async function charge({ reference, amount }) {
	if (amount > 1000) return [402, { declined: 'over the limit' }];
	await reach(reference, 'received');
	const entry = { id: charges.length + 1, reference, amount };
	fs.writeSync(journal, JSON.stringify(entry) + '\n');
	charges.push(entry);
	await reach(reference, 'written');
	return [201, { id: entry.id }];
}

function find(reference) {
	const entry = charges.find((one) => one.reference === reference);
	if (!entry) process.send?.({ unknown: reference });
	return entry ? [200, { id: entry.id }] : [404, null];
}

const server = http.createServer(async (request, response) => {
	const chunks = [];
	try {
		for await (const chunk of request) chunks.push(chunk);
	} catch {
		return;		// the client is gone, and has not sent all
	}
	const [status, body] = await (request.method === 'POST' ? charge(JSON.parse(Buffer.concat(chunks)))
		: find(decodeURIComponent(request.url.slice('/charges/'.length))));
	response.writeHead(status).end(JSON.stringify(body));
});
server.listen(Number(port), '127.0.0.1', () => process.send?.({ listening: server.address().port }));
