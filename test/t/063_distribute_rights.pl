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
CREATE TABLE pg_catalog.pg_dist_node (groupid int, noderole text, isactive bool);
INSERT INTO pg_catalog.pg_dist_node VALUES (0, 'primary', true);
CREATE TABLE pg_catalog.pg_dist_local_group (groupid int);
INSERT INTO pg_catalog.pg_dist_local_group VALUES (0);
CREATE TABLE pg_catalog.pg_dist_partition (logicalrelid regclass, partmethod "char", colocationid int, partkey text);
CREATE TABLE pg_catalog.pg_dist_shard (logicalrelid regclass, shardid bigint);
CREATE TABLE pg_catalog.pg_dist_placement (shardid bigint, groupid int);
CREATE TABLE pg_catalog.pg_dist_object (classid oid, objid oid, colocationid int);
CREATE TABLE pg_catalog.pg_dist_schema (schemaid oid);
CREATE SCHEMA citus;
CREATE TYPE citus.shard_transfer_mode AS ENUM ('block_writes');
GRANT USAGE ON SCHEMA citus TO PUBLIC;
GRANT SELECT ON pg_catalog.pg_dist_node, pg_catalog.pg_dist_local_group, pg_catalog.pg_dist_partition, pg_catalog.pg_dist_shard,
	pg_catalog.pg_dist_placement, pg_catalog.pg_dist_object, pg_catalog.pg_dist_schema TO PUBLIC;
CREATE FUNCTION pg_catalog.get_shard_id_for_distribution_column(regclass, text) RETURNS bigint LANGUAGE sql AS 'SELECT 1::bigint';
CREATE FUNCTION pg_catalog.relation_is_a_known_shard(regclass) RETURNS bool LANGUAGE sql AS 'SELECT $1::text ~ ''_[0-9]+$''';
CREATE FUNCTION pg_catalog.citus_is_coordinator() RETURNS bool LANGUAGE sql AS 'SELECT true';
CREATE FUNCTION pg_catalog.create_distributed_table(regclass, text, colocate_with text) RETURNS void LANGUAGE sql SECURITY DEFINER
	AS 'INSERT INTO pg_dist_partition VALUES ($1, ''h'', 1)';
CREATE FUNCTION pg_catalog.column_to_column_name(regclass, text) RETURNS text LANGUAGE sql AS 'SELECT $2';
CREATE FUNCTION pg_catalog.create_reference_table(regclass) RETURNS void LANGUAGE sql SECURITY DEFINER
	AS 'INSERT INTO pg_dist_partition VALUES ($1, ''n'', 2)';
CREATE FUNCTION pg_catalog.truncate_local_data_after_distributing_table(regclass) RETURNS void LANGUAGE sql AS 'SELECT';
CREATE FUNCTION pg_catalog.citus_add_local_table_to_metadata(regclass) RETURNS void LANGUAGE sql SECURITY DEFINER
	AS 'INSERT INTO pg_dist_partition VALUES ($1, ''n'', 0)';
CREATE FUNCTION pg_catalog.create_distributed_function(regprocedure, text, text, bool) RETURNS void LANGUAGE sql AS 'SELECT';
CREATE FUNCTION pg_catalog.replicate_reference_tables(citus.shard_transfer_mode) RETURNS void LANGUAGE sql AS 'SELECT';
REVOKE ALL ON FUNCTION pg_catalog.replicate_reference_tables FROM PUBLIC;
CREATE FUNCTION pg_catalog.run_command_on_all_nodes(command text, OUT nodeid int, OUT success bool, OUT result text)
RETURNS SETOF record LANGUAGE plpgsql AS $$
BEGIN
	nodeid := 1;
	success := true;
	EXECUTE command INTO result;
	RETURN NEXT;
