import assert from 'node:assert/strict';
import net from 'node:net';
import { after, before, describe, test } from 'node:test';
import * as idempg from 'idem-pg';
import { admin, drivers, newId, paid, prepare, schema, serverAddress, startProxy } from './server.js';

const { Idem, Refused, Failed, Mismatch, InProgress, TimedOut, Invalid, HandlerEndedTransaction, HandlerSwallowedError, CommitUnknown, NotInstalled, NoRights, TooLarge } = idempg;

before(prepare);
after(() => admin.end());

for (const [driver, options] of [['pg'], ['postgres'], ['postgres', { prepare: false }]]) describe(`${driver} ${JSON.stringify(options ?? {})}`, () => {
	const d = drivers[driver](options);
	const { idem, insert, sql } = d;
	const once = (id, handler, more = {}) => idem.once({ user: 'anna', id, scope: 'pay', ...more }, handler);
	after(() => d.end());

	test('executes once, and replays', async () => {
		const id = newId();
		const handler = async (tx) => { await insert(tx, id, 30); return { paid: 30, z: 'ü \\ \' $1 ?', a: [1.5, null] }; };
		const first = await once(id, handler, { params: { amount: 30 } });
		assert.equal(first.replayed, false);
		assert.ok(first.expiresAt > new Date());
		const second = await once(id, handler, { params: { amount: 30 } });
		assert.equal(second.replayed, true);
		assert.deepEqual(second.value, first.value);
		assert.equal(await paid(id), 1);
		await assert.rejects(once(id, handler, { params: { amount: 31 } }), (e) => e instanceof Mismatch && e.status === 422 && !e.retryable);
		assert.equal(await idem.status({ user: 'anna', id, scope: 'pay' }), 'completed');
		const stored = await idem.lookup({ user: 'anna', id, scope: 'pay' });
		assert.deepEqual(stored.result, first.value);
		assert.match(stored.fingerprint, /^[0-9a-f]{64}$/);
		assert.equal(await idem.forget({ user: 'anna', id, scope: 'pay' }), true);
		assert.equal(await idem.forget({ user: 'anna', id, scope: 'pay' }), false);
		assert.equal(await idem.lookup({ user: 'anna', id, scope: 'pay' }), null);
		assert.equal(await idem.status({ user: 'anna', id, scope: 'pay' }), null);
	});

	test('20 at once: one executes', async () => {
		const id = newId();
		const answers = await Promise.all(Array.from({ length: 20 }, () => once(id, async (tx) => { await insert(tx, id, 1); return 7; }, { wait: 5 })));
		assert.equal(answers.filter((a) => !a.replayed).length, 1);
		assert.ok(answers.every((a) => a.value === 7));
		assert.equal(await paid(id), 1);
	});

	test('in progress, and timed out', async () => {
		const id = newId();
		let go;
		const holds = new Promise((resolve) => { go = resolve; });
		let began;
		const begun = new Promise((resolve) => { began = resolve; });
		const first = once(id, async () => { began(); await holds; return 1; });
		await begun;
		await assert.rejects(once(id, () => 2), (e) => e instanceof InProgress && e.retryable && e.retryAfter === 1 && e.outcome === 'in_progress');
		await assert.rejects(once(id, () => 2, { wait: '50 ms' }), TimedOut);
		go();
		assert.equal((await first).value, 1);
	});

	test('an error of the handler rolls back, and passes unchanged', async () => {
		const id = newId();
		const bug = new Error('bug');
		let runs = 0;
		await assert.rejects(once(id, async (tx) => { runs++; await insert(tx, id, 1); throw bug; }), (e) => e === bug);
		const socket = Object.assign(new Error('fetch failed'), { cause: Object.assign(new Error('x'), { code: 'ECONNREFUSED' }) });
		await assert.rejects(once(id, () => { runs++; throw socket; }), (e) => e === socket);
		assert.equal(runs, 2);
		assert.equal(await paid(id), 0);
		assert.equal(await idem.status({ user: 'anna', id, scope: 'pay' }), null);
	});

	test('refused', async () => {
		const id = newId();
		const refuse = () => once(id, async (tx) => { await insert(tx, id, 1); throw new Refused({ declined: true }); });
		await assert.rejects(refuse(), (e) => e instanceof Failed && !e.replayed && e.stored.declined === true);
		await assert.rejects(refuse(), (e) => e instanceof Failed && e.replayed && e.stored.declined === true);
		assert.equal(await paid(id), 1);
	});

	test('conflicts are repeated, also wrapped ones', async () => {
		for (const wrap of [false, true]) {
			const id = newId();
			let runs = 0;
			const { value } = await once(id, async (tx) => {
				await insert(tx, id, 1);
				try {
					if (++runs < 3) await sql(tx, `DO $$ BEGIN RAISE SQLSTATE '40001'; END $$`);
				} catch (error) { throw wrap ? new Error('query failed', { cause: error }) : error; }
				return runs;
			});
			assert.equal(value, 3);
			assert.equal(await paid(id), 1);
		}
		const id = newId();
		let runs = 0;
		await assert.rejects(once(id, async (tx) => { runs++; await sql(tx, `DO $$ BEGIN RAISE SQLSTATE '40P01'; END $$`); }, { attempts: 2 }), (e) => e.code === '40P01');
		assert.equal(runs, 2);
	});

	test('a swallowed error, a handler that commits, values that JSON cannot hold', async () => {
		const id = newId();
		await assert.rejects(once(id, async (tx) => { await insert(tx, id, 1); await sql(tx, 'SELECT 1/0').catch(() => {}); }),
			(e) => e instanceof HandlerSwallowedError && e.outcome === 'handler_swallowed_error' && e.name === 'HandlerSwallowedError');
		for (const [value, what] of [[NaN, /value is NaN/], [{ a: [1, 2n] }, /value\.a\[1\] is a BigInt/], [{ d: new Date() }, /value\.d is a Date/], [[undefined], /value\[0\] is undefined/],
			[new Map(), /a Map/], [{ x: Buffer.from('a') }, /value\.x is a Buffer/], [{ p: Promise.resolve() }, /a Promise/], ['\0', /NUL/], [{ s: '\ud800' }, /surrogate/]]) {
			await assert.rejects(once(id, async (tx) => { await insert(tx, id, 1); return value; }), (e) => e instanceof TypeError && what.test(e.message), String(what));
		}
		assert.equal(await paid(id), 0);
		assert.deepEqual((await once(id, () => ({ a: undefined, b: 1 }))).value, { b: 1 });
		assert.equal((await once(newId(), () => {})).value, null);
		for (const text of ['COMMIT', 'ROLLBACK', 'COMMIT; BEGIN']) await assert.rejects(once(newId(), async (tx) => { await sql(tx, text); return 1; }),
			(e) => e instanceof HandlerEndedTransaction && e.outcome === 'handler_ended_transaction', text);
		await assert.rejects(once(newId(), () => 'x'.repeat(2_000_000)), (e) => e instanceof TooLarge && e.outcome === 'too_large'
			&& e.message.includes(`raise result_max_bytes of the scope in "${schema}".idem_scopes`));
	});

	test('bad arguments', async () => {
		for (const request of [{ user: '' }, { user: 'ü'.repeat(128) }, { user: 'a\0b' }, { user: undefined }, { user: NaN }, { user: 2 ** 53 }, { params: { a: 'x\0' } }, { params: { a: 1n } }]) {
			await assert.rejects(once(newId(), () => 1, request), (e) => e instanceof Invalid && e.status === 400, JSON.stringify(request.user));
		}
		await assert.rejects(once(newId(), () => 1, { wait: -1 }), Invalid);
		await assert.rejects(new Idem(d.pool, { schema: 'nowhere' }).once({ user: 'a', id: '1' }, () => 1), (e) => e instanceof NotInstalled && /npx idem-pg install/.test(e.message));
		assert.equal((await once(7, () => 1, { user: newId() })).value, 1);
		for (const [name, call] of [['parms', (o) => once(newId(), () => 1, o)], ['progress', (o) => once(newId(), () => 1, o)],
			['isolation', (o) => idem.lease({ user: 'a', id: newId(), ...o }, () => 1)], ['params', (o) => idem.call({ user: 'a', id: newId(), ...o }, 'pay(text, int)')],
			['attempts', (o) => d.pool.begin ? d.pool.begin((tx) => idem.within(tx, { user: 'a', id: newId(), ...o }, () => 1)) : idem.within(d.pool, { user: 'a', id: newId(), ...o }, () => 1)],
			['requird', async (o) => idem.http({ user: () => 'a', ...o }, () => 1)], ['skema', async (o) => new Idem(d.pool, o)]]) {
			await assert.rejects(call({ [name]: 1 }), (e) => e instanceof Invalid && e.message.includes(`has no option "${name}"`), name);
		}
		await assert.rejects(once(newId(), () => 1, { signal: AbortSignal.abort(new Error('gone')) }), /gone/);
	});

	test('call', async () => {
		const id = newId();
		const request = { user: 'anna', id, scope: 'call' };
		assert.deepEqual(await idem.call(request, 'pay(text, int)', { reference: id, amount: 30 }), { value: { paid: 30 }, replayed: false });
		assert.deepEqual(await idem.call(request, 'pay(text, int)', { reference: id, amount: 30 }), { value: { paid: 30 }, replayed: true });
		await assert.rejects(idem.call(request, 'pay(text, int)', { reference: id, amount: 31 }), Mismatch);
		const refused = { user: 'anna', id: newId(), scope: 'call' };
		for (const replayed of [false, true]) {
			await assert.rejects(idem.call(refused, 'pay(text, int)', { reference: 'r', amount: 402 }), (e) => e instanceof Failed && e.replayed === replayed && e.stored.declined === true);
		}
		assert.equal(await paid(id), 1);
		// The function meets another request, which has failed.
		await admin.query(`CREATE OR REPLACE FUNCTION meet(id text) RETURNS boolean LANGUAGE sql AS $$ SELECT ${schema}.idem_claim('anna', id, 'call') $$`);
		await assert.rejects(idem.call({ ...request, id: newId() }, 'meet(text)', { id: refused.id }), (e) => !(e instanceof Failed) && e.code === 'ID417');
	});

	test('a terminated connection, at each step', async () => {
		const kill = async (tx) => {
			const [{ pid }] = await sql(tx, 'SELECT pg_backend_pid() AS pid');
			await admin.query('SELECT pg_terminate_backend($1)', [pid]);
			await new Promise((resolve) => setTimeout(resolve, 100));
		};
		const steps = {
			before: async (tx, id) => { await kill(tx); await insert(tx, id, 1); },
			after: async (tx, id) => { await insert(tx, id, 1); await kill(tx); },
			during: async (tx, id) => {
				await insert(tx, id, 1);
				const [{ pid }] = await sql(tx, 'SELECT pg_backend_pid() AS pid');
				setTimeout(() => admin.query('SELECT pg_terminate_backend($1)', [pid]), 50);
				await sql(tx, 'SELECT pg_sleep(5)');
			},
			swallowed: async (tx, id) => { await kill(tx); try { await insert(tx, id, 1); } catch { /* its bug */ } },
		};
		for (const [name, step] of Object.entries(steps)) {
			const id = newId();
			let runs = 0;
			const { value, replayed } = await once(id, async (tx) => { if (++runs === 1) await step(tx, id); else await insert(tx, id, 1); return runs; });
			assert.deepEqual([name, value, replayed, await paid(id)], [name, 2, false, 1]);
		}
	});

	// With prepare, a new connection each time: postgres.js prepares at the first use of a statement.
	for (const prepare of driver === 'postgres' ? [false, true] : [undefined]) test(`the connection is cut before and after each message${prepare ? ', prepared' : ''}`, async () => {
		const proxy = await startProxy();
		const outcomes = [];
		try {
			for (const when of ['before', 'after']) for (let at = 1; at <= 3; at++) {
				const p = drivers[driver]({ host: '127.0.0.1', port: proxy.port, max: 1, prepare });
				const id = newId();
				let n = 0;
				proxy.onMessage = (text) => /idem_try_claim|INSERT|idem_complete/.test(text) && ++n === at ? when : null;
				const { value, replayed } = await p.idem.once({ user: 'anna', id, scope: 'pay' }, async (tx) => { await p.insert(tx, id, 1); return 5; });
				proxy.onMessage = () => null;
				outcomes.push([when, at, value, replayed, await paid(id)]);
				await p.end();
			}
		} finally { proxy.close(); }
		assert.deepEqual(outcomes, [['before', 1, 5, false, 1], ['before', 2, 5, false, 1], ['before', 3, 5, false, 1],
			['after', 1, 5, false, 1], ['after', 2, 5, false, 1], ['after', 3, 5, !prepare, 1]]);
	});

	// postgres.js never answers it, and would take the answers of its next connection for it.
	if (driver === 'postgres') for (const known of [false, true]) test(`a query between the error of the socket and its end, ${known ? 'later' : 'first'} use of a connection`, async () => {
		let socket;
		const p = drivers.postgres({ ...options, max: 1, socket: () => new Promise((resolve, reject) => {
			socket = net.connect(serverAddress()).once('connect', () => resolve(socket)).once('error', reject);
		}) });
		try {
			if (known) await p.idem.once({ user: 'anna', id: newId() }, () => 1);
			const id = newId();
			let runs = 0, between;
			const { value } = await p.idem.once({ user: 'anna', id, scope: 'pay' }, async (tx) => {
				if (++runs > 1) return (await tx`SELECT 42 AS n`)[0].n;
				await insert(tx, id, 1);
				const ended = new Promise((resolve) => socket.once('error', () => { between = tx`SELECT 41 AS n`.then(() => 'answered', (error) => error.code); resolve(between); }));
				socket.destroy(Object.assign(new Error('read ECONNRESET'), { code: 'ECONNRESET' }));
				await ended;
			});
			assert.deepEqual([value, runs, await between, await paid(id)], [42, 2, 'CONNECTION_DESTROYED', 0]);
		} finally { await p.end(); }
	});

	// At the answer of the claim, which is a first prepare, before or after the driver goes on.
	const moments = { 'at once': (f) => f(), 'next tick': process.nextTick, microtask: queueMicrotask, immediate: setImmediate, timer: (f) => setTimeout(f, 0) };
	if (driver === 'postgres') for (const [moment, at] of Object.entries(moments)) test(`the connection is reset after the claim: ${moment}`, { timeout: 30_000 }, async () => {
		let resets = 0;
		const p = drivers.postgres({ ...options, max: 1, connect_timeout: 5, socket: () => new Promise((resolve, reject) => {
			const socket = net.connect(serverAddress()).once('error', reject).once('connect', () => {
				resolve(socket);
				setImmediate(() => socket.on('data', (data) => {
					if (!resets && data.includes('outcome')) at(() => { resets++; socket.destroy(Object.assign(new Error('read ECONNRESET'), { code: 'ECONNRESET' })); });
				}));
			});
		}) });
		try {
			const id = newId();
			const { value } = await p.idem.once({ user: 'anna', id, scope: 'pay' }, async (tx) => (await tx`SELECT 42 AS n`)[0].n);
			assert.deepEqual([value, resets, (await p.idem.once({ user: 'anna', id, scope: 'pay' }, () => 1)).replayed], [42, 1, true]);
		} finally { await p.end(); }
	});

	test('COMMIT unanswered in each attempt', async () => {
		const proxy = await startProxy();
		const p = drivers[driver]({ host: '127.0.0.1', port: proxy.port, max: 2 });
		try {
			const id = newId();
			let cut = false;
			proxy.onMessage = (text) => { cut ||= /commit/i.test(text); return cut ? 'after' : null; };
			await assert.rejects(p.idem.once({ user: 'anna', id, scope: 'pay', attempts: 3 }, async (tx) => { await p.insert(tx, id, 1); return 5; }),
				(e) => e instanceof CommitUnknown && e.retryable && e.status === 503);
			proxy.onMessage = () => null;
			assert.equal((await p.idem.once({ user: 'anna', id, scope: 'pay' }, () => 6)).value, 5);
		} finally { await p.end(); proxy.close(); }
	});

	test('COMMIT unanswered, and then no server that takes the claim', async () => {
		await admin.query(`DO $$ BEGIN CREATE ROLE full_up LOGIN; EXCEPTION WHEN duplicate_object THEN NULL; END $$; SELECT ${schema}.idem_grant('full_up', 'app')`);
		const mend = () => admin.query('ALTER ROLE full_up CONNECTION LIMIT -1; ALTER ROLE full_up RESET ALL');
		await mend();
		// postgres.js connects again and again, without an end.
		for (const fault of ['SET default_transaction_read_only = on', ...(driver === 'pg' ? ['CONNECTION LIMIT 0'] : [])]) {
			const proxy = await startProxy();
			const p = drivers[driver]({ host: '127.0.0.1', port: proxy.port, user: 'full_up', database: process.env.PGDATABASE ?? 'postgres', max: 1 });
			try {
				const id = newId();
				proxy.onMessage = (text) => /commit/i.test(text) ? 'after' : null;
				const request = { user: 'anna', id, scope: 'pay', attempts: 3 };
				await assert.rejects(p.idem.once(request, async () => { await admin.query(`ALTER ROLE full_up ${fault}`); return 5; }), CommitUnknown, fault);
				await mend();
				assert.deepEqual((await once(id, () => 6)).value, 5);
			} finally { await p.end(); proxy.close(); }
		}
	});

	if (driver === 'pg') test('a timeout of the driver at COMMIT', async () => {
		await admin.query(`CREATE TABLE IF NOT EXISTS slow (a text); DROP TRIGGER IF EXISTS slow ON slow;
			CREATE OR REPLACE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_sleep(1.5); RETURN NULL; END $$;
			CREATE CONSTRAINT TRIGGER slow AFTER INSERT ON slow DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION slow()`);
		const p = drivers.pg({ query_timeout: 1000 });
		const { value, replayed } = await p.idem.once({ user: 'anna', id: newId() }, async (tx) => { await sql(tx, `INSERT INTO slow VALUES ('a')`); return 5; });
		assert.deepEqual([value, replayed], [5, true]);
		await p.end();
	});

	test('a pool of one', async () => {
		const p = drivers[driver]({ max: 1 });
		const id = newId();
		const answers = await Promise.all(Array.from({ length: 10 }, () => p.idem.once({ user: 'anna', id, scope: 'pay' }, async (tx) => { await p.insert(tx, id, 1); return 1; })));
		assert.equal(answers.filter((a) => !a.replayed).length, 1);
		await p.end();
		// postgres.js opens a pool again that was ended.
		if (driver === 'pg') await assert.rejects(p.idem.once({ user: 'anna', id: newId() }, () => 1), /after calling end/);
	});

	if (driver === 'pg') test('no listener is left on a connection, and the error says why it was lost', async () => {
		const p = drivers.pg({ max: 1 });
		const counts = new Set();
		for (let n = 0; n < 15; n++) {
			await p.idem.once({ user: 'anna', id: newId() }, (tx) => { counts.add(['error', 'end'].map((name) => tx.listenerCount(name)).join()); });
		}
		assert.equal(counts.size, 1);
		await assert.rejects(p.idem.once({ user: 'anna', id: newId(), attempts: 1 }, async (tx) => {
			await tx.query("SET LOCAL idle_in_transaction_session_timeout = '20 ms'");
			await new Promise((resolve) => setTimeout(resolve, 500));
		}), /connection lost: .*idle-in-transaction timeout/);
		await p.end();
	});

	test('outcomes are told', async () => {
		const events = [];
		const told = new Idem(d.pool, { schema, onOutcome: (event) => events.push(event) });
		const id = newId();
		await told.once({ user: 'anna', id, scope: 'pay' }, () => 1);
		await told.once({ user: 'anna', id, scope: 'pay' }, () => 1);
		const bug = new Error('bug');
		await told.once({ user: 'anna', id: newId() }, () => { throw bug; }).catch(() => {});
		assert.deepEqual(events.map((e) => [e.operation, e.scope, e.outcome, e.replayed, e.attempts, e.error]),
			[['once', 'pay', 'claimed', false, 1, undefined], ['once', 'pay', 'completed', true, 1, undefined], ['once', '', 'error', false, 1, bug]]);
		let go;
		const holds = new Promise((resolve) => { go = resolve; });
		const other = newId();
		let began;
		const begun = new Promise((resolve) => { began = resolve; });
		const first = once(other, async () => { began(); await holds; return 1; });
		await begun;
		await assert.rejects(told.once({ user: 'anna', id: other, scope: 'pay', wait: '300 ms' }, () => 2), TimedOut);
		go();
		await first;
		assert.ok(events.at(-1).outcome === 'timed_out' && events.at(-1).error instanceof TimedOut && events.at(-1).waited > 0.25 && events.at(-1).waited < 5, `${events.at(-1).waited} seconds`);
	});

	test('what a role may not do says which rights it needs', async () => {
		const role = `idem_none_${process.pid}`, request = { user: 'anna', id: newId() };
		await admin.query(`CREATE ROLE ${role} LOGIN`);
		const none = drivers[driver]({ ...options, user: role });
		try {
			for (const [rights, call] of [['app', () => none.idem.once(request, () => 1)], ['operator', () => none.idem.forget(request)], ['operator', () => none.idem.lapsed()]]) {
				await assert.rejects(call(), (e) => e instanceof NoRights && e.outcome === 'no_rights' && e.message.includes(`idem_grant('ROLE', '${rights}')`)
					&& e.message.includes('idem-pg install') === (rights === 'app'), rights);
			}
			await admin.query(`SELECT ${schema}.idem_grant('${role}', 'operator')`);
			assert.equal(await none.idem.forget(request), false);
		} finally {
			await none.end();
			await admin.query(`DROP OWNED BY ${role}`);
			await admin.query(`DROP ROLE ${role}`);
		}
	});
});

