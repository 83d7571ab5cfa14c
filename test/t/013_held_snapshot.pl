# While a session holds an old snapshot, the index keeps a dead entry of each removed claim.
# The worker does not scan all dead entries in one batch, and finds the live ones among them.

use strict;
use warnings;

use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

# So many dead entries does a batch pass. It then goes on to the end of their second.
my $gone_max = 50_000;
my $rows_a_second = 1000;
my $rows = 180_000;

my $node = PostgreSQL::Test::Cluster->new('main');
$node->init;
$node->append_conf(
	'postgresql.conf', q{
shared_preload_libraries = 'idem'
idem.cleanup_interval = '100ms'
log_min_messages = debug1
autovacuum = off
});
$node->start;
$node->safe_psql('postgres', q{
	CREATE EXTENSION idem;
	INSERT INTO idem_scopes (scope, ttl) VALUES ('short', '1 ms');
	INSERT INTO idem_scopes (scope, lapsed) VALUES ('unknown', 'unknown');
});

sub becomes
{
	my ($query, $name) = @_;
	ok($node->poll_query_until('postgres', "SELECT $query"), $name);
}

sub is_removed
{
	my ($request, $name) = @_;
	becomes(
		"NOT EXISTS (SELECT FROM idem_claims WHERE request_id = '$request')",
		$name);
}

# Inserts an expired row that no message announces, some seconds after the first dead entry
sub insert_expired
{
	my ($request, $seconds, $scope, $state) = @_;
	$scope //= '';
	$state //= 'completed';
	my $lease = $state eq 'completed' ? 'NULL' : q{'2001-01-01'};
	$node->safe_psql('postgres',
		"INSERT INTO idem_claims (expires_at, lease_until, state, request_id, user_id, scope)
		 VALUES (timestamptz '2001-01-01' + $seconds * interval '1 s', $lease, '$state', '$request', 'user', '$scope')"
	);
}

# The batches in the log, from an offset on
sub batches
{
	my ($offset) = @_;
	my @batches;
	my $log = slurp_file($node->logfile, $offset);
	while ($log =~
		/removed (\d+) expired claims in .*, passed (\d+) dead entries, (at|behind) the/g)
	{
		push @batches, { removed => $1, gone => $2, where => $3 };
	}
	return @batches;
}

# The latest slice behind the mark that removed a row
sub removing_slice
{
	my ($offset) = @_;
	my ($slice) =
	  grep { $_->{removed} > 0 && $_->{where} eq 'behind' } reverse batches($offset);
	return $slice;
}

my $worker = q{SELECT pid FROM pg_stat_activity WHERE backend_type = 'idem worker'};
my $holder = $node->background_psql('postgres');
$holder->query_safe('BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT 1');
my $session = $node->background_psql('postgres');
$session->set_query_timer_restart();

