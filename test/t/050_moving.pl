# Moving between the editions keeps claims, scopes, tokens, settings and rights; under
# load no request is executed twice, and none is lost.

use strict;
use warnings;

use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use IPC::Run;

use Client;

my $script = 'sql/idem-move.sql';
my $portable = 'sql/idem-portable.sql';

my $node = PostgreSQL::Test::Cluster->new('main');
$node->init;
$node->append_conf(
	'postgresql.conf', q{
shared_preload_libraries = 'idem'
idem.cleanup_databases = 'nothing'
});
$node->start;
$node->safe_psql('postgres', q{
CREATE ROLE owner LOGIN;
CREATE ROLE app LOGIN;
CREATE ROLE operator LOGIN;
CREATE DATABASE shop OWNER owner;
CREATE DATABASE busy;
});

sub as
{
	my ($role, $database, $sql) = @_;
	return $node->safe_psql($database, $sql, extra_params => [ '-U', $role ]);
}

# Returns exit code, output and errors
sub run_script
{
	my ($file, $role, $database, %variables) = @_;
	my ($out, $err) = ('', '');

	IPC::Run::run(
		[
			'psql', '-XAtq', '-h', $node->host, '-p', $node->port, '-U', $role,
			(map { ('-v', "$_=$variables{$_}") } sort keys %variables),
			'-f', $file, $database
		],
		'<', \undef, '>', \$out, '2>', \$err);
	return ($? >> 8, $out, $err);
}

sub moves
{
	my ($to, $claims, $name) = @_;
	my ($status, $out, $err) = run_script($script, 'owner', 'shop', schema => 'requests', to => $to);

	is($status, 0, "$name: moved to $to") or diag $err;
	like($out, qr/^moved from \w+ to $to: $claims claims, 4 scopes$/, "$name: and said so");
	return;
}

sub refuses
{
	my ($to, $message, $name, %variables) = @_;
	my ($status, $out, $err) =
	  run_script($script, 'owner', 'shop', schema => 'requests', to => $to, %variables);

	isnt($status, 0, "$name: refused");
	like($err, $message, "$name: with a message");
	return;
}

# ----- a move keeps everything -----

as('owner', 'shop', q{
CREATE SCHEMA requests;
CREATE SCHEMA other;
CREATE FUNCTION other.idem_try_claim() RETURNS int LANGUAGE sql AS 'SELECT 1';		-- is not idem
});
is((run_script($portable, 'owner', 'shop', schema => 'requests'))[0], 0,
	'the portable edition, from its file, owned by somebody who is no superuser');
is((run_script('sql/idem-citus.sql', 'owner', 'shop', schema => 'requests'))[0], 0,
	'with what distributes it, which the first move drops');
as('owner', 'shop', q{
SELECT requests.idem_grant('app', 'app'), requests.idem_grant('operator', 'operator');
UPDATE requests.idem_settings SET ttl = '2 hours', lease = '1500 ms', lease_max = '2 days',
	result_max_bytes = 2000, cleanup_batch_size = 7, scopes = 'declared';
});
as('operator', 'shop', q{
INSERT INTO requests.idem_scopes (scope, ttl, lease, lease_max, failed, lapsed, expired, result_max_bytes)
	VALUES ('mail', '2 days', '1 min', '2 min', 'retryable', 'unknown', 'reclaim', 10);
INSERT INTO requests.idem_scopes (scope, ttl, key_time) VALUES ('v7', '1 day', 'uuidv7');
INSERT INTO requests.idem_scopes (scope, ttl) VALUES ('short', '1 min'), ('', NULL);
});
my $token = as('app', 'shop', q{
BEGIN;
SELECT FROM requests.idem_claim('user', 'done', fingerprint => '\x0102');
SELECT FROM requests.idem_complete('{"paid": 30}');
SELECT FROM requests.idem_claim('user', 'broken');
SELECT FROM requests.idem_fail('"no"');
SELECT FROM requests.idem_claim('user', 'marker', 'short');
COMMIT;
SELECT token FROM requests.idem_lease('user', 'lapsed', scope => 'mail', lease => '1 us');
SELECT token FROM requests.idem_lease('user', 'held', lease => '1 day', progress => '[1, 2]');
});
($token) = $token =~ /(\d+)\s*$/;

