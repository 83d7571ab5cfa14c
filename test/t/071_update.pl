# ALTER EXTENSION idem UPDATE, rehearsed: version 0.9, made of today's objects less some, is
# updated to 1.0 under load. No request is executed twice, none is lost, and the objects are those
# that CREATE EXTENSION makes.
#
# Also the library older than the objects, newer than them, and two libraries in one server: a call
# works, or raises an error that says what to do.

use strict;
use warnings;

use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use IPC::Run;

use Client;
use Server;

# ----- two releases -----

# Both are installed into a copy of the server, and built from a copy of this tree.
my $server = Server->copy(Server::of_the_suite());
my $tree = Server::tree('releases');

my $new = slurp_file("$tree/sql/idem--1.0.sql");
my $old = $new;

# Takes out of the script of 0.9 what it does not have
sub take
{
	my ($pattern) = @_;
	$old =~ s/($pattern)//s or die "the script of 1.0 has no: $pattern";
	return $1;
}

# The statement of 1.0 after a comment with this text
sub block
{
	my ($text) = @_;
	my ($block) = $new =~ /^-- [^\n]*\Q$text\E.*?^(DO \$block\$\n.*?\$block\$;\n|SELECT .*?;\n)/ms or die "the script of 1.0 has no: $text";
	return $block;
}

