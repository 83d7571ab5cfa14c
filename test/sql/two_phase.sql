-- Claims in prepared transactions. :SQLSTATE is that of the statement before.
\set SHOW_CONTEXT never

-- In a prepared transaction it is held until that ends.
BEGIN;
SELECT idem_claim('2pc', 'committed', fingerprint => '\x01');
SAVEPOINT s;
SELECT idem_claim('2pc', 'in a savepoint');
RELEASE s;
SAVEPOINT s;
SELECT idem_claim('2pc', 'undone');
ROLLBACK TO s;
SELECT idem_complete('2pc', 'committed', '1');
PREPARE TRANSACTION 'idem_claim_1';
SELECT outcome, result FROM idem_try_claim('2pc', 'committed', wait => '0');
-- Preparing ends the transaction: it holds nothing any more.
SELECT idem_result();
\echo :SQLSTATE
SELECT idem_complete('1');
\echo :SQLSTATE
SELECT idem_complete('2pc', 'committed', '1');
\echo :SQLSTATE
-- The caller asks not to wait, the setting says so, the deadline passes.
SELECT idem_claim('2pc', 'committed', wait => '0');
\echo :SQLSTATE
SET idem.wait = 0;
SELECT idem_claim('2pc', 'committed');
\echo :SQLSTATE
SELECT idem_forget('2pc', 'committed');
\echo :SQLSTATE
SET idem.wait = '1ms';
SELECT idem_claim('2pc', 'committed');
\echo :SQLSTATE
SELECT idem_forget('2pc', 'committed');
\echo :SQLSTATE
RESET idem.wait;
SELECT outcome, result, progress, token, expires_at, lease_until FROM idem_try_claim('2pc', 'committed', wait => '1 ms');
-- What it wrote says nothing, its fingerprint included.
SELECT outcome FROM idem_try_claim('2pc', 'committed', fingerprint => '\x02', wait => '0');
SELECT idem_status('2pc', 'committed') IS NULL AS not_committed, count(*) FROM idem_lookup('2pc', 'committed');
-- A lock_timeout of the caller's own that is shorter raises what it always does.
SET lock_timeout = '1ms';
SELECT idem_claim('2pc', 'committed', wait => '1 hour');
\echo :SQLSTATE
SELECT idem_claim('2pc', 'committed', wait => '0');
\echo :SQLSTATE
RESET lock_timeout;
-- The wait leaves nothing behind: neither a setting nor a savepoint's work.
BEGIN;
SELECT idem_claim('2pc', 'mine');
SELECT outcome FROM idem_try_claim('2pc', 'committed', wait => '1 ms');
SHOW lock_timeout;
SELECT idem_complete('"only this one is held"');
COMMIT;
COMMIT PREPARED 'idem_claim_1';
SELECT outcome, result FROM idem_try_claim('2pc', 'committed', wait => '0');
SELECT idem_claim('2pc', 'in a savepoint'), idem_claim('2pc', 'undone');
BEGIN;
SELECT idem_claim('2pc', 'rolled back');
PREPARE TRANSACTION 'idem_claim_2';
SELECT outcome FROM idem_try_claim('2pc', 'rolled back', wait => '0');
ROLLBACK PREPARED 'idem_claim_2';
SELECT outcome FROM idem_try_claim('2pc', 'rolled back', wait => '0');

TRUNCATE idem_claims;
