// examples/6_completer as a service: POST /pay {"id"} sells a trip. PROVIDER is the URL of its provider.
import http from 'node:http';
import { createRequire } from 'node:module';
import { providerAt, sell } from '../../examples/6_completer/trips.mjs';

const require = createRequire(new URL('../../examples/6_completer/trips.mjs', import.meta.url));
const { Pool } = require('pg');
const { Idem } = require('idem-pg');
const idem = new Idem(new Pool({ max: 4 }));
const provider = providerAt(process.env.PROVIDER);

async function buy(id) {
	try {
		const { value } = await sell(idem, provider, { user: 'ann', id }, { amount: 30, to: 'Rome' }, { lease: '600 ms', longest: 500 });
		return [201, value];
	} catch (error) {
		return [error.status ?? 503, { error: error.message }];
	}
}

http.createServer(async (request, response) => {
	let text = '';
	for await (const chunk of request) text += chunk;
	const [status, body] = request.method === 'POST' ? await buy(JSON.parse(text).id) : [200, {}];
	response.writeHead(status).end(JSON.stringify(body));
}).listen(Number(process.env.PORT), '127.0.0.1');
