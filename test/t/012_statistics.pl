# The statistics of the cleanup.

use strict;
use warnings;

use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

use Client;

my $node = PostgreSQL::Test::Cluster->new('main');
$node->init;
# No worker cleans here, only the test.
$node->append_conf(
	'postgresql.conf', q{
shared_preload_libraries = 'idem'
idem.cleanup_interval = '100ms'
idem.cleanup_databases = 'cleaned'
max_prepared_transactions = 10
});
$node->start;
$node->safe_psql('postgres', q{
	CREATE EXTENSION idem;
	INSERT INTO idem_scopes (scope, ttl) VALUES ('short', '1 ms');
});

sub query
{
	my ($query) = @_;
	return $node->safe_psql('postgres', $query);
}

sub stat_is
{
	my ($columns, $expected, $name) = @_;
	is(query("SELECT $columns FROM idem_stat_cleanup"), $expected, $name);
}

sub fails_with
{
	my ($query, $pattern, $name) = @_;
	my ($status, $out, $err) =
	  $node->psql('postgres', "\\set VERBOSITY verbose\n$query");
	like($err, $pattern, $name);
}

my $request = 0;

sub insert_expired
{
	my ($rows) = @_;
	my $first = $request + 1;
	$request += $rows;
	query("INSERT INTO idem_claims (expires_at, state, request_id, user_id, scope)
		 SELECT '2001-01-01', 'completed', i, 'user', '' FROM generate_series($first, $request) i"
	);
}

my $rows_and_batches = 'rows_deleted, batches, backlog';

# ----- counting -----

stat_is(
	"$rows_and_batches, oldest_expired_age, last_run, errors, last_error, worker_pids, stats_reset",
	'0|0|f|||0||{}|',
	'nothing happened yet');

insert_expired(10);
is(query('SELECT idem_cleanup(4)'), 4, 'idem_cleanup() removes a batch');
stat_is($rows_and_batches, '4|1|t', 'it is counted, and leaves a backlog');
is(query('SELECT idem_cleanup(6)'), 6, 'and what is left');
stat_is($rows_and_batches, '10|2|f', 'which leaves none');
stat_is(
	'last_batch_seconds > 0 AND max_batch_seconds >= last_batch_seconds AND total_batch_seconds >= max_batch_seconds AND last_run IS NOT NULL',
	't',
	'durations');

insert_expired(10);
query('BEGIN; SELECT idem_cleanup(); ROLLBACK');
stat_is($rows_and_batches, '10|2|f', 'a batch that was rolled back is not');
query('BEGIN; SAVEPOINT s; SELECT idem_cleanup(2); ROLLBACK TO s; SELECT idem_cleanup(3); SAVEPOINT t; SELECT idem_cleanup(1); RELEASE t; COMMIT'
);
stat_is($rows_and_batches, '14|4|t', 'savepoints are followed');
query("BEGIN; SELECT idem_cleanup(); PREPARE TRANSACTION 'p'");
query("COMMIT PREPARED 'p'");
stat_is('rows_deleted, batches', '20|5', 'a prepared transaction counts');

insert_expired(10);
query('CALL idem_cleanup_all(3)');
is(query('SELECT count(*) FROM idem_claims'), 0, 'idem_cleanup_all() removes all');
stat_is($rows_and_batches, '30|9|f', 'in batches');

insert_expired(1);
query("UPDATE idem_claims SET expires_at = clock_timestamp() + interval '1 hour'");
is( query(
		"SELECT rows_deleted, more FROM idem__cleanup_step(NULL, '-infinity', 'infinity')"
	),
	'0|f',
	'nobody can clean what has not expired');
stat_is(q{oldest_expired_age}, '00:00:00', 'what expires next is known');
query('TRUNCATE idem_claims; SELECT idem_cleanup()');
stat_is('oldest_expired_age', '', 'and that there is nothing');

for my $batch_size (0, -1, 1000001)
{
	fails_with(
		"SELECT idem_cleanup($batch_size)",
		qr/ID400: .*HINT:/s,
		"idem_cleanup($batch_size) is refused");
}
fails_with('CALL idem_cleanup_all(0)', qr/ID400: .*HINT:/s,
	'and idem_cleanup_all(0)');
