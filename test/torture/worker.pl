# The worker is terminated, killed, stopped, locked out, and its clock set; it cleans again each time
#
# After each fault claims expire; they must be gone within a bounded time. What has not expired stays:
# claims of a month, live leases, and expired leases that policy keeps; also while the clock jumps forward and
# back by up to an hour. Other faults: errors in a batch, a full disk, no worker slot; databases that are
# renamed, copied, dropped and made again.
#
# faults.c sets the clock and fills the disk. Without a C compiler these faults are left out.

use strict;
use warnings;

use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Cwd qw(abs_path);
use Test::More;
use Time::HiRes qw(sleep clock_gettime CLOCK_MONOTONIC);

use Session;
use Torture;

seed();
my $faults = quick_or_full(7, 1000);

# After errors the worker waits longer each time, and the server can have to start again.
my $limit_s = is_full() ? 120 : 60;

my $folder = PostgreSQL::Test::Utils::tempdir();
my $shim = "$folder/faults.so";
my $source = abs_path(__FILE__ =~ s/[^\/]+$/faults.c/r);
my $has_shim = system("cc -shared -fPIC -o $shim $source -ldl >$folder/cc.log 2>&1") == 0;
note 'no clock and no disk: ', slurp_file("$folder/cc.log") if !$has_shim;

# Ahead of the clock by so many seconds; whether the disk is full
my %shim = (ahead => 0, full => 0);
my $latest_ahead = 0;

sub set_shim
{
	my (%change) = @_;

	%shim = (%shim, %change);
	$latest_ahead = $shim{ahead} if $shim{ahead} > $latest_ahead;
	open my $file, '+<', "$folder/faults" or die $!;
	syswrite $file, pack('q q', $shim{ahead} * 1_000_000, $shim{full});
	close $file;
	return 1;
}

append_to_file("$folder/faults", pack('q q', 0, 0));

my $node = make_node('main', q{
shared_preload_libraries = 'idem'
idem.cleanup_interval = '100ms'
idem.cleanup_batch_size = 100
max_worker_processes = 3
max_logical_replication_workers = 0
restart_after_crash = on
fsync = off
log_error_verbosity = verbose
log_min_error_statement = panic
});

# To start the server with the shim
sub with_shim
{
	my ($function) = @_;
	local %ENV = (%ENV, $has_shim ? (LD_PRELOAD => $shim, TORTURE_FAULTS => "$folder/faults") : ());

	return $function->();
}

with_shim(sub { $node->start });
my $database = 'shop';

sub create_database
{
	my ($name) = @_;

	sql("CREATE DATABASE $name", 'postgres') // return;
	return defined sql(q{
		CREATE EXTENSION idem;
		INSERT INTO idem_scopes (scope, ttl, lapsed) VALUES ('brief', '1 ms', 'reclaim'), ('month', '30 days', 'reclaim'), ('kept', '1 ms', 'unknown')}, $name);
}

