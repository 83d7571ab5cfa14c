// Executes each HTTP request with an Idempotency-Key once, in the transaction that claims its key and stores its response.
//
//	node server.mjs SOCKET		the database is that of PGHOST, PGDATABASE, ...
//
//	curl --unix-socket SOCKET --include http://localhost/payments --json '{"payee": "bob", "amount": 1, "reference": "rent"}' \
//		--header 'Authorization: Bearer ann' --header 'Idempotency-Key: 1'
import express from 'express';
import pg from 'pg';
import { Idem, reply } from 'idem-pg';

// A session whose server has died ends within a second, and its key is free again.
const idem = new Idem(new pg.Pool({ options: '-c client_connection_check_interval=1s' }));
const app = express();

// Replace this by yours. Here the token is the name of the user.
app.use((req, res, next) => (req.user = /^Bearer (\w+)$/.exec(req.headers.authorization)?.[1]) ? next() : res.sendStatus(401));

app.post('/payments', idem.http({ scope: 'payments', user: (r) => r.native.user }, async (tx, { json, native: { user } }) => {
	const { payee, amount, reference } = json;
	const { rows: [{ id }] } = await tx.query('SELECT pay($1, $2, $3, $4) AS id', [user, payee, amount, reference]);
	return id ? reply(201, { id, payer: user, payee, amount }, { Location: `/payments/${id}` }) : reply(402, 'insufficient funds\n');
}));

// Without it Express shows the client the stack. 22 and 23: data that the tables do not accept. Nothing was stored: the key can be used again.
app.use((error, req, res, next) => res.sendStatus(/^2[23]...$/.test(error.code) ? 400 : 500));

app.listen(process.argv[2], (error) => console.log(error ?? 'listening'));
