# Batches that overlap, with their keys in opposite order: no deadlock, and each key is claimed
# once. The batches are so large that their new keys are written together.

use strict;
use warnings;

use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

use Client;

my $node = PostgreSQL::Test::Cluster->new('main');
$node->init;
# A deadlock is found at once.
$node->append_conf('postgresql.conf', q{
shared_preload_libraries = 'idem'
idem.cleanup_databases = 'nothing'
idem.wait = '10 min'
deadlock_timeout = '10ms'
fsync = off
});
$node->start;
$node->safe_psql('postgres', q{
CREATE EXTENSION idem;
CREATE TABLE claimed (request text, client int);
CREATE FUNCTION keys(first int, last int, step int, prefix text) RETURNS text[] LANGUAGE sql AS $$
	SELECT array_agg(prefix || i ORDER BY i * step) FROM generate_series(first, last) i
$$;
-- The keys of two users
CREATE FUNCTION claim_batch(requests text[]) RETURNS bigint LANGUAGE sql AS $$
	SELECT count(*) FROM idem_claim_many(
		(SELECT array_agg('user ' || right(r, 1)::int % 2 ORDER BY n) FROM unnest(requests) WITH ORDINALITY AS t (r, n)), requests)
	WHERE outcome = 'claimed'
$$;
});

sub query
{
	my ($query) = @_;
	return $node->safe_psql('postgres', $query);
}

sub script
{
	my ($name, $content) = @_;
	my $file = $node->basedir . "/$name.sql";
	append_to_file($file, $content);
	return $file;
}

sub no_deadlock
{
	my ($name) = @_;
	unlike(slurp_file($node->logfile), qr/deadlock detected/, "$name: no deadlock");
	return;
}

# Every batch is rolled back, so that all clients compete for the same keys all the time.
my $up = script('up', q{
BEGIN;
SELECT claim_batch(keys(1, 160, 1, 'rolled back '));
ROLLBACK;
});
my $down = script('down', q{
BEGIN;
SELECT claim_batch(keys(81, 240, -1, 'rolled back '));
ROLLBACK;
});
for my $clients (2, 8)
{
	$node->command_ok([ 'pgbench', '-n', '-c', $clients, '-t', 1600 / $clients, '-f', $up, '-f', $down, 'postgres' ],
		"$clients sessions, two batches in opposite order");
	no_deadlock("$clients sessions");
}
cmp_ok(query('SELECT waits FROM idem_stat_claims'), '>', 100, 'they did wait for each other');

# The batches commit: each key of each round is claimed by one of two clients, which run the
# round at about the same time.
my $rounds = 300;
for my $n (1 .. 2)
{
	my ($first, $last, $step) = $n == 1 ? (1, 120, 1) : (61, 180, -1);
	query("CREATE SEQUENCE rounds_$n");
	query(qq{
CREATE PROCEDURE consume_$n() LANGUAGE plpgsql AS \$\$
DECLARE
	requests text[] := keys($first, $last, $step, format('round %s, ', nextval('rounds_$n')));
BEGIN
	INSERT INTO claimed
		SELECT requests[ordinal], $n
		FROM idem_claim_many(array_fill('user'::text, ARRAY[120]), requests)
		WHERE outcome = 'claimed';
END \$\$});
}
my @runs;
for my $n (1 .. 2)
{
	my $consume = script("consume_$n", "CALL consume_$n();\n");
	my $output = '';
	push @runs, IPC::Run::start(
		[
			'pgbench', '-n', '-c', 1, '-t', $rounds, '-f', $consume,
			'-h', $node->host, '-p', $node->port, 'postgres'
		],
		'<', \undef, '>&', \$output,
		IPC::Run::timeout($PostgreSQL::Test::Utils::timeout_default));
}
ok($_->finish, 'a consumer') for @runs;
no_deadlock('consumers');
is(query('SELECT count(*), count(DISTINCT request) FROM claimed'),
	$rounds * 180 . '|' . $rounds * 180, 'each key was claimed once');

# A batch is terminated while another batch waits for it.
my $one = Client->new($node);
my $two = Client->new($node);
$one->ask('BEGIN');
is($one->ask(q{SELECT claim_batch(keys(1, 50, 1, 'interrupted '))}), 50, 'one batch');
$two->send(q{SELECT count(*) FILTER (WHERE outcome = 'claimed'), count(*) FILTER (WHERE outcome = 'completed')
	FROM idem_claim_many((SELECT array_agg('user ' || i % 2 ORDER BY i DESC) FROM generate_series(1, 50) i), keys(1, 50, -1, 'interrupted '))});
ok( $node->poll_query_until('postgres', "SELECT wait_event_type = 'Lock' FROM pg_stat_activity WHERE pid = " . $two->pid),
	'another waits for it');
query('SELECT pg_terminate_backend(' . $one->pid . ')');
is($two->answer, '50|0', 'and has all of it when the first is gone');
is(query(q{SELECT count(*) FROM idem_claims WHERE request_id LIKE 'interrupted %'}), 50, 'nothing is left of the first');

# A batch has one deadline: keys that it does not get time out, and the others are claimed.
$one = Client->new($node);
$one->ask('BEGIN');
$one->ask(q{SELECT claim_batch(keys(1, 99, 1, 'shared '))});
is( $two->ask(q{
		SELECT outcome, count(*), bool_and(clock_timestamp() - statement_timestamp() < interval '10 s')
		FROM idem_claim_many(array_fill('user 1'::text, ARRAY[100]), keys(1, 100, 1, 'shared '), wait => '300 ms')
		GROUP BY outcome ORDER BY outcome}),
	"claimed|50|t\ntimed_out|50|t", 'those that were free, and those that were not; not 300 ms for each');
is( $two->ask(q{
		SELECT outcome, count(*) FROM idem_claim_many(array_fill('user 0'::text, ARRAY[100]), keys(1, 100, 1, 'shared '), wait => '0')
		GROUP BY outcome ORDER BY outcome}),
	"claimed|51\nin_progress|49", 'without waiting');
$one->ask('ROLLBACK');

$one->quit;
$two->quit;
$node->stop;
unlike(slurp_file($node->logfile), qr/TRAP|PANIC|was terminated by signal|WARNING:.*leak/, 'nothing broke');

done_testing();