# What it returned, or undef
sub sql
{
	my ($sql, $where) = @_;
	my ($status, $out) = psql_if_up($node, $where // $database, $sql, on_error_stop => 1);

	return defined $status && $status == 0 ? $out : undef;
}

sub wait_until
{
	my ($condition, $where) = @_;
	my $began = clock_gettime(CLOCK_MONOTONIC);

	while (clock_gettime(CLOCK_MONOTONIC) - $began < $limit_s)
	{
		my $answer = sql("SELECT $condition", $where);
		return 1 if defined $answer && $answer eq 't';
		sleep 0.02;
	}
	return 0;
}

# Whether the function did not die. What it waits for must come within a minute
sub tried
{
	my ($function) = @_;
	local $SIG{ALRM} = sub { die "no answer after a minute\n" };

	alarm 60;
	my $ok = eval { $function->(); 1 };
	my $error = $@;
	alarm 0;
	die $error if $error eq "terminated\n";
	fail($error) if $error eq "no answer after a minute\n";
	diag $error if !$ok;
	return $ok;
}

# Nothing while the server does not serve
sub session
{
	my ($where) = @_;
	my $session;

	tried(sub { $session = Session->new($where) });
	return $session;
}

my $round = 0;

# Begins a round: SQL that makes its claims, which expire within a second
sub next_claims
{
	$round++;
	return "SELECT count(*) FROM idem_claim_many(array_fill('u'::text, ARRAY[300]), ARRAY(SELECT '$round-' || g FROM generate_series(1, 300) g), 'brief')";
}

# False: the server does not serve
sub expire_some
{
	my ($where) = @_;

	return defined sql(next_claims(), $where);
}

# SQL: those of this round. At least: the worker may have cleaned some before.
sub are_cleaned
{
	return "NOT EXISTS (SELECT FROM idem_claims WHERE scope = 'brief' AND request_id LIKE '$round-%')";
}

# What must not be removed: claims, leases and expired leases that nobody may take
my $promised = 0;

sub promise_some
{
	my $many = $promised + 20;

	sql(qq{
		SELECT idem_claim('u', g::text, 'month') FROM generate_series($promised + 1, $many) g;
		SELECT outcome FROM generate_series($promised + 1, $promised + 5) g, idem_lease('u', 'lease ' || g, scope => 'month', lease => '1 day');
		SELECT outcome FROM generate_series($promised + 1, $promised + 5) g, idem_lease('u', 'kept ' || g, scope => 'kept', lease => '1 ms')}) // return 0;
	$promised = $many;
	return 1;
}

sub count_promised
{
	return sql("SELECT count(*) FILTER (WHERE scope = 'month'), count(*) FILTER (WHERE scope = 'kept') FROM idem_claims");
}

# Calls a function of SQL for a worker that is at work, and returns its pid
sub worker_pid
{
	my ($function) = @_;

	expire_some() or return;
	my $pid = sql(q{
		CREATE FUNCTION pg_temp.find() RETURNS int LANGUAGE plpgsql AS $$
		DECLARE
			found int;
		BEGIN
			FOR i IN 1 .. 3000 LOOP
				PERFORM pg_stat_clear_snapshot();
				SELECT pid INTO found FROM pg_stat_activity WHERE backend_type = 'idem worker';
				EXIT WHEN found IS NOT NULL;
				PERFORM pg_sleep(0.001);
			END LOOP;
			RETURN found;
		END $$;
		SELECT pid FROM pg_temp.find() AS pid} . ($function ? ", $function(pid)" : ''), 'postgres');
	return defined $pid && $pid =~ /^(\d+)/ ? $1 : undef;
}

sub kill_worker
{
	my ($signal) = @_;
	my $pid = worker_pid() or return;

	return kill($signal, $pid);
}

# For a database that the worker has to leave first
sub at_last
{
	my ($sql) = @_;

	for (1 .. 20) { return 1 if defined sql($sql, 'postgres') }
	fail("not possible while the worker cleans: $sql");
	return 1;
}

# Jumps while a worker cleans; not further from the true clock than an hour
sub jump
{
	my ($by) = @_;

	$has_shim or return;
	worker_pid();
	return set_shim(ahead => $by);
}

my %fault = (
	terminated => sub { worker_pid('pg_terminate_backend') },
	killed => sub { kill_worker('KILL') },
	cancelled => sub { worker_pid('pg_cancel_backend') },
	stopped => sub {
		# The worker can stop while it has a page or a list of the server locked. A session that
		# needs the same page then waits until the worker goes on, and cannot be cancelled. So
		# connect before the stop, and do not wait for the answer before the worker goes on.
		my $client = session($database) or return;
		my $pid = worker_pid() or return;
		kill('STOP', $pid) or return;
		my $sent = tried(sub { $client->send(next_claims()); $client->flush });
		sleep 0.2;
		# Not stopped: it ended just before it was to stop
		my $was_stopped = -e "/proc/$pid" && slurp_file("/proc/$pid/stat") =~ /\) T/;
		kill('CONT', $pid);
		ok($sent && tried(sub { $client->answer }), 'claims beside a stopped worker');
		ok(wait_until(are_cleaned()), 'which are cleaned afterwards');
		$client->close;
		return $was_stopped;
	},
	launcher => sub { sql("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE backend_type LIKE 'idem launcher%'", 'postgres') },
	'launcher killed' => sub {
		my $pid = sql("SELECT pid FROM pg_stat_activity WHERE backend_type LIKE 'idem launcher%'", 'postgres');
		return $pid && kill('KILL', $pid);
	},
	error => sub {
		my $before = sql('SELECT errors FROM idem_stat_cleanup') // return;
		expire_some() or return;
		sql(q{CREATE FUNCTION nothing() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'; CREATE TRIGGER nothing AFTER DELETE ON idem_claims FOR EACH STATEMENT EXECUTE FUNCTION nothing()}) // return;
		ok(wait_until("errors > $before + " . int(rand 4) . ' FROM idem_stat_cleanup'), 'an error is counted');
		return defined sql('DROP FUNCTION nothing CASCADE');
	},
	locked => sub { defined sql('BEGIN; LOCK TABLE idem_claims; SELECT pg_sleep(0.5); COMMIT') },
	'no slot' => sub {
		# The worker of the other database waits for a lock, and has the slot.
		my $other = session('other') or return;
		tried(sub { $other->ask('BEGIN; LOCK TABLE idem_claims') }) or return;
		sleep 0.3 + rand 0.5;
		tried(sub { $other->ask('COMMIT') }) or return;
		$other->close;
		return 1;
	},
	'another name' => sub {
		my $new = $database eq 'shop' ? 'store' : 'shop';
		worker_pid();
		at_last("ALTER DATABASE $database RENAME TO $new");
		$database = $new;
		return 1;
	},
	copied => sub {
		worker_pid();
		# What expires later, nobody has announced in the copy: the worker finds it within a minute.
		my $before = sql('SELECT clock_timestamp()') // return;
		at_last("CREATE DATABASE copy TEMPLATE $database");
		ok(wait_until("NOT EXISTS (SELECT FROM idem_claims WHERE scope = 'brief' AND expires_at < '$before')", 'copy'), 'the copy is cleaned');
		return at_last('DROP DATABASE copy');
	},
	'database dropped' => sub {
		expire_some('other') or return;
		at_last('DROP DATABASE other');
		create_database('other') or return;
		expire_some('other') or return;
		ok(wait_until(are_cleaned(), 'other'), 'a new database of the same name is cleaned');
		return 1;
	},
	'extension dropped' => sub {
		expire_some('other') or return;
		my $scopes = "INSERT INTO idem_scopes (scope, ttl) VALUES ('brief', '1 ms')";
		sql("BEGIN; DROP EXTENSION idem; CREATE EXTENSION idem; $scopes; COMMIT", 'other') // return;
		expire_some('other') or return;
		ok(wait_until(are_cleaned(), 'other'), 'a new extension is cleaned');
		return 1;
	},
	restarted => sub { worker_pid(); with_shim(sub { $node->restart }); return 1 },
	'stopped at once' => sub { with_shim(sub { $node->stop('immediate'); $node->start }); return 1 },
	reloaded => sub {
		sql("ALTER SYSTEM SET idem.cleanup_databases = 'another'", 'postgres') // return;
		$node->reload;
		sleep 0.1;
		sql('ALTER SYSTEM RESET idem.cleanup_databases', 'postgres') // return;
		$node->reload;
		return 1;
	},
	'disk full' => sub {
		$has_shim or return;
		expire_some() or return;
		set_shim(full => 1);
		# Rows of 1 kB, until the table would grow: the shim is at work.
		my ($status, undef, $err) = $node->psql($database, q{DO $$ BEGIN FOR i IN 1 .. 200000 LOOP
			PERFORM idem_claim('u', i || repeat('x', 200), repeat('y', 200)); END LOOP; END $$}, extra_params => [ '-v', 'VERBOSITY=sqlstate' ]);
		my $is_cleaned = wait_until(are_cleaned());
		set_shim(full => 0);
		like($err, qr/ 53100/, 'the disk is full');
		ok($is_cleaned, 'cleaned on a full disk');
		return 1;
	},
	'clock forward' => sub { $shim{ahead} < 3000 ? jump($shim{ahead} + 1 + int rand(3600 - $shim{ahead})) : undef },
	'clock back' => sub { $shim{ahead} > -3000 ? jump($shim{ahead} - 1 - int rand(3600 + $shim{ahead})) : undef });

# Of each kind: how many, the longest time and the sum
my (%done, %longest, %seconds);

# These take seconds, and are for full runs: crashes, pauses after errors, restarts, copies
my %is_slow = map { $_ => 1 } 'killed', 'launcher', 'launcher killed', 'error', 'stopped at once', 'restarted', 'copied', 'database dropped', 'no slot',
  'extension dropped', 'reloaded', 'another name', 'disk full';
my @kinds = grep { is_full() || !$is_slow{$_} } sort keys %fault;
@kinds = grep { !/^(?:disk|clock) / } @kinds if !$has_shim;
my $tried = 0;
my $refused_since;

local %ENV = (%ENV, PGHOST => $node->host, PGPORT => $node->port);
create_database($_) or BAIL_OUT("no database $_") for 'shop', 'other';
is(promise_some(), 1, 'claims, and leases');

while (keys %done < @kinds || $tried < $faults)
{
	my @untried = grep { !$done{$_} } @kinds;
	my $kind = @untried ? $untried[ rand @untried ] : $kinds[ rand @kinds ];

	# A worker that ended just now has no fault. The server can be starting again.
	if (!$fault{$kind}->())
	{
		$refused_since //= clock_gettime(CLOCK_MONOTONIC);
		next if clock_gettime(CLOCK_MONOTONIC) < $refused_since + $PostgreSQL::Test::Utils::timeout_default;
		fail("fault $kind comes about");
		last;
	}
	$refused_since = undef;
	$done{$kind}++;
	$tried++;
	my $began = clock_gettime(CLOCK_MONOTONIC);
	ok(wait_until('true'), "fault $tried, $kind: the server serves") or last;
	promise_some();
	my $is_made = 0;
	for (1 .. 100) { last if $is_made = expire_some() }
	ok($is_made && wait_until(are_cleaned()), "fault $tried, $kind: the worker cleans again within $limit_s s") or last;
	my $seconds = clock_gettime(CLOCK_MONOTONIC) - $began;
	$seconds{$kind} += $seconds;
	$longest{$kind} = $seconds if $seconds > ($longest{$kind} // 0);
	is(count_promised(), 5 * $promised / 4 . '|' . $promised / 4, "fault $tried, $kind: and nothing else") or last;
	note "$kind, clock $shim{ahead} s";
}
cmp_ok($tried, '>=', $faults, "the worker has recovered from each of $tried faults");
my ($slowest) = sort { $longest{$b} <=> $longest{$a} } keys %longest;
figure('faults', "$tried: " . join(', ', map { "$_ $done{$_}" } sort keys %done));
figure('until all was cleaned', join(', ', map { sprintf '%s %.1f s', $_, $seconds{$_} / $done{$_} } sort keys %seconds) . ' on average, with the second that the claims live');
figure('longest', sprintf('%.1f s, after: %s', $longest{$slowest}, $slowest));
set_shim(ahead => 0);
is(faults_in($node, 1), '', 'the log of the server has no other fault');
$node->stop;
done_testing();
