/*
 * fail.c
 *	  A library that makes a server fail on request, for errors.pl.
 *
 * idem.so stays as it is.  After it was loaded, this library finds the places where the dynamic
 * linker has put the addresses of the server's functions for it, and puts wrappers there.  A
 * wrapper counts the calls, and raises an error instead of the nth one ("call"), or after it
 * ("after").  The same is done with what idem calls through the table access method, with the
 * allocator of the server ("alloc": any allocation in the server fails while a statement is
 * executed), and with the system calls of the server that read and write files ("read", "write").
 * "cancel" and "terminate" are the user's cancel and the end of the session at the nth of the
 * calls and allocations.  "statement" fails at the start of the nth statement inside of a
 * statement: for the portable edition.
 *
 * Nothing fails in a critical section, where the server allows no error.  After the commit or
 * while the transaction is aborted, no function may be called that can raise an error; such
 * calls are written down, and fail_calls_too_late() tells them.
 *
 * The wrappers pass on twelve arguments, whatever the function has, and a result of 16 bytes.
 * With the calling conventions of x86-64 and aarch64 this fits all functions that have no
 * floating-point arguments or results.
 */
#define _GNU_SOURCE
#include "postgres.h"

#include <dlfcn.h>
#include <execinfo.h>
#include <link.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

#include "access/table.h"
#include "access/tableam.h"
#include "access/xact.h"
#include "catalog/pg_proc.h"
#include "executor/executor.h"
#include "fmgr.h"
#include "lib/stringinfo.h"
#include "miscadmin.h"
#include "nodes/memnodes.h"
#include "postmaster/bgworker.h"
#include "storage/bufmgr.h"
#include "storage/proc.h"
#include "tcop/utility.h"
#include "utils/builtins.h"
#include "utils/memutils.h"
#include "utils/rel.h"
#include "utils/resowner.h"

PG_MODULE_MAGIC;

#define ERRCODE_INJECTED MAKE_SQLSTATE('F', 'A', '1', 'L', '0')

typedef enum FailMode
{
	MODE_NONE, MODE_CALL, MODE_AFTER, MODE_ALLOC, MODE_READ, MODE_WRITE, MODE_STATEMENT,
	MODE_CANCEL, MODE_TERMINATE
} FailMode;

static const char *const mode_names[] = {
	"none", "call", "after", "alloc", "read", "write", "statement", "cancel", "terminate"
};

/* Made by the postmaster, and inherited by all processes */
typedef struct Shared
{
	FailMode		worker_mode;
	int64		worker_at;
	int			worker_fired;
	char		worker_type[64];	/* of the processes that are meant */
	char		what[600];		/* that failed in the worker */
	int			ntoo_late;
	char		too_late[16][64];
} Shared;

static Shared *shared = NULL;

static FailMode mode = MODE_NONE;	/* of the statement that runs */
static FailMode next_mode = MODE_NONE;	/* of the next one */
static int64 at = 0;
static int64 seen = 0;
static int64 last_seen = 0;
static bool fired = false;
static char only_name[64];
static char what[600];
static int	depth = 0;			/* of statements that the executor runs */
static int	nesting = 0;		/* of all statements */
static bool is_worker = false;

static uintptr_t idem_start = 0;
static uintptr_t idem_end = 0;

static ExecutorRun_hook_type next_executor_run = NULL;
static ProcessUtility_hook_type next_process_utility = NULL;

PG_FUNCTION_INFO_V1(fail_arm);
PG_FUNCTION_INFO_V1(fail_fired);
PG_FUNCTION_INFO_V1(fail_seen);
PG_FUNCTION_INFO_V1(fail_arm_worker);
PG_FUNCTION_INFO_V1(fail_worker_fired);
PG_FUNCTION_INFO_V1(fail_calls_too_late);
PG_FUNCTION_INFO_V1(fail_evict);

/* ----- failing ----- */

static uintptr_t
fail_base(void)
{
	Dl_info		info;

	return dladdr(fail_base, &info) != 0 ? (uintptr_t) info.dli_fbase : 0;
}

