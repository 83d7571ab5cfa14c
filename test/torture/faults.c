/*
 * faults.c
 *	  A clock that jumps, and a disk that is full, for the processes of one server.
 *
 * Preloaded by the dynamic linker (LD_PRELOAD).  The file that TORTURE_FAULTS names holds the
 * faults: a test writes it, all processes see it at once.  The clock of the day is ahead by
 * ahead_us; the monotonic clock is as it is, as if an administrator had set the clock.  While
 * disk_is_full, no file of a database can grow; the write-ahead log can.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

typedef struct Faults
{
	int64_t		ahead_us;
	int64_t		disk_is_full;
} Faults;

static const Faults none;
static const volatile Faults *faults = &none;

static __attribute__((constructor)) void
map_faults(void)
{
	const char *name = getenv("TORTURE_FAULTS");
	int			file = name == NULL ? -1 : open(name, O_RDONLY);
	void	   *address;

	if (file < 0)
		return;
	address = mmap(NULL, sizeof(Faults), PROT_READ, MAP_SHARED, file, 0);
	if (address != MAP_FAILED)
		faults = address;
	close(file);
}

int
clock_gettime(clockid_t clock, struct timespec *now)
{
	int			status = (int) syscall(SYS_clock_gettime, clock, now);

	if (status == 0 && clock == CLOCK_REALTIME)
	{
		int64_t		us = now->tv_sec * INT64_C(1000000) + now->tv_nsec / 1000 + faults->ahead_us;

		now->tv_sec = us / 1000000;
		now->tv_nsec = us % 1000000 * 1000;
	}
	return status;
}

int
gettimeofday(struct timeval *now, void *zone)
{
	struct timespec precise;

	(void) zone;
	clock_gettime(CLOCK_REALTIME, &precise);
	now->tv_sec = precise.tv_sec;
	now->tv_usec = precise.tv_nsec / 1000;
	return 0;
}

time_t
time(time_t *result)
{
	struct timespec now;

	clock_gettime(CLOCK_REALTIME, &now);
	if (result != NULL)
		*result = now.tv_sec;
	return now.tv_sec;
}

/* Would the file of a database grow? */
static int
is_refused(int file, off_t end)
{
	char		link[64];
	char		name[1024];
	struct stat status;
	ssize_t		length;

	if (!faults->disk_is_full || fstat(file, &status) != 0 || end <= status.st_size)
		return 0;
	snprintf(link, sizeof(link), "/proc/self/fd/%d", file);
	length = readlink(link, name, sizeof(name) - 1);
	if (length <= 0)
		return 0;
	name[length] = '\0';
	return strstr(name, "/base/") != NULL;
}

ssize_t
pwrite64(int file, const void *data, size_t size, off_t offset)
{
	static ssize_t (*next) (int, const void *, size_t, off_t);

	if (is_refused(file, offset + (off_t) size))
	{
		errno = ENOSPC;
		return -1;
	}
	if (next == NULL)
		*(void **) &next = dlsym(RTLD_NEXT, "pwrite64");
	return next(file, data, size, offset);
}

ssize_t
pwrite(int file, const void *data, size_t size, off_t offset)
{
	return pwrite64(file, data, size, offset);
}

int
posix_fallocate64(int file, off_t offset, off_t size)
{
	static int	(*next) (int, off_t, off_t);

	if (is_refused(file, offset + size))
		return ENOSPC;
	if (next == NULL)
		*(void **) &next = dlsym(RTLD_NEXT, "posix_fallocate64");
	return next(file, offset, size);
}

int
posix_fallocate(int file, off_t offset, off_t size)
{
	return posix_fallocate64(file, offset, size);
}
