-- Orders with three states (in progress, completed, failed), an outbox that couriers
-- publish at least once, and consumers that act once on each message.

-- An order in progress whose handler died is stale when its lease has lapsed, and can be
-- had again. A consumer remembers longer than anything can be delivered again.
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

-- In progress: commit it at once. A duplicate is told so at once: 409.
CREATE FUNCTION begin_order(customer text, request text, wanted jsonb,
	OUT outcome idem_outcome, OUT result jsonb, OUT token bigint) LANGUAGE sql AS $$
	SELECT outcome, result, token
	FROM idem_try_claim(customer, request, 'orders', idem_fingerprint(wanted), wait => '0', lease => '30 s')
$$;

-- Completed: work, result and message in one transaction. The fence comes first: a handler
-- that was taken for dead, and one that has completed already, write nothing (ID410).
CREATE FUNCTION complete_order(customer text, request text, token bigint, wanted jsonb) RETURNS jsonb
LANGUAGE plpgsql AS $$
DECLARE
	result jsonb;
BEGIN
	PERFORM idem_fence(customer, request, token, 'orders');
	INSERT INTO orders (customer, request, item, quantity)
	VALUES (customer, request, wanted->>'item', (wanted->>'quantity')::int)
	RETURNING jsonb_build_object('order', id) INTO result;
	-- The request's id goes with everything that follows from it.
	INSERT INTO outbox (customer, correlation_id, event) VALUES (customer, request, wanted || result);
	PERFORM idem_complete(customer, request, result, token, 'orders');
	RETURN result;
END $$;

-- Failed, for good
CREATE FUNCTION fail_order(customer text, request text, token bigint, error jsonb) RETURNS boolean
LANGUAGE sql AS $$
	SELECT idem_fail(customer, request, error, token, 'orders')
$$;

-- A courier: BEGIN, this, publish each, mark_published, COMMIT. Any number of them. One that
-- dies in between has published, and another will publish the same again.
CREATE FUNCTION next_messages(batch_size int) RETURNS SETOF outbox LANGUAGE sql AS $$
	SELECT * FROM outbox WHERE published_at IS NULL ORDER BY id LIMIT batch_size FOR UPDATE SKIP LOCKED
$$;
CREATE FUNCTION mark_published(ids bigint[]) RETURNS void LANGUAGE sql AS $$
	UPDATE outbox SET published_at = clock_timestamp() WHERE id = ANY (ids)
$$;

-- Consumers, each with a scope of its own, on the id of the request upstream. They
-- acknowledge a message after the commit, whether or not it was the first.
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
