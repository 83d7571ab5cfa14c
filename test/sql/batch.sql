-- Many requests in one call: each element gets one answer, in the order of the arrays.
\set SHOW_CONTEXT never
\set VERBOSITY sqlstate

-- ----- answers -----

SELECT * FROM idem_claim_many('{batch,batch,batch}', '{c,a,b}');
SELECT * FROM idem_claim_many('{batch,batch,batch,batch}', '{d,b,a,c}');
-- The answers come in the order of the arrays, although the keys are claimed in another order.
SELECT bool_and(outcome = 'claimed') AS claimed, count(*), array_agg(ordinal::bigint) = array_agg(n) AS in_order
FROM (SELECT row_number() OVER () AS n, * FROM idem_claim_many(
	(SELECT array_agg('batch' || i % 3) FROM generate_series(1, 200) i),
	(SELECT array_agg(md5(i::text)) FROM generate_series(1, 200) i), 'order')) AS answers;
-- Each element gets its own result.
BEGIN;
SELECT idem_claim('batch', 'e');
SELECT idem_complete('"result of e"');
SELECT idem_claim('batch', 'f');
SELECT idem_complete('"result of f"');
SELECT idem_claim('batch', 'g');
SELECT idem_fail('"error of g"');
COMMIT;
SELECT outcome FROM idem_lease('batch', 'h', lease => '1 hour', progress => '"not shown"');
SELECT * FROM idem_claim_many('{batch,batch,batch,batch,batch}', '{h,g,f,e,new}', wait => '0');
SELECT * FROM idem_claim_many('{batch,batch}', '{h,new2}', wait => '10 ms');
-- The same id with another user, and in another scope, is another key.
SELECT * FROM idem_claim_many('{batch,other}', '{e,e}');
SELECT * FROM idem_claim_many('{batch}', '{e}', 'other');
-- In the SELECT list, and with a LIMIT
SELECT (idem_claim_many('{batch,batch}', '{e,f}')).outcome;
SELECT ordinal FROM idem_claim_many('{batch,batch,batch}', '{i1,i2,i3}') LIMIT 1;
SELECT idem_status('batch', 'i3') AS claimed_though_not_read;

-- ----- a key that is in the arrays twice: the later element is a second claim -----

SELECT * FROM idem_claim_many('{batch,batch,batch}', '{j,j,j}');
BEGIN;
SELECT * FROM idem_claim_many('{batch,batch,batch}', '{k,l,k}');
-- The transaction holds each key once, and settles it by its name.
SELECT idem_complete('batch', 'k', '1'), idem_complete('batch', 'l', '2');
SELECT * FROM idem_claim_many('{batch,batch,batch}', '{k,l,k}');
SAVEPOINT s;
SELECT idem_complete('3');
ROLLBACK TO s;
COMMIT;
-- The first element of a key claims it, and its fingerprint is stored.
SELECT * FROM idem_claim_many('{batch,batch,batch}', '{m,m,m}', '', ARRAY['\x01', '\x02', '\x01']::bytea[]);
SELECT * FROM idem_claim_many('{batch,batch,batch}', '{n,n,n}', '', ARRAY[NULL, '\x02', '\x01']::bytea[]);
SELECT fingerprint FROM idem_lookup('batch', 'm') UNION ALL SELECT fingerprint FROM idem_lookup('batch', 'n');

-- ----- an invalid element does not affect the others -----

SELECT * FROM idem_claim_many(
	ARRAY['batch', NULL, 'batch', '', 'batch', 'batch', repeat('u', 256), 'batch', repeat('u', 255), 'batch'],
	ARRAY['o1', 'o2', NULL, 'o3', '', repeat('r', 256), 'o4', repeat('r', 255), 'o5', 'o6']);
-- The limit counts bytes.
SELECT * FROM idem_claim_many(ARRAY['batch', 'batch'], ARRAY[repeat(U&'\00e9', 128), repeat(U&'\00e9', 127)]);
SELECT * FROM idem_claim_many('{batch,batch,batch,batch,batch}', '{p1,p2,p3,p4,p5}', '',
	ARRAY['\x01', '\x', decode(repeat('00', 65), 'hex'), decode(repeat('00', 64), 'hex'), NULL]::bytea[]);
