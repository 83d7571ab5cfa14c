# No role gets more rights than it was granted: what each role can do with the extension, and
# with rights that were granted by mistake.
#
#	stranger	nothing
#	app			idem_grant(..., 'app')
#	operator	idem_grant(..., 'operator')
#	granted		GRANT ALL on all tables, sequences and functions of the schema
#	owner		of the database, of the schema, and of the extension; no superuser

use strict;
use warnings;

use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

use Client;

my $node = PostgreSQL::Test::Cluster->new('main');
$node->init;
$node->append_conf('postgresql.conf', 'max_prepared_transactions = 10');
$node->start;

my @roles = qw(stranger app operator granted owner);
$node->safe_psql('postgres', "CREATE ROLE $_ LOGIN") for @roles;
$node->safe_psql('postgres', 'CREATE DATABASE shop OWNER owner');

# (exit code, output, errors)
sub try_as
{
	my ($role, $sql, $database) = @_;
	my ($status, $out, $err) = $node->psql($database // 'shop', $sql,
		extra_params => [ '-U', $role, '-v', 'VERBOSITY=verbose' ]);
	return ($status, $out, $err);
}

sub as
{
	my ($role, $sql, $database) = @_;
	my ($status, $out, $err) = try_as($role, $sql, $database);
	is($status, 0, "$role: $sql") or diag $err;
	return $out;
}

