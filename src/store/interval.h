/*
 * interval.h
 *	  Lengths of time: how long a claim is remembered, a lease lasts, a call waits.
 */
#ifndef IDEM_STORE_INTERVAL_H
#define IDEM_STORE_INTERVAL_H

#include "datatype/timestamp.h"

/* Days and time of an interval in microseconds.  Ignores months: the caller refuses them. */
extern int64 idem_interval_us(const Interval *interval);

/* Positive, without months, and no longer than a ttl or a lease may be */
#define IDEM_LENGTH_DAYS_MAX 36500

extern bool idem_is_valid_length(const Interval *interval);

#endif							/* IDEM_STORE_INTERVAL_H */
