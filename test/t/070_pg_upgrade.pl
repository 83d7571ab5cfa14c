# pg_upgrade keeps what idem promises, in both editions: claims guard, holders settle their leases,
# tokens grow, scopes and settings act, roles have the rights they had, and the cleaner cleans.
#
# To the newest server that is installed, from the oldest one that it can follow. test/versions
# makes servers of other versions. Where there is only one, it is upgraded to itself, which
# pg_upgrade does in the same way.
#
# IDEM_PG_UPGRADE_MODE: an argument for pg_upgrade, such as --link. Default: it copies.

use strict;
use warnings;

use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use IPC::Run;

use Server;

my $suite = Server::of_the_suite() // plan skip_all => 'pg_upgrade is not installed';
my @servers = Server::installed();
my ($to) = grep { $_->major == $servers[-1]->major } @servers;
my ($from) = grep { $_->upgrades_to($to) } @servers;
$from = $to = $suite if $from->major == $to->major;
my $step = 'PostgreSQL ' . $from->version . ' to ' . $to->version;
note $step;

# For a server that is not the suite's, idem is built in a copy of it.
for my $server ($from, $to)
{
	next if $server->bindir eq $suite->bindir;
	my $copy = Server->copy($server);
	my $tree = Server::tree('build' . $server->major);
	system_or_bail('make', '-s', '-C', $tree, 'clean');
	$copy->install($tree, 'PROFILE=-O0');
	$server = $copy;
}

my %database = (
	idem => 'CREATE EXTENSION idem SCHEMA requests',
	idem_portable => 'CREATE EXTENSION idem_portable SCHEMA requests',
	portable => '\i sql/idem-portable.sql');
my @databases = sort keys %database;

sub cluster
{
	my ($name, $server) = @_;
	my $node = PostgreSQL::Test::Cluster->new($name, install_path => $server->prefix);

	# What initdb does without these depends on the version.
	$node->init(extra => [ '--data-checksums', '--encoding=UTF8', '--locale=C' ]);
	$node->append_conf('postgresql.conf', "shared_preload_libraries = 'idem'\nidem.cleanup_interval = '50ms'\nlog_statement = none");
	return $node;
}

my $node = cluster('old', $from);
$node->append_conf('postgresql.conf', "idem.cleanup_databases = 'nothing'");
$node->start;
$node->safe_psql('postgres', "CREATE ROLE $_ LOGIN") for qw(owner app operator stranger);
$node->safe_psql('postgres', 'GRANT stranger TO owner');

sub as
{
	my ($role, $database, $sql) = @_;
	return $node->safe_psql($database, "SET search_path = requests, public; $sql", extra_params => [ '-U', $role ]);
}

# The outcome, or the SQLSTATE of the error
sub outcome
{
	my ($role, $database, $sql) = @_;
	my ($status, $out, $err) = $node->psql($database, "SET search_path = requests, public; $sql",
		extra_params => [ '-U', $role, '-v', 'VERBOSITY=sqlstate' ]);
	return $status == 0 ? $out : $err =~ s/.*ERROR: +(\w+).*/$1/sr;
}

# ----- what there is to keep -----

# A request id with the time of now
my $uuidv7 = $node->safe_psql('postgres', q{
	SELECT (lpad(to_hex((extract(epoch FROM clock_timestamp()) * 1000)::int8), 12, '0') || '70008' || left(md5('seed'), 15))::uuid});
my %token;

