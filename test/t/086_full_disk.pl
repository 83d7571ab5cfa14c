# A full disk: claims raise 53100 and leave nothing behind, duplicates are answered and expired
# claims removed all the same; with space again everything goes on, without a restart, and no
# request was lost or executed twice.
#
# The disk is a tablespace on a tmpfs of some MB. This test runs itself again in a mount
# namespace of its own, which needs no root where the kernel lets users have namespaces.

use strict;
use warnings;

use Test::More;

my $disk;

# Before the server's modules for tests redirect the output
BEGIN
{
	require Cwd;
	require IPC::Run;

	$disk = $ENV{IDEM_SMALL_DISK};
	if (!defined $disk)
	{
		my $folder = Cwd::getcwd() . '/tmp_check/disk';
		my ($user, $group) = ($>, $) + 0);
		# Twice: a server does not run as root, not even as the root of a namespace.
		my @inside = (
			'unshare', '-rm', 'sh', '-c', 'mount -t tmpfs -o size=40m,mode=0700 idem "$1" && shift && exec "$@"',
			'sh', $folder, 'unshare', '-U', "--map-user=$user", "--map-group=$group");
		my $said = '';

		mkdir $folder;
		eval { IPC::Run::run([ @inside, 'true' ], '<', \undef, '>&', \$said) }
		  or plan skip_all => 'this user may not mount a file system in a namespace of its own: ' . ($said =~ s/\n.*//sr);
		$ENV{IDEM_SMALL_DISK} = $folder;
		exec @inside, $^X, (map { "-I$_" } @INC), $0;
	}
}

use IPC::Run;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;

my $node = PostgreSQL::Test::Cluster->new('main');
$node->init;
$node->append_conf('postgresql.conf', q{
shared_preload_libraries = 'idem'
idem.cleanup_interval = '100ms'
autovacuum = off
shared_buffers = 1MB
});
$node->start;
mkdir "$disk/space" or die "$disk: $!";
$node->safe_psql('postgres', "CREATE TABLESPACE small LOCATION '$disk/space'");

my $database;

sub query
{
	my ($query) = @_;
	return $node->safe_psql($database, $query);
}

# The SQLSTATE of a statement that fails, or what it returns
sub answer
{
	my ($statement) = @_;
	my ($status, $out, $err) = $node->psql($database, "\\set VERBOSITY sqlstate\n$statement");
	return $err =~ /ERROR:  (\w+)/ ? $1 : $out;
}

# Leaves no block free, or some bytes
sub fill
{
	my ($free) = @_;

	open my $file, '>>', "$disk/filler" or die "$disk/filler: $!";
	for my $bytes (1 << 16, 512)
	{
		1 while syswrite $file, 'x' x $bytes;
	}
	truncate $file, (-s $file) - $free if $free;
	close $file;
	return;
}

sub empty
{
	unlink "$disk/filler";
	return;
}

# Four clients send requests 1 to 2000, each of them all of them in an order of its own, and go on
# after errors. Returns what they were told. Empties the disk meanwhile if $empty.
sub send_all
{
	my ($empty) = @_;
	my @output = ('') x 4;
	my @runs;

	for my $client (0 .. 3)
	{
		my $script = $node->basedir . "/$database.$client.sql";
		my @requests = map { ($_ * 7 + $client * 500) % 2000 + 1 } 1 .. 2000;
		open my $file, '>', $script or die "$script: $!";
		print $file "\\set VERBOSITY sqlstate\n", map { "CALL execute('$_');\n" } @requests;
		close $file;
		push @runs, IPC::Run::start(
			[ 'psql', '-XAtq', '-f', $script, '-d', $node->connstr($database) ],
			'<', \undef, '>&', \$output[$client],
			IPC::Run::timeout($PostgreSQL::Test::Utils::timeout_default));
	}
	empty() if $empty;
	$_->finish for @runs;
	return join '', @output;
}

sub is_in_order
{
	my ($name) = @_;
	is(query(q{SELECT count(*) FROM verify_heapam('idem_claims')}), 0, "$name: the table is in order");
	is( query(q{SELECT count(bt_index_check(indexrelid, true)) > 0 FROM pg_index WHERE indrelid = 'idem_claims'::regclass}),
		't', "$name: so are its indexes");
	is( query(q{
			SELECT count(*), count(DISTINCT request) FROM executions
			WHERE request NOT IN (SELECT request_id FROM idem_claims WHERE scope = '')
				OR request IN (SELECT request FROM executions GROUP BY request HAVING count(*) > 1)}),
		'0|0', "$name: each execution has its claim, and none happened twice");
	is( query(q{SELECT count(*) FROM idem_claims WHERE scope = '' AND request_id ~ '^\d+$' AND request_id NOT IN (SELECT request FROM executions)}),
		0, "$name: and each claim its execution");
	return;
}

