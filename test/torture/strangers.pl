# Roles try everything that the security table says they cannot do, generated from the catalog
#
# 1. Each role against each object: functions with every signature, tables, sequences, types; read,
#    write, change, drop, grant, trigger, rule, policy, index. What a role may do is listed below
#    by hand; everything else must be refused. Default privileges were set against us before the
#    extension was made.
# 2. Hostile names: for all functions, operators, types and relations of the server that the
#    extension's SQL names, a role plants its own, first in the search_path, with the very same
#    signatures. Each of them notes who ran it, in a table and by a warning, which remains of a
#    call that fails. It also plants implicit casts of the server's types to types of its own, which
#    hold whatever the search_path, and the same functions and operators on those types. Nothing that
#    is planted may ever run.
#
# It has no random numbers; the seed changes nothing.

use strict;
use warnings;

use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

use Session;
use Torture;

my $node = make_node('main', q{
shared_preload_libraries = 'idem'
idem.cleanup_databases = 'none'
fsync = off
log_error_verbosity = verbose
log_min_error_statement = panic
log_statement = none
});
$node->start;
chomp(my $superuser = $node->safe_psql('postgres', 'SELECT current_user'));
$node->safe_psql('postgres', "CREATE ROLE $_ LOGIN") for qw(stranger app operator tables owner other);
my ($attempts, $wrong);
my %session;
my @loot;		# warnings of what was planted

sub connect_as
{
	my ($role, $database) = @_;
	local %ENV = (%ENV, PGHOST => $node->host, PGPORT => $node->port);

	return $session{"$database $role"} //= Session->new($database, user => $role, 'idem.wait' => '10ms');
}

# SQLSTATE and message; '' is success. It leaves nothing behind.
sub try_as
{
	my ($role, $database, @statements) = @_;
	my $session = connect_as($role, $database);
	my $state = '';

	for my $sql ('BEGIN', @statements, 'ROLLBACK')
	{
		$session->send($sql);
		$session->flush;
		$session->read while $session->{pending};
		my $error = (shift @{ $session->{replies} })->{error};
		if ($error && $state eq '') { $state = "$error->{C} $error->{M}" }
	}
	return $state;
}

# Sends it, and keeps what it did
sub run_as
{
	my ($role, $database, $sql) = @_;
	my $session = connect_as($role, $database);

	$session->send($sql);
	$session->flush;
	$session->read while $session->{pending};
	my $reply = shift @{ $session->{replies} };
	my $error = $reply->{error};
	push @loot, grep { /^LOOT / } map { $_->{M} } @{ $reply->{notices} };
	return $error ? "$error->{C} $error->{M}" : '';
}

sub rows
{
	my ($database, $sql) = @_;
	return @{ connect_as($superuser, $database)->ask($sql)->{rows} };
}

# ----- the databases -----

my %extension = (c => 'idem', portable => 'idem_portable');
for my $database (sort keys %extension)
{
	$node->safe_psql('postgres', "CREATE DATABASE $database OWNER owner");
	for my $role ($superuser, 'owner')
	{
		$node->safe_psql($database, "ALTER DEFAULT PRIVILEGES FOR ROLE $role GRANT ALL ON $_ TO stranger, PUBLIC") for qw(TABLES SEQUENCES ROUTINES TYPES);
	}
	$node->safe_psql($database, qq{
		SET ROLE owner;
		CREATE SCHEMA requests;
		CREATE EXTENSION $extension{$database} SCHEMA requests;
		GRANT USAGE ON SCHEMA requests TO PUBLIC;
		SELECT requests.idem_grant('app', 'app'), requests.idem_grant('operator', 'operator');
		RESET ROLE;
		GRANT ALL ON ALL TABLES IN SCHEMA requests TO tables;
	});
}

# ----- 1: each role, each object -----

