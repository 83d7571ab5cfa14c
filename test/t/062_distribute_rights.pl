# Rights around sql/idem-citus.sql: what may be in the schema when it is loaded

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

$node->stop;
done_testing();
