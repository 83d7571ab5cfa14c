-- ----- keys and arguments -----

CREATE FUNCTION @extschema@.idem__raise(sqlstate_ text, message_ text, hint_ text) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
	RAISE EXCEPTION USING ERRCODE = sqlstate_, MESSAGE = message_, HINT = hint_;
END $$;

CREATE FUNCTION @extschema@.idem__raise(sqlstate_ text, message_ text, hint_ text, detail_ text) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
	RAISE EXCEPTION USING ERRCODE = sqlstate_, MESSAGE = message_, HINT = hint_, DETAIL = detail_;
END $$;

CREATE FUNCTION @extschema@.idem__name(key @extschema@.idem__key) RETURNS text LANGUAGE sql IMMUTABLE
AS $$ SELECT pg_catalog.format('scope "%s", user "%s", request "%s"', (key).scope, (key).user_id, (key).request_id) $$;

CREATE FUNCTION @extschema@.idem__raise_of_key(sqlstate_ text, message_ text, hint_ text, key @extschema@.idem__key)
RETURNS void LANGUAGE sql
AS $$ SELECT @extschema@.idem__raise(sqlstate_, message_, hint_, 'S' || substr(@extschema@.idem__name(key), 2) || '.') $$;

-- The checks of arguments are expressions: the planner inlines them into their callers.

