import { atMost, literal, type Pool, type Tx } from './driver';
import { CommitUnknown, Failed, HandlerEndedTransaction, LeaseLost, Refused, TimedOut, codeOf, isConflict, looksLost, translate } from './errors';
import { Again, newState, pause, type Idem, type Request, type Result, type State } from './idem';
import { toJson } from './json';

/** A request whose work is not one transaction. */
export interface LeaseRequest extends Omit<Request, 'isolation'> {
	/** How long nobody else may take the request over: seconds, or an interval such as '30 s' (the default). Renewed each third of it. */
	lease?: number | string;
	/** What a successor has to know from the beginning on, such as the ids that the work will use. */
	progress?: unknown;
}

/** What a leased request ended with, now or earlier. */
export interface LeaseResult<T> extends Omit<Result<T>, 'expiresAt'> {
	/** What the former holder had recorded; null if there was none. */
	previous: unknown;
}
/** @internal */ export async function leaseRequest<P extends Pool, T>(idem: Idem<P>, request: LeaseRequest, work: (lease: Lease<P>) => T | Promise<T>): Promise<LeaseResult<T>> {
	return idem.attempts('lease', request, async (state) => {
		const interval = typeof request.lease === 'string' ? request.lease : `${request.lease ?? 30} s`;
		const progress = request.progress === undefined ? 'NULL' : `${literal(toJson(request.progress))}::pg_catalog.jsonb`;
		const answer = await known(idem, request, state, true, `SELECT pg_catalog.json_build_object('outcome', outcome, 'result', result, 'progress', progress, 'token', token::pg_catalog.text, 'until', extract(epoch FROM lease_until)::pg_catalog.text, `
			+ `'seconds', extract(epoch FROM ${literal(interval)}::interval), 'xid', pg_catalog.pg_current_xact_id()::pg_catalog.text)::pg_catalog.text `
			+ `FROM ${idem.fn('lease')}(${idem.key(request)}, ${literal(interval)}::interval, ${literal(request.scope ?? '')}, ${idem.fingerprint(request.params)}, `
			+ `${idem.wait(request.wait, state)}, ${progress})`,
			async (_, answer) => answer.outcome === 'claimed' ? 'SELECT 1' : undefined);
		const stored = idem.replay(answer, state);
		if (stored) return { value: stored.value as T, replayed: true, previous: null };
		const lease = new Lease<P>(idem, Object.assign({}, request, { signal: undefined }), interval, answer);
		return lease.run(work).then((value) => ({ value, replayed: false, previous: lease.previous }), (error) => {
			throw error instanceof Again ? error.error : error;		// the work has begun: another attempt would run it again
		});
	});
}

// A transaction that is repeated when it is lost, but not when it has committed: the server tells by its number. After a crash it uses the
// number again: so the lease must end as this claim (`claims`) has set it, and not as before what was done under it.
async function known<P extends Pool>(idem: Idem<P>, request: LeaseRequest, state: State & { pending?: any }, claims: boolean, begin: string,
	work: (tx: Tx<P>, answer: any) => Promise<string | undefined>): Promise<any> {
	if (state.pending) {
		const ask = (sql: string) => idem.driver.query(`SELECT ${sql}`).catch((error) => {
			if (codeOf(error) === '22023') return 'aborted';		// a standby that has never heard of it was promoted
			throw new Again(error);
		});
		const status = await ask(`pg_catalog.pg_xact_status(${literal(state.pending.xid)}::pg_catalog.xid8)`);
		const end = await ask(`pg_catalog.concat(state, extract(epoch FROM lease_until)) FROM ${idem.fn('lookup')}(${idem.key(request)}, ${literal(request.scope ?? '')})`);
		if (status === 'committed' && (end === `in_progress${state.pending.until}`) === claims) return state.pending;
		if (status !== 'aborted' && status !== 'committed') throw new Again(new CommitUnknown('nobody knows yet whether the transaction has committed'));
		state.pending = undefined;
		state.unknown = false;
	}
	let last: any;
	const before = performance.now();
	return idem.transaction(state, begin, async (connection, answer) => {
		last = Object.assign(answer, { before });
		return { commit: await work(connection.tx, answer), value: answer };
	}).catch((error) => {
		if (state.unknown && error instanceof Again) state.pending = last;
		throw error;
	});
}

