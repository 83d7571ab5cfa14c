-- A webhook receiver: each event of a provider takes effect once.
--
-- Problem: a provider (Stripe, GitHub, ...) delivers an event again until it gets a 2xx, hours
-- later too, and sometimes twice at once. A receiver that notes the event in one transaction and
-- acts on it in another acts twice, or never, when it dies in between.
-- Solution: server.mjs checks the signature, and claims the id of the event in the transaction
-- that acts on it. Any error, and a delivery while another one is at work (409), leaves the event
-- to the provider's next delivery.
-- Use it for effects in your database. For a call of another service, take 6_completer.
--
-- To copy: the row of idem_scopes, and server.mjs. The tables stand for yours.

-- Longer than the provider delivers again: Stripe does so for three days, and so does its
-- dashboard, by hand, for 30.
INSERT INTO idem.idem_scopes (scope, ttl) VALUES ('webhooks', '31 days');

CREATE TABLE invoices (id text PRIMARY KEY, paid numeric NOT NULL DEFAULT 0);
CREATE TABLE receipts (event text NOT NULL, invoice text NOT NULL REFERENCES invoices, amount numeric NOT NULL);
