# A leader creates a group in several transactions, and many followers want the group. If the
# leader dies after its rows were committed and before it settled the request, a follower that
# finds the rows heals the request. If it dies earlier, the policy decides.

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
idem.cleanup_databases = 'nothing'
idem.wait = '10 min'
});
$node->start;
$node->safe_psql('postgres', q{
CREATE EXTENSION idem;
INSERT INTO idem_scopes (scope, lapsed) VALUES ('reclaim', 'reclaim'), ('unknown', 'unknown');
CREATE TABLE groups (id int GENERATED ALWAYS AS IDENTITY, name text, created_by text);
});

sub query
{
	my ($query) = @_;
	return $node->safe_psql('postgres', $query);
}

my $leases = 0;

# The leader claims, creates the group in a second transaction, and dies before or after that:
# its session is terminated.
sub leader_dies
{
	my ($name, $scope, $when) = @_;
	my $leader = Client->new($node);
	my $token = $leader->ask(
		"SELECT token FROM idem_lease('user', '$name', scope => '$scope', lease => '1 hour', progress => '\"$when\"')");
	my $create = "INSERT INTO groups (name, created_by) VALUES ('$name', 'leader')";

	$leader->ask('BEGIN');
	$leader->ask("SELECT idem_fence('user', '$name', $token, '$scope')");
	$leader->ask($create);
	$leader->ask('COMMIT') if $when eq 'after';
	query('SELECT pg_terminate_backend(' . $leader->pid . ')');
	ok( $node->poll_query_until('postgres', 'SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE pid = ' . $leader->pid . ')'),
		"$name: the leader is dead");
	is(query("SELECT count(*) FROM groups WHERE name = '$name'"), $when eq 'after' ? 1 : 0,
		"$name: $when its rows were committed");
	return $token;
}

sub lapse
{
	my ($name) = @_;
	query("UPDATE idem_claims SET lease_until = clock_timestamp() - interval '1 s' WHERE request_id = '$name'");
	return;
}

# A follower looks for the rows first. If it finds them it heals, otherwise it claims.
query(q{
CREATE PROCEDURE get_group(name text, scope text, INOUT answer text) LANGUAGE plpgsql AS $$
DECLARE
	claim record;
	found int;
BEGIN
	SELECT id INTO found FROM groups WHERE groups.name = get_group.name;
	IF found IS NOT NULL THEN
		answer := 'healed: ' || idem_heal('user', name, to_jsonb(found), scope);
		COMMIT;
	END IF;
	SELECT * INTO claim FROM idem_lease('user', name, scope => scope, wait => '0', lease => '1 hour');
	COMMIT;
	IF claim.outcome = 'claimed' THEN
		INSERT INTO groups (name, created_by) VALUES (get_group.name, 'follower') RETURNING id INTO found;
		PERFORM idem_complete('user', get_group.name, to_jsonb(found), claim.token, scope);
		claim.result := to_jsonb(found);
	END IF;
	answer := concat_ws(', ', answer, claim.outcome, claim.progress, claim.result = to_jsonb((SELECT id FROM groups WHERE groups.name = get_group.name)));
END $$;
});

sub get_group
{
	my ($name, $scope) = @_;
	return query("CALL get_group('$name', '$scope', NULL)");
}

