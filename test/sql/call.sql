-- idem_call(): claims a request, runs a function, stores its result. :SQLSTATE is that of the
-- statement before.
\set SHOW_CONTEXT never
\set VERBOSITY default

CREATE TABLE payments (account int, amount numeric, note text);
CREATE FUNCTION pay(account int, amount numeric, note text DEFAULT 'none') RETURNS jsonb LANGUAGE plpgsql AS $$
BEGIN
	INSERT INTO payments VALUES (account, amount, note);
	RETURN jsonb_build_object('paid', amount, 'note', note, 'seen', idem_outcome());
END $$;
-- Others with the same name. SQL tells the first one from pay(1, 2, note => DEFAULT) by the
-- names of their arguments only.
CREATE FUNCTION pay(account int, total numeric) RETURNS text LANGUAGE sql AS $$ SELECT 'an overload' $$;
CREATE FUNCTION pay(account text, amount numeric) RETURNS text LANGUAGE sql AS $$ SELECT 'an overload' $$;

-- ----- executed once, in autocommit and in a transaction -----

SELECT idem_call('u', '1', 'pay(int, numeric, text)', '{"account": 1, "amount": 30}'), idem_outcome(), idem_result();
SELECT idem_call('u', '1', 'pay(int, numeric, text)', '{"amount": 30.0, "account": 1}'), idem_outcome(), idem_result();
BEGIN;
SELECT idem_call('u', '2', 'pay(int, numeric, text)', '{"account": 1, "amount": 1}');
SELECT idem_outcome(), idem_result();
SELECT idem_complete('1') AS nothing_is_left;
\echo :SQLSTATE
ROLLBACK;
SELECT idem_call(user_id => 'u', request_id => '2', function => 'pay(text, numeric)', arguments => '{"account": 1, "amount": 1}');
SELECT idem_call('u', '1', 'pay(int, numeric, text)', '{"account": 1, "amount": 30}', scope => 'other', wait => '1 s') ->> 'paid' AS in_another_scope;
SELECT account, amount, note FROM payments ORDER BY amount;
SELECT request_id, scope, state, result, lease_until, token FROM idem_claims ORDER BY 1, 2;
TRUNCATE payments;

-- The fingerprint: the same id with other arguments, or with another function
SELECT idem_call('u', '1', 'pay(int, numeric, text)', '{"account": 1, "amount": 31}');
\echo :SQLSTATE
SELECT idem_call('u', '1', 'pay(int, numeric, text)', '{"account": 1, "amount": 30, "note": "none"}');
\echo :SQLSTATE
SELECT idem_call('u', '1', 'pay(int, numeric)', '{"account": 1, "total": 30}');
\echo :SQLSTATE
-- The same number as a string. A claim by hand gets the HINT for those who pass a fingerprint.
SELECT idem_call('u', '1', 'pay(int, numeric, text)', '{"account": 1, "amount": "30"}');
\echo :SQLSTATE
SELECT idem_claim('u', '1', fingerprint => idem_fingerprint('{"account": 1, "amount": 30}'));
-- What it is made of: equal in both editions
CREATE SCHEMA "odd ""schema";
CREATE TYPE "odd ""schema"."Odd.type" AS (a int);
CREATE FUNCTION "odd ""schema"."Odd function"("Odd name" "odd ""schema"."Odd.type"[], b "char", c text[], d int[]) RETURNS int LANGUAGE sql AS 'SELECT d[2]';
SELECT idem_call('u', 'odd', '"odd ""schema"."Odd function"("odd ""schema"."Odd.type"[], "char", text[], int[])',
	'{"Odd name": [{"a": 1}], "b": "x", "c": [], "d": [1, 2]}');
SELECT request_id, fingerprint = idem_fingerprint(CASE request_id
	WHEN '1' THEN '["public", "pay", "pg_catalog", "int4", "pg_catalog", "numeric", "pg_catalog", "text", {"account": 1, "amount": 30}]'
	ELSE '["odd \"schema", "Odd function", "odd \"schema", "Odd.type[]", "pg_catalog", "char", "pg_catalog", "text[]", "pg_catalog", "int4[]",
		{"Odd name": [{"a": 1}], "b": "x", "c": [], "d": [1, 2]}]' END::jsonb)
