# The files of examples/monitoring: alerts and their documents have the same names; rules and
# dashboard use metrics that there are; the role of the exporter reads idem_metrics and nothing
# else. With the real programs, where they are installed: test/monitoring/run installs them.

use strict;
use warnings;

use JSON::PP;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

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
$node->safe_psql('app', q{CREATE EXTENSION idem; SELECT idem_claim('u', '1', 'payments'), idem_claim('u', '1', 'payments'); SELECT idem_cleanup()});
my %exists = map { $_ => 1 } split /\n/, $node->safe_psql('app', 'SELECT DISTINCT name FROM idem_metrics');
my @queries = map { $_->{expr} } map { @{ $_->{targets} } } @{ $dashboard->{panels} };
cmp_ok(scalar(@queries), '>', 15, 'the dashboard has queries');
is_deeply([ grep { !$exists{$_} } map { /\b(idempotency_\w+)/g } @queries ], [], 'with metrics that there are');
is_deeply([ grep { !$exists{$_} } $alerts =~ /\b(idempotency_\w+)/g ], [], 'so have the alerts');
is_deeply([ grep { !$exists{$_} } $tests =~ /\b(idempotency_\w+)/g ], [], 'and their tests');
my %used = map { $_ => 1 } map { /\b(idempotency_\w+)/g } @queries, $alerts;
is_deeply([ grep { !$used{$_} } grep { !/reclaims|healed|_sum|_count|last_run|cleanup_backlog$/ } sort keys %exists ], [], 'and no other metric is left out');
my %panel = map { $_->{id} => $_ } @{ $dashboard->{panels} };
is(scalar(keys %panel), scalar(@{ $dashboard->{panels} }), 'each panel has an id of its own');
is_deeply([ grep { !length($_->{description} // '') } @{ $dashboard->{panels} } ], [], 'and says what it shows');

# ----- the role of the exporter -----

for my $edition ('idem', 'idem_portable')
{
	my $database = "of_$edition";
	$node->safe_psql('postgres', "CREATE DATABASE $database");
	$node->safe_psql($database, "CREATE SCHEMA requests; CREATE EXTENSION $edition SCHEMA requests");
	my ($status, $out, $err) = $node->psql($database, "SET search_path = requests;\n" . slurp_file("$folder/role.sql"));
	is($status, 0, "$edition: role.sql") or diag $err;
	my $read = sub { $node->psql($database, $_[0], extra_params => [ '-U', 'idem_exporter' ]) };
	($status, $out, $err) = $read->('SELECT count(*) > 10 FROM idem_metrics');
	is("$out$err", 't', "$edition: it reads the metrics, without naming a schema");
	# A session of another role, whose age it may see
	$node->safe_psql($database, "BEGIN; SELECT requests.idem_claim('u', 'held'); PREPARE TRANSACTION '$database'");
	($status, $out, $err) = $read->(q{SELECT value > 0 FROM idem_metrics WHERE name = 'idempotency_dead_rows_held_seconds'});
	is("$out$err", 't', "$edition: also the age of what holds dead rows back");
	$node->safe_psql($database, "ROLLBACK PREPARED '$database'");
	for my $sql ('TABLE idem_stat_cleanup', 'TABLE idem_holders', 'TABLE idem_unsettled', 'SELECT request_id FROM idem_claims', 'TABLE idem_scopes',
		q{SELECT idem_claim('u', '2')}, q{SELECT * FROM idem_lookup('u', '1')}, 'SELECT idem_cleanup()', 'SELECT * FROM idem_lapsed()')
	{
		($status, $out, $err) = $read->("SET default_transaction_read_only = off; $sql");
		like($err, qr/permission denied/, "$edition: not $sql");
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
