"""Draws a dashboard of Grafana as SVG, from the numbers of a Prometheus.

    draw.py [--range SECONDS] [--instance NAME] DASHBOARD URL SVG
    draw.py --check DASHBOARD URL

With --check it only says which queries find no data.  It knows panels of the types stat and
timeseries, and what this project's dashboard uses of them.
"""

import argparse
import json
import math
import sys
import time
import urllib.parse
import urllib.request
from xml.sax.saxutils import escape

WIDTH = 1200
UNIT = WIDTH / 24
ROW = 26
MARGIN = 6
COLORS = ['#3274d9', '#e0752d', '#3f9a47', '#a352cc', '#c4162a', '#b8860b', '#0f8f8f', '#d6669a', '#5d6670', '#7d9c1c']
POINTS = 100


def get(url, path, **parameters):
    address = f'{url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}'
    with urllib.request.urlopen(address, timeout=30) as answer:
        return json.load(answer)['data']['result']


def expression(target, instance, step):
    """The query of a target, with Grafana's variables in their places."""
    return (target['expr'].replace('$__rate_interval', f'{max(4 * step, 10)}s')
            .replace('$instance', instance).replace('$database', '.*'))


def humanize(value, unit):
    if unit == 's':
        if value >= 60:
            return f'{value / 60:.3g} min'
        return f'{value:.3g} s' if value >= 1 or value == 0 else f'{value * 1000:.3g} ms'
    for bound, sign in ((1e9, 'G'), (1e6, 'M'), (1e3, 'k')):
        if abs(value) >= bound:
            return f'{value / bound:.3g} {sign}' + ('B' if unit == 'bytes' else '')
    return f'{value:.3g}' + (' B' if unit == 'bytes' else '')


def legend(target, labels):
    text = target['legendFormat']
    for name, value in labels.items():
        text = text.replace('{{' + name + '}}', value)
    return text


def text(x, y, content, size=11, color='#30343a', anchor='start', weight='normal'):
    return (f'<text x="{x:.0f}" y="{y:.0f}" font-size="{size}" fill="{color}" text-anchor="{anchor}" '
            f'font-weight="{weight}">{escape(content)}</text>')


def nice_maximum(value):
    if value <= 0:
        return 1
    size = 10 ** math.floor(math.log10(value))
    return next(size * factor for factor in (1, 2, 2.5, 5, 10) if size * factor >= value)


def draw_stat(panel, box, results):
    x, y, width, height = box
    defaults = panel['fieldConfig']['defaults']
    if not results[0]:
        return [text(x + width / 2, y + height / 2, 'no data', anchor='middle')]
    value = float(results[0][0]['values'][-1][1])
    shown, color = humanize(value, defaults['unit']), 'green'
    for step in defaults['thresholds']['steps']:
        if step['value'] is not None and value >= step['value']:
            color = step['color']
    for mapping in defaults['mappings']:
        if str(int(value)) in mapping['options']:
            shown = mapping['options'][str(int(value))]['text']
            color = mapping['options'][str(int(value))]['color']
    fill = {'green': '#3f9a47', 'red': '#c4162a'}[color]
    return [f'<rect x="{x}" y="{y + 20}" width="{width}" height="{height - 20}" rx="3" fill="{fill}"/>',
            text(x + width / 2, y + height / 2 + 20, shown, 26, '#ffffff', 'middle', 'bold')]


def lines_of(panel, results):
    """Name and points of each line, the largest first; stacked if the panel is."""
    lines = []
    for target, result in zip(panel['targets'], results):
        for series in result:
            points = [(float(t), float(v)) for t, v in series['values'] if math.isfinite(float(v))]
            if points:
                lines.append((legend(target, series['metric']), points))
    lines.sort(key=lambda line: -sum(v for _, v in line[1]))
    lines = [line for line in lines if any(v for _, v in line[1])] or lines[:1]
    if panel['fieldConfig']['defaults']['custom']['stacking']['mode'] == 'normal':
        below = {}
        for i, (name, points) in enumerate(lines):
            for t, v in points:
                below[t] = below.get(t, 0) + v
            lines[i] = (name, [(t, below[t]) for t, _ in points])
    return lines


