# Many clients claim the same few keys at the same time, and roll back at random:
# each key is executed once, at every isolation level. IDEM_SEED repeats a run.

use strict;
use warnings;

use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $clients = 8;
my $transactions = 400;
my $attempts_per_key = 16;
my $seed = $ENV{IDEM_SEED} // int(rand(2**31));
diag("IDEM_SEED=$seed");

my $node = PostgreSQL::Test::Cluster->new('main');
$node->init;
$node->append_conf('postgresql.conf', q{
fsync = off
max_pred_locks_per_transaction = 256
});
$node->start;

# The mode of an attempt is how it ends; the script rolls back mode 1.
$node->safe_psql('postgres', q{
CREATE EXTENSION idem;
CREATE SEQUENCE attempts;
CREATE TABLE executions (request text, client int);
CREATE FUNCTION attempt(request text, client int, mode int) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
	claim record;
BEGIN
	IF mode = 2 THEN
		BEGIN
			IF idem_claim('u', request, wait => '1 min') THEN
				INSERT INTO executions VALUES (request, -1);
			END IF;
			RAISE division_by_zero;
		EXCEPTION
			WHEN division_by_zero OR SQLSTATE 'ID417' THEN
		END;
	END IF;
	SELECT * INTO claim
	FROM idem_try_claim('u', request, wait => CASE mode WHEN 3 THEN interval '0' ELSE '1 min' END);
	IF claim.outcome = 'timed_out' THEN
		RAISE EXCEPTION 'attempt of % timed out', request;
	ELSIF claim.outcome = 'claimed' AND mode = 4 THEN
		PERFORM idem_fail('"failed"');
	ELSIF claim.outcome = 'claimed' THEN
		INSERT INTO executions VALUES (request, client);
		PERFORM idem_complete(to_jsonb(client));
	END IF;
	RETURN claim.outcome;
END $$;
});

# The key of the next attempt: attempts close in time try the same key.
my $script = $node->basedir . '/race.sql';
append_to_file($script, qq{
\\set mode random(1, 8)
SELECT nextval('attempts') / $attempts_per_key AS request \\gset
BEGIN;
SELECT attempt(:request::text, :client_id, :mode);
\\if :mode = 1
ROLLBACK;
\\else
COMMIT;
\\endif
});

for my $level ('read committed', 'repeatable read', 'serializable')
{
	$node->safe_psql('postgres', 'TRUNCATE executions, idem_claims; ALTER SEQUENCE attempts RESTART');
	local $ENV{PGOPTIONS} = "-c default_transaction_isolation=" . $level =~ s/ /\\ /r;
	my ($out, $err) = ('', '');
	my $ok = IPC::Run::run(
		[
			'pgbench', '-n', '-c', $clients, '-j', 2, '-t', $transactions,
			'--max-tries=1000', "--random-seed=$seed", '-f', $script,
			'-h', $node->host, '-p', $node->port, 'postgres'
		],
		'>', \$out, '2>', \$err);
	ok($ok && $err !~ /aborted/, "$level: all clients finish") or diag($out, $err);
	like($out, qr/number of failed transactions: 0 /, "$level: and no transaction fails");
	delete $ENV{PGOPTIONS};

	is( $node->safe_psql('postgres', q{
			SELECT count(*) FROM (SELECT FROM executions GROUP BY request HAVING count(*) > 1) AS doubled}),
		'0', "$level: no request is executed twice");
	is( $node->safe_psql('postgres', q{
			SELECT request_id, state, result, client
			FROM idem_claims FULL JOIN executions ON request = request_id
			WHERE CASE state WHEN 'completed' THEN result IS DISTINCT FROM to_jsonb(client)
				WHEN 'failed' THEN client IS NOT NULL OR result <> '"failed"'
				ELSE true END}),
		'', "$level: each claim has its execution and result, each execution its claim");
	my $keys = $node->safe_psql('postgres',
		"SELECT last_value / $attempts_per_key FROM attempts");
	cmp_ok($node->safe_psql('postgres', 'SELECT count(*) FROM idem_claims'),
		'>', $keys * 0.9, "$level: and nearly all are executed or failed");
	is( $node->safe_psql('postgres', q{
			SET enable_seqscan = off;
			SELECT count(*) FROM executions WHERE NOT EXISTS (
				SELECT FROM idem_claims WHERE request_id = request AND user_id = 'u' AND scope = '')}),
		'0', "$level: the index finds them");
}

$node->stop;
done_testing();
