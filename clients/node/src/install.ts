// Installs the portable edition, and checks what is there. For the command line and for code.

import { readFileSync } from 'node:fs';
import { join } from 'node:path';
import { driverOf, identifier, literal, runnerOf, type Pool } from './driver';
import { NoRights, codeOf } from './errors';
import { Idem } from './idem';

export interface InstallOptions {
	/** Default 'idem'. It is created where it is missing. */
	schema?: string;
	/** Roles that may claim and settle requests. */
	grant?: string | string[];
}

/** The text for a migration tool: the portable edition of this version, in one transaction of the tool. */
export function sql({ schema = 'idem', grant = [] }: InstallOptions = {}): string {
	const text = readFileSync(join(__dirname, '..', 'sql', 'idem-portable-plain.sql'), 'utf8');
	return `CREATE SCHEMA IF NOT EXISTS ${identifier(schema)};\nSET LOCAL search_path = ${identifier(schema)};\n${text}\n`
		+ [grant].flat().map((role) => `SELECT ${identifier(schema)}.idem_grant(${literal(role)}, 'app');\n`).join('');
}

/**
 * Installs the portable edition, or upgrades it; where the C edition is in the schema it only grants. Run it as the role
 * that is to own idem. `pool` as for `new Idem()`.
 */
export async function migrate(pool: Pool, options: InstallOptions = {}): Promise<string> {
	const schema = options.schema ?? 'idem';
	const idem = new Idem(pool, { schema });
	const extension = await idem.query(`SELECT 1::pg_catalog.text FROM pg_extension AS e JOIN pg_namespace AS n ON n.oid = e.extnamespace `
		+ `WHERE e.extname IN ('idem', 'idem_portable') AND n.nspname = ${literal(schema)}`);
	const grants = [options.grant ?? []].flat().map((role) => `SELECT ${identifier(schema)}.idem_grant(${literal(role)}, 'app')`);
	await idem.unprotected({ attempts: 1 }, async (tx) => {
		for (const text of [...(extension ? [] : [sql({ schema })]), ...grants]) await runnerOf(tx)(text);
	}).catch((error) => {
		throw codeOf(error) !== '42501' ? error : new NoRights('this role may not install idem: run it as the owner of the database, or as a role with CREATE on it;'
			+ ` or, to upgrade and to grant, as the owner of idem (${error.message})`, { cause: error });
	});
	return await idem.query(`SELECT ${idem.fn('version')}()`) as string;
}

/**
 * What `check` found, of `database` on its host: null is "none" or "the role may not see it". `rights`: whether the role may claim and settle. `searchPath`:
 * whether the schema is in it; this package does not need that. `cleaning`: who removes expired claims. `mend`: what to mend, one
 * sentence each; `ok`: nothing is. `notes`: what may be better, and is not wrong.
 */
export type CheckResult = { database: string; ok: boolean; edition: 'C' | 'portable' | null; version: string | null; role: string; rights: boolean;
	searchPath: boolean; preloaded: boolean | null; cleaning: string | null; mend: string[]; notes: string[] };

/** Looks at idem in the database of `pool`, with the rights of its role. */
export async function check(pool: Pool, { schema = 'idem' }: InstallOptions = {}): Promise<CheckResult> {
	const { query } = driverOf(pool), name = identifier(schema);
	const base = JSON.parse(await query(`SELECT pg_catalog.json_build_object('role', current_user, 'database', pg_catalog.format('%s at %s, port %s', pg_catalog.current_database(),
			coalesce(pg_catalog.host(pg_catalog.inet_server_addr()), 'a local socket'), pg_catalog.current_setting('port')),
		'rights', (SELECT has_schema_privilege(n.oid, 'USAGE') AND has_function_privilege(p.oid, 'EXECUTE') FROM pg_proc AS p
			WHERE p.pronamespace = n.oid AND p.proname = 'idem_try_claim' AND pg_get_function_identity_arguments(p.oid) LIKE 'user_id text, request_id text%'),
		'extension', (SELECT extname FROM pg_extension WHERE extnamespace = n.oid AND extname LIKE 'idem%'),
		'stranger', (SELECT pg_catalog.min(rolname::pg_catalog.text) FROM pg_roles WHERE NOT rolsuper AND pg_catalog.current_setting('is_superuser') = 'on' AND oid IN (
			SELECT proowner FROM pg_proc WHERE pronamespace = n.oid AND proname LIKE 'idem%' UNION SELECT relowner FROM pg_class WHERE relnamespace = n.oid AND relname LIKE 'idem%'
			UNION SELECT CASE nspowner WHEN 'pg_database_owner'::regrole THEN datdba ELSE nspowner END FROM pg_database WHERE datname = pg_catalog.current_database())),
		'path', n.nspname = ANY (current_schemas(true)), 'preload', (SELECT setting ~ '\\midem\\M' FROM pg_settings WHERE name = 'shared_preload_libraries'))::pg_catalog.text
		FROM (SELECT) AS one LEFT JOIN pg_namespace AS n ON n.nspname = ${literal(schema)}`) as string);
	const mend: string[] = [], notes: string[] = [];
	const found: CheckResult = { database: base.database, ok: false, edition: null, version: null, role: base.role, rights: base.rights === true, searchPath: base.path === true,
		preloaded: base.preload, cleaning: null, mend, notes };
	if (base.rights === null) mend.push(`idem is not in the schema "${schema}" of this database: run "npx idem-pg install --schema ${schema}" as its owner.`);
	else if (base.stranger) mend.push(`idem or its schema belongs to the role "${base.stranger}": check as that role, since a superuser would run its code.`);
	if (mend.length) return found;
	found.edition = base.extension === 'idem' ? 'C' : 'portable';
	if (!found.rights) mend.push(`The role "${base.role}" may not call idem: run "npx idem-pg install --schema ${schema} --grant ${base.role}" as the owner of idem.`);
	found.version = await query(`SELECT ${name}.idem_version()`).catch(() => null);
	const mine = /"version": "([^"]*)"/.exec(readFileSync(join(__dirname, '..', 'package.json'), 'utf8'))?.[1] ?? '';
	if (found.version && found.version.split('.')[0] !== mine.split('.')[0]) mend.push(`The server has idem ${found.version}, this package is for ${mine}: install the same major version.`);
	else if (found.version && found.version.split('+')[0] !== mine) notes.push(`The server has idem ${found.version}, this package is ${mine}.`);
	const [cleaning, late] = JSON.parse(await query(`SELECT pg_catalog.json_build_array(cleaning, oldest_expired_age > '1 day')::pg_catalog.text FROM ${name}.idem_stat_cleanup`).catch(() => null) ?? '[null]');
	found.cleaning = cleaning;
	// A fresh install has nothing to remove.
	if (/^no/.test(cleaning)) (late ? mend : notes).push(`${late ? 'Requests that expired more than a day ago are still there' : 'Nobody removes expired requests yet'}: run `
		+ `CALL ${name}.idem_cleanup_all() from a timer, as the owner of idem or an operator${found.edition === 'C' ? ', or add idem to shared_preload_libraries' : ''}.`);
	if (cleaning === null) notes.push(`Who removes expired claims is not known here: preload idem, or check as a role with the privileges "operator".`);
	if (found.edition === 'C' && found.preloaded === false) notes.push('idem is not in shared_preload_libraries: applications can then change its settings for themselves.');
	if (!found.searchPath) notes.push(`The schema "${schema}" is not in the search_path: this package does not need it, SQL of yours does.`);
	found.ok = mend.length === 0;
	return found;
}
