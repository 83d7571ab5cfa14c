# A row that was frozen 2^32 transactions ago still has the id of its writer, which by now can be
# that of the running transaction. The row is not of this transaction, in either edition.

use strict;
use warnings;

use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

use Client;

my $node = PostgreSQL::Test::Cluster->new('main');
$node->init;
$node->append_conf('postgresql.conf', q{
autovacuum = off
track_commit_timestamp = on
});
$node->start;
for my $database (qw(idem idem_portable))
{
	$node->safe_psql('postgres', "CREATE DATABASE $database");
	$node->safe_psql($database, "SET client_min_messages = error; CREATE EXTENSION $database");
	$node->safe_psql($database, q{INSERT INTO idem_scopes (scope, lapsed) VALUES ('asks', 'unknown')});
}

# Leaves rows of one transaction, frozen, and goes on with its id in the next epoch. Returns the id.
sub begin_anew
{
	my ($database) = @_;
	my $old = $node->safe_psql($database, q{
		BEGIN;
		SELECT pg_current_xact_id();
		INSERT INTO idem_claims (expires_at, lease_until, token, state, request_id, user_id, scope) VALUES
			('2001-01-01', '2001-01-01', nextval('idem_token_seq'), 'in_progress', 'lapsed', 'u', ''),
			(now() + '1 day', '2001-01-01', nextval('idem_token_seq'), 'in_progress', 'unknown', 'u', 'asks'),
			(now() + '1 day', now() + '1 day', nextval('idem_token_seq'), 'in_progress', 'live', 'u', '');
		COMMIT;
	});

	$node->safe_psql($_, 'VACUUM FREEZE') for 'postgres', 'idem', 'idem_portable';
	$node->stop;
	my $epoch = $old >> 32;
	$node->command_ok([ 'pg_resetwal', '-e', $epoch + 1, '-x', $old & 0xffffffff, '-D', $node->data_dir ], "$database: the ids begin anew");
	$node->start;
	return $old;
}

for my $database (qw(idem idem_portable))
{
	my $old = begin_anew($database);
	my $client = Client->new($node, $database);
	my $settle = q{SELECT idem_complete('u', '%s', '1', scope => '%s')};

	$client->ask('BEGIN');
	is($client->ask('SELECT pg_current_xact_id()'), $old + 2**32, "$database: the transaction has the writer's id");
	is($client->ask(q{SELECT count(*) FROM idem_claims WHERE xmin = pg_current_xact_id()::xid}), 3, "$database: and the rows show it");
	for my $row ([ 'lapsed', '' ], [ 'unknown', 'asks' ], $database eq 'idem' ? [ 'live', '' ] : ())
	{
		$client->ask('SAVEPOINT s');
		is($client->ask(sprintf($settle, @$row)), 'ERROR:  ID410', "$database, $row->[0]: another's lease is not settled without its token");
		$client->ask('ROLLBACK TO s');
	}
	is($client->ask(q{SELECT outcome FROM idem_try_claim('u', 'unknown', 'asks', wait => '0')}), 'unknown', "$database: an unknown one stays so");
	is($client->ask(q{SELECT outcome FROM idem_lease('u', 'lapsed', lease => '1 min', wait => '0')}), 'claimed', "$database: one that lapsed is claimed");
	is($client->ask(q{SELECT outcome FROM idem_lease('u', 'lapsed', lease => '1 min')}), 'in_progress', "$database: once: the new row is ours");
	# SQL cannot tell a live lease of then from one of now; see doc/portable.md
	is($client->ask(q{SELECT outcome FROM idem_try_claim('u', 'live', wait => '50 ms')}), $database eq 'idem' ? 'timed_out' : 'in_progress',
		"$database: a live lease");
	is($client->ask(q{SELECT idem_complete('u', 'lapsed', '1')}), 't', "$database: our own is settled");
	$client->ask('COMMIT');
	is($client->ask(q{SELECT committed_at IS NULL FROM idem_lookup('u', 'live')}), $database eq 'idem' ? 't' : 'f', "$database: the commit time of a frozen row");
	is($client->ask(q{SELECT committed_at IS NULL FROM idem_lookup('u', 'lapsed')}), 'f', "$database: and of our own");
	$client->quit;
}
$node->stop;
done_testing();
