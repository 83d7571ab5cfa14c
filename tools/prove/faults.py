"""What can go wrong at a message. Each fault is armed as a trap of the proxy."""

import re
import time

import messages
from proxy import Trap

EXECUTES = ('Query', 'Execute')
CANNOT_FAIL = re.compile(r'(begin|start|rollback|abort|set|show|reset|discard|deallocate|savepoint|release|close|listen|unlisten)\b[^;]*;?$|;?$', re.I)
COMMIT = re.compile(r'(commit|end)\b', re.I)
BEGIN = re.compile(r'\s*(begin|start\s+transaction)\b[^;]*;', re.I)


def simple(text, before=None, passed=True, after=None):
    def fault(run):
        def act(link, raw, message):
            run.note('fault', f'{text.format(link.number)}: {message}')
            if before:
                before(run, link)
            return raw if passed else None
        return act, after and (lambda link: after(run, link))
    return fault


def terminate(run):
    def act(link, raw, message):
        run.note('fault', f'the backend of connection {link.number} is terminated at: {message}')
        if run.terminate(link.pid):
            return raw if message.side == '<' else None    # there, the server says the rest itself
        run.journal.reached = False
        return raw
    return act, None


def again(run):
    def act(link, raw, message):
        run.note('fault', f'the same request arrives again at: {message}')
        attempt = run.send('again')
        attempt.heard, end = True, attempt.began + run.timeout
        while not attempt.done.wait(0.01) and time.monotonic() < end:
            if time.monotonic() > max(attempt.began, run.proxy.latest) + 0.15:
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
    'cut-before': simple('connection {} is cut before this arrives', lambda run, link: link.cut(), passed=False),
    'cut-after': simple('connection {} is cut after this has arrived', after=lambda run, link: link.cut()),
    'kill': simple('the service is killed at', lambda run, link: run.fleet.kill(), after=lambda run, link: link.cut()),
    'terminate': terminate,
    'stop': simple('the service is stopped at', lambda run, link: run.stop(), after=lambda run, link: run.stopped and link.open.clear()),
    'again': again,
    '40001': failing('40001', 'could not serialize access due to concurrent update'),
    '53100': failing('53100', 'could not extend file "base/5/16384": No space left on device'),
}


def applies(fault, point):
    side, kind, _ = point.key
    if fault in ('40001', '53100'):
        return side == '>' and kind in EXECUTES and not CANNOT_FAIL.match(point.message.text)
    return fault != 'terminate' or kind not in ('Startup', 'Password', 'Authentication', 'ParameterStatus')    # its process is not known yet


def trap(fault, point, run, nth=None):
    act, after = FAULTS[fault](run)
    return Trap(point.key, nth or point.nth, act, after)
