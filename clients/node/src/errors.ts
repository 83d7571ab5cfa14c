// What a call of idem can end in, one class for each outcome.

type More = { cause?: unknown };

/**
 * Base of all errors of this package: its `outcome`; the HTTP `status` that fits; whether the same request, with the same id, may
 * be sent again (`retryable`), and after how many seconds; `sqlstate` of the server's error.
 */
export class IdemError extends Error {
	readonly retryAfter: number | null;
	readonly sqlstate: string | null;
	constructor(message: string, readonly outcome: string, readonly status: number, readonly retryable: boolean, sqlstate: string | null, more: More = {}) {
		super(message, more);
		this.name = new.target.name;
		this.retryAfter = retryable ? 1 : null;
		this.sqlstate = codeOf(more.cause) ?? sqlstate;
	}
}

type ErrorClass = new (message: string, more?: More) => IdemError;
const define = (outcome: string, status: number, retryable = false, sqlstate: string | null = null): ErrorClass => class extends IdemError {
	constructor(message: string, more?: More) { super(message, outcome, status, retryable, sqlstate, more); }
};

/** Another execution of this request is at work. Send it again later. */
export class InProgress extends define('in_progress', 409, true, 'ID409') {}
/** The same, after waiting. */
export class TimedOut extends define('timed_out', 503, true, 'ID503') {}
/** The id was used with other params. */
export class Mismatch extends define('mismatch', 422, false, 'ID422') {}
/** The time in the id is too old to tell whether the request was executed. */
export class Stale extends define('stale', 412, false, 'ID412') {}
/** A lease lapsed, and nobody knows whether the work was done. An operator has to find out. */
export class Unknown extends define('unknown', 409, false, 'ID424') {}
/** Bad arguments: an empty id, params that JSON cannot hold. */
export class Invalid extends define('invalid', 400, false, 'ID400') {}
/** The lease has another holder, or has ended. Stop, and write nothing. */
export class LeaseLost extends define('lease_lost', 409, false, 'ID410') {}
/** The value is larger than the scope's result_max_bytes. Store a reference to it. */
export class TooLarge extends define('too_large', 500, false, 'ID413') {}
/** The connection was lost at COMMIT, again and again. Send the same id again: the claim tells whether it was executed. */
export class CommitUnknown extends define('commit_unknown', 503, true) {}
/** idem is not in this database, or not in this schema. */
export class NotInstalled extends define('not_installed', 500) {}
/** The role may not call idem. */
export class NoRights extends define('no_rights', 500) {}
/** The handler ended the transaction itself. What it committed stays, and the claim with it, without a value. */
export class HandlerEndedTransaction extends define('handler_ended_transaction', 500) {}
/** The handler caught the error of a statement and went on: nothing of it can be committed. */
export class HandlerSwallowedError extends define('handler_swallowed_error', 500) {}

/** The request ended for good: `stored` is the value that was given to `Refused`. Use a new id. */
export class Failed extends define('failed', 409, false, 'ID417') {
	/** `replayed`: an earlier execution has failed, and not this one. */
	constructor(message: string, readonly stored: unknown, readonly replayed: boolean, more?: More) { super(message, more); }
}

/** Throw it in a handler to end the request for good: every retry gets `Failed` with this value. */
export class Refused extends Error {
	constructor(readonly value: unknown) {
		super('the request is refused');
		this.name = 'Refused';
	}
}
const byCode: Record<string, ErrorClass> = {
	ID400: Invalid, ID409: InProgress, ID410: LeaseLost, ID412: Stale, ID413: TooLarge, ID422: Mismatch, ID424: Unknown, ID503: TimedOut,
};
const byOutcome: Record<string, [ErrorClass, string]> = {
	in_progress: [InProgress, 'this request is being executed: send it again later'],
	timed_out: [TimedOut, 'this request is still being executed: send it again later'],
	mismatch: [Mismatch, 'this id was used with other params'],
	stale: [Stale, 'this id is too old to tell whether the request was executed'],
};
export function outcomeError(outcome: string): IdemError {
	const [error, words] = byOutcome[outcome] ?? [Unknown, 'nobody knows whether this request was executed: an operator has to find out'];
	return new error(words);
}

/** The server's error of one of idem's own statements, as an error of this package where it is one. */
export function translate(error: unknown, schema: string, rights = 'app'): unknown {
	const code = codeOf(error);
	const message = error instanceof Error ? error.message : String(error);
	if (code === null) return error;
	const known = byCode[code];
	if (known) return new known(known !== TooLarge ? message
		: `${message}: store a reference to it, or have the operator raise result_max_bytes of the scope in "${schema}".idem_scopes`, { cause: error });
	if (code === '3F000' || (code === '42883' && message.includes('idem_'))) {
		return new NotInstalled(`idem is not installed in the schema "${schema}" of this database: pass the schema that has it,`
			+ ` or run "npx idem-pg install --schema ${schema}" (${message})`, { cause: error });
	}
	if (code === '42501' && (message.includes('idem_') || message.includes(schema))) {
		return new NoRights(`this role may not call idem: as the owner of idem run SELECT "${schema}".idem_grant('ROLE', '${rights}')`
			+ `${rights === 'app' ? `, or "npx idem-pg install --schema ${schema} --grant ROLE"` : ''} (${message})`, { cause: error });
	}
	return error;
}

/** SQLSTATE, or the code of a socket's error. */
export function codeOf(error: unknown): string | null {
	const code = (error as { code?: unknown } | null | undefined)?.code;
	return typeof code === 'string' ? code : null;
}

// The error, and what it wraps: a handler or an ORM may have wrapped the driver's error.
function any(error: unknown, test: (error: unknown) => boolean, depth = 0): boolean {
	return error != null && depth < 10 && (test(error) || any((error as { cause?: unknown }).cause, test, depth + 1));
}

/** 40001 and 40P01: the whole transaction is to be repeated. */
export function isConflict(error: unknown): boolean {
	return any(error, (e) => ['40001', '40P01'].includes(codeOf(e) ?? ''));
}
const lostCode = /^(57P0[123]|08...|E(CONNRESET|CONNREFUSED|CONNABORTED|PIPE|TIMEDOUT|HOSTUNREACH|NETUNREACH|NETDOWN|NOTFOUND|AI_AGAIN)|ENOENT|ERR_STREAM_.*|CONNECTION_(CLOSED|DESTROYED)|CONNECT_TIMEOUT)$/;
const lostMessage = /^(Connection terminated|Client has encountered a connection error|Client was closed|timeout (exceeded|expired)|Query read timeout|The server has closed|idem: connection lost)/;
/** Whether the error can come from a lost connection. A handler's own sockets raise the same codes: look at the connection too. */
export function looksLost(error: unknown): boolean {
	return any(error, (e) => lostCode.test(codeOf(e) ?? '') || (e instanceof Error && lostMessage.test(e.message)));
}
