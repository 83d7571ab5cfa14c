"""Runs: recording the messages of a request, and one run for each point and fault."""

import collections
import dataclasses
import re
import signal
import subprocess
import time

import client
import database
import faults
import judge
from service import ServiceError

TRIVIAL = re.compile(r'(select 1|select version\(\)|(show|set|reset|discard|deallocate|begin|start transaction|commit|rollback)\b[^;]*)?;?$', re.I)
READS = re.compile(r'\s*(select|with|show|set|reset|discard|deallocate|begin|start|commit|rollback)\b', re.I)


@dataclasses.dataclass
class Point:
    number: int
    key: tuple
    nth: int
    message: object
    link: int
    fresh: bool = False    # only on a connection that has not seen this request
    name: str = ''


def blocks(tape):
    """The messages of each connection, from one moment without a transaction to the next."""
    open_ones = {}
    for entry in tape:
        block = open_ones.setdefault(entry[1], [])
        block.append(entry)
        if entry[2].status == 'I':
            yield open_ones.pop(entry[1])
    yield from open_ones.values()


def is_chatter(block, outside):
    """A block of which each statement is a pool's own, or was executed while no request was under way."""
    executed = [message for _, _, message in block if message.side == '>' and message.kind in faults.EXECUTES]
    return bool(executed) and all(TRIVIAL.match(message.text) or message.key[2] in outside for message in executed)


def points_of(tape, outside):
    """The messages of the request at which something can happen. Of a row of equal messages it is the first and the last."""
    ignored = {id(entry) for block in blocks(tape) if is_chatter(block, outside) for entry in block}
    counts, points, previous = collections.Counter(), [], {}
    for place, entry in enumerate(tape):
        _, link, message = entry
        counts[message.key] += 1
        following = next((later[2].key for later in tape[place + 1:] if later[1] == link), None)
        in_a_row = previous.get(link) == message.key == following
        previous[link] = message.key
        if id(entry) not in ignored and not in_a_row and message.kind not in ('Terminate', 'NoticeResponse', 'NotificationResponse'):
            points.append(Point(len(points) + 1, message.key, counts[message.key], message, link))
    return points


def name_points(points):
    for length in 50, 10000:
        for number, point in enumerate(points, 1):
            point.number, (side, kind, text) = number, point.key
            name = f'{side} {kind} {text[:length]}'.rstrip() + (f' #{point.nth}' if point.nth > 1 else '')
            if length == 50 or sum(other.name == point.name for other in points) > 1:
                point.name = name
    return points


