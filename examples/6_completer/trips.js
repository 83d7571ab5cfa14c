// Sells trips in three steps: a charge at a payment provider, a booking in our database, a mail.
// A completer finishes what a dead process has left behind. recipe.sql says why it is done so.
//
// To copy: Trips, or TripsByScopes, and of Provider what your provider has. The steps stand for
// yours.
//
//	query(text, values)						runs SQL, returns rows
//	send(method, path, headers, body)		returns { status, body }, or throws: there is no answer in time
'use strict';

// It is unknown whether the provider has done what we asked for. The holder stops and leaves the
// trip: when the lease has lapsed, and so the deadline has passed, a completer asks the provider.
class Unclear extends Error {}

// A jsonb parameter: pg would take a string or an array for something else.
const json = JSON.stringify;

// ----- the provider -----

class Provider {
	constructor(send) {
		this.send = async (...request) => {
			try {
				return await send(...request);
			} catch (error) {
				throw new Unclear(error.message);
			}
		};
	}

	// Returns { id } or { declined }; null: it was too late, and nothing was charged.
	async charge(reference, amount, deadline) {
		const { status, body } = await this.send('POST', '/charges',
			{ 'Idempotency-Key': reference, 'Not-After': deadline.toISOString() }, { reference, amount });
		if (status === 201 || status === 402) return body;
		if (status === 410) return null;
		throw new Unclear(`a charge was answered ${status}`);
	}

	// Returns { id }; null: nothing was charged, and no earlier request will be.
	async find(reference) {
		const { status, body } = await this.send('GET', `/charges/${encodeURIComponent(reference)}`);
		if (status === 200) return body;
		if (status === 404) return null;
		throw new Unclear(`a lookup was answered ${status}`);
	}

	async mail(id, to, text) {
		const { status } = await this.send('POST', '/mails', {}, { id, to, text });
		if (status !== 202) throw new Unclear(`a mail was answered ${status}`);
	}
}

// ----- one lease with its progress -----

class Trips {
	constructor({ query, send, lease = '1 minute' }) {
		this.query = query;
		this.provider = new Provider(send);
		this.lease = lease;
		this.scope = 'trip';
	}

	async one(text, ...values) {
		return (await this.query(text, values))[0];
	}

	// The progress starts as the order itself: it is all that the completer gets to know.
	claim(user, request, order) {
		return this.one(`
			SELECT outcome, result, progress, token
			FROM idem_lease($1, $2, scope => $3, wait => '0', lease => $4, progress => $5)`,
		user, request, this.scope, this.lease, order && json(order));
	}

	// What a client calls, and calls again after Unclear and in_progress: returns { outcome, result } as
	// idem_lease does
	async buy(user, request, order) {
		const claim = await this.claim(user, request, order);
		if (claim.outcome !== 'claimed') return claim;
		return this.goOn(user, request, claim.token, claim.progress || order);
	}

	// One round of the completer. Run as many completers as you like, as often as you like.
	async completeLapsed(limit) {
		const lapsed = await this.query('SELECT user_id, request_id FROM idem_lapsed($1, $2)', [this.scope, limit]);
		for (const { user_id: user, request_id: request } of lapsed) {
			const claim = await this.claim(user, request, null);
			// Its holder, its client or another completer was faster.
			if (claim.outcome !== 'claimed') continue;
			// Somebody has dropped the trip since it was listed, and we have claimed a new one.
			if (!claim.progress) {
				await this.query('SELECT idem_release($1, $2, $3, $4)', [user, request, claim.token, this.scope]);
				continue;
			}
			try {
				await this.goOn(user, request, claim.token, claim.progress);
			} catch (error) {
				if (error instanceof Unclear) return;			// the provider has trouble: end this round
				if (error.code !== 'ID410') throw error;		// ID410: we were replaced
			}
		}
	}

	// Does all steps that the progress does not have, and settles the trip
	async goOn(user, request, token, progress) {
		const trip = { user, request, token, progress, reference: `${this.scope}/${user}/${request}` };

		if (!progress.charge || progress.charge === 'begun') {
			const charge = await this.charge(trip);
			if (charge.declined) return this.fail(trip, charge);
			await this.record(trip, { charge: charge.id });
		}
		if (!progress.booking) await this.book(trip);
		// A mail cannot be looked up. Here it is sent at least once. For at most once, send it only if
		// progress.mail is not "begun" yet.
		await this.record(trip, { mail: 'begun' });
		const mail = await this.mail(trip);
		return this.settle(trip, { charge: progress.charge, booking: progress.booking, mail });
	}

