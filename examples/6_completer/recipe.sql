-- Trips: a charge at a payment provider, a booking in our database, a mail. Any process may die
-- at any point, and a completer finishes what it has left behind.
--
-- Problem: a process that dies between two steps leaves a trip that is paid and not booked, until
-- somebody looks. A job that simply runs the steps again pays again: the provider forgets
-- idempotency keys, and does not say so.
-- Solution: the trip is a lease. Its holder records each step before and after it. The completer
-- finds leases that lapsed, takes one over, asks the provider about a step that was begun and not
-- recorded as done, and goes on from there.
-- Use it when work calls other services and its client may never come back. (A client that sends
-- the request again does what the completer does.)
--
-- Who may be dead, and what happens then:
--
--	seller, between two steps		the completer goes on with the next step
--	seller, while it charges		the progress says "begun": the completer asks the provider
--	provider, while it charges		the seller does not know whether it charged, and leaves the trip;
--									the completer asks when the provider is back
--	seller, while it books			booking and progress are one transaction: both exist, or neither
--	seller, while it mails			the completer sends the mail again, with the same Message-ID
--	completer, at any point			it is a seller like the others: the next completer goes on
--	nobody: a seller was paused,	the provider refuses its charge, which comes too late; idem refuses
--	and comes back					its writes (ID410); a mail that it was about to send is sent again
--
-- What the provider must offer:
--
-- 1.	A lookup by a reference that we choose, which answers from what the provider has stored. A
--		search index that is updated later is not enough.
-- 2.	Its answer "there is none" must be final. So it must know of charges that are in progress,
--		and must refuse a request that comes after the deadline that we send with it. The deadline
--		is half a lease before anybody else may take over: the clocks may differ by half a lease.
--		Without a deadline a seller that was paused can pay a trip again that is long settled.
--
-- A provider that honours an idempotency key for longer than the ttl of the scope needs neither:
-- send the charge again with the same key.
--
-- What nobody can promise: that the mail is sent exactly once, because a mail cannot be looked up.
-- Here it is sent at least once; trips.js says where to choose "at most once" instead.
--
-- There are two forms. Trips has one lease with its progress. TripsByScopes has a scope for each
-- step as well, with a policy of its own. Its goOn() is shorter: it calls all steps, and idem returns
-- the stored result of those that are done. The trip itself is a lease there, too: a seller that
-- dies between two steps holds no step, and the completer would not find it.
--
-- To copy: book() and Trips of trips.js; or begin_step(), the claim in book_once(), and
-- TripsByScopes. Run completeLapsed() every few seconds, in as many processes as you like. Their
-- role needs idem_grant(..., 'app') and EXECUTE on idem_lapsed; for the second form on idem_forget,
-- too. Tables and steps stand for yours. A step that can fail for good after the charge needs
-- another step that gives the money back.

-- lapsed = reclaim: a completer may take the trip over. The ttl is longer than the completers can
-- be away: after it, a trip that nobody has finished is forgotten.
INSERT INTO idem_scopes (scope, ttl, lapsed) VALUES ('trip', '7 days', 'reclaim');

CREATE TABLE bookings (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, reference text NOT NULL, destination text NOT NULL);

-- ----- the first form: one lease, and its progress -----

-- The booking and the progress that has it, in one transaction. Begins with the fence: a holder
-- that was replaced gets ID410 and writes nothing.
CREATE FUNCTION book(traveller text, request text, token bigint, lease interval, progress jsonb) RETURNS jsonb
LANGUAGE plpgsql AS $$
DECLARE
	booking bigint;
	after jsonb;
BEGIN
	PERFORM idem_fence(traveller, request, token, 'trip');
	INSERT INTO bookings (reference, destination)
	VALUES ('trip/' || traveller || '/' || request, progress->>'to') RETURNING id INTO booking;
	after := progress || jsonb_build_object('booking', booking);
	PERFORM idem_extend(traveller, request, token, lease, after, 'trip');
	RETURN after;
END $$;

-- ----- the second form: a scope for each step -----

-- The ttl of the steps is longer: a step must not be forgotten before its trip is settled.
-- charge: nobody may repeat it before asking the provider. idem_heal() then records what the
-- provider knows, or idem_forget() that there was nothing.
-- mail: reclaim sends at least once. For at most once: unknown, and idem_heal() without asking.
INSERT INTO idem_scopes (scope, ttl, lapsed) VALUES
	('trip by scopes', '7 days', 'reclaim'),
	('trip by scopes: charge', '30 days', 'unknown'),
	('trip by scopes: book', '30 days', 'reclaim'),
	('trip by scopes: mail', '30 days', 'reclaim');

-- Begins a step that is a call of another service: renews the lease of the trip, and claims the
-- step, in one transaction. So only the holder of the trip (others get ID410) begins its steps, and
-- forgets them: otherwise two processes that have both asked could both charge. "again": nothing
-- was done so far. The step has half a lease, so that it has lapsed when the trip has; its end is
-- the deadline for the provider.
CREATE FUNCTION begin_step(traveller text, request text, trip_token bigint, step text, lease interval, again boolean,
	OUT outcome idem_outcome, OUT result jsonb, OUT token bigint, OUT deadline timestamptz) LANGUAGE plpgsql AS $$
DECLARE
	step_scope constant text := 'trip by scopes: ' || step;
BEGIN
	PERFORM idem_extend(traveller, request, trip_token, lease, scope => 'trip by scopes');
	IF again THEN
		PERFORM idem_forget(traveller, request, step_scope);
	END IF;
	SELECT c.outcome, c.result, c.token, c.lease_until INTO outcome, result, token, deadline
	FROM idem_lease(traveller, request, scope => step_scope, wait => '0', lease => lease / 2) c;
END $$;

-- A step in our database needs no lease: claim, booking and result are one transaction. A seller
-- that was replaced may call it, too: it gets the booking that exists.
CREATE FUNCTION book_once(traveller text, request text, reference text, destination text) RETURNS jsonb
LANGUAGE plpgsql AS $$
DECLARE
	booking bigint;
BEGIN
	IF idem_claim(traveller, request, 'trip by scopes: book') THEN
		INSERT INTO bookings (reference, destination) VALUES (reference, destination) RETURNING id INTO booking;
		PERFORM idem_complete(to_jsonb(booking));
	END IF;
	RETURN idem_result();
END $$;
