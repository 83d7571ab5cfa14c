// Sells trips: a charge at a payment provider, then a booking in our database. recipe.sql says why it is done so.
import { setTimeout } from 'node:timers/promises';
import { Refused } from 'idem-pg';

// What a client calls, and calls again; and a completer, without the order: it is in the progress from the beginning on.
export function sell(idem, provider, { user, id }, order, { lease = '30 s', longest = 60_000 } = {}) {
	return idem.lease({ user, id, scope: 'trip', params: order, progress: order, lease }, async (l) => {
		const trip = l.previous ?? order;
		if (!trip) return l.nothingHappened();		// it was dropped after it was listed
		const reference = `${user}/${id}`;

		let charge = trip.charge ?? (trip.begun && await ask(l, provider, reference, longest));
		if (!charge) {
			await l.record({ ...trip, begun: true });
			l.check();		// we may have been paused, and replaced
			charge = await provider.charge(reference, trip.amount, l.signal);
		}
		if (charge.declined) throw new Refused(charge);
		await l.record({ ...trip, charge });
		return l.settle({ charge: charge.id }, (tx) => tx.query('INSERT INTO bookings VALUES ($1, $2)', [reference, trip.to]));
	});
}

// A holder before us has begun to charge. 404 does not mean that it has not: its call may be under way, for as long as "longest".
async function ask(l, provider, reference, longest) {
	for (const end = Date.now() + longest; ; await setTimeout(longest / 20, null, { signal: l.signal })) {
		const over = Date.now() >= end;
		const charge = await provider.find(reference, l.signal);
		if (charge || over) return charge;
	}
}

// One round of the completer
export async function completeLapsed(idem, provider, options) {
	for (const trip of await idem.lapsed('trip')) {
		await sell(idem, provider, trip, undefined, options).catch(({ name, message }) => console.error(`${trip.id}: ${name} ${message}`));
	}
}

// The provider. What is thrown leaves the trip: it is not known whether the provider has charged, and a successor asks.
export function providerAt(url) {
	async function json(request, statuses) {
		const response = await request;
		if (!statuses.includes(response.status)) throw new Error(`the provider has answered ${response.status}`);
		return response.json();
	}
	return {
		// { id } or { declined }
		charge: (reference, amount, signal) =>
			json(fetch(`${url}/charges`, { method: 'POST', body: JSON.stringify({ reference, amount }), signal }), [201, 402]),
		// { id } or null
		find: (reference, signal) => json(fetch(`${url}/charges/${encodeURIComponent(reference)}`, { signal }), [200, 404]),
	};
}
