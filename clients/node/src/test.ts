// For tests of your own code: idem in a PostgreSQL in the process, and faults that are hard to cause from outside.

import { deepStrictEqual } from 'node:assert';
import type { PGlite } from '@electric-sql/pglite' with { 'resolution-mode': 'import' };
import { literal } from './driver';
import { InProgress } from './errors';
import { Idem, type IdemOptions, type Key } from './idem';
import { migrate } from './install';

/** An Idem on a PGlite of its own, with faults. */
export interface TestIdem {
	idem: Idem<PGlite>;
	db: PGlite;
	/** The connection is lost at the next COMMIT: before the server has got it, or after it has committed. */
	loseCommit(when: 'before' | 'after'): void;
	/** The next COMMIT fails with this SQLSTATE; '40001' is a conflict, which is repeated. */
	fail(sqlstate: string): void;
	/** Another process is at work on this request, until the function that is returned is called. */
	hold(key: Key): Promise<() => Promise<void>>;
	/** The lease of this request lapses now. */
	lapse(key: Key): Promise<void>;
	/** Runs `fn`, which makes one request, `concurrent` times at once, with one lost COMMIT, and once more. Fails unless all got the
	 * same value and one of them executed; its own COMMIT may be the one that was lost. Returns the value. */
	executedOnce<T>(fn: () => Promise<{ value: T; replayed: boolean }>, options?: { concurrent?: number }): Promise<T>;
	close(): Promise<void>;
}

/** Takes a second or two: make one for a file of tests. */
export async function testIdem(options: IdemOptions = {}): Promise<TestIdem> {
	const { PGlite } = await import('@electric-sql/pglite');
	const db = new PGlite();
	await migrate(db, { schema: options.schema ?? 'idem' });
	const idem = new Idem<PGlite>(db, options);
	const faults: string[] = [];
	const connect = idem.driver.connect;
	idem.driver.connect = async () => {
		const connection = await connect();
		let lost = false;
		return Object.create(connection, { lost: { get: () => lost }, commit: {
			async value(sql: string) {
				const fault = faults.shift();
				await (!fault || fault === 'after' ? connection.commit(sql, []) : connection.rollback());
				if (!fault) return;
				if (fault !== 'after' && fault !== 'before') throw Object.assign(new Error(`a test made this ${fault}`), { code: fault });
				lost = true;
				throw Object.assign(new Error('a test lost this connection'), { code: '08006' });
			},
		} });
	};
	return {
		idem, db,
		loseCommit(when) { faults.push(when); },
		fail(sqlstate) { faults.push(sqlstate); },
		async hold(key) {
			const answer = JSON.parse(await idem.query(`SELECT to_json(l)::text FROM ${idem.fn('lease')}(${idem.key(key)}, '1 hour', ${literal(key.scope ?? '')}, wait => '0') AS l`) as string);
			if (answer.outcome !== 'claimed') throw new Error(`the request cannot be held: ${answer.outcome}`);
			return async () => { await idem.query(`SELECT ${idem.fn('release')}(${idem.key(key)}, ${answer.token}, ${literal(key.scope ?? '')})::text`); };
		},
		async lapse(key) {
			const [user, id] = idem.ids(key);
			const text = await idem.query(`WITH l AS (UPDATE "${idem.schema}".idem_claims SET lease_until = now() - interval '1 s' WHERE user_id = ${user} AND request_id = ${id} `
				+ `AND scope = ${literal(key.scope ?? '')} AND state = 'in_progress' RETURNING 1) SELECT count(*)::text FROM l`);
			if (text !== '1') throw new Error('this request has no lease');
		},
		async executedOnce(fn, { concurrent = 5 } = {}) {
			const patient = async () => {
				for (let n = 0; ; n++) {
					try { return await fn(); } catch (error) { if (!(error instanceof InProgress) || n === 100) throw error; }
					await new Promise((resolve) => setTimeout(resolve, 20));
				}
			};
			const before = faults.push('after');
			const answers = await Promise.all(Array.from({ length: concurrent }, patient));
			// A replay commits nothing, so it leaves the fault.
			if (answers.every((answer) => answer.replayed) && faults.length === before) throw new Error('the request was executed before: take a new id');
			faults.length = 0;
			answers.push(await patient());
			for (const answer of answers) deepStrictEqual(answer.value, answers[0]!.value);
			if (answers.filter((answer) => !answer.replayed).length > 1) throw new Error('the request was executed more than once');
			if (!answers.at(-1)!.replayed) throw new Error('the request is executed by each call: does its id change?');
			return answers[0]!.value;
		},
		close: () => db.close(),
	};
}