for my $scope ('reclaim', 'unknown')
{
	# The leader died after its rows: healed while the lease is live, and after it has lapsed.
	for my $state ('live', 'lapsed')
	{
		my $name = "$scope, after, $state";
		my $token = leader_dies($name, $scope, 'after');
		my $waiter = Client->new($node);

		$waiter->send("SELECT outcome, result = (SELECT to_jsonb(id) FROM groups WHERE name = '$name') FROM idem_try_claim('user', '$name', '$scope')")
		  if $state eq 'live';
		lapse($name) if $state eq 'lapsed';
		is(get_group($name, $scope), 'healed: true, completed, "after", t', "$name: a follower finds the rows and heals");
		is($waiter->answer, 'completed|t', "$name: who waited has the result") if $state eq 'live';
		is(get_group($name, $scope), 'healed: false, completed, "after", t', "$name: and whoever comes later");
		is(query("SELECT idem_complete('user', '$name', '\"leader\"', $token, '$scope')"),
			'f', "$name: the leader, risen, is told that it is done");
		is(query("SELECT string_agg(created_by, ', ') FROM groups WHERE name = '$name'"), 'leader', "$name: one group");
		$waiter->quit;
	}

	# The leader died before its rows: while the lease is live, followers get in_progress.
	my $name = "$scope, before";
	my $token = leader_dies($name, $scope, 'before');
	is(get_group($name, $scope), 'in_progress, "before"', "$name: the lease lives");
	lapse($name);
	if ($scope eq 'reclaim')
	{
		is(get_group($name, $scope), 'claimed, "before", t', "$name: a follower takes it over, with its progress");
		my ($status, $out, $err) = $node->psql('postgres',
			"\\set VERBOSITY verbose\nSELECT idem_fence('user', '$name', $token, '$scope')");
		like($err, qr/ID410/, "$name: the leader, risen, is refused");
		is(get_group($name, $scope), 'healed: false, completed, "before", t', "$name: all have the result");
	}
	else
	{
		is(get_group($name, $scope), 'unknown, "before"', "$name: nobody runs it again");
		is(query("SELECT count(*) FROM groups WHERE name = '$name'"), 0, "$name: no group");
		# An operator has found out that the group does not exist, and allows it.
		is(query("SELECT idem_forget('user', '$name', '$scope')"), 't', "$name: until an operator drops it");
		is(get_group($name, $scope), 'claimed, t', "$name: then it is made");
	}
	is(query("SELECT string_agg(created_by, ', ') FROM groups WHERE name = '$name'"), 'follower', "$name: one group");
}

# Many followers heal at once: one of them settles the request.
my $name = 'many';
leader_dies($name, 'unknown', 'after');
my $script = $node->basedir . '/heal.sql';
append_to_file($script, "CALL get_group('$name', 'unknown', NULL)");
$node->command_ok([ 'pgbench', '-n', '-c', 20, '-t', 5, '-f', $script, 'postgres' ], 'many heal');
is(query("SELECT count(*), min(created_by) FROM groups WHERE name = '$name'"), '1|leader', 'one group');
is(query("SELECT state, result = (SELECT to_jsonb(id) FROM groups WHERE name = '$name'), lease_until FROM idem_claims WHERE request_id = '$name'"),
	'completed|t|', 'which is the result');

# The leader is slow, not dead, and completes at the same time: there is one result.
$name = 'slow';
my $leader = Client->new($node);
my $token = $leader->ask("SELECT token FROM idem_lease('user', '$name', lease => '1 hour')");
my $healer = Client->new($node);
$leader->ask('BEGIN');
is($leader->ask("SELECT idem_complete('user', '$name', '\"leader\"', $token)"), 't', 'the leader completes');
$healer->send("SELECT idem_heal('user', '$name', '\"healer\"')");
ok( $node->poll_query_until('postgres', "SELECT wait_event_type = 'Lock' FROM pg_stat_activity WHERE pid = " . $healer->pid),
	'a healer waits for it');
$leader->ask('COMMIT');
is($healer->answer, 'f', 'and has nothing to heal');
is(query("SELECT idem_result('user', '$name')"), '"leader"', 'the result is the leader\'s');
$name = 'slower';
$token = $leader->ask("SELECT token FROM idem_lease('user', '$name', lease => '1 hour')");
$healer->ask('BEGIN');
is($healer->ask("SELECT idem_heal('user', '$name', '\"healer\"')"), 't', 'a healer settles');
$leader->send("SELECT idem_complete('user', '$name', '\"leader\"', $token)");
ok( $node->poll_query_until('postgres', "SELECT wait_event_type = 'Lock' FROM pg_stat_activity WHERE pid = " . $leader->pid),
	'the leader waits for it');
$healer->ask('COMMIT');
is($leader->answer, 'f', 'and is told that it is done');
is(query("SELECT idem_result('user', '$name')"), '"healer"', 'the result is the healer\'s');

$leader->quit;
$healer->quit;
$node->stop;

done_testing();
