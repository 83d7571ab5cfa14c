// Values that a jsonb holds, and that come back as they were.

type Fail = (message: string) => Error;

/**
 * The text of a value; fails, with the path of the value, at what JSON or jsonb cannot hold. lax: for a client, so a Date or
 * another object may become what JSON makes of it, unless that is nothing.
 */
export function toJson(value: unknown, fail: Fail = (message) => new TypeError(message), lax = false): string {
	if (value === undefined) return 'null';
	const paths = new Map<unknown, string>();
	const bad = (path: string, what: string) => fail(`${path} is ${what}, which JSON cannot hold: convert it first`);
	return JSON.stringify(value, function (this: any, key: string, converted: unknown) {
		const holder = paths.get(this);
		const path = holder === undefined ? 'value' : Array.isArray(this) ? `${holder}[${key}]` : `${holder}.${key}`;
		const raw = lax ? converted : this[key];		// before toJSON(): a Date would come back as a string
		switch (typeof raw) {
			case 'string': if (!lax) checkText(raw, path, fail); break;
			case 'number': if (!Number.isFinite(raw)) throw bad(path, String(raw)); break;
			case 'bigint': throw bad(path, 'a BigInt');
			case 'function': case 'symbol': throw bad(path, `a ${typeof raw}`);
			case 'undefined': if (Array.isArray(this)) throw bad(path, 'undefined'); break;		// of an object it is left out
			case 'object': if (raw !== null) {
				const proto = Object.getPrototypeOf(raw);
				if (!Array.isArray(raw) && proto !== null && Object.getPrototypeOf(proto) !== null && !(lax && Object.keys(raw).length)) throw bad(path, `a ${raw.constructor?.name ?? 'class'}`);
				if (!lax && typeof raw.toJSON === 'function') throw bad(path, 'an object with toJSON()');
				if (!lax) for (const name of Object.keys(raw)) checkText(name, `a key of ${path}`, fail);
				paths.set(raw, path);
			}
		}
		return converted;
	});
}

export function checkText(text: string, path: string, fail: Fail): void {
	if (text.includes('\0')) throw fail(`${path} has a NUL, which PostgreSQL cannot store`);
	if (/\p{Surrogate}/u.test(text)) throw fail(`${path} has half of a surrogate pair, which is no Unicode`);
}