sub content
{
	return as('owner', 'shop', q{
		SELECT * FROM requests.idem_claims ORDER BY request_id;
		SELECT scope, ttl, lease, lease_max, failed, lapsed, expired, key_time, result_max_bytes, guarded_since IS NOT NULL
			FROM requests.idem_scopes ORDER BY scope;
		SELECT last_value, is_called FROM requests.idem_token_seq;
		SELECT a.grantee::regrole, p.proname, p.pronargs FROM pg_proc p, aclexplode(p.proacl) a
			WHERE a.grantee::regrole::text IN ('app', 'operator')
				AND p.proname !~ '^idem_(_|stat_|metrics|cleanup_batch|start_worker)'		-- which differ
				AND p.pronamespace = 'requests'::regnamespace
			ORDER BY 1, 2, 3;
	});
}
my $before = content();
like($before, qr/"paid": 30.*\bmail\b.*v7/s, 'there is something to move');

# The C edition has its settings in postgresql.conf.
refuses(
	'idem',
	qr/settings are not those of idem_settings: idem.cleanup_batch_size is 50000, idem.lease is 30000ms, idem.lease_max is 86400s, idem.result_max_bytes is 1048576B, idem.scopes is any, idem.ttl is 86400s\n.*HINT:  Put into postgresql.conf, each on a line of its own, reload it, and move again: idem.cleanup_batch_size = '7', idem.lease = '1500ms', idem.lease_max = '172800s', idem.result_max_bytes = '2000B', idem.scopes = 'declared', idem.ttl = '7200s'\.$/sm,
	'other settings');
is(content(), $before, 'which changes nothing');

$node->append_conf('postgresql.conf', q{
idem.cleanup_batch_size = '7'
idem.lease = '1500ms'
idem.lease_max = '172800s'
idem.result_max_bytes = '2000B'
idem.scopes = 'declared'
idem.ttl = '7200s'
});
$node->reload;

# From each edition to each, and from the extension idem_portable to itself
my $from = 'portable';
for my $to (qw(idem idem_portable idem_portable idem idem_portable idem))
{
	my $clock = as('owner', 'shop', 'SELECT clock_timestamp()');
	my $guarded = as('owner', 'shop', "SELECT scope, guarded_since FROM requests.idem_scopes WHERE key_time = 'uuidv7'");
	moves($to, 5, 'round trip');
	is(content(), $before, "round trip: all is as it was, in $to");
	if ($from eq 'idem' || $to eq 'idem')
	{
		is(as('owner', 'shop', "SELECT scope FROM requests.idem_scopes WHERE guarded_since >= '$clock'::timestamptz + interval '1 minute'"),
			'v7', 'round trip: but the past is unknown from now on');
	}
	else
	{
		is(as('owner', 'shop', "SELECT scope, guarded_since FROM requests.idem_scopes WHERE key_time = 'uuidv7'"),
			$guarded, 'round trip: and the past as well known as before');
	}
	$from = $to;
}
is(as('owner', 'shop', "SELECT count(*) FROM pg_trigger WHERE tgrelid = 'requests.idem_scopes'::regclass AND tgenabled = 'D'"), '0',
	'no trigger stays disabled');
is( $node->safe_psql('shop', q{
		SELECT string_agg(o.name, ' ') FROM (
			SELECT oid, 'pg_class'::regclass, relname FROM pg_class WHERE relkind NOT IN ('i', 'c')
			UNION ALL SELECT oid, 'pg_proc'::regclass, proname FROM pg_proc WHERE pronamespace = 'requests'::regnamespace
			UNION ALL SELECT oid, 'pg_type'::regclass, typname FROM pg_type WHERE typtype = 'e' OR typname LIKE '%\_\_%') AS o (oid, class, name)
		WHERE o.name LIKE 'idem%'
			AND NOT EXISTS (SELECT FROM pg_depend AS d WHERE d.objid = o.oid AND d.classid = o.class AND d.deptype = 'e')}),
	'', 'nothing of the portable edition stays behind');

(undef, undef, my $complaint) = run_script($portable, 'owner', 'shop', schema => 'requests');
like($complaint, qr/ERROR:  extension "idem" is installed in this database\n/, 'the portable edition beside the C edition: refused');
(undef, undef, $complaint) = $node->psql('shop', 'CREATE EXTENSION idem_portable');
like($complaint, qr/ERROR:  extension "idem" is installed in this database\n/, 'and as an extension');