FROM idem_claims WHERE request_id IN ('1', 'odd') ORDER BY 1;
SET quote_all_identifiers = on;
SET search_path = "odd ""schema", public;
SELECT idem_call('u', 'odd', '"Odd function"("Odd.type"[], "char", text[], int[])', '{"Odd name": [{"a": 1}], "b": "x", "c": [], "d": [1, 2]}'), idem_outcome();
RESET search_path;
RESET quote_all_identifiers;
-- A new function with the same name and types is the same; a renamed one is another one.
DROP FUNCTION pay(int, numeric, text);
CREATE FUNCTION pay(account int, amount numeric, note text DEFAULT 'none') RETURNS jsonb LANGUAGE plpgsql AS 'BEGIN RAISE ''executed''; END';
SELECT idem_call('u', '1', 'pay(int, numeric, text)', '{"account": 1, "amount": 30}') AS replayed;
ALTER FUNCTION pay(int, numeric, text) RENAME TO pay_later;
SELECT idem_call('u', '1', 'pay_later(int, numeric, text)', '{"account": 1, "amount": 30}');
\echo :SQLSTATE

-- ----- arguments -----

CREATE TYPE item AS (sku text, n int);
CREATE DOMAIN positive AS int CHECK (VALUE > 0);
CREATE DOMAIN given AS text NOT NULL;
CREATE TYPE colour AS ENUM ('red', 'green');
CREATE FUNCTION show(i int2, big int8, f float8, flag boolean, t text, v varchar, c char, at timestamptz, id uuid, raw bytea, e colour,
	p positive, one item, many item[], grid int[], doc jsonb, old json, r int4range)
RETURNS jsonb LANGUAGE sql AS $$
	SELECT jsonb_build_object('i', i, 'big', big, 'f', f, 'flag', flag, 't', t, 'v', v, 'c', c, 'at', at AT TIME ZONE 'UTC', 'id', id, 'raw', raw,
		'e', e, 'p', p, 'one', one, 'sku', (one).sku, 'many', many, 'grid', grid, 'doc', doc, 'doc is null', doc IS NULL, 'old', old, 'r', r)