fails_with(
	'BEGIN READ ONLY; SELECT idem_cleanup()',
	qr/25006: /, 'idem_cleanup() does not run in a read-only transaction');
fails_with('BEGIN; CALL idem_cleanup_all()',
	qr/25001: .*HINT:.*idem_cleanup\(\)/s, 'idem_cleanup_all() cannot run inside a transaction block');

# ----- the age of the oldest expired claim -----

query(q{BEGIN; SELECT idem_claim('user', 'rolled back', 'short'); ROLLBACK});
stat_is('oldest_expired_age', '', 'a claim that was rolled back is not known');
query(q{BEGIN; SAVEPOINT s; SELECT idem_claim('user', 'rolled back', 'short'); ROLLBACK TO s; COMMIT}
);
stat_is('oldest_expired_age', '', 'nor one in a savepoint');
query(q{SELECT idem_claim('user', 'forgotten', 'short')});
ok( $node->poll_query_until(
		'postgres',
		q{SELECT oldest_expired_age > '1 s' FROM idem_stat_cleanup}),
	'the age grows though nobody cleans');
query('SELECT idem_cleanup()');
stat_is('oldest_expired_age', '', 'until somebody does');

insert_expired(3);
query("UPDATE idem_claims SET expires_at = '-infinity'");
query('SELECT idem_cleanup(1)');
stat_is(q{oldest_expired_age > '100000 years'}, 't', 'a row that expired at -infinity is old');

# ----- savepoints -----

my $before = query('SELECT rows_deleted, batches FROM idem_stat_cleanup');
my ($rows, $batches) = split(/\|/, $before);
query('BEGIN; SAVEPOINT s; SELECT idem_cleanup(1); RELEASE s; SELECT idem_cleanup(1); COMMIT');
stat_is($rows_and_batches, join('|', $rows + 2, $batches + 2, 'f'), 'a savepoint that is released counts');
insert_expired(1);
query(q{BEGIN; SELECT idem_claim('user', 'before the savepoint'); SAVEPOINT s; SELECT idem_cleanup(); RELEASE s; COMMIT});
stat_is($rows_and_batches, join('|', $rows + 3, $batches + 3, 'f'), 'also after a claim');

# ----- batches at the same time -----

my $forget = 'TRUNCATE idem_claims; SELECT idem_cleanup()';
my ($first, $second) = map { Client->new($node) } 1, 2;

query($forget);
insert_expired(10);
is($first->ask('BEGIN; SELECT idem_cleanup()'), 10, 'a session has removed all that it saw');
insert_expired(3);
is(query('SELECT idem_cleanup(1)'), 1, 'another one finds claims that were made meanwhile');
$first->ask('COMMIT');
stat_is('backlog', 't', 'the first one does not end their backlog');
query('SELECT idem_cleanup()');
stat_is('backlog', 'f', 'to remove them does');

$first->ask('BEGIN; SELECT idem_cleanup()');
query(q{SELECT idem_claim('user', 'not seen', 'short')});
$node->poll_query_until('postgres', q{SELECT EXISTS (SELECT FROM idem_claims WHERE expires_at < clock_timestamp())});
is($second->ask('BEGIN; SELECT idem_cleanup(); ROLLBACK'), 1, 'a session sees a claim, and fails');
$first->ask('COMMIT');
stat_is(q{oldest_expired_age > '0'}, 't', 'one that had not seen it does not forget it');

# ----- batches that only pass claims that stay -----

query($forget);
query(q{INSERT INTO idem_scopes (scope, lapsed) VALUES ('careful', 'unknown')});

# Claims of a second, first one that stays as unknown, then others; and claims of the next second.
# "kept" are unknown, too; "locked" are completed, and another session locks them.
sub insert_two_seconds
{
	my ($next) = @_;
	my %columns = (
		kept => "'2001-01-01', i, 'in_progress', 'kept ' || i, 'user', 'careful'",
		locked => "NULL, NULL, 'completed', 'locked ' || i, 'user', ''");
	my $insert = 'INSERT INTO idem_claims (expires_at, lease_until, token, state, request_id, user_id, scope)';
	query("$insert SELECT '2001-01-01', $columns{kept} FROM generate_series(0, 0) AS i");
	query("$insert SELECT '2001-01-01', $columns{locked} FROM generate_series(1, 40) AS i");
	query("$insert SELECT '2001-01-02', $columns{$next} FROM generate_series(41, 80) AS i");
	return;
}

