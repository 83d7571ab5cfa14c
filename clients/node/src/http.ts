// Idempotency-Key for HTTP, after draft-ietf-httpapi-idempotency-key-header-07.

import { AsyncLocalStorage } from 'node:async_hooks';
import { createHash } from 'node:crypto';
import { STATUS_CODES, validateHeaderName, validateHeaderValue } from 'node:http';
import { CommitUnknown, IdemError, Invalid, Refused } from './errors';
import { RawJson, only, spent, type Idem, type Request as OnceRequest } from './idem';
import { toJson } from './json';

/** A request, whatever the framework. */
export interface HttpRequest {
	method: string;
	/** With the query. */
	path: string;
	/** Names in lower case. */
	headers: Record<string, string>;
	/** The bytes of the body; of one that the framework has parsed, its JSON. */
	bytes: Buffer;
	/** The JSON of the body; undefined if it is none. */
	json: any;
	/** The framework's own: the Request, Hono's context, or the request of Express or Fastify. */
	native: any;
}
/** A response, before it is sent. */
export interface Reply {
	status: number;
	headers: [string, string][];
	body: Buffer;
}
/** `wait`: 0 answers another execution by 409 at once, more by 503 in the end. */
export interface HttpOptions extends Pick<OnceRequest, 'wait' | 'attempts' | 'isolation'> {
	/** Who chooses the keys: the authenticated user. Never empty. */
	user: (request: HttpRequest) => string | number | bigint | Promise<string | number | bigint>;
	/** Default ''. */
	scope?: string | ((request: HttpRequest) => string);
	/** The key; default: the header Idempotency-Key, quoted or bare. Undefined: missing. */
	key?: (request: HttpRequest) => string | undefined;
	/** False: a request without a key runs without protection, in a transaction all the same. Default true: it is answered 400. */
	required?: boolean;
	/** Whether a reply ends the request: it is stored, and what the handler wrote is committed, with a 402 too. Otherwise
	 * all is rolled back, and the client may retry. Default: below 500, but not 409, 425 and 429. */
	final?: (status: number) => boolean;
	/** What the key stands for; default: method, path and body. Null: nothing is compared. */
	fingerprint?: (request: HttpRequest) => unknown;
	/** More headers to store and replay. Never Set-Cookie nor hop-by-hop. */
	headers?: string[];
	/** What is stored instead of the reply, such as its encryption; any JSON. */
	encode?: (stored: unknown) => unknown;
	decode?: (stored: any) => unknown;
	/** Largest body that is read here, in bytes; default 10 MB. Larger: 413. */
	limit?: number;
}
/** Serves Express and node:http `(req, res, next?)` (without `next` an error is printed, and answered 500), Fastify `(request, reply)`, Hono `(c)` and Fetch `(request)`. */
export interface HttpHandler {
	(request: Request): Promise<Response>;
	(context: { req: { raw: Request } }): Promise<Response>;
	(request: any, reply: any, next?: (error?: any) => void): Promise<any>;
}
function checkStatus(status: any): void {
	if (Number.isInteger(status) && status >= 200 && status <= 599) return;
	throw new TypeError(`reply(status, body): the status is ${typeof status === 'object' ? 'missing' : String(status)}: it is to be an integer from 200 to 599`);
}
/** A reply of a handler: a text or bytes as they are, or a value as JSON. */
export function reply(status: number, body?: unknown, headers: Record<string, string | string[]> = {}): Reply {
	checkStatus(status);
	const list: [string, string][] = [];
	for (const [name, value] of Object.entries(headers)) for (const one of [value].flat()) list.push([name.toLowerCase(), String(one)]);
	const [bytes, type]: [Buffer, string] = body === undefined ? [Buffer.alloc(0), '']
		: typeof body === 'string' ? [Buffer.from(body), 'text/plain; charset=utf-8']
		: body instanceof Uint8Array ? [Buffer.from(body), 'application/octet-stream']
		: [Buffer.from(toJson(body, (message) => new TypeError(`reply(status, body): ${message}`), true)), 'application/json'];
	if (type && !list.some(([name]) => name === 'content-type')) list.push(['content-type', type]);
	return { status, headers: list, body: bytes };
}
const allowed = ['content-type', 'content-language', 'content-encoding', 'content-disposition', 'cache-control', 'vary', 'location', 'etag', 'last-modified', 'link'];
const never = ['set-cookie', 'connection', 'keep-alive', 'proxy-authenticate', 'proxy-authorization', 'te', 'trailer', 'transfer-encoding', 'upgrade',
	'content-length', 'date'];

