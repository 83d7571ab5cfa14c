/*
 * 10_transactions.c
 *	  The client of figure 10: sends TPC-B transactions for some seconds from several
 *	  connections, and prints their number, and how many a second.
 *
 * A transaction is one call of a stored procedure, as a prepared statement.  With the
 * guard in Redis it is the usual sequence: SET key PENDING NX EX, the call, SET key
 * RESULT EX.  Everything else is the same on all sides: each request has an id of its
 * own, a UUID of the version that is asked for, also if no guard uses it.
 *
 * Each thread has its own connections to the server and to Redis.  An error ends the
 * program: a rate that includes errors means nothing.
 */
#include <errno.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <time.h>

#include <hiredis/hiredis.h>
#include <libpq-fe.h>

/* How long the guard in Redis remembers a key: as long as idem.ttl by default */
#define TTL "3600"

/* Tellers and accounts of a branch, by TPC-B */
#define TELLERS 10
#define ACCOUNTS 100000

typedef struct Client
{
	pthread_t	thread;
	PGconn	   *server;
	redisContext *redis;		/* NULL: no guard in Redis */
	long		done;
} Client;

/* As text, for the prepared statement */
typedef struct Request
{
	char		account[16];
	char		branch[16];
	char		teller[16];
	char		delta[16];
	char		id[37];
} Request;

static int	scale;
static int	seconds;
static int	uuid_version;		/* 4 or 7 */
static pthread_barrier_t ready;

static void
fail(const char *format,...)
{
	va_list		args;

	va_start(args, format);
	vfprintf(stderr, format, args);
	va_end(args);
	fputc('\n', stderr);
	exit(1);
}

static double
clock_seconds(clockid_t clock)
{
	struct timespec now;

	clock_gettime(clock, &now);
	return now.tv_sec + now.tv_nsec / 1e9;
}

/*
 * RFC 9562: random bits, but for version and variant; version 7 begins with 48 bits of
 * milliseconds.
 */
static void
make_uuid(char *id, const unsigned char *chance)
{
	uint64_t	ms = (uint64_t) (clock_seconds(CLOCK_REALTIME) * 1000);
	unsigned char uuid[16];
	int			length = 0;

	memcpy(uuid, chance, sizeof(uuid));
	if (uuid_version == 7)
	{
		for (int i = 0; i < 6; i++)
			uuid[i] = ms >> (8 * (5 - i));
	}
	uuid[6] = (uuid_version << 4) | (uuid[6] & 0x0f);
	uuid[8] = 0x80 | (uuid[8] & 0x3f);
	for (int i = 0; i < 16; i++)
		length += sprintf(id + length, i == 4 || i == 6 || i == 8 || i == 10 ? "-%02x" : "%02x", uuid[i]);
}

static void
make_request(Request *request)
{
	struct
	{
		uint32_t	account;
		uint32_t	branch;
		uint32_t	teller;
		uint32_t	delta;
		unsigned char id[16];
	}			chance;

	if (getrandom(&chance, sizeof(chance), 0) != sizeof(chance))
		fail("getrandom: %s", strerror(errno));
	snprintf(request->account, sizeof(request->account), "%u", chance.account % (ACCOUNTS * scale) + 1);
	snprintf(request->branch, sizeof(request->branch), "%u", chance.branch % scale + 1);
	snprintf(request->teller, sizeof(request->teller), "%u", chance.teller % (TELLERS * scale) + 1);
	snprintf(request->delta, sizeof(request->delta), "%d", (int) (chance.delta % 10001) - 5000);
	make_uuid(request->id, chance.id);
}

static void
expect_ok(redisContext *redis, redisReply *reply)
{
	if (reply == NULL)
		fail("Redis: %s", redis->errstr);
	if (reply->type != REDIS_REPLY_STATUS || strcmp(reply->str, "OK") != 0)
		fail("Redis: %s", reply->str ? reply->str : "the key is there already");
	freeReplyObject(reply);
}