# As an update script has to be: it locks the tables in the order of claims; ALTER TABLE makes all
# sessions look at the version again; it changes rights on new objects only; and it finds the owner
# of the extension, which need not be the role that runs it (@extowner@).
my $update = join(
	"\n",
	'\echo Use "ALTER EXTENSION idem UPDATE" to load this file. \quit',
	'SET LOCAL search_path = pg_catalog, pg_temp;',
	block('is in the schema already'),
	block('the database has its own'),
	take('CREATE INDEX idem_claims_unsettled_idx .*?;\n'),
	'ALTER TABLE @extschema@.idem_claims SET (autovacuum_vacuum_threshold = 5000);',
	'ALTER TABLE @extschema@.idem_scopes ADD ' . take('CONSTRAINT "lease_max must[^"]*" CHECK \(.*?\'month\', lease_max\)[^\n]*0\)') . ';',
	(map { take("CREATE FUNCTION \@extschema\@\\.$_\\(.*?;\n") } qw(idem_call idem_lapsed)),
	$new =~ /^(CREATE VIEW \@extschema\@\.idem_unsettled AS\n.*?;\n)/ms,
	$new =~ /^(CREATE FUNCTION \@extschema\@\.idem__change_rights\(.*?^\$function\$;\n)/ms,
	block('Untyped literals'),
	block('By now, default privileges'),
	block('other table may use them'),
	block('both editions have the same to say'),
	block('it may stay empty'));
$update =~ s/^CREATE (VIEW|FUNCTION)(?= \@extschema\@\.idem_(unsettled|_change_rights)\b)/CREATE OR REPLACE $1/mg;
$old =~ s/^(CREATE VIEW \@extschema\@\.idem_unsettled AS\n.*?), expires_at\n/$1\n/ms or die 'idem_unsettled has no expires_at';
$old =~ s/autovacuum_vacuum_threshold = 5000/autovacuum_vacuum_threshold = 1000/ or die 'another threshold';

sub write_file
{
	my ($file, $content) = @_;
	unlink $file;
	append_to_file($file, $content);
	return;
}
write_file("$tree/sql/idem--0.9.sql", $old);
write_file("$tree/sql/idem--0.9--1.0.sql", $update);

# Builds a library and installs it over the one that is there: of 0.9; of 1.0, which serves 0.9 too;
# or of 1.0 alone.
sub install
{
	my ($oldest, $newest) = @_;
	my $catalog = slurp_file("$tree/src/store/catalog.c");
	my $control = slurp_file("$tree/idem.control");

	$catalog =~ s/(?<=#define SQL_VERSION_OLDEST ).*/"$oldest"/ or die;
	$catalog =~ s/(?<=#define SQL_VERSION_NEWEST ).*/"$newest"/ or die;
	$control =~ s/(?<=default_version = ).*/'$newest'/ or die;
	write_file("$tree/src/store/catalog.c", $catalog);
	write_file("$tree/idem.control", $control);
	$server->install($tree, 'DATA="sql/idem--0.9.sql' . ($newest eq '1.0' ? ' sql/idem--0.9--1.0.sql"' : '"'));
	return;
}

# ----- a server -----

install('0.9', '0.9');
my $node = PostgreSQL::Test::Cluster->new('main', install_path => $server->prefix);
$node->init;
$node->append_conf('postgresql.conf', q{
shared_preload_libraries = 'idem'
idem.cleanup_interval = '20ms'
log_statement = none
});
$node->start;
$node->safe_psql('postgres', "CREATE ROLE $_ LOGIN") for qw(owner app late);

sub as
{
	my ($role, $database, $sql) = @_;
	return $node->safe_psql($database, $sql, extra_params => [ '-U', $role ]);
}

sub error_of
{
	my ($database, $sql) = @_;
	my ($status, undef, $err) = $node->psql($database, $sql, extra_params => [ '-U', 'owner' ]);
	return $status == 0 ? 'none' : $err;
}

sub version
{
	my ($database) = @_;
	return $node->safe_psql($database, "SELECT extversion FROM pg_extension WHERE extname = 'idem'");
}

my $app = q{SELECT FROM idem_grant('app', 'app')};

for my $database (qw(busy hasty strict mixed))
{
	$node->safe_psql('postgres', "CREATE DATABASE $database OWNER owner");
	as('owner', $database, "CREATE EXTENSION idem; INSERT INTO idem_scopes (scope, ttl) VALUES ('short', '1 ms')");
	is(version($database), '0.9', "$database: has version 0.9");
	as('owner', $database, q{
CREATE SEQUENCE progress;
CREATE TABLE executions (request int8, client int);
CREATE PROCEDURE execute(request int8, client int) LANGUAGE plpgsql AS $$
BEGIN
	PERFORM FROM idem_try_claim('user', request::text) WHERE outcome = 'claimed';
	IF FOUND THEN
		INSERT INTO executions VALUES (request, client);
		PERFORM idem_complete(to_jsonb(client));
	END IF;
END $$;
CREATE PROCEDURE execute_leased(request int8, client int, token int8) LANGUAGE plpgsql AS $$
BEGIN
	INSERT INTO executions VALUES (request, client);
	PERFORM idem_complete('user', request::text, to_jsonb(client), token);
END $$}) if $database =~ /busy|mixed/;
}

sub worker_cleans
{
	my ($database, $name) = @_;
	as('owner', $database, "SELECT idem_claim('user', '$name', 'short')");
	ok($node->poll_query_until($database, "SELECT count(*) = 0 FROM idem_claims WHERE scope = 'short'"), "$name: the worker cleans");
	return;
}

# ----- load -----

# Clients claim the same requests at about the same time, half of them with leases.
my $scripts = PostgreSQL::Test::Utils::tempdir;
write_file("$scripts/claim.sql", q{
\set ahead random(0, 39)
SELECT nextval('progress') / 4 + :ahead AS request \gset
CALL execute(:request, :client_id + :base);
});
write_file("$scripts/lease.sql", q{
\set ahead random(0, 39)
SELECT nextval('progress') / 4 + :ahead AS request \gset
SELECT count(*) AS claimed, coalesce(max(token), 0) AS token FROM idem_lease('user', (:request)::text, lease => '1 min') WHERE outcome = 'claimed' \gset
\if :claimed
CALL execute_leased(:request, :client_id + :base, :token);
\endif
});

# Clients base to base + 3; first and last on one side, so that journals tell them apart
sub start_load
{
	my ($database, $base) = @_;
	my $load = { database => $database, base => $base, err => '', offset => -s $node->logfile };

	$load->{run} = IPC::Run::start(
		[
			'pgbench', '-n', '-c', '4', '-j', '1', '-T', '600', '-D', "base=$base",
			'-f', "$scripts/claim.sql", '-f', "$scripts/lease.sql", $node->connstr($database) . " application_name=load_$base"
		],
		'<', \undef, '>', '/dev/null', '2>', \$load->{err});
	goes_on($load);
	return $load;
}

# Waits for the next 200 executions of this load
sub goes_on
{
	my ($load) = @_;
	my $count = "SELECT count(*) FROM executions WHERE client / 100 = $load->{base} / 100";
	my $done = $node->safe_psql($load->{database}, $count);

	$node->poll_query_until($load->{database}, "SELECT ($count) >= $done + 200")
	  or die "no request is executed any more: $load->{err}";
	return;
}

# The errors of the clients. pgbench is silent about deadlocks.
sub errors_of
{
	my ($load) = @_;
	return join('', slurp_file($node->logfile, $load->{offset}) =~ /^.* load_$load->{base} ERROR: .*\n(?:.* load_$load->{base} (?:DETAIL|HINT): .*\n)*/mg);
}

sub stop_load
{
	my ($load) = @_;
	$load->{run}->signal('INT');
	$load->{run}->finish;
	$node->poll_query_until('postgres', "SELECT count(*) = 0 FROM pg_stat_activity WHERE application_name = 'load_$load->{base}'")
	  or die 'a client does not end';
	return;
}

# Each request that was not executed is executed now, and its clients are gone.
sub check_journal
{
	my ($database) = @_;

	$node->safe_psql($database, q{
		SELECT idem_release(user_id, request_id, token) FROM idem_claims WHERE state = 'in_progress';
		DO $$
		BEGIN
			FOR request IN 0 .. (SELECT max(request_id::int8) FROM idem_claims) LOOP
				CALL execute(request, 0);
				COMMIT;
			END LOOP;
		END $$});
	is($node->safe_psql($database, 'SELECT count(*) FROM (SELECT FROM executions GROUP BY request HAVING count(*) > 1) AS doubled'),
		'0', "$database: no request was executed twice");
	is( $node->safe_psql($database, q{
			SELECT count(*) FROM executions FULL JOIN idem_claims ON request::text = request_id
			WHERE request IS NULL OR request_id IS NULL OR state <> 'completed' OR result <> to_jsonb(client)}),
		'0', "$database: each execution has its claim and result, and each claim its execution");
	is($node->safe_psql($database, 'SELECT count(*) = max(request) + 1 FROM executions'), 't', "$database: none was lost");
	note $node->safe_psql($database, q{
		SELECT count(*) || ' requests, by clients ' || string_agg(DISTINCT client::text, ' ') FROM executions});
	return;
}

# ----- what is loaded -----

# 'replaced': the session has a library that is not the installed one any more.
my $maps = q{SELECT string_agg(DISTINCT CASE WHEN line ~ 'deleted' THEN 'replaced' ELSE 'installed' END, ' ')
	FROM string_to_table(pg_read_file('/proc/self/maps'), E'\n') AS line WHERE line ~ '/idem\.so'};

# Calls each function that is in C, but for those that look at memory only, with arguments that it
# would take. Returns the answers if not all are this error.
sub not_refused
{
	my ($database, $error) = @_;
	my $calls = $node->safe_psql($database, q{
		SELECT format('SELECT %L; SELECT * FROM %s(%s);', p.oid::regprocedure, p.oid::regproc,
			(SELECT string_agg(format('%s::%s', CASE t.type::regtype::text WHEN 'text' THEN '''now()''' WHEN 'jsonb' THEN '''{}'''
					WHEN 'bigint' THEN '1' WHEN 'integer' THEN '1' WHEN 'interval' THEN '''1 s''' WHEN 'timestamp with time zone' THEN 'now()'
					WHEN 'text[]' THEN '''{x}''' WHEN 'uuid' THEN 'gen_random_uuid()' ELSE 'NULL' END, t.type::regtype), ', ' ORDER BY t.n)
				FROM unnest(p.proargtypes::oid[]) WITH ORDINALITY AS t (type, n)))
		FROM pg_proc AS p WHERE p.probin ~ 'idem' AND p.prorettype NOT IN ('trigger'::regtype, 'internal'::regtype)
			AND p.proname !~ '^idem_(_?stat_.*|fingerprint|start_worker)$' AND p.oid::regprocedure::text !~ '^idem_((result|outcome)\(\)|(complete|fail)\(jsonb\))$'
		ORDER BY p.oid::regprocedure::text});
	my ($out, $err) = ('', '');
	IPC::Run::run([ 'psql', '-XAtq', '-d', $node->connstr($database) ], '<', \$calls, '>', \$out, '2>', \$err);

	my @called = $calls =~ /^SELECT '/mg;
	my @refused = $err =~ /ERROR:  $error/g;
	cmp_ok(scalar(@called), '>', 15, "$database: all functions are called");
	return @called == @refused ? 'none' : "$out$err";
}

my $restart = qr/extension "idem" is version 1\.0, but the library requires 0\.9\n(DETAIL.*\n)?HINT: +Install the newer library\. If it is installed already, restart the server/;
my $run_update = qr/extension "idem" is version 0\.9, but the library requires 1\.0\nHINT: +Run ALTER EXTENSION idem UPDATE\./;

# ----- preloaded: the library is replaced while the server runs -----

worker_cleans('busy', 'version 0.9');
as('owner', 'busy', $app);
my $load = start_load('busy', 100);
install('0.9', '1.0');
goes_on($load);
is($node->safe_psql('busy', $maps), 'replaced', 'preloaded: also new sessions have the library that the server started with');
goes_on($load);
worker_cleans('busy', 'library replaced');
like(error_of('busy', "CREATE EXTENSION IF NOT EXISTS idem; SELECT idem_call('u', 'r', 'now()')"), qr/function idem_call\(.*does not exist/, 'what 1.0 adds is not there yet');

# Too early: without a restart the old library meets new objects. Sessions notice it that had
# looked at the version before.
my $session = Client->new($node, 'hasty');
is($session->ask("SELECT idem_claim('user', 'before')"), 't', 'hasty: a session claims');
as('owner', 'hasty', 'ALTER EXTENSION idem UPDATE');
is($session->ask("SELECT idem_claim('user', 'before')"), 'ERROR:  55000', 'hasty: updated without a restart, it may not go on');
$session->quit;
like(error_of('hasty', "SELECT idem_claim('user', 'before')"), $restart, 'hasty: and the error says what to do');
is(not_refused('hasty', $restart), 'none', 'hasty: every function says so');
$node->reload;		# makes the launcher look at all databases
$node->poll_query_until('hasty', "SELECT last_error ~ 'is version 1.0' FROM idem_stat_cleanup") or die 'no error';
pass('hasty: so does the worker, and its statistics can be read');
is(errors_of($load), '', 'busy: meanwhile its clients have noticed nothing');

$node->restart;
stop_load($load);
is(errors_of($load), '', 'busy: nor before the restart');
is($node->safe_psql('hasty', $maps), 'installed', 'after a restart the new library is there');
is(as('owner', 'hasty', "SELECT idem_claim('user', 'before'), idem_claim('user', 'after')"), 'f|t', 'hasty: claims, and what was claimed guards');
worker_cleans('hasty', 'restarted');

# ----- updated under load -----

is(version('busy'), '0.9', 'busy: the new library serves the old objects');
$load = start_load('busy', 200);
worker_cleans('busy', 'new library');

# While a transaction is open that has claimed, the update waits, and claims behind it.
my $holder = Client->new($node, 'busy');
$holder->ask('BEGIN');
is($holder->ask("SELECT idem_claim('holder', '1', 'short')"), 't', 'busy: a transaction is open');
like(error_of('busy', "SET lock_timeout = '200 ms'; ALTER EXTENSION idem UPDATE"), qr/canceling statement due to lock timeout/, 'busy: lock_timeout bounds the wait of the update');
is(version('busy'), '0.9', 'busy: which has changed nothing');
goes_on($load);
is($holder->ask('COMMIT'), '', 'busy: it commits');
as('owner', 'busy', "SET lock_timeout = '1 min'; ALTER EXTENSION idem UPDATE");
is(version('busy'), '1.0', 'busy: updated under load');
goes_on($load);
is($holder->ask("SELECT idem_claim('holder', '2', 'short')"), 't', 'busy: sessions from before go on');
$holder->quit;
worker_cleans('busy', 'updated');
stop_load($load);
is(errors_of($load), '', 'busy: the clients have noticed nothing');

# Roles keep their rights, and get those on new functions when they are granted again.
is(as('app', 'busy', 'SELECT idem_claim(\'user\', \'' . $node->safe_psql('busy', 'SELECT min(request) FROM executions') . "')"), 'f', 'busy: an application goes on');
like(($node->psql('busy', "SELECT idem_call('user', 'called', 'now()')", extra_params => [ '-U', 'app' ]))[2],
	qr/permission denied for function idem_call/, 'busy: what is new is not granted');
as('owner', 'busy', $app);
as('app', 'busy', "SELECT idem_call('user', 'called', 'now()'); SELECT idem_call('user', gen_random_uuid(), 'now()')");
like(as('owner', 'busy', "SELECT string_agg(relacl::text, '') || (SELECT count(*) FROM idem_lapsed()) FROM pg_class WHERE relname = 'idem_unsettled'"), qr/owner=r\*.*\d$/, 'busy: the owner has its rights on what is new');
$node->safe_psql('busy', "DELETE FROM idem_claims WHERE request_id !~ '^\\d+\$' OR user_id <> 'user'");
check_journal('busy');

# ----- the same objects -----

my $objects = q{
SELECT p.oid::regprocedure, pg_get_functiondef(p.oid), p.proacl, obj_description(p.oid, 'pg_proc'), i.initprivs
	FROM pg_proc AS p LEFT JOIN pg_init_privs AS i ON i.objoid = p.oid AND i.classoid = 'pg_proc'::regclass
	WHERE p.proname LIKE 'idem\_%' ORDER BY p.oid::regprocedure::text COLLATE "C";
SELECT t.typname, t.typtype, t.typacl, enum_range FROM pg_type AS t
	LEFT JOIN LATERAL (SELECT string_agg(enumlabel, ' ' ORDER BY enumsortorder) FROM pg_enum WHERE enumtypid = t.oid) AS e (enum_range) ON true
	WHERE t.typname LIKE 'idem\_%' ORDER BY 1;
SELECT c.relname, c.relkind, c.relowner::regrole, c.relacl, (SELECT array_agg(o ORDER BY o) FROM unnest(c.reloptions) AS o), i.initprivs,
	CASE c.relkind WHEN 'v' THEN pg_get_viewdef(c.oid) WHEN 'i' THEN pg_get_indexdef(c.oid) END,
	(SELECT string_agg(concat_ws(' ', a.attname, a.atttypid::regtype, a.attnotnull, a.attacl, col_description(c.oid, a.attnum)), ', ' ORDER BY a.attnum) FROM pg_attribute AS a WHERE a.attrelid = c.oid AND a.attnum > 0),
	(SELECT string_agg(r.conname || ' ' || pg_get_constraintdef(r.oid), ', ' ORDER BY r.conname) FROM pg_constraint AS r WHERE r.conrelid = c.oid),
	(SELECT string_agg(pg_get_triggerdef(t.oid) || t.tgenabled::text, ', ' ORDER BY t.tgname) FROM pg_trigger AS t WHERE t.tgrelid = c.oid)
	FROM pg_class AS c LEFT JOIN pg_init_privs AS i ON i.objoid = c.oid AND i.classoid = 'pg_class'::regclass WHERE c.relname LIKE 'idem\_%' ORDER BY 1;
SELECT pg_describe_object(classid, objid, objsubid) FROM pg_depend
	WHERE refclassid = 'pg_extension'::regclass AND deptype = 'e' AND refobjid = (SELECT oid FROM pg_extension WHERE extname = 'idem') ORDER BY 1;
SELECT extversion, extowner::regrole, extconfig::regclass[]::text, extcondition FROM pg_extension WHERE extname = 'idem'};
$node->safe_psql('postgres', 'CREATE DATABASE fresh OWNER owner');
as('owner', 'fresh', 'CREATE EXTENSION idem');
my @made = map { [ split /\n/, $node->safe_psql($_, $objects) ] } qw(hasty fresh);
cmp_ok(scalar(@{ $made[1] }), '>', 500, 'there are objects to compare');
is_deeply($made[0], $made[1], 'an updated extension has the objects, rights and comments of a new one');

# ----- not preloaded: two libraries in one server -----

$node->stop;
$node->append_conf('postgresql.conf', "shared_preload_libraries = ''");
install('0.9', '0.9');
$node->start;
my $before = start_load('mixed', 100);
$session = Client->new($node, 'mixed');
is($session->ask("SELECT idem_claim('user', 'before', 'short')"), 't', 'mixed: a session has the old library');
install('0.9', '1.0');
my $after = start_load('mixed', 200);
goes_on($before);
is($session->ask($maps), 'replaced', 'mixed: it keeps it');
is($node->safe_psql('mixed', "SELECT idem_status('user', '0'); $maps") =~ s/.*\n//r, 'installed', 'mixed: a new session has the new one');
is(errors_of($before) . errors_of($after), '', 'mixed: both sides execute');
$node->safe_psql('mixed', 'ALTER EXTENSION idem UPDATE');
goes_on($after);
is($session->ask("SELECT idem_claim('user', 'before', 'short')"), 'ERROR:  55000', 'mixed: after the update the old library serves nobody');
$session->quit;
$node->poll_query_until('mixed', "SELECT count(*) = 0 FROM pg_stat_activity WHERE application_name = 'load_100'") or die 'a client goes on';
stop_load($before);
is(scalar(() = errors_of($before) =~ /ERROR:  .*is version 1\.0, but the library requires 0\.9\n.*HINT:  Install the newer library/g), 4, 'mixed: each of its clients ends with an error that says what to do');
stop_load($after);
is(errors_of($after), '', 'mixed: the others have noticed nothing');
$node->safe_psql('mixed', "DELETE FROM idem_claims WHERE request_id !~ '^\\d+\$'");
check_journal('mixed');

# ----- a library that does not serve the objects from before -----

install('1.0', '1.0');
is(not_refused('strict', $run_update), 'none', 'strict: every function says so');
# pg_upgrade leaves the extension to a superuser, who has to update it then.
$node->safe_psql('strict', "UPDATE pg_extension SET extowner = 10 WHERE extname = 'idem'; ALTER EXTENSION idem UPDATE");
as('owner', 'strict', $app);
is(as('app', 'strict', "SELECT idem_claim('user', 'updated'), idem_call('user', 'called', 'current_database()')"),
	't|"strict"', 'strict: and works after the update; the owner of the schema grants what is new');

unlike(slurp_file($node->logfile), qr/was terminated by signal|TRAP:|PANIC:/, 'no process has failed');
$node->stop;
done_testing();
