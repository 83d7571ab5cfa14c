# Attacks on a move between the editions: no role gets more rights than it was granted. Each of
# these attacks once worked.

use strict;
use warnings;

use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use IPC::Run;

use Client;

my $node = PostgreSQL::Test::Cluster->new('main');
$node->init;
$node->start;
my $superuser = $node->safe_psql('postgres', 'SELECT current_user');
$node->safe_psql('postgres', "CREATE ROLE $_ LOGIN") for qw(owner attacker app operator helpdesk anon);

sub as
{
	my ($role, $database, $sql) = @_;
	return $node->safe_psql($database, $sql, extra_params => [ '-U', $role ]);
}

# Returns exit code and errors
sub run_script
{
	my ($file, $role, $database, %variables) = @_;
	my ($out, $err) = ('', '');

	IPC::Run::run(
		[
			'psql', '-XAtq', '-h', $node->host, '-p', $node->port, '-U', $role,
			(map { ('-v', "$_=$variables{$_}") } sort keys %variables), '-f', $file, $database
		],
		'<', \undef, '>', \$out, '2>', \$err);
	return ($? >> 8, $err);
}

sub moves
{
	my ($role, $database, $to) = @_;
	return run_script('sql/idem-move.sql', $role, $database, schema => 'requests', to => $to);
}

sub new_database
{
	my ($name, $schema_owner) = @_;

	$node->safe_psql('postgres', "CREATE DATABASE $name OWNER owner");
	$node->safe_psql($name, "CREATE SCHEMA requests AUTHORIZATION $schema_owner; GRANT USAGE ON SCHEMA requests TO PUBLIC");
	return $name;
}

sub superusers
{
	return $node->safe_psql('postgres', "SELECT string_agg(rolname, ' ') FROM pg_roles WHERE rolsuper AND rolname <> '$superuser'");
}

# Operators that match better than those of the system, and make their owner superuser
my $traps = q{
CREATE FUNCTION requests.evil(a name, b name) RETURNS bool LANGUAGE plpgsql AS $$
BEGIN
	IF (SELECT rolsuper FROM pg_roles WHERE rolname = current_user) THEN
		ALTER ROLE attacker SUPERUSER;
	END IF;
	RETURN a::text = b::text;
END $$;
CREATE FUNCTION requests.evil(a name, b text) RETURNS bool LANGUAGE plpgsql AS $$
BEGIN
	IF (SELECT rolsuper FROM pg_roles WHERE rolname = current_user) THEN
		ALTER ROLE attacker SUPERUSER;
	END IF;
	RETURN a::text OPERATOR(pg_catalog.=) b;
END $$;
CREATE FUNCTION requests.evil(a float8, b int4) RETURNS float8 LANGUAGE plpgsql AS $$
BEGIN
	IF (SELECT rolsuper FROM pg_roles WHERE rolname = current_user) THEN
		ALTER ROLE attacker SUPERUSER;
	END IF;
	RETURN a OPERATOR(pg_catalog.*) b::float8;
END $$;
CREATE OPERATOR requests.~~ (LEFTARG = name, RIGHTARG = name, FUNCTION = requests.evil);
CREATE OPERATOR requests.= (LEFTARG = name, RIGHTARG = name, FUNCTION = requests.evil);
CREATE OPERATOR requests.= (LEFTARG = name, RIGHTARG = text, FUNCTION = requests.evil);
CREATE OPERATOR requests.* (LEFTARG = float8, RIGHTARG = int4, FUNCTION = requests.evil);
};

# ----- the owner of the schema -----

new_database('from_c', 'attacker');
$node->safe_psql('from_c', 'CREATE EXTENSION idem SCHEMA requests');
as('attacker', 'from_c', $traps);
my ($status, $err) = moves($superuser, 'from_c', 'idem_portable');
is(superusers(), '', 'from the C edition: the owner of the schema did not become superuser');
isnt($status, 0, 'from the C edition: refused');
like($err, qr/others may create objects in schema requests: attacker\n.*HINT:  .*ALTER SCHEMA requests OWNER TO/s, 'and the owner named');
as($superuser, 'from_c', 'ALTER SCHEMA requests OWNER TO CURRENT_USER');
($status, $err) = moves($superuser, 'from_c', 'idem_portable');
is(superusers(), '', 'what he has left behind: nobody became superuser');
like($err, qr/others own objects in schema requests: function requests.evil/, 'refused, and named');
as($superuser, 'from_c', 'DROP FUNCTION requests.evil(name, name), requests.evil(name, text), requests.evil(float8, int4) CASCADE');
($status, $err) = moves($superuser, 'from_c', 'idem_portable');
is($status, 0, 'the HINTs work') or diag $err;