# What a batch answers that waits for a policy at its first claim, for longer than it may pass claims.
# So it ends at the next second.
sub slow_batch
{
	my $cleaner = Client->new($node);
	$first->ask("BEGIN; SELECT FROM idem_claims WHERE request_id LIKE 'locked %' FOR UPDATE");
	$second->ask('BEGIN; LOCK TABLE idem_scopes IN ACCESS EXCLUSIVE MODE');
	$cleaner->send('SELECT rows_deleted, more, next_start::date FROM idem__cleanup_step(NULL, NULL, NULL)');
	$node->poll_query_until('postgres', 'SELECT EXISTS (SELECT FROM pg_locks WHERE NOT granted AND pid = ' . $cleaner->pid . ')');
	$second->ask('SELECT pg_sleep(1.1)');
	$second->ask('COMMIT');
	my $answer = $cleaner->answer;
	$first->ask('COMMIT');
	$cleaner->quit;
	return $answer;
}

insert_two_seconds('locked');
is(slow_batch(), '0|t|2001-01-02', 'a batch that has found nothing but claims that stay, and more of them');
stat_is('backlog', 't', 'which can have others behind them');
$first->ask("BEGIN; SELECT FROM idem_claims WHERE request_id LIKE 'locked %' FOR UPDATE");
is(query('SELECT idem_cleanup()'), 0, 'a batch that has seen all');
$first->ask('COMMIT');
stat_is("backlog, oldest_expired_age > '20 years'", 'f|t', 'claims that others have locked are no backlog');

insert_expired(2);
query("UPDATE idem_claims SET expires_at = '2000-01-01' WHERE request_id !~ ' '");
is(query('SELECT idem_cleanup(1)'), 1, 'a batch leaves claims that can be removed');
stat_is('backlog', 't', 'which is backlog');
query('DELETE FROM idem_claims');
insert_two_seconds('kept');
is(slow_batch(), '0|t|2001-01-02', 'a batch that passes claims, and has not seen all');
stat_is('backlog', 't', 'does not end the backlog');

$before = query('SELECT batches FROM idem_stat_cleanup');
$first->ask('BEGIN; LOCK TABLE idem_scopes IN ACCESS EXCLUSIVE MODE');
query(q{UPDATE idem_claims SET expires_at = '2001-01-03' WHERE request_id LIKE 'locked %'});
$second->send('SELECT idem_cleanup()');
$node->poll_query_until('postgres', 'SELECT EXISTS (SELECT FROM pg_locks WHERE NOT granted AND pid = ' . $second->pid . ')');
$first->ask('SELECT pg_sleep(1.1)');
$first->ask('COMMIT');
is($second->answer, 40, 'idem_cleanup() passes claims until it removes some');
stat_is("batches - $before, backlog", '1|f', 'in one batch');

query(q{TRUNCATE idem_claims; DELETE FROM idem_scopes WHERE scope = 'careful'});
$_->quit for $first, $second;

# ----- metrics -----

query('SELECT idem_stat_reset()');
stat_is(
	"$rows_and_batches, total_batch_seconds, last_batch_seconds, max_batch_seconds, last_run, stats_reset IS NULL",
	'0|0|f|0|0|0||f',
	'idem_stat_reset()');
insert_expired(5);
query('CALL idem_cleanup_all(2)');
is( query(
		q{SELECT name, type, labels, value FROM idem_metrics WHERE name = 'idem_cleanup_rows_total'}
	),
	'idem_cleanup_rows_total|counter|{"database": "postgres"}|5',
	'idem_cleanup_rows_total');
is( query(
		q{SELECT name, type, labels, value FROM idem_metrics WHERE name = 'idem_oldest_expired_age_seconds'}
	),
	'idem_oldest_expired_age_seconds|gauge|{"database": "postgres"}|0',
	'idem_oldest_expired_age_seconds');
is(query(q{SELECT m.value = date_part('epoch', c.last_run) FROM idem_metrics m, idem_stat_cleanup c WHERE m.name = 'idem_cleanup_last_run_timestamp_seconds'}),
	't', 'idem_cleanup_last_run_timestamp_seconds');

