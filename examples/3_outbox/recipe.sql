-- Orders with three states (in progress, completed, failed), an outbox that couriers
-- publish at least once, and consumers that act exactly once on each message.
--
-- Problem: a message that is delivered twice has its effect twice, and an order whose
-- handler died stays "in progress".
-- Solution: the handler holds a lease, and writes work, result and message in one
-- transaction. Each consumer claims the id of the request in its own scope, so that a
-- message that is delivered again has no second effect.
-- Use it when other services act on what you commit, through a queue or a stream that
-- delivers at least once.
--
-- To copy: begin_order(), complete_order() and fail_order() for the handler,
-- next_messages() and mark_published() for the couriers, and the IF at the start of ship()
-- and send_mail() for the consumers. The tables stand for yours.

-- When the handler of an order died and its lease has lapsed, a retry takes the order over.
-- The ttl of a consumer's scope is longer than the time in which the queue delivers a
-- message again.
INSERT INTO idem_scopes (scope, ttl, lapsed) VALUES
	('orders', '1 day', 'reclaim'), ('shipping', '7 days', 'reclaim'), ('mail', '7 days', 'reclaim');

CREATE TABLE orders (
	id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
	customer text NOT NULL, request text NOT NULL, item text NOT NULL, quantity int NOT NULL
);
CREATE TABLE outbox (
	id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
	customer text NOT NULL, correlation_id text NOT NULL, event jsonb NOT NULL, published_at timestamptz
);
CREATE INDEX ON outbox (id) WHERE published_at IS NULL;

-- Starts an order. Commit this call at once. A duplicate gets in_progress at once (409).
CREATE FUNCTION begin_order(customer text, request text, wanted jsonb,
	OUT outcome idem_outcome, OUT result jsonb, OUT token bigint) LANGUAGE sql AS $$
	SELECT outcome, result, token
	FROM idem_lease(customer, request, scope => 'orders', fingerprint => idem_fingerprint(wanted), wait => '0', lease => '30 s')
$$;

-- Completes an order: work, result and message in one transaction. The fence comes first: a
-- handler that was replaced, or has already completed the order, gets ID410 and writes
-- nothing.
CREATE FUNCTION complete_order(customer text, request text, token bigint, wanted jsonb) RETURNS jsonb
LANGUAGE plpgsql AS $$
DECLARE
	result jsonb;
BEGIN
	PERFORM idem_fence(customer, request, token, 'orders');
	INSERT INTO orders (customer, request, item, quantity)
	VALUES (customer, request, wanted->>'item', (wanted->>'quantity')::int)
	RETURNING jsonb_build_object('order', id) INTO result;
	-- Every message that follows from the request carries the id of the request.
	INSERT INTO outbox (customer, correlation_id, event) VALUES (customer, request, wanted || result);
	PERFORM idem_complete(customer, request, result, token, 'orders');
	RETURN result;
END $$;

-- The order fails for good.
CREATE FUNCTION fail_order(customer text, request text, token bigint, error jsonb) RETURNS boolean
LANGUAGE sql AS $$
	SELECT idem_fail(customer, request, error, token, 'orders')
$$;

-- A courier runs BEGIN, next_messages(), publishes each message, mark_published(), COMMIT.
-- Any number of couriers can run. If one dies after publishing, another publishes the same
-- messages again.
CREATE FUNCTION next_messages(batch_size int) RETURNS SETOF outbox LANGUAGE sql AS $$
	SELECT * FROM outbox WHERE published_at IS NULL ORDER BY id LIMIT batch_size FOR UPDATE SKIP LOCKED
$$;
CREATE FUNCTION mark_published(ids bigint[]) RETURNS void LANGUAGE sql AS $$
	UPDATE outbox SET published_at = clock_timestamp() WHERE id = ANY (ids)
$$;

-- Each consumer claims the id of the request in a scope of its own. It acknowledges a message
-- after the commit, also when it had seen the message before.
CREATE TABLE stock (item text PRIMARY KEY, quantity int NOT NULL);
CREATE TABLE shipments (customer text NOT NULL, correlation_id text NOT NULL, item text NOT NULL, quantity int NOT NULL);
CREATE TABLE mails (customer text NOT NULL, correlation_id text NOT NULL, body text NOT NULL);

CREATE FUNCTION ship(customer text, correlation_id text, event jsonb) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
	IF NOT idem_claim(customer, correlation_id, 'shipping') THEN
		RETURN;
	END IF;
	UPDATE stock SET quantity = quantity - (event->>'quantity')::int WHERE item = event->>'item';
	INSERT INTO shipments VALUES (customer, correlation_id, event->>'item', (event->>'quantity')::int);
END $$;

CREATE FUNCTION send_mail(customer text, correlation_id text, event jsonb) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
	IF NOT idem_claim(customer, correlation_id, 'mail') THEN
		RETURN;
	END IF;
	INSERT INTO mails VALUES (customer, correlation_id, format('Your order %s is on its way.', event->>'order'));
END $$;
