"""The judge: from what happened in a run to what was wrong with it. It knows nothing of proxies and processes."""

import collections
import dataclasses
import re

WORDS = {'double': ('2x', 'executed twice'), 'lost': ('lost', 'success told, nothing done'), 'refused': ('ghost', 'refusal told, but done'),
         'differ': ('differ', 'answers differ'), 'stuck': ('stuck', 'never answered'), 'open': ('open', 'a transaction left open')}
Finding = collections.namedtuple('Finding', 'kind text')


@dataclasses.dataclass
class Journal:
    """One run. second: another fault and its point. answers: what was heard, in the order in which it was heard. effects: by name, after
    the run. stuck: what did not end. left: what the run left behind in the server. events: (time, who, text)."""

    id: str
    point: object = None
    fault: str = 'none'
    second: str = ''
    answers: list = dataclasses.field(default_factory=list)
    effects: dict = dataclasses.field(default_factory=dict)
    stuck: list = dataclasses.field(default_factory=list)
    left: list = dataclasses.field(default_factory=list)
    events: list = dataclasses.field(default_factory=list)
    reached: bool = True
    seconds: float = 0.0

    def what(self):
        return f'{self.fault} at {self.point.name}' + (f', then {self.second}' if self.second else '') if self.point else 'without a fault'


def judge(journal, mask=None, headers=()):
    """mask: what this regular expression finds in a body is no difference. headers: those that count."""
    final = [answer for answer in journal.answers if answer.is_final()]
    success = any(answer.is_success() for answer in final)
    findings = []
    for name, count in journal.effects.items():
        if count > 1:
            findings.append(Finding('double', f'{name}: {count} effects of one request'))
        elif success and count < 1:
            findings.append(Finding('lost', f'{name}: no effect, but the client was told a success'))
        elif final and not success and count > 0:
            findings.append(Finding('refused', f'{name}: {count} effect, but the client was told a refusal'))

    def identity(answer):
        body = re.sub(mask.encode(), b'', answer.body) if mask else answer.body
        lower = {name.lower(): value for name, value in answer.headers.items()}
        return answer.status, body, tuple(lower.get(name.lower()) for name in headers)
    different = dict.fromkeys(identity(answer) for answer in final)
    if len(different) > 1:
        told = ', then '.join(f'{status} {body[:100].decode("utf-8", "replace")}' + (f' {list(more)}' if headers else '') for status, body, more in different)
        findings.append(Finding('differ', f'one request was answered in {len(different)} ways: {told}'))
    return findings + [Finding('stuck', text) for text in journal.stuck] + [Finding('open', text) for text in journal.left]
