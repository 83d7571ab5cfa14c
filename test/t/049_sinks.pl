# The trigger of a sink where rows come by other ways than INSERT: dumps and restores, logical
# replication, foreign tables. In both editions.

use strict;
use warnings;

use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = PostgreSQL::Test::Cluster->new('main');
$node->init(allows_streaming => 'logical');
$node->append_conf('postgresql.conf', q{
shared_preload_libraries = 'idem'
idem.cleanup_databases = 'nothing'
wal_retrieve_retry_interval = 100ms
});
$node->start;
my $connection = 'host=' . $node->host . ' port=' . $node->port;

sub query
{
	my ($database, $sql) = @_;
	return $node->safe_psql($database, $sql);
}

# Runs a program of the server. Returns its exit code.
sub run_program
{
	my ($program, @arguments) = @_;
	return system_log($program, '-h', $node->host, '-p', $node->port, @arguments);
}

my $schema = q{
CREATE TABLE shipments (id int PRIMARY KEY, customer text, request text, region text);
CREATE TABLE parts (id int, customer text, request text, region text, PRIMARY KEY (id, region)) PARTITION BY LIST (region);
CREATE TABLE parts_eu PARTITION OF parts FOR VALUES IN ('eu');
CREATE TABLE parts_us PARTITION OF parts FOR VALUES IN ('us');
CREATE TABLE archive (id int PRIMARY KEY, customer text, request text, region text);
};
my $triggers = q{
CREATE TRIGGER once BEFORE INSERT ON shipments FOR EACH ROW EXECUTE FUNCTION idem_skip_duplicates('shipping', 'customer', 'request');
CREATE TRIGGER once BEFORE INSERT OR DELETE ON parts FOR EACH ROW EXECUTE FUNCTION idem_skip_duplicates('parts', 'customer', 'request');
};
my $count = 'SELECT (SELECT count(*) FROM shipments), (SELECT count(*) FROM parts)';
my $claimed = q{SELECT count(*) FROM idem_claims WHERE scope IN ('shipping', 'parts')};

sub restores
{
	my ($edition) = @_;
	my $name = "shop_$edition";
	my $dump = $node->basedir . "/$name.dump";

	query('postgres', "CREATE DATABASE $name");
	query($name, "CREATE EXTENSION $edition; $schema $triggers");
	query($name, q{INSERT INTO shipments SELECT i, 'u', i FROM generate_series(1, 10) AS i;
		INSERT INTO parts SELECT i, 'u', i, 'eu' FROM generate_series(1, 10) AS i});
	run_program('pg_dump', '-Fc', '-f', $dump, $name);

	query('postgres', "CREATE DATABASE new_$name");
	is(run_program('pg_restore', '--exit-on-error', '-d', "new_$name", $dump), 0, "$edition: a dump is restored");
	is(query("new_$name", $count), '10|10', "$edition: with the rows");
	is(query("new_$name", $claimed), 20, "$edition: and the claims");
	query("new_$name", q{INSERT INTO shipments VALUES (11, 'u', '1'); INSERT INTO parts VALUES (11, 'u', '1', 'us')});
	is(query("new_$name", $count), '10|10', "$edition: which skip redelivered rows");

	my @data = ('--data-only', '-t', 'shipments', '-t', 'parts_eu', '-d', $name);
	query($name, 'TRUNCATE shipments, parts');
	run_program('pg_restore', @data, $dump);
	is(query($name, $count), '0|0', "$edition: --data-only of tables whose claims are there restores nothing");
	is(run_program('pg_restore', '--exit-on-error', '--disable-triggers', @data, $dump), 0, "$edition: --disable-triggers");
	is(query($name, $count), '10|10', "$edition: restores the rows");
	return;
}

