// One small interface over pg, postgres and PGlite. The statements of idem go as simple queries, with their values as
// literals. So with pg, BEGIN and the claim are one round trip, and complete and COMMIT: an error of complete keeps the
// COMMIT behind it from running. postgres sends BEGIN by itself, so that there the claim and complete are prepared.

import { looksLost } from './errors';

/** pg.Pool, as far as it is used. Two signatures, as it has: otherwise TypeScript infers from the one with the callback. */
export interface PgPool {
	connect: { (): Promise<any>; (callback: (...args: any[]) => void): void };
	query(...args: any[]): any;
	on(event: 'error', listener: (error: Error) => void): unknown;
	totalCount: number;
}
/** The function that postgres() returns, as far as it is used. */
export interface PostgresSql {
	unsafe(text: string, ...more: any[]): any;
	begin(options: string, callback: (tx: any) => any): Promise<any>;
}
/** PGlite, as far as it is used. */
export interface PGliteLike {
	exec(text: string, options?: any): Promise<any[]>;
	transaction(callback: (tx: any) => Promise<any>): Promise<any>;
}
/** A pool of one of the three drivers. */
export type Pool = PgPool | PostgresSql | PGliteLike;
/** What a handler gets: the connection of that driver. */
export type Tx<P> =
	P extends { begin(options: string, callback: (tx: infer T) => any): any } ? T
	: P extends { exec(...args: any[]): any; transaction(callback: (tx: infer T) => Promise<any>): any } ? T
	: P extends { connect: { (): Promise<infer C>; (callback: any): void } } ? C
	: any;

export interface Connection {
	/** The driver's own handle, for the handler. */
	readonly tx: any;
	/** Whether the connection is known to be lost. */
	readonly lost: boolean;
	/** BEGIN and one statement; the first column of its first row, a text, or null. Values: only if the driver prepares. */
	begin(sql: string, values: string[], isolation?: string): Promise<string | null>;
	/** One statement and COMMIT, which is not executed if the statement fails. */
	commit(sql: string, values: string[]): Promise<unknown>;
	rollback(): Promise<unknown>;
	/** Gives the connection back; broken: closes it. Never fails. */
	release(broken: boolean): void;
}

export interface Driver {
	connect(): Promise<Connection>;
	/** One statement, on any connection, in autocommit. */
	query(sql: string): Promise<string | null>;
	/** Whether begin() and commit() take values. */
	readonly prepares?: boolean;
}
const lostError = (cause?: unknown) =>
	Object.assign(new Error(`idem: connection lost${cause instanceof Error ? `: ${cause.message}` : ''}`, { cause }), { code: '08006' });