END $$};
# Settings of a library that is not loaded are for superusers.
$node->safe_psql('postgres', 'GRANT SET ON PARAMETER citus.enable_ddl_propagation, citus.enable_manual_changes_to_shards, citus.allow_nested_distributed_execution, citus.override_table_visibility TO owner');

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
				FROM pg_class WHERE relkind IN ('r', 'v', 'S') AND relname !~ 'idem_(_token_source|token_blocks)'
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

	# A table of another collation than the claims, which a view reads
	as('owner', $database, 'CREATE TABLE accounts (user_id text PRIMARY KEY)');
	$node->safe_psql($database, q{INSERT INTO pg_dist_partition VALUES ('accounts', 'h', 1, 'user_id')});
	my $view = q{SELECT pg_get_viewdef(c.oid), c.relowner::regrole, c.reloptions, obj_description(c.oid),
		(SELECT string_agg(concat_ws(' ', a.attname, a.attcollation, col_description(c.oid, a.attnum)), ',') FROM pg_attribute AS a WHERE a.attrelid = c.oid)
		FROM pg_class AS c WHERE c.oid = 'requests.idem_unsettled'::regclass};
	my $view_before = as('owner', $database, $view);
	like($view_before, qr/FROM .*idem_claims.*security_barrier/s, 'a view reads the claims');
	my $sizes = q{SELECT count(*) FROM requests.idem_metrics WHERE name ~ '^idem_table_'};
	is(as('owner', $database, $sizes), '3', 'the metrics have the size of the claims');
	# Tokens that one server has drawn
	as('owner', $database, q{SELECT setval('requests.idem_token_seq', 98765432109876)});
	like(as($by, $database, q{SELECT requests.idem_distribute('accounts'::regclass)}), qr/^idem_claims: distributed together with public.accounts$/m,
		"distributed by $by together with a table of another collation");
	is(as('owner', $database, q{SELECT attcollation::regcollation FROM pg_attribute WHERE attrelid = 'requests.idem_claims'::regclass AND attname = 'user_id'}),
		'"default"', 'claims have its collation');
	is(as('owner', $database, $view), $view_before, 'the view is the same');
	is(as('owner', $database, $rights), $before, "distributed by $by: all rights are the same");
	is(as('operator', $database, 'SELECT count(scope) FROM requests.idem_claims'), '0', 'the operator reads the claims');
	like(as($by, $database, 'SELECT requests.idem_distribute(NULL::regclass)'), qr/^rights: made equal on 1 nodes$/m, "distributed once more by $by");
	is(as('owner', $database, $rights), $before, 'all rights are the same');

	is( as('owner', $database, q{
SELECT string_agg(DISTINCT a.grantee::regrole::text, ' ') FROM pg_class AS c, aclexplode(coalesce(c.relacl, acldefault('r', c.relowner))) AS a
WHERE c.oid IN ('requests.idem__token_source'::regclass, 'requests.idem_token_blocks'::regclass)}),
		'owner', 'the tables from which tokens are drawn are for the owner alone');
	is( as('owner', $database, q{
SELECT count(*) FROM pg_proc WHERE proname LIKE 'idem\_\_%' AND NOT proname ^@ 'idem__call_' AND (has_function_privilege('anon', oid, 'EXECUTE') OR has_function_privilege('app', oid, 'EXECUTE'))}),
		'0', 'internal functions, too');
	as('owner', $database, 'GRANT USAGE ON SCHEMA requests TO anon');
	like(error_of('anon', $database, $_), qr/permission denied for table idem__token_source/, "$_: refused")
	  for 'TABLE requests.idem__token_source', 'INSERT INTO requests.idem__token_source VALUES (777)', 'DELETE FROM requests.idem__token_source',
	  'TRUNCATE requests.idem__token_source', 'BEGIN; LOCK TABLE requests.idem__token_source IN ACCESS SHARE MODE';
	as('owner', $database, 'CREATE TABLE requests.idem_token_blocks_1 (LIKE requests.idem_token_blocks INCLUDING ALL)');	# the shard
	like(as('app', $database, "SELECT outcome, token FROM requests.idem_lease('u', 'r', lease => '1 min')"),
		qr/^claimed\|9876543[3-9]\d{6}$/, 'leases are claimed, and tokens are higher than before, but not longer');
	is(as('owner', $database, $sizes), '0', 'the metrics do not have the size of the table of this node');
}

# ----- sinks -----