function problem(status: number, type: string, detail: string, retryAfter: number | null = null, title = STATUS_CODES[status]): Reply {
	return reply(status, { type: `urn:idem:${type}`, title, status, detail }, {
		'content-type': 'application/problem+json', ...(retryAfter !== null && { 'retry-after': String(retryAfter) }),
	});
}
// The handler had committed itself, or the answer is erased.
const lost = 'This request was executed, but its answer was not stored';
const problems: Record<string, [string, string]> = {
	in_progress: ['in-progress', 'The request with this Idempotency-Key is being executed: send it again later.'],
	timed_out: ['timed-out', 'The request with this Idempotency-Key is still being executed: send it again later.'],
	mismatch: ['key-reused', 'This Idempotency-Key was used with another request: another request needs another key.'],
	stale: ['stale', 'This Idempotency-Key is too old: find out whether the request was executed before you use a new key.'],
	unknown: ['unknown', 'Nobody knows whether the request was executed: ask the operator.'],
	failed: ['failed', 'The request with this Idempotency-Key has failed for good: use a new key.'],
};
// Rolls back, and is no error.
class NotFinal extends Error { constructor(readonly reply: Reply) { super(`a reply of ${reply.status} is not final`); } }
function answerTo(error: unknown): Reply {
	if (error instanceof NotFinal) return error.reply;
	if (error instanceof Invalid && /^(request[_ ])?id /.test(error.message)) return problem(400, 'key-invalid', error.message);
	const known = error instanceof IdemError ? problems[error.outcome] : undefined;
	if (known) return problem((error as IdemError).status, ...known, (error as IdemError).retryAfter);
	if (error instanceof CommitUnknown || (error instanceof Error && spent.has(error))) return problem(503, 'unavailable', 'Try again, with the same Idempotency-Key.', 1);
	throw error;
}
// Undefined: there is none. Null: malformed. A string of RFC 8941, or bare.
function headerKey(request: HttpRequest): string | undefined | null {
	const header = request.headers['idempotency-key'];
	if (header === undefined) return undefined;
	const quoted = /^[ \t]*"((?:[ !#-[\]-~]|\\["\\])*)"[ \t]*$/.exec(header);
	const key = quoted ? quoted[1]!.replace(/\\(.)/g, '$1') : /^[ \t]*([!#-[\]-~]+)[ \t]*$/.exec(header)?.[1] ?? '';
	return key.length >= 1 && key.length <= 255 ? key : null;
}
const isJson = (request: Pick<HttpRequest, 'headers'>) => /^application\/([^\s;]+\+)?json\s*(;|$)/i.test(request.headers['content-type'] ?? '');
// Each pattern is linear: who sends 10 MB would stop the process otherwise. A number that is longer than a thousand digits when it is
// written out is refused by idem_fingerprint; NUL and half of a surrogate pair by jsonb, also where the key is given twice.
const longNumber = /(?<![\w.+"-])-?(?:[\d.]{500}|\d[\d.]*[eE][+-]?0*[1-9]\d{2})/;
const goodEscape = /\\(?:u[dD][89abAB]..\\u[dD][c-fC-F]..|u(?!0000|[dD][89a-fA-F])|[^u])/g;
// At most 64 kB and 64 levels: the portable edition takes time and memory for each level of each byte.
function isSmall(text: string): boolean {
	let depth = 0;
	return Buffer.byteLength(text) <= 65536 && (text.replace(/"(?:[^"\\]|\\.)*"/g, '').match(/[[\]{}]/g) ?? []).every((c) => (depth += '[{'.includes(c) ? 1 : -1) <= 64);
}
// The same text as the other clients of idem make. The JSON as it came, since JSON.parse rounds large numbers.
function fingerprint(request: HttpRequest): unknown {
	const text = request.json === undefined ? '' : request.bytes.toString();
	const byValue = text && isSmall(text) && !longNumber.test(text) && !text.replace(goodEscape, '').includes('\\') && Buffer.from(text).equals(request.bytes);
	const body = byValue ? `"body": ${text}` : `"sha256": "${createHash('sha256').update(request.bytes).digest('hex')}"`;
	return new RawJson(`{"method": ${JSON.stringify(request.method)}, "path": ${JSON.stringify(request.path)}, ${body}}`);
}
function pack(answer: Reply, names: Set<string>): unknown {
	const text = answer.body.toString();
	const asText = !text.includes('\0') && Buffer.from(text).equals(answer.body);
	return {
		status: answer.status,
		headers: answer.headers.filter(([name]) => names.has(name)),
		...(asText ? { body: text } : { body64: answer.body.toString('base64') }),
	};
}
function unpack(stored: any): Reply {
	if (typeof stored?.status !== 'number') return reply(200, stored);		// claimed by others
	return { status: stored.status, headers: stored.headers, body: Buffer.from(stored.body64 ?? stored.body, stored.body64 === undefined ? 'utf8' : 'base64') };
}
async function fromResponse(answer: Reply | Response): Promise<Reply> {
	if (typeof answer?.status !== 'number' || !(answer instanceof Response || Array.isArray(answer.headers))) throw new TypeError('the handler is to return reply(...) or a Response');
	checkStatus(answer.status);
	// Those of the connection are the server's to make: a wrong Content-Length would end the answer in the middle. fetch() has decoded its body.
	const ours = [...answer.headers].filter(([name]) => name === 'set-cookie' || !(never.includes(name.toLowerCase()) || ('url' in answer && answer.url && name === 'content-encoding')));
	return { status: answer.status, headers: ours, body: answer instanceof Response ? Buffer.from(await answer.arrayBuffer()) : answer.body };
}
// A handler that answers by itself would do so before COMMIT. Others may answer meanwhile, as at a timeout.
const handling = new AsyncLocalStorage<object>();
function guard(response: any): object {
	const token = {};
	for (const name of ['send', 'writeHead', 'write', 'end'].filter((name) => name in response)) {
		const original = response[name];
		response[name] = (...args: any[]) => {
			if (handling.getStore() === token) throw new TypeError(`${name}() of the response would answer before COMMIT: return reply(...)`);
			return original.apply(response, args);
		};
	}
	return token;
}
/** @internal */ export function httpHandler(idem: Idem<any>, options: HttpOptions, handler: (tx: any, request: HttpRequest) => Reply | Response | Promise<Reply | Response>): HttpHandler {
	const { final = (status) => status < 500 && ![409, 425, 429].includes(status), encode = (value) => value, decode = (value) => value, limit = 10 * 1024 * 1024 } = options;
	const names = new Set([...allowed, ...(options.headers ?? []).map((name) => name.toLowerCase())].filter((name) => !never.includes(name)));
	only('http', options);
	const tooLarge = problem(413, 'too-large', 'The body is too large.');

	async function answer(request: HttpRequest, token = {}): Promise<Reply> {
		const user = await options.user(request);
		if (user === undefined || user === null || String(user) === '') throw new Invalid('the option "user" of idem.http returned nobody');
		const key = options.key ? options.key(request) : headerKey(request);
		if (key === null) return problem(400, 'key-invalid', 'The header Idempotency-Key is malformed: send "KEY", 1 to 255 printable ASCII characters.');
		if (key === undefined && options.required !== false) return problem(400, 'key-missing', 'This request needs the header Idempotency-Key.');
		let own: unknown;		// the handler's error, which tells nothing of this key
		const run = async (tx: any) => {
			const made = await handling.run(token, async () => fromResponse(await handler(tx, request))).catch((error) => { throw own = error; });
			// What cannot be sent is not to be committed
			for (const [name, value] of made.headers) validateHeaderName(name), validateHeaderValue(name, value);
			if (!final(made.status)) throw new NotFinal(made);
			return made;
		};
		try {
			if (key === undefined) return await idem.unprotected(options, run);
			let made: Reply | undefined;
			const params = options.fingerprint ? options.fingerprint(request) : fingerprint(request);
			const result = await idem.once({
				user, id: key, scope: typeof options.scope === 'function' ? options.scope(request) : options.scope ?? '',
				...(params !== null && { params }), wait: options.wait ?? 0, attempts: options.attempts ?? 5,
				...(options.isolation && { isolation: options.isolation }),
			}, async (tx) => {
				made = await run(tx).catch((error) => { throw error instanceof Refused ? new Refused(encode(error.value)) : error; });
				return encode(pack(made, names));
			});
			const sent = !result.replayed ? made! : result.value === null ? problem(500, 'answer-lost', lost, null, lost) : unpack(decode(result.value));
			const more: [string, string][] = [['idempotency-expires', result.expiresAt.toUTCString()]];
			if (result.replayed) more.push(['idempotent-replayed', 'true']);
			return { ...sent, headers: [...sent.headers, ...more] };
		} catch (error) {
			if (error === own && !spent.has(error as object)) throw error;
			return answerTo(error);
		}
	}

	return (async (first: any, second?: any, next?: any) => {
		if (first instanceof Request || first?.req?.raw instanceof Request) {
			const raw: Request = first instanceof Request ? first : first.req.raw;
			const { pathname, search } = new URL(raw.url);
			const bytes = raw.bodyUsed && raw !== first ? Buffer.from(await first.req.arrayBuffer()) : await read(raw.body ?? [], limit);
			if (bytes && raw.body && raw !== first) first.req.raw = new Request(raw, { body: new Uint8Array(bytes) });
			const made = bytes === null ? tooLarge
				: await answer(complete({ method: raw.method, path: pathname + search, headers: Object.fromEntries(raw.headers), bytes, native: first }));
			return new Response([101, 204, 205, 304].includes(made.status) ? null : new Uint8Array(made.body), { status: made.status, headers: made.headers });
		}
		const fastify = typeof second?.hijack === 'function';
		const node = fastify ? first.raw : first;
		const send = (made: Reply) => {
			// Set-Cookie, and what else is given twice
			for (const name of new Set(made.headers.map(([name]) => name))) {
				const values = made.headers.filter(([other]) => other === name).map(([, value]) => value);
				second[fastify ? 'header' : 'setHeader'](name, values.length > 1 ? values : values[0]);
			}
			if (fastify) return second.code(made.status).send(made.body.length || made.headers.some(([name]) => name === 'content-type') ? made.body : undefined);
			second.statusCode = made.status;
			second.end(made.body);
		};
		try {
			const bytes = node.readableDidRead ? parsedBody(first, node, options) : await read(node, limit);
			if (bytes === null) return send(tooLarge);
			const headers = Object.fromEntries(Object.entries(node.headers).map(([name, value]) => [name, String(value)]));
			return send(await answer(complete({ method: node.method, path: first.originalUrl ?? node.url, headers, bytes, native: first }), guard(second)));
		} catch (error) {
			if (typeof next === 'function') return next(error);
			if (fastify) throw error;
			// node:http: a rejection would end the process, and who sends half of a body could cause it
			if (node.destroyed && !node.complete) return;
			console.error(error);
			if (!second.headersSent) send(reply(500));
		}
	}) as HttpHandler;
}
function complete(request: Omit<HttpRequest, 'json'>): HttpRequest {
	let json: any;
	if (isJson(request)) try { json = JSON.parse(request.bytes.toString()); } catch { /* undefined */ }
	return { ...request, json };
}
// Null: too large.
async function read(stream: any, limit: number): Promise<Buffer | null> {
	const chunks: Uint8Array[] = [];
	let size = 0;
	for await (const chunk of stream) if ((size += chunk.length) <= limit) chunks.push(chunk);
	return size > limit ? null : Buffer.concat(chunks);
}
// The bytes, where the framework has kept them; else what it has parsed.
function parsedBody(request: any, stream: any, options: HttpOptions): Buffer {
	const kept = request.rawBody ?? request.body;
	if (Buffer.isBuffer(kept)) return kept;
	if (typeof kept === 'string' && (request.rawBody || !isJson({ headers: stream.headers }))) return Buffer.from(kept);
	// Files of a form, say, are not in what was parsed: two forms would count as one.
	if (options.fingerprint === undefined && (kept === undefined || /^multipart\//i.test(stream.headers['content-type'] ?? '')))
		throw new TypeError('the body was read before idem.http: register it earlier, keep req.rawBody, or pass the option "fingerprint"');
	return Buffer.from(kept === undefined || kept === null ? '' : JSON.stringify(kept));
}
