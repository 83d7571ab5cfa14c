/*
 * key.h
 *	  What names a request, and the fingerprint of its parameters.
 */
#ifndef IDEM_STORE_KEY_H
#define IDEM_STORE_KEY_H

#include "datatype/timestamp.h"
#include "fmgr.h"
#include "lib/stringinfo.h"
#include "utils/jsonb.h"

#define IDEM_KEY_PART_BYTES_MAX		255
#define IDEM_FINGERPRINT_BYTES_MAX	64

/* A key's own time may be this far ahead of the clock. */
#define IDEM_KEY_TIME_SKEW_US		USECS_PER_MINUTE

/* The texts may have short headers, and live as long as the arguments that they were taken
 * from. */
typedef struct IdemKey
{
	text	   *scope;
	text	   *user_id;
	text	   *request_id;
} IdemKey;

/* These three functions read arguments by position.  They raise ID400 if one is NULL, empty
 * or too long; a fingerprint may be NULL, and a scope empty. */
extern void idem_key_from_args(FunctionCallInfo fcinfo, int user_arg,
							   int request_arg, int scope_arg, IdemKey *key);
extern text *idem_scope_from_arg(FunctionCallInfo fcinfo, int arg);
extern bytea *idem_fingerprint_from_arg(FunctionCallInfo fcinfo, int arg);

/* Raises ID400 if it is too long; name: the argument, for the message */
extern void idem_key_check_length(const text *part, const char *name);

extern uint32 idem_key_hash(const IdemKey *key);

/* errdetail() with the names of the key, followed by another sentence; NULL: by none */
extern int	idem_errdetail_key_and(const IdemKey *key, const char *sentence);

#define idem_errdetail_key(key) idem_errdetail_key_and(key, NULL)

/* The same names as text, palloc'd */
extern char *idem_key_to_string(const IdemKey *key);

/* Time of a UUIDv7 in canonical text; false for any other text. */
extern bool idem_key_parse_time(const IdemKey *key, TimestampTz *key_time);

/*
 * The fingerprint of a JSON array.  The caller has written "[" and, if there are other elements,
 * these in canonical form, each with a comma after it.  This adds the last element, in canonical
 * form, and "]".
 */
extern bytea *idem_fingerprint_of_array(StringInfo canonical, Jsonb *last);

/* For a batch, which answers "invalid" where a single call raises ID400 */
static inline bool
idem_id_is_valid(const text *id)
{
	return VARSIZE_ANY_EXHDR(id) > 0 &&
		VARSIZE_ANY_EXHDR(id) <= IDEM_KEY_PART_BYTES_MAX;
}

static inline bool
idem_fingerprint_is_valid(const bytea *fingerprint)
{
	return VARSIZE_ANY_EXHDR(fingerprint) > 0 &&
		VARSIZE_ANY_EXHDR(fingerprint) <= IDEM_FINGERPRINT_BYTES_MAX;
}

static inline bool
idem_id_equal(const text *a, const text *b)
{
	return VARSIZE_ANY_EXHDR(a) == VARSIZE_ANY_EXHDR(b) &&
		memcmp(VARDATA_ANY(a), VARDATA_ANY(b), VARSIZE_ANY_EXHDR(a)) == 0;
}

static inline bool
idem_key_equal(const IdemKey *a, const IdemKey *b)
{
	return idem_id_equal(a->request_id, b->request_id) &&
		idem_id_equal(a->user_id, b->user_id) &&
		idem_id_equal(a->scope, b->scope);
}

#endif							/* IDEM_STORE_KEY_H */
