-- Payments over HTTP, with the header Idempotency-Key.
--
-- Problem: middleware that stores responses under the key in a store of its own loses the
-- response when the server dies between the work and storing it. The retry pays again.
-- Solution: server.mjs leaves the key to the client for Node, which claims it, calls the
-- handler, and stores the response (any bytes), all in one transaction. The handler, here
-- pay(), knows nothing of keys.
-- Use it for an HTTP API whose clients send an Idempotency-Key. The status codes are those
-- of draft-ietf-httpapi-idempotency-key-header.
--
-- To copy: the row of idem_scopes, and server.mjs. The tables and pay() stand for yours.

-- Clients must not retry for longer than the ttl. If all keys are UUIDv7, key_time = 'uuidv7'
-- refuses those that are older (412), and for a start those made up to a minute after this row.
INSERT INTO idem.idem_scopes (scope, ttl) VALUES ('payments', '1 day');

CREATE TABLE accounts (name text PRIMARY KEY, balance numeric NOT NULL);
CREATE TABLE payments (
	id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
	payer text NOT NULL REFERENCES accounts, payee text NOT NULL REFERENCES accounts,
	amount numeric NOT NULL CHECK (amount > 0), reference text NOT NULL
);

-- Returns NULL if the payer's balance is too low.
CREATE FUNCTION pay(payer text, payee text, amount numeric, reference text) RETURNS bigint
LANGUAGE plpgsql AS $$
DECLARE
	payment bigint;
BEGIN
	UPDATE accounts SET balance = balance - amount WHERE name = payer AND balance >= amount;
	IF NOT FOUND THEN
		RETURN NULL;
	END IF;
	UPDATE accounts SET balance = balance + amount WHERE name = payee;
	INSERT INTO payments (payer, payee, amount, reference) VALUES (payer, payee, amount, reference)
	RETURNING id INTO payment;
	RETURN payment;
END $$;
