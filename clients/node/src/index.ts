export { Idem } from './idem';
export type { IdemOptions, Key, Lapsed, OutcomeEvent, Request, Result, Stored } from './idem';
export type { Lease, LeaseRequest, LeaseResult } from './lease';
export type { Pool, Tx } from './driver';
export { reply } from './http';
export type { HttpHandler, HttpOptions, HttpRequest, Reply } from './http';
export {
	CommitUnknown, Failed, HandlerEndedTransaction, HandlerSwallowedError, IdemError, InProgress, Invalid, LeaseLost, Mismatch, NoRights, NotInstalled, Refused, Stale,
	TimedOut, TooLarge, Unknown,
} from './errors';