SELECT * FROM idem_claim_many(ARRAY[NULL]::text[], ARRAY[NULL]::text[]);
SELECT count(*) FROM idem_claims WHERE user_id = '' OR request_id = '' OR length(user_id) > 255;

-- ----- arrays -----

SELECT * FROM idem_claim_many('{}', '{}');
SELECT * FROM idem_claim_many('{}', '{}', '', '{}');
SELECT * FROM idem_claim_many('{batch}', '{}');
SELECT * FROM idem_claim_many('{}', '{q}');
SELECT * FROM idem_claim_many('{batch,batch}', '{q}');
SELECT * FROM idem_claim_many('{batch}', '{q}', '', '{}');
SELECT * FROM idem_claim_many('{batch}', '{q}', '', ARRAY['\x01', '\x02']::bytea[]);
SELECT * FROM idem_claim_many(NULL, '{q}');
SELECT * FROM idem_claim_many('{batch}', NULL);
SELECT * FROM idem_claim_many('{{batch,batch}}', '{{q,r}}');
SELECT * FROM idem_claim_many('{batch,batch}', '{{q,r}}');
SELECT * FROM idem_claim_many('{{batch}}', '{q}');
SELECT * FROM idem_claim_many('{{batch}}', NULL);
\echo :LAST_ERROR_MESSAGE
SELECT * FROM idem_claim_many('{batch,batch}', '{q,r}', '', ARRAY[['\x01', '\x02']]::bytea[]);
SELECT idem_status('batch', 'q') AS nothing_claimed;
-- The bounds of the arrays do not matter.
SELECT * FROM idem_claim_many('[5:6]={batch,batch}', '[-1:0]={s,t}', '', '[0:1]={"\\x01","\\x02"}');
SELECT * FROM idem_claim_many('{batch}', '{u}', NULL);
SELECT * FROM idem_claim_many('{batch}', '{u}', repeat('s', 256));
SELECT * FROM idem_claim_many('{batch}', '{u}', wait => '-1 s');
SELECT * FROM idem_claim_many('{batch}', '{u}', wait => '1 month');
SELECT * FROM idem_claim_many('{}', '{}', wait => '-1 s');
BEGIN READ ONLY;
SELECT * FROM idem_claim_many('{batch}', '{u}');
ROLLBACK;
\set VERBOSITY default
SELECT * FROM idem_claim_many('{batch,batch}', '{q}');
SELECT * FROM idem_claim_many('{{batch,batch}}', '{{q,r}}');
SELECT * FROM idem_claim_many('{batch}', NULL);
SELECT idem_claim_many(a, a) FROM (SELECT array_fill(NULL::text, ARRAY[27000000])) AS t (a);
SELECT idem_claim_many('{batch}', array_fill(NULL::text, ARRAY[10000001]));
\set VERBOSITY sqlstate

-- ----- fingerprints -----

SELECT * FROM idem_claim_many('{batch,batch,batch}', '{v1,v2,v3}', '', ARRAY['\x01', '\x02', NULL]::bytea[]);
SELECT * FROM idem_claim_many('{batch,batch,batch}', '{v1,v2,v3}', '', ARRAY['\x01', '\x01', '\x01']::bytea[]);
SELECT * FROM idem_claim_many('{batch,batch,batch}', '{v1,v2,v3}', '', ARRAY[NULL, NULL, NULL]::bytea[]);
SELECT * FROM idem_claim_many('{batch,batch,batch}', '{v1,v2,v3}');

-- ----- the policy of the scope applies to each element -----

CREATE FUNCTION uuid_of(moment timestamptz) RETURNS text LANGUAGE sql AS $$
	SELECT format('%s-%s-7abc-8abc-0123456789ab', left(ms, 8), right(ms, 4))
	FROM (SELECT lpad(to_hex((extract(epoch FROM moment) * 1000)::bigint), 12, '0') AS ms) AS t
$$;
SET session_replication_role = replica;		-- else it is guarded
INSERT INTO idem_scopes (scope, ttl, key_time, guarded_since) VALUES ('batch v7', '1 day', 'uuidv7', '2001-01-01');
RESET session_replication_role;
SELECT uuid_of(now()) AS v7, uuid_of(now() - interval '25 hours') AS old, uuid_of(now() + interval '2 min') AS ahead,
	uuid_of(now() + interval '30 s') AS soon \gset