# The sink is a table of the subscriber.
sub replicates
{
	my ($edition) = @_;
	my $publisher = "publisher_$edition";
	my $subscriber = "subscriber_$edition";
	my $from = "CONNECTION '$connection dbname=$publisher'";
	my $all = 'SELECT count(*) FROM shipments';

	query('postgres', "CREATE DATABASE $_") for $publisher, $subscriber;
	query($publisher, "$schema CREATE PUBLICATION p FOR TABLE shipments, archive;
		INSERT INTO shipments SELECT i, 'u', i FROM generate_series(1, 5) AS i");
	query($subscriber, "CREATE EXTENSION $edition; $schema $triggers
		ALTER TABLE shipments ENABLE ALWAYS TRIGGER once; ALTER TABLE parts ENABLE ALWAYS TRIGGER once;
		ALTER TABLE archive ADD COLUMN unused int");
	query($publisher, "SELECT pg_create_logical_replication_slot('$subscriber', 'pgoutput')");
	query($subscriber, "CREATE SUBSCRIPTION s $from PUBLICATION p WITH (create_slot = false, slot_name = '$subscriber')");
	ok($node->poll_query_until($subscriber, $all, 5), "$edition: the first copy");
	query($publisher, q{INSERT INTO shipments VALUES (6, 'u', '6'), (7, 'u', '6'), (8, 'u', '8')});
	ok($node->poll_query_until($subscriber, q{SELECT EXISTS (SELECT FROM shipments WHERE id = 8)}), "$edition: changes are applied");
	is(query($subscriber, $all), 7, "$edition: a request that comes twice is skipped");
	is(query($subscriber, $claimed), 7, "$edition: each request is claimed");
	query($subscriber, q{INSERT INTO shipments VALUES (9, 'u', '6')});
	is(query($subscriber, $all), 7, "$edition: by everybody who inserts");

	# Copied again, the rows are there; then, with the claims, they are not.
	query($subscriber, 'ALTER SUBSCRIPTION s DISABLE');
	query($subscriber, 'ALTER SUBSCRIPTION s SET (slot_name = NONE); DROP SUBSCRIPTION s');
	query($publisher, "SELECT pg_drop_replication_slot('$subscriber'), pg_create_logical_replication_slot('$subscriber', 'pgoutput')");
	query($subscriber, 'TRUNCATE shipments');
	query($subscriber, "CREATE SUBSCRIPTION s $from PUBLICATION p WITH (create_slot = false, slot_name = '$subscriber')");
	ok($node->poll_query_until($subscriber, q{SELECT bool_and(srsubstate = 'r') FROM pg_subscription_rel}), "$edition: copied again");
	is(query($subscriber, $all), 0, "$edition: an emptied table is not filled again while its claims are there");

	moves_by_replication($edition, $publisher, $subscriber);
	query($subscriber, 'ALTER SUBSCRIPTION s DISABLE');
	query($subscriber, 'ALTER SUBSCRIPTION s SET (slot_name = NONE); DROP SUBSCRIPTION s');
	query($publisher, "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE slot_name = '$subscriber' AND NOT active")
	  if $node->poll_query_until($publisher, "SELECT NOT active FROM pg_replication_slots WHERE slot_name = '$subscriber'");
	return;
}

# The publisher's table has no partitions, and its UPDATE moves the subscriber's row.
sub moves_by_replication
{
	my ($edition, $publisher, $subscriber) = @_;
	my $parts = q{SELECT string_agg(tableoid::regclass || ' ' || request, ', ' ORDER BY request) FROM archive};

	query($subscriber, q{
		DROP TABLE archive;
		CREATE TABLE archive (id int, customer text, request text, region text, PRIMARY KEY (id, region)) PARTITION BY LIST (region);
		CREATE TABLE archive_eu PARTITION OF archive FOR VALUES IN ('eu');
		CREATE TABLE archive_us PARTITION OF archive FOR VALUES IN ('us');
		CREATE TRIGGER once BEFORE INSERT OR DELETE ON archive FOR EACH ROW EXECUTE FUNCTION idem_skip_duplicates('archive', 'customer', 'request');
		ALTER TABLE archive ENABLE ALWAYS TRIGGER once;
	});
	query($publisher, 'ALTER TABLE archive REPLICA IDENTITY FULL');
	query($subscriber, 'ALTER SUBSCRIPTION s REFRESH PUBLICATION');
	ok($node->poll_query_until($subscriber, q{SELECT bool_and(srsubstate = 'r') FROM pg_subscription_rel}), "$edition: a table with partitions");
	query($publisher, q{INSERT INTO archive VALUES (1, 'u', '1', 'eu'), (2, 'u', '2', 'eu')});
	ok($node->poll_query_until($subscriber, $parts, 'archive_eu 1, archive_eu 2'), "$edition: its rows are applied");
	my $log = -s $node->logfile;
	query($publisher, q{UPDATE archive SET region = 'us' WHERE id = 1});
	$node->wait_for_log(qr/ERROR:  cannot tell whether a row is new or moves from another partition/, $log);
	pass("$edition: an UPDATE that moves a row raises an error");
	query($subscriber, 'ALTER TABLE archive DISABLE TRIGGER once');
	ok($node->poll_query_until($subscriber, $parts, 'archive_us 1, archive_eu 2'), "$edition: and moves it when the trigger is disabled");
	query($subscriber, 'ALTER TABLE archive ENABLE ALWAYS TRIGGER once');
	query($publisher, q{BEGIN; DELETE FROM archive WHERE id = 2; INSERT INTO archive VALUES (2, 'u', '2', 'us'), (3, 'u', '3', 'us'); COMMIT});
	ok($node->poll_query_until($subscriber, $parts, 'archive_us 1, archive_us 3'), "$edition: a row that is deleted, and delivered again in the same transaction, is skipped");
	return;
}

sub writes_to_foreign_table
{
	my ($edition) = @_;
	my ($near, $far) = ("near_$edition", "far_$edition");

	query('postgres', "CREATE DATABASE $_") for $near, $far;
	query($far, $schema);
	query($near, "CREATE EXTENSION $edition; CREATE EXTENSION postgres_fdw;
		CREATE SERVER far FOREIGN DATA WRAPPER postgres_fdw OPTIONS (host '@{[$node->host]}', port '@{[$node->port]}', dbname '$far');
		CREATE USER MAPPING FOR CURRENT_USER SERVER far;
		CREATE FOREIGN TABLE shipments (id int, customer text, request text, region text) SERVER far OPTIONS (batch_size '10');
		CREATE TRIGGER once BEFORE INSERT ON shipments FOR EACH ROW EXECUTE FUNCTION idem_skip_duplicates('shipping', 'customer', 'request')");
	query($near, q{INSERT INTO shipments SELECT i, 'u', i % 20 FROM generate_series(1, 40) AS i});
	query($near, q{COPY shipments FROM PROGRAM 'for i in 19 20 21; do echo "1$i,u,$i,"; done' WITH (FORMAT csv)});
	query($near, q{BEGIN; INSERT INTO shipments VALUES (200, 'u', '200'); ROLLBACK; INSERT INTO shipments VALUES (201, 'u', '200')});
	is(query($far, 'SELECT count(*), count(DISTINCT request) FROM shipments'), '23|23', "$edition: a foreign table has each request once");
	return;
}

for my $edition (qw(idem idem_portable))
{
	restores($edition);
	replicates($edition);
	writes_to_foreign_table($edition);
}
$node->stop;
unlike(slurp_file($node->logfile), qr/TRAP|was terminated by signal|WARNING:.*leak/, 'nothing broke');

done_testing();
