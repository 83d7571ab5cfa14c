/*
 * key.c
 *	  What names a request: validation of the ids, the time in a UUIDv7, and
 *	  the fingerprint of a request's parameters.
 *
 * A bad id is always an error, never a NULL result: an IF would read NULL as "already
 * done", and the request would be lost silently.
 */
#include "postgres.h"

#include "common/hashfn.h"
#include "lib/stringinfo.h"
#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/fmgrprotos.h"
#include "utils/json.h"
#include "utils/jsonb.h"
#include "utils/numeric.h"
#include "utils/timestamp.h"

#include "sqlstate.h"
#include "store/key.h"

#define NUMBER_DIGITS_MAX	1000
#define UUID_TIME_CHARS		13	/* 48 bits of milliseconds since 1970, and a hyphen */

PG_FUNCTION_INFO_V1(idem_fingerprint);

void
idem_key_check_length(const text *part, const char *name)
{
	if (VARSIZE_ANY_EXHDR(part) > IDEM_KEY_PART_BYTES_MAX)
		ereport(ERROR,
				(errcode(ERRCODE_IDEM_INVALID),
				 errmsg("%s is too long", name),
				 errdetail("It has %zu bytes, the limit is %d.",
						   (size_t) VARSIZE_ANY_EXHDR(part),
						   IDEM_KEY_PART_BYTES_MAX),
				 errhint("Fix the client: send a shorter %s, or a hash of this one.", name)));
}

static text *
id_from_arg(FunctionCallInfo fcinfo, int arg, const char *name)
{
	text	   *id = PG_ARGISNULL(arg) ? NULL : PG_GETARG_TEXT_PP(arg);

	if (id == NULL || VARSIZE_ANY_EXHDR(id) == 0)
		ereport(ERROR,
				(errcode(ERRCODE_IDEM_INVALID),
				 errmsg("%s must not be %s", name, id ? "empty" : "null"),
				 errdetail("A request is named by a user and a request id."),
				 errhint("Fix the client: it must send the same two ids each time it sends the request.")));
	idem_key_check_length(id, name);
	return id;
}

text *
idem_scope_from_arg(FunctionCallInfo fcinfo, int arg)
{
	text	   *scope;

	if (PG_ARGISNULL(arg))
		ereport(ERROR,
				(errcode(ERRCODE_IDEM_INVALID),
				 errmsg("scope must not be null"),
				 errhint("Fix the client: leave the scope out, or pass '' for the default scope.")));
	scope = PG_GETARG_TEXT_PP(arg);
	idem_key_check_length(scope, "scope");
	return scope;
}

void
idem_key_from_args(FunctionCallInfo fcinfo, int user_arg, int request_arg,
				   int scope_arg, IdemKey *key)
{
	key->user_id = id_from_arg(fcinfo, user_arg, "user_id");
	key->request_id = id_from_arg(fcinfo, request_arg, "request_id");
	key->scope = idem_scope_from_arg(fcinfo, scope_arg);
}

bytea *
idem_fingerprint_from_arg(FunctionCallInfo fcinfo, int arg)
{
	bytea	   *fingerprint;
	size_t		bytes;

	if (PG_ARGISNULL(arg))
		return NULL;
	fingerprint = PG_GETARG_BYTEA_PP(arg);
	bytes = VARSIZE_ANY_EXHDR(fingerprint);
	if (!idem_fingerprint_is_valid(fingerprint))
		ereport(ERROR,
				(errcode(ERRCODE_IDEM_INVALID),
				 errmsg("fingerprint must have 1 to %d bytes",
						IDEM_FINGERPRINT_BYTES_MAX),
				 errdetail("It has %zu bytes.", bytes),
				 errhint("Fix the client: send a hash of the parameters, idem_fingerprint(jsonb) makes one.")));
	return fingerprint;
}

char *
idem_key_to_string(const IdemKey *key)
{
	return psprintf("scope \"%s\", user \"%s\", request \"%s\"",
					text_to_cstring(key->scope),
					text_to_cstring(key->user_id),
					text_to_cstring(key->request_id));
}

int
idem_errdetail_key_and(const IdemKey *key, const char *sentence)
{
	char	   *names = idem_key_to_string(key);

	names[0] = 'S';
	return sentence == NULL ? errdetail("%s.", names) :
		errdetail("%s. %s", names, sentence);
}

static uint32
hash_text(const text *value)
{
	return hash_bytes((const unsigned char *) VARDATA_ANY(value),
					  VARSIZE_ANY_EXHDR(value));
}

uint32
idem_key_hash(const IdemKey *key)
{
	return hash_combine(hash_combine(hash_text(key->request_id),
									 hash_text(key->user_id)),
						hash_text(key->scope));
}

static int
hex_digit(char c)
{
	if (c >= '0' && c <= '9')
		return c - '0';
	if (c >= 'a' && c <= 'f')
		return c - 'a' + 10;
	return -1;
}

/*
 * RFC 9562, section 5.7: 48 bits of Unix time in milliseconds, version 7, variant 10.
 * Accepts only the canonical lower-case text: another spelling of the same uuid would be
 * another key.
 */
