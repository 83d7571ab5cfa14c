// The page: a PGlite with the portable edition, and a client that pays and retries. "make try" puts PGlite and the SQL of
// the portable edition beside this file.

const SETUP = `CREATE TABLE accounts (id int PRIMARY KEY, balance numeric NOT NULL);
CREATE TABLE payments (id int GENERATED ALWAYS AS IDENTITY, account int, amount numeric);
INSERT INTO accounts VALUES (1, 100);

CREATE FUNCTION pay(account int, amount numeric) RETURNS jsonb LANGUAGE plpgsql AS $$
BEGIN
    UPDATE accounts SET balance = balance - amount
        WHERE id = account AND amount > 0 AND balance >= amount;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'account % cannot pay %', account, amount;
    END IF;
    INSERT INTO payments (account, amount) VALUES (account, amount);
    RETURN jsonb_build_object('paid', amount);
END $$;`;

const TABLES = {
	accounts: 'SELECT id, balance FROM accounts',
	payments: 'SELECT id, account, amount FROM payments ORDER BY id DESC',
	idem_claims: `SELECT request_id, state, result::text, to_char(expires_at, 'MM-DD HH24:MI') AS expires_at
		FROM idem_claims ORDER BY expires_at DESC, request_id DESC`,
};

const element = (id) => document.getElementById(id);
const make = (name, text = '', className = '') => Object.assign(document.createElement(name), { textContent: text, className });
let db, latest = 0, sent = 0;
let queue = Promise.resolve();		// what is clicked while the database is busy comes next
const shown = new Set();			// rows that the page has shown

async function showTables() {
	const tables = [];
	for (const [name, sql] of Object.entries(TABLES)) {
		const { fields, rows } = await db.query(sql, [], { rowMode: 'array' });
		const table = make('table');
		const head = make('tr');
		table.id = name;
		head.append(...fields.map((field) => make('th', field.name)));
		table.append(make('caption', name), head, ...rows.map((row) => {
			const text = name + JSON.stringify(row);
			const line = make('tr', '', shown.has(text) ? '' : 'new');
			shown.add(text);
			line.append(...row.map((value) => make('td', value)));
			return line;
		}));
		const box = make('div', '', 'table');
		box.append(table);
		tables.push(box);
	}
	element('tables').replaceChildren(...tables);
	element('count').textContent = sent ? `Sent ${sent} times, paid ${element('payments').rows.length - 1}.` : 'Ready.';
}

/** One attempt of a client: a transaction, whose SQL and answer are shown. */
async function attempt(what, id, amount) {
	const call = `SELECT idem_call('user 1', '${id}', 'pay(int, numeric)', '{"account": 1, "amount": ${amount}}');`;
	const outcome = 'SELECT idem_outcome();';
	let text, kind, sql;
	sent++;
	try {
		const [, called, said] = await db.exec(`BEGIN; ${call} ${outcome} COMMIT;`);
		const answer = JSON.stringify(called.rows[0].idem_call);
		if (element('lose').checked) {
			element('lose').checked = false;
			[text, kind] = ['The connection broke at COMMIT. Was it paid? The client cannot know: it retries.', 'lost'];
			sql = ['BEGIN;', call, outcome, 'COMMIT;    -- no answer'];
		} else {
			const first = said.rows[0].idem_outcome === 'claimed';
			[text, kind] = first ? [`Paid: ${answer}`, 'paid'] : [`The stored answer, not paid again: ${answer}`, 'answered'];
			sql = ['BEGIN;', `${call}    -- ${answer}`, `${outcome}    -- ${said.rows[0].idem_outcome}`, 'COMMIT;'];
		}
	} catch (error) {
		await db.exec('ROLLBACK');
		[text, kind] = [`Not paid. ${error.code}: ${error.message}`, 'refused'];
		sql = ['BEGIN;', `${call}    -- ${error.code}`, 'ROLLBACK;', ...(error.detail ? [`-- ${error.detail}`] : [])];
	}
	const entry = make('li');
	entry.append(make('span', `${what}: amount ${amount}, id “${id}”`, 'dim'), make('strong', text, kind), make('pre', sql.join('\n')));
	element('log').prepend(entry);
	await showTables();
}

function click(what) {
	if (what === 'Pay') latest++;
	const [id, amount] = [`payment ${latest}`, element('amount').valueAsNumber || 0];
	element('retry').disabled = false;
	queue = queue.then(() => attempt(what, id, amount)).catch(fail);
}

function fail(error) {
	console.error(error);
	element('count').textContent = `This page does not work here: ${error.message}`;
}

async function start() {
	element('setup').textContent = SETUP;
	const { PGlite } = await import('./pglite/index.js');
	const portable = await fetch('idem-portable-plain.sql');
	if (!portable.ok) throw new Error('idem-portable-plain.sql is missing; "make try" brings it');
	db = new PGlite();
	await db.exec(await portable.text());
	await db.exec(SETUP);
	await showTables();
	element('pay').onclick = () => click('Pay');
	element('retry').onclick = () => click('Retry');
	element('pay').disabled = false;
}

start().catch(fail);
