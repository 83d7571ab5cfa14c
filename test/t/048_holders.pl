# Who holds a request: the DETAIL of ID409 and ID503, the views idem_holders and idem_unsettled, and
# when a row was committed (idem_lookup). In both editions, with waiters that wait, are cancelled
# and are terminated.

use strict;
use warnings;

use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

use Client;

my $node = PostgreSQL::Test::Cluster->new('main');
$node->init;
$node->append_conf('postgresql.conf', q{
shared_preload_libraries = 'idem'
idem.cleanup_databases = 'none'
max_prepared_transactions = 5
track_commit_timestamp = on
TimeZone = 'Asia/Kolkata'
});
$node->start;
$node->safe_psql('postgres', "CREATE ROLE $_ LOGIN") for qw(app operator monitor stranger);
$node->safe_psql('postgres', 'GRANT pg_monitor TO monitor');
for my $database (qw(c portable elsewhere))
{
	$node->safe_psql('postgres', "CREATE DATABASE $database");
	$node->safe_psql($database, 'CREATE EXTENSION ' . ($database eq 'portable' ? 'idem_portable SCHEMA public' : 'idem'));
	$node->safe_psql($database, q{SELECT idem_grant('app', 'app'), idem_grant('operator', 'operator')});
}

sub ask
{
	my ($database, $role, $sql) = @_;
	return $node->safe_psql($database, $sql, extra_params => [ '-U', $role ]);
}

