# Libraries with hooks of the executor, of utility commands and of rights beside idem, in either
# order: pg_stat_statements, auto_explain, pgaudit, set_user and others, as far as they are
# installed. What they show of idem is what doc/operations.md says.

use strict;
use warnings;

use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

use Client;

my ($folder) = run_command([ 'pg_config', '--pkglibdir' ]);

sub installed
{
	return grep { -e "$folder/$_.so" } @_;
}

# pg_stat_kcache and pg_qualstats come after pg_stat_statements.
my @libraries = installed(
	'pg_stat_statements', 'auto_explain', 'pgaudit', 'set_user', 'pgextwlist', 'pg_cron', 'pg_wait_sampling',
	'pg_qualstats', 'pg_stat_kcache');
my %has = map { $_ => 1 } @libraries;
plan skip_all => 'neither pg_stat_statements nor auto_explain is installed' if !$has{pg_stat_statements} || !$has{auto_explain};
note "with @libraries";

my $node = PostgreSQL::Test::Cluster->new('main');
$node->init;
$node->append_conf('postgresql.conf', qq{
max_prepared_transactions = 5
idem.cleanup_interval = '100ms'
log_statement = none
pg_stat_statements.track = all
pg_stat_statements.track_planning = on
auto_explain.log_min_duration = 0
auto_explain.log_analyze = on
auto_explain.log_buffers = on
auto_explain.log_triggers = on
auto_explain.log_nested_statements = on
});
$node->append_conf('postgresql.conf', q{
pgaudit.log = 'all'
pgaudit.log_parameter = on
pgaudit.log_relation = on
}) if $has{pgaudit};

sub query
{
	return $node->safe_psql('postgres', $_[0]);
}

sub logged
{
	my ($offset) = @_;
	return slurp_file($node->logfile, $offset);
}

# What a service does, in the scope $scope. Every id contains "secret".
sub work
{
	my ($scope) = @_;
	my ($holder, $waiter) = map { Client->new($node) } 1 .. 2;

	is( query(qq{
			SELECT idem_call('secret user', 'secret call', 'pay(int)', '{"amount": 3}', scope => '$scope');
			SELECT idem_call('secret user', 'secret call', 'pay(int)', '{"amount": 3}', scope => '$scope');
		}),
		qq({"paid": 3}\n{"paid": 3}), "$scope: idem_call, and a replay");
	is( query(qq{
			BEGIN;
			SELECT idem_claim('secret user', 'secret claim', '$scope');
			SAVEPOINT s;
			SELECT idem_claim('secret user', 'secret undone', '$scope');
			ROLLBACK TO s;
			SELECT idem_complete('"done"');
			COMMIT;
			SELECT idem_claim('secret user', 'secret claim', '$scope'), idem_result();
			SELECT idem_status('secret user', 'secret undone', '$scope') IS NULL;
		}),
		qq(t\nt\nt\nf|"done"\nt), "$scope: a transaction with a savepoint");
	is( query(qq{
			SELECT idem_extend('secret user', 'secret lease', token, scope => '$scope') > now()
			FROM idem_lease('secret user', 'secret lease', scope => '$scope', lease => '1 min');
			SELECT idem_complete('secret user', 'secret lease', '1', max(idem_token_seq.last_value), '$scope') FROM idem_token_seq;
			SELECT string_agg(outcome::text, ' ') FROM idem_claim_many('{secret user,secret user}', '{secret lease,secret new}', '$scope');
		}),
		qq(t\nt\ncompleted claimed), "$scope: a lease, and a batch");

	my ($status, $out, $err) = $node->psql('postgres', qq{
		\\set VERBOSITY sqlstate
		SELECT idem_call('secret user', 'secret error', 'pay(int)', '{"amount": 0}', scope => '$scope');
		SELECT idem_call('secret user', 'secret error', 'pay(int)', '{"amount": 4}', scope => '$scope')},
		on_error_stop => 0);
	like($err, qr/ERROR:  22012/, "$scope: an error of the function is raised");
	is($out, '{"paid": 4}', "$scope: and leaves no claim");

	$holder->ask("BEGIN; SELECT idem_claim('secret user', 'secret waited for', '$scope')");
	$waiter->send("SELECT idem_claim('secret user', 'secret waited for', '$scope')");
	$node->poll_query_until('postgres', "SELECT cardinality(pg_blocking_pids(" . $waiter->pid . ')) > 0') or die 'nobody waits';
	$holder->ask('ROLLBACK');
	is($waiter->answer, 't', "$scope: a waiter claims");
	$_->quit for ($holder, $waiter);

	query(qq{
		BEGIN; SELECT idem_claim('secret user', 'secret prepared', '$scope'); PREPARE TRANSACTION '$scope'; COMMIT PREPARED '$scope'});
	query("SELECT idem_claim('secret user', 'secret expiring', 'short')");
	ok( $node->poll_query_until('postgres', q{SELECT NOT EXISTS (SELECT FROM idem_claims WHERE scope = 'short')}),
		"$scope: the worker cleans");
	query('CALL idem_cleanup_all()');
	return;
}

