# Many clients do everything at once; their journals and the tables must agree
#
# Both editions, in two databases of one server. Two in five requests are sent by many clients.
# Clients roll back, also to savepoints, and prepare transactions; somebody cancels and terminates
# them. Most claims live for two or three seconds, and are cleaned all the time; some live for a day.
#
# The judge is tested, too: it must find each kind of fault in journals that were broken.

use strict;
use warnings;

use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(time sleep);

use Storm;
use Torture;

seed();
my $seconds = quick_or_full(15, 3600);
my $node = make_node('main', q{
shared_preload_libraries = 'idem'
idem.cleanup_interval = '100ms'
max_prepared_transactions = 150
autovacuum_naptime = '1s'
fsync = off
deadlock_timeout = '100ms'
log_error_verbosity = verbose
log_min_error_statement = panic
});
$node->start;
make_databases($node);
my $storm = Storm->new($node);
$storm->make_tables;
$storm->start;
sleep $seconds;
$storm->stop;

my $counted = $storm->judge;
figure('both', "$counted->{claimed} claimed, $counted->{replays} replays, by $storm->{clients} clients in $seconds s");
cmp_ok($counted->{$_} // 0, '>', 0, "clients were answered $_") for qw(claimed completed stale);
is(faults_in($node), '', 'the log of the server has no fault');
is($node->safe_psql('c', "SELECT errors FROM idem_stat_cleanup"), '0', 'the worker had no error');
ok($node->poll_query_until('c', "SELECT rows_deleted > 0 AND NOT backlog FROM idem_stat_cleanup"), 'the worker kept up');
$storm->judge_the_judge('c');
$node->stop;
done_testing();
