-- ----- triggers of idem_scopes -----

CREATE FUNCTION @extschema@.idem__scopes_changed()
RETURNS trigger
AS 'MODULE_PATHNAME', 'idem__scopes_changed'
LANGUAGE C;

COMMENT ON FUNCTION @extschema@.idem__scopes_changed() IS 'trigger: makes all sessions read idem_scopes again';

-- Row triggers, and ALWAYS: rows that a subscriber receives must act as well.
CREATE TRIGGER idem__scopes_changed
BEFORE INSERT OR UPDATE OR DELETE ON @extschema@.idem_scopes
FOR EACH ROW EXECUTE FUNCTION @extschema@.idem__scopes_changed();

CREATE TRIGGER idem__scopes_changed_all
BEFORE TRUNCATE ON @extschema@.idem_scopes
FOR EACH STATEMENT EXECUTE FUNCTION @extschema@.idem__scopes_changed();

ALTER TABLE @extschema@.idem_scopes ENABLE ALWAYS TRIGGER idem__scopes_changed;
ALTER TABLE @extschema@.idem_scopes ENABLE ALWAYS TRIGGER idem__scopes_changed_all;

CREATE FUNCTION @extschema@.idem__scopes_guard()
RETURNS trigger
AS 'MODULE_PATHNAME', 'idem__scopes_guard'
LANGUAGE C;

COMMENT ON FUNCTION @extschema@.idem__scopes_guard() IS 'trigger: sets guarded_since';

-- Not on a subscriber, which receives the publisher's guarded_since
CREATE TRIGGER idem__scopes_guard
BEFORE INSERT OR UPDATE ON @extschema@.idem_scopes
FOR EACH ROW EXECUTE FUNCTION @extschema@.idem__scopes_guard();
