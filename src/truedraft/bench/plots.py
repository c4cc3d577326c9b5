"""Plots of a page, as HTML and SVG. Names are HTML beside the shapes, to wrap and have the size of other text."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil

from truedraft.layout import SEPARATORS

COLORS = ("#4a78d0", "#d9703f", "#2a9d8f", "#9465c9", "#b07a33", "#7a848e", "#d0405a", "#3a9ac4")
WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 480, 220, 64, 42, 14
TICKS = 8  # on the horizontal axis, at most
LINE, NAMES = 18, 150  # of a picture: height of a line of text, width of the names beside its plots

STYLE = """
.bar{display:grid;grid-template-columns:15rem 1fr 4rem;gap:0 .75rem;align-items:center;margin:.3rem 0}
.bar .name{text-align:right;overflow-wrap:anywhere;line-height:1.25}
.track{position:relative;display:flex;height:1.1rem;background:var(--faint)}
.whisker{position:absolute;top:50%;height:2px;margin-top:-1px;min-width:2px;background:var(--fg)}
.mark{position:absolute;top:-.3rem;bottom:-.3rem;border-left:1px dashed var(--fg)}
.keys{display:flex;flex-wrap:wrap;gap:.2rem 1.2rem;padding:0;margin:.4rem 0;list-style:none;font-size:.9em}
.keys li{overflow-wrap:anywhere}.keys svg{width:1.6em;height:.7em;margin-right:.4em}
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,24rem),1fr));gap:0 2rem}
figure{margin:0 0 1rem;min-width:0}figure>svg{width:100%;height:auto;max-width:40rem}
svg text{font:13px system-ui,sans-serif;fill:var(--fg)}
@media(max-width:40rem){.bar{grid-template-columns:1fr 4rem}.bar .name{grid-column:1/3;text-align:left}}
"""


@dataclass(frozen=True)
class Bar:
    """A bar: parts of it as (share of the whole width, number of their colour), and marks at shares of the width.

    whisker: the ends of an interval.
    mark: position of a dashed reference line.
    """

    name: str
    value: str
    parts: Sequence[tuple[float, int]]
    whisker: tuple[float, float] | None = None
    mark: float | None = None


def breakable(name: str) -> str:
    """A name as HTML that may be broken after its separators."""
    marks = re.escape(SEPARATORS[0])
    return "<wbr>".join(map(escape, re.split(f"(?<=[{marks}])", name)))


def bars(found: Sequence[Bar]) -> str:
    return "".join(map(_bar, found))


def _bar(bar: Bar) -> str:
    shapes = [f'<span style="width:{share:.2%};background:{COLORS[color]}"></span>' for share, color in bar.parts]
    if bar.mark is not None:
        shapes.append(f'<span class="mark" style="left:{bar.mark:.2%}"></span>')
    if bar.whisker is not None:
        low, high = bar.whisker
        shapes.append(f'<span class="whisker" style="left:{low:.2%};width:{high - low:.2%}"></span>')
    return (
        f'<div class="bar"><span class="name">{breakable(bar.name)}</span>'
        f'<span class="track">{"".join(shapes)}</span><span>{escape(bar.value)}</span></div>'
    )


def keys(names: Sequence[tuple[str, int]]) -> str:
    """The legend of colours and dashes; names with the number of their style."""
    lines = [f'<svg viewBox="0 0 32 14"><path d="M0 7H32" {_stroke(style, 8)}/></svg>' for _, style in names]
    return (
        '<ul class="keys">'
        + "".join(f"<li>{line}{breakable(name)}</li>" for line, (name, _) in zip(lines, names, strict=True))
        + "</ul>"
    )


def _stroke(style: int, width: int = 2) -> str:
    """SVG attributes of a style: the colours in turn, then dashed."""
    dashes = f' stroke-dasharray="{4 * (style // len(COLORS))} 3"' if style >= len(COLORS) else ""
    return f'fill="none" stroke="{COLORS[style % len(COLORS)]}" stroke-width="{width}"{dashes}'


def curves(
    lines: Sequence[tuple[str, Sequence[float]]],
    label: str,
    top: float,
    value: Callable[[float], str],
    ticks: Sequence[str] | None = None,
) -> str:
    """Lines over a common axis of 0, 1, 2, ..., up to the value `top`; `value` formats values as text.

    label: of the horizontal axis.
    ticks: labels for 0, 1, 2, ... there.
    """
    body = _drawing(lines, label, top, value, ticks)
    svg = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(label)}">{body}</svg>'
    return f"<figure>{svg}{keys([(name, i) for i, (name, _) in enumerate(lines)])}</figure>"


def _drawing(
    lines: Sequence[tuple[str, Sequence[float]]],
    label: str,
    top: float,
    value: Callable[[float], str],
    ticks: Sequence[str] | None,
) -> str:
    """The shapes and texts of `curves`, WIDTH by HEIGHT."""
    last = max(len(points) for _, points in lines) - 1

    def place(x: float, y: float) -> tuple[float, float]:
        across, up = (WIDTH - LEFT - 14) / max(last, 1), (HEIGHT - BOTTOM - TOP) / top
        return round(LEFT + x * across, 1), round(HEIGHT - BOTTOM - y * up, 1)

    def path(points: Sequence[tuple[float, float]]) -> str:
        return "M" + "L".join(f"{x} {y}" for x, y in (place(*point) for point in points))

    body = [f'<path d="{path([(0, top), (0, 0), (last, 0)])}" fill="none" stroke="currentColor" opacity=".5"/>']
    for share in (0.0, 0.5, 1.0):
        x, y = place(0, top * share)
        body.append(f'<text x="{x - 6}" y="{y + 4}" text-anchor="end">{escape(value(top * share))}</text>')
    for k in range(0, last + 1, max(1, ceil(last / TICKS))):
        x, y = place(k, 0)
        body.append(f'<text x="{x}" y="{y + 17}" text-anchor="middle">{escape(ticks[k] if ticks else str(k))}</text>')
    body.append(f'<text x="{WIDTH - 14}" y="{HEIGHT - 6}" text-anchor="end">{escape(label)}</text>')
    body += [f'<path d="{path(list(enumerate(points)))}" {_stroke(i)}/>' for i, (_, points) in enumerate(lines)]
    return "".join(body)


@dataclass(frozen=True)
class Panel:
    """A plot of a picture: lines by name, labels of their points, the top of the axis (by default their maximum)."""

    title: str
    lines: Sequence[tuple[str, Sequence[float]]]
    ticks: Sequence[str] | None = None
    top: float | None = None
    value: Callable[[float], str] = "{:.3g}".format


def picture(panels: Sequence[Panel], label: str) -> str:
    """Plots one below the other, with names of their lines, as an SVG document of its own.

    label: of the horizontal axes.
    """
    parts, y = [], 0
    for panel in panels:
        top = panel.top or max([value for _, points in panel.lines for value in points]) or 1.0
        names = "".join(
            f'<g transform="translate({WIDTH} {TOP + LINE * i})"><path d="M0 0H24" {_stroke(i, 3)}/>'
            f'<text x="30" y="4">{escape(name)}</text></g>'
            for i, (name, _) in enumerate(panel.lines)
        )
        body = _drawing(panel.lines, label, top, panel.value, panel.ticks)
        parts.append(
            f'<text x="{LEFT}" y="{y + LINE}" font-weight="600">{escape(panel.title)}</text>'
            f'<g transform="translate(0 {y + LINE + 6})">{body}{names}</g>'
        )
        y += LINE + 16 + max(HEIGHT, TOP + LINE * len(panel.lines))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH + NAMES} {y}" width="{WIDTH + NAMES}" '
        f'font-family="system-ui,sans-serif" font-size="13" fill="#1f2328" color="#1f2328">'
        f'<rect width="100%" height="100%" fill="#fff"/>{"".join(parts)}</svg>\n'
    )