# A transaction that began before the move does not see the moved policies, and must not use
# defaults instead.
my $old = Client->new($node, 'shop');
$old->ask('BEGIN ISOLATION LEVEL REPEATABLE READ');
$old->ask('SELECT 1');
moves('idem_portable', 5, 'an old snapshot');
is($old->ask("SELECT requests.idem_claim('user', 'new', 'short')"), 'ERROR:  40001', 'an old snapshot claims nothing');
$old->ask('ROLLBACK');
is($old->ask("SELECT requests.idem_claim('user', 'done', fingerprint => '\\x0102')"), 'f', 'the retry gets its answer');
$old->quit;
moves('idem', 5, 'an old snapshot');
refuses('idem', qr/ERROR:  idem is installed as idem already\n.*HINT:  Its next version: ALTER EXTENSION idem UPDATE\./s, 'the C edition to itself');

# Claims are remembered in the other edition.
is( as('app', 'shop', q{
		SELECT outcome, result FROM requests.idem_try_claim('user', 'done', fingerprint => '\x0102');
		SELECT outcome FROM requests.idem_try_claim('user', 'done', fingerprint => '\x03');
		SELECT outcome, result FROM requests.idem_try_claim('user', 'broken');
		SELECT outcome FROM requests.idem_try_claim('user', 'lapsed', 'mail');
		SELECT outcome FROM requests.idem_try_claim('user', 'held', wait => '0');}),
	qq(completed|{"paid": 30}\nmismatch\nfailed|"no"\nunknown\nin_progress), 'requests from before are known');
is(as('app', 'shop', "SELECT requests.idem_complete('user', 'held', '1', $token)"),
	't', 'the holder of a lease settles it with its token');
cmp_ok(as('app', 'shop', "SELECT token FROM requests.idem_lease('user', 'next', lease => '1 s')"),
	'>', $token, 'tokens go on from where they were');
is( as('app', 'shop', "SELECT outcome FROM requests.idem_try_claim('user', '01000000-0000-7000-8000-000000000000', 'v7')"),
	'stale', 'a request that may have been forgotten is stale');

# The settings of the C edition become those of the portable one.
moves('idem_portable', 6, 'settings');
is(as('owner', 'shop', 'SELECT ttl, lease, lease_max, result_max_bytes, cleanup_batch_size, scopes FROM requests.idem_settings'),
	'02:00:00|00:00:01.5|2 days|2000|7|declared', 'settings: kept');

# ----- moves that are refused -----

$before = content();
refuses('', qr/ERROR:  idem can be moved to idem or idem_portable\n.*HINT:  .*run that file/s, 'no edition');
refuses('portable', qr/ERROR:  idem can be moved to idem or idem_portable\n/, 'the file itself');
refuses('idem', qr/ERROR:  there is no idem in schema public/, 'another schema', schema => 'public');
refuses('idem', qr/ERROR:  there is no idem in schema "no such"/, 'no schema', schema => 'no such');
as('owner', 'shop', 'CREATE VIEW requests.mine AS SELECT request_id, state FROM requests.idem_claims');
refuses('idem', qr/view (requests\.)?mine depends on/, 'an object that depends on it');
as('owner', 'shop', 'DROP VIEW requests.mine');
my ($status, $out, $err) = run_script($script, 'app', 'shop', schema => 'requests', to => 'idem');
like($err, qr/ERROR:  idem belongs to role owner\n/, 'somebody else: refused');
($status, $out, $err) = run_script($script, $node->safe_psql('shop', 'SELECT current_user'), 'shop', schema => 'requests', to => 'idem');
like($err, qr/ERROR:  idem belongs to role owner\n/, 'a superuser, too: it would own it from then on');
as('owner', 'shop', 'GRANT CREATE ON SCHEMA requests TO app');
refuses('idem', qr/ERROR:  others may create objects in schema requests: app\n/, 'others who may put objects in the way');
as('owner', 'shop', 'REVOKE CREATE ON SCHEMA requests FROM app');
(undef, undef, $err) = $node->psql('shop', 'CREATE EXTENSION idem');
like(
	$err,
	qr/ERROR:  idem is installed in this database already, in schema requests\n.*HINT:  Move it here with its claims: sql\/idem-move.sql/s,
	'the C edition beside the portable one: refused');
is(content(), $before, 'none of which changes anything');

# ----- under load -----

# Four clients send each request several times, two of them with leases. They ignore errors, of which
# each move causes some. So at the end each request is sent once more.

sub busy
{
	return $node->safe_psql('busy', $_[0]);
}