-- part: user_id, request_id or scope
CREATE FUNCTION @extschema@.idem__check_part(part text, value text) RETURNS void LANGUAGE sql AS $$
	SELECT CASE WHEN part = 'scope' AND value IS NULL THEN @extschema@.idem__raise('ID400', 'scope must not be null',
			'Fix the client: leave the scope out, or pass '''' for the default scope.')
		WHEN part <> 'scope' AND coalesce(value, '') = '' THEN
			@extschema@.idem__raise('ID400', part || CASE WHEN value IS NULL THEN ' must not be null' ELSE ' must not be empty' END,
				'Fix the client: it must send the same two ids each time it sends the request.',
				'A request is named by a user and a request id.')
		WHEN octet_length(value) > 255 THEN @extschema@.idem__raise('ID400', part || ' is too long',
			'Fix the client: send a shorter ' || part || ', or a hash of this one.',
			pg_catalog.format('It has %s bytes, the limit is 255.', octet_length(value))) END
$$;

-- (Replaced by sql/idem-citus.sql.)
CREATE FUNCTION @extschema@.idem__check_scope(scope text) RETURNS void LANGUAGE sql
AS $$ SELECT @extschema@.idem__check_part('scope', scope) $$;

-- Makes the key of the arguments.  A bad id raises an error and never returns NULL: an IF would read NULL as
-- "already done" and lose the request.  (Replaced by sql/idem-citus.sql.)
CREATE FUNCTION @extschema@.idem__key_of(user_id text, request_id text, scope text) RETURNS @extschema@.idem__key
LANGUAGE plpgsql AS $$
BEGIN
	IF (octet_length(user_id) BETWEEN 1 AND 255 AND octet_length(request_id) BETWEEN 1 AND 255
			AND octet_length(scope) <= 255) IS NOT TRUE THEN
		PERFORM @extschema@.idem__check_part('user_id', user_id), @extschema@.idem__check_part('request_id', request_id),
			@extschema@.idem__check_part('scope', scope);
	END IF;
	RETURN ROW (user_id, request_id, scope)::@extschema@.idem__key;
END $$;

CREATE FUNCTION @extschema@.idem__check_fingerprint(fingerprint bytea) RETURNS void LANGUAGE sql AS $$
	SELECT CASE WHEN octet_length(fingerprint) NOT BETWEEN 1 AND 64 THEN
		@extschema@.idem__raise('ID400', 'fingerprint must have 1 to 64 bytes',
			'Fix the client: send a hash of the parameters, idem_fingerprint(jsonb) makes one.',
			pg_catalog.format('It has %s bytes.', octet_length(fingerprint))) END
$$;

CREATE FUNCTION @extschema@.idem__require_token(token int8) RETURNS void LANGUAGE sql AS $$
	SELECT CASE WHEN (token > 0) IS NOT TRUE THEN
		@extschema@.idem__raise('ID400', CASE WHEN token IS NULL THEN 'token must not be null' ELSE 'token must be positive' END,
			'Fix the client: pass the token that idem_lease() returned with the lease.') END
$$;

-- The token of a settlement.  NULL: there is no lease.
CREATE FUNCTION @extschema@.idem__check_token(token int8) RETURNS void LANGUAGE sql
AS $$ SELECT CASE WHEN token IS NOT NULL THEN @extschema@.idem__require_token(token) END $$;

CREATE FUNCTION @extschema@.idem__has_months(length interval) RETURNS boolean LANGUAGE sql IMMUTABLE
AS $$ SELECT date_part('year', length) <> 0 OR date_part('month', length) <> 0 $$;

CREATE FUNCTION @extschema@.idem__check_lease(lease interval) RETURNS interval LANGUAGE plpgsql AS $$
BEGIN
	IF @extschema@.idem__has_months(lease) OR lease <= interval '0' OR lease > interval '36500 days' THEN
		PERFORM @extschema@.idem__raise('ID400', 'lease must be positive, at most 36500 days, and without months',
			'Fix the client: give it in seconds or minutes, and extend it while the work goes on.');
	END IF;
	RETURN @extschema@.idem__without_days(lease);
END $$;

CREATE FUNCTION @extschema@.idem__check_lease_max(key @extschema@.idem__key, lease interval, lease_max interval)
RETURNS void LANGUAGE sql AS $$
	SELECT CASE WHEN lease > lease_max THEN
		@extschema@.idem__raise_of_key('ID400', pg_catalog.format('lease of %s s is longer than the scope allows, %s s',
				trim_scale(extract(epoch FROM lease)), trim_scale(extract(epoch FROM lease_max))),
			'Extend it while the work goes on, or have the operator raise idem.lease_max or the scope''s lease_max.', key) END
$$;

-- name: result or progress.  The size is taken before compression.
CREATE FUNCTION @extschema@.idem__check_size(key @extschema@.idem__key, name text, value jsonb, bytes_max int4)
RETURNS void LANGUAGE sql AS $$
	SELECT CASE WHEN pg_column_size(to_jsonb(value)) - 4 > bytes_max THEN
		@extschema@.idem__raise_of_key('ID413', pg_catalog.format('%s has %s bytes, the limit is %s',
				name, pg_column_size(to_jsonb(value)) - 4, bytes_max),
			'Store a reference to it, or have the operator raise idem.result_max_bytes or the scope''s result_max_bytes.', key) END
$$;

CREATE FUNCTION @extschema@.idem__require_writable(command text) RETURNS void LANGUAGE sql AS $$
	SELECT CASE WHEN current_setting('transaction_read_only') = 'on' THEN
		@extschema@.idem__raise('25006', pg_catalog.format('cannot execute %s in a read-only transaction', command),
			CASE WHEN pg_is_in_recovery() THEN 'This server is a standby: send the request to the primary.'
			ELSE 'Use a read-write transaction, the one that does the work.' END) END
$$;

-- The time in a version 7 UUID (RFC 9562, section 5.7); NULL if the request id is not one in canonical lower
-- case: another spelling of the same uuid would be another key.
CREATE FUNCTION @extschema@.idem__key_time(key @extschema@.idem__key) RETURNS timestamptz LANGUAGE sql STABLE AS $$
	SELECT CASE WHEN (key).request_id ~ '^[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$' THEN
		to_timestamp((('x' || left((key).request_id, 8) || substr((key).request_id, 10, 4))::bit(48)::int8 / 1000.0)::float8) END
$$;

-- Rounds expires_at up to a whole second, so that the entries of its index deduplicate.
CREATE FUNCTION @extschema@.idem__whole_second(moment timestamptz)
RETURNS timestamptz
LANGUAGE sql STABLE				-- as date_trunc(): otherwise it is not inlined, and is planned in each call
AS $$ SELECT date_trunc('second', moment + interval '999999 microseconds') $$;

-- The text whose hash is the fingerprint: equal jsonb give equal text, unequal jsonb different text.  jsonb
-- orders the keys of an object by the keys alone.  Numbers lose their trailing zeros, which jsonb stores but
-- does not compare.  They are written out, so the 8 bytes of 1e131071 would become 131072: hence a limit, and
-- digits are counted without building them.
CREATE FUNCTION @extschema@.idem__canonical(parameters jsonb) RETURNS text
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE AS $$
DECLARE
	kind constant text := jsonb_typeof(parameters);
	number numeric;
BEGIN
	IF kind = 'object' THEN
		RETURN '{' || coalesce((SELECT string_agg(to_json(e.key)::text || ':' || @extschema@.idem__canonical(e.value), ',' ORDER BY e.n)
			FROM jsonb_each(parameters) WITH ORDINALITY AS e (key, value, n)), '') || '}';
	ELSIF kind = 'array' THEN
		RETURN '[' || coalesce((SELECT string_agg(@extschema@.idem__canonical(e.value), ',' ORDER BY e.n)
			FROM jsonb_array_elements(parameters) WITH ORDINALITY AS e (value, n)), '') || ']';
	ELSIF kind <> 'number' THEN
		RETURN parameters::text;
	END IF;
	number := parameters::numeric;
	IF (abs(number) >= 1e500 OR scale(number) > 500)
		AND (min_scale(number) > 1000 OR abs(number) >= ('1e' || 1000 - min_scale(number))::numeric) THEN
		RAISE EXCEPTION USING ERRCODE = 'ID400', MESSAGE = 'a number of the JSON document is too long',
			DETAIL = 'Written out, it has more than 1000 digits.', HINT = 'Fix the client: send it as a string.';
	END IF;
	RETURN trim_scale(number)::text;
END $$;

CREATE FUNCTION @extschema@.idem_fingerprint(parameters jsonb) RETURNS bytea
LANGUAGE plpgsql IMMUTABLE STRICT PARALLEL SAFE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
	RETURN sha256(convert_to(@extschema@.idem__canonical(parameters), getdatabaseencoding()));
END $$;

-- Raises ID400 for a claim in a scope without a row.
CREATE FUNCTION @extschema@.idem__raise_undeclared(undeclared text) RETURNS void LANGUAGE sql AS $$
	SELECT @extschema@.idem__raise('ID400', pg_catalog.format('scope "%s" is not declared', undeclared),
		pg_catalog.format('Fix the client; or declare the scope: INSERT INTO idem_scopes (scope) VALUES (%L).', undeclared),
		'With idem.scopes = declared, requests can be claimed only in scopes that have a row in idem_scopes.')
$$;
