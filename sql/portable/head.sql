/*
 * idem, portable edition: the contract of the extension idem in SQL and PL/pgSQL.
 *
 * For servers on which no C can be installed.  Needs PostgreSQL 15 or later and no
 * superuser:
 *
 *		psql -v schema=idem -f sql/idem-portable.sql
 *
 * installs it into an existing schema (default: public), in one transaction.  Run again, the file
 * of a later version is the upgrade, and the same file does nothing.  The objects
 * belong to the installer.  If the installer is a superuser and the owner of the schema is
 * not, they belong to the owner of the schema.  The schema cannot be renamed afterwards.
 * Functions, outcomes, SQLSTATEs and tables are those of the C edition: callers do not change
 * when they move to it.
 *
 * The Makefile makes of sql/portable this file, for psql; the extension idem_portable, which
 * packages can install under another name; and sql/idem-portable-plain.sql, one statement for
 * other clients.  sql/idem-citus.sql, loaded after this file, distributes the claims over a
 * Citus cluster.
 *
 * Limits of this edition:
 *
 * - It has no worker.  pg_cron, or a timer of a client, must clean up:
 *		SELECT cron.schedule('idem', '10 seconds', 'CALL idem.idem_cleanup_all()');
 * - A waiter for a lease polls, with pauses of up to 100 ms.
 * - lock_timeout bounds a wait for a transaction, and ends it with an error.  So each claim
 *	 runs in a subtransaction.  Waiters notice a ROLLBACK TO of the holder up to
 *	 deadlock_timeout plus a second late.  More than 64 claims in one transaction slow down
 *	 other sessions that read rows younger than it; a batch of new keys counts as a few claims.
 * - A claim with wait => '0' waits for a moment for a transaction that holds the request.  If that
 *	 transaction itself waits for the one of the claim, and checks for a deadlock at that moment, it
 *	 gets 40P01.
 * - A change that moves guarded_since (uuidv7 is switched on, or a ttl grows under it) waits
 *	 for every transaction that has called a function that claims.  Changes of policy wait for each
 *	 other.
 * - REPEATABLE READ and SERIALIZABLE take the policy from their snapshot.  Let no such
 *	 transaction run while uuidv7 is switched on, or a ttl grows under it.
 * - In these levels idem_cleanup() removes what the snapshot sees as expired, or raises
 *	 40001.
 * - A claim does not wait longer than its wait for a transaction that removes the request.
 * - In SERIALIZABLE, reading claims counts among the read/write dependencies.
 * - The caller's own lock_timeout ends no wait of a call: wait, or idem.wait, does.
 * - Claims are not counted: idem_stat_claims and idem_stat_reset() do not exist, and
 *	 idem_metrics has no sample of them.  The settings idem.ttl, idem.lease, idem.lease_max, idem.result_max_bytes,
 *	 idem.scopes and idem.cleanup_batch_size are columns of the table idem_settings.
 * - It is slower than the hand-written statement, by a factor of three to six.  Leases, and claims
 *	 of scopes with key_time = uuidv7, are slower by an order of magnitude.
 *
 * How to read it.  Functions with two underscores are internal.  The protocol is
 * idem__claim_at_once(), the first look at a key, and idem__claim_key(), which goes on from there.
 * idem__settle() ends a key.  Everything else serves these.
 *
 * How it is written.
 *
 * - A word between two @ stands for the schema of the installation.  psql replaces it below;
 *	 CREATE EXTENSION does so by itself, also in a comment, which the name could end: so no
 *	 comment has it.
 * - No string contains a backslash, except those that begin with E.  A session keeps a
 *	 function as it first parsed it, and it may have done so with standard_conforming_strings
 *	 = off.
 * - sql/idem-citus.sql replaces the functions that say so.  Citus can plan the others
 *	 because each query of idem_claims names the user, and no update of idem_claims calls a
 *	 volatile function.
 *
 * Security.
 *
 * - Callers need no right on the tables: the functions run as their owner (SECURITY
 *	 DEFINER).  Nothing is granted to PUBLIC, nor to the grantees of default privileges.
 * - No name is looked up where others can put an object.  Public functions and triggers have
 *	 the search_path pg_catalog, pg_temp, and qualify every name of ours.  Internal functions
 *	 can be executed by the owner only, and run under the search_path of the function that
 *	 calls them.  One of their own would cost a microsecond or two, and would keep SQL
 *	 functions from being inlined.  idem_cleanup_all() and idem_erase() commit, so they cannot
 *	 have a search_path, and idem_call() leaves its caller's to the function that it runs: they
 *	 qualify every name.
 * - The installation, or an upgrade, is refused if a role can create objects in the schema, or owns
 *	 functions, operators or types in it, unless that role is a superuser or the owner-to-be.
 * - A role can still get an object into the schema later: somebody grants it CREATE, or a
 *	 transaction commits that was open during the installation.  We never call such a
 *	 function, even if it has the name of one of ours: each call in this file passes all
 *	 arguments, in exactly the declared types, and PostgreSQL then prefers our function.  (A
 *	 string literal has no type where we declare text, which literals prefer.)  An untyped
 *	 NULL, an int4 for an int8, or a default left out would let another function match
 *	 better, and run as our owner.  (A function that has one more argument, with a default, makes
 *	 our call ambiguous: such a role can make claims fail.)
 * - The owner of the schema and the owner of the database can drop idem.
 * - A trigger on one of our tables runs as our owner.  GRANT ALL ON ALL TABLES gives the
 *	 right to create one (TRIGGER).  Grant by idem_grant() instead.
 * - idem_call(), idem_grant(), idem_revoke(), idem_cleanup_all(), idem_erase() and the triggers
 *	 idem__scopes_guard() and idem__replace_settings() run with the rights of their caller.  A superuser who does not trust the owner of idem must not
 *	 call them, and must not write its tables.
 */
