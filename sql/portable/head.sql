/*
 * idem, portable edition: the contract of the extension idem in SQL and PL/pgSQL, for servers on which no C can be
 * installed.  Needs PostgreSQL 15 or later and no superuser:
 *
 *		psql -v schema=idem -f sql/idem-portable.sql
 *
 * installs it into an existing schema (default: public), in one transaction.  Run again, the file of a later version
 * is the upgrade, and the same file does nothing.  The objects belong to the installer; if that is a superuser, and
 * the owner of the schema is not, to the owner of the schema.  The schema cannot be renamed afterwards.
 *
 * Limits; doc/portable.md has all of them.
 *
 * - It has no worker.  pg_cron, or a timer of a client, must clean up: CALL idem_cleanup_all().
 * - Each claim runs in a subtransaction.  More than 64 in one transaction slow down other sessions that read rows
 *	 younger than it; a batch counts as one for 500 new keys.
 * - A waiter for a lease polls, with pauses of up to 100 ms.  lock_timeout ends no wait of a call: idem.wait does.
 * - Claims are not counted: there is no idem_stat_claims.
 * - A change that moves guarded_since waits for every transaction that has called a function that claims.
 *	 REPEATABLE READ and SERIALIZABLE take the policy from their snapshot: let no such transaction run meanwhile.
 *
 * How to read it.  First come the checks and the upgrade.  Functions with two underscores are internal.  The protocol
 * is idem__claim_at_once(), the first look at a key, and idem__claim_key(), which goes on from there; idem__settle()
 * ends a key.  Everything else serves these.  A word between two @ stands for the schema.
 *
 * Security.
 *
 * - Callers need no right on the tables: the functions run as their owner (SECURITY DEFINER).  Nothing is granted to
 *	 PUBLIC, nor to the grantees of default privileges.
 * - No name is looked up where others can put an object.  Public functions and triggers have the search_path
 *	 pg_catalog, pg_temp, and qualify every name of ours.  Internal functions run under the search_path of their
 *	 caller, and can be executed by the owner only, but for those that idem_grant() names and that have their own
 *	 search_path.  idem_cleanup_all() and idem_erase(), which commit, and idem_call(),
 *	 which runs its function under its caller's search_path, qualify every name.
 * - The installation, or an upgrade, is refused if a role can create objects in the schema, or owns functions,
 *	 operators or types in it, unless that role is a superuser or the owner-to-be.
 * - A function that a role gets into the schema later is never called, even if it has the name of one of ours: each
 *	 call in this file passes all arguments, in exactly the declared types, and PostgreSQL then prefers ours.  An
 *	 untyped NULL, an int4 for an int8, or a default left out would let another one match better, and run as our
 *	 owner.  (One more argument with a default makes our call ambiguous: such a role can make claims fail.)
 * - No string contains a backslash, except those that begin with E: a session keeps a function as it first parsed
 *	 it, maybe with standard_conforming_strings = off.
 * - The owner of the schema and the owner of the database can drop idem.
 * - A trigger on one of our tables runs as our owner, and GRANT ALL ON ALL TABLES gives the right to create one.
 *	 Grant by idem_grant() instead.
 * - The owner of idem can replace its functions.  A superuser who does not trust that role must call none of them,
 *	 and must not write its tables.  With the rights of their caller run idem_call(), idem_grant(), idem_revoke(),
 *	 idem_cleanup_all(), idem_erase(), the triggers idem__scopes_guard() and idem__replace_settings(), and the
 *	 functions for ids of other types, which only call the others.
 * - Who may call what: idem_grant(), and what follows it, near the end.
 */
