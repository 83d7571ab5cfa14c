# With debug_discard_caches every lock discards the caches: a call must read them again, and
# must end. Only a server built with assertions has the setting.

use strict;
use warnings;

use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = PostgreSQL::Test::Cluster->new('main');
$node->init;
$node->start;
my ($status) = $node->psql('postgres', 'SET debug_discard_caches = 1');
if ($status != 0)
{
	$node->stop;
	plan skip_all => 'the server is built without debug_discard_caches';
}

$node->safe_psql('postgres', q{
	CREATE EXTENSION idem;
	INSERT INTO idem_scopes (scope, ttl, failed) VALUES ('s', '1 day', 'retryable')});

# Each statement in a session of its own, since an error resets the setting
sub answer
{
	my ($sql) = @_;
	return $node->safe_psql('postgres', qq{
		SET statement_timeout = '60s';
		SET debug_discard_caches = 1;
		$sql});
}

is(answer(q{SELECT idem_status('u', 'r') IS NULL}), 't', 'a read ends');
is(answer(q{SELECT idem_claim('u', 'r')}), 't', 'a claim ends');
is(answer(q{SELECT idem_claim('u', 'r')}), 'f', 'so does a replay');
is(answer(q{SELECT idem_status('u', 'r')}), 'completed', 'and a read of it');
is( answer(q{SELECT outcome FROM idem_lease('u', 'leased', scope => 's', lease => '1 min')}),
	'claimed', 'a lease');
is( answer(q{SELECT idem_extend('u', 'leased', token, '1 min', '{}', 's') IS NOT NULL FROM idem_claims WHERE request_id = 'leased'}),
	't', 'its extension');
is( answer(q{SELECT outcome FROM idem_try_claim('u', 'leased', 's', wait => '10 ms')}),
	'timed_out', 'a wait for it');
is(answer(q{SELECT idem_fail('u', 'leased', '1', token, 's') FROM idem_claims WHERE request_id = 'leased'}),
	't', 'its end');
is(answer(q{SELECT idem_claim('u', 'leased', 's')}), 't', 'a claim in place');
is( answer(q{SELECT string_agg(outcome::text, ' ' ORDER BY ordinal) FROM idem_claim_many(ARRAY['u', 'u', 'u'], ARRAY['r', 'r2', 'r3'])}),
	'completed claimed claimed',
	'a batch');
is(answer(q{BEGIN; SELECT idem_claim('u', 'done'); SELECT idem_complete('1'); COMMIT}),
	"t\nt", 'a claim and its result');
is(answer(q{SELECT idem_forget('u', 'done')}), 't', 'a removal');
is(answer(q{UPDATE idem_claims SET expires_at = '2001-01-01'; SELECT idem_cleanup()}),
	4, 'a cleaning');

$node->stop;
done_testing();
