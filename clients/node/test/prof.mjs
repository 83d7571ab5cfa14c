import { admin, drivers, newId, prepare, schema } from './server.js';
const [,, which, secs] = process.argv;
const claim = (user, id, json) => `SELECT outcome, result FROM ${schema}.idem_try_claim(${user}, ${id}, 'bench', ${schema}.idem_fingerprint(${json}::jsonb), '0')`;
const hand = ({ pool }, id) => pool.begin(async (tx) => {
		await tx.unsafe(claim('$1', '$2', '$3'), ['anna', id, { amount: 1 }], { prepare: true });
		await tx`INSERT INTO payments (reference, amount) VALUES (${id}, ${1})`;
		await tx.unsafe(`SELECT ${schema}.idem_complete($1::jsonb)`, [{ paid: 1 }], { prepare: true });
	});
const once = (d, id) => d.idem.once({ user: 'anna', id, scope: 'bench', params: { amount: 1 } }, async (tx) => { await d.insert(tx, id, 1); return { paid: 1 }; });
await prepare();
const d = drivers.postgres({ max: 8 });
const run = which === 'hand' ? hand : once;
const end = performance.now() + secs * 1000; let n = 0;
const c0 = process.cpuUsage();
await Promise.all(Array.from({ length: 8 }, async () => { for (; performance.now() < end; n++) await run(d, newId()); }));
const c = process.cpuUsage(c0);
const be = (await admin.query("select pid from pg_stat_activity where application_name = 'postgres.js'")).rows.map(r => r.pid);
import fs from 'node:fs';
let t = 0; for (const p of be) { const f = fs.readFileSync(`/proc/${p}/stat`, 'utf8').split(' '); t += Number(f[13]) + Number(f[14]); }
console.log(which, (n / secs).toFixed(0) + '/s', 'node us/tx', ((c.user + c.system) / n).toFixed(0), 'user', (c.user/n).toFixed(0), 'server us/tx', (t * 10000 / n).toFixed(0));
await d.end(); await admin.end();