bool
idem_key_parse_time(const IdemKey *key, TimestampTz *key_time)
{
	static const char form[] = "xxxxxxxx-xxxx-7xxx-xxxx-xxxxxxxxxxxx";
	const char *id = VARDATA_ANY(key->request_id);
	int64		unix_ms = 0;

	if (VARSIZE_ANY_EXHDR(key->request_id) != strlen(form))
		return false;
	for (int i = 0; i < strlen(form); i++)
	{
		int			digit = hex_digit(id[i]);

		if (form[i] == 'x' ? digit < 0 : id[i] != form[i])
			return false;
		if (i < UUID_TIME_CHARS && digit >= 0)
			unix_ms = unix_ms * 16 + digit;
	}
	if ((hex_digit(id[19]) & 0xC) != 0x8)
		return false;

	*key_time = (TimestampTz) (unix_ms * 1000 -
							   (int64) (POSTGRES_EPOCH_JDATE - UNIX_EPOCH_JDATE) *
							   USECS_PER_DAY);
	return true;
}

/*
 * numeric_normalize() writes numbers out: the 8 bytes of 1e131071 become 131072.  The zero before
 * the point of 0.5 does not count.
 */
static void
append_number(StringInfo out, Numeric number)
{
	char	   *text = numeric_normalize(number);
	const char *digits = text + strspn(text, "-0");
	size_t		points = strchr(digits, '.') != NULL ? 1 : 0;

	if (strlen(digits) - points > NUMBER_DIGITS_MAX)
		ereport(ERROR,
				(errcode(ERRCODE_IDEM_INVALID),
				 errmsg("a number of the JSON document is too long"),
				 errdetail("Written out, it has more than %d digits.",
						   NUMBER_DIGITS_MAX),
				 errhint("Fix the client: send it as a string.")));
	appendStringInfoString(out, text);
	pfree(text);
}

/*
 * Appends a scalar as canonical JSON.  jsonb compares numbers by value, but prints them
 * with the scale of their input: drop trailing zeros.
 */
static void
append_scalar(StringInfo out, const JsonbValue *value)
{
	switch (value->type)
	{
		case jbvNull:
			appendStringInfoString(out, "null");
			break;
		case jbvBool:
			appendStringInfoString(out, value->val.boolean ? "true" : "false");
			break;
		case jbvNumeric:
			append_number(out, value->val.numeric);
			break;
		case jbvString:
			escape_json(out, pnstrdup(value->val.string.val,
									  value->val.string.len));
			break;
		default:
			elog(ERROR, "unexpected jsonb scalar type %d", (int) value->type);
	}
}

/*
 * The text whose hash is the fingerprint.  The order of an object's keys is that of jsonb,
 * which depends only on the keys.  So equal jsonb have equal text, and different jsonb have
 * different text.
 */
static void
append_canonical(StringInfo out, Jsonb *jb)
{
	JsonbIterator *it = JsonbIteratorInit(&jb->root);
	JsonbValue	value;
	JsonbIteratorToken token;

	while ((token = JsonbIteratorNext(&it, &value, false)) != WJB_DONE)
	{
		char		last = out->len > 0 ? out->data[out->len - 1] : '\0';

		CHECK_FOR_INTERRUPTS();
		if ((token == WJB_KEY || token == WJB_ELEM ||
			 token == WJB_BEGIN_ARRAY || token == WJB_BEGIN_OBJECT) &&
			out->len > 0 && last != '[' && last != '{' && last != ':')
			appendStringInfoChar(out, ',');

		switch (token)
		{
			case WJB_BEGIN_ARRAY:
				if (!JB_ROOT_IS_SCALAR(jb))
					appendStringInfoChar(out, '[');
				break;
			case WJB_END_ARRAY:
				if (!JB_ROOT_IS_SCALAR(jb))
					appendStringInfoChar(out, ']');
				break;
			case WJB_BEGIN_OBJECT:
				appendStringInfoChar(out, '{');
				break;
			case WJB_END_OBJECT:
				appendStringInfoChar(out, '}');
				break;
			case WJB_KEY:
			case WJB_VALUE:
			case WJB_ELEM:
				append_scalar(out, &value);
				if (token == WJB_KEY)
					appendStringInfoChar(out, ':');
				break;
			default:
				elog(ERROR, "unexpected jsonb token %d", (int) token);
		}
	}
}

static bytea *
hash_canonical(const StringInfoData *canonical)
{
	bytea	   *bytes = (bytea *) cstring_to_text_with_len(canonical->data,
														   canonical->len);

	return DatumGetByteaP(DirectFunctionCall1(sha256_bytea,
											  PointerGetDatum(bytes)));
}

bytea *
idem_fingerprint_of_array(StringInfo canonical, Jsonb *last)
{
	append_canonical(canonical, last);
	appendStringInfoChar(canonical, ']');
	return hash_canonical(canonical);
}

/* idem_fingerprint(jsonb) -> bytea: SHA-256 of the canonical text */
Datum
idem_fingerprint(PG_FUNCTION_ARGS)
{
	StringInfoData canonical;

	initStringInfo(&canonical);
	append_canonical(&canonical, PG_GETARG_JSONB_P(0));
	PG_RETURN_BYTEA_P(hash_canonical(&canonical));
}
