# A model of the lease protocol, checked by spin in all its states
#
# And broken variants of the model: spin must find what is wrong with each. It has no random
# numbers; the seed changes nothing.

use strict;
use warnings;

use PostgreSQL::Test::Utils;
use Cwd qw(abs_path);
use Test::More;

use Torture;

my $model = abs_path(__FILE__ =~ s/[^\/]+$/lease.pml/r);

plan skip_all => 'spin is not installed' if system('spin -V >/dev/null 2>&1') != 0;

# safety: assertions and deadlocks. liveness: the formula, under weak fairness
sub verify
{
	my ($property, @switches) = @_;
	my $folder = PostgreSQL::Test::Utils::tempdir();
	my $switches = join ' ', map { "-D$_" } @switches;
	my ($compile, $run) = $property eq 'safety' ? ('-DSAFETY -DNOCLAIM', '') : ('-DNFAIR=5', '-a -f -N answers');
	my $report = `cd $folder && spin $switches -a $model 2>&1 && cc @{[is_full() ? '-O2' : '-O0']} -w -DMEMLIM=4096 -DVECTORSZ=2048 -DCOLLAPSE $compile -o pan pan.c 2>&1 && ./pan -m2000000 -w@{[is_full() ? 26 : 18]} $run 2>&1`;
	my ($errors) = $report =~ /errors: (\d+)/;
	my ($states) = $report =~ /^\s*([\d.e+]+) states, stored/m;
	my ($what) = $report =~ /^pan:1: (.*?) \(at depth/m;

	diag $report if !defined $errors || $report =~ /max search depth too small|out of memory|not completed.*\n/i && !$errors;
	return ($errors // -1, $states // 0, $what // '');
}

my @sizes = is_full() ? ([ 'CLIENTS=2', 'CRASHES=1' ], [ 'CLIENTS=3', 'CRASHES=1' ], [ 'CLIENTS=3', 'CRASHES=2' ]) : ([ 'CLIENTS=2', 'CRASHES=2' ]);
for my $size (@sizes)
{
	for my $property (qw(safety liveness))
	{
		my ($errors, $states, $what) = verify($property, @$size);

		is($errors, 0, "$property: no state breaks it, @$size") or diag $what;
		figure("$property, @$size", sprintf('%d states, %d errors', $states, $errors));
	}
}

for ([ NO_FENCE => 'safety', 'token>=last_write' ],
	[ NO_RECHECK => 'safety', 'promised|settled_token==0' ],
	[ EARLY_TOKEN => 'safety', 'token>last_claimed' ],
	[ CLEAN_LIVE => 'safety', 'promised' ],
	[ HEAL_TAKES => 'safety', 'settled_token!=token' ],
	[ EARLY_WAKE => 'liveness', 'acceptance cycle' ],
	[ LATE_SLEEP => 'liveness', 'acceptance cycle' ],
	[ NO_BOUND => 'liveness', 'acceptance cycle' ])
{
	my ($variant, $property, $expected) = @$_;
	my ($errors, $states, $what) = verify($property, 'CLIENTS=2', 'CRASHES=1', $variant);

	like("$errors: $what" =~ s/ //gr, qr/^[1-9]\d*:.*(?:@{[$expected =~ s{ }{}gr]})/, "$variant is found, by $property");
	figure($variant, $what);
}
done_testing();