	// Renews the lease, and records what a successor must know. Returns the deadline for what is sent
	// to the provider: half a lease before anybody can take over, so that the clocks may differ.
	async record(trip, more) {
		Object.assign(trip.progress, more);
		const { deadline } = await this.one(`
			SELECT idem_extend($1, $2, $3, $4, $5, $6) - $4::interval / 2 AS deadline`,
		trip.user, trip.request, trip.token, this.lease, json(trip.progress), this.scope);
		return deadline;
	}

	async charge(trip) {
		const { reference, progress } = trip;
		// A holder before us may have charged.
		let charge = progress.charge === 'begun' ? await this.provider.find(reference) : null;
		for (let attempt = 1; !charge; attempt++) {
			if (attempt > 3) throw new Unclear('too late for the provider, three times: compare the clocks');
			const deadline = await this.record(trip, { charge: 'begun' });
			charge = await this.provider.charge(reference, progress.amount, deadline);
		}
		return charge;
	}

	// The booking and its record are one transaction, so that there is nothing to ask afterwards.
	async book(trip) {
		const { progress } = await this.one('SELECT book($1, $2, $3, $4, $5) AS progress',
			trip.user, trip.request, trip.token, this.lease, json(trip.progress));
		Object.assign(trip.progress, progress);
	}

	async mail({ reference, user, progress }) {
		// The same id each time, by which the reader's mail program can drop the second one
		const id = `<${reference}>`;
		await this.provider.mail(id, user, `You travel to ${progress.to}.`);
		return id;
	}

	async settle({ user, request, token }, result) {
		await this.one('SELECT idem_complete($1, $2, $3, $4, $5)', user, request, json(result), token, this.scope);
		return { outcome: 'completed', result };
	}

	async fail({ user, request, token }, error) {
		await this.one('SELECT idem_fail($1, $2, $3, $4, $5)', user, request, json(error), token, this.scope);
		return { outcome: 'failed', result: error };
	}
}

// ----- the second form: a scope for each step -----

class TripsByScopes extends Trips {
	constructor(parameters) {
		super(parameters);
		this.scope = 'trip by scopes';
	}

	// Calls all steps: one that is done returns its stored result
	async goOn(user, request, token, order) {
		const reference = `${this.scope}/${user}/${request}`;
		const trip = { user, request, token, progress: order, reference };

		const charge = await this.step(trip, 'charge',
			(deadline) => this.provider.charge(reference, order.amount, deadline),
			() => this.provider.find(reference));
		if (charge.declined) return this.fail(trip, charge);
		const { booking } = await this.one('SELECT book_once($1, $2, $3, $4) AS booking', user, request, reference, order.to);
		const mail = await this.step(trip, 'mail', () => this.mail(trip));
		return this.settle(trip, { charge: charge.id, booking, mail });
	}

	// One step outside of the database. work(deadline) does it, and returns null if nothing was done;
	// ask() finds what an earlier attempt did, or null.
	async step({ user, request, token }, name, work, ask) {
		const scope = `${this.scope}: ${name}`;

		for (let attempt = 1; attempt <= 3; attempt++) {
			const step = await this.one('SELECT * FROM begin_step($1, $2, $3, $4, $5, $6)',
				user, request, token, name, this.lease, attempt > 1);
			if (step.outcome === 'completed') return step.result;
			if (step.outcome === 'unknown') {
				const found = await ask();
				if (!found) continue;		// the next attempt forgets the step, and claims it
				await this.one('SELECT idem_heal($1, $2, $3, $4)', user, request, json(found), scope);
				return found;
			}
			if (step.outcome !== 'claimed') break;
			const result = await work(step.deadline);
			if (!result) continue;
			await this.one('SELECT idem_complete($1, $2, $3, $4, $5)', user, request, json(result), step.token, scope);
			return result;
		}
		throw new Unclear(`the step ${name} could not be begun`);
	}
}

module.exports = { Trips, TripsByScopes, Unclear };