class Run:
    """One request with its deliveries, and what they led to."""

    def __init__(self, stage, point=None, fault='none', recording=False):
        self.stage, self.proxy, self.fleet, self.options = stage, stage.proxy, stage.fleet, stage.options
        self.journal = judge.Journal(client.new_id(stage.random), point, fault)
        self.attempts, self.stopped, self.stopped_at = [], None, 0
        self.timeout, self.recording, self.tape = self.options.timeout, recording, None

    def note(self, who, text):
        self.journal.events.append((time.monotonic(), who, text))

    def terminate(self, pid):
        """Returns when the backend is gone; false if there is none."""
        if not pid or self.stage.database.value(f'SELECT pg_terminate_backend({pid})') != 't':
            return False
        while self.stage.database.rows(f'SELECT 1 FROM pg_stat_activity WHERE pid = {pid}'):
            time.sleep(0.002)
        return True

    def stop(self):
        self.stopped, self.stopped_at = self.fleet.current, time.monotonic()
        self.fleet.current.signal(signal.SIGSTOP)

    def wake(self):
        if self.stopped:
            self.note('fault', 'the service is woken')
            self.stopped.signal(signal.SIGCONT)
            self.stopped = None
            for link in list(self.proxy.links):
                link.open.set()

    def send(self, delivery):
        target = self.fleet.spare or self.fleet.current if self.stopped else self.fleet.current
        self.note('client', f'attempt {len(self.attempts) + 1} ({delivery}) is sent to instance {target.number}')
        self.attempts.append(client.Attempt(self.stage.request, self.journal.id, target.port, self.timeout, len(self.attempts) + 1))
        return self.attempts[-1]

    def wake_if_due(self):
        if self.stopped and time.monotonic() > self.stopped_at + self.options.pause:
            self.wake()

    def until_final(self, delivery):
        """Sends the request until there is an answer that is final, and returns it."""
        give_up, pause, last, tries = time.monotonic() + self.options.give_up, 0.01, None, 0
        while True:
            tries += 1
            attempt = self.send(delivery)
            while not attempt.done.wait(0.02) and time.monotonic() < attempt.began + (self.stage.patience if self.stopped else self.timeout):
                self.wake_if_due()
            self.wake_if_due()
            if attempt.done.is_set():
                last = attempt.answer
                self.journal.answers.append(last)
                self.note('client', f'attempt {attempt.delivery} is answered {last}')
                if last.is_final():
                    self.wake()
                    return last
                if last.status is None and not self.stopped and self.fleet.revive():
                    self.note('service', 'the service has ended by itself, and is started again')
            else:
                self.note('client', f'attempt {attempt.delivery}: gives up waiting')
            if time.monotonic() > give_up:
                self.journal.stuck.append(f'{delivery}: {tries} attempts in {self.options.give_up:g} s, and no answer that is final; the last one: {last}')
                self.note('client', 'gives up')
                return None
            time.sleep(pause)
            pause = min(pause * 2, 0.25)

    def deliver(self):
        """The request, until it is answered; then more deliveries of it."""
        told = self.until_final('the request')
        if self.recording:
            self.settle()
            self.tape = list(self.proxy.tape)
        for delivery in range(self.options.deliveries if told else 0):
            self.until_final(f'a later delivery, {delivery + 1}')
        for attempt in self.attempts:
            attempt.done.wait(self.timeout + 1)
            if attempt.answer not in self.journal.answers and attempt.answer:
                if attempt.never_ended:
                    self.journal.stuck.append(f'attempt {attempt.delivery} is not answered in {self.timeout:g} s')
                elif attempt.answer.status:
                    self.note('client', f'attempt {attempt.delivery}{"" if attempt.heard else ", which nobody waits for,"} is answered {attempt.answer}')
                    self.journal.answers += [attempt.answer] * attempt.heard

    def settle(self):
        """Waits until no message comes and no transaction is open."""
        end, busy = time.monotonic() + self.options.give_up, []
        while True:
            if time.monotonic() >= self.proxy.latest + self.options.settle:
                busy = self.stage.busy()
                if not busy:
                    return
            if time.monotonic() > end:
                break
            time.sleep(0.005)
        for pid, state, query in busy:
            self.journal.left.append(f'a connection is "{state}" {self.options.give_up:g} s after the last answer: {query[:200]}')
            self.terminate(pid)

    def execute(self, second=None):
        """second: another point and fault, once the first one was hit."""
        began = time.monotonic()
        self.stage.running[:] = [self]
        self.fleet.wait()
        trap = faults.trap(self.journal.fault, self.journal.point, self) if self.journal.point else None
        if second:
            trap.then = faults.trap(second[1], second[0], self, 1)
        self.proxy.arm(trap, [])
        try:
            self.deliver()
        finally:
            self.proxy.trap = None
            self.wake()
        self.settle()
        if trap and not (trap.then or trap).hit.is_set():
            self.journal.reached = False
        self.journal.effects = self.stage.count_effects(self.journal.id)
        self.note('effects', ', '.join(f'{name}: {count}' for name, count in self.journal.effects.items()))
        self.journal.events += [(at, f'connection {link}', str(message)) for at, link, message in self.proxy.tape]
        self.journal.events.sort(key=lambda event: event[0])
        self.journal.seconds = time.monotonic() - began
        return self.journal


