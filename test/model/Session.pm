# A session, by the protocol of the server (version 3).
#
# The comparison sends a statement and the query of the tables after it together, and to several
# sessions at once. The Perl modules around libpq cannot pipeline; the protocol itself is small.
#
#	my $session = Session->new('postgres');
#	$session->send('SELECT 1');              # a simple query
#	$session->execute('rows');               # a statement prepared by prepare()
#	$session->flush;                         # sends both
#	$session->read while $session->{pending};
#	my $reply = shift @{ $session->{replies} };
#
# A reply is {columns => [[name, type], ...], rows => [[...], ...], error, notices,
# tag, status}. error is undef or {C => sqlstate, M => message, D => detail, ...};
# status is I (idle), T (in a transaction) or E (in a failed one).

package Session;

use strict;
use warnings;

use IO::Socket::INET;
use IO::Socket::UNIX;

sub new
{
	my ($class, $database, %parameters) = @_;
	my $host = $ENV{PGHOST} // '/var/run/postgresql';
	my $port = $ENV{PGPORT} // 5432;
	my $self = bless {
		database => $database,
		in => '',
		out => '',
		pending => 0,
		replies => [],
		reply => new_reply()
	}, $class;

	$self->{socket} =
	  $host =~ m{^/}
	  ? IO::Socket::UNIX->new(Peer => "$host/.s.PGSQL.$port")
	  : IO::Socket::INET->new(PeerAddr => $host, PeerPort => $port);
	$self->{socket} or die "cannot connect to $host, port $port: $!\n";
	%parameters = (
		user => $ENV{PGUSER} // scalar getpwuid($>),
		database => $database,
		application_name => 'compare',
		client_encoding => 'UTF8',
		DateStyle => 'ISO',
		TimeZone => 'UTC',
		%parameters);
	my $body = pack('N', 3 << 16)
	  . join('', map { "$_\0$parameters{$_}\0" } sort keys %parameters) . "\0";
	$self->{out} = pack('N', 4 + length $body) . $body;
	$self->{pending} = 1;
	$self->flush;
	$self->answer;
	return $self;
}

sub new_reply
{
	return { columns => [], rows => [], notices => [], tag => '' };
}

sub message
{
	my ($self, $type, $body) = @_;

	$self->{out} .= $type . pack('N', 4 + length $body) . $body;
	return;
}

sub send
{
	my ($self, $sql) = @_;

	$self->message('Q', "$sql\0");
	$self->{pending}++;
	return;
}

sub prepare
{
	my ($self, $name, $sql) = @_;

	$self->message('P', "$name\0$sql\0" . pack('n', 0));
	$self->message('S', '');
	$self->{pending}++;
	$self->flush;
	$self->answer;
	return;
}

# Executes all of them, with one reply
sub execute
{
	my ($self, @names) = @_;

	for my $name (@names)
	{
		$self->message('B', "\0$name\0" . pack('nnn', 0, 0, 0));
		$self->message('E', "\0" . pack('N', 0));
	}
	$self->message('S', '');
	$self->{pending}++;
	return;
}

sub flush
{
	my ($self) = @_;

	while (length $self->{out})
	{
		my $written = syswrite($self->{socket}, $self->{out});
		defined $written or die "connection to the server lost: $!\n";
		substr($self->{out}, 0, $written, '');
	}
	return;
}

sub fields
{
	my ($body) = @_;

	return { map { substr($_, 0, 1) => substr($_, 1) } grep { length } split(/\0/, $body) };
}

sub columns
{
	my ($body) = @_;
	my @columns;
	my $at = 2;

	for (1 .. unpack('n', $body))
	{
		my $end = index($body, "\0", $at);
		push @columns,
		  [ substr($body, $at, $end - $at), unpack('N', substr($body, $end + 7, 4)) ];
		$at = $end + 19;
	}
	return \@columns;
}

sub values
{
	my ($body) = @_;
	my @values;
	my $at = 2;

	for (1 .. unpack('n', $body))
	{
		my $length = unpack('N', substr($body, $at, 4));
		$at += 4;
		if ($length == 0xFFFFFFFF)
		{
			push @values, undef;
			next;
		}
		push @values, substr($body, $at, $length);
		$at += $length;
	}
	return \@values;
}

sub take
{
	my ($self, $type, $body) = @_;
	my $reply = $self->{reply};

	if ($type eq 'D') { push @{ $reply->{rows} }, &values($body) }
	elsif ($type eq 'T') { $reply->{columns} = columns($body) }
	elsif ($type eq 'C') { $reply->{tag} = substr($body, 0, -1) }
	elsif ($type eq 'N') { push @{ $reply->{notices} }, fields($body) }
	elsif ($type eq 'E')
	{
		$reply->{error} = fields($body);
		die "$reply->{error}{S}: $reply->{error}{M}\n" if $reply->{error}{S} eq 'FATAL';
	}
	elsif ($type eq 'K') { $self->{pid} = unpack('N', $body) }
	elsif ($type eq 'R')
	{
		unpack('N', $body) == 0
		  or die "the server asks for a password: let this user connect without one\n";
	}
	elsif ($type eq 'Z')
	{
		$reply->{status} = $self->{status} = $body;
		push @{ $self->{replies} }, $reply;
		$self->{reply} = new_reply();
		$self->{pending}--;
	}
	return;
}

# Reads what has arrived; waits if nothing has
sub read
{
	my ($self) = @_;
	my $got = sysread($self->{socket}, $self->{in}, 65536, length $self->{in});

	$got or die "connection to the server lost\n";
	my $at = 0;
	while (length($self->{in}) - $at >= 5)
	{
		my ($type, $length) = unpack('a N', substr($self->{in}, $at, 5));
		last if length($self->{in}) - $at < 1 + $length;
		$self->take($type, substr($self->{in}, $at + 5, $length - 4));
		$at += 1 + $length;
	}
	substr($self->{in}, 0, $at, '');
	return;
}

# The reply to the latest statement. Dies if it is an error
sub answer
{
	my ($self) = @_;
	my $reply;

	$self->read while $self->{pending};
	$reply = pop @{ $self->{replies} };
	@{ $self->{replies} } = ();
	die "$self->{database}: $reply->{error}{C}: $reply->{error}{M}\n" if $reply->{error};
	return $reply;
}

sub ask
{
	my ($self, $sql) = @_;

	$self->send($sql);
	$self->flush;
	return $self->answer;
}

sub close
{
	my ($self) = @_;

	CORE::close($self->{socket});
	return;
}

1;
