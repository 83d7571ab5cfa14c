// What doc/drivers.md says of node-postgres. Called by test/drivers/try.
'use strict';

const { randomUUID } = require('crypto');
const { readFileSync } = require('fs');
const { Client, DatabaseError, Pool } = require('pg');
const { pay, pool: programPool } = require('./pay_pg.js');

const request = '0193a1f2-7d43-7c5e-9a10-5f7c2e1b8a01';

function line(...cells) {
	console.log(cells.join('\t'));
}

function is(name, got, expected) {
	line('is', name, JSON.stringify(got), JSON.stringify(expected));
}

async function value(database, sql, parameters) {
	const { rows: [row] } = await database.query(sql, parameters);
	return row && Object.values(row)[0];
}

async function failure(promise) {
	try {
		await promise;
	} catch (error) {
		return error;
	}
	return { message: 'no error' };
}

async function casts(client) {
	is('an array as a result', (await failure(client.query('SELECT idem_complete($1)', [[1, 2]]))).message, 'invalid input syntax for type json');
	await client.query('BEGIN');
	is('a result by JSON.stringify', await value(client, 'SELECT idem_complete($1::jsonb) FROM idem_try_claim($2, $3)',
		[JSON.stringify([1, 2]), 7, request]), true);
	for (const types of ['', '::int', '::bigint', '::text']) {
		for (const type of ['', '::uuid', '::text']) {
			const text = `SELECT idem_claim($1${types}, $2${type})`;
			const { rows: [row] } = await client.query({ name: text, text, values: [8, request] });
			is(`ids of other types: ${text}`, row.idem_claim, types + type === '');
		}
	}
	is('casts of a batch, and one spelling of a uuid', await value(client,
		'SELECT outcome FROM idem_claim_many($1::int[]::text[], $2::uuid[]::text[], wait => $3::text::interval)',
		[[7], [request.toUpperCase()], '0']), 'completed');
	await client.query('ROLLBACK');
}

async function codes(client) {
	const raised = await failure(client.query("SELECT idem_claim('', 'x')"));
	is('class and code of ID400', [raised.constructor === DatabaseError, raised.code], [true, 'ID400']);
}

async function autocommit(client) {
	await client.query("SELECT idem_claim('2', 'alone')");
	const pool = new Pool({ max: 2 });
	is('a claim alone commits', await value(pool, "SELECT idem_status('2', 'alone')"), 'completed');
	const pid = () => value(pool, 'SELECT pg_backend_pid()');
	const [first, second] = await Promise.all([pid(), pid()]);
	is('two queries of a pool need not get the same connection', first !== second, true);
	await pool.query('BEGIN');
	is('one after the other they seem to', await value(pool, 'SELECT now() < statement_timestamp()'), true);
	await pool.query('ROLLBACK');
	await pool.end();
}

async function calls(client) {
	const balance = () => value(client, 'SELECT balance FROM accounts WHERE id = 2');
	const before = await balance();
	const id = randomUUID();
	for (const status of ['claimed', 'completed']) {
		is(`idem_call(): ${status}`, await value(client, `SELECT jsonb_build_array(
			idem_call($1::int::text, $2::uuid::text, 'withdraw(int, bigint)', $3::jsonb, 'pay', '0'), idem_outcome())`,
		[2, id, { account: 2, amount: 1 }]), [{ paid: 1 }, status]);
	}
	is('idem_call() pays once', before - await balance(), 1);
}

async function queued(client) {
	const balance = () => value(client, 'SELECT balance FROM accounts WHERE id = 2');
	const before = await balance();
	for (let i = 0; i < 2; i++) {
		await client.query('BEGIN');
		await Promise.all([client.query("SELECT idem_claim('2', 'queued')"),
			client.query('UPDATE accounts SET balance = balance - 1 WHERE id = 2')]);
		await client.query('COMMIT');
	}
	is('queued work is executed twice', before - await balance(), 2);
}

async function commits(client) {
	await client.query('BEGIN');
	is('a statement fails', (await failure(client.query('SELECT 1 / 0'))).code, '22012');
	is('COMMIT after an error is not an error', (await client.query('COMMIT')).command, 'ROLLBACK');
}

