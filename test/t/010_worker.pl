# The worker removes expired claims in every database, and nothing else.

use strict;
use warnings;

use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $node;

# A claim in the scope 'short' expires within a second, and one in 'longer' later.
sub create_extension
{
	my ($database) = @_;
	$node->safe_psql($database, q{
		CREATE EXTENSION idem;
		INSERT INTO idem_scopes (scope, ttl) VALUES ('short', '1 ms'), ('longer', '2 s');
	});
}

sub claim
{
	my ($database, $request, $scope) = @_;
	$node->safe_psql($database,
		"SELECT idem_claim('user', '$request', '$scope')");
}

sub is_removed
{
	my ($database, $request, $name) = @_;
	ok( $node->poll_query_until(
			$database,
			"SELECT NOT EXISTS (SELECT FROM idem_claims WHERE request_id = '$request')"
		),
		$name);
}

sub is_kept
{
	my ($database, $request, $name) = @_;
	is( $node->safe_psql(
			$database,
			"SELECT count(*) FROM idem_claims WHERE request_id = '$request'"),
		1, $name);
}

# The worker gets no message of this row, as of one that was restored or replicated.
sub insert_expired
{
	my ($database, $request) = @_;
	$node->safe_psql($database,
		"INSERT INTO idem_claims (expires_at, state, request_id, user_id, scope)
		 VALUES (date_trunc('second', clock_timestamp()) - interval '1 hour', 'completed', '$request', 'user', '')"
	);
}

# ----- without preload -----

$node = PostgreSQL::Test::Cluster->new('plain');
$node->init;
$node->start;
create_extension('postgres');
claim('postgres', 'a', 'short');
ok( $node->poll_query_until('postgres', 'SELECT idem_cleanup() = 1'),
	'not preloaded: idem_cleanup() removes what has expired');
# From PostgreSQL 17 on there is shared memory all the same: 073_no_restart.pl.
for my $view ($node->pg_version < 17 ? ('idem_stat_cleanup', 'idem_metrics') : ())
{
	my ($status, $out, $err) = $node->psql('postgres',
		"\\set VERBOSITY verbose\nSELECT * FROM $view");
	like($err, qr/55000: .*shared_preload_libraries.*HINT:/s,
		"not preloaded: $view says so");
}
is( $node->safe_psql(
		'postgres',
		q{SELECT count(*) FROM pg_stat_activity WHERE backend_type LIKE 'idem%'}
	),
	0,
	'not preloaded: no launcher');
$node->stop;

# ----- several databases -----

$node = PostgreSQL::Test::Cluster->new('preloaded');
$node->init;
$node->append_conf(
	'postgresql.conf', q{
shared_preload_libraries = 'idem'
idem.cleanup_interval = '100ms'
max_prepared_transactions = 10
});
$node->start;
$node->safe_psql('postgres', "CREATE DATABASE $_")
  for ('other', '"Odd, name"', 'without');
create_extension($_) for ('postgres', 'other', 'Odd, name');

claim('postgres', 'long', '');
for my $database ('postgres', 'other', 'Odd, name')
{
	claim($database, 'a', 'short');
	is_removed($database, 'a', "expired claim in \"$database\" is removed");
}
is_kept('postgres', 'long', 'claim that has not expired is kept');

ok( $node->poll_query_until(
		'postgres',
		q{SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE backend_type = 'idem worker')}
	),
	'an idle worker holds no connection');
is( $node->safe_psql(
		'postgres',
		q{SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'idem launcher' AND datname IS NULL}
	),
	1,
	'the launcher has no database');
ok( $node->poll_query_until(
		'postgres',
		q{SELECT n_tup_del > 0 FROM pg_stat_user_tables WHERE relname = 'idem_claims'}
	),
	'autovacuum learns of what the worker deleted');

# ----- idem.cleanup_databases -----

$node->safe_psql('postgres',
	q{ALTER SYSTEM SET idem.cleanup_databases = 'POSTGRES, "Odd, name"'});
