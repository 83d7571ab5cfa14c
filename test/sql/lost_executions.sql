-- Four ways to lose an execution by hand: each in the wrong and in the right form. See doc/guide.md.
\set SHOW_CONTEXT never

CREATE TABLE orders (id text PRIMARY KEY, item text, shipped bool NOT NULL DEFAULT false);
CREATE TABLE stock (item text PRIMARY KEY, n int);
CREATE TABLE accounts (id int PRIMARY KEY, balance int CHECK (balance >= 0));
INSERT INTO orders VALUES ('o1', 'book'), ('o2', 'pen');
INSERT INTO stock VALUES ('pen', 1);
INSERT INTO accounts VALUES (1, 100);

-- ----- 1. a claim as a filter in a join: it claims for a row that the join drops -----

-- Wrong: o1 is claimed although there is no book, and so it is never shipped.
SELECT o.id FROM orders o LEFT JOIN stock s USING (item) WHERE idem_claim('wrong 1', o.id) AND s.n > 0;
INSERT INTO stock VALUES ('book', 1);
SELECT o.id FROM orders o LEFT JOIN stock s USING (item) WHERE idem_claim('wrong 1', o.id) AND s.n > 0;
SELECT request_id AS marked FROM idem_claims WHERE user_id = 'wrong 1' ORDER BY 1;
DELETE FROM stock WHERE item = 'book';

-- Right: find and lock the rows first, then claim them one by one.
CREATE PROCEDURE ship() LANGUAGE plpgsql AS $$
DECLARE
	o record;
BEGIN
	FOR o IN SELECT orders.id FROM orders JOIN stock USING (item) WHERE n > 0 ORDER BY id FOR UPDATE OF orders LOOP
		IF idem_claim('right 1', o.id) THEN
			UPDATE orders SET shipped = true WHERE id = o.id;
			RAISE NOTICE '% is shipped', o.id;
		END IF;
	END LOOP;
END $$;
CALL ship();
SELECT request_id AS marked FROM idem_claims WHERE user_id = 'right 1' ORDER BY 1;
INSERT INTO stock VALUES ('book', 1);
CALL ship();
CALL ship();
SELECT * FROM orders ORDER BY id;

-- ----- 2. (idem_try_claim(...)).*: the function is called once for each column -----

-- Wrong: the first column is claimed, and the other columns come from later calls, which
-- answer completed. (Without a function around it, the C edition refuses it: see claim_places.)
CREATE FUNCTION counted_claim(text, OUT outcome idem_outcome, OUT result jsonb) LANGUAGE plpgsql AS $$
BEGIN
	RAISE NOTICE 'called';
	SELECT c.outcome, c.result INTO outcome, result FROM idem_try_claim('wrong 2', $1) AS c;
END $$;
SELECT (counted_claim('r')).*;

-- Right: one call
SELECT * FROM counted_claim('r3');
SELECT outcome, result FROM idem_try_claim('right 2', 'r');
DROP FUNCTION counted_claim;

-- ----- 3. a claim in autocommit, before the work -----

-- Wrong: the claim commits, the work fails, and the retry gets the answer that the request was
-- executed.
SELECT idem_claim('wrong 3', 'r');
UPDATE accounts SET balance = balance - 1000 WHERE id = 1;
UPDATE accounts SET balance = 1000 WHERE id = 1;
SELECT idem_claim('wrong 3', 'r');

-- Right: one transaction
UPDATE accounts SET balance = 100 WHERE id = 1;
BEGIN;
SELECT idem_claim('right 3', 'r');
UPDATE accounts SET balance = balance - 1000 WHERE id = 1;
COMMIT;
UPDATE accounts SET balance = 1000 WHERE id = 1;
BEGIN;
SELECT idem_claim('right 3', 'r');
UPDATE accounts SET balance = balance - 1000 WHERE id = 1;
COMMIT;
SELECT balance FROM accounts;

-- ----- 4. a claim outside the block whose EXCEPTION handler swallows the work -----

CREATE PROCEDURE pay_wrongly(request text) LANGUAGE plpgsql AS $$
BEGIN
	IF idem_claim('wrong 4', request) THEN
		BEGIN
			UPDATE accounts SET balance = balance - 10 WHERE id = 1;
			RAISE NOTICE 'paid';
		EXCEPTION WHEN check_violation THEN
			RAISE NOTICE 'not paid';
		END;
	ELSE
		RAISE NOTICE 'was paid before';
	END IF;
END $$;
-- Wrong: the handler rolls back the work, and the claim stays.
CALL pay_wrongly('r');
UPDATE accounts SET balance = 100 WHERE id = 1;
CALL pay_wrongly('r');
SELECT balance FROM accounts;

-- Right: the claim is in the block, and the handler rolls back both,
CREATE PROCEDURE pay(request text) LANGUAGE plpgsql AS $$
BEGIN
	IF idem_claim('right 4', request) THEN
		UPDATE accounts SET balance = balance - 10 WHERE id = 1;
		RAISE NOTICE 'paid';
	ELSE
		RAISE NOTICE 'was paid before';
	END IF;
EXCEPTION WHEN check_violation THEN
	RAISE NOTICE 'not paid';
END $$;
UPDATE accounts SET balance = 0 WHERE id = 1;
CALL pay('r');
UPDATE accounts SET balance = 100 WHERE id = 1;
CALL pay('r');
CALL pay('r');
SELECT balance FROM accounts;
DROP PROCEDURE pay;

-- or the handler settles the failure.
CREATE PROCEDURE pay(request text) LANGUAGE plpgsql AS $$
DECLARE
	claim record;
BEGIN
	SELECT * INTO claim FROM idem_try_claim('settled 4', request);
	IF claim.outcome = 'claimed' THEN
		BEGIN
			UPDATE accounts SET balance = balance - 10 WHERE id = 1;
			PERFORM idem_complete('"paid"');
		EXCEPTION WHEN check_violation THEN
			PERFORM idem_fail('"not paid"');
		END;
		claim.result := idem_result();
	END IF;
	RAISE NOTICE '%: %', claim.outcome, claim.result;
END $$;
UPDATE accounts SET balance = 0 WHERE id = 1;
CALL pay('r');
UPDATE accounts SET balance = 100 WHERE id = 1;
CALL pay('r');
CALL pay('r2');
SELECT balance FROM accounts;

DROP PROCEDURE ship, pay, pay_wrongly;
DROP TABLE orders, stock, accounts;
TRUNCATE idem_claims;