# The table of a sink has to be distributed with the claims, by the user's column.
as('owner', $database, q{
CREATE TABLE sinks (user_id text, request_id text);
CREATE TABLE sinks_77 (user_id text, request_id text);
GRANT INSERT, TRIGGER ON sinks, sinks_77 TO app});
$node->safe_psql($database, q{INSERT INTO pg_dist_shard VALUES ('sinks', 77); INSERT INTO pg_dist_partition VALUES ('sinks', 'h', 9, 'user_id')});
for my $table ('sinks', 'sinks_77')
{
	as('app', $database, qq{CREATE TRIGGER sink BEFORE INSERT ON $table FOR EACH ROW EXECUTE FUNCTION requests.idem_skip_duplicates('', 'user_id', 'request_id')});
	like(error_of('app', $database, "INSERT INTO $table VALUES ('u', 'sink')"),
		qr/ERROR:  table "(public\.)?sinks" is not distributed together with idem_claims by column "user_id"\nDETAIL:  .*\nHINT:  Distribute the table of a sink/,
		"$table: refused");
}
$node->safe_psql($database, q{UPDATE pg_dist_partition SET colocationid = 1, partkey = 'request_id' WHERE colocationid = 9});
like(error_of('app', $database, "INSERT INTO sinks_77 VALUES ('u', 'sink')"), qr/ERROR:  table "public.sinks" is not/, 'distributed by another column: refused');
$node->safe_psql($database, q{UPDATE pg_dist_partition SET partkey = 'user_id' WHERE logicalrelid = 'sinks'::regclass});
as('app', $database, "INSERT INTO sinks_77 VALUES ('u', 'sink'), ('u', 'sink')");
is(as('owner', $database, 'SELECT count(*) FROM sinks_77'), '1', 'together with the claims: guarded');
$node->safe_psql($database, q{
DELETE FROM pg_dist_shard WHERE shardid = 77;
DELETE FROM pg_dist_partition WHERE logicalrelid = 'sinks'::regclass;
DROP TABLE sinks, sinks_77});

# ----- a node that was added -----

# Everybody may call its functions until idem_distribute() was called: Citus makes them there.
as('app', $database, "SELECT requests.idem_claim('u', 'kept')");
$node->safe_psql($database, 'UPDATE pg_dist_local_group SET groupid = 7');
as('owner', $database, 'GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA requests TO PUBLIC');
my $stored = as('owner', $database, 'SELECT * FROM requests.idem_claims ORDER BY request_id');
my @definers = split /\n/, as('owner', $database, q{
SELECT format('requests.%I(%s)', p.proname, (SELECT string_agg(CASE WHEN a.type = 'text'::regtype AND a.n = 1 THEN '''u'''
			WHEN a.type = 'text'::regtype AND a.n = 2 THEN '''kept''' WHEN a.type = 'text[]'::regtype THEN '''{kept}'''
			WHEN a.type = 'jsonb'::regtype THEN '''1''' ELSE 'NULL' END || '::' || a.type::regtype::text, ', ' ORDER BY a.n)
	FROM unnest(p.proargtypes) WITH ORDINALITY AS a (type, n)))
FROM pg_proc AS p WHERE p.pronamespace = 'requests'::regnamespace AND p.prosecdef AND p.prorettype <> 'trigger'::regtype ORDER BY 1});
cmp_ok(@definers, '>', 15, 'functions run as their owner');
for my $call (@definers, 'requests.idem_lapsed(NULL::text, 10)')
{
	my $error = error_of('anon', $database, "SELECT $call");

	if ($call =~ /idem_fingerprint/)
	{
		is($error, '', "$call: answers, since it reads nothing");
		next;
	}
	# The short forms need a claim of the same transaction.
	like($error, qr/ERROR:  (idem cannot be used on this node yet|idem_\w+\(\): no (claim was made|unsettled request))/,
		"$call: refused");
}
like(error_of('anon', $database, q{CREATE TEMPORARY TABLE sink (a text, b text);
CREATE TRIGGER sink BEFORE INSERT ON sink FOR EACH ROW EXECUTE FUNCTION requests.idem_skip_duplicates('', 'a', 'b');
INSERT INTO sink VALUES ('u', 'kept')}), qr/ERROR:  idem cannot be used on this node yet/, 'the trigger of a sink: refused');
is(as('owner', $database, 'SELECT * FROM requests.idem_claims ORDER BY request_id'), $stored, 'and nothing is changed');
as('owner', $database, 'REVOKE EXECUTE ON ALL FUNCTIONS IN SCHEMA requests FROM PUBLIC');
like(error_of('app', $database, "SELECT requests.idem_claim('u', 'kept')"), qr/HINT:  The node was added.* Call idem_distribute\(NULL::regclass\) on the coordinator/,
	'not even for a role that may');
