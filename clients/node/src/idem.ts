import { driverOf, identifier, literal, runnerOf, type Connection, type Driver, type Pool, type Tx } from './driver';
import { CommitUnknown, Failed, HandlerEndedTransaction, HandlerSwallowedError, IdemError, Invalid, Refused, codeOf, isConflict, looksLost, outcomeError, translate } from './errors';
import { httpHandler, type HttpOptions, type HttpHandler, type HttpRequest, type Reply } from './http';
import { checkText, toJson } from './json';
import { leaseRequest, type Lease, type LeaseRequest, type LeaseResult } from './lease';

/** Names a request. Numbers and uuids become text. */
export interface Key {
	/** The party that chooses the ids; 1 to 255 bytes. */
	user: string | number | bigint;
	/** The client's idempotency key, the same in each retry; 1 to 255 bytes. */
	id: string | number | bigint;
	/** The namespace; default ''. */
	scope?: string;
}
/** A request to be executed once. */
export interface Request extends Key {
	/** What the client sent: the same id with other params is a `Mismatch`. Any JSON; undefined: not compared. */
	params?: unknown;
	/** How long to wait for another execution: seconds, or an interval such as '500 ms'. Default 0: `InProgress` at once.
	 * A request that waits occupies its connection. */
	wait?: number | string;
	/** How often to try in all, at conflicts and lost connections. Default 5. */
	attempts?: number;
	/** Isolation level; default: the server's. PGlite ignores it. */
	isolation?: 'read committed' | 'repeatable read' | 'serializable';
	/** Ends the attempts; it interrupts no handler and no COMMIT. */
	signal?: AbortSignal;
}
/** What an executed request returned, now or earlier. */
export interface Result<T> {
	/** As a replay returns it: after a round trip through JSON. jsonb has its own order of keys. */
	value: T;
	/** Whether the value was stored earlier: by another call, or by an attempt of this one whose COMMIT was not answered. */
	replayed: boolean;
	/** Until when the request is remembered at least. */
	expiresAt: Date;
}
/** Passed to `onOutcome`. */
export interface OutcomeEvent {
	operation: 'once' | 'call' | 'lease' | 'within';
	scope: string;
	/** 'claimed' (executed now), 'completed' (a replay), that of an IdemError, or 'error': the handler's, or the database's. */
	outcome: string;
	replayed: boolean;
	/** Seconds until the latest claim was answered, waiting for a connection included. */
	waited: number;
	attempts: number;
	/** What was thrown, if anything. */
	error?: unknown;
}
export interface IdemOptions {
	/** The schema of idem; default 'idem'. */
	schema?: string;
	/** Called after each request, for metrics and spans. */
	onOutcome?: (event: OutcomeEvent) => void;
}

/** All that is stored of a request; the fingerprint in hex. */
export type Stored = { state: 'in_progress' | 'completed' | 'failed'; result: unknown; progress: unknown;
	expiresAt: Date; leaseUntil: Date | null; committedAt: Date | null; fingerprint: string | null };
/** A lease that lapsed, and that nobody has settled. */
export type Lapsed = { scope: string; user: string; id: string; status: 'lapsed' | 'unknown'; leaseUntil: Date; progress: unknown };

/**
 * @internal What is known over all attempts of one call. `lost`: a connection was lost, and its session may still hold the
 * request, until the server notices. `unknown`: COMMIT was sent and not answered.
 */
export const newState = () => ({ attempt: 0, lost: false, unknown: false, waited: 0, replayed: false });
export type State = ReturnType<typeof newState>;
type Bind = (text: string) => string;
/** @internal The attempt failed in a way that allows another one. */
export class Again extends Error { constructor(readonly error: unknown) { super('again'); } }
/** @internal Errors after which the attempts were spent, so not the handler's. */
export const spent = new WeakSet<object>();
export const failed = (promise: Promise<unknown>): Promise<boolean> => promise.then(() => false, () => true);
// The stored time is rounded up; that in the answer of the first claim is not.
const wholeSecond = (text: string): Date => new Date(Math.ceil(Date.parse(text) / 1000) * 1000);
const invalid = (message: string) => new Invalid(message);
const named = 'user id scope wait attempts ';
const optionsOf = {
	Idem: 'schema onOutcome', http: `${named}key required isolation final fingerprint headers encode decode limit`, once: `${named}params isolation signal`,
	call: `${named}signal`, lease: `${named}params signal lease progress`, within: 'user id scope wait params',
};
/** @internal Refuses an option that is misspelt: it would be ignored. */
export function only(of: keyof typeof optionsOf, given: object): void {
	const known = optionsOf[of].split(' ');
	for (const name in given) if (!known.includes(name)) throw new Invalid(`${of} has no option "${name}": it has ${known.join(', ')}`);
}
export const pause = (attempt: number): Promise<void> =>
	new Promise((resolve) => setTimeout(resolve, Math.random() * Math.min(2000, 50 * 2 ** attempt)));

