# Rights around sql/idem-citus.sql: what may be in the schema when it is loaded, and who may do
# what after idem_distribute(). Functions that do nothing stand for those of Citus, so this
# looks at the coordinator; test/citus looks at all nodes.

use strict;
use warnings;

use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use IPC::Run;

my $node = PostgreSQL::Test::Cluster->new('main');
$node->init;
$node->start;
my $superuser = $node->safe_psql('postgres', 'SELECT current_user');
$node->safe_psql('postgres', "CREATE ROLE $_ LOGIN") for qw(owner app operator helpdesk anon attacker friend), '"Odd one"';

sub as
{
	my ($role, $database, $sql) = @_;
	return $node->safe_psql($database, $sql, extra_params => [ '-U', $role ]);
}

# The error of a statement, '' if there is none
sub error_of
{
	my ($role, $database, $sql) = @_;
	return ($node->psql($database, $sql, extra_params => [ '-U', $role ]))[2];
}

# Returns exit code and errors
sub load_file
{
	my ($role, $database, $file) = @_;
	my $err = '';

	IPC::Run::run(
		[ 'psql', '-XAtq', '-h', $node->host, '-p', $node->port, '-U', $role, '-v', 'schema=requests', '-f', $file, $database ],
		'<', \undef, '>', \my $out, '2>', \$err);
	return ($? >> 8, $err);
}

# A database with idem, in which nothing is distributed yet
sub new_database
{
	my ($name) = @_;

	$node->safe_psql('postgres', "CREATE DATABASE $name OWNER owner");
	as('owner', $name, 'CREATE SCHEMA requests');
	is((load_file('owner', $name, 'sql/idem-portable.sql'))[0], 0, "$name: installed");
	return $name;
}

my $stand_ins = q{
SET allow_system_table_mods = on;
INSERT INTO pg_extension (oid, extname, extowner, extnamespace, extrelocatable, extversion) VALUES (987654, 'citus', 10, 11, false, '0');
CREATE TABLE pg_catalog.pg_dist_node (groupid int);
INSERT INTO pg_catalog.pg_dist_node VALUES (0);
CREATE TABLE pg_catalog.pg_dist_partition (logicalrelid regclass);
GRANT SELECT ON pg_catalog.pg_dist_node, pg_catalog.pg_dist_partition TO PUBLIC;
CREATE FUNCTION pg_catalog.citus_is_coordinator() RETURNS bool LANGUAGE sql AS 'SELECT true';
CREATE FUNCTION pg_catalog.create_distributed_table(regclass, text, colocate_with text) RETURNS void LANGUAGE sql SECURITY DEFINER
	AS 'INSERT INTO pg_dist_partition VALUES ($1)';
CREATE FUNCTION pg_catalog.create_reference_table(regclass) RETURNS void LANGUAGE sql AS 'SELECT';
CREATE FUNCTION pg_catalog.truncate_local_data_after_distributing_table(regclass) RETURNS void LANGUAGE sql AS 'SELECT';
CREATE FUNCTION pg_catalog.citus_add_local_table_to_metadata(regclass) RETURNS void LANGUAGE sql AS 'SELECT';
CREATE FUNCTION pg_catalog.create_distributed_function(regprocedure, text, text, bool) RETURNS void LANGUAGE sql AS 'SELECT';
CREATE FUNCTION pg_catalog.replicate_reference_tables(text) RETURNS void LANGUAGE sql AS 'SELECT';
CREATE FUNCTION pg_catalog.run_command_on_all_nodes(command text, OUT nodeid int, OUT success bool, OUT result text)
RETURNS SETOF record LANGUAGE plpgsql AS $$
BEGIN
	nodeid := 1;
	success := true;
	EXECUTE command INTO result;
	RETURN NEXT;
END $$};
# Settings of a library that is not loaded are for superusers.
$node->safe_psql('postgres', 'GRANT SET ON PARAMETER citus.enable_ddl_propagation, citus.allow_nested_distributed_execution TO owner');

# ----- what others have put into the schema -----

