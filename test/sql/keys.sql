-- Ids, scopes and fingerprints: which are accepted, which are refused, which are equal.
-- :SQLSTATE is that of the statement before.
\set SHOW_CONTEXT never

-- A NULL, empty or too long id is an error in every function; no function returns NULL for it.
DO $$
DECLARE
	call text;
	bad text;
	hint text;
BEGIN
	FOREACH call IN ARRAY ARRAY['idem_claim(%s)', 'idem_try_claim(%s)', 'idem_result(%s)', 'idem_status(%s)',
		'idem_lookup(%s)', 'idem_forget(%s)']
	LOOP
		FOREACH bad IN ARRAY ARRAY['NULL, ''r'', ''''', ''''', ''r'', ''''', '''u'', NULL, ''''', '''u'', '''', ''''',
			'''u'', ''r'', NULL', 'repeat(''u'', 256), ''r'', ''''', '''u'', repeat(''r'', 256), ''''',
			'''u'', ''r'', repeat(''s'', 256)']
		LOOP
			BEGIN
				EXECUTE format('SELECT * FROM ' || call, bad);
				RAISE WARNING '% with % is not refused', call, bad;
			EXCEPTION WHEN OTHERS THEN
				GET STACKED DIAGNOSTICS hint = PG_EXCEPTION_HINT;
				IF call = 'idem_claim(%s)' THEN
					RAISE NOTICE '% % (%) %', bad, SQLSTATE, SQLERRM, hint;
				ELSIF SQLSTATE <> 'ID400' THEN
					RAISE WARNING '% with %: % %', call, bad, SQLSTATE, SQLERRM;
				END IF;
			END;
		END LOOP;
	END LOOP;
END $$;
-- The settling functions have other arguments after the ids.
SELECT idem_complete(NULL, 'r', '1');
\echo :SQLSTATE
SELECT idem_complete('u', '', '1');
\echo :SQLSTATE
SELECT idem_complete('u', 'r', '1', scope => NULL);
\echo :SQLSTATE
SELECT idem_fail('u', NULL, '1');
\echo :SQLSTATE
SELECT idem_fail('u', 'r', '1', scope => repeat('s', 256));
\echo :SQLSTATE
SELECT count(*) AS claimed FROM idem_claims;

-- 255 bytes are allowed, in all three parts at once. Keys that differ only in the last byte of
-- one part are different keys.
SELECT idem_claim(repeat('u', 255), repeat('r', 255), repeat('s', 255)),
	idem_claim(repeat('u', 254) || 'x', repeat('r', 255), repeat('s', 255)),
	idem_claim(repeat('u', 255), repeat('r', 254) || 'x', repeat('s', 255)),
	idem_claim(repeat('u', 255), repeat('r', 255), repeat('s', 254) || 'x');
SELECT idem_claim(repeat('u', 255), repeat('r', 255), repeat('s', 255)),
	idem_status(repeat('u', 255), repeat('r', 255), repeat('s', 255));
-- The limit counts bytes, not characters.
SELECT idem_claim('u', repeat('é', 127) || 'x');
SELECT idem_claim('u', repeat('é', 128));
\echo :SQLSTATE
-- White space is an id.
SELECT idem_claim(' ', ' ', ' '), idem_claim(' ', ' ', '  ');

-- It does not matter how the table stores the text.
CREATE TABLE ids (id text);
ALTER TABLE ids ALTER id SET STORAGE EXTERNAL;
INSERT INTO ids VALUES ('short'), (repeat('long ', 50));
SELECT idem_claim('stored', id) FROM ids;
SELECT idem_claim('stored', 'short'), idem_claim('stored', repeat('long ', 50));
DROP TABLE ids;

-- Ids of other types are cast to text. A uuid that is cast has one spelling only.
SELECT idem_claim('u', '0193A1F2-7D43-7C5E-9A10-5F7C2E1B8A01'::uuid::text);
SELECT idem_claim('u', '{0193a1f27d437c5e9a105f7c2e1b8a01}'::uuid::text);
SELECT idem_claim('u', '0193a1f2-7d43-7c5e-9a10-5f7c2e1b8a01');
SELECT idem_claim('u', '0193A1F2-7D43-7C5E-9A10-5F7C2E1B8A01') AS as_text_it_is_another;
SELECT idem_claim(42::text, 7::text);
SELECT idem_claim('42', '7');
-- An id whose text can have several spellings is refused before anything is claimed.
\set VERBOSITY sqlstate
SELECT idem_claim('u', 1.50);
\set VERBOSITY default
SELECT idem_status('u', '1.50') IS NULL AS not_claimed;

-- Fingerprints: equal jsonb has an equal fingerprint.
SELECT a, b, idem_fingerprint(a::jsonb) = idem_fingerprint(b::jsonb) AS equal
FROM (VALUES
	('{"a": 1, "b": 2}', '{"b":2,   "a":1}'),
	('{"a": 1}', '{"a": 2, "a": 1}'),
	('1', '1.0'),
	('1', '1.000'),
	('100', '1e2'),
	('0', '-0.0'),
	('0.1', '1.0e-1'),
	('[1, [2.50]]', '[1.0, [2.5]]'),
	('"é"', '"\u00e9"'),
	('"/"', '"\/"')) AS v (a, b);
-- Different jsonb has different fingerprints.
WITH v AS (
	SELECT j, row_number() OVER () AS n FROM unnest(ARRAY['null', 'true', 'false', '1', '10', '-1', '"1"', '""', '"null"', '[]', '{}', '[1]',
		'[[]]', '[{}]', '[null]', '[1, 2]', '[2, 1]', '[12]', '["1", "2"]', '["1,2"]', '["1\",\"2"]', '{"a": 1}',
		'{"a": "1"}', '{"a": [1]}', '{"a": {"b": 1}}', '{"a": {}, "b": 1}', '{"a": null}', '{"": 1}', '{"a:1": 1}',
		'[[1], 2]', '[[1, 2]]', '[1, [2]]', '"a\nb"', '"a\\nb"', '0.1', '1e30', '1.0000000000000000001'
	]) AS j)
SELECT count(*) AS pairs, count(*) FILTER (WHERE idem_fingerprint(x.j::jsonb) = idem_fingerprint(y.j::jsonb)) AS equal
FROM v AS x JOIN v AS y ON x.n < y.n;
-- Fingerprints are stored, so the function must never change.
SELECT idem_fingerprint('{"b": [1.50, null, "x", true], "a": {}, "long key": "\"\n"}')
	= sha256(convert_to('{"a":{},"b":[1.5,null,"x",true],"long key":"\"\n"}', 'UTF8')) AS as_documented;
SELECT encode(idem_fingerprint('1'), 'hex');
SELECT idem_fingerprint(NULL) IS NULL AS none;
-- It writes numbers out: with at most 1000 digits before and after the point. A zero before
-- the point is none, nor are zeros at the end.
SELECT n AS wrong FROM unnest(ARRAY['1e999', '-1e999', '1e-1000', '-1.5e-999', '0e131071', '0e-16383', '1e500', '-1e-501', '1e997', repeat('9', 1000),
	repeat('7', 499) || '.' || repeat('7', 501), '0.' || repeat('9', 1000), '1.' || repeat('0', 2000), '1.5e998']) AS n
WHERE idem_fingerprint(('{"a": [' || n || ']}')::jsonb) <> sha256(convert_to('{"a":[' || trim_scale(n::numeric) || ']}', 'UTF8'))
	OR length(replace(replace(trim_scale(abs(n::numeric))::text, '0.', '.'), '.', '')) > 1000;
DO $$
DECLARE
	n text;
BEGIN
	FOREACH n IN ARRAY ARRAY['1e1000', '-1e1000', '1e131071', '1e-1001', '-1e-16383', repeat('9', 1001), '0.' || repeat('9', 1001),
		repeat('7', 500) || '.' || repeat('7', 501), repeat('7', 1000) || '.5']
	LOOP
		BEGIN
			PERFORM idem_fingerprint(('{"a": [' || n || ']}')::jsonb);
			RAISE WARNING '% is not refused', n;
		EXCEPTION WHEN SQLSTATE 'ID400' THEN
		END;
	END LOOP;
END $$;
SELECT idem_fingerprint('[1e131071]');
\echo :SQLSTATE
-- Nor does it use the memory: this would be 500 MB.
SELECT idem_fingerprint(('[' || repeat('1e131071,', 4000) || '1]')::jsonb);

-- Fingerprints are compared only if the row and the call both have one.
SELECT idem_claim('u', 'with', fingerprint => idem_fingerprint('{"amount": 30.0, "to": 7}'));
SELECT idem_claim('u', 'with', fingerprint => idem_fingerprint('{"to": 7, "amount": 30}'));
SELECT idem_claim('u', 'with') AS the_caller_has_none;
SELECT idem_claim('u', 'with', fingerprint => idem_fingerprint('{"to": 8, "amount": 30}'));
\echo :SQLSTATE
SELECT idem_claim('u', 'without');
SELECT idem_claim('u', 'without', fingerprint => '\x01') AS the_stored_has_none;
SELECT idem_claim('u', 'without', fingerprint => '\x02') AS and_got_none_by_that;
-- Also within one transaction
BEGIN;
SELECT idem_claim('u', 'own', fingerprint => '\x01');
SELECT outcome FROM idem_try_claim('u', 'own', fingerprint => '\x02');
SELECT outcome FROM idem_try_claim('u', 'own', fingerprint => '\x01');
COMMIT;
-- Every byte counts, and so does the length.
SELECT idem_claim('u', 'bytes', fingerprint => '\x0001');
SELECT outcome FROM (VALUES ('\x00'::bytea), ('\x000100'), ('\x0101'), ('\x0002'), ('\x0001')) AS v (f),
	idem_try_claim('u', 'bytes', fingerprint => f);

-- A fingerprint has 1 to 64 bytes.
SELECT idem_claim('u', 'f0', fingerprint => '\x');
\echo :SQLSTATE
SELECT idem_claim('u', 'f1', fingerprint => '\x00');
SELECT idem_claim('u', 'f64', fingerprint => convert_to(repeat('f', 64), 'UTF8'));
SELECT idem_claim('u', 'f64', fingerprint => convert_to(repeat('f', 63) || 'x', 'UTF8'));
\echo :SQLSTATE
SELECT idem_claim('u', 'f65', fingerprint => convert_to(repeat('f', 65), 'UTF8'));
\echo :SQLSTATE

TRUNCATE idem_claims;