$node->safe_psql($database, "INSERT INTO pg_dist_node VALUES (7, 'primary', true)");
as('owner', $database, 'SELECT requests.idem_distribute(NULL::regclass)');
is(as('app', $database, "SELECT requests.idem_claim('u', 'kept')"), 'f', 'the HINT helps');
# Only a superuser can copy the policy to a node that has none.
$node->safe_psql($database, "INSERT INTO pg_dist_shard VALUES ('requests.idem_scopes', 5); INSERT INTO pg_dist_placement VALUES (5, 0)");
like(error_of('owner', $database, 'SELECT requests.idem_distribute(NULL::regclass)'),
	qr/ERROR:  a node has no copy of table "idem_scopes"\nHINT:  Have a superuser call replicate_reference_tables/, 'the owner cannot copy the policy');
like(as($superuser, $database, 'SELECT requests.idem_distribute(NULL::regclass)'), qr/copied to new nodes/, 'a superuser can');
$node->safe_psql($database, 'INSERT INTO pg_dist_placement VALUES (5, 7); UPDATE pg_dist_local_group SET groupid = 0');
# Claims read the replica of their node, by its name.
like(error_of('app', $database, "SELECT requests.idem_claim('u', 'kept')"), qr/relation "requests.idem_scopes_5" does not exist/, 'claims read a replica');
as('owner', $database, 'CREATE VIEW requests.idem_scopes_5 AS TABLE requests.idem_scopes');
is(as('app', $database, "SELECT requests.idem_claim('u', 'kept')"), 'f', 'once it is there, they answer');

# ----- shards that were changed -----

