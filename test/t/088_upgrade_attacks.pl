# Attacks on the installation and the upgrade of the portable edition by its file: no role gets more
# rights than it was granted, and nothing that another role has made runs.

use strict;
use warnings;

use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use IPC::Run;

use Client;

my $node = PostgreSQL::Test::Cluster->new('main');
$node->init;
$node->start;
my $superuser = $node->safe_psql('postgres', 'SELECT current_user');
$node->safe_psql('postgres', "CREATE ROLE $_ LOGIN") for qw(owner attacker app);

my $plain = slurp_file('sql/idem-portable-plain.sql');
my ($version) = $plain =~ /'(\d+\.\d+\.\d+\+\d+\.\d+)'::text/ or die 'no version';
append_to_file($node->basedir . '/now.sql', $plain);
# A later version, with other internal objects
append_to_file($node->basedir . '/later.sql', $plain =~ s/\Q$version\E/1.1.0+1.1/gr);
my ($now, $later) = map { $node->basedir . "/$_.sql" } qw(now later);

sub as
{
	my ($role, $database, $sql) = @_;
	return $node->safe_psql($database, $sql, extra_params => [ '-U', $role ]);
}

sub start_file
{
	my ($file, $role, $database, $err, $path) = @_;
	return IPC::Run::start(
		[
			'psql', '-XAtq', '-h', $node->host, '-p', $node->port, '-U', $role, (map { ('-c', "SET search_path = $_") } $path // 'requests'),
			'-f', $file, $database
		],
		'<', \undef, '>', '/dev/null', '2>', $err, IPC::Run::timeout($PostgreSQL::Test::Utils::timeout_default));
}

sub run_file
{
	my ($file, $role, $database, $path) = @_;
	start_file($file, $role, $database, \my $err, $path)->finish;
	return $err =~ s/^psql:\S+ //gmr;
}

sub new_database
{
	my ($name) = @_;
	$node->safe_psql('postgres', "CREATE DATABASE $name OWNER owner");
	as('owner', $name, 'CREATE SCHEMA requests; GRANT USAGE ON SCHEMA requests TO PUBLIC');
	is(run_file($now, 'owner', $name), '', "$name: installed");
	return $name;
}

sub superusers
{
	return $node->safe_psql('postgres', "SELECT string_agg(rolname, ' ') FROM pg_roles WHERE rolsuper AND rolname <> '$superuser'");
}

# Makes its owner superuser where a superuser's session runs it
sub evil
{
	my ($role, $body) = @_;
	return "LANGUAGE plpgsql AS \$\$ BEGIN RESET ROLE; IF (SELECT rolsuper FROM pg_roles WHERE rolname = current_user) THEN ALTER ROLE $role SUPERUSER; END IF; $body END \$\$";
}

# ----- what the owner of idem has put into its tables runs for nobody -----

# Each makes code of that role run where the tables are read or written.
my %trap = (
	policy => sub {
		my ($schema) = @_;
		return "ALTER TABLE $schema.idem_settings ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY;
			CREATE POLICY p ON $schema.idem_settings USING ($schema.evil('policy') IS NOT NULL);";
	},
	cast => sub {
		my ($schema) = @_;
		return "CREATE TYPE $schema.mine AS (a text);
			CREATE FUNCTION $schema.evil(x $schema.mine) RETURNS interval LANGUAGE sql AS \$\$ SELECT $schema.evil('cast') \$\$;
			CREATE CAST ($schema.mine AS interval) WITH FUNCTION $schema.evil($schema.mine) AS IMPLICIT;
			DROP VIEW IF EXISTS $schema.none; ALTER TABLE $schema.idem_settings DROP COLUMN ttl CASCADE;
			ALTER TABLE $schema.idem_settings ADD COLUMN ttl $schema.mine;";
	},
	trigger => sub {
		my ($schema) = @_;
		return "CREATE FUNCTION $schema.fire() RETURNS trigger LANGUAGE plpgsql AS \$\$ BEGIN PERFORM $schema.evil('trigger'); RETURN NEW; END \$\$;
			CREATE TRIGGER fire BEFORE INSERT OR UPDATE ON $schema.idem__policies FOR EACH ROW EXECUTE FUNCTION $schema.fire();";
	},
	check => sub {
		my ($schema) = @_;
		return "ALTER TABLE $schema.idem__policies ADD CHECK ($schema.evil('check') IS NOT NULL) NOT VALID;";
	});

sub set_trap
{
	my ($name, $role, $database, $schema) = @_;
	my ($shapes) = $version =~ /(\+\d+)/;
	# An earlier version, whose internal objects are the same ones: they are replaced, and not dropped
	my $earlier = $name =~ /^(?:trigger|check)$/ ? "1.0.0$shapes.1" : '0.9';

	as($role, $database, qq{
		CREATE FUNCTION $schema.evil(x text) RETURNS interval } . evil($role, "RAISE WARNING 'evil ran: %', x; RETURN interval '1 day';") . qq{;
		CREATE OR REPLACE FUNCTION $schema.idem_version() RETURNS text LANGUAGE sql IMMUTABLE PARALLEL SAFE AS \$\$ SELECT '$earlier'::text \$\$;
		UPDATE $schema.idem__policies SET ttls = ARRAY[interval '1 s'];
		} . $trap{$name}->($schema));
	return;
}

for my $name (sort keys %trap)
{
	for my $how ('', '; SET SESSION AUTHORIZATION owner')
	{
		my $database = new_database('trap_' . $name . ($how ? '_as_owner' : ''));

		set_trap($name, 'owner', $database, 'requests');
		my $err = run_file($now, $superuser, $database, "requests$how");
		like($err, qr/^NOTICE:  idem was upgraded from/m, "$database: upgraded by a superuser");
		unlike($err, qr/evil ran/, "$database: nothing of its owner ran");
		is(superusers(), '', "$database: nobody became superuser");
	}
}

# Looks like idem, and was made by a role that may create objects
for my $forged ([ 'named', qq{"$superuser"}, '"$user", public' ], [ 'public', 'public', 'public' ])
{
	my ($name, $schema, $path) = @$forged;
	my $database = "forged_$name";

	$node->safe_psql('postgres', "CREATE DATABASE $database");
	$node->safe_psql($database, 'GRANT CREATE ON DATABASE ' . $database . ' TO attacker; GRANT CREATE ON SCHEMA public TO attacker');
	as('attacker', $database, "CREATE SCHEMA $schema") unless $schema eq 'public';
	run_file($now, 'attacker', $database, $schema);
	set_trap('policy', 'attacker', $database, $schema);
	my $err = run_file($now, $superuser, $database, $path);
	like($err, qr/^ERROR:  (?:idem in )?schema \S+ belongs to role attacker, /m, "$database: refused");
	unlike($err, qr/evil ran/, "$database: nothing of the attacker ran");
	is(superusers(), '', "$database: he is no superuser");
}

# ----- a role that was locked out stays so -----

new_database('locked_out');
as('owner', 'locked_out', q{SELECT requests.idem_grant('app', 'app'); REVOKE USAGE ON SCHEMA requests FROM app, PUBLIC});
run_file($later, 'owner', 'locked_out');
is($node->safe_psql('locked_out', q{SELECT has_schema_privilege('app', 'requests', 'USAGE')}), 'f', 'an upgrade does not give USAGE back');

# ----- a schema that was not named -----

$node->safe_psql('postgres', 'CREATE DATABASE handed OWNER owner');
as('owner', 'handed', 'GRANT CREATE ON DATABASE handed TO attacker');
as('attacker', 'handed', qq{CREATE SCHEMA "$superuser"});
my $refused = qr/ERROR:  schema $superuser belongs to role attacker, and idem would, too\nDETAIL: .*\nHINT:  If you mean that schema, name it: SET LOCAL search_path = $superuser\.\n/;
my (undef, undef, $err) = $node->psql('handed', $plain);
like($err, $refused, 'the search_path has "$user", and a stranger such a schema: refused');
like(run_file($now, $superuser, 'handed', '"$user", public'), $refused, 'also if it was set by the session');
as('owner', 'handed', qq{ALTER DATABASE handed SET search_path = "$superuser"});
(undef, undef, $err) = $node->psql('handed', $plain);
like($err, $refused, 'a search_path of the database: refused');
is(as('owner', 'handed', q{SELECT count(*) FROM pg_class WHERE relname LIKE 'idem\_%'}), '0', 'nothing is installed');
(undef, undef, $err) = $node->psql('handed', qq{CREATE EXTENSION idem_portable SCHEMA "$superuser"; DROP EXTENSION idem_portable});
like($err, qr/WARNING:  idem will belong to role attacker, the owner of schema $superuser\nHINT: /, 'an extension: a warning');
is(run_file($now, $superuser, 'handed', qq{"$superuser"}), '', 'one that was named is taken');

# ----- what the owner of idem has put into it, when a superuser upgrades -----

new_database('changed');
as('owner', 'changed', "SELECT requests.idem_grant('app', 'app'); CREATE SCHEMA own");
as('owner', 'changed', $_) for
  'CREATE OR REPLACE FUNCTION requests.idem_grant(role regrole, privileges text) RETURNS void ' . evil('owner', ''),
  'CREATE OR REPLACE FUNCTION requests.idem__change_rights(role regrole, privileges text, command text) RETURNS void ' . evil('owner', ''),
  "CREATE OR REPLACE FUNCTION requests.idem_version() RETURNS text " . evil('owner', "RETURN '$version';"),
  'CREATE FUNCTION requests.evil() RETURNS trigger ' . evil('owner', 'RETURN NEW;'),
  'CREATE FUNCTION requests.evil(a name, b text) RETURNS bool ' . evil('owner', 'RETURN true;'),
  'CREATE FUNCTION requests.check_it() RETURNS bool ' . evil('owner', 'RETURN true;'),
  'CREATE OPERATOR requests.= (LEFTARG = name, RIGHTARG = text, FUNCTION = requests.evil)',
  'CREATE TRIGGER idem__evil BEFORE INSERT OR UPDATE OR DELETE ON requests.idem_settings FOR EACH ROW EXECUTE FUNCTION requests.evil()',
  'CREATE TRIGGER evil BEFORE INSERT OR UPDATE OR DELETE ON requests.idem_settings FOR EACH ROW EXECUTE FUNCTION requests.evil()',
  'ALTER TABLE requests.idem_settings ADD COLUMN x bool DEFAULT requests.check_it() CHECK (requests.check_it()); DELETE FROM requests.idem_settings';
like(run_file($later, $superuser, 'changed'), qr/^NOTICE:  idem was upgraded from \S+ to 1\.1\.0\+1\.1\n\z|^NOTICE:  idem was upgraded from an earlier version/, 'changed: a superuser upgrades it');
is(superusers(), '', 'and nobody became superuser');
is(as($superuser, 'changed', 'SHOW role'), 'none', 'who is who he was');

new_database('domain');
as('owner', 'domain', q{
ALTER TYPE requests.idem_outcome RENAME TO was;
CREATE DOMAIN requests.idem_outcome AS text});
like(run_file($later, $superuser, 'domain'), qr/ERROR:  others own objects in schema requests: type requests\.idem_outcome\n|ERROR: /, 'a domain in the place of a type: refused');
is(superusers(), '', 'nobody became superuser');

# ----- what a role with CREATE has put there -----

new_database('planted');
as('owner', 'planted', 'GRANT CREATE ON SCHEMA requests TO attacker');
like(run_file($later, 'owner', 'planted'), qr/ERROR:  others may create objects in schema requests: attacker\nDETAIL: .*\nHINT:  Revoke CREATE on the schema from them/, 'a role may create objects: refused');
my %plants = (
	'function requests.idem_version(integer)' => 'FUNCTION requests.idem_version(x int DEFAULT 0) RETURNS text LANGUAGE sql AS $$ SELECT \'9.9.9\'::text $$',
	'function requests.idem_grant(oid,text)' => 'FUNCTION requests.idem_grant(a oid, b text) RETURNS void ' . evil('attacker', ''),
	'function requests.idem__later()' => 'FUNCTION requests.idem__later() RETURNS void ' . evil('attacker', ''),
	'relation requests.idem__token_source' => 'TABLE requests.idem__token_source ()',
	'relation requests.idem_view' => 'VIEW requests.idem_view AS SELECT 1',
	'type requests.idem_state2' => "TYPE requests.idem_state2 AS ENUM ('a')");
for my $object (sort keys %plants)
{
	as('owner', 'planted', 'GRANT CREATE ON SCHEMA requests TO attacker');
	# Committed while the upgrade waits, by a transaction that was open when CREATE was revoked
	my $planter = Client->new($node, 'planted');
	$planter->ask($_) for 'SET SESSION AUTHORIZATION attacker', 'BEGIN', "CREATE $plants{$object}";
	my $claimer = Client->new($node, 'planted');
	$claimer->ask($_) for 'SET SESSION AUTHORIZATION owner', 'BEGIN', "SELECT requests.idem_claim('u', 'r')";
	as('owner', 'planted', 'REVOKE CREATE ON SCHEMA requests FROM attacker');
	my $upgrade = start_file($later, 'owner', 'planted', \my $complaint);
	$node->poll_query_until('planted', q{SELECT count(*) > 0 FROM pg_locks WHERE NOT granted AND mode = 'AccessExclusiveLock'}) or die 'it does not wait';
	$planter->ask('COMMIT');
	$claimer->ask('ROLLBACK');
	$upgrade->finish;
	like($complaint, qr/ERROR:  others own objects in schema requests: .*\Q$object\E.*\n.*\nHINT:  Have them dropped/, "planted meanwhile: $object: refused, and named");
	$_->quit for $planter, $claimer;
	as($superuser, 'planted', 'DROP ' . ($object =~ s/^relation/$plants{$object} =~ m{^(\w+)} && $1/er));
}
is(superusers(), '', 'nobody became superuser');
is(as('owner', 'planted', 'SELECT requests.idem_version()'), $version, 'nothing has changed');
# A version of somebody else is none: the upgrade must not believe that it has been made.
as($superuser, 'planted', q{DROP FUNCTION requests.idem_version(); CREATE FUNCTION requests.idem_version() RETURNS text LANGUAGE sql AS $$ SELECT '1.1.0+1.1'::text $$; ALTER FUNCTION requests.idem_version() OWNER TO attacker});
like(run_file($later, 'owner', 'planted'), qr/ERROR:  others own objects in schema requests: function requests\.idem_version\(\)\n/, 'the version of a stranger: refused, and named');
as($superuser, 'planted', 'DROP FUNCTION requests.idem_version()');

# ----- a role without any right -----

my $pin = Client->new($node, 'planted');
my $table = $node->safe_psql('planted', q{SELECT min(oid::int8) FROM pg_class WHERE relkind = 'r' AND relname LIKE 'idem\_\_%' AND relname <> 'idem__cleanup_batches'});
$pin->ask('SET SESSION AUTHORIZATION attacker');
is($pin->ask("CREATE TEMPORARY VIEW pin AS SELECT '$table'::regclass AS x"), '', 'a view that depends on an internal table needs no right');
like(run_file($later, 'owner', 'planted'), qr/ERROR:  objects depend on internal ones of idem\nDETAIL:  view pg_temp_\d+\.pin depends on table requests\.idem__\w+.*\nHINT:  Have them dropped/s, 'refused, and named');
$pin->quit;
$node->poll_query_until('planted', q{SELECT NOT EXISTS (SELECT FROM pg_class WHERE relname = 'pin')});
like(run_file($later, 'owner', 'planted'), qr/^NOTICE:  idem was upgraded from an earlier version to 1\.1\.0\+1\.1\n\z/, 'upgraded when it is gone');

$node->stop;
done_testing();
