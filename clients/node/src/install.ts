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

// Whoever may make objects in a schema of the search_path can plant an operator there, which any = or LIKE may then call.
const PIN = 'SET LOCAL search_path = pg_catalog, pg_temp; ';
/** Who owns idem, or a part of it, where its code would get rights that the owner has not. */
const stranger = (schema: string) => `(SELECT min(r.rolname::text) FROM pg_roles AS r, pg_roles AS me, pg_namespace AS n
	WHERE me.rolname IN (current_user, session_user) AND (me.rolsuper OR me.rolcreaterole) AND n.nspname = ${literal(schema)} AND NOT r.rolsuper AND r.oid <> me.oid AND r.oid IN (
		SELECT proowner FROM pg_proc WHERE pronamespace = n.oid AND proname ^@ 'idem' UNION SELECT relowner FROM pg_class WHERE relnamespace = n.oid AND relname ^@ 'idem'
		UNION SELECT CASE n.nspowner WHEN 'pg_database_owner'::regrole THEN datdba ELSE n.nspowner END FROM pg_database WHERE datname = current_database()))`;
const grants = (schema: string, roles: string | string[]) => `${PIN}DO $idem$ DECLARE other constant text := ${stranger(schema)}; BEGIN IF other IS NOT NULL THEN
	RAISE 'idem or its schema belongs to "%": install as that role, or its code would run with your rights', other USING ERRCODE = '55000';
END IF; END $idem$;\n${[roles].flat().map((role) => `SELECT ${identifier(schema)}.idem_grant(${literal(role)}::regrole, 'app'::text);\n`).join('')}`;

/** The text for a migration tool: the portable edition of this version, in one transaction of the tool. */
export function sql({ schema = 'idem', grant = [] }: InstallOptions = {}): string {
	const text = readFileSync(join(__dirname, '..', 'sql', 'idem-portable-plain.sql'), 'utf8');
	return `SELECT pg_catalog.set_config('idem_pg.path', pg_catalog.current_setting('search_path'), true);
${PIN}DO $idem$ BEGIN IF NOT EXISTS (SELECT FROM pg_namespace WHERE nspname = ${literal(schema)}) THEN CREATE SCHEMA ${identifier(schema)}; END IF; END $idem$;
SET LOCAL search_path = ${identifier(schema)};\n${text}\n${grants(schema, grant)}SELECT pg_catalog.set_config('search_path', pg_catalog.current_setting('idem_pg.path'), true);\n`;
}

/**
 * Installs the portable edition, or upgrades it; where the C edition is in the schema it only grants. Run it as the role
 * that is to own idem. `pool` as for `new Idem()`.
 */
export async function migrate(pool: Pool, options: InstallOptions = {}): Promise<string> {
	const schema = options.schema ?? 'idem';
	const idem = new Idem(pool, { schema });
	const extension = await idem.query(`${PIN}SELECT 1::text FROM pg_extension AS e JOIN pg_namespace AS n ON n.oid = e.extnamespace `
		+ `WHERE e.extname IN ('idem', 'idem_portable') AND n.nspname = ${literal(schema)}`);
	await idem.unprotected({ attempts: 1 }, async (tx) => {
		await runnerOf(tx)(extension ? grants(schema, options.grant ?? []) : sql({ ...options, schema }));
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
	const driver = driverOf(pool), name = identifier(schema), query = (text: string) => driver.query(PIN + text);
	const path: string[] = JSON.parse(await driver.query('SELECT pg_catalog.array_to_json(pg_catalog.current_schemas(true))::pg_catalog.text') as string);
	const base = JSON.parse(await query(`SELECT json_build_object('role', current_user, 'database', format('%s at %s, port %s', current_database(),
			coalesce(host(inet_server_addr()), 'a local socket'), current_setting('port')),
		'rights', (SELECT has_schema_privilege(n.oid, 'USAGE') AND has_function_privilege(p.oid, 'EXECUTE') FROM pg_proc AS p WHERE p.pronamespace = n.oid
			AND p.proname = 'idem_try_claim' AND pg_get_function_identity_arguments(p.oid) ^@ 'user_id text, request_id text' ORDER BY p.oid LIMIT 1),
		'extension', (SELECT extname FROM pg_extension WHERE extnamespace = n.oid AND extname ^@ 'idem'), 'stranger', ${stranger(schema)},
		'preload', (SELECT setting ~ '\\midem\\M' FROM pg_settings WHERE name = 'shared_preload_libraries'))::text
		FROM (SELECT) AS one LEFT JOIN pg_namespace AS n ON n.nspname = ${literal(schema)}`) as string);
	const mend: string[] = [], notes: string[] = [];
	const found: CheckResult = { database: base.database, ok: false, edition: null, version: null, role: base.role, rights: base.rights === true, searchPath: path.includes(schema),
		preloaded: base.preload, cleaning: null, mend, notes };
	if (base.rights === null) mend.push(`idem is not in the schema "${schema}" of this database: run "npx idem-pg install --schema ${schema}" as its owner.`);
	else if (base.stranger) mend.push(`idem or its schema belongs to the role "${base.stranger}": check as that role, or its code would run with your rights.`);
	if (mend.length) return found;
	found.edition = base.extension === 'idem' ? 'C' : 'portable';
	if (!found.rights) mend.push(`The role "${base.role}" may not call idem: run "npx idem-pg install --schema ${schema} --grant ${base.role}" as the owner of idem.`);
	found.version = await query(`SELECT ${name}.idem_version()`).catch(() => null);
	const mine = /"version": "([^"]*)"/.exec(readFileSync(join(__dirname, '..', 'package.json'), 'utf8'))?.[1] ?? '';
	if (found.version && found.version.split('.')[0] !== mine.split('.')[0]) mend.push(`The server has idem ${found.version}, this package is for ${mine}: install the same major version.`);
	else if (found.version && found.version.split('+')[0] !== mine) notes.push(`The server has idem ${found.version}, this package is ${mine}.`);
	const [cleaning, late] = JSON.parse(await query(`SELECT json_build_array(cleaning, oldest_expired_age > '1 day')::text FROM ${name}.idem_stat_cleanup`).catch(() => null) ?? '[null]');
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
