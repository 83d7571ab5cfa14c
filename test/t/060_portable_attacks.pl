# The portable edition: nobody gets more than he was given. Each of these ways was open.

use strict;
use warnings;

use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use IPC::Run;

use Client;

my $portable = 'sql/idem-portable.sql';

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

# (exit code, what it complained of)
sub install
{
	my ($role, $database, $schema) = @_;
	my ($out, $err) = ('', '');

	IPC::Run::run(
		[ 'psql', '-XAtq', '-h', $node->host, '-p', $node->port, '-U', $role, '-v', "schema=$schema", '-f', $portable, $database ],
		'<', \undef, '>', \$out, '2>', \$err);
	return ($? >> 8, $err);
}

# Becomes superuser as soon as a superuser calls it, and counts its calls.
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

# What of idem in the database belongs to a superuser
sub of_superusers
{
	my ($database) = @_;

	return $node->safe_psql($database, q{
SELECT string_agg(o.name, ' ')
FROM (SELECT proname, proowner FROM pg_proc UNION ALL SELECT relname, relowner FROM pg_class
		UNION ALL SELECT typname, typowner FROM pg_type) AS o (name, owner) JOIN pg_roles AS r ON r.oid = o.owner
WHERE o.name LIKE 'idem\_%' AND r.rolsuper});
}

# ----- what others have put into the schema before -----

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

# ----- what the owner of the database puts there later -----

new_database('owned', 'owner');
is((install($superuser, 'owned', 'public'))[0], 0, 'a superuser installs where others are the owner');
is(of_superusers('owned'), '', 'nothing belongs to the superuser');
is(as($superuser, 'owned', 'SHOW role'), 'none', 'who is who he was');
as('owner', 'owned', evil('owner', 'public', 'a float8, b int4', 'float8')
	. q{CREATE OPERATOR public.* (LEFTARG = float8, RIGHTARG = int4, FUNCTION = public.evil);
SELECT idem_grant('app', 'app')});
is(as('app', 'owned', "SELECT idem_claim('u', 'r')"), 't', 'an operator that came later: a claim');
as($superuser, 'owned', "SELECT outcome FROM idem_try_claim('u', 'r', lease => '1 s')");
is(superusers(), '', 'an operator that came later: nobody became superuser');
is(as('owner', 'owned', 'SELECT is_called FROM calls'), 'f', 'an operator that came later: is never called');

# ----- dumped, and restored by a superuser -----

new_database('dumped_plain', 'owner');
new_database('dumped_extension', 'owner');
as('owner', $_, 'CREATE SCHEMA requests') for qw(dumped_plain dumped_extension);
is((install('owner', 'dumped_plain', 'requests'))[0], 0, 'installed by the owner of the schema');
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
is( as($superuser, 'new_dumped_extension', 'SELECT secret FROM requests.idem_secret') ne as($superuser, 'dumped_extension', 'SELECT secret FROM requests.idem_secret'),
	1, 'the secret of an extension is not dumped');
new_database('created', 'owner');
as($superuser, 'created', 'CREATE EXTENSION idem_portable');
is(of_superusers('created'), '', 'created by a superuser in the schema of another: nothing is his');

# ----- a claim that was not made -----

as('owner', 'owned', q{
CREATE TABLE payments (request text);
CREATE PROCEDURE pay(request text) LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp AS $$
BEGIN
	IF idem_status() = 'claimed' THEN
		INSERT INTO payments VALUES (request);
		PERFORM idem_complete(to_jsonb(request));
	END IF;
END $$;
GRANT EXECUTE ON PROCEDURE pay TO app;
});
for my $forged ('claimed ["u", "r", ""]', ('a' x 64) . 'claimed ["u", "r", ""]')
{
	my ($code, $out, $complaint) = $node->psql('owned', qq{
BEGIN; SET LOCAL idem_held.latest = '$forged'; CALL pay('r'); COMMIT;}, extra_params => [ '-U', 'app' ]);
	like($complaint, qr/no claim was made in this transaction/, 'a forged claim: refused in a definer\'s procedure');
}
is(as('owner', 'owned', 'SELECT count(*) FROM payments'), '0', 'nothing was paid for it');
my $client = Client->new($node, 'owned');
$client->ask('SET SESSION AUTHORIZATION app');
$client->ask("SET idem_held.$_ = 'x x'") for 'counts', 'latest', 'result', map { "b$_" } 0 .. 63;
$client->ask('BEGIN');
is($client->ask("SELECT idem_claim('u', 'pooled')"), 't', 'a pooled session with garbage in it: claims');
is($client->ask("SELECT idem_status(), idem_result() IS NULL, idem_complete('1')"), 'claimed|t|t', 'and settles');
$client->ask('COMMIT');
is($client->ask("SELECT idem_claim('u', 'pooled')"), 'f', 'and replays');
like(as('owner', 'owned', "SELECT has_table_privilege('app', 'idem_secret', 'SELECT')"), qr/^f$/, 'the secret is the owner\'s');

