-- What changes of the source break that no other test notices: found by test/torture/mutate.

SET idem.wait = 0;

-- The cleaner keeps the row of a live lease, even if somebody has set expires_at by hand.
SELECT outcome FROM idem_lease('mutants', 'live', lease => '1 hour');
UPDATE idem_claims SET expires_at = '2020-01-01' WHERE user_id = 'mutants';
SELECT idem_cleanup() AS cleaned;
UPDATE idem_claims SET lease_until = '2020-01-01' WHERE user_id = 'mutants';
SELECT idem_cleanup() AS cleaned;

-- A mismatch tells nothing of the request that has the id.
SELECT outcome FROM idem_lease('mutants', 'other', fingerprint => '\x01', lease => '1 hour', progress => '"secret"');
SELECT * FROM idem_lease('mutants', 'other', fingerprint => '\x02', lease => '1 hour');
SELECT idem_heal('mutants', 'other', '"secret"');
BEGIN;
SELECT * FROM idem_try_claim('mutants', 'other', fingerprint => '\x02');
SELECT idem_result() IS NULL AS nothing;
COMMIT;

DELETE FROM idem_claims WHERE user_id = 'mutants';