new_database('to_c', 'attacker');
is((run_script('sql/idem-portable.sql', $superuser, 'to_c', schema => 'requests'))[0], 0, 'the portable edition, by a superuser');
as('attacker', 'to_c', $traps);
($status, $err) = moves($superuser, 'to_c', 'idem');
is(superusers(), '', 'to the C edition: the owner of the schema did not become superuser');
like($err, qr/idem belongs to role attacker/, 'to the C edition: it is his already');

# ----- objects that are committed while the move waits -----

my $planted = q{
CREATE FUNCTION requests.idem_fingerprint(a text) RETURNS bytea LANGUAGE plpgsql AS $$
BEGIN
	RAISE WARNING 'hijacked';
	RETURN '';
END $$;
CREATE FUNCTION requests.idem_grant(a oid, b text) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
	RAISE WARNING 'hijacked';
END $$;
};
for my $way ([ 'idem', 'idem_portable' ], [ 'portable', 'idem' ])
{
	my ($from, $to) = @$way;
	my $database = new_database("while_$from", 'owner');

	as($superuser, $database, 'ALTER SCHEMA requests OWNER TO CURRENT_USER');
	if ($from eq 'idem') { as($superuser, $database, 'CREATE EXTENSION idem SCHEMA requests') }
	else { run_script('sql/idem-portable.sql', $superuser, $database, schema => 'requests') }
	as($superuser, $database, "SELECT requests.idem_grant('app', 'app'); GRANT CREATE ON SCHEMA requests TO app");

	my $planter = Client->new($node, $database);
	$planter->ask('SET SESSION AUTHORIZATION app');
	$planter->ask('BEGIN');
	$planter->ask($_) for split /;\n(?=CREATE)/, $planted =~ s/;\n\z//r;
	is($planter->ask("SELECT requests.idem_claim('u', 'r')"), 't', "from $from: a transaction that claims, and plants functions");
	as($superuser, $database, 'REVOKE CREATE ON SCHEMA requests FROM app');
	my ($out, $complaints) = ('', '');
	my $mover = IPC::Run::start(
		[
			'psql', '-XAtq', '-h', $node->host, '-p', $node->port, '-U', $superuser, '-v', 'schema=requests', '-v', "to=$to",
			'-f', 'sql/idem-move.sql', $database
		],
		'<', \undef, '>', \$out, '2>', \$complaints, IPC::Run::timeout(60));
	$node->poll_query_until($database, 'SELECT count(*) > 0 FROM pg_locks WHERE NOT granted')
	  or die 'the move does not wait';
	$planter->ask('COMMIT');
	$mover->finish;
	unlike($complaints, qr/hijacked/, "from $from: what was planted is not called");
	like($complaints, qr/others own objects in schema requests: function requests.idem_fingerprint\(text\), function requests.idem_grant\(oid,text\)\n/,
		"from $from: refused, and named");
	$planter->ask('ROLLBACK');
	is($planter->ask("SELECT requests.idem_claim('u', 'r')"), 'f', "from $from: nothing has changed");
	$planter->quit;

	# A table with the name of one that a distributed idem has
	as($superuser, $database, q{
DROP FUNCTION requests.idem_fingerprint(text), requests.idem_grant(oid, text);
CREATE TABLE requests.idem__token_source ();
ALTER TABLE requests.idem__token_source OWNER TO app});
	($status, $err) = moves($superuser, $database, $to);
	is($status, 0, "from $from: moved, though a stranger has a table idem__token_source") or diag $err;
}

# ----- objects that depend on idem's -----

# To make one, a role needs no right on idem's objects, nor on their schema.
new_database('tied', 'owner');
is((run_script('sql/idem-portable.sql', 'owner', 'tied', schema => 'requests'))[0], 0, 'the portable edition');
as('owner', 'tied', 'REVOKE USAGE ON SCHEMA requests FROM PUBLIC');
my %ties = (
	"CREATE TEMPORARY VIEW tied AS SELECT '%s'::regclass AS x" => qr/view pg_temp_\d+\.tied/,
	"CREATE TEMPORARY TABLE tied (x regclass DEFAULT '%s'::regclass)" => qr/table pg_temp_\d+\.tied/,
	"CREATE FUNCTION pg_temp.tied() RETURNS regclass LANGUAGE sql RETURN '%s'::regclass" => qr/function pg_temp_\d+\.tied\(\)/);
