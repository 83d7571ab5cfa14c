# Who may call idem_start_worker(), and what the workers that it starts give to whom: nothing. They
# run as the bootstrap superuser, in a database whose owner is not trusted.

use strict;
use warnings;

use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = PostgreSQL::Test::Cluster->new('main');
$node->init;
$node->append_conf('postgresql.conf', "idem.cleanup_interval = '50ms'\n");
$node->start;

my @roles = qw(stranger app monitor operator granted owner);
$node->safe_psql('postgres', "CREATE ROLE $_ LOGIN") for @roles;
$node->safe_psql('postgres', 'ALTER ROLE owner CREATEDB; GRANT pg_monitor TO monitor; GRANT pg_signal_backend TO operator');
$node->safe_psql('postgres', 'CREATE DATABASE shop OWNER owner');

# (exit code, output, errors)
sub try_as
{
	my ($role, $sql, $database) = @_;
	my ($status, $out, $err) = $node->psql($database // 'shop', $sql,
		extra_params => [ '-U', $role, '-v', 'VERBOSITY=verbose' ]);
	return ($status, $out, $err);
}

sub as
{
	my ($role, $sql, $database) = @_;
	my ($status, $out, $err) = try_as($role, $sql, $database);
	is($status, 0, "$role: $sql") or diag $err;
	return $out;
}