# Citus makes tables again, without their triggers, and views without their rights.
$node->safe_psql($database, "DELETE FROM pg_dist_partition WHERE logicalrelid = 'requests.idem_scopes'::regclass");
as('owner', $database, q{
ALTER DEFAULT PRIVILEGES GRANT ALL ON TABLES TO anon, PUBLIC;
DROP TRIGGER idem__scopes_guard ON requests.idem_scopes;
DO $$
DECLARE
	of_view text;
BEGIN
	FOREACH of_view IN ARRAY ARRAY['idem_stat_cleanup', 'idem_stat_table', 'idem_stat_scopes', 'idem_metrics', 'idem_unsettled', 'idem_holders'] LOOP
		EXECUTE format('REVOKE ALL ON requests.%1$I FROM pg_monitor, operator, helpdesk; GRANT ALL ON requests.%1$I TO anon, PUBLIC', of_view);
	END LOOP;
END $$});
is(as('owner', $database, 'SELECT requests.idem_distribute(NULL::regclass)') =~ s/^functions: .*\n//mr, <<'TOLD' =~ s/\n\z//r, 'is put in order, and told');
idem_scopes: copied to all nodes
idem_holders: had lost its rights; granted to pg_monitor. Call idem_grant(..., 'operator') again for operators
idem_metrics: had lost its rights; granted to pg_monitor. Call idem_grant(..., 'operator') again for operators
idem_stat_cleanup: had lost its rights; granted to pg_monitor. Call idem_grant(..., 'operator') again for operators
idem_stat_scopes: had lost its rights; granted to pg_monitor. Call idem_grant(..., 'operator') again for operators
idem_stat_table: had lost its rights; granted to pg_monitor. Call idem_grant(..., 'operator') again for operators
idem_unsettled: had lost its rights; granted to pg_monitor. Call idem_grant(..., 'operator') again for operators
rights: made equal on 2 nodes
TOLD
is(as('owner', $database, q{SELECT count(*) FROM pg_trigger WHERE tgname = 'idem__scopes_guard'}), '1', 'the trigger is there');
is( as('owner', $database, q{
SELECT string_agg(c.relname || ' ' || a.grantee::regrole || ' ' || a.privilege_type, ', ' ORDER BY c.relname, a.privilege_type)
FROM pg_class AS c, aclexplode(c.relacl) AS a WHERE c.relkind = 'v' AND c.relname ~ '^idem_[a-z_]+$' AND a.grantee <> c.relowner}),
	join(', ', map { "$_ pg_monitor SELECT" } qw(idem_holders idem_metrics idem_stat_cleanup idem_stat_scopes idem_stat_table idem_unsettled)),
	'the views are for pg_monitor, and not for the grantees of default privileges');
# Tables that are not colocated with the claims any more
$node->safe_psql($database, "UPDATE pg_dist_partition SET colocationid = 3 WHERE logicalrelid = 'requests.idem_claims'::regclass");
like(as('owner', $database, 'SELECT requests.idem_distribute(NULL::regclass)'),
	qr/^idem_token_blocks: distributed together with idem_claims\nfunctions: \d+ made on all nodes\n/, 'tokens follow the claims');
# A tenant's schema
$node->safe_psql($database, "UPDATE pg_dist_partition SET partmethod = 'n' WHERE logicalrelid = 'requests.idem_claims'::regclass");
like(error_of('owner', $database, 'SELECT requests.idem_distribute(NULL::regclass)'),
	qr/ERROR:  table "idem_claims" is distributed, but not by the user's id\nHINT:  Undistribute it first/, 'a table of another kind is refused');
$node->safe_psql($database, "UPDATE pg_dist_partition SET partmethod = 'h' WHERE logicalrelid = 'requests.idem_claims'::regclass");

# ----- the schema of a tenant -----

$node->safe_psql('postgres', 'CREATE DATABASE tenants OWNER owner');
$node->safe_psql('tenants', $stand_ins);
as('owner', 'tenants', 'CREATE SCHEMA requests');
$node->safe_psql('tenants', "INSERT INTO pg_dist_schema VALUES ('requests'::regnamespace)");
like((load_file('owner', 'tenants', 'sql/idem-portable.sql'))[1], qr/ERROR:  schema requests is distributed\nDETAIL: .*\nHINT:  Install idem into another schema: SET citus/,
	'idem cannot be installed into a schema that Citus distributes');
$node->safe_psql('tenants', 'DELETE FROM pg_dist_schema');
is((load_file('owner', 'tenants', 'sql/idem-portable.sql'))[0], 0, 'into another one it can');

# ----- no lease without a token -----

for my $wrong ([ 0, 'DELETE FROM requests.idem__token_source' ], [ 2, 'INSERT INTO requests.idem__token_source VALUES (777), (778)' ])
{
	my ($rows, $change) = @$wrong;

	# A new block is needed.
	as('owner', $database, "$change; DELETE FROM requests.idem_token_blocks_1");
	like(error_of('app', $database, "SELECT FROM requests.idem_lease('u', 'none', lease => '1 min')"),
		qr/ERROR:  table "idem__token_source" has $rows rows, not one\nHINT:  Leases draw their tokens from its only row/, "$rows rows: a lease is refused");
	is(as('owner', $database, "SELECT count(*) FROM requests.idem_claims WHERE request_id = 'none'"), '0', "$rows rows: and not claimed");
	is(as('app', $database, "SELECT requests.idem_claim('u', 'with $rows rows')"), 't', "$rows rows: claims without a lease need none");
}
as('owner', $database, 'DELETE FROM requests.idem__token_source; INSERT INTO requests.idem__token_source DEFAULT VALUES');
like(as('app', $database, "SELECT outcome, token FROM requests.idem_lease('u', 'none', lease => '1 min')"), qr/^claimed\|\d+$/, 'the HINT helps');

$node->stop;
done_testing();
