# Rows behind the low-water mark are found in time, and the search for them takes 5 % of
# the time at most: in simulated databases, see 015_rescan.c.
#
# IDEM_SEED repeats a run.

use strict;
use warnings;

use PostgreSQL::Test::Utils;
use Test::More;

my $seed = $ENV{IDEM_SEED} // int(rand(2**31));
note("seed $seed");
my $program = PostgreSQL::Test::Utils::tempdir() . '/rescan';
my ($compiler, $headers) =
  map { my $answer = `pg_config $_`; chomp $answer; $answer } '--cc', '--includedir-server';

is(system("$compiler -O1 -Wall -I '$headers' -I src -o '$program' test/t/015_rescan.c"),
	0, 'compiled with src/clean/schedule.c');
my ($out, $err);
my $done = IPC::Run::run([ $program, $seed, 200 ], '>', \$out, '2>', \$err);
ok($done, "200 databases from seed $seed on") or diag($out . $err);

done_testing();