my $created = 0;

for my $first (0, 1)
{
	my $scope = $first ? 'first' : 'last';
	my $offset;

	$node->append_conf('postgresql.conf',
		'shared_preload_libraries = ' . "'" . join(',', $first ? ('idem', @libraries) : (@libraries, 'idem')) . "'");
	$first ? $node->restart : $node->start;
	$offset = -s $node->logfile;
	if (!$created++)
	{
		query('CREATE EXTENSION pg_stat_statements');
		query('CREATE EXTENSION pgaudit') if $has{pgaudit};
		query(q{
			CREATE EXTENSION idem;
			INSERT INTO idem_scopes (scope, ttl) VALUES ('short', '1 ms');
			CREATE TABLE payments (amount int);
			CREATE FUNCTION pay(amount int) RETURNS jsonb LANGUAGE plpgsql AS $$
			BEGIN
				INSERT INTO payments VALUES (1 / amount * 0 + amount);
				RETURN jsonb_build_object('paid', amount);
			END $$;
		});
	}
	query('SELECT pg_stat_statements_reset()');
	work($scope);

	# ----- pg_stat_statements -----

	is(query(q{SELECT count(*) FROM pg_stat_statements WHERE query LIKE '%secret%'}),
		0, "$scope: pg_stat_statements has no id");
	is( query(q{SELECT sum(calls) FROM pg_stat_statements WHERE query LIKE 'SELECT idem_call($1, $2, $3, $4, scope => $5)'}),
		3, "$scope: one text for all calls of a kind");
	is( query(q{SELECT sum(calls) FROM pg_stat_statements WHERE query LIKE 'INSERT INTO payments%' AND NOT toplevel}),
		2, "$scope: what idem_call runs is nested");
	is( query(q{SELECT count(*) FROM pg_stat_statements WHERE query ~ 'idem_(claims|scopes)' AND NOT (toplevel AND query ~ '^SELECT NOT EXISTS')}),
		0, "$scope: claims and the worker run no statement on the tables");

	# ----- auto_explain -----

	like(logged($offset), qr/plan:\n\tQuery Text: INSERT INTO payments/, "$scope: auto_explain shows what idem_call runs");

	# ----- pgaudit -----

	if ($has{pgaudit})
	{
		my $log = logged($offset);

		like($log, qr/AUDIT: SESSION,\d+,\d+,FUNCTION,EXECUTE,FUNCTION,public.idem_claim,/, "$scope: pgaudit records claims as calls");
		like($log, qr/AUDIT: SESSION,\d+,\d+,FUNCTION,EXECUTE,FUNCTION,public.pay,/, "$scope: and the function that idem_call runs");
		like($log, qr/AUDIT: SESSION,\d+,\d+,WRITE,INSERT,TABLE,public.payments,/, "$scope: and what that writes");
		unlike($log, qr/AUDIT: [^\n]*WRITE,[A-Z]+,TABLE,public.idem_claims/, "$scope: but no write of idem");
		query("DELETE FROM idem_claims WHERE request_id = 'secret new'");
		like(logged($offset), qr/AUDIT: SESSION,\d+,\d+,WRITE,DELETE,TABLE,public.idem_claims,/, "$scope: a DELETE by hand is one");
	}
	is(query("SELECT errors FROM idem_stat_cleanup"), 0, "$scope: the worker has met no error");
}

$node->stop;
unlike(slurp_file($node->logfile), qr/leak|TRAP|PANIC|was terminated by signal|stack is not empty/, 'nothing broke');

done_testing();
