#!/usr/bin/env node
import { createRequire } from 'node:module';
import { join } from 'node:path';
import { parseArgs } from 'node:util';
import { check, migrate, sql } from './install';
const usage = `usage: idem-pg install [--schema idem] [--grant ROLE]... [--url postgres://...]   install or upgrade the portable edition
       idem-pg check   [--schema idem] [--url postgres://...]                     what is there, and what to mend
       idem-pg sql     [--schema idem] [--grant ROLE]...                          the text for a migration tool
The database is that of --url, of DATABASE_URL, or of PGHOST, PGDATABASE and so on. Exit code: 0 well, 1 something to mend, 2 failed.`;

// The driver of the project in which this runs
function connect(url: string | undefined): { pool: any; end: () => Promise<unknown> } {
	for (const from of [join(process.cwd(), 'package.json'), __filename]) for (const name of ['pg', 'postgres']) {
		let driver: any;
		try { driver = createRequire(from)(name); } catch { continue; }
		const pool = name === 'pg' ? new driver.Pool({ max: 1, ...(url && { connectionString: url }) })
			: (driver.default ?? driver)(...(url ? [url] : []), { max: 1, fetch_types: false, onnotice: () => {} });
		return { pool, end: () => pool.end() };
	}
	throw new Error('install a driver first: npm install pg');
}
async function main(): Promise<number> {
	const { values, positionals } = parseArgs({ allowPositionals: true, options: {
		schema: { type: 'string', default: 'idem' }, grant: { type: 'string', multiple: true, default: [] }, url: { type: 'string' }, help: { type: 'boolean' },
	} });
	const [command] = positionals, options = { schema: values.schema as string, grant: values.grant as string[] };
	if (values.help || positionals.length !== 1 || !['install', 'check', 'sql'].includes(command as string)) {
		console.error(usage);
		return values.help ? 0 : 2;
	}
	if (command === 'sql') return process.stdout.write(sql(options)), 0;
	const { pool, end } = connect((values.url as string | undefined) ?? process.env.DATABASE_URL);
	try {
		if (command === 'install') {
			console.log(`idem ${await migrate(pool, options)} is in the schema "${options.schema}"${options.grant.length ? `, for ${options.grant.join(', ')}` : ''}`);
			return 0;
		}
		const { mend, notes, ok, ...found } = await check(pool, options);
		for (const [name, value] of Object.entries(found)) console.log(`${name.padEnd(12)} ${value ?? 'not known'}`);
		for (const text of notes) console.log(`note: ${text}`);
		for (const text of mend) console.log(`mend: ${text}`);
		return ok ? 0 : 1;
	} finally {
		await end();
	}
}

main().then((code) => { process.exitCode = code; }, (error) => {
	console.error(`idem-pg: ${error.message || error.code || error}${error.hint ? `\n${error.hint}` : ''}`);
	process.exitCode = 2;
});