/** A request that this process holds. It is renewed by itself until it is settled or `work` ends. */
export class Lease<P extends Pool = Pool> {
	/** What the former holder had recorded as its progress; null if there was none, or if this is the first one. */
	readonly previous: unknown;
	readonly #idem: Idem<P>;
	readonly #request: LeaseRequest;
	readonly #interval: string;
	readonly #ms: number;
	readonly #token: string;
	readonly #abort = new AbortController();
	#ends: number;
	#beat: ReturnType<typeof setTimeout> | undefined;
	#end: ReturnType<typeof setTimeout> | undefined;
	#renewing: Promise<void> | undefined;
	#fenced = false;
	#recorded: string | undefined;		// within a fence: goes with its commit
	#over: { value: unknown } | undefined;
	/** @internal */ constructor(idem: Idem<P>, request: LeaseRequest, interval: string, answer: any) {
		[this.#idem, this.#request, this.#interval, this.#ms, this.#token, this.previous]
			= [idem, request, interval, answer.seconds * 1000, answer.token, answer.progress ?? null];
		// From before the call that set it: the answer may have been under way for long.
		this.#ends = answer.before + this.#ms;
	}

	/** Aborted when the lease is about to end, a tenth of it before, or is lost. Pass it to what the work waits for. */
	get signal(): AbortSignal {
		this.#look();
		return this.#abort.signal;
	}
	/** Milliseconds until the lease ends, unless it is renewed. */
	remaining(): number { return this.#fenced ? Infinity : Math.max(0, this.#ends - performance.now()); }
	/** Throws `LeaseLost` if `signal` is aborted. */
	check(): void { this.signal.throwIfAborted(); }

	/** Records what a successor has to know, and renews the lease. In `transaction` it is recorded by its commit. */
	async record(progress: unknown): Promise<void> {
		const text = toJson(progress);
		this.#alive();
		if (this.#fenced) this.#recorded = text;
		else await this.#idem.repeat(this.#request, newState(), () => this.#renew(text));
	}

	/**
	 * One transaction of the work. It begins with the fence: `LeaseLost` if another holder has the request. It is repeated
	 * after a conflict or a lost connection, but not if it has committed.
	 */
	async transaction<T>(work: (tx: Tx<P>) => T | Promise<T>): Promise<T> {
		let value: T | undefined;
		await this.#fence(async (tx) => {
			value = await work(tx);
			return this.#extend(this.#recorded);
		});
		return value as T;
	}

	/** Ends the request: its value is stored in one transaction with what `work` writes. Returns the value as a replay does. */
	settle<T>(value: T, work?: (tx: Tx<P>) => unknown): Promise<T> { return this.#settle('complete', value, work); }

	/** Nothing was done, or all of it was undone: gives the request up, so that the next one may begin anew. */
	async nothingHappened(): Promise<void> {
		this.#alive();
		if (this.#fenced) throw new Error('this lease is in a transaction, which holds the request: end it first');
		await this.#idem.repeat(this.#request, newState(), () =>
			this.#call(`SELECT ${this.#idem.fn('release')}(${this.#holder()})::pg_catalog.text`));
		this.#finish(undefined);
	}
	/** @internal */ async run<T>(work: (lease: Lease<P>) => T | Promise<T>): Promise<T> {
		try {
			// The claim may have waited for most of the lease that it set.
			if (performance.now() > this.#ends - this.#ms * 2 / 3) await this.#idem.repeat(this.#request, newState(), () => this.#renew());
			this.#schedule();
			const value = await work(this);
			if (this.#over) return this.#over.value === undefined ? value : this.#over.value as T;
			return await this.settle(value ?? null) as T;
		} catch (error) {
			if (!(error instanceof Refused) || this.#over) throw error;
			throw new Failed('the request is refused', await this.#settle('fail', error.value), false);
		} finally {
			this.#finish(undefined);
			// Or it would renew the lease that is left. But who was told to stop is not to be kept.
			if (!this.#abort.signal.aborted) await this.#quiet();
		}
	}

	async #settle(how: 'complete' | 'fail', settled: unknown, work?: (tx: Tx<P>) => unknown): Promise<any> {
		const text = toJson(settled), value = JSON.parse(text);
		await this.#fence(async (tx) => {
			await work?.(tx);
			return `${this.#idem.fn(how)}(${this.#idem.key(this.#request)}, ${literal(text)}::pg_catalog.jsonb, ${this.#token}, ${literal(this.#request.scope ?? '')})::pg_catalog.text`;
		});
		this.#finish({ value });
		return value;
	}

	async #fence(work: (tx: Tx<P>) => Promise<string>): Promise<void> {
		this.#alive();
		if (this.#fenced) throw new Error('this lease is in a transaction already: one at a time, and not one in another');
		// The heartbeat would wait for the fence, and nobody can take a request over that is fenced.
		this.#fenced = true;
		this.#schedule();
		let before = 0;
		const state = newState();
		try {
			await this.#quiet();
			await this.#idem.repeat(this.#request, state, () => {
				this.#recorded = undefined;
				return known(this.#idem, this.#request, state, false, `SELECT pg_catalog.json_build_object('fence', ${this.#idem.fn('fence')}(${this.#holder()})::pg_catalog.text, 'xid', pg_catalog.pg_current_xact_id()::pg_catalog.text, 'until', (SELECT extract(epoch FROM lease_until)::pg_catalog.text FROM ${this.#idem.fn('lookup')}(${this.#idem.key(this.#request)}, ${literal(this.#request.scope ?? '')})))::pg_catalog.text`,
					async (tx, { xid }) => {
						const settle = await work(tx);
						before = performance.now();
						// The token is good outside of the fence too: so see that this is still the transaction that has it.
						return `SELECT CASE WHEN pg_catalog.pg_current_xact_id() OPERATOR(pg_catalog.=) ${literal(xid)}::pg_catalog.xid8 THEN ${settle} `
							+ `ELSE pg_catalog.concat(pg_catalog.pg_current_xact_id(), ' is not the transaction of the fence')::int::pg_catalog.text END`;
					// A session of ours that was lost may have the fence.
					}).catch((error) => { throw error instanceof TimedOut ? new Again(error) : error; });
			});
			this.#ends = before + this.#ms;
		} catch (error) {
			throw this.#lost(error);
		} finally {
			this.#fenced = false;
			this.#schedule();
		}
	}
	// Waits for the heartbeat that is under way; but not for long: its connection may be dead.
	async #quiet(): Promise<void> {
		if (this.#renewing) await atMost(1000, this.#renewing);
	}
	#holder(): string { return `${this.#idem.key(this.#request)}, ${this.#token}, ${literal(this.#request.scope ?? '')}`; }
	#extend(progress?: string): string {
		return `${this.#idem.fn('extend')}(${this.#idem.key(this.#request)}, ${this.#token}, ${literal(this.#interval)}::interval, `
			+ `${progress === undefined ? 'NULL' : `${literal(progress)}::pg_catalog.jsonb`}, ${literal(this.#request.scope ?? '')})::pg_catalog.text`;
	}
	async #call(sql: string): Promise<void> {
		await this.#idem.driver.query(sql).catch((error) => {
			throw looksLost(error) || isConflict(error) ? new Again(error) : this.#lost(translate(error, this.#idem.schema));
		});
	}
	async #renew(progress?: string): Promise<void> {
		const before = performance.now();
		await this.#call(`SELECT ${this.#extend(progress)}`);
		this.#ends = Math.max(this.#ends, before + this.#ms);
		this.#schedule();
	}

	// A request that is lost, and no other error, ends the lease.
	#lost(error: unknown): unknown {
		if (codeOf(error) === '22P02' && String(error).includes('transaction of the fence')) {
			return new HandlerEndedTransaction('the work has committed or rolled back the transaction of the lease', { cause: error });
		}
		const lost = error instanceof LeaseLost ? error : codeOf(error instanceof Error ? error.cause : null) === 'ID410'
			? new LeaseLost('another holder has the request, or it is settled', { cause: (error as Error).cause }) : undefined;
		if (lost) this.#abort.abort(lost);
		return lost ?? error;
	}
	#alive(): void {
		if (this.#over) throw new LeaseLost('this lease is settled or given up');
	}
	#look(): void {
		if (!this.#fenced && !this.#over && performance.now() >= this.#ends - this.#ms / 10) {
			this.#abort.abort(new LeaseLost('the lease is about to end, and could not be renewed'));
		}
	}
	#schedule(): void {
		clearTimeout(this.#beat);
		clearTimeout(this.#end);
		if (this.#over || this.#fenced || this.#abort.signal.aborted) return;
		const now = performance.now();
		this.#end = setTimeout(() => this.#look(), Math.ceil(this.#ends - this.#ms / 10 - now) + 1);		// a timer drops the fraction
		this.#beat = setTimeout(() => this.#heartbeat(), this.#ends - this.#ms * 2 / 3 - now);
	}
	#heartbeat(): void {
		if (this.#renewing || this.#over || this.#fenced) return;
		this.#renewing = this.#renew().catch(async () => {
			await pause(0);
			if (!this.#over && !this.#fenced && !this.#abort.signal.aborted) {
				clearTimeout(this.#beat);		// record() may have set one
				this.#beat = setTimeout(() => this.#heartbeat(), this.#ms / 20);
			}
		}).finally(() => { this.#renewing = undefined; });
	}
	#finish(over: { value: unknown } | undefined): void {
		this.#over ??= over ?? { value: undefined };
		this.#schedule();
	}
}
