-- ----- policy -----

-- Only an operator may set what a claim promises, but anybody may change a custom setting.  So the settings are
-- a table.
CREATE TABLE @extschema@.idem_settings (
	only_row boolean PRIMARY KEY DEFAULT true CHECK (only_row),
	ttl interval NOT NULL DEFAULT '1 day'
		CONSTRAINT "ttl must be 1 s to 36500 days, without months" CHECK (
		ttl >= '1 second' AND ttl <= '36500 days'
		AND date_part('year', ttl) = 0 AND date_part('month', ttl) = 0),
	lease interval NOT NULL DEFAULT '30 seconds'
		CONSTRAINT "lease must be positive, at most 36500 days, without months" CHECK (
		lease > '0' AND lease <= '36500 days'
		AND date_part('year', lease) = 0 AND date_part('month', lease) = 0),
	lease_max interval NOT NULL DEFAULT '1 day'
		CONSTRAINT "lease_max must be positive, at most 36500 days, without months" CHECK (
		lease_max > '0' AND lease_max <= '36500 days'
		AND date_part('year', lease_max) = 0 AND date_part('month', lease_max) = 0),
	result_max_bytes int4 NOT NULL DEFAULT 1048576 CONSTRAINT "result_max_bytes must be 1 to 267386880"
		CHECK (result_max_bytes BETWEEN 1 AND 267386880),
	cleanup_batch_size int4 NOT NULL DEFAULT 50000 CONSTRAINT "cleanup_batch_size must be 1 to 1000000"
		CHECK (cleanup_batch_size BETWEEN 1 AND 1000000),
	scopes text NOT NULL DEFAULT 'any' CONSTRAINT "scopes must be any or declared"
		CHECK (scopes = 'any' OR scopes = 'declared')
) USING heap;

COMMENT ON TABLE @extschema@.idem_settings IS 'what the operator has set, for all scopes';
COMMENT ON COLUMN @extschema@.idem_settings.ttl IS 'how long a claim is remembered at least, in scopes without a ttl';
COMMENT ON COLUMN @extschema@.idem_settings.lease IS 'length of a lease when it is extended, in scopes without a lease';
COMMENT ON COLUMN @extschema@.idem_settings.lease_max IS 'longest lease that a caller may ask for, in scopes without a limit';
COMMENT ON COLUMN @extschema@.idem_settings.result_max_bytes IS 'largest result that is stored, in scopes without a limit';
COMMENT ON COLUMN @extschema@.idem_settings.cleanup_batch_size IS 'most expired claims that one batch removes';
COMMENT ON COLUMN @extschema@.idem_settings.scopes IS 'any: a request can be claimed in every scope; declared: only in one that has a row in idem_scopes';

-- An INSERT, by a restored dump say, replaces the row.
CREATE FUNCTION @extschema@.idem__replace_settings() RETURNS trigger
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
	DELETE FROM @extschema@.idem_settings;
	RETURN NEW;
END $$;

CREATE TRIGGER idem__settings_replace BEFORE INSERT ON @extschema@.idem_settings
FOR EACH ROW EXECUTE FUNCTION @extschema@.idem__replace_settings();

-- Turns days into 24 hours each.  Added as a day, an interval would have 23 or 25 hours where the clock changes.
CREATE FUNCTION @extschema@.idem__without_days(length interval) RETURNS interval LANGUAGE sql IMMUTABLE
AS $$ SELECT make_interval(secs => date_part('epoch', length)) $$;