/** Executes requests once. `pool` is a Pool of pg, the sql function of postgres, or a PGlite. */
export class Idem<P extends Pool = Pool> {
	/** @internal */ readonly driver: Driver;
	readonly schema: string;
	readonly #onOutcome: ((event: OutcomeEvent) => void) | undefined;

	constructor(pool: P, options: IdemOptions = {}) {
		only('Idem', options);
		this.driver = driverOf(pool);
		this.schema = options.schema ?? 'idem';
		this.#onOutcome = options.onOutcome;
	}

	/**
	 * Claims the request, runs the handler, stores what it returns, and commits: in one transaction. A retry gets the stored
	 * value. Runs the handler again, in a new transaction, after a conflict or a lost connection. An error of the handler
	 * rolls back and passes through; `throw new Refused(value)` ends the request for good.
	 */
	once<T>(request: Request, handler: (tx: Tx<P>) => T | Promise<T>): Promise<Result<T>> {
		return this.attempts('once', request, async (state) => {
			const claimed = this.values(), settled = this.values();
			const result = await this.transaction<Result<T> | Failed>(state, this.claimSql(request, state, claimed.bind), async (connection, answer) => {
				const expiresAt = wholeSecond(answer.expires_at);
				const stored = this.replay(answer, state);
				if (stored) return { value: { value: stored.value as T, replayed: true, expiresAt } };
				state.unknown = false;		// the COMMIT that was not answered has not taken effect
				let text: string, refused = false;
				try {
					text = toJson(await handler(connection.tx));
				} catch (error) {
					if (!(error instanceof Refused)) throw error;
					refused = true;
					text = toJson(error.value);
				}
				const value = JSON.parse(text) as T;
				return {
					commit: `SELECT ${this.fn(refused ? 'fail' : 'complete')}(${this.key(request, settled.bind)}, ${settled.bind(text)}::pg_catalog.text::pg_catalog.jsonb, NULL, ${settled.bind(request.scope ?? '')}::pg_catalog.text)::pg_catalog.text`,
					values: settled.list,
					value: refused ? new Failed('the request is refused', value, false) : { value, replayed: false, expiresAt },
				};
			}, request.isolation, claimed.list);
			if (result instanceof Failed) throw result;
			return result;
		});
	}

	/** idem_call: runs a function of the database once, in one round trip. `fn` is its name with the types of its arguments:
	 * 'pay(text, int)'. It is code: never let a client choose it. */
	call<T = unknown>(request: Omit<Request, 'params' | 'isolation'>, fn: string, args: Record<string, unknown> = {}): Promise<{ value: T; replayed: boolean }> {
		return this.attempts('call', request, async (state) => {
			const before = performance.now();
			const sql = `SELECT pg_catalog.json_build_object('value', c, 'outcome', ${this.fn('outcome')}())::pg_catalog.text FROM ${this.fn('call')}(${this.key(request)}, `
				+ `${literal(fn)}, ${literal(toJson(args, invalid))}::pg_catalog.jsonb, ${literal(request.scope ?? '')}, ${this.wait(request.wait, state)}) AS c`;
			try {
				const { value, outcome } = JSON.parse(await this.driver.query(sql) as string);
				state.waited = (performance.now() - before) / 1000;
				if (outcome === 'failed') throw new Failed('the request is refused', value, false);
				state.replayed = outcome === 'completed';
				return { value: value as T, replayed: state.replayed };
			} catch (error) {
				const lost = looksLost(error), code = codeOf(error) ?? '';
				if (lost) state.lost = state.unknown = true;		// in autocommit: the answer that was lost can be that of the commit
				if (lost || isConflict(error) || (state.unknown && ['25006', '53300'].includes(code))) throw new Again(error);		// a server on the way up or down
				if (state.lost && (code === 'ID409' || code === 'ID503')) throw new Again(translate(error, this.schema));
				const stored = code === 'ID417' && await this.lookup(request);		// null: the function has met another request that failed
				if (stored && stored.state === 'failed') throw new Failed('the request has failed', stored.result, true, { cause: error });
				throw translate(error, this.schema);
			}
		});
	}