async function hotKey(client) {
	const pool = new Pool({ max: 3 });
	const claim = (wait) => failure(pool.query("SELECT idem_claim('2', 'hot', wait => $1::text::interval)", [wait]));
	await client.query('BEGIN');
	await client.query("SELECT idem_claim('2', 'hot')");
	const refused = await Promise.all([claim('0'), claim('0'), claim('0')]);
	is('without waiting, each is refused', refused.map(({ code }) => code), ['ID409', 'ID409', 'ID409']);
	is('and others are served while the key is held', await value(pool, 'SELECT 1'), 1);

	const waiters = [claim('10 min'), claim('10 min'), claim('10 min')];
	while (await value(client, 'SELECT count(*) FROM pg_locks WHERE NOT granted AND pg_backend_pid() = ANY (pg_blocking_pids(pid))') < 3);
	let served = false;
	const other = pool.query('SELECT 1').then(() => { served = true; });
	await client.query('SELECT pg_sleep(0.2)');
	is('three waiters: others wait for a connection', [pool.waitingCount, served], [1, false]);
	await client.query('COMMIT');
	await Promise.all([...waiters, other]);
	is('until the key is free', served, true);
	await pool.end();
}

async function idle(client) {
	is('a request', await pay(2, randomUUID(), 1), { paid: 1 });
	const pid = await value(programPool, 'SELECT pg_backend_pid()');
	is('an idle connection is lost', await value(client, 'SELECT pg_terminate_backend($1, 60000)', [pid]), true);
	is('the next request gets another one', await pay(2, randomUUID(), 1), { paid: 1 });
	await programPool.end();
}

async function refusedConnections() {
	const { connect } = programPool;
	let refused = 0;
	const refuse = (times) => {
		programPool.connect = (...parameters) => refused++ < times ?
			Promise.reject(Object.assign(new Error('the database system is in recovery mode'), { code: '57P03' })) :
			connect.apply(programPool, parameters);
	};
	refuse(2);
	is('no connection, twice: the program tries again', await pay(2, randomUUID(), 1), { paid: 1 });
	refused = 0;
	refuse(1000);
	is('no connection at all', [(await failure(pay(2, randomUUID(), 1))).code, refused], ['57P03', 5]);
	programPool.connect = connect;
}

async function install(file) {
	const sql = readFileSync(file, 'utf8');
	const client = new Client();
	const content = `SELECT string_agg(p.oid || ' ' || p.xmin || coalesce(p.proacl::text, ''), ' ' ORDER BY p.oid)
		FROM pg_proc AS p WHERE p.proname LIKE 'idem\\_%'`;
	await client.connect();
	await client.query('CREATE SCHEMA requests; SET search_path = requests, public');
	is('the plain file is installed by one query', (await failure(client.query(sql))).message, 'no error');
	is('and leaves the search_path as it was', await value(client, 'SHOW search_path'), 'requests, public');
	is('a claim', await value(client, "SELECT idem_claim('u', 'r')"), true);
	is('and its duplicate', await value(client, "SELECT idem_claim('u', 'r')"), false);
	const before = await value(client, content);
	is('a second time it does nothing', (await failure(client.query(sql))).message, 'no error');
	is('which changes no function', await value(client, content) === before, true);
	is('and no claim', await value(client, "SELECT idem_claim('u', 'r')"), false);
	await client.end();
}

async function main([mode, account, ...parameters]) {
	if (mode === 'repeat') {
		for (let i = 0; i < 12; i++) console.log((await pay(2, randomUUID(), 1)) && 200);
		await programPool.query({ name: process.env.IDEM_POOLED ? undefined : 'one', text: 'SELECT 1' });
		await programPool.end();
		return;
	}
	if (mode === 'install') {
		await install(account);
		return;
	}
	if (mode === 'pay') {
		try {
			console.log(200, JSON.stringify(await pay(Number(account), parameters[0], Number(parameters[1]))));
		} catch ({ code = '', message }) {
			if (!code.startsWith('ID') && code !== '40001') throw new Error(message);
			console.log(code === '40001' ? 503 : code.slice(2), message);
		}
		await programPool.end();
		return;
	}
	const client = new Client();
	await client.connect();
	for (const part of [casts, codes, autocommit, calls, queued, commits, hotKey, refusedConnections, idle]) await part(client);
	await client.end();
}

main(process.argv.slice(2)).catch((error) => {
	console.error(error);
	process.exit(1);
});
