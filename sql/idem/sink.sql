CREATE FUNCTION @extschema@.idem_skip_duplicates()
RETURNS trigger
AS 'MODULE_PATHNAME', 'idem_skip_duplicates'
LANGUAGE C VOLATILE PARALLEL UNSAFE;

COMMENT ON FUNCTION @extschema@.idem_skip_duplicates() IS
'trigger BEFORE INSERT, arguments scope, user column, request column: claims the request of each row, and skips the row if it was done before';