sub refuses
{
	my ($role, $sql, $expected, $name) = @_;
	my (undef, undef, $err) = try_as($role, $sql);
	like($err, qr/ERROR:  $expected/, $name // "$role is refused: $sql");
	return;
}

sub superuser
{
	my ($sql, $database) = @_;
	return $node->safe_psql($database // 'shop', $sql);
}

sub becomes
{
	my ($sql, $name) = @_;
	ok($node->poll_query_until('shop', $sql), $name);
	return;
}

sub nobody_is_superuser
{
	my ($name) = @_;
	is(superuser("SELECT string_agg(rolname, ' ') FROM pg_roles WHERE rolsuper AND rolname = ANY ('{@{[join ',', @roles]}}')"),
		'', "$name: nobody became superuser");
	return;
}

# The database is the owner's from the start: default privileges, too.
as('owner', q{SET client_min_messages = error; ALTER DEFAULT PRIVILEGES GRANT ALL ON FUNCTIONS TO stranger;
	CREATE SCHEMA requests; CREATE EXTENSION idem SCHEMA requests});
as('owner', "SELECT requests.idem_grant('app', 'app'), requests.idem_grant('operator', 'operator')");
as('owner', "GRANT USAGE ON SCHEMA requests TO PUBLIC");

# ----- who may call it -----

my $start = 'SELECT requests.idem_start_worker()';
refuses($_, $start, '42501: permission denied for function idem_start_worker') for qw(stranger app monitor granted);
is(superuser(q{SELECT has_function_privilege('public', 'requests.idem_start_worker()', 'EXECUTE')}), 'f', 'PUBLIC may not');
as('owner', "SELECT requests.idem_revoke('operator', 'operator')");
refuses('operator', $start, '42501:', 'nor may an operator whose rights were revoked');
as('owner', "SELECT requests.idem_grant('operator', 'operator')");

if ($node->pg_version < 17)
{
	refuses($_, $start, '55000: idem must be loaded via "shared_preload_libraries" to start workers') for qw(operator owner);
	is(superuser(q{SELECT count(*) FROM pg_stat_activity WHERE backend_type LIKE 'idem%'}), 0, 'nothing was started');
	$node->stop;
	done_testing();
	exit;
}

is(as('operator', $start), 't', 'an operator may');
my $idem = q{FROM pg_stat_activity WHERE backend_type LIKE 'idem%'};
is(superuser("SELECT count(*) $idem AND backend_type = 'idem launcher'"), 1, 'and has started the launcher');
refuses('operator', 'SELECT pg_terminate_backend(' . superuser("SELECT pid $idem AND backend_type = 'idem launcher'") . ')', '42501:', 'which it cannot signal');

# Checks that a worker has come, and has done its work.
my $number = 0;

sub insert_expired
{
	my $request = 'request ' . ++$number;
	superuser("INSERT INTO requests.idem_claims (expires_at, state, request_id, user_id, scope) VALUES ('2001-01-01', 'completed', '$request', 'u', '')");
	$node->reload;
	return "SELECT NOT EXISTS (SELECT FROM requests.idem_claims WHERE request_id = '$request')";
}

becomes(insert_expired(), 'its worker cleans');

# ----- objects in the place of idem's -----

my $escalate = q{
	CREATE FUNCTION %1$s.escalate() RETURNS trigger LANGUAGE plpgsql AS $$
	BEGIN
		BEGIN
			ALTER ROLE owner SUPERUSER;
			ALTER ROLE granted SUPERUSER;
		EXCEPTION WHEN insufficient_privilege THEN
		END;
		RETURN coalesce(NEW, OLD);
	END $$;
	CREATE FUNCTION %1$s.become(boolean) RETURNS boolean LANGUAGE plpgsql AS $$
	BEGIN
		ALTER ROLE owner SUPERUSER;
		RETURN true;
	END $$;
};
as('owner', 'CREATE SCHEMA evil; GRANT USAGE, CREATE ON SCHEMA evil TO PUBLIC;' . sprintf($escalate, 'evil') . q{
	CREATE TABLE evil.idem_claims (expires_at timestamptz, lease_until timestamptz, state text, request_id text, user_id text, scope text);
	CREATE INDEX idem_claims_expires_at_idx ON evil.idem_claims (expires_at);
	CREATE TRIGGER escalate BEFORE INSERT OR UPDATE OR DELETE ON evil.idem_claims FOR EACH ROW EXECUTE FUNCTION evil.escalate();
	ALTER TABLE evil.idem_claims DISABLE TRIGGER escalate;
	INSERT INTO evil.idem_claims (expires_at, request_id) VALUES ('2001-01-01', 'bait');
	ALTER TABLE evil.idem_claims ENABLE ALWAYS TRIGGER escalate;
	CREATE FUNCTION evil.idem_start_worker() RETURNS boolean LANGUAGE sql AS 'SELECT evil.become(true)';
	CREATE FUNCTION evil.idem_cleanup(int DEFAULT NULL) RETURNS bigint LANGUAGE sql AS 'SELECT evil.become(true)::int::bigint';
	ALTER DATABASE shop SET search_path = evil, requests;
	ALTER SCHEMA requests RENAME TO away; ALTER SCHEMA evil RENAME TO requests});
superuser(q{INSERT INTO away.idem_claims (expires_at, state, request_id, user_id, scope) VALUES ('2001-01-01', 'completed', 'exchanged', 'u', '')});
$node->reload;
becomes(q{SELECT NOT EXISTS (SELECT FROM away.idem_claims WHERE request_id = 'exchanged')}, 'schemas exchanged: the worker finds the table');
is(superuser('SELECT count(*) FROM requests.idem_claims'), 1, 'and leaves the other one alone');
nobody_is_superuser('schemas exchanged');
as('owner', 'ALTER SCHEMA requests RENAME TO evil; ALTER SCHEMA away RENAME TO requests; ALTER DATABASE shop RESET search_path');

# ----- settings of the database -----

refuses('owner', "ALTER DATABASE shop SET $_", '42501:')
  for ("idem.cleanup_batch_size = 1", "idem.cleanup_databases = 'nowhere'", "session_preload_libraries = 'evil'");
as('owner', join('; ', map { "ALTER DATABASE shop SET $_" } "local_preload_libraries = 'evil'", "search_path = evil", "lock_timeout = '1ms'",
	"default_transaction_isolation = 'serializable'", 'default_transaction_read_only = on', "statement_timeout = '1ms'"), 'postgres');
{
	local $ENV{PGOPTIONS} = '-c default_transaction_read_only=off -c statement_timeout=0 -c local_preload_libraries=';
	becomes(insert_expired(), 'settings of the database do not stop the worker');
}
superuser('ALTER DATABASE shop RESET ALL', 'postgres');
nobody_is_superuser('settings');

# ----- a trigger -----

superuser('GRANT ALL ON ALL TABLES IN SCHEMA requests TO granted; GRANT CREATE ON SCHEMA requests TO granted');
superuser(q{INSERT INTO requests.idem_claims (expires_at, state, request_id, user_id, scope) VALUES ('2001-01-01', 'completed', 'with trigger', 'u', '')}) ;
as('granted', 'CREATE TRIGGER aaa BEFORE DELETE ON requests.idem_claims FOR EACH ROW EXECUTE FUNCTION evil.escalate()');
superuser(q{INSERT INTO requests.idem_claims (expires_at, state, request_id, user_id, scope) VALUES ('2001-01-01', 'completed', 'behind it', 'u', '')}) ;
$node->reload;
becomes(q{SELECT last_error LIKE '%triggers%' FROM requests.idem_stat_cleanup}, 'a table with a trigger is refused');
nobody_is_superuser('a trigger on idem_claims');
superuser('DROP TRIGGER aaa ON requests.idem_claims');
becomes(insert_expired(), 'without it, cleaning goes on');

# ----- settings of a session -----

# A session that has not loaded the library can be given values. The launcher reads the server's.
superuser("ALTER SYSTEM SET idem.cleanup_databases = 'elsewhere'", 'postgres');
$node->reload;
becomes(q{SELECT cleaning LIKE '%idem.cleanup_databases does not name it' FROM requests.idem_stat_cleanup}, 'idem.cleanup_databases leaves the database out');
my $gone = insert_expired();
{
	local $ENV{PGOPTIONS} = q{-c idem.cleanup_databases=shop};
	try_as('operator', $start);
}
# A worker of another database shows that the launcher has been there.
superuser("ALTER SYSTEM SET idem.cleanup_databases = 'elsewhere, other'", 'postgres');
$node->reload;
superuser('CREATE DATABASE other', 'postgres');
superuser(q{SET client_min_messages = error; CREATE EXTENSION idem;
	INSERT INTO idem_claims (expires_at, state, request_id, user_id, scope) VALUES ('2001-01-01', 'completed', 'r', 'u', '');
	SELECT idem_start_worker()}, 'other');
ok($node->poll_query_until('other', 'SELECT NOT EXISTS (SELECT FROM idem_claims)'), 'another database is cleaned');
is(superuser($gone), 'f', 'this one is not, whatever the caller has set');
superuser('ALTER SYSTEM RESET idem.cleanup_databases', 'postgres');
$node->reload;
becomes($gone, 'but it is once the setting names it');
superuser('DROP DATABASE other', 'postgres');

# ----- many databases -----

# A role that can create databases cannot take the server's worker slots: one launcher, and three
# workers at the same time.
my @databases = map { "mine_$_" } 1 .. 6;
for my $database (@databases)
{
	as('owner', "CREATE DATABASE $database", 'postgres');
	as('owner', q{SET client_min_messages = error; CREATE EXTENSION idem;
		INSERT INTO idem_claims (expires_at, state, request_id, user_id, scope)
		SELECT '2001-01-01', 'completed', i, 'u', '' FROM generate_series(1, 3) i}, $database);
}
my @holders = map { $node->background_psql($_) } @databases;
$_->query_safe('BEGIN; LOCK TABLE idem_claims') for @holders;
for my $database (@databases)
{
	is(as('owner', 'SELECT idem_start_worker()', $database), 't', "$database: started");
}
becomes("SELECT count(*) = 3 $idem AND backend_type = 'idem worker' AND wait_event_type = 'Lock'", 'three workers run');
is(superuser("SELECT count(*) $idem AND backend_type = 'idem launcher'"), 1, 'and one launcher');
$_->query_safe('COMMIT') for @holders;
$_->quit for @holders;
for my $database (@databases)
{
	ok($node->poll_query_until($database, 'SELECT NOT EXISTS (SELECT FROM idem_claims)'), "$database: is cleaned in its turn");
}

nobody_is_superuser('in the end');
$node->stop;
unlike(slurp_file($node->logfile), qr/TRAP|PANIC|signal 11|signal 6|WARNING:.*leak/, 'nothing broke');
done_testing();
