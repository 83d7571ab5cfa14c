// The workload of the reader's test, with pg or postgres (without COPY, and what COPY would insert comes from INSERT).
const [driver, modules] = process.argv.slice(2);
const load = (name) => require(require.resolve(name, { paths: [modules] }));

async function main() {
	let query, transaction, nested, copy, pipeline, end;
	if (driver === 'pg') {
		const client = new (load('pg').Client)();
		await client.connect();
		query = (text, values) => client.query(text, values).then(({ rows }) => rows);
		transaction = async (work) => {
			await query('BEGIN');
			try {
				await work(query);
				await query('COMMIT');
			} catch (error) {
				await query('ROLLBACK');
				throw error;
			}
		};
		nested = async (text, values) => {
			await query('SAVEPOINT s');
			await query(text, values).catch((error) => console.log(error.code));
			await query('ROLLBACK TO s');
		};
		copy = () => query('INSERT INTO reader (n, t) SELECT n, \'copied\' FROM generate_series(1, 100) n');
		pipeline = () => Promise.all([1, 2, 3].map((n) => client.query({ name: 'insert', text: 'INSERT INTO reader (n) VALUES ($1)', values: [n] })));
		end = () => client.end();
	} else {
		const sql = load('postgres')({ max: 1, fetch_types: false, onnotice: () => {} });
		query = (text, values) => sql.unsafe(text, values, { prepare: true });
		transaction = (work) => sql.begin((tx) => {
			nested = (text, values) => tx.savepoint((inner) => inner.unsafe(text, values, { prepare: true })).catch((error) => console.log(error.code));
			return work((text, values) => tx.unsafe(text, values, { prepare: true }));
		});
		copy = async () => {
			const stream = await sql`COPY reader (n, t) FROM STDIN`.writable();
			for (let n = 0; n < 100; n++) stream.write(`${n}\tcopied\n`);
			await new Promise((resolve, reject) => stream.on('error', reject).end(resolve));
		};
		pipeline = () => Promise.all([1, 2, 3].map((n) => sql`INSERT INTO reader (n) VALUES (${n})`));
		end = () => sql.end();
	}
	await query('SELECT 1');
	await transaction(async (query) => {
		for (let n = 0; n < 8; n++) await query('INSERT INTO reader (n, t) VALUES ($1, $2)', [n, 'x'.repeat(n)]);
		await nested('SELECT 1 / $1::int', [0]);
	});
	await copy();
	const [{ count: rows }] = await query('SELECT count(*)::int FROM reader');
	await pipeline();
	const [{ count }] = await query('SELECT count(*)::int FROM reader');
	console.log(rows, count, (await query('SELECT generate_series(1, $1::int)', [1000])).length);
	for (const table of ['conflict_a', 'conflict_b']) {
		await transaction(async (query) => {
			await query(`INSERT INTO ${table} (n) VALUES ($1)`, [1]);
			await query(`SELECT count(*) FROM ${table}`);
		}).catch((error) => console.log(error.code));
		console.log((await query(`SELECT count(*)::int FROM ${table}`))[0].count);
	}
	await end();
}

main();
