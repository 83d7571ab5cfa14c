// A process of the driver: sells one trip, or runs one round of the completer. When it has reached the point "stop.at",
// of the trip "stop.id" if that is given, it kills itself, pauses, or terminates its sessions.
//
//	node worker.mjs {"url", "options", "buy": [id, order], "stop": {"at", "how", "id"}}
import fs from 'node:fs';
import pg from 'pg';
import { Idem } from 'idem-pg';
import { completeLapsed, providerAt, sell } from './trips.mjs';

const { url, options, buy, stop } = JSON.parse(process.argv[2]);
const say = (message) => fs.writeSync(1, JSON.stringify(message) + '\n');
const name = `worker ${process.pid}`;
const pool = new pg.Pool({ application_name: name });
const idem = new Idem(pool);
const points = [];

async function reached(point, id) {
	points.push(point);
	if (stop?.at !== point || (stop.id && stop.id !== id)) return;
	say({ at: point });
	if (stop.how === 'killed') process.kill(process.pid, 'SIGKILL');
	if (stop.how === 'paused') process.kill(process.pid, 'SIGSTOP');
	if (stop.how === 'terminated') {
		const other = new pg.Client({ options: '-c role=none' });
		await other.connect();
		await other.query('SELECT pg_terminate_backend(pid, 60000) FROM pg_stat_activity WHERE application_name = $1', [name]);
		await other.end();
	}
}

// Calls the function, and then says that the point is reached
const then = (point, id, call) => async (...parameters) => {
	const result = await call(...parameters);
	await reached(typeof point === 'string' ? point : point(...parameters), id);
	return result;
};
const { lapsed, lease } = idem;
idem.lapsed = async (scope) => (await lapsed.call(idem, scope)).filter(({ id }) => !stop || stop.id === id);
idem.lease = (request, work) => lease.call(idem, request, async (l) => {
	await reached('claimed', request.id);
	l.record = then((progress) => progress.charge ? 'recorded' : 'begun', request.id, l.record.bind(l));
	l.settle = then('settled', request.id, l.settle.bind(l));
	return work(l);
});
const { charge, find } = providerAt(url);
const provider = { charge: (reference, ...more) => then('charged', reference.replace('ann/', ''), charge)(reference, ...more), find };

try {
	const result = await (buy ? sell(idem, provider, { user: 'ann', id: buy[0] }, buy[1], options) : completeLapsed(idem, provider, options));
	say({ value: result?.value, replayed: result?.replayed, points });
} catch (error) {
	say({ error: error.name, stored: error.stored });
}
await pool.end();