my %may_execute = (
	stranger => [],
	tables => [],
	app => [qw(idem_call idem__call_begin idem__call_settle idem_claim idem_try_claim idem_lease idem_claim_many idem_complete idem_fail idem_extend
		idem_release idem_fence idem_heal idem_result idem_outcome idem_status idem_lookup idem_fingerprint idem_skip_duplicates idem_version)],
	operator => [qw(idem_version idem_result idem_outcome idem_status idem_lookup idem_lapsed idem_forget idem_erase idem__erase idem_heal idem_cleanup idem_cleanup_all
		idem__cleanup_step idem__require_commit idem_stat_reset idem__stat_cleanup_counters idem__stat_cleaning idem__stat_claims_counters
		idem__unsettled_claims idem__held_keys idem_start_worker idem__stat_launcher idem__stat_scopes_counters idem__stat_scope_shares)]);
my %may_select = (operator => [qw(idem_scopes idem_settings idem_stat_cleanup idem_stat_claims idem_stat_table idem_stat_scopes
		idem_metrics idem_unsettled idem_holders)]);

my %some_value = (text => "'x'", bigint => '1', integer => '1', jsonb => "'{}'", interval => "'1 s'", boolean => 'true',
	bytea => "'x'", regrole => "'app'", 'timestamp with time zone' => 'now()', 'text[]' => "'{a}'");

