"""What can go wrong at a message. Each fault is armed as a trap of the proxy."""

import re
import time

import messages
from proxy import Trap

EXECUTES = ('Query', 'Execute')
CANNOT_FAIL = re.compile(r'(begin|start|rollback|abort|set|show|reset|discard|deallocate|savepoint|release|close|listen|unlisten)\b[^;]*;?$|;?$', re.I)
COMMIT = re.compile(r'(commit|end)\b', re.I)
BEGIN = re.compile(r'\s*(begin|start\s+transaction)\b[^;]*;', re.I)


def cut_before(run):
    def act(link, raw, message):
        run.note('fault', f'connection {link.number} is cut before this arrives: {message}')
        link.cut()
    return act, None


def cut_after(run):
    def act(link, raw, message):
        run.note('fault', f'connection {link.number} is cut after this has arrived: {message}')
        return raw
    return act, lambda link: link.cut()


def kill(run):
    def act(link, raw, message):
        run.note('fault', f'the service is killed at: {message}')
        run.fleet.kill()
        return raw
    return act, lambda link: link.cut()


def terminate(run):
    def act(link, raw, message):
        run.note('fault', f'the backend of connection {link.number} is terminated at: {message}')
        if run.terminate(link.pid):
            return raw if message.side == '<' else None    # there, the server says the rest itself
        run.journal.reached = False
        return raw
    return act, None


def stop(run):
    def act(link, raw, message):
        run.note('fault', f'the service is stopped at: {message}')
        run.stop()
        return raw
    return act, lambda link: link.open.clear() if run.stopped else None


def again(run):
    def act(link, raw, message):
        run.note('fault', f'the same request arrives again at: {message}')
        attempt = run.send('again')
        end = attempt.began + run.timeout
        while not attempt.done.wait(0.01) and time.monotonic() < end:
            if time.monotonic() > attempt.began + 0.06 and run.proxy.silent(0.06):
                run.note('client', 'the second one waits')
                break
        return raw
    return act, None


def failing(code, text):
    """The server executes a statement that fails in place of this one, so its transaction is as after the real error; the proxy
    puts in the code. A COMMIT that fails has rolled back: so that is done first."""
    def fault(run):
        def act(link, raw, message):
            if link.dialogue.skipping or link.server is None:
                run.journal.reached = False
                return raw
            run.note('fault', f'this fails with {code}: {message}')
            before = b''
            with link.lock:
                link.rewrite = (code, text)
                if COMMIT.match(message.text):
                    link.dialogue.hide('Q' if message.kind == 'Query' else 'SQ')
                    before = (b'' if message.kind == 'Query' else messages.build('S')) + messages.query('ROLLBACK')
            if message.kind == 'Execute':
                return before + messages.build('E', b'prove_no_such_portal\0\0\0\0\0')
            begin = BEGIN.match(message.text)
            return before + messages.query((begin[0] if begin else '') + 'SELECT prove_no_such_function()')
        return act, None
    return fault


FAULTS = {
    'cut-before': cut_before, 'cut-after': cut_after, 'kill': kill, 'terminate': terminate, 'stop': stop, 'again': again,
    '40001': failing('40001', 'could not serialize access due to concurrent update'),
    '53100': failing('53100', 'could not extend file "base/5/16384": No space left on device'),
}


def applies(fault, point):
    side, kind, _ = point.key
    if fault in ('40001', '53100'):
        return side == '>' and kind in EXECUTES and not CANNOT_FAIL.match(point.message.text)
    if fault == 'terminate' and kind in ('Startup', 'Password', 'Authentication'):
        return False
    return True


def trap(fault, point, run, nth=None):
    act, after = FAULTS[fault](run)
    return Trap(point.key, nth or point.nth, act, after)
