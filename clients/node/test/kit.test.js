import assert from 'node:assert/strict';
import { execFileSync } from 'node:child_process';
import { after, before, describe, test } from 'node:test';
import { drizzle } from 'drizzle-orm/node-postgres';
import knex from 'knex';
import { Kysely, PostgresDialect } from 'kysely';
import { Idem, InProgress, Refused, Failed, NoRights } from 'idem-pg';
import { check, migrate, sql } from 'idem-pg/install';
import { testIdem } from 'idem-pg/test';
import { admin, drivers, newId, paid, prepare, schema } from './server.js';

before(prepare);
after(() => admin.end());

describe('idem-pg/test, on PGlite', () => {
	let t;
	before(async () => { t = await testIdem(); await t.db.exec('CREATE TABLE payments (reference text)'); });
	after(() => t.close());
	const pay = (id) => t.idem.once({ user: 'anna', id, scope: 'pay' }, async (tx) => { await tx.query('INSERT INTO payments VALUES ($1)', [id]); return { paid: 1 }; });
	const rows = async (id) => (await t.db.query('SELECT * FROM payments WHERE reference = $1', [id])).rows.length;

	test('lost commits, conflicts, holders and leases', async () => {
		assert.equal((await pay('0')).replayed, false);
		t.loseCommit('before');
		assert.deepEqual([(await pay('1')).replayed, await rows('1')], [false, 1]);
		t.loseCommit('after');
		assert.deepEqual([(await pay('2')).replayed, await rows('2')], [true, 1]);
		t.fail('40001');
		assert.deepEqual([(await pay('3')).replayed, await rows('3')], [false, 1]);
		t.fail('23505');
		await assert.rejects(pay('4'), (e) => e.code === '23505');
		const release = await t.hold({ user: 'anna', id: '5', scope: 'pay' });
		await assert.rejects(pay('5'), InProgress);
		await release();
		assert.equal((await pay('5')).replayed, false);
		await t.idem.lease({ user: 'anna', id: '6' }, async (l) => { await l.record(1); throw new Error('x'); }).catch(() => {});
		await t.lapse({ user: 'anna', id: '6' });
		assert.deepEqual(await t.idem.lease({ user: 'anna', id: '6' }, (l) => l.settle('done', (tx) => tx.query('SELECT 1'))), { value: 'done', replayed: false, previous: 1 });
		await assert.rejects(t.idem.once({ user: 'anna', id: '7' }, () => { throw new Refused(1); }), Failed);
		await assert.rejects(t.idem.once({ user: 'anna', id: '8' }, () => { throw new Error('bug'); }), /bug/);
	});
	test('executedOnce', async () => {
		assert.deepEqual(await t.executedOnce(() => pay('a'), { concurrent: 4 }), { paid: 1 });
		assert.equal(await rows('a'), 1);
		let n = 0;
		await assert.rejects(t.executedOnce(() => pay(`b${n++}`)), /more than once|by each call/);
		await assert.rejects(t.executedOnce(() => pay('a')), /executed before/);
		assert.deepEqual(await t.executedOnce(() => t.db.transaction((tx) => t.idem.within(tx, { user: 'anna', id: 'c' }, () => 1))), 1);
		assert.equal((await t.idem.once({ user: 'anna', id: 'd' }, () => 1)).replayed, false);		// no fault is left
	});
});

