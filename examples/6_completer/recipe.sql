-- Trips: a charge at a payment provider, and a booking in our database. Any process may die at any point, and a
-- completer finishes what it has left behind.
--
-- Problem: a process that dies between the two leaves a trip that is paid and not booked, until somebody looks. A job
-- that simply runs the steps again pays again. One that asks the provider first, and takes 404 for "not charged", pays
-- again too: the call of the dead process may be under way.
-- Solution: the trip is a lease, which the client for Node renews as long as its holder lives. The holder records that it
-- begins to charge, and then the charge. A successor that finds "begun" asks the provider until it knows the charge, or
-- until no call of a holder before can be executed any more. The booking is one transaction with the end of the lease.
-- Use it when work calls other services and its client may never come back.
--
-- Who may be dead, and what happens then:
--
--	seller, before or while it charges	the completer asks the provider, and charges if there was no charge
--	seller, after it has charged		the completer asks, or reads the charge in the progress, and books
--	seller, while it books				booking and end are one transaction: both exist, or neither
--	provider, while it charges			the seller does not know whether it charged, and leaves the trip to a completer
--	completer, at any point				it is a seller like the others: the next completer goes on
--	nobody: a seller was paused,		its lease has ended: it does not charge (check), and idem refuses its booking
--	and comes back
--
-- What the provider must offer: a lookup by a reference that we choose, which answers from what it has stored; and a
-- longest time of a call. A provider that keeps idempotency keys for longer than the ttl of the scope needs neither:
-- send the charge again with the same key. What is left: a process that is paused between the check and the sending. Only
-- a key, or a deadline that the provider refuses to exceed, closes that.
--
-- To copy: the row of idem_scopes, and trips.mjs. Run completeLapsed() every few seconds, in as many processes as you
-- like. Their role needs idem_grant(..., 'app') and EXECUTE on idem_lapsed.

-- lapsed = reclaim: a completer may take the trip over. The ttl is longer than the completers can
-- be away: after it, a trip that nobody has finished is forgotten.
INSERT INTO idem.idem_scopes (scope, ttl, lapsed) VALUES ('trip', '7 days', 'reclaim');

CREATE TABLE bookings (reference text NOT NULL, destination text NOT NULL);
