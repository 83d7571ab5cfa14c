/*
 * duration.h
 *	  Lengths of time in microseconds: of an interval, and between two looks at the clock.
 */
#ifndef IDEM_STORE_DURATION_H
#define IDEM_STORE_DURATION_H

#include "common/int.h"
#include "datatype/timestamp.h"
#include "portability/instr_time.h"

/* The longest ttl or lease */
#define IDEM_LENGTH_DAYS_MAX 36500

/* Days and time of an interval.  Ignores months: the caller refuses them.  Saturates instead of
 * raising: a caller's argument is converted before it is checked. */
static inline int64
idem_interval_us(const Interval *interval)
{
	int64		us;

	if (pg_mul_s64_overflow(interval->day, USECS_PER_DAY, &us))
		return interval->day < 0 ? PG_INT64_MIN : PG_INT64_MAX;
	if (pg_add_s64_overflow(us, interval->time, &us))
		return interval->time < 0 ? PG_INT64_MIN : PG_INT64_MAX;
	return us;
}

/* Whether an interval can be a ttl or a lease: positive, and without months.  From 17 on an
 * infinite interval has INT_MAX months. */
static inline bool
idem_is_valid_length(const Interval *interval)
{
	return interval->month == 0 && idem_interval_us(interval) > 0 &&
		idem_interval_us(interval) <= IDEM_LENGTH_DAYS_MAX * USECS_PER_DAY;
}

/* A clock that nobody sets.  Only differences mean something. */
static inline int64
idem_monotonic_us(void)
{
	instr_time	now;

	INSTR_TIME_SET_CURRENT(now);
	return (int64) INSTR_TIME_GET_MICROSEC(now);
}

#endif							/* IDEM_STORE_DURATION_H */
