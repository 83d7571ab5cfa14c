# Databases and settings that are not as they should be: idem.cleanup_databases names missing ones, a
# database refuses connections, is a template, or breaks its sessions; the extension was created
# and rolled back; a setting of idem does not exist.

use strict;
use warnings;

use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = PostgreSQL::Test::Cluster->new('main');
$node->init;
$node->append_conf('postgresql.conf', q{
shared_preload_libraries = 'idem'
idem.cleanup_interval = '100ms'
idem.cleanup_databases = 'postgres, "Not There", later'
idem.no_such_setting = 'x'
idem.wait = '3s'
});
$node->start;
# No session has connected yet.
$node->wait_for_log(qr/WARNING:  database "later", which idem\.cleanup_databases names, does not exist/);

sub query
{
	my ($query, $database) = @_;
	return $node->safe_psql($database // 'postgres', $query);
}

sub error_of
{
	my ($query, $database) = @_;
	my (undef, undef, $err) = $node->psql($database // 'postgres', "\\set VERBOSITY verbose\n$query");
	return $err;
}

sub create_extension
{
	my ($database) = @_;
	query(q{CREATE EXTENSION idem; INSERT INTO idem_scopes (scope, ttl) VALUES ('short', '1 ms')}, $database);
	return;
}

# Nobody has announced this row to the worker.
sub insert_expired
{
	my ($database, $request) = @_;
	query(qq{
		INSERT INTO idem_claims (expires_at, state, request_id, user_id, scope)
		VALUES (date_trunc('second', now()) - interval '1 hour', 'completed', '$request', 'user', '')}, $database);
	return;
}

my $cleaned = 0;

sub is_cleaned
{
	my ($database, $name) = @_;
	my $request = 'request ' . ++$cleaned;

	query("SELECT idem_claim('user', '$request', 'short')", $database);
	ok($node->poll_query_until($database, "SELECT NOT EXISTS (SELECT FROM idem_claims WHERE request_id = '$request')"), $name);
	return;
}

sub warnings_of
{
	my ($offset) = @_;
	return join ' ', slurp_file($node->logfile, $offset) =~ /WARNING:  database "([^"]*)", which idem.cleanup_databases names, does not exist/g;
}

# ----- settings that do not exist -----

like(slurp_file($node->logfile), qr/WARNING:  invalid configuration parameter name "idem.no_such_setting", removing it/,
	'at its start the server says that a setting does not exist');
is(query('SHOW idem.wait'), '3s', 'the others act');
# It starts before the first session has written the server's relation cache file.
unlike(slurp_file($node->logfile), qr/"idem launcher" .* exited|without having selected a database/, 'the launcher stays');

my $offset = -s $node->logfile;
$node->append_conf('postgresql.conf', "idem.wait = '4s'");
$node->reload;
$node->wait_for_log(qr/invalid configuration parameter name "idem.no_such_setting"/, $offset);
ok($node->poll_query_until('postgres', q{SELECT current_setting('idem.wait') = '4s'}), 'a reload says so, and the others act');
like(error_of($_), qr/42704: .*unrecognized configuration parameter "idem.tll"|42602: .*invalid configuration parameter name "idem.tll"/, "refused: $_")
  for ("SET idem.tll = '1 h'", "ALTER SYSTEM SET idem.tll = '1 h'", "ALTER DATABASE postgres SET idem.tll = '1 h'", 'SHOW idem.tll');
{
	local $ENV{PGOPTIONS} = '-c idem.tll=1h';
	like(error_of('SELECT 1'), qr/invalid configuration parameter name "idem.tll"/, 'refused: a connection with such a setting');
}

# ----- idem.cleanup_databases names what is not there -----

create_extension('postgres');
is_cleaned('postgres', 'idem.cleanup_databases with missing databases: the one that exists is cleaned');
insert_expired('postgres', 'reload');
$offset = -s $node->logfile;
$node->reload;
ok($node->poll_query_until('postgres', q{SELECT NOT EXISTS (SELECT FROM idem_claims WHERE request_id = 'reload')}), 'likewise after a reload');
is(warnings_of($offset), 'Not There later', 'each missing one is reported once');
$offset = -s $node->logfile;
query('CREATE DATABASE later');
create_extension('later');
is_cleaned('later', 'one that is created later is cleaned');
is(warnings_of($offset), '', 'without another report');

