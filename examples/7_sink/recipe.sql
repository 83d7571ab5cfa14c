-- Tables that a connector fills: Debezium, Kafka Connect, COPY, logical replication.
--
-- Problem: connectors deliver at least once. After a crash, a rebalance or lost offsets they
-- insert the same rows again, and everything that follows from a row happens again. They only
-- insert, so they cannot claim.
-- Solution: a trigger of the table claims the id of each row, and skips the row if it was
-- inserted before. Row, claim and what follows from the row commit together.
-- Use it when you cannot change the statements of the writer. A writer that calls functions of
-- yours claims by itself, see 3_outbox.
--
-- To copy: the two triggers named "once", and their scopes. The tables stand for yours.

-- The ttl is longer than the time in which a row can come again: that of the topic, say.
INSERT INTO idem_scopes (scope, ttl) VALUES ('payments', '14 days'), ('shipments', '14 days');

-- What follows from a payment: the balance of its customer
CREATE TABLE balances (customer text PRIMARY KEY, balance int NOT NULL);
CREATE TABLE payments (customer text NOT NULL, event uuid NOT NULL, amount int NOT NULL);

CREATE TRIGGER once BEFORE INSERT ON payments
	FOR EACH ROW EXECUTE FUNCTION idem_skip_duplicates('payments', 'customer', 'event');

-- A row that is skipped fires no AFTER trigger.
CREATE FUNCTION pay() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
	INSERT INTO balances VALUES (NEW.customer, NEW.amount)
	ON CONFLICT (customer) DO UPDATE SET balance = balances.balance + excluded.balance;
	RETURN NULL;
END $$;
CREATE TRIGGER pay AFTER INSERT ON payments FOR EACH ROW EXECUTE FUNCTION pay();

-- A partitioned table needs the trigger for DELETE too: an UPDATE that would move a row to
-- another partition then fails, instead of losing the row. So partition by what does not change.
CREATE TABLE shipments (customer text NOT NULL, event uuid NOT NULL, state text NOT NULL) PARTITION BY HASH (event);
CREATE TABLE shipments_0 PARTITION OF shipments FOR VALUES WITH (MODULUS 2, REMAINDER 0);
CREATE TABLE shipments_1 PARTITION OF shipments FOR VALUES WITH (MODULUS 2, REMAINDER 1);

CREATE TRIGGER once BEFORE INSERT OR DELETE ON shipments
	FOR EACH ROW EXECUTE FUNCTION idem_skip_duplicates('shipments', 'customer', 'event');
