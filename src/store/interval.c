/*
 * interval.c
 *	  Lengths of time in microseconds.
 */
#include "postgres.h"

#include "common/int.h"

#include "store/interval.h"

/* Saturates instead of raising: a caller's argument is converted before it is checked. */
int64
idem_interval_us(const Interval *interval)
{
	int64		us;

	if (pg_mul_s64_overflow(interval->day, USECS_PER_DAY, &us))
		return interval->day < 0 ? PG_INT64_MIN : PG_INT64_MAX;
	if (pg_add_s64_overflow(us, interval->time, &us))
		return interval->time < 0 ? PG_INT64_MIN : PG_INT64_MAX;
	return us;
}

bool
idem_is_valid_length(const Interval *interval)
{
	/* From 17 on an infinite interval has INT_MAX months. */
	return interval->month == 0 && idem_interval_us(interval) > 0 &&
		idem_interval_us(interval) <= IDEM_LENGTH_DAYS_MAX * USECS_PER_DAY;
}