describe('within', () => {
	const d = drivers.pg();
	const request = (id) => ({ user: 'anna', id, scope: 'within', params: { what: "it's ? $1 \\" } });
	after(() => d.end());
	const k = knex({ client: 'pg', connection: {}, pool: { min: 0, max: 1 } });
	const p = drivers.postgres();
	after(() => Promise.all([k.destroy(), p.end()]));
	const value = { ok: "it's ? $1 :a \\ \\? \\\\? ü" };
	for (const [name, transaction, insert] of [
		['pg', async (fn) => { const c = await d.pool.connect(); await c.query('BEGIN'); try { const r = await fn(c); await c.query('COMMIT'); return r; } finally { c.release(); } }, d.insert],
		['postgres', (fn) => p.pool.begin(fn), p.insert],
		['Kysely', (fn) => new Kysely({ dialect: new PostgresDialect({ pool: d.pool }) }).transaction().execute(fn), (tx, id, amount) => tx.insertInto('payments').values({ reference: id, amount }).execute()],
		['Knex', (fn) => k.transaction(fn), (tx, id, amount) => tx('payments').insert({ reference: id, amount })],
		['Drizzle', (fn) => drizzle(d.pool).transaction(fn), (tx, id) => tx.execute(`INSERT INTO payments (reference, amount) VALUES ('${id}', 1)`)],
	]) test(name, async () => {
		const id = newId();
		for (const replayed of [false, true]) {
			const answer = await transaction((tx) => d.idem.within(tx, request(id), async (same) => { await insert(same, id, 1); return value; }));
			assert.deepEqual([answer.value, answer.replayed, await paid(id)], [value, replayed, 1]);
		}
		const other = newId();
		await transaction(async (tx) => {
			await assert.rejects(d.idem.within(tx, request(other), async () => { await insert(tx, other, 1); throw new Error('bug'); }), /bug/);
			await assert.rejects(d.idem.within(tx, request(other), async () => {
				await insert(tx, other, 1);
				await d.idem.within(tx, request(newId()), () => 1);
				await assert.rejects(d.idem.within(tx, request(newId()), () => { throw new Error('inner'); }), /inner/);
				throw new Error('outer');
			}), /outer/);
		});		// and commits
		assert.deepEqual([await paid(other), await d.idem.status(request(other))], [0, null]);
	});
});

