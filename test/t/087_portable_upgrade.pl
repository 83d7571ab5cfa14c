# The file that installs the portable edition, run again: the same version does nothing, a later one
# takes the place of an earlier one and keeps claims, tokens, policies, rights, owners and what depends
# on them, an older one refuses. From the version of November 2026, too, which has no idem_version().

use strict;
use warnings;

use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use IPC::Run;

use Client;
use Server;

my %file = (psql => 'sql/idem-portable.sql', plain => 'sql/idem-portable-plain.sql');
my $now = slurp_file($file{psql});
my ($version, $shapes) = $now =~ /'((\d+\.\d+\.\d+\+\d+)\.\d+)'::text/ or die 'no version';

my $node = PostgreSQL::Test::Cluster->new('main');
$node->init;
$node->append_conf('postgresql.conf', 'max_prepared_transactions = 2');
$node->start;
my $superuser = $node->safe_psql('postgres', 'SELECT current_user');
$node->safe_psql('postgres', "CREATE ROLE $_ LOGIN") for qw(owner app less operator helpdesk reporter stranger);
$node->safe_psql('postgres', 'CREATE ROLE deployer LOGIN IN ROLE owner');

my $folder = $node->basedir;
my $earliest = `gzip -dc test/data/idem-portable-cea17a2.sql.gz`;
like($earliest, qr/^DO \$install\$/m, 'the version of November 2026, a statement for any client');

# A file of another version. With the checksum of the shapes, functions are exchanged in their places.
sub file
{
	my ($name, $of, @changes) = @_;
	my $sql = $now =~ s/\Q$version\E/$of/gr;

	for my $change (@changes)
	{
		$change->() for $sql;
	}
	append_to_file("$folder/$name.sql", $sql);
	return "$folder/$name.sql";
}

sub as
{
	my ($role, $database, $sql) = @_;
	return $node->safe_psql($database, $sql, extra_params => [ '-U', $role ]);
}