for my $to (qw(idem idem_portable))
{
	for my $tie (sort keys %ties)
	{
		my $stranger = Client->new($node, 'tied');
		my $oid = $node->safe_psql('tied', "SELECT 'requests.idem_metrics'::regclass::oid");

		$stranger->ask('SET SESSION AUTHORIZATION attacker');
		$stranger->ask(sprintf($tie, $oid));
		($status, $err) = moves('owner', 'tied', $to);
		like($err, qr/ERROR:  objects depend on idem: $ties{$tie} of role attacker\nDETAIL:  .* depends on view requests\.idem_metrics\nHINT:  Have them dropped/,
			"to $to: refused, names object and role: $tie");
		$stranger->quit;
		$node->poll_query_until('tied', q{SELECT NOT EXISTS (SELECT FROM pg_class WHERE relname = 'tied' UNION ALL SELECT FROM pg_proc WHERE proname = 'tied')})
		  or die 'the session has not ended';
	}
	as($superuser, 'tied', 'CREATE VIEW public.last AS SELECT * FROM requests.idem_claims; CREATE TYPE public.answer AS (o requests.idem_outcome); ALTER TYPE public.answer OWNER TO app');
	($status, $err) = moves('owner', 'tied', $to);
	like($err, qr/ERROR:  objects depend on idem: type public\.answer of role app, view public\.last of role \Q$superuser\E\n/, "to $to: names several, also those of a superuser");
	as($superuser, 'tied', 'DROP VIEW public.last; DROP TYPE public.answer');
	($status, $err) = moves('owner', 'tied', $to);
	is($status, 0, "to $to: moves when they are gone") or diag $err;
}

# ----- rights -----

new_database('rights', 'owner');
is((run_script('sql/idem-portable.sql', 'owner', 'rights', schema => 'requests'))[0], 0, 'the portable edition');
as('owner', 'rights', q{
SELECT requests.idem_grant('app', 'app'), requests.idem_grant('operator', 'operator');
GRANT EXECUTE ON FUNCTION requests.idem_forget(text, text, text) TO helpdesk WITH GRANT OPTION;
GRANT SELECT (request_id, state) ON requests.idem_claims TO helpdesk;
GRANT SELECT ON requests.idem__cleanup_batches TO helpdesk;
ALTER DEFAULT PRIVILEGES GRANT ALL ON TABLES TO anon;
ALTER DEFAULT PRIVILEGES IN SCHEMA requests GRANT ALL ON ROUTINES TO anon;
ALTER DEFAULT PRIVILEGES GRANT ALL ON SEQUENCES TO anon;
ALTER DEFAULT PRIVILEGES GRANT ALL ON TYPES TO anon;
});

sub rights
{
	my ($role) = @_;

	return as('owner', 'rights', qq{
SELECT string_agg(o.name || ' ' || a.privilege_type, ', ' ORDER BY o.name, a.privilege_type)
FROM (SELECT proname, coalesce(proacl, acldefault('f', proowner)) FROM pg_proc WHERE pronamespace = 'requests'::regnamespace
		AND NOT proname ^@ 'idem__call_'		-- only in the portable edition
	UNION ALL SELECT relname, relacl FROM pg_class WHERE relnamespace = 'requests'::regnamespace
	UNION ALL SELECT relname || '.' || attname, attacl FROM pg_class JOIN pg_attribute ON attrelid = pg_class.oid WHERE relnamespace = 'requests'::regnamespace
	UNION ALL SELECT typname, typacl FROM pg_type WHERE typnamespace = 'requests'::regnamespace) AS o (name, acl), aclexplode(o.acl) AS a
WHERE a.grantee = '$role'::regrole});
}