sub call_of
{
	my ($name, $kind, $types) = @_;
	my $arguments = join ', ', map { ($some_value{$_} // 'NULL') . "::$_" } split /,/, $types;

	return ($kind eq 'p' ? 'CALL' : 'SELECT') . " requests.$name($arguments)";
}

# Must be refused for want of a right
sub refused
{
	my ($role, $database, @sql) = @_;
	my $state = try_as($role, $database, @sql);

	$attempts++;
	push @$wrong, "$database: $role was not refused: @sql" . ($state ? " ($state)" : '')
	  unless $state =~ /^(42501|2BP01|42809|0A000 cannot (?:alter|change)) ?/;
	return;
}

for my $database (sort keys %extension)
{
	my @functions = rows($database, q{
		SELECT p.proname, p.prokind, coalesce((SELECT string_agg(format_type(t, NULL), ',' ORDER BY o) FROM unnest(p.proargtypes) WITH ORDINALITY AS a (t, o)), ''),
			p.oid::regprocedure, (p.prorettype = 'trigger'::regtype)::int
		FROM pg_proc p JOIN pg_depend d ON d.classid = 'pg_proc'::regclass AND d.objid = p.oid AND d.deptype = 'e' JOIN pg_extension e ON e.oid = d.refobjid AND e.extname ~ '^idem'
		WHERE p.prorettype <> 'internal'::regtype		-- SQL cannot call it
		ORDER BY 4});
	my @relations = rows($database, q{
		SELECT c.relname, c.relkind FROM pg_class c JOIN pg_depend d ON d.classid = 'pg_class'::regclass AND d.objid = c.oid AND d.deptype = 'e'
			AND d.refclassid = 'pg_extension'::regclass WHERE c.relkind IN ('r', 'v', 'S') ORDER BY 1});
	my @types = rows($database, q{
		SELECT t.typname FROM pg_type t JOIN pg_depend d ON d.classid = 'pg_type'::regclass AND d.objid = t.oid AND d.deptype = 'e' AND d.refclassid = 'pg_extension'::regclass
		WHERE t.typtype = 'e'});

	($attempts, $wrong) = (0, []);
	# In the portable edition the owner owns everything.
	for my $role (qw(stranger tables app operator), $database eq 'c' ? 'owner' : ())
	{
		my $is_owner = $role eq 'owner';
		my %may = map { $_ => 1 } @{ $may_execute{$role} };
		for (@functions)
		{
			my ($name, $kind, $types, $signature, $is_trigger) = @$_;
			refused($role, $database, "ALTER FUNCTION $signature SECURITY DEFINER") if $kind eq 'f';
			refused($role, $database, "DROP ROUTINE $signature");
			next if $is_owner;
			if ($may{$name})
			{
				# It has the right, and cannot give it on.
				# GRANT only warns, so ask whether the other role has the right: 0 raises 22012.
				my $state = try_as($role, $database, "GRANT EXECUTE ON ROUTINE $signature TO other", "SELECT 1/has_function_privilege('other', '$signature', 'EXECUTE')::int");
				$attempts++;
				push @$wrong, "$database: $role gave the right to $signature on ($state)" if $state !~ /^22012/;
				next;
			}
			if ($is_trigger)
			{
				refused($role, $database, 'CREATE TEMPORARY TABLE t (a text, b text)', "CREATE TRIGGER t BEFORE INSERT ON t FOR EACH ROW EXECUTE FUNCTION requests.$name('', 'a', 'b')");
			}
			else
			{
				refused($role, $database, call_of($name, $kind, $types));
			}
		}
		my %may_read = map { $_ => 1 } @{ $may_select{$role} // [] };
		for (@relations)
		{
			my ($relation, $kind) = @$_;
			my $all = ($role eq 'tables' || $is_owner) && $kind ne 'S';
			if ($kind eq 'S')
			{
				$is_owner or refused($role, $database, "SELECT $_") for "nextval('requests.$relation')", "setval('requests.$relation', 1)", "last_value FROM requests.$relation";
				refused($role, $database, "ALTER SEQUENCE requests.$relation RESTART");
				next;
			}
			my ($first) = map { $_->[0] } rows($database, "SELECT quote_ident(attname) FROM pg_attribute WHERE attrelid = 'requests.$relation'::regclass AND attnum = 1");
			refused($role, $database, "SELECT * FROM requests.$relation") if !$all && !$may_read{$relation};
			refused($role, $database, "SELECT token FROM requests.$relation") if !$all && $relation eq 'idem_claims';
			if (!$all && $kind eq 'r')
			{
				refused($role, $database, "INSERT INTO requests.$relation DEFAULT VALUES") unless $role eq 'operator' && $relation eq 'idem_scopes';
				refused($role, $database, "DELETE FROM requests.$relation") unless $role eq 'operator' && $relation eq 'idem_scopes';
				refused($role, $database, "UPDATE requests.$relation SET $first = $first") unless $role eq 'operator' && $relation =~ /^idem_(scopes|settings)$/;
				refused($role, $database, "TRUNCATE requests.$relation");
			}
			refused($role, $database, "DELETE FROM requests.$relation") if $is_owner && $relation eq 'idem_claims';
			refused($role, $database, "UPDATE requests.$relation SET guarded_since = now()") if $relation eq 'idem_scopes' && $role eq 'operator';
			refused($role, $database, "ALTER TABLE requests.$relation ADD x int") if $kind eq 'r';
			refused($role, $database, "ALTER TABLE requests.$relation OWNER TO $role");
			refused($role, $database, "ALTER TABLE requests.$relation RENAME TO stolen");
			refused($role, $database, "DROP " . ($kind eq 'r' ? 'TABLE' : 'VIEW') . " requests.$relation");
			refused($role, $database, "CREATE RULE r AS ON INSERT TO requests.$relation DO INSTEAD NOTHING");
			if ($kind eq 'r')
			{
				refused($role, $database, "CREATE INDEX ON requests.$relation ($first)");
				refused($role, $database, "CREATE POLICY p ON requests.$relation");
				refused($role, $database, "ALTER TABLE requests.$relation $_") for 'ENABLE ROW LEVEL SECURITY', 'DISABLE TRIGGER ALL', 'SET UNLOGGED', 'SET (fillfactor = 10)';
				refused($role, $database, "CREATE TRIGGER t BEFORE INSERT ON requests.$relation FOR EACH ROW EXECUTE FUNCTION suppress_redundant_updates_trigger()") if $role ne 'tables';
				refused($role, $database, "CREATE TABLE pg_temp.heir () INHERITS (requests.$relation)");
				$is_owner or refused($role, $database, "REINDEX TABLE requests.$relation");
			}
		}
		refused($role, $database, "DROP TYPE requests.$_->[0]"), refused($role, $database, "ALTER TYPE requests.$_->[0] ADD VALUE 'x'") for @types;
		$is_owner or refused($role, $database, $_)
		  for "DROP EXTENSION $extension{$database}", "ALTER EXTENSION $extension{$database} SET SCHEMA public", 'CREATE TABLE requests.x ()', 'ALTER SCHEMA requests RENAME TO x';
		if ($database eq 'c')
		{
			# The first call makes sure that the library is loaded.
			refused($role, $database, "SET $_ = '2s'") for qw(idem.ttl idem.lease idem.lease_max);
			refused($role, $database, "SET $_ = 'declared'") for qw(idem.scopes);
		}
	}
	is(join("\n", grep { defined } (@$wrong)[ 0 .. 19 ]), '', "$database: each role, each object: $attempts attempts");
	figure("$database, each role and object", "$attempts attempts, " . @$wrong . ' successes');
}

# ----- 2: hostile names -----

# Runs with the rights of the one who calls it, and notes them.
sub plant
{
	my ($database) = @_;
	my $planted = 0;
	my ($sources) = map { $_->[0] } rows($database, q{
		SELECT string_agg(p.prosrc, ' ') || coalesce(string_agg(pg_get_functiondef(p.oid), ' ') FILTER (WHERE p.prosqlbody IS NOT NULL), '')
		FROM pg_proc p JOIN pg_depend d ON d.classid = 'pg_proc'::regclass AND d.objid = p.oid AND d.deptype = 'e' JOIN pg_extension e ON e.oid = d.refobjid AND e.extname ~ '^idem'
		JOIN pg_language l ON l.oid = p.prolang AND l.lanname IN ('sql', 'plpgsql')});
	my %named = map { $_ => 1 } $sources =~ /\b([a-z_][a-z0-9_]*)\b/g;
	my $try = sub {
		my ($sql) = @_;
		my $state = run_as('other', $database, $sql);
		$planted++ if $state eq '';
		return $state eq '';
	};

	$node->safe_psql($database, q{
		CREATE SCHEMA evil AUTHORIZATION other;
		GRANT ALL ON SCHEMA evil TO PUBLIC;
		CREATE TABLE evil.loot (what text, who name DEFAULT current_user, session name DEFAULT session_user);
		ALTER TABLE evil.loot OWNER TO other;
		GRANT INSERT ON evil.loot TO PUBLIC;
	});
	run_as('other', $database, q{
		CREATE FUNCTION evil.log(what text) RETURNS boolean LANGUAGE plpgsql AS $f$
		BEGIN
			RAISE WARNING 'LOOT % by % in a session of %', what, current_user, session_user;
			INSERT INTO evil.loot (what) VALUES (log.what);
			RETURN true;
		EXCEPTION WHEN OTHERS THEN
			RETURN true;
		END $f$});
	run_as('other', $database, 'GRANT EXECUTE ON FUNCTION evil.log TO PUBLIC');

	# Types of its own, to which the server's are cast implicitly
	my %own;
	for my $type (qw(text jsonb interval oid name regclass regproc regtype regrole regnamespace regprocedure bytea uuid integer bigint boolean numeric xid "char" text[] bytea[]),
		'timestamp with time zone', 'double precision', 'character varying', 'requests.idem_outcome', 'requests.idem_state')
	{
		my $name = $own{$type} = 'evil.own_' . scalar keys %own;
		$try->("CREATE TYPE $name AS (value text)");
		$try->("CREATE FUNCTION evil.cast_to_own(value $type) RETURNS $name LANGUAGE plpgsql AS \$f\$ BEGIN PERFORM evil.log('cast of $type'); RETURN ROW (value::pg_catalog.text)::$name; END \$f\$")
		  && $try->("CREATE CAST ($type AS $name) WITH FUNCTION evil.cast_to_own($type) AS IMPLICIT");
	}
	# Makes one with those types in place of the server's
	my $on_own = sub {
		my ($name, $result, @types) = @_;
		return @types && !(grep { !$own{$_} } @types)
		  && $try->("CREATE FUNCTION evil.\"$name\"(" . join(', ', @own{@types}) . ") RETURNS $result LANGUAGE plpgsql AS \$f\$ BEGIN PERFORM evil.log('$name of own types'); RETURN NULL; END \$f\$");
	};

	# Functions of the server that are named, with the same signature
	for (rows($database, q{SELECT (SELECT string_agg(format_type(t, NULL), ',' ORDER BY n) FROM unnest(p.proargtypes) WITH ORDINALITY AS a (t, n)),
				p.proname, pg_get_function_identity_arguments(p.oid), pg_get_function_result(p.oid), p.pronargs, p.proretset
			FROM pg_proc p WHERE pronamespace = 'pg_catalog'::regnamespace AND prokind = 'f' AND prorettype <> ALL (ARRAY['internal', 'trigger', 'event_trigger']::regtype[])
				AND NOT 'internal'::regtype = ANY (proargtypes) AND NOT 'cstring'::regtype = ANY (proargtypes) AND proargmodes IS NULL AND NOT proretset}))
	{
		my ($types, $name, $arguments, $result, $n) = @$_;
		next if !$named{$name};
		$on_own->($name, $result, split /,/, $types // '');
		# Calls the right one, so that the caller goes on.
		$try->("CREATE FUNCTION evil.\"$name\"($arguments) RETURNS $result LANGUAGE plpgsql AS \$f\$ BEGIN PERFORM evil.log('function $name'); RETURN pg_catalog.\"$name\"("
			  . join(', ', map { "\$$_" } 1 .. $n) . '); END $f$');
	}
	# Operators: all of the server's on the types that requests are made of
	for (rows($database, q{SELECT o.oprname, o.oprleft::regtype, o.oprright::regtype, o.oprresult::regtype, o.oid FROM pg_operator o
			WHERE o.oprnamespace = 'pg_catalog'::regnamespace AND o.oprleft <> 0
				AND o.oprleft = ANY (ARRAY['text', 'int4', 'int8', 'oid', 'timestamptz', 'interval', 'jsonb', 'bytea', 'name', '"char"', 'regproc', 'boolean', 'anyarray', 'anyenum', 'anyelement', 'xid', 'float8', 'numeric', 'uuid', 'anycompatiblearray']::regtype[])}))
	{
		my ($operator, $left, $right, $result, $oid) = @$_;
		next if index($sources, $operator) < 0;
		$on_own->("own_operator_$oid", $result, $left, $right)
		  && $try->("CREATE OPERATOR evil.$operator (FUNCTION = evil.own_operator_$oid, LEFTARG = $own{$left}, RIGHTARG = $own{$right})");
		$try->("CREATE FUNCTION evil.operator_$oid(a $left, b $right) RETURNS $result LANGUAGE plpgsql AS \$f\$ BEGIN PERFORM evil.log('operator $operator'); RETURN a OPERATOR(pg_catalog.$operator) b; END \$f\$")
		  && $try->("CREATE OPERATOR evil.$operator (FUNCTION = evil.operator_$oid, LEFTARG = $left, RIGHTARG = $right)");
	}
	# Types: domains whose check notes it
	for (qw(text jsonb interval timestamptz oid name regclass regproc regtype regrole regnamespace regprocedure bytea uuid int4 int8 bool float8 numeric xid))
	{
		$try->("CREATE DOMAIN evil.$_ AS pg_catalog.$_ CHECK (evil.log('type $_'))");
	}
	# Relations of the server, and of idem
	for (rows($database, q{SELECT relname FROM pg_class WHERE relnamespace = 'pg_catalog'::regnamespace AND relkind IN ('r', 'v')}))
	{
		next if !$named{ $_->[0] };
		$try->("CREATE VIEW evil.$_->[0] AS SELECT * FROM pg_catalog.$_->[0] WHERE evil.log('relation $_->[0]')") && $try->("GRANT SELECT ON evil.$_->[0] TO PUBLIC");
	}
	for (rows($database, q{SELECT c.relname FROM pg_class c WHERE relnamespace = 'requests'::regnamespace AND relkind = 'r'}))
	{
		$try->("CREATE TABLE evil.$_->[0] (scope text, user_id text, request_id text)");
		$try->("CREATE FUNCTION evil.log_$_->[0]() RETURNS trigger LANGUAGE plpgsql AS \$f\$ BEGIN PERFORM evil.log('table $_->[0]'); RETURN NEW; END \$f\$");
		$try->("CREATE TRIGGER log BEFORE INSERT OR UPDATE OR DELETE ON evil.$_->[0] FOR EACH STATEMENT EXECUTE FUNCTION evil.log_$_->[0]()");
		$try->("GRANT ALL ON evil.$_->[0] TO PUBLIC");
	}
	# Functions of idem, under their names
	for (rows($database, q{SELECT p.proname, pg_get_function_identity_arguments(p.oid), p.prorettype::regtype,
				(SELECT string_agg(format_type(t, NULL), ',' ORDER BY n) FROM unnest(p.proargtypes) WITH ORDINALITY AS a (t, n)) FROM pg_proc p
			WHERE pronamespace = 'requests'::regnamespace AND prokind = 'f' AND NOT proretset AND proargmodes IS NULL AND prorettype <> 'trigger'::regtype}))
	{
		my ($name, $arguments, $result, $types) = @$_;
		$on_own->($name, $result, split /,/, $types // '');
		$try->("CREATE FUNCTION evil.$name($arguments) RETURNS $result LANGUAGE plpgsql AS \$f\$ BEGIN PERFORM evil.log('idem''s $name'); RETURN NULL; END \$f\$");
	}
	run_as('other', $database, 'GRANT EXECUTE ON ALL ROUTINES IN SCHEMA evil TO PUBLIC');
	return $planted;
}

# Calls that must fail: a function that raises, arguments that do not fit, and another request
my @fails_in_app = (
	"SELECT requests.idem_call('u', 'f1', 'apps.raises(pg_catalog.text)', '{\"a\": \"no\"}')", "SELECT requests.idem_call('u', 'f2', 'apps.plus(int, int)', '{\"a\": 1}')",
	"SELECT requests.idem_call('u', 'f3', 'apps.plus(int, int)', '{\"a\": 1, \"c\": 1}')", "SELECT requests.idem_call('u', 'f4', 'apps.plus(int, int)', '{\"a\": \"x\", \"b\": 1}')",
	"SELECT requests.idem_call('u', 'c2', 'apps.plus(int, int)', '{\"a\": 1, \"b\": 3}')", "SELECT requests.idem_call('u', 'f5', 'apps.settles(pg_catalog.text)', '{\"r\": \"f5\"}')",
	"SELECT requests.idem_call('u', 'f6', 'apps.plus(int, int)', '[]')", "SELECT requests.idem_call('u', NULL, 'apps.plus(int, int)', '{\"a\": 1, \"b\": 2}')",
	"SELECT requests.idem_claim('u', 'f7', wait => '-1 s')", "SELECT requests.idem_complete('u', 'f7', '{}')", "SELECT requests.idem_fence('u', 'f7', 1)");

# A life of requests, for each role what it may do
my %life = (
	app => [
		"SELECT requests.idem_claim('u', 'r1'), requests.idem_complete('{}'::pg_catalog.jsonb), requests.idem_result(), requests.idem_outcome()",
		"SELECT requests.idem_claim('u', 'r1')", "SELECT requests.idem_claim('u', 'r2', 'retry'), requests.idem_fail('u', 'r2', '{}', scope => 'retry')",
		"SELECT requests.idem_claim('u', 'r2', 'retry', '\\x01', '1 s')",
		"SELECT requests.idem_lease('u', 'r3', scope => '', fingerprint => '\\x02', wait => '1 s', lease => '1 min', progress => '{}')", "SELECT requests.idem_try_claim('u', 'r3', wait => '0')",
		"SELECT requests.idem_extend('u', 'r3', 1, '1 min', '{}')", "SELECT requests.idem_fence('u', 'r3', 1)",
		"SELECT requests.idem_complete('u', 'r3', '{}', 1)", "SELECT requests.idem_lease('u', 'r4', lease => '1 ms')",
		"SELECT requests.idem_release('u', 'r4', 2)", "SELECT requests.idem_lease('u', 'r5', lease => '1 ms')", "SELECT requests.idem_heal('u', 'r5', '{}')",
		"SELECT requests.idem_lease('u', 'r6', lease => '1 ms')", "SELECT requests.idem_try_claim('u', 'r6', 'timed')",
		"SELECT requests.idem_try_claim('u', '01a20305-7a52-7300-8fe1-00000fc14511', 'timed')",
		"SELECT * FROM requests.idem_claim_many(ARRAY['u', 'u'], ARRAY['m1', 'm1'])",
		"SELECT count(*) FROM requests.idem_claim_many(pg_catalog.array_fill('u'::pg_catalog.text, ARRAY[200]), ARRAY(SELECT g::pg_catalog.text FROM generate_series(1, 200) g), 'many')",
		"SELECT requests.idem_lookup('u', 'r1'), requests.idem_status('u', 'r1'), requests.idem_result('u', 'r1'), requests.idem_fingerprint('{\"a\": 1}')",
		"SELECT requests.idem_call('u', 'c1', 'pg_catalog.now()'), requests.idem_call('u', 'c2', 'apps.plus(int, int)', '{\"a\": 1, \"b\": 2}')",
		"SELECT requests.idem_call('u', 'c2', 'apps.plus(int, int)', '{\"a\": 1, \"b\": 2}')",
		@fails_in_app,
		"INSERT INTO apps.sink VALUES ('u', 's1'), ('u', 's1')", "INSERT INTO apps.sink VALUES ('u', 's1')",
		"SELECT requests.idem_claim(1::pg_catalog.int8, 'n1'), requests.idem_claim('11111111-1111-4111-8111-111111111111'::pg_catalog.uuid, 'n1')" ],
	operator => [
		"INSERT INTO requests.idem_scopes (scope, failed, lapsed) VALUES ('retry', 'retryable', 'unknown') ON CONFLICT DO NOTHING", "UPDATE requests.idem_scopes SET ttl = '2 hours'",
		"INSERT INTO requests.idem_scopes (scope, ttl, key_time) VALUES ('timed', '1 day', 'uuidv7') ON CONFLICT DO NOTHING",
		"UPDATE requests.idem_scopes SET ttl = '2 days' WHERE scope OPERATOR(pg_catalog.=) 'timed'", "DELETE FROM requests.idem_scopes",
		'SELECT requests.idem_lapsed()', "SELECT requests.idem_forget('u', 'r6')", "SELECT requests.idem_heal('u', 'r6', '{}')", 'SELECT requests.idem_cleanup()', 'SELECT requests.idem_cleanup(10)',
		'CALL requests.idem_cleanup_all()', 'SELECT requests.idem_stat_reset()', 'SELECT count(*) FROM requests.idem_metrics', 'SELECT count(*) FROM requests.idem_holders',
		'SELECT count(*) FROM requests.idem_unsettled', 'SELECT count(*) FROM requests.idem_stat_cleanup', 'SELECT count(*) FROM requests.idem_stat_claims' ],
	grantor => [
		"SELECT requests.idem_grant('other'::pg_catalog.regrole, 'operator')", "SELECT requests.idem_revoke('other'::pg_catalog.regrole, 'operator')",
		"SELECT requests.idem_grant('other'::pg_catalog.regrole, 'app')", "SELECT requests.idem_revoke('other'::pg_catalog.regrole, 'app')" ]);

for my $database (sort keys %extension)
{
	my ($calls, $failed, $refused) = (0, 0, 0);
	my ($planted, $log_size);
	my %must_fail = map { $_ => 1 } @fails_in_app;

	$node->safe_psql($database, q{
		CREATE SCHEMA apps AUTHORIZATION app;
		SET ROLE app;
		CREATE TABLE apps.sink (u pg_catalog.text, r pg_catalog.text);
		CREATE TRIGGER once BEFORE INSERT ON apps.sink FOR EACH ROW EXECUTE FUNCTION requests.idem_skip_duplicates('sink', 'u', 'r');
		CREATE FUNCTION apps.raises(a text) RETURNS int LANGUAGE plpgsql AS 'BEGIN RAISE EXCEPTION USING MESSAGE = a; END';
		CREATE FUNCTION apps.settles(r text) RETURNS int LANGUAGE plpgsql AS $f$ BEGIN PERFORM requests.idem_fail('u', r, '"no"'); RAISE EXCEPTION 'failed'; END $f$;
		CREATE FUNCTION apps.plus(a int, b int) RETURNS int LANGUAGE sql AS 'SELECT a OPERATOR(pg_catalog.+) b';
		GRANT USAGE ON SCHEMA apps TO PUBLIC;
		GRANT ALL ON apps.sink TO PUBLIC;
	});
	$planted = plant($database);
	$log_size = -s $node->logfile;
	@loot = ();
	# In each session the hostile schema comes first, also before pg_catalog; temporary tables too.
	for ([ app => @{ $life{app} } ], [ operator => @{ $life{operator} } ], [ owner => map { @$_ } @life{qw(app operator grantor)} ],
		[ $superuser => map { @$_ } @life{qw(app operator grantor)} ])
	{
		my ($role, @statements) = @$_;
		# A new session: what is parsed and cached, is so under this path.
		delete $session{"$database $role"};
		run_as($role, $database, "CREATE TEMPORARY TABLE $_ (scope text, user_id text, request_id text)") for qw(idem_claims idem_scopes idem_settings pg_proc pg_class);
		run_as($role, $database, 'CREATE DOMAIN pg_temp.jsonb AS pg_catalog.jsonb CHECK (evil.log($$temporary type$$))');
		run_as($role, $database, 'SET search_path = evil, pg_temp, pg_catalog, requests');
		for my $sql (@statements)
		{
			# The portable edition does not have them.
			next if $database eq 'portable' && $sql =~ /idem_stat_(reset|claims)/;
			my $state = run_as($role, $database, $sql);
			$calls++;
			if ($must_fail{$sql})
			{
				$refused++;
				$state = "XX no error" if $state eq '';
			}
			if ($state =~ /^(XX|42704|42883|42P01|42703|42725|42804)/)
			{
				# It found something that the attacker planted.
				$failed++;
				diag "$database: $role: $sql: $state" if $failed < 10;
			}
		}
		$session{"$database $role"}->close;
		delete $session{"$database $role"};
	}
	my $as_other = join "\n", map { join ' ', map { $_ // '' } @$_ } rows($database, "SELECT DISTINCT what, who, session FROM evil.loot WHERE who <> session");
	is($as_other, '', "$database: nothing that was planted ran with the rights of somebody else than the session's role");
	# Nor did what a superuser or an owner called run anything of a stranger. (The statements
	# themselves name the server's functions by their schema.)
	my $for_others = join "\n", map { join ' ', map { $_ // '' } @$_ } rows($database, "SELECT what, session, count(*) FROM evil.loot GROUP BY 1, 2 ORDER BY 1, 2 LIMIT 20");
	is($for_others, '', "$database: nothing that was planted ran at all");
	is($failed, 0, "$database: no call was led astray");
	my %warned = map { $_ => 1 } @loot;
	is(join("\n", sort keys %warned), '', "$database: nor did it in a call that failed");
	is(join("\n", slurp_file($node->logfile, $log_size) =~ /WARNING: .*(LOOT.*)/g), '', "$database: nor in a call that hid its warnings");
	figure("$database, hostile names", "$planted objects planted, $calls calls, of them $refused that must fail");
	cmp_ok($planted, '>', 200, "$database: objects were planted");
	# The trap works.
	run_as('app', $database, 'SET search_path = evil, pg_catalog');
	run_as('app', $database, q{SELECT now(), 'a' || 'b'::text});
	cmp_ok((rows($database, 'SELECT count(*) FROM evil.loot'))[0][0], '>', 0, "$database: what is planted does run where it is called");
	run_as('other', $database, q{CREATE FUNCTION evil.takes_own(evil.own_0) RETURNS boolean LANGUAGE sql AS 'SELECT $1 IS NOT NULL'});
	run_as('app', $database, 'SET search_path = pg_catalog');
	run_as('app', $database, q{SELECT evil.takes_own('x'::text)});
	run_as('app', $database, 'SET search_path = evil, pg_catalog');
	is((rows($database, q{SELECT string_agg(DISTINCT what, ', ') FROM evil.loot WHERE what ~ '^cast'}))[0][0], 'cast of text', "$database: so do casts, in any search_path");
	@loot = ();
	run_as('app', $database, q{DO $$ BEGIN PERFORM now(), 'a' || 'b'::text; RAISE EXCEPTION 'undone'; END $$});
	like($loot[0] // '', qr/^LOOT .* by app in a session of app$/, "$database: which is seen also if the call fails");
}
is((rows('postgres', "SELECT count(*) FROM pg_roles WHERE rolsuper"))[0][0], '1', 'nobody became superuser');
is((rows('postgres', "SELECT count(*) FROM pg_auth_members WHERE member = ANY (ARRAY['app', 'stranger', 'operator', 'other']::regrole[])"))[0][0], '0', 'nor a member of another role');
is(faults_in($node), '', 'the log of the server has no fault');
$node->stop;
done_testing();