describe('install, check, sql', () => {
	const cli = (...args) => { try { return [0, execFileSync(process.execPath, [new URL('../dist/cli.js', import.meta.url).pathname, ...args], { encoding: 'utf8', stdio: ['ignore', 'pipe', 'pipe'] })]; }
		catch (error) { return [error.status, error.stdout + error.stderr]; } };
	test('the command line', async () => {
		const database = `idem_cli_${process.pid}`, role = `shop_${process.pid}`;
		await admin.query(`CREATE DATABASE ${database}`);
		await admin.query(`CREATE ROLE ${role} LOGIN`);
		const before = process.env.PGDATABASE;
		process.env.PGDATABASE = database;
		const line = new RegExp(`^database +${database} at ([0-9a-f.:]+|a local socket), port ${process.env.PGPORT ?? 5432}\n`);
		const [exit, missing] = cli('check', '--schema', 'My schema');
		assert.equal(exit, 1);
		assert.match(missing, line);
		assert.match(missing, /mend: idem is not in the schema/);
		const [refused, why] = cli('install', '--url', `postgres://${role}@/${database}?host=${process.env.PGHOST ?? '127.0.0.1'}&port=${process.env.PGPORT ?? 5432}`);
		assert.equal(refused, 2);
		assert.match(why, /run it as the owner of the database, or as a role with CREATE on it;.*permission denied for database/);
		assert.match(cli('install', '--schema', 'My schema').join(), /^0,idem 1\.0\.0/);
		const [fresh, told] = cli('check', '--schema', 'My schema');
		assert.equal(fresh, 0, told);
		assert.match(told, line);
		assert.match(told, /^note: Nobody removes expired requests yet: run CALL "My schema"\.idem_cleanup_all\(\) from a timer, as the owner of idem or an operator\./m);
		const shop = new (await import('pg')).default.Pool({ user: role, database });
		await assert.rejects(new Idem(shop, { schema: 'My schema' }).once({ user: 'a', id: '1' }, () => 1), (e) => e instanceof NoRights && /--grant/.test(e.message));
		assert.equal((await check(shop, { schema: 'My schema' })).rights, false);
		assert.match(cli('install', '--schema', 'My schema', '--grant', role).join(), /^0,/);
		assert.equal((await new Idem(shop, { schema: 'My schema' }).once({ user: 'a', id: '1' }, () => 1)).value, 1);
		const found = await check(shop, { schema: 'My schema' });
		assert.deepEqual([found.rights, found.edition, found.role], [true, 'portable', role]);
		await shop.end();
		const owner = new (await import('pg')).default.Pool({ database });
		await owner.query(`UPDATE "My schema".idem_claims SET expires_at = now() - interval '2 days'`);
		assert.match(cli('check', '--schema', 'My schema').join(), /^1,.*\nmend: Requests that expired more than a day ago are still there: run CALL "My schema"\.idem_cleanup_all/s);
		await owner.query(/CALL \S+ \S+\(\)/.exec(told)[0]);
		assert.match(cli('check', '--schema', 'My schema').join(), /^0,.*\ncleaning +sessions/s);
		await owner.end();
		assert.match(cli('sql')[1], /CREATE SCHEMA "idem"/);
		assert.equal(cli('nonsense')[0], 2);
		assert.equal(cli('check', '--url', 'postgres://127.0.0.1:1/x')[0], 2);
		const p = drivers.postgres({ database });
		assert.match(await migrate(p.pool, { schema: 'My schema', grant: role }), /^1\.0\.0/);
		// A superuser runs no code of the owner of the schema.
		await p.pool.unsafe(`CREATE SCHEMA trap AUTHORIZATION ${role}; CREATE TABLE run (n int); GRANT INSERT ON run TO PUBLIC; SET ROLE ${role};
			CREATE FUNCTION trap.idem_try_claim(user_id text, request_id text) RETURNS int LANGUAGE sql RETURN 1;
			CREATE FUNCTION trap.idem_version() RETURNS text LANGUAGE plpgsql AS $$ BEGIN INSERT INTO public.run VALUES (1); RETURN '1.0.0'; END $$; RESET ROLE`);
		// Nor of somebody who may make operators and views in the search_path.
		await p.pool.unsafe(`GRANT CREATE ON SCHEMA public TO ${role}; SET ROLE ${role};
			CREATE FUNCTION public.spy(name, name) RETURNS bool COST 0.000001 LANGUAGE plpgsql AS $$ BEGIN INSERT INTO public.run VALUES (2); RETURN true; END $$;
			CREATE OPERATOR public.~~ (LEFTARG = name, RIGHTARG = name, FUNCTION = public.spy);
			CREATE FUNCTION public.spy(oid, regrole) RETURNS bool COST 0.000001 LANGUAGE plpgsql AS $$ BEGIN INSERT INTO public.run VALUES (3); RETURN true; END $$;
			CREATE OPERATOR public.= (LEFTARG = oid, RIGHTARG = regrole, FUNCTION = public.spy);
			CREATE VIEW public.pg_extension AS SELECT * FROM pg_catalog.pg_extension WHERE public.spy('', '');
			CREATE VIEW public.pg_roles AS SELECT * FROM pg_catalog.pg_roles WHERE public.spy('', ''); RESET ROLE;
			ALTER DATABASE ${database} SET search_path = public, pg_catalog`);
		assert.match(cli('install', '--schema', 'My schema', '--grant', role).join(), /^0,/);
		for (const object of ['SCHEMA trap', 'FUNCTION trap.idem_version', null]) {
			assert.equal(/mend: idem or its schema belongs to the role "shop_/.test(cli('check', '--schema', 'trap')[1]), object !== null);
			assert.equal((await p.pool`SELECT FROM run`).length > 0, object === null);
			if (object) await p.pool.unsafe(`ALTER ${object} OWNER TO CURRENT_USER; ALTER FUNCTION trap.idem_try_claim OWNER TO CURRENT_USER`);
		}
		// Nor the functions of an idem that is somebody else's.
		await p.pool.unsafe(`DROP SCHEMA trap, "My schema" CASCADE; CREATE SCHEMA idem AUTHORIZATION ${role}; TRUNCATE run`);
		const theirs = new (await import('pg')).default.Pool({ user: role, database });
		assert.match(await migrate(theirs, { grant: role }), /^1\.0\.0/);
		await theirs.query(`CREATE OR REPLACE FUNCTION idem.idem_grant(role regrole, privileges text DEFAULT 'app') RETURNS void LANGUAGE sql AS 'INSERT INTO public.run VALUES (4)'`);
		await theirs.end();
		const [stopped, words] = cli('install', '--grant', role);
		assert.deepEqual([stopped, /belongs to "shop_.*install as that role/.test(words), (await p.pool`SELECT FROM run`).length], [2, true, 0], words);
		// The owner of the database can give a superuser's session another role, from which its code comes back.
		await p.pool.unsafe(`ALTER DATABASE ${database} SET role = ${role}`);
		for (const command of ['install', 'check']) assert.match(cli(command).join(), /^[12],.*belongs to/s);
		await p.end();
		process.env.PGDATABASE = before;
		assert.match(cli('check', '--schema', schema)[1], /edition +(C|portable)/);
		await admin.query(`DROP DATABASE ${database}`);
		await admin.query(`DROP ROLE ${role}`);
		assert.ok(sql({ grant: 'x' }).includes("idem_grant('x'::regrole, 'app'::text)"));
	});
});
