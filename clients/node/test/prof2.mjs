import { admin, drivers, newId, prepare, schema } from './server.js';
import fs from 'node:fs';
const rounds = Number(process.argv[2] ?? 12), slice = Number(process.argv[3] ?? 500);
const claim = (user, id, json) => `SELECT outcome, result FROM ${schema}.idem_try_claim(${user}, ${id}, 'bench', ${schema}.idem_fingerprint(${json}::jsonb), '0')`;
const hand = ({ pool }, id) => pool.begin(async (tx) => {
		await tx.unsafe(claim('$1', '$2', '$3'), ['anna', id, { amount: 1 }], { prepare: true });
		await tx`INSERT INTO payments (reference, amount) VALUES (${id}, ${1})`;
		await tx.unsafe(`SELECT ${schema}.idem_complete($1::jsonb)`, [{ paid: 1 }], { prepare: true });
	});
const once = (d, id) => d.idem.once({ user: 'anna', id, scope: 'bench', params: { amount: 1 } }, async (tx) => { await d.insert(tx, id, 1); return { paid: 1 }; });
await prepare();
const d = drivers.postgres({ max: 8 });
const pids = async () => (await admin.query("select pid from pg_stat_activity where application_name = 'postgres.js'")).rows.map(r => r.pid);
const server = (list) => { let t = 0; for (const p of list) { const f = fs.readFileSync(`/proc/${p}/stat`, 'utf8').split(' '); t += Number(f[13]) + Number(f[14]); } return t * 10000; };
const acc = { hand: [], once: [] };
for (let r = 0; r <= rounds; r++) for (const [w, run] of Object.entries({ hand, once })) {
	const list = await pids(); const s0 = server(list), c0 = process.cpuUsage(), t0 = performance.now(), end = t0 + slice; let n = 0;
	await Promise.all(Array.from({ length: 8 }, async () => { for (; performance.now() < end; n++) await run(d, newId()); }));
	const el = performance.now() - t0, c = process.cpuUsage(c0), s = server(list) - s0;
	if (r) acc[w].push([n / el * 1000, (c.user + c.system) / n, s / n]);
}
const med = (l) => [...l].sort((a, b) => a - b)[l.length >> 1];
for (const w of ['hand', 'once']) console.log(w, ...[0, 1, 2].map((i) => med(acc[w].map((x) => x[i])).toFixed(0)));
console.log('ratios rate', med(acc.once.map((x, i) => x[0] / acc.hand[i][0])).toFixed(3), 'node cpu', med(acc.once.map((x, i) => x[1] / acc.hand[i][1])).toFixed(3), 'server cpu', med(acc.once.map((x, i) => x[2] / acc.hand[i][2])).toFixed(3));
await d.end(); await admin.end();
