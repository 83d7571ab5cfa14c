-- A mutant of the second edition: idem_release() returns true also if there is nothing to
-- release. A comparison that does not find this difference is worthless.

ALTER FUNCTION idem_release(text, text, int8, text) RENAME TO idem_release_unchanged;

CREATE FUNCTION idem_release(user_id text, request_id text, token int8, scope text DEFAULT '')
RETURNS boolean
LANGUAGE plpgsql
AS $$
BEGIN
	PERFORM idem_release_unchanged(user_id, request_id, token, scope);
	RETURN true;
END
$$;
