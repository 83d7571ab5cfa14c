// What the tests share: a database of the server that PGHOST, PGPORT and PGUSER name, with idem in the schema IDEM_SCHEMA.
import net from 'node:net';
import pg from 'pg';
import postgres from 'postgres';
import { Idem } from 'idem-pg';

export const schema = process.env.IDEM_SCHEMA ?? 'idem';
export const admin = new pg.Pool({ max: 4 });
admin.on('error', () => {});

export async function prepare() {
	await admin.query(`
		CREATE TABLE IF NOT EXISTS payments (id bigserial PRIMARY KEY, reference text, user_id text, amount int);
		CREATE TABLE IF NOT EXISTS provider_calls (id bigserial, reference text);
		CREATE OR REPLACE FUNCTION pay(reference text, amount int) RETURNS jsonb LANGUAGE plpgsql AS $$
		BEGIN
			INSERT INTO payments (reference, amount) VALUES (pay.reference, pay.amount);
			IF amount = 402 THEN PERFORM ${schema}.idem_fail('{"declined": true}'); RETURN NULL; END IF;
			RETURN jsonb_build_object('paid', amount);
		END $$`);
}

export const paid = async (reference) => Number((await admin.query('SELECT count(*) FROM payments WHERE reference = $1', [reference])).rows[0].count);

let number = 0;
export const newId = () => `${process.pid}-${Date.now()}-${++number}`;

export function serverAddress() {
	const { PGHOST = '127.0.0.1', PGPORT = '5432' } = process.env;
	return PGHOST.startsWith('/') ? { path: `${PGHOST}/.s.PGSQL.${PGPORT}` } : { host: PGHOST, port: Number(PGPORT) };
}

// A proxy in front of the server; cut(n) decides for each message of a client whether to break its connection before or after it.
export async function startProxy() {
	const sockets = new Set();
	const proxy = { onMessage: () => null, close: () => { server.close(); sockets.forEach((socket) => socket.destroy()); } };
	const server = net.createServer((client) => {
		const up = net.connect(serverAddress());
		sockets.add(client).add(up);
		const end = () => { client.destroy(); up.destroy(); };
		for (const socket of [client, up]) socket.on('error', end).on('close', end);
		let dead = false;
		client.on('data', (data) => {
			const what = data[0] === 0x51 || data[0] === 0x50 ? proxy.onMessage(data.toString()) : null;
			if (what === 'before') return end();
			up.write(data);
			if (what === 'after') dead = true;
		});
		up.on('data', (data) => { dead ? end() : client.write(data); });
	});
	await new Promise((resolve) => server.listen(0, '127.0.0.1', resolve));
	proxy.port = server.address().port;
	return proxy;
}

export const drivers = {
	pg: (options = {}) => {
		const pool = new pg.Pool({ max: 4, ...options });
		return { pool, idem: new Idem(pool, { schema }), insert: (tx, id, amount) => tx.query('INSERT INTO payments (reference, amount) VALUES ($1, $2)', [id, amount]),
			sql: async (tx, text) => (await tx.query(text)).rows, end: () => pool.end() };
	},
	postgres: (options = {}) => {
		// Else a connection that is lost while postgres.js asks for the array types, at its begin, is an unhandled rejection.
		const sql = postgres({ max: 4, fetch_types: false, onnotice: () => {}, ...options });
		return { pool: sql, idem: new Idem(sql, { schema }), insert: (tx, id, amount) => tx`INSERT INTO payments (reference, amount) VALUES (${id}, ${amount})`,
			sql: (tx, text) => tx.unsafe(text), end: () => sql.end({ timeout: 1 }) };
	},
};