CREATE FUNCTION @extschema@.idem__policy(of_scope text) RETURNS SETOF @extschema@.idem__scope_policy
LANGUAGE sql STABLE ROWS 1 AS $$
	SELECT @extschema@.idem__without_days(coalesce(p.ttl::interval, d.ttl::interval, '1 day')),
		@extschema@.idem__without_days(coalesce(p.lease::interval, d.lease::interval, '30 seconds')),
		@extschema@.idem__without_days(coalesce(p.lease_max::interval, d.lease_max::interval, '1 day')),
		coalesce(p.result_max_bytes::int4, d.result_max_bytes::int4, 1048576),
		p.failed IS NOT DISTINCT FROM 'retryable', p.lapsed IS NOT DISTINCT FROM 'unknown',
		p.expired IS NOT DISTINCT FROM 'reclaim', p.key_time IS NOT DISTINCT FROM 'uuidv7',
		coalesce(p.guarded_since, '-infinity'), d.ttl IS NOT NULL,
		d.scopes IS NOT DISTINCT FROM 'declared' AND p.scope IS NULL
	FROM (SELECT) AS always LEFT JOIN @extschema@.idem_settings AS d ON true
		LEFT JOIN @extschema@.idem_scopes AS p ON p.scope = of_scope COLLATE "C"
$$;

-- ----- an unknown past is stale -----

-- Under key_time = uuidv7 a key without a row is new if its own time is within the ttl: an earlier claim of it
-- would still have a row.  That holds only for claims made under this policy.  So guarded_since moves when a row
-- with uuidv7 appears, when uuidv7 is switched on, and when the ttl grows under it; a key from before it that has
-- no row is stale.  A key's own time can be a minute ahead of its claim, hence the minute.  What a user or a
-- restored dump writes into guarded_since is ignored: this database does not know what another one has promised.
-- (A dump makes the trigger after the rows: doc/portable.md says what to run then.)
--
-- The guard's lock waits for every transaction that has claimed, and holds new claims back until the change
-- commits (see idem__claim_key()): so every claim under the old policy was made before guarded_since.  New claims
-- queue behind the waiting guard.  So it waits in slices, and lets claims pass in between. 
--
-- The trigger runs with the rights of the role that changes the row, so it calls none of our functions.
CREATE FUNCTION @extschema@.idem__scopes_guard() RETURNS trigger
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
	caller_timeout constant text := current_setting('lock_timeout');
	patience constant interval := CASE caller_timeout WHEN '0' THEN '5s' ELSE caller_timeout END;
	give_up constant timestamptz := clock_timestamp() + patience;
	slice_ms constant int4 := least(1000, ceil(1000 * date_part('epoch', patience) / 50));
BEGIN
	IF NEW.key_time IS DISTINCT FROM 'uuidv7' THEN
		NEW.guarded_since := NULL;
		RETURN NEW;
	ELSIF TG_OP = 'UPDATE' AND OLD.key_time = NEW.key_time AND OLD.scope = NEW.scope
		AND NOT coalesce(NEW.ttl > OLD.ttl, false) THEN
		NEW.guarded_since := OLD.guarded_since;
		RETURN NEW;
	END IF;
	LOOP
		BEGIN
			PERFORM set_config('lock_timeout', slice_ms::text, true);
			LOCK TABLE @extschema@.idem_scopes IN EXCLUSIVE MODE;
			EXIT;
		EXCEPTION WHEN lock_not_available THEN
			IF clock_timestamp() >= give_up THEN
				RAISE EXCEPTION 'policy of scope "%" cannot change now: idem_scopes is in use', coalesce(NEW.scope, '')
					USING ERRCODE = 'lock_not_available',
					HINT = 'Other transactions change it, or claim: try again. Set lock_timeout to wait longer than 5 seconds.';
			END IF;
			PERFORM pg_sleep(0.05);
		END;
	END LOOP;
	PERFORM set_config('lock_timeout', caller_timeout, true);
	NEW.guarded_since := clock_timestamp() + interval '1 minute';
	RETURN NEW;
END $$;

COMMENT ON FUNCTION @extschema@.idem__scopes_guard() IS 'trigger: sets guarded_since';

-- Not ENABLE ALWAYS: a subscriber must keep the guarded_since of its publisher.
CREATE TRIGGER idem__scopes_guard BEFORE INSERT OR UPDATE ON @extschema@.idem_scopes
FOR EACH ROW EXECUTE FUNCTION @extschema@.idem__scopes_guard();

-- ----- all policies in one row -----

