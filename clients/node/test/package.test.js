// Packs the package, and uses it in an empty project: the first ten lines of the README, as ESM, CommonJS and TypeScript.
import assert from 'node:assert/strict';
import { execFileSync } from 'node:child_process';
import { mkdtempSync, readFileSync, rmSync, writeFileSync, symlinkSync, mkdirSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { test } from 'node:test';
import pg from 'pg';

const here = new URL('..', import.meta.url).pathname;
const run = (command, args, options) => execFileSync(command, args, { encoding: 'utf8', stdio: ['ignore', 'pipe', 'pipe'], ...options });

test('npm pack, into an empty project', async () => {
	const project = mkdtempSync(join(tmpdir(), 'idem-pg-'));
	const admin = new pg.Client();
	const database = `idem_pack_${process.pid}`;
	await admin.connect();
	try {
		await admin.query(`CREATE DATABASE ${database}`);
		const { filename, files } = JSON.parse(run('npm', ['pack', '--json', '--pack-destination', project], { cwd: here }))[0] ?? {};
		assert.ok(!files.some(({ path }) => /^(src|test|node_modules)\//.test(path)));
		writeFileSync(join(project, 'package.json'), '{ "name": "empty", "private": true }');
		run('npm', ['install', '--offline', '--legacy-peer-deps', '--no-audit', join(project, filename)], { cwd: project });
		for (const name of ['pg', 'postgres', '@types', '@electric-sql', 'undici-types']) {
			mkdirSync(join(project, 'node_modules'), { recursive: true });
			symlinkSync(join(here, 'node_modules', name), join(project, 'node_modules', name));
		}
		const env = { ...process.env, PGDATABASE: database };
		assert.match(run('npx', ['idem-pg', 'install'], { cwd: project, env }), /is in the schema "idem"/);
		const example = /```js\n(import pg[^]*?)```/.exec(readFileSync(join(here, 'README.md'), 'utf8'))[1];
		writeFileSync(join(project, 'first.mjs'), example);
		assert.match(run('node', ['first.mjs'], { cwd: project, env }), /replayed: false[^]*replayed: true/);
		writeFileSync(join(project, 'first.cjs'), `(async () => { ${example.replace(/import (.*) from (.*);/g, 'const $1 = require($2);').replace('order 17', 'order 18')} })();`);
		assert.match(run('node', ['first.cjs'], { cwd: project, env }), /replayed: false[^]*replayed: true/);
		writeFileSync(join(project, 'types.mts'), `
			import pg from 'pg';
			import postgres from 'postgres';
			import { PGlite } from '@electric-sql/pglite';
			import { Idem, reply, Failed, type Result } from 'idem-pg';
			import { testIdem } from 'idem-pg/test';
			const a: Result<{ paid: number }> = await new Idem(new pg.Pool()).once({ user: 1, id: 'x' }, async (tx) => { const c: pg.PoolClient = tx; await c.query(''); return { paid: 1 }; });
			await new Idem(postgres()).once({ user: 1, id: 'x' }, async (tx) => { const s: postgres.TransactionSql = tx; await s\`SELECT 1\`; return a; });
			await new Idem(new PGlite()).once({ user: 1, id: 'x' }, async (tx) => { await tx.query('SELECT 1'); });
			const answer: Response = await new Idem(new pg.Pool()).http({ user: () => 'a' }, (tx) => { const c: pg.PoolClient = tx; return reply(200); })(new Request('http://x'));
			const stored: unknown = new Failed('x', 1, true).stored;
			// @ts-expect-error: no id
			await new Idem(new pg.Pool()).once({ user: 1 }, () => 1);
			// @ts-expect-error: not a pool
			new Idem({});
			export { answer, stored, testIdem };`);
		writeFileSync(join(project, 'types.cts'), `
			import { Idem, type Lease } from 'idem-pg';
			import { check } from 'idem-pg/install';
			import pg = require('pg');
			const pool = new pg.Pool();
			async function main(): Promise<number> {
				const { value } = await new Idem(pool).lease({ user: 'a', id: 1n }, async (l: Lease<pg.Pool>) => {
					const signal: AbortSignal = l.signal;
					return l.settle({ ok: !signal.aborted, n: 1 }, (tx) => tx.query('SELECT 1'));
				});
				return (await check(pool)).ok ? value.n : 0;
			}
			export = main;`);
		run(join(here, 'node_modules/.bin/tsc'), ['--noEmit', '--strict', '--target', 'es2022', '--module', 'nodenext', '--types', 'node', '--skipLibCheck', 'types.mts', 'types.cts'], { cwd: project });
	} catch (error) {
		throw new Error(`${error.message}\n${error.stdout ?? ''}${error.stderr ?? ''}`);
	} finally {
		await admin.query(`DROP DATABASE IF EXISTS ${database}`);
		await admin.end();
		rmSync(project, { recursive: true, force: true });
	}
});
