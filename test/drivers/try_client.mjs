// The program of doc/drivers.md for the client. Called by test/drivers/try.
import { pay, pool } from './pay_client.mjs';

const [, , , account, request, amount] = process.argv;
try {
	console.log(200, JSON.stringify((await pay(Number(account), request, Number(amount))).value));
} catch (error) {
	if (!error.outcome && error.code !== '40001') throw error;
	console.log(error.status ?? 503, error.message);
}
await pool.end();
