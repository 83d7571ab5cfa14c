# A session in the background: psql on a pipe, one statement at a time.
#
#	my $client = Client->new($node);
#	$client->ask('SELECT 1');                # '1', or 'ERROR:  ID409'
#	$client->send('SELECT something_slow()'); # does not wait
#	$client->answer;                         # waits for the answer
#	$client->quit;

package Client;

use strict;
use warnings;

use IPC::Run;
use PostgreSQL::Test::Utils;

my $requests = 0;

sub new
{
	my ($class, $node, $database) = @_;
	my $self = bless { in => '', out => '', mark => undef }, $class;

	# Of each statement: a session may live for longer on a slow machine.
	$self->{timer} = IPC::Run::timeout($PostgreSQL::Test::Utils::timeout_default);
	$self->{run} = IPC::Run::start(
		[
			'psql', '-XAtq', '-v', 'VERBOSITY=sqlstate', '-d',
			$node->connstr($database // 'postgres')
		],
		'<', \$self->{in}, '>&', \$self->{out}, $self->{timer});
	$self->{pid} = $self->ask('SELECT pg_backend_pid()');
	return $self;
}

sub pid
{
	my ($self) = @_;
	return $self->{pid};
}

sub send
{
	my ($self, $sql) = @_;

	die "not answered yet: $self->{mark}" if defined $self->{mark};
	$requests++;
	$self->{timer}->start;
	$self->{mark} = "=== $requests ===";
	$self->{in} .= "$sql;\n\\echo '$self->{mark}'\n";
	$self->{run}->pump_nb;
	return;
}

# The answer without its last line break; if the session was terminated, its last output
sub answer
{
	my ($self) = @_;
	my $mark = quotemeta($self->{mark} . "\n");

	while ($self->{out} !~ /$mark/ && $self->{run}->pumpable)
	{
		$self->{run}->pump;
	}
	$self->{out} =~ s/^(.*?)($mark|\z)//s;
	$self->{mark} = undef;
	my $answer = $1;
	chomp $answer;
	return $answer;
}

sub ask
{
	my ($self, $sql) = @_;

	$self->send($sql);
	return $self->answer;
}

sub quit
{
	my ($self) = @_;

	$self->{in} .= "\\q\n";
	$self->{timer}->start;
	$self->{run}->finish;
	return;
}

1;
