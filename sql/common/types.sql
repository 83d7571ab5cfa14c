-- ----- types -----

CREATE TYPE @extschema@.idem_state AS ENUM ('in_progress', 'completed', 'failed');

COMMENT ON TYPE @extschema@.idem_state IS 'state of a stored claim';

CREATE TYPE @extschema@.idem_outcome AS ENUM (
	'claimed', 'completed', 'failed', 'in_progress', 'timed_out', 'unknown',
	'mismatch', 'stale', 'invalid'
);

COMMENT ON TYPE @extschema@.idem_outcome IS 'answer of a claim call';
