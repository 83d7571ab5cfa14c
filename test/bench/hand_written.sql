-- The alternative: a table and statements as people write them

CREATE TABLE hand_written (
	user_id text,
	request_id text,
	created_at timestamptz DEFAULT now(),
	PRIMARY KEY (user_id, request_id)
);
CREATE INDEX hand_written_created_at ON hand_written (created_at);

-- The same with a response
CREATE TABLE hand_written_results (LIKE hand_written INCLUDING ALL, result jsonb);

CREATE FUNCTION hand_written_claim(u text, r text) RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
	INSERT INTO hand_written (user_id, request_id) VALUES (u, r) ON CONFLICT DO NOTHING;
	RETURN FOUND;
END $$;

-- Cleaning, in the usual form, and in the better one
CREATE FUNCTION hand_written_cleanup_in(ttl interval) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
	removed bigint;
BEGIN
	DELETE FROM hand_written WHERE ctid IN (
		SELECT ctid FROM hand_written WHERE created_at < now() - ttl
		ORDER BY created_at LIMIT 50000 FOR UPDATE SKIP LOCKED);
	GET DIAGNOSTICS removed = ROW_COUNT;
	RETURN removed;
END $$;

CREATE FUNCTION hand_written_cleanup_any(ttl interval) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
	removed bigint;
BEGIN
	DELETE FROM hand_written WHERE ctid = ANY (ARRAY(
		SELECT ctid FROM hand_written WHERE created_at < now() - ttl
		ORDER BY created_at LIMIT 50000 FOR UPDATE SKIP LOCKED));
	GET DIAGNOSTICS removed = ROW_COUNT;
	RETURN removed;
END $$;
