# Attacks on idem_call(), which runs a function of somebody else, under the search_path of its
# caller. In both editions.

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
$node->safe_psql('postgres', "CREATE ROLE $_ LOGIN") for qw(owner app attacker);

sub as
{
	my ($role, $database, $sql) = @_;
	return $node->safe_psql($database, $sql, extra_params => [ '-U', $role ]);
}

sub error_of
{
	my ($role, $database, $sql) = @_;
	return ($node->psql($database, $sql, extra_params => [ '-U', $role, '-v', 'VERBOSITY=sqlstate' ]))[2];
}

# One database for each edition. The owner of idem is no superuser.
for my $edition (qw(c portable))
{
	$node->safe_psql('postgres', "CREATE DATABASE $edition OWNER owner");
	as('owner', $edition, 'CREATE SCHEMA requests');
	as('owner', $edition, 'CREATE EXTENSION idem' . ($edition eq 'c' ? '' : '_portable') . ' SCHEMA requests');
	as('owner', $edition, "SELECT requests.idem_grant('app', 'app')");
	as($superuser, $edition, 'CREATE SCHEMA trap AUTHORIZATION attacker; GRANT USAGE ON SCHEMA trap TO PUBLIC');
}

# ----- a search_path with functions, operators and types that match better -----

# Everything that the portable edition calls on the way
my $body = as($superuser, 'portable', q{SELECT prosrc FROM pg_proc WHERE proname = 'idem_call'});
my $parts = as($superuser, 'portable', q{SELECT string_agg(prosrc, ' ') FROM pg_proc WHERE proname ~ '^idem__c(all_|anonical|laim_marker)'});
my %called = map { $_ => 1 } $parts =~ /\b([a-z_0-9]+)\(/g, qw(now sha256 concat cardinality to_jsonb jsonb_to_record);
my %operators = map { $_ => 1 } qw(+ - < > <= = <> || ? ^@);
cmp_ok(scalar(keys %called), '>', 10, 'functions that are called');
my $bare = $body =~ s/OPERATOR\(pg_catalog\.[^)]+\)//gr =~ s/'[^']*'//gr =~ s/--[^\n]*//gr =~ s/\b(ERRCODE|MESSAGE|DETAIL|HINT) =//gr;
unlike($bare, qr/\|\||<|>|(?<!:)=| [-+*\/] |\bIN \(|\bLIKE\b|\bBETWEEN\b|DISTINCT FROM/, 'no operator is looked up by the search_path');
unlike($bare, qr/::(?!pg_catalog\.)/, 'nor a type');

my $names = join ',', map { "'$_'" } keys %called;
my $signs = join ',', map { "'$_'" } keys %operators;
my $traps = qq{
DO \$block\$
DECLARE
	r record;
	n int := 0;
BEGIN
	FOR r IN
		SELECT p.proname, p.proretset, p.prorettype::regtype AS result, a.types
		FROM pg_proc AS p, LATERAL (SELECT array_agg(t::regtype::text ORDER BY i), bool_and(y.typtype <> 'p')
			FROM unnest(p.proargtypes) WITH ORDINALITY AS u (t, i) JOIN pg_type AS y ON y.oid = t) AS a (types, is_plain)
		WHERE p.pronamespace = 'pg_catalog'::regnamespace AND p.prokind = 'f' AND p.proname IN ($names)
			AND coalesce(a.is_plain, true) AND (SELECT typtype <> 'p' FROM pg_type WHERE oid = p.prorettype)
		UNION ALL VALUES ('format', false, 'text'::regtype, '{text,VARIADIC text[]}'::text[]), ('concat', false, 'text', '{VARIADIC text[]}'),
			('jsonb_build_array', false, 'jsonb', '{VARIADIC text[]}'), ('jsonb_build_array', false, 'jsonb', '{jsonb}'), ('jsonb_build_array', false, 'jsonb', '{name,name}'),
			('to_jsonb', false, 'jsonb', '{int}'), ('to_jsonb', false, 'jsonb', '{text}'), ('cardinality', false, 'int', '{text[]}'),
			('array_to_string', false, 'text', '{text[],text}'), ('unnest', true, 'text', '{text[]}'), ('unnest', true, 'oid', '{oid[]}')
	LOOP
		EXECUTE format('CREATE FUNCTION trap.%I(%s) RETURNS %s%s LANGUAGE plpgsql AS %L', r.proname, array_to_string(r.types, ', '),
			CASE WHEN r.proretset THEN 'SETOF ' ELSE '' END, r.result, 'BEGIN RAISE WARNING ''hijacked by ' || r.proname || '''; RETURN' ||
			CASE WHEN r.proretset THEN '' ELSE ' NULL' END || '; END');
	END LOOP;
	FOR r IN
		SELECT o.oprname, o.oprleft::regtype AS l, o.oprright::regtype AS r, o.oprresult::regtype AS result
		FROM pg_operator AS o JOIN pg_type AS t ON t.oid = o.oprleft JOIN pg_type AS u ON u.oid = o.oprright
		WHERE o.oprnamespace = 'pg_catalog'::regnamespace AND o.oprname IN ($signs) AND t.typtype = 'b' AND u.typtype = 'b'
		UNION ALL VALUES ('||', 'text[]'::regtype, 'text'::regtype, 'text[]'::regtype), ('=', 'text[]', 'text[]', 'bool'), ('||', 'text', 'unknown', 'text')
	LOOP
		n := n + 1;
		BEGIN
			EXECUTE format('CREATE FUNCTION trap.op_%s(%s, %s) RETURNS %s LANGUAGE plpgsql AS %L', n, r.l, r.r, r.result,
				'BEGIN RAISE WARNING ''hijacked by ' || r.oprname || '''; RETURN NULL; END');
			EXECUTE format('CREATE OPERATOR trap.%s (LEFTARG = %s, RIGHTARG = %s, FUNCTION = trap.op_%s)', r.oprname, r.l, r.r, n);
		EXCEPTION WHEN invalid_function_definition OR duplicate_function OR feature_not_supported THEN
		END;
	END LOOP;
END \$block\$;
CREATE DOMAIN trap.text AS pg_catalog.text CHECK (trap.current_setting('hijacked by text') IS NULL);
CREATE DOMAIN trap.jsonb AS pg_catalog.jsonb CHECK (trap.current_setting('hijacked by jsonb') IS NULL);
CREATE DOMAIN trap.int4 AS pg_catalog.int4 CHECK (trap.current_setting('hijacked by int4') IS NULL);
CREATE TABLE trap.pg_proc (); CREATE TABLE trap.pg_type ();
};
# What the function itself calls was looked up when it was created, and so were its defaults.
my $target = q{
CREATE FUNCTION public.work(a int, t text DEFAULT 'x' || 'y', l int[] DEFAULT ARRAY[1 + 1], n numeric DEFAULT 1) RETURNS text
BEGIN ATOMIC
	SELECT (a + 1)::text || t || l[1] || n;
END;
CREATE FUNCTION public.nothing() RETURNS void BEGIN ATOMIC SELECT 1; END;
};
for my $edition (qw(c portable))
{
	as($superuser, $edition, $traps . $target);
	for my $role ('app', $superuser)
	{
		my ($status, $out, $err) = $node->psql($edition, qq{
SET search_path = trap, pg_catalog, requests, public;
SELECT pg_catalog.count(*) FROM pg_catalog.pg_class WHERE relname = 'pg_class'::pg_catalog.name;
\\warn ---
SELECT idem_call('$role', '1', 'work(integer, pg_catalog.text, integer[], numeric)', '{"a": 1}');
SELECT idem_call('$role', '1', 'work(integer, pg_catalog.text, integer[], numeric)', '{"a": 1}');
SELECT idem_call('$role', '2', 'work(integer, pg_catalog.text, integer[], numeric)', '{"a": 1, "t": "z", "l": [7], "n": 3}');
SELECT idem_call('$role', '3', 'nothing()'), idem_outcome();
SELECT idem_call('$role', '1', 'work(integer, pg_catalog.text, integer[], numeric)', '{"a": 2}');
SELECT idem_call('$role', '4', 'work(integer, pg_catalog.text, integer[], numeric)', '{"b": 2}');
SELECT idem_call('$role', '4', 'work(integer, pg_catalog.text, integer[], numeric)');
SELECT idem_call('$role', '4', 'pg_catalog.generate_series(integer, integer)');
SELECT idem_call('$role', '4', 'pg_catalog.upper(pg_catalog.text)');
SELECT idem_call('$role', '4', 'nothing()', '[]');
}, extra_params => [ '-U', $role, '-v', 'ON_ERROR_STOP=0' ]);
		like($err, qr/hijacked by =.*\n---\n/s, "$edition, $role: the traps work");
		is($out, qq{0\n"2xy21"\n"2xy21"\n"2z73"\n|claimed}, "$edition, $role: the same answers");
		$err =~ s/\A.*\n---\n//s;
		unlike($err, qr/hijacked/, "$edition, $role: no trap is called");
		my @errors = $err =~ /ERROR:  ([^\n]+)/g;
		is_deeply(\@errors, [
				'request id was used before with another fingerprint', $errors[1], $errors[2], $errors[3], $errors[4], 'arguments must be a JSON object'
			], "$edition, $role: the same errors") or diag $err;
		like("$errors[1], $errors[2], $errors[3], $errors[4]",
			qr/has no argument "b", argument "a" of function \S+ is missing, idem_call\(\) cannot run \S+ it returns a set, argument 1 of function \S+ has no name/,
			"$edition, $role: and what they name");
	}
}

# NULLIF, IS DISTINCT FROM and CASE x WHEN name no operator in the text of a default.
for my $edition (qw(c portable))
{
	as($superuser, $edition, q{
CREATE FUNCTION public.defaults(a int, n int[] DEFAULT NULLIF(ARRAY[1], ARRAY[2]), d boolean DEFAULT ARRAY[1] IS DISTINCT FROM ARRAY[2],
	c text DEFAULT CASE ARRAY[1] WHEN ARRAY[2] THEN 'same' ELSE 'other' END) RETURNS text BEGIN ATOMIC SELECT format('%s %s %s', n, d, c); END});
	as('attacker', $edition, q{
CREATE FUNCTION trap.equal(int[], int[]) RETURNS boolean LANGUAGE plpgsql AS $$ BEGIN RAISE WARNING 'hijacked by equal'; RETURN true; END $$;
CREATE OPERATOR trap.= (LEFTARG = int[], RIGHTARG = int[], FUNCTION = trap.equal)});
	my ($status, $out, $err) = $node->psql($edition, q{
SET search_path = trap, pg_catalog, requests, public;
SELECT NULLIF(ARRAY[1], ARRAY[2]);
\warn ---
SELECT idem_call('u', 'defaults', 'defaults(integer, integer[], boolean, pg_catalog.text)', '{"a": 1}');
}, extra_params => [ '-U', 'app', '-v', 'ON_ERROR_STOP=0' ]);
	like($err, qr/hijacked by equal.*\n---/s, "$edition: the trap works for an operator that is not named");
	is($out, qq{\n"{1} t other"}, "$edition: the default uses the operator that it was created with");
	unlike($err =~ s/\A.*\n---\n?//sr, qr/\S/, "$edition: the trap is not called");
}

# ----- what the function that is called can do -----

for my $edition (qw(c portable))
{
	as('attacker', $edition, q{
CREATE FUNCTION trap.spy() RETURNS pg_catalog.jsonb LANGUAGE plpgsql SET search_path = pg_catalog AS $$
DECLARE
	attack text;
	answers jsonb := jsonb_build_array(current_user, session_user);
BEGIN
	FOREACH attack IN ARRAY ARRAY['SELECT token FROM requests.idem_claims', 'DELETE FROM requests.idem_claims',
		'INSERT INTO requests.idem_scopes (scope) VALUES (''x'')', 'SET LOCAL ROLE owner', 'SET LOCAL SESSION AUTHORIZATION owner',
		'SELECT requests.idem__note_answer(''["u", "x", ""]'', ''claimed'', NULL)', 'SELECT requests.idem_forget(''u'', ''x'')',
		'ALTER ROLE attacker SUPERUSER', 'CREATE FUNCTION requests.evil() RETURNS int LANGUAGE sql AS ''SELECT 1''', 'ALTER FUNCTION requests.idem_call(text, text, text, jsonb, text, interval) OWNER TO attacker']
	LOOP
		BEGIN
			EXECUTE attack;
			answers := answers || to_jsonb('done: ' || attack);
		EXCEPTION WHEN insufficient_privilege OR undefined_table OR undefined_function THEN
		END;
	END LOOP;
	RETURN answers;
END $$});
	is(as('app', $edition, q{SELECT requests.idem_call('u', 'spy', 'trap.spy()')}), '["app", "app"]', "$edition: the function has its caller's rights and no others");
	is(as('owner', $edition, q{SELECT result FROM requests.idem_claims WHERE request_id = 'spy'}), '["app", "app"]', "$edition: and its result is stored");
	# A definer's function calls with the rights of the definer, as any call in it.
	as('owner', $edition, q{
CREATE FUNCTION public.whoami() RETURNS text LANGUAGE sql AS 'SELECT current_user';
CREATE FUNCTION public.wrapped() RETURNS jsonb LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$ SELECT requests.idem_call('u', 'wrapped', 'public.whoami()') $$;
REVOKE ALL ON FUNCTION public.whoami() FROM PUBLIC});
	is(as('app', $edition, 'SELECT public.wrapped()'), '"owner"', "$edition: in a definer's function with the definer's rights");
	like(error_of('app', $edition, q{SELECT requests.idem_call('u', 'wrapped 2', 'public.whoami()')}), qr/42501/, "$edition: and not directly");
	like(error_of('attacker', $edition, q{SELECT requests.idem_call('u', 'none', 'trap.spy()')}), qr/42501/, "$edition: a role without rights on idem cannot call");
	is(as('owner', $edition, q{SELECT count(*) FROM requests.idem_claims WHERE request_id IN ('none', 'wrapped 2')}), '0', "$edition: nor claim");
}

# The conversion of an argument drops the function. (The server's own errors in the portable
# edition: it has looked the function up by then.)
as('owner', 'c', q{
CREATE FUNCTION public.drops(int) RETURNS boolean LANGUAGE plpgsql AS $$ BEGIN DROP FUNCTION IF EXISTS public.dropped; RETURN true; END $$;
CREATE DOMAIN public.dropping AS int CHECK (public.drops(VALUE));
CREATE FUNCTION public.dropped(a public.dropping, b int DEFAULT 1) RETURNS int LANGUAGE sql AS 'SELECT b'});
like(error_of('owner', 'c', q{SELECT requests.idem_call('u', 'dropped', 'public.dropped(public.dropping, int)', '{"a": 1}')}), qr/42883/, 'a function that is dropped by a conversion');

# The right to execute the function is revoked while the call waits.
for my $edition (qw(c portable))
{
	as('owner', $edition, q{
CREATE FUNCTION public.gated() RETURNS int LANGUAGE sql AS 'SELECT 1';
REVOKE ALL ON FUNCTION public.gated() FROM PUBLIC; GRANT EXECUTE ON FUNCTION public.gated() TO app});
	my ($holder, $waiter) = map { Client->new($node, $edition) } 1, 2;
	$_->ask('SET ROLE app') for $holder, $waiter;
	$holder->ask('BEGIN');
	$holder->ask(q{SELECT requests.idem_call('u', 'gated', 'public.gated()')});
	$waiter->ask('SET idem.wait = -1');
	$waiter->send(q{SELECT requests.idem_call('u', 'gated', 'public.gated()')});
	ok($node->poll_query_until($edition, 'SELECT EXISTS (SELECT FROM pg_locks WHERE NOT granted AND pid = ' . $waiter->pid . ')'), "$edition: a call waits");
	as('owner', $edition, 'REVOKE EXECUTE ON FUNCTION public.gated() FROM app');
	$holder->ask('ROLLBACK');
	is($waiter->answer, 'ERROR:  42501', "$edition: the right was revoked meanwhile: not executed");
	is(as('owner', $edition, q{SELECT count(*) FROM requests.idem_claims WHERE request_id = 'gated'}), '0', "$edition: nor claimed");
	$_->quit for $holder, $waiter;
}

# ----- the part of the portable edition that runs as its owner -----

as('app', 'portable', q{SELECT requests.idem_claim('u', 'other')});
like(error_of('app', 'portable', q{SELECT requests.idem__call_settle('u', 'other', '"forged"', '')}), qr/ID410/, 'without a claim: refused');
like(error_of('app', 'portable', q{BEGIN; SELECT requests.idem_claim('u', 'mine'); SELECT requests.idem__call_settle('u', 'other', '"forged"', ''); COMMIT}),
	qr/ID410/, 'the claim of another transaction: refused');
like(error_of('attacker', 'portable', q{SELECT requests.idem__call_settle('u', 'other', '"forged"', '')}), qr/42501/, 'without the right: refused');
is(as('app', 'portable', q{SELECT requests.idem_result('u', 'other') IS NULL}), 't', 'nothing was stored');
# A function that resets the settings loses track of what it has settled: an error.
as('owner', 'portable', q{CREATE FUNCTION public.resets() RETURNS int LANGUAGE plpgsql AS $$ BEGIN RESET ALL; RETURN 1; END $$});
like(error_of('app', 'portable', q{SELECT requests.idem_call('u', 'resets', 'public.resets()')}), qr/55000/, 'a function that resets all settings: an error');
is(as('app', 'portable', q{SELECT requests.idem_status('u', 'resets') IS NULL}), 't', 'and nothing is recorded');

$node->stop;
done_testing();