-- Common claims, and settlements by idem__complete_at_once(), read this row, which is cheaper than idem_settings
-- and idem_scopes.  The arrays have a place for each row of idem_scopes, and the first place, NULL in scopes, for
-- all other scopes.  The ttl is NULL where more than that decides about a new request: key_time = uuidv7, a scope
-- that is not declared, no settings.  Triggers make the row of the two tables, an extension's dump leaves it out,
-- and cleaning compares it, in case somebody has disabled the triggers.  Without it claims are slower, and right.
CREATE TABLE @extschema@.idem__policies (
	only_row boolean PRIMARY KEY DEFAULT true CHECK (only_row),
	scopes text[] COLLATE "C" NOT NULL, ttls interval[] NOT NULL, results_max int4[] NOT NULL
) USING heap;

COMMENT ON TABLE @extschema@.idem__policies IS 'one row, made of idem_settings and idem_scopes by triggers: ttl and result_max_bytes of each scope';

-- What the row has to be
CREATE FUNCTION @extschema@.idem__policies_now(OUT scopes text[], OUT ttls interval[], OUT results_max int4[])
LANGUAGE sql STABLE AS $$
	SELECT array_agg(s.scope ORDER BY s.scope NULLS FIRST),
		array_agg(CASE WHEN p.has_settings AND NOT p.undeclared AND NOT p.uuidv7 THEN p.ttl END ORDER BY s.scope NULLS FIRST),
		array_agg(p.result_max_bytes ORDER BY s.scope NULLS FIRST)
	FROM (SELECT NULL COLLATE "C" UNION ALL SELECT t.scope FROM @extschema@.idem_scopes AS t) AS s (scope),
		@extschema@.idem__policy(s.scope) AS p
$$;

-- Makes the row as it has to be; is_changed false: only if it is another one.  True: it was there, and is renewed.
-- The locks come first: what is read after them has the changes of all others.  Whoever has locked the row has
-- locked idem_scopes: so the guard waits in its slices, and not for the row.  Cleaning does not wait for a change.
CREATE FUNCTION @extschema@.idem__renew_policies(is_changed boolean) RETURNS boolean LANGUAGE plpgsql AS $$
DECLARE
	caller_timeout constant text := current_setting('lock_timeout');
	was_missing boolean;
BEGIN
	IF NOT is_changed AND EXISTS (SELECT FROM @extschema@.idem__policies AS r, @extschema@.idem__policies_now() AS n
			WHERE (r.scopes, r.ttls, r.results_max) IS NOT DISTINCT FROM (n.scopes, n.ttls, n.results_max)) THEN
		RETURN false;
	END IF;
	BEGIN
		PERFORM set_config('lock_timeout', CASE WHEN is_changed THEN caller_timeout ELSE '1' END, true);
		LOCK TABLE @extschema@.idem_scopes IN ROW EXCLUSIVE MODE;
		INSERT INTO @extschema@.idem__policies VALUES (true, '{}', '{}', '{}') ON CONFLICT (only_row) DO NOTHING;
		was_missing := FOUND;
		PERFORM FROM @extschema@.idem__policies FOR UPDATE;
		PERFORM set_config('lock_timeout', caller_timeout, true);
	EXCEPTION WHEN lock_not_available THEN
		IF is_changed THEN
			PERFORM @extschema@.idem__raise('55P03', 'policy cannot change now: another transaction changes it', 'Try again.');
		END IF;
		RETURN false;
	END;
	UPDATE @extschema@.idem__policies AS r SET scopes = n.scopes, ttls = n.ttls, results_max = n.results_max
	FROM @extschema@.idem__policies_now() AS n
	WHERE (r.scopes, r.ttls, r.results_max) IS DISTINCT FROM (n.scopes, n.ttls, n.results_max);
	RETURN FOUND AND NOT was_missing;
END $$;

CREATE FUNCTION @extschema@.idem__policies_changed() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
	IF TG_OP = 'INSERT' AND TG_TABLE_NAME = 'idem__policies' THEN
		-- By a dump of rows only, which goes on to fill the two tables: the row that is there stays.
		RETURN CASE WHEN EXISTS (SELECT FROM @extschema@.idem__policies) THEN NULL ELSE NEW END;
	END IF;
	PERFORM @extschema@.idem__renew_policies(true);
	RETURN NULL;