/* The procedure returns the account's balance, and NULL if it did nothing. */
static PGresult *
call(PGconn *server, const Request *request)
{
	const char *values[] = {request->account, request->branch, request->teller,
	request->delta, request->id};
	PGresult   *result = PQexecPrepared(server, "call", 5, values, NULL, NULL, 0);

	if (PQresultStatus(result) != PGRES_TUPLES_OK)
		fail("%s", PQerrorMessage(server));
	if (PQgetisnull(result, 0, 0))
		fail("request %s was not executed", request->id);
	return result;
}

static void
execute(Client *client)
{
	Request		request;
	PGresult   *result;

	make_request(&request);
	if (client->redis)
		expect_ok(client->redis,
				  redisCommand(client->redis, "SET request:%s:%s PENDING NX EX " TTL,
							   request.account, request.id));
	result = call(client->server, &request);
	if (client->redis)
		expect_ok(client->redis,
				  redisCommand(client->redis, "SET request:%s:%s %s EX " TTL,
							   request.account, request.id, PQgetvalue(result, 0, 0)));
	PQclear(result);
}

static void *
run(void *arg)
{
	Client	   *client = arg;
	double		end;

	pthread_barrier_wait(&ready);
	end = clock_seconds(CLOCK_MONOTONIC) + seconds;
	while (clock_seconds(CLOCK_MONOTONIC) < end)
	{
		execute(client);
		client->done++;
	}
	return NULL;
}

static void
connect_client(Client *client, const char *conninfo, const char *procedure, const char *socket)
{
	char		statement[100];
	PGresult   *result;

	client->server = PQconnectdb(conninfo);
	if (PQstatus(client->server) != CONNECTION_OK)
		fail("%s", PQerrorMessage(client->server));
	snprintf(statement, sizeof(statement), "SELECT %s($1, $2, $3, $4, $5)", procedure);
	result = PQprepare(client->server, "call", statement, 0, NULL);
	if (PQresultStatus(result) != PGRES_COMMAND_OK)
		fail("%s", PQerrorMessage(client->server));
	PQclear(result);

	if (socket == NULL)
		return;
	client->redis = redisConnectUnix(socket);
	if (client->redis == NULL || client->redis->err)
		fail("Redis: %s", client->redis ? client->redis->errstr : "out of memory");
}

int
main(int argc, char **argv)
{
	int			clients;
	Client	   *client;
	double		begun;
	double		took;
	long		done = 0;

	if (argc != 7 && argc != 8)
		fail("usage: %s CONNINFO PROCEDURE CLIENTS SCALE SECONDS UUID-VERSION [REDIS-SOCKET]", argv[0]);
	clients = atoi(argv[3]);
	scale = atoi(argv[4]);
	seconds = atoi(argv[5]);
	uuid_version = atoi(argv[6]);
	if (clients < 1 || scale < 1 || seconds < 1)
		fail("CLIENTS, SCALE and SECONDS are numbers from 1 on");
	if (uuid_version != 4 && uuid_version != 7)
		fail("UUID-VERSION is 4 or 7");

	client = calloc(clients, sizeof(Client));
	if (client == NULL || pthread_barrier_init(&ready, NULL, clients + 1) != 0)
		fail("out of memory");
	for (int i = 0; i < clients; i++)
	{
		connect_client(&client[i], argv[1], argv[2], argc == 8 ? argv[7] : NULL);
		errno = pthread_create(&client[i].thread, NULL, run, &client[i]);
		if (errno != 0)
			fail("pthread_create: %s", strerror(errno));
	}

	/* The threads start later than the clock, by the time that it takes to wake them. */
	begun = clock_seconds(CLOCK_MONOTONIC);
	pthread_barrier_wait(&ready);
	for (int i = 0; i < clients; i++)
	{
		pthread_join(client[i].thread, NULL);
		done += client[i].done;
		PQfinish(client[i].server);
		if (client[i].redis)
			redisFree(client[i].redis);
	}
	took = clock_seconds(CLOCK_MONOTONIC) - begun;
	printf("%ld %.1f\n", done, done / took);
	return 0;
}