test('what others have planted in the search_path or in pg_temp is not used', async () => {
	const role = `idem_eve_${process.pid}`;
	await admin.query(`CREATE SCHEMA ${role}; CREATE TABLE ${role}.ran ();
		CREATE FUNCTION ${role}.json_build_object(text, anyenum, text, jsonb, text, timestamptz) RETURNS json LANGUAGE plpgsql AS $$
			BEGIN INSERT INTO ${role}.ran DEFAULT VALUES; RETURN '{"outcome": "claimed"}'; END $$;
		CREATE FUNCTION ${role}.spy(pg_catalog.jsonb) RETURNS bool LANGUAGE plpgsql AS $$ BEGIN INSERT INTO ${role}.ran DEFAULT VALUES; RETURN true; END $$`);
	const d = drivers.pg({ max: 1, options: `-c search_path=${role},public` });
	try {
		const id = newId();
		await d.pool.query(`CREATE DOMAIN pg_temp.jsonb AS pg_catalog.jsonb CHECK (${role}.spy(value))`);
		for (const replayed of [false, true]) assert.equal((await d.idem.once({ user: 'anna', id, params: 1 }, () => 1)).replayed, replayed);
		assert.equal((await d.idem.lease({ user: 'anna', id: newId() }, (l) => l.settle(1))).value, 1);
		assert.equal((await admin.query(`SELECT FROM ${role}.ran`)).rowCount, 0);
	} finally {
		await d.end();
		await admin.query(`DROP SCHEMA ${role} CASCADE`);
	}
});
