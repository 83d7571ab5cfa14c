-- ----- sinks -----

CREATE FUNCTION @extschema@.idem_skip_duplicates()
RETURNS trigger
AS 'MODULE_PATHNAME', 'idem_skip_duplicates'
LANGUAGE C VOLATILE PARALLEL UNSAFE;
