// A process of the driver: buys one trip, or runs one round of the completer. After so many calls of
// the database or the provider it kills itself, terminates its session, or pauses until it gets a line.
//
//	node worker.js SOCKET {"form", "lease", "buy": [user, request, order], "stop": {"after", "how"}, "blind"}
'use strict';

const fs = require('fs');
const http = require('http');
const { Client } = require('pg');
const trips = require('./trips.js');

const socket = process.argv[2];
const { form, lease, buy, stop, blind } = JSON.parse(process.argv[3]);
const say = (message) => fs.writeSync(1, JSON.stringify(message) + '\n');

const calls = [];
const callsFor = {};

// stop.after is a number of calls; or "named": then the name of a trip says after which of the calls
// that are made for it.
async function returned(call, parameters) {
	const [request, after] = /completer killed after call (\d+)/.exec(JSON.stringify(parameters)) || [];
	calls.push(call);
	callsFor[request] = (callsFor[request] || 0) + 1;
	if (!stop || !(stop.after === 'named' ? callsFor[request] === Number(after) : calls.length === stop.after)) return;
	if (stop.how === 'killed') {
		say({ killing: request });
		process.kill(process.pid, 'SIGKILL');
	}
	if (stop.how === 'terminated') {
		const other = new Client({ options: '-c role=none' });
		await other.connect();
		await other.query('SELECT pg_terminate_backend($1, 60000)', [database.processID]);
		await other.end();
		return;
	}
	say({ paused: call });
	await new Promise((resolve) => process.stdin.once('data', resolve));
	process.stdin.unref();
}

function send(method, path, headers, body) {
	return new Promise((resolve, reject) => {
		const request = http.request({ socketPath: socket, method, path, headers, agent: false }, (response) => {
			const chunks = [];
			response.on('data', (chunk) => chunks.push(chunk));
			response.on('error', reject);
			response.on('end', () => resolve({ status: response.statusCode, body: JSON.parse(Buffer.concat(chunks)) }));
		});
		request.on('error', reject);
		request.setTimeout(60_000, () => request.destroy(new Error('no answer in time')));
		request.end(body && JSON.stringify(body));
	});
}

// Without a listener a session that is lost ends the process.
const database = new Client();
database.on('error', () => {});

async function main() {
	await database.connect();
	const seller = new trips[form]({
		lease,
		query: async (text, values) => {
			const { rows } = await database.query(text, values);
			await returned(/(idem_\w+|book\w*|begin_step)\(/.exec(text)[1], values);
			return rows;
		},
		send: async (method, path, ...rest) => {
			// For the baseline: a completer that does not ask
			if (blind && method === 'GET') return { status: 404 };
			const answer = await send(method, path, ...rest);
			await returned(`${method} ${path.split('/')[1]}`, [decodeURIComponent(path), ...rest]);
			return answer;
		},
	});
	try {
		const answer = await (buy ? seller.buy(...buy) : seller.completeLapsed(100));
		say({ ...answer, calls });
	} catch (error) {
		say({ error: error.code || error.constructor.name, message: error.message, calls });
	}
	await database.end();
}

main();