	/**
	 * Claim and complete in a transaction that the caller commits: of pg, postgres, PGlite, Kysely, Knex, Drizzle or Prisma.
	 * It cannot repeat the transaction: after a conflict (40001, 40P01) or a lost connection, run all of it again, with the
	 * same id. An error takes the claim back, by a savepoint, so that a caller who commits all the same marks nothing as
	 * done. `Refused` is an error like any other here.
	 */
	async within<X, T>(tx: X, request: Omit<Request, 'attempts' | 'isolation' | 'signal'>, handler: (tx: X) => T | Promise<T>): Promise<Result<T>> {
		return this.#observe('within', request, newState(), async (state) => {
			const send = runnerOf(tx);
			const run = (sql: string) => send(sql).catch((error: unknown) => { throw translate(error, this.schema); });
			await run('SAVEPOINT idem_within');
			try {
				const answer = JSON.parse(await run(this.claimSql(request, state)) as string);
				const expiresAt = wholeSecond(answer.expires_at);
				const stored = this.replay(answer, state);
				const text = stored ? 'null' : toJson(await handler(tx));
				if (!stored) await run(`SELECT ${this.fn('complete')}(${this.key(request)}, ${literal(text)}::pg_catalog.jsonb, NULL, ${literal(request.scope ?? '')})::pg_catalog.text`);
				await run('RELEASE SAVEPOINT idem_within');		// else one around this one would roll back to here only
				return { value: stored ? stored.value as T : JSON.parse(text) as T, replayed: !!stored, expiresAt };
			} catch (error) {
				await run('ROLLBACK TO SAVEPOINT idem_within').then(() => run('RELEASE SAVEPOINT idem_within')).catch(() => {});
				throw error;
			}
		});
	}

	/** Work that is not one transaction, such as a call of another service. See `Lease`. */
	lease<T>(request: LeaseRequest, work: (lease: Lease<P>) => T | Promise<T>): Promise<LeaseResult<T>> {
		return leaseRequest(this, request, work);
	}

	/** A handler for Express, Fastify, Hono, node:http and Fetch-style servers that executes each Idempotency-Key once. */
	http(options: HttpOptions, handler: (tx: Tx<P>, request: HttpRequest) => Reply | Response | Promise<Reply | Response>): HttpHandler {
		return httpHandler(this as Idem<any>, options, handler);
	}

	/** 'completed', 'failed', 'in_progress' or 'unknown'; null if the request is not remembered. */
	async status(key: Key): Promise<'completed' | 'failed' | 'in_progress' | 'unknown' | null> {
		return await this.query(`SELECT ${this.fn('status')}(${this.key(key)}, ${literal(key.scope ?? '')})::pg_catalog.text`) as any;
	}

	/** All that is stored of a request; null if it is not remembered. */
	async lookup(key: Key): Promise<Stored | null> {
		const row = JSON.parse(await this.query(`SELECT pg_catalog.to_json(l)::pg_catalog.text FROM ${this.fn('lookup')}(${this.key(key)}, ${literal(key.scope ?? '')}) AS l`) ?? 'null');
		return row && {
			state: row.state, result: row.result, progress: row.progress, expiresAt: new Date(row.expires_at),
			leaseUntil: row.lease_until && new Date(row.lease_until), committedAt: row.committed_at && new Date(row.committed_at), fingerprint: row.fingerprint?.slice(2) ?? null,
		};
	}

	/** Drops a request, so that it can be executed again. For operators. False: there was none. */
	async forget(key: Key): Promise<boolean> {
		return await this.query(`SELECT ${this.fn('forget')}(${this.key(key)}, ${literal(key.scope ?? '')})::pg_catalog.text`, 'operator') === 'true';
	}

	/** Leases that lapsed, the longest lapsed first; of all scopes where none is given. */
	async lapsed(scope: string | null = null, maxRows: number | null = 100): Promise<Lapsed[]> {
		const text = await this.query(`SELECT coalesce(pg_catalog.json_agg(l), '[]')::pg_catalog.text FROM ${this.fn('lapsed')}(${literal(scope)}, ${maxRows === null ? 'NULL' : Number(maxRows)}) AS l`, 'operator');
		return JSON.parse(text as string).map((row: any) => ({
			scope: row.scope, user: row.user_id, id: row.request_id, status: row.status, leaseUntil: new Date(row.lease_until), progress: row.progress,
		}));
	}

	// ----- for the other files of this package -----
	/** @internal */ fn(name: string): string { return `${identifier(this.schema)}.idem_${name}`; }
	/** @internal How values get into a statement: bound where the driver prepares it, which saves planning it each time; else as literals. */
	values(): { list: string[]; bind: Bind } {
		const list: string[] = [];
		return { list, bind: this.driver.prepares ? (text) => `$${list.push(text)}` : literal };
	}
	/** @internal */ ids(key: Key, bind: Bind = literal): [string, string] {
		const text = (value: unknown, name: string) => {
			if (typeof value === 'number' ? !Number.isSafeInteger(value) : !['string', 'bigint'].includes(typeof value))
				throw invalid(`${name} is ${typeof value === 'number' ? value : value === null ? 'null' : typeof value}: it is to be a text, or an integer below 2^53`);
			const id = String(value);
			if (id === '' || Buffer.byteLength(id) > 255) throw invalid(`${name} has ${Buffer.byteLength(id)} bytes: it is to have 1 to 255`);
			checkText(id, name, invalid);
			return `${bind(id)}::pg_catalog.text`;
		};
		checkText(key.scope ?? '', 'scope', invalid);
		return [text(key.user, 'user'), text(key.id, 'id')];
	}
	/** @internal */ key(key: Key, bind: Bind = literal): string { return this.ids(key, bind).join(', '); }
	/** @internal After a loss, waits at least a second: the session that was lost may hold the request. */
	wait(wait: number | string | undefined, state: State, bind: Bind = literal): string {
		const interval = typeof wait === 'string' ? wait : `${wait ?? 0} s`;
		return `${bind(state.lost && (wait ?? 0) === 0 ? '1 s' : interval)}::pg_catalog.text::interval`;
	}
	/** @internal */ fingerprint(params: unknown, bind: Bind = literal): string {
		return params === undefined ? 'NULL::pg_catalog.bytea'
			: `${this.fn('fingerprint')}(${bind(params instanceof RawJson ? params.text : toJson(params, invalid))}::pg_catalog.text::pg_catalog.jsonb)`;
	}
	/** @internal */ claimSql(request: Request, state: State, bind: Bind = literal): string {
		return `SELECT pg_catalog.json_build_object('outcome', outcome, 'result', result, 'expires_at', expires_at)::pg_catalog.text FROM ${this.fn('try_claim')}(`
			+ `${this.key(request, bind)}, ${bind(request.scope ?? '')}::pg_catalog.text, ${this.fingerprint(request.params, bind)}, ${this.wait(request.wait, state, bind)})`;
	}
	/** @internal Undefined: claimed, so do the work. Throws what is neither claimed nor completed. */
	replay(answer: any, state: State): { value: unknown } | undefined {
		if (answer.outcome === 'claimed') return undefined;
		state.replayed = answer.outcome === 'completed';
		if (state.replayed) return { value: answer.result };
		if (answer.outcome === 'failed') throw new Failed('the request has failed', answer.result, true);
		const error = outcomeError(answer.outcome);
		throw state.lost && error.retryable ? new Again(error) : error;
	}
	/** @internal A transaction like that of once, without a claim. It is not repeated when the COMMIT is lost. */
	unprotected<T>(options: { attempts?: number }, handler: (tx: any) => Promise<T>): Promise<T> {
		const state = newState();
		return this.repeat(options, state, () => this.transaction(state, "SELECT '{}'", async (connection) =>
			({ value: await handler(connection.tx), commit: 'SELECT 1' })).catch((error) => { throw error instanceof Again && state.unknown ? error.error : error; }));
	}
	/** @internal */ query(sql: string, rights?: string): Promise<string | null> {
		return this.driver.query(sql).catch((error) => { throw translate(error, this.schema, rights); });
	}

	/**
	 * @internal One transaction: `begin` with BEGIN in one round trip, the work, and what it returns to commit with COMMIT in
	 * one round trip. Without `commit` it is rolled back. Throws Again where another attempt may help.
	 */
	async transaction<R>(state: State, begin: string, work: (connection: Connection, answer: any) => Promise<{ commit?: string | undefined; values?: string[]; value: R }>,
		isolation?: string, values: string[] = []): Promise<R> {
		const before = performance.now();
		const connection = await this.driver.connect().catch((error) => { throw looksLost(error) || state.unknown ? new Again(error) : error; });
		let stage: 'begin' | 'work' | 'commit' = 'begin';
		try {
			const text = await connection.begin(begin, values, isolation);
			state.waited = (performance.now() - before) / 1000;
			stage = 'work';
			const { commit, values: settled = [], value } = await work(connection, JSON.parse(text as string));
			if (commit === undefined) {
				connection.release(await failed(connection.rollback()));
			} else {
				if (!connection.lost) stage = 'commit';		// else it is not sent
				await connection.commit(commit, settled);
				connection.release(false);
			}
			return value;
		} catch (error) {
			// An error that looks like a lost connection may be the handler's own: only a ROLLBACK that fails tells.
			const broken = connection.lost || await failed(connection.rollback());
			connection.release(broken);
			if (error instanceof Again) throw error;
			if ((broken || stage === 'commit') && looksLost(error)) {		// at COMMIT also a timeout of the driver, after which the server goes on
				state.lost = true;
				if (stage === 'commit') state.unknown = true;
				throw new Again(error);
			}
			if (isConflict(error) || (stage === 'begin' && state.unknown)) throw new Again(error);
			throw stage === 'work' ? error : stage === 'commit' ? this.#commitError(error) : translate(error, this.schema);
		}
	}

	#commitError(error: unknown): unknown {
		const code = codeOf(error);
		if (code === '25P02') return new HandlerSwallowedError('a statement of the handler failed, and the handler caught its error: nothing was committed.'
			+ ' Let errors leave the handler, or roll back to a savepoint', { cause: error });
		if (code === 'ID410') return new HandlerEndedTransaction('the transaction does not hold the request any more: the handler has committed or'
			+ ' rolled back. What it committed stays, and the request then counts as executed', { cause: error });
		return translate(error, this.schema);
	}
	/** @internal */ attempts<R>(operation: OutcomeEvent['operation'], request: Request, attempt: (state: State) => Promise<R>): Promise<R> {
		return this.#observe(operation, request, newState(), (state) => this.repeat(request, state, attempt));
	}
	/** @internal */ async repeat<R>(options: { attempts?: number; signal?: AbortSignal }, state: State, attempt: (state: State) => Promise<R>): Promise<R> {
		const max = options.attempts ?? 5;
		for (;;) {
			if (!state.unknown) options.signal?.throwIfAborted();
			state.attempt++;
			try {
				return await attempt(state);
			} catch (error) {
				if (!(error instanceof Again)) throw error;
				const last: any = !state.unknown ? error.error
					: new CommitUnknown('the connection was lost at COMMIT: send the same request again, with the same id', { cause: error.error });
				if (state.attempt >= max) throw spent.add(last) && last;
			}
			await pause(state.attempt);
		}
	}

	async #observe<R>(operation: OutcomeEvent['operation'], request: Key, state: State, run: (state: State) => Promise<R>): Promise<R> {
		let outcome = 'error', thrown: unknown;
		try {
			only(operation, request);
			const result = await run(state);
			outcome = state.replayed ? 'completed' : 'claimed';
			return result;
		} catch (error) {
			thrown = error;
			if (error instanceof IdemError) outcome = error.outcome;
			throw error;
		} finally {
			try {
				this.#onOutcome?.({ operation, scope: request.scope ?? '', outcome, replayed: state.replayed, waited: state.waited, attempts: state.attempt || 1, error: thrown });
			} catch (error) { process.emitWarning(`idem: onOutcome failed: ${String(error)}`); }
		}
	}
}

/** @internal JSON that is a text already. */
export class RawJson { constructor(readonly text: string) {} }
