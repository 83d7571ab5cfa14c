/*
 * idem.c
 *	  Entry of the library: settings, callbacks and shared memory; where it is preloaded,
 *	  also the launcher of the cleanup workers.
 *
 * Without preload no launcher starts by itself; and before PostgreSQL 17, there is no shared
 * memory (shared/memory.c).
 */
#include "postgres.h"

#include "fmgr.h"
#include "miscadmin.h"

#include "compat.h"
#include "guc.h"
#include "clean/launcher.h"
#include "session/own_claims.h"
#include "session/wait.h"
#include "session/waiting_processes.h"
#include "shared/memory.h"
#include "shared/stats.h"
#include "store/policy.h"
#include "store/store.h"

PG_MODULE_MAGIC_EXT(.name = "idem", .version = "1.0.0");

void		_PG_init(void);

void
_PG_init(void)
{
	idem_define_settings();
	idem_store_init();
	idem_policy_init();
	idem_own_claims_init();
	idem_wait_init();
	idem_waiting_init();
	idem_stats_init();
	idem_shared_init(process_shared_preload_libraries_in_progress);

	if (!process_shared_preload_libraries_in_progress)
		return;
	/* No process of ours may work in the new cluster while pg_upgrade fills it. */
	if (!IsBinaryUpgrade)
		(void) idem_launcher_start(NULL);
}
