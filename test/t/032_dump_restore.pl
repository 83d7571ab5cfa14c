# pg_dump and pg_restore keep claims, scopes and tokens, also if the owner of the database runs
# them and is no superuser; and so does a dump as pg_upgrade makes it.

use strict;
use warnings;

use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = PostgreSQL::Test::Cluster->new('main');
$node->init;
$node->start;

$node->safe_psql('postgres', q{
CREATE ROLE owner LOGIN;
CREATE ROLE app LOGIN;
CREATE ROLE operator LOGIN;
CREATE ROLE nobody LOGIN;
CREATE DATABASE shop OWNER owner;
CREATE DATABASE copy OWNER owner;
CREATE DATABASE copy_by_superuser;
});

sub as
{
	my ($role, $database, $sql) = @_;
	return $node->safe_psql($database, $sql, extra_params => [ '-U', $role ]);
}

# The extension is trusted: the owner of the database installs it and grants rights.
as('owner', 'shop', q{
CREATE SCHEMA requests;
CREATE EXTENSION idem SCHEMA requests;
SELECT requests.idem_grant('app', 'app');
SELECT requests.idem_grant('operator', 'operator');
});
as('operator', 'shop', q{
INSERT INTO requests.idem_scopes (scope, ttl, failed) VALUES ('mail', '2 days', 'retryable');
INSERT INTO requests.idem_scopes (scope, ttl, key_time) VALUES ('v7', '1 day', 'uuidv7');
});
is( as('app', 'shop', q{
		BEGIN;
		SELECT requests.idem_claim('user', 'done', fingerprint => '\x0102');
		SELECT requests.idem_complete('{"paid": 30}');
		SELECT requests.idem_claim('user', 'broken', 'mail');
		SELECT requests.idem_fail('"no"');
		COMMIT}),
	"t\nt\nt\nt", 'a role that was granted app claims and settles');
$node->safe_psql('shop', "SELECT nextval('requests.idem_token_seq') FROM generate_series(1, 41)");

sub content
{
	my ($database) = @_;
	return $node->safe_psql($database, q{
		SELECT * FROM requests.idem_claims ORDER BY request_id;
		SELECT scope, ttl, lease, lease_max, failed, lapsed, expired, key_time, result_max_bytes FROM requests.idem_scopes ORDER BY scope;
		SELECT last_value FROM requests.idem_token_seq;
		SELECT grantee, privilege_type FROM information_schema.routine_privileges
			WHERE routine_name IN ('idem_claim', 'idem_forget') AND grantee IN ('app', 'operator')
			ORDER BY 1, 2;
	});
}
my $before = content('shop');
like($before, qr/"paid": 30/, 'there is something to dump');

# The copy does not know what was executed between the dump and the restore.
my $unknown_past = q{SELECT guarded_since > clock_timestamp() FROM requests.idem_scopes WHERE scope = 'v7'};

my @as_owner = ('-h', $node->host, '-p', $node->port, '-U', 'owner');
my $dump = $node->basedir . '/shop.dump';
command_ok([ 'pg_dump', '-Fc', '-f', $dump, @as_owner, 'shop' ],
	'the owner of the database dumps it');
command_ok([ 'pg_restore', '--exit-on-error', '-d', 'copy', @as_owner, $dump ],
	'and restores it');
is(content('copy'), $before, 'with all claims, scopes, tokens and grants');
is(as('app', 'copy', "SELECT requests.idem_claim('user', 'done', fingerprint => '\\x0102')"),
	'f', 'a request from before the dump is a replay in the copy');
is(as('app', 'copy', "SELECT requests.idem_claim('user', 'broken', 'mail')"),
	't', 'and the scopes have their policies');
is($node->safe_psql('copy', $unknown_past), 't', 'a scope with uuidv7 knows nothing of the past');

command_ok(
	[ 'pg_restore', '--exit-on-error', '-d', $node->connstr('copy_by_superuser'), $dump ],
	'a superuser restores it');
is(content('copy_by_superuser'), $before, 'with the same content, and what the owner has granted');
is($node->safe_psql('copy_by_superuser', $unknown_past), 't', 'a scope with uuidv7 knows nothing of the past there');
is(as('app', 'copy_by_superuser', "SELECT requests.idem_claim('user', 'done', fingerprint => '\\x0102')"),
	'f', 'a request from before the dump is a replay there too');
as('owner', 'copy_by_superuser', "SELECT requests.idem_revoke('app', 'app'), requests.idem_grant('operator', 'app')");
like(($node->psql('copy_by_superuser', "SELECT requests.idem_claim('user', 'x')", extra_params => [ '-U', 'app' ]))[2],
	qr/permission denied for function idem_claim/, 'the owner of the schema revokes what it has granted');
# The next dump of the copy has the rights of both grantors.
$node->safe_psql('copy_by_superuser', "SELECT requests.idem_grant('app', 'app')");
$node->safe_psql('postgres', 'CREATE DATABASE second_copy');
command_ok([ 'pg_dump', '-Fc', '-f', "$dump.2", $node->connstr('copy_by_superuser') ], 'a superuser dumps the copy');
command_ok([ 'pg_restore', '--exit-on-error', '-d', $node->connstr('second_copy'), "$dump.2" ], 'and restores it');
is(content('second_copy'), content('copy_by_superuser'), 'with what both have granted');

my ($status, $out, $err) = $node->psql('shop', q{SELECT requests.idem_claim('user', 'x')},
	extra_params => [ '-U', 'nobody' ]);
like($err, qr/permission denied/, 'nobody else may claim');

# A column of the extension was dropped: dump and restore, as the HINT says, bring it back.
$node->safe_psql('copy_by_superuser', 'ALTER TABLE requests.idem_claims DROP COLUMN progress');
($status, $out, $err) = $node->psql('copy_by_superuser', q{SELECT requests.idem_claim('user', 'x')});
like($err, qr/HINT:  Dump this database and restore it:/, 'a table without a column is refused');
$node->safe_psql('postgres', 'CREATE DATABASE whole_again');
$dump = $node->basedir . '/without_column.dump';
command_ok([ 'pg_dump', '-Fc', '-f', $dump, $node->connstr('copy_by_superuser') ], 'it is dumped as the HINT says');
command_ok([ 'pg_restore', '--exit-on-error', '-d', $node->connstr('whole_again'), $dump ],
	'and restored');
is( $node->safe_psql('whole_again', q{
		SELECT requests.idem_claim('user', 'x');
		SELECT requests.idem_claim('user', 'done', fingerprint => '\x0102');
		SELECT requests.idem_result('user', 'done');
		SELECT outcome FROM requests.idem_lease('user', 'y', lease => '1 min', progress => '1')}),
	"t\nf\n{\"paid\": 30}\nclaimed", 'where requests are claimed, and guarded as before');

$node->stop;
done_testing();
