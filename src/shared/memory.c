/*
 * memory.c
 *	  The memory that all processes of the server share.
 *
 * There is one such memory in a server.  If the library is preloaded, it lies in the main
 * shared memory, and all processes inherit it from the postmaster.  Otherwise, from
 * PostgreSQL 17 on, it is a named segment of dynamic shared memory: the first session that
 * needs it makes it, the others attach it, and it stays until the server stops or a crash
 * makes all memory anew.  A server has preloaded the library or has not, so a server never
 * has both.
 *
 * A session attaches the segment when it first counts, waits, or reads a statistic.  Sessions
 * that loaded the library before the segment was made share it with those that loaded it
 * later.  Its size does not depend on a setting that a session can change: MaxBackends is
 * fixed as long as the server runs.
 *
 * The segment lies at another address in each process, so it must not hold pointers into
 * itself.  Sessions can have loaded different versions of the library, since a new one can be
 * installed while the server runs.  Raise LAYOUT whenever a part changes: otherwise an older
 * session and a newer one would read the same bytes as different things.
 *
 * A segment can fail: /dev/shm is full, say.  A claim must not fail with it.  So it is
 * attached in an internal subtransaction, where an error can be caught safely.
 */
#include "postgres.h"

#include "access/parallel.h"
#include "access/xact.h"
#include "miscadmin.h"
#include "storage/ipc.h"
#include "storage/lwlock.h"
#include "storage/shmem.h"
#include "utils/memutils.h"
#include "utils/resowner.h"
#include "utils/timestamp.h"

#include "compat.h"
#include "shared/memory.h"

/* Of all parts together: part of the segment's name */
#define LAYOUT 2

#define PARTS_MAX 4

/* A session tries again this long after a failure. */
#define RETRY_INTERVAL (60 * USECS_PER_SEC)

/* The parts follow the tranche of our LWLocks, an int. */
#define PARTS_OFFSET CACHELINEALIGN(sizeof(int))

IdemSharedState idem_shared_state = IDEM_SHARED_NONE;

static struct
{
	IdemPartSize size;
	IdemPartInit init;
	void	  **address;
}			parts[PARTS_MAX];
static int	nparts = 0;

static TimestampTz retry_at = 0;

static shmem_request_hook_type next_shmem_request = NULL;
static shmem_startup_hook_type next_shmem_startup = NULL;

void
idem_shared_add(IdemPartSize size, IdemPartInit init, void **address)
{
	Assert(nparts < PARTS_MAX);
	parts[nparts].size = size;
	parts[nparts].init = init;
	parts[nparts++].address = address;
}

static Size
memory_size(void)
{
	Size		size = PARTS_OFFSET;

	for (int i = 0; i < nparts; i++)
		size = add_size(size, CACHELINEALIGN(parts[i].size()));
	return size;
}

static void
init_memory(void *memory)
{
	int		   *tranche = memory;
	char	   *part = (char *) memory + PARTS_OFFSET;

	*tranche = idem_lwlock_new_tranche("idem");
	for (int i = 0; i < nparts; i++)
	{
		parts[i].init(part, *tranche);
		part += CACHELINEALIGN(parts[i].size());
	}
}

static void
use_memory(void *memory, IdemSharedState state)
{
	const int  *tranche = memory;
	char	   *part = (char *) memory + PARTS_OFFSET;

	LWLockRegisterTranche(*tranche, "idem");
	for (int i = 0; i < nparts; i++)
	{
		*parts[i].address = part;
		part += CACHELINEALIGN(parts[i].size());
	}
	idem_shared_state = state;
}

/* ----- preloaded ----- */

static void
request_shmem(void)
{
	if (next_shmem_request != NULL)
		next_shmem_request();
	RequestAddinShmemSpace(memory_size());
}

static void
start_shmem(void)
{
	void	   *memory;
	bool		found;

	if (next_shmem_startup != NULL)
		next_shmem_startup();
	LWLockAcquire(AddinShmemInitLock, LW_EXCLUSIVE);
	memory = ShmemInitStruct("idem", memory_size(), &found);
	if (!found)
		init_memory(memory);
	LWLockRelease(AddinShmemInitLock);
	use_memory(memory, IDEM_SHARED_PRELOADED);
}

void
idem_shared_init(bool preloaded)
{
	if (preloaded)
	{
		next_shmem_request = shmem_request_hook;
		shmem_request_hook = request_shmem;
		next_shmem_startup = shmem_startup_hook;
		shmem_startup_hook = start_shmem;
	}
	else if (IDEM_HAS_NAMED_SEGMENTS)
		idem_shared_state = IDEM_SHARED_TO_ATTACH;
}

/* ----- on demand ----- */

/* Raises what the server raises. */
static void
attach(void)
{
	char		name[32];
	void	   *memory;

	snprintf(name, sizeof(name), "idem %d", LAYOUT);
	/* A cancelled query must not look like a segment that failed. */
	HOLD_INTERRUPTS();
	memory = idem_named_segment(name, memory_size(), init_memory);
	use_memory(memory, IDEM_SHARED_ON_DEMAND);
	RESUME_INTERRUPTS();
}

static void
report_failure(const ErrorData *error)
{
	ereport(LOG,
			(errcode(error->sqlerrcode),
			 errmsg("idem cannot attach its shared memory: %s", error->message),
			 errdetail("This session counts nothing, and waits for a lease by looking again."),
			 errhint("The session tries again after a minute. Look for the limits of dynamic shared memory, such as the size of /dev/shm; or add idem to shared_preload_libraries and restart the server.")));
}

bool
idem_shared_attach(void)
{
	MemoryContext context = CurrentMemoryContext;
	ResourceOwner owner = CurrentResourceOwner;
	ErrorData  *volatile error = NULL;

	Assert(idem_shared_state == IDEM_SHARED_TO_ATTACH);
	if (!IsTransactionState() || IsInParallelMode() ||
		GetCurrentStatementStartTimestamp() < retry_at)
		return false;

	BeginInternalSubTransaction(NULL);
	MemoryContextSwitchTo(context);
	PG_TRY();
	{
		attach();
		ReleaseCurrentSubTransaction();
	}
	PG_CATCH();
	{
		/* First: a second error would leave the subtransaction open. */
		RollbackAndReleaseCurrentSubTransaction();
		MemoryContextSwitchTo(context);
		CurrentResourceOwner = owner;
		error = CopyErrorData();
		FlushErrorState();
	}
	PG_END_TRY();
	MemoryContextSwitchTo(context);
	CurrentResourceOwner = owner;

	if (error == NULL)
		return true;
	retry_at = GetCurrentStatementStartTimestamp() + RETRY_INTERVAL;
	report_failure(error);
	FreeErrorData(error);
	return false;
}

void
idem_shared_require(const char *purpose)
{
	if (idem_shared_state == IDEM_SHARED_TO_ATTACH)
		attach();
	if (idem_shared_state == IDEM_SHARED_NONE)
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("idem must be loaded via \"shared_preload_libraries\" to %s",
						purpose),
				 errhint("Add idem to shared_preload_libraries and restart the server. PostgreSQL 17 and later need no restart for it.")));
}