# SQLSTATE and DETAIL of the error that app gets
sub complaint
{
	my ($database, $sql, $role) = @_;
	my (undef, undef, $err) = $node->psql($database, $sql, on_error_stop => 0, extra_params => [ '-U', $role // 'app', '-v', 'VERBOSITY=verbose' ]);
	my ($state) = $err =~ /ERROR: +(\w{5}):/;
	my ($detail) = $err =~ /^DETAIL: +(.*)$/m;

	return join(' ', $state // $err, $detail // ());
}

sub holder
{
	my ($database, @statements) = @_;
	my $holder = Client->new($node, $database);

	$holder->ask($_) for @statements;
	return $holder;
}

# Begins a claim that waits, and returns once the server knows that it waits.
sub waiter
{
	my ($database, $sql, $role) = @_;
	my $waiter = Client->new($node, $database);

	$waiter->ask('SET ROLE ' . ($role // 'app'));
	$waiter->send($sql);
	$node->poll_query_until('postgres', 'SELECT wait_event IS NOT NULL AND state = \'active\' FROM pg_stat_activity WHERE pid = ' . $waiter->pid)
	  or die 'it does not wait';
	return $waiter;
}

sub begin_of
{
	my ($client) = @_;
	return $node->safe_psql('postgres', q{SELECT to_char(xact_start, 'YYYY-MM-DD HH24:MI:SSOF') FROM pg_stat_activity WHERE pid = } . $client->pid);
}

my $holders = q{SELECT request_id, pid, gid, lease_until > now() AS live, waiters FROM idem_holders ORDER BY 1, 2};
my $lease = q{SELECT outcome, token FROM idem_lease('u', '%s', lease => '1 h')};

sub becomes
{
	my ($database, $query, $expected, $what, $role) = @_;
	local $ENV{PGUSER} = $role if defined $role;

	ok($node->poll_query_until($database, $query, $expected), $what)
	  or diag($node->safe_psql($database, $query));
	return;
}

# ----- the DETAIL -----

my $claim = q{SELECT idem_claim('u', '%s', wait => '%s')};
my $names = 'Scope "", user "u", request "%s".';
my $time = qr/\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\+05:30/;

my $holder = holder('c', 'BEGIN', q{SELECT idem_claim('u', 'tx')},
	'SAVEPOINT s', q{SELECT idem_claim('u', 'sub')}, 'RELEASE s', 'SAVEPOINT s', q{SELECT idem_claim('u', 'open sub')});
my $named = 'Process ' . $holder->pid . ' holds it, in a transaction that began at ' . begin_of($holder) . '.';
for my $request ('tx', 'sub', 'open sub')
{
	is(complaint('c', sprintf($claim, $request, 0)), "ID409 " . sprintf($names, $request) . " $named", "$request: no wait, the holder is named");
	is(complaint('c', sprintf($claim, $request, '20 ms')), "ID503 " . sprintf($names, $request) . " $named", "$request: after a wait");
}
like(slurp_file($node->logfile), qr/request "tx"\. \Q$named\E/, 'the log names the holder, too');
is(complaint('c', q{SET idem.wait = '20 ms'; SELECT idem_heal('u', 'tx', '1')}), 'ID503 ' . sprintf($names, 'tx') . " $named", 'a call that settles');
is(complaint('c', q{BEGIN; SELECT count(*) FROM pg_stat_activity; } . sprintf($claim, 'tx', 0)), 'ID409 ' . sprintf($names, 'tx') . " $named",
	'a session that has looked at pg_stat_activity before');
$holder->ask('ROLLBACK');
$holder->ask($_) for 'SET track_activities = off', 'BEGIN', q{SELECT idem_claim('u', 'tx')};
is(complaint('c', sprintf($claim, 'tx', 0)), 'ID409 ' . sprintf($names, 'tx') . ' Process ' . $holder->pid . ' holds it.', 'a process that does not tell when');
$holder->quit;

$holder = holder('c', 'BEGIN', 'ALTER SEQUENCE idem_token_seq CACHE 1');
is(complaint('c', q{BEGIN; SET LOCAL lock_timeout = '50 ms'; SELECT idem_lease('u', 'new', lease => '1 min', wait => '1 min')}),
	'55P03', 'a change of the tokens: lock_timeout');
$holder->ask('ROLLBACK; BEGIN; ALTER INDEX idem_claims_expires_at_idx SET TABLESPACE pg_default');
is(complaint('c', sprintf($claim, 'new', 0)), 'ID409 ' . sprintf($names, 'new') . ' A transaction that changes an index of idem_claims, or idem_token_seq, holds it up.', 'a change of an index');
$holder->quit;

$node->safe_psql('c', q{BEGIN; SELECT txid_current(); PREPARE TRANSACTION 'another'});
$node->safe_psql('c', q{BEGIN; SELECT idem_claim('u', 'prepared'); PREPARE TRANSACTION 'my "gid"'});
like(complaint('c', sprintf($claim, 'prepared', 0)), qr/^ID409 Scope "", user "u", request "prepared"\. Prepared transaction "my "gid"" holds it, since $time\.$/, 'a prepared transaction');

for my $database (qw(c portable))
{
	my $token = ask($database, 'app', sprintf($lease, 'leased')) =~ s/.*\|//r;
	my $until = $node->safe_psql($database, q{SELECT to_char(date_trunc('second', lease_until + interval '999999 us'), 'YYYY-MM-DD HH24:MI:SSOF') FROM idem_claims WHERE request_id = 'leased'});

	is(complaint($database, sprintf($claim, 'leased', $_ ? '20 ms' : 0)), ($_ ? 'ID503 ' : 'ID409 ') . sprintf($names, 'leased') . " A lease holds it until $until.",
		"$database: a lease, wait $_") for 0, 1;
	like(complaint($database, "BEGIN; " . sprintf($lease, 'own') . '; ' . sprintf($claim, 'own', 0)), qr/ A lease holds it until $time\.$/, "$database: a lease of the same transaction");

	# Its holder has the row locked.
	my $fenced = holder($database, 'BEGIN', "SELECT idem_fence('u', 'leased', $token)");
	like(complaint($database, "SET idem.wait = '20 ms'; SELECT idem_heal('u', 'leased', '1')"),
		$database eq 'c' ? qr/^ID503 .* Process ${\$fenced->pid} holds it, / : qr/^ID503 .* A lease holds it until /, "$database: a fence");
	$fenced->quit;
}
$holder = holder('portable', 'BEGIN', q{SELECT idem_claim('u', 'tx')});
is(complaint('portable', sprintf($claim, 'tx', 0)), 'ID409 ' . sprintf($names, 'tx') . ' Another transaction was in the way.', 'portable: SQL does not see who');
$holder->quit;

$holder = holder('c', 'SET ROLE operator', 'BEGIN', 'LOCK TABLE idem_scopes IN EXCLUSIVE MODE');
is(complaint('c', sprintf($claim, 'new', 0)), 'ID409 ' . sprintf($names, 'new') . ' A transaction that changes idem_scopes holds it up.', 'a change of a policy');
$holder->quit;

# The holder comes and goes. Whatever is said of it is one of these sentences, with its pid.
$node->safe_psql('c', q{
CREATE TABLE said (sentence text);
GRANT INSERT ON said TO app;
CREATE PROCEDURE come_and_go() LANGUAGE plpgsql AS $$
BEGIN
	FOR i IN 1 .. 3000 LOOP
		PERFORM idem_claim('u', 'race');
		ROLLBACK;
	END LOOP;
END $$;
CREATE PROCEDURE listen() LANGUAGE plpgsql AS $$
DECLARE
	detail text;
BEGIN
	FOR i IN 1 .. 3000 LOOP
		BEGIN
			PERFORM idem_claim('u', 'race', wait => '0');
			RAISE SQLSTATE 'X0001';
		EXCEPTION WHEN SQLSTATE 'X0001' THEN
			NULL;
		WHEN SQLSTATE 'ID409' THEN
			GET STACKED DIAGNOSTICS detail = PG_EXCEPTION_DETAIL;
			INSERT INTO said VALUES (detail);
		END;
		COMMIT;
	END LOOP;
END $$});
$holder = Client->new($node, 'c');
my $listener = Client->new($node, 'c');
$holder->send('CALL come_and_go()');
$listener->send('CALL listen()');
$_->answer for $holder, $listener;
is($node->safe_psql('c', qq{SELECT DISTINCT regexp_replace(sentence, 'Process ${\$holder->pid} holds it, in a transaction that began at [-0-9 :+]+[.]\$', 'Its holder') FROM said
		WHERE sentence !~ 'Its holder is gone by now[.]\$'}), 'Scope "", user "u", request "race". Its holder',
	'a holder that comes and goes is named, or is gone');
$_->quit for $holder, $listener;
$node->safe_psql('c', q{DELETE FROM idem_claims});

# ----- idem_holders and idem_unsettled -----

is($node->safe_psql('c', $holders), '', 'nothing is waited for, nothing is leased');
$holder = holder('c', 'BEGIN', q{SELECT idem_claim('u', 'tx', 's')});
my $pid = $holder->pid;
is($node->safe_psql('c', $holders), '', 'a transaction that nobody waits for is not listed');
ask('c', 'app', sprintf($lease, 'leased'));
is($node->safe_psql('c', $holders), 'leased|||t|0', 'a lease is');

my @waiters = map { waiter('c', "SELECT idem_claim('u', '$$_[0]', '$$_[1]', wait => '10 min')") } [ 'tx', 's' ], [ 'tx', 's' ], [ 'leased', '' ], [ 'prepared', '' ];
my $all = qq{leased|||t|1\nprepared||my "gid"||1\ntx|$pid|||2};
becomes('c', $holders, $all, 'those who are waited for, and how many wait');
for my $role (qw(operator monitor))
{
	is(ask('c', $role, $holders), $all, "$role sees them");
	is(ask('c', $role, "SELECT to_char(since, 'YYYY-MM-DD HH24:MI:SSOF') FROM idem_holders WHERE request_id = 'tx'"), begin_of($holder), "$role: since when");
	is(ask('c', $role, "SELECT since = prepared FROM idem_holders, pg_prepared_xacts WHERE request_id = 'prepared' AND pg_prepared_xacts.gid <> 'another'"), 't', "$role: since it was prepared");
	is(ask('c', $role, 'SELECT scope, user_id, request_id, status, expires_at > lease_until FROM idem_unsettled'), '|u|leased|live|t', "$role: what is not settled");
}
is($node->safe_psql('elsewhere', $holders), '', 'another database does not list them');
for my $database (qw(c portable))
{
	for my $role (qw(app stranger))
	{
		like(complaint($database, "SELECT * FROM $_", $role), qr/^42501/, "$database: $role may not read $_") for qw(idem_holders idem_unsettled);
	}
}
like(complaint('c', "SELECT $_"), qr/^42501/, "app may not call $_") for 'idem__held_keys()', 'idem__unsettled_claims()';

# However a wait ends, nobody waits any more.
$node->safe_psql('postgres', 'SELECT pg_cancel_backend(' . $waiters[0]->pid . ')');
is($waiters[0]->answer, 'ERROR:  57014', 'a waiter is cancelled');
becomes('c', $holders, $all =~ s/\|2$/|1/r, 'and is not listed any more');
$node->safe_psql('postgres', 'SELECT pg_terminate_backend(' . $waiters[2]->pid . ')');
becomes('c', $holders, qq{leased|||t|0\nprepared||my "gid"||1\ntx|$pid|||1}, 'nor is one that is terminated');
my $idle = Client->new($node, 'c');
is($idle->ask(q{BEGIN; SELECT outcome FROM idem_try_claim('u', 'tx', 's', wait => '50 ms')}), 'timed_out', 'a waiter gives up');
is($idle->ask(q{SELECT outcome FROM idem_try_claim('u', 'leased', wait => '50 ms')}), 'timed_out', 'also of a lease');
is($node->safe_psql('c', $holders), qq{leased|||t|0\nprepared||my "gid"||1\ntx|$pid|||1}, 'and its transaction goes on');
is($idle->ask(q{SAVEPOINT s; SET LOCAL lock_timeout = '50 ms'; SELECT idem_claim('u', 'tx', 's', wait => '10 min')}), 'ERROR:  55P03', 'its lock_timeout passes');
is($idle->ask(q{ROLLBACK TO s; SET LOCAL statement_timeout = '50 ms'; SELECT idem_claim('u', 'leased', wait => '10 min')}), 'ERROR:  57014', 'its statement_timeout passes');
is($node->safe_psql('c', $holders), qq{leased|||t|0\nprepared||my "gid"||1\ntx|$pid|||1}, 'in a transaction that is still open');
$idle->quit;
$node->safe_psql('c', q{ROLLBACK PREPARED 'my "gid"'});
is($waiters[3]->answer, 't', 'the prepared transaction is rolled back: its waiter claims');
$holder->ask('COMMIT');
is($waiters[1]->answer, 'f', 'the transaction commits: its waiter is told so');
is($node->safe_psql('c', $holders), 'leased|||t|0', 'only the lease is left');
$_->quit for $holder, @waiters[0, 1, 3];

# A lease whose holder has locked it: both are shown.
my $token = ask('c', 'app', sprintf($lease, 'fenced')) =~ s/.*\|//r;
$holder = holder('c', 'BEGIN', "SELECT idem_fence('u', 'fenced', $token)");
my $healer = waiter('c', q{SET idem.wait = -1; SELECT idem_heal('u', 'fenced', '1')});
becomes('c', "SELECT pid, lease_until > now(), waiters FROM idem_holders WHERE request_id = 'fenced'", $holder->pid . '|t|1', 'a lease and its fence');
$holder->ask('COMMIT');
is($healer->answer, 't', 'and it is healed');
$_->quit for $holder, $healer;

# ----- what the portable edition sees -----

$holder = holder('portable', 'BEGIN', q{SELECT idem_claim('u', 'tx')});
$node->safe_psql('portable', q{BEGIN; SELECT idem_claim('u', 'prepared'); PREPARE TRANSACTION 'portable'});
@waiters = map { waiter('portable', "SELECT idem_claim('u', '$_', wait => '10 min')") } qw(tx tx prepared);
my $seen = $holders =~ s/ORDER BY.*/ORDER BY request_id, pid/r;
becomes('portable', $seen, "leased|||t|\n|" . $holder->pid . "|||2\n||portable||1", 'leases, and who is waited for');
# A waiter that looks again for a moment is not seen in it.
becomes('portable', $seen, "leased|||t|\n|" . $holder->pid . "|||2\n||portable||1", "$_ sees them", $_) for qw(operator monitor);
becomes('portable', "SELECT to_char(since, 'YYYY-MM-DD HH24:MI:SSOF') FROM idem_holders WHERE pid IS NOT NULL", begin_of($holder), 'monitor: since when', 'monitor');
becomes('portable', 'SELECT since IS NULL FROM idem_holders WHERE pid IS NOT NULL', 't', 'an operator that may not see it does not', 'operator');
is(ask('portable', $_, 'SELECT request_id, status FROM idem_unsettled'), 'leased|live', "$_: what is not settled") for qw(operator monitor);
$node->safe_psql('portable', q{ROLLBACK PREPARED 'portable'});
$holder->ask('COMMIT');
is(join(' ', map { $_->answer } @waiters), 'f f t', 'they are answered');
$_->quit for $holder, @waiters;

# What is unsettled, in every status
for my $database (qw(c portable))
{
	$node->safe_psql($database, q{
TRUNCATE idem_claims;
INSERT INTO idem_scopes (scope, lapsed, expired) VALUES ('unknown', 'unknown', 'reclaim'), ('reclaim', 'reclaim', 'reclaim');
SELECT idem_lease('u', r, scope => s, lease => '1 min') FROM unnest('{live,lapsed,expired}'::text[]) AS r, unnest(ARRAY['', 'unknown', 'reclaim']) AS s;
SELECT idem_claim('u', 'marker');
});
	$node->safe_psql($database, q{UPDATE idem_claims SET lease_until = clock_timestamp() - interval '1 min' WHERE request_id = 'lapsed';
UPDATE idem_claims SET lease_until = clock_timestamp() - interval '1 h', expires_at = clock_timestamp() - interval '1 s' WHERE request_id = 'expired'});
	is($node->safe_psql($database, q{SELECT scope, request_id, status FROM idem_unsettled ORDER BY request_id, scope COLLATE "C"}),
		"|expired|lapsed\nunknown|expired|unknown\n|lapsed|lapsed\nreclaim|lapsed|lapsed\nunknown|lapsed|unknown\n|live|live\nreclaim|live|live\nunknown|live|live",
		"$database: what is not settled");
	is($node->safe_psql($database, q{SELECT string_agg(DISTINCT request_id, ' ' ORDER BY request_id) FROM (SELECT request_id FROM idem_unsettled LIMIT 2) AS oldest}), 'expired',
		"$database: the oldest first");
	is($node->safe_psql($database, q{SELECT count(*) FROM idem_holders}), '3', "$database: who holds a lease that lapsed is not known");
}

# ----- when it was committed -----

my $committed = q{SELECT committed_at = pg_xact_commit_timestamp(c.xmin) FROM idem_claims AS c, idem_lookup('u', 'marker') WHERE c.request_id = 'marker'};
for my $database (qw(c portable))
{
	is($node->safe_psql($database, $committed), 't', "$database: when the claim was committed");
	is(ask($database, 'app', q{SELECT committed_at > now() - interval '10 min' AND committed_at < now() FROM idem_lookup('u', 'marker')}), 't', "$database: an application sees it");
	is($node->safe_psql($database, q{BEGIN; SELECT committed_at IS NULL FROM idem_claim('u', 'own'), idem_lookup('u', 'own'); SELECT committed_at IS NULL FROM idem_lookup('u', 'own'); ROLLBACK}),
		't', "$database: a row that is not committed yet");
	$node->safe_psql($database, 'VACUUM (FREEZE) idem_claims');
	is($node->safe_psql($database, $committed), 't', "$database: a frozen row");
}
$node->append_conf('postgresql.conf', 'track_commit_timestamp = off');
$node->restart;
my $unknown = q{SELECT state, committed_at IS NULL FROM idem_lookup('u', 'marker')};
is($node->safe_psql($_, $unknown), 'completed|t', "$_: the server does not track commits") for qw(c portable);
$node->append_conf('postgresql.conf', 'track_commit_timestamp = on');
$node->restart;
is($node->safe_psql($_, $unknown), 'completed|t', "$_: nor does it know what was committed in the meantime") for qw(c portable);

# ----- without preload -----

$node->append_conf('postgresql.conf', "shared_preload_libraries = ''");
$node->restart;
my ($status, $out, $err) = $node->psql('c', $holders);
my $is_shared = $node->pg_version >= 17;
is($out, join("\n", ('live|||t|' . ($is_shared ? 0 : '')) x 3), 'without preload: leases only');
if ($is_shared)
{
	is($err, '', 'from PostgreSQL 17 on, with their waiters');
}
else
{
	like($err, qr/WARNING:  idem must be loaded via "shared_preload_libraries" to know who waits/, 'and it says so');
}
$holder = holder('c', 'BEGIN', q{SELECT idem_claim('u', 'tx')});
like(complaint('c', sprintf($claim, 'tx', 0)), qr/ Process ${\$holder->pid} holds it, /, 'the holder is named all the same');
my $waiter = waiter('c', q{SELECT idem_claim('u', 'tx', wait => '10 min')});
$holder->ask('ROLLBACK');
is($waiter->answer, 't', 'and a waiter claims');
$_->quit for $holder, $waiter;

$node->stop;
done_testing();
