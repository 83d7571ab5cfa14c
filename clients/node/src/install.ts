// Installs the portable edition, and checks what is there. For the command line and for code.

import { readFileSync } from 'node:fs';
import { join } from 'node:path';
import { driverOf, identifier, literal, runnerOf, type Pool } from './driver';
import { failed } from './idem';

export interface InstallOptions {
	/** Default 'idem'. It is created where it is missing. */
	schema?: string;
	/** Roles that may claim and settle requests. */
	grant?: string | string[];
}
const file = () => readFileSync(join(__dirname, '..', 'sql', 'idem-portable-plain.sql'), 'utf8');

/** The text for a migration tool: the portable edition of this version, in one transaction of the tool. */
export function sql({ schema = 'idem', grant = [] }: InstallOptions = {}): string {
	return `CREATE SCHEMA IF NOT EXISTS ${identifier(schema)};\nSET LOCAL search_path = ${identifier(schema)};\n${file()}\n`
		+ [grant].flat().map((role) => `SELECT ${identifier(schema)}.idem_grant(${literal(role)}, 'app');\n`).join('');
}

/**
 * Installs the portable edition, or upgrades it; where the C edition is in the schema it only grants. Run it as the role
 * that is to own idem. `pool` as for `new Idem()`.
 */
export async function migrate(pool: Pool, options: InstallOptions = {}): Promise<string> {
	const schema = options.schema ?? 'idem';
	const driver = driverOf(pool);
	const extension = await driver.query(`SELECT 1::pg_catalog.text FROM pg_extension AS e JOIN pg_namespace AS n ON n.oid = e.extnamespace `
		+ `WHERE e.extname IN ('idem', 'idem_portable') AND n.nspname = ${literal(schema)}`);
	const grants = [options.grant ?? []].flat().map((role) => `SELECT ${identifier(schema)}.idem_grant(${literal(role)}, 'app')`);
	const connection = await driver.connect();
	try {
		await connection.run('BEGIN; SELECT 1');
		const send = runnerOf(connection.tx);
		for (const text of [...(extension ? [] : [sql({ schema })]), ...grants]) await send(text);
		await connection.run('SET LOCAL search_path = DEFAULT; COMMIT');
		connection.release(false);
	} catch (error) {
		connection.release(await failed(connection.run('ROLLBACK')));
		throw error;
	}
	return await driver.query(`SELECT ${identifier(schema)}.idem_version()`) as string;
}

/**
 * What `check` found: null is "none" or "the role may not see it". `rights`: whether the role may claim and settle. `searchPath`:
 * whether the schema is in it; this package does not need that. `cleaning`: who removes expired claims. `mend`: what to mend, one
 * sentence each; `ok`: nothing is. `notes`: what may be better, and is not wrong.
 */
export type CheckResult = { ok: boolean; edition: 'C' | 'portable' | null; version: string | null; role: string; rights: boolean;
	searchPath: boolean; preloaded: boolean | null; cleaning: string | null; mend: string[]; notes: string[] };

/** Looks at idem in the database of `pool`, with the rights of its role. */
export async function check(pool: Pool, { schema = 'idem' }: InstallOptions = {}): Promise<CheckResult> {
	const { query } = driverOf(pool);
	const name = identifier(schema);
	const base = JSON.parse(await query(`SELECT pg_catalog.json_build_object('role', current_user, 'schema', EXISTS (SELECT 1 FROM pg_namespace WHERE nspname = ${literal(schema)}),
		'function', (SELECT p.oid::pg_catalog.text FROM pg_proc AS p JOIN pg_namespace AS n ON n.oid = p.pronamespace
			WHERE n.nspname = ${literal(schema)} AND p.proname = 'idem_try_claim' AND pg_get_function_identity_arguments(p.oid) LIKE 'user_id text, request_id text%'),
		'extension', (SELECT e.extname FROM pg_extension AS e JOIN pg_namespace AS n ON n.oid = e.extnamespace WHERE n.nspname = ${literal(schema)} AND e.extname LIKE 'idem%'),
		'path', ${literal(schema)} = ANY (current_schemas(true)), 'preload', (SELECT setting ~ '\\midem\\M' FROM pg_settings WHERE name = 'shared_preload_libraries'))::pg_catalog.text`) as string);
	const mend: string[] = [], notes: string[] = [];
	const found: CheckResult = { ok: false, edition: null, version: null, role: base.role, rights: false, searchPath: base.path === true,
		preloaded: base.preload, cleaning: null, mend, notes };
	if (!base.function) {
		mend.push(`idem is not in the schema "${schema}" of this database: run "npx idem-pg install --schema ${schema}" as its owner.`);
		return found;
	}
	found.edition = base.extension === 'idem' ? 'C' : 'portable';
	found.rights = await query(`SELECT (has_schema_privilege(${literal(schema)}, 'USAGE') AND has_function_privilege(${base.function}::pg_catalog.oid, 'EXECUTE'))::pg_catalog.text`) === 'true';
	if (!found.rights) mend.push(`The role "${base.role}" may not call idem: run "npx idem-pg install --schema ${schema} --grant ${base.role}" as the owner of idem.`);
	found.version = await query(`SELECT ${name}.idem_version()`).catch(() => null);
	const mine = /"version": "([^"]*)"/.exec(readFileSync(join(__dirname, '..', 'package.json'), 'utf8'))?.[1] ?? '';
	if (found.version && found.version.split('.')[0] !== mine.split('.')[0]) mend.push(`The server has idem ${found.version}, this package is for ${mine}: install the same major version.`);
	else if (found.version && found.version.split('+')[0] !== mine) notes.push(`The server has idem ${found.version}, this package is ${mine}.`);
	found.cleaning = await query(`SELECT cleaning::pg_catalog.text FROM ${name}.idem_stat_cleanup`).catch(() => null);
	if (found.cleaning !== null && /^no/.test(found.cleaning)) mend.push(`Nobody removes expired claims (${found.cleaning}): ${found.edition === 'C'
		? "add idem to shared_preload_libraries, or call idem_cleanup_all() from a timer" : 'call idem_cleanup_all() from a timer, such as pg_cron'}.`);
	if (found.cleaning === null) notes.push(`Who removes expired claims is not known here: preload idem, or check as a role with the privileges "operator".`);
	if (found.edition === 'C' && found.preloaded === false) notes.push('idem is not in shared_preload_libraries: applications can then change its settings for themselves.');
	if (!found.searchPath) notes.push(`The schema "${schema}" is not in the search_path: this package does not need it, SQL of yours does.`);
	found.ok = mend.length === 0;
	return found;
}
