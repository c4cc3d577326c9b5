"""Pages of the methods, from cards, classes and measured figures: an index, and a section for each."""

from __future__ import annotations

import dataclasses
import inspect
import io
import json
import tokenize
from collections.abc import Iterator
from itertools import groupby
from typing import Any

from pages.source import ROOT
from truedraft import registry
from truedraft.card import values_of

MEASURED = ROOT / "benchmarks" / "results" / "methods.json"
NOTHING = "nothing"


def index() -> list[str]:
    """Every method by kind and family, with what it needs and what it cannot do."""
    lines: list[str] = []
    for kind, about in registry.KINDS.items():
        lines += [f"**{about.title}**", "", "| family | method | needs | restrictions |", "|---|---|---|---|"]
        found = sorted((registry.method(kind, name).card.family, name) for name in registry.names(kind))
        for family, group in groupby(found, key=lambda one: one[0]):
            for i, (_, name) in enumerate(group):
                method = registry.method(kind, name)
                lines.append(
                    f"| {'' if i else family} | [`{name}`](#{anchor(kind, name)}) | {', '.join(needs(method))} "
                    f"| {'; '.join(restrictions(kind, name))} |"
                )
        lines.append("")
    return lines


def by_needs() -> list[str]:
    """What drafters need beyond the target, and which drafters need it."""
    found: dict[tuple[str, ...], list[str]] = {}
    for name in registry.names("drafters"):
        found.setdefault(needs(registry.method("drafters", name)), []).append(name)
    lines = ["| needs | drafters |", "|---|---|"]
    for what, names in sorted(found.items(), key=lambda one: (one[0] != (NOTHING,), one[0])):
        lines.append(f"| {', '.join(what)} | {', '.join(f'`{name}`' for name in names)} |")
    return lines


def needs(method: Any) -> tuple[str, ...]:
    return tuple(method.card.needs) or (NOTHING,)


def restrictions(kind: str, name: str) -> Iterator[str]:
    """The restrictions of a method, from its card and its class."""
    method = registry.method(kind, name)
    for target, reason in method.card.cannot.items():
        yield f"not for {target} targets: {reason}"
    if getattr(method, "learner", None) is not None and "training" in method.card.needs:
        yield "drafts for the target that it was trained for, or one of the same sizes and tokens"
    if getattr(method, "autoregressive", False):
        yield "each level of a draft costs a pass of the draft model"
    if kind.startswith("accept"):
        if method.guarantee == "none":
            yield "lossy"
        yield "sampling only" if method.samples else "greedy decoding only"
        if method.accepts_draws is not None:
            kinds = " or ".join(f"`{draws}`" for draws in sorted(method.accepts_draws))
            yield f"drafts must be {kinds} (`DraftTree.draws`)"


def anchor(kind: str, name: str) -> str:
    """The anchor of a method's section; headings contain the kind where names are ambiguous."""
    return heading(kind, name).replace("`", "").replace("/", "").replace(" ", "-").replace(":", "").lower()


def heading(kind: str, name: str) -> str:
    shared = sum(name in registry.names(other) for other in registry.KINDS) > 1
    return (
        f"{'Lossy rule' if kind == 'accept.lossy' else 'Rule'}: `{name}`"
        if shared and kind != "drafters"
        else f"`{name}`"
    )


def section(kind: str, name: str) -> list[str]:
    method = registry.method(kind, name)
    card = method.card
    lines = [f"### {heading(kind, name)}", "", card.idea, "", f"Paper: {card.paper}."]
    if kind.startswith("accept"):
        lines[-1] += f" Guarantee: `{method.guarantee}`."
    if card.published:
        lines += ["", f"Published: {card.published}"]
    if figures := measured(kind, name):
        lines += ["", "Measured here:", "", *figures]
    if card.presets:
        shown = ", ".join(f"`{p}` ({', '.join(f'{k}={v}' for k, v in kn.items())})" for p, kn in card.presets.items())
        lines += ["", f"Presets: {shown}."]
    for one, lacks in card.lacks.items():
        lines += ["", f"**A part of its paper:** `{one}`: {lacks}."]
    if card.also:
        shown = [f"`{other}`" + (f" ({answer})" if answer else "") for other, answer in card.also.items()]
        lines += ["", f"Also for: {', '.join(shown)}."]
    if found := knobs(method):
        lines += ["", "Knobs:", "", *found]
    return [*lines, ""]


def sections() -> list[str]:
    lines: list[str] = []
    for kind, about in registry.KINDS.items():
        lines += [f"## {about.title}", "", f"{about.use} `accelerate(model, {about.argument}='{about.spelling}')`.", ""]
        for name in registry.names(kind):
            lines += section(kind, name)
    return lines


def knobs(method: type) -> list[str]:
    """One line per knob: its default, its valid values and its trailing comment."""
    comments = {}
    for token in tokenize.generate_tokens(io.StringIO(inspect.getsource(method)).readline):
        if token.type == tokenize.COMMENT:
            comments[token.line.split(":")[0].strip()] = token.string.lstrip("# ")
    fields = [f for f in dataclasses.fields(method) if not f.name.startswith("_")]  # type: ignore[arg-type]
    valid = {f.name: f" ({values})" for f in fields if (values := values_of(method, f.name)) is not None}
    return [f"- `{f.name}` = `{f.default}`{valid.get(f.name, '')}: {comments.get(f.name, '')}" for f in fields]


def measured(kind: str, name: str) -> list[str]:
    """The figures of `benchmarks/results/methods.json`, a line for each setting and unit."""
    lines = []
    figures = json.loads(MEASURED.read_text("utf-8")).get(kind, {}).get(name, [])
    for (unit, setting, machine, command), group in groupby(
        figures, key=lambda f: (f["unit"], f["setting"], f["machine"], f["command"])
    ):
        found = list(group)
        values = "; ".join(f"{f['what']} {value}" for f, value in zip(found, alike(found), strict=True))
        by = f", by `{command}`" if command else ""
        notes = "".join(f" {f['note']}" for f in found if "note" in f)
        lines.append(f"- {unit[0].upper()}{unit[1:]} ({setting}; {machine}{by}): {values}.{notes}")
    return lines


def alike(figures: list[dict[str, Any]]) -> list[str]:
    """The values as text, all numbers with the same decimals, those of the longest."""
    numbers = [f["value"] for f in figures if not isinstance(f["value"], str)]
    decimals = max((len(str(n).partition(".")[2]) for n in numbers), default=0)
    return [f["value"] if isinstance(f["value"], str) else f"{f['value']:.{decimals}f}" for f in figures]