query(q{ALTER SYSTEM SET idem.cleanup_databases = 'missing'});
$node->reload;
ok($node->poll_query_until('postgres', q{SELECT cleaning LIKE '%idem.cleanup_databases does not name it' FROM idem_stat_cleanup}), 'with nothing but missing ones, the views say that nobody cleans');
$node->wait_for_log(qr/WARNING:  database "missing", which idem.cleanup_databases names, does not exist/, $offset);
query('ALTER SYSTEM SET idem.cleanup_databases = \'\'');
$node->reload;
is_cleaned('postgres', 'cleaned again');

# ----- databases that refuse connections, or whose sessions fail -----

query('ALTER DATABASE later CONNECTION LIMIT 0');
is_cleaned('later', 'a database with a connection limit of 0 is cleaned');
query(q{ALTER DATABASE later SET session_preload_libraries = 'no_such_library'});
like(error_of('SELECT 1', 'later'), qr/could not access file/, 'sessions of a database fail');
query('ALTER DATABASE later RESET session_preload_libraries');
insert_expired('later', 'kept');
query(q{
	ALTER DATABASE later SET session_preload_libraries = 'no_such_library';
	ALTER DATABASE later SET default_transaction_read_only = on;
	ALTER DATABASE later SET statement_timeout = 1;
	ALTER DATABASE later SET row_security = off;
	ALTER DATABASE later SET search_path = nothing});
$node->reload;
is_cleaned('postgres', 'and the others are cleaned');
query($_) for ('ALTER DATABASE later RESET session_preload_libraries', 'ALTER DATABASE later RESET ALL');
ok($node->poll_query_until('later', q{SELECT NOT EXISTS (SELECT FROM idem_claims WHERE request_id = 'kept')}), 'so was that one');

insert_expired('later', 'kept');
query('ALTER DATABASE later ALLOW_CONNECTIONS false');
$offset = -s $node->logfile;
$node->reload;
is_cleaned('postgres', 'while a database refuses connections, another is cleaned');
$node->restart;
is_cleaned('postgres', 'also after a restart');
unlike(slurp_file($node->logfile, $offset), qr/not currently accepting connections/, 'no worker knocks there');
query('ALTER DATABASE later ALLOW_CONNECTIONS true');
ok($node->poll_query_until('later', q{SELECT NOT EXISTS (SELECT FROM idem_claims WHERE request_id = 'kept')}), 'cleaned when it accepts them again');

# ----- templates -----

query('ALTER DATABASE later IS_TEMPLATE true');
is_cleaned('later', 'a template is cleaned');
query(q{SELECT idem_claim('user', 'of the template')}, 'later');
query('CREATE DATABASE copy TEMPLATE later');
is(query(q{SELECT idem_claim('user', 'of the template')}, 'copy'), 'f', 'a copy has the claims of its template');
is_cleaned('copy', 'and is cleaned');
create_extension('template1');
query('CREATE DATABASE new');
is_cleaned('new', 'a database that got the extension from template1 is cleaned');

# ----- created and rolled back -----

query('CREATE DATABASE undone TEMPLATE template0');
$offset = -s $node->logfile;
my $session = $node->background_psql('undone');
$session->set_query_timer_restart();
for (1 .. 3)
{
	$session->query_safe(q{BEGIN; CREATE EXTENSION idem; INSERT INTO idem_scopes (scope, ttl) VALUES ('short', '1 ms')});
	$session->query_safe(q{SELECT idem_claim('user', 'undone', 'short'); SAVEPOINT s; SELECT idem_lease('user', 'lease', lease => '1 s')});
	$session->query_safe(q{ROLLBACK});
	$node->reload;
}
is_cleaned('postgres', 'the extension created and rolled back: others are cleaned');
like($session->query_safe(q{SELECT to_regclass('idem_claims') IS NULL}), qr/^t$/, 'nothing of it is left');
create_extension('undone');
like($session->query_safe(q{SELECT idem_claim('user', 'undone')}), qr/^t$/m, 'created at last, the same session claims');
is_cleaned('undone', 'and it is cleaned');
$session->quit;
unlike(slurp_file($node->logfile, $offset), qr/removing expired claims/, 'no worker met an error');

$node->stop;
unlike(slurp_file($node->logfile), qr/leak|TRAP|PANIC|was terminated by signal/, 'nothing broke');

done_testing();
