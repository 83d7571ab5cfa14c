-- Items and gold of a game, behind a Redis cache of responses.  The cache answers a
-- retry while it is up.  The claim decides, and does so in each transaction, whatever the
-- cache has said.

-- The claim is remembered as long as the cached response: SET ... EX 600.
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

-- One item less.  The version check, which the caller's version is for, finds concurrent
-- changes; a retry has read the new version, and passes it.  40001 undoes the claim too:
-- read the version again, and send the same request.
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

-- What the caller does next:
--	executed			puts the response into the cache, and returns it
--	executed before		never sends it again: the response was in the cache only, and is
--						lost; fetches the state instead
--	ID409				another call is at it: sends the same request again, later
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