for my $database (@databases)
{
	$node->safe_psql('postgres', "CREATE DATABASE $database OWNER owner");
	as('owner', $database, "CREATE SCHEMA requests; \\set schema requests\n$database{$database}");
	as('owner', $database, q{
		SELECT idem_grant('app', 'app'), idem_grant('operator', 'operator');
		CREATE TABLE public.orders (customer text, event text);
		CREATE TRIGGER once BEFORE INSERT ON public.orders
			FOR EACH ROW EXECUTE FUNCTION requests.idem_skip_duplicates('orders', 'customer', 'event');
		GRANT SELECT, INSERT ON public.orders TO app;
		CREATE FUNCTION public.claimed(request text) RETURNS boolean LANGUAGE sql
			BEGIN ATOMIC SELECT requests.idem_claim('user'::text, request); END;
		CREATE FUNCTION public.double(n int) RETURNS int LANGUAGE sql AS 'SELECT n * 2';
		CREATE VIEW public.mail AS SELECT ttl, failed FROM requests.idem_scopes WHERE scope = 'mail'});
	as('operator', $database, q{
		INSERT INTO idem_scopes (scope, ttl, lease, lease_max, failed, lapsed, result_max_bytes)
			VALUES ('mail', '2 days', '1 min', '2 min', 'retryable', 'unknown', 100);
		INSERT INTO idem_scopes (scope, ttl) VALUES ('short', '1 ms');
		INSERT INTO idem_scopes (scope, ttl, key_time) VALUES ('v7', '1 day', 'uuidv7')});
	# As if that row had been there for a while; a column that somebody added and dropped again;
	# and a setting of the database.
	$node->safe_psql($database, q{
		SET session_replication_role = replica;
		UPDATE requests.idem_scopes SET guarded_since = now() - interval '1 hour' WHERE scope = 'v7';
		RESET session_replication_role;
		ALTER TABLE requests.idem_claims ADD COLUMN extra int;
		ALTER TABLE requests.idem_claims DROP COLUMN extra;
		SELECT nextval('requests.idem_token_seq') FROM generate_series(1, 1000)});
	$node->safe_psql($database, $database eq 'idem' ? "ALTER DATABASE idem SET idem.ttl = '3h'" :
		"UPDATE requests.idem_settings SET ttl = '3 hours'");

	as('app', $database, q{
		BEGIN;
		SELECT idem_claim('user', 'done', fingerprint => '\x0102');
		SELECT idem_complete(jsonb_build_object('paid', 30, 'text', (SELECT string_agg(md5(n::text), '') FROM generate_series(1, 3000) AS n)));
		SELECT idem_claim('user', 'marker');
		SELECT idem_claim('user', 'refused');
		SELECT idem_fail('user', 'refused', '"no"');
		SELECT idem_claim('user', 'again', 'mail');
		SELECT idem_fail('user', 'again', '"later"', scope => 'mail');
		SELECT idem_call('user', 'called', 'public.double(int)', '{"n": 21}');
		INSERT INTO orders VALUES ('user', 'first');
		COMMIT;
		SELECT idem_claim('user', 'past ' || n, 'short') FROM generate_series(1, 100) AS n});
	$token{$database} = {
		map {
			my ($request, $scope, $lease) = @$_;
			$request => as('app', $database, qq{
				SELECT token FROM idem_lease('user', '$request', scope => '$scope', lease => '$lease', progress => '["$request"]')})
		} [ 'held', '', '1 day' ],
		[ 'slow', '', '1 us' ],
		[ 'taken over', '', '1 us' ],
		[ 'unknown', 'mail', '1 us' ]
	};
	cmp_ok($token{$database}{held}, '>', 1000, "$database: there are claims and leases");
}

my $content = q{
	SELECT request_id, scope, user_id, state, expires_at, lease_until, token, fingerprint, md5(result::text), progress FROM idem_claims
		WHERE scope <> 'short' ORDER BY request_id, scope;
	SELECT * FROM idem_scopes ORDER BY scope;
	SELECT last_value, is_called FROM idem_token_seq;
	SELECT * FROM mail;
	SELECT extversion, extconfig::regclass[]::text, extcondition FROM pg_extension WHERE extname ~ 'idem';
	SELECT setting FROM pg_db_role_setting, unnest(setconfig) AS setting ORDER BY 1};

# Whose right it is; an owner has the rights that its server knows. By name: an OID is another one
# in the new cluster.
my $rights = q{
	SELECT pg_get_userbyid(o.owner) AS owner, o.name, a.grantor::regrole, CASE a.grantee WHEN 0 THEN 'PUBLIC' ELSE a.grantee::regrole::text END,
		a.privilege_type, a.is_grantable
	FROM (
		SELECT p.oid::regprocedure::text, p.proowner, coalesce(p.proacl, acldefault('f', p.proowner)) FROM pg_proc AS p WHERE p.proname ~ '^idem_'
		UNION ALL SELECT c.oid::regclass::text, c.relowner, c.relacl FROM pg_class AS c WHERE c.relname ~ '^idem_'
		UNION ALL SELECT a.attrelid::regclass || '.' || a.attname, c.relowner, a.attacl FROM pg_attribute AS a JOIN pg_class AS c ON c.oid = a.attrelid
			WHERE c.relname ~ '^idem_' AND NOT a.attisdropped
		UNION ALL SELECT t.oid::regtype::text, t.typowner, coalesce(t.typacl, acldefault('T', t.typowner)) FROM pg_type AS t WHERE t.typname ~ '^idem_' AND t.typtype = 'e'
		UNION ALL SELECT n.nspname, n.nspowner, n.nspacl FROM pg_namespace AS n WHERE n.nspname = 'requests'
	) AS o (name, owner, acl), aclexplode(o.acl) AS a
	WHERE a.grantee <> o.owner
	ORDER BY o.name COLLATE "C", 3, 4, 5};
