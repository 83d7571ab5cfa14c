-- Claims in prepared transactions. :SQLSTATE is that of the statement before.
\set SHOW_CONTEXT never

-- A prepared transaction holds its keys until it ends.
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
-- PREPARE ends the transaction of the session, which then holds no key.
SELECT idem_result();
\echo :SQLSTATE
SELECT idem_complete('1');
\echo :SQLSTATE
SELECT idem_complete('2pc', 'committed', '1');
\echo :SQLSTATE
-- in_progress and timed_out: by the argument wait, and by the setting idem.wait. What the DETAIL
-- says of the holder is tested in test/t/048_holders.pl.
\set VERBOSITY terse
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
SELECT outcome, result, progress, expires_at, lease_until FROM idem_try_claim('2pc', 'committed', wait => '1 ms');
-- Nothing of the row counts before the commit, its fingerprint included.
SELECT outcome FROM idem_try_claim('2pc', 'committed', fingerprint => '\x02', wait => '0');
SELECT idem_status('2pc', 'committed') IS NULL AS not_committed, count(*) FROM idem_lookup('2pc', 'committed');
\set VERBOSITY default
-- After a wait lock_timeout is as before, and the transaction keeps its work.
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

-- A call in a prepared transaction
CREATE FUNCTION two_phase_answer() RETURNS int LANGUAGE sql AS 'SELECT 42';
BEGIN;
SELECT idem_call('2pc', 'called', 'two_phase_answer()');
PREPARE TRANSACTION 'idem_claim_3';
\set VERBOSITY terse
SELECT idem_call('2pc', 'called', 'two_phase_answer()', wait => '0');
\echo :SQLSTATE
\set VERBOSITY default
COMMIT PREPARED 'idem_claim_3';
SELECT idem_call('2pc', 'called', 'two_phase_answer()', wait => '0'), idem_outcome();
DROP FUNCTION two_phase_answer();

-- The prepared transaction took its locks along: the next one takes locks of its own.
SELECT idem_claim('2pc', 'before');
BEGIN;
SELECT idem_claim('2pc', 'locks');
PREPARE TRANSACTION 'idem_claim_4';
BEGIN;
SELECT idem_claim('2pc', 'more locks');
SELECT count(*) FROM pg_locks WHERE pid = pg_backend_pid() AND mode = 'RowExclusiveLock' AND relation = 'idem_claims'::regclass;
COMMIT;
COMMIT PREPARED 'idem_claim_4';

TRUNCATE idem_claims;