# Errors and notices
sub run_file
{
	my ($file, $role, $database, $before) = @_;
	my ($out, $err) = ('', '');

	IPC::Run::run(
		[
			'psql', '-XAtq', '-v', 'ON_ERROR_STOP=1', '-h', $node->host, '-p', $node->port, '-U', $role, '-v', 'schema=requests',
			(map { ('-c', $_) } $before // ()), '-f', $file, $database
		],
		'<', \undef, '>', \$out, '2>', \$err);
	return $err =~ s/^psql:\S+ //gmr;
}

sub start_file
{
	my ($file, $role, $database, $err) = @_;
	return IPC::Run::start(
		[ 'psql', '-XAtq', '-h', $node->host, '-p', $node->port, '-U', $role, '-v', 'schema=requests', '-f', $file, $database ],
		'<', \undef, '>', '/dev/null', '2>', $err, IPC::Run::timeout($PostgreSQL::Test::Utils::timeout_default));
}

sub waits_for_lock
{
	my ($database) = @_;
	$node->poll_query_until($database, q{SELECT count(*) > 0 FROM pg_locks WHERE NOT granted AND mode = 'AccessExclusiveLock'})
	  or die 'the upgrade does not wait';
	return;
}

sub new_database
{
	my ($name) = @_;
	$node->safe_psql('postgres', "CREATE DATABASE $name OWNER owner");
	as('owner', $name, "CREATE SCHEMA requests; ALTER DATABASE $name SET search_path = requests, public");
	$node->safe_psql($name, 'GRANT CREATE ON SCHEMA public TO reporter');
	return $name;
}

# What idem consists of
my $objects = q{
SELECT pg_get_functiondef(p.oid), p.proowner::regrole, p.proacl, CASE WHEN p.proname NOT LIKE 'idem\_\_%' THEN obj_description(p.oid, 'pg_proc') END FROM pg_proc AS p
	WHERE p.pronamespace = 'requests'::regnamespace AND p.proname LIKE 'idem\_%' ORDER BY p.oid::regprocedure::text COLLATE "C";
SELECT t.typname, t.typtype, t.typowner::regrole, t.typacl FROM pg_type AS t WHERE t.typnamespace = 'requests'::regnamespace AND t.typname LIKE 'idem\_%' ORDER BY 1;
SELECT c.relname, c.relkind, c.relowner::regrole, coalesce(c.relacl, acldefault('r', c.relowner)), c.reloptions, CASE WHEN c.relname NOT LIKE 'idem\_\_%' THEN obj_description(c.oid, 'pg_class') END,
	(SELECT string_agg(pg_get_constraintdef(r.oid), ' ' ORDER BY pg_get_constraintdef(r.oid)) FROM pg_constraint AS r WHERE r.conrelid = c.oid),
	(SELECT string_agg(format('%s %s %s %s', a.attname, format_type(a.atttypid, a.atttypmod), a.attnotnull, a.attacl), ', ' ORDER BY a.attnum)
		FROM pg_attribute AS a WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped),
	CASE c.relkind WHEN 'v' THEN pg_get_viewdef(c.oid) WHEN 'i' THEN pg_get_indexdef(c.oid) END
	FROM pg_class AS c WHERE c.relnamespace = 'requests'::regnamespace AND c.relname LIKE 'idem\_%' ORDER BY 1;
SELECT pg_get_triggerdef(t.oid), t.tgenabled FROM pg_trigger AS t JOIN pg_class AS c ON c.oid = t.tgrelid
	WHERE c.relnamespace = 'requests'::regnamespace ORDER BY 1};
my $content = q{
SELECT * FROM requests.idem_claims ORDER BY request_id;
SELECT * FROM requests.idem_scopes ORDER BY scope;
SELECT * FROM requests.idem_settings;
SELECT * FROM requests.idem__cleanup_batches;
SELECT last_value FROM requests.idem_token_seq};

# ----- from the version of November 2026 -----

new_database('shop');
append_to_file("$folder/earliest.sql", $earliest);
is(run_file("$folder/earliest.sql", 'owner', 'shop'), '', 'it is installed');
as('owner', 'shop', q{
SELECT idem_grant(r, 'app') FROM unnest('{app, less}'::regrole[]) AS r;
SELECT idem_grant(r, 'operator') FROM unnest('{operator, reporter}'::regrole[]) AS r;
SELECT format('REVOKE EXECUTE ON FUNCTION %s FROM less', oid::regprocedure) FROM pg_proc WHERE proname = 'idem_heal' \gexec
GRANT EXECUTE ON FUNCTION idem_forget(text, text, text) TO helpdesk WITH GRANT OPTION;
GRANT SELECT (request_id) ON idem_claims TO helpdesk;
GRANT USAGE ON SCHEMA requests TO helpdesk;
INSERT INTO idem_scopes (scope, ttl, key_time) VALUES ('v7', '2 days', 'uuidv7');
INSERT INTO idem_scopes (scope, failed, lapsed) VALUES ('mail', 'retryable', 'unknown');
UPDATE idem_settings SET ttl = '2 hours', scopes = 'any', cleanup_batch_size = 7;
CALL idem_cleanup_all();
ALTER DEFAULT PRIVILEGES GRANT ALL ON ROUTINES TO stranger;
ALTER DEFAULT PRIVILEGES GRANT ALL ON TABLES TO stranger;
CREATE TABLE events (sender text, id text);
CREATE TRIGGER once BEFORE INSERT ON events FOR EACH ROW EXECUTE FUNCTION idem_skip_duplicates('events', 'sender', 'id');
CREATE FUNCTION work(n int) RETURNS jsonb LANGUAGE sql AS 'SELECT to_jsonb(n + 1)';
CREATE FUNCTION pay(request text) RETURNS boolean LANGUAGE sql BEGIN ATOMIC SELECT idem_claim('user', request); END;
CREATE FUNCTION pay_in_plpgsql(request text) RETURNS jsonb LANGUAGE plpgsql AS $$
BEGIN
	IF idem_claim('user', request) THEN
		PERFORM idem_complete('"paid"');
	END IF;
	RETURN idem_result();
END $$});
# Other roles' objects that depend on those of idem, one of which pins an internal function
as('reporter', 'shop', q{
CREATE VIEW public.open AS SELECT request_id, status FROM requests.idem_unsettled;
GRANT SELECT ON public.open TO owner;
CREATE VIEW public.pinned AS SELECT 'requests.idem__raise(text, text, text)'::regprocedure AS x});
my $token = as('app', 'shop', q{
BEGIN;
SELECT FROM idem_claim('user', 'done', fingerprint => '\x0102');
SELECT FROM idem_complete('{"paid": 30}');
SELECT FROM idem_claim('user', 'broken');
SELECT FROM idem_fail('"no"');
COMMIT;
SELECT FROM idem_lease('user', 'lapsed', scope => 'mail', lease => '1 us');
SELECT token FROM idem_lease('user', 'held', lease => '1 day', progress => '[1, 2]')});

# Sessions that go on: with cached plans, and within a transaction with a claim
my @sessions = map { Client->new($node, 'shop') } 1 .. 3;
my ($cached, $holder, $waiter) = @sessions;
$_->ask('SET SESSION AUTHORIZATION owner') for @sessions;
$cached->ask($_) for
  q{PREPARE claim AS SELECT idem_claim('user', $1)}, q{PREPARE seen AS SELECT idem_status('user', $1)},
  q{PREPARE work AS SELECT idem_call('user', $1, 'work(int)', '{"n": 1}')}, 'PREPARE unsettled AS SELECT count(*) FROM open',
  'PREPARE number AS SELECT idem_claim(1, $1::uuid)', 'PREPARE event AS INSERT INTO events VALUES ($1, $2) RETURNING 1';
sub uses_plans
{
	my ($n, $name) = @_;
	is($cached->ask("EXECUTE claim('c$n')"), 't', "$name: a prepared claim");
	is($cached->ask("EXECUTE claim('c$n')"), 'f', "$name: and again");
	is($cached->ask("EXECUTE seen('done')"), 'completed', "$name: a prepared query");
	is($cached->ask("EXECUTE work('w$n')"), '2', "$name: a prepared idem_call()");
	is($cached->ask("EXECUTE number('00000000-0000-0000-0000-" . sprintf('%012d', $n) . "')"), 't', "$name: ids of other types");
	is($cached->ask('EXECUTE unsettled'), '2', "$name: a view of a view");
	is($cached->ask("EXECUTE event('u', 'e$n')") . $cached->ask("EXECUTE event('u', 'e$n')"), '1', "$name: a trigger");
	is($cached->ask("SELECT pay('p$n')") . $cached->ask("SELECT pay('p$n')"), 'tf', "$name: a function with a parsed body");
	is($cached->ask("SELECT pay_in_plpgsql('q$n')"), '"paid"', "$name: a function in PL/pgSQL");
}
uses_plans($_, 'before') for 1 .. 7;		# generic plans by then

$holder->ask('BEGIN');
is($holder->ask("SELECT idem_claim('user', 'open')"), 't', 'a transaction with a claim');
$waiter->send("SET idem.wait = '60 s'; SELECT idem_call('user', 'open', 'work(int)', '{\"n\": 1}')");
my $before = as('owner', 'shop', $content);
my $upgrade = start_file($file{psql}, 'owner', 'shop', \my $err);
waits_for_lock('shop');
is($holder->ask("SELECT idem_claim('user', 'second')"), 't', 'it claims again, while the upgrade waits for it');
is($holder->ask("SELECT idem_complete('user', 'open', '2'), idem_complete('user', 'second', '3')"), 't|t', 'settles');
is($holder->ask('COMMIT'), '', 'and commits');
$upgrade->finish;
like($err, qr/NOTICE:  idem was upgraded from an earlier version to \Q$version\E\n\z/, 'then it is upgraded') or diag $err;
# The call that waited meets the upgrade in its midst: it is answered, or fails and has done nothing.
like($waiter->answer, qr/^(2|ERROR:  (XX000|42883|ID\d+))$/, 'a call that waited ends');
is($waiter->ask(q{SELECT idem_call('user', 'open', 'work(int)', '{"n": 1}')}), '2', 'and its retry gets the answer');

is(as('app', 'shop', 'SELECT idem_version()'), $version, 'it has a version, which an application may ask for');
is(as('owner', 'shop', $content) =~ s/^[^\n]*\|(open|second)\|.*?\n//gmr, $before, 'claims, tokens, policies, settings and statistics are kept');
uses_plans($_, 'after') for 8 .. 9;
is($holder->ask("SELECT idem_claim('user', 'open', fingerprint => NULL)"), 'f', 'a session that settled just before claims on');
is(as('app', 'shop', "SELECT idem_complete('user', 'held', '1', $token)"), 't', 'the holder of a lease settles it with its token');
cmp_ok(as('app', 'shop', "SELECT token FROM idem_lease('user', 'next', lease => '1 s')"), '>', $token, 'tokens go on');
is(as('app', 'shop', "SELECT outcome FROM idem_try_claim('user', 'lapsed', 'mail')"), 'unknown', 'an unknown request stays so');
is(as('less', 'shop', q{SELECT has_function_privilege('idem_heal(text, text, jsonb, text)', 'EXECUTE'), has_function_privilege('idem_version()', 'EXECUTE')}),
	'f|f', 'a role that lacked a right of its set has got none');
is(as('operator', 'shop', 'SELECT idem_version() <> $$$$'), 't', 'an operator has the new one');
is(as('helpdesk', 'shop', q{
		GRANT EXECUTE ON FUNCTION idem_forget(text, text, text) TO less;
		SELECT count(*), (SELECT count(*) FROM pg_proc WHERE pronamespace = 'requests'::regnamespace AND proname LIKE 'idem%' AND has_function_privilege(oid, 'EXECUTE')) FROM (SELECT request_id FROM idem_claims) AS c})
	  =~ s/^\d+\|//r, '1', 'single rights are kept, with their grant option, and no other came');
is(as('stranger', 'shop', q{SELECT count(*) FROM pg_proc WHERE pronamespace = 'requests'::regnamespace AND proname LIKE 'idem%' AND has_function_privilege(oid, 'EXECUTE')}), '0',
	'default privileges have given nothing');
is(as('reporter', 'shop', 'SELECT x FROM pinned'), 'idem__raise(text,text,text)', 'what a stranger pinned stays');

# As a fresh installation
as($superuser, 'shop', 'DROP OWNED BY less, helpdesk, reporter CASCADE; DROP TABLE events; DROP FUNCTION work, pay, pay_in_plpgsql');
new_database('fresh');
is(run_file($file{psql}, 'owner', 'fresh'), '', 'fresh: it installs, and prints nothing');
as('owner', 'fresh', "SELECT idem_grant('app', 'app'); SELECT idem_grant('operator', 'operator')");
is(as('owner', 'shop', $objects), as('owner', 'fresh', $objects), 'upgraded, it has the objects and rights of a fresh one, and nothing else');

# ----- the same version, by any client -----

my $rows = q{SELECT md5(string_agg(ctid::text || xmin::text, ' ' ORDER BY oid)) FROM pg_proc WHERE pronamespace = 'requests'::regnamespace};
my $as_was = as('owner', 'fresh', $rows);
for my $client (sort keys %file)
{
	is(run_file($file{$client}, $_, 'fresh'), "NOTICE:  idem $version is installed in schema requests already\n", "$client: the same version, by $_")
	  for qw(owner deployer);
}
is(as('owner', 'fresh', $rows), $as_was, 'it changes nothing');
my $reader = Client->new($node, 'fresh');
$reader->ask($_) for 'SET SESSION AUTHORIZATION owner', 'BEGIN', "SELECT idem_claim('user', 'reads')";
like(run_file($file{psql}, 'owner', 'fresh'), qr/^NOTICE:  idem \S+ is installed/, 'and waits for nobody');
$reader->ask('ROLLBACK');
like(run_file($file{plain}, 'owner', 'fresh', 'SET default_transaction_isolation = serializable'), qr/^NOTICE/, 'nor does it need a level');

# ----- versions -----

my %of = (patch => '1.0.9+1.1', later => '1.0.10+1.1', other => "$shapes.1");
$file{$_} = file($_, $of{$_}) for keys %of;
new_database('versions');
is(run_file($file{psql}, 'owner', 'versions'), '', 'versions: installed');
like(run_file($file{other}, 'owner', 'versions'), qr/^NOTICE:  idem was upgraded from \Q$version\E to \Q$of{other}\E\n\z/, 'another file of the same version upgrades');
like(run_file($file{psql}, 'owner', 'versions'), qr/^NOTICE:  idem was upgraded from/, 'and back: nobody knows which one is later');
like(run_file($file{patch}, 'owner', 'versions'), qr/^NOTICE:  idem was upgraded from \Q$version\E to 1\.0\.9/, 'a later version');
like(run_file($file{later}, 'owner', 'versions'), qr/^NOTICE:  idem was upgraded from 1\.0\.9\S* to 1\.0\.10/, 'numbers count as numbers');
my $refusal = qr/^ERROR:  idem 1\.0\.10\S* is installed in schema requests, and this file has 1\.0\.\S*\nDETAIL:  Nothing was changed\.\nHINT:  Run the file of that version, or of a later one\.\n/;
like(run_file($file{$_}, 'owner', 'versions'), $refusal, "an older one refuses: $_") for qw(patch psql plain);
is(as('owner', 'versions', 'SELECT idem_version()'), $of{later}, 'and has changed nothing');

# One that has other internal objects, a function and a right more
$file{next} = file(
	'next', '1.1.0+2.2',
	sub { s/(?=^-- ----- policy -----$)/CREATE TYPE \@extschema\@.idem__later AS (key \@extschema\@.idem__key);\nCREATE FUNCTION \@extschema\@.idem__later(key \@extschema\@.idem__key) RETURNS \@extschema\@.idem__later LANGUAGE sql AS \$\$ SELECT ROW (key)::\@extschema\@.idem__later \$\$;\nCREATE FUNCTION \@extschema\@.idem_later() RETURNS text LANGUAGE sql AS \$\$ SELECT 'later' \$\$;\nCREATE TABLE \@extschema\@.idem__rules (rule text);\nCREATE TABLE \@extschema\@.idem_rules (rule text);\n\n/m or die },
	sub { s/(FUNCTION \@extschema\@\.idem__whole_second\(moment timestamptz\)\nRETURNS )timestamptz\n(.*?\n)AS .*?;\n/$1date\n$2AS \$\$ SELECT moment::date + 1 \$\$;\n/s or die },
	sub { s/\|skip_duplicates\|version\)/|skip_duplicates|version|later)/ or die });
as('owner', 'versions', "SELECT idem_grant('app', 'app'), idem_grant('less', 'app'); REVOKE EXECUTE ON FUNCTION idem_fingerprint FROM less");
is(as('app', 'versions', "SELECT idem_claim('user', 'before')"), 't', 'a claim before');
like(run_file($file{next}, 'owner', 'versions'), qr/^NOTICE:  idem was upgraded from 1\.0\.10\S* to 1\.1\.0\S*\n\z/, 'one with other objects');
is(as('app', 'versions', "SELECT idem_claim('user', 'before'), idem_claim('user', 'after'), idem_later()"), 'f|t|later', 'guards, and its new function is granted with the set');
is(as('less', 'versions', q{SELECT has_function_privilege('idem_later()', 'EXECUTE')}), 'f', 'not to a role that lacked a right of it');
$file{after} = file('after', '1.2.0+3.3');
like(run_file($file{after}, 'owner', 'versions'), qr/^NOTICE/, 'and one that lacks them again');
is(as('owner', 'versions', q{SELECT string_agg(typname, ' ' ORDER BY 1) FROM pg_type WHERE typname ~ '^idem__?(later|rules)'}), 'idem_rules',
	'internal objects go, but no public table');
as('owner', 'versions', 'DROP FUNCTION idem_later(); DROP TABLE idem_rules; SELECT idem_revoke($$less$$, $$app$$); SELECT idem_grant($$operator$$, $$operator$$)');
is(as('owner', 'versions', $objects) =~ s/1\.2\.0\+3\.3/$version/gr, as('owner', 'fresh', $objects), 'all is as in a fresh one again');

# ----- by whom -----

as('owner', 'fresh', 'GRANT USAGE ON SCHEMA requests TO stranger');
like(run_file($file{other}, 'stranger', 'fresh'), qr/^ERROR:  idem cannot be installed for role owner, the owner of idem in schema requests\nDETAIL: .*\nHINT:  Install or upgrade it as that role\.\n/,
	'a stranger: refused');
for my $role ('deployer', $superuser)
{
	my $to = $role eq 'deployer' ? 'other' : 'patch';
	like(run_file($file{$to}, $role, 'fresh'), qr/^NOTICE:  idem was upgraded from/, "by $role");
	is(as($role, 'fresh', q{SELECT DISTINCT proowner::regrole FROM pg_proc WHERE pronamespace = 'requests'::regnamespace}), 'owner', 'it belongs to its owner as before');
}
is(as('owner', 'fresh', $objects) =~ s/1\.0\.9\+1\.1/$version/gr, as('owner', 'versions', $objects) =~ s/1\.2\.0\+3\.3/$version/gr, 'and all is as before');

# ----- while transactions go on -----

new_database('busy');
is(run_file($file{psql}, 'owner', 'busy'), '', 'busy: installed');
my $long = Client->new($node, 'busy');
my $short = Client->new($node, 'busy');
$_->ask('SET SESSION AUTHORIZATION owner') for $long, $short;
$long->ask($_) for 'BEGIN', "SELECT idem_claim('user', 'long')";
like(run_file($file{other}, 'owner', 'busy', "SET lock_timeout = '300 ms'"),
	qr/^ERROR:  idem cannot be upgraded now: transactions that use it did not end in 00:00:00\.3\nDETAIL:  They are those of process ${\$long->pid}\.\nHINT:  End them, or set lock_timeout to wait longer/,
	'a long transaction: it gives up, and says for whom it waited');
my $plain_other = slurp_file($file{plain}) =~ s/\Q$version\E/$of{other}/gr;
append_to_file("$folder/plain_other.sql", $plain_other);
like(run_file("$folder/plain_other.sql", 'owner', 'busy', 'SET default_transaction_isolation = serializable'),
	qr/^ERROR:  idem cannot be upgraded in a transaction that is serializable\n.*\nHINT:  BEGIN ISOLATION LEVEL READ COMMITTED\./, 'a snapshot is refused');
$upgrade = start_file($file{other}, 'owner', 'busy', \$err);
waits_for_lock('busy');
is($short->ask("SELECT idem_claim('user', 's$_')"), 't', 'claims go on while it waits') for 1 .. 5;
# It takes idem_settings and idem_scopes first: this one would wait for it, and it for this one.
is($long->ask("SELECT idem_claim('user', 'long 2'), idem_complete('user', 'long', '1')"), 't|t', 'so does the transaction that it waits for');
$waiter->ask('\c busy');
$waiter->ask('SET SESSION AUTHORIZATION owner');
$waiter->send("SET idem.wait = '60 s'; SELECT idem_claim('user', 'long')");
is($long->ask('COMMIT'), '', 'when it ends');
$upgrade->finish;
like($err, qr/NOTICE:  idem was upgraded from \Q$version\E to \Q$of{other}\E\n\z/, 'it is upgraded') or diag $err;
is($waiter->answer, 'f', 'a claim that waited is answered, as only bodies were replaced');

# Prepared transactions, and two upgrades at once
$long->ask($_) for 'BEGIN', "SELECT idem_claim('user', 'prepared')", "PREPARE TRANSACTION 'p'";
like(run_file($file{psql}, 'owner', 'busy', "SET lock_timeout = '100 ms'"), qr/DETAIL:  They are those of a prepared transaction\./, 'a prepared transaction counts');
my @at_once = map { start_file($_, 'owner', 'busy', \my $ignored) } ($file{psql}) x 2;
$node->poll_query_until('busy', q{SELECT count(*) >= 2 FROM pg_stat_activity WHERE query ~ 'install' AND pid <> pg_backend_pid() AND state = 'active'});
as($superuser, 'busy', "COMMIT PREPARED 'p'");
is(join(' ', map { $_->finish ? 'done' : 'failed' } @at_once), 'done done', 'two at once: one upgrades, the other has nothing to do');
is(as('owner', 'busy', 'SELECT idem_version()'), $version, 'and it is the new version');

# ----- under load -----

# Nothing fails where only bodies of functions are replaced. In an upgrade that replaces internal objects a call in
# its midst can fail, and has then done nothing. At the end each request is sent once more.
as('owner', 'busy', q{
CREATE SEQUENCE progress;
CREATE TABLE executions (request int8, client int);
CREATE PROCEDURE execute(request int8, client int) LANGUAGE plpgsql AS $$
BEGIN
	IF idem_claim('user', request::text, 'load') THEN
		INSERT INTO executions VALUES (request, client);
		PERFORM idem_complete(to_jsonb(client));
	END IF;
END $$;
CREATE PROCEDURE execute_leased(request int8, client int, token int8) LANGUAGE plpgsql AS $$
BEGIN
	INSERT INTO executions VALUES (request, client);
	PERFORM idem_complete('user', request::text, to_jsonb(client), token, 'load');
END $$});
my $seed = $ENV{SEED} // 20261125;
note "SEED=$seed";
srand $seed;
my @clients;
for my $client (1 .. 3)
{
	my $sql = '';
	for my $n (1 .. 20_000)
	{
		my $ahead = int(rand(30));
		$sql .= "SELECT nextval('progress') / 3 + $ahead AS request \\gset\n";
		$sql .= $client <= 2 ? "CALL execute(:request, $client);\n" : qq{
\\set claimed false
SELECT count(*) > 0 AS claimed, max(token) AS token FROM idem_lease('user', :'request', scope => 'load', lease => '2 s') WHERE outcome = 'claimed' \\gset
\\if :claimed
CALL execute_leased(:request, $client, :token);
\\endif
};
	}
	append_to_file("$folder/client_$client.sql", $sql);
	push @clients, IPC::Run::start(
		[ 'psql', '-XAtq', '-v', 'VERBOSITY=sqlstate', '-d', $node->connstr('busy') . ' user=owner application_name=client', '-f', "$folder/client_$client.sql" ],
		'<', \undef, '>', '/dev/null', '2>', "$folder/client_$client.err");
}
# Of cancelled and late leases
my $expected = qr/ERROR:  ID(409|410|503)$/;
sub errors { return grep { /ERROR/ && !/$expected/ } map { split /\n/, slurp_file("$folder/client_$_.err") } 1 .. 3 }
sub upgrades_under_load
{
	my ($to) = @_;
	my $done = as('owner', 'busy', 'SELECT count(*) FROM executions');
	$node->poll_query_until('busy', "SELECT count(*) >= $done + 100 FROM requests.executions") or die 'no request is executed';
	like(run_file($file{$to}, 'owner', 'busy'), qr/NOTICE:  idem was upgraded from \S+ to \S+\n\z/, "load: $to");
}
upgrades_under_load($_) for qw(other psql other psql);
is(join("\n", errors()), '', 'load: no call fails where only bodies were replaced');
upgrades_under_load($_) for qw(patch later);
note $_ for errors();
is(join("\n", grep { !/ERROR:  (XX000|42\w{3}|0A000)$/ } errors()), '', 'load: with other internal objects, calls in the midst of it may fail');
cmp_ok(scalar(errors()), '<=', 12, 'load: a few of them');
my $done = as('owner', 'busy', 'SELECT count(*) FROM executions');
$node->poll_query_until('busy', "SELECT count(*) >= $done + 100 FROM requests.executions") or die 'no request is executed';
as($superuser, 'busy', "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'client'");
$_->finish for @clients;
$node->poll_query_until('busy', "SELECT count(*) = 0 FROM pg_stat_activity WHERE application_name = 'client'") or die 'a client does not end';
as('owner', 'busy', q{
SET idem.wait = -1;
DO $$
DECLARE
	last constant int8 := (SELECT max(request_id::int8) FROM idem_claims WHERE scope = 'load');
BEGIN
	FOR request IN 0 .. last LOOP
		CALL execute(request, 0);
		COMMIT;
	END LOOP;
END $$});
is(as('owner', 'busy', 'SELECT count(*) FROM (SELECT request FROM executions GROUP BY request HAVING count(*) > 1) AS doubled'), '0',
	'load: no request was executed twice');
is(as('owner', 'busy', q{
		SELECT count(*) FROM executions FULL JOIN (SELECT * FROM idem_claims WHERE scope = 'load') AS c ON request::text = request_id
		WHERE request IS NULL OR request_id IS NULL OR state::text <> 'completed' OR result <> to_jsonb(client)}),
	'0', 'load: each execution has its claim and result, and each claim its execution');
is(as('owner', 'busy', 'SELECT count(DISTINCT request) = max(request) + 1 FROM executions'), 't', 'load: none was lost');
$_->quit for $long, $short, $reader, @sessions;

# ----- as an extension -----

$node->stop;
my $server = Server->copy(Server::of_the_suite());
my $tree = Server::tree('portable');
my $sharedir = $server->ask('sharedir');
local $ENV{MAKEFLAGS} = '';
is(system("make -s -C '$tree' PG_CONFIG='$server->{pg_config}' UPDATES_FROM=0.9 install-portable"), 0, 'an extension that is updated from version 0.9');
append_to_file("$sharedir/extension/idem_portable--0.9.sql", slurp_file('sql/idem_portable--1.0.sql') =~ s/\Q$version\E/0.9.0+1.1/gr);
my $other = PostgreSQL::Test::Cluster->new('other', install_path => $server->prefix);
$other->init;
$other->start;
$node = $other;
$node->safe_psql('postgres', "CREATE ROLE $_ LOGIN") for qw(owner app reporter);
new_database('shop');
as('owner', 'shop', q{
CREATE EXTENSION idem_portable SCHEMA requests VERSION '0.9';
SELECT idem_grant('app', 'app');
INSERT INTO idem_scopes (scope, ttl) VALUES ('mail', '2 days')});
is(as('app', 'shop', "SELECT idem_claim('user', 'before'), idem_version()"), 't|0.9.0+1.1', 'it is installed');
like(run_file($file{psql}, 'owner', 'shop'), qr/^ERROR:  idem is the extension "idem_portable" in this database\n.*\nHINT:  Upgrade it as an extension: ALTER EXTENSION idem_portable UPDATE\.\n/, 'the file does not upgrade it');
my $members = q{SELECT pg_describe_object(classid, objid, 0) FROM pg_depend WHERE refclassid = 'pg_extension'::regclass AND deptype = 'e' AND refobjid = (SELECT oid FROM pg_extension WHERE extname = 'idem_portable') ORDER BY 1;
SELECT extversion, extconfig::regclass[], extcondition FROM pg_extension WHERE extname = 'idem_portable'};
as($node->safe_psql('postgres', 'SELECT current_user'), 'shop', 'ALTER EXTENSION idem_portable UPDATE');
is(as('app', 'shop', "SELECT idem_claim('user', 'before'), idem_claim('user', 'after'), idem_version()"), "f|t|$version", 'ALTER EXTENSION upgrades it, by a superuser, too');
new_database('fresh');
as('owner', 'fresh', "CREATE EXTENSION idem_portable SCHEMA requests; SELECT idem_grant('app', 'app')");
is(as('owner', 'shop', "$objects; $members"), as('owner', 'fresh', "$objects; $members"), 'with the objects, members and rights of a fresh one');
new_database('by_file');
is(run_file($file{psql}, 'owner', 'by_file'), '', 'by its file');
(undef, undef, $err) = $node->psql('by_file', 'CREATE EXTENSION idem_portable SCHEMA requests', extra_params => [ '-U', 'owner' ]);
like($err, qr/ERROR:  idem is installed in this database already, in schema requests\n/, 'is not made an extension by CREATE EXTENSION');

$node->stop;
done_testing();
