# Attacks on the portable edition: no role gets more rights than it was granted. Each of these
# attacks once worked.

use strict;
use warnings;

use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use IPC::Run;

use Client;

my $portable = 'sql/idem-portable.sql';
my $citus = 'sql/idem-citus.sql';

my $node = PostgreSQL::Test::Cluster->new('main');
$node->init;
$node->start;
my $superuser = $node->safe_psql('postgres', 'SELECT current_user');
$node->safe_psql('postgres', "CREATE ROLE $_ LOGIN") for qw(owner app attacker friend stranger anon);

sub as
{
	my ($role, $database, $sql) = @_;
	return $node->safe_psql($database, $sql, extra_params => [ '-U', $role ]);
}

sub new_database
{
	my ($name, $owner) = @_;

	$node->safe_psql('postgres', "CREATE DATABASE $name OWNER $owner");
	return $name;
}

# Returns exit code and errors
sub install
{
	my ($role, $database, $schema, $file) = @_;
	my ($out, $err) = ('', '');

	IPC::Run::run(
		[ 'psql', '-XAtq', '-h', $node->host, '-p', $node->port, '-U', $role, '-v', "schema=$schema", '-f', $file // $portable, $database ],
		'<', \undef, '>', \$out, '2>', \$err);
	return ($? >> 8, $err);
}

# A function that makes its owner superuser if a superuser calls it, and counts its calls
sub evil
{
	my ($role, $schema, $arguments, $result) = @_;

	return qq{
CREATE SEQUENCE $schema.calls;
CREATE FUNCTION $schema.evil($arguments) RETURNS $result LANGUAGE plpgsql AS \$\$
BEGIN
	PERFORM nextval('$schema.calls');
	IF (SELECT rolsuper FROM pg_roles WHERE rolname = current_user) THEN
		ALTER ROLE $role SUPERUSER;
	END IF;
	RETURN NULL;
END \$\$;
GRANT USAGE ON SEQUENCE $schema.calls TO PUBLIC;
};
}

sub superusers
{
	return $node->safe_psql('postgres', "SELECT string_agg(rolname, ' ') FROM pg_roles WHERE rolsuper AND rolname <> '$superuser'");
}

# The objects of idem in the database that belong to a superuser
sub of_superusers
{
	my ($database) = @_;

	return $node->safe_psql($database, q{
SELECT string_agg(o.name, ' ')
FROM (SELECT proname, proowner FROM pg_proc UNION ALL SELECT relname, relowner FROM pg_class
		UNION ALL SELECT typname, typowner FROM pg_type) AS o (name, owner) JOIN pg_roles AS r ON r.oid = o.owner
WHERE o.name LIKE 'idem\_%' AND r.rolsuper});
}

# ----- objects that other roles put into the schema before -----

new_database('planted', $superuser);
as($superuser, 'planted', 'CREATE SCHEMA idem; GRANT CREATE, USAGE ON SCHEMA idem TO attacker');
as('attacker', 'planted', evil('attacker', 'idem', 'a name, b name', 'bool')
	. 'CREATE OPERATOR idem.~~ (LEFTARG = name, RIGHTARG = name, FUNCTION = idem.evil)');
my ($status, $err) = install($superuser, 'planted', 'idem');
is(superusers(), '', 'an operator in the schema: nobody became superuser');
isnt($status, 0, 'an operator in the schema: refused while the role can create there');
like($err, qr/others may create objects in schema idem: attacker\n.*HINT:  Install idem into a schema of its own/s, 'and named');
as($superuser, 'planted', 'REVOKE CREATE ON SCHEMA idem FROM attacker');
($status, $err) = install($superuser, 'planted', 'idem');
is(superusers(), '', 'what is left behind: nobody became superuser');
like($err, qr/others own objects in schema idem: function idem.evil\(name,name\), operator idem.~~\(name,name\)\n/, 'what is left behind: refused, and named');
(undef, undef, $err) = $node->psql('planted', 'CREATE EXTENSION idem_portable SCHEMA idem');
like($err, qr/others own objects in schema idem/, 'as an extension, too');
as($superuser, 'planted', 'GRANT CREATE ON SCHEMA idem TO friend; GRANT friend TO attacker; CREATE SCHEMA own');
as('attacker', 'planted', 'DROP FUNCTION idem.evil CASCADE');
like((install($superuser, 'planted', 'idem'))[1], qr/others may create objects in schema idem: attacker, friend\n/, 'members of who can create: named');
is((install($superuser, 'planted', 'own'))[0], 0, 'the HINT works: a schema of its own');
is(as($superuser, 'planted', "SELECT own.idem_claim('u', 'r')"), 't', 'and idem there');

# ----- objects that the owner of the database puts there later -----

new_database('owned', 'owner');
is((install($superuser, 'owned', 'public'))[0], 0, 'a superuser installs where others are the owner');
is(of_superusers('owned'), '', 'nothing belongs to the superuser');
is(as($superuser, 'owned', 'SHOW role'), 'none', 'who is who he was');
as('owner', 'owned', evil('owner', 'public', 'a float8, b int4', 'float8')
	. q{CREATE OPERATOR public.* (LEFTARG = float8, RIGHTARG = int4, FUNCTION = public.evil);
SELECT idem_grant('app', 'app')});
is(as('app', 'owned', "SELECT idem_claim('u', 'r')"), 't', 'an operator that came later: a claim');
as($superuser, 'owned', "SELECT outcome FROM idem_lease('u', 'r', lease => '1 s')");
is(superusers(), '', 'an operator that came later: nobody became superuser');
is(as('owner', 'owned', 'SELECT is_called FROM calls'), 'f', 'an operator that came later: is never called');

# ----- dumped, and restored by a superuser -----

new_database('dumped_plain', 'owner');
new_database('dumped_extension', 'owner');
as('owner', $_, 'CREATE SCHEMA requests') for qw(dumped_plain dumped_extension);
is((install('owner', 'dumped_plain', 'requests'))[0], 0, 'installed by the owner of the schema');
is((install($superuser, 'dumped_plain', 'requests', $citus))[0], 0, 'a superuser loads what distributes it');
is(of_superusers('dumped_plain'), '', 'nothing of that belongs to the superuser');
as('owner', 'dumped_extension', 'CREATE EXTENSION idem_portable SCHEMA requests');
for my $database (qw(dumped_plain dumped_extension))
{
	as('owner', $database, "SELECT requests.idem_grant('app', 'app'); SELECT requests.idem_claim('u', 'before')");
	my $dump = $node->basedir . "/$database.sql";
	$node->command_ok([ 'pg_dump', '-d', $node->connstr($database), '-f', $dump ], "$database: dumped");
	new_database("new_$database", $superuser);
	$node->command_ok([ 'psql', '-Xq', '-v', 'ON_ERROR_STOP=1', '-d', $node->connstr("new_$database"), '-f', $dump ],
		"$database: restored by a superuser");
	is(of_superusers("new_$database"), '', "$database: nothing belongs to the superuser");
	is(as('app', "new_$database", "SELECT requests.idem_claim('u', 'before'), requests.idem_claim('u', 'after')"),
		'f|t', "$database: claims and rights are kept");
}
like(($node->psql('new_dumped_plain', 'SELECT requests.idem_distribute()', extra_params => [ '-U', 'owner' ]))[2],
	qr/extension "citus" is not installed/, 'what distributes it is kept');
new_database('created', 'owner');
as($superuser, 'created', 'CREATE EXTENSION idem_portable');
is(of_superusers('created'), '', 'created by a superuser in the schema of another: nothing is his');

# ----- a claim that was not made -----

as('owner', 'owned', q{
CREATE TABLE payments (request text);
CREATE PROCEDURE pay(request text) LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp AS $$
BEGIN
	IF idem_outcome() = 'claimed' THEN
		INSERT INTO payments VALUES (request);
		PERFORM idem_complete(to_jsonb(request));
	END IF;
END $$;
GRANT EXECUTE ON PROCEDURE pay TO app;
});
as('owner', 'owned', "SELECT idem_claim('u', 'r'), idem_claim('u', 's', 'claimed')");
for my $forged ('claimed ["u","r",""]', "-claimed [\"u\",\"r\",\"\"]\n1", "+\t[\"u\",\"r\",\"\"]", "=\t[\"u\",\"r\",\"\"]", "+(0,1)\t[\"u\",\"r\",\"\"]")
{
	my ($code, $out, $complaint) = $node->psql('owned', qq{
BEGIN; SET LOCAL idem_held.latest = '$forged'; CALL pay('r'); COMMIT;}, extra_params => [ '-U', 'app' ]);
	like($complaint, qr/no claim was made in this transaction/, 'a forged claim: refused in a definer\'s procedure');
}
is(as('owner', 'owned', 'SELECT count(*) FROM payments'), '0', 'nothing was paid for it');
my $client = Client->new($node, 'owned');
$client->ask('SET SESSION AUTHORIZATION app');
$client->ask("SET idem_held.$_ = 'x x'") for 'latest', 'open';
$client->ask('BEGIN');
is($client->ask("SELECT idem_claim('u', 'pooled')"), 't', 'a pooled session with garbage in it: claims');
is($client->ask("SELECT idem_outcome(), idem_result() IS NULL, idem_complete('1')"), 'claimed|t|t', 'and settles');
$client->ask('COMMIT');
is($client->ask("SELECT idem_claim('u', 'pooled')"), 'f', 'and replays');

# ----- what DISCARD ALL does not discard -----

my $pooled = Client->new($node, 'owned');
$pooled->ask("SET idem.wait = '3s'");
# From 19 on all strings are conforming ones.
if ($node->safe_psql('postgres', 'SHOW server_version_num') < 190000)
{
	$pooled->ask('SET standard_conforming_strings = off');
	$pooled->ask('SET escape_string_warning = off');
}
is($pooled->ask("SELECT idem_claim('u', 'poisoned 1'), idem_complete('u', 'poisoned 0', NULL, 1)"), 'ERROR:  ID410', 'strings with backslash escapes: the same answers');
$pooled->ask('DISCARD ALL');
$pooled->ask("SET idem.wait = '2s'");
is($pooled->ask("SELECT idem_claim('u', 'poisoned 1')"), 't', 'and for the next client of the session');
$pooled->quit;

# ----- another role cannot take the locks -----

my $stranger = Client->new($node, 'owned');
$stranger->ask('SET SESSION AUTHORIZATION stranger');
$stranger->ask(q{SELECT pg_advisory_lock(hashtextextended('["u", "held up", ""]', 0))});
is($client->ask("SELECT outcome FROM idem_lease('u', 'held up', wait => '0', lease => '1 min')"), 'claimed', "a stranger's lock holds no key up");
is($stranger->ask('SELECT * FROM idem__policies FOR UPDATE'), 'ERROR:  42501', 'nor can he lock the policies');
$stranger->quit;

# Tokens grow, whatever a holder does in its transaction.
my $holder = Client->new($node, 'owned');
for my $level ('READ COMMITTED', 'REPEATABLE READ', 'SERIALIZABLE')
{
	my $key = "'u', 'key $level'";
	my $lease = "idem_lease($key, wait => '0', lease => '1 min')";

	$holder->ask("BEGIN ISOLATION LEVEL $level");
	my $first = $holder->ask("SELECT token FROM $lease");
	is($client->ask("SELECT outcome FROM $lease"), 'in_progress', "$level: a lease that is not committed is met");
	is($holder->ask("SELECT idem_release($key, $first)"), 't', "$level: released");
	is($client->ask("SELECT outcome FROM $lease"), 'in_progress', "$level: and still met");
	my $second = $holder->ask("SELECT token FROM $lease");
	cmp_ok($second, '>', $first, "$level: leased again in the same transaction");
	$holder->ask("SELECT idem_release($key, $second)");
	$client->send("SELECT token FROM idem_lease($key, lease => '1 min')");
	$node->poll_query_until('owned', 'SELECT count(*) > 0 FROM pg_stat_activity WHERE cardinality(pg_blocking_pids(pid)) > 0')
	  or die 'nobody waits';
	$holder->ask('COMMIT');
	cmp_ok($client->answer, '>', $second, "$level: who waited has a greater token");

	$holder->ask("BEGIN ISOLATION LEVEL $level");
	$holder->ask('SAVEPOINT s');
	$holder->ask("SELECT token FROM idem_lease('u', 'undone $level', lease => '1 min')");
	$holder->ask('ROLLBACK TO s');
	is($client->ask("SELECT outcome FROM idem_lease('u', 'undone $level', wait => '0', lease => '1 min')"),
		'claimed', "$level: ROLLBACK TO gives the key back");
	$holder->ask('ROLLBACK');
}
$_->quit for $holder, $client;

# ----- a change of a promise that has to wait holds no claim up -----

for my $obstacle ("SELECT idem_claim('u', 'open')", "UPDATE idem_settings SET ttl = ttl + interval '1 day'", "INSERT INTO idem_scopes (scope) VALUES ('open')")
{
	my ($holder, $operator, $claimant) = map { Client->new($node, 'owned') } 1 .. 3;

	$holder->ask('BEGIN');
	$holder->ask($obstacle);
	$operator->ask("SET ROLE owner; SET lock_timeout = '10min'");
	$operator->send("INSERT INTO idem_scopes (scope, ttl, key_time) VALUES ('waits', '1 day', 'uuidv7')");
	$node->poll_query_until('owned', q{SELECT count(*) > 0 FROM pg_stat_activity WHERE query ~ '^INSERT INTO idem_scopes' AND state = 'active'})
	  or die 'the change has ended';
	is($claimant->ask("SELECT count(*) FROM generate_series(1, 20) AS i WHERE idem_claim('u', md5(random()::text))"), '20', "claims beside it: $obstacle");
	is( $node->safe_psql('owned', q{SELECT count(*) FROM pg_stat_activity WHERE query ~ '^INSERT INTO idem_scopes' AND state = 'active'}),
		'1', 'which still waits');
	is($claimant->ask('SELECT idem_cleanup()'), '0', 'a cleaner does not wait for it');
	$holder->ask('COMMIT');
	is($operator->answer, '', 'it is made when the transaction before it has ended');
	is($claimant->ask('SELECT idem_cleanup()'), '0', 'cleaned again');
	$operator->ask("DELETE FROM idem_scopes; RESET ROLE");
	$_->quit for $holder, $operator, $claimant;
}

# ----- trigger functions -----

as('owner', 'owned', 'GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA public TO attacker; GRANT CREATE ON SCHEMA public TO attacker');
as('attacker', 'owned', 'CREATE TABLE mine (scope text, key_time text, ttl interval, lease interval, lease_max interval, guarded_since timestamptz, only_row bool)');
for my $function (qw(idem__scopes_guard idem__replace_settings))
{
	as('attacker', 'owned', "CREATE TRIGGER t BEFORE INSERT ON mine FOR EACH ROW EXECUTE FUNCTION $function()");
	my (undef, undef, $complaint) = $node->psql('owned', "\\set VERBOSITY sqlstate\nINSERT INTO mine (scope, key_time) VALUES ('s', 'uuidv7')",
		extra_params => [ '-U', 'attacker' ]);
	like($complaint, qr/42501/, "$function(): has no rights but its caller's");
	as('attacker', 'owned', 'DROP TRIGGER t ON mine');
}
is(as('owner', 'owned', 'SELECT count(*) FROM idem_settings'), '1', 'the settings are still there');

# ----- the trigger of a sink, which runs as the owner of idem for tables of others -----

as($superuser, 'owned', 'CREATE SCHEMA hostile AUTHORIZATION attacker; GRANT USAGE ON SCHEMA hostile TO PUBLIC');
as('owner', 'owned', "SELECT idem_grant('attacker', 'app')");
as('attacker', 'owned', q{
SET search_path = hostile, public;
CREATE TYPE mood AS ENUM ('calm');
CREATE TYPE pair AS (a int, b int);
CREATE FUNCTION mood_text(mood) RETURNS text LANGUAGE plpgsql AS $$BEGIN RAISE WARNING 'ran as %: mood to text', current_user; RETURN 'x'; END$$;
CREATE FUNCTION mood_json(mood) RETURNS json LANGUAGE plpgsql AS $$BEGIN RAISE WARNING 'ran as %: mood to json', current_user; RETURN '1'; END$$;
CREATE FUNCTION pair_text(pair) RETURNS text LANGUAGE plpgsql AS $$BEGIN RAISE WARNING 'ran as %: pair to text', current_user; RETURN 'x'; END$$;
CREATE FUNCTION checked(text) RETURNS boolean LANGUAGE plpgsql AS $$BEGIN RAISE WARNING 'ran as %: domain', current_user; RETURN true; END$$;
CREATE FUNCTION text(mood) RETURNS text LANGUAGE plpgsql AS $$BEGIN RAISE WARNING 'ran as %: text(mood)', current_user; RETURN 'x'; END$$;
CREATE FUNCTION format(text, mood) RETURNS text LANGUAGE plpgsql AS $$BEGIN RAISE WARNING 'ran as %: format', current_user; RETURN 'x'; END$$;
CREATE CAST (mood AS text) WITH FUNCTION mood_text(mood) AS IMPLICIT;
CREATE CAST (mood AS json) WITH FUNCTION mood_json(mood) AS IMPLICIT;
CREATE CAST (pair AS text) WITH FUNCTION pair_text(pair) AS IMPLICIT;
CREATE DOMAIN checked AS text CHECK (checked(VALUE));
CREATE FUNCTION policy() RETURNS boolean LANGUAGE plpgsql AS $$BEGIN RAISE WARNING 'ran as %: policy', current_user; RETURN true; END$$;
CREATE TABLE sink (id text, mood mood DEFAULT 'calm', pair pair DEFAULT '(1,2)', checked checked DEFAULT 'c', to_json text DEFAULT 'j', later text DEFAULT 'calm');
ALTER TABLE sink ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY;
CREATE POLICY p ON sink USING (policy()) WITH CHECK (policy());
});
# Returns the errors of an INSERT under a trigger with these arguments.
sub sink
{
	my ($columns) = @_;

	as('attacker', 'owned', "DROP TRIGGER IF EXISTS once ON hostile.sink; CREATE TRIGGER once BEFORE INSERT ON hostile.sink
		FOR EACH ROW EXECUTE FUNCTION public.idem_skip_duplicates('hostile', $columns)");
	my (undef, undef, $errors) = $node->psql('owned', "INSERT INTO hostile.sink (id) VALUES ('i')",
		extra_params => [ '-U', 'attacker', '-v', 'VERBOSITY=sqlstate' ]);
	return join '', grep { /ERROR/ } split /\n/, $errors;
}
like(sink("'id', 'mood'"), qr/42804/, 'a sink with a type that has a cast: refused');
like(sink("'pair', 'id'"), qr/42804/, 'a sink with a row type that has a cast: refused');
like(sink("'id', 'row_to_json'"), qr/42703/, 'a sink with a function as a column: refused');
like(sink("'id', 'mood_text'"), qr/42703/, 'a sink with a function of the attacker as a column: refused');
like(sink("'id', 'id)::hostile.mood::text, (id'"), qr/42703/, 'a sink with an expression as a column: refused');
is(sink("'id', 'checked'"), '', 'a sink with a domain');
is(as('owner', 'owned', "SELECT request_id FROM idem_claims WHERE scope = 'hostile'"), 'c', 'claims its values');
# The check of the trigger is remembered in a setting, which anybody can forge: that spares no
# check of a column or of an id, and lets no code of the attacker run.
for (['42804', "'id', 'mood'"], ['42703', "'id', 'mood_text'"], ['42703', "'id', 'id)::hostile.mood::text, (id'"], ['ID400', "'id', 'later'"])
{
	my ($sqlstate, $columns) = @$_;
	as('attacker', 'owned', "DROP TRIGGER IF EXISTS once ON hostile.sink; CREATE TRIGGER once BEFORE INSERT ON hostile.sink
		FOR EACH ROW EXECUTE FUNCTION public.idem_skip_duplicates('forged', $columns)");
	my (undef, undef, $errors) = $node->psql('owned', q{
DO $$
BEGIN
	PERFORM set_config('idem_held.checked', concat_ws(' ', extract(epoch FROM statement_timestamp()), 'hostile.sink'::regclass::oid, 'once'), true);
	INSERT INTO hostile.sink (id, later) VALUES ('i', '');
END $$}, extra_params => [ '-U', 'attacker', '-v', 'VERBOSITY=sqlstate' ]);
	like($errors, qr/ERROR:  $sqlstate/, "a forged check of a sink with $columns: refused");
}
is(as('owner', 'owned', "SELECT count(*) FROM idem_claims WHERE scope = 'forged'"), '0', 'and nothing is claimed');
# The columns change after the snapshot of the transaction that inserts.
for my $change ('to_json', 'later')
{
	my $inserter = Client->new($node, 'owned');
	is(sink("'id', '$change'"), '', "a sink with the column $change");
	$inserter->ask('SET SESSION AUTHORIZATION attacker');
	$inserter->ask('BEGIN ISOLATION LEVEL REPEATABLE READ');
	$inserter->ask('SELECT 1');
	as('attacker', 'owned', $change eq 'later' ? 'ALTER TABLE hostile.sink ALTER later DROP DEFAULT, ALTER later TYPE hostile.mood USING mood'
		: 'ALTER TABLE hostile.sink DROP COLUMN to_json');
	like($inserter->ask("INSERT INTO hostile.sink (id, mood) VALUES ('new', 'calm')"), qr/ERROR:  (42703|42804|ID400)/, "$change has changed: refused");
	$inserter->quit;
}
# An error takes nothing out of the log.
my %ran = map { $_ => 1 } PostgreSQL::Test::Utils::slurp_file($node->logfile) =~ /WARNING:  ran as (.*)/g;
is(join(', ', grep { !/^attacker/ } sort keys %ran), '', 'nothing of the attacker ran as somebody else');
is(join(', ', sort keys %ran), 'attacker: domain, attacker: policy', 'but as the attacker');
my (undef, undef, $refused) = $node->psql('owned', q{CREATE TEMPORARY TABLE t (a text, b text);
CREATE TRIGGER t BEFORE INSERT ON t FOR EACH ROW EXECUTE FUNCTION idem_skip_duplicates('hostile', 'a', 'b')}, extra_params => [ '-U', 'stranger' ]);
like($refused, qr/permission denied for function idem_skip_duplicates/, 'a trigger needs EXECUTE');

# ----- functions that were planted later, and match imprecise calls better -----

new_database('twins', 'owner');
is((install('owner', 'twins', 'public', $_))[0], 0, "twins: $_ installed") for $portable, $citus;
as('owner', 'twins', q{
SELECT idem_grant('app', 'app'), idem_grant('friend', 'operator');
INSERT INTO idem_scopes (scope, lease_max) VALUES ('short', '1 min')});
# For each function of idem: the same name with another type for one argument or for all, and
# without default arguments
my $twins = as($superuser, 'twins', q{
CREATE TEMPORARY TABLE planted (name text);
DO $block$
DECLARE
	twin record;
BEGIN
	FOR twin IN
		WITH routine AS (
			SELECT p.proname, p.prokind, p.proretset, p.prorettype, p.pronargs, p.pronargdefaults,
				ARRAY(SELECT t::regtype::text FROM unnest(p.proargtypes) WITH ORDINALITY AS u (t, n) ORDER BY n) AS types
			FROM pg_proc AS p WHERE p.pronamespace = 'public'::regnamespace AND p.proname LIKE 'idem%'
				AND p.prorettype <> 'trigger'::regtype)
		SELECT r.proname, r.prokind, r.proretset, r.prorettype, v.types
		FROM routine AS r, LATERAL (
			SELECT array_fill('text'::text, ARRAY[r.pronargs::int]) WHERE r.pronargs > 0
			UNION SELECT r.types[:i - 1] || other || r.types[i + 1:]
				FROM generate_subscripts(r.types, 1) AS i, unnest(ARRAY['text', 'name', 'varchar', 'int4', 'oid', 'numeric']) AS other
				WHERE other IN ('text', CASE r.types[i] WHEN 'text' THEN 'name' WHEN 'bigint' THEN 'int4' WHEN 'regrole' THEN 'oid' END,
					CASE r.types[i] WHEN 'text' THEN 'varchar' WHEN 'bigint' THEN 'numeric' END)
			UNION SELECT r.types[:r.pronargs - k] FROM generate_series(1, r.pronargdefaults) AS k) AS v (types)
	LOOP
		BEGIN
			EXECUTE format('CREATE %s public.%I(%s) %s LANGUAGE plpgsql AS %L',
				CASE twin.prokind WHEN 'p' THEN 'PROCEDURE' ELSE 'FUNCTION' END, twin.proname, array_to_string(twin.types, ', '),
				CASE WHEN twin.prokind = 'f' THEN 'RETURNS ' || CASE WHEN twin.proretset THEN 'SETOF ' ELSE '' END || twin.prorettype::regtype END,
				format('BEGIN RAISE WARNING %L; RAISE EXCEPTION USING ERRCODE = ''HJ000''; END',
					'hijacked by ' || twin.proname || '(' || array_to_string(twin.types, ', ') || ')'));
			INSERT INTO planted VALUES (twin.proname);
		EXCEPTION WHEN duplicate_function THEN
		END;
	END LOOP;
END $block$;
SELECT count(*) FROM planted});
cmp_ok($twins, '>', 150, 'twins: planted');

my $app = Client->new($node, 'twins');
$app->ask('SET SESSION AUTHORIZATION app');
my %argument = (
	claim => q{idem_claim(%s::text, %s::text, ''::text, NULL::bytea, NULL::interval)},
	try => q{idem_try_claim('u'::text, %s::text, ''::text, '\x01'::bytea, '0'::interval)},
	lease => q{idem_lease('u'::text, %s::text, %s::interval, %s::text, '\x01'::bytea, '0'::interval, %s::jsonb)},
	settle => q{idem_%s('u'::text, '%s'::text, '"%s"'::jsonb, %s::int8, ''::text)});

# The answer of a call. Each ? is a number; the last one is the token from then on.
my $token = 0;
sub answers
{
	my ($client, $sql, $expected, $name) = @_;
	my $answer = $client->ask($sql =~ s/TOKEN/$token/gr);

	if ($expected =~ /\?/) { $answer =~ s/\b(\d+)$/?/ and $token = $1 }
	$answer =~ s/\n.*//s;
	return is($answer, $expected, 'twins: ' . ($name // $sql));
}
sub claim { return 'SELECT ' . sprintf $argument{claim}, @_ }
sub try_claim { return 'SELECT outcome FROM ' . sprintf $argument{try}, @_ }
sub lease { return 'SELECT outcome, token FROM ' . sprintf $argument{lease}, @_ }
sub settle { return 'SELECT ' . sprintf $argument{settle}, @_ }

answers($app, claim("'u'", "'r'"), 't');
answers($app, claim("'u'", "'r'"), 'f');
answers($app, claim("''", "'r'"), 'ERROR:  ID400');
answers($app, claim('NULL', "'r'"), 'ERROR:  ID400');
answers($app, claim("'u'", "repeat('x', 256)"), 'ERROR:  ID400');
answers($app, "SELECT idem_claim('u'::text, 'r'::text, $_)", 'ERROR:  ID400')
  for "''::text, '\\x'::bytea, NULL::interval", "NULL::text, NULL::bytea, NULL::interval", "repeat('x', 256)::text, NULL::bytea, NULL::interval",
  "''::text, NULL::bytea, '1 month'::interval", "''::text, NULL::bytea, '-1 s'::interval";
answers($app, try_claim("'marker'"), 'claimed');
answers($app, lease("'lease'", "'1 h'", "''", q{'{"at": 1}'}), 'claimed|?');
answers($app, lease("'lease'", "'1 h'", "''", 'NULL'), 'in_progress|');
answers($app, "SELECT idem_claim('u'::text, 'lease'::text, ''::text, '\\x02'::bytea, '0'::interval)", 'ERROR:  ID422');
answers($app, "SELECT idem_claim('u'::text, 'lease'::text, ''::text, NULL::bytea, '0'::interval)", 'ERROR:  ID409');
answers($app, "SELECT idem_claim('u'::text, 'lease'::text, ''::text, NULL::bytea, '10 ms'::interval)", 'ERROR:  ID503');
answers($app, lease("'r2'", "'1 h'", "'short'", 'NULL'), 'ERROR:  ID400');
answers($app, lease("'r2'", 'NULL', "''", "'1'"), 'ERROR:  ID400');
answers($app, lease("'r2'", "'0'", "''", 'NULL'), 'ERROR:  ID400');
answers($app, q{SELECT string_agg(m.ordinal || ' ' || m.outcome, ',' ORDER BY m.ordinal)
FROM idem_claim_many(ARRAY['u', 'u', '']::text[], ARRAY['r', 'many', 'x']::text[], ''::text, NULL::bytea[], NULL::interval) AS m},
	'1 completed,2 claimed,3 invalid', 'a batch');
answers($app, q{SELECT FROM idem_claim_many(ARRAY['u']::text[], ARRAY[]::text[], ''::text, NULL::bytea[], NULL::interval)}, 'ERROR:  ID400');
answers($app, "SELECT idem_$_", 'ERROR:  ID410') for "fence('u'::text, 'lease'::text, 9999::int8, ''::text)",
  "release('u'::text, 'lease'::text, 9999::int8, ''::text)", "complete('u'::text, 'lease'::text, NULL::jsonb, 9999::int8, ''::text)";
answers($app, "SELECT idem_$_", 'ERROR:  ID400') for "fence('u'::text, 'lease'::text, NULL::int8, ''::text)", "fence('u'::text, 'lease'::text, (-1)::int8, ''::text)";
answers($app, "SELECT idem_fence('u'::text, 'lease'::text, TOKEN::int8, ''::text) IS NULL", 'f');
answers($app, "SELECT idem_extend('u'::text, 'lease'::text, TOKEN::int8, '30 s'::interval, '2'::jsonb, ''::text) > now()", 't');
answers($app, settle('complete', 'lease', 'done', 'TOKEN'), 't');
answers($app, settle('complete', 'lease', 'done', 'TOKEN'), 'f');
answers($app, settle('complete', 'lease', 'else', 'TOKEN'), 'ERROR:  ID410');
answers($app, settle('complete', 'r', 'x', 'NULL'), 'ERROR:  ID410');
answers($app, "SELECT idem_extend('u'::text, 'lease'::text, TOKEN::int8, NULL::interval, NULL::jsonb, ''::text)", 'ERROR:  ID410');
answers($app, lease("'lease 2'", "'1 h'", "''", 'NULL'), 'claimed|?');
answers($app, settle('fail', 'lease 2', 'error', 'TOKEN'), 't');
answers($app, claim("'u'", "'lease 2'"), 'ERROR:  ID417');
answers($app, "SELECT idem_heal('u'::text, 'lease 2'::text, NULL::jsonb, ''::text)", 'ERROR:  ID410');
answers($app, "SELECT idem_heal('u'::text, 'none'::text, NULL::jsonb, ''::text)", 'ERROR:  ID410');
answers($app, lease("'lease 3'", "'1 h'", "''", 'NULL'), 'claimed|?');
answers($app, "SELECT idem_heal('u'::text, 'lease 3'::text, '3'::jsonb, ''::text)", 't');
answers($app, "SELECT idem_heal('u'::text, 'lease 3'::text, '3'::jsonb, ''::text)", 'f');
answers($app, lease("'lease 4'", "'1 h'", "''", 'NULL'), 'claimed|?');
answers($app, "SELECT idem_release('u'::text, 'lease 4'::text, TOKEN::int8, ''::text)", 't');
answers($app, "SELECT idem_release('u'::text, 'lease 4'::text, TOKEN::int8, ''::text)", 'f');
answers($app, "SELECT idem_complete('1'::jsonb)", 'ERROR:  55000');
answers($app, 'SELECT idem_result()', 'ERROR:  55000');
for my $level ('READ COMMITTED', 'REPEATABLE READ')
{
	my $own = lc($level =~ s/ /_/r);
	for my $end ("idem_complete('1'::jsonb)", "idem_fail('1'::jsonb)")
	{
		$app->ask("BEGIN ISOLATION LEVEL $level");
		answers($app, claim("'u'", "'$own $end'" =~ s/(?<!^)'(?!$)//gr), 't');
		answers($app, "SELECT $end, idem_outcome(), idem_result()", 't|claimed|1');
		$app->ask('COMMIT');
	}
	$app->ask("BEGIN ISOLATION LEVEL $level");
	answers($app, claim("'u'", "'$own $_'"), 't') for 1, 2;
	answers($app, settle('complete', "$own 1", 'x', 'NULL'), 't');
	answers($app, settle('fail', "$own 2", 'x', 'NULL'), 't');
	$app->ask('ROLLBACK');
	$app->ask("BEGIN ISOLATION LEVEL $level");
	answers($app, claim("'u'", "'$own $_'"), 't') for 1, 2;
	answers($app, "SELECT idem_complete('1'::jsonb)", 'ERROR:  55000');
	$app->ask('ROLLBACK');
}
$app->ask('CREATE TEMPORARY TABLE sink (a varchar, b int, r text) PARTITION BY LIST (r)');
$app->ask("CREATE TEMPORARY TABLE sink_$_ PARTITION OF sink FOR VALUES IN ('$_')") for 1, 2;
$app->ask(q{CREATE TRIGGER t BEFORE INSERT OR DELETE ON sink FOR EACH ROW EXECUTE FUNCTION idem_skip_duplicates('sink', 'a', 'b')});
answers($app, "INSERT INTO sink VALUES ('u', 1, '1'), ('u', 1, '2') RETURNING a", 'u', 'a sink');
answers($app, "UPDATE sink SET r = '2' RETURNING r", 'ERROR:  0A000', 'a row that moves');
answers($app, "DELETE FROM sink RETURNING r", '1', 'a row that is deleted');
answers($app, "INSERT INTO sink VALUES ($_)", 'ERROR:  ID400') for "NULL, 1, '1'", "'', 1, '1'", "'u', NULL, '1'";
$app->ask(q{CREATE TEMPORARY TABLE other (a timestamptz, b int GENERATED ALWAYS AS (1) STORED, c text)});
for (['42804', 'c', 'a'], ['0A000', 'b', 'c'], ['42703', 'c', 'd'], ['39P01', 'a'])
{
	my ($sqlstate, @columns) = @$_;
	my $columns = join ', ', map { "'$_'" } 'sink', @columns;
	$app->ask("CREATE TRIGGER t BEFORE INSERT ON other FOR EACH ROW EXECUTE FUNCTION idem_skip_duplicates($columns)");
	answers($app, "INSERT INTO other (a, c) VALUES (now(), 'c')", "ERROR:  $sqlstate", "a sink with $columns");
	$app->ask('DROP TRIGGER t ON other');
}
$app->ask('BEGIN READ ONLY');
answers($app, claim("'u'", "'read only'"), 'ERROR:  25006');
$app->ask('ROLLBACK');
answers($app, "SELECT idem_status('u'::text, 'lease'::text, ''::text), idem_result('u'::text, 'lease'::text, ''::text)", 'completed|"done"');
answers($app, "SELECT state, fingerprint, result, progress FROM idem_lookup('u'::text, 'lease'::text, ''::text)", 'completed|\x01|"done"|2');
answers($app, q{SELECT idem_fingerprint('{"a": [1, {"b": 2.0}]}'::jsonb) = idem_fingerprint('{"a": [1.0, {"b": 2}]}'::jsonb)}, 't');
as('owner', 'twins', q{CREATE FUNCTION work(a int, t text DEFAULT 'x') RETURNS text LANGUAGE sql AS 'SELECT a || t'});
sub call { return "SELECT idem_call('u'::text, '$_[0]'::text, 'work(int, text)'::text, '$_[1]'::jsonb, ''::text, NULL::interval)" }
answers($app, call('call', '{"a": 1}'), '"1x"') for 1, 2;
answers($app, call('call', '{"a": 2}'), 'ERROR:  ID422');
answers($app, call('call', '{"b": 2}'), 'ERROR:  ID400');
answers($app, call('call 2', '{"a": 1, "t": "y"}'), '"1y"');
$app->ask("SET idem.wait = 'x'");
answers($app, claim("'u'", "'wait'"), 'ERROR:  22023');
$app->ask("SET idem.wait = '20ms'");
my $in_the_way = Client->new($node, 'twins');
$in_the_way->ask('SET SESSION AUTHORIZATION app');
$in_the_way->ask('BEGIN');
answers($in_the_way, lease("'lease 5'", "'1 h'", "''", 'NULL'), 'claimed|?');
answers($app, lease("'lease 5'", "'1 h'", "''", 'NULL'), 'in_progress|');
answers($app, "SELECT idem_heal('u'::text, 'lease 5'::text, NULL::jsonb, ''::text)", 'ERROR:  ID503');
$in_the_way->ask('COMMIT');
$in_the_way->ask('BEGIN');
answers($in_the_way, "SELECT idem_release('u'::text, 'lease 5'::text, TOKEN::int8, ''::text)", 't');
answers($app, 'SELECT outcome FROM ' . sprintf($argument{try}, "'lease 5'", "''", "'1 h'", 'NULL'), 'in_progress', 'a row that is being deleted');
$in_the_way->ask('COMMIT');
as('owner', 'twins', q{UPDATE idem_scopes SET ttl = '1 h', key_time = 'uuidv7', lapsed = 'unknown', expired = 'reclaim' WHERE scope = 'short'});
answers($app, lease("'no uuid'", "'1 s'", "'short'", 'NULL'), 'ERROR:  ID400');
answers($app, lease("'00000000-0000-7000-8000-000000000000'", "'1 s'", "'short'", 'NULL'), 'stale|');
answers($app, "SELECT idem_claim('u'::text, '00000000-0000-7000-8000-000000000000'::text, 'short'::text, NULL::bytea, NULL::interval)", 'ERROR:  ID412');

my $operator = Client->new($node, 'twins');
$operator->ask('SET SESSION AUTHORIZATION friend');
answers($operator, "SELECT idem_lapsed($_)", 'ERROR:  ID400') for "repeat('x', 256)::text, 1::int4", "NULL::text, (-1)::int4";
answers($operator, "SELECT count(*) FROM idem_lapsed($_)", '0') for "NULL::text, NULL::int4", "''::text, 5::int4";
answers($operator, "SELECT idem_forget('u'::text, 'many'::text, ''::text)", 't');
answers($operator, "SELECT idem_forget('u'::text, 'many'::text, ''::text)", 'f');
answers($operator, 'SELECT idem_cleanup(0::int4)', 'ERROR:  ID400');
answers($operator, 'SELECT idem_cleanup(10::int4)', '0');
answers($operator, 'SELECT rows_deleted FROM idem__cleanup_step(NULL::int4, NULL::timestamptz, NULL::timestamptz)', '0');
answers($operator, 'CALL idem_cleanup_all(NULL::int4)', '');
my $owner = Client->new($node, 'twins');
$owner->ask('SET SESSION AUTHORIZATION owner');
answers($owner, "SELECT idem_${_}('anon'::regrole, 'app'::text), idem_${_}('anon'::regrole, 'operator'::text)", '|') for qw(grant revoke);
answers($owner, "SELECT idem_grant('anon'::regrole, 'x'::text)", 'ERROR:  22023');
answers($owner, 'SELECT idem_distribute(NULL::regclass)', 'ERROR:  0A000');

# The functions that sql/idem-citus.sql puts in the place of others
as('owner', 'twins', 'CREATE TABLE idem__token_source (token int8); INSERT INTO idem__token_source VALUES (1)');
as('owner', 'twins', "CREATE TABLE $_ (user_id text, shard_id int8, block int8, group_id int4, begun_at int8, PRIMARY KEY (user_id, shard_id))")
  for qw(idem_token_blocks idem_token_blocks_7);
as($superuser, 'twins', q{
SET allow_system_table_mods = on;
CREATE TABLE pg_catalog.pg_dist_local_group AS SELECT 1 AS groupid;
GRANT SELECT ON pg_catalog.pg_dist_local_group TO PUBLIC;
CREATE FUNCTION pg_catalog.get_shard_id_for_distribution_column(regclass, text) RETURNS int8 LANGUAGE sql AS 'SELECT 7::int8';
CREATE FUNCTION pg_catalog.lock_shard_metadata(int4, int8[]) RETURNS void LANGUAGE sql AS 'SELECT'});
as($superuser, 'twins', q{SELECT idem__citus_replace_functions(), idem__citus_admit('{1}'::int4[])});
answers($app, "SELECT idem_claim('u'::text, 'at once'::text, ''::text, NULL::bytea, NULL::interval)", 't');
answers($app, "SELECT idem_claim('u'::text, 'at once'::text, ''::text, NULL::bytea, NULL::interval)", 'f');
answers($app, lease("'replaced'", "'1 h'", "''", 'NULL'), 'claimed|?');
answers($app, "SELECT idem_fence('u'::text, 'replaced'::text, TOKEN::int8, ''::text) IS NULL", 'f');
answers($app, "SELECT idem_status('u'::text, 'replaced'::text, ''::text)", 'in_progress');
answers($operator, 'SELECT idem_cleanup(10::int4)', 'ERROR:  42883', 'cleaning calls Citus');
as('owner', 'twins', 'UPDATE idem_token_blocks_7 SET group_id = 2');
answers($app, lease("'replaced 2'", "'1 h'", "''", 'NULL'), 'claimed|?');
as($superuser, 'twins', 'SET allow_system_table_mods = on; UPDATE pg_catalog.pg_dist_local_group SET groupid = 2');
answers($app, "SELECT idem_status('u'::text, 'replaced'::text, ''::text)", 'ERROR:  55000', 'a node that is not admitted');
$_->quit for $app, $in_the_way, $operator, $owner;
is(join(' ', PostgreSQL::Test::Utils::slurp_file($node->logfile) =~ /WARNING:  (hijacked by .*)/g), '', 'twins: none was called');

# ----- rows that a view leaves out -----

# A cheap function in WHERE must not see them.
new_database('watched', 'owner');
install('owner', 'watched', 'public');
as($superuser, 'watched', 'GRANT pg_monitor TO stranger');
as('owner', 'watched', q{
SELECT idem_claim('seen', 'settled');
SELECT outcome FROM idem_lease('seen', 'open', lease => '1 hour');
SELECT outcome FROM idem_lease('seen', 'lapsed', lease => '1 hour');
UPDATE idem_claims SET lease_until = '2000-01-01' WHERE request_id = 'lapsed'});
for my $view (split /\n/, as('owner', 'watched', "SELECT relname FROM pg_class WHERE relkind = 'v' AND relname LIKE 'idem%'"))
{
	my $of_claims = $view =~ /unsettled|holders/;
	# The planner moves a function of plain columns to the scan, and calls the cheapest first.
	my $columns = $of_claims ? 'v.user_id, v.request_id' : "v::text, ''";
	my (undef, $out, $seen) = $node->psql('watched', qq{
CREATE FUNCTION pg_temp.saw(a text, b text) RETURNS bool LANGUAGE plpgsql COST 0.0001 AS \$\$ BEGIN RAISE NOTICE 'saw %,%', a, b; RETURN true; END \$\$;
SET enable_indexscan = off;
SET enable_bitmapscan = off;
SELECT concat_ws(',', $columns) FROM $view AS v WHERE pg_temp.saw($columns)}, extra_params => [ '-U', 'stranger' ]);

	like($out, qr/seen,open/, "$view: shows what it is for") if $of_claims;
	unlike($seen, $view eq 'idem_holders' ? qr/seen,(settled|lapsed)/ : qr/seen,settled/, "$view: a function in WHERE sees no settled request");
	is(scalar(() = $seen =~ /NOTICE:  saw/g), scalar(split /\n/, $out), "$view: it sees the rows that the view shows");
}

# ----- temporary objects -----

new_database('temporary', 'owner');
my $blocker = Client->new($node, 'temporary');
$blocker->ask('SET SESSION AUTHORIZATION stranger');
$blocker->ask('CREATE TEMPORARY TABLE idem_claims ()');
$blocker->ask(q{CREATE FUNCTION pg_temp.idem_try_claim() RETURNS int LANGUAGE sql AS 'SELECT 1'});
is((install('owner', 'temporary', 'public'))[0], 0, 'a temporary table and function of a stranger do not block it');
$blocker->quit;

# ----- a look-alike -----

new_database('look_alike', 'owner');
as($superuser, 'look_alike', 'CREATE SCHEMA theirs AUTHORIZATION stranger');
as('stranger', 'look_alike', q{CREATE TABLE theirs.idem_claims (); CREATE FUNCTION theirs.idem_try_claim() RETURNS int LANGUAGE sql AS 'SELECT 1'});
like((install('owner', 'look_alike', 'public'))[1],
	qr/already, in schema theirs\n.*HINT:  .*only looks like idem, have its table idem_claims or its function idem_try_claim dropped/s,
	'a look-alike in the schema of a stranger: named, with what to do');

# ----- default privileges -----

for my $how ('psql', 'extension')
{
	for my $where ('', 'IN SCHEMA public', 'IN SCHEMA idem')
	{
		my $schema = $where eq 'IN SCHEMA idem' ? 'idem' : 'public';
		my $database = new_database(lc("defaults_$how" . ($where =~ s{\W+}{_}gr)), 'owner');

		as('owner', $database, 'CREATE SCHEMA idem; GRANT USAGE ON SCHEMA idem TO anon;' . join ';',
			map { "ALTER DEFAULT PRIVILEGES $where GRANT ALL ON $_ TO anon, PUBLIC" } qw(TABLES ROUTINES SEQUENCES TYPES));
		if ($how eq 'psql') { install('owner', $database, $schema) }
		else { as('owner', $database, "CREATE EXTENSION idem_portable SCHEMA $schema") }
		is( as('owner', $database, q{
SELECT count(*) || ' objects, open: ' || coalesce(string_agg(o.name, ' ') FILTER (WHERE EXISTS (
	SELECT FROM aclexplode(o.acl) AS a WHERE a.grantee NOT IN (o.owner, 'pg_monitor'::regrole))), 'none')
FROM (SELECT proname, proowner, coalesce(proacl, acldefault('f', proowner)) FROM pg_proc
	UNION ALL SELECT relname, relowner, relacl FROM pg_class WHERE relkind IN ('r', 'v', 'S')
	UNION ALL SELECT typname, typowner, coalesce(typacl, acldefault('T', typowner)) FROM pg_type WHERE typtype IN ('c', 'e')) AS o (name, owner, acl)
WHERE o.name LIKE 'idem%'}) =~ s/^\d\d+ //r,
			'objects, open: none', "default privileges $where: none is left ($how)");
	}
}

$node->stop;
done_testing();