class Stage:
    """What all runs share: the service, the proxy, the database."""

    def __init__(self, options, random, request, fleet, proxy, base, provider, running):
        """running: gets the run that is under way."""
        self.options, self.random, self.request, self.fleet, self.proxy = options, random, request, fleet, proxy
        self.database, self.provider, self.running, self.patience = base, provider, running, 1.0
        self.outside, self.effects = set(), {}    # effects: of each request

    def busy(self):
        """Backends that are not done: in a transaction, or their connection is closed, and the last statement may still be executed."""
        kept = {link.pid for link in list(self.proxy.links) if not link.closed}
        pids = ','.join(map(str, list(self.proxy.pids))) or '0'
        rows = self.database.rows(f"SELECT pid, state, query FROM pg_stat_activity WHERE pid IN ({pids})")
        if any(query == '<insufficient privilege>' for _, _, query in rows):
            raise ServiceError('prove does not see what the service does in the server: --admin needs the role of the service, or a superuser')
        self.proxy.pids &= {int(pid) for pid, _, _ in rows} | kept
        return [row for row in rows if row[1] not in ('idle', None) or int(row[0]) not in kept]

    def count_effects(self, id):
        found = self.effects[id] = {}
        for name, query in self.options.effects:
            value = self.database.value(query.replace("'{id}'", '{id}').replace('{id}', database.literal(id)))
            found[name] = int(float(value or 0))
        for name, command in self.options.effects_command:
            done = subprocess.run(command.replace('{id}', id), shell=True, capture_output=True, text=True, check=False)
            if done.returncode or not done.stdout.strip().isdigit():
                raise ServiceError(f'--effects-command {name}: it has to print a number: {done.stdout}{done.stderr}')
            found[name] = int(done.stdout)
        if self.options.provider:
            found['provider'] = self.provider.count(id)
        return found

    def record(self):
        """The points of the request, the journal of a run without a fault, and its tape."""
        self.fleet.wait()
        time.sleep(self.options.settle)
        self.outside = {message.key[2] for _, _, message in self.proxy.tape if message.side == '>' and message.kind in faults.EXECUTES and READS.match(message.text)}
        for _ in range(2):    # what the service does only once: let it do that now
            self.proxy.arm(None, [])
            warm = Run(self)
            answer = warm.until_final('a first request')
            warm.settle()
            if not answer or not answer.is_success():
                raise ServiceError(f'the request has to succeed, but is answered: {answer or warm.journal.stuck}\n{self.fleet.current.last_words()}')
        if not any(message.side == '>' and message.kind in faults.EXECUTES for _, _, message in self.proxy.tape):
            raise ServiceError('the service executes no statement through the proxy: does it connect to PGHOST and PGPORT?')
        others = {int(pid) for pid, in self.database.rows(
            "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND backend_type = 'client backend' AND pid <> pg_backend_pid() AND "
            "backend_start > (SELECT backend_start FROM pg_stat_activity WHERE pid = pg_backend_pid())")} - self.proxy.pids
        time.sleep(bool(others))    # those that just connect
        if others - self.proxy.pids:
            raise ServiceError(f'since the start, others have connected to the database, and not through prove: {others - self.proxy.pids}')
        run = Run(self, recording=True)
        first = run.execute()
        if sum(first.effects.values()) < 1:
            raise ServiceError('the request has no effect: what do the queries of --effects count?')
        self.patience = max(0.3, 4 * (run.tape[-1][0] - run.tape[0][0]))
        points = self.with_fresh(points_of(run.tape, self.outside), first)
        if not points:
            raise ServiceError('no message of the request differs from what the service says without one')
        return name_points(points), first, run.tape

    def with_fresh(self, points, first):
        """Adds points that only a new connection has, such as the Parse of a driver that keeps its statements, each at its place."""
        self.proxy.cut_all()
        self.fleet.wait()
        run = Run(self, recording=True)
        if len(run.execute().answers) != len(first.answers):
            return points    # the pool gave a dead connection away: no such point can be reached reliably
        startup = {message.key for block in blocks(run.tape) if block[0][2].kind == 'Startup' for _, _, message in block}
        known, order = {(point.key, point.nth) for point in points}, points_of(run.tape, self.outside)
        for place, point in enumerate(order):
            if (point.key, point.nth) not in known and point.key not in startup:
                rest = {(later.key, later.nth) for later in order[place:]} & known
                point.fresh = True
                points.insert(next((n for n, other in enumerate(points) if (other.key, other.nth) in rest), len(points)), point)
        return points

    def try_point(self, point, fault, second=None):
        """A run that reaches the point, if it can be reached in three."""
        for _ in range(3):
            if point.fresh:
                self.fleet.wait()
                self.proxy.cut_all()
                time.sleep(0.02)
            run = Run(self, point, fault)
            run.journal.second = f'{second[1]} at {second[0].name}' if second else ''
            journal = run.execute(second)
            if journal.reached or judge.judge(journal, self.options.mask, self.options.same_header):
                break
        return journal

    def left_behind(self):
        """After all runs: late effects, advisory locks, prepared transactions, connections once the service has ended; requests not settled."""
        found, unsettled = [], []
        time.sleep(max(1, self.options.pause))
        for id, before in list(self.effects.items()):
            found += [f'request {id} had {before[name]} effects, {name}, when it was judged, and has {count} after all runs'
                      for name, count in self.count_effects(id).items() if count > before[name]]
        pids = ','.join(map(str, list(self.proxy.pids))) or '0'
        found += [text for text, in self.database.rows(
            f"SELECT format('an advisory lock, %s, held by process %s', objid, pid) FROM pg_locks WHERE locktype = 'advisory' AND pid IN ({pids}) "
            "UNION ALL SELECT 'a prepared transaction, ' || gid FROM pg_prepared_xacts WHERE database = current_database() AND "
            "prepared > (SELECT backend_start FROM pg_stat_activity WHERE pid = pg_backend_pid())")]
        self.fleet.close()
        end = time.monotonic() + 5
        while rows := self.database.rows(f'SELECT pid, state FROM pg_stat_activity WHERE pid IN ({pids})'):
            if time.monotonic() > end:
                found += [f'a connection, process {pid}, {state}' for pid, state in rows]
                break
            time.sleep(0.02)
        # A superuser reads no view of another role: it could call any function, with the rights of the superuser.
        for schema, in self.database.rows("SELECT relnamespace::regnamespace FROM pg_class AS c JOIN pg_roles AS r ON r.oid = relowner WHERE relname = 'idem_unsettled' AND (rolsuper OR "
                                          "current_setting('is_superuser') = 'off') AND has_table_privilege(c.oid, 'SELECT') AND has_schema_privilege(relnamespace, 'USAGE')"):
            unsettled += self.database.rows(f'SELECT scope, user_id, request_id FROM {schema}.idem_unsettled WHERE request_id IN ({", ".join(map(database.literal, self.effects))})')
        return found, [' '.join(row) for row in unsettled]