# ----- a lock of somebody else -----

my $stranger = Client->new($node, 'owned');
$stranger->ask('SET SESSION AUTHORIZATION stranger');
$stranger->ask(q{SELECT pg_advisory_lock(hashtextextended('["u", "held up", ""]', 0))});
is($client->ask("SELECT outcome FROM idem_try_claim('u', 'held up', wait => '0', lease => '1 min')"), 'claimed', "a stranger's lock holds no key up");
is($stranger->ask('INSERT INTO idem_lease_locks VALUES (1)'), 'ERROR:  42501', 'nor can he write the table');
is($stranger->ask('SELECT * FROM idem_lease_locks'), 'ERROR:  42501', 'or read it');
$stranger->quit;

# What the lock is for
my $holder = Client->new($node, 'owned');
for my $level ('READ COMMITTED', 'REPEATABLE READ', 'SERIALIZABLE')
{
	my $key = "'u', 'key $level'";
	my $lease = "idem_try_claim($key, wait => '0', lease => '1 min')";

	$holder->ask("BEGIN ISOLATION LEVEL $level");
	my $first = $holder->ask("SELECT token FROM $lease");
	is($client->ask("SELECT outcome FROM $lease"), 'in_progress', "$level: a lease that is not committed is met");
	is($holder->ask("SELECT idem_release($key, $first)"), 't', "$level: released");
	is($client->ask("SELECT outcome FROM $lease"), 'in_progress', "$level: and still met");
	my $second = $holder->ask("SELECT token FROM $lease");
	cmp_ok($second, '>', $first, "$level: leased again in the same transaction");
	$holder->ask("SELECT idem_release($key, $second)");
	$client->send("SELECT token FROM idem_try_claim($key, lease => '1 min')");
	$node->poll_query_until('owned', 'SELECT count(*) > 0 FROM pg_stat_activity WHERE cardinality(pg_blocking_pids(pid)) > 0')
	  or die 'nobody waits';
	$holder->ask('COMMIT');
	cmp_ok($client->answer, '>', $second, "$level: who waited has a greater token");

	$holder->ask("BEGIN ISOLATION LEVEL $level");
	$holder->ask('SAVEPOINT s');
	$holder->ask("SELECT token FROM idem_try_claim('u', 'undone $level', lease => '1 min')");
	$holder->ask('ROLLBACK TO s');
	is($client->ask("SELECT outcome FROM idem_try_claim('u', 'undone $level', wait => '0', lease => '1 min')"),
		'claimed', "$level: ROLLBACK TO gives the key back");
	$holder->ask('ROLLBACK');
}
# Leases of different keys are no conflict of serializable transactions: each reads its own
# row only.
$_->ask('BEGIN ISOLATION LEVEL SERIALIZABLE') for $holder, $client;
$holder->ask("SELECT FROM idem_try_claim('u', 'a', lease => '1 min')");
is($node->safe_psql('owned', q{SELECT count(*) FROM pg_locks WHERE mode = 'SIReadLock' AND relation::regclass::text LIKE 'idem_lease_locks%'}),
	'0', 'the lock is no read of a serializable transaction');
$_->ask('COMMIT') for $holder, $client;
is(as('owner', 'owned', 'SELECT count(*) FROM idem_lease_locks'), '0', 'no row of the locks is left');
$_->quit for $holder, $client;

# ----- trigger functions -----

as('owner', 'owned', 'GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA public TO attacker; GRANT CREATE ON SCHEMA public TO attacker');
as('attacker', 'owned', 'CREATE TABLE mine (scope text, key_time text, ttl interval, lease interval, lease_max interval, guarded_since timestamptz, only_row bool)');
for my $function (qw(idem_scopes_guard idem__replace_settings))
{
	as('attacker', 'owned', "CREATE TRIGGER t BEFORE INSERT ON mine FOR EACH ROW EXECUTE FUNCTION $function()");
	my (undef, undef, $complaint) = $node->psql('owned', "\\set VERBOSITY sqlstate\nINSERT INTO mine (scope, key_time) VALUES ('s', 'uuidv7')",
		extra_params => [ '-U', 'attacker' ]);
	like($complaint, qr/39P01/, "$function(): serves no other table");
	as('attacker', 'owned', 'DROP TRIGGER t ON mine');
}
is(as('owner', 'owned', 'SELECT count(*) FROM idem_settings'), '1', 'the settings are still there');

# ----- temporary objects -----

new_database('temporary', 'owner');
my $blocker = Client->new($node, 'temporary');
$blocker->ask('SET SESSION AUTHORIZATION stranger');
$blocker->ask('CREATE TEMPORARY TABLE idem_claims ()');
$blocker->ask(q{CREATE FUNCTION pg_temp.idem_try_claim() RETURNS int LANGUAGE sql AS 'SELECT 1'});
is((install('owner', 'temporary', 'public'))[0], 0, 'a temporary table and function of a stranger do not block it');
$blocker->quit;

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
