// examples/6_completer as a service: POST /pay {"id"} buys a trip. SOCKET is that of its provider.
const http = require('http');
const path = require('path');
const modules = path.join(__dirname, '../../clients/node/node_modules');
const { Pool } = require(require.resolve('pg', { paths: [modules, __dirname] }));
const { Trips, Unclear } = require('../../examples/6_completer/trips.js');

const pool = new Pool({ max: 4 });
pool.on('error', () => {});

function send(method, path, headers, body) {
	return new Promise((resolve, reject) => {
		const request = http.request({ socketPath: process.env.SOCKET, method, path, headers, agent: false }, async (response) => {
			let text = '';
			for await (const chunk of response) text += chunk;
			resolve({ status: response.statusCode, body: JSON.parse(text) });
		});
		request.on('error', reject).end(body && JSON.stringify(body));
	});
}

const trips = new Trips({ lease: '600 ms', send, query: (text, values) => pool.query(text, values).then(({ rows }) => rows) });

async function buy(id) {
	try {
		const { outcome, result } = await trips.buy('ann', id, { amount: 30, to: 'Rome' });
		return outcome === 'completed' ? [201, result] : [409, {}];
	} catch (error) {
		return [error instanceof Unclear || error.code !== 'ID410' ? 503 : 409, { error: error.message }];
	}
}

http.createServer(async (request, response) => {
	let text = '';
	for await (const chunk of request) text += chunk;
	const [status, body] = request.method === 'POST' ? await buy(JSON.parse(text).id) : [200, {}];
	response.writeHead(status).end(JSON.stringify(body, Object.keys(body).sort()));    // a stored result has its keys in jsonb's order
}).listen(Number(process.env.PORT), '127.0.0.1');
