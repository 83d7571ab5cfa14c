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

-- A partitioned table needs the trigger for UPDATE and DELETE too. Then a row that an UPDATE
-- moves to another partition is not taken for one that was delivered again.
CREATE TABLE shipments (customer text NOT NULL, event uuid NOT NULL, state text NOT NULL) PARTITION BY LIST (state);
CREATE TABLE shipments_open PARTITION OF shipments FOR VALUES IN ('open');
CREATE TABLE shipments_done PARTITION OF shipments FOR VALUES IN ('done');

CREATE TRIGGER once BEFORE INSERT OR UPDATE OR DELETE ON shipments
	FOR EACH ROW EXECUTE FUNCTION idem_skip_duplicates('shipments', 'customer', 'event');