my $database = new_database('planted');
as('owner', $database, 'GRANT CREATE, USAGE ON SCHEMA requests TO friend; CREATE TABLE accounts (user_id text PRIMARY KEY); CREATE TABLE loot (who text)');
$node->safe_psql($database, 'GRANT friend TO attacker');
as('attacker', $database, q{
CREATE FUNCTION requests.idem_distribute(accounts text) RETURNS void LANGUAGE sql
AS 'INSERT INTO public.loot VALUES (current_user)'});
for my $role ('owner', $superuser)
{
	my ($status, $err) = load_file($role, $database, 'sql/idem-citus.sql');
	isnt($status, 0, "$role cannot load it where others may create objects");
	like($err, qr/others may create objects in schema requests: attacker, friend\n.*HINT:  Revoke CREATE on the schema from them/s, 'they are named');
}
as('owner', $database, 'REVOKE CREATE ON SCHEMA requests FROM friend');
for my $role ('owner', $superuser)
{
	like((load_file($role, $database, 'sql/idem-citus.sql'))[1],
		qr/others own objects in schema requests: function requests.idem_distribute\(text\)\n.*HINT:  Have them dropped/s,
		"$role cannot load it where they have left a function of such a name");
}
as('attacker', $database, 'DROP FUNCTION requests.idem_distribute');
is((load_file('owner', $database, 'sql/idem-citus.sql'))[0], 0, 'the HINTs help');
# Such a role can come later; the call in doc/citus.md finds our function all the same.
as('owner', $database, 'GRANT CREATE ON SCHEMA requests TO friend');
as('attacker', $database, "CREATE FUNCTION requests.idem_distribute($_) RETURNS void LANGUAGE sql AS 'INSERT INTO public.loot VALUES (current_user)'")
  for '', 'accounts text';
