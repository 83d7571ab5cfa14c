-- A consumer of a queue that delivers at least once: each message takes effect once.
--
-- Problem: a consumer that dies after its work and before its acknowledgement leaves the message
-- to another one, which does the work again. Acknowledging first loses messages instead.
-- Solution: consumer.py claims the id of the message in the transaction that does the work, and
-- acknowledges after the commit. It takes the id that the producer has chosen, not that of the
-- queue: a producer that lost an answer publishes twice.
-- Use it with any queue: here a stream of Redis; SQS, RabbitMQ, Kafka, NATS alike. For a queue that is
-- a table of the same database, delete the message in the transaction of its work instead.
--
-- To copy: the row of idem_scopes, and consumer.py. The tables and ship() stand for yours.

-- Longer than the queue can deliver a message again, a replay by hand included
INSERT INTO idem.idem_scopes (scope, ttl) VALUES ('shipping', '14 days');

CREATE TABLE stock (item text PRIMARY KEY, quantity int NOT NULL);
CREATE TABLE shipments (order_id text NOT NULL, item text NOT NULL REFERENCES stock, quantity int NOT NULL);