def draw_graph(panel, box, results, begin, end):
    x, y, width, height = box
    left, top, right, bottom = x + 52, y + 30, x + width - 12, y + height - 42
    defaults = panel['fieldConfig']['defaults']
    lines = lines_of(panel, results)
    if not lines:
        return [text(x + width / 2, y + height / 2, 'no data', anchor='middle')]
    maximum = nice_maximum(max(v for _, points in lines for _, v in points))
    svg = []
    for i in range(5):
        level = bottom - (bottom - top) * i / 4
        svg.append(f'<path d="M{left:.0f} {level:.0f}H{right:.0f}" stroke="#e3e6ea"/>')
        svg.append(text(left - 5, level + 4, humanize(maximum * i / 4, defaults['unit']), 10, '#6b7280', 'end'))
    for i in range(5):
        at = begin + (end - begin) * i / 4
        svg.append(text(left + (right - left) * i / 4, bottom + 14, f'{(at - begin) / 60:.3g} min', 10, '#6b7280',
                        'end' if i == 4 else 'middle'))
    for step in defaults['thresholds']['steps']:
        if step['value'] is not None and step['value'] <= maximum:
            level = bottom - (bottom - top) * step['value'] / maximum
            svg.append(f'<path d="M{left:.0f} {level:.1f}H{right:.0f}" stroke="#c4162a" stroke-dasharray="6 4"/>')
    at = left
    for i, (name, points) in enumerate(lines):
        color = COLORS[i % len(COLORS)]
        path = ' '.join(f'{left + (right - left) * (t - begin) / (end - begin):.1f},{bottom - (bottom - top) * min(v / maximum, 1):.1f}'
                        for t, v in points)
        svg.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.5"/>')
        if at + 20 + 6.2 * len(name) < right + 10:
            svg.append(f'<rect x="{at:.0f}" y="{bottom + 24:.0f}" width="10" height="3" fill="{color}"/>')
            svg.append(text(at + 14, bottom + 29, name, 10))
            at += 26 + 6.2 * len(name)
    return svg


def draw(dashboard, url, seconds, instance):
    end = int(time.time())
    begin, step = end - seconds, max(seconds // POINTS, 1)
    height = max(p['gridPos']['y'] + p['gridPos']['h'] for p in dashboard['panels']) * ROW
    svg = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif">',
           f'<rect width="{WIDTH}" height="{height}" fill="#f4f5f7"/>']
    for panel in dashboard['panels']:
        place = panel['gridPos']
        box = (place['x'] * UNIT + MARGIN / 2, place['y'] * ROW + MARGIN / 2, place['w'] * UNIT - MARGIN, place['h'] * ROW - MARGIN)
        svg.append('<rect x="%.0f" y="%.0f" width="%.0f" height="%.0f" rx="3" fill="#ffffff" stroke="#d9dce1"/>' % box)
        svg.append(text(box[0] + 8, box[1] + 15, panel['title'], 12, weight='bold'))
        results = [get(url, 'query_range', query=expression(target, instance, step), start=begin, end=end, step=step)
                   for target in panel['targets']]
        svg += draw_stat(panel, box, results) if panel['type'] == 'stat' else draw_graph(panel, box, results, begin, end)
    return '\n'.join(svg + ['</svg>', ''])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument('--check', action='store_true')
    parser.add_argument('--range', type=int, default=3600)
    parser.add_argument('--instance', default='.*')
    parser.add_argument('dashboard')
    parser.add_argument('url')
    parser.add_argument('svg', nargs='?')
    arguments = parser.parse_args()
    with open(arguments.dashboard, encoding='utf-8') as file:
        dashboard = json.load(file)
    if arguments.check:
        targets = [(p['title'], t) for p in dashboard['panels'] for t in p['targets']]
        empty = [f'{title}: {target["expr"]}' for title, target in targets
                 if not get(arguments.url, 'query', query=expression(target, '.*', 30))]
        print('\n'.join(empty))
        sys.exit(1 if empty or not targets else 0)
    with open(arguments.svg, 'w', encoding='utf-8') as file:
        file.write(draw(dashboard, arguments.url, arguments.range, arguments.instance))


main()