$node->reload;
# This row is removed only after the reload, which proves that the reload has happened.
insert_expired('postgres', 'reload');
$node->reload;
is_removed('postgres', 'reload', 'a reload makes the worker look again');
claim($_, 'b', 'short') for ('other', 'postgres', 'Odd, name');
is_removed('Odd, name', 'b', 'idem.cleanup_databases: a quoted name is cleaned');
claim('postgres', 'c', 'short');
is_removed('postgres', 'c', 'idem.cleanup_databases: a folded name is cleaned');
is_kept('other', 'b', 'idem.cleanup_databases: others are not');
for ([ 'other', 'no worker for this database: idem.cleanup_databases does not name it' ], [ 'postgres', 'worker' ], [ 'Odd, name', 'worker' ])
{
	my ($database, $cleaning) = @$_;
	is($node->safe_psql($database, 'SELECT cleaning FROM idem_stat_cleanup'), $cleaning, "who cleans $database");
}
$node->safe_psql('postgres', 'ALTER SYSTEM RESET idem.cleanup_databases');
$node->reload;
is_removed('other', 'b', 'idem.cleanup_databases empty: they are again');

$node->safe_psql('postgres', 'ALTER DATABASE other RENAME TO renamed');
claim('renamed', 'c', 'short');
is_removed('renamed', 'c', 'a renamed database is cleaned');

# ----- rows that a batch cannot remove -----

my $session = $node->background_psql('postgres');
$session->set_query_timer_restart();
my $locked = '';
$session->query_safe('BEGIN');
while ($locked eq '')
{
	# The worker can remove the row before it is locked.
	insert_expired('postgres', 'locked');
	$locked = $session->query_safe(
		"SELECT request_id FROM idem_claims WHERE request_id = 'locked' FOR KEY SHARE"
	);
}
insert_expired('postgres', 'free');
claim('postgres', 'younger', 'short');
is_removed('postgres', 'younger', 'a locked claim is not waited for');
is_kept('postgres', 'locked', 'it is kept');
$node->reload;
is_removed('postgres', 'free', 'others as old are removed');
ok( $node->poll_query_until(
		'postgres',
		q{SELECT oldest_expired_age > '30 min' FROM idem_stat_cleanup}),
	'the locked one is known to be there');
$session->query_safe('COMMIT');
is_removed('postgres', 'locked', 'it is removed once it is free');

# A claim that commits when the low-water mark has already passed its expires_at
$session->query_safe('BEGIN');
$session->query_safe("SELECT idem_claim('user', 'late', 'short')");
claim('postgres', 'younger', 'longer');
is_removed('postgres', 'younger', 'a younger claim is removed before');
$session->query_safe('COMMIT');
is_removed('postgres', 'late', 'a late committer is found behind the mark');

$session->query_safe('BEGIN');
$session->query_safe("SELECT idem_claim('user', 'prepared', 'short')");
$session->query_safe("PREPARE TRANSACTION 'prepared'");
claim('postgres', 'younger', 'longer');
is_removed('postgres', 'younger', 'a younger claim is removed before');
$session->query_safe("COMMIT PREPARED 'prepared'");
$node->reload;
is_removed('postgres', 'prepared', 'a prepared one is found by a full scan');

insert_expired('postgres', 'restored');
$node->reload;
is_removed('postgres', 'restored', 'one that nobody announced, too');
$session->quit;

# ----- settings of the server that are meant for applications only -----

$node->append_conf(
	'postgresql.conf', q{
default_transaction_read_only = on
default_transaction_isolation = 'serializable'
statement_timeout = '1ms'
lock_timeout = '1ms'
idle_in_transaction_session_timeout = '1ms'
synchronous_commit = on
synchronous_standby_names = 'nobody'
});
$node->restart;
$ENV{PGOPTIONS} =
  '-c statement_timeout=0 -c lock_timeout=0 -c idle_in_transaction_session_timeout=0';
$node->safe_psql(
	'postgres', q{
	SET synchronous_commit = local;
	BEGIN READ WRITE;
	SELECT idem_claim('user', 'd', 'short');
	COMMIT;
});
is_removed('postgres', 'd', 'settings for applications do not stop the worker');

$node->stop;
my $log = slurp_file($node->logfile);
unlike($log, qr/ERROR.*\n(?:.*\n){0,3}.*CONTEXT: .*removing expired claims/,
	'the worker raised no error');
unlike($log, qr/leak|TRAP|PANIC/, 'and leaked nothing');

done_testing();