my $histogram = 'idem_cleanup_batch_duration_seconds';
is( query(
		"SELECT count(DISTINCT (type, help)) FROM idem_metrics WHERE name LIKE '$histogram%'"
	),
	1,
	'histogram: one type and help for all of its samples');
is( query(
		qq{SELECT (SELECT value FROM idem_metrics WHERE name = '${histogram}_count'),
		(SELECT value FROM idem_metrics WHERE name = '${histogram}_bucket' AND labels->>'le' = '+Inf'),
		(SELECT value > 0 FROM idem_metrics WHERE name = '${histogram}_sum')}
	),
	'3|3|t',
	'histogram: count, +Inf and sum');
is( query(
		qq{SELECT count(*) > 2, bool_and(value >= before)
		FROM (SELECT value, lag(value, 1, 0.0) OVER (ORDER BY replace(labels->>'le', '+Inf', 'Infinity')::float8) AS before
			FROM idem_metrics WHERE name = '${histogram}_bucket') b}
	),
	't|t',
	'histogram: buckets are cumulative');
is( query(
		qq{SELECT count(*) FROM idem_stat_cleanup, idem_metrics
		WHERE name = '${histogram}_sum' AND abs(value - total_batch_seconds) < 1e-9}
	),
	1,
	'the views agree');

# ----- one database does not see another's -----

query('CREATE DATABASE cleaned');
$node->safe_psql('cleaned', q{
	CREATE EXTENSION idem;
	INSERT INTO idem_scopes (scope, ttl) VALUES ('short', '1 ms');
	SELECT idem_claim('user', 'a', 'short');
});
ok( $node->poll_query_until(
		'cleaned',
		q{SELECT rows_deleted = 1 AND batches > 0 AND last_run IS NOT NULL FROM idem_stat_cleanup}
	),
	'the worker counts');
stat_is('rows_deleted', '5', 'for its own database only');
is( $node->safe_psql(
		'cleaned', q{SELECT DISTINCT labels->>'database' FROM idem_metrics}),
	'cleaned',
	'each has its label');

# ----- rights -----

query('CREATE ROLE monitor LOGIN; GRANT pg_monitor TO monitor; CREATE ROLE nobody LOGIN');
for my $view ('idem_stat_cleanup', 'idem_metrics')
{
	is(query("SET ROLE monitor; SELECT count(*) > 0 FROM $view"),
		't', "pg_monitor reads $view");
	fails_with("SET ROLE nobody; SELECT * FROM $view",
		qr/42501: /, "others do not read $view");
}
for my $call (
	'SELECT idem_stat_reset()',
	'SELECT idem_cleanup()',
	'CALL idem_cleanup_all()',
	"SELECT idem__cleanup_step(1, '-infinity', 'infinity')")
{
	fails_with("SET ROLE monitor; $call", qr/42501: /,
		"$call is not for pg_monitor");
}
insert_expired(3);
query("SELECT idem_grant('nobody', 'operator')");
is(query('SET ROLE nobody; SELECT idem_cleanup(1)'), 1, 'an operator cleans');
query('SET ROLE nobody; CALL idem_cleanup_all(); SELECT idem_stat_reset()');
is( query(
		'SET ROLE nobody; SELECT s.rows_deleted, m.value FROM idem_stat_cleanup s, idem_metrics m WHERE m.name = \'idem_cleanup_rows_total\''
	),
	'0|0',
	'and has the statistics');

# ----- another database of the same name -----

query('DROP DATABASE cleaned');
query('CREATE DATABASE cleaned');
(undef, undef, my $warning) = $node->psql('cleaned', 'CREATE EXTENSION idem');
is($warning, '', 'a database that is cleaned: no warning');
(undef, undef, $warning) = $node->psql('template1', 'CREATE EXTENSION idem; DROP EXTENSION idem');
like($warning, qr/^psql:<stdin>:1: WARNING:  no worker for this database: idem\.cleanup_databases does not name it$/m, 'another one: a warning');
is($node->safe_psql('cleaned', 'SELECT rows_deleted FROM idem_stat_cleanup'),
	0, 'a new database of the same name starts at zero');

$node->stop;
unlike(slurp_file($node->logfile), qr/leak|TRAP|PANIC/, 'nothing leaked');

done_testing();