sub refuses
{
	my ($role, $sql, $sqlstate, $name) = @_;
	my ($status, $out, $err) = try_as($role, $sql);
	like($err, qr/ERROR:  $sqlstate:/, $name // "$role is refused: $sql");
	return;
}

sub superuser
{
	my ($sql, $database) = @_;
	return $node->safe_psql($database // 'shop', $sql);
}

sub nobody_is_superuser
{
	my ($name) = @_;
	is(superuser("SELECT string_agg(rolname, ' ') FROM pg_roles WHERE rolsuper AND rolname = ANY ('{@{[join ',', @roles]}}')"),
		'', "$name: nobody became superuser");
	$node->safe_psql('postgres', "ALTER ROLE $_ NOSUPERUSER") for @roles;
	return;
}

as('owner', 'CREATE SCHEMA requests; CREATE EXTENSION idem SCHEMA requests');
as('owner', "SELECT requests.idem_grant('app', 'app'), requests.idem_grant('operator', 'operator')");
as('owner', 'GRANT USAGE, CREATE ON SCHEMA requests TO granted');

# ----- no function runs with the rights of its owner -----

is(superuser(q{
		SELECT string_agg(p.oid::regprocedure::text, ' ') FROM pg_proc p
		WHERE p.prosecdef AND EXISTS (SELECT FROM pg_depend d JOIN pg_extension e ON d.refobjid = e.oid
			WHERE d.classid = 'pg_proc'::regclass AND d.objid = p.oid AND d.deptype = 'e' AND e.extname = 'idem')}),
	'', 'no function runs with the rights of its owner');

# ----- the schema is renamed while a change of a policy waits -----

# Objects that the owner of the schema puts in the place of idem's. Each trigger tries to make
# its role superuser.
my $escalate = q{
	CREATE FUNCTION %1$s.escalate() RETURNS trigger LANGUAGE plpgsql AS $$
	BEGIN
		BEGIN
			ALTER ROLE owner SUPERUSER;
			ALTER ROLE granted SUPERUSER;
		EXCEPTION WHEN insufficient_privilege THEN
		END;
		RETURN coalesce(NEW, OLD);
	END $$;
};
my $likenesses = join '', map {
	qq{
	CREATE TABLE evil.$_ (scope text PRIMARY KEY, removed_at timestamptz, ttl interval);
	CREATE TRIGGER escalate BEFORE INSERT OR UPDATE OR DELETE ON evil.$_ FOR EACH ROW EXECUTE FUNCTION evil.escalate();
	INSERT INTO evil.$_ VALUES ('s', now(), '1 s');
	GRANT ALL ON evil.$_ TO PUBLIC;
}
} qw(idem_scopes idem_removed_scopes idem_claims);
as('owner', 'CREATE SCHEMA evil; GRANT USAGE ON SCHEMA evil TO PUBLIC;' . sprintf($escalate, 'evil') . $likenesses);

my $holder = Client->new($node, 'shop');
my $changer = Client->new($node, 'shop');
$holder->ask('SET ROLE owner; BEGIN');
# A table with the name of one that an earlier version of the guard wrote to
$holder->ask(q{
	DO $$
	BEGIN
		INSERT INTO requests.idem_removed_scopes VALUES ('s', now(), '1 s');
	EXCEPTION WHEN undefined_table THEN
	END $$});
$holder->ask(q{SELECT FROM requests.idem_scopes FOR UPDATE});
$changer->ask('SET ROLE operator; SET lock_timeout = 0');
$changer->send(q{INSERT INTO requests.idem_scopes (scope, ttl, key_time) VALUES ('s', '1 day', 'uuidv7')});
ok($node->poll_query_until('shop', 'SELECT EXISTS (SELECT FROM pg_locks WHERE NOT granted AND pid = ' . $changer->pid . ')'),
	'a change of a policy waits');
as('owner', 'ALTER SCHEMA requests RENAME TO away; ALTER SCHEMA evil RENAME TO requests');
$holder->ask('ROLLBACK');
is($changer->answer, '', 'the change goes on');
nobody_is_superuser('schemas exchanged');
is(superuser("SELECT guarded_since > clock_timestamp() FROM away.idem_scopes WHERE scope = 's'"), 't', 'the right table has the guard');
is(superuser("SELECT count(*) FROM requests.idem_scopes"), '1', 'and the other one nothing');
as('owner', 'DROP SCHEMA requests CASCADE; ALTER SCHEMA away RENAME TO requests; DELETE FROM requests.idem_scopes');
$holder->quit;
$changer->quit;

# ----- GRANT ALL -----

as('owner', 'CREATE SCHEMA own AUTHORIZATION owner; GRANT ALL ON SCHEMA own TO granted');
as('granted', sprintf($escalate, 'own'));
superuser('GRANT ALL ON ALL TABLES IN SCHEMA requests TO granted; GRANT ALL ON ALL SEQUENCES IN SCHEMA requests TO granted; GRANT ALL ON ALL ROUTINES IN SCHEMA requests TO granted');

# A trigger that it creates on a table of idem runs with the rights of the role that writes
# there.
for my $table (split /\n/, superuser(q{SELECT relname FROM pg_class WHERE relnamespace = 'requests'::regnamespace AND relkind = 'r' AND relname <> 'idem_claims'}))
{
	as('granted', "CREATE TRIGGER aaa BEFORE INSERT OR UPDATE OR DELETE ON requests.$table FOR EACH ROW EXECUTE FUNCTION own.escalate()");
}
as('granted', q{INSERT INTO requests.idem_scopes (scope, ttl) VALUES ('s', '1 day')});
as('granted', q{UPDATE requests.idem_scopes SET ttl = '2 days', key_time = 'uuidv7'});
as('granted', 'DELETE FROM requests.idem_scopes');
nobody_is_superuser('a trigger on idem_scopes');
superuser('DROP TRIGGER aaa ON requests.idem_scopes');
as('granted', 'CREATE TRIGGER aaa BEFORE INSERT ON requests.idem_claims FOR EACH ROW EXECUTE FUNCTION own.escalate()');
refuses('app', "SELECT requests.idem_claim('user', 'r')", '0A000', 'no claim goes past a trigger on idem_claims');
superuser('DROP TRIGGER aaa ON requests.idem_claims');

# Trigger functions of idem refuse other tables, and use no objects in pg_temp.
for my $function (split /\n/, superuser(q{SELECT proname FROM pg_proc WHERE pronamespace = 'requests'::regnamespace AND prorettype = 'trigger'::regtype}))
{
	for my $event ('INSERT', 'UPDATE', 'DELETE')
	{
		my $sql = q{
			SELECT requests.idem_fingerprint('0');		-- loads the library
			CREATE TEMPORARY TABLE idem_scopes (LIKE requests.idem_scopes INCLUDING DEFAULTS);
			CREATE TEMPORARY TABLE idem_removed_scopes (scope text PRIMARY KEY, removed_at timestamptz, ttl interval);
			CREATE FUNCTION pg_temp.idem_least_promise(interval, timestamptz, interval) RETURNS interval LANGUAGE plpgsql AS $$
			BEGIN
				ALTER ROLE granted SUPERUSER;
				RETURN '1 s';
			END $$;
			INSERT INTO idem_scopes (scope, ttl, key_time) VALUES ('s', '1 s', 'uuidv7');
		} . "CREATE TRIGGER t BEFORE $event ON idem_scopes FOR EACH ROW EXECUTE FUNCTION requests.$function();"
		  . { INSERT => q{INSERT INTO idem_scopes (scope, ttl, key_time) VALUES ('t', '1 s', 'uuidv7')}, UPDATE => q{UPDATE idem_scopes SET ttl = '1 day'}, DELETE => 'DELETE FROM idem_scopes' }->{$event};
		refuses('granted', $sql, '39P01', "$function(): refuses another table, $event");
	}
}
nobody_is_superuser('trigger functions on another table');

# It cannot grant rights that it holds without the grant option.
try_as('granted', "SELECT requests.idem_grant('stranger', 'operator')");
try_as('granted', "SELECT requests.idem__change_rights('stranger', 'app', 'GRANT %s TO %s')");
is(superuser(q{SELECT count(*) FROM pg_proc WHERE pronamespace = 'requests'::regnamespace AND has_function_privilege('stranger', oid, 'EXECUTE')}),
	'0', 'a role without grant options grants nothing by idem_grant()');
superuser('REVOKE ALL ON ALL TABLES IN SCHEMA requests FROM granted; REVOKE ALL ON ALL SEQUENCES IN SCHEMA requests FROM granted; REVOKE ALL ON ALL ROUTINES IN SCHEMA requests FROM granted');
nobody_is_superuser('rights');

# A superuser cannot revoke the grants of another role, and gets a WARNING.
like((try_as($node->safe_psql('shop', 'SELECT current_user'), "SELECT requests.idem_revoke('app', 'app')"))[2],
	qr/WARNING:  01000: role app keeps rights that owner granted\nHINT:  Run idem_revoke\(\) as the role that granted them\./,
	'idem_revoke() names the role whose grants it cannot take back');
as('owner', "SELECT requests.idem_revoke('app', 'app')");
refuses('app', "SELECT requests.idem_claim('user', 'r')", '42501');
as('owner', "SELECT requests.idem_grant('app', 'app')");

# ----- the table of the documentation: who can do what -----

as('app', q{
	SELECT requests.idem_claim('user', 'done');
	SELECT FROM requests.idem_lease('user', 'leased', lease => '1 min');
});
my $load = q{SELECT requests.idem_status('user', 'done')};		# defines the settings
my %refused = (
	stranger => [
		"SELECT requests.idem_claim('user', 'r')", "SELECT requests.idem_status('user', 'done')",
		"SELECT requests.idem_forget('user', 'done')", 'SELECT requests.idem_cleanup()', 'CALL requests.idem_cleanup_all()',
		'TABLE requests.idem_claims', 'TABLE requests.idem_scopes', 'TABLE requests.idem_stat_claims', 'TABLE requests.idem_metrics',
		"SELECT nextval('requests.idem_token_seq')", "SELECT requests.idem_grant('stranger', 'app')",
		"SELECT requests.idem_stat_reset()", 'SELECT requests.idem_lapsed()',
		q{CREATE TEMPORARY TABLE t (a text, b text); CREATE TRIGGER t BEFORE INSERT ON t FOR EACH ROW EXECUTE FUNCTION requests.idem_skip_duplicates('', 'a', 'b')}
	],
	app => [
		'SELECT requests.idem_lapsed()',
		"CREATE TEMPORARY TABLE t (a text); CREATE TRIGGER t BEFORE INSERT ON t FOR EACH ROW EXECUTE FUNCTION requests.idem__scopes_changed()",
		"SELECT requests.idem_forget('user', 'done')", 'SELECT requests.idem_cleanup()', 'SELECT requests.idem_stat_reset()',
		'SELECT token FROM requests.idem_claims', 'DELETE FROM requests.idem_claims',
		"UPDATE requests.idem_scopes SET ttl = '1 s'", "SELECT nextval('requests.idem_token_seq')",
		"$load; SET idem.ttl = '1 s'", "$load; SET idem.lease_max = '1000 days'", "SELECT requests.idem_grant('app', 'operator')",
		"CREATE TRIGGER t BEFORE INSERT ON requests.idem_scopes FOR EACH ROW EXECUTE FUNCTION requests.idem__scopes_guard()"
	],
	operator => [
		"SELECT requests.idem_claim('user', 'r')", 'SELECT token FROM requests.idem_claims',
		'DELETE FROM requests.idem_claims', "UPDATE requests.idem_scopes SET guarded_since = '-infinity'",
		"INSERT INTO requests.idem_scopes (scope, guarded_since) VALUES ('s', '-infinity')", 'TRUNCATE requests.idem_scopes',
		"$load; SET idem.ttl = '1 s'", "SELECT requests.idem_grant('operator', 'app')"
	],
	owner => [
		'DELETE FROM requests.idem_claims', 'ALTER TABLE requests.idem_claims DISABLE TRIGGER ALL', "$load; SET idem.ttl = '1 s'",
		'ALTER TABLE requests.idem_scopes DISABLE TRIGGER idem__scopes_guard', 'DROP TRIGGER idem__scopes_guard ON requests.idem_scopes',
		'ALTER FUNCTION requests.idem_claim(text, text, text, bytea, interval) SECURITY DEFINER', 'CREATE INDEX ON requests.idem_claims (user_id)',
		'CREATE RULE r AS ON INSERT TO requests.idem_scopes DO INSTEAD NOTHING',
		"SET session_replication_role = replica"
	]);
for my $role (qw(stranger app operator owner))
{
	as('owner', 'GRANT USAGE ON SCHEMA requests TO stranger') if $role eq 'stranger';
	refuses($role, $_, '42501') for @{ $refused{$role} };
}
# An application role can read and settle the claims of every other application role.
superuser('CREATE ROLE another LOGIN');
as('owner', "SELECT requests.idem_grant('another', 'app')");
is(as('another', "SELECT requests.idem_status('user', 'done')"), 'completed', 'application roles see the requests of each other');
my $token = superuser("SELECT token FROM requests.idem_claims WHERE request_id = 'leased'");
is(as('another', "SELECT requests.idem_complete('user', 'leased', '1', $token)"), 't', 'and settle a lease whose token they guess');
# A procedure that passes its own user keeps tenants apart.
as('owner', q{
	CREATE FUNCTION requests.claim_own(request text) RETURNS boolean LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS
		'SELECT requests.idem_claim(session_user, request)';
	REVOKE ALL ON FUNCTION requests.claim_own FROM PUBLIC;
	GRANT EXECUTE ON FUNCTION requests.claim_own TO stranger;
});
is(as('stranger', "SELECT requests.claim_own('r'), requests.claim_own('r')"), 't|f', 'a tenant claims under its own name');
is(superuser("SELECT user_id FROM requests.idem_claims WHERE request_id = 'r'"), 'stranger', 'and no other');

# A role with app lets others claim, by inserting into a table with its trigger. The role that
# inserts needs no right but INSERT.
superuser('CREATE SCHEMA sinks AUTHORIZATION app; GRANT USAGE ON SCHEMA sinks TO stranger');
as('app', q{
	CREATE TABLE sinks.sink (a text, b text);
	CREATE TRIGGER t BEFORE INSERT ON sinks.sink FOR EACH ROW EXECUTE FUNCTION requests.idem_skip_duplicates('sink', 'a', 'b');
	GRANT INSERT ON sinks.sink TO stranger;
});
as('stranger', q{INSERT INTO sinks.sink VALUES ('u', 'r'), ('u', 'r')});
is(superuser('SELECT count(*) FROM sinks.sink'), '1', 'a stranger inserts into a sink of app: once');
is(superuser(q{SELECT user_id || request_id FROM requests.idem_claims WHERE scope = 'sink'}), 'ur', 'and claims in its scope');

# ----- what the table says that a role can do to the others -----

# The operator can hold all new claims up, for as long as its transaction lasts.
my $operator = Client->new($node, 'shop');
my $claimant = Client->new($node, 'shop');
$operator->ask('SET ROLE operator; BEGIN; LOCK TABLE requests.idem_scopes');
$claimant->ask("SET ROLE app; SET idem.wait = '-1'");
$claimant->send(q{SELECT requests.idem_claim('user', 'held up')});
ok($node->poll_query_until('shop', "SELECT EXISTS (SELECT FROM pg_locks WHERE NOT granted AND relation = 'requests.idem_scopes'::regclass AND pid = " . $claimant->pid . ')'),
	'a lock of the operator on idem_scopes: a claim waits');
$operator->ask('ROLLBACK');
is($claimant->answer, 't', 'and goes on when the lock is gone');
$operator->quit;
$claimant->quit;

# A role that may set the sequence can make a token come again.
sub lease_token
{
	my ($request) = @_;
	return as('app', "SELECT token FROM requests.idem_lease('user', '$request', lease => '1 min')");
}
superuser('GRANT ALL ON ALL SEQUENCES IN SCHEMA requests TO granted');
for my $role (qw(owner granted))
{
	my $first = lease_token("$role 1");
	as($role, "SELECT setval('requests.idem_token_seq', $first, false)");
	is(lease_token("$role 2"), $first, "$role set the sequence back: a token comes again");
}
superuser('REVOKE ALL ON ALL SEQUENCES IN SCHEMA requests FROM granted');
refuses('app', "SELECT setval('requests.idem_token_seq', 1)", '42501');

# Rights on all objects, by GRANT or by the server's own roles. Each statement is rolled back.
superuser(q{
	CREATE ROLE reader LOGIN; GRANT pg_read_all_data TO reader;
	CREATE ROLE writer LOGIN; GRANT pg_write_all_data TO writer;
	CREATE ROLE caller LOGIN; GRANT USAGE ON SCHEMA requests TO caller;
	GRANT ALL ON ALL ROUTINES IN SCHEMA requests TO caller;
	TRUNCATE requests.idem_claims});
lease_token('of others');
my %may = (
	reader => [ 'SELECT token FROM requests.idem_claims', 'TABLE requests.idem_scopes', 'TABLE requests.idem_token_seq', 'TABLE requests.idem_stat_table' ],
	writer => [ 'DELETE FROM requests.idem_claims', 'UPDATE requests.idem_claims SET token = 1', "UPDATE requests.idem_scopes SET guarded_since = '-infinity'",
		"INSERT INTO requests.idem_scopes VALUES ('x')", "SELECT setval('requests.idem_token_seq', 1)", 'LOCK TABLE requests.idem_claims', 'LOCK TABLE requests.idem_metrics' ],
	caller => [ "SELECT requests.idem_claim('u', 'r')", "SELECT requests.idem_forget('user', 'of others')", "SELECT requests.idem_lapsed()", 'SELECT requests.idem_cleanup()' ]);
my %may_not = (
	reader => [ "SELECT requests.idem_complete('user', 'of others', '1', 1)", "SELECT nextval('requests.idem_token_seq')", 'DELETE FROM requests.idem_claims',
		(map { "TABLE requests.$_" } qw(idem_stat_cleanup idem_stat_claims idem_stat_scopes idem_metrics idem_unsettled idem_holders)), 'BEGIN; LOCK TABLE requests.idem_claims' ],
	writer => [ 'TABLE requests.idem_claims', "DELETE FROM requests.idem_claims WHERE request_id = 'of others'", 'TRUNCATE requests.idem_claims',
		"SELECT requests.idem_forget('user', 'of others')", 'CREATE TABLE own.t (a text, b text, c text, FOREIGN KEY (a, b, c) REFERENCES requests.idem_claims)',
		'CREATE TRIGGER t BEFORE INSERT ON requests.idem_claims FOR EACH ROW EXECUTE FUNCTION own.escalate()' ],
	caller => [ 'TABLE requests.idem_claims', 'TABLE requests.idem_metrics', "INSERT INTO requests.idem_scopes VALUES ('x')", "SELECT nextval('requests.idem_token_seq')",
		"SELECT requests.idem_grant('stranger', 'app')" ]);
as('owner', 'GRANT ALL ON SCHEMA own TO writer');
for my $role (sort keys %may)
{
	as($role, "BEGIN; $_; ROLLBACK") for @{ $may{$role} };
	refuses($role, $_, '42501') for @{ $may_not{$role} };
}
nobody_is_superuser('roles of the server');

# A lease draws its token from a sequence, and lastval() is about the sequence drawn last.
as('app', 'CREATE SEQUENCE sinks.ids');
my $ids = q{SELECT nextval('sinks.ids'); SELECT FROM requests.idem_lease('user', gen_random_uuid(), lease => '1 min');};
refuses('app', "$ids SELECT lastval()", '42501', 'lastval() after a lease is refused');
is((split /\n/, as('app', "$ids SELECT currval('sinks.ids')"))[-1], '2', 'and currval() of a sequence is not touched');
superuser("GRANT SELECT ON SEQUENCE requests.idem_token_seq TO app");
is((split /\n/, as('app', "$ids SELECT lastval() = last_value FROM requests.idem_token_seq"))[-1], 't', 'a role that may read the sequence gets a token');
superuser("REVOKE SELECT ON SEQUENCE requests.idem_token_seq FROM app");

# The owner may empty the table, as a restore does, and all requests can be executed again.
is(as('owner', 'BEGIN; TRUNCATE requests.idem_claims; SELECT count(*) FROM requests.idem_claims; ROLLBACK'), '0',
	'the owner can forget all requests');

# Without the index by expiry nothing is cleaned, and claims go on.
as('owner', 'DROP INDEX requests.idem_claims_expires_at_idx');
refuses('operator', 'SELECT requests.idem_cleanup()', '55000', 'the owner of the schema drops the index by expiry: no cleanup');
is(as('app', q{SELECT requests.idem_claim('user', 'no index')}), 't', 'but claims go on');
refuses('owner', 'CREATE INDEX idem_claims_expires_at_idx ON requests.idem_claims (expires_at)', '42501');
superuser('CREATE INDEX idem_claims_expires_at_idx ON requests.idem_claims (expires_at)');
is(as('operator', 'SELECT requests.idem_cleanup()'), '0', 'a superuser makes it again: cleanup works');

# The list of lapsed leases tells users, requests and progress of all applications.  So app does
# not include it; a completer gets the right to it by itself.
superuser('TRUNCATE requests.idem_claims');
lease_token('lapsed');
superuser("UPDATE requests.idem_claims SET lease_until = '2020-01-01'");
is(as('operator', 'SELECT request_id FROM requests.idem_lapsed()'), 'lapsed', 'an operator lists lapsed leases');
as('owner', 'GRANT EXECUTE ON FUNCTION requests.idem_lapsed TO app');
is(as('app', 'SELECT request_id FROM requests.idem_lapsed()'), 'lapsed', 'and so does an application that was granted it');
as('owner', 'REVOKE EXECUTE ON FUNCTION requests.idem_lapsed FROM app');

# ----- default privileges -----

$node->safe_psql('postgres', 'CREATE ROLE anon; CREATE DATABASE cloud');
for my $where ('', 'IN SCHEMA public')
{
	superuser("ALTER DEFAULT PRIVILEGES $where GRANT ALL ON $_ TO anon, granted WITH GRANT OPTION", 'cloud')
	  for qw(TABLES SEQUENCES ROUTINES TYPES);
}
superuser('CREATE EXTENSION idem', 'cloud');
is( superuser(q{
		SELECT string_agg(DISTINCT o.name || ' ' || a.privilege_type || ' ' || a.grantee, ', ')
		FROM pg_depend d JOIN pg_extension e ON d.refobjid = e.oid AND e.extname = 'idem' AND d.deptype = 'e'
			JOIN (SELECT 'pg_class'::regclass, oid, relname::text, relacl FROM pg_class
				UNION ALL SELECT 'pg_proc'::regclass, oid, proname, coalesce(proacl, acldefault('f', proowner)) FROM pg_proc
				UNION ALL SELECT 'pg_type'::regclass, oid, typname, coalesce(typacl, acldefault('T', typowner)) FROM pg_type WHERE typtype = 'e') o (class, oid, name, acl)
				ON o.class = d.classid AND o.oid = d.objid,
			aclexplode(o.acl) a
		WHERE a.grantee NOT IN (10, 'pg_monitor'::regrole)}, 'cloud'),
	'', 'default privileges: nobody has rights but the owner, and pg_monitor on statistics');
is(superuser("SELECT has_table_privilege('anon', 'idem_claims', 'SELECT') OR has_function_privilege('anon', 'idem_forget(text, text, text)', 'EXECUTE')", 'cloud'),
	'f', 'default privileges: anon has nothing');

# ----- installing beside others -----

$node->safe_psql('postgres', 'CREATE DATABASE decoy; CREATE DATABASE open_to_all');
superuser('GRANT TEMPORARY ON DATABASE decoy TO stranger', 'decoy');
my $decoy = Client->new($node, 'decoy');
$decoy->ask('SET ROLE stranger; CREATE TEMPORARY TABLE idem_claims (); CREATE FUNCTION pg_temp.idem_try_claim() RETURNS int LANGUAGE sql AS $$SELECT 1$$');
is((try_as($node->safe_psql('postgres', 'SELECT current_user'), 'CREATE EXTENSION idem', 'decoy'))[0], 0,
	'what a session has in its temporary schema does not keep idem from being installed');
$decoy->quit;

# A schema of its own is enough to keep it from being installed anywhere in the database.
superuser('CREATE SCHEMA strange AUTHORIZATION stranger', 'decoy');
superuser('DROP EXTENSION idem', 'decoy');
is((try_as('stranger', 'CREATE TABLE strange.idem_claims (); CREATE FUNCTION strange.idem_try_claim() RETURNS int LANGUAGE sql AS $$SELECT 1$$', 'decoy'))[0], 0,
	'a stranger makes objects that look like the portable edition, in a schema of its own');
like((try_as($node->safe_psql('postgres', 'SELECT current_user'), 'CREATE EXTENSION idem', 'decoy'))[2],
	qr/ERROR:  42710: idem is installed in this database already, in schema strange\n/, 'the error names the schema');
superuser('DROP SCHEMA strange CASCADE; CREATE EXTENSION idem', 'decoy');

superuser('GRANT CREATE ON SCHEMA public TO PUBLIC', 'open_to_all');
my ($status, $out, $err) = $node->psql('open_to_all', 'CREATE EXTENSION idem');
is($status, 0, 'installed where everybody may create objects');
like($err, qr/WARNING:  others may create objects in schema public: PUBLIC\nDETAIL:  .*idem_claim\(varchar, varchar\).*\nHINT:  Revoke CREATE/,
	'with a warning that names the danger');

# A function that another role left in the schema must not be called by a superuser's
# idem_grant('app', 'app').
superuser('DROP EXTENSION idem', 'open_to_all');
try_as('stranger', q{
	CREATE FUNCTION public.idem_grant(role text, privileges text) RETURNS void LANGUAGE plpgsql AS $$
	BEGIN
		ALTER ROLE stranger SUPERUSER;
	END $$}, 'open_to_all');
superuser('REVOKE CREATE ON SCHEMA public FROM PUBLIC', 'open_to_all');
($status, $out, $err) = $node->psql('open_to_all', "CREATE EXTENSION idem; SELECT idem_grant('app', 'app')");
like($err, qr/ERROR:  others own functions in schema public that would be called instead of those of idem: public\.idem_grant\(text,text\)\nHINT:  Drop them,/,
	'functions that others have left under names like ours: refused');
superuser('DROP FUNCTION public.idem_grant(text, text); CREATE EXTENSION idem', 'open_to_all');

nobody_is_superuser('all of it');
$node->stop;
done_testing();
