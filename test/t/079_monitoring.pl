# The files of examples/monitoring: alerts and their documents have the same names; rules and
# dashboard use metrics that there are; the role of the exporter reads idem_metrics and nothing
# else. With the real programs, where they are installed: test/monitoring/run installs them.

use strict;
use warnings;

use JSON::PP;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

use Client;

my $folder = 'examples/monitoring';
my $alerts = slurp_file("$folder/alerts.yml");
my $tests = slurp_file("$folder/alerts.test.yml");
my $operations = slurp_file('doc/operations.md');
my $dashboard = decode_json(slurp_file("$folder/grafana/idem.json"));

my $node = PostgreSQL::Test::Cluster->new('main');
$node->init;
$node->append_conf('postgresql.conf', q{
shared_preload_libraries = 'idem'
max_prepared_transactions = 10
});
$node->start;

# ----- alerts and documents -----

my @names = sort($alerts =~ /^ +- alert: (\w+)$/mg);
cmp_ok(scalar(@names), '>=', 6, 'there are alerts');
my ($documented) = $operations =~ /^### Alerts\n(.*?)^### /ms;
is_deeply([ sort(($documented // '') =~ /^#### (\w+)$/mg) ], \@names, 'doc/operations.md explains the same alerts');
is_deeply([ grep { $tests !~ /alertname: $_\n        exp_alerts:\n/ } @names ], [], 'a test has each alert fire');
is_deeply([ grep { $tests !~ /alertname: $_, exp_alerts: \[\]/ } @names ], [], 'and not fire');
my @rules = $alerts =~ /^      - (alert: .*?)(?=^      - |\z)/msg;
is(scalar(@rules), scalar(@names), 'each alert is a rule');
for my $rule (@rules)
{
	my ($name) = $rule =~ /alert: (\w+)/;
	is_deeply([ grep { $rule !~ /^ +$_: \S/m } 'expr', 'for', 'severity', 'audience', 'summary', 'look', 'do' ], [],
		"$name says what to look at, and what to do");
	my ($text) = ($documented // '') =~ /^#### $name\n(.*?)(?=^#### |\z)/ms;
	like($text // '', qr/^- Look:.*^- Do\b/ms, "$name: so do the documents");
}

# ----- metrics that there are -----

$node->safe_psql('postgres', 'CREATE DATABASE app');
$node->safe_psql('app', q{CREATE EXTENSION idem; SELECT idem_claim('u', '1', 'payments'); SELECT idem_claim('u', '1', 'payments'); SELECT idem_cleanup()});
my %exists = map { $_ => 1 } split /\n/, $node->safe_psql('app', 'SELECT DISTINCT name FROM idem_metrics');
my @queries = map { $_->{expr} } map { @{ $_->{targets} } } @{ $dashboard->{panels} };
cmp_ok(scalar(@queries), '>', 15, 'the dashboard has queries');
is_deeply([ grep { !$exists{$_} } map { /\b(idem_\w+)/g } @queries ], [], 'with metrics that there are');
my @conditions = map { /^ +expr: (.*?)^ +for:/ms } @rules;
is(scalar(@conditions), scalar(@rules), 'each alert has a condition');
is_deeply([ grep { !$exists{$_} } map { /\b(idem_\w+)/g } @conditions ], [], 'with metrics that there are');
is_deeply([ grep { !$exists{$_} } $tests =~ /series: '(idem_\w+)/g ], [], 'so have the tests of the alerts');
my %used = map { $_ => 1 } map { /\b(idem_\w+)/g } @queries, @conditions;
is_deeply([ grep { !$used{$_} } grep { !/takeovers|healed|_sum|_count|last_run|has_backlog$/ } sort keys %exists ], [], 'and no other metric is left out');
my %panel = map { $_->{id} => $_ } @{ $dashboard->{panels} };
is(scalar(keys %panel), scalar(@{ $dashboard->{panels} }), 'each panel has an id of its own');
is_deeply([ grep { !length($_->{description} // '') } @{ $dashboard->{panels} } ], [], 'and says what it shows');

# ----- the role of the exporter -----

# (exit code, errors) of role.sql; each edition has a role of its own, since roles are the server's
sub run_role
{
	my ($database, $user, @variables) = @_;
	my ($status, undef, $err) = $node->psql($database, slurp_file("$folder/role.sql"),
		extra_params => [ '-U', $user, '-v', 'schema=requests', map { ('-v', $_) } @variables ]);
	return ($status, $err);
}

my $superuser = $node->safe_psql('postgres', 'SELECT current_user');
for my $edition ('idem', 'idem_portable')
{
	my $database = "of_$edition";
	$node->safe_psql('postgres', "CREATE DATABASE $database");
	$node->safe_psql($database, "CREATE SCHEMA requests; CREATE EXTENSION $edition SCHEMA requests");
	my ($status, $err) = run_role($database, $superuser, "role=reader_$edition");
	is("$status$err", '0', "$edition: role.sql");
	my $read = sub {
		my (undef, $out, $err) = $node->psql($database, $_[0], extra_params => [ '-U', "reader_$edition" ]);
		return "$out$err";
	};
	is($read->('SELECT count(*) > 10 FROM idem_metrics'), 't', "$edition: it reads the metrics, without naming a schema");
	# A session of another role
	my $session = Client->new($node, $database);
	$session->ask(q{BEGIN; SELECT requests.idem_claim('u', 'held')});
	my $seconds = q{SELECT count(*) FROM idem_metrics WHERE name = 'idem_dead_rows_held_seconds'};
	my $transactions = q{SELECT value > 0 FROM idem_metrics WHERE name = 'idem_dead_rows_held_transactions'};
	is($read->("$seconds; $transactions"), "0\nt", "$edition: how many transactions dead rows have been held back, not for how long");
	is($read->(q{SELECT pg_has_role('pg_read_all_stats', 'MEMBER')}), 'f', "$edition: it sees no statements of others");
	($status, $err) = run_role($database, $superuser, "role=reader_$edition", 'read_all_stats=on');
	is("$status$err", '0', "$edition: role.sql again, with read_all_stats");
	is($read->("$seconds; $transactions"), "1\nt", "$edition: then also for how long");
	$session->quit;
	for my $sql ('TABLE idem_stat_cleanup', 'TABLE idem_holders', 'TABLE idem_unsettled', 'SELECT request_id FROM idem_claims', 'TABLE idem_scopes',
		q{SELECT idem_claim('u', '2')}, q{SELECT * FROM idem_lookup('u', '1')}, 'SELECT idem_cleanup()', 'SELECT * FROM idem_lapsed()')
	{
		like($read->("SET default_transaction_read_only = off; $sql"), qr/permission denied/, "$edition: not $sql");
	}
}

# ----- the owner of a database against the superuser who runs role.sql -----

$node->safe_psql('postgres', 'CREATE ROLE mallory LOGIN CREATEDB; CREATE ROLE reader LOGIN');

sub as_mallory
{
	my ($database, $sql) = @_;
	my ($status, undef, $err) = $node->psql($database, "SET client_min_messages = error; $sql", extra_params => [ '-U', 'mallory' ]);
	is($status, 0, 'mallory: ' . substr($sql, 0, 60)) or diag $err;
	return;
}

for my $edition ('idem', 'idem_portable')
{
	my $database = "attack_$edition";
	as_mallory('postgres', "CREATE DATABASE $database");
	as_mallory($database, "CREATE SCHEMA requests; ALTER DATABASE $database SET search_path = requests, public; CREATE EXTENSION $edition SCHEMA requests");

	# What an owner may do alone, where an administrator has made the role
	my ($status, $err) = run_role($database, 'mallory', 'role=reader');
	is($status, 0, "$edition: the owner of idem runs role.sql") or diag $err;
	like($err, qr/WARNING:  role reader has no search_path, and no timeout: mallory may not alter it\nHINT:  Add search_path=requests&/,
		"$edition: and is told what is missing");
	is(($node->psql($database, 'SELECT count(*) > 10 FROM requests.idem_metrics', extra_params => [ '-U', 'reader' ]))[1], 't', "$edition: the role reads");
	isnt((run_role($database, 'mallory', 'role=another'))[0], 0, 'an owner without CREATEROLE cannot make a role');

	for my $schema ('public', 'requests')
	{
		as_mallory($database, qq{
			CREATE FUNCTION $schema.rise() RETURNS void LANGUAGE plpgsql AS \$\$ BEGIN
				IF (SELECT rolsuper FROM pg_roles WHERE rolname = current_user) THEN ALTER ROLE mallory SUPERUSER; END IF;
			END \$\$;
			CREATE FUNCTION $schema.format(text, name, text) RETURNS text LANGUAGE plpgsql AS \$\$ BEGIN PERFORM $schema.rise(); RETURN 'SELECT 1'; END \$\$;
			CREATE FUNCTION $schema.format(text, text, text) RETURNS text LANGUAGE plpgsql AS \$\$ BEGIN PERFORM $schema.rise(); RETURN 'SELECT 1'; END \$\$;
			CREATE FUNCTION $schema.format(text, regprocedure) RETURNS text LANGUAGE plpgsql AS \$\$ BEGIN PERFORM $schema.rise(); RETURN 'SELECT 1'; END \$\$;
			CREATE FUNCTION $schema.same(oid, regclass) RETURNS boolean LANGUAGE plpgsql AS \$\$ BEGIN PERFORM $schema.rise(); RETURN true; END \$\$;
			CREATE FUNCTION $schema.same(name, text) RETURNS boolean LANGUAGE plpgsql AS \$\$ BEGIN PERFORM $schema.rise(); RETURN true; END \$\$;
			CREATE OPERATOR $schema.= (LEFTARG = oid, RIGHTARG = regclass, FUNCTION = $schema.same);
			CREATE OPERATOR $schema.= (LEFTARG = name, RIGHTARG = text, FUNCTION = $schema.same)});
	}
	($status, $err) = run_role($database, $superuser, 'role=reader');
	is($status, 0, "$edition: role.sql beside the functions and operators of an attacker") or diag $err;
	is($node->safe_psql('postgres', q{SELECT rolsuper FROM pg_roles WHERE rolname = 'mallory'}), 'f', "$edition: which runs none of them");
	$node->safe_psql('postgres', 'ALTER ROLE mallory NOSUPERUSER');

	# Another view in the place of idem's
	as_mallory($database, q{ALTER SCHEMA requests RENAME TO gone; CREATE SCHEMA requests; CREATE VIEW requests.idem_metrics AS SELECT 1 AS name});
	like((run_role($database, $superuser, 'role=reader'))[1], qr/ERROR:  there is no idem in schema requests\n/, "$edition: a view alone is not idem");
	as_mallory($database, 'DROP SCHEMA requests CASCADE; ALTER SCHEMA gone RENAME TO requests');
	if ($edition eq 'idem')
	{
		as_mallory($database, 'CREATE SCHEMA other; CREATE TABLE other.idem_claims (); CREATE VIEW other.idem_metrics AS SELECT 1 AS name; ALTER EXTENSION idem ADD TABLE other.idem_claims');
		like((run_role($database, $superuser, 'role=reader', 'schema=other'))[1], qr/ERROR:  other\.idem_metrics is not an object of idem\n/,
			'nor is a view that is not in the extension');
	}
}

# ----- with the real programs -----

sub installed
{
	my ($program) = @_;
	return grep { -x "$_/$program" } split /:/, $ENV{PATH};
}

SKIP:
{
	skip 'promtool is not installed', 3 if !installed('promtool');
	command_ok([ 'promtool', 'check', 'rules', "$folder/alerts.yml" ], 'promtool check rules');
	command_ok([ 'promtool', 'check', 'config', "$folder/prometheus.yml" ], 'promtool check config');
	command_ok([ 'promtool', 'test', 'rules', "$folder/alerts.test.yml" ], 'promtool test rules');
}

$node->stop;
done_testing();
