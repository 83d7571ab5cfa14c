-- ----- types -----

CREATE TYPE @extschema@.idem_state AS ENUM ('in_progress', 'completed', 'failed');
CREATE TYPE @extschema@.idem_outcome AS ENUM (
	'claimed', 'completed', 'failed', 'in_progress', 'timed_out', 'unknown', 'mismatch', 'stale', 'invalid');
