-- Items and gold of a game, behind a Redis cache of responses.
--
-- Problem: the cache answers retries. When Redis has lost its data, a retry reads the new
-- version of the item, passes the version check, and is executed a second time.
-- Solution: each transaction claims its request first, whatever the cache said. The cache
-- only saves work.
-- Use it when a cache answers your retries today, and each request is one transaction.
--
-- To copy: the row of idem_scopes, and the IF at the start of use_item() and sell_item().
-- The tables and the other statements stand for yours.

-- The claim lives as long as the cached response: SET ... EX 600.
INSERT INTO idem_scopes (scope, ttl) VALUES ('inventory', '10 minutes');

CREATE TABLE wallets (player text PRIMARY KEY, gold bigint NOT NULL);
CREATE TABLE items (
	id int PRIMARY KEY,
	player text NOT NULL REFERENCES wallets,
	price bigint NOT NULL,
	quantity int NOT NULL CHECK (quantity >= 0),
	version int NOT NULL DEFAULT 0
);
CREATE TABLE history (player text NOT NULL, request text NOT NULL, item int NOT NULL, gold bigint NOT NULL);

-- Takes one item. The version check stops a concurrent change, but not a retry: a retry
-- has read the new version. 40001 also undoes the claim: read the version again, and send
-- the same request.
CREATE FUNCTION take_item(player text, item int, version int) RETURNS items
LANGUAGE plpgsql AS $$
DECLARE
	taken items;
BEGIN
	UPDATE items i SET quantity = i.quantity - 1, version = i.version + 1
	WHERE i.id = take_item.item AND i.player = take_item.player AND i.version = take_item.version
	RETURNING * INTO taken;
	IF NOT FOUND THEN
		RAISE serialization_failure USING MESSAGE = 'item was changed by another request';
	END IF;
	RETURN taken;
END $$;

-- What the caller does with the answer:
--	executed			puts the response into the cache, and returns it
--	executed before		reads the current state. The response was only in the cache, and is
--						lost; sending the request again gives the same answer
--	ID409				another session is executing the request: sends the same request
--						again later
CREATE FUNCTION use_item(player text, request text, item int, version int) RETURNS jsonb
LANGUAGE plpgsql AS $$
DECLARE
	taken items;
BEGIN
	IF NOT idem_claim(player, request, 'inventory', wait => '0') THEN
		RETURN '{"status": "executed before"}';
	END IF;
	taken := take_item(player, item, version);
	INSERT INTO history VALUES (player, request, item, 0);
	RETURN jsonb_build_object('status', 'executed', 'quantity', taken.quantity);
END $$;

CREATE FUNCTION sell_item(player text, request text, item int, version int) RETURNS jsonb
LANGUAGE plpgsql AS $$
DECLARE
	taken items;
BEGIN
	IF NOT idem_claim(player, request, 'inventory', wait => '0') THEN
		RETURN '{"status": "executed before"}';
	END IF;
	taken := take_item(player, item, version);
	UPDATE wallets w SET gold = w.gold + taken.price WHERE w.player = sell_item.player;
	INSERT INTO history VALUES (player, request, item, taken.price);
	RETURN jsonb_build_object('status', 'executed', 'quantity', taken.quantity, 'gold', taken.price);
END $$;
