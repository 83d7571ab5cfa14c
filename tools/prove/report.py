"""What prove tells: a table, stories, one page of HTML, JUnit's XML."""

import html
import re
import shlex
import xml.etree.ElementTree as xml

from judge import WORDS

GREEN, RED, GREY, PLAIN = '\033[32m', '\033[31m', '\033[90m', '\033[0m'


def short(text, length):
    return text if len(text) <= length else text[:length - 1] + '…'


class Results:
    """cells: by number of the point and fault, the journal and its findings; (0, 'none') is the run without a fault."""

    def __init__(self, points, faults, tape, title, argv):
        self.points, self.faults, self.tape, self.title, self.argv, self.cells = points, faults, tape, title, argv, {}
        self.notes, self.after = [], []    # what is remarkable; what all runs left behind

    def add(self, journal, findings):
        place = journal.point.number if journal.point else 0, journal.fault + journal.second
        if place not in self.cells or findings or not self.cells[place][1]:
            self.cells[place] = journal, findings
        return findings

    def bad(self):
        return [(journal, findings) for journal, findings in self.cells.values() if findings]

    def cell(self, number, fault):
        """Its word, and whether it is good: True, False, or None for nothing."""
        if (number, fault) not in self.cells:
            return '', None
        journal, findings = self.cells[number, fault]
        if findings:
            return WORDS[findings[0].kind][0], False
        return ('ok', True) if journal.reached else ('-', None)

    def command(self, journal):
        """That repeats just this run."""
        kept, words = [], iter(self.argv)
        for word in words:
            if re.match('--(only|faults|points|pairs|report|junit|stories)$', word):
                next(words, None)
            elif not re.match('--(only|faults|points|pairs|report|junit|stories)=', word):
                kept.append(word)
        kept = [re.sub(r"\s*\bpassword\s*=\s*('(?:[^'\\]|\\.)*'|[^\s&]+)|(?<=://)([^:/@\s]*):[^@\s]*(?=@)", r'\2', word) for word in kept]
        return shlex.join(kept + (['--only', journal.what()] if journal.point else ['--faults', 'none']))

    def table(self, color=False):
        """Points of one statement and side that fared alike share a row."""
        def cells(point):
            return [self.cell(point.number if point else 0, fault) for fault in (self.faults if point else ['none'])]
        groups = [[None]]
        for point in self.points:
            last = groups[-1][-1]
            if last and (last.key[0], last.message.text, last.link, cells(last)) == (point.key[0], point.message.text, point.link, cells(point)):
                groups[-1].append(point)
            else:
                groups.append([point])
        lines = [' ' * 78 + ' '.join(f'{fault:>10}' for fault in self.faults)]
        for group in groups:
            first, last = group[0], group[-1]
            number = '' if not first else f'{first.number}' if first is last else f'{first.number}-{last.number}'
            text = 'no fault' if not first else f'{str(first.message)[0]} {", ".join(dict.fromkeys(point.key[1] for point in group))} {last.message.detail or last.message.text}'
            row = []
            for word, good in cells(first):
                paint = {True: GREEN, False: RED, None: GREY}[good] if color else ''
                row.append(f'{paint}{word:>10}{PLAIN if color else ""}')
            lines.append(f'{number:>7} {short(text, 70):<70}' + ' '.join(row))
        return '\n'.join(lines)

    def ranges(self):
        """Rows of neighbours at which a fault did the same harm: (fault, kind of the finding, first point, last point)."""
        found = []
        for fault in self.faults:
            previous = None
            for point in self.points:
                findings = self.cells.get((point.number, fault), (None, []))[1]
                kind = findings[0].kind if findings else None
                if kind and kind == previous:
                    found[-1] = *found[-1][:3], point
                elif kind:
                    found.append((fault, kind, point, point))
                previous = kind
        return found

    def told_ranges(self):
        return '\n'.join(f'{WORDS[kind][1]}: {fault} at {first.number}' + (f', {short(str(first.message), 70)}' if first is last else
                         f'-{last.number}, from {short(str(first.message), 60)} to {short(str(last.message), 60)}') for fault, kind, first, last in self.ranges())

    def story(self, journal, findings):
        began = journal.events[0][0] if journal.events else 0
        lines = [f'{journal.what()}: {"; ".join(finding.text for finding in findings) or ("all held" if journal.reached else "not reached")}', f'  request {journal.id}']
        lines += [f'  {1000 * (at - began):8.1f} ms  {who:<14} {short(text, 200)}' for at, who, text in shortened(journal.events)]
        return '\n'.join(lines + ['  again: ' + self.command(journal)])

    def summary(self):
        runs, bad = len(self.cells), len(self.bad())
        missed = sum(not journal.reached for journal, _ in self.cells.values())
        return (f'{len(self.points)} points, {runs} runs, {bad} with findings' + (f', {missed} that did not reach their point' if missed else '') +
                (f', and {len(self.after)} after all runs' if self.after else ''))

    def write_html(self, path):
        def cells(number, faults):
            for fault in faults:
                word, good = self.cell(number, fault)
                link = f'<a href="#r{number}-{fault}">{word}</a>' if good is False else word
                yield f'<td class="{ {True: "good", False: "bad", None: "none"}[good]}">{link}</td>'
        rows = ''.join(f'<tr><td>{point.number}</td><td class="m">{html.escape(str(point.message))}</td>{"".join(cells(point.number, self.faults))}</tr>' for point in self.points)
        stories = ''.join(f'<details id="r{journal.point.number if journal.point else 0}-{journal.fault}" open><summary>{html.escape(findings[0].text)}</summary>'
                          f'<pre>{html.escape(self.story(journal, findings))}</pre></details>' for journal, findings in self.bad())
        notes = ''.join(f'<li>{html.escape(note)}</li>' for note in self.after + self.notes)
        with open(path, 'w', encoding='utf-8') as file:
            file.write(f'''<!DOCTYPE html><html lang="en"><meta charset="utf-8"><title>prove: {html.escape(self.title)}</title><style>
body {{ font: 14px system-ui, sans-serif; margin: 2em auto; max-width: 1200px; padding: 0 1em }} pre {{ overflow-x: auto; background: #f6f8fa; padding: 1em }}
table {{ border-collapse: collapse }} td, th {{ padding: .15em .6em; border: 1px solid #ddd; text-align: center }} .m {{ text-align: left; font-family: monospace }}
.good {{ background: #d7f5dd }} .bad {{ background: #ffc9c9; font-weight: bold }} .none {{ color: #999 }} svg text {{ font: 12px monospace }}
</style><h1>{html.escape(self.title)}</h1><p>{html.escape(self.summary())}</p><ul>{notes}</ul>{self.picture()}
<h2>Points and faults</h2><table><tr><th></th><th>message</th>{''.join(f"<th>{fault}</th>" for fault in self.faults)}</tr>{rows}</table>
<h2>What went wrong</h2>{stories or "<p>Nothing.</p>"}</html>''')

    def picture(self):
        """The sequence of the messages; on each point a circle, red if a fault there has a finding."""
        numbers = {(point.key, point.nth): point for point in self.points}
        counts, lines, y, client, service, server = {}, [], 60, 60, 300, 860
        parts = [f'<path d="M{client} {y} H{service - 6}" stroke="#333" marker-end="url(#a)"/><text x="{client + 8}" y="{y - 5}">the request</text>']
        for _, link, message in self.tape:
            counts[message.key] = counts.get(message.key, 0) + 1
            point = numbers.get((message.key, counts[message.key]))
            y += 24
            start, end = (service, server - 6) if message.side == '>' else (server, service + 6)
            color = '#333' if point else '#bbb'
            parts.append(f'<path d="M{start} {y} H{end}" stroke="{color}" marker-end="url(#a)"/><text x="{service + 24}" y="{y - 4}" fill="{color}">'
                         f'{html.escape(short(str(message)[2:], 60))}</text><text x="{server + 8}" y="{y}" fill="#999">{link}</text>')
            if point:
                words = [(fault, *self.cell(point.number, fault)) for fault in self.faults]
                bad = [f'{fault}: {word}' for fault, word, good in words if good is False]
                fill = '#e03131' if bad else '#2f9e44' if any(good for _, _, good in words) else '#bbb'
                title = f'point {point.number}: ' + (', '.join(bad) or 'all held')
                parts.append(f'<circle cx="{(service + server) / 2 + 220}" cy="{y}" r="6" fill="{fill}"><title>{title}</title></circle>')
        y += 24
        parts.append(f'<path d="M{service} {y} H{client + 6}" stroke="#333" marker-end="url(#a)"/><text x="{client + 8}" y="{y - 5}">the answer</text>')
        for x, name in (client, 'client'), (service, 'service'), (server, 'PostgreSQL'):
            lines.append(f'<path d="M{x} 40 V{y + 20}" stroke="#999" stroke-dasharray="4"/><text x="{x}" y="30" text-anchor="middle">{name}</text>')
        return (f'<svg width="960" height="{y + 30}" role="img"><defs><marker id="a" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" '
                f'orient="auto"><path d="M0 0 L8 4 L0 8 z"/></marker></defs>{"".join(lines + parts)}</svg>')

    def write_junit(self, path):
        suites = xml.Element('testsuites')
        for fault in ['none', *self.faults]:
            mine = [(journal, findings) for journal, findings in self.cells.values() if journal.fault == fault]
            suite = xml.SubElement(suites, 'testsuite', name=fault, tests=str(len(mine)), failures=str(sum(bool(findings) for _, findings in mine)))
            for journal, findings in mine:
                name = f'{journal.point.number} {journal.point.name}' if journal.point else 'without a fault'
                case = xml.SubElement(suite, 'testcase', classname=f'prove.{fault}', name=', then '.join(filter(None, (name, journal.second))), time=f'{journal.seconds:.3f}')
                if findings:
                    xml.SubElement(case, 'failure', message=findings[0].text, type=findings[0].kind).text = self.story(journal, findings)
                elif not journal.reached:
                    xml.SubElement(case, 'skipped')
        if self.after:
            suite = xml.SubElement(suites, 'testsuite', name='after all runs', tests='1', failures='1')
            xml.SubElement(xml.SubElement(suite, 'testcase', classname='prove', name='nothing is left behind'), 'failure', message=self.after[0]).text = '\n'.join(self.after)
        with open(path, 'w', encoding='utf-8') as file:
            file.write(re.sub('[^\n\t -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]', '?', xml.tostring(suites, encoding='unicode')))


def shortened(events):
    """Messages in a row, of one side and connection, become one line; of very many lines the first and the last ones are told."""
    lines = []
    for at, who, text in events:
        arrow, _, rest = text.partition(' ')
        kind, _, statement = rest.partition(' ')
        if arrow in '→←' and lines and lines[-1][1] == who and lines[-1][2][0] == arrow:
            kinds, statements = lines[-1][2][1:]
            if kinds[-1] != kind:
                kinds.append(kind)
            if statement not in statements and kind != 'ParameterStatus':
                statements.append(statement)
        else:
            lines.append((at, who, (arrow, [kind], [statement]) if arrow in '→←' else text))
    texts = [(at, who, text if isinstance(text, str) else f'{text[0]} {", ".join(text[1])}: {"; ".join(filter(None, text[2]))}'.rstrip(': ')) for at, who, text in lines]
    return texts if len(texts) <= 100 else [*texts[:60], (texts[60][0], '...', f'{len(texts) - 85} lines'), *texts[-25:]]