/* The functions of the server that were running, up to idem's */
static void
note_fired(const char *name, uintptr_t caller)
{
	void	   *frames[40];
	int			nframes = backtrace(frames, lengthof(frames));
	int			length = snprintf(what, sizeof(what), "%s %s", mode_names[mode], name);
	Dl_info		info;

	for (int i = 2; i < nframes && length < sizeof(what) - 80; i++)
	{
		uintptr_t	frame = (uintptr_t) frames[i];

		if (frame >= idem_start && frame < idem_end)
		{
			length += snprintf(what + length, 80, " < idem+0x%lx", (unsigned long) (frame - idem_start));
			break;
		}
		if (dladdr(frames[i], &info) != 0 && info.dli_sname != NULL &&
			(uintptr_t) info.dli_fbase != fail_base())
			length += snprintf(what + length, 80, " < %s", info.dli_sname);
	}
	fired = true;
	mode = MODE_NONE;
	if (is_worker)
	{
		shared->worker_mode = MODE_NONE;
		strlcpy(shared->what, what, sizeof(shared->what));
		pg_write_barrier();
		shared->worker_fired = 1;
	}
}

static void
fail(const char *name, uintptr_t caller)
{
	FailMode		failing = mode;

	note_fired(name, caller);
	switch (failing)
	{
		case MODE_CANCEL:
			InterruptPending = QueryCancelPending = true;
			break;
		case MODE_TERMINATE:
			InterruptPending = ProcDiePending = true;
			break;
		case MODE_ALLOC:
			ereport(ERROR,
					(errcode(ERRCODE_OUT_OF_MEMORY),
					 errmsg("injected failure: %s", what)));
			break;
		default:
			ereport(ERROR,
					(errcode(ERRCODE_INJECTED),
					 errmsg("injected failure: %s", what)));
	}
}

/* A worker or the launcher takes the order that was given for its kind. */
static void
look_for_order(void)
{
	if (MyBackendType != B_BG_WORKER || mode != MODE_NONE || shared->worker_mode == MODE_NONE ||
		MyBgworkerEntry == NULL || strcmp(MyBgworkerEntry->bgw_type, shared->worker_type) != 0)
		return;
	is_worker = true;
	mode = shared->worker_mode;
	at = shared->worker_at;
	seen = 0;
}

/* Whether errors may be raised here */
static bool
may_fail(const char *name)
{
	if (CritSectionCount > 0)
		return false;
	if (IsTransactionState())
		return true;
	if (TopTransactionResourceOwner != NULL)
	{
		/* In the callbacks of a commit or an abort */
		for (int i = 0; i < shared->ntoo_late; i++)
			if (strcmp(shared->too_late[i], name) == 0)
				return false;
		if (shared->ntoo_late < lengthof(shared->too_late))
			strlcpy(shared->too_late[shared->ntoo_late++], name, 64);
		return false;
	}
	return is_worker;
}

static void
reach(const char *name, uintptr_t caller)
{
	if (only_name[0] != '\0' && strcmp(only_name, name) != 0)
		return;
	if (++seen == at)
		fail(name, caller);
}

static void
call_begins(const char *name, uintptr_t caller)
{
	look_for_order();
	if (mode == MODE_NONE || !may_fail(name))
		return;
	if (mode == MODE_CALL || mode == MODE_CANCEL || mode == MODE_TERMINATE)
		reach(name, caller);
}

static void
call_ended(const char *name, uintptr_t caller)
{
	if (mode != MODE_AFTER || !may_fail(name))
		return;
	/* Their last act is their effect, so that no error can come after it. */
	if (strcmp(name, "hash_search") == 0 || strcmp(name, "RelationIncrementReferenceCount") == 0 ||
		strcmp(name, "ReleaseCurrentSubTransaction") == 0)
		return;
	/* A lock of the transaction (relation_lock.c): nothing follows in it that can raise an error,
	 * and the caller then notes that there is a lock. */
	if (strcmp(name, "LockAcquire") == 0 && CurrentResourceOwner == TopTransactionResourceOwner)
		return;
	reach(name, caller);
}

/* ----- wrappers of functions ----- */

#define WRAPPERS_MAX 512