END $$;

CREATE TRIGGER idem__policies_insert BEFORE INSERT ON @extschema@.idem__policies
FOR EACH ROW EXECUTE FUNCTION @extschema@.idem__policies_changed();
CREATE TRIGGER idem__policies_statement AFTER INSERT OR UPDATE OR DELETE OR TRUNCATE ON @extschema@.idem_settings
FOR EACH STATEMENT EXECUTE FUNCTION @extschema@.idem__policies_changed();
CREATE TRIGGER idem__policies_statement AFTER INSERT OR UPDATE OR DELETE OR TRUNCATE ON @extschema@.idem_scopes
FOR EACH STATEMENT EXECUTE FUNCTION @extschema@.idem__policies_changed();
CREATE TRIGGER idem__policies_row AFTER INSERT OR UPDATE OR DELETE ON @extschema@.idem_settings
FOR EACH ROW EXECUTE FUNCTION @extschema@.idem__policies_changed();
CREATE TRIGGER idem__policies_row AFTER INSERT OR UPDATE OR DELETE ON @extschema@.idem_scopes
FOR EACH ROW EXECUTE FUNCTION @extschema@.idem__policies_changed();

-- Changes that a subscriber applies are of rows, and fire no triggers of statements but for TRUNCATE.
ALTER TABLE @extschema@.idem_settings ENABLE ALWAYS TRIGGER idem__policies_statement, ENABLE REPLICA TRIGGER idem__policies_row;
ALTER TABLE @extschema@.idem_scopes ENABLE ALWAYS TRIGGER idem__policies_statement, ENABLE REPLICA TRIGGER idem__policies_row;

-- The triggers make the row of idem__policies, too.  An upgrade leaves this out, since it reads no table, in
-- which the owner may have put code: then the next cleaning, or change of a policy, makes the row.
INSERT INTO @extschema@.idem_settings DEFAULT VALUES;

-- ----- what follows for a claim -----

-- expires_at of a claim that is made or settled now: the ttl after now, or after the key's own time if
-- that is later, and not before the lease ends.
CREATE FUNCTION @extschema@.idem__remembered_until(ttl interval, key_time timestamptz, lease_until timestamptz)
RETURNS timestamptz LANGUAGE sql
AS $$ SELECT @extschema@.idem__whole_second(greatest(greatest(clock_timestamp(), key_time) + ttl, lease_until)) $$;

-- Whether a key of that time that has no row may have been executed and forgotten.  A claim made at c under
-- this policy keeps its row until max(c, key_time) + ttl at least; one from before guarded_since may have been
-- made under another policy.
CREATE FUNCTION @extschema@.idem__may_be_forgotten(key_time timestamptz, policy @extschema@.idem__scope_policy)
RETURNS boolean
LANGUAGE sql AS $$
	SELECT coalesce(key_time <= clock_timestamp() - policy.ttl OR key_time <= policy.guarded_since, false)
$$;

-- The policy of a scope.  Raises ID400 if no request can be claimed in it, 40001 if the snapshot is
-- older than the settings.
CREATE FUNCTION @extschema@.idem__policy_of_claim(of_scope text) RETURNS @extschema@.idem__scope_policy
LANGUAGE plpgsql AS $$
DECLARE
	policy constant @extschema@.idem__scope_policy := (SELECT p FROM @extschema@.idem__policy(of_scope) AS p);
BEGIN
	IF NOT policy.has_settings AND @extschema@.idem__keeps_snapshot() THEN
		PERFORM @extschema@.idem__raise('40001', 'could not serialize access: idem was installed after this transaction''s snapshot',
			'Retry the transaction.');
	ELSIF policy.undeclared THEN
		PERFORM @extschema@.idem__raise_undeclared(of_scope);
	END IF;
	RETURN policy;
END $$;