$node->safe_psql('postgres',
	"INSERT INTO idem_claims (expires_at, state, request_id, user_id, scope)
	 SELECT timestamptz '2001-01-01' + (i / $rows_a_second) * interval '1 s', 'completed', i, 'user', ''
	 FROM generate_series(0, $rows - 1) i");
$node->reload;
becomes("rows_deleted = $rows FROM idem_stat_cleanup",
	'claims are removed while a snapshot is held');

# ----- a rescan of the dead entries -----

my $last_second = $rows / $rows_a_second - 1;
my $offset = -s $node->logfile;
insert_expired('last', $last_second);
$node->reload;
is_removed('last', 'a rescan finds a claim at its end');
becomes("rows_deleted = $rows + 1 AND NOT backlog FROM idem_stat_cleanup",
	'and counted');

my $slice = removing_slice($offset);
ok($slice, 'the log has the slice that removed it');
cmp_ok($slice->{gone}, '<', $gone_max,
	'the rescan has come to it in several slices');
$node->safe_psql('postgres', q{SELECT idem_claim('user', 'now', 'short')});
is_removed('now', 'a claim at the mark is removed');

# ----- the next worker goes on where the previous one has ended -----

# For a lease the worker reads the policy of the scope, which the session has locked.
$session->query_safe('BEGIN; LOCK TABLE idem_scopes');
insert_expired('lease', $last_second, 'lease', 'in_progress');
$node->reload;
becomes("EXISTS ($worker AND wait_event_type = 'Lock')",
	'a worker is held up in its latest slice');
my $pid = $node->safe_psql('postgres', $worker);
$offset = -s $node->logfile;
$node->safe_psql('postgres', "SELECT pg_terminate_backend($pid)");
becomes("NOT EXISTS ($worker AND pid = $pid)", 'and terminated');
$session->query_safe('COMMIT');
is_removed('lease', 'the lease is found by the next one');
becomes("rows_deleted = $rows + 3 FROM idem_stat_cleanup", 'and counted');
my ($first) = grep { $_->{where} eq 'behind' } batches($offset);
is($first->{removed}, 1, 'by its first slice');
cmp_ok($first->{gone}, '<', $gone_max, 'which goes on in that place');

# ----- rows that stay -----

insert_expired('unknown 1', 0, 'unknown', 'in_progress');
insert_expired('unknown 2', $last_second, 'unknown', 'in_progress');
$node->reload;
becomes('rows_unknown = 2 FROM idem_stat_cleanup',
	'claims that are kept are counted over the slices of a rescan');

my $locked = '';
$session->query_safe('BEGIN');
while ($locked eq '')
{
	# The worker can remove the row before it is locked.
	insert_expired('locked', 0);
	$locked = $session->query_safe(
		"SELECT request_id FROM idem_claims WHERE request_id = 'locked' FOR KEY SHARE"
	);
}
$node->reload;
becomes(q{oldest_expired_age > '1 year' FROM idem_stat_cleanup},
	'one that is locked is known to be there');
# This rescan is not requested: it is due because the locked row is known.
insert_expired('behind', $last_second);
is_removed('behind', 'another one behind the mark is found with it');
$node->safe_psql('postgres', q{SELECT idem_claim('user', 'then', 'short')});
is_removed('then', 'a claim at the mark is removed meanwhile');
becomes(q{oldest_expired_age > '1 year' FROM idem_stat_cleanup},
	'the locked one is still known');
$session->query_safe('COMMIT');
is_removed('locked', 'it is removed once it is free');
becomes('oldest_expired_age IS NULL FROM idem_stat_cleanup',
	'and known to be gone');
is( $node->safe_psql(
		'postgres', 'SELECT rows_unknown, errors FROM idem_stat_cleanup'),
	'2|0',
	'claims that are kept are still counted');

# ----- all batches of this test -----

my @batches = batches(0);
cmp_ok(scalar(@batches), '>', 10, 'the log has the batches');
is( scalar(grep { $_->{gone} >= $gone_max + $rows_a_second } @batches),
	0, 'no batch passes more dead entries than it may');
my @pairs = map { $batches[ $_ - 1 ]{where} . ' ' . $batches[$_]{where} } 1 .. $#batches;
is(scalar(grep { $_ eq 'behind behind' } @pairs),
	0, 'after each slice comes a batch at the mark');

# ----- a session that calls idem_cleanup() is not limited -----

$node->safe_psql('postgres', q{ALTER SYSTEM SET idem.cleanup_databases = 'nothing'});
$node->reload;
becomes("NOT EXISTS ($worker)", 'no worker is there');
insert_expired('session', $last_second);
is($node->safe_psql('postgres', 'SELECT idem_cleanup()'),
	1, 'a session passes them all');

$holder->query_safe('COMMIT');
$_->quit for ($holder, $session);
$node->stop;
unlike(slurp_file($node->logfile), qr/leak|TRAP|PANIC/, 'nothing leaked');

done_testing();