for my $edition ('idem', 'idem_portable')
{
	my ($token, $output);

	$database = "shop_$edition";
	$node->safe_psql('postgres', "CREATE DATABASE $database TABLESPACE small");
	query(qq{
		CREATE EXTENSION $edition;
		CREATE EXTENSION amcheck;
		INSERT INTO idem_scopes (scope, ttl) VALUES ('short', '1 ms');
		CREATE TABLE executions (request text) TABLESPACE pg_default;
		CREATE PROCEDURE execute(request text) LANGUAGE plpgsql AS \$\$
		BEGIN
			IF idem_claim('user', request) THEN
				INSERT INTO executions VALUES (request);
				PERFORM idem_complete(to_jsonb(request));
			END IF;
		END \$\$;
	});

	# From PostgreSQL 19 on a read that tidies a page makes the visibility map, in whatever table, and fails if there
	# is no space for it. VACUUM makes it before.
	my $reads_need_map = query('SHOW server_version_num') >= 190000;
	if ($reads_need_map)
	{
		query(q{SELECT idem_claim('user', 'first')});
		query('VACUUM idem_claims');
	}

	# ----- claims -----

	fill(128 * 1024);
	$output = send_all(0);
	fill();
	like($output, qr/ERROR:  53100/, "$edition: on a full disk claims fail with 53100");
	unlike($output, qr/ERROR:  (?!53100)/, "$edition: with nothing else");
	my $executed = query('SELECT count(*) FROM executions');
	ok($executed > 100 && $executed < 2000, "$edition: some requests were executed, others not") or diag $executed;
	is(answer("SELECT idem_claim('user', (SELECT request FROM executions LIMIT 1))"),
		'f', "$edition: a duplicate is answered");
	is(answer(q{SELECT idem_result('user', request) = to_jsonb(request) FROM executions LIMIT 1}),
		't', "$edition: with its result");
	is_in_order("$edition, full");

	$output = send_all(1);
	like($output, qr/^(ERROR:  53100: ?\n|psql:.*53100.*\n)*\z/, "$edition: with space again claims go on");
	is(send_all(0), '', "$edition: and all succeed");
	is(query('SELECT count(*) FROM executions'), 2000, "$edition: every request was executed");
	is_in_order("$edition, space again");

	# ----- leases: a settlement that does not fit -----

	$token = query(q{SELECT token FROM idem_lease('user', 'lease', lease => '1 h')});
	my $settle = "SELECT idem_complete('user', 'lease', (SELECT jsonb_agg(md5(i::text)) FROM generate_series(1, 20000) AS i), $token)";
	fill();
	is(answer($settle), 53100, "$edition: a result that does not fit is refused");
	is(query(q{SELECT idem_status('user', 'lease')}), 'in_progress', "$edition: the lease is still held");
	empty();
	is(answer($settle), 't', "$edition: and settled when there is space");

	# ----- cleanup and vacuum -----

	# Without the forks that VACUUM needs, it has to make them.
	query(q{
		INSERT INTO idem_claims (expires_at, state, request_id, user_id, scope)
		SELECT date_trunc('second', now()) - interval '1 hour', 'completed', 'expired ' || i, 'user', 'short' FROM generate_series(1, 20000) AS i});
	query(q{VACUUM FULL idem_claims}) if !$reads_need_map && query(q{SELECT pg_relation_size('idem_claims', 'vm')}) > 0;
	fill();
	if ($edition eq 'idem')
	{
		$node->reload;
		ok( $node->poll_query_until($database, q{SELECT NOT EXISTS (SELECT FROM idem_claims WHERE request_id LIKE 'expired%')}),
			"$edition: the worker removes expired claims on a full disk");
		is(query('SELECT errors FROM idem_stat_cleanup'), 0, "$edition: without an error");
	}
	else
	{
		query('CALL idem_cleanup_all()');
		is(query(q{SELECT count(*) FROM idem_claims WHERE request_id LIKE 'expired%'}), 0, "$edition: expired claims are removed on a full disk");
	}
	like(answer('VACUUM idem_claims'), $reads_need_map ? qr/^(53100)?$/ : qr/^53100$/, "$edition: VACUUM needs space");
	is(answer(q{SELECT idem_claim('user', '1')}), 'f', "$edition: what it had to leave is in order");
	is_in_order("$edition, after VACUUM failed");
	# The second VACUUM frees the pages that the first one has emptied in the indexes, if no transaction
	# has run all the while. A worker may have: so try again.
	my $complaint;
	for my $try (1 .. 20)
	{
		empty();
		query('VACUUM (TRUNCATE false) idem_claims') for 1, 2;
		# Recovery repeats what happened since the latest checkpoint, the size of the table included.
		query('CHECKPOINT');
		fill();
		$complaint = answer(q{DO $$ BEGIN FOR i IN 1 .. 100 LOOP PERFORM idem_claim('user', 'reused ' || i); END LOOP; END $$});
		last if $complaint eq '';
	}
	is($complaint,
		'', "$edition: vacuumed, the table takes claims although the disk is full");

	# ----- a crash on a full disk -----

	$node->stop('immediate');
	$node->start;
	# The first session after a crash writes the server's cache of the database's catalogs. If recovery has
	# taken the space of the former one, no session can begin ("could not write init file").
	my $reused = q{SELECT count(*) FROM idem_claims WHERE request_id LIKE 'reused%'};
	my $left = answer($reused);
	if ($left eq '')
	{
		empty();
		$left = answer($reused);
	}
	is($left, 100, "$edition: a crash on the full disk loses no claim");
	is_in_order("$edition, after a crash");
	empty();
	is(answer(q{SELECT idem_claim('user', 'new')}), 't', "$edition: and claims go on");
	$node->safe_psql('postgres', "DROP DATABASE $database");
}

$node->stop;
unlike(slurp_file($node->logfile), qr/leak|TRAP|PANIC|was terminated by signal/, 'nothing broke');

done_testing();