const ignore = () => {};
/** Waits for a promise that does not fail. */
export const atMost = (ms: number, promise: Promise<unknown>): Promise<void> => new Promise((resolve) => {
	const timer = setTimeout(resolve, ms);
	promise.then(() => { clearTimeout(timer); resolve(); });
});
// Results of a simple query: one, or an array of them; pg and PGlite have .rows, postgres.js is the rows.
function first(results: any): string | null {
	const list = Array.isArray(results) && (results.length === 0 || Array.isArray(results[0]) || results[0]?.rows) ? results : [results];
	for (const result of list) {
		// After a lost connection postgres.js puts the first row behind an empty place.
		const row = (result?.rows ?? result)?.find?.((row: unknown) => row);
		if (row && typeof row === 'object') return (Object.values(row)[0] ?? null) as string | null;
	}
	return null;
}
const rolledBack = new Error('idem: rolled back');
const listened = new WeakSet<object>();
function pgDriver(pool: PgPool): Driver {
	// Without a listener the loss of an idle connection ends the process.
	if (!listened.has(pool)) pool.on('error', ignore);
	listened.add(pool);
	return {
		async query(sql) { return first(await pool.query(sql)); },
		async connect() {
			const client = await pool.connect();
			let lost = false, why: unknown;
			const onLost = (error?: unknown) => { lost = true; why ??= error; };
			client.on('error', onLost).on('end', onLost);
			const run = async (sql: string) => {
				if (lost) throw lostError(why);
				return first(await client.query(sql));
			};
			return {
				tx: client,
				get lost() { return lost; },
				begin: (sql, _, isolation) => run(`BEGIN${isolation ? ` ISOLATION LEVEL ${isolation}` : ''}; ${sql}`),
				commit: (sql) => run(`${sql}; COMMIT`),
				rollback: () => run('ROLLBACK'),
				release(broken) {
					try { client.release(broken || lost); } catch { /* the handler has released it */ }
					// A client that is closed keeps the listeners: its socket may still raise an error.
					if (!broken && !lost) client.off('error', onLost).off('end', onLost);
				},
			};
		},
	};
}
function postgresDriver(sql: PostgresSql): Driver {
	return {
		prepares: (sql as any).options?.prepare === true,
		async query(text) { return first(await sql.unsafe(text)); },
		// sql.begin() sends BEGIN and COMMIT itself, and this ends it from outside. (sql.reserve() would save a round trip,
		// but never returns with fetch_types = false.)
		async connect() {
			let lost = false, over = false, why: unknown;
			let raw: any, tx: any, inner: any, done: Promise<unknown>;
			let end: (how: 'commit' | 'rollback') => void = ignore;
			// A query on a connection that was lost ends the process, or runs on a new connection, outside of the
			// transaction. So the handle refuses queries then, and after its end.
			const guard = () => {
				if (lost) throw lostError(why);
				if (over) throw new Error('idem: this transaction is over: was a query not awaited?');
			};
			const guarded = (target: any): any => new Proxy(target, {
				apply(f, self, args) { guard(); return Reflect.apply(f, self, args); },
				get(object, name) {
					const value = object[name];
					return typeof value === 'function' && ['unsafe', 'file', 'notify'].includes(String(name)) ? guarded(value) : value;
				},
			});
			// An error of postgres.js, not of the server. No query may follow a loss, not even the ROLLBACK after a lost claim.
			const note = (error: any): never => {
				if (!error.severity && looksLost(error)) { lost = true; why ??= error; }
				throw error;
			};
			// As sql.begin() does, to learn of a loss before any query of the handler can.
			const onexecute = (connection: any) => {
				inner = connection;
				const onclose = connection.onclose;
				connection.onclose = (error: unknown) => {
					lost = true;
					why ??= error;
					// Rejects what was sent between the error of the socket and its end. postgres.js would never answer
					// it, and take the answers of its next connection for it.
					connection.terminate();
					onclose?.(error);
				};
				return true;		// the next query need not wait
			};
			return {
				get tx() { return tx; },
				get lost() { return lost; },
				async begin(text, values, isolation) {
					await new Promise<void>((resolve, reject) => {
						done = sql.begin(isolation ? `isolation level ${isolation}` : '', (inside: any) => new Promise<void>((commit, rollback) => {
							raw = inside;
							tx = guarded(inside);
							end = (how) => { over = true; how === 'commit' ? commit() : rollback(rolledBack); };
							resolve();
						}));
						done.catch(note).catch(reject);
					});
					const answer = first(await raw.unsafe(text, values, { prepare: values.length > 0, onexecute }).catch(note));
					// A first prepare, or a long text, has not called onexecute. At once: sent after an error of the socket, it would end the pool.
					if (!inner) await raw.unsafe(';', [], { onexecute }).catch(ignore);
					return answer;
				},
				async commit(text, values) {
					guard();
					// COMMIT follows at once: after an error it is a ROLLBACK.
					const answer = raw.unsafe(text, values, { prepare: values.length > 0 });
					answer.catch(ignore);
					end('commit');
					// One that is lost in the error of its socket is never answered; but then done ends.
					// Where the handler has committed, postgres.js never sends the COMMIT that waits for a first prepare.
					return Promise.all([answer, done])
						.catch((error) => atMost(looksLost(error) ? 60_000 : 500, done.catch(ignore)).then(() => { throw error; }));
				},
				async rollback() {
					if (over) return;
					guard();
					end('rollback');
					await done.catch((error) => { if (error !== rolledBack) throw error; });
				},
				release(broken) { if (broken && !lost) inner?.terminate(); },
			};
		},
	};
}
function pgliteDriver(db: PGliteLike): Driver {
	return {
		async query(sql) { return first(await db.exec(sql)); },
		// PGlite has one connection: transaction() keeps others out, and this ends it from outside. It sends BEGIN and
		// COMMIT itself.
		async connect() {
			let end: (commit: boolean) => void = ignore;
			let done: Promise<unknown> = Promise.resolve();
			const ended = new Promise<boolean>((resolve) => { end = resolve; });
			const tx = await new Promise<any>((resolve, reject) => {
				done = db.transaction(async (inner) => {
					resolve(inner);
					if (!await ended) await inner.rollback();
				}).catch((error) => { reject(error); throw error; });
				done.catch(ignore);
			});
			return {
				tx,
				lost: false,
				begin: async (sql) => first(await tx.exec(sql)),
				commit: (sql) => tx.exec(sql).then(() => { end(true); return done; }),
				rollback() { end(false); return done; },
				release() { end(false); },
			};
		},
	};
}
export function driverOf(pool: Pool): Driver {
	const p = pool as any;
	if (typeof p === 'function' && typeof p.begin === 'function') return postgresDriver(p);
	if (p && typeof p.exec === 'function' && typeof p.transaction === 'function') return pgliteDriver(p);
	if (p && typeof p.connect === 'function' && typeof p.totalCount === 'number') return pgDriver(p);
	throw new TypeError('new Idem() takes a Pool of pg, the sql function of postgres, or a PGlite');
}

// A transaction of the caller, for idem.within: of the three drivers, or of an ORM.
export function runnerOf(tx: any): (sql: string) => Promise<string | null> {
	// Knex, where ? is a placeholder, and \? loses each backslash before it
	if (typeof tx?.raw === 'function') return async (sql) => first(await tx.raw(sql.replace(/(\\+)\?/g, '$1\\x3F').replace(/\?/g, '\\?')));
	if (typeof tx?.$queryRawUnsafe === 'function')		// Prisma
		return async (sql) => /^SELECT/.test(sql) ? first([await tx.$queryRawUnsafe(sql)]) : (await tx.$executeRawUnsafe(sql), null);
	if (typeof tx?.executeQuery === 'function')		// Kysely: what CompiledQuery.raw() makes
		return async (sql) => first(await tx.executeQuery({ sql, parameters: [], query: { kind: 'RawNode', sqlFragments: [sql], parameters: [] },
			queryId: { queryId: `idem${Math.random()}` } }));
	// postgres; PGlite; Drizzle; pg
	for (const name of ['unsafe', 'exec', 'execute', 'query']) if (typeof tx?.[name] === 'function') return async (sql) => first(await tx[name](sql));
	throw new TypeError('idem.within() takes a transaction of pg, postgres, PGlite, Kysely, Knex, Drizzle or Prisma');
}

/** A text as SQL, whatever standard_conforming_strings says. It has no NUL: see json.ts. */
export function literal(text: string | null): string {
	if (text === null) return 'NULL';
	const quoted = `'${text.replace(/'/g, "''")}'`;
	return quoted.includes('\\') ? ` E${quoted.replace(/\\/g, '\\\\')}` : quoted;
}
export const identifier = (name: string): string => `"${name.replace(/"/g, '""')}"`;
