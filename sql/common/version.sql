-- ----- version -----

CREATE FUNCTION @extschema@.idem_version() RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE SET search_path = pg_catalog, pg_temp AS $$ SELECT '@version@'::text $$;