my $of_app = rights('app');
my $of_operator = rights('operator');
my $of_helpdesk = 'idem_claims.request_id SELECT, idem_claims.state SELECT, idem_forget EXECUTE';
like($of_operator, qr/idem_cleanup EXECUTE.*idem_settings UPDATE/, 'there is something to move');
($status, $err) = moves('owner', 'rights', 'idem');
is($status, 0, 'moved to the C edition') or diag $err;
is(rights('helpdesk'), $of_helpdesk, 'EXECUTE on idem_forget() alone does not make an operator');
like($err, qr/WARNING:  a right is not kept: SELECT ON TABLE requests.idem__cleanup_batches to helpdesk\n/, 'a right that is not kept is named');
unlike($err, qr/operator|app/, 'none of those of idem_grant() is');
is(rights('app'), $of_app, 'app');
like(rights('operator'), qr/idem_cleanup EXECUTE.*idem_metrics SELECT.*idem_stat_reset EXECUTE/, 'operator: what the C edition has for one');
($status, $err) = moves('owner', 'rights', 'idem_portable');
is($status, 0, 'moved back') or diag $err;
unlike($err, qr/WARNING/, 'nothing is lost');
is(rights('helpdesk'), $of_helpdesk, 'helpdesk is as before');
is(rights('app'), $of_app, 'so is app');
is(rights('operator'), $of_operator, 'and operator');
is(rights('anon'), '', 'default privileges have given nothing');
is(as('helpdesk', 'rights', 'GRANT EXECUTE ON FUNCTION requests.idem_forget(text, text, text) TO app; SELECT 1'), '1', 'what can be granted on, can');
as('owner', 'rights', q{SELECT format('REVOKE EXECUTE ON FUNCTION %s FROM app', oid::regprocedure) FROM pg_proc WHERE proname = 'idem_heal' \gexec});
moves('owner', 'rights', 'idem');
unlike(rights('app'), qr/idem_heal/, 'what was taken from a set stays taken');
like(rights('app'), qr/idem_try_claim EXECUTE/, 'and the rest is kept');

# Each right of an operator is revoked from a role of its own.
moves('owner', 'rights', 'idem_portable');
my %revoked = (
	(map { ("SELECT ($_) ON requests.idem_claims" => "idem_claims.$_ SELECT") }
		  qw(expires_at lease_until state request_id user_id scope fingerprint result progress)),
	(map { ("INSERT ($_) ON requests.idem_scopes" => "idem_scopes.$_ INSERT", "UPDATE ($_) ON requests.idem_scopes" => "idem_scopes.$_ UPDATE") }
		  qw(scope ttl lease lease_max failed lapsed expired key_time result_max_bytes)),
	(map { ("$_ ON requests.idem_scopes" => "idem_scopes $_") } qw(SELECT DELETE)),
	(map { ("$_ ON requests.idem_settings" => "idem_settings $_") } qw(SELECT UPDATE)),
	(map { ("SELECT ON requests.$_" => "$_ SELECT") } qw(idem_stat_cleanup idem_stat_table idem_stat_scopes idem_unsettled idem_holders)),
	'EXECUTE ON FUNCTION requests.idem_lapsed' => 'idem_lapsed EXECUTE',
	'USAGE ON TYPE requests.idem_state' => 'idem_state USAGE',
	'EXECUTE ON FUNCTION ' . join(', ', map { "requests.idem_forget($_, text)" }
		  ('text, text', 'text, uuid', 'uuid, text', 'uuid, uuid', 'bigint, text', 'bigint, uuid')) => 'idem_forget EXECUTE');
my %role_without = map { ($_ => undef) } sort keys %revoked;
my $number = 0;
for my $right (sort keys %revoked)
{
	my $role = $role_without{$right} = 'operator_' . ++$number;
	$node->safe_psql('postgres', "CREATE ROLE $role");
	as('owner', 'rights', "SELECT requests.idem_grant('$role', 'operator')");
	like(rights($role), qr/\b\Q$revoked{$right}\E\b/, "$revoked{$right}: is part of what an operator has");
	as('owner', 'rights', "REVOKE $right FROM $role");
}
my %of_role = map { ($_ => rights($_)) } values %role_without;
($status, $err) = moves('owner', 'rights', 'idem');
is($status, 0, 'single rights: moved to the C edition') or diag $err;
($status, $err) = moves('owner', 'rights', 'idem_portable');
is($status, 0, 'single rights: and back') or diag $err;
for my $right (sort keys %revoked)
{
	my $is_now = rights($role_without{$right});
	unlike($is_now, qr/\b\Q$revoked{$right}\E\b/, "$revoked{$right}: was revoked, and stays so");
	# Rights on objects that the C edition does not have are lost, and a WARNING names them.
	my $rest = join ', ', grep { !/^idem_(?:settings|_stat_scope_shares)\b/ } split /, /, $of_role{$role_without{$right}};
	is($is_now, $rest, "$revoked{$right}: and the rest is kept");
}

$node->stop;
done_testing();
