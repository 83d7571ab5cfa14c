/*
 * guc.c
 *	  The settings.
 *
 * The operator sets what a claim promises: how long it is remembered, how much it stores, how
 * long a lease may block others, which scopes there are.  These settings are PGC_SUSET: an application cannot change
 * them, and an operator can set them for a role or a database.  The caller sets how long it
 * wants to wait.
 */
#include "postgres.h"

#include <limits.h>

#include "utils/guc.h"
#include "utils/varlena.h"

#include "guc.h"

int			idem_ttl = 86400;
int			idem_lease_ms = 30000;
int			idem_lease_max = 86400;
int			idem_wait = 5000;
int			idem_result_max_bytes = 1024 * 1024;
int			idem_cleanup_interval = 5000;
int			idem_cleanup_batch_size = 50000;
int			idem_claimable_scopes = IDEM_SCOPES_ANY;
char	   *idem_cleanup_databases = NULL;

static const struct config_enum_entry claimable_scopes[] = {
	{"any", IDEM_SCOPES_ANY, false},
	{"declared", IDEM_SCOPES_DECLARED, false},
	{NULL, 0, false}
};

/* Where the library is not preloaded, the setting can have got any text before.  The server
 * would warn, and take the default, which allows more than the operator meant. */
static void
require_valid_scopes(void)
{
	const char *value = GetConfigOption("idem.scopes", true, false);

	if (value != NULL && pg_strcasecmp(value, "any") != 0 &&
		pg_strcasecmp(value, "declared") != 0)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("invalid value for parameter \"%s\": \"%s\"",
						"idem.scopes", value),
				 errhint("Available values: any, declared. Correct it where it was set: for the database or the role, or in postgresql.conf.")));
}

static bool
check_databases(char **newval, void **extra, GucSource source)
{
	List	   *names;

	/* SplitIdentifierString() changes its argument. */
	if (SplitIdentifierString(pstrdup(*newval), ',', &names))
		return true;
	GUC_check_errdetail("List syntax is invalid.");
	return false;
}

void
idem_define_settings(void)
{
	/* Before all others: a setting cannot be defined again by the next attempt to load. */
	require_valid_scopes();

	DefineCustomIntVariable("idem.ttl",
							"Retention: how long a claim is remembered at least.",
							"For scopes without a ttl of their own in idem_scopes.",
							&idem_ttl, 86400, 1, INT_MAX,
							PGC_SUSET, GUC_UNIT_S, NULL, NULL, NULL);

	DefineCustomIntVariable("idem.lease",
							"Length of a lease.",
							"For scopes without a lease of their own in idem_scopes.",
							&idem_lease_ms, 30000, 1, INT_MAX,
							PGC_SUSET, GUC_UNIT_MS, NULL, NULL, NULL);

	DefineCustomIntVariable("idem.lease_max",
							"Longest lease that a caller may ask for.",
							"For scopes without a lease_max of their own in idem_scopes.",
							&idem_lease_max, 86400, 1, INT_MAX,
							PGC_SUSET, GUC_UNIT_S, NULL, NULL, NULL);

	DefineCustomIntVariable("idem.wait",
							"How long a claim waits for another holder of its key.",
							"-1 waits until cancelled, 0 does not wait. Without a unit: milliseconds; in the argument wait: seconds.",
							&idem_wait, 5000, -1, INT_MAX,
							PGC_USERSET, GUC_UNIT_MS, NULL, NULL, NULL);

	DefineCustomIntVariable("idem.result_max_bytes",
							"Largest result that is stored.",
							"For scopes without a result_max_bytes of their own in idem_scopes.",
							&idem_result_max_bytes, 1024 * 1024, 1,
							IDEM_RESULT_BYTES_LIMIT,
							PGC_SUSET, GUC_UNIT_BYTE, NULL, NULL, NULL);

	DefineCustomEnumVariable("idem.scopes",
							 "Scopes in which requests can be claimed.",
							 "any, or only declared ones: those with a row in idem_scopes.",
							 &idem_claimable_scopes, IDEM_SCOPES_ANY,
							 claimable_scopes, PGC_SUSET, 0, NULL, NULL, NULL);

	DefineCustomIntVariable("idem.cleanup_interval",
							"Time between two runs of the cleanup worker.",
							"The worker does not pause while there is backlog.",
							&idem_cleanup_interval, 5000, 10, INT_MAX,
							PGC_SIGHUP, GUC_UNIT_MS, NULL, NULL, NULL);

	DefineCustomIntVariable("idem.cleanup_batch_size",
							"Largest number of expired claims that one batch removes.",
							NULL,
							&idem_cleanup_batch_size, 50000, 1,
							IDEM_CLEANUP_BATCH_ROWS_LIMIT,
							PGC_SIGHUP, 0, NULL, NULL, NULL);

	DefineCustomStringVariable("idem.cleanup_databases",
							   "Databases that the worker cleans, separated by commas.",
							   "Empty: every database that has the extension.",
							   &idem_cleanup_databases, "",
							   PGC_SIGHUP, GUC_LIST_INPUT,
							   check_databases, NULL, NULL);

	MarkGUCPrefixReserved("idem");
}
