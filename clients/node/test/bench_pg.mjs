// once beside the same transaction by hand, over the same driver: node test/bench.js [seconds] [rounds]
import { admin, drivers, newId, prepare, schema } from './server.js';

const seconds = Number(process.argv[2] ?? 3), rounds = Number(process.argv[3] ?? 5), clients = 8;
const claim = (user, id, json) => `SELECT outcome, result FROM ${schema}.idem_try_claim(${user}, ${id}, 'bench', ${schema}.idem_fingerprint(${json}::jsonb), '0')`;

const byHand = {
	async pg({ pool }, id) {
		const client = await pool.connect();
		try {
			await client.query('BEGIN');
			await client.query(claim('$1', '$2', '$3'), ['anna', id, '{"amount": 1}']);
			await client.query('INSERT INTO payments (reference, amount) VALUES ($1, $2)', [id, 1]);
			await client.query(`SELECT ${schema}.idem_complete($1::jsonb)`, ['{"paid": 1}']);
			await client.query('COMMIT');
		} finally { client.release(); }
	},
	postgres: ({ pool }, id) => pool.begin(async (tx) => {
		await tx.unsafe(claim('$1', '$2', '$3'), ['anna', id, { amount: 1 }], { prepare: true });
		await tx`INSERT INTO payments (reference, amount) VALUES (${id}, ${1})`;
		await tx.unsafe(`SELECT ${schema}.idem_complete($1::jsonb)`, [{ paid: 1 }], { prepare: true });
	}),
};
const once = (d, id) => d.idem.once({ user: 'anna', id, scope: 'bench', params: { amount: 1 } }, async (tx) => { await d.insert(tx, id, 1); return { paid: 1 }; });

async function rate(run) {
	const end = performance.now() + seconds * 1000;
	let n = 0;
	await Promise.all(Array.from({ length: clients }, async () => { for (; performance.now() < end; n++) await run(newId()); }));
	return n / seconds;
}

await prepare();
const median = (list) => list.sort((a, b) => a - b)[list.length >> 1];
for (const driver of ['postgres']) for (const commit of ['on']) {
	const d = drivers[driver]({ max: clients, [driver === 'pg' ? 'options' : 'connection']: driver === 'pg' ? `-c synchronous_commit=${commit}` : { synchronous_commit: commit } });
	const rates = { hand: [], once: [] };
	for (let round = 0; round <= rounds; round++) {
		for (const [name, run] of Object.entries({ hand: (id) => byHand[driver](d, id), once: (id) => once(d, id) })) {
			const r = await rate(run);
			if (round) rates[name].push(r);		// the first one warms up
		}
	}
	const ratios = rates.once.map((r, i) => r / rates.hand[i]);
	console.log(`${driver}, synchronous_commit ${commit}: by hand ${median([...rates.hand]).toFixed(0)}/s, once ${median([...rates.once]).toFixed(0)}/s, ratio ${median(ratios).toFixed(2)}`);
	await d.end();
}
await admin.end();
