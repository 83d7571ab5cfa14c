// Executes each HTTP request with an Idempotency-Key once (draft-ietf-httpapi-idempotency-key-header),
// in the transaction that claims its key and stores its response.
//
// To copy: the part "the guard". The routes stand for yours.
//
//	node server.js SOCKET		the database is that of PGHOST, PGDATABASE, ...
//
// A request, after INSERT INTO accounts VALUES ('ann', 100), ('bob', 0):
//
//	curl --unix-socket SOCKET --include --compressed http://localhost/payments \
//		--header 'Authorization: Bearer ann' --header 'Idempotency-Key: "1"' \
//		--data '{"payee": "bob", "amount": 1, "reference": "rent"}'
//
// Needs pg: npm install pg, or Debian's package node-pg.
'use strict';

const fs = require('fs');
const http = require('http');
const zlib = require('zlib');
const { Pool } = require('pg');

// If this process dies, a session of it that waits for a lock ends within a second, and its key is
// free again.
const pool = new Pool({ options: '-c client_connection_check_interval=1s' });
// Without these two listeners a connection that is lost ends the process, in use or idle.
pool.on('connect', (client) => client.on('error', (error) => console.error(error.message)));
pool.on('error', () => {});

// ----- a handler of yours: it works in the transaction and returns a response -----

const routes = {
	'POST /payments': async (database, user, { payee, amount, reference }) => {
		const { rows: [{ id }] } = await database.query('SELECT pay($1, $2, $3, $4) AS id', [user, payee, amount, reference]);
		if (id === null) {
			return { status: 402, headers: { 'Content-Type': 'text/plain' }, body: Buffer.from('insufficient funds\n') };
		}
		return {
			status: 201,
			headers: { 'Location': `/payments/${id}`, 'Content-Type': 'application/json', 'Content-Encoding': 'gzip' },
			body: zlib.gzipSync(JSON.stringify({ id, payer: user, payee, amount })),
		};
	},
};

// Replace this by yours. Here the token is the name of the user.
function authenticate(request) {
	return (/^Bearer (\w+)$/.exec(request.headers.authorization) || [])[1];
}

// ----- the guard -----

// For each outcome without a response of the handler: the status, what the client should do, and
// whether that is to send the same request again later.
const problems = {
	in_progress: [409, 'this request is being executed: send it again later', true],
	timed_out: [503, 'this request is still being executed: send it again later', true],
	unknown: [409, 'nobody knows whether this request was executed: ask the operator', false],
	mismatch: [422, 'this Idempotency-Key was used with another body: a new payment needs a new key', false],
	stale: [412, 'this Idempotency-Key is too old: find out whether the payment was made before you use a new key', false],
};

function problem(status, title, again) {
	return {
		status,
		headers: { 'Content-Type': 'application/problem+json', ...(again ? { 'Retry-After': '1' } : {}) },
		body: Buffer.from(JSON.stringify({ status, title })),
	};
}

// The body can be any bytes, but jsonb cannot store a NUL: hence base64.
function pack({ status, headers, body }) {
	return JSON.stringify({ status, headers, body: body.toString('base64') });
}

function unpack({ status, headers, body }) {
	return { status, headers: { ...headers, 'Idempotent-Replayed': 'true' }, body: Buffer.from(body, 'base64') };
}

// The draft wants a string of structured fields (RFC 8941), "..."; most clients send the key bare.
function keyOf(request) {
	const header = request.headers['idempotency-key'] || '';
	const string = /^"((?:[ !#-[\]-~]|\\["\\])+)"$/.exec(header);
	return string ? string[1].replace(/\\(.)/g, '$1') : /^[!#-[\]-~]+$/.test(header) && header;
}

// "Prefer: wait=10" waits so many seconds for another request with this key; the default is 0.
function waitOf(request) {
	return `${(/^wait=(\d{1,2})$/.exec(request.headers.prefer) || [0, 0])[1]} s`;
}

async function executeOnce(database, { user, key, scope, body, wait }, handler) {
	await database.query('BEGIN');
	const { rows: [{ outcome, result }] } = await database.query(
		'SELECT outcome, result FROM idem_try_claim($1, $2, $3, idem_fingerprint($4::jsonb), $5)', [user, key, scope, body, wait]);
	if (outcome !== 'claimed') {
		await database.query('ROLLBACK');
		if (outcome === 'completed' || outcome === 'failed') {
			return unpack(result || { status: 200, headers: {}, body: '' });
		}
		return problem(...problems[outcome]);
	}
	const response = await handler(database);
	// A response that refuses the request is final, too.
	await database.query(response.status < 400 ? 'SELECT idem_complete($1)' : 'SELECT idem_fail($1)', [pack(response)]);
	await database.query('COMMIT');
	return response;
}

async function answer(request, body) {
	const scope = `${request.method} ${request.url}`;
	const user = authenticate(request);
	const key = keyOf(request);
	if (!routes[scope]) return problem(404, 'not found');
	if (!user) return problem(401, 'who are you?');
	if (!key) return problem(400, 'Idempotency-Key is missing or malformed: send "KEY", of printable ASCII characters');

	let parameters, database, broken;
	try {
		parameters = JSON.parse(body);
	} catch (error) {
		return problem(400, error.message);
	}
	try {
		database = await pool.connect();
		// As jsonb, so that spaces and the order of keys make no other request
		return await executeOnce(database, { user, key, scope, body: String(body), wait: waitOf(request) },
			(transaction) => routes[scope](transaction, user, parameters));
	} catch (error) {
		// Roll back before answering, so that the key is free when the client sends the
		// request again. If the session is lost the server rolls back, unless COMMIT has
		// arrived. In both cases the client can send the same request again.
		broken = database && await database.query('ROLLBACK').then(() => false, () => true);
		// A malformed key: the message says how
		if (error.code === 'ID400') return problem(400, error.message);
		console.error(error);
		// Data that the tables do not accept: the message would name a constraint.
		if (/^2[23]...$/.test(error.code)) return problem(400, 'the body has a value that is not accepted: correct it');
		// No connection, or conflicts, lack of resources, cancels and shutdowns
		if (!database || broken || /^(40|53|55P03|57)/.test(error.code)) return problem(503, 'try again', true);
		// A bug, or a response that is too large to be stored: a retry would fail as well.
		return problem(500, 'internal error');
	} finally {
		if (database) database.release(broken);
	}
}

const server = http.createServer(async (request, response) => {
	const chunks = [];
	try {
		for await (const chunk of request) chunks.push(chunk);
	} catch {
		return;		// the client is gone
	}
	const { status, headers, body } = await answer(request, Buffer.concat(chunks));
	response.writeHead(status, headers).end(body);
});

const socket = process.argv[2];
if (!socket) {
	console.error('usage: node server.js SOCKET');
	process.exit(2);
}
fs.rmSync(socket, { force: true });
server.listen(socket, () => console.log('listening'));