my $superuser = busy('SELECT current_user');
is((run_script($portable, $superuser, 'busy'))[0], 0, 'load: the portable edition');
busy(q{
UPDATE idem_settings SET ttl = '2 hours', lease = '1500 ms', lease_max = '2 days', result_max_bytes = 2000, cleanup_batch_size = 7, scopes = 'declared';
INSERT INTO idem_scopes (scope) VALUES ('');
CREATE SEQUENCE progress;
CREATE TABLE executions (request int8, client int);
CREATE PROCEDURE execute(request int8, client int) LANGUAGE plpgsql AS $$
BEGIN
	IF idem_claim('user', request::text) THEN
		INSERT INTO executions VALUES (request, client);
		PERFORM idem_complete(to_jsonb(client));
	END IF;
END $$;
CREATE PROCEDURE execute_leased(request int8, client int, token int8) LANGUAGE plpgsql AS $$
BEGIN
	INSERT INTO executions VALUES (request, client);
	PERFORM idem_complete('user', request::text, to_jsonb(client), token);
END $$;
});

my $seed = $ENV{SEED} // 20261121;
note "SEED=$seed";
srand $seed;

my @clients;
for my $client (1 .. 4)
{
	my $file = $node->basedir . "/client_$client.sql";
	my $sql = '';
	for my $n (1 .. 20_000)
	{
		# A little ahead of the other clients or behind them, so that requests collide
		my $ahead = int(rand(40));
		$sql .= "SELECT nextval('progress') / 4 + $ahead AS request \\gset\n";
		$sql .= $client <= 2 ? "CALL execute(:request, $client);\n" : qq{
\\set claimed false
SELECT count(*) > 0 AS claimed, max(token) AS token FROM idem_lease('user', :'request', lease => '2 s') WHERE outcome = 'claimed' \\gset
\\if :claimed
CALL execute_leased(:request, $client, :token);
\\endif
};
	}
	append_to_file($file, $sql);
	push @clients,
	  IPC::Run::start(
		[ 'psql', '-XAtq', '-d', $node->connstr('busy') . ' application_name=client', '-f', $file ],
		'<', \undef, '>', '/dev/null', '2>', $node->basedir . "/client_$client.err");
}

for my $to (qw(idem idem_portable idem_portable idem idem_portable idem))
{
	my $done = busy('SELECT count(*) FROM executions');
	$node->poll_query_until('busy', "SELECT count(*) >= $done + 100 FROM executions")
	  or die 'no request is executed';
	my ($status, $out, $err);
	do
	{
		($status, $out, $err) = run_script($script, $superuser, 'busy', to => $to);
		note $status ? $err : $out;
	} while ($err =~ /deadlock detected/);
	is($status, 0, "load: moved to $to") or diag $err;
}
my $done = busy('SELECT count(*) FROM executions');
$node->poll_query_until('busy', "SELECT count(*) >= $done + 100 FROM executions")
  or die 'no request is executed';
busy("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'client'");
$_->finish for @clients;
$node->poll_query_until('busy', "SELECT count(*) = 0 FROM pg_stat_activity WHERE application_name = 'client'")
  or die 'a client does not end';

busy(q{
SET idem.wait = -1;
DO $$
DECLARE
	last constant int8 := (SELECT max(request_id::int8) FROM idem_claims);
BEGIN
	FOR request IN 0 .. last LOOP
		CALL execute(request, 0);
		COMMIT;
	END LOOP;
END $$});
is(busy('SELECT count(*) FROM (SELECT request FROM executions GROUP BY request HAVING count(*) > 1) AS doubled'),
	'0', 'load: no request was executed twice');
is( busy(q{
		SELECT count(*) FROM executions FULL JOIN idem_claims ON request::text = request_id
		WHERE request IS NULL OR request_id IS NULL OR state::text <> 'completed' OR result <> to_jsonb(client)}),
	'0', 'load: each execution has its claim and result, and each claim its execution');
is(busy('SELECT count(DISTINCT request) = max(request) + 1 FROM executions'), 't', 'load: none was lost');
is(busy('SELECT count(DISTINCT client) FROM executions WHERE client > 0'), '4', 'load: all clients have executed some');
my %complaints;
for my $client (1 .. 4)
{
	$complaints{$_}++ for slurp_file($node->basedir . "/client_$client.err") =~ /ERROR:  (.*)/g;
}
note "$complaints{$_} times: $_" for sort keys %complaints;
note busy("SELECT sum(n) || ' requests, by client ' || string_agg(client || ': ' || n, ', ') FROM (SELECT client, count(*) AS n FROM executions GROUP BY client ORDER BY client) AS c");

$node->stop;
done_testing();
