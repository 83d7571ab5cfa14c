// Receives the webhooks of a payment provider.
//
//	WEBHOOK_SECRET=... node server.mjs SOCKET		the database is that of PGHOST, PGDATABASE, ...
import { createHmac, timingSafeEqual } from 'node:crypto';
import express from 'express';
import pg from 'pg';
import { Idem, reply } from 'idem-pg';

const idem = new Idem(new pg.Pool({ options: '-c client_connection_check_interval=1s' }));
const app = express();

// Signature: t=SECONDS,v1=HMAC of "SECONDS.BODY", as Stripe has it; over the bytes as they came, so before any parser of JSON.
function isSigned(header = '', body) {
	const [, time, given] = /^t=(\d+),v1=([0-9a-f]{64})$/.exec(header) ?? [];
	if (!given || Math.abs(Date.now() / 1000 - time) > 300) return false;
	return timingSafeEqual(Buffer.from(given, 'hex'), createHmac('sha256', process.env.WEBHOOK_SECRET).update(`${time}.`).update(body).digest());
}

app.post('/webhooks', express.raw({ type: '*/*' }), (req, res, next) => isSigned(req.headers.signature, req.body) ? next() : res.sendStatus(401));

app.post('/webhooks', idem.http({
	scope: 'webhooks',
	user: () => 'provider',			// the party that chooses the ids, with its account if you have several
	key: (r) => r.json?.id,			// GitHub: r.headers['x-github-delivery']
	fingerprint: () => null,		// a redelivery may differ, by the number of attempts, say
}, async (tx, { json: { id, type, data } }) => {
	if (type === 'invoice.paid') {
		await tx.query('INSERT INTO receipts VALUES ($1, $2, $3)', [id, data.invoice, data.amount]);
		await tx.query('UPDATE invoices SET paid = paid + $2 WHERE id = $1', [data.invoice, data.amount]);
	}
	return reply(204);				// other types too: otherwise the provider sends them again
}));

// An error rolls back, and the provider delivers the event again.
app.use((error, req, res, next) => {
	console.error(error.message);
	res.sendStatus(500);
});

app.listen(process.argv[2], (error) => console.log(error ?? 'listening'));
