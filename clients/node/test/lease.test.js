import assert from 'node:assert/strict';
import { after, before, describe, test } from 'node:test';
import { Failed, HandlerEndedTransaction, Idem, InProgress, LeaseLost, Mismatch, Refused } from 'idem-pg';
import { admin, drivers, newId, paid, prepare, schema, startProxy } from './server.js';

before(prepare);
after(() => admin.end());
const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

for (const driver of ['pg', 'postgres']) describe(driver, () => {
	const d = drivers[driver]();
	const lease = (id, work, more = {}) => d.idem.lease({ user: 'anna', id, scope: 'lease', lease: 2, ...more }, work);
	const key = (id) => ({ user: 'anna', id, scope: 'lease' });
	after(() => d.end());

	test('outlives its lease by its heartbeat, settles, replays', async () => {
		const id = newId();
		const work = async (l) => {
			await l.record({ step: 1 });
			await sleep(3500);
			l.check();
			assert.ok(l.remaining() > 0);
			await assert.rejects(lease(id, () => 1), InProgress);
			assert.equal(await l.transaction(async (tx) => { await d.insert(tx, id, 1); await l.record({ step: 2 }); return 'x'; }), 'x');
			assert.deepEqual((await d.idem.lookup(key(id))).progress, { step: 2 });
			return l.settle({ paid: 1 }, (tx) => d.insert(tx, id, 1));
		};
		assert.deepEqual(await lease(id, work, { params: { a: 1 } }), { value: { paid: 1 }, replayed: false, previous: null });
		assert.deepEqual(await lease(id, work, { params: { a: 1 } }), { value: { paid: 1 }, replayed: true, previous: null });
		await assert.rejects(lease(id, work, { params: { a: 2 } }), Mismatch);
		assert.equal(await paid(id), 2);
	});

	test('a return settles, Refused fails, nothingHappened releases, an error leaves it', async () => {
		assert.deepEqual((await lease(newId(), () => 7)).value, 7);
		let id = newId();
		for (const replayed of [false, true]) await assert.rejects(lease(id, () => { throw new Refused('no'); }), (e) => e instanceof Failed && e.stored === 'no' && e.replayed === replayed);
		id = newId();
		await assert.rejects(lease(id, async (l) => { await l.nothingHappened(); throw new Error('x'); }), /x/);
		assert.equal(await d.idem.status(key(id)), null);
		id = newId();
		await assert.rejects(lease(id, async (l) => { await l.record({ at: 3 }); throw new Error('x'); }, { lease: '300 ms' }), /x/);
		assert.equal(await d.idem.status(key(id)), 'in_progress');
		await sleep(400);
		assert.ok((await d.idem.lapsed('lease', null)).some((row) => row.id === id && row.progress.at === 3));
		assert.deepEqual(await lease(id, (l) => l.previous), { value: { at: 3 }, replayed: false, previous: { at: 3 } });
	});

	test('a signal ends the attempts to claim, and not the work', async () => {
		const id = newId(), gone = new AbortController();
		const work = async (l) => { gone.abort(); await l.record({ charged: 1 }); await l.transaction((tx) => d.insert(tx, id, 1)); return 7; };
		assert.equal((await lease(id, work, { signal: gone.signal })).value, 7);
		assert.equal(await paid(id), 1);
	});

	test('a holder that was replaced writes nothing', async () => {
		const id = newId();
		const first = lease(id, async (l) => {
			await admin.query(`UPDATE ${schema}.idem_claims SET lease_until = now() - interval '1 s' WHERE request_id = $1`, [id]);
			assert.equal((await lease(id, (l2) => l2.settle(2, (tx) => d.insert(tx, id, 2)))).value, 2);
			await assert.rejects(l.transaction((tx) => d.insert(tx, id, 1)), LeaseLost);
			assert.ok(l.signal.aborted);
			await assert.rejects(l.record(1), LeaseLost);
			return l.settle(1, (tx) => d.insert(tx, id, 1));
		});
		await assert.rejects(first, (e) => e instanceof LeaseLost && e.sqlstate === 'ID410');
		assert.equal(await paid(id), 1);
	});

	test('the signal ends in time, when the heartbeat is cut and after a pause', async () => {
		const proxy = await startProxy();
		const p = drivers[driver]({ host: '127.0.0.1', port: proxy.port });
		const id = newId();
		const began = performance.now();
		await p.idem.lease({ user: 'anna', id, scope: 'lease', lease: 2 }, async (l) => {
			proxy.onMessage = () => 'before';
			await new Promise((resolve) => l.signal.addEventListener('abort', resolve));
			assert.ok(performance.now() - began < 2000, 'too late');
			assert.throws(() => l.check(), LeaseLost);
			throw new Error('stopped');
		}).catch((e) => assert.equal(e.message, 'stopped'));
		await p.end();
		proxy.close();
		await assert.rejects(lease(newId(), (l) => {
			for (const until = performance.now() + 600; performance.now() < until;);		// a pause of the process
			l.check();
		}, { lease: 0.5 }), LeaseLost);
	});

	test('lost at each message: one settlement', async () => {
		const proxy = await startProxy();
		const p = drivers[driver]({ host: '127.0.0.1', port: proxy.port, prepare: false });
		const seen = [];
		for (const [what, when] of [['idem_lease', 'before'], ['idem_lease', 'after'], ['SELECT 1; COMMIT|SELECT 1\\0', 'after'], ['idem_fence', 'after'], ['idem_complete', 'before'], ['idem_complete', 'after'], ['idem_extend', 'after']]) {
			const id = newId();
			let n = 0, works = 0;
			proxy.onMessage = (text) => new RegExp(what).test(text) && ++n === 1 ? when : null;
			const { value } = await p.idem.lease({ user: 'anna', id, scope: 'lease', lease: 3, wait: 5 }, async (l) => {
				works++;
				await l.transaction((tx) => p.insert(tx, id, 1));
				return l.settle('ok', (tx) => p.insert(tx, id, 2));
			});
			seen.push([what, when, value, works, await paid(id)].join());
		}
		await p.end();
		proxy.close();
		assert.deepEqual(seen.filter((line) => !/,ok,1,2$/.test(line)), []);
	});

	test('a terminated connection in the fence, and a handler that commits there', async () => {
		const id = newId();
		let runs = 0;
		await lease(id, (l) => l.settle(1, async (tx) => {
			await d.insert(tx, id, 1);
			if (++runs > 1) return;
			const [{ pid }] = await d.sql(tx, 'SELECT pg_backend_pid() AS pid');
			await admin.query('SELECT pg_terminate_backend($1)', [pid]);
			await sleep(200);
		}));
		assert.deepEqual([runs, await paid(id)], [2, 1]);
		await assert.rejects(lease(newId(), (l) => l.settle(1, (tx) => d.sql(tx, 'ROLLBACK'))), HandlerEndedTransaction);
	});

	test('a transaction whose number is used again after a crash, and commits then', async () => {
		const p = drivers[driver]();
		const [{ xid }] = (await admin.query('SELECT pg_current_xact_id()::text AS xid')).rows;
		const { connect } = p.idem.driver;
		let lose = false;
		p.idem.driver.connect = async () => {
			const connection = await connect.call(p.idem.driver);
			return Object.create(connection, { run: { value: async (sql, values) => {
				sql = sql.replace("'xid', pg_catalog.pg_current_xact_id()::pg_catalog.text", `'xid', '${xid}'`).replace(/WHEN pg_catalog.pg_current_xact_id\(\) OPERATOR\(pg_catalog.=\) '\d+'::pg_catalog.xid8/, 'WHEN true');
				if (!lose || !/; COMMIT$/.test(sql)) return connection.run(sql, values);
				lose = false;
				await connection.run('ROLLBACK');
				throw Object.assign(new Error('made up'), { code: '08006' });
			} } });
		};
		for (const how of ['transaction', 'settle']) {
			const id = newId();
			await p.idem.lease({ user: 'anna', id, scope: 'lease' }, (l) => {
				lose = true;
				const work = async (tx) => { await p.insert(tx, id, 1); };
				return how === 'settle' ? l.settle(1, work) : l.transaction(work);
			});
			assert.equal(await paid(id), 1, how);
		}
		await p.end();
	});

	test('the heartbeat does not wait for its own fence, also in a pool of one', async () => {
		const p = drivers[driver]({ max: 1 });
		const began = performance.now();
		const { value } = await p.idem.lease({ user: 'anna', id: newId(), scope: 'lease', lease: 1 }, async (l) => {
			await l.transaction((tx) => p.sql(tx, 'SELECT pg_sleep(1.5)'));
			l.check();
			return 1;
		});
		assert.equal(value, 1);
		assert.ok(performance.now() - began < 10_000);
		await p.end();
	});

	// The heartbeat's calls of idem_extend go to `beat`.
	const beating = (beat) => {
		const idem = new Idem(d.pool, { schema });
		const { query } = idem.driver;
		idem.driver.query = (sql) => /_extend"?\(/.test(sql) && / NULL, 'lease'\)/.test(sql) ? beat(() => query(sql)) : query(sql);
		return (id, seconds, work) => idem.lease({ user: 'anna', id, scope: 'lease', lease: seconds }, work);
	};

	test('no heartbeat after the end, though one has failed while the work recorded', async () => {
		let beats = 0, l;
		const work = beating(async (query) => {
			if (++beats > 1) return query();
			setImmediate(() => l.record('x').catch(() => {}));
			throw Object.assign(new Error('x'), { code: 'ECONNRESET' });
		});
		await assert.rejects(work(newId(), 0.9, async (given) => { l = given; await sleep(450); throw new Error('bug'); }), /bug/);
		const before = beats;
		assert.ok(before >= 1);
		await sleep(600);
		assert.equal(beats, before);
	});

	test('a heartbeat that is never answered does not keep who was told to stop', async () => {
		const began = performance.now();
		await assert.rejects(beating(() => new Promise(() => {}))(newId(), 1, async (l) => {
			await new Promise((resolve) => l.signal.addEventListener('abort', resolve));
			l.check();
		}), LeaseLost);
		assert.ok(performance.now() - began < 1500);
	});

	test('it is not given up within its own transaction', async () => {
		await lease(newId(), async (l) => {
			await assert.rejects(l.transaction(() => l.nothingHappened()), /in a transaction, which holds the request/);
			await l.nothingHappened();
		});
	});
});