my $documented = PostgreSQL::Test::Utils::slurp_file('doc/citus.md');
my @calls = $documented =~ /SELECT (idem\.idem_distribute\([^`;]*\))[`;]/g;
cmp_ok(@calls, '>', 2, 'doc/citus.md calls it');
for my $call (@calls)
{
	like(error_of('owner', $database, 'SELECT ' . $call =~ s/idem\./requests./r), qr/extension "citus" is not installed/, "$call: calls ours");
}
is(as('owner', $database, 'SELECT count(*) FROM loot'), '0', 'nobody else ran as the owner');

# ----- rights before and after -----

# Everybody's rights on the objects of idem that stay, with the grantors left out
my $rights = q{
SELECT string_agg(concat_ws(' ', r.object, r.grantee, r.privilege, r.is_grantable), E'\n' ORDER BY r.object, r.grantee, r.privilege, r.is_grantable)
FROM (SELECT o.name, CASE a.grantee WHEN 0 THEN 'PUBLIC' ELSE a.grantee::regrole::text END, a.privilege_type, a.is_grantable
		FROM (SELECT proname, coalesce(proacl, acldefault('f', proowner)) FROM pg_proc WHERE proname !~ '^idem__'
			UNION ALL SELECT relname, coalesce(relacl, acldefault(CASE relkind WHEN 'S' THEN 's' ELSE 'r' END::"char", relowner))
				FROM pg_class WHERE relkind IN ('r', 'v', 'S') AND relname <> 'idem_token_source'
			UNION ALL SELECT concat(attrelid::regclass, '.', attname), attacl FROM pg_attribute WHERE attrelid::regclass::text ~ '^requests.idem'
			UNION ALL SELECT typname, typacl FROM pg_type) AS o (name, acl), aclexplode(o.acl) AS a
		WHERE o.name ~ '^(requests\.)?idem_') AS r (object, grantee, privilege, is_grantable)};

for my $by ('owner', $superuser)
{
	$database = new_database("rights_$by");
	$node->safe_psql($database, $stand_ins);
	is((load_file('owner', $database, 'sql/idem-citus.sql'))[0], 0, 'the file for Citus is loaded');
	as('owner', $database, q{
SELECT requests.idem_grant('app', 'app'), requests.idem_grant('operator', 'operator'), requests.idem_grant('helpdesk', 'operator');
SELECT requests.idem_grant('"Odd one"', 'app');
GRANT EXECUTE ON FUNCTION requests.idem_forget(text, text, text) TO helpdesk WITH GRANT OPTION;
GRANT SELECT (request_id) ON requests.idem_claims TO helpdesk WITH GRANT OPTION;
GRANT SELECT ON requests.idem_claims TO friend WITH GRANT OPTION;
GRANT EXECUTE ON FUNCTION requests.idem_fingerprint TO PUBLIC});
	as('helpdesk', $database, q{
GRANT EXECUTE ON FUNCTION requests.idem_forget(text, text, text) TO friend;
GRANT SELECT (request_id) ON requests.idem_claims TO app});
	as($by, $database, "ALTER DEFAULT PRIVILEGES GRANT ALL ON $_ TO anon, operator, app, helpdesk, \"Odd one\", PUBLIC") for qw(TABLES ROUTINES SEQUENCES);
	my $before = as('owner', $database, $rights);

	as($by, $database, 'SELECT requests.idem_distribute(NULL::regclass)');
	is(as('owner', $database, $rights), $before, "distributed by $by: all rights are the same");
	is(as('operator', $database, 'SELECT count(scope) FROM requests.idem_claims'), '0', 'the operator reads the claims');
	as($by, $database, 'SELECT requests.idem_distribute(NULL::regclass)');
	is(as('owner', $database, $rights), $before, 'and again after a second call, as for a new node');

	is( as('owner', $database, q{
SELECT string_agg(DISTINCT a.grantee::regrole::text, ' ') FROM pg_class AS c, aclexplode(coalesce(c.relacl, acldefault('r', c.relowner))) AS a
WHERE c.oid = 'requests.idem_token_source'::regclass}),
		'owner', 'the table from which tokens are drawn is for the owner alone');
	is( as('owner', $database, q{
SELECT count(*) FROM pg_proc WHERE proname LIKE 'idem\_\_%' AND (has_function_privilege('anon', oid, 'EXECUTE') OR has_function_privilege('app', oid, 'EXECUTE'))}),
		'0', 'internal functions, too');
	as('owner', $database, 'GRANT USAGE ON SCHEMA requests TO anon');
	like(error_of('anon', $database, $_), qr/permission denied for table idem_token_source/, "$_: refused")
	  for 'TABLE requests.idem_token_source', 'INSERT INTO requests.idem_token_source VALUES (777)', 'DELETE FROM requests.idem_token_source',
	  'TRUNCATE requests.idem_token_source', 'BEGIN; LOCK TABLE requests.idem_token_source IN ACCESS SHARE MODE';
	like(as('app', $database, "SELECT outcome, token FROM requests.idem_try_claim('u', 'r', lease => '1 min')"), qr/^claimed\|\d+$/, 'leases are claimed');
}

# ----- no lease without a token -----

for my $wrong ([ 0, 'DELETE FROM requests.idem_token_source' ], [ 2, 'INSERT INTO requests.idem_token_source VALUES (777), (778)' ])
{
	my ($rows, $change) = @$wrong;

	as('owner', $database, $change);
	like(error_of('app', $database, "SELECT FROM requests.idem_try_claim('u', 'none', lease => '1 min')"),
		qr/ERROR:  table "idem_token_source" has $rows rows, not one\nHINT:  Leases draw their tokens from its only row/, "$rows rows: a lease is refused");
	is(as('owner', $database, "SELECT count(*) FROM requests.idem_claims WHERE request_id = 'none'"), '0', "$rows rows: and not claimed");
	is(as('app', $database, "SELECT requests.idem_claim('u', 'with $rows rows')"), 't', "$rows rows: claims without a lease need none");
}
as('owner', $database, 'DELETE FROM requests.idem_token_source; INSERT INTO requests.idem_token_source DEFAULT VALUES');
like(as('app', $database, "SELECT outcome, token FROM requests.idem_try_claim('u', 'none', lease => '1 min')"), qr/^claimed\|\d+$/, 'the HINT helps');

$node->stop;
done_testing();
