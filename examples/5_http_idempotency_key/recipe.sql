-- Payments over HTTP, with the header Idempotency-Key. server.js claims the key, calls
-- pay(), which knows nothing of keys, and stores the response, in one transaction.

-- Keys are UUIDv7: one from before the ttl is refused (412), and not executed again.
-- Of the time before this row nothing is known, and clocks differ by up to a minute: so
-- all keys of the next minute are refused too.
INSERT INTO idem_scopes (scope, ttl, key_time) VALUES ('POST /payments', '1 day', 'uuidv7');

CREATE TABLE accounts (name text PRIMARY KEY, balance numeric NOT NULL);
CREATE TABLE payments (
	id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
	payer text NOT NULL REFERENCES accounts, payee text NOT NULL REFERENCES accounts,
	amount numeric NOT NULL CHECK (amount > 0), reference text NOT NULL
);

-- NULL: the payer has less than that.
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
