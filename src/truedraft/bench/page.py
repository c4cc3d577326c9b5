"""A self-contained HTML page of a benchmark: settings, tables, plots and explanations."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from truedraft.bench import columns, plots
from truedraft.bench.compare import Figures
from truedraft.bench.lossy import Quality
from truedraft.bench.oracle import Attained
from truedraft.bench.replay import Replayed
from truedraft.bench.roofline import Machine, RooflinePoint
from truedraft.layout import Table, grouped

STYLE = """
:root{color-scheme:light dark;--fg:#1f2328;--bg:#fff;--dim:#59636e;--line:#d1d9e0;--faint:#eef1f4;--bad:#b00020}
@media(prefers-color-scheme:dark){:root{--fg:#e3e8ee;--bg:#12161b;--dim:#9aa5b1;--line:#3a434d;--faint:#222931;
--bad:#ff7b8a}}
*{box-sizing:border-box}
body{font:16px/1.5 system-ui,sans-serif;margin:1.5rem auto;max-width:72rem;padding:0 1rem;color:var(--fg);
background:var(--bg)}
h1,h2,h3{line-height:1.25;overflow-wrap:anywhere}h2{margin:2.5rem 0 .5rem}h3{font-size:1em;margin:1.2rem 0 .3rem}
p{max-width:46rem}
dl{display:grid;grid-template-columns:max-content 1fr;gap:.15rem 1rem;margin:.8rem 0;font-size:.9em}
dt{color:var(--dim)}dd{margin:0;overflow-wrap:anywhere;max-width:46rem}
.scroll{overflow-x:auto}
table{border-collapse:collapse;font-size:.9em;font-variant-numeric:tabular-nums}
th,td{padding:.25rem .7rem;text-align:right;border-bottom:1px solid var(--line);vertical-align:bottom}
td,thead th{white-space:nowrap}thead th{color:var(--dim);font-weight:600}
th:first-child{position:sticky;left:0;background:var(--bg);text-align:left;font-weight:400;min-width:min(15rem,42vw);
max-width:22rem;padding-left:0;white-space:normal;overflow-wrap:anywhere}
tbody th[scope=rowgroup]{font-weight:600;padding-top:.8rem;max-width:none}
th span{display:inline-block;position:sticky;left:0;max-width:calc(100vw - 3rem)}
.bad{color:var(--bad)}
@media(max-width:40rem){th:first-child{max-width:11rem}dl{grid-template-columns:1fr}dd{margin:0 0 .4rem}}
"""

WHAT = (
    "truedraft drafts several tokens cheaply, has the model verify them in one forward pass, and keeps those that the "
    "model would have chosen itself. So the text stays the same, and fewer passes are needed for it."
)
TURNS = (
    "All ways generate from the same prompts, in turns within one process, so that other load on the machine "
    "affects all of them."
)


def document(title: str, parts: Iterable[str]) -> str:
    """A page without external files; `parts` are HTML, the title is text."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}{plots.STYLE}</style>\n</head>\n"
        f"<body>\n<h1>{escape(title)}</h1>\n{chr(10).join(parts)}\n</body>\n</html>\n"
    )


def measured(
    title: str,
    facts: Mapping[str, str],
    figures: Sequence[Figures],
    rounds: int,
    machine: Machine | None = None,
    rows: Sequence[RooflinePoint] = (),
    attained: Sequence[Attained] = (),
    found: Sequence[Quality] = (),
) -> str:
    """The page of measurements with a model.

    Args:
        facts: model, machine and settings, by name.
        figures: of all workloads and ways, medians of `rounds` rounds.
        machine, rows: a roofline, where one was measured.
        attained: speed-ups with an oracle drafter, where they were measured.
        found: the quality of each way, where these are views that the model generates under.
    """
    parts = [_paragraph(WHAT), _defined(facts.items())]
    if found:
        parts.append(_section(columns.lossy(figures, found)))
    elif figures:
        parts += _speed(figures, rounds)
    if attained:
        parts.append(_section(columns.with_oracle(attained)))
    if rows and machine is not None:
        parts += [_section(columns.roofline(rows, machine)), _paragraph(columns.free(rows)), _latency(rows)]
    return document(title, parts)


def replayed(title: str, facts: Mapping[str, str], found: Sequence[Replayed], tokenizer: str, note: str) -> str:
    """The page of drafters on recorded outputs.

    Args:
        facts: model, machine and settings, by name.
        tokenizer: of the outputs.
        note: limits of a replay.
    """
    table = columns.replayed(found, tokenizer)
    most = max(f.mean_acceptance_length for f in found)
    parts = [_paragraph(WHAT), _paragraph(note), _defined(facts.items()), _section(table)]
    parts += ["<h2>Tokens per pass</h2>", _paragraph("The dashed line is plain decoding, one token per pass.")]
    for name, group in table.groups.items():
        lengths = [(f.way, f.mean_acceptance_length) for f in group]
        shown = [plots.Bar(way, f"{n:.2f}", [(n / most, 0)], mark=1 / most) for way, n in lengths]
        parts += [f"<h3>{escape(name)}</h3>", plots.bars(shown)]
    return document(title, parts)


def _speed(figures: Sequence[Figures], rounds: int) -> list[str]:
    single = " One round was measured: there are no intervals, and other load on the machine is not averaged out."
    parts = [_paragraph(TURNS + (single if rounds == 1 else "")), _section(columns.speed(figures, rounds))]
    parts += [_paragraph(fault, bad=True) for fault in columns.faults(figures)]
    parts += [_paragraph(note) for note in columns.notes(figures)]
    parts += ["<h2>Speed-up over the model alone</h2>", _paragraph(
        "The dashed line is the model alone."
        + (" The thin lines are the intervals of the table." if any(map(columns.interval, figures)) else "")
    ), *_bars(figures)]  # fmt: skip
    if plot := _positions(figures):
        parts += ["<h2>How far drafts are right</h2>", _paragraph(
            "Of the passes that verified a draft, the share in which at least this many drafted tokens were accepted."
        ), plot]  # fmt: skip
    shares = _shares(figures)
    if shares:
        parts += ["<h2>Where the time goes</h2>", _paragraph(
            "Target: passes of the model; its share is the figure on the right. Draft: making drafts. Engine: the rest."
        ), plots.keys([("target", 2), ("draft", 1), ("engine", 5)]), *shares]  # fmt: skip
    return [*parts, _section(columns.latency(figures, rounds))]


def _bars(figures: Sequence[Figures]) -> list[str]:
    shown = [f for f in figures if f.speed_up is not None]
    most = max([1.2, *(f.speed_up[2] for f in shown if f.speed_up)])
    parts = []
    for name, group in grouped(shown, columns.label).items():
        found = []
        for f in group:
            middle, low, high = f.speed_up or (0.0, 0.0, 0.0)
            whisker = (low / most, high / most) if columns.interval(f) else None
            found.append(plots.Bar(f.side, f"{middle:.2f}x", [(middle / most, 0)], whisker, 1 / most))
        parts += [f"<h3>{escape(name)}</h3>", plots.bars(found)]
    return parts


def _positions(figures: Sequence[Figures]) -> str:
    drawn = []
    for name, group in grouped((f for f in figures if f.acceptance_by_position), columns.label).items():
        lines = [(f.side, [1.0, *f.acceptance_by_position]) for f in group]
        plot = plots.curves(lines, "drafted tokens", 1.0, lambda v: f"{v:.0%}")
        drawn.append(f"<div><h3>{escape(name)}</h3>{plot}</div>")
    return f'<div class="plots">{"".join(drawn)}</div>' if drawn else ""


def _shares(figures: Sequence[Figures]) -> list[str]:
    parts = []
    for name, group in grouped((f for f in figures if f.draft_share is not None), columns.label).items():
        found = []
        for f in group:
            target, draft = f.target_share or 0.0, f.draft_share or 0.0
            rest = max(1 - target - draft, 0.0)
            found.append(plots.Bar(f.side, f"{target:.0%}", [(target, 2), (draft, 1), (rest, 5)]))
        parts += [f"<h3>{escape(name)}</h3>", plots.bars(found)]
    return parts


def _latency(rows: Sequence[RooflinePoint]) -> str:
    lines = [("measured", [row.seconds for row in rows]), ("floor", [row.floor for row in rows])]
    top = max(seconds for _, points in lines for seconds in points)
    return plots.curves(lines, "width", top, lambda v: f"{v * 1e3:.1f} ms", [str(row.width) for row in rows])


def _paragraph(text: str, bad: bool = False) -> str:
    opened = '<p class="bad">' if bad else "<p>"
    return f"{opened}{escape(text)}</p>"


def _defined(terms: Iterable[tuple[str, str]]) -> str:
    return f"<dl>{''.join(f'<dt>{escape(name)}</dt><dd>{escape(text)}</dd>' for name, text in terms)}</dl>"


def _section(table: Table[Any]) -> str:
    """A heading, the table and the explanations of its columns."""
    shown = table.filled
    heads = "".join(f'<th scope="col">{escape(column.head)}</th>' for column in shown)
    parts = []
    for name, entries in table.groups.items():
        title = f'<tr><th scope="rowgroup" colspan="{len(shown)}"><span>{escape(name)}</span></th></tr>' if name else ""
        lines = [[column.cell(entry) for column in shown] for entry in entries]
        cells = [
            f'<th scope="row">{plots.breakable(first)}</th>' + "".join(f"<td>{escape(cell)}</td>" for cell in rest)
            for first, *rest in lines
        ]
        parts.append(f"<tbody>{title}{''.join(f'<tr>{line}</tr>' for line in cells)}</tbody>")
    return (
        f'<h2>{escape(table.title)}</h2>\n<div class="scroll" tabindex="0"><table><thead><tr>{heads}</tr></thead>'
        f"{''.join(parts)}</table></div>\n{_defined(table.legend)}"
    )