# But for types that come with a table: it depends on the version whether they are members.
my $members = q{
	SELECT pg_describe_object(d.classid, d.objid, d.objsubid)
	FROM pg_depend AS d LEFT JOIN pg_type AS t ON d.classid = 'pg_type'::regclass AND t.oid = d.objid
	WHERE d.refclassid = 'pg_extension'::regclass AND d.deptype = 'e' AND d.refobjid IN (SELECT oid FROM pg_extension WHERE extname ~ 'idem')
		AND (t.oid IS NULL OR t.typtype = 'e')
	ORDER BY 1};

my %before;
for my $database (@databases)
{
	$before{$database} = { map { $_ => $node->safe_psql($database, "SET search_path = requests, public; $_") } $content, $rights, $members };
	like($before{$database}{$content}, qr/^done\|.*\n.*^mail\|2 days\|/ms, "$database: with claims and scopes");
	cmp_ok(scalar($before{$database}{$rights} =~ s/^.*\|app\|//mgr), 'ne', $before{$database}{$rights}, "$database: and rights");
}
# The cleaner of the C edition was told to leave them alone.
is(as('owner', 'idem', "SELECT count(*) FROM idem_claims WHERE scope = 'short'"), '100', 'expired claims wait to be removed');
$node->stop;

# ----- the upgrade -----

my $old = $node;
$node = cluster('new', $to);
my ($out, $err) = ('', '');
{
	# It writes logs into the current folder, and its programs find their libraries by rpath.
	my $here = Cwd::getcwd();
	chdir $node->basedir || die "chdir: $!";
	my $done = IPC::Run::run(
		[
			$to->bindir . '/pg_upgrade', '-b', $from->bindir, '-B', $to->bindir,
			'-d', $old->data_dir, '-D', $node->data_dir, '-p', $old->port, '-P', $node->port,
			'-s', $node->host, '-N', split(/ /, $ENV{IDEM_PG_UPGRADE_MODE} // '')
		],
		'<', \undef, '>', \$out, '2>', \$err);
	chdir $here || die "chdir: $!";
	ok($done, "pg_upgrade from $step") or BAIL_OUT($out . $err . join('', map { slurp_file($_) }
			glob($node->data_dir . '/pg_upgrade_output.d/*/log/* ' . $node->basedir . '/*.{log,txt}')));
}
$node->start;
is($node->safe_psql('postgres', 'SHOW server_version_num') =~ s/....$//r, $to->major, 'the new server runs');

# ----- what was kept -----

for my $database (@databases)
{
	my %after = map { $_ => $node->safe_psql($database, "SET search_path = requests, public; $_") } $content, $rights, $members;

	is($after{$rights}, $before{$database}{$rights}, "$database: each role has the rights it had");
	is($after{$members}, $before{$database}{$members}, "$database: the extension has the same members");

	is($after{$content}, $before{$database}{$content}, "$database: the same claims, scopes, tokens and settings");

	is( as('app', $database, q{
			SELECT outcome, result ->> 'paid', length(result ->> 'text') FROM idem_try_claim('user', 'done', fingerprint => '\x0102');
			SELECT outcome FROM idem_try_claim('user', 'done', fingerprint => '\x03');
			SELECT idem_claim('user', 'marker'), idem_claim('user', 'new'), claimed('marker'), claimed('newer');
			SELECT outcome, result FROM idem_try_claim('user', 'refused');
			SELECT idem_call('user', 'called', 'public.double(int)', '{"n": 21}')}),
		qq(completed|30|96000\nmismatch\nf|t|f|t\nfailed|"no"\n42), "$database: claims guard, and answer with what was stored");
	is( as('app', $database, q{
			WITH inserted AS (INSERT INTO orders VALUES ('user', 'first'), ('user', 'second') RETURNING event)
			SELECT string_agg(event, ' ') FROM inserted}),
		'second', "$database: a sink skips what it had received");
	is(outcome('app', $database, "SELECT idem_claim('user', 'refused')"), 'ID417', "$database: errors have their SQLSTATE");
	is(outcome('stranger', $database, "SELECT requests.idem_claim('user', 'marker')"), '42501', "$database: a stranger may not claim");
	is(outcome('app', $database, "SELECT idem_forget('user', 'marker')"), '42501', "$database: an application may not forget");

	# The extension itself belongs to the superuser now: PostgreSQL does not dump its owner.
	is( outcome('owner', $database, q{
			SELECT FROM requests.idem_grant('stranger', 'app'); SET ROLE stranger; SELECT idem_claim('user', 'marker'); RESET ROLE;
			SELECT FROM requests.idem_revoke('stranger', 'app')}), 'f', "$database: who installed it grants and revokes");

	# Scopes
	is( as('app', $database, qq{
			SELECT outcome FROM idem_try_claim('user', 'again', 'mail');
			SELECT outcome, progress FROM idem_try_claim('user', 'unknown', 'mail');
			SELECT outcome FROM idem_try_claim('user', '$uuidv7', 'v7');
			SELECT outcome FROM idem_try_claim('user', '01000000-0000-7000-8000-000000000000', 'v7');
			SELECT expires_at > now() + interval '47 hours' FROM idem_try_claim('user', 'two days', 'mail');
			SELECT lease_until < now() + interval '5 min' FROM idem_lease('user', 'two minutes', scope => 'mail', lease => '2 min')}),
		qq(claimed\nunknown|["unknown"]\nclaimed\nstale\nt\nt), "$database: scopes keep their promises");
	is(outcome('app', $database, "SELECT FROM idem_lease('user', 'an hour', scope => 'mail', lease => '1 hour')"), 'ID400', "$database: lease_max");
	is(outcome('app', $database, "BEGIN; SELECT idem_claim('user', 'large', 'mail'); SELECT idem_complete(to_jsonb(repeat('x', 101)))"), 'ID413', "$database: result_max_bytes");
	is( as('app', $database, "SELECT expires_at - now() BETWEEN interval '2 hours' AND interval '4 hours' FROM idem_try_claim('user', 'three hours')"),
		't', "$database: the ttl of the setting");
	as('operator', $database, "UPDATE idem_scopes SET ttl = '2 days' WHERE scope = 'v7'");
	is( as('app', $database, "SELECT outcome FROM idem_try_claim('user', '" . ($uuidv7 =~ s/.$/f/r) . "', 'v7')"),
		'stale', "$database: a change of a policy acts");

	# Leases
	my $token = $token{$database};
	is( as('app', $database, qq{
			SELECT outcome, progress FROM idem_try_claim('user', 'held', wait => '0');
			SELECT idem_extend('user', 'held', $token->{held}, '1 day') > now() + interval '23 hours';
			SELECT idem_complete('user', 'held', '1', $token->{held});
			SELECT outcome, result FROM idem_try_claim('user', 'held');
			SELECT idem_complete('user', 'slow', '2', $token->{slow})}),
		qq(in_progress|["held"]\nt\nt\ncompleted|1\nt), "$database: holders settle their leases, also a late one");
	my $next = as('app', $database, "SELECT token FROM idem_lease('user', 'taken over', lease => '1 hour')");
	my @earlier = sort { $a <=> $b } values %$token;
	cmp_ok($next, '>', $earlier[-1], "$database: tokens go on from where they were");
	is(outcome('app', $database, "SELECT idem_complete('user', 'taken over', '3', $token->{'taken over'})"), 'ID410', "$database: the holder before is refused");
	is(as('app', $database, "SELECT idem_complete('user', 'taken over', '3', $next)"), 't', "$database: and the one after settles");
	like(as('operator', $database, "SELECT scope, request_id, status FROM idem_lapsed()"), qr/^mail\|unknown\|unknown$/m, "$database: an operator finds what was left behind");
	is(as('operator', $database, q{SELECT idem_heal('user', 'unknown', '"yes"', 'mail'); SELECT idem_status('user', 'unknown', 'mail')}),
		"t\ncompleted", "$database: and heals it");
	like(as('operator', $database, 'SELECT * FROM idem_unsettled'), qr/\btwo minutes\b/, "$database: view idem_unsettled");
	like(as('operator', $database, 'SELECT * FROM idem_holders'), qr/\btwo minutes\b/, "$database: view idem_holders");

	# The cleaner
	if ($database eq 'idem')
	{
		$node->poll_query_until($database, q{SELECT count(*) = 0 FROM requests.idem_claims WHERE scope = 'short'});
		is(as('operator', $database, 'SELECT cleaning, errors, rows_deleted FROM idem_stat_cleanup'), 'worker|0|100', "$database: the worker has removed what had expired");
		is(as('operator', $database, 'SELECT claimed > 0, mismatch FROM idem_stat_claims'), 't|1', "$database: view idem_stat_claims");
	}
	else
	{
		is(outcome('app', $database, "SELECT outcome FROM idem_try_claim('user', 'past 1', 'short')"), 'completed', "$database: what has expired guards until it is removed");
		is(as('operator', $database, 'SELECT idem_cleanup()'), '100', "$database: the cleaner removes what has expired");
	}
	cmp_ok(as('operator', $database, 'SELECT count(*) FROM idem_metrics'), '>', 2, "$database: view idem_metrics");
	is( as('app', $database, q{SELECT outcome FROM idem_try_claim('user', 'past 1', 'short')}), 'claimed', "$database: and that is forgotten");

	# It can be dumped and restored: the extension's own rights, and the tables whose rows are data
	my $dump = $node->basedir . "/$database.dump";
	my %restored;
	$node->safe_psql('postgres', "CREATE DATABASE copy_of_$database OWNER owner");
	$node->command_ok([ 'pg_dump', '-Fc', '-f', $dump, $node->connstr($database) ], "$database: it can be dumped");
	$node->command_ok([ 'pg_restore', '--exit-on-error', '-d', $node->connstr("copy_of_$database"), $dump ], "$database: and restored");
	is($node->safe_psql("copy_of_$database", "SET search_path = requests, public; SELECT idem_claim('user', 'marker'), idem_claim('user', 'held'), idem_claim('user', 'newest')"),
		'f|f|t', "$database: where claims guard");
}

# ----- the owner of an extension -----

# Objects of ours that depend on idem's are in the way of a move.
as('owner', 'idem_portable', 'DROP VIEW public.mail; DROP TRIGGER once ON public.orders; DROP FUNCTION public.claimed');

sub owner_moves
{
	my $said = '';
	IPC::Run::run(
		[
			'psql', '-XAtq', '-U', 'owner', '-v', 'schema=requests', '-v', 'to=idem_portable', '-f', 'sql/idem-move.sql',
			'-d', $node->connstr('idem_portable')
		],
		'<', \undef, '>&', \$said);
	return $said;
}

like(owner_moves(), qr/ERROR:  idem belongs to role (?!owner)/, 'the role that installed it does not own the extension any more');
my ($detach) = slurp_file('doc/operations.md') =~ /^(BEGIN;\nSET LOCAL search_path = pg_catalog, pg_temp;\nDO [^`]*^COMMIT;\n)/m;
$node->safe_psql('idem_portable', $detach);
is(outcome('app', 'idem_portable', "SELECT idem_claim('user', 'marker')"), 'f', 'taken out of the extension, claims guard');
like(owner_moves(), qr/moved from portable to idem_portable/, 'and the role moves them into one');
is($node->safe_psql('idem_portable', q{SELECT extowner::regrole FROM pg_extension WHERE extname = 'idem_portable'}), 'owner', 'which it owns');
is(outcome('app', 'idem_portable', "SELECT idem_claim('user', 'marker')"), 'f', 'claims guard as before');

my $log = slurp_file($node->logfile);
unlike($log, qr/was terminated by signal|TRAP:|PANIC:/, 'no process of the new server has failed');

SKIP:
{
	skip "no other version is installed that can be upgraded, so this one was upgraded to itself. \"test/versions NN\" installs one", 1
	  if $from->major == $to->major;
	pass("from $step");
}
$node->stop;
done_testing();
