// What the drivers of the examples in JavaScript share: a database with the SQL of recipe.sql,
// processes that can be killed, and results as TAP.
//
// The database server is that of PGHOST, PGPORT, PGUSER. The database is a new one, and is dropped
// at the end; idem is in its schema "idem". HTTP goes over sockets in a temporary folder, or a free port of 127.0.0.1.
'use strict';

const assert = require('assert');
const { spawn, execFileSync } = require('child_process');
const fs = require('fs');
const os = require('os');
const path = require('path');

const home = path.dirname(require.main.filename);
const name = `example_${path.basename(home)}`;
const folder = fs.mkdtempSync(path.join(os.tmpdir(), 'example.'));
const processes = new Set();
let made = false, role;

const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

// ----- results, as TAP -----

let tests = 0, failures = 0;

function check(what, test) {
	tests++;
	try {
		test();
		console.log(`ok ${tests} - ${what}`);
	} catch (error) {
		failures++;
		console.log(`not ok ${tests} - ${what}`);
		console.log(`#   Failed test '${what}'\n${error.message}`.replace(/\n/g, '\n#   '));
	}
}

const is = (got, expected, what) => check(what, () => assert.deepStrictEqual(got, expected));
const note = (text) => console.log(`# ${text}`.replace(/\n/g, '\n# '));

// ----- the database -----

function psql(databaseName, sql) {
	execFileSync('psql', ['-X', '-q', '-v', 'ON_ERROR_STOP=1', '-d', databaseName], { input: sql, stdio: ['pipe', 'ignore', 'inherit'] });
}

// Makes the database, with the extension, recipe.sql, and the SQL of the driver
function makeDatabase(sql) {
	psql('postgres', `CREATE DATABASE ${name}`);
	made = true;
	psql(name, `CREATE SCHEMA idem; CREATE EXTENSION ${process.env.IDEM_EXTENSION || 'idem'} SCHEMA idem;` +
		fs.readFileSync(path.join(home, 'recipe.sql')) + sql);
}

// Makes a role with these rights, which start() can run a process as, and returns its name
function makeRole(rights) {
	psql('postgres', `CREATE ROLE ${name}`);
	role = name;
	psql(name, rights(role));
	return role;
}

// Returns the first row of the query when its column "ok" is true
async function waitFor(database, query, ...values) {
	for (const deadline = Date.now() + 180_000; Date.now() < deadline; await pause(10)) {
		const { rows: [row] } = await database.query(query, values);
		if (row.ok) return row;
	}
	throw new Error(`still not: ${query}`);
}

// ----- processes -----

// Starts a script of the example's folder; it is killed if this process ends. "ended" is a promise
// of its exit code, or of the signal that killed it.
function start(script, parameters, { env = {}, stdio = ['ignore', 'pipe', 'inherit'] } = {}) {
	const child = spawn('setpriv', ['--pdeathsig', 'KILL', process.execPath, path.join(home, script), ...parameters],
		{ stdio, env: { ...process.env, PGDATABASE: name, ...env } });
	processes.add(child);
	child.ended = new Promise((resolve) => child.once('exit', (code, signal) => {
		processes.delete(child);
		resolve(code === null ? signal : code);
	}));
	return child;
}

async function kill(child) {
	child.kill('SIGKILL');
	return child.ended;
}

// Drops the database, and ends this process
function cleanUp(code) {
	for (const child of processes) child.kill('SIGKILL');
	try {
		if (made) psql('postgres', `DROP DATABASE ${name} WITH (FORCE)`);
		if (role) psql('postgres', `DROP ROLE ${role}`);
	} catch {
		// The database server has stopped, too.
	}
	fs.rmSync(folder, { recursive: true, force: true });
	process.exit(code);
}

// Runs the driver. Its exit code is 0 if it ended, and no check failed.
function run(driver) {
	for (const signal of ['SIGINT', 'SIGTERM']) process.on(signal, () => cleanUp(1));
	driver().then(() => {
		console.log(`1..${tests}`);
		cleanUp(failures ? 1 : 0);
	}, (error) => {
		note((error && error.stack) || String(error));
		cleanUp(1);
	});
}

module.exports = { name, folder, pause, check, is, note, makeDatabase, makeRole, waitFor, start, kill, run, cleanUp };