$$;
SELECT jsonb_pretty(idem_call('u', 'all types', oid::text, '{"i": 1, "big": 9007199254740993, "f": 1.5, "flag": true, "t": "a \"quoted\" \\ text", "v": 12, "c": "long",
	"at": "2026-01-02T03:04:05Z", "id": "0193A1F2-7d43-7c5e-9a10-5f7c2e1b8a01", "raw": "\\x00ff", "e": "green", "p": 7, "one": {"sku": "x", "n": 2},
	"many": [{"sku": "y"}, null], "grid": [[1, 2], [3, 4]], "doc": {"a": [1, null]}, "old": {"b":  2}, "r": "[1,5)"}'))
FROM pg_proc WHERE proname = 'show';
-- JSON null is SQL's NULL, for each type.
SELECT idem_call('u', 'all null', oid::text, (SELECT jsonb_object_agg(name, NULL) FROM unnest(proargnames) AS name WHERE name <> 'p') || '{"p": 1}')
FROM pg_proc WHERE proname = 'show';
CREATE FUNCTION strict_one(a int, b int DEFAULT 2) RETURNS int STRICT LANGUAGE sql AS 'SELECT a + b';
SELECT idem_call('u', 'strict', 'strict_one(int, int)', '{"a": null}') IS NULL AS is_null, idem_outcome(), idem_call('u', 'strict 2', 'strict_one(int, int)', '{"a": 1}');
-- Values that do not fit raise the server's own errors, and claim nothing.
SELECT idem_call('u', 'bad', 'strict_one(int, int)', '{"a": "x"}');
SELECT idem_call('u', 'bad', 'strict_one(int, int)', '{"a": 3000000000}');
-- The CONTEXT names the function: the DO block does not.
DO $$
DECLARE
	function constant text := 'strict_one(int, int)';
	context text;
BEGIN
	PERFORM idem_call('u', 'bad', function, '{"a": "x"}');
EXCEPTION WHEN invalid_text_representation THEN
	GET STACKED DIAGNOSTICS context = PG_EXCEPTION_CONTEXT;
	RAISE NOTICE '%', CASE WHEN context ~ 'strict_one.*idem_call' THEN 'it names the function' ELSE context END;
END $$;
CREATE FUNCTION domains(p positive DEFAULT 1, g given DEFAULT 'x') RETURNS text LANGUAGE sql AS $$ SELECT p || g $$;
SELECT idem_call('u', 'bad', 'domains(positive, given)', '{"p": -1}');
SELECT idem_call('u', 'bad', 'domains(positive, given)', '{"g": null}');
SELECT idem_call('u', 'domains', 'domains(positive, given)', '{"g": "y"}'), idem_call('u', 'domains 2', 'domains(positive, given)', '{"p": 5}');
SELECT idem_status('u', 'bad');
-- Defaults are evaluated once, and may be anything.
CREATE SEQUENCE numbers;
CREATE FUNCTION plus(a numeric, b numeric DEFAULT 0) RETURNS numeric LANGUAGE sql IMMUTABLE AS 'SELECT a + b';
CREATE FUNCTION defaults(a bigint DEFAULT nextval('numbers'), b numeric DEFAULT plus(2) + 3, c text DEFAULT 'it''s ' || current_schema COLLATE "C",
	d timestamptz DEFAULT now(), e int[] DEFAULT '{1,2}', f text DEFAULT NULL)
RETURNS jsonb LANGUAGE sql AS $$ SELECT jsonb_build_array(a, b, c, d = now(), e, f) $$;
SELECT idem_call('u', 'defaults', oid::text), idem_call('u', 'defaults 2', oid::text, '{"b": 1, "f": "f"}'), idem_call('u', 'defaults 2', oid::text, '{"f": "f", "b": 1}') AS replay
FROM pg_proc WHERE proname = 'defaults';
SELECT last_value FROM numbers;
-- OUT and INOUT parameters, VARIADIC arrays, and no parameters at all
CREATE FUNCTION outs(a int, OUT b int, INOUT c int DEFAULT 5, OUT d text) LANGUAGE sql AS $$ SELECT a + 1, c + 1, 'd' $$;
CREATE FUNCTION one_out(OUT b int) LANGUAGE sql AS 'SELECT 3';
CREATE FUNCTION adds(a int, VARIADIC rest int[]) RETURNS int LANGUAGE sql AS 'SELECT a + cardinality(rest)';
CREATE FUNCTION variadic_default(VARIADIC rest int[] DEFAULT '{7,8}') RETURNS int LANGUAGE sql AS 'SELECT rest[2]';
SELECT idem_call('u', 'outs', 'outs(int, int)', '{"a": 1}'), idem_call('u', 'outs 2', 'outs(int, int)', '{"a": 1, "c": 1}'), idem_call('u', 'out', 'one_out()'),
	idem_call('u', 'variadic', 'adds(int, int[])', '{"a": 1, "rest": [1, 2, 3]}'), idem_call('u', 'variadic 2', 'variadic_default(int[])');
-- Arguments of a VARIADIC function are left out. Another function could take f(1) too.
CREATE FUNCTION variadic_last("from" int, "a ""B" int DEFAULT 2, VARIADIC rest int[] DEFAULT '{7,8}') RETURNS int[] LANGUAGE sql AS 'SELECT array["from", "a ""B"] || rest';
CREATE FUNCTION variadic_last(VARIADIC rest int[]) RETURNS int[] LANGUAGE sql AS 'SELECT NULL::int[]';
SELECT idem_call('u', 'variadic 3', 'variadic_last(int, int, int[])', '{"from": 1}'), idem_call('u', 'variadic 4', 'variadic_last(int, int, int[])', '{"from": 1, "a \"B": 3}'),
	idem_call('u', 'variadic 5', 'variadic_last(int, int, int[])', '{"rest": [], "a \"B": 3, "from": 1}');
SELECT idem_call('u', 'bad', 'outs(int, int)', '{"a": 1, "b": 1}');
SELECT idem_call('u', 'bad', 'adds(int, int[])', '{"a": 1}');
-- A collation decides in the function as in a statement.
CREATE DOMAIN c_text AS text COLLATE "C";
CREATE FUNCTION sorts(a c_text, b c_text) RETURNS boolean LANGUAGE sql AS 'SELECT a < b';
CREATE FUNCTION upper_case(a c_text) RETURNS text LANGUAGE plpgsql AS 'BEGIN RETURN upper(a); END';
SELECT idem_call('u', 'collation', 'sorts(c_text, c_text)', '{"a": "B", "b": "a"}'), idem_call('u', 'collation 2', 'upper_case(c_text)', '{"a": "x"}');

-- A number that is too long for the fingerprint
SELECT idem_call('u', 'bad', 'strict_one(int, int)', '{"a": 1e131071}');
\echo :SQLSTATE
-- Names that are wrong
SELECT idem_call('u', 'bad', 'pay(int, numeric)', '{"acount": 1, "amount": 2}');
\echo :SQLSTATE
SELECT idem_call('u', 'bad', 'pay(int, numeric)', '{"account": 1}');
\echo :SQLSTATE
SELECT idem_call('u', 'bad', 'pg_backend_pid()', '{"a": 1}');
\echo :SQLSTATE
SELECT idem_call('u', 'bad', 'upper(text)', '{}');
\echo :SQLSTATE
CREATE FUNCTION half_named(a int, int) RETURNS int LANGUAGE sql AS 'SELECT 1';
SELECT idem_call('u', 'bad', 'half_named(int, int)', '{"a": 1}');
\echo :SQLSTATE
-- NULL and malformed arguments of idem_call() itself
SELECT idem_call('u', 'bad', NULL, '{}');
\echo :SQLSTATE
SELECT idem_call('u', 'bad', 'one_out()', NULL);
\echo :SQLSTATE
SELECT idem_call('u', 'bad', 'one_out()', '[]');
\echo :SQLSTATE
SELECT idem_call('u', 'bad', 'one_out()', 'null');
\echo :SQLSTATE
SELECT idem_call(NULL, 'bad', 'one_out()');
\echo :SQLSTATE
SELECT idem_call('u', '', 'one_out()');
\echo :SQLSTATE
SELECT idem_call('u', 'bad', 'one_out()', scope => NULL);
\echo :SQLSTATE
SELECT idem_call('u', 'bad', 'one_out()', wait => '-1 s');
\echo :SQLSTATE
-- A parameter of type text needs a cast; one without a type does not.
PREPARE untyped AS SELECT idem_call($1, $2, $3, $4);
EXECUTE untyped ('u', 'prepared', 'strict_one(int, int)', '{"a": 40}');
PREPARE typed (text, text, text, text) AS SELECT idem_call($1, $2, $3, $4::jsonb), idem_outcome();
EXECUTE typed ('u', 'prepared', 'strict_one(int, int)', '{"a": 40}');

-- ----- functions that it cannot run -----

CREATE PROCEDURE a_procedure() LANGUAGE sql AS '';
CREATE FUNCTION a_set() RETURNS SETOF int LANGUAGE sql AS 'SELECT 1';
CREATE FUNCTION a_table() RETURNS TABLE (a int) LANGUAGE sql AS 'SELECT 1';
CREATE FUNCTION a_trigger() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END';
CREATE FUNCTION polymorphic(a anyelement) RETURNS anyelement LANGUAGE sql AS 'SELECT a';
CREATE FUNCTION polymorphic_array(a int, b anyarray) RETURNS int LANGUAGE sql AS 'SELECT a';
CREATE FUNCTION takes_record(a record) RETURNS int LANGUAGE plpgsql AS 'BEGIN RETURN 1; END';
SELECT idem_call('u', 'bad', oid::text) FROM pg_proc WHERE proname = 'a_procedure';
\echo :SQLSTATE
SELECT idem_call('u', 'bad', 'a_set()');
\echo :SQLSTATE
SELECT idem_call('u', 'bad', 'a_table()');
\echo :SQLSTATE
SELECT idem_call('u', 'bad', 'a_trigger()');
\echo :SQLSTATE
SELECT idem_call('u', 'bad', 'sum(int)');
\echo :SQLSTATE
SELECT idem_call('u', 'bad', 'row_number()');
\echo :SQLSTATE
SELECT idem_call('u', 'bad', 'polymorphic(anyelement)', '{"a": 1}');
\echo :SQLSTATE
SELECT idem_call('u', 'bad', 'polymorphic_array(int, anyarray)', '{"a": 1, "b": [1]}');
\echo :SQLSTATE
SELECT idem_call('u', 'bad', 'takes_record(record)', '{"a": {"b": 1}}');
\echo :SQLSTATE
SELECT idem_call('u', 'bad', 'cstring_out(cstring)');
\echo :SQLSTATE
SELECT idem_call('u', 'bad', '0');
\echo :SQLSTATE
SELECT idem_call('u', 'bad', '4294967295');
\echo :SQLSTATE
SELECT count(*) FROM idem_claims WHERE request_id = 'bad';

-- ----- results -----

CREATE FUNCTION r_void() RETURNS void LANGUAGE plpgsql AS $$ BEGIN INSERT INTO payments (note) VALUES ('void'); END $$;
CREATE FUNCTION r_void_sql() RETURNS void STABLE LANGUAGE sql AS 'SELECT 1';
CREATE FUNCTION r_null() RETURNS int LANGUAGE sql AS 'SELECT NULL::int';
CREATE FUNCTION r_json_null() RETURNS jsonb LANGUAGE sql AS $$ SELECT 'null'::jsonb $$;
CREATE FUNCTION r_json() RETURNS json LANGUAGE sql AS $$ SELECT '{"b":  1, "a": [ ]}'::json $$;
CREATE FUNCTION r_row() RETURNS item LANGUAGE sql AS $$ SELECT 'x', 1 $$;
CREATE FUNCTION r_record() RETURNS record LANGUAGE sql AS $$ SELECT 'x'::text AS a, 1 AS b $$;
CREATE FUNCTION r_array() RETURNS item[] LANGUAGE sql AS $$ SELECT ARRAY[ROW('x', 1)::item, NULL] $$;
CREATE FUNCTION r_text() RETURNS text LANGUAGE sql AS $$ SELECT 'a "text"' $$;
CREATE FUNCTION r_time() RETURNS timestamp LANGUAGE sql AS $$ SELECT timestamp '2026-01-02 03:04:05.6' $$;
CREATE FUNCTION r_domain() RETURNS positive LANGUAGE sql AS 'SELECT 3';
SELECT substr(proname, 3) AS returns, r.result, r.result IS NULL AS is_null
FROM pg_proc, LATERAL (SELECT idem_call('u', proname, pg_proc.oid::text) AS result OFFSET 0) AS r
WHERE proname ~ '^r_' AND pronamespace = 'public'::regnamespace ORDER BY proname;
SELECT request_id, result, result IS NULL AS is_null, state FROM idem_claims WHERE request_id ~ '^r_' ORDER BY 1;
SELECT note, count(*) FROM payments GROUP BY note;
SELECT idem_call('u', 'r_void', 'r_void()') IS NULL AS is_null, idem_outcome();
SELECT note, count(*) FROM payments GROUP BY note;
TRUNCATE payments;
CREATE FUNCTION r_large() RETURNS text LANGUAGE sql AS $$ SELECT repeat('x', 200) $$;
INSERT INTO idem_scopes (scope, result_max_bytes) VALUES ('small', 100);
SELECT idem_call('u', 'large', 'r_large()', scope => 'small');
\echo :SQLSTATE
SELECT idem_status('u', 'large', 'small'), length(idem_call('u', 'large', 'r_large()') #>> '{}');

-- ----- the function settles, claims, calls, and fails -----

CREATE FUNCTION completes(result jsonb, returned jsonb) RETURNS jsonb LANGUAGE plpgsql AS $$ BEGIN PERFORM idem_complete(result); RETURN returned; END $$;
CREATE FUNCTION fails(error jsonb) RETURNS text LANGUAGE plpgsql AS $$ BEGIN PERFORM idem_fail(error); RETURN 'ignored'; END $$;
CREATE FUNCTION raises() RETURNS text LANGUAGE plpgsql AS $$ BEGIN INSERT INTO payments (note) VALUES ('raised'); RAISE 'it failed'; END $$;
-- What it stored itself is the result.
SELECT idem_call('u', 'completes', 'completes(jsonb, jsonb)', '{"result": 1, "returned": 2}'), idem_outcome(), idem_result();
SELECT idem_call('u', 'completes', 'completes(jsonb, jsonb)', '{"result": 1, "returned": 2}'), idem_outcome(), idem_result();
SELECT idem_call('u', 'completes 2', 'completes(jsonb, jsonb)', '{"result": null, "returned": 2}'), idem_outcome(), idem_result();
SELECT idem_call('u', 'fails', 'fails(jsonb)', '{"error": {"reason": "no money"}}'), idem_outcome(), idem_result();
SELECT idem_call('u', 'fails', 'fails(jsonb)', '{"error": {"reason": "no money"}}');
\echo :SQLSTATE
SELECT idem_result('u', 'fails'), idem_status('u', 'fails');
-- Under failed = retryable the next call runs it again.
INSERT INTO idem_scopes (scope, failed) VALUES ('again', 'retryable');
SELECT idem_call('u', 'fails', 'fails(jsonb)', '{"error": 1}', 'again'), idem_outcome();
SELECT idem_call('u', 'fails', 'fails(jsonb)', '{"error": 1}', 'again'), idem_outcome();
-- An error rolls all back; also to a savepoint only.
SELECT idem_call('u', 'raises', 'raises()');
\echo :SQLSTATE
SELECT idem_status('u', 'raises'), count(*) FROM payments;
BEGIN;
SAVEPOINT s;
SELECT idem_call('u', 'raises', 'raises()');
ROLLBACK TO s;
SELECT idem_outcome();
\echo :SQLSTATE
ROLLBACK TO s;
SELECT idem_call('u', 'raises', 'one_out()');
COMMIT;
SELECT idem_status('u', 'raises'), count(*) FROM payments;

-- Claims of its own, in other scopes and savepoints. idem_outcome() speaks of the call before
-- the function's own claims, and after the call.
CREATE FUNCTION claims_too(request text) RETURNS jsonb LANGUAGE plpgsql AS $$
DECLARE
	first idem_outcome := idem_outcome();
	inner_result jsonb;
BEGIN
	PERFORM idem_claim('u', request, 'step 1');
	PERFORM idem_complete('u', request, '"step 1"', scope => 'step 1');
	PERFORM idem_claim('u', request, 'step 2');		-- stays unsettled
	BEGIN
		PERFORM idem_claim('u', request, 'step 3');
		RAISE division_by_zero;
	EXCEPTION WHEN division_by_zero THEN
	END;
	inner_result := idem_call('u', request, 'strict_one(int, int)', '{"a": 1}', 'step 4');
	PERFORM idem_claim('u', '1', 'other', wait => '0');		-- a replay
	RETURN jsonb_build_array(first, inner_result, idem_outcome());
END $$;
BEGIN;
SELECT idem_call('u', 'nested', 'claims_too(text)', '{"request": "nested"}', 'outer'), idem_outcome(), idem_result();
SELECT idem_complete('"the one that was left"');
SELECT idem_complete('1');
\echo :SQLSTATE
ROLLBACK;
BEGIN;
SELECT idem_claim('u', 'before', 'another key');
SELECT idem_call('u', 'nested', 'claims_too(text)', '{"request": "nested"}', 'outer'), idem_outcome(), idem_result();
COMMIT;
SELECT scope, state, result FROM idem_claims WHERE request_id IN ('nested', 'before') ORDER BY scope;
SELECT idem_call('u', 'nested', 'claims_too(text)', '{"request": "nested"}', 'outer'), idem_outcome(), idem_result();
-- Settled by the function in a savepoint that it rolled back: settled by the call.
CREATE FUNCTION completes_in_vain() RETURNS int LANGUAGE plpgsql AS $$
BEGIN
	BEGIN
		PERFORM idem_complete('"in vain"');
		RAISE division_by_zero;
	EXCEPTION WHEN division_by_zero THEN
	END;
	RETURN 1;
END $$;
SELECT idem_call('u', 'in vain', 'completes_in_vain()'), idem_outcome(), idem_result();
-- The call is in a savepoint, and is rolled back and released.
BEGIN;
SELECT idem_call('u', 'outside', 'one_out()');
SAVEPOINT s;
SELECT idem_call('u', 'inside', 'strict_one(int, int)', '{"a": 1}');
SELECT idem_outcome(), idem_result();
ROLLBACK TO s;
SELECT idem_outcome(), idem_result();
SELECT idem_call('u', 'inside', 'fails(jsonb)', '{"error": 2}');
RELEASE s;
SELECT idem_outcome(), idem_result();
COMMIT;
-- A call of the same request from within, or after a claim that is not settled, is an error:
-- it has no result yet.
CREATE FUNCTION recursive(depth int) RETURNS jsonb LANGUAGE plpgsql AS $$
BEGIN
	RETURN jsonb_build_object('inner', idem_call('u', 'recursive', 'recursive(int)', '{"depth": 1}'), 'status', idem_outcome());
END $$;
SELECT idem_call('u', 'recursive', 'recursive(int)', '{"depth": 1}'), idem_outcome();
\echo :SQLSTATE
SELECT idem_status('u', 'recursive');
BEGIN;
SELECT idem_claim('u', 'by hand');
SELECT idem_claim('u', 'another');
SAVEPOINT s;
SELECT idem_call('u', 'by hand', 'one_out()');
\echo :SQLSTATE
ROLLBACK TO s;
SELECT idem_complete('u', 'by hand', '"settled"');
SELECT idem_call('u', 'by hand', 'one_out()');
SELECT idem_complete('"another"');
ROLLBACK;
CREATE FUNCTION deeper(depth int) RETURNS jsonb LANGUAGE plpgsql AS $$
BEGIN
	RETURN idem_call('u', 'deeper', 'deeper(int)', jsonb_build_object('depth', depth + 1));
END $$;
SELECT idem_call('u', 'deeper', 'deeper(int)', '{"depth": 1}');
\echo :SQLSTATE
-- A function that drops its own claim has nothing to store the result in.
CREATE FUNCTION forgets() RETURNS int LANGUAGE plpgsql AS $$ BEGIN PERFORM idem_forget('u', 'forgets'); RETURN 1; END $$;
SELECT idem_call('u', 'forgets', 'forgets()');
\echo :SQLSTATE
-- Two calls of a request in one statement; a loop of calls
SELECT idem_call('u', 'twice', 'strict_one(int, int)', '{"a": 1}'), idem_call('u', 'twice', 'strict_one(int, int)', '{"a": 1}'), idem_outcome();
SELECT count(*), count(DISTINCT idem_call('u', 'loop ' || i % 10, 'strict_one(int, int)', jsonb_build_object('a', i % 10))) FROM generate_series(1, 100) AS i;

-- ----- which function the text means -----

-- In one session the same text means another function with another search_path, to another role,
-- and after a change of schemas, functions or types.
CREATE SCHEMA one;
CREATE SCHEMA two;
CREATE FUNCTION one.which() RETURNS text LANGUAGE sql AS $$ SELECT 'one' $$;
CREATE FUNCTION two.which() RETURNS text LANGUAGE sql AS $$ SELECT 'two' $$;
CREATE FUNCTION ask(function text DEFAULT 'which()', arguments jsonb DEFAULT '{}') RETURNS jsonb LANGUAGE sql
	AS $$ SELECT idem_call('u', gen_random_uuid()::text, function, arguments) $$;
SET search_path = one, two, public;
SELECT ask();
SET search_path = two, one, public;
SELECT ask();
SET search_path = three, two, public;
SELECT ask();
CREATE SCHEMA three;
SELECT ask();
CREATE FUNCTION three.which() RETURNS text LANGUAGE sql AS $$ SELECT 'three' $$;
SELECT ask();
BEGIN;
DROP FUNCTION three.which();
SELECT ask();
ROLLBACK;
SELECT ask();
ALTER FUNCTION three.which() RENAME TO who;
SELECT ask();
ALTER SCHEMA two RENAME TO four;
SELECT ask();
ALTER SCHEMA four RENAME TO two;
CREATE TYPE one.kind AS ENUM ('a');
CREATE FUNCTION public.typed(k one.kind) RETURNS text LANGUAGE sql AS $$ SELECT 'of one' $$;
SET search_path = one, public;
SELECT ask('typed(kind)', '{"k": "a"}');
CREATE TYPE pg_temp.kind AS ENUM ('a');
SELECT ask('typed(kind)', '{"k": "a"}');
CREATE FUNCTION public.typed(k pg_temp.kind) RETURNS text LANGUAGE sql AS $$ SELECT 'of pg_temp' $$;
SELECT ask('typed(kind)', '{"k": "a"}');
SET search_path = one, public, pg_temp;
SELECT ask('typed(kind)', '{"k": "a"}');
BEGIN;
ALTER TYPE one.kind RENAME TO sort;
SELECT ask('typed(kind)', '{"k": "a"}');
ROLLBACK;
-- Another role
CREATE ROLE idem_caller;
GRANT USAGE ON SCHEMA public TO idem_caller;
SELECT idem_grant('idem_caller', 'app');
SELECT ask('typed(one.kind)', '{"k": "a"}');
\set VERBOSITY terse
SET ROLE idem_caller;
SELECT ask('typed(one.kind)', '{"k": "a"}');
SELECT ask();
RESET ROLE;
GRANT USAGE ON SCHEMA one TO idem_caller;
SET ROLE idem_caller;
SELECT ask('typed(one.kind)', '{"k": "a"}'), ask();
RESET ROLE;
CREATE ROLE idem_group;
REVOKE USAGE ON SCHEMA one FROM idem_caller;
GRANT USAGE ON SCHEMA one TO idem_group;
GRANT idem_group TO idem_caller;
SET ROLE idem_caller;
SELECT ask('typed(one.kind)', '{"k": "a"}');
RESET ROLE;
REVOKE idem_group FROM idem_caller;
SET ROLE idem_caller;
SELECT ask('typed(one.kind)', '{"k": "a"}');
RESET ROLE;
-- A role is granted while the session has the search_path of before
CREATE FUNCTION public.let_in() RETURNS void SECURITY DEFINER LANGUAGE plpgsql AS $$ BEGIN EXECUTE 'GRANT idem_group TO idem_caller'; END $$;
GRANT USAGE ON SCHEMA two TO idem_caller;
SET search_path = one, two, public;
SET ROLE idem_caller;
SELECT ask();
SELECT public.let_in();
SELECT ask() IS NOT NULL AS called;
RESET ROLE;
SELECT ask();
SET ROLE idem_caller;
SELECT ask();
RESET ROLE;
REVOKE USAGE ON SCHEMA two FROM idem_caller;
DROP FUNCTION public.let_in();
\set VERBOSITY default
RESET search_path;
SELECT idem_revoke('idem_caller', 'app');
REVOKE USAGE ON SCHEMA public FROM idem_caller;
REVOKE USAGE ON SCHEMA one FROM idem_group;
DROP ROLE idem_caller, idem_group;
-- Longer than a session remembers
SELECT ask(repeat(' ', 300) || 'one.which()'), ask(repeat(' ', 300) || 'two.which()');
-- The look-up itself sets a search_path, a very long one
SET client_min_messages = warning;
CREATE TYPE modified;
CREATE FUNCTION modified_in(cstring) RETURNS modified LANGUAGE internal IMMUTABLE STRICT AS 'textin';
CREATE FUNCTION modified_out(modified) RETURNS cstring LANGUAGE internal IMMUTABLE STRICT AS 'textout';
CREATE FUNCTION modifier(cstring[]) RETURNS int LANGUAGE plpgsql IMMUTABLE
	AS $$ BEGIN PERFORM set_config('search_path', repeat('a, ', 10000) || 'public', false); RETURN 1; END $$;
CREATE TYPE modified (INPUT = modified_in, OUTPUT = modified_out, TYPMOD_IN = modifier, INTERNALLENGTH = VARIABLE);
CREATE FUNCTION of_modified(m modified) RETURNS text LANGUAGE sql AS $$ SELECT 'of modified' $$;
RESET client_min_messages;
SELECT idem_call('u', 'modified', 'of_modified(modified(5))', '{"m": ""}');
SELECT length(current_setting('search_path'));
RESET search_path;
DROP FUNCTION ask(text, jsonb);

-- ----- how the function runs -----

CREATE FUNCTION runs_as() RETURNS jsonb SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET work_mem = '1MB' LANGUAGE sql
	AS $$ SELECT jsonb_build_array(current_user, current_setting('work_mem'), current_setting('search_path')) $$;
CREATE FUNCTION runs_plainly() RETURNS jsonb LANGUAGE sql AS $$ SELECT jsonb_build_array(current_user, current_setting('search_path')) $$;
CREATE ROLE idem_caller;
SELECT current_user AS me \gset
GRANT USAGE ON SCHEMA public TO idem_caller;
SELECT idem_grant('idem_caller', 'app');
REVOKE ALL ON FUNCTION one_out() FROM PUBLIC;
CREATE SCHEMA hidden;
CREATE FUNCTION hidden.f() RETURNS int LANGUAGE sql AS 'SELECT 1';
SELECT 'hidden.f()'::regprocedure::oid AS hidden \gset
SET work_mem = '3MB';
SET search_path = public, pg_catalog;
SET ROLE idem_caller;
SELECT r = jsonb_build_array(:'me', '1MB', 'pg_catalog, pg_temp') AS as_definer FROM idem_call('u', 'definer', 'runs_as()') AS r;
SELECT idem_call('u', 'invoker', 'runs_plainly()'), current_setting('work_mem');
-- What the caller may not execute, it cannot call: not even a replay.
SELECT idem_call('u', 'denied', 'one_out()');
\echo :SQLSTATE
SELECT idem_call('u', 'raises', 'one_out()');
\echo :SQLSTATE
SELECT idem_call('u', 'denied', :'hidden');
\echo :SQLSTATE
SELECT idem_status('u', 'denied');
RESET ROLE;
RESET search_path;
RESET work_mem;
SELECT idem_revoke('idem_caller', 'app');
REVOKE USAGE ON SCHEMA public FROM idem_caller;
DROP ROLE idem_caller;
-- A read-only transaction; the function sees what its caller has written.
BEGIN READ ONLY;
SELECT idem_call('u', 'read-only', 'r_text()');
\echo :SQLSTATE
ROLLBACK;
CREATE FUNCTION seen() RETURNS bigint STABLE LANGUAGE sql AS 'SELECT count(*) FROM payments';
WITH written AS (INSERT INTO payments (note) VALUES ('seen') RETURNING 1)
SELECT idem_call('u', 'seen 1', 'seen()') AS in_one_statement FROM written;
BEGIN ISOLATION LEVEL REPEATABLE READ;
INSERT INTO payments (note) VALUES ('seen');
SELECT idem_call('u', 'seen 2', 'seen()');
COMMIT;
-- Cancelled in the middle: nothing is recorded.
CREATE FUNCTION sleeps() RETURNS void LANGUAGE plpgsql AS $$ BEGIN INSERT INTO payments (note) VALUES ('slept'); PERFORM pg_sleep(60); END $$;
SET statement_timeout = '100ms';
SELECT idem_call('u', 'cancelled', 'sleeps()');
\echo :SQLSTATE
RESET statement_timeout;
SELECT idem_status('u', 'cancelled'), count(*) FROM payments WHERE note = 'slept';

TRUNCATE idem_claims;
DELETE FROM idem_scopes;