SELECT * FROM idem_claim_many(
	ARRAY['batch', 'batch', 'batch', 'batch', 'batch', 'batch', 'batch', 'batch', 'batch'],
	ARRAY[:'v7', :'old', :'ahead', :'soon', upper(:'v7'), replace(:'v7', '-', ''), '{' || :'v7' || '}', overlay(:'v7' placing '4' from 15), 'x'],
	'batch v7');
SELECT * FROM idem_claim_many('{batch,batch}', ARRAY[:'v7', :'old'], 'batch v7');
-- A row that is still stored answers, however old its key is.
INSERT INTO idem_claims (expires_at, state, request_id, user_id, scope, result)
	VALUES (date_trunc('second', now()) - interval '1 hour', 'completed', :'old', 'batch', 'batch v7', '"old"');
SELECT * FROM idem_claim_many('{batch,batch}', ARRAY[:'v7', :'old'], 'batch v7');
UPDATE idem_scopes SET expired = 'reclaim' WHERE scope = 'batch v7';
SELECT * FROM idem_claim_many('{batch,batch}', ARRAY[:'v7', :'old'], 'batch v7');
INSERT INTO idem_scopes (scope, failed) VALUES ('batch retryable', 'retryable');
BEGIN;
SELECT idem_claim('batch', 'w', 'batch retryable');
SELECT idem_fail('1');
COMMIT;
SELECT * FROM idem_claim_many('{batch,batch}', '{w,w}', 'batch retryable');

-- ----- in the transaction -----

BEGIN;
SELECT * FROM idem_claim_many('{batch,batch}', '{x1,x2}');
SELECT idem_outcome(), idem_result();
SAVEPOINT s;
SELECT * FROM idem_claim_many('{batch,batch}', '{x2,x3}');
SELECT idem_complete('"which"');
ROLLBACK TO s;
SELECT idem_complete('"which"');
ROLLBACK TO s;
SELECT idem_complete('batch', 'x2', '2');
SELECT idem_complete('1');
COMMIT;
SELECT request_id, result FROM idem_claims WHERE request_id LIKE 'x_' ORDER BY request_id;
BEGIN;
SELECT * FROM idem_claim_many('{batch,batch}', '{y1,y2}');
ROLLBACK;
SELECT * FROM idem_claim_many('{batch,batch}', '{y1,y2}');
-- A consumer that executes each message once
CREATE TABLE messages (id text, amount int);
CREATE TABLE balance (amount int);
INSERT INTO messages SELECT 'message ' || i, i FROM generate_series(1, 10) i;
INSERT INTO balance VALUES (0);
CREATE PROCEDURE consume(ids text[]) LANGUAGE sql AS $$
	WITH claims AS MATERIALIZED (
		SELECT ids[ordinal] AS id FROM idem_claim_many(array_fill('batch'::text, ARRAY[cardinality(ids)]), ids, 'consumer')
		WHERE outcome = 'claimed')
	UPDATE balance SET amount = balance.amount + (SELECT coalesce(sum(messages.amount), 0) FROM messages JOIN claims USING (id))
$$;
CALL consume(ARRAY['message 1', 'message 2', 'message 2', 'message 3']);
TABLE balance;
CALL consume(ARRAY['message 3', 'message 4', 'message 1']);
TABLE balance;

-- ----- 10,000 keys -----

BEGIN;
SELECT outcome, count(*), count(DISTINCT ordinal) FROM idem_claim_many(
	array_fill('batch'::text, ARRAY[10000]), (SELECT array_agg('many ' || i) FROM generate_series(1, 10000) i))
GROUP BY outcome;
-- The transaction does not hold a lock for each key.
SELECT count(*) < 20 AS few_locks FROM pg_locks WHERE pid = pg_backend_pid();
COMMIT;
SELECT count(*) FROM idem_claims WHERE request_id LIKE 'many %';
SELECT outcome, count(*) FROM idem_claim_many(
	array_fill('batch'::text, ARRAY[10001]), (SELECT array_agg('many ' || i) FROM generate_series(0, 10000) i))
GROUP BY outcome ORDER BY outcome;

DELETE FROM idem_claims WHERE user_id IN ('batch', 'other') OR scope = 'order' OR length(user_id) = 255;
DELETE FROM idem_scopes WHERE scope LIKE 'batch%';
DROP FUNCTION uuid_of;
DROP PROCEDURE consume;
DROP TABLE messages, balance;