typedef uintptr_t Word;
typedef unsigned __int128 WordPair;
typedef WordPair (*Function) (Word, Word, Word, Word, Word, Word, Word, Word, Word, Word, Word, Word);

static Function functions[WRAPPERS_MAX];
static const char *names[WRAPPERS_MAX];
static bool from_idem_only[WRAPPERS_MAX];
static int	nwrappers = 0;

static inline WordPair
wrapped(int i, Word caller, Word a, Word b, Word c, Word d, Word e, Word f, Word g, Word h, Word j,
		Word k, Word l, Word m)
{
	bool		counts = !from_idem_only[i] || (caller >= idem_start && caller < idem_end);
	WordPair		result;

	if (counts)
		call_begins(names[i], caller);
	result = functions[i] (a, b, c, d, e, f, g, h, j, k, l, m);
	if (counts)
		call_ended(names[i], caller);
	return result;
}

#define WRAPPER(n) \
static WordPair wrapper_##n(Word a, Word b, Word c, Word d, Word e, Word f, Word g, Word h, Word j, Word k, Word l, Word m) \
{ return wrapped(0##n - 01000, (Word) __builtin_return_address(0), a, b, c, d, e, f, g, h, j, k, l, m); }
#define NAME(n) wrapper_##n,

/* Octal numbers from 1000 to 1777 */
#define OF_8(X, n) X(n##0) X(n##1) X(n##2) X(n##3) X(n##4) X(n##5) X(n##6) X(n##7)
#define OF_64(X, n) OF_8(X, n##0) OF_8(X, n##1) OF_8(X, n##2) OF_8(X, n##3) \
	OF_8(X, n##4) OF_8(X, n##5) OF_8(X, n##6) OF_8(X, n##7)
#define OF_512(X, n) OF_64(X, n##0) OF_64(X, n##1) OF_64(X, n##2) OF_64(X, n##3) \
	OF_64(X, n##4) OF_64(X, n##5) OF_64(X, n##6) OF_64(X, n##7)

OF_512(WRAPPER, 1)
static const Function wrappers[WRAPPERS_MAX] = {OF_512(NAME, 1)};

/* Puts a wrapper where the address of a function is kept. */
static void
wrap(void **place, const char *name, bool only_from_idem)
{
	long		page = sysconf(_SC_PAGESIZE);

	if (nwrappers == WRAPPERS_MAX)
		elog(FATAL, "more functions than wrappers");
	functions[nwrappers] = (Function) *place;
	names[nwrappers] = name;
	from_idem_only[nwrappers] = only_from_idem;
	if (mprotect((void *) ((Word) place & ~(page - 1)), page, PROT_READ | PROT_WRITE) != 0)
		elog(FATAL, "mprotect: %m");
	*place = (void *) wrappers[nwrappers++];
}

/*
 * What cannot raise an error: reports of errors; what gives back; what only looks at memory.  And
 * those with a variable number of arguments, whose allocations count by themselves.
 */
static const char *const cannot_fail[] = {
	"errcode", "errmsg", "errmsg_internal", "errdetail", "errdetail_internal", "errdetail_plural",
	"errhint", "errfinish", "errstart", "errstart_cold", "errcontext_msg", "errtableconstraint",
	"set_errcontext_domain", "format_elog_string", "pre_format_elog_string", "ReThrowError",
	"pg_re_throw", "FlushErrorState", "FreeErrorData", "geterrcode", "aclcheck_error",
	"psprintf", "appendStringInfo", "pg_snprintf", "proc_exit",
	"pfree", "list_free", "list_member", "list_member_oid", "list_delete_oid", "bms_next_member",
	"MemoryContextDelete", "MemoryContextReset", "MemoryContextSetParent",
	"table_close", "index_close", "index_endscan", "systable_endscan", "RelationClose",
	"ReleaseBuffer", "ReleaseSysCache", "UnregisterSnapshot", "PopActiveSnapshot",
	"FreeExecutorState", "FreeExprContext", "ExecDropSingleTupleTableSlot", "tuplesort_end",
	"LWLockAcquire", "LWLockRelease", "LockRelease", "UnlockRelationOid", "LockBuffer",
	"SpeculativeInsertionLockRelease", "RollbackAndReleaseCurrentSubTransaction",
	"ConditionVariableBroadcast", "ConditionVariableCancelSleep", "ConditionVariableInit",
	"ResetLatch", "ForceSyncCommit", "AtEOXact_GUC", "NewGUCNestLevel", "s_lock", "pg_usleep",
	"die", "pqsignal", "BackgroundWorkerUnblockSignals", "SetCurrentStatementStartTimestamp",
	"ActiveSnapshotSet", "GetActiveSnapshot", "GetCurrentStatementStartTimestamp",
	"GetCurrentSubTransactionId", "GetCurrentTimestamp", "GetCurrentTransactionNestLevel",
	"GetTopTransactionIdIfAny", "GetUserId", "IsInParallelMode", "IsLogicalWorker",
	"IsTransactionState", "ItemPointerEquals", "RecoveryInProgress", "TimestampDifferenceExceeds",
	"TransactionIdIsCurrentTransactionId", "TransactionIdPrecedes", "get_timeout_indicator",
	"hash_bytes", "hash_get_num_entries", "hash_seq_init", "hash_seq_search", "pg_mbcliplen",
	"pg_mbstrlen", "database_is_invalid_form", "command_tag_event_trigger_ok", "CreateCommandTag",
	"strlcpy", "timestamptz_to_str", "BackendXidGetPid", "GetBackgroundWorkerPid",
	"GetBackgroundWorkerTypeByPid", "TerminateBackgroundWorker", "IsBinaryUpgrade",
	"pgstat_report_activity", "pgstat_report_appname", "compareJsonbContainers", "GetNumberFromPGProc",
	"RegisterXactCallback", "RegisterSubXactCallback", "CacheRegisterRelcacheCallback",
	"before_shmem_exit", "LWLockInitialize", "LWLockNewTrancheId", "LWLockRegisterTranche",
	"ExecStoreVirtualTuple", "add_size", "initClosestMatch",
	NULL
};

static bool
can_fail(const char *name)
{
	for (int i = 0; cannot_fail[i] != NULL; i++)
		if (strcmp(cannot_fail[i], name) == 0)
			return false;
	return true;
}

/* ----- system calls of the server ----- */

static ssize_t (*next_pread) (int, void *, size_t, off_t);
static ssize_t (*next_preadv) (int, const struct iovec *, int, off_t);
static ssize_t (*next_pwrite) (int, const void *, size_t, off_t);
static ssize_t (*next_pwritev) (int, const struct iovec *, int, off_t);
static int	(*next_fallocate) (int, off_t, off_t);

/* The server raises the error. */
static bool
io_fails(FailMode which, const char *name)
{
	if (mode != which || (depth == 0 && !is_worker) || CritSectionCount > 0 || ++seen != at)
		return false;
	note_fired(name, 0);
	errno = which == MODE_READ ? EIO : ENOSPC;
	return true;
}

static ssize_t
failing_pread(int fd, void *buffer, size_t size, off_t offset)
{
	return io_fails(MODE_READ, "pread") ? -1 : next_pread(fd, buffer, size, offset);
}

static ssize_t
failing_preadv(int fd, const struct iovec *buffers, int n, off_t offset)
{
	return io_fails(MODE_READ, "preadv") ? -1 : next_preadv(fd, buffers, n, offset);
}

static ssize_t
failing_pwrite(int fd, const void *buffer, size_t size, off_t offset)
{
	return io_fails(MODE_WRITE, "pwrite") ? -1 : next_pwrite(fd, buffer, size, offset);
}

static ssize_t
failing_pwritev(int fd, const struct iovec *buffers, int n, off_t offset)
{
	return io_fails(MODE_WRITE, "pwritev") ? -1 : next_pwritev(fd, buffers, n, offset);
}

static int
failing_fallocate(int fd, off_t offset, off_t size)
{
	return io_fails(MODE_WRITE, "posix_fallocate") ? ENOSPC : next_fallocate(fd, offset, size);
}

static void
replace(void **place, void *replacement, void *next)
{
	long		page = sysconf(_SC_PAGESIZE);

	if (mprotect((void *) ((Word) place & ~(page - 1)), page, PROT_READ | PROT_WRITE) != 0)
		elog(FATAL, "mprotect: %m");
	memcpy(next, place, sizeof(void *));
	*place = replacement;
}

static void
replace_system_call(void **place, const char *name)
{
	if (strcmp(name, "pread") == 0 || strcmp(name, "pread64") == 0)
		replace(place, failing_pread, &next_pread);
	else if (strcmp(name, "preadv") == 0 || strcmp(name, "preadv64") == 0)
		replace(place, failing_preadv, &next_preadv);
	else if (strcmp(name, "pwrite") == 0 || strcmp(name, "pwrite64") == 0)
		replace(place, failing_pwrite, &next_pwrite);
	else if (strcmp(name, "pwritev") == 0 || strcmp(name, "pwritev64") == 0)
		replace(place, failing_pwritev, &next_pwritev);
	else if (strcmp(name, "posix_fallocate") == 0 || strcmp(name, "posix_fallocate64") == 0)
		replace(place, failing_fallocate, &next_fallocate);
}

/* ----- finding the places ----- */

static uintptr_t server_start = 0;
static uintptr_t server_end = 0;

static void
walk_relocations(const struct dl_phdr_info *object, bool is_idem)
{
	const ElfW(Dyn) *dynamic = NULL;
	const ElfW(Sym) *symbols = NULL;
	const char *strings = NULL;
	const ElfW(Rela) *tables[2] = {NULL, NULL};
	size_t		sizes[2] = {0, 0};

	for (int i = 0; i < object->dlpi_phnum; i++)
		if (object->dlpi_phdr[i].p_type == PT_DYNAMIC)
			dynamic = (const void *) (object->dlpi_addr + object->dlpi_phdr[i].p_vaddr);
	for (; dynamic != NULL && dynamic->d_tag != DT_NULL; dynamic++)
	{
		Word		value = dynamic->d_un.d_ptr;
		const void *pointer = (const void *) (value < object->dlpi_addr ? value + object->dlpi_addr : value);

		switch (dynamic->d_tag)
		{
			case DT_SYMTAB:
				symbols = pointer;
				break;
			case DT_STRTAB:
				strings = pointer;
				break;
			case DT_JMPREL:
				tables[0] = pointer;
				break;
			case DT_PLTRELSZ:
				sizes[0] = value;
				break;
			case DT_RELA:
				tables[1] = pointer;
				break;
			case DT_RELASZ:
				sizes[1] = value;
				break;
		}
	}
	for (int t = 0; t < 2; t++)
		for (size_t i = 0; tables[t] != NULL && i < sizes[t] / sizeof(ElfW(Rela)); i++)
		{
			const ElfW(Rela) *relocation = &tables[t][i];
			const ElfW(Sym) *symbol = &symbols[ELF64_R_SYM(relocation->r_info)];
			const char *name = strings + symbol->st_name;
			void	  **place = (void **) (object->dlpi_addr + relocation->r_offset);

			if (ELF64_R_SYM(relocation->r_info) == 0 || symbol->st_shndx != SHN_UNDEF)
				continue;
			if (!is_idem)
				replace_system_call(place, name);
			/* Of the executable's functions, and called: data and pointers have another kind. */
			else if (t == 0 && (Word) *place >= server_start && (Word) *place < server_end && can_fail(name))
				wrap(place, name, false);
		}
}

static int
visit_object(struct dl_phdr_info *object, size_t size, void *arg)
{
	const char *slash = strrchr(object->dlpi_name, '/');
	bool		is_server = object->dlpi_name[0] == '\0';
	bool		is_idem = slash != NULL && strcmp(slash, "/idem.so") == 0;

	if (!is_server && !is_idem)
		return 0;
	for (int i = 0; i < object->dlpi_phnum; i++)
	{
		const ElfW(Phdr) *segment = &object->dlpi_phdr[i];
		Word		start = object->dlpi_addr + segment->p_vaddr;

		if (segment->p_type == PT_LOAD && (segment->p_flags & PF_X) != 0)
		{
			*(is_idem ? &idem_start : &server_start) = is_idem ? object->dlpi_addr : start;
			*(is_idem ? &idem_end : &server_end) = start + segment->p_memsz;
		}
	}
	walk_relocations(object, is_idem);
	return 0;
}

/* ----- allocations ----- */

/* The third argument is there from PostgreSQL 17 on. */
typedef void *(*Alloc) (MemoryContext, Size, int);

static Alloc next_alloc;
static Alloc next_generation_alloc;

/*
 * LockAcquireExtended() does not survive it (seen on 15): if the allocation of a new lock's
 * owners fails in a subtransaction, the next use of that lock in the same transaction crashes.
 */
static bool
server_crashes_later(void)
{
	void	   *frames[6];
	int			nframes = backtrace(frames, lengthof(frames));
	Dl_info		info;

	for (int i = 1; i < nframes; i++)
		if (dladdr(frames[i], &info) != 0 && info.dli_sname != NULL &&
			strcmp(info.dli_sname, "LockAcquireExtended") == 0)
			return true;
	return false;
}

static void
allocation_begins(MemoryContext context)
{
	if (mode != MODE_ALLOC && mode != MODE_CANCEL && mode != MODE_TERMINATE)
		return;
	if (CritSectionCount > 0 || context == ErrorContext || !IsTransactionState() ||
		(depth == 0 && !is_worker))
		return;
	if (mode == MODE_ALLOC && seen + 1 == at && context == TopMemoryContext &&
		server_crashes_later())
		seen++;
	else
		reach(context->name, 0);
}

static void *
failing_alloc(MemoryContext context, Size size, int flags)
{
	allocation_begins(context);
	return next_alloc(context, size, flags);
}

static void *
failing_generation_alloc(MemoryContext context, Size size, int flags)
{
	allocation_begins(context);
	return next_generation_alloc(context, size, flags);
}

static void
wrap_allocators(void)
{
	MemoryContext generation = GenerationContextCreate(TopMemoryContext, "fail", ALLOCSET_SMALL_SIZES);

	replace((void **) &TopMemoryContext->methods->alloc, failing_alloc, &next_alloc);
	replace((void **) &generation->methods->alloc, failing_generation_alloc, &next_generation_alloc);
	MemoryContextDelete(generation);
}

#define WRAP_METHOD(name) wrap((void **) &heap->name, #name, true)

static void
wrap_table_methods(void)
{
	TableAmRoutine *heap = (TableAmRoutine *) GetHeapamTableAmRoutine();

	WRAP_METHOD(index_fetch_begin);
	WRAP_METHOD(index_fetch_tuple);
	WRAP_METHOD(tuple_fetch_row_version);
	WRAP_METHOD(tuple_insert_speculative);
	WRAP_METHOD(tuple_complete_speculative);
	WRAP_METHOD(multi_insert);
	WRAP_METHOD(tuple_delete);
	WRAP_METHOD(tuple_update);
	WRAP_METHOD(tuple_lock);
}

/* ----- statements ----- */

static void
statement_begins(void)
{
	look_for_order();
	if (is_worker)
		return;
	if (nesting == 0)
	{
		if (mode != MODE_NONE || fired)
			last_seen = seen;
		mode = next_mode;
		next_mode = MODE_NONE;
		seen = 0;
	}
	else if (mode == MODE_STATEMENT && may_fail("statement"))
		reach("statement", 0);
}

static void
executor_run(QueryDesc *query, ScanDirection direction, uint64 count
#if PG_VERSION_NUM < 180000
			 ,bool once
#endif
)
{
	statement_begins();
	nesting++;
	depth++;
	PG_TRY();
	{
#if PG_VERSION_NUM < 180000
		if (next_executor_run != NULL)
			next_executor_run(query, direction, count, once);
		else
			standard_ExecutorRun(query, direction, count, once);
#else
		if (next_executor_run != NULL)
			next_executor_run(query, direction, count);
		else
			standard_ExecutorRun(query, direction, count);
#endif
	}
	PG_FINALLY();
	{
		depth--;
		nesting--;
	}
	PG_END_TRY();
}

/* The allocations of a utility statement itself do not concern idem: depth stays. */
static void
process_utility(PlannedStmt *statement, const char *query, bool read_only_tree,
				ProcessUtilityContext context, ParamListInfo params,
				QueryEnvironment *environment, DestReceiver *dest, QueryCompletion *completion)
{
	statement_begins();
	nesting++;
	PG_TRY();
	{
		next_process_utility(statement, query, read_only_tree, context, params, environment, dest,
							 completion);
	}
	PG_FINALLY();
	{
		nesting--;
	}
	PG_END_TRY();
}

void		_PG_init(void);

void
_PG_init(void)
{
	shared = mmap(NULL, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	if (shared == MAP_FAILED)
		elog(FATAL, "mmap: %m");
	dl_iterate_phdr(visit_object, NULL);
	if (idem_start == 0)
		elog(FATAL, "load idem before this library");
	wrap_table_methods();
	wrap_allocators();
	next_executor_run = ExecutorRun_hook;
	ExecutorRun_hook = executor_run;
	next_process_utility = ProcessUtility_hook != NULL ? ProcessUtility_hook : standard_ProcessUtility;
	ProcessUtility_hook = process_utility;
}

/* ----- SQL ----- */

static FailMode
mode_arg(FunctionCallInfo fcinfo, int arg)
{
	char	   *name = text_to_cstring(PG_GETARG_TEXT_PP(arg));

	for (FailMode m = MODE_NONE; m < lengthof(mode_names); m++)
		if (strcmp(mode_names[m], name) == 0)
			return m;
	elog(ERROR, "there is no mode \"%s\"", name);
}

/* fail_arm(mode text, at bigint, name text): makes the next statement fail at its nth point.  name:
 * of the function that is called; '': any */
Datum
fail_arm(PG_FUNCTION_ARGS)
{
	text_to_cstring_buffer(PG_GETARG_TEXT_PP(2), only_name, sizeof(only_name));
	next_mode = mode_arg(fcinfo, 0);
	at = PG_GETARG_INT64(1);
	fired = false;
	PG_RETURN_VOID();
}

/* fail_fired() -> text: what has failed; NULL: nothing */
Datum
fail_fired(PG_FUNCTION_ARGS)
{
	if (!fired)
		PG_RETURN_NULL();
	PG_RETURN_TEXT_P(cstring_to_text(what));
}

/* fail_seen() -> bigint: how many points the latest armed statement had, up to the one that failed */
Datum
fail_seen(PG_FUNCTION_ARGS)
{
	PG_RETURN_INT64(last_seen);
}

/* fail_arm_worker(type text, mode text, at bigint): the same in the next process of this type */
Datum
fail_arm_worker(PG_FUNCTION_ARGS)
{
	shared->worker_fired = 0;
	text_to_cstring_buffer(PG_GETARG_TEXT_PP(0), shared->worker_type, sizeof(shared->worker_type));
	shared->worker_at = PG_GETARG_INT64(2);
	pg_write_barrier();
	shared->worker_mode = mode_arg(fcinfo, 1);
	PG_RETURN_VOID();
}

Datum
fail_worker_fired(PG_FUNCTION_ARGS)
{
	if (!shared->worker_fired)
		PG_RETURN_NULL();
	PG_RETURN_TEXT_P(cstring_to_text(shared->what));
}

/* Functions that can raise an error, and were called after the commit or in an abort */
Datum
fail_calls_too_late(PG_FUNCTION_ARGS)
{
	StringInfoData list;

	initStringInfo(&list);
	for (int i = 0; i < shared->ntoo_late; i++)
		appendStringInfo(&list, "%s%s", i == 0 ? "" : ", ", shared->too_late[i]);
	PG_RETURN_TEXT_P(cstring_to_text(list.data));
}

/* Fills the buffers with pg_proc, so that what comes next is read from files. */
Datum
fail_evict(PG_FUNCTION_ARGS)
{
	Relation	relation = table_open(ProcedureRelationId, AccessShareLock);
	BlockNumber blocks = RelationGetNumberOfBlocks(relation);

	for (int i = 0; i < NBuffers * 6; i++)
		ReleaseBuffer(ReadBuffer(relation, i % blocks));
	table_close(relation, AccessShareLock);
	PG_RETURN_VOID();
}
