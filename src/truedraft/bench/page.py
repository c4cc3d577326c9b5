"""One self-contained HTML page of a benchmark: tables, and plots drawn as SVG."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape

from truedraft.bench.compare import Figures
from truedraft.bench.oracle import Attained
from truedraft.bench.roofline import Machine, Row

COLORS = ("#4361ee", "#e76f51", "#2a9d8f", "#8338ec", "#bc6c25", "#6c757d", "#d00000", "#0077b6")
STYLE = """
body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:64rem;padding:0 1rem;color:#222}
table{border-collapse:collapse;margin:1rem 0;font-size:13px}td,th{padding:.25rem .6rem;text-align:right;border-bottom:
1px solid #ddd}td:first-child,th:first-child,td:nth-child(2),th:nth-child(2){text-align:left}.no{color:#b00020}
svg{margin:.5rem 0 1.5rem;max-width:100%;height:auto}text{font:12px system-ui,sans-serif;fill:#333}h2{margin-top:2rem}
"""
WIDTH, HEIGHT, LEFT, BOTTOM = 760, 260, 60, 40
LABELS = 300  # room for the names of bars


def page(
    title: str,
    about: Sequence[str],
    figures: Sequence[Figures],
    machine: Machine | None = None,
    rows: Sequence[Row] = (),
    attained: Sequence[Attained] = (),
) -> str:
    """The page as text.

    Args:
        about: lines on what was measured and where.
        figures: of all workloads and sides.
        machine, rows: a roofline, where one was measured.
        attained: speed-ups with known answers, where they were measured.
    """
    parts = [f"<h1>{escape(title)}</h1>", *(f"<p>{escape(line)}</p>" for line in about)]
    if figures:
        parts += ["<h2>Figures</h2>", _table(figures), "<h2>Speed-up over transformers generate</h2>", _bars(figures)]
        if plot := _positions(figures):
            parts += ["<h2>Accepted to at least this position</h2>", plot]
        parts += ["<h2>Where the time goes</h2>", _shares(figures)]
    if attained:
        parts += ["<h2>Known answers, each drafted token right with a given probability</h2>", _known(attained)]
    if rows and machine is not None:
        said = f"{machine.bandwidth / 1e9:.0f} GB/s read, {machine.rate / 1e9:.0f} fp32 GFLOP/s"
        parts += [f"<h2>Latency of a pass by width ({said})</h2>", _latency(rows)]
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{escape(title)}</title><style>{STYLE}</style>"
        f"<body>{''.join(parts)}</body></html>\n"
    )


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:.1f}"


def _rows(heads: Sequence[str], lines: Sequence[Sequence[object]]) -> str:
    """A table of cells that are HTML already."""
    parts = ["<tr>" + "".join(f"<th>{h}</th>" for h in heads) + "</tr>"]
    parts += ["<tr>" + "".join(f"<td>{c}</td>" for c in cells) + "</tr>" for cells in lines]
    return f"<table>{''.join(parts)}</table>"


def _known(attained: Sequence[Attained]) -> str:
    heads = ("workload", "rate", "drafted", "accepted", "theory", "attained", "share")
    return _rows(heads, [
        (escape(a.workload), f"{a.rate:g}", a.drafted, f"{a.mean_acceptance_length:.2f}", f"{a.theory:.2f}x",
         f"{a.attained:.2f}x", f"{a.share:.0%}")
        for a in attained
    ])  # fmt: skip


def _table(figures: Sequence[Figures]) -> str:
    heads = (
        "workload", "way", "batch", "T", "identical", "tokens/s", "TTFT ms", "ms/token", "ITL p50/p95 ms", "passes",
        "accepted", "draft share", "MB", "speed-up", "by drafts, of at most",
    )  # fmt: skip
    lines: list[Sequence[object]] = []
    for f in figures:
        latency = "" if f.inter_token_latency is None else "/".join(_ms(s) for s in f.inter_token_latency)
        speed = "" if f.speed_up is None else f"{f.speed_up[0]:.2f}x ({f.speed_up[1]:.2f}-{f.speed_up[2]:.2f})"
        same = "yes" if f.differs is None else f"<span class=no>no: {escape(f.differs)}</span>"
        same += "" if f.apart is None else f"<br>{escape(f.apart)}"
        by_drafts = "" if f.bound is None else f"{f.against_no_drafts:.2f} of {f.bound:.2f}"
        lines.append((
            escape(f.workload), escape(f.side), f.batch, f.temperature, same, f"{f.tokens_per_second:.1f}",
            _ms(f.time_to_first_token), _ms(f.time_per_output_token), latency, f.passes or "",
            "" if f.mean_acceptance_length is None else f"{f.mean_acceptance_length:.2f}",
            "" if f.draft_share is None else f"{f.draft_share:.0%}", f.peak_memory >> 20, speed, by_drafts,
        ))  # fmt: skip
    return _rows(heads, lines)


def _svg(body: str, height: int = HEIGHT) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" role="img">{body}</svg>'


def _label(f: Figures) -> str:
    return f"{f.workload}, {f.side}, batch {f.batch}, T={f.temperature:g}"


def _bars(figures: Sequence[Figures]) -> str:
    """Horizontal bars with the interval of the median as a line; a dashed line at 1."""
    shown = [(f, f.speed_up) for f in figures if f.speed_up is not None]
    most = max([1.2, *(s[2] for _, s in shown)])
    left, step = LABELS, 22

    def x(value: float) -> float:
        return left + (WIDTH - left - 60) * value / most

    body = []
    for i, (f, (middle, low, high)) in enumerate(shown):
        y = 10 + i * step
        body.append(f'<text x="{left - 8}" y="{y + 12}" text-anchor="end">{escape(_label(f))}</text>')
        body.append(
            f'<rect x="{left}" y="{y}" width="{x(middle) - left:.1f}" height="15" fill="{COLORS[0]}" opacity=".75"/>'
        )
        body.append(f'<path d="M{x(low):.1f} {y + 7}H{x(high):.1f}" stroke="#222" stroke-width="2"/>')
        body.append(f'<text x="{x(max(middle, high)) + 6:.1f}" y="{y + 12}">{middle:.2f}x</text>')
    height = 20 + len(shown) * step
    body.append(f'<path d="M{x(1):.1f} 4V{height - 6}" stroke="#888" stroke-dasharray="4 3"/>')
    return _svg("".join(body), height)


def _positions(figures: Sequence[Figures]) -> str:
    lines = [(f"{f.workload}, {f.side}", [1.0, *f.acceptance_by_position]) for f in figures if f.acceptance_by_position]
    if not lines:
        return ""
    return _curves([(n, list(enumerate(v))) for n, v in lines], "position in the draft", 1.0, lambda v: f"{v:.0%}")


def _shares(figures: Sequence[Figures]) -> str:
    """Target, drafting and everything else, as parts of the whole time."""
    shown = [f for f in figures if f.draft_share is not None and f.target_share is not None]
    left, step, width = LABELS, 22, WIDTH - LABELS - 20
    body = []
    for i, f in enumerate(shown):
        y, at = 26 + i * step, float(left)
        target, draft = f.target_share or 0.0, f.draft_share or 0.0
        body.append(f'<text x="{left - 8}" y="{y + 12}" text-anchor="end">{escape(_label(f))}</text>')
        for share, color in ((target, COLORS[2]), (draft, COLORS[1]), (max(1 - target - draft, 0.0), COLORS[5])):
            body.append(f'<rect x="{at:.1f}" y="{y}" width="{share * width:.1f}" height="15" fill="{color}"/>')
            at += share * width
    for k, (name, color) in enumerate((("target", COLORS[2]), ("draft", COLORS[1]), ("engine", COLORS[5]))):
        body.append(f'<rect x="{left + k * 90}" y="4" width="12" height="12" fill="{color}"/>')
        body.append(f'<text x="{left + k * 90 + 17}" y="15">{name}</text>')
    return _svg("".join(body), 36 + len(shown) * step)


def _latency(rows: Sequence[Row]) -> str:
    return _curves(
        [
            ("measured", [(float(k), row.seconds) for k, row in enumerate(rows)]),
            ("floor", [(float(k), row.floor) for k, row in enumerate(rows)]),
        ],
        "width",
        max(row.seconds for row in rows),
        lambda v: f"{v * 1e3:.1f} ms",
        [str(row.width) for row in rows],
    )


def _curves(
    lines: Sequence[tuple[str, Sequence[tuple[float, float]]]],
    label: str,
    top: float,
    said: Callable[[float], str],
    ticks: Sequence[str] | None = None,
) -> str:
    """Lines over a common axis from 0 to `top`; `said` writes a value of it."""
    last = max(x for _, points in lines for x, _ in points) or 1.0
    right = WIDTH - 200

    def place(x: float, y: float) -> str:
        return f"{LEFT + (right - LEFT) * x / last:.1f} {HEIGHT - BOTTOM - (HEIGHT - BOTTOM - 14) * y / top:.1f}"

    body = [f'<path d="M{place(0, top)}L{place(0, 0)}L{place(last, 0)}" fill="none" stroke="#888"/>']
    for share in (0.0, 0.5, 1.0):
        x, y = place(0, top * share).split()
        body.append(f'<text x="{float(x) - 6}" y="{float(y) + 4}" text-anchor="end">{said(top * share)}</text>')
    for k in range(int(last) + 1):
        x, y = place(k, 0).split()
        body.append(f'<text x="{x}" y="{float(y) + 16}" text-anchor="middle">{ticks[k] if ticks else k}</text>')
    body.append(f'<text x="{right}" y="{HEIGHT - 6}" text-anchor="end">{escape(label)}</text>')
    for i, (name, points) in enumerate(lines):
        color = COLORS[i % len(COLORS)]
        body.append(
            f'<path d="M{"L".join(place(x, y) for x, y in points)}" fill="none" stroke="{color}" stroke-width="2"/>'
        )
        body.append(f'<text x="{right + 12}" y="{20 + i * 17}" style="fill:{color}">{escape(name)}</text>')
    return _svg("".join(body))
